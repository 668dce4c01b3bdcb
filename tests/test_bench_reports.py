"""The reports end to end on one small program, and that they can fail."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eqfuse as eq
from bench import cpu_report, errors_report, start_report, sweep_report, workloads_report
from bench.algebra_gap import gaps
from bench.algebra_programs import PROGRAMS
from bench.magnitudes import MAGNITUDES
from bench.operators import INEXPRESSIBLE, OPERATORS
from bench.report import Options, Report, chosen_names
from bench.runner import REPORTS, run
from eqfuse.loops.plan import SCHEDULES
from eqfuse.measure import as_tuple, worst_error
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.verify.budget import Error, Measurement, SpecialReport

pytestmark = pytest.mark.anew
"""Reports show what each stage of compiling takes."""

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


@pytest.mark.sweep
def test_workloads_side_by_side_are_in_the_order_of_the_table(tmp_path: Path) -> None:
    two = replace(ONE, only="variance,l2norm", jobs=2)
    assert run("workloads", two, output=tmp_path / "x.json") == 0
    assert [row["program"] for row in rows_of(tmp_path / "x.json")] == ["l2norm", "variance"]


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
def test_backward_says_fused_of_outputs_with_a_kernel_each(tmp_path: Path) -> None:
    assert run("backward", replace(ONE, only="layernorm"), output=tmp_path / "x.json") == 0
    row = next(row for row in rows_of(tmp_path / "x.json") if row["all"])
    assert row["kernels"] == 2 and row["why_not"] == []


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    assert run("compile", ONE, output=tmp_path / "x.json") == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert row["saturated"] and row["enodes"] > 0
    assert {"derive", "choose", "lower", "verify"} <= set(row["ms"]) and row["triton_ms"] > 0
    assert row["orders"] > 0 and not row["order"]


@pytest.mark.slow
def test_emit(tmp_path: Path) -> None:
    assert run("emit", ONE, output=tmp_path / "x.json") == 0
    rows = rows_of(tmp_path / "x.json")
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    assert all(row["spilled_bytes"] == 0 for row in rows)


@pytest.mark.slow
def test_sweep(tmp_path: Path) -> None:
    options = Options(small=True, torch_compile=False, examples=3, seed=4, jobs=1)
    assert run("sweep", options, output=tmp_path / "x.json") == 0
    for row in rows_of(tmp_path / "x.json"):
        assert row["error"] <= max(sweep_report.TOLERANCE[row["dtype"]], 2 * row["peer_error"])
        assert row["us"] > 0 and row["peer_us"] > 0 and row["ratio"] == row["peer_us"] / row["us"]


def test_cells_of_a_sweep_are_of_every_kind() -> None:
    cells = [sweep_report.Cell.drawn(seed, "cpu", small=True) for seed in range(300)]
    assert {cell.operation for cell in cells} == set(sweep_report.OPERATIONS)
    assert {cell.layout for cell in cells} == set(sweep_report.LAYOUTS)
    for cell in cells:
        x = cell.tensor(0)
        assert x.shape == cell.shape and x.dtype == TORCH_DTYPES[cell.dtype]
        if cell.layout == "expanded":
            assert any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))


def test_sweep_fails_where_an_error_is_not_rounding() -> None:
    row = {"seed": 1, "program": "y = sum[a](x[a])", "dtype": "f32", "error": 3e-5, "peer_error": 1e-7}
    assert sweep_report.failing([row]) == ["1, y = sum[a](x[a]): 3.0e-05"]
    assert sweep_report.failing([row | {"error": 1e-6}, row | {"error": float("nan")}])


@pytest.mark.slow
def test_cpu(tmp_path: Path) -> None:
    assert run("cpu", ONE, output=tmp_path / "x.json") == 0
    rows = rows_of(tmp_path / "x.json")
    assert [row["threads"] for row in rows] == list(dict.fromkeys((torch.get_num_threads(), 1)))
    for row in rows:
        assert set(row["median_ms"]) == set(row["warm_ms"]) == {"eager", "fused", "copy"}
        assert row["code"] in ("C++", "torch calls: there is no C++ compiler (g++, clang++ or $CXX)")
        assert row["errors"]["fused"] <= row["errors"]["bound"]
        assert row["torch_compile_skipped"] == "not asked for"
    assert set(rows[0]["memory"]) == {"eager", "fused"}
    assert rows[0]["seconds"]["fused"] > 0 and rows[0]["seconds_again"]["fused"] > 0
    before = (tmp_path / "x.json").stat().st_mtime_ns
    assert run("cpu", replace(ONE, resume=True), output=tmp_path / "x.json") == 0
    assert rows_of(tmp_path / "x.json") == rows and (tmp_path / "x.json").stat().st_mtime_ns > before


def test_cpu_says_which_programs_miss_the_aims() -> None:
    report = Report(cpu_report.TITLE, cpu_report.COLUMNS)

    def row(name: str, compiled: float | None, problem: str = "", *, calls: bool = False) -> dict[str, Any]:
        times = {"eager": 4.0, "fused": 2.0, "copy": 1.0}
        if compiled is not None:
            times["torch.compile"] = compiled
        return {
            "program": name,
            "threads": 1,
            "median_ms": times,
            "warm_ms": times,
            "seconds": {"fused": 0.25, "torch.compile": 4.0},
            "bytes": 1 << 40,
            "torch_compile_skipped": problem,
            "compile_calls_attention": calls,
            "code": "C++",
        }

    late = "TimeoutError: not done after 120 s"
    report.add(row("softmax", 1.0, calls=True), row("b", 4.0), row("c", None, late), row("d", None, late))
    cpu_report.summarise(report)
    assert report.summary == [
        "1 thread, all programs over torch.compile: 1.00x cold, 1.00x warm (aim 1.5x), 2 programs",
        "1 thread, all programs over eager: 2.00x cold, 2.00x warm (aim 4.0x), 4 programs",
        "1 thread, row programs over torch.compile: 0.50x cold, 0.50x warm (aim 2.5x), 1 programs",
        "1 thread, under 1.0x of torch.compile: softmax 0.50x",
        "1 thread, under 1.0x of eager: none",
        "1 thread, row programs above 1.5 copies, of 1: softmax 2.00",
        "1 thread, where torch.compile calls torch's own attention (*): 0.50x, 1 programs",
        "1 thread, where torch.compile generates the code: 2.00x, 1 programs",
        "median seconds of compiling and the first call, fused: 0.25 / -",
        "median seconds of compiling and the first call, torch.compile: 4.00 / -",
        "not C++: none",
        f"torch.compile did not run: {late} (c, d)",
        "not in the table: cumsum, " + INEXPRESSIBLE["cumsum"],
    ]


@pytest.mark.slow(but=["gemm"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_torch(name: str) -> None:
    workload = OPERATORS[name]
    assert pickle.loads(pickle.dumps(workload.eager)) is workload.eager  # torch.compile keeps it on disk
    case = workload.cases["small"]
    inputs = workload.inputs(case)
    found = as_tuple(eq.compile(workload.text(case))(**workload.arguments(case, inputs)))
    assert worst_error(found, workload.run_exact(case, inputs)) < 1e-6


def test_verify(tmp_path: Path) -> None:
    run("verify", ONE, output=tmp_path / "x.json")
    (row,) = rows_of(tmp_path / "x.json")
    assert row["ok"] and row["reached"] and 0 < row["share"] < 1


def test_algebra(tmp_path: Path) -> None:
    """Orders of small programs: chosen, right, proved, and as exact as what is written."""
    options = Options(only="chain,LAAB", small=True, examples=20)
    assert run("algebra", options, output=tmp_path / "x.json") == 0
    rows = {row["program"]: row for row in rows_of(tmp_path / "x.json")}
    assert rows["chain and a vector"]["order"] == ["y[i] = sum[j](a[i, j] * sum[k](b[j, k] * c[k]))"]
    assert rows["LAAB, H'Hx"]["order"] == ["y[k] = sum[i](h[i, k] * sum[j](h[i, j] * x[j]))"]
    assert not rows["LAAB, y'H'H"]["order"] and all(row["proved"] for row in rows.values())
    assert all(row["chosen"] <= row["written"] for row in rows.values())


def test_orders_are_the_best_of_all_that_are_tried() -> None:
    found = {gap.program: gap for gap in gaps(PROGRAMS)}
    assert all(gap.best == gap.chosen <= gap.greedy for gap in found.values())
    assert found["LAAB, H'yx'H"].greedy > 2 * found["LAAB, H'yx'H"].chosen


@pytest.mark.slow
def test_ragged(tmp_path: Path) -> None:
    options = Options(only="decode,prefill doc", small=True)
    assert run("ragged", options, output=tmp_path / "x.json") == 0
    rows = rows_of(tmp_path / "x.json")
    assert [row["cell"] for row in rows] == ["decode", "prefill doc"]
    assert all(row["longest"] == 1024 and row["error"] < row["tolerance"] for row in rows)


def test_names_of_own_programs_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(eq.EqfuseError, match="no program starts with 'gemm'"):
        run("ragged", Options(only="gemm"), output=tmp_path / "x.json")
    assert chosen_names("soft, de", ("decode", "prefill", "softmax")) == ["decode", "softmax"]


@pytest.mark.sweep
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, only, count, holds",
    [
        ("keys", "gradient of an embedding,messages,attention,variance", 5, ()),
        ("scans", "cumsum before,logcumsumexp,running mean,linear attention", 5, ("proved",)),
        pytest.param("scans", "cumsum", 6, ("proved",), marks=pytest.mark.sweep),
        ("ops", "rms norm,contrastive", 4, ("verified",)),
    ],
)
def test_programs_are_right(name: str, only: str, count: int, holds: tuple[str, ...], tmp_path: Path) -> None:
    """Reductions by key, sorted or not; prefixes of a few kinds, at 2,000 positions; programs of the library."""
    options = Options(only=only, small=True, torch_compile=False)
    assert run(name, options, output=tmp_path / "x.json") == 0
    rows = rows_of(tmp_path / "x.json")
    assert len(rows) == count and all(row[each] for row in rows for each in holds)
    assert all(row["error"] < 1e-5 and row.get("gradient_error", 0) < 1e-5 for row in rows)


@pytest.mark.slow
def test_chunks(tmp_path: Path) -> None:
    """Attention by running sums is right, and its derivation holds."""
    assert run("chunks", Options(only="RetNet", small=True), output=tmp_path / "x.json") == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert row["proved"] and row["error"] < 2e-2
