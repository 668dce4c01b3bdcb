"""Which pass over a tile asks memory for which part of the next block's tile.

A kernel that reads a tile several times reads it from memory once, and from a cache afterwards, while memory would have
nothing to do. So the passes ask for the next block's tile meanwhile, each for a part that lasts as long as it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eqfuse.terms.dtypes import BYTES, FLOAT8
from eqfuse.terms.functions import FUNCTIONS
from eqfuse.tile.native.nodes import Define, Leaf, Loop, Node, Put, Walk, items_in
from eqfuse.tile.native.tree import EXP2, Tree
from eqfuse.tile.nodes import Elementwise, LoadTile, Positions, Start

PARTS = 4
"""Of a tile: a loop that folds takes so many at once."""

READ = 4.0
"""What a vector costs that is read from the second-level cache, or written to it, in vector operations."""

ROUNDED = 12.0
"""What rounding a vector to eight bits costs."""

WRITTEN = 5.0
"""Vector operations in the time that memory takes to write a byte of each lane."""

Key = tuple[int, str, tuple[str | None, ...]]
"""Which walk's blocks, the tensor, and the axis along each of its dimensions."""


@dataclass(frozen=True)
class _Pass:
    """An innermost loop: its loads by what they read, and how long its vectors compute while memory writes nothing."""

    loads: Mapping[Key, str]
    free: float


def shares(tree: Tree, dtypes: Mapping[str, str]) -> dict[str, range]:
    """For each load that asks for the next block's tile, the parts that it asks for. `dtypes` are those of what is stored."""
    found: dict[str, range] = {}
    passes = list(_passes(tree, dtypes, tree.body, 0))
    for key in dict.fromkeys(key for each in passes for key in each.loads):
        mine = [each for each in passes if key in each.loads]
        again = [each for each in mine if each.loads[key] in tree.again]
        if not again:
            continue
        total, before = sum(each.free for each in mine), 0.0
        if not total:
            found[again[0].loads[key]] = range(PARTS)
            continue
        for each in mine:
            first, last = (round(PARTS * work / total) for work in (before, before + each.free))
            found[each.loads[key]] = range(first, last)
            before += each.free
    return found


def _passes(tree: Tree, dtypes: Mapping[str, str], body: Sequence[Node], walk: int) -> Iterator[_Pass]:
    for node in body:
        match node:
            case Leaf():
                pass
            case Loop(_, inner) if all(isinstance(each, Leaf) for each in inner):
                yield _pass_of(tree, dtypes, node, walk)
            case Loop(_, inner):
                yield from _passes(tree, dtypes, inner, walk)
            case Walk(_, inner):
                yield from _passes(tree, dtypes, inner, id(node))


def _pass_of(tree: Tree, dtypes: Mapping[str, str], loop: Loop, walk: int) -> _Pass:
    loads: dict[Key, str] = {}
    work = writes = 0.0
    for item in items_in(loop.body):
        match item:
            case Define(value, LoadTile(tensor, index, None)):
                ops = [tree.defined[at.name].op for at in index]
                axes = tuple(op.axis if isinstance(op, Positions | Start) else None for op in ops)
                loads.setdefault((walk, tensor, axes), value.name)
                work += READ
            case Define(_, Elementwise(fn, _)):
                work += FUNCTIONS[fn].work if fn in FUNCTIONS else EXP2
            case Put(store):
                dtype = dtypes.get(store.tensor, store.value.dtype)
                work += READ + (ROUNDED if dtype in FLOAT8 else 0)
                writes += WRITTEN * BYTES[dtype]
            case Define(value, _) if value.dims:
                work += 1
    return _Pass(loads, max(0.0, work - writes))
