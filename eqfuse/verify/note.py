"""What floating point makes of two programs that are one function of real numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import parse
from eqfuse.verify.budget import Error, SpecialReport, distributions, same_special, special_sets
from eqfuse.verify.inputs import InputSpec, small_integers
from eqfuse.verify.joint import JointSizes

APART = 10.0
"""How many times larger an error is that is worth a word."""
FLOOR = 2.0**-20
"""Errors below this, relative to the output's rms, are rounding."""


@dataclass(frozen=True)
class Finding:
    """One kind of inputs on which the programs differ in float32: in errors against float64, or in infinities and
    NaN."""

    inputs: str
    output: str
    first: Error
    second: Error
    special: SpecialReport

    @property
    def notable(self) -> bool:
        """Whether one of the errors is far larger than the other, or special values differ."""
        low, high = sorted((self.first.rms, self.second.rms))
        return not self.special or high > max(APART * low, FLOOR)

    def __str__(self) -> str:
        if not self.special:
            return f"{self.inputs}: {self.output}, {self.special} (second program, first program)"
        return f"{self.inputs}: {self.output} has error {self.first.rms:.1e} and {self.second.rms:.1e}"


@dataclass(frozen=True)
class FloatNote:
    """The notable findings; printable."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        if not self.findings:
            return "in float32: errors and special values alike on all kinds of inputs tried"
        lines = [
            "in float32 they differ, though equal as functions of real numbers (rms errors against float64):"
        ]
        return "\n".join([*lines, *(f"  {finding}" for finding in self.findings)])


def float_note(
    left: str | Program, right: str | Program, scalars: Mapping[str, object] | None = None
) -> FloatNote:
    """Runs two programs with the same outputs in float32, on the distributions and special values of `budget`.

    Errors are those against the first program in float64.
    """
    first = parse(left) if isinstance(left, str) else left
    second = parse(right) if isinstance(right, str) else right
    given = {**small_integers(first, second), **(scalars or {})}
    sizes = JointSizes.of(first, second, given)
    rng = np.random.default_rng(0)
    numbers = {
        name: given.get(name, float(rng.uniform(0.5, 2.0))) for name in (*first.scalars, *second.scalars)
    }
    findings: list[Finding] = []
    for kind, tensors in _input_sets(sizes.specs, rng).items():
        exact = _run(first, tensors, numbers, sizes.left, "float64")
        one = _run(first, tensors, numbers, sizes.left, "float32")
        two = _run(second, tensors, numbers, sizes.right, "float32")
        for name, expected in exact.items():
            findings.append(
                Finding(
                    kind,
                    name,
                    Error.of(expected, one[name]),
                    Error.of(expected, two[name]),
                    same_special(one[name], two[name], shown=1),
                )
            )
    return FloatNote(tuple(finding for finding in findings if finding.notable))


def _input_sets(specs: Mapping[str, InputSpec], rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    real = {name: spec.shape for name, spec in specs.items() if spec.kind == "real"}
    exact: dict[str, Any] = {}
    for name, spec in specs.items():
        if spec.kind == "truth":
            exact[name] = rng.random(spec.shape) < 0.6
        elif spec.kind == "integer":
            exact[name] = spec.ordered(rng.integers(*spec.values, spec.shape, endpoint=True))
    kinds = {
        kind: {name: draw(shape, rng) for name, shape in real.items()}
        for kind, draw in distributions().items()
    }
    kinds["large"] = {name: 100.0 * array for name, array in kinds["normal"].items()}
    kinds |= special_sets(kinds["normal"])
    return {kind: {**_single(tensors), **exact} for kind, tensors in kinds.items()}


def _single(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Rounded to float32: all runs read the same numbers."""
    return {name: array.astype(np.float32).astype(np.float64) for name, array in tensors.items()}


def _run(
    program: Program,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
    extents: Mapping[str, int],
    precision: Literal["float64", "float32"],
) -> Mapping[str, Any]:
    kind = np.dtype(precision)
    typed = {name: a.astype(kind) if a.dtype.kind == "f" else a for name, a in tensors.items()}
    with np.errstate(all="ignore"):
        found = evaluate(program, typed, scalars, extents, FloatDomain(precision))
    return {name: np.asarray(array).astype(np.float64) for name, array in found.items()}
