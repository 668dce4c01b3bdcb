"""The tutorial is true: its blocks run in order, and print what it says; the command line lists what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eqfuse.cli import main
from eqfuse.extend.define import forget

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.fixture
def tidy() -> Iterator[None]:
    yield
    for name in re.findall(r'eq\.reduction\(\s*"(\w+)"', TUTORIAL):
        forget(name)


@pytest.mark.slow
def test_the_tutorial_runs_and_prints_what_it_says(tidy: None, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL):
        exec(compile(block, "docs/tutorial.md", "exec"), scope)  # noqa: S102
    printed = capsys.readouterr().out
    for shown in re.findall(r"```text\n(.*?)```", TUTORIAL, re.DOTALL):
        assert shown in printed


def test_a_new_reduction_takes_less_than_thirty_lines() -> None:
    first = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)[0]
    assert "eq.reduction(" in first and "eq.compile(" in first and len(first.splitlines()) < 30


def test_rules_and_reductions_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "softmax.eq"
    program.write_text("y[i] = sum[j](exp(x[i, j] - max[j](x[i, j])))", encoding="utf-8")
    assert main(["rules", str(program)]) == 0
    listed = capsys.readouterr().out
    (line,) = (line for line in listed.splitlines() if line.strip().startswith("split-max "))
    assert "matches" in listed and int(line.split()[-1]) > 0
    assert main(["reductions"]) == 0
    listed = capsys.readouterr().out
    assert "argmax.k[j](x, j)" in listed and "topk[j, k](x)" in listed
