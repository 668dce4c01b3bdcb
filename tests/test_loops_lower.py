"""Lowering of hand-made plans: every schedule computes what the program says, and reads well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from loops_plans import (
    SCHEDULES,
    attention,
    elementwise,
    guarded,
    obstructed,
    plain_sum,
    plain_sum_group,
    softmax,
    term,
    two_groups,
    two_kernels,
)

import eqfuse as eq
from eqfuse.errors import ScheduleError
from eqfuse.loops.interpreter import run
from eqfuse.loops.lower import lower
from eqfuse.loops.nodes import Loop
from eqfuse.loops.plan import GroupPlan, KernelPlan, Plan, Schedule
from eqfuse.loops.printer import show
from eqfuse.rules.merge import Group, State
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import evaluate
from eqfuse.terms.nodes import Local, Output, Program
from eqfuse.terms.parser import parse
from eqfuse.terms.sizes import bind
from eqfuse.verify.field.domain import FieldDomain

Array = np.ndarray[Any, Any]

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "softmax": {"x": (4, 7)},
    "plain_sum": {"x": (4, 7)},
    "guarded": {"x": (4, 7)},
    "obstructed": {"x": (4, 7)},
    "attention": {"Q": (2, 4, 5, 3), "K": (2, 2, 7, 3), "V": (2, 2, 7, 6)},
    "two_groups": {"x": (3, 5), "A": (5, 7), "B": (7, 2)},
    "two_kernels": {"x": (5, 7), "w": (5, 3)},
    "elementwise": {"x": (4,), "c": (3,)},
}
SCALARS = {"scale": 0.3, "g": 2}
PLANS = (softmax, attention, plain_sum, guarded, two_kernels)
TILES: tuple[dict[str, int], ...] = ({}, {"i": 2, "j": 3, "k": 3}, {"i": 1, "j": 1, "k": 1})


def inputs(
    name: str, program: Program, seed: int = 0
) -> tuple[dict[str, Array], dict[str, Any], dict[str, int]]:
    rng = np.random.default_rng(seed)
    tensors = {tensor: rng.normal(size=shape) for tensor, shape in SHAPES[name].items()}
    scalars = {scalar: SCALARS[scalar] for scalar in program.scalars}
    extents = bind(program, SHAPES[name], None, scalars)
    return tensors, scalars, extents


def agrees(name: str, program: Program, plan: Plan, tiles: dict[str, int], shards: int = 3) -> None:
    """The nest of the plan computes what the program says, in float64."""
    nest = lower(plan, program)
    tensors, scalars, extents = inputs(name, program)
    domain = FloatDomain("float64")
    expected = evaluate(program, tensors, scalars, extents, domain)
    counts = {shard: shards for shard, _ in nest.shards}
    found = run(nest, program, tensors, scalars, extents, domain, tiles=tiles, shards=counts)
    assert found.keys() == expected.keys()
    for output, value in expected.items():
        np.testing.assert_allclose(found[output], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tiles", TILES, ids=("one-tile", "ragged", "ones"))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", PLANS, ids=lambda make: str(make.__name__))
def test_every_schedule_computes_the_program(
    make: Callable[[Schedule], tuple[Program, Plan]], schedule: Schedule, tiles: dict[str, int]
) -> None:
    agrees(make.__name__, *make(schedule), tiles)


@pytest.mark.parametrize("first", SCHEDULES)
@pytest.mark.parametrize("second", SCHEDULES)
def test_two_groups_in_any_schedules(first: Schedule, second: Schedule) -> None:
    agrees("two_groups", *two_groups(first, second), {"j": 2, "k": 3})


@pytest.mark.parametrize("shards", [1, 2, 7, 11])
def test_any_number_of_shards(shards: int) -> None:
    """More shards than positions leave some empty, which must not matter."""
    agrees("softmax", *softmax("split_k"), {"j": 2}, shards)


def test_a_map_without_groups() -> None:
    agrees("elementwise", *elementwise(), {})


def test_attention_matches_numpy() -> None:
    """Against a formula written here, not the interpreter of terms."""
    program, plan = attention("rolling")
    tensors, scalars, extents = inputs("attention", program)
    q, k, v = (tensors[name] for name in "QKV")
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = np.einsum("bhid,bhjd->bhij", q, k) * 0.3
    scores = np.where(np.arange(7) <= np.arange(5)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    found = run(
        lower(plan, program), program, tensors, scalars, extents, FloatDomain(), tiles={"j": 3}, shards={}
    )
    np.testing.assert_allclose(found["O"], expected, rtol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_agrees_in_a_finite_field_with_trials(schedule: Schedule) -> None:
    program, plan = softmax(schedule)
    nest = lower(plan, program)
    domain = FieldDomain()
    rng = np.random.default_rng(1)
    tensors = {"x": domain.draw(rng.normal(size=(5, 4, 7)), rng)}
    extents = bind(program, SHAPES["softmax"])
    expected = evaluate(program, tensors, {}, extents, domain, batch=5)["y"]
    shards = {shard: 3 for shard, _ in nest.shards}
    found = run(nest, program, tensors, {}, extents, domain, tiles={"j": 3}, shards=shards, batch=5)["y"]
    assert domain.shape(found) == (5, 4, 7)
    np.testing.assert_array_equal(found.p, expected.p)


@pytest.mark.parametrize("schedule", ["rolling", "split_k"])
def test_no_merge_no_fusion(schedule: Schedule) -> None:
    program, plan = obstructed(schedule)
    with pytest.raises(ScheduleError, match=f"over 'j' cannot be walked as '{schedule}'") as caught:
        lower(plan, program)
    assert "1 / m in sum[j](round(x[i, j] / max[j](x[i, j]))): round does not commute" in caught.value.hint


@pytest.mark.parametrize("schedule", ["resident", "multi_pass"])
def test_no_merge_is_needed_for_separate_passes(schedule: Schedule) -> None:
    agrees("obstructed", *obstructed(schedule), {"j": 3})


def test_multi_pass_shares_a_loop_among_independent_states() -> None:
    program, plan = attention("multi_pass")
    (kernel,) = lower(plan, program).kernels
    loops = [stmt for stmt in kernel.body if isinstance(stmt, Loop)]
    assert [[value.name for value in loop.carried] for loop in loops] == [["m"], ["s", "o"]]


def test_auxiliary_states_that_nothing_needs_are_dropped() -> None:
    for schedule in SCHEDULES:
        program, plan = guarded(schedule)
        assert "n_tile" not in show(lower(plan, program))


def test_loop_invariants_go_before_the_loop() -> None:
    program = parse("y[i] = sum[j](sum[d](q[i,d]) * exp(q[i,0]) * x[i,j])")
    body = program.outputs[0].expr.body  # type: ignore[attr-defined]
    group = plain_sum_group("s", "j", body, ("i",))
    y = Output("y", ("i",), Local("s", ("i",)))
    plan = Plan("rolling", (KernelPlan("k", (y,), (GroupPlan(group, "rolling"),), ("i",), ()),))
    assert show(lower(plan, program)) == (
        """\
