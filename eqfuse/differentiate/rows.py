"""What a gradient gives for the cotangent of one position of one output, as a program along that position.

A gradient is linear in the cotangents, so it is right if it is right for each position alone. There its sums over the
axes of the output have one term each, `sum[i](where(i == r, f[i], 0)) = f[r]`, which leaves expressions of the size of
the program's own: with as few roots and exponentials in each, so that the same theorems bound what is missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Scalar,
    call,
    rebuild,
    replaced,
    substitute_axes,
    walk,
)


class NotLinear(ValueError):
    """A gradient that is not written as a linear function of the cotangents."""


@dataclass(frozen=True)
class _Linear:
    """`value` where every axis of `at` is at its position, 0 elsewhere. A value of None is 0 everywhere."""

    value: Expr | None
    at: Mapping[str, Expr]


_NOTHING = _Linear(None, {})


def along(
    expr: Expr, name: str, rows: Sequence[str], others: frozenset[str], lengths: Mapping[str, int]
) -> Expr:
    """`expr`, linear in the cotangents, where the cotangent `name` is 0 but at the position `rows`, and `others` are 0.
    `lengths` are the extents of axes that are known. Raises NotLinear."""
    found = _Positions(name, tuple(rows), others, lengths).of(expr)
    if found.value is None:
        return Const(0.0)
    return _where(found.value, found.at)


@dataclass(frozen=True)
class _Positions:
    name: str
    rows: tuple[str, ...]
    others: frozenset[str]
    lengths: Mapping[str, int]
    split: dict[str, tuple[Expr, str]] = field(default_factory=dict)

    def _reads(self, expr: Expr) -> bool:
        names = {*self.others, self.name}
        return any(
            (isinstance(node, Load) and node.tensor in names)
            or (isinstance(node, Scalar) and node.name in names)
            for node in walk(expr)
        )

    def of(self, node: Expr) -> _Linear:
        """A part that reads a cotangent, or is 0."""
        match node:
            case _ if not self._reads(node):
                if _is_zero(node):
                    return _NOTHING
                raise NotLinear(str(node))
            case Load(name, index) if name == self.name:
                return self._read(node, index)
            case Scalar(name) if name == self.name:
                return _Linear(node, {})
            case Load(name, _) | Scalar(name) if name in self.others:
                return _NOTHING
            case Call("add" | "sub" as fn, (left, right)):
                return self._sum(fn, self.of(left), self.of(right))
            case Call("neg", (part,)):
                return self._inside(node, self.of(part))
            case Call("mul", (left, right)):
                if self._reads(left) == self._reads(right):
                    raise NotLinear(str(node))
                place = 0 if self._reads(left) else 1
                return self._factor(node, place)
            case Call("div", (left, right)) if not self._reads(right):
                return self._factor(node, 0)
            case Call("where", (condition, left, right)) if not self._reads(condition):
                return self._chosen(condition, self.of(left), self.of(right))
            case Call(fn, (part,)) if fn in CASTS:
                return self._inside(node, self.of(part))
            case Reduce("sum", axis, body):
                return self._summed(axis, self.of(body))
            case _:
                raise NotLinear(str(node))

    def _read(self, node: Expr, index: Sequence[Expr]) -> _Linear:
        at: dict[str, Expr] = {}
        masks: list[Expr] = []
        for part, row in zip(index, self.rows, strict=True):
            match part:
                case Axis(axis) if axis not in at:
                    at[axis] = Axis(row)
                case Call("add", (Call("mul", (Axis(above), Const(count))), Axis(below))) if (
                    self.lengths.get(below) == count and above not in at and below not in at
                ):
                    at[above] = call("floordiv", Axis(row), Const(count))
                    at[below] = call("mod", Axis(row), Const(count))
                    self.split[above] = self.split[below] = (part, row)
                case _:
                    masks.append(call("eq", part, Axis(row)))
        value = node if not masks else call("where", reduce(_both, masks), node, Const(0))
        return _Linear(value, at)

    def _inside(self, node: Expr, part: _Linear) -> _Linear:
        return _NOTHING if part.value is None else _Linear(rebuild(node, (part.value,)), part.at)

    def _factor(self, node: Call, place: int) -> _Linear:
        part = self.of(node.args[place])
        if part.value is None:
            return _NOTHING
        args = list(node.args)
        args[place] = part.value
        return _Linear(Call(node.fn, tuple(args)), part.at)

    def _sum(self, fn: str, left: _Linear, right: _Linear) -> _Linear:
        if right.value is None:
            return left
        if left.value is None:
            return _Linear(call("neg", right.value) if fn == "sub" else right.value, right.at)
        common, (one, two) = _joined(left, right)
        return _Linear(call(fn, one, two), common)

    def _chosen(self, condition: Expr, left: _Linear, right: _Linear) -> _Linear:
        if left.value is None and right.value is None:
            return _NOTHING
        if left.value is None or right.value is None:
            value = call("where", condition, left.value or Const(0), right.value or Const(0))
            return _Linear(value, left.at if left.value is not None else right.at)
        common, (one, two) = _joined(left, right)
        return _Linear(call("where", condition, one, two), common)

    def _summed(self, axis: str, body: _Linear) -> _Linear:
        if body.value is None:
            return _NOTHING
        if axis not in body.at:
            return _Linear(Reduce("sum", axis, body.value), body.at)
        rest = {name: to for name, to in body.at.items() if name != axis}
        value = body.value
        if axis in self.split:  # 8 * (r // 8) + r % 8 is r
            part, row = self.split[axis]
            value = replaced(value, {part: Axis(row)})
        return _Linear(substitute_axes(value, {axis: body.at[axis]}), rest)


def _is_zero(expr: Expr) -> bool:
    match expr:
        case Const(value):
            return value == 0
        case Call("mul", (left, right)):
            return _is_zero(left) or _is_zero(right)
        case Reduce("sum", _, body):
            return _is_zero(body)
        case _:
            return False


def _both(left: Expr, right: Expr) -> Expr:
    return call("and", left, right)


def _joined(left: _Linear, right: _Linear) -> tuple[dict[str, Expr], tuple[Expr, Expr]]:
    """What both are at, and their values where they are at more."""
    common = {axis: row for axis, row in left.at.items() if right.at.get(axis) is row}
    sides = [
        _where(side.value or Const(0), {axis: row for axis, row in side.at.items() if axis not in common})
        for side in (left, right)
    ]
    return common, (sides[0], sides[1])


def _where(value: Expr, at: Mapping[str, Expr]) -> Expr:
    masks: list[Expr] = [call("eq", Axis(axis), row) for axis, row in at.items()]
    return call("where", reduce(_both, masks), value, Const(0)) if masks else value
