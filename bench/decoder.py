"""A decoder of Llama's kind, written in torch as its models are: what `bench models` and `bench curve` run.

RMSNorm, rotary positions, grouped queries, SwiGLU. A cache has a fixed length, and is written in place; queries of one
token see it through a mask, as transformers' static cache has it, and prompts see themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `wide` is the inner width of its MLP, `tied` whether logits read the embedding."""

    layers: int
    width: int
    heads: int
    keys: int
    wide: int
    vocabulary: int
    theta: float = 1e4
    tied: bool = False

    @property
    def head(self) -> int:
        return self.width // self.heads


SHAPES: Mapping[str, Shape] = {
    "smollm2": Shape(30, 576, 9, 3, 1536, 49152, tied=True),
    "llama3_8b": Shape(32, 4096, 32, 8, 14336, 128256, 5e5),
    "model_125m": Shape(12, 768, 12, 12, 2048, 50304, tied=True),
    "tiny": Shape(2, 32, 4, 2, 48, 96),
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _repeated(x: Tensor, times: int) -> Tensor:
    """Keys of every head, as transformers makes them where there is a mask."""
    batch, keys, length, head = x.shape
    return x[:, :, None].expand(batch, keys, times, length, head).reshape(batch, keys * times, length, head)


class Layer(nn.Module):
    k: Tensor
    v: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.keys, self.head = shape.heads, shape.keys, shape.head
        inner, outer = shape.heads * shape.head, shape.keys * shape.head
        self.before, self.behind = Norm(shape.width), Norm(shape.width)
        self.query, self.out = (nn.Linear(shape.width, inner, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, outer, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.width, shape.wide, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.wide, shape.width, bias=False)

    def cached(self, batch: int, length: int) -> None:
        """Makes room for so many positions."""
        like = self.key.weight
        for name in ("k", "v"):
            room = torch.zeros(batch, self.keys, length, self.head, dtype=like.dtype, device=like.device)
            self.register_buffer(name, room, persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        y = self.before(x)
        q = _turned(self.query(y).view(batch, length, self.heads, self.head).transpose(1, 2), cos, sin)
        k = _turned(self.key(y).view(batch, length, self.keys, self.head).transpose(1, 2), cos, sin)
        v = self.value(y).view(batch, length, self.keys, self.head).transpose(1, 2)
        x = x + self.out(self._attended(q, k, v, at).transpose(1, 2).reshape(batch, length, -1))
        y = self.behind(x)
        found: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return found

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor | None) -> Tensor:
        if at is not None:
            self.k.index_copy_(2, at, k)
            self.v.index_copy_(2, at, v)
            if q.shape[2] == 1:
                group = self.heads // self.keys
                seen = (torch.arange(self.k.shape[2], device=q.device) <= at)[None, None, None]
                k, v = _repeated(self.k, group), _repeated(self.v, group)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.keys)


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Decoder(nn.Module):
    """`compiled` is applied to a layer and to the head: all layers share what is compiled for one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        self.run_layer: Callable[..., Any] = _run
        self.run_head: Callable[..., Any] = _head

    def compiled(self, compiler: Compiler) -> None:
        self.run_layer, self.run_head = compiler(_run), compiler(_head)

    def cached(self, batch: int, length: int) -> None:
        for layer in self.layers:
            layer.cached(batch, length)  # type: ignore[operator]

    def hidden(self, ids: Tensor, at: Tensor | None = None) -> Tensor:
        """[batch, length, width], behind the last norm; `at` are the positions of the tokens, where there is a cache."""
        x = self.embedding(ids)
        places = torch.arange(ids.shape[1], device=ids.device) if at is None else at
        half = torch.arange(0, self.shape.head, 2, device=ids.device).float() / self.shape.head
        angles = places.float()[:, None] * self.shape.theta**-half
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = self.run_layer(layer, x, cos, sin, at)
        found: Tensor = x
        return found

    def forward(self, ids: Tensor, at: Tensor | None = None) -> Tensor:
        """The logits of the last token, [batch, vocabulary]."""
        found: Tensor = self.run_head(self.norm, self.head, self.hidden(ids, at)[:, -1])
        return found


def _run(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor | None) -> Tensor:
    return layer(x, cos, sin, at)  # type: ignore[no-any-return]


def _head(norm: Norm, head: nn.Linear, x: Tensor) -> Tensor:
    return head(norm(x))  # type: ignore[no-any-return]
