"""Which divisions of integers need no care for signs.

`floordiv` and `mod` round down, and are 0 by a divisor of 0; an instruction rounds towards 0, and has no answer for 0.
Both agree on numbers that are not below 0 and divisors above it, as positions and sizes are: those are marked as
`natural`, the ones of which only the divisor is known as `positive`. The marks are assertions: the tile interpreter
divides as a machine would.
"""

from __future__ import annotations

from dataclasses import replace

from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.nodes import Elementwise, Kernel, Let, TileProgram
from eqfuse.tile.passes.draft import changed, in_kernels
from eqfuse.tile.passes.terms import Terms


def plain_divisions(program: TileProgram) -> TileProgram:
    """Divisions of integers are marked with what is known of their operands."""
    return in_kernels(program, _kernel)


def _kernel(kernel: Kernel) -> Kernel:
    terms = Terms(kernel)

    def one(let: Let) -> tuple[Let]:
        match let.op:
            case Elementwise("floordiv" | "mod", (dividend, divisor)) as op if let.value.dtype in INTEGERS:
                if terms.range(divisor).low > 0:
                    natural = terms.range(dividend).low >= 0
                    return (replace(let, op=replace(op, division="natural" if natural else "positive")),)
        return (let,)

    body = changed(kernel.body, one)
    return kernel if body == kernel.body else replace(kernel, body=body)
