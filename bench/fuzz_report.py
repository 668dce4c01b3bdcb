"""`eqfuse bench fuzz`: random programs, every schedule forced, each result held against float64.

A program counts as
  fused         every cascade of it has a merge, and every schedule that exists gives the right values
  fallen back   as above, but a reduction could not be fused with those that it reads: the reason is told
  refused       an error of eqfuse's own says that it cannot be compiled or called
and fails where a schedule gives a wrong value (a mismatch), is not verified, or breaks with anything else.
Each schedule runs twice: the plan for these sizes in its own tiles, and the plan for long axes in tiles of
2 to 8 positions. hypothesis shrinks what fails. `judge` says what is right.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.judge import Expected, expected
from bench.programs import Example, programs
from bench.report import Column, Options, Report, one_line
from eqfuse import compiler
from eqfuse.errors import EqfuseError, ScheduleError, VerificationError
from eqfuse.extract.choose import pick
from eqfuse.extract.configure import tiny
from eqfuse.extract.plans import SCHEDULES
from eqfuse.kernel import Kernel
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.cpu import CpuProgram
from eqfuse.verify.certificate import Certificate

BATCH = 50
"""Programs of one run of hypothesis. Batch n has the seed of the report + n, so that it can be run alone."""
TRIALS = 16
SHRINK_SECONDS = 60.0
"""After so long a failing program is taken as it is."""
FAILED = ("mismatch", "not verified", "broken")

TITLE = "Random programs, every schedule against float64"
COLUMNS = (
    Column("outcome", lambda row: str(row["outcome"])),
    Column("why", lambda row: str(row["why"])),
    Column("programs", lambda row: str(row["programs"])),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one program: see the module's text. `ran` are the schedules that it has."""

    kind: str
    why: str
    ran: tuple[str, ...] = ()
    judged: int = 0
    positions: int = 0

    @property
    def failed(self) -> bool:
        return self.kind in FAILED


def check(example: Example) -> Outcome:
    """Compile, force every schedule, run, compare."""
    try:
        return _checked(example)
    except VerificationError as error:
        if _is_never_a_number(error.certificate):
            return Outcome("refused", "an output is infinite or NaN whatever the inputs")
        return Outcome("not verified", str(error))
    except EqfuseError as error:
        return Outcome("refused", one_line(error))
    except Exception as error:  # noqa: BLE001  (whatever it is, a valid program must not cause it)
        return Outcome("broken", f"{type(error).__name__}: {error}")


def _is_never_a_number(certificate: Certificate | None) -> bool:
    """Whether all that could not be compared are infinities and NaN of the program itself."""
    return (
        certificate is not None
        and certificate.counterexample is None
        and not any(stage.undefined or stage.signs for stage in certificate.stages)
    )


def _checked(example: Example) -> Outcome:
    program = parse(example.source)
    dtypes = program_dtypes(program)
    axes = axes_of(program.outputs)
    sizes = {axis: size for axis, size in example.sizes.items() if axis in axes}
    names = {tensor.name for tensor in program.tensors}
    tensors = {name: tensor for name, tensor in example.tensors().items() if name in names}
    scalars = {name: number for name, number in example.scalars.items() if name in program.scalars}
    outputs = expected(program, tensors, scalars, sizes, dtypes)
    derived = compiler.derive(example.source, None, strict_casts=False)
    kernel = Kernel(derived, compiler.device_named("cpu"), True, None, False, TRIALS, {})
    for_long_axes = kernel.compiled
    wrong = _wrong(outputs, kernel(**tensors, **scalars, sizes=sizes))
    if wrong:
        return Outcome("mismatch", f"{kernel.plan.schedule}, chosen: {wrong}")
    verified = {kernel.compiled.chosen.nest}
    kernel.certificate  # noqa: B018  (raises VerificationError)
    has_empty_axis = 0 in sizes.values()
    ran: list[str] = []
    for schedule in SCHEDULES:
        for compiled, block in ((kernel.compiled, None), (for_long_axes, example.block)):
            try:
                candidate = pick(compiled.candidates, schedule, tuple(derived.groups.values()))
            except ScheduleError:
                continue
            ran.append(schedule)
            nest = candidate.nest
            if nest not in verified:
                compiler.verify(derived, nest, dtypes, compiled.device, trials=TRIALS)
                verified.add(nest)
            configs = [tiny(k, block) for k in nest.kernels] if block else candidate.plan.configs
            tiles = compiler.lower_nest(nest, program, dtypes, configs, compiled.device)
            if has_empty_axis:  # the call above has run the unfused program, which is all there is
                continue
            shards = {axis: example.shards for axis, _ in nest.shards}
            found = CpuProgram(tiles, program)(tensors, scalars, kernel.compiled.extents, shards)
            wrong = _wrong(outputs, tuple(found[output.name] for output in program.outputs))
            if wrong:
                where = f" in tiles of {block}" if block else ""
                return Outcome("mismatch", f"{schedule}{where}: {wrong}")
    kind, why = _fused(derived)
    judged, positions = sum(output.judged for output in outputs), sum(output.exact.size for output in outputs)
    return Outcome(kind, why, tuple(dict.fromkeys(ran)), judged, positions)


