"""Every way to write a body as a part fixed along an axis and a part that varies.

Notation of the rules: `factors(e, c, m, X)` says e = c * m with c fixed along axis X, `addends(e, c, m, X)` that
e = c + m with c fixed along X.
"""

from __future__ import annotations

from eqfuse.rules.constructors import CONSTRUCTORS
from eqfuse.rules.rule import Infer, Rule, RuleSet

_TAKEN_APART = tuple(row for row in CONSTRUCTORS if row.separates or row.title in ("add", "mul", "where"))


def _separation() -> tuple[Rule, ...]:
    rules: list[Rule] = [Infer("want-body", "want(e, D)", ("r == fold[R, D](e)",), "the body of a reduction")]
    rules += [
        Infer(
            f"want-{row.title}-{part}",
            f"want({part}, X)",
            (f"e == {row.pattern}", "want(e, X)"),
            "part of a body",
        )
        for row in _TAKEN_APART
        for part in row.numbers
    ]
    split = ("factors(a, c, m, X)",)
    rules += [
        Infer("factors-fixed", "factors(e, e, 1, X)", ("want(e, X)", "fixed(e, X)"), "e = e * 1"),
        Infer("factors-trivial", "factors(e, 1, e, X)", ("want(e, X)", "varies(e, X)"), "e = 1 * e"),
        Infer(
            "factors-mul",
            "factors(a * b, c * d, m * n, X)",
            ("factors(a, c, m, X)", "factors(b, d, n, X)"),
            "(c m)(d n) = (c d)(m n)",
        ),
        Infer("factors-inv", "factors(inv(a), inv(c), inv(m), X)", split, "1/(c m) = 1/c 1/m"),
        Infer("factors-neg", "factors(-a, c, -m, X)", split, "-(c m) = c (-m)"),
        Infer("factors-abs", "factors(abs(a), abs(c), abs(m), X)", split, "|c m| = |c| |m|"),
        Infer("factors-sq", "factors(sq(a), sq(c), sq(m), X)", split, "(c m)^2 = c^2 m^2"),
        Infer(
            "factors-sqrt",
            "factors(sqrt(a), sqrt(c), sqrt(m), X)",
            (*split, "nonneg(c)"),
            "root(c m) = root c root m, c >= 0",
        ),
        Infer(
            "factors-cast",
            "factors(cast(T, a), c, cast(T, m), X)",
            (*split, "varies(m, X)"),
            "a cast rounds the value that is there",
        ),
        Infer(
            "factors-exp", "factors(exp(a), exp(c), exp(m), X)", ("addends(a, c, m, X)",), "e^(c+m) = e^c e^m"
        ),
        Infer("addends-fixed", "addends(e, e, 0, X)", ("want(e, X)", "fixed(e, X)"), "e = e + 0"),
        Infer("addends-trivial", "addends(e, 0, e, X)", ("want(e, X)", "varies(e, X)"), "e = 0 + e"),
        Infer(
            "addends-add",
            "addends(a + b, c + d, m + n, X)",
            ("addends(a, c, m, X)", "addends(b, d, n, X)"),
            "(c + m) + (d + n) = (c + d) + (m + n)",
        ),
        Infer("addends-neg", "addends(-a, -c, -m, X)", ("addends(a, c, m, X)",), "-(c + m) = -c + -m"),
        Infer(
            "addends-scale-left",
            "addends(k * a, k * c, k * m, X)",
            ("fixed(k, X)", "addends(a, c, m, X)"),
            "k (c + m) = k c + k m",
        ),
        Infer(
            "addends-scale-right",
            "addends(a * k, c * k, m * k, X)",
            ("fixed(k, X)", "addends(a, c, m, X)"),
            "(c + m) k = c k + m k",
        ),
        Infer(
            "addends-log",
            "addends(log(a), log(c), log(m), X)",
            ("factors(a, c, m, X)", "nonneg(c)"),
            "log(c m) = log c + log m, c > 0",
        ),
        Infer(
            "addends-cast",
            "addends(cast(T, a), c, cast(T, m), X)",
            ("addends(a, c, m, X)", "varies(m, X)"),
            "a cast rounds what is there",
        ),
    ]
    return tuple(rules)


SEPARATION = RuleSet("separation", _separation())
"""RedFuser's G (x) H decomposition (its section 4.2), found by rewriting: every way to write a body as
a part fixed along the axis and a part that varies."""


def _through_masks(*kinds: str) -> tuple[Rule, ...]:
    """Separation of what a mask keeps, where the fixed part is of one of these kinds (of any, without)."""
    rules: list[Rule] = []
    for kind in kinds or ("",):
        condition, suffix = ((f"{kind}(c)",), f"-{kind}") if kind else ((), "")
        rules += [
            Infer(
                f"factors-where{suffix}",
                "factors(where(p, a, 0), c, where(p, m, 0), X)",
                ("factors(a, c, m, X)", *condition),
                "c distributes over a mask to 0",
            ),
            Infer(
                f"addends-where{suffix}",
                "addends(where(p, a, -inf), c, where(p, m, -inf), X)",
                ("addends(a, c, m, X)", *condition),
                "c distributes over a mask to -inf",
            ),
        ]
    return tuple(rules)


MASKED = RuleSet("whole_masks", _through_masks("constant", "scalar"))
"""Over whole axes nothing infinite may leave a mask: 0 times infinity is NaN where all is masked."""

MASKED_PARTS = RuleSet("part_masks", _through_masks())
"""Of parts anything may: what a merge hoists is finite there, and put back at the end where the mask kept something."""
