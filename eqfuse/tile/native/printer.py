"""Writes a loop tree as C++: one function, which runs all kernels of a tile program one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from eqfuse.terms.dtypes import BYTES
from eqfuse.terms.floats import IRRATIONAL
from eqfuse.terms.functions import CASTS, DRAWN
from eqfuse.tile import nodes as ir
from eqfuse.tile.dtypes import INTEGERS, identity
from eqfuse.tile.native.context import CppNames, Interface, Open
from eqfuse.tile.native.folds import STRETCH, UNROLLED, folded_axis, folds_of
from eqfuse.tile.native.nodes import Define, Leaf, Loop, Node, NotNative, Put, Walk
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
from eqfuse.tile.native.tree import items_in
from eqfuse.tile.native.whole import Whole
from eqfuse.tile.walk import nested

JAMMED = 4
"""Positions of a folded axis that a loop of vectors along another axis takes at once."""

HELD = 8
"""Vectors of sums that are in registers at once: an addition takes four cycles, and two begin in each."""


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


class _KernelPrinter(Whole):
    """One kernel. `jammed` are positions of a loop that the loop of vectors inside it takes at once."""

    jammed: Sequence[Open] = ()

    def _check(self) -> None:
        stores = {s.tensor for s in nested(self.kernel.body) if isinstance(s, ir.Store)}
        for stmt in nested(self.kernel.body):
            op = getattr(stmt, "op", None)
            if isinstance(op, ir.LoadTile) and op.tensor in stores:
                raise NotNative(f"a load of {op.tensor!r}, which the same kernel stores")

    def text(self) -> str:
        self._check()
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
                "  LibraryThreads library(instances > 1 ? 1 : threads);",
                "  const auto work = [=] {",
                *memory,
                "    #pragma omp for schedule(dynamic, chunk)",
                "    for (i64 instance = 0; instance < instances; instance++) {",
                *self._starts(),
                *body,
                "    }",
                *(["    written();"] if self.streamed else []),
                "    thread_scratch.leave();",
                "  };",
                # A region of one thread would be one around those of the library, which wake new threads every time.
                "  if (threads == 1 || instances == 1) return work();",
                "  #pragma omp parallel num_threads(threads)",
                "  work();",
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
            if tensor in self.streamed:
                extents = [self._extent(tensor, dim) for dim in range(self.interface.ranks[tensor])]
                element = f"(i64)sizeof *{self._tensor(tensor)}"
                sizes = f"{element} * {' * '.join(extents)}, {element} * {extents[-1]}"
                self.emit(f"const bool {self._past(tensor)} = streams({sizes});")
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
            return []
        lines, sizes = [], []
        for buffer in self.buffers.values():
            count = " * ".join(f"most_{self._c(dim)}" for dim in buffer.dims) or "1"
            lines.append(
                f"    const i64 bytes_{buffer.name} = ({count} * {BYTES[kept(buffer.dtype)]} + 127) / 64 * 64;"
            )
            sizes.append(f"bytes_{buffer.name}")
        lines.append(f"    char* const scratch = thread_scratch.of({' + '.join(sizes)} + 64);")
        lines.append("    char* free_ = (char*)(((__UINTPTR_TYPE__)scratch + 63) / 64 * 64);")
        for buffer in self.buffers.values():
            element = ELEMENTS[kept(buffer.dtype)]
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
        if all(map(self._is_done, items_in(loop.body))):
            return
        folds = [item for item in folds_of(loop) if folded_axis(item) == loop.axis]
        if self._is_held(loop, folds):
            self._held(loop, folds)
            return
        for item in folds:
            if item.value.name not in self.tree.into:
                self._begin(item, loop)
        c = self._c(loop.axis)
        at = self.names.fresh(f"at_{c}")
        if self._is_vector(loop):
            copies = UNROLLED if folds else 1
            accumulators = [i for i in folds if self._accumulates_here(i, loop)]
            self.emit(f"i64 {at} = 0;")
            if copies > 1:
                far = self.names.fresh("far")
                self.emit(f"const i64 {far} = length_{c} / ({copies} * LANES) * LANES;")
                sums = [item for item in accumulators if self._is_sum(item)]
                with self.block(f"while ({at} < {far})") if sums else nullcontext():
                    until = self.names.fresh("until") if sums else far
                    if sums:
                        self.emit(f"const i64 {until} = least({far}, {at} + {STRETCH} * LANES);")
                    with self.block(f"for (; {at} < {until}; {at} += LANES)"):
                        for copy in range(copies):
                            with (
                                self.block(),
                                self._inside(Open(loop.axis, f"({at} + {copy} * {far})", True)),
                            ):
                                self.part = copy
                                self._copy(accumulators, copy)
                                self._vectors(loop)
                    self.part = None
                    if sums:
                        with self.block(f"if ({at} < {far})"):
                            self._add_to_totals(sums)
                self.emit(f"{at} = {copies} * {far};")
            elif (first := self._first_whole(loop.body, loop.axis)) is not None:
                head = self.names.fresh("head")
                self.emit(f"const i64 {head} = least({first}, length_{c});")
                with self.block(f"if ({head})"), self._inside(Open(loop.axis, "0", True, head)):
                    self._vectors(loop)
                self.emit(f"{at} = {head};")
            with (
                self.block(f"for (; {at} + LANES <= length_{c}; {at} += LANES)"),
                self._inside(Open(loop.axis, at, True)),
            ):
                self._copy(accumulators, 0)
                self._vectors(loop)
            left = self.names.fresh("left")
            with self.block(f"if ({at} < length_{c})"):
                self.emit(f"const i64 {left} = length_{c} - {at};")
                with self._inside(Open(loop.axis, at, True, left)):
                    self._copy(accumulators, 0)
                    self._vectors(loop)
        elif self._is_jammed(loop, folds):
            self.emit(f"i64 {at} = 0;")
            with self.block(f"for (; {at} + {JAMMED} <= length_{c}; {at} += {JAMMED})"):
                self.jammed = [Open(loop.axis, f"({at} + {k})") for k in range(JAMMED)]
                self._body(loop.body)
                self.jammed = ()
            with self.block(f"for (; {at} < length_{c}; {at}++)"), self._inside(Open(loop.axis, at)):
                self._body(loop.body)
        else:
            with (
                self.block(f"for (i64 {at} = 0; {at} < length_{c}; {at}++)"),
                self._inside(Open(loop.axis, at)),
            ):
                self._body(loop.body)
        for item in folds:
            self._end(item, loop)

    def _is_jammed(self, loop: Loop, folds: Sequence[Define]) -> bool:
        """Whether a loop folds into sums in memory, by vectors of another axis alone: then some of its positions are taken at
        once, so that the sums stay in registers meanwhile."""
        return len(loop.body) == 1 and self._folds_across(loop, folds)

    def _folds_across(self, loop: Loop, folds: Sequence[Define]) -> bool:
        """Whether all that a loop folds is folded by the loop that ends its body, of vectors of another axis."""
        inner = loop.body[-1]
        return (
            bool(folds)
            and isinstance(inner, Loop)
            and self._is_vector(inner)
            and not any(folded_axis(item) == inner.axis for item in folds_of(inner))
        )

    def _is_held(self, loop: Loop, folds: Sequence[Define]) -> bool:
        """Whether a loop folds so that its sums may be in registers all along: what its vectors are made of is in tiles, for a
        tensor is rather read row by row, and beside it there are only numbers."""
        if not self._folds_across(loop, folds):
            return False
        *before, inner = loop.body
        assert isinstance(inner, Loop)
        plain = all(
            isinstance(leaf, Leaf)
            and isinstance(leaf.item, Define)
            and leaf.item not in folds
            and leaf.item.value.name not in self.tree.memory
            for leaf in before
        )
        return plain and not any(
            isinstance(leaf, Leaf)
            and isinstance(leaf.item, Define)
            and isinstance(leaf.item.op, ir.LoadTile)
            and inner.axis in leaf.item.value.dims
            for leaf in inner.body
        )

    def _held(self, loop: Loop, folds: Sequence[Define]) -> None:
        """A loop that folds, by vectors of another axis: that axis outside, several of its vectors at once, whose sums are in
        registers all along."""
        inner = loop.body[-1]
        assert isinstance(inner, Loop)
        c, around, at = self._c(inner.axis), self._c(loop.axis), self.names.fresh(f"at_{self._c(inner.axis)}")
        several = max(1, HELD // sum(len(self._states(item)) for item in folds))
        self.emit(f"i64 {at} = 0;")
        for count in dict.fromkeys((several, max(1, several // 2), 1)):
            with self.block(f"for (; {at} + {count} * LANES <= length_{c}; {at} += {count} * LANES)"):
                places = [Open(inner.axis, f"({at} + {k} * LANES)", True) for k in range(count)]
                self._held_vectors(loop, inner, folds, places, around)
        left = self.names.fresh("left")
        with self.block(f"if ({at} < length_{c})"):
            self.emit(f"const i64 {left} = length_{c} - {at};")
            self._held_vectors(loop, inner, folds, [Open(inner.axis, at, True, left)], around)

    def _held_vectors(
        self, loop: Loop, inner: Loop, folds: Sequence[Define], places: Sequence[Open], around: str
    ) -> None:
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
        at = self.names.fresh(f"at_{around}")
        with (
            self.block(f"for (i64 {at} = 0; {at} < length_{around}; {at}++)"),
            self._inside(Open(loop.axis, at)),
        ):
            self._body(loop.body[:-1])
            for k, place in enumerate(places):
                with self.block(), self._inside(place):
                    for name, _, _ in states:
                        self.bind(f"held {name}", held[name][k], True)
                    self._body(inner.body)
        for item in folds:
            for name in self._states(item):
                buffer = self._accumulating(name, item)
                for k, place in enumerate(places):
                    with self._inside(place):
                        self._put(kept(buffer.dtype), *self._address(buffer), held[name][k], True)

    def _vectors(self, loop: Loop) -> None:
        """The body of a loop of vectors, for each position of a loop around it that is taken at once with others."""
        if not self.jammed:
            self._body(loop.body)
            return
        vector = self.loops.pop()
        for around in self.jammed:
            with self.block(), self._inside(around), self._inside(vector):
                self._body(loop.body)
        self.loops.append(vector)

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
        if self._is_done(item):
            return
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
