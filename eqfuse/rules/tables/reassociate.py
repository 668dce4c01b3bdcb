"""Orders of sums and products, all equal: what `rules/reassociate.py` chooses from by cost.

These rules are in no set that is saturated, where they would have exponentially many terms: an order is found by dynamic
programming, and proved by these, one by one.
"""

from __future__ import annotations

from eqfuse.rules.rule import Rewrite, RuleSet

REASSOCIATE = RuleSet(
    "reassociate",
    (
        Rewrite("commute-factors", "a * b", "b * a", (), "a b = b a"),
        Rewrite("regroup-factors", "(a * b) * c", "a * (b * c)", (), "(a b) c = a (b c)"),
        Rewrite("commute-terms", "a + b", "b + a", (), "a + b = b + a"),
        Rewrite("regroup-terms", "(a + b) + c", "a + (b + c)", (), "(a + b) + c = a + (b + c)"),
        Rewrite("multiply-out", "(a + b) * c", "a * c + b * c", (), "(a + b) c = a c + b c"),
        Rewrite("negate-terms", "-(a + b)", "(-a) + (-b)", (), "-(a + b) = -a - b"),
        Rewrite("sum-terms", "sum[D](a + b)", "sum[D](a) + sum[D](b)", (), "a sum of terms is one of each"),
        Rewrite("factor-in", "c * sum[D](m)", "sum[D](c * m)", ("fixed(c, D)",), "c sum of m = sum of c m"),
        Rewrite(
            "commute-sums", "sum[D](sum[F](f))", "sum[F](sum[D](f))", ("D != F",), "sums commute (Fubini)"
        ),
        Rewrite("sum-fixed", "sum[D](c)", "c * n", ("fixed(c, D)", "count(n, D)"), "a sum of one value"),
    ),
)
