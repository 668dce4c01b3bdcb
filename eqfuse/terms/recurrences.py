"""Definitions that read themselves one position before or after, as reductions over the positions up to each one.

    h[i,t] = a[i,t] * h[i,t-1] + b[i,t]         linear_recurrence.h[k](where(k <= t, a[i,k], 1), where(k <= t, b[i,k], 0))
    v[i,t] = max(v[i,t-1] + s[i,t], b[i,t])     max_plus.h[k](where(k <= t, s[i,k], 0), where(k <= t, b[i,k], -inf))

    h[i,t] = a * h[i,t-1] + b * h[i,t-2] + c    linear_recurrence2, of two values: the last one and the one before it

A step is a function of the value before it that a few numbers say, and two steps one after the other are such a step again: that is the merge
(Blelloch, "Prefix sums and their applications", 1990, section 1.4). Before the first position the value is what adds nothing: 0, and
-inf or inf under a maximum or minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eqfuse.errors import EqfuseError, locate
from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.folds import packed
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Local, Program, Reduce, Size, call, walk

ONE, ZERO = Const(1), Const(0)

Replace = Callable[[Expr, dict[str, Expr]], Expr]
"""An expression with some of its axes replaced."""


@dataclass(frozen=True)
class Law:
    """Steps that a fold composes. `identity` is the step that changes nothing; where all of a step but what it adds is that, the reduction
    `plain` is left."""

    fold: str
    identity: tuple[Const, ...]
    plain: str = ""


NEVER, ALWAYS = Const(float("-inf")), Const(float("inf"))
AFFINE = Law("linear_recurrence", (ONE, ZERO), "sum")
SECOND = Law("linear_recurrence2", (ONE, ZERO, ZERO, ONE, ZERO, ZERO))
"""The value and the one before it: a matrix of two rows, `(a, b)` and `(1, 0)`, and `(c, 0)` that is added."""
EXTREMES = {
    "maximum": Law("max_plus", (ZERO, NEVER), "max"),
    "minimum": Law("min_plus", (ZERO, ALWAYS), "min"),
}
MOST_BEFORE = 2
"""How many positions before a step may read."""


def itself(name: str, axis: str, after: bool, distance: int) -> Local:
    """What stands, while a definition is read, for its own value some positions before or after."""
    return Local(f"{name}[{axis}{'+' if after else '-'}{distance}]", ())


def step_of(expr: Expr, before: Sequence[Local]) -> tuple[Law, tuple[Expr, ...]] | None:
    """What an expression does with the values before it, the nearest first; None where it is no step of a law."""
    found = _affine(expr, before)
    if found is not None:
        (a, b), c = found
        return (AFFINE, (a, c)) if b is ZERO else (SECOND, (a, b, ONE, ZERO, c, ZERO))
    if before[1] in walk(expr):
        return None
    for fn, law in EXTREMES.items():
        step = _extreme(fn)(expr, before[0])
        if step is not None:
            return law, step
    return None


def check_merges(program: Program, what: str, instead: str) -> None:
    """Raises EqfuseError for a program with steps that do not merge, which `what` asks for; `instead` is what to do."""
    for each in program.in_order:
        name = each.states[0]
        message = f"{name!r} is computed in order along {each.axis!r}: {what}"
        raise EqfuseError(
            message, source=program.source, span=locate(program.source, f"{name}["), hint=instead
        )


def unmerged(expr: Expr, before: Sequence[Local]) -> Expr | None:
    """The innermost part of a step that does something with the values before it that no law composes; None where one does."""
    for part in walk(expr):
        if not set(before).isdisjoint(walk(part)) and step_of(part, before) is None:
            return part
    return None


Affine = tuple[tuple[Expr, ...], Expr]
"""The factors of the values before, and what is added."""


def _affine(expr: Expr, before: Sequence[Local]) -> Affine | None:
    """An expression as a sum of the values before it, each times a factor, and something else."""

    def reads(part: Expr) -> bool:
        return not set(before).isdisjoint(walk(part))

    if not reads(expr):
        return (ZERO,) * len(before), expr
    match expr:
        case Local():
            return tuple(ONE if each is expr else ZERO for each in before), ZERO
        case Call("neg", (inner,)):
            return _each(_affine(inner, before), _neg)
        case Call("add" | "sub" as fn, (left, right)):
            return _both(_affine(left, before), _affine(right, before), lambda a, b: _plus(fn, a, b))
        case Call("mul", (left, right)) if not (reads(left) and reads(right)):
            inner, by = (left, right) if reads(left) else (right, left)
            return _each(_affine(inner, before), lambda part: _times(part, by))
        case Call("div", (inner, by)) if not reads(by):
            return _each(_affine(inner, before), lambda part: part if part is ZERO else call("div", part, by))
        case Call("where", (condition, left, right)) if not reads(condition):
            return _both(_affine(left, before), _affine(right, before), lambda a, b: _chosen(condition, a, b))
    return None


def _each(found: Affine | None, change: Callable[[Expr], Expr]) -> Affine | None:
    return found and (tuple(map(change, found[0])), change(found[1]))


def _both(one: Affine | None, other: Affine | None, join: Callable[[Expr, Expr], Expr]) -> Affine | None:
    if one is None or other is None:
        return None
    return tuple(join(a, b) for a, b in zip(one[0], other[0], strict=True)), join(one[1], other[1])


def _extreme(fn: str) -> Callable[[Expr, Local], tuple[Expr, Expr] | None]:
    """Reads steps `max(h + p, q)`."""
    never = EXTREMES[fn].identity[1]

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
                one, other = read(left, h), read(right, h)
                if one is None or other is None:
                    return None
                return _chosen(condition, one[0], other[0]), _chosen(condition, one[1], other[1])
        return None

    return read


def _chosen(condition: Expr, left: Expr, right: Expr) -> Expr:
    return left if left is right else call("where", condition, left, right)


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


def prefix_of(law: Law, step: Sequence[Expr], axis: str, k: str, after: bool, replace: Replace) -> Expr:
    """The value of a recurrence along an axis, as a reduction over `k`, of the same extent, of its steps at `axis`. From the
    last position on, with `after`."""
    last = call("sub", Size(axis), ONE)
    read: Expr = Axis(k)
    bound: Expr = Axis(axis)
    if after:
        read, bound = call("sub", last, Axis(k)), call("sub", last, Axis(axis))
    seen = call("le", Axis(k), bound)
    parts = [
        call("where", seen, replace(part, {axis: read}), none)
        for part, none in zip(step, law.identity, strict=True)
    ]
    if law.plain and step[0] is law.identity[0]:
        return Reduce(law.plain, k, parts[1])
    return Reduce(f"{law.fold}.h", k, packed(parts))
