"""Products are computed the way their results are stored: the tile of a transposed result has its rows where memory has them.

o[c, r] = dot(a, b)[r, c]    ->    o[c, r] = dot(b', a')[c, r]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eqfuse.tile import nodes as ir
from eqfuse.tile.passes.draft import Draft, changed
from eqfuse.tile.walk import mapped, nested, ops_of


def transpose_products(kernel: ir.Kernel) -> ir.Kernel:
    """A kernel whose products' results are all stored transposed computes their transposes, where both operands are loaded."""
    lets = [stmt for stmt in nested(kernel.body) if isinstance(stmt, ir.Let)]
    ops = ops_of(kernel.body)
    products = [(let.value, let.op) for let in lets if isinstance(let.op, ir.Dot)]
    stores = [s for s in nested(kernel.body) if isinstance(s, ir.Store) and len(s.value.dims) == 2]
    kinds = {value.dims for value, _ in products}
    if len(kinds) != 1 or not stores or any(isinstance(let.op, ir.NonFiniteCorrection) for let in lets):
        return kernel
    (dims,) = kinds
    back = (dims[1], dims[0]) if len(dims) == 2 else dims
    if any(_order(store) != back or store.value.dims != dims for store in stores):
        return kernel
    for _, dot in products:
        if dot.left_mask or dot.right_mask or not all(_is_loaded(v, ops) for v in (dot.left, dot.right)):
            return kernel
    draft = Draft(kernel)

    def turned(value: ir.Value) -> ir.Value:
        return replace(value, dims=back) if value.dims == dims else value

    def across(operand: ir.Value, made: list[ir.Let]) -> ir.Value:
        """An operand with its dims the other way round: what it was made of, or a new value."""
        op, other = ops.get(operand.name), operand.dims[::-1]
        if isinstance(op, ir.Align) and op.value.dims == other:
            return op.value
        made.append(ir.Let(draft.new(f"{operand.name}_across", other, operand.dtype), ir.Align(operand)))
        return made[-1].value

    def one(let: ir.Let) -> Sequence[ir.Stmt]:
        if not isinstance(let.op, ir.Dot):
            return (let,)
        made: list[ir.Let] = []
        left, right = across(let.op.right, made), across(let.op.left, made)
        return *made, replace(let, op=replace(let.op, left=left, right=right))

    body = changed((mapped(stmt, turned) for stmt in kernel.body), one)
    return replace(kernel, body=body)


def _order(store: ir.Store) -> tuple[str, ...]:
    """The axes of a tile in the order in which memory has them."""
    return tuple(axis for place in store.index for axis in place.dims)


def _is_loaded(value: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
    op = ops.get(value.name)
    return _is_loaded(op.value, ops) if isinstance(op, ir.Align) else isinstance(op, ir.LoadTile)
