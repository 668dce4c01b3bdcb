"""Kernels for tests of registrations: one derivation, every schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.errors import ScheduleError
from eqfuse.extend.define import forget
from eqfuse.kernel import Kernel
from eqfuse.terms.registry import REGISTERED

SCHEDULES = ("rolling", "split_k", "resident", "multi_pass")
Number = int | float


def kernels(
    source: str, scalars: Mapping[str, Number] | None = None
) -> Iterator[tuple[str, Kernel | ScheduleError]]:
    """The verified kernel of every schedule on the CPU, or why there is none."""
    derived = compiler.derive(source, scalars, False)
    device = device_named("cpu")
    for schedule in SCHEDULES:
        try:
            yield schedule, Kernel(derived, device, True, schedule, True, 8, {})
        except ScheduleError as error:
            yield schedule, error


def outputs(kernel: Kernel, **values: Any) -> tuple[np.ndarray[Any, Any], ...]:
    """What a kernel gives, as numpy arrays."""
    found = kernel(**{name: torch.from_numpy(value) for name, value in values.items()})
    return tuple(value.numpy() for value in (found if isinstance(found, tuple) else (found,)))


@contextmanager
def registered(name: str, **words: Any) -> Iterator[None]:
    """A reduction that only the test knows."""
    eq.reduction(name, **words)
    try:
        yield
    finally:
        forget(name)


def is_registered(name: str) -> bool:
    return name in REGISTERED
