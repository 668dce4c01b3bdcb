"""Texts of errors in source programs, word for word."""

from __future__ import annotations

import pytest

from eqfuse.errors import BindError, EqfuseError, ParseError, Span, TypeCheckError, locate
from eqfuse.terms.parser import parse

CASES = [
    (
        "",
        ParseError,
        "the program is empty\nwrite at least one definition, for example y[i] = sum[j](x[i, j])",
    ),
    (
        "x: f32[i]",
        ParseError,
        "the program defines nothing\nwrite at least one definition, for example y[i] = sum[j](x[i, j])",
    ),
    (
        "y[i] = x[i, j]",
        ParseError,
        (
            "axis 'j' is not bound here (line 1)\n"
            "    y[i] = x[i, j]\n"
            "                ^\n"
            "reduce over it, as in sum[j](...), or add it to the axes on the left side; "
            "if it is a number, declare it: j: i32"
        ),
    ),
    (
        "y[i] = sum[j](x[i, j]) + j",
        ParseError,
        (
            "axis 'j' is not bound here (line 1)\n"
            "    y[i] = sum[j](x[i, j]) + j\n"
            "                             ^\n"
            "reduce over it, as in sum[j](...), or add it to the axes on the left side"
        ),
    ),
    (
        "\n    m[i] = max[j](x[i, j])\n    y[i] = expp(x[i, 0] - m[i])\n",
        ParseError,
        (
            "unknown function 'expp' (line 3)\n"
            "    y[i] = expp(x[i, 0] - m[i])\n"
            "           ^^^^\n"
            "did you mean 'exp'?"
        ),
    ),
    (
        "y[i] = smu[j](x[i, j])",
        ParseError,
        "unknown reduction 'smu' (line 1)\n    y[i] = smu[j](x[i, j])\n           ^^^^^^\ndid you mean 'sum'?",
    ),
    (
        "y[i] = median[j](x[i, j])",
        ParseError,
        (
            "unknown reduction 'median' (line 1)\n"
            "    y[i] = median[j](x[i, j])\n"
            "           ^^^^^^^^^\n"
            "reductions: sum max min prod mean var std logsumexp any all argmax argmin topk mean_var linear_recurrence linear_recurrence2 max_plus min_plus softmax_weighted"
        ),
    ),
    (
        "y[i] = exp(x[i], 2)",
        ParseError,
        "exp takes 1 argument, 2 given (line 1)\n    y[i] = exp(x[i], 2)\n           ^^^^^^^^^^^^",
    ),
    (
        "y[i] = where(x[i] > 0, 2)",
        ParseError,
        (
            "where takes 3 arguments, 2 given (line 1)\n"
            "    y[i] = where(x[i] > 0, 2)\n"
            "           ^^^^^^^^^^^^^^^^^^\n"
            "write where(condition, value if true, value if false)"
        ),
    ),
    (
        "y[i] = max(x[i])",
        ParseError,
        (
            "max takes two or more arguments, 1 given (line 1)\n"
            "    y[i] = max(x[i])\n"
            "           ^^^^^^^^^\n"
            "max[j](x) reduces over an axis; max(a, b) compares"
        ),
    ),
    (
        "y = sum(x[i])",
        ParseError,
        "sum needs the axes that it reduces (line 1)\n    y = sum(x[i])\n        ^^^^^^^^^\nwrite sum[j](...)",
    ),
    (
        "y[j] = sum[j]",
        ParseError,
        "sum[j] reduces nothing (line 1)\n    y[j] = sum[j]\n           ^^^^^^\nwrite sum[j](...)",
    ),
    (
        "y[i] = exp[i](x[i])",
        ParseError,
        (
            "'exp' does not reduce (line 1)\n"
            "    y[i] = exp[i](x[i])\n"
            "           ^^^^^^\n"
            "write exp(...) without axes"
        ),
    ),
    (
        "y = sum[j, j](x[j])",
        ParseError,
        (
            "axis 'j' is repeated (line 1)\n"
            "    y = sum[j, j](x[j])\n"
            "               ^\n"
            "each dimension needs an axis of its own"
        ),
    ),
    (
        "y[i, i] = x[i]",
        ParseError,
        (
            "axis 'i' is repeated (line 1)\n"
            "    y[i, i] = x[i]\n"
            "         ^\n"
            "each dimension needs an axis of its own"
        ),
    ),
    (
        "m[i] = max[j](x[i, j])\nreturn Z",
        ParseError,
        "output 'Z' is never defined (line 2)\n    return Z\n           ^\nthe program defines m",
    ),
    (
        "lse[i] = max[j](x[i, j])\nreturn les",
        ParseError,
        "output 'les' is never defined (line 2)\n    return les\n           ^^^\ndid you mean 'lse'?",
    ),
    (
        "y[i] = x[i]\nreturn x",
        ParseError,
        "'x' is an input (line 2)\n    return x\n           ^\nreturn names that the program defines",
    ),
    (
        "y[i] = z[i]\nz[i] = x[i]",
        ParseError,
        (
            "'z' is read before it is defined (line 1)\n"
            "    y[i] = z[i]\n"
            "           ^^^^\n"
            "it is defined on line 2; move that definition up"
        ),
    ),
    (
        "y[i] = (1 +\n   y[i])",
        ParseError,
        "'y' is defined by itself (line 2)\n    y[i])\n    ^^^^\na definition reads earlier ones, or in a recurrence itself at the position before or after: y[i-1]",
    ),
    (
        "y = 1\ny = 2",
        ParseError,
        "'y' is defined twice (line 2)\n    y = 2\n    ^\nit is defined on line 1; give this one another name",
    ),
    (
        "y[i] = x[i] * x[i, i]",
        TypeCheckError,
        (
            "'x' has 1 axis, 2 given (line 1)\n"
            "    y[i] = x[i] * x[i, i]\n"
            "                  ^^^^^^^\n"
            "it is read with that many before"
        ),
    ),
    (
        "x: f16[i, d]\ny[i] = x[i]",
        TypeCheckError,
        "'x' has 2 axes, 1 given (line 2)\n    y[i] = x[i]\n           ^^^^\nit is declared x: f16[i, d]",
    ),
    (
        "T[i, j] = x[i] * x[j]\ny[i] = T[i]",
        TypeCheckError,
        (
            "'T' has 2 axes, 1 given (line 2)\n"
            "    y[i] = T[i]\n"
            "           ^^^^\n"
            "it is defined as T[i, j] on line 1"
        ),
    ),
    (
        "y[i] = exp(x) + x[i]",
        TypeCheckError,
        "'x' is a tensor (line 1)\n    y[i] = exp(x) + x[i]\n               ^\nwrite its indices: x[...]",
    ),
    (
        "y[i] = x[i]**k",
        ParseError,
        (
            "an exponent must be a constant (line 1)\n"
            "    y[i] = x[i]**k\n"
            "                 ^\n"
            "write exp(y * log(x)) for an exponent that is not a constant"
        ),
    ),
    (
        "y[i] = x[i]**2.4",
        ParseError,
        (
            "unsupported exponent 2.4 (line 1)\n"
            "    y[i] = x[i]**2.4\n"
            "                 ^^^\n"
            "exponents are integers and halves up to 16; write exp(y * log(x)) for others"
        ),
    ),
    (
        "y[i] = x[i * i]",
        ParseError,
        (
            "this cannot be an index (line 1)\n"
            "    y[i] = x[i * i]\n"
            "             ^^^^^\n"
            "an index adds, scales by sizes, divides (//, %) by sizes, clamps (min, max), or reads a tensor"
        ),
    ),
    (
        "y[i] = x[:, i]",
        ParseError,
        (
            "this is not part of the language (line 1)\n"
            "    y[i] = x[:, i]\n"
            "             ^\n"
            "write an axis name for each dimension"
        ),
    ),
    (
        "y[i] = a[i] if x[i] > 0 else 0",
        ParseError,
        (
            "this is not part of the language (line 1)\n"
            "    y[i] = a[i] if x[i] > 0 else 0\n"
            "           ^^^^^^^^^^^^^^^^^^^^^^^\n"
            "write where(condition, a, b)"
        ),
    ),
    (
        "y[i] = torch.exp(x[i])",
        ParseError,
        (
            "this is not part of the language (line 1)\n"
            "    y[i] = torch.exp(x[i])\n"
            "           ^^^^^^^^^\n"
            "write functions without a module, exp(x), and a transpose by its indices, x[j, i]"
        ),
    ),
    (
        "y[i] = sum[j](x[i, j]",
        ParseError,
        (
            "syntax error: '(' was never closed (line 1)\n"
            "    y[i] = sum[j](x[i, j]\n"
            "                 ^\n"
            "a definition looks like S[i, j] = sum[d](Q[i, d] * K[j, d])"
        ),
    ),
    (
        "y[] = 3",
        ParseError,
        (
            "syntax error: invalid syntax (line 1)\n"
            "    y[] = 3\n"
            "      ^\n"
            "a result without axes is written without brackets: y = sum[i](x[i])"
        ),
    ),
    (
        "for i in x:",
        ParseError,
        (
            "syntax error: expected an indented block after 'for' statement on line 1 (line 1)\n"
            "    for i in x:\n"
            "               ^\n"
            "a definition looks like S[i, j] = sum[d](Q[i, d] * K[j, d])"
        ),
    ),
    (
        "x[i] + 1",
        ParseError,
        (
            "this is not a statement of the language (line 1)\n"
            "    x[i] + 1\n"
            "    ^^^^^^^^\n"
            "write declarations (x: f16[i, j]), definitions (y[i] = ...) and a final return"
        ),
    ),
    (
        "y[i] = x[i]\nreturn y\nz[i] = x[i]",
        ParseError,
        "nothing may follow 'return' (line 3)\n    z[i] = x[i]\n    ^^^^^^^^^^^\nmove 'return' to the end",
    ),
    (
        "x: f17[i]\ny[i] = x[i]",
        ParseError,
        (
            "unknown dtype 'f17' (line 1)\n"
            "    x: f17[i]\n"
            "       ^^^^^^\n"
            "did you mean 'f16'? dtypes: f8e4m3 f8e5m2 f16 bf16 f32 f64 i8 u8 i16 i32 i64 bool"
        ),
    ),
    (
        "mask: f32[i]\ny[i] = msk[i]",
        ParseError,
        "'mask' is declared but never read (line 1)\n    mask: f32[i]\n    ^^^^\ndid you mean 'msk'?",
    ),
    (
        "y[i] = x[i] / N(k)",
        ParseError,
        (
            "'k' is not an axis (line 1)\n"
            "    y[i] = x[i] / N(k)\n"
            "                    ^\n"
            "N(j) is the number of positions of axis 'j'"
        ),
    ),
    (
        "i[j] = x[j]\ny[i] = x[i]",
        ParseError,
        (
            "'i' is also the name of an axis (line 1)\n"
            "    i[j] = x[j]\n"
            "    ^^^^\n"
            "choose another name for one of them"
        ),
    ),
    (
        "pi = 3\ny = pi",
        ParseError,
        "'pi' is a constant of the language (line 1)\n    pi = 3\n    ^^\nchoose another name",
    ),
    (
        "T[h] = x[h] / N(h)\ny[h] = T[h // 2]",
        TypeCheckError,
        (
            "N(h) in 'T' has no meaning where 'h' is a computed index (line 2)\n"
            "    y[h] = T[h // 2]\n"
            "           ^^^^^^^^^\n"
            "give the size a name: write a scalar in place of N(h)"
        ),
    ),
    (
        "y[i] = 99999999999999999999 * x[i]",
        ParseError,
        (
            "this integer does not fit 64 bits (line 1)\n"
            "    y[i] = 99999999999999999999 * x[i]\n"
            "           ^^^^^^^^^^^^^^^^^^^^\n"
            "write 1e+20"
        ),
    ),
    (
        "y[i] = x[i] - -9223372036854775809",
        ParseError,
        (
            "this integer does not fit 64 bits (line 1)\n"
            "    y[i] = x[i] - -9223372036854775809\n"
            "                   ^^^^^^^^^^^^^^^^^^^\n"
            "write 9.223372036854776e+18"
        ),
    ),
    (
        "y[i] = x[i] - -(-9223372036854775808)",
        ParseError,
        (
            "this integer does not fit 64 bits (line 1)\n"
            "    y[i] = x[i] - -(-9223372036854775808)\n"
            "                  ^^^^^^^^^^^^^^^^^^^^^^^\n"
            "write 9.223372036854776e+18"
        ),
    ),
    (
        "y[i] = 'text'",
        ParseError,
        (
            "this is not a number (line 1)\n"
            "    y[i] = 'text'\n"
            "           ^^^^^^\n"
            "numbers, True and False are constants"
        ),
    ),
]


