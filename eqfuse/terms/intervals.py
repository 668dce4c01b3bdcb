"""Interval arithmetic: between which ends a function's values are, given the ends of its arguments.

Integers are exact. A float end that had to be rounded is rounded outward, so that every real number that a function may give is inside;
what NumPy computes of transcendental functions counts as exact to `PLACES` units in the last place. Functions that are monotone by
their row in `functions` are taken at the ends of their argument; of others the row tells the sign.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence

from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.functions import CASTS, COMPARISONS, FUNCTIONS, LOGICAL, NONNEGATIVE, NONPOSITIVE, ROUNDINGS
from eqfuse.terms.integers import BITS

Number = int | float
Interval = tuple[Number, Number]
"""Least and greatest value, both attained or beyond what is attained."""

NEGATED: Mapping[str, str] = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
"""The comparison that holds where one does not."""
MIRRORED: Mapping[str, str] = {"lt": "gt", "ge": "le", "le": "ge", "gt": "lt", "eq": "eq", "ne": "ne"}
"""The comparison of the same two sides, the second first."""

BELOW, EQUAL, ABOVE = 1, 2, 4
"""How the first of two numbers may be to the second."""
HOLDS: Mapping[str, int] = {
    "lt": BELOW,
    "le": BELOW | EQUAL,
    "gt": ABOVE,
    "ge": ABOVE | EQUAL,
    "eq": EQUAL,
    "ne": BELOW | ABOVE,
}
"""How two numbers are to each other where a comparison holds."""

ALL: Interval = (-math.inf, math.inf)
PLACES = 4
"""Units in the last place by which a transcendental function may be wrong."""

Value = Callable[[str, float], float]
"""What computes a function of one number, by its name."""
_BETWEEN = {
    **dict.fromkeys(("tanh", "erf", "sin", "cos"), (-1.0, 1.0)),
    **dict.fromkeys(("sigmoid", "rand"), (0.0, 1.0)),
    "atan2": (-math.pi, math.pi),
    "exp": (0.0, math.inf),
    "expm1": (-1.0, math.inf),
}
_EXACT_AT_ONE = frozenset({"log", "sqrt", "rsqrt", "root"})


# -- numbers: a result that is rounded goes towards `end`, which is -1 or 1 --------------------------------------------


def outward(number: float, end: int, places: int = 1) -> float:
    """The float so many places farther towards minus or plus infinity; an infinity stays."""
    for _ in range(places if math.isfinite(number) else 0):
        number = math.nextafter(number, end * math.inf)
    return number


def rounded(above: int, below: int, end: int, exact: bool = True) -> Number:
    """The quotient of two integers, the second above 0: where `exact`, an integer if it is one, and no larger than floats are."""
    if exact and above % below == 0 and (above // below).bit_length() < 1000:
        return above // below
    try:
        found = above / below
    except OverflowError:
        return end * math.inf if (above > 0) == (end > 0) else -end * sys.float_info.max
    mine, by = found.as_integer_ratio()
    return outward(found, end) if (above * by - mine * below) * end > 0 else found


def _are_exact(one: Number, other: Number) -> bool:
    return isinstance(one, int) and isinstance(other, int)


def _sum(one: Number, other: Number, end: int) -> Number:
    if math.isinf(one) or math.isinf(other):
        found = one + other
        return end * math.inf if math.isnan(found) else found
    (a, b), (c, d) = one.as_integer_ratio(), other.as_integer_ratio()
    return rounded(a * d + c * b, b * d, end, _are_exact(one, other))


def _product(one: Number, other: Number, end: int) -> Number:
    if one == 0 or other == 0:
        return 0 if _are_exact(one, other) else 0.0
    if math.isinf(one) or math.isinf(other):
        return math.inf if (one > 0) == (other > 0) else -math.inf
    (a, b), (c, d) = one.as_integer_ratio(), other.as_integer_ratio()
    return rounded(a * c, b * d, end, _are_exact(one, other))


def _quotient(one: Number, other: Number, end: int) -> Number:
    if math.isinf(other):
        return 0
    if math.isinf(one):
        return _product(one, other, end)
    (a, b), (c, d) = one.as_integer_ratio(), other.as_integer_ratio()
    sign = 1 if c > 0 else -1
    return rounded(sign * a * d, sign * b * c, end, _are_exact(one, other))


def _floor_quotient(one: Number, other: Number) -> Number:
    """`one // other`; of a divisor without end the limit."""
    found = _quotient(one, other, -1)
    if math.isinf(other):
        return 0 if one == 0 or (one > 0) == (other > 0) else -1
    return math.floor(found) if math.isfinite(found) else found


def orders(one: Interval, other: Interval) -> int:
    """How a number of one interval may be to one of another: `BELOW`, `EQUAL` and `ABOVE`."""
    touching = EQUAL if one[1] >= other[0] and one[0] <= other[1] else 0
    return (BELOW if one[0] < other[1] else 0) | touching | (ABOVE if one[1] > other[0] else 0)


# -- intervals -----------------------------------------------------------------------------------------------------


def hull(*parts: Interval) -> Interval:
    """The least interval around all."""
    return min(part[0] for part in parts), max(part[1] for part in parts)


def plus(one: Interval, other: Interval) -> Interval:
    return _sum(one[0], other[0], -1), _sum(one[1], other[1], 1)


def minus(one: Interval, other: Interval) -> Interval:
    return _sum(one[0], -other[1], -1), _sum(one[1], -other[0], 1)


def times(one: Interval, other: Interval) -> Interval:
    corners = [(a, b) for a in one for b in other]
    return min(_product(a, b, -1) for a, b in corners), max(_product(a, b, 1) for a, b in corners)


def over(one: Interval, other: Interval) -> Interval:
    """Quotients; where the divisor may be 0, those of the others that it may be."""
    low, high = other
    if low < 0 < high or low == high == 0:
        return ALL
    if high <= 0:
        return over((-one[1], -one[0]), (-high, -low))
    if low == 0:
        return times(one, (_quotient(1, high, -1), math.inf))
    corners = [(a, b) for a in one for b in other]
    return min(_quotient(a, b, -1) for a, b in corners), max(_quotient(a, b, 1) for a, b in corners)


def _floordiv(one: Interval, by: Interval, whole: bool) -> Interval:
    """Integers by 0 are 0."""
    low, high = by
    if not whole and low <= 0 <= high:
        return ALL
    parts: list[Interval] = [(0, 0)] if low <= 0 <= high else []
    for ends in ((max(low, 1) if whole else low, high), (low, min(high, -1) if whole else high)):
        if ends[0] <= ends[1] and (ends[0] > 0 or ends[1] < 0):
            corners = [_floor_quotient(a, b) for a in one for b in ends]
            parts.append((min(corners), max(corners)))
    return hull(*parts)


def _mod(one: Interval, by: Interval, whole: bool) -> Interval:
    """The sign is that of the divisor; integers by 0 are 0."""
    (a, b), (low, high) = one, by
    if low == high > 0 and all(type(n) is int for n in (a, b, low)) and a // low == b // low:
        return a % low, b % low
    step = 1 if whole else 0
    least, most = min(low + step, 0), max(high - step, 0)
    if low >= 0 and a >= 0:
        most = min(most, b)
    return least, most


def _bits(fn: str, one: Interval, other: Interval) -> Interval:
    if fn == "bitand" and (one[0] >= 0 or other[0] >= 0):
        return 0, min(part[1] for part in (one, other) if part[0] >= 0)
    ends = (*one, *other)
    if not all(isinstance(end, int) for end in ends):
        return ALL
    wide = 1 << max((end if end >= 0 else ~end).bit_length() for end in map(int, ends))
    return (0 if min(ends) >= 0 else -wide), wide - 1


def _shift(fn: str, one: Interval, by: Interval) -> Interval:
    low, high = min(one[0], 0), max(one[1], 0)
    if fn == "rshift":
        if 0 <= by[0] <= by[1] < BITS and all(isinstance(end, int) for end in (*one, *by)):
            corners = [int(a) >> int(b) for a in one for b in by]
            return min(corners), max(corners)
        return low, high
    if not all(isinstance(end, int) for end in one):
        return ALL
    most, (least, greatest) = int(max(min(by[1], BITS), 0)), LIMITS["i64"]
    ends = int(low) << most, int(high) << most
    fits = least <= ends[0] and ends[1] <= greatest  # what is beyond 64 bits is lost
    return ends if fits else (least, greatest)


def _monotone(fn: str, part: Interval, grows: bool, value: Value) -> Interval | None:
    """The values at both ends, rounded outward; None where one is none."""
    ends = []
    for at, end in zip(part if grows else part[::-1], (-1, 1), strict=True):
        at = float(at) + 0.0  # -0.0 is 0
        found = value(fn, at)
        if math.isnan(found):
            return None
        if math.isinf(found) and math.isfinite(at) and at != 0 and (found > 0) == (end < 0):
            found = math.copysign(sys.float_info.max, found)  # too large for a float, and no infinity
        is_exact = at in (0, math.inf, -math.inf) or (at == 1 and fn in _EXACT_AT_ONE) or fn in CASTS
        ends.append(found if is_exact else outward(found, end, PLACES))
    return ends[0], ends[1]


def image(fn: str, parts: Sequence[Interval], whole: bool = False, value: Value | None = None) -> Interval:
    """The ends of a function's values, of finite numbers in these intervals; `whole`: all of them are integers. Without a `value` that
    computes them, of transcendental functions the sign alone is known."""
    match fn, parts:
        case "neg", [(low, high)]:
            return -high, -low
        case "add", [one, other]:
            return plus(one, other)
        case "sub", [one, other]:
            return minus(one, other)
        case "mul", [one, other]:
            return times(one, other)
        case "div", [one, other]:
            return over(one, other)
        case "floordiv", [one, other]:
            return _floordiv(one, other, whole)
        case "mod", [one, other]:
            return _mod(one, other, whole)
        case "maximum", [(a, b), (c, d)]:
            return max(a, c), max(b, d)
        case "minimum", [(a, b), (c, d)]:
            return min(a, c), min(b, d)
        case "where", [_, one, other]:
            return hull(one, other)
        case "relu", [(low, high)]:
            return max(low, 0), max(high, 0)
        case "abs", [(low, high)]:
            return max(low, -high, 0), max(-low, high)
        case "sq", [(low, high)]:
            least, most = max(low, -high, 0), max(-low, high)
            return _product(least, least, -1), _product(most, most, 1)
        case "sign", [(low, high)]:
            return (low > 0) - (low < 0), (high > 0) - (high < 0)
        case "floor", [_]:
            return tuple(math.floor(n) if math.isfinite(n) else n for n in parts[0])  # type: ignore[return-value]
        case "round", [_]:
            return tuple(round(n) if math.isfinite(n) else n for n in parts[0])  # type: ignore[return-value]
        case "stop", [part]:
            return part
        case "finite", [part]:
            return part if all(map(math.isfinite, part)) else hull(part, (0, 0))
        case "invertible", [part]:
            return (
                part if all(map(math.isfinite, part)) and not part[0] <= 0 <= part[1] else hull(part, (1, 1))
            )
        case (("bitand" | "bitor" | "bitxor"), [one, other]):
            return _bits(fn, one, other)
        case (("lshift" | "rshift"), [one, other]):
            return _shift(fn, one, other)
        case _ if fn in ROUNDINGS:
            least, most = LIMITS[fn]
            low, high = image("round", parts)
            kept = min(max(low, least), most), min(max(high, least), most)
            return kept if whole else hull(kept, (0, 0))  # NaN is 0
        case _ if fn in COMPARISONS or fn in LOGICAL:
            return 0, 1
    return _by_row(fn, parts, value)


def reduced(op: str, count: Interval, body: Interval) -> Interval:
    """The ends of a reduction over so many positions, at one of which a body is; of `max` and `min` over one or more."""
    if op in ("max", "min"):
        return body
    if op == "sum":
        return times(count, body)
    return (0, math.inf) if op == "prod" and body[0] >= 0 else ALL


def _by_row(fn: str, parts: Sequence[Interval], value: Value | None) -> Interval:
    """What the table of functions says: of a function that is monotone, of one between limits, of a sign."""
    row = FUNCTIONS.get(fn)
    limits = _BETWEEN.get(fn, ALL)
    if row is None:
        return limits
    if row.order in ("+", "-") and value is not None:
        found = _monotone(fn, parts[0], row.order == "+", value)
        if found is not None and fn in CASTS:  # to the algebra, a cast does not round
            return hull(found, parts[0])
        if found is not None:
            return max(found[0], limits[0]), min(found[1], limits[1])
    if NONNEGATIVE in row.holds or (NONNEGATIVE in row.keeps and all(low >= 0 for low, _ in parts)):
        return max(0.0, limits[0]), limits[1]
    if NONPOSITIVE in row.keeps and all(high <= 0 for _, high in parts):
        return -math.inf, 0.0
    return limits
