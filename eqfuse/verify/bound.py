"""The probability of accepting a wrong program, counted from the programs compared.

docs/verification.md states and proves what is computed here. Every output element is a quotient N / D of
polynomials in the inputs, exponentials of atoms, roots and values of uninterpreted functions. Two elements agree
where N1 D2 - N2 D1 is 0. `degrees` counts its degree d for both sides as they are run; the sides are
different functions exactly if it is not the zero polynomial.

Inputs are uniform on q residues modulo p and on q - 1 modulo q. An exponent takes a value at no more than m of them,
where m is its degree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from eqfuse.terms.functions import CASTS, CIRCULAR, FUNCTIONS, ON_BITS, ROUNDINGS
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Program,
    Reduce,
    Scalar,
    children,
    free_axes,
    substitute_axes,
    walk,
)
from eqfuse.verify.degrees import LOGISTIC, UNINTERPRETED, Counted, Form
from eqfuse.verify.field.primes import Q

OPAQUE = ("sign", *(row.name for row in FUNCTIONS.values() if row.field in ("hash", "log", "root")))
"""Functions whose values are sources of randomness of their own where they stand in an exponent."""
TRANSPARENT = ("finite", "invertible", "abs", "neg", "relu", *CASTS)

SCHWARTZ_ZIPPEL = (
    "Schwartz-Zippel: a non-zero polynomial of degree d is 0 at a random point with probability at most d / (q - 1); "
    "exponentials of independent exponents of degree m are variables, which costs a factor of 2 m, "
    "r square roots one of 2^r"
)
MIRAGE = (
    "Mirage, Theorem 3: a sum of k exponentials with different exponents is 0 for at most 1 - 1/k of the bases, and "
    "all trials of a round share their base"
)
NONE = "no theorem: {why}"


@dataclass(frozen=True)
class Bound:
    """`per_trial` bounds the probability that one trial compares a wrong element and accepts it.

    degree, exponent, roots: d, m and r of the difference (see `SCHWARTZ_ZIPPEL`); terms: its exponentials k;
    calls: values of uninterpreted functions in it. `repeats`: whether trials are independent.
    """

    degree: float
    terms: float
    per_trial: float
    theorem: str
    exponent: float = 0.0
    roots: float = 0.0
    calls: int = 0
    repeats: bool = True

    def after(self, compared: int, drawn: int | None = None, looks: int = 1) -> float:
        """The bound after so many comparisons, in trials of which so many were drawn (as many, by default).

        What could not be compared was drawn again, so that every choice of the compared ones counts; so does
        every round after which there was a look at whether to go on.
        """
        drawn = compared if drawn is None else drawn
        if compared < 1 or self.per_trial >= 1.0:
            return 1.0
        if not self.repeats:
            return self.per_trial if compared == drawn else 1.0
        if self.per_trial == 0.0:
            return 0.0
        choices = looks * math.comb(drawn, compared)
        return math.exp(min(0.0, math.log(choices) + compared * math.log(self.per_trial)))

    def reaches(self, requested: float, compared: int, drawn: int, looks: int = 1) -> bool:
        """Whether the bound is met, or no number of trials meets it."""
        return not self.repeats or self.per_trial >= 0.5 or self.after(compared, drawn, looks) <= requested


@dataclass(frozen=True)
class Side:
    """A program and the extents of its axes. Two programs that are compared call an axis by one name."""

    program: Program
    extents: Mapping[str, int]


@dataclass(frozen=True)
class Difference:
    """The run of the reference, and what the programs tell: square roots that an element of the reference has at
    most, and one of the second program where there is one; values of uninterpreted functions in a difference, and the outputs
    of which all exponents are independent."""

    reference: Counted
    reference_roots: int
    calls: int
    independent: frozenset[str]
    q: int
    candidate_roots: float = math.inf

    @classmethod
    def of(
        cls, programs: Sequence[Side], reference: Counted, q: int = Q, *, strict_casts: bool = False
    ) -> Difference:
        """`programs` are those that the reference and the candidates were made from: a candidate that comes from the
        first one's program is taken to exponentiate sums and differences of what that program does, and to call
        uninterpreted functions no more often."""
        calls = [_values(side, lambda node: _hashes(node, strict_casts)) for side in programs]
        roots = [_values(side, lambda node: int(node.fn in ("sqrt", "rsqrt"))) for side in programs[:2]]
        return cls(
            reference,
            roots[0],
            2 * calls[0] if len(calls) == 1 else sum(calls),
            frozenset(name for name in reference.forms if _is_independent(programs, name)),
            q,
            roots[1] if len(roots) > 1 else math.inf,
        )

    def worst(self, candidate: Counted) -> Bound:
        """The bound for a candidate's worst output element against the reference."""
        bounds = [
            self._bound(candidate, name, form, candidate.forms[name])
            for name, form in self.reference.forms.items()
            if name in candidate.forms
        ]
        nothing = Bound(0, 0, 1.0, NONE.format(why="no output"))
        return max(bounds, key=lambda bound: bound.per_trial, default=nothing)

    def _bound(self, candidate: Counted, name: str, left: Form, right: Form) -> Bound:
        exponent = max(self.reference.exponent, candidate.exponent)
        written = min(left.roots, self.reference_roots)
        roots = written + (written if right is left else min(right.roots, self.candidate_roots))
        terms = left.terms_above * right.terms_below + right.terms_above * left.terms_below
        degree = left.weight + right.weight
        if left.p and right.p:
            degree = max(left.above + right.below, right.above + left.below)

        def found(per_trial: float, theorem: str, repeats: bool) -> Bound:
            return Bound(degree, terms, per_trial, theorem, exponent, roots, self.calls, repeats)

        def none(why: str) -> Bound:
            return found(1.0, NONE.format(why=why), repeats=False)

        if not (left.p and right.p) and not (left.q and right.q):
            return none("no residue is known of an output, which is compared in float64 alone")
        if degree == 0:
            return none("the orders of values decide an output, not its residues")
        logarithm = left.logarithm or right.logarithm
        # Logarithms agree where what they are of agrees up to its sign.
        degree *= 2 if logarithm else 1
        if self.reference.discrete or candidate.discrete:
            return none("a logarithm is multiplied by something")
        factor = 2 * exponent if exponent else 1.0
        argument, argument_roots = self._argument(candidate)
        pairs = math.comb(self.calls, 2)
        vanishing = math.pow(2, min(roots, 1000)) * degree * factor / (self.q - 1)
        collisions = math.pow(2, min(argument_roots, 1000)) * pairs * argument * factor / (self.q - 1)
        if name in self.independent:
            per_trial = vanishing + collisions
            if per_trial < 1:
                return found(per_trial, SCHWARTZ_ZIPPEL, repeats=True)
            if (degree + pairs * argument) * factor < self.q - 1:
                return none(
                    f"a factor of 2 for each of {max(roots, argument_roots):.0f} square roots is too much"
                )
            return none("the program is too large at these sizes for the primes")
        if logarithm:
            return none("exponents depend on each other, and a logarithm is taken")
        coincidence = terms * terms * exponent * degree / (self.q - 1)
        per_trial = 1 - 1 / terms + 1 / (self.q - 1) + vanishing + coincidence + collisions
        if per_trial < 1:
            return found(per_trial, MIRAGE, repeats=False)
        return none("exponents depend on each other, and there are too many for Mirage's Theorem 3")

    def _argument(self, candidate: Counted) -> tuple[float, float]:
        """Degree of the difference of two arguments of uninterpreted functions, and the roots in it."""
        one, other = self.reference, candidate
        written = min(one.argument_roots, self.reference_roots)
        roots = written if other is one else max(written, other.argument_roots)
        return 2 * max(one.argument, other.argument), 2 * roots


