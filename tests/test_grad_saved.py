"""Gradients that read what their forward has saved: outputs, and states as one log-sum-exp."""

from __future__ import annotations

import re

import pytest
import torch
from grad_programs import ATTENTION, CASES

import eqfuse as eq
from bench.programs import registered
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.differentiate.saved import Saved
from eqfuse.loops.kernel_axes import contractions
from eqfuse.terms.types import program_dtypes

SIZED = "d: axis[64]\ne: axis[64]\n"
LONG = SIZED + "i: axis[640]\nj: axis[640]\n"
CAUSAL = """
S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale
T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
"""
SINK = CAUSAL.replace(
    "P[b,h,i,j] / sum[j](P[b,h,i,j])",
    "P[b,h,i,j] / (sum[j](P[b,h,i,j]) + exp(sink[h] - max[j](T[b,h,i,j])))",
)
SOFTCAP = CAUSAL.replace("where(j <= i, S[b,h,i,j], -inf)", "where(j <= i, 8 * tanh(S[b,h,i,j] / 8), -inf)")
WINDOW = CAUSAL.replace("j <= i", "(j <= i) & (i - j < 64)")
ROUNDED = CAUSAL.replace("O[b,h,i,e] = ", "O[b,h,i,e] = bf16(").replace("V[b,h,j,e])", "V[b,h,j,e]))")
ALL = ("Q", "K", "V")


def saved(source: str, wrt: tuple[str, ...] = ALL) -> Saved:
    return saving_gradient(source.strip(), wrt)


def test_attention_saves_a_log_sum_exp_and_its_output() -> None:
    made = saved(CAUSAL)
    assert (made.outputs, made.residuals) == (("O",), ("lse",))
    assert made.forward.endswith("lse[b, h, i] = max_T[b, h, i] + log(sum_P[b, h, i])\nreturn O, lse")
    assert "u[b, h, i, j] = exp(T[b, h, i, j] - lse[b, h, i])" in made.backward
    assert (
        "sum[e](dO[b, h, i, e] * O[b, h, i, e])" in made.backward
    )  # of which sum over j of P dP is the interchange
    assert "assert T[b, h, i, j] <= lse[b, h, i]" in made.backward
    assert "max" not in made.backward


@pytest.mark.parametrize("top", ["max[j](T[b,h,i,j])", "max(max[j](T[b,h,i,j]), sink[h])"])
def test_a_finite_shift_of_a_softmax_is_one_statistic_with_its_sum(top: str) -> None:
    """Masks that leave nothing of a row, and a sink among its scores: the shift passes no gradient on, whatever the maximum is of."""
    sink = " + exp(sink[h] - finite(m[b,h,i]))" if "sink" in top else ""
    head = "\n".join(CAUSAL.strip().splitlines()[:2])
    source = f"""{head}
m[b,h,i] = {top}
P[b,h,i,j] = exp(T[b,h,i,j] - finite(m[b,h,i]))
l[b,h,i] = sum[j](P[b,h,i,j]){sink}
O[b,h,i,e] = sum[j](P[b,h,i,j] * V[b,h,j,e]) / l[b,h,i]"""
    made = saved(source, (*ALL, "sink") if sink else ALL)
    assert "lse[b, h, i] = finite(m[b, h, i]) + log(l[b, h, i])" in made.forward
    assert "exp(T[b, h, i, j] - lse[b, h, i])" in made.backward
    assert "assert T[b, h, i, j] <= lse[b, h, i]" in made.backward
    assert "max" not in made.backward.replace("# m passes nothing on", "")


TRANSPOSED = CAUSAL.replace("O[b,h,i,e]", "O[b,i,h,e]")
"""What a model's next product reads is laid out by positions, then heads."""


def test_what_is_saved_is_contiguous_along_the_axes_of_tiles() -> None:
    """Whatever the layout of the output is."""
    made = saved(TRANSPOSED)
    assert made.forward.endswith("lse[b, h, i] = max_T[b, h, i] + log(sum_P[b, i, h])\nreturn O, lse")
    assert "exp(T[b, h, i, j] - lse[b, h, i])" in made.backward
    assert "assert T[b, h, i, j] <= lse[b, h, i]" in made.backward


