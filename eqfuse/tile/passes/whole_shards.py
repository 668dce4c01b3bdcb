"""Shards of whole blocks, where a loop over a shard multiplies matrices.

A shard of c = ceil(N / S) positions ends inside of a block, so that its last block is masked there, before the end of the tensor. With
c rounded up to a multiple of the block only the last shard has such a block, and its mask ends where the tensor does:

    c = ceil(N(j) / N(s))                           ->   c = ceil(ceil(N(j) / N(s)) / block(j)) * block(j)
    for j in cut..min(s*c + c, N(j)) masked:             for j in cut..min(s*c + c, N(j)) masked:
        x = load v[j] where j < min(s*c + c, N(j))           x = load v[j] where j < N(j)

No shard has more blocks than the longest one before, as ceil(ceil(n / a) / b) = ceil(n / (a b)) (Graham, Knuth, Patashnik, "Concrete
Mathematics", 3.2). Kernels that go on where another one ends, as of a scan, keep their shards: the blocks of both may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from eqfuse.tile import nodes as ir
from eqfuse.tile.passes.draft import Draft, changed, in_kernels
from eqfuse.tile.walk import lets_of, ops_of, uses_of


def whole_shards(program: ir.TileProgram) -> ir.TileProgram:
    """The program with whole blocks in the shards of loops that multiply matrices."""
    asked = Counter(axis for kernel in program.kernels for axis in set(_starts(kernel)))
    alone = {shard: axis for shard, axis in program.shards if asked[shard] == 1}
    return in_kernels(program, partial(_kernel, alone=alone)) if alone else program


def _starts(kernel: ir.Kernel) -> Iterator[str]:
    """The axes of whose blocks a kernel asks where they start."""
    return (let.op.axis for let in lets_of(kernel.body) if isinstance(let.op, ir.Start))


@dataclass(frozen=True)
class _Shard:
    """The range of an axis that a shard has: `start` to `stop`, `length` positions, or fewer at the end of the axis."""

    axis: str
    start: ir.Value
    length: ir.Value
    stop: ir.Value
    size: ir.Value

    @staticmethod
    def of(stop: ir.Value, ops: Mapping[str, ir.Op], alone: Mapping[str, str]) -> _Shard | None:
        """The shard that ends at a value: min(start + length, size), where start is min(shard * length, size)."""
        match ops.get(stop.name):
            case ir.Elementwise("minimum", (end, size)):
                pass
            case _:
                return None
        match ops.get(size.name), ops.get(end.name):
            case ir.Extent(axis), ir.Elementwise("add", (start, length)):
                pass
            case _:
                return None
        match ops.get(start.name):
            case ir.Elementwise("minimum", (first, same)) if same == size:
                pass
            case _:
                return None
        match ops.get(first.name):
            case ir.Elementwise("mul", (number, by)) if by == length:
                shard = ops.get(number.name)
                if isinstance(shard, ir.Start) and alone.get(shard.axis) == axis:
                    return _Shard(axis, start, length, stop, size)
        return None

    def walked(self, loop: ir.For[ir.Stmt], ops: Mapping[str, ir.Op]) -> bool:
        """Whether a loop walks whole blocks from the start of the shard, up to its end."""
        return loop.axis == self.axis and loop.stop == self.stop and self._is_apart(loop.start, ops)

    def _is_apart(self, place: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
        """Whether a value is some blocks behind the start."""
        if place == self.start:
            return True
        match ops.get(place.name):
            case ir.Elementwise("add", (before, positions)) if self._is_apart(before, ops):
                return self._is_blocks(positions, ops)
        return False

    def is_whole(self, ops: Mapping[str, ir.Op]) -> bool:
        """Whether a shard has whole blocks already."""
        return self._is_blocks(self.length, ops)

    def _is_blocks(self, positions: ir.Value, ops: Mapping[str, ir.Op]) -> bool:
        match ops.get(positions.name):
            case ir.Elementwise("mul", (_, block)):
                return ops.get(block.name) == ir.BlockSize(self.axis)
        return False


def _kernel(kernel: ir.Kernel, alone: Mapping[str, str]) -> ir.Kernel:
    ops, uses = ops_of(kernel.body), uses_of(kernel.body)
    loops = [
        stmt
        for stmt in kernel.body
        if isinstance(stmt, ir.For) and any(isinstance(let.op, ir.Dot) for let in lets_of(stmt.body))
    ]
    found: dict[str, _Shard] = {}
    for loop in loops:
        shard = _Shard.of(loop.stop, ops, alone)
        if shard is None or shard.is_whole(ops) or not shard.walked(loop, ops):
            continue
        if uses[shard.length.name] == 2:  # in both of its ends
            found[shard.length.name] = shard
    if not found:
        return kernel
    draft = Draft(kernel)

    def rounded(let: ir.Let) -> Sequence[ir.Let]:
        """The length of a shard in whole blocks."""
        shard = found.get(let.value.name)
        if shard is None:
            return (let,)
        names = ("positions", "block", "one", "most", "up", "blocks")
        length, block, one, most, up, blocks = (draft.new(f"{shard.axis}_{n}", (), "i32") for n in names)
        return (
            ir.Let(length, let.op),
            ir.Let(block, ir.BlockSize(shard.axis)),
            ir.Let(one, ir.Constant(1)),
            ir.Let(most, ir.Elementwise("sub", (block, one))),
            ir.Let(up, ir.Elementwise("add", (length, most))),
            ir.Let(blocks, ir.Elementwise("floordiv", (up, block))),
            ir.Let(let.value, ir.Elementwise("mul", (blocks, block))),
        )

    def edged(let: ir.Let, shard: _Shard) -> Sequence[ir.Let]:
        """What is inside of a shard is inside of the axis there."""
        inside = let.op == ir.Bound(shard.axis, shard.stop)
        return (replace(let, op=ir.Bound(shard.axis, shard.size)),) if inside else (let,)

    body: list[ir.Stmt] = []
    for stmt in changed(kernel.body, rounded):
        ended = [s for s in found.values() if isinstance(stmt, ir.For) and s.walked(stmt, ops)]
        if isinstance(stmt, ir.For) and ended:
            stmt = replace(stmt, body=changed(stmt.body, partial(edged, shard=ended[0])))
        body.append(stmt)
    return replace(kernel, body=tuple(body))
