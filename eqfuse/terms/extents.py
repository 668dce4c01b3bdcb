"""Extents that a program makes of the sizes of other axes, `r: axis[N(n) + 1]`; and programs of a part of what another one has."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Output,
    Program,
    Reduce,
    Scalar,
    Size,
    Tensor,
    replaced,
    walk,
)

SIZED = ("add", "sub", "mul", "floordiv", "mod")
"""What extents are made with."""


def sizes_in(exprs: Iterable[Expr]) -> set[str]:
    """The axes of which some expressions have the size."""
    return {node.axis for node in walk(*exprs) if isinstance(node, Size)}


def is_count(expr: Expr) -> bool:
    """Whether an expression is made of sizes and integers alone, with what extents are made with."""
    return all(
        isinstance(node, Size)
        or (isinstance(node, Call) and node.fn in SIZED)
        or (isinstance(node, Const) and type(node.value) is int)
        for node in walk(expr)
    )


def count_of(expr: Expr, extents: Mapping[str, Any]) -> Any | None:
    """The number that an expression makes of sizes, which are integers or `torch.SymInt`s; None where it makes none."""
    match expr:
        case Const(value):
            return value
        case Size(axis):
            return extents.get(axis)
        case Call(fn, args) if fn in SIZED:
            one, other = (count_of(arg, extents) for arg in args)
            divides_by_zero = fn in ("floordiv", "mod") and type(other) is int and other == 0
            return (
                None if one is None or other is None or divides_by_zero else getattr(operator, fn)(one, other)
            )
    return None


def with_computed(program: Program, extents: Mapping[str, int]) -> dict[str, int]:
    """Extents with those that the program computes of the others."""
    found = dict(extents)
    for axis, expr in program.computed.items():
        count = count_of(expr, extents)
        if count is not None:
            found |= {copy: count for copy in (axis, *(c for c, of in program.domains.items() if of == axis))}
    return found


def with_domains(program: Program, extents: Mapping[str, int]) -> dict[str, int]:
    """Extents with those of axes that have the extent of another one."""
    return {**extents, **{axis: extents[of] for axis, of in program.domains.items() if of in extents}}


def axes_along(outputs: Sequence[Output], tensors: Iterable[Tensor]) -> set[str]:
    """The axes that something runs along: outputs, reductions, positions, or declared dimensions of tensors; not those of sizes alone."""
    nodes = list(walk(*(output.expr for output in outputs)))
    found = {axis for output in outputs for axis in output.axes}
    found |= {axis for tensor in tensors for axis in tensor.axes if axis}
    found |= {node.name for node in nodes if isinstance(node, Axis)}
    return found | {node.axis for node in nodes if isinstance(node, Reduce)}


def shapes_of(program: Program, extents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the outputs of a program."""
    return {output.name: tuple(extents[axis] for axis in output.axes) for output in program.outputs}


def of_outputs(program: Program, outputs: Sequence[Output]) -> Program:
    """The program that returns other outputs, of the same states of recurrences in order."""
    names = {output.name for output in outputs}
    kept = [each for each in program.outputs if each.name in program.states and each.name not in names]
    return replace(program, outputs=(*outputs, *kept), hidden=len(kept))


def program_of(
    program: Program, outputs: Sequence[Output], added: Sequence[Tensor], sizes: Mapping[str, str]
) -> Program:
    """The program of some outputs, with what they read. The size of an axis that is not in it is an integer, by its name in
    `sizes`."""
    nodes = list(walk(*(output.expr for output in outputs)))
    read = {node.tensor for node in nodes if isinstance(node, Load)}
    numbers = {node.name for node in nodes if isinstance(node, Scalar)}
    tensors = tuple(t for t in program.tensors if t.name in read)
    axes = axes_along(outputs, (*tensors, *added))
    counts = {n: Scalar(sizes[n.axis]) for n in nodes if isinstance(n, Size) and n.axis not in axes}
    outputs = [replace(output, expr=replaced(output.expr, counts)) for output in outputs]
    integers = tuple(count.name for count in counts.values())
    return replace(
        program,
        source="",
        outputs=tuple(outputs),
        tensors=(*tensors, *added),
        scalars=(*(s for s in program.scalars if s in numbers), *integers),
        integers=(*(s for s in program.integers if s in numbers), *integers),
        integer_tensors=tuple(t for t in program.integer_tensors if t in read),
        domains={axis: of for axis, of in program.domains.items() if axis in axes and of in axes},
        lengths={axis: n for axis, n in program.lengths.items() if axis in axes},
        computed={a: n for a, n in program.computed.items() if a in axes and axes.issuperset(sizes_in([n]))},
        at_most=tuple(
            pair for pair in program.at_most if {n.tensor for n in walk(*pair) if isinstance(n, Load)} <= read
        ),
    )
