"""Chooses how a call runs: the program as written, that of sorted positions, of axes in chunks or of views of its tensors, or in parts of an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from eqfuse import compiler
from eqfuse.arguments import CallKey, Given
from eqfuse.calls.call_cache import Calls, Routed
from eqfuse.calls.specialization import Specialization
from eqfuse.compiled import Asked
from eqfuse.errors import ScheduleError, VerificationError
from eqfuse.extract import call_estimate
from eqfuse.extract.candidates import with_outputs
from eqfuse.limits import OverLimit
from eqfuse.terms.collapse_axes import Layouts, collapse_axes, layouts
from eqfuse.terms.extents import shapes_of
from eqfuse.terms.integers import power_of_two
from eqfuse.terms.parser import sized_axes
from eqfuse.terms.segments import segments
from eqfuse.terms.split_axes import split_axes

if TYPE_CHECKING:  # loaded by those who ask: every start would wait for them
    from eqfuse.differentiate.divide import ChunkedCall, Chunker

MOST_KINDS = 256
"""How many kinds of calls it is remembered of how they run."""


@dataclass
class Routes:
    """Chooses original, sorted, axis-collapsed or chunked execution.

    `calls`: of the program as written.
    `sorted`: gives the routes of the program of sorted positions; None where no reduction is over positions that a key selects.
    `in_chunks`: gives the calls of the program with axes in chunks; None where no sum over a prefix is said by them.
    `joint`: gives the calls of the program of views of tensors that lie so, which is planned for the given extents first; None
    where that is the program itself.
    `make_chunker`: makes what splits calls into chunks.
    """

    calls: Calls
    sorted: Callable[[], Routes | None]
    in_chunks: Callable[[], Calls | None]
    joint: Callable[[Layouts, Mapping[str, int]], Calls | None]
    make_chunker: Callable[[], Chunker] | None
    latest: ChunkedCall | None = None
    """How the last call was divided; None where it ran as a whole."""
    _chunker: Chunker | None = None
    _is_sooner: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    _chunked: dict[int, tuple[Specialization, ChunkedCall | None]] = field(default_factory=dict)

    def routed(self, given: Given) -> Routed:
        """What runs a call: the program of views of its tensors, with dimensions in the order of memory and adjacent axes collapsed, where
        that is another one."""
        calls, shapes = self.calls, self.calls.shapes
        program = shapes.derived.program
        views = shapes.derived.views
        if shapes.prefer is not None or (views is not None and views.shaped is not None):
            return calls.routed(given)
        if views is None:
            found = self._of_segments(given) or self._of_chunks(given)
            if found is not None:
                return found
        lies = layouts(program, given.tensors)
        if not lies and collapse_axes(program) is None:
            return calls.routed(given)
        extents, _ = shapes.arguments.bound(given)
        joint = None if 0 in extents.values() else self.joint(lies, extents)
        form = None if joint is None else joint.shapes.derived.collapsed
        taken_as = None if form is None else form.views(given.tensors)
        if joint is None or form is None or taken_as is None:
            return calls.routed(given)
        gone = {part for parts in form.axes.values() for part in parts}
        sizes = {axis: size for axis, size in (given.sizes or {}).items() if axis not in gone}
        taken = replace(given, tensors=taken_as, sizes=sizes or None, out=None)
        try:
            special = joint.routed(taken).special
        except VerificationError:  # the program as it is has a proof of its own, or tells why not
            return calls.routed(given)
        if self.make_chunker is not None and joint.shapes.stored(special) > call_estimate.MUCH:
            return calls.routed(given)
        if given.out:
            own = shapes_of(joint.shapes.derived.program, special.extents)
            out = {name: x.view(own[name]) for name, x in given.out.items() if x.is_contiguous()}
            taken = replace(taken, out=out)
        return Routed(joint, taken, special, extents, shapes_of(program, extents))

    def _of_segments(self, given: Given) -> Routed | None:
        """A call of the program of sorted positions, where that is predicted to take less, its sorting included."""
        shapes = self.calls.shapes
        if segments(shapes.derived.program) is None:
            return None
        extents, dtypes = shapes.arguments.bound(given)
        routes = None if 0 in extents.values() else self.sorted()
        form = None if routes is None else routes.calls.shapes.derived.segments
        if routes is None or form is None or not form.fits(extents):
            return None
        asked = Asked(extents, dtypes, shapes.target.of(given.tensors))
        other = routes.calls.shapes.derived
        wanted = _kind("sorted", asked)
        if not self._chosen(wanted, asked, lambda: compiler.predicted_sorted(other, asked)):
            return None
        as_taken = partial(form.taken, extents=extents)
        values = as_taken({**given.tensors, **given.scalars})
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        scalars = {name: value for name, value in values.items() if name not in tensors}
        own = form.extents(extents)
        sizes = {axis: own[axis] for axis in sized_axes(form.program) if axis in own}
        try:
            routed = routes.routed(replace(given, tensors=tensors, scalars=scalars, sizes=sizes))
        except VerificationError:  # the program as it is has a proof of its own, or tells why not
            self._is_sooner[wanted] = False
            return None
        return replace(routed, extents=extents, as_taken=as_taken)

    def _of_chunks(self, given: Given) -> Routed | None:
        """A call of the program with axes in chunks, where that is predicted to take less."""
        shapes = self.calls.shapes
        split = split_axes(shapes.derived.program)
        if split is None:
            return None
        extents, dtypes = shapes.arguments.bound(given)
        calls = None if 0 in extents.values() or not split.fits(extents) else self.in_chunks()
        form = None if calls is None else calls.shapes.derived.split
        if calls is None or form is None:
            return None
        asked, other = Asked(extents, dtypes, shapes.target.of(given.tensors)), calls.shapes.derived
        wanted = _kind("in chunks", asked)
        if not self._chosen(wanted, asked, lambda: compiler.predicted_in_chunks(other, asked)):
            return None
        own = form.extents(extents)
        sizes = {axis: own[axis] for axis in sized_axes(form.program) if axis in own}
        taken = replace(given, tensors=form.views(given.tensors), sizes=sizes, out=None)
        try:
            special = calls.routed(taken).special
        except VerificationError:  # the program as it is has a proof of its own, or tells why not
            self._is_sooner[wanted] = False
            return None
        return Routed(calls, taken, special, extents, shapes_of(shapes.derived.program, extents))

    def _chosen(self, wanted: tuple[Any, ...], asked: Asked, other: Callable[[], float]) -> bool:
        """Whether another program is predicted to take less than that which was written."""
        if wanted not in self._is_sooner:
            if len(self._is_sooner) >= MOST_KINDS:
                self._is_sooner.clear()
            shapes = self.calls.shapes
            with shapes.lock:
                try:
                    self._is_sooner[wanted] = other() < compiler.predicted(shapes.derived, asked)
                except (ScheduleError, OverLimit):
                    self._is_sooner[wanted] = False
        return self._is_sooner[wanted]

    def run(
        self,
        key: CallKey | None,
        routed: Routed,
        given: Given,
        addresses: list[int],
        values: Mapping[str, Any],
    ) -> Any:
        """The outputs of a call, as it gives them. `key` is None where calls like this one are looked at each time."""
        routes, taken = self if routed.as_taken is None else self.sorted(), routed.given
        is_own = routes is not None and routed.by is routes.calls
        self.latest = chunked = routes._chunked_call(routed.special, taken) if routes and is_own else None
        if chunked is not None:
            return given.returned(chunked({**taken.tensors, **taken.scalars}, routed.special.extents))
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
                if len(self._chunked) >= MOST_KINDS:
                    self._chunked.clear()
                found = self._chunked[id(special)] = special, chunked
        return found[1]


def _kind(form: str, asked: Asked) -> tuple[Any, ...]:
    """What calls have in common that run as the same form; lengths that are near are not priced anew."""
    near = {axis: power_of_two(extent) for axis, extent in asked.extents.items()}
    return form, asked.device.name, *sorted(near.items()), *sorted(asked.dtypes.items())
