"""`eqfuse bench gluon`: attention and matrix products in roles on a Hopper GPU: beside Triton, other roles and torch's libraries.

With `--device cuda` everything is timed and checked. Elsewhere each kernel is compiled for such a GPU: registers, spills,
instructions. `--measured FILE` shows what an earlier run on a GPU has found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench.gluon_cells import AnyRolesCell as Cell
from bench.gluon_cells import grid
from bench.gluon_forms import forms, kernel_of, short
from bench.report import Column, Options, Report, geometric_mean, recorded
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.tile.gluon.aot import compile_for_hopper

TITLE = "Attention and matrix products in roles"
DEVICE = "h200"

Row = Mapping[str, Any]


def run(options: Options, report: Report) -> None:
    """Failures: results that do not agree with float64, kernels that do not run, and registers that spill."""
    cells = grid(options.only, small=options.small)
    if options.measured is not None:
        names = {cell.name for cell in cells}
        content = json.loads(options.measured.read_text(encoding="utf-8"))
        report.rows += [row for row in content["rows"] if row["cell"] in names]
    elif options.device == "cuda":
        from bench import gluon_measure  # here, as it needs a GPU

        gluon_measure.run(cells, options, report)
    else:
        _ahead(cells, report)
    report.summary += _summary(report.rows)
    report.failures += [problem for row in report.rows for problem in _problems(row)]


def _ahead(cells: Sequence[Cell], report: Report) -> None:
    """What calls would run of each kernel, compiled without a GPU. Equal modules are compiled once."""
    kernels, known = {}, dict[str, dict[str, Any]]()
    for cell in cells:
        with recorded(report.failing(cell.name)):
            if cell.kernel not in kernels:
                kernels[cell.kernel] = kernel_of(cell, DEVICE)
            kernel, case = kernels[cell.kernel], cell.case
            dtypes = {name: cell.workload.dtype(name, case) for name in cell.workload.tensors}
            compiled = compiler.pipeline(kernel.derived, case.sizes, dtypes, device_named(DEVICE))
            form = forms(kernel, compiled, case.sizes)[0]
            row: dict[str, Any] = {"cell": cell.name, **cell.entry(), "forms": [form.entry()], "peers": {}}
            if form.kind == "roles":
                source = form.source(kernel)
                if source not in known:
                    (found,) = compile_for_hopper(source, sizes=case.sizes)
                    known[source] = {
                        "registers": found.kernel.registers,
                        "spilled_bytes": found.kernel.spilled_bytes,
                        "shared_bytes": found.kernel.shared_bytes,
                        "machine": dict(found.machine),
                    }
                row["forms"][0] |= known[source]
            report.add(row)


def _problems(row: Row) -> list[str]:
    found = [f"{row['cell']}: {row['problem']}"] if "problem" in row else []
    for form in row.get("forms", ()):
        what = f"{row['cell']}, {form['code']}"
        if "problem" in form:
            found.append(f"{what}: {form['problem']}")
        if not form.get("agrees", True):
            found.append(f"{what}: relative error {form['error']:.1e}")
        if form["kind"] == "roles" and form.get("spilled_bytes"):
            found.append(f"{what}: {form['spilled_bytes']} bytes of registers spilled")
    return found


def _summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means over the cells, and the least of each."""
    lines = [f"{row['cell']}: {_chosen(row)['code']}" for row in rows if _chosen(row).get("kind") == "Triton"]
    kinds = (("best library", "library"), ("FlexAttention", "compiler"))
    ratios = {what: [(row["cell"], _over(row, kind)) for row in rows] for what, kind in kinds}
    ratios["Triton"] = [(row["cell"], _over_triton(row)) for row in rows]
    ratios["best of the forms that were timed"] = [(row["cell"], _over_best(row)) for row in rows]
    for what, pairs in ratios.items():
        known = [(name, ratio) for name, ratio in pairs if ratio is not None]
        if known:
            mean, (least, ratio) = geometric_mean(r for _, r in known), min(known, key=lambda pair: pair[1])
            lines.append(
                f"over {what}: {mean:.2f} by geometric mean of {len(known)} cells, least {ratio:.2f} ({least})"
            )
    return lines


def _chosen(row: Row) -> Mapping[str, Any]:
    """What calls run."""
    return next((form for form in row.get("forms", ()) if form["chosen"]), {})


def _best(row: Row, kind: str) -> tuple[str, float] | None:
    """The best peer of a kind, and its TFLOP/s."""
    peers = row.get("peers", {})
    rates = [(p["tflops"], name) for name, p in peers.items() if p["kind"] == kind and "tflops" in p]
    return max(rates)[::-1] if rates else None


def _over(row: Row, kind: str) -> float | None:
    best, rate = _best(row, kind), _chosen(row).get("tflops")
    return rate / best[1] if rate and best else None


def _over_triton(row: Row) -> float | None:
    chosen, triton = _chosen(row), row.get("triton")
    return chosen["tflops"] / triton if triton and "tflops" in chosen else None


def _over_best(row: Row) -> float | None:
    rates = [form["tflops"] for form in row.get("forms", ()) if "tflops" in form]
    return _chosen(row)["tflops"] / max(rates) if "tflops" in _chosen(row) else None


def _runs(row: Row) -> str:
    form = _chosen(row)
    if not form:
        return str(row.get("problem", "-"))
    return short(form) if form["kind"] == "roles" else "Triton"


def _number(value: float | None, form: str = ".0f") -> str:
    return "-" if value is None else format(value, form)


def _library(row: Row) -> str:
    best = _best(row, "library")
    return f"{best[0]} {best[1]:.0f}" if best else "-"


COLUMNS = (
    Column("cell", lambda row: str(row["cell"])),
    Column("calls run", _runs),
    Column("predicted", lambda row: _number(_chosen(row).get("predicted_ms"), ".3f")),
    Column("ms", lambda row: _number(_chosen(row).get("ms"), ".3f")),
    Column("TFLOP/s", lambda row: _number(_chosen(row).get("tflops"))),
    Column("Triton", lambda row: _number(row.get("triton"))),
    Column("library", _library),
    Column("over", lambda row: _number(_over(row, "library"), ".2f")),
    Column("of best", lambda row: _number(_over_best(row), ".2f")),
    Column("regs", lambda row: str(_chosen(row).get("registers", "-"))),
    Column("spilled", lambda row: str(_chosen(row).get("spilled_bytes", "-"))),
    Column("KB", lambda row: _number(_kilobytes(_chosen(row)))),
    Column("error", lambda row: _number(_chosen(row).get("error"), ".1e")),
)


def _kilobytes(form: Mapping[str, Any]) -> float | None:
    return form["shared_bytes"] / 1024 if "shared_bytes" in form else None
