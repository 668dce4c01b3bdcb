"""`eq.from_torch`: functions and modules of torch as programs, which compute the same."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import eqfuse as eq
from eqfuse.errors import BindError, EqfuseError
from eqfuse.terms.nodes import Axis, Const
from eqfuse.torch.positions import Part, Radix, exact_ratio


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return torch.softmax(q @ k.mT * 0.3, -1) @ k


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b, h, n, d = k.shape
    k = k[:, :, None].expand(b, h, 2, n, d).reshape(b, h * 2, n, d)
    v = v[:, :, None].expand(b, h, 2, n, d).reshape(b, h * 2, n, d)
    mask = torch.ones(q.shape[2], n, dtype=torch.bool).tril()
    return torch.softmax((q @ k.mT).masked_fill(~mask, float("-inf")), -1) @ v


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(12, 36)
        self.out = torch.nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (part.view(b, n, 3, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(b, n, 12))  # type: ignore[no-any-return]


def written(x: torch.Tensor) -> torch.Tensor:
    """A recurrence that is written into a tensor, position by position, and what slices leave of it."""
    o = torch.zeros_like(x)
    for i in range(3):
        o[:, i] = x[:, i] * 2 + (o[:, i - 1] if i else 0)
    o[1:, 3:] = x[1:, :-3]
    return o


def turned(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    n = c.shape[-1]
    return torch.cat([x[..., :-n], x[..., -n:] * c], -1) * x.shape[-1] ** -0.5 + x.shape[0] / 3


def placed(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes at positions that tensors hold: the last stays, or all are added."""
    n, places = torch.zeros_like(x), torch.arange(3)
    n[places, places] = y[0, :3]
    n[x > 1] = 0.5
    n[torch.zeros_like(x, dtype=torch.bool).index_put((i[:2],), torch.tensor(True))] = 0
    n = n.index_put((i, torch.tensor([0, -1, 2])), y[0, :3]) + x.index_add(1, i, y[:, :3], alpha=0.5)
    return n + x.scatter(1, i[None], y) + x.scatter_add(0, i[:, None], y) + x.index_copy(0, i, y[:3])


@dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    draw: Callable[[int], tuple[Any, ...]]


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CASES = {
    "softmax": Case(lambda x: torch.softmax(x, -1), lambda n: (r(4, n),)),
    "rotary attention": Case(rope, lambda n: (r(2, 3, n, 8), r(2, 3, n, 8), r(n, 8), r(n, 8))),
    "grouped queries": Case(grouped, lambda n: (r(2, 4, n, 8), r(2, 2, n, 8), r(2, 2, n, 8))),
    "attention": Case(Attention().double(), lambda n: (r(2, n, 12),)),
    "masked attention": Case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda n: (r(2, 3, n, 8), r(2, 3, n + 2, 8), r(2, 3, n + 2, 8), torch.rand(2, 1, n, n + 2) < 0.7),
    ),
    "differential attention": Case(
        lambda q, k, v, s: (torch.softmax(q @ k.mT, -1) - s * torch.softmax(k @ q.mT, -1)) @ v,
        lambda n: (r(2, n, 4), r(2, n, 4), r(2, n, 4), torch.tensor(0.3).double()),
    ),
    "rms norm": Case(lambda x, w: F.rms_norm(x, (16,), w, 1e-6), lambda n: (r(n, 16), r(16))),
    "rms norm, by hand": Case(
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, lambda n: (r(n, 16), r(16))
    ),
    "layer norm": Case(lambda x, w, b: F.layer_norm(x, (9,), w, b), lambda n: (r(n, 9), r(9), r(9))),
    "group norm": Case(lambda x, w: F.group_norm(x, 2, w), lambda n: (r(2, 4, n, 5), r(4))),
    "cross-entropy": Case(F.cross_entropy, lambda n: (r(n, 10), torch.randint(0, 10, (n,)))),
    "linear + cross-entropy": Case(
        lambda x, w, t: F.cross_entropy(x @ w.T, t), lambda n: (r(n, 12), r(10, 12), torch.randint(0, 10, (n,)))
    ),
    "SwiGLU": Case(
        lambda x, a, b, c: (F.silu(x @ a) * (x @ b)) @ c, lambda n: (r(n, 8), r(8, 16), r(8, 16), r(16, 8))
    ),
    "an output turned": Case(lambda x, y: (x @ y).permute(2, 0, 1), lambda n: (r(2, n, 3), r(2, 3, 4))),
    "einsum": Case(
        lambda q, k: torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1), lambda n: (r(2, n, 3, 8), r(2, n + 1, 3, 8))
    ),
    "embedding and positions": Case(
        lambda i, w, p: F.embedding(i, w) + p[torch.arange(i.shape[1])],
        lambda n: (torch.randint(0, 9, (2, n)), r(9, 6), r(20, 6)),
    ),
    "router": Case(lambda x, w: torch.topk(torch.softmax(x @ w, -1), 2), lambda n: (r(n, 8), r(8, 6))),
    "a computed index": Case(lambda x: torch.gather(x, 1, torch.topk(x, 2).indices), lambda n: (r(n, 8),)),
    "index_select": Case(
        lambda x, i: torch.index_select(x, 1, i), lambda n: (r(n, 8), torch.randint(0, 8, (5,)))
    ),
    "cumsum": Case(lambda x: x.cumsum(-1), lambda n: (r(3, n),)),
    "max with positions": Case(lambda x: x.max(1), lambda n: (r(n, 6),)),
    "argmax of all": Case(lambda x: x.argmax(), lambda n: (r(n, 6),)),
    "variance": Case(lambda x: x.var(1) + x.std(1), lambda n: (r(n, 6),)),
    "logsumexp": Case(lambda x: torch.logsumexp(x, (0, 2)), lambda n: (r(n, 3, 4),)),
    "any and all": Case(lambda x: ((x > 0).any(1), (x > -1).all(), (x > 0).sum(1)), lambda n: (r(n, 4),)),
    "rows counted otherwise": Case(
        lambda x: (x.reshape(-1) * 2).view(x.shape[1], x.shape[0]).sum(0), lambda n: (r(n, 6),)
    ),
    "pad and flip": Case(lambda x: F.pad(x, (1, 2)).flip(0), lambda n: (r(n, 4),)),
    "triangles": Case(lambda x: x.tril(1) + x.triu(-1), lambda n: (r(n, n + 1),)),
    "slices": Case(lambda x: x[:, 1:-1:2] + x[:, :1] - x[..., -1, None], lambda n: (r(n, 7),)),
    "stack and unbind": Case(lambda x: torch.stack(x.unbind(1), 0).sum(0), lambda n: (r(n, 3),)),
    "structures": Case(lambda x: {"a": x.sum(1), "b": (x, x.shape[0]), "c": x.T}, lambda n: (r(n, 4),)),
    "functions": Case(
        lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.leaky_relu(x) + F.elu(x) + F.softplus(x, 2.0) + x.clamp(-1, 0.5) + torch.tanh(x)
        + torch.ceil(x) + x.abs().log1p() + torch.expm1(x) + F.softplus(x) + F.elu(x) + F.hardswish(x) + x**3,
        lambda n: (r(n),),
    ),
    "integers": Case(lambda i: (i * 2 + 1) // 3 % 4 - i, lambda n: (torch.arange(-n, n),)),
    "truth": Case(
        lambda x, y: torch.where((x > 0) & ~(y > 0) | (x == y), x, -y), lambda n: (r(n, 3), r(3))
    ),
    "sizes as real numbers, slices from the end": Case(turned, lambda n: (r(3, n + 4), r(3, n))),
    "a slice as long as another tensor": Case(lambda x, y: y[:, -x.size(1):] * x, lambda n: (r(2, n), r(2, n + 3))),
    "slices that are written": Case(written, lambda n: (r(n, 8),)),
    "halves of a batch": Case(
        lambda x, i: (x[: x.shape[0] // 2] * (i[: x.shape[0] // 2] > 1) - x[x.shape[0] // 2 :]).mean(),
        lambda n: (r(n + n % 2, 3), torch.arange(n + n % 2)[:, None]),
    ),
    "arguments without a name": Case(lambda *a, **k: a[0] + a[1] * 2, lambda n: (r(n, 3), r(n, 3))),
    "powers": Case(lambda x, y: x.abs() ** 0.3 + x**y.round() + torch.pow(x.abs() + 0.1, y) + x**20, lambda n: (r(n, 3), r(n, 3))),
    "prefixes and diagonals": Case(
        lambda x: (x.cumprod(1), x.logcumsumexp(0), torch.diagonal(x, 1) + torch.hypot(x, x).diagonal(1)), lambda n: (r(n, n),)
    ),
    "smoothed classes": Case(
        lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=2, label_smoothing=0.1) + F.cross_entropy(x, x.softmax(1), w, label_smoothing=0.2),
        lambda n: (r(n, 4), torch.arange(n) % 4, r(4).abs()),
    ),
    "writes at positions": Case(placed, lambda n: (r(n, 4), torch.tensor([1, 0, 1]), r(n, 4))),
    "rows of a list": Case(
        lambda x, i: torch.stack([a.gather(1, b[:, None])[:, 0] for a, b in zip(x, i, strict=True)]),
        lambda n: (r(2, n, 4), torch.randint(0, 4, (2, n))),
    ),
    "contractions": Case(
        lambda x, y, m: (
            torch.einsum("ii->i", y), torch.einsum("...ij, jk", x, y), torch.einsum("ij,jk,kl->il", y, y, y),
            torch.einsum("bij,bjk->bik", x[:1], x.mT).masked_fill(~m[:, None], 0), torch.einsum("i,j", y[0], y[1]),
        ),
        lambda n: (r(3, n, 4), r(4, 4), torch.rand(3, n) < 0.5),
    ),
    "sizes of what is read at computed positions": Case(
        lambda x: (x * x.shape[-1] + x.shape[1]).reshape(-1).softmax(0).view(x.shape[0] * x.shape[1], -1), lambda n: (r(2, n, 3),)
    ),
    "rolls, windows and tails": Case(
        lambda x, y: x.roll((1, -2), (0, 1)) + x.roll(3) + x.unfold(1, 3, 2).sum((1, 2))[:, None]
        + torch.fmod(x, 2)[:, x.shape[1] - y.shape[1] :].sum() + x[-(x.shape[0] // 2) :].sum(),
        lambda n: (r(n, 8), r(n, 5)),
    ),
    "batch and instance norm": Case(
        lambda x, w: (F.batch_norm(x, None, None, w, training=True), F.instance_norm(x)), lambda n: (r(n, 3, 5), r(3))
    ),
    "covariances": Case(lambda x: (torch.cov(x), x.T.corrcoef(), torch.cov(x[0])), lambda n: (r(4, n),)),
    "covariances with weights": Case(
        lambda x, f, a: torch.cov(x, correction=0, fweights=f, aweights=a), lambda n: (r(4, n), torch.arange(n) % 3, r(n).abs())
    ),
    "hardtanh": Case(lambda x: F.hardtanh(x) + F.hardtanh(x, -0.5, 2.0), lambda n: (r(n, 4),)),
    "norms": Case(lambda x: [x.norm(p, 1) for p in (3, 0.5, 0, float("-inf"), 4)], lambda n: (r(n, 4),)),
    "casts": Case(lambda x: (x.half() * 2).float(), lambda n: (torch.randn(n, 4),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["rows counted"])
def test_programs_compute_what_functions_do(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    program = eq.from_torch(case.fn, *case.draw(5), native="off")
    for n in (5, 8):
        given = case.draw(n)
        with torch.no_grad():
            found, expected = program(*given), case.fn(*given)
        leaves = list(zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True))
        assert pytree.tree_structure(found) == pytree.tree_structure(expected)
        for one, other in leaves:
            if isinstance(other, torch.Tensor):
                assert one.shape == other.shape and one.dtype == other.dtype
                assert torch.allclose(one.double(), other.double(), atol=2e-3 if name == "casts" else 1e-9)
            else:
                assert one == other


@pytest.mark.slow
def test_the_text_names_axes_and_leaves_sizes_open() -> None:
    program = eq.from_torch(lambda x, w: torch.softmax(x @ w.T, -1), torch.randn(3, 4), torch.randn(5, 4))
    assert program.source.splitlines() == [
        "dot1[i, k] = sum[j](x[i, j] * w[k, j])",
        "max1[i] = max[k](dot1[i, k])",
        "sum1[i] = sum[k](exp(dot1[i, k] - max1[i]))",
        "out[i, k] = exp(dot1[i, k] - max1[i]) / sum1[i]",
        "return out",
    ]
    x, w = torch.randn(7, 6), torch.randn(2, 6)
    assert torch.allclose(eq.compile(program.source)(x=x, w=w), torch.softmax(x @ w.T, -1), atol=1e-6)


@pytest.mark.slow
def test_heads_that_are_split_and_joined_are_axes() -> None:
    source = eq.from_torch(CASES["attention"].fn, r(2, 5, 12)).source
    assert "//" not in source and "%" not in source


@pytest.mark.slow
def test_parameters_are_read_where_they_are() -> None:
    layer = torch.nn.Linear(3, 2)
    program = eq.from_torch(layer, torch.randn(4, 3), native="off")
    x = torch.randn(4, 3)
    with torch.no_grad():
        layer.weight.add_(1)
        assert torch.allclose(program(x), layer(x), atol=1e-6)


@pytest.mark.slow
def test_programs_are_differentiable() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Softmax(-1)).double()
    program = eq.from_torch(layer, r(3, 5), native="off")
    x = r(6, 5).requires_grad_()
    found = torch.autograd.grad(program(x).square().sum(), [x, layer[0].weight])
    expected = torch.autograd.grad(layer(x).square().sum(), [x, layer[0].weight])
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other)


@pytest.mark.slow
def test_gradients_of_heads_that_are_split_and_joined() -> None:
    torch.manual_seed(0)
    attention = Attention().double()
    x = r(2, 5, 12).requires_grad_()
    program = eq.from_torch(attention, x, native="off")
    (found,) = torch.autograd.grad(program(x).square().sum(), x)
    (expected,) = torch.autograd.grad(attention(x).square().sum(), x)
    assert torch.allclose(found, expected)


@pytest.mark.slow
def test_gradients_of_a_softmax_of_part_of_a_product() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        n, h, c = x.shape
        return (x.reshape(n, h * c) @ w)[:, 2 * h :].view(n, h, h).softmax(-1)

    x, w, to = r(2, 3, 4).requires_grad_(), r(12, 15).requires_grad_(), r(2, 3, 3)
    found = torch.autograd.grad(eq.from_torch(fn, x, w, native="off")(x, w), [x, w], to)
    for one, other in zip(found, torch.autograd.grad(fn(x, w), [x, w], to), strict=True):
        assert torch.allclose(one, other)


def test_what_cannot_be_expressed_is_named_with_its_line() -> None:
    def most_common_of_rows(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.mode(y, -1).values

    with pytest.raises(eq.EqfuseError) as caught:
        eq.from_torch(most_common_of_rows, torch.randn(3, 4))
    assert "aten.mode is not expressible" in str(caught.value)
    assert "torch.mode(y, -1).values" in str(caught.value)
    assert "test_from_torch.py, line" in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: x if x.sum() > 0 else -x, "torch cannot export it"),
        (lambda x: x[x > 0], "not expressible|cannot export"),
        (lambda x: x + torch.randint(3, (3, 4)), "aten.randint.low is not expressible: random numbers"),
        (lambda x: F.rrelu(x, training=True), "slopes that are random numbers"),
        (lambda x: x.nonzero(), "a size that depends on data"),
        (lambda x: torch.bincount(x.argmax(1), minlength=4), "a size that depends on data"),
        (lambda x: x * x.max().item(), "a number that is taken out of a tensor"),
        (lambda x: F.one_hot(x.argmax(1)), "it asks what number a tensor holds"),
        (lambda x: torch.linalg.inv(x[:, :3]), "it decomposes a matrix"),
        (lambda x: torch.fft.rfft(x).abs(), "complex numbers"),
        (lambda x: x.quantile(torch.tensor([0.2, 0.4]), 1), "quantile of more than one number"),
        (lambda x: F.multilabel_margin_loss(x, x.long()), "multilabel_margin_loss"),
        (lambda x: F.embedding_bag(x.argmax(1), x, x.argmax(1)), "embedding_bag with offsets"),
        (lambda x: x.clone().fill_diagonal_(1, wrap=True), "fill_diagonal_ with wrap"),
        (lambda x: 3, "it computes no tensor"),
        (lambda x: x, "it returns its arguments, and computes no tensor"),
        (7, "no function of torch"),
    ],
)
def test_what_is_no_program_is_refused(fn: Any, said: str) -> None:
    with pytest.raises(eq.EqfuseError, match=said) as caught:
        eq.from_torch(fn, torch.randn(3, 4))
    assert caught.value.hint


def test_what_cannot_be_exported_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(eq.EqfuseError, match="it asks what number a tensor holds") as caught:
        eq.from_torch(lambda x: x if x.sum() > 0 else -x, torch.randn(3, 4))
    assert "test_from_torch.py, line" in str(caught.value) and "x.sum() > 0" in str(caught.value)
    assert capfd.readouterr() == ("", "")


class Averaged(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(-1)


def test_what_is_made_of_parameters_alone_is_kept() -> None:
    torch.manual_seed(0)
    own, x = Averaged(12, 700).double(), r(5, 12)
    program = eq.from_torch(own, x, native="off", constants=True)
    with torch.no_grad():
        assert torch.allclose(program(x), own(x))
        kept = program.kernel._constants.latest
        assert kept is not None and "weight" not in kept.rest.names
        own.weight.add_(1)
        assert torch.allclose(program(x), own(x))
    found = torch.autograd.grad(program(x).sum(), own.weight)[0]
    assert torch.allclose(found, torch.autograd.grad(own(x).sum(), own.weight)[0])
    with pytest.raises(EqfuseError, match="constants is True"):
        eq.compile(program.source, constants=True)  # type: ignore[arg-type]


@pytest.mark.slow
def test_buffers_that_a_module_changes_are_written() -> None:
    torch.manual_seed(0)
    own = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten()).double()
    other = copy.deepcopy(own)
    program = eq.from_torch(own, r(4, 3, 2, 5), native="off")
    for n in (4, 6):
        x = r(n, 3, 2, 5)
        found, expected = (given.clone().requires_grad_() for given in (x, x))
        results = program(found), other(expected)
        assert torch.allclose(*results)
        for result in results:
            result.square().sum().backward()
        assert torch.allclose(found.grad, expected.grad, atol=1e-12)  # type: ignore[arg-type]
        for one, two in zip(own.buffers(), other.buffers(), strict=True):
            assert torch.equal(one, two) if one.dtype == torch.int64 else torch.allclose(one, two)
        for one, two in zip(own.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one.grad, two.grad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_norms_of_what_is_not_in_training_change_nothing() -> None:
    norm = torch.nn.BatchNorm1d(4).eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.allclose(eq.from_torch(norm, x, native="off")(x), norm(x), atol=1e-6)
    assert torch.equal(norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(F.dropout(x, 0.3).T, 0.6).softmax(1),
        lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False),
        lambda x: F.dropout1d(x.unsqueeze(1), 0.5) * torch.rand(x.shape[1]) + torch.randn_like(x).mean(),
        lambda x: torch.empty_like(x).bernoulli_(0.25) * torch.rand(()) + x,
    ],
    ids=("dropout", "all or nothing", "channels", "bernoulli"),
)
def test_random_numbers_are_those_that_torch_draws(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    program = eq.from_torch(fn, torch.randn(3, 4), native="off")
    for seed, shape in ((1, (3, 4)), (2, (3, 4)), (3, (5, 8))):
        x = torch.randn(shape, requires_grad=True)
        results = []
        for each in (program, fn):
            torch.manual_seed(seed)
            made = each(x)
            results.append((made, torch.autograd.grad(made.square().sum(), x)[0], torch.rand(())))
        torch.testing.assert_close(*results)


class Running(torch.nn.Module):
    """Scales by a buffer that the call changes, so that the backward reads what was there."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.square() * self.scale.clone()
        self.scale.copy_(self.scale * 0.5 + y.detach().mean(0))
        return y


def test_a_backward_reads_what_was_in_a_buffer_that_changes() -> None:
    own = Running()
    other, program = copy.deepcopy(own), eq.from_torch(own, torch.randn(3, 4), native="off")
    for rows in (3, 5, 3):
        x = torch.randn(rows, 4, requires_grad=True)
        found, expected = (torch.autograd.grad(each(x).sum(), x) for each in (program, other))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(own.scale, other.scale)


def test_a_function_that_changes_an_argument_is_refused() -> None:
    with pytest.raises(eq.EqfuseError, match="it changes 'x'"):
        eq.from_torch(lambda x: x.add_(1), torch.randn(3, 4))


@pytest.mark.slow
def test_calls_that_differ_from_the_examples_are_refused() -> None:
    program = eq.from_torch(lambda x, s: x.view(2, -1) * s, torch.randn(4, 3), 2.0, native="off")
    assert torch.equal(program(torch.ones(4, 3), 2.0), torch.full((2, 6), 2.0))
    for given, said in (
        ((torch.ones(4, 3), 3.0), "'s' is 3.0, the program was made for 2.0"),
        ((torch.ones(4), 2.0), "'x' has 1 dimensions, the example has 2"),
        ((torch.ones(4, 3),), "of another form"),
        ((None, 2.0), "of another form|is a NoneType"),
    ):
        with pytest.raises(eq.EqfuseError, match=said):
            program(*given)


def _unrolled(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[4 * i : 4 * i + 4] * (i + 1) for i in range(x.shape[0] // 4)]).sum(0)


@pytest.mark.parametrize(
    ("function", "examples", "others", "said"),
    [
        (_unrolled, [(8, 3)], [(12, 3)], "(x.shape[0]//4) == 2"),
        (lambda x: sum(x.view(-1, 4).unbind(0)), [(8,)], [(12,)], "(x.shape[0]//4) == 2"),
        (
            lambda x, y: x * 2 if x.shape[0] > y.shape[0] else -x,
            [(8,), (3,)],
            [(8,), (9,)],
            "x.shape[0] > y.shape[0]",
        ),
        (lambda x: x.view(-1, 4).sum(-1), [(8,)], [(10,)], "Mod(x.shape[0], 4) == 0"),
        (lambda x: x[:5].sum(0), [(8, 3)], [(4, 3)], "x.shape[0] >= 5"),
        (lambda x: x[2] * x.shape[0], [(8, 3)], [(2, 3)], "x.shape[0] > 2"),
    ],
    ids=["range", "unbind", "if", "view", "slice", "index"],
)
def test_sizes_at_which_the_code_takes_another_way_are_refused(
    function: Callable[..., torch.Tensor], examples: list[Any], others: list[Any], said: str
) -> None:
    program = eq.from_torch(function, *(torch.ones(size) for size in examples))
    with pytest.raises(BindError, match=re.escape(said)):
        program(*(torch.ones(size) for size in others))


@pytest.mark.slow
def test_sizes_that_differ_in_what_no_position_depends_on_are_taken() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1, 4).transpose(0, 1).reshape(-1, 8).contiguous() * x.shape[0]

    program = eq.from_torch(function, torch.randn(8, 3), native="off")
    for n, m in ((8, 3), (16, 2), (4, 6), (8, 1)):
        x = torch.randn(n, m)
        assert torch.equal(program(x), function(x))


def test_a_loop_over_positions_of_one_tensor_writes_into_one_as_long_as_another() -> None:
    def function(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(v[..., 0])
        for i in range(k.shape[1]):
            out[:, i] = (k[:, i] * v[:, i]).sum(-1)
        return out

    k, v = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    program = eq.from_torch(function, k, v, native="off")
    assert torch.allclose(program(k, v), function(k, v), atol=1e-6)
    longer = torch.randn(2, 5, 4)
    assert torch.allclose(program(k, longer), function(k, longer), atol=1e-6)


@pytest.mark.parametrize("names", ["y, dy", "dy, y", "x, dout"])
def test_inputs_that_are_called_as_gradients_are(names: str) -> None:
    function = eval(f"lambda {names}: {names.replace(',', ' *')}")
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    program = eq.from_torch(function, x.detach(), y.detach(), native="off")
    found = torch.autograd.grad(program(x, y).sum(), (x, y))
    assert torch.equal(found[0], y) and torch.equal(found[1], x)


def test_a_recurrence_that_writes_each_position_of_a_tensor() -> None:
    """Each `out[:, t]` has a sum that is computed by itself; where `s` has fewer positions, nothing reads the later ones."""

    def function(q: torch.Tensor, k: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        decay, state, out = s.cumsum(1), 0, torch.zeros_like(k)
        for t in range(q.shape[1]):
            state = state * torch.exp(-decay[:, t]) + k[:, t] * s[:, t]
            out[:, t] = q[:, t] * state.sum(-1, keepdim=True)
        return out

    given = tuple(torch.rand(2, 3, 4) for _ in range(3))
    program = eq.from_torch(function, *given, native="off")
    assert torch.allclose(program(*given), function(*given), atol=1e-5)


@pytest.mark.slow
def test_a_program_inside_of_torch_compile() -> None:
    program = eq.from_torch(lambda x: torch.softmax(x, -1), torch.randn(3, 4), native="off")
    kernel = copy.deepcopy(pickle.loads(pickle.dumps(program.kernel)))
    call = torch.compile(lambda x: kernel(x=x * 2), fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (3, 5):
        x = torch.randn(n, 4)
        assert torch.allclose(call(x), torch.softmax(x * 2, -1))


# -- positions -------------------------------------------------------------------------------------

RADIX = Radix(Const)


def digits(position: Any) -> list[tuple[str, int]]:
    return [(str(part.index), part.size) for part in position]


def test_a_ratio_of_sums_is_whole_where_each_term_is() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    assert exact_ratio(6 * n + 18, 6) == n + 3
    assert exact_ratio(18 * (n // 2 + 1), 18) == n // 2 + 1
    assert exact_ratio(n // 2 + 1, 18) is None
    assert exact_ratio(6 * n + 1, 6) is None


def test_digits_are_joined_and_split_without_division() -> None:
    h, d = Part(Axis("h"), 3), Part(Axis("d"), 4)
    (joined,) = RADIX.regrouped([h, d], [12])
    assert digits(joined) == [("h", 3), ("d", 4)]
    assert RADIX.regrouped(joined, [3, 4]) == ((h,), (d,))
    assert str(RADIX.flat(joined)) == "h * 4 + d"


def test_digits_are_divided_where_they_have_to_be() -> None:
    m = Part(Axis("m"), 12)
    assert [digits(group) for group in RADIX.regrouped([m], [3, 4])] == [[("m // 4", 3)], [("m % 4", 4)]]
    odd = RADIX.regrouped([Part(Axis("a"), 2), Part(Axis("b"), 3)], [3, 2])
    assert [digits(group) for group in odd] == [[("(a * 3 + b) // 2", 3)], [("(a * 3 + b) % 2", 2)]]


def unpacked(packed: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1)
    return x @ ((nibbles.to(torch.int32) - 8).to(x.dtype) * scales)


@pytest.mark.slow
def test_packed_weights_are_unpacked_as_torch_does() -> None:
    packed, scales = torch.randint(0, 256, (8, 6), dtype=torch.uint8), r(6)
    program = eq.from_torch(unpacked, packed, scales, r(3, 16))
    x = r(3, 16)
    torch.testing.assert_close(program(packed, scales, x), unpacked(packed, scales, x))
    assert ">> 4" in program.source and "& 15" in program.source


def test_bits_and_conversions_are_torchs() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a & b, a | b, a ^ b, ~a, a >> 2, x.to(torch.int8)

    a, b = (torch.randint(0, 256, (9,), dtype=torch.uint8) for _ in "ab")
    x = torch.tensor([-3.7, 2.5, 100.2, -0.4, 0.0, 1.9, -127.9, 5.0, 6.5], dtype=torch.float64)
    for found, exact in zip(eq.from_torch(fn, a, b, x)(a, b, x), fn(a, b, x), strict=True):
        assert found.dtype == exact.dtype and torch.equal(found, exact)


@pytest.mark.parametrize(
    "fn", [lambda a: a + a, lambda a: -a, lambda a: a << 1, lambda a: a @ a, lambda a: a.to(torch.int8)]
)
@pytest.mark.slow(but=["4"])
def test_arithmetic_that_wraps_around_is_refused(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(EqfuseError, match="wraps around|loses bits|rounding to"):
        eq.from_torch(fn, torch.arange(9, dtype=torch.uint8))


@torch.no_grad()
def shift(x: torch.Tensor) -> torch.Tensor:
    return x.max(-1, keepdim=True).values


def by_segments(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
        with torch.enable_grad():
            inside = scale * x
    return inside * x + scale


def in_place(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    z = y + x
    y.detach_()
    return y * x, z


def own_gradient(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    if not y.requires_grad:
        y.requires_grad_()
    (g,) = torch.autograd.grad((y**3).sum(), y)
    return g * x


STOPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda x: x * x.detach(),
    "detach in place": in_place,
    "data": lambda x: x * x.data,
    "a decorated function": lambda x: (x - shift(x)).exp(),
    "blocks": by_segments,
    "straight through": lambda x: x + (x.round() - x).detach(),
    "a hard choice": lambda x: F.one_hot(x.argmax(-1), 4) - x.softmax(-1).detach() + x.softmax(-1),
    "a view": lambda x: x.detach().reshape(-1)[:3] * x.reshape(-1)[1:4],
    "outputs": lambda x: ((x * x).sum(-1), (x * 3).sum(-1).detach()),
    "a gradient": own_gradient,
}


@pytest.mark.parametrize("name", STOPS)
def test_gradients_stop_where_they_do_in_torch(name: str) -> None:
    program = eq.from_torch(STOPS[name], r(3, 4), native="off")
    x = r(3, 4).requires_grad_()

    def run(fn: Callable[[torch.Tensor], Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        outputs = pytree.tree_leaves(fn(x))
        passed = [output for output in outputs if output.requires_grad]
        weights = [torch.linspace(1, 2, output.numel()).reshape(output.shape) for output in passed]
        (found,) = torch.autograd.grad(passed, x, [weight.to(x.dtype) for weight in weights])
        return outputs, found

    (found, gradient), (expected, wanted) = run(program), run(STOPS[name])
    assert [each.requires_grad for each in found] == [each.requires_grad for each in expected]
    torch.testing.assert_close([each.detach() for each in found], [each.detach() for each in expected])
    torch.testing.assert_close(gradient, wanted)
    assert program.kernel.backward.certificate.ok


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def test_a_derivative_of_its_own_is_not_replaced_by_another() -> None:
    program = eq.from_torch(lambda x: Rounded.apply(x) * x, r(3, 4), native="off")
    x = r(3, 4)
    assert torch.equal(program(x), x.round() * x)
    with pytest.raises(eq.EqfuseError, match=r"torch\.autograd\.Function inside"):
        program(x.requires_grad_())


def behind(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return y


def behind_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.detach().mul_(3)
    return y


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda g: g * 0)
    return y


@torch.inference_mode()
def inferred(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (behind, r"mul_.* is not expressible: it changes elements of a tensor that a gradient passes"),
        (behind_a_view, r"mul_.* is not expressible: it changes elements of a tensor that a gradient passes"),
        (hooked, "it calls 'register_hook'"),
        (lambda x: x + inferred(x), r"torch\.inference_mode"),
    ],
)
def test_what_changes_gradients_and_is_not_recorded_is_refused(fn: Any, said: str) -> None:
    with pytest.raises(eq.EqfuseError, match=said) as caught:
        eq.from_torch(fn, r(3, 4))
    assert caught.value.hint


def test_one_tensor_as_several_examples_is_several_inputs() -> None:
    x, y = r(3, 4), r(3, 4)
    program = eq.from_torch(lambda x, y: x - y, x, x, native="off")
    assert torch.equal(program(x, y), x - y)


def _kto(
    policy: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    mine, theirs = (
        F.log_softmax(x, -1).gather(-1, labels[..., None]).squeeze(-1).sum(-1) for x in (policy, reference)
    )
    ratio = mine - theirs
    return torch.where(wanted, 1 - torch.sigmoid(0.1 * ratio), 1 - torch.sigmoid(-0.1 * ratio)).mean()


def test_labels_may_index_two_tensors() -> None:
    shape = 4, 6, 50
    policy, reference = torch.randn(shape, requires_grad=True), torch.randn(shape)
    given = policy, reference, torch.randint(0, 50, shape[:2]), torch.tensor([True, False, True, False])
    kernel = eq.from_torch(_kto, *given)
    torch.testing.assert_close(kernel(*given), _kto(*given))
    assert len(kernel.kernel.plan.kernels) == 1 and kernel.kernel.certificate.ok


def _nanstd(x: torch.Tensor) -> torch.Tensor:
    centred = torch.nan_to_num(x - torch.nanmean(x, -1, keepdim=True))
    return torch.sqrt((centred * centred).sum(-1) / ((~torch.isnan(x)).sum(-1) - 1))


def _masked_std(x: torch.Tensor) -> torch.Tensor:
    there = ~torch.isnan(x)
    count = there.sum(-1, keepdim=True)
    mean = torch.where(there, x, 0).sum(-1, keepdim=True) / count
    return (torch.where(there, (x - mean) ** 2, 0).sum(-1) / (count.squeeze(-1) - 1)).sqrt()


def _nan_norm(x: torch.Tensor) -> torch.Tensor:
    mean = x.nanmean(-1, keepdim=True)
    return (x - mean) / (((x - mean) ** 2).nanmean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", [_nanstd, _masked_std, _nan_norm])
def test_statistics_of_what_is_not_nan(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(5, 40, dtype=torch.float64)
    x[0, 3] = x[1, 5:9] = x[2, :-2] = torch.nan
    x.requires_grad_()
    kernel = eq.from_torch(function, x)
    torch.testing.assert_close(kernel(x), function(x), equal_nan=True)
    if function is _nan_norm:  # whose gradient reads outputs that are NaN
        return
    (found,) = torch.autograd.grad(kernel(x).nansum(), x)
    for row in range(5):  # torch's own gradient of a mask is NaN where NaN is masked
        there = ~torch.isnan(x[row])
        part = x[row, there].detach().requires_grad_()
        (expected,) = torch.autograd.grad(function(part[None]).nansum(), part)
        torch.testing.assert_close(found[row, there], expected, equal_nan=True)


def test_sizes_of_dimensions_are_written_as_such() -> None:
    def partial(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        n = 2 * c.shape[-1]
        return torch.cat([x[..., :n] * c.repeat_interleave(2, -1), x[..., n:]], -1)

    made = eq.from_torch(partial, r(6, 8), r(6, 3), native="off")
    assert "axis[N(c, 1)]" in made.source and "size1" not in made.source
    for x, c in ((r(6, 8), r(6, 3)), (r(4, 11), r(4, 2))):
        assert torch.allclose(made(x, c), partial(x, c))


def test_heatmaps_that_agree_in_their_number_of_positions_alone() -> None:
    def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        n, c, h, w = p.shape
        p, q = (x.view(n, c, -1).softmax(-1).view(n, c, h, w) for x in (p, q))
        return (p * (p.log() - q.log())).sum((2, 3)).mean()

    p, q = r(2, 3, 4, 5), r(2, 3, 4, 5)
    found = eq.from_torch(divergence, p, q, native="off")(p, q)
    assert torch.allclose(found, divergence(p, q), atol=1e-6)


def test_sizes_that_chunks_of_several_tensors_have_alike_are_one() -> None:
    """Distillation in chunks: each has as many positions of the student as of the teacher, flat as many as labels."""

    def divergence(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for s, t, l in zip(*(each.chunk(2, 1) for each in (student, teacher, labels)), strict=True):
            terms = torch.softmax(t, -1) * torch.log_softmax(s, -1)
            total = total - (terms.sum(-1).reshape(-1) * (l != -100).reshape(-1)).sum()
        return total / (labels != -100).sum()

    def examples(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        labels = torch.randint(0, 2, shape) * 100 - 100
        return r(*shape, 5).requires_grad_(), r(*shape, 5), labels

    made = eq.from_torch(divergence, *examples(3, 4), native="off")
    assert "labels: i64[i, j]" in made.source and made.source.count("axis[") == 2
    for given in (examples(3, 4), examples(2, 7)):
        found, expected = (torch.autograd.grad(f(*given), given[0])[0] for f in (made, divergence))
        torch.testing.assert_close(found, expected)
    student, teacher, labels = examples(3, 4)
    with pytest.raises(BindError, match="dimension 0 of 'labels' is 2"):
        made(student, teacher, labels.reshape(2, 6))


RUNNING: dict[str, Callable[[torch.Tensor], Any]] = {
    "cummax": lambda x: torch.cummax(x, 1),
    "cummin, first dimension": lambda x: torch.cummin(x, 0),
    "sort": lambda x: torch.sort(x, dim=-1, stable=True),
    "sort, descending": lambda x: torch.sort(x, dim=0, descending=True, stable=True),
    "argsort": lambda x: torch.argsort(x, dim=1, stable=True),
    "median": lambda x: torch.sort(x, 1).values[:, x.shape[1] // 2],
}


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.slow(but=["cummax", "argsort"])
def test_running_extremes_and_sorted_rows_are_those_of_torch(name: str) -> None:
    """Of equal numbers, NaN, infinities, integers, one position, and another length than the example's."""
    torch.manual_seed(0)
    numbers = torch.randn(4, 7)
    numbers[1, 3], numbers[2, :2] = math.nan, -math.inf
    alike = torch.randint(0, 3, (4, 9)).float()
    run = RUNNING[name]
    for first, others in (
        (numbers, (alike, torch.full((2, 5), math.inf), numbers[:, ::2])),
        (torch.randint(-2, 3, (4, 6)), ()),
        (torch.randn(1, 1), ()),
    ):
        program = eq.from_torch(run, first, native="off")
        for x in (first, *others):
            found, expected = map(pytree.tree_leaves, (program(x), run(x)))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_truth_values_are_padded() -> None:
    x = torch.randn(3, 4)
    program = eq.from_torch(lambda x: torch.nn.functional.pad(x > 0, (1, 2), value=True), x, native="off")
    assert torch.equal(program(x), torch.nn.functional.pad(x > 0, (1, 2), value=True))