def _values(side: Side, weight: Callable[[Call], int]) -> int:
    """Values of the calls that `weight` counts, at all positions that one element of the worst output reads."""
    return max((_values_in(output.expr, side, weight) for output in side.program.outputs), default=0)


def _values_in(expr: Expr, side: Side, weight: Callable[[Call], int]) -> int:
    places: dict[Call, frozenset[str]] = {}
    for node, bound in _occurrences(expr):
        if isinstance(node, Call) and weight(node):
            places[node] = places.get(node, frozenset()) | (bound & free_axes(node))
    return sum(
        weight(node) * math.prod(side.extents.get(axis, 1) for axis in axes) for node, axes in places.items()
    )


def _hashes(node: Call, strict_casts: bool) -> int:
    """How many values of uninterpreted functions `FieldDomain` makes one value of this call from, at most."""
    inside = {part.fn for part in walk(*node.args) if isinstance(part, Call)}
    match node.fn:
        case fn if fn == "exp" or fn in CIRCULAR:
            return 2 if inside & {"exp", "sqrt", "rsqrt", *LOGISTIC, *CIRCULAR} else 0
        case "log" | "sqrt" | "rsqrt":
            return int("log" in inside)
        case "gelu":
            return 1
        case fn if fn in ON_BITS:  # of integers they are exact
            return int(bool(inside & set(ROUNDINGS)))
        case fn:
            return int(fn in UNINTERPRETED or fn in LOGISTIC or (strict_casts and fn in CASTS))


