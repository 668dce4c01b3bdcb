"""Algebra of numbers: unit laws, logarithms, quotients and differences of like forms."""

from __future__ import annotations

from eqfuse.rules.rule import Infer, Rewrite, RuleSet

SIMPLIFY = RuleSet(
    "simplify",
    (
        Rewrite("one-times", "1 * a", "a", (), "1 a = a", subsume=True),
        Rewrite("times-one", "a * 1", "a", (), "a 1 = a", subsume=True),
        Rewrite("zero-times", "0 * a", "0", (), "0 a = 0", subsume=True),
        Rewrite("times-zero", "a * 0", "0", (), "a 0 = 0", subsume=True),
        Rewrite("zero-plus", "0 + a", "a", (), "0 + a = a", subsume=True),
        Rewrite("plus-zero", "a + 0", "a", (), "a + 0 = a", subsume=True),
        Rewrite("neg-zero", "-(0)", "0", (), "-0 = 0", subsume=True),
        Rewrite("neg-neg", "-(-a)", "a", (), "-(-a) = a", subsume=True),
        Rewrite("exp-zero", "exp(0)", "1", (), "e^0 = 1", subsume=True),
        Rewrite("log-one", "log(1)", "0", (), "log 1 = 0", subsume=True),
        Rewrite("inv-one", "inv(1)", "1", (), "1/1 = 1", subsume=True),
        Rewrite("sq-one", "sq(1)", "1", (), "1^2 = 1", subsume=True),
        Rewrite("sqrt-one", "sqrt(1)", "1", (), "the root of 1 is 1", subsume=True),
        Rewrite("sqrt-square", "sqrt(sq(a))", "abs(a)", (), "the root of a^2 is |a|", subsume=True),
        Rewrite("abs-one", "abs(1)", "1", (), "|1| = 1", subsume=True),
        Rewrite("cancel-positive", "(a * n) * inv(n)", "a", ("positive(n)",), "a n / n = a", subsume=True),
        Rewrite(
            "divide-in-turn",
            "a * inv(n * k)",
            "(a * inv(n)) * inv(k)",
            ("positive(n)", "positive(k)"),
            "a/(n k) = (a/n)/k, so that a mean over two axes is one of means",
            subsume=True,
        ),
        Rewrite("inv-inv", "inv(inv(a))", "a", (), "1/(1/a) = a", subsume=True),
        Rewrite("abs-nonneg", "abs(a)", "a", ("nonneg(a)",), "|a| = a where a >= 0"),
        Rewrite("square", "a * a", "sq(a)", (), "a a = a^2"),
        Rewrite("cube", "a * sq(a)", "sq(a) * a", (), "a a^2 = a^2 a", subsume=True),
        Rewrite("fourth-power", "(sq(a) * a) * a", "sq(sq(a))", (), "a^3 a = (a^2)^2", subsume=True),
        Rewrite("exp-cancel-right", "exp(a) * exp(-a)", "1", (), "e^a e^-a = 1", subsume=True),
        Rewrite("exp-cancel-left", "exp(-a) * exp(a)", "1", (), "e^-a e^a = 1", subsume=True),
        Rewrite("ratio-same", "ratio(a, a)", "1", (), "a/a = 1", subsume=True),
        Rewrite("delta-same", "delta(a, a)", "0", (), "a - a = 0", subsume=True),
    ),
)
"""Unit laws. They retire the longer form, and run before anything that would expand it."""


LOGARITHMS = RuleSet(
    "logarithms",
    (
        Rewrite("log-exp", "log(exp(a))", "a", (), "log e^a = a", subsume=True),
        Rewrite("exp-log", "exp(log(a))", "a", (), "e^(log a) = a", subsume=True),
        Rewrite("exp-neg-log", "exp(-log(a))", "inv(a)", (), "e^(-log a) = 1/a", subsume=True),
        Rewrite(
            "log-product",
            "log(a * b)",
            "log(a) + log(b)",
            ("nonneg(a)", "nonneg(b)"),
            "log(a b) = log a + log b",
        ),
        Rewrite("log-inverse", "log(inv(a))", "-log(a)", ("nonneg(a)",), "log(1/a) = -log a"),
    ),
)


EXPAND = RuleSet(
    "expand",
    (
        Rewrite("ratio-exp", "ratio(exp(a), exp(b))", "exp(delta(a, b))", (), "e^a / e^b = e^(a-b)"),
        Rewrite("ratio-inv", "ratio(inv(a), inv(b))", "ratio(b, a)", (), "(1/a) / (1/b) = b/a"),
        Rewrite("ratio-mul", "ratio(a * c, b * d)", "ratio(a, b) * ratio(c, d)", (), "(a c)/(b d) = a/b c/d"),
        Rewrite("ratio-sq", "ratio(sq(a), sq(b))", "sq(ratio(a, b))", (), "a^2 / b^2 = (a/b)^2"),
        Rewrite(
            "ratio-sqrt", "ratio(sqrt(a), sqrt(b))", "sqrt(ratio(a, b))", (), "root a / root b = root(a/b)"
        ),
        Rewrite("ratio-abs", "ratio(abs(a), abs(b))", "abs(ratio(a, b))", (), "|a| / |b| = |a/b|"),
        Rewrite("delta-neg", "delta(-a, -b)", "delta(b, a)", (), "-a - -b = b - a"),
        Rewrite("delta-more", "delta(a + b, a)", "b", (), "(a+b) - a = b", subsume=True),
        Rewrite("delta-less", "delta(a, a + b)", "-b", (), "a - (a+b) = -b", subsume=True),
        Rewrite(
            "delta-add",
            "delta(a + c, b + d)",
            "delta(a, b) + delta(c, d)",
            (),
            "(a+c) - (b+d) = (a-b) + (c-d)",
        ),
        Infer("step-neg", "step(n, m)", ("step(s, r)", "n == -s", "m == -r"), "what it is subtracted as"),
        *(
            Rewrite(
                f"delta-step-{side}",
                f"delta({sum}, r)",
                "delta(s, r) + delta(b, 0)",
                ("step(s, r)",),
                "(s+b) - r = (s-r) + b: what a state moves by is exact where it moves little",
                subsume=True,
            )
            for side, sum in (("left", "s + b"), ("right", "b + s"))
        ),
        Rewrite("delta-scale-left", "delta(k * a, k * b)", "k * delta(a, b)", (), "k a - k b = k (a-b)"),
        Rewrite("delta-scale-right", "delta(a * k, b * k)", "delta(a, b) * k", (), "a k - b k = (a-b) k"),
        Rewrite("delta-log", "delta(log(a), log(b))", "log(ratio(a, b))", (), "log a - log b = log(a/b)"),
    ),
)
"""Quotients and differences of like forms, so that e^(a-b) comes out and never e^a e^-b."""
