"""Forward mode: `eq.jvp` as programs, and calls under `torch.func.jvp`, `jacfwd`, `hessian`, dual tensors and their compositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grad_programs import CASES
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves

import eqfuse as eq
from bench.programs import registered
from eqfuse.kernel import Kernel
from eqfuse.program_files import noted, numbers, shipped
from eqfuse.terms.parser import parse

T = torch.Tensor
RNG = torch.Generator().manual_seed(7)


def drawn(*shape: int) -> T:
    return torch.randn(*shape, dtype=torch.float64, generator=RNG)


# -- as programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_derivative_is_that_of_dual_numbers(name: str) -> None:
    case = CASES[name]
    registered(case.source)
    source = eq.jvp(case.source, case.wrt)
    certificate = eq.certify_jvp(case.source, source, case.wrt)
    assert certificate.ok, certificate.reason
    first, *_ = [output.name for output in parse(source).outputs]
    *lines, returned = source.splitlines()
    axes = next(line.partition(" = ")[0] for line in lines if line.startswith(first)).removeprefix(first)
    doubled = "\n".join([*lines, f"twice{axes} = 2 * {first}{axes}", returned.replace(first, "twice", 1)])
    wrong = doubled.replace(first, f"{first}_1").replace("twice", first)
    assert not eq.certify_jvp(case.source, wrong, case.wrt).ok


def test_tangents_are_named_for_what_they_are_of() -> None:
    source = eq.jvp("y[i] = sum[j](x[i,j] * w[j])\nn = sum[i](y[i])\nreturn y, n", ("x",))
    assert [output.name for output in parse(source).outputs] == ["ty", "tn"]
    assert {tensor.name for tensor in parse(source).tensors} == {"tx", "w"}


def test_a_name_that_an_input_has_is_numbered() -> None:
    program = "y[i] = x[i] * tx[i] * dx[i]"
    assert "tx_2[" in eq.jvp(program, ("x",))
    gradient = eq.grad(program)
    assert [output.name for output in parse(gradient).outputs] == ["dx_2", "dtx", "ddx"]
    assert eq.certify_gradient(program, gradient).ok
    assert eq.certify_jvp(program, eq.jvp(program)).ok


def test_an_output_that_is_left_out_is_seen() -> None:
    program = "y[i] = x[i] * x[i]\nz[i] = 3 * x[i]\nc[i] = floor(x[i])\nreturn y, z, c"
    assert eq.certify_jvp(program, eq.jvp(program)).ok
    assert not eq.certify_jvp(program, "ty[i] = 2 * x[i] * tx[i]").ok


def test_a_tangent_that_is_left_out_is_seen() -> None:
    program = "y[i] = x[i] * z[i]"
    half = eq.jvp(program, ("x",))
    assert eq.certify_jvp(program, half).ok
    assert eq.certify_jvp(program, half, ("x",)).ok
    assert not eq.certify_jvp(program, half, ("x", "z")).ok


@pytest.mark.parametrize(
    ("program", "wrt", "message"),
    [
        ("y[i] = floor(x[i])", None, "no output has a derivative by x"),
        ("y[i] = x[i]", ("z",), "the program has no input 'z'"),
        ("n: i64[i]\ny[i] = x[i] * n[i]", ("n",), "holds integers"),
        ("y[i] = x[i", None, "was never closed"),
    ],
)
def test_what_has_no_derivative_is_refused(program: str, wrt: Any, message: str) -> None:
    with pytest.raises(eq.EqfuseError, match=message):
        eq.jvp(program, wrt)


def test_what_is_no_derivative_is_refused() -> None:
    program = "y[i] = x[i] * x[i]"
    with pytest.raises(eq.EqfuseError, match="'z' is no tangent of an output") as caught:
        eq.certify_jvp(program, "z[i] = tx[i]")
    assert "ty" in str(caught.value)
    assert "reads 'u'" in eq.certify_jvp(program, "ty[i] = 2 * x[i] * u[i]").reason
    assert "dimensions" in eq.certify_jvp(program, "ty[i] = 2 * x[i] * sum[j](tx[i,j])").reason


# -- calls in torch --------------------------------------------------------------------------------

PROGRAMS: Mapping[str, tuple[str, Callable[..., T], dict[str, T]]] = {
    "sum": ("y[i] = sum[j](x[i,j])", lambda x: x.sum(1), {"x": drawn(3, 5)}),
    "mean of squares": ("y = mean[i](sq(x[i]))", lambda x: x.square().mean(), {"x": drawn(7)}),
    "softmax": (
        "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))",
        lambda x: x.softmax(1),
        {"x": drawn(3, 5)},
    ),
    "log-softmax": (
        "y[i,j] = x[i,j] - logsumexp[j](x[i,j])",
        lambda x: x.log_softmax(1),
        {"x": drawn(3, 5)},
    ),
    "logsumexp": ("y[i] = logsumexp[j](x[i,j])", lambda x: x.logsumexp(1), {"x": drawn(3, 5)}),
    "variance": ("y[i] = var[j](x[i,j])", lambda x: x.var(1, correction=0), {"x": drawn(3, 5)}),
    "standard deviation": ("y[i] = std[j](x[i,j])", lambda x: x.std(1, correction=0), {"x": drawn(3, 5)}),
    "maximum": ("y[i] = max[j](x[i,j])", lambda x: x.amax(1), {"x": drawn(3, 5)}),
    "product": ("y[i] = prod[j](x[i,j])", lambda x: x.prod(1), {"x": drawn(3, 5)}),
    "rms norm": (
        "y[i,j] = x[i,j] * rsqrt(mean[j](sq(x[i,j])) + 0.01) * w[j]",
        lambda x, w: F.rms_norm(x, (5,), w, 0.01),
        {"x": drawn(3, 5), "w": drawn(5)},
    ),
    "layer norm": (
        "y[i,j] = (x[i,j] - mean[j](x[i,j])) * rsqrt(var[j](x[i,j]) + 0.01) * w[j] + c[j]",
        lambda x, w, c: F.layer_norm(x, (5,), w, c, 0.01),
        {"x": drawn(3, 5), "w": drawn(5), "c": drawn(5)},
    ),
    "linear and gelu": (
        "y[i,o] = gelu(sum[k](x[i,k] * w[o,k]) + c[o])",
        lambda x, w, c: F.gelu(F.linear(x, w, c)),
        {"x": drawn(3, 4), "w": drawn(5, 4), "c": drawn(5)},
    ),
    "gated": (
        "y[i,o] = silu(sum[k](x[i,k] * w[o,k])) * sum[k](x[i,k] * v[o,k])",
        lambda x, w, v: F.silu(x @ w.T) * (x @ v.T),
        {"x": drawn(3, 4), "w": drawn(5, 4), "v": drawn(5, 4)},
    ),
    "causal attention": (
        """
