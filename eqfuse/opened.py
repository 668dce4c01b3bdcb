"""The visible form of a call, `eqfuse::visible`: compilers see the kernels that it launches.

Under AOTAutograd the call becomes what it does. On a GPU these are launches of the plan's Triton kernels, which Inductor compiles
into its own code, and AOTInductor into a package: nothing of eqfuse is needed where it runs. On a CPU they are the torch calls
of the plan, at one shape. Sizes that are symbols stay symbols where some plan has no block that holds their axis whole; others, as head
dims, become conditions of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from eqfuse import compiler
from eqfuse.arguments import DTYPE_NAMES
from eqfuse.calls.specialization import Specializations
from eqfuse.compiled import Compiled
from eqfuse.errors import EqfuseError
from eqfuse.lowered import lower_nest
from eqfuse.operator.derivative import untraced
from eqfuse.operator.shapes import Size, extents, hint
from eqfuse.terms.types import program_dtypes

INT32_MOST = 2**31


def opened(
    shapes: Specializations,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    sizes: Mapping[str, Size],
) -> list[torch.Tensor]:
    """The outputs of a call, as what records it sees them made. Raises EqfuseError for a number inside of a tensor, which
    nothing can read then, and where every plan has a block that holds an axis whole whose size depends on what a tensor holds."""
    program = shapes.derived.program
    known = {tensor.name for tensor in program.tensors}
    if inside := sorted(tensors.keys() - known):
        raise EqfuseError(
            f"{inside[0]!r} is a number in a tensor: the visible form of a call launches kernels, and cannot read it",
            hint="pass a number, or compile the kernel without visible=True",
        )
    symbols = extents(program, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, sizes)
    dtypes = program_dtypes(program, {name: DTYPE_NAMES[tensor.dtype] for name, tensor in tensors.items()})
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    hints = {axis: max(1, hint(size) if on_gpu else int(size)) for axis, size in symbols.items()}
    with untraced():
        compiled = shapes.compile(hints, dtypes, shapes.target.of(tensors))
        if on_gpu:
            compiled = _with_open_sizes(shapes, compiled, symbols)
            symbols = _settled(symbols, _held(shapes, compiled, symbols))
        shapes.certificate(compiled)
    outputs = [output.name for output in program.returned]
    shards = {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}
    if not on_gpu:
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        from eqfuse.tile.cpu.run import CpuProgram

        try:
            made = CpuProgram(compiled.tile, program).recorded(tensors, numbers, hints, shards)
        except GuardOnDataDependentSymNode:
            raise EqfuseError(
                "on the CPU, the torch calls of this kernel depend on what a tensor holds: they cannot be recorded",
                hint="compile the kernel without visible=True, or for a GPU",
            ) from None
        return [made[name] for name in outputs]
    from eqfuse.tile.triton.launch import load

    derived = shapes.derived
    module = load(compiler.emit_triton(derived, compiled, derived.name, recorded=index_dtype(tensors)))
    found = getattr(module, derived.name)(**tensors, **numbers, sizes={**symbols, **shards})
    return list(found) if isinstance(found, tuple) else [found]


def _held(shapes: Specializations, compiled: Compiled, symbols: Mapping[str, Size]) -> set[str]:
    """The axes whose size is a symbol and that a block of the plan holds whole."""
    domains = shapes.derived.program.domains
    blocks = (block for config in compiled.chosen.plan.configs for block in config.blocks)
    return {
        axis
        for block in blocks
        if block.kind == "whole"
        if (axis := domains.get(block.axis, block.axis)) in symbols and not isinstance(symbols[axis], int)
    }


def _with_open_sizes(shapes: Specializations, compiled: Compiled, symbols: Mapping[str, Size]) -> Compiled:
    """The cheapest plan of which no block holds an axis whole whose size is a symbol; the cheapest of all where there is none."""
    program = shapes.derived.program
    for candidate in (compiled.chosen, *compiled.candidates):
        planned = replace(compiled, chosen=candidate, roles=None)
        if not _held(shapes, planned, symbols):
            if candidate is compiled.chosen:
                return planned
            configs = candidate.plan.configs
            return replace(
                planned, tile=lower_nest(candidate.nest, program, compiled.dtypes, configs, compiled.device)
            )
    return replace(compiled, roles=None)


def _settled(symbols: Mapping[str, Size], axes: Collection[str]) -> dict[str, Size]:
    """The sizes, with those of some axes as the example has them, which becomes a condition of the graph. Raises EqfuseError
    for what no example has."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        return {axis: int(size) if axis in axes else size for axis, size in symbols.items()}
    except GuardOnDataDependentSymNode:
        raise EqfuseError(
            f"every plan has a block that holds an axis whole: {', '.join(sorted(axes))}, whose size depends on what a tensor holds",
            hint="give it a size",
        ) from None


def index_dtype(tensors: Mapping[str, torch.Tensor]) -> str:
    """The dtype of positions: 32 bits wide, which becomes a condition of the graph, or 64 where the example's tensors need
    them."""
    spans: list[Size] = [
        sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) for x in tensors.values()
    ]
    if any(hint(span) >= INT32_MOST for span in spans):
        return "int64"
    for span in spans:
        if not isinstance(span, int):
            torch._check(span < INT32_MOST)  # type: ignore[no-untyped-call]
    return "int32"
