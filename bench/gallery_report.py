"""`python -m bench gallery`: the programs of docs/gallery beside torch and torch.compile; writes the table of the page.

Times are those of `python -m bench cpu`, with all threads: medians of interleaved runs, results compared with float64 in the
same run. A run at the programs' own sizes writes docs/gallery.md anew; with `--only`, rows of others stay that were measured on
this machine with these versions.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import gallery_page
from bench.cpu_report import COLUMNS as CPU_COLUMNS
from bench.cpu_report import failing, ratio, timed
from bench.gallery import GALLERY
from bench.measure import in_fresh_process
from bench.report import Options, Report, each, geometric_mean, recorded
from bench.workloads import select
from eqfuse.environment import environment

TITLE = "The gallery: medians in milliseconds, cold / warm; compile seconds"
COLUMNS = tuple(column for n, column in enumerate(CPU_COLUMNS) if n not in (1, 11, 12, 13))
"""Those of `cpu` but for threads and memory."""


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, and an error above twice the unfused one."""
    threads = [torch.get_num_threads()]
    is_whole = replace(options, only=None) == Options()
    kept = _kept(report.path) if is_whole and options.only else {}
    for entry in each(select(options.only, GALLERY)):
        case = entry.cases["small" if options.small else "cpu"]
        with recorded(report.failing(entry.name)), tempfile.TemporaryDirectory() as folder:
            (row,) = in_fresh_process(timed, entry, case, options, threads, folder)
            kept[entry.name] = {**row, "measured": datetime.now(UTC).date().isoformat()}
        report.rows[:] = [kept[name] for name in GALLERY if name in kept]
        report.write()
    report.failures += failing(report.rows)
    for other in ("eager", "torch.compile"):
        ratios = [found for row in report.rows if (found := ratio(row, other)) is not None]
        if ratios:
            mean = geometric_mean(ratios)
            report.summary.append(f"geometric mean over {other} {mean:.2f}x, {len(ratios)} programs")
    if report.path == gallery_page.MEASURED and is_whole and len(kept) == len(GALLERY):
        report.write()
        in_fresh_process(_write_page)
        report.summary.append(f"written to {gallery_page.PAGE.name}")


def _kept(path: Path | None) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run on this machine with these versions, by program."""
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    same = content["environment"] == environment()
    return {row["program"]: row for row in content["rows"]} if same else {}


def _write_page() -> None:
    """With plans that are the same on every machine, as the tests have them."""
    os.environ["EQFUSE_CPU"] = "reference"
    gallery_page.PAGE.write_text(gallery_page.text(), encoding="utf-8")
