"""Runs roles as coroutines, in any scalar domain, with the timing that shows most mistakes.

Each thread block runs by itself, or with others of the same rows: the producer and the consumers in turn, each until it
has to wait. What the hardware does at some time between two points, it does here at the worst of them:

- a copy may write its slot from `AsyncCopy` on, and has not done so before `full` completes: in between nothing is in the slot,
  and nothing is again from the moment that all consumers have freed it;
- a consumer may read a slot from its `Wait` to its `ReleaseSlot`, and not a moment longer;
- a product reads its operands when it is awaited;
- barriers know the parity of a phase alone, so that a wait for a wrong phase may pass.

Which role goes first, and whether copies arrive at once or only when no role can move, differs between thread blocks.
Nobody can move and no copy is under way: a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eqfuse.terms.domain import Domain, total
from eqfuse.terms.integers import is_exact
from eqfuse.terms.nodes import Program
from eqfuse.tile.check import TileError
from eqfuse.tile.interpreter import Instances, Integers, Memory, accumulates, memory_of, outputs_of
from eqfuse.tile.nodes import For, If, Let, PersistentLoop, Store, Value
from eqfuse.tile.roles import nodes as warp
from eqfuse.tile.storage import resolve_extents

Steps = Iterator[None]
"""A role under way: it gives back control wherever it has to wait."""


@dataclass(frozen=True)
class Timing:
    """Which role goes first, the producer being 0, and when copies arrive: at once, or when nobody can move, the last one
    first or the first one."""

    first: int
    copies: Literal["at once", "last first", "first first"]


TIMINGS = (
    Timing(0, "last first"),
    Timing(1, "at once"),
    Timing(0, "at once"),
    Timing(2, "first first"),
    Timing(1, "last first"),
    Timing(0, "first first"),
)
"""Those of thread blocks, in turn; where there are fewer blocks, they run again."""


WORKERS = 2
"""Thread blocks of a persistent grid."""

Members = npt.NDArray[Any]
"""Numbers of the instances that run together."""


class VaryingError(Exception):
    """A bound of a loop differs between thread blocks or trials, which run by themselves then."""


def run(
    program: warp.RolesProgram,
    source: Program,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
    extents: Mapping[str, int],
    domain: Domain,
    *,
    shards: Mapping[str, int],
    batch: int | None = None,
    timings: Sequence[Timing] = TIMINGS,
) -> dict[str, Any]:
    """The outputs of `program`; arguments and results are those of the tile program's interpreter. Raises TileError where
    roles deadlock, read what is not there, or leave copies behind."""
    sizes = resolve_extents(program, extents, shards)
    dtypes = {buffer.name: buffer.dtype or "f32" for buffer in program.buffers}

    def attempt(
        tensors: Mapping[str, Any], scalars: Mapping[str, Any], trials: int | None
    ) -> dict[str, Memory]:
        memory = memory_of(program.buffers, dtypes, source, tensors, sizes, domain, trials)
        for kernel in program.kernels:
            with np.errstate(all="ignore"):
                if isinstance(kernel, warp.RolesKernel):
                    _run_kernel(kernel, memory, scalars, sizes, domain, trials or 1, timings)
                else:
                    Instances(kernel, memory, scalars, sizes, domain, trials or 1).run()
        return memory

    try:
        return outputs_of(program.buffers, attempt(tensors, scalars, batch), domain, batch)
    except VaryingError:
        if batch is None:
            raise
    memory = memory_of(program.buffers, dtypes, source, tensors, sizes, domain, batch)
    for trial in range(batch):
        own = attempt(
            {name: _trial(tensor, trial, domain) for name, tensor in tensors.items()},
            {name: _trial(number, trial, domain) for name, number in scalars.items()},
            1,
        )
        for buffer in program.buffers:
            _copied(memory[buffer.name], own[buffer.name], trial, domain)
    return outputs_of(program.buffers, memory, domain, batch)


def _trial(array: Any, trial: int, domain: Domain) -> Any:
    """What one trial has of an argument: integer tensors and numbers are those of all trials."""
    if isinstance(array, (bool, int, float, np.number, np.bool_)):
        return array
    if isinstance(array, np.ndarray) and array.dtype.kind in "iub":
        return array
    return domain.take(array, (slice(trial, trial + 1),))


def _copied(into: Memory, own: Memory, trial: int, domain: Domain) -> None:
    shape = (1, *own.shape)
    target = tuple(np.broadcast_to(part, shape) for part in np.indices(shape))
    target = (target[0] + trial, *target[1:])
    if into.integer and not own.integer:
        into.array = domain.lift(into.array)
    if into.integer:
        into.array[target] = own.array
    else:
        domain.put(into.array, target, domain.broadcast(own.array, shape))


def _run_kernel(
    kernel: warp.RolesKernel,
    memory: Mapping[str, Memory],
    scalars: Mapping[str, Any],
    sizes: Mapping[str, int],
    domain: Domain,
    trials: int,
    timings: Sequence[Timing],
) -> None:
    """Thread blocks of the same rows run together, as if they were one, where their loops end at the same places."""
    found = Instances(kernel, memory, scalars, sizes, domain, trials)
    if not found.count:
        return
    rows = np.broadcast_to(found.starts[kernel.rows][0], (found.count,))
    together = [np.flatnonzero(rows == start) for start in dict.fromkeys(rows.tolist())]
    alone = [np.array([number]) for number in range(found.count)]
    owners: dict[str, Any] = {}

    def attempt(blocks: Sequence[Members]) -> None:
        started = min(len(blocks), WORKERS) if kernel.persistent else len(blocks)
        runs = max(started, len(timings))
        for number, timing in zip(range(runs), cycle(timings), strict=False):
            first = number % started
            mine = warp.dealt(len(blocks), started, first) if kernel.persistent else [first]
            items = [blocks[item] for item in mine]
            shared = _Shared(kernel, timing)
            roles = [
                _Role(shared, role, items, owners, memory, scalars, sizes, domain, trials)
                for role in kernel.roles
            ]
            shared.run([role.steps() for role in roles])

    try:
        attempt(together)
    except VaryingError:
        attempt(alone)


@dataclass
class _Barrier:
    """Phases that are completed, and arrivals in the one that is not, of as many as it takes."""

    needed: int
    phases: int = 0
    arrivals: int = 0

    def arrive(self) -> bool:
        """Whether that completes a phase."""
        self.arrivals += 1
        if self.arrivals == self.needed:
            self.phases, self.arrivals = self.phases + 1, 0
            return True
        return False

    def passes(self, parity: int) -> bool:
        """Whether the last phase that is completed has this parity; before all, that is phase -1."""
        return (self.phases - 1) % 2 == parity


@dataclass
class _Slot:
    full: _Barrier
    empty: _Barrier
    tiles: list[Any] | None = None  # of each part; None: nothing that may be read


@dataclass
class _Shared:
    """What the roles of one thread block share: slots, and copies under way."""

    kernel: warp.RolesKernel
    timing: Timing
    slots: dict[str, list[_Slot]] = field(default_factory=dict)
    copies: list[tuple[_Slot, list[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        consumers = self.kernel.consumers
        self.meeting = _Barrier(consumers)
        for ring in self.kernel.rings:
            readers = ring.readers or consumers
            self.slots[ring.name] = [_Slot(_Barrier(1), _Barrier(readers)) for _ in range(ring.slots)]

    def run(self, roles: list[Steps]) -> None:
        first = self.timing.first % len(roles)
        waiting = [*roles[first:], *roles[:first]]
        moved = True
        self.progress = 0
        while waiting:
            before = self.progress
            waiting = [role for role in waiting if next(role, self) is not self]
            moved = self.progress > before
            if waiting and not moved:
                if not self.copies:
                    raise TileError(f"the roles of {self.kernel.name} wait for each other")
                self._arrives(-1 if self.timing.copies == "last first" else 0)
        if self.copies:
            raise TileError(f"{self.kernel.name} ends before all copies have arrived")

    def fill(self, slot: _Slot, tiles: list[Any]) -> None:
        slot.tiles = None
        self.copies.append((slot, tiles))
        if self.timing.copies == "at once":
            self._arrives(-1)

    def _arrives(self, place: int) -> None:
        slot, tiles = self.copies.pop(place)
        slot.tiles = tiles
        slot.full.arrive()
        self.progress += 1

    def free(self, slot: _Slot) -> None:
        if slot.empty.arrive():
            slot.tiles = None


class _Role(Instances):
    """One role of one thread block."""

    def __init__(
        self,
        shared: _Shared,
        role: warp.Role,
        items: Sequence[Members],
        owners: dict[str, Any],
        memory: Mapping[str, Memory],
        scalars: Mapping[str, Any],
        sizes: Mapping[str, int],
        domain: Domain,
        trials: int,
    ) -> None:
        self.roles = kernel = shared.kernel
        super().__init__(kernel, memory, scalars, sizes, domain, trials)
        self.shared, self.role, self.part = shared, role, role.part
        self.rows, self.consumers, self.rings = kernel.rows, kernel.consumers, kernel.rings
        self.staging = kernel.staging
        self.items, self.every = items, dict(self.starts)
        self.owner, self.count = owners, len(items[0])
        self.everywhere = np.ones((1, self.count), dtype=np.bool_)
        self._begin(items[0])
        self.whole = dict(self.blocks)
        self.blocks = kernel.part_sizes(self.blocks)
        self.issued = 0
        self.pending: dict[str, tuple[int, warp.MmaAsync]] = {}
        self.started: dict[str, Any] = {}
        self.reading: set[tuple[str, int]] = set()

    def steps(self) -> Steps:
        yield from self._run(self.role.body)
        if self.reading and any(len(self.shared.slots[ring]) > 1 for ring, _ in self.reading):
            raise TileError(f"{self._who} ends without freeing {min(self.reading)[0]}")

    def _begin(self, item: Members) -> None:
        """Sets the blocks of the grid to those of an item."""
        self.members = item
        for axis, start in self.every.items():
            self.starts[axis] = start if start.shape[-1] == 1 else start[..., item]
        if self.roles.columns is not None:
            self.starts[self.roles.columns.part] = self.starts[self.roles.columns.axis]

    @property
    def _who(self) -> str:
        part = "" if self.part is None else f" {self.part}"
        return f"{self.role.name}{part} of {self.kernel.name}"

    # Rows of a part

    def _reduce(self, op: str, operand: Value, axis: str) -> Any:
        if axis != self.roles.rows:
            return super()._reduce(op, operand, axis)
        # of all trials and thread blocks that run together, as what a slot has that is not finite
        return np.asarray(super()._reduce(op, operand, axis)).max((0, 1), keepdims=True)

    def _block_size(self, axis: str) -> int:
        return self.whole[axis]

    def _lanes(self, axis: str) -> Integers:
        first = (self.part or 0) * self.blocks[axis] if self.roles.parts_of(axis) > 1 else 0
        return first + np.arange(self.blocks[axis], dtype=np.int64)

    # Statements

    def _run(self, body: Sequence[warp.Stmt]) -> Steps:
        for stmt in body:
            self.shared.progress += 1
            match stmt:
                case Let(value, op):
                    self.values[value.name] = self._evaluate(value, op, self.everywhere)
                case Store():
                    self._store(stmt, self.everywhere)
                case For():
                    yield from self._blocks_of(stmt)
                case PersistentLoop():
                    yield from self._all_items(stmt)
                case If():
                    yield from self._branch(stmt)
                case warp.At(axis, start):
                    self.starts[axis] = self.values[start.name]
                case warp.AsyncCopy():
                    self._fill(stmt)
                case warp.Wait():
                    yield from self._wait(stmt)
                case warp.ReleaseSlot(ring, turn):
                    slot, _ = self._slot(ring, turn)
                    self.reading.discard((ring, slot))
                    self.shared.free(self.shared.slots[ring][slot])
                case warp.StoreShared(ring, turn, value):
                    self._give(ring, turn, value)
                case warp.LoadShared(value, view):
                    self.values[value.name] = self._read(view, value.dims)
                case warp.MmaAsync(pending, _, _, _, accumulator):
                    self.issued += 1
                    self.pending[pending.name] = self.issued, stmt
                    self.started[pending.name] = self._start(accumulator)
                case warp.MmaWait(value, pending, behind):
                    self.values[value.name] = self._product(value, pending, behind)
                case warp.AnyNonFinite(value, view):
                    # of all trials and thread blocks that run together: one that has none adds nothing
                    self.values[value.name] = self._truth(not self._all_finite(self._tile_of(view)))
                case warp.ZeroNonFinite(view):
                    self._clear(view)
                case warp.ConsumerBarrier(turn):
                    yield from self._meet(turn)
                case warp.Column(value, tile, place):
                    self.values[value.name] = self._column(tile, place)
                case warp.Put():
                    self._put(stmt)

    def _blocks_of(self, loop: For[warp.Stmt]) -> Steps:
        position, stop = self._number_of(loop.start), self._number_of(loop.stop)
        for item in loop.carried:
            self.values[item.value.name] = self._converted(item.init, item.value.dtype)
        sums = {
            value.name
            for stmt in loop.body
            if isinstance(stmt, warp.MmaWait) or (isinstance(stmt, Let) and accumulates(stmt.op))
            for value in (stmt.value,)
        }
        while position < stop:
            self.starts[loop.axis] = np.full((1, 1), position, dtype=np.int64)
            yield from self._run(loop.body)
            following = {}
            for item in loop.carried:
                new = self._converted(item.next, item.value.dtype)
                summed = item.next.name in sums and not is_exact(new)
                following[item.value.name] = total(self.domain, new) if summed else new
            self.values |= following
            position += self.whole[loop.axis]

    def _all_items(self, items: PersistentLoop[warp.Stmt]) -> Steps:
        for carried in items.carried:
            self.values[carried.value.name] = self.values[carried.init.name]
        for item in self.items:
            self._begin(item)
            yield from self._run(items.body)
            self.values |= {c.value.name: self.values[c.next.name] for c in items.carried}

    def _branch(self, when: If[warp.Stmt]) -> Steps:
        if all(isinstance(stmt, Let) for stmt in when.body):
            yield from self._either(when)
            return
        taken = bool(self._number_of(when.condition))
        if taken:
            yield from self._run(when.body)
        chosen = [(r.value.name, self.values[(r.then if taken else r.otherwise).name]) for r in when.results]
        self.values |= dict(chosen)

    def _either(self, when: If[warp.Stmt]) -> Steps:
        """A branch that only computes, whose condition may differ between trials."""
        taken = self.values[when.condition.name]
        if taken.any():
            yield from self._run(when.body)
        for result in when.results:
            name, other = result.value.name, self.values[result.otherwise.name]
            if taken.any():
                mask = taken.reshape(*taken.shape[:2], *(1,) * len(result.value.dims))
                self.values[name] = self._chosen(mask, self.values[result.then.name], other)
            else:
                self.values[name] = other

    def _number_of(self, value: Value) -> int:
        """The number that a scalar is in all trials."""
        found = np.unique(np.asarray(self.values[value.name]))
        if len(found) > 1:
            raise VaryingError(value.name)
        return int(found[0])

    # Slots

    def _slot(self, ring: str, turn: Value) -> tuple[int, int]:
        """The slot of a turn, and its phase."""
        count = len(self.shared.slots[ring])
        number = self._number_of(turn)
        return number % count, number // count

    def _wait(self, stmt: warp.Wait) -> Steps:
        slot, phase = self._slot(stmt.ring, stmt.turn)
        barrier = getattr(self.shared.slots[stmt.ring][slot], stmt.end)
        while not barrier.passes((phase + stmt.before) % 2):
            yield
        self.shared.progress += 1
        if stmt.end == "full":
            self.reading.add((stmt.ring, slot))

    def _fill(self, stmt: warp.AsyncCopy) -> None:
        ring = next(ring for ring in self.rings if ring.name == stmt.ring)
        slot, _ = self._slot(stmt.ring, stmt.turn)
        tiles = [self._copied_tile(ring.tensor, ring.tile, stmt.index, part) for part in range(ring.parts)]
        self.shared.fill(self.shared.slots[stmt.ring][slot], tiles)

    def _give(self, ring: str, turn: Value, value: Value) -> None:
        slot = self.shared.slots[ring][self._slot(ring, turn)[0]]
        if slot.tiles is not None:
            raise TileError(f"{self._who} gives a tile to a slot of {ring} that is still read")
        slot.tiles = [self.values[value.name]]
        slot.full.arrive()

    def _places(self, index: warp.Index, tile: Value, part: int) -> list[Integers]:
        """The positions of a tile's elements, for each dim of its tensor."""
        found: list[Integers] = []
        for place in index:
            if isinstance(place, Value):
                found.append(self._aligned(place, tile.dims))
                continue
            first = part * self.blocks[place.axis] if self.roles.parts_of(place.axis) > 1 else 0
            start = self.starts[place.axis] + first
            if place.offset is not None:
                start = start + self.values[place.offset.name]
            positions = start[..., None] + np.arange(self.blocks[place.axis])
            shape = [1] * len(tile.dims)
            shape[tile.dims.index(place.axis)] = -1
            found.append(positions.reshape(*positions.shape[:2], *shape))
        return found

    def _inside(self, places: Sequence[Integers], shape: Sequence[int]) -> Any:
        masks = [(p >= 0) & (p < extent) for p, extent in zip(places, shape, strict=True)]
        inside: Any = masks[0]
        for mask in masks[1:]:
            inside = inside & mask
        return inside

    def _copied_tile(self, tensor: str, tile: Value, index: warp.Index, part: int) -> Any:
        memory = self.memory[tensor]
        places = self._places(index, tile, part)
        inside = self._inside(places, memory.shape)
        zero = self._number(0.0, tile.dtype, (1,) * (len(tile.dims) + 2))
        if not inside.any():
            return zero
        if any(positions.shape[0] > 1 for positions in places):
            raise VaryingError(tensor)
        safe = self._guarded(f"copy of {tensor}", memory, places, np.zeros_like(inside))
        where = (slice(None), *(p[0] for p in np.broadcast_arrays(*safe)))
        if memory.integer:
            return np.where(inside, memory.array[where], zero)
        return self.domain.where(inside, self.domain.take(memory.array, where), zero)

    def _put(self, stmt: warp.Put) -> None:
        memory = self.memory[stmt.tensor]
        places = self._places(stmt.index, stmt.value, self.part or 0)
        inside = self._inside(places, memory.shape)
        self._overwritten(stmt)
        self._write(f"put to {stmt.tensor}", memory, stmt.value, places, inside, self.everywhere)

    def _overwritten(self, stmt: warp.Put) -> None:
        """What a tile that is stored replaces: where it passes through a slot, this role's part is gone."""
        over = next(staging.over for staging in self.staging if staging.name == stmt.staging)
        if over is not None:
            (slot,) = self.shared.slots[over]
            if slot.tiles is None:
                raise TileError(f"{self._who} stores through a slot of {over} that is being filled")
            slot.tiles = [None if part == self.part else tile for part, tile in enumerate(slot.tiles)]

    def _claim(self, what: str, tensor: Memory, target: Any, instance: Integers) -> None:
        super()._claim(what, tensor, target, self.members[instance] * (self.consumers + 1) + (self.part or 0))

    def _tile_of(self, view: warp.View) -> Any:
        """What this role reads of a slot now, as its tile's dims stand."""
        slot, _ = self._slot(view.ring, view.turn)
        ring = next(ring for ring in self.rings if ring.name == view.ring)
        held = self.shared.slots[view.ring][slot].tiles
        tile = held[(self.part or 0) if ring.parts > 1 else 0] if held else None
        if tile is None or (view.ring, slot) not in self.reading:
            raise TileError(f"{self._who} reads a slot of {view.ring} where nothing is, or may be")
        return tile

    def _all_finite(self, tile: Any) -> bool:
        return self.domain.is_finite(tile) or bool(np.all(self._is_finite(tile)))

    def _truth(self, holds: bool) -> Any:
        return np.full((1, 1), holds)

    def _clear(self, view: warp.View) -> None:
        tile = self._tile_of(view)
        slot, _ = self._slot(view.ring, view.turn)
        ring = next(ring for ring in self.rings if ring.name == view.ring)
        tiles = self.shared.slots[view.ring][slot].tiles
        assert tiles is not None  # it was read
        tiles[(self.part or 0) if ring.parts > 1 else 0] = self._finite_part(tile)

    def _meet(self, turn: Value) -> Steps:
        barrier, parity = self.shared.meeting, self._number_of(turn) % 2
        barrier.arrive()
        self.shared.progress += 1
        while not barrier.passes(parity):
            yield
        self.shared.progress += 1

    def _column(self, tile: Value, place: Value) -> Any:
        array, count = self._real(self.values[tile.name]), self.blocks[tile.dims[1]]
        number = self._number_of(place)
        return self.domain.take(self._spread(array, count), (slice(None), slice(None), slice(None), number))

    # Products

    def _operand(self, side: Value | warp.View, dims: tuple[str, ...]) -> Any:
        return self._real(self._aligned(side, dims) if isinstance(side, Value) else self._read(side, dims))

    def _read(self, view: warp.View, dims: tuple[str, ...]) -> Any:
        """What this role has of the tile in a slot, its dims in the order of `dims`."""
        tile, found = next(ring for ring in self.rings if ring.name == view.ring).tile, self._tile_of(view)
        own = tuple(self._own_dim(axis, view) for axis in tile.dims)
        for place, axis in enumerate(own):
            if axis != tile.dims[place]:
                found = self._part_of(found, place, axis)
        self.values["%read"] = found
        return self._aligned(Value("%read", own, tile.dtype), dims)

    def _own_dim(self, axis: str, view: warp.View) -> str:
        """The dim of a view along a dim of its tile: a consumer's part of it, where it has that."""
        return next(dim for dim in view.dims if self.roles.whole(dim) == axis)

    def _part_of(self, tile: Any, place: int, axis: str) -> Any:
        """This consumer's part of a tile along a dim."""
        if self.domain.shape(tile)[place + 2] == 1:
            return tile
        first = (self.part or 0) * self.blocks[axis]
        return self.domain.take(
            tile, (slice(None),) * (place + 2) + (slice(first, first + self.blocks[axis]),)
        )

    def _start(self, accumulator: Value | None) -> Any:
        """What a product starts from: a result that is not awaited is found when its own is."""
        if accumulator is None or accumulator.name in self.pending:
            return accumulator
        return self.values[accumulator.name]

    def _product(self, value: Value, pending: Value, behind: int) -> Any:
        number, issued = self.pending.pop(pending.name, (0, None))
        if issued is None:
            raise TileError(f"{self._who} awaits {pending.name}, which is not under way")
        if self.issued - number < behind:
            raise TileError(f"{self._who} reads {pending.name} while it may be under way")
        dims = (*value.dims, issued.axis)
        left, right = (self._operand(side, dims) for side in (issued.left, issued.right))
        size = self.blocks[issued.axis]
        product = self.domain.contract(self._spread(left, size), self._spread(right, size), len(dims) + 1)
        start = self.started.pop(pending.name)
        if isinstance(start, Value):
            start = self._product(start, start, 0)
        return product if start is None else self.domain.call("add", [start, product])
