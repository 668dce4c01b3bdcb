"""The pipeline, top to bottom.

    once per program     source --parse--> Program --rewrite--> outputs                              derive
    once per shape       outputs --partition--> passes --merge--> groups --price--> Plan, Nest       pipeline
                         Nest --lower--> TileProgram
    once per loop nest   every stage against the source, in a finite field                           certification.certify
    once per plan        TileProgram --emit--> Triton                                                emit_triton

`EQFUSE_LOG=all` writes what passes between the stages: logs.py has the names of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from eqfuse import limits, logs, results
from eqfuse.certification import Checks, certify
from eqfuse.compiled import Asked, Candidates, Compiled
from eqfuse.derived import Derived, Timings, rewritten
from eqfuse.errors import BindError, ScheduleError, did_you_mean
from eqfuse.extract.candidates import Candidate, PlanSearch, by_cost, of_form, pick
from eqfuse.extract.cost import least_seconds, sort_seconds
from eqfuse.extract.devices import Device
from eqfuse.limits import OverLimit
from eqfuse.loops.contraction import tiled_axes
from eqfuse.loops.plan import SCANS, SCHEDULES, WAYS, Plan
from eqfuse.loops.printer import show as show_nest
from eqfuse.lowered import faults, in_roles, lower_nest
from eqfuse.rules.egraph import client
from eqfuse.rules.egraph.saturate import Report
from eqfuse.rules.reassociate import reassociated, with_copies
from eqfuse.rules.scope import current
from eqfuse.terms.collapse_axes import Layouts, with_views
from eqfuse.terms.extents import with_computed, with_domains
from eqfuse.terms.inline import check_written_size
from eqfuse.terms.integers import LONGEST
from eqfuse.terms.nodes import Output, Program, Reassociate, Reduce
from eqfuse.terms.parser import parse, sized_axes
from eqfuse.terms.prefixes import alike
from eqfuse.terms.printer import show_program
from eqfuse.terms.segments import segments
from eqfuse.terms.sizes import undetermined
from eqfuse.terms.split_axes import split_axes
from eqfuse.terms.types import check_indices, program_dtypes
from eqfuse.terms.views import Views
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.printer import show as show_tiles

if TYPE_CHECKING:  # loaded at first use: every start would wait for them
    from eqfuse.extract.partition import Partition
    from eqfuse.proof.derivation import Derivation
    from eqfuse.tile.roles.nodes import RolesProgram

NOMINAL_EXTENT = 256
"""Extent that a plan assumes for an axis while no tensor has given one."""

IDLE = 5
"""Fewer thread blocks than the SMs over this leave a device mostly idle."""


def derive(
    source: str,
    scalars: Mapping[str, float] | None,
    strict_casts: bool,
    *,
    assume_finite: bool = False,
    reassociate: Reassociate = "bounded",
    made_of: Program | None = None,
) -> Derived:
    """Parse and rewrite: what depends on no size. The size of a program that was made of another one is not limited:
    it has no longer terms, however often it reads them. What holds integers in that one does in this one."""
    if not results.has_any("rewritten"):
        client.start()  # it takes as long as reading the program
    timings = Timings()
    with timings.stage("parse"):
        program = parse(source, scalars=scalars, strict_casts=strict_casts, made=made_of is not None)
        program = replace(program, assume_finite=assume_finite, reassociate=reassociate)
        if made_of is None:
            check_written_size(program)
        else:
            program = _with_integers_of(program, made_of)
        check_indices(program, program_dtypes(program))
        program = with_copies(program)
    logs.show("program", "program", lambda: show_program(program))
    with timings.stage("derive"):
        derived = rederived(program, timings)
    logs.show("program", "rewritten", lambda: show_program(replace(program, outputs=derived.outputs)))
    return derived


def derive_like(
    program: Program, source: str, scalars: Mapping[str, float] | None = None, *, made: bool = False
) -> Derived:
    """Another text, under what a program was compiled with."""
    return derive(
        source,
        scalars,
        program.strict_casts,
        assume_finite=program.assume_finite,
        reassociate=program.reassociate,
        made_of=program if made else None,
    )


def _with_integers_of(program: Program, other: Program) -> Program:
    """A program whose scalars and tensors hold integers where those of the other one, by the same names, do."""
    scalars = {*program.integers, *other.integers}
    tensors = {*program.integer_tensors, *other.integer_tensors}
    return replace(
        program,
        integers=tuple(name for name in program.scalars if name in scalars),
        integer_tensors=tuple(tensor.name for tensor in program.tensors if tensor.name in tensors),
    )


def rederived(program: Program, timings: Timings | None = None) -> Derived:
    """A parsed program, rewritten under the rules in force; as it is where that reaches a limit."""
    timings = timings or Timings()
    try:
        with limits.derivation():
            outputs, report = rewritten(program, current())
    except OverLimit as over:
        return Derived(program, program.outputs, Report(stopped=over.message), timings, current(), over=over)
    return Derived(program, outputs, report, timings, current(), report.stopped)


def of_views(derived: Derived, layouts: Layouts) -> Derived | None:
    """The program of tensors that lie so, with dimensions in this order and adjacent axes collapsed, derived anew under the rules of the first
    time; None where that is the program itself."""
    found = with_views(derived.program, layouts) if not derived.program.in_order else None
    if found is None:
        return None
    made = _derived_anew(derived, found.program)
    views = derived.views or Views()
    return replace(made, views=replace(views, collapsed=replace(found, program=made.program)))


def of_segments(derived: Derived) -> Derived | None:
    """The program of sorted positions, derived anew under the rules of the first time; None where no reduction is over positions that a
    key selects."""
    found = segments(derived.program) if not derived.program.in_order else None
    if found is None:
        return None
    made = _derived_anew(derived, found.program)
    return replace(made, views=Views(segments=replace(found, program=made.program)))


def of_chunks(derived: Derived) -> Derived | None:
    """The program with axes in chunks, derived anew under the rules of the first time; None where no sum over a prefix is said by them."""
    found = split_axes(derived.program) if not derived.program.in_order else None
    if found is None:
        return None
    made = _derived_anew(derived, found.program)
    return replace(made, views=Views(split=replace(found, program=made.program)))


def _derived_anew(derived: Derived, program: Program) -> Derived:
    with derived.scope.entered():
        return derive_like(derived.program, show_program(program), made=True)


def pipeline(
    derived: Derived,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
    prefer: str | None = None,
    checks: Checks | None = None,
    begin: Callable[[Compiled], None] = lambda compiled: None,
) -> Compiled:
    """A program for one shape: partitioned, merged, priced, lowered, and verified where `checks` are given. `begin` is called with what
    is verified next.

    Raises ScheduleError where `prefer` is impossible, VerificationError where a stage is wrong, OverLimit where a limit of
    memory or time is reached before. The passes of `prefer="multi_pass"` are those of the program as it is written, whatever it
    was rewritten to, and no limit stands in their way. Names that orders of sums may use have the extents of their axes.
    """
    extents = with_domains(derived.program, extents)
    found, ready, tile, roles = planned(derived, Asked(extents, dtypes, device, prefer))
    logs.show("plan", "plans", lambda: "\n".join(str(candidate.plan) for candidate in found))
    logs.show("plan", "loops", lambda: show_nest(ready.nest))
    logs.show("tiles", "tiles", lambda: show_tiles(tile))
    if roles is not None:
        logs.show("tiles", "roles", lambda: roles)

    compiled = Compiled(found, ready, tile, dtypes, extents, device, roles, derived.views)
    begin(compiled)
    if checks is not None:
        certificate = certify(derived, compiled, checks)
        logs.show("certificate", "certificate", lambda: certificate)
    return compiled


Planned: TypeAlias = "tuple[Sequence[Candidate], Candidate, TileProgram, RolesProgram | None]"
"""The candidates for one shape, the one to run, its tile program, and its roles where it has some."""


def planned(derived: Derived, asked: Asked) -> Planned:
    """What runs a shape, as it was kept or is chosen now. Raises ScheduleError, OverLimit."""
    try:
        return _planned(derived, asked)
    except OverLimit:
        if asked.prefer != "multi_pass":
            raise
        return chosen_now(derived, asked)


def _planned(derived: Derived, asked: Asked) -> Planned:
    # of added rules a certificate names those that took part: merges have to be at hand
    if derived.scope.added or derived.over is not None:
        return chosen_now(derived, asked)
    made: list[Planned] = []

    def make() -> Candidate:
        made.append(chosen_now(derived, asked))
        return made[0][1]

    shape = asked.extents, asked.dtypes, asked.device.name
    subject = results.planning(derived.program, *shape, asked.prefer, derived.scope)
    ready, _ = results.kept("planned", subject, make)
    if made:
        return made[0]
    if ready.plan.form == "apart":
        derived.taken_apart()
    if ready.plan.roles:
        from eqfuse.tile.triton.ahead import hasten

        hasten()  # other kernels that were kept need no Triton
    nest, program = ready.nest, derived.program
    derived.nests[ready.plan.kernels] = nest
    with derived.timings.stage("lower"), faults():
        tile = lower_nest(nest, program, asked.dtypes, ready.plan.configs, asked.device)
    roles = None
    if ready.plan.roles:
        with derived.timings.stage("roles"):
            configs = ready.plan.configs
            roles = in_roles(nest, program, asked.dtypes, asked.device, ready.plan.roles, configs)

    def again() -> Sequence[Candidate]:
        try:
            with derived.lock:
                found, chosen = choose(derived, asked)
        except OverLimit:
            return [ready]
        return [ready if candidate is chosen else candidate for candidate in found]

    return Candidates(again), ready, tile, roles


def chosen_now(derived: Derived, asked: Asked) -> Planned:
    """What runs a shape: plans are priced, the best is lowered, and divided into roles. Raises ScheduleError."""
    found, chosen = choose(derived, asked)
    with derived.timings.stage("lower"), faults():
        tile = lower_nest(chosen.nest, derived.program, asked.dtypes, chosen.plan.configs, asked.device)
    ready, roles = chosen, None
    with derived.timings.stage("roles"):
        if asked.device.roles is not None:
            from eqfuse.specialize_warps import specialized

            ready, roles = specialized(derived, asked, chosen, tile)
    return tuple(ready if candidate is chosen else candidate for candidate in found), ready, tile, roles


def choose(derived: Derived, asked: Asked) -> tuple[list[Candidate], Candidate]:
    """The candidates for one shape, cheapest first, and the one to run: once a limit was reached, the program as it is written.
    Raises ScheduleError, and OverLimit where another schedule was asked for, or a limit is reached now."""
    from eqfuse.extract.partition import Partition, stem_of

    search = PlanSearch(derived.program, asked.dtypes, asked.device, derived.nests)
    same, dtypes = alike(derived.program), {**program_dtypes(derived.program), **asked.dtypes}
    idle, stem = asked.device.sms // IDLE, stem_of(derived.program)
    partition = Partition(
        derived.order,
        asked.extents,
        same,
        dtypes,
        few=idle,
        stem=stem,
        has_library=asked.device.kind == "gpu",
        tiled=tiled_axes(output.expr for output in derived.outputs),
        layouts=tuple(output.axes for output in derived.program.outputs),
        recurrences=derived.program.in_order,
    )
    if derived.over is not None:
        if asked.prefer != "multi_pass":
            raise derived.over
        written = as_written(derived, partition, search)
        return [written], written
    try:
        with limits.derivation():
            return _choose(derived, asked, partition, search)
    except OverLimit as over:
        derived.over = over
        raise


def _choose(
    derived: Derived, asked: Asked, partition: Partition, search: PlanSearch
) -> tuple[list[Candidate], Candidate]:
    program, prefer = derived.program, asked.prefer
    order = () if program.in_order or prefer not in (None, *SCANS) else reassociated(program, asked.extents)
    ordered: list[Candidate] = []
    if order:
        others = plans(derived, derived.in_order(order), partition, search)
        ordered = [of_form(candidate, "reassociated", order) for candidate in others]
        cost = ordered[0].plan.cost if ordered else None
        least = least_seconds(derived.outputs, asked.extents, asked.device)
        if prefer is None and cost is not None and cost.seconds < least:
            return ordered, ordered[0]
    found = plans(derived, derived.outputs, partition, search)
    if prefer == "multi_pass" and (derived.outputs != program.outputs or program.in_order):
        written = as_written(derived, partition, search)
        found = by_cost([written, *(c for c in found if c.plan.schedule != prefer)])
    elif any(map(_is_stuck, found)) and derived.taken_apart():
        apart = plans(derived, derived.taken_apart(), partition, search)
        merged = (c for c in apart if c.plan.schedule in ("rolling", "split_k") and not _is_stuck(c))
        found = by_cost([*found, *(of_form(c, "apart") for c in merged)])
    found = by_cost([*ordered, *found])
    return found, pick(found, prefer, tuple(derived.groups.values()))


def predicted(derived: Derived, asked: Asked) -> float:
    """Seconds that the plan of choice is predicted to take. Nothing of it is lowered or verified. Raises ScheduleError,
    OverLimit."""
    with derived.lock:
        cost = choose(derived, asked)[1].plan.cost
    return cost.seconds if cost else math.inf


def predicted_sorted(of_segments: Derived, asked: Asked) -> float:
    """Seconds that a program of sorted positions is predicted to take where the program that it was made of is asked for so, its sorting
    included; infinite where it has no plan, or positions have no room. Raises OverLimit."""
    form = of_segments.segments
    if form is None or not form.fits(asked.extents):
        return math.inf
    own = {**program_dtypes(form.program), **asked.dtypes}
    dtypes = {tensor.name: own[tensor.name] for tensor in form.program.tensors}
    sorting = sort_seconds(form.positions(asked.extents), asked.device)
    try:
        return sorting + predicted(of_segments, Asked(form.extents(asked.extents), dtypes, asked.device))
    except ScheduleError:
        return math.inf


def predicted_in_chunks(of_chunks: Derived, asked: Asked) -> float:
    """The same of a program with axes in chunks; infinite where they have none for these extents. Raises OverLimit."""
    form = of_chunks.split
    if form is None or not form.fits(asked.extents):
        return math.inf
    try:
        return predicted(of_chunks, replace(asked, extents=form.extents(asked.extents)))
    except ScheduleError:
        return math.inf


def plans(
    derived: Derived, outputs: Sequence[Output], partition: Partition, search: PlanSearch
) -> list[Candidate]:
    """The plans of these outputs, cheapest first: of every way to divide them into kernels, once the merge of each
    pass is derived. Where an axis is kept whole for what is computed beforehand, and so cannot be walked, the ways that
    compute nothing beforehand give the schedules that are missing."""
    found: list[Candidate] = []
    tried: list[object] = []
    for way in (partition, partition.walking()):
        structures = [s for s in way.structures(outputs) if s not in tried]
        merges = derived.merges(structures)
        missing = set(WAYS) - {candidate.plan.schedule for candidate in found}
        with derived.timings.stage("choose"):
            for structure in structures:
                made = search.candidates(way.shapes(structure, merges), way.extents)
                found += [candidate for candidate in made if candidate.plan.schedule in missing]
        if {candidate.plan.schedule for candidate in found}.issuperset(SCHEDULES):
            break
        tried += structures
    return by_cost(found)


def as_written(derived: Derived, partition: Partition, search: PlanSearch) -> Candidate:
    """The plan with a pass for every reduction as the program has it, which needs no merge."""
    with derived.timings.stage("choose"):
        clusters = partition.clusters(derived.program.outputs)
        kernels = partition.shapes(clusters, derived.unmerged(clusters))
        return search.as_written(kernels, partition.extents)


def _is_stuck(candidate: Candidate) -> bool:
    """Whether some sum of a plan has no merge."""
    groups = (planned.group for kernel in candidate.plan.kernels for planned in kernel.groups)
    obstacles = (obstacle for group in groups for obstacle in group.obstacles)
    return any(isinstance(o.reduction, Reduce) and o.reduction.op == "sum" for o in obstacles)


def emit_triton(
    derived: Derived,
    compiled: Compiled,
    name: str,
    recorded: str | None = None,
    given: Mapping[str, int] | None = None,
) -> str:
    """The self-contained Triton module of a compiled shape; `recorded`: with positions of this dtype, and launches that torch
    records. `given` are sizes of which it takes those of axes that no tensor has, where a call gives no others."""
    from eqfuse.tile.triton.module import emit

    program, plan = derived.program, compiled.chosen.plan
    with derived.timings.stage("emit"):
        nest = compiled.chosen.nest
        shards = {axis: plan.shards for axis, _ in nest.shards}
        own = {axis: size for axis, size in (given or {}).items() if axis in undetermined(program)}
        sizes = {**own, **shards, **program.lengths}
        kinds = compiled.tile, program, compiled.dtypes, plan.configs
        source = emit(*kinds, name=name, sizes=sizes, extents=compiled.extents, recorded=recorded)
    logs.show("source", "Triton", lambda: source)
    return source


def emit_gluon(derived: Derived, compiled: Compiled, name: str) -> str:
    """The self-contained module of a compiled shape that has roles: Gluon, and Triton for kernels that have none."""
    from eqfuse.tile.gluon.module import emit

    assert compiled.roles is not None
    program, plan = derived.program, compiled.chosen.plan
    with derived.timings.stage("emit"):
        sizes = {**{axis: plan.shards for axis, _ in compiled.chosen.nest.shards}, **program.lengths}
        kinds = compiled.roles, program, compiled.dtypes, plan.configs
        source = emit(*kinds, name=name, sizes=sizes, extents=compiled.extents)
    logs.show("source", "Gluon", lambda: source)
    return source


def derivation(derived: Derived, plan: Plan, scalars: Mapping[str, float]) -> Derivation:
    """The derivation of a plan. The saturations are run again, recorded."""
    from eqfuse.proof.derivation import Derivation
    from eqfuse.proof.nodes import Origin
    from eqfuse.proof.trace import claims, trace

    program = derived.program
    if plan.kernels not in derived.derivations:
        origin = Origin.of(program, scalars)
        with derived.timings.stage("explain"), derived.scope.entered():
            proof, classes = trace(program, derived.order, derived.groups, plan, origin)
        derived.derivations[plan.kernels] = Derivation(
            proof, claims(plan, program.strict_casts), classes, derived.scope
        )
    return derived.derivations[plan.kernels]


def nominal_extents(program: Program, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Extents to plan with before any tensor is seen: those of `sizes`, and nominal ones. Raises BindError."""
    axes = dict.fromkeys((*sized_axes(program), *program.domains.values()))
    known = {axis: None for axis in axes if axis not in program.domains}
    for axis, size in (sizes or {}).items():
        if axis not in known:
            hint = did_you_mean(axis, known) or f"axes: {' '.join(known)}"
            raise BindError(f"the program has no axis {axis!r}", hint=hint)
        if program.lengths.get(axis, size) != size:
            message = f"axis {axis!r} is declared to have {program.lengths[axis]} positions, not {size}"
            raise BindError(message, hint="leave out its size, or change the declaration")
        if not isinstance(size, int) or not 0 < size <= LONGEST:
            message = f"the size of axis {axis!r} is {size!r:.40}"
            raise BindError(message, hint="a size is an integer, 1 or more, at most 2**48")
    given = {**dict(program.lengths), **(sizes or {})}
    found = {axis: given.get(program.domains.get(axis, axis), NOMINAL_EXTENT) for axis in axes}
    return with_computed(program, found)
