"""The scalars that an interpreter computes with: one protocol, several arithmetics.

Reals belong to the domain (float64, float32, or a finite field with a real shadow). Integers and
truth values are plain numpy arrays everywhere: positions, extents and labels are exact in every
domain. A domain's arrays have numpy's shapes and broadcast as numpy's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from eqfuse.terms.functions import COMPARISONS
from eqfuse.terms.nodes import Expr

BRANCHING = frozenset({*COMPARISONS, "maximum", "minimum", "abs", "relu", "sign"})
"""Functions that go one way or another by what their argument, or two, are to 0, or to each other."""

JOINING = frozenset({"and", "or"})
"""Functions that join conditions: both together may never hold, though each does."""

Watch = Callable[[Expr, str, Sequence[Any]], None]
"""Is told what each function of `BRANCHING` and `JOINING` is given: its node, its name, its arguments."""


class Domain(Protocol):
    """Arithmetic on arrays of reals. `Any` below stands for the domain's own array type."""

    name: str
    watch: Watch | None
    orders: bool
    """Whether comparisons tell something of values: where they do not, nor do positions that they choose."""

    def full(self, shape: tuple[int, ...], number: float) -> Any:
        """An array of one number (inf allowed)."""

    def irrational(self, name: str, shape: tuple[int, ...]) -> Any:
        """ "log2_e" or "ln_2", of a shape whose first dimension is that of trials; their product is 1, and `exp2` (a
        function for `call`, beside those of the language) of a product with the first is `exp`."""

    def lift(self, integers: np.ndarray) -> Any:
        """Exact integers or truth values (as 0 and 1) as reals."""

    def call(self, fn: str, args: Sequence[Any]) -> Any:
        """An elementwise function of `nodes.ARITY` from reals to reals, casts included."""

    def drawn(self, fn: str, integers: Sequence[np.ndarray]) -> Any:
        """A function of `functions.DRAWN`, of exact integers."""

    def rounded(self, dtype: str, value: Any) -> Any:
        """What a kernel of this dtype keeps of a value, where the program has no cast."""

    def compare(self, fn: str, left: Any, right: Any) -> np.ndarray:
        """A comparison of `nodes.COMPARISONS`: truth values."""

    def where(self, condition: np.ndarray, left: Any, right: Any) -> Any: ...

    def reduce(self, op: str, value: Any, axis: int) -> Any:
        """Fold one dimension away; the identity of `op` where it is empty."""

    def contract(self, left: Any, right: Any, axis: int) -> Any:
        """The sum of the products over one dimension, as `call` and `reduce` give it."""

    def is_finite(self, value: Any) -> bool:
        """Whether every element is a finite number that the domain knows."""

    def shape(self, value: Any) -> tuple[int, ...]: ...

    def reshape(self, value: Any, shape: tuple[int, ...]) -> Any: ...

    def transpose(self, value: Any, order: Sequence[int]) -> Any: ...

    def broadcast(self, value: Any, shape: tuple[int, ...]) -> Any: ...

    def take(self, value: Any, index: tuple[Any, ...]) -> Any:
        """numpy indexing, basic or advanced: `value[index]`."""

    def put(self, target: Any, index: tuple[Any, ...], value: Any) -> None:
        """`target[index] = value`, in place."""


def contract_masked(
    domain: Domain,
    left: Any,
    right: Any,
    left_mask: np.ndarray | None,
    right_mask: np.ndarray | None,
    axis: int,
) -> Any:
    """The sum of the products over one dimension, where a side is read as 0 where the mask of the other one is false.
    A mask has the dims of its side, or fewer."""
    nothing = domain.full((1,) * len(domain.shape(left)), 0.0)

    def without(side: Any, mask: np.ndarray | None) -> Any:
        return side if mask is None else domain.where(mask, side, domain.call("mul", [side, nothing]))

    def guarded(side: Any, mask: np.ndarray | None) -> Any:  # 0 times a number is 0: the side stays small
        return side if mask is None or domain.is_finite(side) else domain.where(mask, side, nothing)

    one, other = without(left, left_mask), without(right, right_mask)
    return domain.contract(guarded(one, right_mask), guarded(other, left_mask), axis)


def total(domain: Domain, value: Any) -> Any:
    """What a loop has added up or multiplied, as a reduction gives it: a field keeps of other sums and products which
    terms they are made of, since the exponential of a sum is a product."""
    return domain.reduce("sum", domain.reshape(value, (1, *domain.shape(value))), 0)
