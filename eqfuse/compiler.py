"""The pipeline, top to bottom.

    source --parse--> Program --prepare--> outputs --derive--> groups with merges     once per program
    extents --choose--> Plan, Nest --lower--> TileProgram --emit--> Triton             once per shape
    verify: every stage against the source, in a finite field                          once per loop nest

`EQFUSE_DEBUG=1` prints what passes between the stages.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.extend.laws import keeps_infinities
from eqfuse.extend.reductions import assumptions
from eqfuse.extend.rules import taken_on_trust
from eqfuse.extract.candidates import Candidate, Search, by_cost, of_form, pick
from eqfuse.extract.devices import DEVICES, Device
from eqfuse.extract.partition import Partition
from eqfuse.extract.tile_sizes import TENSOR_CORE_MIN, tiny
from eqfuse.loops import interpreter as loops_interpreter
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import Form, KernelConfig, KernelPlan, Plan
from eqfuse.loops.printer import show as show_nest
from eqfuse.loops.walk import loops_in
from eqfuse.progress import progress
from eqfuse.proof.derivation import Derivation
from eqfuse.proof.nodes import Origin
from eqfuse.proof.trace import claims, trace
from eqfuse.rules.derive import axis_order, derive_group, name_states, prepare
from eqfuse.rules.distribute import is_spread
from eqfuse.rules.egraph import client
from eqfuse.rules.egraph.saturate import Report
from eqfuse.rules.merge import Group, Obstacle
from eqfuse.rules.scope import SHIPPED_ALONE, Scope, current
from eqfuse.terms.folds import folds_in
from eqfuse.terms.inline import check_written_size
from eqfuse.terms.nodes import Output, Program, Reduce, reductions
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.printer import show_program
from eqfuse.terms.types import check_indices, program_dtypes
from eqfuse.threads import Lock
from eqfuse.tile import interpreter as tile_interpreter
from eqfuse.tile.lower.program import lower as lower_tiles
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.passes.pipeline import passes_for, passes_of, run_passes
from eqfuse.tile.printer import show as show_tiles
from eqfuse.tile.triton.module import emit
from eqfuse.verify.bound import REQUESTED
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.equivalence import Special, Stage, check_stages
from eqfuse.verify.sizes import small_extents

NOMINAL_EXTENT = 256
"""Extent that a plan assumes for an axis while no tensor has given one."""

VERIFIED_TILES = ((2, 2), (3, 3))
"""Positions of a tile, and number of shards, of each verified run of a loop nest."""
VERIFIED_BLOCKS = ((2, 2), (4, 3))
"""The same for tile programs, whose blocks are powers of two."""


AS_WRITTEN = "its passes were asked for as the program has them"
"""Why the groups of `prefer="multi_pass"` have no merge."""


INFINITIES_LOST = (
    "infinities: where the program gives one, a sum that was taken apart or shifted may give NaN"
)
"""What a certificate says of a plan that loses infinities."""


@dataclass
class Timings:
    """Milliseconds per stage of one compilation."""

    ms: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with progress(name):
                yield
        finally:
            self.ms[name] = self.ms.get(name, 0.0) + 1e3 * (time.perf_counter() - start)


@dataclass
class Derived:
    """A program with what equality saturation made of it; independent of sizes. `unfinished` says how the budget of
    rewriting the outputs ended, where it did."""

    program: Program
    outputs: tuple[Output, ...]
    report: Report
    timings: Timings
    scope: Scope = SHIPPED_ALONE
    unfinished: str = ""
    _apart: tuple[Output, ...] | None = None
    groups: dict[tuple[str, tuple[Reduce, ...], str], Group] = field(default_factory=dict)
    nests: dict[tuple[KernelPlan, ...], Nest] = field(default_factory=dict)
    derivations: dict[tuple[KernelPlan, ...], Derivation] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def order(self) -> tuple[str, ...]:
        """Every axis, in the order that the dims of values have."""
        prepared = axis_order(replace(self.program, outputs=self.outputs))
        return tuple(dict.fromkeys((*prepared, *axis_order(self.program))))

    def form(self, form: Form) -> tuple[Output, ...]:
        """The outputs in one of the forms that plans run."""
        return {"rewritten": self.outputs, "apart": self._apart or (), "written": self.program.outputs}[form]

    def taken_apart(self) -> tuple[Output, ...]:
        """The outputs with the terms of sums taken apart; none where that changes nothing."""
        if self._apart is None:
            reduces = reductions(*(output.expr for output in self.outputs))
            found: tuple[Output, ...] = ()
            if any(map(is_spread, reduces)):
                with self.timings.stage("derive"), self.scope.entered():
                    found, report = prepare(self.program, apart=True)
                self.report.add(report)
            self._apart = () if found == self.outputs else found
        return self._apart

    def search(self, dtypes: Mapping[str, str], device: Device, form: Form = "rewritten") -> Search:
        """The search for a plan, with the nests of earlier shapes."""
        return Search(self.program, self.form(form), dtypes, device, self.nests)

    def group(self, axis: str, reduces: tuple[Reduce, ...], suffix: str) -> Group:
        """The group of these reductions, derived at the first request."""
        key = (axis, reduces, suffix)
        if key not in self.groups:
            with self.timings.stage("derive"), self.scope.entered():
                strict_casts, dtypes = self.program.strict_casts, program_dtypes(self.program)
                group, report = derive_group(axis, reduces, self.order, strict_casts, suffix, dtypes=dtypes)
            self.report.add(report)
            self.groups[key] = group
        return self.groups[key]

    def unmerged(self, axis: str, reduces: tuple[Reduce, ...], suffix: str) -> Group:
        """The group of these reductions for passes that need no merge."""
        states = name_states(axis, reduces, self.order, suffix)
        asked = tuple(Obstacle(Reduce(s.op, axis, s.body), s.body, AS_WRITTEN) for s in states)
        return Group(axis, states, None, asked)


@dataclass(frozen=True)
class Compiled:
    """One shape's result: the candidates, the chosen one, and its tile program."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    tile: TileProgram
    dtypes: Mapping[str, str]
    extents: Mapping[str, int]
    device: Device