def _wrong(outputs: tuple[Expected, ...], result: Any) -> str:
    values: tuple[torch.Tensor, ...] = result if isinstance(result, tuple) else (result,)
    return next(filter(None, (o.wrong(v) for o, v in zip(outputs, values, strict=True))), "")


def _fused(derived: compiler.Derived) -> tuple[str, str]:
    groups = derived.groups.values()
    obstacles = [obstacle for group in groups for obstacle in group.obstacles]
    if obstacles:
        return "fallen back", obstacles[0].condition
    states = max((len(group.states) for group in groups), default=0)
    return "fused", f"{states} state{'s' * (states != 1)} over an axis"


class Found(AssertionError):
    """A failing program; hypothesis shrinks it."""


@dataclass
class Tally:
    """What became of a batch. `examples` has the first program of each outcome."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    schedules: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    judged: int = 0
    positions: int = 0

    @property
    def programs(self) -> int:
        return self.counts.total()

    def count(self, example: Example, outcome: Outcome) -> None:
        key = outcome.kind, "" if outcome.failed else outcome.why
        self.counts[key] += 1
        self.examples.setdefault(key, str(example))
        self.schedules.update(outcome.ran)
        self.judged += outcome.judged
        self.positions += outcome.positions

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.examples = other.examples | self.examples
        self.schedules += other.schedules
        self.failures += other.failures
        self.judged += other.judged
        self.positions += other.positions


def explore(seed: int, examples: int) -> Tally:
    """Try that many programs. What fails is shrunk, and others are tried in place of the rest."""
    tally, attempt = Tally(), 0
    while tally.programs < examples:
        before = tally.programs
        failure = _explore(tally, f"{seed} {attempt}", examples - before)
        if failure is not None:
            example, outcome = failure
            again = f"eqfuse bench fuzz --seed {seed} --examples {examples}"
            tally.failures.append(f"{outcome.kind}: {outcome.why}\n{example}\n# again: {again}")
        elif tally.programs == before:
            break
        attempt += 1
    return tally


def _explore(tally: Tally, seed: str, examples: int) -> tuple[Example, Outcome] | None:
    """One run of hypothesis: counts into the tally, and returns the first failure, shrunk."""
    smallest: list[tuple[Example, Outcome]] = []
    found = 0.0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(programs())
    def every_schedule_agrees(example: Example) -> None:
        nonlocal found
        if smallest and time.monotonic() - found > SHRINK_SECONDS and example != smallest[0][0]:
            return
        outcome = check(example)
        if not smallest:
            tally.count(example, outcome)
        if outcome.failed:
            if not smallest:
                found = time.monotonic()
                print(
                    f"seed {seed}, {outcome.kind}: {outcome.why}\n{example}\nshrinking",
                    file=sys.stderr,
                    flush=True,
                )
            smallest[:] = [(example, outcome)]
            raise Found(outcome.why)

    try:
        every_schedule_agrees()
    except Found:
        return smallest[0]
    return None


def run(options: Options, report: Report) -> None:
    """Failures: wrong values, programs that are not verified, and what breaks, each shrunk."""
    total = Tally()
    for tally in _batches(options):
        total.add(tally)
    report.add(*_rows(total))
    report.failures += total.failures
    report.summary += _summary(total, options)


def _batches(options: Options) -> Iterator[Tally]:
    left = [min(BATCH, options.examples - start) for start in range(0, options.examples, BATCH)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    # spawned, not forked: a fork has none of the threads that torch has started
    context = get_context("spawn")
    workers = min(len(left), os.cpu_count() or 1)
    with (
        Progress(*columns, transient=True) as progress,
        ProcessPoolExecutor(
            workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool,
    ):
        task = progress.add_task("programs", total=options.examples)
        futures = [pool.submit(explore, options.seed + n, count) for n, count in enumerate(left)]
        failed = 0
        for future in futures:
            tally = future.result()
            failed += len(tally.failures)
            progress.update(task, advance=tally.programs, description=f"programs, {failed} failed")
            yield tally


def _rows(total: Tally) -> list[dict[str, Any]]:
    order = ("fused", "fallen back", "refused", *FAILED)
    found = sorted(total.counts.items(), key=lambda item: (order.index(item[0][0]), -item[1], item[0][1]))
    return [
        {"outcome": kind, "why": why, "programs": count, "example": total.examples[kind, why]}
        for (kind, why), count in found
    ]


def _summary(total: Tally, options: Options) -> list[str]:
    kinds = Counter[str]()
    for (kind, _), count in total.counts.items():
        kinds[kind] += count
    outcomes = [f"{kinds[kind]} {kind}" for kind in ("fused", "fallen back", "refused")]
    mismatches = f"{kinds['mismatch']} mismatches"
    broken = [f"{kinds[kind]} {kind}" for kind in FAILED[1:]]
    schedules = ", ".join(f"{name} {total.schedules[name]}" for name in SCHEDULES)
    share = 100 * total.judged / max(1, total.positions)
    return [
        f"{total.programs} programs: {', '.join([*outcomes, mismatches, *broken])}; seed {options.seed}",
        f"schedules run: {schedules}",
        f"{share:.1f}% of {total.positions} output positions are well-conditioned enough to judge",
    ]
