"""Kernels under torch's autograd: `backward`, `torch.func.grad`, second derivatives, and `k.backward`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grad_programs import ATTENTION, CASES, Case
from torch.utils.checkpoint import checkpoint

import eqfuse as eq
from bench.workloads import WORKLOADS
from eqfuse.differentiate.saved import Saved
from eqfuse.terms.parser import axes_of, parse

SOFTMAX = CASES["softmax"].source
softmax = eq.compile(SOFTMAX)


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    """Inputs; those that gradients are by require grad, scalars among them."""
    made = {name: torch.from_numpy(array) for name, array in case.tensors().items()}
    made |= {
        name: torch.tensor(float(case.scalars[name])).double() for name in case.wrt if name in case.scalars
    }
    return {name: tensor.requires_grad_() if name in case.wrt else tensor for name, tensor in made.items()}


def called(kernel: eq.Kernel, case: Case, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The differentiable outputs."""
    program = parse(case.source)
    axes = {
        axis: case.extents[axis]
        for axis in axes_of(program.outputs)
        if axis not in program.domains and axis not in program.lengths
    }
    scalars = {name: value for name, value in case.scalars.items() if name not in tensors}
    found = kernel(**tensors, **scalars, sizes=axes)
    every = found if isinstance(found, tuple) else (found,)
    return tuple(value for value in every if value.is_floating_point())


STEPPED = ("casts", "remainders", "steps")
"""Functions with steps: differences do not see their derivative."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in STEPPED])
@pytest.mark.slow(but=["softmax"])
def test_gradients_agree_with_differences(name: str) -> None:
    case = CASES[name]
    tensors = tensors_of(case)
    kernel = eq.compile(case.source)
    wrt = [tensors[name] for name in case.wrt]

    def call(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return called(kernel, case, {**tensors, **dict(zip(case.wrt, given, strict=True))})

    assert torch.autograd.gradcheck(call, wrt, fast_mode=True)


SWIFT = (
    "causal_prefill",
    "qknorm_attention",
    "l2norm",
    "variance",
    "softmax",
    "layernorm",
    "cross_entropy",
    "mlp",
    "moe_routing",
)
"""One benchmark program of each kind; `pytest -m sweep` takes the others."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SWIFT else pytest.mark.sweep) for n in WORKLOADS]
)
def test_gradients_of_benchmark_programs_agree_with_differences(name: str) -> None:
    workload = WORKLOADS[name]
    case = workload.cases["small"]
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in workload.inputs(case).items()}
    wrt = {n: x.requires_grad_() for n, x in inputs.items() if x.is_floating_point()}
    kernel = eq.compile(workload.exact_source, scalars=case.constants, native="wait")

    def call(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = kernel(**workload.arguments(case, {**inputs, **dict(zip(wrt, given, strict=True))}))
        every = found if isinstance(found, tuple) else (found,)
        return tuple(value for value in every if value.is_floating_point())

    assert torch.autograd.gradcheck(call, list(wrt.values()), fast_mode=True)
    assert kernel.backward.certificate.ok


REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum[j](x[i,j])": lambda x: x.sum(1),
    "max[j](x[i,j])": lambda x: x.max(1).values,
    "min[j](x[i,j])": lambda x: x.min(1).values,
    "prod[j](x[i,j])": lambda x: x.prod(1),
    "mean[j](x[i,j])": lambda x: x.mean(1),
    "var[j](x[i,j])": lambda x: x.var(1, correction=0),
    "std[j](x[i,j])": lambda x: x.std(1, correction=0),
    "logsumexp[j](x[i,j])": lambda x: x.logsumexp(1),
    "mean_var.s[j](1, x[i,j], 0)": lambda x: x.var(1, correction=0) * x.shape[1],
    "softmax_weighted[j](x[i,j], sq(x[i,j]))": lambda x: (x.softmax(1) * x.square()).sum(1),
    "argmax.v[j](x[i,j], j)": lambda x: x.max(1).values,
    "argmin.v[j](x[i,j], j)": lambda x: x.min(1).values,
}
"""Reductions of the language and shipped ones, and what PyTorch calls them; `topk` is among the programs."""


