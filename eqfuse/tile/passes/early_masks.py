"""Masks before exponentials: one select instead of two, before the exponential instead of behind it.

    m = max(where(c, a, -inf));  y = where(c, exp2(a - b), 0)   ->   w = where(c, a, -inf);  m = max(w);  y = exp2(w - b)

where b is finite or NaN, so that the exponential of what is masked is 0. A NaN in b is in all of its row on both sides,
whose sum is NaN from then on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from eqfuse.tile import nodes as ir
from eqfuse.tile.def_use import is_number
from eqfuse.tile.passes.draft import Draft, changed
from eqfuse.tile.walk import nested, ops_of, pruned, renamed, uses_of


def masked_first(kernel: ir.Kernel) -> ir.Kernel:
    """No exponential is masked whose exponent can be."""
    ops, uses = ops_of(kernel.body), uses_of(kernel.body)
    draft = Draft(kernel)
    selects: dict[tuple[str, str], ir.Value] = {}
    exponents: dict[str, ir.Value] = {}  # the masked exponent of a difference, by the difference's name
    instead: dict[str, ir.Value] = {}

    for stmt in nested(kernel.body):
        match stmt:
            case ir.Let(value, ir.Elementwise("where", (condition, inner, other))):
                if is_number(ops.get(other.name), -math.inf):
                    selects.setdefault((condition.name, inner.name), value)
                found = _exponent(inner, ops, uses)
                if found is not None and is_number(ops.get(other.name), 0.0):
                    difference, exponent = found
                    known = selects.get((condition.name, exponent.name))
                    if known is not None:
                        exponents[difference.name] = known
                        instead[value.name] = inner
    if not instead:
        return kernel

    def one(let: ir.Let) -> Sequence[ir.Stmt]:
        if let.value.name in instead:
            return ()
        op = renamed(let.op, instead)
        match op:
            case ir.Elementwise("sub", (_, shift)) if let.value.name in exponents:
                op = ir.Elementwise("sub", (exponents[let.value.name], shift))
        return (ir.Let(let.value, op),)

    return draft.kernel_of(pruned(changed(kernel.body, one)))


def _exponent(
    value: ir.Value, ops: Mapping[str, ir.Op], uses: Counter[str]
) -> tuple[ir.Value, ir.Value] | None:
    """The difference that a value alone is the exponential of, and what is shifted in it by a finite number."""
    match ops.get(value.name):
        case ir.Elementwise("exp2", (difference,)) if uses[value.name] == 1 == uses[difference.name]:
            match ops.get(difference.name):
                case ir.Elementwise("sub", (exponent, shift)) if _is_finite(shift, ops):
                    return difference, exponent
    return None


def _is_finite(value: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
    match ops.get(value.name):
        case ir.Align(source):
            return _is_finite(source, ops)
        case ir.Elementwise("finite"):
            return True
        case _:
            return False
