"""Loops that visit nothing for ordinary data: consumers walk them alone, in short blocks or position by position.

A producer does not know what consumers have computed, and what a rare loop reads is in no ring. So the kernel is divided
without its rare loops, as if what their conditions ask for never were. Each consumer then tests its own rows, behind the
loop whose states the rare one goes on with, and loads what it needs where it is:

    for j in where(some, a, b)..b rare:       ->    some = any(test of the part's rows)
        s = s + dot(p, v)                           for j_single in where(some, a, b)..b:
                                                        s = s + p[:, j_single] * v[j_single]

A loop without products goes on in blocks that are so short that registers hold tiles of memory. The body at one position has no tiles along the axis: its maxima and sums along it are what it has there, its products outer ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eqfuse.extract.unsuited import Unsuited
from eqfuse.loops.blocks import Block
from eqfuse.tile import nodes as ir
from eqfuse.tile.names import Fresh
from eqfuse.tile.roles.nodes import Stmt
from eqfuse.tile.walk import defined, defined_by, mapped, nested, operands, pruned, renamed

STEP = 32
"""Positions of a short block: the registers of a tile of so many rows are there beside the sums."""


def without_rare(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel for data that enters no rare loop."""
    if not any(isinstance(stmt, ir.For) and stmt.rare for stmt in nested(kernel.body)):
        return kernel
    return replace(kernel, body=pruned(_without(kernel.body)))


def _without(body: Sequence[ir.Stmt]) -> tuple[ir.Stmt, ...]:
    names: dict[str, ir.Value] = {}
    made: list[ir.Stmt] = []
    for stmt in body:
        match stmt:
            case ir.For(carried=carried, rare=True):
                names |= {item.value.name: names.get(item.init.name, item.init) for item in carried}
            case ir.For(body=inner):
                made.append(renamed(replace(stmt, body=_without(inner)), names))
            case _:
                made.append(renamed(stmt, names))
    return tuple(made)


@dataclass(frozen=True)
class Rare:
    """A rare loop, and what of the kernel makes what it reads, from what loops carry."""

    lets: tuple[ir.Let, ...]
    loop: ir.For[ir.Stmt]


def rare_loops(kernel: ir.Kernel) -> tuple[Rare, ...]:
    """The rare loops of a kernel, in their order. Raises Unsuited where one is inside of another loop, or needs more than numbers of
    rows."""
    made: list[Rare] = []
    lets: dict[str, ir.Let] = {}
    for stmt in kernel.body:
        match stmt:
            case ir.Let(value, _):
                lets[value.name] = stmt
            case ir.For(rare=True):
                made.append(Rare(_slice(stmt, lets), stmt))
            case ir.For(body=inner) if any(isinstance(s, ir.For) and s.rare for s in nested(inner)):
                raise Unsuited("a rare loop inside of another one")
    return tuple(made)


def _slice(loop: ir.For[ir.Stmt], lets: Mapping[str, ir.Let]) -> tuple[ir.Let, ...]:
    """The statements that make what a loop reads."""
    own = {value.name for value in defined((loop,))}
    pending = [v.name for s in nested((loop,)) for v in operands(s) if v.name not in own]
    found: dict[str, ir.Let] = {}
    while pending:
        name = pending.pop()
        if name in lets and name not in found:
            if isinstance(lets[name].op, ir.Dot | ir.NonFiniteCorrection) or _is_loaded_tile(lets[name]):
                raise Unsuited(f"a rare loop reads the tile {name}")
            found[name] = lets[name]
            pending += [v.name for v in operands(lets[name].op)]
    return tuple(let for name, let in lets.items() if name in found)


def _is_loaded_tile(let: ir.Let) -> bool:
    return isinstance(let.op, ir.LoadTile) and len(let.value.dims) > 1


@dataclass
class Axes:
    """The axes that rare loops are over, and what they are positions of: `units` of single positions, `steps` of short blocks."""

    units: dict[str, str] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[Block, ...]:
        short = (Block(axis, "loop", STEP) for axis in self.steps)
        return (*(Block(axis, "unit", 1) for axis in self.units), *short)


