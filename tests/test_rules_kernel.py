"""What a compiled kernel says about its derivation: why not, budgets, and the same text every time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rules_programs import FUSED, UNFUSED

import eqfuse as eq
from eqfuse.errors import ScheduleError
from eqfuse.extract.kernel_shapes import NOMINAL_BLOCK
from eqfuse.rules.egraph import saturate
from eqfuse.rules.prepare import prepare
from eqfuse.terms.nodes import Output
from eqfuse.terms.parser import parse

TANH, _ = UNFUSED["tanh"]
ROUND, _ = UNFUSED["round"]
ALONE = {
    **{name: source for name, (source, _) in UNFUSED.items()},
    "round": f"n: axis[{NOMINAL_BLOCK}]\n{ROUND}",
}
"""The programs with an obstacle, of so few columns that one block makes all of a row: more blocks would read the
statistics of a row from a kernel of their own, and then nothing is in the way."""

ROOT = Path(__file__).parent.parent


def test_why_not_names_reduction_factor_and_condition() -> None:
    kernel = eq.compile(TANH, verify=False)
    (sentence,) = kernel.why_not()
    assert sentence.startswith(
        "sum[j](tanh(x[i, j] - max_j)) is not fused: in tanh(x[i, j] - max_j), "
        "no rule separates what varies along j from the value of max_j in it (line "
    )
    assert "not fused:\n    tanh(x[i, j] - max_j): no rule separates" in str(kernel.merge)


def test_why_not_is_empty_where_everything_is_fused() -> None:
    assert eq.compile(FUSED["softmax"], verify=False).why_not() == ()


@pytest.mark.parametrize("schedule", ["rolling", "split_k"])
@pytest.mark.parametrize("name", ALONE)
def test_a_forced_schedule_is_refused_with_the_reason(name: str, schedule: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        eq.compile(ALONE[name], prefer=schedule, verify=False)
    text = str(caught.value)
    assert text.startswith(f"there is no {schedule} plan for this program\n")
    assert "no " in text.splitlines()[1] and "j" in text.splitlines()[1]


def test_the_refusal_says_what_is_in_the_way() -> None:
    with pytest.raises(ScheduleError) as caught:
        eq.compile(TANH, prefer="rolling", verify=False)
    assert "tanh(x[i, j] - max_j)" in str(caught.value)
    assert "no rule separates what varies along j from the value of max_j in it" in str(caught.value)


@pytest.mark.parametrize("name", ALONE)
def test_what_does_not_fuse_takes_several_passes(name: str) -> None:
    kernel = eq.compile(ALONE[name], verify=False)
    assert {plan.schedule for plan in kernel.plans()} <= {"multi_pass", "resident"}


@pytest.mark.parametrize("schedule", ["rolling", "split_k"])
def test_a_statistic_that_many_blocks_read_is_stored_and_in_no_ones_way(schedule: str) -> None:
    """Where columns take several blocks, one kernel stores the maximum of each row, and a plain sum is left."""
    kernel = eq.compile(ROUND, target="cpu", prefer=schedule, native="off")
    assert kernel.certificate.ok
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((7, 301)), rng.standard_normal((NOMINAL_BLOCK + 1, 301))
    found = np.asarray(kernel(x=x, w=w))
    assert kernel.plan.schedule == schedule and len(kernel.plan.kernels) == 2
    assert all(planned.schedule == schedule for each in kernel.plan.kernels for planned in each.groups)
    np.testing.assert_allclose(found, eq.reference(ROUND)(x=x, w=w), rtol=1e-10, atol=1e-10)
    (sentence,) = kernel.why_not()
    assert sentence.startswith("max[j](abs(x[i, j])) is not in the kernel that reads it: kernel1 stores it")


# -- budgets -------------------------------------------------------------------------------------------


def test_an_exhausted_budget_is_reported_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = str(eq.compile(FUSED["softmax"], verify=False).merge)
    with monkeypatch.context() as patch:
        patch.setattr(saturate, "MAX_MATCHES", 40)
        kernel = eq.compile(FUSED["variance"])
        told = "\n".join(kernel.why_not())
    assert {plan.schedule for plan in kernel.plans()} == {"multi_pass", "resident"}
    assert not kernel.stats["saturated"]
    assert "saturation stopped after" in told and "compile parts of this one apart" in told
    after = eq.compile(FUSED["softmax"], verify=False)
    assert str(after.merge) == before
    assert after.stats["saturated"]


def test_the_number_of_rounds_is_a_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse(FUSED["softmax"])

    def within(rounds: int) -> tuple[tuple[Output, ...], saturate.Report]:
        monkeypatch.setattr(saturate, "MAX_ROUNDS", rounds)
        return prepare(program)

    # There is one more for each term and fact at the start, so that the first budget that is too small is below 0.
    tried = (within(-less) for less in range(saturate.MAX_TERMS))
    outputs, report = next(found for found in tried if not found[1].saturated)
    assert report.stopped.startswith(f"saturation stopped after {report.rounds} rounds") and report.rounds
    assert [output.name for output in outputs] == [output.name for output in program.outputs]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.slow(but=["softmax", "variance", "quantise_gemm", "layernorm_gemm"])
def test_programs_saturate_far_below_the_budget(name: str) -> None:
    stats = eq.compile(FUSED[name], verify=False).stats
    assert stats["saturated"]
    assert sum(stats["matches"].values()) < saturate.MAX_MATCHES / 2
    assert stats["enodes"] > 0 and stats["rounds"] < saturate.MAX_ROUNDS  # of all saturations together


# -- determinism ----------------------------------------------------------------------------------------

TEXTS: dict[str, Callable[[eq.Kernel], str]] = {
    "merge": lambda kernel: str(kernel.merge),
    "loops": lambda kernel: str(kernel.loops),
    "tile": lambda kernel: str(kernel.tile),
    "triton": lambda kernel: kernel.triton,
}

DETERMINISTIC = ("attention", "layernorm_gemm")

PRINT_ALL = """
import sys
import eqfuse as eq
sources = sys.stdin.read().split("\\0")
for source in sources:
    kernel = eq.compile(source, verify=False, target="sm_90")
    print("\\0".join([str(kernel.merge), str(kernel.loops), str(kernel.tile), kernel.triton]), end="\\0")
"""


def _printed(kernel: eq.Kernel) -> list[str]:
    return [text(kernel) for text in TEXTS.values()]


@pytest.mark.slow
def test_the_same_program_gives_the_same_text_here_and_elsewhere() -> None:
    """Twice in this process, once in a process with other hashes, in the other order."""
    sources = [FUSED[name] for name in DETERMINISTIC]
    first = [_printed(eq.compile(source, verify=False, target="sm_90")) for source in sources]
    second = [_printed(eq.compile(source, verify=False, target="sm_90")) for source in reversed(sources)]
    assert first == second[::-1]
    done = subprocess.run(
        [sys.executable, "-c", PRINT_ALL],
        input="\0".join(reversed(sources)),
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    texts = done.stdout.split("\0")[:-1]
    elsewhere = [texts[i : i + len(TEXTS)] for i in range(0, len(texts), len(TEXTS))]
    assert elsewhere[::-1] == first


def test_printing_does_not_depend_on_what_was_compiled_before() -> None:
    alone = str(eq.compile(FUSED["variance"], verify=False).merge)
    eq.compile(FUSED["fourth_moment"], verify=False)
    assert str(eq.compile(FUSED["variance"], verify=False).merge) == alone
