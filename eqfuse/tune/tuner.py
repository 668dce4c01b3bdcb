"""Tuning one program for one shape, on the tensors that it is called with."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from eqfuse.cache.entries import Key
from eqfuse.cache.files import Unfit
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.environment import installed
from eqfuse.errors import EqfuseError
from eqfuse.extract.candidates import Candidate, with_outputs
from eqfuse.extract.neighbours import neighbours, of_other_schedules
from eqfuse.extract.unsuited import Unsuited
from eqfuse.loops.plan import Plan
from eqfuse.lowered import in_roles, lower_nest
from eqfuse.progress import progress
from eqfuse.specialize_warps import other_roles
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.tune import kept
from eqfuse.tune.search import Budget, Refused, TimedSearch, Trial, timed
from eqfuse.tune.timing import called, replayed

Results = Mapping[str, torch.Tensor]
Runner = Callable[[], Results]


@dataclass(frozen=True)
class Tuning:
    """What a search has found for one shape. `plan.measured` and `chosen_seconds` are the seconds of one call of
    the winner and of the plan that the cost model had chosen; `trials` is empty where they were kept from an
    earlier search. `notes` say what could not be read or kept."""

    plan: Plan
    chosen_seconds: float
    trials: tuple[Trial, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether an earlier search had found it, so that nothing was timed."""
        return not self.trials

    def __str__(self) -> str:
        seconds = self.plan.measured or math.nan
        lines = [
            f"{self.plan}: {self.chosen_seconds / seconds:.2f} times as fast as the choice without a search, "
            + ("kept from an earlier search" if self.kept else f"of {len(self.trials)} plans tried")
        ]
        lines += [f"  {t.plan}{': ' + t.problem if t.problem else ''}" for t in self.trials]
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class Limits:
    """Of a search: at most `plans`, none that would end after `seconds`. Raises EqfuseError for what limits nothing."""

    seconds: float
    plans: int

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, int | float) or not self.seconds > 0:
            raise EqfuseError(
                f"seconds is {self.seconds!r}", hint="give a positive number: the limit of the search"
            )
        if isinstance(self.plans, bool) or not isinstance(self.plans, int) or self.plans < 1:
            raise EqfuseError(
                f"plans is {self.plans!r}", hint="give a positive integer: the limit of the search"
            )


OTHER_ROLES = 5
"""Roles of a kernel that are timed, those that were chosen among them."""


