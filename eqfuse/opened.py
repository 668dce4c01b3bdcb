"""The visible form of a call, `eqfuse::visible`: compilers see the kernels that it launches.

Under AOTAutograd the call becomes what it does. On a GPU these are launches of the plan's Triton kernels, which Inductor compiles
into its own code, and AOTInductor into a package: nothing of eqfuse is needed where it runs. On a CPU they are the torch calls
of the plan, at one shape. Sizes that are symbols stay symbols, but for an axis that one block holds whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from eqfuse import compiler
from eqfuse.arguments import DTYPE_NAMES
from eqfuse.compiled import Compiled
from eqfuse.errors import EqfuseError
from eqfuse.lowered import lower_nest
from eqfuse.operator.derivative import apart
from eqfuse.operator.shapes import Size, extents
from eqfuse.specialization import Specializations
from eqfuse.terms.types import program_dtypes

INT32_MOST = 2**31


def opened(
    shapes: Specializations,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    sizes: Mapping[str, Size],
) -> list[torch.Tensor]:
    """The outputs of a call, as what records it sees them made. Raises EqfuseError for a number inside of a tensor, which
    nothing can read then, and where every plan has a block that holds an axis of unknown size whole."""
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
    hints = {axis: max(1, _hint(size) if on_gpu else int(size)) for axis, size in symbols.items()}
    with apart():
        compiled = shapes.compile(hints, dtypes, shapes.target.of(tensors))
        if on_gpu:
            compiled = _with_known_blocks(shapes, compiled, symbols)
        shapes.certificate(compiled)
    outputs = [output.name for output in program.outputs]
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


def _hint(size: Size) -> int:
    """A size, as the example has it."""
    if isinstance(size, int):
        return size
    node = size.node
    found = node.hint if node.hint is not None else node.shape_env.size_hint(node.expr)
    return int(found)


def _with_known_blocks(shapes: Specializations, compiled: Compiled, symbols: Mapping[str, Size]) -> Compiled:
    """The cheapest plan of which no block holds an axis whole whose size is a symbol."""
    program = shapes.derived.program
    open_axes = {axis for axis, size in symbols.items() if not isinstance(size, int)}

    def held(candidate: Any) -> set[str]:
        blocks = (block for config in candidate.plan.configs for block in config.blocks)
        return {program.domains.get(b.axis, b.axis) for b in blocks if b.kind == "whole"} & open_axes

    if not held(compiled.chosen):
        return replace(compiled, roles=None)
    for candidate in compiled.candidates:
        if not held(candidate):
            plan = candidate.plan
            tile = lower_nest(candidate.nest, program, compiled.dtypes, plan.configs, compiled.device)
            return replace(compiled, chosen=candidate, tile=tile, roles=None)
    axes = ", ".join(sorted(held(compiled.chosen)))
    raise EqfuseError(
        f"every plan has a block that holds an axis whole: {axes}, whose size is not known",
        hint="give it a size: torch.compile(dynamic=False), or no Dim for it in torch.export",
    )


def index_dtype(tensors: Mapping[str, torch.Tensor]) -> str:
    """The dtype of positions: 32 bits wide, which becomes a condition of the graph, or 64 where the example's tensors need
    them."""
    spans: list[Size] = [
        sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) for x in tensors.values()
    ]
    if any(_hint(span) >= INT32_MOST for span in spans):
        return "int64"
    for span in spans:
        if not isinstance(span, int):
            torch._check(span < INT32_MOST)  # type: ignore[no-untyped-call]
    return "int32"
