"""What cannot be compared is not verified, and says so."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from extend_kernels import registered

import eqfuse as eq
from eqfuse import certification, compiler
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.errors import VerificationError
from eqfuse.terms.parser import parse
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.domains import domains
from eqfuse.verify.equivalence import equivalent as proved_or_tried

equivalent = partial(proved_or_tried, prove=False)

GUMBEL = "y[n] = max[c](x[n,c] - log(-log(u[n,c])))"


def test_inputs_are_drawn_from_where_the_program_has_values() -> None:
    certificate = eq.compile(GUMBEL).certificate
    assert certificate is not None and certificate.ok and certificate.reached
    assert equivalent(GUMBEL, "y[n] = max[c](x[n,c] - log(log(1 / u[n,c])))").ok


@pytest.mark.parametrize(
    "wrong",
    [
        "y[n] = max[c](x[n,c] - log(-log(u[n,c])) * 1.001)",
        "y[n] = max[c](min(x[n,c] - log(-log(u[n,c])), 50))",
        "y[n] = max[c](x[n,c] - max(log(-log(u[n,c])), -8))",
        "y[n] = max[c](x[n,c] - log(abs(log(u[n,c]))))",
    ],
)
def test_what_differs_there_is_refused(wrong: str) -> None:
    assert not equivalent(GUMBEL, wrong).ok


@pytest.mark.parametrize(
    ("text", "intervals"),
    [
        ("y[i] = log(1 - x[i]) + log(x[i])", {"x": (0.0, 1.0)}),
        ("y[i] = sqrt(4 - sq(x[i])) * rsqrt(a)", {"x": (-2.0, 2.0), "a": (0.0, math.inf)}),
        ("y[i] = log(sum[j](x[i,j] * z[i,j]))", {"x": (0.0, math.inf), "z": (0.0, math.inf)}),
        ("y[i] = x[i] / (1 - z[i])", {}),
    ],
)
def test_intervals_where_functions_have_values(text: str, intervals: dict[str, tuple[float, float]]) -> None:
    found = domains(parse(text))
    assert found.keys() == intervals.keys()
    for name, ends in intervals.items():
        assert found[name] == pytest.approx(ends, rel=0.02)


def test_a_reduction_of_numbers_and_a_constant_has_no_preimage() -> None:
    last = {"state": "v, n", "lift": "x, 1", "identity": "0, 0", "result": "v"}
    with registered("last", **last, combine="where(n2 > 0, v2, v1), max(n1, n2)"):
        assert domains(parse("y[i] = last[j](log(x[i,j]))")) == {"x": (0.0, math.inf)}


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
        ("y[i] = sum[j](where(j < 100000000, x[i,j], 0))", "y[i] = sum[j](x[i,j])", "j < 100000000"),
        ("y[i] = x[i // 100000000]", "y[i] = x[0 * i]", "i // 100000000"),
        ("y[i] = x[i] * (i % 100000000)", "y[i] = x[i] * i", "i % 100000000"),
        ("y[i] = x[i] * minimum(i, 100000000)", "y[i] = x[i] * i", "min(i, 100000000)"),
        ("y[i] = where(i // 100000000 == 0, x[i], 0)", "y[i] = x[i]", "i // 100000000 == 0"),
    ],
)
def test_sizes_too_small_to_tell_programs_apart_verify_nothing(left: str, right: str, unseen: str) -> None:
    certificate = equivalent(left, right)
    assert not certificate.ok and certificate.bound == 1.0 and certificate.counterexample is None
    assert certificate.reason.startswith(
        "no trial took a side of a branch, and nothing shows that none can: "
    )
    assert unseen in certificate.reason and any(unseen in text for text in certificate.not_covered)
    same = equivalent(left, left)
    assert same.ok and same.shrunk == "100000000 as 5" and not same.untaken


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


EXPONENTS_OF_TOTALS = {
    "a sum in the exponent of tanh": """
        x: f32[i]
        a[i] = x[i] + sum[i](exp(x[i]))
        b[i] = a[i] - sum[i](a[i])
        c[i] = b[i] + mean[i](tanh(b[i]))
        d[i] = c[i] + mean[i](c[i])
    """,
    "a sum, chosen, in an exponent": """
        x: f32[i]
        a[i] = min(x[i], sum[i](exp(x[i])))
        b[i] = min(a[i], max[i](sq(a[i])))
        c[i] = max(b[i], abs(mean[i](exp(b[i]))))
    """,
    "a product of differences": """
        x: f32[i,j]
        a[i] = std[j](x[i,j])
        b = prod[i](sin(x[i,0]) - a[i])
        c = tanh(2 - b)
    """,
}


@pytest.mark.parametrize("name", EXPONENTS_OF_TOTALS)
def test_what_a_loop_adds_up_or_multiplies_is_one_value(name: str) -> None:
    """Tile by tile or at once: it has lost its residue modulo q, and its exponential is that of one number."""
    assert eq.compile(EXPONENTS_OF_TOTALS[name], target="cpu", prefer="multi_pass").certificate.ok


SOFTMAX = "y[i] = sum[j](exp(x[i,j] - max[j](x[i,j])) * v[j]) / sum[j](exp(x[i,j] - max[j](x[i,j])))"


@pytest.fixture
def nothing_derived_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a rule were wrong: only the program as written is verified."""
    certify = certification.certify

    def strict(derived: Derived, compiled: Compiled, checks: certification.Checks) -> Certificate:
        if compiled.chosen.plan.schedule != "multi_pass":
            raise VerificationError("the fused program was not verified: wrong", hint="x = 1")
        return certify(derived, compiled, checks)

    monkeypatch.setattr(compiler, "certify", strict)


