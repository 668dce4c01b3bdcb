"""Random programs: every schedule gives what the unfused program gives; and the judge can say no."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import hypothesis
import needs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase

from bench import fuzz_report
from bench.fuzz_report import Batch, Outcome, check, explore
from bench.judge import MORE_RUNS, expected
from bench.magnitudes import MAGNITUDES
from bench.programs import Example, Input, programs
from bench.report import Options
from eqfuse.kernel import Kernel
from eqfuse.loops.plan import SCHEDULES
from eqfuse.terms.parser import parse
from eqfuse.tile.cpu.run import CpuProgram
from eqfuse.tile.native.run import NativeProgram
from eqfuse.verify.certificate import Counterexample

SOFTMAX = Example(
    "x: f32[i,j]\na[i] = max[j](x[i,j])\nb[i,j] = exp(x[i,j] - a[i])\nc[i,j] = b[i,j] / sum[j](b[i,j])",
    (Input("x", "f32", ("i", "j"), "normal", "transposed"),),
    {"i": 3, "j": 7},
    {},
    block=2,
    shards=2,
    seed=0,
)


@hypothesis.settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.generate,),  # a program that fails takes minutes to shrink: `eqfuse bench fuzz` does so
    suppress_health_check=list(HealthCheck),
)
@hypothesis.given(programs())
@pytest.mark.slow
def test_every_schedule_of_a_random_program_is_right(example: Example) -> None:
    outcome = check(example)
    assert not outcome.failed, f"{outcome.kind}: {outcome.why}\n{example}"


def test_a_cascade_counts_as_fused_and_runs_in_every_schedule() -> None:
    outcome = check(SOFTMAX)
    assert (outcome.kind, len(outcome.ran)) == ("fused", 4)
    assert outcome.judged == outcome.positions == 21


def test_what_cannot_be_fused_and_what_is_refused_rightly_or_wrongly() -> None:
    rounded = "x: f32[i,j]\ny[i] = sum[j](round(x[i,j] / max[j](abs(x[i,j]))))"
    assert check(replace(SOFTMAX, source=rounded)).kind == "fallen back"
    assert check(replace(SOFTMAX, source="x: f32[i,j]\ny[i] = sum[j](x[i])")).kind == "refused wrongly"
    never = check(replace(SOFTMAX, source="x: f32[i,j]\ny[i] = sum[j](sqrt(-1 - sq(x[i,j])))"))
    assert (never.kind, never.why) == ("refused", "an output is infinite or NaN whatever the inputs")
    dropped = "x: f32[i,j]\ny[i] = sin(sum[j](where(j == 0, x[i,j], -inf)))"
    empty = check(replace(SOFTMAX, source=dropped, sizes={"i": 3, "j": 0}))  # 0 at the sizes of the call
    assert (empty.kind, empty.why) == (never.kind, never.why)


def test_a_fused_form_with_another_infinity_gives_way_to_the_program_as_written() -> None:
    source = "x: f32[i]\nb = sum[i](where(i < 2, x[i], -inf))\ny = sum[i](b * x[i])"
    inputs = (Input("x", "f32", ("i",), "close"),)
    outcome = check(replace(SOFTMAX, source=source, inputs=inputs, sizes={"i": 7}))
    assert (outcome.kind, outcome.why) == ("fallen back", fuzz_report.GIVEN_WAY)
    finite = Counterexample("prepared", "y", (), 1.0, 2.0, {})
    special = replace(finite, expected=math.nan)
    assert [fuzz_report.is_of_infinities(each) for each in (None, finite, special)] == [False, False, True]
    compared = replace(finite, found=math.inf, inputs={"x": np.array([1.0, -math.inf])})
    assert fuzz_report.is_of_infinities(compared)
    assert not fuzz_report.is_of_infinities(replace(compared, inputs={"x": np.array([1.0, 2.0])}))
    assert not fuzz_report.is_of_infinities(replace(special, residues=(1, 2, "p")))


def test_schedules_are_those_of_all_axes_where_calls_join_some() -> None:
    source = (
        "x: f32[j,k,i]\na[k,i,j] = x[j,k,i] - max[j](x[j,k,i])\ny[k,i] = sum[j](a[k,i,j] - max[j](a[k,i,j]))"
    )
    inputs = (Input("x", "f32", ("j", "k", "i"), "normal"),)
    outcome = check(replace(SOFTMAX, source=source, inputs=inputs, sizes={"i": 3, "j": 3, "k": 5}))
    assert outcome.kind == "fused" and len(outcome.ran) == 4


@pytest.mark.slow
def test_a_tensor_that_is_read_behind_an_axis_under_a_condition_on_it() -> None:
    inputs = (Input("x", "f32", ("i", "j"), "normal"), Input("o", "i64", ("j+1",), "parts of i"))
    inside = "where((o[j] <= i) & (i < o[j + 1]), x[i,j], 0)"
    head = "x: f32[i,j]\no: i64[j1]\ny[i] = "
    example = replace(SOFTMAX, source=f"{head}max[j]({inside})", inputs=inputs)
    assert check(example).kind == "fused"
    guarded = replace(example, source=f"{head}max[j](where(j == 3, {inside}, -inf))")
    assert check(guarded).kind == "refused"
    square = replace(
        guarded, source=f"{guarded.source}".replace("y[i]", "j: axis[i]\ny[i]"), sizes={"i": 5, "j": 5}
    )
    assert check(square).kind == "refused"
    wrong = replace(guarded, inputs=(inputs[0], replace(inputs[1], axes=("j",))), sizes={"i": 3, "j": 7})
    assert check(wrong).kind != "refused"


@pytest.mark.slow
def test_a_wrong_kernel_is_a_mismatch_and_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CpuProgram.__call__

    def wrong(self: CpuProgram, *args: object) -> dict[str, torch.Tensor]:
        return {name: value + 0.001 for name, value in original(self, *args).items()}  # type: ignore[arg-type]

    monkeypatch.setattr(CpuProgram, "__call__", wrong)
    monkeypatch.setattr(fuzz_report, "SCHEDULES", ("rolling",))
    assert check(SOFTMAX).kind == "mismatch"
    tally = explore(seed=0, examples=1)
    assert tally.programs == 1
    (failure,) = tally.failures
    assert failure.startswith("mismatch: ")
    assert "eqfuse bench fuzz --seed 0 --examples 1" in failure


def test_a_later_call_that_differs_or_keeps_its_tensors_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, calls, kept = Kernel.__call__, list[int](), list[object]()

    def second(self: Kernel, *args: object, **given: object) -> object:
        calls.append(1)
        return original(self, *args, **given) + (len(calls) > 1)

    def keeping(self: Kernel, *args: object, **given: object) -> object:
        kept.append(given)
        return original(self, *args, **given)

    monkeypatch.setattr(fuzz_report, "SCHEDULES", ("rolling",))
    monkeypatch.setattr(Kernel, "__call__", second)
    assert "a later call: c[0, 0] is" in check(SOFTMAX).why
    monkeypatch.setattr(Kernel, "__call__", keeping)
    assert check(SOFTMAX).why.endswith("a later call: 1 of its 1 tensors outlive a call")


def test_the_memory_that_a_program_takes_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    held = 300 << 20

    def greedy(example: Example, device: str, native: bool) -> Outcome:
        return Outcome("fused", str(len(b"x" * held)))

    monkeypatch.setattr(fuzz_report, "_judged", greedy)
    assert held // 2 < check(SOFTMAX).memory < 4 * held


def test_what_is_late_once_is_a_failure_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where C++ was compiled once, the second attempt is not late."""
    calls: list[Example] = []

    def late_once(example: Example, device: str, native: bool) -> Outcome:
        calls.append(example)
        if len(calls) == 1:
            raise TimeoutError("not done after 1 s")
        return Outcome("fused", "")

    monkeypatch.setattr(fuzz_report, "check", late_once)
    tally = explore(seed=0, examples=1, native=True)
    assert len(calls) > 1 and tally.counts["broken", ""] == 1
    assert tally.failures[0].startswith("broken: not done after 1 s\n")


