"""Numbers of shards that several sizes share: each number is a binary, so one that other sizes have already is taken where that
costs little. They are decided once for each bucket of sizes (regions.py).

Blocks that hold an axis whole are not shared: what is masked in one that is twice as long takes as long as what is not. On an
H200 rows of 40 to 9000 positions took 1.03 to 2.2 times as long in such blocks, 1.7 in the median of 28 programs and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eqfuse.calls.regions import TOLERANCE, Regions, SizeBucket
from eqfuse.compiled import Compiled
from eqfuse.extract.candidates import PlanSearch, seconds_of

Key = tuple[tuple[str, int], ...]


@dataclass
class Reused:
    """The numbers of shards of one compiled plan, by bucket."""

    compiled: Compiled
    counts: dict[Key, int] = field(default_factory=dict)

    def shards_at(self, regions: Regions, sizes: Mapping[str, int], search: PlanSearch) -> dict[str, int]:
        """The number of shards of every axis that has them."""
        nest, plan = self.compiled.chosen.nest, self.compiled.chosen.plan
        if not nest.shards:
            return {}
        counts, here = self.counts, _key(regions.bucket(sizes))
        counts.setdefault(_key(regions.bucket(self.compiled.extents)), plan.shards)
        if here not in counts:
            best = search.shards(nest, sizes, plan.configs)
            counts[here] = best if best in counts.values() else self._near(best, sizes, search)
        return dict.fromkeys((axis for axis, _ in nest.shards), counts[here])

    def _near(self, best: int, sizes: Mapping[str, int], search: PlanSearch) -> int:
        """A number of shards that costs little more than the best, where there is one already."""
        seconds = {
            n: seconds_of(search.at(self.compiled.chosen, sizes, n)) for n in {best, *self.counts.values()}
        }
        known = min(self.counts.values(), key=seconds.__getitem__)
        return known if seconds[known] <= TOLERANCE * seconds[best] else best


def _key(bucket: SizeBucket) -> Key:
    return tuple(bucket.items())
