"""Conditions that a launch knows: comparisons of sizes and block lengths, and signs of scalars. One binary per outcome: even a branch
that is never taken blocks scheduling across it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eqfuse.tile import nodes as ir
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.roles.nodes import Role
from eqfuse.tile.walk import nested, ops_of

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = ("add", "sub", "mul", "floordiv", "minimum", "maximum")


def launch_constants(roles: Iterable[Role]) -> tuple[ir.Value, ...]:
    """The conditions of branches in loops that a launch knows, in their order, and the same conditions elsewhere."""
    found: dict[ir.Value, None] = {}
    for role in roles:
        ops = ops_of(role.body)
        conditions = [s.condition for s in nested(role.body) if isinstance(s, ir.If)]
        loops = (stmt for stmt in nested(role.body) if isinstance(stmt, ir.For))
        inside = {s.condition for loop in loops for s in nested(loop.body) if isinstance(s, ir.If)}
        known = {ops[value.name] for value in inside if is_launch_constant(value, ops)}
        conditions.sort(key=lambda value: value not in inside)
        found |= dict.fromkeys(value for value in conditions if ops.get(value.name) in known)
    return tuple(found)


def is_launch_constant(condition: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
    """Whether a truth value is a comparison of integers that a launch knows, or of a scalar, scaled or not, with 0: what numbers are
    rounded to does not change that."""
    match ops.get(condition.name):
        case ir.Elementwise(fn, (left, right)) if fn in COMPARISONS and not (left.dims or right.dims):
            if left.dtype in INTEGERS and right.dtype in INTEGERS:
                return _is_known(left, ops) and _is_known(right, ops)
            return _is_zero(ops.get(right.name)) and _is_scaled(left, ops)
        case _:
            return False


def _is_known(value: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
    match ops.get(value.name):
        case ir.Constant() | ir.Extent() | ir.BlockSize() | ir.LaunchValue():
            return True
        case ir.Elementwise(fn, args) if fn in ARITHMETIC and not value.dims:
            return all(_is_known(arg, ops) for arg in args)
        case _:
            return False


def _is_zero(op: ir.Op | None) -> bool:
    return isinstance(op, ir.Constant) and op.number == 0


def _is_scaled(value: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
    """Whether a number is an argument, times constants of ordinary size."""
    match ops.get(value.name):
        case ir.Argument():
            return True
        case ir.Elementwise("mul", (left, right)):
            sides = ((left, ops.get(right.name)), (right, ops.get(left.name)))
            return any(_is_ordinary(op) and _is_scaled(side, ops) for side, op in sides)
        case _:
            return False


def _is_ordinary(op: ir.Op | None) -> bool:
    return isinstance(op, ir.Irrational) or (isinstance(op, ir.Constant) and 1 <= abs(op.number) <= 1e6)
