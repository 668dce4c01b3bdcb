"""No input outlives its call: its memory is free as soon as the caller lets go, without a collection of garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
import torch
from fake_gpu import Gpu, gpu

import eqfuse as eq

__all__ = ["gpu"]

ROWS = "y[i,j] = exp(x[i,j] * a) / sum[j](exp(x[i,j] * a))"
JOINED = "y[i,j,k] = exp(x[i,j,k] * a)"

Shape = tuple[int, ...]
Call = Callable[[eq.Kernel, torch.Tensor], object]
"""A way to call a kernel; what it gives is dropped at once."""


def plain(kernel: eq.Kernel, x: torch.Tensor) -> object:
    return kernel(x=x, a=0.5)


def without_gradients(kernel: eq.Kernel, x: torch.Tensor) -> object:
    with torch.no_grad():
        return kernel(x=torch.nn.Parameter(x), a=0.5)


def backward(kernel: eq.Kernel, x: torch.Tensor) -> None:
    kernel(x=x.requires_grad_(), a=0.5).sum().backward()


def grad(kernel: eq.Kernel, x: torch.Tensor) -> object:
    return torch.func.grad(lambda x: kernel(x=x, a=0.5).sum())(x)


def batched(kernel: eq.Kernel, x: torch.Tensor) -> object:
    return torch.func.vmap(lambda x: kernel(x=x, a=0.5))(torch.stack([x, x]))


def array(kernel: eq.Kernel, x: torch.Tensor) -> object:
    return kernel(x=x.numpy(), a=0.5)


def prepared(kernel: eq.Kernel, x: torch.Tensor) -> object:
    return kernel.prepare({"x": x})


def bound(kernel: eq.Kernel, x: torch.Tensor) -> object:
    """A launch holds its tensors; nothing does once it is gone."""
    launch = kernel.bind(x=x, a=0.5)
    assert launch.inputs["x"].data_ptr() == x.data_ptr()
    return launch()


def estimated(kernel: eq.Kernel, x: torch.Tensor) -> object:
    return kernel.estimate({"x": x, "a": 0.5})


def refused(kernel: eq.Kernel, x: torch.Tensor) -> None:
    with suppress(eq.EqfuseError):
        kernel(x=x, a="half")


CALLS = (plain, without_gradients, backward, grad, batched, array, prepared, bound, estimated, refused)

SHAPES = [*((3, n) for n in range(20, 25)), *[(3, 17)] * 5, *[(3, 18), (3, 19)] * 3]
"""New lengths, one and the same, and two in turn."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Without collections of garbage, which free what goes round in cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def outlived(kernel: eq.Kernel, call: Call, shapes: Sequence[Shape]) -> list[int]:
    """The calls, by number, whose input is in memory after them. References are to memory, not to the tensors that read it."""
    held = []
    call(kernel, torch.randn(shapes[0]))  # what is compiled for the first time may leave cycles
    with uncollected():
        for number, shape in enumerate(shapes):
            x = torch.randn(shape)
            memory = weakref.ref(x.untyped_storage())
            call(kernel, x)
            del x
            if memory() is not None:
                held.append(number)
    return held


@pytest.fixture(scope="module", params=["off", "wait"])
def kernel(request: pytest.FixtureRequest) -> eq.Kernel:
    return eq.compile(ROWS, native=request.param)


@pytest.mark.parametrize("call", CALLS)
def test_no_input_outlives_its_call(kernel: eq.Kernel, call: Call) -> None:
    assert not outlived(kernel, call, SHAPES)


def test_nor_that_of_a_program_with_joined_axes() -> None:
    kernel = eq.compile(JOINED, native="off")
    assert not outlived(kernel, plain, [(2, 3, n) for n in (4, 5, 6, 6, 6, 6, 4, 4)])
    assert kernel.joint is not None


def test_nor_that_of_a_call_on_a_gpu(gpu: Gpu) -> None:
    kernel = eq.compile(ROWS, target="h200", verify=False)
    lengths = (20, 21, 22, 22, 22, 22, 20, 20)
    assert not outlived(kernel, lambda kernel, x: plain(kernel, gpu.seen(x)), [(3, n) for n in lengths])
    assert gpu.straight


def test_nor_that_of_compiled_code() -> None:
    kernel = eq.compile(ROWS, native="off")
    compiled = torch.compile(lambda x: kernel(x=x, a=0.5) + 1, backend="eager", dynamic=True)
    assert not outlived(kernel, lambda kernel, x: compiled(x), [(3, n) for n in (20, 21, 22, 22, 22)])
    assert not outlived(
        kernel,
        lambda kernel, x: compiled(x.requires_grad_()).sum().backward(),
        [(3, n) for n in (23, 24, 24)],
    )


def test_a_launch_holds_its_tensors() -> None:
    x = torch.randn(3, 5)
    launch = eq.compile(ROWS, native="off").bind(x=x, a=0.5)
    memory, wanted = weakref.ref(x.untyped_storage()), torch.softmax(x * 0.5, 1)
    del x
    assert memory() is not None
    torch.testing.assert_close(launch(), wanted)
