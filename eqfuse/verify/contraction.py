"""Sums of products over one dimension as matrix products of what the two sides have apart and in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Product = Callable[[Array, Array], Array]
"""Of stacks of matrices: (batch, rows, contracted) and (batch, contracted, columns)."""


@dataclass(frozen=True)
class Contraction:
    """The sum over dimension `axis` of left * right, which broadcast against each other.

    `batch` are the other dimensions that both have, or neither; `rows` the left's own, `columns` the right's own.
    """

    axis: int
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, left: tuple[int, ...], right: tuple[int, ...], axis: int) -> Contraction | None:
        """For two shapes of one rank; None where it makes no fewer elements than the products have."""
        if len(left) != len(right) or left[axis] != right[axis]:
            return None
        others = [dim for dim in range(len(left)) if dim != axis]
        rows = tuple(dim for dim in others if right[dim] == 1 != left[dim])
        columns = tuple(dim for dim in others if left[dim] == 1 != right[dim])
        if not rows or not columns:
            return None
        batch = tuple(dim for dim in others if dim not in rows and dim not in columns)
        return cls(axis, batch, rows, columns)

    def __call__(self, left: Array, right: Array, product: Product) -> Array:
        """The sums, with the products summed as `product` does it."""
        kept = (*self.batch, *self.rows, *self.columns)
        shape = np.broadcast_shapes(left.shape, right.shape)
        lengths = [shape[dim] for dim in kept]
        batch, rows, columns = (
            prod(shape[dim] for dim in dims) for dims in (self.batch, self.rows, self.columns)
        )
        one = left.transpose(*self.batch, *self.rows, self.axis, *self.columns)
        two = right.transpose(*self.batch, *self.rows, self.axis, *self.columns)
        count = left.shape[self.axis]
        sums = product(one.reshape(batch, rows, count), two.reshape(batch, count, columns))
        return sums.reshape(lengths).transpose(np.argsort(kept))
