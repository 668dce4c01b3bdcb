"""`eqfuse bench verify`: what verification takes of compiling each program, and what it shows.

Every program is compiled afresh three times, after a first small program; the fastest compilation counts.
"""

from __future__ import annotations

import os
import statistics
from typing import Any
from unittest.mock import patch

import eqfuse as eq
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import WORKLOADS, select

REPEATS = 3
SHARE = 1 / 3
"""What part of compilation verification may take, over all programs."""

TITLE = "Verification in the field"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("verify ms", lambda row: f"{row['verify_ms']:.0f}"),
    Column("of compiling", lambda row: f"{row['share']:.0%}"),
    Column("trials", lambda row: str(row["trials"])),
    Column("least compared", lambda row: str(row["compared"])),
    Column("grade", lambda row: str(row["grade"])),
    Column("bound", lambda row: f"{row['bound']:.0e}" if row["bound"] < 1 else "[yellow]none[/]"),
    Column("degree", lambda row: f"{row['degree']:.4g}"),
    Column("exponentials", lambda row: f"{row['terms']:.3g}"),
    Column("opaque", lambda row: ", ".join(row["opaque"]) or "-"),
)


def run(options: Options, report: Report) -> None:
    """Failures: a program that is not verified; verification above a third of all compile time."""
    for workload in each(select(options.only)):
        with recorded(report.failing(workload.name)):
            report.add(measure(workload.name))
    report.failures += [f"{row['program']}: not verified" for row in report.rows if not row["ok"]]
    if not report.rows:
        return
    times = [row["verify_ms"] for row in report.rows]
    shares = [row["share"] for row in report.rows]
    slowest = max(report.rows, key=lambda row: row["verify_ms"])
    total = sum(times) / sum(row["total_ms"] for row in report.rows)
    above = [f"{row['program']} {row['share']:.0%}" for row in report.rows if row["share"] > SHARE]
    missed = [f"{row['program']} ({row['theorem']})" for row in report.rows if not row["reached"]]
    report.summary += [
        f"median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms ({slowest['program']})",
        f"part of compiling: {total:.0%} over all, median {statistics.median(shares):.0%}, worst {max(shares):.0%}",
        f"above a third: {', '.join(above) or 'none'}",
        f"requested bound not reached: {'; '.join(missed) or 'none'}",
    ]
    if total > SHARE:
        report.failures.append(f"verification takes {total:.0%} of compiling, above {SHARE:.0%}")


def measure(name: str) -> dict[str, Any]:
    """Times and certificate of one program, compiled for nominal extents on the CPU."""
    workload = WORKLOADS[name]
    case = workload.cases["small"]
    eq.compile("y[i] = sum[j](exp(x[i,j]))", target="cpu")
    # What the cache on disk has is not verified again.
    with patch.dict(os.environ, EQFUSE_CACHE="off"):
        kernels = [
            eq.compile(workload.text(case), scalars=case.constants, target="cpu") for _ in range(REPEATS)
        ]
    kernel = min(kernels, key=lambda kernel: sum(kernel.stats["ms"].values()))
    milliseconds, certificate = kernel.stats["ms"], kernel.certificate
    total = sum(milliseconds.values())
    return {
        "program": name,
        "ok": certificate.ok,
        "grade": certificate.grade,
        "verify_ms": milliseconds["verify"],
        "total_ms": total,
        "share": milliseconds["verify"] / total,
        "trials": certificate.trials,
        "compared": certificate.compared,
        "bound": certificate.bound,
        "reached": certificate.reached,
        "theorem": certificate.theorem.partition(":")[0 if certificate.bound < 1 else 2].strip(),
        "degree": certificate.degree,
        "terms": certificate.terms,
        "opaque": list(certificate.opaque),
    }
