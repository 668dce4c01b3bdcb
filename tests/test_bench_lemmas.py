"""Rules as lemmas for an SMT solver: right ones are proved for all sizes, wrong ones are not."""

from __future__ import annotations

import pytest

from bench.lemmas import NoLemma, lemmas, proved, split_lemma
from bench.lemmas_report import EXPECTED, judge
from eqfuse.rules.catalogue import EVERY
from eqfuse.rules.rule import Infer, Rewrite, Rule

pytest.importorskip("z3")

RULES = {rule.name: rule for ruleset in EVERY for rule in ruleset.rules}
PROVED = (
    "hoist-factor",
    "hoist-factor-max",
    "rescale",
    "reshift-max",
    "split-sum",
    "recentre-sum",
    "variance",
    "le-max",
    "ratio-exp",
    "fixed-add",
    "fixed-reduce",
    "fixed-apply2",
    "constant-inv",
    "bounded-mul",
    "bounded-quotient",
    "bounded-max",
    "bounded-exp",
)
WRONG = (
    Rewrite("max-scaled", "max[D](e)", "c * max[D](m)", ("factors(e, c, m, D)",)),
    Rewrite("sum-shifted", "sum[D](e)", "c + sum[D](m)", ("addends(e, c, m, D)",)),
    Rewrite(
        "swapped-repair",
        "sum[P](e)",
        "ratio(k, c) * sum[P](f)",
        ("factors(e, c, m, P)", "factors(f, k, m, P)"),
    ),
    Rewrite("split-twice", "sum[AB](e)", "sum[A](e) + sum[A](e)"),
    Rewrite("exp-ratio", "ratio(exp(a), exp(b))", "exp(delta(b, a))"),
    Rewrite("plain-cancel", "sum[P](g * (x - sum[P](w * x) * inv(sum[P](w))))", "0"),
    Infer("le-backwards", "le(max[D](e), e)", ()),
    Infer("nonneg-difference", "nonneg(a - b)", ("nonneg(a)", "nonneg(b)")),
    Infer("fixed-either", "fixed(a + b, X)", ("fixed(a, X)",)),
    Infer("fixed-by-another", "fixed(sum[D](e), X)", ("fixed(e, D)",)),
    Infer("fixed-choice", "fixed(where(p, a, b), X)", ("fixed(a, X)", "fixed(b, X)")),
    Infer("constant-along", "constant(a * b)", ("constant(a)", "fixed(b, X)")),
    Infer("bounded-either", "bounded(a * b)", ("bounded(a)",)),
    Infer("bounded-sum", "bounded(sum[D](a))", ("bounded(a)",)),
    Infer("bounded-inv", "bounded(inv(a))", ("bounded(a)",)),
    Infer("bounded-growth", "bounded(exp(a))", ("nonneg(a)",)),
    Infer("bounded-divided", "bounded(a * inv(m))", ("within(m, a)",)),
    Infer("shift-twice", "shifted(exp(a), exp(a + finite(max[ALL](a))), finite(max[ALL](a)), ALL)"),
    Infer("factor-of-sum", "factors(a + b, c * d, m + n, X)", ("factors(a, c, m, X)", "factors(b, d, n, X)")),
)


def test_reductions_may_be_split() -> None:
    assert [proved(lemma) for lemma in split_lemma()] == [True, True]


@pytest.mark.parametrize("name", PROVED)
def test_rules_are_proved_for_all_sizes(name: str) -> None:
    assert judge(RULES[name], None)["verdict"] == "proved"


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.name)
def test_wrong_rules_are_not_proved(rule: Rule) -> None:
    assert not all(proved(lemma) for lemma in lemmas(rule))


def test_a_rule_that_is_no_statement_about_numbers_has_no_lemma() -> None:
    with pytest.raises(NoLemma, match="where the search looks"):
        lemmas(RULES["varies-add-a"])


def test_a_lemma_is_written_as_smt_lib() -> None:
    (lemma,) = lemmas(RULES["one-times"])
    assert str(lemma) == (
        "; one-times: at one position\n(set-logic ALL)\n(declare-const v!a Real)\n"
        "(assert (not (= (* 1.0 v!a) v!a)))\n(check-sat)\n"
    )


def test_what_where_chooses_by_is_a_truth_value() -> None:
    (lemma,) = lemmas(Rewrite("w", "where(q, a, 0)", "where(r, where(s, a, 0), 0)", ("both(q, r, s)",)))
    assert str(lemma).splitlines()[2:6] == [f"(declare-const p!{name} Bool)" for name in "qrs"] + [
        "(declare-const v!a Real)"
    ]
    assert proved(lemma)


@pytest.mark.slow
def test_what_is_not_proved_has_a_reason() -> None:
    verdicts = {name: judge(rule, None) for name, rule in RULES.items()}
    left = {name for name, found in verdicts.items() if found["verdict"] == "not proved"}
    assert left == set(EXPECTED)
    assert sum(found["verdict"] == "proved" for found in verdicts.values()) > 170
