"""The rule set: generic algebra of reductions, one line of mathematics each.

Nothing here knows a workload. The sets are saturated in the order that `derive.py` states.

Notation: `factors(e, c, m, X)` says e = c * m with c fixed along axis X; `addends(e, c, m, X)` says
e = c + m with c fixed along X. `ratio(a, b)` is a/b and `delta(a, b)` is a - b, made total where they
are run (see repair.py).
"""

from __future__ import annotations

from eqfuse.rules.rule import Infer, Rewrite, Rule, RuleSet

_SEPARABLE = ("-a", "inv(a)", "exp(a)", "log(a)", "sqrt(a)", "abs(a)", "sq(a)", "cast(T, a)")
_UNARY = (*_SEPARABLE, "apply1(F, a)", "finite(a)")
_BINARY = (
    "a + b",
    "a * b",
    "maximum(a, b)",
    "minimum(a, b)",
    "ratio(a, b)",
    "delta(a, b)",
    "apply2(F, a, b)",
)
_OF_FIXED = ("finite(a)", "ratio(a, b)", "delta(a, b)")
"""What rules make of fixed values only, so that it never varies and never is the body of a reduction."""


def _title(pattern: str) -> str:
    names = {"-a": "neg", "a + b": "add", "a * b": "mul"}
    return names.get(pattern, pattern.split("(")[0])


def _dependence() -> tuple[Rule, ...]:
    """`fixed`, `varies`, `plain` (no reduction over the axis inside) and `cascaded` (one inside) follow the structure of terms."""
    rules: list[Rule] = []
    for p in _UNARY:
        t = _title(p)
        rules.append(
            Infer(f"fixed-{t}", f"fixed({p}, X)", ("fixed(a, X)",), "a function of a fixed value is fixed")
        )
        rules.append(
            Infer(f"cascaded-{t}", f"cascaded({p}, X)", ("cascaded(a, X)",), "contains such a reduction")
        )
        if p not in _OF_FIXED:
            rules.append(Infer(f"varies-{t}", f"varies({p}, X)", ("varies(a, X)",), "its argument may vary"))
            rules.append(Infer(f"plain-{t}", f"plain({p}, X)", ("plain(a, X)",), "no such reduction inside"))
    for p in _BINARY:
        t = _title(p)
        both = ("fixed(a, X)", "fixed(b, X)")
        neither = ("plain(a, X)", "plain(b, X)")
        rules.append(Infer(f"fixed-{t}", f"fixed({p}, X)", both, "a function of fixed values is fixed"))
        if p not in _OF_FIXED:
            rules.append(Infer(f"plain-{t}", f"plain({p}, X)", neither, "no such reduction inside"))
        for side in "ab":
            if p not in _OF_FIXED:
                rules.append(
                    Infer(
                        f"varies-{t}-{side}",
                        f"varies({p}, X)",
                        (f"varies({side}, X)",),
                        "an argument may vary",
                    )
                )
            rules.append(
                Infer(
                    f"cascaded-{t}-{side}",
                    f"cascaded({p}, X)",
                    (f"cascaded({side}, X)",),
                    "contains such a reduction",
                )
            )
    where = "where(p, a, b)"
    rules.append(
        Infer(
            "fixed-where",
            f"fixed({where}, X)",
            ("fixed(p, X)", "fixed(a, X)", "fixed(b, X)"),
            "all are fixed",
        )
    )
    for side in "pab":
        rules.append(
            Infer(
                f"varies-where-{side}", f"varies({where}, X)", (f"varies({side}, X)",), "an argument may vary"
            )
        )
        rules.append(
            Infer(
                f"cascaded-where-{side}",
                f"cascaded({where}, X)",
                (f"cascaded({side}, X)",),
                "contains such a reduction",
            )
        )
    rules += [
        Infer(
            "plain-where",
            f"plain({where}, X)",
            ("plain(p, X)", "plain(a, X)", "plain(b, X)"),
            "no such reduction inside",
        ),
        Infer(
            "plain-reduce", "plain(fold[R, D](e), X)", ("plain(e, X)", "X != D"), "no such reduction inside"
        ),
        Infer(
            "fixed-bound", "fixed(fold[R, D](e), D)", (), "a reduction does not depend on the axis it binds"
        ),
        Infer("fixed-reduce", "fixed(fold[R, D](e), X)", ("fixed(e, X)",), "its body does not depend on X"),
        Infer(
            "varies-reduce", "varies(fold[R, D](e), X)", ("varies(e, X)", "X != D"), "its body varies along X"
        ),
        Infer("cascaded-base", "cascaded(fold[R, D](e), D)", (), "is such a reduction"),
        Infer(
            "cascaded-reduce", "cascaded(fold[R, D](e), X)", ("cascaded(e, X)",), "contains such a reduction"
        ),
    ]
    return tuple(rules)


