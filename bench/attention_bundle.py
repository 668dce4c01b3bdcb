"""Attention kernels and what is predicted for them, for a machine that has torch and triton alone.

python -m bench.attention_bundle FOLDER [--only gqa_decode] [--variants 8]      here: compiles, writes
python -m bench.attention FOLDER --output FILE.json                             there: checks, times
"""

from __future__ import annotations

from bench.attention_cells import LENGTHS, grid
from bench.bundling import arguments, write_bundle

VARIANTS = 8
"""Variants of a cell that are measured, at most."""


def main() -> int:
    parser = arguments(__doc__, VARIANTS)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    return write_bundle(grid(options.only, lengths), options)


if __name__ == "__main__":
    raise SystemExit(main())
