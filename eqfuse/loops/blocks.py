"""How a kernel walks an axis: chosen per kernel by the cost model, carried by the tile program, run by the printers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BlockKind = Literal["grid", "loop", "whole", "unit"]


@dataclass(frozen=True)
class Block:
    """How a kernel walks an axis.

    grid: one block per program instance. loop: one block per iteration. whole: one block holds the
    whole axis. unit: one position at a time (never a tile dim). `size` is the number of positions
    (a power of two for Triton); None for `whole`, where the extent decides at launch.
    A grid block of size 1 is not a tile dim: the axis is a scalar position.
    `valid`, of a grid block, is how many of its positions exist where that is fewer than `size`: the next block
    starts after them, and the others are masked as those past the end of the axis are.
    """

    axis: str
    kind: BlockKind
    size: int | None
    valid: int | None = None

    @property
    def step(self) -> int:
        """Positions from the start of one block to that of the next."""
        return self.valid or self.size or 1
