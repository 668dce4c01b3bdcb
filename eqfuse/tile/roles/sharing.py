"""Consumers that share the columns of sums: what each computes of a body, which has those columns.

Sums of many columns, as of latent attention, whose tile of keys is that of values, fill the registers of more than one consumer
for 64 rows. So each consumer takes all rows and a part of the columns:

    s: [i, j] = dot(q, k)                  s: [i, j] = dot(q, k)                             the same in each consumer
    o: [i, e] = o + dot(p, v)       ->     o: [i, e_part] = o + dot(p, v as [j, e_part])     its part

Where they are led, one more consumer computes what has none of these columns, once for all, and gives it to the others through
rings of its own, while these multiply what it gave before:

    leader:  s = dot(q, k); p = exp2(s - m); give p         others:  o: [i, e_part] = o + dot(p given, v as [j, e_part])

Tiles that are copied stay whole, be they operands along the axis (the features of `q` and `k`) or columns (those of `v`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.extract.unsuited import Unsuited
from eqfuse.tile import nodes as ir
from eqfuse.tile.names import Fresh
from eqfuse.tile.roles.nodes import Columns, Put, Ring, Stmt, StoreShared
from eqfuse.tile.walk import defined_by, mapped, nested, operands, pruned


def shared_axis(body: Iterable[Stmt], rows: str) -> str:
    """The axis of the columns of all tiles that loops carry. Raises Unsuited."""
    carried = (c.value for stmt in nested(body) if isinstance(stmt, ir.For) for c in stmt.carried)
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
            case ir.Store(value=value) | Put(value=value) if columns.part not in value.dims:
                pass
            case ir.For(body=inner) | ir.PersistentLoop(body=inner) | ir.If(body=inner):
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
                case ir.Let(value, ir.LoadTile()) if value.name in self.copies:
                    self.whole.add(value.name)
                    yield stmt
                case ir.Let(value, ir.Align(of)) if of.name in self.whole:
                    self.whole.add(value.name)
                    yield stmt
                case ir.Let(value, op):
                    yield from self._let(value, op)
                case ir.For(axis, start, stop, carried, inner):
                    if axis == self.columns.axis:
                        raise Unsuited(f"a loop over {axis}, whose positions consumers share")
                    items = tuple(ir.Carried(*map(self._of, (c.value, c.init, c.next))) for c in carried)
                    yield ir.For(axis, start, stop, items, tuple(self.body(inner)))
                case ir.If(condition, inner, results):
                    found = tuple(ir.Result(*map(self._of, (r.value, r.then, r.otherwise))) for r in results)
                    yield ir.If(condition, tuple(self.body(inner)), found)
                case ir.Store(tensor, index, value, mask):
                    self._read(operands(stmt))
                    masked = None if mask is None else self._of(mask)
                    yield ir.Store(tensor, tuple(map(self._of, index)), self._of(value), masked)
                case _:
                    raise Unsuited(f"{type(stmt).__name__} where consumers share columns")

    def _of(self, value: ir.Value) -> ir.Value:
        """A value as a consumer has it."""
        if value.name in self.whole:
            return value
        return self._part(value)

    def _part(self, value: ir.Value) -> ir.Value:
        own = (self.columns.part if axis == self.columns.axis else axis for axis in value.dims)
        return replace(value, dims=tuple(own))

    def _read(self, values: Iterable[ir.Value]) -> None:
        for value in values:
            if value.name in self.whole and self.columns.axis in value.dims:
                raise Unsuited(f"{value.name}, whose columns consumers share, is computed with")

    def _let(self, value: ir.Value, op: ir.Op) -> Iterator[Stmt]:
        axis, part = self.columns.axis, self.columns.part
        match op:
            case ir.Dot() if op.axis == axis:
                if not {op.left.name, op.right.name} <= self.whole:
                    raise Unsuited(f"a product over {axis}, whose positions consumers share")
            case ir.Dot() if op.right.name in self.whole and axis in op.right.dims:
                own = self.fresh.like(self._part(op.right), "part")
                yield ir.Let(own, ir.Align(op.right))
                op = replace(op, right=own)
            case ir.Positions(along) | ir.Lanes(along) | ir.Bound(along) if along == axis:
                if value.dims:
                    op = replace(op, axis=part)
            case ir.ReduceTile(_, _, along) if along == axis:
                raise Unsuited(f"a reduction over {axis}, whose positions consumers share")
            case ir.NonFiniteCorrection():
                raise Unsuited("consumers that share columns, where what is stored may not be finite")
            case _:
                self._read(operands(op))
        yield ir.Let(self._of(value), mapped(op, self._of))


@dataclass(frozen=True)
class Led:
    """The bodies of the leader and of the others, and the rings of what it gives, by the names of the values."""

    leader: tuple[Stmt, ...]
    others: tuple[Stmt, ...]
    given: Mapping[str, Ring]


def led(body: Sequence[Stmt], columns: Columns, copies: Collection[str], slots: int, turn: ir.Value) -> Led:
    """A body that consumers share by columns, as one that computes what has none of them and one that is left to the others.
    What the leader gives has so many `slots`, and is given at a `turn` that the pipeline replaces. Raises Unsuited."""
    return _Leading(body, columns, copies, slots, turn).run()


class _Leading:
    def __init__(
        self, body: Sequence[Stmt], columns: Columns, copies: Collection[str], slots: int, turn: ir.Value
    ) -> None:
        self.body, self.columns, self.copies, self.slots, self.turn = body, columns, copies, slots, turn
        self.whole: set[str] = set()  # tiles in slots
        self.found: set[str] = (
            set()
        )  # what follows from products, slots or what loops carry: it is computed once
        self.given: dict[str, Ring] = {}
        self._look(body, in_loop=False)

    def run(self) -> Led:
        if not self.given:
            raise Unsuited("consumers that share columns need nothing of a leader")
        leader = tuple(self._leader(self.body))
        others = tuple(self._others(self.body))
        return Led(leader, others, self.given)

    def _is_own(self, value: ir.Value) -> bool:
        return self.columns.part in value.dims

    def _look(self, body: Iterable[Stmt], *, in_loop: bool) -> None:
        """Finds what is computed once, and which of it the others read."""
        for stmt in body:
            match stmt:
                case ir.Let(value, ir.LoadTile()) if value.name in self.copies:
                    self.whole.add(value.name)
                    continue
                case ir.Let(value, ir.Align(of)) if of.name in self.whole:
                    self.whole.add(value.name)
                    continue
                case ir.For(carried=carried, body=inner):
                    if any(isinstance(each, ir.For) for each in inner):
                        raise Unsuited("a leader of loops inside of loops")
                    self.found |= {item.value.name for item in carried}
                    self._look(inner, in_loop=True)
                    for item in carried:
                        if self._is_own(item.value) != self._is_own(item.next):
                            raise Unsuited(f"{item.value.name} is carried without its columns")
                    continue
                case ir.If(body=inner, results=results):
                    if any(self._is_own(v) for each in nested(inner) for v in defined_by(each)):
                        raise Unsuited("a branch that has columns which consumers share")
                    self._look(inner, in_loop=in_loop)
                    self.found |= {result.value.name for result in results}
                    continue
            read = operands(stmt)
            once = isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Dot)
            if once or any(v.name in self.found | self.whole for v in read):
                self.found |= {value.name for value in defined_by(stmt)}
            if self._has_columns(stmt):
                for value in read:
                    if value.name in self.found and not self._is_own(value) and value.name not in self.whole:
                        self._gives(value, in_loop)

    def _has_columns(self, stmt: Stmt) -> bool:
        if isinstance(stmt, ir.Store):
            return self._is_own(stmt.value)
        return any(map(self._is_own, defined_by(stmt)))

    def _gives(self, value: ir.Value, in_loop: bool) -> None:
        if not value.dims:
            raise Unsuited(f"{value.name} is computed by a leader, and is no tile")
        self.given[value.name] = Ring(
            f"{value.name}_given", "", value, self.slots if in_loop else 1, 1, in_loop
        )

    def _leader(self, body: Iterable[Stmt]) -> Iterator[Stmt]:
        for stmt in body:
            match stmt:
                case ir.For(axis, start, stop, carried, inner):
                    items = tuple(item for item in carried if not self._is_own(item.value))
                    yield ir.For(axis, start, stop, items, tuple(self._leader(inner)))
                case _ if not self._has_columns(stmt):
                    yield stmt
            for value in defined_by(stmt):
                if value.name in self.given:
                    yield StoreShared(self.given[value.name].name, self.turn, value)

    def _others(self, body: Iterable[Stmt]) -> Iterator[Stmt]:
        """Without what is computed once: what is given is loaded from its slot."""
        for stmt in body:
            for value in defined_by(stmt):
                if value.name in self.given:
                    yield ir.Let(value, ir.LoadTile(self.given[value.name].name, (), None, 0.0))
            match stmt:
                case ir.For(axis, start, stop, carried, inner):
                    items = tuple(item for item in carried if self._is_own(item.value))
                    if items:
                        yield ir.For(axis, start, stop, items, tuple(self._others(inner)))
                case ir.If():
                    pass
                case ir.Store() if not self._is_own(stmt.value):
                    pass
                case _ if self._has_columns(stmt) or not any(v.name in self.found for v in defined_by(stmt)):
                    yield stmt
