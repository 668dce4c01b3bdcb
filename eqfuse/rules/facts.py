"""What follows from the structure of terms: dependence on axes, signs, order, size."""

from __future__ import annotations

from eqfuse.rules.rule import Infer, Rule, RuleSet

SEPARABLE = ("-a", "inv(a)", "exp(a)", "log(a)", "sqrt(a)", "abs(a)", "sq(a)", "cast(T, a)")


_UNARY = (*SEPARABLE, "apply1(F, a)", "finite(a)")


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


def title(pattern: str) -> str:
    """The name of a pattern's outermost function, for names of rules."""
    names = {"-a": "neg", "a + b": "add", "a * b": "mul"}
    return names.get(pattern, pattern.split("(")[0])


def _dependence() -> tuple[Rule, ...]:
    """`fixed`, `varies`, `plain` (no reduction over the axis inside) and `cascaded` (one inside) follow the structure of terms."""
    rules: list[Rule] = []
    for p in _UNARY:
        t = title(p)
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
        t = title(p)
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
        Infer(
            "le-finite-both",
            "le(finite(a), finite(b))",
            ("le(a, b)", "r == finite(a)", "s == finite(b)"),
            "finite(a) is a and finite(b) is b, where they are finite",
        ),
        Infer(
            "le-cast",
            "le(cast(T, a), cast(T, b))",
            ("le(a, b)", "r == cast(T, a)", "s == cast(T, b)"),
            "rounding keeps the order",
        ),
        Infer("le-maximum-left", "le(a, maximum(a, b))", ("r == maximum(a, b)",), "a <= max(a, b)"),
        Infer("le-maximum-right", "le(b, maximum(a, b))", ("r == maximum(a, b)",), "b <= max(a, b)"),
        Infer(
            "le-left-of-maximum",
            "le(a, maximum(b, c))",
            ("le(a, b)", "r == maximum(b, c)"),
            "a <= b <= max(b, c)",
        ),
        Infer(
            "le-right-of-maximum",
            "le(a, maximum(c, b))",
            ("le(a, b)", "r == maximum(c, b)"),
            "a <= b <= max(c, b)",
        ),
        Infer(
            "le-maximum-both",
            "le(maximum(a, c), maximum(b, c))",
            ("le(a, b)", "r == maximum(a, c)", "s == maximum(b, c)"),
            "the larger of larger values",
        ),
        Infer(
            "le-maximum-both-right",
            "le(maximum(c, a), maximum(c, b))",
            ("le(a, b)", "r == maximum(c, a)", "s == maximum(c, b)"),
            "the larger of larger values",
        ),
        Infer(
            "le-prefix", "le(max[A](e), max[AB](e))", ("r == max[AB](e)", "s == max[A](e)"), "a longer prefix"
        ),
        Infer(
            "le-suffix", "le(max[B](e), max[AB](e))", ("r == max[AB](e)", "s == max[B](e)"), "a longer prefix"
        ),
        Infer(
            "le-sum",
            "le(e, sum[D](e))",
            ("r == sum[D](e)", "nonneg(e)"),
            "one of nonnegatives is at most their sum",
        ),
        Infer("le-log", "le(a, log(b))", ("le(exp(a), b)", "r == log(b)"), "e^a <= b"),
        Infer("le-plus", "le(a, b + k)", ("le(a, b)", "nonneg(k)", "r == b + k"), "a <= b <= b + k"),
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
        Infer("nonpos-shifted", "nonpos(a - (m + c))", ("le(a - m, c)",), "a - m <= c"),
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
        Infer("within-abs", "within(a, m)", ("le(abs(a), m)",), "|a| <= m"),
        Infer("within-nonneg", "within(a, m)", ("le(a, m)", "nonneg(a)"), "0 <= a <= m"),
        Infer("within-of-abs", "within(abs(a), m)", ("within(a, m)",), "same size"),
        Infer("within-neg", "within(-a, m)", ("within(a, m)",), "same size"),
        Infer("within-where", "within(where(p, a, 0), m)", ("within(a, m)",), "a, or nothing"),
        Infer(
            "within-cast",
            "within(cast(T, a), cast(T, m))",
            ("within(a, m)", "r == cast(T, m)"),
            "rounding keeps the order",
        ),
        Infer("bounded-scaled", "bounded(a * inv(m))", ("within(a, m)",), "|a| <= m"),
        Infer("bounded-inverse", "bounded(inv(m) * a)", ("within(a, m)",), "|a| <= m"),
        Infer(
            "bounded-masked",
            "bounded(where(p, a * inv(m), 0))",
            ("le(where(p, abs(a), z), m)",),
            "|a| <= m where the mask keeps a",
        ),
        Infer("bounded-quotient", "bounded(a * inv(m * c))", ("within(a, m)", "constant(c)"), "|a| <= m"),
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
        Infer("positive-inv", "positive(inv(a))", ("positive(a)",), "1/a has the sign of a"),
        Infer("positive-sqrt", "positive(sqrt(a))", ("positive(a)",), "a root has the sign of a"),
        Infer("positive-mul", "positive(a * b)", ("positive(a)", "positive(b)"), "products of positives"),
        Infer("positive-add-left", "positive(a + b)", ("positive(a)", "nonneg(b)"), "a + b >= a"),
        Infer("positive-add-right", "positive(a + b)", ("nonneg(a)", "positive(b)"), "a + b >= b"),
        Infer("positive-count", "positive(sum[D](1))", (), "an axis has a position"),
        Infer("scalar-inv", "scalar(inv(a))", ("scalar(a)",), "of a run-time number"),
        Infer("settled-nonpos", "settled(a)", ("nonpos(a)",), "its exponential is at most 1"),
        Infer(
            "settled-scaled-left", "settled(k * a)", ("scalar(k)", "settled(a)"), "shifted as it is written"
        ),
        Infer(
            "settled-scaled-right", "settled(a * k)", ("scalar(k)", "settled(a)"), "shifted as it is written"
        ),
        Infer(
            "settled-rounded",
            "settled(a - cast(T, b))",
            ("le(a, b)",),
            "at most 1 but for the shift's rounding",
        ),
        Infer("settled-finite", "settled(finite(a) - a)", (), "0 where a is finite"),
        Infer("aggregate-sum", "aggregate(sum[D](e))", (), "a sum over an axis"),
        Infer("aggregate-left", "aggregate(a * b)", ("aggregate(a)",), "a multiple of a sum"),
        Infer("aggregate-right", "aggregate(a * b)", ("aggregate(b)",), "a multiple of a sum"),
        Infer("aggregate-sq", "aggregate(sq(a))", ("aggregate(a)",), "the square of a sum"),
    ),
)
"""Sign, order and size facts: what makes an `exp` safe, a repair of a maximum valid, a cast in range."""


