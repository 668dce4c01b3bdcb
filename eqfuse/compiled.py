"""A program for one shape: what was asked for, and what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from eqfuse.extract.candidates import Candidate
from eqfuse.extract.devices import Device
from eqfuse.fast_dataclass import dataclass
from eqfuse.terms.views import Views
from eqfuse.threads import cached
from eqfuse.tile.nodes import TileProgram

if TYPE_CHECKING:  # loaded at first use: every start would wait for it
    from eqfuse.tile.roles.nodes import RolesProgram

Shape = tuple[str, tuple[tuple[str, int], ...], tuple[tuple[str, str], ...]]
"""A device's name, the extents of axes, and the dtypes of tensors."""


def shape_of(extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device) -> Shape:
    return device.name, tuple(sorted(extents.items())), tuple(sorted(dtypes.items()))


@dataclass(frozen=True)
class Asked:
    """What a plan is chosen for: the extents of the axes, the dtypes of the tensors, a device, and the schedule that it
    has to have, if any."""

    extents: Mapping[str, int]
    dtypes: Mapping[str, str]
    device: Device
    prefer: str | None = None


class Candidates(Sequence[Candidate]):
    """The candidates of a shape whose choice was kept: the others are made when somebody asks."""

    def __init__(self, make: Callable[[], Sequence[Candidate]]) -> None:
        self._make = make

    @cached
    def _made(self) -> tuple[Candidate, ...]:
        return tuple(self._make())

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        return self._made[place]

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._made,)


@dataclass(frozen=True)
class Compiled:
    """One shape's result: the candidates, the chosen one, its tile program, and its roles where it has some. `views` is how it takes
    the tensors of the program that was asked for."""

    candidates: Sequence[Candidate]
    chosen: Candidate
    tile: TileProgram
    dtypes: Mapping[str, str]
    extents: Mapping[str, int]
    device: Device
    roles: RolesProgram | None = None
    views: Views | None = None

    @property
    def asked(self) -> Asked:
        """What any of its plans may have been chosen for."""
        return Asked(self.extents, self.dtypes, self.device)

    @property
    def shape(self) -> Shape:
        """What the plan was chosen for."""
        return shape_of(self.extents, self.dtypes, self.device)
