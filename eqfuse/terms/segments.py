"""Reductions over the positions that a key selects, as reductions over segments of sorted positions.

    y[v, d] = sum[t](where(key[t] == v, x[t, d], 0))
 -> y[v, d] = sum[s](where((ends[v] <= s) & (s < ends[v+1]), x[order[s], d], 0))

`order` are the positions of the key in the order of its integers, equal ones as they stand, and `ends[v]` counts those below `v`. Two
things make both the same: a reduction whose combination is commutative does not depend on the order in which its positions are visited, and
`key[order[s]] == v` holds from `ends[v]` to `ends[v+1]` and nowhere else. Segments are ranges, which loops are cut by
(docs/ranges.md), so that all of them together visit each position once. Several keys of the same positions are one, a number of their place in the
table that they select from:

    (a[t] == u) & (b[t] == v)  ->  where(a[t], b[t] are in the table, a[t] * N(v) + b[t], -1) == u * N(v) + v

It is done to the source, as axes are collapsed (terms/collapse_axes.py); `order` and `ends` are made at each call, by torch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    transform,
    walk,
)
from eqfuse.terms.parser import axes_of, sized_axes
from eqfuse.terms.prefixes import alike
from eqfuse.terms.printer import show
from eqfuse.terms.promises import ascending

LONGEST = 2**31
"""Positions that are sorted together, and segments, are fewer than this."""


@dataclass(frozen=True)
class Ends:
    """Where the segments of a sort begin and end of which the key is `value`, at positions of `axes`: the tensors `names`. Of a value that is
    a position, the end of a segment is the start of the next one, and there is one tensor. A value of several positions is their number in
    the order of `axes`."""

    value: Expr
    axes: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def numbered(self) -> bool:
        """Whether values are the numbers 0, 1, 2 ... of segments."""
        return not _is_of_data(self.value)

    def shape(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(extents[axis] for axis in self.axes)


@dataclass(frozen=True)
class Sort:
    """Positions of `axes`, the outermost first, in the order of the integers `key`, for every position of `rows`. They are
    those of one axis, `position`; the tensors `order` have, for each of them, a position of each of `axes`; one that is not read has no
    name."""

    key: Expr
    rows: tuple[str, ...]
    axes: tuple[str, ...]
    position: str
    order: tuple[str, ...]
    ends: tuple[Ends, ...] = ()

    def __str__(self) -> str:
        rows = f" for each {', '.join(self.rows)}" if self.rows else ""
        return f"{' and '.join(self.axes)} by {show(self.key)}{rows} as {self.position}"

    def groups(self, extents: Mapping[str, int]) -> int | None:
        """The number of segments, where they are numbered by positions alone."""
        if not all(ends.numbered for ends in self.ends):
            return None
        return max(math.prod(ends.shape(extents)) for ends in self.ends)

    def made(self, values: Mapping[str, Any], extents: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The tensors of a call. What a key does not depend on, or a tensor is expanded along, is sorted once."""
        rows, place = len(self.rows), values[_tensor_of(self.key)].device

        def evaluated(expr: Expr, dims: Sequence[str]) -> torch.Tensor:
            def load(name: str) -> torch.Tensor:
                tensor: torch.Tensor = values[name]
                if tensor.dtype in (torch.int8, torch.uint8, torch.int16):
                    tensor = tensor.to(torch.int32)  # what they are computed in
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                return tensor[tuple(slice(1) if n > 1 and step == 0 else slice(None) for n, step in steps)]

            def numbers(count: int) -> torch.Tensor:
                return torch.arange(count, dtype=torch.int32, device=place)

            found: torch.Tensor = _evaluated(expr, dims, load, numbers, torch, values, extents)
            found = found.expand(*found.shape[:rows], *(extents[axis] for axis in dims[rows:]))
            return found.reshape(*found.shape[:rows], -1)

        key = evaluated(self.key, (*self.rows, *self.axes))
        groups = self.groups(extents)
        if groups is not None:  # what is in no segment comes first, or last; fewer bits are sorted sooner
            key = key.clamp(-1, groups).to(torch.int16 if groups < 2**15 else torch.int32)
        ordered, order = key.contiguous().sort(dim=-1, stable=True)
        repeated = [extents[axis] for axis in self.rows]
        found: dict[str, torch.Tensor] = {}
        for ends in self.ends:
            shape = ends.shape(extents)
            if ends.numbered:
                count = math.prod(shape) + 1
                wanted = torch.arange(count, dtype=key.dtype, device=place).reshape([1] * rows + [count])
            else:
                wanted = evaluated(ends.value, (*self.rows, *ends.axes))
                both = torch.promote_types(wanted.dtype, ordered.dtype)
                wanted, ordered = wanted.to(both), ordered.to(both)
            leading = [max(pair) for pair in zip(ordered.shape[:-1], wanted.shape[:-1], strict=True)]
            sought = ordered.expand(*leading, -1).contiguous(), wanted.expand(*leading, -1).contiguous()
            if ends.numbered:
                at = torch.searchsorted(*sought, out_int32=True)
                parts = _parts(at, shape, ends.names)
            else:
                parts = {
                    name: torch.searchsorted(*sought, right=is_right, out_int32=True).reshape(
                        *leading, *shape
                    )
                    for name, is_right in zip(ends.names, (False, True), strict=True)
                }
            for name, part in parts.items():
                found[name] = part.expand(*repeated, *part.shape[rows:])
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
        values = {**tensors, **scalars}

        def evaluated(expr: Expr, dims: Sequence[str]) -> Any:
            made = np.asarray(_evaluated(expr, dims, tensors.__getitem__, np.arange, np, values, extents))
            before = made.shape[: made.ndim - len(dims)]
            made = np.broadcast_to(made, (*before, *(extents[axis] for axis in dims)))
            return made.reshape(*before, *(extents[axis] for axis in self.rows), -1)

        key, groups = evaluated(self.key, (*self.rows, *self.axes)), self.groups(extents)
        if groups is not None:
            key = key.clip(-1, groups)
        order = np.argsort(key, axis=-1, kind="stable")
        places = np.unravel_index(order, [extents[axis] for axis in self.axes])
        found = {name: at for name, at in zip(self.order, places, strict=True) if name}
        for ends in self.ends:
            shape = ends.shape(extents)
            if ends.numbered:
                wanted = np.arange(math.prod(shape) + 1)
                at = np.less(key[..., None, :], wanted[..., None]).sum(axis=-1)
                found |= _parts(at, shape, ends.names)
                continue
            wanted = evaluated(ends.value, (*self.rows, *ends.axes))
            for name, is_below in zip(ends.names, (np.less, np.less_equal), strict=True):
                at = is_below(key[..., None, :], wanted[..., None]).sum(axis=-1)
                found[name] = at.reshape(*at.shape[:-1], *shape)
        return found


