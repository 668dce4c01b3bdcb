"""Tile sizes, warps and stages of a kernel with matrix products on a GPU: points of a small lattice, priced.

    price = slowdowns * occupancy * waves * sizes * stages * bytes in flight

Sizes are powers of two from 16; warps 4 or 8; stages 2 to those of the device. The descent begins at the sizes that are
best where everything fits, and halves or doubles one axis at a time while that is cheaper. Every factor is 1 at its best:
what they are multiplied with, the roofline of the kernel, is the same for all points. The factors are of residuals.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from eqfuse.extract.devices import Device
from eqfuse.extract.resources import (
    WARPGROUP,
    WARPGROUP_ROWS,
    held,
    most_per_sm,
    shared_by_stages,
)
from eqfuse.extract.shape import Shape
from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.nodes import Kernel

LEAST = 16
"""Positions of an axis that tensor cores take at least."""

MOST = 256
"""Positions of an axis beyond which the lattice does not reach."""

WARPS = (4, 8)


@dataclass(frozen=True)
class TiledAxis:
    """An axis of the lattice: the least and the most of the sizes that are `best` where everything fits, and how far it
    reaches. `is_depth` is the contracted axis of a product that walks it in steps of its own."""

    axis: str
    best: tuple[int, int]
    limit: int
    is_parallel: bool
    is_rows: bool = False
    is_depth: bool = False


@dataclass(frozen=True)
class Point:
    """One point of the lattice, and its price."""

    blocks: Mapping[str, int]
    warps: int
    stages: int
    price: float


class Lattice:
    """`blocks` are those of the axes that have no choice. With `overlaps`, thread blocks of one SM are in different phases
    (a product while another computes its exponentials), so that two of them are wanted. With `streams`, products wait for operands
    from memory: what counts are bytes under way on an SM, and few what blocks load again."""

    def __init__(
        self,
        kernel: Kernel,
        shape: Shape,
        device: Device,
        blocks: Mapping[str, int],
        axes: Sequence[TiledAxis],
        *,
        overlaps: bool,
        streams: bool = False,
    ) -> None:
        self.kernel, self.shape, self.device, self.axes = kernel, shape, device, axes
        self.overlaps = overlaps
        self.streams = streams and any(a.is_depth for a in axes)
        self.start = {**blocks, **{a.axis: max(LEAST, min(a.best[0], a.limit)) for a in axes}}
        self.residuals = device.residuals
        self._known: dict[tuple[int, ...], Point] = {}

    def with_rows(self, rows: int) -> Lattice:
        """The lattice with this as the best number of rows."""
        axes = [replace(a, best=(rows, rows)) if a.is_rows else a for a in self.axes]
        settings = self.kernel, self.shape, self.device, self.start, axes
        return Lattice(*settings, overlaps=self.overlaps, streams=self.streams)

    def best(self) -> Point:
        """The cheapest point that the descent reaches."""
        here = self._at(self.start)
        while True:
            near = min((self._at(blocks) for blocks in self._near(here.blocks)), key=_price, default=here)
            if near.price >= here.price:
                return here
            here = near

    def _near(self, blocks: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """One axis halved or doubled once or twice, alone or with twice the depth; loops before rows: what a row of blocks
        loads again is what it does not share."""
        for tiled in sorted(self.axes, key=lambda a: (-blocks[a.axis], a.is_parallel)):
            for by in (-1, -2, 1, 2):
                yield from self._moved(blocks, tiled, by)
                if tiled.is_parallel and by < 0:
                    for depth in (a for a in self.axes if a.is_depth):
                        for moved in self._moved(blocks, tiled, by):
                            yield from self._moved(moved, depth, 1)

    @staticmethod
    def _moved(blocks: Mapping[str, int], tiled: TiledAxis, by: int) -> Iterator[dict[str, int]]:
        """The blocks with one axis 2**by times as large, if the lattice has that."""
        size = int(blocks[tiled.axis] * 2.0**by)
        if LEAST <= size <= min(max(LEAST, tiled.limit), MOST):
            yield {**blocks, tiled.axis: size}

    def _at(self, blocks: Mapping[str, int]) -> Point:
        """The cheapest warps and stages of these blocks; of equal prices the first."""
        sizes = tuple(blocks[a.axis] for a in self.axes)
        if sizes not in self._known:
            self._known[sizes] = min(self._priced(blocks), key=_price)
        return self._known[sizes]

    def _priced(self, blocks: Mapping[str, int]) -> Iterator[Point]:
        kernel, device, shape = self.kernel, self.device, self.shape
        grid = self._grid(blocks)
        sized = self._waves(grid) * self._sizes(blocks)
        needed = shared_by_stages(kernel, blocks, range(device.stages + 1), shape)
        values = held(kernel, blocks, device, shape)
        for warps in WARPS:
            each = values.by_thread(warps * device.lanes)
            by_warps = sized * self._registers(blocks, warps, each)
            most = most_per_sm(each, warps, device)
            for stages in range(2, device.stages + 1):
                price = by_warps * self._waiting(needed, stages, most >= 2)
                yield Point(blocks, warps, stages, price * self._under_way(needed, stages, most, grid))

    def _grid(self, blocks: Mapping[str, int]) -> int:
        """Thread blocks."""
        return math.prod(math.ceil(self.shape.extents[a] / blocks[a]) for a in self.kernel.parallel)

    def _waves(self, grid: int) -> float:
        """SMs that are idle in the last wave."""
        sms = self.device.sms
        return math.ceil(grid / sms) * sms / grid if grid else 1.0

    def _sizes(self, blocks: Mapping[str, int]) -> float:
        """Sizes beside the best ones, and too few rows for the tensor core's instruction."""
        found, limit = 1.0, self.residuals
        for tiled in self.axes:
            size, (least, most) = blocks[tiled.axis], tiled.best
            up = limit.per_doubling_depth if tiled.is_depth else limit.per_doubling
            if self.streams and tiled.is_parallel and not tiled.is_rows:
                found *= self._loaded_again(blocks, size, min(least, tiled.limit))
            else:
                found *= limit.per_doubling ** max(0.0, math.log2(min(least, tiled.limit) / size))
            found *= up ** max(0.0, math.log2(size / most))
            if tiled.is_parallel and size < self.device.rows <= tiled.limit and tiled.is_rows:
                found *= limit.few_rows_tile
        return found

    def _loaded_again(self, blocks: Mapping[str, int], columns: int, best: int) -> float:
        """Bytes that a block of so many columns loads for each of its elements, over those of one of the best number: columns are
        loaded once for all rows of a block, rows once for all columns."""
        rows = min((blocks[a.axis] for a in self.axes if a.is_rows), default=best)
        return max(1.0, (1 / columns + 1 / rows) / (1 / best + 1 / rows))

    def _registers(self, blocks: Mapping[str, int], warps: int, each: float) -> float:
        """Spills, and operands that warps share or pass through registers; `each` thread holds so many values."""
        limit, factors = self.residuals, self.residuals.slowdowns
        rows = max((blocks[a.axis] for a in self.axes if a.is_parallel), default=1)
        found = 1.0
        if each > limit.registers:
            found *= factors["spills"] ** (1 + math.log2(each / limit.registers))
        elif warps == WARPGROUP and rows != WARPGROUP_ROWS and each > limit.registers_for_4_warps:
            found *= limit.crowded
        if rows >= WARPGROUP_ROWS == self.device.rows and rows * WARPGROUP < WARPGROUP_ROWS * warps:
            found *= factors["shared_rows"]
        return found

    def _waiting(self, needed: Sequence[int], stages: int, fits: bool) -> float:
        """Shared memory, of which `needed` is what each number of stages takes: whether two thread blocks fit an SM (where
        registers let them, or two are wanted, and products do not wait for memory alone), and stages."""
        limit, room = self.residuals, self.device.shared
        if needed[stages] > room:
            return limit.no_room * needed[stages] / room
        found = limit.stages[stages]
        if self.streams and not self.overlaps:
            return found
        if (self.overlaps and not fits) or (fits and 2 * needed[stages] > room):
            found *= limit.slowdowns["one_block"] * (1 + limit.crowded_shared * needed[stages] / room)
        return found

    def _under_way(self, needed: Sequence[int], stages: int, most: int, grid: int) -> float:
        """Too few bytes under way: in a thread block, or, where products wait for memory, on an SM, whose registers hold at `most` so many
        blocks."""
        if not any(a.is_depth for a in self.axes):
            return 1.0
        limit, under_way = self.residuals, max(1, (stages - 1) * (needed[1] - needed[0]))
        if not self.streams:
            return math.sqrt(max(1.0, limit.bytes_under_way / under_way))
        blocks = min(most, self.device.shared // max(1, needed[stages]), grid / self.device.sms)
        return math.sqrt(max(1.0, limit.bytes_streamed / max(1.0, blocks * under_way)))


def _price(point: Point) -> float:
    return point.price
