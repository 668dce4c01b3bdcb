"""The pipeline, top to bottom.

    once per program     source --parse--> Program --rewrite--> outputs                              derive
    once per shape       outputs --partition--> passes --merge--> groups --price--> Plan, Nest       pipeline
                         Nest --lower--> TileProgram
    once per loop nest   every stage against the source, in a finite field                           verify
    once per plan        TileProgram --emit--> Triton                                                emit_triton

`EQFUSE_DEBUG=1` to `6` prints what passes between the stages: debug.py says what at which level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from eqfuse import debug, results
from eqfuse.derived import Derived, Timings, rewritten
from eqfuse.environment import installed
from eqfuse.errors import VerificationError
from eqfuse.extract.candidates import Candidate, Search, by_cost, configured, of_form, pick, with_outputs
from eqfuse.extract.candidates import shape_of as shape_of_nest
from eqfuse.extract.cost import KernelCost
from eqfuse.extract.devices import Device
from eqfuse.extract.partition import Partition
from eqfuse.extract.tile_sizes import TENSOR_CORE_MIN, tiny
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import SCHEDULES, KernelConfig, Plan, Roles
from eqfuse.loops.printer import show as show_nest
from eqfuse.results import Certifying
from eqfuse.rules.egraph import client
from eqfuse.rules.scope import current
from eqfuse.terms.folds import folds_in
from eqfuse.terms.inline import check_written_size
from eqfuse.terms.nodes import Output, Program, Reduce
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.printer import show_program
from eqfuse.terms.types import check_indices, program_dtypes
from eqfuse.threads import cached
from eqfuse.tile.check import TileError
from eqfuse.tile.lower.program import lower as lower_tiles
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.passes.pipeline import passes_for, passes_of, run_passes
from eqfuse.tile.printer import show as show_tiles
from eqfuse.verify.certificate import REQUESTED, Certificate

if TYPE_CHECKING:  # loaded at first use: every start would wait for them
    from eqfuse.proof.derivation import Derivation
    from eqfuse.tile.roles.choice import Choice
    from eqfuse.tile.roles.nodes import RolesProgram
    from eqfuse.verify.equivalence import Special

NOMINAL_EXTENT = 256
"""Extent that a plan assumes for an axis while no tensor has given one."""

INFINITIES_LOST = (
    "infinities: where the program gives one, or shifts an exponential by one, a sum that was taken apart or shifted may "
    "give NaN"
)
"""What a certificate says of a plan that loses infinities."""


@dataclass(frozen=True)
class Checks:
    """How a kernel is verified: `trials` drawn at a time, until the probability of accepting a wrong one is at most
    `bound`, with the scalars that are known; `again` where an earlier process did."""

    trials: int
    bound: float = REQUESTED
    scalars: Mapping[str, float] = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True)
class Compiled:
    """One shape's result: the candidates, the chosen one, its tile program, and its roles where it has some."""

    candidates: Sequence[Candidate]
    chosen: Candidate
    tile: TileProgram
    dtypes: Mapping[str, str]
    extents: Mapping[str, int]
    device: Device
    roles: RolesProgram | None = None

    @property
    def shape(self) -> Shape:
        """What the plan was chosen for."""
        return shape_of(self.extents, self.dtypes, self.device)


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


Shape = tuple[str, tuple[tuple[str, int], ...], tuple[tuple[str, str], ...]]
"""A device's name, the extents of axes, and the dtypes of tensors."""


def shape_of(extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device) -> Shape:
    return device.name, tuple(sorted(extents.items())), tuple(sorted(dtypes.items()))


def derive(
    source: str,
    scalars: Mapping[str, float] | None,
    strict_casts: bool,
    *,
    assume_finite: bool = False,
    made: bool = False,
) -> Derived:
    """Parse and rewrite: what depends on no size. The size of a program that was `made` of another one is not limited:
    it has no longer terms, however often it reads them."""
    if not results.has_any("rewritten"):
        client.start()  # it takes as long as reading the program
    timings = Timings()
    with timings.stage("parse"):
        program = parse(source, scalars=scalars, strict_casts=strict_casts, made=made)
        program = replace(program, assume_finite=assume_finite)
        if not made:
            check_written_size(program)
        check_indices(program, program_dtypes(program))
    debug.show(2, "program", lambda: show_program(program))
    with timings.stage("derive"):
        outputs, report = rewritten(program, current())
    debug.show(2, "rewritten", lambda: show_program(replace(program, outputs=outputs)))
    return Derived(program, outputs, report, timings, current(), report.stopped)


