"""Programs that nobody listed: every schedule that exists, against the float64 reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import ScheduleError
from eqfuse.loops.plan import SCHEDULES

generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


x = normal(5, 83)
PROGRAMS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "softmax over two axes": (
        "m[b] = max[j,k](x[b,j,k])\ny[b,j,k] = exp(x[b,j,k] - m[b]) / sum[j,k](exp(x[b,j,k] - m[b]))",
        {"x": normal(3, 17, 19)},
        {},
    ),
    "a stored reduction reads one that is stored for another": (
        """
        i: axis[j]
        m[i] = max[j](where(j <= i, x[j], -inf))
        n[i] = max[j](min(where(i - j < 0, f32(where(j <= i, x[j], -inf) - m[i]), -inf), m[i]))
        y[j] = logsumexp[i](max(bf16(n[i]), m[i]))
        return m, y
        """,
        {"x": normal(9)},
        {},
    ),
    "a cascade that also reads a sum over another axis": (
        """
        a[i] = sum[d](u[i,d])
        m[i] = max[j](x[i,j])
        y[i] = sum[j](exp(x[i,j] - m[i]) * relu(x[i,j] + a[i]))
        """,
        {"x": normal(3, 43), "u": normal(3, 7)},
        {},
    ),
    "what was computed over other axes is selected as it is": (
        """
        p[j,k] = exp(y[j,k] + sum[k](y[j,k]) - max[k](y[j,k] + sum[k](y[j,k])))
        A[i,j] = sum[k](p[j,k] / sum[k](p[j,k]) * x[i,j])
        C[j,k] = sum[i](where(k <= j - 1, max[j](y[j,k]), A[i,j]))
        """,
        {"x": normal(5, 7), "y": torch.cat([normal(6, 6), torch.full((1, 6), -torch.inf)])},
        {},
    ),
    "a long axis that was reduced is shared out around another reduction": (
        "A = sum[i](x[i])\nD[i] = sum[j](tanh(x[i] * w[j] - A))\nreturn D, A",
        {"x": normal(2100), "w": normal(7)},
        {},
    ),
    "a reduction over the axis that another one beside it keeps": (
        "D[i] = sum[j](z[i,j]) + sum[i](tanh(x[i]))",
        {"x": normal(2100), "z": normal(2100, 5)},
        {},
    ),
    "outputs that share a reduction, and not the axes that they keep": (
        "R = sum[k](exp(y[k]))\nA = R + sum[i](x[i])\nB[i] = R * sum[j](sin(z[i,j]))\nreturn A, B",
        {"x": normal(2100), "y": normal(11), "z": normal(2100, 5)},
        {},
    ),
    "a choice that is known, of two tiles": (
        "y[i,j] = where(2 > 0, sum[k](x[i,k]) - sum[k](x[i,k]), exp(u[j,i]))",
        {"x": normal(3, 7), "u": normal(4, 3)},
        {},
    ),
    "two reductions over different axes": (
        "y[i,j] = x[i,j] / sum[j](sq(x[i,j])) - max[i](x[i,j])",
        {"x": x},
        {},
    ),
    "cascades over two axes": (
        "a[i] = sum[j](x[i,j])\nm = max[i](a[i])\ny = log(sum[i](exp(a[i] - m))) + m",
        {"x": x},
        {},
    ),
    "softmax of columns": (
        "y[i,j] = exp(x[i,j] - max[i](x[i,j])) / sum[i](exp(x[i,j] - max[i](x[i,j])))",
        {"x": x},
        {},
    ),
    "polynomial attention": (
        "s[i,j] = sq(sum[d](q[i,d] * k[j,d]) + 1)\no[i,e] = sum[j](s[i,j] * v[j,e]) / sum[j](s[i,j])",
        {"q": normal(9, 5), "k": normal(33, 5), "v": normal(33, 7)},
        {},
    ),
    "log of a sum of products": (
        "y[i,k] = log(sum[j](exp(a[i,j] + b[j,k])))",
        {"a": normal(9, 33), "b": normal(33, 7)},
        {},
    ),
    "masked mean": (
        "y[i] = sum[j](where(x[i,j] > 0, x[i,j], 0)) / sum[j](where(x[i,j] > 0, 1, 0))",
        {"x": x},
        {},
    ),
    "geometric mean": ("y[i] = exp(mean[j](log(abs(x[i,j]))))", {"x": x}, {}),
    "Huber loss": (
        "r[i,j] = abs(x[i,j] - t[i,j])\ny = mean[i,j](where(r[i,j] < 1, 0.5 * sq(r[i,j]), r[i,j] - 0.5))",
        {"x": x, "t": normal(5, 83)},
        {},
    ),
    "nearest neighbour": (
        "y[i] = min[j](sum[d](sq(x[i,d] - c[j,d])))",
        {"x": normal(9, 5), "c": normal(33, 5)},
        {},
    ),
    "kernel density": (
        "y[i] = mean[j](exp(-0.5 * sum[d](sq((x[i,d] - c[j,d]) / h)))) / h",
        {"x": normal(9, 2), "c": normal(33, 2), "h": 0.7},
        {},
    ),
    "outer product": ("y[i,j] = a[i] * b[j]", {"a": normal(9), "b": normal(7)}, {}),
    "reduction of a reduction": ("y = sum[i](max[j](x[i,j]))", {"x": x}, {}),
    "a tensor and its transpose": ("y[i] = sum[j](x[i,j] * x[j,i])", {"x": normal(17, 17)}, {}),
    "pages": (
        """
        s[h,j] = sum[d](q[h,d] * K[page[j//P],j%P,d])
        p[h,j] = exp(s[h,j] - max[j](s[h,j]))
        o[h,e] = sum[j](p[h,j] / sum[j](p[h,j]) * V[page[j//P],j%P,e])
        """,
        {
            "q": normal(4, 8),
            "K": normal(6, 16, 8),
            "V": normal(6, 16, 8),
            "page": torch.tensor([5, 0, 3, 2]),
            "P": 16,
        },
        {"j": 61},
    ),
    "labels": (
        "l[i] = log(sum[c](exp(x[i,c]))) - x[i,t[i]]\ny = mean[i](l[i])",
        {"x": x, "t": torch.tensor([3, 0, 82, 7, 7])},
        {},
    ),
    "distance bias, window, heads shared at run time": (
        """
        s[h,i,j] = sum[d](q[h,i,d] * k[h//g,j,d]) + slope[h] * (j - i)
        t[h,i,j] = where((j <= i) & (i - j < w), s[h,i,j], -inf)
        p[h,i,j] = exp(t[h,i,j] - max[j](t[h,i,j]))
        o[h,i,e] = sum[j](p[h,i,j] / sum[j](p[h,i,j]) * v[h//g,j,e])
        """,
        {
            "q": normal(6, 29, 4),
            "k": normal(2, 29, 4),
            "v": normal(2, 29, 5),
            "slope": normal(6),
            "g": 3,
            "w": 7,
        },
        {},
    ),
    "batch axes last": (
        """
        s[i,j,b] = sum[d](q[d,i,b] * k[j,d,b])
        p[i,j,b] = exp(s[i,j,b] - max[j](s[i,j,b]))
        o[e,b,i] = sum[j](p[i,j,b] / sum[j](p[i,j,b]) * v[j,b,e])
        """,
        {"q": normal(4, 9, 2), "k": normal(33, 4, 2), "v": normal(33, 2, 5)},
        {},
    ),
    "several outputs in program order": (
        "a[i] = sum[j](x[i,j])\nb[i,j] = x[i,j] * 2\nc = max[i](a[i])\nreturn c, a, b",
        {"x": x},
        {},
    ),
    "a number times a sum of nothing so far": (
        """
        n: i32[i]
        a[i] = sum[j](where(j >= n[i], u[j], 0))
        b[i] = sum[j](where(i - j < 4, abs(y[i,j]), r * a[i]) / y[i,j])
        """,
        {
            "n": torch.tensor([0, 30, 90, 200], dtype=torch.int32),
            "u": normal(97),
            "y": 1 + abs(normal(4, 97)),
            "r": 3.0,
        },
        {},
    ),
    "prefix sums": ("y[i] = sum[j](where(j <= i, x[j], 0))", {"x": normal(37)}, {"i": 37}),
    "third moment": (
        "m = mean[i](x[i])\ns = mean[i](sq(x[i] - m))\nk = mean[i]((x[i] - m)**3) / (s * sqrt(s))\nreturn k",
        {"x": normal(97)},
        {},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(but=["a tensor and its transpose", "nearest neighbour"])
def test_program_in_every_schedule(name: str) -> None:
    source, given, sizes = PROGRAMS[name]
    exact = eq.reference(source)(sizes=sizes, **given)
    ran = 0
    for prefer in SCHEDULES:
        try:
            kernel = eq.compile(source, prefer=prefer)
            found = kernel(sizes=sizes, **given)
        except ScheduleError:
            continue
        ran += 1
        pairs = zip(found, exact, strict=True) if isinstance(found, tuple) else [(found, exact)]
        for got, want in pairs:
            assert got.shape == want.shape
            assert np.allclose(got, want, rtol=2e-4, atol=2e-5), prefer
        assert kernel.plan.schedule == prefer
        assert kernel.certificate.ok
    assert ran >= 2


def test_one_pass_waits_for_what_another_axis_gives() -> None:
    """The maximum is not needed before the sum over d is there, so that one loop over j computes all."""
    source, given, _ = PROGRAMS["a cascade that also reads a sum over another axis"]
    kernel = eq.compile(source, prefer="rolling")
    kernel(**given)
    assert [group.group.axis for group in kernel.plan.kernels[0].groups] == ["d", "j"]
    assert kernel.why_not() == ()


def test_strict_casts_keep_what_is_rounded() -> None:
    source = "y[i,e] = sum[j](f16(exp(x[i,j] - max[j](x[i,j]))) * v[j,e])"
    v = normal(83, 4)
    with pytest.raises(ScheduleError, match="no rolling plan"):
        eq.compile(source, prefer="rolling", strict_casts=True)(x=x, v=v)
    exact = eq.reference(source)(x=x, v=v)
    for strict, prefer in ((True, "multi_pass"), (True, "resident"), (False, "rolling")):
        found = eq.compile(source, prefer=prefer, strict_casts=strict)(x=x, v=v)
        assert np.allclose(found, exact, rtol=1e-5 if strict else 5e-3, atol=1e-5 if strict else 5e-3)


@pytest.mark.parametrize("columns", [5, 160], ids=["in one kernel", "stored between two"])
def test_strict_casts_are_those_that_are_written(columns: int) -> None:
    """Not the ones of the numerics policy: half-precision operands and outputs are verified all the same."""
    source = "y[i,e] = sum[j](f16(exp(x[i,j] - max[j](x[i,j]))) * v[j,e]) / sum[j](f32(x[i,j] * x[i,j]))"
    halves = {"x": x.half(), "v": normal(83, columns).half()}
    kernel = eq.compile(source, strict_casts=True)
    found = kernel(**halves)
    assert kernel.certificate.ok
    assert np.allclose(found, eq.reference(source)(**halves), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("change", ["- x[i]", "* abs(x[i])"])
def test_an_extreme_is_not_made_of_another_by_a_factor_of_the_data(op: str, change: str) -> None:
    """x may be 0 or infinite, which a repair takes for a state that has seen nothing."""
    body = "max(y[k], x[i])" if change.startswith("-") else "abs(y[k] + x[i])"
    source = f"b[i] = {op}[k]({body})\nc[i] = {op}[k]({body} {change})"
    given = {"x": torch.tensor([0.0, -math.inf, 2.0]), "y": torch.tensor([3.0, 1.0, -4.0])}
    found = eq.compile(source, prefer="rolling", verify=False)(**given)
    for value, exact in zip(found, eq.reference(source)(**given), strict=True):
        np.testing.assert_allclose(value, exact)


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "resident", "multi_pass"])
def test_a_state_is_folded_along_its_own_axis_inside_another_reduction(prefer: str) -> None:
    source = "a[i] = sum[j](x[i,j])\nb[l] = sum[i](y[i,l] + a[i])\nc[i] = sum[l](a[i] + b[l])"
    given = {"x": torch.randn(3, 4), "y": torch.randn(3, 5)}
    found = eq.compile(source, prefer=prefer, verify=False)(**given)
    np.testing.assert_allclose(found, eq.reference(source)(**given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
def test_positions_that_a_loop_carries_are_integers_when_it_is_verified(prefer: str) -> None:
    source = "b = argmin[k](x[k])\nc = sum[k]((b // 2) * y[k])"
    assert eq.compile(source, prefer=prefer, trials=16).certificate.ok


GUARDS = {
    "a choice between the data and a state": (
        "a[l] = sum[k](w[l,k])\ne[k] = sum[l](where(k % 2 == 0, z[k], max[l](w[l,k])) - a[l])",
        {"z": torch.tensor([-math.inf, 2.0, 1.0]), "w": normal(4, 3)},
    ),
    "what is NaN and kept by no mask": (
        "c = sum[i](z[i])\ne = max[i](where(i < 0, tanh(c - c // 2), -inf))",
        {"z": torch.tensor([-math.inf, 2.0, 1.0])},
    ),
}


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.slow(but=["kept by no mask"])
def test_what_guards_take_out_of_a_reduction_comes_back(name: str, prefer: str) -> None:
    source, given = GUARDS[name]
    kernel = eq.compile(source, prefer=prefer, trials=16)
    assert kernel.certificate.ok
    np.testing.assert_allclose(kernel(**given), eq.reference(source)(**given), rtol=1e-5)


def test_reductions_over_axes_with_numbers_are_told_apart() -> None:
    text = "y = sum[j](w[j] * x[j]) * sum[j](w[j]) + sum[j2](z[j2]) * sum[j2](z[j2] * z[j2])\nreturn y"
    x, w, z = (torch.randn(n, dtype=torch.float64) for n in (5, 5, 7))
    found = eq.compile(text, native="off")(x=x, w=w, z=z)
    torch.testing.assert_close(found, (w * x).sum() * w.sum() + z.sum() * (z * z).sum())
