"""`eqfuse bench shard`: programs over ranks, by every strategy that they have: predicted and measured times, errors, peers.

Two processes by default (`--jobs N`: as many): with `--device cuda` each has a GPU and they exchange by NCCL; where there is one GPU, or
on a CPU, by gloo. Errors are against the kernel on whole tensors on one rank, whose time is beside.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, recorded
from bench.timing import seconds_of
from eqfuse.measure import as_tuple

T = torch.Tensor
Tensors = dict[str, T]
TITLE = "Programs over ranks"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("sizes", lambda row: str(row["sizes"])),
    Column("strategy", lambda row: str(row["strategy"])),
    Column(
        "exchanging + computing, predicted ms",
        lambda row: f"{row['exchanging']:.3g} + {row['computing']:.3g}",
    ),
    Column("ms", lambda row: f"{row['ms']:.3g}"),
    Column("in a CUDA graph", lambda row: "-" if row.get("graph_ms") is None else f"{row['graph_ms']:.3g}"),
    Column("one rank, ms", lambda row: f"{row['one_ms']:.3g}"),
    Column("one rank / ms", lambda row: f"{row['one_ms'] / row['ms']:.2f}"),
    Column("peer", lambda row: "-" if row.get("peer_ms") is None else f"{row['peer_ms']:.3g}"),
    Column("error", lambda row: f"{row['error']:.0e}"),
)
MOST_ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
WARM_UPS, CALLS = 3, 9
MOST_DEAR = 50
"""A strategy that is predicted to take so many times the cheapest is not run."""

ATTENTION = "m[h,i] = max[j](s[h,i,j])\np[h,i,j] = exp(s[h,i,j] - m[h,i])\n"
ATTENTION += "O[h,i,e] = sum[j](p[h,i,j] * V[h,j,e]) / sum[j](p[h,i,j])\nreturn O"
SCALED = "sum[d](Q[h,i,d] * K[h,j,d]) * 0.08838834764"


@dataclass(frozen=True)
class Case:
    """A program, the axes that are sharded, its tensors (drawn on one rank alike), sizes on CPUs and GPUs, and what a peer takes."""

    text: str
    axes: tuple[str, ...]
    drawn: Callable[..., Tensors]
    small: tuple[dict[str, int], ...]
    large: tuple[dict[str, int], ...]
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float32
    peer: Callable[[Tensors, DeviceMesh], Callable[[], Any]] | None = None


def _heads(h: int, i: int, j: int, d: int) -> Tensors:
    return {"Q": torch.randn(h, i, d), "K": torch.randn(h, j, d), "V": torch.randn(h, j, d)}


def _logits(i: int, v: int) -> Tensors:
    return {"x": torch.randn(i, v), "label": torch.randint(0, v, (i,))}


def _context_parallel(t: Tensors, mesh: DeviceMesh) -> Callable[[], Any]:
    """torch's own: keys gathered, positions balanced, cuDNN's kernel."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    whole = [t[name][None].clone() for name in ("Q", "K", "V")]
    context = context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2])
    context.__enter__()
    kernel = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    kernel.__enter__()
    q, k, v = whole
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _loss_parallel(t: Tensors, mesh: DeviceMesh) -> Callable[[], Any]:
    """torch's own cross-entropy of logits that are sharded by class."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    logits = distribute_tensor(t["x"], mesh, [Shard(1)])

    def call() -> Any:
        with loss_parallel():
            return F.cross_entropy(logits, t["label"], reduction="none")

    return call


CASES = {
    "causal prefill": Case(
        f"s[h,i,j] = where(j <= i, {SCALED}, -inf)\n" + ATTENTION,
        ("i", "j"),
        _heads,
        ({"h": 4, "i": 1024, "j": 1024, "d": 128},),
        tuple({"h": 16, "i": n, "j": n, "d": 128} for n in (32768, 65536, 131072, 262144)),
        "zigzag",
        torch.bfloat16,
        _context_parallel,
    ),
    "attention, all pairs": Case(
        f"s[h,i,j] = {SCALED}\n" + ATTENTION,
        ("i", "j"),
        _heads,
        ({"h": 4, "i": 1024, "j": 1024, "d": 128},),
        ({"h": 16, "i": 32768, "j": 32768, "d": 128},),
        dtype=torch.bfloat16,
    ),
    "decode": Case(
        f"s[h,i,j] = {SCALED}\n" + ATTENTION,
        ("j",),
        _heads,
        ({"h": 8, "i": 4, "j": 16384, "d": 128},),
        ({"h": 8, "i": 4, "j": 1 << 20, "d": 128},),
        dtype=torch.bfloat16,
    ),
    "cross-entropy over the vocabulary": Case(
        "label: i64[i]\nm[i] = max[v](x[i,v])\nloss[i] = m[i] + log(sum[v](exp(x[i,v] - m[i]))) - x[i,label[i]]\nreturn loss",
        ("v",),
        _logits,
        ({"i": 512, "v": 32768},),
        ({"i": 8192, "v": 128256},),
        dtype=torch.bfloat16,
        peer=_loss_parallel,
    ),
    "LayerNorm over features": Case(
        "m[i] = mean[v](x[i,v])\ny[i,v] = (x[i,v] - m[i]) * rsqrt(mean[v](sq(x[i,v] - m[i])) + 1e-5)\nreturn y",
        ("v",),
        lambda i, v: {"x": torch.randn(i, v)},
        ({"i": 512, "v": 16384},),
        ({"i": 16384, "v": 16384},),
    ),
    "argmax": Case(
        "a[i] = argmax[v](x[i,v])\nreturn a",
        ("v",),
        lambda i, v: {"x": torch.randn(i, v)},
        ({"i": 512, "v": 32768},),
        ({"i": 8192, "v": 128256},),
    ),
    "row-parallel product": Case(
        "y[i,o] = sum[k](x[i,k] * W[k,o])\nreturn y",
        ("k",),
        lambda i, k, o: {"x": torch.randn(i, k), "W": torch.randn(k, o) * k**-0.5},
        ({"i": 256, "k": 2048, "o": 512},),
        ({"i": 4096, "k": 16384, "o": 4096},),
        dtype=torch.bfloat16,
    ),
    "cumulative sums": Case(
        "i: axis[j]\ny[i,v] = sum[j<=i](x[j,v])\nreturn y",
        ("j",),
        lambda j, v: {"x": torch.randn(j, v)},
        ({"j": 65536, "v": 32},),
        ({"j": 1 << 20, "v": 256},),
    ),
    "linear attention": Case(
        "i: axis[j]\ny[h,i,e] = sum[j<=i](sum[d](q[h,i,d] * k[h,j,d]) * v[h,j,e])\nreturn y",
        ("j",),
        lambda h, j, d: {n: torch.randn(h, j, d) * s for n, s in (("q", 0.1), ("k", 0.1), ("v", 1.0))},
        ({"h": 2, "j": 4096, "d": 64},),
        ({"h": 16, "j": 65536, "d": 128},),
        dtype=torch.bfloat16,
    ),
    "column moments": Case(
        "m[v] = mean[j](x[j,v])\ns[v] = mean[j](sq(x[j,v] - m[v]))\nreturn m, s",
        ("j",),
        lambda j, v: {"x": torch.randn(j, v)},
        ({"j": 65536, "v": 64},),
        ({"j": 1 << 22, "v": 256},),
    ),
}


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, or is wrong."""
    ranks = options.jobs or 2
    chosen_names(options.only, tuple(CASES))
    with tempfile.TemporaryDirectory() as folder:
        with recorded(report.failing("ranks")):
            spawned(_rank, ranks, folder, options)
        rows = Path(folder) / "rows"
        for line in rows.read_text().splitlines() if rows.exists() else ():
            report.add(json.loads(line))
    for row in report.rows:
        if row["error"] > row["most"]:
            report.failures.append(f"{row['program']}, {row['strategy']}: error {row['error']:.1e}")


