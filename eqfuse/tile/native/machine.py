"""What native kernels are sized for."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

USUAL_CACHE = 1 << 20
"""Bytes of a core's second-level cache where the system does not say."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

OWN_SHARE = 4
"""How much of a third-level cache is taken to be a core's own, in second-level caches: a virtual machine is told of all
of the cache, which it shares with others."""


@lru_cache
def cache_levels() -> dict[int, int]:
    """Bytes of the caches for data by level, as far as the system says."""
    found: dict[int, int] = {}
    for index in sorted(CACHES.glob("index*")):
        try:
            level, kind, size = (
                (index / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            found[int(level)] = int(size[:-1]) << 10
    return found


def cache_bytes() -> int:
    """Bytes of a core's second-level cache."""
    return cache_levels().get(2, USUAL_CACHE)


def past_caches() -> int:
    """Bytes of an output from which on it does not stay in the caches anyway."""
    own = OWN_SHARE * cache_bytes() * (os.cpu_count() or 1)
    return min(own, cache_levels().get(3, own))
