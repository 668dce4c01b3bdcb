"""What a kernel has for the sizes that it was called with: a compiled plan for each region of them, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eqfuse import certification, compiler, division
from eqfuse.arguments import Arguments, CallKey, Given, Scalars, Tensors, as_given, to_numpy
from eqfuse.certification import Checks
from eqfuse.compiled import Compiled, Shape, shape_of
from eqfuse.derived import Derived
from eqfuse.devices import Target, device_named, place_of
from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.extract.candidates import Candidate, Search, seconds_of, with_outputs
from eqfuse.extract.candidates import shape_of as shape_of_nest
from eqfuse.extract.devices import Device
from eqfuse.extract.foreseen import Foreseen
from eqfuse.lowered import lower_nest
from eqfuse.records import dataclass
from eqfuse.regions import Corner, Region, Regions
from eqfuse.reuse import Reused
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.threads import Lock, cached, uncollected, undisturbed
from eqfuse.tile.modes import Mode
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.storage import resolve_extents
from eqfuse.verify.certificate import ALL_UNTAKEN, Certificate

if TYPE_CHECKING:
    from eqfuse.tile.gluon.launch import GluonProgram
    from eqfuse.tile.host import HostProgram
    from eqfuse.tile.roles.nodes import RolesProgram
    from eqfuse.tile.triton.direct import Kind
    from eqfuse.tile.triton.launch import TritonProgram
    from eqfuse.tile.triton.planned import Planned

Results = Mapping[str, torch.Tensor]
Runner = Callable[..., Results]
"""The outputs by name, from tensors and scalars by name, the extents of axes and the numbers of shards."""

Call = Callable[[Mapping[str, Any], Sequence[int]], Any]
"""The outputs as a call gives them, from its values by name and the addresses of its tensors; None where the call has to be
looked at once more."""

Kinds = tuple[str, tuple[tuple[str, str], ...]]
"""A device's name, and the dtypes of tensors."""


MOST_CALLS = 1024
"""How many kinds of calls are remembered."""

FAR_BEHIND = 2
"""How many times the cost of the chosen plan another one may have, to be looked at for other sizes, where it is not the best
of its schedule."""


def _apart(call: Call, shapes: Sequence[tuple[int, ...]]) -> Call:
    """What gives the outputs of a call in other shapes."""

    def apart(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
        made = call(values, addresses)
        if len(shapes) == 1:
            return made.view(shapes[0])
        return tuple(each.view(shape) for each, shape in zip(made, shapes, strict=True))

    return apart


def _near(compiled: Compiled, extents: Mapping[str, int]) -> list[Candidate]:
    """The candidates that are looked at for other sizes than those that a plan was chosen for: what was not far behind there,
    and for smaller sizes the best of each schedule too, for what did not fit before may fit now."""
    most = FAR_BEHIND * seconds_of(compiled.chosen)
    first: dict[str, Candidate] = {}
    if any(extents[axis] < extent for axis, extent in compiled.extents.items()):
        for candidate in compiled.candidates:  # cheapest first
            first.setdefault(candidate.plan.schedule, candidate)
    return [c for c in compiled.candidates if seconds_of(c) <= most or first.get(c.plan.schedule) is c]


@dataclass(frozen=True)
class Specialization:
    """What is run for the like of one call's arguments: a plan of the region that the sizes are in, and the sizes. Where
    an axis is empty, there is nothing but the unfused program to run; what is `compiled` is then for one position of it."""

    compiled: Compiled
    shards: Mapping[str, int]
    extents: Mapping[str, int]
    dtypes: Mapping[str, str]
    is_empty: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Extents of axes, and numbers of shards."""
        return {**self.extents, **self.shards}

    @property
    def shape(self) -> Shape:
        """What a search for a faster plan is for: these very sizes."""
        return shape_of(self.extents, self.dtypes, self.compiled.device)


@dataclass(frozen=True)
class Known:
    """What runs calls like one that was checked and has run: it takes the values of a call by name, and the addresses of its
    tensors, and gives what the call does; None where the call has to be looked at once more. `extents` are those of the axes of
    the program that was called."""

    compiled: Compiled
    call: Call
    extents: Mapping[str, int]


@dataclass(frozen=True)
class Routed:
    """What runs a call: the plans of the program that was called, or of it with joined axes (then `shapes` are those that the
    outputs have apart), the arguments as these take them, what is run of them, and the extents of the program's axes."""

    by: Specializations
    given: Given
    special: Specialization
    extents: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]] | None = None

    def apart(self, results: Results) -> Results:
        """The outputs as the program that was called has them."""
        if self.shapes is None:
            return results
        return {name: made.view(self.shapes[name]) for name, made in results.items()}


