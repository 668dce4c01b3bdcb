"""What the roofline leaves out: the one table of fitted constants, per device.

Every number goes back to kernels that ran on an H200 (141 GB, sm_90, Triton 3.6; docs/attention.md has the runs); other devices
are given the same ones. `python -m bench.calibrate rates` fits the slowdown factors. The penalties of
the lattice of tiles are not measurements: they were set so that the choices over the kept cells stay what was measured to be
best (`python -m bench.calibrate choices`), and tell little of shapes far from those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType

from eqfuse.fast_dataclass import dataclass

SLOWDOWNS: Mapping[str, float] = MappingProxyType(
    {"few_warps": 1.6, "shared_rows": 1.7, "one_block": 1.25, "spills": 3.25}
)
"""Factors on the time of a kernel with matrix products, where its tiles under-use an SM.

few_warps: fewer warps than a warpgroup though there are rows for one; operands pass through registers.
shared_rows: several warpgroups share 64 rows; each of them reads the whole other operand.
one_block: shared memory holds one thread block per SM; nothing runs while it waits.
spills: to the power of log2(values / registers of a thread): once where a thread has twice as many as it can hold."""


STAGES: Mapping[int, float] = MappingProxyType({2: 1.2, 3: 1.0, 4: 0.995})
"""Factors of the stages of a loop around matrix products: 2 took 1.06 to 1.22 times as long as 3 in attention (1.7 at
most), 3 took 1.13 to 1.25 times as long as 4 in products of 16 rows."""


@dataclass(frozen=True)
class Residuals:
    """Times in seconds, factors, and sizes."""

    # How terms combine
    hidden: float = 0.2
    """Part of a term that shows beside the bottleneck."""
    slowdowns: Mapping[str, float] = field(default_factory=lambda: dict(SLOWDOWNS))

    # Bandwidth of few thread blocks
    block_share: float = 4.0
    """Times its share of the bandwidth that one SM reaches alone, where all loads of a block are under way at once (no loop
    waits for some of them)."""
    side_warps: int = 32
    """Warps of kernels without matrix products that run side by side on an SM."""

    # Kernels without matrix products, one thread block per SM at most
    first_tile: float = 1e-6
    """Seconds in which a loop's first tiles arrive and nothing is computed; each trip, where no tile is prefetched."""
    trip: float = 2.5e-7
    """The same for each trip where tiles are prefetched: too few for the whole bandwidth."""
    whole_row: float = 1.5e-7
    """Seconds that each whole row adds where an SM has room for one: nothing is under way while it is reduced."""
    stored_row: float = 7e-7
    """What it adds where rows are stored: nothing is loaded meanwhile."""
    scattered: float = 4.0
    """Times `whole_row` where elements are loaded one by one."""

    # Matrix products
    few_rows: float = 3.0
    """Times as long as a product takes whose rows do not fill the tensor core's instruction."""
    narrow_rate: float = 2.0
    """Rate of operands of one byte over that of two."""

    # Products of float32 in Triton, which no tensor core multiplies
    float_rate: float = 0.9
    """Rate over `matrix_float`: 40 TFLOP/s in blocks of 128 x 128 (H200)."""
    float_turned: float = 0.47
    """The same where the right operand is contiguous along the summed axis: 21 TFLOP/s."""
    float_step: float = 4e-8
    """Seconds of each position of the summed axis in a block, however small that is: 16 x 16 to 64 x 16."""
    float_beside: int = 2048
    """Rows times columns of all blocks that an SM runs side by side in that time."""
    float_row: float = 5.9e-10
    """The same for each row over that rate: 160 ns in blocks of 128 x 32 whose right operand is turned, 78 of 64 x 32."""

    # Products of float32 by the library (library_products.py), of which cuBLAS took 3 us to 21.5 ms
    library_rate: float = 1.13
    """Rate over `matrix_float`: 51 TFLOP/s."""
    library_rows: int = 32
    """Rows and columns that its blocks have at least."""
    library_vectors: int = 8
    """Rows or columns up to which a product waits for memory alone."""
    library_step: float = 4.5e-9
    """Seconds of each position of the summed axes that are not shared out among thread blocks."""
    library_depth: int = 4096
    """Positions of the summed axes from which on they are."""
    library_call: float = 1e-6
    """Seconds besides those of a launch."""

    # Tiles of matrix products (product_tiles.py): set, not measured, so that the kept choices stay (see above)
    per_doubling: float = 1.35
    """Each halving or doubling away from the best size of an axis. Attention, prefill at lengths 512 to 8192, was measured
    against its neighbours: 32 keys for 64 took 1.15 to 1.29 times as long, 128 keys 1.26, 128 queries by 8 warps 1.18 to 1.27;
    with 1.3 a product of 16 rows gets another tile."""
    per_doubling_depth: float = 1.1
    """The same for a contracted axis that is walked in longer steps."""
    few_rows_tile: float = 1.8
    """Rows below a warpgroup's 64 where there are as many: less than `few_rows`, so that MLA's decode and the router keep
    the tiles that were measured to be best."""
    stages: Mapping[int, float] = field(default_factory=lambda: dict(STAGES))
    no_room: float = 16.0
    """More shared memory than there is."""
    crowded: float = 1.15
    """4 warps with more than `registers_for_4_warps`; set as the others here."""
    crowded_shared: float = 0.05
    """What shared memory costs a thread block that is alone on its SM, all of it."""
    bytes_under_way: float = 48 << 10
    """Bytes of operands that have to be under way in a thread block for its share of the bandwidth; time goes with the
    square root of what is missing: with 16 KB a stage, 3 stages took 1.13 to 1.25 times as long as 4."""
    bytes_streamed: float = 80 << 10
    """The same on an SM, of all its thread blocks, where products wait for memory. 16 rows, 4096 x 14336 (H200, 27 us at the bandwidth of
    memory): 47 KB took 34.5 us, 62 KB 31.7, 104 KB 31.6; 64 rows 35.2 with 63 KB and 32.1 with 125; few blocks with 10 KB 99."""

    # Spilled tiles: traffic of a tile that does not fit on chip, in tile sizes
    spill_traffic: float = 8.0

    # Registers of a thread (ptxas, sm_90, 4 and 8 warps, blocks halved and doubled)
    registers: int = 168
    """32-bit values besides addresses and temporaries up to which nothing was spilled."""
    registers_for_4_warps: int = 128
    """Up to here 4 warps are enough, and more thread blocks run side by side."""
    addresses: int = 40
    """Registers besides the values: addresses, masks, what instructions take."""
    widest: float = 1.5
    second: float = 0.5
    """How often the widest value that is computed counts, and the next one over other axes: a value is made while another
    is used up."""

    # Power throttling: an SM's clock falls under a long load of matrix products. With 64 rows attention at length 32768 starts
    # at 520 TFLOP/s and falls to 446 (1.55 GHz) within a second; with 128 rows it starts at 510 and falls to 463 (1.74 GHz)
    throttled_after: float = 10e-3
    """Seconds of matrix products from which on 128 rows, which read less shared memory, are faster."""
    throttled_special: float = 0.5
    """Special functions as a part of the products' time up to which it is the products that take the power."""

    # Positions sorted by a key, by torch (terms/segments.py)
    sort_call: float = 1.5e-4
    """Seconds in which torch sorts few positions, on an H100: 0.09 to 0.2 ms, most of it launches."""
    sort_position: float = 6e-11
    """Seconds of each more: a million took 0.15 ms, 16 million 1.1 ms."""


