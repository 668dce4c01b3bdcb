"""Attention in models of transformers: `eq.torch.register_attention()`.

A model that was loaded with `attn_implementation="eqfuse"` calls `attend` in every layer. transformers makes the mask,
as it does for `scaled_dot_product_attention`: of truth values, or none where attention is causal or sees all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from eqfuse.errors import EqfuseError
from eqfuse.kernel import Kernel
from eqfuse.operator.content import compiled
from eqfuse.operator.library import called

NAME = "eqfuse"
"""What `attn_implementation` is given."""

MASKS = {
    "all": "T[b,h,i,j] = R[b,h,i,j]",
    "causal": "T[b,h,i,j] = where(j <= i, R[b,h,i,j], -inf)",
    "truth": "M: bool[b,u,i,j]\nT[b,h,i,j] = where(M[b,0,i,j], R[b,h,i,j], -inf)",
    "added": "T[b,h,i,j] = R[b,h,i,j] + M[b,0,i,j]",
}
"""The scores, by what the mask is."""

CAPS = {False: "R[b,h,i,j] = S[b,h,i,j]", True: "R[b,h,i,j] = tanh(S[b,h,i,j] / cap) * cap"}

PROGRAM = """
S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h//g,j,d]) * scale
{cap}
{mask}
m[b,h,i] = max[j](T[b,h,i,j])
P[b,h,i,j] = exp(T[b,h,i,j] - m[b,h,i])
O[b,i,h,e] = {row}
return O
"""

ROW = "sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h//g,j,e])"

MAY_BE_EMPTY = ("truth", "added")
"""Masks that may leave nothing of a row, which is 0 then. The others leave its first position at least."""


@lru_cache(maxsize=64)
def kernel_for(mask: str, groups: int, is_capped: bool) -> Kernel:
    """The kernel of attention under a kind of mask, for so many heads of queries to one of keys. A row of which the mask
    leaves nothing is 0."""
    row = f"where(m[b,h,i] == -inf, 0, {ROW})" if mask in MAY_BE_EMPTY else ROW
    source = PROGRAM.format(cap=CAPS[is_capped], mask=MASKS[mask], row=row).strip()
    return compiled(source, scalars={"g": groups})  # type: ignore[no-any-return]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _content(mask: str, groups: int, is_capped: bool) -> str:
    """What the operator names the kernel by. Dynamo calls this while it traces, and keeps the text."""
    return kernel_for(mask, groups, is_capped).content


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [batch, heads, length, width], key and value with as many heads or fewer, a
    mask [batch, 1, length, length of keys] of truth values or to be added. Gives [batch, length, heads, width].
    Raises EqfuseError for dropout, and for sinks."""
    if dropout:
        raise EqfuseError(
            f"attention with dropout {dropout}", hint="set attention_dropout to 0, or call model.eval()"
        )
    if more.get("s_aux") is not None:
        raise EqfuseError(
            "attention with sinks is not registered", hint='load the model with attn_implementation="eager"'
        )
    kind = "all"
    given: dict[str, Any] = {"Q": query, "K": key, "V": value}
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[-2]]
        given["M"] = mask.expand(query.shape[0], 1, query.shape[2], key.shape[2])
        kind = "truth" if mask.dtype == torch.bool else "added"
    elif (getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1:
        kind = "causal"
    groups = 1
    while key.shape[1] * groups < query.shape[1]:  # under Dynamo a quotient of sizes may be a symbol
        groups += 1
    if softcap is not None:
        given["cap"] = float(softcap)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if is_dynamo_compiling():
        return called(_content(kind, groups, softcap is not None), {**given, "scale": scale}, None), None
    return kernel_for(kind, groups, softcap is not None)(**given, scale=scale), None


def register_attention() -> None:
    """Registers eqfuse's attention, and the mask that it takes, with transformers: load a model with
    `attn_implementation="eqfuse"`, or call `model.set_attn_implementation("eqfuse")`. Raises EqfuseError without
    transformers, or with one that has no interface for attention (before 4.53)."""
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    except ImportError as error:
        raise EqfuseError(
            f"transformers has no interface for attention here: {error}",
            hint="install transformers 4.53 or newer",
        ) from error
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
