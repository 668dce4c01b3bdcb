"""The library of programs: each against torch in float64, forward and backward, and what is said of wrong calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import eqfuse as eq
from eqfuse import ops
from eqfuse.errors import EqfuseError

Tensors = Mapping[str, torch.Tensor]
B, T, D, V, C = 2, 7, 16, 20, 5
LABELS = torch.tensor([3, 19, -100, 0, 7, 7, -100])
IDS = LABELS.clamp(0)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def rms(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    other = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * torch.cat([cos, cos], -1) + other * torch.cat([sin, sin], -1)


def neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos.repeat_interleave(2, -1) + other * sin.repeat_interleave(2, -1)


def tokens(z: torch.Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> torch.Tensor:
    loss = F.cross_entropy(z, LABELS, label_smoothing=smoothing, reduction="none", ignore_index=-100)
    return loss + torch.where(LABELS == -100, 0, z_loss * z.logsumexp(1).square())


def log_probs(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    p = z.log_softmax(1)
    return p.gather(1, IDS[:, None])[:, 0], -(p.exp() * p).sum(1)


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, kind: str, t: float, beta: float = 0.5
) -> torch.Tensor:
    p, q = (student / t).log_softmax(1), (teacher / t).log_softmax(1)
    if kind == "forward":
        return t * t * (q.exp() * (q - p)).sum(1).mean()
    if kind == "reverse":
        return t * t * (p.exp() * (p - q)).sum(1).mean()
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return t * t * (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(1).mean()


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
    y = p @ v
    return y if gate is None else y * gate.sigmoid()


H, I, J = 4, 6, 9
CAUSAL = torch.ones(I, J, dtype=torch.bool).tril(J - I)
NEAR = CAUSAL & ~torch.ones(I, J, dtype=torch.bool).tril(J - I - 3)
HEADS = {"q": drawn(B, H, I, 8), "k": drawn(B, 2, J, 8, seed=1), "v": drawn(B, 2, J, 5)}
SQUARE = {"q": drawn(B, H, J, 8), "k": HEADS["k"], "v": HEADS["v"]}
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
SAME = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])[:, None]
VOCABULARY = {"x": drawn(T, C), "w": drawn(V, C)}
ANSWERS = {
    "log_probs": -drawn(3, 6).abs(),
    "old": -drawn(3, 6, seed=1).abs(),
    "advantage": drawn(3),
    "mask": torch.tensor([[1.0] * 6, [1.0] * 3 + [0.0] * 3, [1.0] * 5 + [0.0]]),
}

CASES: dict[str, tuple[ops.Op, Tensors, Mapping[str, Any], Callable[..., Any]]] = {
    "rms norm": (ops.rms_norm, {"x": drawn(B, T, D), "w": drawn(D)}, {}, rms),
    "rms norm, Gemma's": (
        ops.rms_norm,
        {"x": drawn(B, T, D), "w": drawn(D)},
        {"offset": 1.0, "eps": 1e-5},
        lambda x, w: rms(x, 1 + w, 1e-5),
    ),
    "added rms norm": (
        ops.add_rms_norm,
        {"x": drawn(B, T, D), "residual": drawn(B, T, D, seed=1), "w": drawn(D)},
        {},
        lambda x, residual, w: (rms(x + residual, w), x + residual),
    ),
    "layer norm": (
        ops.layer_norm,
        {"x": drawn(T, D), "w": drawn(D), "bias": drawn(D, seed=1)},
        {},
        lambda x, w, bias: F.layer_norm(x, (D,), w, bias),
    ),
    "layer norm alone": (ops.layer_norm, {"x": drawn(D)}, {}, lambda x: F.layer_norm(x, (D,))),
    "added layer norm": (
        ops.add_layer_norm,
        {"x": drawn(T, D), "residual": drawn(T, D, seed=1), "w": drawn(D), "bias": drawn(D, seed=1)},
        {},
        lambda x, residual, w, bias: (F.layer_norm(x + residual, (D,), w, bias), x + residual),
    ),
    "group norm": (
        ops.group_norm_silu,
        {"x": drawn(3, 12, 4, 5), "w": drawn(12), "bias": drawn(12, seed=1)},
        {"groups": 4},
        lambda x, w, bias: F.silu(F.group_norm(x, 4, w, bias)),
    ),
    "group norm alone": (
        ops.group_norm_silu,
        {"x": drawn(3, 12, 7)},
        {"groups": 3, "activation": False},
        lambda x: F.group_norm(x, 3),
    ),
    "swiglu": (
        ops.swiglu,
        {"gate": drawn(B, T, D), "up": drawn(B, T, D, seed=1)},
        {},
        lambda gate, up: F.silu(gate) * up,
    ),
    "swiglu of halves": (
        ops.swiglu,
        {"gate": drawn(T, 2 * D)},
        {},
        lambda gate: F.silu(gate[:, :D]) * gate[:, D:],
    ),
    "geglu": (
        ops.geglu,
        {"gate": drawn(T, D), "up": drawn(T, D, seed=1)},
        {},
        lambda gate, up: F.gelu(gate) * up,
    ),
    "geglu by tanh": (
        ops.geglu,
        {"gate": drawn(T, 2 * D)},
        {"approximate": True},
        lambda gate: F.gelu(gate[:, :D], approximate="tanh") * gate[:, D:],
    ),
    "rotary": (
        ops.rotary,
        {"x": drawn(B, 3, T, D), "cos": drawn(T, 8), "sin": drawn(T, 8, seed=1)},
        {},
        turned,
    ),
    "rotary of neighbours": (
        ops.rotary,
        {"x": drawn(T, D), "cos": drawn(T, 8), "sin": drawn(T, 8, seed=1)},
        {"interleaved": True},
        neighbours,
    ),
    "cross-entropy": (
        ops.cross_entropy,
        {"logits": drawn(T, V), "label": LABELS},
        {},
        lambda logits, label: F.cross_entropy(logits, LABELS),
    ),
    "smoothed cross-entropy": (
        ops.cross_entropy,
        {"logits": drawn(T, V), "label": LABELS},
        {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none"},
        lambda logits, label: tokens(logits, 0.1, 0.01),
    ),
    "linear cross-entropy": (
        ops.linear_cross_entropy,
        {**VOCABULARY, "label": LABELS, "bias": drawn(V)},
        {},
        lambda x, w, label, bias: F.cross_entropy(x @ w.T + bias, LABELS),
    ),
    "capped linear cross-entropy": (
        ops.linear_cross_entropy,
        {**VOCABULARY, "label": LABELS},
        {"soft_cap": 3.0, "z_loss": 0.1, "reduction": "sum"},
        lambda x, w, label: tokens(3 * torch.tanh(x @ w.T / 3), z_loss=0.1).sum(),
    ),
    "log-probabilities": (
        ops.token_log_probs,
        {"logits": drawn(T, V), "ids": IDS},
        {"temperature": 0.5},
        lambda logits, ids: log_probs(logits / 0.5)[0],
    ),
    "log-probabilities of a linear layer": (
        ops.linear_token_log_probs,
        {**VOCABULARY, "ids": IDS},
        {"entropy": True},
        lambda x, w, ids: log_probs(x @ w.T),
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
        dict(
            zip(
                ("chosen", "rejected", "reference_chosen", "reference_rejected"),
                5 * drawn(4, 9),
                strict=True,
            )
        ),
        {"beta": 0.2, "label_smoothing": 0.1},
        lambda chosen, rejected, reference_chosen, reference_rejected: preferred(
            0.2 * (chosen - rejected - reference_chosen + reference_rejected)
        ),
    ),
    "kto": (
        ops.kto,
        {
            "log_probs": drawn(9),
            "reference": drawn(9, seed=1),
            "desirable": (drawn(9) > 0).float(),
            "divergence": drawn(1).abs(),
        },
        {"undesirable_weight": 1.5},
        lambda log_probs, reference, desirable, divergence: torch.where(
            desirable > 0,
            (-0.1 * (log_probs - reference - divergence.detach())).sigmoid(),
            1.5 * (0.1 * (log_probs - reference - divergence.detach())).sigmoid(),
        ).mean(),
    ),
    "grpo": (ops.grpo, ANSWERS, {}, group_relative),
    "grpo with a reference": (
        ops.grpo,
        {**ANSWERS, "reference": -drawn(3, 6, seed=2).abs()},
        {"beta": 0.1, "per": "answer"},
        lambda **given: group_relative(**given, beta=0.1, per="answer"),
    ),
    "contrastive": (
        ops.contrastive,
        {"x": F.normalize(drawn(6, 8), dim=1), "y": F.normalize(drawn(6, 8, seed=1), dim=1)},
        {},
        lambda x, y: (
            (
                F.cross_entropy(x @ y.T / 0.07, torch.arange(6))
                + F.cross_entropy(y @ x.T / 0.07, torch.arange(6))
            )
            / 2
        ),
    ),
    "contrastive, one way": (
        ops.contrastive,
        {"x": drawn(6, 8), "y": drawn(6, 8, seed=1)},
        {"temperature": 1.0, "symmetric": False},
        lambda x, y: F.cross_entropy(x @ y.T, torch.arange(6)),
    ),
    "attention": (ops.attention, HEADS, {}, attended),
    "causal attention": (ops.attention, HEADS, {"causal": True}, lambda q, k, v: attended(q, k, v, CAUSAL)),
    "a window with sinks and a cap": (
        ops.attention,
        {**HEADS, "sink": drawn(H)},
        {"causal": True, "window": 3, "soft_cap": 2.0},
        lambda q, k, v, sink: attended(q, k, v, NEAR, sink, cap=2.0),
    ),
    "a bias and a gate": (
        ops.attention,
        {**HEADS, "bias": drawn(H, I, J), "gate": drawn(B, H, I, 5)},
        {},
        lambda q, k, v, bias, gate: attended(q, k, v, bias=bias, gate=gate),
    ),
    "documents": (
        ops.attention,
        {**SQUARE, "documents": DOCUMENTS},
        {"causal": True},
        lambda q, k, v, documents: attended(q, k, v, SAME & torch.ones(J, J, dtype=torch.bool).tril()),
    ),
    "a mask and lengths": (
        ops.attention,
        {
            **HEADS,
            "mask": (drawn(I, J) > -1).float().index_fill(1, torch.tensor([0]), 1),
            "lengths": torch.tensor([9, 4]),
        },
        {},
        lambda q, k, v, mask, lengths: attended(
            q, k, v, (mask > 0) & (torch.arange(J) < torch.tensor([9, 4])[:, None, None, None])
        ),
    ),
    "attention by sigmoids": (
        ops.attention,
        HEADS,
        {"sigmoid": True, "causal": True},
        lambda q, k, v: (
            (
                (
                    q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5 - torch.tensor(float(J)).log()
                ).sigmoid()
                * CAUSAL
            )
            @ v.repeat_interleave(2, 1)
        ),
    ),
    "differential attention": (
        ops.differential_attention,
        {
            "q1": HEADS["q"],
            "k1": drawn(B, H, J, 8),
            "q2": HEADS["q"] + 1,
            "k2": drawn(B, H, J, 8, seed=3),
            "v": drawn(B, H, J, 5),
            "weight": drawn(H),
        },
        {},
        lambda q1, k1, q2, k2, v, weight: (
            attended(q1, k1, v, CAUSAL) - weight[:, None, None] * attended(q2, k2, v, CAUSAL)
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["rms norm", "rotary", "cross-entropy", "dpo", "sinks"])
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    op, tensors, options, torchs = CASES[name]
    held = {"label", "ids", "documents", "mask", "lengths", "desirable", "divergence", "old", "advantage"}
    given = {
        k: t.clone().requires_grad_(k not in held) if t.is_floating_point() else t for k, t in tensors.items()
    }
    exact = {
        k: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for k, t in given.items()
    }
    made, wanted = op(**given, **options), torchs(**exact)
    pairs = list(zip(*(x if isinstance(x, tuple) else (x,) for x in (made, wanted)), strict=True))
    for found, right in pairs:
        torch.testing.assert_close(found.double(), right, rtol=2e-5, atol=2e-5)
    above = [drawn(*right.shape, seed=5) for _, right in pairs]
    sum((found * by).sum() for (found, _), by in zip(pairs, above, strict=True)).backward()
    sum((right * by.double()).sum() for (_, right), by in zip(pairs, above, strict=True)).backward()
    for key, tensor in given.items():
        if tensor.requires_grad:
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad.double(), exact[key].grad, rtol=1e-4, atol=2e-5, msg=key)
    kernel = op.kernel(given=tensors.keys(), **options) if op.shaped is None else None
    assert kernel is None or kernel.certificate.ok


def test_statistics_of_attention() -> None:
    y, top, entropy = ops.attention(**HEADS, causal=True, statistics=True)
    k = HEADS["k"].repeat_interleave(2, 1)
    s = (HEADS["q"] @ k.transpose(-1, -2) * 8**-0.5).masked_fill(~CAUSAL, -torch.inf)
    p = s.softmax(-1)
    torch.testing.assert_close(y, attended(**HEADS, seen=CAUSAL))
    torch.testing.assert_close(top, s.amax(-1))
    torch.testing.assert_close(entropy, -(p * p.clamp(1e-30).log()).sum(-1), rtol=1e-4, atol=1e-5)


def test_routing() -> None:
    x, w = drawn(11, 8), drawn(6, 8)
    weight, index, auxiliary = ops.route(x, w, experts=2)
    p = (x @ w.T).softmax(1)
    best, places = p.topk(2)
    assert torch.equal(index.long(), places)
    torch.testing.assert_close(weight, best / best.sum(1, keepdim=True))
    share = F.one_hot(places, 6).sum(1).float().mean(0)
    torch.testing.assert_close(auxiliary, 6 * (share * p.mean(0)).sum() / 2)


def test_rows_in_8_bits_and_their_product() -> None:
    x, w = drawn(2, 3, D), drawn(12, D)
    q, scale = ops.quantize_rows(x)
    assert q.dtype == torch.int8 and scale.shape == (2, 3)
    assert (q * scale[..., None] - x).abs().max() <= scale.max() / 2 * 1.001
    weights, w_scale = ops.quantize_rows(w)
    found = ops.quantized_linear(x, weights, w_scale)
    wanted = (q.float() * scale[..., None]) @ (weights.float() * w_scale[:, None]).T
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_query_over_pages() -> None:
    q, k, v = drawn(2, 4, 8), drawn(6, 16, 2, 8), drawn(6, 16, 2, 5)
    table = torch.tensor([[4, 0, 2], [3, 5, 1]], dtype=torch.int32)
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    found = ops.paged_decode(q, k, v, table, lengths)
    for b in range(2):
        keys, values = (x[table[b].long()].flatten(0, 1)[: lengths[b]].transpose(0, 1) for x in (k, v))
        wanted = attended(q[b][None, :, None], keys[None], values[None])
        torch.testing.assert_close(found[b], wanted[0, :, 0], rtol=1e-4, atol=1e-5)


def test_a_text_is_a_program_to_be_changed() -> None:
    text = ops.rms_norm.text().replace("rsqrt(", "2 * rsqrt(")
    x, w = drawn(3, D), drawn(D)
    torch.testing.assert_close(eq.compile(text)(x=x, w=w), 2 * ops.rms_norm(x, w))


@pytest.mark.parametrize("op", ops.CATALOGUE, ids=lambda each: each.name)
def test_every_program_says_what_it_is(op: ops.Op) -> None:
    assert op.__doc__ and op.name in ops.__all__ and getattr(ops, op.name) is op
    assert op.text().strip()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(drawn(3, 4), drawn(4), epsilon=1.0), "no option 'epsilon'"),
        (lambda: ops.rms_norm(drawn(3, 4), drawn(4), drawn(4)), "takes 2 tensors, not 3"),
        (lambda: ops.rms_norm(drawn(3, 4), x=drawn(3, 4), w=drawn(4)), "'x' twice"),
        (lambda: ops.rms_norm(drawn(3, 4)), "no value|'w'"),
        (lambda: ops.add_rms_norm(drawn(3, 4), drawn(2, 4), drawn(4)), "rows of shape"),
        (lambda: ops.swiglu(torch.tensor(1.0)), "0 dimensions"),
        (lambda: ops.group_norm_silu(drawn(2, 10, 3), groups=4), "no 4 groups"),
        (
            lambda: ops.cross_entropy(drawn(3, 4), torch.tensor([0, 1, 2]), reduction="max"),
            "reduction is 'max'",
        ),
        (lambda: ops.distillation(drawn(3, 4), drawn(3, 4), kind="back"), "kind is 'back'"),
        (lambda: ops.grpo(**ANSWERS, beta=0.1), "needs a reference"),
        (lambda: ops.attention(drawn(1, 3, 4, 8), drawn(1, 2, 4, 8), drawn(1, 2, 4, 8)), "do not share"),
        (lambda: ops.attention(**HEADS, sigmoid=True, statistics=True), "no sink and no statistics"),
    ],
)
def test_wrong_calls_say_what_to_do(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(EqfuseError, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_any_size_are_labels(dtype: torch.dtype) -> None:
    logits = drawn(T, V)
    torch.testing.assert_close(
        ops.cross_entropy(logits, LABELS.to(dtype)), F.cross_entropy(logits, LABELS), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_stay_halves(dtype: torch.dtype) -> None:
    x, residual, w = (value.to(dtype) for value in (drawn(3, D), drawn(3, D, seed=1), drawn(D)))
    y, h = ops.add_rms_norm(x, residual, w)
    assert y.dtype == h.dtype == dtype
    torch.testing.assert_close(
        y.double(), rms(x.double() + residual.double(), w.double()), rtol=2e-2, atol=2e-2
    )


def test_no_rows_and_no_tokens() -> None:
    assert ops.rms_norm(drawn(0, 3, D), drawn(D)).shape == (0, 3, D)
    assert ops.swiglu(drawn(0, D), drawn(0, D)).shape == (0, D)
    nothing = ops.cross_entropy(drawn(3, V), torch.full((3,), -100))
    assert nothing.item() == 0
