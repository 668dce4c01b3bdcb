"""Gated activations of feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eqfuse.errors import EqfuseError
from eqfuse.ops.program import op

ROWS = {"gate": 1, "up": 1}


def _in_halves(values: dict[str, Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    """One tensor as its two halves, which are views of it."""
    if "up" not in values:
        gate = values["gate"]
        if gate.ndim < 1 or gate.shape[-1] % 2:
            raise EqfuseError(
                f"gate of shape {tuple(gate.shape)} has no two halves",
                hint="give up=, or a tensor whose last dimension has both",
            )
        values["gate"], values["up"] = gate.chunk(2, -1)
    return lambda made: made


@op("gate", "up", rows=ROWS, shaped=_in_halves)
def swiglu(given: frozenset[str]) -> str:
    """`silu(gate) * up` of tensors [..., d]; without `up`, of the two halves of the last dimension of gate: [..., 2 d] (Shazeer, 2020)."""
    return "y[b,d] = silu(gate[b,d]) * up[b,d]"


@op("gate", "up", rows=ROWS, shaped=_in_halves)
def geglu(given: frozenset[str], approximate: bool = False) -> str:
    """`gelu(gate) * up`, likewise; `approximate` takes the form with tanh."""
    if not approximate:
        return "y[b,d] = gelu(gate[b,d]) * up[b,d]"
    inner = "0.7978845608028654 * (gate[b,d] + 0.044715 * gate[b,d] * sq(gate[b,d]))"
    return f"y[b,d] = 0.5 * gate[b,d] * (1 + tanh({inner})) * up[b,d]"
