"""Wrong registrations: each refused, and what the person who wrote it is told, word for word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from extend_kernels import is_registered, registered

import eqfuse as eq
from eqfuse.extend.define import forget
from eqfuse.terms.parser import parse
from eqfuse.terms.registry import REGISTERED

LARGEST: dict[str, Any] = {
    "state": "v, k",
    "lift": "x, j",
    "identity": "-inf, inf",
    "combine": "where(v1 >= v2, v1, v2), where(v1 >= v2, k1, k2)",
    "result": "v",
}
SUM = {"state": "s", "lift": "x", "identity": "0", "combine": "s1 + s2", "result": "s"}

REDUCTIONS: dict[str, tuple[dict[str, object], str]] = {
    "median": (
        {**SUM, "combine": "(s1 + s2) / 2"},
        """reduction 'wrong' is not associative
    combine(combine(a, b), c) = (s=0.25)
    combine(a, combine(b, c)) = (s=1)
    for a = (s=3); b = (s=-2); c = (s=0)
parts must combine to the same in any grouping; carry more state, or compute it in steps""",
    ),
    "difference": ({**SUM, "combine": "s1 - s2"}, "reduction 'wrong' is not associative"),
    "saturated both ways": (
        {**SUM, "combine": "max(min(s1 + s2, 2), -2)"},
        "reduction 'wrong' is not associative",
    ),
    "weighted": ({**SUM, "combine": "s1 + s2 / 2"}, "reduction 'wrong' is not associative"),
    "a mean without its count": (
        {
            **SUM,
            "state": "m, n",
            "lift": "x, 1",
            "identity": "0, 0",
            "combine": "(m1 + m2) / 2, n1 + n2",
            "result": "m",
        },
        "reduction 'wrong' is not associative",
    ),
    "identity of another": (
        {**SUM, "identity": "1"},
        """the identity of reduction 'wrong' is none
    combine(identity, a) = (s=4)
    a = (s=3)
    for a = (s=3), identity (s=1)
combining with it must change nothing""",
    ),
    "identity of a product": ({**SUM, "combine": "s1 * s2"}, "the identity of reduction 'wrong' is none"),
    "identity of a maximum": (
        {**SUM, "combine": "max(s1, s2)"},
        "the identity of reduction 'wrong' is none",
    ),
    "identity that is NaN with itself": (
        {
            "state": "m, s",
            "lift": "x, 1",
            "identity": "-inf, 0",
            "combine": "max(m1, m2), s1 * exp(m1 - max(m1, m2)) + s2 * exp(m2 - max(m1, m2))",
            "result": "m + log(s)",
        },
        """the identity of reduction 'wrong' is none
    combine(identity, identity) = (m=-inf, s=nan)
    identity = (m=-inf, s=0)
    for identity (m=-inf, s=0)
combining with it must change nothing""",
    ),
    "first of equals is not commutative": (
        {
            "state": "v, k",
            "lift": "x, j",
            "identity": "-inf, -1",
            "combine": "where(v1 >= v2, v1, v2), where(v1 >= v2, k1, k2)",
            "result": "k",
            "commutative": True,
        },
        """reduction 'wrong' is not commutative
    combine(a, b) = (v=2, k=0)
    combine(b, a) = (v=2, k=1)
    for a = (v=2, k=0); b = (v=2, k=1)
leave commutative=True out: parts are then combined in order""",
    ),
    "arity of the identity": (
        {**SUM, "identity": "0, 0"},
        "identity has 2 expressions for 1 state variable\ngive one expression for each state variable",
    ),
    "arity of the combination": (
        {**SUM, "state": "s, t"},
        "identity has 1 expression for 2 state variables\ngive one expression for each state variable",
    ),
    "a combination that reads the axis": (
        {**SUM, "combine": "s1 + s2 * j"},
        """combine may not read the axis (line 1)
    s1 + s2 * j
              ^
let lift put the position into the state""",
    ),
    "an unknown name in combine": (
        {**SUM, "combine": "s1 + t2"},
        """unknown name 't2' in combine (line 1)
    s1 + t2
         ^^
