"""Examples that bring eqfuse.ops into vLLM and into `kernels` of Hugging Face: values are torch's, and what is missing is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import needs
import pytest
import torch
from torch import nn

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal shapes and dtypes, and values but for rounding: of the output in bfloat16, and of sums in float32."""
    error = 2**-7 if expected.dtype is torch.bfloat16 else 1e-5
    return (
        found.shape == expected.shape
        and found.dtype is expected.dtype
        and torch.allclose(found.float(), expected.float(), rtol=error, atol=error)
    )


# vLLM: what the example imports, as vLLM 0.33 has it ------------------------------------------------------


class CustomOp(nn.Module):
    """Makes the registered class of a name, and calls the method of the platform."""

    platform = "cpu"
    replaced: ClassVar[dict[str, type[CustomOp]]] = {}

    def __new__(cls, *given: Any, **named: Any) -> Self:
        return super().__new__(CustomOp.replaced.get(cls.__name__, cls))

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = getattr(self, f"forward_{CustomOp.platform}", self.forward_native)

    def forward(self, *given: Any) -> Any:
        return self._forward_method(*given)

    @classmethod
    def register_oot(cls, layer: type[CustomOp], *, name: str) -> None:
        assert name not in CustomOp.replaced, f"Duplicate op name: {name}"
        CustomOp.replaced[name] = layer


class RMSNorm(CustomOp):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.variance_epsilon, self.variance_size_override = eps, var_hidden_size
        self.weight = nn.Parameter(torch.randn(hidden_size, dtype=dtype))

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        total = x.float() if residual is None else x.float() + residual.float()
        part = total[..., : self.variance_size_override]
        normed = total * torch.rsqrt(part.square().mean(-1, keepdim=True) + self.variance_epsilon)
        normed = (normed * self.weight.float()).to(x.dtype)
        return normed if residual is None else (normed, total.to(x.dtype))


class SiluAndMul(CustomOp):
    @staticmethod
    def forward_native(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return (nn.functional.silu(gate) * up).to(x.dtype)


class RotaryEmbedding(CustomOp):
    def __init__(self, head_size: int, rotary_dim: int, positions: int, is_neox_style: bool) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, is_neox_style
        rates = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
        angles = torch.outer(torch.arange(positions), rates)
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1), persistent=False)

    def forward_native(self, positions: torch.Tensor, query: torch.Tensor, key: Any = None) -> Any:
        turns = self.cos_sin_cache[positions.flatten()].to(query.dtype).float()
        cos, sin = (half[:, None] for half in turns.chunk(2, -1))

        def turned(x: torch.Tensor) -> torch.Tensor:
            heads = x.reshape(positions.numel(), -1, self.head_size).float()
            turning, staying = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
            if self.is_neox_style:
                a, b = turning.chunk(2, -1)
                made = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            else:
                a, b = turning[..., ::2], turning[..., 1::2]
                made = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
            return torch.cat((made, staying), -1).reshape(x.shape).to(x.dtype)

        return turned(query), None if key is None else turned(key)