@lru_cache(maxsize=256)
def _occurrences(expr: Expr) -> tuple[tuple[Expr, frozenset[str]], ...]:
    """Every distinct node with every set of reduced axes that it stands under."""
    return tuple(_standing(expr))


def _standing(expr: Expr) -> Iterator[tuple[Expr, frozenset[str]]]:
    seen: set[tuple[Expr, frozenset[str]]] = set()
    waiting = [(expr, frozenset[str]())]
    while waiting:
        node, around = waiting.pop()
        if (node, around) in seen:
            continue
        seen.add((node, around))
        yield node, around
        within = around | {node.axis} if isinstance(node, Reduce) else around
        waiting += [(child, within) for child in children(node)]


@dataclass(frozen=True)
class _Atom:
    """What one exponential varies by: a term, and the axes along which it occurs many times."""

    term: Expr
    bound: frozenset[str]


def _is_independent(programs: Sequence[Side], output: str) -> bool:
    """Whether all exponents of an output are independent, in all programs together: as they are written, or term by term."""
    return any(
        _independent([atom for side in programs for atom in _side_atoms(side, output, apart)])
        for apart in (False, True)
    )


def _side_atoms(side: Side, name: str, apart: bool) -> list[_Atom]:
    """The atoms of an output of a program, or of all where none has that name: the terms that its exponents add up,
    extremes replaced by what they are of. Where they are not `apart`, what is added in one exponent is one atom."""
    found: list[_Atom] = []
    every = side.program.outputs
    for output in [output for output in every if output.name == name] or every:
        for node, bound in _occurrences(output.expr):
            if isinstance(node, Call) and (node.fn == "exp" or node.fn in LOGISTIC):
                found += _split(node.args[0], bound, side, apart)
            elif isinstance(node, Call) and node.fn in CIRCULAR:
                # Atoms of their own: i times a term is no sum of other terms.
                atoms = _split(node.args[0], bound, side, apart)
                found += [_Atom(Call("cos", (atom.term,)), atom.bound) for atom in atoms]
    return found


def _split(arg: Expr, bound: frozenset[str], side: Side, apart: bool) -> Iterator[_Atom]:
    own: list[Expr] = []
    for term in _terms(arg):
        inner = _uncovered(term)
        match inner:
            case Reduce("max" | "min", axis, body):
                yield from _split(body, bound | {axis}, side, apart)
            case Call("where" | "maximum" | "minimum", parts):
                for part in parts[1:] if inner.fn == "where" else parts:
                    yield from _split(part, bound, side, apart)
            case _ if any(isinstance(node, Load | Scalar) for node in walk(inner)):
                own.append(inner)
    if apart:
        for term in own:
            yield _named_by_extent(term, bound, side)
    elif own:
        total = own[0]
        for term in own[1:]:
            total = Call("add", (total, term))
        yield _named_by_extent(total, bound, side)


