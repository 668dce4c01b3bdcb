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
        Rewrite("mask-factor", "where(q, a, 0) * b", "where(q, a * b, 0)", (), "0 b = 0"),
        Rewrite("mask-terms", "where(q, a + b, 0)", "where(q, a, 0) + where(q, b, 0)", (), "0 + 0 = 0"),
        Rewrite("mask-negated", "where(q, -a, 0)", "-where(q, a, 0)", (), "-0 = 0"),
        Rewrite(
            "mask-sum",
            "where(q, sum[D](f), 0)",
            "sum[D](where(q, f, 0))",
            ("fixed(q, D)",),
            "a sum of 0 is 0",
        ),
        Rewrite(
            "commute-masks", "where(p, where(q, a, 0), 0)", "where(q, where(p, a, 0), 0)", (), "both hold"
        ),
        Rewrite("mask-twice", "where(q, where(q, a, 0), 0)", "where(q, a, 0)", (), "once is enough"),
        Rewrite("mask-both", "where(q, a, 0)", "where(r, where(s, a, 0), 0)", ("both(q, r, s)",), "r and s"),
        Rewrite(
            "mask-either",
            "where(q, a, 0)",
            "where(r, a, 0) + where(s, a, 0)",
            ("either(q, r, s)",),
            "r or s, never both",
        ),
        Rewrite(
            "select-position",
            "sum[D](where(q, f, 0))",
            "where(r, g, 0)",
            ("selects(q, f, r, g, D)",),
            "a sum of which one term is not 0",
        ),
        Rewrite(
            "select-own-position",
            "sum[D](where(q, f, 0))",
            "g",
            ("selects_one(q, f, g, D)",),
            "a sum of which one term is not 0, the one at the position of an axis of the same extent",
        ),
        Rewrite(
            "sum-positions", "sum[D](e)", "f", ("totals(e, f, D)",), "a sum over positions in closed form"
        ),
        Rewrite(
            "rename-axis",
            "fold[R, D](e)",
            "f",
            ("renamed(fold[R, D](e), f)",),
            "any name will do for a bound axis",
        ),
        Rewrite("sum-fixed", "sum[D](c)", "c * n", ("fixed(c, D)", "count(n, D)"), "a sum of one value"),
    ),
)
