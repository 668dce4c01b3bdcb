"""Which roles a kernel gets, if any: every schedule of a small grid is priced, the cheapest that fits is built.

    work = max(matrix * M + arithmetic * A + trip * trips, least * A)
    seconds = max(work, (work + latency * trips) / slots) + (block + filled) * waves

M and A are the seconds that matrix products, and all other arithmetic, would take alone; trips those of the loops of all
thread blocks that an SM runs, waves how many of these it runs. The factors are fitted (residuals.py, bench/gluon_fit.py): they are
smaller where a product runs behind the arithmetic, so that both overlap in one consumer. A slot is filled again once it is
free, which takes the latency of a copy: short trips want more slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from eqfuse.extract.cost import KernelCost
from eqfuse.extract.devices import Device
from eqfuse.extract.residuals import RolesResiduals, RolesWork, TilesWork
from eqfuse.extract.resources import REGISTER_BYTES, WARPGROUP, WARPGROUP_ROWS
from eqfuse.extract.roles import block_sizes
from eqfuse.loops.blocks import Block
from eqfuse.loops.plan import KernelConfig, Roles
from eqfuse.terms.dtypes import BYTES, FLOATS
from eqfuse.terms.functions import SPECIAL
from eqfuse.terms.integers import power_of_two
from eqfuse.threads import cached
from eqfuse.tile.nodes import (
    Align,
    Cast,
    Dot,
    Elementwise,
    For,
    If,
    Kernel,
    Let,
    LoadTile,
    NonFiniteCorrection,
    PersistentLoop,
    Store,
    Value,
)
from eqfuse.tile.roles.nodes import (
    ConsumerBarrier,
    LoadShared,
    MmaAsync,
    MmaWait,
    Role,
    RolesKernel,
    Staging,
    Stmt,
)
from eqfuse.tile.roles.unsuited import Unsuited
from eqfuse.tile.walk import nested, operands

CONSUMERS = (2, 3)
SHARING = 2
"""Consumers that share columns of sums."""
SLOTS = (2, 3, 4, 6)
STEPS = (64, 128)
"""Positions of a loop's axis in a block."""
COLUMNS = (128, 256)
"""Positions in a block of an axis that thread blocks share, beside the rows: columns of products."""

MOST = 256
"""Positions of an axis in a tile that the copy engine moves, but for the last one, and columns of an instruction."""

HELD = {2: 240, 3: 160}
"""Registers of a consumer's thread, by the number of consumers."""

LED_HELD, LEADING_HELD = 184, 120
"""Those of a consumer that a leader computes for, and of the leader."""

AT_START = {2: 168, 3: 128}
"""Those that its instructions may use, which is how many each thread of a block begins with."""

OPERANDS = 26
"""Registers that an instruction of a product takes beside its sums."""

ADDRESSES = 30
ITEM_ADDRESSES = 6
POINTER = 7
ROW_THREADS = 4
"""Registers of a thread that hold no tile, those of a loop over items, and of each tile that consumers load; threads that
share a row of a tile of sums."""

BARRIER_BYTES = 1024
"""Shared memory for barriers, and to align tiles."""

SWIZZLED_BYTES = 128
"""Bytes of a tile's last dim that shared memory lays out together."""

LEAST_ARITHMETIC = 0.05
"""Other arithmetic as a part of the products' time below which loops do nothing but multiply."""

INSTRUCTION_RATE = 32.0
"""What the 128 bytes that shared memory gives in a cycle are to the 2 bytes a number of operands and the 1024 multiplications and
additions of a matrix unit: positions of an operand's other axis below which shared memory is slower. One byte: twice the rate."""

SHOWN = 0.05
"""Part of what the copies' bandwidth hides that shows: of forms that wait for copies, those that work less are faster."""

WORTH = 0.95
"""Part of the time without roles that roles may be predicted to take: less of a difference is within the model's error."""

MOST_PADDED = 2
"""Rows of a thread block over those that there are, at most: with one row for 128 a product took 7 times what was predicted."""

ALIGNED = 16
"""Numbers of which a row of a tensor has a multiple where Triton knows how its addresses divide."""

POLYNOMIALS: Mapping[str, tuple[int, int]] = {"tanh": (2, 8)}
"""Functions that consumers compute without special ones near 0: how many of those it spares, and what it takes instead."""

