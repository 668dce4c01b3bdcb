"""Names that the language knows: elementwise functions, reductions, and reductions written with those."""

from __future__ import annotations

import math
from collections.abc import Mapping

from eqfuse.terms.nodes import ARITY, COMPARISONS, LOGICAL, REDUCTIONS

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

DERIVED: Mapping[str, str] = {
    "mean": "sum[{J}]({X}) / {N}",
    "var": "sum[{J}](sq({X} - mean[{J}]({X}))) / {N}",
    "std": "sqrt(var[{J}]({X}))",
    "logsumexp": "finite(max[{J}]({X})) + log(sum[{J}](exp({X} - finite(max[{J}]({X})))))",
    "any": "max[{J}](where({X}, 1, 0)) > 0",
    "all": "min[{J}](where({X}, 1, 0)) > 0",
    "argmax": "min[{J}](where(({X} == max[{J}]({X})) | ({X} != {X}), {J}, {N}))",
    "argmin": "min[{J}](where(({X} == min[{J}]({X})) | ({X} != {X}), {J}, {N}))",
}
"""Reductions over the axes J (N positions in all) of the argument X, as text of the language.

`var` and `std` are the population's. `logsumexp` shifts by a maximum that is made finite, so that an
all -inf row gives -inf. `argmax` and `argmin` give the first position; a NaN counts as the extreme."""

SINGLE_AXIS = ("argmax", "argmin")
"""Derived reductions that return a position, so that they take one axis."""

REDUCERS = (*REDUCTIONS, *DERIVED)
