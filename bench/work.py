"""What a predicted cost is made of, by the device constant that it is divided by: data for fitting constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eqfuse.extract.cost import KernelCost, overlapped
from eqfuse.extract.devices import Device
from eqfuse.extract.residuals import SLOWDOWNS, Residuals
from eqfuse.extract.resources import slowdowns
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Kernel
from eqfuse.loops.plan import KernelConfig

RATES = ("bandwidth", "cache_bandwidth", "matrix_half", "matrix_float", "elementwise", "special")
"""Constants that work is divided by; `step` multiplies it."""

FIXED = "fixed"
"""Seconds that no constant changes."""

Work = Mapping[str, Any]
"""Of one kernel: `terms` are seconds by term and constant, `slowdowns` the power of each factor that applies."""


def constants_of(device: Device) -> dict[str, float]:
    """The constants that predictions are made with."""
    return {name: getattr(device, name) for name in (*RATES, "step", "launch")} | dict(
        device.residuals.slowdowns
    )


def work_of(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> Work:
    """The work of one kernel on a GPU. A term is a sum of quotients by constants: what is missing of it with one
    of them infinite is that one's."""

    def alone(**constants: float) -> dict[str, float]:
        return KernelCost(kernel, shape, replace(device, **constants)).alone(config)  # type: ignore[arg-type]

    whole = alone()
    absent: dict[str, float] = {**dict.fromkeys(RATES, math.inf), "step": 0.0}
    without = {name: alone(**{name: value}) for name, value in absent.items()}
    terms: dict[str, dict[str, float]] = {}
    for name, seconds in whole.items():
        parts = {constant: seconds - rest[name] for constant, rest in without.items()}
        parts[FIXED] = seconds - sum(parts.values())
        terms[name] = {c: float(f"{part:.5g}") for c, part in parts.items() if part > 1e-6 * seconds}
    return {"terms": terms, "slowdowns": slowdowns(kernel, config, shape, device)}


def predicted(work: Work, times: Mapping[str, float], launch: float) -> float:
    """The seconds of a kernel where constants and factors are `times` as large as those that its work was
    recorded with; the cost model's own sum."""
    terms = {
        name: sum(seconds * _scale(constant, times) for constant, seconds in parts.items())
        for name, parts in work["terms"].items()
    }
    factors = ((SLOWDOWNS[name] * times.get(name, 1.0)) ** power for name, power in work["slowdowns"].items())
    return sum(overlapped(terms, math.prod(factors), Residuals.hidden).values()) + launch


def _scale(constant: str, times: Mapping[str, float]) -> float:
    ratio = times.get(constant, 1.0)
    return 1 / ratio if constant in RATES else ratio
