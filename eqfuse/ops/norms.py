"""Norms, alone and after the addition of a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eqfuse.errors import EqfuseError
from eqfuse.ops.program import op

X = {"x": 1}
BOTH = {"x": 1, "residual": 1}


def _weight(offset: float) -> str:
    return f"(w[d] + {offset!r})" if offset else "w[d]"


@op("x", "w", rows=X)
def rms_norm(given: frozenset[str], eps: float = 1e-6, offset: float = 0.0) -> str:
    """`x / sqrt(mean(x^2) + eps) * (w + offset)` along the last dimension of x: [..., d], w: [d] (Zhang and Sennrich, 2019). Gemma's has an
    offset of 1."""
    return f"""y[b,d] = x[b,d] * rsqrt(mean[d](sq(x[b,d])) + {eps!r}) * {_weight(offset)}"""


@op("x", "residual", "w", rows=BOTH)
def add_rms_norm(given: frozenset[str], eps: float = 1e-6, offset: float = 0.0) -> str:
    """The norm of `h = x + residual`, and h, which the next block adds to: x and residual: [..., d], w: [d]."""
    return f"""
h[b,d] = x[b,d] + residual[b,d]
y[b,d] = h[b,d] * rsqrt(mean[d](sq(h[b,d])) + {eps!r}) * {_weight(offset)}
return y, h"""


def _layer_norm(of: str, given: frozenset[str], eps: float) -> str:
    bias = " + bias[d]" if "bias" in given else ""
    weight = " * w[d]" if "w" in given else ""
    return f"""
m[b] = mean[d]({of}[b,d])
y[b,d] = ({of}[b,d] - m[b]) * rsqrt(mean[d](sq({of}[b,d] - m[b])) + {eps!r}){weight}{bias}"""


@op("x", "w", "bias", rows=X)
def layer_norm(given: frozenset[str], eps: float = 1e-5) -> str:
    """`(x - mean(x)) / sqrt(var(x) + eps) * w + bias` along the last dimension of x: [..., d]; w and bias: [d], or left out (Ba and
    others, 2016)."""
    return _layer_norm("x", given, eps) + "\nreturn y"


@op("x", "residual", "w", "bias", rows=BOTH)
def add_layer_norm(given: frozenset[str], eps: float = 1e-5) -> str:
    """The layer norm of `h = x + residual`, and h."""
    return "h[b,d] = x[b,d] + residual[b,d]" + _layer_norm("h", given, eps) + "\nreturn y, h"


def _in_groups(values: dict[str, Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    groups = options.get("groups", 32)
    x = values["x"]
    if x.ndim < 2 or x.shape[1] % groups:
        raise EqfuseError(
            f"x of shape {tuple(x.shape)} has no {groups} groups of channels",
            hint="the second dimension is of channels, a multiple of groups=",
        )
    values["x"] = x.reshape(x.shape[0], groups, x.shape[1] // groups, -1)
    for name in ("w", "bias"):
        if name in values:
            values[name] = values[name].reshape(groups, -1)
    return lambda made: made.reshape(x.shape)


@op("x", "w", "bias", shaped=_in_groups)
def group_norm_silu(
    given: frozenset[str], eps: float = 1e-5, activation: bool = True, groups: int = 32
) -> str:
    """The group norm of x: [n, channels, ...], with w and bias: [channels] or left out, and then SiLU (Wu and He, 2018); `groups` divides
    the channels."""
    weight = " * w[g,c]" if "w" in given else ""
    bias = " + bias[g,c]" if "bias" in given else ""
    value = f"(x[n,g,c,l] - m[n,g]) * rsqrt(mean[c,l](sq(x[n,g,c,l] - m[n,g])) + {eps!r}){weight}{bias}"
    return f"""
m[n,g] = mean[c,l](x[n,g,c,l])
y[n,g,c,l] = {f"silu({value})" if activation else value}
return y"""
