"""Loop ranges cut by interval analysis of the predicates of `where`.

Where a predicate is false for every position of a tile and the update is then the identity, the
tile is not visited. Where it is true for every position, the body carries no predicate, and where
the blocks are complete it carries no bound either. So one loop becomes up to three:

    for j in start..stop            for j in low..full_low          masked
        body                  ->    for j in full_low..full_high    every block complete, predicate true
                                    for j in full_high..high        masked

A predicate is cut by if it is built with `and`, `or` and `not` from comparisons in which the loop's
axis has the coefficient +-1 and the rest is an integer with a known interval over the blocks that
are open (positions of grid axes, extents, run-time scalars, sums, quotients, minima of those).
Nothing here knows what the predicate is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from eqfuse.loops.identity import predicates, vanishes
from eqfuse.loops.nodes import Let, Loop, Stmt, Store
from eqfuse.terms.assume import folded
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Local, Reduce, Size, walk
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.lower.builder import Builder
from eqfuse.tile.lower.types import Types
from eqfuse.tile.nodes import Value


@dataclass(frozen=True)
class Segment:
    """Part of a loop's range, and the body that it needs. See `nodes.For` for `masked`."""

    start: Value
    stop: Value
    masked: bool
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Region:
    """Positions of the loop's axis where a predicate may be true, [low, high), and where it is true
    for every position of the other axes, [full_low, full_high). None is unbounded. `proven` are the
    truth values of its parts in the latter."""

    low: Value | None
    high: Value | None
    full_low: Value | None
    full_high: Value | None
    proven: Mapping[Expr, bool]


class Partition:
    """Cuts one loop. `value` gives the value of an expression that is invariant in it."""

    def __init__(self, build: Builder, types: Types, value: Callable[[Expr], Value], loop: Loop) -> None:
        self._build = build
        self._types = types
        self._value = value
        self._loop = loop
        self._local = _names_inside(loop)

    def segments(self) -> tuple[Segment, ...]:
        """The parts of the range, in order; empty ones are found at run time."""
        build, axis = self._build, self._loop.axis
        block = build.block_size(axis)
        start, stop = self._value(self._loop.start), self._value(self._loop.stop)
        region = self._region()
        low = start if region.low is None else self._block_down(start, region.low, block)
        high = stop if region.high is None else build.integer("minimum", stop, region.high, f"{axis}_high")
        full_low = low if region.full_low is None else self._block_up(low, region.full_low, block)
        limit = high if region.full_high is None else build.integer("minimum", high, region.full_high)
        full_high = self._block_down(full_low, limit, block)
        inside = tuple(_folded(stmt, region.proven) for stmt in self._loop.body)
        head = Segment(low, build.integer("minimum", full_low, high), True, self._loop.body)
        rest = (
            Segment(full_low, full_high, False, inside),
            Segment(full_high, high, True, self._loop.body),
        )
        return rest if region.full_low is None else (head, *rest)

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
        for predicate in predicates(self._loop):
            if self._loop.axis not in _axes(predicate):
                continue
            for wanted in (True, False):
                if vanishes(self._loop, predicate, not wanted):
                    found = self._both(found, self._where(predicate, wanted))
        return found or Region(None, None, None, None, {})

    def _where(self, predicate: Expr, wanted: bool) -> Region | None:
        """Where `predicate` has the truth value `wanted`; None where nothing is known about that."""
        match predicate:
            case Call("not", (part,)):
                return self._where(part, not wanted)
            case Call("and" | "or" as fn, (left, right)):
                regions = self._where(left, wanted), self._where(right, wanted)
                return (
                    self._both(*regions)
                    if (fn == "and") == wanted
                    else self._either(predicate, wanted, *regions)
                )
            case Call("lt" | "le" | "gt" | "ge" as fn, (left, right)):
                return self._compared(predicate, wanted, fn if wanted else _NEGATED[fn], left, right)
            case _:
                return None

    def _both(self, left: Region | None, right: Region | None) -> Region | None:
        if left is None or right is None:
            return left or right
        return Region(
            self._pick("maximum", left.low, right.low),
            self._pick("minimum", left.high, right.high),
            self._pick("maximum", left.full_low, right.full_low),
            self._pick("minimum", left.full_high, right.full_high),
            {**left.proven, **right.proven},
        )

    def _either(self, whole: Expr, wanted: bool, left: Region | None, right: Region | None) -> Region | None:
        """Where one of two predicates holds: the hull of where they may, and where one certainly does."""
        proven = {whole: wanted}
        if left is None or right is None:
            known = left or right
            return known and replace(known, low=None, high=None, proven=proven)
        hull = Region(
            None if left.low is None or right.low is None else self._pick("minimum", left.low, right.low),
            None if left.high is None or right.high is None else self._pick("maximum", left.high, right.high),
            left.full_low,
            left.full_high,
            proven,
        )
        if left.full_low is None and right.full_low is None:
            either = (
                None if right.full_high is None else self._pick("maximum", left.full_high, right.full_high)
            )
            return replace(hull, full_high=None if left.full_high is None else either)
        if left.full_high is None and right.full_high is None:
            either = None if right.full_low is None else self._pick("minimum", left.full_low, right.full_low)
            return replace(hull, full_low=None if left.full_low is None else either)
        return hull

    def _pick(self, fn: str, left: Value | None, right: Value | None) -> Value | None:
        if left is None or right is None:
            return left or right
        return self._build.integer(fn, left, right)

    def _compared(self, whole: Expr, wanted: bool, fn: str, left: Expr, right: Expr) -> Region | None:
        """The region of `left fn right`, solved for the loop's axis."""
        terms = _linear(left, 1, {})
        _linear(right, -1, terms)
        axis = Axis(self._loop.axis)
        sign = terms.pop(axis, 0)
        if sign not in (1, -1):
            return None
        # sign * j + terms <= 0 (below) or >= 0, so j <= rest or j >= rest; strict ones move by one.
        below = fn in ("lt", "le")
        rest = self._sum({term: -sign * count for term, count in terms.items()})
        if rest is None:
            return None
        least, most = rest
        one = self._build.constant(1, "i32")
        strict = fn in ("lt", "gt")
        proven = {whole: wanted}
        if below == (sign == 1):  # j <= rest
            if not strict:
                least, most = (self._build.integer("add", bound, one) for bound in (least, most))
            return Region(None, most, None, least, proven)
        if strict:  # j > rest
            least, most = (self._build.integer("add", bound, one) for bound in (least, most))
        return Region(least, None, most, None, proven)

    def _sum(self, terms: Mapping[Expr, int]) -> tuple[Value, Value] | None:
        """The interval of a linear combination over the blocks that are open."""
        least = most = self._build.constant(0, "i32")
        for term, count in terms.items():
            if count == 0:
                continue
            found = self._interval(term)
            if found is None:
                return None
            least, most = self._add(least, found[count < 0], count), self._add(most, found[count > 0], count)
        return least, most

    def _add(self, total: Value, value: Value, count: int) -> Value:
        build = self._build
        if abs(count) != 1:
            value = build.integer("mul", value, build.constant(abs(count), "i32"))
        return build.integer("add" if count > 0 else "sub", total, value)

    def _interval(self, expr: Expr) -> tuple[Value, Value] | None:
        """Least and greatest value of an integer expression over the open blocks; None if unknown."""
        build, types = self._build, self._types
        if any(isinstance(node, Local) and node.name in self._local for node in walk(expr)):
            return None
        if self._loop.axis in _axes(expr) or not all(map(build.is_open, _axes(expr))):
            return None
        dims, dtype = types.of(expr)
        if dtype not in INTEGERS or dtype == "bool":
            return None
        if not dims:
            exact = build.cast(self._value(expr), "i32")
            return exact, exact
        match expr:
            case Axis(name):
                first = build.start(name)
                whole = build.blocks[name].kind == "whole"
                count = build.extent(name) if whole else build.block_size(name)
                last = build.integer("sub", build.integer("add", first, count), build.constant(1, "i32"))
                return (build.constant(0, "i32"), last) if whole else (first, last)
            case Call("add" | "sub" | "neg" | "mul", _):
                terms = _linear(expr, 1, {})
                return None if expr in terms else self._sum(terms)
            case Call("floordiv", (part, divisor)) if _is_positive(divisor):
                found, by = self._interval(part), self._value(divisor)
                return found and (
                    build.integer("floordiv", found[0], by),
                    build.integer("floordiv", found[1], by),
                )
            case Call("mod", (_, divisor)) if _is_positive(divisor):
                last = build.integer("sub", self._value(divisor), build.constant(1, "i32"))
                return build.constant(0, "i32"), last
            case Call("maximum" | "minimum" as fn, (left, right)):
                a, b = self._interval(left), self._interval(right)
                return a and b and (build.integer(fn, a[0], b[0]), build.integer(fn, a[1], b[1]))
            case _:
                return None


