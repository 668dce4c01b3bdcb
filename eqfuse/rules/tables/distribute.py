"""Sums of several terms inside a product, taken apart where a program does not fuse otherwise.

`spread(e, f, g, X)` says e = f + g, where the terms read reductions over axis X: in `(a / sum a - b / sum b) * v` no
factor can leave the sum over X, but one can leave the sum of each term. What is x less a value that does not vary stays
whole inside of a product, since it is a moment; alone it is taken apart where nothing cancels.
"""

from __future__ import annotations

from eqfuse.rules.rule import Infer, Rewrite, RuleSet

_SPREAD = ("spread(a, f, g, X)",)

DISTRIBUTE = RuleSet(
    "distribute",
    (
        Infer(
            "spread-add",
            "spread(a + b, a, b, X)",
            ("want(a + b, X)", "reduces(a + b, X)", "varies(a, X)", "varies(b, X)"),
            "two terms",
        ),
        Infer(
            "spread-fixed-right",
            "spread(a + b, a, b, X)",
            ("want(a + b, X)", "reduces(a, X)", "varies(a, X)", "fixed(b, X)"),
            "two terms",
        ),
        Infer(
            "spread-fixed-left",
            "spread(b + a, b, a, X)",
            ("want(b + a, X)", "reduces(a, X)", "varies(a, X)", "fixed(b, X)"),
            "two terms",
        ),
        Infer(
            "spread-choice",
            'spread(where(p, a, b), where(p, a, 0), where(apply1("not", p), b, 0), X)',
            ("want(where(p, a, b), X)", "reduces(where(p, a, b), X)", "a != 0", "b != 0"),
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
        Rewrite(
            "distribute-shift",
            "sum[D](e)",
            "sum[D](m) + c * sum[D](1)",
            ("addends(e, c, m, D)", "reduces(c, D)"),
            "sum of m + c = sum of m + n c",
        ),
    ),
)
"""What is tried where no other rule helps: it makes several sums of one, and NaN of an infinity that two terms share."""
