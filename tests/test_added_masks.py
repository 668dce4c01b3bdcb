"""Masks that are added to scores as a tensor, as Hugging Face's eager attention adds them: 0, or a number that hides a position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.terms.floats import FloatDomain
from eqfuse.tile import interpreter

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SIZES = {"b": 1, "h": 8, "i": 2048, "j": 2048, "d": 64, "e": 64}
ROWS = 40
MIN = {"f32": -3.4028234663852886e38, "bf16": -3.3895313892515355e38, "f16": -65504.0}
SCORE = "S[b,h,i,j] + mask[b,i,j]"


def _source(dtype: str, score: str, declared: str) -> str:
    return f"""
Q: {dtype}[b,h,i,d]
K: {dtype}[b,h,j,d]
V: {dtype}[b,h,j,e]
{declared}
S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * 0.5
T[b,h,i,j] = {score}
P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
O[b,h,i,e] = sum[j](P[b,h,i,j] * V[b,h,j,e]) / sum[j](P[b,h,i,j])
return O
"""


def _kept(first: int) -> torch.Tensor:
    """Causal, without the first positions: as many rows are wholly masked."""
    i, j = torch.arange(ROWS)[:, None], torch.arange(ROWS)[None]
    return (j <= i) & (j >= first)


def _assert_as_torch(
    source: str, dtype: str, native: str, given: Mapping[str, Any], mask: torch.Tensor
) -> None:
    """The output and gradients, against float64 but for the masked scores, which are rounded to float32 as in the program. Where
    `fill` is given, it is in the place of scores that are masked."""
    torch.manual_seed(0)
    drawn = [torch.randn(1, 2, ROWS, 8).to(TORCH[dtype]) for _ in range(4)]
    *leaves, cotangent = (each.double().requires_grad_() for each in drawn)
    scores = leaves[0] @ leaves[1].mT * 0.5
    rounded = scores + ((scores.detach() + mask.double()).float().double() - scores.detach())
    masked = torch.where(mask == 0, scores, mask.double()) if "fill" in given else rounded
    expected = torch.softmax(masked, -1) @ leaves[2]
    inputs = {name: each.clone().requires_grad_() for name, each in zip("QKV", drawn, strict=False)}
    found = eq.compile(source, target="cpu", verify=False, native=native)(**inputs, **given)
    assert isinstance(found, torch.Tensor)
    close = {"rtol": 0.0, "atol": {"f32": 2e-5, "f16": 2e-2, "bf16": 1e-1}[dtype]}
    torch.testing.assert_close(found.double(), expected, **close)
    mine = torch.autograd.grad(found, list(inputs.values()), drawn[3])
    theirs = torch.autograd.grad(expected, leaves, cotangent)
    for each, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(each.double(), wanted, **close)


CALLS = [
    (dtype, number, first)
    for dtype, numbers in {
        "f32": (MIN["f32"], -1e9, -1e30, -torch.inf),
        "bf16": (MIN["bf16"], -1e9, -1e30, -torch.inf),
        "f16": (MIN["f16"], -torch.inf),
    }.items()
    for number in numbers
    for first in (0, 3)
    if first == 0 or number > -torch.inf  # a row of -inf alone is NaN, in torch too
]


@pytest.mark.parametrize("native", ("off", "wait"))
@pytest.mark.parametrize(("dtype", "number", "first"), CALLS)
@pytest.mark.slow(but=[f"f32-{MIN['f32']}-3-off", f"bf16-{MIN['bf16']}-3-wait", "f32--inf-0-wait"])
def test_calls(dtype: str, number: float, first: int, native: str) -> None:
    """Rows that are wholly masked have the mean, as torch has it."""
    mask = torch.where(_kept(first), 0.0, number)[None].to(TORCH[dtype])
    source = _source(dtype, SCORE, f"mask: {dtype}[b,i,j]")
    _assert_as_torch(source, dtype, native, {"mask": mask}, mask[:, None])


@pytest.mark.parametrize("native", ("off", "wait"))
@pytest.mark.parametrize(
    "score", ["S[b,h,i,j] + mask[b,j]", "S[b,h,i,j] - mask[b,j]", "where(ok[b,j], S[b,h,i,j], fill)"]
)
def test_other_forms(score: str, native: str) -> None:
    """Of a mask of keys, in a batch of which all are masked."""
    number, ok = MIN["f32"], torch.zeros(1, ROWS, dtype=torch.bool)
    mask = torch.full((1, ROWS), number)
    if "fill" in score:
        _assert_as_torch(
            _source("f32", score, "ok: bool[b,j]"), "f32", native, {"ok": ok, "fill": number}, mask
        )
    else:
        given = {"mask": -mask if "-" in score else mask}
        _assert_as_torch(_source("f32", score, "mask: f32[b,j]"), "f32", native, given, mask)


def test_a_product_with_the_least_number_is_not_scaled() -> None:
    """Of 0, where it were an infinity that is NaN."""
    ok = torch.ones(1, ROWS)
    ok[:, 30:] = 0
    source = _source("f32", f"S[b,h,i,j] + (1 - ok[b,j]) * {MIN['f32']!r}", "ok: f32[b,j]")
    _assert_as_torch(source, "f32", "off", {"ok": ok}, (1 - ok[:, None, None]) * MIN["f32"])


def _tile(source: str, dtypes: Mapping[str, str]) -> tuple[Any, Any]:
    derived = compiler.derive(source, None, False)
    return derived, compiler.pipeline(derived, SIZES, dict(dtypes), device_named("h200")).tile


def test_the_difference_with_the_maximum_is_scaled_on_gpus() -> None:
    source = _source("f16", "S[b,h,i,j] + mask[b,j]", "mask: f32[b,j]")
    dtypes = {**dict.fromkeys("QKV", "f16"), "mask": "f32"}
    derived, tile = _tile(source, dtypes)
    assert "exp2(" in str(tile)
    drawn = np.random.default_rng(0).normal(size=(3, 1, 2, ROWS, 8))
    given = {**dict(zip("QKV", drawn, strict=True)), "mask": np.full((1, ROWS), MIN["f32"])}
    extents = {"b": 1, "h": 2, "i": ROWS, "j": ROWS, "d": 8, "e": 8}
    domain = FloatDomain("float32")
    found = interpreter.run(tile, derived.program, given, {}, extents, domain, shards={})["O"]
    np.testing.assert_allclose(
        found, np.broadcast_to(drawn[2].mean(-2, keepdims=True), found.shape), atol=1e-5
    )


@pytest.mark.parametrize(("score", "is_exact"), [("S[b,h,i,j] + mask[b,j]", True), ("S[b,h,i,j]", False)])
def test_a_saved_maximum_is_scaled_where_no_input_is_added(score: str, is_exact: bool) -> None:
    declared = "mask: f32[b,j]" if is_exact else ""
    source = _source("f16", score, declared)
    made = saving_gradient(source, ["V"], saves="f32", halves=dict.fromkeys("QKV", "f16"))
    derived = compiler.derive(made.backward, None, False)
    dtypes = {
        t.name: "f32" if t.name in (*made.residuals, "mask") else "f16" for t in derived.program.tensors
    }
    tile = str(compiler.pipeline(derived, SIZES, dtypes, device_named("h200")).tile)
    assert "exp2(" in tile
    assert ("_plain * log2(e)" not in tile) == is_exact
