"""One tile kernel as a `@triton.jit` function."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from eqfuse.tile.dtypes import INTEGERS, NARROW
from eqfuse.tile.exponents import log2_scaled, scalar_factor
from eqfuse.tile.nodes import (
    Align,
    Argument,
    Block,
    BlockSize,
    Bound,
    Carried,
    Cast,
    Constant,
    Dot,
    Elementwise,
    Extent,
    Fill,
    For,
    Kernel,
    Let,
    LoadTile,
    Op,
    Positions,
    ReduceTile,
    Start,
    Stmt,
    Store,
    Value,
)
from eqfuse.tile.triton_functions import (
    ATOM,
    HELPERS,
    LN_2,
    LOG2_E,
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
from eqfuse.tile.uses import Path, Uses
from eqfuse.tile.wrap import wrap

_INLINE_COLUMNS = 72
"""A longer expression gets a variable of its own."""

_TAKEN = frozenset(("tl", "torch", "triton", "float", "pid", *map(helper_name, HELPERS), *keyword.kwlist))


class Names:
    """Distinct identifiers: the wanted name, or that name with a number after it."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*_TAKEN, *taken}

    def new(self, wanted: str) -> str:
        name, number_ = wanted, 1
        while name in self._taken:
            number_ += 1
            name = f"{wanted}_{number_}"
        self._taken.add(name)
        return name

    def local(self, wanted: str) -> str:
        """A name for a value of the tile program, where numbers and dtypes (`x_2_f32`) only tell copies apart."""
        return self.new(re.sub(r"_(\d+|f32|f64)(?=_|$)", "", wanted))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Names that are made inside are free again after it."""
        taken = set(self._taken)
        yield
        self._taken = taken


@dataclass(frozen=True)
class TensorInfo:
    """What a kernel has to know of a tensor: its dtype and a label for each dim's stride."""

    dtype: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Tables:
    """Facts about the whole program that every kernel's text depends on.

    `root` maps an axis to the one whose extent it has.
    """

    tensors: Mapping[str, TensorInfo]
    root: Mapping[str, str]


@dataclass(frozen=True)
class Piece:
    """How a value reads: an expression, and the dims of the tile that it is, in order.

    Dims in `thin` have extent one and broadcast. Without dims it is a scalar, which also stands
    for a tile whose elements are all equal.
    """

    text: Text
    dims: tuple[str, ...] = ()
    thin: frozenset[str] = frozenset()


@dataclass
class Parameters:
    """Names of a kernel's parameters, by what they stand for; dicts are in the order of the signature.

    `even` are flags that say that the extent of a whole axis is its block size.
    """

    pointers: dict[str, str] = field(default_factory=dict)
    strides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    extents: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, tuple[str, str]] = field(default_factory=dict)  # name and dtype
    blocks: dict[str, str] = field(default_factory=dict)
    even: dict[str, str] = field(default_factory=dict)

    def signature(self) -> list[str]:
        return [
            *self.pointers.values(),
            *(f"{name}: tl.int64" for names in self.strides.values() for name in names),
            *self.extents.values(),
            *(f"{name}: tl.float64" if dtype == "f64" else name for name, dtype in self.scalars.values()),
            *(f"{name}: tl.constexpr" for name in (*self.blocks.values(), *self.even.values())),
        ]


@dataclass(frozen=True)
class KernelText:
    """A printed kernel and what launching it takes.

    `least` are block sizes below which its dots do not exist, `most` those above which the kernel
    would be wrong (a quotient of positions that was proved to be the same for a whole block).
    """

    name: str
    kernel: Kernel
    parameters: Parameters
    lines: tuple[str, ...]
    helpers: frozenset[str]
    least: Mapping[str, int]
    most: Mapping[str, int]


def write_kernel(kernel: Kernel, name: str, tables: Tables) -> KernelText:
    """The text of one kernel, called `name`."""
    return _Writer(kernel, name, tables).run()


