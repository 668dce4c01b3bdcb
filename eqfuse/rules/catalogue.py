"""The rule set: generic algebra of reductions, one line of mathematics each.

Nothing here knows a workload. The sets are saturated in the order that they stand in. `ratio(a, b)` is a/b and
`delta(a, b)` is a - b, made total where they are run (see repair.py).
"""

from __future__ import annotations

from eqfuse.rules.algebra import EXPAND, LOGARITHMS, SIMPLIFY
from eqfuse.rules.distribute import DISTRIBUTE
from eqfuse.rules.facts import DEPENDENCE, SIGNS, ZEROS
from eqfuse.rules.rule import Rewrite, RuleSet
from eqfuse.rules.separation import MASKED, MASKED_PARTS, SEPARATION
from eqfuse.rules.split import RECENTRE, REPAIR, SPLIT
from eqfuse.rules.whole import HOIST, STABILISE

SCHEDULES = RuleSet(
    "schedules",
    (
        Rewrite(
            "walk-rolling",
            "read(K)",
            "rolling(K, X)",
            ("walks(K, X)", "mergeable(K)"),
            "states seen, repaired",
        ),
        Rewrite(
            "walk-split-k", "read(K)", "split_k(K, X)", ("walks(K, X)", "mergeable(K)"), "shards, then merged"
        ),
        Rewrite("walk-resident", "read(K)", "resident(K, X)", ("walks(K, X)",), "one tile holds the axis"),
        Rewrite(
            "walk-multi-pass", "read(K)", "multi_pass(K, X)", ("walks(K, X)",), "a pass for each dependency"
        ),
    ),
)
"""Ways to walk an axis: all compute the same, so a plan is an extraction from their class."""


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
    "SCHEDULES",
    "SEPARATION",
    "SIGNS",
    "SIMPLIFY",
    "SPLIT",
    "STABILISE",
    "ZEROS",
]
