"""From the loop nest to tiles: which blocks every kernel walks its axes in, and what dtypes are kept.

`kernel.py` lowers the statements of a kernel, `expressions.py` what they compute, `partition.py` cuts
loop ranges; `builder.py` emits every op once and as far outside as it can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eqfuse.loops import nodes as loops
from eqfuse.loops.blocks import Block
from eqfuse.loops.plan import KernelConfig
from eqfuse.loops.slots import expanded
from eqfuse.loops.walk import expressions, statements
from eqfuse.terms.nodes import Axis, Program, Reduce, walk
from eqfuse.terms.types import output_dtypes
from eqfuse.tile.check import check
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.lower.dot import DotRules
from eqfuse.tile.lower.kernel import KernelLowering
from eqfuse.tile.lower.reads import Reads
from eqfuse.tile.lower.types import Types
from eqfuse.tile.nodes import Kernel, TileProgram


def lower(
    nest: loops.Nest,
    program: Program,
    dtypes: Mapping[str, str],
    configs: tuple[KernelConfig, ...],
    *,
    accumulate: str = "f32",
    batched_dots: bool = False,
    least_dot: int = 1,
    known: dict[tuple[int, KernelConfig], Kernel] | None = None,
) -> TileProgram:
    """The tile program of `nest`, with the blocks of `configs` (one per kernel, in order).

    `dtypes` gives the dtype of every input tensor, and may give those of run-time scalars; others
    are i32 where the program knows them for integers, and real elsewhere. An axis without a block is
    walked like the axis whose extent it has, or else kept whole. Arithmetic is done in `accumulate`,
    and in f64 if any input is f64; temporaries without a dtype are kept in it. `batched_dots` allows
    dots whose operands share dims, or have none or several of their own; a sum of products with a block of
    fewer than `least_dot` positions is no dot. `known` has kernels that were lowered with all else the same, by their numbers
    and blocks, and gets those that are lowered now. Raises TileError where the blocks cannot walk the nest.
    """
    if "f64" in dtypes.values():
        accumulate = "f64"
    scalars = {
        name: dtypes.get(name, "i32" if name in program.integers else accumulate) for name in program.scalars
    }
    outputs = output_dtypes(program, {**dtypes, **scalars})
    buffers = []
    for buffer in nest.buffers:
        own = outputs.get(buffer.name)
        dtype = own if buffer.dtype == "acc" and own in INTEGERS else buffer.dtype or own
        buffers.append(replace(buffer, dtype=accumulate if dtype is None else dtype))
    buffers = _temporaries(nest, buffers, dtypes, scalars, accumulate)
    tensors = {**dtypes, **{buffer.name: buffer.dtype or accumulate for buffer in buffers}}
    domains = dict(nest.domains)
    dots = DotRules(batched_dots, least_dot)
    elements = Reads.of(
        replace(program, outputs=nest.order or program.outputs), {**program.domains, **domains}
    )
    made = {} if known is None else known
    for number, (of, config) in enumerate(zip(nest.kernels, configs, strict=True)):
        if (number, config) not in made:
            kernel = expanded(of)
            blocks = _blocks(kernel, config, domains)
            types = tensors, scalars, accumulate
            made[number, config] = KernelLowering(
                kernel, blocks, domains, *types, dots, elements, program
            ).run()
    kernels = tuple(made[each] for each in enumerate(configs))
    result = TileProgram(kernels, tuple(buffers), nest.domains, nest.shards)
    check(result, {**dtypes, **scalars})
    return result


def _temporaries(
    nest: loops.Nest,
    buffers: Sequence[loops.Buffer],
    dtypes: Mapping[str, str],
    scalars: Mapping[str, str],
    accumulate: str,
) -> list[loops.Buffer]:
    """The buffers with a dtype for every "acc": integers stay integers, all else is kept in `accumulate`."""
    tensors = {**dtypes, **{buffer.name: buffer.dtype or accumulate for buffer in buffers}}
    for kernel in map(expanded, nest.kernels) if "acc" in tensors.values() else ():
        types = _types(tensors, scalars, accumulate)
        for tensor, dtype in types.stored(kernel.body).items():
            if tensors[tensor] == "acc":
                tensors[tensor] = dtype if dtype in INTEGERS else accumulate
    return [replace(buffer, dtype=tensors[buffer.name]) for buffer in buffers]


def _types(tensors: Mapping[str, str], scalars: Mapping[str, str], accumulate: str) -> Types:
    """Types of expressions outside any block."""
    unknown = (frozenset[str](), accumulate)
    return Types({}, tensors, scalars, accumulate, lambda _: unknown, (), lambda _: False)


def _blocks(kernel: loops.Kernel, config: KernelConfig, domains: Mapping[str, str]) -> dict[str, Block]:
    """Blocks of every axis that the kernel mentions: parallel axes, then those of loops, then others."""
    chosen = {block.axis: block for block in config.blocks}
    walked = {stmt.axis: stmt for stmt in statements(kernel.body) if isinstance(stmt, loops.Loop)}
    nodes = list(walk(*expressions(kernel.body)))
    inside = {node.name for node in nodes if isinstance(node, Axis)} | {
        node.axis for node in nodes if isinstance(node, Reduce)
    }
    others = [axis for axis in chosen if axis in inside] + sorted(inside - chosen.keys())
    blocks: dict[str, Block] = {}
    for axis in dict.fromkeys((*kernel.parallel, *walked, *others)):
        like = chosen.get(domains.get(axis, axis))
        if axis in walked and walked[axis].unit:
            blocks[axis] = Block(axis, "unit", 1)
        elif axis in chosen:
            blocks[axis] = chosen[axis]
        elif axis in kernel.parallel:
            blocks[axis] = Block(axis, "grid", 1)
        elif like is not None and like.size is not None and like.size > 1:
            blocks[axis] = Block(axis, "loop", like.size)
        else:
            blocks[axis] = Block(axis, "whole", None)
    return blocks