def judged(source: str, x: torch.Tensor, found: torch.Tensor, dtype: str = "f32") -> str:
    program = parse(source)
    (output,) = expected(program, {"x": x}, {}, {}, {"x": dtype})
    return output.wrong(found)


def test_the_judge_allows_rounding_as_far_as_the_program_is_sensitive_to_it() -> None:
    x = torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = x.double().sum()
    assert not judged("y = sum[i](x[i])", x, (exact * (1 + 1e-6)).float())
    assert judged("y = sum[i](x[i])", x, (exact * (1 + 1e-5)).float())
    wide = "y = sum[i](x[i] * 1e4) - sum[i](x[i] * 1e4 - 1)"
    assert not judged(wide, x, torch.tensor(40.05))
    assert judged(wide, x, torch.tensor(41.0))


def test_the_judge_allows_what_instructions_that_round_once_make_of_a_difference_that_cancels() -> None:
    """`a b - a b` is what the product is rounded by where the difference is taken of the exact one."""
    x = torch.rand(3000, generator=torch.Generator().manual_seed(0)) + 0.5
    rounded = x.double().square() - x.square().double()
    assert not judged("y[i] = x[i] * x[i] - x[i] * x[i]", x, rounded.float())
    assert judged("y[i] = x[i] * x[i] - x[i] * x[i]", x, rounded.float() + 1e-5)


