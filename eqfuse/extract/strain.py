"""How much longer a kernel takes on a GPU where its blocks, warps and stages do not suit the chip.

The factors are ratios of times measured on an H200 (docs/attention.md) between attention kernels that differ in
one setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from eqfuse.extract.devices import Device
from eqfuse.extract.resources import REGISTERS, WARPGROUP_ROWS, products, registers, shared_bytes
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Kernel
from eqfuse.loops.plan import KernelConfig

GROUP_WARPS = 4
"""Warps that multiply matrices together; such a group takes 64 rows at a time."""

FACTORS: Mapping[str, float] = {"no_group": 1.6, "shared_rows": 1.7, "alone": 1.25, "spilling": 3.25}
"""`no_group`: fewer warps than a group where there are rows for one; operands pass through registers.
`shared_rows`: several groups that share 64 rows; each reads the other operand. `alone`: one instance to a unit,
because of its shared memory; nothing runs while it waits. `spilling`: twice as many values as registers hold."""


def strain(
    kernel: Kernel, config: KernelConfig, blocks: Mapping[str, int], shape: Shape, device: Device
) -> float:
    """The product of the factors that apply; 1 for a kernel without matrix products, whose tiles are used up
    as they are loaded."""
    found = causes(kernel, config, blocks, shape, device)
    return float(math.prod(FACTORS[name] ** times for name, times in found.items()))


def causes(
    kernel: Kernel, config: KernelConfig, blocks: Mapping[str, int], shape: Shape, device: Device
) -> dict[str, float]:
    """Which factors apply, and to which power: those that are there or not to the first."""
    if not products(kernel):
        return {}
    found: dict[str, float] = {}
    held = registers(kernel, blocks, config.warps, device.lanes, shape)
    if held > REGISTERS:
        found["spilling"] = math.log2(held / REGISTERS)
    if 2 * shared_bytes(kernel, blocks, config.stages, shape) > device.shared:
        found["alone"] = 1.0
    rows = max((blocks[a] for a in kernel.parallel if a in _sides(kernel)), default=1)
    if rows >= WARPGROUP_ROWS == device.rows:
        if config.warps < GROUP_WARPS:
            found["no_group"] = 1.0
        elif rows * GROUP_WARPS < WARPGROUP_ROWS * config.warps:
            found["shared_rows"] = 1.0
    return found


def _sides(kernel: Kernel) -> frozenset[str]:
    """Axes that one operand of a matrix product has alone."""
    return frozenset().union(*(p.contraction.apart for p in products(kernel)))
