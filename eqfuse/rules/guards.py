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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce

from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import fold_of, identity
from eqfuse.terms.functions import CASTS
from eqfuse.terms.interpreter import Env, evaluate_expr
from eqfuse.terms.nodes import (
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
    transform,
    walk,
)

GUARDS = ("finite", "invertible")

NOTHING = {op: Const(REDUCTIONS[op]) for op in ("sum", "max")}
"""What a mask drops for, so that it leaves a reduction as it is."""


def reads_state(expr: Expr, names: Collection[str] | None = None) -> bool:
    """Whether the value of `expr` depends on a named value, or on one of these."""
    return any(isinstance(node, Local) and (names is None or node.name in names) for node in walk(expr))


def guarded(fn: str, value: Expr) -> Expr:
    """`finite(value)` or `invertible(value)`, where that can change the value."""
    match value:
        case Const():
            return value
        case Call("finite", (shift,)) if fn == "finite" and _may_be_undefined(shift):
            # the shift inf - inf of what is infinite so far is NaN, which `finite` keeps
            return call("where", call("eq", shift, shift), value, Const(0))
        case Call(outer, _) if outer == fn:
            return value
        case Call("where") if fn == "finite" and _is_guard(value):
            return value
        case Call("add" | "sub" as sign, (a, b)) if fn == "finite" and reads_state(value):
            # term by term: -inf + inf would be NaN, and of a difference of two sums rules cancel common terms
            return call(sign, guarded(fn, a), guarded(fn, b))
        case Call("neg", (a,)):
            # repairs take signs out: 1 for -0 would be of the other one
            return call("neg", guarded(fn, a))
        case Call("mul" | "div" as joint, (a, b)) if fn == "invertible" and reads_state(a) and reads_state(b):
            # factor by factor, as repairs divide them: one that is 0 so far leaves the other what it is
            return call(joint, guarded(fn, a), guarded(fn, b))
        case Call("mul", (a, b)) if reads_state(a) and reads_state(b):
            # a maximum of nothing times a sum of nothing would be NaN
            return call(fn, call("mul", guarded(fn, a), guarded(fn, b)))
        case Call("mul", (a, b)) if (
            fn == "finite" and reads_state(value) and (_may_be_zero(a) or _may_be_zero(b))
        ):
            # a maximum of nothing times 0 would be NaN
            return call(
                fn, call("mul", *(guarded(fn, part) if reads_state(part) else part for part in (a, b)))
            )
        case _ if fn == "finite" and _may_be_undefined(value, ("add", "sub")):
            # inside another function an infinite state is not told from one that is infinite so far
            return guarded(fn, call(fn, value))
        case _:
            return call(fn, value)


def _may_be_zero(expr: Expr) -> bool:
    """Whether a factor that reads no state may be 0."""
    return expr.value == 0 if isinstance(expr, Const) else not reads_state(expr)


def _is_guard(expr: Expr) -> bool:
    """Whether `expr` is what `guarded` makes of a value."""
    match expr:
        case Call("where", (Call("eq", (a, b)), Call("finite", (c,)), Const(0))):
            return a is b is c
        case Call(fn, _):
            return fn in GUARDS
        case _:
            return False


def _may_be_undefined(expr: Expr, joints: Collection[str] = ("add", "sub", "mul", "div")) -> bool:
    """Whether `expr` combines two values of states that nothing guards, as inf - inf or inf * 0."""
    return any(
        isinstance(node, Call) and node.fn in joints and all(map(_accumulates, node.args))
        for node in walk(expr)
    )


@dataclass(frozen=True)
class Guarded:
    """A body with H' for H. In the end its reduction is multiplied by `factor` and `term` is added; None where
    nothing was guarded so. `inner` are sums with a guarded term inside other functions, `lost` those of them
    whose infinity nothing restores. Where one of `late`, which are finite at first, is infinite in the end, the
    reduction is NaN, though it may be an infinity in the program."""

    body: Expr
    factor: Expr | None = None
    term: Expr | None = None
    inner: tuple[Expr, ...] = ()
    lost: tuple[Expr, ...] = ()
    late: tuple[Expr, ...] = ()

    @property
    def recovers(self) -> bool:
        return self.factor is not None or self.term is not None

    def recovered(self, value: Expr) -> Expr:
        """The exact value of the reduction from that of the guarded body."""
        if self.factor is not None:
            value = call("mul", value, self.factor)
        return value if self.term is None else call("add", value, self.term)


