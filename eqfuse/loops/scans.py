"""Prefixes tile by tile: what a tile has up to each position, joined with what is before the tile.

`updates` of a merge carry the states from tile to tile as in any rolling loop. At each position of a tile they are, with the
states `a` before the tile and the prefix `b` within it, what `combines` makes of the two; and the prefixes within the tile are a
scan of the merge itself, which is associative: its value does not depend on where parts are cut.

    for k in tiles:  m_new, s_new = update(m, s, tile)                        states after the tile
                     m_upto[k], s_upto[k] = scan of (m_one[k], s_one[k])      prefixes within the tile
                     m_here[k], s_here[k] = combine((m, s), (m_upto[k], s_upto[k]))

Where one row is long, its shards are scanned at the same time (Blelloch, "Prefix sums and their applications", 1990): a kernel
makes the states of each shard, one that of all shards before each, from where a third goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from eqfuse.loops.builder import Builder
from eqfuse.loops.share import rename_locals
from eqfuse.rules.assignments import combines, finishes, fold_of_merge, of_one, updates
from eqfuse.rules.merge import Group, Merge
from eqfuse.terms.folds import all_unpacked, only_where, packed
from eqfuse.terms.nodes import (
    Axis,
    Const,
    Expr,
    Local,
    Reduce,
    Scan,
    Size,
    call,
    substitute_axes,
    transform,
)
from eqfuse.terms.prefixes import Prefix

Read = Callable[[Expr], Expr]
"""An expression that reads the exact values of states of other groups."""


@dataclass(frozen=True)
class Order:
    """The order in which a loop over an axis visits positions for a prefix. `at` maps the axis of the prefix to the position that an
    iteration is at, `source` is the one that comes in: one that is `late` by so many positions."""

    axis: str
    at: Mapping[str, Expr]
    source: Expr
    late: int

    @staticmethod
    def of(axis: str, prefix: Prefix, late: int) -> Order:
        first, last = Axis(axis), call("sub", call("sub", Size(axis), Const(1)), Axis(axis))
        at = {prefix.at: last if prefix.backwards != prefix.mirrored else first}
        source: Expr = last if prefix.backwards else first
        if late:
            source = call("add" if prefix.backwards else "sub", source, Const(late))
        return Order(axis, at, source, late)

    def placed(self, expr: Expr) -> Expr:
        """An expression at the position of the iteration."""
        return substitute_axes(expr, {**self.at, self.axis: self.source})

    def read(self, op: str, body: Expr) -> Expr:
        """What comes in to a reduction: nothing at the first iterations of a late one."""
        placed = packed([self.placed(part) for part in all_unpacked(body)])
        has_one = call("ge", Axis(self.axis), Const(self.late))
        return only_where(has_one, op, placed) if self.late else placed

    def index(self, axes: tuple[str, ...]) -> tuple[Expr, ...]:
        """Where an output of these axes is stored."""
        return tuple(self.at.get(axis, Axis(axis)) for axis in axes)


def rolled(build: Builder, group: Group, merge: Merge, order: Order, exactly: Read) -> None:
    """The states after a tile, as `<state>_new`."""
    for each in updates(group, merge):
        match exactly(each.value):
            case Reduce(op, axis, body):
                build.fold(each.name, each.dims, op, axis, order.read(op, body))
            case value:
                build.let(each.name, each.dims, order.placed(value))


def prefixes(build: Builder, group: Group, merge: Merge, order: Order, exactly: Read, name: str) -> Read:
    """The states at each position of a tile; what makes an expression at the position of the loop read them. `name` is one for the fold
    that combines them."""
    axis = order.axis

    def along(names: Mapping[str, str]) -> Read:
        """Values at each position of the tile, for states."""

        def step(node: Expr) -> Expr:
            if isinstance(node, Local) and node.name in names:
                return Local(names[node.name], (*build.dims(node.dims), axis))
            return node

        return lambda expr: transform(expr, step)

    upto = scanned(
        build, group, merge, axis, name, of_one(group, merge, lambda op, body: order.read(op, exactly(body)))
    )
    here = {f"{state.name}_new": f"{state.name}_here" for state in group.states}
    before = {f"{state.name}_a": state.name for state in group.states}
    for each in combines(group, merge):
        value = rename_locals(along({**upto, **here})(exactly(each.value)), before)
        build.let(here[each.name], (*build.dims(each.dims), axis), value)
    exact = {state.name: f"{state.name}_here" for state in group.states}
    seen = along(exact)
    for final in finishes(group, merge):
        build.let(final.name, (*build.dims(final.dims), axis), seen(order.placed(exactly(final.value))))
        exact = {**exact, final.state: final.name}
    finished = along(exact)
    return lambda expr: finished(order.placed(exactly(expr)))


def scanned(
    build: Builder, group: Group, merge: Merge, axis: str, name: str, states: tuple[Expr, ...], first: int = 0
) -> dict[str, str]:
    """The prefixes within a tile, of what each position from the `first` on has alone; their names, by the names that the merge has
    for the second of two parts."""
    fold = fold_of_merge(name, group, merge)
    assert fold is not None  # the schedule asks for one
    dims = build.dims(dict.fromkeys(axis for state in group.states for axis in state.dims))
    body = packed(states)
    for place, state in enumerate(group.states):
        build.let(f"{state.name}_upto", (*dims, axis), Scan(fold, place, axis, body, first))
    return {f"{state.name}_b": f"{state.name}_upto" for state in group.states}
