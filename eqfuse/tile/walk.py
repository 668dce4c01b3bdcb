"""Walking tile programs: what ops read, and what bodies define and use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eqfuse.tile.nodes import (
    Align,
    Bound,
    Cast,
    Dot,
    Elementwise,
    For,
    Let,
    LoadTile,
    Op,
    ReduceTile,
    Stmt,
    Store,
    Value,
)


def operands(op: Op) -> tuple[Value, ...]:
    """The values that an op reads."""
    match op:
        case Elementwise(_, args):
            return args
        case Bound(_, stop):
            return (stop,)
        case Align(value) | Cast(value) | ReduceTile(_, value, _):
            return (value,)
        case LoadTile(_, index, mask, _):
            return index if mask is None else (*index, mask)
        case Dot(left, right, _, accumulator):
            return (left, right) if accumulator is None else (left, right, accumulator)
        case _:
            return ()


def nested(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement of a body, those inside loops included, outer ones first."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, For):
            yield from nested(stmt.body)


def defined(body: Iterable[Stmt]) -> Iterator[Value]:
    """Every value that a body defines, carried ones included."""
    for stmt in nested(body):
        match stmt:
            case Let(value, _):
                yield value
            case For(carried=carried):
                yield from (item.value for item in carried)


def used(body: Iterable[Stmt]) -> set[str]:
    """Names of every value that a body reads."""
    names: set[str] = set()
    for stmt in nested(body):
        match stmt:
            case Let(_, op):
                names.update(value.name for value in operands(op))
            case For(_, start, stop, carried, _, _):
                names.update((start.name, stop.name))
                names.update(name for item in carried for name in (item.init.name, item.next.name))
            case Store(_, index, value, mask):
                names.update(v.name for v in (*index, value, *(() if mask is None else (mask,))))
    return names
