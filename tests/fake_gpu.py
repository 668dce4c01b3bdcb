"""What Triton's launcher does on a GPU, on a CPU: compiles nothing, runs Triton's interpreter on the memory at addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eqfuse.devices import Target
from eqfuse.tile.triton import direct, launch
from eqfuse.tile.triton.interpret import interpreter

DTYPES = {
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*fp64": torch.float64,
    "*i32": torch.int32,
    "*i64": torch.int64,
}


class Gpu:
    """Counts: `compiled` kernels, by way of Triton's front end, and launches `straight` to what was compiled."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.straight: list[tuple[Any, ...]] = []
        self.device = 0
        self.watched = False
        self.ends: dict[int, int] = {}

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notes where memory ends."""
        self.ends[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def at(self, address: int, kind: str) -> torch.Tensor:
        """Everything from an address to the end of its memory."""
        start = max(place for place in self.ends if place <= address)
        size = (start + self.ends[start] - address) // DTYPES[kind].itemsize
        room = (ctypes.c_char * (size * DTYPES[kind].itemsize)).from_address(address)
        return torch.frombuffer(room, dtype=DTYPES[kind])


class Kernel:
    """Stands for a `@triton.jit` function."""

    def __init__(self, gpu: Gpu, original: Any, types: dict[str, str]) -> None:
        self.gpu, self.original = gpu, original
        self.types = list(types.values())
        self.device_caches: dict[int, Any] = {0: ({},)}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def first(
            *arguments: Any, num_warps: int, num_stages: int, launch_pdl: bool = False, **constants: Any
        ) -> Any:
            self.gpu.compiled.append(self.original.__name__)
            for argument in arguments:
                if isinstance(argument, torch.Tensor):
                    self.gpu.seen(argument)
            with interpreter():
                self.original[grid](*arguments, **constants)
            self.device_caches[0][0][len(self.gpu.compiled)] = self
            return self

        return first if len(grid) == 1 else self._again(grid)

    def _again(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def again(*arguments: Any) -> None:
            with interpreter():
                self.original[grid](*arguments)

        return again

    function = 11
    packed_metadata = (4, 1, 0)

    def run(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *arguments: Any) -> None:
        assert (stream, function, packed, arguments[:3]) == (70 + self.gpu.device, 11, (4, 1, 0), (None,) * 3)
        given = list(arguments[3:])
        self.gpu.straight.append((x, y, z, *given))
        pointers = sum(kind.startswith("*") for kind in self.types)
        given[:pointers] = [self.gpu.at(a, t) for a, t in zip(given, self.types[:pointers], strict=False)]
        with interpreter():
            self.original[(x, y, z)](*given)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Kernels for GPUs take CPU tensors, and launch as on a GPU."""
    made, empty = Gpu(), torch.empty_strided
    modules: dict[str, Any] = {}

    def load(source: str) -> Any:
        if source not in modules:
            original = launch._loaded.__wrapped__(source, True)
            for name in original.CONFIGS:
                setattr(original, name, Kernel(made, getattr(original, name), original.SIGNATURES[name]))
            modules[source] = original
        return modules[source]

    monkeypatch.setattr(Target, "of", lambda target, tensors: target.device)
    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(direct, "_current_device", lambda: lambda: made.device)
    monkeypatch.setattr(direct, "_current_stream", lambda: lambda device: 70 + device)
    monkeypatch.setattr(direct, "_watched", lambda: lambda: made.watched)
    monkeypatch.setattr(torch, "empty_strided", lambda *size, **kind: made.seen(empty(*size, **kind)))
    original_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: made.seen(original_empty(*size, **kind)))
    return made


class Binaries:
    """Stands for a `@triton.jit` function that runs nothing: notes what Triton would compile apart."""

    function, packed_metadata = 11, ()

    def __init__(self, original: Any, made: set[Any]) -> None:
        self.original, self.made = original, made
        self.device_caches: dict[int, Any] = {0: ({},)}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Binaries:
            kinds = tuple(map(self._kind, self.original.params, arguments))
            self.made.add((self.original.__name__, kinds, tuple((n, str(v)) for n, v in options.items())))
            return self

        return run

    def _kind(self, parameter: Any, value: Any) -> Any:
        """What Triton looks at: whether 16 divides an address or an integer, whether that is 1, and its bits."""
        free = parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            return free or value.data_ptr() % 16 == 0
        if isinstance(value, int):
            return value >= 2**31, free or (value == 1, value % 16 == 0)
        return type(value)

    def run(self, *arguments: Any) -> None:
        """Launches nothing."""


@pytest.fixture
def binaries(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What Triton would compile for kernels for GPUs, which take CPU tensors and compute nothing."""
    found: set[Any] = set()
    modules: dict[str, Any] = {}

    def load(source: str) -> Any:
        if source not in modules:
            module = modules[source] = launch._loaded.__wrapped__(source, False)
            for name in module.CONFIGS:
                setattr(module, name, Binaries(getattr(module, name), found))
        return modules[source]

    monkeypatch.setattr(Target, "of", lambda target, tensors: target.device)
    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(direct, "_current_device", lambda: lambda: 0)
    monkeypatch.setattr(direct, "_current_stream", lambda: lambda device: 7)
    return found
