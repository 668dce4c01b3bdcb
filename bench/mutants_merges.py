"""Mistakes in derived merges: how the states of a tile or a shard join those of what came before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeVar

from bench.mutants_terms import swapped_operands
from bench.mutation import Mutant, Same, Step, even_in, everywhere
from eqfuse.rules.merge import Combine, Group, Merge, State, Update
from eqfuse.terms.folds import fold_of, identity, merged, ranks_of, sides
from eqfuse.terms.nodes import COMBINE, Call, Const, Expr, Local, call, children, replaced, walk

S = TypeVar("S", Update, Combine)
Change = Callable[[Group, Expr, State], Iterable[Expr | Same]]
"""Wrong values for a state of a group, from the right one."""
Mutation = Callable[[Group], Iterator[Group | Same]]


def _locals(expr: Expr) -> set[str]:
    return {node.name for node in walk(expr) if isinstance(node, Local)}


def _reads_both(expr: Expr, group: Group) -> bool:
    names = _locals(expr)
    old = {f"{state.name}{side}" for state in group.states for side in ("", "_a", "_b")}
    new = {f"{state.name}_new" for state in group.states}
    return bool(names & old) and bool(names & new)


def _repairs(expr: Expr, group: Group) -> list[Call]:
    """The innermost differences and quotients of an old value of the states and a new one: r against r'."""
    return [
        node
        for node in walk(expr)
        if isinstance(node, Call)
        and node.fn in ("sub", "div")
        and _reads_both(node, group)
        and not any(_reads_both(child, group) for child in children(node))
    ]


def _on_repairs(step: Step) -> Change:
    def change(group: Group, value: Expr, _: State) -> Iterator[Expr | Same]:
        for repair in _repairs(value, group):
            for new in step(repair):
                negated = repair.fn == "sub" and new is call("sub", repair.args[1], repair.args[0])
                if negated and even_in(value, repair):
                    yield Same("the repair is squared")
                else:
                    yield replaced(value, {repair: new})

    return change


def _dropped(repair: Expr) -> Iterator[Expr]:
    match repair:
        case Call("sub", _):
            yield Const(0.0)
        case Call("div", _):
            yield Const(1.0)


def _twice(repair: Expr) -> Iterator[Expr]:
    match repair:
        case Call("sub", _):
            yield call("add", repair, repair)
        case Call("div", _):
            yield call("mul", repair, repair)


def _repaired_sum(group: Group, value: Expr) -> tuple[Expr, Expr, Expr] | None:
    """`(f, s, t)` of a value `f s + t` whose factor f repairs."""
    match value:
        case Call("add", (Call("mul", (factor, state)), tile)) if _reads_both(factor, group):
            return factor, state, tile
    return None


def _repair_on_both(group: Group, value: Expr, _: State) -> Iterator[Expr]:
    if (parts := _repaired_sum(group, value)) is not None:
        factor, state, tile = parts
        yield call("mul", factor, call("add", state, tile))


def _repair_on_the_other(group: Group, value: Expr, _: State) -> Iterator[Expr]:
    if (parts := _repaired_sum(group, value)) is not None:
        factor, state, tile = parts
        yield call("add", state, call("mul", factor, tile))


def _lost(suffix: str) -> Change:
    """The state itself (or its value in one of two parts) is taken for the identity."""

    def change(_: Group, value: Expr, state: State) -> Iterator[Expr]:
        name = f"{state.name}{suffix}"
        reads = {node for node in walk(value) if isinstance(node, Local) and node.name == name}
        if reads:
            yield replaced(value, {node: identity(state.op) for node in reads})

    return change


def _again(suffix: str) -> Change:
    """One side is folded in once more."""

    def change(_: Group, value: Expr, state: State) -> Iterator[Expr | Same]:
        if state.op in ("sum", "prod"):
            yield call(COMBINE[state.op], value, Local(f"{state.name}{suffix}", state.dims))
        else:
            yield Same(f"a {state.op} may be folded twice")

    return change


def _addends(value: Expr) -> Counter[Expr]:
    match value:
        case Call("add", (a, b)):
            return _addends(a) + _addends(b)
    return Counter([value])


