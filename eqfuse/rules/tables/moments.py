"""Moments: sums around a value that changes, by the parallel-axis theorem (Huygens-Steiner).

`parallel_axis(e, s, d, c, k, P)` says e = s + (c - k) d, with c and k fixed along P: one factor m + c of the product e is
m + k in s and left out in d. Then k is the reference that a state has, and the sum of e is that of s, and of d times c - k.

`moment(s, w, x, n, D)` says s = sum of w x over D and n = sum of w, `quotient(q, a, n)` that q = a / n, in whichever order
it is written: then s / n is a mean. `count(n, D)` says that n is the number of positions.
"""

from __future__ import annotations

from eqfuse.rules.rule import Infer, Rewrite, Rule, RuleSet


def _moments() -> tuple[Rule, ...]:
    shift = "parallel_axis({}, {}, {}, c, k, P)"
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
        "reduces(k, P)",
        "varies(m, P)",
    )
    rules += [
        Infer(
            "reference-shift",
            "reference_shift(m, k, P)",
            shift_of_state,
            "the shift that the state of this part was computed with",
        ),
        Rewrite("reference-form", "m + k", "h", (*shift_of_state, "n == m + k"), "h = m + k"),
        Infer(
            "recentre",
            shift.format("h", "m + k", "1"),
            ("reference_shift(m, k, P)", "addends(h, c, m, P)", "c != k", "c != 0"),
            "m+c = (m+k) + (c-k)",
        ),
        Infer(
            "recentre-mul-left",
            shift.format("a * b", "s * b", "d * b"),
            given,
            "one factor of a product",
        ),
        Infer(
            "recentre-mul-right",
            shift.format("b * a", "b * s", "b * d"),
            given,
            "one factor of a product",
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
    rules.append(
        Rewrite(
            "move-over-scale",
            "delta(c, k) * (ratio(inv(a), 1) * s)",
            "(delta(c, k) * inv(a)) * s",
            (),
            "(c-k) ((1/a) s) = ((c-k)/a) s, as 1/a and s/a may be out of range where (c-k)/a is not",
        )
    )
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


MOMENTS = RuleSet("recentre", _moments())
"""Moments: a shift inside a product becomes the shift that the state has, plus a difference that leaves."""


def _about_means() -> tuple[Rule, ...]:
    squares = ("moment(p, w, s, n, D)", "s == sq(x)")
    products = ("moment(p, w, s, n, D)", "s == x * y")
    sum_x, sum_y = ("moment(r, w, x, g, D)",), ("moment(t, w, y, h, D)",)
    mean_x, mean_y = (*sum_x, "quotient(m, r, g)"), (*sum_y, "quotient(k, t, h)")
    average = ("quotient(a, p, n)",)
    variance, covariance = "sum[D](w * sq(x - m))", "sum[D](w * ((x - m) * (y - k)))"
    of_sums = {"m": "r * inv(g)", "k": "t * inv(h)"}

    def with_sums(text: str) -> str:
        for name, value in of_sums.items():
            text = text.replace(f"- {name})", f"- {value})")
        return text

    rules: list[Rule] = [
        Infer("quotient-right", "quotient(a * inv(n), a, n)", (), "a (1/n) = a/n"),
        Infer("quotient-left", "quotient(inv(n) * a, a, n)", (), "(1/n) a = a/n"),
        Infer("count-positions", "count(sum[D](1), D)", (), "one for each position"),
        Infer("moment-plain", "moment(sum[D](x), 1, x, n, D)", ("count(n, D)",), "all weights are 1"),
        Infer("moment-left", "moment(sum[D](w * x), w, x, n, D)", ("n == sum[D](w)",), "a weighted sum"),
        Infer("moment-right", "moment(sum[D](x * w), w, x, n, D)", ("n == sum[D](w)",), "a weighted sum"),
    ]
    why = "E[x^2] - E[x]^2 = E[(x - E[x])^2]"
    rules.append(Rewrite("variance", "a - sq(m)", f"{variance} * inv(n)", (*average, *squares, *mean_x), why))
    why = "sum of x^2 - (sum of x)^2 / n = sum of (x - E[x])^2"
    rules += [
        Rewrite(f"squares-less-{name}", f"p - {less}", variance, (*squares, *mean_x), why)
        for name, less in (
            ("count-mean-squared", "n * sq(m)"),
            ("mean-squared-count", "sq(m) * n"),
            ("sum-mean", "r * m"),
            ("mean-sum", "m * r"),
        )
    ]
    rules.append(
        Rewrite(
            "squares-less-squared-sum",
            "p - b",
            with_sums(variance),
            (*squares, *sum_x, "quotient(b, q, n)", "q == sq(r)"),
            why,
        )
    )
    why = "E[x y] - E[x] E[y] = E[(x - E[x]) (y - E[y])]"
    rules += [
        Rewrite(
            f"covariance-{name}",
            f"a - {less}",
            f"{covariance} * inv(n)",
            (*average, *products, *mean_x, *mean_y),
            why,
        )
        for name, less in (("in-order", "m * k"), ("reversed", "k * m"))
    ]
    why = "sum of x y - (sum of x)(sum of y) / n = sum of (x - E[x]) (y - E[y])"
    rules += [
        Rewrite(
            f"products-less-{name}",
            "p - b",
            with_sums(covariance),
            (*products, *sum_x, *sum_y, "quotient(b, q, n)", f"q == {less}"),
            why,
        )
        for name, less in (("sums-in-order", "r * t"), ("sums-reversed", "t * r"))
    ]
    return tuple(rules)


MEANS = RuleSet("means", _about_means())
"""Differences of moments, which cancel, as the moments of differences from a mean."""
