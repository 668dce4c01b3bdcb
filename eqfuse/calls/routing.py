"""Chooses how a call runs: the program as written, that of views of its tensors, or in chunks of an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eqfuse.arguments import CallKey, Given
from eqfuse.calls.call_cache import Calls, Routed
from eqfuse.calls.specialization import Specialization
from eqfuse.errors import VerificationError
from eqfuse.extract import call_estimate
from eqfuse.extract.candidates import with_outputs
from eqfuse.terms.collapse_axes import Layouts, collapse_axes, layouts

if TYPE_CHECKING:  # loaded by those who ask: every start would wait for them
    from eqfuse.differentiate.divide import ChunkedCall, Chunker

MOST_CHUNKED = 256
"""How many kinds of calls it is remembered of how they are divided."""


@dataclass
class Routes:
    """Chooses original, axis-collapsed or chunked execution.

    `calls`: of the program as written.
    `joint`: gives the calls of the program of views of tensors that lie so, which is planned for the given extents first; None
    where that is the program itself.
    `make_chunker`: makes what splits calls into chunks.
    """

    calls: Calls
    joint: Callable[[Layouts, Mapping[str, int]], Calls | None]
    make_chunker: Callable[[], Chunker] | None
    latest: ChunkedCall | None = None
    """How the last call was divided; None where it ran as a whole."""
    _chunker: Chunker | None = None
    _chunked: dict[int, tuple[Specialization, ChunkedCall | None]] = field(default_factory=dict)

    def routed(self, given: Given) -> Routed:
        """What runs a call: the program of views of its tensors, with dimensions in the order of memory and adjacent axes collapsed, where
        that is another one."""
        calls, shapes = self.calls, self.calls.shapes
        program = shapes.derived.program
        if shapes.prefer is not None or shapes.derived.collapsed is not None:
            return calls.routed(given)
        lies = layouts(program, given.tensors)
        if not lies and collapse_axes(program) is None:
            return calls.routed(given)
        extents, _ = shapes.arguments.bound(given)
        joint = None if 0 in extents.values() else self.joint(lies, extents)
        form = None if joint is None else joint.shapes.derived.collapsed
        views = None if form is None else form.views(given.tensors)
        if joint is None or form is None or views is None:
            return calls.routed(given)
        gone = {part for parts in form.axes.values() for part in parts}
        sizes = {axis: size for axis, size in (given.sizes or {}).items() if axis not in gone}
        taken = Given(views, given.scalars, sizes or None, given.numpy)
        try:
            special = joint.shapes.of(joint.shapes.arguments, taken)
        except VerificationError:  # the program as it is has a proof of its own, or tells why not
            return calls.routed(given)
        if self.make_chunker is not None and joint.shapes.stored(special) > call_estimate.MUCH:
            return calls.routed(given)
        return Routed(joint, taken, special, extents, form.shapes(extents))

    def run(
        self,
        key: CallKey | None,
        routed: Routed,
        given: Given,
        addresses: list[int],
        values: Mapping[str, Any],
    ) -> Any:
        """The outputs of a call, as it gives them. `key` is None where calls like this one are looked at each time."""
        self.latest = chunked = self._chunked_call(routed.special, given) if routed.by is self.calls else None
        if chunked is not None:
            return given.returned(chunked({**given.tensors, **given.scalars}, routed.special.extents))
        return self.calls.called(key, routed, given, addresses, values)

    def _chunked_call(self, special: Specialization, given: Given) -> ChunkedCall | None:
        """How calls of a kind are divided into chunks; None where they run as a whole."""
        if self.make_chunker is None or special.is_empty:
            return None
        shapes = self.calls.shapes
        if shapes.stored(special) <= call_estimate.MUCH:
            return None
        found = self._chunked.get(id(special))
        if found is None:
            with shapes.lock:
                if self._chunker is None:
                    self._chunker = self.make_chunker()
                values = {**given.tensors, **given.scalars}
                dtypes = with_outputs(shapes.derived.program, special.dtypes)
                whole = shapes.estimate(special)
                chunked = self._chunker.of(whole, values, special.extents, dtypes)
                if len(self._chunked) >= MOST_CHUNKED:
                    self._chunked.clear()
                found = self._chunked[id(special)] = special, chunked
        return found[1]
