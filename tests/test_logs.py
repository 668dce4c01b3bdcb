"""EQFUSE_LOG: what passes between the stages of the pipeline, by name; and the line of a terminal while work goes on."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest
import torch

import eqfuse as eq
from eqfuse import compiler, logs, progress
from eqfuse.loops.nodes import Nest
from eqfuse.tile.nodes import TileProgram

SOFTMAX = "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))"
TITLES = {
    "stages": ("parse: ", "derive: ", "choose: ", "lower: ", "verify: "),
    "program": ("program\n", "rewritten\n"),
    "merge": ("merge over j\n",),
    "plan": ("plans\n", "loops\n"),
    "tiles": ("tiles\n",),
    "source": ("CPU source\n", "Triton\n"),
    "certificate": ("certificate\n",),
}
"""What each log has."""


@pytest.mark.parametrize("asked", [*TITLES, "plan, merge", "all", ""])
def test_a_log_has_what_its_name_says(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EQFUSE_LOG", asked)
    kernel = eq.compile(SOFTMAX)
    kernel(x=torch.randn(3, 5))
    assert "@triton.jit" in kernel.triton
    captured = capsys.readouterr()
    assert captured.out == ""
    names = asked.split(", ")
    for name, titles in TITLES.items():
        for title in titles:
            assert (f"-- {title}" in captured.err) == (name in names or asked == "all"), title


def test_what_is_no_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQFUSE_LOG", "plan,merges")
    with pytest.raises(
        eq.EqfuseError, match="EQFUSE_LOG names 'merges', which is no log\ndid you mean 'merge'"
    ):
        eq.compile(SOFTMAX)


def test_a_program_sets_levels_and_handlers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EQFUSE_LOG", raising=False)
    with caplog.at_level(logging.DEBUG, logger="eqfuse.merge"):
        kernel = eq.compile(SOFTMAX, native="off")
    assert str(kernel.merge).splitlines()[0] in caplog.text
    assert {record.name for record in caplog.records} == {"eqfuse.merge"}
    assert capsys.readouterr().err == ""


def test_text_is_made_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQFUSE_LOG", "plan")

    def never() -> object:
        raise AssertionError("it was made")

    logs.show("tiles", "tiles", never)


def test_regions_of_a_model_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EQFUSE_LOG", "regions")
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 48), torch.nn.Softmax(1))
    with torch.no_grad():
        torch.compile(model, backend="eqfuse", options={"take": "always", "rest": "aot_eager"})(
            torch.randn(8, 64)
        )
    lines = re.findall(
        r"^-- reduction (\d) of 2, (\w+), [\d.]+ s: graph \d+: .*$", capsys.readouterr().err, re.MULTILINE
    )
    assert lines == [("1", "0"), ("2", "2")] or lines == [("1", "0")]


# -- the line of a terminal --------------------------------------------------------------------------


def test_work_inside_of_other_work_is_shown_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.progress("reduction 2 of 5, layers.0"):
        line = progress._here.line
        assert line is not None and line.text == "eqfuse: reduction 2 of 5, layers.0"
        with progress.progress("choose"):
            assert line.text == "eqfuse: reduction 2 of 5, layers.0: choosing a plan"
        assert line.text == "eqfuse: reduction 2 of 5, layers.0"
    assert progress._here.line is None


# -- ctrl-C --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["planned", "certify", "lower_nest", "reassociated", "plans"])
def test_after_an_interrupt_everything_works(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    program = f"y[i,j] = exp({stage}[i,j]) / sum[j](exp({stage}[i,j]))"
    with monkeypatch.context() as patch:
        patch.setattr(compiler, stage, interrupted)
        patch.setenv("EQFUSE_CACHE", "off")
        with pytest.raises(KeyboardInterrupt):
            eq.compile(program, native="off")
    x = torch.randn(3, 5)
    torch.testing.assert_close(eq.compile(program, native="off")(**{stage: x}), x.softmax(1))
    assert progress._here.line is None


def test_a_signal_in_the_middle_leaves_a_kernel_that_can_be_called() -> None:
    """Wherever it comes: the same kernel is called again, and gives what it should."""
    code = """
import signal, sys, torch, eqfuse as eq
import eqfuse.rules.merge_search
source = "m[i] = max[j](x[i,j])\\ny[i,e] = sum[j](exp(x[i,j] - m[i]) * v[j,e]) / sum[j](exp(x[i,j] - m[i]))"
x, v = torch.randn(3, 5), torch.randn(5, 2)
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
interrupted = False
try:
    k = eq.compile(source, native="off")
    k(x=x, v=v)
except KeyboardInterrupt:
    interrupted = True
signal.setitimer(signal.ITIMER_REAL, 0)
k = eq.compile(source, native="off")
torch.testing.assert_close(k(x=x, v=v), x.softmax(1) @ v)
print("interrupted" if interrupted else "done")
"""
    seen = set()
    for delay in ("0.02", "0.1", "0.3"):
        environment = {**os.environ, "EQFUSE_CACHE": "off"}
        found = subprocess.run(
            [sys.executable, "-c", code, delay], capture_output=True, text=True, env=environment, check=False
        )
        assert found.returncode == 0, found.stderr
        seen.add(found.stdout.strip())
    assert "interrupted" in seen


def test_loops_and_tiles_are_programs_that_print() -> None:
    kernel = eq.compile(SOFTMAX)
    assert isinstance(kernel.loops, Nest) and isinstance(kernel.tile, TileProgram)
    for program in (kernel.loops, kernel.tile):
        assert "kernel kernel1" in str(program)
        assert repr(program) == str(program)
        assert program._repr_html_().startswith("<pre") and "kernel kernel1" in program._repr_html_()
