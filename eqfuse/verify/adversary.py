"""Draws that look for what tells two programs apart: other sizes, other integers, values at the thresholds of either.

Random residues decide equality at the branches that are taken. Which branches are taken depends on sizes, on integer
scalars and on the order of real values, and a program that differs in one branch alone passes where none takes it. So
both programs are also run

- at one position an axis, at a few, at odd sizes, at the numbers that sizes are compared with, and beyond every number of
  either program that positions or sizes meet (`j > 100`), as far as `MOST_ELEMENTS` allows;
- with integer scalars that are 1, that are the numbers of either program and their neighbours, and at random;
- on real tensors whose elements are those numbers, near them, equal to elements of other tensors or to scalars, nearly
  equal to one another, small integers, 0, and of magnitudes from 1e-30 to 1e30; and on integer tensors of wide range, where
  they are no indices.

What is equal has equal residues as well: an element that is 3 has the residue of 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from eqfuse.terms.domain import BRANCHING
from eqfuse.terms.dtypes import LIMITS
from eqfuse.terms.functions import COMPARISONS, ON_BITS, ROUNDINGS
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
    children,
    once,
    outside_loads,
    walk,
)
from eqfuse.terms.parser import axes_of
from eqfuse.verify.facts import whole_reductions
from eqfuse.verify.field.array import FieldArray
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.field.modular import Reals, Truths
from eqfuse.verify.field.uninterpreted import WHOLE
from eqfuse.verify.inputs import InputSpec, roots
from eqfuse.verify.reals import AnySize
from eqfuse.verify.sampling import Inputs, Places
from eqfuse.verify.sizes import (
    APART,
    CHOICES,
    COMPACT,
    LEAST,
    USUAL,
    Choice,
    constant_conditions,
    sizes_that_turn,
)

LARGEST_CONSTANT, LARGEST_SIZE = 4096, 2**17
"""Positions and sizes are taken beyond numbers up to the first; of two programs, where other axes have one position, up to the second."""
SHUFFLED = 3
"""Runs at small sizes in an order of their own."""
ALONE = 3
"""Axes of two programs that are taken longer than one position alone."""
ONES = Choice((1,), (1,), (1,), "none", near=False)
MOST_ELEMENTS = 2_000_000
"""Elements of the largest value over all trials of such a run: where it would have more, it has fewer trials."""
FAR_SIZES, FAR_TRIALS = 4, 8
"""Of the large ones, how many are taken, and trials there."""
EXACT_SIZES, SMALL = 8, 9
"""Of the numbers that sizes are compared with, how many are taken as sizes; those below the second for all axes."""
_ROUNDING = frozenset({"round", *ROUNDINGS})
"""Functions that turn at halves."""
MOST_COPIED = 24
"""Tensors and scalars that elements are copied from."""
KINDS = 8
"""Trials take these kinds of real values in turn (see `_reals`)."""


MOST_TRIALS, ELEMENTS = 256, 120_000
"""Trials that look for a difference at small sizes, and the elements of the largest value over all of them."""


@dataclass(frozen=True)
class Setting:
    """Sizes and integers of a trial that looks for a difference.

    `choice`: the sizes of axes.
    `integers`: the values of integer scalars.
    `least`: for each program, the least extents of axes whose positions meet constants.
    `pinned`: the extents of axes that have just these.
    `is_far`: one axis is longer than the others by far; few trials are enough to tell what sizes decide.
    `smaller`: sizes for programs whose values would have too many elements at `choice`.
    """

    choice: Choice
    integers: Mapping[str, int]
    least: tuple[Mapping[str, int], ...] = ()
    pinned: Mapping[str, int] = field(default_factory=dict)
    is_far: bool = False
    smaller: tuple[Choice, ...] = ()

    def choices(self, rng: np.random.Generator) -> tuple[Choice, ...]:
        """Sizes, and smaller ones for where these are too many. Of two programs, beside an axis that has a size of its own,
        others are short, in any order, and reach past the numbers that their positions meet."""
        if self.choice is not APART:
            return (self.choice, *self.smaller)
        sizes = tuple(int(n) for n in rng.permutation(np.arange(2, 8)))
        return Choice(sizes, sizes[::-1], sizes), APART, LEAST


def many_trials(volume: int) -> int:
    """Trials of programs that are small: a branch and what shows it are rarely met together."""
    return min(MOST_TRIALS, ELEMENTS // max(1, volume))


def constants(*programs: Program) -> tuple[float, ...]:
    """The numbers in programs, with both signs, without infinities, 0 and 1 included, and a half where something is rounded; in
    order of size."""
    nodes = list(walk(*(root for program in programs for root in roots(program))))
    halves = [0.5] if any(isinstance(node, Call) and node.fn in _ROUNDING for node in nodes) else []
    turning = [float(number) for node in nodes for number in turning_points(node)]
    return with_both_signs(
        [*halves, *turning, *(float(node.value) for node in nodes if isinstance(node, Const))]
    )


def with_both_signs(numbers: Iterable[float]) -> tuple[float, ...]:
    """The finite ones of the numbers, 0 and 1, each with both signs; in order of size."""
    finite = {0.0, 1.0, *filter(math.isfinite, numbers)}
    return tuple(sorted(finite | {-value for value in finite}, key=lambda value: (abs(value), value)))


def branches_on_data(program: Program) -> bool:
    """Whether a program goes one way or another by a number that it reads or computes; extremes of an axis apart."""
    return any(
        isinstance(node, Call)
        and (node.fn in BRANCHING or node.fn in WHOLE)
        and any(isinstance(part, Load | Reduce | Scalar) for part in walk(node))
        for node in walk(*roots(program))
    )


def decided_by_sizes(program: Program) -> bool:
    """Whether a reduction of numbers that positions or sizes make decides something, as a variance of positions."""
    return any(
        isinstance(node, Call)
        and node.fn in BRANCHING
        and any(isinstance(part, Reduce) for part in walk(node))
        and any(isinstance(part, Axis | Size) for part in outside_loads(node))
        for node in walk(*roots(program))
    )


def met_by_positions(program: Program, largest: int = LARGEST_CONSTANT) -> dict[str, int]:
    """By axis, the greatest number, up to the `largest`, that its positions or its size meet in a function, outside of indices."""
    found: dict[str, int] = {}
    for node in outside_loads(*roots(program)):
        if not isinstance(node, Call) or len(node.args) > 2:
            continue
        parts, whole = _parts_and_numbers(node, program, largest)
        for part in parts:
            name = part.name if isinstance(part, Axis) else part.axis if isinstance(part, Size) else None
            if name is not None and whole:
                axis = program.domains.get(name, name)
                found[axis] = max(found.get(axis, 0), *whole)
    return found


def sizes_met(*programs: Program, largest: int = LARGEST_CONSTANT) -> dict[str, tuple[int, ...]]:
    """By axis, the sizes up to the `largest` that comparisons turn on: the numbers that a size or positions (`j < 5`) are compared with, and
    those that are one more."""
    found: dict[str, set[int]] = {}
    for program in programs:
        for node in outside_loads(*roots(program)):
            if isinstance(node, Call) and node.fn in COMPARISONS:
                parts, whole = _parts_and_numbers(node, program, largest)
                for part in parts:
                    name = (
                        part.name if isinstance(part, Axis) else part.axis if isinstance(part, Size) else None
                    )
                    if name is not None and whole:
                        longer = {n + 1 for n in whole}
                        found.setdefault(program.domains.get(name, name), set()).update(whole | longer)
    return {axis: tuple(sorted(numbers)) for axis, numbers in found.items()}


def _parts_and_numbers(node: Expr, program: Program, largest: int) -> tuple[set[Expr], set[int]]:
    """What a function is given, as far as it is arithmetic of positions, sizes, integers and numbers, and the whole numbers in it
    that sizes are taken to. Integers that are read are arithmetic too, and what indexes them is not."""
    arithmetic = _arithmetic(program)
    parts: set[Expr] = {node}
    waiting = list(children(node))
    while waiting:
        part = waiting.pop()
        if part not in parts and part in arithmetic:
            parts.add(part)
            match part:
                case Reduce(_, axis, _):
                    parts.add(Axis(axis))
                case Call():
                    waiting += children(part)
    found = (abs(part.value) for part in parts if isinstance(part, Const) and np.isfinite(part.value))
    numbers = {int(number) for number in found if 1 <= number <= largest}
    numbers |= {n for part in parts for n in turning_points(part) if n <= largest}
    for part in parts:
        match part:
            case Call("floordiv", (_, Const(int(divisor)))):  # i // 4 < 3 turns at 12
                numbers |= {n * divisor for n in numbers if 0 < n * divisor <= largest}
    return parts, numbers


def turning_points(node: Expr) -> tuple[int, ...]:
    """Whole numbers from which on a shift, a function of bits or a rounding to an integer dtype does something else."""
    match node:
        case Call("rshift", (_, Const(int(by)))) if 0 <= by < 63:
            return (2**by,)
        case Call("bitand" | "bitor" | "bitxor", (_, Const(int(mask)))) | Call(
            "bitand" | "bitor" | "bitxor", (Const(int(mask)), _)
        ) if mask > 0:
            return (mask & -mask, 2 ** mask.bit_length())
        case Call(fn, _) if fn in ROUNDINGS:
            low, high = LIMITS[fn]
            return (high + 1, 1 - low)
    return ()


@once
def integer_tensors(program: Program) -> frozenset[str]:
    """Tensors of integers."""
    declared = (tensor.name for tensor in program.tensors if tensor.dtype in LIMITS)
    return frozenset((*program.integer_tensors, *declared))


_ARITHMETIC = frozenset(
    {"add", "sub", "mul", "div", "neg", "floordiv", "mod", "maximum", "minimum", "floor", "round"}
    | {"abs", "relu", "sign", "sq", *ON_BITS, *ROUNDINGS}
)


@once
def _arithmetic(program: Program) -> frozenset[Expr]:
    """Expressions that are made of positions, sizes, scalars, integers and numbers alone."""
    integers, counts = integer_tensors(program), whole_reductions(program)
    found: set[Expr] = set()
    for node in walk(*roots(program)):
        match node:
            case Axis() | Size() | Scalar() | Const():
                found.add(node)
            case Load(name, _) if name in integers:
                found.add(node)
            case Call(fn, args) if fn in _ARITHMETIC and all(arg in found for arg in args):
                found.add(node)
            case _ if node in counts:
                found.add(node)
    return frozenset(found)


def settings(
    programs: Sequence[Program],
    fixed: Mapping[str, object],
    rng: np.random.Generator,
    of: Literal["programs", "stages"] = "programs",
) -> Iterator[Setting]:
    """Sizes and integer scalars to try besides the usual ones. `fixed` are scalars whose values are given. Stages, whose
    tiles have to be ragged, have the usual sizes in another order first."""
    names = [n for n in dict.fromkeys(n for program in programs for n in program.integers) if n not in fixed]
    numbers = sorted({int(abs(c)) for c in constants(*programs) if abs(c) <= LARGEST_CONSTANT})
    near = sorted({n for number in numbers for n in (number - 1, number, number + 1) if n >= 1})

    free = counted(*programs) if of == "programs" else frozenset[str]()

    def integers(kind: int) -> dict[str, int]:
        match kind:
            case 0:
                return dict.fromkeys(names, 1)
            case 1 | 2 if near:
                found = {name: int(rng.choice(near)) for name in names}
            case _:
                found = {name: int(rng.integers(1, 12)) for name in names}
        return {name: few_or_none(n, rng) if name in free else n for name, n in found.items()}

    apart = LEAST if of == "stages" else APART
    if of == "stages":
        yield Setting(_ragged(rng), integers(1), smaller=tuple(map(_turned, CHOICES[1:])))
        yield Setting(ONES, integers(0))
    else:
        yield Setting(ONES, integers(0))
        yield Setting(_all_of(2), integers(0))
        yield Setting(LEAST, integers(1))
    # Sizes that something turns on come first: where programs differ, others need not be tried.
    met = [met_by_positions(program) for program in programs]
    if any(met):
        least = tuple({axis: number + 2 for axis, number in each.items()} for each in met)
        yield Setting(apart, integers(3), least)
        if of == "programs":  # a product of what a mask makes 0 is 0 along every longer axis
            yield Setting(ONES, integers(3), least)
    exact = sizes_met(*programs)
    numbers_met = sorted(
        {n for met in exact.values() for n in met if n > 1 or of == "programs"}, reverse=True
    )
    for number in numbers_met[:EXACT_SIZES]:
        if number < SMALL:
            yield Setting(_all_of(number), integers(3))
        reached = [axis for axis, each in exact.items() if number in each]
        for axes in (
            [[axis] for axis in reached] if of == "programs" else [reached] if number >= SMALL else []
        ):
            beside = tuple(
                {axis: most + 2 for axis, most in each.items() if axis not in axes and most + 2 < SMALL}
                for each in met
            )
            yield Setting(apart, integers(3), beside, dict.fromkeys(axes, number))
            if of == "programs":
                yield Setting(ONES, integers(3), pinned=dict.fromkeys(axes, number))
    if of == "programs":
        for kind in range(2, 2 + SHUFFLED):
            yield Setting(_shuffled(rng, "all" if kind % 2 else "together"), integers(kind))
        for size in range(3, SMALL) if any(map(decided_by_sizes, programs)) else ():
            yield Setting(_all_of(size), integers(3))
        yield from _far(programs, names)
        names_of_axes = dict.fromkeys(axis for program in programs for axis in axes_of(program.outputs))
        for axis in list(names_of_axes)[:ALONE] if len(names_of_axes) > 1 else ():
            for size in (2, int(rng.integers(3, 7))):
                yield Setting(ONES, integers(3), pinned={axis: size})


def _far(programs: Sequence[Program], names: Sequence[str]) -> Iterator[Setting]:
    """One axis alone beyond large numbers that positions or sizes meet, and integer scalars at numbers of the programs, as far as
    they are in no index."""
    far: dict[tuple[str, int], None] = {}
    for axis, numbers in sizes_met(*programs, largest=LARGEST_SIZE).items():
        far |= dict.fromkeys((axis, n) for n in numbers[-FAR_SIZES:] if n > LARGEST_CONSTANT)
    for program in programs:
        for axis, n in met_by_positions(program, LARGEST_SIZE).items():
            far |= {(axis, n + 2): None} if n > LARGEST_CONSTANT else {}
    for axis, n in far:
        yield Setting(ONES, dict.fromkeys(names, n - 1), pinned={axis: n}, is_far=True)
    free = [name for name in names if name not in in_indices(*programs)]
    known = sorted({int(c) for c in constants(*programs) if SMALL < c < 2**62}, reverse=True)
    for n in known[:EXACT_SIZES] if free else ():
        for number in (n, n + 1):
            yield Setting(ONES, {**dict.fromkeys(names, 2), **dict.fromkeys(free, number)})


def _all_of(size: int) -> Choice:
    """All axes of one size."""
    return Choice((size,), (size,), (size,), "none", near=False)


def counted(*programs: Program) -> frozenset[str]:
    """Integer scalars that may be 0 or less: none that an index, a divisor, a shift or a size is made of."""
    every = {name for program in programs for name in program.integers}
    for program in programs:
        for node in walk(*roots(program)):
            match node:
                case Load(_, index):
                    parts = index
                case Call("floordiv" | "mod", (_, by)):
                    parts = (by,)
                case Call(fn, args) if fn in ON_BITS:
                    parts = args
                case _:
                    continue
            every -= {part.name for part in walk(*parts) if isinstance(part, Scalar)}
    return frozenset(every)


def in_indices(*programs: Program) -> frozenset[str]:
    """Scalars that an index is made of."""
    loads = (node for program in programs for node in walk(*roots(program)) if isinstance(node, Load))
    return frozenset(part.name for load in loads for part in walk(*load.index) if isinstance(part, Scalar))


def few_or_none(number: int, rng: np.random.Generator) -> int:
    """The number; in place of every fourth 0, of every eighth its negative."""
    kind = int(rng.integers(8))
    return 0 if kind < 2 else -number if kind == 2 else number


def _shuffled(rng: np.random.Generator, apart: Literal["all", "together"]) -> Choice:
    """Small sizes in another order."""
    numbers = [int(n) for n in rng.permutation(np.arange(2, 13))]
    return replace(
        COMPACT,
        reduced=tuple(numbers),
        free=tuple(numbers[::-1]),
        compared=tuple(sorted(numbers)),
        apart=apart,
    )


def _ragged(rng: np.random.Generator) -> Choice:
    """Sizes of `sizes.USUAL` in another order."""

    def mixed(*sizes: int) -> tuple[int, ...]:
        return tuple(int(n) for n in rng.permutation(sizes))

    return Choice(
        (*mixed(7, 11), *USUAL.reduced[2:]),
        (*mixed(3, 5, 6), *USUAL.free[3:]),
        (*mixed(9, 11), *USUAL.compared[2:]),
    )


def _turned(choice: Choice) -> Choice:
    """The third of the sizes first: an axis that has one tile of 2 at one of both has two of 3 at the other."""
    reduced, free, compared = (
        (*sizes[2:3], *sizes[:2], *sizes[3:]) for sizes in (choice.reduced, choice.free, choice.compared)
    )
    return replace(choice, reduced=reduced, free=free, compared=compared)


def _flipped(expr: Expr) -> Expr:
    """A comparison in one of its two spellings."""
    match expr:
        case Call("gt" | "ge" as fn, (a, b)):
            return Call("lt" if fn == "gt" else "le", (b, a))
    return expr


@dataclass
class Unseen:
    """Conditions on positions of several programs, with the values that they had at the sizes tried."""

    programs: Sequence[Program]

    def __post_init__(self) -> None:
        self._had: list[dict[str, set[object]]] = [{} for _ in self.programs]
        self._exprs: dict[str, tuple[Expr, Program]] = {}
        self._proved: set[str] = set()
        self._ranges = [AnySize(program.domains) for program in self.programs]
        self._looks = 0

    def look(self, extents: Sequence[Mapping[str, int]], scalars: Mapping[str, object]) -> None:
        """Notes what each condition does at these sizes: one thing at all positions, or several."""
        self._looks += 1
        for had, program, sizes, ranges in zip(self._had, self.programs, extents, self._ranges, strict=True):
            found = constant_conditions(program, sizes, scalars, of_sizes=True)
            constant = {str(_flipped(expr)): value for expr, value in found}
            self._exprs |= {str(_flipped(expr)): (expr, program) for expr, _ in found}
            self._proved |= {str(_flipped(e)) for e, _ in found if ranges.has_one_form(e)}
            for text in had.keys() - constant.keys():
                had[text] |= {True, False}
            for text, value in constant.items():
                had.setdefault(text, set() if self._looks == 1 else {True, False}).add(value)

    def everywhere(self) -> list[str]:
        """Conditions of any program that did one thing only, though they may do another at some sizes."""
        found = {text for had in self._had for text, values in had.items() if len(values) < 2}
        return sorted(found - self._proved)

    def turning(self, scalars: Mapping[str, object]) -> Iterator[dict[str, int]]:
        """Sizes at which conditions do something else than at those tried."""
        searched = [2**n + 1 for n in range(4, int(math.log2(LARGEST_SIZE)) + 1)]
        for text in self.everywhere():
            node, program = self._exprs[text]
            had = {value for values in self._had for value in values.get(text, ())}
            if len(had) == 1:
                found = sizes_that_turn(node, next(iter(had)), program.domains, scalars, searched)
                if found is not None:
                    yield found


def hardened(
    inputs: Inputs,
    specs: Mapping[str, InputSpec],
    indices: frozenset[str],
    numbers: Sequence[float],
    domain: FieldDomain,
    rng: np.random.Generator,
    usual: int = 0,
) -> Inputs:
    """The inputs with many of their values replaced by such as branches turn on, in the trials after the first `usual`.
    `indices` are integer tensors that must stay where they are; ends of ranges have draws of their own."""
    if usual:
        return _beside(
            inputs, hardened(inputs.part(usual, inputs.trials), specs, indices, numbers, domain, rng), usual
        )
    tensors: dict[str, Any] = {}
    for name, value in inputs.tensors.items():
        if isinstance(value, FieldArray):
            tensors[name] = _reals(value, numbers, domain, rng)
        elif specs[name].kind == "integer" and not specs[name].delimits and name not in indices:
            drawn = _integers(value if inputs.varied else value[np.newaxis], numbers, rng)
            tensors[name] = specs[name].ordered(drawn if inputs.varied else drawn[0])
        else:
            tensors[name] = value
    scalars = {
        name: _reals(value, numbers, domain, rng) if isinstance(value, FieldArray) and value.shape else value
        for name, value in inputs.scalars.items()
    }
    real = [value for value in (*tensors.values(), *scalars.values()) if isinstance(value, FieldArray)]
    for name, value in tensors.items():
        if isinstance(value, FieldArray):
            tensors[name] = _with_copies(value, real, rng)
    return replace(inputs, tensors=tensors, scalars=scalars, usual=0)


def with_numbers(inputs: Inputs, found: Sequence[Mapping[str, float]], domain: FieldDomain) -> Inputs:
    """The inputs with one number for all elements of some tensors, and for some scalars: of the trials in turn those of each of
    what was found. Integers that all trials have in common are those of the first."""
    turn = np.arange(inputs.trials) % len(found)

    def changed(name: str, value: Any, is_scalar: bool) -> Any:
        if name not in found[0]:
            return value
        numbers = np.array([each[name] for each in found])[turn]
        if isinstance(value, FieldArray):
            if not value.shape:
                return value
            shape = (len(turn), *(1,) * (len(value.shape) - 1))
            return domain.broadcast(domain.numbers(numbers.reshape(shape)), value.shape)
        if is_scalar:
            return value
        by_trial = numbers.reshape(len(turn), *(1,) * (value.ndim - 1)) if inputs.varied else numbers[0]
        return np.broadcast_to(by_trial, value.shape).astype(value.dtype)

    return replace(
        inputs,
        tensors={name: changed(name, value, False) for name, value in inputs.tensors.items()},
        scalars={name: changed(name, value, True) for name, value in inputs.scalars.items()},
        usual=0,
    )


def _of_trials(value: Any, trials: slice) -> Any:
    batched = isinstance(value, FieldArray) and value.shape
    return value.each(lambda part: part[trials]) if batched else value


def _beside(inputs: Inputs, later: Inputs, usual: int) -> Inputs:
    """The first trials of some inputs, and those of others after them. Integers, which all trials have in common, are
    those of the first."""

    def both(value: Any, other: Any) -> Any:
        if not isinstance(value, FieldArray) or not value.shape or value.p is None or value.q is None:
            return value
        first = _of_trials(value, slice(usual))
        p, q, shadow = (
            np.concatenate(parts)
            for parts in ((first.p, other.p), (first.q, other.q), (first.shadow, other.shadow))
        )
        return FieldArray(p, q, shadow)

    tensors = {name: both(value, later.tensors[name]) for name, value in inputs.tensors.items()}
    scalars = {name: both(value, later.scalars[name]) for name, value in inputs.scalars.items()}
    return replace(inputs, tensors=tensors, scalars=scalars, usual=usual)


def _reals(
    value: FieldArray, numbers: Sequence[float], domain: FieldDomain, rng: np.random.Generator
) -> FieldArray:
    """Real values to try, of a kind for each trial, by its number modulo `KINDS`:

    0. numbers of the programs, numbers near them, and numbers between two of them;
    1. numbers of the programs;
    2. magnitudes from 1e-30 to 1e30, the same for all elements of a tensor;
    3. magnitudes from 1e-3 to 1e3;
    4. small integers;
    5. elements of other tensors (`_with_copies`);
    6. nearly equal numbers;
    7. zeros among small integers.

    In the second half of many trials the tensors are of different kinds. Every other turn has no negative number, as roots and
    logarithms need.
    """
    shape = value.shape
    place = np.arange(shape[0])
    kind = place.copy()
    if len(place) >= 2 * KINDS:
        kind += np.where(place < len(place) // 2, 0, rng.integers(KINDS))
    kind %= KINDS
    positive = (place // KINDS % 2 == 1) & (kind != 5)
    shadow = np.array(value.shadow)
    exact = np.zeros(shape, dtype=bool)
    kept = (rng.random(shape) < 0.3) & ~_rows((kind == 1) | positive, shape)
    kept[kind == 5] = True
    for kinds, draw in (((0, 1), _near_numbers), ((2, 3), _of_magnitudes), ((4, 6, 7), _of_few)):
        rows = np.flatnonzero(np.isin(kind, kinds))
        if len(rows):
            shadow[rows], exact[rows], alike = draw(kind[rows], rows, shape[1:], numbers, rng)
            kept[rows] &= ~_rows(alike, kept[rows].shape)
    shadow = np.where(_rows(positive, shape), np.abs(shadow), shadow)
    fresh = ~exact & ~kept
    p, q = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for where, made in (
        (fresh, domain.draw(shadow[fresh], rng)),
        (exact & ~kept, domain.numbers(shadow[exact & ~kept])),
    ):
        assert made.p is not None and made.q is not None
        p[where], q[where] = made.p, made.q
    return domain.where(kept, value, FieldArray(p, q, shadow))


def _rows(chosen: Truths, shape: tuple[int, ...]) -> Truths:
    """All elements of the chosen trials."""
    return np.broadcast_to(chosen.reshape(-1, *(1,) * (len(shape) - 1)), shape)


_Drawn = tuple[Reals, Truths, Truths]
"""Real values; which of them are these numbers themselves; the trials that keep none of the values there were."""


def _near_numbers(
    kind: Places, rows: Places, rest: tuple[int, ...], numbers: Sequence[float], rng: np.random.Generator
) -> _Drawn:
    shape = (len(kind), *rest)
    number = rng.choice(np.asarray(numbers), shape)
    step = rng.choice(np.array([0.0, 1e-4, -1e-4, 1e-3, -1e-3, 0.1, -0.1, 1.0]), shape)
    step[kind == 1] = 0.0
    # Equal real values have equal residues: what is near a number is near in a way of its own.
    reach = np.maximum(np.abs(number), np.where(rng.random(shape) < 0.5, 0.1, 0.0))
    with np.errstate(over="ignore"):  # beyond the greatest number there is none
        near = number + step * rng.uniform(0.5, 2.0, shape) * reach
    near = np.where(np.isfinite(near), near, number)
    between = _rows(kind == 0, shape) & (rng.random(shape) < 0.25)
    near = np.where(between, _between(numbers, shape, rng), near)
    return near, near == number, np.zeros(len(kind), dtype=bool)


def _of_magnitudes(
    kind: Places, rows: Places, rest: tuple[int, ...], numbers: Sequence[float], rng: np.random.Generator
) -> _Drawn:
    shape, one = (len(kind), *rest), (len(kind), *(1,) * len(rest))
    sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    alike = (kind == 2) & (rng.random(len(kind)) < 0.5)  # so that a maximum is below a number
    scale = 10.0 ** rng.uniform(-3, 3, shape)
    scale[kind == 2] = 10.0 ** rng.uniform(-30, 30, one)[kind == 2]
    scale[alike] = 10.0 ** rng.uniform(0, 4, one)[alike]
    sign[alike] = np.where(rng.random(one) < 0.5, -1.0, 1.0)[alike]
    return sign * scale * rng.uniform(0.5, 2.0, shape), np.zeros(shape, dtype=bool), alike


def _of_few(
    kind: Places, rows: Places, rest: tuple[int, ...], numbers: Sequence[float], rng: np.random.Generator
) -> _Drawn:
    shape = (len(kind), *rest)
    found = rng.integers(-4, 5, shape).astype(np.float64)
    found[_rows(kind == 7, shape) & (rng.random(shape) < 0.5)] = 0.0
    # 0.5 to 2, the same for all tensors
    about = 0.5 + 1.5 * (0.618 * (1 + rows) % 1)
    nearly = kind == 6
    among = (int(nearly.sum()), *rest)
    found[nearly] = _rows(about[nearly], among) * (1 + 1e-6 * rng.standard_normal(among))
    return found, ~_rows(nearly, shape), np.zeros(len(kind), dtype=bool)


def _between(numbers: Sequence[float], shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Real values between one of the numbers and the next greater one."""
    ordered = np.unique(numbers)
    place = rng.integers(0, len(ordered) - 1, shape)
    low, high = ordered[place], ordered[place + 1]
    return low + rng.uniform(0.1, 0.9, shape) * (high - low)


