"""Definitions as the text of a program, with what has to be declared of tensors and axes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from eqfuse.arguments import DTYPE_NAMES
from eqfuse.operator.shapes import output_dtypes
from eqfuse.terms.extents import is_count, sizes_in
from eqfuse.terms.functions import CASTS, ROUNDINGS
from eqfuse.terms.nodes import Axis, Const, Expr, Load, Program, Reduce, Scalar, children, replaced, walk
from eqfuse.terms.nodes import Size as SizeOf
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.printer import show
from eqfuse.terms.sizes import sources
from eqfuse.torch.positions import Size as Extent
from eqfuse.torch.translate import Translation
from eqfuse.torch.values import Line, Value, Writer, axes_in, position


@dataclass(frozen=True)
class Text:
    """A program, and what its call needs: `tensors` are the `inputs` that have axes; `groups` are for each output how many axes each of its dimensions has; `sizes`
    are the extents of axes that no tensor gives, and `numbers` scalars that are extents."""

    source: str
    inputs: tuple[str, ...]
    tensors: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    sizes: Mapping[str, Extent]
    numbers: Mapping[str, Extent]


def text_of(translation: Translation, outputs: Sequence[Value], names: Sequence[str]) -> Text:
    """The text of a program that returns values, under these names."""
    writer = translation.writer
    lines = list(writer.lines)
    groups: list[tuple[int, ...]] = []
    for value, name in zip(outputs, names, strict=True):
        axes = writer.axes(value.shape, value.layout)
        expr = value.at([position(group) for group in axes])
        lines.append(Line((name,), (axes_in(axes),), expr))
        groups.append(tuple(map(len, axes)))
    lines = _needed(_renamed(lines, names), names)
    integers = _axes_of_integers(translation, lines)
    lines, dimensions = _sizes_of_dimensions(translation, lines, integers)
    known = {*dimensions, *(axis for axes in integers.values() for axis in axes)}
    lines, numbers = _sizes_as_scalars(translation, lines, known)
    lines, alike = _sizes_apart(translation.writer, lines)
    body = [_line(line) for line in lines]
    body.append(f"return {', '.join(names)}")
    declared = [f"{axis}: axis[{count}]" for axis, count in writer.ranks.items() if _has(lines, axis)]
    declared += _integers(translation, lines, integers)
    declared += [f"{name}: i64" for name in numbers]
    declared += [f"{axis}: axis[N({name}, {k})]" for axis, (name, k) in dimensions.items()]
    program = parse(
        "\n".join([*declared, *(f"{other}: axis[{axis}]" for axis, other in alike.items()), *body])
    )
    lengths, sizes = _axes(
        translation, program, [axis for line in lines for own in line.axes for axis in own]
    )
    declared += [f"{other}: axis[{lengths.get(axis, axis)}]" for axis, other in alike.items()]
    declared += [f"{axis}: axis[{length}]" for axis, length in lengths.items()]
    places = _dimensions(translation, program, sizes)
    declared += [f"{axis}: axis[N({name}, {k})]" for axis, (name, k) in places.items()]
    sizes = {axis: size for axis, size in sizes.items() if axis not in places}
    computed = _computed(translation, [*declared, *body], sizes)
    declared += [f"{axis}: axis[{show(count)}]" for axis, count in computed.items()]
    used = axes_of(program.outputs)
    sizes = {axis: size for axis, size in sizes.items() if axis not in computed and axis in used}
    declared += _dtypes(translation, program, outputs, names)
    source = "\n".join([*declared, *body])
    tensors = tuple(tensor.name for tensor in program.tensors)
    return Text(source, (*tensors, *program.scalars), tensors, tuple(groups), sizes, numbers)


def _line(line: Line) -> str:
    left = ", ".join(
        f"{n}[{', '.join(axes)}]" if axes else n for n, axes in zip(line.names, line.axes, strict=True)
    )
    return f"{left} = {_right(line)}"


def _right(line: Line) -> str:
    if line.several is None:
        assert line.expr is not None
        return show(line.expr)
    op, axes, args = line.several
    return f"{op}[{', '.join(axes)}]({', '.join(map(show, args))})"


def _exprs(line: Line) -> tuple[Expr, ...]:
    return (line.expr,) if line.expr is not None else line.several[2] if line.several else ()


def _renamed(lines: list[Line], names: Sequence[str]) -> list[Line]:
    """An output that only is another definition, which nothing else reads, takes its place."""
    for name in names:
        line = next(line for line in lines if line.names == (name,))
        if not isinstance(line.expr, Load | Scalar):
            continue
        of = line.expr.tensor if isinstance(line.expr, Load) else line.expr.name
        made = next((each for each in lines if each.names == (of,)), None)
        readers = [each for each in lines if each is not line and of in _reads(each)]
        if made is None or readers or of in names or made.several and made.axes != line.axes:
            continue
        if show(line.expr) != _line(made).partition(" = ")[0]:
            continue
        found = Line((name,), line.axes, made.expr, made.several)
        lines = [found if each is made else each for each in lines]
        lines = [each for each in lines if each is not line]
    return lines


def _reads(line: Line) -> set[str]:
    found = set()
    for node in walk(*_exprs(line)):
        if isinstance(node, Load):
            found.add(node.tensor)
        elif isinstance(node, Scalar):
            found.add(node.name)
    return found


def _needed(lines: list[Line], names: Sequence[str]) -> list[Line]:
    """The definitions that the outputs are made of."""
    wanted, kept = set(names), []
    for line in reversed(lines):
        if wanted.intersection(line.names):
            kept.append(line)
            wanted |= _reads(line)
    return kept[::-1]


def _bound(lines: Sequence[Line]) -> set[str]:
    """The axes that definitions have."""
    axes = {axis for line in lines for own in line.axes for axis in own}
    axes |= {axis for line in lines if line.several for axis in line.several[1]}
    return axes | {node.axis for line in lines for node in walk(*_exprs(line)) if isinstance(node, Reduce)}


def _sizes_of_dimensions(
    translation: Translation, lines: list[Line], integers: Mapping[str, Sequence[str]]
) -> tuple[list[Line], dict[str, tuple[str, int]]]:
    """The definitions with their numbers made of extents that tensors give; and axes that no definition has, with the dimensions
    that they are as long as. `integers` are the axes that inputs of integers are declared with."""
    writer, axes, read = translation.writer, _bound(lines), set().union(*map(_reads, lines))
    sizes = writer.names.sizes
    missing = {
        node.axis
        for line in lines
        for node in walk(*_exprs(line))
        if isinstance(node, SizeOf) and node.axis not in axes
    }
    plain = Writer(())
    for axis in sorted(axes):
        if _is_symbol(sizes[axis]):
            plain.symbols.setdefault(sizes[axis], axis)
    found: dict[str, tuple[str, int]] = {}
    for name, shape in translation.shapes.items():
        for dimension, size in enumerate(shape):
            if name not in read or not _is_symbol(size) or size in plain.symbols:
                continue
            if name in integers:
                plain.symbols[size] = integers[name][dimension]
            elif translation.dtypes[name].is_floating_point:
                axis = writer.symbols.get(size) or writer.names.axis(size)
                found[axis], plain.symbols[size] = (name, dimension), axis
    values: dict[Expr, Expr] = {}
    for axis in missing:
        if not isinstance(sizes[axis], int) and sizes[axis].free_symbols <= plain.symbols.keys():
            with suppress(NotImplementedError):
                values[SizeOf(axis)] = plain.size_text(sizes[axis])
    used = sizes_in(values.values())
    lines = [_replaced(line, values) for line in lines]
    return lines, {axis: place for axis, place in found.items() if axis in used}


def _sizes_as_scalars(
    translation: Translation, lines: list[Line], dimensions: Collection[str]
) -> tuple[list[Line], dict[str, Extent]]:
    """The definitions with a scalar for each number that is made of the extents of axes that no definition and no dimension has,
    and these numbers."""
    writer = translation.writer
    axes = _bound(lines) | set(dimensions)
    missing = {
        node.axis
        for line in lines
        for node in walk(*_exprs(line))
        if isinstance(node, SizeOf) and node.axis not in axes
    }
    numbers: dict[str, Extent] = {}
    values: dict[Expr, Expr] = {}
    for axis in sorted(missing):
        size = writer.names.sizes[axis]
        known = next((other for other in sorted(axes) if writer.names.sizes.get(other) == size), None)
        if known is not None:
            values[SizeOf(axis)] = SizeOf(known)
    unknown = frozenset(SizeOf(axis) for axis in missing) - values.keys()
    scalars: dict[Extent, Scalar] = {}
    for number in dict.fromkeys(each for line in lines for each in _numbers(writer, unknown, *_exprs(line))):
        size = writer.extents[number]
        if size not in scalars:
            name = writer.names.definition("size")
            scalars[size], numbers[name] = Scalar(name), size
        values[number] = scalars[size]
    if not values:
        return lines, numbers
    return [_replaced(line, values) for line in lines], numbers


def _sizes_apart(writer: Writer, lines: list[Line]) -> tuple[list[Line], dict[str, str]]:
    """The definitions with another axis for each whose extent one reads of its own, and these axes: where a definition is
    read at computed positions, its own axis is none any more."""
    made = {name for line in lines for name in line.names}
    loads = (node for line in lines for node in walk(*_exprs(line)) if isinstance(node, Load))
    if not any(load.tensor in made and not all(isinstance(i, Axis) for i in load.index) for load in loads):
        return lines, {}
    alike: dict[str, str] = {}
    found = []
    for line in lines:
        own = {axis for axes in line.axes for axis in axes}
        read = {node.axis for node in walk(*_exprs(line)) if isinstance(node, SizeOf) and node.axis in own}
        for axis in sorted(read - alike.keys()):
            alike[axis] = writer.names.axis(writer.names.sizes[axis], list(writer.names.sizes))
        found.append(_replaced(line, {SizeOf(axis): SizeOf(alike[axis]) for axis in read}))
    return found, alike


def _replaced(line: Line, values: Mapping[Expr, Expr]) -> Line:
    expr = None if line.expr is None else replaced(line.expr, values)
    several = line.several
    if several is not None:
        several = several[0], several[1], tuple(replaced(arg, values) for arg in several[2])
    return Line(line.names, line.axes, expr, several)


def _numbers(writer: Writer, unknown: AbstractSet[Expr], *exprs: Expr) -> Iterator[Expr]:
    """The largest parts of terms that are numbers made of extents, some of them unknown."""
    for expr in exprs:
        if expr in writer.extents and not unknown.isdisjoint(walk(expr)):
            yield expr
        else:
            yield from _numbers(writer, unknown, *children(expr))


def _has(lines: Sequence[Line], axis: str) -> bool:
    return any(axis in axes for line in lines for axes in line.axes)


def _holds_integers(translation: Translation, name: str) -> bool:
    dtype = translation.dtypes[name]
    return not dtype.is_floating_point and dtype in DTYPE_NAMES


def _axes_of_integers(translation: Translation, lines: Sequence[Line]) -> dict[str, tuple[str, ...]]:
    """The axes that inputs of integers or truth values are declared with: those without a dimension of one position."""
    read = set().union(*map(_reads, lines))
    found: dict[str, tuple[str, ...]] = {}
    for name, shape in translation.shapes.items():
        if name in read and shape and 1 not in shape and _holds_integers(translation, name):
            used: list[str] = []
            for size in shape:
                used.append(translation.writer.names.axis(size, used))
            found[name] = tuple(used)
    return found


def _integers(
    translation: Translation, lines: Sequence[Line], axes: Mapping[str, Sequence[str]]
) -> list[str]:
    """Declarations of the inputs that hold integers or truth values."""
    read = set().union(*map(_reads, lines))
    found = []
    for name, shape in translation.shapes.items():
        dtype = translation.dtypes[name]
        if name in axes:
            found.append(f"{name}: {DTYPE_NAMES[dtype]}[{', '.join(axes[name])}]")
        elif name in read and not shape and _holds_integers(translation, name):
            found.append(f"{name}: {'i32' if dtype == torch.bool else DTYPE_NAMES[dtype]}")
    return found


def _axes(
    translation: Translation, program: Program, defined: Sequence[str]
) -> tuple[dict[str, str], dict[str, Extent]]:
    """The axes whose extent no tensor gives, with the number or the axis that gives it; and the extents of those that are no number and no dimension.
    One that definitions alone have, which are read at numbers, is an axis of the gradient."""
    extents = translation.writer.names.sizes
    given = _given(translation, program)
    same = translation.writer.same
    known = {same(size): axis for axis, size in given.items()}
    found: dict[str, str] = {}
    left: dict[str, Extent] = {}
    listed = _listed(program, extents)
    axes = dict.fromkeys(program.domains.get(axis, axis) for axis in axes_of(program.outputs))
    for axis in dict.fromkeys((*axes, *defined)):
        if axis in program.lengths or axis in given and axis not in listed:
            continue
        size = extents[axis]
        if isinstance(size, int):
            found[axis] = str(size)
        elif same(size) in known:
            found[axis] = known[same(size)]
        else:
            left[axis] = same(size)
            known[same(size)] = axis
    beside = _beside(program, left)
    found |= {
        axis: str(extents[axis])
        for axis in given
        if axis in (beside | translation.writer.prefixes) - listed and isinstance(extents[axis], int)
    }
    return found, left


def _beside(program: Program, made: Collection[str]) -> set[str]:
    """The axes that stand in an index beside one of `made`, whose extent is made for theirs: of windows of 3 positions there are
    `N(x) - 2`."""
    found: set[str] = set()
    for load in walk(*(output.expr for output in program.outputs)):
        for index in load.index if isinstance(load, Load) else ():
            axes = {node.name for node in walk(index) if isinstance(node, Axis)}
            found |= axes if axes.intersection(made) else set()
    return found


def _given(translation: Translation, program: Program) -> dict[str, Extent]:
    """The extents of axes that tensors give."""
    names = {tensor.name for tensor in program.tensors}
    shapes: Any = {name: shape for name, shape in translation.shapes.items() if name in names}
    return {axis: extent.size for axis, extent in sources(program, shapes)}


def _dimensions(
    translation: Translation, program: Program, wanted: Mapping[str, Extent]
) -> dict[str, tuple[str, int]]:
    """The dimensions of tensors that axes have the extents of, though none is read along them. One that is read at a number
    holds so many positions, which conditions on the axis, as `where(n == 4, x[4], …)`, would leave open."""
    reads = [node for node in walk(*(output.expr for output in program.outputs)) if isinstance(node, Load)]
    counted = {
        (load.tensor, k) for load in reads for k, index in enumerate(load.index) if isinstance(index, Const)
    }
    places: dict[Extent, tuple[str, int]] = {}
    for tensor in program.tensors:
        for dimension, size in enumerate(translation.shapes[tensor.name]):
            if tensor.axes[dimension] is None and (tensor.name, dimension) not in counted:
                places.setdefault(translation.writer.same(size), (tensor.name, dimension))
    return {axis: places[size] for axis, size in wanted.items() if size in places}


def _computed(
    translation: Translation, lines: Sequence[str], wanted: Mapping[str, Extent]
) -> dict[str, Expr]:
    """The extents of axes that are made of those of others, which tensors give."""
    sizes = translation.writer.names.sizes
    writer = Writer(())
    for axis, size in sizes.items():
        if axis not in wanted and _is_symbol(size):
            writer.symbols.setdefault(size, axis)
    found: dict[str, Expr] = {}
    for axis, size in wanted.items():
        if not _is_symbol(size) and size.free_symbols <= writer.symbols.keys():
            with suppress(NotImplementedError):
                found[axis] = writer.size_text(size)
    found = {axis: expr for axis, expr in found.items() if is_count(expr)}
    if not found:
        return {}
    program = parse("\n".join([*(f"{axis}: axis[{show(count)}]" for axis, count in found.items()), *lines]))
    given = _given(translation, program)
    return {axis: expr for axis, expr in found.items() if given.keys() >= sizes_in([expr])}


def _is_symbol(size: Extent) -> bool:
    return not isinstance(size, int) and bool(size.is_Symbol)


def _listed(program: Program, extents: Mapping[str, Extent]) -> set[str]:
    """The axes of a constant extent whose dimension is read at constant positions, which are inside for that extent."""
    reads = [node for node in walk(*(output.expr for output in program.outputs)) if isinstance(node, Load)]
    dimensions = {
        (load.tensor, k)
        for load in reads
        for k, index in enumerate(load.index)
        if isinstance(index, Const) and index.value
    }
    return {
        axis
        for tensor in program.tensors
        for k, axis in enumerate(tensor.axes)
        if axis is not None and (tensor.name, k) in dimensions and isinstance(extents.get(axis), int)
    }


def _dtypes(
    translation: Translation, program: Program, outputs: Sequence[Value], names: Sequence[str]
) -> list[str]:
    """Declarations of the outputs whose dtype would be another one."""
    read = {tensor.name for tensor in program.tensors}
    found = output_dtypes(program, {n: d for n, d in translation.dtypes.items() if n in read})
    declared = []
    for output, dtype, value, name in zip(program.returned, found, outputs, names, strict=True):
        own = DTYPE_NAMES.get(value.dtype)
        if own is not None and dtype != value.dtype and own in (*CASTS, *ROUNDINGS):
            axes = f"[{', '.join(output.axes)}]" if output.axes else ""
            declared.append(f"{name}: {own}{axes}")
    return declared
