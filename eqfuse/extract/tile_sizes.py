"""Blocks, warps and stages of one kernel on a GPU, from its loop nest, extents and device.

The widest value that is computed should fill what a thread block keeps on chip, the axis that memory is contiguous along
first; matrix products get a row and a column axis of at least 16.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from eqfuse.extract import tile_sizes_cpu
from eqfuse.extract.axis_usage import AxisUsage, block_sizes, contiguous_axes, fill, kinds
from eqfuse.extract.cost import FLOAT_BYTES, KernelCost
from eqfuse.extract.devices import Device
from eqfuse.extract.mask_coverage import ragged, rows_with_ranges
from eqfuse.extract.product_tiles import LEAST, Lattice, TiledAxis
from eqfuse.extract.resources import (
    WARPGROUP_ROWS,
    bytes_read_again,
    loads_of,
    loads_vectors,
    products,
    scan_states,
    sharded_axes,
    shared_by_stages,
    shared_bytes,
    streamed_bytes,
)
from eqfuse.extract.shape import Shape
from eqfuse.loops.blocks import Block, BlockKind
from eqfuse.loops.kernel_axes import KEPT, contractions, packed_axes, valid_positions, widest_values
from eqfuse.loops.nodes import Kernel, Store
from eqfuse.loops.plan import KernelConfig
from eqfuse.loops.walk import expressions, loops_in, statements
from eqfuse.terms.integers import power_of_two
from eqfuse.terms.nodes import REDUCTIONS, Axis, Load, free_axes, reductions, walk

GPU_TILE = 4096
"""Elements of the widest elementwise tile of a thread block."""

GPU_LONG_TILE = 16384
"""The same where a loop's tile is all that an SM has to do: more of it is under way at once."""

GPU_FOLDED_TILE = 8192
"""The same where a loop folds its tile along both axes: decoding one query of a head, 64 keys of 128 elements by 2
warps take 37.1 us at length 8192, 128 keys by 4 warps 42.5; at length 512 8.3 and 13.8."""

GPU_SCANNED_TILE = 2048
"""The same where a loop scans it with several states for each position: the running log-sum-exp of 256 x 65536 numbers takes 151 us
by tiles of 2048, 460 by those of 16384 (H200)."""

GPU_WARP_TILE = 1024
"""Elements of a wide tile per warp: more are registers that keep other thread blocks from running beside it. Half
of them in whole rows that are long or few: no loop has the next ones under way. Where elements are loaded one by one, twice as
many: so many are under way at once; half of them of rows shorter than a warp, and of columns: softmax of 200000 x 25 numbers takes
25 us with 8 warps, 36 with 2 (H100)."""

GPU_CUT = 1.25
"""How many times a shard's positions its tiles may have: those of its last one that are beyond the shard are loaded as masked."""

GPU_WARP_BYTES = 512
"""Bytes that a warp loads at once in vectors."""

GPU_COLUMN_SEGMENTS = 4
"""Segments of memory across a tile that is folded along the other axis: the sum of 4096 x 4095 numbers over the first axis
takes 45 us by 16 rows of 128 at a time, 57 by 4 of 1024 (H100)."""

GPU_STREAM_WARPS = 8
"""Most warps where loops load tiles beforehand: more threads load nothing sooner."""

GPU_WARPS = 32
"""Most warps of a thread block."""

GPU_LEAST_TILE = 128
"""Elements of a tile that are not split any further to give every SM work."""

GPU_SEGMENT = 128
"""Bytes along which memory is contiguous that are worth loading together."""

GPU_ROWS, GPU_COLUMNS, GPU_DEPTH = 128, 128, 64
"""Blocks of a matrix product on a GPU: rows, columns, and the contracted axis when it is a loop."""

GPU_UNEVEN = 8
"""Positions of a tile at least where rows have segments of an axis, however short they are on average: one may be long."""

GPU_SEGMENT_TILE = 64
"""Positions of a tile at most where segments are shorter on average."""

GPU_WHOLE = 256
"""Positions of a contracted axis that a GPU block keeps whole where it has room for them; longer ones are walked in steps."""

