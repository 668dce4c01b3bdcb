"""Writes a loop tree as C++: one function, which runs all kernels of a tile program one after the other."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from eqfuse.terms.floats import IRRATIONAL
from eqfuse.terms.folds import Fold, fold_of
from eqfuse.terms.functions import OPERATORS
from eqfuse.terms.nodes import Call, Const, Expr, Size
from eqfuse.tile.dtypes import INTEGERS, identity
from eqfuse.tile.native.nodes import Define, Leaf, Loop, Node, NotNative, Put, Walk
from eqfuse.tile.native.order import nesting
from eqfuse.tile.native.plain import plain
from eqfuse.tile.native.text import (
    ELEMENTS,
    SIZES,
    applied,
    combination,
    converted,
    kind,
    number,
    rounded,
    type_of,
)
from eqfuse.tile.native.tree import Tree
from eqfuse.tile.nodes import (
    Argument,
    BlockSize,
    Carried,
    Cast,
    Constant,
    Dot,
    Elementwise,
    Extent,
    FoldTile,
    Irrational,
    Kernel,
    Lanes,
    LaunchValue,
    LoadTile,
    MergeTile,
    Op,
    Positions,
    RankTile,
    ReduceTile,
    Start,
    Store,
    TileProgram,
    Value,
)
from eqfuse.tile.storage import buffer_dtypes
from eqfuse.tile.walk import nested, operands

UNROLLED = 4
"""Vectors that a loop takes at once where it folds: so many sums are under way side by side."""


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


@dataclass(frozen=True)
class _Open:
    """A loop around what is written: `at` is the position in the block, `left` how many lanes of a last vector there
    are (all if empty). `wide`: a vector of positions from `at` on."""

    axis: str
    at: str
    wide: bool = False
    left: str = ""


@dataclass(frozen=True)
class _Buffer:
    """Memory of a thread for a value: its dims in their order, the innermost last."""

    name: str
    dims: tuple[str, ...]
    dtype: str


def source_of(program: TileProgram, interface: Interface, extents: Mapping[str, int]) -> str:
    """The C++ source of a program, for the extents or others: they only decide about the order of loops.

    Raises NotNative for what it has no text for."""
    names = _Names()
    kernels = [
        _KernelPrinter(kernel, program, interface, extents, names, k).text()
        for k, kernel in enumerate(program.kernels)
    ]
    calls = "".join(
        f"  kernel{k}(tensors, strides, sizes, reals, integers, threads, failure);\n"
        for k in range(len(kernels))
    )
    return "\n".join(kernels) + (
        'extern "C" void run(void** tensors, const i64* strides, const i64* sizes, const double* reals,\n'
        "                    const i64* integers, int threads, i64* failure) {\n" + calls + "}\n"
    )


class _Names:
    """C++ names, each given once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def fresh(self, wanted: str) -> str:
        base = re.sub(r"[^A-Za-z0-9_]", "_", wanted) + "_"
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}{count}"
        self._taken.add(name)
        return name


