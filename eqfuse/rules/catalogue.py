"""The rule set: generic algebra of reductions, one line of mathematics each.

Nothing here knows a workload. The sets are saturated in the order that they stand in; each is a table of
`rules/tables/`.
"""

from __future__ import annotations

from eqfuse.rules.tables.algebra import EXPAND, LOGARITHMS, SIMPLIFY
from eqfuse.rules.tables.distribute import DISTRIBUTE
from eqfuse.rules.tables.facts import DEPENDENCE, SIGNS, ZEROS
from eqfuse.rules.tables.hoist import HOIST
from eqfuse.rules.tables.meet import MEET
from eqfuse.rules.tables.moments import MEANS, MOMENTS
from eqfuse.rules.tables.reassociate import REASSOCIATE
from eqfuse.rules.tables.rescale import RESCALE
from eqfuse.rules.tables.separation import MASKED, MASKED_PARTS, SEPARATION
from eqfuse.rules.tables.stabilise import STABILISE
from eqfuse.rules.tables.union import UNION

PREPARE = (SIMPLIFY, DEPENDENCE, SIGNS, LOGARITHMS, SEPARATION, MASKED, ZEROS, HOIST, STABILISE, MEANS)
"""Rule sets over whole axes: the best equal program before anything is split."""

DISTRIBUTED = (*PREPARE, DISTRIBUTE)
"""Those where that program does not fuse."""

MERGE = (SIMPLIFY, DEPENDENCE, SIGNS, LOGARITHMS, SEPARATION, MASKED_PARTS, UNION, RESCALE, MOMENTS, EXPAND)
"""Rule sets over split axes: the merge of two parts."""

MEETING = (*PREPARE, REASSOCIATE, MEET)
"""Rule sets over whole axes that show two programs to be equal."""

EVERY = tuple(dict.fromkeys((*DISTRIBUTED, *MERGE, *MEETING)))
"""All of them, in the order in which they are listed."""
