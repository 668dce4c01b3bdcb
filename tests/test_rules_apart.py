"""Sums of several terms inside products: taken apart where a program fuses by that, and only there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.certification import INFINITIES_LOST
from eqfuse.loops.plan import SCHEDULES

SIZES = {"i": 5, "j": 37, "d": 8, "e": 6, "t": 5, "c": 37, "o": 4}

APART = {
    "quotients": (
        "y[i] = sum[j]((abs(a[i,j]) / sum[j](abs(a[i,j])) - sq(b[i,j]) / sum[j](sq(b[i,j]))) * v[j])",
        {"a": "ij", "b": "ij", "v": "j"},
    ),
    "differential attention": (
        """
        S[i,j] = sum[d](Q[i,d] * K[j,d]) * 0.3
        R[i,j] = sum[d](G[i,d] * H[j,d]) * 0.3
        P[i,j] = exp(S[i,j] - max[j](S[i,j]))
        U[i,j] = exp(R[i,j] - max[j](R[i,j]))
        O[i,e] = sum[j]((P[i,j] / sum[j](P[i,j]) - 0.4 * U[i,j] / sum[j](U[i,j])) * V[j,e])
        y[i,e] = O[i,e] * rsqrt(mean[e](sq(O[i,e])) + 1e-5) * w[e]
        """,
        {"Q": "id", "K": "jd", "G": "id", "H": "jd", "V": "je", "w": "e"},
    ),
    "layer norm, scaled and shifted, and a product": (
        """
        m[t] = mean[c](x[t,c])
        r[t] = rsqrt(mean[c](sq(x[t,c] - m[t])) + 1e-5)
        z[t,c] = (x[t,c] - m[t]) * r[t] * g[c] + b[c]
        y[t,o] = sum[c](z[t,c] * W[o,c])
        """,
        {"x": "tc", "g": "c", "b": "c", "W": "oc"},
    ),
    "under a mask, rounded": (
        """
        y[i] = sum[j](v[j] * -where(j < 30, f32(abs(a[i,j]) / sum[j](abs(a[i,j])) + sq(b[i,j]) / sum[j](sq(b[i,j]))), 0))
        """,
        {"a": "ij", "b": "ij", "v": "j"},
    ),
}
WHOLE = {
    "divergence of logarithms": (
        """
        P[i,j] = x[i,j] - logsumexp[j](x[i,j])
        R[i,j] = z[i,j] - logsumexp[j](z[i,j])
        y[i] = sum[j](exp(P[i,j]) * (P[i,j] - R[i,j]))
        """,
        {"x": "ij", "z": "ij"},
    ),
    "divergence of quotients": (
        """
        p[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))
        q[i,j] = exp(z[i,j] - max[j](z[i,j])) / sum[j](exp(z[i,j] - max[j](z[i,j])))
        y[i] = sum[j](p[i,j] * (log(p[i,j]) - log(q[i,j])))
        """,
        {"x": "ij", "z": "ij"},
    ),
}


def drawn(tensors: dict[str, str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {n: torch.randn(*[SIZES[a] for a in axes], generator=generator) for n, axes in tensors.items()}


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize("name", [*APART, *WHOLE])
@pytest.mark.slow(but=["quotients-resident"])
def test_every_schedule_is_there_and_right(name: str, prefer: str) -> None:
    source, tensors = {**APART, **WHOLE}[name]
    kernel = eq.compile(source, prefer=prefer)
    given = drawn(tensors)
    exact = np.asarray(eq.reference(source)(**given))
    np.testing.assert_allclose(kernel(**given).numpy(), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    assert kernel.plan.schedule == prefer and kernel.certificate.ok
    if prefer in ("rolling", "split_k"):
        assert kernel.derivation.check() and kernel.why_not() == ()


@pytest.mark.parametrize("name", APART)
@pytest.mark.slow
def test_what_is_taken_apart_says_so(name: str) -> None:
    kernel = eq.compile(APART[name][0], prefer="rolling")
    assert kernel.plan.form == "apart" and "terms taken apart" in repr(kernel.plan)
    assert INFINITIES_LOST in kernel.certificate.unverified
    passes = eq.compile(APART[name][0], prefer="multi_pass")
    assert passes.plan.form != "apart" and INFINITIES_LOST not in passes.certificate.unverified


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.slow(but=["divergence of logarithms"])
def test_what_fuses_otherwise_is_left_whole(name: str) -> None:
    kernel = eq.compile(WHOLE[name][0], prefer="rolling")
    assert kernel.plan.form == "rewritten" and kernel.certificate.unverified == ()


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.slow
def test_a_weight_of_nothing_makes_a_divergence_infinite(name: str, prefer: str) -> None:
    """log of a sum that is 0 while every value is -inf, until one is not."""
    source, tensors = WHOLE[name]
    given = drawn(tensors)
    given["z"][1, :9] = -torch.inf
    given["z"][2] = -torch.inf
    found, exact = eq.compile(source, prefer=prefer)(**given).double(), eq.reference(source)(**given)
    assert torch.equal(found.isnan(), torch.as_tensor(exact).isnan())
    assert found[1] == torch.inf and found[2].isnan() and found[[0, 3, 4]].isfinite().all()


def test_a_mean_is_not_taken_apart() -> None:
    """x - mean x is a shift, which moments recentre: E[x^2] - E[x]^2 would cancel."""
    kernel = eq.compile(APART["layer norm, scaled and shifted, and a product"][0], prefer="rolling")
    bodies = [
        str(state.body) for group in kernel.merge.groups for state in group.states if not state.auxiliary
    ]
    assert not any(body == "sq(x[t, c])" for body in bodies)


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
def test_positions_are_added_to_sums_and_not_to_what_they_are_sums_of(prefer: str) -> None:
    """The first of equal values is at 0, but a shard of later ones has its own far behind, and a sum around that cancels."""
    source = "v: f32[c]\nb = argmax[c](x[c])\ny = mean[c](v[c] + b)"
    kernel = eq.compile(source, prefer=prefer)
    given = {"x": torch.zeros(100_000), "v": torch.full((100_000,), 0.1)}
    assert abs(kernel(**given) - 0.1) < 1e-6 and kernel.plan.form == "apart"
    (reason,) = eq.compile(source).why_not()
    assert "would cancel where argmax_k_c changes" in reason
