"""Segments that offsets delimit: `off` has one element more than there are segments."""

from __future__ import annotations

import pytest
import torch

import eqfuse as eq
from eqfuse.tile.triton.launch import interpret

INSIDE = "(off[s] <= j) & (j < off[s+1])"
OFFSETS = torch.tensor([0, 3, 3, 7, 12])
SUM = f"y[s] = sum[j](where({INSIDE}, x[j], 0))"
SOURCES = {
    "sum": SUM,
    "mean": f"n[s] = off[s+1] - off[s]\ny[s] = sum[j](where({INSIDE}, x[j], 0)) / max(n[s], 1)",
    "softmax": (
        f"t[s,j] = where({INSIDE}, x[j], -inf)\nm[s] = max[j](t[s,j])\n"
        "y[s,d] = sum[j](exp(t[s,j] - max(m[s], -100)) * v[j,d])"
    ),
    "scaled": f"y[s] = a[s] * sum[j](where({INSIDE}, x[j], 0))",
}


def given(source: str) -> dict[str, torch.Tensor]:
    values = {"off": OFFSETS, "x": torch.randn(12), "v": torch.randn(12, 3), "a": torch.randn(4)}
    return {name: value for name, value in values.items() if f"{name}[" in source}


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "resident", "multi_pass"])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.slow(but=["sum", "scaled-rolling"])
def test_segments_on_every_schedule(name: str, prefer: str) -> None:
    source = SOURCES[name]
    inputs = given(source)
    found = eq.compile(source, target="cpu", prefer=prefer)(**inputs)
    assert found.shape[0] == 4
    torch.testing.assert_close(found, torch.as_tensor(eq.reference(source)(**inputs)).float())


def test_segments_are_what_a_loop_over_them_gives() -> None:
    x = torch.randn(12)
    expected = [x[a:b].sum() for a, b in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True)]
    torch.testing.assert_close(eq.compile(SUM, target="cpu")(x=x, off=OFFSETS), torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_segments_in_triton(dtype: torch.dtype) -> None:
    name = {torch.int32: "i32", torch.int64: "i64"}[dtype]
    source = f"off: {name}[t]\n" + SUM
    x, off = torch.randn(12), OFFSETS.to(dtype)
    kernel = eq.compile(source, target="sm_90", verify=False)
    found = interpret(kernel.triton, kernel.name, off, x, sizes={"s": 4})
    torch.testing.assert_close(found, eq.compile(SUM, target="cpu")(x=x, off=OFFSETS))


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "resident", "multi_pass"])
def test_segments_are_reduced_over(prefer: str) -> None:
    """The offsets are read along an axis that is on chip whole, and shorter than they are."""
    source = f"y[j] = sum[s](where({INSIDE}, a[s] * x[j], 0))"
    inputs = given(source)
    found = eq.compile(source, target="cpu", prefer=prefer)(**inputs)
    torch.testing.assert_close(found, torch.as_tensor(eq.reference(source)(**inputs)).float())
