"""The benchmark of roles: its cells, what it compiles, and that it can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eqfuse as eq
from bench import calibrate, gluon_measure, gluon_report
from bench.gluon_cells import PREFIX, PRODUCT, Cell, LatentCell, ProductCell, grid
from bench.gluon_forms import Form, forms, kernel_of
from bench.report import Options, Report
from bench.runner import run
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.extract.residuals import H200_ROLES
from eqfuse.specialize_warps import other_roles, pricing

TINY = Cell("causal_prefill", 40, dim=16, dtype="f32")


def test_the_grid_has_every_mask_dim_and_group() -> None:
    everything = grid()
    assert len({cell.name for cell in everything}) == len(everything)
    cells = [cell for cell in everything if isinstance(cell, Cell)]
    products = [cell for cell in everything if isinstance(cell, ProductCell)]
    assert {cell.dtype for cell in products} == {"bf16", "f8e4m3"}
    assert {cell.dim for cell in cells} >= {64, 72, 96, 128, 256}
    assert {cell.case.sizes["h"] // cell.case.sizes["k"] for cell in cells} >= {1, 4, 7, 8}
    assert {cell.dtype for cell in cells} == {"bf16", "f16"} and {cell.batch for cell in cells} >= {1, 8}
    assert {cell.length for cell in cells} == {1024, 2048, 4096, 8192, 16384, 32768}
    assert {cell.operator for cell in grid("alibi,prefix", small=True)} == {"alibi_prefill", PREFIX}


@pytest.mark.parametrize("operator", sorted({cell.operator for cell in grid()} - {PRODUCT, "mla"}))
def test_the_reference_of_rows_is_the_program(operator: str) -> None:
    """Beside what eqfuse's interpreter makes of the source, and with the mask that pairs count."""
    cell = replace(TINY, operator=operator)
    case = cell.case
    inputs = cell.draw(torch.Generator().manual_seed(0))
    expected = eq.reference(cell.workload.text(case), scalars=case.constants)(**inputs, **case.scalars)
    found = cell.exact(inputs, 3, 40)
    assert torch.allclose(found, torch.as_tensor(expected)[:, :, 3:], rtol=1e-9, atol=1e-9)
    i, j = torch.arange(40)[:, None], torch.arange(40)[None]
    assert int(cell._visible(i, j).sum()) == cell.pairs


def test_the_reference_of_latent_attention_is_the_program() -> None:
    cell = LatentCell("mla", "small")
    inputs = cell.draw(torch.Generator().manual_seed(0))
    expected = eq.reference(cell.workload.source)(**inputs, **cell.case.scalars, sizes={"e": 20})
    found = cell.exact(inputs, 1, 2)
    assert torch.allclose(found, torch.as_tensor(expected)[1:2], rtol=1e-9, atol=1e-9)
    assert cell.some(torch.as_tensor(expected), 1, 2).shape == found.shape


def test_the_reference_of_a_product_is_the_program() -> None:
    cell = ProductCell(48, 32, 64, "f32")
    inputs = cell.draw(torch.Generator().manual_seed(0))
    expected = eq.reference(cell.workload.exact_source)(**inputs)
    found = cell.exact(inputs, 3, 40)
    assert torch.allclose(found, torch.as_tensor(expected)[3:40], rtol=1e-9, atol=1e-9)
    assert cell.some(torch.as_tensor(expected), 3, 40).shape == found.shape


@pytest.mark.slow
def test_forms_are_the_chosen_one_others_and_triton() -> None:
    cell = Cell("global_prefill", 8192, dim=128)
    kernel, case = kernel_of(cell, "h200"), cell.case
    dtypes = dict.fromkeys("QKV", "bf16")
    compiled = compiler.pipeline(kernel.derived, case.sizes, dtypes, device_named("h200"))
    found = forms(kernel, compiled, case.sizes)
    assert [form.chosen for form in found] == [True, False, False, False, False]
    assert [form.kind for form in found] == ["roles", "roles", "roles", "roles", "Triton"]
    assert len({form.code for form in found}) == 5
    assert found[0].ms is not None and found[1].ms is not None and found[0].ms <= found[1].ms
    assert "warp_specialize" in found[0].source(kernel) and "tl.dot" in found[-1].source(kernel)


@pytest.mark.sweep
def test_without_a_gpu_every_kernel_is_compiled(tmp_path: Path) -> None:
    options = Options(only="global_prefill", small=True)
    assert run("gluon", options, output=tmp_path / "x.json") == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    found = {row["cell"]: row["forms"][0] for row in rows}
    form = found["global_prefill_d128_n1024_b1_bf16"]
    assert form["kind"] == "roles" and form["spilled_bytes"] == 0 and form["machine"]["HGMMA"] > 0


