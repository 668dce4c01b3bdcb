"""Mask coverage: what part of a loop's range the predicates of `where` leave to walk. Tiles that they empty are not visited.

What a predicate of data leaves (`j < len[b]`) is known at the call alone, and the plan is made before. Lengths are
taken to be independent and uniform, from none of the axis to all of it: of n rows the longest, up to which their block
walks, has n / (n + 1) of the axis on average, half of it where a block has one row. Where data gives both ends of a range
(`(off[s] <= j) & (j < off[s+1])`), the rows are taken to be segments that share the axis out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from eqfuse.extract.shape import Shape
from eqfuse.loops.dominance import may_be_skipped
from eqfuse.loops.identity import predicates
from eqfuse.loops.kernel_axes import KEPT
from eqfuse.loops.nodes import Kernel, Loop
from eqfuse.loops.walk import loops_in
from eqfuse.terms.assume import conjuncts
from eqfuse.terms.bounds import tells
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import COMPARISONS
from eqfuse.terms.interpreter import Env, evaluate_expr
from eqfuse.terms.intervals import NEGATED
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Scalar, Size, free_axes, walk
from eqfuse.terms.promises import read_along

_SAMPLED_BLOCKS = 32
"""Blocks of an axis at which predicates are tried, in each of them the first, a middle and the last position."""

MERGED_INSTANCES = 2
"""Estimated trips of the loop that merges the states of a row's instances, where instances are dealt out to rows by their lengths
(`loops/slots.py`): how many a row has is known at the call alone."""

Predicates = Mapping[Expr, bool]
"""Predicates, each with the truth value without which a tile changes nothing."""


@lru_cache(KEPT)
def covering(kernel: Kernel) -> Mapping[str, Predicates]:
    """The predicates of positions and sizes alone that narrow the range of every loop over an axis."""
    found: dict[str, dict[Expr, bool]] = {}
    for loop in (loop for loop in loops_in(kernel.body) if not loop.unit):
        mine = {
            part: True
            for predicate in predicates(loop)
            if loop.axis in free_axes(predicate)
            for wanted in (True, False)
            if may_be_skipped(loop, predicate, not wanted, kernel.ascending)
            for part in conjuncts(predicate, wanted)
            if loop.axis in free_axes(part)
            and all(isinstance(node, Axis | Size | Const | Call) for node in walk(part))
        }
        before = found.get(loop.axis, mine)
        found[loop.axis] = {p: wanted for p, wanted in mine.items() if before.get(p) is wanted}
    return {axis: mine for axis, mine in found.items() if mine}


@dataclass(frozen=True)
class Ragged:
    """Ranges of an axis that data narrows. `axes` are those at whose positions the data is read; a `segment` has both
    its ends from data. Those that different tensors give, neither of which is promised to ascend, are `apart`: neighbours among
    the rows have ranges anywhere, so that a block of several walks nearly the whole axis."""

    axes: frozenset[str]
    segment: bool
    apart: bool = False

    def share(self, blocks: Mapping[str, int], extents: Mapping[str, int]) -> float:
        """The average part of the axis that a block walks: as far as the longest of its rows, or all its segments."""
        rows = math.prod(blocks.get(axis, 1) for axis in self.axes)
        if self.apart and rows > 1:
            return 1.0
        if self.segment and self.axes:
            return min(1.0, rows / math.prod(extents[axis] for axis in self.axes))
        return rows / (rows + 1)

    def average(self, axis: str, extents: Mapping[str, int]) -> float:
        """Positions of the axis that a row has on average."""
        return self.share({}, extents) * extents[axis]

    def spread(self, blocks: Mapping[str, int]) -> float:
        """How much longer than the average the longest range of a block is, in averages."""
        if not self.axes:
            return 0.0
        return 1.0 if self.segment else 1 / math.prod(blocks.get(axis, 1) for axis in self.axes)


@lru_cache(KEPT)
def ragged(kernel: Kernel) -> Mapping[str, Ragged]:
    """The looped axes whose range is narrowed by a comparison of their positions with data, in each of their loops."""
    found: dict[str, Ragged] = {}
    whole: set[str] = set()
    for loop in (loop for loop in loops_in(kernel.body) if not loop.unit):
        ends: set[str] = set()
        loads: list[Load] = []
        for predicate in predicates(loop):
            for wanted in (True, False):
                parts = {
                    part: _ends(part, loop.axis, kernel.ascending) for part in conjuncts(predicate, wanted)
                }
                parts = {part: ends for part, ends in parts.items() if ends}
                if parts and may_be_skipped(loop, predicate, not wanted, kernel.ascending):
                    ends = ends.union(*parts.values())
                    loads += [node for node in walk(*parts) if isinstance(node, Load)]
        searched = any(_ascends(load, loop.axis, kernel.ascending) for load in loads)
        if ends:
            axes = frozenset[str]().union(*map(free_axes, loads)) - {loop.axis}
            before = found.get(loop.axis, Ragged(frozenset(), segment=True))
            segment = before.segment and len(ends) == 2 and not searched
            tensors = {load.tensor for load in loads}
            apart = len(tensors) > 1 and tensors.isdisjoint(name for name, _ in kernel.ascending)
            found[loop.axis] = Ragged(axes | before.axes, segment, segment and (apart or before.apart))
        else:
            whole.add(loop.axis)
    return {axis: each for axis, each in found.items() if axis not in whole}


def rows_with_ranges(kernel: Kernel) -> frozenset[str]:
    """The axes of rows that have ranges of their own."""
    return frozenset[str]().union(*(each.axes for each in ragged(kernel).values()))


def _ends(condition: Expr, axis: str, ascending: Collection[tuple[str, int]]) -> frozenset[str]:
    """Which ends of a range along the axis a comparison with data gives."""
    match condition:
        case Call("not", (Call(fn, (left, right)),)) if fn in NEGATED:
            condition = Call(NEGATED[fn], (left, right))
    if not isinstance(condition, Call) or condition.fn not in COMPARISONS:
        return frozenset()
    if not any(isinstance(node, Load | Scalar) for node in walk(condition)):
        return frozenset()
    first, second = (tells(side, axis) or _ascends(side, axis, ascending) for side in condition.args)
    if first == second:
        return frozenset()
    if condition.fn in ("eq", "ne"):
        return frozenset(("start", "stop") if condition.fn == "eq" else ())
    is_below = (condition.fn in ("lt", "le")) == first
    return frozenset({"stop" if is_below else "start"})


def _ascends(side: Expr, axis: str, ascending: Collection[tuple[str, int]]) -> bool:
    """Whether a side of a comparison is an element of a tensor that ascends along the axis, at it."""
    return isinstance(side, Load) and any(
        tensor == side.tensor and read_along(side, place, axis) is not None for tensor, place in ascending
    )


def _is_dealt(loop: Loop) -> bool:
    """Whether a loop walks the instances that were dealt out to a row: its start is read from a tensor."""
    return any(isinstance(node, Load) for node in walk(loop.start))


class Coverage:
    """How much of each axis whose loops are masked is walked, at one shape."""

    def __init__(self, kernel: Kernel, shape: Shape) -> None:
        self._shape = shape
        self._axes = {
            axis: (mine, sorted(frozenset[str]().union(*map(free_axes, mine))))
            for axis, mine in covering(kernel).items()
        }
        self._ragged = ragged(kernel)
        self._is_even = kernel.slots is not None
        self._few = tuple(loop.axis for loop in loops_in(kernel.body) if loop.unit and _is_dealt(loop))
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}

    def visited(self, blocks: Mapping[str, int]) -> dict[str, int]:
        """How many positions of each such axis are walked, on average over the blocks of the others."""
        found: dict[str, int] = {}
        for axis, (mine, axes) in self._axes.items():
            key = axis, tuple(blocks.get(a, 1) for a in axes)
            if key not in self._known:
                share = _share(mine, blocks, self._shape)
                self._known[key] = max(1, round(share * self._shape.extents[axis]))
            found[axis] = self._known[key]
        for axis, data in self._ragged.items():
            share = data.share(blocks, self._shape.extents)
            found[axis] = max(1, round(share * found.get(axis, self._shape.extents[axis])))
        return {**found, **{axis: min(MERGED_INSTANCES, self._shape.extents[axis]) for axis in self._few}}

    def evenness(self, blocks: Mapping[str, int], per_sm: float) -> float:
        """The part of the time in which an SM has work, of `per_sm` thread blocks of different lengths: the last one
        may be the longest."""
        if self._is_even:
            return 1.0
        longer = max((data.spread(blocks) for data in self._ragged.values()), default=0.0)
        return per_sm / (per_sm + longer) if per_sm else 1.0


def _share(predicates: Predicates, blocks: Mapping[str, int], shape: Shape) -> float:
    """The share of tiles in which some sampled position has all the truth values that are wanted."""
    axes = sorted(frozenset[str]().union(*map(free_axes, predicates)))
    places = {axis: _sampled(shape.extents[axis], blocks.get(axis, 1)) for axis in axes}
    env = Env(FloatDomain(), {}, {}, shape.extents, {axis: at.reshape(-1) for axis, at in places.items()})
    left = np.ones([size for axis in axes for size in places[axis].shape], dtype=bool)
    for predicate, wanted in predicates.items():
        dims, data = evaluate_expr(predicate, env)
        order = [dims.index(axis) for axis in axes if axis in dims]
        sizes = [n for axis in axes for n in (places[axis].shape if axis in dims else (1, 1))]
        left &= np.transpose(np.asarray(data), order).reshape(sizes) == wanted
    return float(left.any(axis=tuple(range(1, left.ndim, 2))).mean())


def _sampled(extent: int, block: int) -> npt.NDArray[np.int64]:
    """Positions (blocks, 3) of an axis."""
    count = math.ceil(extent / block)
    numbers = np.unique(np.linspace(0, count - 1, min(count, _SAMPLED_BLOCKS)).astype(np.int64))
    inside = numbers[:, None] * block + np.array([0, block // 2, block - 1])
    return np.asarray(np.minimum(inside, extent - 1), dtype=np.int64)
