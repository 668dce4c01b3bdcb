"""Integers that the launcher computes: quotients of extents.

Triton specialises a kernel for those of its integer parameters that are multiples of 16, and then loads
whole vectors from what they are offsets of. A quotient that the kernel computes is never known to be one:
positions that start at a multiple of it would be loaded one element at a time. On a CPU it is computed once
for all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from eqfuse.names import Names
from eqfuse.terms.nodes import Call, Const, Expr, Size, call, walk
from eqfuse.tile.nodes import (
    Argument,
    Constant,
    Elementwise,
    Extent,
    Kernel,
    LaunchValue,
    Let,
    Op,
    TileProgram,
)
from eqfuse.tile.passes.draft import changed, in_kernels
from eqfuse.tile.walk import ops_of, pruned

_FUNCTIONS = ("add", "sub", "mul", "floordiv")


def computed_at_launch(program: TileProgram) -> TileProgram:
    """A parameter in the place of every quotient of extents."""
    return in_kernels(program, _kernel)


def _kernel(kernel: Kernel) -> Kernel:
    ops = ops_of(kernel.body)
    taken = Names(op.name for op in ops.values() if isinstance(op, Argument | LaunchValue))
    names: dict[Expr, str] = {}
    values: dict[str, LaunchValue] = {}
    for value, op in ops.items():
        expr = _expr(op, ops)
        if isinstance(expr, Call) and expr.fn == "floordiv" and any(_sizes(expr.args[1])):
            if expr not in names:
                names[expr] = taken.fresh("_by_".join(dict.fromkeys(_sizes(expr))))
            values[value] = LaunchValue(names[expr], expr)
    if not values:
        return kernel

    def replaced(let: Let) -> tuple[Let]:
        return (replace(let, op=values.get(let.value.name, let.op)),)

    return replace(kernel, body=pruned(changed(kernel.body, replaced)))


def _expr(op: Op | None, ops: Mapping[str, Op]) -> Expr | None:
    """What an op is as a term over sizes; None where it is no such term. What a loop carries has no op."""
    match op:
        case Extent(axis):
            return Size(axis)
        case Constant(int(number)) if not isinstance(number, bool):
            return Const(number)
        case Elementwise(fn, (left, right)) if fn in _FUNCTIONS:
            sides = _expr(ops.get(left.name), ops), _expr(ops.get(right.name), ops)
            if sides[0] is None or sides[1] is None or (fn == "floordiv" and not _is_positive(sides[1])):
                return None
            return call(fn, sides[0], sides[1])
        case _:
            return None


def _is_positive(expr: Expr) -> bool:
    match expr:
        case Size():
            return True
        case Const(number):
            return number > 0
        case Call("add" | "mul", args):
            return all(map(_is_positive, args))
        case _:
            return False


def _sizes(expr: Expr) -> Iterator[str]:
    """Axes whose sizes a term is made of, from left to right."""
    return (node.axis for node in walk(expr) if isinstance(node, Size))
