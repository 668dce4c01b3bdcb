"""Which outputs share a kernel, and what is said of those that do not."""

from __future__ import annotations

import numpy as np
import pytest

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
