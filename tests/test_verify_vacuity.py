"""What cannot be compared is not verified, and says so."""

from __future__ import annotations

import pytest

import eqfuse as eq
from eqfuse.errors import VerificationError
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


@pytest.mark.parametrize(
    "text", ["y = min[j](where(j < 2, x[j], -inf))", "y[i] = where(i >= 0, inf, x[i])", "y[i] = -inf"]
)
def test_infinities_that_a_program_is_made_of_are_compared(text: str) -> None:
    certificate = equivalent(text, text)
    assert certificate.ok and certificate.bound == 1.0
    other = equivalent(text, text.replace("inf", "1"))
    assert not other.ok


@pytest.mark.parametrize(
    ("left", "right", "unseen"),
    [
        ("y[i] = sum[j](where(j < 1000, x[i,j], 0))", "y[i] = sum[j](x[i,j])", "j < 1000"),
        ("y[i] = x[i // 1000]", "y[i] = x[0 * i]", "i // 1000"),
        ("y[i] = x[i] * (i % 1000)", "y[i] = x[i] * i", "i % 1000"),
        ("y[i] = x[i] * minimum(i, 1000)", "y[i] = x[i] * i", "min(i, 1000)"),
        ("y[i] = where(i // 100 == 0, x[i], 0)", "y[i] = x[i]", "i // 100 == 0"),
    ],
)
def test_sizes_too_small_to_tell_programs_apart_verify_nothing(left: str, right: str, unseen: str) -> None:
    certificate = equivalent(left, right)
    assert not certificate.ok and certificate.bound == 1.0 and certificate.counterexample is None
    assert certificate.reason.startswith("the sizes tried are too small to tell the programs apart: ")
    assert unseen in certificate.reason
    assert equivalent(left, left)
    assert any(unseen in text for text in equivalent(left, left).not_covered)


@pytest.mark.parametrize("divisor", ["4", "60", "N(j)", "g"])
def test_divisions_that_are_seen_are_no_obstacle(divisor: str) -> None:
    text = f"y[i] = sum[j](x[i,j] * (j // {divisor} + j % {divisor}))"
    assert equivalent(
        text, text.replace("x[i,j] * (", "(").replace(f"% {divisor})", f"% {divisor}) * x[i,j]")
    )


def test_a_program_without_a_sample_is_not_compiled() -> None:
    with pytest.raises(VerificationError, match="too little could be compared") as caught:
        eq.compile("x: f32[i]\ny[i] = 1 / (x[i] - x[i])", target="cpu")
    assert "infinite or NaN in the program itself" in str(caught.value)
