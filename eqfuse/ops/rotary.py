"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eqfuse.errors import EqfuseError
from eqfuse.ops.program import op


def _in_pairs(values: dict[str, Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    x = values["x"]
    if x.ndim < 2 or x.shape[-1] % 2:
        raise EqfuseError(
            f"x of shape {tuple(x.shape)} has no pairs of features at positions",
            hint="x: [..., positions, features], of an even number of features",
        )
    pairs = (x.shape[-1] // 2, 2) if options.get("interleaved") else (2, x.shape[-1] // 2)
    values["x"] = x.unflatten(-1, pairs)
    return lambda made: made.flatten(-2)


@op("x", "cos", "sin", rows={"x": 3}, shaped=_in_pairs)
def rotary(given: frozenset[str], interleaved: bool = False) -> str:
    """Turns pairs of the features of x: [..., s, d] by the angles of their positions, cos and sin: [s, d / 2], which have no gradient (Su and others,
    2021). Pairs are the features c and c + d / 2, or neighbours where they are `interleaved`."""
    own, first, second = ("c,p", "c,0", "c,1") if interleaved else ("p,c", "0,c", "1,c")
    return f"""
p: axis[2]
other[b,s,{own}] = where(p == 0, -x[b,s,{second}], x[b,s,{first}])
y[b,s,{own}] = x[b,s,{own}] * stop(cos[s,c]) + other[b,s,{own}] * stop(sin[s,c])
return y"""
