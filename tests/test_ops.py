"""The library of programs: each against torch in float64, forward and backward, and what is said of wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import eqfuse as eq
from bench.library import HELD, Sizes, attended, cases, drawn, rms
from eqfuse import ops
from eqfuse.errors import EqfuseError

CASES = cases(Sizes())
B, T, D, V = 2, 7, 16, 20
LABELS = torch.tensor([3, 19, -100, 0, 7, 7, -100])
H, I, J = 4, 6, 9
CAUSAL = torch.ones(I, J, dtype=torch.bool).tril(J - I)
HEADS = {"q": drawn(B, H, I, 8), "k": drawn(B, 2, J, 8, seed=1), "v": drawn(B, 2, J, 5)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["rms norm", "rotary", "cross-entropy", "dpo", "sinks"])
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    op, tensors, options, torchs = CASES[name]
    given = {
        k: t.clone().requires_grad_(k not in HELD) if t.is_floating_point() else t for k, t in tensors.items()
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
    assert op.latest.certificate.ok


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 3, 2, 5, 4), (2, 0, 5, 4)])
def test_angles_of_batches_and_of_every_feature(
    shape: tuple[int, ...], width: int, interleaved: bool
) -> None:
    x, batches = drawn(*shape), (shape[0],) if len(shape) > 3 else ()
    for lead in {(), (1,), batches}:
        cos, sin = (drawn(*lead, 5, width, seed=seed) for seed in (1, 2))
        per_feature = [
            t if width == 4 else t.repeat_interleave(2, -1) if interleaved else torch.cat([t, t], -1)
            for t in (cos, sin)
        ]
        if lead and len(shape) > 3:
            per_feature = [t.reshape(-1, *(1,) * (len(shape) - 3), 5, 4) for t in per_feature]
        pairs = x.unflatten(-1, (2, 2))
        first, second = pairs.unbind(-1 if interleaved else -2)
        other = torch.stack([-second, first], -1 if interleaved else -2).flatten(-2)
        wanted = x * per_feature[0] + other * per_feature[1]
        torch.testing.assert_close(ops.rotary(x, cos, sin, interleaved=interleaved), wanted.reshape(shape))


def test_angles_of_other_shapes_are_refused() -> None:
    x, good = drawn(2, 3, 5, 4), drawn(5, 2)
    for bad in (drawn(5, 3), drawn(3, 5, 2), drawn(2), drawn(2, 3, 5, 2)):
        with pytest.raises(EqfuseError, match="has no angles of x"):
            ops.rotary(x, good, bad)
    with pytest.raises(EqfuseError, match="axis 's' has size 5 in x"):
        ops.rotary(x, good, drawn(6, 2))


def test_the_dtype_of_a_loss() -> None:
    logits, label = drawn(7, 20).bfloat16(), LABELS
    wanted = F.cross_entropy(logits.float(), label)
    torch.testing.assert_close(ops.cross_entropy(logits, label, dtype="f32"), wanted)
    each = ops.cross_entropy(logits, label, reduction="none", dtype="f32")
    torch.testing.assert_close(each, F.cross_entropy(logits.float(), label, reduction="none"))
    assert ops.cross_entropy(logits, label).dtype == torch.bfloat16


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
        (lambda: ops.swiglu(torch.tensor(1.0)), "no two halves"),
        (lambda: ops.swiglu(torch.tensor(1.0), torch.tensor(1.0)), "0 dimensions"),
        (lambda: ops.rotary(drawn(3, 5), drawn(3, 2), drawn(3, 2)), "no pairs of features"),
        (lambda: ops.group_norm_silu(drawn(2, 10, 3), groups=4), "no 4 groups"),
        (
            lambda: ops.cross_entropy(drawn(3, 4), torch.tensor([0, 1, 2]), reduction="max"),
            "reduction is 'max'",
        ),
        (lambda: ops.distillation(drawn(3, 4), drawn(3, 4), kind="back"), "kind is 'back'"),
        (lambda: ops.attention(drawn(1, 2, 4, 8)), "is not given 'k'"),
        (lambda: ops.rotary(cos=drawn(3, 2)), "is not given 'x'"),
        (lambda: ops.rms_norm([1.0], drawn(1)), "'x' is a list"),
        (lambda: ops.grpo(**CASES["grpo"].tensors, beta=0.1), "needs a reference"),
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


@pytest.mark.parametrize("eps", [1.5e-3, 2.5e-3], ids=["first", "another"])
def test_compiled_code_traces_none_of_a_programs_first_compilation(eps: float) -> None:
    """Options that change between calls are numbers that Dynamo leaves open: each still has its kernel."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def normed(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        twice: torch.Tensor = ops.rms_norm(ops.rms_norm(x, w, eps=eps), w, eps=10 * eps)
        return twice

    x, w = torch.randn(2, 3, 64), torch.randn(64)
    for scale in (1, 2, 3):  # the second one is left open
        found = normed(x, w, scale * eps)
        assert torch.allclose(found, rms(rms(x, w, scale * eps), w, 10 * scale * eps), atol=1e-5)
    assert str(30 * eps) in ops.rms_norm.latest.program.source


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row": lambda x: x[0, 0],
    "rows": lambda x: x[0],
    "batches": lambda x: x,
    "heads": lambda x: x.unflatten(1, (3, 2)),
    "positions first": lambda x: x.transpose(0, 1),
    "the last position": lambda x: x[:, -1:],
    "every second": lambda x: x[:, ::2],
    "one row for all": lambda x: x[:1, :1].expand(4, 6, D),
    "features first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_along_any_dimensions(layout: str) -> None:
    """They are axes of the program: autograd records no view of a tensor."""
    x = LAYOUTS[layout](drawn(4, 6, D)).detach().requires_grad_()
    w, bias = drawn(D).requires_grad_(), drawn(D, seed=1).requires_grad_()
    y = ops.layer_norm(x, w, bias)
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions} == {"AccumulateGrad"}
    assert y.shape == x.shape and ops.layer_norm.latest.backward.certificate.ok
    above = drawn(*x.shape, seed=2)
    wide = [each.detach().double().requires_grad_() for each in (x, w, bias)]
    expected = F.layer_norm(wide[0], (D,), *wide[1:])
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(y, (x, w, bias), above)
    for one, other in zip(found, torch.autograd.grad(expected, wide, above.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_no_rows_and_no_tokens() -> None:
    assert ops.rms_norm(drawn(0, 3, D), drawn(D)).shape == (0, 3, D)
    assert ops.swiglu(drawn(0, D), drawn(0, D)).shape == (0, D)
    nothing = ops.cross_entropy(drawn(3, V), torch.full((3,), -100))
    assert nothing.item() == 0
