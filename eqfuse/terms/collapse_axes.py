"""Programs of views: dimensions in the order in which they lie in memory, and adjacent axes as one where everything reads, reduces
and writes both together.

    mean[h, w](x[c, h, w])                     ->  mean[h_w](x[c, h_w])
    mean[h, w](x[c, h, w]), c nearest in x     ->  mean[h_w](x[h_w, c])

It is done to the source, before anything is derived of it: a merge is over one axis, so that a variance over both takes one
pass only where they are one; what kernels store for each other may have one of the axes and not the other; and blocks are
long along what a tensor is indexed with last. Tensors are given as views with dimensions in another order and collapsed, which
takes strides that allow it; for others the program runs as it is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from eqfuse.errors import EqfuseError
from eqfuse.terms.extents import sizes_in, with_domains
from eqfuse.terms.inline import check_written_size
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Axis,
    Call,
    Expr,
    Load,
    Output,
    Program,
    Reduce,
    Size,
    Tensor,
    children,
    once,
    transform,
    walk,
)
from eqfuse.terms.parser import spare_axes

LONGEST = 2**30
"""Positions of a collapsed axis at most: those of longer ones, and sums with them, have no room in 32 bits."""

Groups = tuple[int, ...]
"""How many dimensions each dimension of a tensor was made of, in their order."""


class Layout(NamedTuple):
    """How a tensor lies: its dimensions in the `order` of a view, the nearest last, and the `seams`: how many of these dimensions
    stand before each place where two neighbours do not collapse to one."""

    order: tuple[int, ...]
    seams: tuple[int, ...] = ()


Layouts = tuple[tuple[str, Layout], ...]
"""Of tensors by name; those that are not named have dimensions in order and no seams."""


@dataclass(frozen=True)
class CollapsedAxes:
    """A `program` that says the same as `source` of tensors with these `layouts`, dimensions in their order, and some of them
    collapsed. `axes` are the collapsed axes, each with those that it was made of, outermost first; `groups` are of the tensors,
    in this order, and the outputs."""

    source: Program
    program: Program
    axes: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, Groups]
    layouts: Layouts = ()

    def __str__(self) -> str:
        collapsed = [f"{' and '.join(parts)} as {name}" for name, parts in self.axes.items()]
        ordered = [
            f"{name} by dimensions {', '.join(map(str, o))}" for name, o in _orders(self.layouts).items()
        ]
        return ", ".join((*collapsed, *ordered))

    @property
    def passes(self) -> tuple[str, ...]:
        """What a certificate lists."""
        return (f"{'collapsed axes' if self.axes else 'views'} ({self})",)

    def order(self, name: str, rank: int) -> tuple[int, ...]:
        """The dimensions of a tensor's view in their order, where `rank` counts some before the tensor's own, which stay."""
        own = _orders(self.layouts).get(name, range(sum(self.groups[name])))
        before = rank - len(own)
        return (*range(before), *(before + dim for dim in own))

    def extents(self, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents of the axes of the program, from those of the source's."""
        gone = {part for parts in self.axes.values() for part in parts}
        found = {axis: extent for axis, extent in extents.items() if axis not in gone}
        found |= {
            name: math.prod(extents[p] for p in parts)
            for name, parts in self.axes.items()
            if all(p in extents for p in parts)
        }
        return with_domains(self.program, found)

    @property
    def few(self) -> dict[str, int]:
        """Extents of the collapsed axes of the source, so few that all of them together are walked in the smallest tiles; those
        that the program declares are left out."""
        several = (2, 3, 2)
        return {
            part: several[place % len(several)]
            for parts in self.axes.values()
            for place, part in enumerate(parts)
            if part not in self.source.lengths
        }

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor's view, from that of it with dimensions in order; what stands before the tensor's dimensions is
        kept."""
        groups = self.groups[name]
        at = len(shape) - sum(groups)
        found = list(shape[:at])
        for count in groups:
            found.append(math.prod(shape[at : at + count]))
            at += count
        return tuple(found)

    def views(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """The tensors with their dimensions in order and collapsed; None where one has no such view, or a collapsed one is too long
        for positions of 32 bits."""
        found, orders = {}, _orders(self.layouts)
        for name, tensor in tensors.items():
            if name in orders:
                tensor = tensor.permute(orders[name])
            if max(self.groups[name], default=1) > 1:
                shape = self.shape(name, tensor.shape)
                if max(shape) > LONGEST:
                    return None
                try:
                    tensor = tensor.view(shape)
                except RuntimeError:
                    return None
            found[name] = tensor
        return found


def _orders(layouts: Layouts) -> dict[str, tuple[int, ...]]:
    """The orders that are not those of the tensors."""
    return {name: lies.order for name, lies in layouts if lies.order != (*range(len(lies.order)),)}


@once
def collapse_axes(program: Program) -> CollapsedAxes | None:
    """The program with adjacent axes collapsed wherever tiles get longer by it (`_lengthens`). None where there are none."""
    return with_views(program, ())


def with_views(program: Program, layouts: Layouts) -> CollapsedAxes | None:
    """The same of tensors that lie so; None where that is the program itself."""
    orders = _orders(layouts)
    found = _ordered(program, orders) if orders else program
    axes, groups = dict[str, tuple[str, ...]](), _groups(program)
    seams = {name: lies.seams for name, lies in layouts}
    while (pair := next(_pairs(found, groups, seams), None)) is not None:
        name = _fresh("_".join(pair), found)
        found, groups = _with(found, pair, name, groups)
        axes[name] = tuple(part for axis in pair for part in axes.pop(axis, (axis,)))
    if found is program:
        return None
    try:
        check_written_size(found)
    except EqfuseError:
        return None
    return CollapsedAxes(program, found, axes, groups, layouts)


def layouts(program: Program, tensors: Mapping[str, torch.Tensor]) -> Layouts:
    """How tensors lie, of those whose dimensions do not all collapse to one or whose last dimension is not the nearest. A program
    with matrix products, whose tiles are long along both dimensions, takes dimensions in the order that they have."""
    keeps = _has_matrix_product(program)
    each = ((name, _layout(tensor, keeps)) for name, tensor in tensors.items() if tensor.ndim > 1)
    found = tuple((name, lies) for name, lies in each if lies is not None)
    if not _orders(found) and collapse_axes(program) is None:  # there is nothing that seams keep apart
        return ()
    return found


def _layout(tensor: torch.Tensor, keeps_order: bool) -> Layout | None:
    """How a tensor lies; None where its dimensions are in order and collapse to one. Dimensions along which nothing changes come
    first, where others are put in order."""
    extents, steps = tensor.shape, tensor.stride()
    order = tuple(range(tensor.ndim))
    if not keeps_order:
        long = [dim for dim in order if extents[dim] > 1]
        nearest_last = sorted(long, key=lambda dim: -(steps[dim] or math.inf))
        if long and steps[long[-1]] > steps[nearest_last[-1]] > 0:
            order = (*(dim for dim in order if dim not in long), *nearest_last)
    seams, length = list[int](), extents[order[-1]]
    for place in range(tensor.ndim - 1, 0, -1):
        outer, inner = order[place - 1], order[place]
        is_one = 1 in (extents[outer], extents[inner]) or steps[outer] == extents[inner] * steps[inner]
        length *= extents[outer]
        if not is_one or length > LONGEST:
            seams.append(place)
            length = extents[outer]
    if not seams and order == (*range(tensor.ndim),):
        return None
    return Layout(order, tuple(reversed(seams)))


@once
def _has_matrix_product(program: Program) -> bool:
    """Whether a reduction over an axis multiplies or compares tensors each of which has another axis that the other has not."""
    for node in _nodes(program):
        if isinstance(node, Reduce):
            read = [_plain_axes(load) for load in walk(node.body) if isinstance(load, Load)]
            over = [axes for axes in read if node.axis in axes]
            if any(one - other and other - one for one in over for other in over):
                return True
    return False


def _plain_axes(load: Load) -> set[str]:
    return {at.name for at in load.index if isinstance(at, Axis)}


def _ordered(program: Program, orders: Mapping[str, tuple[int, ...]]) -> Program:
    """The program of tensors with dimensions in other orders."""

    def step(node: Expr) -> Expr:
        if isinstance(node, Load) and node.tensor in orders:
            return Load(node.tensor, tuple(node.index[dim] for dim in orders[node.tensor]))
        return node

    def tensor_of(tensor: Tensor) -> Tensor:
        if tensor.name not in orders or not tensor.axes:
            return tensor
        return replace(tensor, axes=tuple(tensor.axes[dim] for dim in orders[tensor.name]))

    return replace(
        program,
        tensors=tuple(map(tensor_of, program.tensors)),
        outputs=tuple(replace(o, expr=transform(o.expr, step)) for o in program.outputs),
        at_most=tuple((transform(left, step), transform(right, step)) for left, right in program.at_most),
    )


def _groups(program: Program) -> dict[str, Groups]:
    ranks = {tensor.name: tensor.rank for tensor in program.tensors}
    ranks |= {output.name: len(output.axes) for output in program.outputs}
    return {name: (1,) * rank for name, rank in ranks.items()}


def _fresh(name: str, program: Program) -> str:
    taken = {*_axes(program), *program.scalars, *(t.name for t in program.tensors)}
    taken |= {output.name for output in program.outputs}
    while name in taken:
        name += "_"
    return name


def _axes(program: Program) -> set[str]:
    found = {axis for output in program.outputs for axis in output.axes}
    found |= {*program.lengths, *program.domains, *program.domains.values()}
    found |= _of_sizes(program)
    for node in _nodes(program):
        match node:
            case Axis(name) | Size(name) | Reduce(_, name, _):
                found.add(name)
    return found


def _of_one_extent(program: Program) -> set[str]:
    """The axes that are declared as long as another one, and those others."""
    spare = spare_axes(program)
    return {each for pair in program.domains.items() if pair[0] not in spare for each in pair}


def _of_sizes(program: Program) -> set[str]:
    """The axes whose extents are computed, and those whose sizes they are made of."""
    return {*program.computed, *sizes_in(program.computed.values())}


def _nodes(program: Program) -> Iterator[Expr]:
    return walk(*(o.expr for o in program.outputs), *(side for pair in program.at_most for side in pair))


def _pairs(
    program: Program, groups: Mapping[str, Groups], seams: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str]]:
    """Pairs of axes that may be collapsed, each alone."""
    places: list[tuple[str | None, ...]] = [tuple(o.axes) for o in program.outputs]
    loads = [node for node in _nodes(program) if isinstance(node, Load)]
    places += [tuple(at.name if isinstance(at, Axis) else None for at in load.index) for load in loads]
    reduced = {node.axis for node in _nodes(program) if isinstance(node, Reduce)}
    for first in sorted({place[k : k + 2] for place in places for k in range(len(place) - 1)}, key=str):
        outer, inner = first
        if outer is None or inner is None or outer == inner:
            continue
        if not _lengthens(outer, inner, places, reduced):
            continue
        if any(_is_on_seam(load, inner, groups, seams) for load in loads):
            continue
        if _is_collapsible(program, outer, inner, places, loads):
            yield outer, inner


def _is_on_seam(
    load: Load, inner: str, groups: Mapping[str, Groups], seams: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether an axis begins behind a place where the tensor does not collapse."""
    if load.tensor not in seams or Axis(inner) not in load.index:
        return False
    return sum(groups[load.tensor][: load.index.index(Axis(inner))]) in seams[load.tensor]


