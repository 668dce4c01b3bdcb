"""`eqfuse bench backward`: what becomes of the gradients of the benchmark programs: kernels, schedule, what is not fused.

Each gradient is compiled for an H200 as `backward` runs it, with what the forward has saved, as one program for all
inputs, and as one for each input. Heads have 64 elements; other sizes are nominal. A gradient is `fused` where every
reduction of it has a merge, or needs none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import eqfuse as eq
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import Workload, select
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.errors import EqfuseError
from eqfuse.explain.explanation import why_not
from eqfuse.explain.why import Divided
from eqfuse.terms.parser import axes_of, parse

TARGET = "h200"
HEADS, HEAD = ("d", "e"), 64
"""Names of axes along the elements of a head, where a program has both; and their length."""
TITLE = f"Gradients of the benchmark programs, compiled for {TARGET}"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("by", lambda row: " ".join(row["wrt"])),
    Column("saved", lambda row: " ".join(row["saved"])),
    Column("kernels", lambda row: str(row["kernels"])),
    Column("schedule", lambda row: str(row["schedule"])),
    Column("fused", lambda row: "yes" if not row["why_not"] else f"no ({len(row['why_not'])})"),
    Column("s", lambda row: f"{row['seconds']:.1f}"),
)


def run(options: Options, report: Report) -> None:
    for workload in each(select(options.only)):
        with recorded(report.failing(workload.name)):
            for wrt in _groups(workload):
                report.add(_row(workload, wrt))
    whole = [row for row in report.rows if row["all"]]
    fused = [row for row in whole if not row["why_not"]]
    report.summary.append(f"{len(fused)} of {len(whole)} gradients by all inputs are fused")
    one = [row for row in whole if row["kernels"] == 1]
    report.summary.append(f"{len(one)} of them are one kernel")


def _sized(source: str, constants: Mapping[str, float]) -> str:
    """The program with heads of `HEAD` elements, where it has such axes and says nothing of them."""
    program = parse(source, scalars=constants)
    axes = [axis for axis in HEADS if axis in axes_of(program.outputs) and axis not in program.lengths]
    return "".join(f"{axis}: axis[{HEAD}]\n" for axis in axes) + source if len(axes) > 1 else source


def _groups(workload: Workload) -> list[tuple[str, ...]]:
    case = workload.cases["small"]
    real = tuple(name for name in workload.tensors if workload.dtype(name, case)[0] in "fb")
    return [real] if len(real) == 1 else [real, *((name,) for name in real)]


def _row(workload: Workload, wrt: tuple[str, ...]) -> dict[str, Any]:
    started = time.perf_counter()
    constants = workload.cases["small"].constants
    saved = saving_gradient(_sized(workload.source, constants), wrt, scalars=constants, alike=True)
    source = saved.backward
    row: dict[str, Any] = {"program": workload.name, "wrt": wrt, "all": wrt == _groups(workload)[0]}
    row["saved"] = (*saved.outputs, *saved.residuals)
    try:
        kernel = eq.compile(source, target=TARGET, verify=False)
    except EqfuseError as error:
        refused = {"kernels": 0, "schedule": "refused", "why_not": [str(error)]}
        return {**row, **refused, "seconds": time.perf_counter() - started, "source": source}
    return {
        **row,
        "kernels": len(kernel.plan.kernels),
        "schedule": kernel.plan.schedule,
        "why_not": [
            str(reason).partition("\n")[0]
            for reason in why_not(kernel.report)
            if not isinstance(reason, Divided)
        ],
        "seconds": time.perf_counter() - started,
        "source": source,
    }