def with_rare(body: tuple[Stmt, ...], rares: Sequence[Rare], fresh: Fresh, axes: Axes) -> tuple[Stmt, ...]:
    """A consumer's body with the rare loops behind the last one whose states they go on with."""
    if not rares:
        return body
    read = {v.name for rare in rares for stmt in (*rare.lets, rare.loop) for v in operands(stmt)}
    place = max((n for n, stmt in enumerate(body) if read & _left_by(stmt)), default=-1)
    if place < 0:
        raise Unsuited("a rare loop that goes on from no other loop")
    some = _condition(rares[0])
    numbers = {let.value.name for rare in rares for let in rare.lets if isinstance(let.op, ir.Constant)}
    inits = {item.init.name for rare in rares for item in rare.loop.carried} - numbers
    tests: list[Stmt] = []
    made: list[Stmt] = []
    names: dict[str, ir.Value] = {}  # what stands for a value of the kernel
    ends: dict[str, ir.Value] = {}  # for what loops leave, behind the rare ones
    for rare in rares:
        for let in rare.lets:
            if let.value.name not in names:
                new = fresh.like(let.value, "rare")
                is_before = some.name not in names or let.value.name in inits
                (tests if is_before else made).append(renamed(let, {**names, let.value.name: new}))
                names[let.value.name] = new
        loop = _positions_of(renamed(rare.loop, names), fresh, axes)
        made.append(loop)
        for old, item in zip(rare.loop.carried, loop.carried, strict=True):
            names[old.value.name] = item.value
            origin = next((name for name, value in ends.items() if value == item.init), old.init.name)
            if origin not in numbers:
                ends[origin] = item.value
    before = {value.name: value for stmt in body[: place + 1] for value in defined_by(stmt)} | names
    ends = {name: value for name, value in ends.items() if before.get(name) not in (None, value)}
    after = {name: fresh.like(before[name], "whole") for name in ends}
    results = tuple(ir.Result(after[name], value, before[name]) for name, value in ends.items())
    branch = ir.If(names[some.name], tuple(made), results)
    rest = (stmt for stmt in body[place + 1 :] if not (isinstance(stmt, ir.Let) and stmt.value.name in after))
    return (*body[: place + 1], *tests, branch, *(renamed(stmt, after) for stmt in rest))


def _condition(rare: Rare) -> ir.Value:
    """The condition under which the first rare loop is walked, and so any."""
    for let in rare.lets:
        match let:
            case ir.Let(value, ir.Elementwise("where", (some, _, _))) if value == rare.loop.start:
                return some
    raise Unsuited("a rare loop that is always walked")


def _left_by(stmt: Stmt) -> set[str]:
    return {value.name for value in defined_by(stmt)} if isinstance(stmt, ir.For) else set()


def _positions_of(loop: ir.For[ir.Stmt], fresh: Fresh, axes: Axes) -> ir.For[Stmt]:
    """A rare loop over short blocks, or, where it multiplies matrices along its axis, over single positions."""
    lets = [let for let in loop.body if isinstance(let, ir.Let)]
    if any(isinstance(let.op, ir.Dot | ir.NonFiniteCorrection) for let in lets):
        axes.units[f"{loop.axis}_single"] = loop.axis
        return _Single(loop, f"{loop.axis}_single", fresh).run()
    step = f"{loop.axis}_rest"
    axes.steps[step] = loop.axis
    own = {value.name: fresh.like(value, "rare") for value in defined((loop,))}

    def along(value: ir.Value) -> ir.Value:
        value = own.get(value.name, value)
        return replace(value, dims=tuple(step if axis == loop.axis else axis for axis in value.dims))

    def one(let: ir.Let) -> ir.Let:
        made = mapped(let, along)
        own_axis: Any = made.op
        return (
            replace(made, op=replace(own_axis, axis=step))
            if getattr(made.op, "axis", "") == loop.axis
            else made
        )

    carried = tuple(ir.Carried(along(c.value), c.init, along(c.next)) for c in loop.carried)
    return ir.For(step, loop.start, loop.stop, carried, tuple(map(one, lets)), rare=True)