ZEROS = RuleSet(
    "zeros",
    (
        Infer("null-absmax", "null(max[ALL](abs(m)), m, ALL)", ("r == max[ALL](abs(m))",), "|m| <= max |m|"),
        Infer("null-abs-sum", "null(sum[ALL](abs(m)), m, ALL)", ("r == sum[ALL](abs(m))",), "|m| <= sum |m|"),
        Infer("null-sq-sum", "null(sum[ALL](sq(m)), m, ALL)", ("r == sum[ALL](sq(m))",), "m^2 <= sum m^2"),
        Infer(
            "null-sum", "null(sum[ALL](m), m, ALL)", ("r == sum[ALL](m)", "nonneg(m)"), "0 <= m <= sum of m"
        ),
        Infer("null-scaled", "null(n * k, m, X)", ("null(n, m, X)", "positive(k)"), "a multiple"),
        Infer("null-sqrt", "null(sqrt(n), m, X)", ("null(n, m, X)",), "a root is 0 where its argument is"),
        Infer("null-add", "null(n + k, m, X)", ("null(n, m, X)", "nonneg(n)", "nonneg(k)"), "n + k >= n"),
        Infer(
            "null-add-scalar",
            "null(n + k, m, X)",
            ("null(n, m, X)", "nonneg(n)", "scalar(k)"),
            "k > 0 in practice, and else n + k is 0 for one value of n alone",
        ),
        Infer("null-of-abs", "null(n, abs(m), X)", ("null(n, m, X)", "r == abs(m)"), "|0| = 0"),
        Infer("null-of-product", "null(n, m * g, X)", ("null(n, m, X)", "r == m * g"), "0 g = 0"),
        Infer(
            "tame-constant", "tame(c, m, X)", ("factors(e, c, m, X)", "constant(c)"), "constants are finite"
        ),
        Infer("tame-inv", "tame(inv(n), m, X)", ("null(n, m, X)",), "1/n is infinite where n is 0"),
        Infer(
            "tame-inv-positive",
            "tame(c, m, X)",
            ("factors(e, c, m, X)", "c == inv(n)", "positive(n)"),
            "1/n is infinite where n is 0",
        ),
        Infer(
            "tame-mul", "tame(a * b, m, X)", ("tame(a, m, X)", "tame(b, m, X)"), "a product of finite factors"
        ),
    ),
)
"""`null(n, m, X)`: n is 0 only where m is 0 all along X. `tame(c, m, X)`: c is infinite only there. So a zero of m
does not meet an infinite c (0 times infinity is NaN) unless all of them do."""
