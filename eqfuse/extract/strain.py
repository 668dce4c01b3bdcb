"""How much longer a kernel takes on a GPU where its blocks, warps and stages do not suit the chip.

The factors are ratios of times measured on an H200 (docs/attention.md) between attention kernels that differ in
one setting.
"""

from __future__ import annotations

from collections.abc import Mapping

from eqfuse.extract.devices import Device
from eqfuse.extract.footprint import REGISTERS, WARPGROUP_ROWS, products, registers, shared_bytes
from eqfuse.extract.plans import KernelConfig
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Kernel

GROUP_WARPS = 4
"""Warps that multiply matrices together; such a group takes 64 rows at a time."""

NO_GROUP = 1.6
"""Fewer warps than a group where there are rows for one: operands pass through registers."""

SHARED_ROWS = 1.7
"""Several groups that share 64 rows: each reads the other operand."""

ALONE = 1.25
"""One instance to a unit, because of its shared memory: nothing runs while it waits."""

SPILLING = 1.7
"""Exponent of how many times the values are that registers hold."""


def strain(
    kernel: Kernel, config: KernelConfig, blocks: Mapping[str, int], shape: Shape, device: Device
) -> float:
    """The product of the factors that apply; 1 for a kernel without matrix products, whose tiles are used up
    as they are loaded."""
    if not products(kernel):
        return 1.0
    held = registers(kernel, blocks, config.warps, device.lanes, shape)
    factor = float(max(1.0, held / REGISTERS) ** SPILLING)
    if 2 * shared_bytes(kernel, blocks, config.stages, shape) > device.shared:
        factor *= ALONE
    rows = max((blocks[a] for a in kernel.parallel if a in _sides(kernel)), default=1)
    if rows >= WARPGROUP_ROWS == device.rows:
        if config.warps < GROUP_WARPS:
            factor *= NO_GROUP
        elif rows * GROUP_WARPS < WARPGROUP_ROWS * config.warps:
            factor *= SHARED_ROWS
    return factor


def _sides(kernel: Kernel) -> frozenset[str]:
    """Axes that one operand of a matrix product has alone."""
    return frozenset().union(*(p.contraction.left | p.contraction.right for p in products(kernel)))
