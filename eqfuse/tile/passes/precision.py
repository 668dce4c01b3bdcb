"""How matrix units multiply: what is rounded less than the program's own numbers are need not be exact.

f32 operands in a program of half-precision tensors are multiplied as sums of two bf16 each (Triton's `bf16x3`, which
takes a third of the time): three of the four products, an error of 2**-16 beside one of 2**-11 of what goes in and out.
f8 operands are summed in the unit's own precision, as cuBLAS does, up to `IMPRECISE` products at a time; then f32 takes
over. A sum that is passed to the unit would be waited for every time: it is added to instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eqfuse.terms.dtypes import FLOAT8
from eqfuse.tile.dtypes import INTEGERS, NARROW
from eqfuse.tile.nodes import Dot, Elementwise, Kernel, Let, LoadTile, Stmt, TileProgram
from eqfuse.tile.passes.draft import Draft, changed, in_kernels
from eqfuse.tile.walk import nested

IMPRECISE = 128
"""Products of float8 numbers that a matrix unit may sum in its own precision."""

ERROR = 3 * 2.0**-16
"""How far a sum of products as `bf16x3` may be off, relative to the sum of the products' magnitudes, beside what f32
rounds: a bf16 has 8 bits, so each factor's rest is up to 2**-8 of it and is known to 2**-16; the product of the rests is
left out."""


def matrix_precision(program: TileProgram) -> TileProgram:
    """Matrix products as precise as the program's tensors call for."""
    is_half = _reals(program) <= set(NARROW)
    return in_kernels(program, lambda kernel: _kernel(kernel, is_half))


def _reals(program: TileProgram) -> set[str]:
    """Dtypes of the reals that come in and go out."""
    made = {buffer.name for buffer in program.buffers}
    dtypes = {buffer.dtype or "f32" for buffer in program.buffers if buffer.is_output}
    for kernel in program.kernels:
        for stmt in nested(kernel.body):
            match stmt:
                case Let(value, LoadTile(tensor, _, _, _)) if tensor not in made:
                    dtypes.add(value.dtype)
    return dtypes - set(INTEGERS)


def _kernel(kernel: Kernel, is_half: bool) -> Kernel:
    draft = Draft(kernel)

    def one(let: Let) -> Sequence[Stmt]:
        match let.op:
            case Dot(left, imprecise=None) as op if left.dtype in FLOAT8:
                product = replace(op, accumulator=None, imprecise=IMPRECISE)
                if op.accumulator is None:
                    return (replace(let, op=product),)
                dot = draft.new(f"{let.value.name}_dot", let.value.dims, let.value.dtype)
                return Let(dot, product), Let(let.value, Elementwise("add", (op.accumulator, dot)))
            case Dot(left, left_mask=None, right_mask=None) as op if is_half and left.dtype == "f32":
                return (replace(let, op=replace(op, precision="bf16x3")),)
            case _:
                return (let,)

    body = changed(kernel.body, one)
    return kernel if body == kernel.body else draft.kernel_of(body)
