"""Windows that slide over dimensions, from functions of torch: convolutions and pooling, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import eqfuse as eq


@dataclass(frozen=True)
class Case:
    """A function, shapes of its arguments, and other shapes of the first one for which its program is right too."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    others: tuple[tuple[int, ...], ...] = ()


IMAGE = (2, 3, 7, 8)
LONGER = (3, 3, 9, 10)
CASES = {
    "conv1d": Case(lambda x, w: F.conv1d(x, w, padding=1), ((2, 3, 9), (4, 3, 3)), ((1, 3, 12),)),
    "conv1d, groups": Case(
        lambda x, w, b: F.conv1d(x, w.view(6, 2, 3), b, stride=2, dilation=2, padding=3, groups=2),
        ((2, 4, 11), (36,), (6,)),
    ),
    "conv2d, bias": Case(lambda x, w, b: F.conv2d(x, w, b, padding=1), (IMAGE, (4, 3, 3, 3), (4,)), (LONGER,)),
    "conv2d, same": Case(lambda x, w: F.conv2d(x, w, padding="same"), (IMAGE, (4, 3, 3, 4)), (LONGER,)),
    "conv2d, no batch": Case(F.conv2d, (IMAGE[1:], (4, 3, 3, 3)), (LONGER[1:],)),
    "conv3d": Case(lambda x, w: F.conv3d(x, w, stride=2, padding=1), ((1, 2, 5, 6, 4), (3, 2, 3, 3, 3))),
    "transposed 1d": Case(
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, padding=1, output_padding=1),
        ((2, 3, 6), (3, 4, 3), (4,)),
        ((2, 3, 9),),
    ),
    "transposed 2d": Case(
        lambda x, w: F.conv_transpose2d(x, w.view(4, 2, 3, 3), stride=(2, 3), padding=1, dilation=2, groups=2),
        ((1, 4, 4, 5), (72,)),
    ),
    "max_pool1d": Case(
        lambda x: F.max_pool1d(x, 3, stride=2, padding=1), ((2, 3, 10),), ((1, 3, 13), (2, 3, 6))
    ),
    "max_pool1d, positions": Case(lambda x: F.max_pool1d(x, 2, return_indices=True), ((2, 3, 8),)),
    "conv1d, groups of a weight that is given": Case(
        lambda x, w, b: F.conv1d(x, w, b, groups=2), ((2, 4, 11), (6, 2, 3), (6,)), ((1, 4, 7),)
    ),
    "windows of normalised ones": Case(
        lambda x, w: F.avg_pool2d(F.conv2d(F.batch_norm(x, None, None, training=True).relu(), w), 2),
        (IMAGE, (4, 3, 1, 1)), (LONGER,),
    ),
    "depthwise": Case(lambda x, w: F.conv2d(x, w, groups=3), (IMAGE, (3, 1, 3, 3)), (LONGER,)),
    "max_pool2d": Case(lambda x: F.max_pool2d(x, 2), (IMAGE,), (LONGER,)),
    "max_pool2d, positions": Case(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (IMAGE,)),
    "max_pool2d, last windows in part": Case(lambda x: F.max_pool2d(x, 3, 2, dilation=2, ceil_mode=True), (IMAGE,)),
    "max_pool3d": Case(lambda x: F.max_pool3d(x, 2), ((1, 2, 4, 5, 6),)),
    "avg_pool1d": Case(lambda x: F.avg_pool1d(x, 4, 2, 1), ((2, 3, 11),)),
    "avg_pool2d, without padding": Case(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (IMAGE,), (LONGER,)),
    "avg_pool2d, last windows in part": Case(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), ((2, 3, 8, 8),)),
    "avg_pool2d, divisor": Case(lambda x: F.avg_pool2d(x, 3, divisor_override=5), (IMAGE,)),
    "adaptive_avg_pool2d": Case(lambda x: F.adaptive_avg_pool2d(x, (3, 5)), (IMAGE,)),
    "adaptive_avg_pool2d to one": Case(lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,), (LONGER,)),
    "adaptive_max_pool2d": Case(lambda x: F.adaptive_max_pool2d(x, (3, 3)), (IMAGE,)),
    "lp_pool2d": Case(lambda x: F.lp_pool2d(x.abs(), 2, 2), (IMAGE,)),
    "unfold": Case(lambda x: F.unfold(x, 3), (IMAGE,)),
    "pooled convolution": Case(
        lambda x, w: F.max_pool2d(F.relu(F.conv2d(x, w)), 2), ((1, 2, 7, 8), (3, 2, 3, 3))
    ),
}  # fmt: skip
CASES |= {
    "transposed 3d": Case(
        lambda x, w: F.conv_transpose3d(x, w, stride=2, padding=1), ((1, 2, 3, 3, 2), (2, 2, 3, 3, 3))
    ),
    "pooled 3d convolution": Case(
        lambda x, w: F.avg_pool3d(F.conv3d(x, w), 2), ((1, 2, 5, 6, 5), (2, 2, 2, 2, 2))
    ),
}
BACKWARD = (
    "conv2d, bias",
    "conv2d, same",
    "transposed 1d",
    "max_pool2d",
    "avg_pool2d, without padding",
    "unfold",
    "pooled convolution",
)


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["conv1d", "avg_pool2d, divisor"])
def test_windows_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    program = eq.from_torch(case.fn, *drawn(*case.shapes), native="off")
    for first in (case.shapes[0], *case.others):
        given = drawn(first, *case.shapes[1:])
        found, expected = map(pytree.tree_leaves, (program(*given), case.fn(*given)))
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert torch.allclose(one.double(), other.double(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.slow
def test_gradients_of_windows_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    given = [tensor.requires_grad_() for tensor in drawn(*case.shapes)]
    to = torch.randn_like(case.fn(*given))
    found = torch.autograd.grad(eq.from_torch(case.fn, *given, native="off")(*given), given, to)
    for one, other in zip(found, torch.autograd.grad(case.fn(*given), given, to), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-10)


def test_no_condition_is_asked_that_always_holds() -> None:
    """One that no trial finds false is not verified, so that the program would run as written."""
    module = torch.nn.ConvTranspose1d(2, 3, 4, stride=2, padding=3)
    text = eq.from_torch(module, torch.randn(2, 2, 5)).source
    assert "where((n + 3 - k) % 2 == 0, input" in text
    program = eq.from_torch(lambda x: F.max_pool1d(x, 3, 2, 1), torch.randn(2, 3, 8), native="off")
    assert ">= 1" in program.source and program.kernel.refused is None
    assert "where" not in eq.from_torch(lambda x: F.max_pool1d(x, 2), torch.randn(2, 3, 8)).source


@pytest.mark.slow
def test_the_greatest_of_windows_of_any_numbers() -> None:
    """Negative numbers beside padding, rows that are masked wholly, and integers, which have no number for what is outside."""
    for x in (torch.full((1, 1, 4, 4), -5.0), torch.full((1, 1, 4, 4), float("-inf"))):
        assert torch.equal(
            eq.from_torch(lambda x: F.max_pool2d(x, 3, 2, 1), x, native="off")(x), F.max_pool2d(x, 3, 2, 1)
        )
    x = torch.randint(-9, 9, (1, 2, 5, 6))
    for given in ((2,), (3, 2, 1)):
        found = eq.from_torch(lambda x, given=given: F.max_pool2d(x, *given), x, native="off")(x)
        assert torch.equal(found, F.max_pool2d(x, *given))
