"""The cost model: the predicted time of one kernel under a configuration, a roofline with measured residuals.

    seconds = slowdown * (bottleneck + hidden * (other terms) + steps + spill) + launch

    memory, cache   bytes from memory and from the cache / bandwidths           (traffic.py)
    matrix          2 * multiplications / the tensor cores' rate
    special         exp, log, division ... / the special-function units' rate
    elementwise     other operations / the rate that they issue at
    steps           trips of loops, of the SM that has most, * the overhead of a trip
    spill           traffic of tiles that do not fit on chip

An SM's units work side by side: the largest term shows, and a part of the others. Steps show whole, but for those of matrix products
that wait for memory. On a CPU all add up.
`slowdown` is for tiles that under-use an SM (registers, shared memory and warps: resources.py). Constants that were fitted
are in residuals.py, rates and capacities in devices.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from eqfuse.extract.devices import Device
from eqfuse.extract.kernel_work import Axes, KernelWork, MatrixProduct, Step, work_of
from eqfuse.extract.library_products import library_terms
from eqfuse.extract.mask_coverage import Coverage, ragged, rows_with_ranges
from eqfuse.extract.residuals import CPU
from eqfuse.extract.resources import bytes_read_again, loads_vectors, rows, size_of, slowdowns
from eqfuse.extract.shape import Shape
from eqfuse.extract.traffic import load_seconds, store_seconds
from eqfuse.loops.nodes import Kernel
from eqfuse.loops.plan import Cost, KernelConfig, Term
from eqfuse.terms.integers import power_of_two
from eqfuse.terms.nodes import Call, Output, free_axes, reductions, walk

FLOAT_BYTES = 4


def total(kernels: Iterable[Sequence[Term]]) -> Cost:
    """The cost of several kernels, one after the other, from the terms of each."""
    sums: dict[str, float] = {}
    for terms in kernels:
        for term in terms:
            sums[term.name] = sums.get(term.name, 0.0) + term.seconds
    return Cost(tuple(Term(name, seconds) for name, seconds in sums.items()))


STREAMED = 1.5
"""How many times as long as its arithmetic the bytes of a kernel take that waits for memory. The model counts bytes that thread blocks read together
as often as they might be read, so that a large product takes about as long for its bytes as for its multiplications."""


def least_seconds(outputs: Iterable[Output], extents: Mapping[str, int], device: Device) -> float:
    """Seconds that any plan of these outputs takes at least: one operation for each element of a reduction, at the device's highest
    rate. Of a reduction under a mask, whose loops may be shorter, nothing is known."""
    bodies = (fold.body for fold in reductions(*(output.expr for output in outputs)))
    visited = (
        math.prod(float(extents[axis]) for axis in free_axes(body))
        for body in bodies
        if not any(isinstance(node, Call) and node.fn == "where" for node in walk(body))
    )
    return max(visited, default=0.0) / max(device.matrix_half, device.matrix_float, device.elementwise)


def sort_seconds(positions: int, device: Device) -> float:
    """The time in which torch sorts positions by a key and counts those before each segment."""
    residuals = device.residuals if device.kind == "gpu" else CPU
    return residuals.sort_call + residuals.sort_position * positions


def overlapped(
    terms: Mapping[str, float], slowdown: float, hidden: float, *, streams: bool = False
) -> dict[str, float]:
    """What shows of the terms of a kernel on a GPU: what is not the bottleneck hides behind it, but for a part. So do trips of a loop that
    `streams` operands: those of the next ones are on their way."""
    apart = ("spill",) if streams else ("steps", "spill")
    largest = max((name for name in terms if name not in apart), key=lambda name: terms[name])
    return {
        name: slowdown * (seconds if name == largest or name in apart else hidden * seconds)
        for name, seconds in terms.items()
    }


def waits_for_memory(alone: Mapping[str, float]) -> bool:
    """Whether a kernel waits for memory, whatever it computes meanwhile. `alone` is what each kind of work would take."""
    arithmetic = max(alone[name] for name in ("matrix", "elementwise", "special"))
    return alone["memory"] >= max(*alone.values(), STREAMED * arithmetic)


class KernelCost:
    """Prices configurations of one kernel at one shape: what does not depend on blocks is found once."""

    def __init__(self, kernel: Kernel, shape: Shape, device: Device) -> None:
        self.kernel, self.shape, self.device = kernel, shape, device
        self.on_gpu = device.kind == "gpu"
        self.work: KernelWork = work_of(kernel, on_cpu=not self.on_gpu)
        self._coverage = Coverage(kernel, shape)
        sides = {a for p in self.work.products for a in (*p.contraction.rows, *p.contraction.columns)}
        is_compiled = not self.on_gpu and device.position < 1
        self.alone_in_blocks = dict.fromkeys(rows_with_ranges(kernel) - sides if is_compiled else (), 1)
        """Rows with ranges of their own that C++ walks one by one, whatever the plan's blocks."""
        self.uneven = frozenset(axis for axis, each in ragged(kernel).items() if each.segment)
        self._vectors = loads_vectors(kernel, shape)
        self._again = bytes_read_again(kernel, shape)

    def seconds(self, config: KernelConfig) -> float:
        """The predicted time."""
        return sum(term.seconds for term in self.terms(config))

    def terms(self, config: KernelConfig) -> list[Term]:
        """What shows of each term, in seconds."""
        if self.kernel.library is not None:
            return library_terms(self.kernel.library, self.shape, self.device)
        found = self.alone(config)
        if self.on_gpu:
            streams, hidden = self.streams(config, found), self.device.residuals.hidden
            found = overlapped(found, self.slowdown(config, streams=streams), hidden, streams=streams)
        found["launch"] = self.device.launch
        return [Term(name, seconds) for name, seconds in found.items()]

    def streams(self, config: KernelConfig, alone: Mapping[str, float]) -> bool:
        """Whether a kernel does nothing but multiply along axes that it walks, and waits for the operands. `alone` is what each kind of
        work would take."""
        sizes, extents, products = config.sizes(self.shape.extents), self.shape.extents, self.work.products
        walks = bool(products) and all(
            sizes[p.contraction.axis] < extents[p.contraction.axis] for p in products
        )
        if not walks or not waits_for_memory(alone):
            return False
        sizes_stored = (
            self.shape.itemsize(w.tensor) * self.shape.positions(w.axes) for w in self.work.stores
        )
        return 2 * sum(sizes_stored) < alone["memory"] * self.device.bandwidth

    def slowdown(self, config: KernelConfig, *, streams: bool = False) -> float:
        """The product of the factors that apply to these tiles. Where they stream operands, one thread block on an SM is enough."""
        factors = self.device.residuals.slowdowns
        found = slowdowns(self.kernel, config, self.shape, self.device)
        if streams:
            found.pop("one_block", None)
        return float(math.prod(factors[name] ** power for name, power in found.items()))

    def grid(self, config: KernelConfig) -> int:
        """Thread blocks."""
        return _Priced(self, config).grid

    def trips(self, config: KernelConfig, *, inside: bool = False) -> int:
        """Trips of all loops of a thread block, those of a range that a condition cuts on average; of the innermost one, where each
        loop is `inside` of another."""
        priced = _Priced(self, config)
        loops = dict.fromkeys((*self.work.loops, *(b.axis for b in config.blocks if b.kind == "loop")))
        trips = [math.ceil(priced.extents[axis] / priced.blocks[axis]) for axis in loops]
        return math.prod(trips) if inside else sum(trips)

    def alone(self, config: KernelConfig) -> dict[str, float]:
        """What each kind of work would take by itself, in seconds."""
        return _Priced(self, config).terms()


