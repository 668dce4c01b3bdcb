"""Traversal of tile programs, of their roles, and of the C++ tree: what ops and statements read and define.

Nothing here names a node: the annotations of a node's fields say which of them hold values (`HOLDS`), its class which of those it
defines (`DEFINES`), and a field `body` has statements inside.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from eqfuse.tile.nodes import Let, Op, Value

N = TypeVar("N")
HOLDS = re.compile(r"\b(Value|Op|Carried|Result|Index|Along|View)\b")
"""What the annotation of a field names that holds values, or nodes that do."""


CARRIES = ("carried", "results")
"""Fields of a loop and of a branch whose items stand for a value after it."""


_holding: dict[type, tuple[str, ...]] = {}
_reading: dict[type, tuple[str, ...]] = {}


def _fields(node: Any) -> tuple[str, ...]:
    """The fields that hold values."""
    kind = type(node)
    if kind not in _holding:
        _holding[kind] = tuple(field.name for field in fields(kind) if HOLDS.search(str(field.type)))
    return _holding[kind]


def _defines(node: object) -> tuple[str, ...]:
    return getattr(node, "DEFINES", ())


def _reads_of(node: object) -> tuple[str, ...]:
    """The fields that hold values which the node reads."""
    kind = type(node)
    found = _reading.get(kind)
    if found is None:
        found = _reading[kind] = tuple(name for name in _fields(node) if name not in _defines(node))
    return found


def operands(node: object) -> tuple[Value, ...]:
    """The values that an op or a statement reads itself, not those inside of its body, in the order of its fields."""
    found: list[Value] = []
    for name in _reads_of(node):
        _read(getattr(node, name), found)
    return tuple(found)


def _read(held: Any, found: list[Value]) -> None:
    """Adds the values that a field of a node holds. Passes ask this most often of all that they ask."""
    if type(held) is Value:
        found.append(held)
    elif type(held) is tuple:
        for part in held:
            _read(part, found)
    elif held is not None:
        for name in _reads_of(held):
            _read(getattr(held, name), found)


def defined_by(stmt: object) -> tuple[Value, ...]:
    """The values that a statement defines for those after it."""
    own = [getattr(stmt, name) for name in _defines(stmt)]
    return (*own, *(item.value for item in carried_by(stmt)))


def carried_by(stmt: object) -> tuple[Any, ...]:
    """The values that a loop carries, or the results of a branch."""
    return tuple(item for name in CARRIES for item in getattr(stmt, name, ()))


def mapped(node: N, change: Callable[[Value], Value]) -> N:
    """An op or a statement with every value changed, read or defined, those inside of its body included."""
    old: Any = node
    made = {name: _mapped(getattr(old, name), change) for name in _fields(old)}
    if hasattr(old, "body"):
        made["body"] = tuple(mapped(stmt, change) for stmt in old.body)
    return replace(old, **made) if made else node


def renamed(node: N, names: Mapping[str, Value]) -> N:
    """An op or a statement with other values in the place of those of these names."""
    return mapped(node, lambda value: names.get(value.name, value))


def _mapped(held: Any, change: Callable[[Value], Value]) -> Any:
    match held:
        case None:
            return None
        case Value():
            return change(held)
        case tuple():
            return tuple(_mapped(part, change) for part in held)
        case _:
            return mapped(held, change)


def nested(body: Iterable[N]) -> Iterator[N]:
    """Every statement of a body, those inside of loops and branches included, outer ones first."""
    for stmt in body:
        yield stmt
        if inside := getattr(stmt, "body", ()):
            yield from nested(inside)


def defined(body: Iterable[object]) -> Iterator[Value]:
    """Every value that a body defines, carried ones included."""
    return (value for stmt in nested(body) for value in defined_by(stmt))


def reads(body: Iterable[object]) -> Iterator[Value]:
    """Every value that a body reads, once for each time that it does."""
    return (value for stmt in nested(body) for value in operands(stmt))


def lets_of(body: Iterable[object]) -> Iterator[Let]:
    """Every `Let` of a body."""
    return (stmt for stmt in nested(body) if isinstance(stmt, Let))


def ops_of(body: Iterable[object]) -> dict[str, Op]:
    """What defines each value of a body, by the values' names."""
    return {let.value.name: let.op for let in lets_of(body)}


def uses_of(body: Iterable[object]) -> Counter[str]:
    """How often a body reads each value, by the values' names."""
    return Counter(value.name for value in reads(body))


def used(body: Iterable[object]) -> set[str]:
    """Names of every value that a body reads."""
    return {value.name for value in reads(body)}


def pruned(body: tuple[N, ...]) -> tuple[N, ...]:
    """Dead code elimination: the body without ops, carried values and loops that no other statement needs.

    Every statement that is not a `Let`, a loop or a branch has an effect, and is needed.
    """
    needs: dict[str, tuple[Value, ...]] = {}
    waiting: list[Value] = []
    for stmt in nested(body):
        if isinstance(stmt, Let):
            needs[stmt.value.name] = operands(stmt)
        elif hasattr(stmt, "body"):
            bounds = _bounds(stmt)
            for item in carried_by(stmt):
                needs[item.value.name] = (*bounds, *operands(item))
            if _has_effect(stmt.body):
                waiting += bounds
        else:
            waiting += operands(stmt)
            needs.update({value.name: () for value in defined_by(stmt)})
    alive: set[str] = set()
    while waiting:
        value = waiting.pop()
        if value.name not in alive:
            alive.add(value.name)
            waiting += needs.get(value.name, ())
    return _kept(body, alive)


def _bounds(stmt: object) -> tuple[Value, ...]:
    """What a loop or a branch reads itself, but for what it carries."""
    found: list[Value] = []
    for name in _fields(stmt):
        if name not in CARRIES:
            _read(getattr(stmt, name), found)
    return tuple(found)


def _has_effect(body: Iterable[object]) -> bool:
    return any(not isinstance(stmt, Let) and not hasattr(stmt, "body") for stmt in nested(body))


def _kept(body: tuple[Any, ...], alive: set[str]) -> tuple[Any, ...]:
    kept: list[Any] = []
    for stmt in body:
        if isinstance(stmt, Let):
            if stmt.value.name in alive:
                kept.append(stmt)
        elif hasattr(stmt, "body"):
            made = {
                name: tuple(item for item in getattr(stmt, name) if item.value.name in alive)
                for name in CARRIES
                if hasattr(stmt, name)
            }
            inside = _kept(stmt.body, alive)
            if any(made.values()) or _has_effect(inside):
                kept.append(replace(stmt, body=inside, **made))
        else:
            kept.append(stmt)
    return tuple(kept)
