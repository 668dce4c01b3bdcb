"""Small sizes to verify at: pairwise different, with ragged tiles, and large enough for every index.

A size is free in the mathematics, so any choice verifies the program; these make swapped dimensions,
missing tails and wrong groupings visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eqfuse.errors import BindError
from eqfuse.terms.bounds import (
    Outside,
    divides_by_zero,
    divisions_by_zero,
    never_inside,
    reads_outside,
)
from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.extents import count_of, sizes_in
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import ranks_of
from eqfuse.terms.functions import COMPARISONS
from eqfuse.terms.interpreter import Env, evaluate_expr
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Program,
    Reduce,
    Scalar,
    Size,
    call,
    once,
    outside_loads,
    walk,
)
from eqfuse.terms.parser import axes_of, sized_axes
from eqfuse.terms.printer import show
from eqfuse.verify.facts import facts
from eqfuse.verify.inputs import (
    Positions,
    integers_in,
    loads,
    plain_indices,
    roots,
    small_integers,
    small_shapes,
    strides,
)

SHORT = 2
"""One of three and more free axes is as short as this, a single block: one along which less is computed than along
others, as along the columns of a product of matrices."""
LARGEST_WORK = 60_000
"""Elements of all values together for one trial. Where they would have more, sizes are smaller: see `CHOICES`."""
LARGEST_DIVISOR = 64
"""Divisors of index expressions up to this size get an axis that is longer than they are."""
FEW_AXES, SEARCHED = 3, 8
"""Conditions on so many sizes are tried at all sizes up to the second."""
MOST_OF_COMPUTED = 128
"""Sizes up to this are tried for one of which another is made to be long enough."""
_ATTEMPTS = 6
"""Rounds of enlarging axes so that every read is inside its tensor."""
LONGEST_READ = 64
"""The last position made of data up to which a dimension is made that long."""


@dataclass(frozen=True)
class Choice:
    """Which extents axes get, in this order as far as they differ.

    Those of `reduced` are one less than a multiple of 4: the last block of 4 has several positions, or any fold of it
    would do. None of `free` is a multiple of 4: blocks are padded somewhere, or their masks would not be seen.
    `compared` are for axes that a condition compares with a reduced one (`j <= i`): they reach past its first tiles.
    Which axes have to differ is `apart`: all, those that a tensor has together, or none. Where `near`, axes are longer than
    small numbers that their positions are compared with or divided by; where this is "one", one of those that meet a number
    together is. The free axis along which least is computed has `least` positions: if these are few, where it is one of three and
    more, and less is computed along it than along others.
    """

    reduced: tuple[int, ...]
    free: tuple[int, ...]
    compared: tuple[int, ...]
    apart: Literal["all", "together", "none"] = "all"
    near: bool | Literal["one"] = True
    least: int = SHORT


USUAL = Choice((7, 11, 15, 19, 23, 27), (3, 5, 6, 9, 10, 13, 14, 18, 22), (9, 11, 13, 14, 15, 17, 19))
COMPACT = Choice((3, 5, 7, 6, 9, 11, 13), (3, 5, 6, 7, 9, 10, 13), (5, 6, 7, 9, 11, 13), "together")
"""For programs of many axes, whose product counts: each has several tiles of 2 and a ragged last one."""
SMALL = Choice((3, 5, 2, 6, 7), (3, 2, 5, 6, 7), (3, 5, 6, 2, 7), "together")
"""For long programs of many axes: few have more than one tile of 4."""
APART = Choice((3, 5, 2, 4, 6), (2, 4, 3, 5, 6), (4, 3, 5, 2, 6), "all", near=False)
"""As small as sizes can be that tell axes apart."""
LEAST = Choice((3,), (3,), (3,), "none")
"""For programs of so many that this is too much."""
ONE_NEAR = Choice((3,), (3,), (3,), "none", near="one")
"""And whose positions, added up, meet numbers that several long axes reach together, as those of a convolution do."""
ONE_LONG = Choice((3,), (SHORT,), (SHORT,), "none", near="one", least=3)
"""And that have many free axes: one of them has several blocks."""
CHOICES = (USUAL, COMPACT, SMALL, LEAST, ONE_NEAR, ONE_LONG)
"""In the order in which they are tried."""


class AxisClasses:
    """Axes that must have one extent, because they index one dimension of a tensor or are renamed copies.

    Names are joined with `join` and looked up with `find`; dimensions of tensors are names too.
    """

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def find(self, name: object) -> object:
        """The representative of `name`'s class."""
        parent = self._parent.setdefault(name, name)
        if parent != name:
            parent = self._parent[name] = self.find(parent)
        return parent

    def join(self, left: object, right: object) -> None:
        """Put two names into one class; the left representative stays."""
        self._parent[self.find(right)] = self.find(left)


