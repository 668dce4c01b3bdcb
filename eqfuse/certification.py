"""Every stage of a compiled program against its source, in a finite field: once for all shapes of a loop nest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from eqfuse import results
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.errors import VerificationError
from eqfuse.extract.devices import Device
from eqfuse.limits import Limits
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import KernelConfig, Plan, Roles
from eqfuse.lowered import faults, in_roles, lower_nest
from eqfuse.results import Certifying
from eqfuse.terms.folds import folds_in
from eqfuse.terms.nodes import Output, Program
from eqfuse.terms.views import Views
from eqfuse.tile.nodes import Kernel, TileProgram
from eqfuse.verify.certificate import REQUESTED, Certificate
from eqfuse.verify.refusal import MORE, TRUST, refused

if TYPE_CHECKING:  # loaded at first use: every start would wait for them
    from eqfuse.tile.roles.nodes import RolesProgram
    from eqfuse.verify.comparison import Special
    from eqfuse.verify.source import Stage

INFINITIES_LOST = (
    "infinities: where the program gives one, or shifts an exponential by one, a sum that was taken apart or shifted may "
    "give NaN"
)
"""What a certificate says of a plan that loses infinities."""


@dataclass(frozen=True)
class Checks:
    """How a kernel is verified: `trials` drawn at a time, until the probability of accepting a wrong one is at most
    `bound`, with the scalars that are known; `again` where an earlier process did. `allow` has the sides of branches that
    no trial has to take (see `Certificate.accepted`). What is `written`, and not derived, may run where a limit of memory or
    time ended its trials."""

    trials: int
    bound: float = REQUESTED
    scalars: Mapping[str, float] = field(default_factory=dict)
    again: bool = False
    allow: tuple[str, ...] = ()
    written: bool = False
    limits: Limits = field(default_factory=lambda: Limits.of_environment())


def certify(derived: Derived, compiled: Compiled, checks: Checks) -> Certificate:
    """The certificate of a compiled shape, which all shapes of its loop nest have in common that went through the same
    passes. Raises VerificationError."""
    key = _certificate_key(compiled, checks)
    if key not in derived.certificates:
        chosen = compiled.chosen
        device = compiled.device
        subject = certifying(derived, chosen.nest, chosen.plan, compiled.dtypes, device, checks)

        def make() -> Certificate:
            return agreeing(derived, subject, device)

        certificate, was_kept = results.kept("certified", subject, make, again=checks.again)
        found = replace(certificate, cached=was_kept).located(derived.program.source)
        derived.certificates[key] = _accepted(found, checks)
    return derived.certificates[key]


def certified(derived: Derived, compiled: Compiled, checks: Checks) -> Certificate | None:
    """The certificate of a compiled shape, where there is one already."""
    return derived.certificates.get(_certificate_key(compiled, checks))


def _certificate_key(compiled: Compiled, checks: Checks) -> tuple[Any, ...]:
    known = tuple(sorted(checks.scalars.items()))
    roles = _small_roles(compiled.chosen.plan.roles)
    made = compiled.chosen.nest, compiled.device.kind, compiled.tile.passes, roles
    return *made, checks.trials, checks.bound, known, checks.allow, checks.written


def verify(
    derived: Derived,
    nest: Nest,
    plan: Plan | None,
    dtypes: Mapping[str, str],
    device: Device,
    checks: Checks,
) -> Certificate:
    """The source against the rewritten outputs, the loop nest and the tile program, in the field.

    `plan` is what the nest is of, where that is known. Tiles are smaller than the axes, the last ones ragged, shards
    several and uneven.
    Raises VerificationError with the counterexample where a stage differs, and where a side of a branch was neither taken nor
    allowed.
    """
    made = agreeing(derived, certifying(derived, nest, plan, dtypes, device, checks), device)
    return _accepted(made.located(derived.program.source), checks)


def agreeing(derived: Derived, subject: Certifying, device: Device) -> Certificate:
    """As `verify`, whatever sides of branches no trial took, and whichever limit was reached."""
    with derived.timings.stage("verify"), faults():
        certificate = examined(replace(subject, program=derived.program), device)
    if not certificate.ok and not certificate.over:
        raise refused("the fused program", certificate)
    return certificate


def _accepted(certificate: Certificate, checks: Checks) -> Certificate:
    """The certificate, with what was allowed. Raises VerificationError where something is left."""
    found = certificate.accepted(checks.allow)
    if found.over and not checks.written:
        raise VerificationError(
            f"the program was not verified: {found.reason}",
            hint=MORE,
            certificate=found,
        )
    if not found.ok and not found.over:
        raise VerificationError(
            f"the program was not verified as a whole: {found.reason}",
            hint=TRUST,
            certificate=found,
        )
    return found


def certifying(
    derived: Derived,
    nest: Nest,
    plan: Plan | None,
    dtypes: Mapping[str, str],
    device: Device,
    checks: Checks,
) -> Certifying:
    """What `verify` examines."""
    program = derived.program
    return Certifying(
        replace(program, source=""),
        derived.form(plan),
        nest,
        dtypes,
        device.name,
        tuple(map(_single, plan.configs)) if plan else (),
        plan is not None and (plan.loses_infinities or derived.split is not None),
        derived.scope.trusted(derived.report.matches),
        derived.scope.taking_part(derived.report.matches),
        checks.trials,
        checks.bound,
        checks.scalars,
        results.folds_in_order(*(output.expr for output in program.outputs)),
        _small_roles(plan.roles) if plan else (),
        derived.views,
        (checks.limits.megabytes, checks.limits.seconds),
    )


def examined(subject: Certifying, device: Device) -> Certificate:
    """The certificate of a nest on a device, whatever it says."""
    from eqfuse.extend.laws import keeps_infinities
    from eqfuse.extend.reductions import assumptions
    from eqfuse.tile.passes.pipeline import SPLIT_POSITIONS, passes_of
    from eqfuse.verify.check import check_stages
    from eqfuse.verify.shrink_constants import ShrunkConstants
    from eqfuse.verify.sizes import small_extents
    from eqfuse.verify.stages import stages_of, viewed_stages

    program = subject.program
    exprs = [output.expr for output in program.outputs]
    special: Special = "lost" if subject.loses_infinities else "kept"
    if not all(map(keeps_infinities, folds_in(*exprs))):
        special = "ignored"

    def compared(
        program: Program, outputs: tuple[Output, ...], nest: Nest, views: Views | None = None
    ) -> tuple[Certificate, tuple[str, ...]]:
        tiles = _examined_tiles(nest, program, subject.dtypes, device, subject.single)
        forms: list[RolesProgram] = []
        if subject.roles and nest == subject.nest:
            forms = _roles_forms(nest, program, subject, device)
        prepared = replace(program, outputs=outputs)
        stages: Callable[[Mapping[str, int], int], list[Stage]]
        stages = partial(stages_of, program, prepared, nest, tiles, forms)
        source, first = (
            program,
            stages(small_extents(program, subject.scalars), 0) if views is None else [],
        )
        if views is not None:
            source, stages = views.source, partial(viewed_stages, views, stages)
            small = small_extents(source, subject.scalars) | views.few
            turns = (stage for turn in range(len(tiles)) for stage in stages(small, turn))
            first = list({stage.name: stage for stage in turns}.values())
        certificate = check_stages(
            source,
            first,
            trials=subject.trials,
            dtypes=subject.dtypes,
            scalars=subject.scalars,
            special=special,
            bound=subject.bound,
            elsewhere=lambda sizes, number: stages(sizes, number + 1),
            beside=() if views is None else (prepared,),
            fitted=None if views is None else views.fitted,
            limits=Limits(*subject.limits),
        )
        return certificate, passes_of((*tiles, *forms))

    certificate, passes = compared(program, subject.outputs, subject.nest, subject.views)
    loses = subject.loses_infinities
    if certificate.counterexample is not None and special == "kept" and SPLIT_POSITIONS in passes:
        # a factor of a difference of positions that is infinite is so on either side of it
        special, loses = "lost", True
        certificate, passes = compared(program, subject.outputs, subject.nest, subject.views)
    shrunk = ShrunkConstants.of(program, subject.outputs, subject.nest)
    if shrunk is not None and certificate.counterexample is None:
        near, _ = compared(shrunk.program, shrunk.outputs, shrunk.nest)
        certificate = certificate.with_shrunk(near, str(shrunk))
    lost = (INFINITIES_LOST,) if loses else ()
    return replace(
        certificate,
        unverified=assumptions(exprs) + subject.trusted + lost,
        rules=subject.added,
        passes=(*(subject.views.passes if subject.views else ()), *passes),
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
    from eqfuse.extract.tile_sizes import tiny
    from eqfuse.verify.stages import VERIFIED_BLOCKS

    found = []
    for block, _ in VERIFIED_BLOCKS:
        last = block == VERIFIED_BLOCKS[-1][0]
        axes = single if single and last else ((),) * len(nest.kernels)
        small = [tiny(kernel, block, each) for kernel, each in zip(nest.kernels, axes, strict=True)]
        found.append(lower_nest(nest, program, dtypes, small, device, least_dot=1))
    return found


def verified_roles(
    nest: Nest,
    program: Program,
    dtypes: Mapping[str, str],
    device: Device,
    roles: Sequence[Roles | None],
    single: Sequence[tuple[str, ...]] = (),
) -> list[RolesProgram]:
    """The forms in roles that are verified: in blocks of each of `VERIFIED_ROLES`. Kernels without roles are in blocks as tile
    programs are; along the axes that are `single` they have one position per program instance. Raises Unsuited."""
    from eqfuse.extract.tile_sizes import tiny
    from eqfuse.tile.roles.passes import prepared
    from eqfuse.verify.stages import VERIFIED_BLOCKS, VERIFIED_ROLES

    found = []
    for (block, _), (tile, _) in zip(VERIFIED_ROLES, VERIFIED_BLOCKS, strict=True):
        axes = single or ((),) * len(nest.kernels)
        others = [tiny(kernel, tile, each) for kernel, each in zip(nest.kernels, axes, strict=True)]
        configs = [KernelConfig(r.blocks) if r else o for r, o in zip(roles, others, strict=True)]
        lowered = lower_nest(nest, program, dtypes, configs, device, least_dot=1)
        kernels = zip(roles, lowered.kernels, strict=True)
        form = [None if r is None else _small_of(r, prepared(kernel), block) for r, kernel in kernels]
        found.append(in_roles(nest, program, dtypes, device, form, others, least_dot=1))
    return found


def _small_of(roles: Roles, kernel: Kernel, block: int) -> Roles:
    """A kernel's roles in small blocks."""
    from eqfuse.extract.warp_schedules import small
    from eqfuse.tile.roles.facts import rows_of, walked_columns

    return small(roles, rows_of(kernel), block, walked_columns(kernel))


def _roles_forms(nest: Nest, program: Program, subject: Certifying, device: Device) -> list[RolesProgram]:
    """Those of what is certified. Raises VerificationError where the kernel has none in small blocks."""
    from eqfuse.extract.unsuited import Unsuited

    try:
        return verified_roles(nest, program, subject.dtypes, device, subject.roles, subject.single)
    except Unsuited as why:
        raise VerificationError(
            f"the roles of a kernel were not verified, in small blocks it has none: {why}",
            hint="a fault of eqfuse, which the program does not cause: please report it with the program",
        ) from why


def _single(config: KernelConfig) -> tuple[str, ...]:
    """Axes of the grid with one position per program instance."""
    return tuple(block.axis for block in config.blocks if block.kind == "grid" and block.size == 1)


def _small_roles(roles: Sequence[Roles | None]) -> tuple[Roles | None, ...]:
    """What the certificate of roles depends on: not the sizes of their blocks."""

    def one(roles: Roles) -> Roles:
        blocks = (replace(b, size=2) if b.size is not None and b.size > 1 else b for b in roles.blocks)
        return replace(roles, blocks=tuple(blocks))

    return tuple(None if each is None else one(each) for each in roles)
