"""Dataclasses that take less of a start: of what `dataclasses` makes for a class, only `__init__` is compiled for it.

`dataclasses` writes and compiles six functions for a frozen class; a start makes some 150 such classes. Here five of the six are
the same for all classes, over the names of fields: importing eqfuse takes 79 ms of CPU time after torch, and 126 with the
library's. It knows `frozen` and `repr`, and what `field` says, but for what is given by keyword alone. What compilers of torch
see being made (`Arguments`) is a dataclass of the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, repr: bool = True) -> Any:
        if cls is None:
            return lambda cls: _made(cls, frozen, repr)
        return _made(cls, frozen, repr)


__all__ = ["dataclass"]

Fields = list[dataclasses.Field[Any]]


def _made(cls: type, frozen: bool, shows: bool) -> type:
    cls.__doc__ = cls.__doc__ or cls.__name__  # else the signature is written
    own = vars(cls)
    has_hash = own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own)
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    fields: Fields = list(dataclasses.fields(cls))
    parts = _taker([field.name for field in fields if field.compare])
    made: dict[str, Any] = {"__init__": _init(cls, fields, frozen), "__eq__": _eq(parts)}
    if shows:
        made["__repr__"] = _repr([field.name for field in fields if field.repr])
    if frozen:
        made["__setattr__"], made["__delattr__"] = _frozen(cls, frozenset(field.name for field in fields))
    for name, function in made.items():
        if name not in own:
            function.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, function)
    if not has_hash:
        hashed = _taker([f.name for f in fields if (f.compare if f.hash is None else f.hash)])
        setattr(cls, "__hash__", _hash(hashed) if frozen else None)  # noqa: B010  (one that is None is assigned nowhere else)
    return cls


def _init(cls: type, fields: Fields, frozen: bool) -> Any:
    given: dict[str, Any] = {"_set": object.__setattr__, "_missing": dataclasses.MISSING}
    parameters, lines = [], []
    for number, field in enumerate(fields):
        name, default = field.name, field.default
        value, made = name, f"_{number}"
        if field.default_factory is not dataclasses.MISSING:
            given[made], default = field.default_factory, dataclasses.MISSING
            value = f"{made}() if {name} is _missing else {name}" if field.init else f"{made}()"
            parameters += [f"{name}=_missing"] if field.init else []
        elif default is not dataclasses.MISSING:
            given[made] = default
            parameters += [f"{name}={made}"] if field.init else []
        elif field.init:
            parameters.append(name)
        if field.init or field.default_factory is not dataclasses.MISSING:
            lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "".join(f"\n    {line}" for line in lines or ["pass"])
    exec(f"def __init__({', '.join(['self', *parameters])}):{body}", given)  # noqa: S102  (text of this function)
    return given["__init__"]


def _taker(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """What gives the values of some fields."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


def _eq(parts: Callable[[Any], tuple[Any, ...]]) -> Any:
    def __eq__(self: Any, other: Any) -> Any:
        return parts(self) == parts(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(hashed: Callable[[Any], tuple[Any, ...]]) -> Any:
    def __hash__(self: Any) -> int:
        return hash(hashed(self))

    return __hash__


def _repr(names: list[str]) -> Any:
    def __repr__(self: Any) -> str:
        shown = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{self.__class__.__qualname__}({shown})"

    return __repr__


def _frozen(cls: Any, names: frozenset[str]) -> tuple[Any, Any]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __setattr__, __delattr__
