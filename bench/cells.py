"""What the benchmarks for a GPU measure: one program at one set of sizes, with what it must move and compute.

Shared by the machine that emits kernels and by the one that runs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bench.workloads import Case, Outputs, Workload

Inputs = Mapping[str, torch.Tensor]
Run = Callable[[Inputs], Outputs]

TOLERANCE = {"f16": 2e-3, "bf16": 2e-2, "f8e4m3": 5e-2, "f32": 2e-6}
"""Relative rms errors that are rounding in each dtype."""


@dataclass(frozen=True)
class Peer:
    """`make` gives the function to run, for tensors like those given; compilers compile at its first call.

    A peer that is `tuned` chooses by measuring: it compiles while nothing else runs on the device.
    """

    name: str
    kind: Literal["library", "compiler", "eager"]
    make: Callable[[Inputs], Run]
    tuned: bool = False


class Cell(ABC):
    """One program at one set of sizes."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def workload(self) -> Workload: ...

    @property
    @abstractmethod
    def case(self) -> Case: ...

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of every input, read once, and of every output, written once."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Multiplications and additions of the matrix products."""

    @abstractmethod
    def entry(self) -> dict[str, Any]:
        """The fields that it can be made from again, as JSON."""

    def floor(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Seconds that no kernel can be faster than, at these rates."""
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Fresh random inputs, on the generator's device."""
        return self.workload.drawn(self.case, generator)
