"""Products are computed the way their results are stored: the tile of a transposed result has its rows where memory has them.

o[c, r] = dot(a, b)[r, c]    ->    o[c, r] = dot(b', a')[c, r]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from eqfuse.tile import nodes as ir
from eqfuse.tile.passes.draft import Draft
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
    return _Turn(kernel, dims, ops).run()


def _order(store: ir.Store) -> tuple[str, ...]:
    """The axes of a tile in the order in which memory has them."""
    return tuple(axis for place in store.index for axis in place.dims)


def _is_loaded(value: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
    op = ops.get(value.name)
    return _is_loaded(op.value, ops) if isinstance(op, ir.Align) else isinstance(op, ir.LoadTile)


class _Turn:
    def __init__(self, kernel: ir.Kernel, dims: tuple[str, ...], ops: Mapping[str, ir.Op]) -> None:
        self.kernel, self.dims, self.ops = kernel, dims, ops
        self.draft = Draft(kernel)

    def run(self) -> ir.Kernel:
        return replace(self.kernel, body=tuple(self._body(self.kernel.body)))

    def _of(self, value: ir.Value) -> ir.Value:
        return replace(value, dims=value.dims[::-1]) if value.dims == self.dims else value

    def _body(self, body: Iterable[ir.Stmt]) -> Iterator[ir.Stmt]:
        for stmt in body:
            match stmt:
                case ir.Let(value, ir.Dot() as dot):
                    left, right = self._across(dot.right), self._across(dot.left)
                    yield from (let for let in (left, right) if isinstance(let, ir.Let))
                    first, second = (v.value if isinstance(v, ir.Let) else v for v in (left, right))
                    start = None if dot.accumulator is None else self._of(dot.accumulator)
                    yield ir.Let(self._of(value), replace(dot, left=first, right=second, accumulator=start))
                case ir.Let(value, op):
                    yield ir.Let(self._of(value), self._op(op))
                case ir.For(axis, start, stop, carried, inner, masked):
                    items = tuple(ir.Carried(*map(self._of, (c.value, c.init, c.next))) for c in carried)
                    yield ir.For(axis, start, stop, items, tuple(self._body(inner)), masked)
                case ir.Store(tensor, index, value, mask):
                    yield ir.Store(tensor, index, self._of(value), None if mask is None else self._of(mask))

    def _op(self, op: ir.Op) -> ir.Op:
        return mapped(op, self._of)

    def _across(self, operand: ir.Value) -> ir.Let | ir.Value:
        """An operand with its dims the other way round: what it was made of, or a new value."""
        op = self.ops.get(operand.name)
        if isinstance(op, ir.Align) and op.value.dims == operand.dims[::-1]:
            return op.value
        across = operand.dims[::-1]
        return ir.Let(self.draft.new(f"{operand.name}_across", across, operand.dtype), ir.Align(operand))
