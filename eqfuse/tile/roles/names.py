"""Names that a kernel has not yet."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import replace

from eqfuse.tile.nodes import Value


class Fresh:
    """Makes values under names that are not `taken`: the wanted one, or that with a number after it."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def value(self, wanted: str, dims: tuple[str, ...], dtype: str) -> Value:
        name, number = wanted, 1
        while name in self._taken or keyword.iskeyword(name):
            number += 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return Value(name, dims, dtype)

    def like(self, value: Value, suffix: str) -> Value:
        """A value of the same dims and dtype, named after it."""
        return replace(value, name=self.value(f"{value.name}_{suffix}", (), "i32").name)
