"""Ways to write a value that no program is fused by: what only shows that two programs are equal."""

from __future__ import annotations

from eqfuse.rules.rule import Rewrite, RuleSet

MEET = RuleSet(
    "meet",
    (
        Rewrite("cancel-terms", "a - a", "0", (), "a - a = 0"),
        Rewrite("commute-maximum", "maximum(a, b)", "maximum(b, a)", (), "max(a, b) = max(b, a)"),
        Rewrite("commute-minimum", "minimum(a, b)", "minimum(b, a)", (), "min(a, b) = min(b, a)"),
        Rewrite(
            "regroup-maximum",
            "maximum(maximum(a, b), c)",
            "maximum(a, maximum(b, c))",
            (),
            "max(max(a, b), c) = max(a, max(b, c))",
        ),
        Rewrite(
            "regroup-minimum",
            "minimum(minimum(a, b), c)",
            "minimum(a, minimum(b, c))",
            (),
            "min(min(a, b), c) = min(a, min(b, c))",
        ),
        Rewrite("least-maximum", "maximum(a, -inf)", "a", (), "max(a, -inf) = a"),
        Rewrite("greatest-minimum", "minimum(a, inf)", "a", (), "min(a, inf) = a"),
        Rewrite("abs-maximum", "abs(a)", "maximum(a, -a)", (), "|a| = max(a, -a)"),
        Rewrite(
            "join-sums", "sum[D](a) + sum[D](b)", "sum[D](a + b)", (), "a sum of each is one of all terms"
        ),
        Rewrite(
            "join-maxima", "maximum(max[D](a), max[D](b))", "max[D](maximum(a, b))", (), "the largest of all"
        ),
        Rewrite(
            "join-minima", "minimum(min[D](a), min[D](b))", "min[D](minimum(a, b))", (), "the smallest of all"
        ),
        Rewrite("choose-same", "where(p, a, a)", "a", (), "a, or a"),
        Rewrite("choose-otherwise", 'where(apply1("not", p), a, b)', "where(p, b, a)", (), "b where p"),
        *(
            Rewrite(
                f"choose-{name}",
                both.format("where(p, a, c)", "where(p, b, d)"),
                f"where(p, {both.format('a', 'b')}, {both.format('c', 'd')})",
                (),
                "each side of one choice",
            )
            for name, both in (
                ("sum", "{} + {}"),
                ("maximum", "maximum({}, {})"),
                ("minimum", "minimum({}, {})"),
            )
        ),
        Rewrite("less-greater", 'apply2("lt", a, b)', 'apply2("gt", b, a)', (), "a < b where b > a"),
        Rewrite("at-most-at-least", 'apply2("le", a, b)', 'apply2("ge", b, a)', (), "a <= b where b >= a"),
    ),
)
"""They run beside the others where values are to meet, and in no e-graph that a form is taken from."""
