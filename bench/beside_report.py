"""`eqfuse bench beside`: everyday programs beside torch, torch.compile, FlexAttention, JAX and KeOps, on one machine in one process.

Each peer computes what its users would write. Times are medians of calls in turns, on float32 inputs that differ from call to call; first calls
are timed from a process that has the peer imported. Errors are against float64, relative to the greatest value. A peer that is not installed, or has
no way to say a program, has no number.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, one_line, recorded
from bench.timing import in_turn

TITLE = "Beside peers"
PEERS = ("eqfuse", "torch", "torch.compile", "FlexAttention", "JAX", "KeOps")
REPEATS = 9
MOST_ERROR = 1e-3
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "KEOPS_CACHE_FOLDER")
MOST_SECONDS = 4.0
"""A peer that takes longer a call is called once."""

T = torch.Tensor
Values = Mapping[str, Any]
"""Inputs by name."""


def _shown(peer: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(row: Mapping[str, Any]) -> str:
        found = row["peers"].get(peer)
        if found is None:
            return ""
        ms = found["ms"]
        return f"{f'{ms:.0f}' if ms >= 100 else f'{ms:.3g}'} ({found['first']:.1f} s)"

    return cell


COLUMNS = (
    Column("ms (first call)", lambda row: str(row["program"])),
    *(Column(peer, _shown(peer)) for peer in PEERS),
    Column("best peer / eqfuse", lambda row: f"{row['ratio']:.2f}"),
    Column("error", lambda row: f"{row['error']:.0e}"),
)


@dataclass(frozen=True)
class Program:
    """`text` for eqfuse, `torch` for torch and torch.compile; `shapes` of inputs, `below` of integers; `flex` is what FlexAttention computes it with,
    `jax` and `keops` make a call of arrays of theirs."""

    text: str
    shapes: Mapping[str, tuple[int, ...]]
    torch: Callable[..., T]
    jax: Callable[[], Callable[..., Any]] | None = None
    keops: Callable[[], Callable[..., T]] | None = None
    flex: Callable[[], Callable[..., T]] | None = None
    below: Mapping[str, int] = field(default_factory=dict)
    scale: float = 1.0


def _attended(q: T, k: T, v: T) -> T:
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def _flex_causal() -> Callable[..., T]:
    call, masks = torch.compile(flex_attention), dict[int, Any]()

    def attended(q: T, k: T, v: T) -> T:
        n = q.shape[1]
        if n not in masks:
            masks[n] = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")
        return call(q[None], k[None], v[None], block_mask=masks[n])[0]

    return attended


def _flex_documents() -> Callable[..., T]:
    call = torch.compile(flex_attention)

    def attended(q: T, k: T, v: T, doc: T) -> T:
        n = q.shape[1]
        mask = create_block_mask(
            lambda b, h, i, j: (doc[i] == doc[j]) & (j <= i), None, None, n, n, device="cpu"
        )
        return call(q[None], k[None], v[None], block_mask=mask)[0]

    return attended


def _documents(q: T, k: T, v: T, doc: T) -> T:
    n = q.shape[1]
    mask = (doc[:, None] == doc[None]) & torch.ones(n, n, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]


def _recurrence(a: T, b: T) -> T:
    found = torch.empty_like(b)
    state = torch.zeros_like(b[0])
    for t in range(len(b)):
        state = a[t] * state + b[t]
        found[t] = state
    return found


def _jax(make: Callable[[Any, Any], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    def made() -> Callable[..., Any]:
        import jax
        import jax.numpy as jnp

        return jax.jit(make(jax, jnp))  # type: ignore[no-any-return]

    return made


def _keops(make: Callable[[Any, Any, Any], T]) -> Callable[[], Callable[..., T]]:
    """What is made of lazy tensors of `x` and `y`, and of the third input."""

    def made() -> Callable[..., T]:
        from pykeops.torch import LazyTensor

        def call(x: T, y: T, *rest: T) -> T:
            return make(LazyTensor(x[:, None]), LazyTensor(y[None]), rest[0] if rest else None)

        return call

    return made


def _squares(x: T, y: T) -> T:
    return (x[:, None] - y[None]).square().sum(2)


def _j_squares(jnp: Any, x: Any, y: Any) -> Any:
    return jnp.sum(jnp.square(x[:, None] - y[None]), axis=2)


def _j_attention(jnp: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    import jax

    scores = jnp.einsum("hid,hjd->hij", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("hij,hje->hie", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1), v)


def _lazy_minimum(x: Any, y: Any, g: T) -> Any:
    from pykeops.torch import LazyTensor

    cost = ((x - y) ** 2).sum(-1)
    return -((LazyTensor(g.view(1, -1, 1)) - cost).logsumexp(1).view(-1))


POINTS = {"x": (8192, 3), "y": (8192, 3)}
HEADS = {"q": (8, 1024, 64), "k": (8, 1024, 64), "v": (8, 1024, 64)}

PROGRAMS: Mapping[str, Program] = {
    "softmax": Program(
        "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))",
        {"x": (4096, 2048)},
        lambda x: x.softmax(1),
        _jax(lambda jax, jnp: lambda x: jax.nn.softmax(x, axis=1)),
    ),
    "layer norm": Program(
        "y[i,j] = (x[i,j] - mean[j](x[i,j])) * rsqrt(var[j](x[i,j]) + 0.00001) * w[j] + b[j]",
        {"x": (4096, 1024), "w": (1024,), "b": (1024,)},
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        _jax(
            lambda jax, jnp: (
                lambda x, w, b: (
                    (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-5) * w + b
                )
            )
        ),
    ),
    "variance of columns": Program(
        "y[j] = var[i](x[i,j])",
        {"x": (8192, 1024)},
        lambda x: x.var(0, correction=0),
        _jax(lambda jax, jnp: lambda x: x.var(0)),
    ),
    "a chain of functions": Program(
        "y[i] = x[i] * tanh(log(1 + exp(x[i]))) + silu(x[i]) * sigmoid(x[i])",
        {"x": (4_000_000,)},
        lambda x: x * (1 + x.exp()).log().tanh() + F.silu(x) * x.sigmoid(),
        _jax(
            lambda jax, jnp: (
                lambda x: x * jnp.tanh(jnp.log(1 + jnp.exp(x))) + jax.nn.silu(x) * jax.nn.sigmoid(x)
            )
        ),
    ),
    "causal attention": Program(
        """