def _sides_swapped(_: Group, value: Expr, state: State) -> Iterator[Expr | Same]:
    """The repair of one part is applied to the other."""
    other = {"a": "b", "b": "a"}
    mapping: dict[Expr, Expr] = {}
    for node in walk(value):
        match node:
            case Local(name, dims) if name[-2:] in ("_a", "_b") and name[:-2] != state.name:
                mapping[node] = Local(name[:-1] + other[name[-1]], dims)
    swapped = replaced(value, mapping)
    alike = swapped is not value and _addends(swapped) == _addends(value)
    yield Same("both sides' repairs are added to the whole") if alike else swapped


def _changed_merge(merge: Merge, part: Literal["update", "combine"], steps: tuple[Any, ...]) -> Merge:
    return replace(merge, update=steps) if part == "update" else replace(merge, combine=steps)


def _in_merge(part: Literal["update", "combine"], change: Change) -> Mutation:
    """One step of the merge of a tile, or of that of two shards, changed."""

    def mutate(group: Group) -> Iterator[Group | Same]:
        if group.merge is not None:
            for steps in _changed(group, getattr(group.merge, part), change):
                if isinstance(steps, Same):
                    yield steps
                else:
                    yield replace(group, merge=_changed_merge(group.merge, part, steps))

    return mutate


def _in_updates(change: Change) -> Mutation:
    return _in_merge("update", change)


def _in_combines(change: Change) -> Mutation:
    return _in_merge("combine", change)


def _changed(group: Group, steps: tuple[S, ...], change: Change) -> Iterator[tuple[S, ...] | Same]:
    """The steps of a merge with the value of one of them changed."""
    states = {state.name: state for state in group.states}
    for at, step in enumerate(steps):
        for value in change(group, step.value, states[step.state]):
            if isinstance(value, Same):
                yield value
            elif value is not step.value:
                changed: list[S] = list(steps)
                changed[at] = replace(step, value=value)
                yield tuple(changed)


def _tile_again(group: Group) -> Iterator[Group | Same]:
    """The first part of an update is folded in once more."""

    def change(_: Group, value: Expr, state: State) -> Iterator[Expr]:
        parts = {update.state: update.parts for update in _merge(group).update}[state.name]
        if parts and state.op in ("sum", "prod"):
            yield call(COMBINE[state.op], value, Local(parts[0].name, state.dims))

    return _in_updates(change)(group)


def _tile_lost(group: Group) -> Iterator[Group | Same]:
    def change(_: Group, value: Expr, state: State) -> Iterator[Expr]:
        for update in _merge(group).update:
            for part in update.parts if update.state == state.name else ():
                yield replaced(value, {Local(part.name, state.dims): identity(part.op)})

    return _in_updates(change)(group)


def _merge(group: Group) -> Merge:
    assert group.merge is not None
    return group.merge


def _in_parts(step: Callable[[Group], Step]) -> Mutation:
    """Mutations of what is folded over the current tile."""

    def mutate(group: Group) -> Iterator[Group | Same]:
        if group.merge is None:
            return
        updates = group.merge.update
        for at, update in enumerate(updates):
            for bodies in everywhere(step(group), tuple(part.body for part in update.parts)):
                parts = tuple(replace(p, body=body) for p, body in zip(update.parts, bodies, strict=True))
                changed = (*updates[:at], replace(update, parts=parts), *updates[at + 1 :])
                yield replace(group, merge=replace(group.merge, update=changed))

    return mutate


def _stale(group: Group) -> Step:
    """r for r': the value of before the tile."""
    return _other_value(group, "")


def _of_the_tile(group: Group) -> Step:
    """The tile's own value for the merged one."""
    return _other_value(group, "_tile")


def _other_value(group: Group, suffix: str) -> Step:
    known = {state.name for state in group.states} | {
        part.name for update in _merge(group).update for part in update.parts
    }

    def step(node: Expr) -> Iterator[Expr]:
        match node:
            case Local(name, dims) if name.endswith("_new") and name.removesuffix("_new") + suffix in known:
                yield Local(name.removesuffix("_new") + suffix, dims)

    return step


def _counts(group: Group) -> set[str]:
    """Names of the merged counts: of a constant at every position seen. They are not 0 once there is a tile."""
    return {f"{s.name}_new" for s in group.states if isinstance(s.body, Const) and s.body.value > 0}


