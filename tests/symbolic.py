"""Expressions as sympy's: for mathematics that sympy knows better.

Imported where it is used alone: sympy takes as long to import as a program to compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy

from eqfuse.terms.definitions import definition
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Scalar, Size, walk

_CALLS: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floordiv": lambda x, y: sympy.floor(x / y),
    "mod": sympy.Mod,
    "neg": lambda x: -x,
    "maximum": sympy.Max,
    "minimum": sympy.Min,
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "and": sympy.And,
    "or": sympy.Or,
    "not": sympy.Not,
    "abs": sympy.Abs,
    "sign": sympy.sign,
    "floor": sympy.floor,
    "sqrt": sympy.sqrt,
    "exp": sympy.exp,
    "log": sympy.log,
    "tanh": sympy.tanh,
    "erf": sympy.erf,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "atan2": sympy.atan2,
    "where": lambda p, x, y: sympy.Piecewise((x, p), (y, True)),
    **dict.fromkeys((*CASTS, "finite", "invertible"), lambda x: x),
}
"""What sympy has of the functions of the language; others go by their definitions."""


def to_sympy(expr: Expr, symbol: Callable[[Expr], Any]) -> Any:
    """An expression without reductions in sympy; `symbol` gives what stands for a leaf. Casts and the repairs of merges
    are identities. Raises ValueError for a function that sympy has not (`round`)."""
    values: dict[Expr, Any] = {}
    for node in walk(expr):
        match node:
            case Const(bool(value)):
                values[node] = sympy.true if value else sympy.false
            case Const(math.pi):
                values[node] = sympy.pi
            case Const(int(value)):
                values[node] = sympy.Integer(value)
            case Const(value):
                values[node] = sympy.nsimplify(value, rational=True)
            case Call(fn, args) if fn in _CALLS:
                values[node] = _CALLS[fn](*(values[arg] for arg in args))
            case Call() if (meaning := definition(node)) is not None:
                values[node] = to_sympy(meaning, lambda leaf: values.get(leaf, symbol(leaf)))
            case Axis() | Size() | Scalar():
                values[node] = symbol(node)
            case _:
                raise ValueError(f"{node} is nothing that sympy has")
    return values[expr]
