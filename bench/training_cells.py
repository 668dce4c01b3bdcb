"""What `bench training` runs: programs whose gradient training needs, at sizes of models, and the same in torch.

Attention has the sizes of FlexAttention's and cuDNN's published backward; rows and losses those of an 8B model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = Mapping[str, Tensor]
Function = Callable[[Inputs], Tensor]

ATTENTION = """
    Q: T[b,h,i,d]
    K: T[b,n,j,d]
    V: T[b,n,j,e]
    O: T[b,h,i,e]
    S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h//g,j,d]) * scale
    A[b,h,i,j] = {scores}
    P[b,h,i,j] = exp(A[b,h,i,j] - max[j](A[b,h,i,j]))
    O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h//g,j,e])
"""
RMSNORM = """
    x: T[i,j]
    w: T[j]
    y: T[i,j]
    y[i,j] = x[i,j] * rsqrt(mean[j](sq(x[i,j])) + 1e-6) * w[j]
"""
LAYERNORM = """
    x: T[i,j]
    w: T[j]
    y: T[i,j]
    c[i,j] = x[i,j] - mean[j](x[i,j])
    y[i,j] = c[i,j] * rsqrt(mean[j](sq(c[i,j])) + 1e-5) * w[j]
"""
CROSS_ENTROPY = """
    x: T[i,v]
    label: i64[i]
    loss: f32[i]
    loss[i] = max[v](x[i,v]) + log(sum[v](exp(x[i,v] - max[v](x[i,v])))) - x[i,label[i]]
"""
LINEAR_CROSS_ENTROPY = """
    x: T[i,d]
    W: T[v,d]
    label: i64[i]
    loss: f32[i]
    L[i,v] = sum[d](x[i,d] * W[v,d])
    loss[i] = max[v](L[i,v]) + log(sum[v](exp(L[i,v] - max[v](L[i,v])))) - L[i,label[i]]
"""


@dataclass(frozen=True)
class Cell:
    """One program at one size: `tensors` are those with a gradient, shapes by name, of standard deviation `spread`;
    `labels`, if any, the extent of the labels and the number of them. `plain` is the same in torch's own operators, `peers`
    what else is compared, by name; `flops` of a backward, 0 where it is bandwidth that counts. `exact` gives the gradients
    in float64, of the leading part that `part` leaves of each."""

    name: str
    source: str
    tensors: Mapping[str, Sequence[int]]
    plain: Function
    exact: Callable[[Inputs, Tensor], Mapping[str, Tensor]]
    part: Mapping[str, tuple[slice, ...]]
    peers: Mapping[str, Function] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    labels: tuple[int, int] | None = None
    flops: float = 0.0

    def text(self, dtype: torch.dtype) -> str:
        word = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
        return self.source.replace(": T[", f": {word}[")

    def draw(self, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fresh random inputs; those of real numbers require grad."""
        drawn = {
            name: (torch.randn(*shape, device=device) * self.spread.get(name, 1.0)).to(dtype).requires_grad_()
            for name, shape in self.tensors.items()
        }
        if self.labels is None:
            return drawn
        extent, count = self.labels
        return {**drawn, "label": torch.randint(0, extent, (count,), device=device)}


def _sdpa(inputs: Inputs, causal: bool, scale: float, grouped: bool, library: str | None = None) -> Tensor:
    q, k, v = (inputs[name] for name in "QKV")
    call = partial(F.scaled_dot_product_attention, is_causal=causal, scale=scale, enable_gqa=grouped)
    if library is None:
        return call(q, k, v)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, f"{library.upper()}_ATTENTION")):
        return call(q, k, v)


