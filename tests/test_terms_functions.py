"""The table of functions says what is so: every column against numbers, derivatives against sympy's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
from symbolic import to_sympy

from eqfuse.errors import EqfuseError
from eqfuse.terms import integers
from eqfuse.terms.definitions import definition, derivatives
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import (
    ABBREVIATIONS,
    APART,
    CALLABLE,
    CASTS,
    FUNCTIONS,
    LOGICAL,
    ROUNDINGS,
    Function,
)
from eqfuse.terms.interpreter import Env, evaluate_expr
from eqfuse.terms.nodes import Call, Expr, Scalar
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import show

NUMERIC = [row for row in FUNCTIONS.values() if row.result != "truth" and any(row.derivative)]
STEPS = ("floor", "round", "sign", "floordiv", *ROUNDINGS)
REPAIRS = ("finite", "invertible")
KINKS = {"maximum": (1.0, 1.0), "minimum": (1.0, 1.0), "abs": (0.0,)}
"""Where left and right derivatives differ."""


def of(row: Function) -> Call:
    return Call(row.name, tuple(map(Scalar, row.args)))


def value(expr: Expr, row: Function, args: tuple[float, ...]) -> float:
    scalars = dict(zip(row.args, args, strict=True))
    return float(evaluate_expr(expr, Env(FloatDomain(), {}, scalars, {})).data)


def samples(row: Function) -> list[tuple[float, ...]]:
    """Arguments away from steps and kinks, in the domain of every function; both values of a condition."""
    rng = np.random.default_rng(len(row.name))
    points = [tuple(rng.uniform(0.1, 3.0, len(row.args))) for _ in range(6)]
    if row.name not in ("sqrt", "root", "rsqrt", "log", "log1p"):
        points += [tuple(-x for x in point) for point in points]
    return points


def slope(f: Callable[[float], float], x: float, step: float = 1e-6) -> float:
    return (f(x + step) - f(x - step)) / (2 * step)


@pytest.mark.parametrize("row", NUMERIC, ids=lambda row: row.name)
def test_derivatives_are_slopes(row: Function) -> None:
    call = Call("f64", (Scalar("x"),)) if row.name in CASTS else of(row)
    found = derivatives(of(row))
    assert len(found) == len(row.args)
    points = samples(row)
    points += [KINKS[row.name]] if row.name in KINKS else []
    for place, derivative in enumerate(found):
        if row.args[place] == "p":
            assert derivative is None
            continue
        assert derivative is not None
        for point in points:

            def along(x: float, place: int = place, point: tuple[float, ...] = point) -> float:
                return value(call, row, (*point[:place], x, *point[place + 1 :]))

            expected = slope(along, point[place])
            assert value(derivative, row, point) == pytest.approx(expected, abs=1e-7, rel=1e-7)


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in NUMERIC
        if row.name not in (*STEPS, *REPAIRS, *CASTS, *APART, "where", "mod", "maximum", "minimum")
    ],
    ids=lambda row: row.name,
)
def test_derivatives_are_sympys(row: Function) -> None:
    symbols = {name: sympy.Symbol(name, real=True) for name in row.args}

    def symbol(leaf: Expr) -> Any:
        assert isinstance(leaf, Scalar)
        return symbols[leaf.name]

    whole = to_sympy(of(row), symbol)
    for name, derivative in zip(row.args, derivatives(of(row)), strict=True):
        assert derivative is not None
        rest = sympy.diff(whole, symbols[name]) - to_sympy(derivative, symbol)
        for point in samples(row):
            numbers = {
                symbols[n]: sympy.Rational(str(round(x, 3))) for n, x in zip(row.args, point, strict=True)
            }
            assert abs(rest.subs(numbers).evalf(30)) < 1e-25


@pytest.mark.parametrize("row", FUNCTIONS.values(), ids=lambda row: row.name)
def test_truth_values_and_functions_of_integers_have_no_derivative(row: Function) -> None:
    without = row.result == "truth" or row.of_integers or row.name == "stop"
    assert all(d is None for d in derivatives(of(row))) == without


@pytest.mark.parametrize(
    "row", [row for row in FUNCTIONS.values() if row.definition], ids=lambda row: row.name
)
def test_definitions_are_equal(row: Function) -> None:
    meaning = definition(of(row))
    assert meaning is not None
    for point in samples(row):
        assert value(meaning, row, point) == pytest.approx(value(of(row), row, point), rel=1e-13)


@pytest.mark.parametrize("row", NUMERIC, ids=lambda row: row.name)
def test_preservation_and_order(row: Function) -> None:
    zeros = tuple(0.0 for _ in row.args)
    if row.name != "where":
        with np.errstate(all="ignore"):
            assert (value(of(row), row, zeros) == 0) == row.zero_at_zero
    special = [tuple(rng) for rng in np.random.default_rng(0).normal(scale=20, size=(40, len(row.args)))]
    finite = [np.isfinite(value(of(row), row, point)) for point in [*special, zeros]]
    if row.name not in ("sqrt", "root", "rsqrt", "log", "log1p"):  # of negative numbers they are NaN
        divides = row.name in ("div", "floordiv", "mod")
        assert all(finite[: -1 if divides else None])
    for place, sign in enumerate(row.order):
        for point in samples(row):
            higher = (*point[:place], point[place] + 0.4, *point[place + 1 :])
            low, high = value(of(row), row, point), value(of(row), row, higher)
            assert high >= low if sign == "+" else high <= low
    if len(row.args) == 1 and row.parity:
        for point in samples(row):
            other = value(of(row), row, tuple(-x for x in point))
            assert other == (1 if row.parity == "even" else -1) * value(of(row), row, point)


@pytest.mark.parametrize("fact", ["nonneg"])
def test_values_have_the_facts_that_hold(fact: str) -> None:
    rows = [row for row in NUMERIC if fact in row.holds]
    assert rows
    for row in rows:
        assert all(value(of(row), row, point) >= 0 for point in samples(row))


def test_integers_stay_integers_as_the_table_says() -> None:
    whole = {row.name for row in FUNCTIONS.values() if row.result in ("like", "integer")}
    assert set(integers.INTEGER_FUNCTIONS) == whole
    truths = {row.name for row in FUNCTIONS.values() if row.result == "truth"}
    assert set(integers.TRUTH_FUNCTIONS) == truths and set(LOGICAL) < truths


FUNCTIONS_PAGE = Path(__file__).parents[1] / "docs" / "functions.md"


def page() -> str:
    """The page of functions, from the table."""
    lines = [
        "# Functions",
        "",
        "Every elementwise function of the language, from `eqfuse/terms/functions.py`. The result is a real number, an",
        "integer, an integer where all numbers among the arguments are (like), or a truth value. `& | ^ << >>` take integers",
        "alone. The field is what verification makes",
        "of it ([verification.md](verification.md)): arithmetic of residues (exact), decided by the order of values, `exp`,",
        "`log`, a root, made of exponentials (logistic), a coordinate of a point of a circle, a hash. Work is in additions, about.",
        "",
        "| function | result | derivatives | defined as | field | work |",
        "|---|---|---|---|---|---|",
    ]
    for row in FUNCTIONS.values():
        written = show(of(row)).replace("|", r"\|")
        partial = ", ".join(f"`{text}`" for text in row.derivative if text)
        meaning = f"`{row.definition}`" if row.definition else ""
        cells = (f"`{written}`", row.result, partial, meaning, row.field, str(row.work))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Read as what they stand for:", "", "| written | read as |", "|---|---|"]
    lines += [f"| `{name}({', '.join(args)})` | `{text}` |" for name, (args, text) in ABBREVIATIONS.items()]
    return "\n".join(lines) + "\n"


def test_the_page_of_functions_is_that_of_the_table(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        FUNCTIONS_PAGE.write_text(page(), encoding="utf-8")
    assert FUNCTIONS_PAGE.read_text(encoding="utf-8") == page()


def test_the_page_of_the_language_names_every_function() -> None:
    text = FUNCTIONS_PAGE.with_name("language.md").read_text(encoding="utf-8")
    hidden = {"maximum", "minimum", *REPAIRS}  # written max, min; made by merges
    assert all(re.search(rf"[`| ]{fn}[`(, ]", text) for fn in CALLABLE if fn not in hidden)


ABBREVIATED = {
    "clip(x[i], -2, y[i])": "min(max(x[i], -2), y[i])",
    "atan(x[i] / 2)": "atan2(x[i] / 2, 1)",
    "asin(x[i])": "atan2(x[i], sqrt((1 - x[i]) * (1 + x[i])))",
    "acos(-x[i])": "atan2(sqrt((1 - -x[i]) * (1 + -x[i])), -x[i])",
    "softplus(2 * x[i])": "max(2 * x[i], 0) + log1p(exp(-abs(2 * x[i])))",
    "softplus(x[i] + clip(y[i], 0, 1))": (
        "max(x[i] + min(max(y[i], 0), 1), 0) + log1p(exp(-abs(x[i] + min(max(y[i], 0), 1))))"
    ),
}


@pytest.mark.parametrize("short", ABBREVIATED)
def test_abbreviations_are_read_as_what_they_stand_for(short: str) -> None:
    (one,), (other,) = parse(f"a[i] = {short}").outputs, parse(f"a[i] = {ABBREVIATED[short]}").outputs
    assert one.expr == other.expr


def test_arguments_of_abbreviations_are_counted() -> None:
    with pytest.raises(EqfuseError, match=r"clip takes 3 arguments, 2 given") as found:
        parse("a[i] = clip(x[i], 1)")
    assert "^" in str(found.value)