POLYNOMIAL_REGISTERS = 80
"""Registers that such a function takes beside the tiles: kernels of SoftCap with fewer left took 1.3 to 2 times what was predicted,
those with more what was (H200)."""

Divide = Callable[[Roles], RolesKernel]
"""The kernel in these roles and their blocks. Raises Unsuited."""


@dataclass(frozen=True)
class Choice:
    """A kernel in roles, and its predicted seconds."""

    roles: Roles
    kernel: RolesKernel
    seconds: float

    @property
    def code(self) -> str:
        """What calls run, for those who ask."""
        return f"Gluon: {self.roles}, predicted to take {1e3 * self.seconds:.3g} ms"


@dataclass(frozen=True)
class Outlook:
    """What pricing needs: the plan's blocks, and the seconds that the tile program is predicted to take as it is."""

    config: KernelConfig
    cost: KernelCost
    device: Device
    extents: Mapping[str, int]
    otherwise: float
    launch: float = 0.0
    """Seconds that a launch of roles takes more: it does not begin before the kernel before it has ended."""


def rows_of(tiles: Kernel) -> str:
    """The axis of the rows of a kernel's products. Raises Unsuited."""
    dots = [dot for loop in _products(tiles) for dot in loop]
    rows = {dot.left.dims[0] for dot in dots if len(dot.left.dims) == 2}
    if len(rows) != 1:
        raise Unsuited("no loop multiplies matrices" if not dots else "products of no common rows")
    (axis,) = rows
    block = next((block for block in tiles.blocks if block.axis == axis and block.kind == "grid"), None)
    if block is None:
        raise Unsuited(f"each thread block has all of {axis}, the rows of products")
    if block.valid is not None:
        raise Unsuited(
            f"thread blocks take {block.valid} positions of {axis} at a time, the rows of products"
        )
    return axis


def _sums(tiles: Kernel) -> int:
    """How many tiles of sums a loop adds products to."""
    return max((sum(dot.accumulator is not None for dot in dots) for dots in _products(tiles)), default=0)


def _products(tiles: Kernel) -> Iterator[list[Dot]]:
    """The products of each loop."""
    for stmt in nested(tiles.body):
        if isinstance(stmt, For):
            yield [s.op for s in stmt.body if isinstance(s, Let) and isinstance(s.op, Dot)]


def walked_columns(tiles: Kernel) -> frozenset[str]:
    """Axes of columns of products whose blocks a loop walks that has the products' loops inside."""
    outer = {s.axis for s in tiles.body if isinstance(s, For) and any(isinstance(i, For) for i in s.body)}
    return frozenset(dot.right.dims[1] for dots in _products(tiles) for dot in dots) & outer


def small(roles: Roles, rows: str, block: int, walked: Collection[str] = ()) -> Roles:
    """The roles in blocks of this size, for each consumer: what is verified. `walked` are columns of products as `sized` takes
    them."""

    def one(each: Block) -> Block:
        if each.axis == rows:
            return replace(each, size=max(2, block) * (1 if roles.columns else roles.consumers))
        # columns of a product: with one of them it is none
        if each.axis in walked or (each.kind == "grid" and (each.size or 1) > 1):
            return replace(each, size=max(2, block))
        return replace(each, size=block) if each.size is not None and each.size > 1 else each

    return replace(roles, blocks=tuple(map(one, roles.blocks)))


def sized(
    blocks: Sequence[Block],
    rows: str,
    count: int,
    step: int,
    columns: int | None = None,
    extents: Mapping[str, int] | None = None,
    walked: Collection[str] = (),
) -> tuple[Block, ...]:
    """The blocks with so many rows, and steps of loops; with so many columns, where thread blocks share those too or loops have
    `walked` them, or as many as there are of these."""
    most = {axis: power_of_two(extent) for axis, extent in (extents or {}).items()}

    def one(block: Block) -> Block:
        if block.axis == rows:
            return replace(block, size=count)
        shared = block.kind == "grid" and (block.size or 1) > 1
        if columns is not None and (shared or block.axis in walked):
            return replace(block, size=min(columns, most.get(block.axis, columns)))
        return replace(block, size=step) if block.kind == "loop" else block

    return tuple(map(one, blocks))


