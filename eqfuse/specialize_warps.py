"""Whether the kernels of a plan are divided into roles, and into which: kernel by kernel, by predicted time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eqfuse.compiled import Asked, Compiled
from eqfuse.derived import Derived
from eqfuse.environment import installed
from eqfuse.extract.candidates import Candidate, Search, configured, shape_of, with_outputs
from eqfuse.extract.cost import KernelCost
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import KernelConfig
from eqfuse.lowered import in_roles
from eqfuse.tile.nodes import Dot, Kernel, Let, TileProgram
from eqfuse.tile.walk import nested

if TYPE_CHECKING:  # loaded at first use: every start would wait for them
    from eqfuse.extract.warp_schedules import Facts, Outlook, Pricing
    from eqfuse.loops.plan import Roles
    from eqfuse.tile.roles.nodes import RolesKernel, RolesProgram


@dataclass(frozen=True)
class Choice:
    """Roles of a kernel, and its predicted seconds."""

    roles: Roles
    seconds: float

    @property
    def code(self) -> str:
        """What calls run, for those who ask."""
        return f"Gluon: {self.roles}, predicted to take {1e3 * self.seconds:.3g} ms"


LAUNCH = 3e-6
"""Seconds between two kernels of which the second has roles, beyond those between two of Triton's: set, not measured."""

OLDEST_TRITON = (3, 6)
"""The first Triton whose Gluon has what roles are printed to."""


def divided(
    derived: Derived, asked: Asked, chosen: Candidate, tile: TileProgram
) -> tuple[Candidate, RolesProgram | None]:
    """The plan with the roles of its kernels, where the GPU is one whose kernels may have them and they are predicted to be
    faster. The plan says for each kernel which, or why none."""
    if asked.device.roles is None:
        return chosen, None
    found = [_best(derived, asked, chosen, tile, number) for number in range(len(tile.kernels))]
    roles = tuple(None if isinstance(each, str) else each.roles for each in found)
    planned = replace(chosen, plan=chosen.plan.divided(roles, _codes(tile, found)))
    if not any(roles):
        return planned, None
    return planned, _made(derived, asked, chosen.nest, roles, chosen.plan.configs)


def _best(derived: Derived, asked: Asked, chosen: Candidate, tile: TileProgram, number: int) -> Choice | str:
    """The roles of a kernel, by its number in the nest, or why it has none. What roles could not be made of at some sizes is not
    priced at others."""
    from eqfuse.extract.unsuited import Unsuited

    key = id(tile), number
    if key in derived.undivided:
        return derived.undivided[key][1]
    found = None
    try:
        _check_triton()
        found = roles_of(derived, asked, chosen, tile, number)
        return next(found)
    except Unsuited as why:
        if found is None or why.at_every_size:
            derived.undivided[key] = tile, str(why)
        return str(why)
    except StopIteration:
        return "no faster roles fit an SM"


def _codes(tile: TileProgram, found: Sequence[Choice | str]) -> list[tuple[str, str]]:
    """What each kernel runs, and the kernel's name."""
    names = (kernel.name for kernel in tile.kernels)
    return [
        (name, f"Triton: {each}" if isinstance(each, str) else each.code)
        for name, each in zip(names, found, strict=True)
    ]


def may_have_roles(tile: TileProgram) -> bool:
    """Whether a kernel of a program's form has rows that warp groups could share, whatever its sizes."""
    from eqfuse.extract.unsuited import Unsuited
    from eqfuse.tile.roles.facts import rows_of

    for kernel in tile.kernels:
        ops = (stmt.op for stmt in nested(kernel.body) if isinstance(stmt, Let))
        if any(isinstance(op, Dot) for op in ops):
            try:
                rows_of(kernel)
            except Unsuited:
                continue
            return True
    return False


