"""Building a kernel body: every op once, as far outside as what it reads allows, under a readable name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

import numpy as np

from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.blocks import Block
from eqfuse.terms import integers
from eqfuse.terms.floats import rounded
from eqfuse.terms.nodes import Expr
from eqfuse.tile import nodes as ir
from eqfuse.tile.check import TileError
from eqfuse.tile.dtypes import INTEGERS, identity, operand_dtypes, result_dtype
from eqfuse.tile.names import Fresh
from eqfuse.tile.walk import defined, nested, operands, used

LARGEST_WHOLE = 2**53
"""Up to it float64 holds every integer, and a float's shortest decimal is the integer itself."""


@dataclass
class Binding:
    """What a name of the nest stands for: a value; or, while `value` is None, an expression over an
    axis that no open loop walks, computed where it is read. `expr` is None for carried values."""

    value: ir.Value | None
    expr: Expr | None


@dataclass
class Scope:
    """One level of loops under construction; the first is the kernel body."""

    axis: str | None = None
    stop: ir.Value | None = None
    masked: bool = False
    rare: bool = False
    body: list[ir.Stmt] = field(default_factory=list)
    ops: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    values: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    names: dict[str, Binding] = field(default_factory=dict)


class Builder:
    """Emits the ops of one kernel. `reserved` are names that no value may have; `domains` maps a
    renamed axis to the axis whose extent it has."""

    def __init__(
        self,
        blocks: Mapping[str, Block],
        domains: Mapping[str, str],
        reserved: Iterable[str],
        accumulate: str,
    ) -> None:
        self.blocks = blocks
        self.domains = domains
        self.accumulate = accumulate
        self.scopes = [Scope()]
        self.ops: dict[str, ir.Op] = {}
        self._rank = {axis: rank for rank, axis in enumerate(blocks)}
        self._levels: dict[str, int] = {}
        self._names = Fresh(reserved)

    # Axes ---------------------------------------------------------------------------------------

    def is_tile(self, axis: str) -> bool:
        """Whether the axis is a dim of tiles; otherwise it is a scalar position."""
        block = self.blocks[axis]
        return block.kind in ("loop", "whole") or (block.kind == "grid" and block.size != 1)

    def is_open(self, axis: str) -> bool:
        """Whether positions of the axis exist here: a grid or whole axis, or one that an open loop walks."""
        return self.blocks[axis].kind in ("grid", "whole") or self.level_of_axis(axis) > 0

    def is_ragged(self, axis: str) -> bool:
        """Whether the block of a tile axis may have positions past the end here."""
        level = self.level_of_axis(axis)
        return self.scopes[level].masked if level else self.is_tile(axis)

    def level_of_axis(self, axis: str) -> int:
        for level in range(len(self.scopes) - 1, 0, -1):
            if self.scopes[level].axis == axis:
                return level
        return 0

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Axes in the common order that operands are reconciled to: that of the kernel's blocks."""
        return tuple(sorted(set(axes), key=self._rank.__getitem__))

    # Scopes -------------------------------------------------------------------------------------

    @property
    def level(self) -> int:
        return len(self.scopes) - 1

    def open(self, axis: str, stop: ir.Value, masked: bool, *, rare: bool = False) -> None:
        self.scopes.append(Scope(axis, stop, masked, rare))

    def carry(self, hint: str, dims: tuple[str, ...], dtype: str) -> ir.Value:
        """A value carried by the loop that was just opened."""
        return self._name(hint, dims, dtype, self.level)

    def close(self, start: ir.Value, carried: Sequence[ir.Carried]) -> None:
        """Ends the innermost loop and places it as far outside as what it reads allows."""
        scope = self.scopes.pop()
        assert scope.axis is not None and scope.stop is not None
        loop = ir.For(
            scope.axis, start, scope.stop, tuple(carried), tuple(scope.body), scope.masked, scope.rare
        )
        inside = {value.name for value in defined((loop,))}
        read = [self._levels[name] for name in used((loop,)) - inside]
        level = self.level if any(isinstance(s, ir.Store) for s in nested((loop,))) else max(read, default=0)
        for item in carried:
            self._levels[item.value.name] = level
        self.scopes[level].body.append(loop)

    def store(self, store: ir.Store) -> None:
        self.scopes[-1].body.append(store)

    # Names of the nest --------------------------------------------------------------------------

    def bind(self, name: str, binding: Binding) -> None:
        """From here on, in the innermost scope, the name stands for this."""
        scope = self.scopes[-1]
        if name in scope.names:
            scope.values.clear()
        scope.names[name] = binding

    def level_of_name(self, name: str) -> int:
        for level in range(self.level, -1, -1):
            if name in self.scopes[level].names:
                return level
        raise TileError(f"{name!r} is read before it is computed")

    def binding(self, name: str) -> Binding:
        return self.scopes[self.level_of_name(name)].names[name]

    # Ops ----------------------------------------------------------------------------------------

    def emit(self, op: ir.Op, dims: tuple[str, ...], dtype: str, hint: str) -> ir.Value:
        """The value of an op: a new one, or the one that the same op has already."""
        level = self._level(op, dims)
        scope = self.scopes[level]
        # 0.0 and -0.0 are equal, NaN is not: numbers are told apart by their text
        key = (repr(op) if isinstance(op, (ir.Constant, ir.LoadTile)) else op, dims, dtype)
        found = scope.ops.get(key)
        if found is None:
            found = self._name(hint, dims, dtype, level)
            self.ops[found.name] = op
            scope.ops[key] = found
            scope.body.append(ir.Let(found, op))
        return found

    def constant(self, number: float | bool, dtype: str) -> ir.Value:
        """A number in a dtype. An integer that a float need not hold is rounded by a cast: the field sees the integer."""
        if dtype not in INTEGERS and isinstance(number, int) and abs(number) > LARGEST_WHOLE:
            return self.emit(ir.Cast(self.constant(number, "i64")), (), dtype, f"c_{dtype}")
        if dtype not in INTEGERS:
            number = float(number)
        return self.emit(ir.Constant(number), (), dtype, "c")

    def start(self, axis: str) -> ir.Value:
        return self.emit(ir.Start(axis), (), "i32", f"{axis}_start" if self.is_tile(axis) else f"{axis}_at")

    def positions(self, axis: str) -> ir.Value:
        return self.emit(ir.Positions(axis), (axis,), "i32", f"{axis}_at")

    def extent(self, axis: str) -> ir.Value:
        axis = self.domains.get(axis, axis)
        return self.emit(ir.Extent(axis), (), "i32", f"{axis}_size")

    def block_size(self, axis: str) -> ir.Value:
        return self.emit(ir.BlockSize(axis), (), "i32", f"{axis}_block")

    def bound(self, axis: str) -> ir.Value:
        """Which positions of a ragged block exist."""
        stop = self.scopes[self.level_of_axis(axis)].stop if self.level_of_axis(axis) else self.extent(axis)
        assert stop is not None
        if self.blocks[axis].valid is not None:
            valid = self.constant(self.blocks[axis].step, "i32")
            end = self.integer("add", self.start(axis), valid, f"{axis}_end")
            stop = self.integer("minimum", end, stop, f"{axis}_end")
        return self.emit(ir.Bound(axis, stop), (axis,), "bool", f"{axis}_in")

    def align(self, value: ir.Value, dims: tuple[str, ...]) -> ir.Value:
        """`value` permuted and expanded to `dims`."""
        if value.dims == dims:
            return value
        op = self.ops.get(value.name)
        if isinstance(op, ir.Constant):
            return self.emit(ir.Fill(op.number), dims, value.dtype, "fill")
        return self.emit(ir.Align(value), dims, value.dtype, value.name)

    def cast(self, value: ir.Value, dtype: str, hint: str = "", *, written: bool = False) -> ir.Value:
        """The value in a dtype; `written` where the program says so, and not the numerics policy."""
        if value.dtype == dtype and not written:
            return value
        op = self.ops.get(value.name)
        if written and isinstance(op, ir.Constant) and dtype != value.dtype and not _holds(dtype, op.number):
            return self.emit(ir.Cast(value, written), (), dtype, hint or f"{value.name}_{dtype}")
        if isinstance(op, ir.Constant) and (dtype not in INTEGERS or value.dtype in INTEGERS):
            return self.constant(op.number, dtype)
        if isinstance(op, ir.Constant) and math.isinf(op.number):
            return self.constant(identity("min" if op.number > 0 else "max", dtype), dtype)
        if isinstance(op, ir.Constant) and float(op.number).is_integer():
            return self.constant(int(op.number), dtype)
        return self.emit(ir.Cast(value, written), value.dims, dtype, hint or f"{value.name}_{dtype}")

    def truth(self, value: ir.Value) -> ir.Value:
        """A condition as it is; a number as whether it is not 0."""
        if value.dtype == "bool":
            return value
        zero = self.constant(0, value.dtype)
        return self.emit(ir.Elementwise("ne", (value, zero)), value.dims, "bool", f"{value.name}_true")

    def elementwise(self, fn: str, args: Sequence[ir.Value], hint: str) -> ir.Value:
        """An elementwise function: operands converted as the numerics policy says, and reconciled."""
        dtypes = [arg.dtype for arg in args]
        wanted = operand_dtypes(fn, dtypes, self.accumulate)
        cast = [
            self.truth(arg) if dtype == "bool" else self.cast(arg, dtype)
            for arg, dtype in zip(args, wanted, strict=True)
        ]
        dtype = result_dtype(fn, dtypes, self.accumulate)
        if dtype == "i64" and fn in integers.INTEGER_FUNCTIONS and all(arg.dtype in INTEGERS for arg in cast):
            numbers = [self._number(arg) for arg in cast]
            if (
                None not in numbers
            ):  # printed, they would be an expression of Python, whose integers do not wrap
                return self.constant(int(integers.call(fn, tuple(map(np.array, numbers)))), dtype)
        return self.reconciled(fn, cast, dtype, hint)

    def reconciled(self, fn: str, args: Sequence[ir.Value], dtype: str, hint: str) -> ir.Value:
        """An elementwise function of operands that have their dtypes already, their dims reconciled."""
        dims = self.ordered(axis for arg in args for axis in arg.dims)
        operands = tuple(self.align(arg, dims) if arg.dims else arg for arg in args)
        return self.emit(ir.Elementwise(fn, operands), dims, dtype, hint)

    def integer(self, fn: str, left: ir.Value, right: ir.Value, hint: str = "n") -> ir.Value:
        """Integer arithmetic of loop ranges, folded where it is trivial."""
        a, b = self._number(left), self._number(right)
        if a is not None and b is not None:
            return self.constant(_FOLD[fn](a, b), "i32")
        if fn == "add" and a is not None:
            return self._shifted(right, a, hint)
        if fn in ("add", "sub") and b is not None:
            return self._shifted(left, b if fn == "add" else -b, hint)
        if left == right and fn in ("maximum", "minimum", "sub"):
            return self.constant(0, "i32") if fn == "sub" else left
        if fn == "maximum" and b == 0 and self._is_nonnegative(left):
            return left
        return self.elementwise(fn, (left, right), hint)

    def _shifted(self, value: ir.Value, by: int, hint: str) -> ir.Value:
        """`value + by`, with one addition where `value` is a shifted one already."""
        match self.ops.get(value.name):
            case ir.Elementwise("add" | "sub" as fn, (base, offset)) if (
                number := self._number(offset)
            ) is not None:
                value, by = base, by + (number if fn == "add" else -number)
        if by == 0:
            return value
        amount = self.constant(abs(by), value.dtype)
        return self.elementwise("add" if by > 0 else "sub", (value, amount), hint)

    def _number(self, value: ir.Value) -> int | None:
        op = self.ops.get(value.name)
        return int(op.number) if isinstance(op, ir.Constant) else None

    def _is_nonnegative(self, value: ir.Value) -> bool:
        return isinstance(self.ops.get(value.name), (ir.Extent, ir.Start, ir.BlockSize))

    def _level(self, op: ir.Op, dims: tuple[str, ...]) -> int:
        levels = [*(self._levels[value.name] for value in operands(op)), *map(self.level_of_axis, dims)]
        if isinstance(op, (ir.Start, ir.Positions, ir.Bound)):
            levels.append(self.level_of_axis(op.axis))
        return max(levels, default=0)

    def _name(self, hint: str, dims: tuple[str, ...], dtype: str, level: int) -> ir.Value:
        value = self._names.value(hint, dims, dtype)
        self._levels[value.name] = level
        return value


def _holds(dtype: str, number: float) -> bool:
    """Whether a dtype of reals has a number as it is."""
    return bool(rounded(np.array(number, np.float64), dtype) == number)


_FOLD: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b if b else 0,
    "maximum": lambda a, b: max(a, b),
    "minimum": lambda a, b: min(a, b),
}
