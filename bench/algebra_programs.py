"""Programs of `eqfuse bench algebra`: sums of products whose order decides what they cost, beside torch as they are written and by hand.

Those of LAAB are the expressions of HPAC/LAAB-Python (MIT), each with both of its references; those of KernelBench are problems
of levels 1 and 2; ALS, PNMF and MLR are the inner expressions of SPORES (Wang et al., PVLDB 13(11), 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from eqfuse.terms.nodes import Reassociate

T = torch.Tensor
Torch = Callable[..., T]


@dataclass(frozen=True)
class Order:
    """A program, the sizes of its axes on a CPU, which of them (`wide`) are 4 times as long on a GPU, and torch's forms of it: as
    written, and by hand. `integers` are positions of an axis that tensors hold, `offset` is added to the numbers of the others."""

    text: str
    sizes: Mapping[str, int]
    written: Torch
    hand: Torch
    wide: str = ""
    integers: Mapping[str, str] = field(default_factory=dict)
    reassociate: Reassociate = "bounded"
    offset: float = 0.0

    def extents(self, small: bool, device: str) -> dict[str, int]:
        """The sizes of its axes on a device; `small` ones are an eighth."""
        times, shrunk = 4 if device == "cuda" else 1, 8 if small else 1
        return {a: max(1, n * (times if a in self.wide else 1) // shrunk) for a, n in self.sizes.items()}


def _reduced_once_more(y: T) -> T:
    """Reductions over one position, each of which leaves it as it is."""
    y = y.amax(1, keepdim=True).mean(1, keepdim=True)
    return y.logsumexp(1, keepdim=True).logsumexp(1, keepdim=True)


def _three_diagonals(t: T, b: T) -> T:
    y = t.diagonal()[:, None] * b
    y[1:] += t.diagonal(-1)[:, None] * b[:-1]
    y[:-1] += t.diagonal(1)[:, None] * b[1:]
    return y


def _gram_of_product(a: T, b: T) -> T:
    s = a.T @ b
    return s.T @ s


def _pooled_convolution(x: T, w: T) -> T:
    sums = x.unfold(1, x.shape[1] - w.shape[1] + 1, 1).mean(3)  # of the window under each row of weights
    return torch.einsum("brc,orc->bo", sums, w)


def _attended(q: T, k: T, v: T) -> T:
    return (q @ k.mT) @ v


PROGRAMS: Mapping[str, Order] = {
    "mean of a layer": Order(
        "y[b] = mean[o](sum[k](x[b,k] * w[o,k]))",
        {"b": 256, "k": 1024, "o": 1024},
        lambda x, w: (x @ w.T).mean(1),
        lambda x, w: x @ w.mean(0),
        "bko",
    ),
    "sum of a layer with a bias": Order(
        "y[b] = sum[o](sum[k](x[b,k] * w[o,k]) + s[o])",
        {"b": 256, "k": 1024, "o": 1024},
        lambda x, w, s: (x @ w.T + s).sum(1),
        lambda x, w, s: x @ w.sum(0) + s.sum(),
        "bko",
    ),
    "KernelBench 2/14": Order(
        "y[b] = sum[o](sum[k](x[b,k] * w[o,k]) / 2) * 1.5",
        {"b": 256, "k": 1024, "o": 1024},
        lambda x, w: (x @ w.T / 2).sum(1) * 1.5,
        lambda x, w: x @ w.sum(0) * 0.75,
        "bko",
    ),
    "chain and a vector": Order(
        "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) * c[k])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda a, b, c: (a @ b) @ c,
        lambda a, b, c: a @ (b @ c),
        "ijk",
    ),
    "vector and a chain": Order(
        "y[l] = sum[k](sum[j](sum[i](x[i] * a[i,j]) * b[j,k]) * c[k,l])",
        {"i": 1024, "j": 1024, "k": 1024, "l": 1024},
        lambda x, a, b, c: ((x @ a) @ b) @ c,
        lambda x, a, b, c: ((x @ a) @ b) @ c,
        "ijkl",
    ),
    "chain of four": Order(
        "y[i,m] = sum[l](sum[k](sum[j](a[i,j] * b[j,k]) * c[k,l]) * d[l,m])",
        {"i": 512, "j": 512, "k": 512, "l": 8, "m": 512},
        lambda a, b, c, d: ((a @ b) @ c) @ d,
        lambda a, b, c, d: (a @ (b @ c)) @ d,
        "ijkm",
    ),
    "attention without a softmax": Order(
        "y[i,e] = sum[j](sum[d](q[i,d] * k[j,d]) * v[j,e])",
        {"i": 2048, "j": 2048, "d": 64, "e": 64},
        _attended,
        lambda q, k, v: q @ (k.mT @ v),
        "ij",
    ),
    "Performer's quadratic form": Order(
        "y[i,e] = sum[j](sum[r](exp(p[i,r]) * exp(s[j,r])) * v[j,e]) / sum[j](sum[r](exp(p[i,r]) * exp(s[j,r])))",
        {"i": 1024, "j": 1024, "r": 32, "e": 64},
        lambda p, s, v: (p.exp() @ s.exp().mT) @ v / (p.exp() @ s.exp().mT).sum(1, keepdim=True),
        lambda p, s, v: (p.exp() @ (s.exp().mT @ v)) / (p.exp() @ s.exp().sum(0))[:, None],
        "ij",
    ),
    "identity and low rank": Order(
        "y[i] = sum[j]((where(i == j, 1, 0) + sum[r](u[i,r] * v[j,r])) * x[j])",
        {"i": 1024, "j": 1024, "r": 8},
        lambda u, v, x: (torch.eye(len(x), dtype=x.dtype, device=x.device) + u @ v.T) @ x,
        lambda u, v, x: x + u @ (v.T @ x),
        "ij",
    ),
    "adapter, one row": Order(
        "y[b,o] = sum[k](x[b,k] * (w[o,k] + sum[r](u[o,r] * v[r,k])))",
        {"b": 1, "k": 1024, "o": 1024, "r": 16},
        lambda x, w, u, v: x @ (w + u @ v).T,
        lambda x, w, u, v: x @ w.T + (x @ v.T) @ u.T,
        "ko",
    ),
    "adapter, many rows": Order(
        "y[b,o] = sum[k](x[b,k] * (w[o,k] + sum[r](u[o,r] * v[r,k])))",
        {"b": 1024, "k": 1024, "o": 1024, "r": 16},
        lambda x, w, u, v: x @ (w + u @ v).T,
        lambda x, w, u, v: x @ (w + u @ v).T,
        "bko",
    ),
    "ALS": Order(
        "y[i,r] = sum[j]((sum[s](u[i,s] * v[j,s]) - x[i,j]) * v[j,r])",
        {"i": 1024, "j": 1024, "s": 16, "r": 16},
        lambda u, v, x: (u @ v.T - x) @ v,
        lambda u, v, x: u @ (v.T @ v) - x @ v,
        "ij",
    ),
    "PNMF": Order(
        "y = sum[i](sum[j](sum[r](w[i,r] * h[r,j])))",
        {"i": 1024, "j": 1024, "r": 16},
        lambda w, h: (w @ h).sum(),
        lambda w, h: w.sum(0) @ h.sum(1),
        "ij",
    ),
    "MLR": Order(
        "y[r] = sum[i](x[i,r] * p[i] * (sum[s](x[i,s] * v[s]) - q[i] * sum[s](x[i,s] * v[s])))",
        {"i": 16384, "r": 64, "s": 64},
        lambda x, p, v, q: x.T @ (p * (x @ v - q * (x @ v))),
        lambda x, p, v, q: x.T @ (p * (x @ v) * (1 - q)),
        "i",
    ),
    "quadratic form": Order(
        "y = sum[i](x[i] * sum[j](sum[k](a[i,k] * b[k,j]) * x[j]))",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda x, a, b: x @ ((a @ b) @ x),
        lambda x, a, b: (x @ a) @ (b @ x),
        "ijk",
    ),
    "Kronecker and a vector": Order(
        "y[i,l] = sum[j](a[i,j] * sum[k](x[j,k] * b[l,k]))",
        {"i": 512, "j": 512, "k": 512, "l": 512},
        lambda a, x, b: a @ (x @ b.T),
        lambda a, x, b: a @ (x @ b.T),
        "ijkl",
    ),
    "sum of a Kronecker product": Order(
        "y[i] = sum[l](sum[j](a[i,j] * sum[k](x[j,k] * b[l,k])))",
        {"i": 512, "j": 512, "k": 512, "l": 512},
        lambda a, x, b: (a @ (x @ b.T)).sum(1),
        lambda a, x, b: a @ (x @ b.sum(0)),
        "ijkl",
    ),
    "trace of a product": Order(
        "y = sum[i](sum[k](sum[j](a[i,j] * b[j,k]) * c[k,i]))",
        {"i": 512, "j": 512, "k": 16},
        lambda a, b, c: ((a @ b) @ c).trace(),
        lambda a, b, c: ((a @ b) * c.T).sum(),
        "ij",
    ),
    "weights on rows, summed": Order(
        "y[o] = sum[b](p[b] * sum[k](x[b,k] * w[o,k]))",
        {"b": 1024, "k": 512, "o": 512},
        lambda p, x, w: p @ (x @ w.T),
        lambda p, x, w: (p @ x) @ w.T,
        "bko",
    ),
    "pooled outputs": Order(
        "y[b,o] = mean[t](sum[k](x[b,t,k] * w[o,k]))",
        {"b": 16, "t": 128, "k": 512, "o": 512},
        lambda x, w: (x @ w.T).mean(1),
        lambda x, w: x.mean(1) @ w.T,
        "tko",
    ),
    "mixture of values": Order(
        "y[b,e] = sum[d](sum[j](p[b,j] * sum[c](k[j,c] * w[c,d])) * z[d,e])",
        {"b": 64, "j": 1024, "c": 64, "d": 1024, "e": 64},
        lambda p, k, w, z: (p @ (k @ w)) @ z,
        lambda p, k, w, z: (p @ k) @ (w @ z),
        "jd",
    ),
    "LAAB, AB": Order(
        "y[i,k] = sum[j](a[i,j] * b[j,k])",
        {"i": 512, "j": 512, "k": 512},
        lambda a, b: a @ b,
        lambda a, b: a @ b,
        "ijk",
    ),
    "LAAB, AA'": Order(
        "y[i,k] = sum[j](a[i,j] * a[k,j])",
        {"i": 512, "j": 512, "k": 512},
        lambda a: a @ a.T,
        lambda a: a @ a.T,
        "ijk",
    ),
    "LAAB, a triangle": Order(
        "y[i,k] = sum[j](where(j <= i, l[i,j], 0) * b[j,k])",
        {"i": 512, "j": 512, "k": 512},
        lambda l, b: l.tril() @ b,
        lambda l, b: l.tril() @ b,
        "ijk",
    ),
    "LAAB, three diagonals": Order(
        "y[i,k] = sum[j](where((j <= i + 1) & (i <= j + 1), t[i,j], 0) * b[j,k])",
        {"i": 512, "j": 512, "k": 512},
        lambda t, b: t.tril(1).triu(-1) @ b,
        _three_diagonals,
        "ijk",
    ),
    "LAAB, A'B + A'B": Order(
        "y[i,k] = sum[j](a[j,i] * b[j,k]) + sum[j](a[j,i] * b[j,k])",
        {"i": 512, "j": 512, "k": 512},
        lambda a, b: a.T @ b + a.T @ b,
        lambda a, b: 2 * (a.T @ b),
        "ijk",
    ),
    "LAAB, (A'B)'(A'B)": Order(
        "y[i,j] = sum[l](sum[k](a[k,l] * b[k,i]) * sum[m](a[m,l] * b[m,j]))",
        {axis: 512 for axis in "ijklm"},
        lambda a, b: (a.T @ b).T @ (a.T @ b),
        _gram_of_product,
        "ijklm",
    ),
    "LAAB, (A'B)'A'B": Order(
        "y[i,j] = sum[m](sum[l](sum[k](a[k,l] * b[k,i]) * a[m,l]) * b[m,j])",
        {axis: 512 for axis in "ijklm"},
        lambda a, b: ((a.T @ b).T @ a.T) @ b,
        _gram_of_product,
        "ijklm",
    ),
    "LAAB, B'AA'B": Order(
        "y[i,j] = sum[m](sum[l](sum[k](b[k,i] * a[k,l]) * a[m,l]) * b[m,j])",
        {axis: 512 for axis in "ijklm"},
        lambda a, b: ((b.T @ a) @ a.T) @ b,
        _gram_of_product,
        "ijklm",
    ),
    "LAAB, A'BA'By": Order(
        "z[i] = sum[m](sum[l](sum[k](sum[j](a[j,i] * b[j,k]) * a[l,k]) * b[l,m]) * y[m])",
        {axis: 512 for axis in "ijklm"},
        lambda a, b, y: (((a.T @ b) @ a.T) @ b) @ y,
        lambda a, b, y: a.T @ (b @ (a.T @ (b @ y))),
        "ijklm",
    ),
    "LAAB, H'Hx": Order(
        "y[k] = sum[j](sum[i](h[i,k] * h[i,j]) * x[j])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda h, x: (h.T @ h) @ x,
        lambda h, x: h.T @ (h @ x),
        "ijk",
    ),
    "LAAB, y'H'H": Order(
        "z[k] = sum[i](sum[j](y[j] * h[i,j]) * h[i,k])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda y, h: y @ (h.T @ h),
        lambda y, h: (y @ h.T) @ h,
        "ijk",
    ),
    "LAAB, H'yx'H": Order(
        "z[k,l] = sum[j](sum[i](h[i,k] * y[i] * x[j]) * h[j,l])",
        {"i": 512, "j": 512, "k": 512, "l": 512},
        lambda h, y, x: (h.T @ torch.outer(y, x)) @ h,
        lambda h, y, x: torch.outer(h.T @ y, x @ h),
        "ijkl",
    ),
    "LAAB, AB + AC": Order(
        "y[i,k] = sum[j](a[i,j] * b[j,k]) + sum[j](a[i,j] * c[j,k])",
        {"i": 512, "j": 512, "k": 512},
        lambda a, b, c: a @ b + a @ c,
        lambda a, b, c: a @ (b + c),
        "ijk",
    ),
    "LAAB, (A - H'H)x": Order(
        "y[k] = sum[j]((a[k,j] - sum[i](h[i,k] * h[i,j])) * x[j])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda a, h, x: (a - h.T @ h) @ x,
        lambda a, h, x: a @ x - h.T @ (h @ x),
        "ijk",
    ),
    "LAAB, block diagonal": Order(
        "y[g,i,k] = sum[j](a[g,i,j] * b[g,j,k])",
        {"g": 2, "i": 512, "j": 512, "k": 512},
        lambda a, b: a @ b,
        lambda a, b: a @ b,
        "ijk",
    ),
    "LAAB, a loop": Order(
        "y[v,i,k] = sum[j](a[i,j] * b[j,k]) + w[v,i] * w[v,k]",
        {"v": 3, "i": 512, "j": 512, "k": 512},
        lambda a, b, w: torch.stack([a @ b + torch.outer(row, row) for row in w]),
        lambda a, b, w: a @ b + w[:, :, None] * w[:, None],
        "ijk",
    ),
    "LAAB, (A + B)[2,2]": Order(
        "y = sum[i](sum[j](where((i == 2) & (j == 2), a[i,j] + b[i,j], 0)))",
        {"i": 512, "j": 512},
        lambda a, b: (a + b)[2, 2],
        lambda a, b: a[2, 2] + b[2, 2],
        "ij",
    ),
    "LAAB, (AB)[2,2]": Order(
        "y = sum[i](sum[k](where((i == 2) & (k == 2), sum[j](a[i,j] * b[j,k]), 0)))",
        {"i": 512, "j": 512, "k": 512},
        lambda a, b: (a @ b)[2, 2],
        lambda a, b: a[2] @ b[:, 2],
        "ijk",
    ),
    "a gate after the layer": Order(
        "y[b] = sum[o](g[o] * sum[k](x[b,k] * w[o,k]))",
        {"b": 256, "k": 1024, "o": 1024},
        lambda g, x, w: (x @ w.T) @ g,
        lambda g, x, w: x @ (w.T @ g),
        "bko",
    ),
    "KernelBench 1/12": Order(
        "y[i,k] = sum[j](where(i == j, d[i], 0) * b[j,k])",
        {"i": 1024, "j": 1024, "k": 1024},
        lambda d, b: d.diag() @ b,
        lambda d, b: d[:, None] * b,
        "ijk",
    ),
    "KernelBench 2/18": Order(
        "y[b] = sum[o](sum[k](x[b,k] * w[o,k]) + s[o])",
        {"b": 128, "k": 1024, "o": 1024},
        lambda x, w, s: _reduced_once_more((x @ w.T + s).sum(1, keepdim=True))[:, 0],
        lambda x, w, s: x @ w.sum(0) + s.sum(),
        "bko",
    ),
    "KernelBench 2/51": Order(
        "y[b,p] = gelu(mean[o](sum[k](x[b,k] * w[o,k]) + s[o] - t[o])) + x[b,p]",
        {"b": 128, "k": 1024, "o": 1024, "p": 1024},
        lambda x, w, s, t: F.gelu((x @ w.T + s - t).mean(1, keepdim=True)) + x,
        lambda x, w, s, t: F.gelu((x @ w.mean(0) + (s.mean() - t.mean()))[:, None]) + x,
        "bkop",
    ),
    "KernelBench 2/80": Order(
        "p: axis[1]\nm[b,p] = max[o](sum[k](x[b,k] * w[o,k]) + s[o])\ny[b,p] = gelu(m[b,p] - mean[p](m[b,p]))",
        {"b": 128, "k": 1024, "o": 1024, "p": 1},
        lambda x, w, s: F.gelu((z := (x @ w.T + s).amax(1, keepdim=True)) - z.mean(1, keepdim=True)),
        lambda x, w, s: F.gelu(
            (z := torch.addmm(s, x, w.T).amax(1, keepdim=True)) - z
        ),  # NaN where a row has one
        "bko",
    ),
    "KernelBench 2/98": Order(
        "y[b] = max[g](2 * gelu(mean[l](sum[k](x[b,k] * w[g,l,k]) + s[g,l])))",
        {"b": 128, "k": 1024, "g": 64, "l": 16},
        lambda x, w, s: (2 * F.gelu((torch.einsum("bk,glk->bgl", x, w) + s).mean(2))).amax(1),
        lambda x, w, s: (2 * F.gelu(x @ w.mean(1).T + s.mean(1))).amax(1),
        "bkg",
    ),
    "a product on both sides": Order(
        "y[i,l] = sum[k](sum[j](a[i,j] * x[j,k]) * b[l,k])",
        {"i": 64, "j": 1024, "k": 1024, "l": 16},
        lambda a, x, b: (a @ x) @ b.T,
        lambda a, x, b: a @ (x @ b.T),
        "jk",
    ),
    "one-hot gather": Order(
        "y[t,d] = sum[v](where(v == ids[t], e[v,d], 0))",
        {"t": 512, "v": 4096, "d": 128},
        lambda ids, e: F.one_hot(ids, e.shape[0]).to(e.dtype) @ e,
        lambda ids, e: e[ids],
        "tv",
        integers={"ids": "v"},
    ),
    "covariance, centred": Order(
        "y[i,j] = mean[b]((x[b,i] - mean[b](x[b,i])) * (x[b,j] - mean[b](x[b,j])))",
        {"b": 2048, "i": 128, "j": 128},
        lambda x: (x - x.mean(0)).T @ (x - x.mean(0)) / x.shape[0],
        lambda x: (z := x - x.mean(0)).T @ z / x.shape[0],
        "bij",
    ),
    "Gram matrices, summed": Order(
        "y = sum[i](sum[j](sum[k](a[i,k] * b[j,k]) * c[i,j]))",
        {"i": 1024, "j": 1024, "k": 16},
        lambda a, b, c: ((a @ b.T) * c).sum(),
        lambda a, b, c: ((c @ b) * a).sum(),
        "ij",
    ),
    "a sum of outer products": Order(
        "y[i] = sum[j](sum[r](u[i,r] * v[j,r]) * x[j]) + sum[j](a[i,j] * x[j])",
        {"i": 1024, "j": 1024, "r": 32},
        lambda u, v, x, a: (u @ v.T) @ x + a @ x,
        lambda u, v, x, a: u @ (v.T @ x) + a @ x,
        "ij",
    ),
    "two layers": Order(
        "y[b,p] = sum[o](sum[k](x[b,k] * w[o,k]) * z[p,o])",
        {"b": 2048, "k": 512, "o": 512, "p": 8},
        lambda x, w, z: (x @ w.T) @ z.T,
        lambda x, w, z: x @ (z @ w).T,
        "bko",
    ),
    "norm of a thin product": Order(
        "y = sum[i](sum[k](sq(sum[j](a[i,j] * b[j,k]))))",
        {"i": 1024, "j": 16, "k": 1024},
        lambda a, b: (a @ b).square().sum(),
        lambda a, b: ((a.T @ a) * (b @ b.T)).sum(),  # the sum of its terms may cancel
        "ik",
        reassociate="free",
    ),
    "Gram matrix and a trace": Order(
        "y = sum[i](sum[j](sum[k](a[i,k] * a[j,k]) * where(i == j, 1, 0)))",
        {"i": 1024, "j": 1024, "k": 64},
        lambda a: (a @ a.T).trace(),
        lambda a: a.square().sum(),
        "ij",
    ),
    "pooled convolution": Order(
        "y[b,o] = mean[t](sum[r](sum[c](x[b,t+r,c] * w[o,r,c])))",
        {"b": 8, "t": 254, "r": 3, "c": 64, "o": 64},
        lambda x, w: F.conv1d(x.mT, w.mT).mean(2),
        _pooled_convolution,
        "bt",
    ),
    "sum of a block-diagonal product": Order(
        "y[g,i] = sum[k](sum[j](a[g,i,j] * b[g,j,k]))",
        {"g": 4, "i": 512, "j": 512, "k": 512},
        lambda a, b: (a @ b).sum(2),
        lambda a, b: (a @ b.sum(2, keepdim=True))[..., 0],
        "ijk",
    ),
    "counts under a causal mask": Order(
        "i: axis[j]\ny[i] = sum[j](where(j <= i, x[j], 0)) / sum[j](where(j <= i, 1, 0))",
        {"i": 2048, "j": 2048},
        lambda x: x.cumsum(0) / torch.ones(len(x), len(x), dtype=x.dtype, device=x.device).tril().sum(1),
        lambda x: x.cumsum(0) / torch.arange(1, len(x) + 1, device=x.device),
        "ij",
    ),
}


ON_GPU = (
    "mean of a layer",
    "chain and a vector",
    "attention without a softmax",
    "identity and low rank",
    "adapter, one row",
    "ALS",
    "weights on rows, summed",
    "LAAB, (A'B)'A'B",
    "KernelBench 1/12",
    "KernelBench 2/98",
)
"""What runs on a GPU where nothing else is asked for."""

REFUSED: Mapping[str, Order] = {
    "squared distances, summed": Order(
        "y = sum[i](sum[j](sum[d](sq(x[i,d] - z[j,d]))))",
        {"i": 512, "j": 512, "d": 64},
        lambda x, z: (x[:, None] - z[None]).square().sum(),
        lambda x, z: len(z) * x.square().sum() + len(x) * z.square().sum() - 2 * (x.sum(0) @ z.sum(0)),
        offset=100.0,
    ),
    "weighted differences": Order(
        "y[i] = sum[j]((x[j] - z[i]) * a[j] * sum[k](b[j,k]))",
        {"i": 2048, "j": 2048, "k": 2},
        lambda x, z, a, b: ((x - z[:, None]) * (a * b.sum(1))).sum(1),
        lambda x, z, a, b: (x * (c := a * b.sum(1))).sum() - z * c.sum(),
        offset=100.0,
    ),
}
"""Programs whose cheapest order may cancel where what is written does not: taken where it is asked for (`reassociate="free"`) alone."""


@dataclass(frozen=True)
class Flip:
    """A program along sizes of some of its axes, at which another order is chosen. `other` is that order."""

    program: str
    axes: str
    sizes: Sequence[int]
    other: str


FLIPS: Sequence[Flip] = (
    Flip(
        "adapter, many rows",
        "b",
        (1, 64, 256, 1024),
        "y[b,o] = sum[k](x[b,k] * w[o,k]) + sum[r](u[o,r] * sum[k](x[b,k] * v[r,k]))",
    ),
    Flip(
        "attention without a softmax",
        "ij",
        (16, 64, 256, 1024),
        "y[i,e] = sum[d](q[i,d] * sum[j](k[j,d] * v[j,e]))",
    ),
    Flip("two layers", "b", (1, 4, 64, 512), "y[b,p] = sum[k](x[b,k] * sum[o](w[o,k] * z[p,o]))"),
    Flip(
        "ALS",
        "rs",
        (16, 128, 512, 2048),
        "y[i,r] = sum[s](u[i,s] * sum[j](v[j,s] * v[j,r])) - sum[j](x[i,j] * v[j,r])",
    ),
)
