"""Programs that are proved equal, with no trial: which are, which are not, and that wrong steps prove nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.extend.worlds import World
from eqfuse.limits import OverLimit
from eqfuse.proof import meeting
from eqfuse.proof.meeting import EVERYWHERE, STRUCTURE, met
from eqfuse.proof.record import Recorder, RuleSets
from eqfuse.rules.catalogue import EVERY
from eqfuse.rules.egraph.saturate import TooManyTerms, session
from eqfuse.rules.engine import Engine
from eqfuse.rules.meeting import in_force, meet
from eqfuse.rules.relations import RELATIONS
from eqfuse.rules.rule import Rewrite, Rule, RuleSet
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.nodes import Expr
from eqfuse.terms.parser import parse
from eqfuse.terms.python import parsed
from eqfuse.verify.alike import alike

RULES: Mapping[str, Rule] = {rule.name: rule for ruleset in EVERY for rule in ruleset.rules}


def pairs_of(left: str, right: str) -> list[tuple[Expr, Expr]]:
    return alike(parse(left), parse(right))


def rules_of(left: str, right: str) -> tuple[str, ...] | None:
    return met(pairs_of(left, right))


PROVED: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "root of a square": ("y[i] = sqrt(sq(x[i] + z[i]))", "y[i] = abs(x[i] + z[i])", ("sqrt-square",)),
    "order of terms": ("y[i] = tanh(x[i] + z[i])", "y[i] = tanh(z[i] + x[i])", ("commute-terms",)),
    "a factor": ("y[i] = sum[j](x[i,j] * s)", "y[i] = s * sum[j](x[i,j])", ("hoist-factor",)),
    "sums commute": (
        "y = sum[i](sum[j](x[i] * w[i,j]))",
        "y = sum[a](sum[b](w[b,a] * x[b]))",
        ("commute-sums", "commute-factors"),
    ),
    "a mask": (
        "y[i] = where(x[i] > 0, x[i] * z[i], 0)",
        "y[i] = where(x[i] > 0, x[i], 0) * z[i]",
        ("mask-factor",),
    ),
    "a mean of squares": (
        "y[i] = mean[j](sq(x[i,j])) - sq(mean[j](x[i,j]))",
        "y[i] = mean[j](sq(x[i,j] - mean[j](x[i,j])))",
        ("variance", "one-times"),
    ),
    "the inverse of a softplus": (
        "y[i] = exp(log(1 + exp(x[i]))) - 1",
        "y[i] = 1 + exp(x[i]) - 1",
        ("exp-log",),
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_programs_that_meet_are_equal_with_no_trial(name: str) -> None:
    left, right, rules = PROVED[name]
    found = eq.equivalent(left, right)
    assert found.ok and found.grade == "proved" and found.trials == 0 and found.bound == 0.0
    assert found.proof == f"they met in the e-graph, by {', '.join(rules)}"
    assert found.proof in str(found) and "proved for all lengths" in str(found) and "overflow" in str(found)
    assert eq.equivalent(left, right, prove=False).grade == "bounded"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("y[i] = sum[j](x[i,j] / z[j])", "y[a] = sum[b](x[a,b] / z[b])"),
        ("y[i] = sum[j](x[i,j] / sum[j](x[i,j]))", "y[i] = sum[j](x[i,j] / sum[k](x[i,k]))"),
        ("y[i] = mean[j](x[i,j])", "y[k] = sum[l](x[k,l]) / N(l)"),
        ("y[i] = sqrt(0 - sq(x[i]) - 1)", "y[i] = sqrt(0 - sq(x[i]) - 1)"),
        ("y[i] = argmax[j](x[i,j])", "y[k] = argmax[l](x[k,l])"),
    ],
)
def test_the_same_program_in_other_names(left: str, right: str) -> None:
    assert eq.equivalent(left, right).proof == "they are the same program"


UNPROVED: Mapping[str, tuple[str, str]] = {
    "a value that one has alone": ("y[i] = 0 * log(x[i])", "y[i] = 0 * x[i]"),
    "a division": ("y[i] = sum[j](x[i,j] / z[i])", "y[i] = sum[j](x[i,j]) / z[i]"),
    "an exponential of an infinity": (
        "y[i] = exp(where(x[i] > 0, x[i], -inf)) * exp(-where(x[i] > 0, x[i], -inf))",
        "y[i] = 1 + 0 * x[i]",
    ),
    "a logarithm": ("y[i] = exp(log(x[i]))", "y[i] = x[i]"),
    "a pole": ("y[i] = 1 / (1 / x[i])", "y[i] = x[i]"),
    "a cast": ("y[i] = f16(x[i])", "y[i] = x[i]"),
    "a factor of a cast": ("y[i] = f16(x[i] * s)", "y[i] = f16(x[i]) * s"),
    "integers that wrap": ("n: i64[i]\ny[i] = sqrt(sq(n[i]))", "n: i64[i]\ny[i] = abs(n[i])"),
    "products that wrap": (
        "n: i64[i]\nm: i64[i]\ny[i] = x[i] * n[i] * m[i]",
        "n: i64[i]\nm: i64[i]\ny[i] = x[i] * (n[i] * m[i])",
    ),
    "a sign": ("y[i] = sqrt(sq(x[i]))", "y[i] = x[i]"),
    "other lengths": ("y = sum[i](sum[j](x[i,j]))", "y = sum[i](sum[j](x[j,i] / N(j) * N(i)))"),
    "another dimension": ("y[i] = sum[j](x[i,j])", "y[i] = sum[j](x[j,i])"),
    "an element that is read and has no effect": ("y[i] = x[i] + z[i] - x[i]", "y[i] = z[i]"),
    "an element that one reads alone": ("y[i] = x[i] + 0 * z[w[i]]", "y[i] = x[i] + 0 * w[i]"),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_what_does_not_hold_of_all_inputs_is_not_proved(name: str) -> None:
    left, right = UNPROVED[name]
    assert rules_of(left, right) is None and rules_of(right, left) is None
    assert not eq.equivalent(left, right).proof


def test_outputs_are_proved_together() -> None:
    left = "y[i] = x[i] + z[i]\nw[i] = sqrt(sq(x[i]))"
    assert eq.equivalent(left, "w[i] = abs(x[i])\ny[i] = z[i] + x[i]").proof
    assert rules_of(left, "w[i] = x[i]\ny[i] = z[i] + x[i]") is None


# -- rules --------------------------------------------------------------------------------------------


class Poles(FloatDomain):
    """Floats in which nothing is divided by 0: what is so has no value, as a real number has none."""

    def call(self, fn: str, args: Sequence[Any]) -> Any:
        found = super().call(fn, args)
        return np.where(np.asarray(args[-1]) == 0, np.nan, found) if fn in ("div", "log") else found


def special(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Numbers of which few are ordinary."""
    return rng.choice((-np.inf, -2.0, -1.0, 0.0, 0.5, 3.0, np.inf, np.nan), shape)


