"""Candidates for a shape and the cheapest of them.

A table of ways to walk an axis (loops.plan.WAYS), what is stored between kernels (partition.py) and what blocks are priced
for (cost.py): every plan is lowered, given tile sizes and priced, and the cheapest is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from eqfuse import limits
from eqfuse.errors import EqfuseError, ScheduleError
from eqfuse.extract.axis_usage import block_sizes
from eqfuse.extract.cost import kernel_terms, total
from eqfuse.extract.devices import Device
from eqfuse.extract.library_products import is_much, library_product
from eqfuse.extract.mask_coverage import ragged
from eqfuse.extract.resources import loads_of, loads_vectors, products, scan_states, shared_bytes, two_per_sm
from eqfuse.extract.shape import Shape
from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.kernel_axes import narrowed
from eqfuse.loops.lengths import row_range
from eqfuse.loops.nodes import Kernel as LoopKernel
from eqfuse.loops.nodes import LibraryProduct, Nest, Store
from eqfuse.loops.plan import (
    IN_TILES,
    SCANS,
    SCHEDULES,
    STEPPED,
    WAYS,
    Cost,
    Form,
    GroupPlan,
    KernelConfig,
    KernelPlan,
    Plan,
    Schedule,
    Term,
    schedules,
)
from eqfuse.loops.walk import statements
from eqfuse.rules.merge import Group
from eqfuse.terms.folds import rank_axes
from eqfuse.terms.nodes import Local, Output, Program, Reduce, free_axes
from eqfuse.terms.types import output_dtypes, result_dtype
from eqfuse.threads import cached

if TYPE_CHECKING:  # loaded by those who ask: a start that finds what an earlier one has kept does not
    from eqfuse.extract.kernel_shapes import KernelShape

RESIDENT_ROW = 2048
"""Positions up to which a group that is not the dominant one is kept whole."""

WHOLE_STEP = 64
"""Positions of an axis of a state up to which a step on a GPU has all of it at once: weights then stay on chip."""

MAX_SHARDS = 256
"""Two thread blocks on every SM, in powers of two, of one row that is shared out."""

MERGED = 16
"""How many times the bytes that shards store they load at least: what is stored is read again to be merged."""

NOMINAL_SHARDS = 64
"""Shards that blocks are given for while it is not known how many there will be."""

RAGGED_TURNS = 32
"""Shards that take turns on an SM where blocks have lengths of their own: the shards of one that is many times longer
than the average end with the others."""

EVEN_TURNS = 16
"""The same where shards are shared out evenly: the last one to end is as long as all others."""

SM_WARPS = 8
"""Warps that an SM should have, of thread blocks that are smaller."""

SCAN_WARPS = 32
"""The same where thread blocks scan tiles: each waits for what its threads pass on. The running log-sum-exp of 32 x 1048576 numbers
takes 302 us in 32 shards of a row, more than 341 in 8 (H200)."""

SM_BYTES = 1 << 16
"""Bytes that an SM should have under way where elements are loaded one by one."""


@dataclass(frozen=True)
class Candidate:
    """A plan with the nest that it stands for."""

    plan: Plan
    nest: Nest


def seconds_of(candidate: Candidate) -> float:
    """The predicted seconds; infinite where it does not fit."""
    plan = candidate.plan
    return plan.cost.seconds if plan.cost and not plan.reason else math.inf


@dataclass
class PlanSearch:
    """Candidates of one program on one device. The nests that plans were lowered to are kept; each shape only
    prices them."""

    program: Program
    dtypes: Mapping[str, str]
    device: Device
    nests: dict[tuple[KernelPlan, ...], Nest] = field(default_factory=dict)

    @cached
    def _kinds(self) -> Mapping[str, str]:
        return with_outputs(self.program, self.dtypes)

    def candidates(self, kernels: tuple[KernelShape, ...], extents: Mapping[str, int]) -> list[Candidate]:
        """The plans of these kernels: one for every schedule that all of them have, and one with the cheapest schedule
        of each."""
        options = {kernel.name: self._schedules(kernel, extents) for kernel in kernels}
        if not all(options.values()):
            return []
        prices: dict[tuple[str, Schedule], float] = {}
        found: list[Candidate] = []
        for schedule in (each for each in WAYS if any(each in some for some in options.values())):
            mixed: dict[str, Schedule] = {
                name: next((s for s in (schedule, "multi_pass") if s in some), some[0])
                for name, some in options.items()
            }
            candidate, seconds = self._planned(kernels, mixed, schedule, extents)
            if schedule == "split_k" and (even := self._even(candidate, extents)) is not None:
                found.append(even)
            prices |= {(name, schedule): seconds[name] for name in mixed if mixed[name] == schedule}
            theirs = [name for name, some in options.items() if schedule in SCHEDULES or schedule in some]
            if all(mixed[name] == schedule for name in theirs) and _has(candidate.plan, schedule):
                found.append(candidate)
        cheapest = {k.name: _cheapest(k.name, options[k.name], prices) for k in kernels}
        if len(set(cheapest.values())) > 1:
            chief = max(kernels, key=lambda k: prices[k.name, cheapest[k.name]])
            named = next(
                (each for each in reversed(STEPPED) if each in cheapest.values()), cheapest[chief.name]
            )
            candidate = self._planned(kernels, cheapest, named, extents)[0]
            if _has(candidate.plan, candidate.plan.schedule):
                found.append(candidate)
        return found

    def _schedules(self, kernel: KernelShape, extents: Mapping[str, int]) -> tuple[Schedule, ...]:
        """The schedules that a kernel can have here. On a CPU one thread has a row, and a tile's prefixes are no less work than those of
        its positions one after the other."""
        if kernel.in_order is not None:
            return ("in_order",)
        found = schedules(kernel.groups, kernel.parallel)
        if self.device.kind == "cpu":
            return tuple(each for each in found if each not in IN_TILES)
        return found if self._library(kernel, extents) is None else (*found, "library")

    def _library(self, kernel: KernelShape, extents: Mapping[str, int]) -> LibraryProduct | None:
        """The product that a kernel is, of those that a GPU's library computes."""
        if len(kernel.outputs) > 1 or len(kernel.groups) != 1 or kernel.whole:
            return None
        (output,), (group,) = kernel.outputs, kernel.groups
        state = group.states[0]
        if len(group.states) > 1 or output.expr != Local(state.name, state.dims):
            return None
        whole = replace(output, expr=Reduce(state.op, group.axis, state.body))
        if is_much(output, [state.body], self.program.outputs, extents):
            return None
        return library_product(whole, self._kinds, self.program.lengths)

    def as_written(self, kernels: Sequence[KernelShape], extents: Mapping[str, int]) -> Candidate:
        """The plan with a pass for every reduction of the program, and for what is independent of it."""
        plans = tuple(_scheduled(k, "multi_pass", extents, everywhere=True) for k in kernels)
        priced, _ = self._priced(plans, "multi_pass", extents)
        return of_form(priced, "written")

    def _planned(
        self,
        kernels: Sequence[KernelShape],
        schedules: Mapping[str, Schedule],
        name: Schedule,
        extents: Mapping[str, int],
    ) -> tuple[Candidate, dict[str, float]]:
        """The plan with these schedules, and the seconds of each of its kernels."""
        made = ((kernel, _scheduled(kernel, schedules[kernel.name], extents)) for kernel in kernels)
        plans = (
            replace(plan, library=self._library(kernel, extents))
            if schedules[kernel.name] == "library"
            else self._in_tiles(plan, extents)
            for kernel, plan in made
        )
        return self._priced(tuple(plans), name, extents)

    def _in_tiles(self, plan: KernelPlan, extents: Mapping[str, int]) -> KernelPlan:
        """The plan of a kernel whose steps walk long axes of states in tiles, where a block on a GPU has no room for all of them."""
        if plan.in_order is None or self.device.kind == "cpu":
            return plan
        return replace(plan, whole=tuple(a for a in plan.whole if extents.get(a, 1) <= WHOLE_STEP))

    def _priced(
        self, plans: tuple[KernelPlan, ...], name: Schedule, extents: Mapping[str, int]
    ) -> tuple[Candidate, dict[str, float]]:
        """The plan of these kernels, and the seconds of each."""
        from eqfuse.extract.tile_sizes import configure
        from eqfuse.loops.lower import lower

        limits.check()
        nest = self.nests.get(plans)
        if nest is None:
            nest = self.nests[plans] = lower(Plan(name, plans), self.program)
        shards = self.shards(nest, extents) if nest.shards else 1
        plan = Plan(name, plans, shards=shards)
        shape = shape_of(nest, extents, self._kinds, shards)
        kernels_here = configured(nest, shape, self.device)
        configs = tuple(configure(k, shape, self.device) for k in kernels_here)
        return self._with_cost(Candidate(plan, nest), configs, extents)

    def evened(self, candidate: Candidate, extents: Mapping[str, int]) -> Candidate | None:
        """The plan with the shards of each axis shared out by what rows have to do, where data says how long they are; None
        where it does not."""
        changed = []
        for mine in candidate.plan.kernels:
            group = mine.groups[0] if len(mine.groups) == 1 else None
            if group is not None and group.schedule == "split_k":
                even = row_range(_partial(candidate.nest, mine), group.group.axis)
                if even is not None and math.prod(extents[axis] for axis in even.axes) > 1:
                    mine = replace(mine, groups=(replace(group, even=even),))
            changed.append(mine)
        kernels = tuple(changed)
        return None if kernels == candidate.plan.kernels else self._priced(kernels, "split_k", extents)[0]

    def _even(self, candidate: Candidate, extents: Mapping[str, int]) -> Candidate | None:
        """The same on a GPU, where each thread block has one row anyway."""
        if self.device.kind == "cpu":
            return None
        found = self.evened(candidate, extents)
        if found is None:
            return None
        blocks = dict(zip(candidate.nest.kernels, candidate.plan.configs, strict=True))
        for mine in found.plan.kernels:
            for even in (group.even for group in mine.groups if group.even is not None):
                sizes = {b.axis: b.size for b in blocks[_partial(candidate.nest, mine)].blocks}
                if any(sizes[axis] != 1 for axis in even.axes):
                    return None
        return found

    def at(self, candidate: Candidate, extents: Mapping[str, int], shards: int | None = None) -> Candidate:
        """The plan with its blocks, warps and stages, priced for other sizes; its shards are those for them where none are
        given. Its cost is infinite where an axis that had one position, and so got no block, has more."""
        nest, plan = candidate.nest, candidate.plan
        if shards is None:
            shards = self.shards(nest, extents, plan.configs) if nest.shards else 1
        found = replace(plan, shards=shards, measured=None)
        shape = shape_of(nest, extents, self._kinds, shards)
        for kernel, config in zip(configured(nest, shape, self.device), plan.configs, strict=True):
            missing = set(kernel.parallel) - {block.axis for block in config.blocks}
            if missing:
                reason = f"{kernel.name} has no block of {', '.join(sorted(missing))}"
                cost = Cost((Term("does not fit", math.inf),))
                return Candidate(replace(found, cost=cost, reason=reason), nest)
        return self._with_cost(Candidate(found, nest), plan.configs, extents)[0]

    def retiled(self, candidate: Candidate, extents: Mapping[str, int]) -> Candidate:
        """The plan with the blocks, warps and stages that suit other sizes."""
        return self._priced(candidate.plan.kernels, candidate.plan.schedule, extents)[0]

    def _with_cost(
        self, candidate: Candidate, configs: tuple[KernelConfig, ...], extents: Mapping[str, int]
    ) -> tuple[Candidate, dict[str, float]]:
        """The candidate with these configurations of its kernels and their price, and the seconds of each kernel."""
        nest, plan = candidate.nest, candidate.plan
        plans, shape = plan.kernels, shape_of(nest, extents, self._kinds, plan.shards)
        kernels_here = configured(nest, shape, self.device)
        seconds = dict.fromkeys((k.name for k in plans), 0.0)
        terms: list[list[Term]] = []
        reason = ""
        for kernel, config in zip(kernels_here, configs, strict=True):
            mine = kernel_terms(kernel, config, shape, self.device)
            obstacle = _does_not_fit(kernel, config, shape, self.device)
            if obstacle:
                mine.append(Term("does not fit", math.inf))
            reason = reason or obstacle
            terms.append(mine)
            # split kernels are named after theirs: kernel1_partial, kernel1_merge
            owner = max((n for n in seconds if kernel.name.startswith(n)), key=len)
            seconds[owner] += sum(t.seconds for t in mine)
        cost = total(terms)
        return Candidate(
            replace(plan, cost=cost, configs=configs, reason=reason, sizes=self._sizes(extents)), nest
        ), seconds

    def _sizes(self, extents: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """The extents that are an axis's own, as they are shown."""
        return tuple((axis, size) for axis, size in extents.items() if axis not in self.program.domains)

    def shards(
        self, nest: Nest, extents: Mapping[str, int], configs: Sequence[KernelConfig] | None = None
    ) -> int:
        """As many shards as the device runs at once, two thread blocks to an SM where both fit (more of few warps),
        none shorter than a tile: one more would wait for an SM to be free, and each has to be merged. `configs` are
        those of the kernels where they are chosen."""
        from eqfuse.extract.tile_sizes import configure, folds_rows_and_columns

        shape = shape_of(nest, extents, self._kinds, NOMINAL_SHARDS)
        most = 2
        for place, kernel in enumerate(configured(nest, shape, self.device)):
            divided = {shard: axis for shard, axis in nest.shards if shard in kernel.parallel}
            if divided:
                config = configs[place] if configs else configure(kernel, shape, self.device)
                counts = {
                    b.axis: math.ceil(shape.extents[b.axis] / (b.valid or b.size)) if b.size else 1
                    for b in config.blocks
                }
                grid = math.prod(counts.get(a, 1) for a in kernel.parallel if a not in divided)
                blocks = config.sizes(shape.extents)
                both = two_per_sm(kernel, blocks, config, shape, self.device)
                # What is folded along both axes is merged with its columns: each part more costs.
                warps = SCAN_WARPS if scan_states(kernel) else SM_WARPS
                few = folds_rows_and_columns(kernel) or config.warps * 2 > warps
                at_once = (2 if few else warps // config.warps) if both else 1
                if not loads_vectors(kernel, shape):
                    at_once = max(at_once, SM_BYTES // max(1, _tile_bytes(kernel, blocks, shape)))
                room = at_once * self.device.sms * _turns(kernel, divided.values(), counts) // grid
                tiles = min(counts.get(axis, 1) for axis in divided.values())
                room = min(room, _worth_merging(kernel, divided, shape))
                most = max(most, min(1 << max(room, 1).bit_length() - 1, tiles, MAX_SHARDS))
        return most


def _partial(nest: Nest, plan: KernelPlan) -> LoopKernel:
    """The kernel of a nest that walks the shards of a plan's kernel with one group."""
    return next(kernel for kernel in nest.kernels if kernel.name == f"{plan.name}_partial")


def _tile_bytes(kernel: LoopKernel, blocks: Mapping[str, int], shape: Shape) -> int:
    """Bytes of the tiles that a thread block loads at a time."""
    return sum(
        shape.itemsize(load.tensor) * math.prod(blocks.get(axis, 1) for axis in free_axes(load))
        for load in loads_of(kernel)
    )


def _worth_merging(kernel: LoopKernel, shards: Collection[str], shape: Shape) -> int:
    """How many shards store at most a part of what all of them load; of matrix products, whose time is another, any number."""
    if products(kernel):
        return MAX_SHARDS
    stores = [stmt for stmt in statements(kernel.body) if isinstance(stmt, Store)]
    places = [(stmt, frozenset[str]().union(*map(free_axes, stmt.index))) for stmt in stores]
    stored = sum(
        shape.itemsize(stmt.tensor) * shape.positions(axes - frozenset(shards))
        for stmt, axes in places
        if not axes.isdisjoint(shards)
    )
    loaded = sum(shape.itemsize(load.tensor) * shape.positions(free_axes(load)) for load in loads_of(kernel))
    return int(loaded / (MERGED * stored)) if stored else MAX_SHARDS


def _turns(kernel: LoopKernel, axes: Iterable[str], counts: Mapping[str, int]) -> int:
    """How many shards take turns on an SM: where blocks have lengths of their own, more than run at once."""
    found = ragged(kernel)
    data = frozenset[str]().union(*(found[axis].axes for axis in axes if axis in found))
    if kernel.slots is not None:
        return EVEN_TURNS
    return min(RAGGED_TURNS, math.prod(counts.get(axis, 1) for axis in data))


def of_form(candidate: Candidate, form: Form, order: tuple[Output, ...] = ()) -> Candidate:
    nest = replace(candidate.nest, order=order)
    return replace(candidate, plan=replace(candidate.plan, form=form, order=order), nest=nest)


def by_cost(found: Iterable[Candidate]) -> list[Candidate]:
    """Candidates, cheapest first."""
    return sorted(found, key=lambda c: c.plan.cost.seconds if c.plan.cost else math.inf)


def _has(plan: Plan, schedule: Schedule) -> bool:
    """Whether a plan walks some group in this way, or steps; one without groups runs in every way."""
    if any(kernel.in_order is not None for kernel in plan.kernels):
        return schedule == "in_order"
    groups = [group for kernel in plan.kernels for group in kernel.groups]
    return not groups or any(group.schedule == schedule for group in groups)


def _cheapest(
    kernel: str, schedules: Sequence[Schedule], prices: Mapping[tuple[str, Schedule], float]
) -> Schedule:
    return min(schedules, key=lambda schedule: prices[kernel, schedule])


def configured(nest: Nest, shape: Shape, device: Device) -> tuple[LoopKernel, ...]:
    """The kernels of a nest as blocks are chosen and priced for."""
    return nest.kernels if device.kind == "cpu" else tuple(narrowed(k, shape.extents) for k in nest.kernels)


def _does_not_fit(kernel: LoopKernel, config: KernelConfig, shape: Shape, device: Device) -> str:
    if kernel.library is not None:
        return ""
    blocks = block_sizes(config.blocks, shape.extents)
    needed = shared_bytes(kernel, blocks, config.stages, shape)
    if device.kind == "cpu" or needed <= device.shared:
        return ""
    return (
        f"{kernel.name} needs {needed >> 10} KB of shared memory, {device.name} has {device.shared >> 10} KB"
    )


def pick(found: Sequence[Candidate], prefer: str | None, groups: Sequence[Group]) -> Candidate:
    """The cheapest candidate, or the one of the schedule asked for. Raises ScheduleError where there is none."""
    if prefer is None:
        return found[0]
    if prefer not in WAYS:
        raise EqfuseError(f"unknown schedule {prefer!r}", hint=f"choose one of {', '.join(WAYS)}")
    for candidate in found:
        if candidate.plan.schedule == prefer and not candidate.plan.reason:
            return candidate
    reasons = [c.plan.reason for c in found if c.plan.schedule == prefer]
    reasons += [f"{o.factor}: {o.condition}" for g in groups for o in g.obstacles]
    raise ScheduleError(
        f"there is no {prefer} plan for this program",
        hint="; ".join(dict.fromkeys(reasons))
        or "the program has no reduction that could be walked that way",
    )


def with_outputs(program: Program, dtypes: Mapping[str, str]) -> dict[str, str]:
    """The dtypes of inputs and outputs, from those of the inputs."""
    if program.in_order:
        return {**dtypes, **output_dtypes(program, dtypes)}
    return {**dtypes, **_of_outputs(program.outputs, tuple(dtypes.items()))}


@lru_cache(256)
def _of_outputs(outputs: tuple[Output, ...], dtypes: tuple[tuple[str, str], ...]) -> dict[str, str]:
    known = dict(dtypes)
    return {output.name: result_dtype(output.expr, known) for output in outputs}


def shape_of(nest: Nest, extents: Mapping[str, int], dtypes: Mapping[str, str], shards: int) -> Shape:
    """Extents and dtypes of a nest: renamed and shard axes and temporaries added, and outputs, as float32 where
    `dtypes` has none of them."""
    sizes = dict(extents)
    sizes |= {axis: extents[original] for axis, original in nest.domains if original in extents}
    sizes |= {axis: shards for axis, _ in nest.shards}
    kinds = {b.name: b.dtype if b.dtype and b.dtype != "acc" else "f32" for b in nest.buffers}
    return Shape(sizes, {**kinds, **dtypes})


def _dominant(kernel: KernelShape, extents: Mapping[str, int]) -> int:
    from eqfuse.extract.kernel_shapes import work

    weights = [sum(work(s.body, extents) for s in g.states) for g in kernel.groups]
    return max(range(len(weights)), key=lambda i: weights[i])


def _scheduled(
    kernel: KernelShape, schedule: Schedule, extents: Mapping[str, int], *, everywhere: bool = False
) -> KernelPlan:
    """The kernel with its dominant group, or every one, walked in this way."""
    plans: list[GroupPlan] = []
    if kernel.groups:
        chief = _dominant(kernel, extents)
        for index, group in enumerate(kernel.groups):
            mine = schedule if index == chief or everywhere else _minor(group, extents)
            if group.prefix is not None:
                mine = schedule if schedule in SCANS else "scan"
            elif _states_walk_whole(kernel, index) or mine in SCANS:
                mine = "resident"
            plans.append(GroupPlan(group, mine))
    return KernelPlan(
        kernel.name, kernel.outputs, tuple(plans), kernel.parallel, kernel.whole, kernel.in_order
    )


def _states_walk_whole(kernel: KernelShape, index: int) -> bool:
    """Whether states of the kernel's other groups are kept along this group's axis, or what it folds is a list along
    it, so that it must be whole."""
    group = kernel.groups[index]
    if group.axis in rank_axes(*(s.body for s in group.states), *(o.expr for o in kernel.outputs)):
        return True
    return any(group.axis in s.dims for g in kernel.groups if g.axis != group.axis for s in g.states)


def _minor(group: Group, extents: Mapping[str, int]) -> Schedule:
    if extents.get(group.axis, 1) <= RESIDENT_ROW:
        return "resident"
    return "rolling" if group.merge is not None else "multi_pass"
