"""Limits of memory and time of a derivation: rewriting, merges, plans, gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import eqfuse as eq
from eqfuse import limits
from eqfuse.errors import EqfuseError
from eqfuse.limits import OverLimit
from eqfuse.rules.egraph import client

SOFTMAX = "y[i,j] = exp(x[i,j] - max[k](x[i,k])) / sum[k](exp(x[i,k] - max[k](x[i,k])))"


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def over_when(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has passed once a stage begins."""
    monkeypatch.setattr(limits.Derivation, "left", property(lambda self: -1.0 if passed else 100.0))
    passed: list[bool] = []
    module, name = place.rsplit(".", 1)
    target = pytest.importorskip(module)
    stage = getattr(target, name)

    def begun(*arguments: object, **named: object) -> object:
        passed.append(True)
        try:
            return stage(*arguments, **named)
        finally:
            passed.clear()

    monkeypatch.setattr(target, name, begun)


@pytest.mark.parametrize(
    "place",
    [
        "eqfuse.rules.prepare.prepare",
        "eqfuse.rules.merge_search.derive_group",
        "eqfuse.compiler.plans",
    ],
)
def test_beyond_its_time_a_program_runs_as_written_and_says_so(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_when(place, monkeypatch)
    with pytest.warns(UserWarning, match="longer to derive than EQFUSE_DERIVE_SECONDS = .*runs as written"):
        kernel = eq.compile(SOFTMAX, target="cpu", native="off")
    assert kernel.plan.schedule == "multi_pass" and kernel.plan.form == "written"
    assert kernel.certificate.ok and "as written" in repr(kernel)
    (why,) = kernel.why_not()
    assert "runs as written" in why and "EQFUSE_DERIVE_SECONDS=600" in why
    assert "EQFUSE_DERIVE_SECONDS" in kernel.explain() and len(list(kernel.plans())) == 1
    x = torch.randn(3, 70)
    torch.testing.assert_close(kernel(x=x), torch.softmax(x, 1))
    with pytest.raises(OverLimit, match="EQFUSE_DERIVE_SECONDS"):
        eq.compile(SOFTMAX, target="cpu", prefer="rolling", native="off")
    assert eq.compile(SOFTMAX, target="cpu", prefer="multi_pass", native="off").certificate.ok


def test_what_ended_at_a_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        over_when("eqfuse.rules.merge_search.derive_group", patched)
        with pytest.warns(UserWarning, match="as written"):
            eq.compile(SOFTMAX, target="cpu", native="off")
    assert eq.compile(SOFTMAX, target="cpu", prefer="rolling", native="off").certificate.ok


@pytest.mark.slow
def test_the_system_ends_e_graphs_that_take_longer_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQFUSE_DERIVE_SECONDS", "1")
    declared = ("(datatype E (N i64))",)
    with (
        limits.derivation(),
        pytest.raises(OverLimit, match="EQFUSE_DERIVE_SECONDS = 1"),
        client.opened("a", lambda: declared) as graphs,
    ):
        graphs.ask("run", ("(relation r (i64))", "(r 0)", "(rule ((r x)) ((r (+ x 1))))", "(run 1000000000)"))
    monkeypatch.setenv("EQFUSE_DERIVE_SECONDS", "100")
    monkeypatch.setenv("EQFUSE_DERIVE_MB", "20")
    with (
        limits.derivation(),
        pytest.raises(OverLimit, match="EQFUSE_DERIVE_MB = 20"),
        client.opened("a", lambda: declared) as graphs,
    ):
        grow = "(rule ((r x)) ((r (+ (* 2 x) 1)) (r (* 2 x))))"
        graphs.ask("run", ("(relation r (i64))", "(r 1)", grow, "(run 40)"))
    with client.opened("a", lambda: declared) as graphs:  # the next has a process again
        graphs.ask("run", ("(let a (N 1))",))


def test_seconds_of_the_process_of_e_graphs_count() -> None:
    with limits.derivation(), client.opened("b", lambda: ("(datatype E (N i64))",)) as graphs:
        graphs.ask("run", ("(relation r (i64))", "(r 0)", "(rule ((r x)) ((r (+ x 1))))", "(run 3000)"))
        running = limits.running()
        assert running is not None and running.elsewhere > 0


def test_gradients_end_too_and_first_do_without_what_shortens_them(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "m[i] = max[j](x[i,j])\ny[i] = sum[j](exp(x[i,j]-m[i])*v[j]) / sum[j](exp(x[i,j]-m[i]))"
    whole = eq.grad(text)
    monkeypatch.setattr(limits, "TRYING", -1e9)
    longer = eq.grad(text)
    assert "EQFUSE_DERIVE_SECONDS" in longer and "EQFUSE_DERIVE_SECONDS" not in whole
    assert "m passes nothing on" in whole and "m passes nothing on" not in longer
    assert eq.equivalent(whole, longer).ok
    monkeypatch.setattr(limits.Derivation, "left", -1.0)
    with pytest.raises(OverLimit, match="EQFUSE_DERIVE_SECONDS"):
        eq.grad(SOFTMAX)


@pytest.mark.parametrize("name", ["EQFUSE_DERIVE_MB", "EQFUSE_DERIVE_SECONDS"])
def test_a_limit_is_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "much")
    with pytest.raises(EqfuseError, match=f"{name} is 'much'"):
        eq.compile(SOFTMAX, target="cpu", native="off")
