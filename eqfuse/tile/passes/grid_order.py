"""In which order program instances take the blocks of a grid axis.

Where later blocks walk further (the end of a loop grows with the block's first position, as under a causal
mask), they go first: what starts last is then short, and the device is not left with a few long instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from eqfuse.tile import nodes as ir
from eqfuse.tile.passes.draft import in_kernels
from eqfuse.tile.walk import nested, ops_of


def longest_first(program: ir.TileProgram) -> ir.TileProgram:
    """Axes of the grid along which loops get longer are walked from their last block on."""
    return in_kernels(program, _kernel)


def _kernel(kernel: ir.Kernel) -> ir.Kernel:
    found = last_first(kernel)
    backwards = tuple(axis for axis in kernel.grid if axis in found)
    return kernel if backwards == kernel.backwards else replace(kernel, backwards=backwards)


def last_first(kernel: ir.Kernel) -> frozenset[str]:
    """The grid axes with loops that end later, the later a block is."""
    ops = ops_of(kernel.body)
    ends = [stmt.stop for stmt in nested(kernel.body) if isinstance(stmt, ir.For)]
    return frozenset(axis for axis in kernel.grid if any(_slope(end, axis, ops) == 1 for end in ends))


def _slope(value: ir.Value, axis: str, ops: Mapping[str, ir.Op]) -> int | None:
    """1 or -1 where a value never falls or never rises with the first position of a block of `axis`, 0 where it
    does not depend on it, None where neither is known."""
    match ops.get(value.name):
        case ir.Start(own):
            return 1 if own == axis else 0
        case ir.Constant() | ir.Argument() | ir.Extent() | ir.BlockSize() | ir.LaunchValue():
            return 0
        case ir.Align(source) | ir.Cast(source):
            return _slope(source, axis, ops)
        case ir.Elementwise("add" | "minimum" | "maximum", (left, right)):
            return _joined(_slope(left, axis, ops), _slope(right, axis, ops))
        case ir.Elementwise("sub", (left, right)):
            falling = _slope(right, axis, ops)
            return _joined(_slope(left, axis, ops), None if falling is None else -falling)
        case ir.Elementwise("mul" | "floordiv", (left, right)) if isinstance(
            ops.get(right.name), (ir.Extent, ir.BlockSize)
        ):
            return _slope(left, axis, ops)
        case _:
            return None


def _joined(left: int | None, right: int | None) -> int | None:
    if left is None or right is None or left * right == -1:
        return None
    return left or right
