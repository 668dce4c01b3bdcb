"""Arithmetic modulo primes below 2**31 on int64 arrays, and the group of squares of a safe prime.

Every array holds residues in [0, modulus); a product of two of them fits in int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Residues = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]

_SMALL = 64


def power(base: Residues, exponent: int, modulus: int) -> Residues:
    """`base ** exponent` by a four-bit window: one product per bit and one per digit."""
    digits = f"{exponent:x}"
    powers = [np.ones_like(base), base]
    for _ in range(14):
        powers.append(powers[-1] * base % modulus)
    result = powers[int(digits[0], 16)]
    for digit in digits[1:]:
        for _ in range(4):
            result = result * result % modulus
        if digit != "0":
            result = result * powers[int(digit, 16)] % modulus
    return result


def inverse(values: Residues, modulus: int) -> Residues:
    """Inverses, with 0 for 0. One exponentiation in all, of a product of all (Montgomery's trick)."""
    flat = np.where(values == 0, 1, values).ravel()
    return np.where(values == 0, 0, _invert(flat, modulus).reshape(values.shape))


def _invert(values: Residues, modulus: int) -> Residues:
    if values.size <= _SMALL:
        return power(values, modulus - 2, modulus)
    half = (values.size + 1) // 2
    left = values[:half]
    right = np.ones_like(left)
    right[: values.size - half] = values[half:]
    both = _invert(left * right % modulus, modulus)
    return np.concatenate([both * right % modulus, both * left % modulus])[: values.size]


@dataclass(frozen=True)
class SquareGroup:
    """The squares modulo a safe prime `p = 2q + 1`: a cyclic group of prime order q, made by `generator`."""

    p: int
    q: int
    generator: int

    def exp(self, exponents: Residues) -> Residues:
        """`generator ** exponent`: two table look-ups and one product per element."""
        low, high = _exp_tables(self)
        bits = _low_bits(self)
        return np.asarray(low[exponents & ((1 << bits) - 1)] * high[exponents >> bits] % self.p)

    def log(self, squares: Residues) -> Residues:
        """The exponent of every square (baby steps, giant steps). Every element must be a non-zero square."""
        distinct, where = np.unique(squares.ravel(), return_inverse=True)
        keys, exponents = _baby_steps(self)
        giant = pow(self.generator, -keys.size, self.p)
        found = np.zeros(distinct.size, dtype=np.int64)
        pending = np.arange(distinct.size)
        rest = distinct.copy()
        for step in range(self.q // keys.size + 1):
            at = np.minimum(np.searchsorted(keys, rest), keys.size - 1)
            hit = keys[at] == rest
            found[pending[hit]] = step * keys.size + exponents[at[hit]]
            pending, rest = pending[~hit], rest[~hit] * giant % self.p
            if not pending.size:
                break
        return np.asarray(found[where].reshape(squares.shape) % self.q)


def _low_bits(group: SquareGroup) -> int:
    return (group.q.bit_length() + 1) // 2


def _powers(base: int, count: int, modulus: int) -> Residues:
    """base ** 0, 1, ... count - 1, by doubling."""
    table = np.ones(1, dtype=np.int64)
    while table.size < count:
        table = np.concatenate([table, table * pow(base, table.size, modulus) % modulus])
    return table[:count]


@lru_cache(maxsize=4)
def _exp_tables(group: SquareGroup) -> tuple[Residues, Residues]:
    bits = _low_bits(group)
    low = _powers(group.generator, 1 << bits, group.p)
    high = _powers(pow(group.generator, 1 << bits, group.p), (group.q >> bits) + 1, group.p)
    return low, high


@lru_cache(maxsize=2)
def _baby_steps(group: SquareGroup) -> tuple[Any, Any]:
    count = min(1 << 20, group.q)
    table = _powers(group.generator, count, group.p)
    order = np.argsort(table)
    return table[order], order.astype(np.int64)


def scramble(values: Residues, key: int) -> Residues:
    """A keyed 62-bit hash of each element (the finaliser of splitmix64)."""
    mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & (2**64 - 1))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