@dataclass
class Flex:
    """FlexAttention, compiled for the shapes that it is called with."""

    causal: bool
    scale: float
    grouped: bool

    def __call__(self, inputs: Inputs) -> Tensor:
        if not hasattr(self, "run"):
            self.run, self.mask = self._made(inputs["Q"])
        q, k, v = (inputs[name] for name in "QKV")
        return self.run(q, k, v, block_mask=self.mask, scale=self.scale, enable_gqa=self.grouped)  # type: ignore[no-any-return]

    def _made(self, q: Tensor) -> tuple[Callable[..., Any], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        length = q.shape[2]
        mask = None
        if self.causal:
            mask = create_block_mask(_causal, None, None, length, length, device=str(q.device))
        return torch.compile(flex_attention, dynamic=False), mask


def _causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def _exact_attention(causal: bool, scale: float, group: int) -> Callable[[Inputs, Tensor], dict[str, Tensor]]:
    def exact(inputs: Inputs, cotangent: Tensor) -> dict[str, Tensor]:
        """Of the first heads that share keys, of the first in the batch, one head at a time."""
        k, v = (inputs[name][0, 0].detach().double().requires_grad_() for name in "KV")
        mask, of_keys = None, None
        found = []
        for head in range(group):
            q = inputs["Q"][0, head].detach().double().requires_grad_()
            scores = q @ k.mT * scale
            if causal:
                if mask is None:
                    mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(mask, -torch.inf)
            out = torch.softmax(scores, -1) @ v
            made = torch.autograd.grad(out, (q, k, v), cotangent[0, head].double())
            found.append(made[0])
            of_keys = made[1:] if of_keys is None else (of_keys[0] + made[1], of_keys[1] + made[2])
        assert of_keys is not None
        return {"Q": torch.stack(found), "K": of_keys[0], "V": of_keys[1]}

    return exact


def attention(batch: int, heads: int, keys: int, length: int, dim: int, causal: bool) -> Cell:
    group, scale = heads // keys, dim**-0.5
    mask = "where(j <= i, S[b,h,i,j], -inf)" if causal else "S[b,h,i,j]"
    libraries = ("flash", "cudnn") if torch.cuda.is_available() else ()
    peers: dict[str, Function] = {
        name: partial(_sdpa, causal=causal, scale=scale, grouped=group > 1, library=name)
        for name in libraries
    }
    if torch.cuda.is_available():
        peers["flex"] = Flex(causal, scale, group > 1)
    kind = "causal" if causal else "full"
    of_queries = (0, slice(group))
    return Cell(
        f"attention_{kind}_d{dim}_h{heads}:{keys}_n{length}_b{batch}",
        ATTENTION.format(scores=mask),
        {"Q": (batch, heads, length, dim), "K": (batch, keys, length, dim), "V": (batch, keys, length, dim)},
        partial(_sdpa, causal=causal, scale=scale, grouped=group > 1),
        _exact_attention(causal, scale, group),
        {"Q": of_queries, "K": (0, 0), "V": (0, 0)},  # type: ignore[dict-item]
        peers,
        {"g": group},
        {"scale": scale},
        flops=10.0 * batch * heads * length * length * dim / (2 if causal else 1),
    )


def _rms(inputs: Inputs) -> Tensor:
    x = inputs["x"]
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * inputs["w"]


def _layer(inputs: Inputs) -> Tensor:
    return F.layer_norm(inputs["x"], inputs["x"].shape[-1:], inputs["w"])


def _loss(inputs: Inputs) -> Tensor:
    return F.cross_entropy(inputs["x"].float(), inputs["label"], reduction="none")


def _linear_loss(inputs: Inputs) -> Tensor:
    return F.cross_entropy((inputs["x"] @ inputs["W"].mT).float(), inputs["label"], reduction="none")


def _by_rows(function: Function, rows: int) -> Callable[[Inputs, Tensor], dict[str, Tensor]]:
    def exact(inputs: Inputs, cotangent: Tensor) -> dict[str, Tensor]:
        """So many rows at a time, so that float64 fits: of x the first, of what all rows read the sum."""
        wide = {
            name: value.detach().double().requires_grad_()
            for name, value in inputs.items()
            if name not in ("x", "label")
        }
        sums = {name: torch.zeros_like(value) for name, value in wide.items()}
        first: Tensor | None = None
        for start in range(0, len(cotangent) if wide else rows, rows):
            part = slice(start, start + rows)
            x = inputs["x"][part].detach().double().requires_grad_()
            given = {**wide, "x": x}
            if "label" in inputs:
                given["label"] = inputs["label"][part]
            made = torch.autograd.grad(function(given), (x, *wide.values()), cotangent[part].double())
            first = made[0] if first is None else first
            for total, more in zip(sums.values(), made[1:], strict=True):
                total += more
        assert first is not None
        return {"x": first, **sums}

    return exact


def _exact_loss(inputs: Inputs) -> Tensor:
    logits = inputs["x"] @ inputs["W"].mT if "W" in inputs else inputs["x"]
    return F.cross_entropy(logits, inputs["label"], reduction="none")


def _exact_rms(inputs: Inputs) -> Tensor:
    x = inputs["x"]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * inputs["w"]


PART = 256
"""Rows that are compared with float64 of what has a row of its own."""


def norm(name: str, rows: int, width: int) -> Cell:
    source, function, exact = {
        "rmsnorm": (RMSNORM, _rms, _exact_rms),
        "layernorm": (LAYERNORM, _layer, _layer),
    }[name]
    return Cell(
        f"{name}_{rows}x{width}",
        source,
        {"x": (rows, width), "w": (width,)},
        function,
        _by_rows(exact, PART),
        {"x": (slice(PART),), "w": (slice(None),)},
    )


def cross_entropy(rows: int, vocabulary: int) -> Cell:
    return Cell(
        f"cross_entropy_{rows}x{vocabulary}",
        CROSS_ENTROPY,
        {"x": (rows, vocabulary)},
        _loss,
        _by_rows(_exact_loss, PART),
        {"x": (slice(PART),)},
        labels=(vocabulary, rows),
    )


def linear_cross_entropy(rows: int, width: int, vocabulary: int) -> Cell:
    return Cell(
        f"linear_cross_entropy_{rows}x{width}x{vocabulary}",
        LINEAR_CROSS_ENTROPY,
        {"x": (rows, width), "W": (vocabulary, width)},
        _linear_loss,
        _by_rows(_exact_loss, PART),
        {"x": (slice(PART),), "W": (slice(None),)},
        spread={"W": width**-0.5},
        labels=(vocabulary, rows),
        flops=4.0 * rows * width * vocabulary,
    )


def cells(small: bool) -> list[Cell]:
    """The most telling first."""
    if small:
        return [
            attention(1, 4, 2, 48, 16, True),
            attention(1, 2, 2, 33, 16, False),
            norm("rmsnorm", 37, 100),
            norm("layernorm", 37, 100),
            cross_entropy(37, 300),
            linear_cross_entropy(37, 32, 300),
        ]
    return [
        attention(1, 32, 32, 8192, 128, True),
        linear_cross_entropy(8192, 4096, 128256),
        attention(1, 32, 8, 8192, 128, True),
        norm("rmsnorm", 8192, 8192),
        norm("layernorm", 8192, 8192),
        cross_entropy(8192, 128256),
        attention(1, 32, 32, 8192, 64, True),
        attention(1, 32, 32, 8192, 128, False),
        attention(4, 32, 32, 2048, 128, True),
        attention(8, 32, 32, 1024, 64, True),
        attention(1, 16, 16, 16384, 128, True),
    ]
