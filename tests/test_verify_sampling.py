"""Small sizes, and inputs whose orders matter."""

from __future__ import annotations

import numpy as np
import pytest

from eqfuse.terms.parser import parse
from eqfuse.terms.sizes import bind
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.inputs import input_specs, small_integers, small_shapes
from eqfuse.verify.sampling import PATTERNS, draw_scalars, draw_specs, full_entropy
from eqfuse.verify.sizes import small_extents

PROGRAMS = {
    "softmax": "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))",
    "grouped heads": "O[b,h,i] = sum[j](sum[d](Q[b,h,i,d] * K[b,h//g,j,d]))",
    "grouped by a constant": "O[h,i] = sum[j](Q[h,i] * K[h//4,j])",
    "pages": "O[b,d] = sum[j](K[page[b,j//4],j%4,d] * where(j < len[b], 1, 0))",
    "labels": "L[i] = x[i,y[i]] - log(sum[v](exp(x[i,v])))",
    "pairs of points": "y[i] = sum[j](sum[d](sq(x[i,d] - x[j,d])))",
    "window": "y[i] = sum[k](x[i+k] * w[k])",
    "renamed copies": "s[i] = sum[j](x[i,j])\ny[i,j] = x[i,j] / sum[j](x[i,j] * s[j])",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_small_sizes_fit_the_program(name: str) -> None:
    program = parse(PROGRAMS[name])
    extents = small_extents(program)
    integers = small_integers(program)
    given = {**dict.fromkeys(program.scalars, 1.0), **integers}
    unsized = {"window": ("i",), "pages": ("j",), "grouped heads": (), "renamed copies": ()}.get(name, ())
    bound = bind(program, small_shapes(program, extents), {axis: extents[axis] for axis in unsized}, given)
    assert bound == extents


def test_extents_differ_unless_they_must_agree() -> None:
    extents = small_extents(parse("O[b,h,i,e] = sum[j](sum[d](Q[b,h,i,d] * K[b,h,j,d]) * V[b,h,j,e])"))
    assert len(set(extents.values())) == len(extents)
    assert extents["j"] % 2 and extents["d"] % 2
    points = small_extents(parse(PROGRAMS["pairs of points"]))
    assert points["i"] == points["j"] != points["d"]


def test_an_axis_compared_with_a_reduced_one_reaches_past_its_first_tiles() -> None:
    extents = small_extents(parse("y[i] = sum[j](where(j <= i, x[i,j], 0))"))
    assert extents["i"] > extents["j"]
    window = small_extents(parse("y[i] = sum[j](where((j <= i) & (i - j < 12), x[i,j], 0))"))
    assert min(window["i"], window["j"]) > 12


def test_divided_axes_are_longer_than_the_divisor() -> None:
    extents = small_extents(parse(PROGRAMS["grouped by a constant"]))
    assert extents["h"] > 4
    program = parse(PROGRAMS["pages"])
    specs = input_specs(program, small_extents(program))
    assert specs["K"].shape[1] == 4 and specs["page"].kind == "integer"
    assert specs["K"].shape[0] == specs["page"].values[1] + 1


def test_integers_stay_in_the_range_of_what_they_index_or_are_compared_with() -> None:
    program = parse(PROGRAMS["labels"])
    extents = small_extents(program)
    assert input_specs(program, extents)["y"].values == (0, extents["v"] - 1)
    program = parse(PROGRAMS["pages"])
    extents = small_extents(program)
    assert input_specs(program, extents)["len"].values == (0, extents["j"])
    domain, rng = FieldDomain(), np.random.default_rng(0)
    drawn = draw_specs(input_specs(program, extents), domain, 8, rng)
    assert drawn["page"].min() >= 0 and drawn["page"].max() < drawn["K"].shape[1]
    assert drawn["page"].shape == input_specs(program, extents)["page"].shape


def test_truth_values_and_declared_dtypes() -> None:
    specs = input_specs(parse("y[i] = sum[j](where(m[i,j], x[i,j], 0))"), {"i": 3, "j": 7})
    assert specs["m"].kind == "truth" and specs["x"].kind == "real"
    program = parse("s: i32[i]\ny[i] = sum[j](where(s[i] == s[j], x[j], 0))")
    assert input_specs(program, small_extents(program))["s"].kind == "integer"
    undeclared = parse("y[i] = sum[j](where(s[i] == s[j], x[j], 0))")
    assert input_specs(undeclared, small_extents(undeclared), dtypes={"s": "i64"})["s"].kind == "integer"


def test_extremes_fall_everywhere_along_every_axis() -> None:
    program = parse("y[i] = sum[j](x[i,j])")
    specs = input_specs(program, {"i": 3, "j": 7})
    drawn = draw_specs(specs, FieldDomain(), 16, np.random.default_rng(1))["x"]
    for values in (drawn.shadow, np.abs(drawn.shadow)):
        for axis in (1, 2):
            places = set(values.argmax(axis).ravel().tolist())
            assert {0, drawn.shape[axis] - 1} <= places and len(places) == drawn.shape[axis]


def test_ties_are_ties_of_residues_and_zeros_are_zero() -> None:
    program = parse("y[i] = sum[j](x[i,j])")
    specs = input_specs(program, {"i": 3, "j": 7})
    drawn = draw_specs(specs, FieldDomain(), 16, np.random.default_rng(1))["x"]
    for trial, pattern in enumerate(PATTERNS):
        shadow, p, q = drawn.shadow[trial], drawn.p[trial], drawn.q[trial]
        assert len(np.unique(shadow)) == len(np.unique(p)) == len(np.unique(q))
        assert (len(np.unique(shadow)) <= 3) == (pattern.special == "ties")
        assert bool((shadow == 0).any()) == (pattern.special == "zeros")
        assert np.array_equal(shadow == 0, p == 0)
    assert full_entropy(16) == sum(not pattern.special for pattern in PATTERNS)


def test_negative_values_are_minus_squares() -> None:
    domain = FieldDomain()
    drawn = domain.draw(np.random.default_rng(0).normal(size=500), np.random.default_rng(1))
    character = [pow(int(p), domain.q, domain.p) == 1 for p in drawn.p]
    assert np.array_equal(character, drawn.shadow > 0)


def test_scalars() -> None:
    program = parse("y[i] = sum[j](x[i,j] * s + t) * K[i//g]")
    values = draw_scalars([program], {"t": 2.5}, FieldDomain(), 16, np.random.default_rng(0))
    assert values["g"] == 2 and float(values["t"].shadow) == 2.5
    assert (
        values["s"].shape == (16,) and (values["s"].shadow < 0).any() and (values["s"].shadow > 0).sum() > 8
    )


def test_what_is_added_under_a_root_is_not_negative() -> None:
    """The root of a sum with a negative number may have no value, and nothing would be compared."""
    program = parse("y[i] = x[i] * rsqrt(mean[d](sq(q[i,d] * s)) + eps) + log(t * x[i])")
    drawn = draw_scalars([program], {}, FieldDomain(), 16, np.random.default_rng(0))
    assert (drawn["eps"].shadow > 0).all()
    assert all((drawn[name].shadow < 0).any() for name in ("s", "t"))


def test_infinities_lie_at_both_ends_of_lines_and_in_one_tile() -> None:
    """So that some rows of what a mask cuts see them, and others do not."""
    specs = input_specs(parse("y[h,i] = sum[j](where(j <= i, x[h,i,j], 0))"), {"h": 3, "i": 7, "j": 9})
    domain, rng = FieldDomain(), np.random.default_rng(0)
    shadow = draw_specs(specs, domain, len(PATTERNS), rng, infinities=True)["x"].shadow
    holes = [np.isneginf(each) for each in shadow if np.isneginf(each).any()]
    assert len(holes) == 2 and not any(hole.all() for hole in holes)
    first, second = holes
    assert first[0, :, 0].all() and not first[0, :, -1].any()  # starts of the last lines
    assert first[1, -1].all() and not first[1, 0].any()  # ends of those before
    assert first[2, :2].all() and not first[2, 2:].any()  # one tile
    assert second[0, -1].all() and second[1, :2].all() and second[2, :, 0].all()
