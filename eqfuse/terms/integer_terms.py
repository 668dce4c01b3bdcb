"""Sums, products, quotients and comparisons of integers as expressions, with what is known of them at once: units, zeros and numbers.

Indices that views make, and the closed forms of sums over positions, are made of these.
"""

from __future__ import annotations

import operator

from eqfuse.terms.nodes import Axis, Call, Const, Expr, call


def plus(left: Expr, right: Expr) -> Expr:
    """Their sum."""
    match left, right:
        case Const(int(a)), Const(int(b)):
            return Const(a + b)
        case Const(0), other:
            return other
        case other, Const(0):
            return other
        case Call("add", (inner, Const(int(a)))), Const(int(b)):
            return plus(inner, Const(a + b))
        case Call("sub", (inner, Const(int(a)))), Const(int(b)):
            return plus(inner, Const(b - a))
        case Call("sub", (inner, a)), b if a == b:
            return inner
        case other, Const(int(b)) if b < 0:
            return call("sub", other, Const(-b))
        case _:
            return call("add", left, right)


def minus(left: Expr, right: Expr) -> Expr:
    """Their difference."""
    match left, right:
        case a, b if a == b:
            return Const(0)
        case a, Const(int(b)):
            return plus(a, Const(-b))
        case Const(0), b:
            return call("neg", b)
        case Call("add", (a, b)), c if b == c:
            return a
        case _:
            return call("sub", left, right)


def compared(fn: str, left: Expr, right: Expr) -> Expr:
    """A comparison, decided where both sides are a number apart."""
    (one, first), (other, second) = _apart(left), _apart(right)
    if one == other and isinstance(one, Axis | None):
        return Const(bool(getattr(operator, fn)(first, second)))
    return call(fn, left, right)


def _apart(index: Expr) -> tuple[Expr | None, int]:
    """A position as a sum of an expression, None for a number, and a number."""
    match index:
        case Const(int(number)):
            return None, number
        case Call("add", (Axis() as axis, Const(int(number)))):
            return axis, number
        case Call("sub", (Axis() as axis, Const(int(number)))):
            return axis, -number
        case _:
            return index, 0


def times(left: Expr, right: Expr) -> Expr:
    """Their product."""
    match left, right:
        case Const(int(a)), Const(int(b)):
            return Const(a * b)
        case (Const(0), _) | (_, Const(0)):
            return Const(0)
        case (Const(1), other) | (other, Const(1)):
            return other
        case _:
            return call("mul", left, right)


def divided(left: Expr, right: Expr) -> Expr:
    """The quotient of one by the other, rounded down."""
    match left, right:
        case Const(int(a)), Const(int(b)):
            return Const(a // b)
        case other, Const(1):
            return other
        case _:
            return call("floordiv", left, right)


def remaining(left: Expr, right: Expr) -> Expr:
    """The remainder of that quotient."""
    match left, right:
        case Const(int(a)), Const(int(b)):
            return Const(a % b)
        case _, Const(1):
            return Const(0)
        case _:
            return call("mod", left, right)
