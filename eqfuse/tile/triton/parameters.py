"""Names of a kernel's parameters, and what a launch has to know of them."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from eqfuse.loops.blocks import Block
from eqfuse.names import Names as AnyNames
from eqfuse.terms.nodes import Size, walk
from eqfuse.tile import nodes as ir
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.triton.functions import HELPERS, helper_name
from eqfuse.tile.walk import nested, ops_of

SHORT = 64
"""A block that holds an axis of matrix products whole has at least so many positions, where lengths differ and no tile is
made wider than `WIDE` by it."""

WIDE = 16384
"""Elements of a tile: more of them are too many for the threads of a block."""

ALIGNMENT = 16
"""What Triton asks of an extent before it joins masks of neighbours."""

INDEX = "INDEX"
"""The parameter that is the dtype of positions."""

_TAKEN = frozenset(
    (
        *("tl", "torch", "triton", "warnings", "libdevice", "float", "pid", INDEX, "WAITS", "LEADS"),
        *map(helper_name, HELPERS),
        *keyword.kwlist,
    )
)


class Names(AnyNames):
    """Identifiers of a module's text."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        super().__init__((*_TAKEN, *taken))

    def local(self, wanted: str) -> str:
        """A name for a value of the tile program, where numbers and dtypes (`x_2_f32`) only tell copies apart."""
        return self.fresh(re.sub(r"_(\d+|f32|f64)(?=_|$)", "", wanted))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Names that are made inside are free again after it."""
        taken = set(self.taken)
        yield
        self.taken = taken


@dataclass(frozen=True)
class TensorInfo:
    """What a kernel has to know of a tensor: its dtype, a label for each dim's stride, and the axis of its last dim."""

    dtype: str
    labels: tuple[str, ...]
    last: str | None = None


@dataclass(frozen=True)
class Tables:
    """Facts about the whole program that every kernel's text depends on.

    `root` maps an axis to the one whose extent it has. `shards` are the axes that count shards. `ragged` axes do not fill a
    block that holds them whole.
    `index` is the dtype of positions: a parameter of that name, or the dtype itself.
    """

    tensors: Mapping[str, TensorInfo]
    root: Mapping[str, str]
    shards: frozenset[str] = frozenset()
    ragged: frozenset[str] = frozenset()
    index: str = INDEX


@dataclass
class Parameters:
    """Names of a kernel's parameters, by what they stand for; dicts are in the order of the signature.

    `even` are flags that say that the extent of a whole axis is its block size: one binary without masks, which rows that
    are read once take a tenth longer for, and one for all other extents. `stages`, of a kernel that loops, is the depth to
    which loops prefetch; left to itself, Triton prefetches for dots alone.
    `flags` are WAITS, of a kernel after another one: it is launched before that one has ended, and so waits for
    what that has written, and LEADS, of a kernel before another one: the next may be launched from now on.
    `any_size` are the extents that Triton compiles nothing apart for: of axes along which no memory is contiguous, and of
    shards; strides of shards, and integers, are among them. Masks of rows, `divided` among thread blocks, take registers; a shard
    of an axis along which memory is contiguous is not loaded as vectors where it may start anywhere: `lengths` are the integers
    made of sizes of such axes, with the axis. `aligned` are flags, by axis, that say that these are multiples of 16: one row alone says
    nothing of what is loaded along others. Masks of axes that are walked are those of the last step alone.
    `held` are the fewest positions of blocks of whole axes of products that other calls may have more or fewer positions of:
    shorter ones would be binaries of their own. The last parameter is INDEX, the dtype of positions: int64 where some offset of an
    element needs it; it is none where that dtype is known when the kernel is printed.
    """

    pointers: dict[str, str] = field(default_factory=dict)
    strides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    extents: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, tuple[str, str]] = field(default_factory=dict)  # name and dtype
    blocks: dict[str, str] = field(default_factory=dict)
    even: dict[str, str] = field(default_factory=dict)
    stages: str | None = None
    flags: tuple[str, ...] = ()
    any_size: tuple[str, ...] = ()
    held: dict[str, int] = field(default_factory=dict)
    aligned: dict[str, str] = field(default_factory=dict)
    divided: tuple[str, ...] = ()
    lengths: dict[str, str] = field(default_factory=dict)
    index: str = INDEX

    def signature(self) -> list[str]:
        return [
            *self.pointers.values(),
            *(name for names in self.strides.values() for name in names),
            *self.extents.values(),
            *(f"{name}: tl.float64" if dtype == "f64" else name for name, dtype in self.scalars.values()),
            *(f"{name}: tl.constexpr" for name in (*self.blocks.values(), *self.even.values())),
            *(f"{flag}: tl.constexpr" for flag in self.aligned.values()),
            *(() if self.stages is None else (f"{self.stages}: tl.constexpr",)),
            *(f"{flag}: tl.constexpr" for flag in self.flags),
            *((f"{INDEX}: tl.constexpr",) if self.index == INDEX else ()),
        ]


def is_tile(block: Block) -> bool:
    """Whether an axis is a dim of tiles; otherwise it is a scalar position."""
    return block.kind in ("loop", "whole") or (block.kind == "grid" and block.size != 1)


