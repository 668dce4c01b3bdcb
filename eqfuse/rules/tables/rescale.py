"""Repairs: a state that was computed with old values of its producers becomes the state for new ones."""

from __future__ import annotations

from eqfuse.rules.rule import Rewrite, RuleSet

RESCALE = RuleSet(
    "repair",
    (
        Rewrite(
            "rescale",
            "sum[P](e)",
            "ratio(c, k) * s",
            ("factors(e, c, m, P)", "s == sum[P](f)", "state(s)", "factors(f, k, m, P)", "e != f"),
            "sum of c m = c/k sum of k m",
        ),
        Rewrite(
            "reshift-max",
            "max[P](e)",
            "delta(c, k) + s",
            (
                "addends(e, c, m, P)",
                "reduces(c, P)",
                "s == max[P](f)",
                "state(s)",
                "addends(f, k, m, P)",
                "e != f",
            ),
            "max(c + m) = (c - k) + max(k + m)",
        ),
        Rewrite(
            "reshift-min",
            "min[P](e)",
            "delta(c, k) + s",
            (
                "addends(e, c, m, P)",
                "reduces(c, P)",
                "s == min[P](f)",
                "state(s)",
                "addends(f, k, m, P)",
                "e != f",
            ),
            "min(c + m) = (c - k) + min(k + m)",
        ),
        Rewrite(
            "rescale-max",
            "max[P](e)",
            "ratio(c, k) * s",
            (
                "factors(e, c, m, P)",
                "reduces(c, P)",
                "s == max[P](f)",
                "state(s)",
                "factors(f, k, m, P)",
                "nonneg(c)",
                "nonneg(k)",
                "e != f",
            ),
            "max(c m) = c/k max(k m) where c, k >= 0",
        ),
        Rewrite(
            "rescale-min",
            "min[P](e)",
            "ratio(c, k) * s",
            (
                "factors(e, c, m, P)",
                "reduces(c, P)",
                "s == min[P](f)",
                "state(s)",
                "factors(f, k, m, P)",
                "nonneg(c)",
                "nonneg(k)",
                "e != f",
            ),
            "min(c m) = c/k min(k m) where c, k >= 0",
        ),
    ),
)
"""Tag update (Neptune section 4.1): a state computed with old values of its producers becomes the state
computed with new ones. Of an extreme only what producers gave is taken out and put in: an infinite or zero input could
not be told from what a producer is so far."""
