"""New values of a kernel, under names that it has not yet."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import replace

from eqfuse.names import Names
from eqfuse.tile.nodes import Value


class Fresh(Names):
    """Makes values under names that are not `taken`: the wanted one, or that with a number after it."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        super().__init__((*taken, *keyword.kwlist))

    def value(self, wanted: str, dims: tuple[str, ...], dtype: str) -> Value:
        return Value(self.fresh(wanted), dims, dtype)

    def like(self, value: Value, suffix: str) -> Value:
        """A value of the same dims and dtype, named after it."""
        return replace(value, name=self.fresh(f"{value.name}_{suffix}"))
