"""Positions in a dimension of a tensor, as digits of mixed radix.

    Part(index, size)     a digit: 0 <= index < size
    Position              the digits of a position, most significant first; none in a dimension of one position

A view keeps the elements in order and counts them otherwise, so that it only groups digits anew: heads that were split
from a feature axis and joined again are the digits that they were. Sizes are integers or sympy expressions of symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eqfuse.terms.integer_terms import divided, plus, remaining, times
from eqfuse.terms.nodes import Axis, Const, Expr, walk

Size = Any
"""A positive integer, or a sympy expression of positive symbols."""


FINEST = 1024
"""The greatest denominator of a scale, a power of two, with which products of sizes are exact."""


def whole(size: Any) -> Size:
    """A size of a graph whose products with a fraction, rounded towards 0, are quotients of integers."""
    from torch.utils._sympy.functions import FloorDiv

    def quotient(expr: Any) -> Any:
        scale, *rest = expr.args[0].args if expr.args[0].is_Mul else (expr,)
        if len(rest) != 1 or type(rest[0]).__name__ != "ToFloat" or not scale.is_Float:
            return expr
        top, bottom = float(scale).as_integer_ratio()
        product = top * rest[0].args[0]
        return product if bottom == 1 else FloorDiv(product, bottom) if bottom <= FINEST else expr

    return size.replace(lambda each: type(each).__name__ == "TruncToInt", quotient)


REAL = ("ToFloat", "IntTrueDiv", "FloatTrueDiv", "FloatPow", "OpaqueUnaryFn")
"""How torch's functions of sizes are called whose results are real."""


def is_real_size(size: Size) -> bool:
    """Whether a number made of sizes is real, as `n ** -0.5` is."""
    if isinstance(size, int | float):
        return isinstance(size, float)
    kind = type(size).__name__
    sums = ("Add", "Mul", "Max", "Min", "Pow")
    return bool(size.is_Float) or kind.startswith(REAL) or kind in sums and any(map(is_real_size, size.args))


@dataclass(frozen=True)
class Part:
    index: Expr
    size: Size


Position = tuple[Part, ...]


def axes_read(positions: Sequence[Position]) -> list[str]:
    """The axes that positions are made of."""
    return [
        axis.name
        for place in positions
        for part in place
        for axis in walk(part.index)
        if isinstance(axis, Axis)
    ]


def exact_ratio(large: Size, small: Size) -> Size | None:
    """`large / small` where that is a whole number for all values of symbols, else None."""
    if large == small:
        return 1
    if isinstance(large, int) and isinstance(small, int):
        return large // small if large % small == 0 else None
    import sympy

    ratio = sympy.cancel(sympy.sympify(large) / sympy.sympify(small))
    if sympy.fraction(sympy.together(ratio))[1] != 1:
        return None
    return int(ratio) if ratio.is_Integer else ratio


def is_below(small: Size, large: Size) -> bool:
    """Whether one size is less than another for all values of symbols, as far as their difference is a number."""
    if isinstance(small, int) and isinstance(large, int):
        return small < large
    import sympy

    apart = sympy.expand(sympy.sympify(large) - sympy.sympify(small))
    return bool(apart.is_Integer and apart > 0)


class Radix:
    """Digits regrouped; `text` makes an expression of a size."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def flat(self, position: Position) -> Expr:
        """The position as one number."""
        found: Expr = Const(0)
        for part in position:
            found = plus(times(found, self.text(part.size)), part.index)
        return found

    def regrouped(self, position: Sequence[Part], sizes: Sequence[Size]) -> tuple[Position, ...]:
        """The digits of a position, grouped so that each group has one of these sizes. The product of both is the same."""
        left = list(position)
        found: list[Position] = []
        for size in reversed(sizes):
            group = self._taken(left, size)
            if group is None:
                return self._computed(position, sizes)
            found.append(group)
        return tuple(reversed(found))

    def _taken(self, left: list[Part], size: Size) -> Position | None:
        """The least significant digits that make up a size, taken away; None where digits and size share no factor."""
        group: list[Part] = []
        need = size
        while need != 1 and left:
            part = left.pop()
            if part.size == 1:
                continue
            if (more := exact_ratio(need, part.size)) is not None:
                group.append(part)
                need = more
            elif (rest := exact_ratio(part.size, need)) is not None:
                width = self.text(need)
                group.append(Part(remaining(part.index, width), need))
                left.append(Part(divided(part.index, width), rest))
                need = 1
            else:
                return None
        return tuple(reversed(group))

    def _computed(self, position: Sequence[Part], sizes: Sequence[Size]) -> tuple[Position, ...]:
        """The digits of a position by division of the whole."""
        whole = self.flat(tuple(position))
        found: list[Position] = []
        for place, size in enumerate(reversed(sizes)):
            width = self.text(size)
            if size == 1:
                found.append(())
            elif place == len(sizes) - 1:
                found.append((Part(whole, size),))
            else:
                found.append((Part(remaining(whole, width), size),))
                whole = divided(whole, width)
        return tuple(reversed(found))
