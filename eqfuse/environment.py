"""Versions of what eqfuse stands on, and the machine that it is on."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Versions and the machine, by name; None for what there is not."""
    return {
        "python": platform.python_version(),
        **{name: installed(name) for name in ("eqfuse", "torch", "triton", "egglog", "numpy")},
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


@cache
def installed(package: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The model that Linux names, or what Python knows of the processor."""
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in names if line.startswith("model name")), platform.machine()
    )