def rederived(program: Program) -> Derived:
    """A parsed program, rewritten under the rules in force."""
    outputs, report = rewritten(program, current())
    return Derived(program, outputs, report, Timings(), current(), report.stopped)


def pipeline(
    derived: Derived,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
    prefer: str | None = None,
    checks: Checks | None = None,
) -> Compiled:
    """A program for one shape: partitioned, merged, priced, lowered, and verified where `checks` are given.

    Raises ScheduleError where `prefer` is impossible, VerificationError where a stage is wrong. The passes of
    `prefer="multi_pass"` are those of the program as it is written, whatever it was rewritten to.
    """
    found, ready, tile, roles = planned(derived, extents, dtypes, device, prefer)
    debug.show(4, "plans", lambda: "\n".join(str(candidate.plan) for candidate in found))
    debug.show(4, "loops", lambda: show_nest(ready.nest))
    debug.show(5, "tiles", lambda: show_tiles(tile))
    if roles is not None:
        debug.show(5, "roles", lambda: roles)

    compiled = Compiled(found, ready, tile, dtypes, extents, device, roles)
    if checks is not None:
        certificate = certify(derived, compiled, checks)
        debug.show(6, "certificate", lambda: certificate)
    return compiled


Planned: TypeAlias = "tuple[Sequence[Candidate], Candidate, TileProgram, RolesProgram | None]"
"""The candidates for one shape, the one to run, its tile program, and its roles where it has some."""


def planned(
    derived: Derived,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
    prefer: str | None = None,
) -> Planned:
    """What runs a shape, as it was kept or is chosen now. Raises ScheduleError."""
    asked = extents, dtypes, device, prefer
    if derived.scope.added:  # a certificate names those of them that took part: merges have to be at hand
        return chosen_now(derived, *asked)
    made: list[Planned] = []

    def make() -> Candidate:
        made.append(chosen_now(derived, *asked))
        return made[0][1]

    subject = results.planning(derived.program, extents, dtypes, device.name, prefer, derived.scope)
    ready, _ = results.kept("planned", subject, make)
    if made:
        return made[0]
    if ready.plan.form == "apart":
        derived.taken_apart()
    nest, program = ready.nest, derived.program
    derived.nests[ready.plan.kernels] = nest
    with derived.timings.stage("lower"), _faults():
        tile = lower_nest(nest, program, dtypes, ready.plan.configs, device)
    roles = None
    if ready.plan.roles is not None:
        with derived.timings.stage("roles"):
            roles = in_roles(nest, program, dtypes, device, ready.plan.roles)

    def again() -> Sequence[Candidate]:
        with derived.lock:
            found, chosen = choose(derived, *asked)
        return [ready if candidate is chosen else candidate for candidate in found]

    return Candidates(again), ready, tile, roles


def chosen_now(
    derived: Derived,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
    prefer: str | None = None,
) -> Planned:
    """What runs a shape: plans are priced, the best is lowered, and divided into roles. Raises ScheduleError."""
    found, chosen = choose(derived, extents, dtypes, device, prefer)
    with derived.timings.stage("lower"), _faults():
        tile = lower_nest(chosen.nest, derived.program, dtypes, chosen.plan.configs, device)
    with derived.timings.stage("roles"):
        ready, roles = divided(derived, chosen, tile, dtypes, extents, device)
    return tuple(ready if candidate is chosen else candidate for candidate in found), ready, tile, roles


