"""Sizes of blocks for native kernels, from those of the plan.

A thread's tiles should stay in its second-level cache. One position at a time is enough along axes of the grid that
are neither rows nor columns of a matrix product nor walked in vectors: a row stays in the cache between the passes
over it, and nothing but what later passes read is kept in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from eqfuse.extract.machine import cache_bytes, cores
from eqfuse.loops.blocks import Block
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.functions import SPECIAL
from eqfuse.tile.native.nodes import Blocks, Define, Item
from eqfuse.tile.native.order import LANES, access, flat, nesting, strided
from eqfuse.tile.native.plain import plain
from eqfuse.tile.nodes import Dot, Elementwise, FoldTile, Kernel, LoadTile, ReduceTile, TileProgram

SHARE = 0.25
"""How much of the cache the widest tile may take: beside it are others, and what is streamed past."""

AGAIN = 4
"""How many times as much a tile may take before it is divided along an axis that a matrix product lacks: each part computes that one
again."""

VECTORS = 64
"""Vectors of a block along an axis of the grid that is walked in vectors: long runs in memory."""

TURNED = 32
"""Positions of a block along an axis that a matrix product lacks, or a tile of which neighbours in memory become neighbours in no
vector: so often it is used."""

LEAST_BLOCKS = 16
"""Blocks that such an axis is left with at the least, which threads share."""

CROSSED, ROWS_CROSSED = 128, 512
"""Positions of a block along each of two axes that a fold reads different tensors along, so often each element is used: of the
one that is walked in vectors, and of the other, of which one at a time is in memory."""

SHORT, TOGETHER = 128, 16
"""Of several axes that a block would have one position of, it has `TOGETHER` of the innermost in memory where rows have fewer
than `SHORT` elements: finding the place of a row takes as long as walking it."""

PRODUCTS, LEAST_ROWS = 1, 128
"""Blocks for each core of a product of matrices that is all there is to a kernel, and the least rows or columns of one."""

SHARED = 512
"""Rows and columns from which on the library shares such a product out among threads itself."""

SHARED_ROWS = 64
"""Rows of a block that share what is computed once for each position that they are walked at."""

SLOW = SPECIAL - {"div", "sqrt"}
"""Functions that a processor has no instruction for: one vector of them takes about as long as one number."""

FOLDED = 0.1
"""The part of a kernel's elements from which an axis counts as one that is walked in vectors."""


def native_configs(
    program: TileProgram, configs: Sequence[KernelConfig], sizes: Mapping[str, int]
) -> list[KernelConfig]:
    """The configurations of a plan's kernels with blocks for native code. `sizes` has every axis."""
    return [
        _configured(kernel, config, sizes) for kernel, config in zip(program.kernels, configs, strict=True)
    ]


def _products(items: Sequence[Item]) -> Iterator[Collection[str]]:
    """The axes that each matrix product is computed once for."""
    for item in flat(items):
        if isinstance(item, Define) and isinstance(item.op, Dot):
            yield {*item.dims, *item.value.dims}


