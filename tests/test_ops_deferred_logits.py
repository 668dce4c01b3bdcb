"""Logits that nothing has computed yet: shape, values and gradients are those of a linear layer, whatever reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.ops.deferred_logits import DeferredLogits, deferred_logits


class Squares(torch.autograd.Function):
    """A function that no hook of Python sees."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (z,) = ctx.saved_tensors
        return 2 * z * grads[0]


def _in_place(z: torch.Tensor) -> torch.Tensor:
    z.mul_(2)
    return z.exp()


def _after_a_look(z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        assert z.argmax(-1).shape == (2, 3)
    return z.sin()


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a function": torch.sin,
    "a step": lambda z: z / 2.0,
    "a cap": lambda z: torch.tanh(z / 3.0) * 3.0,
    "a part": lambda z: z[:, -1] * 2,
    "several": lambda z: torch.cat([z, z]).logsumexp(-1),
    "a custom function": Squares.apply,
    "a custom function of a step": lambda z: Squares.apply(torch.tanh(z)),
    "in place": _in_place,
    "after a look": _after_a_look,
    "a loss": lambda z: F.cross_entropy(z.view(-1, 5), torch.tensor([1, 2, -100, 4, 0, 3])),
    "a gradient by them": lambda z: torch.autograd.grad(z.exp().sum(), z, create_graph=True)[0],
}


def weights(has_bias: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 3, 4), (5, 4), (5,))[: 3 if has_bias else 2]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def deferred(of: list[torch.Tensor], read: Callable[[str], None] = lambda _: None) -> DeferredLogits:
    x, w, *bias = of
    return deferred_logits(x, w, bias[0] if bias else None, read)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_values_and_gradients(reader: str, has_bias: bool) -> None:
    of = weights(has_bias)
    readers: list[str] = []
    found, wanted = READERS[reader](deferred(of, readers.append)), READERS[reader](F.linear(*of))
    grads = torch.autograd.grad((found * 1.0).square().sum(), of)
    torch.testing.assert_close(found + 0.0, wanted)
    assert readers and all(type(grad) is torch.Tensor for grad in grads)
    for grad, right in zip(grads, torch.autograd.grad(wanted.square().sum(), of), strict=True):
        torch.testing.assert_close(grad, right)


def test_nothing_is_computed_of_a_shape() -> None:
    readers: list[str] = []
    logits = deferred(weights(), readers.append)
    assert (logits.shape, logits.dtype, logits.device.type) == ((2, 3, 5), torch.float64, "cpu")
    assert logits.requires_grad and logits.dim() == 3 and logits.size(-1) == 5 and len(logits) == 2
    capped = (torch.tanh(logits / 3) * 3).float()
    assert isinstance(capped, DeferredLogits) and capped.dtype == torch.float32
    assert capped.is_capped and capped.soft_cap == 3.0 and logits.is_capped and logits.soft_cap is None
    for other in (logits / 2, torch.tanh(logits / 2) * 3, torch.tanh(logits)):
        assert isinstance(other, DeferredLogits) and not other.is_capped
    assert not readers
    assert logits.detach().numpy().shape == (2, 3, 5) and not logits.is_capped
    assert readers == ["detach"]


def test_a_kernel_reads_them() -> None:
    of = [tensor.detach() for tensor in weights()]
    kernel = eq.compile("y[a,b] = max[c](z[a,b,c])")
    torch.testing.assert_close(kernel(z=deferred(of)), F.linear(*of).amax(-1))


def test_they_are_not_read_after_weights_have_changed() -> None:
    of = weights()
    logits = deferred(of)
    with torch.no_grad():
        of[1].add_(1)
    with pytest.raises(EqfuseError, match="after its weights were changed"):
        logits.argmax(-1)