def _with_copies(value: FieldArray, others: Sequence[FieldArray], rng: np.random.Generator) -> FieldArray:
    """In every eighth trial, two thirds of the elements are copies of elements of other tensors and of scalars."""
    trials = np.arange(5, value.shape[0], KINDS)
    shape = (len(trials), *value.shape[1:])
    size = int(np.prod(shape[1:], dtype=np.int64))
    if not len(trials) or not size:
        return value
    if any(each.p is None or each.q is None for each in (value, *others[:MOST_COPIED])):
        return value
    parts: list[FieldArray] = []
    for other in others[:MOST_COPIED]:
        rows = int(np.prod(other.shape[1:], dtype=np.int64))
        if not rows:
            continue
        at = rng.integers(0, rows, (len(trials), size))
        parts.append(other.each(partial(_picked, trials=trials, at=at, shape=shape)))
    which = rng.integers(0, len(parts), shape)
    chosen = rng.random(shape) < 0.66

    def mixed(own: Any, theirs: Sequence[Any]) -> Any:
        found = own.copy()
        found[trials] = np.where(chosen, np.choose(which, theirs), own[trials])
        return found

    return FieldArray(
        mixed(value.p, [part.p for part in parts]),
        mixed(value.q, [part.q for part in parts]),
        mixed(value.shadow, [part.shadow for part in parts]),
    )


