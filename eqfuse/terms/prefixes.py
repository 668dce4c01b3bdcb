"""Reductions over the positions up to each one: prefixes, which one walk over the axis computes for all of them.

`y[i] = sum[j](where(j <= i, x[j], 0))` is, at every i, a reduction over the first part of an axis. The merge of
`sum[j](x[j])`, of the same reduction without its mask, says what one more position makes of that part's state; so the states
after each position, in turn, are the prefixes (Blelloch, "Prefix sums and their applications", 1990).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.assume import folded, simplified
from eqfuse.terms.folds import all_unpacked, fold_of, identity, packed
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Program,
    Reduce,
    Size,
    call,
    free_axes,
    once,
    replaced,
    transform,
    walk,
    without_names,
)
from eqfuse.terms.ranges import FiniteInputs, difference
from eqfuse.terms.sizes import places

Extents = Mapping[str, int | str]
"""What two axes of the same extent have in common: the extent itself where it is a number, else the name of one of them. An axis
that is not there has its own."""


@dataclass(frozen=True)
class Prefix:
    """At each position of the axis `at`, of the same extent, the part of a reduced axis up to that position, without it where
    it is `exclusive`, nor the last `lag` positions before it; from that position on where it is `backwards`. Where it is `mirrored`,
    positions of `at` count from the end."""

    at: str
    exclusive: bool
    backwards: bool
    mirrored: bool = False
    lag: int = 0

    @property
    def behind(self) -> int:
        """How many positions before its own one the last one is that the part has."""
        return self.exclusive + self.lag

    def where(self, axis: str) -> str:
        """The condition on positions of the reduced axis, as text."""
        return str(self.condition(axis))

    def condition(self, axis: str) -> Expr:
        """The same as an expression."""
        place: Expr = Axis(self.at)
        if self.mirrored:
            place = call("sub", call("sub", Size(axis), Const(1)), place)
        if self.lag:
            place = call("add" if self.backwards else "sub", place, Const(self.lag))
        return call(("g" if self.backwards else "l") + ("t" if self.exclusive else "e"), Axis(axis), place)

    @property
    def complement(self) -> Prefix:
        """The other positions of the axis: those that are less than 0 positions behind have more than the position itself."""
        behind = 1 - self.behind
        return Prefix(self.at, behind > 0, not self.backwards, self.mirrored, behind - (behind > 0))

    @staticmethod
    def of(terms: Mapping[str, int], axis: str, sizes: Mapping[str, int], extents: Extents) -> Prefix | None:
        """The prefix where a sum of positions, each as often as `terms` says, and of extents, as often as `sizes` says, is at most 0;
        the number in the sum is that of "". None where that is no prefix of the axis."""
        sign, extent = terms.get(axis, 0), extents.get(axis, axis)
        others = [name for name, n in terms.items() if n and name not in ("", axis)]
        if len(others) != 1 or sign not in (1, -1) or extents.get(others[0], others[0]) != extent:
            return None
        at, bound = others[0], -terms.get("", 0)
        mirrored = terms[at] == sign
        if mirrored and isinstance(extent, int):
            bound -= sign * extent
        wanted = {extent: -sign} if mirrored and not isinstance(extent, int) else {}
        counted: dict[int | str, int] = {}
        for name, n in sizes.items():
            of = extents.get(name, name)
            counted[of] = counted.get(of, 0) + n
        if {name: n for name, n in counted.items() if n} != wanted or abs(terms[at]) != 1:
            return None
        bound += sign if mirrored else 0
        return Prefix(at, bound < 0, sign == -1, mirrored, max(0, -bound - 1)) if bound <= 0 else None


@dataclass(frozen=True)
class Scanned:
    """A reduction over the part of an axis that `prefix` says, as `whole` is one over all of the axis."""

    prefix: Prefix
    whole: Reduce

    def along(self, axis: str) -> Reduce:
        """The reduction over all of the axis, under the name of another one of the same extent."""
        own = self.whole.axis

        def step(node: Expr) -> Expr:
            match node:
                case Axis(name) if name == own:
                    return Axis(axis)
                case Size(name) if name == own:
                    return Size(axis)
                case Reduce(op, name, body) if name == own:
                    return Reduce(op, axis, body)
            return node

        found = transform(self.whole, step) if own != axis else self.whole
        assert isinstance(found, Reduce)
        return found


def form_of(expr: Expr, extents: Extents) -> tuple[object, tuple[str, ...]]:
    """What is the same for expressions that differ in the names of axes alone, and the free axes that they are read at, in one order."""
    form, axes = without_names(expr)
    return (form, tuple(extents.get(axis, axis) for axis in axes)), axes


def is_as_long(axis: str, other: str, extents: Extents) -> bool:
    """Whether two axes are known to have one extent."""
    return extents.get(axis, axis) == extents.get(other, other)


@once
def alike(program: Program) -> Extents:
    """The extents of the axes of a program: those that it declares, and those of the dimensions that axes are read along."""
    shared: dict[object, str] = {}
    same: dict[str, str] = {}

    def first(axis: str) -> str:
        while same.get(axis, axis) != axis:
            axis = same[axis]
        return axis

    def joined(axis: str, other: str) -> None:
        same[first(axis)] = first(other)

    for axis, of in program.domains.items():
        joined(axis, of)
    for axis, count in program.computed.items():
        joined(axis, count.axis if isinstance(count, Size) else shared.setdefault(count, axis))
    for axis, tensor, dimension in places(program):
        joined(axis, shared.setdefault((tensor, dimension), axis))
    lengths = {first(axis): length for axis, length in program.lengths.items()}
    return {axis: lengths.get(first(axis), first(axis)) for axis in (*same, *program.lengths)}


def prefix_where(condition: Expr, axis: str, extents: Extents) -> Prefix | None:
    """The part of an axis where a condition holds, if that is one up to the position of another axis, or from there on."""
    return next(
        (found for node, holds, found in _masks(condition, axis, extents) if node is condition and holds),
        None,
    )


def scanned(reduce: Reduce, extents: Extents) -> Scanned | None:
    """How a reduction is one over the part of its axis before or after another axis's position, and of nothing else of that
    position; None where it is not."""
    return _scanned(reduce, tuple(extents.items()))


@lru_cache(4096)
def _scanned(reduce: Reduce, extents: tuple[tuple[str, int | str], ...]) -> Scanned | None:
    axis, known = reduce.axis, dict(extents)
    for prefix, body, inside in _parts(reduce, known):
        whole = _of_whole(body, inside, prefix, axis, known)
        if whole is not None:
            return Scanned(prefix, Reduce(reduce.op, axis, whole))
    return None


def part_of(reduce: Reduce, extents: Extents) -> tuple[Prefix, Expr] | None:
    """The part of its axis that a reduction is over, up to the position of another axis or from there on, and what it has of each position
    there, which may be anything of that other position; None where it is over no such part."""
    found = next(_parts(reduce, extents), None)
    return found and (found[0], replaced(found[1], found[2]))


@dataclass(frozen=True)
class Window:
    """At each position of the axis `at`, of the same extent, the last `width` positions of a reduced axis up to it; the first ones from it on where
    it is `backwards`."""

    at: str
    width: int
    backwards: bool


def window_of(reduce: Reduce, extents: Extents) -> tuple[Window, Expr] | None:
    """The window that a reduction is over, and what it has of each position there; None where it is over none."""
    part = part_of(reduce, extents)
    if part is None or part[0].behind or part[0].mirrored:
        return None
    prefix, body = part
    for node in walk(body):
        match node:
            case Call("le" | "lt" | "ge" | "gt" as fn, sides):
                before = prefix_where(call(OPPOSITE[fn], *sides), reduce.axis, extents)
                if (
                    before is not None
                    and (before.at, before.backwards) == (prefix.at, prefix.backwards)
                    and not before.mirrored
                    and _leaves_nothing(reduce.op, body, node, False)
                ):
                    window = Window(prefix.at, before.behind, prefix.backwards)
                    return window, folded(body, {node: True})
    return None


OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
"""The comparison that holds where another one does not."""


def _parts(reduce: Reduce, extents: Extents) -> Iterator[tuple[Prefix, Expr, Mapping[Expr, Expr]]]:
    """The same for every mask, with names in place of folds over axes of this extent: they may be prefixes too."""
    found = fold_of(reduce.op)
    if found is not None and found[0].ranks:
        return
    if not any(isinstance(node, Call) and node.fn in OPPOSITE for node in walk(reduce.body)):
        return
    axis = reduce.axis
    extent = extents.get(axis, axis)
    inside = [n for n in walk(reduce.body) if isinstance(n, Reduce) and extents.get(n.axis, n.axis) == extent]
    names: dict[Expr, Expr] = {node: Local(f"%{place}", ()) for place, node in enumerate(inside)}
    body = replaced(reduce.body, names)
    for predicate, holds, prefix in _masks(body, axis, extents):
        if prefix.backwards and found is not None and not found[0].commutative:
            continue
        if prefix.exclusive and found is not None and found[0].order:
            continue  # of no position, the program has the first that the mask leaves out
        if _leaves_nothing(reduce.op, body, predicate, not holds) or (
            reduce.op == "max" and not prefix.exclusive and _is_below(body, predicate, not holds)
        ):
            bodies = [folded(part, {predicate: holds}) for part in all_unpacked(body)]
            yield prefix, packed(bodies), {name: node for node, name in names.items()}


def _of_whole(
    body: Expr, inside: Mapping[Expr, Expr], prefix: Prefix, axis: str, extents: Extents
) -> Expr | None:
    """A body with what it reads of the same prefix as of the whole axis, and the outer position as what the prefix has of positions;
    None where it reads something else there."""
    read: dict[Expr, Expr] = {}
    for name in set(walk(body)) & inside.keys():
        other = inside[name]
        assert isinstance(other, Reduce)
        again = scanned(other, extents)
        if again is not None and again.prefix == prefix:
            if axis in free_axes(again.whole):
                return None
            read[name] = again.along(axis)
        elif prefix.at in free_axes(other):
            return None
        else:
            read[name] = other
    return _counted(replaced(body, read), prefix, axis)


def _counted(body: Expr, prefix: Prefix, axis: str) -> Expr | None:
    """A body with the outer position said by what the prefix has of positions: how many, or the last one; None where tensors are read
    there."""
    if prefix.at not in free_axes(body):
        return body
    if prefix.lag or any(prefix.at in free_axes(node) for node in walk(body) if isinstance(node, Load)):
        return None
    found = replaced(body, positions_of(prefix, axis))
    return transform(found, _last) if prefix.backwards and prefix.exclusive else found


def _last(node: Expr) -> Expr:
    """What is subtracted of a count as the last term of a sum: an exponent is one of a state then, and of what comes in."""

    def counted(part: Expr) -> tuple[Expr, Expr] | None:
        match part:
            case Call("sub", (left, right)) if any(_is_count(each) for each in walk(right)):
                return left, right
        return None

    match node:
        case Call("mul", (left, right)) if found := counted(left):
            return call("sub", call("mul", found[0], right), call("mul", found[1], right))
        case Call("add" | "sub" as fn, (left, right)) if found := counted(left):
            return call("sub", call(fn, found[0], right), found[1])
    return node


def _is_count(expr: Expr) -> bool:
    return isinstance(expr, Reduce) and expr.op == "sum" and expr.body == Const(1)


def positions_of(prefix: Prefix, axis: str) -> dict[Expr, Expr]:
    """The position that a prefix is of, by its number of positions and by the last of them. An empty one has none, nor have those
    that several positions have."""
    if prefix.lag:
        return {}
    at, count, one, size = Axis(prefix.at), Reduce("sum", axis, Const(1)), Const(1), Size(axis)
    end = call("sub", size, one)
    counted: Expr
    last: Expr
    match prefix.backwards, prefix.exclusive:
        case False, False:
            counted, last = call("add", at, one), Reduce("max", axis, Axis(axis))
        case True, False:
            counted, last = call("sub", size, at), Reduce("min", axis, Axis(axis))
        case False, True:
            counted, last = at, count
        case _:
            counted, last = call("sub", end, at), call("sub", end, count)
    if prefix.mirrored:
        return {at: call("sub", end, last)}
    return {at: last, counted: count}


def _leaves_nothing(op: str, body: Expr, predicate: Expr, value: bool) -> bool:
    """Whether a position at which the predicate has this truth value adds nothing to a reduction."""
    fold = fold_of(op)
    parts = all_unpacked(body)
    none = [identity(op)] if fold is None else list(fold[0].identity)
    if len(parts) != len(none):
        return False
    outside = [simplified(part, {}, predicate, value, up_to_nan=True) for part in parts]
    if fold is not None and fold[0].order:  # what comes last by its first key is never taken
        return outside[0] == none[0]
    return all(isinstance(a, Const) and a.value == b.value for a, b in zip(outside, none, strict=True))


def _is_below(body: Expr, predicate: Expr, value: bool) -> bool:
    """Whether what a position gives where the predicate has this truth value is a number below all that others give: of a prefix with
    its own position it is never the maximum."""
    outside = folded(body, {predicate: value})
    return (
        isinstance(outside, Const)
        and outside.value <= FiniteInputs().of(folded(body, {predicate: not value})).low
    )


def _masks(body: Expr, axis: str, extents: Extents) -> Iterator[tuple[Expr, bool, Prefix]]:
    """Comparisons of the axis's position with that of an axis of the same extent, and the prefixes where they hold, and do not."""
    for node in walk(body):
        match node:
            case Call("le" | "lt" | "ge" | "gt" as fn, (left, right)):
                form = difference(left, right) if fn in ("le", "lt") else difference(right, left)
                terms, sizes = {"": form.constant + (fn in ("lt", "gt"))}, dict[str, int]()
                for atom, n in form.atoms.items():
                    match atom:
                        case Axis(name):
                            terms[name] = n
                        case Size(name):
                            sizes[name] = n
                        case _:
                            break
                else:
                    found = Prefix.of(terms, axis, sizes, extents)
                    if found is not None:
                        yield node, True, found
                        if not found.lag:
                            yield node, False, found.complement
