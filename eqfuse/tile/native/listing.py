"""Loop trees as text, before and after they are scheduled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eqfuse.tile import nodes as ir
from eqfuse.tile.native.nodes import (
    Begin,
    Define,
    End,
    Jam,
    Leaf,
    Loop,
    Node,
    Put,
    RegisterTile,
    Vectors,
    Walk,
)
from eqfuse.tile.printer import KernelPrinter


def show(kernel: ir.Kernel, body: Sequence[Node]) -> str:
    """The loops of a kernel, a line for each item."""
    return "\n".join(_Listing(kernel)._body(body, ""))


class _Listing(KernelPrinter):
    def _other(self, stmt: object, indent: str) -> Iterator[str]:
        match stmt:
            case Leaf(Define(value, op)):
                yield from self._body([ir.Let(value, op)], indent)
                return
            case Leaf(Put(store)):
                yield from self._body([store], indent)
                return
            case Begin(item, place):
                yield f"{indent}begin {item.value.name} in {place}"
                return
            case End(item, place):
                yield f"{indent}end {item.value.name} in {place}"
                return
            case Walk(blocks, body):
                loop = blocks.loop
                yield f"{indent}for blocks of {loop.axis} in {self._name(loop.start)}..{self._name(loop.stop)}:"
                yield from self._carrying(loop.carried, body, f"{indent}    ")
                return
            case Loop(axis, body):
                yield f"{indent}for {axis}:"
            case Vectors(axis, body, parts, aligned):
                several = f", {parts} parts at once" if parts > 1 else ""
                whole = "" if aligned is None else f", aligned to {aligned.store.tensor}"
                yield f"{indent}for vectors of {axis}{several}{whole}:"
            case Jam(axis, count):
                body = stmt.body
                yield f"{indent}for {axis}, {count} at once:"
            case RegisterTile(axis, _, vectors, counts):
                most = " or ".join(map(str, counts))
                yield f"{indent}for {most} vectors of {vectors.axis}, for {axis}, sums in registers:"
                body = [*stmt.before, *vectors.body]
            case _:
                raise TypeError(stmt)
        yield from self._body(body, f"{indent}    ")
