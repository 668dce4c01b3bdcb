"""Programs of an intermediate representation whose text is a listing."""

from __future__ import annotations

from functools import singledispatch


@singledispatch
def text_of(program: object) -> str:
    """The listing of a program. The printer of each representation registers itself here."""
    raise TypeError(f"{type(program).__name__} has no printer")


class Listed:
    """`str` and `repr` are the listing; a notebook keeps its lines."""

    def __str__(self) -> str:
        return text_of(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from eqfuse.html import listing  # for notebooks alone

        return listing(str(self))
