"""`eqfuse bench cache`: ten processes at once share a cache, half of them killed at random, `--examples` rounds of it
(`--examples 1000`), or as many as begin within `--seconds`; then as many hostile edits of a cache that programs are run from.
Failures: a process that crashes, hangs or computes something else."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.killed import CHILDREN
from bench.report import Column, Options, Report

TITLE = f"{CHILDREN} processes that share a cache, half of them killed; a cache that somebody edits"
COLUMNS = (
    Column("drill", lambda row: row["drill"]),
    *(
        Column(name, lambda row, name=name: f"{row.get(name, 0):.0f}")  # type: ignore[misc]
        for name in ("rounds", "killed", "edits", "made", "cached", "faulty", "seconds")
    ),
)


def run(options: Options, report: Report) -> None:
    """Each drill in a process of its own, which forks."""
    for drill in ("killed", "hostile"):
        words = [str(options.count()), str(options.seed), str(options.seconds)]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", f"bench.{drill}", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.stdout:
            report.failures.append(f"{drill}: it ended with status {done.returncode}: {done.stderr[-500:]}")
            continue
        row = json.loads(done.stdout)
        report.add({"drill": drill, **row, "faulty": len(row["faults"])})
        report.failures += row["faults"]
        what = f"{row['rounds']} rounds" if "rounds" in row else f"{row['edits']} hostile edits"
        report.summary.append(f"{what}, {len(row['faults'])} faults")
