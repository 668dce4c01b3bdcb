"""Candidates for a shape and the cheapest of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eqfuse.errors import EqfuseError, ScheduleError
from eqfuse.extract.configure import configure
from eqfuse.extract.cost import Shape, nest_cost
from eqfuse.extract.devices import Device
from eqfuse.extract.plans import SCHEDULES, GroupPlan, KernelPlan, Plan, Schedule
from eqfuse.extract.structure import KernelShape, Partition, work
from eqfuse.loops.lower import lower
from eqfuse.loops.nodes import Nest
from eqfuse.rules.merge import Group
from eqfuse.terms.nodes import Output, Program

RESIDENT_ROW = 2048
"""Positions up to which a group that is not the dominant one is kept whole."""

MAX_SHARDS = 64


@dataclass(frozen=True)
class Candidate:
    """A plan with the nest that it stands for."""

    plan: Plan
    nest: Nest


def candidates(
    program: Program,
    outputs: Sequence[Output],
    partition: Partition,
    dtypes: Mapping[str, str],
    device: Device,
) -> list[Candidate]:
    """Every schedule of every kernel's dominant group, costed for these extents, cheapest first: once with
    what would be computed again stored between kernels, once with everything computed in place."""
    shapes = [partition.kernels(outputs)]
    in_place = replace(partition, recompute_share=math.inf).kernels(outputs)
    if in_place != shapes[0]:
        shapes.append(in_place)
    found = [
        _candidate(program, kernels, schedule, partition.extents, dtypes, device)
        for kernels in shapes
        for schedule in SCHEDULES
        if all(_possible(k, schedule) for k in kernels)
    ]
    return sorted(found, key=lambda c: c.plan.cost.seconds if c.plan.cost else math.inf)


def _candidate(
    program: Program,
    kernels: Sequence[KernelShape],
    schedule: Schedule,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
) -> Candidate:
    shards = _shards(kernels, extents, device) if schedule == "split_k" else 1
    plan = Plan(schedule, tuple(_scheduled(k, schedule, extents) for k in kernels), shards=shards)
    nest = lower(plan, program)
    shape = shape_of(nest, extents, dtypes, shards)
    configs = tuple(configure(k, shape.extents, device) for k in nest.kernels)
    cost = nest_cost(nest, configs, shape, device)
    return Candidate(replace(plan, cost=cost, configs=configs), nest)


def pick(found: Sequence[Candidate], prefer: str | None, groups: Sequence[Group]) -> Candidate:
    """The cheapest candidate, or the one of the schedule asked for. Raises ScheduleError where there is none."""
    if prefer is None:
        return found[0]
    if prefer not in SCHEDULES:
        raise EqfuseError(f"unknown schedule {prefer!r}", hint=f"choose one of {', '.join(SCHEDULES)}")
    for candidate in found:
        if candidate.plan.schedule == prefer:
            return candidate
    reasons = [f"{o.factor}: {o.condition}" for g in groups for o in g.obstacles]
    raise ScheduleError(
        f"there is no {prefer} plan for this program",
        hint="; ".join(reasons) or "the program has no reduction that could be walked that way",
    )


def shape_of(nest: Nest, extents: Mapping[str, int], dtypes: Mapping[str, str], shards: int) -> Shape:
    """Extents and dtypes of a nest: renamed and shard axes, outputs and temporaries added."""
    sizes = dict(extents)
    sizes |= {axis: extents[original] for axis, original in nest.domains if original in extents}
    sizes |= {axis: shards for axis, _ in nest.shards}
    kinds = dict(dtypes)
    kinds |= {b.name: b.dtype if b.dtype and b.dtype != "acc" else "f32" for b in nest.buffers}
    return Shape(sizes, kinds)


def _dominant(kernel: KernelShape, extents: Mapping[str, int]) -> int:
    weights = [sum(work(s.body, extents) for s in g.states) for g in kernel.groups]
    return max(range(len(weights)), key=lambda i: weights[i])


def _possible(kernel: KernelShape, schedule: Schedule) -> bool:
    if schedule in ("multi_pass", "resident"):
        return True
    return all(g.merge is not None for g in kernel.groups)


def _scheduled(kernel: KernelShape, schedule: Schedule, extents: Mapping[str, int]) -> KernelPlan:
    plans: list[GroupPlan] = []
    if kernel.groups:
        chief = _dominant(kernel, extents)
        for index, group in enumerate(kernel.groups):
            mine = schedule if index == chief else _minor(group, extents)
            if _states_walk_whole(kernel, index):
                mine = "resident"
            plans.append(GroupPlan(group, mine))
    return KernelPlan(kernel.name, kernel.outputs, tuple(plans), kernel.parallel, kernel.whole)


def _states_walk_whole(kernel: KernelShape, index: int) -> bool:
    """Whether earlier states of the kernel are kept along this group's axis, so that it must be whole."""
    axis = kernel.groups[index].axis
    return any(axis in s.dims for g in kernel.groups[:index] for s in g.states)


def _minor(group: Group, extents: Mapping[str, int]) -> Schedule:
    if extents.get(group.axis, 1) <= RESIDENT_ROW:
        return "resident"
    return "rolling" if group.merge is not None else "multi_pass"


def _shards(kernels: Sequence[KernelShape], extents: Mapping[str, int], device: Device) -> int:
    """Enough shards to give every unit of the device work, none shorter than a tile."""
    most = 2
    for kernel in kernels:
        if not kernel.groups:
            continue
        length = extents.get(kernel.groups[_dominant(kernel, extents)].axis, 1)
        instances = math.prod(math.ceil(extents.get(a, 1) / 64) for a in kernel.parallel)
        wanted = math.ceil(2 * device.units / max(1, instances))
        most = max(most, min(wanted, MAX_SHARDS, max(2, length // 256)))
    return most
