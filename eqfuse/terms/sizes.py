"""Extents of axes, from the tensors, scalars and sizes given."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eqfuse.errors import BindError, closest, did_you_mean, locate
from eqfuse.terms.bounds import check_bounds, check_longer, longer_dimensions
from eqfuse.terms.extents import axes_along, count_of
from eqfuse.terms.integers import LONGEST
from eqfuse.terms.nodes import Axis, Load, Program, once, walk
from eqfuse.terms.parser import sized_axes
from eqfuse.terms.positions import reason
from eqfuse.terms.printer import show
from eqfuse.terms.ranges import whole_number

PROGRAM = "%program"
"""Stands for the program itself among the tensors that give sizes."""


@dataclass(frozen=True)
class Extent:
    """A size of an axis, and where it comes from: a dimension of a tensor, the program, or `sizes`."""

    size: int
    tensor: str | None
    dimension: int = 0

    def __str__(self) -> str:
        if self.tensor == PROGRAM:
            return "the program"
        return "sizes" if self.tensor is None else f"{self.tensor} (dimension {self.dimension})"


def bind(
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """The extent of every axis of the program: free, bound, renamed, or of a declaration.

    Raises BindError for a missing or unknown tensor, scalar or axis, a wrong rank, sizes that do not
    agree, an axis that nothing gives a size, and a read that is outside its tensor.
    """
    scalars = scalars or {}
    check_names(program, shapes, scalars)
    check_ranks(program, shapes)
    extents = _extents(program, shapes)
    if sizes:
        _add_sizes(program, shapes, sizes, extents)
    _add_computed(program, shapes, extents)
    for (name, dimension), reads in longer_dimensions(program).items():
        for axis, read in reads.items():
            if (more := read.more(scalars)) is not None:
                extents.setdefault(axis, max(shapes[name][dimension] - more, 0) // (read.times + 1))
    _add_computed(program, shapes, extents)
    settle(program, extents)
    check_longer(program, shapes, extents, scalars)
    check_bounds(program, shapes, extents, scalars)
    return extents


def settle(program: Program, extents: dict[str, Any]) -> None:
    """Gives every axis the extent of the one that it is as long as. Raises BindError for an axis that nothing gives a size."""
    for axis in _axes(program):
        base = program.domains.get(axis, axis)
        if base not in extents:
            raise BindError(
                f"nothing gives axis {base!r} a size",
                source=program.source,
                span=locate(program.source, base),
                hint=f'no tensor has it as a plain index; pass sizes={{"{base}": ...}}',
            )
        extents[axis] = extents[base]


@once
def _axes(program: Program) -> tuple[str, ...]:
    return sized_axes(program)


@once
def undetermined(program: Program) -> tuple[str, ...]:
    """The axes that neither a tensor nor the program gives an extent."""
    given = {axis for axis, *_ in places(program)} | {*program.domains, *program.lengths, *program.computed}
    return tuple(sorted(axes_along(program.outputs, ()) - given))


def _add_computed(program: Program, shapes: Mapping[str, tuple[int, ...]], found: dict[str, int]) -> None:
    """Adds the extents that the program computes of those that are known."""
    for axis, expr in program.computed.items():
        count = count_of(expr, found)
        if count is None:
            continue
        known = found.setdefault(axis, count)
        if known != count or count < 0:
            first = next((extent for each, extent in _given(program, shapes) if each == axis), "sizes")
            message = f"axis {axis!r} is declared to have {show(expr)} positions, which are {count} here"
            if count >= 0:
                message += f", and has size {known} in {first}"
            hint = "pass tensors whose sizes agree with the declaration, or change it"
            raise _name_error(program, axis, message, hint)


def check_names(program: Program, shapes: Collection[str], scalars: Mapping[str, Any]) -> None:
    tensors, numbers = _inputs(program)
    if len(shapes) != len(tensors) or not tensors.issuperset(shapes) or scalars.keys() != numbers:
        _check_inputs(program, shapes, scalars)
    for name in program.integers:
        if whole_number(scalars[name]) is None:
            message = f"scalar {name!r} is {scalars[name]!r}, not an integer"
            raise _name_error(program, name, message, _integer_hint(program, name))


@once
def _inputs(program: Program) -> tuple[frozenset[str], frozenset[str]]:
    """Names of tensors, and of scalars."""
    return frozenset(tensor.name for tensor in program.tensors), frozenset(program.scalars)


def _check_inputs(program: Program, shapes: Collection[str], scalars: Mapping[str, Any]) -> None:
    tensors = [tensor.name for tensor in program.tensors]
    extra = [name for name in (*shapes, *scalars) if name not in tensors and name not in program.scalars]
    for name in program.scalars:
        if name in shapes:
            raise _name_error(program, name, f"{name!r} is a scalar, a tensor is given", "pass a number")
        if name not in scalars:
            guess = closest(name, extra)
            if guess is not None:
                hint = f"expected a tensor, an earlier definition or a scalar; did you mean {guess!r}?"
                raise _name_error(program, name, f"unknown name {name!r}", hint)
            raise _name_error(program, name, f"scalar {name!r} is not given", f"pass {name}=...")
    for name in tensors:
        if name in scalars:
            raise _name_error(program, name, f"{name!r} is a tensor, a number is given", "pass a tensor")
        if name not in shapes:
            guess = did_you_mean(name, extra)
            raise _name_error(program, name, f"tensor {name!r} is not given", guess or f"pass {name}=...")
    for name in extra:
        known = (*tensors, *program.scalars)
        hint = did_you_mean(name, known) or ("inputs: " + " ".join(known) if known else "it has no inputs")
        raise BindError(f"the program has no input {name!r}", hint=hint)


def _integer_hint(program: Program, name: str) -> str:
    use = reason(program, name)
    if use is None:
        return "it is declared to be one"
    hint = f"it is {use.role}: {show(use.where)}"
    return hint if use.role == "used in an index" else f"{hint}; if it is none, declare it: {name}: f32"


def _name_error(program: Program, name: str, message: str, hint: str) -> BindError:
    return BindError(message, source=program.source, span=locate(program.source, name), hint=hint)


def check_ranks(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for tensor in program.tensors:
        shape = shapes[tensor.name]
        if len(shape) != tensor.rank:
            axes = ", ".join(axis or "..." for axis in tensor.axes)
            dimensions = f"{tensor.rank} dimension{'s' * (tensor.rank != 1)}"
            message = f"{tensor.name!r} has {dimensions}, the tensor given has shape {tuple(shape)}"
            raise _name_error(program, tensor.name, message, f"the program reads {tensor.name}[{axes}]")


def _extents(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The extents that the program declares, and those of dimensions of tensors."""
    found = dict(program.lengths)
    for axis, name, dimension in places(program):
        size = shapes[name][dimension]
        known = found.setdefault(axis, size)
        if known != size:
            first = next(extent for each, extent in _given(program, shapes) if each == axis)
            message = (
                f"axis {axis!r} has size {known} in {first} and {size} in {Extent(size, name, dimension)}"
            )
            hint = "pass tensors whose sizes agree, or name the axes differently"
            raise _name_error(program, name, message, hint)
    return found


