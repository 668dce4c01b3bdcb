"""Closed forms of sums over positions, compared with the sums on integers: what a checker takes as given of them.

Both sides are polynomials on each of the pieces into which bounds of positions part the integers. Their degrees are far below the number of
integers that are tried, on every piece (polynomial identity testing: Schwartz, J. ACM 27(4), 1980).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

from eqfuse.proof.elaborate import free_names
from eqfuse.proof.syntax import Term
from eqfuse.terms.python import parsed

SIZES = range(9)
"""Positions of the axis in the trials."""
TRIALS = 24
"""Of each size."""
LEAST, GREATEST = -6, 14
"""The integers that names stand for; positions of other axes are 0 or more."""

Number = int | Fraction


class _NoNumber(Exception):
    """A term that has no value on integers."""


def totals(
    body: Term,
    result: Term,
    axis: str,
    integers: Collection[str],
    scalars: Collection[str],
    alike: Collection[str] = (),
) -> bool:
    """Whether a term is the sum of another one over an axis. `integers` are the tensors and scalars that hold integers, `alike` other axes
    of its extent; what else does not vary with the axis may be any number."""
    if axis in free_names(result, {}):
        return False
    random = Random(0)
    try:
        for size in SIZES:
            if size == 0 and not (free_names(body, {}) | free_names(result, {})).isdisjoint(alike):
                continue  # there is no position of another axis either
            for _ in range(TRIALS):
                trial = _Trial(axis, size, integers, scalars, random, alike)
                if sum(trial.number(body, at) for at in range(size)) != trial.number(result, None):
                    return False
    except _NoNumber:
        return False
    return True


@dataclass
class _Trial:
    """One size of the axis, and what names and unknown terms stand for."""

    axis: str
    size: int
    integers: Collection[str]
    scalars: Collection[str]
    random: Random
    alike: Collection[str]
    known: dict[object, int] = field(default_factory=dict)

    def number(self, term: Term, at: int | None) -> Number:
        """The value of a term at a position. Raises _NoNumber."""
        match term.head, term.words, term.args:
            case "Num", (text,), ():
                return _finite(text)
            case "Add" | "Mul" | "Min" | "Max" as head, _, (a, b):
                return _OF_TWO[head](self.number(a, at), self.number(b, at))
            case "Neg", _, (a,):
                return -self.number(a, at)
            case "Sq", _, (a,):
                return self.number(a, at) ** 2
            case "Where", _, (mask, a, b):
                return self.number(a if self._holds(mask, at) else b, at)
            case "Leaf", (text,), () if "'" not in text:
                try:
                    return int(self._value(parsed(text), at))
                except _NoNumber:
                    return self._unknown(term)
        return self._unknown(term)

    def _holds(self, mask: Term, at: int | None) -> bool:
        if mask.head == "Leaf" and "'" not in mask.words[0]:
            try:
                return bool(self._value(parsed(mask.words[0]), at))
            except _NoNumber:
                pass
        return self._unknown(mask) > 0

    def _unknown(self, term: Term) -> int:
        """Any number, of a term that does not vary with the axis."""
        if self.axis in free_names(term, {}):
            raise _NoNumber
        return self._any(term)

    def _any(self, key: object, least: int = LEAST, greatest: int = GREATEST) -> int:
        if key not in self.known:
            self.known[key] = self.random.randint(least, greatest)
        return self.known[key]

    def _value(self, node: ast.expr, at: int | None) -> int:
        """The value of an expression of positions, sizes and integers."""
        match node:
            case ast.Constant(int(value)) if not isinstance(value, bool):
                return value
            case ast.Name(name) if name == self.axis and at is not None:
                return at
            case ast.Name(name) if name in self.alike:
                return self._any(name, 0, max(0, self.size - 1))
            case ast.Name(name) if name != self.axis and (name in self.integers or name not in self.scalars):
                return self._any(name, LEAST if name in self.integers else 0)
            case ast.Subscript(ast.Name(name)) if name in self.integers and self.axis not in _names(node):
                return self._any(ast.dump(node))
            case ast.Call(ast.Name("N"), [ast.Name(name)]):
                return self.size if name == self.axis or name in self.alike else self._any(("N", name), 0)
            case ast.Call(ast.Name("min" | "max" as name), args) if args:
                return {"min": min, "max": max}[name](self._value(arg, at) for arg in args)
            case ast.UnaryOp(ast.USub(), inner):
                return -self._value(inner, at)
            case ast.UnaryOp(ast.Not(), inner):
                return not self._value(inner, at)
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                sides = self._value(left, at), self._value(right, at)
                if sides[1] == 0 and isinstance(op, ast.FloorDiv):
                    raise _NoNumber
                return _OPERATORS[type(op)](*sides)
            case ast.BoolOp(op, parts):
                return (all if isinstance(op, ast.And) else any)([self._value(part, at) for part in parts])
            case ast.Compare(left, [op], [right]) if type(op) in _COMPARISONS:
                return _COMPARISONS[type(op)](self._value(left, at), self._value(right, at))
        raise _NoNumber


_OF_TWO: Mapping[str, Callable[[Number, Number], Number]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Min": min,
    "Max": max,
}
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _finite(text: str) -> Number:
    value = float(text)
    if value - value != 0:
        raise _NoNumber
    return Fraction(value)


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