def test_the_judge_allows_what_adding_up_tiles_one_by_one_makes_of_equal_terms() -> None:
    x = torch.full((1050,), 0.7)
    so_far = torch.zeros(())
    for start in range(0, 1050, 32):
        so_far = so_far + x[start : start + 32].sum()
    off = float(so_far / 1050 - x[0])
    assert abs(off) > 1e-7
    assert not judged("y[i] = x[i] - mean[i](x[i])", x, torch.full((1050,), -off))
    assert judged("y[i] = x[i] - mean[i](x[i])", x, torch.full((1050,), -20 * off))


def test_the_judge_allows_an_extreme_that_is_computed_anew() -> None:
    """Where an element is its row's greatest but for rounding, some rise above what is taken for that."""
    x = torch.rand(40, generator=torch.Generator().manual_seed(0)) * 3 + 1
    source = "d[i] = x[i] * 3\ne[i] = d[i] - max[i](d[i])\nf[i] = max(e[i], max[i](e[i]))"
    source += "\ny[i] = f[i] - mean[i](f[i])\nreturn y"
    assert not judged(source, x, torch.full((40,), -1e-8))
    assert judged(source, x, torch.full((40,), -1e-4))


def test_what_is_exact_in_float64_has_no_rounding_of_its_own() -> None:
    """numpy adds the rows of a matrix one by one."""
    x = torch.full((2100, 3), 0.1, dtype=torch.float64)
    exact = torch.tensor([math.fsum(column) for column in x.t().tolist()], dtype=torch.float64)
    assert not judged("y[j] = sum[i](x[i,j])", x, exact, "f64")
    assert judged("y[j] = sum[i](x[i,j])", x, exact + 1e-10, "f64")


def test_the_judge_knows_that_products_overflow_in_some_orders() -> None:
    great = torch.tensor([1e20, 0.0, 1e20])
    assert not judged("y = prod[i](x[i])", great, torch.tensor(math.nan))
    assert judged("y = prod[i](x[i])", great / 1e10, torch.tensor(math.nan))
    assert judged("y = prod[i](x[i])", great / 1e10, torch.tensor(1.0))