class _KernelPrinter:
    def __init__(
        self,
        kernel: Kernel,
        program: TileProgram,
        interface: Interface,
        extents: Mapping[str, int],
        names: _Names,
        number: int,
    ) -> None:
        self.kernel, self.interface, self.names, self.number = kernel, interface, names, number
        self.domains = dict(program.domains)
        self.blocks = {block.axis: block for block in kernel.blocks}
        self.stored = buffer_dtypes(program)
        lengths = {
            axis: min(block.size or extents[self._axis(axis)], max(1, extents[self._axis(axis)]))
            for axis, block in self.blocks.items()
        }
        self._check()
        items = plain(kernel)
        self.tree = Tree(items, nesting(items, lengths))
        self.lines: list[str] = []
        self.depth = 1
        self.scopes: list[dict[str, tuple[str, bool]]] = [{}]
        self.loops: list[_Open] = []
        self.buffers: dict[str, _Buffer] = {}
        self.used: set[str] = set()

    def _axis(self, axis: str) -> str:
        return self.domains.get(axis, axis)

    def _check(self) -> None:
        stores = {s.tensor for s in nested(self.kernel.body) if isinstance(s, Store)}
        for stmt in nested(self.kernel.body):
            op = getattr(stmt, "op", None)
            if isinstance(op, LoadTile) and op.tensor in stores:
                raise NotNative(f"a load of {op.tensor!r}, which the same kernel stores")

    # The function ------------------------------------------------------------------------------------

    def text(self) -> str:
        self.depth = 3
        self._body(self.tree.body)
        body, self.lines = self.lines, []
        self.depth = 1
        self._head()
        head, self.lines = self.lines, []
        self.depth = 2
        memory = self._memory()
        name = f"kernel{self.number}"
        return "\n".join(
            [
                f"// {self.kernel.name}",
                f"static void {name}(void** tensors, const i64* strides, const i64* sizes, const double* reals,",
                "                    const i64* integers, int threads, i64* failure) {",
                *head,
                "  #pragma omp parallel num_threads(threads) if (threads > 1)",
                "  {",
                *memory,
                "    #pragma omp for schedule(dynamic, chunk)",
                "    for (i64 instance = 0; instance < instances; instance++) {",
                *self._starts(),
                *body,
                "    }",
                "    if (scratch) __builtin_free(scratch);",
                "  }",
                "}",
                "",
            ]
        )

    def _head(self) -> None:
        for place, axis in enumerate(self.interface.axes):
            self.emit(f"const i64 {self._size(axis)} = sizes[{place}]; (void){self._size(axis)};")
        offset = 0
        for place, tensor in enumerate(self.interface.tensors):
            if tensor in self.used:
                element = ELEMENTS[self._dtype(tensor)]
                self.emit(f"{element}* const {self._tensor(tensor)} = ({element}*)tensors[{place}];")
                for dim in range(self.interface.ranks[tensor]):
                    unit = (tensor, dim) in self.interface.unit
                    value = "1" if unit else f"strides[{offset + 2 * dim}]"
                    self.emit(
                        f"const i64 {self._stride(tensor, dim)} = {value}; (void){self._stride(tensor, dim)};"
                    )
                    extent = self._extent(tensor, dim)
                    self.emit(f"const i64 {extent} = strides[{offset + 2 * dim + 1}]; (void){extent};")
            offset += 2 * self.interface.ranks[tensor]
        counts = []
        for axis in self.kernel.grid:
            count = f"count_{self._c(axis)}"
            self.emit(
                f"const i64 {count} = ({self._size(self._axis(axis))} + {self._step(axis) - 1}) / {self._step(axis)};"
            )
            counts.append(count)
        self.emit(f"const i64 instances = {' * '.join(counts) or '1'};")
        self.emit("const i64 chunk = instances / (8 * threads) + 1; (void)chunk;")
        for axis, block in self.blocks.items():
            size = self._size(self._axis(axis))
            self.emit(f"const i64 most_{self._c(axis)} = {block.size or size}; (void)most_{self._c(axis)};")

    def _memory(self) -> list[str]:
        if not self.buffers:
            return ["    char* const scratch = 0;"]
        lines, sizes = [], []
        for buffer in self.buffers.values():
            count = " * ".join(f"most_{self._c(dim)}" for dim in buffer.dims) or "1"
            lines.append(
                f"    const i64 bytes_{buffer.name} = ({count} * {SIZES[kind(buffer.dtype)]} + 127) / 64 * 64;"
            )
            sizes.append(f"bytes_{buffer.name}")
        lines.append(f"    char* const scratch = (char*)__builtin_malloc({' + '.join(sizes)} + 64);")
        lines.append("    char* free_ = (char*)(((__UINTPTR_TYPE__)scratch + 63) / 64 * 64);")
        for buffer in self.buffers.values():
            element = ELEMENTS[kind(buffer.dtype)]
            lines.append(f"    {element}* {buffer.name} = ({element}*)free_; free_ += bytes_{buffer.name};")
        return lines

    def _starts(self) -> list[str]:
        lines = ["      i64 rest = instance; (void)rest;"]
        for axis in self.kernel.grid:
            c, step = self._c(axis), self._step(axis)
            lines.append(f"      const i64 start_{c} = rest % count_{c} * {step}; rest /= count_{c};")
            lines.append(
                f"      const i64 length_{c} = least({step}, {self._size(self._axis(axis))} - start_{c}); (void)length_{c};"
            )
        for axis, block in self.blocks.items():
            if block.kind == "whole":
                c = self._c(axis)
                lines.append(
                    f"      const i64 start_{c} = 0, length_{c} = {self._size(self._axis(axis))}; (void)start_{c}; (void)length_{c};"
                )
        return lines

    def _step(self, axis: str) -> int:
        return self.blocks[axis].step

    # Names ---------------------------------------------------------------------------------------------

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

    # Lines -----------------------------------------------------------------------------------------------

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

    # Loops -----------------------------------------------------------------------------------------------

    @property
    def _vector(self) -> _Open | None:
        return self.loops[-1] if self.loops and self.loops[-1].wide else None

    def _body(self, body: Sequence[Node]) -> None:
        for node in body:
            match node:
                case Leaf(item):
                    self._leaf(item)
                case Loop():
                    self._loop(node)
                case Walk():
                    self._walk(node)

    def _loop(self, loop: Loop) -> None:
        folds = [item for item in _folds(loop) if _folded_axis(item) == loop.axis]
        for item in folds:
            self._begin(item, loop)
        c = self._c(loop.axis)
        at = self.names.fresh(f"at_{c}")
        if self._is_vector(loop):
            copies = UNROLLED if folds else 1
            accumulators = [i for i in folds if self._accumulates_here(i, loop)]
            self.emit(f"i64 {at} = 0;")
            if copies > 1:
                with self.block(f"for (; {at} + {copies} * LANES <= length_{c}; {at} += {copies} * LANES)"):
                    for copy in range(copies):
                        with self.block(), self._inside(_Open(loop.axis, f"({at} + {copy} * LANES)", True)):
                            self._copy(accumulators, copy)
                            self._body(loop.body)
            with (
                self.block(f"for (; {at} + LANES <= length_{c}; {at} += LANES)"),
                self._inside(_Open(loop.axis, at, True)),
            ):
                self._copy(accumulators, 0)
                self._body(loop.body)
            left = self.names.fresh("left")
            with self.block(f"if ({at} < length_{c})"):
                self.emit(f"const i64 {left} = length_{c} - {at};")
                with self._inside(_Open(loop.axis, at, True, left)):
                    self._copy(accumulators, 0)
                    self._body(loop.body)
        else:
            with (
                self.block(f"for (i64 {at} = 0; {at} < length_{c}; {at}++)"),
                self._inside(_Open(loop.axis, at)),
            ):
                self._body(loop.body)
        for item in folds:
            self._end(item, loop)

    @contextmanager
    def _inside(self, opened: _Open) -> Iterator[None]:
        self.loops.append(opened)
        yield
        self.loops.pop()

    def _copy(self, accumulators: Sequence[Define], copy: int) -> None:
        """The accumulators that one of several copies of a loop's body adds to."""
        for item in accumulators:
            for name in self._states(item):
                self.bind(f"accumulator {name}", f"{self._accumulator(name)}_{copy}", True)

    def _is_vector(self, loop: Loop) -> bool:
        return all(isinstance(node, Leaf) and self._in_vectors(node.item) for node in loop.body)

    def _in_vectors(self, item: Define | Put) -> bool:
        match item:
            case Define(op=FoldTile(op=op)):
                found = fold_of(op)
                return found is not None and found[0].commutative
            case Define(
                op=ReduceTile() | Elementwise() | Cast() | LoadTile() | Positions() | Lanes() | Constant()
            ):
                return True
            case Put():
                return True
            case _:
                return False

    def _walk(self, walk: Walk) -> None:
        loop, c = walk.blocks.loop, self._c(walk.blocks.loop.axis)
        for item in loop.carried:
            self._carry_first(item)
        start, stop, step = self._scalar(loop.start), self._scalar(loop.stop), self._step(loop.axis)
        end = self.names.fresh(f"end_{c}")
        self.emit(f"const i64 {end} = least({stop}, {self._size(self._axis(loop.axis))});")
        with self.block(f"for (i64 start_{c} = {start}; start_{c} < {end}; start_{c} += {step})"):
            self.emit(f"const i64 length_{c} = least({step}, {end} - start_{c}); (void)length_{c};")
            self._body(walk.body)
            self._carry_next(loop.carried)

    def _carry_first(self, item: Carried) -> None:
        value = item.value
        if value.dims:
            self._assign(self._buffer(value.name), item.init)
        else:
            name = self.names.fresh(value.name)
            self.emit(f"{type_of(value.dtype, False)} {name} = {self._scalar(item.init)};")
            self.bind(value.name, name, False)

    def _carry_next(self, carried: Sequence[Carried]) -> None:
        taken: list[tuple[str, str]] = []
        for item in carried:
            if not item.value.dims:
                name = self.names.fresh("next")
                self.emit(f"const {type_of(item.value.dtype, False)} {name} = {self._scalar(item.next)};")
                taken.append((self._scalar(item.value), name))
        swapped: set[str] = set()
        names = {item.value.name for item in carried}
        for item in carried:
            if item.value.dims and item.value.name != item.next.name:
                mine, other = self._buffer(item.value.name), self._buffer_of(item.next)
                if (
                    other is not None
                    and other.dims == mine.dims
                    and other.name not in swapped
                    and item.next.name not in names
                ):
                    held = self.names.fresh("held")
                    element = ELEMENTS[kind(mine.dtype)]
                    self.emit(
                        f"{element}* const {held} = {mine.name}; {mine.name} = {other.name}; {other.name} = {held};"
                    )
                    swapped |= {mine.name, other.name}
                elif item.next.name in names:
                    raise NotNative("tiles that a loop carries from one variable to another")
                else:
                    self._assign(mine, item.next)
        for name, following in taken:
            self.emit(f"{name} = {following};")

    def _assign(self, buffer: _Buffer, value: Value, skip: Container[str] = ()) -> None:
        """Fills a buffer with a value of its dims, or of fewer, at the positions of the loops around."""
        with self.block():
            opened = 0
            for dim in (d for d in buffer.dims[:-1] if d not in skip):
                at = self.names.fresh("at")
                self.emit(f"for (i64 {at} = 0; {at} < length_{self._c(dim)}; {at}++) {{")
                self.depth += 1
                self.loops.append(_Open(dim, at))
                opened += 1
            at, c = self.names.fresh("at"), self._c(buffer.dims[-1])
            with (
                self.block(f"for (i64 {at} = 0; {at} < length_{c}; {at}++)"),
                self._inside(_Open(buffer.dims[-1], at)),
            ):
                place = self._address(buffer)[0]
                self.emit(f"put_{kind(buffer.dtype)}({place}, {self._scalar(value)});")
            for _ in range(opened):
                self.loops.pop()
                self.depth -= 1
                self.emit("}")

    # Reading ---------------------------------------------------------------------------------------------

    def _buffer(self, name: str) -> _Buffer:
        found = self.buffers.get(name)
        if found is None:
            value = self.tree.defined[name].value
            around = {loop.axis for loop in self.tree.memory[name]}
            dims = sorted((d for d in value.dims if d not in around), key=self.tree.depth.__getitem__)
            found = _Buffer(self.names.fresh(f"memory_{name}"), tuple(dims), value.dtype)
            self.buffers[name] = found
        return found

    def _buffer_of(self, value: Value) -> _Buffer | None:
        return self._buffer(value.name) if value.name in self.tree.memory else None

    def _address(self, buffer: _Buffer) -> tuple[str, str]:
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

    def _scalar(self, value: Value) -> str:
        return self._read(value, wide=False)

    def _read(self, value: Value, *, wide: bool) -> str:
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
        suffix = kind(buffer.dtype)
        vector = self._vector
        if not wide or vector is None or step == "0":
            text = f"get_{suffix}({place})"
            return f"splat({text})" if wide else text
        if step == "1":
            return f"load_{suffix}({place}{f', {vector.left}' if vector.left else ''})"
        return f"gather_{suffix}({place}, {step}, {vector.left or 'LANES'})"

    # Leaves ----------------------------------------------------------------------------------------------

    def _leaf(self, item: Define | Put) -> None:
        if isinstance(item, Put):
            self._store(item.store)
            return
        match item.op:
            case ReduceTile() | FoldTile():
                self._fold(item)
            case Dot():
                self._dot(item, item.op)
            case RankTile() | MergeTile():
                self._ranked(item)
            case _:
                self._definition(item)

    def _definition(self, item: Define) -> None:
        value, vector = item.value, self._vector
        wide = vector is not None and vector.axis in value.dims
        name = self.names.fresh(value.name)
        self.emit(f"const {type_of(value.dtype, wide)} {name} = {self._operation(item, wide)};")
        self.bind(value.name, name, wide)
        self._keep(value, wide)

    def _keep(self, value: Value, wide: bool) -> None:
        """Writes a value that has just been computed to its memory, where it has any."""
        if value.name not in self.tree.memory:
            return
        buffer = self._buffer(value.name)
        found = self.register(value.name)
        assert found is not None
        self._put(kind(buffer.dtype), *self._address(buffer), found[0], wide)

    def _put(self, dtype: str, place: str, step: str, text: str, wide: bool) -> None:
        vector = self._vector
        if not wide or vector is None:
            self.emit(f"put_{dtype}({place}, {text});")
        elif step == "1":
            self.emit(f"put_{dtype}({place}, {text}{f', {vector.left}' if vector.left else ''});")
        else:
            self.emit(f"scatter_{dtype}({place}, {text}, {step}, {vector.left or 'LANES'});")

    def _operation(self, item: Define, wide: bool) -> str:
        value, op = item.value, item.op
        match op:
            case Constant(given):
                return number(given, value.dtype)
            case Irrational(name):
                return number(IRRATIONAL[name], value.dtype)
            case Argument(name):
                if value.dtype in INTEGERS:
                    place = f"integers[{self.interface.integers.index(name)}]"
                    return (
                        f"{place} != 0"
                        if value.dtype == "bool"
                        else f"({type_of(value.dtype, False)}){place}"
                    )
                return f"({type_of(value.dtype, False)})reals[{self.interface.reals.index(name)}]"
            case Extent(axis):
                return f"(int){self._size(self._axis(axis))}"
            case BlockSize(axis):
                return f"(int){self.blocks[axis].size or self._size(self._axis(axis))}"
            case LaunchValue(_, expr):
                return f"({type_of(value.dtype, False)}){self._of_sizes(expr)}"
            case Lanes(axis):
                return self._position(axis, wide, start="0")
            case Start(axis):
                return f"(int)start_{self._c(axis)}"
            case Positions(axis):
                return self._position(axis, wide)
            case Elementwise(fn, args):
                texts = [self._read(arg, wide=wide) for arg in args]
                return applied(fn, texts, [kind(arg.dtype) for arg in args])
            case Cast(source, written):
                text = converted(self._read(source, wide=wide), source.dtype, value.dtype)
                return rounded(text, value.dtype) if written or source.dtype != value.dtype else text
            case LoadTile():
                return self._load(value, op, wide)
            case _:
                raise NotNative(_named(op))

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

    # Folds -----------------------------------------------------------------------------------------------

    def _states(self, item: Define) -> list[str]:
        """The names of the state variables that a fold computes, by place; one for a plain reduction."""
        name = item.value.name
        return [state or f"{name} {k}" for k, state in enumerate(self.tree.states.get(name, [name]))]

    def _state_dtypes(self, item: Define) -> list[str]:
        return [v.dtype for v in item.op.values] if isinstance(item.op, FoldTile) else [item.value.dtype]

    def _ops(self, item: Define) -> list[str]:
        if isinstance(item.op, FoldTile):
            found = fold_of(item.op.op)
            assert found is not None
            return list(found[0].ops)
        assert isinstance(item.op, ReduceTile)
        return [item.op.op]

    def _accumulator(self, name: str) -> str:
        found = self.register(f"accumulator of {name}")
        assert found is not None
        return found[0]

    def _accumulates_here(self, item: Define, loop: Loop) -> bool:
        """Whether the loop over a fold's axis is the innermost one around it, so that registers hold its states."""
        return any(isinstance(node, Leaf) and node.item is item for node in loop.body)

    def _begin(self, item: Define, loop: Loop) -> None:
        identities = [
            number(identity(o, d), d) for o, d in zip(self._ops(item), self._state_dtypes(item), strict=True)
        ]
        for name, dtype, first in zip(self._states(item), self._state_dtypes(item), identities, strict=True):
            if self._accumulates_here(item, loop):
                accumulator = self.names.fresh(f"sum_{name}")
                self.bind(f"accumulator of {name}", accumulator, True)
                if self._is_vector(loop):
                    copies = ", ".join(f"{accumulator}_{k} = splat({first})" for k in range(UNROLLED))
                    self.emit(f"{type_of(dtype, True)} {copies};")
                else:
                    self.emit(f"{type_of(dtype, False)} {accumulator} = {first};")
            else:
                self._clear(self._accumulating(name, item), loop, first)

    def _accumulating(self, name: str, item: Define) -> _Buffer:
        if name not in self.tree.memory:  # a state variable that nothing reads
            self.tree.memory[name] = self.tree.memory[item.value.name]
            place = self._states(item).index(name)
            value = replace(item.value, name=name, dtype=self._state_dtypes(item)[place])
            self.tree.defined[name] = replace(item, value=value)
        return self._buffer(name)

    def _clear(self, buffer: _Buffer, loop: Loop, first: str) -> None:
        """Fills the part of a buffer inside a loop with one number."""
        open_ = {opened.axis: opened.at for opened in self.loops}
        at = self.names.fresh("at")
        inner = [dim for dim in buffer.dims if dim not in open_]
        offset = [
            " * ".join([open_[dim], *(f"most_{self._c(d)}" for d in buffer.dims[k + 1 :])])
            for k, dim in enumerate(buffer.dims)
            if dim in open_
        ]
        count = " * ".join(f"most_{self._c(dim)}" for dim in inner) or "1"
        place = " + ".join([buffer.name, *offset, at])
        self.emit(f"for (i64 {at} = 0; {at} < {count}; {at}++) put_{kind(buffer.dtype)}({place}, {first});")

    def _fold(self, item: Define) -> None:
        names, dtypes, vector = self._states(item), self._state_dtypes(item), self._vector
        operands_ = list(operands(item.op))
        here = self.loops[-1].axis == _folded_axis(item)
        wide = vector is not None and (here or vector.axis in item.value.dims)
        new = [self._read(v, wide=wide) for v in operands_]
        if here:
            if wide:
                old = [self.register(f"accumulator {name}") for name in names]
                states = [found[0] for found in old if found is not None]
            else:
                states = [self._accumulator(name) for name in names]
        else:
            buffers = [self._accumulating(name, item) for name in names]
            states = [self._read(replace(item.value, name=name), wide=wide) for name in names]
        held = []
        for text, dtype in zip(new, dtypes, strict=True):
            name = self.names.fresh("new")
            self.emit(f"const {type_of(dtype, wide)} {name} = {text};")
            held.append(name)
        if here and wide and vector is not None and vector.left:
            firsts = [number(identity(o, d), d) for o, d in zip(self._ops(item), dtypes, strict=True)]
            held = [
                f"choose(first({vector.left}), {text}, splat({one}))"
                for text, one in zip(held, firsts, strict=True)
            ]
        combined = self._combined(item, states, held, wide)
        if here:
            results = []
            for text, dtype in zip(combined, dtypes, strict=True):
                name = self.names.fresh("joined")
                self.emit(f"const {type_of(dtype, wide)} {name} = {text};")
                results.append(name)
            for state, result in zip(states, results, strict=True):
                self.emit(f"{state} = {result};")
            return
        results = []
        for text, dtype in zip(combined, dtypes, strict=True):
            name = self.names.fresh("joined")
            self.emit(f"const {type_of(dtype, wide)} {name} = {text};")
            results.append(name)
        for buffer, result in zip(buffers, results, strict=True):
            self._put(kind(buffer.dtype), *self._address(buffer), result, wide)

    def _combined(self, item: Define, states: Sequence[str], others: Sequence[str], wide: bool) -> list[str]:
        if isinstance(item.op, FoldTile):
            found = fold_of(item.op.op)
            assert found is not None
            return combination(found[0], states, others, self._state_dtypes(item), wide)
        assert isinstance(item.op, ReduceTile)
        templates = {
            "sum": "{0} + {1}",
            "prod": "{0} * {1}",
            "max": "maximum({0}, {1})",
            "min": "minimum({0}, {1})",
        }
        return [templates[item.op.op].format(states[0], others[0])]

    def _end(self, item: Define, loop: Loop) -> None:
        if not self._accumulates_here(item, loop):
            return
        names, dtypes = self._states(item), self._state_dtypes(item)
        accumulators = [self._accumulator(name) for name in names]
        if self._is_vector(loop):
            for copy in range(1, UNROLLED):
                old = [f"{a}_0" for a in accumulators]
                combined = self._combined(item, old, [f"{a}_{copy}" for a in accumulators], True)
                with self.block():
                    for k, (text, dtype) in enumerate(zip(combined, dtypes, strict=True)):
                        self.emit(f"const {type_of(dtype, True)} both{k} = {text};")
                    for k, name in enumerate(old):
                        self.emit(f"{name} = both{k};")
            if isinstance(item.op, ReduceTile):
                results = [f"fold_{item.op.op}({accumulators[0]}_0)"]
            else:
                results = self._lanes(item, accumulators)
        else:
            results = accumulators
        for name, dtype, text in zip(names, dtypes, results, strict=True):
            result = self.names.fresh(name)
            self.emit(f"const {type_of(dtype, False)} {result} = {text};")
            self.bind(name, result, False)
            if name in self.tree.memory:
                self._keep(replace(item.value, name=name), False)

    def _lanes(self, item: Define, accumulators: Sequence[str]) -> list[str]:
        """The states of all lanes combined, one after the other."""
        dtypes = self._state_dtypes(item)
        totals = [self.names.fresh("total") for _ in accumulators]
        for total, accumulator, dtype in zip(totals, accumulators, dtypes, strict=True):
            self.emit(f"{type_of(dtype, False)} {total} = {accumulator}_0[0];")
        with self.block("for (int lane = 1; lane < LANES; lane++)"):
            combined = self._combined(item, totals, [f"{a}_0[lane]" for a in accumulators], False)
            for k, (text, dtype) in enumerate(zip(combined, dtypes, strict=True)):
                self.emit(f"const {type_of(dtype, False)} both{k} = {text};")
            for k, total in enumerate(totals):
                self.emit(f"{total} = both{k};")
        return totals

    # What is made at once ----------------------------------------------------------------------------------

    def _strides(self, buffer: _Buffer) -> dict[str, str]:
        return {
            dim: " * ".join(f"most_{self._c(d)}" for d in buffer.dims[place + 1 :]) or "1"
            for place, dim in enumerate(buffer.dims)
        }

    def _place(self, value: Value) -> tuple[str, dict[str, str]]:
        """A pointer to a value at the loops around, and the distance of neighbours along its other dims."""
        open_ = {loop.axis: loop.at for loop in self.loops}
        if value.name in self.tree.direct:
            return self._direct(value, open_)
        if value.name not in self.tree.memory:
            held = self.names.fresh("held")
            self.emit(f"{ELEMENTS[kind(value.dtype)]} {held} = {self._scalar(value)};")
            return f"&{held}", {}
        buffer = self._buffer(value.name)
        strides = self._strides(buffer)
        terms = [f"{open_[dim]} * {stride}" for dim, stride in strides.items() if dim in open_]
        return " + ".join([buffer.name, *terms]), {d: s for d, s in strides.items() if d not in open_}

    def _direct(self, value: Value, open_: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        op = self.tree.defined[value.name].op
        assert isinstance(op, LoadTile)
        self.used.add(op.tensor)
        terms, strides = [self._tensor(op.tensor)], {}
        for place, at in enumerate(op.index):
            stride = self._stride(op.tensor, place)
            position = self.tree.defined[at.name].op
            if at.dims and isinstance(position, Positions):
                axis = position.axis
                first = f"start_{self._c(axis)}"
                if axis in open_:
                    first = f"({first} + {open_[axis]})"
                else:
                    strides[axis] = stride
                terms.append(f"{first} * {stride}")
            elif self._is_position(at):
                terms.append(f"{self._scalar(at)} * {stride}")
            else:
                inside, safe = self.names.fresh("inside"), self.names.fresh("safe")
                self.emit(f"bool {inside} = true;")
                where = f"{self._extent(op.tensor, place)}, {self.interface.tensors.index(op.tensor)}"
                self.emit(f"inside({inside}, {self._scalar(at)}, {where}, failure);")
                self.emit(f"const i64 {safe} = {inside} ? {self._scalar(at)} : 0;")
                terms.append(f"{safe} * {stride}")
        return " + ".join(terms), strides

    def _dot(self, item: Define, op: Dot) -> None:
        if op.precision != "exact":
            raise NotNative(f"a product in precision {op.precision}")
        value, open_ = item.value, {loop.axis for loop in self.loops}
        out = self._buffer(value.name)
        keep = self._accumulate(out, op.accumulator)
        (left, left_steps), (right, right_steps) = self._place(op.left), self._place(op.right)
        masks = [None if mask is None else self._place(mask) for mask in (op.left_mask, op.right_mask)]
        place, out_steps = self._place(value)
        mine = [dim for dim in value.dims if dim not in open_]
        rows = [dim for dim in mine if dim in left_steps]
        columns = [dim for dim in mine if dim not in left_steps]
        # The dims that the library walks: the last ones in memory; loops around it walk the others.
        row, column = (max(dims, key=out.dims.index, default=None) for dims in (rows, columns))
        offsets = ["", "", "", *("" for _ in masks)]
        opened = 0
        for dim in mine:
            if dim in (row, column):
                continue
            at, c = self.names.fresh("at"), self._c(dim)
            self.emit(f"for (i64 {at} = 0; {at} < length_{c}; {at}++) {{")
            self.depth += 1
            opened += 1
            steps = [left_steps, right_steps, out_steps, *({} if mask is None else mask[1] for mask in masks)]
            for k, of in enumerate(steps):
                if dim in of:
                    offsets[k] += f" + {at} * {of[dim]}"

        def step(steps: Mapping[str, str], dim: str | None) -> str:
            return "0" if dim is None else steps.get(dim, "0")

        def length(dim: str | None) -> str:
            return "1" if dim is None else f"length_{self._c(dim)}"

        given = [
            *(left + offsets[0], step(left_steps, row), step(left_steps, op.axis)),
            *(right + offsets[1], step(right_steps, op.axis), step(right_steps, column)),
            *(place + offsets[2], step(out_steps, row), step(out_steps, column)),
            *(length(row), length(op.axis), length(column), keep),
        ]
        if any(mask is not None for mask in masks):
            sides = ((row, op.axis), (op.axis, column))
            for k, (mask, dims) in enumerate(zip(masks, sides, strict=True)):
                pointer = "(const u8*)0" if mask is None else mask[0] + offsets[3 + k]
                given += [pointer, *(step({} if mask is None else mask[1], dim) for dim in dims)]
        self.emit(f"product({', '.join(given)});")
        for _ in range(opened):
            self.depth -= 1
            self.emit("}")

    def _accumulate(self, out: _Buffer, accumulator: Value | None) -> str:
        """Puts what a product is added to into the product's place: "true", or "false" where that is nothing."""
        if accumulator is None:
            return "false"
        found = self.tree.defined[accumulator.name].op
        if isinstance(found, Constant) and not found.number and accumulator.name not in self.tree.carried:
            return "false"
        held = self._buffer_of(accumulator)
        if held is not None and held.dims == out.dims and self.tree.uses(accumulator.name) == 1:
            element, name = ELEMENTS[kind(out.dtype)], self.names.fresh("held")
            self.emit(
                f"{element}* const {name} = {held.name}; {held.name} = {out.name}; {out.name} = {name};"
            )
        else:
            open_ = {loop.axis for loop in self.loops}
            self._assign(replace(out, dims=out.dims), accumulator, skip=open_)
        return "true"

    def _ranked(self, item: Define) -> None:
        """A list of what comes first: every state is put into its place among those so far."""
        op = item.op
        assert isinstance(op, RankTile | MergeTile)
        found = fold_of(op.op)
        assert found is not None
        fold = found[0]
        groups, axis = (
            ((op.values,), op.axis) if isinstance(op, RankTile) else ((op.left, op.right), op.ranks)
        )
        dtypes = [kind(value.dtype) for value in groups[0]]
        names = self.tree.states[item.value.name]
        lists = []
        for k, name in enumerate(names):
            if not name:
                name = f"{item.value.name} {k}"
                self.tree.memory[name] = self.tree.memory[item.value.name]
                value = replace(item.value, name=name, dtype=dtypes[k])
                self.tree.defined[name] = replace(item, value=value)
            pointer, steps = self._place(replace(item.value, name=name, dtype=dtypes[k]))
            lists.append((pointer, steps[op.ranks]))
        with self.block():
            self.emit(f"const i64 ranks = length_{self._c(op.ranks)};")
            for k, ((pointer, _), dtype) in enumerate(zip(lists, dtypes, strict=True)):
                self.emit(f"{ELEMENTS[dtype]}* const list{k} = {pointer};")
            first = "".join(
                f" list{k}[r * {step}] = {number(identity(o, dtype), dtype)};"
                for k, ((_, step), dtype, o) in enumerate(zip(lists, dtypes, fold.ops, strict=True))
            )
            self.emit(f"for (i64 r = 0; r < ranks; r++) {{{first} }}")
            for group in groups:
                with self.block():
                    self._insert(fold, group, axis, lists, dtypes)

    def _insert(
        self,
        fold: Fold,
        group: Sequence[Value],
        axis: str,
        lists: Sequence[tuple[str, str]],
        dtypes: Sequence[str],
    ) -> None:
        places = [self._place(value) for value in group]
        with self.block(f"for (i64 n = 0; n < length_{self._c(axis)}; n++)"):
            for k, ((pointer, steps), dtype) in enumerate(zip(places, dtypes, strict=True)):
                self.emit(f"const {type_of(dtype, False)} x{k} = ({pointer})[n * {steps.get(axis, '0')}];")
            before = "false"
            for name, greatest in reversed(fold.order):
                k = fold.state.index(name)
                before = (
                    f"precedes(x{k}, list{k}[(r - 1) * {lists[k][1]}], {str(greatest).lower()}, {before})"
                )
            self.emit("i64 r = ranks;")
            self.emit(f"while (r > 0 && {before}) r--;")
            self.emit("if (r == ranks) continue;")
            moved = "".join(f" list{k}[q * {s}] = list{k}[(q - 1) * {s}];" for k, (_, s) in enumerate(lists))
            self.emit(f"for (i64 q = ranks - 1; q > r; q--) {{{moved} }}")
            for k, (_, step) in enumerate(lists):
                self.emit(f"list{k}[r * {step}] = x{k};")

    # Tensors -----------------------------------------------------------------------------------------------

    def _steps(self, at: Value, axis: str) -> tuple[str, str] | None:
        """An index as a number where the vector of an axis begins and its step from lane to lane; None if it has none."""
        if axis not in at.dims:
            return self._scalar(at), "0"
        item = self.tree.defined[at.name]
        match item.op:
            case Positions():
                return self._position(axis, False), "1"
            case Elementwise("add" | "sub" as fn, (left, right)) if at.dtype in ("i32", "i64"):
                first, second = self._steps(left, axis), self._steps(right, axis)
                if first is None or second is None:
                    return None
                sign = "+" if fn == "add" else "-"
                if second[1] == "0":
                    step = first[1]
                elif first[1] == "0" and sign == "+":
                    step = second[1]
                else:
                    step = f"({first[1]} {sign} {second[1]})"
                return f"((i64){first[0]} {sign} {second[0]})", step
            case Elementwise("mul", (left, right)) if at.dtype in ("i32", "i64"):
                if axis in left.dims and axis in right.dims:
                    return None
                moving, fixed = (left, right) if axis in left.dims else (right, left)
                inner = self._steps(moving, axis)
                factor = self._scalar(fixed)
                if inner is None:
                    return None
                return f"((i64){inner[0]} * {factor})", f"((i64){inner[1]} * {factor})"
            case Cast(source) if source.dtype in ("i32", "i64"):
                return self._steps(source, axis)
            case _:
                return None

    def _is_position(self, at: Value) -> bool:
        """Whether an index is the plain position of an axis, which is inside wherever blocks are clipped."""
        return isinstance(self.tree.defined[at.name].op, Positions | Start)

    def _access(self, tensor: str, index: Sequence[Value], mask: str, wide: bool) -> tuple[str, str, str]:
        """Where a tensor is read or written: a pointer with the step of its lanes; or a pointer, the offsets of lanes
        and which of them are wanted, if there is no step. Positions outside are noted as a failure, and not touched."""
        self.used.add(tensor)
        name, vector = self._tensor(tensor), self._vector
        checked = [k for k, at in enumerate(index) if not self._is_position(at)]
        if not wide or vector is None:
            texts = [self._scalar(at) for at in index]
            offset = " + ".join(f"(i64)({t}) * {self._stride(tensor, k)}" for k, t in enumerate(texts)) or "0"
            if not checked and not mask:
                return f"{name} + {offset}", "0", ""
            wanted = self.names.fresh("wanted")
            self.emit(f"bool {wanted} = {mask or 'true'};")
            for k in checked:
                self.emit(
                    f"inside({wanted}, {texts[k]}, {self._extent(tensor, k)}, {self.interface.tensors.index(tensor)}, failure);"
                )
            return f"{name} + {offset}", "0", wanted
        steps = [self._steps(at, vector.axis) for at in index]
        if not mask and not checked and all(step is not None for step in steps):
            known = [step for step in steps if step is not None]
            offset = (
                " + ".join(
                    f"(i64)({first}) * {self._stride(tensor, k)}" for k, (first, _) in enumerate(known)
                )
                or "0"
            )
            moving = [k for k, (_, step) in enumerate(known) if step != "0"]
            if len(moving) == 1 and known[moving[0]][1] == "1" and (tensor, moving[0]) in self.interface.unit:
                return f"{name} + {offset}", "1", ""
            step = " + ".join(f"{known[k][1]} * {self._stride(tensor, k)}" for k in moving) or "0"
            return f"{name} + {offset}", f"({step})", ""
        wanted, offset = self.names.fresh("wanted"), self.names.fresh("offset")
        on = f"first({vector.left})" if vector.left else "splat(true)"
        self.emit(f"I {wanted} = {f'both({mask}, {on})' if mask else on};")
        self.emit(f"L {offset} = L{{}};")
        for k, at in enumerate(index):
            place = self.names.fresh("place")
            self.emit(f"const L {place} = to_i64({self._read(at, wide=True)});")
            if k in checked:
                self.emit(
                    f"inside({wanted}, {place}, {self._extent(tensor, k)}, {self.interface.tensors.index(tensor)}, failure);"
                )
            self.emit(f"{offset} += {place} * {self._stride(tensor, k)};")
        return name, offset, wanted

    def _load(self, value: Value, op: LoadTile, wide: bool) -> str:
        dtype, vector = self._dtype(op.tensor), self._vector
        mask = "" if op.mask is None else self._read(op.mask, wide=wide)
        place, step, wanted = self._access(op.tensor, op.index, mask, wide)
        other = number(op.other, value.dtype)
        if not wide or vector is None:
            text = f"get_{dtype}({place})"
            return f"({wanted} ? {text} : {other})" if wanted else text
        if wanted:
            text = f"gather_{dtype}({place}, {step}, {wanted})"
            return f"choose({wanted}, {text}, splat({other}))"
        if step == "1":
            return f"load_{dtype}({place}{f', {vector.left}' if vector.left else ''})"
        return f"gather_{dtype}({place}, {step}, {vector.left or 'LANES'})"

    def _store(self, store: Store) -> None:
        dtype, vector = self._dtype(store.tensor), self._vector
        used = (*store.index, store.value, *(() if store.mask is None else (store.mask,)))
        wide = vector is not None and any(vector.axis in v.dims for v in used)
        mask = "" if store.mask is None else self._read(store.mask, wide=wide)
        with self.block():
            text = converted(self._read(store.value, wide=wide), store.value.dtype, kind(dtype))
            place, step, wanted = self._access(store.tensor, store.index, mask, wide)
            if not wide or vector is None:
                self.emit(f"{f'if ({wanted}) ' if wanted else ''}put_{dtype}({place}, {text});")
            elif wanted:
                self.emit(f"scatter_{dtype}({place}, {text}, {step}, {wanted});")
            else:
                self._put(dtype, place, step, text, True)


def _folds(loop: Loop) -> Iterator[Define]:
    """The folds inside a loop."""
    for node in loop.body:
        if isinstance(node, Leaf):
            if isinstance(node.item, Define) and isinstance(node.item.op, ReduceTile | FoldTile):
                yield node.item
        elif isinstance(node, Loop):
            yield from _folds(node)


def _folded_axis(item: Define) -> str:
    assert isinstance(item.op, ReduceTile | FoldTile)
    return item.op.axis


def _named(op: Op) -> str:
    return type(op).__name__
