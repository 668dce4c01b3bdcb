"""Selects by a scalar become branches: a tile that is hardly ever another one is made where it is.

y = where(c, f(x), x)    ->    when c:  y = f(x), else x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eqfuse.tile.nodes import Elementwise, For, If, Let, Result, Stmt
from eqfuse.tile.walk import uses_of


def branched(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """The body with branches for selects of two tiles, the first of which nothing else reads."""
    uses = uses_of(body)
    made: list[Stmt] = []
    for stmt in body:
        match stmt:
            case Let(value, Elementwise("where", (condition, then, otherwise))) if (
                value.dims and not condition.dims and then.dims == otherwise.dims == value.dims
            ):
                place = next((n for n, s in enumerate(made) if isinstance(s, Let) and s.value == then), None)
                if place is None or uses[then.name] > 1:
                    made.append(stmt)
                else:
                    made.append(If(condition, (made.pop(place),), (Result(value, then, otherwise),)))
            case For(body=inner):
                made.append(replace(stmt, body=branched(inner)))
            case _:
                made.append(stmt)
    return tuple(made)