def _given(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Extent]]:
    """What gives axes their sizes: declarations, then dimensions."""
    yield from ((axis, Extent(size, PROGRAM)) for axis, size in program.lengths.items())
    yield from sources(program, shapes)


def sources(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Extent]]:
    for axis, name, dimension in places(program):
        yield axis, Extent(shapes[name][dimension], name, dimension)


@once
def places(program: Program) -> tuple[tuple[str, str, int], ...]:
    """Dimensions of tensors that give an axis its size: axis, tensor, dimension."""
    return tuple(dict.fromkeys(_each_place(program)))


def _each_place(program: Program) -> Iterator[tuple[str, str, int]]:
    for tensor in program.tensors:
        for dimension, axis in enumerate(tensor.axes):
            if axis is not None:
                base = program.domains.get(axis, axis)
                yield base, tensor.name, dimension
    longer = longer_dimensions(program)
    for node in walk(*(output.expr for output in program.outputs)):
        if isinstance(node, Load) and node.tensor not in program.states:
            for dimension, index in enumerate(node.index):
                if isinstance(index, Axis):
                    base = program.domains.get(index.name, index.name)
                    if base not in longer.get((node.tensor, dimension), ()):
                        yield base, node.tensor, dimension


def _add_sizes(
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    found: dict[str, int],
) -> None:
    axes = {program.domains.get(axis, axis) for axis in (*_axes(program), *found)}
    for name, size in sizes.items():
        axis = program.domains.get(name, name)
        if axis not in axes:
            hint = did_you_mean(name, axes) or "axes: " + " ".join(sorted(axes))
            raise BindError(f"the program has no axis {name!r}", hint=hint)
        if not hasattr(size, "__index__") or not 0 <= size <= LONGEST:
            hint = "a size is an integer, 0 or more, at most 2**48"
            raise BindError(f"the size of axis {name!r} is {size!r:.40}", hint=hint)
        known = found.setdefault(axis, int(size))
        if known != size:
            first = next(
                (extent for each, extent in _given(program, shapes) if each == axis), Extent(known, None)
            )
            message = f"axis {axis!r} has size {known} in {first} and {size} in sizes"
            raise BindError(message, hint=f"leave {name!r} out of sizes")
