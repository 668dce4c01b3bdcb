"""The finite-field domain: exact arithmetic in which equal programs give equal values.

A value carries up to two residues and a shadow:

    p   residue modulo the safe prime p = 2q + 1
    q   residue modulo q, while it is known: + - * / of inputs and constants have it, exp consumes it
        (Mirage, section 5: one prime outside the exponents, one inside)
    shadow   the real number it stands for, in float64; decides order and nothing else. Values whose shadows are
             equal although their residues are not (saturated, or rounded to integers) are ordered by residues

The squares modulo p have order q and play the positive reals: ``exp(x) = omega ** x.q`` is a homomorphism, ``log`` is
its inverse, ``sqrt(a) = a ** ((p + 1) / 4)`` is multiplicative on squares. A value whose residue modulo q is lost (a
root, a second exponential) keeps how it is written as a sum of terms (see `split`): ``exp(u - v) = G(u) / G(v)``, where
G is exp for what has its residue modulo q, and an uninterpreted positive function for any other term. So a chain of
differences still telescopes. ``exp2(x) = exp(x / L)``, where L is a formal log2 e, another random number in every
trial. Everything else is a keyed hash of the residues: equal arguments, equal values.

Elements on which the field has no answer (a zero divisor whose shadow is not zero) are marked UNDEFINED.
Roots and logarithms of positive numbers that are no squares are taken of their negatives: still functions of
their arguments, and homomorphisms, but a sign is lost. Such a root is marked TWISTED, such a logarithm SIGNED
until its exponential, which has the wrong sign, is TWISTED.
Infinities and NaN live in the shadow alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial, reduce
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from eqfuse.terms.definitions import evaluated
from eqfuse.terms.domain import Watch
from eqfuse.terms.floats import IRRATIONAL, FloatDomain
from eqfuse.terms.functions import CASTS, FUNCTIONS, ON_BITS, ROUNDINGS
from eqfuse.terms.nodes import REDUCTIONS
from eqfuse.verify.contraction import Contraction
from eqfuse.verify.field import rounding
from eqfuse.verify.field.exponent_sums import Known, Split, chosen, placed
from eqfuse.verify.field.modular import PowerGroup, Reals, Residues, Truths, inverse, matmul, power, scramble
from eqfuse.verify.field.supposed import Supposed

P = 1932740039
"""The largest safe prime below 2**31 modulo which 2, 3, 5, ... 61 are all squares, so that the constants and
sizes that people write have roots, as positive numbers do. -1 is a non-square."""
Q = (P - 1) // 2

CIRCLE_P, CIRCLE_Q = 1525921609, 63580067
"""The largest primes p = 24 q + 1 below 2**31 for which 2, 3, 5 and 7 are in the group of order q. -1 has a root there, so that
the points of a circle, cos + i sin, are elements of the field. Below 24, 2 or 3 is never in that group."""

UNDEFINED, TWISTED, SIGNED, POLE = np.uint8(1), np.uint8(2), np.uint8(4), np.uint8(8)
"""Marks of elements: no value at all; a value by continuation of a root to non-squares; one of a logarithm; made
from an infinity or NaN that finite numbers gave."""
Marks = npt.NDArray[np.uint8]

PIECE = 4096
"""Elements that are tried at a time where one is sought."""
_APART = 1e-6
"""How far, relative to it, the shadow of an uninterpreted function may be from the true value: arguments that it takes
to one number (2.1 and 2.9 rounded down) give values in an order that sums and multiples keep."""
STEPS = frozenset({"floor", "round"})
"""Functions whose values are whole numbers, which they leave as they are: values are in the order of the arguments."""
WHOLE = frozenset({*STEPS, *ROUNDINGS, *ON_BITS})
"""All functions whose values are whole numbers."""

_SATURATED = 300.0
"""From here on, and long before, tanh is 1 in float64; exp of twice as much is a number."""

UNIT = rounding.UNIT

HASHED_EXP = "exp of a value without exponent residue"
HASHED_POINT = "sin, cos of a value without exponent residue"
"""What `opaque` has where an exponential or a point is that of the terms of a sum as it is written: sums that are equal,
written in other terms, may have others."""

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
            error=None if self.error is None else change(self.error),
        )

    def lacks(self, mark: np.uint8) -> Truths:
        """Elements without this mark."""
        return np.ones(self.shape, dtype=bool) if self.marks is None else (self.marks & mark) == 0


class FieldDomain:
    """Implements `terms.domain.Domain`. `seed` chooses omega and the keys of the uninterpreted functions.

    `opaque` collects the functions that were evaluated as hashes; `strict_casts` makes casts opaque (they are
    identities otherwise). `beyond_floats` are the trials (all, where it is a single one) in which some real value
    overflowed or vanished, so that orders may be wrong; where it is `careful`, which costs time, also those in which
    rounding errors leave an order open; `saturated` are those in which a function gave what floats cannot tell from 1.
    `trials` is their number, where it is known. `extremes` counts, per reduction of max or min, how often the extreme
    was in the first, middle and last part of the axis.
    """

    name = "field"
    watch: Watch | None = None
    orders = True

    def __init__(
        self,
        p: int = P,
        q: int = Q,
        generator: int | None = None,
        seed: int = 0,
        *,
        strict_casts: bool = False,
    ) -> None:
        generator = pow(2, (p - 1) // q, p) if generator is None else generator
        if (p - 1) % q or not 2**8 < p < 2**31 or pow(generator, q, p) != 1 or generator % p in (0, 1):
            raise ValueError(f"need primes p = kq + 1 below 2**31 and a generator of order q, got {p}, {q}")
        self.p, self.q = p, q
        self.group = PowerGroup(p, q, generator)
        self.strict_casts = strict_casts
        self.careful = False
        self.trials: int | None = None
        self.opaque: set[str] = set()
        self.interpreted: set[str] = set()
        self.extremes: dict[str, npt.NDArray[np.int64]] = {}
        self.beyond_floats: Truths = np.zeros(1, dtype=bool)
        self.saturated: Truths = np.zeros(1, dtype=bool)
        self._seed = seed
        self.supposed = Supposed((p, q), seed)
        self._log_omega, self._turn = (int(n) for n in np.random.default_rng(seed).integers(1, q, 2))
        self._floats = FloatDomain("float64")
        self._table: dict[str, Callable[..., FieldArray]] = {
            "add": self._add,
            "sub": self._sub,
            "mul": self._mul,
            "div": self._div,
            "neg": self._neg,
            "maximum": self._maximum,
            "minimum": self._minimum,
            "abs": self._abs,
            "sign": lambda x: self._from_shadow(self._floats.call("sign", [x.shadow]), x),
            "exp": self._exp,
            "exp2": self._exp2,
            "log": self._log,
            "sqrt": self._sqrt,
            "finite": self._finite,
            "invertible": self._invertible,
            "sigmoid": self._sigmoid,
            "tanh": self._tanh,
            "floordiv": lambda x, y: self._opaque("floor", [self._div(x, y)]),
            "mod": lambda x, y: self._sub(x, self._mul(y, self._opaque("floor", [self._div(x, y)]))),
        }
        self._i = _root_of_minus_one(p) if p % 4 == 1 else 0
        if self._i:
            self._table |= {"sin": self._sin, "cos": self._cos}

    @property
    def omega(self) -> int:
        return pow(self.group.generator, self._log_omega, self.p)

    # Construction

    def full(self, shape: tuple[int, ...], number: float) -> FieldArray:
        p, q = _rational(number, self.p), _rational(number, self.q)
        shadow = np.full(shape, float(number))
        return FieldArray(np.full(shape, p, dtype=np.int64), np.full(shape, q, dtype=np.int64), shadow)

    def lift(self, integers: npt.NDArray[Any]) -> FieldArray:
        exact = np.asarray(integers).astype(np.int64)
        return FieldArray(exact % self.p, exact % self.q, exact.astype(np.float64))

    def irrational(self, name: str, shape: tuple[int, ...]) -> FieldArray:
        """log2 e has residues at random, others in every trial, as no field has the number itself: what is right for
        all of them multiplies by it and divides by it in the right places. ln 2 is its inverse."""
        trials, rest = np.arange(shape[0], dtype=np.int64) + 1, (shape[0], *(1,) * (len(shape) - 1))

        def residues(modulus: int, key: str) -> Residues:
            found = scramble(trials, self._key(key)) % (modulus - 1) + 1
            found = found if name == "log2_e" else inverse(found, modulus)
            return np.broadcast_to(found.reshape(rest), shape)

        p, q = residues(self.p, "log2_e modulo p"), residues(self.q, "log2_e modulo q")
        return FieldArray(p, q, np.full(shape, IRRATIONAL[name]), formal=True)

    def numbers(self, values: Reals) -> FieldArray:
        """These numbers themselves, each as its shortest decimal."""
        unique, at = np.unique(values, return_inverse=True)
        p, q = (
            np.array([_rational(float(number), modulus) for number in unique], dtype=np.int64)[at].reshape(
                values.shape
            )
            for modulus in (self.p, self.q)
        )
        return FieldArray(p, q, np.asarray(values, dtype=np.float64))

    def draw(self, shadow: Reals, rng: np.random.Generator) -> FieldArray:
        """Random values with the given shadows: plus or minus a square modulo p, anything modulo q.

        0 and infinities have the residues 0.
        """
        positive = self.group.powers(rng.integers(1, self.p, size=shadow.shape))
        p = np.where(shadow < 0, self.p - positive, positive)
        q = rng.integers(1, self.q, shadow.shape)
        random = (shadow != 0) & np.isfinite(shadow)
        return FieldArray(np.where(random, p, 0), np.where(random, q, 0), shadow)

    # Elementwise functions

    def drawn(self, fn: str, integers: Sequence[npt.NDArray[Any]]) -> FieldArray:
        return self.call(fn, [self.lift(each) for each in integers])

    def rounded(self, dtype: str, value: FieldArray) -> FieldArray:
        """The value: the precision of a kernel is no part of what is compared."""
        return value

    def call(self, fn: str, args: Sequence[FieldArray]) -> FieldArray:
        with np.errstate(all="ignore"):
            if fn in CASTS:
                return self._opaque(fn, args) if self.strict_casts else args[0]
            result = self._interpreted(fn, args)
            if result is None:
                return self._opaque(fn, args)
            self.interpreted.add(fn)
            return result

    def _interpreted(self, fn: str, args: Sequence[FieldArray]) -> FieldArray | None:
        """What the field has of a function, or its definition has; None for one that is hashed."""
        if fn in self._table:
            return self._table[fn](*args)
        definition = FUNCTIONS[fn].definition
        if not definition:
            return None

        def inner(name: str, parts: Sequence[FieldArray]) -> FieldArray:
            found = self._interpreted(name, parts)
            return self._opaque(name, parts) if found is None else found

        return evaluated(definition, fn, args, lambda number: self.full((), number), inner)

    def _add(self, x: FieldArray, y: FieldArray) -> FieldArray:
        result = self._linear(np.add, x, y)
        if result.q is None:
            self._split(result, _terms(x), _terms(y))
        else:
            # u + (0 - v), as a rewritten difference may be spelt
            for left, right in ((x, y), (y, x)):
                if right.split is not None and not right.split.plus and left.p is not None:
                    result.split = Split(None, (left.p,), right.split.minus).spread(result.shape)
        return result

    def _sub(self, x: FieldArray, y: FieldArray) -> FieldArray:
        result = self._linear(np.subtract, x, y)
        if result.q is None:
            right = _terms(y)
            self._split(result, _terms(x), right and right.negated(self.p, self.q))
        elif x.p is not None and y.p is not None:
            result.split = Split(None, (x.p,), (y.p,)).spread(result.shape)
        return result

    def _split(self, result: FieldArray, left: Split | None, right: Split | None) -> None:
        joined = left and right and left.joined(right, self.p, self.q)
        result.split = joined.spread(result.shape) if joined else None

    def _linear(self, op: Callable[..., Any], x: FieldArray, y: FieldArray) -> FieldArray:
        p = None if x.p is None or y.p is None else op(x.p, y.p) % self.p
        q = None if x.q is None or y.q is None else op(x.q, y.q) % self.q
        shadow = op(x.shadow, y.shadow)
        shadow = _exact_zeros(p if p is not None else q, shadow, lambda: np.abs(x.shadow) + np.abs(y.shadow))
        result = FieldArray(p, q, shadow)
        if self.careful:
            result.error = rounding.of_sum(shadow, x.error, y.error)
            _clear_zeros(result)
        return self._settle(result, x, y)

    def _neg(self, x: FieldArray) -> FieldArray:
        p = None if x.p is None else -x.p % self.p
        q = None if x.q is None else -x.q % self.q
        result = FieldArray(p, q, -x.shadow, x.marks, rooted=x.rooted, whole=x.whole, error=x.error)
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
        zero = result.shadow == 0
        if zero.any():
            self._note_beyond_floats(zero & (x.shadow != 0) & (y.shadow != 0))
        result.square_of = x if x is y else None
        if result.marks is not None:  # 0 times a number is 0, whether the field has that number or not
            nothing = _is_zero(x) & np.isfinite(y.shadow) | _is_zero(y) & np.isfinite(x.shadow)
            result.marks = np.where(nothing, result.marks & POLE, result.marks)
        return result

    def _product(self, x: FieldArray, y: FieldArray, shadow: Reals) -> FieldArray:
        p = None if x.p is None or y.p is None else x.p * y.p % self.p
        q = None if x.q is None or y.q is None else x.q * y.q % self.q
        result = FieldArray(p, q, shadow)
        differences = [
            (one, by) for one, by in ((x, y), (y, x)) if one.split and (one.split.is_difference or by.formal)
        ]
        if len(differences) == 1:
            one, by = differences[0]
            assert one.split is not None
            if by.p is not None and (p is not None or by.formal):
                factor = by.p if by.q is None else Known(by.p, by.q)
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
        )
        result = self._product(x, reciprocal, x.shadow / y.shadow)
        result.marks = _marked(UNDEFINED, broken)
        if self.careful:
            result.error = rounding.of_quotient(result.shadow, y.shadow, x.error, y.error)
        zero = result.shadow == 0
        if zero.any():
            self._note_beyond_floats(zero & (x.shadow != 0) & np.isfinite(y.shadow))
        return self._settle(result, x, y, poles=pole & ~broken)

    def _maximum(self, x: FieldArray, y: FieldArray) -> FieldArray:
        self._note_unclear(x, y)
        first = (x.shadow >= y.shadow) & ~settled_by_residues(y, x) | np.isnan(x.shadow)
        return self.where(~self.supposed.instead(~first, x, y), x, y)

    def _minimum(self, x: FieldArray, y: FieldArray) -> FieldArray:
        self._note_unclear(x, y)
        first = (x.shadow <= y.shadow) & ~settled_by_residues(x, y) | np.isnan(x.shadow)
        return self.where(self.supposed.instead(first, x, y), x, y)

    def _abs(self, x: FieldArray) -> FieldArray:
        self._note_unclear(x)
        result = self.where(self.supposed.instead(x.shadow < 0, x), self._neg(x), x)
        if not result.rooted and result.p is not None:
            finite = np.isfinite(x.shadow) & x.lacks(UNDEFINED)
            result.rooted = self._any_without_root(result.p[np.broadcast_to(finite, result.p.shape)])
        return result

    def _any_without_root(self, values: Residues) -> bool:
        """Whether some residue is no square; a piece at a time, since among numbers at random half are none."""
        pieces = (values[at : at + PIECE] for at in range(0, values.size, PIECE))
        return any(bool((power(piece, self.q, self.p) > 1).any()) for piece in pieces)

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
        underflow = (shadow == 0) & np.isfinite(x.shadow)
        self._note_beyond_floats(underflow)
        signed = ~x.lacks(SIGNED)
        marks = _joined(_marked(UNDEFINED, underflow), _marked(TWISTED, signed))
        result = FieldArray(p, None, shadow, marks, rooted=bool(signed.any()))
        if self.careful:
            result.error = rounding.of_function(np.exp, shadow, x.shadow, x.error)
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
        marks = _joined(_marked(SIGNED, positive & ~straight), _marked(UNDEFINED, positive & ~usable))
        result = FieldArray(None, q, np.log(x.shadow), marks)
        if self.careful:
            self._note_unclear(x)
            result.error = rounding.of_function(np.log, result.shadow, x.shadow, x.error)
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
        result = FieldArray(root, q, np.sqrt(real), _marked(TWISTED, twisted), rooted=True)
        if self.careful:
            self._note_unclear(x)
            result.error = rounding.of_function(_root, result.shadow, x.shadow, x.error)
        return self._settle(result, x, poles=real < 0)

    def _finite(self, x: FieldArray) -> FieldArray:
        infinite = np.isinf(x.shadow)
        return self.where(infinite, self.full((), 0.0), x) if infinite.any() else x

    def _invertible(self, x: FieldArray) -> FieldArray:
        bad = np.isinf(x.shadow) | (x.shadow == 0)
        return self.where(bad, self.full((), 1.0), x) if bad.any() else x

    def _tanh(self, x: FieldArray) -> FieldArray:
        """2 / (1 + exp(-2 x)) - 1 modulo p; uninterpreted modulo q, so that it can stand in an exponent."""
        one, two = self.full((), 1.0), self.full((), 2.0)
        # Where the exponential leaves the range of float64 its shadow is of no use here, and its residues are.
        within = np.where(np.isfinite(x.shadow), np.clip(x.shadow, -_SATURATED, _SATURATED), x.shadow)
        halves = self._add(one, self._exp(self._neg(self._mul(two, replace(x, shadow=within)))))
        result = self._sub(self._div(two, halves), one)
        opaque = self._opaque("tanh", [x])
        result.q, result.shadow, result.error = opaque.q, self._unsaturated("tanh", x), opaque.error
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
        split = x.split or _whole(x)
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

    def _sigmoid(self, x: FieldArray) -> FieldArray:
        half = self.full((), 0.5)
        result = self._mul(half, self._add(self.full((), 1.0), self._tanh(self._mul(half, x))))
        result.shadow = self._unsaturated("sigmoid", x)
        if self.careful:
            result.error = self._error_of("sigmoid", result.shadow, x)
        return result

    def _error_of(self, fn: str, result: Reals, x: FieldArray) -> Reals:
        return rounding.of_function(lambda at: self._floats.call(fn, [at]), result, x.shadow, x.error)

    def _unsaturated(self, fn: str, x: FieldArray) -> Reals:
        """The true values, told apart where they are 1 or -1 in float64."""
        shadow = np.asarray(self._floats.call(fn, [x.shadow]))
        saturated = np.abs(shadow) == 1
        hashes = self._hashes(fn, [x]) if saturated.any() else None
        if hashes is not None:
            self.saturated = self.saturated | self._by_trial(saturated)
        return shadow if hashes is None else np.where(saturated, shadow * _apart(hashes), shadow)

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
                apart = result.shadow * _apart(mixed)
            result.shadow = np.where(hashed, apart, result.shadow)
        if self.careful:
            self._note_open(fn, result, args)
        result.whole = fn in WHOLE
        return self._settle(result, *args, poles=np.True_)

    def _note_open(self, fn: str, result: FieldArray, args: Sequence[FieldArray]) -> None:
        """The error of an uninterpreted function, and trials in which it may have another sign, or another step."""
        if len(args) > 1:
            for arg in args:
                if arg.error is not None:
                    most = 0.5 if fn in ON_BITS else 0.0  # of whole numbers
                    self._note_beyond_floats(np.broadcast_to(arg.error > most, result.shape))
            return
        (x,) = args
        error = self._error_of(fn, np.asarray(self._floats.call(fn, [x.shadow])), x)
        if fn in STEPS or fn in ROUNDINGS:
            self._note_beyond_floats((error > 0.5) & ~self._is_half(x))
            error = UNIT * np.abs(result.shadow) + (0.0 if x.error is None else _APART * x.error)
        else:
            self._note_beyond_floats((np.abs(result.shadow) <= error) & (error > 0) & ~_is_zero(x))
        result.error = error

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

    def _note_unclear(self, x: FieldArray, y: FieldArray | None = None) -> None:
        """Trials in which rounding leaves open which of two different numbers is the greater; of one and 0, where there
        is one."""
        if y is None:
            unclear = rounding.unclear(x.shadow, 0.0, x.error)
            if unclear is not None and unclear.any():
                self._note_beyond_floats(unclear & ~_is_zero(x))
            return
        unclear = rounding.unclear(x.shadow, y.shadow, x.error, y.error)
        if unclear is not None and unclear.any():
            self._note_beyond_floats(unclear & ~self._same(x, y))

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

    def _key(self, fn: str) -> int:
        return crc32(fn.encode()) * 0x9E3779B97F4A7C15 + self._seed * 0xD1B54A32D192ED03 + 1

    def _from_shadow(self, integers: Reals, x: FieldArray) -> FieldArray:
        """What depends on the shadow alone. Of NaN it may be a number (the sign of NaN is 0), but not one to compare."""
        self._note_unclear(x)
        if self.supposed:
            below = self.supposed.instead(integers < 0, x)
            integers = np.where(below, -1.0, np.where(integers < 0, 1.0, integers))
        result = self.lift(np.nan_to_num(integers))
        result.shadow, result.marks = integers, _joined(x.marks, _marked(UNDEFINED, np.isnan(x.shadow)))
        return result

    def _settle(
        self, result: FieldArray, *args: FieldArray, poles: Truths | np.bool_ | None = None
    ) -> FieldArray:
        """Marks overflow of the shadow, clears residues of infinities and NaN, joins the marks.

        `poles` are elements where finite arguments rightly give an infinity or NaN.
        """
        result.marks = _joined(result.marks, *(arg.marks for arg in args), shape=result.shape)
        result.rooted = result.rooted or any(arg.rooted for arg in args)
        finite = np.isfinite(result.shadow)
        if not finite.all():
            special = ~finite
            result.p = None if result.p is None else np.where(special, 0, result.p)
            result.q = None if result.q is None else np.where(special, 0, result.q)
            if result.error is not None:  # an infinity that is no overflow, which is noted below, is exact
                result.error = np.where(special, 0.0, result.error)
            made = special
            for arg in args:
                made = made & np.isfinite(arg.shadow)
            poles = made & (np.False_ if poles is None else poles)
            self._note_beyond_floats(made & ~poles)
            marks = _marked(UNDEFINED, made & ~poles), _marked(POLE, poles)
            result.marks = _joined(result.marks, *marks, shape=result.shape)
        return result

    def _note_beyond_floats(self, elements: Truths) -> None:
        """What has no dimension of trials counts for all of them."""
        if elements.any():
            self.beyond_floats = self.beyond_floats | self._by_trial(elements)

    def _by_trial(self, elements: Truths) -> Truths:
        batched = elements.ndim and (self.trials is None or elements.shape[0] == self.trials)
        return (
            np.asarray(elements.reshape(elements.shape[0], -1).any(1)) if batched else np.ones(1, dtype=bool)
        )

    # Order

    def compare(self, fn: str, left: FieldArray, right: FieldArray) -> Truths:
        if fn in ("gt", "ge"):
            return self.compare({"gt": "lt", "ge": "le"}[fn], right, left)
        same = self._same(left, right)
        self._note_unclear(left, right)
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
        exact: Truths = left.shadow == right.shadow
        for x, y in ((left.p, right.p), (left.q, right.q)):
            if x is not None and y is not None:
                finite = np.isfinite(left.shadow) & np.isfinite(right.shadow)
                return np.where(finite, x == y, exact)
        return exact

    def where(self, condition: Truths, left: FieldArray, right: FieldArray) -> FieldArray:
        p = None if left.p is None or right.p is None else np.where(condition, left.p, right.p)
        q = None if left.q is None or right.q is None else np.where(condition, left.q, right.q)
        result = FieldArray(p, q, np.where(condition, left.shadow, right.shadow))
        if left.marks is not None or right.marks is not None:
            none = np.uint8(0)
            marks = (none if side.marks is None else side.marks for side in (left, right))
            result.marks = np.broadcast_to(np.where(condition, *marks), result.shape)
        if left.split is not None or right.split is not None:
            sides = [_terms(side) if q is None else side.split or _whole(side) for side in (left, right)]
            if sides[0] is not None and sides[1] is not None:
                result.split = chosen(condition, sides[0], sides[1]).spread(result.shape)
        result.rooted = left.rooted or right.rooted
        result.whole = left.whole and right.whole
        if left.error is not None or right.error is not None:
            error = rounding.chosen(condition, left.error, right.error)
            result.error = np.broadcast_to(error, result.shape)
        return result

    def reduce(self, op: str, value: FieldArray, axis: int) -> FieldArray:
        self.interpreted.add(op)
        count = value.shape[axis]
        rest = value.shape[:axis] + value.shape[axis:][1:]
        if count == 0:
            return self.full(rest, REDUCTIONS[op])
        match op:
            case "sum":
                return self._sum(value, axis)
            case "prod":
                index = [slice(None)] * axis
                parts = [self.take(value, (*index, at)) for at in range(count)]
                found = reduce(lambda x, y: self.call("mul", [x, y]), parts)
                found.split = None  # it would tell of the last factors alone
                return found
            case "max" | "min":
                at = np.expand_dims(extreme(op, self._in_order(value), axis), axis)
                self._note_extremes(op, at, count)
                if value.error is not None:
                    self._note_unclear(value, value.each(partial(np.take_along_axis, indices=at, axis=axis)))
                return value.each(lambda part: np.take_along_axis(part, at, axis).reshape(rest))
        raise ValueError(f"{op} is not a reduction")

    def _in_order(self, value: FieldArray) -> FieldArray:
        """The value with shadows in the order of its finite numbers, where one is supposed of all."""
        residue = value.q if value.p is None else value.p
        if residue is None or not self.supposed.ranked:
            return value
        finite = np.isfinite(value.shadow)
        return replace(value, shadow=np.where(finite, self.supposed.ranks(residue), value.shadow))

    def _sum(self, value: FieldArray, axis: int) -> FieldArray:
        p = None if value.p is None else value.p.sum(axis) % self.p
        q = None if value.q is None else value.q.sum(axis) % self.q
        with np.errstate(all="ignore"):
            shadow = value.shadow.sum(axis)
            shadow = _exact_zeros(p if p is not None else q, shadow, lambda: np.abs(value.shadow).sum(axis))
        result = FieldArray(p, q, np.asarray(shadow))
        if self.careful:
            result.error = rounding.of_line(value.shadow, value.error, axis)
            _clear_zeros(result)
        return self._settle(result, _line(value, axis))

    def is_finite(self, value: FieldArray) -> bool:
        return (value.marks is None or not value.marks.any()) and bool(np.isfinite(value.shadow).all())

    def contract(self, left: FieldArray, right: FieldArray, axis: int) -> FieldArray:
        """As matrix products, which make no products of single elements, where the two sides differ in shape."""
        sums = Contraction.of(left.shape, right.shape, axis)
        if sums is None:
            return self.reduce("sum", self.call("mul", [left, right]), axis)
        self.interpreted |= {"mul", "sum"}
        p = (
            None
            if left.p is None or right.p is None
            else sums(left.p, right.p, partial(matmul, modulus=self.p))
        )
        q = (
            None
            if left.q is None or right.q is None
            else sums(left.q, right.q, partial(matmul, modulus=self.q))
        )
        with np.errstate(all="ignore"):
            shadow = sums(left.shadow, right.shadow, np.matmul)
            residue = p if p is not None else q
            shadow = _exact_zeros(
                residue, shadow, lambda: sums(np.abs(left.shadow), np.abs(right.shadow), np.matmul)
            )
        lines = [_line(left, axis), _line(right, axis)]
        result = FieldArray(p, q, shadow)
        if self.careful:
            result.error = self._error_of_products(left, right, axis, sums)
            _clear_zeros(result)
        return self._settle(result, *lines)

    @staticmethod
    def _error_of_products(left: FieldArray, right: FieldArray, axis: int, sums: Contraction) -> Reals:
        sizes = np.abs(left.shadow), np.abs(right.shadow)
        with np.errstate(all="ignore"):
            error: Reals = UNIT * (left.shape[axis] + 1) * sums(*sizes, np.matmul)
            if left.error is not None:
                error = error + sums(left.error, sizes[1], np.matmul)
            if right.error is not None:
                error = error + sums(sizes[0], right.error, np.matmul)
        return np.where(np.isnan(error), np.inf, error)  # 0 times an error without a bound, among others

    def _note_extremes(self, op: str, at: npt.NDArray[np.int64], count: int) -> None:
        if count >= 3:
            thirds = np.where(at == 0, 0, np.where(at == count - 1, 2, 1))
            seen = self.extremes.setdefault(op, np.zeros(3, dtype=np.int64))
            seen += np.bincount(thirds.ravel(), minlength=3)

    # Shapes

    def shape(self, value: FieldArray) -> tuple[int, ...]:
        return value.shape

    def reshape(self, value: FieldArray, shape: tuple[int, ...]) -> FieldArray:
        return value.each(lambda part: part.reshape(shape))

    def transpose(self, value: FieldArray, order: Sequence[int]) -> FieldArray:
        return value.each(lambda part: part.transpose(order))

    def broadcast(self, value: FieldArray, shape: tuple[int, ...]) -> FieldArray:
        return value.each(lambda part: np.broadcast_to(part, shape))

    def take(self, value: FieldArray, index: tuple[Any, ...]) -> FieldArray:
        return value.each(lambda part: np.asarray(part[index]))

    def put(self, target: FieldArray, index: tuple[Any, ...], value: FieldArray) -> None:
        terms = _terms(target), _terms(value)
        if target.split is None and value.split is None:
            terms = None, None
        if target.marks is None and value.marks is not None:
            target.marks = np.zeros(target.shape, dtype=np.uint8)
        target.p = _put(target.p, index, value.p)
        target.q = _put(target.q, index, value.q)
        target.shadow = _put(target.shadow, index, value.shadow)
        if target.marks is not None:
            none = np.zeros(value.shape, dtype=np.uint8)
            target.marks = _put(target.marks, index, none if value.marks is None else value.marks)
        if target.error is not None or value.error is not None:
            errors = (np.zeros(each.shape) if each.error is None else each.error for each in (target, value))
            target.error = _put(next(errors), index, next(errors))
        before, new = terms
        target.split = placed(before, index, new, target.shape) if before and new else None
        target.rooted = target.rooted or value.rooted
        target.whole, target.square_of = target.whole and value.whole, None


def _put(target: Any, index: tuple[Any, ...], value: Any) -> Any:
    if target is None or value is None:
        return None
    if not target.flags.writeable:
        target = target.copy()
    target[index] = value
    return target


def _exact_zeros(residue: Residues | None, shadow: Reals, scale: Callable[[], Reals]) -> Reals:
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


def _root(x: Any) -> Any:
    return np.sqrt(np.maximum(x, 0.0))


def _clear_zeros(value: FieldArray) -> None:
    """Makes 0, without an error, what is 0 by its residue and as far as its rounding error tells."""
    residue = value.p if value.p is not None else value.q
    if residue is None or value.error is None:
        return
    with np.errstate(invalid="ignore"):
        zero = (residue == 0) & (np.abs(value.shadow) <= value.error) & np.isfinite(value.shadow)
    if zero.any():
        value.shadow = np.where(zero, 0.0, value.shadow)
        value.error = np.where(zero, 0.0, value.error)


def _is_zero(x: FieldArray) -> Truths:
    """Where a value is 0, and not for want of a residue."""
    zero: Truths = (x.shadow == 0) & x.lacks(UNDEFINED)
    return zero & (x.p == 0) if x.p is not None else np.zeros_like(zero)


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
    """Where the greatest or least element of every line is; a NaN counts as such."""
    first = np.argmax if op == "max" else np.argmin
    at: npt.NDArray[np.intp] = first(value.shadow, axis=axis)
    residue = value.q if value.p is None else value.p
    best = np.take_along_axis(value.shadow, np.expand_dims(at, axis), axis)
    tied = value.shadow == best
    if residue is None or not ((tied.sum(axis) > 1) & np.squeeze(best != 0, axis)).any():
        return at
    among = np.where(tied, residue, -1 if op == "max" else np.iinfo(residue.dtype).max)
    settled = np.squeeze(np.isfinite(best) & (best != 0), axis)
    return np.where(settled, first(among, axis=axis), at)


def _apart(hashes: Residues) -> Reals:
    """Factors that differ where hashes do, a little below 1."""
    return 1.0 - _APART * (hashes / 2.0**62)


def _marked(mark: np.uint8, elements: Truths | np.bool_) -> Marks | None:
    return np.asarray(elements * mark) if elements.any() else None


def _any_mark(marks: Marks | None, axis: int) -> Marks | None:
    return None if marks is None else np.asarray(np.bitwise_or.reduce(marks, axis))


def _line(value: FieldArray, axis: int) -> FieldArray:
    """What a sum along an axis inherits: marks, and whether all of the line is finite."""
    shadow = np.where(np.isfinite(value.shadow).all(axis), 0.0, np.nan)
    return FieldArray(None, None, shadow, _any_mark(value.marks, axis), rooted=value.rooted)


def _joined(*marks: Marks | None, shape: tuple[int, ...] | None = None) -> Marks | None:
    known = [mark for mark in marks if mark is not None]
    if not known:
        return None
    joined: Marks = reduce(np.bitwise_or, known)
    return joined if shape is None or joined.shape == shape else np.broadcast_to(joined, shape)


def _terms(x: FieldArray) -> Split | None:
    """What the exponential of `x` is the product of; None where nothing is known."""
    if x.q is not None:
        return Split(Known(x.p, x.q), (), ())
    return x.split or _whole(x)


def _whole(x: FieldArray) -> Split | None:
    return None if x.p is None else Split(None, (x.p,), ())


@lru_cache(maxsize=4)
def _root_of_minus_one(p: int) -> int:
    """An i with i * i = -1, modulo a prime that is 1 modulo 4."""
    found = (pow(base, (p - 1) // 4, p) for base in range(2, p))
    return next(i for i in found if i * i % p == p - 1)


@lru_cache(maxsize=4096)
def _rational(number: float, modulus: int) -> int:
    """A number as its shortest decimal modulo a prime (0.1 is 1/10); 0 for infinities and NaN."""
    if not np.isfinite(number):
        return 0
    exact = Fraction(repr(float(number)))
    return exact.numerator * pow(exact.denominator, -1, modulus) % modulus
