"""What a thread block of a kernel in roles takes of an SM: shared memory, and registers of a consumer's thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.extract.axis_usage import block_sizes
from eqfuse.extract.devices import Device
from eqfuse.extract.resources import (
    CONSUMER_REGISTERS,
    LEADER_REGISTERS,
    LED_REGISTERS,
    REGISTER_BYTES,
    START_REGISTERS,
    WARPGROUP,
)
from eqfuse.extract.warp_schedules import MOST, POLYNOMIALS
from eqfuse.terms.dtypes import BYTES, FLOATS
from eqfuse.tile.nodes import Align, Cast, Elementwise, For, If, Let, LoadTile, PersistentLoop, Value
from eqfuse.tile.roles import nodes as warp
from eqfuse.tile.walk import nested, operands, reads

OPERANDS = 26
"""Registers that an instruction of a product takes beside its sums."""

ADDRESSES = 30
"""Registers of a consumer's thread that hold no tile."""

ITEM_ADDRESSES = 6
"""Registers of a thread for a loop over items."""

POINTER = 7
"""Registers of a thread for each tensor that consumers load themselves."""

ROW_THREADS = 4
"""Threads that share a row of a tile of sums."""

RARE_BYTES = 1024
"""Shared memory that numbers of columns pass through in rare loops."""
BARRIER_BYTES = 1024
"""Shared memory for barriers, and to align tiles."""

SWIZZLED_BYTES = 128
"""Bytes of a tile's last dim that shared memory lays out together."""

POLYNOMIAL_REGISTERS = 80
"""Registers that a function of `POLYNOMIALS` takes beside the tiles: kernels of SoftCap with fewer left took 1.3 to 2 times what was predicted,
those with more what was (H200)."""


@dataclass(frozen=True)
class Needs:
    """Bytes of shared memory of a thread block, registers of a consumer's thread, positions of an axis in the widest
    tile that is copied, and registers of a leader's thread."""

    shared: int
    registers: int
    widest: int
    leading: int = 0


def needs(kernel: warp.RolesKernel, extents: Mapping[str, int], device: Device) -> Needs:
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
    if any(isinstance(stmt, For) and stmt.rare for stmt in nested(kernel.roles[1].body)):
        shared += RARE_BYTES
    beside = ADDRESSES + (ITEM_ADDRESSES if kernel.persistent else 0)

    def tiles_of(role: warp.Role) -> float:
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


def held_by(kernel: warp.RolesKernel) -> int:
    """Registers that a consumer's thread may hold."""
    return LED_REGISTERS if kernel.led else CONSUMER_REGISTERS[kernel.consumers]


def fits(kernel: warp.RolesKernel, extents: Mapping[str, int], device: Device) -> bool:
    """Whether an SM holds a thread block."""
    found = needs(kernel, extents, device)
    held = (
        found.registers <= held_by(kernel)
        and found.leading <= LEADER_REGISTERS
        and _cut_between_swizzles(kernel, extents)
        and _multiplied(kernel, extents) <= START_REGISTERS[kernel.consumers]
    )
    return found.widest <= MOST and found.shared <= device.shared and held


def with_slots(kernel: warp.RolesKernel, slots: int) -> warp.RolesKernel:
    """A kernel with so many slots where it has several: what it needs, not what it does."""
    rings = (replace(ring, slots=slots) if ring.looped and ring.tensor else ring for ring in kernel.rings)
    return replace(kernel, rings=tuple(rings))


def _cut_between_swizzles(kernel: warp.RolesKernel, extents: Mapping[str, int]) -> bool:
    """Whether parts of the last dim of a tile in a slot are of whole rows of its layout, in which positions are exchanged."""
    if kernel.columns is None:
        return True
    part = kernel.part_sizes(block_sizes(kernel.blocks, extents))[kernel.columns.part]
    tiles = (ring.tile for ring in kernel.rings if ring.tensor and ring.tile.dims[-1] == kernel.columns.axis)
    return all(part * BYTES[tile.dtype] % SWIZZLED_BYTES == 0 for tile in tiles)


