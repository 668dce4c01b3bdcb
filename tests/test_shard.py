"""`eq.shard` on simulated ranks: every program by every strategy that it has, on even, ragged and empty shards,
gives what the kernel gives on whole tensors; numbers that are none, dtypes, meshes of two dimensions, gradients;
what is printed; what is refused, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Golden
from shard_programs import (
    ATTENTION,
    CASES,
    CAUSAL,
    EXTENTS,
    RANKS,
    Case,
    affine,
    by,
    cuts,
    kernel,
    outputs,
    ragged,
    same,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import eqfuse as eq
from eqfuse.differentiate.gradient import cotangents, real_outputs
from eqfuse.operator.content import SHARDED, kernel_of, quoted
from eqfuse.sharding.axes import even
from eqfuse.sharding.exchange import TorchArrays
from eqfuse.sharding.sharded import Sharded
from eqfuse.sharding.strategies import STRATEGIES


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with affine():
        yield
    shared.cache_clear()


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Links are those of the table, whatever was measured on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@cache
def shared(source: str, axes: tuple[str, ...], out: tuple[str, ...] = (), ranks: int = 4) -> Sharded:
    """Verified once, and compiled once for each dtype."""
    return eq.shard(kernel(source), ranks, dict.fromkeys(axes, RANKS), out=dict.fromkeys(out, RANKS))


def of_case(name: str) -> Sharded:
    case = CASES[name]
    return shared(case.source, case.axes, case.out)


def everywhere(
    source: str, axes: str, values: Mapping[str, Any], exact: float = 1e-12, out: str = "", ranks: int = 4
) -> None:
    """Asserts that every strategy gives what the kernel gives: on even shards, ragged ones, and where one rank has
    all."""
    wanted = kernel(source)(**values)
    sharded = shared(source, tuple(axes), tuple(out), ranks)
    for plan in sharded.strategies:
        alone = by(sharded, plan)
        same(alone(**values), wanted, plan.strategy, exact)
        lengths = cuts(alone, values, 1)
        for uneven in (lengths, {axis: (0,) * (ranks - 1) + (sum(each),) for axis, each in lengths.items()}):
            same(alone.simulate(uneven, **values), wanted, f"{plan.strategy} {uneven}", exact)


# Programs -----------------------------------------------------------------------------------------


FAST = (
    *(
        "[attention]",
        "rows of outputs",
        "causal attention",
        "cross-entropy",
        "embedding",
        "argmax]",
        "top-k",
        "moments",
    ),
    *(
        "routing",
        "matrix product",
        "RMSNorm",
        "prefix sums",
        "linear recurrence",
        "in order",
        "counts",
        "alone",
        "before",
    ),
)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=FAST)
def test_a_program_is_the_same_on_one_to_eight_ranks(name: str) -> None:
    case = CASES[name]
    tensors, sharded = case.tensors(), of_case(name)
    assert {plan.strategy for plan in sharded.strategies} == set(case.strategies)
    wanted = kernel(case.source)(**tensors)
    for number, plan in enumerate(sharded.strategies):
        for ranks in range(1, 9):
            alone = by(sharded, plan, ranks)
            same(alone(**tensors), wanted, f"{plan.strategy}, {ranks} ranks")
            lengths = cuts(alone, tensors, 10 * ranks + number)
            same(alone.simulate(lengths, **tensors), wanted, f"{plan.strategy}, {lengths}")
        certificate = by(sharded, plan).certificate
        assert certificate.ok and not certificate.counterexample, certificate


def test_every_strategy_is_tried() -> None:
    assert {name for case in CASES.values() for name in case.strategies} == set(STRATEGIES)
    assert len(CASES) >= 20
    of_gradients = {part for name in DIFFERENTIABLE for part in RAGGED[name].split(" + ")}
    assert of_gradients == set(STRATEGIES) - {"all_to_all"}  # gradients of outputs in rows join these first


def test_shards_are_cut_as_they_are_said_to_be() -> None:
    assert even(13, 4) == (4, 4, 4, 1) and even(2, 4) == (1, 1, 0, 0) and even(0, 2) == (0, 0)
    for ranks in range(1, 9):
        for seed in range(5):
            found = ragged(13, ranks, seed)
            assert len(found) == ranks and sum(found) == 13 and (ranks < 3 or 0 in found)


@pytest.mark.parametrize(
    "source",
    ["y[i] = sum[j](x[i,j])\nm[i] = max[j](x[i,j])\nreturn y, m", "y[i] = logsumexp[j](x[i,j])\nreturn y"],
)
@pytest.mark.parametrize("shape", [(3, 0), (0, 5)])
def test_an_axis_of_no_positions(source: str, shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.float64)
    sharded = eq.shard(kernel(source), 3, {"j": RANKS})
    for plan in sharded.strategies:
        same(by(sharded, plan)(x=x), kernel(source)(x=x), plan.strategy)


def test_numbers_and_arrays_are_taken_and_returned_as_by_the_kernel() -> None:
    k = kernel("y[i] = sum[j](x[i,j] * scale)\nz = sum[i](y[i])\nreturn y, z")
    x = numbers(6, 13).numpy()
    sharded = eq.shard(k, 3, {"j": RANKS})
    for plan in sharded.strategies:
        found, wanted = by(sharded, plan)(x=x, scale=0.5), k(x=x, scale=0.5)
        for got, want in zip(found, wanted, strict=True):
            assert type(got) is type(want) and isinstance(got, np.ndarray)
            np.testing.assert_allclose(got, want, rtol=1e-13)
        same(by(sharded, plan)(x=torch.from_numpy(x), scale=2), k(x=torch.from_numpy(x), scale=2))


@pytest.mark.slow
def test_heads_and_batches_are_whole() -> None:
    source = """
        s[b,h,i,j] = where(j <= i + N(j) - N(i), sum[d](Q[b,h,i,d] * K[b,h//2,j,d]) * scale, -inf)
        p[b,h,i,j] = exp(s[b,h,i,j] - max[j](s[b,h,i,j]))
        O[b,h,i,e] = sum[j](p[b,h,i,j] * V[b,h//2,j,e]) / sum[j](p[b,h,i,j])
        return O
        """
    Q, K, V = numbers(2, 4, 3, 4), numbers(2, 2, 9, 4, seed=1), numbers(2, 2, 9, 3, seed=2)
    for axes in ("j", "ij"):
        everywhere(source, axes, {"Q": Q, "K": K, "V": V, "scale": 0.5})
    everywhere(source, "b", {"Q": Q, "K": K, "V": V, "scale": 0.5}, ranks=2)
    everywhere(source, "j", {"Q": Q, "K": K, "V": V, "scale": 0.5}, out="i")


# Numbers ------------------------------------------------------------------------------------------

MASKED = ATTENTION.replace("sum[d](Q[i,d] * K[j,d])\n", "where(M[i,j] > 0, sum[d](Q[i,d] * K[j,d]), LOW)\n")


@pytest.mark.parametrize("low", ["-inf", "-1e30"])
@pytest.mark.parametrize("out", ["", "i"])
def test_masked_rows_and_shards(low: str, out: str) -> None:
    """Of row 0 the first shards are masked, of row 2 all, of row 3 all but the last position."""
    mask = torch.ones(6, 13)
    mask[0, :8], mask[2], mask[3, :12] = 0, 0, 0
    values: dict[str, Any] = {"Q": numbers(6, 4), "K": numbers(13, 4, seed=1), "M": mask}
    values["V"] = numbers(13, 3, seed=2)
    everywhere(MASKED.replace("LOW", low), "j", values, out=out)
    assert outputs(kernel(MASKED.replace("LOW", low))(**values))[0][2].isnan().any() == (low == "-inf")


@pytest.mark.parametrize("axes", ["j", "ij"])
@pytest.mark.slow(but=["ij"])
def test_the_first_rank_sees_no_position(axes: str) -> None:
    """Queries of the first ranks come before all keys but the first few, which later ranks have."""
    late = CAUSAL.replace("j <= i + N(j) - N(i)", "j >= i + 7")
    everywhere(late, axes, {"Q": numbers(6, 4), "K": numbers(13, 4, seed=1), "V": numbers(13, 3, seed=2)})


SPECIAL: Mapping[str, str] = {
    "extremes": "y[i] = max[j](x[i,j])\nz[i] = min[j](x[i,j])\nreturn y, z",
    "positions": "a[i] = argmax[j](x[i,j])\nb[i] = argmin[j](x[i,j])\nreturn a, b",
    "top-k": CASES["top-k"].source,
    "softmax": CASES["softmax"].source,
    "log-sum-exp": "y[i] = logsumexp[j](x[i,j])\nreturn y",
    "product": "y[i] = prod[j](x[i,j])\nreturn y",
    "running maximum": "l: axis[j]\ny[i,l] = max[j <= l](x[i,j])\nreturn y",
    "running sum": "l: axis[j]\ny[i,l] = sum[j <= l](x[i,j])\nreturn y",
    "running argmax": "l: axis[j]\ny[i,l] = argmax[j <= l](x[i,j])\nreturn y",
}


@pytest.mark.parametrize("number", [nan, inf, -inf])
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.slow(but=["extremes", "positions", "top-k", "softmax", "log-sum-exp", "product", "maximum"])
def test_numbers_that_are_none(name: str, number: float) -> None:
    """One on one rank, those of the first ranks, all, and none."""
    x = numbers(4, 13)
    x[1, 7], x[2, :6], x[3] = number, number, number
    everywhere(SPECIAL[name], "j", {"x": x})


def test_ties_have_the_first_position() -> None:
    x = torch.tensor([[0.0, 2, 1, 2, 2, 0, 2]], dtype=torch.float64)
    source = "k: axis[3]\na[i] = argmax[j](x[i,j])\nv[i,k], p[i,k] = topk[j,k](x[i,j])\nreturn a, p"
    everywhere(source, "j", {"x": x})
    a, p = eq.shard(kernel(source), 4, {"j": RANKS})(x=x)
    assert a.tolist() == [1] and p.tolist() == [[1, 3, 4]]


INTEGERS = torch.randint(-(2**61), 2**61, (4, 13), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "source, values",
    [
        ("x: i64[i,j]\ny: i64[i]\ny[i] = sum[j](x[i,j])\nreturn y", {"x": INTEGERS // 13}),
        ("x: i64[i,j]\ny[i] = max[j](x[i,j])\nz[i] = min[j](x[i,j])\nreturn y, z", {"x": INTEGERS}),
        (
            "x: i64[i,j]\nM: i64[j]\ny: i64[i]\ny[i] = max[j](where(M[j] > 0, x[i,j], -4611686018427387904))\nreturn y",
            {"x": INTEGERS, "M": torch.arange(13) // 12},
        ),
        ("x: i64[i,j]\ny[i] = prod[j](x[i,j])\nreturn y", {"x": INTEGERS % 7 + 1}),
        ("x: i64[i,j]\nl: axis[j]\ny[i,l] = sum[j <= l](x[i,j])\nreturn y", {"x": INTEGERS // 13}),
        ("x: bool[i,j]\ny[i] = any[j](x[i,j])\nreturn y", {"x": INTEGERS % 5 == 0}),
        ("x: i64[i,j]\ny[i] = sum[j](where(x[i,j] > 0, 1, 0)) > 6\nreturn y", {"x": INTEGERS}),
    ],
)
def test_integers_are_exact(source: str, values: Mapping[str, Any]) -> None:
    everywhere(source, "j", values, exact=0)
    assert not outputs(kernel(source)(**values))[0].is_floating_point()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["attention", "RMSNorm", "cross-entropy over the vocabulary", "prefix sums"])
@pytest.mark.slow(but=["attention", "RMSNorm"])
def test_dtypes_are_those_of_the_kernel(name: str, dtype: torch.dtype) -> None:
    """As near to float64 as the kernel is, but for a rounding more: what ranks exchange is not rounded to halves."""
    case = CASES[name]
    tensors = case.tensors(dtype)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    (exact,) = outputs(kernel(case.source)(**wide))
    (wanted,) = outputs(kernel(case.source)(**tensors))
    sharded = of_case(name)
    unit = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).eps * 2**-3
    for plan in sharded.strategies:
        alone = by(sharded, plan)
        (found,) = outputs(alone.simulate(cuts(alone, tensors, 3), **tensors))
        assert found.dtype == wanted.dtype == dtype
        assert (
            (found - exact).abs() <= (wanted - exact).abs() + unit * (1 if dtype.itemsize == 2 else 8)
        ).all()


@pytest.mark.parametrize("dtype", ["f16", "f64"])
def test_declared_outputs_have_their_dtype(dtype: str) -> None:
    source = f"y: {dtype}[i]\ny[i] = sum[j](x[i,j])\nreturn y"
    x = numbers(4, 13).float() * 100
    sharded = eq.shard(kernel(source), 4, {"j": RANKS})
    for plan in sharded.strategies:
        found = by(sharded, plan)(x=x)
        assert found.dtype == kernel(source)(x=x).dtype
        torch.testing.assert_close(
            found, kernel(source)(x=x), rtol=2e-3 if dtype == "f16" else 1e-5, atol=0.1
        )
    everywhere("y[i] = sum[j](x[i,j] * w[j])\nreturn y", "j", {"x": x.half(), "w": numbers(13)}, exact=1e-6)


# Meshes and outputs -------------------------------------------------------------------------------

TWO: Mapping[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "queries and keys": (ATTENTION, {"i": "dp", "j": "tp"}, {}),
    "keys and features": (ATTENTION, {"j": "dp", "d": "tp"}, {}),
    "context and outputs": (ATTENTION, {"i": "dp", "j": "dp", "e": "tp"}, {}),
    "rows of outputs over the other": (ATTENTION, {"j": "dp"}, {"i": "tp"}),
    "two axes of outputs": (ATTENTION, {"j": "dp"}, {"i": "dp", "e": "tp"}),
    "norm": (CASES["LayerNorm"].source, {"i": "dp", "j": "tp"}, {}),
    "both reduced": ("y = sum[i,j](sq(x[i,j]))\nreturn y", {"i": "dp", "j": "tp"}, {}),
    "maximum of both": (
        "m = max[i,j](x[i,j])\ny = m + log(sum[i,j](exp(x[i,j] - m)))\nreturn y",
        {"i": "dp", "j": "tp"},
        {},
    ),
    "one after the other": (
        "m[i] = mean[j](x[i,j])\nv = mean[i](sq(m[i]))\nreturn v",
        {"i": "dp", "j": "tp"},
        {},
    ),
    "two layers": (
        "z[t,k] = relu(sum[d](x[t,d] * U[d,k]))\ny[t,e] = sum[k](z[t,k] * W[k,e])\nreturn y",
        {"t": "dp", "k": "tp"},
        {},
    ),
    "rows and vocabulary": (
        CASES["cross-entropy over the vocabulary"].source,
        {"i": "dp", "v": "tp"},
        {},
    ),
    "tokens and vocabulary": (CASES["embedding over the vocabulary"].source, {"i": "dp", "v": "tp"}, {}),
}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.slow(but=["queries and keys", "both reduced", "tokens and vocabulary"])
def test_two_dimensions_of_a_mesh(name: str) -> None:
    source, axes, out = TWO[name]
    integers = {"label": 9, "ids": 9}
    tensors = Case(source, (), (), below=integers).tensors()
    wanted = kernel(source)(**tensors)
    for mesh in ({"dp": 2, "tp": 2}, {"tp": 3, "dp": 2}, {"dp": 1, "tp": 3}):
        sharded = eq.shard(kernel(source), mesh, axes, out=out)
        for plan in sharded.strategies if mesh["dp"] == mesh["tp"] else sharded.strategies[:1]:
            alone = by(sharded, plan)
            same(alone(**tensors), wanted, f"{mesh} {plan.strategy}")
            lengths = cuts(alone, tensors, 2)
            same(alone.simulate(lengths, **tensors), wanted, f"{mesh} {plan.strategy} {lengths}")
    assert sharded.certificate.ok


def test_a_dimension_without_axes_has_copies() -> None:
    sharded = eq.shard(kernel(ATTENTION), {"dp": 3, "tp": 2}, {"j": "tp"})
    tensors = CASES["attention"].tensors()
    same(sharded(**tensors), kernel(ATTENTION)(**tensors))
    assert "3 dp" not in sharded.why() and "2 tp" in sharded.why()


@pytest.mark.parametrize("axes", ["ij", "j"])
@pytest.mark.slow(but=["ij"])
def test_a_mask_of_two_sharded_axes(axes: str) -> None:
    """A rank has it along one of both."""
    mask = (numbers(6, 13, seed=3) > 0).double()
    mask[:, 0] = 1
    values = {"Q": numbers(6, 4), "K": numbers(13, 4, seed=1), "V": numbers(13, 3, seed=2), "M": mask}
    everywhere(MASKED.replace("LOW", "-inf"), axes, values)


@pytest.mark.parametrize("name", ["causal attention, both axes", "LayerNorm", "prefix sums", "batch norm"])
@pytest.mark.slow(but=["causal", "prefix"])
def test_two_pieces_on_each_rank(name: str) -> None:
    """Pieces r and 2 n - 1 - r of 2 n: where positions matter, what ranks pass on is refused, else all is as it was."""
    case = CASES[name]
    sharded = case.shard(layout="zigzag")
    assert sharded.layout == "zigzag" and sharded.strategies
    for plan in sharded.strategies:
        for ranks in (1, 2, 3, 5):
            found = by(sharded, plan, ranks)(**case.tensors())
            same(found, kernel(case.source)(**case.tensors()), f"{plan.strategy}, {ranks} ranks")
        assert by(sharded, plan).certificate.ok
    if name.startswith("causal"):
        assert sharded.refused["ring"] == "what ranks pass on is one piece of an axis"
    if name == "LayerNorm":
        assert {plan.strategy for plan in sharded.strategies} == set(case.strategies)


# Choice, and what is printed ----------------------------------------------------------------------


def test_the_strategy_is_the_cheapest_for_the_sizes_of_a_call(unmeasured: None) -> None:
    """Few queries of a long context move states, many queries of a short one operands."""
    sharded = eq.shard(kernel(ATTENTION), 8, {"i": RANKS, "j": RANKS}, link="infiniband")
    for sizes, wanted in (
        ({"i": 8, "j": 1 << 17, "d": 64, "e": 64}, "gather_rows"),
        ({"i": 1 << 13, "j": 8, "d": 4, "e": 4}, "gather_operands"),
    ):
        Q, K, V = (torch.zeros(sizes[a], sizes[b]) for a, b in ("id", "jd", "je"))
        sharded(Q=Q, K=K, V=V)
        assert sharded.plan is not None
        assert sharded.why().splitlines()[3].split()[0] == sharded.plan.strategy == wanted
        assert sharded.explain().splitlines()[0] == wanted


@pytest.mark.parametrize("name", ["attention", "causal attention, both axes", "prefix sums"])
def test_a_strategy_is_asked_for_by_name(name: str) -> None:
    case = CASES[name]
    for strategy in case.strategies:
        sharded = case.shard(3, strategy=strategy)
        assert [plan.strategy for plan in sharded.strategies] == [strategy]
        same(sharded(**case.tensors()), kernel(case.source)(**case.tensors()))
        assert sharded.plan is sharded.strategies[0]


@pytest.mark.parametrize(
    "file, name, strategy",
    [
        ("shard_attention", "attention", "all_reduce"),
        ("shard_attention_tree", "attention", "tree"),
        ("shard_causal_ring", "causal attention, both axes", "ring"),
        ("shard_prefix_carry", "prefix sums", "carry"),
    ],
)
def test_steps_as_text(file: str, name: str, strategy: str, golden: Golden) -> None:
    golden(file, CASES[name].shard().explain(strategy))


def rows_of(table: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()[3:] if " not: " not in line]


def test_the_table_of_strategies(unmeasured: None) -> None:
    sharded = eq.shard(kernel(ATTENTION), 8, {"j": "cp"}, link="infiniband")
    table = sharded.why(i=1024, j=8192, d=128, e=128)
    first, sizes, head, *_ = table.splitlines()
    assert first.startswith("8 cp ranks, infiniband: 35 us a message, 45.5 GB/s")
    assert set(sizes.split()) == {"i=1024", "j=8192", "d=128", "e=128"}
    assert head.split() == ["strategy", "exchanges", "sent", "held", "exchanging", "computing"]
    rows = {name: rest for name, *rest in rows_of(table)}
    # Of each row its maximum, its sum and 128 numbers, four bytes each: from a rank to seven others.
    assert rows["all_gather"][:3] == ["1", "3.73 MB", "4.26 MB"]
    # Maxima, then sums: 2 (n - 1) / n of the state.
    assert rows["all_reduce"][:3] == ["2", "932 kB", "532 kB"]
    assert rows["tree"][:3] == ["1", "1.06 MB", "1.06 MB"]
    times = [sum(float(cell.split()[0]) for cell in row[-2:]) for row in rows_of(table)]
    assert times == sorted(times) and len(times) == 3


def test_the_table_is_of_the_ranks_and_the_link_and_of_the_last_call(unmeasured: None) -> None:
    def gathered(ranks: int, link: str) -> float:
        sharded = eq.shard(kernel(ATTENTION), ranks, {"j": "cp"}, link=link)
        rows = {name: rest for name, *rest in rows_of(sharded.why(i=4096, d=128, e=128))}
        return float(rows["all_gather"][3].split()[0])

    assert gathered(8, "nvlink") < gathered(8, "infiniband") < gathered(64, "infiniband")
    sharded = CASES["attention"].shard(link="gloo")
    assert "i=256" in sharded.why() and "gloo" in sharded.why()
    sharded(**CASES["attention"].tensors())
    assert "i=6" in sharded.why() and "j=13" in sharded.why()
    assert "i=6" in sharded.why(j=100) and "j=100" in sharded.why(j=100)


def test_the_table_says_which_strategies_there_are_not() -> None:
    table = CASES["argmax"].shard().why()
    assert "all_reduce                   not: no collective reduces by argmax" in table


def test_axes_that_are_as_long_have_one_size() -> None:
    table = CASES["prefix sums"].shard().why(j=77)
    assert "i=77" in table and "j=77" in table


# What is refused ----------------------------------------------------------------------------------

RECURRENCE = CASES["linear recurrence"].source
ROWS_ALONE = "y[i] = sum[j](x[i,j] * w[j])\nreturn y"

REFUSED: Mapping[str, tuple[str, Any, Any, dict[str, Any], str, str]] = {
    "no axes": (ROWS_ALONE, 2, {}, {}, "no axes are sharded", "map axes to dimensions"),
    "an axis": (ROWS_ALONE, 2, {"jj": "r"}, {}, "the program has no axis 'jj'", "did you mean 'j'?"),
    "an axis unlike": (ROWS_ALONE, 2, {"q": "r"}, {}, "the program has no axis 'q'", "its axes are i, j"),
    "a dimension": (
        ROWS_ALONE,
        {"context": 2, "tp": 2},
        {"j": "contxt"},
        {},
        "the mesh has no dimension 'contxt'",
        "did you mean 'context'?",
    ),
    "a strategy": (
        ROWS_ALONE,
        2,
        {"j": "r"},
        {"strategy": "all_reduc"},
        "strategy is 'all_reduc'",
        "did you mean 'all_reduce'?",
    ),
    "a strategy unlike": (ROWS_ALONE, 2, {"j": "r"}, {"strategy": "x"}, "strategy is 'x'", "one of auto, "),
    "a link": (ROWS_ALONE, 2, {"j": "r"}, {"link": "nvlnk"}, "link is 'nvlnk'", "did you mean 'nvlink'?"),
    "no ranks": (ROWS_ALONE, 0, {"j": "r"}, {}, "mesh is 0", "give a DeviceMesh"),
    "a truth value": (ROWS_ALONE, True, {"j": "r"}, {}, "mesh is True", "give a DeviceMesh"),
    "a fraction": (ROWS_ALONE, {"r": 2.5}, {"j": "r"}, {}, "mesh is {'r': 2.5}", "give a DeviceMesh"),
    "two names for one dimension": (
        ROWS_ALONE,
        2,
        {"i": "a", "j": "b"},
        {},
        "the ranks have one dimension, not 2",
        "give a DeviceMesh, or {name: ranks}",
    ),
    "sharded already": (
        ROWS_ALONE,
        2,
        {"j": "r"},
        {"out": {"j": "r"}},
        "'j' is sharded in tensors already",
        "leave it out of `out`",
    ),
    "in no output": (
        ROWS_ALONE,
        2,
        {"i": "r"},
        {"out": {"j": "r"}},
        "no output has the axis 'j'",
        "`out` has axes of outputs",
    ),
    "two axes of an output": (
        "y[i,j] = x[i,j] + 1\nreturn y",
        2,
        {"i": "r", "j": "r"},
        {},
        "'y' has two axes over 'r'",
        "shard one of them, or over another dimension",
    ),
    "one extent over two dimensions": (
        "i: axis[j]\ny[i] = sum[j <= i](x[j])\nreturn y",
        {"a": 2, "b": 2},
        {"i": "a", "j": "b"},
        {},
        "'j' is as long as an axis over 'a'",
        "shard both over one dimension",
    ),
    "operands out of order": (
        RECURRENCE,
        4,
        {"t": "r"},
        {"strategy": "ring"},
        "the program has no strategy 'ring': operands do not come in order, which linear_recurrence asks for",
        "it has carry",
    ),
    "a ring of rows that are whole": (
        ATTENTION,
        4,
        {"j": "r"},
        {"strategy": "ring"},
        "the program has no strategy 'ring': nothing in the program is exchanged so",
        "it has all_gather",
    ),
    "no collective reduces so": (
        CASES["argmax"].source,
        4,
        {"j": "r"},
        {"strategy": "all_reduce"},
        "the program has no strategy 'all_reduce': no collective reduces by argmax",
        "it has all_gather, tree",
    ),
    "no share": (
        CASES["top-k"].source,
        4,
        {"j": "r"},
        {"strategy": "all_gather"},
        "the program has no strategy 'all_gather': the merge of 'topk_v_j' is not share(a) op share(b)",
        "it has tree",
    ),
    "a layout": (
        ROWS_ALONE,
        2,
        {"j": "r"},
        {"layout": "zig"},
        "layout is 'zig'",
        "one of contiguous, zigzag",
    ),
    "a strategy that is no text": (
        ROWS_ALONE,
        2,
        {"j": "r"},
        {"strategy": 3},
        "strategy is 3",
        "one of auto",
    ),
    "a link that is no text": (ROWS_ALONE, 2, {"j": "r"}, {"link": 3}, "link is 3", "one of nvlink"),
    "axes that are no mapping": (ROWS_ALONE, 2, "j", {}, "axes are 'j'", "map axes to dimensions"),
    "a mesh of nothing": (ROWS_ALONE, {}, {"j": "r"}, {}, "mesh is {}", "give a DeviceMesh"),
    "no states move": (
        ROWS_ALONE,
        4,
        {"i": "r"},
        {"strategy": "tree"},
        "the program has no strategy 'tree'",
        "it has none",
    ),
}


def test_a_text_is_no_kernel() -> None:
    with pytest.raises(eq.EqfuseError, match="str is no kernel") as raised:
        eq.shard(ROWS_ALONE, 2, {"j": "r"})  # type: ignore[arg-type]
    assert raised.value.hint == "compile the program first: eq.compile(...)"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused(name: str) -> None:
    source, mesh, axes, options, message, hint = REFUSED[name]
    with pytest.raises(eq.EqfuseError) as raised:
        eq.shard(kernel(source), mesh, axes, **options)
    assert message in raised.value.message and raised.value.hint.startswith(hint)


CALLS: Mapping[str, tuple[Callable[[Sharded, torch.Tensor], Any], str]] = {
    "without names": (lambda s, x: s(x), "1 argument without a name"),
    "too few": (lambda s, x: s(x=x), "tensor 'w' is not given"),
    "too many": (lambda s, x: s(x=x, w=x[0], z=1), "the program has no input 'z'"),
    "shapes that differ": (
        lambda s, x: s(x=x, w=x[0, :5]),
        "this rank has 13 positions of 'j' in 'x', 5 in 'w'",
    ),
    "a rank too few": (lambda s, x: s.simulate({"j": (6, 7)}, x=x, w=x[0]), "lengths of 'j' are (6, 7)"),
    "positions too few": (
        lambda s, x: s.simulate({"j": (1, 2, 3)}, x=x, w=x[0]),
        "lengths of 'j' are (1, 2, 3)",
    ),
    "an axis that is whole": (
        lambda s, x: s.simulate({"i": (1, 2, 1)}, x=x, w=x[0]),
        "lengths of 'i' are (1, 2, 1)",
    ),
    "another strategy": (lambda s, x: s.explain("ring"), "strategy is 'ring'"),
    "another axis": (lambda s, x: s.why(jj=3), "the program has no axis 'jj'"),
    "lengths below 0": (
        lambda s, x: s.simulate({"j": (-1, 7, 7)}, x=x, w=x[0]),
        "lengths of 'j' are (-1, 7, 7)",
    ),
    "lengths that are no integers": (
        lambda s, x: s.simulate({"j": (1.0, 5.0, 7.0)}, x=x, w=x[0]),  # type: ignore[dict-item]
        "lengths of 'j' are (1.0, 5.0, 7.0)",
    ),
    "one length": (lambda s, x: s.simulate({"j": 3}, x=x, w=x[0]), "lengths of 'j' are 3"),  # type: ignore[dict-item]
    "a size that is none": (lambda s, x: s.why(j=0), "j is 0"),
    "a size that is no number": (lambda s, x: s.why(j="a"), "j is 'a'"),  # type: ignore[arg-type]
    "a dimension too few": (
        lambda s, x: s(x=x[0], w=x[0]),
        "'x' has 2 dimensions, the tensor given has shape (13,)",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_none_is_refused(name: str) -> None:
    call, message = CALLS[name]
    sharded = eq.shard(kernel(ROWS_ALONE), 3, {"j": RANKS})
    with pytest.raises(eq.EqfuseError) as raised:
        call(sharded, numbers(4, 13))
    assert message in str(raised.value)
    same(sharded(x=numbers(4, 13), w=numbers(13)), kernel(ROWS_ALONE)(x=numbers(4, 13), w=numbers(13)))


@pytest.mark.parametrize("position", [-1, 9])
@pytest.mark.parametrize(
    "name, tensor", [("embedding over the vocabulary", "ids"), ("cross-entropy over the vocabulary", "label")]
)
def test_positions_outside_are_nan(name: str, tensor: str, position: int) -> None:
    """The kernel refuses them; of several ranks none has them."""
    tensors = CASES[name].tensors()
    tensors[tensor][2] = position
    with pytest.raises(eq.EqfuseError):
        kernel(CASES[name].source)(**tensors)
    sharded = of_case(name)
    for plan in sharded.strategies:
        found = by(sharded, plan)(**tensors)
        assert found[2].isnan().all() and not found[:2].isnan().any() and not found[3:].isnan().any()


# Gradients ----------------------------------------------------------------------------------------

RAGGED = {
    "attention": "tree + gather_operands",
    "attention, rows of outputs": "all_gather",
    "attention, both axes": "ring + gather_operands",
    "causal attention, both axes": "gather_rows + gather_operands",
    "softmax": "all_reduce",
    "RMSNorm": "tree",
    "LayerNorm": "all_gather",
    "batch norm": "all_reduce",
    "cross-entropy over the vocabulary": "tree",
    "covariance": "gather_operands",
    "matrix product": "none",
    "prefix sums": "carry",
    "rows alone": "none",
}
"""By which strategy the gradient of a case runs on ragged shards; a sweep takes all that it has."""

DIFFERENTIABLE = [name for name, case in CASES.items() if case.wrt]


def of_whole(case: Case, weights: list[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Tensors of which some have gradients, and these, by the kernel on whole tensors."""
    tensors = case.tensors()
    for name in case.wrt:
        tensors[name].requires_grad_()
    made = outputs(kernel(case.source)(**tensors))
    weights += [numbers(*output.shape, seed=7) for output in made]
    found = torch.autograd.grad(made, [tensors[name] for name in case.wrt], weights)
    return tensors, list(found)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.slow(but=["softmax", "matrix product", "rows alone"])
def test_gradients_are_those_of_the_kernel(name: str, every: bool) -> None:
    """By autograd on even shards, and by strategies that the gradient has, on ragged ones."""
    case, weights = CASES[name], list[torch.Tensor]()
    tensors, wanted = of_whole(case, weights)
    sharded = of_case(name)
    made = outputs(sharded(**tensors))
    assert all(output.requires_grad for output in made)
    found = torch.autograd.grad(made, [tensors[name] for name in case.wrt], weights)
    same(found, tuple(wanted), "autograd")
    gradient = sharded.gradient(case.wrt)
    values = {name: tensor.detach() for name, tensor in tensors.items()}
    program = kernel(case.source).program
    named = cotangents(program)
    for output, weight in zip(program.outputs, weights, strict=True):
        values[named[output.name]] = weight
    read = {tensor.name for tensor in gradient.kernel.program.tensors}
    values = {name: tensor for name, tensor in values.items() if name in read}
    plans = [plan for plan in gradient.strategies if every or plan.strategy == RAGGED[name]]
    assert plans
    for number, plan in enumerate(plans):
        alone = by(gradient, plan)
        lengths = cuts(alone, values, number)
        same(alone.simulate(lengths, **values), tuple(wanted), f"{plan.strategy} {lengths}")
        assert alone.certificate.ok


def test_one_of_two_inputs_has_a_gradient() -> None:
    sharded = eq.shard(kernel(ROWS_ALONE), 3, {"j": RANKS})
    x, w = numbers(4, 13).requires_grad_(), numbers(13)
    sharded(x=x, w=w).sum().backward()
    torch.testing.assert_close(x.grad, w.expand(4, 13))
    with torch.no_grad():
        assert not sharded(x=x, w=w).requires_grad
    assert not sharded(x=x.detach(), w=w).requires_grad


def test_outputs_of_positions_have_no_gradient() -> None:
    source = "a[i] = argmax[j](x[i,j])\nm[i] = max[j](x[i,j])\nreturn a, m"
    x = numbers(4, 13).requires_grad_()
    a, m = eq.shard(kernel(source), 3, {"j": RANKS})(x=x)
    assert not a.requires_grad and m.requires_grad and real_outputs(kernel(source).program) == ("m",)
    (found,) = torch.autograd.grad(m.sum(), x)
    assert found.argmax(1).tolist() == a.tolist() and found.sum() == 4


def test_gradients_over_two_dimensions() -> None:
    source, axes, _ = TWO["two layers"]
    tensors = {name: tensor.requires_grad_() for name, tensor in Case(source, (), ()).tensors().items()}
    sharded = eq.shard(kernel(source), {"dp": 2, "tp": 2}, axes)
    weight = numbers(EXTENTS["t"], EXTENTS["e"], seed=7)
    wanted, found = (
        torch.autograd.grad(call(**tensors), list(tensors.values()), weight)
        for call in (kernel(source), sharded)
    )
    same(found, wanted)


def test_a_gradient_is_accumulated_and_taken_twice() -> None:
    x, w = numbers(4, 13).requires_grad_(), numbers(13)
    made = eq.shard(kernel(ROWS_ALONE), 3, {"j": RANKS})(x=x, w=w)
    made.sum().backward(retain_graph=True)
    made.sum().backward()
    torch.testing.assert_close(x.grad, 2 * w.expand(4, 13))


# What was verified --------------------------------------------------------------------------------


def test_a_certificate_is_of_the_strategy_of_the_last_call() -> None:
    case = CASES["attention"]
    sharded = case.shard(link="gloo")
    assert sharded.certificate.ok
    sharded(**case.tensors())
    text = str(sharded.certificate)
    assert sharded.explain().splitlines()[0] in text and "5 ranks" in text


def test_steps_that_are_wrong_are_refused_before_a_call() -> None:
    from bench.mutants_shard import MUTANTS, mutated

    case = CASES["attention"]
    sharded = case.shard()
    plan = next(plan for plan in sharded.strategies if plan.strategy == "all_reduce")
    mutant = next(each for each in MUTANTS if each.name == "share without its factor")
    wrong = by(sharded, next(iter(mutated(mutant, plan))))
    with pytest.raises(eq.EqfuseError, match="the sharded program was not verified, by all_reduce") as raised:
        wrong(**case.tensors())
    assert "please report it" in raised.value.hint
    unchecked = replace(wrong, kernel=replace(wrong.kernel, verify=False))
    unchecked._certificates.clear()
    found = unchecked(**case.tensors())
    assert not torch.allclose(found, kernel(case.source)(**case.tensors()))


def test_a_call_is_one_operator_under_transforms_of_torch() -> None:
    """One graph of torch.compile with its gradient, vmap, a directional derivative and shapes alone."""
    k = eq.compile("y[i] = sum[j](exp(x[i,j] - max[j](x[i,j])) * v[j])\nreturn y", verify=False)
    sharded = eq.shard(k, 3, {"j": "r"})
    x, v = torch.linspace(-2, 2, 35).reshape(5, 7).requires_grad_(), torch.linspace(0, 1, 7)

    def doubled(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * sharded(x=x, v=v)

    graph = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    made, wanted = graph(x, v), 2 * k(x=x, v=v)
    torch.testing.assert_close(made, wanted)
    for one, other in zip(
        torch.autograd.grad(made.sum(), x), torch.autograd.grad(wanted.sum(), x), strict=True
    ):
        torch.testing.assert_close(one, other)
    many = torch.stack([x.detach(), x.detach() + 1, -x.detach()])
    batched = torch.vmap(lambda x: sharded(x=x, v=v))(many)
    torch.testing.assert_close(batched, torch.stack([k(x=each, v=v) for each in many]))
    plain, along = x.detach(), torch.ones_like(x)
    _, found = torch.func.jvp(lambda x: sharded(x=x, v=v), (plain,), (along,))
    torch.testing.assert_close(found, torch.func.jvp(lambda x: k(x=x, v=v), (plain,), (along,))[1])
    with FakeTensorMode() as mode:
        assert sharded(x=mode.from_tensor(plain), v=mode.from_tensor(v)).shape == (5,)


def test_a_graph_that_calls_what_is_not_there_says_so() -> None:
    gone = quoted({SHARDED: {"kernel": "none"}})
    with pytest.raises(eq.EqfuseError, match="a sharded kernel that this process does not have"):
        kernel_of(gone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool], ids=str)
@pytest.mark.parametrize(
    ("shape", "dimension"),
    [((3, 8, 16), 1), ((3, 8, 16), 2), ((3, 7, 5), 1), ((4,), 0), ((2, 0, 8), 1)],
    ids=str,
)
def test_parts_are_put_in_order_whatever_lies_side_by_side(
    shape: tuple[int, ...], dimension: int, dtype: torch.dtype
) -> None:
    whole = torch.randn(shape).mul(3).to(dtype)
    half = shape[dimension] // 2
    parts = [whole.narrow(dimension, start, half) for start in (half, 0)]
    made, expected = TorchArrays().join(parts, dimension), torch.cat(parts, dimension)
    assert made.dtype == dtype and torch.equal(made, expected)
