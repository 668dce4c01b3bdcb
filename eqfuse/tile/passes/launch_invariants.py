"""Integers that the launcher computes: quotients of extents.

Triton specialises a kernel for those of its integer parameters that are multiples of 16, and then loads
whole vectors from what they are offsets of. A quotient that the kernel computes is never known to be one:
positions that start at a multiple of it would be loaded one element at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from eqfuse.tile.nodes import Argument, Constant, Elementwise, Extent, For, Kernel, Let, Op, Stmt
from eqfuse.tile.prune import pruned
from eqfuse.tile.triton.parameters import Names
from eqfuse.tile.walk import nested, operands

_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//"}

LaunchValue = Callable[[Callable[[str], str]], str]
"""From the text of an axis's extent in the launcher to the text of the value there."""


def computed_at_launch(kernel: Kernel) -> tuple[Kernel, dict[str, LaunchValue]]:
    """The kernel with an argument in place of every quotient of extents, and what to pass for each."""
    ops = {stmt.value.name: stmt.op for stmt in nested(kernel.body) if isinstance(stmt, Let)}
    names = Names(op.name for op in ops.values() if isinstance(op, Argument))
    arguments: dict[str, str] = {}
    values: dict[str, LaunchValue] = {}
    for value, op in ops.items():
        if _is_launch_value(op, ops) and _is_quotient(op, ops):
            axes = list(dict.fromkeys(_extents(op, ops)))
            arguments[value] = names.new("_by_".join(axes))
            values[arguments[value]] = _launch_value(op, ops)
    if not arguments:
        return kernel, {}
    return replace(kernel, body=pruned(_replaced(kernel.body, arguments))), values


def _replaced(body: tuple[Stmt, ...], arguments: Mapping[str, str]) -> tuple[Stmt, ...]:
    def one(stmt: Stmt) -> Stmt:
        match stmt:
            case Let(value, _) if value.name in arguments:
                return Let(value, Argument(arguments[value.name]))
            case For():
                return replace(stmt, body=_replaced(stmt.body, arguments))
            case _:
                return stmt

    return tuple(map(one, body))


def _is_quotient(op: Op, ops: Mapping[str, Op]) -> bool:
    return isinstance(op, Elementwise) and op.fn == "floordiv" and any(_extents(ops[op.args[1].name], ops))


def _is_launch_value(op: Op, ops: Mapping[str, Op]) -> bool:
    match op:
        case Extent() | Constant():
            return True
        case Elementwise(fn, args):
            known = (ops.get(arg.name) for arg in args)  # what a loop carries has no op
            return fn in _OPERATORS and all(op is not None and _is_launch_value(op, ops) for op in known)
        case _:
            return False


def _extents(op: Op, ops: Mapping[str, Op]) -> Iterator[str]:
    """Axes whose extents a value is made of."""
    if isinstance(op, Extent):
        yield op.axis
    for operand in operands(op):
        if operand.name in ops:
            yield from _extents(ops[operand.name], ops)


def _launch_value(op: Op, ops: Mapping[str, Op]) -> LaunchValue:
    def text(extent: Callable[[str], str], op: Op = op) -> str:
        match op:
            case Extent(axis):
                return extent(axis)
            case Constant(number):
                return str(number)
            case Elementwise(fn, args):
                sides = (text(extent, ops[arg.name]) for arg in args)
                return f"({f' {_OPERATORS[fn]} '.join(sides)})"
            case _:
                raise TypeError(f"{type(op).__name__} is no launch value")

    return text
