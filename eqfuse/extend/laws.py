"""The laws of a fold, tried on states that it reaches: of one to some dozens of positions, the parts in order.

Two arithmetics decide: float64 on readable numbers with ties (and, apart, with infinities), and the field of
verify/field/, where equal is exactly equal: on residues at random, and on numbers around those that the fold is written
with, in parts that are long and uneven. A law that some sample breaks is refused with that sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from eqfuse.extend.programs import compared, of_fold
from eqfuse.terms.domain import Domain
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import COMPARISONS, LOGICAL
from eqfuse.terms.integers import is_exact
from eqfuse.terms.interpreter import TRIAL, Env, Value, evaluate_all, expand
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Fold, Local, walk
from eqfuse.terms.registry import AXIS
from eqfuse.verify.adversary import with_both_signs
from eqfuse.verify.field.array import UNDEFINED, FieldArray
from eqfuse.verify.field.domain import FieldDomain

SAMPLES = 96
"""Samples of each kind of numbers."""

CLOSE = 1e-7
"""Relative difference of float64 values that are taken for equal."""

SHORT = ((1, 1, 1), (2, 1, 2), (1, 3, 1))
"""Positions of the three parts that are combined."""
LONG = ((1, 1, 1), (9, 4, 13), (40, 1, 66))
"""The same for what counts positions, or sums them up to a limit; beside these, parts that reach a limit together."""
LARGE, LARGEST = 1e6, 1e14
"""Numbers from the first on are whole where they are drawn; those that a law is written with are drawn up to the second."""
LONGEST = 64
"""Limits up to this one are reached by parts of as many positions."""
FARTHEST, WALKED = 2**40, 2 * LONGEST + 2
"""Where positions do not count, limits up to the first: parts longer than the second are made of equal halves."""

MOST_WHOLE = 64
"""Integers are drawn below it."""

EXACT = frozenset(
    ("add", "sub", "mul", "div", "neg", "sq", "where", "maximum", "minimum", "abs", *COMPARISONS, *LOGICAL)
)
"""Functions that the field computes; others it may have no value for, and floats then have to agree too."""

State = list[Value]
Truths = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Broken:
    """A law that does not hold, as two lines that differ, and the states that they differ for."""

    law: str
    left: str
    right: str
    where: str

    def __str__(self) -> str:
        return f"    {self.left}\n    {self.right}\n    for {self.where}"


@dataclass(frozen=True)
class Verdict:
    """`broken` is the first law that a sample broke; `undecided` what the field has no values for."""

    broken: Broken | None
    undecided: bool = False


def check_laws(fold: Fold, lift: Sequence[Expr], whole: frozenset[str] = frozenset()) -> Verdict:
    """Identity, associativity and, where it is declared, commutativity; `lift` reads arguments as `Local`, of which those
    that are `whole` are integers."""
    floats = FloatDomain("float64")
    for draw in (_tied, _plain):
        broken = _tried(fold, lift, floats, draw, whole=whole)
        if broken is not None:
            return Verdict(broken)
    decided: list[bool] = []
    broken = _tried(fold, lift, FieldDomain(seed=1), _plain, decided, whole=whole)
    if broken is None:
        numbers = _numbers_in(fold, lift)
        anywhere = not any(isinstance(node, Axis) for node in walk(*lift))
        longest = FARTHEST if anywhere else LONGEST
        limits = sorted({int(number) for number in numbers if 2 <= number <= longest})
        reach = [parts for n in limits for parts in ((n // 2, (n + 1) // 2, n // 2 + 1), (n - 1, 2, n))]
        broken = _tried(fold, lift, FieldDomain(seed=2), Near(numbers), lengths=(*LONG, *reach), whole=whole)
    if broken is None:
        broken = _as_programs(fold, lift, whole)
    return Verdict(broken, undecided=not any(decided))


def _as_programs(fold: Fold, lift: Sequence[Expr], whole: frozenset[str]) -> Broken | None:
    """The first law that tells two programs apart."""
    for law, pair, says, other in of_fold(fold, lift, AXIS, whole):
        found = compared(pair)
        if found is not None and (shown := found.counterexample) is not None:
            given = ", ".join(
                f"{name} = {float(np.ravel(value)[0]):.6g}" for name, value in shown.inputs.items()
            )
            return Broken(law, f"{says} = ({shown.expected:.9g})", f"{other} = ({shown.found:.9g})", given)
    return None


@lru_cache(256)
def keeps_infinities(fold: Fold) -> bool:
    """Whether the laws hold among infinities too; where they do not, the order of combination shows in them."""
    lift = [Local(name, ()) for name in fold.state]
    return _tried(fold, lift, FloatDomain("float64"), _infinite) is None


# -- samples ---------------------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray[Any, Any]]


def _tied(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return rng.integers(-2, 4, shape).astype(float)


def _plain(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.round(rng.standard_normal(shape) * 2, 3)


def _infinite(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.where(rng.random(shape) < 0.4, rng.choice([-np.inf, np.inf], shape), _tied(rng, shape))


@dataclass(frozen=True)
class Near:
    """Numbers at and around given ones, others of magnitudes from 0.01 to 10000, and small integers: with three decimals, and
    large ones whole, so that the field has them themselves, and float64 their sums."""

    numbers: tuple[float, ...]

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        number = rng.choice(np.asarray(self.numbers), shape)
        step = rng.choice([0.0, 0.0, 1.0, -1.0, 0.05], shape) * rng.uniform(0.5, 1.5, shape)
        near = number + step * np.maximum(np.abs(number), 1.0)
        wide = rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(-2, 4, shape)
        small = rng.integers(-3, 4, shape).astype(float)
        kind = rng.random(shape)
        found = np.where(kind < 0.5, near, np.where(kind < 0.8, wide, small))
        return np.where(np.abs(found) < LARGE, np.round(found, 3), np.round(found))


def numbers_around(constants: Iterable[float]) -> tuple[float, ...]:
    """Numbers of a law that `Near` draws around."""
    return with_both_signs(float(number) for number in constants if abs(number) < LARGEST)


def drawn_in(domain: Domain, draw: Draw, numbers: np.ndarray[Any, Any], rng: np.random.Generator) -> Any:
    """Numbers as values of a domain: in the field those of `Near` are themselves, others have residues at random."""
    if not isinstance(domain, FieldDomain):
        return numbers
    return domain.numbers(np.round(numbers, 3)) if isinstance(draw, Near) else domain.draw(numbers, rng)


def _numbers_in(fold: Fold, lift: Sequence[Expr]) -> tuple[float, ...]:
    nodes = walk(*lift, *fold.combine, *fold.identity)
    return numbers_around(float(node.value) for node in nodes if isinstance(node, Const))


def _tried(
    fold: Fold,
    lift: Sequence[Expr],
    domain: Domain,
    draw: Draw,
    decided: list[bool] | None = None,
    lengths: Sequence[Sequence[int]] = SHORT,
    whole: frozenset[str] = frozenset(),
) -> Broken | None:
    rng = np.random.default_rng(0)
    names = sorted({node.name for node in walk(*lift) if isinstance(node, Local)})
    for three in lengths:
        first = 0
        parts: list[State] = []
        for length in three:
            parts.append(_part(fold, lift, names, domain, draw, rng, range(first, first + length), whole))
            first += length
        for broken in _laws(fold, parts, domain, decided):
            return broken
    return None


def _part(
    fold: Fold,
    lift: Sequence[Expr],
    names: Sequence[str],
    domain: Domain,
    draw: Draw,
    rng: np.random.Generator,
    positions: range,
    whole: frozenset[str],
) -> State:
    """The states of a part at these positions, one for every sample."""
    if len(positions) > WALKED:
        one = _part(fold, lift, names, domain, draw, rng, positions[:1], whole)
        joined = one
        for bit in f"{len(positions):b}"[1:]:
            joined = _joined(fold, joined, joined, domain)
            joined = _joined(fold, joined, one, domain) if bit == "1" else joined
        return joined
    total: State | None = None
    for position in positions:
        values: dict[str, tuple[tuple[str, ...], Any]] = {}
        for name in names:
            numbers = draw(rng, (SAMPLES,))
            drawn = drawn_in(domain, draw, numbers, rng)
            if name in whole:  # of few bits: shifts by them are seen
                drawn = np.rint(np.abs(numbers)).astype(np.int64) % MOST_WHOLE
            values[name] = ((TRIAL,), drawn)
        env = Env(
            domain, {}, {}, {"j": 1}, positions={"j": np.array([position])}, locals=values, batch=SAMPLES
        )
        state = [_of_trials(value, env) for value in evaluate_all(lift, env)]
        total = state if total is None else _joined(fold, total, state, domain)
    assert total is not None
    return total


def _of_trials(value: Value, env: Env) -> Value:
    data = expand(value, (TRIAL, "j") if "j" in value.dims else (TRIAL,), env)
    if "j" in value.dims:
        data = data[:, 0] if is_exact(data) else env.domain.take(data, (slice(None), 0))
    return Value((TRIAL,), data)


def _joined(fold: Fold, left: State, right: State, domain: Domain) -> State:
    env = Env(
        domain,
        {},
        {},
        {},
        locals={
            **{f"{name}1": tuple(value) for name, value in zip(fold.state, left, strict=True)},
            **{f"{name}2": tuple(value) for name, value in zip(fold.state, right, strict=True)},
        },
        batch=SAMPLES,
    )
    return [Value((TRIAL,), expand(value, (TRIAL,), env)) for value in evaluate_all(fold.combine, env)]


def _nothing(identity: Sequence[Const], like: State, domain: Domain) -> State:
    env = Env(domain, {}, {}, {}, batch=SAMPLES)
    return [Value((TRIAL,), expand(value, (TRIAL,), env)) for value in evaluate_all(list(identity), env)]


# -- laws ------------------------------------------------------------------------------------------


def _laws(fold: Fold, parts: list[State], domain: Domain, decided: list[bool] | None) -> Iterator[Broken]:
    a, b, c = parts

    def join(left: State, right: State) -> State:
        return _joined(fold, left, right, domain)

    nothing = _nothing(fold.identity, a, domain)
    called = {node.fn for node in walk(*fold.combine) if isinstance(node, Call)}
    exact = called <= EXACT
    ends = f"identity ({_numbers(fold, nothing, 0)})"
    laws = [
        (
            "associative",
            join(join(a, b), c),
            join(a, join(b, c)),
            "combine(combine(a, b), c)",
            "combine(a, combine(b, c))",
            {"a": a, "b": b, "c": c},
        ),
        ("identity", join(nothing, a), a, "combine(identity, a)", "a", {"a": a}),
        ("identity", join(a, nothing), a, "combine(a, identity)", "a", {"a": a}),
        ("identity", join(nothing, nothing), nothing, "combine(identity, identity)", "identity", {}),
    ]
    if fold.commutative:
        laws.append(
            ("commutative", join(a, b), join(b, a), "combine(a, b)", "combine(b, a)", {"a": a, "b": b})
        )
    for law, left, right, says, other, given in laws:
        wrong = np.zeros(SAMPLES, bool)
        for x, y in zip(left, right, strict=True):
            differs, known = _differs(x.data, y.data, exact)
            wrong |= differs
            if decided is not None and law == "associative":
                decided.append(bool(known))
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            states = "; ".join(f"{name} = ({_numbers(fold, state, at)})" for name, state in given.items())
            yield Broken(
                law,
                f"{says} = ({_numbers(fold, left, at)})",
                f"{other} = ({_numbers(fold, right, at)})",
                ", ".join(filter(None, (states, ends if law == "identity" else ""))),
            )


def _differs(x: Any, y: Any, exact: bool) -> tuple[Truths, bool]:
    """Where two values differ, NaN and infinities included, and whether exact arithmetic knew any; `exact`: residues
    alone decide."""
    close = _close(_reals(x), _reals(y))
    if not isinstance(x, FieldArray) or not isinstance(y, FieldArray):  # integers are exact
        return ~close, True
    usable, same = _residues(x, y)
    if same is None:
        return ~close & usable, False
    return ~same & usable & (exact | ~close), bool((same & usable).any())


def differs(domain: Domain, left: Any, right: Any, *, of_numbers: bool = False) -> tuple[Truths, Truths]:
    """Where two arrays differ, and where they have values to compare: elements without one on the left do not count.
    In the field, those that are made `of_numbers` themselves differ by their residues alone, if no function was hashed."""
    if isinstance(left, FieldArray):
        shape = np.broadcast_shapes(left.shape, right.shape)
        left, right = (domain.broadcast(side, shape) for side in (left, right))
        close = _close(left.shadow, right.shadow)
        usable, same = _residues(left, right)
        if same is None:
            return ~close & usable, usable
        exact = of_numbers and isinstance(domain, FieldDomain) and not domain.opaque
        return ~same & (exact | ~close) & usable, usable
    x, y = np.broadcast_arrays(_reals(left), _reals(right))
    usable = np.isfinite(x)
    return ~_close(x, y) & usable, usable


def gained(left: Any, right: Any) -> Truths:
    """Where the second of two arrays of floats is a finite number and the first none."""
    x, y = np.broadcast_arrays(_reals(left), _reals(right))
    found: Truths = np.isnan(x) & np.isfinite(y)
    return found


def _residues(left: FieldArray, right: FieldArray) -> tuple[Truths, Truths | None]:
    """Where both have a value in the field, and where their residues agree: None where residues cannot tell."""
    usable = left.lacks(UNDEFINED) & right.lacks(UNDEFINED)
    usable &= np.isfinite(left.shadow) & np.isfinite(right.shadow)
    pairs = [(a, b) for a, b in ((left.p, right.p), (left.q, right.q)) if a is not None and b is not None]
    if not pairs or left.rooted or right.rooted:
        return usable, None
    same = np.ones(left.shape, bool)
    for a, b in pairs:
        same &= a == b
    return usable, same


def _reals(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value.shadow if isinstance(value, FieldArray) else value, dtype=float)


def _close(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(np.isclose(left, right, rtol=CLOSE, atol=CLOSE, equal_nan=True))


def _numbers(fold: Fold, state: State, at: int) -> str:
    shown = [f"{_reals(value.data)[at]:.6g}" for value in state]
    return ", ".join(f"{name}={text}" for name, text in zip(fold.state, shown, strict=True))
