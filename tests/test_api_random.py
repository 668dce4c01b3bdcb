"""Random numbers are functions of a seed and a position: the same bits everywhere, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from everywhere import assert_same, everywhere

import eqfuse as eq
from eqfuse.errors import TypeCheckError
from eqfuse.terms.integers import philox, uniform
from eqfuse.terms.parser import parse
from eqfuse.tile.triton.aot import compile_for

DROPOUT = """
y[i,j] = where(rand(seed, i * N(j) + j) < keep, x[i,j] / keep, 0)
"""
ATTENTION = """
S[b,i,j] = sum[d](Q[b,i,d] * K[b,j,d]) * scale
P[b,i,j] = exp(S[b,i,j] - max[j](S[b,i,j]))
D[b,i,j] = where(rand(seed, (b * N(i) + i) * N(j) + j) < 0.75, P[b,i,j] / sum[j](P[b,i,j]) / 0.75, 0)
O[b,i,e] = sum[j](D[b,i,j] * V[b,j,e])
"""


def test_words_are_those_of_the_paper() -> None:
    """The known answers of Random123 (kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    known = [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, words in known:
        assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == words
    assert uniform(0, 0) == 0x6627E8 * 2.0**-24


def test_numbers_are_even_from_0_to_1() -> None:
    drawn = uniform(7, np.arange(100_000))
    assert 0 <= drawn.min() < 1e-4 and 1 - 1e-4 < drawn.max() < 1
    counts = np.histogram(drawn, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 44  # chi square of 19 degrees, one in a thousand
    assert abs(np.corrcoef(drawn, uniform(8, np.arange(100_000)))[0, 1]) < 0.02


@pytest.mark.parametrize("seed", [1, 0, -3, 2**40 + 5])
@pytest.mark.slow(but=["-3"])
def test_every_target_draws_the_same_bits(seed: int) -> None:
    x = torch.randn(5, 37).t().contiguous().t()
    found = everywhere(
        f"{DROPOUT}r[i,j] = rand(seed, i * N(j) + j)\nf[i] = rand(i, 3)", x=x, seed=seed, keep=0.75
    )
    assert_same(found, 1e-6)
    exact = uniform(seed, np.arange(5 * 37)).reshape(5, 37)
    for _, drawn, _ in found.values():
        assert drawn.dtype == torch.float32
        np.testing.assert_array_equal(drawn.double().numpy(), exact)


def test_float64_programs_draw_the_same_numbers() -> None:
    x = torch.randn(9, dtype=torch.float64)
    found = everywhere("x: f64[i]\ny[i] = rand(5, i) + x[i]", x=x)
    assert_same(found, 1e-15)
    np.testing.assert_allclose(found["torch"][0].numpy(), uniform(5, np.arange(9)) + x.numpy(), rtol=1e-15)


def test_other_seeds_and_positions_are_other_functions_to_verification() -> None:
    assert eq.equivalent(DROPOUT, DROPOUT.replace("i * N(j) + j", "j + N(j) * i")).ok
    assert not eq.equivalent(DROPOUT, DROPOUT.replace("seed,", "seed + 1,")).ok
    assert not eq.equivalent(DROPOUT, DROPOUT.replace("i * N(j) + j", "j * N(i) + i")).ok


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: int) -> torch.Tensor:
    b, i, j = q.shape[0], q.shape[1], k.shape[1]
    mask = torch.from_numpy(uniform(seed, np.arange(b * i * j)).reshape(b, i, j)) < 0.75
    weights = (q @ k.transpose(1, 2) * 0.3).softmax(2)
    return torch.where(mask, weights / 0.75, 0) @ v


@pytest.mark.slow
def test_attention_with_dropout_is_fused_and_its_gradient_draws_the_same_mask() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 16, dtype=torch.float64, requires_grad=True) for n in (19, 33, 33))
    kernel = eq.compile(ATTENTION, target="cpu", prefer="rolling", native="off")
    out = kernel(Q=q, K=k, V=v, scale=0.3, seed=11)
    exact = dropped(q, k, v, 11)
    torch.testing.assert_close(out, exact)
    assert kernel.certificate.ok and kernel.plan.schedule == "rolling"
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for one, other in zip(got, torch.autograd.grad((exact * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_gradient_has_the_mask_as_a_constant() -> None:
    gradient = eq.grad(DROPOUT, wrt="x")
    assert "rand(seed, i * N(j) + j)" in gradient
    assert eq.certify_gradient(DROPOUT, gradient).ok


@pytest.mark.slow
def test_a_kernel_for_a_gpu_draws_in_place() -> None:
    half = "Q: f16[b,i,d]\nK: f16[b,j,d]\nV: f16[b,j,e]\n"
    kernel = eq.compile(half + ATTENTION, target="sm_90", verify=False, prefer="rolling")
    (report,) = compile_for(kernel.triton, "sm_90")
    assert report.spilled_bytes == 0 and kernel.triton.count("uniform(") > 1


def test_a_seed_is_an_integer() -> None:
    assert parse(DROPOUT).integers == ("seed",)
    with pytest.raises(TypeCheckError, match="'rand' takes integers, this is a real number"):
        parse("y[i] = rand(0.5, i) * x[i]")
    with pytest.raises(TypeCheckError, match=r"'rand' takes integers, this is a real number .line 2"):
        parse("x: f32[i]\ny[i] = rand(1, x[i])")
    with pytest.raises(TypeCheckError, match="a seed or a position of random numbers, so it holds integers"):
        eq.compile("y[i] = rand(1, x[i])")(x=torch.randn(3))


def test_no_positions_draw_nothing() -> None:
    kernel = eq.compile(DROPOUT, native="off")
    assert kernel(x=torch.empty(0, 3), seed=1, keep=0.5).shape == (0, 3)
