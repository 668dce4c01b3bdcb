"""Reverse mode: from the cotangents of the outputs to those of the inputs, step by step from the last to the first.

One rule for each construct:

    f(a, b)            each argument gets the cotangent times the partial derivative of the table of functions
    where(c, a, b)     a where c holds, b where it does not: the cotangent is masked, before it is multiplied
    sum[j](a)          every position gets the cotangent
    max[j](a), min     the position that `argmax` gives gets it: of equals the first
    prod[j](a)         the product of all others
    a prefix           see `scans`: a running product, a recurrence, and sums whose weights are carried on
    a fold             where it keeps one of two states: the position that it keeps. Any other: the derivative of
                       `combine`, at the states of the positions before and after
    a recurrence       in order: the cotangent of a state is a recurrence in the other direction, of what steps after it read
    x[f(i)]            see `pullback`; a read of a value that is broadcast is a sum over what it is broadcast along

Integers, truth values, `floor`, `round`, `sign` and conditions have no derivative: they count as constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eqfuse import limits
from eqfuse.differentiate.polynomial import (
    UNIT,
    ZERO,
    Monomial,
    Polynomial,
    atom,
    collected,
    expression,
    multiplied,
    product,
    shared,
    written,
)
from eqfuse.differentiate.pullback import pulled
from eqfuse.differentiate.scans import Scans
from eqfuse.differentiate.steps import Step, Steps, index_of, is_fold, name_of, refused
from eqfuse.differentiate.vanish import is_zero
from eqfuse.errors import EqfuseError
from eqfuse.terms.definitions import derivatives
from eqfuse.terms.expressions import is_position
from eqfuse.terms.folds import fold_of, packed, ranks_of, unpacked
from eqfuse.terms.functions import COMPARISONS, LOGICAL
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Fold,
    Load,
    Local,
    Size,
    call,
    children,
    free_axes,
    replaced,
    substitute_axes,
    walk,
)

MOST_TERMS = 2
"""A cotangent of more terms than this is given a name before it is used."""

MOST_MASKED = 4
"""So is one inside of an expression: each maximum in it would double the terms."""


@dataclass
class Reverse:
    """`targets` are the axes of what cotangents are asked of; `notes` tell what was left out, and why. Below the step `cut`, where there is one,
    cotangents are those of a cotangent 1 of it; `above` is what it gets."""

    steps: Steps
    targets: dict[str, tuple[str, ...]]
    cut: str = ""
    above: Polynomial = ()
    found: dict[str, Polynomial] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _quotients: list[tuple[Step, Monomial]] = field(default_factory=list)
    _rests: dict[tuple[object, ...], list[Expr]] = field(default_factory=dict)
    _reads: dict[str, int] = field(default_factory=dict)
    _sums: dict[str, Polynomial] = field(default_factory=dict)  # what a step sums

    def __post_init__(self) -> None:
        self._scans = Scans(self.steps)

    def run(self, seeds: dict[str, Polynomial]) -> None:
        """Fills `found` with the cotangents, from those of the outputs."""
        primal = list(self.steps.steps)
        self.targets |= {step.name: step.axes for step in primal}
        every = Counter(name_of(node) for step in primal for node in walk(step.body))
        self._reads = {step.name: every[step.name] for step in primal}
        self._note_quotients(primal)
        self.found |= seeds
        states = [step for step in reversed(primal) if step.name in self.steps.states]
        named = {step.name: self._carried(step) for step in states}
        for step in reversed(primal):
            cotangent = (
                self.found.pop(step.name, ()) if step.name not in named else atom(named[step.name].itself)
            )
            if step.name == self.cut:
                self.above, cotangent = cotangent, (UNIT,)
            if cotangent and step.name in self.steps.active:
                self._back(step, cotangent)
        for name, step in named.items():
            self.steps.put(replace(step, body=expression(self.found.pop(name, ()))))

    def _carried(self, state: Step) -> Step:
        """What the cotangent of a state is called that later steps read: it is known once all of them are differentiated."""
        name = self.steps.names.fresh(f"d{state.name}")
        self.steps.states.add(name)
        return self.steps.add(Step(name, state.axes, Const(0.0), written=True))

    def _note_quotients(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if not step.op and self.steps.dtypes[step.name] == "f32":
                value = product(step.body)
                if value.number == 1 and any(n < 0 for n in value.powers.values()) and len(value.powers) > 1:
                    self._quotients.append((step, value))

    # -- one step ------------------------------------------------------------------------------------

    def _back(self, step: Step, cotangent: Polynomial) -> None:
        limits.check()
        if (step.op or step.is_extreme) and self._vanishes(step, cotangent):
            return
        if self._wants_name(step, cotangent):
            cotangent = self._named(f"d{step.name}", step.axes, cotangent)
        if (given := self._scans.back(step, cotangent, self._place)) is not None:
            for own, part, terms in given:
                self._through_part(own, part, terms)
            return
        match step.op:
            case "" | "sum":
                self._through(step, step.body, cotangent)
            case "max" | "min":
                place = self._place(step)
                (axis,) = step.over
                chosen = call("eq", Axis(axis), place)
                self._through(step, step.body, tuple(term.masked(chosen) for term in cotangent))
            case "prod":
                self._through(step, step.body, multiplied(cotangent, self._others(step)))
            case _:
                self._fold(step, cotangent)

    def _vanishes(self, step: Step, cotangent: Polynomial) -> bool:
        """Whether the cotangent is 0 whatever the inputs are, as that of a maximum that only shifts an exponent."""
        if len(cotangent) < 2 or not self._may_cancel(cotangent):
            return False
        parts = [self._try(step.axes, (term,)) for term in cotangent]
        if not is_zero(self.steps, self._try(step.axes, cotangent), parts, step.name):
            return False
        self.notes.append(f"{step.name} passes nothing on: its cotangent is 0 for all inputs")
        return True

    def _try(self, axes: tuple[str, ...], terms: Polynomial) -> Step:
        """A step for a value that is tried."""
        return Step(self.steps.names.fresh("tried"), axes, expression(terms), written=True)

    def _reads_sums(self, terms: Polynomial) -> bool:
        """Whether a polynomial is made of reductions: others are not 0 but for their masks."""
        return any(self.steps.reads_sums(factor) for term in terms for factor in term.powers)

    def _may_cancel(self, terms: Polynomial) -> bool:
        """Whether a sum of terms may be 0 for all inputs. One term with a factor that the caller gives is not, and what recurrences in order
        make is not tried."""
        given = len(terms) == 1 and any(name_of(f) and self._is_given(f) for f in terms[0].powers)
        return self._reads_sums(terms) and not given and not self.steps.states

    def _wants_name(self, step: Step, cotangent: Polynomial) -> bool:
        """Whether a cotangent is read better, and summed once, by a name: one of many terms, and a sum or a mask that
        several factors of a product, or several reads, get. Below a cut, so does all that is made of reductions: it is stored once for them."""
        readers = [node for node in walk(step.body) if name_of(node) in self.steps.active]
        is_masked = any(term.masks for term in cotangent)
        if step.op == "sum" and len(product(step.body).powers) > 1 and len(readers) > 1:
            return len(cotangent) > 1 or is_masked or (bool(self.cut) and self._reads_sums(cotangent))
        return len(cotangent) > MOST_TERMS or (is_masked and len(readers) > 1)

    def _through(self, step: Step, body: Expr, cotangent: Polynomial) -> None:
        """The cotangent of an expression without reductions, to everything that it reads."""
        steps = self.steps
        own = {} if step.op else {step.body: step.itself}
        found: dict[Expr, list[Monomial]] = {body: list(cotangent)}
        for node in reversed(list(walk(body))):
            limits.check()
            terms = collected(found.pop(node, ()))
            if not terms or not steps.is_active(node) or not steps.is_real(node):
                continue
            if (name := name_of(node)) is not None:
                self._read(step, name, node, terms)
                continue
            if not isinstance(node, Call):
                hint = "give its value a name, and take the gradient of what is made of it"
                raise refused(steps.program, node, f"{_short(node)} has no gradient here", hint)
            if len(terms) > MOST_MASKED:
                terms = self._named(f"d{step.name}", step.loops, terms)
            for part, factors in self._partials(node, terms, own):
                found.setdefault(part, []).extend(factors)

    def _partials(
        self, node: Call, terms: Polynomial, own: dict[Expr, Expr]
    ) -> Iterator[tuple[Expr, Polynomial]]:
        """The arguments of a call, each with its cotangent. `own` are values that have a name."""
        match node:
            case Call("where", (condition, left, right)):
                yield left, tuple(term.masked(condition) for term in terms)
                yield right, tuple(term.masked(call("not", condition)) for term in terms)
                return
            case Call(fn, _) if fn in COMPARISONS or fn in LOGICAL:
                return
            case Call(fn, _) if is_fold(fn):
                hint = "take the gradient of the program that the lists come from"
                raise refused(
                    self.steps.program, node, f"a merge of two lists of {fn!r} has no gradient", hint
                )
        if not any(self._changes(node, part) for part in node.args):
            self.notes.append(f"{_short(node)} counts as a constant: {node.fn} has no gradient")
        for part, partial in zip(node.args, derivatives(node), strict=True):
            if partial is not None and self.steps.is_active(part) and self.steps.is_real(part):
                yield part, self._shortened(multiplied(terms, replaced(partial, own)))

    def _changes(self, node: Call, part: Expr) -> bool:
        partials = dict(zip(node.args, derivatives(node), strict=True))
        return partials[part] not in (None, Const(0))

    def _shortened(self, terms: Polynomial) -> Polynomial:
        """The polynomial with `p / l` read from the step that computes it."""
        return collected(map(self._short, terms))

    def _short(self, term: Monomial) -> Monomial:
        for step, quotient in self._quotients:
            if any(term.powers.get(factor, 0) * n < 0 for factor, n in quotient.powers.items()):
                # What the quotient is made of cancels: 1 / (x * sqrt(x)) times sqrt(x) is 1 / x, also at 0.
                term = term.with_factors_of(step.itself, quotient)
        for step, quotient in self._quotients:
            names = self._places(step, quotient, term)
            if names is None:
                continue
            value = quotient.mapped(lambda expr, names=names: substitute_axes(expr, names))  # type: ignore[misc]
            if all(
                (n > 0) == (term.powers.get(factor, 0) > 0) and abs(n) <= abs(term.powers.get(factor, 0))
                for factor, n in value.powers.items()
            ):
                inverse = Monomial(UNIT.number, {factor: -n for factor, n in value.powers.items()})
                itself = substitute_axes(step.itself, names)
                return self._short(term.times(inverse).times(Monomial(UNIT.number, {itself: 1})))
        return term

    def _places(self, step: Step, quotient: Monomial, term: Monomial) -> dict[str, Expr] | None:
        """The positions at which a monomial may have the quotient of a step as a factor."""
        if all(factor in term.powers for factor in quotient.powers):
            return {}
        for factor, n in quotient.powers.items():
            for other, m in term.powers.items():
                if n * m > 0 and name_of(factor) is not None and name_of(factor) == name_of(other):
                    axes = index_of(factor)
                    if all(isinstance(part, Axis) for part in axes) and free_axes(factor) == set(step.axes):
                        pairs = zip(axes, index_of(other), strict=True)
                        return {
                            axis.name: to for axis, to in pairs if isinstance(axis, Axis) and to is not axis
                        }
        return None

    # -- reads ---------------------------------------------------------------------------------------

    def _read(self, step: Step, name: str, node: Expr, terms: Polynomial) -> None:
        """Adds the cotangent of a read to that of what is read."""
        target = self.targets.get(name)
        if target is None:
            return
        groups: dict[tuple[str, ...], list[Monomial]] = {}
        made = pulled(self.steps, terms, index_of(node), step.loops, target, step.over)
        # What does not depend on a loop is summed without it, apart from what does.
        for term in made.value:
            over = tuple(axis for axis in made.over if axis in term.axes)
            groups.setdefault(over, []).append(term)
        for over, members in groups.items():
            known = frozenset[str]().union(*(term.axes for term in terms))
            summed = self._summed_in_turn(name, over, made.added, target, collected(members), known)
            summed = _times_sizes(summed, [axis for axis in made.over if axis not in over])
            self.found[name] = collected((*self.found.get(name, ()), *self._shortened(summed)))

    def _summed_in_turn(
        self,
        name: str,
        over: tuple[str, ...],
        added: Sequence[str],
        target: Sequence[str],
        terms: Polynomial,
        known: frozenset[str],
    ) -> Polynomial:
        """The sum over loops first and over added axes then, where all terms have a mask of the latter alone, which so stays
        outside of the first: what is summed there is a plain product."""
        outer = tuple(axis for axis in over if axis in added)
        inner = tuple(axis for axis in over if axis not in added)
        masks = [
            mask
            for mask in terms[0].masks
            if free_axes(mask) & set(outer)
            and not free_axes(mask) & set(inner)
            and all(mask in term.masks for term in terms)
        ]
        if not masks or not inner:
            return self._summed(name, over, target, terms, known)
        plain = (replace(term, masks=tuple(m for m in term.masks if m not in masks)) for term in terms)
        within = self._summed(name, inner, (*target, *outer), collected(plain), known)
        return self._summed(name, outer, target, collected(term.masked(*masks) for term in within))

    def _summed(
        self,
        name: str,
        over: tuple[str, ...],
        target: Sequence[str],
        terms: Polynomial,
        known: frozenset[str] = frozenset(),
    ) -> Polynomial:
        """The sum over some axes, what does not depend on them in front of it. An axis that nothing is left to depend on
        counts as often as it has positions. Masks of `known` axes are the program's own."""
        if not over or not terms:
            return terms
        terms = collected(self._under_own_masks(term, over) for term in terms)
        carried = (
            [self._scans.summed(name, over[0], target, term) for term in terms] if len(over) == 1 else []
        )
        if any(carried):
            rest = tuple(term for term, made in zip(terms, carried, strict=True) if made is None)
            made = (each for found in carried for each in found or ())
            return collected((*made, *self._summed(name, over, target, rest, known)))
        groups: dict[tuple[Expr, ...], list[Monomial]] = {}
        for term in terms:
            groups.setdefault(_beside(term.masks, over), []).append(term)
        if len(groups) > 1:
            each = [self._summed(name, over, target, tuple(group), known) for group in groups.values()]
            return collected(term for group in each for term in group)
        common = shared(terms)
        fixed = {factor: n for factor, n in common.powers.items() if not free_axes(factor) & set(over)}
        cutting = [mask for term in terms for mask in term.masks if free_axes(mask) & set(over)]
        if cutting and not (len(over) == 1 and self._scans.is_never_empty(cutting, over[0])):
            # What a mask leaves nothing of is 0, whatever the factors are: those that may be infinite stay behind it.
            fixed = {factor: n for factor, n in fixed.items() if n > 0 and self._is_given(factor)}
        masks = tuple(
            mask
            for mask in terms[0].masks
            if not free_axes(mask) & set(over) and all(mask in term.masks for term in terms)
        )
        number = common.number if len(terms) == 1 else UNIT.number
        sign = -1 if all(term.number < 0 for term in terms) else 1
        front = Monomial(number * sign, fixed, masks)
        behind = Monomial(1 / front.number, {factor: -n for factor, n in fixed.items()})
        inner = collected(
            replace(term, masks=tuple(mask for mask in term.masks if mask not in masks)).times(behind)
            for term in terms
        )
        body = self._beside_masks(inner, known)
        left = tuple(axis for axis in over if axis in free_axes(body))
        (front,) = _times_sizes((front,), [axis for axis in over if axis not in left])
        if not left:
            rest = atom(body) if any(term.axes & set(over) for term in inner) else inner
            return collected(term.times(front) for term in rest)
        axes = tuple(axis for axis in target if axis in free_axes(body))
        step = Step(self.steps.names.fresh(self._sum_name(name, inner, front)), axes, body, "sum", left)
        parts = [self._try((*axes, *over), (term,)) for term in inner]
        if self._may_cancel(inner) and is_zero(self.steps, step, parts, name):
            return ()
        step = self.steps.add(step)
        self._sums[step.name] = inner
        return tuple(term.times(front) for term in atom(step.itself))

    def together(self, name: str, terms: Polynomial) -> Polynomial:
        """A cotangent with sums over the same axes as one where terms of them nearly cancel: `sum[i](p * x - q) - sum[i](p * a)` is
        `sum[i](p * (x - a) - q)`, which keeps the digits of q where x and a are large and near each other."""
        for place, one in enumerate(terms):
            for other in terms[place + 1 :]:
                first, second = self._sum(one), self._sum(other)
                if first is None or second is None or {*first.over} != {*second.over}:
                    continue
                parts = [
                    [part.times(Monomial(term.number, {})) for part in self._sums[step.name]]
                    for term, step in ((one, first), (other, second))
                ]
                if not any(_cancels(a, b, first.over) for a in parts[0] for b in parts[1]):
                    continue
                axes = tuple(axis for axis in self.targets[name] if axis in {*first.axes, *second.axes})
                body = expression(collected((*parts[0], *parts[1])))
                made = Step(self.steps.names.fresh(f"d{name}_sum"), axes, body, "sum", first.over)
                made = self.steps.add(made)
                self._sums[made.name] = collected((*parts[0], *parts[1]))
                rest = [term for term in terms if term is not one and term is not other]
                return self.together(name, collected((*rest, *atom(made.itself))))
        return terms

    def _sum(self, term: Monomial) -> Step | None:
        """The sum that a monomial is, but for a number."""
        if term.masks or len(term.powers) != 1:
            return None
        ((factor, exponent),) = term.powers.items()
        made = name_of(factor)
        if exponent != 1 or made not in self._sums:
            return None
        step = self.steps.step(made)
        return step if factor == step.itself else None

    def _under_own_masks(self, term: Monomial, over: Sequence[str]) -> Monomial:
        """A quotient, with the masks of positions outside of which one of its factors is 0: there it is 0 too, whatever it is divided by."""
        if not any(n < 0 and not isinstance(factor, Size) for factor, n in term.powers.items()):
            return term
        masks, made = list[Expr](), self._made()
        for factor in (factor for factor, n in term.powers.items() if n > 0):
            step = self.steps.step(name) if (name := name_of(factor)) in made else None
            match step.value if step is not None and factor == step.itself else None:
                case Call("where", (mask, _, zero)) if zero == ZERO and free_axes(mask) & set(over):
                    masks += [] if any(isinstance(node, Load) for node in walk(mask)) else [mask]
        return term.masked(*masks)

    def _made(self) -> set[str]:
        """The names of the steps."""
        return {step.name for step in self.steps.steps}

    def _sum_name(self, name: str, terms: Polynomial, front: Monomial) -> str:
        """What a sum is called that is, times `front`, a part of the cotangent of `name`: that cotangent where it is all of
        it, or what it sums where that is a product of two values of a step's."""
        if name not in self._reads:  # an input: results have the names of cotangents
            return f"d{name}_sum"
        if self._reads[name] == 1 and name not in self.found and front == UNIT:
            return f"d{name}"
        factors = [name_of(factor) for term in terms for factor in term.powers]
        if len(terms) == 1 and len(factors) == 2 and all(factors):
            return f"sum_{factors[0]}_{factors[1]}"
        return f"d{name}_sum"

    def _beside_masks(self, terms: Polynomial, known: frozenset[str]) -> Expr:
        """The terms as an expression, with inputs that all of them are multiplied by and that have axes of their own beside
        the program's masks: so `where(j <= i, p[i,j], 0) * k[j,d]` is a matrix product, as reverse mode has it: masked first,
        multiplied then. A mask that picks the positions which read one stays around all: those that do not may be NaN."""
        masks = {mask for term in terms for mask in term.masks}
        if not masks or not all(free_axes(mask) <= known for mask in masks):
            return expression(terms)
        powers = {f: n for f, n in shared(terms).powers.items() if n > 0 and self._is_given(f)}
        within = frozenset[str]().union(*(term.axes for term in _divided(terms, powers)))
        inputs = {tensor.name for tensor in self.steps.program.tensors}
        own = {f: n for f, n in powers.items() if name_of(f) in inputs and not free_axes(f) <= within}
        if not own:
            return expression(terms)
        return call("mul", expression(_divided(terms, own)), written(Monomial(UNIT.number, own)))

    def _is_given(self, factor: Expr) -> bool:
        """Whether a factor is an input or a cotangent of an output, or made of sizes."""
        made = self._made()
        return not any(name_of(node) in made or isinstance(node, Call) for node in walk(factor))

    def _named(self, name: str, axes: tuple[str, ...], terms: Polynomial) -> Polynomial:
        """The polynomial with the value of a step in it: what terms without masks have in common stays outside, and may be
        the factor of something else."""
        if len(terms) == 1 and not terms[0].masks and sum(map(abs, terms[0].powers.values())) == 1:
            return terms
        common = UNIT
        if len(terms) > 1 and not any(term.masks for term in terms):
            common = shared(terms)
            behind = Monomial(1 / common.number, {factor: -n for factor, n in common.powers.items()})
            terms = tuple(term.times(behind) for term in terms)
        body = expression(terms)
        own = tuple(axis for axis in axes if axis in free_axes(body))
        step = self.steps.add(Step(self.steps.names.fresh(name), own, body))
        return tuple(term.times(common) for term in atom(step.itself))

    # -- reductions that choose ------------------------------------------------------------------------

    def _place(self, step: Step) -> Expr:
        """The position of the greatest or least: the first of equals."""
        (axis,) = step.over
        op = {"max": "argmax.k", "min": "argmin.k"}[step.op]
        return self.steps.reduced(f"place_{step.name}", step.axes, op, axis, packed((step.body, Axis(axis))))

    def _others(self, step: Step) -> Expr:
        """The product of all positions but one."""
        (axis,) = step.over
        other = self.steps.another(axis)
        moved = substitute_axes(step.body, {axis: Axis(other)})
        body = call("where", call("ne", Axis(other), Axis(axis)), moved, Const(1))
        return self.steps.reduced(f"others_{step.name}", step.loops, "prod", other, body)

    def _fold(self, step: Step, cotangent: Polynomial) -> None:
        """A state variable of a registered reduction."""
        found = fold_of(step.op)
        if found is None:
            hint = "write it with sum, max, min, prod or a registered reduction"
            raise refused(self.steps.program, step.value, f"the reduction {step.op!r} has no gradient", hint)
        fold, index = found
        (axis,) = step.over
        ranks = ranks_of(step.value)
        body = step.body
        if ranks is not None:
            body = children(body)[1]
        parts = unpacked(body, len(fold.state))
        if fold.order:
            place = next((k for k, part in enumerate(parts) if is_position(part, axis)), None)
            if place is None:
                raise self._without_position(step, fold)
            op = fold.ops[place]
            kept = self.steps.reduced(f"place_{step.name}", step.axes, op, axis, step.body)
            chosen = call("eq", parts[place], kept)
            self._through_part(step, parts[index], tuple(term.masked(chosen) for term in cotangent))
            return
        before, after = (self._rest(step, fold, parts, side) for side in ("lt", "gt"))
        self._through_combination(step, fold, index, parts, before, after, cotangent)

    def _without_position(self, step: Step, fold: Fold) -> EqfuseError:
        name = fold.name
        hint = (
            f"give {name!r} a state variable that is the position, as argmax has: state='v, k', lift='x, j'"
        )
        message = f"{name!r} keeps one of two states, and none of its variables says which"
        return refused(self.steps.program, step.value, message, hint)

    def _through_part(self, step: Step, part: Expr, cotangent: Polynomial) -> None:
        if self.steps.is_active(part) and self.steps.is_real(part):
            self._through(step, part, cotangent)

    def _rest(self, step: Step, fold: Fold, parts: Sequence[Expr], side: str) -> list[Expr]:
        """The state of the positions before or after one."""
        key = (fold.name, step.loops, step.body, side)
        if key not in self._rests:
            self._rests[key] = self._state_of(step, fold, parts, side)
        return self._rests[key]

    def _state_of(self, step: Step, fold: Fold, parts: Sequence[Expr], side: str) -> list[Expr]:
        (axis,) = step.over
        other, body = self.steps.others(axis, side, parts, fold.identity)
        word = "before" if side == "lt" else "after"
        return [
            self.steps.reduced(f"{variable}_{word}", step.loops, op, other, body)
            for variable, op in zip(fold.state, fold.ops, strict=True)
        ]

    def _through_combination(
        self,
        step: Step,
        fold: Fold,
        index: int,
        parts: Sequence[Expr],
        before: Sequence[Expr],
        after: Sequence[Expr],
        cotangent: Polynomial,
    ) -> None:
        """`combine(combine(before, part), after)`, to what the position contributes."""
        middle = [Local(f"{name}0", ()) for name in fold.state]
        inner = fold.combined(before, middle)
        values = dict(zip(middle, parts, strict=True))
        state = [
            self._value(f"{name}_here", step.loops, replaced(value, values))
            for name, value in zip(fold.state, inner, strict=True)
        ]
        left = {Local(f"{v}1", ()): value for v, value in zip(fold.state, state, strict=True)}
        right = {Local(f"{v}2", ()): value for v, value in zip(fold.state, after, strict=True)}
        known = {**left, **right}
        joined = self._adjoint(fold.of_first[index], dict.fromkeys(left), known, cotangent)
        for place, name in enumerate(fold.state):
            terms = joined.get(Local(f"{name}1", ()), ())
            if not terms:
                continue
            first = {Local(f"{v}1", ()): value for v, value in zip(fold.state, before, strict=True)}
            second = {Local(f"{v}2", ()): part for v, part in zip(fold.state, parts, strict=True)}
            passed = self._adjoint(fold.of_first[place], dict.fromkeys(second), {**first, **second}, terms)
            for variable, part in zip(fold.state, parts, strict=True):
                own = passed.get(Local(f"{variable}2", ()), ())
                if own:
                    self._through_part(step, part, own)

    def _value(self, name: str, axes: Sequence[str], body: Expr) -> Expr:
        own = tuple(axis for axis in axes if axis in free_axes(body))
        return self.steps.add(Step(self.steps.names.fresh(name), own, body)).itself

    def _adjoint(
        self, expr: Expr, wanted: dict[Local, None], values: dict[Local, Expr], cotangent: Polynomial
    ) -> dict[Local, Polynomial]:
        """The cotangents of named values in an expression over them, at those values."""
        found: dict[Expr, list[Monomial]] = {expr: list(cotangent)}
        leaves: dict[Local, Polynomial] = {}
        for node in reversed(list(walk(expr))):
            terms = collected(found.pop(node, ()))
            if not terms:
                continue
            match node:
                case Local():
                    if node in wanted:
                        leaves[node] = terms
                case Call("where", (condition, left, right)):
                    at = replaced(condition, values)
                    found.setdefault(left, []).extend(term.masked(at) for term in terms)
                    found.setdefault(right, []).extend(term.masked(call("not", at)) for term in terms)
                case Call():
                    for part, partial in zip(children(node), derivatives(node), strict=True):
                        if partial is not None and any(isinstance(p, Local) for p in walk(part)):
                            found.setdefault(part, []).extend(multiplied(terms, replaced(partial, values)))
        return leaves