@pytest.mark.slow(but=["min[j]"])
@pytest.mark.parametrize("text", REDUCTIONS)
def test_gradients_of_reductions_are_those_of_pytorch(text: str) -> None:
    kernel = eq.compile(f"y[i] = {text}", native="off")
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(call(x), x, weights)[0] for call in (lambda x: kernel(x=x), REDUCTIONS[text])
    )
    assert torch.allclose(found, expected)
    assert torch.autograd.gradcheck(lambda x: kernel(x=x), [x], fast_mode=True)


@pytest.mark.slow(but=["sum"])
@pytest.mark.parametrize("name", ["sum", "softmax", "rmsnorm", "weighted"])
def test_second_derivatives(name: str) -> None:
    case = CASES[name]
    tensors = tensors_of(case)
    kernel = eq.compile(case.source)

    def call(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return called(kernel, case, {**tensors, **dict(zip(case.wrt, given, strict=True))})

    assert torch.autograd.gradgradcheck(call, [tensors[name] for name in case.wrt], fast_mode=True)


def test_inputs_that_are_broadcast_or_not_contiguous() -> None:
    x = torch.randn(7, 1, dtype=torch.float64, requires_grad=True)
    for view in (lambda x: x.expand(7, 5), lambda x: x.T.expand(3, 7), lambda x: x.repeat(1, 4)[::2, 1:]):
        weights = torch.randn(view(x).shape, dtype=torch.float64)
        found, exact = (
            torch.autograd.grad((f(view(x)) * weights).sum(), x)[0]
            for f in (lambda v: softmax(x=v), lambda v: torch.softmax(v, 1))
        )
        assert torch.allclose(found, exact, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_have_the_dtype_of_their_inputs(dtype: torch.dtype) -> None:
    x = torch.randn(6, 300).to(dtype).requires_grad_()
    weights = torch.randn(6, 300).to(dtype)
    (found,) = torch.autograd.grad(softmax(x=x), x, weights)
    assert found.dtype == dtype
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.softmax(exact, 1), exact, weights.double())
    tolerance = {2: 8 * torch.finfo(dtype).eps, 4: 1e-5, 8: 1e-13}[dtype.itemsize]
    assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_gradients_of_half_precision_are_rounded_where_they_are_stored() -> None:
    kernel = eq.compile("y[i,j] = sq(x[i,j]) * w[j]")
    x = torch.randn(4, 9).bfloat16().requires_grad_()
    w = torch.randn(9, requires_grad=True)
    kernel(x=x, w=w).sum().backward()
    assert kernel.backward.source.splitlines()[0] == "dx: bf16[i, j]" and "dw: " not in kernel.backward.source
    assert "dx: bf16[i, j]" in str(kernel.backward.tile) and kernel.backward.certificate.ok
    assert torch.equal(x.grad, (2 * w * x).detach().bfloat16())


def test_the_same_gradient_every_time() -> None:
    x = torch.randn(40, 2000, requires_grad=True)
    found = [torch.autograd.grad(softmax(x=x).square().sum(), x)[0] for _ in range(2)]
    assert torch.equal(*found)


def test_only_what_requires_grad_gets_a_gradient() -> None:
    kernel = eq.compile("y[i] = sum[j](x[i,j] * w[j])")
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    kernel(x=x, w=w).sum().backward()
    assert torch.allclose(x.grad, w.expand(3, 4))
    assert w.grad is None
    assert kernel.backward.source == "dx[i, j] = dy[i] * w[j]\nreturn dx"


def test_outputs_that_nobody_asks_for() -> None:
    kernel = eq.compile(
        "m[i] = max[j](x[i,j])\nk[i] = argmax[j](x[i,j])\ns[i] = sum[j](x[i,j])\nreturn m, k, s"
    )
    x = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True)
    m, k, s = kernel(x=x)
    assert not k.requires_grad
    assert torch.autograd.grad(m, x, retain_graph=True)[0].tolist() == [[0, 1, 0]]
    assert torch.autograd.grad((m.sum() + 2 * s.sum()), x)[0].tolist() == [[2, 3, 2]]


