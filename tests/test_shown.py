"""What is shown without being asked for: notebooks' HTML, predicted sizes, progress, and small counterexamples."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.cli import main

SOFTMAX = "y[i, j] = exp(x[i, j] - max[j](x[i, j])) / sum[j](exp(x[i, j] - max[j](x[i, j])))"
ATTENTION = """
    S[b, h, i, j] = sum[d](Q[b, h, i, d] * K[b, h, j, d]) * scale
    T[b, h, i, j] = where(j <= i, S[b, h, i, j], -inf)
    P[b, h, i, j] = exp(T[b, h, i, j] - max[j](T[b, h, i, j]))
    O[b, h, i, e] = sum[j](P[b, h, i, j] / sum[j](P[b, h, i, j]) * V[b, h, j, e])
    """


class _Balanced(HTMLParser):
    """Text of a page whose elements are all closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_kernel_its_plans_and_its_derivation_in_a_notebook() -> None:
    kernel = eq.compile("y[i] = sum[j](where(x[i, j] < 1, x[i, j], 0) / max[j](abs(x[i, j])))")
    kernel(x=torch.rand(3, 50))
    page = _Balanced(kernel._repr_html_()).text
    assert "where(x[i, j] < 1" in page and "certificateverified in" in page and "i=3 j=50" in page
    plans = kernel.plans()
    table = _Balanced(plans._repr_html_()).text
    assert "predicted at i=3 j=50" in table
    assert all(plan.schedule in table for plan in plans) and "memory" in table
    said = _Balanced(kernel.derivation._repr_html_()).text
    assert said.startswith(f"derivation: {kernel.derivation.check().why}") and "split-sum" in said


def test_predicted_costs_say_for_which_sizes() -> None:
    kernel = eq.compile(SOFTMAX, verify=False)
    assert "predicted at i=256 j=256 on cpu, sizes that are assumed until a call gives others" in " ".join(
        kernel.explain().split()
    )
    assert "ms at i=256 j=256" in repr(kernel.plan)
    kernel(x=torch.rand(7, 33))
    assert "predicted at i=7 j=33 on cpu " in " ".join(kernel.explain().split())
    assert "ms at i=7 j=33" in repr(kernel.plan) and str(kernel.plans()).count("at i=7 j=33") == len(
        kernel.plans()
    )


@pytest.mark.parametrize(
    ("right", "elements"),
    [
        (ATTENTION.replace("j <= i", "j < i"), 2),
        (ATTENTION.replace("* scale", "* scale * 2"), 2),
        (ATTENTION.replace("exp(T", "1 + exp(T"), 2),
    ],
    ids=["mask", "scale", "exponential"],
)
def test_the_smallest_counterexample_is_shown(right: str, elements: int) -> None:
    found = eq.equivalent(ATTENTION, right).counterexample
    assert found is not None
    for name in "QKV":
        assert np.asarray(found.inputs[name]).size <= elements
        assert set(np.asarray(found.inputs[name]).flat) <= {0.0, 1.0, -1.0, 2.0, 3.0, 0.5}
    assert len(str(found).splitlines()) < 12
    values = {name: np.asarray(value) for name, value in found.inputs.items()}
    one, two = (eq.reference(source)(**values) for source in (ATTENTION, right))
    assert one[found.position] == found.expected and two[found.position] == found.found
    assert abs(found.expected - found.found) > 1e-6


def test_a_difference_that_floats_do_not_show_stays_as_it_was_found() -> None:
    found = eq.equivalent("y[i] = x[i]", "y[i] = x[i] + 0.000000000001 * z[i]").counterexample
    assert found is not None and found.residues is not None


def test_verify_against_prints_little(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    for name, text in (("a.eq", ATTENTION), ("b.eq", ATTENTION.replace("j <= i", "j < i"))):
        (tmp_path / name).write_text(text)
    assert main(["verify", str(tmp_path / "a.eq"), "--against", str(tmp_path / "b.eq")]) == 1
    assert len(capsys.readouterr().out.splitlines()) < 40


SLOW = """
import time
from eqfuse import progress
progress.PATIENCE = 0.05
with progress.progress("verify"):
    with progress.progress("derive"):
        time.sleep(0.5)
print("done")
"""


@pytest.mark.slow
def test_long_work_shows_itself_on_a_terminal_alone() -> None:
    quiet = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, check=True)
    assert quiet.stderr == "" and quiet.stdout == "done\n"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    loud = subprocess.run(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert loud.stdout == b"done\n"
    assert "eqfuse: verifying every stage in a finite field: rewriting" in shown
    assert "merges\r" not in shown  # it is longer than the line, and cut


@pytest.mark.slow
def test_work_that_is_soon_done_shows_nothing() -> None:
    source = SLOW.replace("0.05", "30.0").replace("0.5", "0.01")
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", source], stdout=subprocess.DEVNULL, stderr=theirs, check=True)
    os.write(theirs, b"end\n")
    assert os.read(ours, 1 << 16).decode().replace("\r", "") == "end\n"
    os.close(theirs)
    os.close(ours)
