"""`eqfuse bench backward`: what becomes of the gradients of the benchmark programs: kernels, schedule, what is not fused.

Each gradient is compiled for an H200 as `backward` runs it, with what the forward has saved, as one program for all
inputs, and as one for each input. Heads have 64 elements; other sizes are nominal. A gradient is `fused` where every
reduction of it has a merge, or needs none. `bound` is the chance that a wrong gradient by all inputs would have been certified.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import eqfuse as eq
from bench.report import Column, Options, Report, each, recorded, shown
from bench.workloads import Workload, select
from eqfuse.differentiate.certify import certify_gradient
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.errors import EqfuseError
from eqfuse.explain.explanation import why_not
from eqfuse.explain.why import Apart, Divided
from eqfuse.terms.parser import axes_of, parse
from eqfuse.verify.certificate import REQUESTED

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
    Column("bound", lambda row: shown(row, "bound", ".1g")),
    Column("certified ms", lambda row: shown(row, "certified_ms", ".0f")),
    Column("fused", lambda row: "yes" if not row["why_not"] else f"no ({len(row['why_not'])})"),
    Column("s", lambda row: f"{row['seconds']:.1f}"),
)


def run(options: Options, report: Report) -> None:
    for workload in each(select(options.only)):
        with recorded(report.failing(workload.name)):
            for wrt in _groups(workload):
                report.add(_row(workload, wrt))
    whole = [row for row in report.rows if row["all"]]
    bounded = [row for row in whole if row["bound"] <= REQUESTED]
    times = sorted(row["certified_ms"] for row in whole)
    report.summary.append(
        f"{len(whole)} gradients by all inputs are certified, {len(bounded)} with a bound of {REQUESTED:.0e} or less; "
        f"{times[len(times) // 2]:.0f} ms of CPU in the median, {times[-1]:.0f} at most"
    )
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


def _certified(source: str, gradient: str, constants: Mapping[str, float]) -> dict[str, Any]:
    """That a text is the gradient: the bound, and CPU milliseconds. A bound of 1 is none."""
    started = time.process_time()
    found = certify_gradient(source, gradient, scalars=constants)
    seconds = time.process_time() - started
    if not found.ok:
        raise EqfuseError(f"the gradient was not verified: {found.reason}", hint=str(found.counterexample))
    return {"bound": found.bound, "certified_ms": 1e3 * seconds}


def _row(workload: Workload, wrt: tuple[str, ...]) -> dict[str, Any]:
    started = time.perf_counter()
    constants = workload.cases["small"].constants
    saved = saving_gradient(_sized(workload.source, constants), wrt, scalars=constants, alike=True)
    source = saved.backward
    row: dict[str, Any] = {"program": workload.name, "wrt": wrt, "all": wrt == _groups(workload)[0]}
    row["saved"] = (*saved.outputs, *saved.residuals)
    if row["all"]:
        row |= _certified(workload.source, saved.whole, constants)
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
            if not isinstance(reason, Apart | Divided)
        ],
        "seconds": time.perf_counter() - started,
        "source": source,
    }
