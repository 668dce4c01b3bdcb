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
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from eqfuse.errors import EqfuseError
from eqfuse.names import Names
from eqfuse.terms.assume import conjuncts
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
    Scalar,
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
from eqfuse.terms.prefixes import alike
from eqfuse.terms.printer import show
from eqfuse.terms.promises import ascending

LONGEST = 2**31
"""Positions that are sorted together, and segments, are fewer than this."""


@dataclass(frozen=True)
class Sort:
    """Positions of `axes`, the outermost first, in the order of the integers `key`, for every position of `rows`. They are
    those of one axis, `position`; the tensors `order` have, for each of them, a position of each of `axes`; one that is not read has no
    name. A position of `group` is the value of the key in one segment, which `ends` tells."""

    key: Expr
    rows: tuple[str, ...]
    axes: tuple[str, ...]
    group: str
    position: str
    order: tuple[str, ...]
    ends: str

    def __str__(self) -> str:
        rows = f" for each {', '.join(self.rows)}" if self.rows else ""
        return f"{' and '.join(self.axes)} by {show(self.key)}{rows} as {self.position}"

    def made(self, values: Mapping[str, Any], extents: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The tensors of a call. What a key does not depend on, or a tensor is expanded along, is sorted once."""
        groups, rows, place = extents[self.group], len(self.rows), _place_of(self.key, values)

        def load(name: str) -> torch.Tensor:
            tensor: torch.Tensor = values[name]
            if tensor.dtype in (torch.int8, torch.uint8, torch.int16) and not isinstance(self.key, Load):
                tensor = tensor.to(torch.int32)  # what they are computed in
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            return tensor[tuple(slice(1) if n > 1 and step == 0 else slice(None) for n, step in steps)]

        def numbers(count: int) -> torch.Tensor:
            return torch.arange(count, dtype=torch.int32, device=place)

        key = _evaluated(self.key, (*self.rows, *self.axes), load, numbers, torch, values, extents)
        key = key.expand(*key.shape[:rows], *(extents[axis] for axis in self.axes)).flatten(rows)
        # What is in no segment comes first, or last; fewer bits are sorted sooner.
        narrow = torch.int16 if groups < 2**15 else torch.int32
        if torch.iinfo(key.dtype).bits < torch.iinfo(narrow).bits:
            key = key.to(narrow)
        ordered, order = key.clamp(-1, groups).to(narrow).contiguous().sort(dim=-1, stable=True)
        each = torch.arange(groups + 1, dtype=narrow, device=place)
        each = each.expand(*ordered.shape[:-1], -1).contiguous()
        repeated = [extents[axis] for axis in self.rows]
        found = {self.ends: torch.searchsorted(ordered, each, out_int32=True).expand(*repeated, -1)}
        order = order.expand(*repeated, -1)
        for name, axis in zip(reversed(self.order), reversed(self.axes), strict=True):
            is_outermost = axis == self.axes[0]
            if name:
                found[name] = order if is_outermost else order % extents[axis]
            order = order if is_outermost else order // extents[axis]
        return found

    def sampled(
        self, tensors: Mapping[str, Any], scalars: Mapping[str, Any], extents: Mapping[str, int]
    ) -> dict[str, Any]:
        """The same arrays, for those of trials: what stands before a tensor's dimensions is kept."""
        groups, dims = extents[self.group], (*self.rows, *self.axes)
        values = {**tensors, **scalars}
        key = np.asarray(_evaluated(self.key, dims, tensors.__getitem__, np.arange, np, values, extents))
        before = key.shape[: key.ndim - len(dims)]
        key = np.broadcast_to(key, (*before, *(extents[axis] for axis in dims)))
        key = key.reshape(*before, *(extents[axis] for axis in self.rows), -1).clip(-1, groups)
        order = np.argsort(key, axis=-1, kind="stable")
        ends = (key[..., None, :] < np.arange(groups + 1)[:, None]).sum(axis=-1)
        places = np.unravel_index(order, [extents[axis] for axis in self.axes])
        return {self.ends: ends} | {n: at for n, at in zip(self.order, places, strict=True) if n}


_KEYED: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
}
"""What keys are made with, beside choices; quotients by positive numbers alone."""


