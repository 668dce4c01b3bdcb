"""Cotangents as sums of monomials: what the chain rule multiplies is collected, cancelled and factored here.

    polynomial ::= sum of monomials
    monomial   ::= number * product of atom ** integer, where every one of its masks holds, else 0

An atom is any expression that is neither a product, a quotient nor a number: a read, a function, a difference.
Differences are not taken apart: `(x - mean)` stays one atom, since the difference of two sums would cancel.

A mask stands around the whole monomial, not around one of its factors: `where(x > 0, dy / x, 0)` has no 0 / 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, reduce

from eqfuse.terms.nodes import Call, Const, Expr, Load, call, free_axes, substitute_axes, walk

ZERO, ONE = Const(0), Const(1)


@dataclass(frozen=True)
class Monomial:
    """`number * product(atom ** exponent)` where all `masks` hold, 0 elsewhere. A factor with which the number would have
    more digits than a float has is an atom."""

    number: Fraction
    powers: Mapping[Expr, int]
    masks: tuple[Expr, ...] = ()

    @property
    def key(self) -> tuple[frozenset[tuple[Expr, int]], tuple[Expr, ...]]:
        """What two monomials that add up to one share."""
        return frozenset(self.powers.items()), self.masks

    def times(self, other: Monomial) -> Monomial:
        number, powers = self.number * other.number, dict(self.powers)
        apart: dict[Expr, int] = {}
        if _ratio(abs(number)) is None and (ratio := _ratio(abs(other.number))) is not None:
            number = self.number if other.number > 0 else -self.number
            apart = {part: n for part, n in zip(ratio, (1, -1), strict=True) if part is not ONE}
        for atom, exponent in (*other.powers.items(), *apart.items()):
            powers[atom] = powers.get(atom, 0) + exponent
        _divide_by_roots(powers)
        kept = {atom: exponent for atom, exponent in powers.items() if exponent}
        masks = tuple(dict.fromkeys((*self.masks, *other.masks)))
        return Monomial(number, kept, masks)

    def with_factors_of(self, atom: Expr, value: Monomial) -> Monomial:
        """The monomial with the value of an atom in its place."""
        exponent = self.powers.get(atom, 0)
        found = self.times(Monomial(Fraction(1), {atom: -exponent}))
        for _ in range(abs(exponent)):
            found = found.times(value if exponent > 0 else _inverse(value))
        return found

    def masked(self, *masks: Expr) -> Monomial:
        """Where these masks hold as well."""
        return replace(self, masks=tuple(dict.fromkeys((*masks, *self.masks))))

    @property
    def axes(self) -> frozenset[str]:
        return frozenset[str]().union(*map(free_axes, (*self.powers, *self.masks)))

    def mapped(self, change: Callable[[Expr], Expr]) -> Monomial:
        """The same change made to every atom and every mask."""
        made = Monomial(self.number, {}, tuple(map(change, self.masks)))
        for atom, exponent in self.powers.items():
            made = made.times(Monomial(Fraction(1), {change(atom): exponent}))
        return made


def _divide_by_roots(powers: dict[Expr, int]) -> None:
    """A number over its root is the root, and a root over its number one over the root: so at 0, where quotients are NaN."""
    for root, exponent in list(powers.items()):
        match root:
            case Call("sqrt", (number,)) if powers.get(number, 0) * exponent < 0:
                halves = 2 * powers[number] + exponent
                powers[number] = int(halves / 2)
                powers[root] = halves - 2 * powers[number]


UNIT = Monomial(Fraction(1), {})
Polynomial = tuple[Monomial, ...]


def atom(expr: Expr) -> Polynomial:
    """An expression as one atom."""
    return (Monomial(Fraction(1), {expr: 1}),)


def product(expr: Expr) -> Monomial:
    """An expression as a monomial: products, quotients and numbers are taken apart."""
    match expr:
        case Const(value) if not isinstance(value, bool) and math.isfinite(value):
            return Monomial(Fraction(repr(value)), {})
        case Call("neg", (part,)):
            return _scaled(product(part), -1)
        case Call("mul", (left, right)):
            return product(left).times(product(right))
        case Call("div", (left, right)) if (below := product(right)).number:
            return product(left).times(_inverse(below))
        case Call("sq", (part,)):
            return product(part).times(product(part))
        case _:
            return Monomial(Fraction(1), {expr: 1})


def _scaled(monomial: Monomial, number: int) -> Monomial:
    return replace(monomial, number=monomial.number * number)


def _inverse(monomial: Monomial) -> Monomial:
    powers = {atom: -exponent for atom, exponent in monomial.powers.items()}
    return Monomial(1 / monomial.number, powers)


def multiplied(polynomial: Polynomial, factor: Expr) -> Polynomial:
    """`polynomial * factor`. A factor `where(c, a, b)` of numbers, or `where(c, 0, b)`, becomes masks."""
    factors = _alternatives(factor)
    return collected(term.times(other) for term in polynomial for other in factors)


def _alternatives(factor: Expr) -> Polynomial:
    match factor:
        case Call("where", (condition, left, right)) if _is_numeric(left) and (
            _is_numeric(right) or left == ZERO
        ):
            yes = tuple(term.masked(condition) for term in _alternatives(left))
            no = tuple(term.masked(call("not", condition)) for term in _alternatives(right))
            return collected((*yes, *no))
        case _:
            return collected((product(factor),))


def _is_numeric(expr: Expr) -> bool:
    match expr:
        case Const():
            return True
        case Call("where", (_, left, right)):
            return _is_numeric(left) and _is_numeric(right)
        case _:
            return False


def collected(terms: Iterable[Monomial]) -> Polynomial:
    """The sum of the monomials, equal ones added up; those that are 0 are left out."""
    found: dict[object, Monomial] = {}
    for term in terms:
        if _is_contradiction(term.masks):
            continue
        known = found.get(term.key)
        found[term.key] = term if known is None else replace(known, number=known.number + term.number)
    return tuple(term for term in found.values() if term.number)


def _is_contradiction(masks: tuple[Expr, ...]) -> bool:
    return any(call("not", mask) in masks for mask in masks)


def substituted(polynomial: Polynomial, axes: Mapping[str, Expr]) -> Polynomial:
    """The polynomial at other positions."""
    return collected(term.mapped(lambda expr: substitute_axes(expr, axes)) for term in polynomial)


def expression(polynomial: Polynomial) -> Expr:
    """The polynomial as an expression: common factors in front, one `where` for each set of masks."""
    if not polynomial:
        return Const(0.0)
    groups: dict[tuple[Expr, ...], list[Monomial]] = {}
    for term in polynomial:
        groups.setdefault(term.masks, []).append(term)
    parts = [_guarded(masks, _factored(terms)) for masks, terms in groups.items()]
    return reduce(_plus, parts)


def _guarded(masks: tuple[Expr, ...], value: Expr) -> Expr:
    """Masks of positions stand outside of those that read something: they guard what is read."""
    reading = tuple(mask for mask in masks if any(isinstance(node, Load) for node in walk(mask)))
    for group in (reading, tuple(mask for mask in masks if mask not in reading)):
        if group:
            value = call("where", reduce(lambda a, b: call("and", a, b), group), value, ZERO)
    return value


def _factored(terms: list[Monomial]) -> Expr:
    if len(terms) == 1:
        return written(terms[0])
    common = shared(terms)
    rest = [term.times(_inverse(common)) for term in terms]
    first = _scaled(common, -1) if rest[0].number < 0 and all(term.number < 0 for term in rest) else common
    if first is not common:
        rest = [_scaled(term, -1) for term in rest]
    # In the order of the terms, but numbers last: x - a + 1 is 1 where x and a are 1e20, and 1 - a + x is 0.
    rest.sort(key=lambda term: not term.powers)
    if rest[0].number < 0 < rest[1].number:
        rest[:2] = rest[1], rest[0]
    total = reduce(_plus, [written(replace(term, masks=())) for term in rest])
    return total if first.key == UNIT.key and first.number == 1 else _times(first, total)


def shared(terms: Iterable[Monomial]) -> Monomial:
    """The greatest monomial that divides all of them: each atom to its least exponent, without a mask."""
    every = list(terms)
    powers: dict[Expr, int] = {}
    for factor in every[0].powers:
        exponents = [term.powers.get(factor, 0) for term in every]
        least = min(exponents) if min(exponents) > 0 else min(0, max(exponents))
        if least:
            powers[factor] = least
    numbers = {abs(term.number) for term in every}
    return Monomial(numbers.pop() if len(numbers) == 1 else Fraction(1), powers)


def _times(monomial: Monomial, value: Expr) -> Expr:
    return written(monomial.times(Monomial(Fraction(1), {value: 1})))


def _plus(left: Expr, right: Expr) -> Expr:
    positive = _positive(right)
    return call("add", left, right) if positive is None else call("sub", left, positive)


def _positive(expr: Expr) -> Expr | None:
    """What a product with a minus in front of it is without; None where it has none."""
    match expr:
        case Call("neg", (part,)):
            return part
        case Const(value) if value < 0:
            return Const(-value)
        case Call("mul" | "div" as fn, (first, second)):
            inner = _positive(first)
            return None if inner is None else call(fn, inner, second)
        case _:
            return None


def written(monomial: Monomial) -> Expr:
    """A monomial as a product over a product; its masks are left out."""
    above = [part for atom, n in monomial.powers.items() if n > 0 for part in _power(atom, n)]
    below = [part for atom, n in monomial.powers.items() if n < 0 for part in _power(atom, -n)]
    size = abs(monomial.number)
    number = _number(size)
    if number is None:
        top, bottom = _ratio(size) or (Const(size.numerator), Const(size.denominator))
        above, below = _with(top, above), _with(bottom, below)
    elif size != 1 or not above:
        inverted = Fraction(1) / size
        if above and inverted.denominator == 1 < size.denominator < LARGEST:
            below = [Const(inverted.numerator), *below]
        else:
            above = [number, *above]
    over = reduce(lambda a, b: call("mul", a, b), above or [ONE])
    if monomial.number < 0:
        over = _negated(over)
    return reduce(lambda a, b: call("div", a, b), below, over) if len(below) < 2 else _over(over, below)


def _with(number: Const, factors: list[Expr]) -> list[Expr]:
    return factors if number is ONE else [number, *factors]


def _over(over: Expr, below: list[Expr]) -> Expr:
    return call("div", over, reduce(lambda a, b: call("mul", a, b), below))


def _negated(expr: Expr) -> Expr:
    """`-(a * b)` as `-a * b`."""
    match expr:
        case Const(value):
            return Const(-value)
        case Call("mul", (left, right)):
            return call("mul", _negated(left), right)
        case _:
            return call("neg", expr)


def _power(factor: Expr, exponent: int) -> list[Expr]:
    if exponent == 1:
        return [factor]
    return [call("sq", factor)] * (exponent // 2) + [factor] * (exponent % 2)


LARGEST = 2**53
"""Integers below it are floats."""


def _number(size: Fraction) -> Const | None:
    """A number as it is written, where it is one: 3 or 0.25, but not 1/3."""
    if size.denominator == 1 and size.numerator < LARGEST:
        return Const(size.numerator)
    try:
        value = float(size)
    except OverflowError:
        return None
    return Const(value) if math.isfinite(value) and Fraction(repr(value)) == size else None


@lru_cache(4096)
def _ratio(size: Fraction) -> tuple[Const, Const] | None:
    """A number as one that is written over another: 1 / 3, 0.72 / 2.8284271247461903; None where floats have too few
    digits."""
    if (number := _number(size)) is not None:
        return number, ONE
    if size.numerator < LARGEST and size.denominator < LARGEST:
        return Const(size.numerator), Const(size.denominator)
    digits = len(str(min(size.numerator, size.denominator))) - 1
    for shift in sorted(range(2 * digits + 1), key=lambda shift: abs(shift - digits)):
        over, under = (_number(Fraction(part, 10**shift)) for part in (size.numerator, size.denominator))
        if over is not None and under is not None:
            return over, under
    return None
