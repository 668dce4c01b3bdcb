"""What a thread block needs of an SM: registers of a thread, shared memory, and so its occupancy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from eqfuse.extract.devices import Device
from eqfuse.extract.shape import Shape
from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.contraction import Contraction
from eqfuse.loops.contraction import Product as Factors
from eqfuse.loops.kernel_axes import KEPT, kernel_axes, widest_values
from eqfuse.loops.nodes import Kernel, Let, Loop, Stmt, Store
from eqfuse.loops.plan import KernelConfig
from eqfuse.loops.walk import expressions, loops_in, statements
from eqfuse.terms.folds import fold_of
from eqfuse.terms.nodes import Axis, Expr, Load, Local, Reduce, Scan, children, expanded, free_axes, walk

REGISTER_BYTES = 4

VECTOR_BYTES = 16
"""What a thread of a GPU loads at once."""

WARP = 32
"""Threads of a warp."""

WARPGROUP_ROWS = 64
"""Rows from which a matrix product reads its operands from shared memory (wgmma); with fewer, they pass
through registers."""

WARPGROUP = 4
"""Warps that multiply matrices together; such a group takes WARPGROUP_ROWS rows at a time."""

PRODUCER_REGISTERS = 24
"""Registers of a thread of the producer of a kernel in roles, which copies alone."""

START_REGISTERS: Mapping[int, int] = {1: 255, 2: 168, 3: 128}
"""By the number of consumers: registers of a thread when a block starts, so that all warps fit in an SM; as many as an instruction
of a consumer may use."""

CONSUMER_REGISTERS: Mapping[int, int] = {1: 240, 2: 240, 3: 160}
"""By the number of consumers: registers of their threads, once the producer has given most of its own back."""

LEADER_REGISTERS, LED_REGISTERS = 120, 184
"""Registers of a thread of a consumer that computes for others, and of theirs: the first three of four warp groups have 488 of 512."""


@dataclass(frozen=True)
class Operand:
    """One side of a matrix product: a `load` as it is, or computed; `streamed` if a loop loads it anew."""

    axes: frozenset[str]
    load: Load | None
    streamed: bool


@dataclass(frozen=True)
class Product:
    """A matrix product; `node` is the reduction. Rows of the result are those of the left operand."""

    node: Reduce
    contraction: Contraction
    left: Operand
    right: Operand


@lru_cache(KEPT)
def products(kernel: Kernel) -> tuple[Product, ...]:
    """The matrix products of a kernel, with how their operands come about."""
    return tuple(dict.fromkeys(_products(kernel, kernel.body, frozenset())))


def _products(kernel: Kernel, body: tuple[Stmt, ...], around: frozenset[str]) -> Iterator[Product]:
    axes = kernel_axes(kernel)
    for stmt in body:
        if isinstance(stmt, Loop):
            yield from _products(kernel, stmt.body, around | {stmt.axis})
            continue
        for node in walk(stmt.expr):
            found = axes.contraction(node) if isinstance(node, Reduce) else None
            if found is not None and isinstance(node, Reduce):
                shared = frozenset((*found.batch, found.axis))
                sides = ((found.rows, found.left), (found.columns, found.right))
                left, right = (_operand(shared | set(own), side.load, around) for own, side in sides)
                yield Product(node, found, left, right)


def _operand(axes: frozenset[str], load: Load | None, around: frozenset[str]) -> Operand:
    return Operand(axes, load, load is not None and bool(free_axes(load) & around))


def shared_bytes(kernel: Kernel, blocks: Mapping[str, int], stages: int, shape: Shape) -> int:
    """Bytes of shared memory of a thread block: what waits there for matrix products and loops, or a tile on its way
    from one layout to another, whose buffer takes the place of what was waiting."""
    return shared_by_stages(kernel, blocks, (stages,), shape)[0]


def shared_by_stages(
    kernel: Kernel, blocks: Mapping[str, int], stages: Sequence[int], shape: Shape
) -> list[int]:
    """`shared_bytes` for several numbers of stages."""
    held, loaded, made_of = _operand_bytes(kernel, blocks, shape)

    def one_stage(loads: Iterable[Load]) -> int:
        return sum(size_of(free_axes(load), blocks) * shape.itemsize(load.tensor) for load in loads)

    loops = _streamed(kernel)
    if products(kernel):  # each stage of what loops load besides operands waits, and that of all loops
        prefetched, in_use = one_stage(dict.fromkeys(load for loads in loops for load in loads)), 0
    else:  # all stages but the one in use, which is in registers, and one loop's after the other's
        prefetched, in_use = max(map(one_stage, loops), default=0), 1
    passing = max(_converted_bytes(kernel, blocks), _scanned_bytes(kernel, blocks)) * shape.registers_each
    found = []
    for count in stages:
        operands = sum(max(once, count * each) for once, each in loaded.values())
        found.append(max(held + operands + (count - in_use) * prefetched + (count - 1) * made_of, passing))
    return found


def _unit_loops(kernel: Kernel) -> frozenset[str]:
    """The axes that loops walk position by position."""
    return frozenset(stmt.axis for stmt in kernel.body if isinstance(stmt, Loop) and stmt.unit)


def _operand_bytes(
    kernel: Kernel, blocks: Mapping[str, int], shape: Shape
) -> tuple[int, dict[Load, tuple[int, int]], int]:
    """The bytes of computed operands of all matrix products; those of each loaded one, where no loop loads it, and for each
    stage, where a loop does; and those of what computed ones are made of, which all stages but the one in use have. What several
    products load is there once, as the one that takes most. A product that walks its own axis in steps streams both operands."""
    held, ahead = 0, dict[Load, None]()
    units = _unit_loops(kernel)
    loaded: dict[Load, tuple[int, int]] = {}
    for product in products(kernel):
        axis = product.contraction.axis
        stepped = blocks.get(axis, 1) < shape.extents.get(axis, 1)
        left, right = product.left, product.right
        is_half = shape.is_half_product(product.node, product.contraction)
        wide = REGISTER_BYTES * shape.registers_each
        width = 1 if shape.is_narrow(product.node) else 2 if is_half else wide
        # a computed left one is in registers, where each warp has rows of its own
        passes = bool(units) and rows(product.contraction, blocks) <= WARPGROUP_ROWS
        for operand in (left, right) if left.load or passes else (right,):
            size = size_of(operand.axes, blocks) * width
            if operand.load is None:
                held += size
                continue
            once, each = loaded.get(operand.load, (0, 0))
            again = operand.streamed or stepped
            loaded[operand.load] = (once, max(each, size)) if again else (max(once, size), each)
        for side, operand in ((product.contraction.left, left), (product.contraction.right, right)):
            parts = _loads_of(side) if stepped and operand.load is None else ()
            ahead.update(dict.fromkeys(load for load in parts if axis in free_axes(load)))
    made_of = (size_of(free_axes(n), blocks) * shape.itemsize(n.tensor) for n in ahead if n not in loaded)
    return held, loaded, sum(made_of)


def _loads_of(side: Factors) -> list[Load]:
    """What a computed operand is made of, but for what its own products load."""
    inner = {n for part in walk(*side.parts) if isinstance(part, Reduce) for n in walk(part.body)}
    return [n for n in walk(*side.parts) if isinstance(n, Load) and n not in inner]


def _converted_bytes(kernel: Kernel, blocks: Mapping[str, int]) -> int:
    """The largest tile that is stored along another axis than some of what it is made of was loaded along. Triton converts it as a whole
    where it has as many positions along both axes as a warp has threads, else part by part."""
    tiles = (
        size_of(axes, blocks) * min(WARP, *(blocks.get(axis, 1) for axis in ways)) // WARP
        for axes, ways in _converted(kernel)
        if all(blocks.get(axis, 1) > 1 for axis in ways)
    )
    return max(tiles, default=0) * REGISTER_BYTES


def _scanned_bytes(kernel: Kernel, blocks: Mapping[str, int]) -> int:
    """The states that the positions of the largest tile have where parts are combined in order: a scan passes them on."""
    tiles = (states * size_of(axes, blocks) for axes, states in _scanned(kernel))
    return max(tiles, default=0) * REGISTER_BYTES


@lru_cache(KEPT)
def scan_states(kernel: Kernel) -> int:
    """How many states the positions of a tile have that is scanned; 0 where none is."""
    scans = (node for node in walk(*expressions(kernel.body)) if isinstance(node, Scan))
    return max((len(scan.fold.state) for scan in scans), default=0)


@lru_cache(KEPT)
def _scanned(kernel: Kernel) -> tuple[tuple[frozenset[str], int], ...]:
    """The axes of what reductions fold whose order matters, and how many values a state of theirs has."""
    axes, found = kernel_axes(kernel), dict[tuple[frozenset[str], int], None]()
    for node in walk(*expressions(kernel.body)):
        fold = fold_of(node.op) if isinstance(node, Reduce) else None
        if isinstance(node, Reduce) and fold is not None and not fold[0].commutative:
            found[axes.folded(node) | {node.axis}, len(fold[0].state)] = None
    return tuple(found)


@lru_cache(KEPT)
def _converted(kernel: Kernel) -> tuple[tuple[frozenset[str], tuple[str, str]], ...]:
    """The axes of stored values some of whose tiles were loaded along another axis than memory is contiguous along where they
    are stored, with the axes that memory is contiguous along in both places."""
    found: dict[tuple[frozenset[str], tuple[str, str]], None] = {}
    named = {stmt.name: stmt.expr for stmt in statements(kernel.body) if isinstance(stmt, Let)}
    for store in (stmt for stmt in statements(kernel.body) if isinstance(stmt, Store) and stmt.index):
        value = expanded(store.expr, lambda local: named.get(local.name))
        loads = [load for load in _unreduced(value) if load.index]
        ways = {n.index[-1].name: free_axes(n) for n in loads if isinstance(n.index[-1], Axis)}
        last = store.index[-1]
        if isinstance(last, Axis):
            for way in (way for way, axes in ways.items() if way != last.name and last.name in axes):
                found[free_axes(store.expr) | set(store.dims), (way, last.name)] = None
    return tuple(found)


def _unreduced(expr: Expr) -> Iterator[Load]:
    """The loads of an expression that no reduction inside of it folds."""
    seen: set[Expr] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if node in seen or isinstance(node, Reduce):
            continue
        seen.add(node)
        if isinstance(node, Load):
            yield node
        else:
            stack.extend(children(node))


@lru_cache(KEPT)
def _streamed(kernel: Kernel) -> tuple[tuple[Load, ...], ...]:
    """What each outermost loop, with those inside, loads anew at every step besides operands of matrix products."""
    contractions = [product.contraction for product in products(kernel)]
    operands = {f for c in contractions for side in (c.left, c.right) for f in side.parts}
    found: list[tuple[Load, ...]] = []
    for outer in (stmt for stmt in kernel.body if isinstance(stmt, Loop)):
        mine: dict[Load, None] = {}
        for loop in loops_in((outer,)):
            loads = (n for expr in expressions(loop.body) for n in walk(expr) if isinstance(n, Load))
            mine |= dict.fromkeys(n for n in loads if n not in operands and loop.axis in free_axes(n))
        found.append(tuple(mine))
    return tuple(found)


def rows(contraction: Contraction, blocks: Mapping[str, int]) -> int:
    """Rows of a matrix product in one block."""
    return size_of(contraction.rows, blocks)


@dataclass(frozen=True)
class Unrolled:
    """A product of float32 of whose operands each thread holds what its part of the result is made of, or a `share` of that."""

    rows: int
    columns: int
    depth: int
    share: float

    def by_thread(self, threads: int) -> float:
        """32-bit values of one thread. The result is divided as Triton does: in parts of 4 x 4, 2 x 2 or one element, along columns first."""
        each = next(n for n in (4, 2, 1) if n == 1 or self.rows * self.columns >= n * n * threads)
        across = min(threads, max(1, self.columns // each))
        return (
            self.share
            * self.depth
            * (max(each, self.rows * across / threads) + max(each, self.columns / across))
        )


@dataclass(frozen=True)
class Held:
    """32-bit values that the threads of a block hold at once: `shared` out among them, and operands that are `unrolled`, of one product at a time."""

    shared: float
    unrolled: tuple[Unrolled, ...]

    def by_thread(self, threads: int) -> float:
        """Those of one thread."""
        return self.shared / threads + max((each.by_thread(threads) for each in self.unrolled), default=0.0)


def registers(kernel: Kernel, blocks: Mapping[str, int], warps: int, device: Device, shape: Shape) -> float:
    """32-bit values that a thread holds at once."""
    return held(kernel, blocks, device, shape).by_thread(warps * device.lanes)


def held(kernel: Kernel, blocks: Mapping[str, int], device: Device, shape: Shape) -> Held:
    """What threads hold at once: what loops carry, the widest values that are computed, and operands of matrix products
    that pass through registers on their way to shared memory. Without tensor cores (float32) both operands are unrolled into them: a part
    at a time where loops load both, else the share of them that `_unrolled_share` says."""
    loops = {stmt.axis for stmt in kernel.body if isinstance(stmt, Loop)}
    states = [
        kernel_axes(kernel).of(Local(value.name, value.dims))
        for stmt in kernel.body
        if isinstance(stmt, Loop)
        for value in stmt.carried
    ]
    carried = sum(size_of(axes, blocks) for axes in states)
    units = _unit_loops(kernel)
    made = {
        axes for axes in widest_values(kernel) if axes - units not in states and (axes & loops or not loops)
    }
    passing, unrolled = 0.0, []
    for product in products(kernel):
        half = shape.is_half_product(product.node, product.contraction)
        stepped = blocks.get(product.contraction.axis, 1) < shape.extents.get(product.contraction.axis, 1)
        sums = product.contraction.apart
        if stepped and product.contraction.axis not in loops:  # its sums are carried from step to step
            carried += size_of(sums, blocks)
        if shape.is_narrow(product.node):  # those of a step are added to them afterwards
            made.add(sums)
        sides = product.left, product.right
        share = 0.0 if half else _unrolled_share(product)
        if share:
            of = product.contraction
            extents = size_of(of.rows, blocks), size_of(of.columns, blocks)
            unrolled.append(Unrolled(*extents, blocks.get(of.axis, 1), share))
        for side, operand in enumerate(sides):
            elements = size_of(operand.axes, blocks)
            if not half:
                passing += 0.0 if share else 1.5 * elements
            elif operand.load is None and side == 1:
                passing += elements / 2
            elif operand.load and (
                rows(product.contraction, blocks) < WARPGROUP_ROWS or not (loops or stepped)
            ):
                passing += elements / 4
    widest, second = sorted((*(size_of(axes, blocks) for axes in made), 1, 1))[:-3:-1]
    weights = device.residuals
    return Held(carried + weights.widest * widest + weights.second * second + passing, tuple(unrolled))


def _unrolled_share(product: Product) -> float:
    """Which share of the operands of a product of float32 each thread holds at once; 0 where it takes them part by part from shared
    memory. A right operand that is computed comes in another layout: all of it. Of operands that are loaded once, and of those of a product whose left one
    is computed, ptxas for sm_90 holds twice as many as said here: what it spills of them costs little, and with these tiles an H200 is faster."""
    left, right = product.left, product.right
    if not (product.contraction.rows and product.contraction.columns):
        return 0.0
    if right.load is None:
        return 1.0
    if left.load is None:
        return 0.25
    return 0.0 if left.streamed or right.streamed else 0.5


def two_per_sm(
    kernel: Kernel, blocks: Mapping[str, int], config: KernelConfig, shape: Shape, device: Device
) -> bool:
    """Whether the shared memory and the registers of an SM hold two thread blocks of a kernel."""
    if not products(kernel):
        return True
    in_shared = 2 * shared_bytes(kernel, blocks, config.stages, shape) <= device.shared
    held = registers(kernel, blocks, config.warps, device, shape)
    return in_shared and most_per_sm(held, config.warps, device) >= 2


def most_per_sm(held: float, warps: int, device: Device) -> int:
    """How many thread blocks the registers of an SM hold whose threads hold so many values; half of them are what the device
    calls a tile."""
    return int(
        2 * device.tile // ((held + device.residuals.addresses) * warps * device.lanes * REGISTER_BYTES)
    )


def slowdowns(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> dict[str, float]:
    """Which factors of Residuals.slowdowns apply, and to which power. None does to a kernel without matrix products,
    whose tiles are used up as they are loaded."""
    if not products(kernel):
        return {}
    blocks = config.sizes(shape.extents)
    found: dict[str, float] = {}
    held = registers(kernel, blocks, config.warps, device, shape)
    if held > device.residuals.registers:
        found["spills"] = math.log2(held / device.residuals.registers)
    if 2 * shared_bytes(kernel, blocks, config.stages, shape) > device.shared:
        found["one_block"] = 1.0
    sides = frozenset[str]().union(*(p.contraction.apart for p in products(kernel)))
    most = max((blocks[a] for a in kernel.parallel if a in sides), default=1)
    if most >= WARPGROUP_ROWS == device.rows:
        if config.warps < WARPGROUP:
            found["few_warps"] = 1.0
        elif most * WARPGROUP < WARPGROUP_ROWS * config.warps:
            found["shared_rows"] = 1.0
    return found


@lru_cache(KEPT)
def sharded_axes(kernel: Kernel) -> Mapping[str, str]:
    """Looped axes of which each thread block walks one shard, with the parallel axis that counts shards."""
    return {loop.axis: loop.shard for loop in loops_in(kernel.body) if loop.shard is not None}


def streamed_bytes(kernel: Kernel, shape: Shape) -> int:
    """Bytes that a loop loads for each of its positions, of the loop that loads most."""
    return max(
        (
            sum(shape.itemsize(load.tensor) for load in _loads_in(loop) if loop.axis in free_axes(load))
            for loop in loops_in(kernel.body)
        ),
        default=0,
    )


def _loads_in(loop: Loop) -> set[Load]:
    return {node for expr in expressions(loop.body) for node in walk(expr) if isinstance(node, Load)}


@lru_cache(KEPT)
def loads_of(kernel: Kernel) -> tuple[Load, ...]:
    """Every distinct load of a tensor's elements."""
    loads = (n for expr in expressions(kernel.body) for n in walk(expr) if isinstance(n, Load) and n.index)
    return tuple(dict.fromkeys(loads))


