"""The attention benchmark: cells, peers, bundle, its run in the interpreter, and what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import attention, attention_report, bundling, measured, peers, running
from bench.attention_cells import LENGTHS, OPERATORS, Cell, grid
from bench.cells import TOLERANCE
from bench.report import Options, Report
from eqfuse.errors import EqfuseError
from eqfuse.tile.triton.aot import compile_for


def test_the_grid_is_ten_operators_by_four_lengths_and_larger_batches_of_gqa_decoding() -> None:
    cells = grid()
    assert len({cell.name for cell in cells}) == len(cells) == 45
    assert {cell.length for cell in cells} == {512, 2048, 8192, 32768} == set(LENGTHS)
    assert [c.batch for c in grid("gqa_decode", [8192])] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("operator", OPERATORS)
def test_pairs_are_those_that_the_mask_leaves(operator: str) -> None:
    cell = Cell(operator, 70)
    i = torch.arange(1 if cell.is_decode else 70)[:, None] + (69 if cell.is_decode else 0)
    j = torch.arange(70)[None]
    seen = (j <= i) if cell.is_causal else torch.ones_like(j <= i)
    assert cell.pairs == int(seen.sum())


@pytest.mark.slow
def test_a_window_counts_only_what_it_shows() -> None:
    assert Cell("window_prefill", 2048).span is None
    cell = Cell("window_prefill", 8192)
    i, j = torch.arange(8192)[:, None], torch.arange(8192)[None]
    assert cell.span == 4096
    assert cell.pairs == int(((j <= i) & (i - j < 4096)).sum())


def _inputs(cell: Cell) -> dict[str, torch.Tensor]:
    return cell.draw(torch.Generator().manual_seed(1))


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_blockwise_reference_is_the_whole_one(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(operator, 24, batch=2)
    inputs = _inputs(cell)
    (whole,) = cell.workload.run_exact(cell.case, inputs)
    group = cell.case.sizes["h"] // cell.case.sizes["k"]
    monkeypatch.setattr(attention, "EXACT_BYTES", 8 * group * 24 * 7)  # blocks of 7 queries, the last of 3
    assert running.distance(whole, attention.exact(cell, inputs)) < 1e-14


@pytest.mark.parametrize("operator", OPERATORS)
def test_peers_compute_the_operator(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    cell = Cell(operator, 24)
    inputs = _inputs(cell)
    reference = attention.exact(cell, inputs)
    found = {peer.name: peer for peer in peers.of(cell)}
    assert ("cudnn" in found) == cell.is_plain
    for name in ("flex", "inductor"):
        out = found[name].make(inputs)(inputs)
        assert isinstance(out, torch.Tensor) and out.shape == reference[0].shape
        assert running.distance(out, reference) < 2 * TOLERANCE["f16"]
    if cell.is_plain:
        assert running.distance(peers.sdpa(cell)(inputs), reference) < TOLERANCE["f16"]


def test_nan_is_no_agreement() -> None:
    reference = torch.ones(4, dtype=torch.float64)
    assert not running.distance(torch.full((4,), torch.nan), (reference,)) <= TOLERANCE["f16"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small cell."""
    folder = tmp_path_factory.mktemp("bundle")
    assert bundling.write(folder, [Cell("causal_decode", 48)], "h200", 5) == []
    return folder


def test_a_bundle_has_the_choice_first_then_other_schedules_then_neighbours(bundle: Path) -> None:
    manifest = json.loads((bundle / bundling.MANIFEST).read_text())
    (cell,) = manifest["cells"]
    first, *others = cell["variants"]
    schedules = [v["schedule"] for v in others if v["schedule"] != first["schedule"]]
    assert len(schedules) == len(set(schedules)) >= 2
    assert others[-1]["schedule"] == first["schedule"]
    assert others[-1]["configs"] != first["configs"]
    assert all(v["certificate"] and v["predicted_ms"] > 0 for v in cell["variants"])
    assert all((bundle / v["file"]).is_file() for v in cell["variants"])


def _entries(bundle: Path) -> list[dict[str, Any]]:
    (cell,) = json.loads((bundle / bundling.MANIFEST).read_text())["cells"]
    entries: list[dict[str, Any]] = cell["variants"]
    return entries


@pytest.mark.slow
def test_a_bundle_runs_in_the_interpreter_and_a_wrong_kernel_is_told(bundle: Path, tmp_path: Path) -> None:
    right, wrong = _entries(bundle)[:2]
    for entry, base in ((right, "1.4426950408889634"), (wrong, "1.4")):
        source = (bundle / entry["file"]).read_text()
        assert "1.4426950408889634" in source
        (tmp_path / entry["file"]).write_text(source.replace("1.4426950408889634", base))
    cell = Cell("causal_decode", 48)
    cells = {cell.name: (cell, [right, wrong])}
    bench = running.Bench(attention.ATTENTION, running.Interpreted(), tmp_path, cells, with_peers=False)
    bench.compile()
    row = bench.measure(cell.name)
    assert [variant["agrees"] for variant in row["variants"]] == [True, False]
    json.dumps(row)


