"""Order in a field: what shadows decide, residues where these are equal, or a supposed order."""

from __future__ import annotations

import numpy as np

from eqfuse.verify.field import rounding
from eqfuse.verify.field.arithmetic import Arithmetic
from eqfuse.verify.field.array import (
    OPEN,
    UNDEFINED,
    FieldArray,
    is_zero,
    joined_marks,
    known_zero,
    marked,
    settled_by_residues,
    terms_of,
    whole_term,
)
from eqfuse.verify.field.exponent_sums import chosen
from eqfuse.verify.field.modular import Reals, Residues, Truths, power

_BOTH_SIGNS = np.array(2.0)
"""How far 1 and -1 are apart."""
PIECE = 4096
"""Elements that are tried at a time where one is sought."""


class Order(Arithmetic):
    """Comparisons, and functions that are one of their arguments, or its negative, by an order."""

    def compare(self, fn: str, left: FieldArray, right: FieldArray) -> Truths:
        if fn in ("gt", "ge"):
            return self.compare({"gt": "lt", "ge": "le"}[fn], right, left)
        same = self._same(left, right)
        self._note_undecided(self._unclear(left, right))
        with np.errstate(invalid="ignore"):
            match fn:
                case "eq":
                    return self.supposed.turned(same, left, right)
                case "ne":
                    return ~self.supposed.turned(same, left, right)
                case "lt":
                    below = (left.shadow < right.shadow) & ~same | settled_by_residues(right, left)
                    return self.supposed.instead(below, left, right)
                case "le":
                    below = (left.shadow <= right.shadow) & ~settled_by_residues(left, right) | same
                    return self.supposed.instead(below, left, right)
        raise ValueError(f"{fn} is not a comparison")

    def _same(self, left: FieldArray, right: FieldArray) -> Truths:
        """Whether two numbers are equal: by their residues, or where they have none in common as far as rounding tells."""
        exact: Truths = left.shadow == right.shadow
        for x, y in ((left.p, right.p), (left.q, right.q)):
            if x is not None and y is not None:
                finite = np.isfinite(left.shadow) & np.isfinite(right.shadow)
                return np.where(finite, x == y, exact)
        if left.error is None and right.error is None:
            return exact
        return exact | rounding.equal(left.shadow, right.shadow, left.error, right.error)

    def where(self, condition: Truths, left: FieldArray, right: FieldArray) -> FieldArray:
        p = None if left.p is None or right.p is None else np.where(condition, left.p, right.p)
        q = None if left.q is None or right.q is None else np.where(condition, left.q, right.q)
        result = FieldArray(p, q, np.where(condition, left.shadow, right.shadow))
        if left.marks is not None or right.marks is not None:
            none = np.uint8(0)
            marks = (none if side.marks is None else side.marks for side in (left, right))
            result.marks = np.broadcast_to(np.where(condition, *marks), result.shape)
        if left.split is not None or right.split is not None:
            sides = [
                terms_of(side) if q is None else side.split or whole_term(side) for side in (left, right)
            ]
            if sides[0] is not None and sides[1] is not None:
                result.split = chosen(condition, sides[0], sides[1]).spread(result.shape)
        result.rooted = left.rooted or right.rooted
        result.whole = left.whole and right.whole
        if left.error is not None or right.error is not None:
            error = rounding.chosen(condition, left.error, right.error)
            result.error = np.broadcast_to(error, result.shape)
        return result

    def _unclear(self, x: FieldArray, y: FieldArray | None = None) -> Truths:
        """Elements of which rounding leaves open which of two different numbers is the greater; of one and 0, where there
        is one."""
        other, error = (0.0, None) if y is None else (y.shadow, y.error)
        unclear = rounding.unclear(x.shadow, other, x.error, error)
        if unclear is None or not unclear.any():
            return np.zeros((), dtype=bool)
        return unclear & ~(is_zero(x) | known_zero(x) if y is None else self._same(x, y))

    def _mark_open(self, result: FieldArray, unclear: Truths, *errors: rounding.Error) -> FieldArray:
        """The result, one of some numbers, with marks where rounding leaves open which one. Its error is the largest of these
        errors there."""
        if unclear.any():
            self._note_beyond_floats(unclear)
            result.marks = joined_marks(result.marks, marked(OPEN, unclear), shape=result.shape)
            for error in errors:
                if error is not None:
                    known = 0.0 if result.error is None else result.error
                    result.error = np.where(unclear, np.maximum(known, error), known)
        return result

    def _maximum(self, x: FieldArray, y: FieldArray) -> FieldArray:
        first = (x.shadow >= y.shadow) & ~settled_by_residues(y, x) | np.isnan(x.shadow)
        result = self.where(~self.supposed.instead(~first, x, y), x, y)
        return self._mark_open(result, self._unclear(x, y), x.error, y.error)

    def _minimum(self, x: FieldArray, y: FieldArray) -> FieldArray:
        first = (x.shadow <= y.shadow) & ~settled_by_residues(x, y) | np.isnan(x.shadow)
        result = self.where(self.supposed.instead(first, x, y), x, y)
        return self._mark_open(result, self._unclear(x, y), x.error, y.error)

    def _abs(self, x: FieldArray) -> FieldArray:
        result = self.where(self.supposed.instead(x.shadow < 0, x), self._neg(x), x)
        self._mark_open(result, self._unclear(x))
        if not result.rooted and result.p is not None:
            finite = np.isfinite(x.shadow) & x.lacks(UNDEFINED)
            result.rooted = self._any_without_root(result.p[np.broadcast_to(finite, result.p.shape)])
        return result

    def _any_without_root(self, values: Residues) -> bool:
        """Whether some residue is no square; a piece at a time, since among numbers at random half are none."""
        pieces = (values[at : at + PIECE] for at in range(0, values.size, PIECE))
        return any(bool((power(piece, self.q, self.p) > 1).any()) for piece in pieces)

    def _from_shadow(self, integers: Reals, x: FieldArray) -> FieldArray:
        """What depends on the shadow alone. Of NaN it may be a number (the sign of NaN is 0), which a stage that has an infinity
        there need not have."""
        unclear = self._unclear(x)
        if self.supposed:
            below = self.supposed.instead(integers < 0, x)
            integers = np.where(below, -1.0, np.where(integers < 0, 1.0, integers))
        result = self.lift(np.nan_to_num(integers))
        left_open = marked(UNDEFINED, np.isnan(x.shadow)) if not self.signs_of_nan else None
        result.shadow, result.marks = integers, joined_marks(x.marks, left_open)
        return self._mark_open(result, unclear, _BOTH_SIGNS)

    def _finite(self, x: FieldArray) -> FieldArray:
        infinite = np.isinf(x.shadow)
        return self.where(infinite, self.full((), 0.0), x) if infinite.any() else x

    def _invertible(self, x: FieldArray) -> FieldArray:
        bad = np.isinf(x.shadow) | (x.shadow == 0)
        return self.where(bad, self.full((), 1.0), x) if bad.any() else x
