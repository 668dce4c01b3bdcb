"""Casts below decisions: a field domain in which what rounds, compares or picks positions sees rounded numbers.

A cast is the identity to the algebra, yet `round(f16(x))` is not `round(x)`, nor `argmax(f16(x))` the position that `argmax(x)`
has. So where a program decides on cast values, each value that a cast is part of has a companion: the same value with
every cast applied, a number for which a float64 is exact. `floor`, `round`, `sign`, `//`, `%` and comparisons, those that
choose among the states of a registered reduction too, are given the companions; everything else goes on with both.
Casts to f32 and f64 round nothing that a kernel keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eqfuse.terms.folds import fold_of
from eqfuse.terms.functions import CASTS, COMPARISONS
from eqfuse.terms.nodes import Call, Expr, Program, Reduce, walk
from eqfuse.verify.field.domain import WHOLE, FieldArray, FieldDomain, extreme, settled_by_residues
from eqfuse.verify.field.modular import Reals, Residues, Truths

NARROWING = frozenset(CASTS) - {"f32", "f64"}
_DECIDING = frozenset({*WHOLE, *COMPARISONS, "sign", "floordiv", "mod"})
_CHOOSING = frozenset({"maximum", "minimum", "abs", "relu"})
_MANTISSA = 53


def decides_on_casts(*programs: Program) -> bool:
    """Whether some program rounds, compares or picks positions by a value that a cast is part of."""
    for program in programs:
        for node in walk(*(output.expr for output in program.outputs)):
            if _decides(node) and any(isinstance(part, Call) and part.fn in NARROWING for part in walk(node)):
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
        if all(arg.rounded is None for arg in args) and fn not in NARROWING:
            return super().call(fn, args)
        companions = [rounded_of(arg) for arg in args]
        if fn in _DECIDING:
            return super().call(fn, companions)
        if fn in _CHOOSING:
            return self._chosen(fn, args)
        if fn in NARROWING:
            return replace(args[0], rounded=self._cast(fn, companions[0]))
        found = super().call(fn, args)
        return replace(found, rounded=super().call(fn, companions))

    def _chosen(self, fn: str, args: Sequence[FieldArray]) -> FieldArray:
        """One of two numbers, as the rounded ones are to each other, or where those are equal as the numbers are."""
        x = args[0]
        y = args[1] if len(args) > 1 else super().call("neg", [x]) if fn == "abs" else self.full((), 0.0)
        mine, other = rounded_of(x), rounded_of(y)
        if fn == "abs" and x.rounded is not None:
            other = super().call("neg", [mine])
        self._note_unclear(mine, other)
        turn = -1.0 if fn == "minimum" else 1.0
        with np.errstate(invalid="ignore"):
            after = settled_by_residues(y, x) if turn > 0 else settled_by_residues(x, y)
            tied = (mine.shadow == other.shadow) & (turn * x.shadow >= turn * y.shadow) & ~after
            first = (turn * mine.shadow > turn * other.shadow) | tied | np.isnan(mine.shadow)
            if self.careful:
                self._note_lost((mine.shadow == other.shadow) & np.isfinite(mine.shadow), x, y)
        if self.supposed:
            below = turn < 0
            first = self.supposed.instead(first if below else ~first, mine, other) ^ (not below)
        self.interpreted.add(fn)
        found = super().where(first, x, y)
        return replace(found, rounded=super().where(first, mine, other))

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
        best = np.expand_dims(super().reduce(op, rounded, axis).shadow, axis)
        last = -np.inf if op == "max" else np.inf
        with np.errstate(invalid="ignore"):
            equal = (rounded.shadow == best) | np.isnan(rounded.shadow) & np.isnan(best)
            among = replace(value, shadow=np.where(equal, value.shadow, last))
        at = np.expand_dims(extreme(op, among, axis), axis)
        if self.careful:
            chosen = replace(value, rounded=None).each(lambda each: np.take_along_axis(each, at, axis))
            self._note_lost(equal & np.isfinite(best), value, chosen)
        rest = value.shape[:axis] + value.shape[axis + 1 :]
        found, companion = (
            part.each(lambda each: np.take_along_axis(each, at, axis).reshape(rest))
            for part in (replace(value, rounded=None), rounded)
        )
        return replace(found, rounded=companion)

    def _note_lost(self, equal: Truths, x: FieldArray, y: FieldArray) -> None:
        """Trials in which different numbers are equal as they are cast: which of them is taken tells nothing."""
        if equal.any():
            self._note_beyond_floats(equal & ~self._same(x, y))

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

    def _cast(self, dtype: str, value: FieldArray) -> FieldArray:
        """The number that a value is rounded to."""
        known = self._floats.call(dtype, [value.shadow])
        exact = (known == value.shadow) | ~np.isfinite(known)
        rounded = np.where(np.isfinite(known), known, value.shadow)
        found = FieldArray(_dyadic(rounded, self.p), _dyadic(rounded, self.q), rounded, value.marks)
        return self.where(exact, value, found) if exact.any() else found


def rounded_of(value: FieldArray) -> FieldArray:
    return value if value.rounded is None else value.rounded


def _dyadic(values: Reals, modulus: int) -> Residues:
    """Finite floats as the numbers that they are, modulo a prime."""
    mantissa, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.ldexp(mantissa, _MANTISSA).astype(np.int64) % modulus
    kinds, at = np.unique(exponent, return_inverse=True)
    powers = np.array([pow(2, int(kind) - _MANTISSA, modulus) for kind in kinds], dtype=np.int64)
    return whole * powers[at].reshape(values.shape) % modulus
