"""`eqfuse bench attention`: attention beside torch's libraries and compilers, from what a GPU measured.

On a machine with a GPU it makes the bundle and measures it first; elsewhere it reports on the newest
`bench/results/attention_*.json`, or on the file given with --measured.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.attention_cells import LENGTHS, Cell, grid
from bench.report import Column, Options, Report, geometric_mean
from eqfuse.errors import EqfuseError

TITLE = "Attention, times of peers over ours"
MEASURED = Path("bench/results")
PREFIX = "attention_"

Row = Mapping[str, Any]


def run(options: Options, report: Report) -> None:
    """Failures: results that do not agree with float64, and cells whose kernel did not run."""
    content = _measure(options) if torch.cuda.is_available() else read(options.measured or newest(MEASURED))
    cells = {cell.name for cell in grid(options.only)}
    summary = Summary.of([row for row in content["rows"] if cell_of(row).name in cells], content["ceilings"])
    report.title = f"{TITLE}: {content['environment']['device']}, {content['environment']['date'][:10]}"
    report.rows += summary.rows
    report.summary += summary.lines()
    report.failures += summary.failures()
    if report.path is not None:
        plot(content, report.path.parent / "attention")


def read(path: Path) -> dict[str, Any]:
    """What `bench.attention` wrote. Raises EqfuseError where it is something else."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EqfuseError(f"cannot read {str(path)!r}: {error}", hint=HINT) from None
    if missing := [key for key in ("rows", "ceilings", "environment") if key not in content]:
        raise EqfuseError(f"{str(path)!r} has no {missing[0]!r}", hint=HINT)
    return content


HINT = "python -m bench.attention_bundle FOLDER here, python -m bench.attention FOLDER --output FILE.json on a GPU"


def newest(folder: Path) -> Path:
    """The measurements of the latest date. Raises EqfuseError where there are none."""
    found = [
        path for path in folder.glob(f"{PREFIX}*.json") if "ceilings" in path.read_text(encoding="utf-8")
    ]
    if not found:
        raise EqfuseError(f"no measurements in {folder} and no GPU here", hint=HINT)
    return max(found, key=lambda path: str(read(path)["environment"]["date"]))


def _measure(options: Options) -> dict[str, Any]:
    """Makes the bundle and measures it, on this machine, in a process of its own: compiling in parallel has
    to come before CUDA is in use."""
    import subprocess
    import sys

    from bench import attention_bundle
    from bench.attention_bundle import VARIANTS
    from eqfuse.kernel import gpu_device

    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name) / "bundle", Path(name) / "measured.json"
        failures = attention_bundle.write(folder, grid(options.only, LENGTHS), gpu_device().name, VARIANTS)
        if failures:
            raise EqfuseError(f"no kernels for {len(failures)} cells: {failures[0]}", hint="see the error")
        subprocess.run(
            [sys.executable, "-m", "bench.attention", str(folder), "--output", str(output)], check=False
        )
        return read(output)


def cell_of(row: Row) -> Cell:
    return Cell(row["operator"], row["length"], row["batch"])


def good(variant: Mapping[str, Any]) -> bool:
    """Whether a variant ran and agreed with float64."""
    return bool(variant.get("agrees")) and "ms" in variant


