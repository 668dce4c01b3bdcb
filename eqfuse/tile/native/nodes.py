"""The loop tree: a kernel of the tile program as loops over single positions, ready to print as C++.

    body ::= (Leaf | Loop | Walk)*
    Leaf(item)          a definition or a store, for the positions of the loops around it
    Loop(axis, body)    the positions of the current block of an axis
    Walk(loop, body)    the blocks of a `For`, one after the other

    item ::= Define(value, op) | Put(store)

`schedule` makes of it the tree that is printed, in which there also are

    Vectors(axis, body, parts, aligned)             a loop over vectors of positions; each of `parts` parts of the axis at once
    Jam(axis, count, before, vectors)               a loop that folds, `count` positions at once for each vector of another axis
    RegisterTile(axis, before, vectors, counts)     a loop that folds, inside that over the vectors along another axis
    Begin(item, place), End(item, place)            a fold's states set to its identities; accumulators combined to one state

Operands are *plain*: aligning is gone (a value is read at the positions of its own dims), and so is every condition
that holds wherever blocks are clipped to the axis: `Bound` is true. A value's dims are those along which it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from eqfuse import fast_dataclass
from eqfuse.tile.nodes import Dot, FoldTile, For, Op, ReduceTile, Stmt, Store, Value


class NotNative(Exception):
    """What the printer to C++ has no text for: the node, and why. The torch form runs such a kernel."""


@dataclass(frozen=True)
class Define:
    """`dims` are those of the loops around it: its value's, and the axis that a reduction folds away."""

    value: Value
    op: Op
    dims: tuple[str, ...]


@fast_dataclass.dataclass(frozen=True)
class SumOfDots(Dot):
    """A matrix product of which more axes than one are folded: the sum over `beside` of products over `axis`."""

    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Put:
    store: Store
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    """A `For` with plain operands, and its body's items."""

    loop: For[Stmt]
    items: tuple[Item, ...]


Item = Define | Put | Blocks


@dataclass(eq=False)
class Leaf:
    item: Define | Put


@dataclass(eq=False)
class Loop:
    axis: str
    body: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Walk:
    blocks: Blocks
    body: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Vectors:
    """A loop over vectors of positions: the last one may be shorter. `parts`: the axis in so many parts, a vector of each at once.
    `aligned`: a store for which there is a vector of few positions first, so that the others begin where whole vectors do."""

    axis: str
    body: list[Leaf]
    parts: int = 1
    aligned: Put | None = None


@dataclass(eq=False)
class Jam:
    """A loop that folds along `axis`, over `count` positions at once, and one by one over those that are left: unroll and jam. Each
    vector of the loop inside is made for all of these positions before the next one. `before` are numbers for each position."""

    axis: str
    count: int
    before: list[Leaf]
    vectors: Vectors

    @property
    def body(self) -> list[Node]:
        return [*self.before, self.vectors]


@dataclass(eq=False)
class RegisterTile:
    """A loop that folds along `axis` inside the loop over `vectors`, of another axis. At first `counts[0]` vectors at once while
    there are so many, then `counts[1]`, and so on; their sums stay in registers. `before` are numbers for each position of `axis`."""

    axis: str
    before: list[Leaf]
    vectors: Vectors
    counts: tuple[int, ...]

    @property
    def body(self) -> list[Node]:
        return [*self.before, self.vectors]


Place = Literal["lanes", "register", "memory"]
"""Where a loop keeps the states of a fold: in a vector for each part of the axis, a number each, or a tile."""


@dataclass(eq=False)
class Begin:
    """The states of a fold are those of nothing, before a loop over its axis."""

    item: Define
    place: Place


@dataclass(eq=False)
class End:
    """The accumulators of a fold, after the loop over its axis: the parts of the axis and the lanes of vectors as one state."""

    item: Define
    place: Place


Nest = Loop | Vectors | Jam | RegisterTile
Node = Leaf | Nest | Walk | Begin | End


def items_in(body: Iterable[Node]) -> Iterator[Define | Put]:
    """The items of a body, those inside its loops too."""
    for node in body:
        if isinstance(node, Leaf):
            yield node.item
        elif not isinstance(node, Begin | End):
            yield from items_in(node.body)


def folds_along(loop: Nest) -> list[Define]:
    """The folds inside a loop that fold its axis away."""
    return [
        item for item in items_in(loop.body) if isinstance(item, Define) and folded_axis(item) == loop.axis
    ]


def folded_axis(item: Define) -> str | None:
    """The axis that a fold folds away; None for what is no fold."""
    return item.op.axis if isinstance(item.op, ReduceTile | FoldTile) else None
