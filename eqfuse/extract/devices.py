"""Devices as data: rates and capacities that the cost model divides by.

Rates are what kernels reach, not datasheet peaks: the sm_90 figures follow a copy and a large bf16
matrix product measured on each card, the others scale their datasheets by the same shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eqfuse.extract.residuals import H200, H200_ROLES, Residuals, RolesResiduals


@dataclass(frozen=True)
class Device:
    """bandwidth and cache_bandwidth in bytes/s; matrix (half and float32), elementwise and special-function
    rates in operations/s; launch and step in seconds; cache, tile and shared in bytes: a tile is what one thread block
    can keep in registers, `shared` the shared memory of an SM. `sms` are the SMs of a GPU, or the threads of a CPU;
    `lanes` are the threads of a warp, `rows` those of a matrix product that runs at the full rate, `stages` the tiles
    of a loop that may be under way (where they wait in registers instead of in shared memory, fewer). `roles` is for GPUs
    whose kernels may be divided into roles: Hopper's. `position` is the part of `step` that an operation takes in a loop over single
    positions."""

    name: str
    kind: str  # "cpu" or "gpu"
    bandwidth: float
    cache_bandwidth: float
    cache: float
    matrix_half: float
    matrix_float: float
    elementwise: float
    special: float
    launch: float
    step: float
    sms: int
    tile: int
    shared: int
    lanes: int = 32
    rows: int = 16
    stages: int = 4
    residuals: Residuals = H200
    roles: RolesResiduals | None = None
    position: float = 1.0

    @property
    def without_roles(self) -> Device:
        """The device as one whose kernels are not divided into roles."""
        return self if self.roles is None else replace(self, name=f"{self.name} without roles", roles=None)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("cpu", "cpu", 20e9, 60e9, 32e6, 6e10, 6e10, 4e9, 1e9, 2e-5, 4e-6, 2, 1 << 20, 1 << 20),
        Device(
            "sm_80",
            "gpu",
            1.7e12,
            4e12,
            40e6,
            220e12,
            15e12,
            15e12,
            2.4e12,
            3e-6,
            2e-7,
            108,
            1 << 17,
            163 << 10,
        ),
        Device(
            "sm_90",
            "gpu",
            3.0e12,
            6e12,
            50e6,
            600e12,
            45e12,
            45e12,
            4e12,
            3e-6,
            1.5e-7,
            132,
            1 << 17,
            227 << 10,
            rows=64,
            roles=H200_ROLES,
        ),
        Device(
            "h200",
            "gpu",
            4.3e12,
            6e12,
            60e6,
            600e12,
            45e12,
            45e12,
            4e12,
            3e-6,
            1.5e-7,
            132,
            1 << 17,
            227 << 10,
            rows=64,
            roles=H200_ROLES,
        ),
        Device(
            "sm_100",
            "gpu",
            7.0e12,
            12e12,
            120e6,
            1300e12,
            60e12,
            60e12,
            6e12,
            3e-6,
            1.5e-7,
            148,
            1 << 17,
            227 << 10,
        ),
        Device(
            "gfx942",
            "gpu",
            4.0e12,
            10e12,
            256e6,
            500e12,
            60e12,
            60e12,
            6e12,
            6e-6,
            3e-7,
            304,
            1 << 16,
            64 << 10,
            64,
            stages=2,
        ),
    )
}
