"""The programs of eqfuse.ops beside torch: inputs of some sizes, and what is computed of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from eqfuse import ops

Tensors = Mapping[str, torch.Tensor]


class Case(NamedTuple):
    """A program with inputs and options, and what torch computes of the inputs."""

    op: ops.Op
    tensors: Tensors
    options: Mapping[str, Any]
    torchs: Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """How many batches, tokens, features, words, features of words, heads (of keys: half of them), queries and keys, pairs and answers there are; features
    of heads, of heads with rotary positions, and positions of linear attention."""

    B: int = 2
    T: int = 7
    D: int = 16
    V: int = 20
    C: int = 5
    H: int = 4
    I: int = 6
    J: int = 9
    P: int = 6
    E: int = 8
    R: int = 16
    L: int = 9


HELD = frozenset(
    {
        "cos",
        "sin",
        "label",
        "ids",
        "documents",
        "mask",
        "lengths",
        "desirable",
        "divergence",
        "old",
        "advantage",
    }
)
"""Inputs that no gradient is taken by."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """On the default device."""
    device = torch.get_default_device()
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed + sum(shape)), device=device)


def rms(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    other = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * torch.cat([cos, cos], -1) + other * torch.cat([sin, sin], -1)


def neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos.repeat_interleave(2, -1) + other * sin.repeat_interleave(2, -1)


def tokens(z: torch.Tensor, label: torch.Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> torch.Tensor:
    loss = F.cross_entropy(z, label, label_smoothing=smoothing, reduction="none")
    return loss + torch.where(label == -100, 0, z_loss * z.logsumexp(1).square())


def log_probs(z: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = z.log_softmax(1)
    return p.gather(1, ids[:, None])[:, 0], -(p.exp() * p).sum(1)


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, kind: str, t: float, beta: float = 0.5
) -> torch.Tensor:
    p, q = (student / t).log_softmax(1), (teacher / t).log_softmax(1)
    if kind == "forward":
        each = q.exp() * (q - p)
    elif kind == "reverse":
        each = p.exp() * (p - q)
    else:
        m = (beta * q.exp() + (1 - beta) * p.exp()).log()
        each = beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)
    return each.sum(1).mean() * t * t


def preferred(margin: torch.Tensor) -> torch.Tensor:
    return (-0.9 * F.logsigmoid(margin) - 0.1 * F.logsigmoid(-margin)).mean()


def group_relative(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    reference: torch.Tensor | None = None,
    beta: float = 0.0,
    per: str = "token",
) -> torch.Tensor:
    ratio = (log_probs - old).exp()
    each = -torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
    if reference is not None:
        each = each + beta * ((reference - log_probs).exp() - (reference - log_probs) - 1)
    if per == "answer":
        return ((each * mask).sum(1) / mask.sum(1)).mean()
    return (each * mask).sum() / mask.sum()


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if cap is not None:
        s = cap * torch.tanh(s / cap)
    if bias is not None:
        s = s + bias
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[2]]
    y: torch.Tensor = p @ v
    return y if gate is None else y * gate.sigmoid()


def unsquashed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decays: torch.Tensor | None = None,
    normalised: bool = False,
) -> torch.Tensor:
    """Causal attention without a softmax, through all scores; `decays` are logarithms of what they fall to: [..., i, j], or [..., i, j, d]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if decays is not None and decays.ndim == 5:
        s = torch.einsum(
            "bhid,bhjd,bhijd->bhij", q, k, decays.masked_fill(~seen[..., None], -torch.inf).exp()
        )
    else:
        s = q @ k.transpose(-1, -2)
        s = s if decays is None else s * decays.masked_fill(~seen, -torch.inf).exp()
    s = s.masked_fill(~seen, 0)
    y: torch.Tensor = s @ v
    return y / s.sum(-1, keepdim=True) if normalised else y


def apart(gate: torch.Tensor) -> torch.Tensor:
    """The sums of gates between all pairs of positions, the dimension 2."""
    sums = gate.cumsum(2)
    return sums.unsqueeze(3) - sums.unsqueeze(2)


