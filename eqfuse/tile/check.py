"""Whether a tile program holds together: definitions, dims, dtypes and blocks, at every boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eqfuse.errors import EqfuseError
from eqfuse.loops.blocks import Block
from eqfuse.terms.dtypes import DTYPES
from eqfuse.terms.folds import fold_of, is_ranked
from eqfuse.terms.functions import ARITY
from eqfuse.terms.nodes import COMBINE, Call, Const, Expr, Fold, Size
from eqfuse.tile import nodes as ir
from eqfuse.tile.dtypes import INTEGERS, operand_dtypes, result_dtype
from eqfuse.tile.walk import operands


class TileError(EqfuseError):
    """A tile program that does not hold together, or a nest that its blocks cannot walk.

    No source text causes it: it is a fault of the compiler, or of blocks chosen by hand.
    """


def check(program: ir.TileProgram, dtypes: Mapping[str, str] | None = None) -> None:
    """Raises TileError where the program is malformed. With `dtypes` (of inputs and scalars), loads
    and arguments are checked against them."""
    known = {**(dtypes or {}), **{buffer.name: buffer.dtype for buffer in program.buffers if buffer.dtype}}
    ranks = {buffer.name: len(buffer.axes) for buffer in program.buffers}
    for kernel in program.kernels:
        _KernelCheck(kernel, known, ranks).run()


class _KernelCheck:
    def __init__(self, kernel: ir.Kernel, dtypes: Mapping[str, str], ranks: Mapping[str, int]) -> None:
        self._kernel = kernel
        self._dtypes = dtypes
        self._ranks = ranks
        self._blocks: dict[str, Block] = {}
        self._visible: dict[str, ir.Value] = {}
        self._names: set[str] = set()
        self._open: list[ir.For[ir.Stmt]] = []
        self._extents: dict[str, str] = {}

    def run(self) -> None:
        for block in self._kernel.blocks:
            self._require(block.axis not in self._blocks, f"two blocks of axis {block.axis!r}")
            positive = (
                block.size is None if block.kind == "whole" else block.size is not None and block.size >= 1
            )
            self._require(positive, f"axis {block.axis!r} has a {block.kind} block of size {block.size}")
            self._require(
                block.kind != "unit" or block.size == 1, f"unit block of axis {block.axis!r} has size 1"
            )
            self._require(
                block.valid is None or (block.kind == "grid" and 1 <= block.valid <= (block.size or 0)),
                f"axis {block.axis!r} has a {block.kind} block of {block.size}, {block.valid} of them valid",
            )
            self._blocks[block.axis] = block
        grid = {block.axis for block in self._kernel.blocks if block.kind == "grid"}
        self._require(
            set(self._kernel.grid) == grid and len(self._kernel.grid) == len(grid),
            f"the grid {self._kernel.grid} is not the axes with grid blocks",
        )
        backwards = self._kernel.backwards
        self._require(
            set(backwards) <= grid and len(set(backwards)) == len(backwards),
            f"{backwards} goes backwards, of the grid {self._kernel.grid}",
        )
        self._body(self._kernel.body)

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise self._error(message)

    def _error(self, message: str) -> TileError:
        return TileError(f"kernel {self._kernel.name!r}: {message}")

    # Statements ---------------------------------------------------------------------------------

    def _body(self, body: Iterable[ir.Stmt]) -> None:
        for stmt in body:
            match stmt:
                case ir.Let(value, op):
                    for operand in operands(op):
                        self._read(operand)
                    self._op(value, op)
                    self._define(value)
                case ir.For():
                    self._for(stmt)
                case ir.If():
                    self._if(stmt)
                case ir.Store():
                    self._store(stmt)

    def _for(self, loop: ir.For[ir.Stmt]) -> None:
        block = self._block(loop.axis)
        self._require(
            block.kind in ("loop", "unit"), f"loop over axis {loop.axis!r} with a {block.kind} block"
        )
        self._require(
            all(loop.axis != outer.axis for outer in self._open), f"loop over {loop.axis!r} inside itself"
        )
        self._scalar_integer(loop.start)
        self._scalar_integer(loop.stop)
        outside = dict(self._visible)
        for item in loop.carried:
            self._read(item.init)
            for other in (item.init, item.next):
                same = (other.dims, other.dtype) == (item.value.dims, item.value.dtype)
                self._require(same, f"{_typed(item.value)} is carried from {_typed(other)}")
        for item in loop.carried:
            self._define(item.value)
        self._open.append(loop)
        self._body(loop.body)
        self._open.pop()
        for item in loop.carried:
            self._read(item.next)
        self._visible = {**outside, **{item.value.name: item.value for item in loop.carried}}

    def _if(self, branch: ir.If[ir.Stmt]) -> None:
        for value in (branch.condition, *(result.otherwise for result in branch.results)):
            self._read(value)
        condition = branch.condition
        self._require((condition.dims, condition.dtype) == ((), "bool"), f"a branch by {_typed(condition)}")
        outside = dict(self._visible)
        self._body(branch.body)
        for result in branch.results:
            self._read(result.then)
        self._visible = outside
        for result in branch.results:
            self._define(result.value)

    def _store(self, store: ir.Store) -> None:
        self._read(store.value)
        self._access(store.tensor, store.index, store.mask, store.value)
        self._require(store.tensor in self._ranks, f"store to {store.tensor!r}, which is not a buffer")
        self._require(
            len(store.index) == self._ranks[store.tensor],
            f"store to {store.tensor!r} of rank {self._ranks[store.tensor]} with {len(store.index)} indexes",
        )

    # Values -------------------------------------------------------------------------------------

    def _define(self, value: ir.Value) -> None:
        if value.name in self._names:
            raise self._error(f"{value.name!r} is defined twice")
        if value.dtype not in DTYPES:
            raise self._error(f"{value.name!r} has the unknown dtype {value.dtype!r}")
        if len(set(value.dims)) != len(value.dims):
            raise self._error(f"{_typed(value)} repeats a dim")
        for axis in value.dims:
            block = self._block(axis)
            if block.kind == "unit" or (block.kind == "grid" and block.size == 1):
                raise self._error(f"{_typed(value)} has the dim {axis!r}, which is a scalar position")
            if block.kind == "loop" and all(loop.axis != axis for loop in self._open):
                raise self._error(f"{_typed(value)} has the dim {axis!r} outside a loop over it")
        self._names.add(value.name)
        self._visible[value.name] = value

    def _read(self, value: ir.Value) -> None:
        found = self._visible.get(value.name)
        if found is None:
            raise self._error(f"{value.name!r} is read where it is not defined")
        if found is not value and found != value:
            raise self._error(f"{value.name!r} is read as {_typed(value)}")

    def _scalar_integer(self, value: ir.Value) -> None:
        self._read(value)
        fits = value.dims == () and value.dtype in ("i32", "i64")
        self._require(fits, f"{_typed(value)} is not a scalar integer")

    def _block(self, axis: str) -> Block:
        if axis not in self._blocks:
            raise self._error(f"axis {axis!r} has no block")
        return self._blocks[axis]

    # Ops ----------------------------------------------------------------------------------------

    def _op(self, value: ir.Value, op: ir.Op) -> None:
        match op:
            case ir.Constant():
                self._shape(value, (), value.dtype)
            case ir.Irrational():
                self._shape(value, (), "f64" if value.dtype == "f64" else "f32")
            case ir.Argument(name):
                self._shape(value, (), self._dtypes.get(name, value.dtype))
            case ir.Extent(axis):
                self._extents[value.name] = axis
                self._shape(value, (), "i32")
            case ir.BlockSize(axis):
                self._block(axis)
                self._shape(value, (), "i32")
            case ir.LaunchValue(_, expr):
                self._launch_value(expr)
                self._shape(value, (), "i32")
            case ir.Start(axis):
                self._position(axis)
                self._shape(value, (), "i32")
            case ir.Positions(axis) | ir.Lanes(axis):
                self._position(axis)
                self._shape(value, (axis,), "i32")
            case ir.Fill():
                self._shape(value, value.dims, value.dtype)
            case ir.Elementwise(fn, args, division):
                if division != "any" and (fn not in ("floordiv", "mod") or value.dtype not in INTEGERS):
                    raise self._error(f"{fn} is no division of integers")
                self._elementwise(value, fn, args)
            case ir.Bound(axis, stop):
                self._bound(value, axis, stop)
            case ir.Align(source):
                if not set(source.dims) <= set(value.dims):
                    raise self._error(f"{_typed(value)} loses dims of {_typed(source)}")
                self._shape(value, value.dims, source.dtype)
            case ir.Cast(source):
                self._shape(value, source.dims, value.dtype)
            case ir.FinitePart(source):
                self._require(source.dtype not in INTEGERS, f"{_typed(source)} is always finite")
                self._shape(value, source.dims, source.dtype)
            case ir.LoadTile(tensor, index, mask, _):
                self._access(tensor, index, mask, value)
            case ir.Search():
                self._search(value, op)
            case ir.ReduceTile(fold, source, axis):
                self._require(fold in COMBINE, f"unknown reduction {fold!r}")
                self._require(axis in source.dims, f"{_typed(source)} has no dim {axis!r} to fold")
                self._shape(value, tuple(dim for dim in source.dims if dim != axis), source.dtype)
            case ir.FoldTile(fold, sources, axis):
                self._fold(value, fold, sources, axis)
            case ir.ScanTile(of, place, sources, axis):
                self._tiles_of_all(of, sources, axis, of.name)
                self._shape(value, sources[0].dims, sources[place].dtype)
            case ir.RankTile(fold, sources, axis, ranks):
                self._list(value, fold, sources, axis, ranks)
            case ir.MergeTile(fold, left, right, ranks):
                self._list(value, fold, left, ranks, ranks)
                self._list(value, fold, right, ranks, ranks)
            case ir.Dot():
                self._dot(value, op)
            case ir.NonFiniteCorrection():
                self._product(value, op.left, op.right, op.axis, op.total, op.left_mask, op.right_mask)

    def _fold(self, value: ir.Value, op: str, sources: tuple[ir.Value, ...], axis: str) -> None:
        place = self._folded(op, sources, axis)
        rest = tuple(dim for dim in sources[0].dims if dim != axis)
        self._shape(value, rest, sources[place].dtype)

    def _list(self, value: ir.Value, op: str, sources: tuple[ir.Value, ...], axis: str, ranks: str) -> None:
        place = self._folded(op, sources, axis)
        self._require(is_ranked(op), f"{op} makes no list")
        self._require(self._block(ranks).kind == "whole", f"{op} lists a part of {ranks!r} alone")
        dims = tuple(ranks if dim == axis else dim for dim in sources[0].dims)
        self._shape(value, dims, sources[place].dtype)

    def _folded(self, op: str, sources: tuple[ir.Value, ...], axis: str) -> int:
        """The place of the state variable of a fold of these tiles."""
        found = fold_of(op)
        if found is None:
            raise TileError(f"kernel {self._kernel.name!r}: unknown reduction {op!r}")
        fold, place = found
        self._tiles_of_all(fold, sources, axis, op)
        return place

    def _tiles_of_all(self, fold: Fold, sources: tuple[ir.Value, ...], axis: str, what: str) -> None:
        """That there is a tile of each state variable, with the axis among its dims."""
        self._require(len(sources) == len(fold.state), f"{what} of {len(sources)} tiles")
        for source in sources:
            self._require(source.dims == sources[0].dims, f"{_typed(source)} is not reconciled")
            self._require(axis in source.dims, f"{_typed(source)} has no dim {axis!r} to fold")

    def _shape(self, value: ir.Value, dims: tuple[str, ...], dtype: str) -> None:
        if value.dims != dims:
            raise self._error(f"{_typed(value)} should have the dims {list(dims)}")
        if value.dtype != dtype:
            raise self._error(f"{_typed(value)} should be {dtype}")

    def _position(self, axis: str) -> None:
        block = self._block(axis)
        walked = block.kind in ("grid", "whole") or any(loop.axis == axis for loop in self._open)
        self._require(walked, f"position of axis {axis!r} outside a loop over it")

    def _bound(self, value: ir.Value, axis: str, stop: ir.Value) -> None:
        self._position(axis)
        self._scalar_integer(stop)
        self._shape(value, (axis,), "bool")
        for loop in self._open:
            if loop.axis == axis:
                self._require(loop.masked, f"bound of axis {axis!r} in a loop that is not masked")
                self._require(
                    loop.stop == stop or self._extents.get(stop.name) == axis,
                    f"bound of axis {axis!r} at {stop.name!r}, not at the end of the loop or of the axis",
                )

    def _elementwise(self, value: ir.Value, fn: str, args: tuple[ir.Value, ...]) -> None:
        arity = ARITY.get(fn, ir.TILE_FUNCTIONS.get(fn))
        if arity != len(args):
            raise self._error(f"{fn} of {len(args)} operands")
        for arg in args:
            if arg.dims and arg.dims != value.dims:
                raise self._error(f"operand {_typed(arg)} of {_typed(value)} is not reconciled")
        if all(arg.dims != value.dims for arg in args):
            raise self._error(f"{_typed(value)} has dims that no operand has")
        dtypes = [arg.dtype for arg in args]
        accumulate = "f64" if "f64" in (*dtypes, value.dtype) else "f32"
        wanted = list(operand_dtypes(fn, dtypes, accumulate))
        if fn == "where":  # may choose between values in a storage dtype
            wanted = ["bool", value.dtype, value.dtype]
        else:
            self._shape(value, value.dims, result_dtype(fn, dtypes, accumulate))
        if dtypes != wanted:
            raise self._error(f"{fn} of {', '.join(dtypes)} should be of {', '.join(wanted)}")

    def _access(
        self, tensor: str, index: tuple[ir.Value, ...], mask: ir.Value | None, tile: ir.Value
    ) -> None:
        for value in index:
            self._read(value)
            self._require(value.dtype in INTEGERS, f"index {_typed(value)} of {tensor!r} is not an integer")
        if mask is not None:
            self._read(mask)
            self._require(mask.dtype == "bool", f"mask {_typed(mask)} is not a truth value")
        places = (*index, *(() if mask is None else (mask,)))
        covered = {axis for value in places for axis in value.dims}
        self._require(
            covered == set(tile.dims), f"{_typed(tile)} does not have the dims of its index in {tensor!r}"
        )
        dtype = self._dtypes.get(tensor, tile.dtype)
        self._require(tile.dtype == dtype, f"{tensor!r} holds {dtype}, not {tile.dtype}")

    def _search(self, value: ir.Value, op: ir.Search) -> None:
        for operand in (*op.index, op.stop, op.target):
            self._scalar_integer(operand)
        self._require(0 <= op.place <= len(op.index), f"{op.tensor!r} has no dimension {op.place}")
        dtype = self._dtypes.get(op.tensor, "i32")
        self._require(dtype in ("i32", "i64"), f"{op.tensor!r} holds {dtype}, which is not searched")
        self._shape(value, (), "i32")

    def _launch_value(self, expr: Expr) -> None:
        match expr:
            case Size() | Const(int()):
                pass
            case Call("add" | "sub" | "mul" | "floordiv", args):
                for arg in args:
                    self._launch_value(arg)
            case _:
                self._require(False, f"{expr} is not known at a launch")

    def _dot(self, value: ir.Value, op: ir.Dot) -> None:
        self._product(value, op.left, op.right, op.axis, op.accumulator, op.left_mask, op.right_mask)
        halves = op.precision == "bf16x3"
        self._require(
            not halves or op.left.dtype == "f32", f"{_typed(op.left)} is not multiplied as two bf16"
        )
        masked = op.left_mask is not None or op.right_mask is not None
        self._require(not (halves and masked), f"{_typed(value)} is of two bf16 and masked")

    def _product(
        self,
        value: ir.Value,
        left: ir.Value,
        right: ir.Value,
        axis: str,
        total: ir.Value | None,
        left_mask: ir.Value | None,
        right_mask: ir.Value | None,
    ) -> None:
        batch = tuple(dim for dim in left.dims if dim in right.dims and dim != axis)
        rows = tuple(dim for dim in left.dims if dim not in right.dims)
        columns = tuple(dim for dim in right.dims if dim not in left.dims)
        fits = left.dims == (*batch, *rows, axis) and right.dims == (*batch, axis, *columns) and columns != ()
        self._require(fits, f"dot of {_typed(left)} and {_typed(right)} over {axis!r}")
        self._require(left.dtype == right.dtype, f"dot of {_typed(left)} and {_typed(right)}")
        self._shape(value, (*batch, *rows, *columns), value.dtype)
        self._require(value.dtype in ("f32", "f64"), f"{_typed(value)} accumulates a dot")
        if total is not None:
            self._shape(total, value.dims, value.dtype)
        for side, mask in ((left, left_mask), (right, right_mask)):
            if mask is not None:
                self._shape(mask, side.dims, "bool")


def _typed(value: ir.Value) -> str:
    return f"{value.name}: {value.dtype}[{', '.join(value.dims)}]"
