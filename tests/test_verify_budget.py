"""Float errors against the unfused program's own, and special values position by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from eqfuse.verify.budget import (
    Error,
    ErrorReport,
    Measurement,
    distributions,
    float_error,
    input_sets,
    same_special,
    special_sets,
)


def variance(x: Any) -> Any:
    return np.mean(np.square(x - x.mean(1, keepdims=True)), axis=1)


def runs(function: Any, dtype: Any) -> Any:
    def run(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        with np.errstate(all="ignore"):
            return {"y": function(tensors["x"].astype(dtype)).astype(np.float64)}

    return run


@pytest.fixture
def inputs() -> dict[str, dict[str, Any]]:
    sets = input_sets({"x": (8, 4096)}, np.random.default_rng(0))
    return {kind: {"x": given["x"].astype(np.float32).astype(np.float64)} for kind, given in sets.items()}


def test_a_stable_form_is_within_the_budget(inputs: dict[str, dict[str, Any]]) -> None:
    def halves(x: Any) -> Any:
        a, b = x[:, :2048], x[:, 2048:]
        return (variance(a) + variance(b)) / 2 + np.square(a.mean(1) - b.mean(1)) / 4

    report = float_error(
        runs(variance, np.float64),
        runs(halves, np.float32),
        runs(variance, np.float32),
        inputs,
        factor=4.0,
        floor=1e-6,
    )
    assert report.ok, str(report)
    assert {m.distribution for m in report.measurements} == set(distributions())


def test_a_cancelling_form_is_over_the_budget_where_values_are_close(
    inputs: dict[str, dict[str, Any]],
) -> None:
    def expanded(x: Any) -> Any:
        return np.mean(x * x, axis=1) - np.square(x.mean(1))

    report = float_error(
        runs(variance, np.float64), runs(expanded, np.float32), runs(variance, np.float32), inputs
    )
    assert not report.ok and "over 2 times the unfused error" in str(report)
    bad = {m.distribution for m in report.measurements if not m.within(report.factor, report.floor)}
    assert "close" in bad


def test_overflow_is_a_special_value_out_of_place(inputs: dict[str, dict[str, Any]]) -> None:
    def naive(x: Any) -> Any:
        return np.log(np.exp(x).sum(1))

    def shifted(x: Any) -> Any:
        top = x.max(1)
        return top + np.log(np.exp(x - top[:, None]).sum(1))

    report = float_error(
        runs(shifted, np.float64), runs(naive, np.float32), runs(shifted, np.float32), inputs
    )
    assert not report.ok and "special values differ" in str(report)
    assert float_error(
        runs(shifted, np.float64), runs(shifted, np.float32), runs(shifted, np.float32), inputs
    ).ok


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
    assert "cancellation" in str(ErrorReport((fine, lost), 2.0, 1e-7)).splitlines()[2]


def test_nothing_measured_is_not_ok() -> None:
    assert not float_error(lambda t: {}, lambda t: {}, lambda t: {}, {}).ok
