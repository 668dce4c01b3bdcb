"""The reports end to end on one small program, and that they can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cpu_report, errors_report, start_report, workloads_report
from bench.magnitudes import MAGNITUDES
from bench.report import Options, Report
from bench.runner import REPORTS, run
from eqfuse.loops.plan import SCHEDULES
from eqfuse.verify.budget import Error, Measurement, SpecialReport

ONE = Options(only="l2norm", small=True, torch_compile=False)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_workloads(tmp_path: Path) -> None:
    assert run("workloads", ONE, output=tmp_path / "x.json") == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert list(row["schedules"]) == list(SCHEDULES)
    assert all(found["certificate"] and found["triton"] < 1e-6 for found in row["schedules"].values())
    assert all(found["triton_from_tiles"] < 1e-6 for found in row["schedules"].values())


@pytest.mark.slow
def test_workloads_fails_where_emitted_source_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = workloads_report.interpret

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = original(*args, **kwargs)
        return result * 1.001

    monkeypatch.setattr(workloads_report, "interpret", wrong)
    assert run("workloads", ONE, output=tmp_path / "x.json") == 1
    failures = json.loads((tmp_path / "x.json").read_text())["failures"]
    assert len(failures) == 2 * len(SCHEDULES)
    assert failures[0].startswith("l2norm small rolling: Triton's error 1.00e-03 is above ")
    assert failures[1].startswith(
        "l2norm small rolling: Triton's difference from the tile program 1.00e-03 is "
    )


@pytest.mark.slow
def test_workloads_fails_where_a_schedule_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads_report, "SCHEDULES", (*SCHEDULES, "sideways"))
    assert run("workloads", ONE, output=tmp_path / "x.json") == 1
    assert rows_of(tmp_path / "x.json")[0]["schedules"]["sideways"]["problems"]


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    assert run("compile", ONE, output=tmp_path / "x.json") == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert row["saturated"] and row["enodes"] > 0
    assert {"derive", "choose", "lower", "verify"} <= set(row["ms"]) and row["triton_ms"] > 0


@pytest.mark.slow
def test_emit(tmp_path: Path) -> None:
    assert run("emit", ONE, output=tmp_path / "x.json") == 0
    rows = rows_of(tmp_path / "x.json")
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    assert all(row["spilled_bytes"] == 0 for row in rows)


@pytest.mark.slow
def test_cpu(tmp_path: Path) -> None:
    assert run("cpu", ONE, output=tmp_path / "x.json") == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert set(row["median_ms"]) == {"eager", "fused", "copy"} and set(row["memory"]) == {"eager", "fused"}
    assert row["code"] in ("C++", "torch calls: there is no C++ compiler (g++, clang++ or $CXX)")
    assert row["errors"]["fused"] <= row["errors"]["bound"]
    assert row["torch_compile_skipped"] == "not asked for"


def test_cpu_says_which_programs_torch_compile_did_not_run() -> None:
    report = Report(cpu_report.TITLE, cpu_report.COLUMNS)
    done = {
        "torch_compile_skipped": "",
        "over_eager": 2.0,
        "over_compile": 0.5,
        "compile_calls_attention": True,
    }
    late = {"torch_compile_skipped": "TimeoutError: not done after 180 s", "over_eager": 2.0}
    report.add({"program": "a", **done}, {"program": "b", **late}, {"program": "c", **late})
    cpu_report.summarise(report)
    assert report.summary == [
        "geometric mean over eager 2.00x (aim 1.5x), 3 programs",
        "geometric mean over torch.compile 0.50x, 1 programs",
        "where torch.compile calls torch's own attention (*): 0.50x, 1 programs",
        "under 0.8x of torch.compile: a 0.50x",
        "not C++: none",
        "torch.compile did not run: TimeoutError: not done after 180 s (b, c)",
        "under 0.8x of eager: none",
    ]


def test_verify(tmp_path: Path) -> None:
    run("verify", ONE, output=tmp_path / "x.json")
    (row,) = rows_of(tmp_path / "x.json")
    assert row["ok"] and row["reached"] and 0 < row["share"] < 1


@pytest.mark.slow
def test_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_report, "PROCESSES", 1)
    assert run("start", ONE, output=tmp_path / "x.json") == 0
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert row["found"] and row["processes"] == 1
    assert set(row["warm"]["wall_ms"]) == {"torch", "eqfuse", "compile", "call"}


def test_errors(tmp_path: Path) -> None:
    assert run("errors", ONE, output=tmp_path / "x.json") == 0
    kinds = {row["inputs"] for row in rows_of(tmp_path / "x.json")}
    assert {
        "normal",
        "wide",
        "close",
        "outliers",
        "heavy tails",
        "NaN",
        "zero line",
        "denormal",
        "no c",
        *(f"scale {magnitude}" for magnitude in MAGNITUDES),
    } <= kinds


@pytest.mark.slow
def test_errors_fails_where_an_output_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = errors_report.as_tuple
    monkeypatch.setattr(errors_report, "as_tuple", lambda found: tuple(x * 1.001 for x in original(found)))
    assert run("errors", ONE, output=tmp_path / "x.json") == 1
    rows = rows_of(tmp_path / "x.json")
    assert any(row["scaled"] and row["wrong"] and row["ratio"] > 1 for row in rows)
    # No rounding explains a thousandth: it was asked, and is far smaller.
    assert any(0 < row["rounding_rms"] < row["fused_rms"] and not row["within"] for row in rows)


@pytest.mark.slow
def test_what_needs_headroom_is_named_and_nothing_else_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = errors_report.as_tuple

    def overflowing(found: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.where(x.abs() > 1e30, torch.inf, x) for x in original(found))

    monkeypatch.setattr(errors_report, "as_tuple", overflowing)
    monkeypatch.setattr(errors_report, "MAGNITUDES", {"1e37": MAGNITUDES["1e37"]})
    assert run("errors", ONE, output=tmp_path / "x.json") == 1
    wrong = [row for row in rows_of(tmp_path / "x.json") if row["wrong"]]
    assert {"scale 1e37"} <= {row["inputs"] for row in wrong} and not any(row["within"] for row in wrong)
    monkeypatch.setitem(errors_report.HEADROOM, "l2norm", "a reason")
    assert run("errors", ONE, output=tmp_path / "x.json") == 0
    wrong = [row for row in rows_of(tmp_path / "x.json") if row["wrong"]]
    assert all(row["within"] and row["accepted"] == "a reason" for row in wrong)
    assert errors_report._remarks(wrong[0]) == ["needs headroom: a reason"]


def test_an_error_that_rounding_alone_makes_is_the_programs_own() -> None:
    error, lucky = Error(3e-6, 1e-6), Error(1e-6, 1e-7)
    measured = Measurement("normal", "y", error, lucky, SpecialReport((), 0))
    assert not errors_report._row("p", "rolling", measured, 1e-7, 0.9e-6)["within"]
    row = errors_report._row("p", "rolling", measured, 1e-7, 1.1e-6)
    assert row["within"] and errors_report._remarks(row)[-1].startswith("over 2 times: lucky unfused run")


def test_every_report_is_there() -> None:
    for name in REPORTS:
        assert Path(workloads_report.__file__).with_name(f"{name}_report.py").exists()
