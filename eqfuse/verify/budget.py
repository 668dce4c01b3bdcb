"""What a field cannot see: rounding errors and special values, in floating point.

The budget of a fused kernel is the unfused program's own error in the kernel's precision: both are
measured against float64, over inputs of several kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Draw = Callable[[tuple[int, ...], np.random.Generator], Array]

FACTOR = 2.0
"""A fused kernel may have this many times the unfused program's rms error."""
FLOOR = 2.0**-23
"""An rms error that always passes: a unit in the last place of float32."""
CANCELLED = 1000.0
"""Units in the last place of error from which on the unfused program itself has lost its digits to cancellation."""


def distributions() -> dict[str, Draw]:
    """Kinds of inputs, by name: each draws an array of a shape.

    normal; wide: magnitudes over five decades; close: a common value with differences of one part in
    1000; outliers: one value in fifty is 50 times as large; heavy tails: Student's t with 2 degrees.
    """
    return {
        "normal": lambda shape, rng: rng.normal(size=shape),
        "wide": lambda shape, rng: rng.choice([-1.0, 1.0], shape) * 10 ** rng.uniform(-4, 1, shape),
        "close": lambda shape, rng: 3.0 + 0.003 * rng.normal(size=shape),
        "outliers": lambda shape, rng: rng.normal(size=shape) * np.where(rng.random(shape) < 0.02, 50.0, 1.0),
        "heavy tails": lambda shape, rng: np.clip(rng.standard_t(2, shape), -200.0, 200.0),
    }


def special_sets(tensors: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """The tensors with special values put in, by name of what was put in.

    Lines run along the last dimension. One line of every tensor is zero or -inf, one element of it +inf, -inf or
    NaN, or all are so small that float32 holds them as denormals.
    """

    def line(value: float) -> dict[str, Array]:
        return {name: _with(array, value, whole=True) for name, array in tensors.items()}

    def element(value: float) -> dict[str, Array]:
        return {name: _with(array, value, whole=False) for name, array in tensors.items()}

    return {
        "zero line": line(0.0),
        "-inf line": line(-math.inf),
        "+inf": element(math.inf),
        "-inf": element(-math.inf),
        "NaN": element(math.nan),
        "denormal": {name: array * 1e-40 for name, array in tensors.items()},
    }


def _with(array: Array, value: float, *, whole: bool) -> Array:
    """A copy whose first line, or an element in the middle of it, is `value`."""
    changed = np.array(array, dtype=np.float64)
    if changed.size:
        first = changed.reshape(-1, changed.shape[-1] if changed.ndim else 1)[0]
        first[slice(None) if whole else len(first) // 2] = value
    return changed


@dataclass(frozen=True)
class Error:
    """Largest and root-mean-square difference from the reference, relative to the reference's rms."""

    max: float
    rms: float

    @classmethod
    def of(cls, reference: npt.ArrayLike, value: npt.ArrayLike) -> Error:
        """Over the positions where both are finite; special values are compared by `same_special`.

        Raises ValueError where the shapes differ.
        """
        exact, found = np.asarray(reference, np.float64), np.asarray(value, np.float64)
        if exact.shape != found.shape:
            raise ValueError(f"shapes differ: {exact.shape} and {found.shape}")
        both = np.isfinite(exact) & np.isfinite(found)
        if not both.any():
            return cls(0.0, 0.0)
        difference = np.abs(exact[both] - found[both])
        scale = math.sqrt(np.mean(np.square(exact[both]))) or 1.0
        return cls(float(difference.max()) / scale, math.sqrt(np.mean(np.square(difference))) / scale)


@dataclass(frozen=True)
class Measurement:
    """Errors of one output on one kind of inputs, and whether special values are where they belong."""

    distribution: str
    output: str
    fused: Error
    unfused: Error
    special: SpecialReport

    def cancels(self, unit: float = FLOOR) -> bool:
        """Whether the unfused program in the kernel's precision loses three digits and more (`unit`: of its last
        place): what is left of its error is the inputs' condition, not the order of operations."""
        return self.unfused.rms > CANCELLED * unit

    def within(self, factor: float, floor: float) -> bool:
        """Whether the fused error is at most `factor` times the unfused one, or below `floor`."""
        return bool(self.special) and self.fused.rms <= max(factor * self.unfused.rms, floor)


@dataclass(frozen=True)
class SpecialReport:
    """Positions whose NaN or infinity differs: (position, expected, found), the first few; and how many."""

    mismatches: tuple[tuple[tuple[int, ...], float, float], ...]
    count: int

    def __bool__(self) -> bool:
        return self.count == 0

    def __str__(self) -> str:
        if not self.count:
            return "the same special values"
        shown = (f"at {list(at)}: {found} instead of {expected}" for at, expected, found in self.mismatches)
        return f"{self.count} special values differ; " + "; ".join(shown)


def same_special(reference: npt.ArrayLike, candidate: npt.ArrayLike, shown: int = 3) -> SpecialReport:
    """Whether NaN, +inf and -inf are at the same positions. Raises ValueError where the shapes differ."""
    expected, found = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    if expected.shape != found.shape:
        raise ValueError(f"shapes differ: {expected.shape} and {found.shape}")
    differ = (np.isnan(expected) != np.isnan(found)) | (
        (np.isinf(expected) | np.isinf(found)) & (expected != found) & ~np.isnan(expected) & ~np.isnan(found)
    )
    places = np.argwhere(differ)
    return SpecialReport(tuple(_mismatches(places[:shown], expected, found)), len(places))


def _mismatches(
    places: npt.NDArray[np.int64], expected: Array, found: Array
) -> Iterator[tuple[tuple[int, ...], float, float]]:
    for place in places:
        at = tuple(int(k) for k in place)
        yield at, float(expected[at]), float(found[at])
