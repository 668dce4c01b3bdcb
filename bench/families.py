"""Small models of five families with random weights, made by transformers: what the back end is measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "batched_mm"}
"""Experts as products of weights that are picked for each token: shapes that no data decides."""


@dataclass(frozen=True)
class Family:
    """`config` and `model` are classes of transformers."""

    config: str
    model: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def made(self, seed: int = 0) -> Any:
        """The model, in float64 for evaluation, with torch's attention operator."""
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**SMALL, **self.more})
        model = getattr(transformers, self.model)(config).double().eval()
        model.set_attn_implementation("sdpa")
        return model


FAMILIES: Mapping[str, Family] = {
    "BERT": Family("BertConfig", "BertModel"),
    "Llama": Family("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "Qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "Qwen3-MoE": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS, "head_dim": 8, "num_experts": 4}
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
