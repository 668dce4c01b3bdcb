"""The probability of accepting a wrong program, from the form of the right one.

Every output element is a quotient N / D whose N and D are sums of terms (polynomial in the inputs) times
(exponential). Counted here, at given sizes: the degree d and the number k of distinct exponentials of
N1 D2 - N2 D1, the numerator of a difference of two such quotients.

Inputs are plus or minus squares of uniform residues, so an input has degree 2. Roots and uninterpreted
functions count as inputs (a random function of its arguments).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from eqfuse.terms.nodes import (
    CASTS,
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Program,
    Reduce,
    children,
    free_axes,
    substitute_axes,
    walk,
)
from eqfuse.verify.field import P, Q

OPAQUE = ("gelu", "erf", "sin", "cos", "floor", "round", "log", "sqrt", "rsqrt", "sign")
LOGISTIC = ("sigmoid", "tanh", "silu")
"""Made of an exponential; uninterpreted where they stand in an exponent."""
SELECTIONS = ("where", "maximum", "minimum")
TRANSPARENT = ("finite", "invertible", "abs", "neg", "relu", *CASTS)

SCHWARTZ_ZIPPEL = (
    "Schwartz-Zippel: a non-zero polynomial of degree d vanishes at a random point with probability at most "
    "d / (q - 1); exponentials are variables, uniform on the group of squares"
)
MIRAGE = (
    "Mirage (Theorems 3 and 4): a non-zero sum of k exponentials with rational coefficients of degree d, "
    "d k^4 < q, vanishes in a random trial with probability at most 1 - 1/k + o(1/k)"
)
NONE = "the program is too large at these sizes for Mirage's Theorem 3 (d k^4 < q fails): no bound is claimed"


@dataclass(frozen=True)
class Bound:
    """`per_trial` bounds the probability that one trial accepts a wrong program, under `theorem`."""

    degree: int
    terms: int
    per_trial: float
    theorem: str

    def after(self, trials: int) -> float:
        """The bound after that many independent trials."""
        return min(1.0, self.per_trial**trials)


@dataclass(frozen=True)
class _Quotient:
    """Counts of N / D: exponential terms of each, the larger degree, and the axes that D depends on."""

    above: int
    below: int
    degree: int
    axes: frozenset[str] = frozenset()


_NUMBER = _Quotient(1, 1, 0)
_INPUT = _Quotient(1, 1, 2)


def acceptance_bound(program: Program, extents: Mapping[str, int], p: int = P, q: int = Q) -> Bound:
    """The bound for one element of the program's worst output at these extents.

    Where the arguments of exponentials are independent of each other (each has an input of its own), the
    exponentials are independent variables and Schwartz-Zippel applies to every candidate that is built
    from the same exponentials, as repairs are. Otherwise Mirage's theorem is used.
    """
    counter = _Counts(extents)
    degree, terms = 1, 1
    for output in program.outputs:
        form = counter.count(output.expr)
        degree = max(degree, 2 * form.degree)
        terms = max(terms, 2 * form.above * form.below)
    atoms = [atom for output in program.outputs for atom in _atoms(output.expr, frozenset(), program)]
    if _independent(atoms):
        mass = max((counter.count(atom.term).degree for atom in atoms), default=1)
        return Bound(degree, terms, min(1.0, degree * max(1, mass) / (q - 1)), SCHWARTZ_ZIPPEL)
    degree = max(degree, *(counter.count(atom.term).degree for atom in atoms))
    if degree * terms**4 >= q:
        return Bound(degree, terms, 1.0, NONE)
    return Bound(degree, terms, 1 - 1 / terms, MIRAGE)


class _Counts:
    def __init__(self, extents: Mapping[str, int]) -> None:
        self._extents = extents
        self._memo: dict[Expr, _Quotient] = {}

    def count(self, expr: Expr) -> _Quotient:
        for node in walk(expr):
            if node not in self._memo:
                self._memo[node] = self._node(node)
        return self._memo[expr]

    def _node(self, node: Expr) -> _Quotient:
        parts = [self._memo[child] for child in children(node)]
        match node:
            case Load():
                return _INPUT
            case Reduce(op, axis, _):
                return _folded(op, parts[0], axis, self._extents.get(axis, 1))
            case Call("exp", (arg,)):
                steps = sum(1 for _ in _terms(arg))
                return _Quotient(1, 1, steps)
            case Call(fn, (arg,)) if fn in LOGISTIC:
                return _Quotient(2, 2, 2 + sum(1 for _ in _terms(arg)), free_axes(node))
            case Call("add" | "sub", _):
                return _sum(parts[0], parts[1])
            case Call("mul", _):
                return _product(parts[0], parts[1])
            case Call("sq", _):
                return _product(parts[0], parts[0])
            case Call("div", _):
                divisor = parts[1]
                axes = free_axes(node.args[1])
                return _product(parts[0], _Quotient(divisor.below, divisor.above, divisor.degree, axes))
            case Call(fn, _) if fn in SELECTIONS:
                return _largest(parts[1:] if fn == "where" else parts)
            case Call(fn, _) if fn in TRANSPARENT:
                return parts[0]
            case Call(fn, _) if fn in OPAQUE:
                return _Quotient(1, 1, 2, free_axes(node) if fn == "rsqrt" else frozenset())
            case _:
                return _NUMBER


def _sum(x: _Quotient, y: _Quotient) -> _Quotient:
    if x.below == 1 and y.below == 1 and not x.axes and not y.axes:
        return _Quotient(x.above + y.above, 1, max(x.degree, y.degree))
    above = x.above * y.below + y.above * x.below
    return _Quotient(above, x.below * y.below, x.degree + y.degree, x.axes | y.axes)


def _product(x: _Quotient, y: _Quotient) -> _Quotient:
    return _Quotient(x.above * y.above, x.below * y.below, x.degree + y.degree, x.axes | y.axes)


def _largest(parts: list[_Quotient]) -> _Quotient:
    return _Quotient(
        max(part.above for part in parts),
        max(part.below for part in parts),
        max(part.degree for part in parts),
        frozenset().union(*(part.axes for part in parts)),
    )


def _folded(op: str, body: _Quotient, axis: str, count: int) -> _Quotient:
    count = max(1, count)
    match op:
        case "max" | "min":
            return body
        case "sum" if axis not in body.axes:
            return _Quotient(count * body.above, body.below, body.degree, body.axes)
        case "sum":
            above = count * body.above * body.below ** (count - 1)
            return _Quotient(above, body.below**count, count * body.degree, body.axes)
        case _:
            return _Quotient(body.above**count, body.below**count, count * body.degree, body.axes)


@dataclass(frozen=True)
class _Atom:
    """What one exponential varies by: a term, and the axes along which it occurs many times."""

    term: Expr
    bound: frozenset[str]


def _atoms(expr: Expr, bound: frozenset[str], program: Program) -> Iterator[_Atom]:
    """The arguments of exponentials without the extremes that are taken off, extremes' bodies apart."""
    match expr:
        case Reduce(_, axis, body):
            yield from _atoms(body, bound | {axis}, program)
        case Call(fn, (arg,)) if fn == "exp" or fn in LOGISTIC:
            yield from _split(arg, bound, program)
            yield from _atoms(arg, bound, program)
        case _:
            for child in children(expr):
                yield from _atoms(child, bound, program)


def _split(arg: Expr, bound: frozenset[str], program: Program) -> Iterator[_Atom]:
    own: list[Expr] = []
    for term in _terms(arg):
        inner = _uncovered(term)
        if isinstance(inner, Reduce) and inner.op in ("max", "min"):
            yield from _split(inner.body, bound | {inner.axis}, program)
        elif any(isinstance(node, Load) for node in walk(inner)):
            own.append(inner)
    if own:
        total = own[0]
        for term in own[1:]:
            total = Call("add", (total, term))
        yield _Atom(_original_axes(total, program), frozenset(program.domains.get(a, a) for a in bound))


def _uncovered(term: Expr) -> Expr:
    while isinstance(term, Call) and term.fn in TRANSPARENT:
        term = term.args[0]
    return term


def _original_axes(term: Expr, program: Program) -> Expr:
    """The term with renamed axes named as what they are copies of, so that copies of a term are one."""
    back = {axis: Axis(of) for axis, of in program.domains.items() if of not in free_axes(term)}
    try:
        return substitute_axes(term, back)
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
            plain = frozenset(part.name for part in source.index if isinstance(part, Axis))
        if counts[_key(source)] == readers[_key(source)] == 1 and bound <= plain:
            return True
    return False
