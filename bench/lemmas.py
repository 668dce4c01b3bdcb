"""Shipped rules as lemmas for an SMT solver, in SMT-LIB: real numbers, axes of any size.

A rule without a reduction is a statement about reals at one position. One with reductions over an axis is proved by
induction over a split: it holds where the axis is one position; and where it holds of two disjoint parts, it holds of
their union, whose sum is the sum of both, whose maximum the greater one. That reductions may be split so is the lemma
`split_lemma`, by induction over an integer size. Sums are first written as sums of monomials, by
what does not vary along the axis (`Sums`), which is proved by the same induction: so sums inside sums are numbers.

Every divisor is taken to be other than 0, every argument of a root or a logarithm to be one (`both sides have values`);
the reals have no infinity and no rounding. Exponentials are known by e^(a+b) = e^a e^b and e^a > 0, logarithms as their inverse,
which grows. Casts are identities, as they are to the algebra.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from eqfuse.rules.relations import RELATIONS
from eqfuse.rules.rule import Rewrite, Rule
from eqfuse.terms.python import parsed

FIXED_BY = {"factors": (1,), "addends": (1,), "shifted": (2,), "parallel_axis": (3, 4), "fixed": (0,)}
"""Arguments of a relation that do not vary along its axis."""
SEARCHED = frozenset(row.name for row in RELATIONS.values() if not row.is_claim)
"""Facts that say where to look, and nothing about values."""
STRUCTURE = frozenset({"fixed", "constant", *SEARCHED})
"""Those, and what a value does not depend on: symbols of their own."""
SAME = frozenset({"fixed", "constant"})
"""Claims that a value is the same at two positions."""
DEFINING = frozenset({"quotient", "factors", "addends", "shifted", "parallel_axis", "spread"})
"""Facts that say what their first argument is."""
UNSAID = frozenset({"bounded", "pole_safe", "masked"})
"""Facts about infinities and masks, and about a bound, which only the claim of another bound needs."""
OPERATIONS = {"sum": "+", "prod": "*"}
PARTS = ("A", "B", "AB")
EXP_OF_REDUCTION = "exp of a reduction"
TRUTH = ("p!", "q!")
"""How the names of truth values begin: of those that vary along the axis, and of others."""

Term = str | tuple["Term", ...]
"""An s-expression."""


class NoLemma(Exception):
    """Why a rule is no statement that is generated here."""


def text(term: Term) -> str:
    """As SMT-LIB writes it."""
    return term if isinstance(term, str) else f"({' '.join(map(text, term))})"


@dataclass(frozen=True)
class Lemma:
    """One query for a solver, which has to be unsatisfiable; `step` says which part of the proof it is."""

    rule: str
    step: str
    symbols: tuple[str, ...]
    assumptions: tuple[Term, ...]
    claim: Term

    def __str__(self) -> str:
        lines = [f"; {self.rule}: {self.step}", "(set-logic ALL)"]
        for name in self.symbols:
            sort = "Bool" if name.startswith(TRUTH) else "Int" if name.startswith("n!") else "Real"
            lines.append(f"(declare-const {name} {sort})")
        lines += [f"(assert {text(each)})" for each in self.assumptions]
        return "\n".join([*lines, f"(assert (not {text(self.claim)}))", "(check-sat)", ""])


@dataclass(frozen=True)
class Reduction:
    """A reduction over a part of the axis; `body` is at one position."""

    op: str
    part: str
    body: Term


@dataclass
class Statement:
    """A rule about numbers. Symbols: `v!x` varies along the axis, `c!x` does not; `p!x` and `q!x` are truth values that do and do
    not; `R!k` stands for the k-th reduction."""

    rule: Rule
    fixed: set[str]
    masks: set[str]
    reductions: list[Reduction] = field(default_factory=list)
    defined: list[Term] = field(default_factory=list)
    assumptions: list[Term] = field(default_factory=list)
    claim: Term = "true"
    axes: set[str] = field(default_factory=set)
    values: dict[str, Term] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    defining: bool = True
    exponent: dict[Term, Term] = field(default_factory=dict)
    logged: dict[Term, Term] = field(default_factory=dict)
    bounds: dict[Term, Term] | None = None
    two_positions: bool = False
    any_numbers: bool = False

    @classmethod
    def of(cls, rule: Rule, *, any_numbers: bool = False) -> Statement:
        """With `any_numbers`, reductions are numbers about which nothing is known: what holds of all numbers holds of them.
        Raises NoLemma."""
        facts = [parsed(condition) for condition in rule.when]
        fixed = {name for fact in facts if _is_of_claim(fact, rule) for name in _fixed_in(fact)}
        texts = (rule.left, rule.right) if isinstance(rule, Rewrite) else (rule.fact,)
        masks = {name for node in (*map(parsed, texts), *facts) for name in _masks_in(node)}
        made = cls(rule, fixed, masks, any_numbers=any_numbers)
        if not isinstance(rule, Rewrite) and rule.fact.startswith("bounded("):
            made.bounds = {
                f"c!{name}": _magnitude(f"c!{name}") for fact in facts for name in _constant_in(fact)
            }
        waiting = sorted(facts, key=_defines)
        for fact in waiting:
            made.assumptions += made.fact(fact, claim=False)
        if isinstance(rule, Rewrite):
            made.claim = ("=", made.term(parsed(rule.left)), made.term(parsed(rule.right)))
        else:
            made.defining = False
            made.claim = _all(made.fact(parsed(rule.fact), claim=True))
        if len({"AB" if axis in PARTS else axis for axis in made.axes}) > 1:
            raise NoLemma("two axes")
        return made

    def fact(self, node: ast.expr, *, claim: bool) -> list[Term]:
        """What a condition or a conclusion says; nothing where it is about the way that a value is written."""
        match node:
            case ast.Compare(ops=[ast.NotEq()]):
                return []
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return (
                    self._equal(left, self.term(right))
                    if not claim
                    else [("=", self.term(left), self.term(right))]
                )
            case ast.Call(func=ast.Name(id=name), args=args):
                if name in SAME and claim:
                    return [self._same(*args)]
                if name in STRUCTURE:
                    if claim:
                        raise NoLemma("it says where the search looks, and nothing about values")
                    return []
                if name == "bounded" and self.bounds is not None:
                    return [self._within(args[0]) if claim else self._bounded(args[0])]
                if name in UNSAID and not claim:  # proved without it, or not at all
                    return []
                return self._said(name, args)
        raise NoLemma(f"{ast.unparse(node)} is no statement")

    def _same(self, expr: ast.expr, axis: ast.expr | None = None) -> Term:
        """That an expression is the same at two positions, of an axis or of any: what is known holds at both."""
        value = self.term(expr)
        name = axis.id if isinstance(axis, ast.Name) else ""
        other: dict[str, Term] = {}
        known = (value, *self.assumptions, *self.defined, *(each.body for each in self.reductions))
        for symbol in symbols(*known):
            if _varies(symbol):
                other[symbol] = f"{symbol.rstrip('|')}.other{'|' if symbol.startswith('|') else ''}"
        for number, each in enumerate(self.reductions):  # over the axis itself it is one number
            if each.part != name and replaced(each.body, other) != each.body:
                other[f"R!{number}"] = f"R!{number}.other"
        self.two_positions = True
        self.assumptions += [replaced(each, other) for each in self.assumptions]
        self.defined += [replaced(each, other) for each in self.defined]
        return ("=", value, replaced(value, other))

    def _bounded(self, expr: ast.expr) -> Term:
        """A bound of a value, which varies with nothing."""
        assert self.bounds is not None
        value = self.term(expr)
        self.bounds[value] = f"c!bound{len(self.bounds)}"
        return ("<=", _magnitude(value), self.bounds[value])

    def _within(self, expr: ast.expr) -> Term:
        """That some bound is one of a value: the greatest of those that its parts give, of 1, and of what constants give."""
        assert self.bounds is not None
        value = self.term(expr)
        for atom, exponent in self.exponent.items():
            self.defined.append(("=", ("<=", exponent, "0.0"), ("<=", atom, "1.0")))
        constants = [bound for symbol, bound in self.bounds.items() if bound == _magnitude(symbol)]
        made = self._bound_of(value)
        bounds = ["1.0", *(("/", "1.0", bound) for bound in constants), *([] if made is None else [made])]
        size = _magnitude(value)
        return ("or", *(("<=", size, bound) for bound in bounds))

    def _bound_of(self, value: Term) -> Term | None:
        """A bound of a value by those of its parts."""
        assert self.bounds is not None
        if value in self.bounds:
            return self.bounds[value]
        match value:
            case str() if value.startswith("R!"):
                reduction = self.reductions[int(value.removeprefix("R!"))]
                return self._bound_of(reduction.body) if reduction.op in ("max", "min") else None
            case ("-", part):
                return self._bound_of(part)
            case ("ite", _, part, _) if _magnitude(part) == value:
                return self._bound_of(part)
            case ("*", left, right):
                bounds = self._bound_of(left), self._bound_of(right)
                return (
                    ("*", bounds[0], bounds[1]) if bounds[0] is not None and bounds[1] is not None else None
                )
            case ("ite", _, left, right):
                bounds = self._bound_of(left), self._bound_of(right)
                return (
                    ("+", bounds[0], bounds[1]) if bounds[0] is not None and bounds[1] is not None else None
                )
        return None

    def _said(self, name: str, args: Sequence[ast.expr]) -> list[Term]:
        part = ""
        if args and isinstance(args[-1], ast.Name) and args[-1].id[0].isupper():
            self.axes.add(args[-1].id)
            *args, axis = args
            part = axis.id if isinstance(axis, ast.Name) else part
        if self.defining:
            found = self._defined_by(name, args, part)
            if found is not None:
                return found
        if name == "count":
            return [("=", self.term(args[0]), self._reduced("sum", part, "1.0"))]
        terms = [self.term(arg) for arg in args]
        match name, terms:
            case "positive", [e]:
                return [(">", e, "0.0")]
            case "nonneg", [e]:
                return [(">=", e, "0.0")]
            case "nonpos", [e]:
                return [("<=", e, "0.0")]
            case "le", [a, b]:
                return [("<=", a, b)]
            case "within", [a, m]:
                return [("<=", a, m), ("<=", ("-", m), a)]
            case "factors", [e, c, m]:
                return [("=", e, ("*", c, m))]
            case (("addends" | "spread"), [e, c, m]):
                return [("=", e, ("+", c, m))]
            case "shifted", [e, s, m]:
                return [("=", e, ("*", self._exp(m), s))]
            case "quotient", [q, a, n]:
                self.defined.append(("distinct", n, "0.0"))
                return [("=", ("*", q, n), a)]
            case "parallel_axis", [e, s, d, c, k]:
                return [("=", e, ("+", s, ("*", ("-", c, k), d)))]
            case "moment", [s, w, x, n]:
                total, weights = self._reduced("sum", part, ("*", w, x)), self._reduced("sum", part, w)
                return [("=", s, total), ("=", n, weights)]
            case "both", [q, r, s]:
                return [("=", q, ("and", r, s))]
            case "either", [q, r, s]:
                return [("=", q, ("or", r, s)), ("not", ("and", r, s))]
            case "vanishes_with", [n, m]:
                return [("=>", ("=", n, "0.0"), ("=", m, "0.0"))]
        raise NoLemma(f"'{name}' speaks of infinities, masks or a bound that is not named")

    def _defined_by(self, name: str, args: Sequence[ast.expr], part: str) -> list[Term] | None:
        """The first argument of a relation as the relation says what it is; None for those that say no such thing."""
        first, *rest = args
        match name:
            case "count":
                return self._equal(first, self._reduced("sum", part, "1.0"))
            case "moment":
                w, x = self.term(rest[0]), self.term(rest[1])
                weights = self._equal(rest[2], self._reduced("sum", part, w))
                return [*self._equal(first, self._reduced("sum", part, ("*", w, x))), *weights]
            case "factors" | "addends" | "spread" | "shifted" | "quotient" | "parallel_axis":
                terms = [self.term(arg) for arg in rest]
                match name, terms:
                    case "factors", [c, m]:
                        return self._equal(first, ("*", c, m))
                    case (("addends" | "spread"), [c, m]):
                        return self._equal(first, ("+", c, m))
                    case "shifted", [shifted, m]:
                        return self._equal(first, ("*", self._exp(m), shifted))
                    case "quotient", [a, n]:
                        return self._equal(first, self._quotient(a, n))
                    case "parallel_axis", [s, d, c, k]:
                        return self._equal(first, ("+", s, ("*", ("-", c, k), d)))
        return None

    def _equal(self, node: ast.expr, value: Term) -> list[Term]:
        """A variable that has this value from here on; an equation where it is something already."""
        if isinstance(node, ast.Name) and node.id not in self.values and node.id not in self.read:
            self.values[node.id] = value
            return []
        return [("=", self.term(node), value)]

    def term(self, node: ast.expr) -> Term:
        match node:
            case ast.Name(id="inf"):
                raise NoLemma("an infinity is no real number")
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Name(id=name) if name in self.masks:
                return f"{'q' if name in self.fixed else 'p'}!{name}"
            case ast.Name(id=name):
                self.read.add(name)
                return f"{'c' if name in self.fixed else 'v'}!{name}"
            case ast.Constant(value=int() | float() as number):
                return repr(float(number))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return ("-", self.term(operand))
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.term(left), self.term(right)
                match op:
                    case ast.Add():
                        return ("+", a, b)
                    case ast.Sub():
                        return ("-", a, b)
                    case ast.Mult():
                        return ("*", a, b)
                    case ast.Div():
                        return self._quotient(a, b)
            case ast.Call(func=ast.Name(id="apply1"), args=[ast.Constant(value="not"), a]):
                return ("not", self.term(a))
            case ast.Call(func=ast.Name(id="cast"), args=[_, a]):
                return self.term(a)
            case ast.Call(func=ast.Name(id="apply1" | "apply2"), args=[ast.Name(id=fn), *args]):
                return self._atom(fn, tuple(map(self.term, args)))
            case ast.Call(func=ast.Name(id=fn), args=args) if fn not in ("apply1", "apply2"):
                return self._called(fn, [self.term(arg) for arg in args])
            case ast.Call(func=ast.Subscript(value=ast.Name(id=op), slice=ast.Name(id=part)), args=[body]):
                self.axes.add(part)
                return self._reduced(op, part, self.term(body))
        raise NoLemma("an opaque function")

    def _called(self, fn: str, args: Sequence[Term]) -> Term:
        match fn, args:
            case "inv", [a]:
                return self._quotient("1.0", a)
            case "ratio", [a, b]:
                return self._quotient(a, b)
            case "delta", [a, b]:
                return ("-", a, b)
            case "sq", [a]:
                return ("*", a, a)
            case "abs", [a]:
                return _magnitude(a)
            case "maximum", [a, b]:
                return ("ite", (">=", a, b), a, b)
            case "minimum", [a, b]:
                return ("ite", ("<=", a, b), a, b)
            case "relu", [a]:
                return ("ite", (">=", a, "0.0"), a, "0.0")
            case "where", [p, a, b]:
                return ("ite", p, a, b)
            case "finite", [a]:  # the reals have no infinity
                return a
            case "exp", [a]:
                return self._exp(a)
            case "log", [a]:
                return self._log(a)
            case "sqrt", [a]:
                return self._root(a)
        return self._atom(fn, tuple(args))

    def _quotient(self, a: Term, b: Term) -> Term:
        self.defined.append(("distinct", b, "0.0"))
        return ("/", a, b)

    def _atom(self, fn: str, a: Term) -> Term:
        """A symbol for a function of a term: the same for equal terms; it varies where the term does."""
        if "R!" in text(a):
            raise NoLemma(f"{fn} of a reduction")
        written = text(a).translate(str.maketrans(" ()!", "_[]."))
        return f"|{'v' if 'v!' in text(a) else 'c'}!{fn}.{written}|"

    def _exp(self, a: Term) -> Term:
        match a:
            case ("+", x, y):
                return ("*", self._exp(x), self._exp(y))
            case ("-", x, y):
                return ("/", self._exp(x), self._exp(y))
            case ("-", x):
                return ("/", "1.0", self._exp(x))
            case "0.0":
                return "1.0"
        if isinstance(a, str) and a.startswith("|") and "!log." in a:
            return self.logged[a]
        atom = self._atom("exp", a)
        self.defined.append((">", atom, "0.0"))
        for other, of in self.logged.items():
            self.defined.append(("=", ("<=", atom, of), ("<=", a, other)))
        self.exponent[atom] = a
        return atom

    def _log(self, a: Term) -> Term:
        self.defined.append((">", a, "0.0"))
        match a:
            case ("*", x, y):
                return ("+", self._log(x), self._log(y))
            case ("/", x, y):
                return ("-", self._log(x), self._log(y))
            case "1.0":
                return "0.0"
        if a in self.exponent:
            return self.exponent[a]
        atom = self._atom("log", a)
        assert isinstance(atom, str)
        for other, of in self.logged.items():  # logarithms grow
            if other != atom:
                self.defined.append(("=", ("<=", of, a), ("<=", other, atom)))
        for power, of in self.exponent.items():
            self.defined.append(("=", ("<=", power, a), ("<=", of, atom)))
        self.logged[atom] = a
        return atom

    def _root(self, a: Term) -> Term:
        if "R!" in text(a):
            raise NoLemma("a root of a reduction")
        atom = self._atom("sqrt", a)
        self.defined += [(">=", atom, "0.0"), ("=", ("*", atom, atom), a)]
        return atom

    def _reduced(self, op: str, part: str, body: Term) -> Term:
        found = Reduction(op, part, body)
        if found not in self.reductions:
            self.reductions.append(found)
        return f"{'c!any' if self.any_numbers else 'R!'}{self.reductions.index(found)}"


def _defines(fact: ast.expr) -> int:
    """Conditions in the order in which they say what variables are: parts of a value before the value."""
    match fact:
        case ast.Compare(ops=[ast.Eq()], comparators=[right]):
            plain = not any(isinstance(part, ast.Subscript) for part in ast.walk(right))
            return 0 if plain else 3
        case ast.Call(func=ast.Name(id="count" | "moment")):
            return 1
        case ast.Call(func=ast.Name(id=name)) if name in DEFINING:
            return 2
    return 4


def _fixed_in(fact: ast.expr) -> Iterator[str]:
    match fact:
        case ast.Call(func=ast.Name(id=relation), args=args):
            places = range(len(args)) if relation in ("constant", "scalar") else FIXED_BY.get(relation, ())
            yield from (arg.id for place in places if isinstance(arg := args[place], ast.Name))


def _masks_in(node: ast.expr) -> Iterator[str]:
    """Variables that are truth values: what `where` chooses by, and what `not` negates."""
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Name(id="where"), args=[ast.Name(id=name), *_]):
                yield name
            case ast.Call(func=ast.Name(id="apply1"), args=[ast.Constant(value="not"), ast.Name(id=name)]):
                yield name


def _is_of_claim(fact: ast.expr, rule: Rule) -> bool:
    """Whether what a fact does not vary with is what a claim that a value is the same at two positions speaks of."""
    claim = None if isinstance(rule, Rewrite) else parsed(rule.fact)
    match claim, fact:
        case ast.Call(func=ast.Name(id="constant")), ast.Call(func=ast.Name(id=name)):
            return name == "constant"
        case ast.Call(func=ast.Name(id="fixed"), args=[_, ast.Name(id=axis)]), ast.Call(
            func=ast.Name(id=name), args=args
        ):
            return name in ("constant", "scalar") or (isinstance(args[-1], ast.Name) and args[-1].id == axis)
    return True


def _constant_in(fact: ast.expr) -> Iterator[str]:
    match fact:
        case ast.Call(func=ast.Name(id="constant"), args=[ast.Name(id=name)]):
            yield name


def _magnitude(value: Term) -> Term:
    return ("ite", (">=", value, "0.0"), value, ("-", value))


def _all(terms: Sequence[Term]) -> Term:
    return ("and", *terms) if len(terms) > 1 else terms[0] if terms else "true"


def symbols(*terms: Term) -> tuple[str, ...]:
    """The symbols of terms, in order."""
    found: dict[str, None] = {}

    def visit(term: Term) -> None:
        if isinstance(term, str):
            if "!" in term:
                found.setdefault(term)
        else:
            for part in term:
                visit(part)

    for term in terms:
        visit(term)
    return tuple(found)


def replaced(term: Term, values: dict[str, Term]) -> Term:
    """A term with some of its symbols replaced."""
    if isinstance(term, str):
        return values.get(term, term)
    return tuple(replaced(part, values) for part in term)


# -- proofs ----------------------------------------------------------------------------------------


def lemmas(rule: Rule) -> list[Lemma]:
    """What a solver has to refute for a rule to hold at all sizes, of axes that have a position. Raises NoLemma."""
    if "fold[R, " in str(rule):
        return [each for op in ("sum", "prod", "max", "min") for each in lemmas(_about(rule, op))]
    try:
        said = Statement.of(rule)
    except NoLemma as why:
        if str(why) != EXP_OF_REDUCTION:
            raise
        said = replace(Statement.of(rule, any_numbers=True), reductions=[])
    if said.two_positions:
        return [_lemma(rule, "at two positions", [*said.assumptions, *said.defined], said.claim)]
    if not said.reductions:
        return [_lemma(rule, "at one position", [*said.assumptions, *said.defined], said.claim)]
    if any(each.part in PARTS for each in said.reductions):
        return _of_parts(said)
    sums = all(each.op == "sum" for each in said.reductions) and said.claim[0] in ("=", "and")
    outside = symbols(said.claim, *(each for each in said.assumptions if _mentions_reduction(each)))
    if sums and not any(_varies(name) or name.startswith(TRUTH) for name in outside):
        return _by_sums(said)
    if any("R!" in text(each.body) for each in said.reductions):
        raise NoLemma("a reduction inside another that is no sum")
    return _by_split(said)


def _about(rule: Rule, op: str) -> Rule:
    """A rule about any reduction, as one about this."""

    def of(text: str) -> str:
        return text.replace("fold[R, ", f"{op}[")

    when = tuple(map(of, rule.when))
    if isinstance(rule, Rewrite):
        return replace(rule, left=of(rule.left), right=of(rule.right), when=when)
    return replace(rule, fact=of(rule.fact), when=when)


def _lemma(rule: Rule, step: str, assumptions: Sequence[Term], claim: Term) -> Lemma:
    return Lemma(rule.name, step, symbols(*assumptions, claim), tuple(assumptions), claim)


def _joined(op: str, a: Term, b: Term) -> Term:
    if op in OPERATIONS:
        return (OPERATIONS[op], a, b)
    return ("ite", (">=" if op == "max" else "<=", a, b), a, b)


def _of_parts(said: Statement) -> list[Lemma]:
    """Of a rule about both parts of an axis: reductions over `AB` are those over `A` and `B` joined. Values at a position
    are of `A`, or of `B` where nothing is reduced over `A`."""
    bodies = dict.fromkeys((each.op, each.body) for each in said.reductions)
    values: dict[str, Term] = {}
    invariants: list[Term] = []
    for number, (op, body) in enumerate(bodies):
        parts: dict[str, Term] = {"A": f"c!A{number}", "B": f"c!B{number}"}
        parts["AB"] = _joined(op, parts["A"], parts["B"])
        for k, each in enumerate(said.reductions):
            if (each.op, each.body) == (op, body):
                if each.part not in parts:
                    raise NoLemma("two axes")
                values[f"R!{k}"] = parts[each.part]
    assumptions = [replaced(each, values) for each in (*said.assumptions, *said.defined)]
    claim = replaced(said.claim, values)
    if any(symbol.startswith(("v!", "|v!")) for symbol in symbols(claim, *assumptions)):
        raise NoLemma("an element of a part")
    return [_lemma(said.rule, "from both parts to the whole", [*assumptions, *invariants], claim)]


def _by_split(said: Statement) -> list[Lemma]:
    """At one position; and from two parts, with the position in the first or in none, to their union."""
    everything = (said.claim, *said.assumptions, *said.defined)
    one = {f"R!{k}": each.body for k, each in enumerate(said.reductions)}
    found = [
        _lemma(
            said.rule,
            "an axis of one position",
            [replaced(t, one) for t in everything[1:]],
            replaced(said.claim, one),
        )
    ]

    names = range(len(said.reductions))
    parts = [{f"R!{k}": f"c!{part}{k}" for k in names} for part in ("first", "second")]
    whole: dict[str, Term] = {
        f"R!{k}": _joined(each.op, f"c!first{k}", f"c!second{k}") for k, each in enumerate(said.reductions)
    }
    # What holds at each position holds of the one that the claim is about; another part has another.
    outside = {name for name in symbols(*_reduced_terms(said)) if _varies(name)}
    other: dict[str, Term] = {name: f"{name.strip('|')}.2".join("||") for name in outside}
    pointwise = [each for each in (*said.assumptions, *said.defined) if not _mentions_reduction(each)]
    along = [each for each in (*said.assumptions, *said.defined) if _mentions_reduction(each)]

    def holds(values: dict[str, Term], elsewhere: dict[str, Term]) -> Term:
        def at(term: Term) -> Term:
            return replaced(replaced(term, values), elsewhere)

        premises = [at(each) for each in along]
        return ("=>", _all(premises), at(said.claim)) if premises else at(said.claim)

    assumptions: list[Term] = [*pointwise, *(replaced(each, other) for each in pointwise)]
    assumptions += [holds(dict(parts[0]), {}), holds(dict(parts[1]), other)]
    assumptions += _signs(said, pointwise, found)
    assumptions += [replaced(each, whole) for each in along]
    found.append(_lemma(said.rule, "from two parts to their union", assumptions, replaced(said.claim, whole)))
    return found


def _by_sums(said: Statement) -> list[Lemma]:
    """Each sum as one of monomials with coefficients that do not vary along the axis, other sums among them: by induction,
    in two lemmas. The claim is then one about numbers."""
    found: list[Lemma] = []
    monomials: dict[Term, str] = {}
    values: dict[str, Term] = {}
    for k, each in enumerate(said.reductions):
        parts = _monomials(each.body)
        names = [monomials.setdefault(varying, f"c!S{len(monomials)}") for _, varying in parts]
        at_one = _total([("*", fixed, varying) for fixed, varying in parts])
        found.append(
            _lemma(said.rule, f"the body of sum {k} in monomials", said.defined, ("=", each.body, at_one))
        )
        whole = _total([("*", fixed, ("+", f"c!a{n}", f"c!b{n}")) for n, (fixed, _) in enumerate(parts)])
        sides = (
            _total([("*", fixed, f"c!{side}{n}") for n, (fixed, _) in enumerate(parts)]) for side in "ab"
        )
        found.append(
            _lemma(said.rule, f"sum {k} over two parts, in monomials", (), ("=", ("+", *sides), whole))
        )
        value = _total([("*", fixed, name) for (fixed, _), name in zip(parts, names, strict=True)])
        values[f"R!{k}"] = replaced(value, values)
    assumptions = [
        replaced(t, values) for t in (*said.assumptions, *said.defined) if not any(map(_varies, symbols(t)))
    ]
    found.append(
        _lemma(said.rule, "the claim about sums of monomials", assumptions, replaced(said.claim, values))
    )
    return found


def _total(terms: Sequence[Term]) -> Term:
    return ("+", *terms) if len(terms) > 1 else terms[0] if terms else "0.0"


def _monomials(body: Term) -> list[tuple[Term, Term]]:
    """Pairs of what does not vary along the axis and what does, whose products add up to a body."""
    names: dict[str, Term] = {}

    def read(term: Term) -> sympy.Expr:
        match term:
            case ("+", *parts):
                return sympy.Add(*map(read, parts))
            case ("*", *parts):
                return sympy.Mul(*map(read, parts))
            case ("-", a):
                return -read(a)
            case ("-", a, b):
                return read(a) - read(b)
            case ("/", a, b):
                return read(a) / read(b)
            case str() if "!" not in term:
                return sympy.Rational(term)
        name = f"{'v' if any(map(_varies, symbols(term))) else 'c'} {text(term)}"
        names[name] = term
        return sympy.Symbol(name)

    def written(expr: sympy.Expr) -> Term:
        match expr:
            case sympy.Symbol():
                return names[expr.name]
            case sympy.Add():
                return ("+", *map(written, expr.args))
            case sympy.Mul():
                return ("*", *map(written, expr.args))
            case sympy.Pow(base=base, exp=sympy.Integer() as power):
                product: Term = _product([written(base)] * abs(int(power)))
                return product if power > 0 else ("/", "1.0", product)
            case sympy.Rational():
                number: Term = f"{abs(expr.p)}.0" if expr.q == 1 else ("/", f"{abs(expr.p)}.0", f"{expr.q}.0")
                return ("-", number) if expr < 0 else number
        raise NoLemma("a body that is no polynomial")

    found: dict[sympy.Expr, list[sympy.Expr]] = {}
    whole = sympy.expand(read(body))
    varying = [symbol for symbol in whole.free_symbols if symbol.name.startswith("v")]
    for part in sympy.Add.make_args(whole):
        fixed, moving = part.as_independent(*varying, as_Add=False) if varying else (part, sympy.Integer(1))
        found.setdefault(moving, []).append(fixed)
    return [(written(sympy.Add(*fixed)), written(moving)) for moving, fixed in found.items()]


def _product(terms: Sequence[Term]) -> Term:
    return ("*", *terms) if len(terms) > 1 else terms[0]


def _reduced_terms(said: Statement) -> list[Term]:
    return [said.claim, *said.assumptions, *said.defined, *(each.body for each in said.reductions)]


def _varies(name: str) -> bool:
    return name.startswith(("v!", "|v!", "p!"))


def _mentions_reduction(term: Term) -> bool:
    return any(name.startswith("R!") for name in symbols(term))


def _signs(said: Statement, pointwise: Sequence[Term], found: list[Lemma]) -> list[Term]:
    """That reductions of what is nowhere below 0 are not, where a body can only be so: a square, an absolute value, or what a
    condition says. Each is a lemma of its own, at one position; the step is that of a sum of such."""
    signs: list[Term] = []
    for k, each in enumerate(said.reductions):
        claimed = (">=", each.body, "0.0") in pointwise
        square = isinstance(each.body, tuple) and (
            (each.body[0] == "*" and each.body[1] == each.body[2])
            or (each.body[0] == "ite" and each.body == _magnitude(each.body[2]))
        )
        if claimed or square or each.body == "1.0":
            found.append(
                _lemma(
                    said.rule, f"no element of reduction {k} is below 0", pointwise, (">=", each.body, "0.0")
                )
            )
            signs += [(">=", f"c!{part}{k}", "0.0") for part in ("first", "second")]
    for k, one in enumerate(said.reductions):
        for j, other in enumerate(said.reductions):
            if (one.op, other.op) == ("min", "max") and one.body == other.body:
                signs += [("<=", f"c!{part}{k}", f"c!{part}{j}") for part in ("first", "second")]
    return signs


def split_lemma() -> list[Lemma]:
    """A sum from a to c is that from a to b and that from b to c: by induction over c, from b on."""
    a, b, c = "n!a", "n!b", "n!c"

    def total(low: Term, high: Term) -> Term:
        return ("total", low, high)

    axioms: tuple[Term, ...] = (
        ("forall", (("low", "Int"),), ("=", total("low", "low"), "0.0")),
        (
            "forall",
            (("low", "Int"), ("high", "Int")),
            (
                "=>",
                ("<=", "low", "high"),
                ("=", total("low", ("+", "high", "1")), ("+", total("low", "high"), ("e", "high"))),
            ),
        ),
        ("<=", a, b),
    )

    def claim(end: Term) -> Term:
        return ("=", total(a, end), ("+", total(a, b), total(b, end)))

    names = (a, b, c)
    return [
        Lemma("split", "an empty second part", names, axioms, claim(b)),
        Lemma("split", "one position more", names, (*axioms, ("<=", b, c), claim(c)), claim(("+", c, "1"))),
    ]


FUNCTIONS = "(declare-fun e (Int) Real)\n(declare-fun total (Int Int) Real)"


def proved(lemma: Lemma, seconds: float = 5.0) -> bool | None:
    """Whether a solver refutes the negation: True; False where it has a counterexample, or where nothing meets what is
    assumed; None where it does not know."""
    import z3  # type: ignore[import-untyped]

    def verdict(written: str, seconds: float) -> Any:
        solver: Any = z3.Solver()
        solver.set("timeout", int(1000 * seconds))
        if lemma.rule == "split":
            written = written.replace("(set-logic ALL)", f"(set-logic ALL)\n{FUNCTIONS}")
        solver.from_string(written)
        return solver.check()

    if lemma.assumptions and verdict(str(replace(lemma, claim="false")), 0.5) == z3.unsat:
        return False
    found = verdict(str(lemma), seconds)
    return True if found == z3.unsat else False if found == z3.sat else None
