"""Ranges of integer expressions over boxes of positions."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from eqfuse.records import dataclass
from eqfuse.terms.folds import contributions, fold_of
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Reduce, Scalar, Size

Range = tuple[int, int]
"""Least and greatest value, both attained or beyond what is attained."""


@dataclass(frozen=True)
class Affine:
    """`constant + sum of factor * atom`; atoms are axes and integer expressions that are not affine."""

    terms: Mapping[Expr, int]
    constant: int

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """self + factor * other."""
        terms = dict(self.terms)
        for atom, count in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor * count
        kept = {atom: count for atom, count in terms.items() if count}
        return Affine(kept, self.constant + factor * other.constant)

    def scaled(self, factor: int) -> Affine:
        """factor * self."""
        return Affine({}, 0).plus(self, factor)


@dataclass(frozen=True)
class Box:
    """Positions of each axis (least, greatest), extents of axes, and values of scalars."""

    positions: Mapping[str, Range]
    extents: Mapping[str, int]
    scalars: Mapping[str, Any]

    def affine(self, expr: Expr) -> Affine | None:
        """The affine form of an integer expression; None where a part has no known integer value."""
        match expr:
            case Const(value):
                return Affine({}, value) if type(value) is int else None
            case Scalar(name):
                number = whole_number(self.scalars.get(name))
                return None if number is None else Affine({}, number)
            case Size(axis):
                return Affine({}, self.extents[axis]) if axis in self.extents else None
            case Axis(name):
                return Affine({expr: 1}, 0) if name in self.positions else None
            case Call("neg", (operand,)):
                inner = self.affine(operand)
                return inner and inner.scaled(-1)
            case Call("add" | "sub" | "mul" as fn, (first, second)):
                left, right = self.affine(first), self.affine(second)
                if left is None or right is None:
                    return None
                if fn != "mul":
                    return left.plus(right, 1 if fn == "add" else -1)
                if not left.terms:
                    return right.scaled(left.constant)
                return Affine({expr: 1}, 0) if right.terms else left.scaled(right.constant)
            case Call("floordiv" | "mod", (first, second)):
                divisor = self.range(second)
                # A division by 0 has no value, so it must not cancel.
                defined = divisor is not None and divisor[0] > 0 and self.affine(first) is not None
                return Affine({expr: 1}, 0) if defined else None
            case Reduce() if (part := chosen(expr)) is not None:
                return None if self.affine(part) is None else Affine({expr: 1}, 0)
            case Call("maximum" | "minimum" | "abs" | "sq" | "relu", args):
                return None if any(self.affine(arg) is None for arg in args) else Affine({expr: 1}, 0)
            case _:
                return None

    def bounds(self, form: Affine) -> Range | None:
        """The range of an affine form, each atom taken by itself."""
        low = high = form.constant
        for atom, factor in form.terms.items():
            inner = self.range(atom)
            if inner is None:
                return None
            ends = (factor * inner[0], factor * inner[1])
            low, high = low + min(ends), high + max(ends)
        return low, high

    def range(self, expr: Expr) -> Range | None:
        """The range of an integer expression; None where it cannot be told, or where an axis is empty."""
        form = self.affine(expr)
        if form is None:
            return None
        if form.terms.keys() != {expr}:
            return self.bounds(form)
        if isinstance(expr, Axis):
            low, high = self.positions[expr.name]
            return (low, high) if low <= high else None
        return self._atom(expr)

    def _atom(self, expr: Expr) -> Range | None:
        match expr:
            case Reduce():
                part = chosen(expr)
                return None if part is None else self.range(part)
            case Call("abs" | "sq" as fn, (operand,)):
                inner = self.range(operand)
                if inner is None:
                    return None
                ends = [abs(end) if fn == "abs" else end * end for end in inner]
                return (0 if inner[0] <= 0 <= inner[1] else min(ends)), max(ends)
            case Call("relu", (operand,)):
                inner = self.range(operand)
                return inner and (max(inner[0], 0), max(inner[1], 0))
            case Call(fn, (first, second)):
                left, right = self.range(first), self.range(second)
                return None if left is None or right is None else _combined(fn, left, right)
            case _:
                return None


def chosen(reduction: Reduce) -> Expr | None:
    """The expression of which a reduction gives the value at one of its positions, whichever: the greatest or least one,
    or a state that the combination selects (the position of an argmax); None where it gives another one."""
    found = fold_of(reduction.op)
    if found is None:
        return reduction.body if reduction.op in ("max", "min") else None
    fold, place = found
    return contributions(reduction)[place] if fold.selects(place) else None


def whole_number(value: object) -> int | None:
    """The integer that a number is; None for what is not one."""
    return int(float(value)) if isinstance(value, Real) and float(value).is_integer() else None


def _combined(fn: str, left: Range, right: Range) -> Range | None:
    match fn:
        case "mul":
            products = [a * b for a in left for b in right]
            return min(products), max(products)
        case "maximum":
            return max(left[0], right[0]), max(left[1], right[1])
        case "minimum":
            return min(left[0], right[0]), min(left[1], right[1])
        case "floordiv" if right[0] > 0:
            quotients = [a // b for a in left for b in right]
            return min(quotients), max(quotients)
        case "mod" if right[0] > 0:
            divisor = right[0]
            if right[0] == right[1] and left[0] // divisor == left[1] // divisor:
                return left[0] % divisor, left[1] % divisor
            return 0, right[1] - 1
        case _:
            return None


def index_range(expr: Expr, extents: Mapping[str, int], scalars: Mapping[str, Any]) -> Range | None:
    """(least, greatest) value of an integer expression over all positions of its axes.

    The range may be wider than what is attained where an axis occurs twice. None where it cannot be told
    from sizes and scalars (a gather, an unknown scalar), and where an axis has no positions.
    """
    return Box({axis: (0, size - 1) for axis, size in extents.items()}, extents, scalars).range(expr)
