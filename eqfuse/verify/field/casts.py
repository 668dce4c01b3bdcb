"""Casts and steps below decisions: a field domain in which what rounds, compares or picks positions sees rounded numbers.

A cast is the identity to the algebra, yet `round(f16(x))` is not `round(x)`, nor `argmax(f16(x))` the position that `argmax(x)`
has; and `floor(x)`, which is a hash of x, is 3 from 3 up to 4. So where a program decides on such values, each value that a cast
or a step is part of has a companion: the same value with every cast and step applied, a number for which a float64 is exact.
`floor`, `round`, `sign`, `//`, `%` and comparisons, those that choose among the states of a registered reduction too, are
given the companions; everything else goes on with both. Casts to f32 and f64 round nothing that a kernel keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eqfuse.terms.folds import fold_of
from eqfuse.terms.functions import CASTS, COMPARISONS
from eqfuse.terms.nodes import Call, Expr, Program, Reduce, walk
from eqfuse.verify.field.array import OPEN, UNDEFINED, FieldArray, extreme, settled_by_residues
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.field.modular import Reals, Residues, Truths
from eqfuse.verify.field.uninterpreted import STEPS, WHOLE

NARROWING = frozenset(CASTS) - {"f32", "f64"}
_STEPPING = frozenset({*WHOLE, "floordiv"})
_DECIDING = frozenset({*_STEPPING, *COMPARISONS, "sign", "mod"})
_CHOOSING = frozenset({"maximum", "minimum", "abs", "relu"})
_MANTISSA = 53


def decides_on_casts(*programs: Program) -> bool:
    """Whether some program rounds, compares or picks positions by a value that a cast or a step is part of."""
    for program in programs:
        for node in walk(*(output.expr for output in program.outputs)):
            if _decides(node) and any(
                isinstance(part, Call) and part is not node and part.fn in (NARROWING | _STEPPING | {"mod"})
                for part in walk(node)
            ):
                return True
    return False


def _decides(node: Expr) -> bool:
    match node:
        case Call(fn, _):
            return fn in _DECIDING
        case Reduce(op, _, _):
            return fold_of(op) is not None
    return False


class CastAware(FieldDomain):
    """A field domain that keeps companions; without a cast it is the plain one."""

    def call(self, fn: str, args: Sequence[FieldArray]) -> FieldArray:
        made = fn in NARROWING or fn in _STEPPING or fn == "mod"
        if all(arg.rounded is None for arg in args) and not made:
            return super().call(fn, args)
        companions = [rounded_of(arg) for arg in args]
        if fn in STEPS and args[0].whole:
            return args[0]
        if fn in _STEPPING:
            return replace(super().call(fn, companions), rounded=self._step(fn, companions))
        if fn == "mod":  # x - y * floor(x / y)
            times = super().call("mul", [companions[1], self._step("floordiv", companions)])
            return replace(super().call(fn, companions), rounded=super().call("sub", [companions[0], times]))
        if fn in _DECIDING:
            return super().call(fn, companions)
        if fn in _CHOOSING:
            return self._chosen(fn, args)
        if fn in NARROWING:
            number = super().call(fn, args) if self.strict_casts else args[0]
            return replace(number, rounded=self._cast(fn, companions[0]))
        found = super().call(fn, args)
        return replace(found, rounded=super().call(fn, companions))

    def _chosen(self, fn: str, args: Sequence[FieldArray]) -> FieldArray:
        """One of two numbers, as the rounded ones are to each other, or where those are equal as the numbers are; so it is where
        neither is one (rounded to 0, a divisor leaves none). Casts turned an order that stays open: past another
        operation, where the algebra may have moved them, they need not."""
        x = args[0]
        y = args[1] if len(args) > 1 else super().call("neg", [x]) if fn == "abs" else self.full((), 0.0)
        mine, other = rounded_of(x), rounded_of(y)
        if fn == "abs" and x.rounded is not None:
            other = super().call("neg", [mine])
        turn = -1.0 if fn == "minimum" else 1.0
        with np.errstate(invalid="ignore"):
            after = settled_by_residues(y, x) if turn > 0 else settled_by_residues(x, y)
            none, none_too = np.isnan(mine.shadow), np.isnan(other.shadow)
            equal = self._equal(mine, other) | none & none_too
            tied = equal & (turn * x.shadow >= turn * y.shadow) & ~after
            turned = ((x.shadow < y.shadow) & (mine.shadow > other.shadow)) | (
                (x.shadow > y.shadow) & (mine.shadow < other.shadow)
            )
            first = (turn * mine.shadow > turn * other.shadow) & ~equal | tied | none & ~none_too
        if self.supposed:
            below = turn < 0
            first = self.supposed.instead(first if below else ~first, mine, other) ^ (not below)
        self.interpreted.add(fn)
        found = super().where(first, x, y)
        companion = super().where(first, mine, other)
        self._mark_open(found, turned, x.error, y.error)
        self._mark_open(companion, turned, mine.error, other.error)
        if self.careful:
            self._mark_lost(found, equal & np.isfinite(mine.shadow), x, y)
            unclear = self._unclear(mine, other)
            self._mark_open(found, unclear, x.error, y.error)
            self._mark_open(companion, unclear, mine.error, other.error)
        return replace(found, rounded=companion)

    def compare(self, fn: str, left: FieldArray, right: FieldArray) -> Truths:
        return super().compare(fn, rounded_of(left), rounded_of(right))

    def where(self, condition: Truths, left: FieldArray, right: FieldArray) -> FieldArray:
        return self._both(lambda x, y: FieldDomain.where(self, condition, x, y), left, right)

    def reduce(self, op: str, value: FieldArray, axis: int) -> FieldArray:
        if op in ("max", "min") and value.rounded is not None and value.shape[axis]:
            return self._extreme(op, value, value.rounded, axis)
        return self._both(lambda x: FieldDomain.reduce(self, op, x, axis), value)

    def _extreme(self, op: str, value: FieldArray, rounded: FieldArray, axis: int) -> FieldArray:
        """The extreme of the rounded numbers, among equal ones that of the numbers."""
        first = super().reduce(op, rounded, axis).each(lambda each: np.expand_dims(each, axis))
        best = first.shadow
        last = -np.inf if op == "max" else np.inf
        with np.errstate(invalid="ignore"):
            equal = self._equal(rounded, first) | np.isnan(rounded.shadow) & np.isnan(best)
            among = replace(value, shadow=np.where(equal, value.shadow, last))
        at = np.expand_dims(extreme(op, among, axis), axis)
        rest = value.shape[:axis] + value.shape[axis + 1 :]
        found, companion = (
            part.each(lambda each: np.take_along_axis(each, at, axis).reshape(rest))
            for part in (replace(value, rounded=None), rounded)
        )
        if self.careful:
            chosen = found.each(lambda each: np.expand_dims(each, axis))
            other = equal & np.isfinite(best) & ~self._same(value, chosen)
            self._mark_lost(found, np.asarray(other.any(axis)))
            unclear = ~first.lacks(OPEN).reshape(rest)
            for part in (found, companion):
                self._mark_open(part, unclear, None if first.error is None else first.error.reshape(rest))
        return replace(found, rounded=companion)

    def _equal(self, left: FieldArray, right: FieldArray) -> Truths:
        """Where two numbers are equal: by their residues too, for a sum of tenths is 1 or not as its order has it, and 1 is
        what another number may be rounded to."""
        equal: Truths = (left.shadow == right.shadow) | self._same(left, right)
        return equal

    def _mark_lost(self, found: FieldArray, equal: Truths, *of: FieldArray) -> None:
        """Marks where one of several numbers was taken that are equal as they are rounded: which one tells nothing."""
        lost = equal & ~self._same(*of) if of else equal
        if lost.any():
            marks = np.zeros(found.shape, np.uint8) if found.marks is None else found.marks
            found.marks = marks | np.where(lost, UNDEFINED, np.uint8(0))

    def contract(self, left: FieldArray, right: FieldArray, axis: int) -> FieldArray:
        return self._both(lambda x, y: FieldDomain.contract(self, x, y, axis), left, right)

    def reshape(self, value: FieldArray, shape: tuple[int, ...]) -> FieldArray:
        return self._both(lambda x: FieldDomain.reshape(self, x, shape), value)

    def transpose(self, value: FieldArray, order: Sequence[int]) -> FieldArray:
        return self._both(lambda x: FieldDomain.transpose(self, x, order), value)

    def broadcast(self, value: FieldArray, shape: tuple[int, ...]) -> FieldArray:
        return self._both(lambda x: FieldDomain.broadcast(self, x, shape), value)

    def take(self, value: FieldArray, index: tuple[Any, ...]) -> FieldArray:
        return self._both(lambda x: FieldDomain.take(self, x, index), value)

    def put(self, target: FieldArray, index: tuple[Any, ...], value: FieldArray) -> None:
        if target.rounded is not None or value.rounded is not None:
            companion = replace(rounded_of(target), rounded=None)
            companion = companion.each(np.array)
            super().put(companion, index, rounded_of(value))
            target.rounded = companion
        super().put(target, index, value)

    def _both(self, change: Callable[..., FieldArray], *values: FieldArray) -> FieldArray:
        found = change(*values)
        if all(value.rounded is None for value in values):
            return found
        return replace(found, rounded=change(*map(rounded_of, values)))

    def _step(self, fn: str, args: Sequence[FieldArray]) -> FieldArray:
        """The whole number that a function of whole numbers gives."""
        if fn == "floordiv":
            fn, args = "floor", [super().call("div", args)]
        values = [self._halves(arg) for arg in args]
        with np.errstate(all="ignore"):
            known = np.asarray(self._floats.call(fn, values), dtype=np.float64)
        marks = [np.zeros((), np.uint8) if arg.marks is None else arg.marks for arg in args]
        marked = np.broadcast_to(np.bitwise_or.reduce(np.broadcast_arrays(*marks)), known.shape)
        found = FieldArray(
            _dyadic(known, self.p), _dyadic(known, self.q), known, marked if marked.any() else None
        )
        if self.careful and len(args) == 1:
            with np.errstate(all="ignore"):
                error = self._error_of(fn, known, args[0])
                self._mark_open(found, (error > 0.5) & ~self._is_half(args[0]), error)
        return found

    def _cast(self, dtype: str, value: FieldArray) -> FieldArray:
        """The number that a value is rounded to."""
        known = self._floats.call(dtype, [value.shadow])
        exact = (known == value.shadow) | ~np.isfinite(known)
        rounded = np.where(np.isfinite(known), known, value.shadow)
        found = FieldArray(_dyadic(rounded, self.p), _dyadic(rounded, self.q), rounded, value.marks)
        found = self.where(exact, value, found) if exact.any() else found
        if self.careful and value.error is not None:  # which number it is rounded to may be open
            low, high = (
                np.asarray(self._floats.call(dtype, [value.shadow + sign * value.error])) for sign in (-1, 1)
            )
            with np.errstate(invalid="ignore"):
                error = np.nan_to_num(np.maximum(known - low, high - known), nan=np.inf)
            self._mark_open(found, (low != high) & np.isfinite(value.shadow), error)
        return found


def rounded_of(value: FieldArray) -> FieldArray:
    return value if value.rounded is None else value.rounded


def _dyadic(values: Reals, modulus: int) -> Residues:
    """Finite floats as the numbers that they are, modulo a prime."""
    mantissa, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.ldexp(mantissa, _MANTISSA).astype(np.int64) % modulus
    kinds, at = np.unique(exponent, return_inverse=True)
    powers = np.array([pow(2, int(kind) - _MANTISSA, modulus) for kind in kinds], dtype=np.int64)
    return whole * powers[at].reshape(values.shape) % modulus
