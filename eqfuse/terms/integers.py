"""Arithmetic among integers and truth values, which is exact and the same in every domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.functions import AMONG_INTEGERS, COMPARISONS, FUNCTIONS, LOGICAL, ROUNDINGS

BITS = 64
"""Bits of an integer, as shifts have it."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def shifted_left(x: Any, by: Any) -> Any:
    """`x << by`; 0 by a count below 0 or of all bits."""
    inside = (by >= 0) & (by < BITS)
    return np.where(inside, np.left_shift(x, np.where(inside, by, 0)), 0)


def shifted_right(x: Any, by: Any) -> Any:
    """`x >> by`, the sign moved in; the sign alone by a count below 0 or of all bits."""
    return np.right_shift(x, np.where((by >= 0) & (by < BITS), by, BITS - 1))


PHILOX = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
"""Philox 4x32-10: multipliers of the counter's words, what the key's words grow by, rounds (Salmon, Moraes, Dror, Shaw, "Parallel
random numbers: as easy as 1, 2, 3", SC 2011; `std::philox4x32` of C++26)."""

_WORD = 0xFFFFFFFF


def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, ...]:
    """The four words of 32 bits that Philox 4x32-10 makes of a counter of four and a key of two; all uint64 arrays."""
    c, k = [np.asarray(word, np.uint64) for word in counter], [np.asarray(word, np.uint64) for word in key]
    mask, half = np.uint64(_WORD), np.uint64(32)
    for _ in range(ROUNDS):
        one, two = (word * np.uint64(by) for word, by in zip((c[0], c[2]), PHILOX, strict=True))
        c = [(two >> half) ^ c[1] ^ k[0], two & mask, (one >> half) ^ c[3] ^ k[1], one & mask]
        k = [(word + np.uint64(by)) & mask for word, by in zip(k, WEYL, strict=True)]
    return tuple(c)


def uniform(seed: Any, position: Any) -> npt.NDArray[np.float64]:
    """Random numbers from 0 to 1, 1 left out, that float32 has: the upper 24 bits of the first word that Philox 4x32-10 makes
    of the position as its counter and the seed as its key, each as two words of 32 bits, the lower one first."""
    words = [
        (part & np.uint64(_WORD), part >> np.uint64(32))
        for part in (as_integers(each).astype(np.uint64) for each in (position, seed))
    ]
    zero = np.uint64(0)
    with np.errstate(over="ignore"):
        first = philox((*words[0], zero, zero), words[1])[0]
    return np.asarray((first >> np.uint64(8)) * 2.0**-24, np.float64)


def _within(dtype: str) -> Callable[[Any], Any]:
    low, high = LIMITS[dtype]
    return lambda x: np.clip(x, low, high)


INTEGER_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{fn: getattr(np, FUNCTIONS[fn].numpy) for fn in AMONG_INTEGERS if FUNCTIONS[fn].numpy},
    "sign": np.sign,
    "relu": lambda x: np.maximum(x, 0),
    "lshift": shifted_left,
    "rshift": shifted_right,
    **{dtype: _within(dtype) for dtype in ROUNDINGS},
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


def in_short(number: float) -> float:
    """The number as an integer, where it is one that 64 bits hold: a term has one form for 1 and 1.0."""
    return int(number) if float(number).is_integer() and fits(int(number)) else float(number)


def dtype_of(array: npt.NDArray[Any]) -> str:
    """The dtype of the language that an array of integers or truth values has."""
    return _NAMES.get(array.dtype, "i64")


_NAMES: Mapping[np.dtype[Any], str] = {
    np.dtype(bool): "bool",
    np.dtype(np.int8): "i8",
    np.dtype(np.uint8): "u8",
    np.dtype(np.int16): "i16",
    np.dtype(np.int32): "i32",
}


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
    low, high = LIMITS["i64" if dtype == "i64" else "i32"]
    return int(number) if np.isfinite(number) else high if number > 0 else low


def stored(value: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """A result as its dtype holds it: of i32, the lowest 32 bits."""
    return as_integers(value.astype(np.int32)) if dtype == "i32" else value


def nearest(value: Any) -> npt.NDArray[np.int64]:
    """Integers as they are; of numbers that stand for integers, the nearest ones."""
    if is_exact(value):
        return as_integers(value)
    return as_integers(np.rint(np.clip(np.nan_to_num(value, nan=0.0), -(2.0**62), 2.0**62)))


def rounded(value: Any, dtype: str) -> npt.NDArray[np.int64]:
    """Reals rounded half to even to integers that a dtype of `ROUNDINGS` has; beyond its ends the end, and NaN is 0."""
    low, high = LIMITS[dtype]
    return as_integers(np.clip(np.rint(np.nan_to_num(value, nan=0.0)), low, high))


def call(fn: str, args: tuple[Any, ...]) -> npt.NDArray[Any]:
    """A function of integers and truth values to one of the two; numpy's broadcasting."""
    if fn in TRUTH_FUNCTIONS:
        return np.asarray(TRUTH_FUNCTIONS[fn](*args))
    if fn == "where":
        return np.asarray(np.where(*args))
    with np.errstate(all="ignore"):
        return np.asarray(INTEGER_FUNCTIONS[fn](*map(as_integers, args)))
