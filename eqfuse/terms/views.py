"""How a program takes the tensors of the program that it was made of: positions sorted, dimensions in the order of memory, axes collapsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eqfuse.terms.collapse_axes import CollapsedAxes
from eqfuse.terms.nodes import Program
from eqfuse.terms.segments import Segments


@dataclass(frozen=True)
class Views:
    """Positions are sorted first, then axes are collapsed. One of both is there at least."""

    segments: Segments | None = None
    collapsed: CollapsedAxes | None = None

    @property
    def source(self) -> Program:
        """The program that was called."""
        each = self.segments or self.collapsed
        assert each is not None
        return each.source

    @property
    def passes(self) -> tuple[str, ...]:
        """What a certificate lists."""
        return tuple(line for each in (self.segments, self.collapsed) if each for line in each.passes)

    @property
    def few(self) -> dict[str, int]:
        """Extents of axes of the source to verify at."""
        return self.collapsed.few if self.collapsed else {}

    def extents(self, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents of the axes of the program, from those of the source's."""
        found = dict(extents)
        for each in (self.segments, self.collapsed):
            found = each.extents(found) if each else found
        return found
