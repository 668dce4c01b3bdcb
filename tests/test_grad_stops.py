"""`stop(x)`: the value of x, as a constant to derivatives of any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import eqfuse as eq
from eqfuse.extend.define import forget

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A program of x and z, and what it is in torch."""

    source: str
    torch: Callable[[Tensor, Tensor], Outputs]


def exponentials(x: Tensor) -> Tensor:
    return (x - x.amax(1, keepdim=True).detach()).exp()


CASES = {
    "a product with itself": Case(
        "y[i] = sum[j](x[i,j] * stop(x[i,j]) * z[i,j])", lambda x, z: ((x * x.detach() * z).sum(1),)
    ),
    "straight through": Case(
        "y[i,j] = (x[i,j] + stop(round(x[i,j]) - x[i,j])) * z[i,j]",
        lambda x, z: ((x + (x.round() - x).detach()) * z,),
    ),
    "a maximum": Case(
        "e[i,j] = exp(x[i,j] - stop(max[j](x[i,j])))\ny[i] = sum[j](e[i,j] * z[i,j])",
        lambda x, z: ((exponentials(x) * z).sum(1),),
    ),
    "softmax": Case(
        "m[i] = stop(max[j](x[i,j]))\ne[i,j] = exp(x[i,j] - m[i])\ny[i] = sum[j](e[i,j] / sum[j](e[i,j]) * z[i,j])",
        lambda x, z: ((x.softmax(1) * z).sum(1),),
    ),
    "1 with a derivative": Case(
        "y[i,j] = z[i,j] * exp(x[i,j] - stop(x[i,j]))", lambda x, z: (z * (x - x.detach()).exp(),)
    ),
    "sums of 0 with a derivative": Case(
        "s[i] = sum[j](x[i,j]) - stop(sum[j](x[i,j]))\ny[i,j] = z[i,j] * s[i] + sq(x[i,j])",
        lambda x, z: (z * (x.sum(1, keepdim=True) - x.sum(1, keepdim=True).detach()) + x**2,),
    ),
    "a number": Case(
        "m = stop(sum[i,j](x[i,j]))\ny[i,j] = x[i,j] * z[i,j] * m", lambda x, z: (x * z * x.sum().detach(),)
    ),
    "an output": Case(
        "y[i] = sum[j](x[i,j] * z[i,j])\nw[i] = stop(y[i])\nreturn y, w",
        lambda x, z: ((x * z).sum(1), (x * z).sum(1).detach()),
    ),
}


def derivatives(function: Callable[[Tensor, Tensor], Outputs], x: Tensor, z: Tensor) -> list[Tensor]:
    """The gradient by both inputs, and that of a function of it."""
    wrt = (x, z)
    outputs = [output for output in function(x, z) if output.requires_grad]
    weights = [torch.linspace(1, 2, output.numel()).double().reshape(output.shape) for output in outputs]
    first = torch.autograd.grad(outputs, wrt, weights, create_graph=True, materialize_grads=True)
    made = sum((each.square().sum() for each in first), torch.zeros(()))
    second = torch.autograd.grad(made, wrt, materialize_grads=True) if made.requires_grad else ()
    alone = torch.autograd.grad(
        [output for output in function(x, z) if output.requires_grad], wrt, weights, materialize_grads=True
    )
    return [*first, *alone, *second]


@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_any_order_are_those_of_detach(name: str) -> None:
    case = CASES[name]
    kernel = eq.compile(case.source, native="off")
    torch.manual_seed(0)
    x, z = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def call(x: Tensor, z: Tensor) -> Outputs:
        found = kernel(x=x, z=z)
        return found if isinstance(found, tuple) else (found,)

    for found, expected in zip(call(x, z), case.torch(x, z), strict=True):
        assert found.requires_grad == expected.requires_grad
        torch.testing.assert_close(found, expected)
    for found, expected in zip(derivatives(call, x, z), derivatives(case.torch, x, z), strict=True):
        torch.testing.assert_close(found, expected)
    assert kernel.backward.certificate.ok


