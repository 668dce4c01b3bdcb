"""The training example: its text, and curves that part are told apart."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "training.py"


@pytest.fixture(scope="module")
def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_after_each_token_one_of_two(training: ModuleType) -> None:
    one, two = training.batches(50, 3, 40, 2), training.batches(50, 3, 40, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)) and one[0].shape == (3, 41)
    follow: dict[int, set[int]] = {}
    for ids in one:
        for row in ids.tolist():
            for token, after in pairwise(row):
                follow.setdefault(token, set()).add(after)
    assert max(map(len, follow.values())) == 2


def test_curves_that_part_are_told_apart(training: ModuleType) -> None:
    curve = [4.0 - n / 100 for n in range(100)]
    assert training.parted(curve, curve) == 0
    assert training.parted([loss * 1.01 for loss in curve], curve) == pytest.approx(0.01, rel=1e-3)
