"""Programs that models are made of, each a few lines of mathematics: call them, or take their text and change it.

    from eqfuse import ops

    y, h = ops.add_rms_norm(x, residual, w)
    print(ops.add_rms_norm.text())

Gradients, plans and certificates are those of `eq.compile(text)`; nothing in the compiler knows these programs.
"""

from eqfuse.ops.attention import attention, differential_attention, linear_attention, paged_decode
from eqfuse.ops.gates import geglu, swiglu
from eqfuse.ops.losses import (
    contrastive,
    cross_entropy,
    distillation,
    dpo,
    grpo,
    kto,
    linear_cross_entropy,
    linear_token_log_probs,
    token_log_probs,
)
from eqfuse.ops.norms import add_layer_norm, add_rms_norm, group_norm_silu, layer_norm, rms_norm
from eqfuse.ops.program import Op, op
from eqfuse.ops.rotary import rotary
from eqfuse.ops.routing import quantize_rows, quantized_linear, route

CATALOGUE: tuple[Op, ...] = (
    rms_norm,
    add_rms_norm,
    layer_norm,
    add_layer_norm,
    group_norm_silu,
    swiglu,
    geglu,
    rotary,
    cross_entropy,
    linear_cross_entropy,
    token_log_probs,
    linear_token_log_probs,
    distillation,
    dpo,
    kto,
    grpo,
    contrastive,
    route,
    quantize_rows,
    quantized_linear,
    attention,
    differential_attention,
    linear_attention,
    paged_decode,
)
"""Every program of the library."""

__all__ = [
    "CATALOGUE",
    "Op",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "contrastive",
    "cross_entropy",
    "differential_attention",
    "distillation",
    "dpo",
    "geglu",
    "group_norm_silu",
    "grpo",
    "kto",
    "layer_norm",
    "linear_attention",
    "linear_cross_entropy",
    "linear_token_log_probs",
    "op",
    "paged_decode",
    "quantize_rows",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "route",
    "swiglu",
    "token_log_probs",
]
