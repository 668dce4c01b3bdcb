"""Smaller blocks, so that every thread of a CPU has some of its own.

A grid of fewer blocks than threads is run by one thread, whose operations torch shares out; each of them
then waits for the slower half. Blocks of their own wait for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache

from eqfuse.extract.shape import Shape
from eqfuse.loops.kernel_axes import KEPT, kernel_axes
from eqfuse.loops.nodes import Kernel
from eqfuse.loops.walk import expressions
from eqfuse.terms.nodes import Call, Load, Reduce

LEAST_WORK = 1 << 17
"""Elementwise operations of a block that is worth a thread: about as many microseconds as it takes to wake one."""

MULTIPLICATION = 1 / 8
"""The time of a multiplication and addition within a matrix product, in elementwise operations."""

OPERATION = 1 << 14
"""Elements of an operation that take about as long as starting it."""

AGAIN = 1.1
"""How much the work may grow by what smaller blocks load or compute again."""


@lru_cache(KEPT)
def _operations(kernel: Kernel) -> tuple[tuple[frozenset[str], float], ...]:
    """The axes of every operation and load, and the time of one position in elementwise operations."""

    def found() -> Iterator[tuple[frozenset[str], float]]:
        axes = kernel_axes(kernel, vectors=True)
        for expr in expressions(kernel.body):
            for node in axes.computed(expr):
                match node:
                    case Reduce(_, axis, body):
                        product = axes.contraction(node)
                        yield (
                            axes.of(node) | {axis} if product else axes.of(body),
                            MULTIPLICATION if product else 1.0,
                        )
                    case Call() | Load():
                        yield axes.of(node), 1.0

    return tuple(found())


def spread(
    kernel: Kernel, blocks: Mapping[str, int], fixed: Collection[str], shape: Shape, instances: int
) -> dict[str, int]:
    """`blocks` with those of parallel axes halved, apart from `fixed` ones, until there are so many instances;
    less where the work would grow, or be too little for a thread or for the operations that it is made of."""
    extents = shape.extents

    def count(blocks: Mapping[str, int]) -> int:
        return math.prod(math.ceil(extents[a] / blocks[a]) for a in kernel.parallel)

    def work(blocks: Mapping[str, int]) -> float:
        return sum(
            weight
            * shape.positions(axes)
            * math.prod(math.ceil(extents[a] / blocks[a]) for a in kernel.parallel if a not in axes)
            for axes, weight in _operations(kernel)
        )

    most = AGAIN * work(blocks)
    least = max(LEAST_WORK, OPERATION * len(_operations(kernel)))
    while count(blocks) < instances:
        halved = [
            {**blocks, a: math.ceil(blocks[a] / 2)}
            for a in kernel.parallel
            if a not in fixed and blocks[a] > 1
        ]
        worth = [b for b in halved if least * count(b) <= work(b) <= most]
        if not worth:
            break
        blocks = min(worth, key=work)
    return dict(blocks)
