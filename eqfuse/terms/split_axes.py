"""Sums over the positions up to each one, with the axis in chunks: those of all chunks before, and of the own chunk.

    y[j, e] = sum[k](where(k <= j, sum[d](q[j, d] * r[k, d]) * v[k, e], 0))

 -> y[c, p, e] = sum[a](where(a < c, sum[o](sum[d](q[c, p, d] * r[a, o, d]) * v[a, o, e]), 0))
               + sum[o](where(o <= p, sum[d](q[c, p, d] * r[c, o, d]) * v[c, o, e], 0))

What is of `c, p` alone leaves the first sum as a factor of products does (rules/reassociate.py), and a prefix over chunks of `sum[o](r * v)` is left;
the second one is two products of matrices. That is the chunkwise form of linear attention (Hua and others, "Transformer Quality in Linear
Time", 2022; of gated forms Yang and others, "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024).

Decays `exp(A[j] - A[k])`, where A is a running sum or a position, are a product of three: from the position to the end of its chunk, from there to the
start of the other chunk, and from there on. Each is the exponential of a part of the same sum, and no quotient of exponentials is taken.

A window is the end of one chunk and the beginning of another one, with whole chunks between where it is wider than a chunk (van Herk, "A fast algorithm for
local minimum and maximum filters", 1992, for any reduction). Both are prefixes, so that it takes as long as they do, however wide it is.

    y[j] = sum[k <= j, k > j - width](x[k])

 -> y[c, p] = sum[o](where(o > p, x[c-1, o], 0)) + sum[o](where(o <= p, x[c, o], 0))         in chunks of `width` positions

It is done to the source, as axes are collapsed (terms/collapse_axes.py), which it is the opposite of: tensors are taken as views with one more dimension.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain
from typing import Literal

import torch

from eqfuse.errors import EqfuseError
from eqfuse.names import Names
from eqfuse.terms.extents import axes_along, program_of, sizes_in
from eqfuse.terms.folds import only_where
from eqfuse.terms.inline import check_written_size
from eqfuse.terms.nodes import (
    COMBINE,
    REDUCTIONS,
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
    rebuild,
    reductions,
    substitute_axes,
    total_of,
    transform,
    walk,
)
from eqfuse.terms.parser import axes_of
from eqfuse.terms.prefixes import OPPOSITE, Extents, Prefix, Window, alike, part_of, window_of

CHUNK = 64
"""Positions of a chunk at most: a tile of products of matrices."""
SHORTEST = 16
"""Positions of a chunk at least: fewer are no tile of products."""
FEWEST = 4
"""Chunks at least: fewer are left as they are."""
WIDEST = 512
"""Positions of a window at most: what is verified is a few times as long."""


def chunk_of(extent: int) -> int:
    """How many positions each chunk of an axis has, which has a whole number of them."""
    most = CHUNK if extent >= FEWEST * CHUNK else math.isqrt(extent)
    return next((count for count in range(most, 1, -1) if extent % count == 0), 1)


def chunks_in(width: int) -> int:
    """How many chunks a window of this width is, the fewest that are short enough."""
    return next(count for count in range(-(-width // CHUNK), width + 1) if width % count == 0)


@dataclass(frozen=True)
class SplitAxes:
    """A `program` that says the same as `source`, with some axes in chunks: `axes` are those, each with that of the chunks and that of the positions
    in one; `dims` are the dimensions of tensors and outputs along them; `width` is that of windows, 0 where there are none."""

    source: Program
    program: Program
    axes: Mapping[str, tuple[str, str]]
    dims: Mapping[str, tuple[int, ...]]
    width: int = 0

    def chunk(self, extent: int) -> int:
        """How many positions each chunk has."""
        return self.width // chunks_in(self.width) if self.width else chunk_of(extent)

    def fitted(self, extents: Mapping[str, int]) -> dict[str, int]:
        """Small extents that the program holds for, made of any: windows are a number of chunks, whose positions they tell."""
        found = dict(extents)
        if self.width:
            found |= {axis: self.chunk(0) * (1 + extents[axis] % 3) for axis in self.axes if axis in extents}
        return found

    def __str__(self) -> str:
        return ", ".join(f"{axis} as {chunk} and {place}" for axis, (chunk, place) in self.axes.items())

    @property
    def passes(self) -> tuple[str, ...]:
        """What a certificate lists."""
        return (f"axes in chunks ({self})",)

    @property
    def few(self) -> dict[str, int]:
        """Extents of the split axes to verify at: three chunks of three positions, or three windows."""
        return dict.fromkeys(self.axes, 3 * self.width or 9)

    def fits(self, extents: Mapping[str, int]) -> bool:
        """Whether the axes have enough chunks of enough positions."""
        return not self.why_not(extents)

    def why_not(self, extents: Mapping[str, int]) -> str:
        """Why the axes have no chunks at these extents; empty where they have some."""
        axis = next(axis for axis in self.axes if axis in extents)
        extent, chunk = extents[axis], self.chunk(extents[axis])
        if self.width and extent % chunk:
            return f"{axis} has {extent} positions, which are no chunks of {chunk}, as windows of {self.width} are"
        if extent < FEWEST * SHORTEST:
            return f"{axis} has {extent} positions, fewer than {FEWEST} chunks of {SHORTEST}"
        if chunk < SHORTEST:
            return f"{axis} has {extent} positions, which no number from {SHORTEST} to {CHUNK} divides"
        return (
            "" if extent // chunk >= FEWEST else f"{axis} has {extent // chunk} chunks, fewer than {FEWEST}"
        )

    def extents(self, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents of the axes of the program, from those of the source's."""
        found = {axis: extent for axis, extent in extents.items() if axis not in self.axes}
        for axis, (chunk, place) in self.axes.items():
            if axis in extents:
                found[place] = self.chunk(extents[axis])
                found[chunk] = extents[axis] // found[place]
        return found | {copy: found[axis] for copy, axis in self.program.domains.items() if axis in found}

    def order(self, name: str, rank: int) -> tuple[int, ...]:
        """The dimensions of a tensor's view: those of the tensor, as they are."""
        return (*range(rank),)

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor's view, from that of the tensor; what stands before the tensor's own dimensions is kept."""
        found = list(shape)
        dims = self.dims.get(name, ())
        before = len(shape) - self._rank(name)
        for dim in sorted(dims, reverse=True):
            extent = shape[before + dim]
            found[before + dim : before + dim + 1] = [extent // self.chunk(extent), self.chunk(extent)]
        return tuple(found)

    def _rank(self, name: str) -> int:
        return next(tensor.rank for tensor in self.source.tensors if tensor.name == name)

    def views(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as the program takes them; a dimension can be split whatever its stride is."""
        return {
            name: tensor.view(self.shape(name, tensor.shape)) if self.dims.get(name) else tensor
            for name, tensor in tensors.items()
        }


