"""Recurrences whose steps do not merge: computed in order, as numpy's loops compute them in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import EqfuseError, ParseError
from eqfuse.loops.check import NestError, check
from eqfuse.loops.nodes import Loop, Nest, Store
from eqfuse.loops.walk import rewritten, statements
from eqfuse.proof.derivation import Derivation
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Output, call, reductions, transform
from eqfuse.terms.parser import parse
from eqfuse.tile.triton.aot import compile_for
from eqfuse.tile.triton.launch import interpret
from eqfuse.vendor.files import write
from eqfuse.verify.equivalence import equivalent

A = npt.NDArray[Any]
Arrays = dict[str, A]
Loops = Callable[[Arrays], A]

RNN = "h[b,i,t] = tanh(sum[j](W[i,j] * h[b,j,t-1]) + x[b,i,t])\nreturn h"
LSTM = """
f[b,i,t] = sigmoid(sum[j](F[i,j] * h[b,j,t-1]) + x[b,i,t,0])
u[b,i,t] = sigmoid(sum[j](I[i,j] * h[b,j,t-1]) + x[b,i,t,1])
o[b,i,t] = sigmoid(sum[j](O[i,j] * h[b,j,t-1]) + x[b,i,t,2])
g[b,i,t] = tanh(sum[j](G[i,j] * h[b,j,t-1]) + x[b,i,t,3])
c[b,i,t] = f[b,i,t] * where(t == 0, c0[b,i], c[b,i,t-1]) + u[b,i,t] * g[b,i,t]
h[b,i,t] = o[b,i,t] * tanh(c[b,i,t])
return h, c
"""
GRU = """
r[b,i,t] = sigmoid(sum[j](R[i,j] * before[b,j,t]) + x[b,i,t])
z[b,i,t] = sigmoid(sum[j](Z[i,j] * before[b,j,t]) + y[b,i,t])
n[b,i,t] = tanh(r[b,i,t] * sum[j](N1[i,j] * before[b,j,t]) + x[b,i,t])
h[b,i,t] = (1 - z[b,i,t]) * n[b,i,t] + z[b,i,t] * before[b,i,t]
return h
""".replace("before[b,j,t]", "where(t == 0, h0[b,j], h[b,j,t-1])").replace(
    "before[b,i,t]", "where(t == 0, h0[b,i], h[b,i,t-1])"
)
DELTA = """
S[b,i,j,t] = g[b,t] * (S[b,i,j,t-1] - w[b,t] * k[b,t,j] * sum[m](S[b,i,m,t-1] * k[b,t,m])) + w[b,t] * v[b,t,i] * k[b,t,j]
o[b,t,i] = sum[j](S[b,i,j,t] * q[b,t,j])
return o
"""
PATHS = "d[i,j] = x[i,j] + where(i > 0, max(where(j > 0, d[i-1,max(j-1,0)], 0), d[i-1,j]), 0)\nreturn d"


def sigmoid(x: A) -> A:
    return 1 / (1 + np.exp(-x))


def rnn(v: Arrays) -> A:
    h, found = np.zeros(v["x"].shape[:2]), []
    for t in range(v["x"].shape[2]):
        h = np.tanh(h @ v["W"].T + v["x"][:, :, t])
        found.append(h)
    return stacked(found, v["x"].shape)


def lstm(v: Arrays) -> A:
    h, c, found = np.zeros(v["x"].shape[:2]), v["c0"], []
    for t in range(v["x"].shape[2]):
        f, u, o, g = (h @ v[w].T + v["x"][:, :, t, n] for n, w in enumerate("FIOG"))
        c = sigmoid(f) * c + sigmoid(u) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        found.append(h)
    return stacked(found, v["x"].shape[:3])


def gru(v: Arrays) -> A:
    h, found = v["h0"], []
    for t in range(v["x"].shape[2]):
        x, y = v["x"][:, :, t], v["y"][:, :, t]
        z = sigmoid(h @ v["Z"].T + y)
        n = np.tanh(sigmoid(h @ v["R"].T + x) * (h @ v["N1"].T) + x)
        h = (1 - z) * n + z * h
        found.append(h)
    return stacked(found, v["x"].shape)


def delta(v: Arrays) -> A:
    batch, length, features = v["v"].shape
    state, found = np.zeros((batch, features, v["k"].shape[2])), []
    for t in range(length):
        g, w = v["g"][:, t, None, None], v["w"][:, t, None, None]
        k, value = v["k"][:, t, None, :], v["v"][:, t, :, None]
        state = g * (state - w * (state * k).sum(2, keepdims=True) * k) + w * value * k
        found.append((state * v["q"][:, t, None, :]).sum(2))
    return np.stack(found, 1) if found else np.zeros((batch, 0, features))


def paths(v: Arrays) -> A:
    d = np.zeros_like(v["x"])
    for i in range(len(d)):
        before = d[i - 1] if i else np.zeros_like(d[i])
        left = np.concatenate([np.zeros(min(1, len(before))), before[:-1]]) if i else before
        d[i] = v["x"][i] + (np.maximum(left, before) if i else 0)
    return d


def stacked(found: list[A], shape: tuple[int, ...]) -> A:
    return np.stack(found, 2) if found else np.zeros(shape)


def drawn(**shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}


CASES: dict[str, tuple[str, Callable[[int], Arrays], Loops]] = {
    "rnn": (RNN, lambda n: drawn(W=(5, 5), x=(3, 5, n)), rnn),
    "lstm": (
        LSTM,
        lambda n: drawn(**dict.fromkeys("FIOG", (5, 5)), x=(3, 5, n, 4), c0=(3, 5)),
        lstm,
    ),
    "gru": (GRU, lambda n: drawn(R=(4, 4), Z=(4, 4), N1=(4, 4), x=(2, 4, n), y=(2, 4, n), h0=(2, 4)), gru),
    "delta rule": (
        DELTA,
        lambda n: {
            **drawn(k=(2, n, 5), q=(2, n, 5), v=(2, n, 3)),
            "g": np.full((2, n), 0.9),
            "w": np.full((2, n), 0.5),
        },
        delta,
    ),
    "paths": (PATHS, lambda n: drawn(x=(n, 6)), paths),
}


def called(kernel: eq.Kernel, given: Arrays, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = kernel(**{name: torch.tensor(value).to(dtype) for name, value in given.items()})
    first = found[0] if isinstance(found, tuple) else found
    assert isinstance(first, torch.Tensor)
    return first


@pytest.fixture(scope="module")
def kernels() -> dict[str, eq.Kernel]:
    return {name: eq.compile(source, native="wait") for name, (source, _, _) in CASES.items()}


@pytest.mark.parametrize("length", [0, 1, 2, 33])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_a_loop(kernels: dict[str, eq.Kernel], name: str, length: int) -> None:
    _, made, loop = CASES[name]
    given = made(length)
    found = called(kernels[name], given)
    np.testing.assert_allclose(found.numpy(), loop(given), rtol=1e-4, atol=1e-4)
    assert "C++" in kernels[name].plan.code or not length


@pytest.mark.parametrize("name", CASES)
def test_each_stage_is_verified_and_replayed(kernels: dict[str, eq.Kernel], name: str) -> None:
    kernel = kernels[name]
    assert kernel.plan.schedule == "in_order" and kernel.certificate.ok
    assert kernel.derivation.check().ok
    assert Derivation.from_json(kernel.derivation.to_json()).check().ok
    assert "in_order" in kernel.explain()


@pytest.mark.parametrize("name", CASES)
def test_torch_calls_and_float64(name: str) -> None:
    source, made, loop = CASES[name]
    given = made(9)
    found = called(eq.compile(source, native="off"), given, torch.float64)
    np.testing.assert_allclose(found.numpy(), loop(given), rtol=1e-10, atol=1e-10)
    reference = eq.reference(source)(**given)
    first = reference[0] if isinstance(reference, tuple) else reference
    np.testing.assert_allclose(first, loop(given), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_triton(name: str) -> None:
    source, made, loop = CASES[name]
    text = eq.compile(source, target="sm_90", verify=False).triton
    for length in (1, 5):
        given = made(length)
        arguments = {n: torch.tensor(value).float() for n, value in given.items()}
        found = interpret(text, f"fused_{'_'.join(o.name for o in parse(source).outputs)}", **arguments)
        first = found[0] if isinstance(found, tuple) else found
        np.testing.assert_allclose(first.numpy(), loop(given), rtol=1e-4, atol=1e-4)
    assert text.count("tl.debug_barrier()") == 1


def test_triton_walks_long_axes_of_states_in_tiles() -> None:
    kernel = eq.compile(f"i: axis[80]\n{RNN}", target="sm_90", verify=False)
    (steps,) = kernel.loops.kernels
    assert [stmt.axis for stmt in statements(steps.body) if isinstance(stmt, Loop)] == ["t", "i"]
    given = drawn(W=(80, 80), x=(2, 80, 4))
    given["W"] /= 10
    found = interpret(kernel.triton, "fused_h", **{n: torch.tensor(v).float() for n, v in given.items()})
    np.testing.assert_allclose(found.numpy(), rnn(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source, features", [(RNN, 512), (LSTM, 256), (GRU, 256)])
def test_triton_walks_what_a_step_contracts_in_tiles(source: str, features: int) -> None:
    """Where a block has no room for rows of all matrices, or loads them anew at each step."""
    text = f"i: axis[{features}]\n{source}"
    kernel = eq.compile(text, target="h200", verify=False)
    assert kernel.plan.schedule == "in_order" and not kernel.plan.reason
    (config,) = kernel.plan.configs
    (walked,) = {node.axis for node in reductions(*(o.expr for o in kernel.program.outputs))}
    assert next(block.size for block in config.blocks if block.axis == walked)
    (report,) = compile_for(kernel.triton, "sm_90", sizes={"i": features})
    assert report.shared_bytes < kernel.device.shared


def test_triton_sums_what_a_step_contracts_over_tiles() -> None:
    features, length = 160, 3
    kernel = eq.compile(f"i: axis[{features}]\n{LSTM}", target="h200", verify=False)
    assert {block.axis for block in kernel.plan.configs[0].blocks if block.kind == "loop"} == {"i", "j"}
    given = drawn(**dict.fromkeys("FIOG", (features, features)), x=(2, features, length, 4), c0=(2, features))
    given |= {name: given[name] / 10 for name in "FIOG"}
    found = interpret(kernel.triton, "fused_h_c", **{n: torch.tensor(v).float() for n, v in given.items()})
    np.testing.assert_allclose(found[0].numpy(), lstm(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_step_that_folds_what_it_makes(target: str) -> None:
    """No other kernel stores what is made of the states of the same step, as operands of products are elsewhere."""
    source = """
