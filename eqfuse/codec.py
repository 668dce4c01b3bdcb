"""Values as JSON, and back: dataclasses of a closed list, and what they are made of.

    text  ::= {table: [row, ...], ..., "root": value}
    row   ::= [value, ...]                         one value per field; refers to earlier rows and earlier tables alone
            | ["Class", value, ...]                where the table holds several classes
    value ::= null | true | 1 | 1.5 | "text"       as they are; NaN and infinities as Python's json writes them
            | [value, ...]                         a tuple; a set, sorted
            | {"key": value, ...}                  a mapping, in its order
            | 3                                    an instance of a class that has a table: the number of its row
            | {"field": value, ...} | [value, ...] an instance of a class that has none

Which of these a value is follows from the type that is read, that of its field. A row stands once, however often it is
read, so that expressions stay as small as they are. Equal values have equal text. Reading makes instances of the listed
classes and nothing else.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Hint = Any
"""A type as an annotation has it."""

_PLAIN: Mapping[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
}


class Uncodable(Exception):
    """What a value holds that has no text here."""


class Malformed(Exception):
    """Why a text is none of a value, and where: `place` is a path such as `terms[3].args[0]`."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(why)
        self.why, self.place = why, place

    def __str__(self) -> str:
        return f"{self.place.removeprefix('.') or 'the text'}: {self.why}"

    def within(self, place: str) -> Malformed:
        """The same, seen from what holds it."""
        self.place = place + self.place
        return self


class Codec:
    """Of values that are made of these classes: instances of those in `tables` are rows, shared; others stand where they are
    read, those in `objects` with the names of their fields and those in `lists` without. A class in `make` is made by that
    function, which may raise Malformed, from its fields."""

    def __init__(
        self,
        tables: Mapping[str, Iterable[type]],
        *,
        objects: Iterable[type] = (),
        lists: Iterable[type] = (),
        make: Mapping[type, Callable[..., Any]] | None = None,
    ) -> None:
        self.tables = {name: {each.__name__: each for each in classes} for name, classes in tables.items()}
        self.table = {each: name for name, classes in self.tables.items() for each in classes.values()}
        self.objects, self.lists = frozenset(objects), frozenset(lists)
        self.make = make or {}
        classes = (*self.table, *self.objects, *self.lists)
        if not all(map(is_dataclass, classes)):
            raise ValueError("only dataclasses have a text")
        self.names = {each: tuple(field.name for field in fields(each)) for each in classes}
        self._reads: dict[Hint, Read] = {}
        self._fields: dict[type, list[Read]] = {}

    def encode(self, value: object) -> dict[str, Any]:
        """The value as JSON. Raises Uncodable."""
        writer = _Writer(self)
        return {"root": writer.root(value), **writer.rows}

    def decode(self, text: object, hint: Hint) -> Any:
        """The value of this type that JSON stands for. Raises Malformed."""
        return self.opened(text, hint)[0]

    def opened(self, text: object, hint: Hint) -> tuple[Any, tuple[str, ...]]:
        """As `decode`, and the rows that nothing refers to, each as a place."""
        if not isinstance(text, dict) or text.keys() != {*self.tables, "root"}:
            raise Malformed(f"an object of {', '.join((*self.tables, 'root'))} was expected")
        rows: Rows = {name: [] for name in self.tables}
        used: set[tuple[str, int]] = set()
        for name in self.tables:
            if not isinstance(text[name], list):
                raise Malformed("a list was expected", name)
            for number, row in enumerate(text[name]):
                try:
                    rows[name].append(self._row(name, row, rows, used))
                except Malformed as error:
                    raise error.within(f"{name}[{number}]") from None
        root = self.reads(hint)(text["root"], rows, used)
        unread = (f"{t}[{n}]" for t, made in rows.items() for n in range(len(made)) if (t, n) not in used)
        return root, tuple(unread)

    def _row(self, table: str, row: object, rows: Rows, used: Used) -> Any:
        if not isinstance(row, list):
            raise Malformed("a list was expected")
        classes = self.tables[table]
        if len(classes) == 1:
            return self.instance(next(iter(classes.values())), row, rows, used)
        kind = classes.get(row[0]) if row and isinstance(row[0], str) else None
        if kind is None:
            raise Malformed("it begins with none of the classes")
        return self.instance(kind, row[1:], rows, used)

    def instance(self, kind: type, values: list[Any], rows: Rows, used: Used) -> Any:
        """The instance with these values of its fields. Raises Malformed."""
        if kind not in self._fields:
            hints = get_type_hints(kind)
            self._fields[kind] = [self.reads(hints[name]) for name in self.names[kind]]
        expected = self._fields[kind]
        if len(values) != len(expected):
            raise Malformed(f"a list of {len(expected)} was expected, not of {len(values)}")
        given: list[Any] = []
        try:
            for value, read in zip(values, expected, strict=True):
                given.append(read(value, rows, used))
        except Malformed as error:
            raise error.within(f".{self.names[kind][len(given)]}") from None
        return self.make.get(kind, kind)(*given)

    def reads(self, hint: Hint) -> Read:
        """What reads a value of this type."""
        if hint not in self._reads:
            self._reads[hint] = _reading(self, hint)
        return self._reads[hint]