@dataclass
class Specializations:
    """The plans of one program, compiled where a call's sizes are in no region of another. With `verifies`, what is not
    verified is not handed out. Several threads may ask at once: the first compiles, under the program's lock."""

    derived: Derived
    target: Target
    prefer: str | None
    verifies: bool
    checks: Checks
    native: Mode = "background"
    _compiled: dict[Shape, Compiled] = field(default_factory=dict)
    _regions: dict[Kinds, Regions] = field(default_factory=dict)
    _searches: dict[Kinds, Search] = field(default_factory=dict)
    _prices: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[Compiled, float]] = field(
        default_factory=dict
    )
    _tuned: dict[Shape, Compiled] = field(default_factory=dict)
    _corners: dict[tuple[Any, ...], tuple[Compiled, Mapping[str, int]]] = field(default_factory=dict)
    _made: dict[int, tuple[Compiled, Sequence[tuple[int, Sequence[str]]]]] = field(default_factory=dict)
    _numbers: dict[int, Reused] = field(default_factory=dict)
    _roles: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[Compiled, Compiled]] = field(
        default_factory=dict
    )
    _refused: dict[Shape, VerificationError] = field(default_factory=dict)
    known: dict[CallKey, Known] = field(default_factory=dict)
    _last: tuple[CallKey, Known] | None = None
    _calls: dict[Any, Specialization] = field(default_factory=dict)
    _runners: dict[int, tuple[Compiled, Runner]] = field(default_factory=dict)
    _programs: dict[int, tuple[Compiled, HostProgram | TritonProgram | GluonProgram]] = field(
        default_factory=dict
    )

    def __getstate__(self) -> dict[str, Any]:
        """Without what is loaded on a device."""
        state = {
            **self.__dict__,
            "_runners": {},
            "_programs": {},
            "_numbers": {},
            "_corners": {},
            "_made": {},
            "_roles": {},
            "known": {},
            "_last": None,
            "_searches": {},
            "_prices": {},
        }
        return {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}

    @property
    def lock(self) -> Lock:
        """Held by whoever compiles, or reads what compiling adds to."""
        return self.derived.lock

    @property
    def was_called(self) -> bool:
        return any(regions.found for regions in self._regions.values())

    @property
    def regions(self) -> list[Region]:
        """The regions of sizes that were found so far, in the order of the calls that they were found for."""
        return [region for regions in self._regions.values() for region in regions.found]

    @property
    def compilations(self) -> int:
        """How many programs were compiled to be run: see `Kernel.compilations`."""
        return sum(program.compilations for _, program in self._programs.values())

    @cached
    def arguments(self) -> Arguments:
        """The arguments that calls take."""
        return Arguments(self.derived.program)

    def routed(self, given: Given) -> Routed:
        """A call of the program as it is."""
        special = self.of(self.arguments, given)
        return Routed(self, given, special, special.extents)

    def of(self, arguments: Arguments, given: Given) -> Specialization:
        """What to run for these arguments, which are checked at the first call with their like."""
        integers = self.derived.program.integers
        key = (
            *[(n, t.shape, t.dtype, t.device) for n, t in given.tensors.items()],
            *[(n, s if n in integers else None) for n, s in given.scalars.items()],
            *(given.sizes or {}).items(),
        )
        found = self._calls.get(key)
        if found is None:
            extents, dtypes = arguments.bound(given)
            with self.lock:
                if len(self._calls) >= MOST_CALLS:
                    self._calls.clear()
                found = self._calls[key] = self._special(extents, dtypes, self.target.of(given.tensors))
        return found

    def _special(
        self, extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device
    ) -> Specialization:
        """What to run for these sizes and dtypes."""
        some = {axis: extent or 1 for axis, extent in extents.items()}
        tuned = self._tuned.get(shape_of(some, dtypes, device)) if self._tuned else None
        if tuned is not None:
            regions = self._regions_of(dtypes, device)
            shards = self._reused(tuned).shards_at(regions, some, self._search(tuned))
            return Specialization(tuned, shards, extents, dtypes, 0 in extents.values())
        regions = self._regions_of(dtypes, device)
        corner = regions.corner(some)
        key = (id(regions), *corner.items())
        if key not in self._corners:
            self._corners[key] = self._at_corner(regions, corner, some, dtypes, device)
        return Specialization(*self._corners[key], extents, dtypes, 0 in extents.values())

    def _at_corner(
        self,
        regions: Regions,
        corner: Corner,
        extents: Mapping[str, int],
        dtypes: Mapping[str, str],
        device: Device,
    ) -> tuple[Compiled, Mapping[str, int]]:
        """What runs at all sizes of a corner: a plan, and its shards."""
        sizes = regions.sizes(corner)
        compiled = regions.at(extents)
        if compiled is None:
            self._prices.clear()
            with uncollected():
                compiled = regions.add(
                    extents,
                    lambda extents: self.compile(extents, dtypes, device),
                    self._seconds,
                    self._seconds_of,
                )
        compiled = self._divided(compiled, sizes)
        return compiled, self._reused(compiled).shards_at(regions, sizes, self._search(compiled))

    def _divided(self, compiled: Compiled, sizes: Mapping[str, int]) -> Compiled:
        """The plan of a region with the roles that are best at these sizes. Roles that are not verified are not taken."""
        if compiled.device.roles is None:
            return compiled
        key = id(compiled), tuple(sorted(sizes.items()))
        if key not in self._roles:
            with uncollected():
                found = division.divided_at(self.derived, compiled, sizes)
            known = (
                c for _, c in self._roles.values() if c.chosen == found.chosen and c.shape == found.shape
            )
            found = next(known, found)
            if self.verifies and found is not compiled:
                try:
                    self.certificate(found)
                except VerificationError:
                    found = compiled
            self._roles[key] = compiled, found
        return self._roles[key][1]

    def _regions_of(self, dtypes: Mapping[str, str], device: Device) -> Regions:
        kinds = device.name, tuple(sorted(dtypes.items()))
        if kinds not in self._regions:
            self._regions[kinds] = Regions(frozenset(self.derived.program.lengths))
        return self._regions[kinds]

    def _seconds(self, known: Sequence[Compiled], extents: Mapping[str, int]) -> float:
        """The predicted seconds of the best of the compiled plans, and of those that were found beside them: the best of
        each schedule, and what was not far behind. What is best has tiles that are chosen for these sizes: others may look
        better than they would be chosen. Infinite where none fits."""
        least = min(self._seconds_of(compiled, extents) for compiled in known)
        found = {
            (candidate.plan.kernels, candidate.plan.configs): (compiled, candidate)
            for compiled in known
            for candidate in _near(compiled, extents)
            if self.prefer in (None, candidate.plan.schedule)
        }
        better = {
            candidate.plan.kernels: (compiled, candidate)
            for compiled, candidate in found.values()
            if candidate is compiled.chosen or self._priced(compiled, candidate, extents) < least
        }
        retiled = (
            self._search(compiled).retiled(candidate, extents) for compiled, candidate in better.values()
        )
        return min((least, *map(seconds_of, retiled)))

    def _seconds_of(self, compiled: Compiled, extents: Mapping[str, int]) -> float:
        """The predicted seconds of a plan at other sizes; infinite where it does not fit."""
        key = id(compiled), tuple(extents.items())
        if key not in self._prices:
            self._prices[key] = compiled, self._priced(compiled, compiled.chosen, extents)
        return self._prices[key][1]

    def _priced(self, compiled: Compiled, candidate: Candidate, extents: Mapping[str, int]) -> float:
        return seconds_of(self._search(compiled).at(candidate, extents))

    def _search(self, compiled: Compiled) -> Search:
        kinds = compiled.device.name, tuple(sorted(compiled.dtypes.items()))
        if kinds not in self._searches:
            self._searches[kinds] = Search(
                self.derived.program, compiled.dtypes, compiled.device, self.derived.nests
            )
        return self._searches[kinds]

    def _reused(self, compiled: Compiled) -> Reused:
        return self._numbers.setdefault(id(compiled), Reused(compiled))

    def compile(self, extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device) -> Compiled:
        """The plan for a shape. The program runs as written where what was derived of it is not verified; raises
        VerificationError where that is no way out: a schedule was asked for, a rule of the user's own may be wrong, or
        the program as written is not verified either. As it is written, it may have branches of which no trial took a
        side: nothing was derived from their orders."""
        shape = shape_of(extents, dtypes, device)
        if shape not in self._compiled:
            asked, checks = (self.derived, extents, dtypes, device), self.checks if self.verifies else None
            try:
                self._compiled[shape] = compiler.pipeline(*asked, self.prefer, checks)
            except VerificationError as error:
                if self.prefer is not None or self.derived.scope.added:
                    raise
                try:
                    self._compiled[shape] = compiler.pipeline(*asked, "multi_pass", self._as_written)
                except VerificationError:
                    raise error from None
                self._refused[shape] = error
        return self._compiled[shape]

    def refused(self, compiled: Compiled) -> VerificationError | None:
        """Why the derived form of a shape was not verified, so that the program runs as written; None where it was."""
        return self._refused.get(compiled.shape)

    @property
    def _as_written(self) -> Checks:
        """How the program as it is written is verified."""
        return replace(self.checks, allow=(ALL_UNTAKEN,))

    def _checks_of(self, compiled: Compiled) -> Checks:
        return self._as_written if compiled.shape in self._refused else self.checks

    def certificate(self, compiled: Compiled) -> Certificate:
        """The certificate of a shape, verified now where it was not. Raises VerificationError."""
        return certification.certify(self.derived, compiled, self._checks_of(compiled))

    def certified(self, compiled: Compiled) -> Certificate | None:
        """The certificate of a shape, where there is one already."""
        return certification.certified(self.derived, compiled, self._checks_of(compiled))

    def planned(self, special: Specialization) -> Compiled:
        """The plan that the cost model chooses for the very sizes of a call, whatever runs now."""
        return compiler.pipeline(
            self.derived, special.extents, special.dtypes, special.compiled.device, self.prefer
        )

    def tuned(self, new: Compiled) -> None:
        """Runs another plan for a shape from now on."""
        self._tuned[new.shape] = new
        self.forget()
        self._calls = {call: found for call, found in self._calls.items() if found.shape != new.shape}

    # -- known calls ------------------------------------------------------------------------------

    def known_call(self, key: CallKey) -> Known | None:
        """What runs calls of a key, where there is something already. Calls come in runs of one kind: to compare keys takes
        less than to look one up."""
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        found = self.known.get(key)
        if found is not None:
            self._last = key, found
        return found

    def forget(self) -> None:
        """Calls are looked at once more."""
        self.known.clear()
        self._last = None

    def stored(self, special: Specialization) -> int:
        """Bytes of what the kernels of a call make for each other."""
        compiled, sizes = special.compiled, special.sizes
        found = self._made.get(id(compiled))
        if found is None:
            nest, dtypes = compiled.chosen.nest, with_outputs(self.derived.program, special.dtypes)
            shape, of = shape_of_nest(nest, special.extents, dtypes, 1), dict(nest.domains)
            made = [b for b in nest.buffers if not b.is_output]
            each = [(shape.itemsize(b.name), [of.get(axis, axis) for axis in b.axes]) for b in made]
            found = self._made[id(compiled)] = compiled, each
        return sum(size * prod([sizes.get(axis, 1) for axis in axes]) for size, axes in found[1])

    def foreseen(self, special: Specialization) -> Foreseen:
        """What a call would take, and its kernels would make for each other."""
        compiled, extents = special.compiled, special.extents
        nest, shards = compiled.chosen.nest, max(special.shards.values(), default=1)
        shape = shape_of_nest(nest, extents, with_outputs(self.derived.program, special.dtypes), shards)
        made = {
            b: shape.itemsize(b.name) * shape.positions(frozenset(b.axes))
            for b in nest.buffers
            if not b.is_output
        }
        of = dict(nest.domains)
        axes = (
            of.get(axis, axis) for b in sorted(made, key=made.__getitem__, reverse=True) for axis in b.axes
        )
        own = tuple(dict.fromkeys(axis for axis in axes if axis in extents))
        return Foreseen(self.stored(special), own, lambda: self._seconds_of(compiled, extents))

    def called(
        self,
        key: CallKey | None,
        routed: Routed,
        given: Given,
        addresses: Sequence[int],
        values: Mapping[str, Any],
    ) -> Any:
        """The outputs of a call, as it gives them. Where it has a key, what runs calls like it is kept; where its launches are
        those of another one with other sizes, it goes straight to these."""
        by, special = routed.by, routed.special
        if given.numpy or special.is_empty:
            key = None
        planned = None if key is None else by._planned(special, routed.given)
        call = None if planned is None else by._planned_call(special, planned, routed.given)
        made = None if call is None else call(values, addresses)
        if key is not None and call is not None and made is not None:
            self._keep(key, Known(special.compiled, call, routed.extents))
            return made
        results = routed.apart(by.run(special, routed.given))
        if key is not None:
            by._learn(special, planned, routed.given)
            self._remember(key, routed)
        return given.returned([results[output.name] for output in self.derived.program.outputs])

    def _planned(self, special: Specialization, given: Given) -> Planned | None:
        """What a call launches on a GPU, where Triton's binaries run it; None where nothing of its plan has run there yet."""
        program = self._tiles_of(special)
        if program is None:
            return None
        return program.planned(given.tensors, given.scalars, special.sizes)

    def _planned_call(self, special: Specialization, planned: Planned, given: Given) -> Call | None:
        """What runs a call that launches what others have launched, and calls like it."""
        program = self._tiles_of(special)
        planner = None if program is None else program.planner
        if planner is None:
            return None
        outputs = tuple(output.name for output in self.derived.program.outputs)
        kind = planner.kind(planned, tuple(given.tensors), outputs, place_of(given.tensors))
        return None if kind is None else planner.form(kind)(kind)

    def _learn(self, special: Specialization, planned: Planned | None, given: Given) -> None:
        """Notes what a call has launched."""
        planned = planned or self._planned(special, given)
        program = None if planned is None else self._tiles_of(special)
        if planned is None or program is None or program.planner is None:
            return
        kind = self._kind(special, given)
        if kind is not None:
            program.planner.learn(planned, kind.known)

    def _tiles_of(self, special: Specialization) -> TritonProgram | None:
        """The Triton module that runs calls, where that is what runs them."""
        found = self._programs.get(id(special.compiled))
        return found[1] if found is not None and hasattr(found[1], "planner") else None  # type: ignore[return-value]

    def _keep(self, key: CallKey, known: Known) -> None:
        if len(self.known) >= MOST_CALLS:
            self.known.clear()
        self.known[key] = known

    def _remember(self, key: CallKey, routed: Routed) -> None:
        """Keeps what runs calls of a key."""
        given, by, special = routed.given, routed.by, routed.special
        names, numbers = tuple(given.tensors), tuple(given.scalars)

        def second(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
            """Many kinds of calls come once: what runs the others is made at the second."""
            tensors, scalars = ({name: values[name] for name in part} for part in (names, numbers))
            call = by._call(special, Given(by._taken(tensors), scalars, None, numpy=False))
            if call is None:
                return None
            if routed.shapes is not None:
                call = _apart(call, [routed.shapes[o.name] for o in by.derived.program.outputs])
            self.known[key] = Known(special.compiled, call, routed.extents)
            self._last = None
            return call(values, addresses)

        self._keep(key, Known(special.compiled, second, routed.extents))

    def _taken(self, tensors: Tensors) -> Tensors:
        """The tensors of a call like one that has run, as the program takes them."""
        joined = self.derived.joined
        return tensors if joined is None else joined.views(tensors) or tensors

    def _call(self, special: Specialization, given: Given) -> Call | None:
        names, outputs = tuple(given.tensors), [output.name for output in self.derived.program.outputs]
        host = self.host(special.compiled)
        if host is None:
            kind = self._kind(special, given)
            if kind is not None:
                from eqfuse.tile.triton.direct import direct

                return direct(kind)
        elif not host.is_settled(given.tensors):
            return None
        else:
            call = host.direct(names, given.tensors, special.extents, special.shards, outputs)
            if call is not None:
                return call
        runner, scalars = self._runners[id(special.compiled)][1], tuple(given.scalars)

        def run(values: Mapping[str, Any], addresses: Sequence[int]) -> Any:
            with undisturbed():
                tensors, numbers = ({name: values[name] for name in part} for part in (names, scalars))
                made = runner(self._taken(tensors), numbers, special.extents, special.shards)
            return as_given([made[name] for name in outputs], numpy=False)

        return run

    def _kind(self, special: Specialization, given: Given) -> Kind | None:
        """What Triton has compiled for a call that has run; None where that was not Triton."""
        found = self._programs.get(id(special.compiled))
        if found is None or not hasattr(found[1], "kind"):
            return None
        program = self.derived.program
        tensors = {tensor.name: given.tensors[tensor.name] for tensor in program.tensors}
        integers = [name for name in program.scalars if name in program.integers]
        outputs = [output.name for output in program.outputs]
        names = tuple(given.tensors)
        return found[1].kind(tensors, given.scalars, integers, special.sizes, names, outputs)

    def prepared(self, special: Specialization, given: Given) -> Results:
        """The outputs of a call, once all that it needs is compiled: C++ is waited for."""
        compiled = special.compiled
        if compiled.device.kind == "cpu" and not special.is_empty:
            with self.lock:
                if id(compiled) not in self._runners:
                    self._runners[id(compiled)] = compiled, self.runner(compiled)
            host = self.host(compiled)
            assert host is not None
            host.prepare(given.tensors, special.extents, special.shards)
        results = self.run(special, given)
        if not special.is_empty:
            self._learn(special, None, given)
        return results

    def held(self, special: Specialization, given: Given, outputs: Results) -> Callable[[], None]:
        """What runs a call, which has run, once more: on the same tensors, into the same outputs."""
        compiled, sizes = special.compiled, (special.extents, special.shards)
        host = None if special.is_empty else self.host(compiled)
        if host is not None:
            return host.into(given.tensors, outputs, given.scalars, *sizes)
        kind = None if special.is_empty else self._kind(special, given)

        def run() -> None:
            with undisturbed():
                for name, made in self.run(special, given).items():
                    outputs[name].copy_(made)

        if kind is None:
            return self._into(special, given, outputs) or run
        from eqfuse.tile.triton.direct import bound

        again = bound(kind, given.tensors, given.scalars, outputs)

        def launch() -> None:
            if not again():
                run()

        return launch

    def _into(self, special: Specialization, given: Given, outputs: Results) -> Callable[[], None] | None:
        """What runs a call whose kernel has roles into the same outputs; None where it has none."""
        from eqfuse.tile.gluon.launch import GluonProgram

        found = self._programs.get(id(special.compiled))
        if found is None or special.is_empty or not isinstance(found[1], GluonProgram):
            return None
        sizes = special.sizes
        program = found[1].form({**given.tensors, "sizes": sizes})
        made = tuple(outputs[output.name] for output in self.derived.program.outputs)
        out = made[0] if len(made) == 1 else made

        def launch() -> None:
            with undisturbed():
                program(**given.tensors, **given.scalars, out=out, sizes=sizes)

        return launch

    # -- running -----------------------------------------------------------------------------------

    def run(self, special: Specialization, given: Given) -> Results:
        """The outputs by name."""
        compiled = special.compiled
        if special.is_empty:
            return self._unfused(compiled, given)
        arguments = given.tensors, given.scalars, special.extents, special.shards
        found = self._runners.get(id(compiled))
        if found is None:
            with self.lock:
                found = self._runners.get(id(compiled))
                if found is None:
                    runner = self.runner(compiled)
                    try:
                        return runner(*arguments)  # others wait: it may be compiled for a GPU now
                    finally:
                        self._runners[id(compiled)] = compiled, runner
        return found[1](*arguments)

    def runner(self, compiled: Compiled, *, wait: bool = False) -> Runner:
        """What runs a plan on tensors and scalars by name, at any sizes; compiling for a GPU waits for the first run. With
        `wait` the first run on a CPU waits for its C++, unless that is switched off."""
        if compiled.device.kind == "cpu":
            from eqfuse.tile.host import HostProgram

            mode: Mode = "wait" if wait and self.native == "background" else self.native
            host = HostProgram(compiled.tile, lambda: self.tiles(compiled), self.derived.program, mode)
            self._programs[id(compiled)] = compiled, host
            return host
        from eqfuse.tile.triton.launch import TritonProgram

        tiles = TritonProgram(self.triton(compiled), self.derived.name)
        launcher: TritonProgram | GluonProgram = tiles
        if compiled.roles is not None:
            from eqfuse.tile.gluon.launch import GluonProgram

            launcher = GluonProgram(self.gluon(compiled), self.derived.name, tiles)
        self._programs[id(compiled)] = compiled, launcher
        outputs = [output.name for output in self.derived.program.outputs]

        def run(
            tensors: Tensors,
            scalars: Scalars,
            extents: Mapping[str, int],
            shards: Mapping[str, int],
        ) -> Results:
            made = launcher(**tensors, **scalars, sizes={**extents, **shards})
            return dict(zip(outputs, made if isinstance(made, tuple) else (made,), strict=True))

        return run

    def tiles(self, compiled: Compiled) -> TileProgram:
        """The tile program of a shape in blocks for native code on a CPU."""
        from eqfuse.tile.native.blocks import native_configs

        chosen, program = compiled.chosen, self.derived.program
        shards = {axis: chosen.plan.shards for axis, _ in chosen.nest.shards}
        sizes = resolve_extents(compiled.tile, compiled.extents, shards)
        configs = native_configs(compiled.tile, chosen.plan.configs, sizes)
        return lower_nest(chosen.nest, program, compiled.dtypes, configs, compiled.device)

    def host(self, compiled: Compiled) -> HostProgram | None:
        """What runs a shape on a CPU; None before it is called there."""
        found = self._programs.get(id(compiled))
        if found is None or compiled.device.kind != "cpu":
            return None
        from eqfuse.tile.host import HostProgram

        return found[1] if isinstance(found[1], HostProgram) else None

    def triton(self, compiled: Compiled) -> str:
        """The Triton module of a compiled shape; of a shape on the CPU, that of the plan for sm_90."""
        if compiled.device.kind == "cpu":
            compiled = self.compile(compiled.extents, compiled.dtypes, device_named("sm_90"))
        return compiler.emit_triton(self.derived, compiled, self.derived.name)

    def roles(self, compiled: Compiled) -> RolesProgram:
        """A compiled shape in roles. Raises EqfuseError where its plan has none."""
        if compiled.roles is None:
            why = (
                compiled.chosen.plan.code.removeprefix("Triton: ")
                or f"kernels of {compiled.device.name} do not"
            )
            raise EqfuseError(f"the kernel has no roles: {why}", hint="k.triton is its source")
        return compiled.roles

    def gluon(self, compiled: Compiled) -> str:
        """The Gluon module of a compiled shape. Raises EqfuseError where its plan has no roles."""
        self.roles(compiled)
        return compiler.emit_gluon(self.derived, compiled, self.derived.name)

    def _unfused(self, compiled: Compiled, given: Given) -> Results:
        """The unfused program, which is all there is to run where an axis is empty."""
        from eqfuse.terms.interpreter import reference

        program = self.derived.program
        arrays = {name: to_numpy(tensor.cpu()) for name, tensor in given.tensors.items()}
        found = reference(program, arrays, given.scalars, given.sizes)
        found = found if isinstance(found, tuple) else (found,)
        kinds = {buffer.name: buffer.dtype for buffer in compiled.tile.buffers}
        place = place_of(given.tensors)
        return {
            o.name: torch.as_tensor(np.asarray(a)).to(place, TORCH_DTYPES[kinds[o.name] or "f32"])
            for o, a in zip(program.outputs, found, strict=True)
        }
