"""Names that the language knows: elementwise functions, operators and constants."""

from __future__ import annotations

import math
from collections.abc import Mapping

from eqfuse.terms.functions import ARITY, COMPARISONS, LOGICAL

OPERATORS: Mapping[str, str] = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
}
"""Functions of two arguments that are written between them."""

FUNCTIONS = tuple(
    name
    for name in ARITY
    if name not in OPERATORS and name not in COMPARISONS and name not in (*LOGICAL, "neg")
)
"""Elementwise functions that can be called by name."""

VARIADIC: Mapping[str, str] = {"max": "maximum", "min": "minimum"}
"""Calls of two or more arguments, and the function that folds them."""

CONSTANTS: Mapping[str, float] = {"inf": math.inf, "nan": math.nan, "pi": math.pi}
