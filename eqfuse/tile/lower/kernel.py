"""One kernel of the loop nest as tiles: statements, and loops cut into parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from eqfuse.loops import nodes as loops
from eqfuse.loops.blocks import Block
from eqfuse.loops.dominance import Parted, of_rows, parted
from eqfuse.loops.guards import needed
from eqfuse.loops.walk import expressions
from eqfuse.terms.nodes import Call, Const, Expr, Local, Program, Reduce, Size, call, children, walk
from eqfuse.tile.check import TileError
from eqfuse.tile.lower.builder import Binding, Builder
from eqfuse.tile.lower.dot import DotRules
from eqfuse.tile.lower.expressions import Expressions
from eqfuse.tile.lower.ranges import Partition, Segment
from eqfuse.tile.lower.reads import Reads
from eqfuse.tile.lower.types import Type, Types
from eqfuse.tile.nodes import Carried, Kernel, Store, Value
from eqfuse.tile.walk import pruned


class KernelLowering:
    """Lowers one kernel. `blocks` are those of every axis that it mentions, in the order that dims get;
    `tensors` and `scalars` are dtypes; `domains` maps a renamed axis to the one whose extent it has; `elements` has the
    conditions under which the program reads an element that may be outside of its tensor."""

    def __init__(
        self,
        kernel: loops.Kernel,
        blocks: Mapping[str, Block],
        domains: Mapping[str, str],
        tensors: Mapping[str, str],
        scalars: Mapping[str, str],
        accumulate: str,
        dots: DotRules,
        elements: Reads,
        program: Program,
    ) -> None:
        self._kernel = kernel
        self._program = program
        self._domains = domains
        self._tensors = tensors
        self._aligned: set[str] = set()
        self._sums: dict[str, tuple[Value, Expr]] = {}
        self._totals: dict[str, Value] = {}
        self._build = Builder(blocks, domains, {*tensors, *scalars, *blocks}, accumulate)
        self._types = Types(
            blocks, tensors, scalars, accumulate, self._named, self._aligned, self._build.is_tile
        )
        reads = _reads(kernel)
        self._expressions = Expressions(
            self._build, self._types, reads, self._loop, dots, needed(kernel), elements, kernel.ascending
        )

    def run(self) -> Kernel:
        self._body(self._kernel.body)
        blocks = self._build.blocks.values()
        grid = [block for block in blocks if block.kind == "grid"]
        tiles = [block.axis for block in grid if block.size != 1]
        points = [block.axis for block in reversed(grid) if block.size == 1]
        body = pruned(tuple(self._build.scopes[0].body))
        return Kernel(self._kernel.name, (*tiles, *points), tuple(blocks), body, library=self._kernel.library)

    # Statements ---------------------------------------------------------------------------------

    def _body(self, body: Sequence[loops.Stmt]) -> None:
        for stmt in body:
            match stmt:
                case loops.Let(name, _, expr):
                    self._let(name, expr)
                case loops.Loop():
                    self._loop(stmt)
                case loops.Store():
                    self._store(stmt)

    def _let(self, name: str, expr: Expr) -> None:
        closed = [
            axis
            for axis in self._build.ordered(self._expressions.free(expr))
            if not self._build.is_open(axis)
        ]
        if name in self._sums and not closed:
            build, (seen, rest) = self._build, self._sums[name]
            more = build.cast(self._expressions.value(rest), seen.dtype)
            self._totals[name] = total = build.reconciled("add", (seen, more), seen.dtype, _readable(name))
            build.bind(name, Binding(build.cast(total, build.accumulate), None))
            return
        for axis in closed:
            expr = self._expressions.closed(expr, axis)
        self._build.bind(
            name, Binding(None if closed else self._expressions.named(name, expr, _readable(name)), expr)
        )

    def _store(self, stmt: loops.Store) -> None:
        build = self._build
        mentioned = frozenset[str]().union(*map(self._expressions.free, (*stmt.index, stmt.expr)))
        for axis in build.ordered(mentioned):
            if not build.is_open(axis):
                inner = replace(stmt, expr=self._expressions.closed(stmt.expr, axis))
                unit = build.blocks[axis].kind == "unit"
                self._loop(loops.Loop(axis, Const(0), Size(axis), unit, (), (inner,)))
                return
        index = tuple(self._expressions.index(expr) for expr in stmt.index)
        dims = build.ordered(axis for value in index for axis in value.dims)
        value = build.cast(
            self._expressions.value(stmt.expr, f"{stmt.tensor}_tile"), self._tensors[stmt.tensor]
        )
        if not set(value.dims) <= set(dims):
            raise TileError(f"the store to {stmt.tensor!r} does not say where positions of {value.dims} go")
        build.store(Store(stmt.tensor, index, build.align(value, dims), self._expressions.mask(dims)))

    def _loop(self, loop: loops.Loop) -> None:
        """A loop of the nest, as one `For` per part of its range; carried values are bound after it."""
        build, block = self._build, self._build.blocks[loop.axis]
        whole_range = (
            loop.start is Const(0)
            and isinstance(loop.stop, Size)
            and self._same_extent(loop.stop.axis, loop.axis)
        )
        if block.kind == "grid" or (block.kind == "whole" and not whole_range):
            raise TileError(
                f"axis {loop.axis!r} of kernel {self._kernel.name!r} has a {block.kind} block but is looped over"
            )
        if block.kind == "whole":
            self._in_one_block(loop)
            return
        with self._walked(loop):
            types = self._types.carried(loop)
            state = {}
            summed = _long_sums(loop) if self._build.accumulate == "f32" else {}
            for item in loop.carried:
                dims, dtype = types[item.name]
                if item.name in summed and dtype == "f32":
                    dtype = "f64"
                init = build.cast(self._expressions.value(item.init, f"{_readable(item.name)}_init"), dtype)
                state[item.name] = build.align(init, build.ordered(dims))
            parts: Parted | None = None
            if block.kind == "unit":
                start, stop = (
                    build.cast(self._expressions.value(bound), "i32") for bound in (loop.start, loop.stop)
                )
                segments: tuple[Segment, ...] = (Segment(start, stop, False, loop.body),)
            else:
                parts = parted(loop, self._program, self._kernel.ascending)
                if parts is None:
                    partition = self._partition(loop)
                else:
                    partition = self._partition(parts.seen, parts.predicate, parts.masked)
                segments = partition.segments()
                if partition.at_multiples is not None:
                    self._aligned.discard(loop.axis)
                if partition.at_multiples:
                    self._aligned.add(loop.axis)
            for segment in segments:
                state = self._segment(loop, segment, state)
            if parts is not None:
                for name, value in state.items():
                    build.bind(name, Binding(value, None))
                self._aligned.discard(loop.axis)
                state = self._rest(loop, parts, state)
        for name, value in state.items():
            self._build.bind(name, Binding(value, None))

    def _rest(self, loop: loops.Loop, parts: Parted, state: Mapping[str, Value]) -> dict[str, Value]:
        """What a mask puts a number at, where some row needs it: rows of which the mask leaves nothing, and others."""
        build, expressions = self._build, self._expressions
        partition = self._partition(parts.rest, parts.predicate, not parts.masked)
        needed = call("not", parts.condition)
        some = expressions.anywhere(needed)
        is_left = call("not", parts.predicate) if parts.masked else parts.predicate
        look = partition.rare(some)
        build.open(loop.axis, look.stop, look.masked, rare=True)
        seen = build.carry("seen", (), "i32")
        here = build.cast(expressions.anywhere(call("and", needed, is_left)), "i32")
        carried = Carried(
            seen, build.constant(0, "i32"), build.elementwise("maximum", (seen, here), "seen_new")
        )
        build.close(look.start, [carried])
        mixed = build.truth(seen)
        alone = build.elementwise("and", (some, build.elementwise("not", (mixed,), "unmixed")), "alone")
        rows = of_rows(loop, parts, needed)
        state = self._segment(rows, partition.rare(alone, rows.body), state)
        for name, value in state.items():
            build.bind(name, Binding(value, None))
        return self._segment(loop, partition.rare(mixed), state)

    def _partition(self, loop: loops.Loop, predicate: Expr | None = None, value: bool = False) -> Partition:
        """Cuts a loop, whose tiles a truth value of a predicate empties."""
        emptied = {} if predicate is None else {predicate: value}
        return Partition(self._build, self._types, self._expressions, loop, self._kernel, emptied)

    def _same_extent(self, left: str, right: str) -> bool:
        return self._domains.get(left, left) == self._domains.get(right, right)

    @contextmanager
    def _walked(self, loop: loops.Loop) -> Iterator[None]:
        """Notes, while the loop is lowered, whether its blocks start at multiples of their size."""
        size = self._build.blocks[loop.axis].size
        aligned = isinstance(loop.start, Const) and size is not None and loop.start.value % size == 0
        if aligned:
            self._aligned.add(loop.axis)
        yield
        self._aligned.discard(loop.axis)

    def _segment(self, loop: loops.Loop, segment: Segment, state: Mapping[str, Value]) -> dict[str, Value]:
        build = self._build
        build.open(loop.axis, segment.stop, segment.masked, rare=segment.rare)
        inside = {name: build.carry(_readable(name), init.dims, init.dtype) for name, init in state.items()}
        for name, value in inside.items():
            self._build.bind(name, Binding(value, None))
        for item in loop.carried if self._build.accumulate == "f32" else ():
            if inside[item.name].dtype == "f64":
                self._sums[item.next] = inside[item.name], _long_sums(loop)[item.name]
                rounded = self._build.cast(inside[item.name], "f32")
                self._build.bind(item.name, Binding(rounded, None))
        with self._expressions.proving(segment.proven):
            self._body(segment.body)
        carried = []
        for item in loop.carried:
            value = inside[item.name]
            new = self._totals.pop(item.next, self._build.binding(item.next).value)
            self._sums.pop(item.next, None)
            if new is None:
                raise TileError(f"the next value of {item.name!r} is over an axis that nothing walks")
            new = build.align(build.cast(new, value.dtype), value.dims)
            carried.append(Carried(value, state[item.name], new))
        build.close(segment.start, carried)
        return inside

    def _in_one_block(self, loop: loops.Loop) -> None:
        """A loop whose axis is kept whole: its body, once."""
        for item in loop.carried:
            self._build.bind(item.name, Binding(self._expressions.value(item.init), item.init))
        self._body(loop.body)
        for item in loop.carried:
            self._build.bind(item.name, self._build.binding(item.next))

    def _named(self, name: str) -> Type:
        binding = self._build.binding(name)
        if binding.value is not None:
            return frozenset(binding.value.dims), binding.value.dtype
        assert binding.expr is not None
        return self._types.of(binding.expr)


def _long_sums(loop: loops.Loop) -> dict[str, Expr]:
    """The states of a loop that are sums of as many terms as there are positions, one after the other, whose parts are stored: each
    is kept in f64, as torch does on a CPU; and the terms. A tile to which each position adds a fold is not: its terms are products of
    matrices, as few as those of a loop over tiles."""
    if not loop.unit or not any(isinstance(stmt, loops.Store) for stmt in loop.body):
        return {}
    found: dict[str, Expr] = {}
    following = {item.next: item.name for item in loop.carried}
    lets = {stmt.name: stmt.expr for stmt in loop.body if isinstance(stmt, loops.Let)}
    for stmt in loop.body:
        match stmt:
            case loops.Let(name, dims, Call("add", (Local(state, _), rest))) if following.get(name) == state:
                term = rest
                while isinstance(term, Local) and term.name in lets:
                    term = lets[term.name]
                if not dims or not any(isinstance(node, Reduce) for node in walk(term)):
                    found[state] = rest
    return found


def _reads(kernel: loops.Kernel) -> Counter[str]:
    """How many places read each named value."""
    roots = list(expressions(kernel.body))
    places = [*roots, *(child for node in walk(*roots) for child in children(node))]
    return Counter(node.name for node in places if isinstance(node, Local))


def _readable(name: str) -> str:
    """A name of the nest without the number that keeps it apart from others."""
    return name.split("%")[0]
