"""The shipped reductions: every schedule, alone, masked, as producer and as consumer, against torch."""

from __future__ import annotations

from collections.abc import Callable
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

Array = np.ndarray[Any, Any]
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
NAMES = {"mean_var": "y[i], z[i]", "topk": "y[i, k], z[i, k]"}
UNMERGED = ("rolling", "split_k")
"""Schedules that need a merge."""

PLACES = {
    "alone": "x[i, j]",
    "masked": "where(j % 5 < 3, x[i, j], {hidden})",
    "consumer": "x[i, j] - max[j](x[i, j])",
}
"""What is reduced; that a reduction reads its result is a test of its own."""

CONSUMERS_WITHOUT_MERGE = {
    "any": UNMERGED,
    "all": UNMERGED,
    "argmax": UNMERGED,
    "argmin": UNMERGED,
    "mean_var": UNMERGED,
    "prod": UNMERGED,
}
"""Nothing repairs these where what they reduce is shifted by a state of the same axis."""


def program(name: str, place: str) -> str:
    hidden = (
        "1"
        if name == "prod"
        else "inf"
        if name == "argmin"
        else "-inf"
        if name in ("argmax", "topk")
        else "0"
    )
    argument = ARGUMENT.get(name, "{}").format(PLACES[place].format(hidden=hidden))
    axes = "j, k" if name == "topk" else "j"
    head = "k: axis[2]\n" if name == "topk" else ""
    return f"{head}{NAMES.get(name, 'y[i]')} = {name}[{axes}]({argument})"


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("place", ["alone", "masked", "consumer"])
def test_every_schedule_equals_torch(name: str, place: str) -> None:
    x = np.random.default_rng(7).standard_normal((4, 21)).astype(np.float32)
    reduced = torch.from_numpy(x).double()
    if place == "masked":
        hidden = {"prod": 1.0, "argmin": np.inf, "argmax": -np.inf, "topk": -np.inf}.get(name, 0.0)
        reduced = torch.where(torch.arange(21) % 5 < 3, reduced, hidden)
    elif place == "consumer":
        reduced = reduced - reduced.amax(1, keepdim=True)
    expected = SAME[name](reduced)
    refused = []
    for schedule, kernel in kernels(program(name, place)):
        if not isinstance(kernel, Kernel):
            refused.append(schedule)
            assert "no rule separates" in str(kernel) or "can leave" in str(kernel)
            continue
        assert kernel.plan.schedule == schedule and kernel.certificate.ok
        for got, want in zip(outputs(kernel, x=x), expected, strict=True):
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5, err_msg=schedule)
    without = (
        UNMERGED if name == "topk" else CONSUMERS_WITHOUT_MERGE.get(name, ()) if place == "consumer" else ()
    )
    assert tuple(refused) == without


@pytest.mark.parametrize("name", [n for n in SAME if n not in ("topk", "mean_var")])
def test_a_reduction_that_reads_it(name: str) -> None:
    """As a producer: the sum of what is left of x once its reduction is taken away."""
    argument = ARGUMENT.get(name, "{}").format("x[i, j]")
    value = f"where({name}[j]({argument}), 1, 0)" if name in ("any", "all") else f"{name}[j]({argument})"
    x = np.random.default_rng(8).standard_normal((4, 21)).astype(np.float32)
    kernel = eq.compile(f"y[i] = sum[j](x[i, j] * {value})")
    (found,) = outputs(kernel, x=x)
    made = SAME[name](torch.from_numpy(x).double())[0].double()
    want = (torch.from_numpy(x).double() * made[:, None]).sum(1)
    assert kernel.certificate.ok
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-4, atol=1e-4)


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
    found = outputs(eq.compile("k: axis[4]\nv[i, k], p[i, k] = topk[j, k](x[i, j])"), x=x)
    np.testing.assert_array_equal(found[0], values[:, :4].numpy())
    np.testing.assert_array_equal(found[1], places[:, :4].numpy())


def test_many_ranks_are_written_out_in_as_many_steps() -> None:
    x = np.random.default_rng(10).integers(0, 9, (6, 40)).astype(np.float32)
    x[0, 3], x[1], x[2, ::2] = np.nan, -np.inf, np.inf
    kernel = eq.compile("k: axis[16]\nv[i, k], p[i, k] = topk[j, k](x[i, j])")
    values, places = torch.sort(torch.from_numpy(x), dim=1, descending=True, stable=True)
    found = outputs(kernel, x=x)
    assert kernel.certificate.ok
    np.testing.assert_array_equal(found[0], values[:, :16].numpy())
    np.testing.assert_array_equal(found[1], places[:, :16].numpy())


def test_more_ranks_than_positions_give_what_comes_last() -> None:
    kernel = eq.compile("k: axis[4]\nv[i, k], p[i, k] = topk[j, k](x[i, j])")
    values, places = outputs(kernel, x=np.array([[1.0, 5.0, 3.0]], np.float32))
    np.testing.assert_array_equal(values[0], [5, 3, 1, -np.inf])
    assert list(places[0, :3]) == [1, 2, 0] and places[0, 3] >= 3


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
        verdict = laws.check(found.fold, found.lift)
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
