"""Stages of the compiler at other sizes than the usual ones, on values at thresholds, and with numbers far out brought nearer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.terms.parser import parse
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.equivalence import Stage, check_stages
from eqfuse.verify.sizes import small_extents

ATTENTION = """S[i,j] = sum[d](Q[i,d] * K[j,d])
T[i,j] = where({mask}, -inf, S[i,j])
P[i,j] = exp(T[i,j] - max[j](T[i,j]))
O[i,e] = sum[j](P[i,j] / sum[j](P[i,j]) * V[j,e])"""


def compared(text: str, stage: str) -> Certificate:
    """The certificate of a program as a stage of another."""
    program, other = parse(text), parse(stage)

    def stages(extents: Mapping[str, int], number: int) -> Sequence[Stage]:
        return [Stage.of_program("stage", other, extents)]

    return check_stages(program, stages(small_extents(program), 0), elsewhere=stages)


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("y[i] = sum[j](x[i,j]) / N(j)", "y[i] = sum[j](x[i,j]) / 7"),
        ("y[i] = sum[j](x[i,j]) * N(i)", "y[i] = sum[j](x[i,j]) * 3"),
        ("y[i] = sum[j](x[i,j])", "y[i] = sum[j](min(x[i,j], 10))"),
        ("y[i] = sum[j](where(x[i,j] > 3, 1, x[i,j]))", "y[i] = sum[j](where(x[i,j] >= 3, 1, x[i,j]))"),
        ("y[i] = sum[j](where(j > 300, 0, x[i,j]))", "y[i] = sum[j](x[i,j])"),
        ("y[i] = x[i] * n + 0 * x[i // n]", "y[i] = x[i] * 2 + 0 * x[i // n]"),
    ],
)
def test_a_stage_that_is_right_at_the_usual_sizes_and_values_alone_is_refused(text: str, stage: str) -> None:
    assert compared(text, text).ok
    certificate = compared(text, stage)
    assert not certificate.ok and certificate.counterexample is not None


def test_a_certificate_lists_the_sizes_that_stages_were_compared_at() -> None:
    certificate = eq.compile("y[i] = sum[j](exp(x[i,j]))").certificate
    sizes = {(report.extents["i"], report.extents["j"]) for report in certificate.stages}
    assert len(sizes) == 2 and {"i": 1, "j": 1} in [dict(found) for found in certificate.searched]


@pytest.mark.parametrize("mask", ["j > i + 290", "~((j >= 100) & (j < 103))", "j > 100000"])
def test_masks_far_out_are_compared_with_numbers_nearer(mask: str) -> None:
    certificate = eq.compile(ATTENTION.format(mask=mask)).certificate
    assert certificate.ok and certificate.reached
    assert certificate.nearer and not any("the same everywhere" in text for text in certificate.not_covered)
    assert "also taken nearer, alike in all stages" in str(certificate)


def test_values_that_leave_the_range_of_floats_are_drawn_smaller() -> None:
    kernel = eq.compile("y[i,j] = exp(x[i,j] / 0.001) / sum[j](exp(x[i,j] / 0.001))")
    assert kernel.certificate.ok and kernel.certificate.reached
    x = 1e-3 * np.random.default_rng(0).standard_normal((3, 40))
    weights = np.exp(x / 0.001)
    np.testing.assert_allclose(kernel(x=x), weights / weights.sum(1, keepdims=True), rtol=1e-6)


def test_a_branch_on_data_that_nothing_takes_is_listed_by_line() -> None:
    text = "z[i,j] = x[i,j] - max[j](x[i,j])\ny[i] = sum[j](where(z[i,j] > 0, 1, x[i,j]))"
    listed = [what for what in eq.compile(text).certificate.not_covered if "was never" in what]
    assert listed == ["line 2: x[i, j] - max[j](x[i, j]) > 0 was never true in these trials"]
    certificate = eq.compile("y[i] = sum[j](where(exp(x[i,j]) < 0, 1, x[i,j]))").certificate
    assert not any("was never" in what for what in certificate.not_covered)


def test_a_branch_of_one_program_that_nothing_takes_has_to_be_allowed() -> None:
    one, other = "y[i] = max[j](min(x[i,j], max[j](x[i,j])))", "y[i] = max[j](x[i,j])"
    certificate = eq.equivalent(one, other)
    assert not certificate.ok and certificate.counterexample is None
    assert "no input that was tried takes a branch that only one of the programs has" in certificate.reason
    assert eq.equivalent(one, other, allow=["min(x[i,j], max[j](x[i,j]))"]).ok
    assert not eq.equivalent(
        one, other.replace("x[i,j]", "2 * x[i,j]"), allow=["min(x[i,j], max[j](x[i,j]))"]
    ).ok


def test_allow_has_texts() -> None:
    with pytest.raises(EqfuseError, match="allow"):
        eq.equivalent("y[i] = x[i]", "y[i] = x[i]", allow="x[i] > 5")
