"""The language: what a source text means as a program."""

from __future__ import annotations

import pytest

from eqfuse.errors import BudgetError, EqfuseError, ParseError
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Reduce, Scalar, Size, Tensor, call, reductions
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import show, show_program
from eqfuse.terms.promises import ascending
from eqfuse.terms.registry import REGISTERED

ATTENTION = """
    Q: f16[b, h, i, d]                # optional declarations: dtype and axes
    S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h//g,j,d]) * scale
    T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
    P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
    O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h//g,j,e])
"""


def value(text: str, **scalars: float) -> Expr:
    """The expression of `y[i, j] = text`."""
    return parse(f"y[i, j] = {text}", scalars=scalars).outputs[0].expr


X = Load("x", (Axis("i"), Axis("j")))


def test_attention_in_full() -> None:
    program = parse(ATTENTION)
    assert program.tensors == (
        Tensor("Q", 4, "f16", ("b", "h", "i", "d")),
        Tensor("K", 4, None, ("b", None, "j", "d")),
        Tensor("V", 4, None, ("b", None, "j", "e")),
    )
    assert program.scalars == ("g", "scale")
    assert program.integers == ("g",)
    assert program.domains == {}
    (output,) = program.outputs
    assert (output.name, output.axes, output.dtype) == ("O", ("b", "h", "i", "e"), None)
    assert [(node.op, node.axis) for node in reductions(output.expr)] == [
        ("sum", "d"),
        ("max", "j"),
        ("sum", "j"),
        ("sum", "j"),
    ]


def test_equal_expressions_are_shared() -> None:
    assert value("x[i,j] + x[i, j]") is call("add", X, X)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x[i,j]**2", call("sq", X)),
        ("x[i,j]**0.5", call("sqrt", X)),
        ("x[i,j]**-0.5", call("rsqrt", X)),
        ("x[i,j]**1.5", call("mul", X, call("sqrt", X))),
        ("x[i,j]**-2.5", call("div", Const(1), call("mul", call("sq", X), call("sqrt", X)))),
        ("x[i,j]**-1", call("div", Const(1), X)),
        ("x[i,j]**3", call("mul", call("sq", X), X)),
        ("x[i,j]**4", call("sq", call("sq", X))),
        ("x[i,j]**1", X),
        ("-x[i,j]**2", call("neg", call("sq", X))),
        ("+x[i,j]", X),
        ("-inf", Const(float("-inf"))),
        ("-2", Const(-2)),
        ("max(x[i,j], 0, 1)", call("maximum", call("maximum", X, Const(0)), Const(1))),
        ("min(x[i,j], 0)", call("minimum", X, Const(0))),
        ("i < j <= 3", call("and", call("lt", Axis("i"), Axis("j")), call("le", Axis("j"), Const(3)))),
        ("(i < j) & ~(i == 2) | (j != 1)", value("i < j and not i == 2 or j != 1")),
        ("N(j) * x[i,j]", call("mul", Size("j"), X)),
        ("x[i,j] // 2 % 3", call("mod", call("floordiv", X, Const(2)), Const(3))),
        ("f16(x[i,j])", Call("f16", (X,))),
        ("i * slope[i]", call("mul", Axis("i"), Load("slope", (Axis("i"),)))),
        ("sum[k](1)", Reduce("sum", "k", Const(1))),
        ("True", Const(True)),
    ],
)
def test_expressions(text: str, expected: Expr) -> None:
    assert value(text) is expected


def test_several_axes_nest() -> None:
    (output,) = parse("y[i] = sum[j, k](x[i, j, k])").outputs
    inner = Reduce("sum", "k", Load("x", (Axis("i"), Axis("j"), Axis("k"))))
    assert output.expr is Reduce("sum", "j", inner)


def test_scalars_given_become_constants() -> None:
    program = parse("y[i] = x[i // g] * scale", scalars={"g": 4})
    assert program.scalars == ("scale",)
    assert show(program.outputs[0].expr) == "x[i // 4] * scale"


def test_constant_exponent_from_a_scalar() -> None:
    assert value("x[i,j]**p", p=2) is call("sq", X)


def test_derived_reductions_are_text() -> None:
    plain = [name for name, each in REGISTERED.items() if (each.args, len(each.results)) == (("x",), 1)]
    shown = {name: show(parse(f"y[i] = {name}[j](x[i, j])").outputs[0].expr) for name in plain}
    assert shown == {
        "mean": "sum[j](x[i, j]) / N(j)",
        "var": "sum[j](sq(x[i, j] - sum[j](x[i, j]) / N(j))) / N(j)",
        "std": "sqrt(sum[j](sq(x[i, j] - sum[j](x[i, j]) / N(j))) / N(j))",
        "logsumexp": "finite(max[j](x[i, j])) + log(sum[j](exp(x[i, j] - finite(max[j](x[i, j])))))",
        "any": "max[j](where(x[i, j], 1, 0)) > 0",
        "all": "min[j](where(x[i, j], 1, 0)) > 0",
        "argmax": "argmax.k[j](x[i, j], j)",
        "argmin": "argmin.k[j](x[i, j], j)",
    }