@pytest.mark.parametrize(
    ("source", "kind", "text"), CASES, ids=[text.splitlines()[0] for _, _, text in CASES]
)
def test_error_text(source: str, kind: type[EqfuseError], text: str) -> None:
    with pytest.raises(EqfuseError) as caught:
        parse(source)
    assert type(caught.value) is kind
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "source",
    [
        "y[i] = x[i].T",
        "y[i] = a @ b",
        "y[i] = x[i] @ 2",
        "y[i] = x[i] in a",
        "y[i] = f(*x)",
        "y[i] = exp(x=1)",
        "y[i] = [1, 2]",
        "y[i] = lambda: 1",
        "y[i] = f(1)(2)",
        "y[i] = (x[i])[0] + (1)[0]",
        "y[i] = exp",
        "y[i] = sum + 1",
        "y[i] = x[i, inf]",
        "y[i] = x[1.5]",
        "y[i] = i[2]",
        "y[i] = N(i, i)",
        "y[i] = sum[1](x[i])",
        "y[i] = argmax[j, k](x[i, j, k])",
        "y[0] = 1",
        "y = z = 1",
        "a, b = 1, 2",
        "x.y = 1",
        "return 3",
        "return",
        "y: f16[i] = 3",
        "y[i]: f16 = 3",
        "y: 'f16'\ny = 1",
        "x: f32[3]\ny[i] = x[i]",
        "k: axis\ny[k] = 1",
        "x: f16\nx: f32\ny = x",
        "k: axis[i]\nk: axis[j]\ny[k, i, j] = 1",
        "flag: bool\ny = flag",
        "y: f16[j]\ny[i] = x[i]",
        "y = 1\nreturn y, y",
        "class A: pass",
        "y = \0",
        "y = \ud800",
        "y = 1j",
        "y = ...",
        "\f\v y = \u2028 1 +",
        "y = 1 +\\",
    ],
)
def test_bad_programs_are_refused_with_an_error_of_ours(source: str) -> None:
    with pytest.raises(EqfuseError) as caught:
        parse(source)
    assert "Traceback" not in str(caught.value)