combine may read s1 s2""",
    ),
    "an unknown name in lift": (
        {**SUM, "lift": "x * scale"},
        """unknown name 'scale' in lift (line 1)
    x * scale
        ^^^^^
lift may read x""",
    ),
    "an argument in result": (
        {**SUM, "result": "s / x"},
        """unknown name 'x' in result (line 1)
    s / x
        ^
result may read s""",
    ),
    "an unknown function": (
        {**SUM, "combine": "expp(s1 + s2)"},
        """unknown function 'expp' (line 1)
    expp(s1 + s2)
    ^^^^
did you mean 'exp'?""",
    ),
    "an identity that is no number": (
        {**SUM, "identity": "s"},
        """unknown name 's' in identity (line 1)
    s
    ^
identity may read numbers alone""",
    ),
    "no result": ({**SUM, "result": ""}, "reduction 'wrong' has no result\nsay what it gives: result=\"v\""),
    "no list of names": (
        {**SUM, "state": "s t"},
        "state 's t' is not a list of names\nwrite state=\"a, b\"",
    ),
    "a state twice": ({**SUM, "state": "s, s"}, "state has 's' twice\ngive each its own name"),
    "ranks of no variable": (
        {**SUM, "ranks": "k"},
        """ranks 'k' is no state variable (line 1)
    k
    ^
write ranks="k\"""",
    ),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_wrong_reductions_are_refused(case: str) -> None:
    words, text = REDUCTIONS[case]
    with pytest.raises(eq.EqfuseError) as refused:
        eq.reduction("wrong", **words)  # type: ignore[arg-type]
    assert str(refused.value).startswith(text)
    assert not is_registered("wrong")


FAR_OUT = {
    "limit": ({"combine": "min(v1 + v2, 1e8)"}, "reduction 'wrong' is not associative"),
    "larger limit": ({"combine": "min(v1 + v2, 1e16)"}, "reduction 'wrong' is not associative"),
    "count": (
        {
            "state": "v, n",
            "lift": "x, 1",
            "identity": "0, 0",
            "combine": "v1 + v2, n1 + n2 - where(n1 + n2 > 100000, 1, 0)",
        },
        "reduction 'wrong' is not associative",
    ),
    "identity": (
        {"identity": "-1e30", "combine": "max(v1, v2)"},
        "the identity of reduction 'wrong' is none",
    ),
}
"""Laws that hold of all numbers and lengths but large ones."""


@pytest.mark.parametrize("case", FAR_OUT)
def test_reductions_that_are_wrong_far_out_are_refused(case: str) -> None:
    words, text = FAR_OUT[case]
    given = {"state": "v", "lift": "x", "identity": "0", "result": "v", **words}
    with pytest.raises(eq.EqfuseError) as refused:
        eq.reduction("wrong", **given)  # type: ignore[arg-type]
    assert str(refused.value).startswith(text)


def test_a_limit_that_counts_is_a_law() -> None:
    """Of numbers that are not below 0."""
    words = {"lift": "x, 1", "identity": "0, 0", "combine": "v1 + v2, min(n1 + n2, 3000)"}
    eq.reduction("capped_mean", state="v, n", result="v / n", **words)
    forget("capped_mean")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sum", "reduction 'sum' is built in\nchoose another name"),
        ("argmax", "reduction 'argmax' is built in\nchoose another name"),
        ("exp", "'exp' is a name of the language\nchoose another name"),
        ("two words", "'two words' cannot be the name of a reduction\nuse letters, digits and _"),
    ],
)
def test_names_that_are_taken(name: str, text: str) -> None:
    with pytest.raises(eq.EqfuseError) as refused:
        eq.reduction(name, **SUM)
    assert str(refused.value) == text


