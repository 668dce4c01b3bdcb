"""Operators of torch whose arguments are unusual, as programs: the reference of the text beside torch's own, and kernels of some."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import eqfuse as eq
from bench.kernelbench_report import Problem, explore, made
from bench.opinfo_report import SAMPLES, Reference, batches, verdict
from bench.report import Options


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def n(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


TRUTHS = r(3, 4) > 0
WITH_NAN = torch.where(r(4, 5) > 1, torch.nan, r(4, 5))
SORTED = r(6).sort().values
INDEX = n(0, 3, 2, 4)


def diagonals(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().fill_diagonal_(2)
    y.diagonal(1).mul_(3)
    y.diagonal(-2)[:] = x[0, :3]
    return y


def bags(index: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """Of which the last has nothing but what is left out."""
    padded = torch.cat([index, torch.full((1, index.shape[1]), 2)])
    modes = ("sum", "mean", "max")
    return [
        F.embedding_bag(padded, rows, mode=mode, padding_idx=given) for mode in modes for given in (None, 2)
    ]


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "round to 2 digits": (lambda x: torch.round(x, decimals=2), (r(3, 4),)),
    "round to hundreds": (lambda x: torch.round(1000 * x, decimals=-2), (r(3, 4),)),
    "hardtanh of integers": (lambda x: F.hardtanh(x, -1.5, 2.5), (n(-5, 5, 3, 4),)),
    "argmax of one": (lambda x: (x.argmax(1), x.argmin(1, keepdim=True)), (r(3, 1),)),
    "argmax of a number": (lambda x: (x.argmax(), x.argmax(0, keepdim=True)), (r(),)),
    "max of a number": (lambda x: tuple(x.max(0)), (r(),)),
    "softmax of a number": (lambda x: (x.softmax(0), x.log_softmax(-1)), (r(),)),
    "variance of one number": (lambda x: (x.var(1), x.std(1, correction=0)), (r(3, 1),)),
    "variance with a large correction": (lambda x: x.var(1, correction=7), (r(3, 4),)),
    "sum of truths": (lambda p, q: (p + q, torch.add(p, q, alpha=False), p >= q, p.clamp(min=q)), (TRUTHS, ~TRUTHS)),
    "masked_fill of truths": (lambda p, q: p.masked_fill(q, 10), (TRUTHS, ~TRUTHS)),
    "logical_xor": (torch.logical_xor, (n(-1, 2, 3, 4), n(-1, 2, 3, 4))),
    "infinite truths": (torch.isinf, (TRUTHS,)),
    "averages of other layouts": (
        lambda x, y: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool1d(y.transpose(1, 2), 1), F.adaptive_avg_pool3d(x, (None, 1, 2))),
        (r(2, 5, 6, 4).contiguous(memory_format=torch.channels_last), r(2, 5, 6)),
    ),
    "average of integers": (lambda x: F.avg_pool1d(x, 3), (n(-9, 9, 2, 2, 9),)),
    "division towards 0": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (n(-9, 9, 3, 4), n(1, 5, 3, 4))),
    "arange from a fraction": (lambda x: x + torch.arange(0.5, 7.5, 2, dtype=torch.int64), (n(0, 3, 4),)),
    "integers one behind the other": (lambda a, b, c: torch.hstack([a, b, c]), (n(0, 9, 3), n(0, 9, 4), n(0, 9, 2))),
    "numbers of a matrix": (lambda x, i: torch.take(x, i), (n(0, 9, 3, 5), n(0, 15, 2, 4))),
    "numbers along a dimension": (lambda x, i: torch.take_along_dim(x, i, 0), (n(0, 9, 5, 5), n(0, 5, 3, 5))),
    "extremes of truths": (lambda p, q: (p.amax(1), *p.min(0), torch.maximum(p, q), p.sign()), (TRUTHS, ~TRUTHS)),
    "steps of integers": (lambda x: (x.floor(), x.ceil(), x.trunc(), x.round()), (n(-9, 9, 3, 4),)),
    "convolution of integers": (F.conv1d, (n(-9, 9, 1, 2, 7), n(-9, 9, 3, 2, 3))),
    "narrower integers": (lambda x: (x.int() * 2, (x > 0).int()), (n(-9, 9, 3, 4),)),
    "blocks of truths": (torch.block_diag, (TRUTHS, TRUTHS[:2])),
    "positions of the greatest, undone": (
        lambda x, i: F.max_unpool3d(x, i, 3, 2, output_size=(1, 2, 3, 6, 5)), (r(1, 2, 1, 3, 2), n(0, 90, 1, 2, 1, 3, 2))
    ),
    "empty results": (lambda x: (x[:, 2:2], x + 1, x.roll(1)[:0]), (r(3, 4),)),
    "numbers picked of one": (lambda x, i: (x.gather(0, i), x.index_select(0, i)), (r(), n(0, 1, 1))),
    "fmax": (lambda x, y: (torch.fmax(x, y), torch.fmin(y, x)), (WITH_NAN, WITH_NAN.flip(0))),
    "hyperbolic": (lambda x: (x.sinh(), x.cosh(), x.tan(), x.asinh(), (x.abs() + 1).acosh(), x.tanh().atanh()), (r(3, 4),)),
    "angles": (lambda x, y: (torch.atan2(y, x), x.atan(), x.tanh().asin(), y.tanh().acos(), x.asin()), (r(3, 4), r(4))),
    "angles of integers": (lambda x, y: (torch.atan2(x, y), x.atan()), (n(-2, 3, 5, 6), n(-2, 3, 5, 6))),
    "signs of others": (lambda x, y: (torch.copysign(x, y), torch.copysign(x, -2.0)), (r(7), torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40, -1e-40, -3.0]))),
    "distances of pairs": (lambda x: (torch.pdist(x), F.pdist(x, 1.0), torch.pdist(x, math.inf)), (r(5, 4),)),
    "numbers where a mask holds": (lambda x, m, s: (x.masked_scatter(m, s), torch.masked_scatter(s, s > 0, x)), (r(3, 4), r(4) > 0, r(3, 4))),
    "numbers at positions of the whole": (
        lambda x, i, s: (x.put(i, s), x.put(i[0], s[0], accumulate=True)),
        (r(3, 4), torch.tensor([[3, -1], [5, 0]]), r(2, 2)),
    ),
    "sums of products of integers": (
        lambda x, a, b: (torch.addbmm(x, a, b, beta=0.6, alpha=2.7), torch.addbmm(x, a, b, beta=2)),
        (n(-9, 9, 4, 5), n(-4, 5, 3, 4, 6), n(-4, 5, 3, 6, 5)),
    ),
    "sums of products": (lambda x, a, b: (torch.addbmm(x, a, b, beta=0.5, alpha=2), x.addbmm(a, b, beta=0)), (r(5), r(3, 4, 6), r(3, 6, 5))),
    "asinh far away": (lambda x: x.asinh(), (torch.tensor([1e-12, -1e12, 3e25, 0.0]),)),
    "sums at positions": (lambda x, i, s: x.scatter_reduce(0, i, s, "sum"), (r(3, 4), INDEX, r(2, 4))),
    "products at positions": (lambda x, i, s: x.scatter_reduce(0, i, s, "prod"), (r(3, 4), INDEX, r(2, 4))),
    "means at positions": (lambda x, i, s: x.scatter_reduce(0, i, s, "mean"), (r(3, 4), INDEX, r(2, 4))),
    "means of integers at positions": (
        lambda x, i, s: x.scatter_reduce(0, i, s, "mean", include_self=False),
        (n(-9, 9, 3, 4), INDEX, n(-9, 9, 2, 4)),
    ),
    "greatest at positions": (lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), (r(3, 4), INDEX, r(2, 4))),
    "least at positions alone": (
        lambda x, i, s: x.scatter_reduce(1, i, s, "amin", include_self=False),
        (n(-9, 9, 3, 4), INDEX, n(-9, 9, 2, 4)),
    ),
    "rows at positions": (lambda x, i, s: x.index_reduce(0, i, s, "amax"), (r(3, 4), n(0, 3, 5), r(5, 4))),
    "scatter, multiplied": (lambda x, i, s: x.scatter(0, i, s, reduce="multiply"), (r(3, 4), INDEX, r(2, 4))),
    "scatter of fewer than there are": (lambda x, i, s: x.scatter(0, i, s), (r(5, 6), n(0, 5, 2, 3), r(3, 4))),
    "scatter of a number": (lambda x, i, s: (x.scatter(0, i, s), x.scatter_add(0, i, s)), (r(), n(0, 1), r())),
    "bucketize": (lambda x, b: (torch.bucketize(x, b), torch.bucketize(x, b, right=True)), (WITH_NAN, SORTED)),
    "searchsorted": (lambda x, b: torch.searchsorted(b, x, side="right"), (r(2, 3), r(2, 6).sort(1).values)),
    "median": (lambda x: (*x.median(1), *x.nanmedian(1), x.median()), (WITH_NAN,)),
    "median of integers": (lambda x: x.median(0).values, (n(0, 9, 6, 3),)),
    "kthvalue": (lambda x: tuple(x.kthvalue(2, 0)), (r(5, 3),)),
    "histc": (lambda x: torch.histc(x, 4, -1, 1), (torch.tensor([-1.0, 1.0, 0.2, -3.0, 0.9, -0.5]),)),
    "histc of what there is": (lambda x: (torch.histc(x, 4), torch.histc(x[:1], 3), torch.histc(x, 3, 2, 2)), (r(9),)),
    "quantiles": (lambda x: (x.quantile(0.3, 1), x.quantile(1.0, 0, keepdim=True), x.quantile(0.5, keepdim=True)), (WITH_NAN,)),
    "diagonals that are written": (diagonals, (r(5, 4),)),
    "other diagonals": (lambda x, y: torch.diagonal_scatter(x, y, 1, 2, 0), (r(4, 3, 5), r(3, 3))),
    "bags of rows": (bags, (n(0, 4, 3, 5), r(4, 2))),
    "bags of weighted rows": (
        lambda i, x, w: F.embedding_bag(i, x, per_sample_weights=w, mode="sum"), (n(0, 4, 3, 5), r(4, 2), r(3, 5))
    ),
    "likelihoods": (
        lambda x, y, v: (F.gaussian_nll_loss(x, y, v, full=True), F.gaussian_nll_loss(x, y, v[:, 0], reduction="none")),
        (r(3, 4), r(4, 3).T, r(3, 4).square()),
    ),
    "slopes in the middle": (lambda x: F.rrelu(x, 0.1, 0.5), (r(3, 4),)),
    "ldexp": (torch.ldexp, (r(4), n(-3, 4, 4))),
    "cdist": (lambda x, y: (torch.cdist(x, y), torch.cdist(x, y, p=1), torch.cdist(x, y, p=math.inf)), (r(2, 3, 4), r(2, 5, 4))),
    "topk of a number": (lambda x: tuple(x.topk(1)), (r(),)),
    "nearest": (lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, (3, 7))), (r(1, 2, 4, 5),)),
    "nearest to the middle": (lambda x: F.interpolate(x, 7, mode="nearest-exact"), (r(1, 2, 4),)),
    "bilinear": (lambda x: F.interpolate(x, (7, 3), mode="bilinear"), (r(1, 2, 4, 5),)),
    "bilinear, corners": (lambda x: F.interpolate(x, (7, 1), mode="bilinear", align_corners=True), (r(1, 2, 4, 5),)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (r(1, 2, 4, 5),)),
    "half of an odd size": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"), (r(1, 2, 7, 9),)),
    "one and a half": (lambda x: F.interpolate(x, scale_factor=1.5), (r(1, 2, 5),)),
    "trilinear": (lambda x: F.interpolate(x, 3, mode="trilinear"), (r(1, 1, 2, 4, 5),)),
    "bilinear product": (F.bilinear, (r(3, 4), r(3, 5), r(2, 4, 5), r(2))),
    "addmv": (torch.addmv, (r(3), r(3, 4), r(4))),
}  # fmt: skip


def check(found: Any, wanted: Any) -> None:
    """Compares numbers and shapes, in float64."""
    found, wanted = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_text_means_what_torch_computes(name: str) -> None:
    fn, given = CASES[name]
    program = eq.from_torch(fn, *given)
    program._kernel.append(Reference(program.source))  # type: ignore[arg-type]
    check(program(*given), fn(*given))


RUN = (
    "round to 2 digits", "argmax of one", "empty results", "integers one behind the other", "numbers of a matrix",
    "numbers along a dimension", "extremes of truths", "steps of integers", "convolution of integers", "narrower integers",
    "blocks of truths", "positions of the greatest, undone", "means at positions", "least at positions alone",
    "scatter of fewer than there are", "diagonals that are written", "bucketize", "median", "histc", "bilinear",
)  # fmt: skip


@pytest.mark.slow(but=["argmax of one", "diagonals that are written", "means at positions", "empty results"])
@pytest.mark.parametrize("name", RUN)
def test_kernels_compute_it(name: str) -> None:
    fn, given = CASES[name]
    found = eq.from_torch(fn, *given, native="off")(*given)
    check(found, fn(*given))
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(fn(*given)), strict=True):
        assert one.dtype == other.dtype


def test_classes_that_are_left_out_may_be_no_position() -> None:
    x, target = r(5, 7).log_softmax(1), torch.tensor([0, -100, 3, 6, -100])
    program = eq.from_torch(F.nll_loss, x, target, native="off")
    check(program(x, target), F.nll_loss(x, target))


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(eq.EqfuseError, match="complex numbers"):
        eq.from_torch(lambda x: x.to(torch.complex64), n(0, 3, 4))


def test_scales_that_round_are_refused() -> None:
    with pytest.raises(eq.EqfuseError, match="a scale of 1.7"):
        eq.from_torch(lambda x: F.interpolate(x, scale_factor=1.7), r(1, 2, 10))


def test_samples_are_judged() -> None:
    """The verdicts of `bench opinfo`."""
    given = SimpleNamespace(input=r(3, 4), args=(1,), kwargs={})
    ops = {
        "right": torch.cumsum,
        "refused": lambda x, d: torch.linalg.qr(x)[d],
        "wrong": lambda x, d: x.sum(d) if torch.compiler.is_exporting() else x.sum(d) + 1,
        "": lambda x, d: x.view(-1, d + 4),
    }
    for wanted, fn in ops.items():
        assert verdict(SimpleNamespace(op=fn), given, native=False)[0] == wanted


PROBLEM = """
import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        WRONG
        return self.norm(x).sum(1)

rows, width = 4096, 512

def get_inputs():
    return [torch.rand(rows, width)]

def get_init_inputs():
    return [width]
"""


def test_problems_are_judged(tmp_path: Path) -> None:
    """The rows of `bench kernelbench`, with buffers that a model changes."""
    texts = {
        "right": "pass",
        "refused": "x = x * torch.randint(3, (1,))",
        "wrong": "x = x if torch.compiler.is_exporting() else 2 * x",
    }
    for place, (wanted, text) in enumerate(texts.items()):
        file = tmp_path / f"{place}_{wanted}.py"
        file.write_text(PROBLEM.replace("WRONG", text))
        model, (x,) = made(file)
        assert x.shape == (32, model.norm.num_features) == (32, 16)
        rows = explore(Problem(file, native=False, compiles=wanted == "right"))
        assert [row["program"] for row in rows] == [wanted] * 2


def test_as_many_samples_as_are_asked_for() -> None:
    """Also where that is what other reports have by default."""
    asked = {n: next(batches(Options(only="sin", examples=n))).samples for n in (None, 1, 500)}
    assert asked == {None: SAMPLES, 1: 1, 500: 500}
