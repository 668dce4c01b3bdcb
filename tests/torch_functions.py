"""Functions of one real number, as torch computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

UNARY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "round": torch.round,
    "sq": torch.square,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    # torch's own is NaN of an infinity on some processors
    "gelu": lambda x: x * ((1 + torch.erf(x * 0.5**0.5)) / 2),
    "silu": torch.nn.functional.silu,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "neg": torch.neg,
}
