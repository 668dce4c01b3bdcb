"""Uninterpreted functions: keyed hashes of residues, with the sign, and for steps the order, of the real value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from eqfuse.terms.functions import FUNCTIONS, ON_BITS, ROUNDINGS
from eqfuse.verify.field import rounding
from eqfuse.verify.field.array import FieldArray, is_zero
from eqfuse.verify.field.modular import Reals, Residues, Truths, scramble
from eqfuse.verify.field.order import Order
from eqfuse.verify.field.rounding import UNIT

_APART = 1e-6
"""How far, relative to it, the shadow of an uninterpreted function may be from the true value: arguments that it takes
to one number (2.1 and 2.9 rounded down) give values in an order that sums and multiples keep."""
STEPS = frozenset({"floor", "round"})
"""Functions whose values are whole numbers, which they leave as they are: values are in the order of the arguments."""
WHOLE = frozenset({*STEPS, *ROUNDINGS, *ON_BITS})
"""All functions whose values are whole numbers."""
_NEAR_ZERO = 1e-9
"""A shadow this near to a whole number, relative to it, may be that number but for rounding."""


def apart_by(hashes: Residues) -> Reals:
    """Factors that differ where hashes do, a little below 1."""
    return 1.0 - _APART * (hashes / 2.0**62)


class Uninterpreted(Order):
    """Functions of which a field knows that equal arguments give equal values."""

    def _opaque(self, fn: str, args: Sequence[FieldArray]) -> FieldArray:
        """An uninterpreted function: hashes of the arguments, with the sign of the true value, which the shadow is
        but for a hashed factor (see `_APART`).

        Odd and even functions stay odd and even. Where the true value is 0, or an argument is
        infinite, the result is the true value itself. So it is where a whole number is rounded to a whole one.
        """
        self.opaque.add(fn)
        if fn in STEPS and args[0].whole:
            return args[0]
        values = [arg.shadow for arg in args]
        exact = self._is_whole(args[0]) if fn in WHOLE and len(args) == 1 else np.False_
        if fn in WHOLE and len(args) == 1:
            values = [self._halves(args[0])]
        result = FieldArray(None, None, np.asarray(self._floats.call(fn, values), dtype=np.float64))
        mixed = self._hashes(fn, args)
        if mixed is not None:
            root = mixed % (self.p - 1) + 1
            finite = reduce(np.logical_and, [np.isfinite(arg.shadow) for arg in args])
            known = np.nan_to_num(result.shadow, posinf=0.0, neginf=0.0)
            whole = self.lift(np.where(finite & ~exact, 0, known))
            assert whole.p is not None and whole.q is not None
            hashed = finite & (result.shadow != 0) & ~exact
            negative = result.shadow < 0
            p, q = self.group.powers(root), scramble(mixed, self._key(fn)) % self.q
            result.p = np.where(hashed, np.where(negative, self.p - p, p), whole.p)
            result.q = np.where(hashed, np.where(negative, -q % self.q, q), whole.q)
            if fn in STEPS or fn in ROUNDINGS:  # in the order of the arguments
                apart = result.shadow + _APART * np.clip(args[0].shadow - result.shadow, -1.0, 1.0)
            else:
                apart = result.shadow * apart_by(mixed)
            result.shadow = np.where(hashed, apart, result.shadow)
        if self.careful:
            self._note_open(fn, result, args)
        result.whole = fn in WHOLE
        return self._settle(result, *args, poles=np.True_)

    def _note_open(self, fn: str, result: FieldArray, args: Sequence[FieldArray]) -> None:
        """The error of an uninterpreted function, and where it may have another sign, or another step; of one of several arguments
        trials in which it may have."""
        if len(args) > 1:
            for arg in args:
                if arg.error is not None:
                    most = 0.5 if fn in ON_BITS else 0.0  # of whole numbers
                    self._note_undecided(np.broadcast_to(arg.error > most, result.shape))
            return
        (x,) = args
        error = self._error_of(fn, np.asarray(self._floats.call(fn, [x.shadow])), x)
        if fn in STEPS or fn in ROUNDINGS:
            left_open = (error > 0.5) & ~self._is_half(x)
            result.error = UNIT * np.abs(result.shadow) + (0.0 if x.error is None else _APART * x.error)
        else:
            left_open = (np.abs(result.shadow) <= error) & (error > 0) & ~is_zero(x)
            result.error = error
        self._mark_open(result, left_open, error)

    def _error_of(self, fn: str, result: Reals, x: FieldArray) -> Reals:
        return rounding.of_function(lambda at: self._floats.call(fn, [at]), result, x.shadow, x.error)

    def _halves(self, x: FieldArray) -> Reals:
        """The real values, and where one is a whole number or half of one by its residue, that number itself."""
        twice = self._linear(np.add, x, x)
        return np.where(self._is_whole(twice), np.rint(twice.shadow) / 2, x.shadow)

    def _is_half(self, x: FieldArray) -> Truths:
        return self._is_whole(self._linear(np.add, x, x))

    def _is_whole(self, x: FieldArray) -> Truths:
        """Where a value is the whole number that its shadow is, as its residue says."""
        whole = np.abs(x.shadow) < 2.0**53
        number = np.where(whole, np.rint(x.shadow), 0.0)
        whole &= np.abs(number - x.shadow) <= _NEAR_ZERO * np.maximum(np.abs(number), 1.0)
        if x.p is None:
            return np.zeros_like(whole)
        found: Truths = whole & (number.astype(np.int64) % self.p == x.p)
        return found

    def _hashes(self, fn: str, args: Sequence[FieldArray]) -> Residues | None:
        """Keyed hashes of the arguments, of odd and even functions up to their sign; None where one has no residue."""
        known = [arg.p if arg.p is not None else arg.q for arg in args]
        residues = [residue for residue in known if residue is not None]
        if len(residues) < len(args):
            return None
        if FUNCTIONS[fn].parity:
            modulus = self.p if args[0].p is not None else self.q
            residues = [np.where(args[0].shadow < 0, -residues[0] % modulus, residues[0])]
        key = self._key(fn)
        return reduce(lambda seen, r: scramble(seen ^ r, key), residues, np.zeros((), dtype=np.int64))
