"""Float errors against the unfused program's own, and special values position by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eqfuse.verify.budget import FACTOR, FLOOR, Error, Measurement, distributions, same_special, special_sets

Form = Callable[[Any], Any]


def variance(x: Any) -> Any:
    return np.mean(np.square(x - x.mean(1, keepdims=True)), axis=1)


def measured(form: Form, plain: Form, factor: float = FACTOR, floor: float = FLOOR) -> dict[str, bool]:
    """Which inputs a form in float32 computes within the budget of the plain one."""
    found = {}
    rng = np.random.default_rng(0)
    for kind, draw in distributions().items():
        x = draw((8, 4096), rng).astype(np.float32)
        with np.errstate(all="ignore"):
            exact, fused, unfused = plain(x.astype(np.float64)), form(x), plain(x)
        errors = Error.of(exact, fused), Error.of(exact, unfused)
        found[kind] = Measurement(kind, "y", *errors, same_special(unfused, fused)).within(factor, floor)
    return found


def test_a_stable_form_is_within_the_budget() -> None:
    def halves(x: Any) -> Any:
        a, b = x[:, :2048], x[:, 2048:]
        return (variance(a) + variance(b)) / 2 + np.square(a.mean(1) - b.mean(1)) / 4

    found = measured(halves, variance, factor=4.0, floor=1e-6)
    assert all(found.values()) and set(found) == set(distributions())


def test_a_cancelling_form_is_over_the_budget_where_values_are_close() -> None:
    def expanded(x: Any) -> Any:
        return np.mean(x * x, axis=1) - np.square(x.mean(1))

    assert not measured(expanded, variance)["close"]


def test_overflow_is_a_special_value_out_of_place() -> None:
    def naive(x: Any) -> Any:
        return np.log(np.exp(x).sum(1))

    def shifted(x: Any) -> Any:
        top = x.max(1)
        return top + np.log(np.exp(x - top[:, None]).sum(1))

    assert not all(measured(naive, shifted).values())
    assert all(measured(shifted, shifted).values())


def test_errors_are_relative_to_the_rms_of_the_reference() -> None:
    error = Error.of([3.0, -4.0, np.nan], [3.0, -4.5, np.nan])
    assert error.max == pytest.approx(0.5 / np.sqrt(12.5))
    assert error.rms == pytest.approx(np.sqrt(0.125) / np.sqrt(12.5))
    with pytest.raises(ValueError, match="shapes differ"):
        Error.of([1.0], [1.0, 2.0])


def test_special_values_are_compared_position_by_position() -> None:
    reference = [1.0, np.nan, np.inf, -np.inf]
    assert same_special(reference, [2.0, np.nan, np.inf, -np.inf])
    for wrong in (
        [np.nan] * 4,
        [1.0, 2.0, np.inf, -np.inf],
        [1.0, np.nan, -np.inf, -np.inf],
        [1.0, np.nan, 9.0, 9.0],
    ):
        report = same_special(reference, wrong)
        assert not report and report.count >= 1
    found = same_special(np.array([[1.0, np.nan]]), np.array([[np.inf, 0.0]]))
    assert found.mismatches[0] == ((0, 0), 1.0, np.inf) and "2 special values differ" in str(found)


def test_special_sets_are_copies_with_one_line_or_element_changed() -> None:
    given = {"x": np.ones((2, 3)), "s": np.ones(2)}
    sets = special_sets(given)
    assert all((array == 1).all() for array in given.values())
    assert sets["zero line"]["x"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert np.isnan(sets["NaN"]["x"]).sum() == 1 and np.isneginf(sets["-inf line"]["s"]).all()
    assert (sets["denormal"]["x"].astype(np.float32) > 0).all()
    assert (sets["denormal"]["x"] < np.finfo(np.float32).smallest_normal).all()


def test_lost_digits_of_the_unfused_program_are_flagged() -> None:
    fine = Measurement("close", "y", Error(0, 1e-6), Error(0, 1e-6), same_special([1.0], [1.0]))
    lost = Measurement("close", "y", Error(0, 1e-3), Error(0, 1e-3), same_special([1.0], [1.0]))
    assert not fine.cancels() and lost.cancels()
