"""Closed forms of sums over positions alone.

    sum[j](j * j)                      ->  (N(j) * (N(j) - 1) // 2) * (2 * N(j) - 1) // 3
    sum[j](where(j <= i, 1, 0))        ->  where(0 < min(i + 1, N(j)), min(i + 1, N(j)), 0)

What is summed is a polynomial in the position of degree 2 at most, of integers, times what does not vary with the axis. Masks may
bound the position by integers. The sums of the first powers are those of Faulhaber's formula (Graham, Knuth, Patashnik, Concrete
Mathematics, 1994, section 6.5); divisions have no remainder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from types import MappingProxyType

from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.integer_terms import minus, plus, times
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Scalar, Size, call, free_axes, walk
from eqfuse.terms.prefixes import Extents, is_as_long
from eqfuse.terms.types import kind

MOST_POSITIONS = 2**19
"""Positions of an axis up to which sums have closed forms: three times a sum of squares is far inside the range of 64-bit integers."""

_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def total(
    factors: Sequence[Expr], axis: str, dtypes: Mapping[str, str], same: Extents = MappingProxyType({})
) -> Expr | None:
    """The sum over an axis of a product, where all of it that varies with the axis is made of positions; None where it has no
    closed form. `dtypes` are those of inputs; positions of axes of the `same` extent are below its size."""
    around: list[Expr] = []
    fixed: list[Expr] = []
    powers: tuple[Expr, ...] = (Const(1),)
    for part in _parts(factors, around):
        if axis not in free_axes(part):
            fixed.append(part)
        elif (of_part := _powers(part, axis, dtypes)) is not None:
            powers = _product(powers, of_part)
        else:
            return None
    masks = [mask for mask in around if axis in free_axes(mask)]
    first: Expr = Const(0)
    end: Expr = Size(axis)
    for mask in sorted(masks, key=str):  # one form, in whatever order they are written
        bound = _bound(mask, axis, dtypes)
        if bound is None:
            return None
        is_inside = isinstance(bound.at, Axis) and is_as_long(bound.at.name, axis, same)
        first, end = bound.within(first, end, is_inside)
    if len(powers) > 3 or (len(powers) == 1 and not masks):
        return None
    sums = (
        times(power, minus(_first_powers(end, degree), _first_powers(first, degree)))
        for degree, power in enumerate(powers)
    )
    found = _product_of([*fixed, reduce(plus, sums)])
    if masks and not _has_positions(first, end):
        found = call("where", call("lt", first, end), found, Const(0))
    for mask in around:
        if mask not in masks:
            found = call("where", mask, found, Const(0))
    return found


def conjuncts(condition: Expr) -> list[Expr]:
    """The conditions that stand between the `and`s of one: unlike `terms.assume.conjuncts` as they are written, so that each can be
    proved to be one of them."""
    match condition:
        case Call("and", (left, right)):
            return conjuncts(left) + conjuncts(right)
    return [condition]


def _parts(factors: Sequence[Expr], around: list[Expr]) -> Iterator[Expr]:
    """The factors of a product, and of what is inside of its masks, which are added to `around`."""
    for factor in factors:
        match factor:
            case Call("where", (condition, value, Const(zero))) if zero is not False and zero == 0:
                around += conjuncts(condition)
                yield from _parts([value], around)
            case Call("mul", args):
                yield from _parts(args, around)
            case _:
                yield factor


def _powers(expr: Expr, axis: str, dtypes: Mapping[str, str]) -> tuple[Expr, ...] | None:
    """The coefficients of a polynomial of integers in the position of an axis, that of its 0th power first."""
    if axis not in free_axes(expr):
        return (expr,) if kind(expr, dtypes) == "int" else None
    match expr:
        case Axis():
            return (Const(0), Const(1))
        case Call("add" | "sub" | "mul" | "neg" | "sq", args):
            parts = [_powers(arg, axis, dtypes) for arg in args]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            match expr.fn, known:
                case "neg", [one]:
                    return tuple(minus(Const(0), each) for each in one)
                case "sq", [one]:
                    return _product(one, one)
                case "mul", [one, other]:
                    return _product(one, other)
                case fn, [one, other]:
                    combined = plus if fn == "add" else minus
                    return tuple(combined(a, b) for a, b in zip_longest(one, other, fillvalue=Const(0)))
    return None


def _product(one: Sequence[Expr], other: Sequence[Expr]) -> tuple[Expr, ...]:
    """The coefficients of the product of two polynomials."""
    found: list[Expr] = [Const(0)] * (len(one) + len(other) - 1)
    for n, a in enumerate(one):
        for m, b in enumerate(other):
            found[n + m] = plus(found[n + m], times(a, b))
    return tuple(found)


@dataclass(frozen=True)
class _Bound:
    """An integer that bounds a position, from above or below, and whether it is one of those left."""

    at: Expr
    is_upper: bool
    is_one: bool

    def within(self, first: Expr, end: Expr, is_inside: bool) -> tuple[Expr, Expr]:
        """The first position, and the one after the last, that are left of these. The integer is bounded before 1 is added to it: it may
        be the greatest there is. One that `is_inside` is a position of the axis itself, where these are all."""
        if is_inside and self.is_upper and isinstance(end, Size):
            return first, plus(self.at, Const(int(self.is_one)))
        match self.is_upper, self.is_one:
            case True, True:
                return first, plus(_smallest(self.at, minus(end, Const(1))), Const(1))
            case True, False:
                return first, _smallest(self.at, end)
            case False, True:
                return _largest(self.at, first), end
        return plus(_largest(self.at, minus(first, Const(1))), Const(1)), end


def _bound(mask: Expr, axis: str, dtypes: Mapping[str, str]) -> _Bound | None:
    """What a comparison bounds the position of an axis by; None where it bounds none."""
    match mask:
        case Call("lt" | "le" | "gt" | "ge" as fn, (left, right)):
            low, high = _powers(left, axis, dtypes), _powers(right, axis, dtypes)
        case _:
            return None
    if low is None or high is None:
        return None
    rest, slope, *higher = (minus(a, b) for a, b in zip_longest(low, high, fillvalue=Const(0)))
    if any(each is not Const(0) for each in higher) or not isinstance(slope, Const) or slope.value == 0:
        return None
    order = fn if slope.value > 0 else _FLIPPED[fn]
    at = minus(high[0], low[0]) if slope.value > 0 else rest  # steps * position (order) at
    steps, is_upper = int(abs(slope.value)), order in ("lt", "le")
    is_moved = steps > 1 or all(side[0] is not Const(0) for side in (low, high))
    if is_moved and any(isinstance(node, Load | Scalar) for node in walk(at)):
        return None  # near the ends of its dtype it may be moved beyond them
    is_one = order in ("le", "ge")
    if steps > 1:  # at most: the greatest multiple; at least: one more than the greatest that is less
        at = call("floordiv", at if order in ("le", "gt") else minus(at, Const(1)), Const(steps))
        is_one = is_upper
    return _Bound(at, is_upper, is_one)


def _has_positions(first: Expr, end: Expr) -> bool:
    """Whether there is a position from the first one to one behind the position of an axis."""
    match end:
        case Call("add", (Axis(), Const(1))):
            return first is Const(0)
    return False


def _first_powers(end: Expr, degree: int) -> Expr:
    """The sum of a power of the positions before `end`."""
    if degree == 0 or end is Const(0):
        return end
    sum_of_first = call("floordiv", times(end, minus(end, Const(1))), Const(2))
    if degree == 1:
        return sum_of_first
    return call("floordiv", times(sum_of_first, minus(times(Const(2), end), Const(1))), Const(3))


def _smallest(one: Expr, other: Expr) -> Expr:
    return other if one is other else call("minimum", one, other)


def _largest(one: Expr, other: Expr) -> Expr:
    """Of two positions; axes and sizes are none before the first."""
    match one, other:
        case Const(a), Const(b):
            return Const(max(a, b))
        case Axis() | Size(), Const(b) if b <= 0:
            return one
    return one if one is other else call("maximum", one, other)


def _product_of(parts: Sequence[Expr]) -> Expr:
    return reduce(times, parts)