ORDER = {"state": "v, k", "lift": "x, j", "identity": "-inf, inf", "result": "k"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            {**ORDER, "order": "v"},
            """order 'v' is no order of the state (line 1)
    v
    ^
name each state variable once, as order="v, k"; "-" puts the least first""",
        ),
        (
            {**ORDER, "order": "v, -k", "combine": "v1, k1"},
            "reduction 'wrong' has an order and a combine\ngive one of them",
        ),
        (
            {**ORDER, "order": "-v, -k"},
            """the identity of reduction 'wrong' is none
    combine(identity, a) = (v=-inf, k=inf)
    a = (v=3, k=0)
    for a = (v=3, k=0), identity (v=-inf, k=inf)
combining with it must change nothing""",
        ),
        ({**SUM, "combine": "", "order": "s, "}, "order 's, ' is no order of the state"),
        (
            {"result": "sum[j](x)", "order": "x"},
            "reduction 'wrong' has an order and no state\ngive its state, or leave the order out",
        ),
    ],
)
def test_an_order_that_is_none(words: dict[str, object], text: str) -> None:
    with pytest.raises(eq.EqfuseError) as refused:
        eq.reduction("wrong", **words)  # type: ignore[arg-type]
    assert str(refused.value).startswith(text)
    assert not is_registered("wrong")


def test_a_name_twice() -> None:
    """The same words change nothing; others are refused, or replace the first, which older kernels keep."""
    first = {**LARGEST, "name": "once"}
    x = torch.tensor([[1.0, -3.0, 2.0]])
    with registered(**first):
        old = eq.compile("y[i] = once[j](x[i, j])", verify=False)
        assert eq.reduction(**first) is REGISTERED["once"]
        other = {
            **first,
            "combine": "where(v1 <= v2, v1, v2), where(v1 <= v2, k1, k2)",
            "identity": "inf, inf",
        }
        with pytest.raises(eq.EqfuseError) as refused:
            eq.reduction(**other)
        assert str(refused.value) == (
            "reduction 'once' is registered already, as another\nchoose another name, or replace it: replace=True"
        )
        eq.reduction(**other, replace=True)
        new = eq.compile("y[i] = once[j](x[i, j])")
        assert old(x=x).tolist() == [2.0] and new(x=x).tolist() == [-3.0]
        assert old(x=x.repeat(2, 3)).tolist() == [2.0, 2.0]
        with pytest.raises(eq.EqfuseError, match="its states are those of 'once_2'"):
            eq.compile("y[i] = once.v[j](x[i, j], j)")
        assert eq.reduction(**other) is REGISTERED["once"]


def test_what_exact_arithmetic_cannot_decide_has_to_be_declared() -> None:
    """log(exp(a) + exp(b)): the field has no logarithm of a sum of exponentials."""
    words = {**SUM, "combine": "log(exp(s1) + exp(s2))", "identity": "-inf"}
    with pytest.raises(eq.EqfuseError) as refused:
        eq.reduction("logadd", **words)
    assert str(refused.value) == (
        "reduction 'logadd': exact arithmetic cannot decide its laws\n"
        'floats agree; if that is enough, say why: unverified="reason"'
    )
    with registered("logadd", **words, unverified="a sum, by its logarithm"):
        kernel = eq.compile("y[i] = logadd[j](x[i, j])", verify=False)
        assert kernel.certificate.unverified[0] == "reduction logadd: a sum, by its logarithm"
        assert "taken on trust:" in str(kernel.certificate)