s[i,j] = where(j <= i, sum[d](q[i,d] * k[j,d]) / 2, -inf)
p[i,j] = exp(s[i,j] - max[j](s[i,j]))
o[i,e] = sum[j](p[i,j] * v[j,e]) / sum[j](p[i,j])""",
        lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0],
        {"q": drawn(5, 4), "k": drawn(5, 4), "v": drawn(5, 3)},
    ),
    "linear attention": (
        "o[i,e] = sum[j](where(j <= i, sum[d](q[i,d] * k[j,d]) * v[j,e], 0))",
        lambda q, k, v: (q @ k.T).tril() @ v,
        {"q": drawn(5, 4), "k": drawn(5, 4), "v": drawn(5, 3)},
    ),
    "cumulative sum": (
        "t: axis[j]\ny[t] = sum[j](where(j <= t, x[j], 0))",
        lambda x: x.cumsum(0),
        {"x": drawn(9)},
    ),
    "recurrence": (
        "h[t] = a[t] * h[t-1] + b[t]",
        lambda a, b: _recurrence(a, b),
        {"a": drawn(6), "b": drawn(6)},
    ),
    "cosine": (
        "y[i] = sum[j](a[i,j] * b[i,j]) * rsqrt(sum[j](sq(a[i,j])) * sum[j](sq(b[i,j])))",
        lambda a, b: F.cosine_similarity(a, b),
        {"a": drawn(3, 5), "b": drawn(3, 5)},
    ),
    "distances": (
        "y[i] = -logsumexp[j](-sum[d](sq(a[i,d] - b[j,d])))",
        lambda a, b: -(-(a[:, None] - b).square().sum(2)).logsumexp(1),
        {"a": drawn(3, 4), "b": drawn(5, 4)},
    ),
    "two outputs": (
        "m[i] = mean[j](x[i,j])\nv[i] = mean[j](sq(x[i,j] - m[i]))\nreturn m, v",
        lambda x: (x.mean(1), x.var(1, correction=0)),
        {"x": drawn(3, 5)},
    ),
    "broadcast": (
        "y[i,j] = x[i] + 0 * z[j]",
        lambda x, z: x[:, None] + 0 * z,
        {"x": drawn(3), "z": drawn(4)},
    ),
}


def _recurrence(a: T, b: T) -> T:
    found = [b[0]]
    for t in range(1, len(a)):
        found.append(a[t] * found[-1] + b[t])
    return torch.stack(found)


def kernel(name: str) -> Kernel:
    return eq.compile(PROGRAMS[name][0], native="off")


def called(compiled: Kernel, names: tuple[str, ...], *values: T) -> Any:
    return compiled(**dict(zip(names, values, strict=True)))


def total(function: Callable[..., Any], *values: T) -> T:
    made = function(*values)
    parts = made if isinstance(made, tuple) else (made,)
    return sum((part.sin().sum() for part in parts), torch.zeros((), dtype=torch.float64))


def same(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    one, other = tree_leaves(found), tree_leaves(expected)
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.slow(but=["sum", "softmax", "layer norm", "linear attention", "two outputs"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_directional_derivatives_and_products_with_hessians(name: str) -> None:
    _, reference, tensors = PROGRAMS[name]
    own = partial(called, kernel(name), tuple(tensors))
    values, tangents = tuple(tensors.values()), tuple(drawn(*t.shape) for t in tensors.values())
    same(jvp(own, values, tangents), jvp(reference, values, tangents))
    every = tuple(range(len(values)))
    products = [
        jvp(grad(partial(total, function), argnums=every), values, tangents) for function in (own, reference)
    ]
    same(*products)


X = drawn(3, 5)
V = drawn(5)
ALONG = drawn(3, 5)
WEIGHTED = "y[i] = sum[j](exp(x[i,j]) * v[j])"


def dual(function: Callable[..., Any], *values: T) -> Any:
    with forward_ad.dual_level():
        made = function(forward_ad.make_dual(X, ALONG))
        return tuple(forward_ad.unpack_dual(made))


def dual_of_a_graph(function: Callable[..., Any]) -> Any:
    leaf = X.clone().requires_grad_()
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(function(forward_ad.make_dual(leaf, ALONG)))
        assert made.tangent is not None
        return torch.autograd.grad(made.tangent.sum(), leaf)


def gradient_of_a_dual(function: Callable[..., Any]) -> Any:
    leaf = X.clone().requires_grad_()
    with forward_ad.dual_level():
        moved = forward_ad.make_dual(leaf, ALONG)
        (found,) = torch.autograd.grad(function(moved).sum(), moved, create_graph=True)
        return forward_ad.unpack_dual(found).tangent


def dual_batch(function: Callable[..., Any]) -> Any:
    with forward_ad.dual_level():
        moved = forward_ad.make_dual(X, ALONG)
        return forward_ad.unpack_dual(vmap(function)(torch.stack([moved, moved]))).tangent


COMPOSED: Mapping[str, Callable[[Callable[..., T]], Any]] = {
    "jvp": lambda f: jvp(f, (X,), (ALONG,)),
    "jvp of grad": lambda f: jvp(grad(lambda x: f(x).sum()), (X,), (ALONG,)),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (ALONG,))[1].sum())(X),
    "jvp of jvp": lambda f: jvp(lambda x: jvp(f, (x,), (ALONG,))[1], (X,), (X,)),
    "jvp of vjp": lambda f: jvp(lambda x: vjp(f, x)[1](V[:3]), (X,), (ALONG,)),
    "jvp of vmap": lambda f: jvp(vmap(f), (torch.stack([X, 2 * X]),), (torch.stack([ALONG, X]),)),
    "vmap of jvp": lambda f: vmap(lambda t: jvp(f, (X,), (t,))[1])(torch.stack([ALONG, X])),
    "jacfwd": lambda f: jacfwd(f)(X),
    "hessian": lambda f: hessian(lambda x: f(x).sum())(X),
    "jacfwd twice": lambda f: jacfwd(jacfwd(lambda x: f(x).sum()))(X),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(lambda x: f(x).sum()))(X),
    "jvp of a hessian": lambda f: jvp(hessian(lambda x: f(x).sum()), (X,), (ALONG,)),
    "linearize": lambda f: linearize(f, X)[1](ALONG),
    "hvp": lambda f: torch.autograd.functional.hvp(lambda x: f(x).sum(), X, ALONG),
    "vhp": lambda f: torch.autograd.functional.vhp(lambda x: f(x).sum(), X, ALONG),
    "dual": dual,
    "dual of a graph": dual_of_a_graph,
    "gradient of a dual": gradient_of_a_dual,
    "dual batch": dual_batch,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_transforms_compose(name: str) -> None:
    compiled = eq.compile(WEIGHTED, native="off")
    found = COMPOSED[name](lambda x: compiled(x=x, v=V))
    expected = COMPOSED[name](lambda x: (x.exp() * V).sum(1))
    same(found, expected)
    assert any(torch.any(leaf != 0) for leaf in tree_leaves(found))


def test_in_a_graph_of_torch_compile() -> None:
    compiled = eq.compile(WEIGHTED, native="off")
    run = torch.compile(
        lambda x: jvp(lambda each: compiled(x=each, v=V), (x,), (ALONG,)), backend="eager", fullgraph=True
    )
    same(run(X), jvp(lambda x: (x.exp() * V).sum(1), (X,), (ALONG,)))


def test_halves_give_tangents_in_their_dtype() -> None:
    compiled = eq.compile(WEIGHTED, native="off")
    x, v, t = X.half(), V.half(), ALONG.half()
    value, tangent = jvp(lambda each: compiled(x=each, v=v), (x,), (t,))
    assert value.dtype == tangent.dtype == torch.float16
    exact = jvp(lambda each: (each.exp() * v.double()).sum(1), (x.double(),), (t.double(),))
    same((value.double(), tangent.double()), exact, 1e-2)


def test_an_output_without_a_derivative_has_none() -> None:
    compiled = eq.compile("y[i] = sum[j](x[i,j])\nn[i] = argmax[j](x[i,j])\nreturn y, n", native="off")
    with forward_ad.dual_level():
        y, n = compiled(x=forward_ad.make_dual(X, ALONG))
        assert forward_ad.unpack_dual(n).tangent is None
        same(forward_ad.unpack_dual(y).tangent, ALONG.sum(1))


def test_a_wrong_derivative_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from eqfuse.differentiate import autograd

    monkeypatch.setattr(autograd, "jvp", lambda *_, **__: "ty[i] = sum[j](tx[i,j] * v[j])")
    compiled = eq.compile("y[i] = sum[j](sq(x[i,j]) * v[j])", native="off")
    with pytest.raises(eq.EqfuseError, match="directional derivative by x was not verified"):
        jvp(lambda x: compiled(x=x, v=V), (X,), (ALONG,))


def test_third_derivatives() -> None:
    compiled = eq.compile(WEIGHTED, native="off")
    leaf = X.clone().requires_grad_()

    def thrice(function: Callable[[T], T]) -> T:
        (one,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
        (two,) = torch.autograd.grad((one * ALONG).sum(), leaf, create_graph=True)
        (three,) = torch.autograd.grad((two * ALONG).sum(), leaf)
        return three

    same(thrice(lambda x: compiled(x=x, v=V)), thrice(lambda x: (x.exp() * V).sum(1)))


def test_second_derivatives_of_a_recurrence_take_linear_time() -> None:
    """Of each direction, inclusive or not: no step of the text has two axes."""
    again = eq.grad(eq.grad("h[t] = a[t] * h[t-1] + b[t]"))
    assert all(len(output.axes) == 1 for output in parse(again).outputs)
    assert not any(
        "," in line.partition("=")[0] for line in again.splitlines() if "[" in line.partition("=")[0]
    )


def test_derivatives_are_those_of_differences() -> None:
    """By torch's own checks, one by one and in batches of its older vmap, forward and backward."""
    compiled = eq.compile("y[i] = sum[j](sin(x[i,j]) * s) * s", native="off")
    given = X.clone().requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def call(x: T, s: T) -> T:
        return compiled(x=x, s=s)

    assert torch.autograd.gradcheck(
        call, given, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(call, given, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians_by_torch_autograd_functional(strategy: str) -> None:
    compiled = eq.compile(WEIGHTED, native="off")
    jacobian = partial(torch.autograd.functional.jacobian, vectorize=True, strategy=strategy)
    same(jacobian(lambda x: compiled(x=x, v=V), X), jacobian(lambda x: (x.exp() * V).sum(1), X))


def test_a_batch_of_batches_of_the_older_vmap() -> None:
    from torch._vmap_internals import _vmap

    compiled = eq.compile("y = sum[j](x[j] * z[j])", native="off")
    same(_vmap(lambda a: _vmap(lambda b: compiled(x=a, z=b))(X))(X), X @ X.T)


@pytest.mark.slow(but=["colbert", "qk_norm", "sinks", "ops.rms_norm"])
@pytest.mark.parametrize("name", shipped())
def test_programs_that_ship_have_gradients_and_directional_derivatives(name: str) -> None:
    source = shipped()[name]
    known = numbers(noted(source, "constants"), "--constant")
    gradient, derivative = (make(source, scalars=known) for make in (eq.grad, eq.jvp))
    assert eq.certify_gradient(source, gradient, scalars=known).ok
    assert eq.certify_jvp(source, derivative, scalars=known).ok
