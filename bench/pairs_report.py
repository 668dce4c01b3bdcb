"""`eqfuse bench pairs`: what `eq.equivalent` says of random programs and edits of them.

Each random program (`bench.programs`) gives two pairs (`bench.pairs`): one that differs at one size, branch, magnitude, position
or constant, and one that is the same function in other words. float64 says, at points built for the edit, whether they
differ; where it cannot tell, or contradicts the edit, another edit is made. Where eight are of no use, as in a program without
inputs, the last is left out and counted, with what float64 said. Of the rest,

  false accept    programs that differ are called equivalent
  false reject    programs that are equal are refused with a counterexample
  undecided       refused without a counterexample: too little could be compared
"""

from __future__ import annotations

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
from bench.measure import own_cores, time_limit
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
REFUSED = "none: the program is refused"
WRONG = ("false accept", "false reject", "broken")


@dataclass
class Tally:
    """Verdicts by kind of edit; `examples` has those that are not right."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.examples += other.examples


def useless(pair: Pair, seed: int) -> str:
    """Why float64 does not tell that the edit of a pair does what it should; empty where it does."""
    match pair.differ(seed):
        case None:
            return "rounding, or the range of float64, leaves it open"
        case differ if differ is pair.equal:
            return "it makes a difference" if differ else "it makes no difference at any point"
    return ""


def judge(pair: Pair, seed: int) -> tuple[str, str]:
    """The verdict about one pair, and why."""
    if why := useless(pair, seed):
        return "left out", why
    return verdict_of(pair)


def verdict_of(pair: Pair) -> tuple[str, str]:
    """The verdict about a pair of which the edit does what it should."""
    try:
        certificate = eq.equivalent(*pair.programs)
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
        try:
            _judge_program(example.source, 1000 * seed + number, seed, tally)
        except EqfuseError as error:  # nothing that is generated may be refused as a text
            tally.counts[REFUSED, "broken"] += 1
            tally.examples.append(("broken", REFUSED, str(error), example.source))
    return tally


def _judge_program(source: str, number: int, seed: int, tally: Tally) -> None:
    """Adds what is said of the pairs that are made of a program."""
    for pairs in pairs_of(source, number):
        pair, why = first_of_use(pairs, seed)
        if pair is None:
            continue
        kind, verdict = f"{'same' if pair.equal else 'differs'}: {pair.kind}", "left out"
        try:
            with time_limit(MOST_SECONDS):
                if not why:
                    verdict, why = verdict_of(pair)
        except TimeoutError:
            verdict, why = "undecided", f"longer than {MOST_SECONDS} s"
        tally.counts[kind, verdict] += 1
        if verdict != "right":
            tally.examples.append((verdict, kind, why, f"{pair.left}\n# against\n{pair.right}"))


def first_of_use(pairs: Iterator[Pair], seed: int) -> tuple[Pair | None, str]:
    """The first pair whose edit does what it should; else the last, and why it is of no use."""
    last, why = None, ""
    try:
        with time_limit(MOST_SECONDS):
            for last in pairs:
                why = useless(last, seed)
                if not why:
                    return last, ""
    except TimeoutError:
        why = f"float64 takes longer than {MOST_SECONDS} s"
    return last, why


def run(options: Options, report: Report) -> None:
    """Failures: pairs about which the verdict is wrong."""
    total = Tally()
    for tally in _batches(options):
        total.add(tally)
        report.failures += [
            f"{verdict}, {kind}: {why}\n{text}"
            for verdict, kind, why, text in tally.examples
            if verdict in WRONG
        ]
        report.rows = _rows(total)
        report.summary = [_said(total, options.seed)]
        report.write()


def _said(total: Tally, seed: int) -> str:
    """One line about all pairs."""
    sums = Counter[str]()
    for (_, verdict), count in total.counts.items():
        sums[verdict] += count
    judged = sum(sums[verdict] for verdict in VERDICTS[:-1])
    share = 100 * sums["undecided"] / max(1, judged)
    said = ", ".join(f"{sums[verdict]} {verdict}" for verdict in VERDICTS)
    return f"{judged} pairs judged: {said}; {share:.1f}% undecided; seed {seed}"


def _batches(options: Options) -> Iterator[Tally]:
    """Each batch as it is done, `--jobs` at once. None is begun after `--seconds`."""
    deadline = time.monotonic() + options.seconds
    workers = options.jobs or own_cores()
    starts = iter(range(0, options.count(), BATCH))
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_prepare, max_tasks_per_child=16
    ) as pool:
        running = set[Future[Tally]]()
        while True:
            while len(running) < workers and time.monotonic() < deadline:
                start = next(starts, None)
                if start is None:
                    break
                count = min(BATCH, options.count() - start)
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
            "examples": [e for e in total.examples if e[1] == kind and e[0] != "left out"],
            "left out for": dict(
                Counter(e[2] for e in total.examples if e[1] == kind and e[0] == "left out")
            ),
            "left out examples": [e[3] for e in total.examples if e[1] == kind and e[0] == "left out"][:10],
        }
        for kind in kinds
    ]
