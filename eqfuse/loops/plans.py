"""Every candidate for a shape, as text and as a table."""

from __future__ import annotations

import math

from eqfuse.loops.plan import Plan
from eqfuse.units import duration


class Plans(tuple[Plan, ...]):
    """Every candidate for a shape, the chosen one first; a table in a notebook."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        """A row for each plan: the terms of their predicted costs, in columns."""
        from eqfuse.html import table  # for notebooks alone

        costs = [plan.cost for plan in self if plan.cost is not None]
        names = dict.fromkeys(t.name for cost in costs for t in cost.terms if math.isfinite(t.seconds))
        heads = ("schedule", "shards", "kernels", "predicted", "measured", *names, "note")
        at = next((plan.at_sizes for plan in self if plan.sizes), "")
        return table(heads, [_cells(plan, tuple(names)) for plan in self], f"predicted{at}" if at else "")


def _cells(plan: Plan, names: tuple[str, ...]) -> list[str]:
    parts = {term.name: term.seconds for term in (plan.cost.terms if plan.cost else ())}
    total = plan.cost.seconds if plan.cost else math.inf
    return [
        plan.schedule,
        str(plan.shards),
        str(len(plan.kernels)),
        duration(total) if math.isfinite(total) else "",
        duration(plan.measured) if plan.measured is not None else "",
        *(duration(parts[name]) if name in parts else "" for name in names),
        plan.reason,
    ]
