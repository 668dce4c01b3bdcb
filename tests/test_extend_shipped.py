"""The shipped reductions: every schedule, alone, masked, as producer and as consumer, against torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from extend_kernels import kernels, outputs, registered

import eqfuse as eq
from eqfuse.extend import laws
from eqfuse.extend.define import Words, define, forget, register
from eqfuse.extend.shipped import SHIPPED
from eqfuse.kernel import Kernel
from eqfuse.terms.registry import REGISTERED

Torch = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]

SAME: dict[str, Torch] = {
    "mean": lambda x: (x.mean(1),),
    "var": lambda x: (x.var(1, unbiased=False),),
    "std": lambda x: (x.std(1, unbiased=False),),
    "logsumexp": lambda x: (x.logsumexp(1),),
    "any": lambda x: ((x > 1).any(1),),
    "all": lambda x: ((x > -1).all(1),),
    "prod": lambda x: (x.prod(1),),
    "argmax": lambda x: (x.argmax(1),),
    "argmin": lambda x: (x.argmin(1),),
    "mean_var": lambda x: (x.mean(1), x.var(1, unbiased=False)),
    "softmax_weighted": lambda x: ((x.softmax(1) * x).sum(1),),
    "topk": lambda x: tuple(part[:, :2] for part in torch.sort(x, dim=1, descending=True, stable=True)),
}
"""Of the rows of x, in float64."""

ARGUMENT = {"any": "({}) > 1", "all": "({}) > -1", "softmax_weighted": "{0}, {0}"}
RESULTS = {"mean_var": 2, "topk": 2}
PLACES = {
    "alone": "x[i, j]",
    "masked": "where(j % 5 < 3, x[i, j], {hidden})",
    "consumer": "x[i, j] - max[j](x[i, j])",
    "producer": "x[i, j]",
}
"""What is reduced. A consumer reads another reduction over its axis, and what a producer gives is read by one."""

HIDDEN = {"prod": "1", "argmin": "inf", "argmax": "-inf", "topk": "-inf"}
"""What a mask leaves of a position, 0 for others."""

SHIFTED = "x[i, j] - max_j: no rule takes a factor or term of it out of the {} over j"
WITHOUT_MERGE = {
    "any": "x[i, j] - max_j > 1: no rule separates what varies along j from the value of max_j in it",
    "all": "x[i, j] - max_j > -1: no rule separates what varies along j from the value of max_j in it",
    "prod": SHIFTED.format("prod"),
    "argmax": "; ".join(map(SHIFTED.format, ("argmax.k", "argmax.v"))),
    "argmin": "; ".join(map(SHIFTED.format, ("argmin.k", "argmin.v"))),
    "mean_var": "; ".join(map(SHIFTED.format, ("mean_var.m", "mean_var.s", "mean_var.n"))),
    "topk": "; ".join(map(SHIFTED.format, ("topk.v", "topk.k"))),
}
"""Consumers that no rule repairs once the maximum is another, and why: they neither roll nor split nor stream."""


def program(name: str, place: str) -> str:
    argument = ARGUMENT.get(name, "{}").format(PLACES[place].format(hidden=HIDDEN.get(name, "0")))
    head, axes, index = ("k: axis[2]\n", "j, k", "i, k") if name == "topk" else ("", "j", "i")
    made = [f"{letter}[{index}]" for letter in "ab"[: RESULTS.get(name, 1)]]
    text = f"{head}{', '.join(made)} = {name}[{axes}]({argument})"
    if place != "producer":
        return text
    read = "where({}, 1, 0)" if name in ("any", "all") else "{}"
    lines = [f"sum_of_{value} = sum[j](x[i, j] * {read.format(value)})" for value in made]
    returned = ", ".join(f"sum_of_{value[0]}" for value in made)
    return "\n".join([text, *lines, f"return {returned}"])


def expected(name: str, place: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a cell of the table gives, by torch in float64."""
    match place:
        case "masked":
            return SAME[name](torch.where(torch.arange(x.shape[1]) % 5 < 3, x, float(HIDDEN.get(name, 0))))
        case "consumer":
            return SAME[name](x - x.amax(1, keepdim=True))
        case "producer":
            return tuple(torch.einsum("ij,i...->i...", x, made.double()) for made in SAME[name](x))
    return SAME[name](x)


