"""Which matrix products a device multiplies as matrices."""

from __future__ import annotations

from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.contraction import Contraction


@dataclass(frozen=True)
class DotRules:
    """What a device multiplies as matrices: operands that share dims, and that have none or several dims
    of their own (`batched`), and blocks of at least `smallest` positions of the contracted axis."""

    batched: bool
    smallest: int

    def allow(self, product: Contraction, depth: int | None) -> bool:
        """Whether this product of tiles is one; `depth` is the block of its axis, None where that is whole."""
        if depth is not None and depth < self.smallest:
            return False
        return self.batched or (not product.batch and len(product.rows) == len(product.columns) == 1)
