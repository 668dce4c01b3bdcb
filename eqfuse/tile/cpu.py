"""Runs a tile program on torch CPU tensors, in large tiles.

Only tiles and outputs are ever allocated. Threads: torch's own, inside the operations on a tile. The
alternative, one grid block per thread of a pool, was measured on 2 cores: over rows of 4096 columns both
take the same time; for attention-like tiles of 256 x 512 the pool gains a tenth, and with tiles of
64 x 128 it loses half. It would need `torch.set_num_threads(1)`, which is global to the process (MKL's
part of it at once), so the caller's own torch code would pay. Large tiles make the difference small.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from typing import Any

import torch

from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.nodes import Program
from eqfuse.tile.cpu_source import source_of
from eqfuse.tile.nodes import Let, LoadTile, TileProgram
from eqfuse.tile.storage import buffer_dtypes, resolve_extents
from eqfuse.tile.walk import nested

KernelFunction = Callable[
    [Mapping[str, torch.Tensor], Mapping[str, float | int | bool], Mapping[str, int]], None
]


class CpuProgram:
    """A tile program compiled to Python over torch; `text` is that Python, as a module of its own."""

    def __init__(self, program: TileProgram, source: Program) -> None:
        self.program = program
        self.source = source
        self.text, names = source_of(program)
        file = f"<eqfuse cpu {', '.join(kernel.name for kernel in program.kernels)}>"
        namespace: dict[str, Any] = {}
        exec(compile(self.text, file, "exec"), namespace)
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        self._kernels: tuple[KernelFunction, ...] = tuple(namespace[name] for name in names)
        self._dtypes = buffer_dtypes(program)
        self._loaded = _loaded_dtypes(program)

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, float | int | bool],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """The outputs by name. Tensors may be strided in any way; one whose dtype is not what the program
        was made for is converted first. Raises BindError where an index tensor points outside."""
        sizes = resolve_extents(self.program, extents, shards)
        buffers = buffers_for(self.program, extents, shards, self._dtypes)
        memory = {name: self._input(name, tensor) for name, tensor in tensors.items()} | buffers
        with torch.no_grad():
            for kernel in self._kernels:
                kernel(memory, scalars, sizes)
        return {buffer.name: buffers[buffer.name] for buffer in self.program.buffers if buffer.is_output}

    def _input(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        wanted = self._loaded.get(name)
        if wanted is None or not (tensor.is_floating_point() or TORCH_DTYPES[wanted].is_floating_point):
            return tensor.detach()
        return tensor.detach().to(TORCH_DTYPES[wanted])


def _loaded_dtypes(program: TileProgram) -> dict[str, str]:
    """The dtype that each tensor is loaded in."""
    return {
        stmt.op.tensor: stmt.value.dtype
        for kernel in program.kernels
        for stmt in nested(kernel.body)
        if isinstance(stmt, Let) and isinstance(stmt.op, LoadTile)
    }


def buffers_for(
    program: TileProgram, extents: Mapping[str, int], shards: Mapping[str, int], dtypes: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Uninitialised CPU tensors for everything that `program` writes, outputs and temporaries.

    `dtypes` decides where the program leaves a buffer's dtype open.
    """
    sizes = resolve_extents(program, extents, shards)
    return {
        buffer.name: torch.empty(
            [sizes[axis] for axis in buffer.axes], dtype=TORCH_DTYPES[buffer.dtype or dtypes[buffer.name]]
        )
        for buffer in program.buffers
    }