def _configured(kernel: Kernel, config: KernelConfig, sizes: Mapping[str, int]) -> KernelConfig:
    lengths = {b.axis: max(1, min(b.size or sizes[b.axis], sizes[b.axis])) for b in kernel.blocks}
    items = plain(kernel, lengths)
    crossed = _crossed(items, {b.axis for b in kernel.blocks if b.kind == "grid"})
    if crossed:
        lengths |= {axis: min(CROSSED, sizes[axis]) for axis in crossed}
        items = plain(kernel, lengths)
    depth = nesting(items, lengths)
    if crossed:
        rows = min(crossed, key=depth.__getitem__)
        blocks = prod(-(-sizes[axis] // lengths[axis]) for axis in crossed - {rows})
        most = sizes[rows] * blocks // (LEAST_BLOCKS * cores())
        lengths[rows] = min(sizes[rows], max(lengths[rows], min(ROWS_CROSSED, most)))
    matrix: set[str] = set()
    walked: dict[str, int] = {}
    elements: dict[str, int] = {}
    widest = 1
    for item in flat(items):
        if isinstance(item, Define) and isinstance(item.op, Dot):
            matrix |= set(item.value.dims) - set(item.dims)
            widest = max(widest, prod(lengths[d] for d in item.value.dims if d not in item.dims))
            parallel = {b.axis for b in kernel.blocks if b.kind == "grid"}
            for side in (True, False):
                axes = [d for d in item.value.dims if (d in item.op.left.dims) is side and d not in item.dims]
                if parallel.issuperset(axes):
                    walked |= _walked(sorted(axes, key=depth.__getitem__), lengths, sizes)
        if item.dims:
            inner = max(item.dims, key=depth.__getitem__)
            elements[inner] = elements.get(inner, 0) + prod(lengths[d] for d in item.dims)
    total = sum(elements.values())
    vectors = {axis for axis, count in elements.items() if count >= FOLDED * total}
    most = int(SHARE * cache_bytes()) // 4

    turned = [*strided(items, depth), *_products(items)]
    grid = {b.axis: b.size for b in kernel.blocks if b.kind == "grid" and b.size}
    single = set(grid) & set(depth) - matrix - vectors - crossed
    near = max(single, key=lambda axis: (depth[axis], axis), default=None)
    row = prod(sizes[axis] for axis in elements if axis not in grid or axis in vectors)
    together = dict.fromkeys(single, 1)
    if near is not None and len(single) > 1 and row < SHORT:
        together[near] = min(grid[near], TOGETHER)
    alone = _alone(kernel, items, sizes)
    rows_walked = _rows_walked(kernel, items)
    fitting = {axis: walked.get(axis, size) for axis, size in grid.items() if axis in matrix}
    again = {axis for axis in fitting if any(axis not in dims for dims in _products(items))}
    while shrinkable := {
        axis: n
        for axis, n in fitting.items()
        if n > LANES and widest > most * (AGAIN if axis in again else 1)
    }:
        fitting[max(shrinkable, key=shrinkable.__getitem__)] //= 2
        widest //= 2

    def block(of: Block) -> Block:
        if of.axis in crossed:
            return replace(of, size=lengths[of.axis], valid=None)
        if of.kind != "grid" or not of.size or of.size == 1:
            return of
        if of.axis in alone:
            return of if alone[of.axis] == of.size else replace(of, size=alone[of.axis], valid=None)
        if of.axis in matrix:
            size = fitting[of.axis]
            return of if size == of.size else replace(of, size=size, valid=None)
        if of.axis in rows_walked:
            return replace(of, size=min(of.size, rows_walked[of.axis]), valid=None)
        if of.axis in vectors:
            beside = max(
                prod(together.get(a, lengths[a]) for a in item.dims if a != of.axis)
                for item in flat(items)
                if of.axis in item.dims
            )
            size = min(of.size, VECTORS * LANES, max(LANES, most // beside // LANES * LANES))
            return replace(of, size=size, valid=None)
        if any(of.axis not in dims for dims in turned):
            return replace(of, size=min(TURNED, max(of.size, sizes[of.axis] // LEAST_BLOCKS)), valid=None)
        return replace(of, size=together.get(of.axis, 1), valid=None)

    return replace(config, blocks=tuple(map(block, config.blocks)))


def _rows_walked(kernel: Kernel, items: Sequence[Item]) -> dict[str, int]:
    """Blocks of the axes of the grid that have rows which loops walk position by position, as memory has them: one row at a time is
    read and written as it lies; several, where they share vectors of special functions."""
    units = {block.axis for block in kernel.blocks if block.kind == "unit"}
    walks = [item for item in _walks(items) if item.loop.axis in units]
    inside = [item for walk in walks for item in flat(walk.items)]
    grid = {block.axis for block in kernel.blocks if block.kind == "grid"}
    found: set[str] = set()
    beside: set[str] = set()
    size = 1
    for item in inside:
        index = access(item)
        if index:
            (beside if index[-1].dims else found).update(grid.intersection(item.dims))
        if isinstance(item, Define) and isinstance(item.op, Elementwise) and item.op.fn in SLOW:
            size = max(size, LANES if item.value.dims else SHARED_ROWS)
    return dict.fromkeys(found - beside, size)


def _walks(items: Sequence[Item]) -> Iterator[Blocks]:
    for item in items:
        if isinstance(item, Blocks):
            yield item
            yield from _walks(item.items)


def _alone(kernel: Kernel, items: Sequence[Item], sizes: Mapping[str, int]) -> dict[str, int]:
    """Blocks of the rows and the columns of a product of matrices that is all there is to a kernel: the library divides them for
    the caches, and packs what a block reads once for each, so that there should be no more blocks than threads want."""
    every = [item for item in flat(items) if isinstance(item, Define)]
    dots = [item for item in every if isinstance(item.op, Dot)]
    if len(dots) != 1 or len(items) != len(list(flat(items))):
        return {}
    dot, value = dots[0].op, dots[0].value
    assert isinstance(dot, Dot)
    parts = {dot.left.name, dot.right.name, value.name}
    others = (item for item in every if item.value.dims and item.value.name not in parts)
    grid = {block.axis for block in kernel.blocks if block.kind == "grid" and block.size}
    axes = [dim for dim in value.dims if dim not in dots[0].dims]
    if len(axes) != 2 or not grid.issuperset(axes) or any(len(item.value.dims) > 1 for item in others):
        return {}
    found = {axis: sizes[axis] for axis in axes}
    rest = prod(sizes[axis] for axis in grid if axis not in found)
    if rest == 1 and min(found.values()) >= SHARED:
        return found
    while prod(-(-sizes[a] // n) for a, n in found.items()) * rest < PRODUCTS * cores():
        longest = max(found, key=found.__getitem__)
        if found[longest] < 2 * LEAST_ROWS:
            break
        found[longest] = -(-found[longest] // 2 // LANES) * LANES
    return found


def _crossed(items: Sequence[Item], grid: Collection[str]) -> set[str]:
    """Axes of the grid that a fold walks of which some of its loads lack one, some another, as in a product of matrices: each
    of them is read as often as there are positions of what it lacks."""
    every = [item for item in flat(items) if isinstance(item, Define)]
    loads = [frozenset(item.value.dims) for item in every if isinstance(item.op, LoadTile)]
    found: set[str] = set()
    for item in every:
        if isinstance(item.op, ReduceTile | FoldTile):
            axis, over = item.op.axis, frozenset(item.dims)
            mine = [dims for dims in loads if axis in dims and dims <= over]
            lacked = [over.intersection(grid) - dims for dims in mine]
            both = frozenset[str]().union(*lacked)
            if all(len(lacks) == 1 for lacks in lacked) and len(both) == 2:
                found |= both
    return found


def _walked(axes: Sequence[str], lengths: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Blocks of the axes, outermost first, that are the rows of a matrix product, or its columns: as many positions as
    `lengths` has, more of them along the last one, which the library walks; loops around it walk the others."""
    left = prod(lengths[axis] for axis in axes)
    found = {}
    for axis in reversed(axes):
        found[axis] = min(left, sizes[axis])
        left //= found[axis]
    return found
