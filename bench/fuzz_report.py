"""`eqfuse bench fuzz`: random programs, every schedule forced, each result held against float64.

A program counts as
  fused         every cascade of it has a merge, and every schedule that exists gives the right values
  fallen back   as above, but a reduction could not be fused with those that it reads, or the fused form has another
                infinity or NaN than the program, which verification shows on inputs: the reason is told
  refused       an error of eqfuse's own says that it cannot be compiled or called, and what it says is so
and fails where a schedule gives a wrong value (a mismatch), is not verified, is refused for a reason that does
not hold, or breaks with anything else. Every program is legal, so that there is one reason: an output that is
infinite or NaN whatever the inputs, of which float64 gives no finite value either. (And one of the language: a
tensor that is read behind an axis has a position more than that, but not where a condition on the axis guards it.)

Each schedule runs twice: the plan for these sizes in its own tiles, and the plan for long axes in tiles of
2 to 8 positions (more where an axis is long); so does the program as it is written. On the CPU tiles run as torch
calls. With `--native` compiled C++ runs them too: the chosen plan in blocks for C++, and every schedule in tiny tiles,
with 1 or 2 threads; what has no C++ is counted, with the reason. With `--device cuda` it runs as a user's does: `eq.compile`
on CUDA tensors, with no schedule asked for and with each. The chosen plan is called again with tensors of its own, which have to
be released, and with `--native` while its C++ is compiled: all calls have to agree. Some programs run in a thread of their own,
in several at once, or in a forked child. hypothesis shrinks what fails. `judge` says what is right.

Batches are kept beside the report as they are done: `--resume` goes on after those, `--seconds` begins none later.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import re
import resource
import select
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck, Phase
from hypothesis.errors import FlakyFailure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import eqfuse as eq
from bench.judge import MORE_RUNS, MOST_TILES, Expected, expected
from bench.measure import own_cores, time_limit
from bench.programs import HALVES, Example, programs, registered
from bench.report import Column, Options, Report
from eqfuse import compiler
from eqfuse.certification import Checks, verify
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.errors import BindError, EqfuseError, ScheduleError, VerificationError
from eqfuse.extract.candidates import Candidate
from eqfuse.extract.tile_sizes import tiny
from eqfuse.kernel import Kernel
from eqfuse.limits import OverLimit
from eqfuse.loops.plan import SCHEDULES
from eqfuse.lowered import lower_nest
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.cpu.run import CpuProgram
from eqfuse.tile.native.nodes import NotNative
from eqfuse.tile.native.run import NativeProgram, prepared, unit_dims
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.storage import loaded_dtypes
from eqfuse.verify.certificate import ALL_UNTAKEN, Certificate, Counterexample

BATCH = 50
"""Programs of one run of hypothesis. Batch n has the seed of the report + n, so that it can be run alone."""
GPU_BATCH = 20
"""The same on a GPU, where a program takes several compilations by Triton."""
COMPILER_FAILED = "Triton refused"
"""How an error begins of a kernel that Triton's own passes do not get through, as those of 3.6 where blocks are of 4."""
LOST = "CUDA error"
"""What an error says after which a process can use the GPU no more."""
SEEN_BEFORE = 4
"""So many more are drawn than are left, as the simplest come first in each run."""
TRIALS = 16
MOST_SECONDS = 60
"""A program that takes longer hangs."""
NATIVE_SECONDS = 300
"""The same where C++ compilers take most of it: a library for each schedule and form."""
MOST_BYTES = 10 << 30
"""Of a worker's memory."""
THREADS = 3
"""At once, where a program runs in several."""
BACKGROUND_SECONDS = 20.0
"""So long calls are repeated while C++ is compiled."""
SHRINK_SECONDS = 60.0
"""After so long a failing program is taken as it is."""
GIVEN_WAY = "its fused form has another infinity or NaN than the program, which runs as written"
FAILED = ("mismatch", "not verified", "refused wrongly", "broken")

TITLE = "Random programs, every schedule against float64"
COLUMNS = (
    Column("outcome", lambda row: str(row["outcome"])),
    Column("why", lambda row: str(row["why"])),
    Column("programs", lambda row: str(row["programs"])),
)


