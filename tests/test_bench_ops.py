"""The benchmarks of the library of programs and of patched models, and that they can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eqfuse as eq
from bench import ops_report, patch_report
from bench.library import Case
from bench.report import Options, Report
from eqfuse import ops
from eqfuse.tile.triton.aot import compile_for

SMALL = Options(small=True, torch_compile=False)


def test_a_program_is_timed_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("", ops_report.COLUMNS, path=tmp_path / "ops.json")
    ops_report.run(replace(SMALL, only="rms norm"), report)
    assert [row["program"] for row in report.rows] == ["rms norm", "rms norm, Gemma's"]
    assert not report.failures and all(row["verified"] and row["back_ms"] > 0 for row in report.rows)
    assert capsys.readouterr().out.count("program rms norm") == 2


def test_a_wrong_program_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ops_report.cases(ops_report.Sizes())["swiglu"]
    wrong = Case(ops.geglu, case.tensors, {}, case.torchs)
    monkeypatch.setattr(ops_report, "cases", lambda sizes: {"swiglu": wrong})
    report = Report("", ops_report.COLUMNS)
    ops_report.run(SMALL, report)
    assert len(report.failures) == 2 and "swiglu: error" in report.failures[0]


@pytest.mark.parametrize("module", [ops_report, pytest.param(patch_report, marks=pytest.mark.slow)])
def test_nothing_begins_when_time_is_over(module: Any) -> None:
    if module is patch_report:
        pytest.importorskip("transformers")
    report = Report("", module.COLUMNS)
    module.run(replace(SMALL, seconds=0.0), report)
    assert not report.rows and "out of time" in report.summary[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", patch_report.SHAPES)
def test_patched_models_train_as_they_did(name: str) -> None:
    pytest.importorskip("transformers")
    report = Report("", patch_report.COLUMNS)
    patch_report.run(replace(SMALL, only=name), report)
    rows = {row["way"]: row for row in report.rows}
    assert not report.failures and rows["eqfuse"]["step_ms"] > 0 and rows["eqfuse"]["done"]
    assert len(rows["eqfuse"]["losses"]) == 3 and "failed" in rows["Liger"]


def test_losses_that_are_other_ones_fail() -> None:
    report = Report("", patch_report.COLUMNS)
    report.add({"model": "m", "way": "unpatched", "error": 1e-7, "apart": 0.0})
    report.add({"model": "m", "way": "eqfuse", "error": 1e-3, "apart": 0.1})
    patch_report._judge(report, "m", torch.float32)
    assert len(report.failures) == 2
    report.add({"model": "m", "way": "torch.compile", "error": 1e-7, "apart": 0.04})
    report.failures.clear()
    patch_report._judge(report, "m", torch.float32)
    assert len(report.failures) == 2
    report.rows[-1]["apart"] = 0.06
    report.failures.clear()
    patch_report._judge(report, "m", torch.float32)
    assert [each.partition(":")[2] for each in report.failures] == [" an error of 1.0e-03, unpatched 1.0e-07"]


GPU_SIZES = {"t": 2048, "v": 128256, "c": 2048}
HALVES = "x: bf16[t,c]\nw: bf16[v,c]\nlabel: i64[t]\n"


@pytest.mark.slow
def test_losses_without_logits_compile_for_hopper() -> None:
    text = HALVES + ops.linear_cross_entropy.text(given={"x", "w", "label"}, dtype="f32").strip()
    for source in (text, eq.grad(text, wrt=("x", "w"))):
        kernel = eq.compile(source, target="h200", sizes=GPU_SIZES)
        reports = compile_for(kernel.triton, "sm_90", sizes=GPU_SIZES)
        assert any("wgmma" in report.instructions for report in reports)
        assert all(report.shared_bytes <= 227 << 10 and not report.spilled_bytes for report in reports)
