"""`eqfuse bench lengths`: many lengths, one kernel: regions, binaries, what a new length costs, and regret.

Each program is called at 64 lengths: 32 of them next to each other, the others odd ones up to the largest. What the first
call of a new length takes is measured without the call itself: the time of the second one is subtracted. Those over `SLOW_MS`
are told apart: some start a plan, some a binary of one that there was, others neither. Regret is the time
of a call beside that of a kernel which is compiled for that very length alone, at `SAMPLES` of the lengths, medians.
On a CPU lengths are `CPU_SCALE` times shorter, rows fewer, and C++ is compiled at the first call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, recorded
from bench.timing import milliseconds, repeated, seconds_of

LARGEST = 65536
CPU_SCALE = 16
SAMPLES = 8
REPEATS = 7
SLOW_MS = 5
QUEUED = 200
"""Calls in a row: fewer than a GPU's queue holds."""

AIMS = {
    "binaries": 6,
    "new_median_ms": 0.2,
    "slow": 0,
    "slow_binaries": 0,
    "known_us": 10,
    "regret_median": 1.05,
    "regret_worst": 1.15,
}
"""What is aimed at on a GPU. Binaries, for all lengths; a known call, of one kernel; lengths over `SLOW_MS` that start no plan."""

ATTENTION = """
    S[h,i,j] = sum[d](Q[h,i,d] * K[h//g,j,d]) * scale
    P[h,i,j] = exp(S[h,i,j] - max[j](S[h,i,j]))
    O[h,i,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * V[h//g,j,e])
    """
SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
QUANTISE = """
    n[i,j] = x[i,j] * rsqrt(mean[j](sq(x[i,j])) + 1e-6) * w[j]
    s[i] = max[j](abs(n[i,j])) / 448
    q[i,j] = f8e4m3(n[i,j] / s[i])
    """

Inputs = Callable[[int, str], Mapping[str, Any]]


