"""The programs of `workloads` as a person writes them in torch without fusing: one operation a line.

Every function takes the tensors and scalars of its workload by name. Half and quarter precision is
widened to float32 for everything but matrix products. On float64 tensors nothing is narrowed, not
even where a program says so: what comes out is the exact result that errors are measured against.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scores [b, h, i, j], i [i, 1], j [1, j]) -> scores."""


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that arithmetic on it is done in: float64 stays, everything else is float32."""
    return x if x.dtype == torch.float64 else x.float()


def to_float8(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float8_e4m3fn)


def softmax(x: Tensor) -> Tensor:
    shifted = wide(x) - wide(x).amax(-1, keepdim=True)
    weights = torch.exp(shifted)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


def log_softmax(x: Tensor) -> Tensor:
    shifted = wide(x) - wide(x).amax(-1, keepdim=True)
    return (shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))).to(x.dtype)


def logsumexp(x: Tensor) -> Tensor:
    top = wide(x).amax(-1, keepdim=True)
    return (top + torch.log(torch.exp(wide(x) - top).sum(-1, keepdim=True))).squeeze(-1).to(x.dtype)


def cross_entropy(x: Tensor, label: Tensor) -> Tensor:
    picked = torch.gather(wide(x), 1, label[:, None]).squeeze(1)
    return (logsumexp(wide(x)) - picked).to(x.dtype)


def softmax_entropy(x: Tensor) -> Tensor:
    logs = log_softmax(wide(x))
    return -(torch.exp(logs) * logs).sum(-1).to(x.dtype)


def heads(x: Tensor, g: int) -> Tensor:
    """Key or value heads [b, k, j, d] repeated for their `g` query heads."""
    return x if g == 1 else x.repeat_interleave(g, 1)


def scores(Q: Tensor, K: Tensor, scale: float) -> Tensor:
    return wide(Q @ K.transpose(-1, -2)) * scale


def positions(s: Tensor) -> tuple[Tensor, Tensor]:
    """Query positions [i, 1] and key positions [1, j]; the queries stand at the end of the keys."""
    i = torch.arange(s.shape[-2], device=s.device)[:, None] + (s.shape[-1] - s.shape[-2])
    j = torch.arange(s.shape[-1], device=s.device)[None, :]
    return i, j


def causal(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(j <= i, s, -torch.inf)


def window(size: int) -> Score:
    def apply(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((j <= i) & (i - j < size), s, -torch.inf)

    return apply


def softcap(s: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(s / cap)


def attend(s: Tensor, V: Tensor) -> Tensor:
    return softmax(s).to(V.dtype) @ V


def global_attention(Q: Tensor, K: Tensor, V: Tensor, scale: float, g: int = 1) -> Tensor:
    return attend(scores(Q, heads(K, g), scale), heads(V, g))


def causal_attention(Q: Tensor, K: Tensor, V: Tensor, scale: float, g: int = 1) -> Tensor:
    s = scores(Q, heads(K, g), scale)
    return attend(causal(s, *positions(s)), heads(V, g))


def alibi_attention(Q: Tensor, K: Tensor, V: Tensor, slope: Tensor, scale: float) -> Tensor:
    s = scores(Q, K, scale)
    i, j = positions(s)
    s = s + wide(slope)[:, None, None] * (j - i)
    return attend(causal(s, i, j), V)


def softcap_attention(Q: Tensor, K: Tensor, V: Tensor, scale: float, cap: float, g: int) -> Tensor:
    s = softcap(scores(Q, heads(K, g), scale), cap)
    return attend(causal(s, *positions(s)), heads(V, g))


def window_attention(Q: Tensor, K: Tensor, V: Tensor, scale: float, g: int, span: int) -> Tensor:
    s = scores(Q, heads(K, g), scale)
    return attend(window(span)(s, *positions(s)), heads(V, g))


def decode(Q: Tensor, K: Tensor, V: Tensor, scale: float, g: int = 1) -> Tensor:
    return global_attention(Q[:, :, None], K, V, scale, g).squeeze(2)


def alibi_decode(Q: Tensor, K: Tensor, V: Tensor, slope: Tensor, scale: float) -> Tensor:
    s = scores(Q[:, :, None], K, scale)
    j = torch.arange(s.shape[-1], device=s.device)
    s = s + wide(slope)[:, None, None] * (j - (s.shape[-1] - 1))
    return attend(s, V).squeeze(2)


def softcap_decode(Q: Tensor, K: Tensor, V: Tensor, scale: float, cap: float, g: int) -> Tensor:
    s = softcap(scores(Q[:, :, None], heads(K, g), scale), cap)
    return attend(s, heads(V, g)).squeeze(2)


def packed_attention(Q: Tensor, K: Tensor, V: Tensor, first: Tensor, scale: float, g: int) -> Tensor:
    """Q [i, h, d], K and V [j, k, d]; the document of token i starts at `first[i]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (Q, K, V))
    s = scores(q, heads(k, g), scale)
    i, j = positions(s)
    s = torch.where(first[:, None] <= j, causal(s, i, j), -torch.inf)
    return attend(s, heads(v, g))[0].transpose(0, 1)


def paged_decode(Q: Tensor, K: Tensor, V: Tensor, slot: Tensor, len: Tensor, scale: float, g: int) -> Tensor:
    """Q [b, h, d]; position j of row b is in K and V [s, k, d] at `slot[b, j]`, and there if j < len[b]."""
    k, v = (heads(x[slot.long()].transpose(1, 2), g) for x in (K, V))
    s = scores(Q[:, :, None], k, scale)
    j = torch.arange(s.shape[-1], device=s.device)
    s = torch.where(j < len[:, None, None, None], s, -torch.inf)
    return attend(s, v).squeeze(2)


def attention_lse(Q: Tensor, K: Tensor, V: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    s = scores(Q, K, scale)
    return attend(s, V), logsumexp(s)


def qknorm_attention(Q: Tensor, K: Tensor, V: Tensor, scale: float) -> Tensor:
    q = wide(Q) / torch.sqrt((wide(Q) ** 2).sum(-1, keepdim=True))
    k = wide(K) / torch.sqrt((wide(K) ** 2).sum(-1, keepdim=True))
    return attend(scores(q, k, scale), V)


def mla_decode(Q: Tensor, Qr: Tensor, C: Tensor, R: Tensor, scale: float) -> Tensor:
    latent = Q @ C.transpose(-1, -2)
    rope = Qr @ R.transpose(-1, -2)
    s = (wide(latent) + wide(rope)) * scale
    return attend(s, C)


def performer(Q: Tensor, K: Tensor, V: Tensor, W: Tensor, c: float) -> Tensor:
    q = wide(Q @ W.transpose(0, 1)) * c
    q = q - (wide(Q) ** 2).sum(-1, keepdim=True) * (c * c / 2)
    k = wide(K @ W.transpose(0, 1)) * c
    k = k - (wide(K) ** 2).sum(-1, keepdim=True) * (c * c / 2)
    q = torch.exp(q - q.amax(-1, keepdim=True))
    k = torch.exp(k - k.amax((-1, -2), keepdim=True))
    context = k.transpose(-1, -2).to(V.dtype) @ V
    norm = (q * k.sum(-2)[:, :, None]).sum(-1, keepdim=True)
    return (wide(q.to(V.dtype) @ context) / norm).to(V.dtype)


def l2norm(x: Tensor) -> Tensor:
    top = wide(x).abs().amax(-1, keepdim=True)
    ratio = wide(x) / top
    return (top * torch.sqrt((ratio * ratio).sum(-1, keepdim=True))).squeeze(-1).to(x.dtype)


def rmsnorm_quant(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    square = (wide(x) * wide(x)).mean(-1, keepdim=True)
    y = wide(x) * torch.rsqrt(square + eps)
    top = y.abs().amax(-1, keepdim=True)
    return to_float8(y / top * 448), top.squeeze(-1).to(x.dtype)


def quant_gemm(A: Tensor, W: Tensor) -> Tensor:
    s = wide(A).abs().amax(-1, keepdim=True) / 448
    quantised = to_float8(wide(A) / s)
    # A product of two float8 tensors exists on few devices; float32 holds every float8 exactly.
    return ((wide(quantised) @ wide(W).transpose(0, 1)) * s).to(A.dtype)


def variance(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return ((x - mean) ** 2).mean(-1)


def inertia(m: Tensor, x: Tensor) -> Tensor:
    mass = m.sum(-1)
    centre = (m[:, :, None] * x).sum(1) / mass[:, None]
    distance = ((x - centre[:, None]) ** 2).sum(-1)
    return (m * distance).sum(-1)


def sum_sum(x: Tensor, y: Tensor) -> Tensor:
    m = (x * x).sum(-1, keepdim=True)
    return (x * y / torch.sqrt(torch.clamp(m - 10, min=1e-6))).sum(-1)


def lora(x: Tensor, W: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return x @ W.transpose(0, 1) + (x @ A.transpose(0, 1)) @ B.transpose(0, 1)


def mlp(x: Tensor, U: Tensor, D: Tensor) -> Tensor:
    hidden = torch.relu(x @ U.transpose(0, 1))
    return hidden @ D.transpose(0, 1) + x


def gated_mlp(x: Tensor, G: Tensor, U: Tensor, D: Tensor) -> Tensor:
    gate = x @ G.transpose(0, 1)
    up = x @ U.transpose(0, 1)
    return (gate * torch.sigmoid(gate) * up) @ D.transpose(0, 1)


def layernorm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    mean = wide(x).mean(-1, keepdim=True)
    centred = wide(x) - mean
    spread = (centred * centred).mean(-1, keepdim=True)
    return (centred * torch.rsqrt(spread + eps) * wide(w) + wide(b)).to(x.dtype)


def weighted_variance(w: Tensor, x: Tensor) -> Tensor:
    total = w.sum(-1, keepdim=True)
    mean = (w * x).sum(-1, keepdim=True) / total
    return (w * (x - mean) ** 2).sum(-1) / total.squeeze(-1)


def covariance(x: Tensor, y: Tensor) -> Tensor:
    centred_x = x - x.mean(-1, keepdim=True)
    centred_y = y - y.mean(-1, keepdim=True)
    return (centred_x * centred_y).mean(-1)


def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    product = (x * y).sum(-1)
    norm_x = torch.sqrt((x * x).sum(-1))
    norm_y = torch.sqrt((y * y).sum(-1))
    return product / (norm_x * norm_y)


def moe_routing(x: Tensor, W: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Of equal probabilities the lower expert comes first, which `torch.topk` does not promise."""
    probabilities = torch.softmax(wide(x) @ wide(W).transpose(0, 1), -1)
    chosen, experts = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights = chosen[:, :K]
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts[:, :K]


def moe_routing_logits(x: Tensor, W: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """The same experts and weights, of the logits: the softmax of the chosen ones."""
    logits = wide(x) @ wide(W).transpose(0, 1)
    chosen, experts = torch.sort(logits, dim=-1, descending=True, stable=True)
    return torch.softmax(chosen[:, :K], -1).to(x.dtype), experts[:, :K]
