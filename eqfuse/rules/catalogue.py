"""The rule set: generic algebra of reductions, one line of mathematics each.

Nothing here knows a workload. The sets are saturated in the order that they stand in. `ratio(a, b)` is a/b and
`delta(a, b)` is a - b, made total where they are run (see repair.py).
"""

from __future__ import annotations

from eqfuse.rules.algebra import EXPAND, LOGARITHMS, SIMPLIFY
from eqfuse.rules.distribute import DISTRIBUTE
from eqfuse.rules.facts import DEPENDENCE, SIGNS, ZEROS
from eqfuse.rules.separation import MASKED, MASKED_PARTS, SEPARATION
from eqfuse.rules.split import RECENTRE, REPAIR, SPLIT
from eqfuse.rules.whole import HOIST, STABILISE

PREPARE = (SIMPLIFY, DEPENDENCE, SIGNS, LOGARITHMS, SEPARATION, MASKED, ZEROS, HOIST, STABILISE)
"""Rule sets over whole axes: the best equal program before anything is split."""

DISTRIBUTED = (*PREPARE, DISTRIBUTE)
"""Those where that program does not fuse."""


MERGE = (SIMPLIFY, DEPENDENCE, SIGNS, LOGARITHMS, SEPARATION, MASKED_PARTS, SPLIT, REPAIR, RECENTRE, EXPAND)
"""Rule sets over split axes: the merge of two parts."""


__all__ = [
    "DEPENDENCE",
    "DISTRIBUTE",
    "DISTRIBUTED",
    "EXPAND",
    "HOIST",
    "LOGARITHMS",
    "MASKED",
    "MASKED_PARTS",
    "MERGE",
    "PREPARE",
    "RECENTRE",
    "REPAIR",
    "SEPARATION",
    "SIGNS",
    "SIMPLIFY",
    "SPLIT",
    "STABILISE",
    "ZEROS",
]
