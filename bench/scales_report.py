"""`eqfuse bench scales`: random programs of scaled values (`bench.scaled`), at magnitudes from 1e-45 to 1e38.

Each is compiled and called as a user does it, verified, and called again with every schedule asked for. A position is judged
where the program as it is written, in float32, is finite and well-conditioned (`judge`): there the fused one has to be right.
Schedules that are asked for are not verified at first; of one that is wrong, the report says whether verification accepts it.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch

import eqfuse as eq
from bench.judge import Expected, expected
from bench.measure import own_cores, time_limit
from bench.report import Column, Options, Report
from bench.scaled import MAGNITUDES, SIZES, Scaled, scaled_program
from eqfuse.errors import EqfuseError, ScheduleError
from eqfuse.loops.plan import SCHEDULES
from eqfuse.measure import as_tuple
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.types import program_dtypes

BATCH = 10
MOST_SECONDS = 120
MOST_BYTES = 8 << 30
WELL = 1e-3
"""Of the size of a value: what its tolerance may be at most, for it to be judged."""
CHOSEN = "chosen"

TITLE = "Random programs of scaled values, by magnitude"
COLUMNS = (
    Column("schedule", lambda row: str(row["schedule"])),
    Column("magnitude", lambda row: f"{row['magnitude']:.0e}"),
    Column("programs", lambda row: str(row["programs"])),
    Column("positions", lambda row: str(row["positions"])),
    Column("judged", lambda row: str(row["judged"])),
    Column("wrong", lambda row: str(row["wrong"])),
    Column("programs with wrong ones", lambda row: str(row["wrong_programs"])),
)


@dataclass
class Tally:
    """By schedule and magnitude, what was called and judged. `refused` has programs and reasons, `failures` what is wrong by
    default, `others` what is wrong where a schedule was asked for."""

    programs: int = 0
    counts: Counter[tuple[str, float, str]] = field(default_factory=Counter)
    refused: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.programs += other.programs
        self.counts += other.counts
        self.refused += other.refused
        self.failures += other.failures
        self.others += other.others


def explore(seeds: Sequence[int]) -> Tally:
    """What became of the programs of these seeds."""
    tally = Tally()
    for seed in seeds:
        tried = scaled_program(seed)
        tally.programs += 1
        try:
            with time_limit(MOST_SECONDS):
                attempt(tried, tally)
        except EqfuseError as error:
            tally.refused.append((tried.source, f"{type(error).__name__}: {error}"))
        except Exception as error:  # noqa: BLE001  (whatever it is, a valid program must not cause it)
            tally.failures.append(f"{type(error).__name__}: {error}\n{_shown(tried)}")
    return tally


def _shown(tried: Scaled) -> str:
    return f"{tried.source}\n# seed {tried.seed}, powers of the magnitude: {dict(tried.powers)}"


def attempt(tried: Scaled, tally: Tally, schedules: Sequence[str] = (CHOSEN, *SCHEDULES)) -> None:
    """Counts what becomes of a program, with each schedule. Raises EqfuseError where it is refused by default."""
    answers = {magnitude: _expected(tried, magnitude) for magnitude in MAGNITUDES}
    kernel = eq.compile(tried.source, native="off")
    kernel.certificate  # noqa: B018  (raises VerificationError)
    for schedule in schedules:
        if schedule != CHOSEN:
            try:
                kernel = eq.compile(tried.source, prefer=schedule, verify=False, native="off")
                tried.call(kernel, 1.0)
            except ScheduleError:
                continue
        wrong = [
            line
            for m, outputs in answers.items()
            if (line := _called(tried, kernel, schedule, m, outputs, tally))
        ]
        if not wrong:
            continue
        text = "\n".join((f"{schedule}{_of_plan(tried, kernel, schedule)}:", *wrong, _shown(tried)))
        if schedule == CHOSEN:
            tally.failures.append(text)
        else:
            tally.others.append(text)


def _of_plan(tried: Scaled, kernel: eq.Kernel, schedule: str) -> str:
    if schedule == CHOSEN:
        return f", {kernel.plan.schedule}"
    return ", verified" if _is_accepted(tried.source, schedule) else ", not verified"


def _is_accepted(source: str, schedule: str) -> bool:
    try:
        eq.compile(source, prefer=schedule, native="off").certificate  # noqa: B018  (raises VerificationError)
    except EqfuseError:
        return False
    return True


def _expected(tried: Scaled, magnitude: float) -> tuple[Expected, ...]:
    program = parse(tried.source)
    tensors, scalars = tried.inputs(magnitude)
    sizes = {axis: size for axis, size in SIZES.items() if axis in axes_of(program.outputs)}
    return expected(program, tensors, scalars, sizes, program_dtypes(program), headroom=False)


def _called(
    tried: Scaled,
    kernel: eq.Kernel,
    schedule: str,
    magnitude: float,
    outputs: Sequence[Expected],
    tally: Tally,
) -> str:
    """How a call is wrong; counts it."""
    found = as_tuple(tried.call(kernel, magnitude))
    said, wrong = "", 0
    for output, value in zip(outputs, found, strict=True):
        is_judged = output.is_well_conditioned(WELL)
        bad = is_judged & (output.ratios(value) > 1)
        tally.counts[schedule, magnitude, "positions"] += bad.size
        tally.counts[schedule, magnitude, "judged"] += int(is_judged.sum())
        wrong += int(bad.sum())
        if bad.any() and not said:
            said = f"  {magnitude:.0e}: {output.wrong(value)}"
    tally.counts[schedule, magnitude, "programs"] += 1
    tally.counts[schedule, magnitude, "wrong"] += wrong
    tally.counts[schedule, magnitude, "wrong_programs"] += wrong > 0
    return said


def run(options: Options, report: Report) -> None:
    """Failures: values that are wrong by default, and what breaks."""
    total = Tally()
    for tally in _batches(options):
        total.add(tally)
        report.rows = list(_rows(total))
        report.failures = list(total.failures)
        report.summary = list(_said(total, options.seed))
        report.write()


def _rows(total: Tally) -> Iterator[dict[str, Any]]:
    for schedule in (CHOSEN, *SCHEDULES):
        for magnitude in MAGNITUDES:
            kinds = ("programs", "positions", "judged", "wrong", "wrong_programs")
            yield {
                "schedule": schedule,
                "magnitude": magnitude,
                **{kind: total.counts[schedule, magnitude, kind] for kind in kinds},
            }


def _said(total: Tally, seed: int) -> Iterator[str]:
    def of(kind: str, chosen: bool) -> int:
        return sum(
            n for (schedule, _, k), n in total.counts.items() if k == kind and (schedule == CHOSEN) == chosen
        )

    accepted = total.programs - len(total.refused)
    yield (
        f"{total.programs} programs of seed {seed}: {accepted} accepted, {len(total.refused)} refused; at {len(MAGNITUDES)} magnitudes "
        f"{of('judged', True)} of {of('positions', True)} positions judged, {of('wrong', True)} wrong, "
        f"in {len(total.failures)} programs"
    )
    yield (
        f"with a schedule asked for, not verified: {of('judged', False)} positions judged, {of('wrong', False)} wrong, by "
        f"{len(total.others)} schedules of programs; {sum('not verified' not in text.splitlines()[0] for text in total.others)} of them verify"
    )
    yield from (f"refused: {reason}\n{source}" for source, reason in total.refused)
    yield from total.others


def _batches(options: Options) -> Iterator[Tally]:
    """Each batch as it is done, `--jobs` at once. None is begun after `--seconds`."""
    deadline = time.monotonic() + options.seconds
    workers = options.jobs or own_cores()
    seeds = range(options.seed, options.seed + options.count())
    waiting = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        running = set[Future[Tally]]()
        while True:
            while waiting and len(running) < workers and time.monotonic() < deadline:
                running.add(pool.submit(explore, waiting.pop(0)))
            if not running:
                return
            done = next(as_completed(running))
            running.remove(done)
            try:
                yield done.result()
            except BrokenProcessPool:
                yield Tally(failures=["a process dies"])
                return


def _prepare() -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
