"""What follows from the structure of terms: dependence on axes, signs, order, size.

How a function treats such facts stands in its row of the table of constructors (and of functions): most rules here are
generated from it. What is particular to a pattern is written out.
"""

from __future__ import annotations

from collections.abc import Iterator

from eqfuse.rules.constructors import CONSTRUCTORS, Constructor
from eqfuse.rules.rule import Infer, Rule, RuleSet


def _sides(row: Constructor) -> Iterator[tuple[str, str]]:
    """The arguments of a constructor, and how the name of a rule about one of them ends."""
    return ((arg, f"-{arg}" if len(row.args) > 1 else "") for arg in row.args)


def _dependence(row: Constructor) -> Iterator[Rule]:
    """`fixed`, `varies`, `plain` (no reduction over the axis inside) and `reduces` (one inside) of a function."""

    def of_all(fact: str, why: str) -> Rule:
        when = tuple(f"{fact}({arg}, X)" for arg in row.args)
        return Infer(f"{fact}-{row.title}", f"{fact}({row.pattern}, X)", when, why)

    def of_each(fact: str, why: str) -> Iterator[Rule]:
        for arg, ending in _sides(row):
            name = f"{fact}-{row.title}{ending}"
            yield Infer(name, f"{fact}({row.pattern}, X)", (f"{fact}({arg}, X)",), why)

    yield of_all("fixed", "a function of fixed values is fixed")
    yield from of_each("reduces", "contains such a reduction")
    if not row.of_fixed:
        yield from of_each("varies", "an argument may vary")
        yield of_all("plain", "no such reduction inside")


DEPENDENCE = RuleSet(
    "dependence",
    (
        *(rule for row in CONSTRUCTORS for rule in _dependence(row)),
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
        Infer("reduces-base", "reduces(fold[R, D](e), D)", (), "is such a reduction"),
        Infer("reduces-reduce", "reduces(fold[R, D](e), X)", ("reduces(e, X)",), "contains such a reduction"),
    ),
)


def _held(row: Constructor) -> Iterator[Rule]:
    """Facts that hold of every value of a function, and those that it keeps."""
    for fact, why in row.holds.items():
        yield Infer(f"{fact}-{row.title}", f"{fact}({row.pattern})", (), why)
    for fact, why in row.keeps.items():
        limit = ", m" if fact == "within" else ""  # |a| <= m
        when = tuple(f"{fact}({arg}{limit})" for arg in row.numbers)
        yield Infer(f"{fact}-{row.title}", f"{fact}({row.pattern}{limit})", when, why)


