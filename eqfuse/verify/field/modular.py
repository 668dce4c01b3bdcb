"""Arithmetic modulo primes below 2**31 on int64 arrays, and the subgroup of large prime order modulo such a prime.

Every array holds residues in [0, modulus); a product of two of them fits in int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

Residues = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]

_SMALL = 16
"""Inverses that are taken one by one."""
_FEW = 8
"""So are so many powers with a large exponent."""
_HALF_BITS = 16
_LOW_HALF = (1 << _HALF_BITS) - 1
_EXACT_TERMS = 16
"""Products of 31 and 16 bits whose sum is below 2**51: exact in float64, and so is the floor of its quotient by
a modulus of 31 bits."""


def power(base: Residues, exponent: int, modulus: int) -> Residues:
    """`base ** exponent` by a four-bit window: one product per bit and one per digit."""
    if exponent == 2:
        return base * base % modulus
    if base.size <= _FEW:
        found = [pow(value, exponent, modulus) for value in base.ravel().tolist()]
        return np.array(found, dtype=np.int64).reshape(base.shape)
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
    """Inverses, with 0 for 0: those of a few products of all, taken apart (Montgomery's trick)."""
    flat = np.where(values == 0, 1, values).ravel()
    return np.where(values == 0, 0, _invert(flat, modulus).reshape(values.shape))


def _invert(values: Residues, modulus: int) -> Residues:
    if values.size <= _SMALL:
        return np.array([pow(value, -1, modulus) for value in values.tolist()], dtype=np.int64)
    half = (values.size + 1) // 2
    left = values[:half]
    right = np.ones_like(left)
    right[: values.size - half] = values[half:]
    both = _invert(left * right % modulus, modulus)
    return np.concatenate([both * right % modulus, both * left % modulus])[: values.size]


def matmul(left: Residues, right: Residues, modulus: int) -> Residues:
    """Products of stacks of matrices, in float64: each half of the right factors makes exact sums."""
    count = left.shape[-1]
    if count > _EXACT_TERMS:
        parts = [
            matmul(left[..., at : at + _EXACT_TERMS], right[..., at : at + _EXACT_TERMS, :], modulus)
            for at in range(0, count, _EXACT_TERMS)
        ]
        return np.asarray(sum(parts) % modulus)
    factors = left.astype(np.float64)
    sums = _remainder(factors @ (right >> _HALF_BITS).astype(np.float64), modulus)
    sums *= 1 << _HALF_BITS
    sums += factors @ (right & _LOW_HALF).astype(np.float64)
    return _remainder(sums, modulus).astype(np.int64)


def _remainder(integers: Reals, modulus: int) -> Reals:
    """Of integers below 2**52."""
    multiples = np.floor(integers / modulus)
    multiples *= modulus
    return integers - multiples


@dataclass(frozen=True)
class PowerGroup:
    """The k-th powers modulo a prime `p = kq + 1`: a cyclic group of prime order q, made by `generator`. Of a safe prime,
    k = 2, they are the squares."""

    p: int
    q: int
    generator: int

    @property
    def cofactor(self) -> int:
        """k."""
        return (self.p - 1) // self.q

    def powers(self, roots: Residues) -> Residues:
        """The elements of the group that are the k-th powers of residues."""
        return power(roots, self.cofactor, self.p)

    def exp(self, exponents: Residues) -> Residues:
        """`generator ** exponent`: two table look-ups and one product per element."""
        low, high = _exp_tables(self)
        bits = _low_bits(self)
        return np.asarray(low[exponents & ((1 << bits) - 1)] * high[exponents >> bits] % self.p)

    def log(self, values: Residues) -> Residues:
        """The exponent of every element of the group, and of other residues the k-th part of that of their k-th power: a
        homomorphism of all that are not 0, which takes -1 to 0. Each value is up to sign a fraction of two numbers of half its
        length, whose logarithms are in a table (index calculus)."""
        distinct, where = np.unique(values.ravel(), return_inverse=True)
        table = _small_logs(self)
        above, below = _fractions(distinct, self.p)
        return np.asarray(((table[above] - table[below]) % self.q)[where].reshape(values.shape))


def _low_bits(group: PowerGroup) -> int:
    return (group.q.bit_length() + 1) // 2


def _powers(base: int, count: int, modulus: int) -> Residues:
    """base ** 0, 1, ... count - 1, by doubling."""
    table = np.ones(1, dtype=np.int64)
    while table.size < count:
        table = np.concatenate([table, table * pow(base, table.size, modulus) % modulus])
    return table[:count]


@lru_cache(maxsize=4)
def _exp_tables(group: PowerGroup) -> tuple[Residues, Residues]:
    bits = _low_bits(group)
    low = _powers(group.generator, 1 << bits, group.p)
    high = _powers(pow(group.generator, 1 << bits, group.p), (group.q >> bits) + 1, group.p)
    return low, high


_FIRST_PRIMES, _MORE_PRIMES = 64, 1024
"""Logarithms of primes below the first are searched for; those give the ones below the second, and those all."""
_BABY_STEPS = 1 << 17
_SHIFT = 4099
_AT_ONCE = 1 << 12
_UNKNOWN = -1


@lru_cache(maxsize=2)
def _small_logs(group: PowerGroup) -> Residues:
    """For 0 < n <= sqrt(p) + 2 the logarithm of n (see `PowerGroup.log`)."""
    size = isqrt(group.p) + 3
    factor = _least_factors(size)
    primes = np.flatnonzero(factor == np.arange(size))[2:]
    logs = np.full(size, _UNKNOWN, dtype=np.int64)
    logs[1] = 0
    first = primes[primes < _FIRST_PRIMES]
    logs[first] = _searched_logs(group, group.powers(first)) * pow(group.cofactor, -1, group.q) % group.q
    for limit in (_MORE_PRIMES, size):
        _fill_products(logs, factor, group.q)
        _relate(group, primes[primes < limit], logs)
    _fill_products(logs, factor, group.q)
    return logs


def _least_factors(size: int) -> Residues:
    """The smallest prime factor of every number below `size`; 0 and 1 are their own."""
    factor = np.arange(size)
    for n in range(isqrt(size), 1, -1):
        factor[n * n :: n] = np.minimum(factor[n * n :: n], n)
    return factor


def _fill_products(logs: Residues, factor: Residues, modulus: int) -> None:
    """Adds the logarithms of numbers all of whose prime factors have one."""
    while True:
        rest = np.flatnonzero(logs == _UNKNOWN)[1:]
        prime, other = logs[factor[rest]], logs[rest // factor[rest]]
        known = (prime != _UNKNOWN) & (other != _UNKNOWN)
        if not known.any():
            return
        logs[rest[known]] = (prime + other)[known] % modulus


def _relate(group: PowerGroup, primes: Residues, logs: Residues) -> None:
    """Adds the logarithms of all `primes`: each times a power of the generator is soon a fraction of two
    numbers whose logarithms are known."""
    pending, tried = primes[logs[primes] == _UNKNOWN], 0
    while pending.size:
        count = max(4, _AT_ONCE // pending.size)
        shifts = _SHIFT * np.arange(tried, tried + count)
        powers = np.asarray([pow(group.generator, int(shift), group.p) for shift in shifts])
        above, below = (logs[part] for part in _fractions(pending[:, None] * powers % group.p, group.p))
        found = (above != _UNKNOWN) & (below != _UNKNOWN)
        at = found.argmax(1)
        exponent = np.take_along_axis(above - below, at[:, None], 1)[:, 0] - shifts[at]
        solved = found.any(1)
        logs[pending[solved]] = exponent[solved] % group.q
        pending, tried = pending[~solved], tried + count


def _fractions(values: Residues, p: int) -> tuple[Residues, Residues]:
    """a, b <= sqrt(p) + 2 with values = a / b or -a / b modulo p (Euclid's algorithm, stopped half way)."""
    bound = isqrt(p)
    rest = values.ravel()
    above, below = np.empty_like(rest), np.empty_like(rest)
    at = np.arange(rest.size)
    before, count_before, count = np.full_like(rest, p), np.zeros_like(rest), np.ones_like(rest)
    while at.size:
        done = rest <= bound
        above[at[done]], below[at[done]] = rest[done], np.abs(count[done])
        at, before, rest, count_before, count = (x[~done] for x in (at, before, rest, count_before, count))
        times = before // np.maximum(rest, 1)
        before, rest = rest, before - times * rest
        count_before, count = count, count_before - times * count
    return above.reshape(values.shape), below.reshape(values.shape)


def _searched_logs(group: PowerGroup, elements: Residues) -> Residues:
    """Logarithms of a few elements by baby steps and giant steps."""
    baby = _powers(group.generator, min(_BABY_STEPS, group.q), group.p)
    order = np.argsort(baby)
    keys = baby[order]
    giant = _powers(pow(group.generator, -keys.size, group.p), group.q // keys.size + 1, group.p)
    found = np.empty_like(elements)
    for n, element in enumerate(elements):
        rest = element * giant % group.p
        at = np.minimum(np.searchsorted(keys, rest), keys.size - 1)
        step = int(np.argmax(keys[at] == rest))
        found[n] = (step * keys.size + order[at[step]]) % group.q
    return found


def scramble(values: Residues, key: int) -> Residues:
    """A keyed 62-bit hash of each element (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):  # numpy says so of one number, and of no array
        mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & (2**64 - 1))
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
