"""EQFUSE_DEBUG: what is printed between the stages of the pipeline."""

from __future__ import annotations

import pytest
import torch

import eqfuse as eq
from eqfuse.loops.nodes import Nest
from eqfuse.tile.nodes import TileProgram

SOFTMAX = "y[i,j] = exp(x[i,j]) / sum[j](exp(x[i,j]))"
TITLES = (
    ("parse: ", "derive: ", "choose: ", "lower: ", "verify: "),
    ("program\n", "rewritten\n"),
    ("merge over j\n",),
    ("plans\n", "loops\n"),
    ("tiles\n",),
    ("certificate\n", "CPU source\n", "Triton\n"),
)
"""What each level adds."""


@pytest.mark.parametrize("level", range(7))
def test_every_level_adds_to_those_before(
    level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EQFUSE_DEBUG", str(level))
    kernel = eq.compile(SOFTMAX)
    kernel(x=torch.randn(3, 5))
    assert "@triton.jit" in kernel.triton
    captured = capsys.readouterr()
    assert captured.out == ""
    for least, titles in enumerate(TITLES, start=1):
        for title in titles:
            assert (f"-- {title}" in captured.err) == (level >= least), title
    for shown, least in ((kernel.plan, 4), (kernel.loops, 4), (kernel.tile, 5), (kernel.certificate, 6)):
        assert (str(shown) in captured.err) == (level >= least)


@pytest.mark.parametrize("level", ["7", "-1", "yes"])
def test_what_is_no_level_is_refused(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQFUSE_DEBUG", level)
    with pytest.raises(eq.EqfuseError, match=f"EQFUSE_DEBUG is '{level}'\ngive a level from 0"):
        eq.compile(SOFTMAX)


def test_loops_and_tiles_are_programs_that_print() -> None:
    kernel = eq.compile(SOFTMAX)
    assert isinstance(kernel.loops, Nest) and isinstance(kernel.tile, TileProgram)
    for program in (kernel.loops, kernel.tile):
        assert "kernel kernel1" in str(program)
        assert repr(program) == str(program)
        assert program._repr_html_().startswith("<pre") and "kernel kernel1" in program._repr_html_()
