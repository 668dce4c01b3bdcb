"""Reductions over the positions that a key selects, as reductions over segments of sorted positions.

    y[v, d] = sum[t](where(key[t] == v, x[t, d], 0))
 -> y[v, d] = sum[s](where((ends[v] <= s) & (s < ends[v+1]), x[order[s], d], 0))

`order` are the positions of the key in the order of its integers, equal ones as they stand, and `ends[v]` counts those below `v`. Two
things make both the same: a reduction whose combination is commutative does not depend on the order in which its positions are visited, and
`key[order[s]] == v` holds from `ends[v]` to `ends[v+1]` and nowhere else. Segments are ranges, which loops are cut by
(docs/ranges.md), so that all of them together visit each position once.

It is done to the source, as axes are collapsed (terms/collapse_axes.py); `order` and `ends` are made at each call, by torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from eqfuse.errors import EqfuseError
from eqfuse.names import Names
from eqfuse.terms.dtypes import INTEGERS
from eqfuse.terms.extents import program_of, sizes_in
from eqfuse.terms.folds import fold_of
from eqfuse.terms.inline import check_written_size
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Program,
    Reduce,
    Size,
    Tensor,
    call,
    children,
    free_axes,
    once,
    post_order,
    rebuild,
    substitute_axes,
    walk,
)
from eqfuse.terms.parser import axes_of, sized_axes
from eqfuse.terms.promises import ascending

LONGEST = 2**31
"""Positions that are sorted together, and segments, are fewer than this."""


@dataclass(frozen=True)
class Sort:
    """Positions of `axes`, the outermost first, in the order of the integers `key[dims]`, for every position of `rows`. They are
    those of one axis, `position`; the tensors `order` have, for each of them, a position of each of `axes`; one that is not read has no
    name. A position of `group` is the
    value of the key in one segment, which `ends` tells."""

    key: str
    dims: tuple[str, ...]
    rows: tuple[str, ...]
    axes: tuple[str, ...]
    group: str
    position: str
    order: tuple[str, ...]
    ends: str

    def __str__(self) -> str:
        rows = f" for each {', '.join(self.rows)}" if self.rows else ""
        return f"{' and '.join(self.axes)} by {self.key}[{', '.join(self.dims)}]{rows} as {self.position}"

    def _turned(self, rank: int) -> tuple[int, ...]:
        """The dimensions of the key: what stands before its own, rows, axes."""
        before = rank - len(self.dims)
        return (*range(before), *(before + self.dims.index(axis) for axis in (*self.rows, *self.axes)))

    def made(self, key: torch.Tensor, extents: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The tensors of a call."""
        groups, rows = extents[self.group], len(self.rows)
        key = key.permute(self._turned(key.ndim))
        repeated = key.shape[:rows]
        for dim in range(rows):
            if not key.stride(dim):  # an expanded row is sorted once
                key = key[(slice(None),) * dim + (slice(1),)]
        # What is in no segment comes first, or last; fewer bits are sorted sooner.
        narrow = torch.int16 if groups < 2**15 else torch.int32
        if torch.iinfo(key.dtype).bits < torch.iinfo(narrow).bits:
            key = key.to(narrow)
        key = key.flatten(rows).clamp(-1, groups).to(narrow).contiguous()
        ordered, order = key.sort(dim=-1, stable=True)
        numbers = torch.arange(groups + 1, dtype=narrow, device=key.device)
        ends = torch.searchsorted(
            ordered, numbers.expand(*ordered.shape[:-1], -1).contiguous(), out_int32=True
        ).expand(*repeated, -1)
        order = order.expand(*repeated, -1)
        found = {self.ends: ends}
        for name, axis in zip(reversed(self.order), reversed(self.axes), strict=True):
            is_outermost = axis == self.axes[0]
            if name:
                found[name] = order if is_outermost else order % extents[axis]
            order = order if is_outermost else order // extents[axis]
        return found

    def sampled(self, key: Any, extents: Mapping[str, int]) -> dict[str, Any]:
        """The same arrays, for a key in one: what stands before its dimensions is kept."""
        groups = extents[self.group]
        key = np.asarray(key).transpose(self._turned(key.ndim))
        key = key.reshape(*key.shape[: key.ndim - len(self.axes)], -1).astype(np.int64).clip(-1, groups)
        order = np.argsort(key, axis=-1, kind="stable")
        ends = (key[..., None, :] < np.arange(groups + 1)[:, None]).sum(axis=-1)
        places = np.unravel_index(order, [extents[axis] for axis in self.axes])
        return {self.ends: ends} | {n: at for n, at in zip(self.order, places, strict=True) if n}


