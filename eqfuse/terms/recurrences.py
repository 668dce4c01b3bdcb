"""Definitions that read themselves one position before or after, as reductions over the positions up to each one.

    h[i,t] = a[i,t] * h[i,t-1] + b[i,t]         linear_recurrence.h[k](where(k <= t, a[i,k], 1), where(k <= t, b[i,k], 0))
    v[i,t] = max(v[i,t-1] + s[i,t], b[i,t])     max_plus.h[k](where(k <= t, s[i,k], 0), where(k <= t, b[i,k], -inf))

A step is a function of the value before it that two numbers say, and two steps one after the other are such a step again: that is the merge
(Blelloch, "Prefix sums and their applications", 1990, section 1.4). Before the first position the value is what adds nothing: 0, and
-inf or inf under a maximum or minimum.
"""

from __future__ import annotations

from collections.abc import Callable

from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.folds import packed
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Local, Reduce, Size, call, walk

ONE, ZERO = Const(1), Const(0)

Replace = Callable[[Expr, dict[str, Expr]], Expr]
"""An expression with some of its axes replaced."""


@dataclass(frozen=True)
class Law:
    """Steps `apply(h, p, q)` of two numbers: `same` is the one that changes nothing, `before` the value before the first. Where p is that of
    `same` throughout, what is left is the reduction `plain`."""

    fold: str
    plain: str
    same: tuple[Const, Const]


AFFINE = Law("linear_recurrence", "sum", (ONE, ZERO))
EXTREMES = {
    "maximum": Law("max_plus", "max", (ZERO, Const(float("-inf")))),
    "minimum": Law("min_plus", "min", (ZERO, Const(float("inf")))),
}


def itself(name: str, axis: str, after: bool) -> Local:
    """What stands, while a definition is read, for its own value at the position before or after."""
    return Local(f"{name}[{axis}{'+' if after else '-'}1]", ())


def step_of(expr: Expr, before: Local) -> tuple[Law, Expr, Expr] | None:
    """What an expression does with the value before it; None where it is no step of a law."""
    for law, read in ((AFFINE, _affine), *((law, _extreme(fn)) for fn, law in EXTREMES.items())):
        found = read(expr, before)
        if found is not None:
            return law, *found
    return None


def _affine(expr: Expr, h: Local) -> tuple[Expr, Expr] | None:
    """Of `h * p + q`, p and q."""
    if h not in walk(expr):
        return ZERO, expr
    match expr:
        case Local():
            return ONE, ZERO
        case Call("neg", (inner,)):
            found = _affine(inner, h)
            return found and (_neg(found[0]), _neg(found[1]))
        case Call("add" | "sub" as fn, (left, right)):
            one, other = _affine(left, h), _affine(right, h)
            if one is None or other is None:
                return None
            return _plus(fn, one[0], other[0]), _plus(fn, one[1], other[1])
        case Call("mul", (left, right)):
            if h in walk(left) and h in walk(right):
                return None
            inner, by = (left, right) if h in walk(left) else (right, left)
            found = _affine(inner, h)
            return found and (_times(found[0], by), _times(found[1], by))
        case Call("div", (inner, by)) if h not in walk(by):
            found = _affine(inner, h)
            return found and tuple(part if part is ZERO else call("div", part, by) for part in found)  # type: ignore[return-value]
        case Call("where", (condition, left, right)) if h not in walk(condition):
            return _chosen(condition, _affine(left, h), _affine(right, h))
    return None


def _extreme(fn: str) -> Callable[[Expr, Local], tuple[Expr, Expr] | None]:
    """Reads steps `max(h + p, q)`."""
    never = EXTREMES[fn].same[1]

    def read(expr: Expr, h: Local) -> tuple[Expr, Expr] | None:
        if h not in walk(expr):
            return never, expr
        match expr:
            case Local():
                return ZERO, never
            case Call("add", (left, right)) if not (h in walk(left) and h in walk(right)):
                inner, by = (left, right) if h in walk(left) else (right, left)
                found = read(inner, h)
                return found and (_moved("add", found[0], by, never), _moved("add", found[1], by, never))
            case Call("sub", (inner, by)) if h not in walk(by):
                found = read(inner, h)
                return found and (_moved("sub", found[0], by, never), _moved("sub", found[1], by, never))
            case Call(name, (left, right)) if name == fn:
                one, other = read(left, h), read(right, h)
                if one is None or other is None:
                    return None
                return _joined(fn, one[0], other[0], never), _joined(fn, one[1], other[1], never)
            case Call("where", (condition, left, right)) if h not in walk(condition):
                return _chosen(condition, read(left, h), read(right, h))
        return None

    return read


def _chosen(
    condition: Expr, one: tuple[Expr, Expr] | None, other: tuple[Expr, Expr] | None
) -> tuple[Expr, Expr] | None:
    if one is None or other is None:
        return None
    first, second = (a if a is b else call("where", condition, a, b) for a, b in zip(one, other, strict=True))
    return first, second


def _neg(expr: Expr) -> Expr:
    return expr if expr is ZERO else call("neg", expr)


def _plus(fn: str, left: Expr, right: Expr) -> Expr:
    if right is ZERO:
        return left
    if left is ZERO:
        return right if fn == "add" else call("neg", right)
    return call(fn, left, right)


def _times(left: Expr, right: Expr) -> Expr:
    return left if left is ZERO else right if left is ONE else call("mul", left, right)


def _moved(fn: str, expr: Expr, by: Expr, never: Expr) -> Expr:
    if expr is never:
        return never
    return by if expr is ZERO and fn == "add" else call(fn, expr, by)


def _joined(fn: str, left: Expr, right: Expr, never: Expr) -> Expr:
    return right if left is never else left if right is never else call(fn, left, right)


def prefix_of(law: Law, p: Expr, q: Expr, axis: str, k: str, after: bool, replace: Replace) -> Expr:
    """The value of a recurrence along an axis, as a reduction over `k`, of the same extent: `p` and `q` are its steps at `axis`. From the
    last position on, with `after`."""
    last = call("sub", Size(axis), ONE)
    read: Expr = Axis(k)
    bound: Expr = Axis(axis)
    if after:
        read, bound = call("sub", last, Axis(k)), call("sub", last, Axis(axis))
    seen = call("le", Axis(k), bound)
    first, second = (replace(part, {axis: read}) for part in (p, q))
    if p is law.same[0]:
        return Reduce(law.plain, k, call("where", seen, second, law.same[1]))
    parts = [call("where", seen, part, none) for part, none in zip((first, second), law.same, strict=True)]
    return Reduce(f"{law.fold}.h", k, packed(parts))
