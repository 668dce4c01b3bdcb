"""Linear combinations of integer expressions: what a comparison is solved with."""

from __future__ import annotations

from eqfuse.terms.nodes import Call, Const, Expr

NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}
"""The comparison that holds where one does not."""
MIRRORED = {"lt": "gt", "ge": "le", "le": "ge", "gt": "lt"}
"""The comparison of the same two sides, the second first."""


def difference(left: Expr, right: Expr) -> dict[Expr, int]:
    """`left - right` as terms with whole factors."""
    return linear(right, -1, linear(left, 1, {}))


def linear(expr: Expr, factor: int, terms: dict[Expr, int]) -> dict[Expr, int]:
    """Adds `factor * expr` to `terms`, a linear combination of integer expressions."""
    match expr:
        case Call("add", (left, right)):
            linear(left, factor, terms)
            linear(right, factor, terms)
        case Call("sub", (left, right)):
            linear(left, factor, terms)
            linear(right, -factor, terms)
        case Call("neg", (part,)):
            linear(part, -factor, terms)
        case Call("mul", (Const(int(number)), part)) | Call("mul", (part, Const(int(number)))):
            linear(part, factor * number, terms)
        case Const(int(number)):
            terms[Const(1)] = terms.get(Const(1), 0) + factor * number
        case _:
            terms[expr] = terms.get(expr, 0) + factor
    return terms
