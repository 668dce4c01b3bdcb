"""What is known of the values of an expression: its affine form, its least and greatest value, whether it is finite, is never 0, is whole.

One fold over interned nodes answers all of that, each node once. What is assumed of the leaves is a subclass's to say:

    Forms          nothing: the affine form of any expression, over atoms of any kind
    Box            positions, sizes and scalars are given: `Box({"i": (0, 7)}, {"i": 8}, {"n": 3})`
    FiniteInputs   what is read is finite, and nothing overflows

The numbers are those of mathematics: nothing is rounded, integers do not wrap around, and what is infinite or NaN is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.folds import contributions, fold_of, is_ranked
from eqfuse.terms.functions import COMPARISONS, FUNCTIONS
from eqfuse.terms.integers import identity
from eqfuse.terms.intervals import ALL, EQUAL, HOLDS, Interval, Value, image, orders, reduced, rounded
from eqfuse.terms.nodes import REDUCTIONS, Axis, Call, Const, Expr, Local, Reduce, Scalar, Size

LONGEST = 2**20
"""Denominators of factors at most. A product with 0.1 is rounded wherever it is computed: what is rounded must not cancel."""

ONE = Const(1)

Ends = tuple[int, int]
"""The least and the greatest of some integers."""


@dataclass(frozen=True)
class Affine:
    """Sum of factor * atom: atoms are expressions, and `Const(1)`, whose factor is the constant. No factor is 0. Those of reals may be
    `Fraction`s, which count and compare as integers do; forms of integers have none."""

    terms: Mapping[Expr, int]

    @property
    def constant(self) -> int:
        return self.terms.get(ONE, 0)

    @property
    def atoms(self) -> dict[Expr, int]:
        """The terms without the constant."""
        return {atom: factor for atom, factor in self.terms.items() if atom is not ONE}

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """self + factor * other."""
        terms = dict(self.terms)
        for atom, count in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor * count
        return Affine({atom: count for atom, count in terms.items() if count})

    def scaled(self, factor: int) -> Affine:
        """factor * self."""
        return Affine({atom: factor * count for atom, count in self.terms.items()} if factor else {})


class Range(NamedTuple):
    """`low` and `high` are attained or beyond what is attained. `affine` is None where the value is not known to be determined by what
    is assumed; `whole`: an integer everywhere; `finite`: neither infinite nor NaN; `nonzero`: never 0."""

    low: float
    high: float
    affine: Affine | None = None
    whole: bool = False
    finite: bool = False
    nonzero: bool = False

    @property
    def ends(self) -> Interval:
        return self.low, self.high


UNKNOWN = Range(*ALL)


class Ranges:
    """Ranges of expressions, each node's once. A subclass says what is known of leaves (`leaf`)."""

    otherwise: Interval = ALL
    """Between which ends an expression is of which nothing is known."""
    value: Value | None = None
    """What computes transcendental functions at the ends of intervals."""
    may_be_empty = False
    """Whether an axis that is reduced may have no positions."""

    def __init__(self) -> None:
        self._known: dict[Expr, Range] = {}

    def leaf(self, node: Expr) -> Range:
        """What is known of an axis, a size, a scalar, an element that is read, or a named value."""
        return UNKNOWN

    def of(self, expr: Expr) -> Range:
        """The range of an expression. An axis without positions has no values: nothing is known of them."""
        known = self._known
        stack = [expr]
        while stack:
            node = stack[-1]
            parts = [] if node in known else [part for part in node.parts if part not in known]
            if not parts and node not in known:
                known[node] = self._of(node)
            stack += parts
            if not parts:
                stack.pop()
        return known[expr]

    def affine(self, expr: Expr) -> Affine | None:
        """The affine form of an expression; None where a part of it is unknown."""
        return self.of(expr).affine

    def whole(self, expr: Expr) -> Ends | None:
        """The least and the greatest value of an integer expression; None where they cannot be told."""
        found = self.of(expr)
        known = found.affine is not None and found.whole and all(map(math.isfinite, found.ends))
        return (int(found.low), int(found.high)) if known else None

    def is_finite(self, expr: Expr) -> bool:
        """Whether no element is infinite or NaN."""
        return self.of(expr).finite

    def is_nonzero(self, expr: Expr) -> bool:
        """Whether no element is 0."""
        return self.of(expr).nonzero

    def is_positive(self, expr: Expr) -> bool:
        """Whether every element is above 0, and finite."""
        found = self.of(expr)
        return found.low > 0 and found.finite

    def order(self, left: Expr, right: Expr) -> int:
        """How `left` may be to `right`: of `BELOW`, `EQUAL` and `ABOVE`, those that are not ruled out."""
        if left is right:
            return EQUAL
        one, other = self.of(left), self.of(right)
        if one.affine is not None and other.affine is not None:
            return orders(self.bounds(one.affine.plus(other.affine, -1)), (0, 0))
        return orders(one.ends, other.ends)

    def truth(self, condition: Expr) -> bool | None:
        """What a comparison always is; None where it may be either."""
        if isinstance(condition, Const) and isinstance(condition.value, bool):
            return condition.value
        if not isinstance(condition, Call) or condition.fn not in COMPARISONS:
            return None
        ways, holds = self.order(*condition.args), HOLDS[condition.fn]
        return True if not ways & ~holds else False if not ways & holds else None

    def bounds(self, form: Affine) -> Interval:
        """The ends of an affine form, each atom taken by itself."""
        return self._least(form), -self._least(form.scaled(-1))

    def _least(self, form: Affine) -> float:
        total: int = 0
        for atom, factor in form.terms.items():
            if atom is ONE:
                total += factor
                continue
            found = self._known.get(atom) or self.of(atom)
            end = found.low if factor > 0 else found.high
            if math.isinf(end):
                return -math.inf
            total += factor * (end if isinstance(end, int) else _rational(end))
        return rounded(total.numerator, total.denominator, -1)

    def _of(self, node: Expr) -> Range:
        match node:
            case Const(value):
                return _number(value)
            case Call(fn, args):
                return self._call(node, fn, args)
            case Reduce():
                return self._reduce(node)
            case _:
                return self.leaf(node)

    def _call(self, node: Call, fn: str, args: Sequence[Expr]) -> Range:
        row = FUNCTIONS.get(fn)
        parts = [self._known[arg] for arg in args]
        numbers = parts[1:] if fn == "where" else parts
        are_whole = all(part.whole for part in numbers)
        whole = fn in ("floor", "round", "sign") or (
            row is not None and (row.result == "integer" or (row.result == "like" and are_whole))
        )
        finite, nonzero = self._is_finite(fn, numbers), _is_nonzero(fn, numbers)
        match fn:
            case "where" if (truth := self.truth(args[0])) is not None:
                return numbers[0 if truth else 1]
            case "floor" | "round" if are_whole:
                return parts[0]
        form = self._combined(fn, parts)
        low, high = self._ends(fn, args, parts, are_whole) if form is None else self.bounds(form)
        if not low <= high:
            low, high = self.otherwise
        # A division by 0 has no value, so it must not cancel.
        is_defined = fn not in ("floordiv", "mod") or parts[1].low > 0 or parts[1].high < 0
        if form is None and is_defined and all(part.affine is not None for part in numbers):
            if low == high and not any(part.affine.atoms for part in numbers if part.affine):
                form = _constant(_rational(low))
            elif whole:
                form = Affine({node: 1})
        return Range(low, high, form, whole, finite, nonzero or low > 0 or high < 0)

    def _combined(self, fn: str, parts: Sequence[Range]) -> Affine | None:
        """The affine form of a sum, a difference, a negative, or a multiple."""
        forms = [part.affine for part in parts]
        match fn, forms:
            case "neg", [Affine() as one]:
                return one.scaled(-1)
            case "add", [Affine() as one, Affine() as other]:
                return one.plus(other)
            case "sub", [Affine() as one, Affine() as other]:
                return one.plus(other, -1)
            case "mul", [Affine() as one, Affine() as other]:
                if not one.atoms:
                    return other.scaled(one.constant)
                if not other.atoms:
                    return one.scaled(other.constant)
        return None

    def _ends(self, fn: str, args: Sequence[Expr], parts: Sequence[Range], whole: bool) -> Interval:
        match fn, args:
            case "mul", (Axis(axis), Call("floordiv", (total, Size(size)))) if axis == size:
                low, high = self._known[total].ends  # where the axis's share of it starts
                return min(low, 0), max(high, 0)
        found = ends_of(fn, args, [part.ends for part in parts], whole, self.value)
        return self.otherwise if found == ALL else found

    def _is_finite(self, fn: str, numbers: Sequence[Range]) -> bool:
        if fn in ("finite", "invertible"):
            return True
        row = FUNCTIONS.get(fn)
        if fn == "div":
            return numbers[0].finite and numbers[1].finite and numbers[1].nonzero
        return (fn == "where" or (row is not None and row.finite)) and all(part.finite for part in numbers)

    def _reduce(self, node: Reduce) -> Range:
        count = self._count(node.axis)
        part = chosen(node)
        if part is not None and count[1] > 0:
            found = self._known.get(part) or self.of(part)
            form = None if found.affine is None else Affine({node: 1})
            low, high = found.ends
            if self.may_be_empty:
                low, high = min(low, _empty(node)), max(high, _empty(node))
            finite = found.finite and not is_ranked(
                node.op
            )  # a list goes on with infinities where positions end
            return Range(low, high, form, found.whole, finite, found.nonzero and not self.may_be_empty)
        body = self._known[node.body]
        ends = ALL if part is not None else reduced(node.op, count, body.ends)
        low, high = self.otherwise if ends == ALL else ends
        return Range(low, high, None, body.whole and node.op in ("sum", "prod"), body.finite)

    def _count(self, axis: str) -> Interval:
        """How many positions an axis has."""
        found = self.of(Size(axis))
        return max(found.low, 0), found.high