@pytest.mark.parametrize("groups", [1, 4])
def test_the_backward_of_a_transposed_output_has_roles(groups: int) -> None:
    """Statistics that kernels store for one another are contiguous along tiles, and partial sums of heads that share keys along features."""
    source = TRANSPOSED if groups == 1 else TRANSPOSED.replace("[b,h,j,", "[b,h//4,j,")
    heads = "h" if groups == 1 else "k"
    shapes = {"Q": "b,h,i,d", "K": f"b,{heads},j,d", "V": f"b,{heads},j,e"}
    declared = "".join(f"{name}: bf16[{axes}]\n" for name, axes in shapes.items())
    kernel = eq.compile(declared + source.strip(), target="h200", verify=False)
    gradient = kernel.gradient(ALL, ALL, alike=True, dtypes=dict.fromkeys(ALL, torch.bfloat16))
    sizes = {"b": 4, "h": 16, "i": 2048, "j": 2048, "d": 128, "e": 128} | ({"k": 4} if groups == 4 else {})
    plan = gradient.planned(sizes, {"dO": "bf16"}).plan
    stored = {output.name: output.axes for each in plan.kernels for output in each.outputs}
    assert stored["stored1"] == ("b", "h", "i")
    if groups > 1:
        assert ("b", "k", "h_rest", "j", "d") in stored.values()
    assert (
        sum(roles is not None for roles in plan.roles) == 2
    )  # of the kernels with products: one of dQ, one of dK and dV


def test_a_sum_that_has_a_term_twice_is_no_share() -> None:
    made = saved(
        "l[i] = sum[j](exp(x[i,j]))\nu[i,j] = x[i,j] + x[i,j] - log(l[i])\n"
        "y[i,d] = sum[j](exp(x[i,j]) / l[i] * v[j,d]) + sum[j](u[i,j] * w[j,d])",
        ("x", "v", "w"),
    )
    assert "exp(x[i, j] - lse[i])" in made.backward and "exp(u[i, j])" not in made.backward


@pytest.mark.slow(but=["causal"])
@pytest.mark.parametrize(
    "source", [CAUSAL, WINDOW, SOFTCAP, SINK, ROUNDED], ids=["causal", "window", "softcap", "sink", "rounded"]
)
def test_attention_backward_is_two_nests(source: str) -> None:
    kernel = eq.compile(LONG + saved(source).backward, target="h200", verify=False)
    *_, rows, columns = kernel.plan.kernels  # what rows have in common may be stored before
    assert [output.name for output in rows.outputs] == ["dQ"]
    assert [output.name for output in columns.outputs] == ["dK", "dV"]
    assert (rows.parallel, columns.parallel) == (("b", "h", "i"), ("b", "h", "j"))
    ops = {state.op for each in kernel.plan.kernels for g in each.groups for state in g.group.states}
    assert ops == {"sum"}  # what is saved bounds the scores: there is no maximum
    apart = next(each for each in kernel.why_not() if "both read" in each)
    assert (
        apart.startswith("dQ and dK both read ") and "their axes are [b, h, i, d] and [b, h, j, d]" in apart
    )


@pytest.mark.parametrize("wrt", [("Q",), ("V",)])
def test_no_running_maximum_for_one_input_alone(wrt: tuple[str, ...]) -> None:
    made = saved(CAUSAL.replace("where(j <= i, S[b,h,i,j], -inf)", "S[b,h,i,j]"), wrt)
    kernel = eq.compile(LONG + made.backward, target="h200", verify=False)
    (only,) = kernel.plan.kernels
    assert {state.op for group in only.groups for state in group.group.states} == {"sum"}
    unpromised = re.sub(r"assert .*\n", "", made.backward)
    shifted = eq.compile(LONG + unpromised, target="h200", verify=False).plan.kernels[0]
    assert "max" in {state.op for group in shifted.groups for state in group.group.states}


APART = {
    "a number": "where(j <= i, S[b,h,i,j], -1e30)",
    "one of several": "where(j <= i, where(i - j < 4, S[b,h,i,j], -inf), -1e9)",
    "added": "S[b,h,i,j] + where(j <= i, 0, -1e30)",
    "times a tensor": "S[b,h,i,j] + (1 - keep[b,j]) * -65504",
    "rounded": "where(j <= i, bf16(S[b,h,i,j]), f32(-1e30))",
    "a scalar": "where(j <= i, S[b,h,i,j], fill)",
    "an added tensor": "S[b,h,i,j] + mask[b,i,j]",
    "below another": "maximum(where(j <= i, S[b,h,i,j], -inf), -1e30)",
}
TOGETHER = {
    "an infinity": "where(j <= i, S[b,h,i,j], -inf)",
    "a small number": "where(j <= i, S[b,h,i,j], -1e3)",
    "a condition": "where(j * 1000000 <= i, S[b,h,i,j], -inf)",
    "distances": "where(j <= i, S[b,h,i,j] - slope[h] * (i - j), -inf)",
    "within": "where(j <= i, 50 * tanh(S[b,h,i,j] + 1e9), -inf)",
}