@pytest.mark.slow
def test_a_module_trains() -> None:
    torch.manual_seed(0)
    attention = eq.compile(ATTENTION, scalars={"g": 1})
    layer = torch.nn.Linear(8, 24)
    data = torch.randn(2, 1, 10, 8)

    def loss(fused: bool) -> torch.Tensor:
        q, k, v = layer(data).chunk(3, -1)
        if fused:
            return attention(Q=q, K=k, V=v, scale=8**-0.5).square().mean()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    found, exact = (torch.autograd.grad(loss(fused), list(layer.parameters())) for fused in (True, False))
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_checkpoints_and_hooks() -> None:
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    y: Any = checkpoint(lambda x: softmax(x=x), x, use_reentrant=False)
    seen: list[torch.Tensor] = []
    y.register_hook(seen.append)
    y.square().sum().backward()
    assert len(seen) == 1
    exact = x.detach().requires_grad_()
    torch.softmax(exact, 1).square().sum().backward()
    assert torch.allclose(x.grad, exact.grad)


@pytest.mark.slow
def test_func_grad_and_vjp() -> None:
    x = torch.randn(4, 9, dtype=torch.float64)

    def loss(function: Any) -> Any:
        return lambda x: function(x).pow(3).sum()

    fused, plain = loss(lambda x: softmax(x=x)), loss(lambda x: torch.softmax(x, 1))
    assert torch.allclose(torch.func.grad(fused)(x), torch.func.grad(plain)(x))
    again = [torch.func.grad(lambda x, f=f: torch.func.grad(f)(x).square().sum())(x) for f in (fused, plain)]
    assert torch.allclose(*again)
    y, pull = torch.func.vjp(lambda x: softmax(x=x), x)
    assert torch.allclose(pull(y)[0], torch.func.vjp(lambda x: torch.softmax(x, 1), x)[1](y)[0])


def test_backward_shows_the_gradient() -> None:
    kernel = eq.compile(SOFTMAX)
    before = kernel.backward  # by all tensors, before any call
    assert before.saved == ("y",) and before.forward is None
    assert before.source == (
        "sum_dy_y[i] = sum[j](dy[i, j] * y[i, j])\ndx[i, j] = y[i, j] * (dy[i, j] - sum_dy_y[i])\n"
        "# max_x passes nothing on: its cotangent is 0 for all inputs\nreturn dx"
    )
    x = torch.randn(4, 9, requires_grad=True)
    kernel(x=x).sum().backward()
    shown = kernel.backward
    assert shown.source == before.source
    assert shown.plan.schedule in ("resident", "rolling", "multi_pass", "split_k")
    assert "sum_dy_y" in shown.source and "sum_j" in str(shown.merge)
    assert shown.certificate.ok and shown.certificate.bound < 2**-40
    assert "the gradient's program:" in str(shown.certificate)
    assert shown.derivation.check()
    with pytest.raises(AttributeError):
        shown.unknown  # noqa: B018


def test_a_gradient_that_is_wrong_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "dx[i, j] = 3 * dy[i] * x[i, j]\nreturn dx"
    saved = Saved("", wrong, wrong, (), ())
    monkeypatch.setattr("eqfuse.differentiate.autograd.saving_gradient", lambda *_, **__: saved)
    kernel = eq.compile("y[i] = sum[j](sq(x[i,j]))")
    y = kernel(x=torch.ones(2, 3, requires_grad=True))
    with pytest.raises(eq.EqfuseError, match="the gradient by x was not verified"):
        y.sum().backward()


def test_empty_axes_and_sizes_of_the_call() -> None:
    kernel = eq.compile("y[i] = sum[j](x[i,j] * x[i,j]) + sum[t](t)")
    for shape in ((3, 0), (0, 4), (2, 2)):
        x = torch.randn(shape, requires_grad=True)
        kernel(x=x, sizes={"t": 3}).sum().backward()
        assert torch.allclose(x.grad, 2 * x)


def test_kernels_are_copied_and_pickled_with_gradients() -> None:
    kernel = eq.compile("y[i] = sum[j](sq(x[i,j]))")
    x = torch.randn(3, 4, requires_grad=True)
    kernel(x=x).sum().backward()
    for other in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        (found,) = torch.autograd.grad(other(x=x).sum(), x)
        assert torch.allclose(found, 2 * x)


def test_constants_of_the_kernel_are_those_of_its_gradient() -> None:
    kernel = eq.compile("y[i] = sum[j](x[i,j]) * c", scalars={"c": 3.0})
    x = torch.randn(3, 4, requires_grad=True)
    kernel(x=x).sum().backward()
    assert x.grad.tolist() == [[3.0] * 4] * 3


