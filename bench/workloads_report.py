"""`eqfuse bench workloads`: every program, every schedule, its error, certificate and Triton source.

A schedule passes where its error against the float64 reference is at most twice that of the unfused
float32 program (or one unit in the last place of its output dtype), its certificate is ok, and at the
small case its Triton source for an H100, run by Triton's interpreter, is within the same bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import eqfuse as eq
from bench.ahead import compile_ahead
from bench.measure import Tensors, as_tuple, rounding, worst_error
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import Case, Workload, select
from eqfuse.extract.plans import SCHEDULES, Schedule
from eqfuse.tile.launch import interpret


def _schedule_column(name: str) -> Column:
    def cell(row: Mapping[str, Any]) -> str:
        found = row["schedules"].get(name)
        if found is None:
            return "[red]-[/]"
        error = "-" if found["error"] is None else f"{found['error']:.1e}"
        return f"[red]{error}[/]" if found["problems"] else error

    return Column(name, cell)


TRITON_TARGET = "sm_90"
TITLE = "Error against the float64 reference (rms, relative), per schedule"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("case", lambda row: str(row["case"])),
    Column("chosen", lambda row: str(row["chosen"])),
    Column("unfused", lambda row: f"{row['unfused_error']:.1e}"),
    *map(_schedule_column, SCHEDULES),
)


def run(options: Options, report: Report) -> None:
    """Raises nothing for a program that fails: it is a line of `failures`."""
    for workload in each(select(options.only)):
        for label in ("small",) if options.small else ("small", "cpu"):
            row = _row(workload, workload.cases[label], options.device)
            report.add(row)
            report.failures += [f"{workload.name} {label}: {problem}" for problem in row["problems"]]
            report.failures += [
                f"{workload.name} {label} {name}: {problem}"
                for name, found in row["schedules"].items()
                for problem in found["problems"]
            ]
    passed = sum(not found["problems"] for row in report.rows for found in row["schedules"].values())
    programs = len({row["program"] for row in report.rows})
    report.summary.append(
        f"{passed} of {len(report.rows) * len(SCHEDULES)} (program, case, schedule) pass; {programs} programs"
    )


def _row(workload: Workload, case: Case, device: str) -> dict[str, Any]:
    inputs = workload.inputs(case, device=device)
    unfused = workload.run_eager(case, inputs)
    problems: list[str] = []
    row: dict[str, Any] = {
        "program": workload.name,
        "family": workload.family,
        "case": case.name,
        "chosen": "-",
        "unfused_error": float("nan"),
        "schedules": {},
    }
    with recorded(problems.append):
        reference = _reference(workload, case, inputs)
        row["unfused_error"] = worst_error(unfused, reference)
        bound = max(2 * row["unfused_error"], rounding(unfused))
        row["schedules"] = {
            name: _checked(workload, case, name, inputs, reference, bound, device) for name in SCHEDULES
        }
        row["chosen"] = _chosen(workload, case, inputs, device)
    return row | {"problems": problems}


def _reference(workload: Workload, case: Case, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """The exact outputs: by eqfuse's own interpreter at the small case, by torch in float64 at others.

    (The interpreter keeps every temporary whole; the tests hold the two against each other.)
    Casts to narrow dtypes are left out, so that the rounding of both programs counts as their error.
    """
    if case.name != "small":
        return workload.run_exact(case, inputs)
    return as_tuple(eq.reference(workload.exact_source)(**inputs, **case.scalars, **case.constants))


def _chosen(workload: Workload, case: Case, inputs: Mapping[str, torch.Tensor], device: str) -> str:
    kernel = eq.compile(workload.text(case), scalars=case.constants, target=_target(device))
    kernel(**workload.arguments(case, inputs))
    return str(kernel.plan.schedule)


def _checked(
    workload: Workload,
    case: Case,
    schedule: Schedule,
    inputs: Mapping[str, torch.Tensor],
    reference: Tensors,
    bound: float,
    device: str,
) -> dict[str, Any]:
    problems: list[str] = []
    found: dict[str, Any] = {"error": None, "certificate": None, "triton": None, "problems": problems}

    def judge(what: str, error: float) -> float:
        if not error <= bound:
            problems.append(f"{what} {error:.2e} is above {bound:.2e}")
        return error

    with recorded(problems.append):
        kernel = eq.compile(
            workload.text(case), scalars=case.constants, target=_target(device), prefer=schedule
        )
        found["error"] = judge(
            "error", worst_error(as_tuple(kernel(**workload.arguments(case, inputs))), reference)
        )
        found["certificate"] = bool(kernel.certificate.ok)
        if not found["certificate"]:
            problems.append("the certificate is not ok")
        if case.name == "small":
            ahead = compile_ahead(workload, case, TRITON_TARGET, schedule)
            arguments = workload.arguments(case, {name: x.cpu() for name, x in inputs.items()})
            interpreted = interpret(ahead.source, ahead.name, **arguments, sizes=ahead.sizes)
            found["triton"] = judge("Triton's error", worst_error(as_tuple(interpreted), reference))
    return found


def _target(device: str) -> str:
    return "cpu" if device == "cpu" else "auto"
