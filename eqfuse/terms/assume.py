"""Expressions simplified where a condition is known to hold, or not to.

The laws are exact, NaN and infinities included. Elements of input tensors are taken to be finite; named values are
not: an unguarded difference of two of them may be inf - inf, so only what `finite` and `invertible` guard, or what
is finite by itself, cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from eqfuse.terms.dtypes import FLOAT8
from eqfuse.terms.functions import CASTS, COMPARISONS, FUNCTIONS
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Call,
    Const,
    Expr,
    Local,
    Reduce,
    call,
    children,
    free_axes,
    rebuild,
    replaced,
    walk,
)
from eqfuse.terms.ranges import FiniteInputs, Ranges

ZERO, ONE = Const(0.0), Const(1.0)
LOW, HIGH = Const(-math.inf), Const(math.inf)

Supposed = Callable[[Expr, Expr], Expr]
"""What is supposed of a node, given as it is written and as it was simplified."""

_KEEP_ZERO = frozenset(name for name, row in FUNCTIONS.items() if row.zero_at_zero)
_WIDE_CASTS = frozenset(CASTS) - FLOAT8.keys()


def is_zero_without(expr: Expr, predicate: Expr, value: bool) -> bool:
    """Whether `expr` is 0 or NaN wherever `predicate` has this truth value, whatever the named values in it are."""
    axes = free_axes(predicate)
    folds = [node for node in walk(expr) if isinstance(node, Reduce) and node.axis in axes]
    expr = replaced(expr, {fold: Local(f"%{place}", ()) for place, fold in enumerate(folds)})
    return _is_zero(simplified(expr, {}, predicate, value, up_to_nan=True))


def simplified(
    expr: Expr,
    known: Mapping[str, Expr],
    predicate: Expr,
    value: bool,
    *,
    up_to_nan: bool = False,
    supposed: Supposed | None = None,
) -> Expr:
    """`expr` with named values replaced and the predicate assumed; names left over lose their dims. `up_to_nan`, it
    may say a number where `expr` is NaN: whatever is not seen to be infinite or 0 is taken to be neither. `supposed` gives
    what is supposed of a node of `expr`, from it and what it was simplified to."""
    memo: dict[Expr, Expr] = {}
    ranges = FiniteInputs()
    for node in walk(expr):
        match node:
            case _ if node is predicate:
                memo[node] = Const(value)
            case Local(name, _):
                memo[node] = known.get(name, Local(name, ()))
            case _:
                again = rebuild(node, tuple(memo[child] for child in children(node)))
                found = _simplify(again, ranges, up_to_nan)
                memo[node] = found if supposed is None else supposed(node, found)
    return memo[expr]


def _is_no_infinity(expr: Expr) -> bool:
    return not isinstance(expr, Const) or math.isfinite(expr.value)


def _is_no_zero(expr: Expr) -> bool:
    return not _is_zero(expr)


def _is_zero(expr: Expr) -> bool:
    return isinstance(expr, Const) and not isinstance(expr.value, bool) and expr.value == 0


def _is_one(expr: Expr) -> bool:
    return isinstance(expr, Const) and not isinstance(expr.value, bool) and expr.value == 1


def _simplify(expr: Expr, ranges: Ranges, up_to_nan: bool) -> Expr:
    match expr:
        case Call(fn, (left, right)) if fn in COMPARISONS:
            return _compared(expr, fn, left, right)
        case Call("and" | "or" | "not", _) | Call("where", _):
            return choose(expr)
        case Call(fn, (left, right)):
            return _binary(expr, fn, left, right, ranges, up_to_nan)
        case Call(fn, (part,)):
            return _unary(expr, fn, part, ranges, up_to_nan)
        case Reduce(op, _, Const(number)) if op in REDUCTIONS and number == REDUCTIONS[op]:
            return Const(REDUCTIONS[op])
        case _:
            return expr


def choose(expr: Expr) -> Expr:
    """A logical function or a `where` with the known truth values among its arguments used."""
    match expr:
        case Call("not", (Const(value),)):
            return Const(not value)
        case Call("and", (Const(value), other)) | Call("and", (other, Const(value))):
            return other if value else Const(False)
        case Call("or", (Const(value), other)) | Call("or", (other, Const(value))):
            return Const(True) if value else other
        case Call("where", (Const(value), left, right)):
            return left if value else right
        case Call("where", (_, left, right)) if left is right:
            return left
        case _:
            return expr


def _compared(expr: Expr, fn: str, left: Expr, right: Expr) -> Expr:
    if isinstance(left, Const) and isinstance(right, Const):
        a, b = left.value, right.value
        return Const({"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b}[fn])
    if (fn == "ge" and right is LOW) or (fn == "le" and left is LOW):
        return Const(True)
    return expr


def _binary(expr: Expr, fn: str, left: Expr, right: Expr, ranges: Ranges, up_to_nan: bool) -> Expr:
    finite = _is_no_infinity if up_to_nan else ranges.is_finite
    nonzero = _is_no_zero if up_to_nan else ranges.is_nonzero
    match fn:
        case "maximum" | "minimum":
            unit = LOW if fn == "maximum" else HIGH
            if left is unit or left is right:
                return right
            return left if right is unit else expr
        case "add":
            if _is_zero(left):
                return right
            if _is_zero(right):
                return left
            if (left in (LOW, HIGH) and finite(right)) or (right in (LOW, HIGH) and finite(left)):
                return left if left in (LOW, HIGH) else right
        case "sub":
            if _is_zero(right):
                return left
            if left in (LOW, HIGH) and finite(right):
                return left
            if left is right and finite(left):
                return ZERO
        case "mul":
            if _is_one(left):
                return right
            if _is_one(right):
                return left
            if (_is_zero(left) and finite(right)) or (_is_zero(right) and finite(left)):
                return ZERO
            if left in (LOW, HIGH) and ranges.is_positive(right):
                return left
            if right in (LOW, HIGH) and ranges.is_positive(left):
                return right
        case "div":
            if _is_one(right):
                return left
            if _is_zero(left) and nonzero(right):
                return ZERO
            if left is right and finite(left) and nonzero(left):
                return ONE
            if left in (LOW, HIGH) and ranges.is_positive(right):
                return left
    return expr


def _unary(expr: Expr, fn: str, part: Expr, ranges: Ranges, up_to_nan: bool) -> Expr:
    finite = _is_no_infinity if up_to_nan else ranges.is_finite
    match fn, part:
        case "finite", _ if finite(part):
            return part
        case "finite", Const(number) if math.isinf(number):
            return ZERO
        case "invertible", Const(number):
            return ONE if number == 0 or math.isinf(number) else part
        case "exp", _ if part is LOW:
            return ZERO
        case "exp", _ if _is_zero(part):
            return ONE
        case "neg", Const(number):
            return Const(-number)
        case (("abs" | "sq"), Const(number)) if math.isinf(number):
            return HIGH
        case (("relu" | "sigmoid"), _) if part is LOW:
            return ZERO
        case _ if fn in _KEEP_ZERO and _is_zero(part):
            return ZERO
        case _ if fn in ("sq", "sqrt", "abs", *_WIDE_CASTS) and _is_one(part):
            return ONE
        case _ if fn in _WIDE_CASTS and part in (LOW, HIGH):
            return part
        case _:
            return expr


def conjuncts(condition: Expr, value: bool) -> tuple[Expr, ...]:
    """Conditions that all hold where `condition` has this truth value."""
    match condition:
        case Call("not", (part,)):
            return conjuncts(part, not value)
        case Call("and", (left, right)) if value:
            return conjuncts(left, True) + conjuncts(right, True)
        case Call("or", (left, right)) if not value:
            return conjuncts(left, False) + conjuncts(right, False)
        case _:
            return (condition if value else call("not", condition),)


def folded(expr: Expr, proven: Mapping[Expr, bool]) -> Expr:
    """`expr` with proven predicates replaced by their truth values, and what they choose chosen."""
    memo: dict[Expr, Expr] = {}
    for node in walk(expr):
        if node in proven:
            memo[node] = Const(proven[node])
        else:
            memo[node] = choose(rebuild(node, tuple(memo[child] for child in children(node))))
    return memo[expr]
