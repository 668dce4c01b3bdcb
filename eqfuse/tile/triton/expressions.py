"""Values of a tile kernel as Triton expressions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eqfuse.loops.blocks import Block
from eqfuse.terms.dtypes import FLOAT8
from eqfuse.terms.folds import MAX_RANKS, fold_of
from eqfuse.terms.functions import ROUNDINGS
from eqfuse.terms.nodes import Fold
from eqfuse.tile import nodes as ir
from eqfuse.tile.check import TileError
from eqfuse.tile.def_use import Uses
from eqfuse.tile.dtypes import INTEGERS, NARROW
from eqfuse.tile.triton.folds import (
    SWAP,
    SWAP_SOURCE,
    combine_name,
    combine_source,
    exchange_name,
    exchange_source,
    merge_name,
    merge_source,
    ranks_name,
    ranks_source,
)
from eqfuse.tile.triton.functions import (
    ATOM,
    IRRATIONAL,
    TRITON_DTYPES,
    Text,
    call,
    convert,
    elementwise,
    fold,
    helper_name,
    infix,
    number,
)
from eqfuse.tile.triton.parameters import Names, Parameters, Tables, is_tile, least_blocks
from eqfuse.tile.walk import operands

FoldOp = ir.FoldTile | ir.ScanTile | ir.RankTile | ir.MergeTile
"""Ops that make one state variable of several that are made together."""


@dataclass(frozen=True)
class Piece:
    """How a value reads: an expression, and the dims of the tile that it is, in order.

    Dims in `thin` have extent one and broadcast. Without dims it is a scalar, which also stands
    for a tile whose elements are all equal.
    """

    text: Text
    dims: tuple[str, ...] = ()
    thin: frozenset[str] = frozenset()


class Expressions:
    """The values of one kernel as Triton expressions.

    `pieces` are the values that the text so far defines. `positions` and `starts` are the variables of every axis; a scalar axis has
    one for both. `folds` are the variables of registered folds, `combines` their combine functions. `helpers` are the
    functions of the module that the text calls, `least` the smallest sizes of blocks that its dots allow.
    """

    def __init__(
        self, kernel: ir.Kernel, uses: Uses, parameters: Parameters, tables: Tables, names: Names
    ) -> None:
        self.pieces: dict[str, Piece] = {}
        self.helpers: set[str] = set()
        self.folds: dict[tuple[str, ...], str] = {}
        self.combines: dict[str, str] = {}
        self.least = least_blocks(kernel, parameters)
        self._blocks: Mapping[str, Block] = {block.axis: block for block in kernel.blocks}
        self.positions = {axis: names.fresh(axis) for axis in self._blocks}
        self.starts = {
            axis: names.fresh(f"{axis}_start") if is_tile(block) else self.positions[axis]
            for axis, block in self._blocks.items()
        }
        self._uses = uses
        self._parameters = parameters
        self._tables = tables

    def code(self, value: ir.Value) -> str:
        """The expression of a scalar."""
        return self.read(value).text.code

    def read(self, value: ir.Value) -> Piece:
        """How a value reads."""
        return self.pieces[value.name]

    def use(self, helper: str) -> str:
        """The name of a helper, which the module then prints."""
        self.helpers.add(helper)
        return helper_name(helper)

    def op(self, value: ir.Value, op: ir.Op) -> Piece:
        """The op that defines a value, in terms of how its operands read."""
        names = self._parameters
        match op:
            case ir.Constant(plain) | ir.Fill(plain):
                return Piece(number(plain))
            case ir.Irrational(name):
                return Piece(Text(IRRATIONAL[name]))
            case ir.Argument(name):
                return Piece(Text(names.scalars[name][0]))
            case ir.Extent(axis):
                return Piece(Text(names.extents[self._tables.root[axis]]))
            case ir.BlockSize(axis):
                return Piece(Text(names.blocks.get(axis, "1")))
            case ir.LaunchValue(name, _):
                return Piece(Text(names.scalars[name][0]))
            case ir.Start(axis):
                whole = self._blocks[axis].kind == "whole"
                return Piece(Text("0" if whole else self.starts[axis]))
            case ir.Positions(axis):
                return Piece(Text(self.positions[axis]), value.dims)
            case ir.Lanes(axis):
                return Piece(call("tl.arange", "0", names.blocks[axis]), value.dims)
            case ir.Bound(axis, stop):
                return self._bound(axis, stop, value)
            case ir.Align(source):
                return self.aligned(self.read(source), value.dims)
            case ir.Cast(source):
                piece = self.read(source)
                return Piece(self._converted(piece, source.dtype, value.dtype), piece.dims, piece.thin)
            case ir.Elementwise(fn, args, division):
                return self._elementwise(fn, args, division, value)
            case ir.LoadTile():
                return self._load(op, value)
            case ir.Search():
                return self._search(op)
            case ir.ReduceTile(fn, source, axis):
                return self._reduce(fn, source, axis, value)
            case ir.FoldTile(_, _, axis):
                return self._fold(op, axis, value)
            case ir.RankTile() | ir.MergeTile() | ir.ScanTile():
                return Piece(Text(f"{self.folds[self.fold_key(op)]}[{_variable(op)}]"), value.dims)
            case ir.FinitePart(source):
                self.use("is_finite")
                return Piece(call(self.use("finite_part"), self.full(self.read(source), source)), value.dims)
            case ir.Dot():
                return self._dot(op, value)
            case ir.NonFiniteCorrection():
                return self._rest_of_product(op, value)

    def _converted(self, piece: Piece, dtype: str, wanted: str) -> Text:
        if dtype == wanted:
            return piece.text
        text, scalar = piece.text, not piece.dims
        if "f64" in (dtype, wanted) and (
            dtype in FLOAT8 or wanted in FLOAT8
        ):  # there is no direct conversion
            text = convert(text, "f32", scalar=scalar, use=self.use)
        return convert(text, wanted, scalar=scalar, use=self.use)

    def _bound(self, axis: str, stop: ir.Value, value: ir.Value) -> Piece:
        if not is_tile(self._blocks[axis]):
            return Piece(Text("True"))
        end = self.read(stop).text
        even = self._parameters.even.get(axis)
        if even is not None and isinstance(self._uses.ops.get(stop.name), ir.Extent):
            end = Text(f"({self._parameters.blocks[axis]} if {even} else {end.code})")
        return Piece(infix("lt", Text(self.positions[axis]), end), value.dims)

    def aligned(self, piece: Piece, dims: tuple[str, ...]) -> Piece:
        """A piece permuted to the order of `dims`, with thin dims where it has none."""
        if not piece.dims or piece.dims == dims:
            return piece
        order = tuple(axis for axis in dims if axis in piece.dims)
        text = piece.text
        if order != piece.dims:
            places = ", ".join(str(piece.dims.index(axis)) for axis in order)
            text = call("tl.trans", text) if len(order) == 2 else call("tl.permute", text, f"({places})")
        missing = frozenset(dims) - frozenset(order)
        if missing:
            subscript = ", ".join("None" if axis in missing else ":" for axis in dims)
            text = Text(f"{text.at(ATOM)}[{subscript}]")
        return Piece(text, dims, piece.thin | missing)

    def full(self, piece: Piece, value: ir.Value) -> Text:
        """A piece as a tile of all of the value's dims (or, without dims, as a scalar of its dtype)."""
        dtype = TRITON_DTYPES[value.dtype]
        piece = self.aligned(piece, value.dims)
        if not value.dims:
            exact = piece.text.code.isidentifier() and value.dtype not in INTEGERS
            return piece.text if exact else call("tl.cast", piece.text, dtype)
        if not piece.dims:
            if piece.text.code in ("0.0", "0"):
                return call("tl.zeros", self._shape(value.dims), dtype)
            return call("tl.full", self._shape(value.dims), piece.text, dtype)
        if value.dtype in INTEGERS and value.dtype != "bool":  # positions may be wider
            piece = Piece(call("tl.cast", piece.text, dtype), piece.dims, piece.thin)
        return call("tl.broadcast_to", piece.text, self._shape(value.dims)) if piece.thin else piece.text

    def _elementwise(
        self, fn: str, args: tuple[ir.Value, ...], division: ir.Division, value: ir.Value
    ) -> Piece:
        pieces = [self.read(arg) for arg in args]
        tiles = [piece for piece in pieces if piece.dims]
        dims = value.dims if tiles else ()
        thin = frozenset.intersection(*(piece.thin for piece in tiles)) if tiles else frozenset()
        if fn in ("and", "or") and (known := [p for p in pieces if p.text.code != "True"]) != pieces:
            return (known[0] if known else pieces[0]) if fn == "and" else Piece(Text("True"))
        computed = "f32" if value.dtype in INTEGERS else value.dtype
        texts = [
            self._converted(piece, arg.dtype, computed) if arg.dtype in NARROW else piece.text
            for piece, arg in zip(pieces, args, strict=True)
        ]
        if fn == "mul" and [_last_broadcast(piece, dims) for piece in pieces] == [2, 0]:
            texts.reverse()
        dtype = args[-1].dtype if value.dtype == "bool" or fn in ROUNDINGS else value.dtype
        text = elementwise(
            fn,
            texts,
            dtype,
            division=division,
            use=self.use,
        )
        return Piece(text, dims, thin)

    def _is_wide(self, value: ir.Value) -> bool:
        """Whether an integer has at least the bits of INDEX, as positions and what is made of them do."""
        match self._uses.ops.get(value.name):
            case ir.Constant() | ir.Positions():
                return True
            case ir.Start(axis):
                return self._blocks[axis].kind in ("grid", "unit")
            case ir.Align(source):
                return self._is_wide(source)
            case ir.Elementwise("where", (_, left, right)):
                return self._is_computed_wide(left) or self._is_computed_wide(right)
            case ir.Elementwise(_, args):
                return any(map(self._is_computed_wide, args))
            case _:
                return value.dtype == "i64"

    def _is_computed_wide(self, value: ir.Value) -> bool:
        return self._is_wide(value) and not isinstance(self._uses.ops.get(value.name), ir.Constant)

    # Memory -------------------------------------------------------------------------------------

    def union(self, values: Iterable[ir.Value]) -> tuple[str, ...]:
        """Every dim that one of the values has, in the order of the kernel's blocks."""
        read = {axis for value in values for axis in value.dims}
        return tuple(axis for axis in self._blocks if axis in read)

    def mask(self, mask: ir.Value, dims: tuple[str, ...]) -> Piece:
        """A mask with its dims in the order of `dims`; one that has another order is spelt out anew."""
        piece = self.pieces[mask.name]
        if tuple(axis for axis in dims if axis in piece.dims) != piece.dims:
            match self._uses.ops.get(mask.name):
                case ir.Align(source):
                    return self.mask(source, dims)
                case ir.Elementwise("and", (left, right)):
                    sides = self.mask(left, dims), self.mask(right, dims)
                    return Piece(infix("and", *(p.text for p in sides)), dims, sides[0].thin & sides[1].thin)
        return self.aligned(piece, dims)

    def pointer(
        self, tensor: str, index: tuple[ir.Value, ...], dims: tuple[str, ...]
    ) -> tuple[Text, frozenset[str]]:
        """The address of every element, and the dims that no index depends on."""
        strides = self._parameters.strides[tensor]
        pointer, covered = self._shifted(Text(self._parameters.pointers[tensor]), index, strides, dims)
        return pointer, frozenset(dims) - covered

    def _shifted(
        self, pointer: Text, index: Sequence[ir.Value], strides: Sequence[str], dims: tuple[str, ...]
    ) -> tuple[Text, set[str]]:
        """A pointer moved by positions, and the dims that they depend on."""
        covered: set[str] = set()
        for value, stride in zip(index, strides, strict=True):
            piece = self.read(value)
            if not self._is_wide(value):
                piece = Piece(call("tl.cast", piece.text, self._tables.index), piece.dims, piece.thin)
            piece = self.aligned(piece, dims)
            covered |= set(piece.dims) - piece.thin
            if piece.text.code != "0":
                pointer = infix("add", pointer, infix("mul", piece.text, Text(stride)))
        return pointer, covered

    def _search(self, op: ir.Search) -> Piece:
        strides = list(self._parameters.strides[op.tensor])
        stride = strides.pop(op.place)
        first, _ = self._shifted(Text(self._parameters.pointers[op.tensor]), op.index, strides, ())
        stop, target = self.read(op.stop).text, self.read(op.target).text
        return Piece(call(self.use("search"), first, stride, stop, target, str(op.right)))

    def _load(self, op: ir.LoadTile, value: ir.Value) -> Piece:
        dims = self._uses.load_order(value)
        pointer, thin = self.pointer(op.tensor, op.index, dims)
        dtype = self._tables.tensors[op.tensor].dtype
        arguments = [pointer.code]
        if op.mask is not None and (mask := self.mask(op.mask, dims)).text.code != "True":
            if mask.dims and thin - mask.thin:  # a mask may not have more dims than the addresses
                arguments = [call("tl.broadcast_to", pointer, self._shape(dims)).code]
                thin = frozenset()
            other = number(int(op.other) if dtype in INTEGERS else float(op.other))
            arguments += [f"mask={mask.text.code}", f"other={other.code}"]
        scalar = len(thin) == len(dims)
        piece = Piece(Text(f"tl.load({', '.join(arguments)})"), () if scalar else dims, thin)
        return Piece(self._converted(piece, dtype, value.dtype), piece.dims, piece.thin)

    # Folds --------------------------------------------------------------------------------------

    def _reduce(self, fn: str, source: ir.Value, axis: str, value: ir.Value) -> Piece:
        piece = self.read(source)
        if not piece.dims or axis in piece.thin:
            piece = Piece(self.full(piece, source), source.dims)
        is_loaded = isinstance(self._uses.ops.get(source.name), ir.LoadTile) and source.dtype == value.dtype
        if is_loaded and piece.dims[:-1] and piece.dims[-1] == axis:
            # Where a loop adds up what it loads, a pass of Triton's puts positions of other dims in each other's place unless
            # memory is contiguous along the last one (its pull request 11186); of other dims than the last it keeps away.
            piece = self.aligned(piece, (axis, *piece.dims[:-1]))
        text = self._converted(piece, source.dtype, value.dtype)
        dims = tuple(name for name in piece.dims if name != axis)
        return Piece(fold(fn, text, piece.dims.index(axis), value.dtype, self.use), dims, piece.thin - {axis})

    def fold_key(self, op: FoldOp) -> tuple[str, ...]:
        """What tells the fold of all state variables together from others."""
        if isinstance(op, ir.ScanTile):
            return (op.fold.name, *(value.name for value in op.values), op.axis)
        axes = (op.axis,) if isinstance(op, ir.FoldTile) else (_along(op), op.ranks)
        return (op.op.partition(".")[0], *(value.name for value in operands(op)), *axes)

    def folded(self, op: FoldOp) -> Text:
        """All state variables together, a tuple."""
        match op:
            case ir.FoldTile():
                return self._reduced(op)
            case ir.ScanTile(fold, _, values, axis):
                return self._in_order("tl.associative_scan", fold, values, axis)
            case _:
                return self._listed(op)

    def _listed(self, op: ir.RankTile | ir.MergeTile) -> Text:
        """The list of what comes first, of the elements of a tile or of two lists."""
        found = fold_of(op.op)
        assert found is not None  # checked
        fold, _ = found
        values = operands(op)
        dtypes = tuple(value.dtype for value in values[: len(fold.state)])
        self._combine(fold, dtypes)
        tiles = [self.full(self.read(value), value).code for value in values]
        names, dims = self._parameters, values[0].dims
        shape = len(dims), dims.index(_along(op))
        if isinstance(op, ir.RankTile):
            name = ranks_name(fold, dtypes, *shape)
            self.combines.setdefault(name, ranks_source(fold, dtypes, *shape))
            return call(name, *tiles, names.extents[self._tables.root[op.ranks]], names.blocks[op.ranks])
        name = merge_name(fold, dtypes, *shape)
        self.combines.setdefault(SWAP, SWAP_SOURCE)
        self.combines.setdefault(exchange_name(fold, dtypes), exchange_source(fold, dtypes))
        self.combines.setdefault(name, merge_source(fold, dtypes, *shape, MAX_RANKS))
        return call(name, *tiles, *(names.blocks[dim] for dim in dims))

    def _combine(self, fold: Fold, dtypes: tuple[str, ...]) -> str:
        """The name of the function that combines two states."""
        name = combine_name(fold, dtypes)
        if name not in self.combines:
            self.combines[name] = combine_source(fold, dtypes, self.use)
        return name

    def _reduced(self, op: ir.FoldTile) -> Text:
        """A reduction; where the order of positions matters, a scan."""
        found = fold_of(op.op)
        assert found is not None  # checked
        # A reduction may combine parts in any order.
        function = "tl.reduce" if found[0].commutative else "tl.associative_scan"
        return self._in_order(function, found[0], op.values, op.axis)

    def _in_order(self, function: str, fold: Fold, values: Sequence[ir.Value], axis: str) -> Text:
        """A function of Triton's that combines the positions of an axis."""
        combine = self._combine(fold, tuple(value.dtype for value in values))
        tiles = "".join(f"{self.full(self.read(value), value).code}, " for value in values)
        tiles = tiles if len(values) == 1 else tiles.rstrip(", ")
        return call(function, f"({tiles.rstrip()})", str(values[0].dims.index(axis)), combine)

    def _fold(self, op: ir.FoldTile, axis: str, value: ir.Value) -> Piece:
        """One state variable of what is folded together: of a scan, the last position's."""
        found = fold_of(op.op)
        assert found is not None  # checked
        fold, place = found
        text = Text(f"{self.folds[self.fold_key(op)]}[{place}]")
        if not fold.commutative:
            dims, block = op.values[0].dims, self._parameters.blocks[axis]
            lanes = ", ".join(":" if dim == axis else "None" for dim in dims)
            last = f"(tl.arange(0, {block}) == {block} - 1)[{lanes}]"
            zero = "0" if value.dtype in INTEGERS else "0.0"
            text = call("tl.sum", call("tl.where", last, text, zero), str(dims.index(axis)))
        return Piece(text, value.dims)

    def _dot(self, op: ir.Dot, value: ir.Value) -> Piece:
        if op.left_mask or op.right_mask:
            raise TileError(
                f"{value.name} is a masked product, which no matrix unit has: run the passes first"
            )
        dtype, block = op.left.dtype, self._parameters.blocks[op.axis]
        self.least[block] = max(self.least.get(block, 1), 32 if dtype in FLOAT8 else 16)
        operands = (op.left, op.right, *(() if op.accumulator is None else (op.accumulator,)))
        arguments = [self.full(self.read(side), side).code for side in operands]
        if dtype in ("f32", "f64"):
            arguments.append(f'input_precision="{"ieee" if op.precision == "exact" else op.precision}"')
        if op.imprecise is not None:
            most = op.imprecise
            arguments.append(f"max_num_imprecise_acc=None if {block} <= {most} else {most}")
        if value.dtype == "f64":
            arguments.append("out_dtype=tl.float64")
        return Piece(call("tl.dot", *arguments), value.dims)

    def _rest_of_product(self, op: ir.NonFiniteCorrection, value: ir.Value) -> Piece:
        self.use("is_finite")
        sides = [self.full(self.read(side), side).code for side in (op.left, op.right)]
        masks = [
            "None" if mask is None else self.full(self.read(mask), mask).code
            for mask in (op.left_mask, op.right_mask)
        ]
        total = self.full(self.read(op.total), op.total).code
        return Piece(call(self.use("rest_of_product"), *sides, *masks, total), value.dims)

    def _shape(self, dims: Sequence[str]) -> str:
        names = [self._parameters.blocks[axis] for axis in dims]
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _last_broadcast(piece: Piece, dims: Sequence[str]) -> int:
    """The last of a tile's dims that an operand is broadcast along, by its place. Triton takes a sum of products of operands that are
    broadcast along dims 2 and 0, in this order, for a product of matrices: of float32 in tf32, along whichever dim the sum is (its pass
    `triton-combine`, 3.4 to 3.7)."""
    return max((k for k, dim in enumerate(dims) if dim not in piece.dims or dim in piece.thin), default=-1)


def _along(op: ir.RankTile | ir.MergeTile) -> str:
    """The axis whose positions a list is made of."""
    return op.axis if isinstance(op, ir.RankTile) else op.ranks


def _variable(op: ir.RankTile | ir.MergeTile | ir.ScanTile) -> int:
    """The state variable that an op is of, by its place."""
    if isinstance(op, ir.ScanTile):
        return op.place
    found = fold_of(op.op)
    assert found is not None  # checked
    return found[1]
