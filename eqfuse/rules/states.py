"""States of a group of reductions over one axis: their names, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eqfuse.rules.guards import kept
from eqfuse.rules.merge import State
from eqfuse.rules.split import Split
from eqfuse.terms.folds import siblings
from eqfuse.terms.nodes import Axis, Expr, Local, Program, Reduce, free_axes, reductions, replaced, walk


def axis_order(program: Program) -> tuple[str, ...]:
    """Every axis of a program: those of outputs as they are written, then the rest as they appear."""
    order = dict.fromkeys(axis for output in program.outputs for axis in output.axes)
    for node in walk(*(output.expr for output in program.outputs)):
        if isinstance(node, Axis):
            order.setdefault(node.name)
    return tuple(order)


def dims_of(expr: Expr, order: Sequence[str]) -> tuple[str, ...]:
    free = free_axes(expr)
    return tuple(axis for axis in order if axis in free)


def name_states(
    axis: str, reduces: Sequence[Reduce], order: Sequence[str], suffix: str = ""
) -> tuple[State, ...]:
    """States for reductions over one axis, in dependency order; bodies read earlier ones as `Local`."""
    names: dict[Expr, Local] = {}
    states: list[State] = []
    for reduce in reduces:
        name = _state_name(reduce.op, axis, suffix, states)
        dims = dims_of(reduce, order)
        body = replaced(reduce.body, names)
        names[reduce] = Local(name, dims)
        states.append(State(name, reduce.op, body, dims))
    return (*states, *_other_variables(axis, suffix, states))


def _state_name(op: str, axis: str, suffix: str, states: Sequence[State]) -> str:
    """A name that none of `states` has: its operation and axis, numbered from the second on."""
    stem = f"{op.replace('.', '_')}_{axis}{suffix}"
    taken = sum(1 for s in states if s.op == op)
    return stem if not taken else f"{stem}{taken + 1}"


def _other_variables(axis: str, suffix: str, states: Sequence[State]) -> tuple[State, ...]:
    """The state variables of folds that no reduction of the group asks for: a part is combined with all of them."""
    have = {(state.op, state.body) for state in states}
    found: list[State] = []
    for state in states:
        for other in siblings(Reduce(state.op, axis, state.body)):
            if (other.op, other.body) not in have:
                have.add((other.op, other.body))
                name = _state_name(other.op, axis, suffix, (*states, *found))
                found.append(State(name, other.op, other.body, state.dims, auxiliary=True))
    return tuple(found)


def name_auxiliaries(
    axis: str, suffix: str, order: Sequence[str], states: Sequence[State], wanted: Iterable[Reduce]
) -> tuple[State, ...]:
    """Further states for these reductions and for those over the same axis inside them."""
    taken = sum(1 for s in states if s.auxiliary)
    names: dict[Expr, Local] = {}
    found: list[State] = []
    for reduce in (r for r in reductions(*wanted) if r.axis == axis):
        body = replaced(reduce.body, names)
        dims = dims_of(Reduce(reduce.op, axis, body), order)
        name = f"aux_{axis}{suffix}{taken + len(found) + 1}"
        names[reduce] = Local(name, dims)
        found.append(State(name, reduce.op, body, dims, auxiliary=True))
    return tuple(found)


def split_of(axis: str, states: Iterable[State]) -> Split:
    return Split.of(axis, ((s.name, s.op, s.body) for s in states))


def kept_by_masks(state: State, split: Split) -> Reduce | None:
    """Whether masks keep any position for a state that is to be recovered, as 1 or 0; None where there are none."""
    body = kept(state.body, state.op, split)
    return None if body is None else Reduce("max", split.axis, body)
