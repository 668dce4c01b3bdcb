"""What cannot be compared is not verified, and says so."""

from __future__ import annotations

import pytest

from eqfuse.verify.equivalence import equivalent


@pytest.mark.parametrize(
    "text",
    [
        "y[i] = 1 / (x[i] - x[i])",
        "y[i] = sqrt(0 - sq(x[i]) - 1)",
        "y[i] = log(0 - abs(x[i]) - 1)",
        "y[i] = sum[j](1 / (x[i,j] - x[i,j]))",
    ],
)
def test_a_program_without_a_value_is_not_verified(text: str) -> None:
    certificate = equivalent(text, text)
    assert not certificate.ok and certificate.bound == 1.0
    assert certificate.reason.startswith("too little could be compared in stage 'second program': ")
    assert "was compared 0 times" in certificate.reason


def test_one_output_without_a_value_is_enough() -> None:
    text = "y[i] = x[i]\nz[i] = 1 / (x[i] - x[i])"
    assert "too little could be compared" in equivalent(text, text).reason


def test_outputs_of_different_shapes_are_told_apart() -> None:
    reason = equivalent("y[i] = sum[j](x[i,j])", "y[i,j] = x[i,j]").reason
    assert reason == "output 'y' has 1 and 2 dimensions"
    reason = equivalent("y[i,j] = x[i,j]", "y[j,i] = x[i,j]").reason
    assert reason == (
        "output 'y' has axes [i, j] in one program and [j, i] in the other, which are dimensions of different inputs"
    )
