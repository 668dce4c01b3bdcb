"""Reductions over the union of two disjoint parts of an axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eqfuse.rules.rule import Rewrite, Rule, RuleSet
from eqfuse.terms.folds import PAIR, fold_of
from eqfuse.terms.nodes import Reduce

UNION = RuleSet(
    "split",
    (
        Rewrite("split-sum", "sum[AB](e)", "sum[A](e) + sum[B](e)", (), "a sum over a disjoint union"),
        Rewrite(
            "split-max", "max[AB](e)", "maximum(max[A](e), max[B](e))", (), "a maximum over a disjoint union"
        ),
        Rewrite(
            "split-min", "min[AB](e)", "minimum(min[A](e), min[B](e))", (), "a minimum over a disjoint union"
        ),
        Rewrite(
            "split-prod", "prod[AB](e)", "prod[A](e) * prod[B](e)", (), "a product over a disjoint union"
        ),
    ),
)


def union_rules(reduces: Iterable[Reduce]) -> tuple[RuleSet, ...]:
    """The same for the state variables of registered folds: each of the union is a combination of all of both parts.

    The combination stays one function of its author's, so that no rule rearranges its arithmetic.
    """
    folds = dict.fromkeys(found[0] for reduce in reduces if (found := fold_of(reduce.op)) is not None)
    rules: list[Rule] = []
    for fold in folds:
        first = ", ".join(f"{'' if greatest else '-'}{name}" for name, greatest in fold.order)
        which = f": the state that comes first, by {first}" if fold.order else ""
        # of a list, what is packed first is the axis of its ranks
        body = f'apply2("{PAIR}", k, e)' if fold.ranks else "e"
        parts = [_packed_text([f"{op}[{part}]({body})" for op in fold.ops]) for part in ("A", "B")]
        if fold.ranks:
            parts[0] = _packed_text(["k", parts[0]])
            which = f": of both lists what comes first, by {first}"
        rules += [
            Rewrite(
                f"split-{op}",
                f"{op}[AB]({body})",
                f'apply2("{op}", {", ".join(parts)})',
                (),
                f"{fold.name} of a disjoint union{which}",
            )
            for op in fold.ops
        ]
    return (RuleSet("folds", tuple(rules)),) if rules else ()


def _packed_text(parts: Sequence[str]) -> str:
    *first, text = parts
    for part in reversed(first):
        text = f'apply2("{PAIR}", {part}, {text})'
    return text
