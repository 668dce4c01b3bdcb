"""Equal forms that do not overflow, in place of some that do."""

from __future__ import annotations

from eqfuse.rules.rule import Infer, Rewrite, RuleSet

STABILISE = RuleSet(
    "stabilise",
    (
        Infer(
            "shift-exp",
            "shifted(exp(a), exp(a - finite(max[ALL](a))), finite(max[ALL](a)), ALL)",
            ("unproved(a)", "want(exp(a), ALL)", "varies(a, ALL)"),
            "e^a = e^M e^(a-M) with M the maximum of a, 0 where that is infinite",
        ),
        Infer(
            "shift-masked",
            "shifted(where(p, exp(a), 0), exp(where(p, a, -inf) - finite(max[ALL](where(p, a, -inf)))),"
            " finite(max[ALL](where(p, a, -inf))), ALL)",
            ("unproved(a)", "want(where(p, exp(a), 0), ALL)", "varies(a, ALL)"),
            "as shift-exp, with M the maximum of what the mask keeps, and e^-inf = 0 elsewhere",
        ),
        Infer(
            "shift-left",
            "shifted(a * b, s * b, m, ALL)",
            ("shifted(a, s, m, ALL)",),
            "e^M is a factor of the product",
        ),
        Infer(
            "shift-right",
            "shifted(a * b, a * s, m, ALL)",
            ("shifted(b, s, m, ALL)",),
            "e^M is a factor of the product",
        ),
        Rewrite(
            "shift-sum",
            "sum[ALL](e)",
            "exp(m) * sum[ALL](s)",
            ("shifted(e, s, m, ALL)",),
            "sum of e^M s = e^M sum of s",
        ),
        Rewrite(
            "exp-over-shifted",
            "exp(a) * inv(exp(m) * s)",
            "exp(a - m) * inv(s)",
            ("unproved(a)", "shifted(e, z, m, ALL)"),
            "e^a / (e^M s) = e^(a-M) / s",
        ),
        Rewrite(
            "left-over-shifted",
            "(e * b) * inv(exp(m) * s)",
            "(z * b) * inv(s)",
            ("shifted(e, z, m, ALL)",),
            "e^M z b / (e^M s) = z b / s",
        ),
        Rewrite(
            "right-over-shifted",
            "(b * e) * inv(exp(m) * s)",
            "(b * z) * inv(s)",
            ("shifted(e, z, m, ALL)",),
            "b e^M z / (e^M s) = b z / s",
        ),
        Rewrite(
            "shifted-over-shifted",
            "(exp(m) * r) * inv(exp(m) * s)",
            "r * inv(s)",
            ("shifted(e, z, m, ALL)",),
            "e^M cancels",
        ),
        Rewrite(
            "multiple-over-shifted",
            "(f * (exp(m) * r)) * inv(exp(m) * s)",
            "(f * r) * inv(s)",
            ("shifted(e, z, m, ALL)",),
            "e^M cancels",
        ),
        Rewrite(
            "multiplied-over-shifted",
            "((exp(m) * r) * f) * inv(exp(m) * s)",
            "(r * f) * inv(s)",
            ("shifted(e, z, m, ALL)",),
            "e^M cancels",
        ),
        Rewrite(
            "inverse-times-shifted",
            "inv(exp(m) * s) * (exp(m) * r)",
            "inv(s) * r",
            ("shifted(e, z, m, ALL)",),
            "e^M cancels",
        ),
        Rewrite(
            "inverse-times-left",
            "inv(exp(m) * s) * (e * b)",
            "inv(s) * (z * b)",
            ("shifted(e, z, m, ALL)",),
            "e^M z b / (e^M s) = z b / s",
        ),
        Rewrite(
            "inverse-times-right",
            "inv(exp(m) * s) * (b * e)",
            "inv(s) * (b * z)",
            ("shifted(e, z, m, ALL)",),
            "b e^M z / (e^M s) = b z / s",
        ),
        Rewrite(
            "exp-times-shifted",
            "exp(a) * (exp(m) * s)",
            "exp(m + a) * s",
            ("shifted(e, z, m, ALL)",),
            "e^a e^M s = e^(M+a) s",
        ),
        Rewrite(
            "shifted-times-exp",
            "(exp(m) * s) * exp(a)",
            "exp(m + a) * s",
            ("shifted(e, z, m, ALL)",),
            "e^M s e^a = e^(M+a) s",
        ),
        Rewrite(
            "shifted-over-exp",
            "(exp(m) * s) * inv(exp(a))",
            "exp(m - a) * s",
            ("shifted(e, z, m, ALL)",),
            "e^M s / e^a = e^(M-a) s",
        ),
        Rewrite(
            "log-of-shifted",
            "log(exp(m) * s)",
            "m + log(s)",
            ("shifted(e, z, m, ALL)",),
            "log(e^M s) = M + log s",
        ),
        Rewrite(
            "log-of-shifted-mean",
            "log((exp(m) * s) * k)",
            "m + log(s * k)",
            ("shifted(e, z, m, ALL)",),
            "log(e^M s k) = M + log(s k)",
        ),
    ),
)
"""Equal forms that do not overflow or cancel; extraction prefers them."""
