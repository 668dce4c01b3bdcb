"""What a plan is chosen for: the extents of axes and the dtypes of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eqfuse.terms.nodes import Expr, Load, walk

BYTES = {"f8e4m3": 1, "bool": 1, "f16": 2, "bf16": 2, "f32": 4, "i32": 4, "f64": 8, "i64": 8}
HALF = ("f8e4m3", "f16", "bf16")


@dataclass(frozen=True)
class Shape:
    """Extents of axes and dtypes of tensors, temporaries and shard axes included."""

    extents: Mapping[str, int]
    dtypes: Mapping[str, str]

    def positions(self, axes: frozenset[str]) -> float:
        """Number of positions of a value with these axes."""
        return float(math.prod(self.extents.get(a, 1) for a in axes))

    def itemsize(self, tensor: str) -> int:
        """Bytes of an element of a tensor."""
        return BYTES[self.dtypes.get(tensor, "f32")]

    def is_narrow(self, expr: Expr) -> bool:
        """Whether every tensor that an expression reads has elements of one byte."""
        return {self.itemsize(n.tensor) for n in walk(expr) if isinstance(n, Load)} == {1}

    def is_half(self, expr: Expr) -> bool:
        """Whether every tensor that an expression reads is of half precision or less."""
        loads = [n for n in walk(expr) if isinstance(n, Load)]
        return bool(loads) and all(self.dtypes.get(load.tensor, "f32") in HALF for load in loads)
