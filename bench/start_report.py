"""`eqfuse bench start`: what a new process waits for, before its first kernel and until that has run.

Every number is the median of processes of their own, on a machine that does nothing else meanwhile: wall-clock time of
importing torch, of importing eqfuse on top of it, of the first compile where nothing is kept (`cold`) and where an earlier
process has kept its results (`warm`), and of the first call after that, on the CPU as torch calls (no C++ is compiled) or on
the GPU that `--device` names, where a warm one should not import Triton. `CPU ms` is processor time of the process itself, which other processes do not add to.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from bench.report import Column, Options, Report, each, recorded
from bench.workloads import WORKLOADS, Workload, select
from eqfuse.terms.parser import axes_of, parse

PROCESSES = 10
DEFAULT = ("softmax", "causal_prefill", "gqa_decode")
"""Programs that are started with where `--only` names none."""
PARTS = ("torch", "eqfuse", "compile", "call")


def _ms(state: str, part: str) -> Column:
    return Column(f"{state} {part} ms", lambda row: f"{row[state]['wall_ms'][part]:.0f}")


TITLE = f"A new process, medians of {PROCESSES}"
COLUMNS = (
    Column("program", lambda row: str(row["program"])),
    _ms("warm", "torch"),
    _ms("warm", "eqfuse"),
    Column("CPU ms", lambda row: f"{row['warm']['cpu_ms']['eqfuse']:.0f}"),
    _ms("cold", "compile"),
    _ms("warm", "compile"),
    Column("CPU ms", lambda row: f"{row['warm']['cpu_ms']['compile']:.0f}"),
    Column("cold / warm", lambda row: f"{row['ratio']:.1f}"),
    _ms("cold", "call"),
    _ms("warm", "call"),
    Column("CPU ms", lambda row: f"{row['warm']['cpu_ms']['call']:.0f}"),
    Column("Triton", lambda row: "imported" if row["triton"] else "not imported"),
    Column("eqfuse / torch", lambda row: f"{row['share']:.2f}"),
)

AIMS = (
    ("import eqfuse", "warm", "eqfuse", 150),
    ("first compile", "cold", "compile", 400),
    ("compile of a second process", "warm", "compile", 30),
    ("its first call", "warm", "call", 60),
)
"""What is aimed at, in milliseconds of wall-clock time, that of the call on a GPU."""

CHILD = """
import json, sys, time
marks = [(time.perf_counter(), time.process_time())]
def mark():
    marks.append((time.perf_counter(), time.process_time()))
import torch
given = json.loads(sys.argv[1])
mark()
import eqfuse as eq
mark()
kernel = eq.compile(given["source"], scalars=given["constants"])
mark()
torch.manual_seed(0)
make = lambda shape, dtype: torch.randn(shape).to(getattr(torch, dtype)) if dtype.startswith(("f", "b")) else torch.zeros(shape, dtype=getattr(torch, dtype))
tensors = {n: make(s, d).to(given["device"]) for n, (s, d) in given["tensors"].items()}
drawn = (time.perf_counter(), time.process_time())
kernel(**tensors, **given["scalars"], sizes=given["sizes"])
if given["device"] != "cpu":
    torch.cuda.synchronize()
end = (time.perf_counter(), time.process_time())
parts = list(zip(marks, marks[1:])) + [(drawn, end)]
print(json.dumps({"wall": [b[0] - a[0] for a, b in parts], "cpu": [b[1] - a[1] for a, b in parts],
                  "cached": kernel.certificate.cached, "triton": "triton" in sys.modules}))
"""


def run(options: Options, report: Report) -> None:
    """Failures: a second process that does not find what the first has kept."""
    chosen = select(options.only) if options.only else [WORKLOADS[name] for name in DEFAULT]
    for workload in each(chosen):
        with recorded(report.failing(workload.name)):
            report.add(measure(workload, options.device))
    for row in report.rows:
        if not row["found"]:
            report.failures.append(f"{row['program']}: a second process did not find what the first has kept")
    if report.rows:
        torch_ms, own = (
            statistics.median(row["warm"]["wall_ms"][part] for row in report.rows) for part in PARTS[:2]
        )
        report.summary.append(f"import torch {torch_ms:.0f} ms, import eqfuse {own:.0f} ms on top of it")
        for what, state, part, aim in AIMS:
            if part != "call" or options.device != "cpu":
                found = max(row[state]["wall_ms"][part] for row in report.rows)
                report.summary.append(
                    f"{what}: at most {found:.0f} ms, aim {aim}{' (missed)' * (found > aim)}"
                )


def measure(workload: Workload, device: str) -> dict[str, Any]:
    """Medians of processes that find nothing, and of as many that find what an earlier one has kept."""
    cold = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(PROCESSES):
            cold.append(_process(workload, device, f"{folder}/{number}"))
        warm = [_process(workload, device, f"{folder}/0", "warm") for _ in range(PROCESSES)]
    row: dict[str, Any] = {"program": workload.name, "device": device, "processes": PROCESSES}
    row |= {"cold": _medians(cold), "warm": _medians(warm)}
    row["found"] = not any(each["cached"] for each in cold) and all(each["cached"] for each in warm)
    row["triton"] = any(each["triton"] for each in warm)
    row["ratio"] = row["cold"]["wall_ms"]["compile"] / row["warm"]["wall_ms"]["compile"]
    row["share"] = row["warm"]["wall_ms"]["eqfuse"] / row["warm"]["wall_ms"]["torch"]
    return row


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{kind}_ms": {
            part: 1e3 * statistics.median(each[kind][n] for each in found) for n, part in enumerate(PARTS)
        }
        for kind in ("wall", "cpu")
    }


def _process(workload: Workload, device: str, home: str, state: str = "cold") -> dict[str, Any]:
    case = workload.cases["small"]
    source = workload.text(case)
    axes = axes_of(parse(source, scalars=case.constants).outputs)
    given: Mapping[str, Any] = {
        "source": source,
        "constants": dict(case.constants),
        "scalars": dict(case.scalars),
        "sizes": {axis: size for axis, size in case.sizes.items() if axis in axes},
        "device": device,
        "tensors": {
            name: (workload.shape(name, case), _torch_name(workload.dtype(name, case)))
            for name in workload.tensors
        },
    }
    settings = {"XDG_CACHE_HOME": home, "EQFUSE_CACHE": "on", "EQFUSE_NATIVE": "off"}
    bytecode = {"PYTHONPYCACHEPREFIX": tempfile.gettempdir() + "/eqfuse-bench-start"}
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    made = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(given)],
        env={**bytecode, **others, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError((made.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, Any] = json.loads(made.stdout)
    shown = " ".join(
        f"{part} {1e3 * seconds:.0f}" for part, seconds in zip(PARTS, found["wall"], strict=True)
    )
    print(f"{workload.name} {state}: {shown} ms", file=sys.stderr, flush=True)
    return found


def _torch_name(dtype: str) -> str:
    from eqfuse.terms.floats import TORCH_DTYPES

    return str(TORCH_DTYPES[dtype]).removeprefix("torch.")
