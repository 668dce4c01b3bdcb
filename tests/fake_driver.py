"""What NVIDIA's driver does, on a machine without one: notes what is loaded and launched, and with which arguments."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from eqfuse.devices import Target
from eqfuse.tile.triton import direct, driver, launch

READ = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "f32": ctypes.c_float}


class Driver:
    """Counts what is `loaded`, and has the `launched`: name, grid, threads, shared memory, stream, whether it overlaps, and
    arguments. `statuses` are what the next calls give."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launched: list[tuple[Any, ...]] = []
        self.statuses: dict[str, list[int]] = {}
        self.types: dict[str, tuple[str, ...]] = {}
        self.entered = 0

    def _status(self, name: str) -> int:
        given = self.statuses.get(name)
        return given.pop(0) if given else 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 0
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 1
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.entered += 1
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.loaded.append(code)
        module._obj.value = len(self.loaded)
        return self._status("cuModuleLoadData")

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = len(self.names) + 1
        self.names.append(name.decode())
        return 0

    @property
    def names(self) -> list[str]:
        return self.__dict__.setdefault("_names", [])

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: Any) -> int:
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_OF_A_TEST"
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, cells: Any, extra: None) -> int:
        status = self._status("cuLaunchKernelEx")
        if not status:
            given, name = config._obj, self.names[function.value - 1]
            types = self.types[name]
            values = tuple(READ[k].from_address(cells[n]).value for n, k in enumerate(types))
            overlaps = bool(given.count) and given.attributes[0].id == 6 and given.attributes[0].value == 1
            self.launched.append(
                (name, tuple(given.grid), given.block[0], given.shared, given.stream, overlaps, values)
            )
        return status


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """CPU tensors stand for those of an H200, whose kernels compute nothing."""
    made = Driver()
    monkeypatch.setattr(Target, "of", lambda target, tensors: target.device)
    monkeypatch.setattr(launch, "is_served", lambda given: True)
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(direct, "_current_device", lambda: lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70, raising=False)
    return made
