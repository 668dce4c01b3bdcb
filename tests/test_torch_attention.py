"""Attention as transformers calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import eqfuse as eq
from eqfuse.torch.attention import attend


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


module = torch.nn.Module()
MASK = torch.tensor([[True, False, True, True, False]] * 3)[None, None]


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (None, False),
        (MASK.expand(2, 1, 3, 5), None),
        (torch.where(MASK, 0.0, -1e30).double(), None),
    ],
    ids=["all", "truth", "added"],
)
@pytest.mark.slow(but=["all"])
def test_attention_agrees_with_sdpa(mask: Any, causal: bool | None) -> None:
    q, k, v = r(2, 4, 3, 8), r(2, 2, 5, 8), r(2, 2, 5, 8)
    found, weights = attend(module, q, k, v, mask, scaling=0.3, is_causal=causal)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert weights is None and torch.allclose(found, expected.transpose(1, 2))


@pytest.mark.slow
def test_causal_attention_and_one_query() -> None:
    q, k, v = r(1, 2, 5, 8), r(1, 2, 5, 8), r(1, 2, 5, 8)
    found, _ = attend(module, q, k, v, None)
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2))
    found, _ = attend(module, q[:, :, :1], k, v, None)
    assert torch.allclose(found, F.scaled_dot_product_attention(q[:, :, :1], k, v).transpose(1, 2))


@pytest.mark.slow
def test_soft_caps() -> None:
    q, k, v = r(1, 2, 5, 8), r(1, 2, 5, 8), r(1, 2, 5, 8)
    found, _ = attend(module, q, k, v, None, softcap=2.0, is_causal=False)
    scores = torch.tanh(q @ k.mT * 8**-0.5 / 2) * 2
    assert torch.allclose(found, (torch.softmax(scores, -1) @ v).transpose(1, 2))


@pytest.mark.slow
def test_a_row_of_which_nothing_is_left_is_zero() -> None:
    q, k, v = r(1, 1, 2, 8), r(1, 1, 3, 8), r(1, 1, 3, 8)
    mask = torch.tensor([[True, True, False], [False, False, False]])[None, None]
    found, _ = attend(module, q, k, v, mask)
    assert torch.equal(found[0, 1], torch.zeros(1, 8, dtype=torch.float64))


def test_dropout_and_sinks_are_refused() -> None:
    q = r(1, 1, 2, 8)
    with pytest.raises(eq.EqfuseError, match="dropout 0.1"):
        attend(module, q, q, q, None, dropout=0.1)
    with pytest.raises(eq.EqfuseError, match="sinks"):
        attend(module, q, q, q, None, s_aux=torch.ones(1))


@pytest.mark.slow
def test_compiled_it_is_one_graph_for_all_lengths() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    call = torch.compile(
        lambda *given: attend(module, *given, None)[0], fullgraph=True, dynamic=True, backend=backend
    )
    for n in (5, 6, 9):
        q, k, v = r(1, 4, n, 8), r(1, 2, n, 8), r(1, 2, n, 8)
        assert torch.allclose(call(q, k, v), attend(module, q, k, v, None)[0])
    assert len(graphs) == 1
    assert sum(node.target is torch.ops.eqfuse.call.default for node in graphs[0].graph.nodes) == 1


def test_without_transformers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(eq.EqfuseError, match="transformers has no interface for attention here"):
        eq.torch.register_attention()


MODELS = {
    "BERT": ("BertConfig", "BertModel", {"hidden_act": "gelu"}),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
}
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    eq.torch.register_attention()
    config, model, more = MODELS[name]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **more)).double().eval()
    ids = torch.randint(0, 50, (2, 9))
    padding = torch.ones(2, 9, dtype=torch.long)
    padding[0, :3] = 0
    with torch.no_grad():
        for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": padding}):
            built.set_attn_implementation("sdpa")
            expected = built(**given)[0]
            built.set_attn_implementation("eqfuse")
            found = built(**given)[0]
            keep = given.get("attention_mask", torch.ones_like(ids)).bool()
            assert torch.allclose(found[keep], expected[keep], atol=1e-10)
        if name != "BERT":
            tokens = built.generate(ids, max_new_tokens=6, do_sample=False)
            built.set_attn_implementation("sdpa")
            assert torch.equal(tokens, built.generate(ids, max_new_tokens=6, do_sample=False))