def choose(
    derived: Derived,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
    prefer: str | None = None,
) -> tuple[list[Candidate], Candidate]:
    """The candidates for one shape, cheapest first, and the one to run. Raises ScheduleError."""
    program = derived.program
    search = Search(program, dtypes, device, derived.nests)
    partition = Partition(derived.order, extents)

    found = plans(derived, derived.outputs, partition, search)
    if prefer == "multi_pass" and derived.outputs != program.outputs:
        written = as_written(derived, partition, search)
        found = by_cost([written, *(c for c in found if c.plan.schedule != prefer)])
    elif any(map(_is_stuck, found)) and derived.taken_apart():
        apart = plans(derived, derived.taken_apart(), partition, search)
        merged = (c for c in apart if c.plan.schedule in ("rolling", "split_k") and not _is_stuck(c))
        found = by_cost([*found, *(of_form(c, "apart") for c in merged)])
    return found, pick(found, prefer, tuple(derived.groups.values()))


def plans(
    derived: Derived, outputs: Sequence[Output], partition: Partition, search: Search
) -> list[Candidate]:
    """The plans of these outputs, cheapest first: of every way to divide them into kernels, once the merge of each
    pass is derived. Where an axis is kept whole for what is computed beforehand, and so cannot be walked, the ways that
    compute nothing beforehand give the schedules that are missing."""
    found: list[Candidate] = []
    tried: list[object] = []
    for way in (partition, partition.walking()):
        structures = [s for s in way.structures(outputs) if s not in tried]
        merges = derived.merges(structures)
        missing = set(SCHEDULES) - {candidate.plan.schedule for candidate in found}
        with derived.timings.stage("choose"):
            for structure in structures:
                made = search.candidates(way.shapes(structure, merges), way.extents)
                found += [candidate for candidate in made if candidate.plan.schedule in missing]
        if {candidate.plan.schedule for candidate in found} == set(SCHEDULES):
            break
        tried += structures
    return by_cost(found)


def as_written(derived: Derived, partition: Partition, search: Search) -> Candidate:
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


def lower_nest(
    nest: Nest,
    program: Program,
    dtypes: Mapping[str, str],
    configs: Sequence[KernelConfig],
    device: Device,
    least_dot: int | None = None,
) -> TileProgram:
    """The tile program of a nest, after the passes of the device. The CPU takes matrix products over shared leading
    axes; a GPU's matrix unit wants `least_dot` positions of every axis (the device's own minimum by default)."""
    on_cpu = device.kind == "cpu"
    smallest = least_dot or (1 if on_cpu else TENSOR_CORE_MIN)
    tiles = lower_tiles(nest, program, dtypes, tuple(configs), batched_dots=on_cpu, least_dot=smallest)
    return run_passes(tiles, passes_for(device.kind), dtypes)


def certify(derived: Derived, compiled: Compiled, checks: Checks) -> Certificate:
    """The certificate of a compiled shape, which all shapes of its loop nest have in common that went through the same
    passes. Raises VerificationError."""
    key = _certificate_key(compiled, checks)
    if key not in derived.certificates:
        plan, nest, device = compiled.chosen.plan, compiled.chosen.nest, compiled.device
        given: dict[str, Any] = {"trials": checks.trials, "scalars": checks.scalars, "bound": checks.bound}
        subject = certifying(derived, nest, compiled.dtypes, device, plan, **given)

        def make() -> Certificate:
            return verify(derived, nest, compiled.dtypes, device, plan=plan, **given)

        certificate, was_kept = results.kept("certified", subject, make, again=checks.again)
        found = replace(certificate, cached=was_kept).located(derived.program.source)
        derived.certificates[key] = found
    return derived.certificates[key]


def certified(derived: Derived, compiled: Compiled, checks: Checks) -> Certificate | None:
    """The certificate of a compiled shape, where there is one already."""
    return derived.certificates.get(_certificate_key(compiled, checks))


def _certificate_key(compiled: Compiled, checks: Checks) -> tuple[Any, ...]:
    known = tuple(sorted(checks.scalars.items()))
    roles = _small_roles(compiled.chosen.plan.roles)
    made = compiled.chosen.nest, compiled.device.kind, compiled.tile.passes, roles
    return *made, checks.trials, checks.bound, known


