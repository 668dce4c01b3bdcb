"""`eqfuse bench pairs`: what `eq.equivalent` says of random programs and edits of them.

Each random program (`bench.programs`) gives two pairs (`bench.pairs`): one that differs at one size, branch, magnitude, position
or constant, and one that is the same function in other words. float64 says, at points built for the edit, whether they
differ; pairs of which it cannot tell, or where it contradicts the edit, are left out and counted. Of the rest,

  false accept    programs that differ are called equivalent
  false reject    programs that are equal are refused with a counterexample
  undecided       refused without a counterexample: too little could be compared
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

import eqfuse as eq
from bench.measure import time_limit
from bench.pairs import Pair, pairs_of
from bench.programs import Example, programs, registered
from bench.report import Column, Options, Report
from eqfuse.errors import EqfuseError

BATCH = 25
"""Programs of one run of hypothesis; batch n has the seed of the report + n."""
MOST_SECONDS = 60
MOST_BYTES = 8 << 30

TITLE = "Pairs of random programs: what equivalence says"
COLUMNS = (
    Column("edit", lambda row: str(row["edit"])),
    Column("pairs", lambda row: str(row["pairs"])),
    Column("right", lambda row: str(row["right"])),
    Column("false accepts", lambda row: str(row["false accept"])),
    Column("false rejects", lambda row: str(row["false reject"])),
    Column("undecided", lambda row: str(row["undecided"])),
    Column("left out", lambda row: str(row["left out"])),
)
VERDICTS = ("right", "false accept", "false reject", "undecided", "broken", "left out")
WRONG = ("false accept", "false reject", "broken")


@dataclass
class Tally:
    """Verdicts by kind of edit; `examples` has pairs that were judged wrongly, and the first undecided ones."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.examples += other.examples


def judge(pair: Pair, seed: int) -> tuple[str, str]:
    """The verdict about one pair, and why."""
    differ = pair.differ(seed)
    if differ is None or differ is pair.equal:
        return "left out", "float64 says otherwise, or nothing"
    try:
        certificate = eq.equivalent(pair.left, pair.right)
    except EqfuseError as error:
        return "broken", f"{type(error).__name__}: {error}"
    if certificate.ok:
        return ("right", "") if pair.equal else ("false accept", "")
    if not pair.equal:
        return ("right" if certificate.counterexample else "undecided"), certificate.reason
    return ("false reject" if certificate.counterexample else "undecided"), certificate.reason


def explore(seed: int, examples: int) -> Tally:
    """The pairs of that many programs."""
    tally, found = Tally(), list[Example]()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(programs())
    def collect(example: Example) -> None:
        found.append(example)

    collect()
    for number, example in enumerate(found):
        registered(example.source)
        for pair in pairs_of(example.source, 1000 * seed + number):
            kind = f"{'same' if pair.equal else 'differs'}: {pair.kind}"
            try:
                with time_limit(MOST_SECONDS):
                    verdict, why = judge(pair, seed)
            except TimeoutError:
                verdict, why = "undecided", f"longer than {MOST_SECONDS} s"
            tally.counts[kind, verdict] += 1
            if verdict in (*WRONG, "undecided"):
                tally.examples.append((verdict, kind, why, f"{pair.left}\n# against\n{pair.right}"))
    return tally


def run(options: Options, report: Report) -> None:
    """Failures: pairs about which the verdict is wrong."""
    total = Tally()
    for tally in _batches(options):
        total.add(tally)
        report.rows = _rows(total)
        report.write()
    for verdict, kind, why, text in total.examples:
        if verdict in WRONG:
            report.failures.append(f"{verdict}, {kind}: {why}\n{text}")
    sums = Counter[str]()
    for (_, verdict), count in total.counts.items():
        sums[verdict] += count
    judged = sum(sums[verdict] for verdict in VERDICTS[:-1])
    share = 100 * sums["undecided"] / max(1, judged)
    said = ", ".join(f"{sums[verdict]} {verdict}" for verdict in VERDICTS)
    report.summary.append(f"{judged} pairs judged: {said}; {share:.1f}% undecided; seed {options.seed}")


def _batches(options: Options) -> Iterator[Tally]:
    """Each batch as it is done, `--jobs` at once. None is begun after `--seconds`."""
    deadline = time.monotonic() + options.seconds
    workers = options.jobs or os.cpu_count() or 1
    starts = iter(range(0, options.examples, BATCH))
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_prepare, max_tasks_per_child=4
    ) as pool:
        running = set[Future[Tally]]()
        while True:
            while len(running) < workers and time.monotonic() < deadline:
                start = next(starts, None)
                if start is None:
                    break
                count = min(BATCH, options.examples - start)
                running.add(pool.submit(explore, options.seed + start // BATCH, count))
            if not running:
                return
            done = next(as_completed(running))
            running.remove(done)
            try:
                yield done.result()
            except BrokenProcessPool:
                yield Tally(
                    Counter({("a process dies", "broken"): 1}), [("broken", "", "a process dies", "")]
                )
                return


def _prepare() -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def _rows(total: Tally) -> list[dict[str, Any]]:
    kinds = sorted({kind for kind, _ in total.counts})
    return [
        {
            "edit": kind,
            "pairs": sum(total.counts[kind, verdict] for verdict in VERDICTS),
            **{verdict: total.counts[kind, verdict] for verdict in VERDICTS},
            "examples": [e for e in total.examples if e[1] == kind][:5],
        }
        for kind in kinds
    ]
