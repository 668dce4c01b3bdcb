"""`eq.shard` over processes of gloo: every strategy on local shards and DTensors, gradients, and faults that all
ranks see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import shard_workers as workers
import torch
import torch.distributed as dist
from shard_programs import CASES
from shard_workers import ranks_of, values_of
from test_shard import SPECIAL

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo here"
)

NAMES = (
    "attention",
    "attention, rows of outputs",
    "causal attention, both axes",
    "LayerNorm",
    "cross-entropy over the vocabulary",
    "top-k",
    "moments",
    "prefix sums",
    "linear recurrence",
    "affine maps in order",
    "counts",
    "rows alone",
)
"""Every strategy is one of some of them."""


def test_the_programs_have_every_strategy() -> None:
    assert {s for name in NAMES for s in CASES[name].strategies} == {
        s for case in CASES.values() for s in case.strategies
    }


STEPS = """
import sys
sys.path.insert(0, sys.argv[1])
from shard_programs import CASES, affine
from eqfuse.sharding.nodes import shown
with affine():
    for name in sys.argv[2:]:
        sharded = CASES[name].shard()
        forms = [sharded, sharded.gradient(CASES[name].wrt)] if CASES[name].wrt else [sharded]
        for each in forms:
            print(sorted(each.sharding.classes.items()), list(each.sharding.meshes))
            for plan in each.strategies:
                print(plan.strategy, shown(plan.steps), sep="\\n")
"""


@pytest.mark.slow
def test_steps_are_the_same_in_every_process() -> None:
    """Ranks hash texts otherwise, and have to send the same values in the same order."""
    command = [sys.executable, "-c", STEPS, str(Path(__file__).parent), *NAMES]
    printed = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert "all-gather over" in printed[0] and printed[0] == printed[1]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
def test_programs_by_every_strategy(ranks: int) -> None:
    for ran in values_of(ranks, workers.programs, NAMES):
        assert {name: set(found) for name, found in ran.items()} == {
            name: set(CASES[name].strategies) for name in NAMES
        }


def test_a_few_programs_on_two_ranks() -> None:
    names = ("attention", "prefix sums")
    assert [set(ran) for ran in values_of(2, workers.programs, names)] == [set(names)] * 2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
def test_gradients(ranks: int) -> None:
    names = (
        "attention",
        "attention, rows of outputs",
        "attention, both axes",
        "RMSNorm",
        "softmax",
        "prefix sums",
    )
    assert values_of(ranks, workers.gradients, names) == [4 * len(names)] * ranks


@pytest.mark.slow
def test_graphs_of_torch_compile_and_their_gradients() -> None:
    names = ("attention, rows of outputs", "attention, both axes", "softmax")
    assert values_of(2, workers.gradients, names, True) == [4 * len(names)] * 2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
def test_numbers_that_are_none(ranks: int) -> None:
    sources = [
        SPECIAL[name] for name in ("extremes", "positions", "softmax", "log-sum-exp", "running maximum")
    ]
    compared = values_of(ranks, workers.special, sources, (torch.float32, torch.float64))
    assert len(set(compared)) == 1 and compared[0] >= 2 * 3 * 5 * 2


@pytest.mark.slow
def test_a_mesh_of_two_dimensions() -> None:
    assert values_of(4, workers.two_dimensions) == [3] * 4


@pytest.mark.slow
def test_two_pieces_on_each_rank() -> None:
    assert values_of(4, workers.zigzag) == [("gather_operands",)] * 4


@pytest.mark.slow
def test_sizes_of_axes_that_no_tensor_has() -> None:
    assert values_of(2, workers.sized) == [2] * 2


@pytest.mark.slow
def test_ranks_that_promise_to_have_as_many_positions() -> None:
    for error, text in values_of(2, workers.as_many):
        assert error == "EqfuseError" and "ranks have {'j': (3, 2)} positions" in text


FAULTS = {
    "program": "program",
    "axes": "program",
    "dtype": "dtypes",
    "shape": "shapes",
    "scalar": "scalars",
    "strategy": "strategy",
}


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.slow(but=["dtype"])
def test_ranks_that_call_otherwise_are_named_by_all(what: str) -> None:
    """Each rank names one that differs from it; afterwards all go on."""
    found = values_of(3, workers.differing, what)
    for rank, (error, text) in enumerate(found):
        other = 0 if rank == 1 else 1
        assert error == "EqfuseError", found
        assert f"rank {other} of 'r' differs from rank {rank} in its {FAULTS[what]}" in text


ARGUMENTS = {
    "argument": "tensor 'w' is not given",
    "argument's rank": "'x' has 2 dimensions, the tensor given has shape (4,)",
    "shards": "this rank has 4 positions of 'j' in 'x', 3 in 'w'",
}


@pytest.mark.parametrize("what", ARGUMENTS)
@pytest.mark.slow(but=["shards"])
def test_a_rank_whose_arguments_are_wrong_is_named_by_the_others(what: str) -> None:
    found = values_of(3, workers.differing, what)
    error, text = found[1]
    assert error == "BindError" and ARGUMENTS[what] in text
    for error, text in (found[0], found[2]):
        assert error == "EqfuseError" and "rank 1 of 'r' was not called as the program asks" in text


@pytest.mark.slow
def test_what_is_wrong_on_one_rank_reaches_those_that_share_no_dimension_with_it() -> None:
    found = values_of(4, workers.crossed)
    assert [error for error, _ in found] == ["BindError", "EqfuseError", "EqfuseError", "EqfuseError"]
    assert all("was not called as the program asks" in text for _, text in found[1:])


@pytest.mark.slow
def test_another_program_is_found_with_dtensors() -> None:
    found = values_of(2, workers.differing_dtensors)
    for rank, (error, text) in enumerate(found):
        assert (
            error == "EqfuseError"
            and f"rank {1 - rank} of 'r' differs from rank {rank} in its program" in text
        )


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(when: str) -> None:
    found = ranks_of(3, workers.lost, when, seconds=90)
    assert found[2] is None
    for rank, ended in enumerate(found[:2]):
        assert ended is not None and ended.error == "EqfuseError", ended
        assert f"rank {rank} waited in vain for the others over 'r'" in ended.text


@pytest.mark.slow
def test_a_rank_that_does_not_call_ends_the_others_by_the_time_out() -> None:
    found = ranks_of(3, workers.absent, seconds=120)
    assert found[2] is not None and not found[2].error
    for ended in found[:2]:
        assert ended is not None and ended.error == "EqfuseError", ended
        assert (
            "waited in vain for the others over 'r'" in ended.text and "another rank has ended" in ended.text
        )