H200 = Residuals()
"""Also of devices that nothing was measured on."""


@dataclass(frozen=True)
class RolesWork:
    """What a kernel in roles does, in seconds that each kind of work would take alone: matrix products, other arithmetic; trips of
    loops of all thread blocks that an SM runs, and how many these are.

    `products_alone`: loops do nothing but multiply; `bytes`: operands of one byte. `read` is what products read of shared memory, over
    what it gives in their time. `stored_apart`: outputs are stored through shared memory of their own. `looked` are bytes that a
    consumer looks at for infinities and NaN.
    """

    matrix: float
    arithmetic: float
    trips: float
    waves: int
    products_alone: bool
    bytes: bool
    read: float
    stored_apart: bool
    looked: float


@dataclass(frozen=True)
class TilesWork:
    """Inputs of the Triton estimate of a kernel that may have roles.

    `predicted`: seconds of the other model, times what blocks have beside the extents of axes that they hold whole. `waves` of thread
    blocks. `eased`: seconds that special functions would take alone, where roles would have fewer of them, else 0. `sums`: to how many
    tiles a loop adds products. `unaligned`: rows of tensors are no multiple of 16 numbers. `looks`: masked operands may hold infinities
    and NaN.
    """

    predicted: float
    waves: int
    eased: float
    sums: int
    unaligned: bool
    looks: bool = False