@dataclass(frozen=True)
class Split:
    """The split axis and the states of its group, by all names under which they are read. What else is named was
    computed before, over all of its axis: it needs no guard.

    `contents` are the bodies of all, `jumping` those of registered reductions whose value may go up and down. Some
    states are infinite at first, or their logarithm is: `bodies` are those of maxima and minima; `scales` has, for the
    sum of `exp(x - m)` with m the maximum of x, m, without which it is never 0 in the end; and `first` has for every
    state what it is while nothing has been seen.
    """

    axis: str
    names: frozenset[str]
    contents: Mapping[str, Expr]
    bodies: Mapping[str, Expr]
    scales: Mapping[str, str]
    first: Mapping[str, float]
    jumping: frozenset[str]

    @staticmethod
    def of(axis: str, states: Iterable[tuple[str, str, Expr]]) -> Split:
        """Of (name, op, body)."""
        contents: dict[str, Expr] = {}
        bodies: dict[str, Expr] = {}
        scales: dict[str, str] = {}
        first: dict[str, float] = {}
        jumping: set[str] = set()
        for name, op, body in states:
            if _jumps(op):
                jumping |= {name + end for end in ("", "_new", "_a", "_b")}
            contents |= dict.fromkeys((name + end for end in ("", "_new", "_a", "_b")), body)
            for end in ("", "_new"):
                first[name + end] = identity(op).value
                if op in ("max", "min"):
                    bodies[name + end] = body
                match body:
                    case Call("exp", (Call("sub", (varying, shift)),)) if op == "sum":
                        m = _unguarded(shift)
                        if isinstance(m, Local) and bodies.get(m.name) is varying:
                            scales[name + end] = m.name + end
        return Split(axis, frozenset(contents), contents, bodies, scales, first, frozenset(jumping))

    def reads(self, expr: Expr) -> bool:
        """Whether a value depends on a state."""
        return any(isinstance(node, Local) and node.name in self.names for node in walk(expr))

    def hoists(self, expr: Expr) -> bool:
        """Whether a value depends on a state and not on the position along the axis."""
        return self.axis not in free_axes(expr) and self.reads(expr)

    def jumps(self, expr: Expr) -> bool:
        """Whether a value reads a state that may go up and down by any amount."""
        return any(isinstance(node, Local) and node.name in self.jumping for node in walk(expr))

    def is_infinite(self, expr: Expr) -> bool:
        """Whether a value that does not vary along the axis may be infinite while nothing has been seen."""
        extreme = any(isinstance(node, Local) and node.name in self.bodies for node in walk(expr))
        return extreme or (self.reads(expr) and math.isinf(_at_first(expr, self.first)))


def _jumps(op: str) -> bool:
    """Whether the value of a registered reduction may go up and down as more is seen: no extreme does."""
    found = fold_of(op)
    if found is None:
        return False
    fold, index = found
    variable = fold.state[index]
    match fold.combine[index]:
        case Call("maximum" | "minimum", (Local(), Local())):
            return False
        case _:
            return all(key != variable for key, _ in fold.order[:1])


def guard_body(body: Expr, op: str, split: Split) -> Guarded:
    """The body of a reduction over the split axis, made total in the states that it reads."""
    if not split.reads(body) or fold_of(op) is not None:
        return Guarded(body)
    found, factor = _factors(body, split)
    term: Expr | None = None
    inner: tuple[_Shift, ...] = ()
    late: tuple[Expr, ...] = ()
    weighed_shift: tuple[Expr, ...] = ()
    if factor is None and op in ("max", "min"):
        found, term = _addends(body, split)
        weighed_shift = (term,) if term is not None and _is_weighed(term) else ()
    elif op == "sum":
        if factor is None:
            found, term = _addends(body, split, NOTHING["sum"], split.is_infinite)
        found, inner = _inner_addends(found, split)
        late = tuple(dict.fromkeys(_late_shifts(body, split)))
    for shift in dict.fromkeys((*(shift.fixed for shift in inner), *late)):
        undefined = call("mul", call("sub", shift, guarded("finite", shift)), Const(0))
        term = _joined("add", term, undefined)
    for divisor in _divisors(body, split):
        factor = _joined("mul", factor, call("div", call("invertible", divisor), divisor))
    totals = frozenset(shift.total for shift in inner)
    weighed = any(
        shift.total in walk(a) and _can_be_infinite(b, split.axis, totals)
        for shift in inner
        if not _never_infinite(shift.fixed)
        for node in walk(body)
        if isinstance(node, Call) and node.fn == "mul"
        for a, b in (node.args, node.args[::-1])
    )
    lost = tuple(shift.total for shift in inner if weighed or not shift.own)
    totals_of = tuple(shift.total for shift in inner)
    return Guarded(guard_divisors(found, split), factor, term, totals_of, lost, late + weighed_shift)


