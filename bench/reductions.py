"""Checks and times a bundle of row kernels and cascades beside torch, torch.compile and torch's libraries.

python -m bench.reductions FOLDER --output FILE.json [--only rows,mla] [--seconds 400]

`bench.reductions_bundle` makes the bundle, `bench.running` says how it is run.
"""

from __future__ import annotations

import torch

from bench import reductions_peers
from bench.cells import TOLERANCE, Inputs, Run
from bench.reductions_cells import Cell, grid
from bench.running import Suite, arguments, read_manifest, run_bundle

LARGE_BYTES = 4e8
"""Bytes of inputs and outputs above which unfused torch takes much memory: it keeps several float32 copies."""


def exact(cell: Cell, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The outputs in float64, casts to narrower dtypes left out."""
    return cell.workload.run_exact(cell.case, inputs)


def tolerance(cell: Cell) -> float:
    """What rounding to the narrowest dtype leaves."""
    casts = [dtype for dtype in TOLERANCE if f"{dtype}(" in cell.workload.source]
    return max(TOLERANCE[dtype] for dtype in (cell.case.dtype, *casts))


def _beside(cell: Cell) -> Run | None:
    return None


def _is_large(cell: Cell) -> bool:
    return cell.bytes > LARGE_BYTES


REDUCTIONS = Suite("Reductions", exact, reductions_peers.of, tolerance, _beside, _is_large)


def main() -> int:
    options = arguments(__doc__).parse_args()
    manifest = read_manifest(options.folder)
    wanted = {cell.name for cell in grid(options.only, every=True)} | {c.name for c in grid(options.only)}
    cells = [(Cell(c["program"], c["label"]), c["variants"]) for c in manifest["cells"]]
    return run_bundle(REDUCTIONS, [(c, v) for c, v in cells if c.name in wanted], manifest, options)


if __name__ == "__main__":
    raise SystemExit(main())