SIGNS = RuleSet(
    "signs",
    (
        *(rule for row in CONSTRUCTORS for rule in _held(row)),
        Infer("nonneg-max-left", "nonneg(maximum(a, b))", ("nonneg(a)",), "max(a, b) >= a"),
        Infer("nonneg-max-right", "nonneg(maximum(a, b))", ("nonneg(b)",), "max(a, b) >= b"),
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
        Infer("nonpos-max", "nonpos(max[D](a))", ("nonpos(a)",), "a maximum of nonpositives"),
        Infer("bounded-exp", "bounded(exp(a))", ("nonpos(a)",), "e^a <= 1"),
        Infer("within-le-abs", "within(a, m)", ("le(abs(a), m)",), "|a| <= m"),
        Infer("within-le-nonneg", "within(a, m)", ("le(a, m)", "nonneg(a)"), "0 <= a <= m"),
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
            "bounded-constant-left", "bounded(c * a)", ("bounded(a)", "constant(c)"), "a constant multiple"
        ),
        Infer(
            "bounded-constant-right", "bounded(a * c)", ("bounded(a)", "constant(c)"), "a constant multiple"
        ),
        Infer("bounded-constant", "bounded(c)", ("constant(c)",), "a constant"),
        Infer("bounded-max", "bounded(max[D](a))", ("bounded(a)",), "one of bounded values"),
        Infer("positive-add-left", "positive(a + b)", ("positive(a)", "nonneg(b)"), "a + b >= a"),
        Infer("positive-add-right", "positive(a + b)", ("nonneg(a)", "positive(b)"), "a + b >= b"),
        Infer("positive-count", "positive(sum[D](1))", (), "an axis has a position"),
        Infer("exp-safe-nonpos", "exp_safe(a)", ("nonpos(a)",), "its exponential is at most 1"),
        Infer(
            "exp-safe-scaled-left",
            "exp_safe(k * a)",
            ("scalar(k)", "exp_safe(a)"),
            "shifted as it is written",
        ),
        Infer(
            "exp-safe-scaled-right",
            "exp_safe(a * k)",
            ("scalar(k)", "exp_safe(a)"),
            "shifted as it is written",
        ),
        Infer(
            "exp-safe-rounded",
            "exp_safe(a - cast(T, b))",
            ("le(a, b)",),
            "at most 1 but for the shift's rounding",
        ),
        Infer("exp-safe-finite", "exp_safe(finite(a) - a)", (), "0 where a is finite"),
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
        Infer(
            "vanishes-absmax",
            "vanishes_with(max[ALL](abs(m)), m, ALL)",
            ("r == max[ALL](abs(m))",),
            "|m| <= max |m|",
        ),
        Infer(
            "vanishes-abs-sum",
            "vanishes_with(sum[ALL](abs(m)), m, ALL)",
            ("r == sum[ALL](abs(m))",),
            "|m| <= sum |m|",
        ),
        Infer(
            "vanishes-sq-sum",
            "vanishes_with(sum[ALL](sq(m)), m, ALL)",
            ("r == sum[ALL](sq(m))",),
            "m^2 <= sum m^2",
        ),
        Infer(
            "vanishes-sum",
            "vanishes_with(sum[ALL](m), m, ALL)",
            ("r == sum[ALL](m)", "nonneg(m)"),
            "0 <= m <= sum of m",
        ),
        Infer(
            "vanishes-scaled",
            "vanishes_with(n * k, m, X)",
            ("vanishes_with(n, m, X)", "positive(k)"),
            "a multiple",
        ),
        Infer(
            "vanishes-sqrt",
            "vanishes_with(sqrt(n), m, X)",
            ("vanishes_with(n, m, X)",),
            "a root is 0 where its argument is",
        ),
        Infer(
            "vanishes-add",
            "vanishes_with(n + k, m, X)",
            ("vanishes_with(n, m, X)", "nonneg(n)", "nonneg(k)"),
            "n + k >= n",
        ),
        Infer(
            "vanishes-add-scalar",
            "vanishes_with(n + k, m, X)",
            ("vanishes_with(n, m, X)", "nonneg(n)", "scalar(k)"),
            "k > 0 in practice, and else n + k is 0 for one value of n alone",
        ),
        Infer(
            "vanishes-of-abs",
            "vanishes_with(n, abs(m), X)",
            ("vanishes_with(n, m, X)", "r == abs(m)"),
            "|0| = 0",
        ),
        Infer(
            "vanishes-of-product",
            "vanishes_with(n, m * g, X)",
            ("vanishes_with(n, m, X)", "r == m * g"),
            "0 g = 0",
        ),
        Infer(
            "pole-safe-constant",
            "pole_safe(c, m, X)",
            ("factors(e, c, m, X)", "constant(c)"),
            "constants are finite",
        ),
        Infer(
            "pole-safe-inv",
            "pole_safe(inv(n), m, X)",
            ("vanishes_with(n, m, X)",),
            "1/n is infinite where n is 0",
        ),
        Infer(
            "pole-safe-inv-positive",
            "pole_safe(c, m, X)",
            ("factors(e, c, m, X)", "c == inv(n)", "positive(n)"),
            "1/n is infinite where n is 0",
        ),
        Infer(
            "pole-safe-mul",
            "pole_safe(a * b, m, X)",
            ("pole_safe(a, m, X)", "pole_safe(b, m, X)"),
            "a product of finite factors",
        ),
    ),
)
"""`vanishes_with(n, m, X)`: n is 0 only where m is 0 all along X. `pole_safe(c, m, X)`: c is infinite only there. So a zero of m
does not meet an infinite c (0 times infinity is NaN) unless all of them do."""
