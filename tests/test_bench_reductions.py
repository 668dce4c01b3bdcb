"""The reductions benchmark: cells, peers, bundle, its run in the interpreter, and what the report says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bundling, reductions, reductions_peers, reductions_report, running
from bench.reductions_cells import COUNTS, COVERING, FAMILIES, LARGE, LENGTHS, Cell, grid
from bench.report import Options, Report
from bench.workloads import WORKLOADS

PROGRAMS = [name for family in FAMILIES for name in family.workloads if name in WORKLOADS]


def test_the_covering_sizes_have_every_count_and_every_length() -> None:
    assert {rows for rows, _ in COVERING} == set(COUNTS)
    assert {columns for _, columns in COVERING} == set(LENGTHS)


def test_all_sizes_of_rows_are_measured_on_request() -> None:
    few, every = grid("softmax"), grid("softmax", every=True)
    assert len(few) == len(LARGE) + len(COVERING)
    assert len(every) == len(LARGE) + len(COUNTS) * len(LENGTHS)
    assert {cell.name for cell in few} <= {cell.name for cell in every}


def test_other_programs_are_measured_where_they_are_asked_for() -> None:
    others = {cell.program for cell in grid("others")}
    assert others and not others & {cell.program for cell in grid(every=True)}
    assert others | {cell.program for cell in grid()} == WORKLOADS.keys()
    assert all(cell.bytes > 0 for cell in grid("others"))


def test_the_papers_tables_are_whole() -> None:
    labels = {name: [c.label for c in grid(name)] for name in ("variance", "quant_gemm", "mla", "performer")}
    assert labels["variance"] == [f"V{n}" for n in range(1, 9)]
    assert labels["quant_gemm"] == [f"Q{n}" for n in range(1, 11)]
    assert labels["mla"] == [f"L{n}" for n in range(1, 10)]
    assert sorted(c.label for c in grid("mha")) == [f"H{n}" for n in range(1, 10)]
    assert labels["performer"] == [f"n{512 << n}" for n in range(7)]


@pytest.mark.parametrize(
    "cell, expected",
    [
        (Cell("softmax", "32x1024"), 2 * 2 * 32 * 1024),
        (Cell("l2norm", "32x1024"), 2 * 32 * 1024 + 2 * 32),
        (Cell("rmsnorm_quant", "32x1024"), 3 * 32 * 1024 + 2 * 32),
        (Cell("layernorm", "32x1024"), 4 * 32 * 1024 + 4 * 1024),
        (Cell("cross_entropy", "32x1024"), 2 * 32 * 1024 + 8 * 32 + 2 * 32),
        (Cell("variance", "V1"), 4 * 8192 + 4),
        (Cell("quant_gemm", "Q1"), 2 * 4096 * 2560 + 1536 * 2560 + 2 * 4096 * 1536),
    ],
)
def test_bytes_are_inputs_read_once_and_outputs_written_once(cell: Cell, expected: int) -> None:
    assert cell.bytes == expected


def test_operations_are_those_of_the_matrix_products() -> None:
    assert Cell("quant_gemm", "Q1").flops == 2 * 4096 * 1536 * 2560
    assert Cell("mha", "H1").flops == 4 * 32 * 8 * 512 * 512 * 64
    assert Cell("mla", "L9").flops == 2 * 128 * 4096 * (512 + 512 + 64)
    assert Cell("softmax", "8192x8192").flops == 0


def _small(program: str) -> Cell:
    return Cell(program, "small")


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p != "quant_gemm"])
def test_peers_compute_the_program(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions_peers, "compiled_for_one_shape", lambda function, **_: function)
    cell = _small(program)
    inputs = cell.draw(torch.Generator().manual_seed(3))
    exact = reductions.exact(cell, inputs)
    for peer in reductions_peers.of(cell)[:2]:
        assert running.distance(peer.make(inputs)(inputs), exact) < max(5e-6, reductions.tolerance(cell))


def test_only_large_rows_are_compared_with_tuned_compilers() -> None:
    def tuned(label: str) -> list[str]:
        return [peer.name for peer in reductions_peers.of(Cell("softmax", label)) if peer.tuned]

    assert tuned("8192x8192") == ["inductor max-autotune"]
    assert tuned("32x8192") == []


def test_a_number_that_is_missing_is_no_agreement() -> None:
    right, wrong = torch.ones(3), torch.tensor([1.0, torch.nan, 1.0])
    assert math.isnan(running.distance((right, wrong), (right.double(), right.double())))
    assert running.distance((right, 2 * right), (right.double(), right.double())) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_was_not_written_is_no_number(dtype: torch.dtype) -> None:
    assert running._poisoned((2, 3), dtype, "cpu").float().isnan().all()
    assert running._poisoned((), dtype, "cpu").float().isnan().all()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two outputs, one of them of an output's own dtype; and a plan of several kernels."""
    folder = tmp_path_factory.mktemp("bundle")
    cells = [Cell("rmsnorm_quant", "3x256"), Cell("quant_gemm", "small"), Cell("logsumexp", "small")]
    assert bundling.write(folder, cells, "h200", 4) == []
    return folder


