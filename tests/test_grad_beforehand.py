"""Backwards that are made ready while forwards are compiled: what calls on a GPU do, here on tensors of the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.differentiate import autograd
from eqfuse.differentiate.autograd import DifferentiableCall
from eqfuse.errors import VerificationError
from eqfuse.kernel import Kernel
from eqfuse.terms.arguments import Absent

NORM = "y[b,d] = x[b,d] * rsqrt(mean[d](sq(x[b,d])) + 1e-6) * w[d]"
WITH_NUMBER = "y[b] = sum[d](exp(s * x[b,d]))"
HALF = "y: bf16[b,d]\n" + NORM


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """The threads that planned something, with backwards made ready."""
    threads: list[threading.Thread] = []
    pipeline = compiler.pipeline

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return pipeline(*given)

    begin = DifferentiableCall._is_worth_it
    on_gpu = property(lambda self: True)

    def is_worth_it(self: DifferentiableCall, values: Any) -> bool:
        return begin(self, {name: _Said(value) for name, value in values.items()})

    class _Said:
        is_cuda = on_gpu

        def __init__(self, value: Any) -> None:
            self._value = value

        def __getattr__(self, name: str) -> Any:
            return getattr(self._value, name)

    monkeypatch.setattr(compiler, "pipeline", noted)
    monkeypatch.setattr(autograd, "cores", lambda: autograd.LEAST_CORES)
    monkeypatch.setattr(DifferentiableCall, "_is_worth_it", is_worth_it)
    yield threads


def _wait() -> None:
    """Until what was begun has ended."""
    autograd._Prepares.thread.submit(int).result()


def _drawn(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 7, dtype=dtype, requires_grad=True), torch.randn(7, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("source", [NORM, HALF])
@pytest.mark.parametrize("how", ["plain", "turned"])
def test_a_backward_finds_what_was_planned_beforehand(
    source: str, how: str, planned: list[threading.Thread]
) -> None:
    x, w = _drawn(torch.bfloat16 if source == HALF else torch.float32)
    kernel = eq.compile(source)
    given = x if how == "plain" else x.t().contiguous().t()
    y = kernel(x=given, w=w)
    _wait()
    assert any(thread.name.startswith("eqfuse prepares") for thread in planned)
    planned.clear()
    g = torch.ones_like(y)
    found = torch.autograd.grad(y, (x, w), g)
    assert not planned
    wide = [each.detach().double().requires_grad_() for each in (x, w)]
    expected = wide[0] * torch.rsqrt(wide[0].square().mean(1, keepdim=True) + 1e-6) * wide[1]
    for one, other in zip(found, torch.autograd.grad(expected, wide, g.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)


def test_numbers_are_among_what_is_planned_for(planned: list[threading.Thread]) -> None:
    kernel = eq.compile(WITH_NUMBER)
    x = torch.randn(4, 3, requires_grad=True)
    y = kernel(x=x, s=0.5)
    _wait()
    planned.clear()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert not planned
    torch.testing.assert_close(found, 0.5 * torch.exp(0.5 * x.detach()))


def test_calls_of_a_kind_are_made_ready_once(planned: list[threading.Thread], monkeypatch: Any) -> None:
    made: list[Any] = []
    monkeypatch.setattr(Kernel, "make_ready", lambda self, *given: made.append(given))
    kernel, (x, w) = eq.compile(NORM), _drawn()
    for _ in range(3):
        kernel(x=x, w=w)
    kernel(x=x, w=w.detach())
    _wait()
    assert len(made) == 2
    tensors, _, sizes = made[0]
    assert (
        all(isinstance(tensor, Absent) for tensor in tensors.values())
        and sizes == {"b": 5, "d": 7}
        or tensors
    )


def test_what_is_shown_is_of_the_last_backward(planned: list[threading.Thread]) -> None:
    kernel, (x, w) = eq.compile(NORM), _drawn()
    kernel(x=x, w=w.detach())
    _wait()
    assert kernel._differentiated.latest is None
    assert "dw" in kernel.backward.source
    of_weights = kernel.gradient(("w",), ("x", "w"))  # as compiled code has it
    assert kernel.backward.kernel is of_weights


def test_the_backward_raises_what_went_wrong_beforehand(
    planned: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any, **named: Any) -> Any:
        raise VerificationError("the gradient was not verified", hint="")

    kernel, (x, w) = eq.compile(NORM), _drawn()
    monkeypatch.setattr(autograd, "certify_gradient", refused)
    y = kernel(x=x, w=w)
    _wait()
    with pytest.raises(VerificationError, match="the gradient was not verified"):
        y.sum().backward()


def test_what_has_not_begun_is_left_to_the_backward(planned: list[threading.Thread]) -> None:
    go = threading.Event()
    autograd._Prepares.thread.submit(go.wait)
    kernel, (x, w) = eq.compile(NORM), _drawn()
    y = kernel(x=x, w=w)
    y.sum().backward()
    go.set()
    _wait()
    assert x.grad is not None
    assert not any(thread.name.startswith("eqfuse prepares") for thread in planned)


def test_a_wrong_call_raises_what_it_does_otherwise(
    planned: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = _drawn()
    texts = []
    for is_worth_it in (DifferentiableCall._is_worth_it, lambda self, values: False):
        monkeypatch.setattr(DifferentiableCall, "_is_worth_it", is_worth_it)
        with pytest.raises(eq.EqfuseError) as wrong:
            eq.compile(NORM)(x=x, w=w[:3])
        texts.append(str(wrong.value))
    assert texts[0] == texts[1]


def test_calls_on_a_cpu_make_nothing_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(DifferentiableCall, "_make_ready", lambda self, values: begun.append(values))
    kernel, (x, w) = eq.compile(NORM), _drawn()
    kernel(x=x, w=w)
    _wait()
    assert not begun


def test_processes_of_few_cores_make_nothing_ready(
    planned: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "cores", lambda: autograd.LEAST_CORES - 1)
    kernel, (x, w) = eq.compile(NORM), _drawn()
    kernel(x=x, w=w)
    _wait()
    assert not any(thread.name.startswith("eqfuse prepares") for thread in planned)


def test_absent_tensors_are_viewed_as_others() -> None:
    x = torch.randn(4, 6).t()
    absent = Absent.like(x)
    assert (absent.shape, absent.stride(), absent.dtype, absent.device) == (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
    )
    assert absent.data_ptr() == 0 and absent.meta.device.type == "meta"
    turned = absent.t().view(2, 12)
    assert isinstance(turned, Absent) and turned.shape == (2, 12) and turned.device == x.device
    assert absent.detach().stride() == x.stride()