@dataclass
class Tuner:
    """`start` gives a function that runs a compiled shape on the tensors; `base` is the shape with the plan that
    the cost model chose."""

    derived: Derived
    base: Compiled
    prefer: str | None
    scalars: Mapping[str, float]
    start: Callable[[Compiled], Runner]
    place: torch.device
    notes: list[str] = field(default_factory=list)
    _runners: dict[Candidate, Runner] = field(default_factory=dict)
    _expected: Results = field(default_factory=dict)

    def tune(self, limits: Limits, again: bool) -> tuple[Compiled, Tuning]:
        """What an earlier search has kept, or else what one finds now; `again` asks for a new one."""
        with progress("tune"):
            kept_before = None if again else self.recall()
            return kept_before or self.search(limits)

    def recall(self) -> tuple[Compiled, Tuning] | None:
        """What an earlier search has kept, where it still fits."""
        base = self.base
        try:
            found = kept.read(self._key, base.candidates, base.extents, self._dtypes, base.device)
            if found is None:
                return None
            candidate = timed(found.candidate, found.seconds)
            compiled = replace(self._compiled(candidate), candidates=(candidate, *self.base.candidates))
        except (Unfit, EqfuseError) as error:
            self.notes.append(f"{kept.place(self._key)} is not used: {error}")
            return None
        return compiled, Tuning(candidate.plan, found.chosen_seconds)

    def search(self, limits: Limits) -> tuple[Compiled, Tuning]:
        """Times plans, keeps the winner. Raises EqfuseError where the chosen plan does not run."""
        base, chosen = self.base, self.base.chosen
        search = TimedSearch(self._prepare, self._measure, Budget(limits.seconds, limits.plans))
        others = [
            *self._of_other_roles(),
            *of_other_schedules(base.candidates, chosen, base.extents, self._dtypes),
        ]
        winner = search.run(
            chosen,
            others if self.prefer is None else (),
            lambda c: neighbours(c, base.extents, self._dtypes, base.device),
        )
        best_seconds, chosen_seconds = search.times[winner], search.times[chosen]
        try:
            kept.keep(self._key, kept.Found(winner, best_seconds, chosen_seconds))
        except OSError as error:
            self.notes.append(f"not kept for the next process: {error}")
        ranked = sorted(search.times, key=search.times.__getitem__)
        candidates = [timed(c, search.times[c]) for c in ranked]
        best = candidates[ranked.index(winner)]
        candidates += [c for c in base.candidates if c not in search.times]
        compiled = replace(self._compiled(best), candidates=tuple(candidates))
        tuning = Tuning(compiled.chosen.plan, chosen_seconds, tuple(search.trials), tuple(self.notes))
        return compiled, tuning

    def _compiled(self, candidate: Candidate) -> Compiled:
        base = self.base
        tile = lower_nest(
            candidate.nest, self.derived.program, base.dtypes, candidate.plan.configs, base.device
        )
        roles = candidate.plan.roles
        if not roles:
            return replace(base, chosen=candidate, tile=tile, roles=None)
        program = self.derived.program
        try:
            configs = candidate.plan.configs
            divided = in_roles(candidate.nest, program, base.dtypes, base.device, roles, configs)
        except Unsuited as why:
            raise Unfit(f"a kernel has no roles: {why}") from why
        return replace(base, chosen=candidate, tile=tile, roles=divided)

    def _of_other_roles(self) -> list[Candidate]:
        """The plan without its roles, and with the next best ones, be they predicted to be slower or not."""
        base, plan = self.base, self.base.chosen.plan
        whole = replace(base.chosen, plan=replace(plan, roles=(), code=""))
        found = () if base.device.roles is None else other_roles(self.derived, base, base.extents)
        divided = [made.chosen for _, made in islice(found, OTHER_ROLES)]
        return [c for c in (*divided, whole) if c.plan.roles != plan.roles]

    def _prepare(self, candidate: Candidate) -> None:
        if candidate is self.base.chosen:
            run = self.start(self.base)
            self._expected = run()
        else:
            try:
                run = self.start(self._compiled(candidate))
                found = run()
            except (EqfuseError, torch.OutOfMemoryError) as error:
                raise Refused(str(error).splitlines()[0]) from error
            for name, expected in self._expected.items():
                if problem := disagreement(found[name], expected, self._precision):
                    raise Refused(f"{name} {problem}")
        self._runners[candidate] = run

    def _measure(self, candidate: Candidate, against: float) -> float:
        run = self._runners[candidate]
        if self.place.type == "cpu":
            return 1e-3 * called(run, 1e3 * against).ms
        with torch.cuda.device(self.place):
            return 1e-3 * replayed([run]).ms

    @property
    def _dtypes(self) -> dict[str, str]:
        return with_outputs(self.derived.program, self.base.dtypes)

    @property
    def _precision(self) -> float:
        """Half of the digits that the coarsest floating-point dtype has: how far apart two orders of the same
        sums, rounded at other places, may be."""
        kinds = [TORCH_DTYPES[dtype] for dtype in self._dtypes.values()]
        return math.sqrt(
            max(torch.finfo(kind).eps for kind in (*kinds, torch.float64) if kind.is_floating_point)
        )

    @property
    def _key(self) -> Key:
        program, base = self.derived.program, self.base
        return {
            "program": program.source,
            "scalars": {name: repr(value) for name, value in sorted(self.scalars.items())},
            "strict_casts": program.strict_casts,
            "assume_finite": program.assume_finite,
            "reassociate": program.reassociate,
            "prefer": self.prefer,
            "dtypes": dict(sorted(base.dtypes.items())),
            "sizes": dict(sorted(base.extents.items())),
            "target": base.device.name,
            "device": device_name(self.place),
            "versions": {name: installed(name) for name in ("eqfuse", "torch", "triton")},
        }


def disagreement(found: torch.Tensor, expected: torch.Tensor, precision: float) -> str:
    """What is wrong with an output; empty where its relative rms distance from the expected one is at most
    `precision`, and what is not finite is the same. Integers have to be equal."""
    if not expected.is_floating_point():
        differing = int((found != expected).sum())
        return f"differs at {differing} positions" if differing else ""
    a, b = (x if x.dtype == torch.float64 else x.float() for x in (found, expected))
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) or not a[finite].isfinite().all():
        return "is not finite where it should be, or the other way round"
    distance = float((a[finite] - b[finite]).norm() / b[finite].norm().clamp_min(torch.finfo(b.dtype).tiny))
    return "" if distance <= precision else f"is {distance:.1e} from what the chosen plan computes"


def device_name(place: torch.device) -> str:
    """The GPU's name, or what of the CPU decides how fast it is."""
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )
