"""What a tile program needs in memory: the extents of its axes and the dtypes of what it stores."""

from __future__ import annotations

from collections.abc import Mapping

from eqfuse.tile.nodes import Store, TileProgram
from eqfuse.tile.walk import nested


def resolve_extents(
    program: TileProgram, extents: Mapping[str, int], shards: Mapping[str, int]
) -> dict[str, int]:
    """The size of every axis: given, a number of shards, or that of the axis it is a copy of."""
    sizes = {**extents, **shards}
    pending = {name: of for name, of in program.domains if name not in sizes}
    while ready := {name: of for name, of in pending.items() if of in sizes}:
        sizes |= {name: sizes[of] for name, of in ready.items()}
        pending = {name: of for name, of in pending.items() if name not in ready}
    return sizes


def buffer_dtypes(program: TileProgram) -> dict[str, str]:
    """The dtype of every buffer: the one it has, or else that of the value stored to it."""
    stored = {
        stmt.tensor: stmt.value.dtype
        for kernel in program.kernels
        for stmt in nested(kernel.body)
        if isinstance(stmt, Store)
    }
    return {buffer.name: buffer.dtype or stored[buffer.name] for buffer in program.buffers}
