"""Ranges of what a program computes, at any sizes of its axes: which sides of its branches nothing takes, by proof."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import COMPARISONS
from eqfuse.terms.intervals import ABOVE, BELOW, EQUAL, Interval
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Reduce, Size, free_axes, substitute_axes
from eqfuse.terms.ranges import ONE, UNKNOWN, Affine, Range, Ranges, integer

_FLOATS = FloatDomain("float64")


def computed(fn: str, at: float) -> float:
    """A function of one number, in float64."""
    return float(_FLOATS.call(fn, [np.asarray(float(at))]))


class AnySize(Ranges):
    """Axes have any size from the `smallest` on, 1 or more where they have a position: that is at most the size less 1. `domains` has what
    renamed axes are copies of."""

    value = staticmethod(computed)
    smallest = 1

    def __init__(self, domains: Mapping[str, str]) -> None:
        super().__init__()
        self.domains = domains

    def base(self, axis: str) -> str:
        return self.domains.get(axis, axis)

    def leaf(self, node: Expr) -> Range:
        match node:
            case Axis():
                return integer(node, 0, math.inf)
            case Size(axis):
                return integer(Size(self.base(axis)), self.smallest, math.inf)
        return UNKNOWN

    def has_one_form(self, node: Expr) -> bool:
        """Whether a function of positions and sizes does one thing at all of them: a comparison, a limit, an absolute value or a remainder
        by a number."""
        if not isinstance(node, Call):
            return False
        if node.fn in COMPARISONS:
            return self.truth(node) is not None
        found = self.of(node)
        if found.low == found.high:
            return True
        match node:
            case Call("maximum" | "minimum", (left, right)):
                ways = self.order(left, right)
            case Call("abs" | "relu" | "sign" as fn, (inner,)):
                ways = self.order(inner, Const(0))
                if fn == "sign":
                    return ways in (BELOW, ABOVE)
            case Call("mod", (inner, by)):
                return not self.order(inner, Const(0)) & BELOW and self.order(inner, by) == BELOW
            case Call(fn, (inner,)) if fn in LIMITS:
                low, high = map(Const, LIMITS[fn])
                return not self.order(inner, low) & BELOW and not self.order(inner, high) & ABOVE
            case _:
                return False
        return ways & (BELOW | ABOVE) != BELOW | ABOVE

    def _least(self, form: Affine) -> float:
        sizes: dict[str, int] = {}
        rest: dict[Expr, int] = {ONE: form.constant}
        has_position = {self.base(atom.name) for atom in form.terms if isinstance(atom, Axis)}
        for atom, factor in form.atoms.items():
            match atom:
                case Axis(name) if factor < 0:  # the last position
                    rest[ONE] -= factor
                    sizes[self.base(name)] = sizes.get(self.base(name), 0) + factor
                case Size(axis):
                    sizes[axis] = sizes.get(axis, 0) + factor
                case _ if not isinstance(atom, Axis):
                    rest[atom] = factor
        if any(factor < 0 for factor in sizes.values()):
            return -math.inf
        for axis, factor in sizes.items():
            rest[ONE] += factor * (1 if axis in has_position else self.smallest)
        return super()._least(Affine(rest))


class Reals(AnySize):
    """What is read may be any finite number, an axis may be empty, and of a choice between numbers and an infinity the numbers count."""

    smallest = 0

    def order(self, left: Expr, right: Expr) -> int:
        """Also where one is an extreme of the other's: a number is not above its maximum along an axis, nor is x above that of relu(x).
        What both are added to makes no difference."""
        found = super().order(left, right)
        if right is Const(0) and isinstance(left, Call) and left.fn == "sub":
            left, right = left.args
        left, right = _without_common(left, right)
        return found & self._to_extreme(left, right) & _mirrored(self._to_extreme(right, left))

    def _to_extreme(self, one: Expr, extreme: Expr) -> int:
        """How a number may be to what may be its extreme along an axis."""
        match extreme:
            case Reduce("max", axis, body) if self._is_among(one, body, axis, "maximum"):
                return BELOW | EQUAL
            case Reduce("min", axis, body) if self._is_among(one, body, axis, "minimum"):
                return EQUAL | ABOVE
        return BELOW | EQUAL | ABOVE

    def _is_among(self, one: Expr, body: Expr, axis: str, fn: str) -> bool:
        return any(self._is_of(one, part, axis) for part in _bounded_by(body, fn))

    def _is_of(self, one: Expr, body: Expr, axis: str) -> bool:
        """Whether a number is among those that a body has along an axis, or their other extreme."""
        if one is body:
            return True
        if isinstance(one, Reduce) and one.op in ("max", "min") and one.axis == axis and one.body is body:
            return True
        for of in free_axes(one):
            if self.base(of) == self.base(axis):
                try:
                    if substitute_axes(body, {axis: Axis(of)}) is one:
                        return True
                except ValueError:
                    continue
        return False

    def _ends(self, fn: str, args: Sequence[Expr], parts: Sequence[Range], whole: bool) -> Interval:
        if fn == "where" and (side := number_of(args[1:])) is not None:
            return parts[1 + side].ends
        low, high = super()._ends(fn, args, parts, whole)
        if fn == "sub" and any(isinstance(arg, Reduce) for arg in args):
            ways = self._to_extreme(*args) & _mirrored(self._to_extreme(*args[::-1]))
            low, high = low if ways & BELOW else max(low, 0), high if ways & ABOVE else min(high, 0)
        return low, high


def number_of(sides: Sequence[Expr]) -> int | None:
    """Which side of a choice is a number where the other one is an infinity or NaN."""
    special = [isinstance(side, Const) and not math.isfinite(side.value) for side in sides]
    return (1 if special[0] else 0) if any(special) else None


def _mirrored(ways: int) -> int:
    return (ways & EQUAL) | (ABOVE if ways & BELOW else 0) | (BELOW if ways & ABOVE else 0)


def _bounded_by(expr: Expr, fn: str) -> Iterator[Expr]:
    """An expression and what it is never below ("maximum") or never above ("minimum") by its form."""
    yield expr
    match expr:
        case Call("relu" | "abs", (inner,)) if fn == "maximum":
            yield from _bounded_by(inner, fn)
        case Call(name, args) if name == fn:
            for arg in args:
                yield from _bounded_by(arg, fn)


def _without_common(left: Expr, right: Expr) -> tuple[Expr, Expr]:
    """Two numbers without what is added to both, or taken from both."""
    while (
        isinstance(left, Call)
        and isinstance(right, Call)
        and left.fn == right.fn
        and left.fn in ("add", "sub")
    ):
        if left.args[1] is right.args[1]:
            left, right = left.args[0], right.args[0]
        elif left.fn == "add" and left.args[0] is right.args[0]:
            left, right = left.args[1], right.args[1]
        else:
            break
    return left, right
