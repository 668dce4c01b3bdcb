"""Kernels as roles: what each warp group of a thread block does, one level below the tile program.

    program ::= RolesProgram(kernels, buffers)       a kernel without roles is one of the tile program
    kernel  ::= RolesKernel(name, grid, blocks, rows, consumers, rings, staging, roles)
    role    ::= Role(name, part, body)             `part` numbers a consumer; the producer has none
    stmt    ::= Let(value, op)                     an op of the tile program, but for loads of rings and products
              | For | If | PersistentLoop | Store    as in the tile program, with statements of roles in their bodies
              | At(axis, start)                    the block of `axis` begins at `start` from here on
              | AsyncCopy(ring, turn, index)       starts to copy a tile of a tensor to a slot; 0 past the tensor's edge
              | Wait(ring, end, turn, before)      until a slot is full, or empty again
              | StoreShared(ring, turn, value)     puts a tile in registers in a slot, for other consumers
              | ReleaseSlot(ring, turn)            this consumer reads the slot no more
              | LoadShared(value, view)            the tile in a slot, in registers
              | MmaAsync(pending, left, right, axis, accumulator)
                                                   starts a matrix product; `accumulator` may be one under way, which is not
                                                   awaited then
              | MmaWait(value, pending, behind)    its result, once at most `behind` later products are under way
              | AnyNonFinite(value, view)          whether a number of the tile in a slot is an infinity or NaN
              | ZeroNonFinite(view)                the infinities and NaN of the tile in a slot become 0
              | ConsumerBarrier(turn)              until all consumers are here, for the turn-th time
              | Column(value, tile, place)         the column of a tile in registers at a place
              | Put(staging, tensor, index, value) stores a tile through shared memory; nothing past the tensor's edge

A **ring** is a queue of `slots` tiles in shared memory that the producer fills and all consumers read. The tile of a
turn is in slot `turn % slots`. Each slot has two barriers. `full` completes a phase when a copy has arrived, `empty` when
all consumers have freed the slot. `Wait(ring, "full", turn)` waits for phase `turn // slots` of a slot; a producer waits
`before` it overwrites one, for the phase before that, which the first turns of all slots need not. As on the GPU, a
barrier is asked for the parity of a phase alone.

The block of `rows` is divided among the `consumers`: each has its own part of every tile with that dim, so that the
values of a consumer have as many rows as a part. `Start(rows)`, `BlockSize(rows)` and so the bounds of loops are those of
the whole block, for every role; `Positions`, `Lanes` and `Bound` of `rows` are those of the part.

Where the kernel has `columns`, consumers share those of the sums that loops carry, and each has all rows: `Columns.part` is the
axis of a consumer's part of them. A `View` with that dim is this part of the tile in a slot. What has no such columns each
computes by itself, and the first one stores; or one more consumer, the leader, computes it, and gives the others what they
need of it through rings of no tensor.

A consumer may `ZeroNonFinite` a slot that others read: they have all read what is not finite before, as a `ConsumerBarrier` ensures. Whoever
comes later clears what is clear.

A copy writes its slot at any time between `AsyncCopy` and the phase of `full`. A product reads its operands at any time
between `MmaAsync` and `MmaWait`: a view of a slot may not be freed, and an operand in registers not be replaced, before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from eqfuse.listed import Listed
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer
from eqfuse.tile.nodes import For, If, Kernel, Let, PersistentLoop, Store, Value


@dataclass(frozen=True)
class Ring:
    """Slots of tiles of `tensor`. `tile` has the dims and dtype of one tile; `parts` is the number of consumers where each
    has rows of its own of it, else 1. One that is `looped` is filled in loops, others once for each item. A consumer fills one of no
    tensor, with `StoreShared`. Where not all consumers free its slots, so many `readers` do."""

    name: str
    tensor: str
    tile: Value
    slots: int
    parts: int
    looped: bool = True
    readers: int = 0


@dataclass(frozen=True)
class Staging:
    """Shared memory that a tile passes through on its way to `tensor`, one part for each consumer. Where tiles of the ring
    `over`, which nobody reads any more, have as many positions along each dim, it is the slot of that ring."""

    name: str
    tensor: str
    tile: Value
    over: str | None = None


@dataclass(frozen=True)
class Along:
    """The positions of the current block of an axis, and so many further on."""

    axis: str
    offset: Value | None = None


Index = tuple[Value | Along, ...]
"""Where a tile is in a tensor: a scalar or the positions of a block for each dim."""


@dataclass(frozen=True)
class View:
    """The tile of a turn of a ring, its dims in any order."""

    ring: str
    turn: Value
    dims: tuple[str, ...]


def dealt(items: int, workers: int, number: int) -> list[int]:
    """The items of the thread block of a number, of so many: one of each round of as many as there are thread blocks, there and
    back, so that who had the longest of one round gets the shortest of the next."""
    places = (number, workers - 1 - number)
    rounds = range(-(-items // workers))
    return [item for r in rounds if (item := r * workers + places[r % 2]) < items]


@dataclass(frozen=True)
class At:
    axis: str
    start: Value


@dataclass(frozen=True)
class AsyncCopy:
    ring: str
    turn: Value
    index: Index


End = Literal["full", "empty"]


@dataclass(frozen=True)
class Wait:
    ring: str
    end: End
    turn: Value
    before: bool = False


@dataclass(frozen=True)
class StoreShared:
    ring: str
    turn: Value
    value: Value


@dataclass(frozen=True)
class ReleaseSlot:
    ring: str
    turn: Value


@dataclass(frozen=True)
class LoadShared:
    DEFINES: ClassVar = ("value",)
    value: Value
    view: View


@dataclass(frozen=True)
class MmaAsync:
    DEFINES: ClassVar = ("pending",)
    pending: Value
    left: Value | View
    right: View
    axis: str
    accumulator: Value | None


@dataclass(frozen=True)
class MmaWait:
    DEFINES: ClassVar = ("value",)
    value: Value
    pending: Value
    behind: int


@dataclass(frozen=True)
class AnyNonFinite:
    DEFINES: ClassVar = ("value",)
    value: Value
    view: View


@dataclass(frozen=True)
class ZeroNonFinite:
    view: View


@dataclass(frozen=True)
class ConsumerBarrier:
    turn: Value


@dataclass(frozen=True)
class Column:
    """`value` has the rows of `tile`, and is an f32; `place` is below the tile's columns."""

    DEFINES: ClassVar = ("value",)
    value: Value
    tile: Value
    place: Value