def _guards(group: Group, value: Expr, _: State) -> Iterator[Expr | Same]:
    counts = _counts(group)
    for node in walk(value):
        match node:
            case Call("div", (Call("invertible", _), Call("invertible", _))):
                yield Same("a ratio of scales is made finite, and multiplies 0 where one of them is 0")
            case Call("div", (_, Call("invertible", (Local(name, _),)))) if name in counts:
                yield Same("a tile that is merged has a position, so the count is not 0")
            case Call("div", (dividend, Call("invertible", (divisor,)))):
                yield replaced(value, {node: call("div", dividend, divisor)})


def _guards_in_parts(group: Group) -> Step:
    counts = _counts(group)

    def step(node: Expr) -> Iterator[Expr]:
        match node:
            case Call("invertible", (Local(name, _) as scale,)) if name not in counts:
                yield scale

    return step


def _ranks(how: Literal["apart", "twice"]) -> Change:
    """Two lists are combined rank by rank, or what comes first of one of them is listed twice."""

    def change(_: Group, value: Expr, state: State) -> Iterator[Expr]:
        for node in walk(value):
            if isinstance(node, Call) and (ranks := ranks_of(node)) is not None:
                found = fold_of(node.fn)
                assert found is not None  # it has ranks
                fold, index = found
                left, right = sides(node)
                apart, twice = fold.combined(left, right)[index], merged(node.fn, ranks, left, left)
                yield replaced(value, {node: apart if how == "apart" else twice})

    return change


def _mutant(name: str, what: str, mutate: Mutation) -> Mutant:
    return Mutant(name, "merge", what, mutate)


MUTANTS = (
    _mutant("repair dropped", "H(r) / H(r') becomes 1", _in_updates(_on_repairs(_dropped))),
    _mutant("repair inverted", "r and r' swapped in the repair", _in_updates(_on_repairs(swapped_operands))),
    _mutant("repair applied twice", "H(r) / H(r') becomes its square", _in_updates(_on_repairs(_twice))),
    _mutant("repair on the tile as well", "f s + t becomes f (s + t)", _in_updates(_repair_on_both)),
    _mutant("repair on the wrong side", "f s + t becomes s + f t", _in_updates(_repair_on_the_other)),
    _mutant("tile under the old r", "the tile's part reads r instead of r'", _in_parts(_stale)),
    _mutant(
        "tile under its own r", "the tile's part reads the tile's r instead of r'", _in_parts(_of_the_tile)
    ),
    _mutant("state forgotten", "the update takes the tile alone", _in_updates(_lost(""))),
    _mutant("tile forgotten", "the update keeps the state alone", _tile_lost),
    _mutant("tile merged twice", "the tile's part is folded in once more", _tile_again),
    _mutant(
        "shard's repair dropped", "the same as above, between shards", _in_combines(_on_repairs(_dropped))
    ),
    _mutant("shard's repair inverted", "between shards", _in_combines(_on_repairs(swapped_operands))),
    _mutant("shard's repair applied twice", "between shards", _in_combines(_on_repairs(_twice))),
    _mutant("shards' repairs swapped", "each side gets the other's repair", _in_combines(_sides_swapped)),
    _mutant("shard merged twice", "a shard's state is folded in once more", _in_combines(_again("_b"))),
    _mutant("shard forgotten", "the merge keeps the earlier shards alone", _in_combines(_lost("_b"))),
    _mutant("earlier shards forgotten", "the merge takes the last shard alone", _in_combines(_lost("_a"))),
    _mutant("ranks apart", "each rank of both lists is combined alone", _in_updates(_ranks("apart"))),
    _mutant("rank taken twice", "the loop's list merged with itself", _in_updates(_ranks("twice"))),
    _mutant("shards' ranks apart", "each rank of both lists alone", _in_combines(_ranks("apart"))),
    _mutant("shard's rank taken twice", "a shard's list with itself", _in_combines(_ranks("twice"))),
    _mutant("guard of zero dropped", "a state is divided by a count that is 0", _in_updates(_guards)),
    _mutant("tile's guard dropped", "a tile is divided by a scale that is 0", _in_parts(_guards_in_parts)),
)
