"""`eqfuse bench workloads`: every program, every schedule, its error, certificate and Triton source.

A schedule passes where its error against the float64 reference is at most twice that of the unfused
float32 program (or one unit in the last place of its output dtype), its certificate is ok, and at the
small case its Triton source for an H100, run by Triton's interpreter, is within the same bound of the reference,
and within root 2 times it, two errors of that size, of what eqfuse's own interpreter makes of the same tile program in the precision of the kernel. `--jobs` processes do a
program and case each.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import torch

import eqfuse as eq
from bench.ahead import Ahead, compile_ahead
from bench.measure import own_cores, rounding
from bench.report import Column, Options, Report, one_line, recorded
from bench.workloads import WORKLOADS, Case, Number, Workload, select
from eqfuse.errors import EqfuseError, ScheduleError
from eqfuse.loops.plan import SCHEDULES, Schedule
from eqfuse.measure import Tensors, as_tuple, worst_error
from eqfuse.stream.streamer import StreamState
from eqfuse.terms.floats import FloatDomain
from eqfuse.tile import interpreter as tile_interpreter
from eqfuse.tile.triton.launch import interpret


def _schedule_column(name: str) -> Column:
    def cell(row: Mapping[str, Any]) -> str:
        found = row["schedules"].get(name)
        if found is None:
            return "[red]-[/]"
        if "refused" in found:
            return "refused"
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
    Column("streamed", lambda row: "-" if row["streamed"] is None else f"{row['streamed']:.1e}"),
)


def run(options: Options, report: Report) -> None:
    """Raises nothing for a program that fails: it is a line of `failures`."""
    tasks = [
        (workload.name, label)
        for workload in select(options.only)
        for label in (("small",) if options.small else ("small", "cpu", *workload.checked))
    ]
    for number, row in enumerate(_each(tasks, options), start=1):
        report.add(row)
        subject = f"{row['program']} {row['case']}"
        report.failures += [f"{subject}: {problem}" for problem in row["problems"]]
        report.failures += [
            f"{subject} {name}: {problem}"
            for name, found in row["schedules"].items()
            for problem in found["problems"]
        ]
        print(f"{number}/{len(tasks)} {subject} {row['seconds']:.1f} s", file=sys.stderr, flush=True)
    report.rows.sort(key=lambda row: tasks.index((row["program"], row["case"])))
    tried = [found for row in report.rows for found in row["schedules"].values()]
    refused = sum(not found["problems"] and "refused" in found for found in tried)
    passed = sum(not found["problems"] for found in tried) - refused
    expected = len(report.rows) * len(SCHEDULES) - refused
    programs = len({row["program"] for row in report.rows})
    report.summary.append(
        f"{passed} of {expected} (program, case, schedule) pass, {refused} more are refused as expected; "
        f"{programs} programs"
    )


def _each(tasks: Sequence[tuple[str, str]], options: Options) -> Iterator[dict[str, Any]]:
    """The row of every program and case, as it is done; `--jobs` processes compute them, this one alone for one."""
    workers = min(options.jobs or own_cores(), len(tasks))
    if workers == 1:
        yield from (_timed(*task, options.device) for task in tasks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        running = {pool.submit(_timed, *task, options.device): task for task in tasks}
        for future in as_completed(running):
            try:
                yield future.result()
            except BrokenProcessPool:
                yield _empty(*running[future]) | {"problems": ["a process dies"], "seconds": 0.0}
                return


def _prepare() -> None:
    torch.set_num_threads(1)


def _timed(name: str, label: str, device: str) -> dict[str, Any]:
    started = time.perf_counter()
    workload = WORKLOADS[name]
    row = _row(workload, workload.cases[label], device)
    return row | {"seconds": time.perf_counter() - started}


def _empty(program: str, case: str) -> dict[str, Any]:
    return {
        "program": program,
        "family": WORKLOADS[program].family,
        "case": case,
        "chosen": "-",
        "unfused_error": float("nan"),
        "schedules": {},
        "streamed": None,
        "not_streamed": "",
    }


def _row(workload: Workload, case: Case, device: str) -> dict[str, Any]:
    inputs = workload.inputs(case, device=device)
    unfused = workload.run_eager(case, inputs)
    problems: list[str] = []
    row = _empty(workload.name, case.name)
    with recorded(problems.append):
        reference = _reference(workload, case, inputs)
        row["unfused_error"] = worst_error(unfused, reference)
        bound = max(2 * row["unfused_error"], rounding(unfused))
        row["schedules"] = {
            name: _checked(workload, case, name, inputs, reference, bound, device) for name in SCHEDULES
        }
        row["chosen"] = _chosen(workload, case, inputs, device)
        if case.name == "small" and device == "cpu":
            row |= _streamed(workload, case, inputs, reference)
            if row["streamed"] is not None and not row["streamed"] <= bound:
                problems.append(f"error of the stream {row['streamed']:.2e} is above {bound:.2e}")
    return row | {"problems": problems}


def _reference(workload: Workload, case: Case, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """The exact outputs: by eqfuse's own interpreter at the small case, by torch in float64 at others.

    (The interpreter keeps every temporary whole; the tests hold the two against each other.)
    Casts to narrow dtypes are left out, so that the rounding of both programs counts as their error.
    """
    if case.name != "small":
        return workload.run_exact(case, inputs)
    return as_tuple(eq.reference(workload.exact_source, scalars=case.constants)(**inputs, **case.scalars))


def _chosen(workload: Workload, case: Case, inputs: Mapping[str, torch.Tensor], device: str) -> str:
    kernel = eq.compile(workload.text(case), scalars=case.constants, target=_target(device))
    kernel(**workload.arguments(case, inputs))
    return str(kernel.plan.schedule)


def _streamed(
    workload: Workload, case: Case, inputs: Mapping[str, torch.Tensor], reference: Tensors
) -> dict[str, Any]:
    """The error of the program run as a stream: two pages, merged with two that were seen apart; or why it is none."""
    kernel = eq.compile(workload.text(case), scalars=case.constants)
    try:
        axis = kernel.stream.stream.axis
    except EqfuseError as error:
        return {"not_streamed": one_line(error)}
    tensors = {tensor.name: tensor.axes for tensor in kernel.derived.program.tensors}
    bounds = [case.sizes[axis] * quarter // 4 for quarter in range(5)]

    def seen(first: int, last: int) -> StreamState:
        state = kernel.init(start=bounds[first], total=bounds[-1])
        for start, stop in zip(bounds[first:last], bounds[first + 1 : last + 1], strict=True):
            page = {
                name: x.narrow(tensors[name].index(axis), start, stop - start) if axis in tensors[name] else x
                for name, x in inputs.items()
            }
            state = kernel.update(state, **workload.arguments(case, page))
        return state

    both = kernel.combine(seen(0, 2), seen(2, 4))
    found = as_tuple(kernel.finish(both, **workload.arguments(case, inputs)))
    return {"streamed": worst_error(found, reference)}


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

    def judge(what: str, error: float, most: float = bound) -> float:
        if not error <= most:
            problems.append(f"{what} {error:.2e} is above {most:.2e}")
        return error

    if schedule in workload.refused:
        found["refused"] = _refusal(workload, case, schedule, device)
        if found["refused"] is None:
            problems.append("it has this schedule, which the table of programs says it has not")
        return found
    with recorded(problems.append):
        kernel = eq.compile(
            workload.text(case), scalars=case.constants, target=_target(device), prefer=schedule
        )
        found["error"] = judge(
            "error", worst_error(as_tuple(kernel(**workload.arguments(case, inputs))), reference)
        )
        found["certificate"], found["grade"] = bool(kernel.certificate.ok), kernel.certificate.grade
        if not found["certificate"]:
            problems.append("the certificate is not ok")
        if case.name == "small":
            ahead = compile_ahead(workload, case, TRITON_TARGET, schedule)
            arguments = workload.arguments(case, {name: x.cpu() for name, x in inputs.items()})
            interpreted = interpret(ahead.source, ahead.name, **arguments, sizes=ahead.sizes)
            found["triton"] = judge("Triton's error", worst_error(as_tuple(interpreted), reference))
            tiles = interpreted_tiles(ahead, inputs, case.scalars)
            apart = worst_error(as_tuple(interpreted), tiles)
            of_two = math.sqrt(2) * bound
            found["triton_from_tiles"] = judge("Triton's difference from the tile program", apart, of_two)
    return found


def _refusal(workload: Workload, case: Case, schedule: Schedule, device: str) -> str | None:
    """Why there is no kernel of a schedule; None where there is one."""
    try:
        eq.compile(
            workload.text(case),
            scalars=case.constants,
            target=_target(device),
            prefer=schedule,
            verify=False,
        )
    except ScheduleError as error:
        return str(error)
    return None


def interpreted_tiles(
    ahead: Ahead, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Number]
) -> Tensors:
    """The outputs of the tile program whose Triton source this is, run literally in float32 (float64 where an input
    is)."""
    program = ahead.derived.program
    wide = "f64" in ahead.compiled.dtypes.values()
    real = torch.float64 if wide else torch.float32
    arrays = {
        name: (tensor.to(real) if tensor.is_floating_point() else tensor).cpu().numpy()
        for name, tensor in inputs.items()
    }
    found = tile_interpreter.run(
        ahead.compiled.tile,
        program,
        arrays,
        scalars,
        ahead.compiled.extents,
        FloatDomain("float64" if wide else "float32"),
        shards={axis: ahead.sizes[axis] for axis, _ in ahead.compiled.chosen.nest.shards},
    )
    return tuple(torch.as_tensor(found[output.name]) for output in program.outputs)


def _target(device: str) -> str:
    return "cpu" if device == "cpu" else "auto"
