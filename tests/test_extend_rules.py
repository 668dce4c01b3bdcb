"""Rules as data: tried before they are used, in force where they are asked for, and no better than shipped ones."""

from __future__ import annotations

import numpy as np
import pytest
from extend_kernels import outputs

import eqfuse as eq
from eqfuse.errors import ScheduleError
from eqfuse.extend.rules import check_rule, shipped
from eqfuse.rules.catalogue import EVERY
from eqfuse.rules.rule import Rewrite

VARIANCE = "v[i] = var[j](x[i, j])"
MOMENTS = "recentre-sum"
"""The shipped rule that says how a second moment moves to another centre."""

WRONG: dict[str, tuple[tuple[str, str, str, str], str]] = {
    "a shift counts once for each position": (
        ("wrong", "sum[j](a + c)", "c + sum[j](a)", "fixed(c, j)"),
        """rule 'wrong' is not true
    sum[j](a + c) = 12
    c + sum[j](a) = 6
    for a = [2, -3, 1, 2, -2, 3, 2]
        c = 1
the sides must be equal wherever the condition holds""",
    ),
    "a factor may be negative": (
        ("wrong", "max[j](c * a)", "c * max[j](a)", "fixed(c, j)"),
        "rule 'wrong' is not true",
    ),
    "a root has a sign": (("wrong", "sqrt(sq(a))", "a", ""), "rule 'wrong' is not true"),
    "it proves 0 = 1": (("wrong", "0", "1", ""), "rule 'wrong' proves 0 = 1\nthe two sides must be equal"),
    "a sum of nothing is no 1": (("wrong", "sum[j](0 * a)", "1", ""), "rule 'wrong' is not true"),
    "parts counted twice": (
        ("wrong", "sum[AB](a)", "sum[A](a) + sum[A](a)", ""),
        "rule 'wrong' is not true",
    ),
    "a condition that never holds": (
        ("wrong", "max[j](c * a)", "c * max[j](a)", "fixed(c, j), nonneg(c), c == -1"),
        """the condition of rule 'wrong' never holds: fixed(c, j), nonneg(c), c == -1
no sample meets it: look for facts that exclude each other""",
    ),
    "an unbound variable": (
        ("wrong", "max[j](a)", "max[j](a + b) - b", ""),
        """variable 'b' of rule 'wrong' is not bound (line 1)
    max[j](a + b) - b
                    ^
every name on the right stands on the left or in the condition""",
    ),
    "an unbound axis": (
        ("wrong", "exp(a)", "exp(a) * sum[j](1) / N(j)", ""),
        "axis 'j' of rule 'wrong' is not bound (line 1)",
    ),
    "a variable alone": (
        ("wrong", "a", "a + 0", ""),
        """the left side of rule 'wrong' is a variable
it would match everything: write a function or a reduction around it""",
    ),
    "no expression": (
        ("wrong", "exp(a", "a", ""),
        """syntax error: '(' was never closed (line 1)
    exp(a
       ^
a definition looks like S[i, j] = sum[d](Q[i, d] * K[j, d])""",
    ),
    "an unknown function": (
        ("wrong", "expp(a)", "a", ""),
        """unknown function 'expp' (line 1)
    expp(a)
    ^^^^
did you mean 'exp'?""",
    ),
    "an unknown reduction": (
        ("wrong", "summ[j](a)", "a", ""),
        """unknown reduction 'summ' (line 1)
    summ[j](a)
    ^^^^
did you mean 'sum'?""",
    ),
    "arity": (
        ("wrong", "exp(a, b)", "a", ""),
        """exp takes 1 argument, 2 given (line 1)
    exp(a, b)
    ^^^^^^^^^
give it as many as it takes""",
    ),
    "an unknown condition": (
        ("wrong", "exp(a)", "a", "likes(a)"),
        "unknown condition 'likes' (line 1)",
    ),
    "arity of a condition": (
        ("wrong", "exp(a)", "a", "fixed(a)"),
        """fixed takes 2 arguments, 1 given (line 1)
    fixed(a)
    ^^^^^^^^
write what it is about, then the axis""",
    ),
    "no condition": (
        ("wrong", "exp(a)", "a", "a + 1"),
        """this is not a condition (line 1)
    a + 1
    ^^^^^
write fixed(c, j), nonneg(c), p == q or p != q""",
    ),
    "a shipped name": (
        ("split-sum", "sum[AB](a)", "sum[A](a) + sum[B](a)", ""),
        "rule 'split-sum' is shipped already\nchoose another name",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_refused(case: str) -> None:
    (name, left, right, when), text = WRONG[case]
    with pytest.raises(eq.EqfuseError) as refused:
        eq.rule(name, left, right, when=when)
    assert str(refused.value).startswith(text)


RIGHT = {
    "twice": ("sum[j](a + a)", "2 * sum[j](a)", ""),
    "lse-shift": ("logsumexp[j](a + c)", "c + logsumexp[j](a)", "fixed(c, j)"),
    "root-of-square": ("sqrt(sq(a))", "a", "nonneg(a)"),
    "odd": ("tanh(-a)", "-tanh(a)", ""),
    "scaled": ("max[j](c * a)", "c * max[j](a)", "fixed(c, j), nonneg(c)"),
    "factored": ("sum[j](e)", "c * sum[j](m)", "factors(e, c, m, j)"),
    "of-parts": ("sum[AB](a + b)", "sum[A](a) + sum[B](a) + sum[AB](b)", ""),
    "ordered": ("max(a, b)", "b", "le(a, b)"),
    "inverse-of-log": ("exp(log(a))", "a", "positive(a)"),
    "ratio": ("a / a", "1", "positive(a)"),
    "cauchy-schwarz-of-one": ("sq(sum[j](c))", "N(j) * sum[j](sq(c))", "fixed(c, j)"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_are_taken(name: str) -> None:
    left, right, when = RIGHT[name]
    made = eq.rule(name, left, right, when=when, why="because")
    where = f" where {when}" if when else ""
    assert str(made) == f"{name}: {left} = {right}{where}    # because"


WRONG_FAR_OUT = {
    "product": ("a * b", "min(a * b, 1e12)", ""),
    "sum": ("sum[j](a)", "sum[j](min(a, 1e7))", ""),
    "tanh": ("tanh(a)", "min(tanh(a), 0.99999999)", ""),
    "max": ("max[P](a)", "max(max[P](a), -1e20)", ""),
    "size": ("N(j)", "min(N(j), 100000)", ""),
    "sum-of-one": ("sum[j](c)", "c * min(N(j), 5000)", "fixed(c, j)"),
    "squares": ("sum[P](a * a)", "where(sum[P](a * a) > 1e9, 1e9, sum[P](a * a))", ""),
}
"""Rules that hold of all numbers and sizes but large ones."""


@pytest.mark.parametrize("name", WRONG_FAR_OUT)
def test_rules_that_are_wrong_far_out_are_refused(name: str) -> None:
    left, right, when = WRONG_FAR_OUT[name]
    with pytest.raises(eq.EqfuseError, match=f"rule '{name}' is not true"):
        eq.rule(name, left, right, when=when)


def test_a_rule_with_a_side_that_nothing_reaches_has_to_be_declared() -> None:
    sides = "sum[j](a)", "where(N(j) > 10000000, 0, sum[j](a))"
    with pytest.raises(eq.EqfuseError, match="no sample decides a side of a branch: .*10000000 < N.j."):
        eq.rule("endless", *sides)
    assert eq.rule("endless", *sides, unverified="no axis is so long").unverified


SHIPPED = {each.name: each for ruleset in EVERY for each in ruleset.rules if isinstance(each, Rewrite)}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.slow
def test_shipped_rules_pass_what_registered_ones_have_to(name: str) -> None:
    """Over readable numbers, over reals, and in the field. The right sides of some have values where the left have none."""
    each = SHIPPED[name]
    check_rule(
        eq.Rule(name, each.left, each.right, ", ".join(each.when), each.why, None, each), defined=False
    )


def steiner() -> eq.Rule:
    """The parallel axes, as a textbook has it."""
    return eq.rule(
        "huygens-steiner",
        "sum[P](sq(x - c))",
        "s + 2 * (k - c) * (sum[P](x) - N(P) * k) + N(P) * sq(k - c)",
        when="fixed(c, P), fixed(k, P), s == sum[P](sq(x - k)), state(s), c != k",
        why="the moment about another centre",
    )


@pytest.mark.slow
def test_without_the_moments_lemma_the_variance_falls_back_and_a_public_rule_brings_it_back() -> None:
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32) + 5
    with eq.rules(without=[MOMENTS]):
        kernel = eq.compile(VARIANCE)
        assert {plan.schedule for plan in kernel.plans()} == {"resident", "multi_pass"}
        with pytest.raises(ScheduleError, match="no rule takes a factor or term of it out of the sum over j"):
            eq.compile(VARIANCE, prefer="rolling")
        with eq.rules(steiner()):
            kernel = eq.compile(VARIANCE, prefer="rolling")
            assert kernel.plan.schedule == "rolling" and kernel.certificate.ok
            assert kernel.rule_counts["huygens-steiner"] > 0
            np.testing.assert_allclose(outputs(kernel, x=x)[0], x.var(1), rtol=1e-4)
    assert eq.compile(VARIANCE, prefer="rolling").plan.schedule == "rolling"


def test_scopes_nest_and_end() -> None:
    mine = steiner()
    with eq.rules(mine) as outer:
        assert outer.added == (mine,)
        with eq.rules(without=["recentre"]) as inner:
            assert inner.added == (mine,) and inner.without == {"recentre"}
        with pytest.raises(eq.EqfuseError, match="rule 'huygens-steiner' is there twice"):
            eq.rules(steiner())
    assert "huygens-steiner" not in eq.compile(VARIANCE, verify=False).rule_counts
    with pytest.raises(eq.EqfuseError) as refused:
        eq.rules(without=["split-summ"])
    assert str(refused.value) == "there is no shipped rule 'split-summ'\ndid you mean 'split-sum'?"


def test_a_kernel_keeps_the_rules_that_it_was_compiled_with() -> None:
    with eq.rules(without=[MOMENTS]):
        kernel = eq.compile(VARIANCE)
    kernel(x=np.ones((2, 300), np.float32))
    assert {plan.schedule for plan in kernel.plans()} == {"resident", "multi_pass"}


@pytest.mark.slow
def test_a_rule_that_never_ends_is_stopped_and_named() -> None:
    grow = eq.rule("grow", "sum[j](a)", "sum[j](a + 1) - N(j)")
    with eq.rules(grow):
        kernel = eq.compile("y[i] = sum[j](x[i, j])")
    assert any("rule 'grow' matched" in reason for reason in kernel.why_not())


def test_what_is_taken_on_trust_is_in_the_certificate() -> None:
    trusted = eq.rule("trusted", "erf(-a)", "-erf(a)", unverified="erf is odd")
    mute = eq.rule("mute", "gelu(-a)", "gelu(a) - a", unverified="never matches here")
    with eq.rules(trusted, mute):
        kernel = eq.compile("y[i] = sum[j](erf(-(x[i, j] - max[j](x[i, j]))))", verify=False)
    assert kernel.certificate.unverified == ("rule trusted: erf is odd",)
    assert kernel.certificate.rules == ("trusted: erf(-a) = -erf(a)",)
    assert "added rules that took part:\n  trusted: erf(-a) = -erf(a)\n" in str(kernel.certificate)
    assert "  rule trusted: erf is odd" in str(kernel.certificate).splitlines()


def test_every_shipped_rule_can_be_left_out() -> None:
    assert shipped()["split-sum"] == "split"
    with eq.rules(without=["split"]):
        kernel = eq.compile("y[i] = sum[j](x[i, j])", verify=False)
    assert {plan.schedule for plan in kernel.plans()} == {"resident", "multi_pass"}
