"""What a printer of a kernel has at hand: names, lines, the loops around, and values in registers and in memory."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from eqfuse.names import Names
from eqfuse.terms.functions import OPERATORS
from eqfuse.terms.nodes import Call, Const, Expr, Size
from eqfuse.tile import nodes as ir
from eqfuse.tile.native.ahead import shares
from eqfuse.tile.native.nodes import NotNative
from eqfuse.tile.native.order import nesting
from eqfuse.tile.native.plain import plain
from eqfuse.tile.native.text import kept
from eqfuse.tile.native.tree import Tree
from eqfuse.tile.storage import buffer_dtypes, loaded_dtypes
from eqfuse.tile.walk import nested


@dataclass(frozen=True)
class Interface:
    """The order of what the C++ function is given: tensors (with their strides), axes, scalars. `unit` are the
    dimensions of tensors, by name and place, that neighbours in memory are neighbours in."""

    tensors: tuple[str, ...]
    ranks: Mapping[str, int]
    axes: tuple[str, ...]
    reals: tuple[str, ...]
    integers: tuple[str, ...]
    unit: frozenset[tuple[str, int]]
    dtypes: Mapping[str, str]

    @staticmethod
    def of(
        program: ir.TileProgram,
        ranks: Mapping[str, int],
        unit: frozenset[tuple[str, int]],
        axes: Iterable[str],
    ) -> Interface:
        """What a program's C++ is given, for tensors of these ranks; its buffers are rows in memory."""
        buffers = {buffer.name: len(buffer.axes) for buffer in program.buffers}
        arguments = {
            stmt.op.name: stmt.value.dtype
            for kernel in program.kernels
            for stmt in nested(kernel.body)
            if isinstance(stmt, ir.Let) and isinstance(stmt.op, ir.Argument)
        }
        integers = tuple(sorted(n for n, d in arguments.items() if d in ("bool", "i32", "i64")))
        return Interface(
            (*sorted(ranks), *buffers),
            {**ranks, **buffers},
            tuple(sorted(axes)),
            tuple(sorted(n for n in arguments if n not in integers)),
            integers,
            unit | {(name, rank - 1) for name, rank in buffers.items() if rank},
            loaded_dtypes(program),
        )


@dataclass(frozen=True)
class Open:
    """A loop around what is written: `at` is the position in the block, `left` how many lanes of a last vector there
    are (all if empty). `wide`: a vector of positions from `at` on."""

    axis: str
    at: str
    wide: bool = False
    left: str = ""


@dataclass(frozen=True)
class Buffer:
    """Memory of a thread for a value: its dims in their order, the innermost last."""

    name: str
    dims: tuple[str, ...]
    dtype: str


class CppNames(Names):
    """C++ names, each given once."""

    def __init__(self) -> None:
        super().__init__(between="")

    def fresh(self, wanted: str) -> str:
        return super().fresh(re.sub(r"[^A-Za-z0-9_]", "_", wanted) + "_")


