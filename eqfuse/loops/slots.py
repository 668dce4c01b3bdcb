"""Work shared out by what there is to do: shards of rows whose lengths data gives.

Where a kernel splits an axis, its program instances are counted by the position of a row (`axes`) and of a shard. With slots,
these numbers say nothing of the row: instances are dealt out to rows by how long each is, so that no instance has more to do than
others, however long one row is and however short the rest are.

    <name>_slots     for every row the number of its parts, and the instances of all rows before it: `first`, `last`
    <name>_partial   an instance finds the row with first <= instance < last, and takes that part of it
    <name>_merge     a row merges the states that its instances have stored

With S shards there are S instances a row. A part is as long as all rows together, over S - 1 instances a row; so parts rounded
up, at most one more a row, have an instance each. Instances that are left over have nothing to visit, and store that.

How long a row is is an estimate (`Range`): a row is divided among its parts whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from eqfuse.loops.nodes import Kernel, Let, Loop, Slots, Stmt, Store
from eqfuse.loops.plan import Range
from eqfuse.loops.walk import defined, rewritten
from eqfuse.terms.nodes import (
    Axis,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Size,
    call,
    substitute_axes,
    transform,
)

MOST_SHARES = 8
"""So many times the parts that a row has on average one row has at most: they are merged a few at a time."""


def counting(name: str, split: str, range_: Range, slots: Slots, names: Sequence[tuple[str, ...]]) -> Kernel:
    """The kernel that deals the instances out to rows, for the group that splits the axis `split`. `names` are three sets of names
    for axes with the extents of `range_.axes`."""
    axes, sizes = range_.axes, [Size(axis) for axis in range_.axes]
    body: list[Stmt] = []

    def length(names: Sequence[str]) -> Expr:
        at: Mapping[str, Expr] = dict(zip(axes, map(Axis, names), strict=True))
        start, stop = (substitute_axes(end, at) for end in (range_.start, range_.stop))
        found = call("minimum", stop, Size(split))
        found = found if start is Const(0) else call("sub", found, call("maximum", start, Const(0)))
        return call("maximum", found, Const(0))

    total = _folded(body, "total", "sum", names[0], length(names[0]))
    longest = _folded(body, "longest", "max", names[1], length(names[1]))
    spare = instances = call("sub", Size(slots.shard), Const(1))
    for size in sizes:
        instances = call("mul", instances, size)
    # With one shard no instance is to spare: every row has one part.
    most = call("maximum", call("mul", Const(MOST_SHARES), spare), Const(1))
    part = call("maximum", quotient_up(total, instances), quotient_up(longest, most))
    body.append(Let("part", (), call("maximum", part, Const(1))))
    before = quotient_up(length(names[2]), Local("part", ()))
    before = call("where", _is_before(names[2], axes), before, Const(0))
    first = _folded(body, "first", "sum", names[2], before)
    index = tuple(map(Axis, axes))
    body.append(Store(slots.first, index, (), first))
    own = quotient_up(length(axes), Local("part", ()))
    body.append(Store(slots.last, index, (), call("add", first, own)))
    return Kernel(name, axes, tuple(body))


def quotient_up(value: Expr, by: Expr) -> Expr:
    """`value / by`, rounded up."""
    return call("floordiv", call("add", value, call("sub", by, Const(1))), by)


def _folded(body: list[Stmt], name: str, op: str, axes: Sequence[str], value: Expr) -> Expr:
    """A value folded over axes, the last one first, one statement for each."""
    for place in reversed(range(len(axes))):
        dims = tuple(axes[:place])
        mine = name if not place else f"{name}_{place}"
        body.append(Let(mine, dims, Reduce(op, axes[place], value)))
        value = Local(mine, dims)
    return value


def _is_before(left: Sequence[str], right: Sequence[str]) -> Expr:
    """Whether a position is before another one, the first axes counting most."""
    at, than = Axis(left[-1]), Axis(right[-1])
    found = call("lt", at, than)
    for mine, other in zip(reversed(left[:-1]), reversed(right[:-1]), strict=True):
        same = call("and", call("eq", Axis(mine), Axis(other)), found)
        found = call("or", call("lt", Axis(mine), Axis(other)), same)
    return found


def instance(axes: Sequence[str], shard: str) -> Expr:
    """The number of the program instance at a position of rows and shards."""
    found: Expr = Axis(axes[0])
    for axis in axes[1:]:
        found = call("add", call("mul", found, Size(axis)), Axis(axis))
    return call("add", call("mul", found, Size(shard)), Axis(shard))


@lru_cache(256)
def expanded(kernel: Kernel) -> Kernel:
    """A kernel with slots as one without: what it stands for, in statements."""
    slots = kernel.slots
    if slots is None:
        return kernel
    taken = set(defined(kernel.body))

    def local(name: str) -> Local:
        while name in taken:
            name += "_"
        return Local(name, ())

    number, mine = local("instance"), (local("part"), local("parts"))
    first, last = (Load(tensor, tuple(map(Axis, slots.others))) for tensor in (slots.first, slots.last))
    is_here = call("and", call("le", first, number), call("lt", number, last))
    head: list[Stmt] = [Let(number.name, (), instance(slots.axes, slots.shard))]
    at = {
        axis: _folded(
            head,
            local(f"{axis}_found").name,
            "sum",
            slots.others,
            call("where", is_here, Axis(other), Const(0)),
        )
        for axis, other in zip(slots.axes, slots.others, strict=True)
    }
    first, last = (Load(tensor, tuple(map(Axis, slots.rows))) for tensor in (slots.first, slots.last))
    parts = call("maximum", call("sub", last, first), Const(1))
    part = call(
        "minimum", call("sub", number, first), mine[1]
    )  # of instances that are left over, behind the last one
    lets = [Let(mine[1].name, (), parts), Let(mine[0].name, (), part)]
    body: tuple[Stmt, ...] = (*lets, *_at_rows(kernel.body, slots, mine))
    for axis, row in zip(reversed(slots.axes), reversed(slots.rows), strict=True):
        body = (Loop(row, at[axis], call("add", at[axis], Const(1)), True, (), body),)
    return replace(kernel, body=(*head, *body), slots=None)


def _at_rows(body: Iterable[Stmt], slots: Slots, part: tuple[Expr, Expr]) -> tuple[Stmt, ...]:
    """Statements at the row and the part that a slot works on; they store where the slot is."""
    rows: Mapping[str, Expr] = dict(zip(slots.axes, map(Axis, slots.rows), strict=True))
    parts = {Axis(slots.shard): part[0], Size(slots.shard): part[1]}

    def step(expr: Expr) -> Expr:
        return transform(substitute_axes(expr, rows), lambda node: parts.get(node, node))

    found: list[Stmt] = []
    for stmt in body:
        match stmt:
            case Store():
                found.append(replace(stmt, expr=step(stmt.expr)))
            case Loop(shard=shard):
                (moved,) = rewritten((replace(stmt, body=()),), step)
                assert isinstance(moved, Loop)
                inside = _at_rows(stmt.body, slots, part)
                found.append(replace(moved, body=inside, part=part if shard == slots.shard else stmt.part))
            case _:
                found += rewritten((stmt,), step)
    return tuple(found)
