"""The reductions that come with the language, written as anybody would register them."""

from __future__ import annotations

from eqfuse.extend.define import SHIPPED_NAMES, Words, define, register

SHIPPED: tuple[Words, ...] = (
    Words("mean", result="sum[j](x) / N(j)", why="the sum over the number of positions"),
    Words("var", result="sum[j](sq(x - mean[j](x))) / N(j)", why="the population's; its merge is Chan's"),
    Words("std", result="root(var[j](x))", why="the root of the variance"),
    Words(
        "logsumexp",
        result="finite(max[j](x)) + log(sum[j](exp(x - finite(max[j](x)))))",
        why="shifted by a maximum that is made finite, so that a row of -inf gives -inf",
    ),
    Words("any", result="max[j](where(x, 1, 0)) > 0", why="whether some position holds"),
    Words("all", result="min[j](where(x, 1, 0)) > 0", why="whether every position holds"),
    Words(
        "argmax",
        state="v, k",
        lift="x, j",
        identity="-inf, inf",
        order="v, -k",
        result="k",
        commutative=True,
        why="the first position of the greatest; NaN counts as such",
    ),
    Words(
        "argmin",
        state="v, k",
        lift="x, j",
        identity="inf, inf",
        order="-v, -k",
        result="k",
        commutative=True,
        why="the first position of the least; NaN counts as such",
    ),
    Words(
        "topk",
        state="v, k",
        lift="x, j",
        identity="-inf, inf",
        order="v, -k",
        result="v, min(k, N(j))",
        ranks="k",
        commutative=True,
        why="the greatest, one after the other, and their positions; of equals the first",
    ),
    Words(
        "mean_var",
        state="n, m, s",
        lift="1, x, 0",
        identity="0, 0, 0",
        combine=(
            "n1 + n2, m1 + (m2 - m1) * n2 / max(n1 + n2, 1), "
            "s1 + s2 + sq(m2 - m1) * n1 * n2 / max(n1 + n2, 1)"
        ),
        result="m, s / max(n, 1)",
        commutative=True,
        why="Welford's: the mean and the squares about it, of the population",
    ),
    Words(
        "linear_recurrence",
        args="a, b",
        state="p, h",
        lift="a, b",
        identity="1, 0",
        combine="p1 * p2, h1 * p2 + h2",
        result="h",
        why="h = a h + b, from 0, in the order of the positions",
    ),
    Words(
        "linear_recurrence2",
        args="a, b, c",
        state="p, q, r, s, h, g",
        lift="a, b, 1, 0, c, 0",
        identity="1, 0, 0, 1, 0, 0",
        combine=(
            "p2 * p1 + q2 * r1, p2 * q1 + q2 * s1, r2 * p1 + s2 * r1, r2 * q1 + s2 * s1, "
            "p2 * h1 + q2 * g1 + h2, r2 * h1 + s2 * g1 + g2"
        ),
        result="h",
        why="h = a h + b g + c, where g is the h before; from 0, in the order of the positions",
    ),
    Words(
        "max_plus",
        args="a, b",
        state="p, h",
        lift="a, b",
        identity="0, -inf",
        combine="p1 + p2, max(h1 + p2, h2)",
        result="h",
        why="h = max(h + a, b), from -inf, in the order of the positions",
    ),
    Words(
        "min_plus",
        args="a, b",
        state="p, h",
        lift="a, b",
        identity="0, inf",
        combine="p1 + p2, min(h1 + p2, h2)",
        result="h",
        why="h = min(h + a, b), from inf, in the order of the positions",
    ),
    Words(
        "softmax_weighted",
        args="s, v",
        result="sum[j](exp(s - max[j](s)) * v) / sum[j](exp(s - max[j](s)))",
        why="the values v, weighted by the softmax of the scores s",
    ),
)


def register_shipped() -> None:
    """Makes them known; their laws are checked by the tests, not at every start."""
    for words in SHIPPED:
        register(define(words).reduction)
        SHIPPED_NAMES.add(words.name)