TENSOR_CORE_MIN = 16

SEARCHED = 128
"""Rows that a thread block looks at together for the one whose work it does."""


def configure(kernel: Kernel, shape: Shape, device: Device) -> KernelConfig:
    """Blocks for one kernel. Every axis that the kernel walks gets one."""
    if kernel.library is not None:
        return tiny(kernel, TENSOR_CORE_MIN)
    if device.kind == "cpu":
        return _searching(kernel, tile_sizes_cpu.configure(kernel, shape, device), SEARCHED)
    return _searching(kernel, _for_gpu(kernel, AxisUsage.of(kernel), shape, device), SEARCHED)


def _searching(kernel: Kernel, config: KernelConfig, size: int) -> KernelConfig:
    """The configuration with blocks of the axes along which a kernel with slots looks for its row."""
    if kernel.slots is None:
        return config
    *outer, last = kernel.slots.others
    blocks = (*(Block(axis, "loop", 1) for axis in outer), Block(last, "loop", size))
    return replace(config, blocks=(*config.blocks, *blocks))


def _for_gpu(kernel: Kernel, usage: AxisUsage, shape: Shape, device: Device) -> KernelConfig:
    extents = shape.extents
    whole = [a for a in usage.inner if a not in usage.steps or extents[a] <= GPU_WHOLE]
    found = _with_whole(kernel, usage, whole, shape, device)
    stepped = [a for a in whole if a not in usage.steps or extents[a] <= LEAST]
    # Steps that walk tiles load operands anew at each of them, whole or not; those of others stay on chip.
    loads_anew = bool(usage.units and usage.loops)
    if stepped == whole or not (loads_anew or _lacks_room(kernel, found, shape, device)):
        return found
    other, cost = _with_whole(kernel, usage, stepped, shape, device), KernelCost(kernel, shape, device)
    return min(found, other, key=lambda each: (_lacks_room(kernel, each, shape, device), cost.seconds(each)))


