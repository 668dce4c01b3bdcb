"""Values of a role as Gluon expressions, and the layout that each is in.

A consumer is four warps. A tile of rows and columns is laid out as a matrix product leaves its sums: each warp has a
quarter of the rows. Values of one dim are slices of such a tile: those along the rows of one tile for all, those along
columns of the tile that they belong to. So a reduction along columns stays inside of a warp, and a value of rows spreads
over the columns of any tile without moving between threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eqfuse.tile import nodes as ir
from eqfuse.tile.check import TileError
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.gluon.functions import INSTEAD, OWN
from eqfuse.tile.triton.expressions import Piece
from eqfuse.tile.triton.functions import (
    IRRATIONAL,
    TRITON_DTYPES,
    Text,
    call,
    convert,
    elementwise,
    helper_name,
    infix,
    number,
)

GLUON_DTYPES: Mapping[str, str] = {dtype: name.replace("tl.", "gl.") for dtype, name in TRITON_DTYPES.items()}


@dataclass(frozen=True)
class Places:
    """How a role's text calls what a kernel is given: sizes, arguments, blocks, and the current block of every axis."""

    extents: Mapping[str, str]
    scalars: Mapping[str, str]
    blocks: Mapping[str, str]
    pointers: Mapping[str, str]
    strides: Mapping[str, tuple[str, ...]]
    starts: Mapping[str, str]
    whole: frozenset[str]