def _named_by_extent(term: Expr, bound: frozenset[str], side: Side) -> _Atom:
    """Copies of an axis called as the axis, then axes by their extents, which differ where axes do: the same
    atom of two programs is one term."""
    domains = side.program.domains
    term = _substituted(term, {axis: Axis(of) for axis, of in domains.items() if of not in free_axes(term)})
    bound = frozenset(domains.get(axis, axis) for axis in bound)
    names = {axis: f"of {extent}" for axis, extent in side.extents.items()}
    if len({names[axis] for axis in free_axes(term)}) < len(free_axes(term)):
        return _Atom(term, bound)
    renamed = _substituted(term, {axis: Axis(names[axis]) for axis in free_axes(term)})
    return _Atom(renamed, frozenset(names[axis] for axis in bound)) if renamed != term else _Atom(term, bound)


def _uncovered(term: Expr) -> Expr:
    while isinstance(term, Call) and term.fn in TRANSPARENT:
        term = term.args[0]
    return term


def _substituted(term: Expr, axes: Mapping[str, Expr]) -> Expr:
    """The term with other axes; as it is where a reduction in it binds one of them."""
    try:
        return substitute_axes(term, axes)
    except ValueError:
        return term


def _terms(arg: Expr) -> Iterator[Expr]:
    match arg:
        case Call("add" | "sub", (left, right)):
            yield from _terms(left)
            yield from _terms(right)
        case Call("neg", (inner,)):
            yield from _terms(inner)
        case Const():
            return
        case _:
            yield arg


def _independent(atoms: list[_Atom]) -> bool:
    """Whether every atom has, at every position of its bound axes, a random element that no other atom reads."""
    repeated: dict[Expr, frozenset[str]] = {}
    for atom in atoms:
        seen = repeated.get(atom.term, frozenset())
        repeated[atom.term] = seen | (atom.bound & free_axes(atom.term))
    readers = Counter(key for term in repeated for key in {_key(source) for source in _sources(term)})
    return all(_has_own_source(term, bound, readers) for term, bound in repeated.items())


def _sources(term: Expr) -> Iterator[Expr]:
    """Where a term's randomness comes from: inputs, and uninterpreted functions (of whatever they read)."""
    if isinstance(term, Load) or (isinstance(term, Call) and term.fn in (*OPAQUE, *LOGISTIC)):
        yield term
    else:
        for child in children(term):
            yield from _sources(child)


def _key(source: Expr) -> object:
    return source.tensor if isinstance(source, Load) else source


def _has_own_source(term: Expr, bound: frozenset[str], readers: Mapping[object, int]) -> bool:
    sources = set(_sources(term))
    counts = Counter(map(_key, sources))
    for source in sources:
        plain = free_axes(source)
        if isinstance(source, Load):
            plain = frozenset(axis for part in source.index for axis in _told_by(part, bound))
        if counts[_key(source)] == readers[_key(source)] == 1 and bound <= plain:
            return True
    return False


def _told_by(part: Expr, bound: frozenset[str]) -> frozenset[str]:
    """The axis of `bound` whose position an index tells, where the others stay: that of a sum which it is a term of."""
    axes = free_axes(part) & bound
    return axes if len(axes) == 1 and _multiplicity(part, *axes) else frozenset()


def _multiplicity(part: Expr, axis: str) -> int | None:
    """How often an axis is added in an index; None where it is anything but added."""
    match part:
        case Axis(name):
            return int(name == axis)
        case _ if axis not in free_axes(part):
            return 0
        case Call("add" | "sub" as fn, (left, right)):
            one, other = _multiplicity(left, axis), _multiplicity(right, axis)
            return None if one is None or other is None else one + (other if fn == "add" else -other)
        case Call("mul", (inner, Const(int(factor)))) | Call("mul", (Const(int(factor)), inner)):
            found = _multiplicity(inner, axis)
            return None if found is None else found * factor
        case _:
            return None