def ranked(
    tiles: Kernel,
    outlook: Outlook,
    divide: Divide,
    *,
    slower: bool = False,
) -> Iterator[Choice]:
    """The roles of a kernel that fit and are predicted to be faster than its tiles, cheapest first; those that are
    `slower` too, where they are asked for. Raises Unsuited."""
    rows, residuals = rows_of(tiles), outlook.device.roles
    if residuals is None:
        raise Unsuited(f"{outlook.device.name} is no Hopper GPU")
    limit = WORTH * Pricing(tiles, outlook).seconds(None, residuals) - outlook.launch
    every = sorted(_priced(tiles, outlook, rows, residuals), key=_fewest_trips)
    priced = [each for each in every if slower or not _is_unproven(each[1], residuals)]
    if not every:
        raise Unsuited(f"too few positions of {rows}, the rows of products, for warp groups to share")
    if not priced:
        raise Unsuited("the roles that it could have were not timed on a GPU: tune tries them")
    faster = [(seconds, schedule) for seconds, schedule in priced if slower or seconds < limit]
    suited = _suited(divide, [schedule for _, schedule in priced])
    if not faster:
        best, other = 1e3 * priced[0][0], 1e3 * (limit + outlook.launch) / WORTH
        raise Unsuited(f"predicted to take {best:.3g} ms in roles, {other:.3g} ms without")
    for seconds, schedule in faster:
        least = suited(schedule)
        if least is None:
            continue
        if fits(_with_slots(least, schedule.slots), outlook.extents, outlook.device):
            yield Choice(schedule, divide(schedule), seconds)


def _is_unproven(roles: Roles, residuals: RolesResiduals) -> bool:
    """Consumers that a leader computes for share columns, and are a kind of their own."""
    kind = "led" if roles.led else "columns" if roles.columns else ""
    return kind in residuals.unproven


def _suited(divide: Divide, schedules: Sequence[Roles]) -> Callable[[Roles], RolesKernel | None]:
    """The kernel in roles of the fewest slots, one for all numbers of them; None for schedules that it cannot have. Raises
    Unsuited where it cannot have any, whatever they would cost."""

    def made(schedule: Roles) -> RolesKernel | None:
        try:
            return divide(replace(schedule, slots=SLOTS[0]))
        except Unsuited:
            return None

    kinds = {
        (s.delayed, s.persistent, s.ahead, s.columns, s.led): s for s in reversed(schedules)
    }  # the cheapest of each kind
    if not any(made(schedule) for schedule in reversed(kinds.values())):
        divide(replace(schedules[0], slots=SLOTS[0]))
    return made


def _with_slots(kernel: RolesKernel, slots: int) -> RolesKernel:
    """A kernel with so many slots where it has several: what it needs, not what it does."""
    rings = (replace(ring, slots=slots) if ring.looped and ring.tensor else ring for ring in kernel.rings)
    return replace(kernel, rings=tuple(rings))


def _fewest_trips(priced: tuple[float, Roles]) -> tuple[float, int, int]:
    """Of roles that are predicted to take the same, those of larger steps and more slots come first."""
    seconds, roles = priced
    return seconds, -sum(b.size or 0 for b in roles.blocks if b.kind == "loop"), -roles.slots


def _priced(
    tiles: Kernel, outlook: Outlook, rows: str, residuals: RolesResiduals
) -> Iterator[tuple[float, Roles]]:
    most = max(map(len, _products(tiles)), default=0)
    behind = [(), *((number,) for number in range(1, most))]
    blocks = outlook.config.blocks
    enough = MOST_PADDED * outlook.extents.get(rows, MOST)
    for step, slots, delayed, persistent in product(STEPS, SLOTS, behind, (False, True)):
        if len(_summed_columns(tiles)) != 1 or enough < WARPGROUP_ROWS:
            break
        made = sized(blocks, rows, WARPGROUP_ROWS, step)
        roles = Roles(made, SHARING, slots, delayed, persistent, columns=True)
        yield Price(tiles, outlook, made, columns=True).seconds(roles, residuals), roles
        if not delayed and _repeated(tiles, block_sizes(made, outlook.extents)) > 1:
            roles = replace(roles, consumers=SHARING + 1, led=True)
            yield Price(tiles, outlook, made).seconds(roles, residuals), roles
    grids = [(False, False), (True, False), *((True, True) for _ in [0] if _reads_once(tiles))]
    walked = walked_columns(tiles)
    tiled = walked or any(b.kind == "grid" and b.axis != rows and (b.size or 1) > 1 for b in blocks)
    for consumers, step, columns in product(CONSUMERS, STEPS, COLUMNS if tiled else (None,)):
        if enough < WARPGROUP_ROWS * consumers:
            continue
        made = sized(blocks, rows, WARPGROUP_ROWS * consumers, step, columns, outlook.extents, walked)
        price = Price(tiles, outlook, made)
        for slots, delayed, grid in product(SLOTS, behind, grids):
            roles = Roles(price.blocks, consumers, slots, delayed, *grid)
            yield price.seconds(roles, residuals), roles


