"""Where a kernel runs: the description of a named target, of the GPU that is here, and of what tensors are on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from eqfuse.errors import BindError, EqfuseError
from eqfuse.extract.devices import DEVICES, Device
from eqfuse.extract.machine import cpu_device


def device_named(name: str) -> Device:
    """The device description of a target, `cpu` the one that is here. Raises EqfuseError for an unknown name."""
    if name == "cpu":
        return cpu_device()
    if name not in DEVICES:
        raise EqfuseError(f"unknown target {name!r}", hint=f"choose one of auto, {', '.join(DEVICES)}")
    return DEVICES[name]


def gpu_device(place: torch.device | None = None) -> Device:
    """The description of a GPU, the current one where none is given."""
    index = None if place is None else place.index
    return _described(torch.cuda.current_device() if index is None else index)


@lru_cache(maxsize=64)
def _described(index: int) -> Device:
    major, minor = torch.cuda.get_device_capability(index)
    if torch.version.hip:
        return device_named("gfx942")
    if (major, minor) == (9, 0):
        return device_named("h200" if "H200" in torch.cuda.get_device_name(index) else "sm_90")
    return device_named("sm_100" if major >= 10 else "sm_80")


@dataclass(frozen=True)
class Target:
    """What a kernel was compiled for; with `auto` it runs on any device, that of the tensors."""

    device: Device
    auto: bool

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Device:
        """The device that tensors are on, where the kernel runs on it. Raises BindError."""
        places = check_together(tensors)
        for name, place in places.items():
            if place.type not in ("cpu", "cuda"):
                raise BindError(
                    f"{name!r} is on device {str(place)!r}, where kernels do not run",
                    hint="move the tensors to the CPU or to a CUDA or ROCm device",
                )
        on_gpu = any(place.type == "cuda" for place in places.values())
        if self.auto:
            return gpu_device(next(iter(places.values()))) if on_gpu else device_named("cpu")
        if on_gpu != (self.device.kind == "gpu"):
            where = "the GPU" if on_gpu else "the CPU"
            raise BindError(
                f"the tensors are on {where}, the kernel was compiled for {self.device.name}",
                hint='move the tensors, or compile with target="auto"',
            )
        return self.device


def place_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """Where results go: where the tensors are, or the CPU where there are none."""
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def check_together(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.device]:
    """The devices of tensors, which have to be one. Raises BindError."""
    places = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise BindError(f"tensors are on different devices: {listed}", hint="move them to one device")
    return places
