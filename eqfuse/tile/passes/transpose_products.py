"""Products are computed the way their results are stored: the tile of a transposed result has its rows where memory has them.

o[c, r] = dot(a, b)[r, c]    ->    o[c, r] = dot(b', a')[c, r]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from eqfuse.tile.nodes import (
    Align,
    Carried,
    Dot,
    For,
    Kernel,
    Let,
    LoadTile,
    NonFiniteCorrection,
    Op,
    Stmt,
    Store,
    Value,
)
from eqfuse.tile.passes.draft import Draft
from eqfuse.tile.walk import mapped, nested, ops_of


def transpose_products(kernel: Kernel) -> Kernel:
    """A kernel whose products' results are all stored transposed computes their transposes, where both operands are loaded."""
    lets = [stmt for stmt in nested(kernel.body) if isinstance(stmt, Let)]
    ops = ops_of(kernel.body)
    products = [(let.value, let.op) for let in lets if isinstance(let.op, Dot)]
    stores = [s for s in nested(kernel.body) if isinstance(s, Store) and len(s.value.dims) == 2]
    kinds = {value.dims for value, _ in products}
    if len(kinds) != 1 or not stores or any(isinstance(let.op, NonFiniteCorrection) for let in lets):
        return kernel
    (dims,) = kinds
    back = (dims[1], dims[0]) if len(dims) == 2 else dims
    if any(_order(store) != back or store.value.dims != dims for store in stores):
        return kernel
    for _, dot in products:
        if dot.left_mask or dot.right_mask or not all(_is_loaded(v, ops) for v in (dot.left, dot.right)):
            return kernel
    return _Turn(kernel, dims, ops).run()


def _order(store: Store) -> tuple[str, ...]:
    """The axes of a tile in the order in which memory has them."""
    return tuple(axis for place in store.index for axis in place.dims)


def _is_loaded(value: Value, ops: Mapping[str, Op]) -> bool:
    op = ops.get(value.name)
    return _is_loaded(op.value, ops) if isinstance(op, Align) else isinstance(op, LoadTile)


class _Turn:
    def __init__(self, kernel: Kernel, dims: tuple[str, ...], ops: Mapping[str, Op]) -> None:
        self.kernel, self.dims, self.ops = kernel, dims, ops
        self.draft = Draft(kernel)

    def run(self) -> Kernel:
        return replace(self.kernel, body=tuple(self._body(self.kernel.body)))

    def _of(self, value: Value) -> Value:
        return replace(value, dims=value.dims[::-1]) if value.dims == self.dims else value

    def _body(self, body: Iterable[Stmt]) -> Iterator[Stmt]:
        for stmt in body:
            match stmt:
                case Let(value, Dot() as dot):
                    left, right = self._across(dot.right), self._across(dot.left)
                    yield from (let for let in (left, right) if isinstance(let, Let))
                    first, second = (v.value if isinstance(v, Let) else v for v in (left, right))
                    start = None if dot.accumulator is None else self._of(dot.accumulator)
                    yield Let(self._of(value), replace(dot, left=first, right=second, accumulator=start))
                case Let(value, op):
                    yield Let(self._of(value), self._op(op))
                case For(axis, start, stop, carried, inner, masked):
                    items = tuple(Carried(*map(self._of, (c.value, c.init, c.next))) for c in carried)
                    yield For(axis, start, stop, items, tuple(self._body(inner)), masked)
                case Store(tensor, index, value, mask):
                    yield Store(tensor, index, self._of(value), None if mask is None else self._of(mask))

    def _op(self, op: Op) -> Op:
        return mapped(op, self._of)

    def _across(self, operand: Value) -> Let | Value:
        """An operand with its dims the other way round: what it was made of, or a new value."""
        op = self.ops.get(operand.name)
        if isinstance(op, Align) and op.value.dims == operand.dims[::-1]:
            return op.value
        across = operand.dims[::-1]
        return Let(self.draft.new(f"{operand.name}_across", across, operand.dtype), Align(operand))