@once
def split_axes(program: Program) -> SplitAxes | None:
    """The program with axes in chunks; None where no sum over a prefix has factors of both positions that come apart and nothing is over a window,
    or something is not said by chunks."""
    program = program if program.strict_casts else _unrounded(program)
    extents, found = alike(program), reductions(*(output.expr for output in program.outputs))
    contracted = {
        inner
        for node in found
        for inner in reductions(node.body)
        if node.op == "sum" and node.axis in free_axes(inner)
    }
    for node in found:
        extent = extents.get(node.axis, node.axis)
        is_split = _is_product(node, extents, node in contracted) or _window(node, extents) is not None
        if isinstance(extent, str) and is_split:
            try:
                return _Splitting(program, extents, extent).made()
            except (_NotSplitError, EqfuseError, ValueError):
                return None
    return None


def _unrounded(program: Program) -> Program:
    """Without the casts to half precision of what sums fold of other sums, which part factors: products of matrices round what they read
    anyway."""

    def step(node: Expr) -> Expr:
        match node:
            case Call("bf16" | "f16", (part,)) if reductions(part):
                return part
        return node

    def within(node: Expr) -> Expr:
        return Reduce(node.op, node.axis, transform(node.body, step)) if isinstance(node, Reduce) else node

    outputs = (replace(output, expr=transform(output.expr, within)) for output in program.outputs)
    return replace(program, outputs=tuple(outputs))


def _is_product(node: Reduce, extents: Extents, is_contracted: bool) -> bool:
    """Whether a sum is over a prefix, of products of what is of either position alone, of tensors that are read at both; or
    at one, where the sum is contracted with something."""
    part = part_of(node, extents) if node.op == "sum" else None
    if part is None:
        return False
    (prefix, body), axis = part, node.axis
    loads = [free_axes(node) for node in walk(body) if isinstance(node, Load)]
    return (
        _is_whole(prefix)
        and (is_contracted or any(prefix.at in axes for axes in loads))
        and any(axis in axes for axes in loads)
        and _is_separable(body, frozenset((axis, prefix.at)), extents)
    )


