"""`eqfuse bench mutants`: what catches each wrong transformation, and that no right program is refused.

Every mutant is made in every program of `mutants.SOURCES` and in every schedule where it can be made, at
the first and the last place (`--places` has another number, `--small` the first alone). The workloads, unmutated, pass the
same checks. `--jobs` processes at once do a part of the mutants of one program each; what is found is written as it is.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from typing import Any

import torch

from bench.measure import own_cores
from bench.mutants import MUTANTS, SOURCES, TRIALS, Subject, judge, places, rejected, subjects
from bench.mutation import Same
from bench.report import Column, Options, Report, one_line
from bench.workloads import WORKLOADS, select
from eqfuse.terms.functions import CASTS

PLACES = 2
PART = 8
"""Mutants of one level that a process makes in a program at a time."""

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


@dataclass(frozen=True)
class _Task:
    """The mutants of these numbers in a program, opaque casts or not; where it is asked, as of a workload, whether the right
    forms pass."""

    name: str
    workload: bool = False
    mutants: tuple[int, ...] = ()
    strict: bool = False
    unmutated: bool = False
    most: int = PLACES


@dataclass(frozen=True)
class _Done:
    """Places by the number of the mutant; right forms that were tried, and what went wrong."""

    places: Sequence[tuple[int, dict[str, Any]]]
    right: int
    failures: Sequence[str]
    seconds: float


def run(options: Options, report: Report) -> None:
    """Failures: a mutant that survives or is made nowhere, and a program that is rejected unmutated."""
    most = options.places or (1 if options.small else PLACES)
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in range(len(MUTANTS))}
    tried = rejections = 0
    tasks = [
        *_tasks(most),
        *(_Task(workload.name, workload=True, unmutated=True) for workload in select(options.only)),
    ]
    broken: list[str] = []
    for done, task in _each(tasks, options.jobs or own_cores()):
        for number, place in done.places:
            found[number].append(place)
        if task.workload:
            tried, rejections = tried + done.right, rejections + len(done.failures)
        broken += done.failures
        report.rows = [_row(number, rows) for number, rows in found.items()]
        survivors = [
            f"{MUTANTS[number].name} survives in {row['program']}, {row['schedule']}"
            for number, rows in found.items()
            for row in rows
            if row["survived"]
        ]
        report.failures = [*broken, *survivors]
        report.summary = _said(report.rows, tried, rejections)
        report.write()
    report.failures += [
        f"{MUTANTS[number].name} is made in no program"
        for number, rows in found.items()
        if all(row["same"] for row in rows)
    ]


def _said(rows: Sequence[Mapping[str, Any]], tried: int, rejections: int) -> list[str]:
    made, survived = (sum(row[key] for row in rows) for key in ("made", "survived"))
    same = Counter[str]()
    for row in rows:
        same.update(row["same"])
    return [
        f"{len(MUTANTS)} mutants, made {made} times: {survived} survive",
        *(f"no mistake {number} times: {why}" for why, number in same.items()),
        f"unmutated: {tried - rejections} of {tried} (workload, schedule) accepted",
    ]


def _tasks(most: int) -> Iterator[_Task]:
    for name, source in SOURCES.items():
        casts = any(f"{cast}(" in source for cast in CASTS)
        for strict in (False, True) if casts else (False,):
            mine = [number for number, mutant in enumerate(MUTANTS) if mutant.strict is strict]
            first = True
            for _, group in groupby(mine, lambda number: MUTANTS[number].level):
                numbers = list(group)
                for at in range(0, len(numbers), PART):
                    yield _Task(name, False, tuple(numbers[at : at + PART]), strict, first, most)
                    first = False


def _each(tasks: Sequence[_Task], workers: int) -> Iterator[tuple[_Done, _Task]]:
    """What every task found, as it is done, so many at once."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        running = {pool.submit(_do, task): task for task in tasks}
        for number, future in enumerate(as_completed(running), start=1):
            task = running[future]
            try:
                done = future.result()
            except BrokenProcessPool:
                yield _Done((), 0, [f"{task.name}: a process dies"], 0.0), task
                return
            print(f"{number}/{len(tasks)} {task.name} {done.seconds:.1f} s", file=sys.stderr, flush=True)
            yield done, task


def _prepare() -> None:
    torch.set_num_threads(1)


def _do(task: _Task) -> _Done:
    """One row per place where a mutant was made in the program of this name."""
    started = time.process_time()
    found: list[tuple[int, dict[str, Any]]] = []
    failures: list[str] = []
    right = 0
    try:
        if task.workload:
            case = WORKLOADS[task.name].cases["small"]
            each = subjects(task.name, WORKLOADS[task.name].text(case), case.constants)
        else:
            each = subjects(task.name, SOURCES[task.name], strict=task.strict)
        for number, subject in enumerate(each):
            if task.unmutated:
                right += 1
                if why := rejected(subject):
                    failures.append(f"{task.name}, {subject.schedule}: rejected unmutated: {why}")
            for at in task.mutants:
                mutant = MUTANTS[at]
                # Outputs are the same in all schedules.
                if mutant.level not in ("term", "order") or number == 0:
                    for mutated in places(mutant, subject, task.most):
                        found.append((at, _place(subject, judge(mutant.level, mutated, subject))))
    except Exception as error:  # noqa: BLE001  (whatever it is, it is a result of the benchmark)
        failures.append(f"{task.name}: {one_line(error)}")
    return _Done(found, right, failures, time.process_time() - started)


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


def _row(number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    mutant = MUTANTS[number]
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
