"""Block sizes, warps and stages of one kernel, from its loop nest, extents and device.

One idea for every kernel: the widest value that is computed (its product of blocks) should fill what
one program instance keeps on chip, the axis that memory is contiguous along first; matrix products
get a row and a column axis of at least 16.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from eqfuse.extract.devices import Device
from eqfuse.extract.mask_coverage import cuts
from eqfuse.extract.resources import (
    FEW_REGISTERS,
    REGISTERS,
    WARPGROUP_ROWS,
    bytes_read_again,
    fits_twice,
    loads_vectors,
    products,
    registers,
    sharded_axes,
    shared_bytes,
    streamed_bytes,
)
from eqfuse.extract.shape import Shape
from eqfuse.extract.spread import spread
from eqfuse.loops.blocks import Block, BlockKind
from eqfuse.loops.kernel_axes import (
    KEPT,
    contractions,
    kernel_axes,
    packed_axes,
    quotients,
    valid_positions,
    widest_values,
)
from eqfuse.loops.nodes import Kernel, Loop
from eqfuse.loops.plan import KernelConfig
from eqfuse.loops.walk import expressions, loops_in, statements
from eqfuse.terms.nodes import Axis, Call, Load, Reduce, free_axes, walk

GPU_TILE = 4096
"""Elements of the widest elementwise tile of a GPU program instance."""

CPU_TILE = 1 << 18
"""Elements of the widest tile on the CPU: a megabyte of float32, which stays in a core's cache while the
overhead of a tile operation is a small part of its time."""

GPU_LONG_TILE = 16384
"""The same where a loop's tile is all that a unit has to do: more of it is under way at once."""

GPU_FOLDED_TILE = 8192
"""The same where a loop folds its tile along both axes: decoding one query of a head, 64 keys of 128 elements by 2
warps take 37.1 us at length 8192, 128 keys by 4 warps 42.5; at length 512 8.3 and 13.8."""

GPU_WARP_TILE = 1024
"""Elements of a wide tile per warp: more are registers that keep other instances from running beside it. Half
of them in whole rows that are long or few: no loop has the next ones under way. Twice as many where they are
loaded one by one: so many are under way at once."""

GPU_STREAM_WARPS = 8
"""Most warps where loops load tiles beforehand: more threads load nothing sooner."""

GPU_WARPS = 32
"""Most warps of a program instance."""

GPU_LEAST_TILE = 128
"""Elements of a tile that are not split any further to give every unit of a GPU work."""

GPU_SEGMENT = 32
"""Positions along which memory is contiguous that are worth loading together."""

GPU_ROWS, GPU_COLUMNS, GPU_DEPTH = 128, 128, 64
"""Blocks of a matrix product on a GPU: rows, columns, and the contracted axis when it is a loop."""

GPU_STREAM = 16 << 10
"""Bytes of matrix operands to load at a time on a GPU: with a few loads under way, enough for its bandwidth."""

GPU_WHOLE = 256
"""Positions of a contracted axis that a GPU block keeps whole; longer ones are walked in steps."""

CPU_WHOLE = 4096
CPU_INSTANCES = 4
"""Blocks that every thread of a CPU should have: more share the load better where some take longer, and cost more."""

CPU_MATRIX = 256
"""Block of each axis of a matrix product on the CPU: enough for the library's full rate."""

TENSOR_CORE_MIN = 16


