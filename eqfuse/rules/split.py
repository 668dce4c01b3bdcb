"""Reductions over a split axis: the union of two parts, and the repairs of what each computed.

Notation of the rules: `factors(e, c, m, X)` says e = c * m with c fixed along axis X, `addends(e, c, m, X)` that
e = c + m with c fixed along X.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eqfuse.rules.rule import Infer, Rewrite, Rule, RuleSet
from eqfuse.terms.folds import PAIR, fold_of
from eqfuse.terms.nodes import Reduce

SPLIT = RuleSet(
    "split",
    (
        Rewrite("split-sum", "sum[AB](e)", "sum[A](e) + sum[B](e)", (), "a sum over a disjoint union"),
        Rewrite(
            "split-max", "max[AB](e)", "maximum(max[A](e), max[B](e))", (), "a maximum over a disjoint union"
        ),
        Rewrite(
            "split-min", "min[AB](e)", "minimum(min[A](e), min[B](e))", (), "a minimum over a disjoint union"
        ),
        Rewrite(
            "split-prod", "prod[AB](e)", "prod[A](e) * prod[B](e)", (), "a product over a disjoint union"
        ),
    ),
)


def split_rules(reduces: Iterable[Reduce]) -> tuple[RuleSet, ...]:
    """The same for the state variables of registered folds: each of the union is a combination of all of both parts.

    The combination stays one function of its author's, so that no rule rearranges its arithmetic.
    """
    folds = dict.fromkeys(found[0] for reduce in reduces if (found := fold_of(reduce.op)) is not None)
    rules: list[Rule] = []
    for fold in folds:
        first = ", ".join(f"{'' if greatest else '-'}{name}" for name, greatest in fold.order)
        which = f": the state that comes first, by {first}" if fold.order else ""
        # of a list, what is packed first is the axis of its ranks
        body = f'apply2("{PAIR}", k, e)' if fold.ranks else "e"
        parts = [_packed_text([f"{op}[{part}]({body})" for op in fold.ops]) for part in ("A", "B")]
        if fold.ranks:
            parts[0] = _packed_text(["k", parts[0]])
            which = f": of both lists what comes first, by {first}"
        rules += [
            Rewrite(
                f"split-{op}",
                f"{op}[AB]({body})",
                f'apply2("{op}", {", ".join(parts)})',
                (),
                f"{fold.name} of a disjoint union{which}",
            )
            for op in fold.ops
        ]
    return (RuleSet("folds", tuple(rules)),) if rules else ()


def _packed_text(parts: Sequence[str]) -> str:
    *first, text = parts
    for part in reversed(first):
        text = f'apply2("{PAIR}", {part}, {text})'
    return text


REPAIR = RuleSet(
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
            ("addends(e, c, m, P)", "s == max[P](f)", "state(s)", "addends(f, k, m, P)", "e != f"),
            "max(c + m) = (c - k) + max(k + m)",
        ),
        Rewrite(
            "reshift-min",
            "min[P](e)",
            "delta(c, k) + s",
            ("addends(e, c, m, P)", "s == min[P](f)", "state(s)", "addends(f, k, m, P)", "e != f"),
            "min(c + m) = (c - k) + min(k + m)",
        ),
        Rewrite(
            "rescale-max",
            "max[P](e)",
            "ratio(c, k) * s",
            (
                "factors(e, c, m, P)",
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
computed with new ones."""


