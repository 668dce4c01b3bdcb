"""`python -m bench cpu`: fused against torch, torch.compile and a copy of the bytes; times, peak memory, compile seconds.

Every program of `workloads`, and those of `operators`, which torch has an operator of its own for: there `eager` is that
operator. All contestants of a program run in one process of its own, with one number of threads after the other; errors are
against the unfused program in float64, from the same run.

- Times are medians of interleaved runs: *cold* on inputs that others have just been run on, *warm* on those that the same
  contestant has just read.
- Seconds are those of compiling and the first call: with no cache on disk, and in a new process that finds what the first one
  kept. What there is once for a machine is spared: torch.compile's tests of vector instructions, and the library of matrix
  products that all kernels call. torch.compile is given up after `COMPILE_SECONDS`.
- Memory is the growth of a process's resident set at its peak during one call, outputs included, after a call before it whose
  outputs are still held.
- Copies are the time over that of copying as many bytes as the program reads and writes.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.utils import counters

import eqfuse as eq
from bench.measure import in_fresh_process, own_caches, peak_growth, rounding, time_limit
from bench.operators import INEXPRESSIBLE, OPERATORS
from bench.report import Column, Options, Report, each, geometric_mean, recorded
from bench.workloads import WORKLOADS, Case, Workload, select
from eqfuse.extract.machine import compiler, past_caches
from eqfuse.measure import as_tuple, interleaved, worst_error
from eqfuse.tile.native.products import library

Contestant = Callable[[Mapping[str, torch.Tensor]], Any]

PROGRAMS: Mapping[str, Workload] = {**WORKLOADS, **OPERATORS}

ROWS = (
    *("softmax", "log_softmax", "logsumexp", "softmax_entropy", "cross_entropy", "layernorm", "l2norm"),
    *(
        "rmsnorm_quant",
        "variance",
        "weighted_variance",
        "covariance",
        "cosine_similarity",
        "inertia",
        "sum_sum",
    ),
    *("moe_routing", "moe_routing_logits", "batchnorm"),
)
"""Row programs: norms, softmax, losses, moments, top-k, quantisation."""

AIMS: Mapping[str, Mapping[str, float]] = {
    "all programs": {"torch.compile": 1.5, "eager": 4.0},
    "row programs": {"torch.compile": 2.5},
}
"""Speed over another contestant, as a geometric mean."""

COPIES = 1.5
"""Copies of their bytes that row programs should take at the most, where those are more than the caches hold."""

FLOOR = 1.0
"""Speed over either contestant that no program should fall under."""

COMPILE_SECONDS = 120
"""How long torch.compile may take for one program."""

BUDGET_SECONDS = 2.0
"""What the runs of a program with one number of threads may take, but for the first three rounds."""

MEMORY_ALLOWANCE = 64e6
"""Bytes that a call may take beyond its outputs at the `long` case, where scores alone are 1 GB."""

TITLE = "Medians in milliseconds, cold / warm; compile seconds without and with a cache; peak memory in MB"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("threads", lambda row: str(row["threads"])),
    Column("schedule", lambda row: str(row["schedule"])),
    Column("eager", lambda row: _ms(row, "eager")),
    Column("torch.compile", lambda row: _ms(row, "torch.compile")),
    Column("fused", lambda row: _ms(row, "fused")),
    Column("copies", lambda row: f"{copies(row):.1f}"),
    Column("over eager", lambda row: _over(row, "eager")),
    Column("over compile", lambda row: _over(row, "torch.compile")),
    Column("compile s", lambda row: _seconds(row, "fused")),
    Column("torch.compile's", lambda row: _seconds(row, "torch.compile")),
    Column("eager MB", lambda row: _mb(row, "eager")),
    Column("torch.compile's", lambda row: _mb(row, "torch.compile")),
    Column("fused MB", lambda row: _mb(row, "fused")),
    Column("error", lambda row: f"{row['errors']['fused']:.0e}"),
    Column("eager's", lambda row: f"{row['errors']['eager']:.0e}"),
)


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, an error above twice the unfused one, memory at `long`."""
    threads = options.threads or tuple(dict.fromkeys((torch.get_num_threads(), 1)))
    if options.resume and report.path is not None and report.path.exists():
        report.rows += json.loads(report.path.read_text(encoding="utf-8"))["rows"]
    done = {(row["program"], row["case"], row["threads"]) for row in report.rows}
    with tempfile.TemporaryDirectory() as machine:
        with recorded(report.failures.append):
            in_fresh_process(probe, machine, options.torch_compile)
        for workload in each(select(options.only, PROGRAMS)):
            case = workload.cases["small" if options.small else "cpu"]
            left = [n for n in threads if (workload.name, case.name, n) not in done]
            if not left:
                continue
            with recorded(report.failing(workload.name)), tempfile.TemporaryDirectory() as folder:
                shutil.copytree(machine, folder, dirs_exist_ok=True)
                rows = in_fresh_process(timed, workload, case, options, left, folder)
                if options.memory:
                    rows[0].update(_memory(workload, case, options, folder))
                report.add(*rows)
                if options.memory and not options.small and "long" in workload.cases:
                    _check_long(report, workload, folder)
    report.failures += failing(report.rows)
    summarise(report)