def _reads_once(tiles: Kernel) -> bool:
    """Whether products of loops read tiles that are loaded outside of them."""
    names: set[str] = set()
    for stmt in tiles.body:
        match stmt:
            case Let(value, LoadTile()) if len(value.dims) == 2:
                names.add(value.name)
            case Let(value, Align(source)) if source.name in names:
                names.add(value.name)
    return any({dot.left.name, dot.right.name} & names for dots in _products(tiles) for dot in dots)


class Price:
    """What roles in some blocks are predicted to take."""

    def __init__(
        self, tiles: Kernel, outlook: Outlook, blocks: tuple[Block, ...], *, columns: bool = False
    ) -> None:
        self.blocks = blocks
        self._several = any(
            sum(dot.accumulator is None for dot in products) > 1 for products in _products(tiles)
        )
        config = replace(outlook.config, blocks=blocks)
        alone = outlook.cost.alone(config)
        special, others = _in_roles(tiles)
        sizes = block_sizes(blocks, outlook.extents)
        cut = {block.axis for block in blocks if block.kind != "whole"}
        padded = _padded(tiles, sizes, outlook.extents)
        arithmetic = special * alone["special"] + others * alone["elementwise"]
        arithmetic *= _padded(tiles, sizes, outlook.extents, cut)
        self._memory, self._cache = alone["memory"], alone["cache"]
        inside = bool(walked_columns(tiles))
        waves, trips = _waves(outlook, config), outlook.cost.trips(config, inside=inside)
        dots = [dot for loop in _products(tiles) for dot in loop]
        self._work = RolesWork(
            padded * alone["matrix"] * (_repeated(tiles, sizes) if columns else 1.0),
            arithmetic * (SHARING if columns else 1),
            waves * trips,
            waves,
            inside or arithmetic < LEAST_ARITHMETIC * alone["matrix"],
            any(BYTES[dot.left.dtype] == 1 for dot in dots),
            _read(dots, sizes),
            _stored_apart(tiles),
            waves * _looks(tiles, config.blocks, outlook.extents, trips),
        )

    def seconds(self, roles: Roles, residuals: RolesResiduals) -> float:
        """The predicted time of the kernel in these roles, of these blocks. Of several products whose results a block computes with,
        one is under way while the other's is computed with, as where a product is one block behind."""
        overlapped, persistent = bool(roles.delayed) or self._several or roles.led, roles.persistent
        found = residuals.seconds(
            self._work,
            SHARING if roles.led else roles.consumers,
            roles.slots,
            overlapped=overlapped,
            persistent=persistent,
        )
        found *= residuals.several if self._several else 1.0
        found -= self._work.waves * residuals.ahead if roles.ahead else 0.0
        if roles.led:
            found = residuals.led[0] * found + residuals.led[1]
        bound = max(found, self._memory, residuals.cached * self._cache)
        return bound - SHOWN * (bound - found)


def _summed_columns(tiles: Kernel) -> set[str]:
    """The axes of the columns of tiles that loops carry."""
    loops = (stmt for stmt in nested(tiles.body) if isinstance(stmt, For))
    return {c.value.dims[1] for loop in loops for c in loop.carried if len(c.value.dims) == 2}


def _repeated(tiles: Kernel, sizes: Mapping[str, int]) -> float:
    """What products count where consumers share the columns of those that are added to sums, and each does all others."""
    once, others, shared = 0, 0, _summed_columns(tiles)
    for dot in (dot for loop in _products(tiles) for dot in loop):
        columns = dot.right.dims[1]
        work = math.prod(sizes[axis] for axis in (*dot.left.dims, columns))
        once, others = (once + work, others) if columns in shared else (once, others + work)
    return (once + SHARING * others) / (once + others)


