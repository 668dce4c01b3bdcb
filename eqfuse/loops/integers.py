"""Which values of a loop nest are integers or truth values: those that are made of such alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from eqfuse.loops.nodes import Let, Loop, Stmt
from eqfuse.terms.nodes import Const, Expr
from eqfuse.terms.types import KINDS, result_dtype


def carried_integers(loop: Loop, dtypes: Mapping[str, str]) -> dict[str, str]:
    """dtypes of the carried values of a loop that are no reals; `dtypes` are those of tensors, scalars and values that
    are none. The identity of a maximum tells nothing: where all that follows it are integers, so is the state."""
    found = {item.name: "i32" for item in loop.carried if _may_be_integer(item.init, dtypes)}
    while True:
        inside = _after(loop.body, {**dtypes, **found})
        known = {item.name: inside[item.next] for item in loop.carried if item.next in inside}
        wider = {name: dtype for name, dtype in known.items() if name in found}
        if wider == found:
            return found
        found = wider


def _may_be_integer(init: Expr, dtypes: Mapping[str, str]) -> bool:
    if isinstance(init, Const) and isinstance(init.value, float):
        return math.isinf(init.value)
    return result_dtype(init, dtypes) in KINDS


def _after(body: Iterable[Stmt], dtypes: Mapping[str, str]) -> dict[str, str]:
    known = dict(dtypes)
    for stmt in body:
        match stmt:
            case Let(name, _, expr):
                dtype = result_dtype(expr, known)
                if dtype in KINDS:
                    known[name] = dtype
            case Loop():
                known |= carried_integers(stmt, known)
    return known
