"""Walking tile programs: what ops read, and what bodies define and use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eqfuse.tile.nodes import (
    Align,
    Bound,
    Cast,
    Dot,
    Elementwise,
    FoldTile,
    For,
    Let,
    LoadTile,
    MergeTile,
    Op,
    RankTile,
    ReduceTile,
    Stmt,
    Store,
    Value,
)


def operands(op: Op) -> tuple[Value, ...]:
    """The values that an op reads."""
    match op:
        case Elementwise(_, args) | FoldTile(_, args, _) | RankTile(_, args, _, _):
            return args
        case MergeTile(_, left, right, _):
            return (*left, *right)
        case Bound(_, stop):
            return (stop,)
        case Align(value) | Cast(value) | ReduceTile(_, value, _):
            return (value,)
        case LoadTile(_, index, mask, _):
            return index if mask is None else (*index, mask)
        case Dot(left, right, _, accumulator, left_mask, right_mask):
            return (left, right, *(v for v in (accumulator, left_mask, right_mask) if v is not None))
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


def reads(body: Iterable[Stmt]) -> Iterator[Value]:
    """Every value that a body reads, once for each time that it does."""
    for stmt in nested(body):
        match stmt:
            case Let(_, op):
                yield from operands(op)
            case For(_, start, stop, carried, _, _):
                yield from (start, stop)
                for item in carried:
                    yield from (item.init, item.next)
            case Store(_, index, value, mask):
                yield from (*index, value, *(() if mask is None else (mask,)))


def used(body: Iterable[Stmt]) -> set[str]:
    """Names of every value that a body reads."""
    return {value.name for value in reads(body)}
