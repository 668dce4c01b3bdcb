"""Limits of memory and time of a verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.limits import Limits
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import Value
from eqfuse.terms.nodes import Fold
from eqfuse.terms.parser import parse
from eqfuse.tile import interpreter as tile_interpreter
from eqfuse.verify import verification
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.check import check_stages
from eqfuse.verify.equivalence import equivalent as proved_or_tried
from eqfuse.verify.sizes import LARGEST_WORK, small_extents, volume, work
from eqfuse.verify.source import Stage

equivalent = partial(proved_or_tried, prove=False)

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


TRANSPOSED = """
k: axis[3]
l: axis[5]
m: axis[7]
s: axis[N(p) + 2]
t: axis[N(q) + 4]
u: axis[N(r) + 6]
p: axis[N(x, 2)]
q: axis[N(x, 3)]
r: axis[N(x, 4)]
y[n,o,s,t,u] = sum[c,k,l,m](where((s >= k) & (s - k < N(p)) & (t >= l) & (t - l < N(q)) & (u >= m) & (u - m < N(r)),
    x[n,c,s - k,t - l,u - m], 0) * w[c,o,k,l,m])
"""


def test_a_transposed_convolution_has_one_long_free_axis_and_half_the_trials() -> None:
    """At sizes of 3 it took three times as much, and its trials 10 s."""
    program = parse(TRANSPOSED)
    extents = small_extents(program)
    assert volume(program, extents) < 450_000 and extents["c"] > 2
    assert sorted(extents[axis] for axis in "no") == [2, 3]
    assert check_stages(program, [Stage.of_program("same", program, extents)]).trials == 8


def test_sizes_are_small_where_positions_are_divided_or_reductions_take_long() -> None:
    beam = parse(
        "k: axis[4]\nv[b,k], p[b,k] = topk[f,k](x[b,f//V,f%V])\ny[b,k] = p[b,k] // V", scalars={"V": 50}
    )
    extents = small_extents(beam, {"V": 50})
    assert extents["f"] > 50 and max(extents["b"], extents["k"]) < 10
    moments = parse("m[n,g], v[n,g] = mean_var[c,h,w](x[n,g,c,h,w])")
    sums = parse("m[n,g] = mean[c,h,w](x[n,g,c,h,w])")
    assert 3 * volume(moments, small_extents(moments)) <= volume(sums, small_extents(sums))


MOMENTS = "m[n,g], v[n,g] = mean_var[c,h,w](x[n,g,c,h,w])\ny[n,g,c,h,w] = (x[n,g,c,h,w] - m[n,g]) * rsqrt(v[n,g] + 1)"


def test_sizes_that_are_drawn_anew_are_small_too() -> None:
    program = parse(MOMENTS)
    tried: list[dict[str, int]] = []

    def stages(extents: Mapping[str, int], number: int) -> list[Stage]:
        tried.append(dict(extents))
        return [Stage.of_program("same", program, extents)]

    assert check_stages(program, stages(small_extents(program), 0), elsewhere=stages).ok
    assert max(work(program, extents) for extents in tried) <= LARGEST_WORK
    reduced = [{axis: extents[axis] for axis in "chw"} for extents in tried[:2]]
    assert all(max(each[axis] for each in reduced) > 2 for axis in "chw")


def test_all_variables_of_a_state_are_combined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sequence[Value]] = []
    states = tile_interpreter.fold_states

    def noted(fold: Fold, parts: Sequence[Value], *rest: Any) -> tuple[Value, ...]:
        made.append(parts)
        return states(fold, parts, *rest)

    compiled = eq.compile(
        "m[i], v[i] = mean_var[j](x[i,j])", target="cpu", native="off", verify=False
    ).compiled
    monkeypatch.setattr(tile_interpreter, "fold_states", noted)
    x = np.random.default_rng(0).normal(size=(1, 2, 5))
    run = partial(tile_interpreter.run, compiled.tile, parse("y[i] = sum[j](x[i,j])"))
    shards = {axis: 2 for axis, _ in compiled.tile.shards}
    found = run({"x": x}, {}, {"i": 2, "j": 5}, FloatDomain("float64"), shards=shards, batch=1)
    np.testing.assert_allclose(found["v"], x.var(2))
    again = [
        a for a, b in pairwise(made) if all(np.array_equal(p.data, q.data) for p, q in zip(a, b, strict=True))
    ]
    assert made and not again