@dataclass(frozen=True)
class Put:
    staging: str
    tensor: str
    index: Index
    value: Value


Async = (
    At
    | AsyncCopy
    | Wait
    | StoreShared
    | ReleaseSlot
    | LoadShared
    | MmaAsync
    | MmaWait
    | AnyNonFinite
    | ZeroNonFinite
    | ConsumerBarrier
    | Column
    | Put
)
Stmt: TypeAlias = "Let | For[Stmt] | If[Stmt] | PersistentLoop[Stmt] | Store | Async"


@dataclass(frozen=True)
class Columns:
    """Splits `axis` into `parts` equal sub-axes, one per consumer and none for the leader: the axis `part`."""

    axis: str
    part: str
    parts: int


@dataclass(frozen=True)
class Role:
    name: str
    part: int | None
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class RolesKernel:
    """`blocks` are those of whole thread blocks, that of `rows` a multiple of `consumers` unless these share `columns`. Of a
    `persistent` kernel every role is a `PersistentLoop`, and the grid says what the items are. `launch_constants` are conditions that a
    launch knows, of which a binary has one value."""

    name: str
    grid: tuple[str, ...]
    blocks: tuple[Block, ...]
    backwards: tuple[str, ...]
    rows: str
    consumers: int
    rings: tuple[Ring, ...]
    staging: tuple[Staging, ...]
    roles: tuple[Role, ...]
    persistent: bool = False
    launch_constants: tuple[Value, ...] = ()
    columns: Columns | None = None

    @property
    def row_parts(self) -> int:
        """Parts of the rows of a thread block."""
        return 1 if self.columns else self.consumers

    def parts_of(self, axis: str) -> int:
        """Parts that the positions of an axis are divided into among consumers."""
        if axis == self.rows:
            return self.row_parts
        return self.columns.parts if self.columns is not None and axis == self.columns.part else 1

    def whole(self, axis: str) -> str:
        """The axis that the positions of a consumer's part are on."""
        return self.columns.axis if self.columns is not None and axis == self.columns.part else axis

    @property
    def led(self) -> bool:
        """Whether the last consumer has no columns, and computes for the others."""
        return self.columns is not None and self.columns.parts < self.consumers

    def part_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Positions of each axis that a consumer has, given those of thread blocks."""
        axes = (*sizes, *((self.columns.part,) if self.columns else ()))
        return {axis: sizes[self.whole(axis)] // self.parts_of(axis) for axis in axes}

    def ring(self, name: str) -> Ring:
        return next(ring for ring in self.rings if ring.name == name)


@dataclass(frozen=True, repr=False)
class RolesProgram(Listed):
    """`domains` and `shards` are those of the tile program; `passes` are the names of those that changed one or the other."""

    kernels: tuple[RolesKernel | Kernel, ...]
    buffers: tuple[Buffer, ...]
    domains: tuple[tuple[str, str], ...] = ()
    shards: tuple[tuple[str, str], ...] = ()
    passes: tuple[str, ...] = ()

    @property
    def specialized(self) -> tuple[RolesKernel, ...]:
        """The kernels that have roles."""
        return tuple(kernel for kernel in self.kernels if isinstance(kernel, RolesKernel))