def _padded(
    tiles: Kernel, sizes: Mapping[str, int], extents: Mapping[str, int], among: Collection[str] | None = None
) -> float:
    """Positions of rows and columns of products, `among` these axes, that blocks have, over those that there are: others are
    computed, too."""
    dots = [dot for loop in _products(tiles) for dot in loop]
    axes = {axis for dot in dots for axis in (dot.left.dims[0], dot.right.dims[1])}
    axes &= axes if among is None else set(among)
    counts = [(math.ceil(extents[a] / sizes[a]) * sizes[a], extents[a]) for a in axes if extents.get(a)]
    return math.prod(whole / own for whole, own in counts)


def _read(dots: Sequence[Dot], sizes: Mapping[str, int]) -> float:
    """Bytes that instructions of products read of shared memory, over what it gives in their time: each multiplies the 64 rows of a
    warp group by the columns of a block, both in shared memory."""
    shares = [
        INSTRUCTION_RATE * (1 / WARPGROUP_ROWS + 1 / min(sizes[dot.right.dims[1]], MOST)) for dot in dots
    ]
    return max(shares, default=0.0)


def _stored_apart(tiles: Kernel) -> bool:
    """Whether an output has wider numbers than the tiles in whose place it could be stored."""
    body = tiles.body
    widths = [BYTES[s.value.dtype] for s in body if isinstance(s, Store) and len(s.value.dims) == 2]
    lets = [s for s in body if isinstance(s, Let) and len(s.value.dims) == 2]
    loads = [BYTES[let.value.dtype] for let in lets if isinstance(let.op, LoadTile)]
    return max(widths, default=0) > max(loads, default=0)


@dataclass(frozen=True)
class Pricing:
    """What a kernel is predicted to take in any roles, and without."""

    tiles: Kernel
    outlook: Outlook

    def seconds(self, roles: Roles | None, residuals: RolesResiduals) -> float:
        if roles is None:
            return residuals.tiles(self._without_roles)
        price = Price(self.tiles, self.outlook, roles.blocks, columns=roles.columns and not roles.led)
        return price.seconds(roles, residuals)

    @cached
    def _without_roles(self) -> TilesWork:
        outlook, config, tiles = self.outlook, self.outlook.config, self.tiles
        sizes = block_sizes(config.blocks, outlook.extents)
        whole = {block.axis for block in config.blocks if block.kind == "whole"}
        eased = _in_roles(tiles)[0] < 1
        return TilesWork(
            outlook.otherwise * _padded(tiles, sizes, outlook.extents, whole),
            _waves(outlook, config),
            outlook.cost.alone(config)["special"] if eased else 0.0,
            _sums(tiles),
            any(outlook.extents[axis] % ALIGNED for axis in whole & _loaded_axes(tiles)),
        )


def _loaded_axes(tiles: Kernel) -> set[str]:
    """The axes of tiles of two dims that loops load."""
    lets = (stmt for stmt in nested(tiles.body) if isinstance(stmt, Let) and isinstance(stmt.op, LoadTile))
    return {axis for let in lets if len(let.value.dims) == 2 for axis in let.value.dims}


def predicted(tiles: Kernel, outlook: Outlook, roles: Roles) -> tuple[float, float] | None:
    """The seconds that a kernel is predicted to take in some roles, and without any; None for devices without roles."""
    residuals = outlook.device.roles
    if residuals is None:
        return None
    pricing = Pricing(tiles, outlook)
    return pricing.seconds(roles, residuals), pricing.seconds(None, residuals)


@dataclass(frozen=True)
class Undone:
    """A decision taken back: what the kernel is predicted to take then; None where no SM holds it."""

    what: str
    seconds: float | None