def _is_weighed(shift: Expr) -> bool:
    """Whether a state is multiplied with data, or divided by data: 0 and infinities there are told by no state."""
    return any(
        isinstance(node, Call)
        and node.fn in ("mul", "div")
        and any(
            reads_state(a) and any(isinstance(n, Load) for n in walk(b)) and not reads_state(b)
            for a, b in (node.args, node.args[::-1])
        )
        for node in walk(shift)
    )


def _late_shifts(body: Expr, split: Split) -> Iterator[Expr]:
    """What is added to varying values, is finite at first, and may be infinite in the end although they are not: a
    mean of the values themselves may not."""
    for node in walk(body):
        match node:
            case Call("add" | "sub", (a, b)) if split.axis in free_axes(node):
                for varying, fixed in ((a, b), (b, a)):
                    if split.hoists(fixed) and not split.is_infinite(fixed):
                        read = (
                            n.name for n in walk(fixed) if isinstance(n, Local) and n.name in split.contents
                        )
                        if not any(_varying_core(varying) in walk(split.contents[name]) for name in read):
                            yield fixed


def shifts_that_drift(body: Expr, split: Split) -> Iterator[Expr]:
    """States that are added to varying values inside squares and products, and are made of other values: as the shift
    moves, the sum around it may fall by any factor, and nothing of its digits is left. A mean or an extreme of the values
    themselves moves no further than they spread. A position jumps: so it drifts in a sum of no products too."""
    match _varying_core(body):
        case Call("add" | "sub", (a, b)):
            yield from (shift for shift in (a, b) if split.hoists(shift) and split.jumps(shift))
    for node in walk(body):
        match node:
            case Call("sq", (a,)):
                factors: tuple[Expr, ...] = (a,)
            case Call("mul", args):
                factors = args
            case _:
                continue
        for factor in map(_varying_core, factors):
            match factor:
                case Call("add" | "sub", (a, b)):
                    for varying, shift in ((a, b), (b, a)):
                        if split.hoists(shift) and _drifts(varying, shift, split):
                            yield shift


def _drifts(varying: Expr, shift: Expr, split: Split) -> bool:
    own = set(_sources(varying, split))
    read = [node.name for node in walk(shift) if isinstance(node, Local) and node.name in split.contents]
    alike = any(not own.isdisjoint(_sources(split.contents[name], split)) for name in read)
    return not alike or split.jumps(shift)


def _sources(expr: Expr, split: Split) -> Iterator[Expr]:
    """What a value is made of: tensors, positions, what was computed before, and that of the states that it reads."""
    match expr:
        case Local(name, _) if name in split.contents:
            yield from _sources(split.contents[name], split)
        case Load() | Local() | Axis():
            yield expr
        case _:
            for child in children(expr):
                yield from _sources(child, split)


def _varying_core(expr: Expr) -> Expr:
    """A varying value without what masks and casts put around it."""
    match expr:
        case Call("where", (_, a, Const())):
            return _varying_core(a)
        case Call(fn, (a,)) if fn in CASTS or fn == "neg":
            return _varying_core(a)
        case _:
            return expr


@dataclass(frozen=True)
class _Shift:
    """`total` is the sum or difference of a varying value and `fixed`, which is infinite at first. It is `own` where it
    is so in the end only if the value is too, and the difference NaN: the maximum of x in x - max x."""

    total: Expr
    fixed: Expr
    own: bool


def _inner_addends(body: Expr, split: Split) -> tuple[Expr, tuple[_Shift, ...]]:
    """Guards what is infinite at first where it is added inside other functions."""
    shifts: list[_Shift] = []

    def shifted(total: Expr, varying: Expr, fixed: Expr) -> bool:
        if not (split.hoists(fixed) and split.is_infinite(fixed)) or guarded("finite", fixed) is fixed:
            return False
        is_own = _never_infinite(fixed) or (
            isinstance(total, Call) and total.fn == "sub" and _is_own(varying, fixed, split)
        )
        shifts.append(_Shift(total, fixed, is_own))
        return True

    memo: dict[Expr, Expr] = {}
    for node in walk(body):
        memo[node] = rebuild(node, tuple(memo[child] for child in children(node)))
        match node:
            case Call("add" | "sub" as sign, (a, b)) if split.axis in free_axes(node):
                if shifted(node, a, b):
                    memo[node] = call(sign, memo[a], guarded("finite", b))
                elif shifted(node, b, a):
                    memo[node] = call(sign, guarded("finite", a), memo[b])
    return memo[body], tuple(shifts)