def test_caret_counts_characters_not_bytes() -> None:
    with pytest.raises(ParseError) as caught:
        parse("  ψ[i] = α[i] * expp(β)")
    assert str(caught.value).splitlines()[1:3] == ["    ψ[i] = α[i] * expp(β)", "                  ^^^^"]
    assert caught.value.span == Span(1, 16, 4)


def test_unknown_scalar_constants_are_refused() -> None:
    with pytest.raises(BindError) as caught:
        parse("y[i] = x[i] * scale", scalars={"scal": 2.0})
    assert str(caught.value) == "the program has no scalar 'scal'\ndid you mean 'scale'?"
    with pytest.raises(BindError, match="scalar 'i' is an axis of the program"):
        parse("y[i] = x[i]", scalars={"i": 2})
    with pytest.raises(BindError, match="scalar 'scale' is str, not a number"):
        parse("y[i] = x[i] * scale", scalars={"scale": "2"})  # type: ignore[dict-item]
    with pytest.raises(BindError, match="'g' is declared i32, its value is 2.5"):
        parse("g: i32\ny[i] = x[i] * g", scalars={"g": 2.5})


def test_a_source_that_is_not_text() -> None:
    with pytest.raises(ParseError, match="the source is bytes, not text"):
        parse(b"y = 1")  # type: ignore[arg-type]


def test_an_error_without_a_place_still_reads_well() -> None:
    assert str(EqfuseError("wrong", hint="do this")) == "wrong\ndo this"
    assert str(EqfuseError("wrong", source="a = 1", span=Span(9, 0))) == "wrong"


def test_locate_finds_whole_words_outside_comments() -> None:
    source = "# scale\ny[i] = scaled[i] * scale + K[ b,h // g ]"
    assert locate(source, "scale") == Span(2, 19, 5)
    assert locate(source, "K[b, h // g]") == Span(2, 27, 13)
    assert locate(source, "absent") is None
