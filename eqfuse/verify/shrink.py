"""The smallest inputs that still tell two programs apart: fewer positions first, then simpler numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.errors import EqfuseError
from eqfuse.terms.bounds import check_selections
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import evaluate, evaluate_together
from eqfuse.terms.nodes import Program
from eqfuse.terms.promises import check_ascending
from eqfuse.terms.sizes import bind
from eqfuse.verify.certificate import Counterexample
from eqfuse.verify.comparison import CLOSE
from eqfuse.verify.sizes import AxisClasses, join_axes

MOST_RUNS, ELEMENTS = 800, 1024
"""Inputs that are tried; those of so many elements count twice, of twice as many three times."""

APART = 1e-6
"""Relative difference of two float64 results that no rounding makes."""

SIMPLE = (0.0, 1.0, -1.0, 2.0, 3.0, 0.5)
"""Numbers that are tried in place of others, the simplest first."""


@dataclass(frozen=True)
class _Inputs:
    """Tensors and scalars by name."""

    tensors: Mapping[str, Any]
    scalars: Mapping[str, Any]


_Step = Callable[[_Inputs], _Inputs | None]
"""Smaller or simpler inputs; None where a step before has made them so."""


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


def differ_in_floats(first: Program, second: Program, found: Counterexample) -> bool | None:
    """Whether float64 tells the programs apart on the inputs of a counterexample, by more than rounding usually makes; None
    where the inputs do not tell all sizes."""
    search = _Search(first, second, CLOSE)
    inputs = search.inputs_of(found)
    return search.difference(inputs) is not None if search.fit(inputs) else None


class _Search:
    def __init__(self, first: Program, second: Program, apart: float = APART) -> None:
        self._apart = apart
        self._programs = (("first", first), ("second", second))
        self._classes = AxisClasses()
        for label, program in self._programs:
            join_axes(self._classes, program, label)
        self._runs = 0

    def run(self, found: Counterexample) -> Counterexample:
        inputs = self.inputs_of(found)
        best = self.difference(inputs)
        if best is None:
            return found
        for step in (self._shorter, self._simpler):
            inputs = self._reduced(inputs, step)
        best = self.difference(inputs, counted=False)
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

    def inputs_of(self, found: Counterexample) -> _Inputs:
        names = {tensor.name for _, program in self._programs for tensor in program.tensors}
        return _Inputs(
            {name: np.asarray(value) for name, value in found.inputs.items() if name in names},
            {name: np.asarray(value).item() for name, value in found.inputs.items() if name not in names},
        )

    def fit(self, inputs: _Inputs) -> bool:
        """Whether both programs can be run on the inputs alone."""
        try:
            for _, program in self._programs:
                self._extents(program, inputs)
        except EqfuseError:
            return False
        return True

    def _reduced(self, inputs: _Inputs, steps: Callable[[_Inputs], Iterator[_Step]]) -> _Inputs:
        """The inputs after as many steps as there are that keep the programs apart: all in turn, until none does."""
        again = True
        while again:
            again = False
            for step in steps(inputs):
                smaller = step(inputs)
                if smaller is None:
                    continue
                if self._runs >= MOST_RUNS:
                    return inputs
                if self.difference(smaller) is not None:
                    inputs, again = smaller, True
        return inputs

    def difference(self, inputs: _Inputs, *, counted: bool = True) -> _Difference | None:
        """Where the programs are furthest apart, among numbers that are finite in both."""
        elements = sum(value.size for value in inputs.tensors.values())
        self._runs += 1 + elements // ELEMENTS if counted else 0
        try:
            one, two = self._outputs(inputs)
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
            if apart[at] > max(self._apart, worst):
                worst = float(apart[at])
                place = _Difference(name, tuple(map(int, at)), float(left[at]), float(right[at]))
        return place

    def _outputs(self, inputs: _Inputs) -> list[dict[str, npt.NDArray[np.float64]]]:
        """Of both programs, in float64; what they share is computed once where an axis is the same size in both."""
        first, second = (program for _, program in self._programs)
        extents = [self._extents(program, inputs) for program in (first, second)]
        joined = {**extents[0], **extents[1]}
        given, domain = (inputs.tensors, inputs.scalars), FloatDomain("float64")
        with np.errstate(all="ignore"):
            if first.integers == second.integers and all(each.items() <= joined.items() for each in extents):
                made = evaluate_together([first, second], *given, joined, domain)
            else:
                made = [
                    evaluate(program, *given, sizes, domain)
                    for program, sizes in zip((first, second), extents, strict=True)
                ]
        return [{name: np.asarray(value, np.float64) for name, value in each.items()} for each in made]

    @staticmethod
    def _extents(program: Program, inputs: _Inputs) -> dict[str, int]:
        """The sizes of its axes. Raises EqfuseError where the inputs do not fit the program."""
        names = {tensor.name for tensor in program.tensors}
        tensors = {name: value for name, value in inputs.tensors.items() if name in names}
        scalars = {name: value for name, value in inputs.scalars.items() if name in program.scalars}
        extents = bind(program, {name: value.shape for name, value in tensors.items()}, None, scalars)
        check_selections(program, extents, scalars)
        check_ascending(program, tensors)
        return extents

    # Steps ----------------------------------------------------------------------------------------

    def _shorter(self, inputs: _Inputs) -> Iterator[_Step]:
        """Without half of the positions of an axis, or without one of them; the longest axes first."""

        def without(
            places: Sequence[tuple[str, int]], least: int, gone: slice, given: _Inputs
        ) -> _Inputs | None:
            if given.tensors[places[0][0]].shape[places[0][1]] < least:
                return None
            cut = dict(given.tensors)
            for name, k in places:  # some may be of one tensor
                cut[name] = np.delete(cut[name], gone, axis=k)
            return replace(given, tensors=cut)

        dims: dict[object, list[tuple[str, int]]] = {}
        for name, value in inputs.tensors.items():
            for k in range(value.ndim):
                dims.setdefault(self._classes.find(("dim", name, k)), []).append((name, k))
        for places in sorted(dims.values(), key=lambda p: -inputs.tensors[p[0][0]].shape[p[0][1]]):
            length = inputs.tensors[places[0][0]].shape[places[0][1]]
            while length > 3:
                half = length // 2
                yield partial(without, places, length, slice(half, length))
                yield partial(without, places, length, slice(half))
                length = half
            for at in reversed(range(inputs.tensors[places[0][0]].shape[places[0][1]])):
                yield partial(without, places, max(2, at + 1), slice(at, at + 1))

    def _simpler(self, inputs: _Inputs) -> Iterator[_Step]:
        """With simpler numbers: all of a tensor, then each element, then scalars."""

        def filled(name: str, number: float, given: _Inputs) -> _Inputs | None:
            value = given.tensors[name]
            if all(_rank(element) <= _rank(number) for element in value.flat):
                return None
            return replace(given, tensors={**given.tensors, name: np.full_like(value, number)})

        def put(name: str, at: tuple[int, ...], number: float, given: _Inputs) -> _Inputs | None:
            if _rank(number) >= _rank(given.tensors[name][at]):
                return None
            changed = given.tensors[name].copy()
            changed[at] = number
            return replace(given, tensors={**given.tensors, name: changed})

        def scalar(name: str, number: float, given: _Inputs) -> _Inputs | None:
            if _rank(number) >= _rank(given.scalars[name]):
                return None
            return replace(given, scalars={**given.scalars, name: number})

        reals = [name for name, value in inputs.tensors.items() if value.dtype.kind == "f"]
        for name, number in product(reals, SIMPLE):
            yield partial(filled, name, number)
        for name in reals:
            for at, number in product(np.ndindex(inputs.tensors[name].shape), SIMPLE):
                yield partial(put, name, at, number)
        for name, number in product(inputs.scalars, SIMPLE):
            if isinstance(inputs.scalars[name], float):
                yield partial(scalar, name, number)


def _rank(number: float) -> int:
    """How simple a number is; those that are not listed come last."""
    return SIMPLE.index(number) if number in SIMPLE else len(SIMPLE)
