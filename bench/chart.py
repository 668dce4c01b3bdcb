"""docs/peers.svg, eqfuse beside compilers and libraries on a GPU; `python -m bench.performance` draws it.

From the tables of `bench/results/attention.json` and `reductions.json`: for every program the geometric mean, over all cells in which
a peer of a kind agreed with float64, of the best peer's time over eqfuse's without tuning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import geometric_mean

ROOT = Path(__file__).parent.parent
CHART = ROOT / "docs" / "peers.svg"
TABLES = ("attention", "reductions")
KINDS: Mapping[str, str] = {
    "over_compiler": "the best of torch.compile and FlexAttention",
    "over_library": "the best library (cuDNN, FlashAttention, torch's kernels)",
}


def means() -> dict[str, dict[str, float]]:
    """By program, in the order of the tables, and kind of peer: how many times faster eqfuse is."""
    found: dict[str, dict[str, list[float]]] = {}
    for table in TABLES:
        for row in _content(table)["rows"]:
            of = found.setdefault(row.get("operator") or row["program"], {kind: [] for kind in KINDS})
            for kind in KINDS:
                if row[kind] is not None:
                    of[kind].append(row[kind])
    return {
        program: {kind: geometric_mean(ratios) for kind, ratios in of.items() if ratios}
        for program, of in found.items()
    }


def where() -> str:
    """The device and the day, as both tables have them."""
    places: set[str] = set()
    for table in TABLES:
        run = json.loads((ROOT / f"bench/results/{table}_h200.json").read_text(encoding="utf-8"))
        places.add(f"{run['environment']['device']}, {run['environment']['date'][:10]}")
    if len(places) != 1:
        raise ValueError(f"the tables are of several runs: {sorted(places)}")
    return places.pop()


def _content(table: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / f"bench/results/{table}.json").read_text(encoding="utf-8"))
    return content


def draw(path: Path) -> None:
    """The chart, as SVG without a date."""
    import matplotlib
    from matplotlib.figure import Figure

    of = means()
    programs: Sequence[str] = list(of)
    matplotlib.rcParams.update({"svg.hashsalt": "eqfuse", "svg.fonttype": "none"})
    figure = Figure(figsize=(8, 0.23 * len(programs) + 1.2))
    axes = figure.add_subplot()
    for kind, marker, colour in (("over_compiler", "o", "#3949ab"), ("over_library", "D", "#ef6c00")):
        points = [(of[name][kind], n) for n, name in enumerate(programs) if kind in of[name]]
        axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=5, label=f"over {KINDS[kind]}")
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_xscale("log")
    ticks = (0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(programs)), [name.replace("_", " ") for name in programs], fontsize="small")
    axes.invert_yaxis()
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_title(f"Speed of eqfuse without tuning: {where()}", fontsize="medium")
    axes.legend(fontsize="small", loc="upper right")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