def test_arrays_and_plain_tensors_are_as_ever() -> None:
    x = torch.randn(3, 4)
    assert not softmax(x=x).requires_grad
    assert softmax(x=x.numpy()).shape == (3, 4)
    with torch.no_grad():
        assert not softmax(x=x.requires_grad_()).requires_grad


@pytest.mark.parametrize("exponent", [0.5, 1.5, 2.5, 3.5, -1.5, -2.5, 2, 3, -1, -2])
def test_gradients_of_powers_at_0_and_infinity_are_those_of_pytorch(exponent: float) -> None:
    kernel = eq.compile(f"y[i] = x[i]**{exponent}", native="off")
    points = [0.0, 1.0, 4.0, float("inf")]
    x, exact = (torch.tensor(points, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kernel(x=x).sum().backward()
    (exact**exponent).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad)


UNSIZED: dict[str, tuple[str, Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "computed positions alone": (
        "c[i,k,l] = x[i,l+2] * z[k,l+2]\ny[i,k] = c[i,k,0] * c[i,k,1]",
        lambda x, z: x[:, None, 2] * z[None, :, 2] * x[:, None, 3] * z[None, :, 3],
        ((3, 4), (5, 4)),
    ),
    "reductions of chunks": (
        "i: axis[4]\nm[k] = logsumexp[j](x[k+0,j])\nn[l] = sum[j](sq(x[l+2,j]))\ny[i] = where(i < 2, m[i+0], n[i-2])",
        lambda x: torch.cat([x[:2].logsumexp(-1), x[2:].square().sum(-1)]),
        ((4, 5),),
    ),
}
"""Definitions with an axis that nothing gives a size, and inputs' shapes."""


@pytest.mark.parametrize("name", UNSIZED)
def test_gradients_of_definitions_that_nothing_gives_a_size(name: str) -> None:
    source, function, shapes = UNSIZED[name]
    kernel = eq.compile(source, native="off")
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = torch.autograd.grad(kernel(**dict(zip("xz", given, strict=False))).square().sum(), given)
    expected = torch.autograd.grad(function(*given).square().sum(), given)
    torch.testing.assert_close(found, expected)
    assert kernel.backward.certificate.ok


@pytest.mark.slow
def test_promises_of_joined_axes_are_joined() -> None:
    """Multi-query attention: rows of queries are joined, and the bound of their scores reads them."""
    source = """
    s[g,t,j] = sum[d](q[g,t,d] * k[j,d])
    p[g,t,j] = exp(s[g,t,j] - max[j](s[g,t,j]))
    o[g,t,e] = sum[j](p[g,t,j] / sum[j](p[g,t,j]) * v[j,e])
    """
    kernel = eq.compile(source, native="off")
    torch.manual_seed(0)
    q, k, v = (torch.randn(*shape, requires_grad=True) for shape in ((2, 3, 4), (5, 4), (5, 4)))
    found = torch.autograd.grad(kernel(q=q, k=k, v=v).square().sum(), (q, k, v))
    expected = torch.autograd.grad(((q @ k.T).softmax(-1) @ v).square().sum(), (q, k, v))
    torch.testing.assert_close(found, expected)


ROOTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "std[j](x[i,j])": lambda x: x.std(1, correction=0),
    "root(sum[j](sq(x[i,j])))": lambda x: x.norm(dim=1),
    "sum[j](x[i,j] / max(root(sum[j](sq(x[i,j]))), 0.5))": lambda x: F.normalize(x, dim=1, eps=0.5).sum(1),
}


@pytest.mark.parametrize("text", ROOTS)
def test_gradients_of_norms_at_0_are_those_of_pytorch(text: str) -> None:
    kernel = eq.compile(f"y[i] = {text}", native="off")
    rows = [[0.0, 0, 0], [2, 2, 2], [1, 2, 2]]
    x, exact = (torch.tensor(rows, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kernel(x=x).sum().backward()
    ROOTS[text](exact).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad)
    assert kernel.backward.certificate.ok
    assert "root" not in str(kernel.tile) and "root" not in kernel.backward.source


def _log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2).sum(-1)


def _dpo(logits: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    found = _log_probabilities(logits, labels)
    h = found.shape[0] // 2
    return -F.logsigmoid(0.1 * (found[:h] - found[h:] - (reference[:h] - reference[h:]))).mean()


def _orpo(logits: torch.Tensor, labels: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    found, h = _log_probabilities(logits, labels) / 5, logits.shape[0] // 2
    chosen, rejected = found[:h], found[h:]
    odds = chosen - rejected - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [_dpo, _orpo])
def test_losses_of_halves_of_a_batch(loss: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 3, 7, dtype=torch.float64, requires_grad=True)
    labels, reference = torch.randint(0, 7, (6, 3)), torch.randn(6, dtype=torch.float64)
    made = eq.from_torch(loss, logits, labels, reference, native="off")
    used = (logits, labels, reference)
    found, expected = made(*used), loss(*used)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, logits)[0] for out in (found, expected)))


