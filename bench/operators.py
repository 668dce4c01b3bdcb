"""Programs for which torch has an operator of its own, written in the language, beside that operator.

`OPERATORS` are workloads like those of `workloads`, but of no paper: `python -m bench cpu` alone runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.workloads import Case, TensorSpec, Workload

OPERATORS: dict[str, Workload] = {}

INEXPRESSIBLE: Mapping[str, str] = {
    "cumsum": "the language has no prefixes: as a masked sum it takes time of the square of the length"
}
"""Operators of torch that have no program here, and why."""


def _add(
    name: str,
    source: str,
    tensors: Mapping[str, str],
    run: Callable[..., Any],
    small: Mapping[str, int],
    cpu: Mapping[str, int],
    sized: tuple[str, ...] = (),
) -> None:
    specs = {tensor: TensorSpec.parse(text) for tensor, text in tensors.items()}
    cases = {label: Case(label, "f32", sizes, {}, {}) for label, sizes in (("small", small), ("cpu", cpu))}
    text = "\n".join(line.strip() for line in source.strip().splitlines())
    OPERATORS[name] = Workload(name, "operators", text, specs, run, cases, sized=sized)


def _conv2d(I: Tensor, W: Tensor) -> Tensor:
    return F.conv2d(I, W)


def _batch_norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, g, b, training=True)


def _nearest(x: Tensor, c: Tensor) -> Tensor:
    return torch.cdist(x, c).argmin(1)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y)


def _product(A: Tensor, B: Tensor) -> Tensor:
    return A @ B


def _cross_entropy(x: Tensor, W: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(x @ W.transpose(0, 1), label, reduction="none")


_add(
    "conv2d",
    "O[n,o,y,x] = sum[p,q,c](I[n,c,y+p,x+q] * W[o,c,p,q])",
    {"I": "T[n, c, v, u]", "W": "T[o, c, p, q] ~ weight"},
    _conv2d,
    {"n": 2, "c": 3, "o": 5, "v": 9, "u": 11, "y": 7, "x": 9, "p": 3, "q": 3},
    {"n": 4, "c": 32, "o": 64, "v": 58, "u": 58, "y": 56, "x": 56, "p": 3, "q": 3},
    sized=("y", "x"),
)
_add(
    "batchnorm",
    """
    mu[c] = mean[n,h,w](x[n,c,h,w])
    v[c] = mean[n,h,w](sq(x[n,c,h,w] - mu[c]))
    y[n,c,h,w] = (x[n,c,h,w] - mu[c]) * rsqrt(v[c] + 1e-5) * g[c] + b[c]
    """,
    {"x": "T[n, c, h, w]", "g": "T[c]", "b": "T[c]"},
    _batch_norm,
    {"n": 3, "c": 5, "h": 7, "w": 9},
    {"n": 16, "c": 64, "h": 56, "w": 56},
)
_add(
    "kmeans",
    """
    D[i,j] = sum[d](sq(x[i,d] - c[j,d]))
    k[i] = argmin[j](D[i,j])
    return k
    """,
    {"x": "T[i, d]", "c": "T[j, d]"},
    _nearest,
    {"i": 37, "j": 11, "d": 5},
    {"i": 65536, "j": 64, "d": 16},
)
_add(
    "cdist",
    "D[i,j] = sqrt(sum[d](sq(x[i,d] - y[j,d])))",
    {"x": "T[i, d]", "y": "T[j, d]"},
    _distances,
    {"i": 37, "j": 29, "d": 19},
    {"i": 2000, "j": 2000, "d": 64},
)
_add(
    "linear_cross_entropy",
    """
    L[i,j] = sum[d](x[i,d] * W[j,d])
    loss[i] = max[j](L[i,j]) + log(sum[j](exp(L[i,j] - max[j](L[i,j])))) - L[i,label[i]]
    """,
    {"x": "T[i, d]", "W": "T[j, d] ~ weight", "label": "i64[i] ~ index j"},
    _cross_entropy,
    {"i": 13, "j": 37, "d": 19},
    {"i": 1024, "j": 16384, "d": 256},
)
_add(
    "gemm",
    "C[i,j] = sum[k](A[i,k] * B[k,j])",
    {"A": "T[i, k]", "B": "T[k, j]"},
    _product,
    {"i": 13, "j": 37, "k": 19},
    {"i": 1024, "j": 1024, "k": 1024},
)