def _lacks_room(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> bool:
    """Whether a thread block needs more shared memory than there is."""
    return (
        shared_bytes(kernel, block_sizes(config.blocks, shape.extents), config.stages, shape) > device.shared
    )


def _with_whole(
    kernel: Kernel, usage: AxisUsage, whole: Sequence[str], shape: Shape, device: Device
) -> KernelConfig:
    """Blocks of a kernel of whose inner axes some are `whole`, and others walked in steps."""
    extents = shape.extents
    limits = {
        a: power_of_two(extents[a]) for a in (*usage.parallel, *usage.loops, *usage.inner, *usage.units)
    }
    packed = packed_axes(kernel)
    limits |= {**dict.fromkeys(usage.single, 1), **{a: power_of_two(n) for a, n in packed.items()}}
    limits |= _rows_apart(kernel, usage, limits, extents)
    blocks = {a: limits[a] if a in whole or a in packed else 1 for a in limits}
    kind = kinds(usage, whole)

    def configured(blocks: Mapping[str, int], warps: int = 4, stages: int = 2) -> KernelConfig:
        valid = {a: valid_positions(n, blocks[a]) for a, n in packed.items()}
        return KernelConfig(
            tuple(Block(a, kind[a], None if a in whole else blocks[a], valid.get(a)) for a in blocks),
            warps,
            stages,
        )

    if not contractions(kernel):
        rest = [a for a in (*usage.loops, *usage.parallel) if a not in packed]
        return configured(blocks, *_fit_tiles(kernel, usage, blocks, rest, limits, shape, device))
    multiplied = {a for c in contractions(kernel) for a in (c.axis, *c.apart)}
    blocks |= {a: max(LEAST, blocks[a]) for a in whole if a in multiplied}
    axes = _tiled_axes(kernel, usage, whole, limits, shape, device)
    tiled = {*packed, *(a.axis for a in axes)}
    blocks |= {a: min(limits[a], GPU_DEPTH) for a in usage.loops if a not in tiled}
    overlaps = _overlaps(kernel, usage, whole)
    lattice = Lattice(kernel, shape, device, blocks, axes, overlaps=overlaps)
    cost, start = KernelCost(kernel, shape, device), configured(lattice.start)
    alone = cost.alone(start)
    if cost.streams(start, alone):
        lattice = Lattice(kernel, shape, device, blocks, axes, overlaps=overlaps, streams=True)
    elif _throttles(alone, device):
        lattice = lattice.with_rows(GPU_ROWS)
    point = lattice.best()
    return configured(point.blocks, point.warps, point.stages)


def _rows_apart(
    kernel: Kernel, usage: AxisUsage, limits: Mapping[str, int], extents: Mapping[str, int]
) -> dict[str, int]:
    """Limits of the axes of rows with ranges of their own that no matrix product takes together: a block walks as far
    as the longest of its rows, so it has only as many as make up a segment of memory; one, where other axes do."""
    near = [a for a in contiguous_axes(kernel, widest=True) if a in usage.parallel]
    sides = {a for c in contractions(kernel) for a in (*c.rows, *c.columns)}
    found: dict[str, int] = {}
    for axis, each in ragged(kernel).items():
        average = max(1, round(each.average(axis, extents)))
        average *= GPU_SEGMENT if each.apart else math.prod(extents[a] for a in near if a not in each.axes)
        for row in each.axes & frozenset(usage.parallel) - sides:
            found[row] = min(
                limits[row], power_of_two(max(1, GPU_SEGMENT // FLOAT_BYTES // average)), found.get(row, 1024)
            )
    return found


def _fit_tiles(
    kernel: Kernel,
    usage: AxisUsage,
    blocks: dict[str, int],
    rest: Sequence[str],
    limits: Mapping[str, int],
    shape: Shape,
    device: Device,
) -> tuple[int, int]:
    """Blocks of the axes in `rest` of a kernel without matrix products; returns warps and stages."""
    extents, values = shape.extents, (*widest_values(kernel), *_stored(kernel))
    rows = rows_with_ranges(kernel)
    near = [a for a in contiguous_axes(kernel, widest=True) if a in rest]
    near.sort(key=lambda a: a in rows)  # the ends of their ranges are read along those, and little else
    stored = {} if usage.loops else _stored_segments(kernel, rest, shape)
    order = [*near, *[a for a in reversed(rest) if a not in near and a in usage.loops]]
    order += [a for a in stored if a not in order]
    order += [a for a in reversed(usage.parallel) if a not in order]
    caps = {a: min(limits[a], 1024) for a in limits} | _longest(kernel, usage, limits, extents)
    vectors, columns = loads_vectors(kernel, shape), _folds_columns(kernel, tuple(near))
    segments, alone = stored | _segments(kernel, near, shape), columns and vectors and _folds_numbers(kernel)
    both = folds_rows_and_columns(kernel)
    if columns and usage.loops and (alone or not vectors):
        wide = max(GPU_COLUMN_SEGMENTS * segments[near[0]], GPU_TILE // _least_long(kernel, extents))
        caps[near[0]] = min(caps[near[0]], wide)
    elif not usage.loops and len(segments) > 1:  # what lies along another axis has segments too
        others = math.prod(min(limits[a], segments[a]) for a in segments if a != order[0])
        caps[order[0]] = min(caps[order[0]], max(segments[order[0]], GPU_TILE // others))
    states = scan_states(kernel)
    fill(blocks, order, values, caps, GPU_SCANNED_TILE if states > 1 else GPU_TILE)
    _share_out(blocks, usage.parallel, segments, extents, device.sms, values)
    # Many thread blocks hide the latency of each other's loads; few have to prefetch.
    grid = _grid(usage.parallel, blocks, extents)
    few = grid < (4 if vectors else 2) * device.sms
    if few:  # loads that are no vectors are not under way beforehand: a tile has to be enough alone
        waiting = (device.stages - 2) * streamed_bytes(kernel, shape) if vectors else 0
        longest = GPU_TILE if alone else GPU_FOLDED_TILE if both or _folds_again(kernel) else GPU_LONG_TILE
        if states:
            longest = GPU_SCANNED_TILE if states > 1 else min(longest, GPU_FOLDED_TILE)
        fill(blocks, usage.loops, values, caps, min(longest, device.shared // max(1, waiting)))
    again = bytes_read_again(kernel, shape)
    kept = 0 < again * device.sms <= device.cache < again * grid
    if kept:  # One thread block per SM: what all of them read again is still in the cache then.
        fill(blocks, usage.loops, values, limits, GPU_LONG_TILE)
    widest = _widest(values, blocks)
    per_warp = GPU_WARP_TILE
    walks = any(blocks[axis] < extents[axis] for axis in usage.loops)
    short = max((blocks[axis] for axis in usage.inner), default=1) <= device.lanes
    if not vectors and (walks or not short) and not columns:
        per_warp *= 1 if few else 2
    elif not vectors or not usage.loops and (few or widest > GPU_TILE):
        per_warp //= 2
    if states > 1:  # all of them are in registers at each position, before and after
        per_warp = min(per_warp, GPU_SCANNED_TILE // (8 if few else 4))
    registers_each = shape.registers_each
    per_warp //= registers_each
    least = min(4, GPU_TILE // per_warp)
    most = GPU_STREAM_WARPS if few and vectors and usage.loops and not kept else GPU_WARPS
    warps = max(1, min(widest // GPU_LEAST_TILE, max(least, widest // per_warp), most))
    if both:  # one of the folds crosses warps, through shared memory
        warps = max(1, min(warps, widest * registers_each // GPU_TILE))
    elif alone and widest >= GPU_TILE:  # a thread folds its columns alone: nothing crosses warps
        warps = max(1, min(warps, blocks[near[0]] * GPU_SEGMENT // segments[near[0]] // GPU_WARP_BYTES))
    at_once = grid >= 8 * device.sms or not vectors or (_folds_again(kernel) and not both and not kept)
    stages = 1 if at_once else min(3, device.stages)
    needed = shared_by_stages(kernel, blocks, range(1, stages + 1), shape)
    return warps, max((n for n in range(1, stages + 1) if needed[n - 1] <= device.shared), default=1)


def _least_long(kernel: Kernel, extents: Mapping[str, int]) -> int:
    """Positions along which a loop's tile is long enough: of segments, the average length of one."""
    average = _average_segments(kernel, extents).values()
    return max(GPU_UNEVEN, power_of_two(min(average))) if average else GPU_TILE


def _average_segments(kernel: Kernel, extents: Mapping[str, int]) -> dict[str, int]:
    """Positions of a segment on average, of axes that rows share out in segments."""
    return {
        axis: math.ceil(each.average(axis, extents)) for axis, each in ragged(kernel).items() if each.segment
    }


def _segments(kernel: Kernel, axes: Sequence[str], shape: Shape) -> dict[str, int]:
    """Positions of a segment of memory along these axes, by the narrowest of what is read along them."""
    return {
        axis: GPU_SEGMENT
        // min(
            shape.itemsize(load.tensor)
            for load in loads_of(kernel)
            if load.index and load.index[-1] == Axis(axis)
        )
        for axis in axes
    }


def _stored_segments(kernel: Kernel, axes: Sequence[str], shape: Shape) -> dict[str, int]:
    """Positions of a segment of memory along those of these axes that something is written along."""
    stores = [stmt for stmt in statements(kernel.body) if isinstance(stmt, Store) and stmt.index]
    return {
        axis: GPU_SEGMENT
        // min(shape.itemsize(store.tensor) for store in stores if store.index[-1] == Axis(axis))
        for axis in axes
        if any(store.index[-1] == Axis(axis) for store in stores) and shape.extents[axis] > 1
    }


@lru_cache(KEPT)
def _stored(kernel: Kernel) -> tuple[frozenset[str], ...]:
    """Axes of every tile that is stored: what is stored may be the same along some of them."""
    stores = (stmt for stmt in statements(kernel.body) if isinstance(stmt, Store))
    return tuple(frozenset().union(*map(free_axes, store.index)) for store in stores)


def _longest(
    kernel: Kernel, usage: AxisUsage, limits: Mapping[str, int], extents: Mapping[str, int]
) -> dict[str, int]:
    """The longest tiles of loops: a shard that is no longer than half of the longest is at most that long, and of each shard's last
    tile little is cut off."""
    shards, average = sharded_axes(kernel), _average_segments(kernel, extents)
    found: dict[str, int] = {}
    for axis in usage.loops:
        shard = extents[axis] // extents[shards[axis]] if axis in shards else limits[axis]
        tile = min(limits[axis], GPU_LONG_TILE, max(power_of_two(shard), GPU_LONG_TILE // 2))
        if axis in average:  # a longer one would be masked for the most part
            tile = min(tile, max(GPU_SEGMENT_TILE, power_of_two(average[axis])))
        if axis in shards and shard > GPU_LONG_TILE // 2:
            while tile > GPU_TILE // 2 and math.ceil(shard / tile) * tile > GPU_CUT * shard:
                tile //= 2
        found[axis] = tile
    return found


def _share_out(
    blocks: dict[str, int],
    axes: Sequence[str],
    near: Mapping[str, int],
    extents: Mapping[str, int],
    wanted: int,
    values: Sequence[frozenset[str]],
) -> None:
    """Halves blocks of parallel axes until every SM has a thread block, or tiles are small. Those that
    memory is contiguous along, `near`, stay a segment of it while others can shrink."""
    while _grid(axes, blocks, extents) < wanted and _widest(values, blocks) > GPU_LEAST_TILE:
        wide = [a for a in axes if blocks[a] > 1]
        if not wide:
            return
        blocks[max(wide, key=lambda a: (a not in near or blocks[a] > near[a], blocks[a]))] //= 2


@lru_cache(KEPT)
def _folds_columns(kernel: Kernel, near: tuple[str, ...]) -> bool:
    """Whether memory is contiguous along an axis that stays, and what is folded are others."""
    folded = {node.axis for node in reductions(*expressions(kernel.body))}
    return bool(near and folded and near[0] in kernel.parallel and near[0] not in folded)


@lru_cache(KEPT)
def _folds_numbers(kernel: Kernel) -> bool:
    """Whether all that is folded are numbers, and no states of several."""
    return all(node.op in REDUCTIONS for node in reductions(*expressions(kernel.body)))


@lru_cache(KEPT)
def _folds_again(kernel: Kernel) -> bool:
    """Whether a loop folds what it has loaded three times or more: it stays in registers meanwhile. The variance of 12.9 million
    numbers takes 22 us by tiles of 8192 that are loaded when they are needed, 41 by two tiles of 16384 under way (H100)."""
    for loop in loops_in(kernel.body):
        folds = reductions(*expressions(loop.body))
        bodies = {node.body for node in folds if node.axis == loop.axis}
        read = Counter(node for body in bodies for node in walk(body) if isinstance(node, Load))
        if max(read.values(), default=0) > 2:
            return True
    return False


@lru_cache(KEPT)
def folds_rows_and_columns(kernel: Kernel) -> bool:
    """Whether a loop folds both the axis that it walks and another one."""
    for loop in loops_in(kernel.body):
        folded = {node.axis for node in reductions(*expressions(loop.body))}
        if loop.axis in folded and len(folded) > 1:
            return True
    return False


def _tiled_axes(
    kernel: Kernel,
    usage: AxisUsage,
    whole: Collection[str],
    limits: Mapping[str, int],
    shape: Shape,
    device: Device,
) -> list[TiledAxis]:
    """A row and a column axis of every matrix product, and its own axis where that is walked in steps."""
    overlaps, packed = _overlaps(kernel, usage, whole), packed_axes(kernel)
    two = (
        (WARPGROUP_ROWS, GPU_ROWS),
        (WARPGROUP_ROWS, WARPGROUP_ROWS),
    )  # two thread blocks overlap each other's phases
    rows, columns = two if overlaps else ((GPU_ROWS, GPU_ROWS), (GPU_COLUMNS, GPU_COLUMNS))
    found: dict[str, TiledAxis] = {}
    for c in contractions(kernel):
        for side, best in ((c.rows, rows), (c.columns, columns)):
            if any(a in whole or a in found or a in packed for a in side):
                continue
            options = [a for a in (*usage.parallel, *usage.loops) if a in side and a not in usage.single]
            extents = {a: shape.extents[a] for a in options}
            wide = [a for a in options if extents[a] >= LEAST] or [a for a in options if extents[a] > 1]
            if wide := wide or options:
                axis, limit = wide[-1], limits[wide[-1]]
                is_rows = side is c.rows and axis in usage.parallel
                if overlaps and is_rows and device.rows <= 2 * limit:
                    limit = max(
                        limit, device.rows
                    )  # half of the rows padded are better than none for a warpgroup
                found[axis] = TiledAxis(axis, best, limit, axis in usage.parallel, is_rows)
        if c.axis not in whole and c.axis not in found and c.axis not in packed:
            depth = _depth(kernel, c.axis, shape)
            found[c.axis] = TiledAxis(
                c.axis, (depth, depth), limits[c.axis], False, is_depth=c.axis in usage.steps
            )
    return list(found.values())


def _depth(kernel: Kernel, axis: str, shape: Shape) -> int:
    """Positions of a contracted axis to walk at a time: more where an element is a byte, so that rows of
    operands are as long as tensor cores read them."""
    found = (p.node for p in products(kernel) if p.contraction.axis == axis)
    sizes = {shape.itemsize(n.tensor) for n in walk(*found) if isinstance(n, Load)}
    return 2 * GPU_DEPTH if sizes == {1} else GPU_DEPTH


def _loops_over_sides(kernel: Kernel, usage: AxisUsage, whole: Collection[str]) -> bool:
    """Whether matrix products are inside of loops over their rows or columns, and short beside what else a trip does: they walk
    no axis in steps of their own."""
    return any(
        a in usage.loops
        for c in contractions(kernel)
        if c.axis not in usage.steps or c.axis in whole
        for a in c.apart
    )


def _overlaps(kernel: Kernel, usage: AxisUsage, whole: Collection[str]) -> bool:
    """Whether thread blocks of one SM are in different phases, so that two of them are wanted."""
    return _loops_over_sides(kernel, usage, whole) or _loads_once(kernel, usage, whole)


def _loads_once(kernel: Kernel, usage: AxisUsage, whole: Collection[str]) -> bool:
    """Whether a thread block loads all it needs for products one after the other before them: nothing but another block is under way
    meanwhile. Attention of 8192 queries and 77 keys (32 heads of 64) took 46 us in blocks of 64 queries by 4 warps, 68 of 128 by 8 (H200)."""
    found = contractions(kernel)
    return not usage.loops and len(found) > 1 and all(c.axis in whole for c in found)


def _grid(axes: Sequence[str], blocks: Mapping[str, int], extents: Mapping[str, int]) -> int:
    return math.prod(math.ceil(extents[a] / blocks[a]) for a in axes)


def _widest(values: Sequence[frozenset[str]], blocks: Mapping[str, int]) -> int:
    return max(math.prod(blocks.get(a, 1) for a in v) for v in values)


def _throttles(alone: Mapping[str, float], device: Device) -> bool:
    """Whether a kernel runs long enough for a GPU's power limit to lower its clock: with more rows that share an operand,
    operands are read less often from shared memory, which takes power. `alone` is what each kind of work would take."""
    limit = device.residuals
    few_others = alone["special"] <= limit.throttled_special * alone["matrix"]
    return few_others and alone["matrix"] >= limit.throttled_after


def tiny(kernel: Kernel, block: int = 2, single: Collection[str] = ()) -> KernelConfig:
    """Blocks smaller than any axis of a verification run, so that there are several and a ragged last one; of one
    position along the axes `single` of the grid."""
    usage = AxisUsage.of(kernel)
    kind_of = kinds(usage, {a for a in usage.inner if a not in usage.steps})
    sizes: dict[BlockKind, int | None] = {"grid": block, "loop": block, "unit": 1, "whole": None}
    config = KernelConfig(
        tuple(
            Block(a, kind, 1 if a in usage.single or (a in single and kind == "grid") else sizes[kind])
            for a, kind in kind_of.items()
        )
    )
    return _searching(kernel, config, block)
