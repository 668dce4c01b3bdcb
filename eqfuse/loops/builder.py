"""Statements in, a kernel body out: every reduction named, and placed as far outside as it can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from eqfuse.errors import ScheduleError
from eqfuse.loops.check import NestError
from eqfuse.loops.nodes import Carried, Let, Loop, Stmt, Store
from eqfuse.loops.share import PLACEHOLDER, axes_in_order, worth_keeping
from eqfuse.names import Names
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Expr,
    Local,
    Reduce,
    children,
    free_axes,
    rebuild,
    substitute_axes,
    walk,
)


@dataclass
class _Block:
    """One level of the nest under construction. `depths` of the names that it defines are in the builder."""

    axis: str | None
    unit: bool
    stmts: list[Stmt] = field(default_factory=list)
    placed: dict[Expr, Expr] = field(default_factory=dict)


class Builder:
    """Builds the body of one kernel.

    `aliases` maps renamed axes to the axes whose extent they have; the builder adds to it. `axes`
    are the axis names that a fresh one must avoid.
    """

    def __init__(self, parallel: tuple[str, ...], axes: set[str], aliases: dict[str, str]) -> None:
        self.parallel = parallel
        self._axes = axes
        self._aliases = aliases
        self._blocks = [_Block(axis=None, unit=False)]
        self._depths: dict[str, int] = {}
        self._temporaries = 0

    @property
    def body(self) -> tuple[Stmt, ...]:
        """The statements so far; all loops must be closed."""
        (block,) = self._blocks
        return tuple(block.stmts)

    def dims(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of the axes that a value has a component for here: not parallel, not a single position."""
        points = self._points()
        return tuple(axis for axis in axes if axis not in points)

    def _points(self) -> frozenset[str]:
        return frozenset(self.parallel) | {block.axis for block in self._blocks if block.unit and block.axis}

    def let(self, name: str, axes: tuple[str, ...], expr: Expr) -> None:
        """`name[axes] = expr` in the innermost block."""
        value = self._place(expr, len(self._blocks) - 1)
        self._define(name, self.dims(axes), value, len(self._blocks) - 1)

    def fold(self, name: str, axes: tuple[str, ...], op: str, axis: str, body: Expr) -> None:
        """`name[axes] = op over axis of body`: over the tile in a loop along it, else over the whole axis."""
        depth = len(self._blocks) - 1
        value = Reduce(op, axis, self._place(body, depth))
        self._define(name, self._ordered(value, axes), value, depth)

    def store(
        self, tensor: str, axes: tuple[str, ...], expr: Expr, index: tuple[Expr, ...] | None = None
    ) -> None:
        """`tensor[axes] = expr` in the innermost block; an `index` says which element that is, where it is another."""
        value = self._place(expr, len(self._blocks) - 1)
        index = index or tuple(Axis(axis) for axis in axes)
        free = frozenset[str]().union(*map(free_axes, index))
        dims = tuple(axis for axis in self.dims(axes) if axis in free)
        self._blocks[-1].stmts.append(Store(tensor, index, dims, value))

    @contextmanager
    def loop(
        self,
        axis: str,
        start: Expr,
        stop: Expr,
        carried: tuple[Carried, ...] = (),
        unit: bool = False,
        shard: str | None = None,
    ) -> Iterator[None]:
        """Everything built inside the `with` is the body of a loop; carried values stay readable after it."""
        self._blocks.append(_Block(axis, unit))
        depth = len(self._blocks) - 1
        for value in carried:
            self._depths[value.name] = depth
        yield
        block = self._blocks.pop()
        for stmt in block.stmts:
            if isinstance(stmt, Let):
                del self._depths[stmt.name]
        for value in carried:
            self._depths[value.name] = depth - 1
        self._blocks[-1].stmts.append(Loop(axis, start, stop, unit, carried, tuple(block.stmts), shard))

    def _define(self, name: str, dims: tuple[str, ...], value: Expr, depth: int) -> Local:
        self._depths[name] = depth
        self._blocks[depth].stmts.append(Let(name, dims, value))
        return Local(name, dims)

    def _temporary(self, value: Expr, depth: int) -> Local:
        self._temporaries += 1
        name = f"{PLACEHOLDER}{self._temporaries}"
        return self._define(name, self._ordered(value, ()), value, depth)

    def _ordered(self, value: Expr, preferred: tuple[str, ...]) -> tuple[str, ...]:
        found = self.dims(axes_in_order(value))
        return tuple(a for a in preferred if a in found) + tuple(a for a in found if a not in preferred)

    def _available(self, expr: Expr, depth: int) -> int:
        """The outermost block, from `depth` outwards, where everything that `expr` reads is defined."""
        free = free_axes(expr)
        needed = [level for level in range(1, depth + 1) if self._blocks[level].axis in free]
        needed += [self._depth_of(node.name) for node in walk(expr) if isinstance(node, Local)]
        return max(needed, default=0)

    def _depth_of(self, name: str) -> int:
        if name not in self._depths:
            raise NestError(f"the plan reads {name!r} before it is computed")
        return self._depths[name]

    def _place(self, expr: Expr, depth: int) -> Expr:
        """`expr` as block `depth` can write it, with reductions and costly invariants named further out."""
        placed = self._blocks[depth].placed
        found = placed.get(expr)
        if found is None:
            found = self._placed(expr, depth)
            placed[expr] = found
        return found

    def _placed(self, expr: Expr, depth: int) -> Expr:
        match expr:
            case Local(name, dims):
                self._depth_of(name)
                return Local(name, self.dims(dims))
            case Reduce():
                return self._placed_reduction(expr, self._available(expr, depth))
            case Call() if worth_keeping(expr, self._points()):
                outer = self._available(expr, depth)
                if outer < depth:
                    return self._outer(expr, outer)
        return rebuild(expr, tuple(self._place(child, depth) for child in children(expr)))

    def _outer(self, expr: Expr, depth: int) -> Expr:
        value = self._place(expr, depth)
        if isinstance(value, Local):
            return value
        local = self._temporary(value, depth)
        self._blocks[depth].placed[expr] = local
        return local

    def _placed_reduction(self, expr: Reduce, depth: int) -> Expr:
        placed = self._blocks[depth].placed
        if expr not in placed:
            whole = self._renamed(expr, depth)
            value = Reduce(whole.op, whole.axis, self._place(whole.body, depth))
            placed[expr] = self._temporary(value, depth)
        return placed[expr]

    def _renamed(self, expr: Reduce, depth: int) -> Reduce:
        """A fold over a whole axis, under a name that does not stand for a position or a tile at `depth`."""
        standing = {*self.parallel, *(block.axis for block in self._blocks[1 : depth + 1])}
        if expr.axis not in standing:
            return expr
        alias = Names(self._axes, between="").fresh(f"{expr.axis}_all")
        try:
            body = substitute_axes(expr.body, {expr.axis: Axis(alias)})
        except ValueError as why:
            raise ScheduleError(
                f"a reduction over all of axis {expr.axis!r} depends on the position along it",
                hint="compute it in an earlier kernel: prefer='multi_pass'",
            ) from why
        self._axes.add(alias)
        self._aliases[alias] = self._aliases.get(expr.axis, expr.axis)
        return Reduce(expr.op, alias, body)
