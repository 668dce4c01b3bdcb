"""Every variant of the attention benchmark, compiled for sm_90 without a GPU: what the search may run besides what
is chosen, without roles (slow; the chosen ones are compiled by tests/test_triton_hopper.py, roles by tests/test_roles.py).

python -m bench.attention_compile [--only gqa_decode] [--variants 8]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import track

from bench.attention_bundle import VARIANTS
from bench.attention_cells import grid
from bench.bundling import Emitter, same_kernels
from eqfuse.devices import device_named
from eqfuse.errors import EqfuseError
from eqfuse.tile.triton.aot import compile_for

ROWS = 64
"""Rows of a block from which a matrix product is wgmma."""


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a kernel that is chosen spills, or one of 64 rows has no wgmma, or one does not compile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=None, help="operators that start with one of these words")
    parser.add_argument("--variants", type=int, default=VARIANTS, help="at most this many per cell")
    options = parser.parse_args(arguments)
    console = Console()
    emitter, seen, wrong = Emitter(replace(device_named("h200"), roles=None)), set[str](), 0
    for cell in track(grid(options.only), console=Console(stderr=True), description="compiling"):
        for number, variant in enumerate(emitter.variants(cell, options.variants)):
            if (kernels := same_kernels(cell, variant)) in seen:
                continue
            seen.add(kernels)
            name = f"{cell.name} v{number} ({variant.entry['schedule']})"
            try:
                reports = compile_for(variant.source, "sm_90", sizes=variant.entry["sizes"])
            except EqfuseError as error:
                console.print(f"{name}: {error.message}", markup=False)
                wrong += 1
                continue
            spilled = sum(report.spilled_bytes for report in reports)
            used = frozenset[str]().union(*(report.instructions for report in reports))
            rows = max(config.get("i", 1) for config in variant.entry["configs"])
            if spilled:
                console.print(f"{name}: spills {spilled} bytes a thread", markup=False)
            if rows >= ROWS and "wgmma" not in used:
                console.print(f"{name}: {rows} rows without wgmma", markup=False)
            wrong += (number == 0 and spilled > 0) or (rows >= ROWS and "wgmma" not in used)
    console.print(f"{len(seen)} different kernels or sequences of them, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
