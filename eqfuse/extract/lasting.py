"""Blocks of kernels that run long enough for a GPU's power limit to lower its clock.

Reading operands of matrix products from shared memory takes power. On an H200, attention at length 32768 with 64 rows
starts at 520 TFLOP/s and falls to 446 within a second, at 1.55 GHz; with 128 rows it starts at 510 and falls to
463, at 1.74 GHz (docs/attention.md). In short runs two instances of 64 rows are better: they overlap each other's
phases.
"""

from __future__ import annotations

from dataclasses import replace

from eqfuse.extract.cost import seconds_alone
from eqfuse.extract.devices import Device
from eqfuse.extract.resources import REGISTERS, WARPGROUP_ROWS, products, registers, shared_bytes
from eqfuse.extract.shape import Shape
from eqfuse.loops.nodes import Kernel
from eqfuse.loops.plan import KernelConfig

LASTS = 10e-3
"""Seconds of matrix products from which on the clock counts."""

FEW_OTHERS = 0.5
"""Special functions, as a part of the products' time, up to which it is the products that take the power."""


def for_lasting(kernel: Kernel, config: KernelConfig, shape: Shape, device: Device) -> KernelConfig:
    """The configuration of a kernel that lasts with twice the rows that share an operand, and twice the warps;
    itself where those do not fit, or where there are no groups of warps with rows of their own."""
    if not products(kernel):
        return config
    alone = seconds_alone(kernel, config, shape, device)
    if alone["matrix"] < LASTS or alone["special"] > FEW_OTHERS * alone["matrix"]:
        return config
    sides = frozenset[str]().union(*(p.contraction.apart for p in products(kernel)))
    wide = tuple(
        replace(b, size=2 * b.size)
        if b.axis in sides and b.axis in kernel.parallel and b.size == WARPGROUP_ROWS == device.rows
        else b
        for b in config.blocks
    )
    doubled = replace(config, blocks=wide, warps=2 * config.warps)
    blocks = doubled.sizes(shape.extents)
    fits = (
        shared_bytes(kernel, blocks, config.stages, shape) <= device.shared
        and registers(kernel, blocks, doubled.warps, device.lanes, shape) <= REGISTERS
    )
    return doubled if wide != config.blocks and fits else config
