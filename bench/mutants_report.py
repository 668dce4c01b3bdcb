"""`eqfuse bench mutants`: what catches each wrong transformation, and that no right program is refused.

Every mutant is made in every program of `mutants.SOURCES` and in every schedule where it can be made, at
the first and the last place (with `--small`: the first). The workloads, unmutated, pass the same checks.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from bench.mutants import MUTANTS, SOURCES, TRIALS, Subject, judge, places, rejected, subjects
from bench.mutation import Mutant, Same
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import select
from eqfuse.errors import EqfuseError
from eqfuse.terms.functions import CASTS

TITLE = f"Wrong transformations and what rejects them, in rounds of {TRIALS} trials"
COLUMNS = (
    Column("mutant", lambda row: str(row["mutant"])),
    Column("made in", lambda row: str(row["level"])),
    Column("programs", lambda row: str(row["programs"])),
    Column("made", lambda row: str(row["made"])),
    Column("caught by", lambda row: ", ".join(f"{by} {n}" for by, n in row["caught"].items())),
    Column("latest first trial", lambda row: str(row["latest"] or "-")),
    Column("seen in least trials", lambda row: str(row["least"] or "-")),
    Column("no mistake", lambda row: str(sum(row["same"].values()) or "")),
    Column("survived", lambda row: f"[red]{row['survived']}[/]" if row["survived"] else "0"),
)


def run(options: Options, report: Report) -> None:
    """Failures: a mutant that survives or is made nowhere, and a program that is rejected unmutated."""
    most = 1 if options.small else 2
    found: dict[Mutant, list[dict[str, Any]]] = {mutant: [] for mutant in MUTANTS}
    for name in SOURCES:
        started = time.perf_counter()
        with recorded(report.failing(name)):
            for mutant, place in _trials(name, most):
                found[mutant].append(place)
        print(f"{name} {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    for mutant, rows in found.items():
        report.add(_row(mutant, rows))
        report.failures += [
            f"{mutant.name} survives in {row['program']}, {row['schedule']}"
            for row in rows
            if row["survived"]
        ]
        if all(row["same"] for row in rows):
            report.failures.append(f"{mutant.name} is made in no program")
    made = sum(row["made"] for row in report.rows)
    survived = sum(row["survived"] for row in report.rows)
    report.summary.append(f"{len(MUTANTS)} mutants, made {made} times: {survived} survive")
    report.summary += [
        f"no mistake {number} times: {why}"
        for why, number in _sum(row["same"] for row in report.rows).items()
    ]
    _workloads(options, report)


def _trials(name: str, most: int) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """One row per place where a mutant was made in the program of this name."""
    casts = any(f"{cast}(" in SOURCES[name] for cast in CASTS)
    for strict in (False, True) if casts else (False,):
        for number, subject in enumerate(subjects(name, SOURCES[name], strict=strict)):
            if why := rejected(subject):
                raise EqfuseError(f"{name}, {subject.schedule}: rejected unmutated: {why}")
            for mutant in MUTANTS:
                # Outputs are the same in all schedules.
                if mutant.strict is strict and (mutant.level != "term" or number == 0):
                    for mutated in places(mutant, subject, most):
                        yield mutant, _place(subject, judge(mutant.level, mutated, subject))


def _place(subject: Subject, verdict: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"program": subject.name, "schedule": subject.schedule, "same": ""}
    if isinstance(verdict, Same):
        return row | {"same": verdict.why, "survived": False}
    return row | {
        "survived": not verdict.caught,
        "caught": verdict.caught,
        "first_trial": verdict.first,
        "seen_in": verdict.seen,
        "shown": verdict.shown,
    }


def _row(mutant: Mutant, rows: list[dict[str, Any]]) -> dict[str, Any]:
    made = [row for row in rows if not row["same"]]
    by_values = [row for row in made if row["first_trial"]]
    return {
        "mutant": mutant.name,
        "level": mutant.level,
        "what": mutant.what,
        "programs": len({row["program"] for row in made}),
        "made": len(made),
        "caught": dict(Counter(row["caught"] for row in made if row["caught"]).most_common()),
        "latest": max((row["first_trial"] for row in by_values), default=0),
        "least": min((row["seen_in"] for row in by_values), default=0),
        "same": dict(Counter(row["same"] for row in rows if row["same"])),
        "survived": sum(row["survived"] for row in made),
        "not_applicable": sorted(set(SOURCES) - {row["program"] for row in rows}),
        "places": rows,
    }


def _sum(counts: Iterator[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def _workloads(options: Options, report: Report) -> None:
    """The same checks on every workload as it is, in every schedule."""
    passed = total = 0
    for workload in each(select(options.only)):
        case = workload.cases["small"]
        with recorded(report.failing(workload.name)):
            for subject in subjects(workload.name, workload.text(case), case.constants):
                why = rejected(subject)
                total += 1
                passed += not why
                if why:
                    report.failures.append(f"{workload.name}, {subject.schedule}: rejected unmutated: {why}")
    report.summary.append(f"unmutated: {passed} of {total} (workload, schedule) accepted")