class _Single:
    """A rare loop, a block of which is one position."""

    def __init__(self, loop: ir.For[ir.Stmt], unit: str, fresh: Fresh) -> None:
        self.loop, self.axis, self.unit, self.fresh = loop, loop.axis, unit, fresh
        self.at = fresh.value(f"{loop.axis}_at_single", (), "i32")
        self.names: dict[str, ir.Value] = {}
        self.made: list[ir.Let] = []
        self.ops: dict[str, ir.Op] = {let.value.name: let.op for let in loop.body if isinstance(let, ir.Let)}
        rests = [op for op in self.ops.values() if isinstance(op, ir.NonFiniteCorrection)]
        self.rests = {op.total.name for op in rests}

    def run(self) -> ir.For[Stmt]:
        self.made.append(ir.Let(self.at, ir.Start(self.unit)))
        for item in self.loop.carried:
            self.names[item.value.name] = self.fresh.like(item.value, "rare")
        for stmt in self.loop.body:
            if not isinstance(stmt, ir.Let):
                raise Unsuited("a rare loop with a loop or a store inside")
            self.names[stmt.value.name] = self._one(stmt.value, stmt.op)
        carried = tuple(
            ir.Carried(self._read(item.value), item.init, self._whole(self._read(item.next), item.value))
            for item in self.loop.carried
        )
        return ir.For(self.unit, self.loop.start, self.loop.stop, carried, tuple(self.made), rare=True)

    def _read(self, value: ir.Value) -> ir.Value:
        return self.names.get(value.name, value)

    def _new(self, like: ir.Value, dims: tuple[str, ...], op: ir.Op, dtype: str | None = None) -> ir.Value:
        made = replace(self.fresh.like(like, "single"), dims=dims, dtype=dtype or like.dtype)
        self.made.append(ir.Let(made, op))
        return made

    def _whole(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """A value with the dims of another one, which has all of its own."""
        if value.dims == like.dims:
            return value
        if not value.dims:  # a number of all positions
            return self._new(like, like.dims, ir.Elementwise("add", (value, self._zero(like))))
        return self._new(like, like.dims, ir.Align(value), value.dtype)

    def _zero(self, like: ir.Value) -> ir.Value:
        return self._new(like, (), ir.Constant(0.0))

    def _one(self, value: ir.Value, op: ir.Op) -> ir.Value:
        """A value of the body at the position."""
        dims = tuple(axis for axis in value.dims if axis != self.axis)
        match op:
            case ir.Positions(axis) | ir.Start(axis) if axis == self.axis:
                return self.at
            case ir.Bound(axis, stop) if axis == self.axis:
                return self._new(value, (), ir.Elementwise("lt", (self.at, self._read(stop))))
            case ir.Align(source):
                source = self._read(source)
                return source if source.dims in ((), dims) else self._new(value, dims, ir.Align(source))
            case ir.ReduceTile(_, source, axis) if axis == self.axis:
                return self._converted(self._read(source), value)
            case ir.Dot(axis=axis) | ir.NonFiniteCorrection(axis=axis) if axis == self.axis:
                return self._product(value, op)
            case ir.Dot() | ir.NonFiniteCorrection():
                raise Unsuited(f"a rare loop multiplies matrices along {op.axis}")
            case ir.Elementwise(fn, args, division):
                read = tuple(map(self._read, args))
                wide = dims if any(arg.dims for arg in read) else ()
                return self._new(value, wide, ir.Elementwise(fn, read, division))
            case ir.Cast(source, written):
                source = self._read(source)
                return self._new(value, source.dims, ir.Cast(source, written))
            case ir.FinitePart(source):
                source = self._read(source)
                return self._new(value, source.dims, ir.FinitePart(source))
            case ir.LoadTile(tensor, index, mask, other):
                places = tuple(map(self._read, index))
                inside = None if mask is None else self._read(mask)
                return self._new(value, dims, ir.LoadTile(tensor, places, inside, other))
            case ir.Constant():
                return self._new(value, (), op)
            case _ if self.axis not in value.dims and not any(v.name in self.names for v in operands(op)):
                return self._new(value, value.dims, op)
        raise Unsuited(f"a rare loop computes {value.name}")

    def _converted(self, value: ir.Value, like: ir.Value) -> ir.Value:
        return value if value.dtype == like.dtype else self._new(like, value.dims, ir.Cast(value), like.dtype)

    def _product(self, value: ir.Value, op: ir.Op) -> ir.Value:
        """An outer product, added to what there is; what a mask excludes is not added."""
        assert isinstance(op, ir.Dot | ir.NonFiniteCorrection)
        if isinstance(op, ir.Dot) and (op.left_mask or op.right_mask):
            raise Unsuited("a rare loop with products of masked operands")
        if isinstance(op, ir.NonFiniteCorrection) and op.right_mask is not None:
            raise Unsuited("a product whose right operand is masked")
        before = op.accumulator if isinstance(op, ir.Dot) else op.total
        base = None if before is None else self._read(before)
        if isinstance(op, ir.Dot) and value.name in self.rests:  # what is not finite comes with the rest
            return self._new(value, value.dims, ir.Align(base)) if base is not None else self._filled(value)
        left, right = (self._whole(self._real(self._read(side)), value) for side in (op.left, op.right))
        product = self._new(value, value.dims, ir.Elementwise("mul", (left, right)))
        if isinstance(op, ir.NonFiniteCorrection) and op.left_mask is not None:
            mask = self._read(op.left_mask)
            if mask.dims not in ((), value.dims):
                mask = self._new(mask, value.dims, ir.Align(mask))
            product = self._new(
                value, value.dims, ir.Elementwise("where", (mask, product, self._zero(value)))
            )
        return (
            product if base is None else self._new(value, value.dims, ir.Elementwise("add", (base, product)))
        )

    def _filled(self, value: ir.Value) -> ir.Value:
        zero = self._zero(value)
        return self._new(value, value.dims, ir.Elementwise("add", (zero, zero)))

    def _real(self, value: ir.Value) -> ir.Value:
        return value if value.dtype == "f32" else self._new(value, value.dims, ir.Cast(value), "f32")
