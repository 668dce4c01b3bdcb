"""Sides of conditions on positions and sizes that nothing takes, by proof.

A condition is looked at as a difference that is affine in positions, sizes and in what is rounded down or a remainder; a
choice by a condition that is always the same is what it chooses, a whole number is rounded to itself, and squares, absolute values,
extremes and casts of numbers are numbers. Of other extremes, absolute values and sums limits follow from those of their parts. A
position of an axis is between 0 and its size less 1, a size with a position is 1 or more, a remainder by n is between 0 and
n - 1. Where the greatest value of the difference at any sizes is below 0, or its least above, the condition is always the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import CASTS, COMPARISONS
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Size, call

K = TypeVar("K")
_OF_NUMBERS = frozenset({"sq", "abs", "maximum", "minimum", *CASTS})
"""Functions of numbers that are taken."""


@dataclass(frozen=True)
class _Sum:
    """A number plus multiples of positions, of sizes, and of whole numbers between two limits. A position is known by its
    axis, and the axis whose size it has."""

    number: float = 0.0
    positions: Mapping[tuple[str, str], float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[Expr, tuple[float, float, float]] = field(default_factory=dict)

    def plus(self, other: _Sum, factor: float = 1.0) -> _Sum:
        def joined(mine: Mapping[K, float], theirs: Mapping[K, float]) -> dict[K, float]:
            names = dict.fromkeys((*mine, *theirs))
            return {name: mine.get(name, 0.0) + factor * theirs.get(name, 0.0) for name in names}

        others = dict(self.others)
        for expr, (times, low, high) in other.others.items():
            others[expr] = others.get(expr, (0.0, low, high))[0] + factor * times, low, high
        return _Sum(
            self.number + factor * other.number,
            joined(self.positions, other.positions),
            joined(self.sizes, other.sizes),
            others,
        )

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole number at all positions and sizes."""
        times = (each for each, _, _ in self.others.values())
        return all(
            each.is_integer()
            for each in (self.number, *self.positions.values(), *self.sizes.values(), *times)
        )

    @property
    def constant(self) -> float | None:
        """The number that it is; None where it is not known to be one."""
        times = (each for each, _, _ in self.others.values())
        return None if any((*self.positions.values(), *self.sizes.values(), *times)) else self.number

    def most(self) -> float:
        """Not below the greatest value at any sizes."""
        number, sizes = self.number, dict(self.sizes)
        for (_, axis), times in self.positions.items():
            if times > 0:  # the last position
                number -= times
                sizes[axis] = sizes.get(axis, 0.0) + times
        for times, low, high in self.others.values():
            number += max(times * low, times * high) if times else 0.0
        return math.inf if any(times > 0 for times in sizes.values()) else number + sum(sizes.values())

    def least(self) -> float:
        """Not above the least value at any sizes."""
        return -_Sum().plus(self, -1.0).most()


def truth(node: Expr, domains: Mapping[str, str]) -> bool | None:
    """What a comparison of positions and sizes always is; None where that is not known. `domains` has what renamed axes are
    copies of."""
    if not isinstance(node, Call) or node.fn not in COMPARISONS:
        return None
    found = difference(node.args[0], node.args[1], domains)
    if found is None:
        return None
    low, high = found
    match node.fn:
        case "lt":
            return True if high < 0 else False if low >= 0 else None
        case "le":
            return True if high <= 0 else False if low > 0 else None
        case "gt":
            return True if low > 0 else False if high <= 0 else None
        case "ge":
            return True if low >= 0 else False if high < 0 else None
    apart = low > 0 or high < 0
    same = low == high == 0
    if not apart and not same:
        return None
    return same if node.fn == "eq" else apart


def has_one_form(node: Expr, domains: Mapping[str, str]) -> bool:
    """Whether a function of positions and sizes does one thing at all of them: a comparison, a limit, an absolute value or a remainder
    by a number."""
    if not isinstance(node, Call):
        return False
    if node.fn in COMPARISONS:
        return truth(node, domains) is not None
    ends = limits(node, domains)
    if ends is not None and ends[0] == ends[1]:
        return True
    match node:
        case Call("maximum" | "minimum", (left, right)):
            found = difference(left, right, domains)
        case Call("abs" | "relu" | "sign", (inner,)):
            found = difference(inner, Const(0), domains)
            if found is not None and node.fn == "sign":
                return found[0] > 0 or found[1] < 0
        case Call("mod", (inner, by)):
            least, most = (difference(inner, end, domains) for end in (Const(0), by))
            return least is not None and most is not None and least[0] >= 0 > most[1]
        case Call(fn, (inner,)) if fn in LIMITS:
            low, high = (difference(inner, Const(end), domains) for end in LIMITS[fn])
            return low is not None and high is not None and low[0] >= 0 >= high[1]
        case _:
            return False
    return found is not None and (found[0] >= 0 or found[1] <= 0)


