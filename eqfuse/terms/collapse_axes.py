"""Adjacent axes as one: `h` and `w` of `x[n, c, h, w]` as `h_w`, where everything reads, reduces and writes both together.

    mean[h, w](x[c, h, w])  ->  mean[h_w](x[c, h_w])

It is done to the source, before anything is derived of it: a merge is over one axis, so that a variance over both takes one
pass only where they are one; and what kernels store for each other may have one of the axes and not the other. Tensors are
given as views with the dimensions collapsed, which a contiguous tensor has; for others the program runs as it is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from eqfuse.errors import EqfuseError
from eqfuse.terms.extents import sizes_in
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

LONGEST = 2**30
"""Positions of a collapsed axis at most: those of longer ones, and sums with them, have no room in 32 bits."""

Groups = tuple[int, ...]
"""How many dimensions each dimension of a tensor was made of, in their order."""


@dataclass(frozen=True)
class CollapsedAxes:
    """A `program` that says the same as `source` of tensors with some dimensions collapsed. `axes` are the collapsed axes, each with
    those that it was made of, outermost first; `groups` are of the tensors and the outputs."""

    source: Program
    program: Program
    axes: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, Groups]

    def __str__(self) -> str:
        return ", ".join(f"{' and '.join(parts)} as {name}" for name, parts in self.axes.items())

    def extents(self, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents of the axes of the program, from those of the source's."""
        gone = {part for parts in self.axes.values() for part in parts}
        found = {axis: extent for axis, extent in extents.items() if axis not in gone}
        return found | {
            name: math.prod(extents[p] for p in parts)
            for name, parts in self.axes.items()
            if all(p in extents for p in parts)
        }

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
        """The shape of a tensor's view, from its own; what stands before the tensor's dimensions is kept."""
        groups = self.groups[name]
        at = len(shape) - sum(groups)
        found = list(shape[:at])
        for count in groups:
            found.append(math.prod(shape[at : at + count]))
            at += count
        return tuple(found)

    def views(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """The tensors with their dimensions collapsed; None where one has no such view, or a collapsed one is too long for positions
        of 32 bits."""
        found = {}
        for name, tensor in tensors.items():
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

    def shapes(self, extents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs of the source."""
        return {o.name: tuple(extents[axis] for axis in o.axes) for o in self.source.outputs}


@once
def collapse_axes(program: Program) -> CollapsedAxes | None:
    """The program with adjacent axes collapsed wherever vectors get longer by it: where the inner one is the last of some tensor.
    None where there are none."""
    found, axes, groups = program, dict[str, tuple[str, ...]](), _groups(program)
    while (pair := next(_pairs(found), None)) is not None:
        name = _fresh("_".join(pair), found)
        found, groups = _with(found, pair, name, groups)
        axes[name] = tuple(part for axis in pair for part in axes.pop(axis, (axis,)))
    if found is program:
        return None
    try:
        check_written_size(found)
    except EqfuseError:
        return None
    return CollapsedAxes(program, found, axes, groups)


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


def _of_sizes(program: Program) -> set[str]:
    """The axes whose extents are computed, and those whose sizes they are made of."""
    return {*program.computed, *sizes_in(program.computed.values())}


def _nodes(program: Program) -> Iterator[Expr]:
    return walk(*(o.expr for o in program.outputs), *(side for pair in program.at_most for side in pair))


def _pairs(program: Program) -> Iterator[tuple[str, str]]:
    """Pairs of axes that may be collapsed, each alone."""
    places: list[tuple[str | None, ...]] = [tuple(o.axes) for o in program.outputs]
    loads = [node for node in _nodes(program) if isinstance(node, Load)]
    places += [tuple(at.name if isinstance(at, Axis) else None for at in load.index) for load in loads]
    for first in sorted({place[k : k + 2] for place in places for k in range(len(place) - 1)}, key=str):
        outer, inner = first
        if outer is None or inner is None or outer == inner:
            continue
        if any(inner == place[-1] for place in places if place) and _is_collapsible(
            program, outer, inner, places, loads
        ):
            yield outer, inner


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
    if (
        both & {*program.domains, *program.domains.values(), *_of_sizes(program)}
        or len(both & program.lengths.keys()) == 1
    ):
        return False
    for place in places:
        at = [k for k, axis in enumerate(place) if axis in both]
        if at and (len(at) != 2 or tuple(place[at[0] : at[0] + 2]) != (outer, inner)):
            return False
    used = [load for load in loads if {at.name for at in load.index if isinstance(at, Axis)} & both]
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
