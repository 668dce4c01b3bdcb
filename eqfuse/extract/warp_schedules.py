"""Roles that a kernel may have, and what they are predicted to take: every schedule of a small grid is priced.

    work = max(matrix * M + arithmetic * A + trip * trips, least * A)
    seconds = max(work, (work + latency * trips) / slots) + (block + filled) * waves

M and A are the seconds that matrix products, and all other arithmetic, would take alone; trips those of the loops of all
thread blocks that an SM runs, waves how many of these it runs. The factors are fitted (residuals.py, bench/calibrate.py): they are
smaller where a product runs behind the arithmetic, so that both overlap in one consumer. A slot is filled again once it is
free, which takes the latency of a copy: short trips want more slots.

Nothing is built for a price: what a kernel computes is in its `Facts`. Whether an SM holds it is told of the cheapest ones, once they
are built (`specialize_warps`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from eqfuse.extract.axis_usage import block_sizes
from eqfuse.extract.cost import KernelCost, waits_for_memory
from eqfuse.extract.devices import Device
from eqfuse.extract.residuals import RolesResiduals, RolesWork, TilesWork
from eqfuse.extract.resources import WARPGROUP_ROWS
from eqfuse.extract.unsuited import Unsuited
from eqfuse.loops.blocks import Block
from eqfuse.loops.plan import KernelConfig, Roles
from eqfuse.terms.integers import power_of_two
from eqfuse.threads import cached

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

LEAST_ARITHMETIC = 0.05
"""Other arithmetic over the products' time below which loops do nothing but multiply."""

INSTRUCTION_RATE = 32.0
"""Tile width, of operands of 2 bytes, below which shared-memory bandwidth limits wgmma: 128 bytes a cycle for 1024 multiplications
and additions. One byte: twice the rate."""

SHOWN = 0.05
"""Unoverlapped fraction of copy time: of forms that wait for copies, those that work less are faster."""

WORTH = 0.95
"""Part of the time without roles that roles may be predicted to take: less of a difference is within the model's error."""

MOST_PADDED = 2
"""Rows of a thread block over those that there are, at most: with one row for 128 a product took 7 times what was predicted."""

ALIGNED = 16
"""Numbers of which a row of a tensor has a multiple where Triton knows how its addresses divide."""

POLYNOMIALS: Mapping[str, tuple[int, int]] = {"tanh": (2, 8)}
"""Functions that consumers compute without special ones near 0: how many of those it spares, and what it takes instead."""


@dataclass(frozen=True)
class Product:
    """A matrix product of a loop: the axes of its operands, bytes of a number of theirs, and whether it is added to a sum."""

    left: tuple[str, ...]
    right: tuple[str, ...]
    bytes: int
    is_added: bool


@dataclass(frozen=True)
class Correction:
    """Products of what is not finite, which are added by hand: the axis of their rows; and the axes of the right operand, and bytes
    of a number of it."""

    rows: str
    right: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Facts:
    """What prices need to know of a kernel.

    `rows` is the axis of the rows of all products, `loops` are the products of each loop, `summed` the axes of the columns of tiles
    that loops carry, `walked` those of columns whose blocks a loop walks that has the products' loops inside, `loaded` those of tiles
    that are loaded. `reads_once`: products of loops read tiles that are loaded outside of them. `stored_apart`: an output has wider
    numbers than the tiles in whose place it could be stored. `special` and `others` are the special functions, and other operations,
    that consumers compute for each one of a kernel without roles. `corrections` are those of each loop outside of others, with the
    loop's axis.
    """

    rows: str
    loops: tuple[tuple[Product, ...], ...]
    summed: frozenset[str]
    walked: frozenset[str]
    loaded: frozenset[str]
    reads_once: bool
    stored_apart: bool
    special: float
    others: float
    corrections: tuple[tuple[str, tuple[Correction, ...]], ...]

    @property
    def products(self) -> list[Product]:
        return [each for loop in self.loops for each in loop]

    @property
    def several(self) -> bool:
        """Whether a loop has several products with whose results a block computes."""
        return any(sum(not each.is_added for each in loop) > 1 for loop in self.loops)


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


def ranked(facts: Facts, outlook: Outlook, *, slower: bool = False) -> Ranked:
    """The roles of a kernel, cheapest first. Those that are predicted to be `slower` than none, or that no GPU has run yet, are among
    them where they are asked for. Raises Unsuited."""
    rows, residuals = facts.rows, outlook.device.roles
    if residuals is None:
        raise Unsuited(f"{outlook.device.name} is no Hopper GPU")
    limit = WORTH * Pricing(facts, outlook).seconds(None, residuals) - outlook.launch
    every = sorted(_priced(facts, outlook, residuals), key=_fewest_trips)
    priced = [each for each in every if slower or not _is_unproven(each[1], residuals)]
    if not every:
        raise Unsuited(f"too few positions of {rows}, the rows of products, for warp groups to share")
    if not priced:
        raise Unsuited("the roles that it could have were not timed on a GPU: tune tries them")
    return Ranked(priced, math.inf if slower else limit, (limit + outlook.launch) / WORTH)


