"""Writes a loop tree as C++: one function, which runs all kernels of a tile program one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from eqfuse import logs
from eqfuse.terms.floats import IRRATIONAL
from eqfuse.terms.functions import CASTS, DRAWN
from eqfuse.tile import nodes as ir
from eqfuse.tile.dtypes import INTEGERS, identity
from eqfuse.tile.native.context import CppNames, Interface, Open
from eqfuse.tile.native.folds import STRETCH
from eqfuse.tile.native.frame import Frame
from eqfuse.tile.native.listing import show
from eqfuse.tile.native.nodes import (
    Begin,
    Define,
    End,
    Jam,
    Leaf,
    Loop,
    Node,
    NotNative,
    Put,
    RegisterTile,
    Vectors,
    Walk,
    folds_along,
)
from eqfuse.tile.native.schedule import scheduled
from eqfuse.tile.native.text import (
    ELEMENTS,
    applied,
    converted,
    kept,
    kind,
    number,
    rounded,
    type_of,
)


def source_of(program: ir.TileProgram, interface: Interface, extents: Mapping[str, int]) -> str:
    """The C++ source of a program, for the extents or others: they only decide about the order of loops.

    Raises NotNative for what it has no text for."""
    names = CppNames()
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


class _KernelPrinter(Frame):
    """One kernel. `jammed` are positions of a loop that the loop of vectors inside it takes at once, with the numbers that are
    made for each; `jammed_folds` what that loop folds."""

    jammed: Sequence[tuple[Open, dict[str, tuple[str, bool]]]] = ()
    jammed_folds: Sequence[Define] = ()

    def text(self) -> str:
        self.depth = 3
        loops = scheduled(self.tree)
        logs.show("source", f"loops of {self.kernel.name}", lambda: show(self.kernel, loops))
        self._body(loops)
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
                "  LibraryThreads library(instances > 1 ? 1 : threads);",
                "  const auto blocks = [=]() INLINED {",
                *memory,
                "    #pragma omp for schedule(dynamic, chunk)",
                "    for (i64 instance = 0; instance < instances; instance++) {",
                *self._starts(),
                *body,
                "    }",
                *(["    written();"] if self.streamed else []),
                "    thread_scratch.leave();",
                "  };",
                # What a region is given lies in memory, to which any store may be: its copies are in registers.
                "  const auto work = [=] { const auto own = blocks; own(); };",
                # A region of one thread would be one around those of the library, which wake new threads every time.
                "  if (threads == 1 || instances == 1) return work();",
                "  #pragma omp parallel num_threads(threads)",
                "  work();",
                "}",
                "",
            ]
        )

    def _body(self, body: Sequence[Node]) -> None:
        for node in body:
            match node:
                case Leaf(item):
                    self._leaf(item)
                case Begin():
                    self._begin(node)
                case End():
                    self._end(node)
                case Loop():
                    self._loop(node)
                case Vectors():
                    self._vectors(node)
                case Jam():
                    self._jam(node)
                case RegisterTile():
                    self._register_tile(node)
                case Walk():
                    self._walk(node)

    def _at(self, axis: str) -> str:
        return self.names.fresh(f"at_{self._c(axis)}")

    def _loop(self, loop: Loop) -> None:
        at = self._at(loop.axis)
        with (
            self.block(f"for (i64 {at} = 0; {at} < length_{self._c(loop.axis)}; {at}++)"),
            self._inside(Open(loop.axis, at)),
        ):
            self._body(loop.body)

    def _vectors(self, loop: Vectors) -> None:
        c, at, folds = self._c(loop.axis), self._at(loop.axis), folds_along(loop)
        self.emit(f"i64 {at} = 0;")
        if loop.parts > 1:
            self._in_parts(loop, at, folds)
        elif loop.aligned is not None:
            head = self.names.fresh("head")
            self.emit(
                f"const i64 {head} = least({self._first_whole(loop.aligned.store, loop.axis)}, length_{c});"
            )
            with self.block(f"if ({head})"), self._inside(Open(loop.axis, "0", True, head)):
                self._each_vector(loop)
            self.emit(f"{at} = {head};")
        with (
            self.block(f"for (; {at} + LANES <= length_{c}; {at} += LANES)"),
            self._inside(Open(loop.axis, at, True)),
        ):
            self._copy(folds, 0)
            self._each_vector(loop)
        left = self.names.fresh("left")
        with self.block(f"if ({at} < length_{c})"):
            self.emit(f"const i64 {left} = length_{c} - {at};")
            with self._inside(Open(loop.axis, at, True, left)):
                self._copy(folds, 0)
                self._each_vector(loop)

    def _in_parts(self, loop: Vectors, at: str, folds: Sequence[Define]) -> None:
        """A vector of each part of an axis at once, each with accumulators of its own."""
        far, parts = self.names.fresh("far"), loop.parts
        self.emit(f"const i64 {far} = length_{self._c(loop.axis)} / ({parts} * LANES) * LANES;")
        sums = [item for item in folds if self._is_sum(item)]
        with self.block(f"while ({at} < {far})") if sums else nullcontext():
            until = self.names.fresh("until") if sums else far
            if sums:
                self.emit(f"const i64 {until} = least({far}, {at} + {STRETCH} * LANES);")
            with self.block(f"for (; {at} < {until}; {at} += LANES)"):
                for self.part in range(parts):
                    with self.block(), self._inside(Open(loop.axis, f"({at} + {self.part} * {far})", True)):
                        self._copy(folds, self.part)
                        self._each_vector(loop)
            self.part = None
            if sums:
                with self.block(f"if ({at} < {far})"):
                    self._add_to_totals(sums)
        self.emit(f"{at} = {parts} * {far};")

    def _each_vector(self, loop: Vectors) -> None:
        """The body of a loop of vectors. For positions of a loop around it that are taken at once, what that folds is read before
        the first and kept after the last of them."""
        if not self.jammed:
            self._body(loop.body)
            return
        held = []
        for item in self.jammed_folds:
            for name in self._states(item):
                buffer, sums = self._accumulating(name, item), self.names.fresh(f"held_{name}")
                old = self._read(replace(item.value, name=name), wide=True)
                self.emit(f"{type_of(buffer.dtype, True)} {sums} = {old};")
                self.bind(f"held {name}", sums, True)
                held.append((buffer, sums))
        vector = self.loops.pop()
        for around, numbers in self.jammed:
            with self.block(), self._inside(around), self._inside(vector):
                self.scopes[-1].update(numbers)
                self._body(loop.body)
        self.loops.append(vector)
        for buffer, sums in held:
            self._put(kept(buffer.dtype), *self._address(buffer), sums, True)

    def _jam(self, jam: Jam) -> None:
        c, at, count = self._c(jam.axis), self._at(jam.axis), jam.count
        self.emit(f"i64 {at} = 0;")
        with self.block(f"for (; {at} + {count} <= length_{c}; {at} += {count})"):
            self.jammed = [self._numbers(jam, Open(jam.axis, f"({at} + {k})")) for k in range(count)]
            self.jammed_folds = folds_along(jam)
            self._vectors(jam.vectors)
            self.jammed = self.jammed_folds = ()
        with self.block(f"for (; {at} < length_{c}; {at}++)"), self._inside(Open(jam.axis, at)):
            self._body(jam.body)

    def _numbers(self, jam: Jam, around: Open) -> tuple[Open, dict[str, tuple[str, bool]]]:
        """One position of a jammed loop, and the numbers that are made for it."""
        self.scopes.append({})
        with self._inside(around):
            self._body(jam.before)
        return around, self.scopes.pop()

    def _register_tile(self, tile: RegisterTile) -> None:
        axis = tile.vectors.axis
        c, at = self._c(axis), self._at(axis)
        self.emit(f"i64 {at} = 0;")
        for count in tile.counts:
            with self.block(f"for (; {at} + {count} * LANES <= length_{c}; {at} += {count} * LANES)"):
                self._tile_of(tile, [Open(axis, f"({at} + {k} * LANES)", True) for k in range(count)])
        left = self.names.fresh("left")
        with self.block(f"if ({at} < length_{c})"):
            self.emit(f"const i64 {left} = length_{c} - {at};")
            self._tile_of(tile, [Open(axis, at, True, left)])

    def _tile_of(self, tile: RegisterTile, places: Sequence[Open]) -> None:
        """The sums of some vectors, along the whole axis."""
        folds, c = folds_along(tile), self._c(tile.axis)
        states = [
            (name, dtype, number(identity(op, dtype), dtype))
            for item in folds
            for name, dtype, op in zip(
                self._states(item), self._state_dtypes(item), self._ops(item), strict=True
            )
        ]
        held = {name: [self.names.fresh(f"held_{name}") for _ in places] for name, _, _ in states}
        for name, dtype, first in states:
            sums = ", ".join(f"{one} = splat({first})" for one in held[name])
            self.emit(f"{type_of(dtype, True)} {sums};")
        at = self._at(tile.axis)
        with (
            self.block(f"for (i64 {at} = 0; {at} < length_{c}; {at}++)"),
            self._inside(Open(tile.axis, at)),
        ):
            self._body(tile.before)
            for k, place in enumerate(places):
                with self.block(), self._inside(place):
                    for name, _, _ in states:
                        self.bind(f"held {name}", held[name][k], True)
                    self._body(tile.vectors.body)
        for item in folds:
            for name in self._states(item):
                buffer = self._accumulating(name, item)
                for k, place in enumerate(places):
                    with self._inside(place):
                        self._put(kept(buffer.dtype), *self._address(buffer), held[name][k], True)

    def _walk(self, walk: Walk) -> None:
        loop, c = walk.blocks.loop, self._c(walk.blocks.loop.axis)
        for item in loop.carried:
            self._carry_first(item)
        start, stop, step = self._scalar(loop.start), self._scalar(loop.stop), self._step(loop.axis)
        end = self.names.fresh(f"end_{c}")
        self.emit(f"const i64 {end} = least({stop}, {self._size(self._axis(loop.axis))});")
        with self.block(f"for (i64 start_{c} = {start}; start_{c} < {end}; start_{c} += {step})"):
            self.emit(f"const i64 length_{c} = least({step}, {end} - start_{c}); (void)length_{c};")
            self.walks.append(loop.axis)
            self._body(walk.body)
            self.walks.pop()
            self._carry_next(loop.carried)

    def _carry_first(self, item: ir.Carried) -> None:
        value = item.value
        if value.dims:
            self._assign(self._buffer(value.name), item.init)
        else:
            name = self.names.fresh(value.name)
            self.emit(f"{type_of(value.dtype, False)} {name} = {self._scalar(item.init)};")
            self.bind(value.name, name, False)

    def _carry_next(self, carried: Sequence[ir.Carried]) -> None:
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
                    element = ELEMENTS[kept(mine.dtype)]
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

    def _leaf(self, item: Define | Put) -> None:
        if isinstance(item, Put):
            self._store(item.store)
            return
        match item.op:
            case ir.ReduceTile() | ir.FoldTile():
                self._fold(item)
            case ir.Dot():
                self._dot(item, item.op)
            case ir.RankTile() | ir.MergeTile():
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

    def _is_number(self, value: ir.Value) -> bool:
        """Whether a value is one number for all lanes of a vector, in a register."""
        found = self.register(value.name)
        return found is not None and not found[1]

    def _rounded_where_stored(self, value: ir.Value) -> bool:
        """Whether a value is only ever stored, in its own dtype: then the store rounds it."""
        return value.name not in self.tree.memory and self.tree.stored_as(value.name, self.stored) == {
            value.dtype
        }

    def _operation(self, item: Define, wide: bool) -> str:
        value, op = item.value, item.op
        match op:
            case ir.Constant(given):
                return number(given, value.dtype)
            case ir.Irrational(name):
                return number(IRRATIONAL[name], value.dtype)
            case ir.Argument(name):
                if value.dtype in INTEGERS:
                    place = f"integers[{self.interface.integers.index(name)}]"
                    return (
                        f"{place} != 0"
                        if value.dtype == "bool"
                        else f"({type_of(value.dtype, False)}){place}"
                    )
                return f"({type_of(value.dtype, False)})reals[{self.interface.reals.index(name)}]"
            case ir.Extent(axis):
                return f"(int){self._size(self._axis(axis))}"
            case ir.BlockSize(axis):
                return f"(int){self.blocks[axis].size or self._size(self._axis(axis))}"
            case ir.LaunchValue(_, expr):
                return f"({type_of(value.dtype, False)}){self._of_sizes(expr)}"
            case ir.Lanes(axis):
                return self._position(axis, wide, start="0")
            case ir.Start(axis):
                return f"(int)start_{self._c(axis)}"
            case ir.Positions(axis):
                return self._position(axis, wide)
            case ir.Elementwise(fn, args):
                if fn == "div" and wide and value.dtype in ("f32", "f64") and self._is_number(args[1]):
                    return f"quotient({self._read(args[0], wide=True)}, {self._scalar(args[1])})"
                texts = [self._read(arg, wide=wide) for arg in args]
                if fn in CASTS and self._rounded_where_stored(value):
                    return converted(texts[0], args[0].dtype, value.dtype)
                text = applied(fn, texts, [kind(arg.dtype) for arg in args])
                return converted(text, "f32", value.dtype) if fn in DRAWN else text
            case ir.Cast(source, written):
                text = converted(self._read(source, wide=wide), source.dtype, value.dtype)
                is_rounded = (written or source.dtype != value.dtype) and not self._rounded_where_stored(
                    value
                )
                return rounded(text, value.dtype) if is_rounded else text
            case ir.LoadTile():
                return self._load(value, op, wide)
            case ir.Search():
                return self._search(op)
            case _:
                raise NotNative(_named(op))


def _named(op: ir.Op) -> str:
    return type(op).__name__
