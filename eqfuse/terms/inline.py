"""Reading a temporary at given positions: its axes replaced, bound axes renamed where they would capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eqfuse.errors import BudgetError, locate
from eqfuse.terms.folds import ranks_of
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    rebuild,
    replaced,
    walk,
)

MAX_NODES = 20_000
"""Nodes that inlining may build for one program."""

MAX_WRITTEN = 30_000
"""Operations of an output, those of a temporary counted at each reading, those inside a reduction once: what it takes
to derive and show it."""


class SizeOfComputedIndex(ValueError):
    """`N(axis)` where the axis was replaced by something that is not an axis."""

    def __init__(self, axis: str) -> None:
        self.axis = axis
        super().__init__(axis)


class Inliner:
    """Replaces free axes in expressions of one program.

    A bound axis that would capture is renamed to a fresh one (`j` to `j_1`), which `domains` then maps
    to the axis whose extent it has. The same reading gives the same expression, so sharing is kept.

    A list along an axis of ranks is whole wherever it is made: read along another axis of that extent it is the list
    along that one, read anywhere else it is summed over its ranks, all but the one that is read taken for 0. `lengths`
    are the extents that are declared.
    """

    def __init__(
        self, names: Iterable[str], domains: dict[str, str], lengths: Mapping[str, int] | None = None
    ) -> None:
        self.names = frozenset(names)
        self.domains = domains
        self.lengths = lengths or {}
        self._built = 0

    def replace(self, expr: Expr, mapping: Mapping[str, Expr]) -> Expr:
        """`expr` with free axes replaced. Raises SizeOfComputedIndex and BudgetError."""
        moved = {name: to for name, to in mapping.items() if to is not Axis(name)}
        return self._replace(expr, moved, {}) if moved else expr

    def _replace(self, expr: Expr, mapping: Mapping[str, Expr], memo: dict[object, Expr]) -> Expr:
        key = (expr, *sorted(mapping.items(), key=lambda item: item[0]))
        if key not in memo:
            self._built += 1
            if self._built > MAX_NODES:
                raise BudgetError(
                    f"the program has more than {MAX_NODES} operations once its temporaries are inlined",
                    hint="return the temporaries that are read at several places, and read them in another program",
                )
            memo[key] = self._rebuild(expr, mapping, memo)
        return memo[key]

    def _rebuild(self, expr: Expr, mapping: Mapping[str, Expr], memo: dict[object, Expr]) -> Expr:
        match expr:
            case Axis(name):
                return mapping.get(name, expr)
            case Size(axis):
                match mapping.get(axis):
                    case None:
                        return expr
                    case Axis(to):
                        return Size(to)
                    case _:
                        raise SizeOfComputedIndex(axis)
            case Call("div", (Reduce() as total, count)) if _counts(total, count, mapping):
                # a mean counts the positions of its own axes, whatever is put for ones of that name outside of it
                made = self._replace(total, mapping, memo)
                own = zip(_nested(total), _nested(made), strict=False)
                return call("div", made, replaced(count, {Size(axis): Size(to) for axis, to in own}))
            case _ if (ranks := ranks_of(expr)) is not None and not self._is_list(expr, ranks, mapping):
                return self._read_at(expr, ranks, mapping, memo)
            case Reduce(op, axis, body):
                inner = {name: to for name, to in mapping.items() if name != axis}
                free = free_axes(body)
                arriving = frozenset[str]().union(
                    *(free_axes(to) for name, to in inner.items() if name in free)
                )
                if axis in arriving:
                    fresh = self.fresh(axis, arriving | free)
                    inner[axis] = Axis(fresh)
                    axis = fresh
                return Reduce(op, axis, self._replace(body, inner, memo)) if inner else expr
            case _:
                parts = tuple([self._replace(part, mapping, memo) for part in children(expr)])
                return self._divided(rebuild(expr, parts))

    def _divided(self, expr: Expr) -> Expr:
        """`(4 * a + u) // 4` as a, and its remainder as u, where axis u has 4 positions."""
        match expr:
            case Call("floordiv" | "mod" as fn, (Call("add", (whole, Axis(axis) as rest)), Const(divisor))):
                extent = self._extent(axis)
                is_rest = isinstance(extent, int) and isinstance(divisor, int) and 0 < extent <= divisor
                match whole:
                    case Call("mul", (part, Const(factor))) | Call("mul", (Const(factor), part)):
                        if is_rest and factor == divisor:
                            return part if fn == "floordiv" else rest
        return expr

    def _is_list(self, expr: Expr, ranks: str, mapping: Mapping[str, Expr]) -> bool:
        """Whether what is read of a list is a list, along the same axis or another of its extent."""
        match mapping.get(ranks, Axis(ranks)):
            case Axis(name):
                return self._extent(name) == self._extent(ranks) and name not in self._arriving(
                    expr, ranks, mapping
                )
            case _:
                return False

    def _arriving(self, expr: Expr, ranks: str, mapping: Mapping[str, Expr]) -> frozenset[str]:
        """Axes of what replaces the free axes of a list, that of its ranks apart."""
        others = (axis for axis in free_axes(expr) if axis != ranks)
        return frozenset[str]().union(*(free_axes(mapping.get(axis, Axis(axis))) for axis in others))

    def _read_at(self, expr: Expr, ranks: str, mapping: Mapping[str, Expr], memo: dict[object, Expr]) -> Expr:
        """One position of a list."""
        place = mapping.get(ranks, Axis(ranks))
        inside = {name: to for name, to in mapping.items() if name != ranks}
        taken = self._arriving(expr, ranks, mapping) | free_axes(place)
        bound = ranks
        if ranks in taken:
            bound = self.fresh(ranks, taken | free_axes(expr))
            inside[ranks] = Axis(bound)
        found = self._replace(expr, inside, memo) if inside else expr
        return Reduce("sum", bound, call("where", call("eq", Axis(bound), place), found, Const(0)))

    def _extent(self, axis: str) -> int | str:
        """What the extent of an axis is known by: its number, or the axis that has it."""
        axis = self.domains.get(axis, axis)
        return self.lengths.get(axis, axis)

    def fresh(self, axis: str, avoid: frozenset[str]) -> str:
        """A new name for an axis of the same extent."""
        base = self.domains.get(axis, axis)
        number = 1
        while (name := f"{base}_{number}") in self.names or name in avoid:
            number += 1
        self.domains[name] = base
        return name


def _nested(total: Expr) -> tuple[str, ...]:
    """The axes of reductions that are nested in each other, the outermost first."""
    found: list[str] = []
    while isinstance(total, Reduce):
        found.append(total.axis)
        total = total.body
    return tuple(found)


def _counts(total: Reduce, count: Expr, mapping: Mapping[str, Expr]) -> bool:
    """Whether a number is made of extents of axes of a reduction alone, for some of which there are computed indices outside."""
    if not all(isinstance(node, Size | Const | Call | Scalar) for node in walk(count)):
        return False
    sizes = {node.axis for node in walk(count) if isinstance(node, Size)}
    is_computed = any(not isinstance(mapping.get(axis, Axis(axis)), Axis) for axis in sizes)
    return is_computed and sizes.issubset(_nested(total))


def check_written_size(program: Program) -> None:
    """Raises BudgetError for an output that is too long once every temporary is written out where it is read."""
    sizes: dict[Expr, int] = {}
    for output in program.outputs:
        inside = 0
        for node in walk(output.expr):
            sizes[node] = 1 + sum(1 if isinstance(c, Reduce) else sizes[c] for c in children(node))
            inside += sizes[node] if isinstance(node, Reduce) else 0
        if sizes[output.expr] + inside > MAX_WRITTEN:
            raise BudgetError(
                f"{output.name!r} has more than {MAX_WRITTEN} operations once its temporaries are written out",
                source=program.source,
                span=locate(program.source, output.name),
                hint="each reading of a temporary counts: return some of them, and read them in another program",
            )