S[h,i,j] = where(j <= i, sum[d](q[h,i,d] * k[h,j,d]) / 8, -inf)
P[h,i,j] = exp(S[h,i,j] - max[j](S[h,i,j]))
O[h,i,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * v[h,j,e])""",
        HEADS,
        _attended,
        _jax(
            lambda jax, jnp: (
                lambda q, k, v: _j_attention(jnp, q, k, v, jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool)))
            )
        ),
        flex=_flex_causal,
    ),
    "packed documents": Program(
        """
S[h,i,j] = where(doc[i] == doc[j] and j <= i, sum[d](q[h,i,d] * k[h,j,d]) / 8, -inf)
P[h,i,j] = exp(S[h,i,j] - max[j](S[h,i,j]))
O[h,i,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * v[h,j,e])""",
        {**HEADS, "doc": (1024,)},
        _documents,
        _jax(
            lambda jax, jnp: (
                lambda q, k, v, doc: _j_attention(
                    jnp, q, k, v, (doc[:, None] == doc[None]) & jnp.tril(jnp.ones((len(doc), len(doc)), bool))
                )
            )
        ),
        flex=_flex_documents,
        below={"doc": 8},
    ),
    "linear and cross-entropy": Program(
        "L = mean[t](logsumexp[v](sum[d](h[t,d] * W[v,d])) - sum[d](h[t,d] * W[y[t],d]))",
        {"h": (1024, 512), "W": (16384, 512), "y": (1024,)},
        lambda h, W, y: F.cross_entropy(h @ W.T, y),
        _jax(
            lambda jax, jnp: (
                lambda h, W, y: jnp.mean(jax.nn.logsumexp(h @ W.T, axis=1) - jnp.sum(h * W[y], axis=1))
            )
        ),
        below={"y": 16384},
        scale=0.1,
    ),
    "product of matrices": Program(
        "y[i,k] = sum[j](a[i,j] * b[j,k])",
        {"a": (1024, 1024), "b": (1024, 1024)},
        lambda a, b: a @ b,
        _jax(lambda jax, jnp: lambda a, b: a @ b),
    ),
    "Gaussian kernel": Program(
        "z[i] = sum[j](exp(-sum[d](sq(x[i,d] - y[j,d]))) * b[j])",
        {**POINTS, "b": (8192,)},
        lambda x, y, b: (-_squares(x, y)).exp() @ b,
        _jax(lambda jax, jnp: lambda x, y, b: jnp.exp(-_j_squares(jnp, x, y)) @ b),
        _keops(lambda x, y, b: ((-((x - y) ** 2).sum(-1)).exp() @ b[:, None])[:, 0]),
    ),
    "nearest neighbour": Program(
        "n[i] = min[j](sum[d](sq(x[i,d] - y[j,d])))",
        POINTS,
        lambda x, y: _squares(x, y).amin(1),
        _jax(lambda jax, jnp: lambda x, y: jnp.min(_j_squares(jnp, x, y), axis=1)),
        _keops(lambda x, y, _: ((x - y) ** 2).sum(-1).min(1).view(-1)),
    ),
    "soft minimum": Program(
        "f[i] = -logsumexp[j](g[j] - sum[d](sq(x[i,d] - y[j,d])))",
        {**POINTS, "g": (8192,)},
        lambda x, y, g: -(g - _squares(x, y)).logsumexp(1),
        _jax(lambda jax, jnp: lambda x, y, g: -jax.nn.logsumexp(g - _j_squares(jnp, x, y), axis=1)),
        _keops(_lazy_minimum),
    ),
    "cumulative sum": Program(
        "t: axis[j]\ny[i,t] = sum[j](where(j <= t, x[i,j], 0))",
        {"x": (512, 8192)},
        lambda x: x.cumsum(1),
        _jax(lambda jax, jnp: lambda x: jnp.cumsum(x, axis=1)),
    ),
    "linear recurrence": Program(
        "h[t,d] = a[t,d] * h[t-1,d] + b[t,d]",
        {"a": (2048, 512), "b": (2048, 512)},
        _recurrence,
        _jax(
            lambda jax, jnp: (
                lambda a, b: jax.lax.associative_scan(
                    lambda one, other: (one[0] * other[0], one[1] * other[0] + other[1]), (a, b)
                )[1]
            )
        ),
        scale=0.5,
    ),
}


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run or is wrong."""
    os.environ.setdefault("EQFUSE_NATIVE", "wait")  # what is timed is C++
    folder = mkdtemp()
    atexit.register(
        shutil.rmtree, folder, ignore_errors=True
    )  # behind KeOps, which writes there when it ends
    os.environ |= dict.fromkeys(CACHES, folder)  # first calls find nothing
    for name in chosen_names(options.only, tuple(PROGRAMS)):
        with recorded(report.failing(name)):
            report.add(row_of(name, PROGRAMS[name], options))
    for row in report.rows:
        if row["error"] > MOST_ERROR:
            report.failures.append(f"{row['program']}: error {row['error']:.1e}")
    behind = [row["program"] for row in report.rows if row["ratio"] < 1]
    report.summary.append(f"{len(report.rows)} programs; a peer is faster: {', '.join(behind) or 'none'}")


