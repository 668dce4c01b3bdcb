"""Conjunctions of conditions: numbers that meet them are solved for, or none do by proof."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.terms.nodes import Call, Expr, walk
from eqfuse.terms.parser import parse
from eqfuse.verify.inputs import roots
from eqfuse.verify.solve import Variable, is_dead, solved

equivalent = partial(eq.equivalent, prove=False)

RARE = [
    "bf16(2 * max(1e-30, x[i])) > 1e30",
    "(x[i] > 300) & (x[i] < 301) & (z[i] > 200) & (z[i] < 201) & (w[i] > 100) & (w[i] < 101)",
    "(x[i] > 300) & (z[i] < -200) & (w[i] > 1e5) & (v[i] < -1e4)",
    "(x[i] > z[i]) & (z[i] > w[i]) & (w[i] > v[i]) & (v[i] > 100) & (x[i] < 200)",
    "(x[i] > 2) & (z[i] < x[i] - 1) & (w[i] > z[i] + 5) & (v[i] < w[i] - 7) & (x[i] < 3)",
    "(x[i] * z[i] > 98765) & (exp(w[i]) < 1e-20)",
    "(sq(x[i]) == 2.25) & (abs(z[i]) < 1e-20) & (tanh(w[i]) > 0.9999)",
    "(x[i] + z[i] == w[i]) & (w[i] > 12345)",
    "not (x[i] < 3000 or x[i] > 3001) and (floor(z[i] * 7) > 2500) and z[i] * 7 < 2501.5",
    "(n[i] * n[i] > 48) & (n[i] * n[i] < 60) & (n[i] < 0)",
    "(n[i] >> 12 == 7) & (x[i] < -500)",
]
"""Conditions that no usual trial meets."""

IMPOSSIBLE = [
    "x[i] > 5 and x[i] < 3",
    "x[i] >= 3 and x[i] < 3",
    "x[i] > z[i] and z[i] > x[i]",
    "x[i] >= z[i] and z[i] >= w[i] + 2 and w[i] + 1 > x[i]",
    "(n[i] * n[i] > 50) & (n[i] * n[i] < 60) & (n[i] < 0)",
    "(x[i] > 1 or z[i] > 2) and not (x[i] > 0) and z[i] < 1",
    "exp(x[i]) > 3 and x[i] < 1",
]

READ = "0 * (x[i] + z[i] + w[i] + n[i])"


def _goal(condition: str) -> tuple[tuple[Expr, bool], ...]:
    program = parse(f"n: i32[i]\ny[i] = where({condition}, 1, 0) + {READ}")
    choice = next(node for node in walk(*roots(program)) if isinstance(node, Call) and node.fn == "where")
    return ((choice.args[0], True),)


VARIABLES = {"n": Variable.of_dtype("i32", "integer")}


@pytest.mark.parametrize("condition", RARE)
def test_numbers_that_meet_rare_conditions_are_found(condition: str) -> None:
    goal = _goal(condition)
    assert solved(goal, VARIABLES, {"i": 1}, {}, np.random.default_rng(0)) is not None
    assert not is_dead(goal, VARIABLES)


@pytest.mark.parametrize("condition", IMPOSSIBLE)
def test_conditions_that_exclude_each_other_are_proved_to(condition: str) -> None:
    goal = _goal(condition)
    assert is_dead(goal, VARIABLES)
    assert solved(goal, VARIABLES, {"i": 1}, {}, np.random.default_rng(0)) is None


@pytest.mark.parametrize("condition", RARE)
def test_what_a_rare_condition_changes_is_a_counterexample(condition: str) -> None:
    plain = f"n: i32[i]\ny[i] = v[i] + {READ}"
    found = equivalent(plain, f"{plain} + where({condition}, 1, 0)")
    assert not found.ok and found.counterexample is not None


@pytest.mark.parametrize("condition", IMPOSSIBLE)
def test_what_nothing_meets_changes_nothing(condition: str) -> None:
    plain = f"n: i32[i]\ny[i] = v[i] + {READ}"
    found = equivalent(plain, f"{plain} + where({condition}, 1, 0)")
    assert found.ok and not found.untaken and not found.supposed


def test_choices_in_choices_are_met_too() -> None:
    inner = "where(x[i] > 300, where(z[i] < -400, where(w[i] > 1e5, where(v[i] < -1e4, 1, 0), 0), 0), 0)"
    plain = "y[i] = v[i] + 0 * (x[i] + z[i] + w[i])"
    assert equivalent(plain, f"{plain} + {inner}").counterexample is not None


def test_what_is_neither_found_nor_impossible_is_a_side_that_no_trial_took() -> None:
    rare = "(x[i] - sin(1e3 * x[i]) > 7000.5) & (sin(x[i] * x[i]) > 0.9999999) & (x[i] < 7000.51)"
    found = equivalent("y[i] = v[i] + 0 * x[i]", f"y[i] = v[i] + 0 * x[i] + where({rare}, 1, 0)")
    assert not found.ok and found.untaken and not found.supposed
    assert "no trial took a side of a branch" in found.reason
