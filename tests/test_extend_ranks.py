"""Ranked reductions: the first few of an order, merged from the ranks of parts alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from extend_kernels import kernels, outputs, registered

import eqfuse as eq
from bench.mutants import MUTANTS, SOURCES, judge, places, subjects
from bench.mutation import Same
from eqfuse.extend.define import Words, define
from eqfuse.kernel import Kernel
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import FOLDS, NOWHERE
from eqfuse.terms.interpreter import Value, merge_states, rank_states

TOPK = "k: axis[{}]\nv[i, k], p[i, k] = topk[j, k](x[i, j])"
LOGITS = """
    k: axis[2]
    L[t, e] = sum[d](x[t, d] * W[e, d])
    v[t, k], E[t, k] = topk[e, k](L[t, e])
    P[t, k] = exp(v[t, k] - max[k](v[t, k]))
    G[t, k] = P[t, k] / sum[k](P[t, k])
    return G, E
    """
PROBABILITIES = """
    k: axis[2]
    P[t, e] = exp(L[t, e] - max[e](L[t, e])) / sum[e](exp(L[t, e] - max[e](L[t, e])))
    w[t, k], E[t, k] = topk[e, k](P[t, e])
    """
CHEAPEST: dict[str, Any] = {
    "args": "cost, score",
    "state": "v, k, s",
    "lift": "cost, j, score",
    "identity": "inf, inf, 0",
    "order": "-v, -k, s",
    "ranks": "k",
    "result": "v, k, s",
    "commutative": True,
}


ROWS = {
    "ties": [1.0, 3.0, 2.0, 3.0, 3.0],
    "NaN": [np.nan, 1.0, np.nan, 5.0, 5.0, 0.0],
    "nothing": [-np.inf] * 4,
    "short": [2.0, -np.inf],
    "infinite": [np.inf, 0.0, np.nan, -np.inf, 7.0, -0.0, 0.0],
    "empty": [],
}


def listed(row: np.ndarray[Any, Any], places: np.ndarray[Any, Any], count: int) -> list[tuple[float, float]]:
    """What comes first of positions: NaN, then the greatest, of equals the first; nothing at the end."""
    order = np.lexsort((places, -row, ~np.isnan(row)))[:count]
    return [(row[at], places[at]) for at in order] + [(-np.inf, NOWHERE)] * (count - len(order))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_the_list_of_an_axis_is_that_of_its_parts_merged(name: str, count: int) -> None:
    fold, domain = FOLDS["topk"], FloatDomain("float64")
    row, places = np.array(ROWS[name]), np.arange(len(ROWS[name]))

    def states(part: slice) -> tuple[Value, ...]:
        both = [Value(("j",), row[part]), Value(("j",), places[part])]
        return rank_states(fold, both, "j", "k", count, domain)

    for cut in range(len(row) + 1):
        found = merge_states(fold, states(slice(cut)), states(slice(cut, None)), "k", domain)
        for value in (states(slice(None)), found):
            pairs = [(float(v), float(k)) for v, k in zip(value[0].data, value[1].data, strict=True)]
            np.testing.assert_array_equal(pairs, listed(row, places, count))


@pytest.mark.parametrize("count", [1, 2, 24, 26, 64, 256])
@pytest.mark.slow(but=["[2]"])
def test_as_many_ranks_as_are_asked_for(count: int) -> None:
    x = np.random.default_rng(count).integers(0, 40, (3, 600)).astype(np.float32)
    x[0, [5, 77]], x[1, :590], x[2, ::7] = np.nan, -np.inf, np.inf
    kernel = eq.compile(TOPK.format(count))
    assert kernel.certificate.ok
    for schedule, each in kernels(TOPK.format(count)):
        assert isinstance(each, Kernel)
        for length in (600, 7, 1, 0):
            values, places = outputs(each, x=x[:, :length])
            for row in range(3):
                want = np.array(listed(x[row, :length], np.arange(length), count))
                np.testing.assert_array_equal(values[row], want[:, 0], err_msg=schedule)
                np.testing.assert_array_equal(places[row], np.minimum(want[:, 1], length), err_msg=schedule)


@pytest.mark.parametrize("count", [5, 64])
@pytest.mark.slow(but=["5"])
def test_a_stream_of_many_ranks(count: int) -> None:
    x = torch.randint(0, 30, (3, 200), generator=torch.Generator().manual_seed(9)).float()
    x[0, 150], x[1] = torch.nan, -torch.inf
    kernel = eq.compile(TOPK.format(count), verify=False)
    state = kernel.init()
    for page in x[:, :90].split([1, 60, 29], 1):
        state = kernel.update(state, x=page)
    apart = kernel.update(kernel.init(start=90), x=x[:, 90:])
    values, places = kernel.finish(kernel.combine(state, apart))
    want, order = torch.sort(x, dim=1, descending=True, stable=True)
    torch.testing.assert_close(values, want[:, :count], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places, order[:, :count])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.slow
def test_ranks_of_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randint(-9, 9, (4, 50), generator=torch.Generator().manual_seed(3)).to(dtype)
    values, places = torch.sort(x, dim=1, descending=True, stable=True)
    for schedule, kernel in kernels(TOPK.format(5)):
        assert isinstance(kernel, Kernel)
        found = kernel(x=x)
        assert found[0].dtype == dtype, schedule
        assert torch.equal(found[0], values[:, :5]) and torch.equal(found[1], places[:, :5]), schedule


@pytest.mark.slow
def test_ranks_of_what_a_mask_keeps() -> None:
    source = "k: axis[3]\nv[i, k], p[i, k] = topk[j, k](where(j <= i, x[i, j], -inf))"
    x = np.random.default_rng(4).standard_normal((6, 6)).astype(np.float32)
    masked = np.where(np.tri(6, dtype=bool), x, -np.inf)
    for schedule, kernel in kernels(source):
        assert isinstance(kernel, Kernel)
        values, places = outputs(kernel, x=x)
        for row in range(6):
            want = np.array(listed(masked[row], np.arange(6), 3))
            np.testing.assert_array_equal(values[row], want[:, 0], err_msg=schedule)
            np.testing.assert_array_equal(places[row], want[:, 1], err_msg=schedule)


NUCLEUS = """
    k: axis[{count}]
    m: axis[k]
    v[t, k], E[t, k] = topk[j, k](L[t, j])
    P[t, k] = exp(v[t, k] - max[k](v[t, k])) / sum[k](exp(v[t, k] - max[k](v[t, k])))
    C[t, k] = sum[m](where(m < k, P[t, m], 0))
    G[t, k] = where(C[t, k] < top, P[t, k], 0)
    return G, E
    """


@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.slow
def test_the_first_ranks_and_of_them_what_adds_up(count: int) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(7))
    values, places = torch.sort(logits, dim=1, descending=True, stable=True)
    weights = values[:, :count].softmax(1)
    want = torch.where(weights.cumsum(1) - weights < 0.7, weights, 0.0)
    for schedule, kernel in kernels(NUCLEUS.format(count=count)):
        if isinstance(kernel, Kernel):
            found = kernel(L=logits, top=0.7)
            torch.testing.assert_close(found[0], want, rtol=1e-5, atol=1e-6, msg=schedule)
            assert torch.equal(found[1], places[:, :count]), schedule


@pytest.mark.slow
def test_a_list_read_at_an_index() -> None:
    source = """
        k: axis[6]
        m: axis[4]
        v[i, k], p[i, k] = topk[j, k](x[i, j])
        second[i] = v[i, 1]
        where_second[i] = p[i, 1]
        turned[k, i] = v[i, 5 - k]
        few[i, m] = v[i, m]
        diagonal[k] = v[k, k]
        gaps[i] = sum[k](where(k > 0, v[i, max(k - 1, 0)] - v[i, k], 0))
        return second, where_second, turned, few, diagonal, gaps
        """
    x = torch.randn(6, 31, generator=torch.Generator().manual_seed(8))
    values, places = torch.sort(x, dim=1, descending=True, stable=True)
    kernel = eq.compile(source)
    assert kernel.certificate.ok
    found = kernel(x=x)
    assert torch.equal(found[0], values[:, 1]) and torch.equal(found[1], places[:, 1])
    assert torch.equal(found[2], values[:, :6].flip(1).T) and torch.equal(found[3], values[:, :4])
    assert torch.equal(found[4], values[:, :6].diagonal())
    torch.testing.assert_close(found[5], values[:, 0] - values[:, 5])


def test_the_merge_of_ranks_as_text() -> None:
    kernel = eq.compile(TOPK.format(2), verify=False)
    text = str(kernel.merge)
    assert text.split("  two parts a and b:\n")[1].split("  what")[0].splitlines() == [
        "    topk_v_j_new = topk.v[k](topk_v_j_a, topk_k_j_a, topk_v_j_b, topk_k_j_b)",
        "    topk_k_j_new = topk.k[k](topk_v_j_a, topk_k_j_a, topk_v_j_b, topk_k_j_b)",
    ]


def test_the_derivation_of_ranks_is_replayed() -> None:
    kernel = eq.compile(TOPK.format(3), prefer="rolling", verify=False)
    assert kernel.derivation.check()
    assert {"split-topk.v", "split-topk.k"} <= set(kernel.derivation.rules)
    assert "of both lists what comes first, by v, -k" in kernel.explain()
    text = kernel.derivation.to_json()
    again = eq.Derivation.from_json(text)
    assert again.check(TOPK.format(3))
    assert not again.check(TOPK.format(3).replace("x[i, j])", "-x[i, j])"))


@pytest.mark.slow
def test_ranks_of_ones_own_with_a_payload() -> None:
    c = np.random.default_rng(1).integers(0, 5, (4, 23)).astype(np.float32)
    s = np.random.default_rng(2).standard_normal((4, 23)).astype(np.float32)
    c[1], c[2, 5] = np.inf, np.nan
    order = np.stack([np.lexsort((np.arange(23), row, ~np.isnan(row))) for row in c])[:, :2]
    with registered("cheapest_few", **CHEAPEST):
        source = "k: axis[2]\nv[i, k], p[i, k], q[i, k] = cheapest_few[j, k](c[i, j], s[i, j])"
        for schedule, kernel in kernels(source):
            assert isinstance(kernel, Kernel) and kernel.certificate.ok
            found = outputs(kernel, c=c, s=s)
            for got, want in zip(found, (c, np.arange(23)[None].repeat(4, 0), s), strict=True):
                np.testing.assert_array_equal(got, np.take_along_axis(want, order, 1), err_msg=schedule)


@pytest.mark.slow
def test_routing_by_logits_in_every_way() -> None:
    generator = torch.Generator().manual_seed(5)
    x, W = torch.randn(7, 33, generator=generator), torch.randn(21, 33, generator=generator)
    chosen, experts = torch.sort(x @ W.T, dim=1, descending=True, stable=True)
    want = chosen[:, :2].softmax(1).numpy(), experts[:, :2].numpy()
    for schedule, kernel in kernels(LOGITS):
        assert isinstance(kernel, Kernel)
        found = outputs(kernel, x=x.numpy(), W=W.numpy())
        np.testing.assert_allclose(found[0], want[0], rtol=1e-5, atol=1e-6, err_msg=schedule)
        np.testing.assert_array_equal(found[1], want[1], err_msg=schedule)
    kernel = eq.compile(LOGITS, verify=False)
    left = kernel.update(kernel.init(), x=x, W=W[:8])
    right = kernel.update(kernel.init(start=8), x=x, W=W[8:])
    weights, places = kernel.finish(kernel.combine(left, right))
    np.testing.assert_allclose(weights.numpy(), want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(places.numpy(), want[1])


def test_short_rows_stay_resident() -> None:
    kernel = eq.compile(LOGITS, verify=False)
    kernel(x=torch.randn(512, 64), W=torch.randn(128, 64))
    assert kernel.plan.schedule == "resident"


def test_why_ranks_of_probabilities_wait_for_the_row() -> None:
    kernel = eq.compile(PROBABILITIES, verify=False)
    assert "rolling" not in [plan.schedule for plan in kernel.plans()]
    first = kernel.why_not()[0].splitlines()[0]
    assert first == (
        "topk.v[e, k](exp(L[t, e] - max_e) / sum_e, e) is not fused: in exp(L[t, e] - max_e) / sum_e, "
        "no rule takes a factor or term of it out of the topk.v over e (line 3)"
    )


def test_wrong_merges_of_ranks_are_rejected() -> None:
    """Verification sees lists that are combined rank by rank, or of which one is taken twice, by tile and by shard."""
    made: dict[str, set[str]] = {}
    for subject in subjects("the two greatest", SOURCES["the two greatest"], strict=False):
        for mutant in MUTANTS:
            if {"rank", "ranks"} & set(mutant.name.split()):
                for mutated in places(mutant, subject, most=1):
                    verdict = judge(mutant.level, mutated, subject)
                    if not isinstance(verdict, Same):
                        assert verdict.caught, f"{mutant.name} survives in {subject.schedule}"
                        made.setdefault(subject.schedule, set()).add(mutant.name)
    assert made == {
        "rolling": {"ranks apart", "rank taken twice"},
        "split_k": {"ranks apart", "rank taken twice", "shards' ranks apart", "shard's rank taken twice"},
    }


RANKED = {
    "state": "v, k",
    "lift": "x, j",
    "identity": "-inf, inf",
    "order": "v, -k",
    "result": "v, k",
    "ranks": "k",
}
REFUSED = {
    "ranks without an order": (
        {"order": "", "combine": "max(v1, v2), k1"},
        "reduction 'few' has ranks and no order\nsay which comes first, as order=\"v, -k\"",
    ),
    "ranks that are no state": (
        {"ranks": "p"},
        "ranks 'p' is no state variable (line 1)\n    p\n    ^\nwrite ranks=\"k\"",
    ),
    "ranks of nothing": (
        {"result": "N(j)"},
        "the result of reduction 'few' reads no state variable\nsay what it gives: result=\"v\"",
    ),
    "ranks that are not positions": (
        {"lift": "x, j % 4"},
        """ranks 'k' is not the position (line 1)
    x, j % 4
       ^^^^^