@dataclass(frozen=True)
class Segments:
    """A `program` that says the same as `source`, of positions that are sorted. `unread` are tensors that it does not take, `sizes` the
    integers that are sizes of axes it does not have."""

    source: Program
    program: Program
    sorts: tuple[Sort, ...]
    unread: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(map(str, self.sorts))

    @property
    def passes(self) -> tuple[str, ...]:
        """What a certificate lists."""
        return (f"sorted positions ({self})",)

    def extents(self, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents of the axes of the program, from those of the source's."""
        found = {axis: extent for axis, extent in extents.items() if axis not in self._gone}
        for sort in self.sorts:
            if all(axis in extents for axis in sort.axes):
                found[sort.position] = math.prod(extents[axis] for axis in sort.axes)
        return found

    @property
    def _gone(self) -> frozenset[str]:
        """Axes that only the source has."""
        return frozenset(sized_axes(self.source)) - frozenset(sized_axes(self.program))

    def fits(self, extents: Mapping[str, int]) -> bool:
        """Whether positions and segments have room in 32 bits."""
        return all(
            max(math.prod(extents[axis] for axis in sort.axes), extents[sort.group] + 1) < LONGEST
            for sort in self.sorts
        )

    def positions(self, extents: Mapping[str, int]) -> int:
        """How many positions are sorted at a call."""
        return sum(math.prod(extents[axis] for axis in (*s.rows, *s.axes)) for s in self.sorts)

    def taken(self, values: Mapping[str, Any], extents: Mapping[str, int]) -> dict[str, Any]:
        """What the program takes in a call: the tensors and numbers that the source does, by name, and what is made of them."""
        found = {name: value for name, value in values.items() if name not in self.unread}
        for sort in self.sorts:
            found |= sort.made(values[sort.key], extents)
        return found | {name: extents[axis] for name, axis in self.sizes.items()}

    def sampled(
        self, tensors: Mapping[str, Any], scalars: Mapping[str, Any], extents: Mapping[str, int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same for arrays, tensors and numbers apart."""
        found = {name: value for name, value in tensors.items() if name not in self.unread}
        for sort in self.sorts:
            found |= sort.sampled(tensors[sort.key], extents)
        return found, {**scalars, **{name: extents[axis] for name, axis in self.sizes.items()}}


@once
def segments(program: Program) -> Segments | None:
    """The program with every reduction over the positions that a key selects as one over sorted positions; the key is an element of
    a tensor of integers, at positions of axes, and not sorted already. None where it has no such reduction."""
    sorting = _Sorting(program)
    outputs = [replace(output, expr=sorting.visit(output.expr)) for output in program.outputs]
    if not sorting.sorts:
        return None
    nodes = list(walk(*(output.expr for output in outputs)))
    read = {node.tensor for node in nodes if isinstance(node, Load)}
    sorts, added, promises = list[Sort](), list[Tensor](), list(program.at_most)
    for found in sorting.sorts.values():
        sort = replace(found, order=tuple(name if name in read else "" for name in found.order))
        sorts.append(sort)
        rows = tuple(map(Axis, sort.rows))
        added += [
            Tensor(name, len(rows) + 1, "i64", (*sort.rows, sort.position)) for name in sort.order if name
        ]
        added.append(Tensor(sort.ends, len(rows) + 1, "i32", (*sort.rows, sorting.names.fresh("end"))))
        at = Axis(sort.group)
        promises.append((Load(sort.ends, (*rows, at)), Load(sort.ends, (*rows, call("add", at, Const(1))))))
    declared = [*added, *(tensor for tensor in program.tensors if tensor.dtype and tensor.name in read)]
    left = {axis for output in outputs for axis in output.axes}
    left |= {axis for tensor in declared for axis in tensor.axes if axis is not None}
    left |= {node.name for node in nodes if isinstance(node, Axis)}
    left |= {node.axis for node in nodes if isinstance(node, Reduce)}
    tensors = tuple(
        tensor if tensor.dtype else replace(tensor, axes=tuple(a if a in left else None for a in tensor.axes))
        for tensor in program.tensors
    )
    sizes = {axis: sorting.names.fresh(f"size_{axis}") for axis in axes_of(outputs) if axis not in left}
    if not sizes.keys().isdisjoint((*program.computed, *sizes_in(program.computed.values()))):
        return None
    domains = {**program.domains, **sorting.domains}
    changed = replace(program, tensors=tensors, domains=domains, at_most=tuple(promises))
    made = program_of(changed, outputs, added, sizes)
    try:
        check_written_size(made)
    except EqfuseError:
        return None
    unread = {tensor.name for tensor in program.tensors} - {tensor.name for tensor in made.tensors}
    of = {sizes[axis]: axis for axis in sizes if sizes[axis] in made.scalars}
    return Segments(program, made, tuple(sorts), tuple(sorted(unread)), of)


class _Sorting:
    """Rewrites expressions of a program. `sorts` are those that were needed, `domains` the copies of their positions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sorts: dict[tuple[object, ...], Sort] = {}
        self.domains: dict[str, str] = {}
        taken = (t.name for t in program.tensors), (output.name for output in program.outputs)
        self.names = Names(chain(*taken, program.scalars, axes_of(program.outputs), program.domains))
        declared = (tensor.name for tensor in program.tensors if tensor.dtype in INTEGERS)
        self._keys = {*declared, *program.integer_tensors}
        self._known: dict[Expr, Expr] = {}
        self._positions: dict[tuple[str, tuple[str, ...]], str] = {}

    def visit(self, node: Expr) -> Expr:
        """An expression, with its reductions over sorted positions."""
        if node not in self._known:
            sorted_ = self._sorted(node) if isinstance(node, Reduce) else None
            if sorted_ is not None:
                self._known[node] = self.visit(sorted_)
            else:
                self._known[node] = rebuild(node, tuple(map(self.visit, children(node))))
        return self._known[node]

    def _sorted(self, node: Reduce) -> Expr | None:
        """A reduction over sorted positions; None where nothing says in which order."""
        fold = fold_of(node.op)
        if fold is not None and (not fold[0].commutative or fold[0].ranks):
            return None
        axes, body = [node.axis], node.body
        while isinstance(body, Reduce) and body.op == node.op and fold is None:
            axes.append(body.axis)
            body = body.body
        for condition in _outside(body, axes):
            for key, group in _comparisons(condition):
                if key.tensor in self._keys and self._selects(node, axes, key, group):
                    return self._over(node, axes, body, condition, key, group)
        return None

    def _selects(self, node: Reduce, axes: Sequence[str], key: Load, group: Axis) -> bool:
        """Whether the key sorts some of the axes, for each position of others, and its value is a position of one more."""
        names = [at.name for at in key.index if isinstance(at, Axis)]
        bases = [self._base(name) for name in names]
        return (
            len(names) == len(key.index) == len(set(bases))
            and not free_axes(key).isdisjoint(axes)
            and free_axes(key) - set(axes) <= free_axes(node)
            and group.name in free_axes(node)
            and group.name not in names
            and not any(
                key.tensor == tensor and names[dim] in axes for tensor, dim in ascending(self.program)
            )
        )

    def _over(
        self, node: Reduce, axes: Sequence[str], body: Expr, condition: Expr, key: Load, group: Axis
    ) -> Expr:
        names = [at.name for at in key.index if isinstance(at, Axis)]
        walked = tuple(axis for axis in axes if axis in names)
        rows = tuple(name for name in names if name not in walked)
        sort = self._sort(key.tensor, names, rows, walked, group.name)
        index = tuple(map(Axis, rows))
        at = Axis(self._position(sort, walked))
        first, after = (
            Load(sort.ends, (*index, group)),
            Load(sort.ends, (*index, call("add", group, Const(1)))),
        )
        inside = call("and", call("le", first, at), call("lt", at, after))
        orders = {axis: Load(name, (*index, at)) for axis, name in zip(walked, sort.order, strict=True)}
        size: dict[Expr, Expr] = {Size(walked[0]): Size(at.name)} if len(walked) == 1 else {}
        made = substitute_axes(_replaced_outside(body, walked, {condition: inside, **size}), orders)
        for axis in reversed([at.name, *(axis for axis in axes if axis not in walked)]):
            made = Reduce(node.op, axis, made)
        return made

    def _sort(
        self, key: str, dims: Sequence[str], rows: tuple[str, ...], axes: tuple[str, ...], group: str
    ) -> Sort:
        dims, rows, axes = (tuple(map(self._base, part)) for part in (dims, rows, axes))
        group = self._base(group)
        found = key, dims, rows, axes, group
        if found not in self.sorts:
            position = self.names.fresh(f"{'_'.join(axes)}_sorted")
            several = [f"_{axis}" if len(axes) > 1 else "" for axis in axes]
            order = tuple(self.names.fresh(f"{key}_order{axis}") for axis in several)
            ends = self.names.fresh(f"{key}_ends")
            self.sorts[found] = Sort(key, dims, rows, axes, group, position, order, ends)
        return self.sorts[found]

    def _position(self, sort: Sort, axes: tuple[str, ...]) -> str:
        """The axis of the sorted positions of these axes: copies of an axis have copies of it."""
        if axes == sort.axes:
            return sort.position
        known = sort.position, axes
        if known not in self._positions:
            self._positions[known] = name = self.names.fresh(f"{'_'.join(axes)}_sorted")
            self.domains[name] = sort.position
        return self._positions[known]

    def _base(self, axis: str) -> str:
        return self.program.domains.get(axis, axis)


def _outside(expr: Expr, axes: Collection[str]) -> Iterator[Expr]:
    """The subexpressions that are not inside of reductions over one of the axes, whose positions are others there."""
    return post_order(
        [expr], lambda node: () if isinstance(node, Reduce) and node.axis in axes else children(node)
    )


def _replaced_outside(expr: Expr, axes: Collection[str], values: Mapping[Expr, Expr]) -> Expr:
    """`expr` with subexpressions replaced that are `_outside`."""
    memo: dict[Expr, Expr] = {}
    for node in _outside(expr, axes):
        if node in values:
            memo[node] = values[node]
        elif isinstance(node, Reduce) and node.axis in axes:
            memo[node] = node
        else:
            memo[node] = rebuild(node, tuple(memo[part] for part in children(node)))
    return memo[expr]


def _comparisons(condition: Expr) -> Iterator[tuple[Load, Axis]]:
    """The key and the position that a condition takes to be equal."""
    match condition:
        case Call("eq", (Load() as key, Axis() as group)) | Call("eq", (Axis() as group, Load() as key)):
            yield key, group
