"""Values as JSON, and back: frozen dataclasses of a closed list, and what they are made of.

    value ::= null | true | 1 | 1.5 | "text"       as they are; NaN and infinities as Python's json writes them
            | [value, ...]                         a tuple
            | {"map": [[value, value], ...]}       a mapping, in its order
            | {"set": [value, ...]}                a set, sorted
            | {"node": 3}                          an instance: a row of the table
    row   ::= ["Class", value, ...]                one value per field; refers to earlier rows alone

A row stands once, however often it is read, so that expressions stay as small as they are. Equal values have equal
text. Reading makes instances of the listed classes and nothing else; each value is checked against its field's type.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Hint = Any
"""A type as an annotation has it."""

_PLAIN = (type(None), bool, int, float, str)


class Uncodable(Exception):
    """What a value holds that has no text here."""


class Malformed(Exception):
    """Why a text is none of a value."""


class Codec:
    """Of values that are made of these classes."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = {each.__name__: each for each in classes}
        if not all(map(is_dataclass, self._classes.values())):
            raise ValueError("only dataclasses have a text")

    def encode(self, value: object) -> dict[str, Any]:
        """The value as JSON. Raises Uncodable."""
        writer = _Writer(self._classes)
        root = writer.value(value)
        return {"rows": writer.rows, "root": root}

    def decode(self, text: object, hint: Hint) -> Any:
        """The value of this type that JSON stands for. Raises Malformed."""
        if not isinstance(text, dict) or not isinstance(text.get("rows"), list) or "root" not in text:
            raise Malformed("it has no rows and no root")
        reader = _Reader(self._classes)
        for row in text["rows"]:
            reader.row(row)
        return reader.checked(reader.value(text["root"]), hint, "the value")


class _Writer:
    def __init__(self, classes: Mapping[str, type]) -> None:
        self.classes = classes
        self.rows: list[list[Any]] = []
        self._numbers: dict[str, int] = {}
        self._seen: dict[int, tuple[object, Any]] = {}

    def value(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, tuple):
            return [self.value(part) for part in value]
        if isinstance(value, Mapping):
            return {"map": [[self.value(key), self.value(part)] for key, part in value.items()]}
        if isinstance(value, frozenset):
            return {"set": sorted((self.value(part) for part in value), key=json.dumps)}
        return self._node(value)

    def _node(self, value: object) -> Any:
        found = self._seen.get(id(value))
        if found is None:
            for part in _below(value):  # what is deep is written from below: no recursion
                if id(part) not in self._seen:
                    self._seen[id(part)] = part, self._written(part)
            found = self._seen[id(value)]
        return found[1]

    def _written(self, value: Any) -> Any:
        name = type(value).__name__
        if self.classes.get(name) is not type(value):
            raise Uncodable(f"a {name} is none of the classes")
        row = [name, *(self.value(getattr(value, field)) for field in _names(type(value)))]
        text = json.dumps(row)
        if text not in self._numbers:
            self._numbers[text] = len(self.rows)
            self.rows.append(row)
        return {"node": self._numbers[text]}


def _below(root: Any) -> list[Any]:
    """The instances that a value is made of, itself included, what is below one before it."""
    found: list[Any] = []
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        value, expanded = stack.pop()
        if expanded:
            found.append(value)
            continue
        if type(value) in _PLAIN or id(value) in seen:
            continue
        if isinstance(value, tuple | frozenset):
            stack += [(part, False) for part in value]
        elif isinstance(value, Mapping):
            stack += [(part, False) for pair in value.items() for part in pair]
        else:
            seen.add(id(value))
            stack.append((value, True))
            stack += [(getattr(value, field), False) for field in _names(type(value))]
    return found


class _Reader:
    def __init__(self, classes: Mapping[str, type]) -> None:
        self._classes = classes
        self._made: list[Any] = []

    def row(self, row: object) -> None:
        if not isinstance(row, list) or not row or not isinstance(row[0], str):
            raise Malformed("a row has no class")
        name, *values = row
        if name not in self._classes:
            raise Malformed(f"{name!r} is none of the classes")
        hints = _hints(self._classes[name])
        if len(values) != len(hints):
            raise Malformed(f"a {name} has {len(values)} fields, not {len(hints)}")
        given = [
            self.checked(self.value(value), hint, f"{name}.{field}")
            for value, (field, hint) in zip(values, hints, strict=True)
        ]
        self._made.append(self._classes[name](*given))

    def value(self, value: Any) -> Any:
        match value:
            case list():
                return tuple(map(self.value, value))
            case {"map": list() as pairs} if len(value) == 1:
                if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                    raise Malformed("a mapping is made of pairs")
                return {self._key(key): self.value(part) for key, part in pairs}
            case {"set": list() as parts} if len(value) == 1:
                return frozenset(map(self._key, parts))
            case {"node": int() as number} if len(value) == 1 and 0 <= number < len(self._made):
                return self._made[number]
            case dict():
                raise Malformed("an object is a mapping, a set, or an earlier row")
            case _:
                return value

    def _key(self, value: object) -> Any:
        if not isinstance(value, str):
            raise Malformed("keys and members of sets are texts")
        return value

    def checked(self, value: Any, hint: Hint, place: str) -> Any:
        if not _fits(value, hint):
            raise Malformed(f"{place} is {type(value).__name__}, not {hint}")
        return value


def _fits(value: object, hint: Hint) -> bool:
    if hint is Any or hint is object:
        return True
    origin: Any = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(_fits(part, inner[0]) for part in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is frozenset:
        return isinstance(value, frozenset) and all(_fits(part, inner[0]) for part in value)
    if origin is not None and issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, dict) else None
        return pairs is not None and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in pairs)
    if hint is float:
        return type(value) in (int, float)
    if hint in _PLAIN or hint is None:
        return type(value) is (type(None) if hint is None else hint)
    return isinstance(hint, type) and isinstance(value, hint)


_fields: dict[type, tuple[str, ...]] = {}


def _names(kind: type) -> tuple[str, ...]:
    """The names of a dataclass' fields, which every value is asked for."""
    if kind not in _fields:
        if not is_dataclass(kind):
            raise Uncodable(f"a {kind.__name__} is none of the classes")
        _fields[kind] = tuple(field.name for field in fields(kind))
    return _fields[kind]


@cache
def _hints(kind: type) -> tuple[tuple[str, Hint], ...]:
    hints = get_type_hints(kind)
    return tuple((name, hints[name]) for name in _names(kind))
