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

from eqfuse.records import dataclass
from eqfuse.tile.def_use import Uses
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.nodes import (
    Align,
    Cast,
    Constant,
    Elementwise,
    Kernel,
    Lanes,
    Let,
    Op,
    Positions,
    Start,
    Stmt,
    TileProgram,
    Value,
)
from eqfuse.tile.passes.draft import Draft, changed, in_kernels
from eqfuse.tile.walk import nested, pruned

EXACT = 2**24
"""Up to this size integers are exact in f32."""


def split_positions(program: TileProgram) -> TileProgram:
    """Sums and differences of positions along two axes are converted to f32 side by side."""
    return in_kernels(program, lambda kernel: _Split(kernel).run() if any(_converted(kernel)) else kernel)


def error(difference: float, block: float) -> float:
    """How far a scalar times a difference of positions may be off, in units of 2**-24 of the scalar: each side is at
    most the difference and the block, and is rounded with the product; so is the result. Positions are below `EXACT`;
    without a scalar nothing is rounded."""
    return (difference + block) + block + difference + 1


def _converted(kernel: Kernel) -> Iterator[bool]:
    """For every value of a kernel whether it is a tile of integers as reals."""
    for stmt in nested(kernel.body):
        if isinstance(stmt, Let) and isinstance(stmt.op, Cast):
            yield len(stmt.value.dims) > 1 and stmt.value.dtype == "f32" and stmt.op.value.dtype in INTEGERS


@dataclass(frozen=True)
class _Run:
    """Consecutive integers along an axis, from `first` on, a scalar."""

    axis: str
    first: Value


class _Split:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._uses = Uses(kernel)
        self._whole = {block.axis for block in kernel.blocks if block.kind == "whole"}
        self._draft = Draft(kernel)
        self._made: list[Let] = []

    def run(self) -> Kernel:
        body = changed(self._kernel.body, self._let)
        if body == self._kernel.body:
            return self._kernel
        made = self._draft.kernel_of(body)
        return replace(made, body=pruned(made.body))

    def _let(self, let: Let) -> Sequence[Stmt]:
        self._made = []
        match let.op:
            case Cast(source, False) if let.value.dtype == "f32":
                found = self._sides(source)
            case Elementwise("mul", (left, right)) if let.value.dtype == "f32":
                found = self._times(left, right) or self._times(right, left)
            case _:
                found = None
        if found is None:
            return (let,)
        fn, *sides = found
        one, other = (self._aligned(side, let.value.dims) for side in sides)
        return (*self._made, Let(let.value, Elementwise(fn, (one, other))))

    def _times(self, value: Value, scalar: Value) -> tuple[str, Value, Value] | None:
        """The sides of a difference of positions that only this product reads, times its scalar."""
        op = self._uses.ops.get(value.name)
        if scalar.dims or not isinstance(op, Cast) or op.written or not self._uses.is_inlined(value):
            return None
        found = self._sides(op.value)
        if found is None:
            return None
        fn, one, other = found
        one, other = (
            self._new(side.name, side.dims, "f32", Elementwise("mul", (scalar, side)))
            for side in (one, other)
        )
        return fn, one, other

    def _sides(self, source: Value) -> tuple[str, Value, Value] | None:
        """A sum or difference of consecutive integers along two axes: its function, and both sides as f32."""
        match self._uses.ops.get(source.name):
            case Elementwise("add" | "sub" as fn, (left, right)):
                one, other = self._run_of(left), self._run_of(right)
            case _:
                return None
        if one is None or other is None or one.axis == other.axis:
            return None
        first = self._integer(fn, one.first, other.first)
        real = self._new(f"{first.name}_f32", (), "f32", Cast(first))
        lanes = self._lanes(one.axis)
        moved = self._new(f"{one.axis}_real", lanes.dims, "f32", Elementwise("add", (lanes, real)))
        return fn, moved, self._lanes(other.axis)

    def _run_of(self, value: Value) -> _Run | None:
        match self._uses.ops.get(value.name):
            case Positions(axis):
                start = Constant(0) if axis in self._whole else Start(axis)
                return _Run(axis, self._new(f"{axis}_first", (), "i32", start))
            case Align(source):
                return self._run_of(source)
            case Elementwise("add" | "sub" as fn, (left, right)) if not right.dims and right.dtype == "i32":
                found = self._run_of(left)
                return found and replace(found, first=self._integer(fn, found.first, right))
            case _:
                return None

    def _integer(self, fn: str, left: Value, right: Value) -> Value:
        return self._new("first", (), "i32", Elementwise(fn, (left, right)))

    def _lanes(self, axis: str) -> Value:
        lanes = self._new(f"{axis}_lanes", (axis,), "i32", Lanes(axis))
        return self._new(f"{axis}_lanes_f32", (axis,), "f32", Cast(lanes))

    def _aligned(self, value: Value, dims: tuple[str, ...]) -> Value:
        return value if value.dims == dims else self._new(value.name, dims, value.dtype, Align(value))

    def _new(self, wanted: str, dims: tuple[str, ...], dtype: str, op: Op) -> Value:
        value = self._draft.new(wanted, dims, dtype)
        self._made.append(Let(value, op))
        return value
