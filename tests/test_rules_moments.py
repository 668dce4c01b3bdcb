"""However somebody writes a variance, it is derived as the sum of squares around the mean, in one pass."""

from __future__ import annotations

import numpy as np
import pytest
from rules_merges import derivation
from rules_programs import COVARIANCES, EXTENTS, VARIANCES

import eqfuse as eq
from eqfuse.terms.printer import show

MEAN_X = ("sum[j](x[i, j]) / N(j)", "sum[j](x[i, j] / N(j))")


@pytest.mark.parametrize("name", VARIANCES)
def test_a_variance_is_that_of_differences(name: str) -> None:
    found = derivation(f"v[i] = {VARIANCES[name]}", EXTENTS)
    (output,) = found.derived.outputs
    assert show(output.expr) in {f"sum[j](sq(x[i, j] - {mean})) / N(j)" for mean in MEAN_X}
    assert all(group.merge is not None for group in found.groups)


@pytest.mark.parametrize("name", COVARIANCES)
def test_a_covariance_is_that_of_differences(name: str) -> None:
    found = derivation(f"v[i] = {COVARIANCES[name]}", EXTENTS)
    (output,) = found.derived.outputs
    centred = "(x[i, j] - sum[j](x[i, j]) / N(j)) * (u[i, j] - sum[j](u[i, j]) / N(j))"
    assert show(output.expr) == f"sum[j]({centred}) / N(j)"
    assert all(group.merge is not None for group in found.groups)


def test_another_count_is_no_mean() -> None:
    """The sum over one axis by the size of another is left as it is."""
    found = derivation("v[i] = sum[j](sq(x[i,j])) / N(i) - sq(sum[j](x[i,j]) / N(i))", EXTENTS)
    (output,) = found.derived.outputs
    assert show(output.expr) == "sum[j](sq(x[i, j])) / N(i) - sq(sum[j](x[i, j]) / N(i))"


@pytest.mark.parametrize("name", ["divided_first", "square_times_count"])
def test_digits_are_kept_far_from_zero(name: str) -> None:
    """In float32 the difference of squares of 1e4 has no digit of a variance of 1."""
    x = 1e4 + np.random.default_rng(0).standard_normal((3, 500))
    kernel = eq.compile(f"v[i] = {VARIANCES[name]}", prefer="rolling", target="cpu")
    found = np.asarray(kernel(x=x.astype(np.float32)))
    np.testing.assert_allclose(found, x.astype(np.float32).astype(np.float64).var(1), rtol=1e-3)
