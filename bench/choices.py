"""What the cost model chooses now for the cells that were measured on a GPU, and how good that is: no GPU is needed.

python -m bench.choices [--target h200]

A choice whose kernels, schedule, blocks, warps, stages and shards a run has measured is compared with the best variant of
its cell, and with the choice at the time of the run; one that was not measured is listed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from bench import attention_cells, reductions_cells
from bench.ahead import compile_ahead
from bench.bundling import shown
from bench.cells import Cell
from bench.measured import MEASURED, good
from eqfuse.extract.candidates import Candidate

RUNS = ("attention_h200.json", "reductions_h200.json")

Variant = Mapping[str, Any]


def measured() -> dict[str, Sequence[Variant]]:
    """The variants of every cell of the runs; the first is what was chosen then."""
    runs = (json.loads((MEASURED / name).read_text(encoding="utf-8")) for name in RUNS)
    return {row["cell"]: row["variants"] for run in runs for row in run["rows"]}


def found(variants: Sequence[Variant], chosen: Candidate) -> float | None:
    """Milliseconds of the variant that is this plan; None where there is none that agreed."""
    plan = chosen.plan
    same = (
        plan.schedule,
        plan.shards,
        len(chosen.nest.kernels),
        [shown(config) for config in plan.configs],
    )
    for variant in variants:
        if good(variant) and same == tuple(variant[k] for k in ("schedule", "shards", "kernels", "configs")):
            return float(variant["ms"])
    return None


def _cells(known: Mapping[str, Any]) -> Iterator[Cell]:
    cells: tuple[Cell, ...] = (*attention_cells.grid(), *reductions_cells.grid(every=True))
    return (cell for cell in cells if cell.name in known)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h200", help="the device that plans are chosen for")
    options = parser.parse_args()
    console, known = Console(), measured()
    regrets: list[float] = []
    changes: list[float] = []
    for cell in _cells(known):
        variants = known[cell.name]
        chosen = compile_ahead(cell.workload, cell.case, options.target).compiled.chosen
        ms, times = found(variants, chosen), [float(v["ms"]) for v in variants if good(v)]
        if ms is None:
            console.print(f"{cell.name}: not measured: {chosen.plan}", markup=False)
            continue
        regrets.append(ms / min(times) - 1)
        if good(variants[0]):
            changes.append(ms / float(variants[0]["ms"]))
        if changes and abs(changes[-1] - 1) > 0.02:
            console.print(f"{cell.name}: {changes[-1]:.3f} of the time of the choice then", markup=False)
    console.print(
        f"{len(regrets)} of {len(known)} choices were measured: regret {statistics.median(regrets):.1%} (median), "
        f"{statistics.mean(regrets):.2%} (mean), {max(regrets):.0%} (most); at most {max(changes):.3f} times as long as "
        "the choice then"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
