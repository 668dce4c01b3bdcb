"""The ranges of inputs in which a program has values: (0, 1) of u in log(-log(u))."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import FUNCTIONS
from eqfuse.terms.nodes import Call, Const, Expr, Load, Program, Reduce, Scalar, children, once, walk
from eqfuse.verify.field.modular import Reals

Interval = tuple[float, float]
"""Numbers between both ends, without them."""

REAL: Interval = (-math.inf, math.inf)
_SIZES = np.logspace(-6, 6, 2401)
_TRIED: Reals = np.concatenate([-_SIZES[::-1], _SIZES])
"""Numbers at which functions are tried. What has values up to the ends of these has them everywhere."""
_SIGN_KEPT = frozenset({"add", "mul", "div", "maximum", "minimum"})
"""Functions that are positive where all their arguments are."""


@once
def domains(program: Program) -> Mapping[str, Interval]:
    """Intervals in which tensors and scalars must lie for every function of the program to have a value. They are propagated from
    the outputs down: each function gives its arguments an interval from the one that its own value must be in."""
    needed: dict[Expr, Interval] = {}
    for node in reversed(list(walk(*(output.expr for output in program.outputs)))):
        interval = needed.get(node, REAL)
        for part in children(node):
            found = _needed(node, part, interval)
            before = needed.get(part, REAL)
            both = max(found[0], before[0]), min(found[1], before[1])
            needed[part] = both if both[0] < both[1] else before
    found_of: dict[str, Interval] = {}
    for node, (low, high) in needed.items():
        if isinstance(node, Load | Scalar) and (low, high) != REAL:
            name = node.tensor if isinstance(node, Load) else node.name
            before = found_of.get(name, REAL)
            found_of[name] = max(low, before[0]), min(high, before[1])
    return {name: (low, high) for name, (low, high) in found_of.items() if low < high}


def _needed(node: Expr, part: Expr, interval: Interval) -> Interval:
    """What a part has to be in for a node to be in this interval; all numbers where that is not known."""
    match node:
        case Reduce("sum" | "max" | "min" | "prod" as op, _, body):
            keeps_sign = interval == (0.0, math.inf) or (interval == (-math.inf, 0.0) and op != "prod")
            return interval if part is body and (keeps_sign or op in ("max", "min")) else REAL
        case Call("where", (condition, _, _)):
            return REAL if part is condition else interval
        case Call(fn, args) if [arg for arg in args if not isinstance(arg, Const)] == [part]:
            return _preimage(fn, args, interval)
        case Call(fn, _) if fn in _SIGN_KEPT and interval == (0.0, math.inf):
            return interval
        case _:
            return REAL


def _preimage(fn: str, args: tuple[Expr, ...], interval: Interval) -> Interval:
    """The interval of the one argument that is no number in which a function has values in this one."""
    row = FUNCTIONS.get(fn)
    if row is None or row.result not in ("real", "like") or row.of_integers:
        return REAL
    given = [np.float64(arg.value) if isinstance(arg, Const) else _TRIED for arg in args]
    with np.errstate(all="ignore"):
        values = np.broadcast_to(FloatDomain("float64").call(fn, given), _TRIED.shape)
    inside = np.flatnonzero(~np.isnan(values) & (values > interval[0]) & (values < interval[1]))
    if not len(inside) or len(inside) != inside[-1] - inside[0] + 1:
        return REAL
    low, high = _TRIED[inside[0]], _TRIED[inside[-1]]
    ends = {_TRIED[0]: -math.inf, _TRIED[-1]: math.inf, _SIZES[0]: 0.0, -_SIZES[0]: 0.0}
    return ends.get(low, float(low)), ends.get(high, float(high))


def brought_within(shadow: Reals, interval: Interval, largest: float) -> Reals:
    """Numbers up to a `largest` magnitude as numbers within an interval, in the same order; infinities stay."""
    low, high = interval
    with np.errstate(all="ignore"):
        if math.isfinite(low) and math.isfinite(high):
            within = low + (high - low) * (0.5 + 0.49 * shadow / largest)
        else:
            within = low + np.exp(shadow) if math.isfinite(low) else high - np.exp(-shadow)
    return np.where(np.isfinite(shadow), within, shadow)