u[b,i,t] = tanh(sum[j](W[i,j] * h[b,j,t-1]) + x[b,i,t])
h[b,i,t] = u[b,i,t] / sqrt(1 + sum[m](sq(u[b,m,t])))
return h
"""
    given, wanted = drawn(W=(5, 5), x=(2, 5, 4)), []
    h = np.zeros((2, 5))
    for t in range(4):
        u = np.tanh(h @ given["W"].T + given["x"][:, :, t])
        h = u / np.sqrt(1 + (u * u).sum(1, keepdims=True))
        wanted.append(h)
    tensors = {name: torch.tensor(value).float() for name, value in given.items()}
    kernel = eq.compile(source, target=target, verify=target == "cpu")
    found = kernel(**tensors) if target == "cpu" else interpret(kernel.triton, "fused_h", **tensors)
    np.testing.assert_allclose(found.numpy(), np.stack(wanted, 2), rtol=1e-4, atol=1e-5)
    assert len(kernel.loops.kernels) == 1


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 3e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", ["rnn", "lstm", "delta rule"])
def test_half_precision(
    kernels: dict[str, eq.Kernel], name: str, dtype: torch.dtype, tolerance: float
) -> None:
    _, made, loop = CASES[name]
    given = {n: torch.tensor(value).to(dtype).double().numpy() for n, value in made(17).items()}
    found = called(kernels[name], given, dtype)
    assert found.dtype == dtype or name == "delta rule"
    np.testing.assert_allclose(found.double().numpy(), loop(given), rtol=tolerance, atol=tolerance)


def test_a_state_that_is_not_returned_is_kept_in_float32() -> None:
    """Of many small additions none is lost."""
    kernel = eq.compile(
        "s[t] = min(s[t-1], 1e9) + x[t] * (1 + 0 * s[t-1])\ny = s[N(t) - 1]\nreturn y", native="off"
    )
    assert parse(kernel.program.source).in_order
    assert float(kernel(x=torch.full((4096,), 2.0**-7).bfloat16())) == 32.0


def test_strides_and_views() -> None:
    source, made, loop = CASES["rnn"]
    kernel, given = eq.compile(source, native="wait"), made(9)
    x = torch.tensor(given["x"]).float().permute(2, 0, 1).contiguous().permute(1, 2, 0)
    weights = torch.tensor(given["W"]).float().T.contiguous().T
    found = kernel(x=x, W=weights)
    np.testing.assert_allclose(found.numpy(), loop(given), rtol=1e-4, atol=1e-4)
    shared = torch.tensor(given["x"][:, :, :1]).float().expand(3, 5, 9)
    again = {**given, "x": shared.double().numpy()}
    np.testing.assert_allclose(kernel(x=shared, W=weights).numpy(), loop(again), rtol=1e-4, atol=1e-4)


def test_from_the_last_position() -> None:
    source, made, loop = CASES["rnn"]
    given = made(9)
    kernel = eq.compile(source.replace("t-1", "t+1"), native="wait")
    mirrored = loop({**given, "x": given["x"][:, :, ::-1]})[:, :, ::-1]
    np.testing.assert_allclose(called(kernel, given).numpy(), mirrored, rtol=1e-4, atol=1e-4)
    assert kernel.certificate.ok and kernel.derivation.check().ok


@pytest.mark.parametrize("distance", [1, 2, 3, 5])
def test_some_positions_before(distance: int) -> None:
    kernel = eq.compile(f"h[i,t] = sin(h[i,t-{distance}]) + h[i,t-1] / 2 + x[i,t]\nreturn h", native="wait")
    x = drawn(x=(4, 12))["x"]
    wanted = np.zeros_like(x)
    for t in range(12):
        far, near = (wanted[:, t - d] if t >= d else np.zeros(4) for d in (distance, 1))
        wanted[:, t] = np.sin(far) + near / 2 + x[:, t]
    np.testing.assert_allclose(called(kernel, {"x": x}).numpy(), wanted, rtol=1e-4, atol=1e-4)


def test_integers_stay_integers() -> None:
    x = torch.randint(0, 2**40, (3, 9))
    kernel = eq.compile("x: i64[i,t]\nh[i,t] = (h[i,t-1] * 3 + x[i,t]) % 1000003\nreturn h", native="wait")
    wanted, h = [], torch.zeros(3, dtype=torch.int64)
    for t in range(9):
        h = (h * 3 + x[:, t]) % 1000003
        wanted.append(h)
    found = kernel(x=x)
    assert isinstance(found, torch.Tensor) and found.dtype == torch.int64
    assert torch.equal(found, torch.stack(wanted, 1))


def test_masked_rows() -> None:
    kernel = eq.compile("h[i,t] = max(tanh(h[i,t-1]), x[i,t])\nreturn h", native="wait")
    x = drawn(x=(3, 9))["x"]
    x[0], x[1] = -np.inf, -1e30
    wanted, h = [], np.zeros(3)
    for t in range(9):
        h = np.maximum(np.tanh(h), x[:, t])
        wanted.append(h)
    np.testing.assert_allclose(called(kernel, {"x": x}).numpy(), np.stack(wanted, 1), rtol=1e-5, atol=1e-6)


def test_layers_and_what_reads_them() -> None:
    """A recurrence of another one, and outputs of its last position, of a sum, and at other positions."""
    source = """