def ends_of(
    fn: str, args: Sequence[Expr], parts: Sequence[Interval], whole: bool = False, value: Value | None = None
) -> Interval:
    """The ends of a function of these arguments, which may be the same one twice (see `intervals.image`)."""
    if len(args) == 2 and args[0] is args[1] and fn in ("mul", "sub"):
        return image("sq", parts[:1]) if fn == "mul" else (0, 0)
    match fn, args:
        case "add", (one, Call("neg", (other,))) | (Call("neg", (other,)), one) if one is other:
            return 0, 0
    return image(fn, parts, whole, value)


def _number(value: float) -> Range:
    if math.isnan(value):
        return UNKNOWN
    if math.isinf(value) or isinstance(value, bool):
        return Range(value, value, None, isinstance(value, bool), isinstance(value, bool), bool(value))
    is_short = value.as_integer_ratio()[1] <= LONGEST
    form = _constant(_rational(value)) if is_short else None
    return Range(value, value, form, isinstance(value, int) or value.is_integer(), True, bool(value))


def _constant(number: int) -> Affine:
    return Affine({ONE: number} if number else {})


def _rational(number: float) -> int:
    if isinstance(number, int) or number.is_integer():
        return int(number)
    from fractions import Fraction  # here: a start needs none

    return Fraction(number)  # type: ignore[return-value]