DEPENDENCE = RuleSet("dependence", _dependence())

SIGNS = RuleSet(
    "signs",
    (
        Infer("nonneg-exp", "nonneg(exp(a))", (), "e^a > 0"),
        Infer("nonneg-abs", "nonneg(abs(a))", (), "|a| >= 0"),
        Infer("nonneg-sq", "nonneg(sq(a))", (), "a^2 >= 0"),
        Infer("nonneg-sqrt", "nonneg(sqrt(a))", (), "the principal root"),
        Infer("nonneg-inv", "nonneg(inv(a))", ("nonneg(a)",), "1/a has the sign of a"),
        Infer("nonneg-add", "nonneg(a + b)", ("nonneg(a)", "nonneg(b)"), "sums of nonnegatives"),
        Infer("nonneg-mul", "nonneg(a * b)", ("nonneg(a)", "nonneg(b)"), "products of nonnegatives"),
        Infer("nonneg-ratio", "nonneg(ratio(a, b))", ("nonneg(a)", "nonneg(b)"), "quotients of nonnegatives"),
        Infer("nonneg-max-left", "nonneg(maximum(a, b))", ("nonneg(a)",), "max(a, b) >= a"),
        Infer("nonneg-max-right", "nonneg(maximum(a, b))", ("nonneg(b)",), "max(a, b) >= b"),
        Infer("nonneg-min", "nonneg(minimum(a, b))", ("nonneg(a)", "nonneg(b)"), "min(a, b) is one of them"),
        Infer("nonneg-cast", "nonneg(cast(T, a))", ("nonneg(a)",), "rounding keeps the sign"),
        Infer("nonneg-where", "nonneg(where(p, a, b))", ("nonneg(a)", "nonneg(b)"), "either branch"),
        Infer("nonneg-reduce", "nonneg(fold[R, D](e))", ("nonneg(e)",), "a fold of nonnegatives"),
        Infer("le-max", "le(e, max[D](e))", ("r == max[D](e)",), "an element is at most the maximum"),
        Infer("le-max-of", "le(a, max[D](b))", ("le(a, b)", "r == max[D](b)"), "a <= b <= max b"),
        Infer(
            "le-finite",
            "le(a, finite(b))",
            ("le(a, b)", "r == finite(b)"),
            "finite(b) is b, where b is finite",
        ),
        Infer("le-maximum-left", "le(a, maximum(a, b))", ("r == maximum(a, b)",), "a <= max(a, b)"),
        Infer("le-maximum-right", "le(b, maximum(a, b))", ("r == maximum(a, b)",), "b <= max(a, b)"),
        Infer(
            "le-prefix", "le(max[A](e), max[AB](e))", ("r == max[AB](e)", "s == max[A](e)"), "a longer prefix"
        ),
        Infer(
            "le-suffix", "le(max[B](e), max[AB](e))", ("r == max[AB](e)", "s == max[B](e)"), "a longer prefix"
        ),
        Infer("le-min", "le(min[D](e), e)", ("r == min[D](e)",), "the minimum is at most an element"),
        Infer(
            "le-min-prefix",
            "le(min[AB](e), min[A](e))",
            ("r == min[AB](e)", "s == min[A](e)"),
            "a longer prefix",
        ),
        Infer(
            "le-min-suffix",
            "le(min[AB](e), min[B](e))",
            ("r == min[AB](e)", "s == min[B](e)"),
            "a longer prefix",
        ),
        Infer("nonpos-difference", "nonpos(a - b)", ("le(a, b)",), "a <= b"),
        Infer("nonpos-delta", "nonpos(delta(a, b))", ("le(a, b)",), "a <= b"),
        Infer("nonpos-scale-left", "nonpos(c * a)", ("nonneg(c)", "nonpos(a)"), "scaled by a nonnegative"),
        Infer("nonpos-scale-right", "nonpos(a * c)", ("nonneg(c)", "nonpos(a)"), "scaled by a nonnegative"),
        Infer("nonpos-neg", "nonpos(-a)", ("nonneg(a)",), "the negative of a nonnegative"),
        Infer("nonpos-where", "nonpos(where(p, a, b))", ("nonpos(a)", "nonpos(b)"), "either branch"),
        Infer("nonpos-max", "nonpos(max[D](a))", ("nonpos(a)",), "a maximum of nonpositives"),
        Infer("nonpos-add", "nonpos(a + b)", ("nonpos(a)", "nonpos(b)"), "a sum of nonpositives"),
        Infer("nonpos-cast", "nonpos(cast(T, a))", ("nonpos(a)",), "rounding keeps the sign"),
        Infer("constant-inv", "constant(inv(a))", ("constant(a)",), "of a constant"),
        Infer("constant-neg", "constant(-a)", ("constant(a)",), "of a constant"),
        Infer("constant-mul", "constant(a * b)", ("constant(a)", "constant(b)"), "of constants"),
        Infer("bounded-exp", "bounded(exp(a))", ("nonpos(a)",), "e^a <= 1"),
        Infer("bounded-scaled", "bounded(a * inv(m))", ("le(abs(a), m)",), "|a| <= m"),
        Infer("bounded-scaled-abs", "bounded(abs(a) * inv(m))", ("le(abs(a), m)",), "|a| <= m"),
        Infer("bounded-quotient", "bounded(a * inv(m * c))", ("le(abs(a), m)", "constant(c)"), "|a| <= m"),
        Infer(
            "bounded-product", "bounded(a * b)", ("bounded(a)", "bounded(b)"), "a product of bounded values"
        ),
        Infer(
            "bounded-constant-left", "bounded(c * a)", ("bounded(a)", "constant(c)"), "a constant multiple"
        ),
        Infer(
            "bounded-constant-right", "bounded(a * c)", ("bounded(a)", "constant(c)"), "a constant multiple"
        ),
        Infer("bounded-constant", "bounded(c)", ("constant(c)",), "a constant"),
        Infer("bounded-abs", "bounded(abs(a))", ("bounded(a)",), "same size"),
        Infer("bounded-neg", "bounded(-a)", ("bounded(a)",), "same size"),
        Infer("bounded-sq", "bounded(sq(a))", ("bounded(a)",), "a square of a bounded value"),
        Infer("bounded-cast", "bounded(cast(T, a))", ("bounded(a)",), "same size"),
        Infer("bounded-where", "bounded(where(p, a, b))", ("bounded(a)", "bounded(b)"), "either branch"),
        Infer("bounded-max", "bounded(max[D](a))", ("bounded(a)",), "one of bounded values"),
        Infer("aggregate-sum", "aggregate(sum[D](e))", (), "a sum over an axis"),
        Infer("aggregate-left", "aggregate(a * b)", ("aggregate(a)",), "a multiple of a sum"),
        Infer("aggregate-right", "aggregate(a * b)", ("aggregate(b)",), "a multiple of a sum"),
        Infer("aggregate-sq", "aggregate(sq(a))", ("aggregate(a)",), "the square of a sum"),
    ),
)
"""Sign, order and size facts: what makes an `exp` safe, a repair of a maximum valid, a cast in range."""

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
        Rewrite("abs-one", "abs(1)", "1", (), "|1| = 1", subsume=True),
        Rewrite("inv-inv", "inv(inv(a))", "a", (), "1/(1/a) = a", subsume=True),
        Rewrite("abs-nonneg", "abs(a)", "a", ("nonneg(a)",), "|a| = a where a >= 0"),
        Rewrite("square", "a * a", "sq(a)", (), "a a = a^2"),
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