def _window(node: Reduce, extents: Extents) -> tuple[Window, Expr] | None:
    """The window of a reduction, which has the same of a position in every window; None of others, and of one that is short, or too wide."""
    found = window_of(node, extents) if node.op in REDUCTIONS else None
    if found is None or found[0].at in free_axes(found[1]):
        return None
    width = found[0].width
    return found if SHORTEST <= width <= WIDEST and width // chunks_in(width) >= SHORTEST else None


def _is_whole(prefix: Prefix) -> bool:
    return not (prefix.lag or prefix.mirrored)


def _is_separable(expr: Expr, both: frozenset[str], extents: Extents) -> bool:
    """Whether sums of an expression are products of factors that have one of the axes at most."""
    if not both <= free_axes(expr):
        return True
    match expr:
        case Call("mul" | "add" | "sub" | "neg", args):
            return all(_is_separable(arg, both, extents) for arg in args)
        case Call("div", (left, right)):
            return _is_separable(left, both, extents) and not both <= free_axes(right)
        case Call("where", (condition, left, right)) if not both <= free_axes(condition):
            return _is_separable(left, both, extents) and _is_separable(right, both, extents)
        case Call("exp" | "exp2", (arg,)):
            return all(_comes_apart(term, both, extents) for term in _terms(arg))
        case Reduce("sum", axis, body):
            return axis not in both and _is_separable(body, both, extents)
    return False


def _comes_apart(term: _Term, both: frozenset[str], extents: Extents) -> bool:
    """Whether a term of an exponent is of neither axis, or a position or a sum up to it, of which chunks have parts: exponentials of other terms, taken
    alone, may be out of range where those of differences are not."""
    value, free = term.value, both & free_axes(term.value)
    if not free:
        return not any(both & free_axes(factor) for factor in term.factors)
    if len(free) > 1 or any(both & free_axes(factor) for factor in term.factors):
        return False
    match value:
        case Axis():
            return True
        case Reduce("sum", axis, _):
            part = part_of(value, extents)
            return part is not None and _is_whole(part[0]) and not both & (free_axes(part[1]) - {axis})
    return False


class _NotSplitError(Exception):
    """Something is not said by chunks."""


Side = Literal["start", "end"]
"""Where a chunk is that a position is reckoned from."""


