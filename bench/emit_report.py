"""`eqfuse bench emit`: every program compiled ahead of time for GPUs that need not be here."""

from __future__ import annotations

from typing import Any

from bench.ahead import compile_ahead
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import Case, Workload, select
from eqfuse.tile.triton.aot import compile_for

MATRIX = {"wgmma", "mma", "mfma"}
TARGETS = ("sm_90", "gfx942")

TITLE = "Compiled without a GPU"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("case", lambda row: str(row["case"])),
    Column("target", lambda row: str(row["target"])),
    Column("schedule", lambda row: str(row["schedule"])),
    Column("kernel", lambda row: str(row["kernel"])),
    Column("registers", lambda row: str(row["registers"])),
    Column("spilled bytes", lambda row: _red_unless_zero(row["spilled_bytes"])),
    Column("shared KB", lambda row: f"{row['shared_bytes'] / 1024:.0f}"),
    Column("instructions", lambda row: " ".join(row["instructions"]) or "-"),
)


def run(options: Options, report: Report) -> None:
    """Failures: a source that does not compile, and kernels that spill registers."""
    for workload in each(select(options.only)):
        for target in TARGETS:
            case = workload.cases["cpu"] if not workload.paper_cases else workload.paper_cases[-1]
            with recorded(report.failing(f"{workload.name} {target}")):
                report.add(*_rows(workload, case, target))
    report.failures += [
        f"{row['program']} {row['target']} {row['kernel']}: {row['spilled_bytes']} bytes of registers spilled"
        for row in report.rows
        if row["spilled_bytes"]
    ]
    for target in TARGETS:
        rows = [row for row in report.rows if row["target"] == target]
        matrix = [row for row in rows if MATRIX.intersection(row["instructions"])]
        report.summary.append(f"{target}: {len(rows)} kernels, {len(matrix)} with matrix instructions")
    older = [
        f"{row['program']} {row['kernel']}"
        for row in report.rows
        if row["target"] == "sm_90" and row["has_dot"] and "wgmma" not in row["instructions"]
    ]
    report.summary.append(
        "sm_90 kernels with a dot but without wgmma, which takes 64 rows of half-precision operands: "
        f"{', '.join(older) or 'none'}"
    )


def _rows(workload: Workload, case: Case, target: str) -> list[dict[str, Any]]:
    ahead = compile_ahead(workload, case, target)
    return [
        {
            "program": workload.name,
            "case": case.name,
            "target": target,
            "schedule": ahead.schedule,
            "has_dot": "tl.dot(" in _function(ahead.source, found.name),
            "kernel": found.name,
            "registers": found.registers,
            "spilled_bytes": found.spilled_bytes,
            "shared_bytes": found.shared_bytes,
            "instructions": sorted(found.instructions),
        }
        for found in compile_for(ahead.source, target, sizes=ahead.sizes)
    ]


def _function(source: str, name: str) -> str:
    """The text of one kernel of an emitted module."""
    _, _, rest = source.partition(f"\ndef {name}(")
    return rest.partition("\n\n\n")[0]


def _red_unless_zero(number: int) -> str:
    return f"[red]{number}[/]" if number else "0"
