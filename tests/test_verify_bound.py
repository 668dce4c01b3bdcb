"""The bound on accepting a wrong program: which theorem applies, and how it depends on the program."""

from __future__ import annotations

import numpy as np
import pytest

from eqfuse.terms.parser import parse
from eqfuse.verify.bound import MIRAGE, NONE, SCHWARTZ_ZIPPEL, Bound, acceptance_bound
from eqfuse.verify.field import FieldDomain
from eqfuse.verify.sizes import small_extents


def bound(source: str, **extents: int) -> Bound:
    program = parse(source)
    return acceptance_bound(program, {**small_extents(program), **extents})


@pytest.mark.parametrize(
    "source",
    [
        "y[i] = sum[j](x[i,j] * w[j])",
        "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))",
        "y[i] = sum[j](exp(sum[d](q[i,d] * k[j,d]) * s + b[i] * j) * v[j])",
        "y[i] = sum[j](exp(20 * tanh(sum[d](q[i,d] * k[j,d]) / 20)) * v[j])",
    ],
)
def test_independent_exponentials_are_variables(source: str) -> None:
    found = bound(source)
    assert found.theorem == SCHWARTZ_ZIPPEL
    assert found.per_trial < 1e-6 and found.after(16) < 1e-90


@pytest.mark.parametrize(
    ("source", "theorem"),
    [
        ("y = sum[i](exp(sum[d](q[i,d] * k[d])) * exp(sum[d](q[i,d] * h[d])))", MIRAGE),
        ("y[i] = exp(x[i]) + exp(x[i] * x[i])", MIRAGE),
        ("z = sum[i](sum[j](exp(sum[d](q[i,d] * k[j,d]))))", NONE),
    ],
)
def test_dependent_exponentials_get_the_weaker_theorem_or_none(source: str, theorem: str) -> None:
    found = bound(source)
    assert found.theorem == theorem
    assert found.per_trial > 0.5


def test_counts_grow_with_the_sizes() -> None:
    source = "y[i] = sum[j](exp(x[i,j]) / sum[j](exp(x[i,j])) * v[j])"
    small, large = bound(source, j=3), bound(source, j=9)
    assert small.terms == 2 * 3 * 3 and large.terms == 2 * 9 * 9
    divided = "y[i] = sum[j](v[j] / w[i,j])"
    assert bound(divided, j=3).degree < bound(divided, j=9).degree


def test_the_bound_is_not_exceeded_in_a_small_field() -> None:
    """A wrong identity is accepted about as often as the bound allows where the field is tiny."""
    domain = FieldDomain(p=2027, q=1013, generator=4)
    rng = np.random.default_rng(0)
    trials = 20_000
    x = domain.draw(rng.uniform(0.5, 2.0, (trials, 3)), rng)
    exps = domain.call("exp", [x])
    total = domain.reduce("sum", exps, 1)
    head = domain.take(exps, (slice(None), slice(0, 2)))
    wrong = domain.call("mul", [domain.full((), 2.0), domain.reduce("sum", head, 1)])
    accepted = float(np.mean(total.p == wrong.p))
    found = acceptance_bound(parse("y[i] = sum[j](exp(x[i,j]))"), {"i": 1, "j": 3}, domain.p, domain.q)
    assert 0 < accepted <= found.per_trial
