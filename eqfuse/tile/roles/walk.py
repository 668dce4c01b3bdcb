"""Walking roles: what statements read and define, and values under other names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from eqfuse.tile.nodes import Carried, Let, Store, Value
from eqfuse.tile.roles.nodes import (
    Along,
    At,
    Await,
    Clear,
    Column,
    Fill,
    Free,
    Give,
    Index,
    Issue,
    Items,
    Look,
    Loop,
    Meet,
    Put,
    Read,
    Result,
    Stmt,
    View,
    Wait,
    When,
)
from eqfuse.tile.walk import operands, with_operands


def nested(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement of a body, those inside loops and branches included, outer ones first."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, Loop | Items | When):
            yield from nested(stmt.body)


def read_by(stmt: Stmt) -> tuple[Value, ...]:
    """The values that a statement itself reads, not those inside of it."""
    match stmt:
        case Let(_, op):
            return operands(op)
        case Loop(_, start, stop, carried, _):
            return (start, stop, *(v for item in carried for v in (item.init, item.next)))
        case Items(carried, _):
            return tuple(v for item in carried for v in (item.init, item.next))
        case When(condition, _, results):
            return (condition, *(v for result in results for v in (result.then, result.otherwise)))
        case At(_, start):
            return (start,)
        case Fill(_, turn, index):
            return (turn, *_of_index(index))
        case (
            Wait(turn=turn)
            | Free(turn=turn)
            | Meet(turn)
            | Read(view=View(turn=turn))
            | Look(view=View(turn=turn))
            | Clear(View(turn=turn))
        ):
            return (turn,)
        case Column(_, tile, place):
            return (tile, place)
        case Give(_, turn, value):
            return (turn, value)
        case Issue(_, left, right, _, accumulator):
            first = left.turn if isinstance(left, View) else left
            return (first, right.turn, *(() if accumulator is None else (accumulator,)))
        case Await(_, pending, _):
            return (pending,)
        case Put(_, _, index, value):
            return (*_of_index(index), value)
        case Store(_, index, value, mask):
            return (*index, value, *(() if mask is None else (mask,)))


def _of_index(index: Index) -> tuple[Value, ...]:
    found = (place.offset if isinstance(place, Along) else place for place in index)
    return tuple(value for value in found if value is not None)


def defined_by(stmt: Stmt) -> tuple[Value, ...]:
    """The values that a statement defines for those after it."""
    match stmt:
        case Let(value, _) | Read(value, _) | Await(value, _, _) | Look(value, _) | Column(value, _, _):
            return (value,)
        case Issue(pending, _, _, _, _):
            return (pending,)
        case Loop(carried=carried) | Items(carried=carried):
            return tuple(item.value for item in carried)
        case When(results=results):
            return tuple(result.value for result in results)
        case _:
            return ()


def names_in(body: Iterable[Stmt]) -> set[str]:
    """Names of all values that a body defines or reads."""
    return {value.name for stmt in nested(body) for value in (*read_by(stmt), *defined_by(stmt))}


def renamed(stmt: Stmt, names: Mapping[str, Value]) -> Stmt:
    """The statement with other values in the place of those of these names, defined or read."""

    def of(value: Value) -> Value:
        return names.get(value.name, value)

    def maybe(value: Value | None) -> Value | None:
        return None if value is None else of(value)

    def places(index: Index) -> Index:
        return tuple(Along(p.axis, maybe(p.offset)) if isinstance(p, Along) else of(p) for p in index)

    def view(old: View) -> View:
        return replace(old, turn=of(old.turn))

    match stmt:
        case Let(value, op):
            return Let(of(value), with_operands(op, {v.name: of(v) for v in operands(op)}))
        case Loop(axis, start, stop, carried, body):
            items = tuple(Carried(of(c.value), of(c.init), of(c.next)) for c in carried)
            return Loop(axis, of(start), of(stop), items, tuple(renamed(s, names) for s in body))
        case Items(carried, body):
            items = tuple(Carried(of(c.value), of(c.init), of(c.next)) for c in carried)
            return Items(items, tuple(renamed(s, names) for s in body))
        case When(condition, body, results):
            found = tuple(Result(of(r.value), of(r.then), of(r.otherwise)) for r in results)
            return When(of(condition), tuple(renamed(s, names) for s in body), found)
        case At(axis, start):
            return At(axis, of(start))
        case Fill(ring, turn, index):
            return Fill(ring, of(turn), places(index))
        case Wait():
            return replace(stmt, turn=of(stmt.turn))
        case Free(ring, turn):
            return Free(ring, of(turn))
        case Give(ring, turn, value):
            return Give(ring, of(turn), of(value))
        case Read(value, old):
            return Read(of(value), view(old))
        case Look(value, old):
            return Look(of(value), view(old))
        case Clear(old):
            return Clear(view(old))
        case Meet(turn):
            return Meet(of(turn))
        case Column(value, tile, place):
            return Column(of(value), of(tile), of(place))
        case Issue(pending, left, right, axis, accumulator):
            first = view(left) if isinstance(left, View) else of(left)
            return Issue(of(pending), first, view(right), axis, maybe(accumulator))
        case Await(value, pending, behind):
            return Await(of(value), of(pending), behind)
        case Put(staging, tensor, index, value):
            return Put(staging, tensor, places(index), of(value))
        case Store(tensor, index, value, mask):
            return Store(tensor, tuple(map(of, index)), of(value), maybe(mask))


def pruned(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The body without values that nothing needs. What waits, copies, frees or stores is needed."""
    alive: set[str] = set()
    reads: dict[str, list[Value]] = {}
    roots: list[Value] = []
    for stmt in nested(body):
        match stmt:
            case Let(value, _):
                reads[value.name] = list(read_by(stmt))
            case Loop(_, start, stop, carried, _):
                roots += (start, stop)
                for item in carried:
                    reads[item.value.name] = [item.init, item.next]
            case Items(carried, _):
                for item in carried:
                    reads[item.value.name] = [item.init, item.next]
            case When(condition, _, results):
                roots.append(condition)
                for result in results:
                    reads[result.value.name] = [result.then, result.otherwise]
            case _:
                roots += read_by(stmt)
                for value in defined_by(stmt):
                    reads[value.name] = []
    while roots:
        value = roots.pop()
        if value.name not in alive:
            alive.add(value.name)
            roots += reads.get(value.name, [])
    return _kept(body, alive)


def _kept(body: Iterable[Stmt], alive: set[str]) -> tuple[Stmt, ...]:
    kept: list[Stmt] = []
    for stmt in body:
        match stmt:
            case Let(value, _):
                if value.name in alive:
                    kept.append(stmt)
            case Loop(axis, start, stop, carried, inner):
                items = tuple(item for item in carried if item.value.name in alive)
                statements = _kept(inner, alive)
                if items or statements:
                    kept.append(Loop(axis, start, stop, items, statements))
            case Items(carried, inner):
                alive_items = tuple(item for item in carried if item.value.name in alive)
                kept.append(Items(alive_items, _kept(inner, alive)))
            case When(condition, inner, results):
                found = tuple(result for result in results if result.value.name in alive)
                statements = _kept(inner, alive)
                if found or statements:
                    kept.append(When(condition, statements, found))
            case _:
                kept.append(stmt)
    return tuple(kept)
