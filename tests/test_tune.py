"""`Kernel.tune`: bounds of the search, what may win, and the file that keeps the winner."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import eqfuse as eq
from eqfuse.cache.files import keep_whole, read_whole
from eqfuse.errors import BindError, EqfuseError
from eqfuse.extract.candidates import Candidate
from eqfuse.extract.neighbours import may_become
from eqfuse.extract.shape import Shape
from eqfuse.loops.blocks import Block
from eqfuse.tune import tuner as tuner_module
from eqfuse.tune.search import Budget, Refused, TimedSearch
from eqfuse.tune.timing import called
from eqfuse.tune.tuner import Tuner, disagreement

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "eqfuse" / "tuned"


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(0))


@lru_cache
def _derived() -> eq.Kernel:
    return eq.compile(SOFTMAX, target="cpu", verify=False)


def _softmax() -> eq.Kernel:
    """As a process makes it that has tuned nothing; derived once."""
    known = _derived()
    return eq.Kernel(known.derived, known.device, False, None, False, known.trials, {})


@pytest.fixture
def largest_wins(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Timing is replaced: rolling plans are faster than all others, the one with the fewest rows fastest. Gives
    what was timed."""
    measured: list[Candidate] = []

    def measure(self: Tuner, candidate: Candidate, against: float) -> float:
        measured.append(candidate)
        rows = next(b.size or 0 for b in candidate.plan.configs[0].blocks if b.axis == "i")
        return 1e-3 * rows / (100 if candidate.plan.schedule == "rolling" else 1)

    monkeypatch.setattr(Tuner, "_measure", measure)
    return measured


def test_the_winner_is_run_from_then_on_and_says_what_was_measured(
    x: torch.Tensor, largest_wins: list[Candidate]
) -> None:
    kernel = _softmax()
    before = kernel(x=x)
    default = kernel.plan
    tuning = kernel.tune(x=x)
    assert not tuning.kept and tuning.notes == ()
    assert (default.schedule, default.measured) == ("resident", None)
    assert kernel.plan.schedule == "rolling" and kernel.plan is tuning.plan
    (rows,) = (b.size for b in kernel.plan.configs[0].blocks if b.axis == "i")
    assert rows == 16  # several steps away from any plan that the cost model gives
    assert kernel.plan.measured == pytest.approx(16e-5)
    assert "measured 0.16 ms" in repr(kernel.plan)
    assert "(measured 160 us)   <- chosen" in kernel.explain()
    times = [plan.measured for plan in kernel.plans() if plan.measured is not None]
    assert kernel.plans()[0] == kernel.plan and times == sorted(times)
    assert len(times) == len(tuning.trials) == len(set(largest_wins)) >= 5
    assert "plans tried" in str(tuning) and str(tuning.trials[0].plan) in str(tuning)
    torch.testing.assert_close(kernel(x=x), before)
    assert kernel.plan is tuning.plan and "16" in str(kernel.tile)
    assert kernel.certificate.ok


def test_another_shape_keeps_its_own_plan(x: torch.Tensor, largest_wins: list[Candidate]) -> None:
    kernel = _softmax()
    kernel.tune(x=x)
    kernel(x=x[:48])
    assert kernel.plan.measured is None


def test_the_next_process_times_nothing(x: torch.Tensor, largest_wins: list[Candidate], cache: Path) -> None:
    first = _softmax().tune(x=x)
    assert len(list(cache.iterdir())) == 1
    largest_wins.clear()
    kernel = _softmax()
    tuning = kernel.tune(x=x)
    assert tuning.kept and tuning.trials == () and largest_wins == []
    assert (tuning.plan.configs, tuning.plan.measured) == (first.plan.configs, first.plan.measured)
    assert tuning.chosen_seconds == first.chosen_seconds and kernel.plan == tuning.plan
    torch.testing.assert_close(kernel(x=x), torch.softmax(x, 1))
    assert kernel.certificate.ok
    assert "kept from an earlier search" in str(tuning)
    assert not kernel.tune(x=x, again=True).kept and largest_wins


