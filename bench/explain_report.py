"""`eqfuse bench explain`: the derivation of every program: steps, milliseconds, size, whether the checker accepts it.

Every rule that a derivation names is taken away in turn: the checker must then refuse the derivation. Whether the
same kernels are derived without the rule, in another way, is counted beside.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.progress import track

import eqfuse as eq
from bench.report import Column, Options, Report, each, recorded
from bench.workloads import Workload, select
from eqfuse.kernel import Kernel
from eqfuse.proof.check import known_rules
from eqfuse.proof.examine import examine
from eqfuse.proof.trace import survives

TITLE = "Derivations, replayed by the checker"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    Column("steps", lambda row: str(row["steps"])),
    Column("rules", lambda row: str(row["rules"])),
    Column("derive ms", lambda row: f"{row['derive_ms']:.0f}"),
    Column("check ms", lambda row: f"{row['check_ms']:.1f}"),
    Column("JSON kB", lambda row: f"{row['json_bytes'] / 1e3:.1f}"),
    Column("text lines", lambda row: str(row["lines"])),
    Column("checked", lambda row: "yes" if row["checked"] else "[red]no[/]"),
    Column("rule removed: refused", lambda row: f"{row['refused']} of {row['rules']}"),
    Column("derived another way / not", lambda row: f"{row['another_way']} / {row['no_way']}"),
)


def run(options: Options, report: Report) -> None:
    """Failures: a derivation that the checker refuses, or that it accepts without a rule that it names."""
    kernels: dict[str, Kernel] = {}
    for workload in each(select(options.only)):
        with recorded(report.failing(workload.name)):
            kernels[workload.name] = compiled(workload)
            report.add(measure(workload.name, kernels[workload.name]))
    rules = dict.fromkeys(rule for kernel in kernels.values() for rule in kernel.derivation.rules)
    for rule in track(rules, "rules removed"):
        for row in report.rows:
            kernel = kernels[row["program"]]
            if rule in kernel.derivation.rules:
                row["refused"] += is_refused_without(rule, kernel)
                row["another_way" if is_derived_without(rule, kernel) else "no_way"] += 1
    for row in report.rows:
        if not row["checked"]:
            report.failures.append(f"{row['program']}: {row['why']}")
        if row["refused"] < row["rules"]:
            report.failures.append(f"{row['program']}: accepted without a rule that it names")
    if report.rows:
        times = [row["check_ms"] for row in report.rows]
        report.summary.append(
            f"{len(report.rows)} programs: {sum(row['steps'] for row in report.rows)} steps, "
            f"checked in {statistics.median(times):.0f} ms in the median, {max(times):.0f} ms at most"
        )


def compiled(workload: Workload) -> Kernel:
    """A program for nominal extents; the rules are declared before anything is measured."""
    eq.compile("y[i] = sum[j](x[i,j])", target="cpu", verify=False).derivation.check()
    case = workload.cases["small"]
    return eq.compile(workload.text(case), scalars=case.constants, target="cpu", verify=False)


def measure(name: str, kernel: Kernel) -> dict[str, Any]:
    """What the derivation of a program takes and is; what its rules do is counted later."""
    start = time.perf_counter()
    derivation = kernel.derivation
    derived = time.perf_counter()
    verdict = derivation.check()
    checked = time.perf_counter()
    text = derivation.to_json()
    return {
        "program": name,
        "steps": derivation.steps,
        "rules": len(derivation.rules),
        "derive_ms": 1e3 * (derived - start),
        "check_ms": 1e3 * (checked - derived),
        "json_bytes": len(text.encode()),
        "lines": kernel.explain().count("\n"),
        "checked": bool(verdict) and bool(eq.Derivation.from_json(text).check()),
        "why": verdict.why,
        "refused": 0,
        "another_way": 0,
        "no_way": 0,
    }


def is_refused_without(rule: str, kernel: Kernel) -> bool:
    """Whether the checker refuses a derivation where a rule does not exist."""
    proof = kernel.derivation.proof
    return not examine(proof, rules={n: known for n, known in known_rules(proof).items() if n != rule})


def is_derived_without(rule: str, kernel: Kernel) -> bool:
    """Whether the same kernels follow in another way where a rule does not exist, within the budget."""
    derived = kernel.derived
    return survives(rule, derived.program, derived.outputs, derived.groups, kernel.plan)
