"""The bound on accepting a wrong program: which theorem applies, and how it is counted from the programs."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from eqfuse.terms.domain import Domain
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.parser import parse
from eqfuse.verify.bound import MIRAGE, SCHWARTZ_ZIPPEL, Bound, Difference, Side
from eqfuse.verify.certificate import REQUESTED
from eqfuse.verify.degrees import LOGISTIC, UNINTERPRETED, Counted, count
from eqfuse.verify.equivalence import equivalent as proved_or_tried
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.field.primes import P, Q
from eqfuse.verify.inputs import input_specs, small_integers
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.sizes import small_extents

equivalent = partial(proved_or_tried, prove=False)


def counted(source: str, **extents: int) -> tuple[Side, Counted]:
    program = parse(source)
    sizes = {**small_extents(program), **extents}
    scalars = {name: small_integers(program).get(name) for name in program.scalars}

    def run(inputs: Inputs, domain: Domain) -> dict[str, object]:
        return evaluate(program, inputs.tensors, inputs.scalars, sizes, domain, batch=inputs.trials)

    return Side(program, sizes), count(run, input_specs(program, sizes), scalars, sizes)


def bound(source: str, **extents: int) -> Bound:
    """Of a program against itself."""
    side, found = counted(source, **extents)
    return Difference.of([side], found).worst(found)


@pytest.mark.parametrize(
    "source",
    [
        "y[i] = sum[j](x[i,j] * w[j])",
        "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))",
        "y[i] = sum[j](exp(sum[d](q[i,d] * k[j,d]) * s + b[i] * j) * v[j])",
        "y[i] = sum[j](exp(20 * tanh(sum[d](q[i,d] * k[j,d]) / 20)) * v[j])",
        "y[i] = max[j](x[i,j]) + log(sum[j](exp(x[i,j] - max[j](x[i,j]))))",
        "y[i] = sqrt(sum[j](sq(x[i,j])))",
    ],
)
def test_independent_exponentials_are_variables(source: str) -> None:
    found = bound(source)
    assert found.theorem == SCHWARTZ_ZIPPEL
    assert found.after(16) < REQUESTED


@pytest.mark.parametrize(
    ("source", "theorem"),
    [
        ("y = exp(sum[d](q[d] * k[d])) + exp(sum[d](sq(q[d]) * k[d]))", MIRAGE),
        ("y[i] = exp(x[i]) + exp(x[i] * x[i])", MIRAGE),
        ("y[i] = exp(s) + exp(x[i]) * s", MIRAGE),
        ("z = sum[i](sum[j](exp(sum[d](q[i,d] * k[j,d]))))", "too many for Mirage"),
        ("y[i] = sum[j](exp(x[i,j]) * log(x[i,j]))", "no residue is known"),
        ("y[i] = sum[j](2 * log(x[i,j]))", "a logarithm is multiplied"),
        ("y[i] = argmax[j](x[i,j])", "the orders of values decide"),
        ("y[i,k] = sum[j](x[i,j] / sqrt(sum[l](sq(x[j,l]))))", "square roots is too much"),
    ],
)
def test_other_programs_get_the_weaker_theorem_or_none(source: str, theorem: str) -> None:
    found = bound(source, j=40) if "square roots is too much" in theorem else bound(source)
    assert theorem in found.theorem
    assert found.per_trial >= 0.5 and not found.repeats
    assert found.after(16) >= 0.5


@pytest.mark.parametrize(
    ("source", "above", "below"),
    [
        ("y[i] = sum[j](x[i,j] * w[j])", 2, 0),
        ("y[i] = sum[j](v[j] / w[i,j])", 5, 5),
        ("y[i] = x[i] / v[i] + x[i] / w[i]", 2, 2),
        ("y[i] = sq(sq(x[i])) * x[i]", 5, 0),
        ("y[i] = max(x[i], sq(v[i]))", 2, 0),
        ("y[i] = prod[j](x[i,j])", 5, 0),
        ("y[i] = exp(x[i] - v[i])", 2, 2),
        ("y[i] = rsqrt(sq(x[i]))", 0, 1),
    ],
)
def test_degrees_are_those_of_fractions(source: str, above: float, below: float) -> None:
    _, found = counted(source, j=5)
    assert (found.forms["y"].above, found.forms["y"].below) == (above, below)


def test_the_degree_is_that_of_the_cross_multiplied_difference() -> None:
    side, quotient = counted("y[i] = x[i] / sq(v[i])")
    other, power = counted("y[i] = sq(sq(x[i]))")
    found = Difference.of([side, other], quotient).worst(power)
    assert found.degree == 6  # x - x^4 v^2
    assert found.per_trial == pytest.approx(6 / (Q - 1))


def test_atoms_of_two_programs_are_taken_together() -> None:
    source = "y[i] = sum[j](exp(x[i,j]))"
    one, left = counted(source)
    same, right = counted(source.replace("j", "b").replace("i", "a"))
    double, twice = counted("y[i] = sum[j](exp(2 * x[i,j]))")
    assert Difference.of([one, same], left).worst(right).theorem == SCHWARTZ_ZIPPEL
    assert Difference.of([one, double], left).worst(twice).theorem == MIRAGE


def test_counts_grow_with_the_sizes() -> None:
    source = "y[i] = sum[j](exp(x[i,j]) * v[j])"
    small, large = bound(source, j=3), bound(source, j=9)
    assert small.terms == 6 and large.terms == 18
    divided = "y[i] = sum[j](v[j] / w[i,j])"
    assert bound(divided, j=3).degree < bound(divided, j=9).degree


def test_comparisons_chosen_among_the_drawn_are_paid_for() -> None:
    found = Bound(10, 1, 1e-3, SCHWARTZ_ZIPPEL)
    assert found.after(2, 2) == pytest.approx(1e-6)
    assert found.after(2, 10) == pytest.approx(45e-6)
    assert found.after(2, 10, looks=3) == pytest.approx(135e-6)
    assert found.after(0, 10) == 1.0
    assert found.reaches(1e-5, 2, 2) and not found.reaches(1e-5, 2, 10)
    assert found.reaches(5e-6, 2, 2, looks=4) and not found.reaches(5e-6, 2, 2, looks=6)
    assert Bound(10, 3, 0.7, MIRAGE, repeats=False).after(16) == 0.7


def test_trials_go_on_until_the_requested_bound() -> None:
    source = "y[i] = sum[j](exp(x[i,j]) * v[j])"
    usual, surer = equivalent(source, source), equivalent(source, source, bound=1e-200)
    assert usual.trials == 16 and usual.reached and usual.requested == REQUESTED
    assert surer.trials > 16 and surer.reached and surer.bound <= 1e-200
    dependent = "y[i] = exp(x[i]) + exp(x[i] * x[i])"
    weak = equivalent(dependent, dependent)
    assert weak.ok and not weak.reached and "NOT the requested bound" in str(weak)


def test_sizes_too_small_to_tell_are_not_verified() -> None:
    found = equivalent("y[i] = sum[j](where(j < 100000000, x[i,j], 0))", "y[i] = sum[j](x[i,j])")
    assert not found.ok and "100000000" in found.reason


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
    side, found = counted("y[i] = sum[j](exp(x[i,j]))", i=1, j=3)
    assert 0 < accepted <= Difference.of([side], found, domain.q).worst(found).per_trial


def test_the_page_names_what_the_code_has() -> None:
    page = Path(__file__).parents[1].joinpath("docs", "verification.md").read_text(encoding="utf-8")
    assert f"p = {P}" in page and f"= {Q} is prime" in page
    assert all(f"`{fn}`" in page for fn in (*UNINTERPRETED, *LOGISTIC))
    assert re.findall(r"\*\*(A\d)\.\*\*", page) == [f"A{n}" for n in range(1, 10)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("sin(x[i] + z[i])", "sin(x[i]) * cos(z[i]) + cos(x[i]) * sin(z[i])"),
        ("exp(x[i] - z[i]) * w[i]", "exp(x[i]) / exp(z[i]) * w[i]"),
    ],
)
def test_terms_of_a_sum_are_atoms_where_they_stand_alone_too(left: str, right: str) -> None:
    assert equivalent(f"y[i] = {left}", f"y[i] = {right}").reached
    # 2 x is no atom beside x, of which it is a multiple
    assert not equivalent("y[i] = sin(2 * x[i])", "y[i] = 2 * sin(x[i]) * cos(x[i])").reached
