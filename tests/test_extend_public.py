"""Reductions that the compiler's authors did not foresee, written through the public API alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from extend_kernels import SCHEDULES, kernels, outputs, registered

from eqfuse.kernel import Kernel

Array = np.ndarray[Any, Any]
Numpy = Callable[..., tuple[Array, ...]]


@dataclass(frozen=True)
class Written:
    """A registration, a program that uses it, and the same in numpy; `refused` are the schedules that it has not,
    and `why` a part of the reason."""

    words: dict[str, Any]
    source: str
    same: Numpy
    inputs: tuple[str, ...] = ("x",)
    refused: tuple[str, ...] = ()
    why: str = ""
    positive: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def _matrix_product(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, ...]:
    found = []
    for row in zip(a, b, c, d, strict=True):
        total = np.eye(2)
        for p, q, r, s in zip(*row, strict=True):
            total = total @ np.array([[p, q], [r, s]], dtype=np.float64)
        found.append(total.reshape(4))
    return tuple(np.stack(found, 1))


def _payload(x: Array, p: Array) -> tuple[Array, ...]:
    at = x.argmin(1)[:, None]
    return np.take_along_axis(x, at, 1)[:, 0], np.take_along_axis(p, at, 1)[:, 0]


def _softargmax(x: Array) -> tuple[Array, ...]:
    e = np.exp(x - x.max(1, keepdims=True))
    return ((e * np.arange(x.shape[1])).sum(1) / e.sum(1),)


UNMERGED = ("rolling", "split_k")

WRITTEN: dict[str, Written] = {
    "log_product": Written(
        {
            "state": "l, g",
            "lift": "log(abs(x)), where(x < 0, 1, 0)",
            "identity": "0, 0",
            "combine": "l1 + l2, g1 + g2",
            "result": "where(g % 2 == 0, 1, -1) * exp(l)",
            "commutative": True,
        },
        "y[i] = log_product[j](x[i, j])",
        lambda x: (x.astype(np.float64).prod(1),),
    ),
    "argmin_payload": Written(
        {
            "args": "x, p",
            "state": "v, k, p",
            "lift": "x, j, p",
            "identity": "inf, inf, 0",
            "combine": ", ".join(
                f"where((v1 < v2) | ((v1 == v2) & (k1 <= k2)), {name}1, {name}2)" for name in "vkp"
            ),
            "result": "v, p",
            "commutative": True,
        },
        "v[i], q[i] = argmin_payload[j](x[i, j], p[i, j])",
        _payload,
        inputs=("x", "p"),
    ),
    "moment_about_maximum": Written(
        {
            "state": "m, n, a, q",
            "lift": "x, 1, 0, 0",
            "identity": "-inf, 0, 0, 0",
            "combine": (
                "max(m1, m2), n1 + n2, "
                "a1 + n1 * (finite(m1) - finite(max(m1, m2))) + a2 + n2 * (finite(m2) - finite(max(m1, m2))), "
                "q1 + 2 * a1 * (finite(m1) - finite(max(m1, m2))) + n1 * sq((finite(m1) - finite(max(m1, m2)))) + "
                "q2 + 2 * a2 * (finite(m2) - finite(max(m1, m2))) + n2 * sq((finite(m2) - finite(max(m1, m2))))"
            ),
            "result": "q",
            "commutative": True,
        },
        "y[i] = moment_about_maximum[j](x[i, j])",
        lambda x: (np.square(x - x.max(1, keepdims=True)).sum(1),),
    ),
    "saturated": Written(
        {
            "state": "s",
            "lift": "min(abs(x) / 8, 1)",
            "identity": "0",
            "combine": "min(s1 + s2, 1)",
            "result": "s",
            "commutative": True,
        },
        "y[i] = saturated[j](x[i, j])",
        lambda x: (np.minimum(np.minimum(np.abs(x) / 8, 1).sum(1), 1),),
    ),
    "span": Written(
        {
            "state": "a, b",
            "lift": "x, x",
            "identity": "-inf, inf",
            "combine": "max(a1, a2), min(b1, b2)",
            "result": "a - b",
        },
        "y[i] = span[j](x[i, j])",
        lambda x: (x.max(1) - x.min(1),),
    ),
    "above_mean": Written(
        {"result": "sum[j](where(x > mean[j](x), 1, 0))"},
        "y[i] = above_mean[j](x[i, j])",
        lambda x: ((x > x.mean(1, keepdims=True)).sum(1),),
        refused=UNMERGED,
        why="no rule separates what varies along j",
    ),
    "soft_argmax": Written(
        {"result": "sum[j](exp(x - max[j](x)) * j) / sum[j](exp(x - max[j](x)))"},
        "y[i] = soft_argmax[j](x[i, j])",
        _softargmax,
    ),
    "geometric_mean": Written(
        {
            "state": "l, n",
            "lift": "log(x), 1",
            "identity": "0, 0",
            "combine": "l1 + l2, n1 + n2",
            "result": "exp(l / n)",
        },
        "y[i] = geometric_mean[j](x[i, j])",
        lambda x: (np.exp(np.log(x).mean(1)),),
        positive=True,
    ),
    "complex_product": Written(
        {
            "args": "a, b",
            "state": "re, im",
            "lift": "a, b",
            "identity": "1, 0",
            "combine": "re1 * re2 - im1 * im2, re1 * im2 + im1 * re2",
            "result": "re, im",
            "commutative": True,
        },
        "u[i], v[i] = complex_product[j](a[i, j], b[i, j])",
        lambda a, b: ((a + 1j * b).prod(1).real, (a + 1j * b).prod(1).imag),
        inputs=("a", "b"),
    ),
    "matrix_product": Written(
        {
            "args": "a, b, c, d",
            "state": "p, q, r, s",
            "lift": "a, b, c, d",
            "identity": "1, 0, 0, 1",
            "combine": "p1*p2 + q1*r2, p1*q2 + q1*s2, r1*p2 + s1*r2, r1*q2 + s1*s2",
            "result": "p, q, r, s",
        },
        "p[i], q[i], r[i], s[i] = matrix_product[j](a[i, j], b[i, j], c[i, j], d[i, j])",
        _matrix_product,
        inputs=("a", "b", "c", "d"),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.slow(but=["saturated", "span", "above"])
def test_ten_reductions_by_their_authors(name: str) -> None:
    written = WRITTEN[name]
    rng = np.random.default_rng(3)
    drawn = {each: rng.standard_normal((4, 23)).astype(np.float32) for each in written.inputs}
    if written.positive:
        drawn = {each: np.abs(value) + 0.1 for each, value in drawn.items()}
    expected = written.same(*drawn.values())
    refused = []
    with registered(name, **written.words):
        for schedule, kernel in kernels(written.source):
            if not isinstance(kernel, Kernel):
                refused.append(schedule)
                assert written.why in str(kernel)
                continue
            assert kernel.plan.schedule == schedule and kernel.certificate.ok
            for got, want in zip(outputs(kernel, **drawn), expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-6, err_msg=schedule)
    assert tuple(refused) == written.refused
    assert set(refused) < set(SCHEDULES)