@dataclass
class _Splitting:
    """Rewrites the expressions of a program whose axes of one extent are split."""

    program: Program
    all_extents: Extents
    extent: str
    axes: dict[str, tuple[str, str]] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)
    width: int = 0
    _known: dict[tuple[Expr, tuple[tuple[str, Side], ...]], Expr] = field(default_factory=dict)
    _dims: dict[tuple[str, int], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.program
        known = axes_of(program.outputs)
        taken = (t.name for t in program.tensors), (output.name for output in program.outputs)
        self._names = Names(chain(*taken, program.scalars, known, program.domains, program.domains.values()))
        for axis in known:
            if self.all_extents.get(axis, axis) == self.extent:
                self.axes[axis] = self._names.fresh(f"{axis}_chunk"), self._names.fresh(f"{axis}_in")
        first, *others = self.axes.values()
        self._size = Size(first[1])
        self._chunks = [first[0]]
        for chunk, place in others:
            self._chunks.append(chunk)
            self.domains |= {chunk: first[0], place: first[1]}

    def made(self) -> SplitAxes:
        """The program, with its axes split. Raises _NotSplitError."""
        program, axes = self.program, self.axes
        if axes.keys() & {*program.computed, *sizes_in(program.computed.values()), *program.lengths}:
            raise _NotSplitError
        if any(axes.keys() & free_axes(side) for pair in program.at_most for side in pair):
            raise _NotSplitError
        outputs = [
            replace(o, axes=self._split(o.axes), expr=self._renamed(self._visit(o.expr, ())))
            for o in program.outputs
        ]
        tensors = tuple(map(self._tensor, program.tensors))
        if not sizes_in(output.expr for output in outputs) <= axes_along(outputs, tensors):
            raise _NotSplitError
        domains = {axis: of for axis, of in program.domains.items() if axis not in axes} | self.domains
        changed = replace(program, tensors=tensors, domains=domains)
        made = program_of(changed, outputs, (), {})
        if {t.name for t in made.tensors} != {t.name for t in tensors} or made.scalars != program.scalars:
            raise _NotSplitError
        check_written_size(made)
        dims = {
            tensor.name: tuple(
                place for place in range(tensor.rank) if self._dims.get((tensor.name, place), False)
            )
            for tensor in program.tensors
        }
        return SplitAxes(program, made, axes, dims, self.width)

    def _split(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(part for axis in axes for part in self.axes.get(axis, (axis,)))

    def _tensor(self, tensor: Tensor) -> Tensor:
        for place, axis in enumerate(tensor.axes):
            if (axis in self.axes) != self._dims.get((tensor.name, place), axis in self.axes):
                raise _NotSplitError
        rank = tensor.rank + sum(
            is_split for (name, _), is_split in self._dims.items() if name == tensor.name
        )
        axes = tuple(
            part for axis in tensor.axes for part in (self.axes.get(axis, (axis,)) if axis else (None,))
        )
        return replace(tensor, rank=rank, axes=axes)

    def _visit(self, expr: Expr, sides: tuple[tuple[str, Side], ...]) -> Expr:
        """An expression by chunks. Positions and sums up to them are said from the sides of chunks that are given for axes."""
        key = expr, sides
        if key not in self._known:
            self._known[key] = self._visited(expr, sides)
        return self._known[key]

    def _visited(self, expr: Expr, sides: tuple[tuple[str, Side], ...]) -> Expr:
        match expr:
            case Load(name, index):
                return Load(
                    name,
                    tuple(part for place, at in enumerate(index) for part in self._index(name, place, at)),
                )
            case Size(axis) if axis in self.axes:
                return call("mul", Size(self.axes[axis][0]), self._size)
            case Size(axis):  # a copy may be there for its size alone
                return Size(self.program.domains.get(axis, axis))
            case Axis(axis) if axis in self.axes:
                return self._position(axis, dict(sides).get(axis, "start"))
            case Reduce(op, axis, body) if axis in self.axes:
                if op not in REDUCTIONS:
                    raise _NotSplitError
                if window_of(expr, self.all_extents) is not None:
                    return self._over_window(expr, sides)
                part = part_of(expr, self.all_extents)
                if part is not None and _is_whole(part[0]):
                    return self._prefix(op, axis, *part, sides)
                chunk, place = self.axes[axis]
                return Reduce(op, chunk, Reduce(op, place, self._visit(body, sides)))
            case _:
                return rebuild(expr, tuple(self._visit(child, sides) for child in children(expr)))

    def _moved(self, expr: Expr, chunk: str, to: str, memo: dict[Expr, Expr]) -> Expr:
        """An expression of one chunk as that of another one. `memo` has what was moved so."""
        if chunk not in free_axes(expr):
            return expr
        if expr not in memo:
            match expr:
                case Axis():
                    memo[expr] = Axis(to)
                case Reduce(op, axis, body) if axis == to:
                    bound = {node.axis for node in walk(body) if isinstance(node, Reduce)}
                    other = self._spare(free_axes(body) | bound | {chunk, to})
                    memo[expr] = Reduce(
                        op, other, self._moved(self._moved(body, to, other, {}), chunk, to, memo)
                    )
                case _:
                    parts = (self._moved(child, chunk, to, memo) for child in children(expr))
                    memo[expr] = rebuild(expr, tuple(parts))
        return memo[expr]

    def _spare(self, taken: Collection[str]) -> str:
        """An axis of chunks that is not taken."""
        found = next((chunk for chunk in self._chunks if chunk not in taken), None)
        if found is None:
            found = self._names.fresh(self._chunks[0])
            self._chunks.append(found)
            self.domains[found] = self._chunks[0]
        return found

    def _renamed(self, expr: Expr) -> Expr:
        """An expression with the same names for reduced axes wherever that is possible: what it has twice is the same."""
        shown = {part for output in self.program.outputs for part in self._split(output.axes)}
        places = [place for _, place in self.axes.values()]
        pools = [sorted(pool, key=lambda axis: axis in shown) for pool in (self._chunks, places)]

        def step(node: Expr) -> Expr:
            match node:
                case Reduce(op, axis, body):
                    pool = next((pool for pool in pools if axis in pool), [axis])
                    for name in pool[: pool.index(axis)]:
                        if name not in free_axes(node):
                            try:
                                return Reduce(op, name, substitute_axes(body, {axis: Axis(name)}))
                            except ValueError:  # it is bound inside
                                continue
            return node

        return transform(expr, step)

    def _index(self, name: str, place: int, at: Expr) -> tuple[Expr, ...]:
        is_split = isinstance(at, Axis) and at.name in self.axes
        if self._dims.setdefault((name, place), is_split) != is_split:
            raise _NotSplitError
        if isinstance(at, Axis) and is_split:
            chunk, inner = self.axes[at.name]
            return Axis(chunk), Axis(inner)
        if free_axes(at) & self.axes.keys() or any(isinstance(node, Reduce) for node in walk(at)):
            raise _NotSplitError
        return (at,)

    def _position(self, axis: str, side: Side) -> Expr:
        chunk, place = self.axes[axis]
        if side == "start":
            return call("add", call("mul", Axis(chunk), self._size), Axis(place))
        after = call("mul", call("add", Axis(chunk), Const(1)), self._size)
        return call("sub", after, call("sub", self._size, Axis(place)))

    def _over_window(self, expr: Reduce, sides: tuple[tuple[str, Side], ...]) -> Expr:
        """A reduction over a window: that over the rest of the chunk where it begins, over the chunks between, and over a part of the own one.
        Raises _NotSplitError for a second width, and for windows that are not divided."""
        op, axis, found = expr.op, expr.axis, _window(expr, self.all_extents)
        if found is None or self.width not in (0, found[0].width):
            raise _NotSplitError
        window, body = found
        (chunk, place), (at_chunk, at_place) = self.axes[axis], self.axes[window.at]
        self.width = window.width
        rest = tuple(side for side in sides if side[0] not in (axis, window.at))
        value = self._moved(self._visit(body, rest), chunk, at_chunk, {})

        def part(condition: Expr | None, away: int) -> Expr:
            at = call("add" if window.backwards else "sub", Axis(at_chunk), Const(away))
            is_there = call("lt", at, Size(at_chunk)) if window.backwards else call("ge", at, Const(0))
            conditions = [each for each in (is_there if away else None, condition) if each is not None]
            found = substitute_axes(value, {at_chunk: at}) if away else value
            return Reduce(op, place, only_where(reduce(partial(call, "and"), conditions), op, found))

        own, other = Axis(place), Axis(at_place)
        beyond, upto = ("lt", "ge") if window.backwards else ("gt", "le")
        count = chunks_in(window.width)
        between = [part(None, away) for away in range(count - 1, 0, -1)]
        parts = [part(call(beyond, own, other), count), *between, part(call(upto, own, other), 0)]
        return reduce(partial(call, COMBINE[op]), reversed(parts) if window.backwards else parts)

    def _prefix(
        self, op: str, axis: str, prefix: Prefix, body: Expr, sides: tuple[tuple[str, Side], ...]
    ) -> Expr:
        """A reduction over a prefix: that over the chunks before and that over the own one; or, said from the other side of the chunk, a sum over
        both less what the own one has beyond the position."""
        at = prefix.at
        (chunk, place), (at_chunk, at_place) = self.axes[axis], self.axes[at]
        before, inclusive = ("gt", "ge") if prefix.backwards else ("lt", "le")
        after, after_inclusive = ("lt", "le") if prefix.backwards else ("gt", "ge")
        natural: Side = "end" if prefix.backwards else "start"
        rest = tuple(side for side in sides if side[0] not in (axis, at))

        def masked(fn: str, one: str, other: str, value: Expr) -> Expr:
            return only_where(call(fn, Axis(one), Axis(other)), op, value)

        def own(fn: str) -> Expr:
            value = self._moved(self._visit(body, rest), chunk, at_chunk, {})
            value = transform(self._renamed(value), _cancelled)
            return Reduce(op, place, masked(fn, place, at_place, value))

        if op == "sum" and dict(sides).get(at, natural) != natural and at not in free_axes(body):
            whole = Reduce(op, place, self._visit(body, rest))
            beyond = after_inclusive if prefix.exclusive else after
            return call("sub", Reduce(op, chunk, masked(inclusive, chunk, at_chunk, whole)), own(beyond))
        earlier, later = (at, axis) if prefix.backwards else (axis, at)
        towards = tuple(sorted((*rest, (earlier, "end"), (later, "start"))))
        split = frozenset(part for pair in self.axes.values() for part in pair).union(self._chunks)
        apart = _Apart(place, at_place, prefix.backwards, split)
        inner = Reduce(op, place, apart.within(self._renamed(self._visit(body, towards)), {}))
        seen = before if prefix.exclusive else inclusive
        return call(COMBINE[op], Reduce(op, chunk, masked(before, chunk, at_chunk, inner)), own(seen))


@dataclass(frozen=True)
class _Apart:
    """Exponentials of sums as products of those of what is of either position, and of neither."""

    place: str
    at_place: str
    backwards: bool
    split: frozenset[str]

    def within(self, expr: Expr, memo: dict[Expr, Expr]) -> Expr:
        """An expression with its exponentials so, but for those in sums over chunks: their values are of one position."""
        if isinstance(expr, Reduce) and expr.axis in self.split:
            return expr
        if expr not in memo:
            memo[expr] = self._step(
                rebuild(expr, tuple(self.within(child, memo) for child in children(expr)))
            )
        return memo[expr]

    def _step(self, node: Expr) -> Expr:
        match node:
            case Call("exp" | "exp2" as fn, (arg,)) if {self.place, self.at_place} & free_axes(arg):
                groups: dict[tuple[bool, bool], list[_Term]] = {}
                for term in _terms(arg):
                    free = free_axes(term.whole)
                    groups.setdefault((self.place in free, self.at_place in free), []).append(term)
                if (False, False) in groups:  # merges are of differences of two values
                    groups[False, False] = self._turned(
                        [_Term(t.whole, (), t.sign) for t in groups[False, False]]
                    )
                if (True, True) not in groups:
                    factors = [call(fn, _sum_of(groups[key])) for key in sorted(groups)]
                    return _product(factors)
        return node

    def _turned(self, terms: Sequence[_Term]) -> list[_Term]:
        """Terms in which the difference of two sums over chunks is that of sums in the direction of the prefix: of what both leave out."""
        found: dict[Expr, list[tuple[int, Expr]]] = {}
        for place, term in enumerate(terms):
            match term.value:
                case Reduce(
                    "sum", axis, Call("where", (Call(fn, (Axis(own), Axis(at))), body, Const(0)))
                ) if own == axis and fn in OPPOSITE and fn.startswith("g") != self.backwards:
                    rest = call("where", call(OPPOSITE[fn], Axis(axis), Axis(at)), body, Const(0))
                    key = substitute_axes(body, {axis: Axis(_ANY)})
                    found.setdefault(key, []).append((place, Reduce("sum", axis, rest)))
        turned = list(terms)
        for places in found.values():
            if sum(terms[place].sign for place, _ in places) == 0:
                for place, value in places:
                    turned[place] = _Term(value, (), -terms[place].sign)
        return turned


_ANY = "%"
"""Stands for the axis of a sum where two are compared."""


def _cancelled(node: Expr) -> Expr:
    """Exponentials without terms that cancel."""
    match node:
        case Call("exp" | "exp2" as fn, (arg,)):
            terms = _terms(arg)
            left = [term for term in terms if replace(term, sign=-term.sign) not in terms]
            if len(left) < len(terms):
                return call(fn, _sum_of(left))
    return node


@dataclass(frozen=True)
class _Term:
    """A term of a sum: a value, what the parentheses around it are multiplied by, and its sign."""

    value: Expr
    factors: tuple[Expr, ...]
    sign: int

    @property
    def whole(self) -> Expr:
        parts = self.factors if self.value == Const(1) and self.factors else (self.value, *self.factors)
        return _product(parts)


def _terms(expr: Expr) -> list[_Term]:
    match expr:
        case Call("sub", (Size(), Axis())):  # how many positions are left
            return [_Term(expr, (), 1)]
        case Call("add", (left, right)):
            return [*_terms(left), *_terms(right)]
        case Call("sub", (left, right)):
            return [*_terms(left), *(replace(term, sign=-term.sign) for term in _terms(right))]
        case Call("neg", (inner,)):
            return [replace(term, sign=-term.sign) for term in _terms(inner)]
        case Call("mul", (left, right)):
            for inner, by in ((left, right), (right, left)):
                terms = _terms(inner)
                if isinstance(by, Size) or (len(terms) > 1 and len(_terms(by)) == 1):
                    return [replace(term, factors=(*term.factors, by)) for term in terms]
    return [_Term(expr, (), 1)]


def _sum_of(terms: Iterable[_Term]) -> Expr:
    """The sum of terms, those of the same parentheses together."""
    groups: dict[tuple[Expr, ...], list[_Term]] = {}
    for term in terms:
        groups.setdefault(term.factors, []).append(term)
    sums: list[Expr] = []
    for factors, group in groups.items():
        total = total_of((t.sign > 0, t.value) for t in sorted(group, key=lambda term: -term.sign))
        sums.append(_product((total, *factors)))
    return total_of((True, part) for part in sums) if sums else Const(0)


def _product(factors: Iterable[Expr]) -> Expr:
    return reduce(lambda left, right: call("mul", left, right), factors)
