"""What a search may try besides the plan that the cost model chooses: other schedules, and one setting changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from eqfuse.extract.candidates import Candidate, configured, shape_of
from eqfuse.extract.cost import kernel_terms, total
from eqfuse.extract.devices import Device
from eqfuse.extract.resources import loads_positions, shared_bytes
from eqfuse.extract.shape import Shape
from eqfuse.extract.tile_sizes import TENSOR_CORE_MIN
from eqfuse.loops.blocks import Block
from eqfuse.loops.kernel_axes import quotients
from eqfuse.loops.nodes import Kernel
from eqfuse.loops.plan import WAYS, KernelConfig
from eqfuse.terms.dtypes import BYTES
from eqfuse.terms.integers import power_of_two

WARPS, STAGES = (1, 32), (1, 7)
"""Least and most of what a step may reach."""

MOST_STAGES = 5
"""The same of stages, where no load waits for another one's result."""

SPILLED = 0.5
"""Part of the predicted time above which a plan whose blocks do not fit on chip is not tried: Triton needs
minutes to compile one."""

TEMPORARIES = 10e9
"""Bytes of temporaries above which a plan is not tried."""


def seconds(candidate: Candidate) -> float:
    """What is predicted for a plan."""
    return candidate.plan.cost.seconds if candidate.plan.cost else math.inf


def of_other_schedules(
    found: Sequence[Candidate], chosen: Candidate, extents: Mapping[str, int], dtypes: Mapping[str, str]
) -> list[Candidate]:
    """The cheapest plan of every schedule but the chosen one's that fits the device, cheapest first.
    `dtypes` are those of inputs and outputs."""
    others: list[Candidate] = []
    for schedule in WAYS:
        if schedule != chosen.plan.schedule:
            options = [
                c
                for c in found
                if c.plan.schedule == schedule
                and _spilled(c) < SPILLED * seconds(c) < math.inf
                and _temporaries(c, extents, dtypes) <= TEMPORARIES
            ]
            others += sorted(options, key=seconds)[:1]
    return sorted(others, key=seconds)


def neighbours(
    candidate: Candidate, extents: Mapping[str, int], dtypes: Mapping[str, str], device: Device
) -> list[Candidate]:
    """Plans one step away, cheapest first: a block (with the warps or without), the warps or the stages of the
    kernel that takes longest, or the shards, doubled or halved. Those that do not fit the device are left out."""
    plan, nest = candidate.plan, candidate.nest
    shape = shape_of(nest, extents, dtypes, plan.shards)
    kernels = configured(nest, shape, device)
    prices = [
        sum(term.seconds for term in kernel_terms(kernel, config, shape, device))
        for kernel, config in zip(kernels, plan.configs, strict=True)
    ]
    chief = prices.index(max(prices))
    steps = [
        ((*plan.configs[:chief], config, *plan.configs[chief + 1 :]), plan.shards)
        for config in _stepped(kernels[chief], plan.configs[chief], shape, device)
    ]
    if nest.shards:
        steps += [(plan.configs, shards) for shards in (2 * plan.shards, plan.shards // 2) if shards > 1]
    found = (changed(candidate, configs, shards, extents, dtypes, device) for configs, shards in steps)
    return sorted((c for c in found if c is not None), key=seconds)


def changed(
    candidate: Candidate,
    configs: tuple[KernelConfig, ...],
    shards: int,
    extents: Mapping[str, int],
    dtypes: Mapping[str, str],
    device: Device,
) -> Candidate | None:
    """The plan with other settings and no roles, priced; None where they do not fit the device."""
    nest = candidate.nest
    shape = shape_of(nest, extents, dtypes, shards)
    terms = []
    for kernel, config in zip(configured(nest, shape, device), configs, strict=True):
        blocks = config.sizes(shape.extents)
        if device.kind == "gpu" and shared_bytes(kernel, blocks, config.stages, shape) > device.shared:
            return None
        terms.append(kernel_terms(kernel, config, shape, device))
    cost = total(terms)
    whole = replace(candidate.plan, roles=(), code="")
    plan = replace(whole, configs=configs, shards=shards, cost=cost, reason="", measured=None)
    return Candidate(plan, nest)


def _stepped(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> Iterator[KernelConfig]:
    """The configuration with one setting changed, or a block and the warps that share it; a CPU has neither warps
    nor stages. Where a loop loads from positions that it has loaded, Triton prefetches half as deep: two stages are one tile."""
    on_gpu = device.kind == "gpu"
    if on_gpu:
        by, most = (2, STAGES[1]) if loads_positions(kernel) else (1, MOST_STAGES)
        for stages in (config.stages + by, config.stages - by):
            if STAGES[0] <= stages <= most:
                yield replace(config, stages=stages)
    for times in (Fraction(2), Fraction(1, 2)):
        warps = int(config.warps * times) if on_gpu else 0
        may_warps = WARPS[0] <= warps <= WARPS[1]
        if may_warps:
            yield replace(config, warps=warps)
        for place, block in enumerate(config.blocks):
            size = int((block.size or 0) * times)
            if may_become(kernel, block, size, shape):
                blocks = [*config.blocks]
                blocks[place] = replace(block, size=size)
                yield replace(config, blocks=tuple(blocks))
                if may_warps:
                    yield replace(config, blocks=tuple(blocks), warps=warps)


def may_become(kernel: Kernel, block: Block, size: int, shape: Shape) -> bool:
    """Whether steps lead from a block to another size of it. What loads divide has the size of the divisor."""
    if block.size is None or block.kind not in ("grid", "loop") or block.axis in quotients(kernel):
        return False
    less, more = sorted((block.size, size))
    times = more // less if less else 0
    return (
        less >= TENSOR_CORE_MIN
        and times * less == more
        and times & (times - 1) == 0
        and size <= power_of_two(shape.extents[block.axis])
    )


def _spilled(candidate: Candidate) -> float:
    terms = candidate.plan.cost.terms if candidate.plan.cost else ()
    return sum(term.seconds for term in terms if term.name == "spill")


def _temporaries(candidate: Candidate, extents: Mapping[str, int], dtypes: Mapping[str, str]) -> int:
    """Bytes that the kernels of a plan hand on to each other."""
    shape = shape_of(candidate.nest, extents, dtypes, candidate.plan.shards)
    return sum(
        BYTES[shape.dtypes[buffer.name]] * math.prod(shape.extents[axis] for axis in buffer.axes)
        for buffer in candidate.nest.buffers
        if not buffer.is_output
    )