PROGRAMS = {
    "y[i] = mean_var[j](x[i, j])": """1 name for 2 values (line 1)
    y[i] = mean_var[j](x[i, j])
           ^^^^^^^^^^^^^^^^^^^^
the left side has a name for each value: v[i], k[i] = ...""",
    "y[i] = 1 + mean_var[j](x[i, j])": """mean_var gives 2 values (line 1)
    y[i] = 1 + mean_var[j](x[i, j])
               ^^^^^^^^^^^^^^^^^^^^
name them on a line of their own: a1[...], a2[...] = mean_var[...](...)""",
    "y[i], z[i] = sum[j](x[i, j])": """2 names for 1 value (line 1)
    y[i], z[i] = sum[j](x[i, j])
                 ^^^^^^^^^^^^^^^
the left side has a name for each value: v[i], k[i] = ...""",
    "y[i] = softmax_weighted[j](x[i, j])": """softmax_weighted[j] takes 2 arguments, 1 given (line 1)
    y[i] = softmax_weighted[j](x[i, j])
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^""",
    "y = argmax[i, j](x[i, j])": """argmax takes one axis, 2 given (line 1)
    y = argmax[i, j](x[i, j])
        ^^^^^^^^^^^^""",
    "y[i] = argmax.w[j](x[i, j], j)": """'argmax' has no state variable 'w' (line 1)
    y[i] = argmax.w[j](x[i, j], j)
           ^^^^^^^^^^^
its state is v, k""",
    "v[i, k], p[i, k] = topk[j, k](x[i, j])": """nothing says how many positions axis 'k' has (line 1)
    v[i, k], p[i, k] = topk[j, k](x[i, j])
                               ^
declare it: k: axis[8]""",
    "v[i], p[i] = topk[j](x[i, j])": """topk takes 2 axes, 1 given (line 1)
    v[i], p[i] = topk[j](x[i, j])
                 ^^^^^^^
write topk[j, k](...): the axis that it reduces, and that of the ranks""",
}


@pytest.mark.parametrize("source", PROGRAMS)
def test_wrong_uses_are_refused(source: str) -> None:
    with pytest.raises(eq.EqfuseError) as refused:
        parse(source)
    assert str(refused.value) == PROGRAMS[source]


def test_a_declared_extent_is_kept() -> None:
    import numpy as np

    kernel = eq.compile("k: axis[2]\nv[i, k], p[i, k] = topk[j, k](x[i, j])", verify=False)
    with pytest.raises(eq.EqfuseError, match="axis 'k' has size 2 in the program and 3 in sizes"):
        kernel(x=np.zeros((2, 5), np.float32), sizes={"k": 3})


BEYOND_SMALL_NUMBERS = {
    "limit": ("min(a, 10)", "a", ""),
    "number of positions": ("sum[j](c)", "7 * c", "fixed(c, j)"),
    "nothing below a threshold": ("relu(a - 20)", "0 * a", ""),
    "limit under a maximum": ("max[j](min(a, 500))", "max[j](a)", ""),
    "logarithms of what is negative": ("exp(log(a))", "a", ""),
    "roots of what is negative": ("sqrt(a) * sqrt(a)", "a", ""),
    "quotients by 0": ("a / a", "1", ""),
    "a little more": ("a * 1.0000000001", "a", ""),
}


@pytest.mark.parametrize("name", BEYOND_SMALL_NUMBERS)
def test_rules_are_tried_at_other_sizes_and_around_their_own_numbers(name: str) -> None:
    left, right, when = BEYOND_SMALL_NUMBERS[name]
    with pytest.raises(eq.EqfuseError, match="is not true"):
        eq.rule("too-narrow", left, right, when=when)


BEYOND_SMALL_PARTS: dict[str, dict[str, str]] = {
    "halved after forty": {
        "state": "s, n",
        "lift": "x, 1",
        "identity": "0, 0",
        "combine": "where(n1 + n2 > 40, (s1 + s2) / 2, s1 + s2), n1 + n2",
    },
    "least of what is below thirty": {"identity": "30", "combine": "min(s1, s2)"},
    "limited sum": {"identity": "0", "combine": "min(s1 + s2, 1000)"},
    "one more beyond a hundred": {"identity": "0", "combine": "s1 + s2 + where(abs(s1) > 100, 1, 0)"},
    "greatest of what is above minus fifty": {"identity": "-50", "combine": "max(s1, s2)"},
    "a counter that starts again": {
        "lift": "1 + 0 * x",
        "identity": "0",
        "combine": "where(s1 + s2 > 8, 0, s1 + s2)",
    },
}


@pytest.mark.parametrize("name", BEYOND_SMALL_PARTS)
def test_laws_are_tried_in_long_parts_and_around_the_numbers_of_a_reduction(name: str) -> None:
    made = {"state": "s", "lift": "x", "result": "s"} | BEYOND_SMALL_PARTS[name]
    with pytest.raises(eq.EqfuseError, match="is not associative|the identity of reduction"):
        eq.reduction("narrow", **made)