class _Writer:
    def __init__(self, kernel: Kernel, name: str, tables: Tables) -> None:
        self._kernel = kernel
        self._name = name
        self._tables = tables
        self._uses = Uses(kernel)
        self._scaled = log2_scaled(kernel)
        self._blocks: Mapping[str, Block] = {block.axis: block for block in kernel.blocks}
        self._names = Names((name,))
        self._parameters = self._collect()
        self._positions = {axis: self._names.new(axis) for axis in self._blocks}
        self._starts = {
            axis: self._names.new(f"{axis}_start") if self._is_tile(axis) else self._positions[axis]
            for axis in self._blocks
        }
        self._pieces: dict[str, Piece] = {}
        self._variables: dict[str, str] = {}
        self._helpers: set[str] = set()
        self._least: dict[str, int] = {}
        self._lines: list[str] = []
        self._indent = 1

    def run(self) -> KernelText:
        self._grid()
        for axis in self._needed(
            self._kernel.body, lambda axis: self._blocks[axis].kind in ("grid", "whole")
        ):
            if self._is_tile(axis):
                self._write_positions(axis)
        self._body(self._kernel.body, ())
        head = wrap(f"def {self._name}({', '.join(self._parameters.signature())}):")
        return KernelText(
            self._name,
            self._kernel,
            self._parameters,
            ("@triton.jit", *head, *self._lines),
            frozenset(self._helpers),
            self._least,
            self._pinned(),
        )

    # Parameters ---------------------------------------------------------------------------------

    def _collect(self) -> Parameters:
        """The parameters, named. Blocks of one position are none."""
        found = Parameters()
        for stmt in _all(self._kernel.body):
            op = stmt.op if isinstance(stmt, Let) else None
            if isinstance(op, LoadTile):
                self._tensor(found, op.tensor)
            elif isinstance(op, Argument) and isinstance(stmt, Let):
                found.scalars.setdefault(op.name, ("", stmt.value.dtype))
            elif isinstance(stmt, Store):
                self._tensor(found, stmt.tensor)
        for axis in self._extents_read():
            found.extents.setdefault(axis, self._names.new(f"N_{axis}"))
        found.scalars = {name: (self._names.new(name), dtype) for name, (_, dtype) in found.scalars.items()}
        for axis in self._blocks:
            if self._is_tile(axis):
                upper = f"BLOCK_{axis.upper()}"
                taken = upper in found.blocks.values()
                found.blocks[axis] = self._names.new(f"BLOCK_{axis}" if taken else upper)
        for axis in self._even_axes():
            found.even[axis] = self._names.new(found.blocks[axis].replace("BLOCK", "EVEN", 1))
        return found

    def _tensor(self, found: Parameters, tensor: str) -> None:
        if tensor not in found.pointers:
            found.pointers[tensor] = self._names.new(f"{tensor}_ptr")
            labels = self._tables.tensors[tensor].labels
            found.strides[tensor] = tuple(self._names.new(f"{tensor}_stride_{label}") for label in labels)

    def _extents_read(self) -> list[str]:
        """Axes whose extent the kernel reads, those of the grid first."""
        axes = [
            *self._kernel.grid[:-1],
            *(op.axis for op in self._uses.ops.values() if isinstance(op, Extent)),
        ]
        return list(dict.fromkeys(self._tables.root[axis] for axis in axes))

    def _even_axes(self) -> list[str]:
        bounds = [op.axis for op in self._uses.ops.values() if isinstance(op, Bound)]
        return [axis for axis in dict.fromkeys(bounds) if self._blocks[axis].kind == "whole"]

    def _pinned(self) -> dict[str, int]:
        """Largest sizes of blocks whose first position is divided to stand for all of them."""
        found = {}
        for op in self._uses.ops.values():
            if isinstance(op, Elementwise) and op.fn in ("floordiv", "mod"):
                first, by = (self._uses.ops.get(arg.name) for arg in op.args)
                if isinstance(first, Start) and isinstance(by, Constant) and self._is_tile(first.axis):
                    size = self._blocks[first.axis].size
                    if size is not None:
                        found[self._parameters.blocks[first.axis]] = size
        return found

    def _is_tile(self, axis: str) -> bool:
        block = self._blocks[axis]
        return block.kind in ("loop", "whole") or (block.kind == "grid" and block.size != 1)

    def _shape(self, dims: Sequence[str]) -> str:
        names = [self._parameters.blocks[axis] for axis in dims]
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"

    # Statements ---------------------------------------------------------------------------------

    def _write(self, line: str) -> None:
        self._lines.extend(wrap("    " * self._indent + line))

    def _assign(self, name: str, text: Text) -> None:
        if text.code != name:
            self._write(f"{name} = {text.code}")

    def _grid(self) -> None:
        grid = self._kernel.grid
        if not grid:
            return
        self._write(f"# One program instance: {_listed([self._share(axis) for axis in grid])}.")
        rest = "tl.program_id(0)"
        if len(grid) > 1:
            self._write(f"pid = {rest}")
            rest = "pid"
        for place, axis in enumerate(grid):
            block = self._parameters.blocks.get(axis)
            here = rest
            if place < len(grid) - 1:
                extent = self._parameters.extents[self._tables.root[axis]]
                count = f"tl.cdiv({extent}, {block})" if block else extent
                here, rest = f"{rest} % {count}", f"{rest} // {count}"
            if block:
                self._write(f"{self._starts[axis]} = {here} * {block}")
            else:
                self._write(f"{self._positions[axis]} = {here}")
            if place < len(grid) - 2:
                self._write(f"pid = {rest}")
                rest = "pid"

    def _share(self, axis: str) -> str:
        return f"a block of {axis}" if self._is_tile(axis) else f"one {axis}"

    def _needed(self, body: Sequence[Stmt], here: Callable[[str], bool]) -> list[str]:
        """Axes whose positions a body reads, in the order of the kernel's blocks."""
        read = {
            stmt.op.axis
            for stmt in _all(body)
            if isinstance(stmt, Let) and isinstance(stmt.op, (Positions, Bound)) and here(stmt.op.axis)
        }
        return [axis for axis in self._blocks if axis in read]

    def _write_positions(self, axis: str) -> None:
        lanes = f"tl.arange(0, {self._parameters.blocks[axis]})"
        start = "" if self._blocks[axis].kind == "whole" else f"{self._starts[axis]} + "
        self._write(f"{self._positions[axis]} = {start}{lanes}")

    def _body(self, body: Sequence[Stmt], path: Path) -> None:
        for place, stmt in enumerate(body):
            match stmt:
                case Let(value, op):
                    self._let(value, op)
                case Store():
                    self._store(stmt)
                case For():
                    self._for(stmt, (*path, place))

    def _let(self, value: Value, op: Op) -> None:
        piece = self._op(value, op)
        if value.name in self._variables:  # assigned to the variable that carries it
            self._assign(self._variables[value.name], self._full(piece, value))
            self._pieces[value.name] = Piece(Text(self._variables[value.name]), value.dims)
        elif self._keeps_text(value, op, piece):
            self._pieces[value.name] = piece
        else:
            name = self._names.local(value.name)
            self._assign(name, piece.text)
            self._pieces[value.name] = Piece(Text(name), piece.dims, piece.thin)

    def _keeps_text(self, value: Value, op: Op, piece: Piece) -> bool:
        """Whether the expression itself stands for the value, without a variable."""
        code = piece.text.code
        match op:
            case Constant() | Argument() | Extent() | BlockSize() | Start() | Positions() | Fill():
                return True
            case Align():
                return "tl." not in code or len(self._uses.readers(value)) == 1
            case Bound():
                return code == "True" or len(self._uses.readers(value)) == 1
            case LoadTile():
                return self._uses.is_inlined(value)
            case Cast(source) if isinstance(self._uses.ops.get(source.name), LoadTile):
                return self._uses.is_inlined(value) and "tl.load" not in code
            case _:
                return self._uses.is_inlined(value) and len(code) <= _INLINE_COLUMNS

    def _for(self, loop: For, path: Path) -> None:
        for item in loop.carried:
            self._begin_carried(loop, path, item)
        axis = loop.axis
        tile = self._is_tile(axis)
        bounds = f"{self._code(loop.start)}, {self._code(loop.stop)}"
        step = f", {self._parameters.blocks[axis]}" if tile else ""
        if tile:
            kind = "the last one may be cut short" if loop.masked else "complete ones: no masks along it"
            self._write(f"# Blocks of {axis}; {kind}.")
        else:
            self._write(f"# Positions of {axis}, one by one.")
        self._write(f"for {self._starts[axis]} in tl.range({bounds}{step}):")
        self._indent += 1
        before = len(self._lines)
        with self._names.scope():
            if tile and self._needed(loop.body, lambda used: used == axis):
                self._write_positions(axis)
            self._body(loop.body, path)
            self._end_carried(loop)
        if len(self._lines) == before:
            self._write("pass")
        self._indent -= 1

    def _begin_carried(self, loop: For, path: Path, item: Carried) -> None:
        value = item.value
        if self._uses.continues(path, item):
            name = self._pieces[item.init.name].text.code
        else:
            name = self._names.local(value.name)
            self._assign(name, self._full(self._piece(item.init, scaled=value.name in self._scaled), value))
        self._pieces[value.name] = Piece(Text(name), value.dims)
        if self._uses.updates_in_place(loop, path, item):
            self._variables[item.next.name] = name

    def _end_carried(self, loop: For) -> None:
        carried = {item.value.name for item in loop.carried}
        moves = [item for item in loop.carried if item.next.name not in self._variables]
        for item in moves:
            piece = self._pieces[item.next.name]
            if item.next.name in carried and item.next != item.value:  # before it is overwritten itself
                name = self._names.new(f"{item.value.name}_next")
                self._assign(name, piece.text)
                self._pieces[item.next.name] = Piece(Text(name), piece.dims, piece.thin)
        for item in moves:
            name = self._pieces[item.value.name].text.code
            scaled = item.value.name in self._scaled
            self._assign(name, self._full(self._piece(item.next, scaled=scaled), item.value))

    def _store(self, stmt: Store) -> None:
        dims = stmt.value.dims or self._union(stmt.index)
        piece = self._aligned(self._piece(stmt.value), dims)
        pointer, _ = self._pointer(stmt.tensor, stmt.index, dims)
        arguments = [pointer.code, piece.text.code]
        if stmt.mask is not None and (mask := self._mask(stmt.mask, dims)).text.code != "True":
            arguments.append(f"mask={mask.text.code}")
        self._write(f"tl.store({', '.join(arguments)})")

    # Expressions --------------------------------------------------------------------------------

    def _code(self, value: Value) -> str:
        return self._piece(value).text.code

    def _piece(self, value: Value, *, scaled: bool = False) -> Piece:
        """How a value reads, `scaled` by log2(e) or plain, whichever of the two it is kept as."""
        piece = self._pieces[value.name]
        if scaled == (value.name in self._scaled):
            return piece
        if not scaled:
            return Piece(infix("mul", piece.text, Text(LN_2)), piece.dims, piece.thin)
        op = self._uses.ops.get(value.name)
        if isinstance(op, (Constant, Fill)):
            return Piece(number(op.number * float(LOG2_E) if op.number else op.number))
        return Piece(infix("mul", piece.text, Text(LOG2_E)), piece.dims, piece.thin)

    def _use(self, helper: str) -> str:
        self._helpers.add(helper)
        return helper_name(helper)

    def _op(self, value: Value, op: Op) -> Piece:
        names = self._parameters
        match op:
            case Constant(plain) | Fill(plain):
                return Piece(number(plain))
            case Argument(name):
                return Piece(Text(names.scalars[name][0]))
            case Extent(axis):
                return Piece(Text(names.extents[self._tables.root[axis]]))
            case BlockSize(axis):
                return Piece(Text(names.blocks.get(axis, "1")))
            case Start(axis):
                whole = self._blocks[axis].kind == "whole"
                return Piece(Text("0" if whole else self._starts[axis]))
            case Positions(axis):
                return Piece(Text(self._positions[axis]), value.dims)
            case Bound(axis, stop):
                return self._bound(axis, stop, value)
            case Align(source):
                return self._aligned(self._piece(source, scaled=value.name in self._scaled), value.dims)
            case Cast(source):
                piece = self._piece(source)
                return Piece(self._converted(piece, source.dtype, value.dtype), piece.dims, piece.thin)
            case Elementwise(fn, args):
                return self._elementwise(fn, args, value)
            case LoadTile():
                return self._load(op, value)
            case ReduceTile(fn, source, axis):
                return self._reduce(fn, source, axis, value)
            case Dot():
                return self._dot(op, value)

    def _converted(self, piece: Piece, dtype: str, wanted: str) -> Text:
        if dtype == wanted:
            return piece.text
        return convert(piece.text, wanted, scalar=not piece.dims, use=self._use)

    def _bound(self, axis: str, stop: Value, value: Value) -> Piece:
        if not self._is_tile(axis):
            return Piece(Text("True"))
        end = self._piece(stop).text
        even = self._parameters.even.get(axis)
        if even is not None and isinstance(self._uses.ops.get(stop.name), Extent):
            end = Text(f"({self._parameters.blocks[axis]} if {even} else {end.code})")
        return Piece(infix("lt", Text(self._positions[axis]), end), value.dims)

    def _aligned(self, piece: Piece, dims: tuple[str, ...]) -> Piece:
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

    def _full(self, piece: Piece, value: Value) -> Text:
        """A piece as a tile of all of the value's dims (or, without dims, as a scalar of its dtype)."""
        dtype = TRITON_DTYPES[value.dtype]
        piece = self._aligned(piece, value.dims)
        if not value.dims:
            literal = not piece.text.code.isidentifier()
            return call("tl.cast", piece.text, dtype) if literal else piece.text
        if not piece.dims:
            if piece.text.code in ("0.0", "0"):
                return call("tl.zeros", self._shape(value.dims), dtype)
            return call("tl.full", self._shape(value.dims), piece.text, dtype)
        return call("tl.broadcast_to", piece.text, self._shape(value.dims)) if piece.thin else piece.text

    def _elementwise(self, fn: str, args: tuple[Value, ...], value: Value) -> Piece:
        pieces = self._arguments(fn, args, value)
        tiles = [piece for piece in pieces if piece.dims]
        dims = value.dims if tiles else ()
        thin = frozenset.intersection(*(piece.thin for piece in tiles)) if tiles else frozenset()
        if fn in ("and", "or") and (known := [p for p in pieces if p.text.code != "True"]) != pieces:
            return (known[0] if known else pieces[0]) if fn == "and" else Piece(Text("True"))
        if fn == "exp" and value.dtype != "f64":
            return Piece(call("tl.exp2", pieces[0].text), dims, thin)
        computed = "f32" if value.dtype in INTEGERS else value.dtype
        texts = [
            self._converted(piece, arg.dtype, computed) if arg.dtype in NARROW else piece.text
            for piece, arg in zip(pieces, args, strict=True)
        ]
        dtype = args[-1].dtype if value.dtype == "bool" else value.dtype
        text = elementwise(
            fn,
            texts,
            dtype,
            non_negative=all(self._is_non_negative(arg) for arg in args),
            use=self._use,
        )
        return Piece(text, dims, thin)

    def _arguments(self, fn: str, args: tuple[Value, ...], value: Value) -> list[Piece]:
        """The operands of an elementwise function; those of `exp` and of scaled values times log2(e)."""
        if fn == "exp" and value.dtype != "f64":
            return [self._piece(args[0], scaled=True)]
        if value.name not in self._scaled:
            return [self._piece(arg) for arg in args]
        factor = scalar_factor(Elementwise(fn, args))
        if factor is None:
            return [self._piece(arg, scaled=arg.dtype != "bool") for arg in args]
        pieces = [self._piece(arg) for arg in args]
        constant = Text(LOG2_E)
        if fn == "div":  # by the scalar: x / s * c = x / (s / c)
            pieces[factor] = Piece(infix("div", pieces[factor].text, constant))
        else:
            pieces[factor] = self._piece(args[factor], scaled=True)
        return pieces

    def _is_non_negative(self, value: Value) -> bool:
        """Whether an integer is known not to be below 0."""
        match self._uses.ops.get(value.name):
            case Constant(plain):
                return plain >= 0
            case Extent() | BlockSize() | Start() | Positions():
                return True
            case Align(source):
                return self._is_non_negative(source)
            case Elementwise("add" | "mul" | "floordiv" | "minimum", args):
                return all(map(self._is_non_negative, args))
            case Elementwise("maximum", args):
                return any(map(self._is_non_negative, args))
            case Elementwise("mod", args):
                return self._is_non_negative(args[1])
            case _:
                return False

    # Memory -------------------------------------------------------------------------------------

    def _union(self, values: Iterable[Value]) -> tuple[str, ...]:
        read = {axis for value in values for axis in value.dims}
        return tuple(axis for axis in self._blocks if axis in read)

    def _mask(self, mask: Value, dims: tuple[str, ...]) -> Piece:
        """A mask with its dims in the order of `dims`; one that has another order is spelt out anew."""
        piece = self._pieces[mask.name]
        if tuple(axis for axis in dims if axis in piece.dims) != piece.dims:
            match self._uses.ops.get(mask.name):
                case Align(source):
                    return self._mask(source, dims)
                case Elementwise("and", (left, right)):
                    sides = self._mask(left, dims), self._mask(right, dims)
                    return Piece(infix("and", *(p.text for p in sides)), dims, sides[0].thin & sides[1].thin)
        return self._aligned(piece, dims)

    def _pointer(
        self, tensor: str, index: tuple[Value, ...], dims: tuple[str, ...]
    ) -> tuple[Text, frozenset[str]]:
        """The address of every element, and the dims that no index depends on. Strides are 64 bits wide."""
        pointer = Text(self._parameters.pointers[tensor])
        covered: set[str] = set()
        for value, stride in zip(index, self._parameters.strides[tensor], strict=True):
            piece = self._aligned(self._piece(value), dims)
            covered |= set(piece.dims) - piece.thin
            if piece.text.code != "0":
                pointer = infix("add", pointer, infix("mul", piece.text, Text(stride)))
        return pointer, frozenset(dims) - covered

    def _load(self, op: LoadTile, value: Value) -> Piece:
        dims = self._uses.load_order(value)
        pointer, thin = self._pointer(op.tensor, op.index, dims)
        dtype = self._tables.tensors[op.tensor].dtype
        arguments = [pointer.code]
        if op.mask is not None and (mask := self._mask(op.mask, dims)).text.code != "True":
            if mask.dims and thin - mask.thin:  # a mask may not have more dims than the addresses
                arguments = [call("tl.broadcast_to", pointer, self._shape(dims)).code]
                thin = frozenset()
            other = number(int(op.other) if dtype in INTEGERS else float(op.other))
            arguments += [f"mask={mask.text.code}", f"other={other.code}"]
        scalar = len(thin) == len(dims)
        piece = Piece(Text(f"tl.load({', '.join(arguments)})"), () if scalar else dims, thin)
        return Piece(self._converted(piece, dtype, value.dtype), piece.dims, piece.thin)

    # Folds --------------------------------------------------------------------------------------

    def _reduce(self, fn: str, source: Value, axis: str, value: Value) -> Piece:
        piece = self._piece(source, scaled=value.name in self._scaled)
        if not piece.dims or axis in piece.thin:
            piece = Piece(self._full(piece, source), source.dims)
        text = self._converted(piece, source.dtype, value.dtype)
        dims = tuple(name for name in piece.dims if name != axis)
        return Piece(
            fold(fn, text, piece.dims.index(axis), value.dtype, self._use), dims, piece.thin - {axis}
        )

    def _dot(self, op: Dot, value: Value) -> Piece:
        dtype = op.left.dtype
        for axis in (*value.dims[-2:], op.axis):
            smallest = 32 if axis == op.axis and dtype == "f8e4m3" else 16
            block = self._parameters.blocks[axis]
            self._least[block] = max(self._least.get(block, 1), smallest)
        arguments = [self._full(self._piece(side), side).code for side in (op.left, op.right)]
        if op.accumulator is not None:
            arguments.append(self._full(self._piece(op.accumulator), op.accumulator).code)
        if dtype in ("f32", "f64"):
            arguments.append('input_precision="ieee"')
        if dtype == "f8e4m3":
            arguments.append("max_num_imprecise_acc=0")
        if value.dtype == "f64":
            arguments.append("out_dtype=tl.float64")
        return Piece(call("tl.dot", *arguments), value.dims)


def _all(body: Iterable[Stmt]) -> Iterable[Stmt]:
    for stmt in body:
        yield stmt
        if isinstance(stmt, For):
            yield from _all(stmt.body)


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