def test_the_judge_tells_special_values_apart() -> None:
    x = torch.zeros(2, 2)
    source = "y[i] = sum[j](x[i,j]) / sum[j](x[i,j])"
    assert not judged(source, x, torch.full((2,), np.nan))
    assert "y[0] is 0, not nan" in judged(source, x, torch.zeros(2))
    assert "shape" in judged(source, x, torch.full((3,), np.nan))


def test_an_outcome_fails_where_a_value_is_wrong_not_where_a_program_is_refused() -> None:
    kinds = ("fused", "fallen back", "refused", "mismatch", "not verified", "refused wrongly", "broken")
    assert [Outcome(kind, "").failed for kind in kinds] == [False] * 3 + [True] * 4


def test_the_judge_lets_overflow_be_and_not_what_the_unfused_program_keeps_in_range() -> None:
    x = torch.tensor([[3e37] * 20, [1e-42] * 20])
    safe = "y[i] = sum[j](x[i,j] / max[j](abs(x[i,j])))"
    assert not judged(safe, x, torch.tensor([20.0, 20.0]))
    assert "y[0] is inf, not 20" in judged(safe, x, torch.tensor([torch.inf, 20.0]))
    assert "y[1] is 0, not 20" in judged(safe, x, torch.tensor([20.0, 0.0]))
    overflowing = "y[i] = sum[j](x[i,j]) / max[j](abs(x[i,j]))"
    assert not judged(overflowing, x, torch.tensor([torch.inf, 20.0]))
    assert not judged(overflowing, x, torch.tensor([20.0, 20.0]))


def test_the_judge_lets_a_sum_need_headroom_for_what_multiplies_all_its_terms() -> None:
    x = torch.tensor([[3e37] * 20, [3.0] * 20])
    for scaled in ("c * x[i,j] / 2", "-x[i,j] / (2 / c)"):
        source = f"c = 0.001\ny[i] = sum[j]({scaled})"
        assert not judged(source, x, torch.tensor([torch.inf, 0.03 if scaled[0] == "c" else -0.03]))
        assert "y[1] is inf" in judged(source, x, torch.tensor([torch.inf, torch.inf]))
    varying = "y[i] = sum[j](0.001 * x[i,j] / (1 + j))"
    assert "y[0] is inf" in judged(
        varying.replace("0.001 * x[i,j]", "x[i,j] * exp(-7 - j)"), x, torch.full((2,), torch.inf)
    )


def test_the_judge_knows_positions_that_are_right_by_luck() -> None:
    x = torch.tensor([[3e30, 2e30, 1.0], [3.0, 2.0, 1.0]])
    chosen = "y[i] = argmax[j](sq(x[i,j]))"
    assert not judged(chosen, x, torch.tensor([1, 0]))
    assert "y[1] is 1, not 0" in judged(chosen, x, torch.tensor([0, 1]))


def test_the_judge_knows_reals_that_are_right_by_luck() -> None:
    """The sum of squares of the first row is out of range, and hardly matters."""
    x = torch.tensor([[3e30, 2e30], [3.0, 2.0]])
    normed = "y[i] = 100000 + x[i,0] * rsqrt(sum[j](sq(x[i,j])))"
    right = torch.tensor([100000.83, 100000.83])
    assert not judged(normed, x, right)
    assert not judged(normed, x, torch.tensor([torch.nan, right[1]]))
    assert "y[1] is nan" in judged(normed, x, torch.tensor([right[0], torch.nan]))
    small = "y[i] = 1 / (1 + sum[j](sq(x[i,j])))"
    assert "y[0] is 5" in judged(small, x, torch.tensor([5.0, 1 / 14]))


def test_the_judge_knows_what_rounding_alone_puts_out_of_range() -> None:
    """A mean of equal numbers may be a rounding beside them, and its square overflow."""
    x = torch.tensor([[1.1e37] * 3, [1.1] * 3])
    assert not judged("y[i] = std[j](x[i,j])", x, torch.tensor([torch.inf, 0.0]))
    assert "y[1] is inf" in judged("y[i] = std[j](x[i,j])", x, torch.tensor([0.0, torch.inf]))


