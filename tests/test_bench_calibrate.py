"""Fitting the cost model's constants: what is recorded of a kernel, and what a fit makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import calibrate
from bench.ahead import compile_ahead
from bench.attention_cells import Cell
from bench.calibrate import FITTED, KEPT, Calibration, Measurement, fit, kept, quality
from bench.measured import MEASURED
from bench.work import Work, constants_of, predicted, work_of
from eqfuse.devices import device_named
from eqfuse.errors import EqfuseError
from eqfuse.extract.candidates import configured, shape_of, with_outputs

H200 = device_named("h200")
RECORDED = constants_of(H200)


@pytest.mark.parametrize(
    "cell", [Cell("gqa_decode", 2048), Cell("softcap_prefill", 512)], ids=lambda c: c.name
)
def test_the_parts_of_a_prediction_add_up_to_it(cell: Cell) -> None:
    ahead = compile_ahead(cell.workload, cell.case, "h200")
    compiled = ahead.compiled
    plan, nest = compiled.chosen.plan, compiled.chosen.nest
    shape = shape_of(
        nest, compiled.extents, with_outputs(ahead.derived.program, compiled.dtypes), plan.shards
    )
    works = [
        work_of(kernel, config, shape, H200)
        for kernel, config in zip(configured(nest, shape, H200), plan.configs, strict=True)
    ]
    assert plan.cost is not None
    assert sum(predicted(w, {}, H200.launch) for w in works) == pytest.approx(plan.cost.seconds, rel=1e-3)
    json.dumps(works)


def _work(slowdowns: dict[str, float] | None = None, **terms: dict[str, float]) -> Work:
    return {"terms": terms, "slowdowns": slowdowns or {}}


def test_rates_divide_times_multiply_and_what_is_small_hides() -> None:
    work = _work(memory={"bandwidth": 8.0}, matrix={"matrix_half": 1.0}, steps={"step": 2.0, "fixed": 1.0})
    assert predicted(work, {}, 0.5) == pytest.approx(8 + 0.2 * 1 + 3 + 0.5)
    assert predicted(work, {"bandwidth": 2.0}, 0.0) == pytest.approx(4 + 0.2 + 3)
    assert predicted(work, {"bandwidth": 16.0}, 0.0) == pytest.approx(0.2 * 0.5 + 1 + 3)
    assert predicted(work, {"step": 2.0}, 0.0) == pytest.approx(8 + 0.2 + 5)
    slowed = _work({"one_block": 1.0, "spills": 2.0}, memory={"bandwidth": 1.0})
    assert predicted(slowed, {}, 0.0) == pytest.approx(1.25 * 3.25**2)
    assert predicted(slowed, {"spills": 2.0}, 0.0) == pytest.approx(1.25 * 6.5**2)


def _calibration(times: dict[str, float]) -> Calibration:
    """Kernels of all kinds on a device whose constants are these times those that the work was recorded with."""
    works = [
        *(_work(memory={"bandwidth": n * 1e-6}) for n in range(10, 200)),
        *(_work(matrix={"matrix_half": n * 1e-5}, special={"special": 1e-9}) for n in range(10, 200)),
        *(_work(memory={"bandwidth": 1e-8}, steps={"step": n * 1e-7}) for n in range(10, 200)),
    ]
    true = {name: value * times.get(name, 1.0) for name, value in RECORDED.items()}
    some = Calibration(RECORDED, [Measurement(f"cell{n}", (work,), 0.0) for n, work in enumerate(works)])
    seconds = some.predict(true)
    measured = [replace(m, seconds=float(s)) for m, s in zip(some.measured, seconds, strict=True)]
    return replace(some, measured=measured)


def test_constants_are_found_and_those_that_nothing_tells_of_stay() -> None:
    true = {"bandwidth": 0.8, "matrix_half": 1.3, "step": 1.5}
    found = fit(_calibration(true))
    assert found.keys() == set(FITTED)
    for name, value in found.items():
        assert value / RECORDED[name] == pytest.approx(true.get(name, 1.0), rel=0.1), name


def test_quality_is_of_the_order_within_a_cell() -> None:
    works = [_work(memory={"bandwidth": n * 1e-3}) for n in (1, 2, 3)]
    measured = [Measurement("a", (w,), s) for w, s in zip(works, (2e-3, 1e-3, 3e-3), strict=True)]
    found = quality(measured, Calibration(RECORDED, measured).predict(RECORDED))
    assert found.regret == found.worst == pytest.approx(1.0)
    assert found.within == pytest.approx(0.5)


def _run(constants: dict[str, float] | None) -> dict[str, Any]:
    good: dict[str, Any] = {"ms": 1.0, "agrees": True, "work": [_work(memory={"bandwidth": 1e-3})]}
    wrong = {**good, "agrees": False}
    row = {"cell": "a", "variants": [good, wrong, {"problem": "no"}, {"ms": 1.0, "agrees": True}]}
    return {"bundle": {"constants": constants}, "environment": {"device": "a GPU"}, "rows": [row]}


def test_runs_are_kept_without_what_did_not_run_or_has_no_work(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(kept([_run(RECORDED), _run(RECORDED)])))
    assert [m.seconds for m in Calibration.read(path).measured] == [1e-3, 1e-3]


def test_runs_with_other_constants_and_other_files_are_refused(tmp_path: Path) -> None:
    for other in (None, {**RECORDED, "launch": 1.0}):
        with pytest.raises(EqfuseError, match="same constants"):
            kept([_run(RECORDED), _run(other)])
    path = tmp_path / "x.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(EqfuseError, match="no calibration"):
            Calibration.read(path)


@pytest.mark.parametrize("command", [["roles"], ["rates", "--keep"]])
@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_what_no_run_wrote_is_refused(
    command: list[str],
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("sys.argv", ["calibrate", *command, str(path)])
    assert calibrate.main() == 1
    assert "name files that a run wrote" in capsys.readouterr().out


@pytest.mark.slow
def test_the_constants_are_what_the_calibration_run_gives() -> None:
    calibration = Calibration.read(MEASURED / "calibration_h200.json")
    assert len(calibration.measured) > 500
    fitted, now = fit(calibration), constants_of(H200)
    differing = {name for name in FITTED if not 0.9 < now[name] / fitted[name] < 1.1}
    assert differing == KEPT.keys()
    before = quality(calibration.measured, calibration.predict(now))
    after = quality(calibration.measured, calibration.predict(fitted))
    assert after.off < before.off < 1.4 and before.overall > 0.95
