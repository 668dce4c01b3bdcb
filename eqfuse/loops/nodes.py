"""The loop nest of a chosen plan: what runs in parallel, what is carried, what is stored.

    nest    ::= Nest(kernels, temporaries)       kernels run one after the other
    kernel  ::= Kernel(name, parallel, body, ascending, longer, slots, library)
                                                 all positions of the parallel axes at once
    stmt    ::= Let(name, dims, expr)            name[dims] = expr, for every position of dims
              | Loop(axis, start, stop, unit, carried, body, shard, part)
              | Store(tensor, index, dims, expr) tensor[index] = expr, for every position of dims

A `Loop` visits its axis tile by tile, in order, from `start` to `stop`; inside it the axis stands
for the positions of the current tile and `Reduce(op, axis, ...)` folds over that tile alone.
With `unit` the tile is a single position. With `shard`, a parallel axis, each position of `shard` walks its own
part start..stop of the axis. Where the axis is cut does not change the result, as long as parts follow each other in the
order of the axis and each position that changes a carried value is in exactly one of them. `part` = (index, count) of the part;
without it they are the position and the extent of `shard`. Outside a loop over its axis, a `Reduce` folds over the
whole axis. `dims` are the axes other than the parallel ones that a value has a component for
(the tile's own axis among them); a `Local` reads a `Let` or `Carried` of the same kernel. A `Reduce`
is the whole right-hand side of a `Let`, never part of another expression, and so is a `Scan`. Where a value lists ranks (see
terms/folds.py), all of the axis of ranks is at hand: it is neither parallel nor looped over.

A carried value starts as `init`; after each tile it becomes the `Let` named `next` in the body;
after the loop its name stands for the last value (for `init`, when the loop visits nothing).

`ascending` are dimensions along which the integers of an input tensor do not fall, as the program promises; `longer` those
of them that have so many elements more than an axis has positions.

Positions of the parallel axes of `slots` stand for whatever work is left to do, see slots.py. A kernel with `library` is run by a library of matrix
products on a device that has one; its body says what that computes.

Tile sizes are not part of the nest: it means the same for every choice of them.
"""

from __future__ import annotations

from eqfuse.fast_dataclass import dataclass
from eqfuse.hashed import Hashed, hash_of
from eqfuse.listed import Listed
from eqfuse.terms.nodes import Expr, Output


@dataclass(frozen=True)
class Let:
    name: str
    dims: tuple[str, ...]
    expr: Expr


@dataclass(frozen=True)
class Carried:
    name: str
    dims: tuple[str, ...]
    init: Expr
    next: str


@dataclass(frozen=True)
class Loop:
    axis: str
    start: Expr
    stop: Expr
    unit: bool
    carried: tuple[Carried, ...]
    body: tuple[Stmt, ...]
    shard: str | None = None
    part: tuple[Expr, Expr] | None = None


@dataclass(frozen=True)
class Store:
    tensor: str
    index: tuple[Expr, ...]
    dims: tuple[str, ...]
    expr: Expr


Stmt = Let | Loop | Store


@dataclass(frozen=True)
class Slots:
    """Which row and which part of its axis a program instance works on: `axes` and `shard`, positions of which count the
    instances, stand in the kernel's body for those of a row, and for the number of one of its parts; in the places
    where it stores, for themselves. The tensors `first` and `last`, over `axes`, have the instances of every row, from the first
    one up to that before `last`. `rows` and `others` are names of axes with the extents of `axes`."""

    axes: tuple[str, ...]
    shard: str
    rows: tuple[str, ...]
    others: tuple[str, ...]
    first: str
    last: str


Dims = tuple[tuple[str, ...], ...]
"""The axes of each dimension of a tensor, the outermost first: position `l * N(m) + m` of a dimension of `l` and `m`."""


@dataclass(frozen=True)
class LibraryProduct:
    """What a library of matrix products is called for: `made` is the sum, over the axes that it lacks, of the products of `left` and `right`. Each is
    a tensor and the axes of its dimensions, which of `made` have one each."""

    made: tuple[str, Dims]
    left: tuple[str, Dims]
    right: tuple[str, Dims]

    @property
    def sides(self) -> tuple[tuple[str, Dims], ...]:
        return self.made, self.left, self.right

    def axes(self, side: int) -> tuple[str, ...]:
        """The axes of what is made (0) or of an operand (1, 2)."""
        return tuple(axis for dim in self.sides[side][1] for axis in dim)


@dataclass(frozen=True)
class Kernel(Hashed):
    name: str
    parallel: tuple[str, ...]
    body: tuple[Stmt, ...]
    ascending: tuple[tuple[str, int], ...] = ()
    longer: tuple[tuple[str, int, str, int], ...] = ()
    slots: Slots | None = None
    library: LibraryProduct | None = None

    __hash__ = hash_of


@dataclass(frozen=True)
class Buffer:
    """A tensor that a kernel writes: an output of the program, or a temporary between kernels.

    `dtype` None means: the promoted dtype of the inputs that the value is made from; "acc": the
    type that reductions accumulate in (f32, or f64 if any input is f64).
    """

    name: str
    axes: tuple[str, ...]
    dtype: str | None
    is_output: bool


@dataclass(frozen=True, repr=False)
class Nest(Hashed, Listed):
    """`buffers` has the outputs in the program's order, which is that of the results of a call.

    `domains` maps an axis that has no extent of its own (renamed copies) to the one that has; `shards` maps a
    synthetic shard axis to the axis that it divides. `order` has the outputs in the order of sums and products that it was made
    from, where that is not the one in which the program is written.
    """

    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    domains: tuple[tuple[str, str], ...] = ()
    shards: tuple[tuple[str, str], ...] = ()
    order: tuple[Output, ...] = ()

    __hash__ = hash_of