def difference(left: Expr, right: Expr, domains: Mapping[str, str]) -> tuple[float, float] | None:
    """Limits of the difference of two numbers made of positions and sizes; None where they are made of others."""
    one, other = _affine(left, domains), _affine(right, domains)
    if one is not None and other is not None:
        found = one.plus(other, -1.0)
        return found.least(), found.most()
    mine, theirs = limits(left, domains), limits(right, domains)
    if mine is None or theirs is None:
        return None
    return _sum(mine[0], -theirs[1], -math.inf), _sum(mine[1], -theirs[0], math.inf)


def limits(
    node: Expr, domains: Mapping[str, str], memo: dict[Expr, tuple[float, float] | None] | None = None
) -> tuple[float, float] | None:
    """Limits of a number made of positions and sizes; None where it is made of others."""
    memo = {} if memo is None else memo
    if node not in memo:
        memo[node] = _limits(node, domains, memo)
    return memo[node]


def _limits(
    node: Expr, domains: Mapping[str, str], memo: dict[Expr, tuple[float, float] | None]
) -> tuple[float, float] | None:
    found = _affine(node, domains)
    if found is not None:
        return found.least(), found.most()
    if not isinstance(node, Call):
        return None
    if node.fn == "sign":
        return -1.0, 1.0
    parts = [limits(arg, domains, memo) for arg in (node.args[1:] if node.fn == "where" else node.args)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    match node.fn, known:
        case "maximum", [(a, b), (c, d)]:
            return max(a, c), max(b, d)
        case "minimum", [(a, b), (c, d)]:
            return min(a, c), min(b, d)
        case "where", [(a, b), (c, d)]:
            return min(a, c), max(b, d)
        case "relu", [(a, b)]:
            return max(a, 0.0), max(b, 0.0)
        case "abs", [(a, b)]:
            return max(a, -b, 0.0), max(abs(a), abs(b))
        case "neg", [(a, b)]:
            return -b, -a
        case "add", _ if call("neg", node.args[0]) is node.args[1]:
            return 0.0, 0.0
        case "add", [(a, b), (c, d)]:
            return _sum(a, c, -math.inf), _sum(b, d, math.inf)
        case "sub", [(a, b), (c, d)] if node.args[0] is not node.args[1]:
            return _sum(a, -d, -math.inf), _sum(b, -c, math.inf)
        case "sub", _:
            return 0.0, 0.0
        case "mul", [(a, b), (c, d)]:
            corners = [0.0 if x == 0 or y == 0 else x * y for x in (a, b) for y in (c, d)]
            return min(corners), max(corners)
        case "floor" | "round", [(a, b)] if a == b and math.isfinite(a):
            value = float(FloatDomain("float64").call(node.fn, [np.asarray(a)]))
            return value, value
    return None


def _sum(one: float, other: float, otherwise: float) -> float:
    found = one + other
    return otherwise if math.isnan(found) else found


def _affine(node: Expr, domains: Mapping[str, str]) -> _Sum | None:
    match node:
        case Const(value) if not isinstance(value, bool):
            return _Sum(float(value)) if math.isfinite(value) else None
        case Axis(name):
            return _Sum(positions={(name, domains.get(name, name)): 1.0})
        case Size(axis):
            return _Sum(sizes={domains.get(axis, axis): 1.0})
        case Call("add" | "sub" as fn, (left, right)):
            one, other = _affine(left, domains), _affine(right, domains)
            return None if one is None or other is None else one.plus(other, 1.0 if fn == "add" else -1.0)
        case Call("neg", (inner,)):
            found = _affine(inner, domains)
            return found and _Sum().plus(found, -1.0)
        case Call("mul", (left, right)):
            one, other = _affine(left, domains), _affine(right, domains)
            if one is None or other is None or (one.constant is None and other.constant is None):
                return None
            factor, found = (other.constant, one) if one.constant is None else (one.constant, other)
            return None if factor is None else _Sum().plus(found, factor)
        case Call("mod", (inner, Const(int(by)))) if by > 0:
            found = _affine(inner, domains)
            return found and _Sum(others={node: (1.0, 0.0, min(by - 1.0, _if_positive(found)))})
        case Call("floordiv", (inner, Const(int(by)))) if by > 0:
            found = _affine(inner, domains)
            if found is None:
                return None
            return _Sum(others={node: (1.0, _floor(found.least(), by), _floor(found.most(), by))})
        case Call("floor" | "round", (inner,)):
            found = _affine(inner, domains)
            return found if found is not None and found.is_whole else None
        case Call(fn, args) if fn in _OF_NUMBERS:
            parts = [_affine(arg, domains) for arg in args]
            numbers = [part.constant for part in parts if part is not None and part.constant is not None]
            if len(numbers) < len(args):
                return None
            value = float(FloatDomain("float64").call(fn, [np.asarray(number) for number in numbers]))
            return _Sum(value) if math.isfinite(value) else None
        case Call("where", (condition, left, right)):
            always = truth(condition, domains)
            return None if always is None else _affine(left if always else right, domains)
    return None


def _if_positive(found: _Sum) -> float:
    return found.most() if found.least() >= 0 else math.inf


def _floor(number: float, by: int) -> float:
    return number if math.isinf(number) else float(number // by)
