"""How a value was written as a sum, so that its exponential is a product although its residue modulo q is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from eqfuse.verify.field.modular import Residues, Truths

MOST = 6
"""Terms that are kept apart; a longer sum is one value."""


class KnownPart(NamedTuple):
    """The part of a sum that has a residue modulo q, and modulo p unless a logarithm is in it."""

    p: Residues | None
    q: Residues


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """`known` + the sum of `plus` - the sum of `minus`, which are residues modulo p. All have one shape.

    The split of a value whose own residue modulo q is known has no `known`: it says how the value is a difference
    where a factor without that residue multiplies it.
    """

    known: KnownPart | None
    plus: tuple[Residues, ...]
    minus: tuple[Residues, ...]

    @property
    def is_difference(self) -> bool:
        return bool(self.minus)

    def each(self, change: Callable[[Residues], Residues]) -> Split:
        """The same change of every component."""
        known = self.known
        if known is not None:
            known = KnownPart(None if known.p is None else change(known.p), change(known.q))
        return Split(known, tuple(map(change, self.plus)), tuple(map(change, self.minus)))

    def spread(self, shape: tuple[int, ...]) -> Split:
        return self.each(lambda part: part if part.shape == shape else np.broadcast_to(part, shape))

    def negated(self, p: int, q: int) -> Split:
        known = self.known
        if known is not None:
            known = KnownPart(None if known.p is None else -known.p % p, -known.q % q)
        return Split(known, self.minus, self.plus)

    def added(self, other: Split, p: int, q: int) -> Split | None:
        """The sum of two; None where it has too many terms."""
        plus, minus = (*self.plus, *other.plus), (*self.minus, *other.minus)
        if len(plus) + len(minus) > MOST:
            return None
        known = self.known or other.known
        if self.known is not None and other.known is not None:
            (left, one), (right, two) = self.known, other.known
            total = None if left is None or right is None else (left + right) % p
            known = KnownPart(total, (one + two) % q)
        return Split(known, plus, minus)

    def scaled(self, factor: KnownPart | Residues, p: int, q: int) -> Split | None:
        """The product with a factor, term by term; None where a term has no residue that is needed."""
        by = factor.p if isinstance(factor, KnownPart) else factor
        if by is None:
            return None
        plus, minus = ([part * by % p for part in parts] for parts in (self.plus, self.minus))
        if self.known is None:
            return Split(None, tuple(plus), tuple(minus))
        product = None if self.known.p is None else self.known.p * by % p
        if isinstance(factor, KnownPart):
            return Split(KnownPart(product, self.known.q * factor.q % q), tuple(plus), tuple(minus))
        return None if product is None else Split(None, (product, *plus), tuple(minus))


def chosen(condition: Truths, left: Split, right: Split) -> Split:
    """Position by position one of two splits; what one has more of is 0 in the other."""
    zero = np.zeros((), dtype=np.int64)

    def choose(one: Residues | None, other: Residues | None) -> Residues:
        return np.where(condition, zero if one is None else one, zero if other is None else other)

    def pairs(ones: tuple[Residues, ...], others: tuple[Residues, ...]) -> tuple[Residues, ...]:
        return tuple(choose(*pair) for pair in zip_longest(ones, others))

    known = None
    if left.known is not None or right.known is not None:
        first, second = left.known or KnownPart(zero, zero), right.known or KnownPart(zero, zero)
        lost = first.p is None or second.p is None
        known = KnownPart(None if lost else choose(first.p, second.p), choose(first.q, second.q))
    return Split(known, pairs(left.plus, right.plus), pairs(left.minus, right.minus))


def placed(target: Split, index: tuple[Any, ...], value: Split, shape: tuple[int, ...]) -> Split:
    """How an array of a shape is written where the value is put at an index of it."""
    here = np.zeros(shape, dtype=bool)
    here[index] = True

    def put(part: Residues) -> Residues:
        found = np.zeros(shape, dtype=np.int64)
        found[index] = part
        return found

    return chosen(here, value.each(put), target.spread(shape))