g[i,t] = tanh(sum[j](W[i,j] * g[j,t-1]) + x[i,t])
h[i,t] = tanh(sum[j](V[i,j] * h[j,t-1]) + g[i,t])
last[i] = h[i,N(t)-1]
total[i] = sum[t](h[i,t])
moved[i,s] = where(s > 1, h[i,s-2], 0) * g[i,s]
return last, total, moved
"""
    given = drawn(W=(4, 4), V=(4, 4), x=(4, 9))
    kernel = eq.compile(source, native="wait")
    tensors = {name: torch.tensor(value).float() for name, value in given.items()}
    last, total, moved = (each.numpy() for each in kernel(**tensors))
    g = rnn({"W": given["W"], "x": given["x"][None]})
    h = rnn({"W": given["V"], "x": g})[0]
    np.testing.assert_allclose(last, h[:, -1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total, h.sum(1), rtol=1e-4, atol=1e-4)
    behind = np.concatenate([np.zeros((4, 2)), h[:, :-2]], 1)
    np.testing.assert_allclose(moved, behind * g[0], rtol=1e-4, atol=1e-5)
    assert kernel.certificate.ok and kernel.derivation.check().ok


def test_what_reads_no_state_is_made_for_all_positions_at_once() -> None:
    source = "h[b,i,t] = tanh(sum[j](W[i,j] * h[b,j,t-1]) + sum[k](V[i,k] * x[b,t,k]))\nreturn h"
    kernel = eq.compile(source, native="off", verify=False)
    made, steps = kernel.loops.kernels
    assert not any(isinstance(stmt, Loop) and stmt.unit for stmt in made.body)
    assert [stmt.axis for stmt in steps.body if isinstance(stmt, Loop)] == ["t"]


def test_a_reduction_over_the_name_of_an_axis_of_the_step() -> None:
    kernel = eq.compile(
        "h[i,t] = tanh(sum[i](h[i,t-1]) / N(i) + sum[t](x[t]) + y[i])\nreturn h", native="wait"
    )
    x, y = torch.randn(5) / 4, torch.randn(3)
    wanted, h = [], torch.zeros(3)
    for _ in range(5):
        h = torch.tanh(h.mean() + x.sum() + y)
        wanted.append(h)
    torch.testing.assert_close(kernel(x=x, y=y), torch.stack(wanted, 1))


# -- gradients ----------------------------------------------------------------------------------------

DIFFERENTIABLE: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {}


def differentiable(name: str) -> Callable[[Any], Any]:
    return lambda function: DIFFERENTIABLE.setdefault(name, function)


@differentiable("rnn")
def rnn_of_torch(v: dict[str, torch.Tensor]) -> torch.Tensor:
    h, found = torch.zeros_like(v["x"][:, :, 0]), []
    for x in v["x"].unbind(2):
        h = torch.tanh(h @ v["W"].T + x)
        found.append(h)
    return torch.stack(found, 2)


@differentiable("lstm")
def lstm_of_torch(v: dict[str, torch.Tensor]) -> torch.Tensor:
    h, c, found = torch.zeros_like(v["c0"]), v["c0"], []
    for x in v["x"].unbind(2):
        f, u, o, g = (h @ v[w].T + x[..., n] for n, w in enumerate("FIOG"))
        c = f.sigmoid() * c + u.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        found.append(h)
    return torch.stack(found, 2)


@differentiable("delta rule")
def delta_of_torch(v: dict[str, torch.Tensor]) -> torch.Tensor:
    state, found = v["v"].new_zeros(v["v"].shape[0], v["v"].shape[2], v["k"].shape[2]), []
    for t in range(v["g"].shape[1]):
        g, w, k = v["g"][:, t, None, None], v["w"][:, t, None, None], v["k"][:, t, None]
        state = g * (state - w * (state * k).sum(2, keepdim=True) * k) + w * v["v"][:, t, :, None] * k
        found.append((state * v["q"][:, t, None]).sum(2))
    return torch.stack(found, 1)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(kernels: dict[str, eq.Kernel], name: str, length: int) -> None:
    given = CASES[name][1](length)
    ours = {n: torch.tensor(value).float().requires_grad_() for n, value in given.items()}
    exact = {n: torch.tensor(value).requires_grad_() for n, value in given.items()}
    found = kernels[name](**ours)
    y, wanted = found[0] if isinstance(found, tuple) else found, DIFFERENTIABLE[name](exact)
    above = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y.backward(above.float())
    wanted.backward(above)
    for each in given:
        torch.testing.assert_close(ours[each].grad.double(), exact[each].grad, rtol=1e-4, atol=1e-4)
    backward = kernels[name].backward
    assert backward.certificate.ok and backward.derivation.check().ok


def test_the_gradient_is_a_recurrence_in_the_other_direction() -> None:
    forwards, backwards = parse(eq.grad(RNN)).in_order
    assert not forwards.backwards and backwards.backwards


def test_a_gradient_that_passes_on_one_number_is_scanned() -> None:
    """It is affine in what the position after it passes on."""
    text = eq.grad("h[i,t] = tanh(h[i,t-1] + x[i,t])\nreturn h")
    assert "dh_2[i, t + 1] * (1 - sq(h[i, t + 1]))" in text
    program = parse(text)
    (forwards,) = program.in_order
    assert not forwards.backwards
    assert "linear_recurrence.h" in {node.op for node in reductions(*(o.expr for o in program.outputs))}


def test_a_gradient_of_a_recurrence_from_the_last_position() -> None:
    source = "h[i,t] = sin(h[i,t+1]) * a[i,t] + x[i,t]\nreturn h"
    given = {"a": torch.rand(2, 7).requires_grad_(), "x": torch.randn(2, 7).requires_grad_()}
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    h, found = torch.zeros(2, dtype=torch.float64), []
    for t in reversed(range(7)):
        h = h.sin() * exact["a"][:, t] + exact["x"][:, t]
        found.append(h)
    torch.stack(found[::-1], 1).square().sum().backward()
    eq.compile(source, native="off")(**given).square().sum().backward()
    for name, value in given.items():
        torch.testing.assert_close(value.grad.double(), exact[name].grad, rtol=1e-4, atol=1e-5)


def test_batches_tangents_and_second_derivatives() -> None:
    kernel = eq.compile(
        "u[i,t] = sin(h[i,t-1])\nh[i,t] = tanh(u[i,t] + x[i,t])\ny[i] = h[i,N(t)-1]\nreturn y", native="off"
    )

    def loop(x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for each in x.unbind(1):
            h = torch.tanh(h.sin() + each)
        return h

    def ours(x: torch.Tensor) -> torch.Tensor:
        return kernel(x=x)

    def twice(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    x, several = torch.randn(3, 6), torch.randn(2, 3, 6)
    torch.testing.assert_close(torch.vmap(ours)(several), torch.stack([loop(each) for each in several]))
    along = (x.clone(),), (torch.ones_like(x),)
    for found, wanted in zip(torch.func.jvp(ours, *along), torch.func.jvp(loop, *along), strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(twice(ours, x), twice(loop, x), rtol=1e-4, atol=1e-5)


def test_a_wrong_gradient_is_refused() -> None:
    source = "h[i,t] = tanh(h[i,t-1] + x[i,t])\nreturn h"
    text = eq.grad(source)
    assert eq.certify_gradient(source, text).ok
    for right, wrong in (
        ("t + 1] * (1 - sq(", "t + 1] * (1 + sq("),
        ("dh[i, t] + where", "dh[i, t] - where"),
    ):
        assert right in text and not eq.certify_gradient(source, text.replace(right, wrong)).ok


# -- what is refused ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str]] = {
    "two directions": ("u[t] = tanh(v[t-1])\nv[t] = u[t+1] + x[t]\nreturn v", "in two directions"),
    "no position before": ("u[t] = v[t] + x[t]\nv[t] = tanh(u[t-1])\nreturn v", "read before it is defined"),
    "too few indices": ("u[i,t] = tanh(v[t-1])\nv[i,t] = u[i,t] + x[i,t]\nreturn v", "has 2 axes, 1 given"),
    "no such axis": (
        "u[t] = sum[i](v[i,t-1])\ns = sum[t](u[t])\nv[i,t] = tanh(s) + x[i,t]\nreturn v",
        "has no axis",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_order_is_refused(name: str) -> None:
    source, message = REFUSED[name]
    with pytest.raises(EqfuseError, match=message) as refused:
        eq.compile(source)
    assert isinstance(refused.value, ParseError) or "axes" in message
    assert "^" in str(refused.value)


def test_a_read_outside_of_the_state() -> None:
    kernel = eq.compile("h[i,t] = tanh(h[i-1,t-1]) + x[i,t]\nreturn h", native="off", verify=False)
    with pytest.raises(EqfuseError, match="reads positions -1 to 2 of dimension 1 of 'h'"):
        kernel(x=torch.randn(3, 4))


def test_axes_of_a_state_have_its_extents() -> None:
    kernel = eq.compile(RNN, native="off", verify=False)
    with pytest.raises(EqfuseError, match="axis 'i' has size"):
        kernel(x=torch.randn(3, 5, 4), W=torch.randn(5, 6))


@pytest.mark.parametrize(
    "use, why",
    [
        (lambda k: k.init(), "no stream"),
        (lambda k: k.aggregate, "no stream"),
        (lambda k: eq.shard(k, 2, {"b": "x"}), "not sharded"),
        (lambda k: write(k, {"b": 2, "i": 3, "t": 4}, Path("none"), "rnn"), "not written"),
    ],
)
def test_what_wants_a_merge_says_so(use: Callable[[eq.Kernel], object], why: str) -> None:
    with pytest.raises(EqfuseError, match="'h' is computed in order along 't'") as refused:
        use(eq.compile(RNN, native="off", verify=False))
    assert why in str(refused.value) and "^" in str(refused.value)


@pytest.mark.parametrize(
    "source, why",
    [
        (RNN, "a step with sum[j](W[i, j] * h[b, j, t - 1]) has no merge"),
        (LSTM, "c and h read each other"),
        ("h[t] = tanh(h[t-1] + x[t])\nreturn h", "a step with tanh(h[t - 1] + x[t]) has no merge"),
        ("h[i,t] = h[i,t-3] + x[i,t]\nreturn h", "h[i, t - 3] is at other positions"),
    ],
)
def test_why_there_is_no_scan(source: str, why: str) -> None:
    (found, *_) = eq.compile(source, native="off", verify=False).why_not()
    assert "computed in order along t, not scanned" in found and why in found and "^" in found


# -- mutants -----------------------------------------------------------------------------------------


def _reads(outputs: tuple[Output, ...], change: Callable[[Load], Expr]) -> Iterator[tuple[Output, ...]]:
    """The outputs with what reads a state changed, one state at a time."""
    for name in [output.name for output in outputs]:

        def step(node: Expr, name: str = name) -> Expr:
            is_before = (
                isinstance(node, Load)
                and node.tensor == name
                and any(isinstance(at, Call) for at in node.index)
            )
            return change(node) if is_before and isinstance(node, Load) else node

        made = tuple(replace(output, expr=transform(output.expr, step)) for output in outputs)
        if made != outputs:
            yield made


def _one_earlier(load: Load) -> Expr:
    return Load(
        load.tensor, tuple(call("sub", at, Const(1)) if isinstance(at, Call) else at for at in load.index)
    )


def _nothing(load: Load) -> Expr:
    return Const(0.0)


@pytest.mark.parametrize("change", [_one_earlier, _nothing])
@pytest.mark.parametrize("name", ["rnn", "lstm", "gru", "delta rule"])
def test_another_step_is_not_equal(name: str, change: Callable[[Load], Expr]) -> None:
    program = parse(CASES[name][0])
    mutants = list(_reads(program.outputs, change))
    assert mutants
    for outputs in mutants:
        assert not equivalent(program, replace(program, outputs=outputs)).ok


def _changed_loads(nest: Nest, change: Callable[[Load], Expr]) -> Nest:
    def step(node: Expr) -> Expr:
        return change(node) if isinstance(node, Load) and node.tensor == "h" else node

    (kernel,) = nest.kernels
    return replace(
        nest, kernels=(replace(kernel, body=rewritten(kernel.body, lambda e: transform(e, step))),)
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda load: Load("h", (*load.index[:2], Axis("t"))),
        lambda load: Load("h", (*load.index[:2], call("add", Axis("t"), Const(1)))),
        lambda load: Load("h", (Const(0), *load.index[1:])),
        lambda load: Load("h", load.index[:2]),
    ],
)
def test_a_nest_reads_what_it_has_stored(change: Callable[[Load], Expr]) -> None:
    """Nothing of this position, of later ones, of other instances, nor with too few indices."""
    kernel = eq.compile(RNN, native="off", verify=False)
    check(kernel.loops, kernel.program)
    with pytest.raises(NestError, match="loads"):
        check(_changed_loads(kernel.loops, change), kernel.program)


def test_a_derivation_that_reads_a_state_too_early_is_refused() -> None:
    derivation = eq.compile(RNN, native="off", verify=False).derivation
    proof = derivation.proof
    (kernel,) = proof.kernels
    for axis, why in (("", "while it stores h"), ("b", "while it stores h")):
        wrong = replace(
            derivation, proof=replace(proof, kernels=(replace(kernel, in_order=axis),)), claims=None
        )
        verdict = wrong.check()
        assert not verdict.ok and why in verdict.why


def test_stores_of_a_nest_are_of_the_states() -> None:
    nest = eq.compile(LSTM, native="off", verify=False).loops
    (kernel,) = nest.kernels
    (loop,) = kernel.body
    assert isinstance(loop, Loop) and loop.unit
    assert {stmt.tensor for stmt in statements(loop.body) if isinstance(stmt, Store)} == {"h", "c"}
