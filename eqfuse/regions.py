"""Regions of sizes that one plan serves: found from the cost model, with few sizes priced.

Sizes are rounded up to powers of two, but for those that the program declares: to a *corner*. The first call within a
corner prices its own sizes, and what is chosen serves all sizes of the corner. A plan that is known already is taken
where it costs at most `TOLERANCE` times what the best one does. From the second corner on, the way that sizes have
gone is followed further: the farthest corner where the plan is still good enough is found by bisection, and all corners
between belong to its region, unpriced. That supposes that a plan which is good enough at two corners is so between them.

What a plan computes does not depend on the sizes that it was chosen for: loop nest, tile program and source are for any
sizes. So a region is a matter of speed alone. Which of two plans serves a size may depend on the sizes called before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eqfuse.compiler import Compiled

TOLERANCE = 1.05
"""How many times the cost of the best plan another one may have that is compiled already."""

LARGEST = 17
"""The binary logarithm of the size up to which a region is followed: what is larger is a corner of its own."""

Corner = Mapping[str, int]
"""A binary logarithm for each axis, of its size rounded up; of a declared axis, the size itself."""


@dataclass(frozen=True)
class Box:
    """Corners from `low` to `high`, both included."""

    low: Corner
    high: Corner

    def has(self, corner: Corner) -> bool:
        return all(self.low[axis] <= at <= self.high[axis] for axis, at in corner.items())


@dataclass(frozen=True)
class Region:
    """A plan, and the sizes that it serves."""

    compiled: Compiled
    box: Box
    declared: frozenset[str]

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest size of every axis."""
        return {
            axis: (low, self.box.high[axis])
            if axis in self.declared
            else (_least(low), 1 << self.box.high[axis])
            for axis, low in self.box.low.items()
        }

    def __str__(self) -> str:
        shown = ", ".join(
            f"{a} = {lo}" if lo == hi else f"{lo} <= {a} <= {hi}" for a, (lo, hi) in self.sizes.items()
        )
        return f"{shown}: {self.compiled.chosen.plan}"


Price = Callable[[Mapping[str, int]], float]
"""The seconds of the best plan at sizes."""

PriceOf = Callable[[Compiled, Mapping[str, int]], float]
"""The seconds of a plan at sizes; infinite where it cannot run."""


@dataclass
class Regions:
    """The regions of one device and one set of dtypes. `declared` are the axes whose size the program says."""

    declared: frozenset[str]
    found: list[Region] = field(default_factory=list)
    priced: int = 0

    def corner(self, extents: Mapping[str, int]) -> Corner:
        return {a: n if a in self.declared else max(0, n - 1).bit_length() for a, n in extents.items()}

    def sizes(self, corner: Corner) -> dict[str, int]:
        """The sizes that a corner stands for."""
        return {a: at if a in self.declared else 1 << at for a, at in corner.items()}

    def ends(self, corner: Corner) -> list[dict[str, int]]:
        """The least and the greatest sizes of a corner: tiles of whole axes waste most at the least ones."""
        least = {a: at if a in self.declared else _least(at) for a, at in corner.items()}
        return [least, self.sizes(corner)]

    def at(self, extents: Mapping[str, int]) -> Compiled | None:
        """The plan whose region has these sizes, where there is one."""
        corner = self.corner(extents)
        return next((region.compiled for region in self.found if region.box.has(corner)), None)

    def add(
        self,
        extents: Mapping[str, int],
        compile_at: Callable[[Mapping[str, int]], Compiled],
        best: Price,
        of: PriceOf,
    ) -> Compiled:
        """The plan for sizes that no region has: one that is known, or that of `compile_at`; its region is found."""
        corner = self.corner(extents)
        known = list({id(region.compiled): region.compiled for region in self.found}.values())
        compiled = self._chosen(extents, known, compile_at, best, of)
        far = self._farthest(corner, compiled, best, of) if known else corner
        low = {a: min(at, far[a]) for a, at in corner.items()}
        high = {a: max(at, far[a]) for a, at in corner.items()}
        self.found.append(Region(compiled, Box(low, high), self.declared))
        return compiled

    def _chosen(
        self,
        extents: Mapping[str, int],
        known: Sequence[Compiled],
        compile_at: Callable[[Mapping[str, int]], Compiled],
        best: Price,
        of: PriceOf,
    ) -> Compiled:
        """The plan for the corner of `extents`. The very first is the best for these; later ones are good enough both
        for these and for both ends of the corner, where there is such a one."""
        ends = self.ends(self.corner(extents))
        if not known:
            first = compile_at(extents)
            return compile_at(ends[1]) if math.isinf(of(first, ends[1])) else first
        least = [(sizes, self._best(best, sizes)) for sizes in (extents, *ends)]

        def loss(compiled: Compiled) -> float:
            return max(of(compiled, sizes) / seconds if seconds else math.inf for sizes, seconds in least)

        found = min(known, key=loss)
        for sizes in (extents, ends[1]):
            if loss(found) > TOLERANCE:
                found = min(found, compile_at(sizes), key=loss)
        return found

    def _best(self, best: Price, sizes: Mapping[str, int]) -> float:
        self.priced += 1
        return best(sizes)

    def _farthest(self, corner: Corner, compiled: Compiled, best: Price, of: PriceOf) -> Corner:
        """The farthest corner in the direction from the nearest region to this one where a plan is good enough."""
        way = self._way(corner)
        steps = [(LARGEST - corner[a] if by > 0 else corner[a] - 1) for a, by in way.items() if by]
        most = max(0, min(steps, default=0))

        def moved(steps: int) -> Corner:
            return {a: at + steps * way[a] for a, at in corner.items()}

        def good(steps: int) -> bool:
            ends = self.ends(moved(steps))
            return all(of(compiled, sizes) <= TOLERANCE * self._best(best, sizes) for sizes in ends)

        if most and good(most):
            return moved(most)
        least = 0
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if good(middle) else (least, middle)
        return moved(least)

    def _way(self, corner: Corner) -> dict[str, int]:
        """The direction of each axis, from the nearest corner of a region: 1, -1, or 0 where it stays."""

        def apart(box: Box) -> dict[str, int]:
            return {a: min(0, at - box.low[a]) or max(0, at - box.high[a]) for a, at in corner.items()}

        nearest = min((apart(region.box) for region in self.found), key=lambda d: sum(map(abs, d.values())))
        return {
            a: 0 if a in self.declared else int(math.copysign(1, by)) if by else 0
            for a, by in nearest.items()
        }


def _least(log: int) -> int:
    return (1 << (log - 1)) + 1 if log else 1