def _evaluated(
    key: Expr,
    dims: Sequence[str],
    load: Callable[[str], Any],
    numbers: Callable[[int], Any],
    library: Any,
    values: Mapping[str, Any],
    extents: Mapping[str, int],
) -> Any:
    """A key over these axes, as torch or numpy (`library`) computes it, of one position along axes that it does not depend on."""
    found: dict[Expr, Any] = {}
    for node in walk(key):
        match node:
            case Axis(name):
                at = numbers(extents[name])
                found[node] = at.reshape([-1 if axis == name else 1 for axis in dims])
            case Load(name, index):
                names = [at.name for at in index if isinstance(at, Axis)]
                taken = load(name)[
                    (..., *(at.value if isinstance(at, Const) else slice(None) for at in index))
                ]
                before = taken.ndim - len(names)
                order = (*range(before), *(before + names.index(axis) for axis in dims if axis in names))
                taken = taken.transpose(order) if library is np else taken.permute(order)
                shape = iter(taken.shape[before:])
                found[node] = taken.reshape(
                    (*taken.shape[:before], *(next(shape) if axis in names else 1 for axis in dims))
                )
            case Size(axis):
                found[node] = extents[axis]
            case Const(value):
                found[node] = value
            case Scalar(name):
                found[node] = values[name]
            case Call("where", (condition, left, right)):
                found[node] = library.where(found[condition], found[left], found[right])
            case Call(fn, args):
                found[node] = _KEYED[fn](*(found[arg] for arg in args))
    return found[key]


def _place_of(key: Expr, values: Mapping[str, Any]) -> torch.device:
    tensors: Iterator[torch.Tensor] = (values[node.tensor] for node in walk(key) if isinstance(node, Load))
    return next(tensors).device


def _is_key(expr: Expr, tensors: Collection[str], scalars: Collection[str]) -> bool:
    """Whether an expression is made of integers, and what `_evaluated` computes, and depends on data."""

    def is_made(node: Expr) -> bool:
        match node:
            case Axis() | Size():
                return True
            case Const(value):
                return type(value) is int
            case Scalar(name):
                return name in scalars
            case Load(name, index):
                names = [at.name for at in index if isinstance(at, Axis)]
                numbers = [
                    at for at in index if isinstance(at, Const) and type(at.value) is int and at.value >= 0
                ]
                return name in tensors and len(names) == len(set(names)) == len(index) - len(numbers)
            case Call("floordiv" | "mod", (_, Const(int(by)))):
                return by > 0
            case Call("floordiv" | "mod", (_, Size())):
                return True
            case Call("floordiv" | "mod"):
                return False
            case Call(fn):
                return fn in _KEYED or fn == "where"
        return False

    nodes = list(walk(expr))
    return all(map(is_made, nodes)) and any(isinstance(node, Load) for node in nodes)


@dataclass(frozen=True)
class Segments:
    """A `program` that says the same as `source`, of positions that are sorted. `unread` are tensors and numbers that it does not take, `sizes` the
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
        copies = self.program.domains.items()
        return found | {copy: found[axis] for copy, axis in copies if axis in found}

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
            found |= sort.made(values, extents)
        return found | {name: extents[axis] for name, axis in self.sizes.items()}

    def sampled(
        self, tensors: Mapping[str, Any], scalars: Mapping[str, Any], extents: Mapping[str, int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same for arrays, tensors and numbers apart."""
        found = {name: value for name, value in tensors.items() if name not in self.unread}
        for sort in self.sorts:
            found |= sort.sampled(tensors, scalars, extents)
        numbers = {name: value for name, value in scalars.items() if name not in self.unread}
        return found, numbers | {name: extents[axis] for name, axis in self.sizes.items()}


