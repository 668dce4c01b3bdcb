"""Wrong transformations of a few programs: every one that can be made is rejected, and the right forms pass."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.mutants import MUTANTS, SOURCES, Subject, judge, places, rejected, subjects
from bench.mutation import Mutant, Same, even_in
from eqfuse.terms.parser import parse

CHOSEN = (
    ("softmax", "split_k", False),
    ("positions in groups", "rolling", False),
    ("variance", "rolling", False),
    ("attention, causal window", "rolling", False),
    ("attention with distances", "rolling", False),
    ("attention in half precision", "rolling", False),
    ("quantisation and product", "rolling", True),
    ("products in another order", "multi_pass", False),
    ("sums over positions", "multi_pass", False),
    ("a few positions next to each other", "multi_pass", False),
)
"""Program, schedule, and whether its casts are opaque."""


@pytest.fixture(scope="module")
def chosen() -> list[Subject]:
    return [
        subject
        for name, schedule, strict in CHOSEN
        for subject in subjects(name, SOURCES[name], strict=strict)
        if subject.schedule in (schedule, "multi_pass" if strict else schedule)
    ]


def test_there_are_at_least_forty_at_every_level_some() -> None:
    assert len(MUTANTS) >= 40 and len({(m.level, m.name) for m in MUTANTS}) == len(MUTANTS)
    assert min(Counter(mutant.level for mutant in MUTANTS).values()) >= 10


@pytest.mark.slow
def test_right_forms_pass(chosen: list[Subject]) -> None:
    assert [rejected(subject) for subject in chosen] == [""] * len(chosen)


@pytest.mark.slow
def test_a_maximum_that_another_kernel_subtracts_is_kept_as_it_is() -> None:
    """In float32, x - max x is 0 at the maximum however large it is: no product and its inverse may stand between."""
    name = "scaled softmax and its maximum"
    assert [rejected(subject) for subject in subjects(name, SOURCES[name])] == [""] * 4


def test_a_maximum_of_what_is_stored_is_kept_as_it_is() -> None:
    """The same where the exponents are made of what kernels have stored alone."""
    source = """
        K: f32[j, d]
        W: f32[f, d]
        V: f32[j, e]
        v[j,f] = sum[d](K[j,d] * W[f,d]) * c - sum[d](sq(K[j,d])) * (c * c / 2)
        A[f,e] = sum[j](exp(v[j,f] - max[j,f](v[j,f])) * V[j,e])
        """
    passed = {subject.schedule: rejected(subject) for subject in subjects("features", source, {"c": 0.5})}
    assert passed["multi_pass"] == "" and set(passed.values()) == {""}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.level}: {m.name}" for m in MUTANTS])
@pytest.mark.slow(but=["merge:", "term:", "order:", "pass:", "roles:"])
def test_a_mutant_is_rejected_wherever_it_is_made(mutant: Mutant, chosen: list[Subject]) -> None:
    for subject in chosen:
        if subject.strict is mutant.strict:
            for mutated in places(mutant, subject, most=1):
                verdict = judge(mutant.level, mutated, subject)
                assert isinstance(verdict, Same) or verdict.caught, f"survives in {subject.name}"
                assert isinstance(verdict, Same) or verdict.shown


def test_each_mistake_in_an_order_is_made_somewhere(chosen: list[Subject]) -> None:
    orders = [mutant for mutant in MUTANTS if mutant.level == "order"]
    assert len(orders) >= 20
    assert all(any(places(mutant, subject, most=1) for subject in chosen) for mutant in orders)


def test_a_square_is_even_in_what_it_squares() -> None:
    (output,) = parse("y[i] = sum[j](sq(x[i,j] - c) * w[j]) + s").outputs
    (odd,) = parse("y[i] = sum[j]((x[i,j] - c) * w[j])").outputs
    (part,) = parse("y[i,j] = x[i,j] - c").outputs
    assert even_in(output.expr, part.expr) and not even_in(odd.expr, part.expr)
