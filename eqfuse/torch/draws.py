"""Random numbers of a function, which torch draws before each call: they are inputs of the program.

So they are the numbers that the function gets from the same state of torch's generator. Those that nothing reads are not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eqfuse.terms.nodes import Const, call
from eqfuse.torch.operators.table import Node, elementwise, number
from eqfuse.torch.positions import Size
from eqfuse.torch.values import Value

DROPOUTS = frozenset({"aten.dropout", "aten.native_dropout"})

DRAWING = DROPOUTS | {f"aten.{name}" for name in ("bernoulli", "rand", "rand_like", "randn", "randn_like")}
"""Operators that may draw what can be drawn before a call."""

Maker = Callable[[torch.Size, torch.device], torch.Tensor]
"""Draws numbers of a shape on a device."""


@dataclass(frozen=True)
class Draw:
    """An input of a program that is drawn: its shape, how its dimensions follow each other in memory, and what draws it."""

    name: str
    shape: tuple[Size, ...]
    order: tuple[int, ...]
    make: Maker

    def drawn(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """The numbers: torch draws them in the order of memory."""
        made = self.make(torch.Size([shape[d] for d in self.order]), device)
        return made.permute([self.order.index(d) for d in range(len(shape))])


def order_of(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor of a graph, the nearest in memory last."""
    strides = [s if isinstance(s, int) else s.node.hint for s in value.stride()]
    return tuple(sorted(range(value.dim()), key=lambda d: -strides[d]))


def maker_of(operator: str, given: Mapping[str, Any], dtype: torch.dtype) -> Maker | None:
    """What draws the numbers of a call of an operator, by its arguments and the dtype of its result; None where nothing is drawn that
    could be drawn before the call. Dropout draws nothing where it keeps all, or nothing."""
    if given.get("generator") is not None:
        return None
    p = given.get("p")
    if operator in DROPOUTS and given["train"] is not False and 0 < given["p"] < 1:
        return lambda shape, place: torch.native_dropout(
            torch.ones(shape, dtype=dtype, device=place), given["p"], True
        )[1]
    match operator:
        case "aten.bernoulli" if isinstance(p, int | float):
            return lambda shape, place: torch.empty(shape, dtype=dtype, device=place).bernoulli_(p)
        case "aten.rand" | "aten.rand_like":
            return lambda shape, place: torch.rand(shape, dtype=dtype, device=place)
        case "aten.randn" | "aten.randn_like":
            return lambda shape, place: torch.randn(shape, dtype=dtype, device=place)
    return None


def dropped(node: Node, kept: Value) -> Value | tuple[Value, ...]:
    """What dropout returns, given what it keeps."""
    scale = Const(1 / (1 - node.given["p"]))
    made = elementwise(
        node.shape,
        node.dtype,
        [node.value("input"), kept],
        lambda x, one: call("mul", call("mul", x, number(kept, one)), scale),
    )
    return made if len(node.shapes) == 1 else (made, kept)
