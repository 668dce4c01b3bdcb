"""Distinct names."""

from __future__ import annotations

from collections.abc import Iterable


class Names:
    """Names that are `taken`; a new one has its number after `between`."""

    def __init__(self, taken: Iterable[str] = (), between: str = "_") -> None:
        self.taken = set(taken)
        self._between = between

    def fresh(self, wanted: str) -> str:
        """The name that is wanted, or the first of `wanted_2`, `wanted_3`, ... that is free; taken from now on."""
        name, number = wanted, 1
        while name in self.taken:
            number += 1
            name = f"{wanted}{self._between}{number}"
        self.taken.add(name)
        return name

    def numbered(self, base: str) -> str:
        """The first of `base_1`, `base_2`, ... that is free; taken from now on."""
        number = 1
        while f"{base}{self._between}{number}" in self.taken:
            number += 1
        return self.fresh(f"{base}{self._between}{number}")
