"""Which outputs share a kernel, and what is said of those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eqfuse as eq

NORM = "y[n,d] = h[n,d] * rsqrt(mean[d](sq(h[n,d])) + eps) * w[d]"
RESIDUAL = "h[n,d] = x[n,d] + r[n,d]"


@pytest.mark.parametrize("order", ["y, h", "h, y"])
@pytest.mark.parametrize("prefer", ["rolling", "multi_pass", "resident", "split_k"])
def test_a_residual_is_stored_by_the_kernel_of_its_norm(order: str, prefer: str) -> None:
    kernel = eq.compile(f"{RESIDUAL}\n{NORM}\nreturn {order}", target="cpu", native="off", prefer=prefer)
    rng = np.random.default_rng(0)
    x, r, w = (rng.standard_normal(shape) for shape in ((5, 40), (5, 40), (40,)))
    found = dict(zip(order.split(", "), kernel(x=x, r=r, w=w, eps=1e-6), strict=True))
    np.testing.assert_allclose(found["h"], x + r)
    h = x + r
    np.testing.assert_allclose(found["y"], h / np.sqrt(np.square(h).mean(1, keepdims=True) + 1e-6) * w)
    assert kernel.certificate.ok and not kernel.why_not()
    if prefer != "split_k":  # which has one kernel for parts of rows, and one for what is made of them
        assert len(kernel.plan.kernels) == 1


KTO = """
a[i] = sigmoid(p[i] - r[i] - max(mean[j](q[j] - s[j]), 0))
b[j] = sigmoid(max(mean[i](p[i] - r[i]), 0) - (q[j] - s[j]))
return a, b
"""


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("a[i,j] = x[i,j] * c[i]\nb[k,j] = z[k,j] * w[j]\nreturn a, b", ""),
        ("a[i,j] = x[i,j] * c[j]\nb[k,j] = z[k,j] * c[j]\nreturn a, b", "their axes are [i, j] and [k, j]"),
        (f"{RESIDUAL}\n{NORM}\nz[n,d] = x[n,d] * v[n,d]\nreturn y, z", "one reads what the other does not"),
        (KTO, "their axes are [i] and [j]"),
        ("a[i] = sum[j](sum[k](x[i,j,k]) * u[j])\nb[i] = sum[k](exp(x[i,0,k]))\nreturn a, b", "folds along"),
    ],
)
def test_outputs_that_are_left_apart_are_said(program: str, why: str) -> None:
    kernel = eq.compile(program, target="cpu", native="off")
    said = "\n".join(map(str, kernel.why_not()))
    assert why in said and bool(why) == bool(said)
    assert len(kernel.plan.kernels) == 2


ADAPTED = "sum[k](x[b,k] * (w[o,k] + sum[r](u[o,r] * v[r,k])))"
SIZES = {"b": 4096, "k": 1024, "o": 1024, "r": 16, "p": 1024}


@pytest.mark.parametrize(("dtype", "stored"), [("f32", None), ("bf16", "bf16"), ("f16", "f16")])
def test_a_computed_operand_of_many_blocks_is_stored_first(dtype: str, stored: str | None) -> None:
    """In the dtype that its product rounds it to: 64 blocks of rows would each make it again."""
    declared = "".join(
        f"{t}: {dtype}[{axes}]\n" for t, axes in {"x": "b,k", "w": "o,k", "u": "o,r", "v": "r,k"}.items()
    )
    sizes = {axis: n for axis, n in SIZES.items() if axis != "p"}
    kernel = eq.compile(f"{declared}y[b,o] = {ADAPTED}", target="h200", sizes=sizes)
    assert kernel.certificate.ok
    (made,) = kernel.plan.kernels[0].outputs
    assert len(kernel.plan.kernels) == 2 and made.axes == ("o", "k") and made.dtype == stored
    fused = [plan for plan in kernel.plans() if len(plan.kernels) == 1]
    assert fused and all(plan.cost.seconds > kernel.plan.cost.seconds for plan in fused)


GATED = """
x: f16[t,c]
G: f16[f,c]
U: f16[f,c]
D: f16[o,f]
h[t,f] = {}
y[t,o] = sum[f](h[t,f] * D[o,f])
return y
"""
GATE, UP = "silu(sum[c](x[t,c] * G[f,c]))", "sum[c](x[t,c] * U[f,c])"


@pytest.mark.parametrize("product", [f"{GATE} * {UP}", f"{UP} * {GATE}", f"{GATE} / (1 + abs({UP}))"])
def test_factors_of_one_operand_are_stored_as_one(product: str) -> None:
    """Each by itself would be rounded apart, and multiplied again by every block of columns."""
    sizes = {"t": 16, "c": 4096, "f": 14336, "o": 4096}
    kernel = eq.compile(GATED.format(product), target="h200", sizes=sizes)
    made = [(output.axes, output.dtype) for plan in kernel.plan.kernels for output in plan.outputs]
    assert made[0] == (("t", "f"), "f16") and len(made) == 2 and kernel.certificate.ok


def test_a_factor_of_more_positions_is_not_stored_with_the_others() -> None:
    program = GATED.replace("h[t,f] * D", "h[t,f] * v[o,f] * D").format(f"{GATE} * {UP}")
    kernel = eq.compile(program, target="h200", sizes={"t": 64, "c": 4096, "f": 4096, "o": 4096})
    assert kernel.certificate.ok
    assert ("t", "f") in {output.axes for plan in kernel.plan.kernels for output in plan.outputs}


def test_a_computed_operand_inside_of_a_stored_reduction_is_stored() -> None:
    program = f"h[b,o] = {ADAPTED}\ny[b,p] = sum[o](relu(h[b,o]) * z[p,o])\nreturn y"
    halves = "x: bf16[b,k]\nw: bf16[o,k]\nu: bf16[o,r]\nv: bf16[r,k]\nz: bf16[p,o]\n"
    kernel = eq.compile(halves + program, target="h200", sizes=SIZES)
    made = [output.axes for plan in kernel.plan.kernels for output in plan.outputs]
    assert made == [("o", "k"), ("b", "o"), ("b", "p")] and kernel.certificate.ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_stored_operand_is_what_every_block_would_make(dtype: torch.dtype) -> None:
    kernel = eq.compile(f"y[b,o] = {ADAPTED}", target="cpu", native="off", reassociate="exact")
    made = torch.Generator().manual_seed(0)
    x, w, u, v = (
        torch.randn(shape, generator=made).to(dtype)
        for shape in ((1100, 520), (500, 520), (500, 8), (8, 520))
    )
    got = kernel(x=x, w=w, u=u, v=v)
    assert len(kernel.plan.kernels) == 2
    want = x.double() @ (w.double() + u.double() @ v.double()).T
    worst = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}[dtype]
    assert float((got.double() - want).abs().max()) <= worst * float(want.abs().max())
