"""Dropping what no store depends on: ops, carried values, and loops left without a purpose."""

from __future__ import annotations

from collections.abc import Iterable

from eqfuse.tile.nodes import Carried, For, Let, Stmt, Store, Value
from eqfuse.tile.walk import nested, operands


def pruned(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """`body` with only the statements that a store depends on."""
    reads: dict[str, tuple[Value, ...]] = {}
    roots: list[Value] = []
    for stmt in nested(body):
        match stmt:
            case Let(value, op):
                reads[value.name] = operands(op)
            case For(_, start, stop, carried, inner, _):
                for item in carried:
                    reads[item.value.name] = (start, stop, item.init, item.next)
                if any(isinstance(part, Store) for part in nested(inner)):
                    roots += (start, stop)
            case Store(_, index, value, mask):
                roots += (*index, value, *(() if mask is None else (mask,)))
    alive: set[str] = set()
    while roots:
        value = roots.pop()
        if value.name not in alive:
            alive.add(value.name)
            roots += reads[value.name]
    return _kept(body, alive)


def _kept(body: Iterable[Stmt], alive: set[str]) -> tuple[Stmt, ...]:
    kept: list[Stmt] = []
    for stmt in body:
        match stmt:
            case Let(value, _):
                if value.name in alive:
                    kept.append(stmt)
            case For(axis, start, stop, carried, inner, masked):
                live: tuple[Carried, ...] = tuple(item for item in carried if item.value.name in alive)
                statements = _kept(inner, alive)
                if live or any(isinstance(part, Store) for part in nested(statements)):
                    kept.append(For(axis, start, stop, live, statements, masked))
            case Store():
                kept.append(stmt)
    return tuple(kept)
