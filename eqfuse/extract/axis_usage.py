"""What each axis of a kernel is for, before its blocks are chosen."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from eqfuse.loops.blocks import Block, BlockKind
from eqfuse.loops.kernel_axes import KEPT, kernel_axes
from eqfuse.loops.nodes import Kernel, Loop
from eqfuse.loops.walk import expressions, loops_in, statements
from eqfuse.terms.integers import power_of_two
from eqfuse.terms.nodes import Axis, Call, Load, Reduce, free_axes, walk


@dataclass(frozen=True)
class AxisUsage:
    """What each axis of a kernel is for, before sizes are chosen."""

    parallel: tuple[str, ...]
    loops: tuple[str, ...]
    units: tuple[str, ...]
    single: frozenset[str]  # parallel axes of one position per block: a loop's range or a division needs it
    packable: frozenset[str]  # parallel axes of which no loop's range needs the position
    inner: tuple[str, ...]  # axes that are whole, or walked inside a body
    steps: frozenset[str]  # those of them that only matrix products contract: they may be walked in steps

    @classmethod
    @lru_cache(KEPT)
    def of(cls, kernel: Kernel, *, vectors: bool = False) -> AxisUsage:
        loops = {loop.axis: loop.unit for loop in loops_in(kernel.body)}
        dims: dict[str, None] = {}
        for stmt in statements(kernel.body):
            if isinstance(stmt, Loop):
                dims |= dict.fromkeys(d for c in stmt.carried for d in c.dims)
            else:
                dims |= dict.fromkeys(stmt.dims)
        bound: dict[str, bool] = {}
        axes = kernel_axes(kernel, vectors=vectors)
        for expr in expressions(kernel.body):
            for node in walk(expr):
                if isinstance(node, Reduce):
                    bound[node.axis] = bound.get(node.axis, True) and axes.contraction(node) is not None
        ranges = [free_axes(loop.start) | free_axes(loop.stop) for loop in loops_in(kernel.body)]
        counted = () if kernel.slots is None else kernel.slots.axes
        taken = {*kernel.parallel, *loops}
        inner = tuple(a for a in {**dims, **bound} if a not in taken)
        return cls(
            kernel.parallel,
            tuple(a for a, unit in loops.items() if not unit),
            tuple(a for a, unit in loops.items() if unit),
            divided_axes(kernel).union(counted, *ranges) & frozenset(kernel.parallel),
            frozenset(kernel.parallel).difference(counted, *ranges),
            inner,
            frozenset(a for a in inner if a not in dims and bound.get(a, False)),
        )


@lru_cache(KEPT)
def contiguous_axes(kernel: Kernel, *, widest: bool = False) -> tuple[str, ...]:
    """Axes that some load has last, most frequent first: memory is contiguous along them. With `widest`, loads
    that move along a part of the axes of another do not count."""
    count: dict[str, int] = {}
    loads = [n for e in expressions(kernel.body) for n in walk(e) if isinstance(n, Load) and n.index]
    axes = {free_axes(load) for load in loads}
    for load in loads:
        if isinstance(load.index[-1], Axis) and not (widest and any(free_axes(load) < a for a in axes)):
            name = load.index[-1].name
            count[name] = count.get(name, 0) + 1
    return tuple(sorted(count, key=lambda a: -count[a]))


@lru_cache(KEPT)
def divided_axes(kernel: Kernel) -> frozenset[str]:
    """Axes that some load divides (`K[h // g]`): a block of them would gather instead of slice."""
    found: set[str] = set()
    for expr in expressions(kernel.body):
        for node in walk(expr):
            if isinstance(node, Load):
                for part in walk(*node.index):
                    if isinstance(part, Call) and part.fn in ("floordiv", "mod"):
                        found |= free_axes(part)
    return frozenset(found)


def block_sizes(blocks: Iterable[Block], extents: Mapping[str, int]) -> dict[str, int]:
    """Positions of each block; one that holds its axis whole has the next power of two."""
    return {block.axis: block.size or power_of_two(extents[block.axis]) for block in blocks}


def fill(
    blocks: dict[str, int],
    order: Iterable[str],
    values: Sequence[frozenset[str]],
    limits: Mapping[str, int],
    budget: int,
) -> None:
    """Grows blocks in `order` by doubling while every value that has the axis stays within the budget."""

    def widest(axis: str) -> int:
        sizes = [math.prod(blocks.get(a, 1) for a in v) for v in values if axis in v]
        return max(sizes, default=0)

    for axis in order:
        while blocks[axis] < limits[axis] and widest(axis) * 2 <= budget:
            blocks[axis] = min(blocks[axis] * 2, limits[axis])


def kinds(usage: AxisUsage, whole: Collection[str]) -> dict[str, BlockKind]:
    found: dict[str, BlockKind] = {}
    found.update(dict.fromkeys(usage.parallel, "grid"))
    found.update(dict.fromkeys(usage.loops, "loop"))
    found.update(dict.fromkeys(usage.units, "unit"))
    found.update({a: "whole" if a in whole else "loop" for a in usage.inner})
    return found
