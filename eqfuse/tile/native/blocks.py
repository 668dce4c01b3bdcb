"""Sizes of blocks for native kernels: a thread's tiles should stay in its caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eqfuse.loops.contraction import kernel_axes
from eqfuse.loops.nodes import Kernel, Nest
from eqfuse.loops.plan import AxisBlock, KernelConfig


def native_configs(nest: Nest, configs: Sequence[KernelConfig], extents: Mapping[str, int]) -> list[KernelConfig]:
    return [replace(c, blocks=tuple(_block(b, c) for b in c.blocks)) for c in configs]


def _block(block: AxisBlock, config: KernelConfig) -> AxisBlock:
    return block
