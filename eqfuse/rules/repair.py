"""Total repairs: what a rolling or split computation does where a repair factor has no inverse.

While a maximum is still -inf, or a scale still 0, the factor H(r) of a body g = H(r) * G(x) cannot be
divided out later. Then the reduction has only seen its identity, so any finite factor is right
(RedFuser, appendix A.1): H'(r) = H(r) where that is finite and not 0, else 1. Bodies and repairs both use
H'; at the end H(r) / H'(r), 1 except where the guard was still active, restores what the unfused program
gives (usually NaN). A term t of a sum that is infinite so far, as a maximum may be, is t' = 0 likewise, and t - t'
is added at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce

from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import fold_of
from eqfuse.terms.interpreter import Env, evaluate_expr
from eqfuse.terms.nodes import (
    CASTS,
    REDUCTIONS,
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    post_order,
    rebuild,
    replaced,
    transform,
    walk,
)

GUARDS = ("finite", "invertible")

NOTHING = {op: Const(REDUCTIONS[op]) for op in ("sum", "max")}
"""What a mask drops for, so that it leaves a reduction as it is."""


def reads_state(expr: Expr) -> bool:
    """Whether the value of `expr` depends on a state."""
    return any(isinstance(node, Local) for node in walk(expr))


def guarded(fn: str, value: Expr) -> Expr:
    """`finite(value)` or `invertible(value)`, where that can change the value."""
    match value:
        case Const():
            return value
        case Call(outer, _) if outer == fn:
            return value
        case Call("add" | "sub" as sign, (a, b)) if fn == "finite" and reads_state(value):
            # term by term: -inf + inf would be NaN, and of a difference of two sums rules cancel common terms
            return call(sign, guarded(fn, a), guarded(fn, b))
        case Call("mul" | "div" as joint, (a, b)) if fn == "invertible" and reads_state(a) and reads_state(b):
            # factor by factor, as repairs divide them: one that is 0 so far leaves the other what it is
            return call(joint, guarded(fn, a), guarded(fn, b))
        case Call("mul", (a, b)) if reads_state(a) and reads_state(b):
            # a maximum of nothing times a sum of nothing would be NaN
            return call(fn, call("mul", guarded(fn, a), guarded(fn, b)))
        case _:
            return call(fn, value)


@dataclass(frozen=True)
class Guarded:
    """A body with H' for H. In the end its reduction is multiplied by `factor` and `term` is added; None where
    nothing was guarded so. `inner` are sums with a guarded term inside other functions, `lost` those of them
    whose infinity nothing restores."""

    body: Expr
    factor: Expr | None = None
    term: Expr | None = None
    inner: tuple[Expr, ...] = ()
    lost: tuple[Expr, ...] = ()

    @property
    def recovers(self) -> bool:
        return self.factor is not None or self.term is not None

    def recovered(self, value: Expr) -> Expr:
        """The exact value of the reduction from that of the guarded body."""
        if self.factor is not None:
            value = call("mul", value, self.factor)
        return value if self.term is None else call("add", value, self.term)


Extremes = Mapping[str, Expr]
"""The bodies of maxima and minima by the names under which they are read: states that are infinite at first."""


def guard_body(body: Expr, op: str, axis: str, extremes: Extremes) -> Guarded:
    """The body of a reduction over `axis`, made total in the states that it reads."""
    if not reads_state(body) or fold_of(op) is not None:
        return Guarded(body)
    found, factor = _factors(body, axis)
    term: Expr | None = None
    inner: tuple[_Shift, ...] = ()
    if factor is None and op in ("max", "min"):
        found, term = _addends(body, axis)
    elif op == "sum":
        if factor is None:
            found, term = _addends(body, axis, NOTHING["sum"], lambda addend: _reads(addend, extremes))
        found, inner = _inner_addends(found, axis, extremes)
    for shift in dict.fromkeys(shift.fixed for shift in inner):
        undefined = call("mul", call("sub", shift, guarded("finite", shift)), Const(0))
        term = _joined("add", term, undefined)
    for divisor in _divisors(body, axis):
        factor = _joined("mul", factor, call("div", call("invertible", divisor), divisor))
    totals = frozenset(shift.total for shift in inner)
    weighed = any(
        shift.total in walk(a) and _can_be_infinite(b, axis, totals)
        for shift in inner
        for node in walk(body)
        if isinstance(node, Call) and node.fn == "mul"
        for a, b in (node.args, node.args[::-1])
    )
    lost = tuple(shift.total for shift in inner if weighed or not shift.own)
    return Guarded(guard_divisors(found, axis), factor, term, tuple(shift.total for shift in inner), lost)


def _reads(expr: Expr, names: Extremes) -> bool:
    return any(isinstance(node, Local) and node.name in names for node in walk(expr))


@dataclass(frozen=True)
class _Shift:
    """`total` is the sum or difference of a varying value and `fixed`, which reads an extreme. It is an extreme of
    that value itself (`own`) in x - max x: where the maximum is infinite one x is, and the difference NaN."""

    total: Expr
    fixed: Expr
    own: bool


def _inner_addends(body: Expr, axis: str, extremes: Extremes) -> tuple[Expr, tuple[_Shift, ...]]:
    """Guards the extremes that are added to inside other functions."""
    shifts: list[_Shift] = []

    def shifted(node: Expr, varying: Expr, fixed: Expr) -> bool:
        if not (_is_hoisted(fixed, axis) and _reads(fixed, extremes)) or guarded("finite", fixed) is fixed:
            return False
        bodies = {n: extremes[n.name] for n in walk(fixed) if isinstance(n, Local) and n.name in extremes}
        own = isinstance(node, Call) and node.fn == "sub" and replaced(fixed, bodies) is varying
        shifts.append(_Shift(node, fixed, own))
        return True

    def step(node: Expr) -> Expr:
        match node:
            case Call("add" | "sub" as sign, (a, b)) if axis in free_axes(node):
                if shifted(node, a, b):
                    return call(sign, a, guarded("finite", b))
                if shifted(node, b, a):
                    return call(sign, guarded("finite", a), b)
        return node

    return transform(body, step), tuple(shifts)


def _can_be_infinite(factor: Expr, axis: str, totals: frozenset[Expr]) -> bool:
    """Whether an infinite input may make `factor` infinite where none of these sums is: times one that is 0 for
    now, that is NaN. Exponents in bodies are at most 0."""
    if factor in totals or axis not in free_axes(factor):
        return False
    match factor:
        case Call("exp", _):
            return False
        case Call(_, args):
            return any(_can_be_infinite(arg, axis, totals) for arg in args)
        case _:
            return True


def finite_states(value: Expr, names: frozenset[str]) -> Expr:
    """`value` with these states guarded where they are read outside any guard."""
    match value:
        case Local(name, _) if name in names:
            return guarded("finite", value)
        case Call(fn, _) if fn in GUARDS:
            return value
        case _:
            return rebuild(value, tuple(finite_states(part, names) for part in children(value)))


def kept(body: Expr, op: str, axis: str, extremes: Extremes) -> Expr | None:
    """1 where a guarded value is kept by the masks around it, else 0: what all masks drop needs no recovery.
    None where nothing is guarded, or a guarded value is outside every mask."""
    if not guard_body(body, op, axis, extremes).recovers:
        return None
    always, never = Const(1), Const(0)
    found: dict[Expr, Expr] = {}
    for node in walk(body):
        below = dict.fromkeys(found[child] for child in children(node))
        match node:
            case Local():
                found[node] = always
            case Call("where", (mask, a, b)) if not reads_state(mask) and reads_state(node):
                found[node] = call("where", mask, found[a], found[b])
            case _ if always in below:
                found[node] = always
            case _:
                masked = [part for part in below if part is not never]
                found[node] = reduce(partial(call, "maximum"), masked) if masked else never
    return None if found[body] is always else found[body]


def is_nan_at_first(value: Expr, identities: Mapping[str, float]) -> bool:
    """Whether the next value of a state is NaN because nothing has been seen. What it reads else counts as 1."""
    return math.isnan(_at_first(value, identities)) and not math.isnan(_at_first(value, {}))


def undefined_at_first(body: Expr, axis: str, identities: Mapping[str, float]) -> Iterator[Expr]:
    """The largest parts of a guarded body that read states, do not vary along the axis, and are NaN while nothing has
    been seen: the root of an infinity less itself, the cosine of one. What else they read counts as 1."""

    def parts(node: Expr) -> list[Expr]:
        return [part for part in children(node) if reads_state(part)] if axis in free_axes(node) else []

    for node in post_order([body], parts):
        if axis not in free_axes(node) and reads_state(node) and math.isnan(_at_first(node, identities)):
            yield transform(node, _unguarded)


def _at_first(expr: Expr, identities: Mapping[str, float]) -> float:
    def known(node: Expr) -> Expr:
        match node:
            case Local(name, _):
                return Const(identities.get(name, 1.0))
            case Load() | Scalar() | Axis() | Size():
                return Const(1.0)
            case Reduce(_, _, body):
                return body
            case _:
                return node

    env = Env(FloatDomain("float64"), {}, {}, {})
    return float(evaluate_expr(transform(expr, known), env).data)


def _unguarded(node: Expr) -> Expr:
    return node.args[0] if isinstance(node, Call) and node.fn in GUARDS else node


def guard_divisors(expr: Expr, axis: str) -> Expr:
    """Divisions by a state use `invertible`, so that a mean of nothing is 0 and not NaN."""

    def step(node: Expr) -> Expr:
        match node:
            case Call("div", (a, b)) if _is_hoisted(b, axis) and not _is_guarded(b):
                return call("div", a, call("invertible", b))
            case _:
                return node

    return transform(expr, step)


def total_factors(value: Expr, op: str, bounded: bool) -> Expr:
    """A state that has seen nothing stays what it is, whatever its repair factor does: a maximum goes from -inf to
    -100, the factor is e^100 and may overflow, and 0 * inf would be NaN; likewise -inf * e^-1000 for a maximum.

    Where exponents are proved at most 0 (`bounded`), nothing else makes a factor of a sum overflow, so that an
    infinite one becomes 0; elsewhere the state itself is asked.
    """

    def times(factor: Expr, state: Expr) -> Expr:
        if op == "sum" and (bounded or not any(n.fn == "exp" for n in walk(factor) if isinstance(n, Call))):
            return call("mul", guarded("finite", factor), state)
        identity = Const(REDUCTIONS[op])
        return call("where", call("eq", state, identity), identity, call("mul", factor, state))

    def step(node: Expr) -> Expr:
        match node:
            case Call("mul", (a, b)) if _has_guard(a) and not _accumulates(a) and _accumulates(b):
                return times(a, b)
            case Call("mul", (a, b)) if _has_guard(b) and not _accumulates(b) and _accumulates(a):
                return times(b, a)
            case _:
                return node

    return transform(value, step)


def _has_guard(expr: Expr) -> bool:
    return any(isinstance(node, Call) and node.fn in GUARDS for node in walk(expr))


def _accumulates(expr: Expr) -> bool:
    """Whether a state is read outside any guard."""
    match expr:
        case Local():
            return True
        case Call(fn, _) if fn in GUARDS:
            return False
        case _:
            return any(map(_accumulates, children(expr)))


def _divisors(body: Expr, axis: str) -> list[Expr]:
    """Divisors made of states inside terms that cannot be factored out: (x - s / n)."""
    hoisted = {node for node in _hoisted_factors(body, axis)}
    return [
        node.args[1]
        for node in walk(body)
        if isinstance(node, Call)
        and node.fn == "div"
        and _is_hoisted(node.args[1], axis)
        and node.args[1] not in hoisted
    ]


def _hoisted_factors(body: Expr, axis: str) -> list[Expr]:
    match body:
        case Call("mul", (a, b)):
            return _hoisted_factors(a, axis) + _hoisted_factors(b, axis)
        case Call("div", (a, b)):
            return _hoisted_factors(a, axis) + [b]
        case Call("neg" | "abs" | "sq" | "sqrt" | "rsqrt", (a,)):
            return _hoisted_factors(a, axis)
        case Call(fn, (a,)) if fn in CASTS:
            return _hoisted_factors(a, axis)
        case Call("where", (_, a, Const(0))):
            return _hoisted_factors(a, axis)
        case _:
            return []


def _is_hoisted(expr: Expr, axis: str) -> bool:
    return axis not in free_axes(expr) and reads_state(expr)


def _is_guarded(expr: Expr) -> bool:
    return isinstance(expr, Call) and expr.fn == "invertible"


def _joined(fn: str, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return a or b
    return call(fn, a, b)


def _factors(expr: Expr, axis: str) -> tuple[Expr, Expr | None]:
    """`expr` with every hoistable factor guarded, and the product of factor / guarded factor."""
    if not reads_state(expr):
        return expr, None
    if _is_hoisted(expr, axis):
        safe = guarded("invertible", expr)
        return safe, None if safe is expr else call("div", expr, safe)
    match expr:
        case Call("mul", (a, b)):
            (ga, ra), (gb, rb) = _factors(a, axis), _factors(b, axis)
            return call("mul", ga, gb), _joined("mul", ra, rb)
        case Call("div", (a, b)):
            (ga, ra), (gb, rb) = _factors(a, axis), _factors(b, axis)
            inverse = None if rb is None else _reciprocal(rb)
            return call("div", ga, gb), _joined("mul", ra, inverse)
        case Call("exp", (a,)):
            ga, ra = _addends(a, axis)
            return call("exp", ga), None if ra is None else call("exp", ra)
        case Call("neg", (a,)):
            ga, ra = _factors(a, axis)
            return call("neg", ga), ra
        case Call("abs" | "sq" | "sqrt" | "rsqrt" as fn, (a,)):
            ga, ra = _factors(a, axis)
            return call(fn, ga), None if ra is None else call(fn, ra)
        case Call(fn, (a,)) if fn in CASTS:
            ga, ra = _factors(a, axis)
            return call(fn, ga), ra
        case Call("where", (p, a, Const(0))) if not reads_state(p):
            ga, ra = _factors(a, axis)
            return call("where", p, ga, Const(0)), ra
        case _:
            return expr, None


def _reciprocal(ratio: Expr) -> Expr:
    match ratio:
        case Call("div", (a, b)):
            return call("div", b, a)
        case _:
            return call("div", Const(1), ratio)


def _addends(
    expr: Expr,
    axis: str,
    dropped: Const = NOTHING["max"],
    unsafe: Callable[[Expr], bool] = reads_state,
) -> tuple[Expr, Expr | None]:
    """`expr` with every `unsafe` hoistable addend guarded, and the sum of addend - guarded addend. What a mask drops
    is `dropped`."""

    def parts(inner: Expr) -> tuple[Expr, Expr | None]:
        return _addends(inner, axis, dropped, unsafe)

    if not reads_state(expr):
        return expr, None
    if _is_hoisted(expr, axis):
        safe = guarded("finite", expr) if unsafe(expr) else expr
        return safe, None if safe is expr else call("sub", expr, safe)
    match expr:
        case Call("add" | "sub" as fn, (a, b)):
            (ga, ra), (gb, rb) = parts(a), parts(b)
            if rb is not None and fn == "sub":
                rb = _negated(rb)
            return call(fn, ga, gb), _joined("add", ra, rb)
        case Call("neg", (a,)):
            ga, ra = parts(a)
            return call("neg", ga), None if ra is None else _negated(ra)
        case Call("mul", (k, a)) if axis not in free_axes(k) and not reads_state(k):
            ga, ra = parts(a)
            return call("mul", k, ga), None if ra is None else call("mul", k, ra)
        case Call("mul" | "div" as fn, (a, k)) if axis not in free_axes(k) and not reads_state(k):
            ga, ra = parts(a)
            return call(fn, ga, k), None if ra is None else call(fn, ra, k)
        case Call(fn, (a,)) if fn in CASTS:
            ga, ra = parts(a)
            return call(fn, ga), ra
        case Call("where", (p, a, b)) if b is dropped and not reads_state(p):
            ga, ra = parts(a)
            return call("where", p, ga, b), ra
        case _:
            return expr, None


def _negated(difference: Expr) -> Expr:
    match difference:
        case Call("sub", (a, b)):
            return call("sub", b, a)
        case _:
            return call("neg", difference)
