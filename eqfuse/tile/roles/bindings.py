"""What defines each value of a kernel, how often it is read, and by what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from eqfuse.tile.nodes import Constant, For, Kernel, Let, Op, Value
from eqfuse.tile.walk import nested, operands, reads

Readers = Mapping[str, list[tuple[Value | None, Op]]]
"""What reads a value, by its name: a value and its op, or no value where loops carry it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Bindings:
    """By the names of values: the ops that define them, how often they are read, and what reads them."""

    ops: Mapping[str, Op]
    uses: Counter[str]
    readers: Readers


def bindings_of(kernel: Kernel) -> Bindings:
    ops = {let.value.name: let.op for let in _lets(kernel)}
    return Bindings(ops, Counter(value.name for value in reads(kernel.body)), _readers(kernel))


def found_in(kernel: Kernel, find: Callable[[Value, Op], T | None]) -> dict[str, T]:
    """What is found for values of a kernel, by their names."""
    pairs = ((let.value.name, find(let.value, let.op)) for let in _lets(kernel))
    return {name: found for name, found in pairs if found is not None}


def _lets(kernel: Kernel) -> Iterator[Let]:
    return (stmt for stmt in nested(kernel.body) if isinstance(stmt, Let))


def _readers(kernel: Kernel) -> Readers:
    found: dict[str, list[tuple[Value | None, Op]]] = {}
    for stmt in nested(kernel.body):
        if isinstance(stmt, Let):
            for operand in operands(stmt.op):
                found.setdefault(operand.name, []).append((stmt.value, stmt.op))
        elif isinstance(stmt, For):
            for item in stmt.carried:
                for value in (item.init, item.next):
                    found.setdefault(value.name, []).append((None, Constant(0)))
    return found
