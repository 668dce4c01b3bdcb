"""Which divisions of integers need no care for signs.

`floordiv` and `mod` round down, and are 0 by a divisor of 0; an instruction rounds towards 0, and has no answer for 0.
Both agree on numbers that are not below 0 and divisors above it, as positions and sizes are: those are marked as
`natural`, the ones of which only the divisor is known as `positive`. The marks are assertions: the tile interpreter
divides as a machine would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.nodes import (
    Align,
    BlockSize,
    Constant,
    Elementwise,
    Extent,
    Kernel,
    Lanes,
    Let,
    Op,
    Positions,
    Start,
    TileProgram,
    Value,
)
from eqfuse.tile.passes.draft import changed, in_kernels
from eqfuse.tile.walk import ops_of


def plain_divisions(program: TileProgram) -> TileProgram:
    """Divisions of integers are marked with what is known of their operands."""
    return in_kernels(program, _kernel)


def _kernel(kernel: Kernel) -> Kernel:
    ops = ops_of(kernel.body)

    def one(let: Let) -> tuple[Let]:
        match let.op:
            case Elementwise("floordiv" | "mod", (dividend, divisor)) as op if let.value.dtype in INTEGERS:
                if is_positive(divisor, ops):
                    natural = is_non_negative(dividend, ops)
                    return (replace(let, op=replace(op, division="natural" if natural else "positive")),)
        return (let,)

    body = changed(kernel.body, one)
    return kernel if body == kernel.body else replace(kernel, body=body)


def is_non_negative(value: Value, ops: Mapping[str, Op]) -> bool:
    """Whether an integer is known not to be below 0."""
    match ops.get(value.name):
        case Constant(number):
            return number >= 0
        case Extent() | BlockSize() | Start() | Positions() | Lanes():
            return True
        case Align(source):
            return is_non_negative(source, ops)
        case Elementwise("add" | "mul" | "floordiv" | "minimum", args):
            return all(is_non_negative(arg, ops) for arg in args)
        case Elementwise("maximum", args):
            return any(is_non_negative(arg, ops) for arg in args)
        case Elementwise("mod", args):
            return is_non_negative(args[1], ops)
        case _:
            return False


def is_positive(value: Value, ops: Mapping[str, Op]) -> bool:
    """Whether an integer is known to be above 0. No axis of a kernel that runs is empty."""
    match ops.get(value.name):
        case Constant(number):
            return number > 0
        case Extent() | BlockSize():
            return True
        case Align(source):
            return is_positive(source, ops)
        case Elementwise("add", args):
            return any(is_positive(arg, ops) for arg in args) and all(
                is_non_negative(arg, ops) for arg in args
            )
        case Elementwise("mul" | "minimum", args):
            return all(is_positive(arg, ops) for arg in args)
        case Elementwise("maximum", args):
            return any(is_positive(arg, ops) for arg in args)
        case _:
            return False
