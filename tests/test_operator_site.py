"""Calls in code that Inductor has written: what has run a call of their kind runs the next, and all else is the operator's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from eqfuse.operator import site
from eqfuse.operator.site import Site


@dataclass
class CachedCall:
    """Stands for what runs calls of a kind; `lasts` until somebody forgets it."""

    lasts: bool = True


@dataclass
class Kernel:
    """Stands for a kernel: counts what comes to it, and how. A launch that is `refused` gives None, as on another device."""

    straight: list[Mapping[str, Any]] = field(default_factory=list)
    addresses: list[Sequence[int]] = field(default_factory=list)
    looked: int = 0
    is_refused: bool = False
    has_cached: bool = True
    made: CachedCall = field(default_factory=CachedCall)

    def operator(self, content: str, names: str, tensors: Sequence[torch.Tensor], *numbers: Any) -> Any:
        self.looked += 1
        return [tensors[0] + 1]

    def cached(self, values: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> CachedCall | None:
        return self.made if self.has_cached else None

    def run_cached(self, cached: CachedCall, values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
        if self.is_refused or not cached.lasts:
            return None
        self.straight.append(dict(values))
        self.addresses.append(addresses)
        return values["x"] + 1


@dataclass
class Call:
    kernel: Kernel
    copies: bool = False


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(site, "operator_of", lambda content: made.operator)
    monkeypatch.setattr(site, "call_of", lambda content, names: Call(made))
    return made


def test_the_second_call_of_a_kind_goes_straight(kernel: Kernel) -> None:
    call = Site("content", "x w|n|eps|j", is_fixed=True)
    x, w = torch.ones(2, 8), torch.ones(8)
    for _ in range(3):
        assert torch.equal(call([x, w], [4, 7], [0.5])[0], x + 1)
    assert kernel.looked == 1 and len(kernel.straight) == 2
    assert set(kernel.straight[0]) == {"x", "w", "n", "eps"} and kernel.straight[0]["eps"] == 0.5
    assert kernel.addresses[0] == [x.data_ptr(), w.data_ptr()]
    call([x, w], [5, 7], [0.25])  # integers may bound what is read
    call([x, w], [4, 8], [0.25])  # the size of an axis that no tensor has
    assert kernel.looked == 3
    call([x, w], [5, 7], [0.75])
    assert kernel.looked == 3 and kernel.straight[-1]["eps"] == 0.75


def test_another_alignment_is_another_kind(kernel: Kernel) -> None:
    call = Site("content", "x|||", is_fixed=True)
    memory = torch.ones(20)
    for start in (0, 1, 0, 1):
        call([memory[start : start + 8]])
    assert kernel.looked == 2 and len(kernel.straight) == 2


def test_sizes_that_are_symbols_are_looked_at(kernel: Kernel) -> None:
    call = Site("content", "x|||", is_fixed=False)
    for n in (3, 4, 3, 4):
        assert call([torch.ones(n, 8)])[0].shape == (n, 8)
    square = torch.ones(4, 4)
    call([square])
    call([square.mT])  # other strides
    assert kernel.looked == 4 and len(kernel.straight) == 2


def test_what_no_longer_holds_is_looked_at_once_more(kernel: Kernel) -> None:
    call, x = Site("content", "x|||", is_fixed=True), torch.ones(8)
    call([x])
    kernel.is_refused = True  # another device is current, or somebody watches launches
    for _ in range(2):
        assert torch.equal(call([x])[0], x + 1)
    kernel.is_refused = False
    kernel.made.lasts = False  # a search has found a faster plan
    call([x])
    assert kernel.looked == 4 and not kernel.straight
    kernel.made = CachedCall()
    call([x])
    call([x])
    assert kernel.looked == 5 and len(kernel.straight) == 1


def test_kinds_that_are_looked_at_each_time_stay_the_operators(kernel: Kernel) -> None:
    call, x = Site("content", "x|||", is_fixed=True), torch.ones(8)
    kernel.has_cached = False
    for _ in range(3):
        call([x])
    assert kernel.looked == 3 and not kernel.straight


def test_so_many_kinds_are_known_at_once(kernel: Kernel) -> None:
    call = Site("content", "x|||", is_fixed=False)
    for n in range(1, site.MOST_KINDS + 3):
        call([torch.ones(n, 2)])
    assert len(call._cached) <= site.MOST_KINDS


def test_outputs_are_memory_of_their_own(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(site, "call_of", lambda content, names: Call(kernel, copies=True))
    monkeypatch.setattr(
        Kernel, "run_cached", lambda self, cached, values, addresses: (values["x"], values["x"].mT)
    )
    call, x = Site("content", "x|||", is_fixed=True), torch.rand(2, 3)
    call([x])
    same, turned = call([x])
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()
    assert torch.equal(turned, x.mT) and turned.is_contiguous()