def _sinks(scores: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """The weights of GPT-OSS's attention: a softmax with one more term, which is dropped."""
    every = torch.cat([scores, sink[:, None]], -1)
    every = every - every.max(-1, keepdim=True).values
    return every.softmax(-1)[:, :-1]


@pytest.mark.slow
def test_attention_sinks() -> None:
    scores, sink = (torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((3, 5), (3,)))
    made = eq.from_torch(_sinks, scores, sink, native="off")
    longer = torch.randn(4, 7, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64)
    for given in ((scores, sink), longer):
        found, expected = made(*given), _sinks(*given)
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(expected)
        grads = (torch.autograd.grad((out * weights).sum(), given[0])[0] for out in (found, expected))
        torch.testing.assert_close(*grads)


AT_TIES: dict[str, Callable[..., torch.Tensor]] = {
    "clamp": lambda x, y: x.clamp(0, 1),
    "clamp from below": lambda x, y: x.clamp(min=0),
    "clamp by tensors": lambda x, y: torch.clamp(x, min=y, max=y + 1),
    "maximum": torch.maximum,
    "relu": lambda x, y: torch.relu(x),
    "relu6": lambda x, y: F.relu6(6 * x),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "hardswish": lambda x, y: F.hardswish(3 * x),
    "hardsigmoid": lambda x, y: F.hardsigmoid(3 * x),
    "max of a dimension": lambda x, y: x.max(-1).values,
}


@pytest.mark.parametrize("name", AT_TIES)
def test_gradients_at_ties_are_those_of_torch(name: str) -> None:
    fn = AT_TIES[name]
    x = torch.tensor([[0.0, 1.0, 1.0, -2.0], [-1.0, 2.0, 2.0, 0.5]], requires_grad=True)
    y = torch.tensor([[0.0, 0.0, 3.0, -2.0], [2.0, 1.0, 2.0, 0.25]])
    found, expected = eq.from_torch(fn, x, y, native="off")(x, y), fn(x, y)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in (found, expected)))


def test_known_calls_of_autograd_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are those of each call; which tensors require grad, and integers, tell calls apart; and no input outlives its call."""
    kernel = eq.compile("y[i] = sum[j](where(j < n, x[i,j] * w[j] * s, 0))", target="cpu", verify=False)

    def checked(n: int, s: float, wanted: str) -> weakref.ref[torch.Tensor]:
        x, w = torch.randn(5, 7), torch.randn(7)
        by = [{"x": x, "w": w}[name].requires_grad_() for name in wanted]
        out, dy = kernel(x=x, w=w, n=n, s=s), torch.randn(5)
        exact = (x[:, :n] * w[:n] * s).sum(1)
        torch.testing.assert_close(out, exact)
        if by:
            torch.testing.assert_close(torch.autograd.grad(out, by, dy), torch.autograd.grad(exact, by, dy))
        assert out.requires_grad == bool(by)
        return weakref.ref(x)

    kinds = [(4, "xw"), (4, "x"), (3, "w"), (3, "")]
    for n, wanted in kinds:
        for s in (2.0, -1.0):
            checked(n, s, wanted)
    monkeypatch.setattr("eqfuse.kernel.is_recorded", lambda values: pytest.fail("a call was looked at"))
    gone = [checked(n, s, wanted) for s in (0.5, 3.0) for n, wanted in kinds for _ in range(3)]
    gc.collect()
    assert not any(each() is not None for each in gone)
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7)
    with torch.no_grad():
        assert not kernel(x=x, w=w, n=4, s=1.0).requires_grad
