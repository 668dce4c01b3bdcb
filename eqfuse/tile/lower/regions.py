"""Where along an axis a predicate may be true, and where it is true for every other position of the blocks.

A predicate is understood if it is built with `and`, `or` and `not` from comparisons in which the axis has a whole
coefficient, or is divided by a number (`j // 16 < n[b]`), and the rest is an integer. The least and greatest value
of the rest over the blocks that are open are its interval where it is made of positions and extents (sums,
quotients, minima of those). Where it is data (a run-time scalar, what is loaded at positions of other axes), it is
computed for every position of the blocks, and its least and greatest value are taken: `j < len[b]` reaches to the
greatest length of the block's rows, and is true for all of them up to the least. Nothing here knows what the
predicate is for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.nodes import Kernel
from eqfuse.terms.assume import conjuncts
from eqfuse.terms.intervals import MIRRORED, NEGATED
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Local, Reduce, Scalar, walk
from eqfuse.terms.promises import read_along
from eqfuse.terms.ranges import FiniteInputs, difference, linear
from eqfuse.tile.lower.builder import Builder
from eqfuse.tile.lower.expressions import Expressions, may_keep_inside
from eqfuse.tile.lower.reads import is_shift, may_miss
from eqfuse.tile.lower.types import Types
from eqfuse.tile.nodes import LoadTile, Search, Value

LARGEST_TERM = 2**62
"""A 64-bit integer that others are added to counts as at most this: no sum of two of them is beyond 64 bits."""

Interval = tuple[Value, Value]
"""Least and greatest value."""


@dataclass(frozen=True)
class Region:
    """Positions of an axis where a predicate may be true, [low, high), and where those of its parts that are `proven`
    have their truth values for every position of the other axes, [full_low, full_high). None is unbounded.
    `is_proven` tells whether these parts make the whole predicate true; `low_is_data`, that `low` is known at run time
    alone, `is_data`, that `low` or `high` is."""

    low: Value | None
    high: Value | None
    full_low: Value | None
    full_high: Value | None
    proven: Mapping[Expr, bool]
    low_is_data: bool = False
    is_data: bool = False
    is_proven: bool = True


EVERYWHERE = Region(None, None, None, None, {})


class Regions:
    """Regions along one axis. `inside` are names that stand for nothing yet where the regions are computed."""

    def __init__(
        self,
        build: Builder,
        types: Types,
        expressions: Expressions,
        axis: str,
        inside: Collection[str],
        kernel: Kernel,
    ) -> None:
        self._build = build
        self._types = types
        self._expressions = expressions
        self._axis = axis
        self._inside = inside
        self._kernel = kernel
        self._guards: tuple[Expr, ...] = ()

    def of(self, predicate: Expr, wanted: bool, guards: tuple[Expr, ...]) -> Region | None:
        """Where `predicate` has the truth value `wanted`; None where nothing is known about that. Positions of
        other axes at which `guards` do not hold are left out where the predicate cannot be told there."""
        outer, self._guards = self._guards, guards
        found = self._where(predicate, wanted)
        self._guards = outer
        return found

    def both(self, left: Region | None, right: Region | None) -> Region | None:
        """Where both of two predicates hold."""
        if left is None or right is None:
            known = left or right
            return known and replace(known, is_proven=False)
        return Region(
            self._pick("maximum", left.low, right.low),
            self._pick("minimum", left.high, right.high),
            self._pick("maximum", left.full_low, right.full_low),
            self._pick("minimum", left.full_high, right.full_high),
            {**left.proven, **right.proven},
            left.low_is_data or right.low_is_data,
            left.is_data or right.is_data,
            left.is_proven and right.is_proven,
        )

    def _where(self, predicate: Expr, wanted: bool) -> Region | None:
        match predicate:
            case Call("not", (part,)):
                return self._where(part, not wanted)
            case Call("and" | "or" as fn, (left, right)):
                reached = (*self._guards, *conjuncts(left, fn == "and"))
                regions = self._where(left, wanted), self.of(right, wanted, reached)
                return (
                    self.both(*regions)
                    if (fn == "and") == wanted
                    else self._either(predicate, wanted, *regions)
                )
            case Call("eq" | "ne" as fn, (left, right)) if (fn == "eq") == wanted:
                low = self._compared(predicate, wanted, "ge", left, right)
                hull = self.both(low, self._compared(predicate, wanted, "le", left, right))
                if self._searched(difference(left, right).terms) is not None:
                    return hull
                return hull and replace(hull, full_low=None, full_high=None, proven={}, is_proven=False)
            case Call("lt" | "le" | "gt" | "ge" as fn, (left, right)):
                return self._compared(predicate, wanted, fn if wanted else NEGATED[fn], left, right)
            case _:
                return None

    def _either(self, whole: Expr, wanted: bool, left: Region | None, right: Region | None) -> Region | None:
        """Where one of two predicates holds: the hull of where they may, and where one certainly does."""
        hull = EVERYWHERE
        if left is not None and right is not None:
            hull = Region(
                None if left.low is None or right.low is None else self._pick("minimum", left.low, right.low),
                None
                if left.high is None or right.high is None
                else self._pick("maximum", left.high, right.high),
                None,
                None,
                {},
                left.low_is_data or right.low_is_data,
                left.is_data or right.is_data,
            )
        certain = [region for region in (left, right) if region is not None and region.is_proven]
        if not certain:
            return replace(hull, is_proven=False)
        left, right = certain[0], certain[-1]
        hull = replace(hull, full_low=left.full_low, full_high=left.full_high, proven={whole: wanted})
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

    # Comparisons --------------------------------------------------------------------------------

    def _compared(self, whole: Expr, wanted: bool, fn: str, left: Expr, right: Expr) -> Region | None:
        """The region of `left fn right`, solved for the axis."""
        terms = dict(difference(left, right).terms)
        found = self._solved(terms)
        if found is None:
            return self._among_ascending(whole, wanted, fn, terms)
        factor, divisor = found
        # factor * j + terms <= 0 (below) or >= 0, so |factor| * j <= rest or >= rest.
        sign = 1 if factor > 0 else -1
        rest = {term: -sign * count for term, count in terms.items()}
        bounds = self._sum(rest)
        if bounds is None:
            return None
        below = (fn in ("lt", "le")) == (sign == 1)
        strict = fn in ("lt", "gt")
        is_data = any(map(_is_data, rest))
        least, most = (
            self._edge(bound, abs(factor), divisor, below=below, strict=strict, is_data=is_data)
            for bound in bounds
        )
        proven = {whole: wanted}
        if below:
            return Region(None, most, None, least, proven, is_data=is_data)
        return Region(least, None, most, None, proven, is_data, is_data)

    def _solved(self, terms: dict[Expr, int]) -> tuple[int, Expr] | None:
        """Takes the axis out of a linear combination: its factor, and what it is divided by before."""
        axis = Axis(self._axis)
        if factor := terms.pop(axis, 0):
            return factor, Const(1)
        for term, count in terms.items():
            match term:
                case Call("floordiv", (Axis(name), divisor)) if (
                    name == self._axis and _is_positive(divisor) and abs(count) == 1
                ):
                    del terms[term]
                    return count, divisor
        return None

    def _searched(self, terms: Mapping[Expr, int]) -> tuple[Load, int, int] | None:
        """The one element of a linear combination that ascends along the axis: with the dimension, and how many positions
        behind the axis it is read."""
        axis = Axis(self._axis)
        match [term for term in terms if axis in walk(term)]:
            case [Load(tensor, index) as load] if abs(terms[load]) == 1:
                places = [place for place, at in enumerate(index) if axis in walk(at)]
                by = read_along(load, places[0], self._axis)
                if len(places) > 1 or (tensor, places[0]) not in self._kernel.ascending or by is None:
                    return None
                return (load, places[0], by) if by <= self._longer(tensor, places[0], self._axis) else None
        return None

    def _longer(self, tensor: str, place: int, axis: str) -> int:
        """How many elements more than an axis has positions a dimension has at least."""
        root = self._build.domains.get(axis, axis)
        return max((by for *where, by in self._kernel.longer if where == [tensor, place, root]), default=0)

    def _among_ascending(self, whole: Expr, wanted: bool, fn: str, terms: dict[Expr, int]) -> Region | None:
        """The region of `terms fn 0` where one term is an element that ascends along the axis: it begins or ends where
        the others would stand among its elements, which a search tells."""
        found = self._searched(terms)
        dtype = "" if found is None else self._types.of(found[0])[1]
        if found is None or dtype not in ("i32", "i64"):
            return None
        load, place, by = found
        sign = terms[load]
        bounds = self._sum({term: -sign * n for term, n in terms.items() if term is not load})
        others = [at for k, at in enumerate(load.index) if k != place]
        if bounds is None or any(map(may_miss, (Load(load.tensor, (at,)) for at in others))):
            return None
        if not all(map(self._is_known, others)) or any(self._types.of(at)[0] for at in others):
            return None
        build, shift = self._build, self._build.constant(by, "i32")
        index, stop = tuple(map(self._expressions.index, others)), build.extent(self._axis)
        stop = build.integer("add", stop, shift)
        # Elements at most the target end behind the last one that is equal, those below it before the first one.
        fn = fn if sign == 1 else MIRRORED[fn]
        right = fn in ("le", "gt")
        least, most = (
            build.integer(
                "sub", self._search(Search(load.tensor, index, place, stop, bound, right, dtype)), shift
            )
            for bound in bounds
        )
        proven = {whole: wanted}
        if fn in ("lt", "le"):
            return Region(None, most, None, least, proven, is_data=True)
        return Region(least, None, most, None, proven, True, True)

    def _search(self, op: Search) -> Value:
        return self._build.emit(op, (), "i32", f"{self._axis}_found")

    def _edge(
        self, rest: Value, factor: int, divisor: Expr, *, below: bool, strict: bool, is_data: bool
    ) -> Value:
        """The position before which `factor * (j // divisor) <= rest` holds (`below`), or from which on it is
        `>= rest`; `<` or `>` if `strict`. Of data, a position at the ends at most: no sum is beyond 32 bits."""
        build = self._build
        one = build.constant(1, "i32")
        if factor != 1:
            if strict:
                rest = build.integer("sub" if below else "add", rest, one)
            if not below:
                rest = build.integer("add", rest, build.constant(factor - 1, "i32"))
            rest = build.integer("floordiv", rest, build.constant(factor, "i32"))
            strict = False
        by = self._expressions.value(divisor)
        if is_data:
            most = build.extent(self._axis)
            if divisor is not Const(1):
                last = build.integer("sub", by, one)
                most = build.integer("floordiv", build.integer("add", most, last), by)
            rest = build.integer("minimum", rest, most)
            rest = build.cast(build.integer("maximum", rest, build.constant(-1, "i32")), "i32")
        if below != strict:  # j <= rest is j < rest + 1
            rest = build.integer("add", rest, one)
        return rest if divisor is Const(1) else build.integer("mul", rest, by)

    # Intervals ----------------------------------------------------------------------------------

    def _sum(self, terms: Mapping[Expr, int]) -> Interval | None:
        """The interval of a linear combination over the blocks that are open. Data alone stays in its dtype; what
        it is added up with is in 64 bits. Reals cut nothing: below 2.5 are the positions 0, 1 and 2."""
        if any(self._types.of(term)[1] not in ("i32", "i64") for term in terms):
            return None
        known = {term: self._interval(term) for term in terms}
        wide = any(map(_is_data, terms)) and (
            len(terms) > 1 or -1 in terms.values() or max(terms.values()) > 1
        )
        together = [term for term in terms if known[term] is None]
        if together:  # with the others of its positions, or their extremes might be of different rows
            axes = frozenset[str]().union(*(self._types.dims(term) for term in together))
            together += [t for t in terms if known[t] is not None and self._types.dims(t) & axes]
            rows = self._rows({term: terms[term] for term in terms if term in together}, wide=wide)
            if rows is None:
                return None
            least, most = rows
        else:
            least = most = self._build.constant(0, "i32")
        for term, count in terms.items():
            found = known[term]
            if found is not None and term not in together:
                found = found if not wide else (self._wide(found[0]), self._wide(found[1]))
                least, most = (
                    self._add(least, found[count < 0], count),
                    self._add(most, found[count > 0], count),
                )
        return least, most

    def _ends(self, load: Load) -> Interval | None:
        """The least and the greatest of the elements that a block of rows reads along a dimension where they ascend: the first
        and the last of them, which no reduction over the rows has to find."""
        build, places = self._build, [k for k, at in enumerate(load.index) if self._types.dims(at)]
        if len(places) != 1 or (load.tensor, places[0]) not in self._kernel.ascending:
            return None
        (place,) = places
        (axis, *rest) = self._types.dims(load.index[place])
        others = [at for k, at in enumerate(load.index) if k != place]
        by = None if rest else read_along(load, place, axis)
        if by is None or by > self._longer(load.tensor, place, axis) or not build.is_open(axis):
            return None
        if not all(map(self._is_known, others)) or any(may_miss(Load(load.tensor, (at,))) for at in others):
            return None
        whole, one = build.blocks[axis].kind == "whole", build.constant(1, "i32")
        first = build.constant(0, "i32") if whole else build.start(axis)
        stop = build.extent(axis)
        if not whole:
            stop = build.integer("minimum", stop, build.integer("add", first, build.block_size(axis)))
        last = build.integer("sub", stop, one)
        index = [self._expressions.index(at) if k != place else first for k, at in enumerate(load.index)]
        dtype, found = self._types.of(load)[1], []
        for name, at in (("first", first), ("last", last)):
            if by:
                at = build.integer("add", at, build.constant(by, "i32"))
            index[place] = at
            found.append(
                build.emit(LoadTile(load.tensor, tuple(index), None, 0.0), (), dtype, f"{load.tensor}_{name}")
            )
        return found[0], found[1]

    def _rows(self, terms: Mapping[Expr, int], *, wide: bool) -> Interval | None:
        """The interval of a combination computed at every position of its blocks."""
        guards = self._needed(terms)
        if guards is None or not all(map(self._is_known, terms)):
            return None
        build = self._build
        total: Value | None = None
        with self._expressions.under(guards):
            for term, count in terms.items():
                value = self._expressions.value(term)
                value = self._wide(value) if wide else value
                if total is None and count == 1:
                    total = value
                    continue
                if abs(count) != 1:
                    value = build.elementwise("mul", (value, build.constant(abs(count), value.dtype)), "n")
                before = build.constant(0, value.dtype) if total is None else total
                total = build.elementwise("add" if count > 0 else "sub", (before, value), "n")
            assert total is not None
            least, most = self._expressions.extremes(total, guards)
        # Where the guards leave nothing, these are identities, and no sum is beyond 64 bits.
        return (self._wide(least), self._wide(most)) if wide and guards else (least, most)

    def _wide(self, value: Value) -> Value:
        """In 64 bits, no further from 0 than sums of it may be."""
        build = self._build
        if value.dtype != "i64":
            return build.cast(value, "i64")
        low, high = (build.constant(end, "i64") for end in (-LARGEST_TERM, LARGEST_TERM))
        return build.elementwise("maximum", (build.elementwise("minimum", (value, high), "n"), low), "n")

    def _add(self, total: Value, value: Value, count: int) -> Value:
        build = self._build
        if abs(count) != 1:
            value = build.integer("mul", value, build.constant(abs(count), "i32"))
        return build.integer("add" if count > 0 else "sub", total, value)

    def _needed(self, terms: Collection[Expr]) -> tuple[Expr, ...] | None:
        """The guards without which what the terms read may be outside of its tensor; None where one of them is
        not known here."""
        needed: dict[Expr, None] = {}
        for load in (node for node in walk(*terms) if isinstance(node, Load) and may_miss(node)):
            relevant = [guard for guard in self._guards if may_keep_inside(guard, load.index)]
            known = [guard for guard in relevant if self._is_known(guard)]
            dims = self._types.dims(load)
            own = [guard for guard in known if self._types.dims(guard) <= dims]
            if own or not any(map(is_shift, walk(*load.index))):
                needed |= dict.fromkeys(own)
            elif known == relevant:
                needed |= dict.fromkeys(known)
            else:
                return None
        return tuple(guard for guard in self._guards if guard in needed)

    def _is_known(self, expr: Expr) -> bool:
        """Whether an expression has a value here."""
        if any(isinstance(node, Local) and node.name in self._inside for node in walk(expr)):
            return False
        axes = _axes(expr) | self._expressions.free(expr)
        return self._axis not in axes and all(map(self._build.is_open, axes))

    def _interval(self, expr: Expr) -> Interval | None:
        """Least and greatest value of an integer expression that is one number for the open blocks, or made of
        positions; None where it is neither."""
        build = self._build
        if any(isinstance(node, Local) and node.name in self._inside for node in walk(expr)):
            return None
        if self._axis in _axes(expr):
            return None
        dims, dtype = self._types.of(expr)
        if dtype not in ("i32", "i64"):
            return None
        if not dims and self._is_known(expr):
            guards = self._needed((expr,))
            if guards is None:
                return None
            with self._expressions.under(guards):
                exact = self._expressions.value(expr)
                exact = exact if _is_data(expr) else build.cast(exact, "i32")
                return self._expressions.extremes(exact, guards) if guards else (exact, exact)
        match expr:
            case Axis(name):
                whole = build.blocks[name].kind == "whole" or not build.is_open(name)
                first = build.constant(0, "i32") if whole else build.start(name)
                count = build.extent(name) if whole else build.block_size(name)
                return first, build.integer(
                    "sub", build.integer("add", first, count), build.constant(1, "i32")
                )
            case Load():
                return self._ends(expr)
            case Call("add" | "sub" | "neg" | "mul", _):
                terms = linear(expr).terms
                if expr in terms:  # it is no sum
                    return None
                parts = {term: self._interval(term) for term in terms}
                return None if None in parts.values() else self._sum(terms)
            case Call("floordiv", (part, divisor)) if _is_positive(divisor):
                found, by = self._interval(part), self._expressions.value(divisor)
                return found and (
                    build.integer("floordiv", found[0], by),
                    build.integer("floordiv", found[1], by),
                )
            case Call("mod", (_, divisor)) if _is_positive(divisor):
                last = build.integer("sub", self._expressions.value(divisor), build.constant(1, "i32"))
                return build.constant(0, "i32"), last
            case Call("maximum" | "minimum" as fn, (left, right)):
                a, b = self._interval(left), self._interval(right)
                return a and b and (build.integer(fn, a[0], b[0]), build.integer(fn, a[1], b[1]))
            case _:
                return None


def _is_data(expr: Expr) -> bool:
    return any(isinstance(node, Load | Scalar | Local) for node in walk(expr))


def _is_positive(expr: Expr) -> bool:
    """Whether an integer made of sizes and numbers is above 0."""
    found = FiniteInputs().of(expr)
    return found.low > 0 and found.whole and not _axes(expr) and not _is_data(expr)


def _axes(expr: Expr) -> set[str]:
    """Every axis that `expr` mentions, bound or free."""
    return {
        node.name if isinstance(node, Axis) else node.axis
        for node in walk(expr)
        if isinstance(node, (Axis, Reduce))
    }
