"""Which passes a tile program goes through on its way to a printer, in order.

A pass changes arithmetic, addresses or the order of work, from tile program to tile program; a printer decides nothing
of that. What has gone through them is checked, verified and printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from eqfuse.fast_dataclass import dataclass
from eqfuse.tile.check import check
from eqfuse.tile.nodes import Kernel, TileProgram
from eqfuse.tile.passes.division import plain_divisions
from eqfuse.tile.passes.draft import in_kernels
from eqfuse.tile.passes.early_masks import masked_first
from eqfuse.tile.passes.exp2 import base_2
from eqfuse.tile.passes.grid_order import longest_first
from eqfuse.tile.passes.init_accumulator import init_accumulator
from eqfuse.tile.passes.launch_values import computed_at_launch
from eqfuse.tile.passes.masked_products import without_masks
from eqfuse.tile.passes.positions import split_positions
from eqfuse.tile.passes.precision import matrix_precision
from eqfuse.tile.passes.reciprocals import by_reciprocals
from eqfuse.tile.passes.row_terms import rows_last
from eqfuse.tile.passes.scaled_maxima import scaled_last
from eqfuse.tile.passes.transpose_products import transpose_products
from eqfuse.tile.passes.whole_shards import whole_shards


class Passed(Protocol):
    """A program that has gone through passes."""

    @property
    def passes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Pass:
    """`run` gives the program itself where there is nothing to do. `why` is one line; `field` says what a run in the
    finite field decides of it, `rounds` how far what it changes may differ in float32."""

    name: str
    run: Callable[[TileProgram], TileProgram]
    why: str
    field: str
    rounds: str = "exactly the same"


SPLIT_POSITIONS = "split positions"

_EXACT = "exact there: the same sums, products and quotients of residues"

_LAUNCH_VALUES = Pass(
    "launch values",
    computed_at_launch,
    "quotients of sizes are parameters, which Triton knows to be multiples of 16, or computed once",
    "the same integers, at the sizes of the run",
)
_GRID_ORDER = Pass(
    "grid order",
    longest_first,
    "blocks with longer loops start first, so that the last ones to run are short",
    "every instance runs at its own place in the order, and all of them are there",
)
_DIVISIONS = Pass(
    "plain divisions",
    plain_divisions,
    "positions and sizes are not below 0: an instruction divides them",
    "a machine's quotients and remainders, of all positions",
)


def _base_2(*, everywhere: bool, why: str) -> Pass:
    return Pass(
        "base-2 exponentials",
        partial(base_2, everywhere=everywhere),
        why,
        "log2 e is a formal constant: multiplied by and divided by in the right places, or seen",
        "exp2.error: the product with log2 e is rounded",
    )


def _each(change: Callable[[Kernel], Kernel]) -> Callable[[TileProgram], TileProgram]:
    return partial(in_kernels, change=change)


GPU_PASSES: tuple[Pass, ...] = (
    _base_2(
        everywhere=True,
        why="the special function unit computes powers of 2; log2 e joins a scale that there is",
    ),
    Pass(
        SPLIT_POSITIONS,
        split_positions,
        "conversions of tiles of positions take as long as exponentials; those of one dim are few",
        _EXACT,
        "positions.error: each side of a difference is multiplied by itself",
    ),
    Pass(
        "reciprocals",
        by_reciprocals,
        "a division takes eight instructions, a product one",
        _EXACT,
        "reciprocals.ERROR: the reciprocal is rounded, and the product",
    ),
    Pass(
        "masked products",
        without_masks,
        "a matrix unit has no masks: products with what is not finite are added apart",
        "infinities and NaN of masked operands get where the program has them, and nowhere else",
    ),
    Pass(
        "matrix precision",
        matrix_precision,
        "products of f32 as three of bf16, and sums of products of f8, where the tensors are no more precise",
        _EXACT,
        "precision.ERROR: the products of the lesser halves are left out",
    ),
    Pass(
        "whole shards",
        whole_shards,
        "shards that multiply matrices end between blocks: masks are left at the end of the tensor alone",
        "every position is in one shard",
        "the same sums, divided among shards at other places",
    ),
    _LAUNCH_VALUES,
    _GRID_ORDER,
    _DIVISIONS,
)

CPU_PASSES: tuple[Pass, ...] = (
    _base_2(
        everywhere=False,
        why="powers of 2 take less than those of e where log2 e joins a scale that there is",
    ),
    _LAUNCH_VALUES,
    _GRID_ORDER,
    _DIVISIONS,
)


PRICED_PASSES: tuple[Pass, ...] = (
    Pass(
        "transposed products",
        _each(transpose_products),
        "a product's tile has its rows where memory has those of the output",
        _EXACT,
    ),
    Pass(
        "initial accumulators",
        _each(init_accumulator),
        "what is added to a sum of products is where the sum starts, and takes no registers beside it",
        _EXACT,
        "the same sum in another order",
    ),
)
"""Passes of kernels in roles whose roles are priced after them."""

ROLES_PASSES: tuple[Pass, ...] = (
    *PRICED_PASSES,
    Pass(
        "masks first",
        _each(masked_first),
        "one select of each element instead of two",
        "exponentials of what is masked are 0",
    ),
    Pass(
        "terms of rows behind maxima",
        _each(rows_last),
        "what all elements of a row have in common is taken from the maximum, not from each of them",
        _EXACT,
        "the same differences in another order",
    ),
    Pass(
        "scales behind maxima",
        _each(scaled_last),
        "a product and a difference of each element are one instruction",
        _EXACT,
    ),
)
"""Those of kernels in roles, before these are divided (`tile/roles/passes.py`)."""


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


def passes_of(programs: Iterable[Passed]) -> tuple[str, ...]:
    """Names of the passes that changed one of the programs, in the order in which they run: those of kernels that are divided
    into roles last."""
    found = list(dict.fromkeys(name for program in programs for name in program.passes))
    tables = (*GPU_PASSES, *CPU_PASSES, *ROLES_PASSES)
    return tuple(dict.fromkeys((*(each.name for each in tables if each.name in found), *found)))
