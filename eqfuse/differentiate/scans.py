"""Gradients of prefixes in linear time: what comes back to a position is carried from the others, one after the other.

A position of a running maximum passes on what it gets to the one before, unless the maximum is its own. A state that a
position makes of the one before it, `h[t] = a[t] h[t-1] + b[t]`, gets

    D[t] = dh[t] + F[t+1],  F[t] = a[t] D[t],        da[t] = D[t] h[t-1],  db[t] = D[t]

of which F, what it passes on, is such a recurrence in the other direction (a running product is one with b = 0). And a sum over the positions after each one
whose weights are a quotient of exponentials of both positions carries them from neighbour to neighbour:

    sum[j](where(k <= j, g[j] exp(u[k] - v[j]), 0)) = exp(u[k] - v[k]) D[k],   D[k] = g[k] + F[k+1],  F[k] = exp(v[k-1] - v[k]) D[k]

where u and v are the same, as in the decays of a gated recurrence, or v is the running maximum, as in a log-sum-exp: then no weight
is more than 1. A difference is carried likewise, so that no large numbers cancel:

    sum[j](where(k <= j, g[j] (u[k] - v[j]), 0)) = (u[k] - v[k]) G[k] - sum[j](where(k < j, (v[j] - v[j-1]) G[j], 0))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from eqfuse.differentiate.polynomial import UNIT, Monomial, Polynomial, expression, written
from eqfuse.differentiate.steps import Step, Steps, index_of, name_of
from eqfuse.terms.assume import folded
from eqfuse.terms.folds import all_unpacked, packed
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Size,
    call,
    free_axes,
    reductions,
    replaced,
    substitute_axes,
    total_of,
    walk,
)
from eqfuse.terms.prefixes import Prefix, prefix_where, scanned
from eqfuse.terms.recurrences import AFFINE, EXTREMES, SECOND, Law

ONE, ZERO = Const(1), Const(0)

ORDERS = ("le", "lt", "ge", "gt")
"""Comparisons, without one of which a program has no prefix."""

Signed = Sequence[tuple[int, Expr]]
"""Terms that are added, by 1, or subtracted, by -1."""

Contribution = tuple[Step, Expr, Polynomial]
"""A part of what a position contributes, as that of a step without the axis of the prefixes, and its cotangent."""


@dataclass(frozen=True)
class Parts:
    """Of a term: the `factor` that has both positions, what else is at the one that is summed over, and what is not."""

    factor: Expr
    inner: Monomial
    outer: Monomial


@dataclass
class Scans:
    """The prefixes of a program that is differentiated."""

    steps: Steps

    def __post_init__(self) -> None:
        exprs = (output.expr for output in self.steps.program.outputs)
        self._are_some = any(isinstance(node, Call) and node.fn in ORDERS for node in walk(*exprs))

    # -- states that one position makes of the one before ------------------------------------------------

    def back(
        self, step: Step, cotangent: Polynomial, place_of: Callable[[Step], Expr]
    ) -> list[Contribution] | None:
        """What the positions of a running product, recurrence or extreme get, whose position is `place_of` it; None of any other
        step."""
        is_affine, is_extreme = step.op == f"{AFFINE.fold}.h", step.op in ("max", "min")
        is_second = step.op == f"{SECOND.fold}.h"
        longest = {f"{law.fold}.h": law for law in EXTREMES.values()}.get(step.op)
        if not self._are_some or len(step.over) != 1:
            return None
        if not (is_affine or is_second or is_extreme or longest or step.op == "prod"):
            return None
        value = step.value
        found = scanned(value, self.steps.alike) if isinstance(value, Reduce) else None
        if found is None or (is_extreme or is_second or longest) and found.prefix.exclusive:
            return None
        prefix, (k,) = found.prefix, step.over
        if is_extreme and prefix.mirrored:
            return None
        if not set(reductions(found.whole.body)) <= set(reductions(step.body)):
            return None  # what it folds changes with the position: a window's greatest may be one before that was less
        place = place_of(step) if is_extreme else ZERO
        parts = all_unpacked(found.whole.body)
        if is_second and (parts[2:4] != (ONE, ZERO) or parts[5] is not ZERO):
            return None
        own = replace(step, axes=tuple(axis for axis in step.axes if axis != prefix.at))
        terms = _first_seen(expression(cotangent), prefix, k)
        if is_second:
            return self._second(step, own, prefix, parts, terms)
        if longest:
            return self._longest(step, own, prefix, parts, terms, longest)

        def ratio(here: Expr, to: Expr) -> Expr:
            if not is_extreme:
                return substitute_axes(parts[0], {k: here})
            return call("where", call("eq", substitute_axes(place, {prefix.at: here}), here), ZERO, ONE)

        carried = self._carried(step.name, own, k, not prefix.backwards, ratio, terms)
        if is_extreme:
            is_mine = call("eq", substitute_axes(place, {prefix.at: Axis(k)}), Axis(k))
            return [(own, parts[0], (Monomial(UNIT.number, {carried: 1}, (is_mine,)),))]
        before = self._before(step, own, prefix, parts, (ONE, ZERO)[: len(parts)])
        given: list[Contribution] = [(own, parts[0], (Monomial(UNIT.number, _powers(carried, before)),))]
        if is_affine:
            given.append((own, parts[1], (Monomial(UNIT.number, {carried: 1}),)))
        return given

    def _second(
        self, step: Step, own: Step, prefix: Prefix, parts: Sequence[Expr], terms: Expr
    ) -> list[Contribution]:
        """Of a recurrence of the two values before, what is carried from the two positions after each one."""
        (k,) = step.over
        o = self.steps.another(k)
        last = call("sub", Size(k), ONE)
        here, bound = call("sub", last, Axis(o)), call("sub", last, Axis(k))
        weights = [
            call(
                "where",
                call("ge", Axis(o), Const(n)),
                substitute_axes(part, {k: call("add", here, Const(n))}),
                ZERO,
            )
            for n, part in enumerate(parts[:2], 1)
        ]
        given = (*weights, ONE, ZERO, substitute_axes(terms, {k: here}), ZERO)
        seen = call("le", Axis(o), bound)
        body = packed(
            [call("where", seen, part, none) for part, none in zip(given, SECOND.identity, strict=True)]
        )
        carried = self.steps.reduced(f"d{step.name}_carried", own.loops, f"{SECOND.fold}.h", o, body)
        before = [
            self._before(replace(step, op=f"{SECOND.fold}.{state}"), own, prefix, parts, SECOND.identity)
            for state in ("h", "g")
        ]
        found: list[Contribution] = [
            (own, part, (Monomial(UNIT.number, _powers(carried, value)),))
            for part, value in zip(parts[:2], before, strict=True)
        ]
        return [*found, (own, parts[4], (Monomial(UNIT.number, {carried: 1}),))]

    def _longest(
        self, step: Step, own: Step, prefix: Prefix, parts: Sequence[Expr], terms: Expr, law: Law
    ) -> list[Contribution]:
        """Of h = max(h' + p, q), or of a minimum, the share of each side: all of the one that is taken, half of both where they are equal."""
        (k,) = step.over
        longer = call("add", self._before(step, own, prefix, parts, law.identity), parts[0])
        beyond = call("gt" if law is EXTREMES["maximum"] else "lt", longer, parts[1])
        half = call("where", call("eq", longer, parts[1]), Const(0.5), ZERO)
        taken = self.steps.add(
            Step(self.steps.names.fresh(f"{step.name}_taken"), own.loops, call("where", beyond, ONE, half))
        ).itself

        def ratio(here: Expr, to: Expr) -> Expr:
            return substitute_axes(taken, {k: here})

        carried = self._carried(step.name, own, k, not prefix.backwards, ratio, terms)
        left = call("sub", ONE, taken)
        return [
            (own, parts[0], (Monomial(UNIT.number, _powers(carried, taken)),)),
            (own, parts[1], (Monomial(UNIT.number, _powers(carried, left)),)),
        ]

    def _before(
        self, step: Step, own: Step, prefix: Prefix, parts: Sequence[Expr], nothing: Sequence[Expr]
    ) -> Expr:
        """The state of the positions before each one, in the order in which they are visited."""
        (k,) = step.over
        other, body = self.steps.others(k, "gt" if prefix.backwards else "lt", parts, nothing)
        return self.steps.reduced(f"{step.name}_before", own.loops, step.op, other, body)

    def _carried(
        self,
        name: str,
        own: Step,
        k: str,
        from_last: bool,
        ratio: Callable[[Expr, Expr], Expr],
        terms: Expr,
        reads_next: bool = True,
    ) -> Expr:
        """D[k] = terms[k] + ratio(k+1, k) D[k+1], from the last position, or D[k] = terms[k] + ratio(k-1, k) D[k-1], from the first;
        `ratio` is of two neighbours. Positions are counted from where it begins.

        With `reads_next`, a step is what a position passes on, F[k] = ratio(k, next) D[k], and reads the one that gets it; without,
        it is D, and reads the one that it comes from."""
        o = self.steps.another(k)
        last = call("sub", Size(k), ONE)

        def placed(at: Expr) -> Expr:
            return call("sub", last, at) if from_last else at

        def stepped(at: Expr, is_on: bool) -> Expr:
            return call("sub" if is_on == from_last else "add", at, ONE)

        here, bound = placed(Axis(o)), placed(Axis(k))
        given = substitute_axes(terms, {k: here})
        if not reads_next:
            weight = call("where", call("ge", Axis(o), ONE), ratio(stepped(here, False), here), ONE)
            return self._scan(f"d{name}_carried", own, o, call("le", Axis(o), bound), weight, given)
        weight = call("where", call("lt", Axis(o), last), ratio(here, stepped(here, True)), ONE)
        passed = self._scan(
            f"d{name}_passed", own, o, call("lt", Axis(o), bound), weight, _times(weight, given)
        )
        found = call("add", terms, passed)
        axes = tuple(axis for axis in own.loops if axis in free_axes(found))
        return self.steps.add(Step(self.steps.names.fresh(f"d{name}_carried"), axes, found)).itself

    def _scan(self, name: str, own: Step, o: str, seen: Expr, p: Expr, q: Expr) -> Expr:
        """The recurrence of these steps over the positions that are seen."""
        body = packed([call("where", seen, p, ONE), call("where", seen, q, ZERO)])
        return self.steps.reduced(name, own.loops, f"{AFFINE.fold}.h", o, body)

    def is_never_empty(self, masks: Sequence[Expr], over: str) -> bool:
        """Whether each position that masks are of leaves one of the axis: itself."""
        found = [prefix_where(mask, over, self.steps.alike) for mask in masks]
        return bool(found) and all(prefix is not None and not prefix.exclusive for prefix in found)

    # -- sums over the positions after each ----------------------------------------------------------------

    def summed(self, name: str, j: str, target: Sequence[str], term: Monomial) -> Polynomial | None:
        """The sum of a term over the positions before or after each one of an axis of `target`; None where its weights are not
        carried from one to the next. A factor that is a difference of values of both is multiplied out."""
        if not self._are_some:
            return None
        found = self._one(name, j, target, term)
        if found is not None:
            return found
        for factor, n in term.powers.items():
            match factor:
                case Call("add" | "sub" as fn, (left, right)) if n == 1 and j in free_axes(factor):
                    rest = term.times(Monomial(UNIT.number, {factor: -1}))
                    sign = 1 if fn == "add" else -1
                    both = [
                        self.summed(name, j, target, rest.times(Monomial(Fraction(each), {part: 1})))
                        for each, part in ((1, left), (sign, right))
                    ]
                    if both[0] is not None and both[1] is not None:
                        return (*both[0], *both[1])
        return None

    def _one(self, name: str, j: str, target: Sequence[str], term: Monomial) -> Polynomial | None:
        for mask, prefix in self._masks(j, term):
            k = prefix.at
            if k not in target or prefix.exclusive or prefix.mirrored:
                continue
            parts = self._apart(term, j, k, mask)
            if parts is None or not free_axes(written(parts.inner)) & {j}:
                continue
            own = Step(name, tuple(axis for axis in target if axis != k), ZERO, "sum", (k,))
            found = self._by_weights(parts, own, j, prefix.backwards) or self._by_differences(
                parts, own, j, prefix.backwards
            )
            if found is not None:
                return tuple(parts.outer.times(each) for each in found)
        return None

    def _apart(self, term: Monomial, j: str, k: str, mask: Expr) -> Parts | None:
        """A term under a mask by one factor of both positions, and what has each alone; None where there are more."""
        holds = {mask: True}
        both = [(f, n) for f, n in term.powers.items() if {j, k} <= free_axes(self._folded(f, j, holds))]
        others = {f: n for f, n in term.powers.items() if (f, n) not in both}
        masks = [each for each in term.masks if each is not mask]
        if len(both) != 1 or both[0][1] != 1 or any({j, k} <= free_axes(part) for part in (*others, *masks)):
            return None
        inner = Monomial(
            UNIT.number,
            {f: n for f, n in others.items() if j in free_axes(f)},
            tuple(each for each in masks if j in free_axes(each)),
        )
        outer = Monomial(
            term.number,
            {f: n for f, n in others.items() if j not in free_axes(f)},
            tuple(each for each in masks if j not in free_axes(each)),
        )
        return Parts(self._folded(both[0][0], j, holds), inner, outer)

    def _by_weights(self, parts: Parts, own: Step, j: str, from_last: bool) -> Polynomial | None:
        """Where the factor is `exp(u[k] + v[j])`: by what neighbours' weights are, at most 1 or those of u = -v."""
        (k,) = own.over
        value = parts.factor
        terms = _terms(value.args[0], j, k) if isinstance(value, Call) and value.fn == "exp" else None
        if terms is None:
            return None
        moving, at_k = terms
        front: list[Expr] = []
        is_bounded = not _cancels(at_k)
        if is_bounded:
            if not (
                len(moving) == 1 and moving[0][0] < 0 and self._is_running_maximum(moving[0][1], j, from_last)
            ):
                return None
            front = [call("exp", _total(at_k))]

        def ratio(here: Expr, to: Expr) -> Expr:
            moved = [(sign, substitute_axes(part, {j: here})) for sign, part in moving]
            exponent = _total([*moved, *((-sign, substitute_axes(part, {j: to})) for sign, part in moving)])
            return call("exp", call("minimum", exponent, ZERO) if is_bounded else exponent)

        given = substitute_axes(written(parts.inner), {j: Axis(k)})
        reads_next = from_last != self._grows_backwards(moving, j)
        carried = self._carried(own.name, own, k, from_last, ratio, given, reads_next)
        return (Monomial(UNIT.number, _powers(carried, *front)),)

    def _by_differences(self, parts: Parts, own: Step, j: str, from_last: bool) -> Polynomial | None:
        """Where the factor is `u[k] + v[j]`: `(u[k] + v[k]) G[k] + E[k]`, of the sum G of what it is multiplied by, and the sum E of
        the differences of neighbours, `v[k] - v[k-1]`, times G: so that no large u and v are summed apart."""
        (k,) = own.over
        terms = _terms(parts.factor, j, k)
        if (
            terms is None
            or not isinstance(parts.factor, Call)
            or parts.factor.fn not in ("add", "sub", "neg")
        ):
            return None
        moving, at_k = terms
        o, other = Axis(self.steps.another(k)), Axis(self.steps.another(k))
        given = substitute_axes(written(parts.inner), {j: o})

        def over(name: str, of: Axis, condition: str, value: Expr) -> Expr:
            body = call("where", call(condition, of, Axis(k)), value, ZERO)
            return self.steps.reduced(f"d{own.name}_{name}", own.loops, "sum", of.name, body)

        total = over("total", o, "ge" if from_last else "le", given)
        reads_after = self._grows_backwards(moving, j)
        neighbour = call("add" if reads_after else "sub", other, ONE)
        change = _total(
            [
                (sign * each, substitute_axes(part, {j: at}))
                for each, at in ((1, other), (-1, neighbour))
                for sign, part in moving
            ]
        )
        if from_last != reads_after:
            summand = call("mul", change, substitute_axes(total, {k: other}))
            drift = over("drift", other, "gt" if from_last else "lt", summand)
        else:
            rest = over("rest", o, "gt" if from_last else "lt", given)
            last = call("sub", Size(k), ONE)
            has_one = call("lt", other, last) if reads_after else call("ge", other, ONE)
            moved = call("where", has_one, change, ZERO)
            summand = call("neg", call("mul", moved, substitute_axes(rest, {k: other})))
            drift = over("drift", other, "ge" if from_last else "le", summand)
        found = Monomial(UNIT.number, {drift: 1})
        if _cancels(at_k):
            return (found,)
        return (Monomial(UNIT.number, _powers(_total(at_k), total)), found)

    def _masks(self, j: str, term: Monomial) -> Iterator[tuple[Expr, Prefix]]:
        """The conditions of a term, and of the exponents in it, by which it is one over a part of the axis."""
        inside = [
            node.args[0]
            for node in walk(*(self._written(factor, j) for factor in term.powers))
            if isinstance(node, Call) and node.fn == "where"
        ]
        for mask in dict.fromkeys((*term.masks, *inside)):
            prefix = prefix_where(mask, j, self.steps.alike)
            if prefix is not None:
                yield mask, prefix

    def _written(self, factor: Expr, j: str) -> Expr:
        """A factor with values of steps written out that have other axes beside `j`."""
        found = factor
        while True:
            reads = {
                node: value
                for node in walk(found)
                if isinstance(node, Load)
                and j in free_axes(node)
                and (value := self._value(node)) is not None
            }
            if not reads:
                return found
            found = replaced(found, reads)

    def _step_of(self, read: Expr) -> Step | None:
        return next((each for each in self.steps.steps if each.name == name_of(read)), None)

    def _value(self, node: Load) -> Expr | None:
        """What a read of a step stands for that is no reduction, nor a state."""
        step = self._step_of(node)
        if step is None or step.name in self.steps.states or step.op or len(free_axes(node)) < 2:
            return None
        if any(isinstance(part, Reduce) for part in walk(step.body)):
            return None
        return substitute_axes(step.body, dict(zip(step.axes, index_of(node), strict=True)))

    def _folded(self, factor: Expr, j: str, holds: Mapping[Expr, bool]) -> Expr:
        return folded(self._written(factor, j), holds)

    def _grows_backwards(self, weight: Signed, j: str) -> bool:
        """Whether exponents are made of what is folded from the last position on, of which the one after has one position less."""
        names = {name_of(node) for _, part in weight for node in walk(part)}
        folds = [step.value for step in self.steps.steps if step.name in names and len(step.over) == 1]
        found = [scanned(value, self.steps.alike) for value in folds if isinstance(value, Reduce)]
        return any(each is not None and each.prefix.backwards for each in found)

    def _is_running_maximum(self, expr: Expr, j: str, is_ascending: bool) -> bool:
        """Whether a value is the maximum of a part of an axis that grows with `j` where `is_ascending`, else shrinks."""
        if isinstance(expr, Call) and expr.fn == "finite":
            (expr,) = expr.args
        step = self._step_of(expr)
        if step is None or step.op != "max" or len(step.over) != 1:
            return False
        (over,) = step.over
        found = scanned(Reduce(step.op, over, self._written(step.body, over)), self.steps.alike)
        if found is None or found.prefix.mirrored or found.prefix.at not in step.axes:
            return False
        at = index_of(expr)[step.axes.index(found.prefix.at)]
        return at is Axis(j) and found.prefix.backwards != is_ascending


def _terms(expr: Expr, j: str, k: str) -> tuple[Signed, Signed] | None:
    """The terms of an expression that are at `j`, and all of them with `k` in its place; None where one has both positions."""
    parts = list(_signed(expr, j, k))
    moving = [(sign, part) for sign, part in parts if j in free_axes(part)]
    if not moving or any({j, k} <= free_axes(part) for _, part in parts):
        return None
    return moving, [(sign, substitute_axes(part, {j: Axis(k)})) for sign, part in parts]


def _cancels(parts: Signed) -> bool:
    """Whether each term is subtracted once for each time that it is added."""
    counts: dict[Expr, int] = {}
    for sign, part in parts:
        counts[part] = counts.get(part, 0) + sign
    return not any(counts.values())


def _times(left: Expr, right: Expr) -> Expr:
    return left if right is ONE else call("mul", left, right)


def _powers(*factors: Expr) -> dict[Expr, int]:
    found: dict[Expr, int] = {}
    for factor in factors:
        found[factor] = found.get(factor, 0) + 1
    return found


def _signed(expr: Expr, j: str, k: str, sign: int = 1) -> Iterator[tuple[int, Expr]]:
    """The terms of an exponent, multiplied out where a product has both positions in one factor."""
    match expr:
        case Call("add", (left, right)):
            yield from _signed(left, j, k, sign)
            yield from _signed(right, j, k, sign)
        case Call("sub", (left, right)):
            yield from _signed(left, j, k, sign)
            yield from _signed(right, j, k, -sign)
        case Call("neg", (inner,)):
            yield from _signed(inner, j, k, -sign)
        case Call("mul", (left, right)) if {j, k} <= free_axes(expr):
            by, inner = (left, right) if {j, k} <= free_axes(right) else (right, left)
            if {j, k} & free_axes(by):
                yield sign, expr
                return
            for each, part in _signed(inner, j, k, sign):
                yield each, call("mul", part, by)
        case _:
            yield sign, expr


def _total(parts: Signed) -> Expr:
    return total_of((sign > 0, part) for sign, part in sorted(parts, key=lambda part: -part[0]))


def _first_seen(value: Expr, prefix: Prefix, k: str) -> Expr:
    """What a position of a prefix has, at the first position whose prefix has `k`: that of `k` itself, or the next one where the
    prefix is exclusive, if there is one."""
    last = call("sub", Size(k), ONE)
    at: Expr = Axis(k)
    if prefix.exclusive:
        at = call("sub" if prefix.backwards else "add", at, ONE)
    found = substitute_axes(value, {prefix.at: call("sub", last, at) if prefix.mirrored else at})
    if not prefix.exclusive:
        return found
    is_one = call("ge", Axis(k), ONE) if prefix.backwards else call("lt", Axis(k), last)
    return call("where", is_one, found, ZERO)
