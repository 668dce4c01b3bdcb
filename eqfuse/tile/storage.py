"""What a tile program needs to know of its arguments: sizes of axes, what they make, dtypes of what it stores."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.nodes import Call, Const, Expr, Size
from eqfuse.tile.nodes import Let, LoadTile, Search, Store, TileProgram
from eqfuse.tile.walk import nested

SMALL_ELEMENTS = 1 << 16
"""Programs whose tensors have fewer elements than this are not worth waking a pool for."""


class Renaming(Protocol):
    """A program some of whose axes are copies of others."""

    @property
    def domains(self) -> tuple[tuple[str, str], ...]: ...


def resolve_extents(
    program: Renaming, extents: Mapping[str, int], shards: Mapping[str, int]
) -> dict[str, int]:
    """The size of every axis: given, a number of shards, or that of the axis it is a copy of."""
    sizes = {**extents, **shards}
    pending = {name: of for name, of in program.domains if name not in sizes}
    while ready := {name: of for name, of in pending.items() if of in sizes}:
        sizes |= {name: sizes[of] for name, of in ready.items()}
        pending = {name: of for name, of in pending.items() if name not in ready}
    return sizes


def buffer_dtypes(program: TileProgram) -> dict[str, str]:
    """The dtype of every buffer: the one it has, or else that of the value stored to it."""
    stored = {
        stmt.tensor: stmt.value.dtype
        for kernel in program.kernels
        for stmt in nested(kernel.body)
        if isinstance(stmt, Store)
    }
    return {buffer.name: buffer.dtype or stored[buffer.name] for buffer in program.buffers}


def loaded_dtypes(program: TileProgram) -> dict[str, str]:
    """The dtype that each tensor is loaded in, or searched."""
    ops = [
        (stmt.op, stmt.value)
        for kernel in program.kernels
        for stmt in nested(kernel.body)
        if isinstance(stmt, Let)
    ]
    searched = {op.tensor: op.dtype for op, _ in ops if isinstance(op, Search)}
    return searched | {op.tensor: value.dtype for op, value in ops if isinstance(op, LoadTile)}


def launch_value(expr: Expr, extents: Mapping[str, int]) -> int:
    """What `LaunchValue` stands for at these sizes."""
    match expr:
        case Const(int(number)):
            return number
        case Size(axis):
            return extents[axis]
        case Call(fn, (left, right)):
            return _INTEGER[fn](launch_value(left, extents), launch_value(right, extents))
    raise TypeError(f"{expr} is not known at a launch")


_INTEGER: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
}


def buffers_for(
    program: TileProgram,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    empty: Callable[[list[int], torch.dtype], torch.Tensor] = lambda shape, dtype: torch.empty(
        shape, dtype=dtype
    ),
) -> dict[str, torch.Tensor]:
    """Uninitialised CPU tensors for everything that `program` writes, outputs and temporaries, given the size
    of every axis. `dtypes` decides where the program leaves a buffer's dtype open; `empty` makes them.
    """
    return {
        buffer.name: empty(
            [sizes[axis] for axis in buffer.axes], TORCH_DTYPES[buffer.dtype or dtypes[buffer.name]]
        )
        for buffer in program.buffers
    }


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor that is stored row by row."""
    return tuple(accumulate(shape[:0:-1], operator.mul, initial=1))[::-1] if shape else ()
