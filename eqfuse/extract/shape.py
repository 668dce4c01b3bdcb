"""What a plan is chosen for: the extents of axes and the dtypes of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from eqfuse.loops.contraction import Contraction
from eqfuse.terms.dtypes import BYTES, FLOAT8, INTEGERS
from eqfuse.terms.nodes import Expr, Load, walk

HALF = (*FLOAT8, "f16", "bf16")


@dataclass(frozen=True)
class Shape:
    """Extents of axes and dtypes of tensors, temporaries and shard axes included."""

    extents: Mapping[str, int]
    dtypes: Mapping[str, str]
    _read: dict[Expr, frozenset[str]] = field(default_factory=dict, repr=False, compare=False)

    def positions(self, axes: frozenset[str]) -> float:
        """Number of positions of a value with these axes."""
        return float(math.prod(self.extents.get(a, 1) for a in axes))

    def itemsize(self, tensor: str) -> int:
        """Bytes of an element of a tensor."""
        return BYTES[self.dtypes.get(tensor, "f32")]

    @property
    def registers_each(self) -> int:
        """Registers of 32 bits that a value takes: where a tensor is of float64, values are computed in it."""
        return 2 if "f64" in self.dtypes.values() else 1

    def is_narrow(self, expr: Expr) -> bool:
        """Whether every tensor of reals that an expression reads has elements of one byte."""
        return {BYTES[dtype] for dtype in self._reals(expr)} == {1}

    def is_half(self, expr: Expr) -> bool:
        """Whether every tensor of reals that an expression reads is of half precision or less; integers in indices
        and masks do not count."""
        reals = self._reals(expr)
        return bool(reals) and reals <= set(HALF)

    def is_half_product(self, node: Expr, found: Contraction) -> bool:
        """Whether the operands of a matrix product are multiplied in half precision: of half precision are all tensors that
        it reads, or each operand whose elements are those of a tensor or 0; one that is computed is rounded to that."""
        if self.is_half(node):
            return True
        sides = found.left.read, found.right.read
        read = {self.dtypes.get(load.tensor, "f32") for load in sides if load is not None}
        return len(read) == 1 and read <= set(HALF)

    def _reals(self, expr: Expr) -> frozenset[str]:
        """The dtypes of the reals that an expression reads."""
        if expr not in self._read:
            found = {self.dtypes.get(node.tensor, "f32") for node in walk(expr) if isinstance(node, Load)}
            self._read[expr] = frozenset(found - {"bool", *INTEGERS})
        return self._read[expr]