kernel k:
    parallel for i:
        t1 = sum[d](q[i, d])
        t2 = t1 * exp(q[i, 0])
        s = 0
        for j in tiles(0, N(j)):
            s_tile = sum[j](t2 * x[i, j])
            s_new = s + s_tile
            s = s_new
        y[i] = s"""
    )


def test_an_outer_product_is_repeated_not_held() -> None:
    """p[j] * V[j, e] would be a tile of three dims; its factor p[j] is what two sums share."""
    program = parse("y[i,e] = sum[j](exp(x[i,j]) * V[j,e])\nz[i,e] = sum[j](exp(x[i,j]) * V[j,e] * V[j,e])")
    bodies = [output.expr.body for output in program.outputs]  # type: ignore[attr-defined]
    states = tuple(State(name, "sum", body, ("i", "e")) for name, body in zip("ab", bodies, strict=True))
    outputs = tuple(
        Output(name, ("i", "e"), Local(state.name, state.dims))
        for name, state in zip("yz", states, strict=True)
    )
    kernel = KernelPlan("k", outputs, (GroupPlan(Group("j", states, None), "resident"),), ("i",), ("e",))
    assert show(lower(Plan("resident", (kernel,)), program)).splitlines()[2:5] == [
        "        t1[j] = exp(x[i, j])",
        "        a[e] = sum[j](t1[j] * V[j, e])",
        "        b[e] = sum[j](t1[j] * V[j, e] * V[j, e])",
    ]


def whole_inside_loop() -> tuple[Program, Plan]:
    """A tile of j is scaled by something that folds all of j and i, which are a loop and a parallel axis."""
    program = parse("y[i] = sum[j](x[i,j] * sum[i2](x[i2,j]) * max[j2](x[i,j2]))\ni2: axis[i]\nj2: axis[j]")
    text = "_[i,j] = x[i,j] * sum[i](x[i,j]) * max[j](x[i,j])"
    group = plain_sum_group("s", "j", parse(text).outputs[0].expr, ("i",))
    y = Output("y", ("i",), Local("s", ("i",)))
    return program, Plan("rolling", (KernelPlan("k", (y,), (GroupPlan(group, "rolling"),), ("i",), ()),))


def test_a_fold_over_an_axis_that_is_walked_is_renamed_or_placed_outside() -> None:
    program, plan = whole_inside_loop()
    nest = lower(plan, program)
    assert dict(nest.domains) == {"i_all": "i"}
    text = show(nest)
    assert "            t2[j] = sum[i_all](x[i_all, j])" in text
    assert "        t1 = max[j](x[i, j])" in text
    x = np.random.default_rng(0).normal(size=(4, 7))
    found = run(nest, program, {"x": x}, {}, {"i": 4, "j": 7}, FloatDomain(), tiles={"j": 3}, shards={})
    np.testing.assert_allclose(found["y"], (x * x.sum(0)).sum(1) * x.max(1), rtol=1e-12)


def test_a_fold_of_all_positions_may_not_depend_on_what_the_loop_carries_along_them() -> None:
    program = parse("y[i] = sum[j](x[i,j] * sum[j](x[i,j] * c[j]))")
    update = term("_[i] = s[i] + sum[j](h[j] * s[i])", "s", "h")
    inner = plain_sum_group("h", "d", term("_[j,d] = c[j] + d"), ("j",))
    group = plain_sum_group("s", "j", term("_[i,j] = x[i,j]"), ("i",))
    assert group.merge is not None
    merge = replace(group.merge, update=(replace(group.merge.update[0], value=update),))
    plans = (GroupPlan(inner, "resident"), GroupPlan(replace(group, merge=merge), "rolling"))
    y = Output("y", ("i",), Local("s", ("i",)))
    with pytest.raises(ScheduleError, match="all of axis 'j' depends on"):
        lower(Plan("rolling", (KernelPlan("k", (y,), plans, ("i",), ()),)), program)


def test_names_do_not_clash_with_the_program() -> None:
    """A scalar called t1, an axis called j_shard, a tensor called like a temporary."""
    program = parse("y[i] = sum[j](exp(softmax_s[i,j] * t1) * exp(softmax_s[i,j] * t1)) * x[i,0]")
    body = program.outputs[0].expr.args[0].body  # type: ignore[attr-defined]
    group = plain_sum_group("s", "j", body, ("i",))
    y = Output("y", ("i",), term("_[i] = s[i] * x[i,0] * max[j_shard](x[i,j_shard])", "s"))
    kernel = KernelPlan("softmax", (y,), (GroupPlan(group, "split_k"),), ("i",), ())
    nest = lower(Plan("split_k", (kernel,)), program)
    assert nest.shards == (("j_shard2", "j"),)
    assert [buffer.name for buffer in nest.buffers] == ["softmax_s2", "y"]
    assert "t2[j] = exp(softmax_s[i, j] * t1)" in show(nest)


def test_lowering_is_deterministic() -> None:
    for schedule in SCHEDULES:
        texts = {show(lower(plan, program)) for program, plan in (attention(schedule), attention(schedule))}
        assert len(texts) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_printed_attention(schedule: Schedule, golden: Callable[[str, str], None]) -> None:
    program, plan = attention(schedule)
    golden(f"loops_attention_{schedule}", show(lower(plan, program)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_printed_softmax(schedule: Schedule, golden: Callable[[str, str], None]) -> None:
    program, plan = softmax(schedule)
    golden(f"loops_softmax_{schedule}", show(lower(plan, program)))


def test_states_of_shards_lie_next_to_each_other_along_the_last_parallel_axis() -> None:
    kernel = eq.compile("y[t,f] = sum[c](x[t,c] * w[f,c])", target="h200", prefer="split_k", verify=False)
    buffers = {buffer.axes for buffer in kernel.compiled.chosen.nest.buffers if not buffer.is_output}
    assert buffers == {("t", "c_shard", "f")}