@lru_cache(KEPT)
def loads_positions(kernel: Kernel) -> bool:
    """Whether a loop loads from positions that it has loaded, as pages are."""
    named = {stmt.name: stmt.expr for stmt in statements(kernel.body) if isinstance(stmt, Let)}
    for loop in loops_in(kernel.body):
        for node in walk(*expressions(loop.body)):
            if isinstance(node, Load):
                positions = [expanded(at, lambda local: named.get(local.name)) for at in node.index]
                inner = [each for each in walk(*positions) if isinstance(each, Load)]
                if any(loop.axis in free_axes(each) for each in inner):
                    return True
    return False


def loads_vectors(kernel: Kernel, shape: Shape) -> bool:
    """Whether every row of every tensor begins where a vector may: what is loaded element by element costs
    more on a way through shared memory than that hides."""
    return all(
        shape.extents.get(load.index[-1].name, 1) * shape.itemsize(load.tensor) % VECTOR_BYTES == 0
        for load in loads_of(kernel)
        if isinstance(load.index[-1], Axis)
    )


@lru_cache(KEPT)
def _read_again(kernel: Kernel) -> tuple[Load, ...]:
    """What a loop loads that a loop before it has loaded."""
    before: dict[Load, None] = {}
    found: dict[Load, None] = {}
    for loop in (stmt for stmt in kernel.body if isinstance(stmt, Loop)):
        loads = [n for expr in expressions(loop.body) for n in walk(expr) if isinstance(n, Load)]
        found |= dict.fromkeys(load for load in loads if load in before)
        before |= dict.fromkeys(loads)
    return tuple(found)


def bytes_read_again(kernel: Kernel, shape: Shape) -> float:
    """Bytes that one position of the parallel axes alone reads in a loop after another loop has read them."""
    return sum(
        shape.positions(free_axes(load) - frozenset(kernel.parallel)) * shape.itemsize(load.tensor)
        for load in _read_again(kernel)
        if free_axes(load) & frozenset(kernel.parallel)
    )


def size_of(axes: Iterable[str], blocks: Mapping[str, int]) -> int:
    """Elements of a tile with these axes."""
    found = 1
    for axis in axes:  # several times as fast as a product of what is generated
        found *= blocks.get(axis, 1)
    return found
