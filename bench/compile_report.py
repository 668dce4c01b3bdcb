"""`eqfuse bench compile`: what compiling each program takes, stage by stage, in a process of its own.

Imports and a first compilation of a one-line program come before the measurement. The stages are those of
compiling for the CPU. Triton source of the same kernel is of another plan, a GPU's, which is chosen, lowered,
verified and emitted on top of that: one more column.
"""

from __future__ import annotations

import statistics
from typing import Any

import eqfuse as eq
from bench.measure import in_fresh_process, peak_bytes, peak_growth
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import WORKLOADS, select
from eqfuse.rules.egraph import client

STAGES = ("parse", "derive", "choose", "lower", "verify")
MEMORY_LIMIT = 500e6


def _stage_column(stage: str) -> Column:
    return Column(f"{stage} ms", lambda row: f"{row['ms'].get(stage, 0):.0f}")


TITLE = "Compilation, imports apart"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("e-nodes", lambda row: str(row["enodes"])),
    Column("rounds", lambda row: str(row["rounds"])),
    Column("saturated", lambda row: "yes" if row["saturated"] else "[red]no[/]"),
    *map(_stage_column, STAGES),
    Column("total ms", lambda row: f"{row['total_ms']:.0f}"),
    Column("+ Triton ms", lambda row: f"{row['triton_ms']:.0f}"),
    Column("memory MB", lambda row: f"{row['memory_bytes'] / 1e6:.0f}"),
)


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not compile, does not saturate, or takes over 500 MB."""
    for workload in each(select(options.only)):
        with recorded(report.failing(workload.name)):
            report.add(in_fresh_process(measure, workload.name))
    for row in report.rows:
        if not row["saturated"]:
            report.failures.append(f"{row['program']}: the budget was exhausted before saturation")
        if row["memory_bytes"] > MEMORY_LIMIT:
            report.failures.append(f"{row['program']}: {row['memory_bytes'] / 1e6:.0f} MB, above 500 MB")
    totals = [row["total_ms"] for row in report.rows]
    if totals:
        slowest = max(report.rows, key=lambda row: row["total_ms"])
        share = sum(row["ms"]["verify"] for row in report.rows) / sum(totals)
        report.summary.append(
            f"{len(totals)} programs: median {statistics.median(totals):.0f} ms, "
            f"worst {slowest['total_ms']:.0f} ms ({slowest['program']}), {share:.0%} of it verification; "
            f"with Triton source median {statistics.median(r['total_ms'] + r['triton_ms'] for r in report.rows):.0f} ms"
        )


def measure(name: str) -> dict[str, Any]:
    """Statistics of one compilation for nominal extents; milliseconds, bytes."""
    workload = WORKLOADS[name]
    case = workload.cases["small"]
    len(eq.compile("y[i] = sum[j](x[i,j])", target="cpu").triton)
    kernel, grown = peak_growth(lambda: eq.compile(workload.text(case), scalars=case.constants, target="cpu"))
    stats = kernel.stats
    milliseconds = {stage: float(value) for stage, value in stats["ms"].items()}
    len(kernel.triton)
    total = sum(milliseconds.values())
    return {
        "program": name,
        "enodes": int(stats["enodes"]),
        "rounds": int(stats["rounds"]),
        "saturated": bool(stats["saturated"]),
        "ms": milliseconds,
        "total_ms": total,
        "triton_ms": sum(float(value) for value in kernel.stats["ms"].values()) - total,
        "memory_bytes": grown + sum(map(peak_bytes, client.processes())),
    }
