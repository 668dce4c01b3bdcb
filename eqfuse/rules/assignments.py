"""A merge as assignments, one after the other: what a loop, the merge of shards and a stream run alike.

Names are those of rules/merge.py: `m` and `m_a`, `m_b` are read, `m_tile`, `m_new` and `m_final` assigned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eqfuse.rules.merge import Group, Merge
from eqfuse.terms.assume import simplified
from eqfuse.terms.folds import (
    contribution,
    fold_of,
    identity,
    rank_axes,
    sides,
    whole_identity,
    written_out,
)
from eqfuse.terms.nodes import Call, Const, Expr, Fold, Local, Reduce, replaced, transform, walk


@dataclass(frozen=True)
class Assignment:
    """`name[dims] = value`, on the way to the next value of `state`. A value that is a Reduce folds the tile alone."""

    state: str
    name: str
    dims: tuple[str, ...]
    value: Expr


def updates(group: Group, merge: Merge) -> Iterator[Assignment]:
    """What a tile makes of the states that a loop has seen."""
    return _updated(group, merge, lambda value: value)


def of_none(group: Group, merge: Merge) -> Iterator[Assignment]:
    """What a tile makes of states that have seen nothing."""
    unseen: dict[str, Expr] = {state.name: identity(state.op) for state in group.states}
    return _updated(
        group, merge, lambda value: transform(simplified(value, unseen, Const(True), True), _other_side)
    )


def _updated(group: Group, merge: Merge, known: Callable[[Expr], Expr]) -> Iterator[Assignment]:
    """The parts and the values of updates, these with what is `known` of the states before."""
    dims = _dims(group)
    for update in merge.update:
        state = update.state
        for part in update.parts:
            yield Assignment(state, part.name, dims[state], Reduce(part.op, group.axis, part.body))
        yield Assignment(state, f"{state}_new", dims[state], written_out(known(update.value)))


def combines(group: Group, merge: Merge) -> Iterator[Assignment]:
    """What the states of two parts make."""
    dims = _dims(group)
    for combine in merge.combine:
        state = combine.state
        yield Assignment(state, f"{state}_new", dims[state], written_out(combine.value))


def finishes(group: Group, merge: Merge) -> Iterator[Assignment]:
    """The exact values of the states that are not exact as they are carried; each reads the carried ones."""
    dims = _dims(group)
    for finish in merge.finish:
        state = finish.state
        yield Assignment(state, f"{state}_final", dims[state], finish.value)


def of_one(group: Group, merge: Merge, read: Callable[[str, Expr], Expr]) -> tuple[Expr, ...]:
    """The states of one position alone, in the order of the group: an update of states that have seen nothing. `read` is what the
    position contributes to a reduction, by its op and body. An element may be infinite: only the update is simplified."""
    known: dict[str, Expr] = {}

    def written(expr: Expr) -> Expr:
        names = {
            node: known[node.name] for node in walk(expr) if isinstance(node, Local) and node.name in known
        }
        return replaced(expr, names)

    for each in of_none(group, merge):
        value = each.value
        if isinstance(value, Reduce):
            value = contribution(Reduce(value.op, group.axis, read(value.op, value.body)))
        known[each.name] = written(value)
    return tuple(known[f"{state.name}_new"] for state in group.states)


def _other_side(node: Expr) -> Expr:
    """What a fold's combination with its identity is: the other side."""
    if isinstance(node, Call) and (found := fold_of(node.fn)) is not None:
        fold, place = found
        left, right = sides(node)
        if left == fold.identity:
            return right[place]
    return node


def fold_of_merge(name: str, group: Group, merge: Merge) -> Fold | None:
    """The merge as one fold of all states, in the order of the positions; None where it reads more than the states of two parts."""
    values: dict[Expr, Expr] = {}
    for each in combines(group, merge):
        value = replaced(
            transform(each.value, lambda node: Local(node.name, ()) if isinstance(node, Local) else node),
            values,
        )
        values[Local(each.name, ())] = value
    sides = {
        Local(f"{state.name}_{end}", ()): Local(f"{state.name}{side}", ())
        for state in group.states
        for end, side in (("a", 1), ("b", 2))
    }
    states = group.states
    combine = tuple(replaced(values[Local(f"{state.name}_new", ())], sides) for state in states)
    if any(not isinstance(node, Local | Const | Call) for node in walk(*combine)):
        return None
    if any(rank_axes(part) for part in combine):
        return None
    return Fold(
        name,
        tuple(state.name for state in states),
        tuple(whole_identity(state.op) for state in states),
        combine,
        reductions=tuple(state.op for state in states),
    )


def _dims(group: Group) -> dict[str, tuple[str, ...]]:
    return {state.name: state.dims for state in group.states}
