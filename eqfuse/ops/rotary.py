"""Rotary position embeddings."""

from __future__ import annotations

from eqfuse.ops.program import op


@op("x", "cos", "sin", rows={"x": 2})
def rotary(given: frozenset[str], interleaved: bool = False) -> str:
    """Turns pairs of the features of x: [..., s, d] by the angles of their positions, cos and sin: [s, d / 2] (Su and others, 2021). Pairs are the
    features c and c + d / 2, or neighbours where they are `interleaved`."""
    if interleaved:
        return """
y[b,s,d] = x[b,s,d] * cos[s,d//2] + where(d % 2 == 0, -x[b,s,min(d+1, N(d)-1)], x[b,s,max(d-1, 0)]) * sin[s,d//2]"""
    return """
y[b,s,d] = x[b,s,d] * cos[s,d % (N(d)//2)] + where(d < N(d)//2, -x[b,s,(d + N(d)//2) % N(d)], x[b,s,(d + N(d)//2) % N(d)]) * sin[s,d % (N(d)//2)]"""