def _picked(part: Any, *, trials: Any, at: Any, shape: tuple[int, ...]) -> Any:
    """Elements of an array in some trials by their place in each; a number is the same in all trials."""
    flat = part[trials].reshape(len(trials), -1) if part.ndim else np.full((len(trials), 1), part)
    return np.take_along_axis(flat, at, 1).reshape(shape)


def _integers(value: Any, numbers: Sequence[float], rng: np.random.Generator) -> Any:
    """Integers at the numbers of the programs, beside them, and of wide range; or all of a trial alike."""
    known = {int(n) + step for n in numbers if abs(n) < 2**31 for step in (-1, 0, 1)}
    whole = np.array(sorted(known), dtype=np.int64)
    each = np.resize(rng.permutation(whole), value.shape)  # no number is missed where there is room for all
    near = np.where(rng.random(value.shape) < 0.5, each, rng.choice(whole, value.shape))
    wide = rng.integers(-1000, 1001, value.shape)
    kind = rng.random(value.shape)
    mixed = np.where(kind < 0.5, near, np.where(kind < 0.8, wide, value))
    if mixed.size:
        alike = rng.random(len(mixed)) < 0.25
        mixed[alike] = near[alike][(slice(None), *[slice(1)] * (near.ndim - 1))]
    return mixed