def _lengthens(
    outer: str, inner: str, places: Sequence[Sequence[str | None]], reduced: AbstractSet[str]
) -> bool:
    """Whether a tile is longer where both axes are one: along the vectors of a tensor whose last axis is the inner one, along
    what is reduced, and across the rows of what is reduced behind them."""
    if {outer, inner} <= reduced or any(place[-1] == inner for place in places if place):
        return True
    behind = [place[place.index(inner) + 1 :] for place in places if inner in place]
    return all(axis in reduced for rest in behind for axis in rest)


def _is_collapsible(
    program: Program,
    outer: str,
    inner: str,
    places: Sequence[Sequence[str | None]],
    loads: Sequence[Load],
) -> bool:
    """Whether both axes are always there together: next to each other where tensors are read and written, reduced by the same
    reduction, multiplied where they are sizes, and positions of neither are read."""
    both = {outer, inner}
    if both & _of_one_extent(program) or both & _of_sizes(program) or len(both & program.lengths.keys()) == 1:
        return False
    for place in places:
        at = [k for k, axis in enumerate(place) if axis in both]
        if at and (len(at) != 2 or tuple(place[at[0] : at[0] + 2]) != (outer, inner)):
            return False
    used = [load for load in loads if _plain_axes(load) & both]
    where = {(load.tensor, load.index.index(Axis(outer))) for load in used}
    tensors = {tensor for tensor, _ in where}
    if not used or len(where) != len(tensors) or any(n.tensor in tensors and n not in used for n in loads):
        return False
    declared = {t.name: t for t in program.tensors if t.dtype}
    if any(t in declared and declared[t].axes[k : k + 2] != (outer, inner) for t, k in where):
        return False
    return _only_together(program, outer, inner)


