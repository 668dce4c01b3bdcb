"""Extents that a program makes of the sizes of other axes: `r: axis[N(n) + 1]`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from eqfuse.terms.nodes import Call, Const, Expr, Program, Size, walk

SIZED = ("add", "sub", "mul", "floordiv", "mod")
"""What extents are made with."""


def sizes_in(exprs: Iterable[Expr]) -> set[str]:
    """The axes of which some expressions have the size."""
    return {node.axis for node in walk(*exprs) if isinstance(node, Size)}


def is_count(expr: Expr) -> bool:
    """Whether an expression is made of sizes and integers alone, with what extents are made with."""
    return all(
        isinstance(node, Size)
        or (isinstance(node, Call) and node.fn in SIZED)
        or (isinstance(node, Const) and type(node.value) is int)
        for node in walk(expr)
    )


def count_of(expr: Expr, extents: Mapping[str, Any]) -> Any | None:
    """The number that an expression makes of sizes, which are integers or `torch.SymInt`s; None where it makes none."""
    match expr:
        case Const(value):
            return value
        case Size(axis):
            return extents.get(axis)
        case Call(fn, args) if fn in SIZED:
            one, other = (count_of(arg, extents) for arg in args)
            divides_by_zero = fn in ("floordiv", "mod") and type(other) is int and other == 0
            return (
                None if one is None or other is None or divides_by_zero else getattr(operator, fn)(one, other)
            )
    return None


def with_computed(program: Program, extents: Mapping[str, int]) -> dict[str, int]:
    """Extents with those that the program computes of the others."""
    found = dict(extents)
    for axis, expr in program.computed.items():
        count = count_of(expr, extents)
        if count is not None:
            found |= {copy: count for copy in (axis, *(c for c, of in program.domains.items() if of == axis))}
    return found
