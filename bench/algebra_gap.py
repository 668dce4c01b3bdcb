"""How far the orders that are chosen are from the best: beside all orders of small blocks, and beside a greedy choice.

An order is chosen block by block, over all subsets of up to 8 factors, and of the whole program the cost is that of its graph, in which
equal values count once. `Every` tries each order of a block for what the whole expression costs then; `Greedy` multiplies the two
factors whose product is cheapest, until one is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from bench.algebra_programs import Order
from bench.workloads import Workload
from eqfuse.compiler import nominal_extents
from eqfuse.rules.blocks import Block, block_of, completed, sum_over
from eqfuse.rules.reassociate import MOST_FACTORS, Orders, visited
from eqfuse.terms.nodes import Expr, Program, call, free_axes, walk
from eqfuse.terms.parser import parse
from eqfuse.terms.prefixes import alike
from eqfuse.terms.types import program_dtypes

MOST_TRIED = 5
"""Factors of a block up to which each order is tried."""

Part = tuple[Expr, frozenset[str]]
"""A product of factors and its axes."""


def _joined(parts: Sequence[Part], one: int, other: int, block: Block) -> tuple[Part, ...]:
    """The parts with two of them multiplied, summed over the axes that no other part has."""
    rest = [part for place, part in enumerate(parts) if place not in (one, other)]
    needed = free_axes(block.factors[0]).union(*map(free_axes, block.factors)) - {*block.axes}
    needed = needed.union(*(axes for _, axes in rest))
    value, axes = call("mul", parts[one][0], parts[other][0]), parts[one][1] | parts[other][1]
    return (*rest, _summed(value, axes, needed, block))


def _summed(value: Expr, axes: frozenset[str], needed: frozenset[str], block: Block) -> Part:
    return sum_over(value, axes - needed, block), axes & needed


def _parts(block: Block) -> tuple[Part, ...]:
    """The factors, each summed over the axes that it has alone."""
    axes = [free_axes(factor) for factor in block.factors]
    outside = frozenset[str]().union(*axes) - {*block.axes}
    return tuple(
        _summed(factor, own, outside.union(*(a for m, a in enumerate(axes) if m != n)), block)
        for n, (factor, own) in enumerate(zip(block.factors, axes, strict=True))
    )


class Greedy(Orders):
    """Multiplies the two factors of which the product costs least, until one is left."""

    def contracted(self, block: Block, *, apart: bool = False) -> Iterator[Expr]:
        parts = _parts(block)
        while len(parts) > 1:
            pairs = [_joined(parts, *pair, block) for pair in combinations(range(len(parts)), 2)]
            parts = min(pairs, key=lambda made: self.cost(made[-1][0]))
        yield completed(parts[0][0], block)


class Every(Orders):
    """Tries each order of up to `MOST_TRIED` factors; beyond, the one that is chosen."""

    def contracted(self, block: Block, *, apart: bool = False) -> Iterator[Expr]:
        yield from super().contracted(block, apart=apart)
        if len(block.factors) <= MOST_TRIED:
            for made in _trees(_parts(block), block):
                yield completed(made, block)


def _trees(parts: tuple[Part, ...], block: Block) -> Iterator[Expr]:
    if len(parts) == 1:
        yield parts[0][0]
        return
    for pair in combinations(range(len(parts)), 2):
        yield from _trees(_joined(parts, *pair, block), block)


@dataclass(frozen=True)
class Gap:
    """What a program costs in the order that is chosen, in the best of all that were tried, and in the greedy one. `factors`
    are the most that one of its blocks has."""

    program: str
    factors: int
    chosen: float
    best: float
    greedy: float


def gaps(orders_of: Mapping[str, Order], *workloads: Workload) -> list[Gap]:
    """Of each of these programs that has a block of two factors or more."""
    found = []
    for name, (program, extents) in _programs(orders_of, workloads).items():
        outputs = program.outputs
        blocks = [block_of(node) for node in walk(*(output.expr for output in outputs))]
        factors = max((len(block.factors) for block in blocks if block.axes), default=0)
        if factors > 1:
            same, dtypes = alike(program), program_dtypes(program)
            orders = [
                kind(extents, dtypes=dtypes, same=same).all(outputs) for kind in (Orders, Every, Greedy)
            ]
            chosen, best, greedy = (visited(each, extents, same=same) for each in orders)
            found.append(Gap(name, factors, chosen, best, greedy))
    return found


def _programs(
    orders_of: Mapping[str, Order], workloads: Sequence[Workload]
) -> dict[str, tuple[Program, Mapping[str, int]]]:
    found = {name: (parse(order.text), order.sizes) for name, order in orders_of.items()}
    for workload in workloads:
        case = workload.cases["small"]
        program = parse(workload.text(case), scalars=case.constants)
        found[f"{workload.family}: {workload.name}"] = program, nominal_extents(program)
    return found


def said(found: Sequence[Gap]) -> list[str]:
    """The gaps in sentences."""
    tried = [gap for gap in found if gap.factors <= MOST_TRIED]
    above = [gap for gap in tried if gap.chosen > gap.best]
    greedy = [gap for gap in found if gap.greedy > gap.chosen]
    worst = max(found, key=lambda gap: gap.greedy / gap.chosen)
    named = ", ".join(f"{gap.program} {gap.chosen / gap.best:.3f}" for gap in above)
    most = max(gap.factors for gap in found)
    return [
        f"gap of the orders of {len(found)} programs: {len(tried)} have at most {MOST_TRIED} factors in a block, "
        + f"of these {len(above)} cost more than the best of all orders ({named or 'none'}); no block has more than {most} of the "
        + f"{MOST_FACTORS} factors up to which all subsets are looked at",
        f"a greedy choice is dearer for {len(greedy)} of {len(found)}, at most {worst.greedy / worst.chosen:.2f} times ({worst.program})",
    ]