@dataclass(frozen=True)
class Summary:
    """The rows of the table, one for each cell."""

    rows: list[dict[str, Any]]
    ceilings: Mapping[str, float]

    @staticmethod
    def of(measured: Sequence[Row], ceilings: Mapping[str, float]) -> Summary:
        return Summary([summarise(row, ceilings) for row in measured], ceilings)

    def failures(self) -> list[str]:
        return [f"{row['cell']}: {problem}" for row in self.rows for problem in row["problems"]]

    def lines(self) -> list[str]:
        """Geometric means and extremes over all cells, beside the aims."""
        return [line for line in self._lines() if line]

    def _lines(self) -> Iterator[str]:
        rates = self.ceilings
        yield (
            f"in this run: copy {rates['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
            f"float16 matrix product {rates['matrix_flops_per_second'] / 1e12:.0f} TFLOP/s"
        )
        yield self._ratios("best compiler", "over_compiler", self.rows)
        for phase in ("prefill", "decode"):
            mine = [row for row in self.rows if row["operator"].endswith(phase)]
            yield self._ratios(f"best library, {phase}", "over_library", mine)
        long = [r for r in self.rows if r["operator"].endswith("decode") and r["length"] >= 8192 and r["ms"]]
        if long:
            worst = min(long, key=lambda row: float(row["bandwidth_share"]))
            yield (
                f"decode at 8192 and more: {min(r['bandwidth_share'] for r in long):.0%} to "
                f"{max(r['bandwidth_share'] for r in long):.0%} of the copy bandwidth, least {worst['cell']}"
            )
        yield self._regret()
        correlations = [row["correlation"] for row in self.rows if row["correlation"] is not None]
        if correlations:
            overall = spearman(
                [p for row in self.rows for p, _ in row["predicted_measured"]],
                [m for row in self.rows for _, m in row["predicted_measured"]],
            )
            yield (
                f"rank correlation of predicted and measured: {overall:.2f} over everything, "
                f"within a cell {np.median(correlations):.2f} (median), {min(correlations):.2f} (least)"
            )
        host = [row["host_us"] for row in self.rows if row.get("host_us")]
        if host:
            yield (
                f"host time of a call: {np.median([h['eqfuse'] for h in host]):.1f} us; "
                f"scaled_dot_product_attention {np.median([h['sdpa'] for h in host]):.1f} us (medians)"
            )
        allocating = [row["cell"] for row in self.rows if row.get("allocations")]
        if allocating:
            yield f"allocates although everything is given: {', '.join(allocating)}"

    def _ratios(self, what: str, key: str, rows: Sequence[Row]) -> str:
        having = [row for row in rows if row[key] is not None]
        if not having:
            return ""
        worst = min(having, key=lambda row: float(row[key]))
        return (
            f"over the {what}: {geometric_mean(row[key] for row in having):.2f}x (geometric mean of "
            f"{len(having)} cells), least {worst[key]:.2f}x at {worst['cell']}"
        )

    def _regret(self) -> str:
        having = [row for row in self.rows if row["regret"] is not None]
        if not having:
            return ""
        worst = max(having, key=lambda row: float(row["regret"]))
        over = sum(row["regret"] > 0.10 for row in having)
        return (
            f"choice without tuning: {np.median([r['regret'] for r in having]):.0%} slower than the best variant "
            f"(median), {over} of {len(having)} cells above 10%, most {worst['regret']:.0%} at {worst['cell']}"
        )