def derive(
    source: str,
    scalars: Mapping[str, float] | None,
    strict_casts: bool,
    *,
    assume_finite: bool = False,
    made: bool = False,
) -> Derived:
    """Parse and saturate: everything that does not depend on sizes. The size of a program that was `made` of another
    one is not limited: it has no longer terms, however often it reads them."""
    client.start()
    timings = Timings()
    with timings.stage("parse"):
        program = parse(source, scalars=scalars, strict_casts=strict_casts, made=made)
        program = replace(program, assume_finite=assume_finite)
        if not made:
            check_written_size(program)
        check_indices(program, program_dtypes(program))
    with timings.stage("derive"):
        outputs, report = prepare(program)
    _debug("prepared", lambda: show_program(replace(program, outputs=outputs)))
    return Derived(program, outputs, report, timings, current(), report.stopped)


def nominal_extents(program: Program) -> dict[str, int]:
    """Extents to plan with before any tensor is seen."""
    axes = dict.fromkeys((*axes_of(program.outputs), *program.domains.values()), NOMINAL_EXTENT)
    return axes | dict(program.lengths)


def compile_for(
    derived: Derived,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
    prefer: str | None,
) -> Compiled:
    """Choose a plan for these extents and lower it. Raises ScheduleError where `prefer` is impossible.

    The passes of `prefer="multi_pass"` are those of the program as it is written, whatever it was rewritten to.
    """
    program, timings = derived.program, derived.timings
    partition = Partition(derived.order, extents, derived.group)
    spent = timings.ms.get("derive", 0.0)
    with timings.stage("choose"):
        found = derived.search(dtypes, device).candidates(partition)
        if prefer == "multi_pass" and derived.outputs != program.outputs:
            others = (c for c in found if c.plan.schedule != prefer)
            written = replace(partition, derive=derived.unmerged)
            found = by_cost([derived.search(dtypes, device).as_written(written), *others])
        elif any(map(_is_stuck, found)) and derived.taken_apart():
            apart = derived.search(dtypes, device, "apart").candidates(partition)
            merged = (c for c in apart if c.plan.schedule in ("rolling", "split_k") and not _is_stuck(c))
            found = by_cost([*found, *(of_form(c, "apart") for c in merged)])
        chosen = pick(found, prefer, tuple(derived.groups.values()))
    timings.ms["choose"] -= timings.ms["derive"] - spent
    _debug("loops", lambda: show_nest(chosen.nest))
    with timings.stage("lower"):
        tile = lower_nest(chosen.nest, program, dtypes, chosen.plan.configs, device)
    _debug("tiles", lambda: show_tiles(tile))
    return Compiled(tuple(found), chosen, tile, dtypes, extents, device)


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
    """The tile program of a nest, after the passes of the device. The CPU takes matrix products over shared leading axes; a GPU's matrix
    unit wants `least_dot` positions of every axis (the device's own minimum by default)."""
    on_cpu = device.kind == "cpu"
    smallest = least_dot or (1 if on_cpu else TENSOR_CORE_MIN)
    tiles = lower_tiles(nest, program, dtypes, tuple(configs), batched_dots=on_cpu, least_dot=smallest)
    return run_passes(tiles, passes_for(device.kind), dtypes)


