"""Reads outside a tensor, found from sizes and scalars before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from eqfuse.errors import BindError, Span, locate
from eqfuse.fast_dataclass import dataclass
from eqfuse.terms import integers
from eqfuse.terms.extents import shapes_of
from eqfuse.terms.folds import contributions, fold_of, identity, ranks_of
from eqfuse.terms.intervals import NEGATED
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Output,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    children,
    free_axes,
    once,
    replaced,
    walk,
    ways,
)
from eqfuse.terms.printer import show
from eqfuse.terms.ranges import ONE, Affine, Box, linear, whole_number

MAX_POSITIONS = 1 << 20
"""Positions that are tried one by one where ranges alone do not decide."""

MOST_PASSED = 1024
"""How many sizes of a program are remembered that it reads inside of its tensors for."""


@dataclass(frozen=True)
class Guard:
    """A condition that has the value `holds` wherever the read under it counts."""

    condition: Expr
    holds: bool


Guards = tuple[Guard, ...]

Node = TypeVar("Node", Load, Reduce, Call)


def check_bounds(
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    extents: Mapping[str, int],
    scalars: Mapping[str, Any],
) -> None:
    """Raises BindError for a read that is outside its tensor at some position, or an integer division by 0.

    Reads under a `where` (or after an `and`) count only where its condition selects them; a condition on data that
    says nothing of the positions read guards nothing. What sizes and scalars do not decide (gathers, positions
    compared with data) is accepted: outside positions read as 0. What has passed is not looked at again.
    """
    decides, passed = _deciding(program)
    kind = decides(shapes, extents, scalars)
    if kind in passed:
        return
    by_zero, counting = divisions_by_zero(program, extents, scalars)
    if counting:
        raise divides_by_zero(program, counting[0])
    for read in reads_outside(program, shapes, extents, scalars):
        raise _error(program, read)
    if not by_zero:
        if len(passed) >= MOST_PASSED:
            passed.clear()
        passed.add(kind)


def divisions_by_zero(
    program: Program, extents: Mapping[str, int], scalars: Mapping[str, Any]
) -> tuple[bool, list[Call]]:
    """Whether there are divisions of integers by 0, and those that count."""
    box = Box.at(extents, scalars)
    by_zero: dict[Expr, Call] = {n: n for n in _divisions(program) if box.whole(n.args[1]) == (0, 0)}
    reached = _guarded(_roots(program), by_zero) if by_zero else ()
    return bool(by_zero), [node for node, guards in reached if _reached(guards, box)]


def divides_by_zero(program: Program, division: Call) -> BindError:
    """The error of a division by 0 that counts."""
    span = locate(program.source, show(division)) or locate(program.source, show(division.args[1]))
    return BindError(
        f"{show(division)} divides by 0", source=program.source, span=span, hint="give a divisor above 0"
    )


Sizes = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, int], Mapping[str, Any]], tuple[Any, ...]]
"""The numbers that decide whether a program reads inside of its tensors, from shapes, extents and scalars."""


@once
def _deciding(program: Program) -> tuple[Sizes, set[tuple[Any, ...]]]:
    """What decides whether `check_bounds` raises where nothing is divided by 0, and where it did not."""
    moved, divisors = _moved(program), [node.args[1] for node in _divisions(program)]
    dims = [
        (load.tensor, n) for load, _ in moved for n, at in enumerate(load.index) if not isinstance(at, Axis)
    ]
    conditions = [guard.condition for _, guards in moved for guard in guards]
    indices = [at for load, _ in moved for at in load.index if not isinstance(at, Axis)]
    nodes = list(walk(*indices, *conditions, *divisors))
    axes = {node.name for node in nodes if isinstance(node, Axis)}
    axes |= {node.axis for node in nodes if isinstance(node, Size | Reduce)}
    axes |= {ranks for node in nodes if isinstance(node, Reduce) and (ranks := ranks_of(node)) is not None}
    numbers = sorted({node.name for node in nodes if isinstance(node, Scalar)})
    axes |= {axis for output in program.outputs if output.name in program.states for axis in output.axes}
    own = sorted(axes)
    places = [place for place in dict.fromkeys(dims) if place[0] not in program.states]

    def decides(
        shapes: Mapping[str, tuple[int, ...]], extents: Mapping[str, int], scalars: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        return (
            *[shapes[name][dimension] for name, dimension in places],
            *[extents.get(axis) for axis in own],
            *[scalars.get(name) for name in numbers],
        )

    return decides, set()


@dataclass(frozen=True)
class Beyond:
    """A read `offset` positions behind those of an axis, with nothing said about which positions of the axis read it:
    `off[s + 1]`. The dimension has so many elements more than the axis has positions; and so many `times` as many as it has
    (`x[c + N(c)]`), or as a `scalar` says (`x[c + h]`)."""

    load: Load
    dimension: int
    axis: str
    offset: int
    times: int = 0
    scalar: str = ""

    @property
    def is_past_the_end(self) -> bool:
        """Whether the read is outside a dimension as long as the axis at every position, so that no condition keeps it inside."""
        return self.times > 0 and self.offset >= 0

    def more(self, scalars: Mapping[str, Any]) -> int | None:
        """The elements beside a multiple of the positions; None where the scalar is not known."""
        if not self.scalar:
            return self.offset
        number = whole_number(scalars.get(self.scalar))
        return None if number is None else self.offset + max(number, 0)


@lru_cache(256)
def reads_beyond(outputs: tuple[Output, ...], domains: tuple[tuple[str, str], ...]) -> tuple[Beyond, ...]:
    """The reads behind the positions of an axis that no condition on these positions guards, or could guard; `domains` are axes that
    are as long as others."""
    found: dict[Beyond, None] = {}
    for load, guards in guarded_reads([output.expr for output in outputs]):
        for dimension, index in enumerate(load.index):
            ahead = _ahead(index, dict(domains))
            if ahead is None:
                continue
            read = Beyond(load, dimension, *ahead)
            if not any(tells(guard.condition, read.axis) for guard in guards):
                found[read] = None
            elif read.is_past_the_end:  # a condition may keep the offset inside, and not the multiple
                found[replace(read, offset=0)] = None
    return tuple(found)


def _ahead(index: Expr, domains: Mapping[str, str]) -> tuple[str, int, int, str] | None:
    """The axis, the offset, the times and the scalar of an index that is behind the positions of an axis (see `Beyond`)."""
    form = linear(index)
    terms = form.atoms
    axes = [node.name for node in terms if isinstance(node, Axis)]
    if len(axes) != 1 or terms.pop(Axis(axes[0])) != 1:
        return None
    base = domains.get(axes[0], axes[0])
    sizes = [n for n in terms if isinstance(n, Size) and domains.get(n.axis, n.axis) == base]
    times, offset = sum(terms.pop(size) for size in sizes), form.constant
    scalar = [node.name for node, count in terms.items() if isinstance(node, Scalar) and count == 1]
    if (
        len(scalar) != len(terms)
        or len(scalar) > 1
        or not (times > 0 or (times == 0 and offset > 0) or scalar)
    ):
        return None
    return axes[0], offset, times, "".join(scalar)


@once
def longer_dimensions(program: Program) -> dict[tuple[str, int], dict[str, Beyond]]:
    """The dimensions that have more elements than an axis that indexes them has positions, unless they are declared
    to have that axis: by axis, the read that goes furthest. Such are those of another axis that are read along one whose
    positions are counted of sizes, as `x[b, c]` of `x: f32[b, d]` and `c: axis[N(d) // 2]`."""
    declared = {tensor.name: tensor.axes for tensor in program.tensors}
    found: dict[tuple[str, int], dict[str, Beyond]] = {}
    for read in sorted(
        reads_beyond(program.outputs, tuple(program.domains.items())),
        key=lambda r: (r.times, r.scalar, r.offset),
    ):
        axis = program.domains.get(read.axis, read.axis)
        if read.load.tensor not in program.states and declared[read.load.tensor][read.dimension] not in (
            axis,
            read.axis,
        ):
            found.setdefault((read.load.tensor, read.dimension), {})[axis] = read
    nodes = walk(*(output.expr for output in program.outputs)) if program.computed else ()
    for load in (node for node in nodes if isinstance(node, Load) and node.tensor not in program.states):
        for dimension, index in enumerate(load.index):
            own = declared[load.tensor][dimension]
            if own is not None and isinstance(index, Axis):
                axis = program.domains.get(index.name, index.name)
                if axis in program.computed and program.domains.get(own, own) != axis:
                    part = Beyond(load, dimension, index.name, 0)
                    found.setdefault((load.tensor, dimension), {}).setdefault(axis, part)
    return found


def check_longer(
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    extents: Mapping[str, int],
    scalars: Mapping[str, Any],
) -> None:
    """Raises BindError for a dimension that is too short for a read behind the positions of an axis."""
    for (tensor, dimension), reads in longer_dimensions(program).items():
        for axis, read in reads.items():
            first = read.times * extents[axis] + (read.more(scalars) or 0)
            size, last = shapes[tensor][dimension], first + extents[axis] - 1
            if extents[axis] and last >= size:
                raise _error(program, Outside(read.load, dimension, size, first, last))


def _telling(guards: Guards, index: Expr) -> Guards:
    """The conditions that may keep an index inside: not those on data that say nothing of the positions it has."""
    return tuple(guard for guard in guards if is_telling(guard.condition, free_axes(index)))


def is_telling(condition: Expr, axes: Collection[str]) -> bool:
    """Whether a condition may keep an index over these axes inside: it is about positions of one of them, or reads no
    data at all."""
    if not axes or any(tells(condition, axis) for axis in axes):
        return True
    return not any(isinstance(node, Load | Local | Reduce) for node in walk(condition))


def tells(condition: Expr, axis: str) -> bool:
    """Whether a condition compares a position of the axis itself, rather than what is read there."""
    seen: set[Expr] = set()
    stack = [condition]
    while stack:
        node = stack.pop()
        if node is Axis(axis):
            return True
        if node not in seen and not isinstance(node, Load | Reduce):
            seen.add(node)
            stack += children(node)
    return False


def check_selections(program: Program, extents: Mapping[str, int], scalars: Mapping[str, Any]) -> None:
    """Raises BindError where a position is selected from an axis without any, as by `argmax`.

    Under a `where` a selection counts only where its condition selects it, which sizes and scalars have to tell.
    """
    for reduce, guards in _selections(program):
        if extents[reduce.axis] == 0:
            box = Box.at(extents, scalars)
            if _reached(guards, box):
                raise _no_position(program, reduce)


def selected_axes(program: Program) -> dict[str, str]:
    """The axes that have to have positions whatever the inputs are, with the reduction that selects one."""
    found = _selections(program)
    return {_base(program, each): each.op.partition(".")[0] for each, guards in found if not guards}


def _base(program: Program, reduce: Reduce) -> str:
    return program.domains.get(reduce.axis, reduce.axis)


@once
def _selections(program: Program) -> tuple[tuple[Reduce, Guards], ...]:
    """Reductions that select a position of their axis, as `argmax` does, and have none where the axis is empty."""
    selecting: dict[Expr, Reduce] = {}
    for node in _reduces(program):
        found = fold_of(node.op)
        if found is not None and not found[0].ranks:
            fold, index = found
            selects = fold.selects(index) and contributions(node)[index] is Axis(node.axis)
            if selects and math.isinf(fold.identity[index].value):
                selecting[node] = node
    return tuple(_guarded(_roots(program), selecting)) if selecting else ()


def _reached(guards: Guards, box: Box) -> bool:
    """Whether all guards hold at some position; False where that cannot be told."""
    axes = sorted(frozenset[str]().union(*(free_axes(guard.condition) for guard in guards)))
    if prod(box.extents[axis] for axis in axes) > MAX_POSITIONS:
        return False
    found = _where(guards, axes, box)
    return found is not None and bool(found[0].any())


def _no_position(program: Program, reduce: Reduce) -> BindError:
    name, axis = reduce.op.partition(".")[0], _base(program, reduce)
    return BindError(
        f"{name} over axis {axis!r}, which is empty, has no position to give",
        source=program.source,
        span=locate(program.source, f"{name}[{reduce.axis}]") or locate(program.source, name),
        hint=f"give tensors that have positions of {axis!r}, or guard it: where(N({axis}) > 0, {name}[{axis}](...), -1)",
    )


@dataclass(frozen=True)
class Outside:
    """A read at positions `low` to `high` of a dimension of `size` positions."""

    load: Load
    dimension: int
    size: int
    low: int
    high: int


def reads_outside(
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    extents: Mapping[str, int],
    scalars: Mapping[str, Any],
) -> Iterator[Outside]:
    """The reads that leave their tensor at some position for certain (see `check_bounds`)."""
    box = Box.at(extents, scalars)
    shapes = {**shapes, **shapes_of(program, extents)} if program.in_order else shapes
    for load, guards in _moved(program):
        for dimension, (index, size) in enumerate(zip(load.index, shapes[load.tensor], strict=True)):
            if isinstance(index, Axis):
                continue
            found = _outside(index, size, _telling(guards, index), box)
            found = found or _outside_past_the_end(index, size, guards, box)
            if found is not None:
                yield Outside(load, dimension, size, *found)


def _outside_past_the_end(index: Expr, size: int, guards: Guards, box: Box) -> tuple[int, int] | None:
    """The range in which an index is outside because a list, as that of a topk, has more ranks than positions: what is
    past the end has the identity of its fold."""
    for axis, ranks in _lists(index):
        if ranks is None or box.extents[ranks] <= box.extents[axis]:
            continue
        alike = {
            node: identity(node.op)
            for node in walk(index, *(guard.condition for guard in guards))
            if isinstance(node, Reduce) and node.axis == axis and ranks_of(node) == ranks
        }
        past = Guard(call("ge", Axis(ranks), Size(axis)), True)
        there = [Guard(replaced(guard.condition, alike), guard.holds) for guard in guards]
        at = replaced(index, alike)
        if (found := _outside(at, size, (*_telling(tuple(there), at), past), box)) is not None:
            return found
    return None


@lru_cache(1024)
def _lists(index: Expr) -> tuple[tuple[str, str | None], ...]:
    """The axes of lists that an index reads, and of their ranks."""
    lists = (node for node in walk(index) if isinstance(node, Reduce) and ranks_of(node) is not None)
    return tuple(dict.fromkeys((each.axis, ranks_of(each)) for each in lists))


def never_inside(program: Program, read: Outside, axis: str | None) -> BindError:
    """The error for a read that no sizes make right; `axis` is the one that indexes the dimension plainly."""
    size = str(read.size) if axis is None else f"N({program.domains.get(axis, axis)})"
    hint = f"guard the read: {_guarded_text(read, size)}"
    if axis is not None and read.low >= read.size:  # which a guard would rule out everywhere
        hint = (
            f"the dimension has the size of {axis!r}, which it is declared with or read along: "
            f"give what is read of it axes of their own, as `{axis}: axis[N(n) // 2]` of a dimension declared `n`"
        )
    return BindError(
        f"{show(read.load)} reads outside dimension {read.dimension} of {read.load.tensor!r}, whatever its size",
        source=program.source,
        span=_span(program, read.load),
        hint=hint,
    )


def _guarded_text(read: Outside, size: str) -> str:
    """How to write a read so that it counts only where it is inside; `size` is how to write the size."""
    index = show(read.load.index[read.dimension])
    limits = [f"{index} >= 0"] * (read.low < 0) + [f"{index} < {size}"] * (read.high >= read.size)
    condition = limits[0] if len(limits) == 1 else " & ".join(f"({limit})" for limit in limits)
    return f"where({condition}, {show(read.load)}, 0)"


def _span(program: Program, load: Load) -> Span | None:
    return locate(program.source, show(load)) or locate(program.source, load.tensor)


def _error(program: Program, read: Outside) -> BindError:
    reads = f"position {read.low}" if read.low == read.high else f"positions {read.low} to {read.high}"
    guard = f"give tensors that fit, or guard the read: {_guarded_text(read, str(read.size))}"
    return BindError(
        f"{show(read.load)} reads {reads} of dimension {read.dimension} of {read.load.tensor!r}, "
        f"which has size {read.size}",
        source=program.source,
        span=_span(program, read.load),
        hint=guard if free_axes(read.load.index[read.dimension]) else "give a tensor that fits",
    )


def _roots(program: Program) -> list[Expr]:
    return [output.expr for output in program.outputs]


@once
def _divisions(program: Program) -> tuple[Call, ...]:
    """The divisions of integers."""
    calls = (node for node in walk(*_roots(program)) if isinstance(node, Call))
    return tuple(call for call in calls if call.fn in ("floordiv", "mod"))


@once
def _reduces(program: Program) -> tuple[Reduce, ...]:
    return tuple(node for node in walk(*_roots(program)) if isinstance(node, Reduce))


@once
def _moved(program: Program) -> tuple[tuple[Load, Guards], ...]:
    """The `guarded_reads` of a program."""
    return tuple(guarded_reads(_roots(program)))


def outside_error(name: str, position: int, extent: int) -> BindError:
    """The error for a position in data that is outside a dimension of an input."""
    return BindError(
        f"{name!r}: position {position} is outside a dimension of {extent}",
        hint=f"check the index tensors and sizes: positions run from 0 to {extent - 1}",
    )


def guarded_reads(roots: Sequence[Expr]) -> Iterator[tuple[Load, Guards]]:
    """Loads that are read elsewhere than at positions, with what guards each way to them."""
    loads = (node for node in walk(*roots) if isinstance(node, Load))
    moved = (load for load in loads if not all(isinstance(part, Axis) for part in load.index))
    return _guarded(roots, {load: load for load in moved})


def _guarded(roots: Sequence[Expr], wanted: Mapping[Expr, Node]) -> Iterator[tuple[Node, Guards]]:
    """The nodes that are wanted, with what guards each way to them: ways may be many."""
    return ((wanted[node], guards) for node, guards in ways(roots, wanted.__contains__, _guarded_children))


def _guarded_children(node: Expr, guards: Guards) -> Iterator[tuple[Expr, Guards]]:
    match node:
        case Call("where", (condition, left, right)):
            yield condition, guards
            yield left, _with(guards, condition, True)
            yield right, _with(guards, condition, False)
        case Call("and" | "or" as fn, (left, right)):
            yield left, guards
            yield right, _with(guards, left, fn == "and")
        case Reduce(_, axis, body):
            yield body, tuple(guard for guard in guards if axis not in free_axes(guard.condition))
        case _:
            for child in children(node):
                yield child, guards


def _with(guards: Guards, condition: Expr, holds: bool) -> Guards:
    """Guards and one more, each part of a conjunction by itself: inside of a reduction over an axis of one part, the
    others still hold."""
    match condition:
        case Call("not", (part,)):
            return _with(guards, part, not holds)
        case Call("and" | "or" as fn, (left, right)) if holds == (fn == "and"):
            return _with(_with(guards, left, holds), right, holds)
    guard = Guard(condition, holds)
    return guards if guard in guards else (*guards, guard)


def _outside(index: Expr, size: int, guards: Guards, box: Box) -> tuple[int, int] | None:
    """The range of an index that leaves 0..size-1 for certain; None where it does not, or may not."""
    form = box.affine(index)
    bounds = box.whole(index)
    if form is None or bounds is None or (bounds[0] >= 0 and bounds[1] < size):
        return None
    facts = [fact for guard in guards for fact in _facts(guard.condition, guard.holds, box)]
    to_end = Affine({ONE: size - 1}).plus(form, -1)
    if _is_nonnegative(form, facts, box) and _is_nonnegative(to_end, facts, box):
        return None
    axes = free_axes(index).union(*(free_axes(guard.condition) for guard in guards))
    if prod(box.extents[axis] for axis in axes) <= MAX_POSITIONS:
        return _tried(index, size, guards, sorted(axes), box)
    # Over distinct axes an affine index attains both ends of its range.
    return bounds if not guards and all(isinstance(atom, Axis) for atom in form.atoms) else None


def _facts(condition: Expr, holds: bool, box: Box) -> list[Affine]:
    """Affine forms that are at least 0 where a comparison has the value `holds`."""
    if not isinstance(condition, Call) or condition.fn not in NEGATED:
        return []
    lower, upper = map(box.affine, condition.args)
    if lower is None or upper is None:
        return []
    up, down, one = upper.plus(lower, -1), lower.plus(upper, -1), Affine({ONE: 1})
    return {
        "lt": [up.plus(one, -1)],
        "le": [up],
        "gt": [down.plus(one, -1)],
        "ge": [down],
        "eq": [up, down],
        "ne": [],
    }[condition.fn if holds else NEGATED[condition.fn]]


def _is_nonnegative(form: Affine, facts: Sequence[Affine], box: Box) -> bool:
    return any(box.bounds(rest)[0] >= 0 for rest in (form, *(form.plus(fact, -1) for fact in facts)))


def _tried(index: Expr, size: int, guards: Guards, axes: Sequence[str], box: Box) -> tuple[int, int] | None:
    found = _where(guards, axes, box, index)
    if found is None:
        return None
    reached, values = found
    attained = values[index]
    if attained is None:
        return None
    positions = np.broadcast_to(attained, reached.shape)[reached]
    if positions.size == 0 or (positions.min() >= 0 and positions.max() < size):
        return None
    return int(positions.min()), int(positions.max())


def _where(
    guards: Guards, axes: Sequence[str], box: Box, *exprs: Expr
) -> tuple[npt.NDArray[Any], Mapping[Expr, npt.NDArray[Any] | None]] | None:
    """At which positions of the axes all guards hold, and the values of expressions at all positions; None where a
    guard is unknown."""
    values: dict[Expr, npt.NDArray[Any] | None] = {}
    shape = tuple(box.extents[axis] for axis in axes)
    grid = dict(zip(axes, np.indices(shape, sparse=True), strict=True))
    for node in walk(*exprs, *(guard.condition for guard in guards)):
        values[node] = _value(node, values, grid, box)
    reached = np.ones(shape, bool)
    for guard in guards:
        condition = values[guard.condition]
        if condition is None:
            return None
        reached &= condition == guard.holds
    return reached, values


def _value(
    node: Expr, values: Mapping[Expr, npt.NDArray[Any] | None], grid: Mapping[str, npt.NDArray[Any]], box: Box
) -> npt.NDArray[Any] | None:
    match node:
        case Axis(name):
            return grid.get(name)
        case Call(fn, args) if fn in integers.INTEGER_FUNCTIONS or fn in integers.TRUTH_FUNCTIONS:
            parts = [part for arg in args if (part := values[arg]) is not None]
            return integers.call(fn, tuple(parts)) if len(parts) == len(args) else None
        case Const(bool(value)):
            return np.asarray(value)
        case Const() | Scalar() | Size():
            form = box.affine(node)
            return None if form is None else np.asarray(form.constant)
        case _:
            return None