@dataclass(frozen=True)
class RolesResiduals:
    """Of kernels in roles (Gluon, Triton 3.6), fitted by `bench.calibrate roles` to 311 forms of 66 cells of one run of `bench gluon`: attention of
    head dims 64 to 256, 1024 to 32768 positions, of several masks, with two or three consumers, steps of 64 and 128, products behind
    the arithmetic, grids persistent or not, and matrix products of bf16 and f8e4m3; root mean square 10 %, of products 8 %.
    Seconds are those of an H200, not those of the other model, which predicts tiles to take longer than they do."""

    behind: tuple[float, float] = (0.447, 0.292)
    """What matrix products and other arithmetic count where a product runs behind the arithmetic."""
    behind_of_3: tuple[float, float] = (0.266, 0.541)
    """The same with three consumers."""
    beside: tuple[float, float] = (0.64, 0.0921)
    """The same where consumers overlap with each other alone."""
    arithmetic: Mapping[int, float] = field(default_factory=lambda: {2: 1.354, 3: 1.048})
    """What other arithmetic takes at least, by the number of consumers: two do not fill an SM's schedulers."""
    product: tuple[float, float] = (0.262, 0.193)
    """What matrix products count in loops that do nothing else, and that times what is read of shared memory over the time of the
    products, as the matrix unit's instructions read both operands there."""
    product_trip: float = 1.98e-7
    """Seconds of a trip of such a loop: until the next product is issued."""
    promoted: float = 0.897
    """What products of bytes count more, whose sums go through float32 after each trip."""
    latency: float = 1.35e-6
    """Seconds from a slot's release to the arrival of its next tile: a trip takes at least that and its work, over the slots."""
    held: float = 0.984
    """How many trips long a consumer holds a slot: consumers work on one at the same time, each at its part of the rate."""
    cached: float = 0.805
    """What a kernel takes at least, of the time that its copies take at the bandwidth of the L2 cache as the other model has it."""
    apart: float = 1.27
    """What work counts where thread blocks do one item each and store through memory of its own: ALiBi with outputs of float32 took
    so much longer than in a persistent grid. The cause is not known."""
    trip: float = 0.589e-6
    block: float = 5.52e-6
    item: float = 2.45e-6
    """Seconds of a trip of a loop; of a thread block: its first copies, and its last product and store; and of an item of a
    persistent grid, where the copies of the next one have begun."""
    ahead: float = 0.4e-6
    """What an item takes less where the tiles that it reads once are there when it begins: most of a copy's latency; set, not
    measured."""
    walked: float = 0.0317
    """What matrix products count more in a persistent grid, whose items do not go to whoever is free."""
    slots: Mapping[int, float] = field(default_factory=lambda: {2: 1.0, 3: 0.995})
    filled: float = 0.201e-6
    """The more tiles are under way, the less a trip waits; and the later a block begins, whose first copies share the cache with
    the others'."""
    looked: float = 2.4e11
    """Bytes of slots that the consumers of an SM look at in a second, for what is not finite. With `assume_finite` causal attention (head
    dim 128) of 4 x 1024 positions took 5 us less, of 2 x 2048 8, of 8192 4, with a window of 4096 4, with soft caps 14: the model has
    5, 5, 13, 11 and 5."""
    few_streams: float = 1.45
    """What fewer thread blocks than SMs take at least, of the time of their bytes at the bandwidth of memory: 112 blocks of a product of
    64 x 4096 x 14336 took 41 us where 28 were predicted, Triton 35."""
    tile_seconds: float = 0.63
    tile_block: float = 1.17e-6
    """What Triton kernels of the same programs took of their predicted time, and a wave of thread blocks beside it."""
    tile_looked: float = 1.2e-6
    """The same where loops look for what is not finite: causal attention of 4 x 1024 positions of head dim 64 took 88 us where 73
    were predicted, with ALiBi of 2 x 2048 152 where 122 were."""
    tile_eased: float = 0.49
    """What those of SoftCap took beside, of the time of special functions alone: the other model does not count the branches of a
    hyperbolic tangent."""
    tile_unaligned: float = 1.95
    """What those took more that copy numbers one by one: head dim 72."""

    several: float = 0.9
    """What loops with several products took, with whose results a block computes, beside what these terms say: the gradient of attention,
    causal, 8192, head dims 64 and 128, by keys and values and by queries: 0.87 to 0.95."""

    led: tuple[float, float] = (1.16, 20e-6)
    """What loops take that have a leader: so many times what these terms say, and seconds beside; set so that the faster one is chosen.
    Latent attention of 16 and 32 sequences of 1024 to 4096 positions took 26 and 52 us where 9.1 and 27.9 were predicted, without a
    merge, and Triton 23 and 74."""
    unproven: frozenset[str] = frozenset({"columns"})
    """Kinds of roles (fields of `loops.plan.Roles`) that no GPU has run faster than what else there is: `k.tune` tries them, and prices do
    not choose them. Consumers that share columns and have no leader took 78 us of latent attention, Triton 79, those with one 57."""

    tile_sums: float = 1.65
    """What those took more whose loops add products to several tiles of sums, which spill: gradients of attention by keys and values
    took 3.3 ms where 1.85 were predicted (head dim 128), 1.52 to 1.73 where 0.99 were (64)."""

    def seconds(
        self, work: RolesWork, consumers: int, slots: int, *, overlapped: bool, persistent: bool
    ) -> float:
        """The time of a kernel in roles."""
        matrix, arithmetic = work.matrix, work.arithmetic
        factors, trip = self.behind if consumers < 3 else self.behind_of_3, self.trip
        if not overlapped:
            factors = self.beside
        if work.products_alone:
            factors, trip = (self.product[0] + self.product[1] * work.read, factors[1]), self.product_trip
        if work.bytes:
            factors = factors[0] * self.promoted, factors[1]
        busy = (factors[0] + self.walked * persistent) * matrix + factors[1] * arithmetic
        busy = max(busy + work.trips * trip, self.arithmetic[consumers] * arithmetic)
        if work.stored_apart and not persistent:
            busy *= self.apart
        start = self.item if persistent else self.block
        start += self.filled * (slots > min(self.slots))
        cycle = work.trips * self.latency + self.held * busy
        busy = max(busy * self.slots[min(slots, max(self.slots))], cycle / slots)
        return busy + work.waves * start + work.looked * consumers / self.looked

    def tiles(self, work: TilesWork) -> float:
        """The time of a kernel without roles."""
        factor = self.tile_sums if work.sums > 1 else 1.0
        factor *= self.tile_unaligned if work.unaligned else 1.0
        block = self.tile_block + self.tile_looked * work.looks
        busy = self.tile_seconds * work.predicted + work.waves * block + self.tile_eased * work.eased
        return factor * busy


H200_ROLES = RolesResiduals()


@dataclass(frozen=True)
class CpuResiduals:
    """Of the CPU back end (torch, two threads): what tile operations cost beside their roofline."""

    least_work: int = 1 << 17
    """Elementwise operations of a block that is worth a thread: about as many microseconds as it takes to wake one."""
    multiplication: float = 1 / 8
    """The time of a multiplication and addition within a matrix product, in elementwise operations."""
    operation: int = 1 << 14
    """Elements of a tile operation that take about as long as starting it."""
    recomputed: float = 1.1
    """How much the work may grow by what smaller blocks load or compute again."""
    sort_call: float = 4e-5
    """Seconds in which torch sorts few positions by a key (terms/segments.py): 1000 took 36 microseconds."""
    sort_position: float = 5e-9
    """Seconds of each more: 40,000 took 0.2 ms, a million 3.6 to 6.6 ms."""


CPU = CpuResiduals()