Form = Callable[
    [Mapping[str, torch.Tensor], Mapping[str, float], Mapping[str, int], Mapping[str, int]],
    Mapping[str, torch.Tensor],
]
"""The outputs by name, from tensors and scalars by name, the extents of axes and the numbers of shards."""


@dataclass(frozen=True)
class Outcome:
    """What became of one program: see the module's text. `ran` are the schedules that it has, and with `--native`
    what they ran as: "C++", or torch calls and why."""

    kind: str
    why: str
    ran: tuple[str, ...] = ()
    judged: int = 0
    positions: int = 0
    memory: int = 0
    """Bytes that the process held at most while it tried this program, beyond what it held before."""

    @property
    def failed(self) -> bool:
        return self.kind in FAILED


@dataclass(frozen=True)
class Call:
    """A program with what it is called with on the CPU, and what its outputs must be."""

    example: Example
    source: str
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, float]
    sizes: Mapping[str, int]
    dtypes: Mapping[str, str]
    outputs: tuple[Expected, ...]

    @staticmethod
    def of(example: Example) -> Call:
        """Raises EqfuseError where the inputs do not fit the program."""
        program = parse(example.source)
        dtypes = program_dtypes(program)
        axes = axes_of(program.outputs)
        sizes = {axis: size for axis, size in example.sizes.items() if axis in axes}
        names = {tensor.name for tensor in program.tensors}
        tensors = {name: tensor for name, tensor in example.tensors().items() if name in names}
        scalars = {name: number for name, number in example.scalars.items() if name in program.scalars}
        outputs = expected(program, tensors, scalars, sizes, dtypes)
        return Call(example, example.source, tensors, scalars, sizes, dtypes, outputs)

    def wrong(self, result: Any, infinities: bool = True) -> str:
        """How the outputs of a kernel are wrong; empty where they are right."""
        values: tuple[torch.Tensor, ...] = result if isinstance(result, tuple) else (result,)
        found = tuple(value.cpu() for value in values)
        return _wrong(self.outputs, found, infinities) and _wrong(self.surer, found, infinities)

    @cached_property
    def surer(self) -> tuple[Expected, ...]:
        """`outputs` by many more disturbed runs."""
        program = parse(self.source)
        return expected(program, self.tensors, self.scalars, self.sizes, self.dtypes, MORE_RUNS)

    def again(self, kernel: Kernel, device: str = "cpu") -> str:
        """How a further call, on equal tensors that nothing else holds, is wrong; empty where it is right. After a call every
        tensor that was given to it has to be released."""
        given = {
            name: tensor.to(device) for name, tensor in self.example.tensors().items() if name in self.tensors
        }
        dropped = [weakref.ref(tensor) for tensor in given.values()]
        found = kernel(**given, **self.scalars, sizes=self.sizes)
        wrong = self.wrong(found, not kernel.plan.loses_infinities)
        del given, found
        if any(tensor() is not None for tensor in dropped):
            gc.collect()
        held = sum(tensor() is not None for tensor in dropped)
        return wrong or (f"{held} of its {len(dropped)} tensors outlive a call" if held else "")

    def is_never_a_number(self) -> bool:
        """Whether float64 gives no finite value of some output either."""
        return any(o.exact.size and not np.isfinite(o.exact).any() for o in self.outputs)

    def outcome(self, derived: Derived, ran: list[str]) -> Outcome:
        """Of a program whose every value was right."""
        kind, why = _fused(derived)
        judged = sum(output.judged for output in self.outputs)
        positions = sum(output.exact.size for output in self.outputs)
        return Outcome(kind, why, tuple(dict.fromkeys(ran)), judged, positions)


def _wrong(outputs: Sequence[Expected], found: Sequence[torch.Tensor], infinities: bool) -> str:
    of_each = (one.wrong(value, infinities=infinities) for one, value in zip(outputs, found, strict=True))
    return next(filter(None, of_each), "")