def undone(tiles: Kernel, outlook: Outlook, roles: Roles, divide: Divide) -> Iterator[Undone]:
    """Each decision of the roles of a kernel, taken back by itself."""
    rows, residuals = rows_of(tiles), outlook.device.roles
    if residuals is None:
        return
    walked = walked_columns(tiles)
    columns = next((b.size for b in roles.blocks if b.axis in walked), None)
    step = next(b.size or 0 for b in roles.blocks if b.kind == "loop" and b.axis not in walked)
    others: dict[str, Roles] = {}
    if roles.delayed:
        others["no product behind"] = replace(roles, delayed=())
    if roles.led:
        others["no leader"] = replace(roles, consumers=roles.consumers - 1, led=False)
    grid = "one thread block for each item" if roles.persistent else "one thread block for each SM"
    others[grid] = replace(roles, persistent=not roles.persistent, ahead=False)
    if roles.persistent and _reads_once(tiles):
        ahead = "no tiles of the next item ahead" if roles.ahead else "tiles of the next item ahead"
        others[ahead] = replace(roles, ahead=not roles.ahead)
    for slots in SLOTS:
        if abs(SLOTS.index(slots) - SLOTS.index(roles.slots)) == 1:
            others[f"{slots} slots"] = replace(roles, slots=slots)
    for consumers in set(CONSUMERS) - {roles.consumers} if not roles.columns else ():
        blocks = sized(roles.blocks, rows, WARPGROUP_ROWS * consumers, step, columns, walked=walked)
        others[f"{consumers} consumers"] = replace(roles, blocks=blocks, consumers=consumers)
    for other in set(STEPS) - {step}:
        count = WARPGROUP_ROWS * (1 if roles.columns else roles.consumers)
        blocks = sized(roles.blocks, rows, count, other, columns, walked=walked)
        others[f"steps of {other}"] = replace(roles, blocks=blocks)
    for what, other_roles in others.items():
        try:
            made = divide(other_roles)
        except Unsuited:
            continue
        there = fits(made, outlook.extents, outlook.device)
        seconds = Pricing(tiles, outlook).seconds(other_roles, residuals)
        yield Undone(what, seconds if there else None)


def _in_roles(tiles: Kernel) -> tuple[float, float]:
    """Special functions, and other operations, that consumers compute for each one of a kernel without roles."""
    ops = [
        stmt.op.fn
        for loop in tiles.body
        if isinstance(loop, For)
        for stmt in loop.body
        if isinstance(stmt, Let) and isinstance(stmt.op, Elementwise) and len(stmt.value.dims) == 2
    ]
    special = sum(POLYNOMIALS.get(fn, (1, 0))[0] for fn in ops if fn in SPECIAL | {"exp2", "log2"})
    eased = [POLYNOMIALS[fn] for fn in ops if fn in POLYNOMIALS]
    if not eased:
        return 1.0, 1.0
    spared, more = sum(few for few, _ in eased), sum(many for _, many in eased)
    return 1 - spared / special, 1 + more / len(ops)


def _looks(tiles: Kernel, blocks: Sequence[Block], extents: Mapping[str, int], trips: float) -> float:
    """Bytes of tiles that a consumer looks at in a thread block, since they may hold infinities or NaN that are masked."""
    sizes = block_sizes(blocks, extents)
    looked = 0.0
    loops = [stmt for stmt in tiles.body if isinstance(stmt, For)]
    rests = {
        loop: [s.op for s in loop.body if isinstance(s, Let) and isinstance(s.op, NonFiniteCorrection)]
        for loop in loops
    }
    for axis in dict.fromkeys(loop.axis for loop in loops):
        masked = [rests[loop] for loop in loops if loop.axis == axis]
        for rest in next(filter(None, masked), []):
            at_ends = (len(masked) - 1) * (sizes[rest.left.dims[0]] / sizes[axis] + 1)
            count = trips if all(masked) else min(trips, at_ends)
            looked += count * math.prod(sizes[a] for a in rest.right.dims) * BYTES[rest.right.dtype]
    return looked


def _waves(outlook: Outlook, config: KernelConfig) -> int:
    return math.ceil(outlook.cost.grid(config) / outlook.device.sms)


@dataclass(frozen=True)
class Needs:
    """Bytes of shared memory of a thread block, registers of a consumer's thread, positions of an axis in the widest
    tile that is copied, and registers of a leader's thread."""

    shared: int
    registers: int
    widest: int
    leading: int = 0


