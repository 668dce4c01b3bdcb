"""Masks that leave a window of integers, read off their texts: what a checker takes as given of one that is divided in two."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

from eqfuse.terms.python import parsed

_APART: Mapping[type[ast.cmpop], int] = {ast.LtE: 0, ast.GtE: 0, ast.Lt: 1, ast.Gt: 1}
"""How far apart both sides are at least."""


@dataclass(frozen=True)
class _Window:
    """`low <= sum <= high`: of each name how often it is in the sum, the first one by name a positive number of times."""

    terms: Mapping[str, int]
    low: float
    high: float

    @staticmethod
    def of(terms: Mapping[str, int], low: float, high: float) -> _Window:
        """With the number in a sum, the term of "", on the other sides."""
        number = terms.get("", 0)
        names = {name: count for name, count in sorted(terms.items()) if name and count}
        low, high = low - number, high - number
        if names and next(iter(names.values())) < 0:
            return _Window({name: -count for name, count in names.items()}, -high, -low)
        return _Window(names, low, high)

    def within(self, other: _Window) -> _Window:
        """What both leave. Raises _NoWindow where they bound different sums."""
        if self.terms != other.terms:
            raise _NoWindow
        return _Window(self.terms, max(self.low, other.low), min(self.high, other.high))


class _NoWindow(Exception):
    """A condition that says something else."""


def is_either(text: str, one: str, other: str, is_axis: Callable[[str], bool]) -> bool:
    """Whether a condition leaves a window of a sum of positions and sizes, and two other ones the parts below and above some integer. All
    names in it are axes: no such sum is near the ends of the range of integers."""
    try:
        whole, *parts = (_window(parsed(each), is_axis) for each in (text, one, other))
    except _NoWindow:
        return False
    first, last = sorted(parts, key=lambda part: part.low)
    return (
        whole.terms == first.terms == last.terms
        and -math.inf < whole.low == first.low <= first.high
        and first.high + 1 == last.low <= last.high == whole.high < math.inf
    )


def _window(node: ast.expr, is_axis: Callable[[str], bool]) -> _Window:
    """What a condition leaves of a sum. Raises _NoWindow."""
    match node:
        case ast.BoolOp(ast.And(), parts):
            return reduce(_Window.within, (_window(part, is_axis) for part in parts))
        case ast.Compare(left, [ast.Eq()], [right]):
            return _Window.of(_sum(ast.BinOp(left, ast.Sub(), right), is_axis), 0, 0)
        case ast.Compare(left, [op], [right]) if type(op) in _APART:
            small, large = (right, left) if isinstance(op, ast.Gt | ast.GtE) else (left, right)
            match small, large:
                case ast.Call(ast.Name("abs"), [inner]), ast.Constant(int(limit)):
                    most = limit - _APART[type(op)]
                    return _Window.of(_sum(inner, is_axis), -most, most)
            terms = _sum(ast.BinOp(small, ast.Sub(), large), is_axis)
            return _Window.of(terms, -math.inf, -_APART[type(op)])
    raise _NoWindow


def _sum(node: ast.expr, is_axis: Callable[[str], bool]) -> dict[str, int]:
    """How often each name is in a sum, and the number in it as the term of "". Raises _NoWindow."""
    match node:
        case ast.Constant(int(number)) if not isinstance(number, bool):
            return {"": number}
        case ast.Name(name) if is_axis(name):
            return {name: 1}
        case ast.Call(ast.Name("N"), [ast.Name(name)]):
            return {f"N({name})": 1}
        case ast.UnaryOp(ast.USub(), inner):
            return {name: -count for name, count in _sum(inner, is_axis).items()}
        case ast.BinOp(left, (ast.Add() | ast.Sub()) as op, right):
            found, sign = _sum(left, is_axis), 1 if isinstance(op, ast.Add) else -1
            for name, count in _sum(right, is_axis).items():
                found[name] = found.get(name, 0) + sign * count
            return found
        case ast.BinOp(left, ast.Mult(), right):
            one, other = _sum(left, is_axis), _sum(right, is_axis)
            if one.keys() - {""} and other.keys() - {""}:
                raise _NoWindow
            times, terms = (one, other) if one.keys() <= {""} else (other, one)
            return {name: times.get("", 0) * count for name, count in terms.items()}
    raise _NoWindow
