"""vLLM with programs of eqfuse.ops in place of its RMSNorm (with a residual too), SiluAndMul and rotary positions.

Written for the public interface of vLLM 0.33: `CustomOp.register_oot(name=...)`, and layers whose `forward_cuda`, `forward_cpu`, ... or, on a platform
of a plugin, `forward_oot` is called. vLLM calls `register()` in each of its processes before it makes a model, where an installed package that has this
file names it as a plugin in its pyproject.toml:

    [project.entry-points."vllm.general_plugins"]
    eqfuse = "vllm_ops:register"

The layers run where custom ops are enabled; they go by the names of their classes:

    vllm serve MODEL --compilation-config '{"custom_ops": ["none", "+RMSNorm", "+SiluAndMul", "+RotaryEmbedding"]}'

A layer of another class, as GemmaRMSNorm or Llama3RotaryEmbedding, stays vLLM's own.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

import eqfuse as eq
from eqfuse import ops

try:
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers import activation, layernorm, rotary_embedding
except ModuleNotFoundError as missing:
    raise ImportError(f"vllm_ops needs vLLM 0.33 ({missing}): pip install vllm") from None

ROTARY = {
    interleaved: eq.compile(ops.rotary.text(interleaved=interleaved).replace("b,s,", "s,b,"))
    for interleaved in (False, True)
}
"""vLLM has positions before heads: ops.rotary with its first two axes in that order, which spares a copy."""


class RMSNorm(layernorm.RMSNorm):
    """x: [..., hidden_size], and residual like it. Gives the norm, or the norm of the sum and the sum, in the dtype of x, as new tensors."""

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self.variance_size_override is not None:  # the mean is of a part of the features
            return self.forward_native(x, residual)  # type: ignore[no-any-return]
        weight, eps = self.weight.data, self.variance_epsilon
        if residual is None:
            normed: Tensor = ops.rms_norm(x, weight, eps=eps)
            return normed.to(x.dtype)
        normed, added = ops.add_rms_norm(x, residual, weight, eps=eps)
        return normed.to(x.dtype), added.to(x.dtype)

    forward_cuda = forward_hip = forward_xpu = forward_cpu = forward_oot


class SiluAndMul(activation.SiluAndMul):
    """x: [..., 2 d]. Gives silu of its first half times the second: [..., d]."""

    def forward_oot(self, x: Tensor) -> Tensor:
        gated: Tensor = ops.swiglu(x)
        return gated

    forward_cuda = forward_hip = forward_xpu = forward_cpu = forward_oot


class RotaryEmbedding(rotary_embedding.RotaryEmbedding):
    """positions: as many numbers as tokens; query and key: [..., heads * head_size] or [..., heads, head_size], and key may be None. Gives query and key with
    the first `rotary_dim` features of each head turned, as new tensors."""

    def forward_oot(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        turns = self.cos_sin_cache.to(query.device).index_select(0, positions.flatten())
        return self._turned(query, turns), None if key is None else self._turned(key, turns)

    forward_cuda = forward_hip = forward_xpu = forward_cpu = forward_oot

    def _turned(self, x: Tensor, turns: Tensor) -> Tensor:
        heads = x.reshape(turns.shape[0], -1, self.head_size)
        turning, staying = heads.tensor_split([self.rotary_dim], -1)
        angles = turns.to(x.dtype).unsqueeze(0).chunk(2, -1)
        if self.is_neox_style:
            halves = turning.reshape(1, *turning.shape[:-1], 2, -1)
            cos, sin = (each.unsqueeze(-2).expand(-1, -1, *halves.shape[-2:]) for each in angles)
            turned = ROTARY[False](x=halves, cos=cos, sin=sin).flatten(-2)
        else:
            cos, sin = (each.repeat_interleave(2, -1) for each in angles)
            turned = ROTARY[True](x=turning.unsqueeze(0), cos=cos, sin=sin)
        turned = turned.squeeze(0)
        return (torch.cat((turned, staying), -1) if staying.shape[-1] else turned).reshape(x.shape)


@cache
def register() -> None:
    """Puts the layers in place of vLLM's of the same names, for models that are made afterwards. A second call changes nothing."""
    for layer in (RMSNorm, SiluAndMul, RotaryEmbedding):
        CustomOp.register_oot(layer, name=layer.__name__)
