"""Attention kernels and what is predicted for them, for a machine that has torch and triton alone.

python -m bench.attention_bundle FOLDER [--only gqa_decode] [--variants 8]      here: compiles, writes
python -m bench.attention_bundle FOLDER --shapes --variants 1                   other head dims and groups
python -m bench.attention FOLDER --output FILE.json                             there: checks, times
"""

from __future__ import annotations

from bench.attention_cells import LENGTHS, grid, shapes
from bench.bundling import arguments, write_bundle

VARIANTS = 8
"""Variants of a cell that are measured, at most."""


def main() -> int:
    parser = arguments(__doc__, VARIANTS)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--shapes", action="store_true", help="other head dims and groups instead")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    return write_bundle(shapes() if options.shapes else grid(options.only, lengths), options)


if __name__ == "__main__":
    raise SystemExit(main())
