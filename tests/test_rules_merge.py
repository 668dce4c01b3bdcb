"""Derived merges compute what the unfused program computes, on ordinary numbers and on the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from conftest import Golden
from rules_merges import (
    Derivation,
    calls,
    derivation,
    fused,
    merge_expressions,
    partitioned,
    reads,
    rolling,
    unfused,
)
from rules_programs import EXTENTS, FUSED, SCALE, SPECIAL_ROWS, UNFUSED, random_tensors, with_special_rows

import eqfuse as eq
from eqfuse.rules.merge import Combine, Group, Merge
from eqfuse.rules.merge_search import derive_group
from eqfuse.rules.printer import MergeText, show_group
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.nodes import COMBINE, Axis, Call, Const, Load, Local, Reduce, call, walk

WALKS = {
    "tiles of 1": rolling(1),
    "tiles of 4, a ragged last one": rolling(4),
    "one tile": rolling(EXTENTS["j"]),
    **{f"random parts, seed {seed}": partitioned(seed) for seed in range(2)},
}


@cache
def derived(name: str) -> Derivation:
    return derivation(FUSED[name], EXTENTS)


def scalars(found: Derivation) -> Mapping[str, float]:
    return dict.fromkeys(found.program.scalars, SCALE)


@pytest.mark.parametrize("name", FUSED)
def test_every_group_has_a_merge(name: str) -> None:
    for group in derived(name).groups:
        assert group.merge is not None, show_group(group)
        assert {u.state for u in group.merge.update} == {s.name for s in group.states}
        assert {c.state for c in group.merge.combine} == {s.name for s in group.states}


@pytest.mark.parametrize("name", FUSED)
def test_a_merge_reads_only_what_is_there(name: str) -> None:
    """An update reads old states, its parts and new states made before it; a combine the same of two parts."""
    outer: set[str] = set()
    for group in derived(name).groups:
        assert group.merge is not None
        names = {s.name for s in group.states}
        there = outer | names
        for update in group.merge.update:
            for part in update.parts:
                assert reads(part.body) <= there - names, part
                there.add(part.name)
            assert reads(update.value) <= there, update
            there.add(f"{update.state}_new")
        there = outer | {f"{n}_{side}" for n in names for side in "ab"}
        for entry in group.merge.combine:
            assert reads(entry.value) <= there, entry
            there.add(f"{entry.state}_new")
        for last in group.merge.finish:
            assert reads(last.value) <= outer | names, last
        outer |= names


@pytest.mark.parametrize("way", WALKS)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.slow(but=["tiles of", "seed 0"])
def test_merged_is_unfused(name: str, way: str) -> None:
    found = derived(name)
    tensors = random_tensors(found.program)
    want = unfused(found, tensors, scalars(found))
    got = fused(found, tensors, scalars(found), WALKS[way])
    for output, value in want.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", WALKS)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.slow(but=["tiles of", "seed 0"])
def test_special_rows_are_unfused(name: str, way: str) -> None:
    """Infinities, NaN and zeros come out position by position as the unfused program has them."""
    found = derived(name)
    tensors = random_tensors(found.program)
    first = "m" if name == "inertia" else "x"
    tensors[first] = with_special_rows(tensors[first])
    want = unfused(found, tensors, scalars(found))
    got = fused(found, tensors, scalars(found), WALKS[way])
    for output, value in want.items():
        for row, index in SPECIAL_ROWS.items():
            np.testing.assert_allclose(
                got[output][index], value[index], rtol=1e-9, atol=1e-11, err_msg=f"{output}, {row}"
            )


# -- stability ---------------------------------------------------------------------------------------


STABLE = (
    "softmax",
    "naive_softmax",
    "scaled_softmax",
    "softmin",
    "attention",
    "softmax_variance",
    "softmax_entropy",
)
STABLE += ("logsumexp", "naive_logsumexp", "one_more_weight", "unscaled_exponentials", "largest_probability")
STABLE += ("exponentials_up_to_here", "factors_of_a_softmax")


@pytest.mark.parametrize("magnitude", [1e3, 1e6])
@pytest.mark.parametrize("name", STABLE)
def test_no_exponential_overflows(name: str, magnitude: float) -> None:
    """Rows spread over thousands: every exponent of the merge is at most 0, so nothing becomes infinite."""
    found = derived(name)
    tensors = random_tensors(found.program)
    tensors["x"] = tensors["x"] * magnitude
    for walked in WALKS.values():
        for output, value in fused(found, tensors, scalars(found), walked).items():
            assert np.isfinite(value).all(), output


@pytest.mark.parametrize("name", STABLE)
def test_rows_far_from_zero(name: str) -> None:
    """The guard of a maximum that is still -inf stands at 0: a row of -2000 must not become e^2000 times nothing."""
    found = derived(name)
    for offset in (-2000, 2000):
        tensors = random_tensors(found.program)
        if name != "attention":  # there it is the scores that would have to be far from 0
            tensors["x"] = tensors["x"] + offset
        for walked in WALKS.values():
            for output, value in fused(found, tensors, scalars(found), walked).items():
                assert np.isfinite(value).all(), output


def test_an_unstable_program_gets_its_stable_form() -> None:
    """exp(x) / sum(exp(x)) overflows as it is written, and does not as it is derived."""
    found = derived("naive_softmax")
    tensors = {"x": np.array(random_tensors(found.program)["x"]) + 2000}
    stable = derived("softmax")
    want = unfused(stable, tensors, {})["y"]
    assert np.isnan(unfused(found, tensors, {})["y"]).all()
    np.testing.assert_allclose(fused(found, tensors, {}, rolling(4))["y"], want, rtol=1e-10)


@pytest.mark.parametrize("name", ["naive_logsumexp", "logsumexp"])
def test_logsumexp_of_large_numbers(name: str) -> None:
    found = derived(name)
    x = random_tensors(found.program)["x"]
    want = unfused(found, {"x": x}, {})["y"] + 5000
    np.testing.assert_allclose(fused(found, {"x": x + 5000}, {}, rolling(4))["y"], want, rtol=1e-12)


def test_a_factor_that_overflows_is_infinite_and_not_0() -> None:
    """exp(x - mean(x)) with one x of 1000 above the mean; a merge must not lose it."""
    found = derived("exponentials_around_the_mean")
    x = random_tensors(found.program)["x"]
    for position in (0, 5, -1):
        spread = x.copy()
        spread[:, position] += 2000
        want = unfused(found, {"x": spread}, {})["y"]
        assert np.isinf(want).all()
        for walked in WALKS.values():
            np.testing.assert_array_equal(fused(found, {"x": spread}, {}, walked)["y"], want)


def test_a_shift_by_a_run_time_scale_needs_one_maximum() -> None:
    """exp(scale * (x - max)) is as its author shifted it, whatever the sign of the scale."""
    (group,) = derived("scaled_softmax").groups
    assert [s.op for s in group.states] == ["max", "sum"]


def test_equal_accumulators_are_shared() -> None:
    """The count and the moments below the fourth are kept once, whichever way their products are written."""
    (group,) = derived("fourth_moment").groups
    accumulators = [s for s in group.states if s.auxiliary]
    assert len({s.body for s in accumulators}) == len(accumulators) == 4


def test_states_of_equal_work_are_updated_as_the_program_has_them() -> None:
    """A sum that is put together in another way is no more work: it does not change places with a maximum."""
    for source in (
        "y[i] = sum[j](sq(x[i,j])) + max[j](abs(x[i,j]))",
        "y[i] = max[j](abs(x[i,j])) + sum[j](sq(x[i,j]))",
    ):
        (group,) = derivation(source, EXTENTS).groups
        assert group.merge is not None
        assert [update.state for update in group.merge.update] == [state.name for state in group.states]


def test_accumulators_are_not_recovered() -> None:
    """Nothing reads an auxiliary state at the end."""
    for name in FUSED:
        for group in derived(name).groups:
            assert group.merge is not None
            helpers = {s.name for s in group.states if s.auxiliary}
            assert not helpers & {last.state for last in group.merge.finish}


def test_a_state_is_not_restored_from_sums_that_its_body_does_not_read() -> None:
    """With an infinity sum[i](x[i] - sum[i](x[i])) is NaN, and the other sum is infinite."""
    source = "x: f32[i]\nc = sum[i](mean[i](x[i]) + x[i])\nd = sum[i](x[i] - sum[i](x[i]))"
    kernel = eq.compile(source, prefer="rolling", target="cpu", native="off")
    x = torch.tensor([-math.inf, -math.inf, 1.0, 2.0, 3.0])
    c, d = kernel(x=x)
    assert c == -math.inf and d.isnan()


@pytest.mark.parametrize("factor", [1e-40, 1e-30, 1e30])
def test_scales_of_denormal_rows_stay_finite(factor: float) -> None:
    """x / (m / 448) is finite in float32 where x * (448 / m) is not."""
    found = derived("quantise_gemm")
    tensors = {n: v.astype(np.float32) for n, v in random_tensors(found.program).items()}
    tensors["x"] = tensors["x"] * np.float32(factor)
    single = FloatDomain("float32")
    want = unfused(found, tensors, {}, single)["C"]
    assert np.isfinite(want).all()
    for walked in WALKS.values():
        assert np.isfinite(fused(found, tensors, {}, walked, single)["C"]).all()


def test_what_another_pass_has_stored_stays_where_it_is() -> None:
    """A tile divided by a stored maximum, which may be 0 or so small that its reciprocal is infinite."""
    stored = call("div", Load("stored1", (Axis("r"),)), Const(448))
    scaled = call("div", Load("x", (Axis("r"), Axis("c"))), stored)
    body = call("mul", scaled, Load("W", (Axis("c"), Axis("o"))))
    group, _ = derive_group("c", [Reduce("sum", "c", body)], ("r", "o", "c"))
    assert group.merge is not None
    ((update,), (state,)) = group.merge.update, group.states
    assert [part.body for part in update.parts] == [body]
    assert update.value == call("add", Local(state.name, state.dims), Local(update.parts[0].name, state.dims))


def test_rows_of_zeros_are_divided_by_a_stored_maximum() -> None:
    """The program has 0 / 0 there, and every schedule on a GPU too, whatever it stores."""
    source = "s[r] = max[c](abs(x[r,c])) / 448\ny[r,o] = sum[c](x[r,c] / s[r] * W[c,o]) * s[r]"
    for schedule in ("rolling", "split_k"):
        assert eq.compile(source, prefer=schedule, target="h200").certificate.ok


MOMENTS = ("variance", "weighted_variance", "covariance", "difference_of_moments", "softmax_variance")


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_do_not_cancel(name: str) -> None:
    """Values around 1e6: what subtracts squared means keeps no digit there, Chan's form keeps most."""
    found = derived(name)
    tensors = random_tensors(found.program)
    shifted = {
        n: v + 1e6 if n == ("u" if name == "softmax_variance" else "x") else v for n, v in tensors.items()
    }
    exact = unfused(found, tensors, {})["v"]
    for walked in WALKS.values():
        np.testing.assert_allclose(fused(found, shifted, {}, walked)["v"], exact, rtol=1e-6)