_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


def _linear(expr: Expr, factor: int, terms: dict[Expr, int]) -> dict[Expr, int]:
    """Adds `factor * expr` to `terms`, a linear combination of integer expressions."""
    match expr:
        case Call("add", (left, right)):
            _linear(left, factor, terms)
            _linear(right, factor, terms)
        case Call("sub", (left, right)):
            _linear(left, factor, terms)
            _linear(right, -factor, terms)
        case Call("neg", (part,)):
            _linear(part, -factor, terms)
        case Call("mul", (Const(int(number)), part)) | Call("mul", (part, Const(int(number)))):
            _linear(part, factor * number, terms)
        case Const(int(number)):
            terms[Const(1)] = terms.get(Const(1), 0) + factor * number
        case _:
            terms[expr] = terms.get(expr, 0) + factor
    return terms


def _is_positive(expr: Expr) -> bool:
    return isinstance(expr, Size) or (
        isinstance(expr, Const) and isinstance(expr.value, int) and expr.value > 0
    )


def _axes(expr: Expr) -> set[str]:
    """Every axis that `expr` mentions, bound or free."""
    return {
        node.name if isinstance(node, Axis) else node.axis
        for node in walk(expr)
        if isinstance(node, (Axis, Reduce))
    }


def _names_inside(loop: Loop) -> set[str]:
    names = {item.name for item in loop.carried}
    for stmt in loop.body:
        match stmt:
            case Let(name, _, _):
                names.add(name)
            case Loop():
                names |= _names_inside(stmt)
    return names


def _folded(stmt: Stmt, proven: Mapping[Expr, bool]) -> Stmt:
    match stmt:
        case Let() | Store():
            return replace(stmt, expr=folded(stmt.expr, proven))
        case Loop():
            return replace(stmt, body=tuple(_folded(inner, proven) for inner in stmt.body))
