"""Programs against programs and stages against programs: right ones pass, each kind of wrong one does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.terms.parser import parse
from eqfuse.verify.check import check_stages
from eqfuse.verify.equivalence import equivalent as proved_or_tried
from eqfuse.verify.field.array import FieldArray
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.source import Stage

equivalent = partial(proved_or_tried, prove=False)

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
ATTENTION = """
S[i,j] = sum[d](Q[i,d] * K[j,d]) * scale
T[i,j] = where(j <= i, S[i,j], -inf)
P[i,j] = exp(T[i,j] - max[j](T[i,j]))
O[i,e] = sum[j](P[i,j] / sum[j](P[i,j]) * V[j,e])
"""
VARIANCE = "y[i] = sum[j](sq(x[i,j] - mean[j](x[i,j]))) / N(j)"
L2 = "y[i] = sqrt(sum[j](sq(x[i,j])))"
SCALED_L2 = "m[i] = max[j](abs(x[i,j]))\ny[i] = m[i] * sqrt(sum[j](sq(x[i,j] / invertible(m[i]))))"
RMSNORM = "y[i,j] = x[i,j] * rsqrt(sum[j](sq(x[i,j])) / N(j) + eps)"
QUANTISED = "r[i] = max[j](abs(x[i,j]))\ny[i,n] = sum[j](f8e4m3(x[i,j] * 448 / r[i]) * w[j,n]) * r[i] / 448"
ENTROPY = "p[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))\nE[i] = sum[j](p[i,j] * log(p[i,j]))"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (SOFTMAX, "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))"),
        (SOFTMAX, SOFTMAX.replace("i", "a").replace("j", "b")),
        (
            ATTENTION,
            ATTENTION.replace("P[i,j] / sum[j](P[i,j]) * V[j,e])", "P[i,j] * V[j,e]) / sum[j](P[i,j])"),
        ),
        (ATTENTION, ATTENTION.replace("j <= i", "not(j > i)")),
        (L2, SCALED_L2),
        (
            "y[i] = max[j](abs(x[i,j] / sqrt(sum[j](sq(x[i,j])))))",
            f"n{L2[1:]}\ny[i] = max[j](abs(x[i,j])) / n[i]",
        ),
        (VARIANCE, "y[i] = sum[j](sq(x[i,j])) / N(j) - sq(mean[j](x[i,j]))"),
        (QUANTISED, "r[i] = max[j](abs(x[i,j]))\ny[i,n] = sum[j](f8e4m3(x[i,j] / r[i]) * w[j,n]) * r[i]"),
        ("y[i] = logsumexp[j](x[i,j])", "y[i] = log(sum[j](exp(x[i,j])))"),
        ("y[i] = sum[j](x[i,j] * tanh(s * c[j]))", "y[i] = sum[j](tanh(s * c[j]) * x[i,j])"),
        ("y[i] = silu(x[i])", "y[i] = x[i] / (1 + exp(-x[i]))"),
        ("y[i] = max[j](abs(s) * x[i,j])", "y[i] = abs(s) * max[j](x[i,j])"),
        ("y[i] = argmax[j](x[i,j])", "y[i] = argmax[j](exp(x[i,j]))"),
        ("y[i] = sum[k](x[i+k] * w[k])", "y[a] = sum[b](w[b] * x[b+a])"),
        (
            "n: i64[b]\ny[b] = sum[j](where(j < n[b], x[b,j], 0))",
            "y[b] = sum[j](where(j >= n[b], 0, x[b,j]))",
        ),
        ("L[i] = log(sum[v](exp(x[i,v]))) - x[i,y[i]]", "L[i] = -log(exp(x[i,y[i]]) / sum[v](exp(x[i,v])))"),
        (ENTROPY, "E[i] = sum[j](exp(x[i,j]) * x[i,j]) / sum[j](exp(x[i,j])) - log(sum[j](exp(x[i,j])))"),
    ],
)
def test_equal_programs_are_verified(left: str, right: str) -> None:
    certificate = equivalent(left, right)
    assert certificate.ok, str(certificate)
    assert certificate.trials >= 16


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (SOFTMAX, "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j]))"),
        (SOFTMAX, "y[i,j] = exp(x[i,j] - x[i,0]) / sum[j](exp(x[i,j] - max[j](x[i,j])))"),
        (SOFTMAX, SOFTMAX + " + 0.0000001"),
        (ATTENTION, ATTENTION.replace("j <= i", "j < i + 2")),
        (ATTENTION, ATTENTION.replace("-inf", "0")),
        (ATTENTION, ATTENTION.replace("Q[i,d] * K[j,d]) * scale", "Q[i,d] * K[j,d])")),
        ("y[i] = max[j](s * x[i,j])", "y[i] = s * max[j](x[i,j])"),
        (L2, SCALED_L2.replace("y[i] = m[i] * ", "y[i] = ")),
        (L2, "y[i] = sum[j](abs(x[i,j]))"),
        (VARIANCE, "y[i] = sum[j](sq(x[i,j])) / N(j) - sq(sum[j](x[i,j])) / N(j)"),
        (VARIANCE, VARIANCE.replace(") / N(j)", ") / (N(j) - 1)")),
        (RMSNORM, RMSNORM.replace(" + eps", "")),
        (RMSNORM, RMSNORM.replace("eps", "0.000001")),
        ("y[i] = sqrt(sum[j](sq(x[i,j])) + 0.000001)", L2),
        ("y[i,j] = floor(x[i,j] * 10) / 10", "y[i,j] = x[i,j]"),
        ("y[i,n] = sum[j](round(x[i,j] / s) * w[j,n]) * s", "y[i,n] = sum[j](round(x[i,j]) * w[j,n])"),
        ("y[i] = sum[j](where(j <= i, x[j], 0))", "y[i] = sum[j](where(j < i, x[j], 0))"),
        ("y[i] = sum[k](x[i+k] * w[k])", "y[i] = sum[k](x[i+k+1] * w[k])"),
        ("y[i] = sum[j](max(x[i,j], 0))", "y[i] = max(sum[j](x[i,j]), 0)"),
        (
            "n: i64[b]\ny[b] = sum[j](where(j < n[b], x[b,j], 0))",
            "y[b] = sum[j](where(j <= n[b], x[b,j], 0))",
        ),
        ("y[i] = min[j](x[i,j])", "y[i] = max[j](x[i,j])"),
        (
            ENTROPY,
            "E[i] = sum[j](exp(x[i,j]) * x[i,j]) / sum[j](exp(x[i,j])) - log(sum[j](1.01 * exp(x[i,j])))",
        ),
    ],
)
def test_wrong_programs_are_rejected_with_a_counterexample(left: str, right: str) -> None:
    certificate = equivalent(left, right)
    assert not certificate.ok
    assert certificate.bound == 1.0
    example = certificate.counterexample
    assert example is not None
    assert "second program" in certificate.reason
    differs = abs(example.expected - example.found) > 1e-9 or np.isnan(example.found) != np.isnan(
        example.expected
    )
    assert differs or example.residues is not None


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        ("y[i] = x[i]", "z[i] = x[i]", "different outputs: y and z"),
        ("y[i] = x[i]\nz[i] = -x[i]", "y[i] = x[i]", "different outputs: y, z and y"),
        ("y[i] = sum[j](x[i,j])", "y[i,j] = x[i,j]", "1 and 2 dimensions"),
        ("y[i,j] = x[i,j]", "y[j,i] = x[i,j]", "dimensions of different inputs"),
        ("y[i] = sum[j](x[i,j])", "y[j] = sum[i](x[i,j])", "dimensions of different inputs"),
        ("y[i] = sum[j](x[i,j])", "y[i] = x[i]", "tensor 'x' has 2 and 1 dimensions"),
        ("y[i] = x[i] * s", "y[i] = x[i] * s[i]", "'s' is a tensor in one program and a scalar"),
    ],
)
def test_different_interfaces_are_not_equivalent(left: str, right: str, reason: str) -> None:
    certificate = equivalent(left, right)
    assert not certificate.ok and reason in certificate.reason
    assert str(certificate).startswith("not verified: ")


def test_a_text_that_is_no_program_is_an_error() -> None:
    with pytest.raises(EqfuseError):
        equivalent("y[i] = ", "y[i] = x[i]")


def test_nothing_defined_is_not_verified() -> None:
    text = "y[i] = sqrt(0 - sq(x[i]) - 1)"
    certificate = equivalent(text, text)
    assert not certificate.ok and "too little" in certificate.reason
    assert not check_stages(parse(SOFTMAX), []).ok


@dataclass(frozen=True)
class Online:
    """Softmax over tiles, as a loop would do it; each field is one way to get it wrong."""

    tile: int = 2
    identity: float = -np.inf
    repair: Callable[[Callable[..., FieldArray], FieldArray, FieldArray], FieldArray] | None = None
    tail: bool = True
    start: float = 0.0
    finite: bool = True

    def __call__(self, inputs: Inputs, domain: FieldDomain) -> Mapping[str, Any]:
        x = inputs.tensors["x"]
        trials, rows, columns = x.shape

        def call(fn: str, *args: FieldArray) -> FieldArray:
            return domain.call(fn, args)

        def factor(old: FieldArray, new: FieldArray) -> FieldArray:
            if self.repair is not None:
                return self.repair(call, old, new)
            return call("exp", call("sub", call("finite", old), call("finite", new)))

        largest = domain.full((trials, rows), self.identity)
        total = domain.full((trials, rows), self.start)
        stop = columns if self.tail else columns - columns % self.tile
        for first in range(0, stop, self.tile):
            part = domain.take(x, (slice(None), slice(None), slice(first, first + self.tile)))
            new = call("maximum", largest, domain.reduce("max", part, 2))
            column = domain.reshape(call("finite", new) if self.finite else new, (trials, rows, 1))
            weights = call("exp", call("sub", part, column))
            total = call("add", call("mul", total, factor(largest, new)), domain.reduce("sum", weights, 2))
            largest = new
        shifted = call("sub", x, domain.reshape(largest, (trials, rows, 1)))
        return {"y": call("div", call("exp", shifted), domain.reshape(total, (trials, rows, 1)))}


def _difference(call: Callable[..., FieldArray], left: FieldArray, right: FieldArray) -> FieldArray:
    return call("exp", call("sub", call("finite", left), call("finite", right)))


MUTANTS = {
    "repair dropped": Online(repair=lambda call, old, new: _difference(call, new, new)),
    "repair inverted": Online(repair=lambda call, old, new: _difference(call, new, old)),
    "repair squared": Online(repair=lambda call, old, new: call("sq", _difference(call, old, new))),
    "repair without the new maximum": Online(repair=lambda call, old, new: call("exp", call("finite", old))),
    "wrong identity of the sum, the maximum finite": Online(start=1.0, identity=-1.0),
    "ragged tail missing": Online(tail=False),
}


def softmax_stage(online: Online) -> Stage:
    extents = small_extents(parse(SOFTMAX))
    return Stage("loop", online, extents, f"tiles of {online.tile}")


@pytest.mark.parametrize("tile", [1, 2, 3, 4, 7])
def test_the_online_softmax_is_verified(tile: int) -> None:
    certificate = check_stages(parse(SOFTMAX), [softmax_stage(Online(tile=tile))])
    assert certificate.ok, str(certificate)
    assert certificate.undefined == 0 and certificate.bound < 1e-50


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("seed", range(5))
def test_wrong_online_softmaxes_are_rejected(name: str, seed: int) -> None:
    certificate = check_stages(parse(SOFTMAX), [softmax_stage(MUTANTS[name])], seed=seed)
    assert not certificate.ok and "differs" in certificate.reason


def test_an_unguarded_infinity_is_rejected_unless_left_to_floats() -> None:
    """A tile of nothing but -inf: exp(-inf - -inf) would spoil a row that the program defines."""
    unguarded = Online(repair=lambda call, old, new: call("exp", call("sub", old, new)))
    assert check_stages(parse(SOFTMAX), [softmax_stage(unguarded)], special="ignored").ok
    stage = softmax_stage(replace(unguarded, finite=False))
    assert check_stages(parse(SOFTMAX), [stage], special="ignored").ok
    certificate = check_stages(parse(SOFTMAX), [stage])
    assert not certificate.ok and certificate.counterexample is not None
    assert np.isnan(certificate.counterexample.found) and np.isfinite(certificate.counterexample.expected)


@pytest.mark.parametrize("factor", ["", "w[i] * "])
@pytest.mark.parametrize(
    ("form", "ok"),
    [
        ("{}exp(sum[j](x[i,j]) / s[i])", True),
        ("where(s[i] == 0, 0, {}exp(sum[j](x[i,j] / s[i])))", False),
        ("where(s[i] == 0, 1, {}exp(sum[j](x[i,j] / s[i])))", False),
    ],
)
def test_what_a_division_by_zero_leads_to_stands_for_nan(form: str, ok: bool, factor: str) -> None:
    """Where s is 0 and some x is, the program has NaN; an infinity leads to 0 as well, which no other way may."""
    program = parse(f"y[i] = {factor}exp(sum[j](x[i,j] / s[i]))")
    extents = {"i": 5, "j": 7}
    stage = Stage.of_program("form", parse(f"y[i] = {form.format(factor)}"), extents)
    certificate = check_stages(program, [stage])
    assert certificate.ok is ok
    assert ok or np.isnan(certificate.counterexample.expected)  # type: ignore[union-attr]


ABSORBING = "m[i] = exp({} * x[i,0])\n"
"""Up to 1e19: what is added to such a number is lost in part, or altogether."""


@pytest.mark.parametrize(
    ("absorbed", "right", "wrong"),
    [
        ("min((m[i] + x[i,1]) - m[i], z[i])", "min(x[i,1], z[i])", "x[i,1]"),
        ("max[j](abs((m[i] + x[i,j]) - m[i]))", "max[j](abs(x[i,j]))", "max[j](x[i,j])"),
        (
            "where((m[i] + x[i,1]) - m[i] > z[i], x[i,1], 0)",
            "where(x[i,1] > z[i], x[i,1], 0)",
            "where(x[i,1] > z[i], 0, x[i,1])",
        ),
        ("round((m[i] + 3*x[i,1]) - m[i])", "round(3*x[i,1])", "round(x[i,1])"),
        ("round(f16(m[i] + x[i,1] - m[i]))", "round(f16(x[i,1]))", "round(x[i,1])"),
        ("sign((m[i] + x[i,1]) - m[i]) * z[i]", "sign(x[i,1]) * z[i]", "z[i]"),
    ],
)
def test_an_order_that_rounding_leaves_open_is_no_difference(absorbed: str, right: str, wrong: str) -> None:
    program, extents = parse(f"{ABSORBING.format(22)}y[i] = {absorbed}"), {"i": 3, "j": 4}

    def stage(text: str) -> Stage:
        return Stage.of_program("stage", parse(f"y[i] = {text}"), extents)

    certificate = check_stages(program, [stage(right)])
    assert certificate.ok and certificate.stages[0].signs > 0
    certificate = check_stages(program, [stage(wrong)])
    assert not certificate.ok and certificate.counterexample is not None


@pytest.mark.parametrize("stage", ["min(x[i,1], z[i])", "x[i,1]", "z[i]"])
def test_where_every_order_is_open_nothing_is_verified(stage: str) -> None:
    program = parse("m[i] = exp(50 + x[i,0])\ny[i] = min((m[i] + x[i,1]) - m[i], z[i])")
    form = Stage.of_program("stage", parse(f"y[i] = {stage}"), {"i": 3})
    certificate = check_stages(program, [form], special="ignored")
    assert not certificate.ok and certificate.reason.startswith("too little could be compared")


def test_conditions_with_one_side_only_are_told() -> None:
    text = "y[i] = sum[j](where(i - j < 5000000, x[i,j], 0))"
    certificate = equivalent(text, text)
    assert certificate.ok and certificate.shrunk == "5000000 as 5" and not certificate.untaken
    certificate = equivalent(text, text.replace("5000000", "6000000"))
    assert not certificate.ok and "i - j < 5000000: the same everywhere at these sizes" in str(certificate)
    near = text.replace("5000000", "4")
    assert "same everywhere" not in str(equivalent(near, near))


@pytest.mark.parametrize(("identity", "ok"), [(-np.inf, True), (-1e30, False), (0.0, False), (-0.1, False)])
def test_the_identity_of_a_maximum(identity: float, ok: bool) -> None:
    def rolling(inputs: Inputs, domain: FieldDomain) -> Mapping[str, Any]:
        x = inputs.tensors["x"]
        largest = domain.full(x.shape[:2], identity)
        for first in range(0, x.shape[2], 2):
            part = domain.take(x, (slice(None), slice(None), slice(first, first + 2)))
            largest = domain.call("maximum", [largest, domain.reduce("max", part, 2)])
        return {"y": largest}

    program = parse("y[i] = max[j](x[i,j])")
    assert check_stages(program, [Stage("loop", rolling, {"i": 3, "j": 7})]).ok is ok


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_repair_is_seen_although_it_is_invisible_where_the_maximum_comes_first(seed: int) -> None:
    """One row and few trials: only the orders that are drawn on purpose make the repair do anything."""
    program = parse("y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))")
    extents = {"i": 1, "j": 3}
    wrong = replace(MUTANTS["repair dropped"], tile=2)
    assert not check_stages(program, [Stage("loop", wrong, extents)], trials=4, seed=seed).ok
    certificate = check_stages(program, [Stage("loop", Online(tile=2), extents)], trials=4, seed=seed)
    assert certificate.ok
    first, between, last = certificate.extremes["max"]
    assert first and between and last


def test_one_wrong_stage_fails_the_whole() -> None:
    stages = [softmax_stage(Online()), replace(softmax_stage(MUTANTS["ragged tail missing"]), name="broken")]
    certificate = check_stages(parse(SOFTMAX), stages)
    assert not certificate.ok and "'broken'" in certificate.reason
    assert certificate.counterexample is not None and certificate.counterexample.stage == "broken"


def test_outputs_of_the_wrong_shape_or_name_are_rejected() -> None:
    good = softmax_stage(Online())

    def transposed(inputs: Inputs, domain: FieldDomain) -> Mapping[str, Any]:
        return {"y": domain.transpose(good.run(inputs, domain)["y"], (0, 2, 1))}

    def renamed(inputs: Inputs, domain: FieldDomain) -> Mapping[str, Any]:
        return {"z": good.run(inputs, domain)["y"]}

    assert "has shape" in check_stages(parse(SOFTMAX), [replace(good, run=transposed)]).reason
    assert "outputs are z" in check_stages(parse(SOFTMAX), [replace(good, run=renamed)]).reason


def test_one_wrong_element_is_found() -> None:
    good = softmax_stage(Online())

    def spoilt(inputs: Inputs, domain: FieldDomain) -> Mapping[str, Any]:
        y = good.run(inputs, domain)["y"]
        domain.put(y, (slice(None), 1, 3), domain.full((), float("nan")))
        return {"y": y}

    certificate = check_stages(parse(SOFTMAX), [replace(good, run=spoilt)])
    assert not certificate.ok and certificate.counterexample is not None
    assert certificate.counterexample.position == (1, 3)
    assert "y[1, 3] is nan in stage 'loop'" in str(certificate)


def test_strict_casts_are_not_moved() -> None:
    left, right = (
        parse(text, strict_casts=True)
        for text in (QUANTISED, QUANTISED.replace(" * 448 / r[i]) ", " / r[i]) * 448 "))
    )
    assert not equivalent(left, right).ok
    assert equivalent(left, left).ok


def test_certificates_say_what_was_done() -> None:
    certificate = equivalent("y[i] = erf(sum[j](exp(x[i,j])))", "y[i] = erf(sum[j](exp(x[i,j])))", seed=3)
    text = str(certificate)
    assert certificate.opaque == ("erf",) and set(certificate.interpreted) == {"exp", "sum"}
    for part in ("verified in 16 trials", "residues modulo p = ", "opaque", "Schwartz-Zippel", "not covered"):
        assert part in text
    assert certificate == equivalent(
        "y[i] = erf(sum[j](exp(x[i,j])))", "y[i] = erf(sum[j](exp(x[i,j])))", seed=3
    )


def test_no_bound_is_claimed_for_comparisons_in_floats() -> None:
    certificate = equivalent(ENTROPY, ENTROPY)
    assert certificate.ok and certificate.bound == 1.0
    assert "compared in float64 only" in str(certificate) and "no bound claimed" in str(certificate)


def test_rounding_refuses_nothing_that_is_compared_in_floats_and_hides_no_difference() -> None:
    """A sum of a cosine and a quotient by a logarithm has no residue; near 0, x + 0.5 - 0.5 is far from x in float64."""
    shifted = "a[i] = y[i] / log(exp(x[i] + 0.5 - {})) + cos(x[i]) * where(i >= 1, y[i - 1], 0)"
    plain = "a[i] = y[i] / log(exp(x[i])) + cos(x[i]) * where(i >= 1, y[i - 1], 0)"
    for left, right in permutations((shifted.format(0.5), plain)):
        assert equivalent(left, right)
    for left, right in permutations((shifted.format(0.500001), plain)):
        assert equivalent(left, right).counterexample


@pytest.mark.parametrize(
    "number",
    ["{s}", pytest.param("(cos({s}) + 1 / log(2 + {s}))", id="without residues")],
)
@pytest.mark.parametrize(
    "decided", ["min({m} % 3, {t})", "where({m} % 3 < {t}, 2 * {t}, {t})", "abs({m} - {t})"]
)
def test_a_mean_of_equal_sums_is_the_sum_in_any_order(number: str, decided: str) -> None:
    """What rounding makes of a sum in two parts is on either side of the mean of such sums, which is equal to it."""

    def program(total: str) -> str:
        t = number.format(s=total)
        return "x: f16[j, k]\na[k] = " + decided.format(m=f"(sum[j]({t}) / N(j))", t=t)

    whole = program("sum[j](sq(f16(x[j, k]) + 1))")
    parts = program(
        "(sum[j](where(j < 2, sq(f16(x[j, k]) + 1), 0)) + sum[j](where(j < 2, 0, sq(f16(x[j, k]) + 1))))"
    )
    for left, right in permutations((whole, parts)):
        assert equivalent(left, right)


def test_numbers_without_residues_are_equal_as_far_as_rounding_tells() -> None:
    number = "(cos(x[k]) + 1 / log(2 + sq(x[k])))"
    mean = f"(({number} + {number} + {number}) / 3)"
    below, at_most = (f"a[k] = where({mean} {fn} {number}, 1, x[k])" for fn in ("<", "<="))
    a_little = f"a[k] = where({number} < {number} * 1.000000001, 1, x[k])"
    assert equivalent(below, "a[k] = x[k]") and equivalent("a[k] = 0 * x[k] + 1", at_most)
    for other in (at_most, a_little):
        for left, right in permutations((below, other)):
            assert equivalent(left, right).counterexample


@pytest.mark.parametrize(
    ("left", "right"),
    [("round(x[i] + 1e-20 * x[i])", "round(x[i])"), ("floor(x[i] + 1e-20 * x[i])", "floor(x[i])")],
)
def test_what_no_real_values_tell_apart_is_refused_without_a_counterexample(left: str, right: str) -> None:
    for one, other in permutations((left, right)):
        certificate = equivalent(f"y[i] = {one}", f"y[i] = {other}")
        assert not certificate and certificate.counterexample is None
        assert "no trial told the programs apart" in certificate.reason
        assert one.partition("(")[0] in certificate.reason


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("round(f16(x[i]))", "round(x[i])"),
        ("round(x[i] + 1)", "round(x[i]) + 1"),
        ("floor(x[i] / 2 + 0.5)", "round(x[i] / 2)"),
        ("floor(f16(x[i]))", "floor(x[i])"),
        ("erf(x[i])", "erf(1.0000001 * x[i])"),
    ],
)
def test_a_counterexample_is_seen_in_real_values(left: str, right: str) -> None:
    for one, other in permutations((left, right)):
        found = equivalent(f"x: f32[i]\ny[i] = {one}", f"x: f32[i]\ny[i] = {other}").counterexample
        assert found is not None
        assert abs(found.expected - found.found) > (1e-9 if "erf" in left else 0.1)


def test_a_condition_of_sizes_and_numbers_that_always_holds_hides_no_side() -> None:
    whole = "e = max[j](x[j]) + where(f32(0.5) + sq(1) * N(j) > {}, max({}), 1)"
    assert equivalent(whole.format(0, "3, x[0]"), whole.format(0, "x[0], 3"))
    for left, right in permutations((whole.format(2000, "3, x[0]"), whole.format(2000, "x[0], 4"))):
        assert not equivalent(left, right)


def test_the_sign_of_what_has_no_value_is_no_sign_of_a_number() -> None:
    for left, right in permutations(("y[i] = sign(sqrt(x[i]))", "y[i] = sign(sqrt(abs(x[i])))")):
        assert equivalent(left, right).counterexample
    assert equivalent("y[i] = sign(sqrt(x[i]))", "y[i] = sign(abs(sqrt(x[i])))")


def test_an_infinity_is_near_no_number() -> None:
    one, other = (f"c[i] = min(0, where(i % 2 == {n}, silu(N(i)), -inf))" for n in (0, 1))
    for left, right in permutations((one, other)):
        assert equivalent(left, right).counterexample


def test_an_axis_that_no_input_has_hides_no_counterexample() -> None:
    one, other = (f"x: f32[j]\ne[i, j] = {x} - f16({x} // 2)" for x in ("x[j]", "max(x[j], -5)"))
    for left, right in permutations((one, other)):
        assert equivalent(left, right).counterexample


def test_a_number_and_its_maximum_part_by_part() -> None:
    """That no number is above its maximum is said by the form of one program, and holds in the other where it compares the same."""
    for fn in ("relu({})", "abs({})", "max(2, {})"):
        bounded = fn.format("x[i]")
        assert equivalent(
            f"d = sum[i](max(max[i]({bounded}), x[i]))", f"d = sum[i](max(x[i], max[i]({bounded})))"
        )
    least = "d = sum[i](max(max[i](min(2, x[i])), {}))"
    assert equivalent(least.format("x[i]"), least.format("min(2, x[i])")).counterexample
    whole = "a[i] = min(x[i], max[i](x[i]))"
    parts = "a[i] = min(x[i], max(max[i](where(i < 2, x[i], -inf)), max[i](where(i < 2, -inf, x[i]))))"
    some = "a[i] = min(x[i], max[i](where(i < {}, x[i], -inf)))"
    for left, right in permutations((whole, parts)):
        assert equivalent(left, right)
    for left, right in permutations((whole, some.format(40))):
        assert equivalent(left, right).counterexample
    for left, right in permutations((whole, some.format(9000))):
        assert not equivalent(left, right)


def chain(count: int) -> str:
    """Sums of exponentials of differences from the sum before: every exponent has lost its residue modulo q."""
    lines = [f"a{k}[i] = sum[j](exp(x[i,j] - a{k - 1}[i]))" for k in range(1, count)]
    return "\n".join(["a0[i] = sum[j](x[i,j])", *lines, f"return a{count - 1}"])


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_stabilised_exponential_of_a_lost_difference_is_the_plain_one(count: int) -> None:
    """exp(x - c) = exp(m - c) * exp((x - c) - (m - c)), c without a residue modulo q."""
    last, c = count - 1, f"a{count - 2}[i]"
    stable = f"exp(m[i] - {c}) * sum[j](exp((x[i,j] - {c}) - (m[i] - {c})))"
    shifted = chain(count).replace(
        f"a{last}[i] = sum[j](exp(x[i,j] - {c}))", f"m[i] = max[j](x[i,j])\na{last}[i] = {stable}"
    )
    assert equivalent(chain(count), shifted)
    assert not equivalent(chain(count), shifted.replace(f"exp(m[i] - {c})", "exp(m[i])"))


def test_exponents_without_residue_add_up() -> None:
    roots = "u[i] = sqrt(x[i])\nv[i] = sqrt(y[i])\n"
    left = roots + "z[i] = exp(u[i] + v[i] - x[i])"
    assert equivalent(left, roots + "z[i] = exp(u[i]) / exp(x[i] - v[i])")
    assert equivalent(
        left, roots + "z[i] = exp(where(x[i] > 1, u[i], u[i] - 1) + v[i] - x[i]) * where(x[i] > 1, 1, exp(1))"
    )
    assert not equivalent(left, roots + "z[i] = exp(u[i] - v[i] - x[i])")
    assert not equivalent(left, roots + "z[i] = exp(u[i]) / exp(y[i] - v[i])")


def test_a_branch_that_a_stage_alone_has_is_taken_both_ways_or_listed() -> None:
    program, extents = parse("y[i] = x[i] * 2"), {"i": 5}

    def untaken(text: str) -> tuple[str, ...]:
        stage = Stage.of_program("other", parse(text), extents)
        certificate = check_stages(program, [stage], special="ignored")
        assert certificate.ok
        return certificate.untaken

    assert untaken("y[i] = max(x[i], -x[i]) * 2 - 2 * relu(-2 * x[i])") == ()
    assert untaken("y[i] = where(x[i] > 77, 3 * x[i], 2 * x[i])") == ("x[i] > 77 was never true",)


def test_a_sum_of_a_number_is_a_size() -> None:
    one = "c = sum[i](sum[i](2) // 2)"
    other = "c = sum[i](where(sum[i](2) == 10, 20, sum[i](2)) // 2)"
    certificate = equivalent(one, other)
    assert not certificate.ok and certificate.counterexample is not None


def test_a_step_of_an_infinity_is_exact() -> None:
    """Its error was infinite: all trials of many magnitudes were left out for it."""
    left = "e[i] = max(x[i], floor(where(i == 0, 27, -inf)))"
    certificate = equivalent(left, left.replace("-inf", "-33"))
    assert not certificate.ok and certificate.counterexample is not None


def test_the_sign_of_a_number_over_nothing_may_be_lost_to_rounding() -> None:
    """1e-21 + 1 - 1 is 0 in floats: 0 / 0 then, and an infinity where it is divided as it is."""
    mean = "m[i, k] = -round(0.5) - sum[k](x[i, k]) / N(k)\n"
    left = (
        f"x: f32[i, k]\ny: f32[i]\nw: f32[i]\n{mean}"
        "d[i, k] = max(sum[i](max[k](y[i]) / m[i, k]), sum[i](max(x[i, k], m[i, k])) - w[i // 2])\nreturn d"
    )
    assert equivalent(left, left.replace("max[k](y[i])", "(max[k](y[i] + 1) - 1)"))


def test_real_values_tell_programs_apart_where_no_residue_does() -> None:
    """Most sums that something is divided by have none here, and nothing but their reals shows another number."""
    steps = "(silu(max[i](0.1)) + min(-1, x[i]) % 3) // 2"
    value = f"min({steps}, where(i + 2 < N(i), z[i + 2], 0), min(-1, x[i]) % 3)"
    below = f"sum[i](exp({value} - max[i]({value})))"
    left = f"x: f32[i]\nz: f32[i]\ne = {below} / {below}"
    right = f"x: f32[i]\nz: f32[i]\ne = {below.replace('], 0)', '], 1)')} / {below}"
    assert not equivalent(left, right) and not equivalent(right, left)
    assert equivalent(left, left.replace("i + 2 < N(i)", "N(i) > i + 2", 1))


@pytest.mark.parametrize(
    "value",
    [
        "c[i, j] = sign((x[i, 0] + NOTHING) * (1 / z[j, 0]))",
        "c[i, j] = sign(sum[k]((x[i, k] + NOTHING) * (1 / z[j, k])))",
        "c[i, j] = sign(1 / z[j, 0] / (x[i, 0] + NOTHING))",
    ],
)
def test_what_an_infinity_is_by_a_number_that_rounding_may_make_nothing_is_left_out(value: str) -> None:
    """e^-99 + 1 - 1 is 0 in floats, and 0 times an infinity NaN; e^-99 + 0.1 + 0.7 - 0.8 is negative there."""
    left = f"x: f32[i, k]\nz: f32[j, k]\n{value}"
    right = "(exp(-99) + 0.1 + 0.7 - 0.8)" if "/ (" in value else "(exp(-99) + 1 - 1)"
    assert equivalent(left.replace("NOTHING", "exp(-99)"), left.replace("NOTHING", right))
    assert not equivalent(left.replace("NOTHING", "exp(-99)"), left.replace("NOTHING", "1"))


@pytest.mark.parametrize("value", ["sigmoid(x[i]) / z[i]", "sq(sigmoid(x[i])) / z[i]"])
def test_what_vanishes_in_floats_and_not_in_reals_has_a_sign_that_they_do_not_tell(value: str) -> None:
    """sigmoid(-1000) / 0 is an infinity, and 0 / 0 in floats: the threshold of a `where` drops NaN, relu keeps it."""
    left = f"x: f32[i]\nz: f32[i]\nu: f32[i]\nd[i] = min(relu({value}), u[i])"
    assert equivalent(left, left.replace(f"relu({value})", f"where({value} > 0, {value}, 0)"))
    assert not equivalent(left, left.replace("relu(", "abs("))


def test_relu_keeps_nan_that_a_threshold_drops() -> None:
    """0 / 0 is NaN, and NaN > 0 false."""
    left = "x: f32[i]\nz: f32[i]\nd[i] = relu(x[i] / z[i])"
    right = left.replace("relu(x[i] / z[i])", "where(x[i] / z[i] > 0, x[i] / z[i], 0)")
    assert not equivalent(left, right) and equivalent(left, right, domain="common")


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("(x[i] > 0) != (z[i] > 0)", "(x[i] > 0) & (z[i] <= 0) | (x[i] <= 0) & (z[i] > 0)", True),
        ("(x[i] > 0) == (z[i] > 1)", "(x[i] > 0) != (z[i] > 1)", False),
        ("m[i] == q[i]", "not (m[i] != q[i])", True),
        ("m[i] < q[i]", "m[i] != q[i]", False),
    ],
)
def test_truth_values_are_compared(left: str, right: str, same: bool) -> None:
    declared = "m: bool[i]\nq: bool[i]\n" if "m[" in left else ""
    one, other = (f"{declared}y[i] = where({said}, x[i], z[i])" for said in (left, right))
    assert equivalent(one, other).ok == same
    assert eq.compile(one, native="off").certificate.ok


@pytest.mark.parametrize(
    ("left", "right", "grade"),
    [
        ("y[i] = sum[j](x[i,j])", "y[i] = sum[j](x[i,j])", "proved"),
        ("y[i] = sum[j](x[i,j] / z[i])", "y[i] = sum[j](x[i,j]) / z[i]", "bounded"),
        ("y[i] = -inf + 0 * i", "y[i] = -inf", "tested"),
        ("y[i] = sum[j](x[i,j])", "y[i] = max[j](x[i,j])", "unverified"),
    ],
)
def test_a_grade_says_what_is_claimed(left: str, right: str, grade: str) -> None:
    found = proved_or_tried(left, right)
    assert found.grade == grade and found.ok == (grade != "unverified")
    assert found.graded in str(found) or not found.ok


def test_what_is_compared_in_floats_or_allowed_is_tested_and_no_more() -> None:
    bounded = equivalent("y[i] = sum[j](x[i,j] * s)", "y[i] = s * sum[j](x[i,j])")
    assert bounded.grade == "bounded" and "at most 1e-" in bounded.graded
    in_floats = tuple(replace(stage, floats_only=1) for stage in bounded.stages)
    for weaker in ({"stages": in_floats}, {"allowed": ("x[i] > 5",)}, {"bound": 1.0}):
        assert replace(bounded, **weaker).grade == "tested"  # type: ignore[arg-type]


def test_a_kernel_shows_its_grade() -> None:
    kernel = eq.compile("y[i] = sum[j](x[i,j] * s)", native="off")
    assert repr(kernel).endswith(f", {kernel.certificate.graded}>") and kernel.certificate.grade == "bounded"
    for form in ("text", "html", "latex"):
        assert "bounded" in kernel.explain(form)
    unverified = eq.compile("y[i] = sum[j](x[i,j] * s)", native="off", verify=False)
    assert repr(unverified).endswith(", unverified>") and "What runs is unverified." in unverified.explain()


def test_a_side_taken_where_nothing_could_be_compared_is_not_taken() -> None:
    """At x = 4e19 the side is taken, and exponentials are beyond floats; near 500 the other element has to be small."""
    value = "x[j] - floor(exp(x[N(j) - 1 - j]))"
    found = eq.equivalent(f"b[j] = {value}", f"b[j] = min({value}, 500)")
    assert not found.ok
    assert found.counterexample is not None or "never with the first above the second" in found.reason


def test_quotients_of_numbers_beyond_integers_of_floats_are_solved_for() -> None:
    value = "x[j] - expm1(x[N(j) - 1 - j]) // 2"
    assert not eq.equivalent(f"b[j] = {value}", f"b[j] = min({value}, 500)").ok


@pytest.mark.parametrize(
    ("left", "right", "told"),
    [
        ("y[i] = sum[j](where(j == w[i], x[j], 0))", "y[i] = x[w[i]]", True),
        ("y[i] = x[w[i]] + x[w[i]]", "y[k] = 2 * x[w[k]]", False),
    ],
)
def test_gathers_of_one_program_are_told(left: str, right: str, told: bool) -> None:
    """Trials draw no position that a call refuses, and the other program may have a value there."""
    for pair in ((left, right), (right, left)):
        certificate = equivalent(*pair)
        assert certificate.ok, certificate
        assert any("a position outside of 'x'" in text for text in certificate.not_covered) == told