def test_scaled_norm_stays_scaled() -> None:
    """The root of a sum of squares, of numbers whose squares overflow."""
    found = derived("scaled_l2")
    x = random_tensors(found.program)["x"]
    for factor in (1e200, 1e-200):
        for walked in WALKS.values():
            got = fused(found, {"x": x * factor}, {}, walked)["n"]
            np.testing.assert_allclose(got, np.sqrt((x**2).sum(1)) * factor, rtol=1e-12)


def test_the_scale_stays_inside_the_cast() -> None:
    """What is cast to f8 is at most its largest number, whatever the magnitude of the row."""
    found = derived("quantise_gemm")
    (group,) = found.groups
    casts = list(calls(merge_expressions(group), "f8e4m3"))
    assert casts and all(any(isinstance(n, Local) for n in walk(arg)) for (arg,) in casts)
    tensors = random_tensors(found.program)
    for factor in (1e-6, 1.0, 1e6):
        scaled = tensors | {"x": tensors["x"] * factor}
        exact = scaled["x"] @ tensors["w"].T
        # half a unit of f8's 3-bit fraction for each product, and the subnormals' step
        bound = (np.abs(scaled["x"]) @ np.abs(tensors["w"]).T) * 2**-4 + np.abs(tensors["w"]).sum(1) * (
            np.abs(scaled["x"]).max(1, keepdims=True) / 448 * 2**-10
        )
        for walked in WALKS.values():
            got = fused(found, scaled, {}, walked, FloatDomain("float64"))["C"]
            assert (np.abs(got - exact) <= bound).all()


