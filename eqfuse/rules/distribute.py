"""Sums of several terms inside a product, taken apart where a program does not fuse otherwise.

`spread(e, f, g, X)` says e = f + g, where the terms read reductions over axis X: in `(a / sum a - b / sum b) * v` no
factor can leave the sum over X, but one can leave the sum of each term. What is x less a value that does not vary stays
whole, since moments recentre it.
"""

from __future__ import annotations

from eqfuse.rules.rule import Infer, Rewrite, RuleSet
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Call, Const, Expr, Reduce, free_axes, walk

_SPREAD = ("spread(a, f, g, X)",)

DISTRIBUTE = RuleSet(
    "distribute",
    (
        Infer(
            "spread-add",
            "spread(a + b, a, b, X)",
            ("want(a + b, X)", "cascaded(a + b, X)", "varies(a, X)", "varies(b, X)"),
            "two terms",
        ),
        Infer(
            "spread-fixed-right",
            "spread(a + b, a, b, X)",
            ("want(a + b, X)", "cascaded(a, X)", "varies(a, X)", "fixed(b, X)"),
            "two terms",
        ),
        Infer(
            "spread-fixed-left",
            "spread(b + a, b, a, X)",
            ("want(b + a, X)", "cascaded(a, X)", "varies(a, X)", "fixed(b, X)"),
            "two terms",
        ),
        Infer(
            "spread-choice",
            'spread(where(p, a, b), where(p, a, 0), where(apply1("not", p), b, 0), X)',
            ("want(where(p, a, b), X)", "cascaded(where(p, a, b), X)", "a != 0", "b != 0"),
            "a where p, and b where not p",
        ),
        Infer("spread-mul-left", "spread(a * b, f * b, g * b, X)", _SPREAD, "(f + g) b = f b + g b"),
        Infer("spread-mul-right", "spread(b * a, b * f, b * g, X)", _SPREAD, "b (f + g) = b f + b g"),
        Infer("spread-neg", "spread(-a, -f, -g, X)", _SPREAD, "-(f + g) = -f - g"),
        Infer(
            "spread-where",
            "spread(where(p, a, 0), where(p, f, 0), where(p, g, 0), X)",
            _SPREAD,
            "under a mask to 0",
        ),
        Infer(
            "spread-cast",
            "spread(cast(T, a), cast(T, f), cast(T, g), X)",
            _SPREAD,
            "a cast rounds the values that are there",
        ),
        Rewrite("neg-out-left", "(-a) * b", "-(a * b)", (), "(-a) b = -(a b)"),
        Rewrite("neg-out-right", "b * (-a)", "-(b * a)", (), "b (-a) = -(b a)"),
        Rewrite("neg-out-sum", "sum[D](-a)", "-sum[D](a)", (), "sum of -a = -sum of a"),
        Rewrite(
            "distribute",
            "sum[D](e)",
            "sum[D](f) + sum[D](g)",
            ("spread(e, f, g, D)",),
            "sum of f + g = sum of f + sum of g",
        ),
    ),
)
"""What is tried where no other rule helps: it makes several sums of one, and NaN of an infinity that two terms share."""


def is_spread(reduce: Reduce) -> bool:
    """Whether the body of a sum has terms that vary and read reductions over its axis, so that rules take it apart."""
    return reduce.op == "sum" and _is_spread(reduce.body, reduce.axis)


def _is_spread(expr: Expr, axis: str) -> bool:
    match expr:
        case Call("add" | "sub", (a, b)) if _is_cascaded(expr, axis):
            varying = [part for part in (a, b) if axis in free_axes(part)]
            return len(varying) == 2 or any(_is_cascaded(part, axis) for part in varying)
        case Call("where", (_, a, b)) if b is not Const(0) and _is_cascaded(expr, axis):
            return True
        case Call("mul", (a, b)):
            return _is_spread(a, axis) or _is_spread(b, axis)
        case Call("div", (a, _)) | Call("neg", (a,)) | Call("where", (_, a, Const(0))):
            return _is_spread(a, axis)
        case Call(fn, (a,)) if fn in CASTS:
            return _is_spread(a, axis)
        case _:
            return False


def _is_cascaded(expr: Expr, axis: str) -> bool:
    return any(isinstance(node, Reduce) and node.axis == axis for node in walk(expr))
