"""How long the rows of a loop are, as the conditions say that empty its tiles: an estimate in terms of sizes and data.

Of `j < len[b]` a row ends at `len[b]`, of `(off[s] <= j) & (j < off[s+1])` it goes from `off[s]` to `off[s+1]`. Comparisons are solved
for the loop's position as tile/lower/regions.py does; here the result is an expression, and nothing is wrong where one is not
understood. Positions of other axes are taken to be those at which the range is the widest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce

from eqfuse.loops.identity import predicates, vanishes
from eqfuse.loops.nodes import Kernel, Loop
from eqfuse.loops.plan import Range
from eqfuse.loops.walk import loops_in
from eqfuse.terms.assume import conjuncts
from eqfuse.terms.intervals import MIRRORED, NEGATED
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Reduce,
    Scalar,
    Size,
    call,
    free_axes,
    walk,
)
from eqfuse.terms.ranges import difference


@lru_cache(256)
def row_range(kernel: Kernel, axis: str) -> Range | None:
    """What data at positions of parallel axes leaves to visit of an axis that the kernel loops over; None where no data does."""
    loops = [loop for loop in loops_in(kernel.body) if loop.axis == axis]
    if len(loops) != 1:
        return None
    parts = [part for part in _parts(loops[0]) if _has_data(part)]
    rows = frozenset[str]().union(*map(_data_axes, parts)) - {axis}
    if not rows or not rows <= set(kernel.parallel):
        return None
    starts: list[Expr] = []
    stops: list[Expr] = []
    for part in parts:
        for is_stop, end in _ends(part, axis, rows):
            (stops if is_stop else starts).append(end)
    if not starts and not stops:
        return None
    start = reduce(lambda a, b: call("maximum", a, b), starts or [Const(0)])
    stop = reduce(lambda a, b: call("minimum", a, b), stops or [Size(axis)])
    axes = tuple(a for a in kernel.parallel if a in rows)
    return Range(axes, start, stop)


def _parts(loop: Loop) -> Iterator[Call]:
    """Comparisons that hold wherever the loop changes anything."""
    for predicate in predicates(loop):
        for wanted in (True, False):
            if loop.axis in free_axes(predicate) and vanishes(loop, predicate, not wanted):
                yield from (part for part in conjuncts(predicate, wanted) if isinstance(part, Call))


def _has_data(part: Expr) -> bool:
    return any(isinstance(node, Load) for node in walk(part))


def _data_axes(part: Expr) -> frozenset[str]:
    return frozenset[str]().union(*(free_axes(node) for node in walk(part) if isinstance(node, Load)))


def _ends(part: Call, axis: str, rows: frozenset[str]) -> Iterator[tuple[bool, Expr]]:
    """The ends of a range that a comparison gives, and whether they are where it stops."""
    fn, args = part.fn, part.args
    if fn == "not" and isinstance(args[0], Call) and args[0].fn in NEGATED:
        fn, args = NEGATED[args[0].fn], args[0].args
    if fn == "eq":
        for each in ("ge", "le"):
            yield from _solved(each, difference(*args).terms, axis, rows)
    elif fn in NEGATED and fn != "ne":
        yield from _solved(fn, difference(*args).terms, axis, rows)


def _solved(
    fn: str, terms: Mapping[Expr, int], axis: str, rows: frozenset[str]
) -> Iterator[tuple[bool, Expr]]:
    """The end of the positions where a linear combination is `fn` 0."""
    mine = [term for term in terms if axis in free_axes(term)]
    if len(mine) != 1:
        return
    match mine[0]:
        case Axis():
            by: Expr = Const(1)
        case Call("floordiv", (Axis(), Const(int(divisor)))) if divisor > 0:
            by = Const(divisor)
        case _:
            return
    factor = terms[mine[0]]
    fn = fn if factor > 0 else MIRRORED[fn]
    is_stop = fn in ("lt", "le")
    parts: list[Expr] = []
    for term, count in terms.items():
        count = -count if factor > 0 else count
        if term is mine[0]:
            continue
        if term is Const(1):
            parts.append(Const(count))
            continue
        value = _at_widest(term, rows, most=(count > 0) == is_stop)
        if value is None:
            return
        parts.append(value if count == 1 else call("mul", Const(count), value))
    total = reduce(lambda a, b: call("add", a, b), parts) if parts else Const(0)
    if abs(factor) != 1:
        total = call("floordiv", total, Const(abs(factor)))
    if fn in ("le", "gt"):
        total = call("add", total, Const(1))
    yield is_stop, total if by is Const(1) else call("mul", total, by)


def _at_widest(term: Expr, rows: frozenset[str], *, most: bool) -> Expr | None:
    """A term of sizes, numbers, and data of rows; the greatest or the least position of another axis."""
    if isinstance(term, Axis) and term.name not in rows:
        return call("sub", Size(term.name), Const(1)) if most else Const(0)
    if not free_axes(term) <= rows or any(isinstance(node, Local | Scalar | Reduce) for node in walk(term)):
        return None
    indices = [part for node in walk(term) if isinstance(node, Load) for part in node.index]
    return None if any(isinstance(node, Load) for node in walk(*indices)) else term
