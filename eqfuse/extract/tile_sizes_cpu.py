"""Blocks of one kernel on a CPU, whose back end runs tile operations one by one on a few threads.

The widest value that is computed fills what a core's cache holds, the axis that memory is contiguous along first; then
blocks are halved until every thread has some of its own. A grid of fewer blocks than threads is run by one thread, whose
operations torch shares out: each of them waits for the slower half.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache

from eqfuse.extract.axis_usage import AxisUsage, contiguous_axes, fill, kinds
from eqfuse.extract.cost import FLOAT_BYTES
from eqfuse.extract.devices import Device
from eqfuse.extract.mask_coverage import covering, ragged, rows_with_ranges
from eqfuse.extract.residuals import CPU
from eqfuse.extract.shape import Shape
from eqfuse.loops.blocks import Block
from eqfuse.loops.kernel_axes import KEPT, contractions, kernel_axes, quotients, widest_values
from eqfuse.loops.nodes import Kernel
from eqfuse.loops.plan import KernelConfig
from eqfuse.loops.walk import expressions
from eqfuse.terms.nodes import Call, Load, Reduce, free_axes

WHOLE = 4096
"""Positions of a contracted axis that a block keeps whole."""

BLOCKS_PER_THREAD = 4
"""Blocks that every thread of a CPU should have: more share the load better where some take longer, and cost more."""

MATRIX = 256
"""Block of each axis of a matrix product on the CPU: enough for the library's full rate."""

RAGGED = 16
"""Rows of a block that have lengths of their own, where no matrix product wants more: it walks as far as the longest."""

SEGMENT = 16
"""Positions of a tile at least, of an axis of which each row has a segment."""

CONTIGUOUS = 2048
"""Positions along which memory is contiguous that a block starts from."""


def configure(kernel: Kernel, shape: Shape, device: Device) -> KernelConfig:
    """Blocks of every axis that the kernel walks."""
    usage, extents = AxisUsage.of(kernel, vectors=True), shape.extents
    values = widest_values(kernel, vectors=True) or (frozenset(usage.parallel),)
    whole = [a for a in usage.inner if a not in usage.steps or extents[a] <= WHOLE]
    blocks = {a: extents[a] for a in whole} | {a: 1 for a in usage.units}
    for axis in (*usage.parallel, *usage.loops, *(a for a in usage.inner if a not in whole)):
        blocks[axis] = 1
    packed = {a: n for a, n in quotients(kernel).items() if a in usage.packable and n <= MATRIX}
    blocks |= packed
    limits = {a: 1 if a in usage.single else max(1, extents[a]) for a in blocks} | packed
    for predicates in covering(kernel).values():  # wide blocks would have next to no tile that is empty
        for axis in frozenset(usage.parallel).intersection(*map(free_axes, predicates)):
            limits[axis] = min(limits[axis], MATRIX)
    sides = {a for c in contractions(kernel, vectors=True) for a in (*c.rows, *c.columns)}
    for axis in frozenset(usage.parallel) & rows_with_ranges(kernel) - sides:
        limits[axis] = min(limits[axis], RAGGED)
    for axis, data in ragged(kernel).items():  # a longer tile would be masked for the most part
        if data.segment and axis in limits:
            limits[axis] = min(limits[axis], max(SEGMENT, math.ceil(data.average(axis, extents))))
        if data.apart:
            limits |= dict.fromkeys(data.axes & frozenset(usage.parallel) - sides, 1)
    near = [a for a in contiguous_axes(kernel) if a in blocks and a not in whole]
    walked = [
        a for a in blocks if a not in whole and a not in usage.units and a not in packed and limits[a] > 1
    ]
    starts: list[str] = []
    single: set[str] = set()
    for c in contractions(kernel, vectors=True):
        for side in (c.rows, c.columns):
            if not any(a in whole or a in starts for a in side):
                room = MATRIX
                for axis in sorted((a for a in walked if a in side), key=lambda a: -limits[a]):
                    if room > 1:
                        starts.append(axis)
                        blocks[axis] = min(limits[axis], room)
                        room //= blocks[axis]
            single |= {a for a in side if a not in whole and a not in starts}
        if c.axis in walked and c.axis not in starts:
            starts.append(c.axis)
            blocks[c.axis] = min(limits[c.axis], MATRIX)
        # More than one axis of a batch would be copied: parts of them are not one axis in memory.
        single |= set(sorted((a for a in walked if a in c.batch), key=lambda a: -limits[a])[1:])
    for axis in walked:
        if axis in near and axis not in starts:
            blocks[axis] = min(limits[axis], CONTIGUOUS)
    order = [a for a in (*reversed(usage.parallel), *usage.loops) if a not in single]
    fill(blocks, order, values, limits, device.tile // FLOAT_BYTES)
    blocks = share_out(kernel, blocks, packed, shape, BLOCKS_PER_THREAD * device.sms)
    kind = kinds(usage, whole)
    return KernelConfig(tuple(Block(a, kind[a], None if a in whole else blocks[a]) for a in blocks))


@lru_cache(KEPT)
def _operations(kernel: Kernel) -> tuple[tuple[frozenset[str], float], ...]:
    """The axes of every operation and load, and the time of one position in elementwise operations."""

    def found() -> Iterator[tuple[frozenset[str], float]]:
        axes = kernel_axes(kernel, vectors=True)
        for expr in expressions(kernel.body):
            for node in axes.computed(expr):
                match node:
                    case Reduce(_, axis, body):
                        product = axes.contraction(node)
                        yield (
                            axes.of(node) | {axis} if product else axes.of(body),
                            CPU.multiplication if product else 1.0,
                        )
                    case Call() | Load():
                        yield axes.of(node), 1.0

    return tuple(found())


def share_out(
    kernel: Kernel, blocks: Mapping[str, int], fixed: Collection[str], shape: Shape, wanted: int
) -> dict[str, int]:
    """`blocks` with those of parallel axes halved, apart from `fixed` ones, until there are `wanted` blocks;
    less where the work would grow, or be too little for a thread or for the operations that it is made of."""
    extents = shape.extents

    def count(blocks: Mapping[str, int]) -> int:
        return math.prod(math.ceil(extents[a] / blocks[a]) for a in kernel.parallel)

    def work(blocks: Mapping[str, int]) -> float:
        return sum(
            weight
            * shape.positions(axes)
            * math.prod(math.ceil(extents[a] / blocks[a]) for a in kernel.parallel if a not in axes)
            for axes, weight in _operations(kernel)
        )

    most = CPU.recomputed * work(blocks)
    least = max(CPU.least_work, CPU.operation * len(_operations(kernel)))
    while count(blocks) < wanted:
        halved = [
            {**blocks, a: math.ceil(blocks[a] / 2)}
            for a in kernel.parallel
            if a not in fixed and blocks[a] > 1
        ]
        worth = [b for b in halved if least * count(b) <= work(b) <= most]
        if not worth:
            break
        blocks = min(worth, key=work)
    return dict(blocks)