def _never_infinite(shift: Expr) -> bool:
    return isinstance(shift, Call) and shift.fn == "finite"


def _is_own(varying: Expr, fixed: Expr, split: Split) -> bool:
    """Whether every term of `fixed` is finite, the extreme of `varying` (less what was taken off it before), or the
    logarithm of a sum that this extreme scales."""
    taken: set[str] = set()
    while isinstance(varying, Call) and varying.fn == "sub" and split.is_infinite(varying.args[1]):
        taken |= {node.name for node in walk(varying.args[1]) if isinstance(node, Local)}
        varying = varying.args[0]
    rest: list[Expr] = []
    for term in _terms(fixed):
        if isinstance(term, Local) and split.bodies.get(term.name) is varying:
            taken.add(term.name)
        elif split.is_infinite(term):
            rest.append(term)
    return all(
        isinstance(term, Call)
        and term.fn == "log"
        and isinstance(term.args[0], Local)
        and split.scales.get(term.args[0].name) in taken
        for term in rest
    )


def _terms(expr: Expr) -> Iterator[Expr]:
    match expr:
        case Call("add", (a, b)):
            yield from _terms(a)
            yield from _terms(b)
        case _:
            yield _unguarded(expr)


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
        case _ if _is_guard(value):
            return value
        case _:
            return rebuild(value, tuple(finite_states(part, names) for part in children(value)))


def kept(body: Expr, op: str, split: Split) -> Expr | None:
    """1 where a guarded value is kept by the masks around it, else 0: what all masks drop needs no recovery.
    None where nothing is guarded, or a guarded value is outside every mask."""
    if not guard_body(body, op, split).recovers:
        return None
    always, never = Const(1), Const(0)
    found: dict[Expr, Expr] = {}
    for node in walk(body):
        below = dict.fromkeys(found[child] for child in children(node))
        match node:
            case _ if split.hoists(node):  # it is guarded as a whole, with all that it chooses among
                found[node] = always
            case Call("where", (mask, a, b)) if not split.reads(mask) and split.reads(node):
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


def undefined_at_first(body: Expr, split: Split) -> Iterator[Expr]:
    """The largest parts of a guarded body that read states, do not vary along the axis, and are NaN while nothing has
    been seen: the root of an infinity less itself, the cosine of one. What else they read counts as 1."""

    def parts(node: Expr) -> list[Expr]:
        return list(filter(split.reads, children(node))) if split.axis in free_axes(node) else []

    for node in post_order([body], parts):
        if split.hoists(node) and math.isnan(_at_first(node, split.first)):
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


def guard_divisors(expr: Expr, split: Split) -> Expr:
    """Divisions by a state use `invertible`, so that a mean of nothing is 0 and not NaN."""

    def step(node: Expr) -> Expr:
        match node:
            case Call("div", (a, b)) if split.hoists(b) and not _is_guarded(b):
                return call("div", a, call("invertible", b))
            case _:
                return node

    return transform(expr, step)


def total_factors(value: Expr, op: str, bounded: bool, masked: bool) -> Expr:
    """A state that has seen nothing stays what it is, whatever its repair factor does: a maximum goes from -inf to
    -100, the factor is e^100 and may overflow, and 0 * inf would be NaN; likewise -inf * e^-1000 for a maximum.

    Where exponents are proved at most 0 (`bounded`), nothing else makes a factor of a sum overflow, so that an
    infinite one becomes 0; elsewhere the state itself is asked. So it is where all that the factor was taken out of may be
    `masked`: then a factor that is NaN has no part in the state.
    """

    def times(factor: Expr, state: Expr) -> Expr:
        in_range = bounded or not any(n.fn == "exp" for n in walk(factor) if isinstance(n, Call))
        if op == "sum" and in_range and not masked:
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
    return any(map(_is_guard, walk(expr)))


def _accumulates(expr: Expr) -> bool:
    """Whether a state is read outside any guard."""
    match expr:
        case Local():
            return True
        case _ if _is_guard(expr):
            return False
        case _:
            return any(map(_accumulates, children(expr)))


def _divisors(body: Expr, split: Split) -> list[Expr]:
    """Divisors made of states inside terms that cannot be factored out: (x - s / n)."""
    hoisted = {node for node in _hoisted_factors(body, split)}
    return [
        node.args[1]
        for node in walk(body)
        if isinstance(node, Call)
        and node.fn == "div"
        and split.hoists(node.args[1])
        and node.args[1] not in hoisted
    ]