def _parts(ends: Any, shape: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """The tensors of segments that are numbered, from how many keys are below each number: these, or starts and ends apart."""
    if len(names) == 1:
        return {names[0]: ends}
    apart = ends[..., :-1], ends[..., 1:]
    return {name: part.reshape(*ends.shape[:-1], *shape) for name, part in zip(names, apart, strict=True)}


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


def _is_key(expr: Expr, tensors: Collection[str], scalars: Collection[str]) -> bool:
    """Whether an expression is made of integers, and what `_evaluated` computes."""

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

    return all(map(is_made, walk(expr)))


def _is_of_data(expr: Expr) -> bool:
    return any(isinstance(node, Load) for node in walk(expr))


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
        kept = frozenset(sized_axes(self.program)).union(self.program.domains.values())
        return frozenset(sized_axes(self.source)) - kept

    def fits(self, extents: Mapping[str, int]) -> bool:
        """Whether positions and segments have room in 32 bits."""
        return all(
            max(math.prod(extents[axis] for axis in sort.axes), (sort.groups(extents) or 0) + 1) < LONGEST
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


@dataclass(frozen=True)
class Selection:
    """A condition that holds where a key is a value. `equal` says which value each part of the key has there."""

    condition: Expr
    key: Expr
    value: Expr
    equal: Mapping[Expr, Expr]


def _joint(parts: Sequence[Selection]) -> Selection:
    """The selection by several keys at once: by the number of the position that they select of a table."""
    key, value = parts[0].key, parts[0].value
    is_in: Expr = Const(True)
    for each in parts:
        assert isinstance(each.value, Axis)
        count = Size(each.value.name)
        inside = call("and", call("le", Const(0), each.key), call("lt", each.key, count))
        is_in = inside if each is parts[0] else call("and", is_in, inside)
        if each is not parts[0]:
            key, value = (
                call("add", call("mul", n, count), m) for n, m in ((key, each.key), (value, each.value))
            )
    key = call("where", is_in, key, Const(-1))
    equal = {part: number for each in parts for part, number in each.equal.items()}
    return Selection(call("eq", key, value), key, value, equal)


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
        ends = tuple(sorting.ends[found.position].values())
        sort = replace(found, order=tuple(name if name in read else "" for name in found.order), ends=ends)
        sorts.append(sort)
        rows = tuple(map(Axis, sort.rows))
        added += [
            Tensor(name, len(rows) + 1, "i64", (*sort.rows, sort.position)) for name in sort.order if name
        ]
        for each in ends:
            axes = each.axes if len(each.names) > 1 else (sorting.names.fresh("end"),)
            added += [Tensor(name, len(rows) + len(axes), "i32", (*sort.rows, *axes)) for name in each.names]
            if len(each.names) == 1:
                at = Axis(each.axes[0])
                first, after = ((*rows, place) for place in (at, call("add", at, Const(1))))
                promises.append((Load(each.names[0], first), Load(each.names[0], after)))
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
    """Rewrites expressions of a program. `sorts` are those that were needed, `domains` the copies of their positions and of axes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sorts: dict[tuple[object, ...], Sort] = {}
        self.ends: dict[str, dict[Expr, Ends]] = {}
        self.domains: dict[str, str] = {}
        taken = (t.name for t in program.tensors), (output.name for output in program.outputs)
        self.names = Names(chain(*taken, program.scalars, axes_of(program.outputs), program.domains))
        declared = (tensor.name for tensor in program.tensors if tensor.dtype in INTEGERS)
        self._keys = {*declared, *program.integer_tensors}
        self._extents, self._first = alike(program), dict[str, str]()
        self._known: dict[Expr, Expr] = {}
        self._copies: dict[str, list[str]] = {}
        self._others: dict[str, str] = {}

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
        names = free_axes(node).union(axes)  # where one is bound again, it is another position
        found: list[Selection] = []
        for condition in _outside(body, names):
            if isinstance(condition, Call) and condition.fn == "eq":
                for key, value in (condition.args, condition.args[::-1]):
                    if self._selects(node, axes, key, value):
                        found.append(Selection(condition, key, value, {key: value}))
        joint = self._conjunction(body, axes, names, found)
        if joint:
            body, found = _conjoined(body, names, joint, by := _joint(joint)), [by, *found]
        for each in found:
            known = _where_equal(body, names, each.condition, each.equal)
            if not _is_of_data(each.value) or not _reduces_along(known, axes):
                return self._over(node, axes, names, known, each)
        return None

    def _conjunction(
        self, body: Expr, axes: Sequence[str], names: Collection[str], found: Sequence[Selection]
    ) -> tuple[Selection, ...]:
        """Of the selections of different positions those that one condition asks for together, where that are several: the most of them. One of
        their keys has all axes that the others have."""
        best: tuple[Selection, ...] = ()
        read = frozenset(chain(*(free_axes(each.key) for each in found)))
        found = [each for each in found if isinstance(each.value, Axis) and each.value.name not in read]
        for node in _outside(body, names):
            if isinstance(node, Call) and node.fn == "and":
                asked = conjuncts(node, True)
                chosen = {show(each.value): each for each in reversed(found) if each.condition in asked}
                along = {name: free_axes(chosen[name].key).intersection(axes) for name in sorted(chosen)}
                widest = max(along.values(), key=len, default=frozenset())
                best = max(best, tuple(chosen[name] for name in along if along[name] <= widest), key=len)
        return best if len(best) > 1 else ()

    def _selects(self, node: Reduce, axes: Sequence[str], key: Expr, value: Expr) -> bool:
        """Whether the key sorts some of the axes, for each position of others, and the value depends on none of the former."""
        names, free, others = free_axes(key), free_axes(node), free_axes(value)
        integers = self._keys, self.program.integers
        return (
            _is_key(key, *integers)
            and _is_of_data(key)
            and len(names) == len(set(map(self._base, names)))
            and not names.isdisjoint(axes)
            and names - set(axes) <= free
            and not self._ascends(key, axes)
            and others <= free - set(axes)
            and bool(
                value not in map(Axis, names)
                if isinstance(value, Axis)
                else _is_key(value, *integers)
                and _is_of_data(value)
                and others
                and len(others) == len(set(map(self._base, others)))
            )
        )

    def _ascends(self, key: Expr, axes: Sequence[str]) -> bool:
        """Whether a key is sorted already."""
        return isinstance(key, Load) and any(
            key.tensor == tensor and not free_axes(key.index[place]).isdisjoint(axes)
            for tensor, place in ascending(self.program)
        )

    def _over(
        self, node: Reduce, axes: Sequence[str], names: Collection[str], body: Expr, by: Selection
    ) -> Expr:
        key, value = by.key, by.value
        walked = tuple(axis for axis in axes if axis in free_axes(key))
        rows = tuple(sorted(free_axes(key) - set(walked)))
        sort = self._sort(key, rows, walked)
        others = tuple(sorted(free_axes(value) - set(rows)))
        ends = self._ends(sort, value, others)
        index = tuple(map(Axis, rows))
        at = Axis(self._position(sort, free_axes(node)))
        if len(ends.names) == 1:
            places = (*index, value), (*index, call("add", value, Const(1)))
            first, after = (Load(ends.names[0], place) for place in places)
        else:
            first, after = (Load(name, (*index, *map(Axis, others))) for name in ends.names)
        inside = call("and", call("le", first, at), call("lt", at, after))
        orders: dict[str, Expr] = {
            axis: Load(name, (*index, at)) for axis, name in zip(walked, sort.order, strict=True)
        }
        size: dict[Expr, Expr] = {Size(walked[0]): Size(at.name)} if len(walked) == 1 else {}
        known = _replaced_outside(body, names, {by.condition: inside, **size})
        made = substitute_axes(self._reduced_along_others(known, rows), orders)
        for axis in reversed([at.name, *(axis for axis in axes if axis not in walked)]):
            made = Reduce(node.op, axis, made)
        return made

    def _reduced_along_others(self, expr: Expr, taken: Collection[str]) -> Expr:
        """An expression with copies of the axes that are `taken` wherever it reduces along these: it reads positions along them now."""

        def step(node: Expr) -> Expr:
            match node:
                case Reduce(op, axis, body) if axis in taken:
                    if axis not in self._others:
                        self._others[axis] = self.names.fresh(axis)
                        self.domains[self._others[axis]] = self.program.domains.get(axis, axis)
                    name = self._others[axis]
                    return Reduce(op, name, substitute_axes(body, {axis: Axis(name)}))
            return node

        return transform(expr, step)

    def _named(self, expr: Expr) -> Expr:
        """An expression over the first axes of the same extents."""
        return substitute_axes(expr, {axis: Axis(self._base(axis)) for axis in free_axes(expr)})

    def _sort(self, key: Expr, rows: tuple[str, ...], axes: tuple[str, ...]) -> Sort:
        key = self._named(key)
        rows, axes = (tuple(map(self._base, part)) for part in (rows, axes))
        found = key, rows, axes
        if found not in self.sorts:
            position = self.names.fresh(f"{'_'.join(axes)}_sorted")
            several = [f"_{axis}" if len(axes) > 1 else "" for axis in axes]
            order = tuple(self.names.fresh(f"{_tensor_of(key)}_order{axis}") for axis in several)
            self.sorts[found] = Sort(key, rows, axes, position, order)
            self.ends[position] = {}
        return self.sorts[found]

    def _ends(self, sort: Sort, value: Expr, others: tuple[str, ...]) -> Ends:
        known, several = self.ends[sort.position], not isinstance(value, Axis) and not _is_of_data(value)
        if not several:  # positions of a table along two axes of one extent are two numbers
            value, others = self._named(value), tuple(map(self._base, others))
        if value not in known:
            of = ("ends",) if isinstance(value, Axis) else ("first", "last")
            names = tuple(self.names.fresh(f"{_tensor_of(sort.key)}_{each}") for each in of)
            known[value] = Ends(value, others, names)
        return known[value]

    def _position(self, sort: Sort, taken: Collection[str]) -> str:
        """The axis of the sorted positions, or a copy of it, whichever is not taken by a reduction around."""
        copies = self._copies.setdefault(sort.position, [sort.position])
        for name in copies:
            if name not in taken:
                return name
        copies.append(name := self.names.fresh(sort.position))
        self.domains[name] = sort.position
        return name

    def _base(self, axis: str) -> str:
        """The first axis of the same extent as this one, so that positions along both have one order."""
        own = {**self.program.domains, **self.domains}.get(axis, axis)
        extent = self._extents.get(own, own)
        return own if isinstance(extent, int) else self._first.setdefault(extent, own)


def _tensor_of(key: Expr) -> str:
    """The first tensor that a key reads."""
    return next(node.tensor for node in walk(key) if isinstance(node, Load))


def _outside(expr: Expr, axes: Collection[str]) -> Iterator[Expr]:
    """The subexpressions that are not inside of reductions over one of the axes, whose positions are others there."""
    return post_order(
        [expr], lambda node: () if isinstance(node, Reduce) and node.axis in axes else children(node)
    )


def _reduces_along(expr: Expr, axes: Collection[str]) -> bool:
    """Whether something is reduced at each position of the axes, as products of matrices are: they are no longer tiles of neighbours
    once positions are sorted, and segments of values that are no positions may be as long as the axis."""
    found = post_order([expr], lambda node: () if isinstance(node, Reduce) else children(node))
    return any(isinstance(node, Reduce) and not free_axes(node).isdisjoint(axes) for node in found)


def _conjoined(expr: Expr, axes: Collection[str], parts: Sequence[Selection], whole: Selection) -> Expr:
    """`expr` with the condition of all selections in place of theirs, wherever they are asked together."""
    wanted, found = {each.condition for each in parts}, dict[Expr, Expr]()
    for node in _outside(expr, axes):
        if isinstance(node, Call) and node.fn == "and":
            asked = conjuncts(node, True)
            if wanted.issubset(asked):
                rest = (part for part in asked if part not in wanted)
                found[node] = functools.reduce(partial(call, "and"), rest, whole.condition)
    return _replaced_outside(expr, axes, found)


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
