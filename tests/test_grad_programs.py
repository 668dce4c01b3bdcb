"""`eq.grad`: gradients as programs, against torch's autograd over the unfused float64 reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grad_programs import ATTENTION, CASES, Case

import eqfuse as eq
from bench import grad_report
from bench.autograd import Differentiated
from bench.grad_report import check, run
from bench.programs import Example, Input, registered
from bench.report import Options, Report
from bench.workloads import WORKLOADS, Workload
from eqfuse.differentiate import vanish
from eqfuse.differentiate.certify import certify_gradient
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.parser import parse

ROUNDING = 1e-12


def differentiated(case: Case) -> Differentiated:
    tensors = case.tensors()
    return Differentiated.of(case.source, tensors, case.scalars, case.extents, case.wrt)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_autograd(name: str) -> None:
    case = CASES[name]
    known = differentiated(case)
    assert known.error(parse(eq.grad(case.source, case.wrt))) < ROUNDING
    assert any(np.any(gradient) for gradient in known.gradients.values())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["sum", "softmax", "layernorm", "max and min", "topk-", "steps", "masks", "read"])
def test_gradient_of_the_gradient_is_that_of_autograd(name: str) -> None:
    case = CASES[name]
    registered(case.source)
    source = eq.grad(case.source, case.wrt)
    given = differentiated(case).arguments(parse(source))
    wrt = [name for name, value in given["tensors"].items() if value.dtype.kind == "f"]
    again = Differentiated.of(source, given["tensors"], given["scalars"], given["sizes"], wrt)
    assert again.error(parse(eq.grad(source, wrt))) < ROUNDING


@pytest.mark.slow(but=["gqa_prefill", "rmsnorm", "softmax", "cross_entropy"])
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_benchmark_programs(workload: Workload) -> None:
    case = workload.cases["small"]
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in workload.inputs(case).items()}
    tensors = {name: value.numpy() for name, value in inputs.items()}
    wrt = [name for name, value in tensors.items() if value.dtype.kind == "f"]
    source = workload.exact_source
    known = Differentiated.of(source, tensors, case.scalars, case.sizes, wrt, constants=case.constants)
    assert known.error(parse(eq.grad(source, wrt, scalars=case.constants))) < ROUNDING


def test_a_wrong_gradient_is_told_from_the_right_one() -> None:
    case = CASES["softmax"]
    right = eq.grad(case.source, case.wrt)
    assert differentiated(case).error(parse(right.replace("dy[i, j] - ", "dy[i, j] + "))) > 0.01


def noisy(source: str, seed: int) -> Example:
    x = Input(name="x", dtype="f32", axes=("j",), draw="normal", magnitude="1e20")
    return Example(source, (x,), {"i": 3, "j": 3, "k": 5}, {}, block=2, shards=2, seed=seed)


@pytest.mark.parametrize(
    ("source", "gradient"),
    [
        ("y[i] = x[i] / 2.8284271247461903", "dx[i] = dy[i] / 2.8284271247461903"),
        ("y[i] = x[i] * 1e-30", "dx[i] = 1e-30 * dy[i]"),
        ("y[i] = x[i] * 0.72 / 2.8284271247461903", "dx[i] = 0.72 * dy[i] / 2.8284271247461903"),
        (
            "y[i] = x[i] * 3.4028234663852886e38 * 2.718281828459045",
            "dx[i] = 2.718281828459045 * dy[i] * 3.4028234663852886e+38",
        ),
        (
            "y[i] = x[i] * 0.123456789012345 * 0.6931471805599453",
            "dx[i] = 0.6931471805599453 * dy[i] * 0.123456789012345",
        ),
    ],
)
def test_constants_keep_the_digits_that_floats_have(source: str, gradient: str) -> None:
    """As a quotient of integers 1 / 2.8284271247461903 has more: rounded, it is another number."""
    found = eq.grad(source)
    assert gradient in found
    assert eq.compile(found, native="off", target="cpu").certificate.ok
    wrong = found.replace("dy[i]", "1.0000001 * dy[i]")
    assert not certify_gradient(source, wrong).ok


def test_what_is_made_of_rounding_alone_is_not_judged() -> None:
    source = (
        "x: f32[j]\na[i,j] = softmax_weighted[k](where(i < 1, -x[j], 0), x[j])"  # 5 x / 5 - x, times 1e20
    )
    assert {check(noisy(source, seed)).kind for seed in range(4)} <= {"right", "unsteady"}


@pytest.mark.parametrize("magnitude", ["", "1e20"])
def test_a_gradient_that_is_wrong_is_a_mismatch(magnitude: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "x: f32[j]\ny[i] = sum[j](x[j]) * (1 + i)"
    example = replace(noisy(source, 0), inputs=(replace(noisy(source, 0).inputs[0], magnitude=magnitude),))
    assert check(example).kind == "right"
    monkeypatch.setattr(
        grad_report, "grad", lambda text, wrt: eq.grad(text, wrt).replace("dx[j] =", "dx[j] = 1.01 *")
    )
    assert check(example).kind == "mismatch"


def test_the_gradient_of_softmax_is_the_textbook_form() -> None:
    assert eq.grad(CASES["softmax"].source).splitlines() == [
        "max_x[i] = max[j](x[i, j])",
        "sum_x[i] = sum[j](exp(x[i, j] - max_x[i]))",
        "y[i, j] = exp(x[i, j] - max_x[i]) / sum_x[i]",
        "sum_dy_y[i] = sum[j](dy[i, j] * y[i, j])",
        "dx[i, j] = y[i, j] * (dy[i, j] - sum_dy_y[i])",
        "# max_x passes nothing on: its cotangent is 0 for all inputs",
        "return dx",
    ]


def test_the_gradient_of_attention_is_that_of_papers() -> None:
    lines = eq.grad(ATTENTION, ("Q", "K", "V")).splitlines()
    assert lines[6:12] == [
        "du[b, h, i, j] = sum[e](dO[b, h, i, e] * V[b, h // g, j, e])",
        "sum_du_u[b, h, i] = sum[j](du[b, h, i, j] * u[b, h, i, j])",
        "dsum_Q[b, h, i, j] = where(j <= i, u[b, h, i, j] * scale * (du[b, h, i, j] - sum_du_u[b, h, i]), 0)",
        "dQ[b, h, i, d] = sum[j](dsum_Q[b, h, i, j] * K[b, h // g, j, d])",
        "dK[b, k1, j, d] = sum[h, i](where(h // g == k1, dsum_Q[b, h, i, j] * Q[b, h, i, d], 0))",
        "dV[b, v1, j, e] = sum[h, i](where(h // g == v1, dO[b, h, i, e] * u[b, h, i, j], 0))",
    ]


def test_digits_of_a_position_are_solved_for() -> None:
    source = eq.grad("p: axis[4]\ny[n] = sum[p](w[n*4 + p + 24] * v[p])", ("w",))
    assert source.splitlines()[-2] == (
        "dw[w0] = where(w0 >= 24 and (w0 - 24) // 4 < N(n_1), dy[(w0 - 24) // 4] * v[(w0 - 24) % 4], 0)"
    )


def test_axes_of_one_dimension_have_one_extent() -> None:
    """No mask asks whether a position of the one is a position of the other."""
    assert eq.grad("y[i,j] = exp(x[i] - x[j])").splitlines()[-2] == (
        "dx[i] = sum[j](dy[i, j] * y[i, j]) - sum[i_1](dy[i_1, i] * y[i_1, i])"
    )


def test_a_masked_cotangent_is_masked_before_it_is_divided() -> None:
    source = eq.grad("y[i] = where(x[i] > 0, log(x[i]), 0)")
    found = eq.reference(source)(x=np.array([2.0, 0.0, -1.0]), dy=np.ones(3))
    assert found.tolist() == [0.5, 0.0, 0.0]


def test_of_equals_the_first_gets_the_gradient_of_a_maximum() -> None:
    x = np.array([[1.0, 3.0, 3.0]])
    found = eq.reference(eq.grad("y[i] = max[j](x[i,j])"))(x=x, dy=np.ones(1))
    assert found.tolist() == [[0.0, 1.0, 0.0]]
    both = eq.reference(eq.grad("y[i] = max(x[i], z[i])"))(x=x[0], z=x[0], dy=np.ones(3))
    assert [value.tolist() for value in both] == [[0.5, 0.5, 0.5]] * 2


def test_what_has_no_gradient_is_zero_and_said() -> None:
    source = eq.grad("y[i] = floor(x[i]) * z[i]", ("x", "z"))
    assert "# floor(x[i]) counts as a constant: floor has no gradient" in source
    assert "# dx is 0: no output has a gradient by x" in source
    found = eq.reference(source)(x=np.array([1.5]), dy=np.array([2.0]), sizes={"i": 1})
    assert [value.tolist() for value in found] == [[0.0], [2.0]]


def test_a_cotangent_of_zeros_only_by_a_mask_of_data_is_kept() -> None:
    """Segments may be empty in every trial of the field: that is no proof."""
    source = eq.grad(CASES["segments"].source, ("x", "S"))
    assert "passes nothing on" not in eq.grad(source, ("x", "S"))


def test_names_do_not_clash() -> None:
    source = "dx[i] = sum[j](x[i,j])\ny[i] = sq(dx[i])"
    x = np.arange(6.0).reshape(2, 3)
    found = eq.reference(eq.grad(source))(x=x, dy=np.ones(2), sizes={"j": 3})
    assert found.tolist() == (2 * x.sum(1, keepdims=True) + 0 * x).tolist()
    taken = eq.reference(eq.grad("y[i] = x[i] * dy[i]", ("x",)))
    assert taken(dy=np.full(2, 3.0), dy_2=np.array([1.0, 2.0])).tolist() == [3.0, 6.0]


@pytest.mark.parametrize(
    ("source", "wrt", "message"),
    [
        ("y[i] = x[n[i]]", ("n",), "'n' holds integers"),
        ("y[i] = x[n[i]]", ("z",), "has no input 'z'"),
        ("y[i] = x[i]", (), "once, and one or more"),
        ("y[i] = x[i]", ("x", "x"), "once, and one or more"),
        ("y[i] = n[i]\nn: i32[i]", None, "no tensor of real numbers"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(source: str, wrt: tuple[str, ...] | None, message: str) -> None:
    with pytest.raises(eq.EqfuseError, match=message) as caught:
        eq.grad(source, wrt)
    assert caught.value.hint


def test_a_fold_that_does_not_say_what_it_keeps_is_refused() -> None:
    eq.reduction("widest", state="v", lift="x", identity="-inf", order="v", result="v", replace=True)
    with pytest.raises(eq.EqfuseError, match="keeps one of two states, and none"):
        eq.grad("y[i] = widest[j](x[i,j])")


@pytest.mark.anew
def test_the_text_is_the_same_every_time() -> None:
    assert eq.grad(ATTENTION, ("Q", "V")) == eq.grad(ATTENTION, ("Q", "V"))


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.sweep), 1])
@pytest.mark.slow
def test_random_programs(seed: int, tmp_path: Path) -> None:
    """More of them: `eqfuse bench grad`."""
    report = Report("", (), path=tmp_path / "grad.json")
    run(Options(examples=200 if seed == 0 else 20, seed=seed), report)
    assert not report.failures


def test_sizes_stay_those_of_axes_where_steps_are_read_elsewhere() -> None:
    source = "a[j] = where(j >= 1, x[j-1], 0) * mean[j](x[j])\nb[j] = a[j] + mean[j](sq(a[j]))"
    known = Differentiated.of(source, {"x": np.arange(4.0)}, {}, {}, ["x"])
    assert known.error(parse(eq.grad(source))) < ROUNDING


def test_a_shift_is_found_beside_a_logarithm_that_is_multiplied() -> None:
    """The entropy of a softmax: whatever the logarithm is, the maximum passes nothing on."""
    text = eq.grad(WORKLOADS["softmax_entropy"].source, ("x",))
    assert "argmax" not in text and "max_x[r] = max[c](x[r, c])" in text
    wrong = WORKLOADS["softmax_entropy"].source.replace("- max[c](x[r,c])", "- 2 * max[c](x[r,c])", 1)
    assert "argmax" not in eq.grad(wrong, ("x",)) and "argmax" in eq.grad(wrong + " + t[r,0]", ("x",))


def test_a_maximum_that_is_seen_where_a_row_is_on_both_sides_of_a_comparison() -> None:
    """Of seven numbers up to 2, none reaches the sum of their sigmoids: the gradient by the maximum is 0 there, and not at 5."""
    source = "d[i,j] = x[i,j] + max[j](x[i,j])\ny[i,j] = min(d[i,j], sum[j](sigmoid(d[i,j])))\nz[i,j] = y[i,j] - mean[j](y[i,j])\nreturn z"
    text = eq.grad(source)
    assert "argmax" in text and certify_gradient(source, text).ok
    known = Differentiated.of(source, {"x": np.linspace(-1.0, 5.0, 14).reshape(2, 7)}, {}, {}, ["x"])
    assert known.error(parse(text)) < ROUNDING


def test_ends_of_segments_beside_reads_ahead_have_sizes() -> None:
    """Of trials: `o` has one position more than i, so that `o[i + 1]` is beyond every extent that i is given."""
    source = (
        "o: i64[i1]\nc[i,j] = sum[k](max(z[i], w[k] + where(i + 2 < N(i), x[i + 2], 0) - y[j,i,k]))\n"
        "g[i,j] = where((o[i] <= j) & (j < o[i + 1]), c[i,j] * c[i,j], c[i,j])\nreturn c, g"
    )
    assert certify_gradient(source, eq.grad(source, ("z", "w", "x", "y"))).ok


def test_positions_of_data_that_do_not_matter_are_not_read() -> None:
    source = "P: i32[i]\na[i] = max[k](x[k]) * 1\ny[i] = a[P[i]] * x[i]"
    known = Differentiated.of(source, {"x": np.arange(3.0)}, {}, {}, ["x"])
    assert {tensor.name for tensor in parse(source).tensors} == {"x"}
    assert known.error(parse(eq.grad(source))) < ROUNDING


def test_a_shift_is_found_behind_labels_that_are_left_out() -> None:
    """The loss of a row is masked where its label is one of few integers: some draw of them shows every row."""
    source = """
        y: i64[i]
        m[i] = max[k](x[i, k])
        s[i] = sum[k](exp(x[i, k] - m[i]))
        loss = sum[i](where(y[i] != -100, log(s[i]) + m[i] - x[i, y[i]], 0)) / sum[i](where(y[i] != -100, 1, 0))
        return loss
    """
    text = eq.grad(source, ("x",))
    assert "argmax" not in text and "m passes nothing on" in text


def test_a_maximum_that_only_scales_passes_nothing() -> None:
    text = eq.grad(WORKLOADS["l2norm"].source, ("x",))
    assert "argmax" not in text and text.startswith("m[r] = max[c](abs(x[r, c]))")


def test_sums_whose_terms_nearly_cancel_are_one_sum() -> None:
    """The gradient of a weighted mean has p (x - a) in it, and 1 is less than the last place of x or a."""
    source = "x: f32[k]\na[i] = softmax_weighted[k](where(i >= 0, x[k], 0), x[k])"
    text = eq.grad(source, ("x",))
    assert "(x[k] - a[i])" in text and "- dx_sum" not in text
    x = torch.tensor([1.5e20, -2.9e19, -2.2e20], requires_grad=True)
    cotangent = torch.tensor([0.25, -1.5, 0.5])
    found = eq.compile(source)(x=x, sizes={"i": 3})
    (made,) = torch.autograd.grad(found, x, cotangent)
    assert torch.allclose(made, torch.tensor([float(cotangent.sum()), 0.0, 0.0]))


def test_a_field_is_asked_only_where_floats_leave_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(*given: Any, **more: Any) -> Any:
        asked.append(type(given[4]).__name__)
        return evaluate(*given, **more)

    monkeypatch.setattr(vanish, "evaluate", counted)
    text = eq.grad("""S[i,j] = sum[d](Q[i,d] * K[j,d])
P[i,j] = exp(S[i,j] - max[j](S[i,j]))
O[i,e] = sum[j](P[i,j] / sum[j](P[i,j]) * V[j,e])
Y[i,f] = sum[e](O[i,e] * W[f,e])""")
    assert "dmax" not in text  # 0 for all scores, which floats cannot show
    assert asked.count("FieldDomain") == vanish.ROUNDS and asked.count("FloatDomain") > 2
