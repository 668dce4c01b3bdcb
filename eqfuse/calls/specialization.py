"""What a kernel has for the sizes that it was called with: a compiled plan for each region of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from eqfuse import certification, compiler, results
from eqfuse.arguments import Arguments, Given
from eqfuse.calls.regions import Region, Regions, SizeBucket, growing
from eqfuse.calls.reuse import Reused
from eqfuse.certification import Checks
from eqfuse.compiled import Compiled, Shape, shape_of
from eqfuse.derived import Derived
from eqfuse.devices import Target, device_named
from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.extract.call_estimate import CallEstimate
from eqfuse.extract.candidates import Candidate, PlanSearch, seconds_of, with_outputs
from eqfuse.extract.candidates import shape_of as shape_of_nest
from eqfuse.extract.devices import Device
from eqfuse.fast_dataclass import dataclass
from eqfuse.limits import OverLimit
from eqfuse.loops.in_place import may_replace
from eqfuse.threads import Lock, cached, uncollected
from eqfuse.verify.certificate import ALL_UNTAKEN, Certificate

if TYPE_CHECKING:  # loaded by those who ask: every start would wait for it
    from eqfuse.tile.roles.nodes import RolesProgram

Kinds = tuple[str, tuple[tuple[str, str], ...]]
"""A device's name, and the dtypes of tensors."""

Begin = Callable[[Compiled, Mapping[str, int]], None]
"""What takes a plan that a call will run, before it is verified, and the sizes of the call."""

MOST_CALLS = 1024
"""How many kinds of calls are remembered."""

FAR_BEHIND = 2
"""How many times the cost of the chosen plan another one may have, to be looked at for other sizes, where it is not the best
of its schedule."""


def _near(compiled: Compiled, extents: Mapping[str, int]) -> list[Candidate]:
    """The candidates that are looked at for other sizes than those that a plan was chosen for: what was not far behind there,
    and for smaller sizes the best of each schedule too, for what did not fit before may fit now."""
    most = FAR_BEHIND * seconds_of(compiled.chosen)
    first: dict[str, Candidate] = {}
    if any(extents[axis] < extent for axis, extent in compiled.extents.items()):
        for candidate in compiled.candidates:  # cheapest first
            first.setdefault(candidate.plan.schedule, candidate)
    return [c for c in compiled.candidates if seconds_of(c) <= most or first.get(c.plan.schedule) is c]


def _begin(begin: Begin | None, extents: Mapping[str, int], compiled: Compiled) -> None:
    """Calls `begin` with what will run at these extents, and all its sizes."""
    if begin is not None:
        chosen = compiled.chosen
        begin(compiled, {**extents, **{axis: chosen.plan.shards for axis, _ in chosen.nest.shards}})


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


