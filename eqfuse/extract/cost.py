"""Predicted time of a loop nest under a configuration: small sums of bytes and operations over rates.

Bytes over bandwidth, matrix and elementwise and special-function operations over their rates, launches,
and how well the grid fills the device. Terms overlap on a GPU (the largest counts), and add up on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from eqfuse.extract.axes import Contraction, kernel_axes, widest_values
from eqfuse.extract.devices import Device
from eqfuse.extract.plans import Cost, KernelConfig, Term
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Kernel, Loop, Stmt, Store
from eqfuse.loops.walk import expressions, statements
from eqfuse.terms.nodes import Axis, Call, Expr, Load, Reduce, free_axes, walk

SPECIAL = ("exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "gelu", "silu", "erf", "sin", "cos", "div")


def total(kernels: Iterable[Sequence[Term]]) -> Cost:
    """The cost of several kernels, one after the other, from the terms of each."""
    sums: dict[str, float] = {}
    for terms in kernels:
        for term in terms:
            sums[term.name] = sums.get(term.name, 0.0) + term.seconds
    return Cost(tuple(Term(name, seconds) for name, seconds in sums.items()))


def kernel_terms(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> list[Term]:
    """Terms of one kernel, in seconds."""
    sharded = _sharded(kernel)
    shape = _per_shard(shape, sharded)
    blocks = {b.axis: b.size or max(1, shape.extents[b.axis]) for b in config.blocks}
    grid = math.prod(math.ceil(shape.extents[a] / blocks[a]) for a in kernel.parallel)
    fill = grid / (math.ceil(grid / device.units) * device.units) if grid else 1.0
    busy = min(1.0, grid / device.units) or 1.0
    if device.kind == "cpu" and grid < 2 * device.units:  # the units share every operation instead
        fill = busy = 1.0
    operations = [(node, c, _with_shards(axes, sharded)) for node, c, axes in _operations(kernel, device)]
    memory = sum(
        _load_seconds(load, _with_shards(free_axes(load), sharded), inside, kernel, blocks, shape, device)
        for load, inside in _loads(kernel)
    )
    memory += sum(
        _store_seconds(store, shape, device) for store in statements(kernel.body) if isinstance(store, Store)
    )

    def positions(axes: frozenset[str]) -> float:
        """Positions of a value, those of every block that computes it again counted."""
        again = math.prod(math.ceil(shape.extents[a] / blocks[a]) for a in kernel.parallel if a not in axes)
        return shape.positions(axes) * again

    matrix = sum(
        2 * positions(axes | {c.axis}) / (device.matrix_half if shape.is_half(node) else device.matrix_float)
        for node, c, axes in operations
        if c is not None
    )
    elementwise = sum(positions(axes) for _, c, axes in operations if c is None) / device.elementwise
    special = sum(
        positions(axes) for e, c, axes in operations if c is None and isinstance(e, Call) and e.fn in SPECIAL
    )
    overhead = grid * _steps(kernel.body, blocks, shape, device) * device.step / device.units
    terms = [
        Term("memory", memory / busy),
        Term("matrix", matrix / fill),
        Term("elementwise", elementwise / fill),
        Term("special", special / device.special / fill),
        Term("steps", overhead),
        Term("spill", _spill(kernel, blocks, shape, device)),
    ]
    if device.kind == "gpu":  # units work side by side; what is not the bottleneck hides behind it
        largest = max(terms, key=lambda t: t.seconds)
        terms = [
            t if t is largest or t.name in ("steps", "spill") else Term(t.name, 0.2 * t.seconds)
            for t in terms
        ]
    return [*terms, Term("launch", device.launch)]


def _sharded(kernel: Kernel) -> dict[str, str]:
    """Looped axes of which each program instance walks one shard, with the parallel axis that counts shards."""
    found: dict[str, str] = {}
    axes = kernel_axes(kernel)
    for stmt in statements(kernel.body):
        if isinstance(stmt, Loop):
            for axis in axes.of(stmt.start) & frozenset(kernel.parallel):
                found[stmt.axis] = axis
    return found


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
                yield node, found, axes.of(node) if found else axes.of(node.body)
            elif isinstance(node, Call):
                yield node, None, axes.of(node)


def _loads(kernel: Kernel) -> Iterator[tuple[Load, frozenset[str]]]:
    """Every distinct load with the loops around it."""

    def visit(body: tuple[Stmt, ...], around: frozenset[str]) -> Iterator[tuple[Load, frozenset[str]]]:
        seen: set[Load] = set()
        for stmt in body:
            if isinstance(stmt, Loop):
                yield from visit(stmt.body, around | {stmt.axis})
                continue
            for node in walk(stmt.expr):
                if isinstance(node, Load) and node not in seen:
                    seen.add(node)
                    yield node, around

    yield from visit(kernel.body, frozenset())


def _load_seconds(
    load: Load,
    used: frozenset[str],
    around: frozenset[str],
    kernel: Kernel,
    blocks: Mapping[str, int],
    shape: Shape,
    device: Device,
) -> float:
    """`used` are the axes that the load moves along: first read from memory, the blocks' repeated reads from cache where the tensor fits it."""
    size = shape.itemsize(load.tensor)
    unique = shape.positions(used) * size
    again = math.prod(
        math.ceil(shape.extents[a] / blocks[a])
        for a in (*kernel.parallel, *around)
        if a not in used and a in blocks
    )
    # blocks that run side by side share the parallel axes that the load moves along, nearly
    shared = shape.positions(used - frozenset(kernel.parallel)) * size
    bandwidth = device.cache_bandwidth if shared <= device.cache else device.bandwidth
    return unique / device.bandwidth + (again - 1) * unique / bandwidth


def _store_seconds(store: Store, shape: Shape, device: Device) -> float:
    axes = frozenset(n.name for i in store.index for n in walk(i) if isinstance(n, Axis))
    return shape.positions(axes) * shape.itemsize(store.tensor) / device.bandwidth


def _steps(body: tuple[Stmt, ...], blocks: Mapping[str, int], shape: Shape, device: Device) -> float:
    """What per-step overhead multiplies in one program instance: tile operations run one by one on a CPU,
    trips of loops on a GPU, whose operations overlap."""
    total = 0.0 if device.kind == "cpu" else 1.0
    for stmt in body:
        if isinstance(stmt, Loop):
            trips = math.ceil(shape.extents[stmt.axis] / (1 if stmt.unit else blocks[stmt.axis]))
            total += trips * _steps(stmt.body, blocks, shape, device)
        elif device.kind == "cpu":
            total += sum(1 for n in walk(stmt.expr) if isinstance(n, Call | Reduce))
    return total


def _spill(kernel: Kernel, blocks: Mapping[str, int], shape: Shape, device: Device) -> float:
    """Time to move what does not fit on chip out and in again."""
    values = widest_values(kernel, vectors=device.kind == "cpu")
    widest = max((math.prod(blocks.get(a, 1) for a in axes) for axes in values), default=1) * 4
    if widest <= device.tile:
        return 0.0
    instances = math.prod(math.ceil(shape.extents[a] / blocks[a]) for a in kernel.parallel)
    return 8 * widest * instances / device.bandwidth
