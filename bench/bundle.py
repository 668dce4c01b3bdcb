"""Emitted sources and what to call them with, for a machine that has torch and triton alone.

python -m bench.bundle FOLDER [--target sm_90] [--only NAME]     here: compiles, verifies, writes
python -m bench.gpu FOLDER                                       there: runs, checks, times
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from bench.ahead import compile_ahead
from bench.report import each
from bench.workloads import Case, Workload, select
from eqfuse.certification import Checks, verify
from eqfuse.errors import EqfuseError

MANIFEST = "manifest.json"


def write(folder: Path, target: str, only: str | None, cases: int) -> list[str]:
    """Writes one module per workload and case, and the manifest; returns what could not be compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, object]] = []
    failures: list[str] = []
    for workload in each(select(only)):
        for case in chosen_cases(workload, cases):
            try:
                entries.append(_emit(folder, workload, case, target))
            except EqfuseError as error:
                failures.append(f"{workload.name} {case.name}: {error}")
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1), encoding="utf-8")
    return failures


def chosen_cases(workload: Workload, count: int) -> list[Case]:
    """The small case, and `count` of the papers' cases, evenly spread (the CPU's where a paper has none)."""
    papers = workload.paper_cases or (workload.cases["cpu"],)
    step = max(1, len(papers) // max(1, count))
    return [workload.cases["small"], *papers[step // 2 :: step][:count]]


def _emit(folder: Path, workload: Workload, case: Case, target: str) -> dict[str, object]:
    ahead = compile_ahead(workload, case, target)
    nest, plan = ahead.compiled.chosen.nest, ahead.compiled.chosen.plan
    compiled, checks = ahead.compiled, Checks(16, scalars=case.constants)
    certificate = verify(ahead.derived, nest, plan, compiled.dtypes, compiled.device, checks)
    (folder / f"{ahead.name}.py").write_text(ahead.source, encoding="utf-8")
    return {
        "workload": workload.name,
        "case": case.name,
        "function": ahead.name,
        "schedule": ahead.schedule,
        "kernels": len(nest.kernels),
        "predicted_ms": 1e3 * plan.cost.seconds if plan.cost else None,
        "certificate": certificate.ok,
        "sizes": ahead.sizes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--only", default=None)
    parser.add_argument("--cases", type=int, default=1, help="how many of the papers' sizes per workload")
    options = parser.parse_args()
    failures = write(options.folder, options.target, options.only, options.cases)
    console = Console(stderr=True)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
