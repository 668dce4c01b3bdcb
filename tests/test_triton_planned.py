"""Calls of new sizes that launch what others have compiled: the same launches as by way of the module's launcher."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from fake_gpu import Gpu, binaries, gpu

import eqfuse as eq
from eqfuse.calls.regions import LEAPS
from eqfuse.tile.triton.direct import contiguous
from eqfuse.tile.triton.planned import Planner, planner_of

__all__ = ["binaries", "gpu"]

ATTENTION = """
    s[h,j] = sum[d](q[h,d] * k[j,d]) * scale
    p[h,j] = exp(s[h,j] - max[j](s[h,j]))
    o[h,e] = sum[j](p[h,j] / sum[j](p[h,j]) * v[j,e])
    """
SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
SHIFTED = "n: i32\ny[i] = sum[j](where(j < n, x[i,j], 0)) * a + N(j)"
MOVED = "y[i,j] = x[i+1,j] * 2 - 1"
"""The extent of its axis is said by the shape of a tensor that the axis moves along."""


def attention(length: int) -> dict[str, Any]:
    return {"scale": 0.3, "q": torch.randn(3, 16), "k": torch.randn(length, 16), "v": torch.randn(length, 16)}


INPUTS: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    ATTENTION: lambda length, rows: attention(length),
    SOFTMAX: lambda length, rows: {"x": torch.randn(rows, length)},
    SHIFTED: lambda length, rows: {"x": torch.randn(length, rows).T, "n": length - rows, "a": 0.5 * rows},
    MOVED: lambda length, rows: {"x": torch.randn(length, rows)},
}


def attended(given: dict[str, Any]) -> torch.Tensor:
    return torch.softmax(given["scale"] * given["q"] @ given["k"].T, -1) @ given["v"]


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
def test_new_lengths_go_straight_to_what_was_compiled(gpu: Gpu, prefer: str) -> None:
    kernel = eq.compile(ATTENTION, target="h200", prefer=prefer, verify=False)
    for length in (70, 71, 80, 97):
        given = attention(length)
        for name in "qkv":
            gpu.seen(given[name])
        torch.testing.assert_close(kernel(**given), attended(given), rtol=1e-3, atol=1e-3)
    count = len(kernel.tile.kernels)
    assert len(gpu.compiled) + len(gpu.straight) == 4 * count and len(gpu.straight) >= 2 * count
    ((first, last),) = [region.sizes["j"] for region in kernel.regions]
    assert first == 65 and last in [128 << leap for leap in LEAPS[1:]]


@pytest.mark.parametrize("source", [*INPUTS])
def test_what_is_one_class_is_one_binary_of_triton(
    source: str, binaries: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it launches what the module's launcher does: grid, integers and numbers."""
    found: dict[Any, set[Any]] = defaultdict(set)
    original = Planner.learn

    def learn(self: Planner, planned: Any, known: Any) -> None:
        found[id(self), *planned.classes.values()].add(frozenset(binaries))
        for name, launch in planned.launches.items():
            assert known[name][1:4] == launch
        assert all(planned.sizes[axis] == size for axis, size in known["sizes"].items())
        original(self, planned, known)

    monkeypatch.setattr(Planner, "learn", learn)
    monkeypatch.setattr(Planner, "kind", lambda *given: None)
    kernel = eq.compile(source, target="h200", verify=False)
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 48, 1000, 1024, 4096, 5000):
        for rows in (1, 2, 16) if source != ATTENTION else (3,):
            binaries.clear()
            kernel(**INPUTS[source](length, rows))
    assert len(found) >= 3
    assert all(len(made) == 1 for made in found.values())


def test_addresses_and_wide_integers_are_classes_of_their_own(binaries: set[Any]) -> None:
    kernel = eq.compile(SHIFTED, target="h200", verify=False)
    x, base = torch.randn(4, 64), torch.randn(4 * 64 + 1)
    for given in (x, x[:, :48], base[1:].view(4, 64), base[:-1].view(4, 64)):
        kernel(x=given, n=3, a=1.0)
    before = len(binaries)
    kernel(x=x, n=2**40, a=1.0)
    assert len(binaries) == before + 1


def test_each_device_has_binaries_of_its_own(binaries: set[Any]) -> None:
    kernel = eq.compile(SOFTMAX, target="h200", verify=False)
    planner = planner_of(kernel.triton, kernel.name)
    assert planner is not None
    x, sizes = torch.empty(4, 64), {"i": 4, "j": 64}
    here, again, there = (planner.planned({"x": t}, {}, sizes) for t in (x, x.clone(), x.to("meta")))
    assert here.classes == again.classes != there.classes and here.launches == there.launches


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5), (4, 1, 2), (1, 0, 3)])
def test_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    if 0 not in shape:
        assert contiguous(shape) == torch.empty(shape).stride()
