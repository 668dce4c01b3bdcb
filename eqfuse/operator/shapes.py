"""Shapes, dtypes and devices of a kernel's outputs, without running it: sizes may be symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eqfuse.arguments import DTYPE_NAMES
from eqfuse.devices import check_together
from eqfuse.errors import BindError, locate
from eqfuse.terms.bounds import longer_dimensions
from eqfuse.terms.extents import count_of
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.nodes import Program
from eqfuse.terms.sizes import check_names, check_ranks, settle, sources
from eqfuse.terms.types import check_dtypes, compute_dtype, result_dtype

Size = Any
"""An integer, or a `torch.SymInt`."""


def extents(
    program: Program, shapes: Mapping[str, Sequence[Size]], sizes: Mapping[str, Size]
) -> dict[str, Size]:
    """The extent of every axis, as `terms.sizes.bind` has it. That sizes agree becomes a condition of the graph where
    they are symbols. Raises BindError for an axis that nothing gives a size."""
    found: dict[str, Size] = dict(program.lengths)
    given = {name: tuple(shape) for name, shape in shapes.items()}
    for axis, extent in sources(program, given):
        _agree(program, axis, found.setdefault(axis, extent.size), extent.size)
    for axis, size in sizes.items():
        axis = program.domains.get(axis, axis)
        _agree(program, axis, found.setdefault(axis, size), size)
    _add_computed(program, found)
    for (name, dimension), reads in longer_dimensions(program).items():
        for axis, read in reads.items():
            if not read.scalar:
                rest = torch.sym_max(given[name][dimension] - read.offset, 0)  # type: ignore[no-untyped-call]
                found.setdefault(axis, rest // (read.times + 1))
    _add_computed(program, found)
    settle(program, found)
    return found


def has_hint(size: Size) -> bool:
    """Whether some example has a size: one that depends on what a tensor holds has none."""
    return isinstance(size, int) or bool(size.node.has_hint())


def hint(size: Size) -> int:
    """A size, as the example has it."""
    if isinstance(size, int):
        return size
    node = size.node
    found = node.hint if node.hint is not None else node.shape_env.size_hint(node.expr)
    return int(found)


def _add_computed(program: Program, found: dict[str, Size]) -> None:
    """Adds the extents that the program computes of those that are known."""
    for axis, expr in program.computed.items():
        if (count := count_of(expr, found)) is not None:
            _agree(program, axis, found.setdefault(axis, count), count)


def _agree(program: Program, axis: str, one: Size, other: Size) -> None:
    if one is other:
        return
    if isinstance(one, int) and isinstance(other, int):
        if one != other:
            raise BindError(
                f"axis {axis!r} has sizes {one} and {other}",
                source=program.source,
                span=locate(program.source, axis),
                hint="pass tensors whose sizes agree, or name the axes differently",
            )
        return
    message = f"eqfuse: axis {axis!r} has sizes {one} and {other}"
    torch._check(one == other, lambda: message)  # type: ignore[no-untyped-call]


def output_dtypes(program: Program, tensors: Mapping[str, torch.dtype]) -> tuple[torch.dtype, ...]:
    """The dtype of each output. Raises TypeCheckError."""
    for name, dtype in tensors.items():
        if dtype not in DTYPE_NAMES:
            raise BindError(
                f"{name!r} has dtype {dtype}, which the language does not have",
                hint=f"convert it to one of {', '.join(TORCH_DTYPES)}",
            )
    known = check_dtypes(program, {name: DTYPE_NAMES[dtype] for name, dtype in tensors.items()})
    accumulate = compute_dtype(known[tensor.name] for tensor in program.tensors)
    reals = dict.fromkeys(program.scalars, accumulate) | dict.fromkeys(program.integers, "i32")
    return tuple(
        TORCH_DTYPES[output.dtype or result_dtype(output.expr, {**known, **reals})]
        for output in program.returned
    )


def empty_outputs(
    program: Program,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    extents_of: Callable[[Mapping[str, Sequence[Size]]], Mapping[str, Size]],
) -> list[torch.Tensor]:
    """Outputs of the right shape and dtype, on the device of the tensors, that hold nothing; `extents_of` gives those of axes, by the
    shapes of tensors. Raises BindError and TypeCheckError as a call does."""
    known = {tensor.name for tensor in program.tensors}
    arrays = {name: tensor for name, tensor in tensors.items() if name in known or tensor.dim()}
    check_together(arrays)
    shapes = {name: tuple(tensor.shape) for name, tensor in arrays.items()}
    plain = {name: value if type(value) in (int, float, bool) else 0 for name, value in numbers.items()}
    given = {**plain, **{name: 0 for name in tensors if name not in arrays}}
    check_names(program, shapes, given)
    check_ranks(program, shapes)
    found = extents_of(shapes)
    dtypes = output_dtypes(program, {name: tensor.dtype for name, tensor in arrays.items()})
    like = next(iter(arrays.values()), None)
    made = []
    for output, dtype in zip(program.returned, dtypes, strict=True):
        shape = [found[axis] for axis in output.axes]
        made.append(torch.empty(shape, dtype=dtype) if like is None else like.new_empty(shape, dtype=dtype))
    return made