@dataclass(frozen=True)
class Ranked:
    """Seconds and roles, cheapest first; the `limit` that roles are below which are faster than none; seconds without roles."""

    priced: list[tuple[float, Roles]]
    limit: float
    without: float

    @property
    def kinds(self) -> list[Roles]:
        """The cheapest of each kind: whether a kernel can have them does not depend on what else differs."""
        every = (roles for _, roles in reversed(self.priced))
        found = {(r.delayed, r.persistent, r.ahead, r.columns, r.led): r for r in every}
        return list(reversed(found.values()))

    def faster(self) -> list[tuple[float, Roles]]:
        """Those that are faster than none. Raises Unsuited."""
        found = [each for each in self.priced if each[0] < self.limit]
        if not found:
            best, other = 1e3 * self.priced[0][0], 1e3 * self.without
            raise Unsuited(f"predicted to take {best:.3g} ms in roles, {other:.3g} ms without")
        return found


def _is_unproven(roles: Roles, residuals: RolesResiduals) -> bool:
    """Consumers that a leader computes for share columns, and are a kind of their own."""
    kind = "led" if roles.led else "columns" if roles.columns else ""
    return kind in residuals.unproven


def _fewest_trips(priced: tuple[float, Roles]) -> tuple[float, int, int]:
    """Of roles that are predicted to take the same, those of larger steps and more slots come first."""
    seconds, roles = priced
    return seconds, -sum(b.size or 0 for b in roles.blocks if b.kind == "loop"), -roles.slots


def _priced(facts: Facts, outlook: Outlook, residuals: RolesResiduals) -> Iterator[tuple[float, Roles]]:
    rows, most = facts.rows, max(map(len, facts.loops), default=0)
    behind = [(), *((number,) for number in range(1, most))]
    blocks = outlook.config.blocks
    enough = MOST_PADDED * outlook.extents.get(rows, MOST)
    for step, slots, delayed, persistent in product(STEPS, SLOTS, behind, (False, True)):
        if len(facts.summed) != 1 or enough < WARPGROUP_ROWS:
            break
        made = sized(blocks, rows, WARPGROUP_ROWS, step)
        roles = Roles(made, SHARING, slots, delayed, persistent, columns=True)
        yield Price(facts, outlook, made, columns=True).seconds(roles, residuals), roles
        if not delayed and _repeated(facts, block_sizes(made, outlook.extents)) > 1:
            roles = replace(roles, consumers=SHARING + 1, led=True)
            yield Price(facts, outlook, made).seconds(roles, residuals), roles
    grids = [(False, False), (True, False), *((True, True) for _ in [0] if facts.reads_once)]
    walked = facts.walked
    tiled = walked or any(b.kind == "grid" and b.axis != rows and (b.size or 1) > 1 for b in blocks)
    for consumers, step, columns in product(CONSUMERS, STEPS, COLUMNS if tiled else (None,)):
        if enough < WARPGROUP_ROWS * consumers:
            continue
        made = sized(blocks, rows, WARPGROUP_ROWS * consumers, step, columns, outlook.extents, walked)
        price = Price(facts, outlook, made)
        for slots, delayed, grid in product(SLOTS, behind, grids):
            roles = Roles(price.blocks, consumers, slots, delayed, *grid)
            yield price.seconds(roles, residuals), roles