Rows = dict[str, list[Any]]
Used = set[tuple[str, int]]
Read = Callable[[Any, Rows, Used], Any]


# -- writing ---------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.rows: Rows = {name: [] for name in codec.tables}
        self._numbers: dict[tuple[str, str], int] = {}
        self._seen: dict[int, int] = {}

    def root(self, value: object) -> Any:
        for part in self._below(value):  # what is deep is written from below: no recursion
            if (table := self.codec.table.get(type(part))) is not None:
                self._seen[id(part)] = self._row(table, part)
        return self._value(value)

    def _row(self, table: str, value: Any) -> int:
        name = [type(value).__name__] if len(self.codec.tables[table]) > 1 else []
        row = [*name, *self._parts(value)]
        key = table, json.dumps(row)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows[table])
            self.rows[table].append(row)
        return self._numbers[key]

    def _parts(self, value: Any) -> list[Any]:
        return [self._value(getattr(value, name)) for name in self.codec.names[type(value)]]

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, tuple):
            return [self._value(part) for part in value]
        if isinstance(value, Mapping):
            if not all(type(key) is str for key in value):
                raise Uncodable("a key of a mapping is no text")
            return {key: self._value(part) for key, part in value.items()}
        if isinstance(value, frozenset):
            return sorted((self._value(part) for part in value), key=json.dumps)
        if kind in self.codec.table:
            return self._seen[id(value)]
        parts = self._parts(value)
        return dict(zip(self.codec.names[kind], parts, strict=True)) if kind in self.codec.objects else parts

    def _below(self, root: Any) -> list[Any]:
        """The instances that a value is made of, itself included, what is below one before it."""
        found: list[Any] = []
        seen: set[int] = set()
        stack: list[tuple[Any, bool]] = [(root, False)]
        while stack:
            value, expanded = stack.pop()
            kind = type(value)
            if expanded:
                found.append(value)
                continue
            if kind in _PLAIN or id(value) in seen:
                continue
            if isinstance(value, tuple | frozenset):
                parts = list(value)
            elif isinstance(value, Mapping):
                parts = list(value.values())
            elif kind in self.codec.names:
                seen.add(id(value))
                stack.append((value, True))
                parts = [getattr(value, name) for name in self.codec.names[kind]]
            else:
                raise Uncodable(f"a {kind.__name__} is none of the classes")
            stack += [(part, False) for part in reversed(parts)]
        return found


# -- reading ---------------------------------------------------------------------------------------