def holds_everywhere(rule: Rewrite) -> bool:
    """Whether both sides are the same for infinite values too, and have none for the same."""
    for domain in (FloatDomain("float64"), Poles("float64")):
        for seed, positions in itertools.product(range(8), ((1, 1), (2, 3), (7, 5))):
            with np.errstate(all="ignore"):
                world = World(rule, domain, special, seed, positions)
                left, right = (np.asarray(world.value(parsed(side))) for side in (rule.left, rule.right))
                apart = ~np.isclose(left, right, equal_nan=True)
            if (apart & world.met().reshape(-1, *(1,) * (apart.ndim - 1))).any():
                return False
    return True


@pytest.mark.parametrize("name", sorted(EVERYWHERE))
def test_rules_for_all_values_hold_of_infinities_and_where_there_is_none(name: str) -> None:
    rule = RULES[name]
    assert isinstance(rule, Rewrite) and holds_everywhere(rule)
    assert all(
        RELATIONS[condition.partition("(")[0]].name in (*STRUCTURE, "count")
        for condition in rule.when
        if "(" in condition
    )


@pytest.mark.parametrize(
    "name",
    [
        "zero-times",
        "times-zero",
        "inv-inv",
        "log-exp",
        "exp-log",
        "exp-neg-log",
        "exp-cancel-right",
        "multiply-out",
        "mask-factor",
    ]
    + ["factor-in", "cancel-positive"],
)
def test_other_rules_hold_of_finite_values_alone(name: str) -> None:
    rule = RULES[name]
    assert isinstance(rule, Rewrite) and name not in EVERYWHERE and not holds_everywhere(rule)


def test_rules_that_a_scope_adds_prove_nothing_and_those_that_it_leaves_out_are_not_in_force() -> None:
    left, right = "y[i] = sqrt(sq(x[i]))", "y[i] = abs(x[i])"
    with eq.rules(without=["sqrt-square"]):
        assert rules_of(left, right) is None
    own = eq.rule("log-of-square", "log(sq(exp(a)))", "a + a", why="the logarithm of e^2a is 2 a")
    with eq.rules(own):
        assert rules_of("y[i] = log(sq(exp(x[i])))", "y[i] = x[i] + x[i]") is None


WRONG: Mapping[str, tuple[Rewrite, str, str]] = {
    "a sign": (
        Rewrite("sqrt-square", "sqrt(sq(a))", "a", (), "wrong"),
        "y[i] = sqrt(sq(x[i]))",
        "y[i] = x[i]",
    ),
    "an order": (
        Rewrite("commute-terms", "a - b", "b - a", (), "wrong"),
        "y[i] = x[i] - z[i]",
        "y[i] = z[i] - x[i]",
    ),
    "a factor of the axis": (
        Rewrite("factor-in", "c * sum[D](m)", "sum[D](c + m)", ("fixed(c, D)",), "wrong"),
        "y[i] = s * sum[j](x[i,j])",
        "y[i] = sum[j](s + x[i,j])",
    ),
    "a condition left out": (
        Rewrite("abs-nonneg", "abs(a)", "a", (), "wrong"),
        "y[i] = abs(x[i])",
        "y[i] = x[i]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_steps_of_wrong_rules_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where saturation runs a wrong rule the values do meet, and the replay reads the right one."""
    wrong, left, right = WRONG[name]

    def changed(rulesets: RuleSets) -> RuleSets:
        return tuple(
            RuleSet(s.name, tuple(wrong if rule.name == wrong.name else rule for rule in s.rules))
            for s in rulesets
        )

    pairs = pairs_of(left, right)
    engine = Engine(lambda rulesets: session(changed(rulesets)))
    assert meet(pairs, engine) == (True,)
    assert meeting.proved(pairs, Recorder(changed)) is None
    monkeypatch.setattr(meeting, "in_force", lambda: changed(in_force()))
    assert meeting.proved(pairs, Recorder(changed)) == (wrong.name,)


def test_beyond_a_budget_trials_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, _ = PROVED["a factor"]

    def over(*arguments: object) -> None:
        raise OverLimit("over")

    def many(*arguments: object) -> None:
        raise TooManyTerms("many")

    for stop in (over, many):
        monkeypatch.setattr(meeting, "meet", stop)
        found = eq.equivalent(left, right)
        assert found.grade == "bounded" and found.trials and not found.proof
