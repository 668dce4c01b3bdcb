"""The smallest inputs that still tell two programs apart: fewer positions first, then simpler numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eqfuse.errors import EqfuseError
from eqfuse.terms.interpreter import reference
from eqfuse.terms.nodes import Program
from eqfuse.verify.certificate import Counterexample
from eqfuse.verify.sizes import AxisClasses, join_axes

MOST_RUNS = 800
"""Inputs that are tried."""

APART = 1e-6
"""Relative difference of two float64 results that no rounding makes."""

SIMPLE = (0.0, 1.0, -1.0, 2.0, 3.0, 0.5)
"""Numbers that are tried in place of others, the simplest first."""


@dataclass(frozen=True)
class _Inputs:
    """Tensors and scalars by name."""

    tensors: Mapping[str, Any]
    scalars: Mapping[str, Any]


@dataclass(frozen=True)
class _Difference:
    output: str
    position: tuple[int, ...]
    first: float
    second: float


def smallest(first: Program, second: Program, found: Counterexample) -> Counterexample:
    """A counterexample of as few positions and as simple numbers as are found; the same one where the programs do not
    differ in float64 by more than rounding."""
    return _Search(first, second).run(found)


class _Search:
    def __init__(self, first: Program, second: Program) -> None:
        self._programs = (("first", first), ("second", second))
        self._classes = AxisClasses()
        for label, program in self._programs:
            join_axes(self._classes, program, label)
        self._runs = 0

    def run(self, found: Counterexample) -> Counterexample:
        names = {tensor.name for _, program in self._programs for tensor in program.tensors}
        inputs = _Inputs(
            {name: np.asarray(value) for name, value in found.inputs.items() if name in names},
            {name: np.asarray(value).item() for name, value in found.inputs.items() if name not in names},
        )
        best = self._difference(inputs)
        if best is None:
            return found
        for step in (self._shorter, self._simpler):
            inputs = self._reduced(inputs, step)
        best = self._difference(inputs, counted=False)
        assert best is not None  # every step has kept it
        given = {**inputs.tensors, **inputs.scalars}
        return replace(
            found,
            output=best.output,
            position=best.position,
            expected=best.first,
            found=best.second,
            inputs=given,
            residues=None,
        )

    def _reduced(self, inputs: _Inputs, step: Callable[[_Inputs], Iterator[_Inputs]]) -> _Inputs:
        """The inputs after as many steps as there are that keep the programs apart."""
        again = True
        while again:
            again = False
            for smaller in step(inputs):
                if self._runs >= MOST_RUNS:
                    return inputs
                if self._difference(smaller) is not None:
                    inputs, again = smaller, True
                    break
        return inputs

    def _difference(self, inputs: _Inputs, *, counted: bool = True) -> _Difference | None:
        """Where the programs are furthest apart, among numbers that are finite in both."""
        self._runs += counted
        try:
            one, two = (self._outputs(program, inputs) for _, program in self._programs)
        except EqfuseError:  # a read outside of its tensor, or a size of 0 that a program does not allow
            return None
        worst, place = 0.0, None
        for name, left in one.items():
            right = two[name]
            if left.shape != right.shape or not left.size:
                continue
            with np.errstate(invalid="ignore"):
                apart = np.abs(left - right) / np.maximum(1.0, np.maximum(np.abs(left), np.abs(right)))
            apart = np.where(np.isfinite(left) & np.isfinite(right), apart, 0.0)
            at = np.unravel_index(int(np.argmax(apart)), apart.shape)
            if apart[at] > max(APART, worst):
                worst = float(apart[at])
                place = _Difference(name, tuple(map(int, at)), float(left[at]), float(right[at]))
        return place

    def _outputs(self, program: Program, inputs: _Inputs) -> dict[str, Any]:
        names = {tensor.name for tensor in program.tensors}
        tensors = {name: value for name, value in inputs.tensors.items() if name in names}
        scalars = {name: value for name, value in inputs.scalars.items() if name in program.scalars}
        with np.errstate(all="ignore"):
            made = reference(program, tensors, scalars)
        made = made if isinstance(made, tuple) else (made,)
        return {
            output.name: np.asarray(value, dtype=np.float64)
            for output, value in zip(program.outputs, made, strict=True)
        }

    # Steps ----------------------------------------------------------------------------------------

    def _shorter(self, inputs: _Inputs) -> Iterator[_Inputs]:
        """Without half of the positions of an axis, or without one of them; the longest axes first."""
        dims: dict[object, list[tuple[str, int]]] = {}
        for name, value in inputs.tensors.items():
            for k in range(value.ndim):
                dims.setdefault(self._classes.find(("dim", name, k)), []).append((name, k))
        for places in sorted(dims.values(), key=lambda p: -inputs.tensors[p[0][0]].shape[p[0][1]]):
            length = inputs.tensors[places[0][0]].shape[places[0][1]]
            half = length // 2
            halves = [list(range(half, length)), list(range(half))] if length > 3 else []
            for gone in (*halves, *([at] for at in reversed(range(length)))):
                if length > 1:
                    cut = dict(inputs.tensors)
                    for name, k in places:
                        cut[name] = np.delete(cut[name], gone, axis=k)
                    yield replace(inputs, tensors=cut)

    def _simpler(self, inputs: _Inputs) -> Iterator[_Inputs]:
        """With simpler numbers: all of a tensor, then each element, then scalars."""
        for name, value in inputs.tensors.items():
            for number in SIMPLE if value.dtype.kind == "f" else ():
                if any(_rank(element) > _rank(number) for element in value.flat):
                    yield replace(inputs, tensors={**inputs.tensors, name: np.full_like(value, number)})
        for name, value in inputs.tensors.items():
            for at in np.ndindex(value.shape) if value.dtype.kind == "f" else ():
                for number in SIMPLE:
                    if _rank(number) < _rank(value[at]):
                        changed = value.copy()
                        changed[at] = number
                        yield replace(inputs, tensors={**inputs.tensors, name: changed})
        for name, scalar in inputs.scalars.items():
            for number in SIMPLE if isinstance(scalar, float) else ():
                if _rank(number) < _rank(scalar):
                    yield replace(inputs, scalars={**inputs.scalars, name: number})


def _rank(number: float) -> int:
    """How simple a number is; those that are not listed come last."""
    return SIMPLE.index(number) if number in SIMPLE else len(SIMPLE)