def test_the_judge_allows_a_cast_of_the_terms_of_what_it_is_applied_to() -> None:
    x, source = torch.tensor([[300.7, 200.0]]), "y[i] = max[j](bf16(x[i,j] - 300))"
    assert not judged(source, x, torch.tensor([1.0]))
    assert judged(source, x, torch.tensor([40.0]))


def test_the_judge_takes_the_variance_of_equal_values_for_0_where_float64_makes_an_infinity_of_its_rounding() -> (
    None
):
    source = "x: f32[i]\nk: axis[7]\ny[i] = f16(var[k](x[i] * 1.1))"
    x = torch.tensor([1.2345678e37, 1.7e37, 3.3e36])
    (output,) = expected(parse(source), {"x": x}, {}, {}, {"x": "f32"})
    assert np.isinf(output.exact).any()
    assert not output.wrong(torch.zeros(3, dtype=torch.float16))


def test_the_judge_allows_anything_where_a_sum_is_in_range_in_some_orders_alone() -> None:
    x = torch.tensor([3e38, -3e38, 2e38, 1e38, -3e38])
    assert not judged("y = sum[i](x[i])", x, torch.tensor(torch.inf))
    assert judged("y = sum[i](x[i])", x / 10, torch.tensor(torch.inf))


def test_the_judge_tries_more_where_few_runs_are_on_one_side_by_luck() -> None:
    """The greatest of three rounding errors is below 0 in one run out of eight."""
    source = "y[i] = min(max[j](x[i,j] - x[i,j] * w[j]), 0)"
    x, w = torch.ones(400, 3), torch.ones(3)
    given, dtypes = {"x": x, "w": w}, {"x": "f32", "w": "f32"}
    (few,), (more,) = (expected(parse(source), given, {}, {}, dtypes, times) for times in (8, MORE_RUNS))
    found = torch.full((400,), -1e-8)
    assert few.wrong(found) and not more.wrong(found)
    assert more.wrong(torch.full((400,), -1e-3))


def test_the_judge_allows_nan_for_an_infinity_where_a_plan_loses_them() -> None:
    source, x = "y[i] = sum[j](x[i,j])", torch.full((2, 2), torch.inf)
    (output,) = expected(parse(source), {"x": x}, {}, {}, {"x": "f32"})
    lost = torch.full((2,), np.nan)
    assert output.wrong(lost) and not output.wrong(lost, infinities=False)


def test_tensors_of_every_magnitude_layout_and_draw() -> None:
    sizes, generator = {"i": 5, "j": 7}, torch.Generator().manual_seed(0)
    for magnitude in MAGNITUDES:
        x = Input("x", "f32", ("i", "j"), "positive", "contiguous", magnitude).tensor(sizes, generator)
        assert x.isfinite().all() and x.any()
    rows = Input("x", "f64", ("i", "j"), "positive", "contiguous", "rows").tensor(sizes, generator).log10()
    assert (rows.amax(1) - rows.amin(1) < 2).all() and rows.amax() - rows.amin() > 20
    offset = Input("x", "f32", ("i", "j"), "normal", "offset").tensor(sizes, generator)
    assert offset.storage_offset() and offset.shape == (5, 7)
    parts = Input("o", "i64", ("i+1",), "parts of j")
    assert parts.declared == "o: i64[i1]"
    found = parts.tensor(sizes, generator)
    assert found.shape == (6,) and (found.diff() >= 0).all() and found.max() <= 7


