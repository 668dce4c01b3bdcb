"""Limits of memory and time of a verification."""

from __future__ import annotations

import pytest
import torch

import eqfuse as eq
from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.terms.parser import parse
from eqfuse.verify import verification
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.check import check_stages
from eqfuse.verify.equivalence import equivalent
from eqfuse.verify.limits import Limits
from eqfuse.verify.sizes import small_extents, volume
from eqfuse.verify.source import Stage

SOFTMAX = "y[i] = sum[j](exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j]))) * max(v[j], erf(x[i,j])))"


def compared(text: str, other: str, limits: Limits) -> Certificate:
    program, stage = parse(text), parse(other)
    extents = small_extents(program)
    return check_stages(program, [Stage.of_program("other", stage, extents)], limits=limits)


@pytest.mark.parametrize("other", [SOFTMAX, SOFTMAX.replace("max(v[j],", "min(v[j],")])
def test_trials_that_run_in_parts_say_what_all_at_once_say(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compared(SOFTMAX, other, Limits())
    monkeypatch.setattr(verification, "MEASURED", 0)
    asked: list[int] = []

    def few(self: Limits, elements: int, wanted: int) -> int:
        asked.append(elements)
        return 3

    monkeypatch.setattr(Limits, "trials", few)
    parts = compared(SOFTMAX, other, Limits())
    assert asked and parts.ok == whole.ok == (other == SOFTMAX) and parts.reason == whole.reason
    assert str(parts) == str(whole) or not parts.ok  # of a wrong one another trial is shown


def test_what_a_trial_holds_is_counted_and_fewer_run_at_once() -> None:
    limits = Limits(megabytes=100)
    assert limits.trials(elements=1000, wanted=16) == 16
    assert 1 <= limits.trials(elements=300_000, wanted=16) < 16
    assert limits.trials(elements=10_000_000, wanted=16) == 0


@pytest.mark.filterwarnings("ignore:the program was not verified")
@pytest.mark.parametrize("limits", [Limits(megabytes=0), Limits(seconds=0)])
def test_beyond_a_limit_a_program_runs_as_written_and_says_so(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "MEASURED", 0)
    monkeypatch.setattr(Limits, "of_environment", classmethod(lambda cls: limits))
    with pytest.warns(UserWarning, match="runs as written, which was not verified either .*EQFUSE_VERIFY_"):
        kernel = eq.compile(SOFTMAX, target="cpu", native="off")
    assert kernel.plan.schedule == "multi_pass" and not kernel.certificate.ok and kernel.certificate.over
    assert "a limit of verification was reached" in str(kernel.certificate)
    assert any("runs as written" in why and "please report" not in why for why in kernel.why_not())
    x, v = torch.randn(3, 70), torch.randn(70)
    expected = (torch.softmax(x, 1) * torch.maximum(v, torch.erf(x))).sum(1)
    torch.testing.assert_close(kernel(x=x, v=v), expected)
    with pytest.raises(VerificationError, match="a limit of verification was reached"):
        eq.compile(SOFTMAX, target="cpu", prefer="rolling", native="off")
    same = equivalent("y[i] = x[i]", "y[i] = x[i] + 0")
    assert not same.ok and same.over


@pytest.mark.parametrize("text", ["", "-1", "much", "0"])
def test_a_limit_is_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQFUSE_VERIFY_MB", text)
    with pytest.raises(EqfuseError, match="EQFUSE_VERIFY_MB is "):
        Limits.of_environment()


def test_of_positions_that_are_added_up_one_axis_reaches_what_they_meet() -> None:
    """A convolution of stride 2: with four axes of 18 positions, one trial took a gigabyte."""
    program = parse(
        "y[b,o,p,q] = sum[c,r,s](where((2*p+r >= 1) & (2*p+r-1 < 16) & (2*q+s >= 1) & (2*q+s-1 < 16), "
        "x[b,c,2*p+r-1,2*q+s-1] * w[o,c,r,s], 0))"
    )
    extents = small_extents(program)
    assert volume(program, extents) < 100_000
    assert 2 * (extents["p"] - 1) + extents["r"] - 2 >= 16 and 2 * (extents["q"] - 1) + extents["s"] - 2 >= 16


def test_sizes_are_small_where_positions_are_divided_or_reductions_take_long() -> None:
    beam = parse(
        "k: axis[4]\nv[b,k], p[b,k] = topk[f,k](x[b,f//V,f%V])\ny[b,k] = p[b,k] // V", scalars={"V": 50}
    )
    extents = small_extents(beam, {"V": 50})
    assert extents["f"] > 50 and max(extents["b"], extents["k"]) < 10
    moments = parse("m[n,g], v[n,g] = mean_var[c,h,w](x[n,g,c,h,w])")
    sums = parse("m[n,g] = mean[c,h,w](x[n,g,c,h,w])")
    assert 3 * volume(moments, small_extents(moments)) <= volume(sums, small_extents(sums))
