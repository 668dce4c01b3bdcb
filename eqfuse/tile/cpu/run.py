"""Runs a tile program on torch CPU tensors, in large tiles.

Only tiles and outputs are ever allocated. Blocks of the grid run on a pool of threads, in each of which
torch uses one thread. The alternative, torch's own threads inside every operation, was measured in turns
with it on 2 cores (medians of 7). With one other process about, they differ by less than the noise on
softmax over 4096 x 4096 and on attention in tiles of 256 x 512; in tiles of 64 x 128, where threads wait
for Python's lock, the pool takes 1.2 times as long. With two more processes that want the cores, every
operation of the alternative waits for its slower half, and it takes 1.3 to 1.6 times as long on softmax
and 2 to 3 times on attention. A program of few blocks or little data runs on the calling thread, with
torch's threads.
"""

from __future__ import annotations

import itertools
import linecache
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.nodes import Program
from eqfuse.threads import Lock, count, undisturbed
from eqfuse.tile.cpu.source import source_of
from eqfuse.tile.nodes import Kernel, TileProgram
from eqfuse.tile.storage import SMALL_ELEMENTS, buffer_dtypes, buffers_for, loaded_dtypes, resolve_extents

Tensors = Mapping[str, torch.Tensor]
Scalars = Mapping[str, float | int | bool]
Starts = tuple[int, ...]
Sizes = tuple[tuple[str, int], ...]
_Launch = tuple[Mapping[str, int], tuple[Sequence[Starts], ...]]
"""What calls on the same extents share: the size of every axis, and the blocks of every kernel."""

KernelFunction = Callable[[Tensors, Scalars, Mapping[str, int], Iterable[Starts]], None]


class CpuProgram:
    """A tile program compiled to Python over torch; `text` is that Python, as a module of its own.

    `threads` (default: as many as torch uses) is how many blocks run at once.
    """

    def __init__(self, program: TileProgram, source: Program, threads: int | None = None) -> None:
        self.program = program
        self.source = source
        self.threads = threads
        self.text, names = source_of(program)
        file = f"<eqfuse cpu {', '.join(kernel.name for kernel in program.kernels)}>"
        namespace: dict[str, Any] = {}
        exec(compile(self.text, file, "exec"), namespace)  # noqa: S102  (text that this package wrote)
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        self._kernels: tuple[KernelFunction, ...] = tuple(namespace[name] for name in names)
        self._dtypes = buffer_dtypes(program)
        self._loaded = {name: TORCH_DTYPES[dtype] for name, dtype in loaded_dtypes(program).items()}
        # Integers have 64 bits in torch calls, and so between kernels: an axis may be longer than a kernel's 32 bits allow.
        wide = (
            replace(b, dtype="i64") if self._dtypes[b.name] == "i32" and not b.is_output else b
            for b in program.buffers
        )
        self._stored = replace(program, buffers=tuple(wide))
        self._launches: dict[tuple[Sizes, Sizes], _Launch] = {}

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, float | int | bool],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """The outputs by name. Tensors may be strided in any way; one whose dtype is not what the program
        was made for is converted first. Raises BindError where an index tensor points outside."""
        key = tuple(extents.items()), tuple(shards.items())
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._launch(extents, shards)
        sizes, grids = launch
        memory = self._memory(tensors, sizes)
        small = sum(tensor.numel() for tensor in memory.values()) < SMALL_ELEMENTS
        threads = 1 if small else self.threads or count()
        for function, blocks in zip(self._kernels, grids, strict=True):
            if threads > 1 and len(blocks) >= threads:
                _on_pool(threads, blocks, partial(function, memory, scalars, sizes))
            else:
                with undisturbed(), torch.no_grad():
                    function(memory, scalars, sizes, blocks)
        return {buffer.name: memory[buffer.name] for buffer in self.program.buffers if buffer.is_output}

    def recorded(
        self,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, float | int | bool],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """As a call, for what records torch calls: one block after the other, in the calling thread."""
        sizes, grids = self._launch(extents, shards)
        memory = self._memory(tensors, sizes)
        for function, blocks in zip(self._kernels, grids, strict=True):
            function(memory, scalars, sizes, blocks)
        return {buffer.name: memory[buffer.name] for buffer in self.program.buffers if buffer.is_output}

    def _memory(
        self, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """The inputs as the kernels read them, and new buffers, by name."""
        inputs = {name: self._input(name, tensor) for name, tensor in tensors.items()}
        return inputs | buffers_for(self._stored, sizes, self._dtypes)

    def _launch(self, extents: Mapping[str, int], shards: Mapping[str, int]) -> _Launch:
        sizes = resolve_extents(self.program, extents, shards)
        return sizes, tuple(_blocks(kernel, sizes) for kernel in self.program.kernels)

    def _input(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach() if tensor.requires_grad else tensor
        wanted = self._loaded.get(name, tensor.dtype)
        if wanted == tensor.dtype or not (tensor.is_floating_point() or wanted.is_floating_point):
            return tensor
        return tensor.to(wanted)


def _blocks(kernel: Kernel, sizes: Mapping[str, int]) -> Sequence[Starts]:
    """The first positions of every block of the grid, in the kernel's order; the first axis varies fastest."""
    steps = {block.axis: block.step for block in kernel.blocks}
    ranges = [
        range(0, sizes[axis], steps[axis])[:: -1 if axis in kernel.backwards else 1]
        for axis in reversed(kernel.grid)
    ]
    return [starts[::-1] for starts in itertools.product(*ranges)]


class _Shared(Iterator[Starts]):
    """Blocks that several threads take from, each block going to one."""

    def __init__(self, blocks: Iterable[Starts]) -> None:
        self._blocks = iter(blocks)
        self._lock = Lock()

    def __next__(self) -> Starts:
        with self._lock:
            return next(self._blocks)

    def stop(self) -> None:
        """Nobody gets another block."""
        with self._lock:
            self._blocks = iter(())


def _on_pool(threads: int, blocks: Iterable[Starts], work: Callable[[Iterable[Starts]], None]) -> None:
    """Runs `work` in every thread of the pool on blocks that they share; raises what the first of them raised."""
    shared = _Shared(blocks)

    def worker() -> None:
        try:
            with torch.no_grad():
                work(shared)
        except BaseException:
            shared.stop()
            raise

    try:
        futures = [_pool(threads, os.getpid()).submit(worker) for _ in range(threads)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    except BaseException:  # an interrupt, while this thread waits
        shared.stop()
        raise
    if errors:
        raise errors[0]


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads in which torch computes alone; one pool per process, for a fork has none of its parent's threads.

    torch keeps the number per thread, but notes the last one set for threads that are yet to start:
    that note is put back.
    """
    before = torch.get_num_threads()
    started = threading.Barrier(threads + 1)

    def alone() -> None:
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "eqfuse", initializer=alone)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(before)
    return pool
