"""`eqfuse bench reductions`: row kernels and cascades beside torch, from what a GPU measured.

On a machine with a GPU it makes the bundle and measures it first; elsewhere it reports on the newest
`bench/results/reductions_*.json`, or on the file given with --measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import bundling, measured
from bench.measured import OF_A_CELL, Row, Source, against, number
from bench.reductions_bundle import VARIANTS
from bench.reductions_cells import LONG, Cell, grid
from bench.report import Column, Options, Report, geometric_mean
from bench.running import CACHE

TITLE = "Reductions, times of peers over ours"

LARGE_BYTES = 64 << 20
"""Bytes from which a row kernel has to reach the bandwidth of a copy."""


def _write(folder: Path, device: str, options: Options) -> list[str]:
    return bundling.write(folder, grid(options.only), device, VARIANTS)


SOURCE = Source("reductions", _write)


@dataclass(frozen=True)
class Aim:
    """What a group of cells should reach: the geometric mean and the least of a figure; neither where it is
    only told."""

    name: str
    has: Callable[[Row], bool]
    key: str
    mean: float | None = None
    least: float | None = None
    unit: str = "x"

    def line(self, rows: Sequence[Row]) -> str:
        """The aim beside what was measured, or nothing where no such cell was."""
        mine = [row for row in rows if self.has(row) and row[self.key] is not None]
        if not mine:
            return ""
        worst = min(mine, key=lambda row: float(row[self.key]))
        found = geometric_mean(row[self.key] for row in mine)
        text = (
            f"{self.name}: {found:.2f}{self.unit} (geometric mean of {len(mine)}), "
            f"least {worst[self.key]:.2f}{self.unit} at {worst['cell']}"
        )
        wanted = [f"mean {self.mean:g}"] if self.mean is not None else []
        wanted += [f"each {self.least:g}"] if self.least is not None else []
        if not wanted:
            return text
        missed = (self.mean or 0) > found or (self.least or 0) > worst[self.key]
        return f"{'MISSED' if missed else 'met'}: {text}; aim {', '.join(wanted)}"


def _of(family: str) -> Callable[[Row], bool]:
    return lambda row: bool(row["family"] == family)


def _rows(long: bool) -> Callable[[Row], bool]:
    return lambda row: row["row_length"] is not None and (row["row_length"] > LONG) == long


def _large(row: Row) -> bool:
    return row["row_length"] is not None and row["bytes"] > LARGE_BYTES


def _large_latent(row: Row) -> bool:
    return row["cell"] in ("mla_L2", "mla_L6")


AIMS = (
    Aim(f"rows over {LONG}, over torch.compile", _rows(True), "over_compiler", mean=2.0),
    Aim(f"rows up to {LONG}, over torch.compile", _rows(False), "over_compiler", mean=1.0, least=0.95),
    Aim("rows above 64 MB, of the copy bandwidth", _large, "bandwidth_share", least=0.85, unit=""),
    Aim(
        "the same, a second read counted where the schedule has one",
        _large,
        "moved_share",
        least=0.85,
        unit="",
    ),
    Aim("variance, over torch.compile", _of("variance"), "over_compiler", mean=1.2),
    Aim("inertia, over torch.compile", _of("inertia"), "over_compiler", mean=3.0),
    Aim("MoE routing, over torch.compile", _of("routing"), "over_compiler", mean=1.7),
    Aim("Performer, over torch.compile", _of("performer"), "over_compiler", mean=2.0),
    Aim("quantise + GEMM, over torch.compile", _of("quant_gemm"), "over_compiler", mean=1.1),
    Aim("MLA, over torch.compile", _of("mla"), "over_compiler", mean=2.0),
    Aim("MLA at L2 and L6, TFLOP/s", _large_latent, "tflops", least=500, unit=""),
    Aim("MHA, over flash", _of("mha"), "over_flash", mean=1.09),
    Aim("MHA, over the best library", _of("mha"), "over_library"),
    Aim("LoRA and MLP, over torch.compile", _of("layers"), "over_compiler"),
    Aim("Mirage's GQA, over the best library", _of("gqa"), "over_library"),
)


def run(options: Options, report: Report) -> None:
    """Failures: results that do not agree with float64, and cells whose kernel did not run."""
    content = SOURCE.content(options)
    wanted = {cell.name for every in (False, True) for cell in grid(options.only, every=every)}
    rows = [
        summarise(row, content["ceilings"])
        for row in content["rows"]
        if Cell(row["program"], row["label"]).name in wanted
    ]
    report.title = f"{TITLE}: {content['environment']['device']}, {content['environment']['date'][:10]}"
    report.rows += rows
    report.summary += [line for line in _lines(rows, content) if line]
    report.failures += measured.failures(rows)
    if report.path is not None:
        plot(rows, content, report.path.parent / "reductions")


def _lines(rows: Sequence[Row], content: Mapping[str, Any]) -> Iterator[str]:
    yield measured.rates_line(content["ceilings"])
    for aim in AIMS:
        yield aim.line(rows)
    yield measured.regret_line(rows)
    yield measured.ranks_line(rows)
    cached = sum(row["in_cache"] for row in rows)
    if cached:
        yield f"inputs stay in the cache, being small, in {cached} of {len(rows)} cells: in_cache in the JSON"
    missing = content.get("not_measured", {})
    if missing:
        yield f"not measured: {', '.join(f'{name} ({why})' for name, why in missing.items())}"


def summarise(row: Row, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """What one cell's measurements say: `measured.summarise`, and what is particular to rows."""
    cell = Cell(row["program"], row["label"])
    found = measured.summarise(cell, row, ceilings)
    flash = row["peers"].get("flash", {})
    again = row["variants"][0].get("read_again_bytes", 0)
    share = found["bandwidth_share"]
    return found | {
        "family": cell.family.name,
        "row_length": cell.row_length,
        "bytes": row["bytes"],
        "in_cache": row["bytes"] * row["input_sets"] < 2 * CACHE,
        "reads_again": again > 0,
        "moved_share": share and share * (row["bytes"] + again) / row["bytes"],
        "over_flash": flash["ms"] / found["ms"] if found["ms"] and flash.get("agrees") else None,
        "launches": row["variants"][0].get("launches"),
        "compiler_launches": row["peers"].get("inductor", {}).get("launches"),
        "errors": {
            "eqfuse": row["variants"][0].get("error"),
            **{name: peer.get("error") for name, peer in row["peers"].items()},
        },
    }