def close(found: Sequence[Any], wanted: Sequence[torch.Tensor], way: str) -> None:
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-4, err_msg=way)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SAME)
@pytest.mark.slow(but=["argmax-alone"])
def test_every_schedule_equals_torch(name: str, place: str) -> None:
    """Each cell of the table: verified and equal, or refused for its reason, by every schedule and as a stream."""
    x = np.random.default_rng(7).standard_normal((4, 21)).astype(np.float32)
    wanted = expected(name, place, torch.from_numpy(x).double())
    reason = WITHOUT_MERGE.get(name) if place == "consumer" else None
    for schedule, kernel in kernels(program(name, place)):
        if reason is not None and schedule in ("rolling", "split_k"):
            assert str(kernel) == f"there is no {schedule} plan for this program\n{reason}"
            continue
        assert isinstance(kernel, Kernel), f"{schedule}: {kernel}"
        assert kernel.plan.schedule == schedule and kernel.certificate.ok
        close(outputs(kernel, x=x), wanted, schedule)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SAME)
@pytest.mark.slow(but=["logsumexp-consumer", "argmax-producer", "topk-alone"])
def test_every_stream_equals_torch(name: str, place: str) -> None:
    """The rest of the table: two pages that were seen apart, merged."""
    x = np.random.default_rng(7).standard_normal((4, 21)).astype(np.float32)
    merges = place != "consumer" or name not in WITHOUT_MERGE
    kernel = eq.compile(program(name, place), verify=False, prefer="rolling" if merges else None)
    if not merges:
        with pytest.raises(eq.EqfuseError) as refused:
            kernel.init()
        assert str(refused.value).startswith(
            "the reductions over 'j' have no merge, so they cannot be streamed\n"
        )
        assert WITHOUT_MERGE[name].split(": ")[1].split(";")[0] in str(refused.value)
        return
    left = kernel.update(kernel.init(), x=x[:, :9])
    right = kernel.update(kernel.init(start=9), x=x[:, 9:])
    found = kernel.finish(kernel.combine(left, right))
    wanted = expected(name, place, torch.from_numpy(x).double())
    close(found if isinstance(found, tuple) else (found,), wanted, "stream")


@pytest.mark.slow
def test_ties_and_nan_are_as_in_torch() -> None:
    x = np.random.default_rng(9).standard_normal((6, 19)).astype(np.float32)
    x[0, [3, 9]] = 7.0
    x[1] = 1.0
    x[2, 11] = np.nan
    x[3, [2, 5]] = np.nan
    x[4] = -np.inf
    x[5, 3:] = np.inf
    for name in ("argmax", "argmin"):
        want = SAME[name](torch.from_numpy(x))[0].numpy()
        for _, kernel in kernels(f"y[i] = {name}[j](x[i, j])"):
            assert isinstance(kernel, Kernel)
            np.testing.assert_array_equal(outputs(kernel, x=x)[0], want)
    values, places = torch.sort(torch.from_numpy(x), dim=1, descending=True, stable=True)
    for schedule, kernel in kernels("k: axis[4]\nv[i, k], p[i, k] = topk[j, k](x[i, j])"):
        assert isinstance(kernel, Kernel)
        found = outputs(kernel, x=x)
        np.testing.assert_array_equal(found[0], values[:, :4].numpy(), err_msg=schedule)
        np.testing.assert_array_equal(found[1], places[:, :4].numpy(), err_msg=schedule)


