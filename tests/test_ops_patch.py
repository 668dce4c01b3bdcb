"""Models whose parts are programs of the library: the same outputs, losses and gradients, and back again."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.ops.deferred_logits import DeferredLogits


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


# A causal model of the form that transformers has --------------------------------------------------


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turned(q), turned(k)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 3 * 8)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class TinyForCausalLM(nn.Module):
    """`between` is what the model does between its last linear layer and the loss."""

    def __init__(self, between: Any = None, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attention = nn.Embedding(11, 8), Attention()
        self.lm_head, self.between = nn.Linear(8, 11, bias=bias), between

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    @property
    def loss_function(self) -> Any:
        return getattr(self, "_loss_function", self._own_loss)

    def _own_loss(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(ids.shape[1])[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        angles = (angles + torch.arange(len(ids))[:, None, None]).to(self.lm_head.weight.dtype)
        x = self.embedding(ids)
        logits = self.lm_head(x + self.attention(x, angles.cos(), angles.sin()))
        if self.between is not None:
            logits = self.between(logits)
        return self.loss_function(logits=logits, labels=labels, vocab_size=11), logits


IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))
LABELS = IDS.index_fill(1, torch.tensor([2]), -100)
WITHOUT_LOGITS = "ops.linear_cross_entropy in training, else ops.cross_entropy"


def trained(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, the logits as they come, and gradients."""
    model.zero_grad()
    loss, logits = model(IDS, LABELS)
    loss.backward()
    return loss, logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_a_loss_without_logits(cap: float | None, bias: bool) -> None:
    own = TinyForCausalLM(cap and (lambda z: torch.tanh(z / cap) * cap), bias)
    loss, logits, grads = trained(own)
    with eq.patch(own) as patched:
        assert {(each.kind, each.program) for each in patched.replaced} == {
            ("apply_rotary_pos_emb", "ops.rotary"),
            ("loss", WITHOUT_LOGITS),
        }
        found, deferred, found_grads = trained(own)
        assert isinstance(deferred, DeferredLogits) and deferred.is_capped and not patched.left
        torch.testing.assert_close(found, loss)
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(deferred + 0, logits)  # asked for, they are there
        assert [each.why for each in patched.left] == ["the logits are read, by add"]
        assert type(own.eval()(IDS, LABELS)[1]) is torch.Tensor
    assert not vars(own.lm_head).get("forward") and not vars(own.attention).get("forward")
    assert torch.equal(trained(own.train())[0], loss)


def test_what_is_between_logits_and_loss_is_computed() -> None:
    own = TinyForCausalLM(lambda z: z.exp())
    loss, _, grads = trained(own)
    with eq.patch(own) as patched:
        found, _, found_grads = trained(own)
    torch.testing.assert_close(found, loss)
    for name, grad in grads.items():
        torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6)
    assert "left: the logits are read, by exp" in str(patched)


def test_losses_under_autocast_and_in_halves() -> None:
    own = TinyForCausalLM().bfloat16()
    with eq.patch(own):
        loss, logits, _ = trained(own)
        assert loss.dtype == torch.float32 and logits.dtype == torch.bfloat16
        torch.testing.assert_close(loss, own._own_loss(logits, LABELS, 11), rtol=2e-2, atol=2e-2)
        with torch.autocast("cpu", torch.bfloat16):
            loss, logits, grads = trained(own.float())
        assert logits.dtype == torch.bfloat16 and grads["lm_head.weight"].dtype == torch.float32
        torch.testing.assert_close(loss, own._own_loss(logits, LABELS, 11), rtol=2e-2, atol=2e-2)


class Scaled(nn.Linear):
    pass


def test_heads_and_losses_that_are_left() -> None:
    own = TinyForCausalLM()
    own.lm_head = Scaled(8, 11)
    assert "left: the logits are made by a Scaled, not by nn.Linear" in str(eq.patch(own))
    assert type(trained(own)[1]) is torch.Tensor
    hooked = TinyForCausalLM()
    seen: list[torch.Tensor] = []
    hooked.lm_head.register_forward_hook(lambda module, given, made: seen.append(made))
    with eq.patch(hooked):
        assert type(trained(hooked)[1]) is torch.Tensor and type(seen[0]) is torch.Tensor
    own = TinyForCausalLM()
    own._own_loss = lambda logits, labels, vocab_size: logits.sum()  # type: ignore[method-assign]
    assert "left: it computes something else" in str(eq.patch(own))


def test_rotary_positions_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    own = TinyForCausalLM()
    eq.patch(own)
    assert "left: its forward is replaced" in str(eq.patch(own))
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert "left: it computes something else" in str(eq.patch(TinyForCausalLM()))
    monkeypatch.setattr(Attention, "forward", torch.no_grad()(Attention.forward))
    assert "left: its forward is decorated" in str(eq.patch(TinyForCausalLM()))


def test_a_patched_model_is_compiled_whole() -> None:
    own = TinyForCausalLM()
    loss, _, _ = trained(own)
    with eq.patch(own):
        compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(trained(compiled)[0], loss)


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
    built = getattr(transformers, kind)(
        getattr(transformers, config)(**SMALL, **more)
    )  # in training: none drops out
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
        assert isinstance(found.logits, DeferredLogits) == (name != "ViT")
        assert any(each.program == "ops.rotary" for each in patched.replaced) == (name != "ViT")
    torch.testing.assert_close(found.logits + 0, wanted.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    for n, p in built.named_parameters():
        if n in grads:
            torch.testing.assert_close(p.grad, grads[n], rtol=1e-3, atol=1e-5)
    assert built.config._attn_implementation == before
    torch.testing.assert_close(built(**given).logits, wanted.logits, rtol=0, atol=0)