def needs(kernel: RolesKernel, extents: Mapping[str, int], device: Device) -> Needs:
    """What a kernel takes of an SM, as it is estimated: its slots in shared memory, its tiles in registers."""
    sizes = block_sizes(kernel.blocks, extents)
    parts = kernel.part_sizes(sizes)

    def bytes_of(value: Value) -> int:
        return math.prod(parts[axis] for axis in value.dims) * BYTES[value.dtype]

    shared = BARRIER_BYTES + sum(ring.slots * ring.parts * bytes_of(ring.tile) for ring in kernel.rings)
    shared += sum(
        kernel.consumers * bytes_of(staging.tile)
        for staging in kernel.staging
        if not _in_slot(staging, kernel, parts)
    )
    beside = ADDRESSES + (ITEM_ADDRESSES if kernel.persistent else 0)

    def tiles_of(role: Role) -> float:
        held = max((_held(loop, bytes_of) for loop in _loops(role)), default=0)
        return held / REGISTER_BYTES / (WARPGROUP * device.lanes) + beside

    registers = tiles_of(kernel.roles[1]) + _loaded(kernel, parts)
    leading = tiles_of(kernel.roles[-1]) if kernel.led else 0
    if any(isinstance(s, Let) and _eased(s) for s in nested(kernel.roles[1].body)):
        registers += POLYNOMIAL_REGISTERS
    widest = max((parts[axis] for ring in kernel.rings for axis in ring.tile.dims[:-1]), default=0)
    return Needs(shared, math.ceil(registers), widest, math.ceil(leading))


def _eased(let: Let) -> bool:
    return isinstance(let.op, Elementwise) and let.op.fn in POLYNOMIALS and len(let.value.dims) == 2


def held_by(kernel: RolesKernel) -> int:
    """Registers that a consumer's thread may hold."""
    return LED_HELD if kernel.led else HELD[kernel.consumers]


def fits(kernel: RolesKernel, extents: Mapping[str, int], device: Device) -> bool:
    """Whether an SM holds a thread block."""
    found = needs(kernel, extents, device)
    held = (
        found.registers <= held_by(kernel)
        and found.leading <= LEADING_HELD
        and _cut_between_swizzles(kernel, extents)
        and _multiplied(kernel, extents) <= AT_START[kernel.consumers]
    )
    return found.widest <= MOST and found.shared <= device.shared and held


def _cut_between_swizzles(kernel: RolesKernel, extents: Mapping[str, int]) -> bool:
    """Whether parts of the last dim of a tile in a slot are of whole rows of its layout, in which positions are exchanged."""
    if kernel.columns is None:
        return True
    part = kernel.part_sizes(block_sizes(kernel.blocks, extents))[kernel.columns.part]
    tiles = (ring.tile for ring in kernel.rings if ring.tensor and ring.tile.dims[-1] == kernel.columns.axis)
    return all(part * BYTES[tile.dtype] % SWIZZLED_BYTES == 0 for tile in tiles)


