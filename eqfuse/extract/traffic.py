"""Bytes that loads and stores move, from memory and from the cache, as seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from eqfuse.extract.devices import Device
from eqfuse.extract.kernel_work import Access, Written
from eqfuse.extract.shape import Shape
from eqfuse.terms.nodes import Axis, Expr, Load

SECTOR = 128
"""Bytes next to each other that a GPU's memory gives in about the time of fewer."""

WRITTEN_SECTOR = 32
"""Bytes next to each other that a GPU writes in the time of fewer."""


def load_seconds(
    access: Access,
    parallel: tuple[str, ...],
    blocks: Mapping[str, int],
    extents: Mapping[str, int],
    shape: Shape,
    device: Device,
    *,
    kept: bool,
) -> tuple[float, float]:
    """Seconds of reads from memory and of those from the cache: the first read of everything, unless it is still
    `kept` there, and the blocks' repeated reads where the tensor fits it. Positions of an axis that the load divides
    read the same elements."""
    size, used = shape.itemsize(access.load.tensor), access.used
    alike = {a: min(by, extents[a]) for a, by in access.alike.items()}
    unique = math.prod(extents.get(a, 1) for a in used) * size / math.prod(alike.values())
    if device.kind == "gpu":
        unique *= max(1.0, SECTOR / (size * _neighbours(access.load.index, blocks, extents)))
    again = math.prod(
        math.ceil(extents[a] / blocks[a])
        for a in (*parallel, *_repeated_by(access, parallel, blocks, extents))
        if a not in used and a in blocks
    ) * math.prod(math.ceil(by / blocks.get(a, 1)) for a, by in alike.items())
    # blocks that run side by side share the parallel axes that the load moves along, nearly
    shared = math.prod(extents.get(a, 1) for a in used if a not in parallel) * size
    bandwidth = device.cache_bandwidth
    if 2 * unique <= device.shared and used.isdisjoint(parallel):
        bandwidth *= 2  # every SM reads all of it: half the time it is still in its own cache
    if shared > device.cache:
        return again * unique / device.bandwidth, 0.0
    if kept:
        return 0.0, again * unique / bandwidth
    return unique / device.bandwidth, (again - 1) * unique / bandwidth


def store_seconds(
    written: Written, blocks: Mapping[str, int], extents: Mapping[str, int], shape: Shape, device: Device
) -> float:
    """Seconds of writes to memory, each position once: a GPU's are of whole sectors, however many of their bytes a block has."""
    size = shape.itemsize(written.tensor)
    stored: float = math.prod(extents.get(axis, 1) for axis in written.axes) * size
    if device.kind == "gpu":
        stored *= max(1.0, WRITTEN_SECTOR / (size * _neighbours(written.index, blocks, extents)))
    return stored / device.bandwidth


def _neighbours(index: Sequence[Expr], blocks: Mapping[str, int], extents: Mapping[str, int]) -> float:
    """Elements that stand next to each other of those that a block reads or writes at once; no limit is known where positions are
    computed, unless each is an element of a tensor itself: then they are anywhere."""
    found = 1
    for at in reversed(index):
        if isinstance(at, Load):
            return found
        if not isinstance(at, Axis):
            return math.inf
        extent = extents.get(at.name, 1)
        taken = min(blocks.get(at.name, extent), extent)
        found *= taken
        if taken < extent:
            break
    return found


def _repeated_by(
    access: Access, parallel: tuple[str, ...], blocks: Mapping[str, int], extents: Mapping[str, int]
) -> tuple[str, ...]:
    """The loops that load anew what they do not walk: those outside of the innermost one that does. What no
    loop walks is loaded before all of them; what a product walks in steps of its own, in each of their trips."""
    walked = {a for a in access.used if a not in parallel and blocks.get(a, 1) < extents.get(a, 1)}
    if walked - set(access.around):
        return access.around
    inside = [place for place, axis in enumerate(access.around) if axis in walked]
    return access.around[: max(inside, default=0)]