def summarise(row: Row, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """What one cell's measurements say. Ratios are a peer's time over ours; None where there is no such peer.

    Libraries are what torch's scaled_dot_product_attention runs, and torch.compile where it replaced the
    expression by that; compilers are the rest.
    """
    cell = cell_of(row)
    chosen, *_ = row["variants"]
    variants = [variant for variant in row["variants"] if good(variant)]
    ms = chosen["ms"] if good(chosen) else None
    best = min((v["ms"] for v in variants), default=None)
    kinds: dict[str, dict[str, float]] = {"library": {}, "compiler": {}}
    for name, peer in row["peers"].items():
        if "ms" in peer and peer["agrees"]:
            kinds["library" if peer.get("matched") else peer["kind"]][name] = peer["ms"]
    floor = 1e3 * cell.floor(ceilings["copy_bytes_per_second"], ceilings["matrix_flops_per_second"])
    pairs = [(v["predicted_ms"], v["ms"]) for v in variants if v["predicted_ms"] is not None]
    return {
        "cell": cell.name,
        "operator": cell.operator,
        "length": cell.length,
        "batch": cell.batch,
        "ms": ms,
        "best_ms": best,
        "schedule": chosen["schedule"],
        "predicted_ms": chosen["predicted_ms"],
        "floor_ms": floor,
        "over_floor": ms / floor if ms else None,
        "tflops": cell.flops / ms / 1e9 if ms else None,
        "bandwidth_share": 1e3 * cell.bytes / ms / ceilings["copy_bytes_per_second"] if ms else None,
        "library": _least(kinds["library"]),
        "compiler": _least(kinds["compiler"]),
        "over_library": _ratio(kinds["library"], ms),
        "over_compiler": _ratio(kinds["compiler"], ms),
        "regret": ms / best - 1 if ms and best else None,
        "correlation": spearman(*zip(*pairs, strict=True)) if len(pairs) > 2 else None,
        "predicted_measured": pairs,
        "host_us": row.get("host_us"),
        "allocations": row.get("allocations"),
        "resources": chosen.get("resources"),
        "problems": _problems(row),
    }


def _problems(row: Row) -> list[str]:
    """Of variants; a peer that refuses a shape is no failure of ours."""
    found = []
    for number, variant in enumerate(row["variants"]):
        if "problem" in variant:
            found.append(f"variant {number} ({variant['schedule']}): {variant['problem']}")
        elif not variant["agrees"]:
            found.append(f"variant {number} ({variant['schedule']}): error {variant['error']:.1e}")
    return found


def _least(peers: Mapping[str, float]) -> str | None:
    return min(peers, key=peers.__getitem__) if peers else None


def _ratio(peers: Mapping[str, float], ms: float | None) -> float | None:
    return min(peers.values()) / ms if peers and ms else None


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Rank correlation, ties ranked by their mean; NaN where one side has a single value."""
    a, b = (_ranks(np.asarray(values, dtype=float)) for values in (predicted, measured))
    if a.std() == 0 or b.std() == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray[Any, Any] = ((ends - counts + 1 + ends) / 2)[places]
    return ranks


def plot(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """One figure per operator, time by length on logarithmic axes, and one of predicted by measured times."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    where = f"{content['environment']['device']}, float16, {content['environment']['date'][:10]}"
    written: list[Path] = []

    def save(figure: Figure, name: str) -> None:
        path = folder / f"{name}.svg"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        written.append(path)

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
        save(figure, operator)
    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot()
    for kind in ("decode", "prefill"):
        pairs = [
            (v["predicted_ms"], v["ms"])
            for row in rows
            if row["operator"].endswith(kind)
            for v in row["variants"]
            if good(v) and v["predicted_ms"] is not None
        ]
        if pairs:
            axes.plot(*zip(*pairs, strict=True), ".", label=kind)
    low, high = axes.get_xlim()
    axes.axline((max(low, 1e-3), max(low, 1e-3)), (high, high), color="grey", linewidth=0.5)
    axes.set(xscale="log", yscale="log", xlabel="predicted ms", ylabel="measured ms", title=where)
    axes.legend()
    save(figure, "predicted")
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


def _number(heading: str, key: str, form: str) -> Column:
    def text(row: Row) -> str:
        return "-" if row[key] is None else format(row[key], form)

    return Column(heading, text)


def _against(kind: str) -> Column:
    def text(row: Row) -> str:
        ratio = row[f"over_{kind}"]
        return "-" if ratio is None else f"{ratio:.2f} {row[kind]}"

    return Column(kind, text)


COLUMNS = (
    Column("cell", lambda row: str(row["cell"])),
    Column("schedule", lambda row: str(row["schedule"])),
    _number("ms", "ms", ".4f"),
    _number("best", "best_ms", ".4f"),
    _number("predicted", "predicted_ms", ".4f"),
    _number("floor", "floor_ms", ".4f"),
    _number("TFLOP/s", "tflops", ".0f"),
    _number("copy", "bandwidth_share", ".0%"),
    _against("library"),
    _against("compiler"),
    _number("regret", "regret", ".0%"),
    _number("rank", "correlation", ".2f"),
)
"""Times in ms: of the choice without tuning, of the best variant, as predicted, and the floor. `copy`: share of
the copy bandwidth. `library`, `compiler`: time of the best one over ours. `regret`: of the choice without
tuning. `rank`: correlation of predicted and measured times."""
