"""Whether an output may lie in the memory of a tensor that the program reads.

    kernel k:  y[i, j] = before[i, j] + s

writes each position once, and nothing else reads `before`: what it holds at a position is read by the store that replaces it.
"""

from __future__ import annotations

from eqfuse.loops.nodes import Nest, Store
from eqfuse.loops.walk import expressions, statements
from eqfuse.terms.nodes import Axis, Load, walk


def may_replace(nest: Nest, output: str, tensor: str) -> bool:
    """Whether one store writes an output, at the positions of axes, and that alone reads a tensor, at the position that it writes."""
    every = [stmt for kernel in nest.kernels for stmt in statements(kernel.body)]
    stores = [stmt for stmt in every if isinstance(stmt, Store) and stmt.tensor == output]
    if len(stores) != 1 or not all(isinstance(part, Axis) for part in stores[0].index):
        return False
    reads = [
        (expr, node)
        for kernel in nest.kernels
        for expr in expressions(kernel.body)
        for node in walk(expr)
        if isinstance(node, Load) and node.tensor == tensor
    ]
    return reads == [(stores[0].expr, Load(tensor, stores[0].index))]
