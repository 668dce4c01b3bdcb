"""Random programs: every schedule gives what the unfused program gives; and the judge can say no."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase

from bench import fuzz_report
from bench.fuzz_report import Outcome, check, explore
from bench.judge import expected
from bench.programs import Example, Input, programs
from eqfuse.terms.parser import parse
from eqfuse.tile.cpu import CpuProgram

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
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@hypothesis.given(programs())
def test_every_schedule_of_a_random_program_is_right(example: Example) -> None:
    outcome = check(example)
    assert not outcome.failed, f"{outcome.kind}: {outcome.why}\n{example}"


def test_a_cascade_counts_as_fused_and_runs_in_every_schedule() -> None:
    outcome = check(SOFTMAX)
    assert (outcome.kind, len(outcome.ran)) == ("fused", 4)
    assert outcome.judged == outcome.positions == 21


def test_what_cannot_be_fused_and_what_is_no_program() -> None:
    rounded = "x: f32[i,j]\ny[i] = sum[j](round(x[i,j] / max[j](abs(x[i,j]))))"
    assert check(replace(SOFTMAX, source=rounded)).kind == "fallen back"
    assert check(replace(SOFTMAX, source="x: f32[i,j]\ny[i] = sum[j](x[i])")).kind == "refused"
    never = check(replace(SOFTMAX, source="x: f32[i,j]\ny[i] = sum[j](sqrt(-1 - sq(x[i,j])))"))
    assert (never.kind, never.why) == ("refused", "an output is infinite or NaN whatever the inputs")


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


def test_the_judge_tells_special_values_apart() -> None:
    x = torch.zeros(2, 2)
    source = "y[i] = sum[j](x[i,j]) / sum[j](x[i,j])"
    assert not judged(source, x, torch.full((2,), np.nan))
    assert "y[0] is 0, not nan" in judged(source, x, torch.zeros(2))
    assert "shape" in judged(source, x, torch.full((3,), np.nan))


def test_an_outcome_fails_where_a_value_is_wrong_not_where_a_program_is_refused() -> None:
    kinds = ("fused", "fallen back", "refused", "mismatch", "not verified", "broken")
    assert [Outcome(kind, "").failed for kind in kinds] == [False] * 3 + [True] * 3
