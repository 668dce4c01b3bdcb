"""The benchmarks of training and of models: cells, ways, and what they call wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import models_report, training_report
from bench.decoder import SHAPES, Decoder
from bench.report import Options, Report
from bench.training_cells import cells

SMALL = Options(small=True, torch_compile=False)


def test_the_float64_gradients_are_autograds() -> None:
    for cell in cells(small=True):
        inputs = cell.draw("cpu", torch.float32)
        wide = {n: t.detach().double() if t.is_floating_point() else t for n, t in inputs.items()}
        leaves = {name: wide[name].requires_grad_() for name in cell.tensors}
        out = cell.plain(wide)
        cotangent = torch.randn(out.shape)
        made = torch.autograd.grad(out, tuple(leaves.values()), cotangent.double())
        exact = cell.exact(inputs, cotangent)
        for name, gradient in zip(leaves, made, strict=True):
            assert torch.allclose(gradient[cell.part[name]], exact[name], rtol=1e-4, atol=1e-5), cell.name


def test_a_cell_is_timed_and_compared(tmp_path: Path) -> None:
    report = Report("", training_report.COLUMNS, path=tmp_path / "training.json")
    training_report.run(replace(SMALL, only="rmsnorm"), report)
    assert [row["way"] for row in report.rows] == ["eqfuse", "torch"] and not report.failures
    assert all(row["error"] < 1e-5 and row["backward_ms"] > 0 for row in report.rows)


@pytest.mark.slow
def test_a_wrong_gradient_fails() -> None:
    (cell,) = [cell for cell in cells(small=True) if cell.name.startswith("rmsnorm")]
    wrong = replace(cell, source=cell.source.replace("* w[j]", "* w[j] * 1.01"))
    report = Report("", training_report.COLUMNS)
    training_report.measure(wrong, SMALL, torch.float32, report)
    assert len(report.failures) == 1 and "an error of" in report.failures[0]


def test_nothing_begins_when_time_is_over() -> None:
    report = Report("", training_report.COLUMNS)
    training_report.run(replace(SMALL, seconds=0.0), report)
    assert not report.rows and "out of time" in report.summary[0]


def test_a_decoder_with_a_cache_continues_as_without() -> None:
    torch.manual_seed(0)
    model = Decoder(SHAPES["tiny"]).double()
    ids = torch.randint(0, 96, (2, 7))
    with torch.no_grad():
        whole = model(ids)
        model.cached(2, 9)
        model(ids[:, :5], torch.arange(5))
        model(ids[:, 5:6], torch.tensor([5]))
        assert torch.allclose(model(ids[:, 6:], torch.tensor([6])), whole)


@pytest.mark.sweep
def test_every_way_gives_eagers_logits() -> None:
    report = Report("", models_report.COLUMNS)
    models_report.run(SMALL, report)
    assert not report.failures and len(report.rows) == 6
    assert all(row["error"] < 1e-4 for row in report.rows)
    regions = [row["regions"] for row in report.rows if row["way"] == "eqfuse, all"]
    assert len(regions) == 2 and all("taken" in text and "left to torch" not in text for text in regions)
