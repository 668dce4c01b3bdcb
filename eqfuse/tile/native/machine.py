"""What native kernels are sized for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

USUAL_CACHE = 1 << 20
"""Bytes of a core's second-level cache where the system does not say."""


@lru_cache
def cache_bytes() -> int:
    """Bytes of a core's second-level cache."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, size = ((index / name).read_text(encoding="ascii").strip() for name in ("level", "size"))
        except OSError:
            continue
        if level == "2" and size.endswith("K"):
            return int(size[:-1]) << 10
    return USUAL_CACHE
