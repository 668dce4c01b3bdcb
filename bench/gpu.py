"""Runs a bundle of emitted sources on a GPU: agreement with float64, and times beside unfused torch.

Needs torch and triton alone. `python -m bench.gpu FOLDER [--output FILE]`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.timing import milliseconds
from bench.workloads import WORKLOADS, Case, Workload
from eqfuse.measure import as_tuple, worst_error

TOLERANCE = {"f16": 2e-3, "bf16": 2e-2, "f8e4m3": 5e-2, "f32": 2e-6}
"""Relative rms errors that are rounding in each dtype; a kernel may also be twice as far off as unfused torch."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """One row: errors of fused and unfused, times of both."""
    workload: Workload = WORKLOADS[entry["workload"]]
    case: Case = workload.cases[entry["case"]]
    inputs = workload.inputs(case, seed=torch.seed() % 2**31, device="cuda")
    function = getattr(load(folder / f"{entry['function']}.py"), entry["function"])

    def fused() -> Any:
        return function(**inputs, **case.scalars, sizes=entry["sizes"])

    found = as_tuple(fused())
    row = {k: entry[k] for k in ("workload", "case", "schedule", "kernels", "predicted_ms")}
    exact = workload.run_exact(case, inputs)
    row["error"] = worst_error(found, exact)
    del exact
    unfused = workload.run_eager(case, inputs)
    row["unfused_error"] = worst_error(unfused, workload.run_exact(case, inputs))
    torch.cuda.empty_cache()
    dtype = next((o.dtype for o in found if o.is_floating_point()), torch.float32)
    floor = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "f8e4m3"}.get(dtype, "f32")
    row["agrees"] = row["error"] <= max(2 * row["unfused_error"], TOLERANCE[floor])
    row["ms"] = milliseconds(fused)
    row["unfused_ms"] = milliseconds(lambda: workload.run_eager(case, inputs))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    entries = json.loads((options.folder / "manifest.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for entry in entries:
        try:
            row = measure(options.folder, entry)
        except Exception as problem:  # noqa: BLE001  (whatever it is, it is this program's result)
            row = {
                "workload": entry["workload"],
                "case": entry["case"],
                "problem": f"{type(problem).__name__}: {problem}"[:400],
            }
            torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row), flush=True)
    bad = [r for r in rows if not r.get("agrees")]
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}: {len(rows) - len(bad)} of {len(rows)} agree")
    if options.output:
        options.output.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1)
        )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
