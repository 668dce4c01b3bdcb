"""`python -m bench gallery`: the programs of docs/gallery beside torch and torch.compile; writes the table of the page.

Times are those of `python -m bench cpu`, with all threads: medians of interleaved runs, results compared with float64 in the
same run. A run of all programs at their own sizes writes docs/gallery.md anew.
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime

import torch

from bench import gallery_page
from bench.cpu_report import COLUMNS as CPU_COLUMNS
from bench.cpu_report import failing, ratio, timed
from bench.gallery import GALLERY
from bench.measure import in_fresh_process
from bench.report import Options, Report, each, geometric_mean, recorded
from bench.workloads import select

TITLE = "The gallery: medians in milliseconds, cold / warm; compile seconds"
COLUMNS = tuple(column for n, column in enumerate(CPU_COLUMNS) if n not in (1, 11, 12, 13))
"""Those of `cpu` but for threads and memory."""


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, and an error above twice the unfused one."""
    threads = [torch.get_num_threads()]
    for entry in each(select(options.only, GALLERY)):
        case = entry.cases["small" if options.small else "cpu"]
        with recorded(report.failing(entry.name)), tempfile.TemporaryDirectory() as folder:
            (row,) = in_fresh_process(timed, entry, case, options, threads, folder)
            report.add({**row, "measured": datetime.now(UTC).date().isoformat()})
    report.failures += failing(report.rows)
    for other in ("eager", "torch.compile"):
        ratios = [found for row in report.rows if (found := ratio(row, other)) is not None]
        if ratios:
            mean = geometric_mean(ratios)
            report.summary.append(f"geometric mean over {other} {mean:.2f}x, {len(ratios)} programs")
    if report.path == gallery_page.MEASURED and options == Options():
        report.write()
        gallery_page.PAGE.write_text(gallery_page.text(), encoding="utf-8")
        report.summary.append(f"written to {gallery_page.PAGE.name}")
