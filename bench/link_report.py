"""`eqfuse bench link`: the latency and the bandwidth of the link between ranks, which `eq.shard` predicts exchanges with.

An all-gather of messages of several sizes between processes (`--jobs N`, two by default), by NCCL with `--device cuda` where each has a GPU,
else by gloo. The latency is the time of the smallest, the rate that of the largest. What is measured is kept beside eqfuse's cache, and
`s.why()` says so.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from math import ceil, log2
from pathlib import Path

import torch
import torch.distributed as dist

from bench.report import Column, Options, Report, recorded
from bench.shard_report import begun, spawned, timed
from eqfuse.sharding.links import keep_measured

TITLE = "The link between ranks"
COLUMNS = (
    Column("bytes of a rank", lambda row: f"{row['bytes']:,}"),
    Column("all-gather, us", lambda row: f"{1e3 * row['ms']:.1f}"),
    Column("GB/s", lambda row: f"{row['bytes'] * (row['ranks'] - 1) / row['ms'] / 1e6:.3g}"),
)
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)


def run(options: Options, report: Report) -> None:
    ranks = options.jobs or 2
    with tempfile.TemporaryDirectory() as folder, recorded(report.failing("ranks")):
        spawned(_rank, ranks, folder, options.device)
        for row in json.loads((Path(folder) / "rows").read_text()):
            report.add(row)
    if report.rows:
        first, last = report.rows[0], report.rows[-1]
        latency = first["ms"] / 1e3 / max(1, ceil(log2(ranks)))
        byte = (last["ms"] - first["ms"]) / 1e3 / last["bytes"] / (ranks - 1)
        name = str(first["link"])
        keep_measured(name, latency, byte)
        report.summary.append(f"{name}: {1e6 * latency:.1f} us a message, {1e-9 / byte:.3g} GB/s")


def _rank(rank: int, ranks: int, port: int, folder: str, device: str) -> None:
    apart = begun(rank, ranks, port, device)
    where = "cuda" if apart else "cpu"
    rows = []
    for size in SIZES:
        sent = torch.zeros(size, dtype=torch.uint8, device=where)
        got = [torch.empty_like(sent) for _ in range(ranks)]
        ms = timed(partial(dist.all_gather, got, sent), where)
        rows.append({"bytes": size, "ms": ms, "ranks": ranks, "link": "nvlink" if apart else "gloo"})
    if rank == 0:
        (Path(folder) / "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()
