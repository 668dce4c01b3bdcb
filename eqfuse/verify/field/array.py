"""Values of a field: residues, real shadows and marks, and what follows from them alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.verify.field.exponent_sums import KnownPart, Split
from eqfuse.verify.field.modular import Reals, Residues, Truths

UNDEFINED, TWISTED, SIGNED, POLE, OPEN = np.uint8(1), np.uint8(2), np.uint8(4), np.uint8(8), np.uint8(16)
"""Marks of elements: no value at all; a value by continuation of a root to non-squares; one of a logarithm; made
from an infinity or NaN that finite numbers gave; one of several numbers that rounding errors leave in no order."""
Marks = npt.NDArray[np.uint8]

LEAST = 5e-324
"""The shadow of a number that is too small for float64: its sign is known."""

_NEAR_ZERO = 1e-9
"""A shadow this small relative to the operands is rounding where the residue is exactly 0."""


@dataclass(slots=True, eq=False)
class FieldArray:
    """An array of field values (see the module). Components of one shape; None where nothing is known.

    `split`: how the value was written as a sum or a difference, or a multiple of one.
    `rooted`: a principal root was taken on the way, so the sign of the residue is a convention.
    `formal`: this is log2 e or its inverse, by which a sum is multiplied term by term.
    `whole`: every value is one of a function of `WHOLE`.
    `square_of`: what this is the square of, where it was made as one.
    `square`: the residue modulo q of its square, where that is known and its own is not.
    `error`: how far the shadow may be from the real number, in a domain that is `careful`; None: not at all.
    `rounded`: the same value with its casts applied, where a domain keeps that (see `casts`).
    """

    p: Residues | None
    q: Residues | None
    shadow: Reals
    marks: Marks | None = None
    split: Split | None = None
    rooted: bool = False
    formal: bool = False
    whole: bool = False
    square_of: FieldArray | None = None
    square: Residues | None = None
    rounded: FieldArray | None = None
    error: Reals | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shadow.shape

    def each(self, change: Callable[[Any], Any]) -> FieldArray:
        """The same change of shape or selection applied to every component."""
        return FieldArray(
            None if self.p is None else change(self.p),
            None if self.q is None else change(self.q),
            change(self.shadow),
            None if self.marks is None else change(self.marks),
            None if self.split is None else self.split.each(change),
            self.rooted,
            self.formal,
            self.whole,
            square=None if self.square is None else change(self.square),
            error=None if self.error is None else change(self.error),
        )

    def lacks(self, mark: np.uint8) -> Truths:
        """Elements without this mark."""
        return np.ones(self.shape, dtype=bool) if self.marks is None else (self.marks & mark) == 0


def square_of(x: FieldArray, q: int) -> Residues | None:
    """The residue modulo q of the square of a value."""
    return x.square if x.q is None else x.q * x.q % q


def put_at(target: Any, index: tuple[Any, ...], value: Any) -> Any:
    if target is None or value is None:
        return None
    if not target.flags.writeable:
        target = target.copy()
    target[index] = value
    return target


MANY = 4096
"""Elements of a selection from which on one place for each is counted first: every component is read there."""


def places_in(shape: tuple[int, ...], index: tuple[Any, ...]) -> npt.NDArray[np.int64] | None:
    """The places of what is selected of each trial, counted over all its dimensions; None where it is little, or anything but
    positions of every dimension that are inside."""
    trials, *positions = index
    if not isinstance(trials, slice) or trials != slice(None) or len(positions) != len(shape) - 1:
        return None
    if not all(isinstance(each, np.ndarray) and each.dtype.kind in "iu" for each in positions):
        return None
    if math.prod(np.broadcast_shapes(*(each.shape for each in positions))) < MANY:
        return None
    places = np.zeros((), dtype=np.int64)
    for each, extent in zip(positions, shape[1:], strict=True):
        if each.min() < 0 or each.max() >= extent:
            return None
        places = places * extent + each
    return places


def exact_zeros(residue: Residues | None, shadow: Reals, scale: Callable[[], Reals]) -> Reals:
    """The shadow, made 0 where the residue is and only rounding made it differ."""
    if residue is None:
        return shadow
    zero = residue == 0
    if not zero.any():
        return shadow
    suspect = zero & (shadow != 0) & np.isfinite(shadow)
    if not suspect.any():
        return shadow + 0.0  # there is one zero
    return np.where(suspect & (np.abs(shadow) <= _NEAR_ZERO * scale()), 0.0, shadow)


def clear_zeros(value: FieldArray) -> None:
    """Makes 0, without an error, what is 0 by its residue and as far as its rounding error tells."""
    residue = value.p if value.p is not None else value.q
    if residue is None or value.error is None:
        return
    with np.errstate(invalid="ignore"):
        zero = (residue == 0) & (np.abs(value.shadow) <= value.error) & np.isfinite(value.shadow)
    if zero.any():
        value.shadow = np.where(zero, 0.0, value.shadow)
        value.error = np.where(zero, 0.0, value.error)


def is_zero(x: FieldArray) -> Truths:
    """Where a value is 0, and not for want of a residue, or by an order that is open."""
    zero: Truths = (x.shadow == 0) & x.lacks(UNDEFINED | OPEN)
    return zero & (x.p == 0) if x.p is not None else np.zeros_like(zero)


def known_zero(x: FieldArray) -> Truths:
    """Where a value without residues is 0 and has no error."""
    if x.p is not None or x.q is not None or x.error is None:
        return np.zeros(x.shape, dtype=bool)
    found: Truths = (x.shadow == 0) & (x.error == 0) & x.lacks(UNDEFINED)
    return found


def open_sign(x: FieldArray) -> Truths:
    """Where rounding leaves open whether a value is 0, and if it is not, of what sign. What an infinity times or over such a
    value is, or such a value over 0, is an infinity of either sign or NaN."""
    if x.error is None:
        return np.zeros(x.shape, dtype=bool)
    found: Truths = (np.abs(x.shadow) <= x.error) & (x.error > 0) & ~is_zero(x)
    return found


def settled_by_residues(greater: FieldArray, less: FieldArray) -> Truths:
    """Whether the first value comes after the second by its residue, where their shadows cannot tell. What has the
    shadow 0 is neither positive nor negative."""
    tied: Truths = (greater.shadow == less.shadow) & (greater.shadow != 0) & np.isfinite(greater.shadow)
    if tied.any():
        for x, y in ((greater.p, less.p), (greater.q, less.q)):
            if x is not None and y is not None:
                return tied & (x > y)
    return np.zeros_like(tied)


def extreme(op: str, value: FieldArray, axis: int) -> npt.NDArray[np.intp]:
    """Where the greatest or least element of every line is, of equal ones the first; a NaN counts as such. Equal are residues: the
    shadows of one number may differ by their rounding."""
    first = np.argmax if op == "max" else np.argmin
    at: npt.NDArray[np.intp] = first(value.shadow, axis=axis)
    residue = value.q if value.p is None else value.p
    best = np.take_along_axis(value.shadow, np.expand_dims(at, axis), axis)
    if residue is None:
        return at
    tied = value.shadow == best
    if ((tied.sum(axis) > 1) & np.squeeze(best != 0, axis)).any():
        among = np.where(tied, residue, -1 if op == "max" else np.iinfo(residue.dtype).max)
        settled = np.squeeze(np.isfinite(best) & (best != 0), axis)
        at = np.where(settled, first(among, axis=axis), at)
    equal = residue == np.take_along_axis(residue, np.expand_dims(at, axis), axis)
    equal &= np.isfinite(value.shadow) == np.isfinite(best)
    return np.where(np.squeeze(np.isfinite(best), axis), np.argmax(equal, axis=axis), at)


def marked(mark: np.uint8, elements: Truths | np.bool_) -> Marks | None:
    return np.asarray(elements * mark) if elements.any() else None


def _any_mark(marks: Marks | None, axis: int) -> Marks | None:
    return None if marks is None else np.asarray(np.bitwise_or.reduce(marks, axis))


def joined_marks(*marks: Marks | None, shape: tuple[int, ...] | None = None) -> Marks | None:
    known = [mark for mark in marks if mark is not None]
    if not known:
        return None
    joined: Marks = reduce(np.bitwise_or, known)
    return joined if shape is None or joined.shape == shape else np.broadcast_to(joined, shape)


def terms_of(x: FieldArray) -> Split | None:
    """What the exponential of `x` is the product of; None where nothing is known."""
    if x.q is not None:
        return Split(KnownPart(x.p, x.q), (), ())
    return x.split or whole_term(x)


def whole_term(x: FieldArray) -> Split | None:
    return None if x.p is None else Split(None, (x.p,), ())


def line_of(value: FieldArray, axis: int) -> FieldArray:
    """What a sum along an axis inherits: marks, and whether all of the line is finite."""
    shadow = np.where(np.isfinite(value.shadow).all(axis), 0.0, np.nan)
    return FieldArray(None, None, shadow, _any_mark(value.marks, axis), rooted=value.rooted)