@pytest.mark.slow
def test_other_sizes_dtypes_and_constants_are_kept_apart(
    x: torch.Tensor, largest_wins: list[Candidate], cache: Path
) -> None:
    _softmax().tune(x=x)
    _softmax().tune(x=x[:48])
    _softmax().tune(x=x.half())
    scaled = SOFTMAX.replace("x[i,j]", "(s * x[i,j])")
    for s in (1.0, 2.0):
        eq.compile(scaled, target="cpu", scalars={"s": s}).tune(x=x)
    assert len(list(cache.iterdir())) == 5


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def edited(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return edited


def _kernel(**settings: Any) -> Callable[[str], str]:
    return _edit(lambda content: content["kernels"][0].update(settings))


def _block(size: Any) -> Callable[[str], str]:
    return _edit(lambda content: content["kernels"][0]["blocks"].update(i=size))


BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "cut off": (lambda text: text[: len(text) // 2], "not JSON"),
    "no text": (lambda text: "\0\1", "not JSON"),
    "nested": (lambda text: "[" * 100_000, "not JSON"),
    "a list": (lambda text: "[]", "it is no entry"),
    "another key": (_edit(lambda c: c["key"].update(prefer="rolling")), "made for something else"),
    "another nest": (_edit(lambda c: c.update(nest="0" * 16)), "none of the program's loop nests"),
    "no schedule": (_edit(lambda c: c.pop("schedule")), "none of the program's loop nests"),
    "shards": (_edit(lambda c: c.update(shards=4)), "no number of shards"),
    "kernels": (_edit(lambda c: c.update(kernels=[])), "settings for 1 kernels"),
    "kernel": (_edit(lambda c: c.update(kernels=[7])), "have no blocks"),
    "axes": (_kernel(blocks={"i": 16}), "its blocks are not those of"),
    "no size": (_block(None), "None is no block of i"),
    "true": (_block(True), "True is no block of i"),
    "large": (_block(1 << 20), "1048576 is no block of i"),
    "odd": (_block(48), "48 is no block of i"),
    "negative": (_block(-16), "-16 is no block of i"),
    "warps": (_kernel(warps=3), "3 is no number of warps"),
    "stages": (_kernel(stages="2"), "'2' is no number of stages"),
    "seconds": (_edit(lambda c: c.update(seconds=math.nan)), "seconds is nan"),
    "instant": (_edit(lambda c: c.update(chosen_seconds=0)), "chosen_seconds is 0"),
}


@pytest.mark.parametrize("damage, reason", BROKEN.values(), ids=BROKEN)
@pytest.mark.slow(but=["cut off", "another key"])
def test_a_file_that_no_search_wrote_is_ignored_with_a_note(
    damage: Callable[[str], str],
    reason: str,
    x: torch.Tensor,
    largest_wins: list[Candidate],
    cache: Path,
) -> None:
    _softmax().tune(x=x, plans=3)
    (path,) = cache.iterdir()
    right = read_whole(path)
    assert right is not None
    keep_whole(path, damage(right.decode()).encode())
    tuning = _softmax().tune(x=x, plans=3)
    assert not tuning.kept
    (note,) = tuning.notes
    assert str(path) in note and "is not used" in note and reason in note
    assert read_whole(path) == right  # the search has written it anew


def test_what_cannot_be_decoded_is_ignored(
    x: torch.Tensor, largest_wins: list[Candidate], cache: Path
) -> None:
    _softmax().tune(x=x)
    (path,) = cache.iterdir()
    path.write_bytes(b"\xff\xfe\xff")
    (note,) = _softmax().tune(x=x).notes
    assert "its digest is not that of what it holds" in note


def test_a_folder_that_cannot_be_written_to_is_a_note(
    x: torch.Tensor, largest_wins: list[Candidate], cache: Path
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    kernel = _softmax()
    tuning = kernel.tune(x=x)
    assert kernel.plan.measured is not None
    assert "not kept for the next process" in tuning.notes[-1]


def test_a_plan_that_computes_something_else_does_not_win(
    x: torch.Tensor, largest_wins: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tuner_module.Tuner._compiled
    broken: list[int] = []

    def compiled(self: Tuner, candidate: Candidate) -> Any:
        made = run(self, candidate)
        if candidate.plan.schedule == "rolling":
            broken.append(id(made))
        return made

    kernel = _softmax()
    runner = kernel._calls.runners.runner

    def start(made: Any, **options: bool) -> Any:
        right = runner(made, **options)
        off = 1.01 if id(made) in broken else 1.0
        return lambda *arguments: {n: t * off for n, t in right(*arguments).items()}

    monkeypatch.setattr(Tuner, "_compiled", compiled)
    monkeypatch.setattr(kernel._calls.runners, "runner", start)
    tuning = kernel.tune(x=x)
    problems = [trial.problem for trial in tuning.trials if trial.plan.schedule == "rolling"]
    assert problems and all(p == "y is 1.0e-02 from what the chosen plan computes" for p in problems)
    assert kernel.plan.schedule != "rolling"


def test_a_plan_that_does_not_compile_does_not_win(
    x: torch.Tensor, largest_wins: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = Tuner._compiled

    def refuse(self: Tuner, candidate: Candidate) -> Any:
        if candidate.plan.schedule == "rolling":
            raise EqfuseError("too much shared memory", hint="smaller blocks")
        return lowered(self, candidate)

    monkeypatch.setattr(Tuner, "_compiled", refuse)
    kernel = _softmax()
    tuning = kernel.tune(x=x)
    assert "too much shared memory" in {trial.problem for trial in tuning.trials}
    assert kernel.plan.schedule != "rolling"


@pytest.mark.parametrize(
    "found, expected, problem",
    [
        ([1.0, 2.0], [1.0, 2.0], ""),
        ([1.0, 2.0001], [1.0, 2.0], ""),
        ([1.0, 2.1], [1.0, 2.0], "is 4.5e-02 from"),
        ([1.0, math.nan], [1.0, math.nan], ""),
        ([1.0, math.nan], [1.0, 2.0], "not finite"),
        ([1.0, 2.0], [1.0, math.nan], "not finite"),
        ([1.0, math.inf], [1.0, -math.inf], "not finite"),
        ([0.0, 0.0], [0.0, 0.0], ""),
        ([math.inf], [math.inf], ""),
        ([1, 2, 3], [1, 3, 2], "differs at 2 positions"),
        ([True], [True], ""),
    ],
)
def test_disagreement(found: list[Any], expected: list[Any], problem: str) -> None:
    said = disagreement(torch.tensor(found), torch.tensor(expected), 3e-4)
    assert problem in said and bool(said) == bool(problem)


# --- the bounds -----------------------------------------------------------------------------------


class _Clock:
    """Every trial takes `step` seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _searched(kernel: eq.Kernel, seconds: float, plans: int, step: float) -> tuple[TimedSearch, float]:
    """A search all steps of which are improvements, and so has no other end than its bounds."""
    clock = _Clock()

    def prepare(candidate: Candidate) -> None:
        clock.now += step

    chosen = kernel.compiled.chosen
    search = TimedSearch(prepare, lambda c, against: 1 / (1 + clock.now), Budget(seconds, plans, clock))

    def near(candidate: Candidate) -> list[Candidate]:
        config = replace(candidate.plan.configs[0], stages=candidate.plan.configs[0].stages + 1)
        return [replace(candidate, plan=replace(candidate.plan, configs=(config,)))]

    search.run(chosen, [], near)
    return search, clock.now


def test_no_trial_is_begun_that_would_end_too_late() -> None:
    search, took = _searched(_softmax(), seconds=10, plans=1000, step=3)
    assert took == 9 and len(search.trials) == 3


def test_no_more_plans_are_tried_than_asked_for() -> None:
    search, _ = _searched(_softmax(), seconds=1e9, plans=7, step=1)
    assert len(search.trials) == 7


def test_the_chosen_plan_is_tried_whatever_it_takes() -> None:
    search, took = _searched(_softmax(), seconds=1, plans=1, step=30)
    assert took == 30 and len(search.trials) == 1


def test_a_winner_has_to_win_again() -> None:
    kernel = _softmax()
    chosen, other = kernel.compiled.candidates[:2]
    times = {chosen: [1.0, 0.5], other: [0.9, 0.495]}
    search = TimedSearch(lambda c: None, lambda c, against: times[c].pop(0), Budget(60, 8))
    assert search.run(chosen, [other], lambda c: []) is chosen
    times = {chosen: [1.0, 0.5], other: [0.9, 0.4]}
    search = TimedSearch(lambda c: None, lambda c, against: times[c].pop(0), Budget(60, 8))
    assert search.run(chosen, [other], lambda c: []) is other


def test_a_plan_that_is_refused_is_tried_once() -> None:
    chosen, other = _softmax().compiled.candidates[:2]

    def prepare(candidate: Candidate) -> None:
        if candidate is other:
            raise Refused("too large")

    search = TimedSearch(prepare, lambda c, against: 1.0, Budget(60, 8))
    assert search.run(chosen, [other], lambda c: [other]) is chosen
    assert [trial.problem for trial in search.trials] == ["", "too large"]


def test_a_search_on_the_clock_of_this_machine_ends_in_time(x: torch.Tensor) -> None:
    kernel = _softmax()
    tuning = kernel.tune(x=x, seconds=2, plans=4)
    assert 1 <= len(tuning.trials) <= 4
    assert tuning.plan.measured is not None and tuning.plan.measured > 0
    torch.testing.assert_close(kernel(x=x), torch.softmax(x, 1))


def test_what_takes_far_longer_than_the_best_is_called_once() -> None:
    calls: list[int] = []

    def slow() -> None:
        calls.append(1)
        sum(range(100_000))

    assert called(slow, against_ms=1e-6).ms > 0 and len(calls) == 1
    calls.clear()
    called(slow, against_ms=math.inf)
    assert len(calls) >= 3


# --- what a step may be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own, size, may",
    [(64, 128, True), (64, 16, True), (64, 8, False), (64, 96, False), (64, 256, False), (None, 64, False)],
)
def test_blocks_are_doubled_and_halved_and_no_longer_than_their_axis(
    own: int | None, size: int, may: bool
) -> None:
    (kernel,) = _softmax().compiled.chosen.nest.kernels
    shape = Shape({"i": 100, "j": 100}, {"x": "f32"})
    assert may_become(kernel, Block("i", "grid" if own else "whole", own), size, shape) == may


def test_a_block_of_what_loads_divide_stays() -> None:
    nest = eq.compile("o[h,d] = sum[j](q[h,j] * v[h // 32, j, d])", target="cpu").compiled.chosen.nest
    shape = Shape({"h": 64, "j": 64, "d": 64}, {})
    assert not may_become(nest.kernels[0], Block("h", "grid", 32), 64, shape)
    assert may_become(nest.kernels[0], Block("d", "grid", 32), 64, shape)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, -1, math.nan, "60", None])
def test_seconds_have_to_be_positive(seconds: Any, x: torch.Tensor) -> None:
    with pytest.raises(EqfuseError, match="seconds is"):
        _softmax().tune(x=x, seconds=seconds)


@pytest.mark.parametrize("plans", [0, -1, 2.5, True])
def test_plans_have_to_be_a_positive_number(plans: Any, x: torch.Tensor) -> None:
    with pytest.raises(EqfuseError, match="plans is"):
        _softmax().tune(x=x, plans=plans)


def test_arguments_are_those_of_a_call(x: torch.Tensor) -> None:
    with pytest.raises(BindError, match="'y'"):
        _softmax().tune(x=x, y=x)
    with pytest.raises(BindError, match="'x'"):
        _softmax().tune()
    with pytest.raises(EqfuseError, match="empty"):
        _softmax().tune(x=x[:0])


def test_a_schedule_that_is_asked_for_stays(x: torch.Tensor, largest_wins: list[Candidate]) -> None:
    kernel = eq.compile(SOFTMAX, target="cpu", prefer="multi_pass")
    kernel.tune(x=x)
    assert {c.plan.schedule for c in largest_wins} == {"multi_pass"} and kernel.plan.measured


def test_numpy_arrays_and_scalars() -> None:
    kernel = eq.compile("y[i] = s * sum[j](x[i,j])", target="cpu")
    values = torch.randn(32, 64).numpy()
    assert kernel.tune(x=values, s=2.0, plans=2).plan.measured
    assert abs(kernel(x=values, s=2.0) - 2 * values.sum(1)).max() < 1e-4
