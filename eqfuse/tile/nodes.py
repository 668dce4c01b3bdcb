"""The tile program: the loop nest over blocks of positions, ready to run or to print as Triton.

    program ::= Program(kernels, buffers)
    kernel  ::= Kernel(name, blocks, grid, body)
    stmt    ::= Let(value, op) | For(...) | Store(tensor, index, value, mask)
              | If(condition, body, results)       between passes of roles alone, and in roles, as PersistentLoop(carried, body)
    op      ::= Constant(number)                   a scalar
              | Irrational(name)                   a scalar that no finite field has: log2 e or ln 2
              | Argument(name)                     a run-time scalar
              | Extent(axis)                       the size of an axis, a run-time integer
              | BlockSize(axis)                    positions in a block of an axis, a launch-time constant
              | LaunchValue(name, expr)            an integer made of sizes, which is passed to the kernel under a name
              | Start(axis)                        first position of the current block of an axis
              | Positions(axis)                    the block's positions, a tile with dims (axis,)
              | Lanes(axis)                        0, 1, 2, ...: the places in the block, a tile with dims (axis,)
              | Fill(number)                       a tile of one number
              | Elementwise(fn, args, division)    operands have the result's dims, or none (scalars)
              | Align(value)                       permute and expand a value to the result's dims
              | Cast(value, written)               to the result's dtype; `written`: the program says so
              | FinitePart(value)                  the sign of the value where it is infinite, 0 where it is NaN
              | LoadTile(tensor, index, mask, other)
              | Search(tensor, index, place, stop, target, right, dtype)
                                                   a scalar: how many of the first `stop` elements along the dimension
                                                   `place` of a tensor of ascending integers are below `target`, or with
                                                   `right` at most `target`; `index` are scalars, for the other dimensions
              | ReduceTile(op, value, axis)        drops one dim
              | FoldTile(op, values, axis)         one state variable of a registered fold (`argmax.k`), from
                                                   tiles of all of them, of the same dims; drops one dim
              | ScanTile(fold, place, values, axis)
                                                   one state variable of a fold, at each position from tiles of all of
                                                   them at the positions up to it along `axis`, in order
              | RankTile(op, values, axis, ranks)  one state variable of a registered fold's list: what comes first
                                                   along `axis`, in order, as a dim `ranks` in its place
              | MergeTile(op, left, right, ranks)  one state variable of two such lists as one, of their length
              | Dot(left, right, axis, accumulator, left_mask, right_mask, precision, imprecise)
                                                   left dims (*batch, *rows, axis), right dims (*batch, axis,
                                                   *columns), result and accumulator (*batch, *rows, *columns);
                                                   where a mask (of the dims of its operand, which is 0 or NaN there)
                                                   is false, the other operand is read as 0: no NaN of it gets through
              | NonFiniteCorrection(left, right, axis, total, left_mask, right_mask)
                                                   `total` and the products of a Dot of which a factor is not finite

A `Value` carries its name, its dims (tile axes in order; () is a scalar) and its dtype; every op's
result is one. Extents of tiles are symbolic: each dim is an axis with a `Block`. Names are unique in
a kernel; a value is visible after its definition, in the statements of its body and of inner bodies.
A carried value is visible in its `For` and after it, where it stands for the last value.

Dimension reconciliation is explicit, in `Align`, for everything but memory accesses: the index and
mask values of a `LoadTile` or `Store` carry any subset of the dims of the tile that is loaded or
stored, in any order, and are matched to it by name (a pointer is a sum of terms that broadcast).
A `Dot` has one row and one column dim; only where lowering was asked for it (`batched_dots`, for a CPU)
it has batch dims, several rows or columns, or no rows (a vector times a matrix).
Integers are i32 or i64; `floordiv` and `mod` round down, and are 0 where the divisor is 0.
Functions of `Elementwise` are those of the language and `TILE_FUNCTIONS`, which passes make.

Positions past the end of an axis exist in a ragged last block: loads and stores mask them, and a
reduction over the axis first replaces them by its identity (an explicit `where`), so a program
is right whether a runner pads blocks (Triton) or clips them (the CPU); `Bound` masks are the ones
that a clipping runner may skip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Generic, Literal, TypeAlias, TypeVar

from eqfuse.fast_dataclass import dataclass
from eqfuse.listed import Listed
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer, LibraryProduct
from eqfuse.terms.nodes import Expr, Fold

S_co = TypeVar("S_co", covariant=True)
"""Statements of a region: those of the tile program, or of roles."""

TILE_FUNCTIONS: Mapping[str, int] = {"exp2": 1}
"""Elementwise functions that the language has not, and how many operands they have: exp2(x) = 2 ** x."""


@dataclass(frozen=True)
class Value:
    name: str
    dims: tuple[str, ...]
    dtype: str  # one of terms.nodes.DTYPES


@dataclass(frozen=True)
class Constant:
    number: float | int | bool


@dataclass(frozen=True)
class Irrational:
    name: Literal["log2_e", "ln_2"]


@dataclass(frozen=True)
class Argument:
    name: str


@dataclass(frozen=True)
class Extent:
    axis: str


@dataclass(frozen=True)
class BlockSize:
    axis: str


@dataclass(frozen=True)
class LaunchValue:
    """`expr` is a term over sizes and numbers (+ - * //); as `floordiv` of tiles, a quotient rounds down and its divisor
    is above 0."""

    name: str
    expr: Expr


@dataclass(frozen=True)
class Start:
    axis: str


@dataclass(frozen=True)
class Positions:
    axis: str


@dataclass(frozen=True)
class Lanes:
    axis: str


@dataclass(frozen=True)
class Fill:
    number: float


Division = Literal["any", "positive", "natural"]
"""What is known of the operands of `floordiv` and `mod`: nothing; a divisor above 0; and a dividend not below it."""


@dataclass(frozen=True)
class Elementwise:
    fn: str
    args: tuple[Value, ...]
    division: Division = "any"


@dataclass(frozen=True)
class Bound:
    """positions of `axis` < its extent (or the end of the loop, or of the valid positions of the block): a tile with
    dims (axis,), or a scalar for unit axes."""

    axis: str
    stop: Value


@dataclass(frozen=True)
class Align:
    value: Value


@dataclass(frozen=True)
class Cast:
    value: Value
    written: bool = False


@dataclass(frozen=True)
class FinitePart:
    value: Value


@dataclass(frozen=True)
class LoadTile:
    tensor: str
    index: tuple[Value, ...]
    mask: Value | None
    other: float


@dataclass(frozen=True)
class Search:
    """Where the tensor does not ascend, any number from 0 to `stop`. Its elements are read as `dtype`."""

    tensor: str
    index: tuple[Value, ...]
    place: int
    stop: Value
    target: Value
    right: bool
    dtype: str


@dataclass(frozen=True)
class ReduceTile:
    op: str
    value: Value
    axis: str


@dataclass(frozen=True)
class FoldTile:
    op: str
    values: tuple[Value, ...]
    axis: str


@dataclass(frozen=True)
class ScanTile:
    fold: Fold
    place: int
    values: tuple[Value, ...]
    axis: str


@dataclass(frozen=True)
class RankTile:
    op: str
    values: tuple[Value, ...]
    axis: str
    ranks: str


@dataclass(frozen=True)
class MergeTile:
    op: str
    left: tuple[Value, ...]
    right: tuple[Value, ...]
    ranks: str


Precision = Literal["exact", "bf16x3"]
"""How a matrix unit multiplies f32: each number in full, or as the three greatest of the four products of numbers that
are sums of two bf16."""


@dataclass(frozen=True)
class Dot:
    """`imprecise` is how many products the unit may sum in fewer bits than f32 has, before f32 takes over."""

    left: Value
    right: Value
    axis: str
    accumulator: Value | None
    left_mask: Value | None = None
    right_mask: Value | None = None
    precision: Precision = "exact"
    imprecise: int | None = None


@dataclass(frozen=True)
class NonFiniteCorrection:
    left: Value
    right: Value
    axis: str
    total: Value
    left_mask: Value | None
    right_mask: Value | None


Op = (
    Constant
    | Irrational
    | Argument
    | Extent
    | BlockSize
    | LaunchValue
    | Start
    | Positions
    | Lanes
    | Fill
    | Elementwise
    | Bound
    | Align
    | Cast
    | FinitePart
    | LoadTile
    | Search
    | ReduceTile
    | FoldTile
    | ScanTile
    | RankTile
    | MergeTile
    | Dot
    | NonFiniteCorrection
)


@dataclass(frozen=True)
class Let:
    DEFINES: ClassVar = ("value",)
    value: Value
    op: Op


@dataclass(frozen=True)
class Carried:
    """`value` is `init` before the first iteration and `next` (visible at the end of the body) after each;
    every `next` of a loop is read before any value is replaced."""

    DEFINES: ClassVar = ("value",)
    value: Value
    init: Value
    next: Value


@dataclass(frozen=True)
class For(Generic[S_co]):
    """Blocks of `axis` from `start` to `stop` in steps of the axis's block size; `stop` may fall inside a block.

    `masked` is False where no position of any block is past the end (and every predicate that cuts
    the range of the loop was proved to hold): such a body has no `Bound` of `axis`. With `masked`,
    every `Bound` of `axis` in the body has the loop's own `stop`. `start > stop` visits nothing. One that is `rare` visits
    nothing for ordinary data.
    """

    axis: str
    start: Value
    stop: Value
    carried: tuple[Carried, ...]
    body: tuple[S_co, ...]
    masked: bool = False
    rare: bool = False


@dataclass(frozen=True)
class Result:
    """`value` is `then` where the branch is taken, else `otherwise`."""

    DEFINES: ClassVar = ("value",)
    value: Value
    then: Value
    otherwise: Value


@dataclass(frozen=True)
class If(Generic[S_co]):
    """`body` where the scalar `condition` holds, alike for all threads."""

    condition: Value
    body: tuple[S_co, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True)
class PersistentLoop(Generic[S_co]):
    """Work items of the grid that a thread block of a persistent grid does, one after the other."""

    carried: tuple[Carried, ...]
    body: tuple[S_co, ...]


@dataclass(frozen=True)
class Store:
    tensor: str
    index: tuple[Value, ...]
    value: Value
    mask: Value | None


Stmt: TypeAlias = "Let | For[Stmt] | If[Stmt] | Store"


@dataclass(frozen=True)
class Kernel:
    name: str
    grid: tuple[str, ...]  # axes with grid blocks; the first varies fastest
    blocks: tuple[Block, ...]
    body: tuple[Stmt, ...]
    backwards: tuple[str, ...] = ()  # axes of the grid of which the last block goes first
    library: LibraryProduct | None = None  # what a library of matrix products runs instead


@dataclass(frozen=True, repr=False)
class TileProgram(Listed):
    """`domains` maps renamed axes to those whose extent they have, `shards` shard axes to what they divide; `passes`
    are the names of those that changed the program, in order."""

    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    domains: tuple[tuple[str, str], ...] = ()
    shards: tuple[tuple[str, str], ...] = ()
    passes: tuple[str, ...] = ()
