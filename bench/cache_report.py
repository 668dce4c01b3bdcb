"""`eqfuse bench cache`: ten processes at once share a cache, half of them killed at random, `--examples` rounds of it
(`--examples 1000`), or as many as begin within `--seconds`. Failures: a process that crashes, hangs or computes something else."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.killed import CHILDREN
from bench.report import Column, Options, Report

TITLE = f"{CHILDREN} processes that share a cache, half of them killed"
COLUMNS = tuple(
    Column(name, lambda row, name=name: f"{row.get(name, 0):.0f}")  # type: ignore[misc]
    for name in ("rounds", "killed", "made", "cached", "faulty", "seconds")
)


def run(options: Options, report: Report) -> None:
    """Rounds in a process of their own, which forks."""
    words = [str(options.examples), str(options.seed), str(options.seconds)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.killed", *words], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        report.failures.append(f"it ended with status {done.returncode}: {done.stderr[-500:]}")
        return
    row = json.loads(done.stdout)
    report.add(row)
    report.failures += row["faults"]
    report.summary.append(f"{row['rounds']} rounds, {len(row['faults'])} faults")
