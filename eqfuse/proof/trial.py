"""Runs the merge of a group on numbers: what its guards do.

Steps of a derivation are equations of real numbers, and guards (`finite`, `invertible`, `where`) are what a kernel does
where they have no value: while a maximum is -inf, or a scale 0. Whether a guard is right is not seen on the term that it
stands in, but on what the states are in the end. So the states of three parts of the axis are computed by the
definitions, and by `update`, `combine` and `finish`, in float64 on leaves that are 0, infinite, masked out or ordinary, and
compared: infinities and NaN too. The interpreter of expressions is what is trusted here; no rule and no guard of the
compiler is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

from eqfuse.proof.elaborate import AT, free_names
from eqfuse.proof.nodes import GroupProof
from eqfuse.proof.syntax import Term, term, walk
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import all_unpacked, combined, identity
from eqfuse.terms.functions import COMPARISONS, FUNCTIONS
from eqfuse.terms.integers import in_short
from eqfuse.terms.interpreter import TRIAL, Env, Value, evaluate_expr, expand
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Local, Reduce, Size, call
from eqfuse.threads import cached

PARTS = ((2, 3), (1, 1), (0, 2), (3, 0))
"""Positions of the two parts of the axis."""
OTHER_AXES, FEW = 2, 8
"""Positions of every other axis, where there are few; else it has one."""
TRIALS = 72
CLOSE = 1e-6
"""Relative difference that rounding explains: leaves are of ordinary size."""
FUNCTION: Mapping[str, str] = {row.constructor: row.name for row in FUNCTIONS.values() if row.constructor}
TRUTHS = frozenset({"and", "or", "not"})

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Mismatch:
    """A value that is not what the definition of a state says."""

    state: str
    kind: str
    expected: float
    found: float

    def __str__(self) -> str:
        return f"where leaves are 0, infinite or masked, it gives {self.found:g} for {self.expected:g}"


@dataclass(frozen=True)
class Trial:
    """One group with what its names stand for (see `examine`)."""

    group: GroupProof
    values: Mapping[str, Term]

    @cached
    def axes(self) -> tuple[str, ...]:
        """Axes that something in the group is along."""
        bound = {node.words[1] for node in walk(*self._terms()) if node.head == "Red"} | {self.group.axis}
        ranks = {text for node in walk(*self._terms()) for text in self._ranks(node)}
        return tuple(sorted(bound | ranks))

    @cached
    def extremes(self) -> frozenset[str]:
        """Leaves of which the group has the greatest or least: they may be infinite, as scores that are masked out are.
        Where others are, a merge may have 0 * inf behind a mask that the program has not."""
        bodies = [s.body for s in self.group.states if s.op in ("max", "min")]
        return frozenset(node.words[0] for node in walk(*bodies) if node.head == "Leaf")

    @cached
    def others(self) -> int:
        """Positions of the other axes."""
        return OTHER_AXES if len(self.axes) <= FEW else 1

    def _ranks(self, node: Term) -> Iterator[str]:
        """The axis along which a packed state is a list: it is the position that stands first in a pair."""
        if node.head == "Apply2" and node.words == ("pair",) and node.args[0].head == "Leaf":
            text = node.args[0].words[0]
            if text.isidentifier() and text not in self.values:
                yield text

    def _terms(self) -> list[Term]:
        found: list[Term] = []
        for s in self.group.states:
            merged = [m.value for m in (s.update, s.combine) if m is not None]
            found += [s.body, *merged, *([] if s.finish is None else [s.finish])]
        return found

    def mismatch(self) -> Mismatch | None:
        """The first state that the merge does not give, in any trial."""
        return next((found for sizes in PARTS for found in self._of_parts(*sizes)), None)

    def _of_parts(self, first: int, second: int) -> Iterator[Mismatch]:
        size = first + second
        seed = crc32(repr((self.group.axis, first, second)).encode())
        reader = _Reader(self, size, np.random.default_rng(seed), {}, {})
        a, b, whole = np.arange(first), np.arange(first, size), np.arange(size)
        fused = {s.name: s for s in self.group.states}
        exact = self._defined(reader, whole)
        start = {s.name: Value((), np.asarray(float(identity(s.op).value))) for s in self.group.states}
        of_a = self._updated(reader, a, start) if first else start
        of_b = self._updated(reader, b, start) if second else start
        rolled = self._updated(reader, b, of_a) if second else of_a
        sides = {f"{n}_a": v for n, v in of_a.items()} | {f"{n}_b": v for n, v in of_b.items()}
        joined = self._merged(reader, whole, sides, "combine")
        for kind, states in (("update", rolled), ("combine", joined)):
            for name, state in fused.items():
                if state.auxiliary:
                    continue
                found = states[name]
                if state.finish is not None:
                    found = reader.run(state.finish, whole, states)
                yield from self._compared(reader, name, kind, exact[name], found)

    def _defined(self, reader: _Reader, at: npt.NDArray[np.int64]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for s in self.group.states:
            found[s.name] = reader.run(term("Red", (s.op, self.group.axis, "B"), (s.body,)), at, found)
        return found

    def _updated(
        self, reader: _Reader, at: npt.NDArray[np.int64], old: Mapping[str, Value]
    ) -> dict[str, Value]:
        return self._merged(reader, at, old, "update")

    def _merged(
        self, reader: _Reader, at: npt.NDArray[np.int64], old: Mapping[str, Value], kind: str
    ) -> dict[str, Value]:
        """New values of all states, each once those are there that it reads."""
        found: dict[str, Value] = {}
        waiting = {s.name: s.update if kind == "update" else s.combine for s in self.group.states}
        while waiting:
            for name, merged in list(waiting.items()):
                assert merged is not None
                reads = {n.words[0] for n in walk(merged.value) if n.head == "Local"}
                if not reads & {f"{other}_new" for other in waiting}:
                    known = {**old, **{f"{n}_new": value for n, value in found.items()}}
                    found[name] = reader.run(merged.value, at, known)
                    del waiting[name]
        return found

    def _compared(
        self, reader: _Reader, state: str, kind: str, expected: Value, found: Value
    ) -> Iterator[Mismatch]:
        dims = tuple(sorted({*expected.dims, *found.dims} - {TRIAL}))
        env = reader.env(np.arange(reader.size), {})
        left, right = (expand(each, (TRIAL, *dims), env) for each in (expected, found))
        wrong = ~_agree(left, right)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            yield Mismatch(state, kind, float(left[at]), float(right[at]))


def _agree(expected: Reals, found: Reals) -> npt.NDArray[np.bool_]:
    """Whether values are equal. Where the definition has an infinity or NaN, a merge may have NaN, and an infinity for NaN:
    inf - inf is added up in another order. A number it never has there."""
    with np.errstate(invalid="ignore"):
        close = np.abs(expected - found) <= CLOSE * np.maximum(1.0, np.abs(expected))
    lost = np.isnan(found) | (np.isnan(expected) & np.isinf(found))
    agreed: npt.NDArray[np.bool_] = np.where(np.isfinite(expected), close, (expected == found) | lost)
    return agreed


@dataclass(frozen=True)
class _Reader:
    """Terms as expressions over leaves that have been drawn."""

    trial: Trial
    size: int
    rng: np.random.Generator
    tensors: dict[str, Reals]
    expressions: dict[tuple[Term, bool], Expr]

    def run(self, root: Term, at: npt.NDArray[np.int64], known: Mapping[str, Value]) -> Value:
        """The value of a term where `at` are the positions of the axis."""
        expr = self.expression(root, known)
        return evaluate_expr(expr, self.env(at, known))

    def env(self, at: npt.NDArray[np.int64], known: Mapping[str, Value]) -> Env:
        axis = self.trial.group.axis
        extents = {**dict.fromkeys(self.trial.axes, self.trial.others), axis: self.size}
        named = {name: (value.dims, value.data) for name, value in known.items()}
        return Env(FloatDomain(), self.tensors, {}, extents, positions={axis: at}, locals=named, batch=TRIALS)

    def expression(self, root: Term, known: Mapping[str, Value]) -> Expr:
        for node in walk(root):
            for truth in (False, True):
                if (node, truth) not in self.expressions or node.head == "Local":
                    self.expressions[node, truth] = self._made(node, truth, known)
        return self.expressions[root, False]

    def _made(self, node: Term, truth: bool, known: Mapping[str, Value]) -> Expr:
        def below(index: int, truth: bool = False) -> Expr:
            return self.expressions[node.args[index], truth]

        match node.head, node.words:
            case "Num", (text,):
                return Const(in_short(float(text)))
            case "Leaf", (text,):
                leaf = self._leaf(node, text)
                return call("ne", leaf, Const(0)) if truth else leaf
            case "Local", (name,):
                return Local(name, known[name].dims if name in known else ())
            case "Red", (op, axis, _):
                return Reduce(op, axis, below(0))
            case "Inv", _:
                return call("div", Const(1), below(0))
            case "Ratio", _:
                return call("div", below(0), below(1))
            case "Delta", _:
                return call("sub", below(0), below(1))
            case "Where", _:
                return call("where", below(0, True), below(1), below(2))
            case "Cast", _:
                return below(0)
            case "Apply1", (fn,) if fn.endswith(AT):
                return _element(fn, all_unpacked(below(0)))
            case (("Apply1" | "Apply2"), (fn,)):
                made: Expr = Call(fn, tuple(below(index, fn in TRUTHS) for index in range(len(node.args))))
                made = combined(made)  # what a function of a registered reduction stands for
                return made if fn in COMPARISONS or fn in TRUTHS or not truth else call("ne", made, Const(0))
        return Call(FUNCTION[node.head], tuple(below(index) for index in range(len(node.args))))

    def _leaf(self, node: Term, text: str) -> Expr:
        axes = self.trial.axes
        if text in axes and text not in self.trial.values:
            return Axis(text)
        if text.startswith("N(") and text[2:-1] in axes:
            return Size(text[2:-1])
        names = free_names(node, self.trial.values)
        dims = tuple(axis for axis in axes if axis in names)
        key = f"leaf {text}"
        if key not in self.tensors:
            shape = tuple(self.size if axis == self.trial.group.axis else self.trial.others for axis in dims)
            self.tensors[key] = _drawn((TRIALS, *shape), self.rng, text in self.trial.extremes)
        return Load(key, tuple(Axis(axis) for axis in dims))


def _element(tensor: str, index: Sequence[Expr]) -> Expr:
    """A number for every index, of a tensor that has every position."""
    phase: Expr = Const(crc32(tensor.encode()) % 997)
    for place, part in enumerate(index, start=1):
        phase = call("add", phase, call("mul", Const(1.0 / place), part))
    return call("sin", phase)


def _drawn(shape: tuple[int, ...], rng: np.random.Generator, infinite: bool) -> Reals:
    """By trial: ordinary numbers; small integers, many 0; positive ones; zeros and few others; some -inf; some inf; lines of
    -inf; 0 and 1. Without `infinite`, ordinary ones for infinities."""
    kinds = 8
    kind = np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1)) % kinds
    ordinary = rng.uniform(-2, 2, shape)
    whole = rng.integers(-2, 3, shape).astype(np.float64)
    positive = rng.uniform(0.5, 2, shape)
    few = np.where(rng.random(shape) < 0.7, 0.0, whole)
    some = rng.random(shape)
    alike = rng.random((shape[0], *(1,) * (len(shape) - 1)))
    drawn = np.select(
        [kind == k for k in range(kinds)],
        [
            ordinary,
            whole,
            positive,
            few,
            np.where(some < 0.4, -np.inf, ordinary),
            np.where(some < 0.2, np.inf, ordinary),
            np.where(alike < 0.5, -np.inf, np.where(some < 0.1, np.inf, positive)),
            (some < 0.5).astype(np.float64),
        ],
    )
    return drawn if infinite else np.where(np.isinf(drawn), ordinary, drawn)


class Untried(Exception):
    """A group that no interpreter runs: a name in it is none of the language."""


def tried(group: GroupProof, values: Mapping[str, Term]) -> Mismatch | None:
    """What the merge of a group gives that its definitions do not; None where it gives what they do. Raises Untried for
    terms that mean nothing."""
    try:
        return Trial(group, values).mismatch()
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        raise Untried(f"its merge cannot be run: {type(error).__name__}: {error}") from None
