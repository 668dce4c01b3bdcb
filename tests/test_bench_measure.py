"""Errors, interleaved times, memory, reports: what the benchmarks are judged with."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench import measure
from bench.measure import in_fresh_process, peak_growth, rounding, time_limit
from bench.report import Column, Report, geometric_mean, recorded
from bench.report import Options as BenchOptions
from bench.runner import OWN, run
from bench.timing import repeated
from eqfuse.errors import EqfuseError
from eqfuse.extract.machine import cores
from eqfuse.measure import interleaved, rms_error, worst_error

MEGABYTE = 2**20


def test_rms_error_is_relative() -> None:
    reference = torch.full((100,), 4.0, dtype=torch.float64)
    assert rms_error(reference + 0.04, reference) == pytest.approx(0.01)
    assert rms_error(torch.ones(3), torch.zeros(3)) == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize(
    ("value", "reference"),
    [
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([1.0, math.nan], [1.0, math.inf]),
        ([1.0, 2.0], [1.0]),
    ],
)
def test_rms_error_of_other_positions_is_infinite(value: list[float], reference: list[float]) -> None:
    assert rms_error(torch.tensor(value), torch.tensor(reference)) == math.inf


def test_rms_error_passes_over_equal_infinities_and_nan() -> None:
    value = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    assert rms_error(value, value.double()) == 0.0


def test_worst_error_needs_all_outputs() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    assert worst_error((x,), (x, y)) == math.inf
    assert worst_error((x, y), (x, y)) == 0.0


def test_rounding_is_that_of_the_coarsest_output() -> None:
    assert rounding((torch.ones(1), torch.ones(1, dtype=torch.float16))) == 2**-10
    assert rounding((torch.ones(1, dtype=torch.int64), torch.ones(1))) == 2**-23


def test_interleaved_gives_every_contestant_the_same_fresh_inputs() -> None:
    seen: dict[str, list[float]] = {"a": [], "b": []}
    times = interleaved(
        {name: lambda values, name=name: seen[name].append(float(values["x"])) for name in seen},
        lambda index: {"x": torch.tensor(float(index))},
        rounds=4,
    )
    assert seen == {"a": [0.0, 1.0, 2.0, 3.0, 4.0], "b": [0.0, 1.0, 2.0, 3.0, 4.0]}
    assert [len(times.seconds[name]) for name in seen] == [4, 4]  # the first round warms up
    assert times.median("a") >= 0


def test_each_round_begins_with_another_contestant_and_a_slow_one_is_called_once() -> None:
    called: list[str] = []

    def call(name: str, values: int) -> None:
        called.append(name)
        time.sleep(0.05 if name == "slow" else 0)

    names = ("slow", "a", "b")
    times = interleaved(
        {name: partial(call, name) for name in names}, lambda index: index, rounds=2, most_seconds=0.03
    )
    assert called == ["slow", "a", "b", "a", "b", "b", "a"]
    assert {name: len(times.seconds[name]) for name in names} == {"slow": 1, "a": 2, "b": 2}
    assert times.median("slow") >= 0.05


def test_results_of_repeated_calls_are_not_kept() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def call() -> torch.Tensor:
        assert all(each() is None for each in made)
        result = torch.empty(1)
        made.append(weakref.ref(result))
        return result

    repeated(call, 3)()
    assert len(made) == 3


def grown_by(megabytes: int) -> int:
    return peak_growth(lambda: torch.ones(megabytes * MEGABYTE // 4).sum())[1]


@pytest.mark.slow
def test_peak_growth_sees_memory_that_is_given_back() -> None:
    small, large = in_fresh_process(grown_by, 1), in_fresh_process(grown_by, 300)
    assert 300 * MEGABYTE <= large <= 340 * MEGABYTE
    assert small <= 40 * MEGABYTE


def test_a_failure_inside_recorded_becomes_a_line() -> None:
    report = Report("title", ())
    with recorded(report.failing("softmax")):
        raise EqfuseError("unknown name 'x'", hint="declare it")
    with recorded(report.failing("mlp")):
        raise ZeroDivisionError("division by zero")
    assert report.failures == ["softmax: unknown name 'x'", "mlp: ZeroDivisionError: division by zero"]


def test_a_row_says_what_broke_and_ratios_are_of_cells_that_have_both_ways() -> None:
    report = Report("title", (Column("way", lambda row: str(row["way"])),))
    for cell, way, ms in (
        ("a", "eqfuse", 2.0),
        ("a", "torch", 6.0),
        ("b", "eqfuse", 1.0),
        ("b", "torch", 0.0),
    ):
        with report.row(f"{cell}, {way}", fails=way == "eqfuse", cell=cell, way=way) as row:
            row["ms"] = 1 / (1 / ms)
    with report.row("c, eqfuse", cell="c", way="eqfuse") as row:
        raise EqfuseError("unknown name 'x'", hint="declare it")
    assert len(report.rows) == 5 and report.failures == ["c, eqfuse: unknown name 'x'"]
    assert report.rows[3]["failed"].startswith("ZeroDivisionError") and "ms" not in report.rows[3]
    assert report.ratios("ms", "torch", "eqfuse", "cell") == [3.0]


def test_report_prints_and_writes(tmp_path: Path) -> None:
    columns = (Column("program", lambda row: str(row["program"])),)
    report = Report("a title", columns, path=tmp_path / "deep" / "x.json")
    report.failures.append("mlp [rolling]: wrong")
    report.add({"program": "softmax", "error": 1e-7})
    content = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert content["rows"] == [{"program": "softmax", "error": 1e-7}]
    assert content["environment"]["torch"].startswith(torch.__version__.split("+")[0])
    text = io.StringIO()
    report.print(Console(file=text, width=100))
    assert "softmax" in text.getvalue() and "mlp [rolling]: wrong" in text.getvalue()


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))


def test_unknown_benchmark_and_workload() -> None:
    with pytest.raises(EqfuseError) as unknown:
        run("workload", BenchOptions())
    assert str(unknown.value) == "unknown benchmark 'workload'\ndid you mean 'workloads'?"
    with pytest.raises(EqfuseError, match="no workload starts with 'sotfmax'"):
        run("cpu", BenchOptions(only="sotfmax"))


@pytest.mark.parametrize("name", sorted(OWN))
def test_an_unknown_name_of_what_a_benchmark_has_of_its_own(name: str, tmp_path: Path) -> None:
    checkout = tmp_path / "level1"  # of KernelBench
    checkout.mkdir()
    (checkout / "1_Product.py").touch()
    with pytest.raises(EqfuseError, match="'sotfmax'"):
        run(name, BenchOptions(only="sotfmax", folder=tmp_path), output=tmp_path / "report.json")


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarm signals here")
@pytest.mark.slow
def test_a_time_limit_ends_what_takes_longer_and_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    with pytest.raises(TimeoutError, match="not done after 1 s"), time_limit(1):
        time.sleep(5)
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(1):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
    time.sleep(1.1)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarm signals here")
@pytest.mark.slow
def test_a_time_limit_is_longer_where_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0 * cores(), 0.0, 0.0))
    with time_limit(1):
        time.sleep(1.5)
    with pytest.raises(TimeoutError, match="not done after 1 s"), time_limit(1):
        time.sleep(5)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarm signals here")
@pytest.mark.slow
def test_a_time_limit_is_longer_where_a_process_has_to_wait_for_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    computed = iter([0.0, *(0.5 * n for n in range(1, 100))])
    monkeypatch.setattr(measure, "_computed", lambda: next(computed))
    with time_limit(1):
        time.sleep(1.5)
