"""How far a real shadow may be from the number it stands for: bounds of rounding errors that follow a computation.

`None` stands for 0 everywhere: inputs and constants are the floats that they are. Each function gives the error of its
result from the values and errors of its arguments, to first order where that bounds it, with one unit of the last place
for the operation itself (Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapters 2 and 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from eqfuse.verify.field.modular import Reals, Truths

UNIT = 2.0**-52
"""Relative error of an operation, twice that of a correctly rounded one: functions of numpy are good to an ulp."""

TIGHT = 1e-12
"""Two numbers without residues that errors below this, relative to them, leave open are equal: inputs are further apart."""

VANISHED = 1e-200
"""More than any number that is 0 in float64 and not in reals. An error that is none is left by what it is multiplied or
divided by, however small."""

Error = Reals | None


def _of(error: Error) -> Any:
    return 0.0 if error is None else error


def of_sum(result: Reals, x: Error, y: Error) -> Reals:
    spread: Reals = UNIT * np.abs(result) + _of(x) + _of(y)
    return spread


def of_product(result: Reals, x: Reals, y: Reals, ex: Error, ey: Error) -> Reals:
    spread: Reals = UNIT * np.abs(result)
    if ex is not None:
        spread = spread + _times(ex, np.abs(y) + _of(ey))
    return spread if ey is None else spread + _times(ey, np.abs(x))


def _times(error: Reals, size: Reals) -> Reals:
    """0 times a number of which nothing is known is 0, and what is no 0 leaves none."""
    product = error * size
    lost = (product == 0) & (error > 0) & (size > 0)
    return np.where(np.isnan(product), 0.0, np.where(lost, VANISHED, product))


def of_quotient(result: Reals, y: Reals, ex: Error, ey: Error) -> Reals:
    spread: Reals = UNIT * np.abs(result)
    if ex is None and ey is None:
        return spread
    room = np.maximum(np.abs(y) - _of(ey), 0.0)
    spread += (_of(ex) + np.abs(result) * _of(ey)) / room
    if ex is not None:
        spread = np.where((spread == 0) & (ex > 0) & np.isfinite(room), VANISHED, spread)
    return np.where(np.isnan(spread), np.inf, spread)  # 0 over what may be 0


def of_line(values: Reals, error: Error, axis: int) -> Reals:
    """Of a sum along an axis."""
    with np.errstate(all="ignore"):
        spread = np.asarray(UNIT * values.shape[axis] * np.abs(values).sum(axis))
        return spread if error is None else spread + error.sum(axis)


def of_function(function: Callable[[Any], Any], result: Reals, x: Reals, error: Error) -> Reals:
    """Of a function that grows or falls, and of those that hardly bend within an error. Of an infinity it is exact, as that
    is."""
    spread: Reals = UNIT * np.abs(result)
    if error is not None:
        sides = (np.abs(function(x + sign * error) - result) for sign in (1.0, -1.0))
        spread = spread + np.nan_to_num(np.maximum(*sides), nan=np.inf)
    return np.where(np.isinf(x), 0.0, spread)


def chosen(condition: Truths, x: Error, y: Error) -> Reals:
    found: Reals = np.where(condition, _of(x), _of(y))
    return found


def unclear(x: Reals, y: Any, ex: Error, ey: Error = None) -> Truths | None:
    """Where errors leave open which of two numbers is the greater; None where there are no errors."""
    if ex is None and ey is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        # An infinity that is no overflow, which is noted where it is made, is exact.
        found: Truths = (np.abs(x - y) <= _of(ex) + _of(ey)) & np.isfinite(x) & np.isfinite(y)
    return found


def equal(x: Reals, y: Reals, ex: Error, ey: Error) -> Truths:
    """Whether two finite numbers are as near as their errors, and these are small."""
    reach = _of(ex) + _of(ey)
    with np.errstate(invalid="ignore", over="ignore"):
        found: Truths = (np.abs(x - y) <= reach) & (reach <= TIGHT * np.maximum(np.abs(x), np.abs(y)))
    return found & np.isfinite(x) & np.isfinite(y)