def verify(
    derived: Derived,
    nest: Nest,
    dtypes: Mapping[str, str],
    device: Device,
    *,
    plan: Plan | None = None,
    trials: int,
    scalars: Mapping[str, object] | None = None,
    bound: float = REQUESTED,
) -> Certificate:
    """The source against the rewritten outputs, the loop nest and the tile program, in the field.

    `plan` is what the nest is of, where that is known. Tiles are smaller than the axes, the last ones ragged, shards
    several and uneven.
    Raises VerificationError with the counterexample where a stage differs.
    """
    subject = certifying(derived, nest, dtypes, device, plan, trials=trials, scalars=scalars, bound=bound)
    with derived.timings.stage("verify"), _faults():
        certificate = examined(replace(subject, program=derived.program), device)
    if not certificate.ok:
        raise VerificationError(
            f"the fused program was not verified: {certificate.reason}",
            hint=str(certificate.counterexample or "no counterexample: too little could be compared"),
            certificate=certificate,
        )
    return certificate


@contextmanager
def _faults() -> Iterator[None]:
    """A tile program that does not hold together is not verified: the program may run in another form."""
    try:
        yield
    except TileError as fault:
        raise VerificationError(
            f"the fused program was not verified: {fault.message}",
            hint="a fault of eqfuse, which the program does not cause: please report it with the program",
        ) from fault


def certifying(
    derived: Derived,
    nest: Nest,
    dtypes: Mapping[str, str],
    device: Device,
    plan: Plan | None,
    *,
    trials: int,
    scalars: Mapping[str, Any] | None,
    bound: float,
) -> Certifying:
    """What `verify` examines."""
    program = derived.program
    return Certifying(
        replace(program, source=""),
        derived.form(plan.form if plan else "rewritten"),
        nest,
        dtypes,
        device.name,
        tuple(map(_single, plan.configs)) if plan else (),
        plan is not None and plan.loses_infinities,
        derived.scope.trusted(derived.report.matches),
        derived.scope.taking_part(derived.report.matches),
        trials,
        bound,
        scalars or {},
        results.folds_in_order(*(output.expr for output in program.outputs)),
        _small_roles(plan.roles) if plan else None,
    )


def _small_roles(roles: Roles | None) -> Roles | None:
    """What the certificate of roles depends on: not the sizes of their blocks."""
    if roles is None:
        return None
    blocks = (replace(b, size=2) if b.size is not None and b.size > 1 else b for b in roles.blocks)
    return replace(roles, blocks=tuple(blocks))


def examined(subject: Certifying, device: Device) -> Certificate:
    """The certificate of a nest on a device, whatever it says."""
    from eqfuse.extend.laws import keeps_infinities
    from eqfuse.extend.reductions import assumptions
    from eqfuse.verify.equivalence import check_stages
    from eqfuse.verify.nearer import Nearer
    from eqfuse.verify.sizes import small_extents
    from eqfuse.verify.stages import stages_of

    program = subject.program
    exprs = [output.expr for output in program.outputs]
    special: Special = "lost" if subject.loses_infinities else "kept"
    if not all(map(keeps_infinities, folds_in(*exprs))):
        special = "ignored"

    def compared(
        program: Program, outputs: tuple[Output, ...], nest: Nest
    ) -> tuple[Certificate, list[TileProgram]]:
        tiles = _examined_tiles(nest, program, subject.dtypes, device, subject.single)
        forms: list[RolesProgram] = []
        if subject.roles is not None and nest == subject.nest:
            forms = verified_roles(nest, program, subject.dtypes, device, subject.roles)
        stages = partial(stages_of, program, outputs, nest, tiles, forms)
        certificate = check_stages(
            program,
            stages(small_extents(program, subject.scalars), 0),
            trials=subject.trials,
            dtypes=subject.dtypes,
            scalars=subject.scalars,
            special=special,
            bound=subject.bound,
            elsewhere=lambda sizes, number: stages(sizes, number + 1),
        )
        return certificate, tiles

    certificate, tiles = compared(program, subject.outputs, subject.nest)
    nearer = Nearer.of(program, subject.outputs, subject.nest)
    if nearer is not None and certificate.counterexample is None:
        near, _ = compared(nearer.program, nearer.outputs, nearer.nest)
        certificate = certificate.with_nearer(near, str(nearer))
    lost = (INFINITIES_LOST,) if subject.loses_infinities else ()
    return replace(
        certificate,
        unverified=assumptions(exprs) + subject.trusted + lost,
        rules=subject.added,
        passes=passes_of(tiles),
    )


