"""The loop tree: a kernel of the tile program as loops over single positions, ready to print as C++.

    body ::= (Leaf | Loop | Walk)*
    Leaf(item)          a definition or a store, for the positions of the loops around it
    Loop(axis, body)    the positions of the current block of an axis
    Walk(loop, body)    the blocks of a `For`, one after the other

    item ::= Define(value, op) | Put(store)

Operands are *plain*: aligning is gone (a value is read at the positions of its own dims), and so is every condition
that holds wherever blocks are clipped to the axis: `Bound` is true. A value's dims are those along which it differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from eqfuse import fast_dataclass
from eqfuse.tile.nodes import Dot, For, Op, Stmt, Store, Value


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


Node = Leaf | Loop | Walk
