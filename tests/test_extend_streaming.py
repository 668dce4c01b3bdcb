"""Streams: pages in any number and grouping give what one call on everything gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq

ATTENTION = """
    S[i, j] = where(j <= i + 30, sum[d](Q[i, d] * K[j, d]) * scale, -inf)
    P[i, j] = exp(S[i, j] - max[j](S[i, j]))
    O[i, e] = sum[j](P[i, j] / sum[j](P[i, j]) * V[j, e])
    L[i] = logsumexp[j](S[i, j])
    """
PROGRAMS = {
    "softmax statistics": "m[i] = max[j](x[i, j])\nl[i] = sum[j](exp(x[i, j] - max[j](x[i, j])))",
    "variance": "v[i] = var[j](x[i, j])",
    "position": "k[i] = argmax[j](x[i, j])\nv[i] = max[j](x[i, j])",
    "moments": "m[i], v[i] = mean_var[j](x[i, j])",
    "masked": "y[i] = logsumexp[j](where(j % 3 > 0, x[i, j], -inf))",
    "of everything": "y = sum[j](sum[i](sq(x[i, j])))",
    "after it": "y[i] = w[i] * sum[j](abs(x[i, j])) / N(j)",
}
PAGES = (5, 1, 17, 8, 2)
Pages = list[dict[str, Any]]


def split(values: Mapping[str, torch.Tensor], along: Mapping[str, int]) -> Pages:
    """The tensors in pages; those that are not in `along` go with every page."""
    found: Pages = [dict(values) for _ in PAGES]
    for name, dim in along.items():
        for page, part in zip(found, torch.split(values[name], PAGES, dim), strict=True):
            page[name] = part
    return found


def streamed(kernel: eq.Kernel, pages: Pages, **last: Any) -> tuple[torch.Tensor, ...]:
    state = kernel.init()
    for page in pages:
        state = kernel.update(state, **page)
    found = kernel.finish(state, **last)
    return found if isinstance(found, tuple) else (found,)


def in_parts(kernel: eq.Kernel, pages: Pages, **last: Any) -> tuple[torch.Tensor, ...]:
    """Every page apart, and then merged as (first, ((second, third), (fourth, fifth)))."""
    parts, start = [], 0
    for page, count in zip(pages, PAGES, strict=True):
        parts.append(kernel.update(kernel.init(start=start), **page))
        start += count
    a, b, c, d, e = parts
    combine = kernel.combine
    found = kernel.finish(combine(a, combine(combine(b, c), combine(d, e))), **last)
    return found if isinstance(found, tuple) else (found,)


def close(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(but=["softmax", "everything"])
def test_pages_in_any_grouping_equal_one_call(name: str) -> None:
    x = torch.randn(4, sum(PAGES), generator=torch.Generator().manual_seed(2))
    kernel = eq.compile(PROGRAMS[name])
    last = {"w": torch.arange(4.0)} if name == "after it" else {}
    whole = kernel(x=x, **last)
    expected = whole if isinstance(whole, tuple) else (whole,)
    pages = split({"x": x}, {"x": 1})
    close(streamed(kernel, [{**page, **last} for page in pages], **last), expected)
    close(in_parts(kernel, [{**page, **last} for page in pages], **last), expected)


@pytest.mark.slow
def test_attention_over_pages_of_keys() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 8, generator=generator) for n in (6, sum(PAGES), sum(PAGES)))
    kernel = eq.compile(ATTENTION)
    expected = kernel(Q=q, K=k, V=v, scale=0.3)
    pages = [{**page, "scale": 0.3} for page in split({"Q": q, "K": k, "V": v}, {"K": 0, "V": 0})]
    close(streamed(kernel, pages), expected)
    close(in_parts(kernel, pages), expected)


@pytest.mark.slow
def test_a_program_that_reads_the_extent_has_to_be_told() -> None:
    x = torch.randn(4, sum(PAGES), generator=torch.Generator().manual_seed(4))
    kernel = eq.compile("y[i] = logsumexp[j](where(j < N(j) - 3 - i, x[i, j], -inf))")
    with pytest.raises(eq.EqfuseError) as refused:
        kernel.init()
    assert str(refused.value) == (
        "the program reads N(j), the number of positions of the whole stream, before its end\n"
        "say how many there will be: init(total=...)"
    )
    state = kernel.init(total=x.shape[1])
    for page in split({"x": x}, {"x": 1}):
        state = kernel.update(state, **page)
    close((kernel.finish(state),), (kernel(x=x),))


def test_numpy_in_numpy_out_and_states_are_values() -> None:
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    kernel = eq.compile("y[i] = logsumexp[j](x[i, j])")
    first = kernel.update(kernel.init(), x=x[:, :7])
    both = kernel.update(first, x=x[:, 7:])
    assert isinstance(kernel.finish(first), np.ndarray)
    np.testing.assert_allclose(kernel.finish(first), np.log(np.exp(x[:, :7]).sum(1)), rtol=1e-5)
    np.testing.assert_allclose(kernel.finish(both), np.log(np.exp(x).sum(1)), rtol=1e-5)
    assert (both.start, both.stop) == (0, 20)


def test_a_page_that_is_all_masked_changes_nothing() -> None:
    x = torch.randn(3, 8)
    kernel = eq.compile("y[i] = logsumexp[j](x[i, j])")
    state = kernel.update(kernel.init(), x=torch.full((3, 5), -torch.inf))
    assert torch.equal(kernel.finish(state), torch.full((3,), -torch.inf))
    close((kernel.finish(kernel.update(state, x=x)),), (x.logsumexp(1),))


def test_outputs_have_the_dtype_of_one_call() -> None:
    x = torch.randn(3, 8).half()
    kernel = eq.compile("y[i] = mean[j](x[i, j])")
    state = kernel.update(kernel.init(), x=x)
    assert kernel.finish(state).dtype == kernel(x=x).dtype == torch.float16


def test_the_programs_of_a_stream_are_programs() -> None:
    stream = eq.compile("y[i] = logsumexp[j](x[i, j])").stream.stream
    assert stream.update.splitlines() == [
        "max_j_tile[i] = max[j](x[i, j])",
        "max_j_new[i] = max(max_j[i], max_j_tile[i])",
        "sum_j_tile[i] = sum[j](exp(x[i, j] - finite(max_j_new[i])))",
        "sum_j_new[i] = finite(exp(finite(max_j[i]) - finite(max_j_new[i]))) * sum_j[i] + sum_j_tile[i]",
        "return max_j_new, sum_j_new",
    ]
    assert "tl.reduce" in eq.compile(stream.update, target="sm_90", verify=False).triton


REFUSED = {
    "y[i, j] = x[i, j] / sum[j](x[i, j])": "'y' has a value for each position of 'j', which a stream does not keep",
    "y[i] = sum[j](round(x[i, j] / max[j](x[i, j])))": "the reductions over 'j' have no merge, so they cannot be streamed",
    "y[i] = x[i] + 1": "the program reduces nothing, so there is nothing to stream",
    "y[i] = sum[j](x[i, j] * x[i, j + 1])": "'x' is read at j + 1, which may lie in another chunk",
    "y[i] = sum[j](x[i, j] * x[i, 0])": "'x' is read at 0, which may lie in another chunk",
    "m[i] = max[j](x[i, j])\nn[j] = sum[i](x[i, j])": "the program is not one fused group",
}


@pytest.mark.parametrize("source", REFUSED)
def test_programs_that_cannot_be_streamed_say_why(source: str) -> None:
    with pytest.raises(eq.EqfuseError) as refused:
        eq.compile(source, verify=False).init()
    assert str(refused.value).startswith(REFUSED[source])


@pytest.mark.parametrize("factor", ["r", "0", "w[i]"])
def test_a_maximum_of_nothing_times_0_leaves_a_sum_as_it_is(factor: str) -> None:
    """Nothing but -inf has come so far, and the maximum is that: times a factor that is 0 it is no number."""
    kernel = eq.compile(f"y[i] = sum[j](exp({factor} * max[j](x[i, j]) + x[i, j]))")
    x = torch.full((2, sum(PAGES)), -torch.inf)
    x[:, 20:] = torch.linspace(-2, 1, sum(PAGES) - 20)
    given = {"r": {"r": 0.0}, "0": {}, "w[i]": {"w": torch.tensor([0.0, 1.0])}}[factor]
    pages = [page | given for page in split({"x": x}, {"x": 1})]
    expected = kernel(x=x, **given)
    assert torch.isfinite(expected).all()
    (found,) = streamed(kernel, pages, **given)
    torch.testing.assert_close(found, expected)


def test_wrong_uses_of_a_stream() -> None:
    kernel = eq.compile("k[i] = argmax[j](x[i, j])", verify=False)
    x = torch.randn(2, 5)
    state = kernel.update(kernel.init(), x=x)
    with pytest.raises(eq.EqfuseError) as apart:
        kernel.combine(state, state)
    assert str(apart.value) == (
        "the left part ends at position 5, the right part starts at 0\n"
        "the program reads positions: begin the right part with init(start=5)"
    )
    with pytest.raises(eq.EqfuseError, match="nothing was streamed: the state is empty"):
        kernel.finish(kernel.init())
    with pytest.raises(eq.EqfuseError, match="int is no state of this kernel"):
        kernel.update(3, x=x)  # type: ignore[arg-type]
    with pytest.raises(eq.EqfuseError, match="start is -1"):
        kernel.init(-1)