def test_derived_reduction_over_several_axes() -> None:
    (output,) = parse("y = mean[i, j](x[i, j])").outputs
    assert show(output.expr) == "sum[i, j](x[i, j]) / (N(i) * N(j))"


def test_derived_reduction_over_an_axis_of_any_name() -> None:
    (output,) = parse("y = argmax[X](J[X])").outputs
    assert show(output.expr) == "argmax.k[X](J[X], X)"


def test_names_of_reductions_may_be_defined() -> None:
    program = parse("mean[i] = sum[j](x[i,j]) / N(j)\nvar[i] = mean[j](sq(x[i,j] - mean[i]))")
    assert show(program.outputs[0].expr) == "sum[j](sq(x[i, j] - sum[j](x[i, j]) / N(j))) / N(j)"


def test_outputs_without_return_are_what_nothing_reads() -> None:
    program = parse("m[i] = max[j](x[i,j])\ns[i] = sum[j](exp(x[i,j] - m[i]))\nz[i] = sum[j](x[i,j])")
    assert [output.name for output in program.outputs] == ["s", "z"]


def test_return_chooses_and_orders_outputs() -> None:
    program = parse("m[i] = max[j](x[i,j])\ns[i] = sum[j](exp(x[i,j] - m[i]))\ndead = w\nreturn s, m")
    assert [output.name for output in program.outputs] == ["s", "m"]
    assert program.scalars == ()


def test_scalar_outputs() -> None:
    (output,) = parse("n = sum[i](sq(x[i]))\ny = sqrt(n)").outputs
    assert (output.axes, show(output.expr)) == ((), "sqrt(sum[i](sq(x[i])))")


def test_temporary_at_computed_positions() -> None:
    program = parse("T[h, j] = K[h, j] * w\nS[h, i] = sum[j](T[h // g, j + 1] * Q[h, i])")
    assert show(program.outputs[0].expr) == "sum[j](K[h // g, j + 1] * w * Q[h, i])"


def test_gathers() -> None:
    program = parse("y[b, j, d] = K[page[b, j // P], j % P, d]")
    assert show(program.outputs[0].expr) == "K[page[b, j // P], j % P, d]"
    assert program.integers == ("P",)
    assert program.tensors == (Tensor("page", 2, None, ("b", None)), Tensor("K", 3, None, (None, None, "d")))


def test_gather_through_a_temporary() -> None:
    program = parse("at[b, j] = page[b, j // 4]\ny[b, j, d] = K[at[b, j], j % 4, d]")
    assert show(program.outputs[0].expr) == "K[page[b, j // 4], j % 4, d]"


def test_capture_renames_the_bound_axis() -> None:
    program = parse("T[i] = sum[j](x[i, j])\ny[j] = T[j]")
    assert show(program.outputs[0].expr) == "sum[j_1](x[j, j_1])"
    assert program.domains == {"j_1": "j"}


def test_renaming_is_the_same_at_every_reading_and_avoids_names_in_use() -> None:
    program = parse("T[i] = sum[j](x[i, j])\ny[j] = T[j] * exp(T[j]) + j_1")
    assert show(program.outputs[0].expr) == "sum[j_2](x[j, j_2]) * exp(sum[j_2](x[j, j_2])) + j_1"
    assert len(reductions(program.outputs[0].expr)) == 1


def test_renaming_inside_nested_reductions() -> None:
    source = "T[i] = sum[j](x[i, j] / sum[j](x[i, j]))\ny[k] = sum[j](T[j] * z[k, j])"
    program = parse(source)
    assert show(program.outputs[0].expr) == "sum[j](sum[j_1](x[j, j_1] / sum[j_1](x[j, j_1])) * z[k, j])"


def test_a_mean_counts_its_own_axis() -> None:
    found = parse("c[i,m] = x[i,m] - mean[m](x[i,m])\ny[i,k] = c[i, k + 1]\nreturn y")
    assert show(found.outputs[0].expr) == "x[i, k + 1] - sum[m](x[i, m]) / N(m)"
    shifted = parse("c[i,m] = x[i,m] - mean[m](x[i,m])\ny[i,m] = where(m > 0, c[i, m - 1], 0)\nreturn y")
    assert show(shifted.outputs[0].expr) == "where(m > 0, x[i, m - 1] - sum[m](x[i, m]) / N(m), 0)"


