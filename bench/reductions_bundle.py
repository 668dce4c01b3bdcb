"""Row kernels and cascades and what is predicted for them, for a machine that has torch and triton alone.

python -m bench.reductions_bundle FOLDER [--only rows,mla] [--every] [--variants 6]     here: compiles, writes
python -m bench.reductions FOLDER --output FILE.json                                    there: checks, times
"""

from __future__ import annotations

from bench.bundling import arguments, write_bundle
from bench.reductions_cells import grid

VARIANTS = 6
"""Variants of a cell that are measured, at most."""


def main() -> int:
    parser = arguments(__doc__, VARIANTS)
    parser.add_argument("--every", action="store_true", help="all sizes of rows, not a covering few")
    options = parser.parse_args()
    return write_bundle(grid(options.only, every=options.every), options)


if __name__ == "__main__":
    raise SystemExit(main())
