"""Walking tile programs: what ops read, and what bodies define and use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from eqfuse.tile.nodes import (
    Align,
    Bound,
    Cast,
    Dot,
    Elementwise,
    FinitePart,
    FoldTile,
    For,
    Let,
    LoadTile,
    MergeTile,
    Op,
    RankTile,
    ReduceTile,
    RestOfProduct,
    Search,
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
        case Align(value) | Cast(value) | FinitePart(value) | ReduceTile(_, value, _):
            return (value,)
        case LoadTile(_, index, mask, _):
            return index if mask is None else (*index, mask)
        case Search(_, index, _, stop, target, _):
            return (*index, stop, target)
        case Dot(left, right, _, other, left_mask, right_mask) | RestOfProduct(
            left, right, _, other, left_mask, right_mask
        ):
            return (left, right, *(v for v in (other, left_mask, right_mask) if v is not None))
        case _:
            return ()


def with_operands(op: Op, read: Mapping[str, Value]) -> Op:
    """The op of other operands, given by the names of its own."""

    def many(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(read[value.name] for value in values)

    def maybe(value: Value | None) -> Value | None:
        return None if value is None else read[value.name]

    match op:
        case Elementwise(_, args):
            return replace(op, args=many(args))
        case FoldTile(_, values, _) | RankTile(_, values, _, _):
            return replace(op, values=many(values))
        case MergeTile(_, left, right, _):
            return replace(op, left=many(left), right=many(right))
        case Bound(_, stop):
            return replace(op, stop=read[stop.name])
        case Align(value) | Cast(value) | FinitePart(value) | ReduceTile(_, value, _):
            return replace(op, value=read[value.name])
        case LoadTile(_, index, mask, _):
            return replace(op, index=many(index), mask=maybe(mask))
        case Search(_, index, _, stop, target, _):
            return replace(op, index=many(index), stop=read[stop.name], target=read[target.name])
        case Dot():
            return replace(
                op,
                left=read[op.left.name],
                right=read[op.right.name],
                accumulator=maybe(op.accumulator),
                left_mask=maybe(op.left_mask),
                right_mask=maybe(op.right_mask),
            )
        case RestOfProduct():
            return replace(
                op,
                left=read[op.left.name],
                right=read[op.right.name],
                total=read[op.total.name],
                left_mask=maybe(op.left_mask),
                right_mask=maybe(op.right_mask),
            )
        case _:
            return op


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
