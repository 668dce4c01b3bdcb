"""Guards: retractions onto a group, by which the repairs of a merge are total functions (docs/repairs.md, with proofs).

A merge moves the state of a part with tag r to the tag r' of the union by h(r') / h(r), an element of a group that acts on
the values of the reduction:

    SHIFTS  the reals, +         acts on an extreme by +, and through exp on a sum
    SCALES  the reals but 0, *   acts on a sum by *, and on an extreme where positive

A tag that is still the identity of its fold takes h to 0 or to an infinity, outside of the group. A *guard* maps the extended
reals to the group, and elements of the group to themselves; both keep NaN:

    finite(a)     = a, or 0 where a is an infinity          onto SHIFTS
    invertible(a) = a, or 1 where a is 0 or an infinity     onto SCALES

Bodies and repairs read h' = guard(h) in place of h. Then

 1. the merge is exact whatever the tags are, since h'(r) has an inverse: h'(r') / h'(r) h'(r) x = h'(r') x;
 2. where a state is the identity of its fold, every element of the group leaves it as it is, so any finite factor is
    right (RedFuser, appendix A.1);
 3. in the end h(r) / h'(r), the unit where h(r) is in the group, gives what the program has (`Guarded`);
 4. a homomorphism commutes with guards. A guard stands inside of one that is undefined outside of the group (inf - inf,
    0 * inf), and around each part of a product or a sum, since rules cancel the parts one by one.

Registered reductions combine as they are written, and their bodies have no guards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce

from eqfuse.rules.losses import is_weighed, late_shifts, unrestored_sums
from eqfuse.rules.split import GUARDS, Split, reads_state
from eqfuse.terms.folds import fold_of
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Call,
    Const,
    Expr,
    Local,
    call,
    children,
    free_axes,
    rebuild,
    transform,
    walk,
)


@dataclass(frozen=True)
class RepairGroup:
    """A group that acts on the values of reductions.

    guard: its retraction. join, quotient: its operation, and the one with the inverse. fixed: the value that every element
    leaves as it is, for which a mask drops positions. functions: homomorphisms into it, of one argument.
    neutral: homomorphisms that h / guard(h) is not taken through: signs cancel, casts are rounding, masks choose.
    """

    guard: str
    join: str
    quotient: str
    fixed: float
    functions: tuple[str, ...]
    neutral: tuple[str, ...]

    def inverse(self, a: Expr) -> Expr:
        match a:
            case Call(fn, (b, c)) if fn == self.quotient:
                return call(fn, c, b)
            case _:
                return call("div", Const(1), a) if self is SCALES else call("neg", a)

    def composed(self, a: Expr | None, b: Expr | None) -> Expr | None:
        return a or b if a is None or b is None else call(self.join, a, b)


SHIFTS = RepairGroup("finite", "add", "sub", -math.inf, ("neg", *CASTS), neutral=("where", *CASTS))
SCALES = RepairGroup(
    "invertible", "mul", "div", 0.0, ("neg", "abs", "sq", "sqrt", "rsqrt", *CASTS), ("neg", "where", *CASTS)
)
_ADDENDS = replace(SHIFTS, fixed=math.nan)
"""Shifts of the terms of a sum: it moves by as many as masks keep, so that masks have no part in it."""


def _argument(expr: Expr, group: RepairGroup, split: Split) -> tuple[int, RepairGroup] | None:
    """The argument of which `expr` is a homomorphism into `group`, and the group that this argument is in."""
    match expr:
        case Call("exp", _) if group is SCALES:
            return 0, SHIFTS
        case Call(fn, (_,)) if fn in group.functions:
            return 0, group
        case Call("where", (mask, _, Const(group.fixed))) if not split.reads(mask):
            return 1, group
        case Call("mul", (k, _)) if group is not SCALES and split.is_constant(k):
            return 1, group
        case Call("mul" | "div", (_, k)) if group is not SCALES and split.is_constant(k):
            return 0, group
    return None


def guarded(guard: str, value: Expr) -> Expr:
    """`finite(value)` or `invertible(value)`, where that can change the value."""
    match value:
        case Const():
            return value
        case Call("finite", (shift,)) if guard == "finite" and _may_be_undefined(shift):
            # inf - inf at first is NaN, which `finite` keeps
            return call("where", call("eq", shift, shift), value, Const(0))
        case Call(fn, _) if fn == guard or (fn == "where" and guard == "finite" and is_guard(value)):
            return value
        case Call("neg", (a,)):
            return call("neg", guarded(guard, a))
        case Call("add" | "sub" as fn, (a, b)) if guard == "finite" and reads_state(value):
            return call(fn, guarded(guard, a), guarded(guard, b))
        case Call("mul" | "div" as fn, (a, b)) if guard == "invertible" and all(map(reads_state, (a, b))):
            return call(fn, guarded(guard, a), guarded(guard, b))
        case Call("mul", factors) if (
            guard == "finite" and reads_state(value) and not any(map(_scales, factors))
        ):
            # 0 times an infinity would be NaN
            return call(guard, call("mul", *(guarded(guard, f) if reads_state(f) else f for f in factors)))
        case _ if guard == "finite" and _may_be_undefined(value, ("add", "sub")):
            return guarded(guard, call(guard, value))
        case _:
            return call(guard, value)


def _scales(factor: Expr) -> bool:
    """Whether a factor is a number other than 0, which keeps infinities what they are."""
    return isinstance(factor, Const) and factor.value != 0


def is_guard(expr: Expr) -> bool:
    """Whether `expr` is what `guarded` makes of a value."""
    match expr:
        case Call("where", (Call("eq", (a, b)), Call("finite", (c,)), Const(0))):
            return a is b is c
        case Call(fn, _):
            return fn in GUARDS
        case _:
            return False


def accumulates(expr: Expr) -> bool:
    """Whether a state is read outside any guard."""
    return isinstance(expr, Local) or (not is_guard(expr) and any(map(accumulates, children(expr))))


def _may_be_undefined(expr: Expr, joints: Collection[str] = ("add", "sub", "mul", "div")) -> bool:
    """Whether `expr` combines two values of states that nothing guards, as inf - inf or inf * 0."""
    return any(
        isinstance(node, Call) and node.fn in joints and all(map(accumulates, node.args))
        for node in walk(expr)
    )


@dataclass(frozen=True)
class Guarded:
    """A body that reads h' = guard(h) in place of h, and how its reduction gives that of h: multiplied by `factor`,
    `term` added; None where nothing was guarded so.

    inner: guarded sums inside other functions; lost: those of them whose infinity nothing restores. late: addends that are
    finite at first; where one is infinite in the end, the reduction is NaN, and may be an infinity in the program.
    """

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


def guard_body(body: Expr, op: str, split: Split) -> Guarded:
    """The body of a reduction over the split axis, made total in the states that it reads."""
    if not split.reads(body) or fold_of(op) is not None:
        return Guarded(body)
    found, factor = _retracted(body, SCALES, split)
    term: Expr | None = None
    inner: dict[Expr, Expr] = {}
    late: tuple[Expr, ...] = ()
    if op in ("max", "min") and factor is None:
        found, term = _retracted(body, SHIFTS, split)
        late = (term,) if term is not None and is_weighed(term) else ()
    elif op == "sum":
        if factor is None:
            found, term = _retracted(body, _ADDENDS, split, split.is_infinite)
        found, inner = _inner_addends(found, split)
        late = tuple(dict.fromkeys(late_shifts(body, split)))
        for shift in dict.fromkeys((*inner.values(), *late)):
            undefined = call("mul", call("sub", shift, guarded("finite", shift)), Const(0))
            term = SHIFTS.composed(term, undefined)
    for divisor in _inner_divisors(body, split):
        factor = SCALES.composed(factor, call("div", call("invertible", divisor), divisor))
    lost = tuple(unrestored_sums(body, inner, split))
    return Guarded(guard_divisors(found, split), factor, term, tuple(inner), lost, late)


def _retracted(
    expr: Expr, group: RepairGroup, split: Split, unsafe: Callable[[Expr], bool] = lambda fixed: True
) -> tuple[Expr, Expr | None]:
    """`expr` with every hoistable factor or addend guarded that is `unsafe`; and h / guard(h) of all of them, taken to
    the group by the homomorphisms around them. None where nothing is guarded."""

    def part(inner: Expr, of: RepairGroup = group) -> tuple[Expr, Expr | None]:
        return _retracted(inner, of, split, unsafe)

    if not split.reads(expr):
        return expr, None
    if split.hoists(expr) and not (group is SCALES and _has_parts(expr, split)):
        safe = guarded(group.guard, expr) if unsafe(expr) else expr
        return safe, None if safe is expr else call(group.quotient, expr, safe)
    found = _argument(expr, group, split)
    match expr:
        case Call(fn, (a, b)) if fn in (group.join, group.quotient):
            (a, left), (b, right) = part(a), part(b)
            if right is not None and fn == group.quotient:
                right = group.inverse(right)
            return call(fn, a, b), group.composed(left, right)
        case Call(fn, args) if found is not None:
            place, of = found
            before, after = args[:place], args[place + 1 :]
            a, rest = part(args[place], of)
            made = call(fn, *before, a, *after)
            if rest is None or fn in group.neutral:
                return made, rest
            return made, group.inverse(rest) if fn == "neg" else call(fn, *before, rest, *after)
    return expr, None


def _has_parts(expr: Expr, split: Split) -> bool:
    """Whether a scale is guarded part by part, as rules divide it: a factor that reads no state is in no ratio, and the
    root of a quotient is a ratio of roots."""
    match expr:
        case Call("mul" | "div", parts):
            return any(not split.reads(part) or _has_parts(part, split) for part in parts)
        case Call(fn, (a,)) if fn in SCALES.functions:
            is_joint = fn not in CASTS and isinstance(a, Call) and a.fn in ("mul", "div")
            return is_joint or _has_parts(a, split)
        case _:
            return False


def _inner_addends(body: Expr, split: Split) -> tuple[Expr, dict[Expr, Expr]]:
    """Guards what is infinite at first where it is added to varying values inside functions that are no homomorphisms; and
    those sums, each with what is guarded in it."""
    found: dict[Expr, Expr] = {}
    memo: dict[Expr, Expr] = {}
    for node in walk(body):
        parts = [memo[child] for child in children(node)]
        if isinstance(node, Call) and node.fn in ("add", "sub") and split.axis in free_axes(node):
            for place, fixed in enumerate(node.args):
                safe = guarded("finite", fixed)
                if safe is not fixed and split.hoists(fixed) and split.is_infinite(fixed):
                    found[node], parts[place] = fixed, safe
        memo[node] = rebuild(node, tuple(parts))
    return memo[body], found


def guard_divisors(expr: Expr, split: Split) -> Expr:
    """Divisions by a state use `invertible`, so that a mean of nothing is 0 and not NaN."""

    def step(node: Expr) -> Expr:
        match node:
            case Call("div", (a, b)) if split.hoists(b) and not _is_invertible(b):
                return call("div", a, call("invertible", b))
            case _:
                return node

    return transform(expr, step)


def _is_invertible(expr: Expr) -> bool:
    match expr:
        case Call("invertible", _):
            return True
        case Call("mul" | "div", parts) if reads_state(expr):
            return all(not reads_state(part) or _is_invertible(part) for part in parts)
        case _:
            return False


def _inner_divisors(body: Expr, split: Split) -> list[Expr]:
    """Divisors made of states inside terms that cannot be factored out: (x - s / n)."""
    outer = set(_outer_divisors(body, split))
    divisors = (node.args[1] for node in walk(body) if isinstance(node, Call) and node.fn == "div")
    return [divisor for divisor in divisors if split.hoists(divisor) and divisor not in outer]


def _outer_divisors(body: Expr, split: Split) -> Iterator[Expr]:
    match body:
        case Call("mul" | "div" as fn, (a, b)):
            yield from _outer_divisors(a, split)
            yield from _outer_divisors(b, split) if fn == "mul" else (b,)
        case Call(_, args) if (found := _argument(body, SCALES, split)) and found[1] is SCALES:
            yield from _outer_divisors(args[found[0]], split)


def finite_states(value: Expr, names: frozenset[str]) -> Expr:
    """`value` with these states guarded where they are read outside any guard."""
    if isinstance(value, Local) and value.name in names:
        return guarded("finite", value)
    if is_guard(value):
        return value
    return rebuild(value, tuple(finite_states(part, names) for part in children(value)))


def total_factors(value: Expr, op: str, bounded: bool, masked: bool) -> Expr:
    """A state that has seen nothing stays its identity, whatever its factor. An element of the group may round to an
    infinity: a maximum goes from -inf to -100, the factor is e^100, and 0 * inf would be NaN.

    Where exponents are proved at most 0 (`bounded`), a factor of a sum overflows for such a state alone, and an
    infinite one becomes 0; elsewhere the state is compared with its identity. So it is where all that the factor was taken
    out of may be `masked`: then a factor that is NaN has no part in the state.
    """

    def times(factor: Expr, state: Expr) -> Expr:
        in_range = bounded or not any(n.fn == "exp" for n in walk(factor) if isinstance(n, Call))
        if op == "sum" and in_range and not masked:
            return call("mul", guarded("finite", factor), state)
        identity = Const(REDUCTIONS[op])
        return call("where", call("eq", state, identity), identity, call("mul", factor, state))

    def step(node: Expr) -> Expr:
        if isinstance(node, Call) and node.fn == "mul":
            for factor, state in (node.args, node.args[::-1]):
                if any(map(is_guard, walk(factor))) and not accumulates(factor) and accumulates(state):
                    return times(factor, state)
        return node

    return transform(value, step)


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
