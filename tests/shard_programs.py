"""For tests of `eq.shard`: programs with axes that are sharded, their inputs, and how ranks share positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import torch

import eqfuse as eq
from eqfuse.extend.define import forget
from eqfuse.sharding.nodes import ShardPlan
from eqfuse.sharding.sharded import Sharded

RANKS = "r"
"""The dimension of the mesh in these tests, where it has one."""

STATES = ("all_gather", "all_reduce", "tree")
FOLDS = ("all_gather", "tree")
ROWS = ("gather_operands", "ring", "gather_rows")
PREFIXES = ("carry", "gather_operands", "ring", "gather_rows")

EXTENTS: Mapping[str, int] = {
    "a": 3,
    "b": 11,
    "c": 3,
    "d": 4,
    "e": 3,
    "i": 6,
    "j": 13,
    "k": 12,
    "t": 11,
    "v": 9,
}

ATTENTION = """
s[i,j] = sum[d](Q[i,d] * K[j,d])
m[i] = max[j](s[i,j])
p[i,j] = exp(s[i,j] - m[i])
O[i,e] = sum[j](p[i,j] * V[j,e]) / sum[j](p[i,j])
return O
""".strip()
CAUSAL = ATTENTION.replace(
    "sum[d](Q[i,d] * K[j,d])\n", "where(j <= i + N(j) - N(i), sum[d](Q[i,d] * K[j,d]), -inf)\n"
)


@dataclass(frozen=True)
class Case:
    """A program and its sharded axes; those of `out` are sharded in outputs alone. `strategies` are all that it has,
    `wrt` the inputs whose gradients are compared. Integer tensors are below `below`."""

    source: str
    axes: tuple[str, ...]
    strategies: tuple[str, ...]
    out: tuple[str, ...] = ()
    below: Mapping[str, int] = field(default_factory=dict)
    wrt: tuple[str, ...] = ()

    def shard(self, mesh: Any = 4, to: str = RANKS, **options: Any) -> Sharded:
        return eq.shard(
            kernel(self.source),
            mesh,
            dict.fromkeys(self.axes, to),
            out=dict.fromkeys(self.out, to),
            **options,
        )

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
        """Whole tensors."""
        made: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(seed)
        for tensor in kernel(self.source).program.tensors:
            shape = tuple(EXTENTS[str(axis)] for axis in tensor.axes)
            if tensor.name in self.below:
                made[tensor.name] = torch.randint(self.below[tensor.name], shape, generator=generator)
            else:
                made[tensor.name] = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        return made


AFFINE = """
i: axis[t]
p[i], q[i] = affine[t <= i](a[t], b[t])
return p, q
"""
"""Of a reduction that is not commutative: see `affine`."""

CASES: Mapping[str, Case] = {
    "attention": Case(ATTENTION, ("j",), STATES, wrt=("Q", "K", "V")),
    "attention, rows of outputs": Case(ATTENTION, ("j",), ("all_to_all",), out=("i",), wrt=("Q", "K", "V")),
    "attention, both axes": Case(ATTENTION, ("i", "j"), ROWS, wrt=("Q", "K", "V")),
    "causal attention, both axes": Case(CAUSAL, ("i", "j"), ROWS, wrt=("Q", "K", "V")),
    "softmax": Case(
        "m[i] = max[j](x[i,j])\ny[i,j] = exp(x[i,j] - m[i]) / sum[j](exp(x[i,j] - m[i]))\nreturn y",
        ("j",),
        STATES,
        wrt=("x",),
    ),
    "RMSNorm": Case(
        "r[i] = mean[d](sq(x[i,d]))\ny[i,d] = x[i,d] * rsqrt(r[i] + 1e-6) * g[d]\nreturn y",
        ("d",),
        STATES,
        wrt=("x", "g"),
    ),
    "LayerNorm": Case(
        "m[i] = mean[j](x[i,j])\nv[i] = mean[j](sq(x[i,j] - m[i]))\n"
        "y[i,j] = (x[i,j] - m[i]) * rsqrt(v[i] + 1e-5) * g[j] + b[j]\nreturn y",
        ("j",),
        STATES,
        wrt=("x", "g", "b"),
    ),
    "batch norm": Case(
        "m[c] = mean[b](x[b,c])\nv[c] = mean[b](sq(x[b,c] - m[c]))\n"
        "y[b,c] = (x[b,c] - m[c]) * rsqrt(v[c] + 1e-5) * g[c]\nreturn y",
        ("b",),
        STATES,
        wrt=("x", "g"),
    ),
    "cross-entropy over the vocabulary": Case(
        "label: i64[i]\nm[i] = max[v](x[i,v])\n"
        "loss[i] = m[i] + log(sum[v](exp(x[i,v] - m[i]))) - x[i,label[i]]\nreturn loss",
        ("v",),
        STATES,
        below={"label": 9},
        wrt=("x",),
    ),
    "embedding over the vocabulary": Case(
        "ids: i64[i]\nE: f64[v,d]\ny[i,d] = E[ids[i],d]\nreturn y", ("v",), STATES, below={"ids": 9}
    ),
    "argmax": Case("a[i] = argmax[j](x[i,j])\nreturn a", ("j",), FOLDS),
    "top-k": Case("k: axis[3]\nv[i,k], p[i,k] = topk[j,k](x[i,j])\nreturn v, p", ("j",), ("tree",)),
    "moments": Case("m[i], v[i] = mean_var[j](x[i,j])\nreturn m, v", ("j",), FOLDS),
    "covariance": Case(
        "x: f64[t,a]\nb: axis[a]\nm[a] = mean[t](x[t,a])\n"
        "c[a,b] = mean[t]((x[t,a] - m[a]) * (x[t,b] - m[b]))\nreturn c",
        ("t",),
        STATES,
        wrt=("x",),
    ),
    "routing to experts": Case(
        "k: axis[2]\ns[t,e] = sum[c](x[t,c] * W[e,c])\nv[t,k], p[t,k] = topk[e,k](s[t,e])\n"
        "w[t,k] = exp(v[t,k] - max[k](v[t,k]))\ng[t,k] = w[t,k] / sum[k](w[t,k])\nreturn g, p",
        ("e",),
        ("tree",),
    ),
    "softmax over experts": Case(
        "s[t,e] = sum[c](x[t,c] * W[e,c])\nm[t] = max[e](s[t,e])\nZ[t] = sum[e](exp(s[t,e] - m[t]))\nreturn m, Z",
        ("e",),
        STATES,
    ),
    "matrix product": Case("y[i,e] = sum[k](x[i,k] * W[k,e])\nreturn y", ("k",), STATES, wrt=("x", "W")),
    "mean absolute deviation": Case(
        "m[i] = mean[j](x[i,j])\nd[i] = mean[j](abs(x[i,j] - m[i]))\nreturn d", ("j",), STATES
    ),
    "prefix sums": Case("i: axis[j]\ny[i,d] = sum[j <= i](x[j,d])\nreturn y", ("j",), PREFIXES, wrt=("x",)),
    "softmax over prefixes": Case(
        "i: axis[j]\nm[i] = max[j <= i](x[j])\n"
        "y[i,d] = sum[j <= i](exp(x[j] - m[i]) * u[j,d]) / sum[j <= i](exp(x[j] - m[i]))\nreturn y",
        ("j",),
        PREFIXES,
    ),
    "linear recurrence": Case(
        "h[t,d] = a[t,d] * h[t-1,d] + b[t,d]\nreturn h", ("t",), ("carry", "gather_operands", "gather_rows")
    ),
    "running argmax": Case("i: axis[j]\ny[i] = argmax[j <= i](x[j])\nreturn y", ("j",), PREFIXES),
    "affine maps in order": Case("p[i], q[i] = affine[t](a[i,t], b[i,t])\nreturn p, q", ("t",), FOLDS),
    "affine maps of prefixes": Case(AFFINE.strip(), ("t",), ("carry", "gather_operands", "gather_rows")),
    "counts": Case("n: i64[i]\nn[i] = sum[j](where(x[i,j] > 0, 1, 0))\nreturn n", ("j",), STATES),
    "rows alone": Case("y[i] = logsumexp[j](x[i,j])\nreturn y", ("i",), ("none",), wrt=("x",)),
    "the position before": Case(
        "y[i] = where(i > 0, x[i-1], 0) + x[i]\nreturn y", ("i",), ("gather_operands",)
    ),
}


@contextmanager
def affine() -> Iterator[None]:
    """x -> a x + b one after the other: a reduction that is not commutative."""
    eq.reduction(
        "affine",
        args="a, b",
        state="a, b",
        lift="a, b",
        identity="1, 0",
        combine="a1 * a2, b1 * a2 + b2",
        result="a, b",
    )
    try:
        yield
    finally:
        kernel.cache_clear()
        forget("affine")


@cache
def kernel(source: str) -> eq.Kernel:
    return eq.compile(source)


def outputs(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def same(found: Any, wanted: Any, of: str = "", exact: float = 1e-12) -> None:
    """Asserts that outputs are those, but for the rounding of float64."""
    pairs = list(zip(outputs(found), outputs(wanted), strict=True))
    for got, want in pairs:
        assert got.dtype == want.dtype and got.shape == want.shape, of
        torch.testing.assert_close(
            got, want, rtol=exact, atol=exact, equal_nan=True, msg=lambda text: f"{of}: {text}"
        )


def by(sharded: Sharded, plan: ShardPlan, ranks: int | None = None) -> Sharded:
    """The same program by one strategy alone, on another number of simulated ranks: verified and compiled once."""
    if ranks is None:
        return replace(sharded, strategies=(plan,))
    (mesh,) = sharded.ranks
    return replace(sharded, strategies=(plan,), mesh=ranks, ranks={mesh: ranks})


def ragged(length: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Lengths of shards of different ranks, some of them 0 from three ranks on."""
    random = Random(seed)
    empty = random.sample(range(ranks), (ranks + 1) // 3 if ranks > 2 else 0)
    has = [rank for rank in range(ranks) if rank not in empty]
    places = sorted(random.randint(0, length) for _ in has[1:])
    found = dict(zip(has, (b - a for a, b in zip([0, *places], [*places, length], strict=True)), strict=True))
    return tuple(found.get(rank, 0) for rank in range(ranks))


def cuts(sharded: Sharded, tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, tuple[int, ...]]:
    """Ragged lengths of every sharded axis that tensors have."""
    found: dict[str, tuple[int, ...]] = {}
    for (tensor, dimension), axis in sorted(sharded.sharding.along(sharded.kernel.program).items()):
        if axis not in sharded.sharding.outputs:
            ranks = sharded.ranks[sharded.sharding.meshes[axis]]
            found[axis] = ragged(tensors[tensor].shape[dimension], ranks, seed + len(axis))
    return found
