"""Sums and differences of positions along two axes as reals, by strength reduction.

A tile of `i - j` as f32 takes an integer subtraction and a conversion for every element, and a conversion takes a GPU
as long as an exponential. The places in a block (`lanes`) are the same in every block: they and the first position
are converted, one dim at a time, and only real tiles are subtracted. A scalar that the tile is multiplied by goes
to either side, too.

    d: i32[i, j] = i - j                        r: f32[i] = f32(lanes(i)) + f32(start(i) - start(j))
    x: f32[i, j] = s * f32(d)            ->     x: f32[i, j] = s * r - s * f32(lanes(j))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from eqfuse.fast_dataclass import dataclass
from eqfuse.tile import nodes as ir
from eqfuse.tile.def_use import Uses
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.passes.draft import Draft, changed, in_kernels
from eqfuse.tile.walk import nested, pruned


def split_positions(program: ir.TileProgram) -> ir.TileProgram:
    """Sums and differences of positions along two axes are converted to f32 side by side."""
    return in_kernels(program, lambda kernel: _Split(kernel).run() if any(_converted(kernel)) else kernel)


def error(difference: float, block: float) -> float:
    """How far a scalar times a difference of positions may be off, in units of 2**-24 of the scalar: each side is at
    most the difference and the block, and is rounded with the product; so is the result. Positions are below 2**24, where
    f32 is exact; without a scalar nothing is rounded."""
    return (difference + block) + block + difference + 1


def _converted(kernel: ir.Kernel) -> Iterator[bool]:
    """For every value of a kernel whether it is a tile of integers as reals."""
    for stmt in nested(kernel.body):
        if isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Cast):
            yield len(stmt.value.dims) > 1 and stmt.value.dtype == "f32" and stmt.op.value.dtype in INTEGERS


@dataclass(frozen=True)
class _Run:
    """Consecutive integers along an axis, from `first` on, a scalar."""

    axis: str
    first: ir.Value


class _Split:
    def __init__(self, kernel: ir.Kernel) -> None:
        self._kernel = kernel
        self._uses = Uses(kernel)
        self._whole = {block.axis for block in kernel.blocks if block.kind == "whole"}
        self._draft = Draft(kernel)
        self._made: list[ir.Let] = []

    def run(self) -> ir.Kernel:
        body = changed(self._kernel.body, self._let)
        if body == self._kernel.body:
            return self._kernel
        made = self._draft.kernel_of(body)
        return replace(made, body=pruned(made.body))

    def _let(self, let: ir.Let) -> Sequence[ir.Stmt]:
        self._made = []
        match let.op:
            case ir.Cast(source, False) if let.value.dtype == "f32":
                found = self._sides(source)
            case ir.Elementwise("mul", (left, right)) if let.value.dtype == "f32":
                found = self._times(left, right) or self._times(right, left)
            case _:
                found = None
        if found is None:
            return (let,)
        fn, *sides = found
        one, other = (self._aligned(side, let.value.dims) for side in sides)
        return (*self._made, ir.Let(let.value, ir.Elementwise(fn, (one, other))))

    def _times(self, value: ir.Value, scalar: ir.Value) -> tuple[str, ir.Value, ir.Value] | None:
        """The sides of a difference of positions that only this product reads, times its scalar."""
        op = self._uses.ops.get(value.name)
        if scalar.dims or not isinstance(op, ir.Cast) or op.written or not self._uses.is_inlined(value):
            return None
        found = self._sides(op.value)
        if found is None:
            return None
        fn, one, other = found
        one, other = (
            self._new(side.name, side.dims, "f32", ir.Elementwise("mul", (scalar, side)))
            for side in (one, other)
        )
        return fn, one, other

    def _sides(self, source: ir.Value) -> tuple[str, ir.Value, ir.Value] | None:
        """A sum or difference of consecutive integers along two axes: its function, and both sides as f32."""
        match self._uses.ops.get(source.name):
            case ir.Elementwise("add" | "sub" as fn, (left, right)):
                one, other = self._run_of(left), self._run_of(right)
            case _:
                return None
        if one is None or other is None or one.axis == other.axis:
            return None
        first = self._integer(fn, one.first, other.first)
        real = self._new(f"{first.name}_f32", (), "f32", ir.Cast(first))
        lanes = self._lanes(one.axis)
        moved = self._new(f"{one.axis}_real", lanes.dims, "f32", ir.Elementwise("add", (lanes, real)))
        return fn, moved, self._lanes(other.axis)

    def _run_of(self, value: ir.Value) -> _Run | None:
        match self._uses.ops.get(value.name):
            case ir.Positions(axis):
                start = ir.Constant(0) if axis in self._whole else ir.Start(axis)
                return _Run(axis, self._new(f"{axis}_first", (), "i32", start))
            case ir.Align(source):
                return self._run_of(source)
            case ir.Elementwise("add" | "sub" as fn, (left, right)) if (
                not right.dims and right.dtype == "i32"
            ):
                found = self._run_of(left)
                return found and replace(found, first=self._integer(fn, found.first, right))
            case _:
                return None

    def _integer(self, fn: str, left: ir.Value, right: ir.Value) -> ir.Value:
        return self._new("first", (), "i32", ir.Elementwise(fn, (left, right)))

    def _lanes(self, axis: str) -> ir.Value:
        lanes = self._new(f"{axis}_lanes", (axis,), "i32", ir.Lanes(axis))
        return self._new(f"{axis}_lanes_f32", (axis,), "f32", ir.Cast(lanes))

    def _aligned(self, value: ir.Value, dims: tuple[str, ...]) -> ir.Value:
        return value if value.dims == dims else self._new(value.name, dims, value.dtype, ir.Align(value))

    def _new(self, wanted: str, dims: tuple[str, ...], dtype: str, op: ir.Op) -> ir.Value:
        value = self._draft.new(wanted, dims, dtype)
        self._made.append(ir.Let(value, op))
        return value