def _only_together(program: Program, outer: str, inner: str) -> bool:
    both = {outer, inner}
    roots = {output.expr for output in program.outputs}
    inside: set[Expr] = set()
    for node in _nodes(program):
        match node:
            case Reduce(op, axis, Reduce(again, other, _)) if {axis, other} == both:
                if op != again or op not in REDUCTIONS:
                    return False
                inside.add(node.body)
    for node in _nodes(program):
        match node:
            case Reduce(op, axis, body) if axis in both:
                taken = isinstance(body, Reduce) and {axis, body.axis} == both
                if taken == (node in inside):
                    return False
                if node in inside and node in roots:
                    return False
            case Load():
                parts = [part for at in node.index if not isinstance(at, Axis) for part in walk(at)]
                if any(isinstance(part, Axis) and part.name in both for part in parts):
                    return False
        if not isinstance(node, Load):
            for child in children(node):
                if isinstance(child, Axis) and child.name in both:
                    return False
                if child in inside and not (isinstance(node, Reduce) and node.axis in both):
                    return False
    left = walk(*(transform(root, _size_collapsed(outer, inner, "%")) for root in roots))
    return not any(isinstance(node, Size) and node.axis in both for node in left)


def _size_collapsed(outer: str, inner: str, name: str) -> Callable[[Expr], Expr]:
    """A step of `transform`: the product of both sizes, and of others, with that of the collapsed axis."""

    def step(node: Expr) -> Expr:
        if not (isinstance(node, Call) and node.fn == "mul"):
            return node
        factors = _factors(node)
        if Size(outer) not in factors or Size(inner) not in factors:
            return node
        factors.remove(Size(inner))
        factors[factors.index(Size(outer))] = Size(name)
        product = factors[0]
        for factor in factors[1:]:
            product = Call("mul", (product, factor))
        return product

    return step


