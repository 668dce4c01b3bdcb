"""Regions of sizes that one plan serves: found from the cost model, with few sizes priced.

Sizes that round up to the same powers of two are one *bucket*; sizes that the program declares are not rounded. The first
call within a bucket decides for all its sizes. A plan that is compiled already is taken where it costs at most `TOLERANCE` times what the
best of all plans does that are known by then: those that any of the compiled ones was chosen from, and itself with tiles of
its own for these sizes. They are priced at the least and the greatest sizes of the bucket (at the greatest alone, where
the next smaller one was decided and no plan holds what grew), which takes a few milliseconds; only where none is good enough
are all plans searched again, and one is compiled. Buckets next to each other with the same plan are one region; a plan that is good enough at two buckets of a box is taken to be so in between.
On a GPU, where a new plan takes a second to compile anyway, it is priced ahead too, along the axes that its loops walk: at
every other larger bucket, as long as it is good enough there. A sequence that grows then meets no bucket that has to be decided.

What a plan computes does not depend on the sizes that it was chosen for: loop nest, tile program and source are for any
sizes. So a region is a matter of speed alone. Which of two plans serves a size may depend on the sizes called before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from eqfuse.compiled import Compiled
from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.walk import loops_in

TOLERANCE = 1.05
"""How many times the cost of the best plan another one may have that is compiled already."""

LEAPS = (2, 4, 6)
"""How many buckets ahead a new plan is priced."""

SizeBucket = Mapping[str, int]
"""A binary logarithm for each axis, of its size rounded up; of a declared axis, the size itself."""


@dataclass(frozen=True)
class Box:
    """Buckets from `low` to `high`, both included."""

    low: SizeBucket
    high: SizeBucket

    def has(self, bucket: SizeBucket) -> bool:
        return all(self.low[axis] <= at <= self.high[axis] for axis, at in bucket.items())

    def extended(self, bucket: SizeBucket) -> Box | None:
        """The box with a bucket that is next to it; None where the bucket is further away."""
        low = {axis: min(at, self.low[axis]) for axis, at in bucket.items()}
        high = {axis: max(at, self.high[axis]) for axis, at in bucket.items()}
        moved = (self.low[a] - low[a] + high[a] - self.high[a] for a in bucket)
        return Box(low, high) if all(by <= 1 for by in moved) else None


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


Price = Callable[[Sequence[Compiled], Mapping[str, int]], float]
"""The seconds at sizes of the best plan that any of the compiled ones was chosen from."""

PriceOf = Callable[[Compiled, Mapping[str, int]], float]
"""The seconds of a plan at sizes; infinite where it cannot run."""


@dataclass
class Regions:
    """The regions of one device and one set of dtypes. `declared` are the axes whose size the program says."""

    declared: frozenset[str]
    found: list[Region] = field(default_factory=list)
    priced: int = 0

    def bucket(self, extents: Mapping[str, int]) -> SizeBucket:
        return {a: n if a in self.declared else max(0, n - 1).bit_length() for a, n in extents.items()}

    def sizes(self, bucket: SizeBucket) -> dict[str, int]:
        """The sizes that a bucket stands for."""
        return {a: at if a in self.declared else 1 << at for a, at in bucket.items()}

    def ends(self, bucket: SizeBucket, known: Sequence[Compiled] = ()) -> list[dict[str, int]]:
        """The least and the greatest sizes of a bucket: tiles of whole axes waste most at the least ones. Where all but
        one axis are those of a bucket that was decided, and that one is the next, which no plan holds whole, only the greatest:
        the least were its greatest."""
        least = {a: at if a in self.declared else _least(at) for a, at in bucket.items()}
        whole = frozenset[str]().union(*map(held, known))
        for axis in bucket.keys() - whole - self.declared:
            before = {**bucket, axis: bucket[axis] - 1}
            if known and any(region.box.has(before) for region in self.found):
                return [self.sizes(bucket)]
        return [least, self.sizes(bucket)]

    def at(self, extents: Mapping[str, int]) -> Compiled | None:
        """The plan whose region has these sizes, where there is one."""
        bucket = self.bucket(extents)
        return next((region.compiled for region in self.found if region.box.has(bucket)), None)

    def add(
        self,
        extents: Mapping[str, int],
        compile_at: Callable[[Mapping[str, int]], Compiled],
        best: Price,
        of: PriceOf,
    ) -> Compiled:
        """The plan for sizes that no region has: one that is known, or that of `compile_at`; its region is found."""
        bucket = self.bucket(extents)
        known = list({id(region.compiled): region.compiled for region in self.found}.values())
        compiled = self._chosen(extents, known, compile_at, best, of)
        for place, region in enumerate(self.found):
            box = region.box.extended(bucket) if region.compiled is compiled else None
            if box is not None and not math.isinf(of(compiled, self.sizes(box.high))):
                self.found[place] = Region(compiled, box, self.declared)
                break
        else:
            self.found.append(Region(compiled, Box(bucket, bucket), self.declared))
        return compiled

    def ahead(
        self, extents: Mapping[str, int], axes: frozenset[str], compiled: Compiled, best: Price, of: PriceOf
    ) -> int:
        """How many buckets beyond that of these sizes a plan is good enough, where some axes grow together."""
        reached, bucket = 0, self.bucket(extents)
        for leap in LEAPS:
            sizes = self.sizes({axis: at + leap * (axis in axes) for axis, at in bucket.items()})
            self.priced += 1
            if _ratio(of(compiled, sizes), best([compiled], sizes)) > TOLERANCE:
                break
            reached = leap
        return reached

    def extend(self, further: Mapping[str, int]) -> None:
        """Lets the region that was found last reach so many buckets further."""
        last = self.found[-1]
        high = {axis: at + further.get(axis, 0) for axis, at in last.box.high.items()}
        self.found[-1] = replace(last, box=Box(last.box.low, high))

    def _chosen(
        self,
        extents: Mapping[str, int],
        known: Sequence[Compiled],
        compile_at: Callable[[Mapping[str, int]], Compiled],
        best: Price,
        of: PriceOf,
    ) -> Compiled:
        """The plan for the bucket of `extents`. The very first is the best for these; later ones are good enough for both
        ends of the bucket, where there is such a one."""
        ends = self.ends(self.bucket(extents), known)
        if not known:
            first = compile_at(extents)
            return compile_at(ends[-1]) if math.isinf(of(first, ends[-1])) else first

        def found(plans: Sequence[Compiled]) -> tuple[Compiled, float]:
            least = [(sizes, best(plans, sizes)) for sizes in ends]
            self.priced += len(ends)
            losses = [max(_ratio(of(plan, sizes), seconds) for sizes, seconds in least) for plan in plans]
            loss = min(losses)
            return plans[losses.index(loss)], loss

        chosen, loss = found(known)
        plans = list(known)
        for sizes in (extents, ends[-1]):
            if loss > TOLERANCE:
                plans.append(compile_at(sizes))
                chosen, loss = found(plans)
        return chosen


def _ratio(seconds: float, least: float) -> float:
    return math.inf if math.isinf(seconds) or not least else seconds / least


def held(compiled: Compiled) -> frozenset[str]:
    """The axes that kernels of a plan hold whole, by the names of those whose extent they have."""
    plan, root = compiled.chosen.plan, dict(compiled.chosen.nest.domains)
    whole = {b.axis for config in plan.configs for b in config.blocks if b.kind == "whole"}
    return frozenset(root.get(axis, axis) for axis in whole)


def growing(compiled: Compiled, extents: Mapping[str, int]) -> list[frozenset[str]]:
    """The axes that loops of a plan walk and no block holds whole, each with those that are as long as it, as the queries of a
    sequence are as many as its keys."""
    nest = compiled.chosen.nest
    root, whole = dict(nest.domains), held(compiled)
    walked = dict.fromkeys(
        root.get(loop.axis, loop.axis) for kernel in nest.kernels for loop in loops_in(kernel.body)
    )
    free = {axis: size for axis, size in extents.items() if size > 1 and axis not in whole}
    found = [
        frozenset(a for a, size in free.items() if size == free[axis]) for axis in walked if axis in free
    ]
    return list(dict.fromkeys(found))


def _least(log: int) -> int:
    return (1 << (log - 1)) + 1 if log else 1
