"""Loop ranges cut by the regions of the predicates of `where`.

Where a predicate is false for every position of a tile and the update is then the identity, the
tile is not visited. Where it is true for every position, the body carries no predicate, and where
the blocks are complete it carries no bound either. So one loop becomes up to three:

    for j in start..stop            for j in low..full_low          masked
        body                  ->    for j in full_low..full_high    every block complete, predicate true
                                    for j in full_high..high        masked

Where a mask puts a number, the loop comes in two parts (loops/dominance.py). The first is cut as any other; the second is
walked where its condition does not hold for some position of the other axes, once, with its predicates:

                                    for j in where(some, low, high)..high       masked, rare

Rows that the number counts in mostly have nothing else: what they add up is then the same at all positions, and comes out of
products. So that is walked twice: first to see whether such a row has anything else.

Blocks are counted from the start of the range, or, where `low` is data, from there: nothing before it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.identity import predicates, vanishes
from eqfuse.loops.nodes import Kernel, Let, Loop, Stmt, Store
from eqfuse.terms.assume import folded
from eqfuse.terms.nodes import Axis, Call, Const, Expr, free_axes, walk
from eqfuse.tile.lower.builder import Builder
from eqfuse.tile.lower.expressions import Expressions
from eqfuse.tile.lower.regions import EVERYWHERE, Region, Regions
from eqfuse.tile.lower.types import Types
from eqfuse.tile.nodes import Value


@dataclass(frozen=True)
class Segment:
    """Part of a loop's range, and the body that it needs, in which the predicates that are `proven` there have their
    truth values. See `nodes.For` for `masked` and `rare`."""

    start: Value
    stop: Value
    masked: bool
    body: tuple[Stmt, ...]
    proven: Mapping[Expr, bool] = field(default_factory=dict)
    rare: bool = False


class Partition:
    """Cuts one loop."""

    def __init__(
        self,
        build: Builder,
        types: Types,
        expressions: Expressions,
        loop: Loop,
        kernel: Kernel,
        emptied: Mapping[Expr, bool] | None = None,
    ) -> None:
        """`emptied` are truth values of predicates that are known to empty a tile."""
        self._emptied = emptied or {}
        self._build = build
        self._types = types
        self._expressions = expressions
        self._loop = loop
        self._regions = Regions(build, types, expressions, loop.axis, _names_inside(loop), kernel)
        self.at_multiples: bool | None = None
        """Whether blocks start at multiples of their size; None where the loop's start tells."""

    def segments(self) -> tuple[Segment, ...]:
        """The parts of the range, in order; empty ones are found at run time."""
        build, axis = self._build, self._loop.axis
        block = build.block_size(axis)
        start, stop = (self._expressions.value(bound) for bound in (self._loop.start, self._loop.stop))
        region = self._region()
        if self._loop.shard is not None and region.is_data:
            start, stop = self._part(region, self._loop.shard)
            self.at_multiples = region.low is None
        starts_there = region.low_is_data and not self._divides_blocks()
        if region.low is None:
            low = start
        elif starts_there:
            self.at_multiples = False
            low = build.integer("maximum", start, region.low, f"{axis}_low")
        else:
            low = self._block_down(start, region.low, block)
        high = stop if region.high is None else build.integer("minimum", stop, region.high, f"{axis}_high")
        exact = region.low is None or starts_there
        whole = exact and (region.low, region.high) == (region.full_low, region.full_high)
        full_low = low
        if region.full_low is not None and not (exact and region.full_low == region.low):
            full_low = self._block_up(low, region.full_low, block)
        limit = high if region.full_high is None else build.integer("minimum", high, region.full_high)
        full_high = self._block_down(full_low, limit, block)
        body, inside = self._loop.body, tuple(_folded(stmt, region.proven) for stmt in self._loop.body)
        interior = Segment(full_low, full_high, False, inside, region.proven)
        # Where every row has the same range, its end is all that the last block needs.
        tail = (
            replace(interior, start=full_high, stop=high, masked=True)
            if whole
            else Segment(full_high, high, True, body)
        )
        if full_low is low:
            return interior, tail
        return Segment(low, build.integer("minimum", full_low, high), True, body), interior, tail

    def rare(self, walked: Value, body: tuple[Stmt, ...] = ()) -> Segment:
        """The whole range, walked where a scalar says so, with a body of its own where it has one."""
        build = self._build
        start, stop = (self._expressions.value(bound) for bound in (self._loop.start, self._loop.stop))
        region = self._region()
        low = start if region.low is None else build.integer("maximum", start, region.low)
        high = stop if region.high is None else build.integer("minimum", stop, region.high)
        first = build.elementwise("where", (walked, low, high), f"{self._loop.axis}_rest")
        return Segment(first, high, True, body or self._loop.body, rare=True)

    def _part(self, region: Region, shard: str) -> tuple[Value, Value]:
        """What a shard takes of the positions that data leaves to visit: whole blocks, the same number for every
        shard. Of an equal part of the whole axis most would have nothing to do in a short row."""
        build, axis = self._build, self._loop.axis
        zero = build.constant(0, "i32")
        low, high, block = zero, build.extent(axis), build.block_size(axis)
        if region.low is not None:
            low = build.integer("maximum", low, region.low, f"{axis}_first")
        if region.high is not None:
            high = build.integer("minimum", high, region.high, f"{axis}_last")
        positions = build.integer("maximum", build.integer("sub", high, low), zero)
        number, count = build.start(shard), build.extent(shard)
        if self._loop.part is not None:
            number, count = (build.cast(self._expressions.value(each), "i32") for each in self._loop.part)
        blocks = self._quotient_up(self._quotient_up(positions, block), count)
        part = build.integer("mul", blocks, block, f"{axis}_part")
        start = build.integer("add", low, build.integer("mul", number, part), f"{axis}_start")
        stop = build.integer("minimum", high, build.integer("add", start, part), f"{axis}_stop")
        return start, stop

    def _quotient_up(self, value: Value, by: Value) -> Value:
        build = self._build
        last = build.integer("sub", by, build.constant(1, "i32"))
        return build.integer("floordiv", build.integer("add", value, last), by)

    def _divides_blocks(self) -> bool:
        """Whether the body has quotients of positions that are one number for a block that starts at a multiple of
        its size."""
        axis = Axis(self._loop.axis)
        for node in walk(*(stmt.expr for stmt in self._loop.body if not isinstance(stmt, Loop))):
            match node:
                case Call("floordiv" | "mod", (part, Const(int(divisor)))) if part is axis:
                    if self._types.is_uniform(axis, divisor):
                        return True
        return False

    def _block_down(self, start: Value, position: Value, block: Value) -> Value:
        """Start of the block that holds `position`, with blocks from `start` on; not before `start`."""
        build, axis = self._build, self._loop.axis
        zero = build.constant(0, "i32")
        offset = build.integer("maximum", build.integer("sub", position, start), zero)
        blocks = build.integer("floordiv", offset, block)
        return build.integer("add", start, build.integer("mul", blocks, block), f"{axis}_cut")

    def _block_up(self, start: Value, position: Value, block: Value) -> Value:
        """Start of the first block whose positions are all at least `position`."""
        last = self._build.integer("sub", block, self._build.constant(1, "i32"))
        return self._block_down(start, self._build.integer("add", position, last), block)

    def _region(self) -> Region:
        """What the predicates that empty a tile leave to visit."""
        found: Region | None = None
        for predicate, guards in predicates(self._loop).items():
            if self._loop.axis not in free_axes(predicate):
                continue
            for wanted in (True, False):
                if self._emptied.get(predicate) is (not wanted) or vanishes(
                    self._loop, predicate, not wanted
                ):
                    found = self._regions.both(found, self._regions.of(predicate, wanted, guards))
        return found or EVERYWHERE


def _names_inside(loop: Loop) -> frozenset[str]:
    names = {item.name for item in loop.carried}
    for stmt in loop.body:
        match stmt:
            case Let(name, _, _):
                names.add(name)
            case Loop():
                names |= _names_inside(stmt)
    return frozenset(names)


def _folded(stmt: Stmt, proven: Mapping[Expr, bool]) -> Stmt:
    match stmt:
        case Let() | Store():
            return replace(stmt, expr=folded(stmt.expr, proven))
        case Loop():
            return replace(stmt, body=tuple(_folded(inner, proven) for inner in stmt.body))
