"""Sums, differences, products and quotients in a field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from eqfuse.verify.field import rounding
from eqfuse.verify.field.array import (
    POLE,
    UNDEFINED,
    FieldArray,
    clear_zeros,
    exact_zeros,
    is_zero,
    marked,
    open_sign,
    square_of,
    terms_of,
)
from eqfuse.verify.field.exponent_sums import KnownPart, Split
from eqfuse.verify.field.modular import Reals, inverse
from eqfuse.verify.field.state import FieldState


class Arithmetic(FieldState):
    """What the four operations give: residues exactly, shadows with errors, and how a sum was written."""

    def _add(self, x: FieldArray, y: FieldArray) -> FieldArray:
        result = self._linear(np.add, x, y)
        if result.q is None:
            self._split(result, terms_of(x), terms_of(y))
        else:
            # u + (0 - v), as a rewritten difference may be spelt
            for left, right in ((x, y), (y, x)):
                if right.split is not None and not right.split.plus and left.p is not None:
                    result.split = Split(None, (left.p,), right.split.minus).spread(result.shape)
        return result

    def _sub(self, x: FieldArray, y: FieldArray) -> FieldArray:
        result = self._linear(np.subtract, x, y)
        if result.q is None:
            right = terms_of(y)
            self._split(result, terms_of(x), right and right.negated(self.p, self.q))
        elif x.p is not None and y.p is not None:
            result.split = Split(None, (x.p,), (y.p,)).spread(result.shape)
        return result

    def _split(self, result: FieldArray, left: Split | None, right: Split | None) -> None:
        joined = left and right and left.added(right, self.p, self.q)
        result.split = joined.spread(result.shape) if joined else None

    def _linear(self, op: Callable[..., Any], x: FieldArray, y: FieldArray) -> FieldArray:
        p = None if x.p is None or y.p is None else op(x.p, y.p) % self.p
        q = None if x.q is None or y.q is None else op(x.q, y.q) % self.q
        shadow = op(x.shadow, y.shadow)
        shadow = exact_zeros(p if p is not None else q, shadow, lambda: np.abs(x.shadow) + np.abs(y.shadow))
        result = FieldArray(p, q, shadow)
        if self.careful:
            result.error = rounding.of_sum(shadow, x.error, y.error)
            if p is None and q is None:
                self._cancel(result, x, -op(0.0, y.shadow), y.error)
            clear_zeros(result)
        return self._settle(result, x, y)

    @staticmethod
    def _cancel(result: FieldArray, x: FieldArray, y: Reals, ey: rounding.Error) -> None:
        """Makes 0, without an error, what is left of two equal numbers that have no residues."""
        zero = rounding.equal(x.shadow, y, x.error, ey)
        if zero.any() and result.error is not None:
            result.shadow = np.where(zero, 0.0, result.shadow)
            result.error = np.where(zero, 0.0, result.error)

    def _neg(self, x: FieldArray) -> FieldArray:
        p = None if x.p is None else -x.p % self.p
        q = None if x.q is None else -x.q % self.q
        result = FieldArray(
            p, q, -x.shadow, x.marks, rooted=x.rooted, whole=x.whole, square=x.square, error=x.error
        )
        if x.split is not None:
            result.split = x.split.negated(self.p, self.q)
        elif x.p is not None:
            result.split = Split(None, (), (x.p,))
        return result

    def _mul(self, x: FieldArray, y: FieldArray) -> FieldArray:
        result = self._settle(self._product(x, y, x.shadow * y.shadow), x, y)
        if self.careful:
            error = rounding.of_product(result.shadow, x.shadow, y.shadow, x.error, y.error)
            result.error = np.where(np.isfinite(result.shadow), error, 0.0)
            self._note_open_infinities(x, y)
            self._note_open_infinities(y, x)
        zero = result.shadow == 0
        if zero.any():
            self._keep_vanished(result, zero & (x.shadow != 0) & (y.shadow != 0))
        result.square_of = x if x is y else None
        if result.marks is not None:  # 0 times a number is 0, whether the field has that number or not
            nothing = is_zero(x) & np.isfinite(y.shadow) | is_zero(y) & np.isfinite(x.shadow)
            result.marks = np.where(nothing, result.marks & POLE, result.marks)
        return result

    def _note_open_infinities(self, x: FieldArray, y: FieldArray) -> None:
        """Trials in which an infinity is multiplied or divided by a number whose sign rounding leaves open."""
        infinite = np.isinf(x.shadow)
        if infinite.any():
            self._note_undecided(infinite & open_sign(y))

    def _product(self, x: FieldArray, y: FieldArray, shadow: Reals) -> FieldArray:
        p = None if x.p is None or y.p is None else x.p * y.p % self.p
        q = None if x.q is None or y.q is None else x.q * y.q % self.q
        result = FieldArray(p, q, shadow)
        if q is None:
            squares = square_of(x, self.q), square_of(y, self.q)
            if squares[0] is not None and squares[1] is not None:
                square = squares[0] * squares[1] % self.q
                # a root times itself has the residue that its square was known to have
                result.q, result.square = (x.square, None) if x is y else (None, square)
        differences = [
            (one, by) for one, by in ((x, y), (y, x)) if one.split and (one.split.is_difference or by.formal)
        ]
        if len(differences) == 1:
            one, by = differences[0]
            assert one.split is not None
            if by.p is not None and (p is not None or by.formal):
                factor = by.p if by.q is None else KnownPart(by.p, by.q)
                scaled = one.split.scaled(factor, self.p, self.q)
                result.split = scaled and scaled.spread(shadow.shape)
        return result

    def _div(self, x: FieldArray, y: FieldArray) -> FieldArray:
        pole = y.shadow == 0
        broken = np.zeros(y.shape, dtype=bool)
        for residue in (y.p, y.q):
            if residue is not None:
                # A zero on one side only is an accident of the field, or of float64.
                broken |= ((residue == 0) != pole) & np.isfinite(y.shadow)
        reciprocal = FieldArray(
            None if y.p is None else inverse(y.p, self.p),
            None if y.q is None else inverse(y.q, self.q),
            y.shadow,
            square=None if y.square is None else inverse(y.square, self.q),
        )
        result = self._product(x, reciprocal, x.shadow / y.shadow)
        result.marks = marked(UNDEFINED, broken)
        if self.careful:
            result.error = rounding.of_quotient(result.shadow, y.shadow, x.error, y.error)
            if pole.any():
                self._note_undecided(pole & open_sign(x))
            self._note_open_infinities(x, y)
        zero = result.shadow == 0
        if zero.any():
            self._keep_vanished(result, zero & (x.shadow != 0) & np.isfinite(y.shadow))
        return self._settle(result, x, y, poles=pole & ~broken)