class Price:
    """What roles in some blocks are predicted to take."""

    def __init__(
        self, facts: Facts, outlook: Outlook, blocks: tuple[Block, ...], *, columns: bool = False
    ) -> None:
        self.blocks = blocks
        self._several = facts.several
        config = replace(outlook.config, blocks=blocks)
        alone = outlook.cost.alone(config)
        sizes = block_sizes(blocks, outlook.extents)
        cut = {block.axis for block in blocks if block.kind != "whole"}
        padded = _padded(facts, sizes, outlook.extents)
        arithmetic = facts.special * alone["special"] + facts.others * alone["elementwise"]
        arithmetic *= _padded(facts, sizes, outlook.extents, cut)
        self._memory, self._cache = alone["memory"], alone["cache"]
        self._few = outlook.cost.grid(config) < outlook.device.sms and waits_for_memory(alone)
        inside = bool(facts.walked)
        waves, trips = _waves(outlook, config), outlook.cost.trips(config, inside=inside)
        self._work = RolesWork(
            padded * alone["matrix"] * (_repeated(facts, sizes) if columns else 1.0),
            arithmetic * (SHARING if columns else 1),
            waves * trips,
            waves,
            inside or arithmetic < LEAST_ARITHMETIC * alone["matrix"],
            any(each.bytes == 1 for each in facts.products),
            _read(facts, sizes),
            facts.stored_apart,
            waves * _looks(facts, config.blocks, outlook.extents, trips),
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
        memory = self._memory * (residuals.few_streams if self._few else 1.0)
        bound = max(found, memory, residuals.cached * self._cache)
        return bound - SHOWN * (bound - found)


def _repeated(facts: Facts, sizes: Mapping[str, int]) -> float:
    """What products count where consumers share the columns of those that are added to sums, and each does all others."""
    once, others = 0, 0
    for each in facts.products:
        columns = each.right[1]
        work = math.prod(sizes[axis] for axis in (*each.left, columns))
        once, others = (once + work, others) if columns in facts.summed else (once, others + work)
    return (once + SHARING * others) / (once + others)


def _padded(
    facts: Facts, sizes: Mapping[str, int], extents: Mapping[str, int], among: Collection[str] | None = None
) -> float:
    """Positions of rows and columns of products, `among` these axes, that blocks have, over those that there are: others are
    computed, too."""
    axes = {axis for each in facts.products for axis in (each.left[0], each.right[1])}
    axes &= axes if among is None else set(among)
    counts = [(math.ceil(extents[a] / sizes[a]) * sizes[a], extents[a]) for a in axes if extents.get(a)]
    return math.prod(whole / own for whole, own in counts)


def _read(facts: Facts, sizes: Mapping[str, int]) -> float:
    """Bytes that instructions of products read of shared memory, over what it gives in their time: each multiplies the 64 rows of a
    warp group by the columns of a block, both in shared memory."""
    columns = (min(sizes[each.right[1]], MOST) for each in facts.products)
    return max((INSTRUCTION_RATE * (1 / WARPGROUP_ROWS + 1 / count) for count in columns), default=0.0)


@dataclass(frozen=True)
class Pricing:
    """What a kernel is predicted to take in any roles, and without."""

    facts: Facts
    outlook: Outlook

    def seconds(self, roles: Roles | None, residuals: RolesResiduals) -> float:
        if roles is None:
            return residuals.tiles(self._without_roles)
        price = Price(self.facts, self.outlook, roles.blocks, columns=roles.columns and not roles.led)
        return price.seconds(roles, residuals)

    @cached
    def _without_roles(self) -> TilesWork:
        outlook, config, facts = self.outlook, self.outlook.config, self.facts
        sizes = block_sizes(config.blocks, outlook.extents)
        whole = {block.axis for block in config.blocks if block.kind == "whole"}
        return TilesWork(
            outlook.otherwise * _padded(facts, sizes, outlook.extents, whole),
            _waves(outlook, config),
            outlook.cost.alone(config)["special"] if facts.special < 1 else 0.0,
            max((sum(each.is_added for each in loop) for loop in facts.loops), default=0),
            any(outlook.extents[axis] % ALIGNED for axis in whole & facts.loaded),
            any(corrections for _, corrections in facts.corrections),
        )


def alternatives(facts: Facts, roles: Roles) -> dict[str, Roles]:
    """Each decision of the roles of a kernel, taken back by itself: what that is, and the roles then."""
    rows, walked = facts.rows, facts.walked
    columns = next((b.size for b in roles.blocks if b.axis in walked), None)
    step = next(b.size or 0 for b in roles.blocks if b.kind == "loop" and b.axis not in walked)
    others: dict[str, Roles] = {}
    if roles.delayed:
        others["no product behind"] = replace(roles, delayed=())
    if roles.led:
        others["no leader"] = replace(roles, consumers=roles.consumers - 1, led=False)
    grid = "one thread block for each item" if roles.persistent else "one thread block for each SM"
    others[grid] = replace(roles, persistent=not roles.persistent, ahead=False)
    if roles.persistent and facts.reads_once:
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
    return others


def fewer_decisions(roles: Roles) -> list[Roles]:
    """The roles of the same blocks and slots with some decisions taken back, from none of these on, the roles themselves left out."""
    grids = [
        (False, False),
        *([(True, False)] if roles.persistent else []),
        *([(True, True)] if roles.ahead else []),
    ]
    made = [
        replace(roles, delayed=delayed, persistent=persistent, ahead=ahead)
        for delayed, (persistent, ahead) in product(dict.fromkeys(((), roles.delayed)), grids)
    ]
    made.sort(key=lambda each: bool(each.delayed) + each.persistent + each.ahead)
    return made[:-1] or made


def _looks(facts: Facts, blocks: Sequence[Block], extents: Mapping[str, int], trips: float) -> float:
    """Bytes of tiles that a consumer looks at in a thread block, since they may hold infinities or NaN that are masked."""
    sizes = block_sizes(blocks, extents)
    looked = 0.0
    for axis in dict.fromkeys(axis for axis, _ in facts.corrections):
        masked = [found for each, found in facts.corrections if each == axis]
        for correction in next(filter(None, masked), ()):
            at_ends = (len(masked) - 1) * (sizes[correction.rows] / sizes[axis] + 1)
            count = trips if all(masked) else min(trips, at_ends)
            looked += count * math.prod(sizes[a] for a in correction.right) * correction.bytes
    return looked


def _waves(outlook: Outlook, config: KernelConfig) -> int:
    return math.ceil(outlook.cost.grid(config) / outlook.device.sms)