def test_strict_casts_are_opaque() -> None:
    found = derivation(FUSED["quantise_gemm"], EXTENTS, strict_casts=True)
    (group,) = found.groups
    assert group.merge is None
    assert "f8e4m3" in str(group.obstacles[0].factor)


# -- shape of what is derived -------------------------------------------------------------------------


def test_accumulators_are_added_to_close_a_merge() -> None:
    """LayerNorm into a matrix product needs the sum of the weights beside the product; softmax needs nothing."""
    (group,) = derived("layernorm_gemm").groups
    assert any(state.auxiliary for state in group.states)
    (group,) = derived("softmax").groups
    assert not any(state.auxiliary for state in group.states)


def test_sums_commute_where_that_shows_a_cascade() -> None:
    """The moment of inertia sums over dimensions inside the sum over particles; fused, particles come first."""
    over_particles = derived("inertia").groups[0]
    assert over_particles.axis == "j" and over_particles.merge is not None
    assert [s.dims for s in over_particles.states if not s.auxiliary] == [("i", "d"), ("i",), ("i", "d")]


def test_repairs_are_total() -> None:
    """Exponents read a maximum through `finite`, scales divide through `invertible`."""
    (group,) = derived("softmax").groups
    differences = [arg for (arg,) in calls(merge_expressions(group), "exp")]
    assert differences
    for difference in differences:
        maxima = [n for n in walk(difference) if isinstance(n, Local)]
        guarded = [args[0] for args in calls([difference], "finite")]
        assert set(maxima) == set(guarded)
    (group,) = derived("scaled_l2").groups
    assert group.merge is not None
    for _, divisor in calls([c.value for c in group.merge.combine], "div"):
        assert isinstance(divisor, Call | Const) and str(divisor).startswith("invertible(")