@dataclass(frozen=True)
class _Roles:
    """What each axis of a kernel is for, before sizes are chosen."""

    parallel: tuple[str, ...]
    loops: tuple[str, ...]
    units: tuple[str, ...]
    single: frozenset[
        str
    ]  # parallel axes of one position per instance: a loop's range or a division needs it
    packable: frozenset[str]  # parallel axes of which no loop's range needs the position
    inner: tuple[str, ...]  # axes that are whole, or walked inside a body
    steps: frozenset[str]  # those of them that only matrix products contract: they may be walked in steps

    @classmethod
    @lru_cache(KEPT)
    def of(cls, kernel: Kernel, *, vectors: bool = False) -> _Roles:
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
        taken = {*kernel.parallel, *loops}
        inner = tuple(a for a in {**dims, **bound} if a not in taken)
        return cls(
            kernel.parallel,
            tuple(a for a, unit in loops.items() if not unit),
            tuple(a for a, unit in loops.items() if unit),
            divided_axes(kernel).union(*ranges) & frozenset(kernel.parallel),
            frozenset(kernel.parallel).difference(*ranges),
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


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def configure(kernel: Kernel, shape: Shape, device: Device) -> KernelConfig:
    """Blocks for one kernel. Every axis that the kernel walks gets one."""
    if device.kind == "cpu":
        return _for_cpu(kernel, _Roles.of(kernel, vectors=True), shape, device)
    return _for_gpu(kernel, _Roles.of(kernel), shape, device)


def _fill(
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


def _for_cpu(kernel: Kernel, roles: _Roles, shape: Shape, device: Device) -> KernelConfig:
    extents = shape.extents
    values = widest_values(kernel, vectors=True) or (frozenset(roles.parallel),)
    whole = [a for a in roles.inner if a not in roles.steps or extents[a] <= CPU_WHOLE]
    blocks = {a: extents[a] for a in whole} | {a: 1 for a in roles.units}
    for axis in (*roles.parallel, *roles.loops, *(a for a in roles.inner if a not in whole)):
        blocks[axis] = 1
    packed = {a: n for a, n in quotients(kernel).items() if a in roles.packable and n <= CPU_MATRIX}
    blocks |= packed
    limits = {a: 1 if a in roles.single else max(1, extents[a]) for a in blocks} | packed
    for predicates in cuts(kernel).values():  # wide blocks would have next to no tile that is empty
        for axis in frozenset(roles.parallel).intersection(*map(free_axes, predicates)):
            limits[axis] = min(limits[axis], CPU_MATRIX)
    near = [a for a in contiguous_axes(kernel) if a in blocks and a not in whole]
    walked = [
        a for a in blocks if a not in whole and a not in roles.units and a not in packed and limits[a] > 1
    ]
    starts: list[str] = []
    single: set[str] = set()
    for c in contractions(kernel, vectors=True):
        for side in (c.rows, c.columns):
            if not any(a in whole or a in starts for a in side):
                room = CPU_MATRIX
                for axis in sorted((a for a in walked if a in side), key=lambda a: -limits[a]):
                    if room > 1:
                        starts.append(axis)
                        blocks[axis] = min(limits[axis], room)
                        room //= blocks[axis]
            single |= {a for a in side if a not in whole and a not in starts}
        if c.axis in walked and c.axis not in starts:
            starts.append(c.axis)
            blocks[c.axis] = min(limits[c.axis], CPU_MATRIX)
        # More than one axis of a batch would be copied: parts of them are not one axis in memory.
        single |= set(sorted((a for a in walked if a in c.batch), key=lambda a: -limits[a])[1:])
    for axis in walked:
        if axis in near and axis not in starts:
            blocks[axis] = min(limits[axis], 2048)
    order = [a for a in (*reversed(roles.parallel), *roles.loops) if a not in single]
    _fill(blocks, order, values, limits, CPU_TILE)
    blocks = spread(kernel, blocks, packed, shape, CPU_INSTANCES * device.units)
    kinds = _kinds(roles, whole)
    return KernelConfig(tuple(Block(a, kinds[a], None if a in whole else blocks[a]) for a in blocks))


def _for_gpu(kernel: Kernel, roles: _Roles, shape: Shape, device: Device) -> KernelConfig:
    extents = shape.extents
    whole = [a for a in roles.inner if a not in roles.steps or extents[a] <= GPU_WHOLE]
    limits = {
        a: power_of_two(extents[a]) for a in (*roles.parallel, *roles.loops, *roles.inner, *roles.units)
    }
    packed = packed_axes(kernel)
    limits |= {**dict.fromkeys(roles.single, 1), **{a: power_of_two(n) for a, n in packed.items()}}
    blocks = {a: limits[a] if a in whole or a in packed else 1 for a in limits}
    tiled = _tile_products(kernel, roles, blocks, whole, limits, shape, device)
    rest = [a for a in (*roles.loops, *roles.parallel) if a not in tiled]
    if contractions(kernel):
        blocks |= {a: min(limits[a], GPU_DEPTH) for a in rest if a in roles.loops}
        warps, stages = _fit_products(kernel, roles, blocks, tiled, limits, shape, device)
    else:
        warps, stages = _fit_tiles(kernel, roles, blocks, rest, limits, shape, device)
    kinds = _kinds(roles, whole)
    valid = {a: valid_positions(n, blocks[a]) for a, n in packed.items()}
    return KernelConfig(
        tuple(Block(a, kinds[a], None if a in whole else blocks[a], valid.get(a)) for a in blocks),
        warps,
        stages,
    )


def _fit_tiles(
    kernel: Kernel,
    roles: _Roles,
    blocks: dict[str, int],
    rest: Sequence[str],
    limits: Mapping[str, int],
    shape: Shape,
    device: Device,
) -> tuple[int, int]:
    """Blocks of the axes in `rest` of a kernel without matrix products; returns warps and stages."""
    extents, values = shape.extents, widest_values(kernel) or (frozenset(roles.parallel),)
    near = [a for a in contiguous_axes(kernel, widest=True) if a in rest]
    order = [*near, *[a for a in reversed(rest) if a not in near and a in roles.loops]]
    order += [a for a in reversed(roles.parallel) if a not in order]
    caps = {a: min(limits[a], 1024) for a in limits} | _longest(kernel, roles, limits, extents)
    _fill(blocks, order, values, caps, GPU_TILE)
    _spread(blocks, roles.parallel, near, extents, device.units, values)
    # Many instances hide the latency of each other's loads; few have to prefetch.
    instances = _instances(roles.parallel, blocks, extents)
    vectors = loads_vectors(kernel, shape)
    few = instances < (4 if vectors else 2) * device.units
    if few:  # loads that are no vectors are not under way beforehand: a tile has to be enough alone
        waiting = (device.stages - 2) * streamed_bytes(kernel, shape) if vectors else 0
        longest = GPU_FOLDED_TILE if folds_rows_and_columns(kernel) else GPU_LONG_TILE
        _fill(blocks, roles.loops, values, caps, min(longest, device.shared // max(1, waiting)))
    again = bytes_read_again(kernel, shape)
    kept = 0 < again * device.units <= device.cache < again * instances
    if kept:  # One instance to a unit: what all of them read again is still in the cache then.
        _fill(blocks, roles.loops, values, limits, GPU_LONG_TILE)
    widest = _widest(values, blocks)
    per_warp = GPU_WARP_TILE
    if not vectors:
        per_warp *= 1 if few and roles.loops else 2
    elif not roles.loops and (few or widest > GPU_TILE):
        per_warp //= 2
    least = min(4, GPU_TILE // per_warp)
    most = GPU_STREAM_WARPS if few and vectors and roles.loops and not kept else GPU_WARPS
    warps = max(1, min(widest // GPU_LEAST_TILE, max(least, widest // per_warp), most))
    if folds_rows_and_columns(kernel):  # one of the folds crosses warps, through shared memory
        warps = max(1, min(warps, widest // GPU_TILE))
    return warps, 1 if instances >= 8 * device.units or not vectors else min(3, device.stages)


def _longest(
    kernel: Kernel, roles: _Roles, limits: Mapping[str, int], extents: Mapping[str, int]
) -> dict[str, int]:
    """The longest tiles of loops: a shard that is no longer than half of the longest is at most that long."""
    shards = sharded_axes(kernel)
    found: dict[str, int] = {}
    for axis in roles.loops:
        shard = extents[axis] // extents[shards[axis]] if axis in shards else limits[axis]
        found[axis] = min(limits[axis], GPU_LONG_TILE, max(power_of_two(shard), GPU_LONG_TILE // 2))
    return found


def _spread(
    blocks: dict[str, int],
    axes: Sequence[str],
    near: Sequence[str],
    extents: Mapping[str, int],
    instances: int,
    values: Sequence[frozenset[str]],
) -> None:
    """Halves blocks of parallel axes until every unit has a program instance, or tiles are small. Those that
    memory is contiguous along stay a segment of it while others can shrink."""
    while _instances(axes, blocks, extents) < instances and _widest(values, blocks) > GPU_LEAST_TILE:
        wide = [a for a in axes if blocks[a] > 1]
        if not wide:
            return
        blocks[max(wide, key=lambda a: (a not in near or blocks[a] > GPU_SEGMENT, blocks[a]))] //= 2


@lru_cache(KEPT)
def folds_rows_and_columns(kernel: Kernel) -> bool:
    """Whether a loop folds both the axis that it walks and another one."""
    for loop in loops_in(kernel.body):
        folded = {node.axis for e in expressions(loop.body) for node in walk(e) if isinstance(node, Reduce)}
        if loop.axis in folded and len(folded) > 1:
            return True
    return False


def _tile_products(
    kernel: Kernel,
    roles: _Roles,
    blocks: dict[str, int],
    whole: Collection[str],
    limits: Mapping[str, int],
    shape: Shape,
    device: Device,
) -> list[str]:
    """Gives every matrix product a row and a column axis, and its own axis steps; returns these axes."""
    tiled = [*packed_axes(kernel)]
    for c in contractions(kernel):
        for side, size in ((c.rows, GPU_ROWS), (c.columns, GPU_COLUMNS)):
            if any(a in whole or a in tiled for a in side):
                continue
            options = [a for a in (*roles.parallel, *roles.loops) if a in side and a not in roles.single]
            wide = [a for a in options if shape.extents[a] > 1] or options
            if wide:
                axis = wide[-1]
                tiled.append(axis)
                blocks[axis] = max(TENSOR_CORE_MIN, min(limits[axis], size))
        if c.axis not in whole and c.axis not in tiled:
            tiled.append(c.axis)
            blocks[c.axis] = max(TENSOR_CORE_MIN, min(limits[c.axis], _depth(kernel, c.axis, shape)))
    if _loops_over_sides(kernel, roles):  # two instances overlap each other's phases
        for axis in (a for a in tiled if a not in roles.steps):
            rows = device.rows if axis in roles.parallel and 2 * limits[axis] >= device.rows else 1
            blocks[axis] = max(rows, min(blocks[axis], GPU_DEPTH))
    return tiled


def _depth(kernel: Kernel, axis: str, shape: Shape) -> int:
    """Positions of a contracted axis to walk at a time: more where an element is a byte, so that rows of
    operands are as long as tensor cores read them."""
    found = (p.node for p in products(kernel) if p.contraction.axis == axis)
    sizes = {shape.itemsize(n.tensor) for n in walk(*found) if isinstance(n, Load)}
    return 2 * GPU_DEPTH if sizes == {1} else GPU_DEPTH


def _fit_products(
    kernel: Kernel,
    roles: _Roles,
    blocks: dict[str, int],
    tiled: Sequence[str],
    limits: Mapping[str, int],
    shape: Shape,
    device: Device,
) -> tuple[int, int]:
    """Shrinks blocks of matrix products until they fit and every unit has work; returns warps and stages."""

    def warps() -> int | None:
        needed = {w: registers(kernel, blocks, w, device.lanes, shape) for w in (4, 8)}
        if needed[4] <= (REGISTERS if rows() == WARPGROUP_ROWS else FEW_REGISTERS):
            return 4
        return 8 if needed[8] <= REGISTERS else None

    def rows() -> int:
        return max((blocks[a] for a in tiled if a in roles.parallel), default=1)

    def stages(share: int = 1) -> int | None:
        found = (s for s in (4, 3, 2) if shared_bytes(kernel, blocks, s, shape) * share <= device.shared)
        return next(found, None)

    def halve(axes: Sequence[str]) -> bool:
        # Loops shrink before rows: what a row of blocks loads again is what it does not share.
        wide = [a for a in axes if blocks[a] > TENSOR_CORE_MIN]
        if wide:
            blocks[max(wide, key=lambda a: (blocks[a], a not in roles.parallel))] //= 2
        return bool(wide)

    while warps() is None or stages() is None:
        if not halve(tiled):
            break
    parallel = [a for a in tiled if a in roles.parallel]
    if warps() == 8 and rows() == WARPGROUP_ROWS:  # eight warps are two groups: of 64 rows each, better
        before = dict(blocks)
        blocks |= {a: min(2 * blocks[a], limits[a]) for a in parallel if blocks[a] == WARPGROUP_ROWS}
        while warps() is None or stages() is None:
            if not halve([a for a in tiled if a not in parallel]):
                blocks.update(before)
                break
    apart = [a for a in parallel if a not in packed_axes(kernel)]  # what is packed would be loaded again
    while 2 * _instances(roles.parallel, blocks, shape.extents) <= device.units and halve(apart):
        pass
    for axis in (a for a in tiled if a in roles.steps and min(blocks[t] for t in tiled) < WARPGROUP_ROWS):
        while (
            blocks[axis] < min(limits[axis], GPU_WHOLE)
            and shared_bytes(kernel, blocks, 1, shape) < GPU_STREAM
        ):
            blocks[axis] *= 2
    chosen = warps() or 8
    if not (_loops_over_sides(kernel, roles) or fits_twice(kernel, blocks, chosen, shape, device)):
        return chosen, min(device.stages, stages() or 2)  # no second instance could use the rest
    return chosen, min(device.stages, stages(2) or min(3, stages() or 2))


def _loops_over_sides(kernel: Kernel, roles: _Roles) -> bool:
    """Whether matrix products are inside of loops over their rows or columns."""
    return any(a in roles.loops for c in contractions(kernel) for a in c.apart)


def _instances(axes: Sequence[str], blocks: Mapping[str, int], extents: Mapping[str, int]) -> int:
    return math.prod(math.ceil(extents[a] / blocks[a]) for a in axes)


def _widest(values: Sequence[frozenset[str]], blocks: Mapping[str, int]) -> int:
    return max(math.prod(blocks.get(a, 1) for a in v) for v in values)


def _kinds(roles: _Roles, whole: Collection[str]) -> dict[str, BlockKind]:
    kinds: dict[str, BlockKind] = {}
    kinds.update(dict.fromkeys(roles.parallel, "grid"))
    kinds.update(dict.fromkeys(roles.loops, "loop"))
    kinds.update(dict.fromkeys(roles.units, "unit"))
    kinds.update({a: "whole" if a in whole else "loop" for a in roles.inner})
    return kinds


def tiny(kernel: Kernel, block: int = 2) -> KernelConfig:
    """Blocks smaller than any axis of a verification run, so that there are several and a ragged last one."""
    roles = _Roles.of(kernel)
    kinds = _kinds(roles, {a for a in roles.inner if a not in roles.steps})
    sizes: dict[BlockKind, int | None] = {"grid": block, "loop": block, "unit": 1, "whole": None}
    return KernelConfig(
        tuple(Block(a, kind, 1 if a in roles.single else sizes[kind]) for a, kind in kinds.items())
    )
