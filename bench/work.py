"""What a predicted cost is made of, by the device constant that it is divided by: data for fitting constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eqfuse.extract.cost import overlapped, seconds_alone
from eqfuse.extract.devices import Device
from eqfuse.extract.shape import Shape
from eqfuse.extract.strain import FACTORS, causes
from eqfuse.loops.nodes import Kernel
from eqfuse.loops.plan import KernelConfig, Term

RATES = ("bandwidth", "cache_bandwidth", "matrix_half", "matrix_float", "elementwise", "special")
"""Constants that work is divided by; `step` multiplies it."""

FIXED = "fixed"
"""Seconds that no constant changes."""

Work = Mapping[str, Any]
"""Of one kernel: `terms` are seconds by term and constant, `strain` how often each factor of strain.py applies."""


def constants_of(device: Device) -> dict[str, float]:
    """The constants that predictions are made with."""
    return {name: getattr(device, name) for name in (*RATES, "step", "launch")} | dict(FACTORS)


def work_of(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> Work:
    """The work of one kernel on a GPU. A term is a sum of quotients by constants: what is missing of it with one
    of them infinite is that one's."""
    whole = seconds_alone(kernel, config, shape, device)
    absent: dict[str, Any] = {**dict.fromkeys(RATES, math.inf), "step": 0.0}
    without = {
        name: seconds_alone(kernel, config, shape, replace(device, **{name: absent[name]})) for name in absent
    }
    terms: dict[str, dict[str, float]] = {}
    for name, seconds in whole.items():
        parts = {constant: seconds - rest[name] for constant, rest in without.items()}
        parts[FIXED] = seconds - sum(parts.values())
        terms[name] = {c: float(f"{part:.5g}") for c, part in parts.items() if part > 1e-6 * seconds}
    blocks = config.sizes(shape.extents)
    return {"terms": terms, "strain": causes(kernel, config, blocks, shape, device)}


def predicted(work: Work, times: Mapping[str, float], launch: float) -> float:
    """The seconds of a kernel where constants and factors are `times` as large as those that its work was
    recorded with; the cost model's own sum."""
    terms = [
        Term(name, sum(seconds * _scale(constant, times) for constant, seconds in parts.items()))
        for name, parts in work["terms"].items()
    ]
    factors = ((FACTORS[name] * times.get(name, 1.0)) ** often for name, often in work["strain"].items())
    return sum(term.seconds for term in overlapped(terms, math.prod(factors))) + launch


def _scale(constant: str, times: Mapping[str, float]) -> float:
    ratio = times.get(constant, 1.0)
    return 1 / ratio if constant in RATES else ratio