def divided_at(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> Compiled:
    """A compiled shape with the roles that are predicted to be fastest at other sizes, where its GPU is one whose kernels may
    have them: the same object where those are its own."""
    if compiled.device.roles is None or (compiled.roles is None and not may_have_roles(compiled.tile)):
        return compiled
    if all((id(compiled.tile), number) in derived.undivided for number in range(len(compiled.tile.kernels))):
        return compiled
    with derived.timings.stage("roles"):
        asked, chosen = _at(derived, compiled, extents)
        planned, roles = divided(derived, asked, chosen, compiled.tile)
    if planned.plan.roles == compiled.chosen.plan.roles:
        return compiled
    plan = replace(compiled.chosen.plan, roles=planned.plan.roles, code=planned.plan.code)
    return replace(compiled, chosen=replace(compiled.chosen, plan=plan), roles=roles)


def other_roles(
    derived: Derived, compiled: Compiled, extents: Mapping[str, int]
) -> Iterator[tuple[float, Compiled]]:
    """A compiled shape with one of its kernels in any roles that it may have, be they predicted to be slower than without or not,
    and the others as they are: with the predicted seconds of all at these sizes, fastest first. Nothing where no kernel may have
    roles."""
    asked, chosen = _at(derived, compiled, extents)
    tile, plan = compiled.tile, compiled.chosen.plan
    mine = plan.roles or (None,) * len(tile.kernels)
    now = [_seconds(derived, asked, chosen, tile, number, roles) for number, roles in enumerate(mine)]

    def of_kernel(number: int) -> Iterator[tuple[float, int, Compiled]]:
        from eqfuse.extract.unsuited import Unsuited

        others = sum(now) - now[number]
        try:
            for choice in roles_of(derived, asked, chosen, tile, number, slower=True):
                roles = (*mine[:number], choice.roles, *mine[number + 1 :])
                codes = [
                    (kernel.name, "Triton: as it was" if each is None else f"Gluon: {each}")
                    for kernel, each in zip(tile.kernels, roles, strict=True)
                ]
                codes[number] = codes[number][0], choice.code
                made = _made(derived, asked, chosen.nest, roles, plan.configs)
                planned = replace(compiled.chosen, plan=plan.divided(roles, codes))
                yield choice.seconds + others, number, replace(compiled, chosen=planned, roles=made)
        except Unsuited:
            return

    found = heapq.merge(*map(of_kernel, range(len(tile.kernels))), key=lambda each: each[:2])
    yield from ((seconds, made) for seconds, _, made in found)


def _seconds(
    derived: Derived, asked: Asked, chosen: Candidate, tile: TileProgram, number: int, roles: Roles | None
) -> float:
    """What a kernel is predicted to take in roles, or without."""
    from eqfuse.extract.warp_schedules import Pricing

    outlook, residuals = _outlook(derived, asked, chosen, number), asked.device.roles
    if roles is None or residuals is None:
        return outlook.otherwise
    return Pricing(_facts(tile.kernels[number]), outlook).seconds(roles, residuals)


def _facts(kernel: Kernel) -> Facts:
    """What pricing needs of a kernel. Raises Unsuited."""
    from eqfuse.tile.roles.facts import facts_of
    from eqfuse.tile.roles.passes import prepared

    return facts_of(prepared(kernel))


def account_of(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> tuple[str, ...]:
    """Which roles a compiled shape has, how they came about, and what they are predicted to take at these sizes beside others,
    as lines of text; why it has none, where its GPU is one whose kernels may have some."""
    if compiled.device.roles is None:
        return ()
    plan = compiled.chosen.plan
    if compiled.roles is None:
        return (plan.code or "none",)
    from eqfuse.tile.roles.account import account
    from eqfuse.tile.roles.nodes import RolesKernel

    asked, chosen = _at(derived, compiled, extents)
    lines: list[str] = [] if len(plan.roles) == 1 else [plan.code]
    kernels = zip(compiled.tile.kernels, compiled.roles.kernels, plan.roles, strict=True)
    for number, (tiles, kernel, roles) in enumerate(kernels):
        if roles is None or not isinstance(kernel, RolesKernel):
            continue
        if len(plan.roles) > 1:
            lines += ["", f"{kernel.name}:"]
        at = _outlook(derived, asked, chosen, number).extents
        predicted, others = _undone(derived, asked, chosen, tiles, number, roles)
        lines += account(tiles, kernel, compiled.device, at, predicted, others)
    return tuple(lines)


def _undone(
    derived: Derived, asked: Asked, chosen: Candidate, tiles: Kernel, number: int, roles: Roles
) -> tuple[tuple[float, float], dict[str, float | None]]:
    """The seconds that a kernel is predicted to take in roles, and without; and with each decision of the roles taken back, None
    where no SM holds that."""
    from eqfuse.extract.unsuited import Unsuited
    from eqfuse.extract.warp_schedules import Pricing, alternatives
    from eqfuse.tile.roles.resources import fits

    outlook, facts, residuals = _outlook(derived, asked, chosen, number), _facts(tiles), asked.device.roles
    assert residuals is not None
    price = Pricing(facts, outlook)
    found: dict[str, float | None] = {}
    for what, other in alternatives(facts, roles).items():
        try:
            made = _kernel(derived, asked, chosen, number, other)
        except Unsuited:
            continue
        there = fits(made, outlook.extents, outlook.device)
        found[what] = price.seconds(other, residuals) if there else None
    return (price.seconds(roles, residuals), price.seconds(None, residuals)), found


def pricing(derived: Derived, compiled: Compiled, extents: Mapping[str, int], number: int = 0) -> Pricing:
    """What a kernel of a compiled shape is predicted to take at these sizes, in any roles."""
    from eqfuse.extract.warp_schedules import Pricing

    outlook = _outlook(derived, *_at(derived, compiled, extents), number)
    return Pricing(_facts(compiled.tile.kernels[number]), outlook)


def _at(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> tuple[Asked, Candidate]:
    """The plan of a compiled shape at other sizes."""
    found = Search(derived.program, compiled.dtypes, compiled.device, derived.nests)
    return Asked(extents, compiled.dtypes, compiled.device), found.at(compiled.chosen, extents)


def roles_of(
    derived: Derived,
    asked: Asked,
    chosen: Candidate,
    tile: TileProgram,
    number: int,
    *,
    slower: bool = False,
) -> Iterator[Choice]:
    """The roles that a kernel of a plan may have and an SM holds, fastest first; those that are predicted to be `slower` than none
    too, where they are asked for. Raises Unsuited."""
    return _held(derived, asked, chosen, number, _facts(tile.kernels[number]), slower=slower)


def _held(
    derived: Derived, asked: Asked, chosen: Candidate, number: int, facts: Facts, *, slower: bool
) -> Iterator[Choice]:
    """A schedule is built with the fewest slots, once for all numbers of them, to see whether it can be and what it takes of an SM."""
    from eqfuse.extract.unsuited import Unsuited
    from eqfuse.extract.warp_schedules import SLOTS, ranked
    from eqfuse.tile.roles.resources import fits, with_slots

    def least(roles: Roles) -> RolesKernel:
        return _kernel(derived, asked, chosen, number, replace(roles, slots=SLOTS[0]))

    def may_be(roles: Roles) -> bool:
        try:
            return bool(least(roles))
        except Unsuited:
            return False

    outlook = _outlook(derived, asked, chosen, number)
    found = ranked(facts, outlook, slower=slower)
    if not any(map(may_be, found.kinds)):
        least(found.priced[0][1])  # says why
    for seconds, roles in found.faster():
        if may_be(roles) and fits(with_slots(least(roles), roles.slots), outlook.extents, outlook.device):
            yield Choice(roles, seconds)


def _outlook(derived: Derived, asked: Asked, chosen: Candidate, number: int) -> Outlook:
    """What pricing the roles of a kernel needs, but for the kernel."""
    from eqfuse.extract.warp_schedules import Outlook

    program, nest, plan = derived.program, chosen.nest, chosen.plan
    extents, dtypes, device = asked.extents, asked.dtypes, asked.device
    shape = shape_of(nest, extents, with_outputs(program, dtypes), plan.shards)
    sizes = {**extents, **shape.extents}
    cost = KernelCost(configured(nest, shape, device)[number], shape, device)
    config = plan.configs[number]
    launch = LAUNCH if len(plan.configs) > 1 else 0.0
    return Outlook(config, cost, device, sizes, math.inf if plan.reason else cost.seconds(config), launch)


def _kernel(derived: Derived, asked: Asked, chosen: Candidate, number: int, roles: Roles) -> RolesKernel:
    """A kernel of a plan in these roles. Raises Unsuited."""
    from eqfuse.tile.roles.nodes import RolesKernel

    configs = chosen.plan.configs
    every = [None if n != number else roles for n in range(len(configs))]
    made = _made(derived, asked, chosen.nest, every, configs).kernels[number]
    assert isinstance(made, RolesKernel)
    return made


def _made(
    derived: Derived,
    asked: Asked,
    nest: Nest,
    roles: Sequence[Roles | None],
    configs: Sequence[KernelConfig],
) -> RolesProgram:
    """The program in these roles, made once for all sizes, which only decide what roles are best. Raises Unsuited."""
    from eqfuse.extract.unsuited import Unsuited

    others = tuple(config for config, each in zip(configs, roles, strict=True) if each is None)
    key = nest, tuple(roles), others, tuple(sorted(asked.dtypes.items())), asked.device.name
    if key not in derived.divided:
        try:
            program, device = derived.program, asked.device
            derived.divided[key] = in_roles(nest, program, asked.dtypes, device, roles, configs)
        except Unsuited as why:
            derived.divided[key] = Unsuited(str(why), at_every_size=True)
    found = derived.divided[key]
    if isinstance(found, Unsuited):
        raise found
    return found


def _check_triton() -> None:
    """Raises Unsuited where the Triton that is installed is too old."""
    from eqfuse.extract.unsuited import Unsuited

    found = installed("triton")
    if found is not None and tuple(map(int, found.split(".")[:2])) < OLDEST_TRITON:
        raise Unsuited(f"Triton {found} is installed, roles need {'.'.join(map(str, OLDEST_TRITON))}")
