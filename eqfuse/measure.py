"""How far results are from what they should be, and how long calls take beside each other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Tensors = tuple[torch.Tensor, ...]
Given = TypeVar("Given")


def as_tuple(result: Any) -> Tensors:
    """The outputs of a kernel or a reference as a tuple of tensors, also where it has only one."""
    return tuple(torch.as_tensor(value) for value in (result if isinstance(result, tuple) else (result,)))


def rms_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference over that of the reference.

    Infinities and NaN must stand at the same positions with the same sign; otherwise the error is inf.
    """
    a, b = value.detach().double(), reference.detach().to(value.device).double()
    finite = torch.isfinite(b)
    same_kind = torch.equal(torch.isfinite(a), finite) and torch.equal(
        a[~finite].nan_to_num(), b[~finite].nan_to_num()
    )
    if a.shape != b.shape or not same_kind or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    difference, size = (a - b)[finite].square().sum().sqrt(), b[finite].square().sum().sqrt()
    return float(difference / size) if size > 0 else float(difference)


def worst_error(values: Tensors, references: Tensors) -> float:
    """The largest `rms_error` over the outputs; inf where their number differs."""
    if len(values) != len(references):
        return float("inf")
    return max(rms_error(v, r) for v, r in zip(values, references, strict=True))


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Times:
    """Seconds per call, one list per contestant, in the order of rounds. `warm` are those of calls on inputs that the
    same contestant has just read."""

    seconds: Mapping[str, Sequence[float]]
    warm: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def warm_median(self, name: str) -> float:
        return statistics.median(self.warm[name])


def interleaved(
    contestants: Mapping[str, Callable[[Given], Any]],
    inputs: Callable[[int], Given],
    *,
    device: str = "cpu",
    rounds: int = 9,
    budget_seconds: float = 6.0,
    again: int = 0,
    most_seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Time the contestants in turn on fresh inputs, each round beginning with another one: one warm-up round, then up to `rounds`;
    each of them `again` on the same inputs.

    Stops early, after three rounds at the least, once `budget_seconds` have passed. The time of a contestant whose warm-up takes
    longer than `most_seconds` is that of its warm-up. `clock` gives seconds: those of the processor where other work runs beside.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    warm: dict[str, list[float]] = {name: [] for name in contestants}
    order, slow = list(contestants.items()), set[str]()
    started = time.perf_counter()
    for index in range(rounds + 1):
        values, first = inputs(index), index % max(1, len(order))
        for name, run in order[first:] + order[:first]:
            if name in slow:
                continue
            for kept in (seconds, *[warm] * again):
                synchronize(device)
                begin = clock()
                result = run(values)
                synchronize(device)
                took = clock() - begin
                if index == 0 and took > most_seconds:
                    slow.add(name)
                if index > 0 or name in slow:
                    kept[name].append(took)
                del result
        if index >= 3 and time.perf_counter() - started > budget_seconds:
            break
    return Times(seconds, warm)
