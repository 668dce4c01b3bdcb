"""Values of other magnitudes: from the least denormal number of float32 to near its greatest, alike or mixed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

MAGNITUDES: Mapping[str, tuple[float, float]] = {
    "denormal": (-44, -44),
    "1e-38": (-38, -38),
    "1e-20": (-20, -20),
    "1e20": (20, 20),
    "1e37": (37.4, 37.4),
    "rows": (-44, 37.4),
    "mixed": (-44, 37.4),
}
"""Powers of ten that values near 1 are scaled by: all alike, each row of the last dimension, or each element."""


def factors(magnitude: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """In float64, of a shape that broadcasts to `shape`."""
    low, high = MAGNITUDES[magnitude]
    counts = {"rows": (*shape[:-1], 1), "mixed": shape}.get(magnitude, ()) if shape else ()
    powers = low + (high - low) * torch.rand(counts, generator=generator, dtype=torch.float64)
    return torch.pow(10.0, powers)


def scaled(tensor: torch.Tensor, magnitude: str, generator: torch.Generator) -> torch.Tensor:
    """In the tensor's dtype, which rounds what is too small for it to 0."""
    return (tensor.double() * factors(magnitude, tuple(tensor.shape), generator)).to(tensor.dtype)
