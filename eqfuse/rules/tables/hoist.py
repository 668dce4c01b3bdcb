"""Reductions over a whole axis: what can leave the loop."""

from __future__ import annotations

from eqfuse.rules.rule import Rewrite, RuleSet

HOIST = RuleSet(
    "hoist",
    (
        Rewrite(
            "hoist-factor",
            "sum[D](e)",
            "c * sum[D](m)",
            ("factors(e, c, m, D)", "c != 1"),
            "sum of c m = c sum of m",
        ),
        Rewrite(
            "hoist-constant-max",
            "max[D](e)",
            "c + max[D](m)",
            ("addends(e, c, m, D)", "c != 0", "constant(c)"),
            "max(c + m) = c + max m",
        ),
        Rewrite(
            "hoist-constant-min",
            "min[D](e)",
            "c + min[D](m)",
            ("addends(e, c, m, D)", "c != 0", "constant(c)"),
            "min(c + m) = c + min m",
        ),
        Rewrite(
            "hoist-addend-max",
            "max[D](e)",
            "maximum(c + max[D](m), c + min[D](m))",
            ("addends(e, c, m, D)", "reduces(c, D)"),
            "max(c + m) = c + max m; the other end tells where c is infinite and some m is -c",
        ),
        Rewrite(
            "hoist-addend-min",
            "min[D](e)",
            "minimum(c + min[D](m), c + max[D](m))",
            ("addends(e, c, m, D)", "reduces(c, D)"),
            "min(c + m) = c + min m; the other end tells where c is infinite and some m is -c",
        ),
        Rewrite(
            "hoist-addend-absmax",
            "max[D](abs(e))",
            "maximum(abs(c + max[D](m)), abs(c + min[D](m)))",
            ("addends(e, c, m, D)", "reduces(c, D)"),
            "|c + m| is largest where m is largest or smallest",
        ),
        Rewrite(
            "hoist-factor-max",
            "max[D](e)",
            "c * max[D](m)",
            ("factors(e, c, m, D)", "nonneg(c)", "nonneg(m)", "pole_safe(c, m, D)", "c != 1"),
            "max(c m) = c max m where c >= 0",
        ),
        Rewrite(
            "hoist-constant-factor-min",
            "min[D](e)",
            "c * min[D](m)",
            ("factors(e, c, m, D)", "nonneg(c)", "constant(c)", "c != 1"),
            "min(c m) = c min m where c >= 0",
        ),
        Rewrite(
            "hoist-constant-factor-max",
            "max[D](e)",
            "c * max[D](m)",
            ("factors(e, c, m, D)", "nonneg(c)", "constant(c)", "c != 1"),
            "max(c m) = c max m where c >= 0",
        ),
        Rewrite(
            "hoist-scale-max",
            "max[D](e)",
            "maximum(c * max[D](m), c * min[D](m))",
            ("factors(e, c, m, D)", "nonneg(c)", "reduces(c, D)", "pole_safe(c, m, D)"),
            "max(c m) = c max m where c >= 0; the other end tells where c is 0 and some m is infinite",
        ),
        Rewrite(
            "hoist-scale-min",
            "min[D](e)",
            "minimum(c * min[D](m), c * max[D](m))",
            ("factors(e, c, m, D)", "nonneg(c)", "reduces(c, D)", "pole_safe(c, m, D)"),
            "min(c m) = c min m where c >= 0; the other end tells where c is 0 and some m is infinite",
        ),
        Rewrite(
            "hoist-scale-absmax",
            "max[D](e)",
            "maximum(c * max[D](m), c * min[D](m))",
            ("factors(e, c, m, D)", "nonneg(c)", "nonneg(m)", "reduces(c, D)"),
            "max(c m) = c max m where c >= 0; the other end tells where c is infinite and some m is 0",
        ),
        Rewrite("max-fixed", "max[D](c)", "c", ("fixed(c, D)",), "the maximum of one value"),
        Rewrite("min-fixed", "min[D](c)", "c", ("fixed(c, D)",), "the minimum of one value"),
        Rewrite(
            "interchange",
            "sum[D](w * sum[F](f))",
            "sum[F](sum[D](w * f))",
            ("fixed(w, F)", "reduces(f, D)", "plain(f, F)"),
            "sums commute (Fubini), so that the cascade over one axis is seen",
            subsume=True,
        ),
        Rewrite(
            "interchange-plain",
            "sum[D](sum[F](f))",
            "sum[F](sum[D](f))",
            ("reduces(f, D)", "plain(f, F)"),
            "sums commute (Fubini), so that the cascade over one axis is seen",
            subsume=True,
        ),
    ),
)
"""Distributivity over the whole axis: what can leave a loop."""