def plot(rows: Sequence[Row], content: Mapping[str, Any], folder: Path) -> list[Path]:
    """One figure per family: times over the floor's, cell by cell; and one of predicted by measured times."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    where = f"{content['environment']['device']}, {content['environment']['date'][:10]}"
    peers = {Cell(row["program"], row["label"]).name: row["peers"] for row in content["rows"]}
    written: list[Path] = []
    groups = list(dict.fromkeys(row["program"] if row["family"] == "rows" else row["family"] for row in rows))
    for group in groups:
        mine = [row for row in rows if row["ms"] and group in (row["program"], row["family"])]
        figure = Figure(figsize=(max(4.0, 0.45 * len(mine) + 2), 4))
        axes = figure.add_subplot()
        series = {"eqfuse": [row["ms"] / row["floor_ms"] for row in mine]}
        for name in dict.fromkeys(name for row in mine for name in peers[row["cell"]]):
            times = [peers[row["cell"]].get(name, {}).get("ms") for row in mine]
            series[name] = [
                t / row["floor_ms"] if t else float("nan") for t, row in zip(times, mine, strict=True)
            ]
        for name, values in series.items():
            axes.plot(range(len(mine)), values, "o-" if name == "eqfuse" else ".", label=name)
        axes.axhline(1.0, color="grey", linestyle=":")
        axes.set(yscale="log", ylabel="time over the floor", title=f"{group}: {where}")
        axes.set_xticks(range(len(mine)), [row["cell"] for row in mine], rotation=90, fontsize="small")
        axes.legend(fontsize="small")
        written.append(measured.save(figure, folder / f"{group}.svg"))
    pairs = measured.predicted_pairs(
        content["rows"], lambda row: Cell(row["program"], row["label"]).family.name
    )
    written.append(measured.save(measured.plot_predicted(pairs, where), folder / "predicted.svg"))
    return written


def _launches(row: Row) -> str:
    return f"{row['launches'] or '-'} / {row['compiler_launches'] or '-'}"


COLUMNS = (
    *OF_A_CELL,
    against("compiler"),
    against("library"),
    against("eager"),
    Column("launches", _launches),
    number("regret", "regret", ".0%"),
)
"""Times in ms: of the choice without tuning, of the best variant, as predicted, and the floor. `copy`: share of
the copy bandwidth, every input and output counted once. `compiler`, `library`, `eager`: time of the best one
over ours. `launches`: ours and torch.compile's. `regret`: of the choice without tuning."""
