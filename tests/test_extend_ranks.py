"""Ranked reductions: the first few of an order, merged from the ranks of parts alone."""

from __future__ import annotations

from itertools import permutations
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
from eqfuse.terms.folds import FOLDS, NOWHERE, Fold
from eqfuse.terms.interpreter import Env, Value, evaluate_all, fold_states
from eqfuse.terms.nodes import Const, Expr, Local, call

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


def folded(fold: Fold, values: list[float], places: list[int]) -> tuple[float, ...]:
    """The state of some positions."""
    parts = [Value(("j",), np.array(values)), Value(("j",), np.array(places))]
    return tuple(float(found.data) for found in fold_states(fold, parts, "j", FloatDomain("float64")))


def ranked(
    fold: Fold, values: list[float], count: int, taken: tuple[int, ...] = ()
) -> list[tuple[float, ...]]:
    """So many ranks, each the state of what neither `taken` nor an earlier rank has."""
    found: list[tuple[float, ...]] = []
    for _ in range(count):
        gone = {*taken, *(int(place) for _, place in found)}
        nothing = [float(value.value) for value in fold.identity]
        masked = [nothing[0] if place in gone else value for place, value in enumerate(values)]
        found.append(folded(fold, masked, [NOWHERE if p in gone else p for p in range(len(values))]))
    return found


@pytest.mark.parametrize(
    "values",
    [[1.0, 3.0, 2.0, 3.0], [np.nan, 1.0, np.nan, 5.0], [-np.inf] * 4, [2.0, -np.inf], [np.inf, 0.0, np.nan]],
    ids=["ties", "NaN", "nothing", "short", "infinite"],
)
def test_what_is_left_of_a_part_is_among_one_rank_more(values: list[float]) -> None:
    """The statement of the rules left-topk.v and left-topk.k, of any positions that are taken, in the part or not."""
    fold = FOLDS["topk"]
    for count in (1, 2):
        for taken in permutations((0, 1, 2, 3, 9, NOWHERE), count):
            states = ranked(fold, values, count + 1)
            rows = [[Const(value), Const(int(place))] for value, place in states]
            found = evaluate_all(
                list(fold.next_of(rows, list(map(Const, taken)))), Env(FloatDomain("float64"), {}, {}, {})
            )
            (want,) = ranked(fold, values, 1, taken)
            np.testing.assert_array_equal([float(each.data) for each in found], want, err_msg=f"{taken}")


def test_what_is_left_reads_a_rank_for_each_position_that_is_taken() -> None:
    def local(name: str) -> Expr:
        return Local(name, ())

    fold = FOLDS["topk"]
    rows = [[local(f"v{rank}"), local(f"k{rank}")] for rank in range(3)]
    gone = [
        call("or", call("eq", local(f"k{rank}"), local("a")), call("eq", local(f"k{rank}"), local("b")))
        for rank in range(2)
    ]
    first = call("where", gone[0], call("where", gone[1], local("v2"), local("v1")), local("v0"))
    assert fold.next_of(rows, [local("a"), local("b")])[0] is first


def test_the_merge_of_two_ranks_as_text() -> None:
    kernel = eq.compile(TOPK.format(2), verify=False)
    text = str(kernel.merge)
    assert text.split("  two parts a and b:\n")[1].split("  what")[0].splitlines() == [
        "    r1 = (topk_v_j_a, topk_k_j_a)",
        "    r2 = (topk_v_j_b, topk_k_j_b)",
        "    topk_v_j_new = topk.v(r1, r2)",
        "    topk_k_j_new = topk.k(r1, r2)",
        "    r3 = ((topk_v_j2_a, topk_k_j2_a), r1)",
        "    r4 = topk.next(r3, topk_k_j_new)",
        "    r5 = ((topk_v_j2_b, topk_k_j2_b), r2)",
        "    r6 = topk.next(r5, topk_k_j_new)",
        "    topk_v_j2_new = topk.v(r4, r6)",
        "    topk_k_j2_new = topk.k(r4, r6)",
    ]


def test_the_text_of_a_merge_grows_as_the_ranks_do() -> None:
    def combine(count: int) -> str:
        merge = str(eq.compile(TOPK.format(count), verify=False).merge)
        return merge.split("  two parts a and b:\n")[1].split("  what")[0]

    three, six = combine(3), combine(6)
    assert len(six) < 2.5 * len(three)


def test_the_derivation_of_ranks_is_replayed() -> None:
    kernel = eq.compile(TOPK.format(3), prefer="rolling", verify=False)
    assert kernel.derivation.check()
    assert {"first-rank-topk", "next-rank-topk", "take-topk", "take-more-topk"} <= set(
        kernel.derivation.rules
    )
    assert "the first of the ranks of a part that is not taken" in kernel.explain()
    text = kernel.derivation.to_json()
    again = eq.Derivation.from_json(text)
    assert again.check(TOPK.format(3))
    assert not again.check(TOPK.format(2))


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
        "topk.v[e](exp(L[t, e] - max_e) / sum_e, e) is not fused: in exp(L[t, e] - max_e) / sum_e, "
        "no rule takes a factor or term of it out of the topk.v over e (line 3)"
    )


def test_wrong_merges_of_ranks_are_rejected() -> None:
    """Verification sees a part's rank that is kept although it was taken, or taken twice, by tile and by shard."""
    made: dict[str, set[str]] = {}
    for subject in subjects("the two greatest", SOURCES["the two greatest"], strict=False):
        for mutant in MUTANTS:
            if "rank" in mutant.name.split():
                for mutated in places(mutant, subject, most=1):
                    verdict = judge(mutant.level, mutated, subject)
                    if not isinstance(verdict, Same):
                        assert verdict.caught, f"{mutant.name} survives in {subject.schedule}"
                        made.setdefault(subject.schedule, set()).add(mutant.name)
    assert made == {
        "rolling": {"rank kept", "rank taken twice"},
        "split_k": {"rank kept", "rank taken twice", "shard's rank kept", "shard's rank taken twice"},
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
lift it as j, the position: by it an earlier rank takes what it has found""",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_ranks(name: str) -> None:
    words, text = REFUSED[name]
    with pytest.raises(eq.EqfuseError) as refused:
        define(Words("few", **{**RANKED, **words}))
    assert str(refused.value) == text
