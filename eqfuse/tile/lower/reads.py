"""Which elements of its inputs a program reads under conditions alone, and what keeps a read of them inside wherever a loop
nest has it.

A sum that is computed by itself, in a statement or a kernel of its own, is computed whether or not the conditions hold
under which the program reads it: of `where(n == 3, sum[l](x[3, l]), 0)` the sum has no `n`, and `x` may have two rows. What is read
outside is 0 then, and nothing reads the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.guards import Guards, is_guarded, kept, places
from eqfuse.terms.assume import folded
from eqfuse.terms.bounds import is_telling
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
    substitute_axes,
    walk,
)
from eqfuse.terms.ranges import UNKNOWN, Range, Ranges, integer
from eqfuse.terms.sizes import places as sized_places


@dataclass(frozen=True)
class Reads:
    """The elements that may be outside of their tensors. `places` are the conditions that may keep one inside, of each place
    where the program reads it, for those that every place has such conditions for; `kept` those that hold wherever a nest
    reads one, `axes` the axes whose extents dimensions have, `lengths` the extents that are numbers."""

    places: Mapping[Expr, Sequence[Guards]]
    kept: Mapping[Expr, Guards]
    axes: Mapping[tuple[str, int], str]
    lengths: Mapping[str, int]

    @staticmethod
    def of(program: Program, domains: Mapping[str, str]) -> Reads:
        """Those of a program, at the places of recurrences that go backwards too, and the same ones along other axes of their extents, by
        whose names a nest may read them."""
        found: dict[Load, Sequence[Guards]] = {**places(program, may_miss)}
        for steps in program.in_order:
            at = {steps.axis: steps.place} if steps.backwards else {}
            found |= {
                _moved(load, at): [tuple(substitute_axes(g, at) for g in guards) for guards in each]
                for load, each in found.items()
                if not any(_binds(g, steps.axis) for guards in each for g in guards)
            }
        pairs = list(domains.items())
        for axis, of in (*((of, axis) for axis, of in pairs), *pairs):
            names: dict[str, Expr] = {of: Axis(axis)}
            for load, each in list(found.items()):
                if of in free_axes(load):
                    # A condition that binds the name itself stays as it is: nothing is known to make it hold.
                    moved = tuple(
                        tuple(g if _binds(g, axis) else substitute_axes(g, names) for g in guards)
                        for guards in each
                    )
                    again = _moved(load, names)
                    found[again] = tuple(dict.fromkeys((*found.get(again, ()), *moved)))
        lengths = dict(program.lengths)
        for axis, of in domains.items():
            if (length := lengths.get(program.domains.get(of, of))) is not None:
                lengths[axis] = length
        telling = {load: list(dict.fromkeys(_telling(load, g) for g in each)) for load, each in found.items()}
        axes = {(tensor, dimension): axis for axis, tensor, dimension in sized_places(program)}
        states = (output for output in program.outputs if output.name in program.states)
        axes |= {(each.name, place): axis for each in states for place, axis in enumerate(each.axes)}
        return Reads(
            {load: each for load, each in telling.items() if all(each)},
            {load: kept(load, each) for load, each in found.items()},
            axes,
            lengths,
        )

    def inside(self, load: Load, known: Guards, proven: Mapping[Expr, bool]) -> Guards:
        """The conditions for the positions of an element to be inside of its tensor, where the program reads it under others
        alone that are not `known` here."""
        each = self.places.get(load, ())
        left = {guard: folded(guard, proven) for guards in each for guard in guards}
        each = [tuple(left[g] for g in guards if left[g] is not Const(True)) for guards in each]
        if is_guarded(load, each, known):
            return ()
        ranges = _Positions(self.lengths)
        found: list[Expr] = []
        for dimension, at in enumerate(load.index):
            if not _is_computed(at):
                continue
            axis = self.axes.get((load.tensor, dimension))
            range_ = ranges.of(at)
            if range_.low < 0:
                found.append(call("ge", at, Const(0)))
            if axis is not None and range_.high >= self.lengths.get(axis, 0):
                found.append(call("lt", at, Size(axis)))
        return tuple(found)


def _moved(load: Load, axes: Mapping[str, Expr]) -> Load:
    return Load(load.tensor, tuple(substitute_axes(at, axes) for at in load.index))


def _binds(expr: Expr, axis: str) -> bool:
    return any(isinstance(node, Reduce) and node.axis == axis for node in walk(expr))


class _Positions(Ranges):
    """Positions and sizes, of which some `lengths` are given."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        super().__init__()
        self._lengths = lengths

    def leaf(self, node: Expr) -> Range:
        match node:
            case Axis(name):
                return integer(node, 0, self._lengths.get(name, math.inf) - 1)
            case Size(name):
                return integer(node, self._lengths.get(name, 0), self._lengths.get(name, math.inf))
        return UNKNOWN


def may_miss(expr: Expr) -> bool:
    """Whether an access may fall outside its tensor where a guard is false: its index is shifted, a quotient, data, or a
    number."""
    return isinstance(expr, Load) and (
        any(may_be_outside(part) or is_quotient(part) for part in walk(*expr.index))
        or any(map(is_position, expr.index))
    )


def is_position(index: Expr) -> bool:
    """Whether an index is a number that a short dimension does not reach."""
    return isinstance(index, Const) and bool(index.value)


def may_be_outside(part: Expr) -> bool:
    return isinstance(part, Load | Local) or is_shift(part)


def is_quotient(part: Expr) -> bool:
    return isinstance(part, Call) and part.fn in ("floordiv", "mod")


def is_shift(part: Expr) -> bool:
    return isinstance(part, Call) and part.fn in ("add", "sub", "neg", "mul")


def _is_computed(index: Expr) -> bool:
    """Whether an index is made of positions, sizes and numbers, and is not a position of its dimension by itself."""
    return not isinstance(index, Axis) and not any(
        isinstance(node, Load | Local | Reduce) for node in walk(index)
    )


def _telling(load: Load, guards: Guards) -> Guards:
    """The conditions that may keep a computed index inside."""
    axes = [free_axes(at) for at in load.index if _is_computed(at)]
    return tuple(guard for guard in guards if any(is_telling(guard, each) for each in axes))