@dataclass
class Specializations:
    """The plans of one program, compiled where a call's sizes are in no region of another. With `verifies`, what is not
    verified is not handed out. Several threads may ask at once: the first compiles, under the program's lock."""

    derived: Derived
    target: Target
    prefer: str | None
    verifies: bool
    checks: Checks
    _compiled: dict[Shape, Compiled] = field(default_factory=dict)
    _regions: dict[Kinds, Regions] = field(default_factory=dict)
    _searches: dict[Kinds, PlanSearch] = field(default_factory=dict)
    _prices: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[Compiled, float]] = field(
        default_factory=dict
    )
    _tuned: dict[Shape, Compiled] = field(default_factory=dict)
    _buckets: dict[tuple[Any, ...], tuple[Compiled, Mapping[str, int]]] = field(default_factory=dict)
    _made: dict[int, tuple[Compiled, Sequence[tuple[int, Sequence[str]]]]] = field(default_factory=dict)
    _numbers: dict[int, Reused] = field(default_factory=dict)
    _roles: dict[tuple[int, tuple[tuple[str, int], ...]], tuple[Compiled, Compiled]] = field(
        default_factory=dict
    )
    _refused: dict[Shape, VerificationError | OverLimit] = field(default_factory=dict)
    _calls: dict[Any, Specialization] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made again in little time."""
        gone = ("_numbers", "_buckets", "_made", "_roles", "_searches", "_prices")
        state = {**self.__dict__, **{name: {} for name in gone}}
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

    @cached
    def arguments(self) -> Arguments:
        """The arguments that calls take."""
        return Arguments(self.derived.program)

    def of(self, arguments: Arguments, given: Given, begin: Begin | None = None) -> Specialization:
        """What to run for these arguments, which are checked at the first call with their like. `begin` is called with what will run,
        and its sizes, before that is verified."""
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
                device = self.target.of(given.tensors)
                found = self._calls[key] = self._special(extents, dtypes, device, begin)
        return found

    def _special(
        self,
        extents: Mapping[str, int],
        dtypes: Mapping[str, str],
        device: Device,
        begin: Begin | None = None,
    ) -> Specialization:
        """What to run for these sizes and dtypes."""
        some = {axis: extent or 1 for axis, extent in extents.items()}
        tuned = self._tuned.get(shape_of(some, dtypes, device)) if self._tuned else None
        if tuned is not None:
            regions = self._regions_of(dtypes, device)
            shards = self._reused(tuned).shards_at(regions, some, self._search(tuned))
            return Specialization(tuned, shards, extents, dtypes, 0 in extents.values())
        regions = self._regions_of(dtypes, device)
        bucket = regions.bucket(some)
        key = (id(regions), *bucket.items())
        if key not in self._buckets:
            self._buckets[key] = self._at_bucket(
                regions, bucket, some, dtypes, device, None if 0 in extents.values() else begin
            )
        return Specialization(*self._buckets[key], extents, dtypes, 0 in extents.values())

    def _at_bucket(
        self,
        regions: Regions,
        bucket: SizeBucket,
        extents: Mapping[str, int],
        dtypes: Mapping[str, str],
        device: Device,
        begin: Begin | None,
    ) -> tuple[Compiled, Mapping[str, int]]:
        """What runs at all sizes of a bucket: a plan, its roles, the best for the sizes that were asked for first, and its
        shards."""
        sizes = regions.sizes(bucket)
        compiled = regions.at(extents)
        if compiled is None:
            self._prices.clear()
            known = {id(region.compiled) for region in regions.found}
            with uncollected():
                compiled = regions.add(
                    extents,
                    lambda extents: self.compile(extents, dtypes, device, begin),
                    self._seconds,
                    self._seconds_of,
                )
                if device.kind == "gpu" and id(compiled) not in known:
                    regions.extend(self._ahead(compiled, extents))
        compiled = self._specialized(compiled, extents, begin)
        return compiled, self._reused(compiled).shards_at(regions, sizes, self._search(compiled))

    def _ahead(self, compiled: Compiled, extents: Mapping[str, int]) -> Mapping[str, int]:
        """Per axis, how many size buckets beyond `extents` this plan serves; kept beside the plan."""
        if self.refused(compiled) is not None:
            return {}
        program, scope = self.derived.program, self.derived.scope
        plan = results.planning(
            program, compiled.extents, compiled.dtypes, compiled.device.name, self.prefer, scope
        )
        subject = results.Reaching(plan, extents)
        return dict(results.kept("reached", subject, lambda: self.reach(compiled, extents))[0])

    def reach(self, compiled: Compiled, extents: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """The same, priced now: along what the plan's loops walk."""
        regions = self._regions_of(compiled.dtypes, compiled.device)
        found: dict[str, int] = {}
        for axes in growing(compiled, extents):
            axes -= regions.declared
            if axes and not axes & found.keys():
                far = regions.ahead(extents, axes, compiled, self._seconds, self._seconds_of)
                found |= dict.fromkeys(sorted(axes), far)
        return tuple(found.items())

    def _specialized(self, compiled: Compiled, sizes: Mapping[str, int], begin: Begin | None) -> Compiled:
        """The plan of a region with the roles that are best at these sizes. Roles that are not verified are not taken."""
        if compiled.device.roles is None:
            return compiled
        key = id(compiled), tuple(sorted(sizes.items()))
        if key not in self._roles:
            from eqfuse.specialize_warps import specialized_at

            with uncollected():
                found = specialized_at(self.derived, compiled, sizes)
            known = (
                c for _, c in self._roles.values() if c.chosen == found.chosen and c.shape == found.shape
            )
            found = next(known, found)
            if self.verifies and found is not compiled:
                _begin(begin, sizes, found)
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

    def _search(self, compiled: Compiled) -> PlanSearch:
        kinds = compiled.device.name, tuple(sorted(compiled.dtypes.items()))
        if kinds not in self._searches:
            self._searches[kinds] = PlanSearch(
                self.derived.program, compiled.dtypes, compiled.device, self.derived.nests
            )
        return self._searches[kinds]

    def _reused(self, compiled: Compiled) -> Reused:
        return self._numbers.setdefault(id(compiled), Reused(compiled))

    def compile(
        self,
        extents: Mapping[str, int],
        dtypes: Mapping[str, str],
        device: Device,
        begin: Begin | None = None,
    ) -> Compiled:
        """The plan for a shape. The program runs as written where what was derived of it is not verified, or reached a limit of
        memory or time; raises VerificationError or OverLimit where that is no way out: a schedule was asked for, a rule of the
        user's own may be wrong, or the program as written is wrong or not verified either. As it is written, it may have branches of which no trial took a
        side, and its trials may end at a limit of memory or time: nothing was derived from it."""
        shape = shape_of(extents, dtypes, device)
        if shape not in self._compiled:
            asked = self.derived, extents, dtypes, device
            checks, as_written = (self.checks, self._as_written) if self.verifies else (None, None)
            try:
                start = partial(_begin, begin, extents)
                self._compiled[shape] = compiler.pipeline(*asked, self.prefer, checks, start)
            except (VerificationError, OverLimit) as error:
                is_over = isinstance(error, OverLimit)
                if self.prefer is not None or (self.derived.scope.added and not is_over):
                    raise
                try:
                    self._compiled[shape] = compiler.pipeline(*asked, "multi_pass", as_written)
                except VerificationError:
                    raise error from None
                self._refused[shape] = error
                if is_over or (error.certificate is not None and error.certificate.over):
                    certificate = self.certified(self._compiled[shape])
                    names = ", ".join(output.name for output in self.derived.program.outputs)
                    is_unverified = certificate is not None and not certificate.ok
                    end = ", which was not verified either" if is_unverified else ""
                    text = f"{error.message}; the program of {names} runs as written{end}"
                    warnings.warn(f"{text} ({error.hint})", stacklevel=2)
        return self._compiled[shape]

    def refused(self, compiled: Compiled) -> VerificationError | OverLimit | None:
        """Why the derived form of a shape was not verified, or not derived in its limits, so that the program runs as written;
        None where it was."""
        return self._refused.get(compiled.shape)

    @property
    def _as_written(self) -> Checks:
        """How the program as it is written is verified."""
        return replace(self.checks, allow=(ALL_UNTAKEN,), written=True)

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
        self._calls = {call: found for call, found in self._calls.items() if found.shape != new.shape}

    # -- what a call needs -------------------------------------------------------------------------

    def stored(self, special: Specialization) -> int:
        """Bytes of what the kernels of a call make for each other."""
        return self.stored_by(special.compiled, special.sizes)

    def stored_by(self, compiled: Compiled, sizes: Mapping[str, int]) -> int:
        """The same of a plan, by extents and numbers of shards."""
        found = self._made.get(id(compiled))
        if found is None:
            nest, dtypes = compiled.chosen.nest, with_outputs(self.derived.program, compiled.dtypes)
            shape, of = shape_of_nest(nest, compiled.extents, dtypes, 1), dict(nest.domains)
            made = [b for b in nest.buffers if not b.is_output]
            each = [(shape.itemsize(b.name), [of.get(axis, axis) for axis in b.axes]) for b in made]
            found = self._made[id(compiled)] = compiled, each
        return sum(size * prod([sizes.get(axis, 1) for axis in axes]) for size, axes in found[1])

    def estimate(self, special: Specialization) -> CallEstimate:
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
        replaces = partial(may_replace, nest) if compiled.device.kind == "gpu" else (lambda *_: False)
        return CallEstimate(self.stored(special), own, lambda: self._seconds_of(compiled, extents), replaces)

    # -- sources -----------------------------------------------------------------------------------

    def triton(self, compiled: Compiled) -> str:
        """The Triton module of a compiled shape; of a shape on the CPU, that of the plan for sm_90."""
        if compiled.device.kind == "cpu":
            with uncollected():
                gpu = device_named("sm_90").without_roles
                compiled = self.compile(compiled.extents, compiled.dtypes, gpu)
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