def failing(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Programs with an error above twice the unfused one."""
    return [
        f"{row['program']}: error {errors['fused']:.2e}, {errors['eager']:.2e} unfused"
        for row in rows
        if not (errors := row["errors"])["fused"] <= errors["bound"]
    ]


def probe(folder: str, torch_compile: bool) -> None:
    """Leaves in a folder what compilers find out and make once for a machine."""
    own_caches(folder)
    if compiler() is not None:
        library()
    if torch_compile:
        torch.compile(torch.nn.functional.softsign, dynamic=False)(torch.ones(64, 64))


def _compiled(
    workload: Workload, case: Case, inputs: Mapping[str, torch.Tensor], problems: list[str], limit: int
) -> tuple[Contestant | None, float]:
    """torch.compile's form of the unfused program, and the seconds of compiling it and of the first call."""
    compiled = torch.compile(workload.eager, dynamic=False)
    seconds = math.nan
    started = time.perf_counter()
    # No C++ compiler, an operation that inductor lacks, or too long for a benchmark.
    with recorded(problems.append), time_limit(limit):
        compiled(**inputs, **case.scalars, **case.constants)
        seconds = time.perf_counter() - started
    if math.isnan(seconds):
        return None, seconds
    return lambda given: compiled(**given, **case.scalars, **case.constants), seconds


def _calls(workload: Workload, case: Case, kernel: eq.Kernel) -> Contestant:
    return lambda given: kernel(**workload.arguments(case, given))


def _fused(workload: Workload, case: Case, inputs: Mapping[str, torch.Tensor]) -> tuple[eq.Kernel, float]:
    """The kernel, and the seconds of compiling it and of the first call."""
    started = time.perf_counter()
    kernel = eq.compile(workload.text(case), scalars=case.constants, target="cpu", native="wait")
    kernel(**workload.arguments(case, inputs))
    return kernel, time.perf_counter() - started


def timed(
    workload: Workload, case: Case, options: Options, threads: Sequence[int], folder: str
) -> list[dict[str, Any]]:
    """The rows of one program but for its memory, one for each number of threads."""
    own_caches(folder)
    inductor = import_config()
    inputs = [workload.inputs(case, seed=seed) for seed in range(3)]
    exact = workload.run_exact(case, inputs[1])
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        seconds: dict[str, float] = {}
        kernel, seconds["fused"] = _fused(workload, case, inputs[0])
        contestants: dict[str, Contestant] = {
            "eager": lambda given: workload.run_eager(case, given),
            "fused": _calls(workload, case, kernel),
        }
        problems: list[str] = [] if options.torch_compile else ["not asked for"]
        if options.torch_compile:
            # Its code has the number of threads in it, and its cache on disk may not tell them apart.
            torch._dynamo.reset()
            inductor.fx_graph_cache = count == threads[0]
            compiled, seconds["torch.compile"] = _compiled(
                workload, case, inputs[0], problems, COMPILE_SECONDS
            )
            if compiled is not None:
                contestants["torch.compile"] = compiled
        results = {who: as_tuple(call(inputs[1])) for who, call in contestants.items()}
        errors = {who: worst_error(result, exact) for who, result in results.items()}
        errors["bound"] = max(2 * errors["eager"], rounding(results["eager"]))
        size = sum(t.numel() * t.element_size() for t in (*inputs[1].values(), *results["fused"]))
        contestants["copy"] = _copy(size // 2)
        del results
        times = interleaved(
            contestants, lambda index: inputs[index % 3], budget_seconds=BUDGET_SECONDS, again=2
        )
        rows.append(
            {
                "program": workload.name,
                "case": case.name,
                "threads": count,
                "schedule": str(kernel.plan.schedule),
                "median_ms": {who: 1e3 * times.median(who) for who in contestants},
                "warm_ms": {who: 1e3 * times.warm_median(who) for who in contestants},
                "rounds": len(times.seconds["fused"]),
                "errors": errors,
                "torch_compile_skipped": "".join(problems),
                "code": kernel.plan.code,
                # With another number of threads the process has compiled before.
                "seconds": seconds if count == threads[0] else {},
                "bytes": size,
                "compile_calls_attention": attention_calls() > 0,
            }
        )
    return rows


def import_config() -> Any:
    """Inductor's settings."""
    from torch._inductor import config

    return config


def _copy(size: int) -> Contestant:
    """A copy of so many bytes from memory to memory that is there already: as many are read as written."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return lambda _: target.copy_(source)


def attention_calls() -> int:
    """How many attentions torch.compile has found in this process's programs, by patterns of its own, and
    replaced by calls of torch's hand-written one."""
    return int(counters["inductor"]["fuse_attention"])


def _memory(workload: Workload, case: Case, options: Options, folder: str) -> dict[str, Any]:
    """Bytes and seconds of new processes, by contestant."""
    who = ("eager", "fused", *(["torch.compile"] if options.torch_compile else []))
    found = {name: in_fresh_process(again, workload.name, case.name, name, folder) for name in who}
    return {
        "memory": {name: size for name, (size, _) in found.items()},
        "seconds_again": {name: seconds for name, (_, seconds) in found.items()},
    }


def again(name: str, case_name: str, who: str, folder: str) -> tuple[int, float]:
    """Bytes by which one call of a contestant makes this process grow at its peak; and, of a contestant that compiles, the
    seconds of compiling and the first call, with what is kept in `folder`."""
    own_caches(folder)
    workload = PROGRAMS[name]
    case = workload.cases[case_name]
    inputs = workload.inputs(case)
    call: Contestant | None
    if who == "eager":
        call, seconds = (lambda given: workload.run_eager(case, given)), math.nan
    elif who == "fused":
        kernel, seconds = _fused(workload, case, inputs)
        call = _calls(workload, case, kernel)
    else:
        call, seconds = _compiled(workload, case, inputs, [], COMPILE_SECONDS)
    if call is None:
        return 0, math.nan
    held = call(inputs)
    grown = peak_growth(lambda: call(inputs))[1]
    del held
    return grown, seconds


def _check_long(report: Report, workload: Workload, folder: str) -> None:
    """The case with 1 GB of scores: a fused call must grow by its outputs and 64 MB at most."""
    case = workload.cases["long"]
    grown = in_fresh_process(again, workload.name, case.name, "fused", folder)[0]
    outputs = math.prod(case.sizes[axis] for axis in ("b", "h", "i", "e")) * 4
    report.summary.append(
        f"{workload.name}, 4 heads at length 8192: {grown / 1e6:.0f} MB fused (outputs {outputs / 1e6:.0f} MB)"
    )
    if grown > outputs + MEMORY_ALLOWANCE:
        report.failures.append(f"{workload.name} long: {grown / 1e6:.0f} MB, above outputs + 64 MB")


def ratio(row: Mapping[str, Any], other: str, kind: str = "median_ms") -> float | None:
    """How many times as long another contestant takes; None where it did not run."""
    times = row[kind]
    return float(times[other] / times["fused"]) if other in times else None


def copies(row: Mapping[str, Any]) -> float:
    return float(row["median_ms"]["fused"] / row["median_ms"]["copy"])


def summarise(report: Report) -> None:
    """Means of the ratios for each number of threads beside the aims, the programs that miss them, and what
    torch.compile did not run."""
    for count in dict.fromkeys(row["threads"] for row in report.rows):
        report.summary += _of_threads(count, [row for row in report.rows if row["threads"] == count])
    for who in ("fused", "torch.compile"):
        kinds = ([row[kind][who] for row in report.rows if who in row.get(kind, {})] for kind in _SECONDS)
        first, later = (statistics.median(seconds) if seconds else math.nan for seconds in kinds)
        if not math.isnan(first):
            report.summary.append(
                f"median seconds of compiling and the first call, {who}: {_pair((first, later), 2)}"
            )
    others = [f"{row['program']} ({row['code']})" for row in report.rows if row["code"] != "C++"]
    report.summary.append(f"not C++: {', '.join(dict.fromkeys(others)) or 'none'}")
    skipped: dict[str, list[str]] = {}
    for row in report.rows:
        if row["torch_compile_skipped"]:
            skipped.setdefault(row["torch_compile_skipped"], []).append(row["program"])
    report.summary += [
        f"torch.compile did not run: {reason} ({', '.join(dict.fromkeys(names))})"
        for reason, names in sorted(skipped.items())
    ]
    report.summary += [f"not in the table: {name}, {why}" for name, why in INEXPRESSIBLE.items()]


def _of_threads(count: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    some = {"all programs": rows, "row programs": [row for row in rows if row["program"] in ROWS]}
    found = []
    for which, aims in AIMS.items():
        for other, aim in aims.items():
            cold, warm = ([r for row in some[which] if (r := ratio(row, other, kind))] for kind in _KINDS)
            if cold:
                found.append(
                    f"{_threads(count)}, {which} over {other}: {geometric_mean(cold):.2f}x cold, "
                    f"{geometric_mean(warm):.2f}x warm (aim {aim}x), {len(cold)} programs"
                )
    for other in ("torch.compile", "eager"):
        under = {row["program"]: r for row in rows if (r := ratio(row, other)) is not None and r < FLOOR}
        found.append(f"{_threads(count)}, under {FLOOR:.1f}x of {other}: {_named(under, 'x')}")
    large = {row["program"]: copies(row) for row in some["row programs"] if row["bytes"] > past_caches()}
    slow = {name: n for name, n in large.items() if n > COPIES}
    found.append(
        f"{_threads(count)}, row programs above {COPIES} copies, of {len(large)}: {_named(slow, '')}"
    )
    for called in (True, False):
        of = [
            r
            for row in rows
            if row["compile_calls_attention"] is called and (r := ratio(row, "torch.compile"))
        ]
        if of:
            what = "calls torch's own attention (*)" if called else "generates the code"
            found.append(
                f"{_threads(count)}, where torch.compile {what}: {geometric_mean(of):.2f}x, {len(of)} programs"
            )
    return found


_KINDS = ("median_ms", "warm_ms")
_SECONDS = ("seconds", "seconds_again")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _named(numbers: Mapping[str, float], unit: str) -> str:
    return ", ".join(f"{name} {number:.2f}{unit}" for name, number in numbers.items()) or "none"


def _pair(numbers: Iterable[float | None], digits: int) -> str:
    return " / ".join("-" if n is None or math.isnan(n) else f"{n:.{digits}f}" for n in numbers)


def _over(row: Mapping[str, Any], other: str) -> str:
    mark = "*" if other == "torch.compile" and row["compile_calls_attention"] else ""
    return f"{_pair((ratio(row, other, kind) for kind in _KINDS), 2)}{mark}"


def _ms(row: Mapping[str, Any], who: str) -> str:
    return _pair((row[kind].get(who) for kind in _KINDS), 2)


def _seconds(row: Mapping[str, Any], who: str) -> str:
    if who not in row["seconds"]:
        return "-"
    return _pair((row["seconds"][who], row.get("seconds_again", {}).get(who)), 2)


def _mb(row: Mapping[str, Any], who: str) -> str:
    return f"{row['memory'][who] / 1e6:.0f}" if who in row.get("memory", {}) else "-"
