"""A tile program on the CPU: as C++ once that is compiled, as torch calls until then and where it cannot be."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eqfuse import logs
from eqfuse.extract.machine import compiler
from eqfuse.terms.nodes import Program
from eqfuse.threads import undisturbed
from eqfuse.tile.cpu.run import CpuProgram
from eqfuse.tile.modes import Mode
from eqfuse.tile.native.build import lacking
from eqfuse.tile.native.nodes import NotNative
from eqfuse.tile.native.run import NativeProgram, Unit, prepared, unit_dims
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.storage import loaded_dtypes, resolve_extents


class HostProgram:
    """`torch_form` is the tile program in blocks for torch calls, `native_form` makes the one in blocks for C++.
    One library is compiled per layout of the tensors: see `Unit`."""

    def __init__(
        self, torch_form: TileProgram, native_form: Callable[[], TileProgram], source: Program, mode: Mode
    ) -> None:
        self._source, self._mode = source, mode
        self._tiles = torch_form
        self._loaded = loaded_dtypes(torch_form)
        self._torch: CpuProgram | None = None
        self._native_tiles: TileProgram | NotNative | None = None
        self._native_form = native_form
        self._made: dict[Unit, NativeProgram | NotNative | int] = {}  # an int: the process that compiles it
        self._last: NativeProgram | NotNative | None = None

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """The outputs by name. Raises BindError where an index tensor points outside."""
        tensors = {name: prepared(tensor, self._loaded.get(name)) for name, tensor in tensors.items()}
        self._last = found = self._native(tensors, extents, shards)
        if isinstance(found, NativeProgram):
            return found(tensors, scalars, extents, shards)
        if self._torch is None:
            program = self._torch = CpuProgram(self._tiles, self._source)
            logs.show("source", "CPU source", lambda: program.text)
        return self._torch(tensors, scalars, extents, shards)

    def prepare(
        self, tensors: Mapping[str, torch.Tensor], extents: Mapping[str, int], shards: Mapping[str, int]
    ) -> NativeProgram | NotNative:
        """Waits for the C++ for tensors like these: what was compiled, or why nothing was."""
        ready = {name: prepared(tensor, self._loaded.get(name)) for name, tensor in tensors.items()}
        found = self._native(ready, extents, shards, wait=True)
        assert found is not None
        return found

    def direct(
        self,
        names: Sequence[str],
        tensors: Mapping[str, torch.Tensor],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
        outputs: Sequence[str],
    ) -> Callable[[Mapping[str, Any], Sequence[int]], Any] | None:
        """What runs calls like this one from the addresses of its tensors, see `NativeProgram.direct`; None where torch
        calls run them, or tensors are converted first."""
        if self._converts(tensors):
            return None
        found = self._native(tensors, extents, shards)
        if not isinstance(found, NativeProgram):
            return None
        self._last = found
        return found.direct(names, tensors, extents, shards, outputs)

    def is_settled(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether calls on tensors like these will be run by what has run the last one."""
        ready = {name: prepared(tensor, self._loaded.get(name)) for name, tensor in tensors.items()}
        return isinstance(self._made.get(unit_dims(ready)), NativeProgram | NotNative)

    def into(
        self,
        tensors: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
    ) -> Callable[[], None]:
        """What runs one call again, on the same tensors and into the same outputs."""
        found = self.prepare(tensors, extents, shards)
        if isinstance(found, NativeProgram) and not self._converts(tensors):
            buffers = {**found.buffers(extents, shards), **outputs}
            return found.into(tensors, buffers, scalars, resolve_extents(self._tiles, extents, shards))

        def run() -> None:
            with undisturbed():
                for name, made in self(tensors, scalars, extents, shards).items():
                    outputs[name].copy_(made)

        return run

    def _converts(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether tensors are read in another dtype than theirs. One that requires grad has the same memory without."""
        return any(
            prepared(tensor, self._loaded.get(name)).dtype != tensor.dtype for name, tensor in tensors.items()
        )

    @property
    def code(self) -> str:
        """What the last call ran, and why not C++ where it did not; empty where C++ is switched off."""
        if self._mode == "off":
            return ""
        match self._last:
            case NativeProgram():
                return "C++"
            case NotNative() as why:
                return f"torch calls: {why}"
            case None if self._made:
                return "torch calls until C++ is compiled"
            case _:
                return ""

    @property
    def compilations(self) -> int:
        """How many forms were made: libraries of C++, one for each layout of tensors, and the one of torch calls."""
        made = [found for found in self._made.values() if isinstance(found, NativeProgram)]
        return len(made) + (self._torch is not None)

    @property
    def text(self) -> str | None:
        """The C++ of the last call's layout; None where there is none (yet)."""
        return self._last.text if isinstance(self._last, NativeProgram) else None

    def _native(
        self,
        tensors: Mapping[str, torch.Tensor],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
        *,
        wait: bool = False,
    ) -> NativeProgram | NotNative | None:
        """The C++ for tensors like these, where it has the bits for axes as long as these."""
        found = self._compiled(tensors, extents, shards, wait=wait)
        if isinstance(found, NativeProgram):
            size, axis = max(
                ((n, a) for a, n in resolve_extents(self._tiles, extents, shards).items()), default=(0, "")
            )
            if size > found.longest:
                return NotNative(f"axis {axis} has {size} positions, of {found.longest} in C++")
        return found

    def _compiled(
        self,
        tensors: Mapping[str, torch.Tensor],
        extents: Mapping[str, int],
        shards: Mapping[str, int],
        *,
        wait: bool,
    ) -> NativeProgram | NotNative | None:
        unit = unit_dims(tensors)
        known = self._made.get(unit)
        if isinstance(known, NativeProgram | NotNative):
            return known
        if known == os.getpid() and not wait:
            return None
        found: NativeProgram | NotNative
        if self._mode == "off":
            found = NotNative("it is switched off")
        elif compiler() is None:
            found = NotNative(lacking())
        else:
            tiles = self._lowered()
            if not isinstance(tiles, NotNative):
                ranks = {name: tensor.dim() for name, tensor in tensors.items()}

                def make() -> NativeProgram | NotNative:
                    try:
                        return NativeProgram(tiles, ranks, unit, extents, shards)
                    except NotNative as why:
                        return why

                def kept() -> None:
                    try:
                        self._made[unit] = make()
                    except Exception as error:  # noqa: BLE001  (nobody calls this thread: `code` tells what is wrong)
                        self._made[unit] = NotNative(f"{type(error).__name__}: {error}")

                if self._mode == "background" and not wait:
                    self._made[unit] = os.getpid()
                    _background(kept)
                    return None
                tiles_or_why = make()
                self._made[unit] = tiles_or_why
                return tiles_or_why
            found = tiles
        self._made[unit] = found
        return found

    def _lowered(self) -> TileProgram | NotNative:
        if self._native_tiles is None:
            try:
                self._native_tiles = self._native_form()
            except NotNative as why:
                self._native_tiles = why
        return self._native_tiles


class _Worker:
    """One thread that compiles what is asked for, in order. It does not keep the process from ending."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="eqfuse-native", daemon=True).start()

    def _work(self) -> None:
        while True:
            self.jobs.get()()


_worker: _Worker | None = None


def _background(job: Callable[[], None]) -> None:
    global _worker
    if _worker is None or _worker.process != os.getpid():  # a fork has none of its parent's threads
        _worker = _Worker()
    _worker.jobs.put(job)