def check(example: Example, device: str = "cpu", native: bool = False) -> Outcome:
    """Compile, force every schedule, run, compare; where the example says. `native`: compiled C++ as well."""
    registered(example.source)
    run, seconds = partial(_judged, example, device, native), _most_seconds(native)
    before = _held("VmRSS")
    # 5 lets the peak start anew: proc(5), /proc/pid/clear_refs
    Path("/proc/self/clear_refs").write_text("5")
    match example.place:
        case "a thread":
            outcome = _in_threads(run, 1, seconds)
        case "threads":
            outcome = _in_threads(run, THREADS, seconds)
        case "a fork" if device == "cpu":
            outcome = _in_a_fork(run, seconds)
        case _:
            outcome = run()
    return replace(outcome, memory=max(0, _held("VmHWM") - before))


def _held(what: str) -> int:
    """Bytes of a line of /proc/self/status."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _most_seconds(native: bool) -> int:
    return NATIVE_SECONDS if native else MOST_SECONDS


def _judged(example: Example, device: str, native: bool) -> Outcome:
    call: Call | None = None
    try:
        call = Call.of(example)
        return _on_cpu(example, call, native) if device == "cpu" else _as_a_user(call, device)
    except VerificationError as error:
        found_nothing = call is not None and call.is_never_a_number() and _found_nothing(error.certificate)
        if found_nothing or _is_always_special(error.certificate):
            return Outcome("refused", "an output is infinite or NaN whatever the inputs")
        if is_of_infinities(_counterexample(error)):
            return Outcome("refused", "of infinite inputs its tiles make another infinity, which it compares")
        return Outcome("not verified", str(error))
    except BindError as error:
        if is_of_what_is_behind(error, example):
            return Outcome("refused", "a condition on an axis guards what is read behind it")
        return Outcome("refused wrongly", f"BindError: {error}")
    except EqfuseError as error:
        return Outcome("refused wrongly", f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (whatever it is, a valid program must not cause it)
        return Outcome("broken", f"{type(error).__name__}: {error}")


def _found_nothing(certificate: Certificate | None) -> bool:
    """Whether a certificate has no counterexample."""
    return certificate is not None and certificate.counterexample is None


def _is_of_branches(certificate: Certificate | None) -> bool:
    """Whether nothing differs, but that no trial took some side of a branch: the program runs as written."""
    return (
        certificate is not None and certificate.counterexample is None and "took a side" in certificate.reason
    )


def is_of_infinities(found: Counterexample | None) -> bool:
    """Whether what differs is an infinity or a NaN of the program, or one that the fused form makes of an infinite input and the
    program compares: the fused form has another one, as inf * sum(x) has for sum(inf * x), and gives way to the program as written."""
    if found is None or found.residues is not None:
        return False
    reals = [value for value in found.inputs.values() if np.asarray(value).dtype.kind == "f"]
    is_given = any(np.isinf(value).any() for value in reals)
    return not math.isfinite(found.expected) or (is_given and not math.isfinite(found.found))


def _counterexample(error: VerificationError | OverLimit | None) -> Counterexample | None:
    return None if error is None or error.certificate is None else error.certificate.counterexample


def _is_always_special(certificate: Certificate | None) -> bool:
    """Whether some position of an output was infinite or NaN in every trial, of sizes other than those of the call."""
    if certificate is None or certificate.counterexample is not None or "0 times" not in certificate.reason:
        return False
    stages = certificate.stages
    return any(stage.special for stage in stages) and not any(s.undefined or s.signs for s in stages)


def is_of_what_is_behind(error: BindError, example: Example) -> bool:
    """Whether two sizes of an axis are told, one of them that of a tensor with one position more or with two halves, and the program
    has a condition on that axis beside the tensor's own."""
    for given in example.inputs:
        found = re.fullmatch(r"(\w+)(\+1|\*2)", given.axes[0]) if given.axes else None
        axis = found[1] if found and (found[2] == "+1" or given.name == HALVES) else ""
        declared = re.search(rf"^{axis}: axis\[(\w+)\]", example.source, re.MULTILINE)
        # an axis that is as long as another one has its name there
        root = declared[1] if axis and declared else axis
        if axis and re.search(rf"axis '{root}' has size \d+ in .*\b{given.name} \(", error.message):
            conditions = re.sub(rf"\b{given.name}\[[^]]*\]", "", example.source)
            either = rf"\b(?:{axis}|{root})\b"
            return bool(re.search(rf"{either}[^,\]]*[<>=!]=?|[<>=!]=?[^,\]]*{either}", conditions))
    return False