def _is_nonzero(fn: str, numbers: Sequence[Range]) -> bool:
    match fn:
        case "invertible":
            return True
        case "exp":
            return numbers[0].finite
        case "mul" | "div" | "abs" | "neg" | "sq" | "sqrt":
            return all(part.nonzero for part in numbers)
        case _:
            return False


def _empty(reduction: Reduce) -> int:
    """What a reduction that chooses gives where an axis has no positions, in 32 bits."""
    found = fold_of(reduction.op)
    number = REDUCTIONS[reduction.op] if found is None else found[0].identity[found[1]].value
    return identity(number, "i32")


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


def integer(node: Expr, low: float, high: float) -> Range:
    """The range of an atom that is an integer between two limits."""
    return Range(low, high, Affine({node: 1}), True, True, low > 0 or high < 0)


# -- what may be assumed ---------------------------------------------------------------------------------------------


class Forms(Ranges):
    """Nothing is assumed: every expression has an affine form with integer factors, over whatever atoms."""

    def _of(self, node: Expr) -> Range:
        form: Affine | None = None
        match node:
            case Const(value) if type(value) is int:
                form = _constant(value)
            case Call(fn, args):
                form = self._combined(fn, [self._known[arg] for arg in args])
        return Range(*ALL, Affine({node: 1}) if form is None else form)


def linear(expr: Expr) -> Affine:
    """The affine form of an integer expression; what has none is an atom."""
    found = Forms().affine(expr)
    assert found is not None
    return found


def difference(left: Expr, right: Expr) -> Affine:
    """The affine form of `left - right`."""
    return linear(left).plus(linear(right), -1)


class Box(Ranges):
    """Positions of each axis (least, greatest), extents of axes, and values of scalars are given. Those of integers alone are known."""

    def __init__(
        self, positions: Mapping[str, Ends], extents: Mapping[str, int], scalars: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.positions, self.extents, self.scalars = positions, extents, scalars

    @classmethod
    def at(cls, extents: Mapping[str, int], scalars: Mapping[str, Any]) -> Box:
        """All positions of the axes."""
        return cls({axis: (0, size - 1) for axis, size in extents.items()}, extents, scalars)

    def leaf(self, node: Expr) -> Range:
        number: int | None = None
        match node:
            case Axis(name):
                low, high = self.positions.get(name, (0, -1))
                return integer(node, low, high) if low <= high else UNKNOWN
            case Scalar(name):
                number = whole_number(self.scalars.get(name))
            case Size(axis):
                number = self.extents.get(axis)
        return UNKNOWN if number is None else _number(number)

    def _of(self, node: Expr) -> Range:
        return UNKNOWN if isinstance(node, Const) and type(node.value) is not int else super()._of(node)


class FiniteInputs(Ranges):
    """What is read is finite, axes have positions, and nothing overflows. Named values may be anything."""

    def leaf(self, node: Expr) -> Range:
        match node:
            case Axis():
                return integer(node, 0, math.inf)
            case Size():
                return integer(node, 1, math.inf)
            case Local():
                return UNKNOWN
        return Range(*ALL, finite=True)
