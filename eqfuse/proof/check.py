"""Replays a derivation, step by step, against the rules as they are printed.

Nothing here is shared with the e-graph, its encoder, or the closure that found the proof: rules are read from their
own text, terms are compared as they are written, and what an inference rests on is checked again. A step is
refused unless it is an instance of its rule, at its position, with every condition of the rule proved.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from eqfuse.proof.elaborate import free_names
from eqfuse.proof.nodes import Chain, Differ, Equal, Fact, Holds, Inference, Premise, Proof, Step, rests_on
from eqfuse.proof.positions import AxisNames, conjuncts, selects, selects_computed
from eqfuse.proof.syntax import Term, instance, number, replaced_at, subterm, term, walk, word_instance
from eqfuse.proof.totals import totals
from eqfuse.proof.windows import is_either
from eqfuse.rules.catalogue import EVERY
from eqfuse.rules.constructors import HEADS
from eqfuse.rules.relations import RELATIONS
from eqfuse.rules.rule import PARTS, Infer, Rewrite, Rule
from eqfuse.rules.scope import current
from eqfuse.rules.tables.union import union_rules
from eqfuse.terms.nodes import Const, Reduce
from eqfuse.terms.python import parsed


@dataclass(frozen=True)
class Refused(Exception):
    """Why a derivation is refused, and where."""

    where: str
    why: str


def known_rules(proof: Proof | None = None) -> dict[str, Rule]:
    """Every rule in force by name, with those that combine the folds that a proof has."""
    states = [(g.axis, s.op) for k in (proof.kernels if proof else ()) for g in k.groups for s in g.states]
    return rules_for(Reduce(op, axis, Const(0)) for axis, op in states)


def rules_for(reduces: Iterable[Reduce]) -> dict[str, Rule]:
    """Every rule in force by name, with those that combine the folds of these reductions."""
    folds = union_rules(reduces)
    shipped = (*EVERY, *folds)
    return {rule.name: rule for ruleset in current().applied(shipped) for rule in ruleset.rules}


# -- rules from their text -------------------------------------------------------------------------

Argument = Term | str


@dataclass(frozen=True)
class Statement:
    """A relation of RELATIONS, `==` or `!=`, of patterns."""

    relation: str
    args: tuple[Argument, ...]

    @property
    def variables(self) -> frozenset[str]:
        return frozenset().union(*map(_variables, self.args))

    def at(self, values: Mapping[str, Argument]) -> Statement:
        """With its variables replaced. Raises KeyError for one without a value."""
        return Statement(
            self.relation,
            tuple(
                instance(a, values) if isinstance(a, Term) else word_instance(a, values) for a in self.args
            ),
        )


@dataclass(frozen=True)
class Reading:
    """A rule in patterns: `left` and `right` of a rewrite, or the `fact` of an inference; and its conditions."""

    rule: Rule
    sides: tuple[Term, Term] | None
    fact: Statement | None
    when: tuple[Statement, ...]

    @property
    def variables(self) -> frozenset[str]:
        """Names that an instance has to give values."""
        statements = [*self.when, *([self.fact] if self.fact else [])]
        return frozenset().union(*(s.variables for s in statements), *map(_variables, self.sides or ()))


def _variables(part: Argument) -> frozenset[str]:
    """Names of the variables of a pattern."""
    if isinstance(part, str):
        return frozenset({part[1:]} if part.startswith("?") else ())
    nodes = list(walk(part))
    words = {word[1:] for node in nodes for word in node.words if word.startswith("?")}
    return frozenset(words | {node.words[0] for node in nodes if node.head == "Var"})


def read_rule(rule: Rule) -> Reading:
    """The patterns of a rule, from its text."""
    when = tuple(_statement(text) for text in rule.when)
    match rule:
        case Rewrite(left=left, right=right):
            return Reading(rule, (_term(parsed(left)), _term(parsed(right))), None, when)
        case Infer(fact=fact):
            return Reading(rule, None, _statement(fact), when)


def _statement(text: str) -> Statement:
    node = parsed(text)
    match node:
        case ast.Compare(left=ast.Name(id=a), ops=[ast.NotEq()], comparators=[ast.Name(id=b)]) if a[
            0
        ].isupper():
            return Statement("!=", (_axis(a), _axis(b)))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return Statement("==" if isinstance(op, ast.Eq) else "!=", (_term(left), _term(right)))
        case ast.Call(func=ast.Name(id=relation), args=args):
            sorts = RELATIONS[relation].sorts
            terms = sorts.count("E")
            words = [arg.id for arg in args[terms:] if isinstance(arg, ast.Name)]
            # one name for two words stands for an axis and a part of it
            named = _domain(words[0]) if len(sorts) > len(args) else tuple(map(_axis, words))
            return Statement(relation, (*map(_term, args[:terms]), *named))
    raise ValueError(text)


def _axis(name: str) -> str:
    return "?axis" if name in PARTS else f"?{name}_axis"


def _domain(name: str) -> tuple[str, str]:
    return ("?axis", name) if name in PARTS else (f"?{name}_axis", f"?{name}")


def _term(node: ast.expr) -> Term:
    match node:
        case ast.Name(id="inf"):
            return number("inf")
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return number("-inf")
        case ast.Name(id=name):
            return term("Var", (name,))
        case ast.Constant(value=value):
            return number(repr(value))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if value:
            return number(f"-{value!r}")
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return term("Neg", (), (_term(a),))
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _term(left), _term(right)
            match op:
                case ast.Add():
                    return term("Add", (), (first, second))
                case ast.Sub():
                    return term("Add", (), (first, term("Neg", (), (second,))))
                case ast.Mult():
                    return term("Mul", (), (first, second))
                case ast.Div():
                    return term("Mul", (), (first, term("Inv", (), (second,))))
        case ast.Call(
            func=ast.Subscript(value=ast.Name(id="fold"), slice=ast.Tuple(elts=bound)), args=[body]
        ):
            op_name, domain = (n.id for n in bound if isinstance(n, ast.Name))
            return term("Red", (f"?{op_name}", *_domain(domain)), (_term(body),))
        case ast.Call(func=ast.Subscript(value=op, slice=ast.Name(id=domain)), args=[body]):
            return term("Red", (ast.unparse(op), *_domain(domain)), (_term(body),))
        case ast.Call(func=ast.Name(id="cast"), args=[ast.Name(id=kind), a]):
            return term("Cast", (f"?{kind}",), (_term(a),))
        case ast.Call(func=ast.Name(id="apply1" | "apply2" as head), args=[fn, *args]):
            spelt = f"?{fn.id}" if isinstance(fn, ast.Name) else str(ast.literal_eval(fn))
            return term(head.capitalize(), (spelt,), tuple(map(_term, args)))
        case ast.Call(func=ast.Name(id=fn), args=args):
            return term(HEADS[fn], (), tuple(map(_term, args)))
    raise ValueError(ast.unparse(node))


# -- replay ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ground:
    """What may be taken as given: what can be read off names, numbers and the program.

    `values` gives what names stand for, `scalars` the run-time scalars, `states` the values over parts that a merge
    may use, `split` the axis that has parts (any, where that is None), `exponents` those that the program has, `integers` the
    tensors and scalars that hold integers, `axes` the names that axes have and may have.
    """

    values: Mapping[str, Term] = field(default_factory=dict)
    scalars: Collection[str] = ()
    states: Collection[Term] = ()
    split: str | None = None
    exponents: Collection[Term] = ()
    integers: Collection[str] = ()
    axes: AxisNames = field(default_factory=AxisNames)

    def holds(self, relation: str, args: tuple[Argument, ...]) -> bool:
        """Whether a fact is true by the structure of what it is about."""
        match relation, args:
            case (("fixed" | "varies"), (Term(head="Leaf" | "Num") as a, str(axis))):
                depends = axis in free_names(a, self.values)
                return depends if relation == "varies" else not depends
            case "plain", (Term(head="Leaf" | "Num"), str()):
                return True  # the rules do not look into a leaf
            case (("constant" | "positive" | "nonneg" | "nonpos"), (Term(head="Num", words=(text,)),)):
                value = float(text)
                return {
                    "constant": abs(value) < float("inf"),
                    "positive": 0 < value < float("inf"),
                    "nonneg": value >= 0,
                    "nonpos": value <= 0,
                }[relation]
            case (("positive" | "nonneg"), (Term(head="Leaf", words=(text,)),)):
                return text.startswith("N(") and text[2:-1].isidentifier()
            case "count", (Term(head="Leaf", words=(text,)), str(axis), "ALL"):
                counted = text.removeprefix("N(").removesuffix(")")
                return text == f"N({counted})" and self._have_one_extent(axis, counted)
            case "both", (
                Term(head="Leaf", words=(text,)),
                Term(head="Leaf", words=(one,)),
                Term(head="Leaf", words=(other,)),
            ):
                return conjuncts(text) == conjuncts(one) + conjuncts(other)
            case "either", (
                Term(head="Leaf", words=(text,)),
                Term(head="Leaf", words=(one,)),
                Term(head="Leaf", words=(other,)),
            ):
                return is_either(text, one, other, lambda name: self.axes.extent(name) is not None)
            case "selects", (
                Term(head="Leaf", words=(text,)),
                Term() as value,
                Term(head="Leaf", words=(inside,)),
                Term() as read,
                str(axis),
            ):
                return selects(text, value, inside, read, axis, self.integers, self.scalars)
            case "selects", (Term() as mask, Term() as value, Term() as inside, Term() as read, str(axis)):
                return selects_computed(mask, value, inside, read, axis)
            case "selects_one", (
                Term(head="Leaf", words=(text,)),
                Term() as value,
                Term() as read,
                str(axis),
            ):
                return self.axes.selects_one(text, value, read, axis)
            case "renamed", (Term() as fold, Term() as other):
                return self.axes.is_renamed(fold, other)
            case "totals", (Term() as value, Term() as result, str(axis)):
                return totals(value, result, axis, self.integers, self.scalars, self.axes.alike(axis))
            case "scalar", (Term(head="Leaf", words=(text,)),):
                return text in self.scalars
            case "state", (Term() as a,):
                return a in self.states
            case "unproved", (Term() as a,):
                return a in self.exponents
        return False

    def _have_one_extent(self, axis: str, other: str) -> bool:
        return axis == other or None is not self.axes.extent(axis) == self.axes.extent(other)


@dataclass
class Replay:
    """Replays chains under given facts. Raises Refused at the first thing that is not so."""

    rules: Mapping[str, Rule]
    ground: Ground
    _readings: dict[str, Reading] = field(default_factory=dict)
    _proved: set[Inference] = field(default_factory=set)

    def chain(self, start: Term, chain: Chain, goal: Term, where: str) -> None:
        """That the steps lead from one term to another."""
        reached = start
        for index, step in enumerate(chain, start=1):
            here = f"step {index} of {where}"
            if step.before is not reached:
                raise Refused(here, f"{step.inference.rule} does not start where the chain stands")
            self._step(step, here)
            reached = step.after
        if reached is not goal:
            last = f"step {len(chain)} of {where}" if chain else where
            raise Refused(last, "the chain does not end at what it is to show")

    def _step(self, step: Step, where: str) -> None:
        inference = step.inference
        self.inference(inference, where)
        sides = self._reading(inference.rule, where).sides
        if sides is None:
            raise Refused(where, f"{inference.rule} is not a rewrite")
        left, right = (instance(side, inference.values) for side in sides)
        old, new = (left, right) if step.forward else (right, left)
        try:
            found = subterm(step.before, step.position)
        except IndexError:
            raise Refused(where, f"there is no position {list(step.position)}") from None
        if found is not old:
            raise Refused(
                where, f"what stands at {list(step.position)} is not an instance of {inference.rule}"
            )
        if replaced_at(step.before, step.position, new) is not step.after:
            raise Refused(where, f"{inference.rule} does not give the term after it")

    def inference(self, inference: Inference, where: str) -> None:
        """That an inference is an instance of its rule, and that all its conditions hold."""
        waiting = [inference]
        while waiting:  # conditions first: derivations may be deeper than the stack
            current = waiting[-1]
            if current in self._proved:
                waiting.pop()
                continue
            below = [i for i in rests_on(current) if i not in self._proved]
            if below:
                waiting += below
                continue
            self._instance(current, where)
            self._proved.add(current)
            waiting.pop()

    def _instance(self, inference: Inference, where: str) -> None:
        reading = self._reading(inference.rule, where)
        if self.ground.split not in (None, inference.values.get("axis", self.ground.split)):
            raise Refused(where, f"{inference.rule} tells parts apart of an axis that has none")
        if inference.values.keys() != reading.variables:
            raise Refused(where, f"{inference.rule} has other variables than its instance gives values")
        if len(inference.premises) != len(reading.when):
            raise Refused(
                where,
                f"{inference.rule} has {len(reading.when)} conditions, {len(inference.premises)} are proved",
            )
        for statement, text, premise in zip(reading.when, reading.rule.when, inference.premises, strict=True):
            try:
                grounded = statement.at(inference.values)
            except KeyError:
                raise Refused(where, f"a value of {inference.rule} is of the wrong kind") from None
            self._premise(grounded, premise, where, f"condition {text} of {inference.rule}")
        try:
            for side in reading.sides or ():
                instance(side, inference.values)
            if reading.fact:
                reading.fact.at(inference.values)
        except KeyError:
            raise Refused(where, f"a value of {inference.rule} is of the wrong kind") from None

    def _premise(self, statement: Statement, premise: Premise, where: str, what: str) -> None:
        args = statement.args
        match statement.relation, premise:
            case "!=", Differ():
                if args[0] == args[1]:
                    raise Refused(where, f"{what}: both sides are the same")
            case "==", Equal(chain):
                left, right = args
                assert isinstance(left, Term) and isinstance(right, Term)
                self.chain(left, chain, right, f"{what}, {where}")
            case relation, Holds(fact, moves) if fact.relation == relation:
                self._moved(args, fact, moves, where, what)
                self._fact(fact, where, what)
            case _:
                raise Refused(where, f"{what} is not what was proved")

    def _moved(
        self, args: tuple[Argument, ...], fact: Fact, moves: tuple[Chain, ...], where: str, what: str
    ) -> None:
        """That a fact is about the arguments of a condition, or equal ones."""
        if len(args) != len(fact.args):
            raise Refused(where, f"{what}: another number of arguments")
        pairs = list(zip(args, fact.args, strict=True))
        if any(a != b for a, b in pairs if isinstance(a, str) or isinstance(b, str)):
            raise Refused(where, f"{what}: proved of other names")
        terms = [(a, b) for a, b in pairs if isinstance(a, Term) and isinstance(b, Term)]
        if len(terms) != len(moves):
            raise Refused(where, f"{what}: {len(moves)} arguments were moved, it has {len(terms)}")
        for (a, b), chain in zip(terms, moves, strict=True):
            self.chain(a, chain, b, f"{what}, {where}")

    def _fact(self, fact: Fact, where: str, what: str) -> None:
        if fact.inference is None:
            if not self.ground.holds(fact.relation, fact.args):
                raise Refused(where, f"{what} is neither given nor proved")
            return
        conclusion = self._reading(fact.inference.rule, where).fact
        if conclusion is None:
            raise Refused(where, f"{what}: {fact.inference.rule} states no fact")
        if conclusion.at(fact.inference.values) != Statement(fact.relation, fact.args):
            raise Refused(where, f"{what}: {fact.inference.rule} states another fact")

    def _reading(self, name: str, where: str) -> Reading:
        if name not in self.rules:
            raise Refused(where, f"there is no rule {name!r}")
        if name not in self._readings:
            self._readings[name] = read_rule(self.rules[name])
        return self._readings[name]
