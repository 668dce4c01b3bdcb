"""Exponentials, logarithms, roots and points of a circle: homomorphisms of a field's groups."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from eqfuse.verify.field import rounding
from eqfuse.verify.field.array import SIGNED, TWISTED, UNDEFINED, FieldArray, joined_marks, marked, whole_term
from eqfuse.verify.field.exponent_sums import Split
from eqfuse.verify.field.modular import Reals, Residues, inverse, power, scramble
from eqfuse.verify.field.rounding import UNIT, VANISHED
from eqfuse.verify.field.uninterpreted import Uninterpreted

_SATURATED = 300.0
"""From here on, and long before, tanh is 1 in float64; exp of twice as much is a number."""

_FLAT = 8.0
"""From here on tanh is 1 but for less than 3e-7."""

HASHED_EXP = "exp of a value without exponent residue"
HASHED_POINT = "sin, cos of a value without exponent residue"
"""What `opaque` has where an exponential or a point is that of the terms of a sum as it is written: sums that are equal,
written in other terms, may have others."""


def _root(x: Any) -> Any:
    return np.sqrt(np.maximum(x, 0.0))


def _steep_tanh(x: Reals) -> Reals:
    """tanh, which goes on growing where it is nearly 1 or -1: in floats numbers would be equal there that are not, or in an
    order that rounding decides."""
    rest = (1 - np.tanh(_FLAT)) * _FLAT
    size = np.maximum(np.abs(x), _FLAT)
    return np.where(np.abs(x) <= _FLAT, np.tanh(x), np.sign(x) * (1 - rest / size))


def _steep_sigmoid(x: Reals) -> Reals:
    """The logistic function that goes with it."""
    return np.where(x > 2 * _FLAT, 0.5 * (1 + _steep_tanh(0.5 * x)), 1 / (1 + np.exp(-x)))


class Homomorphisms(Uninterpreted):
    """Functions that turn sums to products, products to sums, or keep products."""

    def _exp(self, x: FieldArray) -> FieldArray:
        shadow = np.exp(x.shadow)
        if x.q is not None:
            p: Residues | None = self._power_of_omega(x.q)
        elif x.split is not None:
            p = self._exponential(x.split)
        else:
            p = None if x.p is None else self._positive("exp", x.p)
        if x.q is None:
            self.opaque.add(HASHED_EXP)
        if p is not None:
            p = np.where(np.isneginf(x.shadow), 0, p)
        signed = ~x.lacks(SIGNED)
        result = FieldArray(p, None, shadow, marked(TWISTED, signed), rooted=bool(signed.any()))
        if self.careful:
            result.error = rounding.of_function(np.exp, shadow, x.shadow, x.error)
        self._keep_vanished(result, (shadow == 0) & np.isfinite(x.shadow))
        return self._settle(result, x)

    def _exp2(self, x: FieldArray) -> FieldArray:
        rest = (1,) * (len(x.shape) - 1)
        return self._exp(self._mul(x, self.irrational("ln_2", (x.shape[0], *rest))))

    def _power_of_omega(self, exponents: Residues) -> Residues:
        return self.group.exp(exponents * self._log_omega % self.q)

    def _exponential(self, split: Split) -> Residues:
        above = [self._positive("exp", part) for part in split.plus]
        if split.known is not None:
            above.append(self._power_of_omega(split.known.q))
        below = [self._positive("exp", part) for part in split.minus]
        one = np.ones((), dtype=np.int64)
        over, under = (reduce(lambda x, y: x * y % self.p, parts, one) for parts in (above, below))
        return over * inverse(under, self.p) % self.p

    def _positive(self, fn: str, residues: Residues) -> Residues:
        """An uninterpreted function into the squares, 1 at 0."""
        root = scramble(residues, self._key(fn)) % (self.p - 1) + 1
        return np.where(residues == 0, 1, self.group.powers(root))

    def _log(self, x: FieldArray) -> FieldArray:
        if x.p is None:
            return self._opaque("log", [x])
        positive = (x.shadow > 0) & np.isfinite(x.shadow)
        straight = power(x.p, self.q, self.p) == 1
        usable = positive & (x.p != 0)
        exponents = self.group.log(np.where(usable, x.p, 1))
        q = exponents * pow(self._log_omega, -1, self.q) % self.q
        marks = joined_marks(marked(SIGNED, positive & ~straight), marked(UNDEFINED, positive & ~usable))
        result = FieldArray(None, q, np.log(x.shadow), marks)
        if self.careful:
            result.error = rounding.of_function(np.log, result.shadow, x.shadow, x.error)
            self._mark_open(result, self._unclear(x))
        return self._settle(result, x, poles=~positive)

    def _sqrt(self, x: FieldArray) -> FieldArray:
        if x.p is None:
            return self._opaque("sqrt", [x])
        root = power(x.p, (self.q + 1) // 2, self.p)
        # A variance of equal values may be -1e-17 in float64 where it is exactly 0.
        real = np.where((x.p == 0) & np.isfinite(x.shadow), np.maximum(x.shadow, 0.0), x.shadow)
        twisted = (root * root % self.p != x.p) & (real >= 0) & np.isfinite(real)
        q = None
        if x.square_of is not None and x.square_of.q is not None:
            q = np.where(x.square_of.shadow < 0, -x.square_of.q % self.q, x.square_of.q)
        square = x.q if q is None else None
        result = FieldArray(root, q, np.sqrt(real), marked(TWISTED, twisted), rooted=True, square=square)
        if self.careful:
            result.error = rounding.of_function(_root, result.shadow, x.shadow, x.error)
            self._mark_open(result, self._unclear(x))
        return self._settle(result, x, poles=real < 0)

    def _tanh(self, x: FieldArray) -> FieldArray:
        """2 / (1 + exp(-2 x)) - 1 modulo p; uninterpreted modulo q, so that it can stand in an exponent."""
        one, two = self.full((), 1.0), self.full((), 2.0)
        # Where the exponential leaves the range of float64 its shadow is of no use here, and its residues are.
        within = np.where(np.isfinite(x.shadow), np.clip(x.shadow, -_SATURATED, _SATURATED), x.shadow)
        halves = self._add(one, self._exp(self._neg(self._mul(two, replace(x, shadow=within)))))
        result = self._sub(self._div(two, halves), one)
        result.q, result.shadow, result.error = self._opaque("tanh", [x]).q, _steep_tanh(x.shadow), None
        if self.careful:
            result.error = rounding.of_function(_steep_tanh, result.shadow, x.shadow, x.error)
        return result

    def _sigmoid(self, x: FieldArray) -> FieldArray:
        half = self.full((), 0.5)
        result = self._mul(half, self._add(self.full((), 1.0), self._tanh(self._mul(half, x))))
        result.shadow = _steep_sigmoid(x.shadow)
        if self.careful:
            vanished = (result.shadow == 0) & np.isfinite(x.shadow)
            error = rounding.of_function(_steep_sigmoid, result.shadow, x.shadow, x.error)
            result.error = error + np.where(vanished, VANISHED, 0.0)
        return result

    def _sin(self, x: FieldArray) -> FieldArray:
        z = self._point(x)
        return self._on_circle(
            "sin", x, None if z is None else (z[0] - z[1]) * pow(2 * self._i, -1, self.p) % self.p
        )

    def _cos(self, x: FieldArray) -> FieldArray:
        z = self._point(x)
        return self._on_circle("cos", x, None if z is None else (z[0] + z[1]) * pow(2, -1, self.p) % self.p)

    def _point(self, x: FieldArray) -> tuple[Residues, Residues] | None:
        """z(x), which stands for cos(x) + i sin(x), and its inverse: omega to the power of t x, where t, a random number
        that stands for i, is unknown to exponentials; of a value without residue modulo q, uninterpreted elements of the
        group, one for each term of the sum that it was written as."""
        if x.q is not None:
            z = self._power_of_omega(x.q * self._turn % self.q)
            return z, self._power_of_omega((self.q - x.q) * self._turn % self.q)
        split = x.split or whole_term(x)
        if split is None:
            return None
        self.opaque.add(HASHED_POINT)
        above = [self._circling(part) for part in split.plus]
        below = [self._circling(-part % self.p) for part in split.minus]
        if split.known is not None:
            above.append(self._power_of_omega(split.known.q * self._turn % self.q))
        z = reduce(lambda one, other: one * other % self.p, [*above, *below])
        return z, inverse(z, self.p)

    def _circling(self, residues: Residues) -> Residues:
        """An uninterpreted function into the group, of which that of the negative is the inverse."""
        upper = residues > self.p // 2
        found = self._positive("cos + i sin", np.where(upper, self.p - residues, residues))
        return np.where(upper, inverse(found, self.p), found)

    def _on_circle(self, fn: str, x: FieldArray, residues: Residues | None) -> FieldArray:
        """The sine or cosine with these residues; none is known modulo q."""
        if residues is None:
            return self._opaque(fn, [x])
        shadow = np.asarray(self._floats.call(fn, [x.shadow]))
        result = FieldArray(np.broadcast_to(residues, shadow.shape), None, shadow)
        if self.careful:
            result.error = UNIT + (0.0 if x.error is None else np.minimum(x.error, 2.0)) + np.zeros(x.shape)
        return self._settle(result, x, poles=np.True_)