def _multiplied(kernel: RolesKernel, extents: Mapping[str, int]) -> int:
    """Registers that the widest instruction of a product takes: a row of sums for each two threads of a warp."""
    sizes = kernel.part_sizes(block_sizes(kernel.blocks, extents))
    issued = (s for s in nested(kernel.roles[1].body) if isinstance(s, MmaAsync))
    most = MOST // 2 if kernel.led else MOST
    return OPERANDS + max((min(sizes[s.pending.dims[1]], most) // 2 for s in issued), default=0)


def _in_slot(staging: Staging, kernel: RolesKernel, sizes: Mapping[str, int]) -> bool:
    """Whether a tile is stored through the slot of a ring."""
    if staging.over is None:
        return False
    dims = zip(staging.tile.dims, kernel.ring(staging.over).tile.dims, strict=True)
    return all(sizes[a] == sizes[b] for a, b in dims)


def _loaded(kernel: RolesKernel, sizes: Mapping[str, int]) -> int:
    """Registers of what consumers load themselves beside loops: addresses, and values of columns, of which four threads share each
    row. What is loaded for numbers that are not finite takes those of operands that are not there then, what is loaded behind all
    loops those of their results."""
    body = list(nested(_until_loops_end(kernel.roles[1].body)))
    rare = {
        id(inner)
        for stmt in body
        if isinstance(stmt, If) and any(isinstance(s, ConsumerBarrier) for s in stmt.body)
        for inner in nested(stmt.body)
    }
    lets = [s for s in body if isinstance(s, Let) and isinstance(s.op, LoadTile) and id(s) not in rare]
    columns = {let.value.dims for let in lets if len(let.value.dims) == 1} - {(kernel.rows,)}
    return POINTER * len(lets) + max((sizes[axis] // ROW_THREADS for (axis,) in columns), default=0)


def _until_loops_end(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """The statements of a body, those of items included, but for what comes behind its last loop."""
    last = max((n for n, s in enumerate(body) if any(isinstance(i, For) for i in nested((s,)))), default=-1)
    for stmt in body[: last + 1]:
        yield from _until_loops_end(stmt.body) if isinstance(stmt, PersistentLoop) else (stmt,)


def _loops(role: Role) -> Iterator[For[Stmt]]:
    for stmt in nested(role.body):
        if isinstance(stmt, For):
            yield stmt


def _held(loop: For[Stmt], bytes_of: Callable[[Value], int]) -> int:
    """Bytes of the tiles that a consumer holds in a trip, where they are most: what is carried; results of products that are not
    added to it, from when they are issued; what is computed, until it is read last, by products until they are awaited. What
    is computed takes the place of what is read for the last time. At least the widest result beside all operands, which compilers
    do not let share registers. Rare branches are left out."""
    ends = {item.next.name for item in loop.carried}
    last = _last_reads(loop, ends)
    carried = {item.value.name: bytes_of(item.value) for item in loop.carried if len(item.value.dims) == 2}
    held = {name: size for name, size in carried.items() if name in last}
    most = sum(carried.values())
    apart = most - sum(held.values())
    most += _operands_and_result(loop, carried, bytes_of)
    for place, stmt in enumerate(loop.body):
        held = {name: size for name, size in held.items() if last.get(name, -1) > place}
        match stmt:
            case MmaAsync(pending, accumulator=accumulator):
                if accumulator is not None:
                    held.pop(accumulator.name, None)
                held[pending.name] = bytes_of(pending)
            case MmaWait(value, pending):
                held.pop(pending.name, None)
                held[value.name] = bytes_of(value)
            case If(_, _, results):
                held |= {r.value.name: bytes_of(r.value) for r in results if _is_numbers(r.value)}
            case Let(value, Elementwise() | Cast()) | LoadShared(value) if _is_numbers(value):
                if last.get(value.name, -1) > place:
                    held[value.name] = bytes_of(value)
        most = max(most, apart + sum(held.values()))
    return most


def _operands_and_result(loop: For[Stmt], carried: Collection[str], bytes_of: Callable[[Value], int]) -> int:
    """Bytes of the widest result of a product that is not added to what is carried, and of all operands that are computed."""
    issued = [s for s in loop.body if isinstance(s, MmaAsync)]
    operands = {s.left.name: bytes_of(s.left) for s in issued if isinstance(s.left, Value)}
    results = [bytes_of(s.pending) for s in issued if s.accumulator is None]
    return max(results, default=0) + sum(size for name, size in operands.items() if name not in carried)


def _last_reads(loop: For[Stmt], ends: Collection[str]) -> Mapping[str, int]:
    """Where each value is read last: by a product until it is awaited, and what one other value alone is computed of where that is
    computed, element by element. What a loop carries is read after all."""
    places: dict[str, list[int]] = {}
    for place, stmt in enumerate(loop.body):
        for each in nested((stmt,)):
            for value in operands(each):
                places.setdefault(value.name, []).append(place)
    left = {
        s.pending.name: s.left for s in loop.body if isinstance(s, MmaAsync) and isinstance(s.left, Value)
    }
    for place, stmt in enumerate(loop.body):
        if isinstance(stmt, MmaWait) and stmt.pending.name in left:
            places[left[stmt.pending.name].name].append(place)
    found = {name: max(reads) for name, reads in places.items()}
    for stmt in reversed(loop.body):
        if not _is_computed(stmt):
            continue
        assert isinstance(stmt, Let)
        reads = places.get(stmt.value.name, [])
        if len(reads) == 1 and stmt.value.name not in ends and _is_computed(loop.body[reads[0]]):
            there = found.pop(stmt.value.name)
            for value in operands(stmt):
                found[value.name] = max(found[value.name], there)
    return found | dict.fromkeys(ends, len(loop.body))


def _is_computed(stmt: Stmt) -> bool:
    return (
        isinstance(stmt, Let)
        and isinstance(stmt.op, Elementwise | Cast | Align)
        and len(stmt.value.dims) == 2
    )


def _is_numbers(value: Value) -> bool:
    """Whether a value is a tile of numbers: truth values are found again wherever they are read."""
    return len(value.dims) == 2 and value.dtype in FLOATS
