"""What residues cannot see of a form of a program: overflow, underflow and cancellation in float32.

Any shift is right in exact arithmetic for a softmax, and only the maximum keeps its exponentials finite.
So the mutants of `bench mutants` also run in float32, on inputs of many magnitudes, where the program as written comes out
well in float32. Only gross errors count: rounding has a budget of its own (see `budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Program
from eqfuse.verify.budget import distributions
from eqfuse.verify.certificate import Counterexample
from eqfuse.verify.inputs import InputSpec, small_integers
from eqfuse.verify.sampling import Inputs

Array = npt.NDArray[Any]
Draw = Callable[[tuple[int, ...], np.random.Generator], Array]
Run = Callable[[Inputs, Any], Mapping[str, Any]]

DRAWS = 4
"""Trials of each kind of inputs."""
GROSS = 0.05
"""Error of a stage, relative to the size of the output, that no order of operations explains."""
WELL = 0.01
"""Error of the program as written in float32 up to which a position is looked at."""
GROSS_CAST, WELL_CAST = 0.5, 0.1
"""The same where written casts round."""


class Uncast(FloatDomain):
    """Floats whose written casts round nothing. `overflowed` tells whether finite numbers made an infinity."""

    overflowed = False

    def call(self, fn: str, args: Sequence[Any]) -> Array:
        if fn in CASTS:
            return np.asarray(args[0])
        result = super().call(fn, args)
        if fn in ("add", "sub", "mul", "sq", "exp"):
            finite = np.logical_and.reduce(np.broadcast_arrays(*map(np.isfinite, args)))
            self.overflowed |= bool((finite & ~np.isfinite(result)).any())
        return result

    def reduce(self, op: str, value: Any, axis: int) -> Array:
        result = super().reduce(op, value, axis)
        finite = np.isfinite(value).all(axis)
        self.overflowed |= value.shape[axis] > 0 and bool((finite & ~np.isfinite(result)).any())
        return result


def kinds() -> dict[str, Draw]:
    """Those of the error budget, and magnitudes at which a wrong shift or scale overflows.

    large: exponentials overflow; below: all far below 0; remote: products of two are far below the least
    number that is used for an infinity; tiny: squares vanish; uneven: from tiny to huge in one row.
    """
    return distributions() | {
        "large": lambda shape, rng: 60.0 * rng.normal(size=shape),
        "below": lambda shape, rng: -1e31 * (1 + rng.random(shape)),
        "remote": lambda shape, rng: (
            rng.choice([-1.0, 1.0], (shape[0], *(1,) * (len(shape) - 1))) * 1e16 * (1 + rng.random(shape))
        ),
        "tiny": lambda shape, rng: 1e-25 * rng.normal(size=shape),
        "uneven": lambda shape, rng: rng.normal(size=shape) * 10.0 ** rng.uniform(-12, 12, shape),
    }


def draw_floats(
    program: Program,
    specs: Mapping[str, InputSpec],
    extents: Mapping[str, int],
) -> list[Inputs]:
    """`DRAWS` trials of every kind; float64 values that float32 has. Scalars of both signs."""
    rng = np.random.default_rng(0)
    return [_drawn(program, specs, draw, extents, rng) for draw in kinds().values()]


def _drawn(
    program: Program,
    specs: Mapping[str, InputSpec],
    draw: Draw,
    extents: Mapping[str, int],
    rng: np.random.Generator,
) -> Inputs:
    tensors: dict[str, Any] = {}
    for spec in specs.values():
        match spec.kind:
            case "real":
                value = draw((DRAWS, *spec.shape), rng)
                tensors[spec.name] = value.astype(np.float32).astype(np.float64)
            case "truth":
                tensors[spec.name] = rng.random(spec.shape) < 0.6
            case "integer":
                low, high = spec.values
                tensors[spec.name] = rng.integers(low, high + 1, spec.shape)
    values: dict[str, Any] = {}
    integers = small_integers(program)
    for name in program.scalars:
        given = integers.get(name)
        sign = np.where(np.arange(DRAWS) == DRAWS - 1, -1.0, 1.0)
        random = (sign * rng.uniform(0.5, 2.0, DRAWS)).astype(np.float32).astype(np.float64)
        values[name] = random if given is None else given
    return Inputs(tensors, values, extents, DRAWS)


def first_gross_error(
    reference: Run, stages: Sequence[tuple[str, Run]], kinds_of_inputs: Sequence[Inputs], *, casts: bool
) -> Counterexample | None:
    """Where a stage in float32 is far from the program in float64 although the program in float32 is not.

    Kinds at which the program itself overflows are left out. With `casts` of its own the program may be off by what
    they round, and a stage by no more than that by far: a scale that leaves the narrow type's range is seen.
    """
    for number, inputs in enumerate(kinds_of_inputs):
        narrow, domain = _narrowed(inputs), Uncast("float32")
        plain = reference(narrow, domain)
        if domain.overflowed:
            continue
        expected = reference(inputs, Uncast("float64"))
        rounded = reference(narrow, FloatDomain("float32")) if casts else plain
        for name, run in stages:
            found = run(narrow, Uncast("float32"))
            coarse = run(narrow, FloatDomain("float32")) if casts else found
            for output in expected:
                exact = expected[output]
                wrong = _far(exact, plain[output], found[output], WELL, GROSS)
                shown = found[output]
                if casts and not wrong.any():
                    wrong = _far(exact, rounded[output], coarse[output], WELL_CAST, GROSS_CAST)
                    shown = coarse[output]
                if wrong.any():
                    return _counterexample(name, output, wrong, exact, shown, inputs, number * DRAWS)
    return None


def _narrowed(inputs: Inputs) -> Inputs:
    def narrow(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value.astype(np.float32)
            if isinstance(value, np.ndarray) and value.dtype.kind == "f"
            else value
            for name, value in values.items()
        }

    return Inputs(narrow(inputs.tensors), narrow(inputs.scalars), inputs.extents, inputs.trials)


def _far(expected: Any, plain: Any, found: Any, well: float, gross: float) -> npt.NDArray[np.bool_]:
    exact, unfused, fused = (np.asarray(x, np.float64) for x in (expected, plain, found))
    with np.errstate(all="ignore"):
        magnitude = np.where(np.isfinite(exact), np.abs(exact), 0.0)
        size = magnitude.reshape(len(exact), -1).max(1).reshape(-1, *(1,) * (exact.ndim - 1))
        usable = np.isfinite(exact) & (np.abs(unfused - exact) <= well * size)
        return np.asarray(usable & ~(np.abs(fused - exact) <= gross * size))


def _counterexample(
    stage: str,
    output: str,
    wrong: npt.NDArray[np.bool_],
    expected: Any,
    found: Any,
    inputs: Inputs,
    before: int,
) -> Counterexample:
    trial, *position = map(int, np.argwhere(wrong)[0])
    at = (trial, *position)
    trials = np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))
    return Counterexample(
        f"{stage}, in float32",
        output,
        tuple(position),
        float(expected[at]),
        float(found[at]),
        dict(_of_trial(inputs, trial)),
        None,
        tuple(before + int(k) + 1 for k in trials),
    )


def _of_trial(inputs: Inputs, trial: int) -> Iterator[tuple[str, Any]]:
    for name, value in (*inputs.scalars.items(), *inputs.tensors.items()):
        real = isinstance(value, np.ndarray) and value.dtype.kind == "f"
        yield name, value[trial] if real else value
