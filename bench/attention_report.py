"""`eqfuse bench attention`: attention beside torch's libraries and compilers, from what a GPU measured.

On a machine with a GPU it makes the bundle and measures it first; elsewhere it reports on the newest
`bench/results/attention_*.json`, or on the file given with --measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import bundling, measured
from bench.attention_bundle import VARIANTS
from bench.attention_cells import cell_of, grid, shapes
from bench.measured import OF_A_CELL, Row, Source, against, good, number
from bench.report import Options, Report

TITLE = "Attention, times of peers over ours"


def _write(folder: Path, device: str, options: Options) -> list[str]:
    return bundling.write(folder, grid(options.only), device, VARIANTS)


SOURCE = Source("attention", _write)


def run(options: Options, report: Report) -> None:
    """Failures: results that do not agree with float64, and cells whose kernel did not run."""
    content = SOURCE.content(options)
    cells = {cell.name for cell in (*grid(options.only), *shapes())}
    summary = Summary.of([row for row in content["rows"] if cell_of(row).name in cells], content["ceilings"])
    report.title = f"{TITLE}: {content['environment']['device']}, {content['environment']['date'][:10]}"
    report.rows += summary.rows
    report.summary += summary.lines()
    report.failures += measured.failures(summary.rows)
    if report.path is not None:
        plot(content, report.path.parent / "attention")


@dataclass(frozen=True)
class Summary:
    """The rows of the table, one for each cell."""

    rows: list[dict[str, Any]]
    ceilings: Mapping[str, float]

    @staticmethod
    def of(rows: Sequence[Row], ceilings: Mapping[str, float]) -> Summary:
        return Summary([measured.summarise(cell_of(row), row, ceilings) for row in rows], ceilings)

    def lines(self) -> list[str]:
        """Geometric means and extremes over all cells, beside the aims."""
        return [line for line in self._lines() if line]

    def _lines(self) -> Iterator[str]:
        yield measured.rates_line(self.ceilings)
        yield measured.ratios_line("best compiler", "over_compiler", self.rows)
        for phase in ("prefill", "decode"):
            mine = [row for row in self.rows if row["operator"].endswith(phase)]
            yield measured.ratios_line(f"best library, {phase}", "over_library", mine)
        long = [r for r in self.rows if r["operator"].endswith("decode") and r["length"] >= 8192 and r["ms"]]
        if long:
            worst = min(long, key=lambda row: float(row["bandwidth_share"]))
            yield (
                f"decode at 8192 and more: {min(r['bandwidth_share'] for r in long):.0%} to "
                f"{max(r['bandwidth_share'] for r in long):.0%} of the copy bandwidth, least {worst['cell']}"
            )
        yield measured.regret_line(self.rows)
        yield measured.ranks_line(self.rows)
        host = [row["host_us"] for row in self.rows if row.get("host_us")]
        if host:
            yield (
                f"host time of a call: {np.median([h['eqfuse'] for h in host]):.1f} us; "
                f"scaled_dot_product_attention {np.median([h['sdpa'] for h in host]):.1f} us (medians)"
            )
        allocating = [row["cell"] for row in self.rows if row.get("allocations")]
        if allocating:
            yield f"allocates although everything is given: {', '.join(allocating)}"


def plot(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """One figure per operator, time by length on logarithmic axes, and one of predicted by measured times."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    where = f"{content['environment']['device']}, float16, {content['environment']['date'][:10]}"
    written: list[Path] = []

    rows = content["rows"]
    for operator in dict.fromkeys(row["operator"] for row in rows):
        mine = sorted((r for r in rows if r["operator"] == operator and r["batch"] == 1), key=_length)
        figure = Figure(figsize=(6, 4))
        axes = figure.add_subplot()
        for name, points in _series(mine, content["ceilings"]).items():
            style = {"floor": ":", "eqfuse": "o-", "eqfuse, best variant": "o--"}.get(name, ".-")
            axes.plot(*zip(*points, strict=True), style, label=name)
        axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="ms", title=f"{operator}: {where}")
        axes.set_xticks([row["length"] for row in mine], [str(row["length"]) for row in mine])
        axes.minorticks_off()
        axes.legend(fontsize="small")
        written.append(measured.save(figure, folder / f"{operator}.svg"))
    pairs = measured.predicted_pairs(rows, lambda row: str(row["operator"]).rpartition("_")[2])
    written.append(measured.save(measured.plot_predicted(pairs, where), folder / "predicted.svg"))
    return written


def _length(row: Row) -> int:
    return int(row["length"])


def _series(rows: Sequence[Row], ceilings: Mapping[str, float]) -> dict[str, list[tuple[int, float]]]:
    """Points (length, ms) of each line."""
    found: dict[str, list[tuple[int, float]]] = {}

    def add(name: str, row: Row, ms: float) -> None:
        found.setdefault(name, []).append((row["length"], ms))

    for row in rows:
        cell, variants = cell_of(row), [v for v in row["variants"] if good(v)]
        if good(row["variants"][0]):
            add("eqfuse", row, row["variants"][0]["ms"])
        if variants:
            add("eqfuse, best variant", row, min(v["ms"] for v in variants))
        for name, peer in row["peers"].items():
            if "ms" in peer and peer["agrees"]:
                add(f"{name} (SDPA)" if peer.get("matched") else name, row, peer["ms"])
        floor = cell.floor(ceilings["copy_bytes_per_second"], ceilings["matrix_flops_per_second"])
        add("floor", row, 1e3 * floor)
    return found


COLUMNS = (
    *OF_A_CELL,
    against("library"),
    against("compiler"),
    number("regret", "regret", ".0%"),
    number("rank", "correlation", ".2f"),
)
"""Times in ms: of the choice without tuning, of the best variant, as predicted, and the floor. `copy`: share of
the copy bandwidth. `library`, `compiler`: time of the best one over ours. `regret`: of the choice without
tuning. `rank`: correlation of predicted and measured times."""