def _want(pattern: str, parts: str) -> list[Rule]:
    return [
        Infer(
            f"want-{_title(pattern)}-{part}",
            f"want({part}, X)",
            (f"e == {pattern}", "want(e, X)"),
            "part of a body",
        )
        for part in parts
    ]


def _separation() -> tuple[Rule, ...]:
    rules: list[Rule] = [Infer("want-body", "want(e, D)", ("r == fold[R, D](e)",), "the body of a reduction")]
    for pattern in _SEPARABLE:
        rules += _want(pattern, "a")
    for pattern in ("a + b", "a * b", "where(p, a, b)"):
        rules += _want(pattern, "ab")
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
            "factors-where",
            "factors(where(p, a, 0), c, where(p, m, 0), X)",
            split,
            "c distributes over a mask to 0",
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
        Infer(
            "addends-where",
            "addends(where(p, a, -inf), c, where(p, m, -inf), X)",
            ("addends(a, c, m, X)",),
            "c distributes over a mask to -inf",
        ),
    ]
    return tuple(rules)


SEPARATION = RuleSet("separation", _separation())
"""RedFuser's G (x) H decomposition (its section 4.2), found by rewriting: every way to write a body as
a part fixed along the axis and a part that varies."""

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
            "hoist-addend-max",
            "max[D](e)",
            "c + max[D](m)",
            ("addends(e, c, m, D)", "c != 0"),
            "max(c + m) = c + max m",
        ),
        Rewrite(
            "hoist-addend-min",
            "min[D](e)",
            "c + min[D](m)",
            ("addends(e, c, m, D)", "c != 0"),
            "min(c + m) = c + min m",
        ),
        Rewrite(
            "hoist-factor-max",
            "max[D](e)",
            "c * max[D](m)",
            ("factors(e, c, m, D)", "nonneg(c)", "c != 1"),
            "max(c m) = c max m where c >= 0",
        ),
        Rewrite(
            "hoist-factor-min",
            "min[D](e)",
            "c * min[D](m)",
            ("factors(e, c, m, D)", "nonneg(c)", "c != 1"),
            "min(c m) = c min m where c >= 0",
        ),
        Rewrite("max-fixed", "max[D](c)", "c", ("fixed(c, D)",), "the maximum of one value"),
        Rewrite("min-fixed", "min[D](c)", "c", ("fixed(c, D)",), "the minimum of one value"),
        Rewrite("inv-product", "inv(a * b)", "inv(a) * inv(b)", (), "1/(a b) = 1/a 1/b"),
        Rewrite(
            "interchange",
            "sum[D](w * sum[F](f))",
            "sum[F](sum[D](w * f))",
            ("fixed(w, F)", "cascaded(f, D)", "plain(f, F)"),
            "sums commute (Fubini), so that the cascade over one axis is seen",
            subsume=True,
        ),
        Rewrite(
            "interchange-plain",
            "sum[D](sum[F](f))",
            "sum[F](sum[D](f))",
            ("cascaded(f, D)", "plain(f, F)"),
            "sums commute (Fubini), so that the cascade over one axis is seen",
            subsume=True,
        ),
    ),
)
"""Distributivity over the whole axis: what can leave a loop."""

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
            "shifted(where(p, exp(a), 0), where(p, exp(a - finite(max[ALL](where(p, a, -inf)))), 0),"
            " finite(max[ALL](where(p, a, -inf))), ALL)",
            ("unproved(a)", "want(where(p, exp(a), 0), ALL)", "varies(a, ALL)"),
            "as shift-exp, with M the maximum of what the mask keeps",
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
            "shifted-over-shifted",
            "(exp(m) * r) * inv(exp(m) * s)",
            "r * inv(s)",
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
        Rewrite(
            "variance-of-moments",
            "sum[D](sq(x)) * inv(n) - sq(sum[D](x) * inv(n))",
            "sum[D](sq(x - sum[D](x) * inv(n))) * inv(n)",
            ("n == sum[D](1)",),
            "E[x^2] - E[x]^2 = E[(x - E[x])^2]",
        ),
        Rewrite(
            "weighted-variance-of-moments",
            "sum[D](w * sq(x)) * inv(n) - sq(sum[D](w * x) * inv(n))",
            "sum[D](w * sq(x - sum[D](w * x) * inv(n))) * inv(n)",
            ("n == sum[D](w)",),
            "E[x^2] - E[x]^2 = E[(x - E[x])^2], weighted",
        ),
        Rewrite(
            "covariance-of-moments",
            "sum[D](x * y) * inv(n) - (sum[D](x) * inv(n)) * (sum[D](y) * inv(n))",
            "sum[D]((x - sum[D](x) * inv(n)) * (y - sum[D](y) * inv(n))) * inv(n)",
            ("n == sum[D](1)",),
            "E[xy] - E[x]E[y] = E[(x - E[x])(y - E[y])]",
        ),
    ),
)
"""Equal forms that do not overflow or cancel; extraction prefers them."""

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
        "k != 0",
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
            given,
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
    mean = "sum[P]({}) * inv(sum[P]({}))"
    for side, order in (("", "{g} * ({x} - {c})"), ("-reversed", "({x} - {c}) * {g}")):
        for product in ("w * x", "x * w"):
            title = f"weighted-deviations{side}" + ("" if product == "w * x" else "-commuted")
            body = order.format(g="g", x="x", c=mean.format(product, "w"))
            rules.append(
                Rewrite(
                    title,
                    f"sum[P]({body})",
                    "0",
                    ("factors(g, c, m, P)", "factors(w, d, m, P)"),
                    "deviations from the weighted mean, weighted, sum to 0",
                )
            )
    rules.append(
        Rewrite(
            "deviations", f"sum[P](x - {mean.format('x', '1')})", "0", (), "deviations from the mean sum to 0"
        )
    )
    return tuple(rules)


