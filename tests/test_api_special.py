"""Rows that are masked, zero, infinite, NaN or huge: position by position what the unfused program gives.

Tiles are of 8 positions, so that every special value falls into the first, a middle or the last of several.
A class (NaN, inf, -inf, finite) is right where the float64 program has it once rounded to float32, or
where the unfused program in float32 has it: its intermediates may overflow where those of float64 do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.extract import partition, tile_sizes
from eqfuse.extract.devices import Device
from eqfuse.loops.nodes import Kernel, Loop
from eqfuse.loops.plan import SCHEDULES, KernelConfig
from eqfuse.loops.walk import statements
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.parser import parse
from eqfuse.terms.sizes import bind

COLUMNS = 43
BLOCK = 8
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every block of at most 8 positions, whatever the cost model would take, also where the axis is short."""
    configure = tile_sizes.configure

    def smaller(kernel: Kernel, extents: Mapping[str, int], device: Device) -> KernelConfig:
        config = configure(kernel, extents, device)
        walked = {stmt.axis for stmt in statements(kernel.body) if isinstance(stmt, Loop) and not stmt.unit}
        blocks = (
            replace(b, kind="loop", size=BLOCK)
            if b.axis in walked
            else replace(b, size=min(b.size, BLOCK))
            if b.size
            else b
            for b in config.blocks
        )
        return replace(config, blocks=tuple(blocks))

    monkeypatch.setattr(tile_sizes, "configure", smaller)
    monkeypatch.setattr(partition, "Partition", partial(partition.Partition, lift_limit=1))
    yield


def special_rows() -> torch.Tensor:
    base = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(1))

    def at(value: float, *positions: int) -> torch.Tensor:
        row = base.clone()
        row[list(positions)] = value
        return row

    edges = (0, 20, COLUMNS - 1)
    rows = [base, base - 150, base + 150, base * 1e-25]
    rows += [torch.full((COLUMNS,), v) for v in (0.0, -INF, INF, NAN, 1e30, -1e30, -100.0, 1e-20)]
    rows += [at(v, p) for v in (INF, -INF, NAN, 1e30, -1e30) for p in edges]
    rows += [at(v, *range(16)) for v in (-INF, 0.0)] + [at(v, *range(16, COLUMNS)) for v in (-INF, 0.0)]
    for first, second in ((INF, -INF), (INF, NAN), (-INF, NAN), (INF, INF)):
        row = at(first, 5)
        row[30] = second
        rows.append(row)
    for value in (1.0, INF, NAN):
        row = torch.zeros(COLUMNS)
        row[30] = value
        rows.append(row)
    return torch.stack(rows)


X = special_rows()
ROWS = {
    "softmax": "e[r,c] = exp(x[r,c] - max[c](x[r,c]))\ny[r,c] = e[r,c] / sum[c](e[r,c])",
    "log-softmax": "u[r,c] = x[r,c] - max[c](x[r,c])\ny[r,c] = u[r,c] - log(sum[c](exp(u[r,c])))",
    "logsumexp": "m[r] = max[c](x[r,c])\ny[r] = m[r] + log(sum[c](exp(x[r,c] - m[r])))",
    "logsumexp, built in": "y[r] = logsumexp[c](x[r,c])",
    "scaled L2": "m[r] = max[c](abs(x[r,c]))\ny[r] = m[r] * sqrt(sum[c](sq(x[r,c] / m[r])))",
    "RMSNorm, absmax": (
        "y[r,c] = x[r,c] * rsqrt(mean[c](sq(x[r,c])) + eps)\nm[r] = max[c](abs(y[r,c]))\nreturn y, m"
    ),
    "cosine": "y[r] = sum[c](x[r,c] * z[c]) / (sqrt(sum[c](sq(x[r,c]))) * sqrt(sum[c](sq(z[c]))))",
    "min-max": "m[r] = min[c](x[r,c])\ny[r,c] = (x[r,c] - m[r]) / (max[c](x[r,c]) - m[r])",
    "weighted values": (
        "e[r,c] = exp(x[r,c] - max[c](x[r,c]))\ny[r,o] = sum[c](e[r,c] / sum[c](e[r,c]) * W[c,o])"
    ),
    "cross-entropy": "m[r] = max[c](x[r,c])\ny[r] = log(sum[c](exp(x[r,c] - m[r]))) + m[r] - x[r,t[r]]",
    "absmax quantise, GEMM": (
        "s[r] = max[c](abs(x[r,c])) / 448\ny[r,o] = sum[c](x[r,c] / s[r] * W[c,o]) * s[r]"
    ),
    "shifted by a registered maximum": "v[r] = argmax.v[c](x[r,c], c)\ny[r] = sum[c](exp(x[r,c] - v[r]))",
}
CAUSAL = """
    S[i,j] = sum[d](Q[i,d] * K[j,d]) * 0.5
    T[i,j] = where(j <= i - 2, S[i,j], -inf)
    P[i,j] = exp(T[i,j] - max[j](T[i,j]))
    O[i,e] = sum[j](P[i,j] / sum[j](P[i,j]) * V[j,e])
"""
RANGE = "s[r] = max[c](x[r,c]) - min[c](x[r,c])\ny[r] = sum[c](exp(x[r,c] - s[r]))"
VARIANCE = "m[r] = mean[c](x[r,c])\nv[r] = mean[c](sq(x[r,c] - m[r]))\nreturn v"
WEIGHTED = """
    W[r] = sum[c](w[r,c])
    m[r] = sum[c](w[r,c] * x[r,c]) / W[r]
    v[r] = sum[c](w[r,c] * sq(x[r,c] - m[r])) / W[r]
    return v, m
"""


