"""Kernels for GPUs called as users call them, their emitted modules run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.devices import Target
from eqfuse.tile.triton import launch
from eqfuse.tile.triton.launch import interpret

CHAINED = """
    A[i] = sum[j](x[i,j])
    B[i] = max[j](x[i,j])
    C[j] = sum[i](x[i,j] * A[i])
    D[i] = sum[j](x[i,j] * C[j])
    F[i] = sum[j](D[i] * A[j])
    return {}
"""


def emulated(text: str, name: str) -> Callable[..., Any]:
    """In the place of what runs emitted modules on a GPU."""
    return partial(interpret, text, name)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls a kernel for a GPU on CPU tensors."""
    monkeypatch.setattr(launch, "TritonProgram", emulated)

    def run(kernel: eq.Kernel, **tensors: torch.Tensor) -> Any:
        monkeypatch.setattr(Target, "of", lambda target, tensors: target.device)
        return kernel(**tensors)

    return run


@pytest.mark.parametrize("prefer", [None, "rolling", "split_k", "resident", "multi_pass"])
@pytest.mark.parametrize("returned", ["F, A", "F, B, A", "C, F", "D, C, A, B", "A, B, C, D, F"])
@pytest.mark.slow(but=["D, F-None", "D, F-split_k"])
def test_outputs_come_in_the_order_of_the_program(
    call: Callable[..., Any], returned: str, prefer: str | None
) -> None:
    source = CHAINED.format(returned)
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    kernel = eq.compile(source, target="sm_90", prefer=prefer, verify=False)
    made, wanted = call(kernel, x=x), eq.reference(source)(x=x)
    for found, exact, name in zip(made, wanted, returned.split(", "), strict=True):
        assert np.allclose(found, exact, rtol=1e-4, atol=1e-4), name
    for candidate in kernel.compiled.candidates:
        names = [buffer.name for buffer in candidate.nest.buffers if buffer.is_output]
        assert names == returned.split(", "), candidate.plan.schedule
