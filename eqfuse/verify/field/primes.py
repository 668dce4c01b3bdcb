"""The primes of fields, and numbers modulo them."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np

P = 1932740039
"""The largest safe prime below 2**31 modulo which 2, 3, 5, ... 61 are all squares, so that the constants and
sizes that people write have roots, as positive numbers do. -1 is a non-square."""
Q = (P - 1) // 2

CIRCLE_P, CIRCLE_Q = 1525921609, 63580067
"""The largest primes p = 24 q + 1 below 2**31 for which 2, 3, 5 and 7 are in the group of order q. -1 has a root there, so that
the points of a circle, cos + i sin, are elements of the field. Below 24, 2 or 3 is never in that group."""


@lru_cache(maxsize=4)
def root_of_minus_one(p: int) -> int:
    """An i with i * i = -1, modulo a prime that is 1 modulo 4."""
    found = (pow(base, (p - 1) // 4, p) for base in range(2, p))
    return next(i for i in found if i * i % p == p - 1)


@lru_cache(maxsize=4096)
def rational(number: float, modulus: int) -> int:
    """A number as its shortest decimal modulo a prime (0.1 is 1/10); 0 for infinities and NaN."""
    if not np.isfinite(number):
        return 0
    exact = Fraction(repr(float(number)))
    return exact.numerator * pow(exact.denominator, -1, modulus) % modulus