def _measured(
    monkeypatch: pytest.MonkeyPatch, scale: float, *, problem: bool = False
) -> tuple[Report, dict[str, Any]]:
    """A row whose form gives the right output times a factor."""
    case = TINY.case
    kernel = eq.compile(TINY.workload.text(case), scalars=case.constants)
    form = Form("Triton", True, "Triton: some", kernel.compiled, 1.0)

    def calls(cell: Cell, kernel: eq.Kernel, inputs: Any) -> Any:
        right = torch.as_tensor(eq.reference(cell.workload.source)(**inputs, **case.scalars)).float()

        def call() -> torch.Tensor:
            if problem:
                raise RuntimeError("no such device")
            return right * scale

        yield form, call

    monkeypatch.setattr(gluon_measure, "_kernel", lambda cell: kernel)
    monkeypatch.setattr(gluon_measure, "_draw", lambda cell: cell.draw(torch.Generator().manual_seed(1)))
    monkeypatch.setattr(gluon_measure, "_calls", calls)
    monkeypatch.setattr(gluon_measure, "_taken", lambda kernel, form: {"registers": 168, "spilled_bytes": 0})
    monkeypatch.setattr(gluon_measure, "sustained", lambda runs: dict.fromkeys(runs, 2.0))
    monkeypatch.setattr(gluon_measure, "_prepare", lambda cells, options: None)
    monkeypatch.setattr(Cell, "peers", [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gluon_report, "grid", lambda only, small: [TINY])
    report = Report(gluon_report.TITLE, gluon_report.COLUMNS)
    gluon_report.run(Options(device="cuda"), report)
    (row,) = report.rows
    return report, row


def test_a_right_result_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    report, row = _measured(monkeypatch, 1.0)
    assert not report.failures
    assert row["forms"][0]["ms"] == 2.0 and row["forms"][0]["tflops"] == TINY.flops / 2.0 / 1e9
    assert [column.cell(row) for column in report.columns][3] == "2.000"


def test_a_wrong_result_and_a_kernel_that_does_not_run_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = _measured(monkeypatch, 1.001)
    assert len(report.failures) == 1 and "relative error 1.0e-03" in report.failures[0]
    report, row = _measured(monkeypatch, 1.0, problem=True)
    assert "no such device" in report.failures[0] and "ms" not in row["forms"][0]


def test_a_file_of_a_gpu_is_shown(tmp_path: Path) -> None:
    form = {"kind": "roles", "chosen": True, "code": "Gluon", "tflops": 600.0, "spilled_bytes": 16}
    form |= {"consumers": 2, "slots": 2, "delayed": [1], "persistent": True, "blocks": "i=128"}
    other = {"kind": "Triton", "chosen": False, "code": "Triton", "tflops": 400.0}
    peers = {
        "cudnn": {"kind": "library", "tflops": 500.0},
        "flash": {"kind": "library", "tflops": 400.0},
        "flex": {"kind": "compiler", "tflops": 300.0},
    }
    row = {"cell": grid()[0].name, "forms": [form, other], "peers": peers, "triton": 400.0}
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"rows": [row, {**row, "cell": "another"}]}))
    report = Report(gluon_report.TITLE, gluon_report.COLUMNS)
    gluon_report.run(Options(measured=path), report)
    assert len(report.rows) == 1 and len(report.failures) == 1 and "16 bytes" in report.failures[0]
    text = "\n".join(report.summary)
    for part in ("best library: 1.20", "FlexAttention: 2.00", "Triton: 1.50", "were timed: 1.00"):
        assert part in text
    assert report.columns[1].cell(row) == "2c2s late 2 i=128 persistent"


@pytest.mark.slow
def test_constants_are_fitted_to_what_was_timed() -> None:
    """From forms that took what other constants say, those are found again where the forms tell them apart."""
    cell = next(c for c in grid() if c.name == "global_prefill_d64_n1024_b4_bf16")
    kernel = kernel_of(cell, "h200")
    dtypes = {name: cell.workload.dtype(name, cell.case) for name in cell.workload.tensors}
    compiled = compiler.pipeline(kernel.derived, cell.case.sizes, dtypes, device_named("h200"))
    price = pricing(kernel.derived, compiled, cell.case.sizes)
    true = replace(H200_ROLES, block=2 * H200_ROLES.block, tile_seconds=0.5 * H200_ROLES.tile_seconds)
    every = [made.chosen.plan.roles[0] for _, made in other_roles(kernel.derived, compiled, cell.case.sizes)]
    forms = [
        calibrate.TimedForm(cell.name, cell.operator, price, roles, price.seconds(roles, true))
        for roles in (None, *every[::4])
    ]
    found = calibrate.fitted(forms, H200_ROLES)
    assert abs(calibrate.errors(forms, H200_ROLES)).max() > 0.3
    assert abs(calibrate.errors(forms, found)).max() < 0.03
    assert found.looked == H200_ROLES.looked  # nothing was timed for it
    assert set(calibrate.roles_regrets(forms, found).values()) == {0.0}
    assert max(calibrate.roles_regrets(forms, replace(H200_ROLES, tile_seconds=9.0)).values()) > 0
