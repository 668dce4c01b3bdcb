"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from eqfuse.errors import EqfuseError
from eqfuse.ops.program import op


def _in_pairs(values: dict[str, Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    """Views of x: [n, b, s, ...] and of angles: [n, s, ...], of pairs of features: (2, c), or (c, 2) where they are interleaved."""
    x = values["x"]
    if x.ndim < 2 or x.shape[-1] % 2:
        raise EqfuseError(
            f"x of shape {tuple(x.shape)} has no pairs of features at positions",
            hint="x: [..., positions, features], of an even number of features",
        )
    shape, half = x.shape, x.shape[-1] // 2
    is_interleaved = bool(options.get("interleaved"))
    pairs = (half, 2) if is_interleaved else (2, half)
    lead = (shape[0], prod(shape[1:-2])) if x.ndim > 3 else (1, prod(shape[:-2]))
    values["x"] = x.reshape(*lead, shape[-2], *pairs)
    for name in ("cos", "sin"):
        angles = values[name]
        batches = (1,) if angles.ndim == 2 else tuple(angles.shape[:-2])
        if angles.ndim < 2 or batches not in ((1,), lead[:1]) or angles.shape[-1] not in (half, shape[-1]):
            raise EqfuseError(
                f"{name!r} of shape {tuple(angles.shape)} has no angles of x: {tuple(shape)}",
                hint=f"{name}: [positions, {half}], or with a row for each of the first dimension of x",
            )
        if angles.shape[-1] == half:
            angles = angles.unsqueeze(-1 if is_interleaved else -2)
        else:
            angles = angles.unflatten(-1, pairs)
        values[name] = angles.expand(lead[0], angles.shape[-3], *pairs)
    return lambda made: made.reshape(shape)


@op("x", "cos", "sin", shaped=_in_pairs)
def rotary(given: frozenset[str], interleaved: bool = False) -> str:
    """Turns pairs of the features of x: [..., s, d] by the angles of their positions, cos and sin: [s, d / 2], which have no gradient (Su and others,
    2021). Pairs are the features c and c + d / 2, or neighbours where they are `interleaved`. Angles may also be [n, s, d / 2] of x: [n, ..., s, d], and have
    d numbers, one for each feature of the output."""
    own, first, second = ("c,p", "c,0", "c,1") if interleaved else ("p,c", "0,c", "1,c")
    return f"""
p: axis[2]
other[n,b,s,{own}] = where(p == 0, -x[n,b,s,{second}], x[n,b,s,{first}])
y[n,b,s,{own}] = x[n,b,s,{own}] * stop(cos[n,s,{own}]) + other[n,b,s,{own}] * stop(sin[n,s,{own}])
return y"""