@once
def segments(program: Program) -> Segments | None:
    """The program with every reduction over the positions that a key selects as one over sorted positions; the key is made of elements
    of tensors of integers, at positions of axes, and not sorted already. None where it has no such reduction."""
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
    unread = {*program.scalars, *(tensor.name for tensor in program.tensors)}
    unread -= {*made.scalars, *(tensor.name for tensor in made.tensors)}
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
        self._extents, self._first = alike(program), dict[str, str]()
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
            match condition:
                case Call("eq", (key, Axis() as group)) | Call("eq", (Axis() as group, key)):
                    if self._selects(node, axes, key, group):
                        return self._over(node, axes, body, condition, key, group)
        return None

    def _selects(self, node: Reduce, axes: Sequence[str], key: Expr, group: Axis) -> bool:
        """Whether the key sorts some of the axes, for each position of others, and its value is a position of one more."""
        names = free_axes(key)
        return (
            _is_key(key, self._keys, self.program.integers)
            and len(names) == len(set(map(self._base, names)))
            and not names.isdisjoint(axes)
            and names - set(axes) <= free_axes(node)
            and group.name in free_axes(node)
            and group.name not in names
            and not self._ascends(key, axes)
        )

    def _ascends(self, key: Expr, axes: Sequence[str]) -> bool:
        """Whether a key is sorted already."""
        return isinstance(key, Load) and any(
            key.tensor == tensor and not free_axes(key.index[place]).isdisjoint(axes)
            for tensor, place in ascending(self.program)
        )

    def _over(
        self, node: Reduce, axes: Sequence[str], body: Expr, condition: Expr, key: Expr, group: Axis
    ) -> Expr:
        walked = tuple(axis for axis in axes if axis in free_axes(key))
        rows = tuple(sorted(free_axes(key) - set(walked)))
        sort = self._sort(key, rows, walked, group.name)
        index = tuple(map(Axis, rows))
        at = Axis(self._position(sort, walked))
        first, after = (
            Load(sort.ends, (*index, group)),
            Load(sort.ends, (*index, call("add", group, Const(1)))),
        )
        inside = call("and", call("le", first, at), call("lt", at, after))
        orders: dict[str, Expr] = {
            axis: Load(name, (*index, at)) for axis, name in zip(walked, sort.order, strict=True)
        }
        size: dict[Expr, Expr] = {Size(walked[0]): Size(at.name)} if len(walked) == 1 else {}
        body = _where_equal(body, walked, condition, {key: group})
        made = substitute_axes(_replaced_outside(body, walked, {condition: inside, **size}), orders)
        for axis in reversed([at.name, *(axis for axis in axes if axis not in walked)]):
            made = Reduce(node.op, axis, made)
        return made

    def _sort(self, key: Expr, rows: tuple[str, ...], axes: tuple[str, ...], group: str) -> Sort:
        key = substitute_axes(key, {axis: Axis(self._base(axis)) for axis in free_axes(key)})
        rows, axes = (tuple(map(self._base, part)) for part in (rows, axes))
        found = key, rows, axes, self._base(group)
        if found not in self.sorts:
            position = self.names.fresh(f"{'_'.join(axes)}_sorted")
            name = next(node.tensor for node in walk(key) if isinstance(node, Load))
            several = [f"_{axis}" if len(axes) > 1 else "" for axis in axes]
            order = tuple(self.names.fresh(f"{name}_order{axis}") for axis in several)
            ends = self.names.fresh(f"{name}_ends")
            self.sorts[found] = Sort(key, rows, axes, self._base(group), position, order, ends)
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
        """The first axis of the same extent as this one, so that positions along both have one order."""
        own = self.program.domains.get(axis, axis)
        extent = self._extents.get(own, own)
        return own if isinstance(extent, int) else self._first.setdefault(extent, own)


def _outside(expr: Expr, axes: Collection[str]) -> Iterator[Expr]:
    """The subexpressions that are not inside of reductions over one of the axes, whose positions are others there."""
    return post_order(
        [expr], lambda node: () if isinstance(node, Reduce) and node.axis in axes else children(node)
    )


def _where_equal(expr: Expr, axes: Collection[str], condition: Expr, values: Mapping[Expr, Expr]) -> Expr:
    """`expr` with the key as the position that it is equal to, wherever the condition has been asked."""
    found: dict[Expr, Expr] = {
        node: Call("where", (asked, _replaced_outside(chosen, axes, values), other))
        for node in _outside(expr, axes)
        if isinstance(node, Call) and node.fn == "where"
        for asked, chosen, other in [node.args]
        if condition in conjuncts(asked, True)
    }
    return _replaced_outside(expr, axes, found)


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