def drawn(program: Program, options: Options, seed: int) -> dict[str, T]:
    torch.manual_seed(seed)
    made: dict[str, T] = {}
    for name, shape in program.shapes.items():
        sizes = [max(4, n // (16 if options.small and n > 64 else 1)) for n in shape]
        if name in program.below:
            below = max(2, program.below[name] // (16 if options.small and program.below[name] > 64 else 1))
            made[name] = (
                torch.randint(0, below, sizes).sort().values
                if name == "doc"
                else torch.randint(0, below, sizes)
            )
        else:
            made[name] = torch.randn(sizes) * program.scale
    return made


def row_of(name: str, program: Program, options: Options) -> dict[str, Any]:
    """One program by every peer that has it, checked and timed."""
    given = [drawn(program, options, seed) for seed in range(3)]
    exact = program.torch(**{n: t.double() if t.is_floating_point() else t for n, t in given[1].items()})
    greatest = float(exact.abs().max())
    calls: dict[str, Callable[[Values], Any]] = {}
    peers: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    for peer, make in _peers(program, options):
        with _noting(notes, peer):
            start = time.perf_counter()
            call = make()
            found = call(given[1])
            first = time.perf_counter() - start
            error = float((torch.as_tensor(np.array(found)) - exact).abs().max()) / greatest
            peers[peer] = {"first": first, "error": error}
            calls[peer] = call
    with torch.no_grad():
        for peer, ms in in_turn(calls, given, "cpu", rounds=REPEATS, most_seconds=MOST_SECONDS).items():
            peers[peer]["ms"] = ms
    best = min(
        found["ms"] for peer, found in peers.items() if peer != "eqfuse" and found["error"] < MOST_ERROR
    )
    ratio = best / peers["eqfuse"]["ms"]
    return {
        "program": name,
        "peers": peers,
        "notes": notes,
        "ratio": ratio,
        "error": peers["eqfuse"]["error"],
        "sizes": {name: list(tensor.shape) for name, tensor in given[0].items()},
    }


@contextmanager
def _noting(notes: dict[str, str], peer: str) -> Iterator[None]:
    """What a peer refuses is a result about it; what eqfuse refuses is a failure."""
    try:
        yield
    except Exception as error:
        if peer == "eqfuse":
            raise
        notes[peer] = one_line(error)


def _peers(program: Program, options: Options) -> Iterator[tuple[str, Callable[[], Callable[[Values], Any]]]]:
    """How each peer's call is made."""

    def ours() -> Callable[[Values], Any]:
        kernel = eq.compile(program.text, native="wait")
        return lambda values: kernel(**values)

    def by_torch() -> Callable[[Values], Any]:
        return lambda values: program.torch(**values)

    def compiled() -> Callable[[Values], Any]:
        torch._dynamo.reset()
        call = torch.compile(program.torch)
        return lambda values: call(**values)

    yield "eqfuse", ours
    yield "torch", by_torch
    if options.torch_compile and program.torch is not _recurrence:  # it unrolls the loop
        yield "torch.compile", compiled
    if program.flex is not None and options.torch_compile:
        yield "FlexAttention", lambda: _of_tensors(program.flex)
    if program.jax is not None and importlib.util.find_spec("jax"):
        yield "JAX", lambda: _of_arrays(program.jax)
    if program.keops is not None and importlib.util.find_spec("pykeops"):
        yield "KeOps", lambda: _of_tensors(program.keops)


def _of_tensors(make: Callable[[], Callable[..., T]] | None) -> Callable[[Values], T]:
    assert make is not None
    call = make()
    return lambda values: call(*values.values())


def _of_arrays(make: Callable[[], Callable[..., Any]] | None) -> Callable[[Values], Any]:
    """Arrays of JAX are made before the call is timed: those of its users are in its memory."""
    assert make is not None
    import jax.numpy as jnp

    call, known = make(), dict[int, list[Any]]()

    def called(values: Values) -> Any:
        if id(values) not in known:
            known[id(values)] = [jnp.asarray(value.numpy()) for value in values.values()]
        return call(*known[id(values)]).block_until_ready()

    return called


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/when.md."""
    lines = [f"| program | {' | '.join(PEERS)} |", "|---|" + "---|" * len(PEERS)]
    for row in rows:
        sizes = "; ".join(" x ".join(map(str, shape)) for shape in row["sizes"].values())
        cells = [_shown(peer)(row) or "-" for peer in PEERS]
        lines.append(f"| {row['program']} ({sizes}) | {' | '.join(cells)} |")
    return "\n".join(lines)
