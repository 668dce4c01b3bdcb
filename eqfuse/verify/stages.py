"""Stages of the pipeline as `check_stages` runs them: equal terms, loop nests and tile programs, in small ragged tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from eqfuse.loops import interpreter as loops_interpreter
from eqfuse.loops.nodes import Nest
from eqfuse.loops.rows import written_out
from eqfuse.loops.walk import loops_in
from eqfuse.terms.domain import Domain
from eqfuse.terms.extents import shapes_of
from eqfuse.terms.nodes import Program
from eqfuse.terms.views import Views
from eqfuse.tile import interpreter as tile_interpreter
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.roles import interpreter as roles_interpreter
from eqfuse.tile.roles.nodes import RolesProgram
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.source import Stage

VERIFIED_TILES = ((2, 2), (3, 3))
"""Positions of a tile, and number of shards, of each verified run of a loop nest."""
VERIFIED_BLOCKS = ((2, 2), (4, 3))
"""The same for tile programs, whose blocks are powers of two."""
VERIFIED_ROLES = ((2, 2), (1, 3))
"""The same for their forms in roles; blocks of rows have so many for each consumer. Blocks of one position make more trips than
there are slots."""


def term_stage(prepared: Program, extents: Mapping[str, int]) -> Stage:
    """The program with outputs that say the same, run as written."""
    return Stage.of_program("prepared", prepared, extents)


def loop_stages(program: Program, nest: Nest, extents: Mapping[str, int]) -> list[Stage]:
    """The nest in tiles of each of `VERIFIED_TILES`."""
    return [_loop_stage(nest, program, extents, tile, shards) for tile, shards in VERIFIED_TILES]


def tile_stages(program: Program, tiles: Sequence[TileProgram], extents: Mapping[str, int]) -> list[Stage]:
    """Tile programs of one nest, lowered to blocks of each of `VERIFIED_BLOCKS`, run in padded blocks."""
    return [
        _blocks_stage(
            f"tiles, blocks of {block}",
            f"blocks of {block}, padded",
            tile_interpreter.run,
            lowered,
            program,
            extents,
            shards,
        )
        for lowered, (block, shards) in zip(tiles, VERIFIED_BLOCKS, strict=True)
    ]


FAR = 64
"""An axis that is longer than this is not walked in the smallest tiles."""


def stages_of(
    program: Program,
    prepared: Program,
    nest: Nest,
    tiles: Sequence[TileProgram],
    forms: Sequence[RolesProgram],
    extents: Mapping[str, int],
    number: int,
) -> list[Stage]:
    """The equal terms (`prepared`), and by turns one of the ways in which a nest, its tile programs (`tiles`, see `tile_stages`) and its
    forms in roles, where it has any, are divided. Axes that are long are walked in long tiles, by the nest alone."""
    turn = number % len(tiles)
    terms = term_stage(prepared, extents)
    if max(extents.values(), default=0) > FAR:
        return [terms, _loop_stage(nest, program, extents, FAR, VERIFIED_TILES[turn][1])]
    return [
        terms,
        loop_stages(program, nest, extents)[turn],
        tile_stages(program, tiles, extents)[turn],
        *(roles_stages(program, forms, extents)[number % len(forms)] for _ in forms[:1]),
    ]


def roles_stages(program: Program, forms: Sequence[RolesProgram], extents: Mapping[str, int]) -> list[Stage]:
    """Forms in roles of one nest, of blocks of each of `VERIFIED_ROLES`."""
    return [
        _blocks_stage(
            name := f"roles, blocks of {block}", name, roles_interpreter.run, form, program, extents, shards
        )
        for form, (block, shards) in zip(forms, VERIFIED_ROLES, strict=True)
    ]


def _loop_stage(nest: Nest, program: Program, extents: Mapping[str, int], tile: int, shards: int) -> Stage:
    walked = {loop.axis for kernel in nest.kernels for loop in loops_in(kernel.body)}
    tiles = {axis: 1 if axis in dict(nest.shards) else tile for axis in walked}
    split = {axis: shards for axis, _ in nest.shards}
    return Stage(
        f"loops, tiles of {tile}",
        lambda i, d: loops_interpreter.run(
            nest, program, i.tensors, i.scalars, i.extents, d, tiles=tiles, shards=split, batch=i.trials
        ),
        extents,
        f"tiles of {tile}" + (f", {shards} shards" if split else ""),
        written_out=partial(written_out, nest),
    )


def _blocks_stage(
    of: str,
    detail: str,
    run: Callable[..., Mapping[str, Any]],
    form: TileProgram | RolesProgram,
    program: Program,
    extents: Mapping[str, int],
    shards: int,
) -> Stage:
    """What the interpreter of a form in blocks gives for it."""
    split = {axis: shards for axis, _ in form.shards}
    return Stage(
        of,
        lambda i, d: run(form, program, i.tensors, i.scalars, i.extents, d, shards=split, batch=i.trials),
        extents,
        detail + (f", {shards} shards" if split else ""),
    )


def viewed_stages(
    views: Views,
    stages: Callable[[Mapping[str, int], int], Sequence[Stage]],
    extents: Mapping[str, int],
    number: int,
) -> list[Stage]:
    """Stages of a program as those of the program that it was made of, at the extents of that one's axes: the tensors are given as the
    program takes them, and what comes out has the dimensions of the other one."""
    segments, shaped = views.segments, views.shaped

    def of_source(stage: Stage) -> Stage:
        def run(inputs: Inputs, domain: Domain) -> Mapping[str, Any]:
            if segments is not None:
                tensors, scalars = segments.sampled(inputs.tensors, inputs.scalars, inputs.extents)
                sizes = segments.extents(inputs.extents)
                inputs = replace(inputs, tensors=tensors, scalars=scalars, extents=sizes)
            if shaped is None:
                return stage.run(inputs, domain)
            taken = {
                name: _shaped(
                    _turned(value, partial(shaped.order, name), domain),
                    partial(shaped.shape, name),
                    domain,
                )
                for name, value in inputs.tensors.items()
            }
            sizes = shaped.extents(inputs.extents)
            made = stage.run(replace(inputs, tensors=taken, extents=sizes), domain)
            shapes = shapes_of(shaped.source, inputs.extents)
            ranks = {output.name: len(output.axes) for output in shaped.program.outputs}
            return {
                name: _shaped(value, partial(_as_called, shapes[name], ranks[name]), domain)
                for name, value in made.items()
            }

        return Stage(stage.name, run, extents, stage.detail)

    return [of_source(stage) for stage in stages(views.extents(extents), number)]


def _as_called(wanted: Sequence[int], rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[: len(shape) - rank], *wanted)


def _turned(value: Any, order: Callable[[int], tuple[int, ...]], domain: Domain) -> Any:
    if isinstance(value, np.ndarray):
        return value.transpose(order(value.ndim))
    return domain.transpose(value, order(len(domain.shape(value))))


def _shaped(value: Any, shape: Callable[[Sequence[int]], tuple[int, ...]], domain: Domain) -> Any:
    if isinstance(value, np.ndarray):
        return value.reshape(shape(value.shape))
    return domain.reshape(value, shape(domain.shape(value)))