class _Priced:
    """One configuration: extents as far as they are walked, blocks, and the grid."""

    def __init__(self, cost: KernelCost, config: KernelConfig) -> None:
        self.cost, self.config, self.device, self.work = cost, config, cost.device, cost.work
        extents = cost.shape.extents
        walked = cost._coverage.visited({**config.sizes(extents), **cost.alone_in_blocks})
        self.extents = {**extents, **walked}
        for axis, by in self.work.sharded.items():
            self.extents[axis] = math.ceil(self.extents[axis] / self.extents[by])
        self.blocks = {b.axis: b.valid or b.size or max(1, self.extents[b.axis]) for b in config.blocks}
        self.counts = {a: math.ceil(self.extents[a] / self.blocks[a]) for a in cost.kernel.parallel}
        self.grid = math.prod(self.counts.values())

    def positions(self, axes: Axes) -> float:
        return math.prod(self.extents.get(a, 1) for a in axes)

    def computed(self, axes: Axes) -> float:
        """Positions of a value, those of every block that computes it again counted."""
        return self.positions(axes) * math.prod(n for a, n in self.counts.items() if a not in axes)

    def _masked(self, axes: Axes) -> float:
        """How many times as many positions a GPU's tiles have as there are in the ranges that data leaves."""
        found = 1.0
        for axis in axes & self.cost.uneven if self.cost.on_gpu else ():
            walked, block = self.extents[axis], self.blocks.get(axis, 1)
            found *= math.ceil(walked / block) * block / walked
        return found

    def terms(self) -> dict[str, float]:
        device, residuals, work = self.device, self.device.residuals, self.work
        # Wave quantisation: the last wave of thread blocks leaves SMs idle. A few blocks do not draw all bandwidth.
        fill = self.grid / (math.ceil(self.grid / device.sms) * device.sms) if self.grid else 1.0
        share = 1.0 if work.has_loop else residuals.block_share
        busy = min(1.0, share * self.grid / device.sms) or 1.0
        if self.cost.on_gpu:
            even = self.cost._coverage.evenness(self.blocks, self.grid / device.sms)
            fill, busy = fill * even, busy * even
        products = fill
        if not self.cost.on_gpu and self.grid < 2 * device.sms:
            # The library shares its products out among threads; other operations are those of one thread for each position.
            products = busy = 1.0
            fill = min(1.0, self.positions(frozenset(self.cost.kernel.parallel)) / device.sms) or 1.0
        memory, cache = self._traffic()
        matrix = sum(
            max(2 * self.computed(p.axes) / self._matrix_rate(p), fill * self._in_turn(p))
            for p in work.products
        )
        elementwise = sum(n * self.computed(axes) * self._masked(axes) for axes, n in work.elementwise)
        special = sum(n * self.computed(axes) * self._masked(axes) for axes, n in work.special)
        traffic = (
            {"memory": memory / busy, "cache": cache / busy}
            if self.cost.on_gpu
            else {"memory": (memory + cache) / busy}
        )
        return {
            **traffic,
            "matrix": matrix / products,
            "elementwise": elementwise / device.elementwise / fill,
            "special": special / device.special / fill,
            "steps": self._overhead(),
            "spill": self._spill(),
        }

    def _traffic(self) -> tuple[float, float]:
        """Seconds of memory and of the cache."""
        device, side = self.device, self._side_by_side()
        again = self.cost._again * min(self.grid, side * device.sms)
        memory = cache = 0.0
        for access in self.work.loads:
            # What is written passes through the cache too.
            kept = self.cost.on_gpu and access.again and again <= device.cache / 2
            from_memory, from_cache = load_seconds(
                access,
                self.cost.kernel.parallel,
                self.blocks,
                self.extents,
                self.cost.shape,
                device,
                kept=kept,
            )
            memory += from_memory
            cache += from_cache
        for written in self.work.stores:
            memory += store_seconds(written, self.blocks, self.extents, self.cost.shape, device)
        return memory, cache

    def _matrix_rate(self, product: MatrixProduct) -> float:
        """Operations a second, fewer where a block has too few rows for the instruction."""
        device, shape, residuals = self.device, self.cost.shape, self.device.residuals
        if not shape.is_half_product(product.node, product.contraction):
            return device.matrix_float * (self._float_share(product) if self.cost.on_gpu else 1.0)
        rate = device.matrix_half * (residuals.narrow_rate if shape.is_narrow(product.node) else 1)
        full = rows(product.contraction, self.blocks) >= device.rows
        return rate if full else rate / residuals.few_rows

    def _float_share(self, product: MatrixProduct) -> float:
        """The part of the rate that a product of float32 has by its own instructions."""
        read, residuals = product.contraction.right.read, self.device.residuals
        is_turned = read is not None and product.contraction.axis in free_axes(read.index[-1])
        return residuals.float_turned if is_turned else residuals.float_rate

    def _in_turn(self, product: MatrixProduct) -> float:
        """Seconds of the positions of the summed axis that thread blocks go through one after the other, where no tensor core multiplies."""
        found, residuals = product.contraction, self.device.residuals
        is_vector = 1 in (size_of(found.rows, self.blocks), size_of(found.columns, self.blocks))
        if not self.cost.on_gpu or is_vector or self.cost.shape.is_half_product(product.node, found):
            return 0.0
        sides = (*found.rows, *found.columns)
        tile = math.prod(min(self.blocks.get(axis, 1), self.extents.get(axis, 1)) for axis in sides)
        positions = self.computed(product.axes) / (self.grid * tile) if self.grid else 0.0
        each = max(
            residuals.float_step, residuals.float_row * rows(found, self.blocks) / self._float_share(product)
        )
        beside = max(1, residuals.float_beside // tile)
        return max(1.0, self.grid / beside / self.device.sms) * positions * each

    def _side_by_side(self) -> int:
        """Thread blocks of a kernel without matrix products that run side by side on an SM."""
        return max(1, self.device.residuals.side_warps // self.config.warps)

    def _overhead(self) -> float:
        """Seconds of the trips of loops on the SM that has most, and of waiting where nothing else runs there."""
        device, residuals, work = self.device, self.device.residuals, self.work
        waves = self.grid / device.sms
        if self.cost.on_gpu:  # small blocks run side by side; a single one takes its whole time
            waves = max(1.0, waves / (1 if work.products else self._side_by_side()))
        start = 1.0 if self.cost.on_gpu else 0.0
        overhead = waves * self._steps(work.steps, start) * device.step
        if self.cost.on_gpu and not work.products:
            overhead += self._latency()
            if (
                not work.has_loop and 2 * FLOAT_BYTES * self._widest() > device.tile
            ):  # no room for a second row
                row = residuals.whole_row * (1 if self.cost._vectors else residuals.scattered)
                row += residuals.stored_row if work.stores_rows else 0.0
                overhead += row * max(1.0, self.grid / device.sms)
        return overhead

    def _latency(self) -> float:
        """Seconds that an SM waits for tiles: the first ones, and, of its only thread block, those of each trip."""
        residuals = self.device.residuals
        if not self.work.has_loop:
            return 0.0
        if self.grid > self.device.sms:
            return residuals.first_tile
        trips = sum(math.ceil(self.extents[axis] / self.blocks[axis]) for axis in self.work.loops)
        if self.config.stages == 1:
            return trips * residuals.first_tile
        return residuals.first_tile + trips * residuals.trip

    def _steps(self, steps: Sequence[Step], start: float) -> float:
        """What the overhead of a step multiplies in one thread block: tile operations run one by one on a CPU,
        trips of loops on a GPU, whose operations overlap."""
        found = start
        for step in steps:
            if step.axis is not None:
                trips = math.ceil(self.extents[step.axis] / (1 if step.unit else self.blocks[step.axis]))
                found += trips * self._steps(step.inside, start) * (self.device.position if step.unit else 1)
            elif not self.cost.on_gpu:
                found += step.operations
            else:
                walked = (math.ceil(self.extents[a] / self.blocks[a]) for a in step.walked)
                found += sum(count for count in walked if count > 1)
        return found

    def _widest(self) -> float:
        """Elements of the widest tile that is computed."""
        return max((size_of(axes, self.blocks) for axes in self.work.values), default=1)

    def _overflows(self) -> bool:
        """Whether a thread has more elements of a tile than registers: rows that are held whole by warps that were chosen for
        shorter ones. Tiles of matrix products have slowdowns for it."""
        if not self.cost.on_gpu or self.work.products:
            return False
        whole = {b.axis for b in self.config.blocks if b.kind == "whole"}
        blocks = {a: power_of_two(n) if a in whole else n for a, n in self.blocks.items()}
        widest = max((size_of(axes, blocks) for axes in self.work.values), default=1)
        return widest > self.device.residuals.registers * self.config.warps * self.device.lanes

    def _spill(self) -> float:
        """Seconds to move what does not fit on chip out and in again."""
        device, residuals = self.device, self.device.residuals
        widest = FLOAT_BYTES * self._widest()
        if widest <= device.tile and not self._overflows():
            return 0.0
        blocks = max(self.grid, device.sms / residuals.block_share)
        return residuals.spill_traffic * widest * blocks / device.bandwidth


def kernel_terms(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> list[Term]:
    """What shows of each term of one kernel, in seconds."""
    return KernelCost(kernel, shape, device).terms(config)
