"""What a launch may have other numbers of: shards, and positions of blocks that hold an axis whole. Each number is a binary,
so one that other sizes have already is taken where that costs little.

Both are decided once for each corner of sizes (regions.py). As long as the sizes of an axis stay in one corner, its block is its
own; from the second corner on it is the longest that costs at most `PADDED` times as much, whose other positions are masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eqfuse.compiled import Compiled
from eqfuse.extract.candidates import Candidate, Search, seconds_of
from eqfuse.extract.resources import products
from eqfuse.regions import TOLERANCE, Corner, Regions, held
from eqfuse.terms.integers import power_of_two
from eqfuse.threads import cached

PADDED = 1.1
"""How many times the cost of a block for the very sizes one for longer axes may have."""

WIDEST = 64
"""How many times as long it may be."""

Key = tuple[tuple[str, int], ...]


@dataclass
class Reused:
    """The numbers of one compiled plan, by corner."""

    compiled: Compiled
    shards: dict[Key, int] = field(default_factory=dict)
    least: dict[Key, dict[str, int]] = field(default_factory=dict)

    def shards_at(self, regions: Regions, sizes: Mapping[str, int], search: Search) -> dict[str, int]:
        """The number of shards of every axis that has them."""
        nest, plan = self.compiled.chosen.nest, self.compiled.chosen.plan
        if not nest.shards:
            return {}
        counts, here = self.shards, _key(regions.corner(sizes))
        counts.setdefault(_key(regions.corner(self.compiled.extents)), plan.shards)
        if here not in counts:
            best = search.shards(nest, sizes, plan.configs)
            counts[here] = best if best in counts.values() else self._near(best, sizes, search)
        return dict.fromkeys((axis for axis, _ in nest.shards), counts[here])

    def least_at(self, regions: Regions, sizes: Mapping[str, int], search: Search) -> dict[str, int]:
        """The fewest positions of the block of every axis that is held whole, by its name in the program; axes whose block
        is the one of their own length are not there."""
        compiled = self.compiled
        if compiled.device.kind != "gpu" or compiled.roles is not None:
            return {}
        corner = regions.corner(sizes)
        here = _key(corner)
        if here not in self.least:
            ends, varying = regions.ends(corner), regions.varying
            alone = {axis: power_of_two(ends[-1][axis]) for axis in sorted(self._lengths & corner.keys())}
            self.least[here] = {
                axis: self._longer(axis, least, ends, search) if axis in varying else least
                for axis, least in alone.items()
            }
        return {axis: least for axis, least in self.least[here].items() if least > power_of_two(sizes[axis])}

    @cached
    def _lengths(self) -> frozenset[str]:
        """The axes that kernels hold whole, where none of them multiplies matrices: their instructions take as long for what is
        masked."""
        chosen = self.compiled.chosen
        return frozenset() if any(map(products, chosen.nest.kernels)) else held(self.compiled)

    def _near(self, best: int, sizes: Mapping[str, int], search: Search) -> int:
        """A number of shards that costs little more than the best, where there is one already."""
        seconds = {
            n: seconds_of(search.at(self.compiled.chosen, sizes, n)) for n in {best, *self.shards.values()}
        }
        known = min(self.shards.values(), key=seconds.__getitem__)
        return known if seconds[known] <= TOLERANCE * seconds[best] else best

    def _longer(self, axis: str, least: int, ends: Sequence[Mapping[str, int]], search: Search) -> int:
        """A block for at least so many positions of an axis: one that there is, or the longest."""
        used = sorted({blocks[axis] for blocks in self.least.values() if blocks[axis] >= least})
        if least in used:
            return least
        alone = [seconds_of(search.at(self.compiled.chosen, sizes)) for sizes in ends]

        def costs(longer: int) -> bool:
            padded = self._padded(axis, longer)
            return any(
                not seconds_of(search.at(padded, sizes)) <= PADDED * seconds
                for sizes, seconds in zip(ends, alone, strict=True)
            )

        for known in used:
            if not costs(known):
                return known
        longest = least
        while longest < WIDEST * least and not costs(2 * longest):
            longest *= 2
        return longest

    def _padded(self, axis: str, least: int) -> Candidate:
        """The plan with a block for so many positions of an axis."""
        candidate, root = self.compiled.chosen, dict(self.compiled.chosen.nest.domains)
        configs = tuple(
            replace(
                config,
                least=tuple(
                    (b.axis, least)
                    for b in config.blocks
                    if b.kind == "whole" and root.get(b.axis, b.axis) == axis
                ),
            )
            for config in candidate.plan.configs
        )
        return replace(candidate, plan=replace(candidate.plan, configs=configs))


def _key(corner: Corner) -> Key:
    return tuple(corner.items())
