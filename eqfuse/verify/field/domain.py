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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.terms.definitions import evaluated
from eqfuse.terms.domain import Watch
from eqfuse.terms.functions import CASTS, FUNCTIONS
from eqfuse.terms.nodes import REDUCTIONS
from eqfuse.threads import cached
from eqfuse.verify.contraction import Contraction
from eqfuse.verify.field import rounding
from eqfuse.verify.field.array import (
    FieldArray,
    clear_zeros,
    exact_zeros,
    extreme,
    line_of,
    open_sign,
    places_in,
    put_at,
    terms_of,
)
from eqfuse.verify.field.exponent_sums import placed
from eqfuse.verify.field.homomorphisms import Homomorphisms
from eqfuse.verify.field.modular import Reals, matmul
from eqfuse.verify.field.rounding import UNIT


class FieldDomain(Homomorphisms):
    """Implements `terms.domain.Domain` (see `FieldState` for what it notes)."""

    name = "field"
    watch: Watch | None = None
    orders = True

    @cached
    def _table(self) -> Mapping[str, Callable[..., FieldArray]]:
        """What the field has of functions."""
        circular = {"sin": self._sin, "cos": self._cos} if self._i else {}
        return {
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
            **circular,
        }

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
                lines = np.ogrid[tuple(map(slice, at.shape))]
                found = value.each(itemgetter((*lines[:axis], at, *lines[axis + 1 :])))
                if value.error is not None:
                    unclear = self._unclear(value, found)
                    if unclear.any():
                        errors = np.where(unclear, value.error, 0.0).max(axis, keepdims=True)
                        self._mark_open(found, np.asarray(unclear.any(axis, keepdims=True)), errors)
                return found.each(lambda part: part.reshape(rest))
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
            shadow = exact_zeros(p if p is not None else q, shadow, lambda: np.abs(value.shadow).sum(axis))
        result = FieldArray(p, q, np.asarray(shadow))
        if self.careful:
            result.error = rounding.of_line(value.shadow, value.error, axis)
            clear_zeros(result)
        return self._settle(result, line_of(value, axis))

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
            shadow = exact_zeros(
                residue, shadow, lambda: sums(np.abs(left.shadow), np.abs(right.shadow), np.matmul)
            )
        lines = [line_of(left, axis), line_of(right, axis)]
        result = FieldArray(p, q, shadow)
        if self.careful:
            result.error = self._error_of_products(left, right, axis, sums)
            for one, by in (
                (np.isinf(left.shadow), open_sign(right)),
                (open_sign(left), np.isinf(right.shadow)),
            ):
                if one.any() and by.any():
                    self._note_undecided(sums(one.astype(np.float64), by.astype(np.float64), np.matmul) > 0)
            clear_zeros(result)
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

    def shape(self, value: FieldArray) -> tuple[int, ...]:
        return value.shape

    def reshape(self, value: FieldArray, shape: tuple[int, ...]) -> FieldArray:
        return value.each(lambda part: part.reshape(shape))

    def transpose(self, value: FieldArray, order: Sequence[int]) -> FieldArray:
        return value.each(lambda part: part.transpose(order))

    def broadcast(self, value: FieldArray, shape: tuple[int, ...]) -> FieldArray:
        return value.each(lambda part: np.broadcast_to(part, shape))

    def take(self, value: FieldArray, index: tuple[Any, ...]) -> FieldArray:
        places = places_in(value.shape, index)
        if places is None:
            return value.each(lambda part: np.asarray(part[index]))
        lines = value.shape[0], math.prod(value.shape[1:])
        return value.each(lambda part: part.reshape(lines).take(places, axis=1))

    def put(self, target: FieldArray, index: tuple[Any, ...], value: FieldArray) -> None:
        terms = terms_of(target), terms_of(value)
        if target.split is None and value.split is None:
            terms = None, None
        if target.marks is None and value.marks is not None:
            target.marks = np.zeros(target.shape, dtype=np.uint8)
        target.p = put_at(target.p, index, value.p)
        target.q = put_at(target.q, index, value.q)
        target.shadow = put_at(target.shadow, index, value.shadow)
        if target.marks is not None:
            none = np.zeros(value.shape, dtype=np.uint8)
            target.marks = put_at(target.marks, index, none if value.marks is None else value.marks)
        if target.error is not None or value.error is not None:
            errors = (np.zeros(each.shape) if each.error is None else each.error for each in (target, value))
            target.error = put_at(next(errors), index, next(errors))
        before, new = terms
        target.split = placed(before, index, new, target.shape) if before and new else None
        target.rooted = target.rooted or value.rooted
        target.whole, target.square_of, target.square = target.whole and value.whole, None, None