def verified_tiles(
    nest: Nest,
    program: Program,
    dtypes: Mapping[str, str],
    device: Device,
    configs: Sequence[KernelConfig] = (),
) -> list[TileProgram]:
    """The tile programs that are verified: the nest lowered to blocks of each of `VERIFIED_BLOCKS`.

    The last of them has one position per program instance along the axes that have so in `configs`, those of a plan: a
    batch in blocks is no matrix product for a GPU, and what is printed is.
    """
    return _examined_tiles(nest, program, dtypes, device, tuple(map(_single, configs)))


def _examined_tiles(
    nest: Nest,
    program: Program,
    dtypes: Mapping[str, str],
    device: Device,
    single: tuple[tuple[str, ...], ...],
) -> list[TileProgram]:
    from eqfuse.verify.stages import VERIFIED_BLOCKS

    found = []
    for block, _ in VERIFIED_BLOCKS:
        last = block == VERIFIED_BLOCKS[-1][0]
        axes = single if single and last else ((),) * len(nest.kernels)
        small = [tiny(kernel, block, each) for kernel, each in zip(nest.kernels, axes, strict=True)]
        found.append(lower_nest(nest, program, dtypes, small, device, least_dot=1))
    return found


def verified_roles(
    nest: Nest, program: Program, dtypes: Mapping[str, str], device: Device, roles: Roles
) -> list[RolesProgram]:
    """The forms in roles that are verified: in blocks of each of `VERIFIED_ROLES`. Raises Unsuited."""
    from eqfuse.tile.roles.choice import rows_of, small
    from eqfuse.verify.stages import VERIFIED_ROLES

    lowered = lower_nest(nest, program, dtypes, [KernelConfig(roles.blocks)], device)
    forms = (small(roles, rows_of(lowered), block) for block, _ in VERIFIED_ROLES)
    return [in_roles(nest, program, dtypes, device, form, least_dot=1) for form in forms]


def in_roles(
    nest: Nest,
    program: Program,
    dtypes: Mapping[str, str],
    device: Device,
    roles: Roles,
    least_dot: int | None = None,
) -> RolesProgram:
    """A nest of one kernel, divided into roles. Raises Unsuited."""
    from eqfuse.tile.roles.split import with_roles

    tiles = lower_nest(nest, program, dtypes, [KernelConfig(roles.blocks)], device, least_dot)
    return with_roles(tiles, [roles], _tensor_axes(program, tiles), finite=program.assume_finite)


def _tensor_axes(program: Program, tiles: TileProgram) -> dict[str, tuple[str | None, ...]]:
    """The axes of the dims of every tensor, as far as they are known."""
    found: dict[str, tuple[str | None, ...]] = {t.name: t.axes or (None,) * t.rank for t in program.tensors}
    return found | {buffer.name: buffer.axes for buffer in tiles.buffers}


def divided(
    derived: Derived,
    chosen: Candidate,
    tile: TileProgram,
    dtypes: Mapping[str, str],
    extents: Mapping[str, int],
    device: Device,
) -> tuple[Candidate, RolesProgram | None]:
    """The plan with the roles of its kernel, where the GPU is one whose kernels may have them and they are predicted to be
    faster. The plan says which, or why none."""
    if device.roles is None:
        return chosen, None
    from eqfuse.tile.roles.unsuited import Unsuited

    plan = chosen.plan
    try:
        _check_triton()
        choice = next(roles_of(derived, chosen, tile, dtypes, extents, device))
    except Unsuited as why:
        return replace(chosen, plan=replace(plan, roles=None, code=f"Triton: {why}")), None
    except StopIteration:
        why_not = "no faster roles fit an SM"
        return replace(chosen, plan=replace(plan, roles=None, code=f"Triton: {why_not}")), None
    return replace(chosen, plan=plan.divided(choice.roles)), choice.program