def classes(values: np.ndarray) -> np.ndarray:
    return np.select([np.isnan(values), values == INF, values == -INF], [1, 2, 3], 0)


def in_float32(source: str, given: Mapping[str, Any]) -> list[np.ndarray]:
    """The unfused program in float32."""
    program = parse(source)
    tensors = {n: v.numpy() for n, v in given.items() if isinstance(v, torch.Tensor)}
    scalars = {n: v for n, v in given.items() if n not in tensors}
    extents = bind(program, {n: v.shape for n, v in tensors.items()}, None, scalars)
    found = evaluate(program, tensors, scalars, extents, FloatDomain("float32"))
    return [np.asarray(found[output.name], np.float64) for output in program.outputs]


@lru_cache(maxsize=8)
def compiled(source: str, prefer: str | None) -> eq.Kernel:
    return eq.compile(source, prefer=prefer)


def check(source: str, prefer: str | None, place: str = "cpu", **given: Any) -> None:
    kernel = compiled(source, prefer)
    there = {n: v.to(place) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    found, exact = kernel(**there), eq.reference(source)(**given)
    if not isinstance(found, tuple):
        found, exact = (found,), (exact,)
    for got, want, single in zip(found, exact, in_float32(source, given), strict=True):
        got = got.double().cpu().numpy()
        with np.errstate(over="ignore"):
            want = want.astype(np.float32).astype(np.float64)
        right = (classes(got) == classes(want)) | (classes(got) == classes(single))
        assert right.all(), (
            f"at {np.argwhere(~right)[:5].tolist()}: {got[~right][:5]}, not {want[~right][:5]}"
        )
        both = np.isfinite(got) & np.isfinite(want)
        near = np.isclose(got, want, rtol=1e-3, atol=1e-5) | np.isclose(got, single, rtol=1e-3, atol=1e-5)
        assert near[both].all()
    assert kernel.certificate.ok


def row_inputs(source: str) -> dict[str, Any]:
    """What a program of special rows reads besides them."""
    generator = torch.Generator().manual_seed(2)
    inputs = {
        "z": torch.randn(COLUMNS, generator=generator),
        "W": torch.randn(COLUMNS, 3, generator=generator),
        "t": torch.randint(COLUMNS, (len(X),), generator=generator),
        "eps": 1e-6,
    }
    return {n: v for n, v in inputs.items() if f"{n}[" in source or f" {n})" in source}


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.slow(but=["softmax-rolling", "scaled L2-rolling", "min-max-rolling", "cross-entropy-rolling"])
def test_special_rows(name: str, prefer: str) -> None:
    check(ROWS[name], prefer, x=X, **row_inputs(ROWS[name]))


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.slow(but=["rolling"])
def test_variance_of_special_rows(prefer: str) -> None:
    """Rows of 1e30 apart have a variance that is the square of a rounding error."""
    rows = X[~(X.abs() == 1e30).any(1)]
    check(VARIANCE, prefer, x=rows)
    weights = torch.rand(len(rows), COLUMNS, generator=torch.Generator().manual_seed(3))
    weights[0] = 0
    weights[1, :20] = 0
    weights[2, 20:] = 0
    check(WEIGHTED, prefer, x=rows, w=weights)


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.slow(but=["rolling"])
def test_a_shift_that_is_no_number_while_all_is_infinite(prefer: str) -> None:
    """Of rows of 1e30 apart the range has no digit of the least value."""
    check(RANGE, prefer, x=X[~(X.abs() == 1e30).any(1)])


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.slow(but=["rolling"])
def test_causal_attention_with_special_values_where_nothing_masks_them(prefer: str, value: float) -> None:
    """The first two query rows see no key. Key 0 is seen by all others, so that whatever it holds spreads."""
    generator = torch.Generator().manual_seed(4)
    Q, K, V = (torch.randn(29, n, generator=generator) for n in (2, 2, 7))
    Q[9, 1] = value
    Q[20] = value
    check(CAUSAL, prefer, Q=Q, K=K, V=V)
    K[0, 1] = value
    V[0, 1] = value
    check(CAUSAL, prefer, Q=Q, K=K, V=V)


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "resident"])
def test_naive_softmax_is_finite_where_its_exponentials_overflow(prefer: str) -> None:
    """exp(x) / sum(exp(x)) is computed shifted by the row's maximum, as if exp had no largest value; the passes of the
    program as it is written overflow."""
    source = "y[r,c] = exp(x[r,c]) / sum[c](exp(x[r,c]))"
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(5)) * 50 + 900
    assert np.isnan(eq.reference(source)(x=x)).any()
    assert torch.allclose(eq.compile(source, prefer=prefer)(x=x), torch.softmax(x, 1), rtol=1e-4, atol=1e-7)
    assert eq.compile(source, prefer="multi_pass")(x=x).isnan().any()
