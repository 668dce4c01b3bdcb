"""Scalars in tensors of no dimension: read by the kernel, as elements of tensors, and waited for by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import eqfuse as eq
from eqfuse.terms import scalars
from eqfuse.terms.scalars import as_elements, in_tensors


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes numbers in tensors on the CPU for such that a GPU holds; taking one out of its tensor is an error."""

    def refused(tensor: torch.Tensor) -> Any:
        raise AssertionError("a number was taken out of a tensor")

    def is_held(value: Any, is_integer: bool) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and not value.ndim
            and not (is_integer and value.is_floating_point())
        )

    monkeypatch.setattr(scalars, "_is_held", is_held)
    monkeypatch.setattr(torch.Tensor, "item", refused)
    yield


LOSS = "loss = mean[i](sq(sum[j](x[i,j] * w[j]) - y[i]))\nreturn loss"


def test_the_text_reads_elements() -> None:
    source = "s: f32\nx: f16[i]  # s\ny[i] = s * x[i] + exp(s)\nreturn y"
    assert as_elements(source, ["s"]).split("\n") == [
        *("", "x: f16[i]  # s", "y[i] = s[0] * x[i] + exp(s[0])", "return y"),
    ]


def test_which_scalars_are_held(held: None) -> None:
    source = "m: i64\ny[i] = where(i < n, s * x[i], t)\nz = m + 1\nreturn y, z"
    program = eq.compile(source).program
    values = {"s": torch.tensor(2.0), "n": torch.tensor(3), "m": torch.tensor(4), "t": 1.0}
    assert in_tensors(program, values) == ("s", "m")  # other integers decide what is visited
    for text in ("y[i] = x[i + n]", "k: axis[n]\ny[k] = x[0] * k", "n: i64\ny[i] = x[i] + rand(n, i)"):
        assert not in_tensors(eq.compile(text, at_once=False).program, {"n": torch.tensor(4)})


def test_integers_that_are_values_take_no_number(held: None) -> None:
    kernel = eq.compile("n: i64\ny[i] = x[i] * n\nm = n // 2 + 1\nreturn y, m")
    for count in (3, 2**53 + 1, -5):
        x, n = torch.randn(5, dtype=torch.float64), torch.tensor(count)
        y, m = kernel(x=x, n=n)
        assert torch.equal(y, x * n) and torch.equal(m, n // 2 + 1) and m.dtype == torch.int64
    assert kernel.certificate.ok
    assert len(kernel._elements["n",]._calls._cached) == 1  # one kind of calls, whatever the integer is


def test_a_real_number_in_a_tensor_is_no_integer() -> None:
    kernel = eq.compile("n: i64\ny[i] = x[i] * n")
    with pytest.raises(eq.EqfuseError, match="'n' is 2.5, not an integer"):
        kernel(x=torch.randn(3), n=torch.tensor(2.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("of", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_values_and_dtypes_are_those_of_numbers(held: None, dtype: torch.dtype, of: torch.dtype) -> None:
    kernel = eq.compile("y[i] = s * x[i] + s\nreturn y")
    x = torch.arange(7).to(dtype)
    found, number = kernel(x=x, s=torch.tensor(3, dtype=of)), kernel(x=x, s=3.0)
    assert found.dtype == number.dtype and torch.equal(found, number)
    assert kernel.certificate.ok


def test_the_backward_of_a_loss_takes_no_number(held: None) -> None:
    kernel = eq.compile(LOSS)
    x, w, y = torch.randn(5, 3), torch.randn(3, requires_grad=True), torch.randn(5)
    expected = torch.autograd.grad(((x @ w - y) ** 2).mean() * 3, w)[0]
    (kernel(x=x, w=w, y=y) * 3).backward()
    torch.testing.assert_close(w.grad, expected)
    assert kernel.backward.certificate.ok and "dloss[0]" in kernel.backward.explain()


def test_a_loss_in_half_precision_has_gradients_in_it(held: None) -> None:
    kernel = eq.compile(LOSS)
    x, y = torch.randn(5, 3).half(), torch.randn(5).half()
    w = torch.randn(3).half().requires_grad_()
    kernel(x=x, w=w, y=y).backward()
    expected = torch.autograd.grad(((x @ w - y) ** 2).mean(), w)[0]
    assert w.grad is not None and w.grad.dtype == torch.float16
    torch.testing.assert_close(w.grad, expected, rtol=1e-2, atol=1e-2)


def test_gradients_by_the_scalar_and_of_gradients(held: None) -> None:
    kernel = eq.compile("y[i] = exp(s * x[i])\nreturn y")
    x, s = torch.randn(5, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: kernel(x=x, s=s), (s,))
    loss = eq.compile("loss = sum[i](sq(x[i]) * x[i])\nreturn loss")
    z = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda z: loss(x=z), (z,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_training_step_waits_for_nothing() -> None:
    kernel = eq.compile("loss = s * mean[i](sq(sum[j](x[i,j] * w[j]) - y[i]))\nreturn loss")
    x, y, s = (torch.randn(shape, device="cuda") for shape in ((50, 30), (50,), ()))
    w = torch.randn(30, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = kernel(x=x, w=w, y=y, s=s)
        return loss.detach(), torch.autograd.grad(loss, w)[0]

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        loss = s * ((x @ w - y) ** 2).mean()
        return loss.detach(), torch.autograd.grad(loss, w)[0]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(made, expected())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    s.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(captured, expected())
