"""`python -m bench cpu`: fused against unfused torch, torch.compile and a copy of the bytes; times and peak memory.

Times are medians of interleaved runs on fresh inputs, all contestants of a program in one process of its
own; errors are against the unfused program in float64, from the same run. torch.compile's first call,
which compiles, is not timed, and is given up after `COMPILE_SECONDS`. Memory is the growth of a fresh
process's resident set at its peak during one call, outputs included, after a warm-up on the small case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo.utils import counters

import eqfuse as eq
from bench.measure import in_fresh_process, peak_growth, rounding, time_limit
from bench.report import Column, Options, Report, each, geometric_mean, recorded
from bench.workloads import WORKLOADS, Case, Workload, select
from eqfuse.measure import as_tuple, interleaved, worst_error

Contestant = Callable[[Mapping[str, torch.Tensor]], Any]

AIM, FLOOR = 1.5, 0.8
"""Speed over eager: the geometric mean to reach, and what no program should fall under."""

COMPILE_SECONDS = 180
"""How long torch.compile may take for one program."""

MEMORY_ALLOWANCE = 64e6
"""Bytes that a call may take beyond its outputs at the `long` case, where scores alone are 1 GB."""

TITLE = "Median times of interleaved runs, and peak memory"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("case", lambda row: str(row["case"])),
    Column("schedule", lambda row: str(row["schedule"])),
    Column("eager ms", lambda row: _ms(row, "eager")),
    Column("torch.compile ms", lambda row: _ms(row, "torch.compile")),
    Column("fused ms", lambda row: _ms(row, "fused")),
    Column(
        "copies",
        lambda row: (
            f"{row['median_ms']['fused'] / row['median_ms']['copy']:.1f}"
            if "copy" in row.get("median_ms", {})
            else "-"
        ),
    ),
    Column("compile s", lambda row: _seconds(row, "fused")),
    Column("torch.compile's", lambda row: _seconds(row, "torch.compile")),
    Column("over eager", lambda row: f"{row['over_eager']:.2f}x" if "over_eager" in row else "-"),
    Column("over compile", lambda row: _over_compile(row)),
    Column("error", lambda row: f"{row['errors']['fused']:.1e}" if "errors" in row else "-"),
    Column("eager's", lambda row: f"{row['errors']['eager']:.1e}" if "errors" in row else "-"),
    Column("eager MB", lambda row: _mb(row, "eager")),
    Column("fused MB", lambda row: _mb(row, "fused")),
)


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, an error above twice the unfused one, memory at `long`."""
    for workload in each(select(options.only)):
        case = workload.cases["small" if options.small else "cpu"]
        with recorded(report.failing(workload.name)):
            row = in_fresh_process(timed, workload.name, case.name, options)
            if options.memory:
                row["memory"] = _memory(workload, case)
            report.add(row)
            if options.memory and not options.small and "long" in workload.cases:
                _check_long(report, workload)
    for row in report.rows:
        errors = row["errors"]
        if not errors["fused"] <= errors["bound"]:
            report.failures.append(
                f"{row['program']}: error {errors['fused']:.2e}, {errors['eager']:.2e} unfused"
            )
    summarise(report)


def _contestants(
    workload: Workload, case: Case, options: Options, seconds: dict[str, float]
) -> tuple[dict[str, Contestant], Any, str]:
    """What runs, the kernel, and why torch.compile does not run where it does not. `seconds` gets what compiling and
    the first call took; libraries that are kept on disk count as compiled."""
    started = time.perf_counter()
    kernel = eq.compile(workload.text(case), scalars=case.constants, native="wait")
    kernel(**workload.arguments(case, workload.inputs(case, device=options.device)))
    seconds["fused"] = time.perf_counter() - started
    contestants: dict[str, Contestant] = {
        "eager": lambda inputs: workload.run_eager(case, inputs),
        "fused": lambda inputs: kernel(**workload.arguments(case, inputs)),
    }
    if not options.torch_compile:
        return contestants, kernel, "not asked for"
    compiled = torch.compile(workload.eager, dynamic=False)
    problems: list[str] = []
    # No C++ compiler, an operation that inductor lacks, or too long for a benchmark.
    with recorded(problems.append), time_limit(COMPILE_SECONDS):
        started = time.perf_counter()
        compiled(**workload.inputs(case, device=options.device), **case.scalars, **case.constants)
        seconds["torch.compile"] = time.perf_counter() - started
        contestants["torch.compile"] = lambda inputs: compiled(**inputs, **case.scalars, **case.constants)
    return contestants, kernel, "".join(problems)


