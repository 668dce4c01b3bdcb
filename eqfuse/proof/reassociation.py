"""Proofs that two orders of sums and products are equal: both are rewritten to one normal form, by rules of
`tables/reassociate.py`, and the steps of one are read backward.

The normal form of a term that is made of sums, products, negations and masks is a sum of terms, each a product under masks, summed
over its axes, perhaps negated: axes, masks, factors and terms in an order of their own. An axis of which a mask selects one position is
read there, and summed no more; a sum over positions alone is its closed form. Where the forms differ otherwise, a window of an axis that
masks leave is divided into its positions in both. Where an order has other names for axes, each axis that a term sums over has the first
name of its extent that is free, in the order that gives the least term. What such a term is not made of is a factor, in which the terms
are brought to normal form first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from eqfuse.proof.check import Argument, Statement, read_rule
from eqfuse.proof.congruence import Unproved
from eqfuse.proof.elaborate import axes_in, free_names, reading
from eqfuse.proof.nodes import Chain, Differ, Fact, Holds, Inference, Premise, Step
from eqfuse.proof.positions import AxisNames, unordered
from eqfuse.proof.syntax import Position, Term, instance, number, replaced_at, subterm, term, transform, walk
from eqfuse.rules.blocks import position_of
from eqfuse.rules.catalogue import EVERY
from eqfuse.rules.closed_forms import total
from eqfuse.rules.constructors import CONSTRUCTORS
from eqfuse.rules.windows import window
from eqfuse.terms.integers import in_short
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Scalar, call, free_axes, substitute_axes

MOST_STEPS = 4000
"""Steps of one proof; a form that takes more is not proved."""

UNKNOWN = "?"
"""The beginning of the names of what closed forms do not look into."""

ONE, ZERO = number("1"), number("0")
_FUNCTIONS = {"Add": "add", "Mul": "mul", "Neg": "neg", "Sq": "sq", "Where": "where"}
_ROWS = {row.head: row for row in CONSTRUCTORS}
_READINGS = {rule.name: read_rule(rule) for ruleset in EVERY for rule in ruleset.rules}


def reordered(
    start: Term,
    goal: Term,
    leaves: Mapping[str, Expr],
    dtypes: Mapping[str, str],
    names: AxisNames,
    computed: Mapping[Term, Expr],
) -> Chain:
    """The steps from a term to another one in which sums and products have another order. `leaves` are what their leaves are made of,
    `dtypes` those of the inputs, `names` those of axes, `computed` the positions that reductions find. Raises Unproved where they are not equal by that alone."""
    if start is goal:
        return ()
    is_renamed = not _bound(goal) <= _bound(start)
    for opens in (False, True):
        there, back = (
            _Path(each, dict(leaves), dtypes, names, computed, is_renamed, opens) for each in (start, goal)
        )
        for path in (there, back):
            path.normalise(())
        if there.is_renamed or back.is_renamed:
            for path in (there, back):
                path.name(())
                path.normalise(())
        if there.root is back.root:
            turned = (
                replace(s, forward=not s.forward, before=s.after, after=s.before) for s in back.steps[::-1]
            )
            return (*there.steps, *turned)
    raise Unproved("sums of products of other factors")


class _Path:
    """A term that is rewritten, and the steps that it has come by."""

    def __init__(
        self,
        root: Term,
        leaves: dict[str, Expr],
        dtypes: Mapping[str, str],
        names: AxisNames,
        computed: Mapping[Term, Expr],
        is_renamed: bool,
        opens: bool,
    ) -> None:
        """Where it `opens` windows, they are divided into their positions."""
        self.root, self._opens = root, opens
        self._leaves, self._dtypes = leaves, dtypes
        self._names, self._computed, self.is_renamed = names, computed, is_renamed
        self.steps: list[Step] = []

    def normalise(self, at: Position) -> None:
        """Brings the subterm at a position to its normal form."""
        here = subterm(self.root, at)
        for place, arg in enumerate(here.args):
            if arg.args:
                self.normalise((*at, place))
        self.top(at)

    def top(self, at: Position) -> None:
        """The same, where the arguments of the subterm are in normal form."""
        here = subterm(self.root, at)
        match here.head, here.words, here.args:
            case "Neg", _, (Term(head="Neg"),):
                self.step("neg-neg", at)
            case "Neg", _, (Term(head="Add"),):
                self.step("negate-terms", at)
                self._both(at)
            case "Sq", _, (Term(head="Add"),):
                self.step("square", at, forward=False)
                self.top(at)
            case "Sq", _, (Term(head="Neg") | Term(head="Red", words=("sum", *_)),) if self.is_renamed:
                self.step("square", at, forward=False)
                self.top(at)
            case "Mul", _, (Term(head="Add"), _):
                self.step("multiply-out", at)
                self._both(at)
            case "Mul", _, (Term(head="Neg"), _):
                self.step("neg-out-left", at)
                self._inside(at)
            case "Mul", _, (_, Term(head="Neg")):
                self.step("neg-out-right", at)
                self._inside(at)
            case "Mul", _, (Term(head="Num", words=("1",)), _):
                self.step("one-times", at)
            case "Mul", _, (mask, _) if _is_mask(mask):
                self.step("mask-factor", at)
                self._inside(at, 1)
            case "Mul", _, (_, mask) if _is_mask(mask):
                self.step("commute-factors", at)
                self.top(at)
            case "Where", _, (mask, value, _) if _is_mask(here):
                self._masked(at, mask, value)
            case "Mul", _, (factor, Term(head="Red", words=("sum", axis, _))):
                if axis in free_names(factor, {}):
                    self._rename((*at, 1))
                self.step("factor-in", at)
                self._inside(at)
            case "Mul", _, (_, Term(head="Add")):
                self.step("commute-factors", at)
                self.top(at)
            case "Mul", _, (Term(head="Red", words=("sum", *_)), _):
                self.step("commute-factors", at)
                self.top(at)
            case "Mul", _, (Term(head="Mul"), _):
                self.step("regroup-factors", at)
                self.top((*at, 1))
                self.top(at)
            case "Mul", _, _:
                self._sorted(at, "Mul", "commute-factors", "regroup-factors")
            case "Add", _, (Term(head="Add"), _):
                self.step("regroup-terms", at)
                self.top((*at, 1))
                self.top(at)
            case "Add", _, _:
                self._sorted(at, "Add", "commute-terms", "regroup-terms")
            case "Red", ("sum", *_), (Term(head="Add"),):
                self.step("sum-terms", at)
                self._both(at)
            case "Red", ("sum", *_), (Term(head="Neg"),):
                self.step("neg-out-sum", at)
                self._inside(at)
            case "Red", ("sum", axis, _), (body,) if axis not in free_names(body, {}):
                self.step("sum-fixed", at, n=term("Leaf", (f"N({self._names.root(axis)})",)))
                self.top(at)
            case "Red", ("sum", axis, _), _ if (depth := self._selecting(at, axis)) is not None:
                self._select(at, axis, depth)
            case "Red", ("sum", axis, _), _ if self._opens and self._divide(at, axis):
                self.normalise(at)
            case "Red", ("sum", axis, _), _ if (made := self._total(at, axis)) is not None:
                self._close(at, *made)
            case "Red", ("sum", axis, _), (Term(head="Red", words=("sum", inner, _)),) if inner < axis:
                self.step("commute-sums", at)
                self._inside(at)

    def _both(self, at: Position) -> None:
        self.top((*at, 0))
        self.top((*at, 1))
        self.top(at)

    def _inside(self, at: Position, place: int = 0) -> None:
        self.top((*at, place))
        self.top(at)

    # Masks --------------------------------------------------------------------------------------

    def _masked(self, at: Position, mask: Term, value: Term) -> None:
        """Brings what is 0 outside of a mask to normal form."""
        is_leaf = mask.head == "Leaf"
        match value.head:
            case "Neg":
                self.step("mask-negated", at)
                self._inside(at)
            case "Add":
                self.step("mask-terms", at)
                self._both(at)
            case "Red" if value.words[0] == "sum":
                if value.words[1] in free_names(mask, {}):
                    self._rename((*at, 1))
                self.step("mask-sum", at)
                self._inside(at)
            case _ if is_leaf and (parts := self._conjuncts(mask.words[0])):
                one, other = map(self._leaf, parts)
                self.step("mask-both", at, r=one, s=other)
                self._inside(at, 1)
            case "Where" if _is_mask(value) and mask is value.args[0]:
                self.step("mask-twice", at)
            case "Where" if _is_mask(value) and _key(value.args[0]) < _key(mask):
                self.step("commute-masks", at)
                self._inside(at, 1)

    def _leaf(self, value: Expr) -> Term:
        """The leaf of an expression that rules do not look into."""
        self._leaves[str(value)] = value
        return term("Leaf", (str(value),))

    def _conjuncts(self, text: str) -> tuple[Expr, Expr] | None:
        """The two conditions that one says to hold."""
        match self._leaves.get(text):
            case Call("and", (one, other)):
                return one, other
        return None

    def _selecting(self, at: Position, axis: str) -> tuple[int, int] | None:
        """Of how many sums and how many masks there are between a sum and the mask that selects a position of its axis."""
        here, sums, masks = subterm(self.root, (*at, 0)), 0, 0
        while here.head == "Red" and here.words[0] == "sum":
            here, sums = here.args[0], sums + 1
        while _is_mask(here):
            mask = here.args[0]
            if self._position(mask, axis) is not None:
                return sums, masks
            here, masks = here.args[1], masks + 1
        return None

    def _position(self, mask: Term, axis: str) -> tuple[Expr, Expr] | None:
        """The position of an axis that a mask selects, and whether it is one."""
        found = self._leaves.get(mask.words[0]) if mask.head == "Leaf" else None
        if mask.head == "Apply2" and mask.words == ("eq",) and term("Leaf", (axis,)) in mask.args:
            one, two = mask.args
            at = self._found(two if one is term("Leaf", (axis,)) else one)
            found = at and call("eq", Axis(axis), at)
        return None if found is None else position_of(found, axis, self._dtypes, self._names.extents)

    def _found(self, at: Term) -> Expr | None:
        """The expression of a position that a reduction finds, whatever its free axes are called by now."""
        own = sorted(free_names(at, {}))
        for known, value in self._computed.items():
            names = sorted(free_names(known, {}))
            for order in permutations(own) if len(names) == len(own) <= 3 else ():
                if any(
                    self._names.extent(a) != self._names.extent(b) for a, b in zip(names, order, strict=True)
                ):
                    continue
                moved = {a: Axis(b) for a, b in zip(names, order, strict=True) if a != b}
                if unordered(self._moved(known, moved)) == unordered(at):
                    return substitute_axes(value, moved)
        return None

    def _select(self, at: Position, axis: str, depth: tuple[int, int]) -> None:
        """Brings a sum next to the mask that selects a position of its axis, and reads what it sums there."""
        sums, masks = depth
        place = at
        for _ in range(sums):
            self.step("commute-sums", place)
            place = (*place, 0)
        for level in reversed(range(masks)):
            self.step("commute-masks", (*place, 0, *(1,) * level))
        mask, value, _ = subterm(self.root, (*place, 0)).args
        found = self._position(mask, axis)
        assert found is not None
        position, inside = found
        for below in _folds((*place, 0, 1), value):
            fold = subterm(self.root, below)
            if fold.words[1] in free_axes(position) and axis in free_names(fold, {}):
                self._rename(below)
        value = subterm(self.root, (*place, 0, 1))
        read = self._moved(value, {axis: position})
        if inside is Const(True):
            self.step("select-own-position", place, g=read)
        else:
            self.step("select-position", place, r=self._inside_of(mask, inside), g=read)
        self.normalise(place)
        for level in reversed(range(len(at), len(place))):
            self.top(place[:level])

    def _divide(self, at: Position, axis: str) -> bool:
        """Divides the masks under sums that leave a window of an axis, if there are such."""
        here, place, conditions = subterm(self.root, at), at, list[Expr]()
        while _is_sum(here):
            here, place = here.args[0], (*place, 0)
        while _is_mask(here) and here.args[0].head == "Leaf" and here.args[0].words[0] in self._leaves:
            conditions.append(self._leaves[here.args[0].words[0]])
            here = here.args[1]
        found = window(conditions, axis)
        if found is None:
            return False
        for goal, own in enumerate(found.places):  # next to each other, outermost
            for level in reversed(range(goal, own)):
                self.step("commute-masks", (*place, *(1,) * level))
        mask = conditions[found.places[0]]
        for own in found.places[1:]:
            both = call("and", mask, conditions[own])
            self.step("mask-both", place, forward=False, q=self._leaf(both))
            mask = both
        rest = place
        for at_one in range(found.width - 1):
            one, others = self._leaf(found.is_at(at_one)), self._leaf(found.since(at_one + 1))
            self.step("mask-either", rest, r=one, s=others)
            rest = (*rest, 1)
        return True

    def _inside_of(self, mask: Term, inside: Expr) -> Term:
        """Whether a position is one of an axis: a leaf, but for one that a reduction finds."""
        if mask.head == "Leaf":
            return self._leaf(inside)
        found = reading(inside, leaves=self._leaves)
        (at,) = (arg for arg in mask.args if arg.head != "Leaf")
        return transform(found, lambda node: at if unordered(node) == unordered(at) else node)

    # Names of axes ------------------------------------------------------------------------------

    def _rename(self, at: Position, name: str = "") -> None:
        """Another name for the axis of a fold: one that nothing in the whole has, where none is given."""
        fold = subterm(self.root, at)
        op, axis, part = fold.words
        name = name or self._names.fresh(axis, _all_names(self.root))
        made = term("Red", (op, name, part), (self._moved(fold.args[0], {axis: Axis(name)}),))
        if not self._names.is_renamed(fold, made):
            raise Unproved(f"the axis {axis} has no other name")
        self.step("rename-axis", at, f=made)
        self.is_renamed = True

    def name(self, at: Position) -> None:
        """Gives the axes of all folds of a subterm their names in the normal form, those of inner ones first."""
        here, nest = subterm(self.root, at), [at]
        while here.head == "Red" and here.words[0] == "sum" and _is_sum(here.args[0]):
            here = here.args[0]
            nest.append((*nest[-1], 0))
        for place, arg in enumerate(here.args):
            if arg.args:
                self.name((*nest[-1], place))
        if here.head == "Red":
            self._name(nest)
            self.normalise(at)

    def _name(self, nest: Sequence[Position]) -> None:
        """The same of folds that are next to each other: in the order of the least term."""
        folds = [subterm(self.root, at) for at in nest]
        body, axes = folds[-1].args[0], [fold.words[1] for fold in folds]
        found = self._names.first(axes, _bound(body) | free_names(folds[0], {}))

        def placed(names: Sequence[str]) -> str:
            moved = {axis: Axis(name) for axis, name in zip(axes, names, strict=True) if axis != name}
            return unordered(self._moved(body, moved))

        best = min(found, key=placed)
        moved = [(at, name) for at, axis, name in zip(nest, axes, best, strict=True) if axis != name]
        if any(name in axes for _, name in moved):
            for at, _ in moved:
                self._rename(at)
        for at, name in moved:
            self._rename(at, name)

    def _total(self, at: Position, axis: str) -> tuple[int, Term] | None:
        """How many sums there are between a sum over positions alone and what it sums, and its closed form."""
        here, sums = subterm(self.root, (*at, 0)), 0
        while here.head == "Red" and here.words[0] == "sum":
            here, sums = here.args[0], sums + 1
        if axis not in free_names(here, {}):
            return None
        unknown: list[Term] = []
        body = self._expression(here, axis, unknown)
        made = None if body is None else total([body], axis, self._dtypes, self._names.extents)
        if made is None:
            return None
        found = reading(made, strict_casts=True, leaves=self._leaves)
        names = {term("Leaf", (f"{UNKNOWN}{n}",)): value for n, value in enumerate(unknown)}
        return sums, transform(found, lambda node: names.get(node, node))

    def _expression(self, value: Term, axis: str, unknown: list[Term]) -> Expr | None:
        """What a term says of an axis, with names for what does not vary with it and is no leaf; None where that cannot be said."""
        match value.head, value.words:
            case "Num", (text,):
                return Const(in_short(float(text)))
            case "Leaf", (text,) if text in self._leaves:
                return self._leaves[text]
            case ("Add" | "Mul" | "Neg" | "Sq" | "Where") as head, _:
                parts = [self._expression(arg, axis, unknown) for arg in value.args]
                known = [part for part in parts if part is not None]
                return call(_FUNCTIONS[head], *known) if len(known) == len(parts) else None
        if axis in free_names(value, {}):
            return None
        if value not in unknown:
            unknown.append(value)
        return Scalar(f"{UNKNOWN}{unknown.index(value)}")

    def _close(self, at: Position, sums: int, made: Term) -> None:
        """Brings a sum over positions next to what it sums, and writes its closed form."""
        place = at
        for _ in range(sums):
            self.step("commute-sums", place)
            place = (*place, 0)
        self.step("sum-positions", place, f=made)
        self.normalise(place)
        for level in reversed(range(len(at), len(place))):
            self.top(place[:level])

    def _moved(self, value: Term, places: Mapping[str, Expr]) -> Term:
        """A term at other positions. Raises Unproved where a sum would bind an axis of theirs."""
        if value.head == "Leaf" and value.words[0] in self._leaves:
            match self._leaves[value.words[0]]:
                case Axis(name) if name in places:
                    return reading(places[name], leaves=self._leaves)
            try:
                return self._leaf(substitute_axes(self._leaves[value.words[0]], places))
            except ValueError as error:
                raise Unproved(str(error)) from None
        if not free_names(value, {}).intersection(places):
            return value
        if value.head == "Red" and any(value.words[1] in free_axes(at) for at in places.values()):
            raise Unproved(f"a sum over {value.words[1]} is around one of its positions")
        return term(value.head, value.words, tuple(self._moved(arg, places) for arg in value.args))

    def _sorted(self, at: Position, head: str, commute: str, regroup: str) -> None:
        """Puts the first of a chain `a (b (c d))`, of which the others are in order, where it belongs."""
        while True:
            first, rest = subterm(self.root, at).args
            nested = rest.head == head
            second = rest.args[0] if nested else rest
            if _key(first) <= _key(second):
                return
            if not nested:
                self.step(commute, at)
                return
            self.step(regroup, at, forward=False)
            self.step(commute, (*at, 0))
            self.step(regroup, at)
            at = (*at, 1)

    def step(self, rule: str, at: Position, forward: bool = True, **more: Argument) -> None:
        """One instance of a rule at a position; `more` are variables that stand on its other side alone. Raises Unproved where the subterm there is none, or a condition has no proof."""
        if len(self.steps) >= MOST_STEPS:
            raise Unproved(f"more than {MOST_STEPS} steps")
        reading = _READINGS[rule]
        assert reading.sides is not None
        left, right = reading.sides if forward else reversed(reading.sides)
        here = subterm(self.root, at)
        values: dict[str, Argument] = dict(more)
        if not _matches(left, here, values):
            raise Unproved(f"{rule} does not apply")
        premises = tuple(self._premise(statement.at(values)) for statement in reading.when)
        inference = Inference(rule, values, premises)
        after = replaced_at(self.root, at, instance(right, values))
        self.steps.append(Step(inference, forward, at, self.root, after))
        self.root = after

    def _premise(self, statement: Statement) -> Premise:
        if statement.relation == "!=":
            return Differ()
        moves = tuple(() for arg in statement.args if isinstance(arg, Term))
        match statement.relation, statement.args:
            case "fixed", (Term() as value, str(axis)):
                return Holds(self._fixed(value, axis), moves)
        return Holds(Fact(statement.relation, statement.args, None), moves)

    def _fixed(self, value: Term, axis: str) -> Fact:
        args = (value, axis)
        match value:
            case Term(head="Leaf" | "Num"):
                return Fact("fixed", args, None)
            case Term(head="Red", words=(op, own, part), args=(body,)):
                values: dict[str, Argument] = {"R": op, "D_axis": own, "D": part, "e": body}
                if own == axis:
                    return Fact("fixed", args, Inference("fixed-bound", values, ()))
                below = Holds(self._fixed(body, axis), ((),))
                return Fact("fixed", args, Inference("fixed-reduce", {**values, "X_axis": axis}, (below,)))
        row = _ROWS.get(value.head)
        if row is None:
            raise Unproved(f"nothing shows that {value.head} is fixed")
        rule = f"fixed-{row.title}"
        reading = _READINGS[rule]
        assert reading.fact is not None
        found: dict[str, Argument] = {"X_axis": axis}
        pattern = reading.fact.args[0]
        if not isinstance(pattern, Term) or not _matches(pattern, value, found):
            raise Unproved(f"{rule} does not apply")
        premises = tuple(self._premise(statement.at(found)) for statement in reading.when)
        return Fact("fixed", args, Inference(rule, found, premises))


def _is_sum(value: Term) -> bool:
    return value.head == "Red" and value.words[0] == "sum"


def _folds(at: Position, value: Term) -> Iterator[Position]:
    """Where a term that stands at a position has folds, outer ones first."""
    if value.head == "Red":
        yield at
    for place, arg in enumerate(value.args):
        yield from _folds((*at, place), arg)


def _bound(root: Term) -> frozenset[str]:
    """The axes that a term folds over."""
    return frozenset(node.words[1] for node in walk(root) if node.head == "Red")


def _all_names(root: Term) -> frozenset[str]:
    """The names that leaves of a term read, and those of the axes that it folds over."""
    return _bound(root).union(*(axes_in(node.words[0]) for node in walk(root) if node.head == "Leaf"))


def _is_mask(value: Term) -> bool:
    """Whether a term is 0 where some condition does not hold."""
    return value.head == "Where" and value.args[2] is ZERO


def _key(value: Term) -> str:
    return repr(value)


def _matches(pattern: Term, found: Term, values: dict[str, Argument]) -> bool:
    """Whether a term is an instance of a pattern; what its variables stand for."""
    if pattern.head == "Var":
        return values.setdefault(pattern.words[0], found) is found
    if pattern.head != found.head or len(pattern.args) != len(found.args):
        return False
    for word, own in zip(pattern.words, found.words, strict=True):
        if word.startswith("?"):
            if values.setdefault(word[1:], own) != own:
                return False
        elif word != own:
            return False
    return all(_matches(p, f, values) for p, f in zip(pattern.args, found.args, strict=True))