def test_tensors_of_pairs_truth_values_holes_and_special_values() -> None:
    sizes, generator = {"i": 40, "j": 7}, torch.Generator().manual_seed(0)
    pairs = Input("v", "f32", ("i*2",), "normal")
    assert pairs.tensor(sizes, generator).shape == (80,) and pairs.declared == "v: f32[i2]"
    truth = Input("t", "bool", ("i",), "true").tensor(sizes, generator)
    assert truth.dtype == torch.bool and truth.any() and not truth.all()
    holes = Input("x", "f16", ("i", "j"), "holes").tensor(sizes, generator)
    assert holes.isneginf().all(1).any() and not holes.isneginf().all()
    special = Input("x", "f32", ("i", "j"), "normal", magnitude="special").tensor(sizes, generator)
    assert special.isnan().any() and special.isposinf().any() and special.isneginf().any()
    assert special.isfinite().double().mean() > 0.5


def test_a_program_runs_in_threads_and_in_a_forked_child() -> None:
    here = threading.current_thread(), os.getpid()
    seen: list[threading.Thread] = []

    def fused() -> Outcome:
        seen.append(threading.current_thread())
        return Outcome("fused", str(os.getpid()))

    assert fuzz_report._in_threads(fused, 3, 60).kind == "fused"
    assert len(set(seen)) == 3 and here[0] not in seen
    assert fuzz_report._in_a_fork(fused, 60).why != str(here[1])
    kinds = iter(["fused", "mismatch", "fused"])
    assert fuzz_report._in_threads(lambda: Outcome(next(kinds), ""), 3, 60).kind == "mismatch"
    assert fuzz_report._in_threads(lambda: time.sleep(1), 1, 0.2).kind == "broken"  # type: ignore[arg-type, return-value]
    assert fuzz_report._in_a_fork(lambda: time.sleep(60), 0.2).why == "a forked child hangs"  # type: ignore[arg-type, return-value]
    assert fuzz_report._in_a_fork(lambda: os._exit(3), 60).why == "a forked child dies"


def test_no_program_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fused(example: Example, device: str, native: bool) -> Outcome:
        tried.append(str(example))
        return Outcome("fused", "")

    monkeypatch.setattr(fuzz_report, "check", fused)
    assert explore(seed=910000, examples=50).programs == len(tried) == len(set(tried)) == 50


@pytest.mark.slow
def test_batches_are_kept_and_gone_on_with(tmp_path: Path) -> None:
    kept = tmp_path / "fuzz.batches.jsonl"
    tally = explore(seed=3, examples=2)
    fuzz_report._keep(kept, Batch(3, 2, "cpu"), tally)
    assert fuzz_report._kept(kept) == {Batch(3, 2, "cpu"): tally}
    options = Options(examples=2, seed=3, resume=True)
    assert list(fuzz_report._batches(options, tmp_path / "fuzz.json")) == [tally]
    late = Options(examples=4, seed=4, seconds=0)
    assert list(fuzz_report._batches(late, tmp_path / "fuzz.json")) == []
    assert not kept.exists()


def test_a_process_that_has_lost_its_gpu_tries_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Outcome("broken", "AcceleratorError: CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(fuzz_report, "check", lambda example, device, native: lost)
    tally = explore(seed=0, examples=5, device="cuda")
    assert tally.programs == len(tally.failures) == 1


def test_a_program_as_a_user_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    call, original = fuzz_report.Call.of(SOFTMAX), Kernel.__call__
    assert set(fuzz_report._as_a_user(call, "cpu").ran) == set(SCHEDULES)
    monkeypatch.setattr(Kernel, "__call__", lambda self, **given: original(self, **given) + 1)
    assert fuzz_report._as_a_user(call, "cpu").kind == "mismatch"


@needs.cxx
@pytest.mark.slow
def test_compiled_cpp_is_held_against_float64_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "C++" in check(SOFTMAX, native=True).ran
    original = NativeProgram.__call__

    def wrong(self: NativeProgram, *args: object) -> dict[str, torch.Tensor]:
        return {name: value + 0.001 for name, value in original(self, *args).items()}  # type: ignore[arg-type]

    monkeypatch.setattr(NativeProgram, "__call__", wrong)
    found = check(SOFTMAX, native=True)
    assert found.kind == "mismatch" and "as C++" in found.why
    assert check(SOFTMAX).kind == "fused"
