"""Values that are looked up often: their hash is computed once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Hashed:
    """A base class of frozen dataclasses that are made of many others, for `__hash__ = hash_of` in their bodies: dataclasses
    make a hash of their own where there is none. It is left behind by copies and pickles, for it is of this process."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _KEPT}


_KEPT = "_hash"


def hash_of(value: Any) -> int:
    """The hash of a dataclass, kept where it was computed."""
    found: int | None = value.__dict__.get(_KEPT)
    if found is None:
        found = value.__dict__[_KEPT] = hash(tuple(getattr(value, field.name) for field in fields(value)))
    return found