def test_a_mean_counts_all_of_its_own_axes() -> None:
    several = "m[i] = sum[k,l](x[i,k,l]) / (N(k) * N(l) - 1)\nc[i,l] = m[i] + x[i,0,l]\ny[i,p] = c[i, p + 1]\nreturn y"
    counted = "sum[k, l](x[i, k, l]) / (N(k) * N(l) - 1)"
    assert show(parse(several).outputs[0].expr) == f"{counted} + x[i, 0, p + 1]"
    captured = several.replace("y[i,p] = c[i, p + 1]", "y[i,k] = c[i, k + 1]")
    assert show(parse(captured).outputs[0].expr) == f"{counted} + x[i, 0, k + 1]"
    with pytest.raises(EqfuseError, match=r"N\(l\) in 'c' has no meaning"):
        parse(several.replace("m[i] +", "N(l) +"))


def test_sizes_follow_a_renamed_or_replaced_axis() -> None:
    program = parse("T[i] = x[i] / N(i)\ny[k] = T[k]")
    assert show(program.outputs[0].expr) == "x[k] / N(k)"


def test_declared_scalar_may_be_an_index() -> None:
    program = parse("pos: i32\ny[d] = x[pos, d]")
    assert (program.scalars, program.integers) == (("pos",), ("pos",))


def test_declared_result_is_a_cast() -> None:
    (output,) = parse("y: f16[i]\ny[i] = x[i] * 2").outputs
    assert (show(output.expr), output.dtype) == ("f16(x[i] * 2)", "f16")
    (output,) = parse("y[i] = bf16(x[i] * 2)").outputs
    assert output.dtype == "bf16"


def test_axis_declared_with_the_extent_of_another() -> None:
    program = parse("k: axis[i]\ny[i] = sum[k](x[i + k])")
    assert program.domains == {"k": "i"}


def test_axes_of_a_tensor_read_in_two_ways() -> None:
    program = parse("G[i, j] = sum[d](x[i, d] * x[j, d])")
    assert program.tensors == (Tensor("x", 2, None, (None, "d")),)


def test_indentation_comments_and_continuation_lines_mean_nothing() -> None:
    program = parse("m[i] = max[j](\n      x[i, j]  # a comment\n  )\n\n    y[i] = m[i] + 1   # another\r\n")
    assert show(program.outputs[0].expr) == "max[j](x[i, j]) + 1"


def test_programs_are_deterministic() -> None:
    assert parse(ATTENTION) == parse(ATTENTION)


def test_chain_of_shared_temporaries_stays_small() -> None:
    lines = ["t0[i] = x[i]"] + [f"t{n}[i] = t{n - 1}[i] * t{n - 1}[i]" for n in range(1, 60)]
    program = parse("\n".join([*lines, "y[k] = t59[k]"]))
    assert program.tensors == (Tensor("x", 1, None, ("k",)),)


@pytest.mark.slow
def test_inlining_that_explodes_is_refused() -> None:
    lines = ["t0[i] = x[i]"] + [f"t{n}[i] = t{n - 1}[i - 1] + t{n - 1}[i + 1]" for n in range(1, 40)]
    with pytest.raises(BudgetError, match="more than 20000 operations once its temporaries are inlined"):
        parse("\n".join(lines))


@pytest.mark.parametrize(
    "text",
    [
        "(" * 400 + "1" + ")" * 400,
        "-" * 5000 + "1",
        "+".join(["a"] * 20000),
        "exp(" * 180 + "1" + ")" * 180,
        "x[" * 190 + "i" + "]" * 190,
    ],
)
def test_deep_nesting_is_an_error_of_the_program(text: str) -> None:
    with pytest.raises(ParseError, match="nested more than 150 levels deep"):
        parse(f"y[i] = {text}")


def test_deep_nesting_over_many_lines_is_an_error_too() -> None:
    lines = ["t0[i] = x[i]"] + [f"t{n}[i] = exp(t{n - 1}[i])" for n in range(1, 300)]
    with pytest.raises(ParseError, match="nested more than 150 levels deep"):
        parse("\n".join(lines))


def test_scalar_names_that_look_like_functions() -> None:
    assert value("N * x[i,j]") is call("mul", Scalar("N"), X)


def test_a_tensor_that_is_promised_to_ascend_holds_integers() -> None:
    text = "y[i] = sum[j](where(doc[i] == doc[j], x[j], 0))\nassert doc[j] <= doc[j+1]"
    program = parse(text)
    assert ascending(program) == (("doc", 0),) and program.integer_tensors == ("doc",)
    assert ascending(parse(show_program(program))) == (("doc", 0),)
    assert not ascending(parse(text.replace("doc[j+1]", "doc[i]")))
    turned = "y[b] = sum[j](where(t[b,j] < n[b], x[j], 0))\nassert t[b,1+j] >= t[b,j]"
    assert ascending(parse(f"t: i64[b,j]\n{turned}")) == (("t", 1),)
