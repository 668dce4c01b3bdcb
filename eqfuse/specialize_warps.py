"""Whether the kernels of a plan are divided into roles, and into which: kernel by kernel, by predicted time.

Loaded for GPUs whose kernels may have roles: every other start would wait for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from eqfuse.compiled import Asked, Compiled
from eqfuse.derived import Derived
from eqfuse.environment import installed
from eqfuse.extract.candidates import Candidate, PlanSearch, configured, shape_of, with_outputs
from eqfuse.extract.cost import KernelCost
from eqfuse.extract.unsuited import Unsuited
from eqfuse.extract.warp_schedules import (
    SLOTS,
    Facts,
    Outlook,
    Pricing,
    alternatives,
    fewer_decisions,
    ranked,
)
from eqfuse.loops.plan import Roles
from eqfuse.lowered import Known, in_roles
from eqfuse.tile.check import TileError
from eqfuse.tile.nodes import Dot, TileProgram
from eqfuse.tile.roles.account import account
from eqfuse.tile.roles.facts import facts_of, rows_of
from eqfuse.tile.roles.nodes import RolesKernel, RolesProgram
from eqfuse.tile.roles.passes import prepared
from eqfuse.tile.roles.resources import fits, with_slots
from eqfuse.tile.walk import lets_of

LAUNCH = 3e-6
"""Seconds between two kernels of which the second has roles, beyond those between two of Triton's: set, not measured."""

OLDEST_TRITON = (3, 6)
"""The first Triton whose Gluon has what roles are printed to."""


@dataclass(frozen=True)
class Choice:
    """Roles of a kernel, and its predicted seconds."""

    roles: Roles
    seconds: float

    @property
    def code(self) -> str:
        """What calls run, for those who ask."""
        return f"Gluon: {self.roles}, predicted to take {1e3 * self.seconds:.3g} ms"


