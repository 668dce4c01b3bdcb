"""Kinds, result dtypes and what does not type-check."""

from __future__ import annotations

import pytest

from eqfuse.errors import TypeCheckError
from eqfuse.terms.nodes import Local, call
from eqfuse.terms.parser import parse
from eqfuse.terms.types import check_dtypes, compute_dtype, kind, program_dtypes, result_dtype

DTYPES = {"x": "f32", "h": "f16", "b": "bf16", "q": "f8e4m3", "d": "f64", "n": "i32", "m": "i64", "p": "bool"}


def output(text: str) -> tuple[str, str]:
    """Kind and result dtype of `y[i] = text`."""
    (only,) = parse(f"y[i] = {text}").outputs
    return kind(only.expr, DTYPES), result_dtype(only.expr, DTYPES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x[i]", ("real", "f32")),
        ("h[i] * 2", ("real", "f16")),
        ("h[i] + b[i]", ("real", "f32")),
        ("h[i] + x[i]", ("real", "f32")),
        ("h[i] + d[i]", ("real", "f64")),
        ("q[i]", ("real", "f32")),
        ("q[i] * h[i]", ("real", "f16")),
        ("bf16(x[i])", ("real", "bf16")),
        ("f8e4m3(x[i])", ("real", "f8e4m3")),
        ("f16(x[i]) * b[i]", ("real", "f32")),
        ("f16(x[i]) * h[i]", ("real", "f16")),
        ("sum[j](h[j])", ("real", "f16")),
        ("h[n[i]]", ("real", "f16")),
        ("where(x[i] > 0, h[i], 0)", ("real", "f16")),
        ("where(x[i] > 0, 1, 0)", ("int", "i64")),
        ("where(x[i] > 0, p[i], False)", ("bool", "bool")),
        ("x[i] > 0", ("bool", "bool")),
        ("not p[i]", ("bool", "bool")),
        ("n[i]", ("int", "i32")),
        ("n[i] + 1", ("int", "i32")),
        ("max[j](n[j])", ("int", "i32")),
        ("sum[j](n[j])", ("int", "i64")),
        ("n[i] * m[i]", ("int", "i64")),
        ("n[i] + i", ("int", "i64")),
        ("i // 2 % 3 - N(i)", ("int", "i64")),
        ("abs(i - 3)", ("int", "i64")),
        ("n[i] / 2", ("real", "f32")),
        ("exp(i)", ("real", "f32")),
        ("sum[j](p[j])", ("int", "i64")),
        ("argmax[j](x[j])", ("int", "i64")),
        ("any[j](p[j])", ("bool", "bool")),
        ("i * scale", ("real", "f32")),
        ("inf", ("real", "f32")),
    ],
)
def test_kind_and_result_dtype(text: str, expected: tuple[str, str]) -> None:
    assert output(text) == expected


def test_locals_have_the_dtype_given() -> None:
    expr = call("add", Local("k", ()), Local("k", ()))
    assert (kind(expr, {"k": "i32"}), kind(expr, {})) == ("int", "real")


def test_arithmetic_is_f32_unless_an_input_is_f64() -> None:
    assert compute_dtype(["f16", "f8e4m3", "i64"]) == "f32"
    assert compute_dtype(["f16", "f64"]) == "f64"


def test_dtypes_of_inputs() -> None:
    program = parse("w: bf16[d]\ny[b, d] = K[page[b], d] * w[d] * K[b // g, d]")
    assert program_dtypes(program, {"K": "f16"}) == {"K": "f16", "page": "i64", "w": "bf16", "g": "i64"}


@pytest.mark.parametrize(
    ("source", "dtypes", "text"),
    [
        (
            "y[i] = x[k[i]]",
            {"k": "f32"},
            (
                "'k' is used in an index, so it holds integers; the tensor given is f32 (line 1)\n"
                "    y[i] = x[k[i]]\n"
                "           ^^^^^^^\n"
                "convert it to integers"
            ),
        ),
        (
            "y[i] = where(x[i], 1, 0)",
            {"x": "f32"},
            (
                "a condition is a real number (line 1)\n"
                "    y[i] = where(x[i], 1, 0)\n"
                "                 ^^^^\n"
                "compare it: where(x[i] != 0, ...)"
            ),
        ),
        (
            "y[i] = (x[i]>0) * x[i]",
            {},
            (
                "a truth value stands where a number is expected (line 1)\n"
                "    y[i] = (x[i]>0) * x[i]\n"
                "            ^^^^^^\n"
                "write where(x[i] > 0, 1, 0)"
            ),
        ),
        (
            "y[i] = where(x[i] > 0 & n[i], 1, 0)",
            {"n": "i32"},
            (
                "'and' takes truth values, this is an integer (line 1)\n"
                "    y[i] = where(x[i] > 0 & n[i], 1, 0)\n"
                "                        ^\n"
                "& and | bind more tightly than comparisons: write (a > 0) & (b > 0)"
            ),
        ),
        (
            "y[i] = where((x[i] > 0) & n[i], 1, 0)",
            {"n": "i32"},
            (
                "'and' takes truth values, this is an integer (line 1)\n"
                "    y[i] = where((x[i] > 0) & n[i], 1, 0)\n"
                "                              ^^^^\n"
                "compare it: (n[i] != 0)"
            ),
        ),
        (
            "y[i] = max[j](x[i, j] > 0)",
            {},
            (
                "'max' takes numbers, this is a truth value (line 1)\n"
                "    y[i] = max[j](x[i, j] > 0)\n"
                "           ^^^^^^^^^^^^^^^^^^^\n"
                "write any[j](...)"
            ),
        ),
        (
            "x: f16[i]\ny[i] = x[i]",
            {"x": "f32"},
            (
                "'x' is declared f16, the tensor given is f32 (line 1)\n"
                "    x: f16[i]\n"
                "    ^\n"
                "convert the tensor, or change the declaration"
            ),
        ),
        (
            "y: i32[i]\ny[i] = x[i]",
            {},
            (
                "'y' is declared i32, its value is a real number (line 1)\n"
                "    y: i32[i]\n"
                "    ^\n"
                "change the declaration"
            ),
        ),
    ],
)
def test_errors(source: str, dtypes: dict[str, str], text: str) -> None:
    with pytest.raises(TypeCheckError) as caught:
        check_dtypes(parse(source), dtypes)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "source",
    [
        "y[i] = sum[j](x[i, j] > 0)",
        "y[i] = where(x[i] > 0, x[i] < 1, 0)",
        "y[i] = (x[i] > 0) == (x[i] < 1)",
        "y[i] = f32(x[i] > 0)",
        "y: i64[i]\ny[i] = i",
        "y[b, j, d] = K[page[b, j // P], j % P, d]",
        "y[i, j] = table[abs(i - j)]",
    ],
)
def test_sound_programs_pass(source: str) -> None:
    check_dtypes(parse(source))