@pytest.mark.slow
def test_a_bundled_kernel_compiles_for_hopper_without_spills(bundle: Path) -> None:
    entry = _entries(bundle)[0]
    found = compile_for((bundle / entry["file"]).read_text(), "sm_90", sizes=entry["sizes"])
    assert found and all(kernel.spilled_bytes == 0 for kernel in found)


# --- the report, on figures made by hand ----------------------------------------------------------


def _variant(predicted: float, ms: float | None, schedule: str = "rolling") -> dict[str, Any]:
    about = {"schedule": schedule, "predicted_ms": predicted, "compile_seconds": 1.0}
    return about | (
        {"problem": "out of resource"} if ms is None else {"ms": ms, "agrees": True, "error": 1e-4}
    )


def _peer(kind: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "ms": ms, "agrees": True, **more}


def _content() -> dict[str, Any]:
    decode = {
        "operator": "gqa_decode",
        "length": 8192,
        "batch": 1,
        "variants": [_variant(1.0, 0.02), _variant(2.0, 0.01), _variant(3.0, 0.03, "split_k")],
        "peers": {
            "cudnn": _peer("library", 0.03),
            "inductor": _peer("compiler", 0.016, matched=True),
            "flex": _peer("compiler", 0.06),
        },
        "host_us": {"eqfuse": 50.0, "sdpa": 25.0},
        "allocations": 0,
    }
    prefill = {
        "operator": "softcap_prefill",
        "length": 512,
        "batch": 1,
        "variants": [_variant(1.0, 2.0), _variant(2.0, None)],
        "peers": {"flex": _peer("compiler", 1.0), "inductor": {"kind": "compiler", "problem": "no"}},
    }
    return {
        "environment": {"device": "a GPU", "date": "2026-01-02T03:04:05+00:00"},
        "ceilings": {"copy_bytes_per_second": 4e12, "matrix_flops_per_second": 8e14},
        "rows": [decode, prefill],
    }


def test_ratios_regret_and_shares() -> None:
    content = _content()
    decode, prefill = (
        measured.summarise(attention_report.cell_of(row), row, content["ceilings"]) for row in content["rows"]
    )
    assert (decode["library"], decode["over_library"]) == ("inductor", pytest.approx(0.8))
    assert (decode["compiler"], decode["over_compiler"]) == ("flex", pytest.approx(3.0))
    assert decode["regret"] == pytest.approx(1.0)
    assert decode["correlation"] == pytest.approx(0.5)
    assert decode["bandwidth_share"] == pytest.approx(33_587_200 / 2e-5 / 4e12)
    assert prefill["library"] is None and prefill["over_compiler"] == pytest.approx(0.5)
    assert prefill["correlation"] is None  # a single variant ran


@pytest.mark.parametrize(
    "times, expected",
    [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], -1.0), ([1, 3, 2, 4], 0.8), ([9, 9, 9, 10], 0.7746)],
)
def test_spearman(times: list[float], expected: float) -> None:
    assert measured.spearman([0.1, 0.2, 0.3, 40.0], times) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_the_report_reads_measurements_draws_them_and_tells_failures(tmp_path: Path) -> None:
    source = tmp_path / "attention_some.json"
    source.write_text(json.dumps(_content()))
    report = Report("", attention_report.COLUMNS, path=tmp_path / "attention.json")
    attention_report.run(Options(measured=source), report)
    assert report.title.endswith("a GPU, 2026-01-02")
    assert [row["cell"] for row in report.rows] == ["gqa_decode_n8192", "softcap_prefill_n512"]
    assert report.failures == ["softcap_prefill_n512: variant 1 (rolling): out of resource"]
    assert (
        "over the best compiler: 1.22x (geometric mean of 2 cells), least 0.50x at softcap_prefill_n512"
        in (report.summary)
    )
    assert all(column.cell(row) for column in report.columns for row in report.rows)
    drawn = {path.stem for path in (tmp_path / "attention").glob("*.svg")}
    assert drawn == {"gqa_decode", "softcap_prefill", "predicted"}


def test_what_is_no_measurement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EqfuseError, match="no measurements"):
        attention_report.SOURCE.newest(tmp_path)
    path = tmp_path / "x.json"
    path.write_text('{"rows": []}')
    with pytest.raises(EqfuseError, match="has no 'ceilings'"):
        attention_report.SOURCE.read(path)
