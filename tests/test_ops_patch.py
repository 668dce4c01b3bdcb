"""Models whose parts are programs of the library: the same outputs, losses and gradients, and back again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eqfuse as eq
from eqfuse.errors import EqfuseError


class RMSNorm(nn.Module):
    def __init__(self, size: int, offset: float = 0.0, power: float = -0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.eps, self.offset, self.power = 1e-6, offset, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.eps) ** self.power
        return x * scale * (self.weight + self.offset)


class Gated(nn.Module):
    def __init__(self, size: int, act_fn: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.down_proj, self.act_fn = nn.Linear(2 * size, size), act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return made


class Halves(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(size, 4 * size), nn.Linear(2 * size, size)
        self.activation_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        made: torch.Tensor = self.down_proj(up * self.activation_fn(gate))
        return made


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        RMSNorm(8),
        Gated(8, nn.SiLU()),
        RMSNorm(8, offset=1.0),
        Gated(8, nn.GELU()),
        Gated(8, nn.GELU(approximate="tanh")),
        Halves(8),
        nn.LayerNorm(8, elementwise_affine=False),
        RMSNorm(8, power=-0.4),
        Gated(8, nn.ReLU()),
        nn.LayerNorm((3, 8)),
    )


PROGRAMS = {
    "1": "ops.layer_norm",
    "2": "ops.rms_norm",
    "3": "ops.swiglu",
    "4": "ops.rms_norm(offset=1.0)",
    "5": "ops.geglu",
    "6": "ops.geglu(approximate=True)",
    "7": "ops.swiglu",
    "8": "ops.layer_norm",
}


def test_a_patched_model_computes_the_same() -> None:
    own = model()
    x = torch.randn(2, 3, 8)
    wanted = own(x)
    wanted.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None}
    own.zero_grad()
    patched = eq.patch(own)
    assert {each.place: each.program for each in patched.replaced} == PROGRAMS
    assert {each.place: each.why for each in patched.left} == {
        "9": "it computes something else",
        "10": "its activation is neither SiLU nor GELU",
        "11": "it is over 2 dimensions",
    }
    found = own(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    for name, p in own.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-3, atol=1e-4)
    text = str(patched)
    assert "ops.geglu(approximate=True)" in text and "left: it computes something else" in text
    patched.undo()
    assert torch.equal(own(x), wanted) and not any("forward" in vars(each) for each in own)
    patched.undo()


def test_a_with_block_undoes_it() -> None:
    own = model()
    with eq.patch(own) as patched:
        assert patched.replaced
    assert not any("forward" in vars(each) for each in own)


def test_a_copy_of_a_patched_model_has_its_own_weights() -> None:
    own = nn.Sequential(RMSNorm(8), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    with eq.patch(own):
        other = copy.deepcopy(own)
        with torch.no_grad():
            own[1].weight.zero_()
        assert not own(x).any() and other(x).any()
        assert own.state_dict().keys() == other.state_dict().keys()


def test_a_patched_model_in_halves() -> None:
    own = nn.Sequential(nn.LayerNorm(8), RMSNorm(8), Gated(8, nn.SiLU())).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    wanted = own(x)
    with eq.patch(own) as patched:
        assert len(patched.replaced) == 3
        found = own(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(EqfuseError, match="no nn.Module"):
        eq.patch(torch.randn(3))  # type: ignore[arg-type]
    assert str(eq.patch(nn.Linear(3, 3))) == "nothing was replaced"


def test_the_loss_of_the_next_token() -> None:
    from eqfuse.ops.patch import next_token_loss

    logits, labels = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    labels[0, 3:] = -100
    rows, label = logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1)
    torch.testing.assert_close(next_token_loss(logits, labels, 11), F.cross_entropy(rows, label))
    summed = F.cross_entropy(rows, label, reduction="sum")
    torch.testing.assert_close(next_token_loss(logits, labels, 11, num_items_in_batch=5), summed / 5)


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", GROUPED),
    "Qwen 3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "Phi 3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "GPT-OSS": ("GptOssConfig", "GptOssForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "ViT": ("ViTConfig", "ViTForImageClassification", {"image_size": 32, "patch_size": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, kind, more = MODELS[name]
    torch.manual_seed(0)
    built = getattr(transformers, kind)(getattr(transformers, config)(**SMALL, **more)).eval()
    given: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    if name != "ViT":
        ids = torch.randint(3, 50, (2, 9))
        given = {"input_ids": ids, "labels": ids.clone().index_fill(1, torch.tensor([0, 1]), -100)}
    before = built.config._attn_implementation
    wanted = built(**given)
    wanted.loss.backward()
    grads = {n: p.grad.clone() for n, p in built.named_parameters() if p.grad is not None}
    built.zero_grad()
    with eq.patch(built) as patched:
        assert len(patched.replaced) >= 6
        found = built(**given)
        found.loss.backward()
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    for n, p in built.named_parameters():
        if n in grads:
            torch.testing.assert_close(p.grad, grads[n], rtol=1e-3, atol=1e-5)
    assert built.config._attn_implementation == before
    torch.testing.assert_close(built(**given).logits, wanted.logits, rtol=0, atol=0)
