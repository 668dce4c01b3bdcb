"""Where derivatives would be lost: refused, whatever is called. What is differentiable is in test_grad_torch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import eqfuse as eq

SOURCE = "y[i] = sum[j](sq(x[i,j])) * s"
kernel = eq.compile(SOURCE)
whole = eq.compile("y = max[j](sq(x[j]))")
stream = eq.compile("y[i] = sum[j](exp(x[i,j] - max[j](x[i,j])) * v[j]) * s[i]")


def entry_points() -> dict[str, Callable[[torch.Tensor], Any]]:
    """What takes tensors, as functions of one of shape (3, 4)."""
    rows, columns = torch.ones(3), torch.ones(4)

    def finish(x: torch.Tensor) -> Any:
        return stream.finish(stream.update(stream.init(), x=torch.ones(3, 4), v=columns, s=rows), s=x[:, 0])

    return {
        "call": lambda x: kernel(x=x, s=2.0),
        "scalar": lambda x: kernel(x=torch.ones(3, 4), s=x.sum()),
        "all axes reduced": lambda x: whole(x=x[0]),
        "tune": lambda x: kernel.tune(x=x, s=2.0, seconds=0.1, plans=1),
        "update": lambda x: stream.update(stream.init(), x=x, v=columns, s=rows),
        "update, second tensor": lambda x: stream.update(stream.init(), x=torch.ones(3, 4), v=x[0], s=rows),
        "finish": finish,
        "reference": lambda x: eq.reference(SOURCE)(x=x, s=2.0),
        "reference, scalar": lambda x: eq.reference(SOURCE)(x=torch.ones(3, 4), s=x.sum()),
        "one of two": lambda x: stream(x=torch.ones(3, 4), v=columns, s=rows * x[:, 0]),
    }


def backward(act: Callable[[torch.Tensor], Any]) -> None:
    act(torch.ones(3, 4, requires_grad=True))


def of_a_graph(act: Callable[[torch.Tensor], Any]) -> None:
    act(torch.ones(3, 4, requires_grad=True) * 2)


def grad(act: Callable[[torch.Tensor], Any]) -> None:
    torch.func.grad(lambda x: act(x).sum())(torch.ones(3, 4))


def vjp(act: Callable[[torch.Tensor], Any]) -> None:
    torch.func.vjp(act, torch.ones(3, 4))


def jvp(act: Callable[[torch.Tensor], Any]) -> None:
    torch.func.jvp(act, (torch.ones(3, 4),), (torch.ones(3, 4),))


def jvp_without_grad(act: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad():
        jvp(act)


def dual(act: Callable[[torch.Tensor], Any]) -> None:
    with forward_ad.dual_level():
        act(forward_ad.make_dual(torch.ones(3, 4), torch.ones(3, 4)))


def dual_without_grad(act: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad():
        dual(act)


def jacobian(act: Callable[[torch.Tensor], Any]) -> None:
    torch.func.jacrev(act)(torch.ones(3, 4))


def vmap(act: Callable[[torch.Tensor], Any]) -> None:
    torch.vmap(act)(torch.ones(2, 3, 4))


DIFFERENTIABLE = ("call", "scalar", "all axes reduced", "one of two")
"""Entry points of which autograd sees a derivative."""

ASKED = {
    backward: "requires grad",
    of_a_graph: "requires grad",
    grad: "under a transform of torch.func",
    vjp: "under a transform of torch.func",
    jvp: "under a transform of torch.func",
    jvp_without_grad: "under a transform of torch.func",
    jacobian: "under a transform of torch.func",
    dual: "has a tangent",
    dual_without_grad: "has a tangent",
    vmap: "is batched by torch.vmap",
}


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.__name__)
@pytest.mark.parametrize("entry", [entry for entry in entry_points() if entry not in DIFFERENTIABLE])
def test_a_derivative_that_would_be_lost_is_refused(entry: str, asked: Callable[..., None]) -> None:
    with pytest.raises(eq.EqfuseError, match=ASKED[asked]) as caught:
        asked(entry_points()[entry])
    assert caught.value.hint


@pytest.mark.parametrize(
    "asked",
    [backward, of_a_graph, grad, vjp, jvp, jvp_without_grad, jacobian, dual, dual_without_grad, vmap],
    ids=lambda asked: asked.__name__,
)
@pytest.mark.parametrize("entry", DIFFERENTIABLE)
def test_calls_are_differentiable(entry: str, asked: Callable[..., None]) -> None:
    asked(entry_points()[entry])


def test_the_refusal_shows_the_tensor_and_what_to_do() -> None:
    with pytest.raises(eq.EqfuseError) as caught:
        eq.reference(SOURCE)(x=torch.ones(3, 4, requires_grad=True), s=1.0)
    assert caught.value.message == "'x' requires grad, and only a call of a kernel has a derivative"
    with pytest.raises(eq.EqfuseError) as caught:
        torch.vmap(lambda x: kernel.update(kernel.init(), x=x, s=1.0))(torch.ones(2, 3, 4))
    assert str(caught.value).splitlines() == [
        "'x' is batched by torch.vmap, and kernels have no batching rule (line 1)",
        "    y[i] = sum[j](sq(x[i,j])) * s",
        "                     ^",
        "give the batch an axis of the program, and call the kernel on the whole batch",
    ]


@pytest.mark.parametrize("entry", entry_points())
def test_without_gradients_all_is_as_ever(entry: str) -> None:
    x = torch.ones(3, 4, requires_grad=True)
    act = entry_points()[entry]
    act(x.detach())
    with torch.no_grad():
        act(x)
    with torch.inference_mode():
        act(x)
        act(torch.ones(3, 4))
    with forward_ad.dual_level():
        made = forward_ad.make_dual(torch.ones(3, 4), torch.ones(3, 4))
        act(torch.ones(3, 4))
        act(made.detach())
        with torch.inference_mode():
            act(made)


def test_results_need_no_grad() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    with torch.no_grad():
        found = kernel(x=x, s=2.0)
    assert not found.requires_grad
    assert found.tolist() == [8, 8, 8]
    assert (found * torch.ones(3, requires_grad=True)).requires_grad


def test_a_tensor_beside_the_transform_is_an_ordinary_one() -> None:
    data = torch.ones(3, 4)
    found = torch.func.grad(lambda z: (kernel(x=data, s=2.0) * z).sum())(torch.ones(3))
    assert found.tolist() == [8, 8, 8]
