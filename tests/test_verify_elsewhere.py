"""Stages of the compiler at other sizes than the usual ones, on values at thresholds, and with large constants shrunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.loops.rows import written_out
from eqfuse.terms.nodes import Call
from eqfuse.terms.parser import parse
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.check import check_stages
from eqfuse.verify.reals import AnySize
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.source import Stage

equivalent = partial(eq.equivalent, prove=False)

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
    assert certificate.shrunk and not any("the same everywhere" in text for text in certificate.not_covered)
    assert "also shrunk, alike in all stages" in str(certificate)


def test_values_that_leave_the_range_of_floats_are_drawn_smaller() -> None:
    kernel = eq.compile("y[i,j] = exp(x[i,j] / 0.001) / sum[j](exp(x[i,j] / 0.001))")
    assert kernel.certificate.ok and kernel.certificate.reached
    x = 1e-3 * np.random.default_rng(0).standard_normal((3, 40))
    weights = np.exp(x / 0.001)
    np.testing.assert_allclose(kernel(x=x), weights / weights.sum(1, keepdims=True), rtol=1e-6)


def test_sides_that_nothing_takes_are_proved() -> None:
    text = "z[i,j] = x[i,j] - max[j](x[i,j])\ny[i] = sum[j](where(z[i,j] > 0, 1, x[i,j]))"
    for source in (
        text,
        "y[i] = sum[j](where(exp(x[i,j]) < 0, 1, x[i,j]))",
        "y[i] = x[i] * where(i < N(i), 1, 2)",
    ):
        certificate = eq.compile(source).certificate
        assert not certificate.untaken and not certificate.supposed
        assert not any("was never" in what for what in certificate.not_covered)
    assert equivalent("y[i] = max[j](min(x[i,j], max[j](x[i,j])))", "y[i] = max[j](x[i,j])").ok


LEAST_SQUARE = "sum[j](sq(x[i,j])) + sum[j](sq(z[i,j]))"


def test_a_side_that_nothing_takes_is_compared_with_the_order_supposed() -> None:
    text = f"s[i] = {LEAST_SQUARE} - 2 * sum[j](x[i,j] * z[i,j])\ny[i] = sum[j](where(s[i] < -1, z[i,j], x[i,j]))"
    certificate = eq.compile(text).certificate
    assert certificate.ok and not certificate.untaken
    (said,) = certificate.supposed
    assert said.startswith("line 2: ") and "< -1 was never true" in said
    assert "compared with the order of their numbers supposed" in str(certificate)


@pytest.mark.slow
def test_a_side_that_nothing_takes_and_that_differs_has_to_be_allowed() -> None:
    condition = f"{LEAST_SQUARE} - 2 * sum[j](x[i,j] * z[i,j]) < -1"
    one, other = f"y[i] = where({condition}, 1, x[i,0])", "y[i] = x[i,0] + 0 * sum[j](z[i,j])"
    certificate = equivalent(one, other)
    assert not certificate.ok and certificate.counterexample is None and certificate.bound == 1
    assert "no trial took a side of a branch" in certificate.reason and certificate.untaken
    for allow in ([condition], [f"line 1: {condition}"], "untaken", [certificate.untaken[0]]):
        allowed = equivalent(one, other, allow=allow)
        assert allowed.ok and allowed.allowed == certificate.untaken
        assert "that were allowed" in str(allowed)
    assert not equivalent(one, other, allow=["x[i] > 5"]).ok
    assert not equivalent(one, other.replace("x[i,0]", "2 * x[i,0]"), allow="untaken").ok


HIDDEN_ORDER = """
v[k,l] = sum[k](x[l,k]) * where(l + 2 < N(l), y[l + 2], 0) * x[l,k]
b[k] = max[l](v[k,l])
e = max[k,l](min(-1.5, max(v[k,l], b[k])))
"""
"""The greatest of some numbers of which one is 0 is not below -1.5, which nothing proves."""


def test_a_program_with_a_side_that_nothing_takes_runs() -> None:
    kernel = eq.compile(HIDDEN_ORDER, target="cpu", native="off")
    x, y = torch.randn(9, 5), torch.randn(9)
    assert kernel(x=x, y=y) == -1.5
    certificate = kernel.certificate
    assert certificate.ok and not certificate.untaken or certificate.allowed == certificate.untaken
    assert certificate.supposed or "no trial took" in kernel.why_not()[0]


def test_joined_conditions_are_branches_of_their_own() -> None:
    narrow = "where((x[i] > 2) & (y[i] > 3) & (x[i] < 2.1) & (y[i] < 3.1) & (x[i] + y[i] > 5.19), 0, z[i])"
    assert not equivalent(f"a[i] = {narrow}", "a[i] = z[i] + 0 * (x[i] + y[i])").ok
    assert equivalent(f"a[i] = {narrow}", f"a[i] = 1 * {narrow}").ok


@pytest.mark.parametrize(
    "one",
    [
        "where(round(x[i]) == 7, 0, x[i])",
        "where(floor(x[i] / 7) * 7 == x[i], 0, x[i])",
        "where(abs(x[i]) < 1e-30, 0, x[i])",
        "where((x[i] > 2) & (x[i] < 2.0001), 0, x[i])",
    ],
)
def test_draws_meet_whole_numbers_small_ones_and_narrow_ranges(one: str) -> None:
    assert not equivalent(f"a[i] = {one}", "a[i] = x[i]").ok
    assert not equivalent("a[i] = x[i]", f"a[i] = {one}").ok


def test_allow_has_texts() -> None:
    with pytest.raises(EqfuseError, match="allow"):
        equivalent("y[i] = x[i]", "y[i] = x[i]", allow="x[i] > 5")


@pytest.mark.parametrize("prefer", ["rolling", "resident"])
def test_names_of_a_loop_nest_stand_for_extremes_of_rows(prefer: str) -> None:
    """The greatest number of a row is not below its least, and what both are added to changes nothing."""
    source = "a[i] = sum[i](x[i])\nf = max[i](y[i] - a[i])\nd[i] = x[i] + a[i]\nreturn d, f"
    kernel = eq.compile(source, prefer=prefer, target="cpu", native="off")
    assert "max(max_i - sum_i, min_i - sum_i)" in str(kernel.loops)
    assert not any("max_i" in text for text in kernel.certificate.not_covered)


def test_a_carried_name_is_no_whole_row_inside_of_its_loop() -> None:
    source = "a[i] = sum[i](x[i])\nf = max[i](y[i] - a[i])\nd[i] = x[i] + a[i]\nreturn d, f"
    found = written_out(eq.compile(source, prefer="rolling", target="cpu", native="off").loops)
    texts = {str(node): str(other) for node, other in found.items()}
    assert texts["max_i - sum_i"] == "max[i](y[i]) - sum[i](x[i])"
    assert "max(max_i, max_i_tile)" not in texts


@pytest.mark.parametrize(
    ("condition", "always"),
    [
        ("-1 <= where(i - N(i) - 1 < 2, floor(N(i)), -inf)", True),
        ("where(i < 0, 5, i) >= 0", True),
        ("round(i - N(i)) >= 0", False),
        ("floor(i / 2) >= 1", None),
        ("where(i < 3, 5, i) >= 0", True),
        ("where(i < 3, 5, i) >= 4", None),
        ("floor(0.5 * i) <= -1", False),
        ("floor(0.5 * i) <= 0", None),
    ],
)
def test_choices_that_are_always_the_same_are_what_they_choose(condition: str, always: bool | None) -> None:
    (output,) = parse(f"a[i] = where({condition}, x[i], 2)").outputs
    assert isinstance(output.expr, Call)
    assert AnySize({}).truth(output.expr.args[0]) is always
    one = f"a[i] = where({condition}, x[i], 2 * x[i])"
    if always is not None:
        assert equivalent(one, f"a[i] = {1 if always else 2} * x[i]").ok
