"""Arithmetic among integers and truth values, which is exact and the same in every domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.terms.functions import AMONG_INTEGERS, COMPARISONS, FUNCTIONS, LOGICAL

INTEGER_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{fn: getattr(np, FUNCTIONS[fn].numpy) for fn in AMONG_INTEGERS if FUNCTIONS[fn].numpy},
    "sign": np.sign,
    "relu": lambda x: np.maximum(x, 0),
}
"""Functions whose result is an integer where all their values are."""

TRUTH_FUNCTIONS: Mapping[str, np.ufunc] = {
    fn: getattr(np, FUNCTIONS[fn].numpy) for fn in (*COMPARISONS, *LOGICAL)
}

FOLDS: Mapping[str, tuple[np.ufunc, float]] = {
    "sum": (np.add, 0),
    "prod": (np.multiply, 1),
    "max": (np.maximum, -np.inf),
    "min": (np.minimum, np.inf),
}
"""Reductions of integers and their identities (see `identity`)."""


LONGEST = 2**48
"""Positions that an axis may have: no memory holds more."""


def fits(number: float) -> bool:
    """Whether a number is none of the integers that 64 bits do not hold."""
    return not isinstance(number, int) or -(2**63) <= number < 2**63


def is_exact(value: Any) -> bool:
    """Whether an interpreter's value is integers or truth values, rather than reals of a domain."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "iub"


def as_integers(value: Any) -> npt.NDArray[np.int64]:
    """Integers or truth values as int64."""
    return np.asarray(value).astype(np.int64)


def fold(op: str, value: Any, dimension: int, dtype: str = "i64") -> npt.NDArray[np.int64]:
    """A reduction of integers, or of truth values as 0 and 1, over one dimension. `dtype` is the one whose identity
    a dimension without positions gives."""
    function, number = FOLDS[op]
    return np.asarray(function.reduce(as_integers(value), axis=dimension, initial=identity(number, dtype)))


def identity(number: float, dtype: str) -> int:
    """The identity of a reduction in an integer dtype: an infinity is the last integer that the dtype has."""
    bounds = np.iinfo(np.int64 if dtype == "i64" else np.int32)
    return int(number) if np.isfinite(number) else int(bounds.max if number > 0 else bounds.min)


def call(fn: str, args: tuple[Any, ...]) -> npt.NDArray[Any]:
    """A function of integers and truth values to one of the two; numpy's broadcasting."""
    with np.errstate(all="ignore"):
        if fn in TRUTH_FUNCTIONS:
            return np.asarray(TRUTH_FUNCTIONS[fn](*args))
        if fn == "where":
            return np.asarray(np.where(*args))
        return np.asarray(INTEGER_FUNCTIONS[fn](*map(as_integers, args)))