def _multiplied(kernel: warp.RolesKernel, extents: Mapping[str, int]) -> int:
    """Registers that the widest instruction of a product takes: a row of sums for each two threads of a warp."""
    sizes = kernel.part_sizes(block_sizes(kernel.blocks, extents))
    issued = (s for s in nested(kernel.roles[1].body) if isinstance(s, warp.MmaAsync))
    most = MOST // 2 if kernel.led else MOST
    return OPERANDS + max((min(sizes[s.pending.dims[1]], most) // 2 for s in issued), default=0)


def _in_slot(staging: warp.Staging, kernel: warp.RolesKernel, sizes: Mapping[str, int]) -> bool:
    """Whether a tile is stored through the slot of a ring."""
    if staging.over is None:
        return False
    dims = zip(staging.tile.dims, kernel.ring(staging.over).tile.dims, strict=True)
    return all(sizes[a] == sizes[b] for a, b in dims)


def _loaded(kernel: warp.RolesKernel, sizes: Mapping[str, int]) -> int:
    """Registers of what consumers load themselves beside loops: addresses, and values of columns, of which four threads share each
    row. What is loaded for numbers that are not finite takes those of operands that are not there then, what is loaded behind all
    loops those of their results."""
    body = list(nested(_until_loops_end(kernel.roles[1].body)))
    rare = {
        id(inner)
        for stmt in body
        if isinstance(stmt, If) and any(isinstance(s, warp.ConsumerBarrier) for s in stmt.body)
        for inner in nested(stmt.body)
    }
    lets = [s for s in body if isinstance(s, Let) and isinstance(s.op, LoadTile) and id(s) not in rare]
    columns = {let.value.dims for let in lets if len(let.value.dims) == 1} - {(kernel.rows,)}
    return POINTER * len(lets) + max((sizes[axis] // ROW_THREADS for (axis,) in columns), default=0)


def _until_loops_end(body: Sequence[warp.Stmt]) -> Iterator[warp.Stmt]:
    """The statements of a body, those of items included, but for what comes behind its last loop."""
    last = max((n for n, s in enumerate(body) if any(map(_is_walked, nested((s,))))), default=-1)
    for stmt in body[: last + 1]:
        yield from _until_loops_end(stmt.body) if isinstance(stmt, PersistentLoop) else (stmt,)


def _loops(role: warp.Role) -> Iterator[For[warp.Stmt]]:
    for stmt in nested(role.body):
        if isinstance(stmt, For) and not stmt.rare:
            yield stmt


def _is_walked(stmt: warp.Stmt) -> bool:
    return isinstance(stmt, For) and not stmt.rare


def _held(loop: For[warp.Stmt], bytes_of: Callable[[Value], int]) -> int:
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
            case warp.MmaAsync(pending, accumulator=accumulator):
                if accumulator is not None:
                    held.pop(accumulator.name, None)
                held[pending.name] = bytes_of(pending)
            case warp.MmaWait(value, pending):
                held.pop(pending.name, None)
                held[value.name] = bytes_of(value)
            case If(_, _, results):
                held |= {r.value.name: bytes_of(r.value) for r in results if _is_numbers(r.value)}
            case Let(value, Elementwise() | Cast()) | warp.LoadShared(value) if _is_numbers(value):
                if last.get(value.name, -1) > place:
                    held[value.name] = bytes_of(value)
        most = max(most, apart + sum(held.values()))
    return most


def _operands_and_result(
    loop: For[warp.Stmt], carried: Collection[str], bytes_of: Callable[[Value], int]
) -> int:
    """Bytes of the widest result of a product that is not added to what is carried, and of all operands that are computed."""
    issued = [s for s in loop.body if isinstance(s, warp.MmaAsync)]
    operands = {s.left.name: bytes_of(s.left) for s in issued if isinstance(s.left, Value)}
    results = [bytes_of(s.pending) for s in issued if s.accumulator is None]
    return max(results, default=0) + sum(size for name, size in operands.items() if name not in carried)


def _last_reads(loop: For[warp.Stmt], ends: Collection[str]) -> Mapping[str, int]:
    """Where each value is read last: by a product until it is awaited, and what one other value alone is computed of where that is
    computed, element by element. What a loop carries is read after all."""
    places: dict[str, list[int]] = {}
    for place, stmt in enumerate(loop.body):
        for value in reads((stmt,)):
            places.setdefault(value.name, []).append(place)
    left = {
        s.pending.name: s.left
        for s in loop.body
        if isinstance(s, warp.MmaAsync) and isinstance(s.left, Value)
    }
    for place, stmt in enumerate(loop.body):
        if isinstance(stmt, warp.MmaWait) and stmt.pending.name in left:
            places[left[stmt.pending.name].name].append(place)
    found = {name: max(read) for name, read in places.items()}
    for stmt in reversed(loop.body):
        if not _is_computed(stmt):
            continue
        assert isinstance(stmt, Let)
        read = places.get(stmt.value.name, [])
        if len(read) == 1 and stmt.value.name not in ends and _is_computed(loop.body[read[0]]):
            there = found.pop(stmt.value.name)
            for value in operands(stmt):
                found[value.name] = max(found[value.name], there)
    return found | dict.fromkeys(ends, len(loop.body))


def _is_computed(stmt: warp.Stmt) -> bool:
    return (
        isinstance(stmt, Let)
        and isinstance(stmt.op, Elementwise | Cast | Align)
        and len(stmt.value.dims) == 2
    )


def _is_numbers(value: Value) -> bool:
    """Whether a value is a tile of numbers: truth values are found again wherever they are read."""
    return len(value.dims) == 2 and value.dtype in FLOATS
