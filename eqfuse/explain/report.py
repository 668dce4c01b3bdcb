"""What an explanation is of: a compiled kernel, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from eqfuse.errors import VerificationError
from eqfuse.extract.devices import Device
from eqfuse.extract.kernel_shapes import Merges
from eqfuse.limits import OverLimit
from eqfuse.loops.plan import Plan
from eqfuse.loops.plans import Plans
from eqfuse.terms.nodes import Program
from eqfuse.terms.views import Views


@dataclass(frozen=True)
class Report:
    """A kernel's program, its plan for one shape, and what was tried for it. `roles` gives lines about how its kernel is
    divided among warp groups, or why it is not; none where the device has no roles.

    `merges` are the groups of all passes that were asked for; `order` is that of all axes. `unfinished` says how the
    budget of rewriting ended, where it did; `kept` is what the program reads that
    another one makes of constants; `views` is how it takes the tensors of another one that was called; `refused` why the program runs as written, where it does for want of a verified form; `graded` says how
    much is certain about what runs; `gradients` how the last gradient was made, where one was. Costs are
    predicted for sizes that are only assumed unless the kernel `was_called`.
    """

    name: str
    program: Program
    order: tuple[str, ...]
    merges: Merges
    unfinished: str
    refused: VerificationError | OverLimit | None
    plan: Plan
    plans: Plans
    device: Device
    was_called: bool
    graded: str = "unverified"
    roles: Callable[[], tuple[str, ...]] = tuple
    kept: tuple[str, ...] = ()
    views: Views | None = None
    gradients: str = ""


@dataclass(frozen=True)
class Listings:
    """The printed forms of a kernel; `sources` are what is emitted for its device, by name."""

    loops: str
    tile: str
    sources: Mapping[str, str]
    certificate: str