def module(name: str, **held: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(held)
    return made


@pytest.fixture
def vllm_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example beside a vLLM of the three layers."""
    layers = {
        "layernorm": module("layernorm", RMSNorm=RMSNorm),
        "activation": module("activation", SiluAndMul=SiluAndMul),
        "rotary_embedding": module("rotary_embedding", RotaryEmbedding=RotaryEmbedding),
    }
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, module(name))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.custom_op", module("custom_op", CustomOp=CustomOp))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers", module("layers", **layers))
    monkeypatch.setattr(CustomOp, "replaced", {})
    monkeypatch.delitem(sys.modules, "examples.vllm_ops", raising=False)
    example = import_module("examples.vllm_ops")
    example.register()
    yield example
    sys.modules.pop("examples.vllm_ops")


@DTYPES
@pytest.mark.parametrize("platform", ["cpu", "cuda", "oot"])
def test_vllm_layers_of_every_platform_are_replaced(
    vllm_ops: ModuleType, monkeypatch: pytest.MonkeyPatch, platform: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(CustomOp, "platform", platform)
    norm, gate = RMSNorm(64, 1e-5, dtype=dtype), SiluAndMul()
    assert [type(layer).__module__ for layer in (norm, gate)] == ["examples.vllm_ops"] * 2
    x, residual = torch.randn(2, 7, 64, dtype=dtype), torch.randn(2, 7, 64, dtype=dtype)
    kept = x.clone(), residual.clone()
    with torch.inference_mode():
        assert close(norm(x), norm.forward_native(x))
        found, expected = norm(x, residual), norm.forward_native(x, residual)
        assert all(close(*pair) for pair in zip(found, expected, strict=True))
        assert close(gate(x), gate.forward_native(x))
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@DTYPES
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("neox", [True, False], ids=["halves", "neighbours"])
def test_vllm_rotary_positions(vllm_ops: ModuleType, neox: bool, rotary_dim: int, dtype: torch.dtype) -> None:
    layer = RotaryEmbedding(16, rotary_dim, 32, neox)
    assert type(layer).__module__ == "examples.vllm_ops"
    positions = torch.tensor([3, 0, 31, 7, 7])
    query, key = torch.randn(5, 4 * 16, dtype=dtype), torch.randn(5, 2, 16, dtype=dtype)
    found, expected = layer(positions, query, key), layer.forward_native(positions, query, key)
    assert all(close(*pair) for pair in zip(found, expected, strict=True))
    assert not close(found[0], query)
    alone, none = layer(positions, query)
    assert none is None and close(alone, expected[0])


def test_vllm_layers_are_traced_whole_and_registered_once(vllm_ops: ModuleType) -> None:
    vllm_ops.register()
    assert sorted(CustomOp.replaced) == ["RMSNorm", "RotaryEmbedding", "SiluAndMul"]
    torch._dynamo.reset()
    norm, turn = RMSNorm(48, 3e-6), RotaryEmbedding(16, 16, 32, True)  # an eps that nothing has called
    x, positions = torch.randn(5, 48), torch.arange(5)

    def layers(x: torch.Tensor) -> Any:
        normed, added = norm(x, x)
        return *turn(positions, normed, normed), added

    with torch.inference_mode():
        found = torch.compile(layers, fullgraph=True, backend="eager")(x)
        normed, added = norm.forward_native(x, x)
        expected = (*turn.forward_native(positions, normed, normed), added)
    assert all(close(*pair) for pair in zip(found, expected, strict=True))


def test_a_vllm_norm_by_a_part_of_the_features_stays_its_own(vllm_ops: ModuleType) -> None:
    norm, x = RMSNorm(64, var_hidden_size=16), torch.randn(3, 64)
    assert torch.equal(norm(x), norm.forward_native(x))


def test_without_vllm_the_example_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "examples.vllm_ops", raising=False)
    with pytest.raises(ImportError, match=r"^vllm_ops needs vLLM .*: pip install vllm$") as raised:
        import_module("examples.vllm_ops")
    assert raised.value.__suppress_context__ and "\n" not in str(raised.value)


# Hugging Face kernels -----------------------------------------------------------------------------------

FOLDER = Path(__file__).parent.parent / "examples" / "hf_kernels"


@needs.packages("kernels")
@DTYPES
def test_kernels_loads_the_programs(dtype: torch.dtype) -> None:
    from kernels import get_local_kernel

    kernel = get_local_kernel(FOLDER)
    x, residual, w = (torch.randn(*shape, dtype=dtype) for shape in ((3, 64), (3, 64), (64,)))
    normed, added = kernel.add_rms_norm(x, residual, w, eps=1e-6)
    norm = RMSNorm(64)
    norm.weight.data = w
    assert close(normed, norm.forward_native(x, residual)[0]) and close(added, x + residual)
    assert close(kernel.swiglu(x), SiluAndMul.forward_native(x))


@needs.packages("kernels")
@DTYPES
def test_kernels_maps_layers_of_a_model(dtype: torch.dtype) -> None:
    from kernels import (
        LocalLayerRepository,
        Mode,
        kernelize,
        replace_kernel_forward_from_hub,
        use_kernel_mapping,
    )

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.randn(64, dtype=dtype)), 1e-6

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(hidden_states, (64,), self.weight, self.variance_epsilon)

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SiluAndMul.forward_native(x)

    model, x = nn.Sequential(Norm(), Gate()), torch.randn(5, 64, dtype=dtype, requires_grad=True)
    expected = model(x)
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    mapping = {}
    for layer, name in ((Norm, "RMSNorm"), (Gate, "SiluAndMul")):
        replace_kernel_forward_from_hub(layer, name)
        mapping[name] = {"cpu": LocalLayerRepository(FOLDER, layer_name=name)}
    with use_kernel_mapping(mapping):
        mapped = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
    assert all("layers" in layer.forward.__func__.__qualname__ for layer in mapped)
    found = mapped(x)
    found.sum().backward()
    assert close(found, expected)
    assert gradient is not None and x.grad is not None and close(x.grad / 8, gradient / 8)