def _factors(node: Expr) -> list[Expr]:
    """The factors of a product of sizes; others are one factor."""
    if isinstance(node, Call) and node.fn == "mul" and all(isinstance(n, Size | Call) for n in node.args):
        return [factor for arg in node.args for factor in _factors(arg)]
    return [node]


def _with(
    program: Program, pair: tuple[str, str], name: str, groups: Mapping[str, Groups]
) -> tuple[Program, dict[str, Groups]]:
    """The program with a pair of axes collapsed."""
    outer, inner = pair
    sized = _size_collapsed(outer, inner, name)
    found = dict(groups)

    def step(node: Expr) -> Expr:
        match node:
            case Reduce(op, axis, Reduce(_, other, body)) if {axis, other} == {outer, inner}:
                return Reduce(op, name, body)
            case Load(tensor, at) if Axis(outer) in at:
                k = at.index(Axis(outer))
                return Load(tensor, (*at[:k], Axis(name), *at[k + 2 :]))
        return sized(node)

    places = {output.name: output.axes.index(outer) for output in program.outputs if outer in output.axes}
    for node in _nodes(program):
        if isinstance(node, Load) and Axis(outer) in node.index:
            places[node.tensor] = node.index.index(Axis(outer))
    for of, k in places.items():
        mine = groups[of]
        found[of] = (*mine[:k], mine[k] + mine[k + 1], *mine[k + 2 :])

    def tensor_of(tensor: Tensor) -> Tensor:
        if tensor.name not in places:
            return tensor
        k = places[tensor.name]
        axes = (*tensor.axes[:k], name, *tensor.axes[k + 2 :]) if tensor.axes else ()
        return replace(tensor, rank=tensor.rank - 1, axes=axes)

    def output_of(output: Output) -> Output:
        axes = output.axes
        if output.name in places:
            k = places[output.name]
            axes = (*axes[:k], name, *axes[k + 2 :])
        return replace(output, axes=axes, expr=transform(output.expr, step))

    lengths = {axis: length for axis, length in program.lengths.items() if axis not in pair}
    if outer in program.lengths:
        lengths[name] = program.lengths[outer] * program.lengths[inner]
    tensors = tuple(map(tensor_of, program.tensors))
    promises = tuple((transform(left, step), transform(right, step)) for left, right in program.at_most)
    outputs = tuple(map(output_of, program.outputs))
    return replace(program, tensors=tensors, outputs=outputs, lengths=lengths, at_most=promises), found