def _on_cpu(example: Example, call: Call, native: bool) -> Outcome:
    derived = compiler.derive(call.source, None, strict_casts=False)
    program, device = derived.program, device_named("cpu")
    mode = "wait" if native else "off"
    kernel = Kernel(derived, device, True, None, True, TRIALS, {}, native=mode)
    given_way: list[str] = []
    if is_of_infinities(_counterexample(kernel.refused)):
        given_way.append("chosen")
    elif kernel.refused is not None and not _is_of_branches(kernel.refused.certificate):
        raise kernel.refused
    for_long_axes = kernel.compiled
    wrong = call.wrong(
        kernel(**call.tensors, **call.scalars, sizes=call.sizes), not kernel.plan.loses_infinities
    )
    if wrong:
        code = f" as {kernel.plan.code}" if kernel.plan.code else ""
        return Outcome("mismatch", f"{kernel.plan.schedule}, chosen{code}: {wrong}")
    if wrong := _later(kernel, call, native):
        return Outcome("mismatch", f"{kernel.plan.schedule}, a later call: {wrong}")
    verified, own = {kernel.compiled.chosen.nest}, kernel.compiled
    if (
        own.views is not None
    ):  # the call has run a program of sorted positions or fewer axes; the schedules are those of this one
        shapes = {name: tuple(tensor.shape) for name, tensor in call.tensors.items()}
        sizes = bind(program, shapes, call.sizes, call.scalars)
        own = compiler.pipeline(derived, sizes, call.dtypes, device)
    extents = own.extents
    # OpenMP's threads do not outlive a fork
    threads = 1 if example.place == "a fork" else 1 + example.seed % 2
    ran: list[str] = [kernel.plan.code] if native and kernel.plan.code else []
    tile = example.block
    while MOST_TILES * tile < max(extents.values(), default=0):
        tile *= 2
    for compiled, block in ((own, None), (for_long_axes, tile)):
        found = list(_candidates(compiled))
        if derived.outputs != program.outputs:
            written = compiler.pipeline(derived, compiled.extents, call.dtypes, device, "multi_pass")
            found.append(("as written", written.chosen))
        for name, candidate in found:
            nest, plan = candidate.nest, candidate.plan
            if nest not in verified:
                try:
                    verify(derived, nest, plan, call.dtypes, device, Checks(TRIALS, allow=(ALL_UNTAKEN,)))
                except VerificationError as error:
                    if not is_of_infinities(_counterexample(error)):
                        raise
                    given_way.append(name)
                    continue
                verified.add(nest)
            ran.append(plan.schedule)
            configs = [tiny(k, block) for k in nest.kernels] if block else plan.configs
            tiles = lower_nest(nest, program, call.dtypes, configs, device)
            if 0 in call.sizes.values():  # the call above has run the unfused program, which is all there is
                continue
            shards = {axis: example.shards for axis, _ in nest.shards}
            forms: list[tuple[str, Form]] = [("", CpuProgram(tiles, program))]
            if native and block:
                try:
                    forms.append((" as C++", _native(tiles, call.tensors, extents, shards, threads)))
                    ran.append("C++")
                except NotNative as why:
                    ran.append(f"torch calls: {why}")
            for form, run in forms:
                outputs = run(call.tensors, call.scalars, extents, shards)
                values = tuple(outputs[output.name] for output in program.outputs)
                if wrong := call.wrong(values, not plan.loses_infinities):
                    where = f" in tiles of {block}" if block else ""
                    return Outcome("mismatch", f"{name}{where}{form}: {wrong}")
    outcome = call.outcome(derived, ran)
    return replace(outcome, kind="fallen back", why=GIVEN_WAY) if given_way else outcome