def parameters_of(kernel: ir.Kernel, tables: Tables, names: Names, flags: tuple[str, ...]) -> Parameters:
    """The parameters of a kernel, named. Blocks of one position are none."""
    found = Parameters(flags=flags, index=tables.index)
    scalars: dict[str, str] = {}
    extents = [*kernel.grid[:-1], *(axis for axis in kernel.grid[-1:] if axis in kernel.backwards)]
    bounds: list[str] = []
    last: set[str] = set()
    multiplied: set[str] = set()
    lengths: dict[str, list[str]] = {}
    strides: list[str] = []
    for stmt in nested(kernel.body):
        match stmt:
            case ir.Let(_, ir.LoadTile(index=(*_, at))) | ir.Store(index=(*_, at)):
                last.update(tables.root[axis] for axis in at.dims)
            case ir.Let(_, ir.Dot(left, right)):
                multiplied.update((*left.dims, *right.dims))
        match stmt:
            case ir.Let(_, ir.LoadTile(tensor, _, _, _) | ir.Search(tensor)) | ir.Store(tensor, _, _, _):
                if tensor not in found.pointers:
                    labels = tables.tensors[tensor].labels
                    found.pointers[tensor] = names.fresh(f"{tensor}_ptr")
                    found.strides[tensor] = tuple(names.fresh(f"{tensor}_stride_{label}") for label in labels)
                    if tables.tensors[tensor].last in tables.shards:
                        strides += found.strides[tensor][:-1]
            case ir.Let(value, ir.Argument(name) | ir.LaunchValue(name, _) as op):
                scalars.setdefault(name, value.dtype)
                if isinstance(op, ir.LaunchValue) and value.dtype in INTEGERS:
                    lengths[name] = [tables.root[n.axis] for n in walk(op.expr) if isinstance(n, Size)]
            case ir.Let(_, ir.Extent(axis)):
                extents.append(axis)
            case ir.Let(_, ir.Bound(axis, _)):
                bounds.append(axis)
    for axis in extents:
        root = tables.root[axis]
        if root not in found.extents:
            found.extents[root] = names.fresh(f"N_{root}")
    last -= tables.shards
    found.any_size = (*strides, *(name for axis, name in found.extents.items() if axis not in last))
    found.lengths = {name: axis for name, axes in lengths.items() for axis in axes if axis in last}
    rows = {tables.root[b.axis] for b in kernel.blocks if b.kind == "grid" and is_tile(b)} - tables.shards
    found.divided = tuple(axis for axis in found.extents if axis in rows - last)
    for axis in dict.fromkeys((*found.divided, *found.lengths.values())):
        found.aligned[axis] = names.fresh(f"ALIGNED_{axis.upper()}")
    found.scalars = {name: (names.fresh(name), dtype) for name, dtype in scalars.items()}
    found.any_size += tuple(name for name, dtype in found.scalars.values() if dtype in INTEGERS)
    for block in filter(is_tile, kernel.blocks):
        upper = f"BLOCK_{block.axis.upper()}"
        taken = upper in found.blocks.values()
        found.blocks[block.axis] = names.fresh(f"BLOCK_{block.axis}" if taken else upper)
    whole = {block.axis for block in kernel.blocks if block.kind == "whole"}
    found.held = dict.fromkeys((whole & multiplied & tables.ragged) - _of_wide_tiles(kernel), SHORT)
    for axis in dict.fromkeys(bounds):
        if axis in whole and axis not in found.held:
            found.even[axis] = names.fresh(found.blocks[axis].replace("BLOCK", "EVEN", 1))
    if any(isinstance(stmt, ir.For) for stmt in kernel.body):
        found.stages = names.fresh("STAGES")
    return found


def _of_wide_tiles(kernel: ir.Kernel) -> set[str]:
    """The axes of tiles that are wide where every axis that a block holds whole has `SHORT` positions."""
    sizes = {block.axis: block.size or SHORT for block in kernel.blocks}
    tiles = (stmt.value.dims for stmt in nested(kernel.body) if isinstance(stmt, ir.Let))
    return {a for dims in tiles if math.prod(sizes.get(a, 1) for a in dims) > WIDE for a in dims}


def least_blocks(kernel: ir.Kernel, parameters: Parameters) -> dict[str, int]:
    """By parameter, the least size of blocks that have to hold a fixed number of positions."""
    held = {block.axis: block.valid for block in kernel.blocks if block.valid is not None}
    held |= parameters.held
    return {parameters.blocks[axis]: 1 << (valid - 1).bit_length() for axis, valid in held.items()}


def largest_blocks(kernel: ir.Kernel, parameters: Parameters) -> dict[str, int]:
    """By parameter, the largest size of blocks whose first position is divided to stand for all of them."""
    ops = ops_of(kernel.body)
    sizes = {block.axis: block.size for block in kernel.blocks if is_tile(block)}
    found = {}
    for op in ops.values():
        match op:
            case ir.Elementwise("floordiv" | "mod", (position, divisor)):
                first = ops.get(position.name)
                if isinstance(first, ir.Start) and isinstance(ops.get(divisor.name), ir.Constant):
                    size = sizes.get(first.axis)
                    if size is not None:
                        found[parameters.blocks[first.axis]] = size
    return found
