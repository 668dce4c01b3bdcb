"""Memory of large outputs: taken again once nobody holds it, and never before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import needs
import pytest
import torch

import eqfuse as eq
from eqfuse.tile.native import memory
from eqfuse.tile.native.memory import LEAST, Memory

SHAPE = (LEAST // 4, 1)
HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda y: y,
    "a view": lambda y: y[5:7],
    "an array": lambda y: y.numpy(),
    "a view's array": lambda y: y[5:].numpy()[3:],
    "the storage": lambda y: y.untyped_storage(),
    "a capsule": lambda y: torch.utils.dlpack.to_dlpack(y),
    "a graph": lambda y: y.requires_grad_().square().sum(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_is_held_is_not_given_again(name: str) -> None:
    pool = Memory(8 * LEAST)
    y = pool.empty(SHAPE, torch.float32)
    assert y.shape == SHAPE and y.is_contiguous() and y.dtype == torch.float32
    address = y.data_ptr()
    held: list[Any] = [HOLDERS[name](y)]
    del y
    others = [pool.empty(SHAPE, torch.float32).data_ptr() for _ in range(2)]
    assert address not in others and others[0] == others[1]
    held.clear()
    again = [pool.empty(SHAPE, torch.float32), pool.empty(SHAPE[:1], torch.int32)]
    assert {y.data_ptr() for y in again} == {address, others[0]}


def test_shared_and_resized_memory_is_left_to_its_holders() -> None:
    pool = Memory(8 * LEAST)
    for change in (lambda y: y.share_memory_(), lambda y: y.resize_(2 * SHAPE[0], 1)):
        y = pool.empty(SHAPE, torch.float32)
        change(y)
        address = y.untyped_storage()._cdata
        del y
        assert pool.empty(SHAPE, torch.float32).untyped_storage()._cdata != address


def test_no_more_is_kept_than_was_said() -> None:
    pool = Memory(2 * LEAST)
    kept = [pool.empty(SHAPE, torch.float32) for _ in range(5)]
    assert len({y.data_ptr() for y in kept}) == 5
    assert sum(storage.nbytes() for storage in pool._storages) <= 2 * LEAST
    del kept
    assert pool.empty((3 * LEAST,), torch.uint8).untyped_storage() not in pool._storages
    assert not Memory(0).empty(SHAPE, torch.float32).untyped_storage().is_shared()


@needs.cxx
def test_a_kernel_s_results_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Memory(8 * LEAST)
    monkeypatch.setattr("eqfuse.tile.native.run.outputs", lambda: pool)
    kernel = eq.compile("y[i,j] = x[i,j] / sum[j](x[i,j])", verify=False, native="wait")
    given = [torch.rand(1024, 1024 + k) + k for k in (0, 0, 0, 1, 0)]
    found = [kernel(x=x) for x in given]
    addresses = {y.data_ptr() for y in found}
    for x, y in zip(given, found, strict=True):
        torch.testing.assert_close(y, x / x.sum(1, keepdim=True))
    assert len(addresses) == 5
    del found, y
    assert kernel(x=given[0]).data_ptr() in addresses


def test_a_wrong_setting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQFUSE_KEEP_MB", "many")
    with pytest.raises(eq.EqfuseError, match="EQFUSE_KEEP_MB is 'many'"):
        memory.outputs.__wrapped__()
    monkeypatch.setenv("EQFUSE_KEEP_MB", "0")
    pool = memory.outputs.__wrapped__()
    assert pool.empty(SHAPE, torch.float32).shape == SHAPE and not pool._storages
