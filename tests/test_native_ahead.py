"""Who asks memory for the next block's tile: over all passes that read a tile, each part of it once."""

from __future__ import annotations

import needs
import pytest
import torch
from test_native_schedule import context

import eqfuse as eq
from eqfuse.tile.native.ahead import PARTS

pytestmark = needs.cxx


def asked(source: str, **tensors: torch.Tensor) -> list[list[int]]:
    """The parts that each load of the first kernel asks for, in the order of the passes."""
    return [list(parts) for parts in context(source, **tensors).asks.values()]


X = torch.randn(64, 8192)


def test_passes_share_what_they_ask_for_by_their_work() -> None:
    greatest, exponentials = asked("y[r] = max[c](x[r,c]) + log(sum[c](exp(x[r,c] - max[c](x[r,c]))))", x=X)
    assert [*greatest, *exponentials] == list(range(PARTS))
    assert 0 < len(greatest) < len(exponentials)


def test_a_pass_that_memory_writes_for_asks_for_nothing() -> None:
    *folds, stores = asked("y[r,c] = x[r,c] - mean[c](x[r,c])", x=X)
    assert folds == [list(range(PARTS))] and stores == []


def test_what_is_read_once_is_not_asked_for() -> None:
    assert asked("s[r] = sum[c](x[r,c]) / sqrt(sum[c](sq(x[r,c])))", x=X) == []


@pytest.mark.parametrize("columns", [8192, 8191, 70])
def test_results_of_rows_that_ask_ahead(columns: int) -> None:
    x = X[:, :columns]
    kernel = eq.compile("y[r,c] = f8e4m3(x[r,c] / max[c](abs(x[r,c])) * 448)", native="wait", verify=False)
    expected = (x / x.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn)
    assert torch.equal(kernel(x=x.contiguous()).float(), expected.float())
