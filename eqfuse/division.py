"""Whether the kernel of a plan is divided into roles, and into which: by predicted time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from eqfuse.compiled import Asked, Compiled
from eqfuse.derived import Derived
from eqfuse.environment import installed
from eqfuse.extract.candidates import Candidate, Search, configured, shape_of, with_outputs
from eqfuse.extract.cost import KernelCost
from eqfuse.lowered import in_roles
from eqfuse.tile.nodes import Dot, Let, TileProgram
from eqfuse.tile.walk import nested

if TYPE_CHECKING:  # loaded at first use: every start would wait for them
    from eqfuse.loops.plan import Roles
    from eqfuse.tile.roles.choice import Choice, Divide, Outlook, Pricing
    from eqfuse.tile.roles.nodes import RolesProgram

OLDEST_TRITON = (3, 6)
"""The first Triton whose Gluon has what roles are printed to."""


def divided(
    derived: Derived, asked: Asked, chosen: Candidate, tile: TileProgram
) -> tuple[Candidate, RolesProgram | None]:
    """The plan with the roles of its kernel, where the GPU is one whose kernels may have them and they are predicted to be
    faster. The plan says which, or why none."""
    if asked.device.roles is None:
        return chosen, None
    from eqfuse.tile.roles.unsuited import Unsuited

    plan = chosen.plan
    try:
        _check_triton()
        choice = next(roles_of(derived, asked, chosen, tile))
    except Unsuited as why:
        return replace(chosen, plan=replace(plan, roles=None, code=f"Triton: {why}")), None
    except StopIteration:
        why_not = "no faster roles fit an SM"
        return replace(chosen, plan=replace(plan, roles=None, code=f"Triton: {why_not}")), None
    return replace(chosen, plan=plan.divided(choice.roles, choice.seconds)), choice.program


def may_have_roles(tile: TileProgram) -> bool:
    """Whether a program's form has rows that warp groups could share, whatever its sizes."""
    ops = (stmt.op for kernel in tile.kernels for stmt in nested(kernel.body) if isinstance(stmt, Let))
    if not any(isinstance(op, Dot) for op in ops):
        return False
    from eqfuse.tile.roles.choice import rows_of
    from eqfuse.tile.roles.unsuited import Unsuited

    try:
        rows_of(tile)
    except Unsuited:
        return False
    return True


def divided_at(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> Compiled:
    """A compiled shape with the roles that are predicted to be fastest at other sizes, where its GPU is one whose kernels may
    have them: the same object where those are its own."""
    if compiled.device.roles is None or (compiled.roles is None and not may_have_roles(compiled.tile)):
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
    """A compiled shape in all roles that it may have, with their predicted seconds at these sizes, fastest first, be they
    predicted to be slower than without roles or not. Nothing where it may have none."""
    from eqfuse.tile.roles.unsuited import Unsuited

    asked, chosen = _at(derived, compiled, extents)
    try:
        for choice in roles_of(derived, asked, chosen, compiled.tile, slower=True):
            plan = compiled.chosen.plan.divided(choice.roles, choice.seconds)
            made = replace(compiled, chosen=replace(compiled.chosen, plan=plan), roles=choice.program)
            yield choice.seconds, made
    except Unsuited:
        return


def account_of(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> tuple[str, ...]:
    """Which roles a compiled shape has, how they came about, and what they are predicted to take at these sizes beside others,
    as lines of text; why it has none, where its GPU is one whose kernels may have some."""
    if compiled.device.roles is None:
        return ()
    plan = compiled.chosen.plan
    if compiled.roles is None or plan.roles is None:
        return (plan.code or "none",)
    from eqfuse.tile.roles.account import account
    from eqfuse.tile.roles.choice import predicted, undone

    asked, chosen = _at(derived, compiled, extents)
    outlook, divide = _outlook(derived, asked, chosen)
    seconds = predicted(compiled.tile, outlook, plan.roles)
    others = list(undone(compiled.tile, outlook, plan.roles, divide))
    return tuple(account(compiled.tile, compiled.roles, compiled.device, outlook.extents, seconds, others))


def pricing(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> Pricing:
    """What a compiled shape is predicted to take at these sizes, in any roles."""
    from eqfuse.tile.roles.choice import Pricing

    return Pricing(compiled.tile, _outlook(derived, *_at(derived, compiled, extents))[0])


def _at(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> tuple[Asked, Candidate]:
    """The plan of a compiled shape at other sizes."""
    found = Search(derived.program, compiled.dtypes, compiled.device, derived.nests)
    return Asked(extents, compiled.dtypes, compiled.device), found.at(compiled.chosen, extents)


def roles_of(
    derived: Derived, asked: Asked, chosen: Candidate, tile: TileProgram, *, slower: bool = False
) -> Iterator[Choice]:
    """The roles that a plan's kernel may have, fastest first; those that are predicted to be `slower` than none too, where
    they are asked for. Raises Unsuited."""
    from eqfuse.tile.roles.choice import ranked, rows_of

    rows_of(tile)
    return ranked(tile, *_outlook(derived, asked, chosen), slower=slower)


def _outlook(derived: Derived, asked: Asked, chosen: Candidate) -> tuple[Outlook, Divide]:
    """What pricing a plan's roles needs, and what makes them."""
    from eqfuse.tile.roles.choice import Outlook

    program, nest, plan = derived.program, chosen.nest, chosen.plan
    extents, dtypes, device = asked.extents, asked.dtypes, asked.device
    sizes = {**extents, **{renamed: extents[of] for renamed, of in nest.domains if of in extents}}
    shape = shape_of(nest, extents, with_outputs(program, dtypes), plan.shards)
    cost = KernelCost(configured(nest, shape, device)[0], shape, device)
    predicted = plan.cost.seconds if plan.cost else math.inf
    outlook = Outlook(plan.configs[0], cost, device, sizes, predicted)
    kinds = tuple(sorted(dtypes.items()))

    def divide(roles: Roles) -> RolesProgram:
        """Made once for all sizes, which only decide what roles are best."""
        from eqfuse.tile.roles.unsuited import Unsuited

        key = nest, roles, kinds, device.name
        if key not in derived.divided:
            try:
                derived.divided[key] = in_roles(nest, program, dtypes, device, roles)
            except Unsuited as why:
                derived.divided[key] = why
        found = derived.divided[key]
        if isinstance(found, Unsuited):
            raise found
        return found

    return outlook, divide


def _check_triton() -> None:
    """Raises Unsuited where the Triton that is installed is too old."""
    from eqfuse.tile.roles.unsuited import Unsuited

    found = installed("triton")
    if found is not None and tuple(map(int, found.split(".")[:2])) < OLDEST_TRITON:
        raise Unsuited(f"Triton {found} is installed, roles need {'.'.join(map(str, OLDEST_TRITON))}")
