"""Masked matrix products for a matrix unit, which has no masks.

A `Dot` reads 0 for one operand where the other one's mask is false, so that no NaN and no infinity of what is masked
gets through. A matrix unit multiplies all of both: it gets the finite parts, whose products with what is masked are 0,
and the few products with a factor that is not finite, if there are any, are added as the masks say.

    x = a + dot(p where m, v)   ->   w = finite_part(v);  d = a + dot(p, w);  x = d + rest_of_dot(p where m, v)
"""

from __future__ import annotations

from collections.abc import Sequence

from eqfuse.tile.nodes import Dot, FinitePart, Kernel, Let, NonFiniteCorrection, Stmt, TileProgram, Value
from eqfuse.tile.passes.draft import Draft, changed, in_kernels


def without_masks(program: TileProgram) -> TileProgram:
    """No `Dot` has a mask."""
    return in_kernels(program, _kernel)


def _kernel(kernel: Kernel) -> Kernel:
    draft = Draft(kernel)

    def one(let: Let) -> Sequence[Stmt]:
        match let.op:
            case Dot(left, right, axis, accumulator, left_mask, right_mask) if left_mask or right_mask:
                made: list[Let] = []

                def finite(side: Value, other_mask: Value | None) -> Value:
                    if other_mask is None:
                        return side
                    part = draft.new(f"{side.name}_finite", side.dims, side.dtype)
                    made.append(Let(part, FinitePart(side)))
                    return part

                parts = finite(left, right_mask), finite(right, left_mask)
                total = draft.new(f"{let.value.name}_dot", let.value.dims, let.value.dtype)
                rest = NonFiniteCorrection(left, right, axis, total, left_mask, right_mask)
                return *made, Let(total, Dot(*parts, axis, accumulator)), Let(let.value, rest)
            case _:
                return (let,)

    body = changed(kernel.body, one)
    return kernel if body == kernel.body else draft.kernel_of(body)
