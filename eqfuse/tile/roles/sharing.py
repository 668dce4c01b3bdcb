"""Consumers that share the columns of sums: what each computes of a body, which has those columns.

Sums of many columns, as of latent attention, whose tile of keys is that of values, fill the registers of more than one consumer
for 64 rows. So each consumer takes all rows and a part of the columns:

    s: [i, j] = dot(q, k)                  s: [i, j] = dot(q, k)                             the same in each consumer
    o: [i, e] = o + dot(p, v)       ->     o: [i, e_part] = o + dot(p, v as [j, e_part])     its part

Tiles that are copied stay whole, be they operands along the axis (the features of `q` and `k`) or columns (those of `v`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from eqfuse.tile.nodes import (
    Align,
    Bound,
    Carried,
    Dot,
    Lanes,
    Let,
    LoadTile,
    Op,
    Positions,
    ReduceTile,
    RestOfProduct,
    Store,
    Value,
)
from eqfuse.tile.roles.names import Fresh
from eqfuse.tile.roles.nodes import Columns, Items, Loop, Put, Result, Stmt, When
from eqfuse.tile.roles.unsuited import Unsuited
from eqfuse.tile.roles.walk import nested, pruned, read_by
from eqfuse.tile.walk import operands, with_operands


def shared_axis(body: Iterable[Stmt], rows: str) -> str:
    """The axis of the columns of all tiles that loops carry. Raises Unsuited."""
    carried = (c.value for stmt in nested(body) if isinstance(stmt, Loop) for c in stmt.carried)
    axes = {value.dims[1] for value in carried if len(value.dims) == 2 and value.dims[0] == rows}
    if len(axes) != 1:
        raise Unsuited(f"loops carry tiles of {len(axes)} kinds of columns")
    return axes.pop()


def shared(body: Sequence[Stmt], columns: Columns, copies: Collection[str], fresh: Fresh) -> tuple[Stmt, ...]:
    """The body of a consumer that has a part of the columns; `copies` are the loads that the copy engine does. Raises
    Unsuited."""
    return tuple(_Sharing(columns, copies, fresh).body(body))


def of_part(body: Sequence[Stmt], columns: Columns, part: int) -> tuple[Stmt, ...]:
    """The body of one of the consumers: what has no such columns the first one stores."""
    return pruned(tuple(_stored_once(body, columns))) if part else tuple(body)


def _stored_once(body: Iterable[Stmt], columns: Columns) -> Iterator[Stmt]:
    for stmt in body:
        match stmt:
            case Store(value=value) | Put(value=value) if columns.part not in value.dims:
                pass
            case Loop(body=inner) | Items(body=inner) | When(body=inner):
                yield replace(stmt, body=tuple(_stored_once(inner, columns)))
            case _:
                yield stmt


class _Sharing:
    def __init__(self, columns: Columns, copies: Collection[str], fresh: Fresh) -> None:
        self.columns, self.copies, self.fresh = columns, copies, fresh
        self.whole: set[str] = set()  # tiles in slots

    def body(self, body: Iterable[Stmt]) -> Iterator[Stmt]:
        for stmt in body:
            match stmt:
                case Let(value, LoadTile()) if value.name in self.copies:
                    self.whole.add(value.name)
                    yield stmt
                case Let(value, Align(of)) if of.name in self.whole:
                    self.whole.add(value.name)
                    yield stmt
                case Let(value, op):
                    yield from self._let(value, op)
                case Loop(axis, start, stop, carried, inner):
                    if axis == self.columns.axis:
                        raise Unsuited(f"a loop over {axis}, whose positions consumers share")
                    items = tuple(Carried(*map(self._of, (c.value, c.init, c.next))) for c in carried)
                    yield Loop(axis, start, stop, items, tuple(self.body(inner)))
                case When(condition, inner, results):
                    found = tuple(Result(*map(self._of, (r.value, r.then, r.otherwise))) for r in results)
                    yield When(condition, tuple(self.body(inner)), found)
                case Store(tensor, index, value, mask):
                    self._read(read_by(stmt))
                    masked = None if mask is None else self._of(mask)
                    yield Store(tensor, tuple(map(self._of, index)), self._of(value), masked)
                case _:
                    raise Unsuited(f"{type(stmt).__name__} where consumers share columns")

    def _of(self, value: Value) -> Value:
        """A value as a consumer has it."""
        if value.name in self.whole:
            return value
        own = (self.columns.part if axis == self.columns.axis else axis for axis in value.dims)
        return replace(value, dims=tuple(own))

    def _read(self, values: Iterable[Value]) -> None:
        for value in values:
            if value.name in self.whole and self.columns.axis in value.dims:
                raise Unsuited(f"{value.name}, whose columns consumers share, is computed with")

    def _let(self, value: Value, op: Op) -> Iterator[Stmt]:
        axis, part = self.columns.axis, self.columns.part
        match op:
            case Dot() if op.axis == axis:
                if not {op.left.name, op.right.name} <= self.whole:
                    raise Unsuited(f"a product over {axis}, whose positions consumers share")
            case Dot() if op.right.name in self.whole and axis in op.right.dims:
                own = replace(op.right, dims=tuple(part if d == axis else d for d in op.right.dims))
                own = self.fresh.like(own, "part")
                yield Let(own, Align(op.right))
                op = replace(op, right=own)
            case Positions(along) | Lanes(along) | Bound(along) if along == axis:
                if value.dims:
                    op = replace(op, axis=part)
            case ReduceTile(_, _, along) if along == axis:
                raise Unsuited(f"a reduction over {axis}, whose positions consumers share")
            case RestOfProduct():
                raise Unsuited("consumers that share columns, where what is stored may not be finite")
            case _:
                self._read(operands(op))
        names = {v.name: self._of(v) for v in operands(op)}
        yield Let(self._of(value), with_operands(op, names))