def _attention(queries: int | None) -> Inputs:
    def inputs(length: int, device: str) -> Mapping[str, Any]:
        on_gpu = device == "cuda"
        heads, width, dtype = (32, 128, torch.float16) if on_gpu else (8, 32, torch.float32)
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        q = torch.randn(heads, queries or length, width, **kind)
        k, v = (torch.randn(heads // 8, length, width, **kind) for _ in range(2))
        return {"Q": q, "K": k, "V": v, "scale": width**-0.5}

    return inputs


def _rows(length: int, device: str) -> Mapping[str, Any]:
    return {"x": torch.randn(1024 if device == "cuda" else 16, length, device=device)}


def _weighted(length: int, device: str) -> Mapping[str, Any]:
    return {**_rows(length, device), "w": torch.randn(length, device=device)}


PROGRAMS: Mapping[str, tuple[str, dict[str, float], Inputs, int]] = {
    "decode": (ATTENTION, {"g": 8}, _attention(1), 1),
    "prefill": (ATTENTION, {"g": 8}, _attention(None), 8),
    "softmax": (SOFTMAX, {}, _rows, 1),
    "RMSNorm + quantise": (QUANTISE, {}, _weighted, 1),
}
"""Text, constants, inputs of a length, and by how much lengths are shorter."""

TITLE = "64 lengths, one kernel"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("lengths", lambda row: f"{row['lengths'][0]}..{row['lengths'][-1]}"),
    Column("regions", lambda row: str(row["regions"])),
    Column("plans", lambda row: str(row["plans"])),
    Column("binaries", lambda row: str(row["binaries"])),
    Column("first ms", lambda row: f"{row['new_ms'][0]:.0f}"),
    Column("new length ms", lambda row: f"{row['new_median_ms']:.3f}"),
    Column(f"over {SLOW_MS} ms: plan", lambda row: str(row["slow_plans"])),
    Column("binary", lambda row: str(row["slow_binaries"])),
    Column("neither", lambda row: str(row["slow"])),
    Column("known us", lambda row: f"{row['known_us']:.1f}"),
    Column("to its end us", lambda row: f"{row['whole_us']:.0f}"),
    Column("regret", lambda row: f"{row['regret_median']:.2f}" if "regrets" in row else ""),
    Column("worst", lambda row: f"{row['regret_worst']:.2f}" if "regrets" in row else ""),
)


def lengths(largest: int) -> list[int]:
    """32 neighbours, and 32 odd lengths in geometric steps up to the largest."""
    first = max(2, largest // 64)
    return [first + n for n in range(32)] + [round(2 * first * 32 ** (n / 31)) | 1 for n in range(32)]


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run."""
    scale = 1 if options.device == "cuda" else CPU_SCALE
    for name in chosen_names(options.only, tuple(PROGRAMS)):
        with recorded(report.failing(name)):
            kernel, row = called(name, LARGEST // scale, options)
            report.add(
                row
            )  # what follows compiles a kernel for each of some lengths: a run that is stopped keeps this
            row |= regrets(name, kernel, row["lengths"], options)
            report.write()
    for row in report.rows:
        if "regrets" in row:
            shown = f"{row['program']}: {row['regions']} regions, median regret {row['regret_median']:.2f}"
            missed = [f"{name} {row[name]:.3g} (aim {aim})" for name, aim in AIMS.items() if row[name] > aim]
            on_gpu = f"; missed: {', '.join(missed) or 'nothing'}" if options.device == "cuda" else ""
            report.summary.append(shown + on_gpu)


def called(name: str, largest: int, options: Options) -> tuple[eq.Kernel, dict[str, Any]]:
    """One program at all lengths: milliseconds of compiling, microseconds of a known call."""
    text, constants, inputs, shorter = PROGRAMS[name]
    wanted = lengths(largest // shorter // (8 if options.small else 1))
    kernel = eq.compile(text, scalars=constants, native="wait")
    new_ms, started, before = [], [], (0, 0)
    for length in wanted:
        given = inputs(length, options.device)
        first, second = (seconds_of(partial(kernel, **given), options.device)[1] for _ in range(2))
        new_ms.append(1e3 * max(0.0, first - second))
        now = len({id(region.compiled) for region in kernel.regions}), kernel.compilations
        started.append("plan" if now[0] > before[0] else "binary" if now[1] > before[1] else "")
        before = now
    slow = [what for what, ms in zip(started[1:], new_ms[1:], strict=True) if ms > SLOW_MS]
    regions, binaries = kernel.regions, kernel.compilations
    given = inputs(wanted[0], options.device)
    whole = min(seconds_of(partial(kernel, **given), options.device)[1] for _ in range(20))
    return kernel, {
        "program": name,
        "lengths": wanted,
        "regions": len(regions),
        "plans": before[0],
        "binaries": binaries,
        "new_ms": new_ms,
        "new_median_ms": statistics.median(new_ms[1:]),
        "started": started,
        "slow": slow.count(""),
        "slow_binaries": slow.count("binary"),
        "slow_plans": slow.count("plan"),
        "known_us": 1e6 * _queued(kernel, given, options.device),
        "whole_us": 1e6 * whole,
        "sizes": [str(region) for region in regions],
    }


def regrets(name: str, kernel: eq.Kernel, wanted: Sequence[int], options: Options) -> dict[str, Any]:
    """Times of the kernel beside those of one that is compiled for the very length, as ratios."""
    text, constants, inputs, _ = PROGRAMS[name]
    found = []
    for length in wanted[:: len(wanted) // SAMPLES]:
        given = inputs(length, options.device)
        alone = eq.compile(text, scalars=constants, native="wait")
        found.append(_ratio(kernel, alone, given, options.device))
    return {"regrets": found, "regret_median": statistics.median(found), "regret_worst": max(found)}


def _queued(kernel: eq.Kernel, given: Mapping[str, Any], device: str) -> float:
    """What one of many calls in a row takes of the processor, which a GPU does not wait for: the least of several rounds."""
    found = []
    for _ in range(REPEATS):
        found.append(seconds_of(repeated(partial(kernel, **given), QUEUED), device)[0] / QUEUED)
    return min(found)


def _ratio(kernel: eq.Kernel, alone: eq.Kernel, given: Mapping[str, Any], device: str) -> float:
    """The time of a call of `kernel` over one of `alone`, taken in turns; on a GPU that of the GPU alone."""
    calls = [partial(each, **given) for each in (kernel, alone)]
    if device == "cuda":
        rounds = [[milliseconds(call) for call in calls] for _ in range(2)]
        return min(a for a, _ in rounds) / min(b for _, b in rounds)
    for call in calls:
        call()
    pairs = [[seconds_of(call, device)[1] for call in calls] for _ in range(REPEATS)]
    return min(a for a, _ in pairs) / min(b for _, b in pairs)
