"""What a run on a GPU measured: reading it, ratios over peers, regrets and ranks of the cost model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.cells import Cell
from bench.report import Column, Options, geometric_mean
from eqfuse.errors import EqfuseError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED = Path("bench/results")

Row = Mapping[str, Any]

KINDS = ("library", "compiler", "eager")
"""Of peers: what a vendor or torch has written by hand, what is compiled, and unfused torch."""


@dataclass(frozen=True)
class Source:
    """Where the measurements of one benchmark come from: files that begin with `name`, or on a machine with a
    GPU a run of its own, of the bundle that `write` makes for a device in a folder."""

    name: str
    write: Callable[[Path, str, Options], Sequence[str]]

    def content(self, options: Options) -> dict[str, Any]:
        """Measures where there is a GPU, reads elsewhere. Raises EqfuseError where there is nothing to read."""
        if torch.cuda.is_available():
            return self._measure(options)
        return self.read(options.measured or self.newest(MEASURED))

    def read(self, path: Path) -> dict[str, Any]:
        """What a run wrote. Raises EqfuseError where it is something else."""
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EqfuseError(f"cannot read {str(path)!r}: {error}", hint=self._hint) from None
        if missing := [key for key in ("rows", "ceilings", "environment") if key not in content]:
            raise EqfuseError(f"{str(path)!r} has no {missing[0]!r}", hint=self._hint)
        return content

    def newest(self, folder: Path) -> Path:
        """The measurements of the latest date. Raises EqfuseError where there are none."""
        files = folder.glob(f"{self.name}_*.json")
        found = [path for path in files if "ceilings" in path.read_text(encoding="utf-8")]
        if not found:
            raise EqfuseError(f"no measurements in {folder} and no GPU here", hint=self._hint)
        return max(found, key=lambda path: str(self.read(path)["environment"]["date"]))

    @property
    def _hint(self) -> str:
        return (
            f"python -m bench.{self.name}_bundle FOLDER here, "
            f"python -m bench.{self.name} FOLDER --output FILE.json on a GPU"
        )

    def _measure(self, options: Options) -> dict[str, Any]:
        """Makes the bundle and measures it, on this machine, in a process of its own: compiling in parallel
        has to come before CUDA is in use."""
        from eqfuse.devices import gpu_device

        with tempfile.TemporaryDirectory() as name:
            folder, output = Path(name) / "bundle", Path(name) / "measured.json"
            failures = self.write(folder, gpu_device().name, options)
            if failures:
                raise EqfuseError(
                    f"no kernels for {len(failures)} cells: {failures[0]}", hint="see the error"
                )
            command = [sys.executable, "-m", f"bench.{self.name}", str(folder), "--output", str(output)]
            subprocess.run(command, check=False)
            return self.read(output)


def good(variant: Mapping[str, Any]) -> bool:
    """Whether a variant ran and agreed with float64."""
    return bool(variant.get("agrees")) and "ms" in variant


def summarise(cell: Cell, row: Row, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """What one cell's measurements say. Ratios are a peer's time over ours; None where there is no such peer.

    A compiler that replaced an expression by a library call counts as that library.
    """
    chosen, *_ = row["variants"]
    variants = [variant for variant in row["variants"] if good(variant)]
    ms = chosen["ms"] if good(chosen) else None
    best = min((v["ms"] for v in variants), default=None)
    kinds: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for name, peer in row["peers"].items():
        if "ms" in peer and peer["agrees"]:
            kinds["library" if peer.get("matched") else peer["kind"]][name] = peer["ms"]
    floor = 1e3 * cell.floor(ceilings["copy_bytes_per_second"], ceilings["matrix_flops_per_second"])
    pairs = [(v["predicted_ms"], v["ms"]) for v in variants if v["predicted_ms"] is not None]
    return {
        "cell": cell.name,
        **cell.entry(),
        "ms": ms,
        "best_ms": best,
        "schedule": chosen["schedule"],
        "predicted_ms": chosen["predicted_ms"],
        "floor_ms": floor,
        "over_floor": ms / floor if ms else None,
        "tflops": cell.flops / ms / 1e9 if ms else None,
        "bandwidth_share": 1e3 * cell.bytes / ms / ceilings["copy_bytes_per_second"] if ms else None,
        **{kind: _least(kinds[kind]) for kind in KINDS},
        **{f"over_{kind}": _ratio(kinds[kind], ms) for kind in KINDS},
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


def rates_line(ceilings: Mapping[str, float]) -> str:
    return (
        f"in this run: copy {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
        f"float16 matrix product {ceilings['matrix_flops_per_second'] / 1e12:.0f} TFLOP/s"
    )


def ratios_line(what: str, key: str, rows: Sequence[Row]) -> str:
    """The geometric mean and the least of `over_<kind>`, or nothing where no row has such a peer."""
    having = [row for row in rows if row[key] is not None]
    if not having:
        return ""
    worst = min(having, key=lambda row: float(row[key]))
    return (
        f"over the {what}: {geometric_mean(row[key] for row in having):.2f}x (geometric mean of "
        f"{len(having)} cells), least {worst[key]:.2f}x at {worst['cell']}"
    )


def regret_line(rows: Sequence[Row]) -> str:
    having = [row for row in rows if row["regret"] is not None]
    if not having:
        return ""
    worst = max(having, key=lambda row: float(row["regret"]))
    over = sum(row["regret"] > 0.10 for row in having)
    return (
        f"choice without tuning: {np.median([r['regret'] for r in having]):.0%} slower than the best variant "
        f"(median), {over} of {len(having)} cells above 10%, most {worst['regret']:.0%} at {worst['cell']}"
    )


def ranks_line(rows: Sequence[Row]) -> str:
    found = (row["correlation"] for row in rows if row["correlation"] is not None)
    correlations = [value for value in found if not math.isnan(value)]
    if not correlations:
        return ""
    overall = spearman(
        [p for row in rows for p, _ in row["predicted_measured"]],
        [m for row in rows for _, m in row["predicted_measured"]],
    )
    return (
        f"rank correlation of predicted and measured: {overall:.2f} over everything, "
        f"within a cell {np.median(correlations):.2f} (median), {min(correlations):.2f} (least)"
    )


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """What went wrong with our kernels, one line each."""
    for row in rows:
        for problem in row["problems"]:
            yield f"{row['cell']}: {problem}"


def number(heading: str, key: str, form: str) -> Column:
    def text(row: Row) -> str:
        return "-" if row[key] is None else format(row[key], form)

    return Column(heading, text)


def against(kind: str) -> Column:
    def text(row: Row) -> str:
        ratio = row[f"over_{kind}"]
        return "-" if ratio is None else f"{ratio:.2f} {row[kind]}"

    return Column(kind, text)


OF_A_CELL = (
    Column("cell", lambda row: str(row["cell"])),
    Column("schedule", lambda row: str(row["schedule"])),
    number("ms", "ms", ".4f"),
    number("best", "best_ms", ".4f"),
    number("predicted", "predicted_ms", ".4f"),
    number("floor", "floor_ms", ".4f"),
    number("TFLOP/s", "tflops", ".0f"),
    number("copy", "bandwidth_share", ".0%"),
)
"""Columns that every report on measured cells begins with."""


def predicted_pairs(rows: Sequence[Row], name: Callable[[Row], str]) -> dict[str, list[tuple[float, float]]]:
    """Predicted and measured milliseconds of all variants, by a name of their rows."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        measured = [v for v in row["variants"] if good(v) and v["predicted_ms"] is not None]
        found.setdefault(name(row), []).extend((v["predicted_ms"], v["ms"]) for v in measured)
    return found


def plot_predicted(pairs: Mapping[str, Sequence[tuple[float, float]]], title: str) -> Figure:
    """Measured by predicted milliseconds, one colour for each name; the line is where they agree."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot()
    for name, points in pairs.items():
        if points:
            axes.plot(*zip(*points, strict=True), ".", label=name)
    low, high = axes.get_xlim()
    axes.axline((max(low, 1e-3), max(low, 1e-3)), (high, high), color="grey", linewidth=0.5)
    axes.set(xscale="log", yscale="log", xlabel="predicted ms", ylabel="measured ms", title=title)
    axes.legend(fontsize="small")
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Without a date: the same measurements give the same file."""
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    return path