def _recentring() -> tuple[Rule, ...]:
    shift = "recentred({}, {}, {}, c, k, P)"
    given = (shift.format("a", "s", "d"), "c != k")
    rules: list[Rule] = [
        Infer("factor-body", "factor(f, f, P)", ("state(r)", "r == sum[P](f)"), "f divides f"),
        Infer("factor-left", "factor(f, a, X)", ("factor(f, g, X)", "g == a * b"), "a divides a b"),
        Infer("factor-right", "factor(f, b, X)", ("factor(f, g, X)", "g == a * b"), "b divides a b"),
        Infer("factor-sq", "factor(f, a, X)", ("factor(f, g, X)", "g == sq(a)"), "a divides a^2"),
        Infer(
            "factor-where", "factor(f, a, X)", ("factor(f, g, X)", "g == where(p, a, 0)"), "under a mask to 0"
        ),
        Infer(
            "factor-cast",
            "factor(f, a, X)",
            ("factor(f, g, X)", "g == cast(T, a)"),
            "a cast rounds what is there",
        ),
    ]
    shift_of_state = (
        "state(r)",
        "r == sum[P](f)",
        "factor(f, h, P)",
        "addends(h, k, m, P)",
        "cascaded(k, P)",
        "varies(m, P)",
    )
    rules += [
        Infer(
            "partner",
            "partner(m, k, P)",
            shift_of_state,
            "the shift that the state of this part was computed with",
        ),
        Rewrite("partner-form", "m + k", "h", (*shift_of_state, "n == m + k"), "h = m + k"),
        Infer(
            "recentre",
            shift.format("h", "m + k", "1"),
            ("partner(m, k, P)", "addends(h, c, m, P)", "c != k", "c != 0"),
            "m+c = (m+k) + (c-k)",
        ),
        Infer("recentre-mul-left", shift.format("a * b", "s * b", "d * b"), given, "one factor of a product"),
        Infer(
            "recentre-mul-right", shift.format("b * a", "b * s", "b * d"), given, "one factor of a product"
        ),
        Infer("recentre-sq", shift.format("sq(a)", "s * a", "d * a"), given, "one factor of a square"),
        Infer(
            "recentre-where",
            shift.format("where(p, a, 0)", "where(p, s, 0)", "where(p, d, 0)"),
            (*given, "masked(c, p)"),
            "under a mask to 0",
        ),
        Infer(
            "recentre-cast",
            shift.format("cast(T, a)", "cast(T, s)", "cast(T, d)"),
            given,
            "a cast rounds what is there",
        ),
        Rewrite(
            "recentre-sum",
            "sum[P](e)",
            "sum[P](s) + delta(c, k) * sum[P](d)",
            (shift.format("e", "s", "d"), "c != k"),
            "sum of ((x+k) + (c-k)) d = sum of (x+k) d + (c-k) sum of d (parallel axes; Huygens-Steiner)",
        ),
    ]
    rules += [
        Rewrite(
            "recentre-twice",
            "(s + delta(c, k) * a) + delta(c, k) * b",
            "s + delta(c, k) * (a + b)",
            (),
            "t a + t b = t (a + b), which has one sign: inf - inf of two products that overflow would be NaN",
        )
    ]
    rules += [
        Infer(
            f"masked-{op}",
            f"masked({op}[P](where(p, a, {out})), p)",
            (f"r == {op}[P](where(p, a, {out}))",),
            why,
        )
        for op, out, why in (
            ("sum", "0", "made of what the mask keeps alone"),
            ("max", "-inf", "made of what the mask keeps alone"),
        )
    ]
    rules += [
        Infer("masked-inv", "masked(inv(a), p)", ("masked(a, p)",), "of such values"),
        Infer("masked-neg", "masked(-a, p)", ("masked(a, p)",), "of such values"),
        Infer("masked-mul", "masked(a * b, p)", ("masked(a, p)", "masked(b, p)"), "of such values"),
    ]
    rules += [
        Rewrite(
            f"reweigh-{side}",
            f"sum[P]({product.format(a='v')})",
            f"ratio(c, k) * sum[P]({product.format(a='w')})",
            ("factor(f, w, P)", "factors(w, k, m, P)", "varies(m, P)", "factors(v, c, m, P)", "v != w"),
            "sum of c m d = c/k sum of k m d, where k m is the weight of a state",
        )
        for side, product in (("left", "{a} * d"), ("right", "d * {a}"))
    ]
    return tuple(rules)


RECENTRE = RuleSet("recentre", _recentring())
"""Moments: a shift inside a product becomes the shift that the state has, plus a difference that leaves."""