GOLDEN = ("softmax", "attention", "variance", "scaled_l2", "quantise_gemm")


@pytest.mark.parametrize("name", GOLDEN)
def test_printed_merge(name: str, golden: Golden) -> None:
    golden(f"merge_{name}", str(MergeText(derived(name).groups)))


# -- programs that must not fuse ----------------------------------------------------------------------


@pytest.mark.parametrize("name", UNFUSED)
def test_an_obstacle_is_named(name: str) -> None:
    """No merge, and the obstacle says which reduction, which factor in it, and what could not be met."""
    source, inside = UNFUSED[name]
    refused = [g for g in derivation(source, EXTENTS).groups if g.merge is None]
    assert refused
    for group in refused:
        assert group.obstacles
        for obstacle in group.obstacles:
            assert str(obstacle.reduction).startswith(inside)
            assert any(obstacle.factor is node for node in walk(obstacle.reduction))
            assert obstacle.condition.startswith("no ") and "over j" in obstacle.condition.replace(
                "along", "over"
            )


@pytest.mark.parametrize(
    ("source", "condition"),
    [
        (
            "y[i] = max[j](x[i,j] / sum[j](x[i,j]))",
            "no fact says that sum_j >= 0, so that it could leave the max over j",
        ),
        (
            "y[i] = max[j](-x[i,j] * min[j](x[i,j]))",
            "no fact says that min_j >= 0, so that it could leave the max over j",
        ),
        (
            "y[i] = sum[j](sqrt(abs(x[i,j]) * (sum[j](x[i,j]) + 1)))",
            "no fact says that sum_j + 1 >= 0, so that it could leave the sum over j",
        ),
        (
            "y[i] = prod[j](x[i,j] - max[j](x[i,j]))",
            "no rule takes a factor or term of it out of the prod over j",
        ),
    ],
)
def test_a_missing_condition_is_named(source: str, condition: str) -> None:
    (obstacle,) = (o for group in derivation(source, EXTENTS).groups for o in group.obstacles)
    assert obstacle.condition == condition


@pytest.mark.parametrize("name", UNFUSED)
def test_what_is_not_fused_is_still_right(name: str) -> None:
    source, _ = UNFUSED[name]
    found = derivation(source, EXTENTS)
    tensors = random_tensors(found.program)
    want = unfused(found, tensors, {})
    for output, value in fused(found, tensors, {}, rolling(4)).items():
        np.testing.assert_allclose(value, want[output], rtol=1e-12)


# -- the tests themselves can fail --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "attention", "variance", "scaled_l2", "layernorm_gemm"])
def test_a_dropped_repair_is_seen(name: str) -> None:
    """The same walks with states that are added up unrepaired do not give the unfused values."""
    found = derived(name)

    def unrepaired(group: Group) -> Group:
        assert group.merge is not None
        plain = tuple(
            Combine(s.name, call(COMBINE[s.op], Local(f"{s.name}_a", s.dims), Local(f"{s.name}_b", s.dims)))
            for s in group.states
        )
        return replace(group, merge=Merge(group.merge.update, plain, group.merge.finish))

    kernels = tuple(replace(k, groups=tuple(map(unrepaired, k.groups))) for k in found.kernels)
    tensors = random_tensors(found.program)
    want = unfused(found, tensors, scalars(found))
    got = fused(replace(found, kernels=kernels), tensors, scalars(found), partitioned(0))
    assert not all(np.allclose(got[o], want[o], rtol=1e-6) for o in want)
