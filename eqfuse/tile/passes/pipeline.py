"""Which passes a tile program goes through on its way to a printer, in order.

A pass changes arithmetic, addresses or the order of work, from tile program to tile program; a printer decides nothing
of that. What has gone through them is checked, verified and printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from eqfuse.tile.check import check
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.passes.exp2 import base_2


@dataclass(frozen=True)
class Pass:
    """`run` gives the program itself where there is nothing to do. `why` is one line; `field` says what a run in the
    finite field decides of it, `rounds` how far what it changes may differ in float32."""

    name: str
    run: Callable[[TileProgram], TileProgram]
    why: str
    field: str
    rounds: str = "exactly the same"


_FORMAL = "log2 e is a formal constant: multiplied by and divided by in the right places, or seen"

GPU_PASSES: tuple[Pass, ...] = (
    Pass(
        "base-2 exponentials",
        partial(base_2, everywhere=True),
        "the special function unit computes powers of 2; the factor log2 e joins a scale that there is",
        _FORMAL,
        "see exp2.error",
    ),
)

CPU_PASSES: tuple[Pass, ...] = (
    Pass(
        "base-2 exponentials",
        partial(base_2, everywhere=False),
        "powers of 2 take less than those of e where the factor log2 e joins a scale that there is",
        _FORMAL,
        "see exp2.error",
    ),
)


def passes_for(kind: str) -> tuple[Pass, ...]:
    """The passes of a kind of device, "gpu" or "cpu"."""
    return CPU_PASSES if kind == "cpu" else GPU_PASSES


def run_passes(
    program: TileProgram, passes: tuple[Pass, ...], dtypes: Mapping[str, str] | None = None
) -> TileProgram:
    """The program after these passes, with the names of those that changed it. Raises TileError where one leaves a
    program that does not hold together; `dtypes` are those of `check`."""
    for each in passes:
        after = each.run(program)
        if after is not program:
            program = replace(after, passes=(*program.passes, each.name))
            check(program, dtypes)
    return program


def passes_of(programs: Iterable[TileProgram]) -> tuple[str, ...]:
    """Names of the passes that changed one of the programs, in the order in which they run."""
    found = {name for program in programs for name in program.passes}
    names = dict.fromkeys(each.name for each in (*GPU_PASSES, *CPU_PASSES))
    return tuple(name for name in names if name in found)