MUTANTS = {
    "a stop that is ignored": ("a product with itself", "* x[i, j]", "* 2 * x[i, j]"),
    "a maximum that is not stopped": (
        "a maximum",
        "dx[i, j] = ",
        "dx[i, j] = where(x[i, j] == max_x[i], dy[i], 0) + ",
    ),
    "a step that is not passed": ("straight through", "dy[i, j] * z[i, j]", "0 * dy[i, j] * z[i, j]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_gradients_are_refused(name: str) -> None:
    program, before, after = MUTANTS[name]
    right = eq.grad(CASES[program].source, ("x",)).replace("stop(x[i, j])", "x[i, j]")
    assert before in right, right
    assert eq.certify_gradient(CASES[program].source, right).ok
    found = eq.certify_gradient(CASES[program].source, right.replace(before, after))
    assert found.counterexample is not None


def test_a_program_that_is_run_has_nothing_of_it() -> None:
    text = "y[i] = sum[j](exp(x[i,j] - {}(max[j](x[i,j]))) * z[i,j])"
    stopped, plain = eq.compile(text.format("stop")), eq.compile(text.format(""))
    assert (stopped.merge, stopped.plan, str(stopped.tile)) == (plain.merge, plain.plan, str(plain.tile))
    assert eq.equivalent(text.format("stop"), text.format("")).ok


def test_the_gradient_that_is_run_has_nothing_of_it_and_the_text_does() -> None:
    source = "m[i] = {}(max[j](x[i,j]))\ny[i,j] = exp(x[i,j] - m[i]) / sum[j](exp(x[i,j] - m[i]))"
    kernels = [eq.compile(source.format(word), native="off") for word in ("stop", "")]
    for kernel in kernels:
        kernel(x=torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert kernels[0].backward.source == kernels[1].backward.source.replace(
        "# max_x passes nothing on: its cotangent is 0 for all inputs\n", ""
    ).replace("# m passes nothing on: its cotangent is 0 for all inputs\n", "")
    assert eq.grad("y[i] = x[i] * stop(x[i])") == "dx[i] = dy[i] * stop(x[i])\nreturn dx"


@pytest.mark.slow
def test_an_output_without_a_gradient_requires_none() -> None:
    """Also where it is made of what requires none, and under a compiler."""
    kernel = eq.compile(
        "y[i] = sq(x[i])\nw[i] = stop(x[i]) * z[i]\nn[i] = where(x[i] > 0, z[i], 1)\nreturn y, w, n",
        native="off",
    )
    x, z = torch.ones(3, requires_grad=True), torch.ones(3)
    compiled: Any = torch.compile(lambda x, z: kernel(x=x, z=z), backend="aot_eager", fullgraph=True)
    for call in (lambda x, z: kernel(x=x, z=z), compiled):
        assert [output.requires_grad for output in call(x, z)] == [True, False, False]
        assert [output.requires_grad for output in call(z, x)] == [False, True, True]


def test_integers_truth_values_and_positions_are_stopped_in_vain() -> None:
    source = "y[i] = where(stop(m[i]), x[i], 0) * stop(n[i]) + x[stop(n[i])] * stop(N(i))"
    kernel = eq.compile(source, native="off")
    x = torch.ones(3, requires_grad=True)
    kernel(x=x, m=torch.tensor([True, False, True]), n=torch.tensor([2, 1, 1])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 6, 4]
    assert kernel.backward.certificate.ok


def test_registered_reductions_may_stop_but_where_they_combine() -> None:
    eq.reduction("kept", state="s", lift="stop(x) * x", identity="0", combine="s1 + s2", result="s")
    try:
        kernel = eq.compile("y[i] = kept[j](x[i,j])", native="off")
        x = torch.randn(2, 3, requires_grad=True)
        kernel(x=x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, x)
    finally:
        forget("kept")
    with pytest.raises(eq.EqfuseError, match="combine may not stop gradients"):
        eq.reduction("lost", state="s", lift="x", identity="0", combine="s1 + stop(s2)", result="s")
    with pytest.raises(eq.EqfuseError, match="leave the stop out"):
        eq.rule("stopped", "stop(a)", "a", why="the same value")