OLDEST_TRITON = (3, 6)
"""The first Triton whose Gluon has what roles are printed to."""


def _check_triton() -> None:
    """Raises Unsuited where the Triton that is installed is too old."""
    from eqfuse.tile.roles.unsuited import Unsuited

    found = installed("triton")
    if found is not None and tuple(map(int, found.split(".")[:2])) < OLDEST_TRITON:
        raise Unsuited(f"Triton {found} is installed, roles need {'.'.join(map(str, OLDEST_TRITON))}")


def divided_at(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> Compiled:
    """A compiled shape with the roles that are predicted to be fastest at other sizes, where its GPU is one whose kernels may
    have them: the same object where those are its own."""
    if compiled.device.roles is None:
        return compiled
    with derived.timings.stage("roles"):
        found = Search(derived.program, compiled.dtypes, compiled.device, derived.nests)
        chosen = found.at(compiled.chosen, extents)
        given = compiled.tile, compiled.dtypes, extents, compiled.device
        planned, roles = divided(derived, chosen, *given)
    if planned.plan.roles == compiled.chosen.plan.roles:
        return compiled
    plan = replace(compiled.chosen.plan, roles=planned.plan.roles, code=planned.plan.code)
    return replace(compiled, chosen=replace(compiled.chosen, plan=plan), roles=roles)


def roles_of(
    derived: Derived,
    chosen: Candidate,
    tile: TileProgram,
    dtypes: Mapping[str, str],
    extents: Mapping[str, int],
    device: Device,
) -> Iterator[Choice]:
    """The roles that a plan's kernel may have, fastest first. Raises Unsuited."""
    from eqfuse.tile.roles.choice import Outlook, ranked, rows_of

    program, nest, plan = derived.program, chosen.nest, chosen.plan
    rows_of(tile)
    sizes = {**extents, **{renamed: extents[of] for renamed, of in nest.domains if of in extents}}
    shape = shape_of_nest(nest, extents, with_outputs(program, dtypes), plan.shards)
    cost = KernelCost(configured(nest, shape, device)[0], shape, device)
    predicted = plan.cost.seconds if plan.cost else math.inf
    outlook = Outlook(plan.configs[0], cost, device, sizes, predicted)
    return ranked(
        tile,
        outlook,
        lambda configs: lower_nest(nest, program, dtypes, configs, device),
        _tensor_axes(program, tile),
        finite=program.assume_finite,
    )


def _single(config: KernelConfig) -> tuple[str, ...]:
    """Axes of the grid with one position per program instance."""
    return tuple(block.axis for block in config.blocks if block.kind == "grid" and block.size == 1)


def emit_triton(derived: Derived, compiled: Compiled, name: str) -> str:
    """The self-contained Triton module of a compiled shape."""
    from eqfuse.tile.triton.module import emit

    program, plan = derived.program, compiled.chosen.plan
    with derived.timings.stage("emit"):
        nest = compiled.chosen.nest
        shards = {axis: plan.shards for axis, _ in nest.shards}
        sizes = {**shards, **program.lengths}
        kinds = compiled.tile, program, compiled.dtypes, plan.configs
        source = emit(*kinds, name=name, sizes=sizes, extents=compiled.extents)
    debug.show(6, "Triton", lambda: source)
    return source


def emit_gluon(derived: Derived, compiled: Compiled, name: str) -> str:
    """The self-contained Gluon module of a compiled shape that has roles."""
    from eqfuse.tile.gluon.module import emit

    assert compiled.roles is not None
    program = derived.program
    with derived.timings.stage("emit"):
        source = emit(compiled.roles, program, compiled.dtypes, name=name, sizes=program.lengths)
    debug.show(6, "Gluon", lambda: source)
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


def nominal_extents(program: Program) -> dict[str, int]:
    """Extents to plan with before any tensor is seen."""
    axes = dict.fromkeys((*axes_of(program.outputs), *program.domains.values()), NOMINAL_EXTENT)
    return axes | dict(program.lengths)