def test_what_is_the_same_in_every_trial_may_be_out_of_the_range_of_floats() -> None:
    """Of no positions of k the sum is 0 in all trials: it has a dimension for i, and none for them."""
    source = "t: bool[i,j]\na[i,j] = sum[k](where(t[i,j], sq(k), -inf))\nb[i] = sum[j](max(i, a[i,j]) - a[i,j] / N(i))"
    kernel = eq.compile(source)
    kernel(t=torch.ones((3, 0), dtype=torch.bool), sizes={"k": 0})
    assert kernel.certificate.ok


@pytest.mark.parametrize("number", ["1e19", "-1e30", "-3.4e38"])
@pytest.mark.parametrize(
    "source",
    [
        "y[i] = max(max[j](x[i,j]), C)",
        "y[i] = sum[j](where(j <= i, x[i,j], C))",
        "y[i,j] = exp(where(j <= i, x[i,j], C) - max[j](where(j <= i, x[i,j], C)))",
        "y[i] = sum[j](max(x[i,j], C) * v[j])",
        """t: bool[i,j]
        S[i,j] = where(t[i,j], x[i,j], C)
        E[i,j] = exp(S[i,j] - max[j](S[i,j]))
        y[i,e] = sum[j](E[i,j] / sum[j](E[i,j]) * w[j,e])""",
    ],
)
def test_constants_of_any_magnitude_are_verified_and_right(source: str, number: str) -> None:
    """Such a mask leaves exponentials too small for floats; where it excludes a whole row, weights are equal."""
    text = source.replace("C", number)
    kernel = eq.compile(text, native="off")
    assert kernel.certificate.ok
    tensors = {"x": torch.randn(5, 7), "v": torch.randn(7), "w": torch.randn(7, 3)}
    tensors["t"] = (torch.arange(7) <= torch.arange(5)[:, None]) & (torch.arange(5) != 2)[:, None]
    tensors = {name: value for name, value in tensors.items() if f"{name}[" in text}
    expected = torch.tensor(eq.reference(text)(**tensors))
    torch.testing.assert_close(kernel(**tensors), expected.float(), rtol=1e-5, atol=1e-6)


def test_programs_with_masks_that_are_numbers_are_told_apart() -> None:
    text = "S[i,j] = where(j <= i, x[i,j], -1e30)\ny[i,j] = exp(S[i,j] - max[j](S[i,j])) / sum[j](exp(S[i,j] - max[j](S[i,j])))\nreturn y"
    assert equivalent(text, text.replace(" - max[j](S[i,j])", "")).ok
    for wrong in (text.replace("<=", "<"), text.replace("-1e30", "-inf"), text.replace("-1e30", "-1e29")):
        assert "differs" in equivalent(text, wrong).reason


@pytest.mark.usefixtures("nothing_derived_verifies")
def test_what_is_not_verified_runs_as_written_and_says_so() -> None:
    kernel = eq.compile(SOFTMAX, target="cpu")
    assert kernel.plan.schedule == "multi_pass" and kernel.certificate.ok
    assert any(
        "runs as written: the fused program was not verified: wrong" in why for why in kernel.why_not()
    )
    x, v = torch.randn(3, 70), torch.randn(70)
    torch.testing.assert_close(kernel(x=x, v=v), torch.softmax(x, 1) @ v)
    assert any("runs as written" in why for why in kernel.why_not())


@pytest.mark.usefixtures("nothing_derived_verifies")
def test_a_schedule_that_was_asked_for_is_verified_or_refused() -> None:
    with pytest.raises(VerificationError, match="was not verified: wrong"):
        eq.compile(SOFTMAX, target="cpu", prefer="rolling")


@pytest.mark.usefixtures("nothing_derived_verifies")
def test_the_rules_of_a_user_are_verified_or_refused() -> None:
    twice = eq.rule("twice", "relu(relu(a))", "relu(a)")
    with eq.rules(twice), pytest.raises(VerificationError, match="was not verified: wrong"):
        eq.compile(SOFTMAX, target="cpu")


def test_what_is_verified_is_not_said_to_be_refused() -> None:
    kernel = eq.compile(SOFTMAX, target="cpu")
    assert kernel.refused is None and not kernel.why_not()


def test_a_refusal_says_what_was_compared_and_three_things_to_do() -> None:
    with pytest.raises(VerificationError) as caught:
        eq.compile("x: f32[i]\ny[i] = 1 / (x[i] - x[i])", target="cpu")
    text = str(caught.value)
    assert "compared: prepared: 0 elements agree; left out: " in text and "infinite or NaN" in text
    ways = text.partition("what you can do:\n")[2]
    assert ways.count("  - ") == 3
    assert all(way in ways for way in ('prefer="multi_pass"', "verify=False", "scalars={...}"))
    assert "residue" not in text
    kernel = eq.compile("x: f32[i]\ny[i] = 1 / (x[i] - x[i])", target="cpu", native="off", verify=False)
    assert torch.isinf(kernel(x=torch.ones(3))).all()


def test_what_is_equal_up_to_rounding_is_said_without_residues() -> None:
    found = equivalent("y[i] = x[i] * 3.141592653589793", "y[i] = x[i] * 3.141592653589792")
    assert found.counterexample is not None and found.counterexample.residues is not None
    assert "equal up to rounding, but not in exact arithmetic: " in str(found.counterexample)
    assert "residue" not in str(found.counterexample)