def _later(kernel: Kernel, call: Call, native: bool) -> str:
    """How calls after the first are wrong: of this kernel, and for some programs of one whose C++ is compiled meanwhile."""
    if wrong := call.again(kernel) or call.again(kernel):
        return wrong
    if not native or call.example.seed or 0 in call.sizes.values():
        return ""
    other = eq.compile(call.source, native="background", verify=False)
    deadline = time.monotonic() + BACKGROUND_SECONDS
    while not (wrong := call.again(other)) and time.monotonic() < deadline:
        if other.plan.code == "C++":
            return call.again(other)
        time.sleep(0.05)
    return wrong


def _native(
    tiles: TileProgram,
    tensors: Mapping[str, torch.Tensor],
    extents: Mapping[str, int],
    shards: Mapping[str, int],
    threads: int,
) -> Form:
    """A tile program as C++ for the layout of these tensors. Raises NotNative where it has none."""
    loaded = loaded_dtypes(tiles)

    def given(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: prepared(tensor, loaded.get(name)) for name, tensor in tensors.items()}

    ranks = {name: tensor.dim() for name, tensor in tensors.items()}
    compiled = NativeProgram(tiles, ranks, unit_dims(given(tensors)), extents, shards)
    return lambda tensors, scalars, extents, shards: compiled(
        given(tensors), scalars, extents, shards, threads
    )


def _candidates(compiled: Compiled) -> Iterator[tuple[str, Candidate]]:
    """The cheapest candidate of every schedule and form, and what it is called."""
    seen = set[str]()
    for candidate in compiled.candidates:
        plan = candidate.plan
        name = plan.schedule if plan.form == "rewritten" else f"{plan.schedule}, {plan.form}"
        if name not in seen and not plan.reason:
            seen.add(name)
            yield name, candidate


def _as_a_user(call: Call, device: str) -> Outcome:
    tensors = {name: tensor.to(device) for name, tensor in call.tensors.items()}
    kernel, ran, refused = eq.compile(call.source, trials=TRIALS), list[str](), ""
    for prefer in (None, *SCHEDULES):
        try:
            if prefer is not None:
                kernel = eq.compile(call.source, prefer=prefer, verify=False)
            found = kernel(**tensors, **call.scalars, sizes=call.sizes)
        except ScheduleError:
            if prefer == "multi_pass":
                raise
            continue
        except EqfuseError as error:
            if prefer is None or not error.message.startswith(COMPILER_FAILED):
                raise
            refused = f"Triton's compiler fails on a schedule that was asked for: {prefer}"
            continue
        if prefer is None:
            kernel.certificate  # noqa: B018  (raises VerificationError)
        ran.append(kernel.plan.schedule)
        wrong = call.wrong(found, not kernel.plan.loses_infinities)
        if (
            not wrong
            and prefer is None
            and (wrong := call.again(kernel, device) or call.again(kernel, device))
        ):
            wrong = f"a later call: {wrong}"
        if wrong:
            return Outcome("mismatch", f"{prefer or f'{kernel.plan.schedule}, chosen'}: {wrong}")
    outcome = call.outcome(kernel.derived, ran)
    return replace(outcome, kind="refused", why=refused) if refused else outcome


