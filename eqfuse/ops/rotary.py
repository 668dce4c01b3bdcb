"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from eqfuse.errors import EqfuseError
from eqfuse.ops.program import op


def _of_positions(values: dict[str, Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    """Views of x: [n, b, s, ...] and of angles: [n, s, ...], of halves of features: (2, c), or where they are interleaved of features: (d)."""
    x = values["x"]
    if x.ndim < 2 or x.shape[-1] % 2:
        raise EqfuseError(
            f"x of shape {tuple(x.shape)} has no pairs of features at positions",
            hint="x: [..., positions, features], of an even number of features",
        )
    shape, half = x.shape, x.shape[-1] // 2
    features = shape[-1:] if options.get("interleaved") else (2, half)
    lead = (shape[0], prod(shape[1:-2])) if x.ndim > 3 else (1, prod(shape[:-2]))
    values["x"] = x.reshape(*lead, shape[-2], *features)
    for name in ("cos", "sin"):
        angles = values[name]
        batches = (1,) if angles.ndim == 2 else tuple(angles.shape[:-2])
        if angles.ndim < 2 or batches not in ((1,), lead[:1]) or angles.shape[-1] not in (half, shape[-1]):
            raise EqfuseError(
                f"{name!r} of shape {tuple(angles.shape)} has no angles of x: {tuple(shape)}",
                hint=f"{name}: [positions, {half}], or with a row for each of the first dimension of x",
            )
        positions = angles.shape[-2]
        if angles.shape[-1] == shape[-1]:
            angles = angles.unflatten(-1, features)
        elif len(features) > 1:
            angles = angles.unsqueeze(-2)
        else:
            angles = angles.repeat_interleave(2, -1)
        values[name] = angles.expand(lead[0], positions, *features)
    return lambda made: made.reshape(shape)


@op("x", "cos", "sin", shaped=_of_positions)
def rotary(given: frozenset[str], interleaved: bool = False) -> str:
    """Turns pairs of the features of x: [..., s, d] by the angles of their positions, cos and sin: [s, d / 2], which have no gradient (Su and others,
    2021). Pairs are the features c and c + d / 2, or neighbours where they are `interleaved`. Angles may also be [n, s, d / 2] of x: [n, ..., s, d], and have
    d numbers, one for each feature of the output."""
    if interleaved:
        at, pairs, other = "d", "", "where(d % 2 == 0, -x[n,b,s,d+1], x[n,b,s,d-1])"
    else:
        at, pairs, other = "p,c", "p: axis[2]\n", "where(p == 0, -x[n,b,s,1,c], x[n,b,s,0,c])"
    return f"""
{pairs}other[n,b,s,{at}] = {other}
y[n,b,s,{at}] = x[n,b,s,{at}] * stop(cos[n,s,{at}]) + other[n,b,s,{at}] * stop(sin[n,s,{at}])
return y"""
