"""The dtypes of the language: those of floats, of integers, and the numbers that the narrow ones hold."""

from __future__ import annotations

from collections.abc import Mapping

FLOAT8: Mapping[str, float] = {"f8e4m3": 448.0, "f8e5m2": 57344.0}
"""The float8 dtypes, and the largest number of each: what is beyond it is stored as that number (OCP's OFP8, saturating)."""

FLOATS = (*FLOAT8, "f16", "bf16", "f32", "f64")

LIMITS: Mapping[str, tuple[int, int]] = {
    "i8": (-(2**7), 2**7 - 1),
    "u8": (0, 2**8 - 1),
    "i16": (-(2**15), 2**15 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}
"""The dtypes of integers, and the least and the greatest integer of each."""

INTEGERS = tuple(LIMITS)
STORED = ("i8", "u8", "i16")
"""Integers that tensors hold and nothing is computed in: arithmetic on them is in i32."""

DTYPES = (*FLOATS, *INTEGERS, "bool")

BYTES: Mapping[str, int] = {
    **dict.fromkeys(("f8e4m3", "f8e5m2", "i8", "u8", "bool"), 1),
    **dict.fromkeys(("f16", "bf16", "i16"), 2),
    **dict.fromkeys(("f32", "i32"), 4),
    **dict.fromkeys(("f64", "i64"), 8),
}
"""Bytes of an element."""