def _reading(codec: Codec, hint: Hint) -> Read:
    origin: Any = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, types.UnionType):
        return _either(codec, inner)
    if origin is Literal:
        return _literal(inner)
    if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        return _exactly([codec.reads(each) for each in inner])
    if origin in (tuple, frozenset):
        return _every(origin, codec.reads(inner[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(codec.reads(inner[1]))
    if hint in _PLAIN or hint is None:
        return _plain(type(None) if hint is None else hint)
    tables = {codec.table[each] for each in codec.table if issubclass(each, hint)}
    if len(tables) > 1 or hint is object:
        raise TypeError(f"a {hint} may be in any of the tables")
    return _row(tables.pop(), hint) if tables else _inline(codec, hint)


def _either(codec: Codec, hints: tuple[Hint, ...]) -> Read:
    numbers = {
        "" if each in (bool, int, float) else codec.table[kind]
        for each in hints
        if isinstance(each, type)
        for kind in ((each,) if each in (bool, int, float) else codec.table)
        if issubclass(kind, each)
    }
    if len(numbers) > 1:
        raise TypeError(f"a number may be a row or none in one of {hints}")
    reads = [codec.reads(each) for each in hints]

    def read(value: Any, rows: Rows, used: Used) -> Any:
        why: list[tuple[str, str]] = []  # errors themselves would hold this frame, and all that call it
        for each in reads:
            try:
                return each(value, rows, used)
            except Malformed as error:
                why.append((error.why, error.place))
        raise Malformed(*max(why, key=lambda found: len(found[1])))

    return read


def _literal(words: tuple[Any, ...]) -> Read:
    def read(value: Any, rows: Rows, used: Used) -> Any:
        if not any(value == each and type(value) is type(each) for each in words):
            raise Malformed(f"one of {', '.join(map(repr, words))} was expected, not {value!r:.40}")
        return value

    return read


def _exactly(reads: list[Read]) -> Read:
    def read(value: Any, rows: Rows, used: Used) -> Any:
        if not isinstance(value, list) or len(value) != len(reads):
            raise Malformed(f"a list of {len(reads)} was expected")
        return tuple(each(part, rows, used) for each, part in zip(reads, value, strict=True))

    return read


def _every(kind: Callable[[list[Any]], Any], each: Read) -> Read:
    def read(value: Any, rows: Rows, used: Used) -> Any:
        if not isinstance(value, list):
            raise Malformed("a list was expected")
        found: list[Any] = []
        try:
            for part in value:
                found.append(each(part, rows, used))
        except Malformed as error:
            raise error.within(f"[{len(found)}]") from None
        return kind(found)

    return read


def _mapping(each: Read) -> Read:
    def read(value: Any, rows: Rows, used: Used) -> Any:
        if not isinstance(value, dict):
            raise Malformed("an object was expected")
        found, key = {}, ""
        try:
            for key, part in value.items():
                found[key] = each(part, rows, used)
        except Malformed as error:
            raise error.within(f"[{key!r:.40}]") from None
        return found

    return read


def _plain(kind: type) -> Read:
    kinds = (int, float) if kind is float else (kind,)

    def read(value: Any, rows: Rows, used: Used) -> Any:
        if type(value) not in kinds:
            raise Malformed(f"{_PLAIN[kind]} was expected, not {value!r:.40}")
        return value

    return read


def _row(table: str, kind: type) -> Read:
    def read(value: Any, rows: Rows, used: Used) -> Any:
        made = rows[table]
        if type(value) is not int or not 0 <= value < len(made):
            raise Malformed(f"{value!r:.40} is none of the {table} before it")
        if not isinstance(made[value], kind):
            raise Malformed(f"a {kind.__name__} was expected, not a {type(made[value]).__name__}")
        used.add((table, value))
        return made[value]

    return read


def _inline(codec: Codec, kind: type) -> Read:
    names = codec.names.get(kind)

    def read(value: Any, rows: Rows, used: Used) -> Any:
        if names is None:
            raise Malformed(f"a {kind.__name__} is none of the classes")
        if kind in codec.lists:
            if not isinstance(value, list):
                raise Malformed("a list was expected")
            return codec.instance(kind, value, rows, used)
        if not isinstance(value, dict):
            raise Malformed("an object was expected")
        for name in (*names, *value):
            if name not in value or name not in names:
                raise Malformed(f"there is no {name!r}" if name in names else f"{name!r:.40} means nothing")
        return codec.instance(kind, [value[name] for name in names], rows, used)

    return read
