"""Integers that the launcher computes: quotients of extents.

Triton specialises a kernel for those of its integer parameters that are multiples of 16, and then loads
whole vectors from what they are offsets of. A quotient that the kernel computes is never known to be one:
positions that start at a multiple of it would be loaded one element at a time. On a CPU it is computed once
for all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eqfuse.names import Names
from eqfuse.terms.extents import is_count
from eqfuse.terms.nodes import Call, Expr, Size, call, walk
from eqfuse.tile.nodes import Argument, Elementwise, Kernel, LaunchValue, Let, TileProgram
from eqfuse.tile.passes.draft import changed, in_kernels
from eqfuse.tile.passes.terms import Terms
from eqfuse.tile.walk import pruned


def computed_at_launch(program: TileProgram) -> TileProgram:
    """A parameter in the place of every quotient of extents."""
    return in_kernels(program, _kernel)


def _kernel(kernel: Kernel) -> Kernel:
    terms = Terms(kernel)
    taken = Names(op.name for op in terms.ops.values() if isinstance(op, Argument | LaunchValue))
    names: dict[Expr, str] = {}
    values: dict[str, LaunchValue] = {}
    for value, op in terms.ops.items():
        match op:
            case Elementwise("floordiv", (dividend, divisor)) if not dividend.dims and not divisor.dims:
                expr = call("floordiv", terms.term(dividend), terms.term(divisor))
                if any(_sizes(terms.term(divisor))) and _is_launched(expr, terms):
                    if expr not in names:
                        names[expr] = taken.fresh("_by_".join(dict.fromkeys(_sizes(expr))))
                    values[value] = LaunchValue(names[expr], expr)
    if not values:
        return kernel

    def replaced(let: Let) -> tuple[Let]:
        return (replace(let, op=values.get(let.value.name, let.op)),)

    return replace(kernel, body=pruned(changed(kernel.body, replaced)))


def _is_launched(expr: Expr, terms: Terms) -> bool:
    """Whether the launcher computes a term: one over sizes and integers, with divisors above 0."""
    calls = [node for node in walk(expr) if isinstance(node, Call)]
    divisors = (node.args[1] for node in calls if node.fn == "floordiv")
    return (
        is_count(expr)
        and all(node.fn != "mod" for node in calls)
        and all(terms.of(divisor).low > 0 for divisor in divisors)
    )


def _sizes(expr: Expr) -> Iterator[str]:
    """Axes whose sizes a term is made of, from left to right."""
    return (node.axis for node in walk(expr) if isinstance(node, Size))
