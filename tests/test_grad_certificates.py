"""Certificates of gradients: the adjoint identity in the field, and the wrong gradients that it finds."""

from __future__ import annotations

import numpy as np
import pytest
from grad_programs import ATTENTION, CASES

import eqfuse as eq
from bench.workloads import WORKLOADS, Workload
from eqfuse.differentiate.certify import certify_gradient
from eqfuse.differentiate.dual import Dual, DualDomain
from eqfuse.extend.define import forget
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import CASTS, FUNCTIONS
from eqfuse.verify.certificate import REQUESTED

WITHOUT_BOUND = ("functions", "heads in one matrix")
"""One number is in many exponents: of the product of a matrix with itself, a row is in those of all the others."""
UNBOUNDED = (
    "paged_decode",
    "qknorm_attention",
    "performer",
    "softmax_entropy",
    "moe_routing_logits",
)
"""Benchmark programs of whose gradients no theorem tells how surely they are right."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(
    but=[
        "sum",
        "softmax",
        "rmsnorm",
        "max and min",
        "topk",
        "a fold with",
        "masks",
        "segments",
        "pages",
        "gather",
    ]
)
def test_gradients_are_certified(name: str) -> None:
    case = CASES[name]
    case.tensors()
    found = certify_gradient(case.source, eq.grad(case.source, case.wrt))
    assert found.ok, found
    assert (found.bound <= REQUESTED) == (name not in WITHOUT_BOUND), found


@pytest.mark.slow(but=["gqa_prefill", "rmsnorm", "softmax", "cross_entropy"])
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_gradients_of_benchmark_programs_are_certified(workload: Workload) -> None:
    case = workload.cases["small"]
    wrt = [name for name in workload.tensors if workload.dtype(name, case)[0] in "fb"]
    gradient = eq.grad(workload.source, wrt, scalars=case.constants)
    found = certify_gradient(workload.source, gradient, scalars=case.constants)
    assert found.ok, found
    assert (found.bound <= REQUESTED) == (workload.name not in UNBOUNDED), found


def test_the_gradient_of_a_gradient_is_certified() -> None:
    source = eq.grad(CASES["softmax"].source)
    assert certify_gradient(source, eq.grad(source, ("x", "dy"))).reached


MUTANTS = {
    "a dropped term": ("softmax", "dy[i, j] - sum_dy_y[i]", "dy[i, j]"),
    "a wrong sign": ("softmax", "dy[i, j] - sum_dy", "dy[i, j] + sum_dy"),
    "the maximum's own": ("softmax", "dx[i, j] = ", "dx[i, j] = where(x[i,j] == max_x[i], dy[i,j], 0) + "),
    "a factor": ("sum", "2 * dy", "dy"),
    "a scalar's sum": ("sum", "ds = sum[i](", "ds = 1 / N(i) * sum[i]("),
    "a missing mask": ("attention", "where(j <= i, ", "where(j <= N(j), "),
    "a mask off by one": ("attention", "where(j <= i, u", "where(j < i, u"),
    "a scale left out": ("attention", "K[b, h // g, j, d]) * scale\ndK", "K[b, h // g, j, d])\ndK"),
    "a group left out": ("attention", "where(h // g == k1, ", "where(h // g == k1 - 1, "),
    "queries for keys": (
        "attention",
        "dS[b, h, i, j] * K[b, h // g, j, d]",
        "dS[b, h, i, j] * Q[b, h, i, d]",
    ),
    "a missing sum over a broadcast axis": ("broadcast", "da[i] = sum[j](", "da[i] = 1 / N(j) * sum[j]("),
    "a swapped axis": ("transposed", "dy[i] * x[i, j]", "dy[j] * x[i, j]"),
    "a wrong tie": (
        "max and min",
        "where(j == place_max_x[i], ",
        "where(x[i, j] == max_x[i], ",
    ),
    "the last of equals": (
        "a state variable",
        "argmax.k[j](x[i, j], j)",
        "N(j) - 1 - argmax.k[j](x[i, N(j) - 1 - j], j)",
    ),
    "the product with itself": ("prod", "where(j_1 != j, x[i, j_1], 1)", "x[i, j_1]"),
    "a root's derivative": ("std", "/ (2 * y[i] * N(j))", "/ (y[i] * N(j))"),
    "a mean for a sum": ("rmsnorm", " * N(j))", ")"),
    "a variance's mean": ("layernorm", " - sum_dy_w[i] / N(j)", ""),
    "a gather of the wrong row": ("linear cross-entropy", "where(y[t] == v, ", "where(y[t] == v + 1, "),
    "a label left out": ("linear cross-entropy", " - W[y[t], d]", ""),
    "a shift of the window": ("strided window", "(x0 - k) // 2", "(x0 - k + 2) // 2"),
    "what a mask keeps": ("masked poles", "where(not x[i] > 0, dy[i], 0)", "dy[i]"),
    "a key left out": ("two gathers", " and b[t] == e1", ""),
    "either key": ("two gathers", "e0 and b", "e0 or b"),
    "keys for each other": (
        "two gathers",
        "a[t] == e0 and b[t] == e1",
        "b[t] == e0 and a[t] == e1",
    ),
    "one of equal keys": ("two gathers", "sum[t](where(", "max[t](where("),
    "a factor of what is scattered": ("two gathers", "dy[t, d] * w[t]", "dy[t, d]"),
    "an element of another key": ("two gathers", "E[a[t], b[t], d]", "E[a[t], b[N(t) - 1 - t], d]"),
    "a feature of a scatter": ("two gathers", "dw[t] = sum[d](", "dw[t] = 2 * sum[d]("),
    "a slot of a page": ("pages", "j % 4 == k1,", "j % 4 == k1 and k1 > 0,"),
    "the page behind": ("pages", "pg[j // 4] == k0", "pg[j // 4] + 1 == k0"),
    "the end of a segment": ("segments", "j < o[s + 1], dy[s, d] * S", "j <= o[s + 1], dy[s, d] * S"),
    "a segment's first element": (
        "segments",
        "o[s] <= j and j < o[s + 1], dy[s, d], 0",
        "o[s] < j and j < o[s + 1], dy[s, d], 0",
    ),
    "a rank left out": ("topk", "sum[k](", "sum[k](k * "),
    "a remainder's slope": ("remainders", "dy[i]", "dy[i] * 2"),
    "a cotangent squared": ("sum", "2 * dy[i]", "2 * sq(dy[i])"),
    "of another output": ("an output that is read", "dz[i]", "dm[i]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_gradients_are_refused(name: str) -> None:
    program, before, after = MUTANTS[name]
    case = CASES[program]
    right = eq.grad(case.source, case.wrt)
    wrong = right.replace(before, after)
    assert wrong != right, right
    found = certify_gradient(case.source, wrong)
    assert not found.ok
    assert found.counterexample is not None


def test_a_refusal_says_which_gradient_is_wrong() -> None:
    source = "y[i] = sum[j](x[i,j] * w[j])"
    found = certify_gradient(
        source, "dx[i,j] = dy[i] * w[j]\ndw[j] = sum[i](dy[i] * x[i,j] * 2)\nreturn dx, dw"
    )
    assert found.counterexample is not None
    assert found.counterexample.output == "dw"


def test_a_gradient_that_is_not_linear_as_written_has_no_bound() -> None:
    gradient = "dx[i] = log(exp(dy[i])) * 2 * x[i]"
    found = certify_gradient("y[i] = sq(x[i])", gradient)
    assert found.bound == 1.0
    assert "not linear in the cotangents" in found.theorem


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        ("dx[i] = 2 * x[i] * dz[i]", "reads 'dz', which is neither"),
        ("dx[i,j] = 2 * x[i] * dy[i] * x[j]", "'dx' has 2 dimensions, the input has 1"),
        ("dx[i] = 2 * x[i] * dy[i,i]", "'dy' has 2 dimensions in the gradient, 1 in the program"),
    ],
)
def test_what_cannot_be_the_gradient_is_said(gradient: str, message: str) -> None:
    found = certify_gradient("y[i] = sq(x[i])", gradient)
    assert not found.ok
    assert message in found.reason


def test_outputs_that_are_no_gradients_are_refused() -> None:
    with pytest.raises(eq.EqfuseError, match="'y' is no gradient of an input"):
        certify_gradient("y[i] = sq(x[i])", "y[i] = x[i]")


def test_the_certificate_says_what_it_assumes() -> None:
    found = certify_gradient(ATTENTION, eq.grad(ATTENTION, ("Q", "K", "V")))
    assert found.reached
    assert "points where the program has no derivative" in str(found)


@pytest.mark.parametrize("fn", [fn for fn, row in FUNCTIONS.items() if any(row.derivative) and fn != "where"])
def test_dual_numbers_agree_with_differences(fn: str) -> None:
    """Apart from the table of functions, which makes gradients."""
    domain, step = FloatDomain("float64"), 1e-6
    values = [np.array([0.7, 1.3, 2.4]), np.array([1.1, 0.4, 0.9])][: len(FUNCTIONS[fn].args)]
    if fn in CASTS:
        return  # rounding is no function that has differences
    tangents = [np.array([0.3, -0.8, 0.5]), np.array([-0.2, 0.6, 0.1])]
    duals = [Dual(value, tangent) for value, tangent in zip(values, tangents, strict=False)]
    found = DualDomain(domain).call(fn, duals).tangent
    ahead, behind = (
        domain.call(fn, [v + sign * step * t for v, t in zip(values, tangents, strict=False)])
        for sign in (1, -1)
    )
    expected = (ahead - behind) / (2 * step)
    assert np.allclose(np.zeros(3) if found is None else found, expected, atol=1e-6)


@pytest.mark.parametrize("wrt", ["Q", "K", "dO"])
def test_gradients_of_gradients_of_grouped_heads(wrt: str) -> None:
    """An axis that nothing but sizes tells of has one extent in both programs; remainders have as many as are written."""
    source = "S[h,i,j] = sum[d](Q[h,i,d] * K[h//2,j,d])\nO[h,i] = sum[j](sq(S[h,i,j]))"
    once = eq.grad(source, ("Q", "K"))
    certificate = eq.certify_gradient(once, eq.grad(once, (wrt,)))
    assert certificate.ok, certificate.reason


def test_terms_are_added_in_the_order_in_which_they_are_found_and_numbers_last() -> None:
    text = eq.grad("y[i] = w[i] * x[i] - w[i] * a[i] + w[i]", ("w",))
    assert text == "dw[i] = dy[i] * (x[i] - a[i] + 1)\nreturn dw"


@pytest.mark.parametrize("shifted", ["c[i, k + 4]", "where(k > 0, c[i, k - 1], 0)"])
def test_what_is_summed_may_be_read_at_other_positions(shifted: str) -> None:
    source = f"c[i,m] = x[i,m] - mean[m](sq(x[i,m]))\ny[i,k] = {shifted}\nreturn y"
    found = certify_gradient(source, eq.grad(source))
    assert found.ok, found


def test_the_square_of_a_root_is_exact_in_an_exponent() -> None:
    """sq(x * sqrt(0.5)) is sq(x) / 2, though sqrt(0.5) has no residue that an exponential could read."""
    gradient = eq.grad("y[i] = gelu(x[i])")
    second = eq.grad(gradient, ("x",))
    assert certify_gradient(gradient, second).ok
    assert not certify_gradient(gradient, second.replace("sqrt(0.5)", "sqrt(0.51)")).ok
    assert eq.equivalent("y[i] = exp(sq(x[i] * sqrt(0.5)))", "y[i] = exp(sq(x[i]) / 2)").ok
    assert not eq.equivalent("y[i] = exp(sq(x[i] * sqrt(0.5)))", "y[i] = exp(sq(x[i]) / 3)").ok


COSINE = """
n[i] = sqrt(sum[j](sq(x[i,j])))
c[i] = sum[j](x[i,j] / max(n[i], 1e-08) * z[i,j])
"""


def test_a_mask_of_data_stays_outside_of_a_sum() -> None:
    """At a zero vector the norm has no derivative and counts for nothing: 0 / 0 behind its mask is not read."""
    gradient = eq.grad(COSINE, ("x",))
    assert certify_gradient(COSINE, gradient).ok
    unmasked = gradient.replace("where(n[i] > 1e-08, ", "where(n[i] > -1, ")
    assert unmasked != gradient and not certify_gradient(COSINE, unmasked).ok


@pytest.mark.slow
def test_a_state_and_what_is_rescaled_by_it_have_one_derivative_at_ties() -> None:
    """The 2-norm has a derivative where magnitudes are equal: by the first of equals in both variables, or by the mean in both."""
    scaled = "s1*sq(m1/max(m1,m2)) + s2*sq(m2/max(m1,m2))"
    eq.reduction(
        "scaled_norm",
        args="x",
        state="m, s",
        lift="abs(x), where(x == 0, 0, 1)",
        identity="0, 0",
        combine=f"max(m1,m2), where(max(m1,m2) > 0, {scaled}, 0)",
        result="m * sqrt(s)",
        commutative=True,
        why="2-norm without overflow",
    )
    try:
        source = "y[i] = scaled_norm[j](x[i,j])"
        gradient = eq.grad(source)
        x = np.array([[1.0, -1.0, 1.0], [2.0, 0.0, 2.0], [3.0, 1.0, 2.0], [0.0, 0.0, 1.0]])
        found = eq.reference(gradient)(x=x, dy=np.ones(4))
        np.testing.assert_allclose(found, x / np.linalg.norm(x, axis=1, keepdims=True), atol=1e-12)
        assert certify_gradient(source, gradient).ok
        assert not certify_gradient(source, gradient.replace("sqrt(", "1.001 * sqrt(")).ok
    finally:
        forget("scaled_norm")


def test_what_is_shared_is_not_written_out() -> None:
    """Terms that share parts are certified without their text, which would be 2**40 times as long."""
    steps = "".join(f"t{k + 1}[i] = t{k}[i] / (1 + t{k}[i])\n" for k in range(40))
    source = f"t0[i] = sum[j](x[i,j])\n{steps}return t40"
    assert eq.certify_gradient(source, eq.grad(source, ("x",)), trials=2).ok


@pytest.mark.parametrize("op", ["max", "sum"])
@pytest.mark.parametrize("window", [3, 20, 64, 2000])
def test_the_gradient_of_a_prefix_is_none_of_a_window_however_long(op: str, window: int) -> None:
    """A mask that no position of a trial is outside of is looked at with a small number in place of the large one."""
    prefix = f"j: axis[k]\ny[i,j] = {op}[k <= j](x[i,k])"
    text = prefix.replace("k <= j", f"k <= j, k > j - {window}")
    assert eq.certify_gradient(text, eq.grad(text, wrt="x")).ok
    refused = eq.certify_gradient(text, eq.grad(prefix, wrt="x"))
    assert not refused.ok and refused.counterexample is not None
    assert bool(refused.shrunk) is (window > 10)