class Context:
    """A kernel while it is written."""

    def __init__(
        self,
        kernel: ir.Kernel,
        program: ir.TileProgram,
        interface: Interface,
        extents: Mapping[str, int],
        names: CppNames,
        number: int,
    ) -> None:
        self.kernel, self.interface, self.names, self.number = kernel, interface, names, number
        self.domains = dict(program.domains)
        self.blocks = {block.axis: block for block in kernel.blocks}
        self.stored = buffer_dtypes(program)
        self.lengths = {
            axis: min(block.size or extents[self._axis(axis)], max(1, extents[self._axis(axis)]))
            for axis, block in self.blocks.items()
        }
        self.alone = {axis for axis in self.blocks if self.lengths[axis] >= extents[self._axis(axis)]}
        items = plain(kernel, self.lengths)
        self.tree = Tree(items, nesting(items, self.lengths), interface.unit, self.stored)
        self.lines: list[str] = []
        self.depth = 1
        self.scopes: list[dict[str, tuple[str, bool]]] = [{}]
        self.loops: list[Open] = []
        self.buffers: dict[str, Buffer] = {}
        self.used: set[str] = set()
        self.streamed: set[str] = set()
        self.walks: list[str] = []
        self.asks = shares(self.tree, self.stored)
        self.part: int | None = None

    def _axis(self, axis: str) -> str:
        return self.domains.get(axis, axis)

    def _c(self, axis: str) -> str:
        return f"axis{list(self.blocks).index(axis)}"

    def _size(self, axis: str) -> str:
        return f"size{self.interface.axes.index(axis)}"

    def _tensor(self, tensor: str) -> str:
        return f"tensor{self.interface.tensors.index(tensor)}"

    def _stride(self, tensor: str, dim: int) -> str:
        return f"{self._tensor(tensor)}_stride{dim}"

    def _extent(self, tensor: str, dim: int) -> str:
        return f"{self._tensor(tensor)}_extent{dim}"

    def _dtype(self, tensor: str) -> str:
        return self.stored.get(tensor) or self.interface.dtypes[tensor]

    def emit(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, header: str = "") -> Iterator[None]:
        self.emit(f"{header} {{".lstrip())
        self.depth += 1
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.depth -= 1
        self.emit("}")

    def bind(self, value: str, text: str, wide: bool) -> None:
        self.scopes[-1][value] = (text, wide)

    def register(self, value: str) -> tuple[str, bool] | None:
        return next((scope[value] for scope in reversed(self.scopes) if value in scope), None)

    @property
    def _vector(self) -> Open | None:
        return self.loops[-1] if self.loops and self.loops[-1].wide else None

    @contextmanager
    def _inside(self, opened: Open) -> Iterator[None]:
        self.loops.append(opened)
        yield
        self.loops.pop()

    def _buffer(self, name: str) -> Buffer:
        name = self.tree.last(name)
        found = self.buffers.get(name)
        if found is None:
            dtype = self.tree.defined[name].value.dtype
            found = Buffer(self.names.fresh(f"memory_{name}"), self.tree.place(name), dtype)
            self.buffers[name] = found
        return found

    def _buffer_of(self, value: ir.Value) -> Buffer | None:
        return self._buffer(value.name) if value.name in self.tree.memory else None

    def _address(self, buffer: Buffer) -> tuple[str, str]:
        """Where a buffer is read or written in the loops around: a pointer, and the step of the vector's lanes."""
        open_ = {loop.axis: loop for loop in self.loops}
        terms, step = [], "0"
        for place, dim in enumerate(buffer.dims):
            stride = " * ".join(f"most_{self._c(d)}" for d in buffer.dims[place + 1 :]) or "1"
            if dim not in open_:
                raise NotNative(f"a read of {buffer.name} outside a loop over {dim}")
            terms.append(open_[dim].at if stride == "1" else f"{open_[dim].at} * {stride}")
            if open_[dim].wide:
                step = stride
        return f"{buffer.name} + {' + '.join(terms) or '0'}", step

    def _scalar(self, value: ir.Value) -> str:
        return self._read(value, wide=False)

    def _read(self, value: ir.Value, *, wide: bool) -> str:
        """A value at the positions of the loops around; a vector of them if `wide`."""
        found = self.register(value.name)
        if found is not None:
            text, is_wide = found
            if is_wide and not wide:
                raise NotNative(f"{value.name}, a vector, where one number is read")
            return f"splat({text})" if wide and not is_wide else text
        if value.name not in self.tree.memory:
            raise NotNative(f"{value.name}, which is not at hand")
        buffer = self._buffer(value.name)
        place, step = self._address(buffer)
        suffix = kept(buffer.dtype)
        vector = self._vector
        if not wide or vector is None or step == "0":
            text = f"get_{suffix}({place})"
            return f"splat({text})" if wide else text
        if step == "1":
            return f"load_{suffix}({place}{f', {vector.left}' if vector.left else ''})"
        return f"gather_{suffix}({place}, {step}, {vector.left or 'LANES'})"

    def _put(self, dtype: str, place: str, step: str, text: str, wide: bool) -> None:
        vector = self._vector
        if not wide or vector is None:
            self.emit(f"put_{dtype}({place}, {text});")
        elif step == "1":
            self.emit(f"put_{dtype}({place}, {text}{f', {vector.left}' if vector.left else ''});")
        else:
            self.emit(f"scatter_{dtype}({place}, {text}, {step}, {vector.left or 'LANES'});")

    def _keep(self, value: ir.Value, wide: bool) -> None:
        """Writes a value that has just been computed to its memory, where it has any."""
        if value.name not in self.tree.memory:
            return
        buffer = self._buffer(value.name)
        found = self.register(value.name)
        assert found is not None
        self._put(kept(buffer.dtype), *self._address(buffer), found[0], wide)

    def _assign(self, buffer: Buffer, value: ir.Value, skip: Container[str] = ()) -> None:
        """Fills a buffer with a value of its dims, or of fewer, at the positions of the loops around."""
        with self.block():
            opened = 0
            for dim in (d for d in buffer.dims[:-1] if d not in skip):
                at = self.names.fresh("at")
                self.emit(f"for (i64 {at} = 0; {at} < length_{self._c(dim)}; {at}++) {{")
                self.depth += 1
                self.loops.append(Open(dim, at))
                opened += 1
            at, c = self.names.fresh("at"), self._c(buffer.dims[-1])
            with (
                self.block(f"for (i64 {at} = 0; {at} < length_{c}; {at}++)"),
                self._inside(Open(buffer.dims[-1], at)),
            ):
                place = self._address(buffer)[0]
                self.emit(f"put_{kept(buffer.dtype)}({place}, {self._scalar(value)});")
            for _ in range(opened):
                self.loops.pop()
                self.depth -= 1
                self.emit("}")

    def _of_sizes(self, expr: Expr) -> str:
        """An integer made of sizes."""
        match expr:
            case Size(axis):
                return self._size(self._axis(axis))
            case Const(given):
                return f"{int(given)}LL"
            case Call("floordiv", (left, right)):
                return f"floor_quotient((i64){self._of_sizes(left)}, (i64){self._of_sizes(right)})"
            case Call(fn, args) if fn in OPERATORS:
                return f"({f' {OPERATORS[fn]} '.join(map(self._of_sizes, args))})"
        raise NotNative(f"{expr}, which is not known at a launch")

    def _position(self, axis: str, wide: bool, start: str = "") -> str:
        loop = next((loop for loop in self.loops if loop.axis == axis), None)
        if loop is None:
            raise NotNative(f"positions of {axis} outside a loop over them")
        text = f"(int)({start or f'start_{self._c(axis)}'} + {loop.at})"
        return f"({text} + lanes())" if wide else text

    def _is_position(self, at: ir.Value) -> bool:
        """Whether an index is the plain position of an axis, which is inside wherever blocks are clipped."""
        return isinstance(self.tree.defined[at.name].op, ir.Positions | ir.Start)

    def _step(self, axis: str) -> int:
        return self.blocks[axis].step
