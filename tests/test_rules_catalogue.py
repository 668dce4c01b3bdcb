"""Every rule is true of numbers, by the check that rules of users have to pass, and every rule is of use."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from rules_merges import derivation
from rules_programs import EXTENTS, FUSED, RULE_PROGRAMS, UNFUSED

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.extend import rules
from eqfuse.extend.worlds import World
from eqfuse.proof.meeting import met
from eqfuse.rules import scope
from eqfuse.rules.catalogue import EVERY
from eqfuse.rules.merge_search import derive_group
from eqfuse.rules.rule import Infer, Rewrite, Rule, RuleSet, to_egglog
from eqfuse.rules.states import axis_order
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import reference
from eqfuse.terms.nodes import REDUCTIONS, reductions
from eqfuse.terms.parser import parse
from eqfuse.verify.alike import alike

RULES: Mapping[str, Rule] = {rule.name: rule for ruleset in EVERY for rule in ruleset.rules}


def of_every_reduction(rule: Rule) -> list[Rule]:
    """A rule about any reduction as one about each."""
    if "fold[R, " not in str(rule):
        return [rule]
    return [
        replace(
            rule,
            when=tuple(fact.replace("fold[R, ", f"{op}[") for fact in rule.when),
            **{
                side: getattr(rule, side).replace("fold[R, ", f"{op}[")
                for side in (("left", "right") if isinstance(rule, Rewrite) else ("fact",))
            },
        )
        for op in REDUCTIONS
    ]


WIDER = ("exp-log", "exp-neg-log", "ratio-sqrt", "delta-log")
"""Rules whose right side has values where the left has none, as `exp(log(a))` has none for a < 0. They stand on the way to
a stage, and every stage is compared with the program: NaN has to be where the program has it (section 7 of
`docs/verification.md`, and the last test here). Of a rule of a user it is asked beforehand, as of two programs."""


def check_rule(rule: Rule, *, defined: bool = True) -> None:
    """As a rule of a user is checked at registration; a fact that is inferred, on the same samples. Raises EqfuseError
    for one that is refuted."""
    match rule:
        case Rewrite(name, left, right, when, why):
            made = scope.Rule(name, left, right, ", ".join(when), why, None, rule)
            rules.check_rule(made, defined=defined)
        case Infer(name, fact):
            for seed in range(3):
                with np.errstate(all="ignore"):
                    world = World(rule, FloatDomain("float64"), normal, seed)
                    says = world.holds(ast.parse(fact, mode="eval").body)
                    met = world.met()
                if (met & ~says).any() or not met.any():
                    raise EqfuseError(f"rule {name!r} is not true")


def normal(
    rng: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return rng.standard_normal(shape)


@pytest.mark.parametrize("name", RULES)
def test_rule_is_true_of_numbers(name: str) -> None:
    for rule in of_every_reduction(RULES[name]):
        check_rule(rule, defined=name not in WIDER)


@pytest.mark.parametrize("name", WIDER)
def test_rules_that_widen_where_values_are_do_so(name: str) -> None:
    with pytest.raises(EqfuseError) as refused:
        check_rule(RULES[name])
    assert "only the right side has a value there" in (refused.value.hint or "")


WRONG = (
    Rewrite("max-scaled", "max[D](e)", "c * max[D](m)", ("factors(e, c, m, D)",)),  # c may be negative
    Rewrite(
        "sum-shifted", "sum[D](e)", "c + sum[D](m)", ("addends(e, c, m, D)",)
    ),  # c counts once per position
    Rewrite(
        "swapped-repair",
        "sum[P](e)",
        "ratio(k, c) * sum[P](f)",
        ("factors(e, c, m, P)", "factors(f, k, m, P)"),
    ),
    Rewrite("split-twice", "sum[AB](e)", "sum[A](e) + sum[A](e)"),
    Rewrite("exp-ratio", "ratio(exp(a), exp(b))", "exp(delta(b, a))"),
    Rewrite("plain-cancel", "sum[P](g * (x - sum[P](w * x) * inv(sum[P](w))))", "0"),  # g is not w
    Infer("le-backwards", "le(max[AB](e), max[A](e))"),
    Infer("nonneg-difference", "nonneg(a - b)", ("nonneg(a)", "nonneg(b)")),
    Infer("factor-of-sum", "factors(a + b, c * d, m + n, X)", ("factors(a, c, m, X)", "factors(b, d, n, X)")),
    Infer("masked-less", "masked(sum[P](a), p)", ("r == sum[P](where(p, a, 0))",)),
    Infer("masked-max-0", "masked(max[P](where(p, 0, a)), p)"),
    Infer("fixed-either", "fixed(a * b, X)", ("fixed(a, X)",)),
)


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.name)
def test_wrong_rules_are_seen(rule: Rule) -> None:
    with pytest.raises(EqfuseError):
        check_rule(rule)


# -- rules as data ------------------------------------------------------------------------------------


def test_rules_have_names_of_their_own_and_reasons() -> None:
    rules = [rule for ruleset in EVERY for rule in ruleset.rules]
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.why for rule in rules)


@pytest.mark.parametrize(
    "word", ["softmax", "attention", "norm", "variance_of_softmax", "flash", "online", "gemm"]
)
def test_no_rule_knows_a_workload(word: str) -> None:
    assert not [rule.name for rule in RULES.values() if word in to_egglog(rule, "any").lower()]


@pytest.mark.parametrize(
    "rule",
    [
        Rewrite("bad", "median[D](e)", "e"),
        Rewrite("bad", "a if b else c", "a"),
        Rewrite("bad", "a", "b", ("likes(a, b)",)),
        Infer("bad", "fixed(a, 3)"),
    ],
    ids=["reduction", "syntax", "relation", "axis"],
)
def test_a_malformed_rule_is_refused_by_name(rule: Rule) -> None:
    with pytest.raises(ValueError, match="rule bad: "):
        to_egglog(rule, "any")


UNPREPARED = {
    "max_centred": "n[i] = max[j](x[i,j] - max[j](x[i,j]))",
    "max_shifted": "n[i] = max[j](x[i,j] - (max[j](x[i,j]) + v[i]))",
    "min_centred": "n[i] = min[j](x[i,j] - max[j](x[i,j]))",
}
"""Groups as they are written: what could leave a reduction is still inside."""

REASSOCIATED = (
    "y[i] = sum[k](-(sum[j](a[i,j] * b[j,k]) + d[k] + sum[j](e[i,j] * b[j,k])) * c[k])",
    "y[i] = sum[o](sum[k](sum[j](a[i,j] * b[j,k]) * c[k]))",
    "y[i] = sum[j](where((j == p[i]) & (i < 9), -(x[j] + sum[k](a[j,k] * b[k])), 0) * z[j])",
    "y[i] = sum[j](where(j <= i, x[i] * z[i], 0))",
    "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) * sum[j](c[j] * d[j,k]))",
    "i: axis[j]\ny[i,e] = sum[j](where(i == j, d[i], 0) * b[j,e])",
    "y[i,e] = sum[j](where(abs(i - j) <= 1, a[i,j], 0) * b[j,e])",
    "y[i] = sum[k](sum[j](where(j < 99, a[i,j], 0) * where(j < 99, b[j,k], 0)) * c[k])",
)
"""Programs whose sums and products have a cheaper order."""

MET = (
    ("max(x[i], z[i], w[i])", "max(w[i], z[i], x[i])"),
    ("min(x[i], z[i], w[i])", "min(w[i], z[i], x[i])"),
    ("exp(x[i] + z[i] - x[i]) * x[i]", "exp(z[i]) * x[i]"),
    ("abs(x[i] - z[i])", "max(x[i] - z[i], z[i] - x[i])"),
    ("where(x[i] < z[i], x[i], z[i])", "where(not (z[i] > x[i]), z[i], x[i])"),
    ("where(x[i] <= z[i], x[i], z[i])", "where(z[i] >= x[i], x[i], z[i])"),
    *(
        (
            both.format(f"{op}[j](where(j < 3, q[i,j], {out}))", f"{op}[j](where(j < 3, {out}, q[i,j]))"),
            f"{op}[j](q[i,j])",
        )
        for op, both, out in (
            ("sum", "{} + {}", "0"),
            ("max", "max({}, {})", "-inf"),
            ("min", "min({}, {})", "inf"),
        )
    ),
)
"""Values that are the same in two programs."""


@pytest.fixture(scope="module")
def fired() -> dict[str, int]:
    """Matches of every rule over all programs of these tests."""
    total: dict[str, int] = {}
    unfused = {name: source for name, (source, _) in UNFUSED.items()}
    for source in [*FUSED.values(), *unfused.values(), *RULE_PROGRAMS.values()]:
        found = derivation(source, EXTENTS)
        for name, count in found.derived.report.matches.items():
            total[name] = total.get(name, 0) + count
    for name in ("terms", "terms_of_choices", "shift_that_jumps"):
        apart = eq.compile(RULE_PROGRAMS[name], prefer="rolling", verify=False)
        for name, count in apart.rule_counts.items():
            total[name] = total.get(name, 0) + count
    for source in REASSOCIATED:
        for name in eq.compile(source, target="cpu", native="off").derivation.rules:
            total[name] = total.get(name, 0) + 1
    for pair in MET:
        for name in met(alike(*(parse(f"y[i] = {value}") for value in pair))) or ():
            total[name] = total.get(name, 0) + 1
    for source in UNPREPARED.values():
        program = parse(source)
        reduces = reductions(*(output.expr for output in program.outputs))
        group, report = derive_group("j", reduces, axis_order(program))
        assert group.merge is not None
        for name, count in report.matches.items():
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.parametrize("ruleset", EVERY, ids=lambda ruleset: ruleset.name)
@pytest.mark.slow
def test_every_rule_fires(ruleset: RuleSet, fired: Mapping[str, int]) -> None:
    assert [rule.name for rule in ruleset.rules if not fired.get(rule.name)] == []


@pytest.mark.parametrize(
    "source",
    ["y[i] = exp(log(x[i]))", "m = max[i](x[i])\ny = sum[i](exp(log(x[i]) - log(m)))"],
    ids=["itself", "a softmax of logarithms"],
)
def test_stages_have_no_value_where_the_program_has_none(source: str) -> None:
    x = torch.tensor([-1.0, 2.0, 3.0])
    found = np.isnan(eq.compile(source)(x=x).numpy())
    assert found.any() and np.array_equal(found, np.isnan(reference(parse(source), {"x": x})))
