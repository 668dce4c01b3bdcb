"""Quantities as text."""

from __future__ import annotations


def duration(seconds: float, sign: str = "") -> str:
    """A time in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:{sign}.3g} {unit}"
    return f"{seconds * 1e9:{sign}.3g} ns"