lift it as j, the position: of equal elements it tells which is which""",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_ranks(name: str) -> None:
    words, text = REFUSED[name]
    with pytest.raises(eq.EqfuseError) as refused:
        define(Words("few", **{**RANKED, **words}))
    assert str(refused.value) == text


PROGRAMS = {
    "too many ranks": (
        "k: axis[257]\nv[i, k], p[i, k] = topk[j, k](x[i, j])",
        "axis 'k' has 257 ranks",
        "topk keeps a list of at most 256",
    ),
    "far too many ranks": (
        "k: axis[1000000]\nv[i, k], p[i, k] = topk[j, k](x[i, j])",
        "axis 'k' has 1000000 ranks",
        "topk keeps a list of at most 256",
    ),
    "no number of ranks": (
        "v[i, k], p[i, k] = topk[j, k](x[i, j])",
        "nothing says how many positions axis 'k' has",
        "declare it: k: axis[8]",
    ),
    "other values for every rank": (
        "k: axis[4]\nv[i, k], p[i, k] = topk[j, k](x[i, j] * k)",
        "this depends on 'k', the axis of its ranks",
        "leave 'k' out",
    ),
    "a state of no positions": (
        "k: axis[4]\nv[i, k] = topk.v[j, k](x[i, j], j // 2)",
        "this is not the position",
        "its k is the position, j",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_lists_that_there_are_not(name: str) -> None:
    source, message, hint = PROGRAMS[name]
    with pytest.raises(eq.EqfuseError) as refused:
        eq.compile(source)
    assert message in str(refused.value) and hint in str(refused.value) and "^" in str(refused.value)
