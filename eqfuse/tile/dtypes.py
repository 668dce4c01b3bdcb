"""Which dtype a value has on chip: the numerics policy, as functions of dtypes alone.

Arithmetic on reals happens in the accumulation dtype (f32, or f64); arithmetic on integers that
stays among integers is exact, in i32 or i64. Storage dtypes survive only where nothing is computed: in loads, in
written casts, and in the operands of a dot.
"""

from __future__ import annotations

from collections.abc import Sequence

from eqfuse.terms import dtypes, folds, integers
from eqfuse.terms.dtypes import FLOAT8
from eqfuse.terms.functions import AMONG_INTEGERS, CASTS, COMPARISONS, DRAWN, LOGICAL, OF_INTEGERS, ROUNDINGS

INTEGERS = ("bool", *dtypes.INTEGERS)
NARROW = (*FLOAT8, "f16", "bf16")
"""Floating dtypes that tensor cores multiply and that nothing is accumulated in."""
LEAST_NORMAL, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of float32."""


def widest_integer(operands: Sequence[str]) -> str:
    """The dtype that integer arithmetic on such operands has: i32 unless one is i64."""
    return "i64" if "i64" in operands else "i32"


def operand_dtypes(fn: str, args: Sequence[str], accumulate: str) -> tuple[str, ...]:
    """The dtypes that the operands of an elementwise function are converted to first."""
    match fn:
        case "where":
            return ("bool", *(result_dtype(fn, args, accumulate),) * 2)
        case _ if fn in CASTS:
            return tuple(args)
        case _ if fn in ROUNDINGS:
            return (_common(args, accumulate),)
        case _ if fn in DRAWN:
            return ("i64",) * len(args)
        case _ if fn in OF_INTEGERS:
            return (widest_integer(args),) * len(args)
        case _ if fn in LOGICAL:
            return ("bool",) * len(args)
        case _ if fn in COMPARISONS:
            return (_common(args, accumulate),) * len(args)
        case _:
            return (result_dtype(fn, args, accumulate),) * len(args)


def result_dtype(fn: str, args: Sequence[str], accumulate: str) -> str:
    """The dtype of an elementwise function of operands of these dtypes."""
    match fn:
        case "where":
            return "bool" if set(args[1:]) == {"bool"} else _common(args[1:], accumulate)
        case _ if fn in CASTS or fn in ROUNDINGS:
            return fn
        case _ if fn in LOGICAL or fn in COMPARISONS:
            return "bool"
        case _ if fn in AMONG_INTEGERS:
            return _common(args, accumulate)
        case _:
            return accumulate


def reduced_dtype(op: str, body: str, accumulate: str) -> str:
    """The dtype of a reduction over a body of this dtype. Sums and products of integers are exact in i64."""
    dtype = _common((body,), accumulate)
    return "i64" if dtype == "i32" and op in ("sum", "prod") else dtype


def _common(operands: Sequence[str], accumulate: str) -> str:
    return widest_integer(operands) if all(d in INTEGERS for d in operands) else accumulate


def identity(op: str, dtype: str) -> float | int:
    """The identity of a reduction in a dtype; integers have no infinities."""
    number = folds.identity(op).value
    return integers.identity(number, dtype) if dtype in INTEGERS else float(number)


def dot_dtype(left: str, right: str, left_loaded: bool, right_loaded: bool, accumulate: str) -> str:
    """The dtype that both operands of a dot have.

    An operand in a narrow dtype keeps it: it is a plain load, or a written cast. What is computed
    (or an f32 load) follows a narrow *loaded* operand if it is computed, and otherwise both are
    multiplied in the accumulation dtype. Values too wide for f8 are not rounded to it unasked.
    """
    if accumulate == "f64":
        return accumulate
    if left == right and left in NARROW:
        return left
    narrow = [
        (dtype, loaded) for dtype, loaded in ((left, left_loaded), (right, right_loaded)) if dtype in NARROW
    ]
    match narrow:
        case [(first, _), (second, _)]:
            if first in FLOAT8 and second in FLOAT8:  # of two kinds: bf16 holds both
                return "bf16"
            return first if second in FLOAT8 else second if first in FLOAT8 else accumulate
        case [(dtype, True)]:
            other_loaded = left_loaded if dtype == right else right_loaded
            if other_loaded:
                return accumulate
            return "bf16" if dtype in FLOAT8 else dtype
        case _:
            return accumulate
