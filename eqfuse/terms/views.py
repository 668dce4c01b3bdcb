"""How a program takes the tensors of the program that it was made of: positions sorted, axes in chunks, dimensions in the order of memory, axes
collapsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eqfuse.terms.collapse_axes import CollapsedAxes
from eqfuse.terms.nodes import Program
from eqfuse.terms.segments import Segments
from eqfuse.terms.split_axes import SplitAxes


@dataclass(frozen=True)
class Views:
    """Axes are split, or positions are sorted first and axes collapsed then. One of them is there at least."""

    segments: Segments | None = None
    collapsed: CollapsedAxes | None = None
    split: SplitAxes | None = None

    @property
    def _each(self) -> tuple[Segments | CollapsedAxes | SplitAxes, ...]:
        return tuple(each for each in (self.segments, self.split, self.collapsed) if each is not None)

    @property
    def shaped(self) -> CollapsedAxes | SplitAxes | None:
        """How tensors are taken with other dimensions."""
        return self.split or self.collapsed

    @property
    def source(self) -> Program:
        """The program that was called."""
        return self._each[0].source

    @property
    def passes(self) -> tuple[str, ...]:
        """What a certificate lists."""
        return tuple(line for each in self._each for line in each.passes)

    @property
    def few(self) -> dict[str, int]:
        """Extents of axes of the source to verify at."""
        return self.shaped.few if self.shaped else {}

    def fitted(self, extents: Mapping[str, int]) -> Mapping[str, int]:
        """Small extents of axes of the source that the program holds for, made of any."""
        return self.split.fitted(extents) if self.split else extents

    def extents(self, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents of the axes of the program, from those of the source's."""
        found = dict(extents)
        for each in self._each:
            found = each.extents(found)
        return found
