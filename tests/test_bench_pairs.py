"""The pairs that equivalence is tried on: what an edit says is what float64 finds, and verdicts are counted."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from bench import pairs_report
from bench.pairs import DIFFERENT, SAME, Pair, pairs_of
from bench.pairs_report import first_of_use, judge
from bench.programs import Example, _is_read
from eqfuse.terms.parser import parse

PROGRAM = """x: f32[i, j]
o[i] = sum[j](where(x[i, j] > 2, exp(x[i, j] - 1) * (x[i, j] + 3), relu(x[i, j]))) / N(j) + max[j](x[i, j])"""


def made() -> list[Pair]:
    return [next(pairs) for seed in range(40) for pairs in pairs_of(PROGRAM, seed)]


def test_every_kind_of_edit_finds_a_place_and_parses() -> None:
    pairs = made()
    assert {pair.kind for pair in pairs} == {*DIFFERENT, *SAME}
    for pair in pairs:
        assert parse(pair.left) and parse(pair.right) and pair.left != pair.right


@pytest.mark.slow
def test_edits_that_keep_the_function_keep_its_values() -> None:
    for pair in made():
        if pair.equal:
            assert pair.differ(0) is not True, pair


@pytest.mark.parametrize("kind", ["one size", "one position", "one magnitude", "one constant"])
def test_edits_that_change_the_function_are_seen_where_they_say(kind: str) -> None:
    pairs = [pair for pair in made() if pair.kind == kind]
    assert pairs and any(pair.differ(0) for pair in pairs)


def test_a_pair_is_judged_against_what_float64_finds() -> None:
    left = "x: f32[i]\no[i] = x[i] + 1"
    assert judge(Pair("same", True, left, "x: f32[i]\no[i] = 1 + x[i]", {}, 0), 0)[0] == "right"
    assert judge(Pair("differs", False, left, "x: f32[i]\no[i] = x[i] + 2", {}, 0), 0)[0] == "right"
    assert judge(Pair("differs", False, left, "x: f32[i]\no[i] = 1 + x[i]", {}, 0), 0)[0] == "left out"


def test_an_edit_of_no_use_is_made_elsewhere() -> None:
    idle = Pair("idle", False, "x: f32[i]\no[i] = x[i]", "x: f32[i]\no[i] = x[i] + 0", {}, 0)
    useful = Pair("useful", False, "x: f32[i]\no[i] = x[i]", "x: f32[i]\no[i] = min(x[i], 500)", {}, 500)
    assert first_of_use(iter([idle, useful]), 0) == (useful, "")
    assert first_of_use(iter([idle]), 0) == (idle, "it makes no difference at any point")


def test_infinities_are_values_to_the_judge() -> None:
    left = "x: f32[i]\no = max[i](where(i < 0, x[i], -inf))"
    limited = "x: f32[i]\no = max[i](max(where(i < 0, x[i], -inf), -5))"
    turned = "x: f32[i]\no = max[i](where(i >= 0, -inf, x[i]))"
    assert Pair("limit", False, left, limited, {}, -5).differ(0) is True
    assert Pair("turned", True, left, turned, {}, 0).differ(0) is False


def test_what_a_division_by_0_makes_is_no_value_to_the_judge() -> None:
    left = "x: f32[i]\no[i] = where(x[i] == 0, x[i], -inf) - floor(1 / x[i])"
    limited = "x: f32[i]\no[i] = where(x[i] == 0, x[i], -inf) - floor(min(1 / x[i], 500))"
    assert Pair("limit", False, left, limited, {}, 0).differ(0) is False


def test_casts_are_no_rounding_to_the_judge() -> None:
    left, right = "x: f32[i]\no[i] = bf16(x[i])", "x: f32[i]\no[i] = bf16(0.999 * x[i])"
    assert Pair("constant", False, left, right, {}, 0).differ(0) is True


def test_a_state_variable_reads_no_tensor_and_a_program_that_is_refused_ends_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["y[i] = argmax.v[j](x[i, j], j)"]
    assert _is_read("x", lines) and not _is_read("v", lines)
    refused = Example("v: f32[i]\ny[i] = x[i]", (), {}, {}, 2, 2, 0, "here")
    monkeypatch.setattr(pairs_report, "programs", lambda: st.just(refused))
    tally = pairs_report.explore(3, 2)
    assert set(tally.counts) == {(pairs_report.REFUSED, "broken")}
    assert "never read" in tally.examples[0][2]


def test_sizes_at_which_an_edit_reads_what_is_not_there_tell_the_judge_nothing() -> None:
    """Of two positions x[2] is read, though nothing comes of it."""
    left = "x: f32[j]\nd = sum[j](where(j < 3, x[N(j) - 1 - j], 0) * where(j == N(j) - 1, 1, 0))"
    assert Pair("size", True, left, left.replace("x[N(j)", "x[3"), {}, 0).differ(0) is False
