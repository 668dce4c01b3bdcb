"""Total repairs: what a rolling or split computation does where a repair factor has no inverse.

While a maximum is still -inf, or a scale still 0, the factor H(r) of a body g = H(r) * G(x) cannot be
divided out later. Then the reduction has only seen its identity, so any finite factor is right
(RedFuser, appendix A.1): H'(r) = H(r) where that is finite and not 0, else 1. Bodies and repairs both use
H'; `recover` is H(r) / H'(r), 1 except where the guard was still active at the end, where it
restores what the unfused program gives (usually NaN).
"""

from __future__ import annotations

from eqfuse.terms.nodes import (
    CASTS,
    REDUCTIONS,
    Call,
    Const,
    Expr,
    Local,
    call,
    children,
    free_axes,
    transform,
    walk,
)

GUARDS = ("finite", "invertible")


def reads_state(expr: Expr) -> bool:
    """Whether the value of `expr` depends on a state."""
    return any(isinstance(node, Local) for node in walk(expr))


def guarded(fn: str, value: Expr) -> Expr:
    """`finite(value)` or `invertible(value)`, where that can change the value."""
    if isinstance(value, Const):
        return value
    inner = value.args[0] if isinstance(value, Call) and value.fn == fn else value
    return call(fn, _finite_terms(inner) if fn == "finite" else inner)


def _finite_terms(total: Expr) -> Expr:
    """A sum with its terms guarded one by one where states meet: -inf + inf would be NaN, which `finite` keeps."""
    match total:
        case Call("add" | "sub" as fn, (a, b)) if reads_state(a) and reads_state(b):
            return call(fn, guarded("finite", _finite_terms(a)), guarded("finite", _finite_terms(b)))
        case _:
            return total


def guard_body(body: Expr, op: str, axis: str) -> tuple[Expr, Expr | None]:
    """The body with H' for H, and H / H' (for max and min of sums: H - H'), None where nothing was guarded."""
    if not reads_state(body):
        return body, None
    guarded, recover = _factors(body, axis)
    if recover is None and op in ("max", "min"):
        guarded, recover = _addends(body, axis)
    guarded = guard_divisors(guarded, axis)
    divisors = _divisors(body, axis)
    for divisor in divisors:
        undefined = call("div", call("invertible", divisor), divisor)
        recover = undefined if recover is None else call("mul", recover, undefined)
    return guarded, recover


def kept(body: Expr, op: str, axis: str) -> Expr | None:
    """1 where the masks around guarded values keep a position, else 0: what all masks drop needs no recovery.
    None where nothing is guarded inside a mask."""
    masks = [
        node.args[0]
        for node in walk(body)
        if isinstance(node, Call) and node.fn == "where" and reads_state(node.args[1])
    ]
    if not masks or any(map(reads_state, masks)) or guard_body(body, op, axis)[1] is None:
        return None
    found: Expr = Const(1)
    for mask in masks:
        found = call("where", mask, found, Const(0))
    return found


def recovers_by_sum(body: Expr, op: str, axis: str) -> bool:
    """Whether the guard of this body is additive: recovered by adding, not by multiplying."""
    return op in ("max", "min") and _factors(body, axis)[1] is None and _addends(body, axis)[1] is not None


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


def _product(a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return a or b
    return call("mul", a, b)


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
            return call("mul", ga, gb), _product(ra, rb)
        case Call("div", (a, b)):
            (ga, ra), (gb, rb) = _factors(a, axis), _factors(b, axis)
            inverse = None if rb is None else _reciprocal(rb)
            return call("div", ga, gb), _product(ra, inverse)
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


def _addends(expr: Expr, axis: str) -> tuple[Expr, Expr | None]:
    """`expr` with every hoistable addend guarded, and the sum of addend - guarded addend."""
    if not reads_state(expr):
        return expr, None
    if _is_hoisted(expr, axis):
        safe = guarded("finite", expr)
        return safe, None if safe is expr else call("sub", expr, safe)
    match expr:
        case Call("add" | "sub" as fn, (a, b)):
            (ga, ra), (gb, rb) = _addends(a, axis), _addends(b, axis)
            if rb is not None and fn == "sub":
                rb = _negated(rb)
            total = call("add", ra, rb) if ra is not None and rb is not None else ra or rb
            return call(fn, ga, gb), total
        case Call("neg", (a,)):
            ga, ra = _addends(a, axis)
            return call("neg", ga), None if ra is None else _negated(ra)
        case Call("mul", (k, a)) if axis not in free_axes(k) and not reads_state(k):
            ga, ra = _addends(a, axis)
            return call("mul", k, ga), None if ra is None else call("mul", k, ra)
        case Call("mul", (a, k)) if axis not in free_axes(k) and not reads_state(k):
            ga, ra = _addends(a, axis)
            return call("mul", ga, k), None if ra is None else call("mul", ra, k)
        case Call(fn, (a,)) if fn in CASTS:
            ga, ra = _addends(a, axis)
            return call(fn, ga), ra
        case Call("where", (p, a, Const(value))) if value == float("-inf") and not reads_state(p):
            ga, ra = _addends(a, axis)
            return call("where", p, ga, Const(value)), ra
        case _:
            return expr, None


def _negated(difference: Expr) -> Expr:
    match difference:
        case Call("sub", (a, b)):
            return call("sub", b, a)
        case _:
            return call("neg", difference)
