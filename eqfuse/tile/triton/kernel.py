"""One tile kernel as a `@triton.jit` function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eqfuse.loops.blocks import Block
from eqfuse.terms.nodes import Expr
from eqfuse.tile import nodes as ir
from eqfuse.tile.def_use import Path, Uses
from eqfuse.tile.triton.expressions import Expressions, FoldOp, Piece
from eqfuse.tile.triton.functions import Text
from eqfuse.tile.triton.parameters import (
    ALIGNMENT,
    INDEX,
    Names,
    Parameters,
    Tables,
    is_tile,
    largest_blocks,
    parameters_of,
)
from eqfuse.tile.triton.wrap import wrap
from eqfuse.tile.walk import nested

_INLINE_COLUMNS = 72
"""A longer expression gets a variable of its own."""


@dataclass(frozen=True)
class KernelText:
    """A printed kernel and what launching it takes.

    `least` are block sizes below which its dots do not exist, `most` those above which the kernel would be wrong (a
    quotient of positions that was proved to be the same for a whole block); `combines` are the functions of registered
    folds by name, `at_launch` are scalars of its parameters that the launcher computes.
    """

    name: str
    kernel: ir.Kernel
    parameters: Parameters
    lines: tuple[str, ...]
    helpers: frozenset[str]
    combines: Mapping[str, str]
    least: Mapping[str, int]
    most: Mapping[str, int]
    at_launch: Mapping[str, Expr]


def write_kernel(kernel: ir.Kernel, name: str, tables: Tables, flags: tuple[str, ...] = ()) -> KernelText:
    """The text of one kernel, called `name`; `flags` are those of its parameters."""
    return _Writer(kernel, name, tables, flags).run()


class _Writer:
    def __init__(self, kernel: ir.Kernel, name: str, tables: Tables, flags: tuple[str, ...]) -> None:
        self._kernel = kernel
        self._name = name
        self._tables = tables
        self._uses = Uses(kernel)
        self._blocks: Mapping[str, Block] = {block.axis: block for block in kernel.blocks}
        self._names = Names((name,))
        self._parameters = parameters_of(kernel, tables, self._names, flags)
        self._text = Expressions(kernel, self._uses, self._parameters, tables, self._names)
        self._variables: dict[str, str] = {}
        self._lines: list[str] = []
        self._indent = 1

    def run(self) -> KernelText:
        self._neighbours()
        self._rounded()
        self._divisible()
        self._grid()
        outside = ("grid", "whole")
        for axis in self._needed(self._kernel.body, lambda axis: self._blocks[axis].kind in outside):
            if self._is_tile(axis):
                self._write_positions(axis)
        self._body(self._kernel.body, ())
        head = wrap(f"def {self._name}({', '.join(self._parameters.signature())}):")
        return KernelText(
            self._name,
            self._kernel,
            self._parameters,
            (*self._decorator(), *head, *self._lines),
            frozenset(self._text.helpers),
            self._text.combines,
            self._text.least,
            largest_blocks(self._kernel, self._parameters),
            {op.name: op.expr for op in self._uses.ops.values() if isinstance(op, ir.LaunchValue)},
        )

    def _decorator(self) -> list[str]:
        if not self._parameters.any_size:
            return ["@triton.jit"]
        names = ", ".join(f'"{name}"' for name in self._parameters.any_size)
        return wrap(f"@triton.jit(do_not_specialize=[{names}])")

    def _is_tile(self, axis: str) -> bool:
        return is_tile(self._blocks[axis])

    def _write(self, line: str) -> None:
        self._lines.extend(wrap("    " * self._indent + line))

    def _assign(self, name: str, text: Text) -> None:
        if text.code != name:
            self._write(f"{name} = {text.code}")

    def _neighbours(self) -> None:
        """Before all accesses: waits for the kernel before this one, lets the next one be launched."""
        for flag, call in (("WAITS", "gdc_wait"), ("LEADS", "gdc_launch_dependents")):
            if flag in self._parameters.flags:
                self._write(f"if {flag}:")
                self._write(f"    tl.extra.cuda.{call}()")

    def _rounded(self) -> None:
        """What records launches gives numbers as float64, which would make all that they are multiplied by wider."""
        if self._tables.index != INDEX:
            for name, dtype in self._parameters.scalars.values():
                if dtype == "f32":
                    self._write(f"{name} = tl.cast({name}, tl.float32)")

    def _divisible(self) -> None:
        """What follows from the flags, in words that Triton's analysis of divisibility understands."""
        known = self._parameters
        for axis, flag in known.aligned.items():
            self._write(f"if {flag}:")
            extents = [known.extents[axis]] if axis in known.divided else []
            lengths = [known.scalars[name][0] for name, along in known.lengths.items() if along == axis]
            for name in (*extents, *lengths):
                self._write(f"    {name} = {name} // {ALIGNMENT} * {ALIGNMENT}")

    def _grid(self) -> None:
        grid = self._kernel.grid
        if not grid:
            return
        self._write(f"# One program instance: {_listed([self._share(axis) for axis in grid])}.")
        rest = f"tl.program_id(0).to({self._tables.index})"
        if len(grid) > 1:
            self._write(f"pid = {rest}")
            rest = "pid"
        backwards = self._kernel.backwards
        for place, axis in enumerate(grid):
            block = self._parameters.blocks.get(axis)
            step = self._blocks[axis].valid or block
            here = rest
            if place < len(grid) - 1 or axis in backwards:
                extent = self._parameters.extents[self._tables.root[axis]]
                count = f"tl.cdiv({extent}, {step})" if block else extent
                if place < len(grid) - 1:
                    here, rest = f"{rest} % {count}", f"{rest} // {count}"
                if axis in backwards:
                    self._write(f"# The last {'block' if block else axis} first: loops end later there.")
                    here = f"({count} - 1 - {here})" if block else f"{count} - 1 - {here}"
            if block:
                self._write(f"{self._text.starts[axis]} = {here} * {step}")
            else:
                self._write(f"{self._text.positions[axis]} = {here}")
            if place < len(grid) - 2:
                self._write(f"pid = {rest}")
                rest = "pid"

    def _share(self, axis: str) -> str:
        return f"a block of {axis}" if self._is_tile(axis) else f"one {axis}"

    def _needed(self, body: Sequence[ir.Stmt], here: Callable[[str], bool]) -> list[str]:
        """Axes whose positions a body reads, in the order of the kernel's blocks."""
        read = {
            stmt.op.axis
            for stmt in nested(body)
            if isinstance(stmt, ir.Let)
            and isinstance(stmt.op, (ir.Positions, ir.Bound))
            and here(stmt.op.axis)
        }
        return [axis for axis in self._blocks if axis in read]

    def _write_positions(self, axis: str) -> None:
        lanes = f"tl.arange(0, {self._parameters.blocks[axis]}).to({self._tables.index})"
        start = "" if self._blocks[axis].kind == "whole" else f"{self._text.starts[axis]} + "
        self._write(f"{self._text.positions[axis]} = {start}{lanes}")

    def _body(self, body: Sequence[ir.Stmt], path: Path) -> None:
        for place, stmt in enumerate(body):
            match stmt:
                case ir.Let(value, op):
                    self._let(value, op)
                case ir.Store():
                    self._store(stmt)
                case ir.For():
                    self._for(stmt, (*path, place))

    def _let(self, value: ir.Value, op: ir.Op) -> None:
        if isinstance(op, FoldOp) and (key := self._text.fold_key(op)) not in self._text.folds:
            text = self._text.folded(op)
            self._text.folds[key] = self._names.local(f"{key[0]}_state")
            self._assign(self._text.folds[key], text)
        piece = self._text.op(value, op)
        if value.name in self._variables:  # assigned to the variable that carries it
            self._assign(self._variables[value.name], self._text.full(piece, value))
            self._text.pieces[value.name] = Piece(Text(self._variables[value.name]), value.dims)
        elif self._keeps_text(value, op, piece):
            self._text.pieces[value.name] = piece
        else:
            name = self._names.local(value.name)
            self._assign(name, piece.text)
            self._text.pieces[value.name] = Piece(Text(name), piece.dims, piece.thin)

    def _keeps_text(self, value: ir.Value, op: ir.Op, piece: Piece) -> bool:
        """Whether the expression itself stands for the value, without a variable."""
        code = piece.text.code
        match op:
            case (
                ir.Constant()
                | ir.Irrational()
                | ir.Argument()
                | ir.Extent()
                | ir.BlockSize()
                | ir.LaunchValue()
                | ir.Fill()
            ):
                return True
            case ir.Start() | ir.Positions() | ir.Lanes():
                return True
            case ir.Align():
                return "tl." not in code or len(self._uses.readers(value)) == 1
            case ir.Bound():
                return code == "True" or len(self._uses.readers(value)) == 1
            case ir.Search():
                return False
            case ir.LoadTile():
                return self._uses.is_inlined(value)
            case ir.Cast(source) if isinstance(self._uses.ops.get(source.name), ir.LoadTile):
                return self._uses.is_inlined(value) and "tl.load" not in code
            case _:
                return self._uses.is_inlined(value) and len(code) <= _INLINE_COLUMNS

    def _for(self, loop: ir.For[ir.Stmt], path: Path) -> None:
        for item in loop.carried:
            self._begin_carried(loop, path, item)
        axis = loop.axis
        tile = self._is_tile(axis)
        start = self._text.code(loop.start)
        first = start if tile else f"tl.cast({start}, {self._tables.index})"
        bounds = f"{first}, {self._text.code(loop.stop)}"
        step = f", {self._parameters.blocks[axis]}" if tile else ""
        if tile:
            kind = "the last one may be cut short" if loop.masked else "complete ones: no masks along it"
            self._write(f"# Blocks of {axis}; {kind}.")
        else:
            self._write(f"# Positions of {axis}, one by one.")
        steps = not tile and _reads_stored(loop)
        stages = f"num_stages={1 if steps else self._parameters.stages}"
        self._write(f"for {self._text.starts[axis]} in tl.range({bounds}{step}, {stages}):")
        self._indent += 1
        before = len(self._lines)
        with self._names.scope():
            if tile and self._needed(loop.body, lambda used: used == axis):
                self._write_positions(axis)
            self._body(loop.body, path)
            self._end_carried(loop)
            if steps:
                self._write("tl.debug_barrier()  # the next step loads what all threads have stored")
        if len(self._lines) == before:
            self._write("pass")
        self._indent -= 1

    def _begin_carried(self, loop: ir.For[ir.Stmt], path: Path, item: ir.Carried) -> None:
        value = item.value
        if self._uses.continues(path, item):
            name = self._text.pieces[item.init.name].text.code
        else:
            name = self._names.local(value.name)
            self._assign(name, self._text.full(self._text.read(item.init), value))
        self._text.pieces[value.name] = Piece(Text(name), value.dims)
        if self._uses.updates_in_place(loop, path, item):
            self._variables[item.next.name] = name

    def _end_carried(self, loop: ir.For[ir.Stmt]) -> None:
        carried = {item.value.name for item in loop.carried}
        moves = [item for item in loop.carried if item.next.name not in self._variables]
        for item in moves:
            piece = self._text.pieces[item.next.name]
            if item.next.name in carried and item.next != item.value:  # before it is overwritten itself
                name = self._names.fresh(f"{item.value.name}_next")
                self._assign(name, piece.text)
                self._text.pieces[item.next.name] = Piece(Text(name), piece.dims, piece.thin)
        for item in moves:
            name = self._text.pieces[item.value.name].text.code
            self._assign(name, self._text.full(self._text.read(item.next), item.value))

    def _store(self, stmt: ir.Store) -> None:
        dims = stmt.value.dims or self._text.union(stmt.index)
        piece = self._text.aligned(self._text.read(stmt.value), dims)
        pointer, _ = self._text.pointer(stmt.tensor, stmt.index, dims)
        arguments = [pointer.code, piece.text.code]
        if stmt.mask is not None and (mask := self._text.mask(stmt.mask, dims)).text.code != "True":
            arguments.append(f"mask={mask.text.code}")
        self._write(f"tl.store({', '.join(arguments)})")


def _reads_stored(loop: ir.For[ir.Stmt]) -> bool:
    """Whether a loop loads what it has stored in the trip before."""
    inside = list(nested(loop.body))
    stored = {stmt.tensor for stmt in inside if isinstance(stmt, ir.Store)}
    return any(
        isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.LoadTile) and stmt.op.tensor in stored
        for stmt in inside
    )


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
