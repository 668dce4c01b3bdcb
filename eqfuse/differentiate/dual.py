"""Dual numbers a + b ε with ε² = 0 over any domain: a program that is run on them gives its directional derivative.

In a finite field that derivative is exact. The rules here are written by hand, apart from the table of functions that
gradients are made from: one is checked against the other. What no formula defines there is a convention: of two equal
numbers the maximum has the mean of both derivatives, of a reduction the first of equals has it, a step has none.

An exponent keeps its residue modulo q; a tangent never becomes an exponent, so it needs its residue modulo p alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.errors import EqfuseError
from eqfuse.terms.domain import Domain, Watch
from eqfuse.terms.functions import CASTS, OF_INTEGERS, ROUNDINGS
from eqfuse.verify.field.array import FieldArray, extreme


@dataclass(eq=False)
class Dual:
    """`value + tangent ε`, arrays of one shape; a tangent of None is 0."""

    value: Any
    tangent: Any = None


LIMITS = {"at_least": "maximum", "at_most": "minimum"}
"""Functions whose values are those of others."""


class DualDomain:
    """Implements `terms.domain.Domain`, over another one."""

    name = "dual numbers"
    watch: Watch | None = None
    orders = True
    of_first = True
    """Folds are combined as `Fold.of_first` says."""

    def __init__(self, base: Domain) -> None:
        self.base = base
        self._rules: dict[str, Callable[[Any, Any, Any], Any]] = {
            # The tangent, from the argument, the value and the argument's tangent.
            "neg": lambda x, y, t: self._call("neg", t),
            "abs": lambda x, y, t: self._call("mul", t, self._call("sign", x)),
            "relu": lambda x, y, t: self.base.where(self._positive(x), t, self._number(0.0)),
            "sq": lambda x, y, t: self._call("mul", self._twice(x), t),
            "exp": lambda x, y, t: self._call("mul", y, t),
            "log": lambda x, y, t: self._call("div", t, x),
            "log1p": lambda x, y, t: self._call("div", t, self._call("add", self._number(1.0), x)),
            "expm1": lambda x, y, t: self._call("mul", self._call("add", self._number(1.0), y), t),
            "sqrt": lambda x, y, t: self._call("div", t, self._twice(y)),
            "rsqrt": lambda x, y, t: self._call(
                "neg", self._call("div", self._call("mul", y, t), self._twice(x))
            ),
            "root": lambda x, y, t: self.base.where(
                self.base.compare("ne", x, self._number(0.0)),
                self._call("div", t, self._twice(y)),
                self._number(0.0),
            ),
            "tanh": lambda x, y, t: self._call("mul", self._complement(self._call("mul", y, y)), t),
            "sigmoid": lambda x, y, t: self._call("mul", self._call("mul", y, self._complement(y)), t),
            "silu": self._silu,
            "gelu": self._gelu,
            "erf": lambda x, y, t: self._call("mul", self._bell(x, 1.0, math.pi, 2.0), t),
            "sin": lambda x, y, t: self._call("mul", self._call("cos", x), t),
            "cos": lambda x, y, t: self._call("neg", self._call("mul", self._call("sin", x), t)),
            "finite": lambda x, y, t: t,
            "invertible": lambda x, y, t: t,
            **dict.fromkeys(CASTS, lambda x, y, t: t),
        }

    def _call(self, fn: str, *args: Any) -> Any:
        return self.base.call(fn, args)

    def _number(self, number: float) -> Any:
        return self.base.full((), number)

    def _twice(self, value: Any) -> Any:
        return self._call("add", value, value)

    def _complement(self, value: Any) -> Any:
        return self._call("sub", self._number(1.0), value)

    def _positive(self, value: Any) -> npt.NDArray[np.bool_]:
        return self.base.compare("gt", value, self._number(0.0))

    def _bell(self, x: Any, exponent: float, under: float, factor: float) -> Any:
        """factor * exp(-exponent * x * x) / sqrt(under)"""
        power = self._call("exp", self._call("mul", self._number(-exponent), self._call("mul", x, x)))
        over = self._call("mul", self._number(factor), power)
        return self._call("div", over, self._call("sqrt", self._number(under)))

    def _silu(self, x: Any, y: Any, t: Any) -> Any:
        s = self._call("sigmoid", x)
        inner = self._call("add", self._number(1.0), self._call("mul", x, self._complement(s)))
        return self._call("mul", self._call("mul", s, inner), t)

    def _gelu(self, x: Any, y: Any, t: Any) -> Any:
        root = self._call("sqrt", self._number(0.5))
        below = self._call("add", self._number(1.0), self._call("erf", self._call("mul", x, root)))
        power = self._call("exp", self._call("mul", self._number(-0.5), self._call("mul", x, x)))
        circle = self._call("mul", self._number(2.0), self._number(math.pi))
        density = self._call("div", power, self._call("sqrt", circle))
        slope = self._call("add", self._call("mul", self._number(0.5), below), self._call("mul", x, density))
        return self._call("mul", slope, t)

    def _sum(self, *terms: Any) -> Any:
        """The sum of tangents, of which some may be None."""
        known = [term for term in terms if term is not None]
        return reduce(lambda a, b: self._call("add", a, b), known) if known else None

    # -- the protocol --------------------------------------------------------------------------------

    def full(self, shape: tuple[int, ...], number: float) -> Dual:
        return Dual(self.base.full(shape, number))

    def irrational(self, name: str, shape: tuple[int, ...]) -> Dual:
        return Dual(self.base.irrational(name, shape))

    def lift(self, integers: npt.NDArray[Any]) -> Dual:
        return Dual(self.base.lift(integers))

    def drawn(self, fn: str, integers: Sequence[npt.NDArray[Any]]) -> Dual:
        return Dual(self.base.drawn(fn, integers))

    def rounded(self, dtype: str, value: Dual) -> Dual:
        return value

    def call(self, fn: str, args: Sequence[Dual]) -> Dual:
        value = self.base.call(LIMITS.get(fn, fn), [arg.value for arg in args])
        if all(arg.tangent is None for arg in args):
            return Dual(value)
        return Dual(value, self._shaped(self._tangent(fn, args, value), value))

    def _shaped(self, tangent: Any, value: Any) -> Any:
        shape = self.base.shape(value)
        if tangent is None or self.base.shape(tangent) == shape:
            return tangent
        return self.base.broadcast(tangent, shape)

    def _tangent(self, fn: str, args: Sequence[Dual], value: Any) -> Any:
        match fn, args:
            case "add", (x, y):
                return self._sum(x.tangent, y.tangent)
            case "sub", (x, y):
                return self._sum(x.tangent, None if y.tangent is None else self._call("neg", y.tangent))
            case "mul", (x, y):
                return self._sum(self._scaled(x.value, y.tangent), self._scaled(y.value, x.tangent))
            case "div", (x, y):
                lost = self._scaled(value, y.tangent)
                over = self._sum(x.tangent, None if lost is None else self._call("neg", lost))
                return self._call("div", over, y.value)
            case (("maximum" | "minimum"), (x, y)):
                return self._greater(x, y, "gt" if fn == "maximum" else "lt")
            case (("at_least" | "at_most"), (x, y)):
                one, two = (self._number(0.0) if t is None else t for t in (x.tangent, y.tangent))
                inside = self.base.compare("ge" if fn == "at_least" else "le", x.value, y.value)
                return self.base.where(inside, one, two)
            case "atan2", (y, x):
                lost = self._scaled(y.value, x.tangent)
                turned = self._sum(
                    self._scaled(x.value, y.tangent), None if lost is None else self._call("neg", lost)
                )
                squares = (self._call("mul", part.value, part.value) for part in (x, y))
                return self._call("div", turned, self._call("add", *squares))
            case "mod", (x, y):
                whole = self._call("floor", self._call("div", x.value, y.value))
                lost = self._scaled(whole, y.tangent)
                return self._sum(x.tangent, None if lost is None else self._call("neg", lost))
            case (("floor" | "round" | "sign" | "floordiv" | "stop"), _):
                return None
            case (fn, _) if fn in ROUNDINGS or fn in OF_INTEGERS:
                return None
            case _, (x,) if fn in self._rules:
                return self._rules[fn](x.value, value, x.tangent)
        hint = "no certificate is made of it; compare the gradient with differences"
        raise EqfuseError(f"{fn!r} has no rule for dual numbers", hint=hint)

    def _scaled(self, value: Any, tangent: Any) -> Any:
        return None if tangent is None else self._call("mul", value, tangent)

    def _greater(self, x: Dual, y: Dual, fn: str) -> Any:
        zero = self._number(0.0)
        one, two = (zero if side.tangent is None else side.tangent for side in (x, y))
        mean = self._call("mul", self._number(0.5), self._call("add", one, two))
        equal = self.base.where(self.base.compare("eq", x.value, y.value), mean, two)
        return self.base.where(self.base.compare(fn, x.value, y.value), one, equal)

    def compare(self, fn: str, left: Dual, right: Dual) -> npt.NDArray[Any]:
        return self.base.compare(fn, left.value, right.value)

    def where(self, condition: npt.NDArray[Any], left: Dual, right: Dual) -> Dual:
        value = self.base.where(condition, left.value, right.value)
        if left.tangent is None and right.tangent is None:
            return Dual(value)
        zero = self._number(0.0)
        one, two = (zero if side.tangent is None else side.tangent for side in (left, right))
        return Dual(value, self._shaped(self.base.where(condition, one, two), value))

    def reduce(self, op: str, value: Dual, axis: int) -> Dual:
        base = self.base
        found = base.reduce(op, value.value, axis)
        if value.tangent is None or not base.shape(value.value)[axis]:
            return Dual(found)
        match op:
            case "sum":
                return Dual(found, base.reduce("sum", value.tangent, axis))
            case "prod":
                return Dual(found, self._product(value, axis))
            case _:
                return Dual(found, _chosen(base, op, value, axis))

    def _product(self, value: Dual, axis: int) -> Any:
        parts = [
            self.take(value, (*(slice(None),) * axis, at)) for at in range(self.base.shape(value.value)[axis])
        ]
        return reduce(lambda x, y: self.call("mul", [x, y]), parts).tangent

    def contract(self, left: Dual, right: Dual, axis: int) -> Dual:
        value = self.base.contract(left.value, right.value, axis)
        terms = [
            None if tangent is None else self.base.contract(tangent, other, axis)
            for tangent, other in ((left.tangent, right.value), (right.tangent, left.value))
        ]
        return Dual(value, self._shaped(self._sum(*terms), value))

    def is_finite(self, value: Dual) -> bool:
        return self.base.is_finite(value.value) and (
            value.tangent is None or self.base.is_finite(value.tangent)
        )

    def shape(self, value: Dual) -> tuple[int, ...]:
        return self.base.shape(value.value)

    def _each(self, value: Dual, change: Callable[[Any], Any]) -> Dual:
        return Dual(change(value.value), None if value.tangent is None else change(value.tangent))

    def reshape(self, value: Dual, shape: tuple[int, ...]) -> Dual:
        return self._each(value, lambda part: self.base.reshape(part, shape))

    def transpose(self, value: Dual, order: Sequence[int]) -> Dual:
        return self._each(value, lambda part: self.base.transpose(part, order))

    def broadcast(self, value: Dual, shape: tuple[int, ...]) -> Dual:
        return self._each(value, lambda part: self.base.broadcast(part, shape))

    def take(self, value: Dual, index: tuple[Any, ...]) -> Dual:
        return self._each(value, lambda part: self.base.take(part, index))

    def put(self, target: Dual, index: tuple[Any, ...], value: Dual) -> None:
        self.base.put(target.value, index, value.value)
        if value.tangent is not None:
            if target.tangent is None:
                target.tangent = self.base.full(self.base.shape(target.value), 0.0)
            self.base.put(target.tangent, index, value.tangent)
        elif target.tangent is not None:
            self.base.put(target.tangent, index, self.base.full(self.base.shape(value.value), 0.0))


def _chosen(base: Domain, op: str, value: Dual, axis: int) -> Any:
    """The tangent where the extreme is; a bound for all of them where values have no order (degrees)."""
    if not isinstance(value.value, FieldArray):
        return base.reduce(op, value.tangent, axis)
    at = np.expand_dims(extreme(op, value.value, axis), axis)
    return value.tangent.each(lambda part: np.take_along_axis(part, at, axis).squeeze(axis))