def timed(name: str, case_name: str, options: Options) -> dict[str, Any]:
    """The row of one program but for its memory."""
    workload = WORKLOADS[name]
    case = workload.cases[case_name]
    seconds: dict[str, float] = {}
    contestants, kernel, skipped = _contestants(workload, case, options, seconds)
    first = workload.inputs(case, seed=1, device=options.device)
    exact = workload.run_exact(case, first)
    results = {name: as_tuple(call(first)) for name, call in contestants.items()}
    errors = {name: worst_error(result, exact) for name, result in results.items()}
    errors["bound"] = max(2 * errors["eager"], rounding(results["eager"]))
    size = sum(t.numel() * t.element_size() for t in (*first.values(), *results["fused"]))
    contestants["copy"] = _copy(size // 2)
    del exact, first, results
    times = interleaved(
        contestants,
        lambda index: workload.inputs(case, seed=index, device=options.device),
        device=options.device,
    )
    medians = {name: times.median(name) for name in contestants}
    row: dict[str, Any] = {
        "program": workload.name,
        "case": case.name,
        "schedule": str(kernel.plan.schedule),
        "median_ms": {name: 1e3 * value for name, value in medians.items()},
        "rounds": len(times.seconds["fused"]),
        "errors": errors,
        "torch_compile_skipped": skipped,
        "code": kernel.plan.code,
        "seconds": seconds,
        "bytes": size,
        "over_eager": medians["eager"] / medians["fused"],
    }
    if "torch.compile" in medians:
        row["over_compile"] = medians["torch.compile"] / medians["fused"]
        row["compile_calls_attention"] = attention_calls() > 0
    return row


def _copy(size: int) -> Contestant:
    """A copy of so many bytes from memory to memory that is there already: as many are read as written."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return lambda _: target.copy_(source)


def attention_calls() -> int:
    """How many attentions torch.compile has found in this process's programs, by patterns of its own, and
    replaced by calls of torch's hand-written one."""
    return int(counters["inductor"]["fuse_attention"])


def _memory(workload: Workload, case: Case) -> dict[str, int]:
    return {who: in_fresh_process(call_memory, workload.name, case.name, who) for who in ("eager", "fused")}


def call_memory(name: str, case_name: str, who: str) -> int:
    """Bytes by which one call of `who` (eager or fused) on the case makes this process grow at its peak."""
    workload = WORKLOADS[name]
    case, small = workload.cases[case_name], workload.cases["small"]
    inputs = workload.inputs(case)
    if who == "eager":
        workload.run_eager(small, workload.inputs(small))
        return peak_growth(lambda: workload.run_eager(case, inputs))[1]
    warm = eq.compile(workload.text(small), scalars=small.constants, target="cpu", native="wait")
    warm(**workload.arguments(small, workload.inputs(small)))
    kernel = eq.compile(workload.text(case), scalars=case.constants, target="cpu", native="wait")
    return peak_growth(lambda: kernel(**workload.arguments(case, inputs)))[1]


def _check_long(report: Report, workload: Workload) -> None:
    """The case with 1 GB of scores: a fused call must grow by its outputs and 64 MB at most."""
    case = workload.cases["long"]
    grown = _memory(workload, case)
    outputs = math.prod(case.sizes[axis] for axis in ("b", "h", "i", "e")) * 4
    report.summary.append(
        f"{workload.name}, 4 heads at length 8192: {grown['fused'] / 1e6:.0f} MB fused "
        f"(outputs {outputs / 1e6:.0f} MB), {grown['eager'] / 1e6:.0f} MB unfused"
    )
    if grown["fused"] > outputs + MEMORY_ALLOWANCE:
        report.failures.append(f"{workload.name} long: {grown['fused'] / 1e6:.0f} MB, above outputs + 64 MB")


def summarise(report: Report) -> None:
    """Means of the ratios, the programs that fall under the floor, and what torch.compile did not run."""
    ratios = {row["program"]: row["over_eager"] for row in report.rows}
    if not ratios:
        return
    report.summary.insert(
        0,
        f"geometric mean over eager {geometric_mean(ratios.values()):.2f}x (aim {AIM}x), {len(ratios)} programs",
    )
    over_compile = {row["program"]: row["over_compile"] for row in report.rows if "over_compile" in row}
    if over_compile:
        mean = geometric_mean(over_compile.values())
        text = f"geometric mean over torch.compile {mean:.2f}x, {len(over_compile)} programs"
        report.summary.insert(1, text)
        report.summary.append(_slow("torch.compile", over_compile))
        for called in (True, False):
            some = [
                row["over_compile"] for row in report.rows if row.get("compile_calls_attention") is called
            ]
            if some:
                what = "calls torch's own attention (*)" if called else "generates the code"
                text = f"where torch.compile {what}: {geometric_mean(some):.2f}x, {len(some)} programs"
                report.summary.insert(2, text)
    torch_calls = [
        f"{row['program']} ({row['code']})" for row in report.rows if row.get("code", "C++") != "C++"
    ]
    report.summary.append(f"not C++: {', '.join(torch_calls) or 'none'}")
    skipped: dict[str, list[str]] = {}
    for row in report.rows:
        if row["torch_compile_skipped"]:
            skipped.setdefault(row["torch_compile_skipped"], []).append(row["program"])
    report.summary += [
        f"torch.compile did not run: {reason} ({', '.join(names)})"
        for reason, names in sorted(skipped.items())
    ]
    report.summary.append(_slow("eager", ratios))


def _slow(other: str, ratios: Mapping[str, float]) -> str:
    under = [f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if ratio < FLOOR]
    return f"under {FLOOR}x of {other}: {', '.join(under) or 'none'}"


def _over_compile(row: Mapping[str, Any]) -> str:
    mark = "*" if row.get("compile_calls_attention") else ""
    return f"{row['over_compile']:.2f}x{mark}" if "over_compile" in row else "-"


def _ms(row: Mapping[str, Any], name: str) -> str:
    return f"{row['median_ms'][name]:.2f}" if name in row.get("median_ms", {}) else "-"


def _seconds(row: Mapping[str, Any], name: str) -> str:
    return f"{row['seconds'][name]:.2f}" if name in row.get("seconds", {}) else "-"


def _mb(row: Mapping[str, Any], name: str) -> str:
    return f"{row['memory'][name] / 1e6:.0f}" if "memory" in row else "-"