@pytest.mark.parametrize("name", APART | TOGETHER)
def test_a_large_number_keeps_the_sum_apart_from_the_maximum(name: str) -> None:
    """log l is lost in m + log l where m may be -1e30."""
    made = saved(CAUSAL.replace("where(j <= i, S[b,h,i,j], -inf)", {**APART, **TOGETHER}[name]))
    if name in TOGETHER:
        assert made.residuals == ("lse",)
        return
    assert made.residuals == ("max_T", "log_sum_P")
    assert "exp(T[b, h, i, j] - max_T[b, h, i] - log_sum_P[b, h, i])" in made.backward
    assert "assert T[b, h, i, j] - max_T[b, h, i] <= log_sum_P[b, h, i]" in made.backward


TEXTS = {
    "log-softmax": (
        "t[i,j] = x[i,j] - max[j](x[i,j])\ny[i,j] = t[i,j] - log(sum[j](exp(t[i,j])))",
        "dsum_t_sum[i] = sum[j](dy[i, j])\ndx[i, j] = dy[i, j] - dsum_t_sum[i] * exp(y[i, j])\nreturn dx",
    ),
    "cross-entropy": (
        "m[i] = max[j](x[i,j])\nL[i] = m[i] + log(sum[j](exp(x[i,j] - m[i]))) - x[i,label[i]]",
        "+ dL[i] * exp(x[i, j] - lse[i])\nassert x[i, j] <= lse[i]\nreturn dx",
    ),
    "an output that is one": (
        "L[i] = log(sum[j](exp(x[i,j] - max[j](x[i,j])))) + max[j](x[i,j])",
        "dx[i, j] = dL[i] * exp(x[i, j] - L[i])\nassert x[i, j] <= L[i]\nreturn dx",
    ),
    "variance": (
        "m[i] = mean[j](x[i,j])\nv[i] = mean[j](sq(x[i,j] - m[i]))\nreturn v",
        "dx[i, j] = 2 * dv[i] * (x[i, j] - m[i]) / N(j)\nreturn dx",
    ),
    "a mask to 0": (
        "p[i,j] = where(j <= i, exp(x[i,j] - m[i]), 0)\ny[i,k] = sum[j](p[i,j] / sum[j](p[i,j]) * v[j,k])",
        "dx[i, j] = where(j <= i, (sum[k](dy[i, k] * v[j, k]) - sum[k](dy[i, k] * y[i, k])) * exp(x[i, j] - lse[i]), 0)",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_read(name: str) -> None:
    source, expected = TEXTS[name]
    backward = re.sub(r"#.*\n", "", saved(source, ("x",)).backward)
    assert expected in backward


@pytest.mark.slow(but=["softmax", "attention", "several outputs"])
@pytest.mark.parametrize("name", CASES)
def test_the_whole_of_it_is_a_gradient(name: str) -> None:
    """The backward with the definitions of what it reads is the gradient, and the forward gives these."""
    case = CASES[name]
    registered(case.source)
    constants = {key: value for key, value in case.scalars.items() if isinstance(value, int)}
    made = saving_gradient(case.source, case.wrt, scalars=constants)
    certificate = eq.certify_gradient(case.source, made.whole, scalars=constants)
    assert certificate.ok, certificate.reason
    returned = made.forward.splitlines()[-1].removeprefix("return ").split(", ")
    count = len(made.residuals)
    assert tuple(returned[len(returned) - count :]) == made.residuals
    for residual in made.residuals:
        one, other = (re.sub(r"return .*", f"return {residual}", text) for text in (made.forward, made.whole))
        assert eq.equivalent(one, other).ok


MUTANTS = {
    "a sum without its logarithm": ("log(sum[j](P[b, h, i, j]))", "sum[j](P[b, h, i, j])"),
    "the maximum alone": (" + log(sum[j](P[b, h, i, j]))", ""),
    "another output": ("dO[b, h, i, e] * O[b, h, i, e]", "dO[b, h, i, e] * V[b, h, i, e]"),
    "a sign": (") - sum[e](dO", ") + sum[e](dO"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_ones_are_refused(name: str) -> None:
    right, wrong = MUTANTS[name]
    whole = saved(CAUSAL).whole
    assert right in whole
    assert not eq.certify_gradient(CAUSAL, whole.replace(right, wrong)).ok


def attention(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    shapes = ((2, 4, 9, 6), (2, 2, 9, 6), (2, 2, 9, 5))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def exact(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    K, V = K.repeat_interleave(2, 1), V.repeat_interleave(2, 1)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    return torch.softmax((Q @ K.mT * 0.5).masked_fill(~mask, -torch.inf), -1) @ V


@pytest.mark.slow
def test_backward_in_torch() -> None:
    kernel = eq.compile(ATTENTION, scalars={"g": 2})
    Q, K, V = attention()
    weights = torch.randn(2, 4, 9, 5, dtype=torch.float64)
    found = torch.autograd.grad((kernel(Q=Q, K=K, V=V, scale=0.5) * weights).sum(), (Q, K, V))
    wanted = torch.autograd.grad((exact(Q, K, V) * weights).sum(), (Q, K, V))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    shown = kernel.backward
    assert shown.saved == ("O", "lse")
    assert shown.certificate.ok and shown.certificate.forward.ok and shown.certificate.bound < 1e-12
    assert "the kernel of what it saves:" in str(shown.certificate)
    assert "lse" in str(shown.forward.program.outputs)
    made = kernel(Q=Q.detach(), K=K.detach(), V=V, scale=0.5)
    (found_v,) = torch.autograd.grad((made * weights).sum(), V)
    assert torch.allclose(found_v, wanted[2], atol=1e-12)
    assert kernel.backward.saved == ("lse",)


@pytest.mark.slow
def test_second_derivatives_read_inputs_alone() -> None:
    kernel = eq.compile(CASES["softmax"].source)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(kernel(x=x).pow(2).sum(), x, create_graph=True)
    assert kernel.backward.saved == () and kernel.backward.source == eq.grad(CASES["softmax"].source)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    (exact_first,) = torch.autograd.grad(torch.softmax(x, 1).pow(2).sum(), x, create_graph=True)
    assert torch.allclose(second, torch.autograd.grad(exact_first.pow(2).sum(), x)[0])


LOSS = "loss = mean[i](softplus(x[i]) * s[i])"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("graph", ["none", "aot_eager"])
def test_the_cotangent_of_a_loss_is_not_read_on_the_host(
    graph: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it waits for the device, at every backward."""
    kernel = eq.compile(LOSS)
    assert "dloss[0]" in saved(LOSS, ("x",)).backward and "dloss[" not in saved(LOSS, ("x",)).whole
    call = kernel if graph == "none" else torch.compile(lambda x, s: kernel(x=x, s=s), backend=graph)
    x, s = torch.randn(7).to(dtype).requires_grad_(), torch.randn(7).to(dtype)
    loss, weight = call(x=x, s=s), torch.tensor(3.0, dtype=dtype)
    torch.autograd.grad(loss, x, weight, retain_graph=True)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("a number was read"))
        (found,) = torch.autograd.grad(loss, x, weight)
    expected = 3 * torch.sigmoid(x.double()) * s / 7
    assert found.dtype == dtype and torch.allclose(
        found.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.parametrize("graph", ["none", "aot_eager"])
def test_what_is_saved_without_axes_is_not_read_on_the_host(
    graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = eq.compile("y[j] = x[j] * rsqrt(mean[j](sq(x[j])) + 1)\nm = sum[j](y[j])\nreturn y, m")
    call = kernel if graph == "none" else torch.compile(lambda x: kernel(x=x), backend=graph)
    x, weights = torch.randn(9, requires_grad=True), torch.randn(9)
    y, m = call(x=x)
    torch.autograd.grad((y, m), x, (weights, torch.tensor(2.0)), retain_graph=True)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("a number was read"))
        (found,) = torch.autograd.grad((y, m), x, (weights, torch.tensor(2.0)))
    wide = x.detach().double().requires_grad_()
    normed = wide * torch.rsqrt(wide.square().mean() + 1)
    (expected,) = torch.autograd.grad((normed * weights).sum() + 2 * normed.sum(), wide)
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert any(not each.axes for each in kernel.forward(("x",)).kernel.program.outputs[2:])


def test_a_promise_reads_what_is_saved_without_axes_as_the_backward_does() -> None:
    source = "m = max[i](x[i])\nl = m + log(sum[i](exp(x[i] - m)))"
    made = saving_gradient(source, ("x",))
    assert made.outputs == ("l",) and "assert x[i] <= l[0]" in made.backward
    x = torch.randn(9, dtype=torch.float64, requires_grad=True)
    eq.compile(source)(x=x).backward()
    assert torch.allclose(x.grad, torch.softmax(x.detach(), 0))


def test_a_loss_beside_other_outputs_without_a_cotangent() -> None:
    kernel = eq.compile(f"{LOSS}\ny[i] = sq(x[i])\nreturn loss, y")
    x, s = torch.randn(7, requires_grad=True), torch.randn(7)
    (found,) = torch.autograd.grad(kernel(x=x, s=s)[1].sum(), x)
    assert torch.allclose(found, 2 * x)
    (found,) = torch.autograd.grad(kernel(x=x, s=s)[0], x, create_graph=True)
    assert torch.allclose(found, torch.sigmoid(x) * s / 7)
    assert torch.autograd.grad(found.sum(), x)[0].abs().sum() > 0


def test_an_output_that_was_changed_is_told() -> None:
    kernel = eq.compile(CASES["softmax"].source)
    x = torch.randn(4, 9, requires_grad=True)
    y = kernel(x=x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_promises_are_part_of_the_language() -> None:
    text = "y[i] = sum[j](exp(x[i,j] - m[i]))\nassert x[i,j] <= m[i]\nreturn y"
    program = eq.compile(text, verify=False).program
    ((left, right),) = program.at_most
    assert (str(left), str(right)) == ("x[i, j]", "m[i]")
    assert eq.compile(text.replace("x[i,j] <= m[i]", "m[i] >= x[i,j]")).program.at_most == program.at_most
    x = torch.randn(3, 7)
    m = x.max(1).values
    assert torch.allclose(eq.compile(text)(x=x, m=m), torch.exp(x - m[:, None]).sum(1))
    for wrong, message in {
        "assert x[i,j]": "an assert says that one value is at most another",
        "assert x[i,j] <= z[i]": "no output reads 'z'",
        "assert x[i,k] <= m[i]": "axis 'k' is not bound here",
    }.items():
        with pytest.raises(eq.EqfuseError, match=re.escape(message)):
            eq.compile(text.replace("assert x[i,j] <= m[i]", wrong))


HEADS = {"b": 1, "h": 32, "i": 8192, "j": 8192, "d": 128, "e": 128}


@pytest.mark.parametrize("wrt", [("Q",), ("K", "V"), ("Q", "K", "V")])
@pytest.mark.slow
def test_attentions_sums_are_matrix_products_and_its_row_statistic_is_stored(wrt: tuple[str, ...]) -> None:
    """One gradient alone has no value that it shares, and yet its inputs stand beside the mask; what every block of
    keys would compute again of O and dO is computed once."""
    derived = compiler.derive(saved(CAUSAL, wrt).backward, None, strict_casts=False)
    halves = dict.fromkeys(("Q", "K", "V", "O", "dO"), "bf16")
    dtypes = program_dtypes(
        derived.program, {t.name: halves.get(t.name, "f32") for t in derived.program.tensors}
    )
    nest = compiler.pipeline(derived, HEADS, dtypes, device_named("h200")).chosen.nest
    products = [len(contractions(kernel)) for kernel in nest.kernels]
    stored = [buffer.axes for buffer in nest.buffers if not buffer.is_output]
    if "K" in wrt:
        assert stored == [("b", "h", "i")]
    assert sum(products) == {1: 3, 2: 4, 3: 7}[len(wrt)]


def test_what_selects_rows_stays_around_all() -> None:
    """A token that is NaN reaches the gradient of its own row alone."""
    text = eq.grad("y[t,d] = W[ids[t], d] * x[t,d]", ("W",))
    assert "dW[w0, d] = sum[t](where(ids[t] == w0, dy[t, d] * x[t, d], 0))" in text


LINEAR_CROSS_ENTROPY = """
L[i,v] = sum[d](x[i,d] * W[v,d])
loss[i] = max[v](L[i,v]) + log(sum[v](exp(L[i,v] - max[v](L[i,v])))) - L[i,label[i]]
"""


def test_what_several_products_read_is_stored_in_the_precision_of_their_inputs() -> None:
    """Both gradients of a linear layer multiply that of the logits, which is stored once, in half precision, and the
    logits are not."""
    source, wrt = "label: i64[i]\n" + LINEAR_CROSS_ENTROPY, ("x", "W")
    made = saving_gradient(source, wrt, halves=dict.fromkeys(wrt, "bf16"))
    assert "dL[i, v] = bf16(" in made.backward
    assert "bf16" not in saving_gradient(source, wrt).backward
    assert "bf16(w" not in saving_gradient(source, wrt, halves={"x": "bf16", "W": "f16"}).backward
    derived = compiler.derive(made.backward, None, strict_casts=False)
    dtypes = program_dtypes(derived.program, {"x": "bf16", "W": "bf16", "lse": "f32", "dloss": "f32"})
    sizes = {"i": 8192, "d": 4096, "v": 128256}
    nest = compiler.pipeline(derived, sizes, dtypes, device_named("h200")).chosen.nest
    assert [(b.axes, b.dtype) for b in nest.buffers if not b.is_output] == [(("i", "v"), "bf16")]
    assert len(nest.kernels) == 3


def test_groups_of_one_head_are_heads() -> None:
    text = eq.grad("O[h,i] = sum[j](Q[h,i,j] * K[h//g,j])", ("K",), scalars={"g": 1})
    assert text.splitlines()[0] == "dK[h, j] = sum[i](dO[h, i] * Q[h, i, j])"


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_residuals_of_halves_are_in_float32(compiled: bool) -> None:
    """A log-sum-exp in bfloat16 would make gradients three times as wrong as those of torch."""
    torch.manual_seed(0)
    kernel = eq.compile(CAUSAL, native="off")
    q, k, v = (torch.randn(1, 2, 96, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cotangent = torch.randn(1, 2, 96, 32, dtype=torch.bfloat16)
    saving = kernel.forward(("Q", "K", "V"), dict.fromkeys("QKV", torch.bfloat16))
    assert "lse_1: f32[b, h, i]" in saving.kernel.program.source

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernel(Q=q, K=k, V=v, scale=0.2)  # type: ignore[no-any-return]

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.2)
    right = torch.autograd.grad(exact, wide, cotangent.double())
    found = torch.autograd.grad(run(q, k, v), (q, k, v), cotangent)
    for one, other in zip(found, right, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 4e-3


def test_kernels_of_a_gradient_are_planned_for_calls_alone() -> None:
    """A backward is planned and verified for no sizes that nothing was called with."""
    kernel = eq.compile(CASES["softmax"].source, target="cpu", native="off")
    x = torch.randn(3, 70, requires_grad=True)
    kernel(x=x).square().sum().backward()
    (expected,) = torch.autograd.grad(torch.softmax(x, 1).square().sum(), x)
    torch.testing.assert_close(x.grad, expected)
    made = kernel.backward.kernel
    assert isinstance(made, eq.Kernel) and len(made._shapes._compiled) == 1
    assert made.certificate is not None and made.compiled.extents["i"] == 3


def test_the_kernel_of_a_gradient_has_a_plan_before_any_call() -> None:
    kernel = eq.compile(CASES["softmax"].source, target="cpu", native="off")
    shown = kernel.backward
    assert isinstance(shown.kernel, eq.Kernel) and not shown.kernel._shapes._compiled
    assert shown.certificate.ok and shown.plan.kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "source",
    [
        "y[b,d] = x[b,d] * rsqrt(mean[d](sq(x[b,d])) + 1e-6) * w[d]",
        "s[b] = sum[d](x[b,d])\ny[b,d] = x[b,d] * s[b] * w[d]\nreturn y",
        "m[b] = max[d](x[b,d])\ny[b,d] = exp(x[b,d] - m[b]) * w[d]\nreturn y, m",
    ],
)
def test_outputs_have_the_dtype_that_they_have_without_a_gradient(source: str, dtype: torch.dtype) -> None:
    """What is saved in float32 does not make outputs so that are made of it."""
    kernel = eq.compile(source, verify=False)
    x, w = torch.randn(4, 8).to(dtype), torch.randn(8).to(dtype)
    plain = kernel(x=x, w=w)
    trained = kernel(x=x.requires_grad_(), w=w.requires_grad_())
    for one, other in zip(
        *(made if isinstance(made, tuple) else (made,) for made in (plain, trained)), strict=True
    ):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other.detach())
