"""Shares of a sum of exponentials, read from one log-sum-exp instead of a maximum and a sum.

    exp(t - m) / l  =  exp(t - (m + log l))        where l >= 0

and where l is a sum of exp(t - m), or more than one of them, t <= m + log l: the exponent is at most 0.

A number c that masks t is m where it masks a whole row, and log l is lost beside it where it is large: in float32,
-1e30 + log(n) is -1e30, and the share exp(c - c) = 1 instead of 1/n. There the two stay apart:

    exp(t - m) / l  =  exp((t - m) - log l)        where log l may be lost in m + log l

An infinity loses nothing: the shares of a row of -inf alone are NaN in the program too. What an input masks by is not known
here: a scalar in the place of masked values, or a tensor that is added, counts as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from eqfuse.differentiate.polynomial import UNIT, Monomial, product, written
from eqfuse.differentiate.steps import Step, Steps, index_of, name_of, read
from eqfuse.terms.functions import CASTS
from eqfuse.terms.intervals import reduced
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    rebuild,
    substitute_axes,
    transform,
    walk,
)
from eqfuse.terms.ranges import UNKNOWN, Range, Ranges, integer, linear

TOLERANCE = 2.0**-10
"""Error of log l in m + log l, which is the relative error of a share, up to which they are one statistic."""

EPSILON = 2.0**-23
"""Of float32, in which statistics are saved for inputs of float32 and of half precision."""

_OF_SIZE = frozenset({"add", "sub", "neg", "mul", "div", "abs", "maximum", "minimum", "finite", *CASTS})
"""Functions whose values may be as large as a number among their arguments."""


@dataclass
class Shares:
    """Rewrites expressions over steps. `made` are the log-sum-exps that they read, and the logarithms of sums that stay apart
    from maxima; `bounded` pairs of a value and the one of these that it is at most."""

    steps: Steps
    by_name: dict[str, Step]
    made: dict[Expr, Step] = field(default_factory=dict)
    bounded: dict[tuple[Expr, Expr], None] = field(default_factory=dict)
    _ranges: _OfSteps = field(init=False)

    def __post_init__(self) -> None:
        self._ranges = _OfSteps(self.by_name)

    def of(self, expr: Expr) -> Expr:
        """The expression with every share read so."""
        memo: dict[Expr, Expr] = {}
        for node in walk(expr):
            again = rebuild(node, tuple(memo[part] for part in children(node)))
            is_product = isinstance(again, Call) and again.fn in ("mul", "div")
            memo[node] = self._product(again) if is_product else again
        return memo[expr]

    def _product(self, node: Expr) -> Expr:
        term = product(node)
        for above, power in term.powers.items():
            exponent = self._exponent(above)
            if power != 1 or exponent is None:
                continue
            for below, times in term.powers.items():
                if times == -1 and free_axes(below) < free_axes(above) and self._ranges.of(below).low >= 0:
                    shifted = self._shifted(above, exponent, below)
                    if shifted is not None:
                        rest = term.times(Monomial(UNIT.number, {above: -1, below: 1}))
                        return written(rest.times(Monomial(UNIT.number, {call("exp", shifted): 1})))
        return node

    def _exponent(self, expr: Expr) -> Expr | None:
        """t, where the expression is exp(t), or reads a step that is. What a mask makes 0 is exp(-inf)."""
        match self._value(expr):
            case Call("exp", (exponent,)):
                return exponent
            case Call("where", (condition, part, Const(0))):
                inner = self._exponent(part)
                return None if inner is None else call("where", condition, inner, Const(-math.inf))
            case _:
                return None

    def _value(self, expr: Expr) -> Expr:
        """What a read reads, where that is an elementwise step."""
        step = self.by_name.get(name_of(expr) or "")
        if step is None or step.op:
            return expr
        return self._value(_at(step.body, step, expr))

    def _shifted(self, above: Expr, exponent: Expr, below: Expr) -> Expr | None:
        """`exponent` less the logarithm of `below`, which is read with all that does not vary along more axes."""
        log = call("log", below)
        is_at_most = self._is_at_most(above, below)
        whole = self._named(call("sub", exponent, log))
        if whole is not None:
            if is_at_most:
                self.bounded[whole, Const(0)] = None
            return whole
        fixed, rest = self._apart(exponent, free_axes(below))
        name = "lse"
        if any(map(self._may_absorb, fixed)):
            fixed, rest, name = [], exponent, f"log_{name_of(below)}"
        shift = self._read(fixed, below, name)
        if shift is None:
            return None
        if is_at_most:
            self.bounded[rest, shift] = None
        return call("sub", rest, shift)

    def _named(self, value: Expr) -> Expr | None:
        """The read of a step that has a sum of terms for its value."""
        form = linear(value)
        for step in self.by_name.values():
            if not step.op and free_axes(step.body) == free_axes(value) and linear(step.body) == form:
                return step.itself
        return None

    def _read(self, fixed: Sequence[Expr], below: Expr, name: str) -> Expr | None:
        """The sum of `fixed` and the logarithm of `below`, as a step has it for every position of what is below."""
        step = self.by_name.get(name_of(below) or "")
        reads = [_read_by(part) for part in fixed]
        if step is None or not all(map(name_of, reads)):
            return None
        axes: dict[Expr, Expr] = {at: Axis(axis) for axis, at in zip(step.axes, index_of(below), strict=True)}
        known = all(part in axes for each in reads for part in index_of(each))
        if not known or len(axes) < len(step.axes):
            return None
        value: Expr = call("log", step.itself)
        for part, each in reversed(list(zip(fixed, reads, strict=True))):
            moved = read(name_of(each) or "", [axes[at] for at in index_of(each)])
            value = call("add", moved if part is each else call("finite", moved), value)
        found = self._named(value)
        if found is None:
            if value not in self.made:
                self.made[value] = self.steps.add(Step(self.steps.names.fresh(name), step.axes, value))
            found = self.made[value].itself
        return substitute_axes(found, dict(zip(step.axes, index_of(below), strict=True)))

    def _apart(self, expr: Expr, axes: frozenset[str]) -> tuple[list[Expr], Expr]:
        """What is subtracted from an expression and varies along some axes alone, and the rest."""
        match expr:
            case Call("sub", (first, second)) if free_axes(second) <= axes:
                fixed, rest = self._apart(first, axes)
                return [second, *fixed], rest
            case Call("where", (condition, part, Const(value))) if value == -math.inf:
                fixed, rest = self._apart(part, axes)
                return fixed, call("where", condition, rest, Const(-math.inf)) if fixed else expr
            case Load() if (inner := self._value(expr)) is not expr:
                fixed, rest = self._apart(inner, axes)
                return fixed, rest if fixed else expr
            case _:
                return [], expr

    def _may_absorb(self, expr: Expr) -> bool:
        """Whether a value may be so large that a logarithm is lost beside it: a number of the program, or what an input masks
        by, as a scalar put in the place of values or a tensor added to them."""
        left, seen = [expr], set[Expr]()
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            match node:
                case Const(number):
                    if TOLERANCE < abs(number) * EPSILON < math.inf:
                        return True
                case Call("where", (_, *branches)):
                    if any(isinstance(part, Scalar) and self._is_input(part) for part in branches):
                        return True
                    left += branches
                case Call(fn, args) if fn in _OF_SIZE:
                    if fn in ("add", "sub") and any(map(self._is_input, args)):
                        return True
                    left += args
                case _:
                    step = self.by_name.get(name_of(node) or "")
                    if step is not None and step.op in ("", "max", "min"):
                        left.append(step.body)
        return False

    def _is_input(self, expr: Expr) -> bool:
        name = name_of(expr)
        return name is not None and name not in self.by_name

    def _is_at_most(self, value: Expr, total: Expr) -> bool:
        """Whether a nonnegative value is at most `total`, since that is a sum of such values, or more than one."""
        step = self.by_name.get(name_of(total) or "")
        if step is None:
            return False
        if step.op == "sum":
            return self._is_one_of(value, step, total)
        parts = step.body.args if isinstance(step.body, Call) and step.body.fn == "add" else ()
        moved = [_at(part, step, total) for part in parts]
        return all(self._ranges.of(part).low >= 0 for part in moved) and any(
            self._is_at_most(value, part) for part in moved
        )

    def _is_one_of(self, value: Expr, step: Step, total: Expr) -> bool:
        """Whether a value is what a sum adds, at some position."""
        if set(step.over) & free_axes(total):
            return False
        return self._value(_at(step.body, step, total)) is self._value(value)


def _read_by(expr: Expr) -> Expr:
    """What an expression reads: itself, or what it is where that is finite, as the maximum of a row of which a mask leaves nothing is
    not."""
    match expr:
        case Call("finite", (part,)):
            return part
        case _:
            return expr


def _at(expr: Expr, step: Step, read: Expr) -> Expr:
    """An expression of a step, where the step is read."""
    at = {axis: to for axis, to in zip(step.axes, index_of(read), strict=True) if to is not Axis(axis)}
    return substitute_axes(expr, at)


class _OfSteps(Ranges):
    """What reads a step has the range of that step."""

    def __init__(self, by_name: Mapping[str, Step]) -> None:
        super().__init__()
        self._by_name = by_name

    def leaf(self, node: Expr) -> Range:
        step = self._by_name.get(name_of(node) or "")
        if step is None:
            return integer(node, 0, math.inf) if isinstance(node, Axis | Size) else UNKNOWN
        body = self.of(step.body).ends
        return Range(*(reduced(step.op, (0, math.inf), body) if step.op else body))


def taken_apart(expr: Expr) -> Expr:
    """The expression with exp(t - (m + log l)) as exp(t - m) / l, which is the same wherever log l is a number. A finite
    field knows no logarithm of a sum."""

    def step(node: Expr) -> Expr:
        match node:
            case Call("exp", (exponent,)):
                rest, factors = _without_logarithms(exponent, 1)
                value: Expr = Const(1) if rest is None else call("exp", rest)
                return reduce(lambda total, factor: call(factor[1], total, factor[0]), factors, value)
            case _:
                return node

    return transform(expr, step)


def _without_logarithms(expr: Expr, sign: int) -> tuple[Expr | None, list[tuple[Expr, str]]]:
    """A sum without the logarithms among its terms, and what these are of: a factor of the exponential, or below it."""
    match expr:
        case Call("log", (part,)):
            return None, [(part, "mul" if sign > 0 else "div")]
        case Call("add" | "sub" as fn, (first, second)):
            left, factors = _without_logarithms(first, sign)
            right, others = _without_logarithms(second, sign if fn == "add" else -sign)
            if right is None:
                return left, factors + others
            if left is None:
                return (right if fn == "add" else call("neg", right)), factors + others
            return call(fn, left, right), factors + others
        case Call("neg", (part,)):
            inner, factors = _without_logarithms(part, -sign)
            return None if inner is None else call("neg", inner), factors
        case _:
            return expr, []