def _divided(terms: Polynomial, powers: Mapping[Expr, int]) -> Polynomial:
    """The terms without some of their factors."""
    behind = Monomial(UNIT.number, {factor: -n for factor, n in powers.items()})
    return collected(term.times(behind) for term in terms)


def _beside(masks: Sequence[Expr], over: Sequence[str]) -> tuple[Expr, ...]:
    """The masks of data that are the same all along these axes: where they do not hold, what the sum is multiplied by may
    have no value."""
    return tuple(
        mask
        for mask in masks
        if not free_axes(mask) & set(over) and any(isinstance(node, Load) for node in walk(mask))
    )


def _cancels(one: Monomial, other: Monomial, over: Sequence[str]) -> bool:
    """Whether two monomials are of opposite signs, and but for one factor of each the same: one that has all axes summed over."""
    if one.number * other.number > 0 or one.masks != other.masks:
        return False
    common = shared((one, other)).powers
    rests = [
        {factor: n - common.get(factor, 0) for factor, n in term.powers.items() if n != common.get(factor, 0)}
        for term in (one, other)
    ]
    axes = frozenset[str]().union(*map(free_axes, common))
    return axes >= set(over) and all(list(rest.values()) == [1] for rest in rests)


def _times_sizes(terms: Polynomial, axes: Iterable[str]) -> Polynomial:
    """The sum of what does not depend on some axes over them."""
    for axis in axes:
        terms = multiplied(terms, Size(axis))
    return terms


def _short(node: Expr) -> str:
    text = str(node)
    return text if len(text) <= 60 else text[:57] + "..."
