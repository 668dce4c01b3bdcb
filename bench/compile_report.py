"""`eqfuse bench compile`: what compiling each program takes, stage by stage, in a process of its own.

Imports and a first compilation of a one-line program come before the measurement. The stages are those of
compiling for the CPU. Triton source of the same kernel is of another plan, a GPU's, which is chosen, lowered,
verified and emitted on top of that: one more column. "orders" is what the choice of an order of sums and products takes: processor time
of compilations with all orders that rounding allows over those without, in turns. The programs of `bench algebra` are there for it, where
no others are asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import eqfuse as eq
from bench.algebra_programs import PROGRAMS
from bench.measure import in_fresh_process, peak_bytes, peak_growth, processor_seconds
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import select
from eqfuse.rules.egraph import client
from eqfuse.terms.nodes import Reassociate

STAGES = ("parse", "derive", "choose", "lower", "verify")
MEMORY_LIMIT = 500e6
TURNS = 3
"""Compilations with orders, and without: the least time of each counts."""


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
    Column("orders", lambda row: f"{row['orders']:.2f}{' *' if row['order'] else ''}"),
    Column("memory MB", lambda row: f"{row['memory_bytes'] / 1e6:.0f}"),
)


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not compile, does not saturate, or takes over 500 MB."""
    for workload in each(select(options.only)):
        with recorded(report.failing(workload.name)):
            case = workload.cases["small"]
            report.add(in_fresh_process(measure, workload.name, workload.text(case), case.constants))
    for name, order in PROGRAMS.items() if options.only is None else ():
        with recorded(report.failing(name)):
            report.add(in_fresh_process(measure, name, order.text))
    for row in report.rows:
        if not row["saturated"]:
            report.failures.append(f"{row['program']}: the budget was exhausted before saturation")
        if row["memory_bytes"] > MEMORY_LIMIT:
            report.failures.append(f"{row['program']}: {row['memory_bytes'] / 1e6:.0f} MB, above 500 MB")
    totals = [row["total_ms"] for row in report.rows]
    if totals:
        slowest = max(report.rows, key=lambda row: row["total_ms"])
        share = sum(row["ms"]["verify"] for row in report.rows) / sum(totals)
        for which, chosen in (("another order runs", True), ("none does", False)):
            shares = [row["orders"] for row in report.rows if row["order"] is chosen]
            if shares:
                report.summary.append(
                    f"where {which}, the choice of orders takes {statistics.median(shares):.2f} times as long to compile "
                    f"(median of {len(shares)}), at most {max(shares):.2f}"
                )
        report.summary.append(
            f"{len(totals)} programs: median {statistics.median(totals):.0f} ms, "
            f"worst {slowest['total_ms']:.0f} ms ({slowest['program']}), {share:.0%} of it verification; "
            f"with Triton source median {statistics.median(r['total_ms'] + r['triton_ms'] for r in report.rows):.0f} ms"
        )


def measure(name: str, text: str, scalars: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Statistics of one compilation for nominal extents; milliseconds, bytes."""
    len(eq.compile("y[i] = sum[j](x[i,j])", target="cpu").triton)
    kernel, grown = peak_growth(lambda: eq.compile(text, scalars=scalars, target="cpu"))
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
        "order": bool(kernel.plan.order),
        "orders": _share_of_orders(text, scalars),
    }


def _share_of_orders(text: str, scalars: Mapping[str, float] | None) -> float:
    """The processor time of a compilation over that of one in which sums and products stay as they are written."""
    modes: tuple[Reassociate, Reassociate] = ("exact", "bounded")
    least = dict.fromkeys(modes, math.inf)
    for turn in range(TURNS):
        for mode in modes[:: 1 if turn % 2 else -1]:
            start = processor_seconds(client.processes())
            eq.compile(text, scalars=scalars, target="cpu", reassociate=mode)
            least[mode] = min(least[mode], processor_seconds(client.processes()) - start)
    return least["bounded"] / least["exact"]
