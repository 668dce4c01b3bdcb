"""Degrees of what a program computes, counted by running it on degrees instead of numbers.

Every value is a quotient N / D of polynomials in the inputs, in the exponentials of atoms (see
docs/verification.md) and in the values of uninterpreted functions. An array of this domain is a shape and one
`Form` that bounds all its elements, whatever a comparison decides. Every IR's interpreter runs in it, so that
the degrees of a loop nest or a tile program are those of the operations it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from threading import local
from typing import Any, NamedTuple

import numpy as np

from eqfuse.terms.definitions import evaluated
from eqfuse.terms.domain import Watch
from eqfuse.terms.functions import CASTS, CIRCULAR, FUNCTIONS
from eqfuse.terms.nodes import REDUCTIONS
from eqfuse.verify.inputs import InputSpec
from eqfuse.verify.sampling import Inputs

UNINTERPRETED = tuple(
    row.name
    for row in FUNCTIONS.values()
    if row.field == "hash" and row.result in ("real", "integer") and not row.definition
)
"""Hashed wherever they stand. (So are `//` and `%` of reals; of integers, where programs have them, they are exact.)"""
LOGISTIC = tuple(row.name for row in FUNCTIONS.values() if row.field == "logistic")
"""Made of an exponential; hashed where they stand in an exponent."""
SELECTIONS = ("maximum", "minimum")


class Form(NamedTuple):
    """Upper bounds for an element N / D.

    above, below: degrees of N and D; weight: degree of exp of the element, the number of atoms that it adds up
    to; terms_above, terms_below: exponentials in N and D; roots: square roots in it; p, q: which residues it
    has; logarithm: a logarithm is in it that no exp took away; formal: the logarithm of e to the base 2, which is
    one more variable, or its inverse.
    """

    above: float = 0.0
    below: float = 0.0
    weight: float = 1.0
    terms_above: float = 1.0
    terms_below: float = 1.0
    roots: float = 0.0
    p: bool = True
    q: bool = True
    logarithm: bool = False
    formal: bool = False

    @property
    def constant(self) -> bool:
        return self.above == self.below == 0.0 and self.p and self.q


NUMBER = Form()
VARIABLE = Form(above=1.0)
LOG2_E = Form(above=1.0, formal=True)


class _Live(local):
    """Elements that the arrays of a thread have now, and the most that they had."""

    now = most = 0


_LIVE = _Live()


class _Memory:
    """What an array of numbers would hold in place of a form, and views of it would share."""

    __slots__ = ("elements",)

    def __init__(self, elements: int) -> None:
        self.elements = elements
        _LIVE.now += elements
        _LIVE.most = max(_LIVE.most, _LIVE.now)

    def __del__(self) -> None:
        _LIVE.now -= self.elements


@dataclass(eq=False)
class DegreeArray:
    """A shape, and what bounds every element; of a view, the `memory` of what it is a view of."""

    shape: tuple[int, ...]
    form: Form
    memory: _Memory | None = None

    def __post_init__(self) -> None:
        self.memory = self.memory or _Memory(prod(self.shape))


class DegreeDomain:
    """Implements `terms.domain.Domain`.

    After a run, `exponent` is the largest sum of the degrees of N and D in an exponent (0: no exponential),
    `argument` that in an argument of an uninterpreted function and `argument_roots` the roots in one, and
    `discrete` tells that a logarithm was multiplied by something but log2 e: no degree is known then.
    """

    name = "degrees"
    watch: Watch | None = None
    orders = False

    def __init__(self, *, strict_casts: bool = False) -> None:
        self.strict_casts = strict_casts
        self.exponent = self.argument = self.argument_roots = 0.0
        self.discrete = False

    def full(self, shape: tuple[int, ...], number: float) -> DegreeArray:
        return DegreeArray(shape, NUMBER)

    def irrational(self, name: str, shape: tuple[int, ...]) -> DegreeArray:
        return DegreeArray(shape, LOG2_E if name == "log2_e" else _reciprocal(LOG2_E))

    def lift(self, integers: np.ndarray) -> DegreeArray:
        return DegreeArray(np.shape(integers), NUMBER)

    def draw(self, shadow: np.ndarray, rng: np.random.Generator) -> DegreeArray:
        """Inputs of this shape."""
        return DegreeArray(shadow.shape, VARIABLE)

    def drawn(self, fn: str, integers: Sequence[np.ndarray]) -> DegreeArray:
        return self.call(fn, [self.lift(each) for each in integers])

    def rounded(self, dtype: str, value: DegreeArray) -> DegreeArray:
        return value

    def call(self, fn: str, args: Sequence[DegreeArray]) -> DegreeArray:
        shape = np.broadcast_shapes(*(arg.shape for arg in args))
        return DegreeArray(shape, self._called(fn, [arg.form for arg in args]))

    def _called(self, fn: str, args: Sequence[Form]) -> Form:
        match fn, args:
            case ("add" | "sub", [x, y]):
                return _sum(x, y)
            case ("mul", [x, y]):
                return self._product(x, y)
            case ("div", [x, y]):
                return self._product(x, _reciprocal(y))._replace(weight=x.weight)
            case ("floordiv", [_, _]):
                return self._hashed([self._called("div", args)])
            case ("mod", [x, y]):
                return _sum(x, self._product(y, self._called("floordiv", args)))
            case ("exp", [x]):
                return self._exp(x)
            case ("exp2", [x]):
                return self._exp(self._product(x, _reciprocal(LOG2_E)))
            case ("log", [x]) if x.p:
                return x._replace(weight=x.above + x.below, p=False, q=True, logarithm=True)
            case ("sqrt", [x]) if x.p:
                return _root(x)
            case (_, [x]) if fn in LOGISTIC:
                return self._logistic(fn, x)
            case (_, [x]) if fn in CIRCULAR:
                return self._circular(x)
            case (_, [x, y]) if fn in SELECTIONS:
                return _either(x, y)
            case ("finite" | "invertible", [x]):
                return _either(x, NUMBER)
            case ("neg" | "abs", [x]):
                return x
            case ("sign", _):
                return NUMBER
            case (_, [x]) if fn in CASTS and not self.strict_casts:
                return x
            case _ if definition := FUNCTIONS[fn].definition:
                return evaluated(definition, fn, args, lambda _: NUMBER, self._called)
            case _:
                return self._hashed(args)

    def _product(self, x: Form, y: Form) -> Form:
        self.discrete |= (x.logarithm and not y.formal) or (y.logarithm and not x.formal)
        return Form(
            x.above + y.above,
            x.below + y.below,
            x.weight * y.weight,
            x.terms_above * y.terms_above,
            x.terms_below * y.terms_below,
            x.roots + y.roots,
            x.p and y.p,
            x.q and y.q,
            x.logarithm or y.logarithm,
        )

    def _exp(self, x: Form) -> Form:
        if not x.q:  # the quotient of two hashes
            return self._hashed([x])._replace(below=1.0, q=False)
        self.exponent = max(self.exponent, 1.0, x.above + x.below)
        terms = max(x.terms_above, x.terms_below) if x.logarithm else 1.0
        return Form(x.weight, x.weight, 1.0, terms, terms, x.roots, q=False)

    def _logistic(self, fn: str, x: Form) -> Form:
        """A quotient of 1, exp(2 x) or exp(x) and, for silu, x."""
        exponential = self._exp(x._replace(weight=2 * x.weight))
        quotient = self._product(_sum(NUMBER, exponential), _reciprocal(_sum(NUMBER, exponential)))
        self._hashed([x])
        return self._product(x, quotient) if fn == "silu" else quotient._replace(weight=1.0, q=True)

    def _circular(self, x: Form) -> Form:
        """Half the sum of a point z, the exponential of a multiple of x, and of 1 / z."""
        z = self._exp(x._replace(above=x.above + 1))
        return _sum(z, _reciprocal(z))._replace(weight=1.0, q=False)

    def _hashed(self, args: Sequence[Form]) -> Form:
        degrees = [(arg.above + arg.below) * (2 if arg.logarithm else 1) for arg in args]
        self.argument = max([self.argument, 1.0, *degrees])
        self.argument_roots = max([self.argument_roots, *(arg.roots for arg in args)])
        known = all(arg.p or arg.q for arg in args)
        return VARIABLE._replace(p=known, q=known)

    def compare(self, fn: str, left: DegreeArray, right: DegreeArray) -> np.ndarray:
        return np.zeros(np.broadcast_shapes(left.shape, right.shape), dtype=bool)

    def where(self, condition: np.ndarray, left: DegreeArray, right: DegreeArray) -> DegreeArray:
        shape = np.broadcast_shapes(np.shape(condition), left.shape, right.shape)
        return DegreeArray(shape, _either(left.form, right.form))

    def reduce(self, op: str, value: DegreeArray, axis: int) -> DegreeArray:
        count = value.shape[axis]
        rest = value.shape[:axis] + value.shape[axis:][1:]
        form = value.form
        match op:
            case _ if count == 0:
                form = NUMBER
            case "sum":
                form = _repeated_sum(form, count)
            case "prod":
                form = reduce(self._product, [form] * count)
            case _ if op not in REDUCTIONS:
                raise ValueError(f"{op} is not a reduction")
        return DegreeArray(rest, form)

    def contract(self, left: DegreeArray, right: DegreeArray, axis: int) -> DegreeArray:
        return self.reduce("sum", self.call("mul", [left, right]), axis)

    def is_finite(self, value: DegreeArray) -> bool:
        return True

    def shape(self, value: DegreeArray) -> tuple[int, ...]:
        return value.shape

    def reshape(self, value: DegreeArray, shape: tuple[int, ...]) -> DegreeArray:
        return DegreeArray(tuple(shape), value.form, value.memory)

    def transpose(self, value: DegreeArray, order: Sequence[int]) -> DegreeArray:
        return DegreeArray(tuple(value.shape[place] for place in order), value.form, value.memory)

    def broadcast(self, value: DegreeArray, shape: tuple[int, ...]) -> DegreeArray:
        return DegreeArray(tuple(shape), value.form, value.memory)

    def take(self, value: DegreeArray, index: tuple[Any, ...]) -> DegreeArray:
        view = all(isinstance(each, slice | int | None) for each in index)
        shape = np.broadcast_to(np.False_, value.shape)[index].shape
        return DegreeArray(shape, value.form, value.memory if view else None)

    def put(self, target: DegreeArray, index: tuple[Any, ...], value: DegreeArray) -> None:
        target.form = _either(target.form, value.form)


@dataclass(frozen=True)
class Counted:
    """The form of every output, what `DegreeDomain` says after a run, and how many `elements` of reals one trial holds at
    once."""

    forms: Mapping[str, Form]
    exponent: float
    argument: float
    argument_roots: float
    discrete: bool
    elements: int


def count(
    run: Callable[[Inputs, Any], Mapping[str, Any]],
    specs: Mapping[str, InputSpec],
    scalars: Mapping[str, object],
    extents: Mapping[str, int],
    *,
    strict_casts: bool = False,
) -> Counted:
    """Runs a stage on degrees. `scalars` are those of the program: a number, or None for a random one.

    Integers and truth values are decided by orders alone: their form is `NUMBER`.
    """
    domain = DegreeDomain(strict_casts=strict_casts)
    tensors = {
        name: DegreeArray((1, *spec.shape), VARIABLE)
        if spec.kind == "real"
        else np.full(spec.shape, spec.values[1], dtype=bool if spec.kind == "truth" else np.int64)
        for name, spec in specs.items()
    }
    values: dict[str, Any] = {}
    for name, number in scalars.items():
        match number:
            case int():
                values[name] = number
            case float():
                values[name] = domain.full((), number)
            case _:
                values[name] = DegreeArray((1,), VARIABLE)
    before = _LIVE.most = _LIVE.now
    outputs = run(Inputs(tensors, values, extents, 1), domain)
    forms = {
        name: value.form if isinstance(value, DegreeArray) else NUMBER for name, value in outputs.items()
    }
    elements = _LIVE.most - before
    return Counted(forms, domain.exponent, domain.argument, domain.argument_roots, domain.discrete, elements)


def _sum(x: Form, y: Form) -> Form:
    plain = _plain(x) and _plain(y)
    return Form(
        max(x.above + y.below, y.above + x.below),
        x.below + y.below,
        x.weight + y.weight,
        1.0 if plain else x.terms_above * y.terms_below + y.terms_above * x.terms_below,
        x.terms_below * y.terms_below,
        x.roots + y.roots,
        x.p and y.p,
        x.q and y.q,
        x.logarithm or y.logarithm,
    )


def _repeated_sum(x: Form, count: int) -> Form:
    """The sum of so many elements."""
    return x._replace(
        above=x.above + (count - 1) * x.below,
        below=count * x.below,
        weight=count * x.weight,
        terms_above=1.0 if _plain(x) else count * x.terms_above * _power(x.terms_below, count - 1),
        terms_below=_power(x.terms_below, count),
        roots=count * x.roots,
    )


def _plain(x: Form) -> bool:
    """Whether no exponential is in it: those have no residue modulo q, or are in two terms."""
    return x.q and x.terms_above == x.terms_below == 1 and not x.logarithm


def _power(base: float, exponent: int) -> float:
    """inf where the number of terms is beyond a float; that of no factors is 1, whatever the base."""
    if exponent == 0:
        return 1.0
    return base**exponent if exponent * np.log(base) < 600 else float("inf")


def _reciprocal(x: Form) -> Form:
    return x._replace(
        above=x.below, below=x.above, weight=1.0, terms_above=x.terms_below, terms_below=x.terms_above
    )


def _root(x: Form) -> Form:
    """sqrt(N / D) = sqrt(N D) / D; that of a constant is one more constant."""
    if x.constant:
        return x._replace(q=False)
    return x._replace(above=(x.above + x.below) / 2, weight=1.0, roots=x.roots + 1, q=False)


def _either(x: Form, y: Form) -> Form:
    """A bound for both; residues that both have."""
    return Form(
        max(x.above, y.above),
        max(x.below, y.below),
        max(x.weight, y.weight),
        max(x.terms_above, y.terms_above),
        max(x.terms_below, y.terms_below),
        max(x.roots, y.roots),
        x.p and y.p,
        x.q and y.q,
        x.logarithm or y.logarithm,
    )