def _in_threads(run: Callable[[], Outcome], count: int, seconds: float) -> Outcome:
    """The outcome in threads of their own, at once: that of one that fails, if there is one."""
    outcomes: list[Outcome] = []
    threads = [threading.Thread(target=lambda: outcomes.append(run()), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if len(outcomes) < count:
        return Outcome("broken", f"{count - len(outcomes)} of {count} threads do not end")
    return next((outcome for outcome in outcomes if outcome.failed), outcomes[0])


def _in_a_fork(run: Callable[[], Outcome], seconds: float) -> Outcome:
    """The outcome in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, pickle.dumps(run()))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], seconds)
        sent = os.read(reader, 1 << 16) if ready else b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    if not sent:
        return Outcome("broken", "a forked child dies" if ready else "a forked child hangs")
    outcome: Outcome = pickle.loads(sent)
    return outcome


def _fused(derived: Derived) -> tuple[str, str]:
    groups = derived.groups.values()
    if derived.unfinished:
        return "fallen back", derived.unfinished
    obstacles = [obstacle for group in groups for obstacle in group.obstacles]
    if obstacles:
        return "fallen back", obstacles[0].condition
    states = max((len(group.states) for group in groups), default=0)
    return "fused", f"{states} state{'s' * (states != 1)} over an axis"


class Found(AssertionError):
    """A failing program; hypothesis shrinks it."""


class Enough(BaseException):
    """The time for shrinking is over."""


@dataclass
class Tally:
    """What became of a batch. `examples` has the first program of each outcome."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    schedules: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    judged: int = 0
    positions: int = 0
    memory: list[int] = field(default_factory=list)

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
        self.memory.append(outcome.memory)

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.examples = other.examples | self.examples
        self.schedules += other.schedules
        self.failures += other.failures
        self.judged += other.judged
        self.positions += other.positions
        self.memory += other.memory


def explore(seed: int, examples: int, device: str = "cpu", native: bool = False) -> Tally:
    """Try that many programs. What fails is shrunk, and others are tried in place of the rest, and of those that hypothesis
    draws again, a fifth of all."""
    tally, attempt, seen = Tally(), 0, set[str]()
    while tally.programs < examples:
        before = tally.programs
        failure = _explore(tally, seen, f"{seed} {attempt}", examples, device, native)
        if failure is not None:
            example, outcome = failure
            again = f"eqfuse bench fuzz --seed {seed} --examples {examples} --device {device}"
            again += " --native" * native
            tally.failures.append(f"{outcome.kind}: {outcome.why}\n{example}\n# again: {again}")
            if LOST in outcome.why:
                break
        elif tally.programs == before:
            break
        attempt += 1
    return tally


def _explore(
    tally: Tally, seen: set[str], seed: str, examples: int, device: str, native: bool
) -> tuple[Example, Outcome] | None:
    """One run of hypothesis: counts into the tally what was not seen, until it has so many examples, and returns the first
    failure, shrunk."""
    smallest: list[tuple[Example, Outcome]] = []
    found = 0.0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples - tally.programs + SEEN_BEFORE,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(programs())
    def every_schedule_agrees(example: Example) -> None:
        nonlocal found
        if smallest and time.monotonic() - found > SHRINK_SECONDS:
            raise Enough
        if not smallest and (tally.programs >= examples or str(example) in seen):
            return
        seen.add(str(example))
        try:
            with time_limit(2 * _most_seconds(native)):
                outcome = check(example, device, native)
        except TimeoutError as late:  # where nothing else has caught it
            outcome = Outcome("broken", str(late))
        if not smallest:
            tally.count(example, outcome)
        if outcome.failed:
            if not smallest:
                # threads and forks fail for what they are, and hang
                found = time.monotonic() if example.place == "here" else -math.inf
                print(
                    f"seed {seed}, {outcome.kind}: {outcome.why}\n{example}\nshrinking",
                    file=sys.stderr,
                    flush=True,
                )
            smallest[:] = [(example, outcome)]
            raise Enough if LOST in outcome.why else Found(outcome.why)

    try:
        every_schedule_agrees()
    except (Found, Enough):
        return smallest[0]
    except FlakyFailure:  # once it has failed, or where it ran before, it does not again
        if not smallest:
            raise
        return smallest[0]
    return None


def run(options: Options, report: Report) -> None:
    """Failures: wrong values, programs that are not verified, and what breaks, each shrunk."""
    total = Tally()
    for tally in _batches(options, report.path):
        total.add(tally)
        report.rows = _rows(total)
        report.write()
    report.failures += total.failures
    report.summary += _summary(total, options)


@dataclass(frozen=True)
class Batch:
    """Programs of one seed. Batches of the same key try the same programs in the same way."""

    seed: int
    examples: int
    device: str
    native: bool = False


def _batches(options: Options, path: Path | None) -> Iterator[Tally]:
    size = BATCH if options.device == "cpu" else GPU_BATCH
    starts = range(0, options.count(), size)
    batches = [
        Batch(options.seed + n, min(size, options.count() - start), options.device, options.native)
        for n, start in enumerate(starts)
    ]
    kept = path.with_suffix(".batches.jsonl") if path else None
    done = _kept(kept) if kept and options.resume else {}
    if kept and not options.resume:
        kept.unlink(missing_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        task, failed = progress.add_task("programs", total=options.count()), 0

        def counted(tally: Tally) -> Tally:
            nonlocal failed
            failed += len(tally.failures)
            progress.update(task, advance=tally.programs, description=f"programs, {failed} failed")
            return tally

        yield from (counted(done[batch]) for batch in batches if batch in done)
        left = [batch for batch in batches if batch not in done]
        jobs = options.jobs or own_cores()
        for batch, tally in _explored(left, time.monotonic() + options.seconds, jobs):
            if kept:
                _keep(kept, batch, tally)
            yield counted(tally)


def _explored(batches: list[Batch], deadline: float, jobs: int) -> Iterator[tuple[Batch, Tally]]:
    """Each batch as it is done, in processes of their own, `jobs` at once. None is begun after the deadline. A batch whose process
    dies is a failure; those beside it are tried again."""
    # spawned, not forked: what a fork does is one of the things that programs are tried for
    context = get_context("spawn")
    workers = min(len(batches), jobs)
    waiting, suspects = list(batches), list[Batch]()
    while (waiting or suspects) and time.monotonic() < deadline:
        alone = bool(suspects)
        queue = [suspects.pop()] if alone else waiting
        with ProcessPoolExecutor(
            1 if alone else workers,
            mp_context=context,
            initializer=_prepare,
            max_tasks_per_child=1,  # what is left behind by one batch fails no other one
        ) as pool:
            running: dict[Batch, Future[Tally]] = {}
            while queue or running:
                while queue and len(running) < workers and time.monotonic() < deadline:
                    batch = queue.pop(0)
                    running[batch] = pool.submit(explore, *astuple(batch))
                if not running:
                    return
                done = next((b for b, future in running.items() if future.done()), None)
                if done is None:
                    time.sleep(0.1)
                    continue
                try:
                    yield done, running.pop(done).result()
                except BrokenProcessPool:
                    suspects += [] if alone else [done, *running]
                    if alone:
                        why = f"a process dies\n# again: eqfuse bench fuzz --seed {done.seed} --examples {done.examples}"
                        yield done, Tally(Counter({("broken", ""): 1}), failures=[why])
                    break


def _prepare() -> None:
    torch.set_num_threads(1)
    os.environ["EQFUSE_CACHE"] = "off"  # what an earlier process verified would not be verified again
    if not torch.cuda.is_available():  # which reserves more addresses than there is memory
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def _keep(path: Path, batch: Batch, tally: Tally) -> None:
    content = {
        **vars(tally),
        "counts": [[*key, count] for key, count in tally.counts.items()],
        "examples": [[*key, example] for key, example in tally.examples.items()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"batch": asdict(batch), "tally": content}) + "\n")


def _kept(path: Path) -> dict[Batch, Tally]:
    found: dict[Batch, Tally] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in map(json.loads, lines):
        tally = line["tally"]
        tally["counts"] = Counter({(kind, why): count for kind, why, count in tally["counts"]})
        tally["examples"] = {(kind, why): example for kind, why, example in tally["examples"]}
        tally["schedules"] = Counter(tally["schedules"])
        found[Batch(**line["batch"])] = Tally(**tally)
    return found


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
    forms = [f"{name} {count}" for name, count in total.schedules.items() if name not in SCHEDULES]
    megabytes = [size / 1e6 for size in total.memory or [0]]
    memory = f"{median(megabytes):.0f} MB in the median, {max(megabytes):.0f} MB at most,"
    share = 100 * total.judged / max(1, total.positions)
    return [
        f"{total.programs} programs: {', '.join([*outcomes, mismatches, *broken])}; seed {options.seed}",
        f"schedules run: {schedules}",
        *([f"of programs compiled for the CPU: {'; '.join(forms)}"] if forms else []),
        f"{share:.1f}% of {total.positions} output positions are well-conditioned enough to judge",
        f"a program with all of its schedules takes {memory} of memory",
    ]
