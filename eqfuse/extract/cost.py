"""Predicted time of a loop nest under a configuration: small sums of bytes and operations over rates.

Bytes over bandwidth, matrix and elementwise and special-function operations over their rates, launches,
and how well the grid fills the device. Terms overlap on a GPU (the largest counts), and add up on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from eqfuse.extract.devices import Device
from eqfuse.extract.mask_coverage import visited
from eqfuse.extract.resources import bytes_read_again, loads_vectors, rows, sharded_axes
from eqfuse.extract.shape import Shape
from eqfuse.extract.strain import strain
from eqfuse.loops.contraction import Contraction
from eqfuse.loops.kernel_axes import divisors, kernel_axes, widest_values
from eqfuse.loops.nodes import Kernel, Loop, Stmt, Store
from eqfuse.loops.plan import Cost, KernelConfig, Term
from eqfuse.loops.walk import expressions, loops_in, statements
from eqfuse.terms.functions import SPECIAL
from eqfuse.terms.nodes import Axis, Call, Expr, Load, Reduce, free_axes, walk

UNIT_SHARE = 4
"""How many times its share of the bandwidth a unit takes alone, where all of an instance's loads are under way
at once: no loop waits for some of them."""

ALONE, STORED_ALONE = 1.5e-7, 7e-7
"""Seconds that each whole row adds where a unit has one at a time: nothing is under way while it is reduced; and
where rows are stored, since nothing is loaded meanwhile."""

SCATTERED = 4
"""How many times as long that is where numbers are loaded one by one."""

FILLING = 1e-6
"""Seconds in which a loop's first tiles arrive, and nothing is computed. So long is each trip of a loop that is
alone in its unit and has no tile under way beforehand."""

TRAILING = 2.5e-7
"""The same for each trip where tiles are under way: too few for the whole bandwidth."""

HIDDEN = 0.2
"""Part of a term that shows beside the largest one."""

FLOAT_BYTES = 4

SIDE_WARPS = 32
"""Warps that run side by side in a unit of a GPU in kernels without matrix products."""


def total(kernels: Iterable[Sequence[Term]]) -> Cost:
    """The cost of several kernels, one after the other, from the terms of each."""
    sums: dict[str, float] = {}
    for terms in kernels:
        for term in terms:
            sums[term.name] = sums.get(term.name, 0.0) + term.seconds
    return Cost(tuple(Term(name, seconds) for name, seconds in sums.items()))


def kernel_terms(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> list[Term]:
    """Terms of one kernel, in seconds."""
    terms = work_terms(kernel, config, shape, device)
    if device.kind == "gpu":
        blocks = {b.axis: b.size or max(1, shape.extents[b.axis]) for b in config.blocks}
        terms = overlapped(terms, strain(kernel, config, blocks, shape, device))
    return [*terms, Term("launch", device.launch)]


def overlapped(terms: Sequence[Term], slower: float) -> list[Term]:
    """What shows of the terms of a kernel on a GPU: its units work side by side, and what is not the bottleneck
    hides behind it. All of it takes `slower` times as long as it would."""
    apart = ("steps", "spill")
    largest = max((t for t in terms if t.name not in apart), key=lambda t: t.seconds)
    shown = (t if t is largest or t.name in apart else Term(t.name, HIDDEN * t.seconds) for t in terms)
    return [Term(t.name, slower * t.seconds) for t in shown]


def work_terms(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> list[Term]:
    """What each kind of work of one kernel would take alone, in seconds."""
    sharded = sharded_axes(kernel)
    walked = visited(kernel, config.sizes(shape.extents), shape)
    shape = _per_shard(Shape({**shape.extents, **walked}, shape.dtypes), sharded)
    blocks = {b.axis: b.valid or b.size or max(1, shape.extents[b.axis]) for b in config.blocks}
    grid = math.prod(math.ceil(shape.extents[a] / blocks[a]) for a in kernel.parallel)
    fill = grid / (math.ceil(grid / device.units) * device.units) if grid else 1.0
    busy = min(1.0, (1 if _has_loop(kernel) else UNIT_SHARE) * grid / device.units) or 1.0
    if device.kind == "cpu" and grid < 2 * device.units:  # the units share every operation instead
        fill = busy = 1.0
    operations = [(node, c, _with_shards(axes, sharded)) for node, c, axes in _operations(kernel, device)]
    side = max(1, SIDE_WARPS // config.warps)
    again = bytes_read_again(kernel, shape) * min(grid, side * device.units)
    memory, cached, seen = 0.0, 0.0, set[Load]()
    for load, inside in _loads(kernel):
        # What is written passes through the cache too.
        kept = device.kind == "gpu" and load in seen and again <= device.cache / 2
        used = _with_shards(free_axes(load), sharded)
        from_memory, from_cache = _load_seconds(load, used, inside, kernel, blocks, shape, device, kept=kept)
        memory += from_memory
        cached += from_cache
        seen.add(load)
    memory += sum(
        _store_seconds(store, shape, device) for store in statements(kernel.body) if isinstance(store, Store)
    )

    def positions(axes: frozenset[str]) -> float:
        """Positions of a value, those of every block that computes it again counted."""
        again = math.prod(math.ceil(shape.extents[a] / blocks[a]) for a in kernel.parallel if a not in axes)
        return shape.positions(axes) * again

    matrix = sum(
        2 * positions(axes | {c.axis}) / _matrix_rate(node, rows(c, blocks), shape, device)
        for node, c, axes in operations
        if c is not None
    )
    elementwise = sum(positions(axes) for _, c, axes in operations if c is None) / device.elementwise
    special = sum(
        positions(axes) for e, c, axes in operations if c is None and isinstance(e, Call) and e.fn in SPECIAL
    )
    waves = grid / device.units
    has_products = any(c for _, c, _ in operations)
    if device.kind == "gpu":  # small instances run side by side; a single one takes its whole time
        waves = max(1.0, waves / (1 if has_products else side))
    looped = {loop.axis for loop in loops_in(kernel.body)}
    alone = {node: c.axis for node, c, _ in operations if c is not None and c.axis not in looped}
    overhead = waves * _steps(kernel.body, blocks, shape, device, alone) * device.step
    if device.kind == "gpu" and not has_products:
        overhead += _waiting(kernel, config, blocks, shape) if grid <= device.units else _filling(kernel)
        if _fills_unit(kernel, blocks, device):
            overhead += _alone(kernel, shape) * max(1.0, grid / device.units)
    return [
        *_traffic(memory / busy, cached / busy, device),
        Term("matrix", matrix / fill),
        Term("elementwise", elementwise / fill),
        Term("special", special / device.special / fill),
        Term("steps", overhead),
        Term("spill", _spill(kernel, blocks, shape, device)),
    ]


def seconds_alone(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> dict[str, float]:
    """The terms of `work_terms` by name."""
    return {term.name: term.seconds for term in work_terms(kernel, config, shape, device)}


def _traffic(memory: float, cached: float, device: Device) -> list[Term]:
    """A GPU reads from its cache beside memory; on a CPU the two add up."""
    if device.kind == "cpu":
        return [Term("memory", memory + cached)]
    return [Term("memory", memory), Term("cache", cached)]


def _matrix_rate(product: Expr, rows: int, shape: Shape, device: Device) -> float:
    """Twice that of halves where every tensor of a product has elements of one byte; a third of it for blocks of too
    few rows."""
    if not shape.is_half(product):
        return device.matrix_float
    return device.matrix_half * (2 if shape.is_narrow(product) else 1) / (1 if rows >= device.rows else 3)


def _fills_unit(kernel: Kernel, blocks: Mapping[str, int], device: Device) -> bool:
    """Whether whole rows leave no room on chip for a second instance."""
    widest = max(math.prod(blocks.get(a, 1) for a in axes) for axes in widest_values(kernel) or ((),))
    return not _has_loop(kernel) and 2 * FLOAT_BYTES * widest > device.tile


def _filling(kernel: Kernel) -> float:
    return FILLING if _has_loop(kernel) else 0.0


def _waiting(kernel: Kernel, config: KernelConfig, blocks: Mapping[str, int], shape: Shape) -> float:
    """Seconds that a unit waits for the tiles of its only instance."""
    loops = [loop for loop in loops_in(kernel.body) if not loop.unit]
    trips = sum(math.ceil(shape.extents[loop.axis] / blocks[loop.axis]) for loop in loops)
    return trips * FILLING if config.stages == 1 else _filling(kernel) + trips * TRAILING


def _alone(kernel: Kernel, shape: Shape) -> float:
    """Seconds that a whole row adds where a unit has one at a time."""
    stored = any(isinstance(stmt, Store) and stmt.dims for stmt in statements(kernel.body))
    return ALONE * (1 if loads_vectors(kernel, shape) else SCATTERED) + (STORED_ALONE if stored else 0.0)


def _has_loop(kernel: Kernel) -> bool:
    return any(True for _ in loops_in(kernel.body))


def _per_shard(shape: Shape, sharded: Mapping[str, str]) -> Shape:
    extents = {axis: math.ceil(shape.extents[axis] / shape.extents[by]) for axis, by in sharded.items()}
    return Shape({**shape.extents, **extents}, shape.dtypes)


def _with_shards(axes: frozenset[str], sharded: Mapping[str, str]) -> frozenset[str]:
    return axes | {by for axis, by in sharded.items() if axis in axes}


def _operations(kernel: Kernel, device: Device) -> Iterator[tuple[Expr, Contraction | None, frozenset[str]]]:
    """Every operation of the bodies, with the axes over whose positions it runs."""
    axes = kernel_axes(kernel, vectors=device.kind == "cpu")
    for expr in expressions(kernel.body):
        for node in axes.computed(expr):
            if isinstance(node, Reduce):
                found = axes.contraction(node)
                # a list is selected at once on a CPU, and rank by rank on a GPU
                runs = axes.folded(node) if device.kind == "cpu" else axes.of(node.body)
                yield node, found, axes.of(node) if found else runs
            elif isinstance(node, Call):
                yield node, None, axes.of(node)


def _loads(kernel: Kernel) -> Iterator[tuple[Load, tuple[str, ...]]]:
    """Every distinct load with the loops around it, the outermost first."""

    def visit(body: tuple[Stmt, ...], around: tuple[str, ...]) -> Iterator[tuple[Load, tuple[str, ...]]]:
        seen: set[Load] = set()
        for stmt in body:
            if isinstance(stmt, Loop):
                yield from visit(stmt.body, (*around, stmt.axis))
                continue
            for node in walk(stmt.expr):
                if isinstance(node, Load) and node not in seen:
                    seen.add(node)
                    yield node, around

    yield from visit(kernel.body, ())


def _repeated_by(
    used: frozenset[str],
    around: tuple[str, ...],
    kernel: Kernel,
    blocks: Mapping[str, int],
    shape: Shape,
) -> tuple[str, ...]:
    """The loops that load anew what they do not walk: those outside of the innermost one that does. What no
    loop walks is loaded before all of them; what a product walks in steps of its own, in each of their trips."""
    walked = {a for a in used - frozenset(kernel.parallel) if blocks.get(a, 1) < shape.extents.get(a, 1)}
    if walked - frozenset(around):
        return around
    inside = [place for place, axis in enumerate(around) if axis in walked]
    return around[: max(inside, default=0)]


def _load_seconds(
    load: Load,
    used: frozenset[str],
    around: tuple[str, ...],
    kernel: Kernel,
    blocks: Mapping[str, int],
    shape: Shape,
    device: Device,
    *,
    kept: bool,
) -> tuple[float, float]:
    """Seconds of reads from memory and of those from the cache: the first read of everything, unless it is still
    `kept` there, and the blocks' repeated reads where the tensor fits it. `used` are the axes that the load moves
    along. Positions of an axis that it divides read the same elements."""
    size = shape.itemsize(load.tensor)
    alike = {a: min(by, shape.extents[a]) for a, by in divisors(load.index).items()}
    unique = shape.positions(used) * size / math.prod(alike.values())
    again = math.prod(
        math.ceil(shape.extents[a] / blocks[a])
        for a in (*kernel.parallel, *_repeated_by(used, around, kernel, blocks, shape))
        if a not in used and a in blocks
    ) * math.prod(math.ceil(by / blocks.get(a, 1)) for a, by in alike.items())
    # blocks that run side by side share the parallel axes that the load moves along, nearly
    shared = shape.positions(used - frozenset(kernel.parallel)) * size
    bandwidth = device.cache_bandwidth
    if 2 * unique <= device.shared and not used & frozenset(kernel.parallel):
        bandwidth *= 2  # every instance reads all of it: half the time it is still in the unit
    if shared > device.cache:
        return again * unique / device.bandwidth, 0.0
    if kept:
        return 0.0, again * unique / bandwidth
    return unique / device.bandwidth, (again - 1) * unique / bandwidth


def _store_seconds(store: Store, shape: Shape, device: Device) -> float:
    axes = frozenset(n.name for i in store.index for n in walk(i) if isinstance(n, Axis))
    return shape.positions(axes) * shape.itemsize(store.tensor) / device.bandwidth


def _steps(
    body: tuple[Stmt, ...],
    blocks: Mapping[str, int],
    shape: Shape,
    device: Device,
    alone: Mapping[Expr, str],
) -> float:
    """What per-step overhead multiplies in one program instance: tile operations run one by one on a CPU,
    trips of loops on a GPU, whose operations overlap. `alone` are products with the axes that they walk themselves."""
    total = 0.0 if device.kind == "cpu" else 1.0
    for stmt in body:
        if isinstance(stmt, Loop):
            trips = math.ceil(shape.extents[stmt.axis] / (1 if stmt.unit else blocks[stmt.axis]))
            total += trips * _steps(stmt.body, blocks, shape, device, alone)
        elif device.kind == "cpu":
            total += sum(1 for n in walk(stmt.expr) if isinstance(n, Call | Reduce))
        else:
            axes = dict.fromkeys(alone[n] for n in walk(stmt.expr) if n in alone)
            total += sum(t for a in axes if (t := math.ceil(shape.extents[a] / blocks[a])) > 1)
    return total


def _spill(kernel: Kernel, blocks: Mapping[str, int], shape: Shape, device: Device) -> float:
    """Time to move what does not fit on chip out and in again."""
    values = widest_values(kernel, vectors=device.kind == "cpu")
    widest = max((math.prod(blocks.get(a, 1) for a in axes) for axes in values), default=1) * 4
    if widest <= device.tile:
        return 0.0
    instances = math.prod(math.ceil(shape.extents[a] / blocks[a]) for a in kernel.parallel)
    return 8 * widest * max(instances, device.units / UNIT_SHARE) / device.bandwidth
