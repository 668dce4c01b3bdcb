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
from eqfuse.extract.choose import Candidate, Search, pick
from eqfuse.extract.configure import TENSOR_CORE_MIN, tiny
from eqfuse.extract.devices import DEVICES, Device
from eqfuse.extract.plans import KernelConfig, KernelPlan, Plan, Schedule
from eqfuse.extract.structure import KernelShape, Partition
from eqfuse.loops import interpreter as loops_interpreter
from eqfuse.loops.nodes import Loop, Nest
from eqfuse.loops.printer import show as show_nest
from eqfuse.loops.walk import statements
from eqfuse.rules.derivation import Derivation
from eqfuse.rules.derive import axis_order, derive_group, prepare
from eqfuse.rules.merge import Group
from eqfuse.rules.proof import Origin
from eqfuse.rules.saturate import Report
from eqfuse.rules.scope import SHIPPED_ALONE, Scope, current
from eqfuse.rules.trace import claims, trace
from eqfuse.terms.folds import folds_in
from eqfuse.terms.inline import check_written_size
from eqfuse.terms.nodes import Output, Program, Reduce
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.printer import show_program
from eqfuse.terms.types import program_dtypes
from eqfuse.tile import interpreter as tile_interpreter
from eqfuse.tile.lower import lower as lower_tiles
from eqfuse.tile.nodes import TileProgram
from eqfuse.tile.printer import show as show_tiles
from eqfuse.tile.triton import emit
from eqfuse.verify.bound import REQUESTED
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.equivalence import Stage, check_stages
from eqfuse.verify.sizes import small_extents

NOMINAL_EXTENT = 256
"""Extent that a plan assumes for an axis while no tensor has given one."""

VERIFIED_TILES = ((2, 2), (3, 3))
"""Positions of a tile, and number of shards, of each verified run of a loop nest."""
VERIFIED_BLOCKS = ((2, 2), (4, 3))
"""The same for tile programs, whose blocks are powers of two."""


@dataclass
class Timings:
    """Milliseconds per stage of one compilation."""

    ms: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.ms[name] = self.ms.get(name, 0.0) + 1e3 * (time.perf_counter() - start)


@dataclass
class Derived:
    """A program with what equality saturation made of it; independent of sizes."""

    program: Program
    outputs: tuple[Output, ...]
    report: Report
    timings: Timings
    scope: Scope = SHIPPED_ALONE
    groups: dict[tuple[str, tuple[Reduce, ...], str], Group] = field(default_factory=dict)
    schedules: dict[tuple[KernelShape, ...], dict[str, tuple[Schedule, ...]]] = field(default_factory=dict)
    nests: dict[tuple[KernelPlan, ...], Nest] = field(default_factory=dict)
    derivations: dict[tuple[KernelPlan, ...], Derivation] = field(default_factory=dict)

    def search(self, dtypes: Mapping[str, str], device: Device) -> Search:
        """The search for a plan, with the loop-nest terms and nests of earlier shapes."""
        return Search(self.program, self.outputs, dtypes, device, self.schedules, self.nests)

    def group(self, axis: str, reduces: tuple[Reduce, ...], suffix: str) -> Group:
        """The group of these reductions, derived at the first request."""
        key = (axis, reduces, suffix)
        if key not in self.groups:
            with self.timings.stage("derive"), self.scope.entered():
                order = axis_order(replace(self.program, outputs=self.outputs))
                strict_casts, dtypes = self.program.strict_casts, program_dtypes(self.program)
                group, report = derive_group(axis, reduces, order, strict_casts, suffix, dtypes=dtypes)
            self.report.add(report)
            self.groups[key] = group
        return self.groups[key]


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
    source: str, scalars: Mapping[str, float] | None, strict_casts: bool, *, made: bool = False
) -> Derived:
    """Parse and saturate: everything that does not depend on sizes. The size of a program that was `made` of another
    one is not limited: it has no longer terms, however often it reads them."""
    timings = Timings()
    with timings.stage("parse"):
        program = parse(source, scalars=scalars, strict_casts=strict_casts)
        if not made:
            check_written_size(program)
        program_dtypes(program)
    with timings.stage("derive"):
        outputs, report = prepare(program)
    _debug("prepared", lambda: show_program(replace(program, outputs=outputs)))
    return Derived(program, outputs, report, timings, current())


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
    """Choose a plan for these extents and lower it. Raises ScheduleError where `prefer` is impossible."""
    program, timings = derived.program, derived.timings
    partition = Partition(axis_order(replace(program, outputs=derived.outputs)), extents, derived.group)
    spent = timings.ms.get("derive", 0.0)
    with timings.stage("choose"):
        found = derived.search(dtypes, device).candidates(partition)
        chosen = pick(found, prefer, tuple(derived.groups.values()))
    timings.ms["choose"] -= timings.ms["derive"] - spent
    _debug("loops", lambda: show_nest(chosen.nest))
    with timings.stage("lower"):
        tile = lower_nest(chosen.nest, program, dtypes, chosen.plan.configs, device)
    _debug("tiles", lambda: show_tiles(tile))
    return Compiled(tuple(found), chosen, tile, dtypes, extents, device)


def lower_nest(
    nest: Nest,
    program: Program,
    dtypes: Mapping[str, str],
    configs: Sequence[KernelConfig],
    device: Device,
    least_dot: int | None = None,
) -> TileProgram:
    """The tile program of a nest. The CPU takes matrix products over shared leading axes; a GPU's matrix
    unit wants `least_dot` positions of every axis (the device's own minimum by default)."""
    on_cpu = device.kind == "cpu"
    smallest = least_dot or (1 if on_cpu else TENSOR_CORE_MIN)
    return lower_tiles(nest, program, dtypes, tuple(configs), batched_dots=on_cpu, least_dot=smallest)


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
    trials: int,
    scalars: Mapping[str, object] | None = None,
    bound: float = REQUESTED,
) -> Certificate:
    """The source against the prepared outputs, the loop nest and the tile program, in the field.

    Tiles are smaller than the axes, the last ones ragged, shards several and uneven.
    Raises VerificationError with the counterexample where a stage differs.
    """
    program = derived.program
    extents = small_extents(program, scalars)
    with derived.timings.stage("verify"):
        stages = [
            term_stage(program, derived.outputs, extents),
            *loop_stages(program, nest, extents),
            *tile_stages(program, verified_tiles(nest, program, dtypes, device), extents),
        ]
        exprs = [output.expr for output in program.outputs]
        certificate = check_stages(
            program,
            stages,
            trials=trials,
            dtypes=dtypes,
            scalars=scalars,
            special=all(map(keeps_infinities, folds_in(*exprs))),
            bound=bound,
        )
        trusted = taken_on_trust(derived.scope, derived.report.matches)
        certificate = replace(certificate, unverified=assumptions(exprs) + trusted)
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
            proof, classes = trace(program, derived.outputs, derived.groups, plan, origin)
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
    walked = {s.axis for k in nest.kernels for s in statements(k.body) if isinstance(s, Loop)}
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
