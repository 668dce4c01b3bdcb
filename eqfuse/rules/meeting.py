"""Which values meet in one class of an e-graph.

The values of two programs are put into one e-graph, in which the rules over whole axes run, and those that reorder sums and
products. No form is chosen: what is asked is whether two of them are in the same class in the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from eqfuse.rules.catalogue import MEETING
from eqfuse.rules.egraph.encode import Encoder, global_name
from eqfuse.rules.engine import PLAIN, Engine
from eqfuse.rules.rule import RuleSet
from eqfuse.rules.scope import RuleScope, current
from eqfuse.terms.nodes import Expr, Reduce, walk

Pair = tuple[Expr, Expr]
"""Two values that may be equal."""

BUDGETS = (125, 250, 500, 1000, 2000, 4000)
"""Matches of rules after which it is asked whether all have met, at the last of which saturation ends: orders of sums and products are
exponentially many, and a proof is the longer in the finding the more steps there are."""


def in_force() -> tuple[RuleSet, ...]:
    """The shipped rules of these sets that are in force. Those that a scope adds were tried and not proved: none is."""
    return RuleScope(without=current().without).applied(MEETING)


def name_of(place: int, side: int) -> str:
    """The egglog name of one side of a pair."""
    return global_name(f"pair{place}_side{side}")


def meet(pairs: Sequence[Pair], engine: Engine = PLAIN) -> tuple[bool, ...]:
    """Of each pair whether both values are in one class, within the budget. Casts are functions of which nothing is
    known. Raises TooManyTerms."""
    encoder = Encoder(strict_casts=True, is_deep=True)
    exprs = [expr for pair in pairs for expr in pair]
    axes = list(dict.fromkeys(node.axis for node in walk(*exprs) if isinstance(node, Reduce)))
    with engine.session(in_force()) as saturation:
        names = [
            [(name_of(place, side), encoder.encode(expr)) for side, expr in enumerate(pair)]
            for place, pair in enumerate(pairs)
        ]
        lets = [f"(let {name} {term})" for sides in names for name, term in sides]
        saturation.run(encoder.lines + encoder.facts(axes) + lets)
        for most in BUDGETS:
            saturation.report.stopped = ""
            saturation.saturate(most)
            roots = saturation.read().roots
            found = tuple(roots[one] == roots[other] for (one, _), (other, _) in names)
            if all(found) or saturation.report.saturated:
                break
    return found