def _hoisted_factors(body: Expr, split: Split) -> list[Expr]:
    match body:
        case Call("mul", (a, b)):
            return _hoisted_factors(a, split) + _hoisted_factors(b, split)
        case Call("div", (a, b)):
            return _hoisted_factors(a, split) + [b]
        case Call("neg" | "abs" | "sq" | "sqrt" | "rsqrt", (a,)):
            return _hoisted_factors(a, split)
        case Call(fn, (a,)) if fn in CASTS:
            return _hoisted_factors(a, split)
        case Call("where", (_, a, Const(0))):
            return _hoisted_factors(a, split)
        case _:
            return []


def _is_guarded(expr: Expr) -> bool:
    match expr:
        case Call("invertible", _):
            return True
        case Call("mul" | "div", (a, b)) if reads_state(expr):
            return all(not reads_state(part) or _is_guarded(part) for part in (a, b))
        case _:
            return False


def _joined(fn: str, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None or b is None:
        return a or b
    return call(fn, a, b)


def _factors(expr: Expr, split: Split) -> tuple[Expr, Expr | None]:
    """`expr` with every hoistable factor guarded, and the product of factor / guarded factor."""
    if not split.reads(expr):
        return expr, None
    if split.hoists(expr) and not _has_parts(expr, split):
        safe = guarded("invertible", expr)
        return safe, None if safe is expr else call("div", expr, safe)
    match expr:
        case Call("mul", (a, b)):
            (ga, ra), (gb, rb) = _factors(a, split), _factors(b, split)
            return call("mul", ga, gb), _joined("mul", ra, rb)
        case Call("div", (a, b)):
            (ga, ra), (gb, rb) = _factors(a, split), _factors(b, split)
            inverse = None if rb is None else _reciprocal(rb)
            return call("div", ga, gb), _joined("mul", ra, inverse)
        case Call("exp", (a,)):
            ga, ra = _addends(a, split)
            return call("exp", ga), None if ra is None else call("exp", ra)
        case Call("neg", (a,)):
            ga, ra = _factors(a, split)
            return call("neg", ga), ra
        case Call("abs" | "sq" | "sqrt" | "rsqrt" as fn, (a,)):
            ga, ra = _factors(a, split)
            return call(fn, ga), None if ra is None else call(fn, ra)
        case Call(fn, (a,)) if fn in CASTS:
            ga, ra = _factors(a, split)
            return call(fn, ga), ra
        case Call("where", (p, a, Const(0))) if not split.reads(p):
            ga, ra = _factors(a, split)
            return call("where", p, ga, Const(0)), ra
        case _:
            return expr, None


def _has_parts(expr: Expr, split: Split) -> bool:
    """Whether `expr` is guarded part by part, as repairs divide it: a factor that reads no state is in no ratio, and the
    root of a quotient is a ratio of roots."""
    match expr:
        case Call("mul" | "div", (a, b)):
            return any(not split.reads(part) or _has_parts(part, split) for part in (a, b))
        case Call("neg" | "abs" | "sq" | "sqrt" | "rsqrt", (a,)):
            return _has_parts(a, split) or (isinstance(a, Call) and a.fn in ("mul", "div"))
        case Call(fn, (a,)) if fn in CASTS:
            return _has_parts(a, split)
        case _:
            return False


def _reciprocal(ratio: Expr) -> Expr:
    match ratio:
        case Call("div", (a, b)):
            return call("div", b, a)
        case _:
            return call("div", Const(1), ratio)


def _addends(
    expr: Expr,
    split: Split,
    dropped: Const = NOTHING["max"],
    unsafe: Callable[[Expr], bool] | None = None,
) -> tuple[Expr, Expr | None]:
    """`expr` with every `unsafe` hoistable addend guarded, and the sum of addend - guarded addend. What a mask drops
    is `dropped`."""

    def parts(inner: Expr) -> tuple[Expr, Expr | None]:
        return _addends(inner, split, dropped, unsafe)

    if not split.reads(expr):
        return expr, None
    if split.hoists(expr):
        safe = guarded("finite", expr) if unsafe is None or unsafe(expr) else expr
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
        case Call("mul", (k, a)) if split.axis not in free_axes(k) and not split.reads(k):
            ga, ra = parts(a)
            return call("mul", k, ga), None if ra is None else call("mul", k, ra)
        case Call("mul" | "div" as fn, (a, k)) if split.axis not in free_axes(k) and not split.reads(k):
            ga, ra = parts(a)
            return call(fn, ga, k), None if ra is None else call(fn, ra, k)
        case Call(fn, (a,)) if fn in CASTS:
            ga, ra = parts(a)
            return call(fn, ga), ra
        case Call("where", (p, a, b)) if b is dropped and not split.reads(p):
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