def by_sigmoids(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 - torch.tensor(float(k.shape[2])).log()
    y: torch.Tensor = (s.sigmoid() * seen) @ v
    return y


def contrasted(x: torch.Tensor, y: torch.Tensor, temperature: float) -> torch.Tensor:
    return F.cross_entropy(x @ y.T / temperature, torch.arange(len(x), device=x.device))


def wanted(
    log_probs: torch.Tensor, reference: torch.Tensor, desirable: torch.Tensor, divergence: torch.Tensor
) -> torch.Tensor:
    r = 0.1 * (log_probs - reference - divergence.detach())
    return torch.where(desirable > 0, (-r).sigmoid(), 1.5 * r.sigmoid()).mean()


def cases(sizes: Sizes) -> dict[str, Case]:
    """Every program of the library that torch can compute, some of them with several options, on the default device."""
    B, T, D, V, C, H, I, J, P, E, R, L = (getattr(sizes, name) for name in "BTDVCHIJPERL")
    labels = torch.randint(V, (T,), generator=torch.Generator(torch.get_default_device()).manual_seed(0))
    labels[2::5] = -100
    ids = labels.clamp(0)
    causal = torch.ones(I, J, dtype=torch.bool).tril(J - I)
    near = causal & ~torch.ones(I, J, dtype=torch.bool).tril(J - I - 3)
    heads = {"q": drawn(B, H, I, E), "k": drawn(B, H // 2, J, E, seed=1), "v": drawn(B, H // 2, J, E)}
    square = {**heads, "q": drawn(B, H, J, E)}
    linear = {"q": drawn(B, H, L, E), "k": drawn(B, H // 2, L, E, seed=1), "v": drawn(B, H // 2, L, E)}
    documents = torch.stack([torch.arange(J) * (b + 1) // J for b in range(B)])
    same = (documents[:, :, None] == documents[:, None])[:, None] & torch.ones(J, J, dtype=torch.bool).tril()
    lengths = torch.tensor([J - b * (J // (2 * B)) for b in range(B)])
    mask = (drawn(I, J) > -1).float().index_fill(1, torch.tensor([0]), 1)
    present = (mask > 0) & (torch.arange(J) < lengths[:, None, None, None])
    words = {"x": drawn(T, C) / C**0.5, "w": drawn(V, C)}
    answers = {
        "log_probs": -drawn(P, 2 * P).abs(),
        "old": -drawn(P, 2 * P, seed=1).abs(),
        "advantage": drawn(P),
        "mask": (torch.arange(2 * P) < P + torch.arange(P)[:, None]).float(),
    }
    x, w, angles = (
        {"x": drawn(B, T, D)},
        {"w": drawn(D)},
        {"cos": drawn(T, R // 2), "sin": drawn(T, R // 2, seed=1)},
    )
    both = {**x, "residual": drawn(B, T, D, seed=1), **w}
    gated = {"gate": drawn(B, T, D), "up": drawn(B, T, D, seed=1)}
    channels = {"x": drawn(B, 4 * P, D), "w": drawn(4 * P), "bias": drawn(4 * P, seed=1)}
    pairs = {"x": F.normalize(drawn(P, D), dim=1), "y": F.normalize(drawn(P, D, seed=1), dim=1)}
    scores = 5 * drawn(4, P)
    found: dict[str, tuple[ops.Op, Tensors, Mapping[str, Any], Callable[..., Any]]] = {
        "rms norm": (ops.rms_norm, {**x, **w}, {}, rms),
        "rms norm, Gemma's": (
            ops.rms_norm,
            {**x, **w},
            {"offset": 1.0, "eps": 1e-5},
            lambda x, w: rms(x, 1 + w, 1e-5),
        ),
        "added rms norm": (
            ops.add_rms_norm,
            both,
            {},
            lambda x, residual, w: (rms(x + residual, w), x + residual),
        ),
        "layer norm": (
            ops.layer_norm,
            {**x, **w, "bias": drawn(D, seed=1)},
            {},
            lambda x, w, bias: F.layer_norm(x, (D,), w, bias),
        ),
        "layer norm alone": (ops.layer_norm, {"x": drawn(D)}, {}, lambda x: F.layer_norm(x, (D,))),
        "added layer norm": (
            ops.add_layer_norm,
            {**both, "bias": drawn(D, seed=1)},
            {},
            lambda x, residual, w, bias: (F.layer_norm(x + residual, (D,), w, bias), x + residual),
        ),
        "group norm": (
            ops.group_norm_silu,
            channels,
            {"groups": 4},
            lambda x, w, bias: F.silu(F.group_norm(x, 4, w, bias)),
        ),
        "group norm alone": (
            ops.group_norm_silu,
            {"x": channels["x"]},
            {"groups": 2, "activation": False},
            lambda x: F.group_norm(x, 2),
        ),
        "swiglu": (ops.swiglu, gated, {}, lambda gate, up: F.silu(gate) * up),
        "swiglu of halves": (
            ops.swiglu,
            {"gate": drawn(T, 2 * D)},
            {},
            lambda gate: F.silu(gate[:, :D]) * gate[:, D:],
        ),
        "geglu": (ops.geglu, gated, {}, lambda gate, up: F.gelu(gate) * up),
        "geglu by tanh": (
            ops.geglu,
            {"gate": drawn(T, 2 * D)},
            {"approximate": True},
            lambda gate: F.gelu(gate[:, :D], approximate="tanh") * gate[:, D:],
        ),
        "rotary": (ops.rotary, {"x": drawn(B, H, T, R), **angles}, {}, turned),
        "rotary of neighbours": (
            ops.rotary,
            {"x": drawn(B, H, T, R), **angles},
            {"interleaved": True},
            neighbours,
        ),
        "cross-entropy": (
            ops.cross_entropy,
            {"logits": drawn(T, V), "label": labels},
            {},
            lambda logits, label: F.cross_entropy(logits, label),
        ),
        "smoothed cross-entropy": (
            ops.cross_entropy,
            {"logits": drawn(T, V), "label": labels},
            {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none"},
            lambda logits, label: tokens(logits, label, 0.1, 0.01),
        ),
        "linear cross-entropy": (
            ops.linear_cross_entropy,
            {**words, "label": labels, "bias": drawn(V)},
            {},
            lambda x, w, label, bias: F.cross_entropy(x @ w.T + bias, label),
        ),
        "capped linear cross-entropy": (
            ops.linear_cross_entropy,
            {**words, "label": labels},
            {"soft_cap": 3.0, "z_loss": 0.1, "reduction": "sum"},
            lambda x, w, label: tokens(3 * torch.tanh(x @ w.T / 3), label, z_loss=0.1).sum(),
        ),
        "log-probabilities": (
            ops.token_log_probs,
            {"logits": drawn(T, V), "ids": ids},
            {"temperature": 0.5},
            lambda logits, ids: log_probs(logits / 0.5, ids)[0],
        ),
        "log-probabilities of a linear layer": (
            ops.linear_token_log_probs,
            {**words, "ids": ids},
            {"entropy": True},
            lambda x, w, ids: log_probs(x @ w.T, ids),
        ),
        **{
            f"distillation, {kind}": (
                ops.distillation,
                {"student": drawn(T, V), "teacher": drawn(T, V, seed=1)},
                {"kind": kind, "temperature": 2.0},
                lambda student, teacher, kind=kind: divergence(student, teacher, kind, 2.0),
            )
            for kind in ("forward", "reverse", "jsd")
        },
        "dpo": (
            ops.dpo,
            dict(zip(ops.dpo.tensors, scores, strict=True)),
            {"beta": 0.2, "label_smoothing": 0.1},
            lambda chosen, rejected, reference_chosen, reference_rejected: preferred(
                0.2 * (chosen - rejected - reference_chosen + reference_rejected)
            ),
        ),
        "kto": (
            ops.kto,
            {
                "log_probs": drawn(P),
                "reference": drawn(P, seed=1),
                "desirable": (drawn(P) > 0).float(),
                "divergence": drawn(1).abs(),
            },
            {"undesirable_weight": 1.5},
            wanted,
        ),
        "grpo": (ops.grpo, answers, {}, group_relative),
        "grpo with a reference": (
            ops.grpo,
            {**answers, "reference": -drawn(P, 2 * P, seed=2).abs()},
            {"beta": 0.1, "per": "answer"},
            lambda **given: group_relative(**given, beta=0.1, per="answer"),
        ),
        "contrastive": (
            ops.contrastive,
            pairs,
            {},
            lambda x, y: (contrasted(x, y, 0.07) + contrasted(y, x, 0.07)) / 2,
        ),
        "contrastive, one way": (
            ops.contrastive,
            pairs,
            {"temperature": 0.5, "symmetric": False},
            lambda x, y: contrasted(x, y, 0.5),
        ),
        "attention": (ops.attention, heads, {}, attended),
        "causal attention": (
            ops.attention,
            heads,
            {"causal": True},
            lambda q, k, v: attended(q, k, v, causal),
        ),
        "a window with sinks and a cap": (
            ops.attention,
            {**heads, "sink": drawn(H)},
            {"causal": True, "window": 3, "soft_cap": 2.0},
            lambda q, k, v, sink: attended(q, k, v, near, sink, cap=2.0),
        ),
        "a bias and a gate": (
            ops.attention,
            {**heads, "bias": drawn(H, I, J), "gate": drawn(B, H, I, E)},
            {},
            lambda q, k, v, bias, gate: attended(q, k, v, bias=bias, gate=gate),
        ),
        "documents": (
            ops.attention,
            {**square, "documents": documents},
            {"causal": True},
            lambda q, k, v, documents: attended(q, k, v, same),
        ),
        "a mask and lengths": (
            ops.attention,
            {**heads, "mask": mask, "lengths": lengths},
            {},
            lambda q, k, v, mask, lengths: attended(q, k, v, present),
        ),
        "attention by sigmoids": (
            ops.attention,
            heads,
            {"sigmoid": True, "causal": True},
            lambda q, k, v: by_sigmoids(q, k, v, causal),
        ),
        "linear attention": (ops.linear_attention, linear, {}, unsquashed),
        "Performer": (
            ops.linear_attention,
            {**linear, "q": linear["q"].abs(), "k": linear["k"].abs()},
            {"normalised": True},
            lambda q, k, v: unsquashed(q, k, v, normalised=True),
        ),
        "RetNet": (
            ops.linear_attention,
            {**linear, "decay": -0.1 * drawn(H).abs()},
            {"scale": 0.5},
            lambda q, k, v, decay: (
                0.5
                * unsquashed(
                    q,
                    k,
                    v,
                    (torch.arange(L, device=q.device)[:, None] - torch.arange(L, device=q.device))
                    * decay[:, None, None],
                )
            ),
        ),
        "Mamba-2": (
            ops.linear_attention,
            {**linear, "gate": -0.1 * drawn(B, H, L).abs()},
            {},
            lambda q, k, v, gate: unsquashed(q, k, v, apart(gate)),
        ),
        "gated linear attention": (
            ops.linear_attention,
            {**linear, "gates": -0.1 * drawn(B, H, L, E).abs()},
            {},
            lambda q, k, v, gates: unsquashed(q, k, v, apart(gates)),
        ),
        "differential attention": (
            ops.differential_attention,
            {
                "q1": heads["q"],
                "k1": drawn(B, H, J, E),
                "q2": heads["q"] + 1,
                "k2": drawn(B, H, J, E, seed=3),
                "v": drawn(B, H, J, E),
                "weight": drawn(H),
            },
            {},
            lambda q1, k1, q2, k2, v, weight: (
                attended(q1, k1, v, causal) - weight[:, None, None] * attended(q2, k2, v, causal)
            ),
        ),
    }
    return {name: Case(*case) for name, case in found.items()}
