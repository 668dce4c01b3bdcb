"""Blocks: products of factors, summed over some axes and multiplied by numbers. They are read from expressions and written as such
again; `rules/reassociate.py` finds the cheapest order of one.

A sum over an axis of which a mask selects one position is what is read there: `sum[k](where(k == ids[i], w[k,j], 0))` is `w[ids[i],j]`
where that position is one of the axis, and 0 elsewhere. One of which masks leave a few positions next to each other is a window
(`rules/windows.py`). A sum over positions alone has a closed form (`rules/closed_forms.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from types import MappingProxyType

from eqfuse.fast_dataclass import dataclass
from eqfuse.rules.closed_forms import MOST_POSITIONS, conjuncts, total
from eqfuse.rules.windows import Window, window
from eqfuse.terms.folds import rank_axes
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Program,
    Reduce,
    Size,
    call,
    free_axes,
    reductions,
    substitute_axes,
    transform,
    walk,
)
from eqfuse.terms.parser import spare_axes
from eqfuse.terms.prefixes import Extents, is_as_long
from eqfuse.terms.types import kind

NEAR_ONE = 2.0**-16, 2.0**16
"""Constants that a block is multiplied by as a whole; others stay with what they are written next to, for its range."""
MOST_DIVIDED = 2
"""Factors of a sum up to which one of them is divided by what the sum is divided by; sums of more are looked at by themselves."""


@dataclass(frozen=True)
class Block:
    """`sum over axes of product of factors`, times numbers, each a multiplier or a divisor ("mul" or "div"); `counts` are axes whose
    number of positions divides it."""

    factors: tuple[Expr, ...]
    axes: tuple[str, ...] = ()
    numbers: tuple[tuple[str, Expr], ...] = ()
    counts: tuple[str, ...] = ()

    def times(self, other: Block) -> Block:
        return Block(
            self.factors + other.factors,
            self.axes + other.axes,
            self.numbers + other.numbers,
            self.counts + other.counts,
        )


@dataclass(frozen=True)
class Copies:
    """Other names for axes, each with the axis `of` it, whose extent it has; `roots` say the same of axes that a program declares so. With
    `squares`, sums may be multiplied by themselves term by term."""

    of: Mapping[str, str]
    roots: Mapping[str, str]
    squares: bool

    @staticmethod
    def of_program(program: Program, squares: bool) -> Copies:
        """The names that `with_copies` has given a program."""
        return Copies(spare_axes(program), program.domains, squares)

    def other(self, axis: str, taken: Collection[str]) -> str | None:
        """Another name for an axis; None where all are taken."""
        root = self.roots.get(axis, axis)
        return next((name for name, of in self.of.items() if of == root and name not in taken), None)

    def apart(self, block: Block, taken: Collection[str]) -> Block | None:
        """A block that is summed over axes of other names than those that are taken; None where there is none for one of them."""
        for axis in [each for each in block.axes if each in taken]:
            if not any(axis in free_axes(factor) for factor in block.factors):
                counted = () if axis in block.counts else (("mul", Size(axis)),)
                block = replace(_without_axis(block, axis, block.factors), numbers=(*block.numbers, *counted))
                continue
            name = self.other(axis, {*taken, *_names_of(block)})
            if name is None or axis in rank_axes(*block.factors):
                return None
            factors = tuple(substitute_axes(factor, {axis: Axis(name)}) for factor in block.factors)
            block = _without_axis(block, axis, factors)
            block = replace(block, axes=(*block.axes, name))
        return block

    def joined(self, one: Block, other: Block) -> Block | None:
        """The product of two blocks; None where an axis that one of them sums over is there in the other one, and has no other name."""
        if _are_apart(one, other):
            return one.times(other)
        if not self.of or (not self.squares and self._is_in(other, one)):
            return None
        first = self.apart(one, frozenset[str]().union(*map(free_axes, other.factors)).difference(other.axes))
        second = first and self.apart(other, _names_of(first))
        return first and second and first.times(second)

    def _is_in(self, one: Block, other: Block) -> bool:
        """Whether all factors of one block are those of another one but for the names of the axes that they sum over, as those of a square are."""

        def unnamed(block: Block) -> set[Expr]:
            names: dict[str, Expr] = {axis: Axis(f"%{self.roots.get(axis, axis)}") for axis in block.axes}
            return {substitute_axes(factor, names) for factor in block.factors}

        return unnamed(one) <= unnamed(other) or unnamed(other) <= unnamed(one)

    def freed(self, factors: Sequence[Expr], axis: str, at: Expr) -> tuple[Expr, ...] | None:
        """Factors whose reductions bind no axis of a position where they have an axis that is read at it; None where one has no other name."""
        taken = free_axes(at)
        inner = [each for each in reductions(*factors) if axis in free_axes(each) and each.axis in taken]
        names: dict[str, str] = {}
        for each in inner:
            used = {*taken, *names.values(), *_names_of(Block(tuple(factors)))}
            name = names.get(each.axis) or self.other(each.axis, used)
            if name is None or each.axis in rank_axes(each):
                return None
            names[each.axis] = name

        def step(node: Expr) -> Expr:
            match node:
                case Reduce(op, bound, body) if bound in names and axis in free_axes(body):
                    return Reduce(op, names[bound], substitute_axes(body, {bound: Axis(names[bound])}))
            return node

        return tuple(transform(factor, step) for factor in factors) if names else tuple(factors)


NO_COPIES = Copies({}, {}, False)


def block_of(expr: Expr, copies: Copies = NO_COPIES) -> Block:
    """What an expression is a sum of products of; `copies` are other names that its axes may have."""
    match expr:
        case Const() if _is_near_one(expr):
            return Block((), numbers=(("mul", expr),))
        case Call("neg", (inner,)):
            found = block_of(inner, copies)
            return replace(found, numbers=(*found.numbers, ("neg", inner)))
        case Call("div", (over, Const() as by)) if _is_near_one(by):
            found = block_of(over, copies)
            return replace(found, numbers=(*found.numbers, ("div", by)))
        case Call("div", (over, Size(axis))) if axis in block_of(over, copies).axes:
            found = block_of(over, copies)
            return replace(found, counts=(*found.counts, axis))
        case Call("div", (over, by)) if _is_plain(by) and sums_inside(over):
            whole = copies.apart(block_of(over, copies), free_axes(by))
            place = whole and _divisible(whole, free_axes(by), isinstance(over, Reduce))
            if whole is not None and place is not None:
                factors = tuple(call("div", f, by) if n == place else f for n, f in enumerate(whole.factors))
                return replace(whole, factors=factors)
        case Call("mul", (left, right)):
            one, other = block_of(left, copies), block_of(right, copies)
            if _is_plain(left) and _is_plain(right) and (joined := copies.joined(one, other)) is not None:
                return joined
            if not _is_plain(left) and other.factors:
                first, *more = other.factors
                return replace(other, factors=(call("mul", left, first), *more))
            if not _is_plain(right) and one.factors:
                *more, last = one.factors
                return replace(one, factors=(*more, call("mul", last, right)))
        case Call("where", (condition, inner, zero)) if is_order(condition) and is_number(zero, 0):
            inner = _within(inner, condition)
            found = block_of(inner, copies)
            apart = copies.apart(found, free_axes(condition))
            if found.factors != (inner,) and found.factors and apart is not None:
                return replace(apart, factors=(call("where", condition, Const(1), Const(0)), *apart.factors))
        case Reduce("sum", axis, body):
            apart = copies.apart(block_of(body, copies), (axis,))
            if apart is not None:
                return replace(apart, axes=(axis, *apart.axes))
    return Block((expr,))


def _divisible(block: Block, axes: frozenset[str], is_sum: bool) -> int | None:
    """The number of the first factor of a block that has the axes of what divides the block: that factor may be divided instead. None where the
    block has a mask, which would then be around the quotient: 0 / 0 is NaN, a masked quotient 0. None of a sum of more than MOST_DIVIDED factors too."""
    if any(_masks_of(factor)[0] for factor in block.factors) or (
        is_sum and len(block.factors) > MOST_DIVIDED
    ):
        return None
    return next((n for n, factor in enumerate(block.factors) if axes <= free_axes(factor)), None)


def _within(expr: Expr, condition: Expr) -> Expr:
    """A product where a condition holds, without its masks that say so."""
    match expr:
        case Call("where", (other, inner, zero)) if other == condition and is_number(zero, 0):
            return _within(inner, condition)
        case Call("mul", (left, right)):
            return call("mul", _within(left, condition), _within(right, condition))
        case Call("div", (over, by)):
            return call("div", _within(over, condition), by)
    return expr


def sums_inside(expr: Expr) -> bool:
    """Whether a factor of a product, or a term of one, is a sum."""
    match expr:
        case Reduce("sum"):
            return True
        case Call("mul" | "add" | "sub" | "neg", args):
            return any(map(sums_inside, args))
        case Call("div", (over, _)):
            return sums_inside(over)
        case Call("where", (condition, inner, _)) if is_order(condition):
            return sums_inside(inner)
    return False


def is_order(condition: Expr) -> bool:
    """Whether a condition compares the positions of two axes, as that of a prefix does."""
    return _is_of_positions(condition) and len(free_axes(condition)) == 2


def _is_of_positions(condition: Expr) -> bool:
    """Whether a condition compares positions and sizes."""
    match condition:
        case Call("le" | "lt" | "ge" | "gt"):
            return all(isinstance(node, Axis | Size | Const | Call) for node in walk(condition))
    return False


def times(left: Expr, right: Expr) -> Expr:
    """A product, under the mask of both factors, or of one that compares positions."""
    match left, right:
        case Call("where", (one, a, zero)), Call("where", (other, b, none)) if (
            one == other and is_number(zero, 0) and is_number(none, 0)
        ):
            return call("where", one, times(a, b), zero)
        case Call("where", (condition, value, zero)), _ if _is_of_positions(condition) and is_number(zero, 0):
            return call("where", condition, times(value, right), zero)
        case _, Call("where", (condition, value, zero)) if _is_of_positions(condition) and is_number(zero, 0):
            return call("where", condition, times(left, value), zero)
        case _ if any(is_number(one, 1) for one in (left, right)):
            return right if is_number(left, 1) else left
    return call("mul", left, right)


def _is_near_one(number: Const) -> bool:
    value = number.value
    return not isinstance(value, bool) and NEAR_ONE[0] <= abs(value) <= NEAR_ONE[1]


def _is_plain(expr: Expr) -> bool:
    """Whether a factor is no number of the call (a scalar, a size, a constant far from 1), which stays with what it is next to."""
    if isinstance(expr, Const):
        return _is_near_one(expr)
    return bool(free_axes(expr)) or any(isinstance(node, Load | Reduce) for node in walk(expr))


def _are_apart(one: Block, other: Block) -> bool:
    """Whether no axis that one block sums over is an axis of the other."""
    return _are_new(one.axes, other) and _are_new(other.axes, one)


def _are_new(axes: Sequence[str], block: Block) -> bool:
    """Whether a block has none of these axes."""
    return axes_of(block).isdisjoint(axes)


def axes_of(block: Block) -> frozenset[str]:
    """The axes of a block, those of its sums among them."""
    return frozenset({*block.axes, *block.counts}).union(*map(free_axes, block.factors))


def _names_of(block: Block) -> frozenset[str]:
    """The axes of a block, and those that are bound in its factors."""
    return axes_of(block) | {fold.axis for fold in reductions(*block.factors)}


def selected(
    block: Block, dtypes: Mapping[str, str], copies: Copies = NO_COPIES, same: Extents = MappingProxyType({})
) -> Block:
    """A block without the axes of which its masks select one position, the last ones by name first."""
    for axis in sorted(block.axes, reverse=True):
        for place, factor in enumerate(block.factors):
            found = _selection(factor, axis, dtypes, same)
            if found is None or axis in rank_axes(*block.factors):
                continue
            at, inside, rest = found
            factors = copies.freed((*block.factors[:place], *rest, *block.factors[place + 1 :]), axis, at)
            if factors is None:
                continue
            read = [substitute_axes(each, {axis: at}) for each in factors]
            made = [
                call("where", inside, new, Const(0)) if new is not old and inside is not Const(True) else new
                for new, old in zip(read, factors, strict=True)
            ]
            if inside is Const(True):
                made = made or [Const(1)]
            elif made == list(factors):
                made.append(call("where", inside, Const(1), Const(0)))
            return selected(_without_axis(block, axis, tuple(made)), dtypes, copies, same)
    return block


def closed(
    block: Block,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    same: Extents = MappingProxyType({}),
) -> Block:
    """A block without the axes along which all that varies is made of positions, whose sums have closed forms."""
    for axis in block.axes:
        made = closed_sum(block, axis, dtypes, same) if extents[axis] <= MOST_POSITIONS else None
        if made is not None:
            kept = tuple(factor for factor in block.factors if axis not in free_axes(factor))
            return closed(_without_axis(block, axis, (*kept, made)), extents, dtypes, same)
    return block


def windowed(block: Block, axis: str) -> tuple[Window, Block] | None:
    """The few positions of an axis that the masks of a block leave, and the block without these masks; None where they leave others."""
    parts = [_masks_of(factor) for factor in block.factors]
    masks = [mask for own, _ in parts for mask in own]
    found = window(masks, axis) if axis not in rank_axes(*block.factors) else None
    if found is None:
        return None
    left: list[Expr] = []
    first = 0
    for factor, (own, value) in zip(block.factors, parts, strict=True):
        others = [mask for place, mask in enumerate(own, first) if place not in found.places]
        left.append(factor if len(others) == len(own) else _masked(others, value))
        first += len(own)
    return found, replace(block, factors=tuple(left))


def closed_sum(
    block: Block, axis: str, dtypes: Mapping[str, str], same: Extents = MappingProxyType({})
) -> Expr | None:
    """The closed form of the sum over an axis of the factors of a block that have it; None where there is none."""
    own = [factor for factor in block.factors if axis in free_axes(factor)]
    return total(own, axis, dtypes, same) if own else None


def _without_axis(block: Block, axis: str, factors: tuple[Expr, ...]) -> Block:
    """A block that is summed over an axis no more, with what its factors have become."""
    divisors = (("div", Size(axis)),) if axis in block.counts else ()
    return Block(
        factors,
        tuple(each for each in block.axes if each != axis),
        (*block.numbers, *divisors),
        tuple(each for each in block.counts if each != axis),
    )


def _selection(
    factor: Expr, axis: str, dtypes: Mapping[str, str], same: Extents
) -> tuple[Expr, Expr, tuple[Expr, ...]] | None:
    """Of a mask that selects one position of an axis: where that is, whether it is one of the axis, and what is left of the factor."""
    conditions, value = _masks_of(factor)
    for place, each in enumerate(conditions):
        if (found := position_of(each, axis, dtypes, same)) is not None:
            rest = _masked([*conditions[:place], *conditions[place + 1 :]], value)
            return *found, () if is_number(rest, 1) else (rest,)
    return None


def _masks_of(factor: Expr) -> tuple[list[Expr], Expr]:
    """The conditions outside of which a factor is 0, and what it is inside of them."""
    conditions: list[Expr] = []
    while isinstance(factor, Call) and factor.fn == "where" and is_number(factor.args[2], 0):
        condition, factor, _ = factor.args
        conditions += conjuncts(condition)
    return conditions, factor


def _masked(conditions: Sequence[Expr], value: Expr) -> Expr:
    """A value where all conditions hold, and 0 elsewhere."""
    return call("where", reduce(partial(call, "and"), conditions), value, Const(0)) if conditions else value


def is_number(expr: Expr, number: int) -> bool:
    return isinstance(expr, Const) and not isinstance(expr.value, bool) and expr.value == number


def position_of(
    condition: Expr, axis: str, dtypes: Mapping[str, str], same: Extents
) -> tuple[Expr, Expr] | None:
    """The index that reads at the position of an axis that a condition selects, and whether that is a position of it, which one of an axis of
    the `same` extent always is; None where it selects none."""
    at = compared(condition, axis)
    if at is None or kind(at, dtypes) != "int" or (inside := _inside(at, axis)) is None:
        return None
    if isinstance(at, Axis):
        if is_as_long(at.name, axis, same):
            return at, Const(True)
        return call("add", at, Const(0)), inside  # shifted, by nothing, for it may be past the end
    return at, inside


def compared(condition: Expr, axis: str) -> Expr | None:
    """What the position of an axis is where a condition holds, if it says so."""
    match condition:
        case Call("eq", (Axis(name), at)) if name == axis and axis not in free_axes(at):
            return at
        case Call("eq", (at, Axis(name))) if name == axis and axis not in free_axes(at):
            return at
    return None


def _inside(at: Expr, axis: str) -> Expr | None:
    """Whether a position is one of an axis; None of one that never is."""
    below = call("lt", at, Size(axis))
    if isinstance(at, Axis):
        return below
    if isinstance(at, Const):
        return below if at.value >= 0 else None
    return call("and", call("le", Const(0), at), below)


def completed(value: Expr, block: Block) -> Expr:
    """The product of the factors of a block, summed over the axes that they have: with its numbers, and the sizes of its other axes."""
    had = frozenset[str]().union(*map(free_axes, block.factors))
    for axis in block.axes:
        if axis not in had:
            value = value if axis in block.counts else call("mul", value, Size(axis))
    for fn, by in block.numbers:
        value = call("neg", value) if fn == "neg" else call(fn, value, by)
    return value


def sum_over(value: Expr, axes: Collection[str], block: Block) -> Expr:
    """The sum of a product over some axes of a block, or their mean."""
    summed = [axis for axis in block.axes if axis in axes]
    for axis in reversed(summed):
        value = Reduce("sum", axis, value)
    for axis in summed:
        value = call("div", value, Size(axis)) if axis in block.counts else value
    return value
