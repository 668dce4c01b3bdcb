"""Proofs that values are equal: they meet in one class of an e-graph, and the steps between them are replayed.

The rules of the e-graph are for programs that are compared with what was written afterwards: some hold of finite values alone, as
0 a = 0 does. Here nothing comes afterwards. So a step counts where its rule holds of whatever stands there, infinite
or without a value too (`EVERYWHERE`), or where all that it is about has a finite value at all finite inputs (`is_defined`).
Between values of which no such steps are recorded there is no proof, though they have met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import inf, isfinite

from eqfuse import limits
from eqfuse.limits import OverLimit
from eqfuse.proof.check import Argument, Ground, Refused, Replay
from eqfuse.proof.congruence import Closure, Unproved
from eqfuse.proof.elaborate import reading
from eqfuse.proof.nodes import Chain, Inference
from eqfuse.proof.record import Recorder
from eqfuse.proof.syntax import Term, instance, walk
from eqfuse.rules.egraph.saturate import TooManyTerms
from eqfuse.rules.meeting import Pair, in_force, meet, name_of
from eqfuse.rules.tables.meet import MEET
from eqfuse.terms.functions import FUNCTIONS, Function
from eqfuse.terms.nodes import REDUCTIONS, Axis, Expr, Load, Scalar, Size

EVERYWHERE = frozenset(
    {
        *("one-times", "times-one", "zero-plus", "plus-zero", "neg-zero", "neg-neg", "exp-zero", "log-one"),
        *("inv-one", "sq-one", "sqrt-one", "abs-one", "square", "cube", "fourth-power", "sqrt-square"),
        *("commute-factors", "regroup-factors", "commute-terms", "regroup-terms", "negate-terms"),
        *("sum-terms", "commute-sums", "interchange-plain", "sum-fixed", "max-fixed", "min-fixed"),
        *("mask-terms", "mask-negated", "mask-sum", "commute-masks", "mask-twice"),
        *(rule.name for rule in MEET.rules if rule.name != "cancel-terms"),
    }
)
"""Rewrites whose sides are the same of infinite values, and without a value for the same ones: a division by 0 has none."""

STRUCTURE = frozenset({"fixed", "varies", "plain", "reduces", "want"})
"""Facts about how a term is made, whatever its value is."""


class Sign(IntEnum):
    """What is known of the sign of a value."""

    ANY = 0
    NONNEGATIVE = 1
    POSITIVE = 2


@dataclass(frozen=True)
class Values:
    """What is known of the values of terms, by how they are made of finite inputs; overflow and underflow are apart. `leaves` are what
    their leaves stand for."""

    leaves: Mapping[str, Expr]
    _defined: dict[Term, bool] = field(default_factory=dict)
    _signs: dict[Term, Sign] = field(default_factory=dict)

    def is_defined(self, root: Term) -> bool:
        """Whether a term has a finite value at all inputs."""
        for node in walk(root):
            if node not in self._defined:
                self._defined[node] = self._is_made_defined(node)
        return self._defined[root]

    def _is_made_defined(self, node: Term) -> bool:
        args = node.args
        if not all(self._defined[arg] for arg in args):
            return False
        match node.head, node.words:
            case "Num", (text,):
                return isfinite(float(text))
            case "Leaf", (text,):
                return text in self.leaves and _is_input(self.leaves[text])
            case "Red", (op, *_):
                return op in REDUCTIONS
            case (("Inv" | "Log"), _):
                return self.sign(args[0]) is Sign.POSITIVE
            case "Sqrt", _:
                return self.sign(args[0]) is not Sign.ANY
            case (("Apply1" | "Apply2"), (fn,)):
                return fn in FUNCTIONS and _is_total(FUNCTIONS[fn])
        return node.head in _TOTAL

    def sign(self, root: Term) -> Sign:
        """What is known of the sign of a term wherever it has a finite value."""
        for node in walk(root):
            if node not in self._signs:
                self._signs[node] = self._sign_of(node)
        return self._signs[root]

    def _sign_of(self, node: Term) -> Sign:
        signs = [self._signs[arg] for arg in node.args]
        match node.head, node.words:
            case "Num", (text,):
                return (
                    Sign.POSITIVE
                    if 0 < float(text) < inf
                    else Sign.NONNEGATIVE
                    if float(text) == 0
                    else Sign.ANY
                )
            case "Leaf", (text,):
                return Sign.POSITIVE if isinstance(self.leaves.get(text), Size) else Sign.ANY
            case "Exp", _:
                return Sign.POSITIVE
            case (("Sq" | "Abs"), _):
                return max(signs[0], Sign.NONNEGATIVE)
            case "Red", (op, *_) if op in REDUCTIONS:
                return signs[0]
            case (("Sqrt" | "Inv"), _):
                return signs[0]
            case "Add", _:
                return max(signs) if min(signs) is not Sign.ANY else Sign.ANY
            case "Mul", _:
                return min(signs)
            case "Max", _:
                return max(signs)
            case "Min", _:
                return min(signs)
            case "Where", _:
                return min(signs[1:])
        return Sign.ANY


def _is_total(row: Function) -> bool:
    """Whether a function is finite wherever its arguments are, whatever they are."""
    return (row.finite or row.result == "truth") and row.name not in ("floordiv", "mod")


_TOTAL = {row.constructor for row in FUNCTIONS.values() if row.constructor and _is_total(row)} | {"Where"}


def _is_input(leaf: Expr) -> bool:
    return isinstance(leaf, Axis | Load | Scalar | Size)


@dataclass
class DefinedReplay(Replay):
    """Replays steps of which each holds at all inputs."""

    values: Values = field(default_factory=lambda: Values({}))

    def admits(self, rule: str, values: Mapping[str, Argument]) -> bool:
        """Whether an instance of a rule may take part: see the head of this file."""
        if rule in EVERYWHERE:
            return True
        reading = self._reading(rule, "a step")
        about: list[Argument] = [*values.values()]
        if reading.fact is not None:
            if reading.fact.relation in STRUCTURE:
                return True
            about += reading.fact.at(values).args
        about += (instance(side, values) for side in reading.sides or ())
        return all(self.values.is_defined(part) for part in about if isinstance(part, Term))

    def _instance(self, inference: Inference, where: str) -> None:
        super()._instance(inference, where)
        if not self.admits(inference.rule, inference.values):
            raise Refused(where, f"{inference.rule} is for values that are finite at all inputs")


def met(pairs: Sequence[Pair]) -> tuple[str, ...] | None:
    """The rules by which both values of every pair are proved equal, in order of use; none where both are one and the same.
    None where some pair is not, as its values did not meet within the budget of a derivation, or no steps prove it; or where there is no pair."""
    if not pairs:
        return None
    if all(one is other for one, other in pairs):
        return ()
    try:
        with limits.derivation():
            return proved(pairs, Recorder()) if all(meet(pairs)) else None
    except (TooManyTerms, OverLimit):
        return None


def proved(pairs: Sequence[Pair], recorder: Recorder) -> tuple[str, ...] | None:
    """The rules of the steps that were recorded between the values of each pair; None where there are none that the replay admits."""
    leaves: dict[str, Expr] = {}
    terms = [tuple(_term(side, leaves) for side in pair) for pair in pairs]
    meet(pairs, recorder.engine)
    (tape,) = recorder.tapes
    replay = DefinedReplay(
        {rule.name: rule for ruleset in in_force() for rule in ruleset.rules},
        Ground(scalars=frozenset(text for text, leaf in leaves.items() if isinstance(leaf, Scalar))),
        values=Values(leaves),
    )
    firings = [f for f in tape.firings if replay.admits(f.clause.name, f.values)]
    closure = Closure(replace(tape, firings=firings))
    chains: list[Chain] = []
    for place, (one, other) in enumerate(terms):
        if [tape.names[name_of(place, side)] for side in (0, 1)] != [one, other]:
            return None
        try:
            chain = closure.chain(one, other)
            replay.chain(one, chain, other, f"pair {place}")
        except (Unproved, Refused):
            return None
        chains.append(chain)
    used = [step.inference.rule for chain in chains for step in chain]
    return tuple(dict.fromkeys(used))


def _term(expr: Expr, leaves: dict[str, Expr]) -> Term:
    return reading(expr, states=(), strict_casts=True, leaves=leaves, predicates=True)