class Expressions:
    """The expressions of one role. `part` is the text of its number, `rows` the axis that the consumers share, `columns` one
    of the axes that tiles have beside it, by which values of rows are laid out; `divided` are axes of which each consumer has a part."""

    def __init__(self, places: Places, rows: str, columns: str, part: str, divided: frozenset[str]) -> None:
        self.places, self.rows, self.columns, self.part = places, rows, columns, part
        self.divided = divided
        self.rare = False  # whether what is printed is in a branch that is hardly ever taken
        self.pieces: dict[str, Piece] = {}
        self.helpers: set[str] = set()

    def use(self, helper: str) -> str:
        """The name of a helper, which the module then prints."""
        helper = INSTEAD.get(helper, helper)
        self.helpers.add(helper)
        return helper if helper in OWN else helper_name(helper)

    def read(self, value: ir.Value) -> Piece:
        return self.pieces[value.name]

    def code(self, value: ir.Value) -> str:
        return self.read(value).text.code

    # Layouts --------------------------------------------------------------------------------------------

    def size(self, axis: str) -> str:
        """Positions of an axis in a tile of this role."""
        return f"PART_{axis.upper()}" if axis in self.divided else self.places.blocks[axis]

    def shape(self, dims: Sequence[str]) -> str:
        return f"[{', '.join(self.size(axis) for axis in dims)}]"

    def layout(self, dims: tuple[str, ...]) -> str:
        """The layout of a value of these dims."""
        match dims:
            case (axis,) if axis == self.rows:
                return "ROWS"
            case (axis,):
                return f"gl.SliceLayout(0, TILE_{axis.upper()})"
            case (first, axis) if first == self.rows:
                return f"TILE_{axis.upper()}"
            case (_, _):  # a tile of memory
                return "MEMORY"
        raise TileError(f"a tile of {', '.join(dims)} has no layout")

    def full(self, piece: Piece, dims: tuple[str, ...], dtype: str) -> str:
        """A piece as a tile of all its elements."""
        if not dims:
            return piece.text.code
        if not piece.dims:
            shape, layout = self.shape(dims), self.layout(dims)
            return f"gl.full({shape}, {piece.text.code}, {GLUON_DTYPES[dtype]}, {layout})"
        if piece.thin:
            return f"tl.broadcast_to({piece.text.code}, {self.shape(dims)})"
        return piece.text.code

    # Ops ------------------------------------------------------------------------------------------------

    def op(self, value: ir.Value, op: ir.Op) -> Piece:
        """The op that defines a value, in terms of how its operands read."""
        places = self.places
        match op:
            case ir.Constant(plain) | ir.Fill(plain):
                return Piece(number(plain))
            case ir.Irrational(name):
                return Piece(Text(IRRATIONAL[name]))
            case ir.Argument(name) | ir.LaunchValue(name, _):
                return Piece(Text(places.scalars[name]))
            case ir.Extent(axis):
                return Piece(Text(places.extents[axis]))
            case ir.BlockSize(axis):
                return Piece(Text(places.blocks.get(axis, "1")))
            case ir.Start(axis):
                return Piece(Text("0" if axis in places.whole else places.starts[axis]))
            case ir.Positions(axis):
                return Piece(self._positions(axis), value.dims)
            case ir.Lanes(axis):
                return Piece(self._lanes(axis), value.dims)
            case ir.Bound(axis, stop):
                at = self._positions(axis) if value.dims else Text(places.starts[axis])
                return Piece(infix("lt", at, self.read(stop).text), value.dims)
            case ir.Align(source):
                return self.aligned(self.read(source), value.dims)
            case ir.Cast(source):
                piece = self.read(source)
                return Piece(self._converted(piece, source.dtype, value.dtype), piece.dims, piece.thin)
            case ir.Elementwise(fn, args, _):
                return self._elementwise(value, fn, args, op)
            case ir.FinitePart(source):
                self.use("is_finite")
                piece = self.read(source)
                return Piece(call(self.use("finite_part"), piece.text), piece.dims, piece.thin)
            case ir.ReduceTile(fn, source, axis):
                return self._reduce(fn, source, axis, value)
            case ir.LoadTile():
                return self._load(op, value)
        raise TileError(f"{value.name} has no form in Gluon: {type(op).__name__}")

    def _positions(self, axis: str) -> Text:
        lanes = self._lanes(axis)
        return lanes if axis in self.places.whole else infix("add", Text(self.places.starts[axis]), lanes)

    def _lanes(self, axis: str) -> Text:
        lanes = call("gl.arange", "0", self.size(axis), self.layout((axis,)))
        if self.rare:
            lanes = call(self.use("at_use"), lanes)
        if axis not in self.divided:
            return lanes
        return infix("add", Text(f"{self.part} * {self.size(axis)}", 4), lanes)

    def aligned(self, piece: Piece, dims: tuple[str, ...]) -> Piece:
        """The piece with these dims, those that it lacks thin."""
        if not piece.dims or piece.dims == dims:
            return piece
        if len(dims) == 2 and len(piece.dims) == 1 and dims[0] != self.rows:
            place = dims.index(piece.dims[0])
            code = f"gl.convert_layout({piece.text.code}, gl.SliceLayout({1 - place}, MEMORY))"
            return Piece(
                Text(f"{code}{('[:, None]', '[None, :]')[place]}"), dims, frozenset(dims) - {*piece.dims}
            )
        if len(dims) != 2 or len(piece.dims) != 1 or dims[0] != self.rows:
            raise TileError(f"a tile of {', '.join(piece.dims)} has no layout as one of {', '.join(dims)}")
        if piece.dims[0] == dims[1]:
            return Piece(Text(f"{piece.text.at(6)}[None, :]"), dims, frozenset(dims[:1]))
        return Piece(Text(f"{self._rows_of(piece.text, dims[1])}[:, None]"), dims, frozenset(dims[1:]))

    def _rows_of(self, rows: Text, column: str) -> str:
        """A value of rows, laid out for the tile of a column axis."""
        if column == self.columns:
            return rows.at(6)
        return f"gl.convert_layout({rows.code}, gl.SliceLayout(1, TILE_{column.upper()}))"

    def _converted(self, piece: Piece, old: str, new: str) -> Text:
        if old == new:
            return piece.text
        return convert(piece.text, new, scalar=not piece.dims, use=self.use)

    def _elementwise(self, value: ir.Value, fn: str, args: Sequence[ir.Value], op: ir.Elementwise) -> Piece:
        pieces = [self.read(arg) for arg in args]
        if value.dims:
            pieces = [self.aligned(piece, value.dims) if piece.dims else piece for piece in pieces]
            if not any(piece.dims for piece in pieces):  # all elements are one number
                code = self.full(pieces[0], value.dims, args[0].dtype)
                pieces[0] = Piece(Text(code), value.dims)
        dtype = args[-1].dtype if fn == "where" or value.dtype == "bool" else value.dtype
        text = elementwise(fn, [p.text for p in pieces], dtype, division=op.division, use=self.use)
        tiles = [piece for piece in pieces if piece.dims]
        if not tiles:
            return Piece(text)
        thin = frozenset(value.dims).intersection(*(piece.thin for piece in tiles))
        return Piece(text, value.dims, thin)

    def _reduce(self, fn: str, source: ir.Value, axis: str, value: ir.Value) -> Piece:
        piece = self.read(source)
        place = source.dims.index(axis)
        code = Text(self.full(piece, source.dims, source.dtype))
        code = self._converted(Piece(code, source.dims), source.dtype, value.dtype)
        if fn == "sum" or (fn in ("max", "min") and value.dtype in INTEGERS):
            text = call(f"gl.{fn}", code, str(place))
        else:
            combine = {"max": "maximum", "min": "minimum", "prod": "product"}[fn]
            text = call("gl.reduce", code, str(place), self.use(combine))
        if len(source.dims) == 2 and source.dims[0] != self.rows:
            text = call("gl.convert_layout", text, self.layout(value.dims))
        elif value.dims and axis != self.columns:
            text = call("gl.convert_layout", text, "ROWS")
        return Piece(text, value.dims)

    # Memory ---------------------------------------------------------------------------------------------

    def pointer(self, tensor: str, index: Sequence[ir.Value], dims: tuple[str, ...]) -> Text:
        """The address of an element or a tile of elements, in 64 bits."""
        pointer = Text(self.places.pointers[tensor])
        for place, stride in zip(index, self.places.strides[tensor], strict=True):
            piece = self.aligned(self.read(place), dims)
            text, scalar = piece.text, not piece.dims
            if text.code == "0":
                continue
            if stride == "1":
                pointer = infix("add", pointer, text)
                continue
            if scalar and self.rare:
                text = call(self.use("at_use"), text)
            wide = convert(text, "i64", scalar=scalar, use=self.use)
            pointer = infix("add", pointer, infix("mul", wide, Text(stride)))
        return pointer

    def _load(self, op: ir.LoadTile, value: ir.Value) -> Piece:
        arguments = [self.pointer(op.tensor, op.index, value.dims).code]
        if op.mask is not None:
            mask = self.aligned(self.read(op.mask), value.dims)
            other = number(int(op.other) if value.dtype in INTEGERS else float(op.other))
            arguments += [f"mask={mask.text.code}", f"other={other.code}"]
        return Piece(Text(f"gl.load({', '.join(arguments)})"), value.dims)