def join_axes(classes: AxisClasses, program: Program, label: str = "") -> None:
    """Adds the axes of a program, as `(label, axis)`, and the dimensions `("dim", tensor, k)` they index."""
    axes = sized_axes(program)
    for axis in axes:
        classes.join((label, program.domains.get(axis, axis)), (label, axis))
    for load, k, index in plain_indices(program):
        classes.join(("dim", load.tensor, k), (label, index.name))
    for tensor in program.tensors:
        for k, declared in enumerate(tensor.axes):
            if declared is not None and (declared in axes or declared in program.domains.values()):
                classes.join(("dim", tensor.name, k), (label, declared))


def small_extents(
    program: Program,
    scalars: Mapping[str, object] | None = None,
    choices: Iterable[Choice] = CHOICES,
    least: Mapping[str, int] | None = None,
    pinned: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Extents for every axis (renamed copies included): different for axes that may differ.

    Reduced axes get the larger, odd ones, so that tiles of 2 and 3 leave a ragged last tile; an axis that
    is divided (`h // g`, `j % 16`) is longer than the divisor; one that is part of a computed index and whose length
    is declared has that length. They are those of the first of the `choices` at which not so much is computed that it takes long.
    Some axes have `least` so many positions, those that are `pinned` just so many.
    Raises BindError for a read that is outside its tensor at all sizes tried.
    """
    found: list[dict[str, int]] = []
    refused: BindError | None = None
    for choice in choices:
        try:
            found.append(_fitting(program, scalars or {}, choice, least, pinned))
        except BindError as error:  # sizes that differ may not fit, where equal ones do
            refused = refused or error
            continue
        if work(program, found[-1]) <= LARGEST_WORK:
            break
    if refused is not None and not found:
        raise refused
    return min(found, key=lambda extents: work(program, extents))


def work(program: Program, extents: Mapping[str, int]) -> int:
    """Elements of all values of a program for one trial, with those that combinations of states make."""
    counts = facts(program).varying + facts(program).combined
    return sum(count * prod(extents[axis] for axis in axes) for axes, count in counts)


def volume(program: Program, extents: Mapping[str, int]) -> int:
    """Elements of the largest value of a program for one trial."""
    return max((prod(extents[axis] for axis in axes) for axes, _ in facts(program).varying), default=1)


def _fitting(
    program: Program,
    scalars: Mapping[str, object],
    choice: Choice,
    least: Mapping[str, int] | None = None,
    pinned: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Extents with which every read is inside its tensor. Those that are too short get a longer one of the choice,
    or else, where only some lengths will do (`x[c//4*4 + q]`), just what is read."""
    classes = AxisClasses()
    join_axes(classes, program)
    integers = {**small_integers(program), **integers_in(scalars)}
    plain = axes_of_dimensions(program)
    fixed = {classes.find(("", axis)): n for axis, n in (pinned or {}).items()}
    for exact in (False, True):
        reached: dict[object, int] = {classes.find(("", axis)): n for axis, n in (least or {}).items()}
        for _ in range(_ATTEMPTS):
            found = joint_extents(
                classes, [("", program)], scalars, reached, choice, exact=exact, pinned=fixed
            )
            extents = {axis: extent for (_, axis), extent in found.items()}
            shapes = small_shapes(program, extents, scalars)
            outside = list(reads_outside(program, shapes, extents, integers))
            beyond = _reads_beyond_declared(program, extents, integers)
            wanted = [{classes.find(("", axis)): length for axis, length in beyond.items()}]
            for read in outside:
                axis = plain.get((read.load.tensor, read.dimension))
                wanted.append(_needed(read, axis, classes, extents))
            _, by_zero = divisions_by_zero(program, extents, integers)
            divisors = [part.axis for division in by_zero for part in _added(division.args[1])]
            wanted.append({classes.find(("", axis)): extents[axis] + 1 for axis in divisors})
            lengths = (*wanted[0].items(), *wanted[-1].items())
            if not outside and all(key in fixed or n <= reached.get(key, 0) for key, n in lengths):
                if by_zero:
                    raise divides_by_zero(program, by_zero[0])
                return extents
            for needed in wanted:
                reached |= {key: max(length, reached.get(key, 0)) for key, length in needed.items()}
    if by_zero:
        raise divides_by_zero(program, by_zero[0])
    if not outside:  # a condition keeps inside what each longer extent would take further, as `x[i + 2]`
        return extents
    read = outside[0]
    raise never_inside(program, read, plain.get((read.load.tensor, read.dimension)))


@once
def axes_of_dimensions(program: Program) -> Mapping[tuple[str, int], str]:
    """The axis that has the extent of a dimension: the one that is declared there, or that indexes it plainly."""
    known = {*sized_axes(program), *program.domains.values()}
    found = {
        (tensor.name, k): axis
        for tensor in program.tensors
        for k, axis in enumerate(tensor.axes)
        if axis is not None and axis in known
    }
    return found | {(load.tensor, k): index.name for load, k, index in plain_indices(program)}


def _needed(
    read: Outside, axis: str | None, classes: AxisClasses, extents: Mapping[str, int]
) -> dict[object, int]:
    """Least extents with which a read may be inside: of the axis that its dimension has, where it is beyond
    the end; of the axes whose sizes it adds, where it is before the start."""
    needed: dict[object, int] = {}
    if axis is not None and read.high >= extents[axis]:
        needed[classes.find(("", axis))] = read.high + 1
    if read.low < 0:
        for part in _added(read.load.index[read.dimension]):
            needed[classes.find(("", part.axis))] = extents[part.axis] - read.low
    return needed


def _added(expr: Expr, sign: int = 1) -> Iterator[Size]:
    """The sizes that make an index larger."""
    match expr:
        case Size() if sign > 0:
            yield expr
        case Call("sub", (left, right)):
            yield from _added(left, sign)
            yield from _added(right, -sign)
        case Call("neg", (of,)):
            yield from _added(of, -sign)
        case Call(_, args):
            for arg in args:
                yield from _added(arg, sign)


def short_axes(
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    extents: Mapping[str, int],
    scalars: Mapping[str, object],
) -> dict[str, int]:
    """Axes whose dimension is read beyond their end at computed positions, with the extents that such reads need."""
    integers = {**small_integers(program), **integers_in(scalars)}
    plain = axes_of_dimensions(program)
    found: dict[str, int] = {}
    for read in reads_outside(program, shapes, extents, integers):
        axis = plain.get((read.load.tensor, read.dimension))
        if axis is not None and read.high >= extents[axis]:
            found[axis] = max(read.high + 1, found.get(axis, 0))
    for axis, length in _reads_beyond_declared(program, extents, integers).items():
        found[axis] = max(length, found.get(axis, 0))
    return found


def _reads_beyond_declared(
    program: Program, extents: Mapping[str, int], integers: Mapping[str, int]
) -> dict[str, int]:
    """Axes that dimensions are declared with, where they are shorter than all that is read along them, with the extents that would
    do: those that nothing else has, and those of dimensions that are read at positions made of data (`u[n[k] % 5]`). Conditions on data
    may not keep such reads inside (`where(i < m[k], u[i + 1], 0)`)."""
    declared, alone = axes_of_dimensions(program), _declared_alone(program)
    whole = [t.name for t in program.tensors if t.dtype in LIMITS or t.name in program.integer_tensors]
    positions = Positions(extents, integers, dict.fromkeys(whole, LIMITS["i32"]))
    found: dict[str, int] = {}
    for load in loads(program) if declared else ():
        for k, index in enumerate(load.index):
            axis = declared.get((load.tensor, k))
            is_from_data = any(isinstance(part, Load) for part in walk(index))
            if axis is None or not is_from_data and (load.tensor, k) not in alone:
                continue
            bound = positions.whole(index)
            if bound is not None and extents[axis] <= bound[1] <= LONGEST_READ:
                found[axis] = max(bound[1] + 1, found.get(axis, 0))
    return found


@once
def _declared_alone(program: Program) -> Mapping[tuple[str, int], str]:
    """Dimensions whose axis is of declarations alone: nothing is read, reduced, counted or written along it."""
    used = {*axes_of(program.outputs), *sizes_in(program.computed.values()), *program.computed}
    used |= {*program.domains, *program.domains.values(), *program.lengths}
    return {
        (tensor.name, k): axis
        for tensor in program.tensors
        for k, axis in enumerate(tensor.axes)
        if axis is not None and axis not in used
    }


def joint_extents(
    classes: AxisClasses,
    programs: Iterable[tuple[str, Program]],
    scalars: Mapping[str, object],
    reached: Mapping[object, int] | None = None,
    choice: Choice = USUAL,
    *,
    exact: bool = False,
    pinned: Mapping[object, int] | None = None,
) -> dict[tuple[str, str], int]:
    """Extents by class for several labelled programs whose axes were joined; `reached` are least extents, or where
    they are `exact` the extents themselves, as those that are `pinned` always are, unless no other length than a declared
    one may do."""
    programs = tuple(programs)
    members: dict[object, list[tuple[str, str]]] = {}
    reduced: set[object] = set()
    compared: set[object] = set()
    atleast: dict[object, int] = dict(reached or {})
    varying: Counter[object] = Counter()
    chosen: dict[object, int] = {}
    together: list[set[object]] = []
    listed: dict[object, int] = {}
    computed: dict[object, tuple[str, Expr]] = {}

    def reach(keys: set[object], length: int) -> None:
        """Makes axes so long, or the one of them that is longest by now."""
        if choice.near == "one" and keys:
            keys = {max(keys, key=lambda key: (atleast.get(key, 0), key not in reduced, str(key)))}
        for key in keys if choice.near else ():
            atleast[key] = max(atleast.get(key, 0), length)

    for label, program in programs:
        chosen |= {classes.find((label, axis)): n for axis, n in fixed_lengths(program).items()}
        for axis, count in _listed(program):
            key = classes.find((label, axis))
            listed[key] = max(listed.get(key, 0), count)
        together += [{classes.find((label, axis)) for axis in axes} for axes in _axes_together(program)]
        integers = {**small_integers(program), **integers_in(scalars)}
        for axis, step in strides(program) if exact else ():
            if (positions := Positions({}, integers, {}).whole(step)) is not None:
                chosen.setdefault(classes.find((label, axis)), positions[1])
        computed |= {classes.find((label, axis)): (label, of) for axis, of in program.computed.items()}
        for axis in dict.fromkeys((*sized_axes(program), *program.domains.values())):
            members.setdefault(classes.find((label, axis)), []).append((label, axis))
        known = facts(program)
        for axes, count in known.varying:
            for key in {classes.find((label, axis)) for axis in axes}:
                varying[key] += count
        reduced |= {classes.find((label, axis)) for axis in known.reduced}
        for axes, by in sorted(known.divided, key=lambda each: len(each[0])):
            divisor = Positions({}, integers, {}).whole(by)
            if divisor is not None and 1 < divisor[1] <= LARGEST_DIVISOR:
                reach({classes.find((label, axis)) for axis in axes}, divisor[1] + 1)
        for each in known.compared:
            keys = {classes.find((label, axis)) for axis in each.axes}
            compared |= keys if len(keys) > 1 else set()
            reach(keys, each.reach)
    declared = {classes.find((label, axis)) for label, program in programs for axis in fixed_lengths(program)}
    chosen |= (reached or {}) if exact else {}
    chosen |= {key: n for key, n in (pinned or {}).items() if key not in declared}
    atleast |= {key: max(n, atleast.get(key, 0)) for key, n in listed.items()}
    chosen |= {key: max(n, chosen[key]) for key, n in listed.items() if key in chosen}

    def counted(key: object, sizes: Mapping[str, int]) -> int:
        """The extent that is computed of others, where these have some."""
        label, expr = computed[key]
        given = {
            axis: sizes.get(axis, chosen.get(classes.find((label, axis)), 1)) for axis in sizes_in([expr])
        }
        count: int | None = count_of(expr, given)
        return max(0, count or 0)

    for key, (label, expr) in computed.items():
        wanted = max(min(choice.reduced if key in reduced else choice.free), atleast.get(key, 0))
        of = sizes_in([expr])
        enough = (n for n in range(1, MOST_OF_COMPUTED) if counted(key, dict.fromkeys(of, n)) >= wanted)
        least_of = next(enough, 0)
        for base in {classes.find((label, axis)) for axis in of}:
            atleast[base] = max(atleast.get(base, 0), least_of)
        chosen.pop(key, None)

    def used(key: object) -> frozenset[int]:
        """Extents that others have from which this one has to be told."""
        others = set[object]().union(*(keys for keys in together if key in keys))
        apart = {"all": set(chosen), "together": others & chosen.keys(), "none": set[object]()}[choice.apart]
        return frozenset(chosen[other] for other in apart)

    free = [key for key in members if key not in reduced and key not in computed]
    if choice.least > SHORT:
        free = [key for key in free if varying[key]]
    least = min(free, key=lambda key: varying[key], default=None)
    is_less = len(free) > 2 and varying[least] < max(varying[key] for key in free)
    if least is not None and least not in compared and (is_less or choice.least > SHORT):
        chosen.setdefault(least, _unused((choice.least, *choice.free), atleast.get(least, 0), used(least)))

    def turn(key: object) -> tuple[bool, bool, int]:
        """Those along which most is computed get the smallest extents."""
        return key not in reduced, key not in reduced and key not in compared, -varying[key]

    for key in sorted((key for key in members if key not in chosen and key not in computed), key=turn):
        preferred = choice.reduced if key in reduced else choice.compared if key in compared else choice.free
        chosen[key] = _unused(preferred, atleast.get(key, 0), used(key))
    for key, (label, expr) in computed.items():
        if counted(key, {}) == 0:
            bases = {classes.find((label, axis)) for axis in sizes_in([expr])} - (pinned or {}).keys()
            chosen |= dict.fromkeys(bases, max((chosen[base] for base in bases), default=1))
    for key, (_, expr) in computed.items():
        chosen[key] = counted(key, {})
        if chosen[key] == 0:
            raise BindError(f"an axis of {show(expr)} positions has none at sizes that are tried")
    return {name: chosen[key] for key, names in members.items() for name in names}


@once
def _listed(program: Program) -> tuple[tuple[str, int], ...]:
    """Axes of which positions are listed in an index, and how many: there are as many, or the list would have positions
    that do not exist."""
    return tuple(
        (part.axis, program.lengths.get(program.domains.get(ranks, ranks), 1))
        for load in loads(program)
        for part in walk(*load.index)
        if isinstance(part, Reduce) and (ranks := ranks_of(part)) is not None
    )


@once
def fixed_lengths(program: Program) -> dict[str, int]:
    """The declared lengths of axes that are part of a computed index or compared with numbers, where no other length may
    do."""
    parts = {
        part.name
        for node in outside_loads(*roots(program))
        if isinstance(node, Call) and node.fn in COMPARISONS
        for part in outside_loads(node)
        if isinstance(part, Axis)
    } | {
        part.name
        for load in loads(program)
        for index in load.index
        if not isinstance(index, Axis)
        for part in walk(index)
        if isinstance(part, Axis)
    }
    return {axis: n for axis, n in program.lengths.items() if parts & {axis, *_copies(program, axis)}}


def _copies(program: Program, axis: str) -> list[str]:
    return [copy for copy, of in program.domains.items() if of == axis]


@once
def _axes_together(program: Program) -> tuple[frozenset[str], ...]:
    """The axes of each output, and those that index one tensor."""
    indexing = ({index.name for index in load.index if isinstance(index, Axis)} for load in loads(program))
    return tuple(map(frozenset, (*(output.axes for output in program.outputs), *indexing)))


def _unused(preferred: tuple[int, ...], atleast: int, used: frozenset[int]) -> int:
    for extent in preferred:
        if extent >= atleast and extent not in used:
            return extent
    extent = max(atleast, preferred[-1])
    while extent in used:
        extent += 1
    return extent


def constant_conditions(
    program: Program,
    extents: Mapping[str, int],
    scalars: Mapping[str, object],
    *,
    of_sizes: bool = False,
) -> list[tuple[Expr, object]]:
    """Comparisons of positions or sizes that have one value at all positions, other than of axes of declared length,
    and functions of them that take one form: divisions and roundings that give one number, limits, remainders, absolute values
    and bits that do nothing or the same everywhere. What they do at larger sizes is not seen. With each, the truth that a comparison
    has, or the form. Functions `of_sizes` alone, which always have one value, are left out unless they are asked for."""
    integers = integers_in(scalars)
    env = Env(FloatDomain("float64"), {}, integers, extents)
    fixed = {each for axis in fixed_lengths(program) for each in (axis, *_copies(program, axis))}
    found: list[tuple[Expr, object]] = []
    for each in facts(program).conditions:
        compares = each.node.fn in COMPARISONS
        if each.scalars <= integers.keys() and not each.axes <= fixed:
            if each.is_of_sizes and not of_sizes and not compares:
                continue
            value = _form(each.node, env)
            found += [] if value is None else [(each.node, value)]
    return found


def _form(node: Call, env: Env) -> object:
    """What a function does at all positions: the truth that a comparison has, the one number that a step gives, or which of its
    arguments, or their negatives, a limit, a remainder, an absolute value or bits are; None where that differs."""

    def at_all(expr: Expr) -> npt.NDArray[Any]:
        return np.asarray(evaluate_expr(expr, env).data)

    def same(*exprs: Expr) -> object:
        """Which of some expressions the function is everywhere."""
        values = (at_all(call("sub", node, expr)) for expr in exprs)
        return tuple(at for at, value in enumerate(values) if not value.any()) or None

    match node:
        case Call(fn, _) if fn in COMPARISONS:
            truth = at_all(node)
            return bool(truth.all()) if truth.all() or not truth.any() else None
        case Call("floordiv" | "mod" | "rshift", (_, by)) if _varies_by_size(by):
            return None
        case Call("floordiv" | "floor" | "round" | "rshift" | "sign", _):
            numbers = np.unique(at_all(node))
            return float(numbers[0]) if numbers.size == 1 else None
        case Call("maximum" | "minimum", args):
            return same(*args) if any(isinstance(arg, Const) for arg in args) else None
        case Call("abs", (inner,)):
            return same(inner, call("neg", inner))
        case Call("relu", (inner,)):
            return same(inner, Const(0))
        case Call("bitand" | "bitor" | "bitxor", (left, right)):
            return same(left, right, Const(0), call("add", left, right))
        case Call("mod", (inner, _)) | Call(_, (inner,)):
            return same(inner)
    return None


def sizes_that_turn(
    node: Expr,
    had: object,
    domains: Mapping[str, str],
    scalars: Mapping[str, object],
    searched: Sequence[int],
) -> dict[str, int] | None:
    """Sizes at which a function of positions and sizes is somewhere what it was not: small ones, or of one axis beside small ones
    one of those `searched`; None where none of few axes are such."""
    parts = list(walk(node))
    names = {part.name for part in parts if isinstance(part, Axis)}
    names |= {part.axis for part in parts if isinstance(part, Size)}
    axes = sorted({domains.get(name, name) for name in names})
    integers = integers_in(scalars)
    known = all(part.name in integers for part in parts if isinstance(part, Scalar))
    if not (isinstance(node, Call) and known and len(axes) <= FEW_AXES):
        return None
    small = product(range(1, SEARCHED + 1), repeat=len(axes))
    large = (
        tuple(n if at == place else 2 for at in range(len(axes)))
        for n in searched
        for place in range(len(axes))
    )
    for sizes in chain(small, large):
        chosen = dict(zip(axes, sizes, strict=True))
        extents = {**chosen, **{name: chosen[domains.get(name, name)] for name in names}}
        if _form(node, Env(FloatDomain("float64"), {}, integers, extents)) != had:
            return chosen
    return None


def _varies_by_size(expr: Expr) -> bool:
    return any(isinstance(part, Axis | Size) for part in walk(expr))
