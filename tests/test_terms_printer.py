"""Printed expressions read as a person would have written them, and parse to what they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqfuse.terms.nodes import Axis, Const, Expr, Load, Local, Program, Reduce, Scalar, Size, call
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import show, show_program

SOFTMAX = "y[i, j] = exp(x[i, j] - max[j](x[i, j])) / sum[j](exp(x[i, j] - max[j](x[i, j])))"

PROGRAMS = [
    SOFTMAX,
    "y = sum[i](x[i])",
    "y[i] = sqrt(sum[j](sq(x[i, j])))",
    "O[h, i] = where((j0 <= i) & (i - j0 < 4096), slope[h] * (j0 - i), -inf)",
    "Q: f16[b, h, i, d]\nS[b, h, i, j] = sum[d](Q[b, h, i, d] * K[b, h // g, j, d]) * scale",
    "y[b, j, d] = K[page[b, j // P], j % P, d]",
    "T[i] = sum[j](x[i, j])\ny[j] = T[j]\nz[j] = T[j] + 1",
    "k: axis[i]\nhk: axis[i]\ny[i] = sum[k](x[i + k])",
    "y: i32[i]\ny[i] = argmax[j](x[i, j])",
    "y: f16[i]\ny[i] = x[i]\nz[i] = bf16(x[i])",
    "pos: i64\ny[d] = x[pos, d] * 1e-05 - -2 + -x[0, d]",
    "a[i] = logsumexp[j](x[i, j])\nb[i] = var[j](x[i, j])\nreturn b, a",
    "y[i] = any[j](x[i, j] > 0 or not x[i, j] < -1)",
    "s[i] = mean[j, k](x[i, j, k]) ** -2",
]


def same(left: Program, right: Program) -> bool:
    """Whether two programs are equal in everything but their text."""
    return replace(left, source="") == replace(right, source="")


@pytest.mark.parametrize("source", PROGRAMS)
def test_round_trip(source: str) -> None:
    program = parse(source)
    again = parse(show_program(program))
    assert same(program, again)
    assert show_program(again) == show_program(program)


def test_round_trip_can_fail() -> None:
    assert not same(parse("y[i] = x[i] - (a - b)"), parse("y[i] = x[i] - a - b"))


def test_text_of_a_program() -> None:
    source = "Q: f16[h, i, d]\nT[h, i] = sum[d](Q[h, i, d] * w[h // g, d])\ny[d, h] = T[h, d]"
    assert (
        show_program(parse(source))
        == "Q: f16[h, i, d]\ng: i64\nd_1: axis[d]\ny[d, h] = sum[d_1](Q[h, d, d_1] * w[h // g, d_1])"
    )


@pytest.mark.parametrize(
    "text",
    [
        "a - (b - c)",
        "a - b - c",
        "a * (b / c)",
        "a * b / c",
        "(a + b) * c",
        "-a * b",
        "-(a * b)",
        "-(a + b)",
        "--a",
        "a + -b",
        "a - -1",
        "-inf",
        "2 * pi",
        "nan",
        "max(a, b, c)",
        "max(a, max(b, c))",
        "min(max(a, b), c)",
        "a < b and b < c",
        "(a < b) == (b < c)",
        "a < b and (b < c or c < a)",
        "not a < b",
        "not (a < b or b < c)",
        "(not a < b) == (b < c)",
        "a // 2 % 3",
        "a // (b % c)",
        "finite(a) * invertible(b)",
        "f8e4m3(a / 448.0)",
        "where(a < b, 1, 0)",
        "sum[i, j](x[i, j] * N(i))",
        "sum[i](max[i](x[i, 0]) - x[i, 0])",
        "sum[i](sum[i](x[i, 0]) * x[i, 0])",
        "sum[i](sum[i](x[i, 0]))",
        "x[a // 2 + 1, 0]",
    ],
)
def test_no_more_parentheses_than_needed(text: str) -> None:
    (output,) = parse(f"y = {text}").outputs
    assert show(output.expr) == text


def test_terms_that_only_rewriting_makes() -> None:
    assert show(call("div", Const(1), Load("stored1", ()))) == "1 / stored1"
    m = Local("m", ("i",))
    assert show(call("exp", call("sub", m, Local("m_new", ("i",))))) == "exp(m - m_new)"
    assert show(call("neg", Const(-1))) == "-(-1)"
    assert str(call("mul", Scalar("c"), call("add", Const(1), Size("j")))) == "c * (1 + N(j))"


X = Load("x", (Axis("i"), Axis("j")))
LEAVES = [
    X,
    Scalar("c"),
    Axis("i"),
    Axis("j"),
    Const(2),
    Const(-1),
    Const(0.5),
    Const(float("-inf")),
    Size("j"),
]
BINARY = ["add", "sub", "mul", "div", "floordiv", "mod", "maximum", "minimum", "lt", "eq", "and", "or"]


def extended(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    """Expressions one level deeper."""
    negatable = inner.filter(lambda e: not isinstance(e, Const))
    return st.one_of(
        st.builds(call, st.sampled_from(BINARY), inner, inner),
        st.builds(call, st.sampled_from(["exp", "sq", "not", "f16", "finite"]), inner),
        negatable.map(lambda e: call("neg", e)),
        st.builds(lambda a, b, c: call("where", a, b, c), inner, inner, inner),
        st.builds(
            lambda op, axis, body: Reduce(op, axis, body),
            st.sampled_from(["sum", "max"]),
            st.sampled_from("jk"),
            inner,
        ),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(st.sampled_from(LEAVES), extended, max_leaves=12))
def test_every_expression_parses_to_itself(expr: Expr) -> None:
    (output,) = parse(f"y[i, j] = {show(expr)}").outputs
    assert output.expr is expr