def _cells(bundle: Path) -> dict[str, tuple[Cell, list[dict[str, Any]]]]:
    entries = json.loads((bundle / bundling.MANIFEST).read_text())["cells"]
    made = [(Cell(e["program"], e["label"]), e["variants"]) for e in entries]
    return {cell.name: (cell, variants) for cell, variants in made}


@pytest.mark.slow
def test_a_bundle_runs_in_the_interpreter(bundle: Path) -> None:
    cells = {name: (cell, entries[:1]) for name, (cell, entries) in _cells(bundle).items()}
    bench = running.Bench(reductions.REDUCTIONS, running.Interpreted(), bundle, cells, with_peers=False)
    bench.compile()
    for name in cells:
        (variant,) = bench.measure(name)["variants"]
        assert variant["agrees"] and variant["certificate"]


@pytest.mark.slow
def test_variants_tell_what_they_read_again(bundle: Path) -> None:
    _, variants = _cells(bundle)["rmsnorm_quant_3x256"]
    again = {variant["schedule"]: variant["read_again_bytes"] for variant in variants}
    assert again["resident"] == 0
    assert again["rolling"] == 2 * 3 * 256


# --- the report, on figures made by hand ----------------------------------------------------------


def _peer(kind: str, ms: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "ms": ms, "agrees": True, "error": 1e-4, "launches": 3, **more}


def _row(program: str, label: str, ms: float, peers: dict[str, Any], **more: Any) -> dict[str, Any]:
    cell = Cell(program, label)
    about = {
        "schedule": "rolling",
        "predicted_ms": 1.0,
        "ms": ms,
        "agrees": True,
        "error": 1e-4,
        "launches": 1,
    }
    sizes = {"bytes": cell.bytes, "flops": cell.flops, "input_sets": 1}
    return {"cell": cell.name, **cell.entry(), **sizes, "variants": [about | more], "peers": peers}


def _content() -> dict[str, Any]:
    long = _row(
        "softmax", "2048x128256", 0.4, {"inductor": _peer("compiler", 1.0)}, read_again_bytes=525_336_576
    )
    short = _row("softmax", "32x1024", 0.002, {"inductor": _peer("compiler", 0.0018)})
    mha = _row("mha", "H1", 0.1, {"flash": _peer("library", 0.12), "cudnn": _peer("library", 0.08)})
    return {
        "environment": {"device": "a GPU", "date": "2026-01-02T03:04:05+00:00"},
        "ceilings": {"copy_bytes_per_second": 4e12, "matrix_flops_per_second": 8e14},
        "rows": [long, short, mha],
    }


def _report(tmp_path: Path) -> Report:
    source = tmp_path / "reductions_some.json"
    source.write_text(json.dumps(_content()))
    report = Report("", reductions_report.COLUMNS, path=tmp_path / "reductions.json")
    reductions_report.run(Options(measured=source), report)
    return report


@pytest.mark.slow
def test_aims_are_told_with_what_misses_them(tmp_path: Path) -> None:
    lines = _report(tmp_path).summary
    assert any(line.startswith("met: rows over 8192, over torch.compile: 2.50x") for line in lines)
    assert any(
        line.startswith("MISSED: rows up to 8192") and "0.90x at softmax_32x1024" in line for line in lines
    )
    assert any(line.startswith("met: MHA, over flash: 1.20x") for line in lines)
    assert any(line.startswith("MHA, over the best library: 0.80x") for line in lines)
    assert any(line.startswith("inputs stay in the cache, being small, in 2 of 3 cells") for line in lines)


@pytest.mark.slow
def test_a_second_read_counts_as_bytes_moved(tmp_path: Path) -> None:
    long, *_ = _report(tmp_path).rows
    assert long["bandwidth_share"] == pytest.approx(1_050_673_152 / 4e-4 / 4e12)
    assert long["moved_share"] == pytest.approx(1.5 * long["bandwidth_share"])
    assert long["reads_again"]


@pytest.mark.slow
def test_the_report_is_printed_and_drawn(tmp_path: Path) -> None:
    report = _report(tmp_path)
    assert all(column.cell(row) for column in report.columns for row in report.rows)
    drawn = {path.stem for path in (tmp_path / "reductions").glob("*.svg")}
    assert drawn == {"softmax", "mha", "predicted"}