def spawned(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Runs a function of the rank, the number of ranks, a port and the arguments in as many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn: Any = torch.multiprocessing.__dict__["spawn"]
    spawn(function, (ranks, port, *arguments), nprocs=ranks)


def begun(rank: int, ranks: int, port: int, device: str) -> bool:
    """Joins the default group: by NCCL where each rank has a GPU of its own, which is returned, else by gloo."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "NCCL_NVLS_ENABLE": "0"}
    apart = device == "cuda" and torch.cuda.device_count() >= ranks
    if device == "cuda":
        torch.cuda.set_device(rank if apart else 0)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if apart else "gloo")
    return apart


def _rank(rank: int, ranks: int, port: int, folder: str, options: Options) -> None:
    on_gpu = options.device == "cuda"
    begun(rank, ranks, port, options.device)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,), mesh_dim_names=("r",))
    with open(Path(folder) / "rows", "a", encoding="utf-8") as rows:
        for name in chosen_names(options.only, tuple(CASES)):
            case = CASES[name]
            for sizes in case.large if on_gpu and not options.small else case.small:
                for row in _rows(name, case, sizes, mesh, options):
                    if rank == 0:
                        peer = f", peer {row['peer_ms']:.3g}" if row["peer_ms"] else ""
                        said = f"{row['ms']:.3g} ms, one rank {row['one_ms']:.3g}{peer}, error {row['error']:.0e}"
                        print(f"{name}, {row['sizes']}, {row['strategy']}: {said}", flush=True)
                        rows.write(json.dumps(row) + "\n")
                        rows.flush()
    dist.destroy_process_group()


def _rows(
    name: str, case: Case, sizes: dict[str, int], mesh: DeviceMesh, options: Options
) -> Iterator[dict[str, Any]]:
    torch.manual_seed(options.seed or 0)
    device = options.device or "cpu"
    with torch.device(device):
        drawn = case.drawn(**sizes)
    whole = {n: t.to(case.dtype) if t.is_floating_point() else t for n, t in drawn.items()}
    kernel: Any = eq.compile(case.text, native="wait")
    axes = dict.fromkeys(case.axes, "r")
    expected = kernel(**whole)
    one = timed(lambda: kernel(**whole), device)
    peer = None
    if case.peer is not None and options.device == "cuda" and dist.get_backend() == "nccl":
        try:
            peer = timed(case.peer(whole, mesh), device)
        except (RuntimeError, ImportError, TypeError, ValueError) as error:
            peer = None
            print(f"no peer: {error}", flush=True)
    every = eq.shard(kernel, mesh, axes, layout=case.layout, equal=True)
    given: dict[str, Any] = dict(every.local(**whole))
    every(**given)
    least = min(every.price(plan).seconds for plan in every.strategies)
    for plan in every.strategies:
        if every.price(plan).seconds > MOST_DEAR * least:
            continue
        sharded = eq.shard(kernel, mesh, axes, layout=case.layout, equal=True)
        sharded.strategies = (plan,)
        own: dict[str, Any] = dict(sharded.local(**whole))
        made = sharded(**own)
        both = zip(as_tuple(made), as_tuple(expected), kernel.program.outputs, strict=True)
        errors = [_error(part, sharded.own_output(output.name, value)) for part, value, output in both]
        call = partial(sharded, **own)
        ms = timed(call, device)
        graph = timed(_captured(call), device) if dist.get_backend() == "nccl" else None
        price = sharded.price(plan)
        yield {
            "program": name,
            "sizes": " ".join(f"{axis}={n}" for axis, n in sizes.items()),
            "strategy": plan.strategy,
            "exchanging": 1e3 * price.exchanging,
            "computing": 1e3 * price.computing,
            "ms": ms,
            "graph_ms": graph,
            "one_ms": one,
            "peer_ms": peer,
            "error": max(errors),
            "most": MOST_ERROR[case.dtype],
        }


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """What replays a call from a CUDA graph: what the GPUs take, without the hosts."""
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _error(found: T, expected: T) -> float:
    if not expected.numel():
        return 0.0
    scale = expected.double().abs().max().clamp(min=1e-30)
    worst = torch.nan_to_num((found.double() - expected.double()).abs().max() / scale, nan=torch.inf)
    return float(worst)


def timed(call: Callable[[], Any], device: str) -> float:
    """The median of milliseconds of a call that all ranks begin together."""
    times = []
    for number in range(WARM_UPS + CALLS):
        dist.barrier()
        _, took = seconds_of(call, device)
        if number >= WARM_UPS:
            times.append(1e3 * took)
    found = torch.tensor(median(times), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
