"""Checks and times a bundle of attention kernels beside torch's libraries and compilers.

python -m bench.attention FOLDER --output FILE.json [--only gqa_decode] [--seconds 400]

`bench.attention_bundle` makes the bundle, `bench.running` says how it is run.
"""

from __future__ import annotations

import itertools

import torch

from bench import peers
from bench.attention_cells import Cell, cell_of, grid, shapes
from bench.cells import TOLERANCE, Inputs
from bench.running import Suite, arguments, read_manifest, run_bundle

EXACT_BYTES = 1 << 30
"""Bytes of float64 scores that the reference keeps at once."""

LARGE_SCORES = 1e9
"""Bytes of scores above which the plain expression takes much memory."""


def exact(cell: Cell, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The cell's output in float64, a block of queries of one head of keys at a time.

    Where queries see no later keys, those are left out: the last query of a block stands at the end of its keys.
    """
    case, workload = cell.case, cell.workload
    sizes = case.sizes
    group = sizes["h"] // sizes["k"]
    rows = max(1, min(sizes["i"], EXACT_BYTES // (8 * group * sizes["j"])))
    out = inputs["Q"].new_empty((*inputs["Q"].shape[:-1], sizes["e"]), dtype=torch.float64)
    for b, k, first in itertools.product(range(sizes["b"]), range(sizes["k"]), range(0, sizes["i"], rows)):
        last = min(first + rows, sizes["i"])
        part = {"b": slice(b, b + 1), "h": slice(k * group, (k + 1) * group), "i": slice(first, last)}
        part |= {"k": slice(k, k + 1), "j": slice(0, last if cell.is_causal else sizes["j"])}
        some = {
            name: tensor[tuple(part.get(axis, slice(None)) for axis in workload.tensors[name].axes)]
            for name, tensor in inputs.items()
        }
        (found,) = workload.run_exact(case, some)
        axes = workload.tensors["Q"].axes[:-1]
        out[tuple(part[axis] for axis in axes)] = found
    return (out,)


def _tolerance(cell: Cell) -> float:
    return TOLERANCE[cell.case.dtype]


def _is_large(cell: Cell) -> bool:
    return peers.score_bytes(cell) > LARGE_SCORES


ATTENTION = Suite("Attention", exact, peers.of, _tolerance, peers.sdpa, _is_large)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--lengths", default=None, help="comma-separated; default: those of the bundle")
    options = parser.parse_args()
    manifest = read_manifest(options.folder)
    lengths = [int(n) for n in options.lengths.split(",")] if options.lengths else None
    wanted = {c.name for c in grid(options.only, lengths or sorted({c["length"] for c in manifest["cells"]}))}
    wanted |= {cell.name for cell in shapes()}
    cells = [(cell_of(c), c["variants"]) for c in manifest["cells"]]
    return run_bundle(ATTENTION, [(c, v) for c, v in cells if c.name in wanted], manifest, options)


if __name__ == "__main__":
    raise SystemExit(main())