@dataclass(frozen=True)
class _Plan:
    """A plan whose kernels may have roles, at some sizes, for a GPU that may run them. Kernels go by their number in the nest."""

    derived: Derived
    asked: Asked
    chosen: Candidate
    tile: TileProgram
    lowered: Known = field(default_factory=dict, compare=False, repr=False)
    """Kernels as they were lowered before: a search changes the blocks of one at a time."""

    @staticmethod
    def of(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> _Plan:
        """That of a compiled shape, at other sizes."""
        search = PlanSearch(derived.program, compiled.dtypes, compiled.device, derived.nests)
        asked = Asked(extents, compiled.dtypes, compiled.device)
        return _Plan(derived, asked, search.at(compiled.chosen, extents), compiled.tile)

    def facts(self, number: int) -> Facts:
        """What pricing needs of a kernel. Raises Unsuited."""
        return facts_of(prepared(self.tile.kernels[number]))

    def outlook(self, number: int) -> Outlook:
        """What pricing the roles of a kernel needs beside."""
        nest, plan, asked = self.chosen.nest, self.chosen.plan, self.asked
        dtypes = with_outputs(self.derived.program, asked.dtypes)
        shape = shape_of(nest, asked.extents, dtypes, plan.shards)
        cost = KernelCost(configured(nest, shape, asked.device)[number], shape, asked.device)
        config = plan.configs[number]
        launch = LAUNCH if len(plan.configs) > 1 else 0.0
        seconds = math.inf if plan.reason else cost.seconds(config)
        return Outlook(config, cost, asked.device, {**asked.extents, **shape.extents}, seconds, launch)

    def pricing(self, number: int) -> Pricing:
        return Pricing(self.facts(number), self.outlook(number))

    def seconds(self, number: int, roles: Roles | None) -> float:
        """What a kernel is predicted to take in roles, or without."""
        residuals = self.asked.device.roles
        if roles is None or residuals is None:
            return self.outlook(number).otherwise
        return self.pricing(number).seconds(roles, residuals)

    def made(self, roles: Sequence[Roles | None]) -> RolesProgram:
        """The program in these roles, made once for all sizes, which only decide what roles are best. Raises Unsuited, also where what was made
        does not hold together: the kernel has a form without roles, and the plan says why."""
        derived, asked, nest, configs = self.derived, self.asked, self.chosen.nest, self.chosen.plan.configs
        others = tuple(config for config, each in zip(configs, roles, strict=True) if each is None)
        key = nest, tuple(roles), others, tuple(sorted(asked.dtypes.items())), asked.device.name
        if key not in derived.specialized:
            try:
                of = nest, derived.program, asked.dtypes, asked.device
                made = in_roles(*of, roles, configs, known=self.lowered)
                derived.specialized[key] = made
            except Unsuited as why:
                derived.specialized[key] = Unsuited(str(why), at_every_size=True)
            except TileError as fault:
                reason = f"its roles do not hold together, a fault of eqfuse: {fault.message}"
                derived.specialized[key] = Unsuited(reason, at_every_size=True)
        found = derived.specialized[key]
        if isinstance(found, Unsuited):
            raise found
        return found

    def kernel(self, number: int, roles: Roles) -> RolesKernel | None:
        """A kernel in these roles; None where it cannot have them."""
        try:
            return self._kernel(number, roles)
        except Unsuited:
            return None

    def _kernel(self, number: int, roles: Roles) -> RolesKernel:
        made = self.made([roles if n == number else None for n in range(len(self.chosen.plan.configs))])
        kernel = made.kernels[number]
        assert isinstance(kernel, RolesKernel)
        return kernel

    def choices(self, number: int, *, slower: bool = False) -> Iterator[Choice]:
        """The roles that a kernel may have and an SM holds, fastest first; those that are predicted to be `slower` than none too,
        where they are asked for. Raises Unsuited: at once where that is of its form, at whatever sizes."""
        return self._choices(number, self.facts(number), slower=slower)

    def _choices(self, number: int, facts: Facts, *, slower: bool) -> Iterator[Choice]:
        """A schedule is built with the fewest slots, once for all numbers of them, to see whether it can be and what it takes of an
        SM. What has more slots, or more decisions, takes no less: where the simplest of its blocks takes too much it is not built,
        and where it takes too much itself, the fewest of its decisions that do are looked for."""
        outlook = self.outlook(number)
        found = ranked(facts, outlook, slower=slower)
        if not any(self.kernel(number, replace(roles, slots=SLOTS[0])) for roles in found.kinds):
            self._kernel(number, replace(found.priced[0][1], slots=SLOTS[0]))  # says why
        held = dict[Roles, bool | None]()

        def holds(roles: Roles) -> bool | None:
            """Whether an SM holds a kernel in these roles; None where it cannot have them."""
            if roles not in held:
                made = self.kernel(number, replace(roles, slots=SLOTS[0]))
                room = outlook.extents, outlook.device
                held[roles] = None if made is None else fits(with_slots(made, roles.slots), *room)
            return held[roles]

        for seconds, roles in found.faster():
            fewer = fewer_decisions(roles)
            if any(held.get(each) is False for each in fewer) or holds(fewer[0]) is False:
                continue
            if holds(roles):
                yield Choice(roles, seconds)
            elif holds(roles) is False:
                for each in fewer:  # the fewest decisions that take too much: others have them, too
                    if holds(each) is False:
                        break

    def best(self, number: int) -> Choice | str:
        """The roles of a kernel, or why it has none. What roles could not be made of at some sizes is not priced at others."""
        known, key = self.derived.unsuited, (id(self.tile), number)
        if key in known:
            return known[key][1]
        found = None
        try:
            _check_triton()
            found = self.choices(number)
            return next(found)
        except Unsuited as why:
            if found is None or why.at_every_size:
                known[key] = self.tile, str(why)
            return str(why)
        except StopIteration:
            return "no faster roles fit an SM"

    def undone(self, number: int, roles: Roles) -> dict[str, float | None]:
        """The seconds of a kernel with each decision of its roles taken back; None where no SM holds that."""
        price, residuals, found = self.pricing(number), self.asked.device.roles, dict[str, float | None]()
        assert residuals is not None
        for what, other in alternatives(price.facts, roles).items():
            if (made := self.kernel(number, other)) is not None:
                there = fits(made, price.outlook.extents, self.asked.device)
                found[what] = price.seconds(other, residuals) if there else None
        return found


LIBRARY = "the library of matrix products"
"""What runs a kernel that is a product of the library."""


def specialized(
    derived: Derived, asked: Asked, chosen: Candidate, tile: TileProgram
) -> tuple[Candidate, RolesProgram | None]:
    """The plan with the roles of its kernels, where they are predicted to be faster. The plan says for each kernel which, or why
    none."""
    plan = _Plan(derived, asked, chosen, tile)
    found = [plan.best(n) if kernel.library is None else LIBRARY for n, kernel in enumerate(tile.kernels)]
    roles = tuple(None if isinstance(each, str) else each.roles for each in found)
    codes = [
        (
            kernel.name,
            (f"Triton: {each}" if each != LIBRARY else each) if isinstance(each, str) else each.code,
        )
        for kernel, each in zip(tile.kernels, found, strict=True)
    ]
    planned = replace(chosen, plan=chosen.plan.with_roles(roles, codes))
    return planned, plan.made(roles) if any(roles) else None


def may_have_roles(tile: TileProgram) -> bool:
    """Whether a kernel of a program's form has rows that warp groups could share, whatever its sizes."""
    for kernel in tile.kernels:
        if any(isinstance(let.op, Dot) for let in lets_of(kernel.body)):
            try:
                rows_of(kernel)
            except Unsuited:
                continue
            return True
    return False


def specialized_at(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> Compiled:
    """A compiled shape with the roles that are predicted to be fastest at other sizes, where its GPU is one whose kernels may
    have them: the same object where those are its own."""
    if extents == compiled.extents:  # its roles were chosen at these
        return compiled
    if compiled.device.roles is None or (compiled.roles is None and not may_have_roles(compiled.tile)):
        return compiled
    if all((id(compiled.tile), number) in derived.unsuited for number in range(len(compiled.tile.kernels))):
        return compiled
    with derived.timings.stage("roles"):
        plan = _Plan.of(derived, compiled, extents)
        planned, roles = specialized(derived, plan.asked, plan.chosen, compiled.tile)
    if planned.plan.roles == compiled.chosen.plan.roles:
        return compiled
    found = replace(compiled.chosen.plan, roles=planned.plan.roles, code=planned.plan.code)
    return replace(compiled, chosen=replace(compiled.chosen, plan=found), roles=roles)


def other_roles(
    derived: Derived, compiled: Compiled, extents: Mapping[str, int]
) -> Iterator[tuple[float, Compiled]]:
    """A compiled shape with one of its kernels in any roles that it may have, be they predicted to be slower than without or not,
    and the others as they are: with the predicted seconds of all at these sizes, fastest first. Nothing where no kernel may have
    roles."""
    at = _Plan.of(derived, compiled, extents)
    kernels, plan = compiled.tile.kernels, compiled.chosen.plan
    mine = plan.roles or (None,) * len(kernels)
    now = [at.seconds(number, roles) for number, roles in enumerate(mine)]

    def of_kernel(number: int) -> Iterator[tuple[float, int, Compiled]]:
        others = sum(now) - now[number]
        try:
            for choice in at.choices(number, slower=True):
                roles = (*mine[:number], choice.roles, *mine[number + 1 :])
                codes = [
                    (kernel.name, "Triton: as it was" if each is None else f"Gluon: {each}")
                    for kernel, each in zip(kernels, roles, strict=True)
                ]
                codes[number] = codes[number][0], choice.code
                planned = replace(compiled.chosen, plan=plan.with_roles(roles, codes))
                made = replace(compiled, chosen=planned, roles=at.made(roles))
                yield choice.seconds + others, number, made
        except Unsuited:
            return

    found = heapq.merge(*map(of_kernel, range(len(kernels))), key=lambda each: each[:2])
    yield from ((seconds, made) for seconds, _, made in found)


def account_of(derived: Derived, compiled: Compiled, extents: Mapping[str, int]) -> tuple[str, ...]:
    """Which roles a compiled shape has, how they came about, and what they are predicted to take at these sizes beside others,
    as lines of text; why it has none, where its GPU is one whose kernels may have some."""
    device, plan = compiled.device, compiled.chosen.plan
    if device.roles is None:
        return ()
    if compiled.roles is None:
        return (plan.code or "none",)
    at = _Plan.of(derived, compiled, extents)
    lines: list[str] = [] if len(plan.roles) == 1 else [plan.code]
    kernels = zip(compiled.tile.kernels, compiled.roles.kernels, plan.roles, strict=True)
    for number, (tiles, kernel, roles) in enumerate(kernels):
        if roles is None or not isinstance(kernel, RolesKernel):
            continue
        if len(plan.roles) > 1:
            lines += ["", f"{kernel.name}:"]
        price = at.pricing(number)
        predicted = price.seconds(roles, device.roles), price.seconds(None, device.roles)
        lines += account(tiles, kernel, device, price.outlook.extents, predicted, at.undone(number, roles))
    return tuple(lines)


def pricing(derived: Derived, compiled: Compiled, extents: Mapping[str, int], number: int = 0) -> Pricing:
    """What a kernel of a compiled shape is predicted to take at these sizes, in any roles."""
    return _Plan.of(derived, compiled, extents).pricing(number)


def _check_triton() -> None:
    """Raises Unsuited where the Triton that is installed is too old."""
    found = installed("triton")
    if found is not None and tuple(map(int, found.split(".")[:2])) < OLDEST_TRITON:
        raise Unsuited(f"Triton {found} is installed, roles need {'.'.join(map(str, OLDEST_TRITON))}")