RECENTRE = RuleSet("recentre", _recentring())
"""Moments: a shift inside a product becomes the shift that the state has, plus a difference that leaves."""

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
        Rewrite(
            "delta-add",
            "delta(a + c, b + d)",
            "delta(a, b) + delta(c, d)",
            (),
            "(a+c) - (b+d) = (a-b) + (c-d)",
        ),
        Rewrite("delta-scale-left", "delta(k * a, k * b)", "k * delta(a, b)", (), "k a - k b = k (a-b)"),
        Rewrite("delta-scale-right", "delta(a * k, b * k)", "delta(a, b) * k", (), "a k - b k = (a-b) k"),
        Rewrite("delta-log", "delta(log(a), log(b))", "log(ratio(a, b))", (), "log a - log b = log(a/b)"),
    ),
)
"""Quotients and differences of like forms, so that e^(a-b) comes out and never e^a e^-b."""

SCHEDULES = RuleSet(
    "schedules",
    (
        Rewrite(
            "walk-rolling",
            "read(K)",
            "rolling(K, X)",
            ("walks(K, X)", "mergeable(K)"),
            "states seen, repaired",
        ),
        Rewrite(
            "walk-split-k", "read(K)", "split_k(K, X)", ("walks(K, X)", "mergeable(K)"), "shards, then merged"
        ),
        Rewrite("walk-resident", "read(K)", "resident(K, X)", ("walks(K, X)",), "one tile holds the axis"),
        Rewrite(
            "walk-multi-pass", "read(K)", "multi_pass(K, X)", ("walks(K, X)",), "a pass for each dependency"
        ),
    ),
)
"""Ways to walk an axis: all compute the same, so a plan is an extraction from their class."""

PREPARE = (SIMPLIFY, DEPENDENCE, SIGNS, LOGARITHMS, SEPARATION, HOIST, STABILISE)
"""Rule sets over whole axes: the best equal program before anything is split."""

MERGE = (SIMPLIFY, DEPENDENCE, SIGNS, LOGARITHMS, SEPARATION, SPLIT, REPAIR, RECENTRE, EXPAND)
"""Rule sets over split axes: the merge of two parts."""
