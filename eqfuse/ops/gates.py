"""Gated activations of feed-forward layers."""

from __future__ import annotations

from eqfuse.ops.program import op

ROWS = {"gate": 1, "up": 1}


def _gated(function: str, given: frozenset[str]) -> str:
    if "up" in given:
        return f"y[b,d] = {function}(gate[b,d]) * up[b,d]"
    return f"y[b,d] = {function}(gate[b,d]) * gate[b,d + N(d)]"


@op("gate", "up", rows=ROWS)
def swiglu(given: frozenset[str]) -> str:
    """`silu(gate) * up` of tensors [..., d]; without `up`, the two halves of the last dimension of gate: [..., 2 d] (Shazeer, 2020)."""
    return _gated("silu", given)


@op("gate", "up", rows=ROWS)
def geglu(given: frozenset[str], approximate: bool = False) -> str:
    """`gelu(gate) * up`, likewise; `approximate` takes the form with tanh."""
    if not approximate:
        return _gated("gelu", given)
    up = "up[b,d]" if "up" in given else "gate[b,d + N(d)]"
    inner = "0.7978845608028654 * (gate[b,d] + 0.044715 * gate[b,d] * sq(gate[b,d]))"
    return f"y[b,d] = 0.5 * gate[b,d] * (1 + tanh({inner})) * {up}"