def test_many_ranks_are_written_out_in_as_many_steps() -> None:
    x = np.random.default_rng(10).integers(0, 9, (6, 40)).astype(np.float32)
    x[0, 3], x[1], x[2, ::2] = np.nan, -np.inf, np.inf
    kernel = eq.compile("k: axis[16]\nv[i, k], p[i, k] = topk[j, k](x[i, j])")
    values, places = torch.sort(torch.from_numpy(x), dim=1, descending=True, stable=True)
    found = outputs(kernel, x=x)
    assert kernel.certificate.ok
    np.testing.assert_array_equal(found[0], values[:, :16].numpy())
    np.testing.assert_array_equal(found[1], places[:, :16].numpy())


@pytest.mark.slow
def test_more_ranks_than_positions_give_what_comes_last() -> None:
    for schedule, kernel in kernels("k: axis[4]\nv[i, k], p[i, k] = topk[j, k](x[i, j])"):
        assert isinstance(kernel, Kernel)
        values, places = outputs(kernel, x=np.array([[1.0, 5.0, 3.0]], np.float32))
        np.testing.assert_array_equal(values[0], [5, 3, 1, -np.inf], err_msg=schedule)
        np.testing.assert_array_equal(places[0], [1, 2, 0, 3], err_msg=schedule)


@pytest.mark.slow
def test_an_order_is_what_it_says_as_a_combine() -> None:
    """The first of all states, searched key by key, against the same fold combined two by two."""
    x = np.random.default_rng(11).integers(-2, 3, (9, 33)).astype(np.float32)
    p = np.random.default_rng(12).standard_normal((9, 33)).astype(np.float32)
    x[1, 4], x[2], x[3] = np.nan, -np.inf, np.nan
    x[4, [3, 20]] = np.nan
    x[5, [2, 6]], p[5, 6] = 9, np.nan
    words = {"args": "x, p", "state": "v, k, p", "lift": "x, j % 4, p", "identity": "-inf, inf, inf"}
    words |= {"result": "v, k, p", "commutative": True}
    last = "(p1 <= p2) | (p1 != p1)"
    among = f"(k1 < k2) | ((k1 == k2) & ({last}))"
    first = f"(v1 > v2) | ((v1 == v2) & ({among})) | ((v1 != v1) & ((v2 == v2) | ({among})))"
    combine = ", ".join(f"where({first}, {name}1, {name}2)" for name in "vkp")
    text = "v[i], k[i], q[i] = {}[j](x[i, j], p[i, j])"
    with (
        registered("ordered", **words, order="v, -k, -p"),
        registered("combined", **words, combine=combine),
    ):
        ways = {name: list(kernels(text.format(name))) for name in ("ordered", "combined")}
        for (schedule, one), (_, other) in zip(*ways.values(), strict=True):
            assert isinstance(one, Kernel) and isinstance(other, Kernel)
            assert np.isnan(outputs(one, x=x, p=p)[2][5])
            for got, want in zip(outputs(one, x=x, p=p), outputs(other, x=x, p=p), strict=True):
                np.testing.assert_array_equal(got, want, err_msg=schedule)


@pytest.mark.parametrize("words", SHIPPED, ids=lambda words: words.name)
def test_shipped_reductions_keep_their_laws(words: Words) -> None:
    kept = REGISTERED[words.name]
    forget(words.name)
    try:
        found = define(words)
    finally:
        register(kept)
    assert words.why
    if found.fold is not None:
        verdict = laws.check_laws(found.fold, found.lift)
        assert verdict.broken is None and not verdict.undecided


def test_a_value_and_its_position_take_one_pass() -> None:
    kernel = eq.compile("v[i] = max[j](x[i, j])\nk[i] = argmax[j](x[i, j])", prefer="rolling")
    (nest,) = kernel.compiled.chosen.nest.kernels
    assert sum(type(stmt).__name__ == "Loop" for stmt in nest.body) == 1


def test_the_state_variables_are_reductions_too() -> None:
    kernel = eq.compile("v[i] = argmax.v[j](x[i, j], j)\nk[i] = argmax.k[j](x[i, j], j)")
    x = np.random.default_rng(1).standard_normal((3, 11)).astype(np.float32)
    value, place = outputs(kernel, x=x)
    np.testing.assert_array_equal(value, x.max(1))
    np.testing.assert_array_equal(place, x.argmax(1))