def emit_triton(derived: Derived, compiled: Compiled, name: str) -> str:
    """The self-contained Triton module of a compiled shape."""
    program, plan = derived.program, compiled.chosen.plan
    with derived.timings.stage("emit"):
        nest = compiled.chosen.nest
        shards = {axis: plan.shards for axis, _ in nest.shards}
        sizes = {**shards, **program.lengths}
        return emit(compiled.tile, program, compiled.dtypes, plan.configs, name=name, sizes=sizes)


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
    """The source against the prepared outputs, the loop nest and the tile program, in the field.

    `plan` is what the nest is of, where that is known. Tiles are smaller than the axes, the last ones ragged, shards
    several and uneven.
    Raises VerificationError with the counterexample where a stage differs.
    """
    program, loses = derived.program, plan is not None and plan.loses_infinities
    extents = small_extents(program, scalars)
    with derived.timings.stage("verify"):
        tiles = verified_tiles(nest, program, dtypes, device)
        stages = [
            term_stage(program, derived.form(plan.form if plan else "rewritten"), extents),
            *loop_stages(program, nest, extents),
            *tile_stages(program, tiles, extents),
        ]
        exprs = [output.expr for output in program.outputs]
        special: Special = "lost" if loses else "kept"
        if not all(map(keeps_infinities, folds_in(*exprs))):
            special = "ignored"
        certificate = check_stages(
            program,
            stages,
            trials=trials,
            dtypes=dtypes,
            scalars=scalars,
            special=special,
            bound=bound,
        )
        trusted = taken_on_trust(derived.scope, derived.report.matches)
        lost = (INFINITIES_LOST,) if loses else ()
        unverified, passes = assumptions(exprs) + trusted + lost, passes_of(tiles)
        certificate = replace(certificate, unverified=unverified, passes=passes)
    if not certificate.ok:
        raise VerificationError(
            f"the fused program was not verified: {certificate.reason}",
            hint=str(certificate.counterexample or "no counterexample: too little could be compared"),
            certificate=certificate,
        )
    return certificate


def derivation(derived: Derived, plan: Plan, scalars: Mapping[str, float]) -> Derivation:
    """The derivation of a plan. The saturations are run again, recorded."""
    program = derived.program
    if plan.kernels not in derived.derivations:
        origin = Origin(program.source, scalars, program.strict_casts)
        with derived.timings.stage("explain"), derived.scope.entered():
            proof, classes = trace(program, derived.order, derived.groups, plan, origin)
        derived.derivations[plan.kernels] = Derivation(
            proof, claims(plan, program.strict_casts), classes, derived.scope
        )
    return derived.derivations[plan.kernels]


def term_stage(program: Program, outputs: tuple[Output, ...], extents: Mapping[str, int]) -> Stage:
    """Outputs that say the same as the program's, run as written."""
    return Stage.of_program("prepared", replace(program, outputs=outputs), extents)


def loop_stages(program: Program, nest: Nest, extents: Mapping[str, int]) -> list[Stage]:
    """The nest in tiles of each of `VERIFIED_TILES`."""
    return [_loop_stage(nest, program, extents, tile, shards) for tile, shards in VERIFIED_TILES]


def verified_tiles(
    nest: Nest, program: Program, dtypes: Mapping[str, str], device: Device
) -> list[TileProgram]:
    """The tile programs that are verified: the nest lowered to blocks of each of `VERIFIED_BLOCKS`."""
    return [
        lower_nest(
            nest, program, dtypes, [tiny(kernel, block) for kernel in nest.kernels], device, least_dot=1
        )
        for block, _ in VERIFIED_BLOCKS
    ]


def tile_stages(program: Program, tiles: Sequence[TileProgram], extents: Mapping[str, int]) -> list[Stage]:
    """The programs that `verified_tiles` gives, run in padded blocks."""
    return [
        _tile_stage(lowered, program, extents, block, shards)
        for lowered, (block, shards) in zip(tiles, VERIFIED_BLOCKS, strict=True)
    ]


def _loop_stage(nest: Nest, program: Program, extents: Mapping[str, int], tile: int, shards: int) -> Stage:
    walked = {loop.axis for kernel in nest.kernels for loop in loops_in(kernel.body)}
    tiles = {axis: 1 if axis in dict(nest.shards) else tile for axis in walked}
    split = {axis: shards for axis, _ in nest.shards}
    return Stage(
        f"loops, tiles of {tile}",
        lambda i, d: loops_interpreter.run(
            nest, program, i.tensors, i.scalars, i.extents, d, tiles=tiles, shards=split, batch=i.trials
        ),
        extents,
        f"tiles of {tile}" + (f", {shards} shards" if split else ""),
    )


def _tile_stage(
    tiles: TileProgram, program: Program, extents: Mapping[str, int], block: int, shards: int
) -> Stage:
    split = {axis: shards for axis, _ in tiles.shards}
    return Stage(
        f"tiles, blocks of {block}",
        lambda i, d: tile_interpreter.run(
            tiles, program, i.tensors, i.scalars, i.extents, d, shards=split, batch=i.trials
        ),
        extents,
        f"blocks of {block}, padded" + (f", {shards} shards" if split else ""),
    )


def device_named(name: str) -> Device:
    """The device description of a target. Raises EqfuseError for an unknown name."""
    if name not in DEVICES:
        raise EqfuseError(f"unknown target {name!r}", hint=f"choose one of auto, {', '.join(DEVICES)}")
    return DEVICES[name]


def _debug(stage: str, text: Callable[[], str]) -> None:
    if os.environ.get("EQFUSE_DEBUG", "0") not in ("", "0"):
        print(f"-- {stage}\n{text()}\n", file=sys.stderr)
