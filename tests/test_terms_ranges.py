"""Ranges of expressions: held against every value of small boxes, against z3, and for reals against values drawn inside of intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eqfuse.terms import integers
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import COMPARISONS, FUNCTIONS
from eqfuse.terms.intervals import ABOVE, BELOW, EQUAL, HOLDS, NEGATED, Interval, image
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Scalar, Size, call, walk
from eqfuse.terms.parser import parse
from eqfuse.terms.ranges import Box, FiniteInputs, Ranges, difference, linear
from eqfuse.verify.reals import AnySize, Reals, computed

I, J, N, P = Axis("i"), Axis("j"), Size("i"), Scalar("p")
OF_TWO = ("add", "sub", "mul", "floordiv", "mod", "maximum", "minimum", "bitand", "bitor", "bitxor", "rshift")
OF_ONE = ("neg", "abs", "sign", "relu", "sq", "floor", "round", "i8", "u8")
LEAVES = (I, J, N, P, *map(Const, (0, 1, 2, -3, 5, 130)))


def expressions(leaves: tuple[Expr, ...] = LEAVES, two: tuple[str, ...] = OF_TWO) -> st.SearchStrategy[Expr]:
    def larger(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        compared = st.builds(call, st.sampled_from(COMPARISONS), inner, inner)
        return st.one_of(
            st.builds(call, st.sampled_from(two), inner, inner),
            st.builds(call, st.sampled_from(OF_ONE), inner),
            st.builds(lambda p, x, y: call("where", p, x, y), compared, inner, inner),
        )

    return st.recursive(st.sampled_from(leaves), larger, max_leaves=8)


def values(expr: Expr, leaves: Mapping[Expr, Any]) -> Any:
    """The values of an integer expression, as the interpreter computes them; nothing where they leave what is exact."""
    known: dict[Expr, Any] = {}
    for node in walk(expr):
        match node:
            case Call("floor" | "round" | "sq" as fn, (part,)):
                known[node] = known[part] ** 2 if fn == "sq" else known[part]
            case Call(fn, args):
                known[node] = integers.call(fn, tuple(np.asarray(known[arg]) for arg in args))
            case Const(number):
                known[node] = number
            case _:
                known[node] = leaves[node]
    assume(all(np.abs(number).max() < 2**31 for number in known.values()))
    return np.asarray(known[expr])


def grid(rows: int, columns: int) -> dict[Expr, Any]:
    """All positions of two axes, and their sizes."""
    i, j = np.indices((rows, columns))
    return {I: i, J: j, N: rows, Size("j"): columns}


@settings(max_examples=500, deadline=None)
@given(expressions(), st.integers(1, 5), st.integers(1, 4), st.integers(-3, 9))
def test_a_box_holds_every_value(expr: Expr, rows: int, columns: int, number: int) -> None:
    box = Box.at({"i": rows, "j": columns}, {"p": number})
    found = box.of(expr)
    leaves = {**grid(rows, columns), P: number}
    exact = values(expr, leaves)
    assert found.low <= exact.min() and exact.max() <= found.high
    assert not found.nonzero or exact.all()
    if found.affine is not None:
        total = sum(factor * values(atom, leaves) for atom, factor in found.affine.terms.items())
        assert np.all(total == exact)


@settings(max_examples=500, deadline=None)
@given(expressions((I, J, N, Size("j"), *map(Const, (0, 1, 2, -3, 5)))), expressions((I, N, Const(1))))
def test_what_holds_at_any_size_does(expr: Expr, other: Expr) -> None:
    ranges = AnySize({})
    found, ways = ranges.of(expr), ranges.order(expr, other)
    for rows, columns in itertools.product((1, 2, 5), (1, 3)):
        one, two = (values(each, grid(rows, columns)) for each in (expr, other))
        assert found.low <= one.min() and one.max() <= found.high
        seen = BELOW * np.any(one < two) | EQUAL * np.any(one == two) | ABOVE * np.any(one > two)
        assert not seen & ~ways


@settings(max_examples=150, deadline=None)
@given(
    expressions((I, J, N, Const(2), Const(-3), Const(7)), ("add", "sub", "mul", "floordiv", "mod", "maximum"))
)
def test_z3_finds_no_value_outside(expr: Expr) -> None:
    z3 = pytest.importorskip("z3")
    found = AnySize({}).of(expr)
    assume(all(node.fn not in ("i8", "u8", "where") for node in walk(expr) if isinstance(node, Call)))
    known: dict[Expr, Any] = {}
    solver = z3.Solver()
    solver.set("timeout", 200)
    names = {I: z3.Int("i"), J: z3.Int("j"), N: z3.Int("N"), Size("j"): z3.Int("M")}
    solver.add(names[I] >= 0, names[I] < names[N], names[J] >= 0, names[J] < names[Size("j")])
    for node in walk(expr):
        match node:
            case Const(number):
                known[node] = z3.IntVal(int(number))
            case Call(fn, args):
                parts = [known[arg] for arg in args]
                if fn in ("floordiv", "mod"):  # z3 rounds such that the remainder is not negative
                    by = parts[1]
                    solver.add(by > 0)
                    known[node] = parts[0] / by if fn == "floordiv" else parts[0] % by
                else:
                    known[node] = _z3(z3, fn, parts)
            case _:
                known[node] = names[node]
    outside = [known[expr] < int(end) for end in (found.low,) if math.isfinite(end)]
    outside += [known[expr] > int(end) for end in (found.high,) if math.isfinite(end)]
    solver.add(z3.Or(*outside))
    assert solver.check() != z3.sat


def _z3(z3: Any, fn: str, parts: list[Any]) -> Any:
    x, y = parts[0], parts[-1]
    return {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "mul": lambda: x * y,
        "maximum": lambda: z3.If(x > y, x, y),
        "neg": lambda: -x,
        "abs": lambda: z3.If(x < 0, -x, x),
        "sign": lambda: z3.If(x < 0, -1, z3.If(x > 0, z3.IntVal(1), z3.IntVal(0))),
        "relu": lambda: z3.If(x < 0, z3.IntVal(0), x),
        "sq": lambda: x * x,
        "floor": lambda: x,
        "round": lambda: x,
    }[fn]()


REAL = [
    name
    for name, row in FUNCTIONS.items()
    if row.result in ("real", "like", "integer")
    and not row.of_integers
    and name not in ("where", "rand", "finite", "invertible")
]
Ends = st.floats(-50, 50).map(lambda x: round(x, 3)) | st.sampled_from([-math.inf, math.inf, 0.0, 1.0, -1.0])


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(REAL), st.lists(st.tuples(Ends, Ends), min_size=2, max_size=2), st.data())
def test_an_image_holds_what_floats_give(fn: str, ends: list[Interval], data: st.DataObject) -> None:
    parts = [(min(pair), max(pair)) for pair in ends[: len(FUNCTIONS[fn].args)]]
    assume(all(low < math.inf and high > -math.inf for low, high in parts))
    low, high = image(fn, parts, value=computed)
    args = [
        data.draw(
            st.floats(max(a, -1e3), min(b, 1e3)) if a <= 1e3 and b >= -1e3 else st.just(a if a > 0 else b)
        )
        for a, b in parts
    ]
    found = float(FloatDomain("float64").call(fn, [np.asarray(arg) for arg in args]))
    if math.isfinite(found):  # 1 / sqrt(-0.0) is -inf
        assert low <= found <= high


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["add", "sub", "mul", "div"]), st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_ends_are_rounded_outward_and_only_where_they_are_rounded(fn: str, one: float, other: float) -> None:
    assume(fn != "div" or other)
    exact = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
    }[fn](Fraction(one), Fraction(other))
    low, high = image(fn, [(one, one), (other, other)])
    assert low <= exact <= high and type(low) is type(high) is float
    assert (low == high) == (abs(exact) <= 1e308 and Fraction(float(exact)) == exact)
    assert high <= math.nextafter(math.nextafter(low, math.inf), math.inf)


def test_numbers_beyond_floats_have_ends() -> None:
    assert image("sq", [(10**200, 10**200)])[0] >= 1e300
    assert image("exp", [(1000, 1001)], value=computed) == (pytest.approx(1.797e308, rel=1e-3), math.inf)
    found: Expr = I
    for _ in range(60):
        found = call("sq", found)
    assert Box.at({"i": 9}, {}).of(found).high == math.inf


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("2 * i + 3 - j", {"i": 2, 1: 3, "j": -1}),
        ("3 * (i - 2 * j) + 4", {"i": 3, "j": -6, 1: 4}),
        ("i - i + 2", {1: 2}),
        ("-(i - 5)", {"i": -1, 1: 5}),
        ("j + i // 2 * 4", {"j": 1, "i // 2": 4}),
    ],
)
def test_forms_are_over_what_is_not_linear(text: str, terms: dict[object, int]) -> None:
    (output,) = parse(f"y[i, j] = x[{text}]").outputs
    assert isinstance(output.expr, Load)
    found = linear(output.expr.index[0])
    assert {1 if atom is Const(1) else str(atom): factor for atom, factor in found.terms.items()} == terms
    assert list(found.atoms) == [atom for atom in found.terms if atom is not Const(1)]


def test_a_difference_keeps_the_order_of_its_terms_and_nothing_that_cancels() -> None:
    found = difference(call("add", J, call("add", I, Const(2))), call("add", I, P))
    assert list(found.terms.items()) == [(J, 1), (Const(1), 2), (P, -1)]


def test_a_remainder_of_reals_comes_closer_to_the_divisor_than_one() -> None:
    half = call("mul", Const(0.5), I)
    condition = call("gt", call("mod", half, Const(2)), Const(1))
    assert AnySize({}).truth(condition) is None  # 1.5 % 2 > 1
    floored = call("floor", call("mod", half, Const(2)))
    assert AnySize({}).truth(call("eq", floored, call("mod", half, Const(2)))) is None


@pytest.mark.parametrize(
    ("text", "always"),
    [
        ("0.1 * (i + 1) * 10 > i + 1", None),
        ("0.1 * (i + 1) > 0", True),
        ("0.5 * i * 2 == i", True),
        ("0.75 * i < 0.75 * N(i)", True),
    ],
)
def test_what_is_rounded_does_not_cancel(text: str, always: bool | None) -> None:
    (output,) = parse(f"y[i] = where({text}, x[i], 0)").outputs
    assert isinstance(output.expr, Call)
    assert AnySize({}).truth(output.expr.args[0]) is always


def test_every_comparison_has_a_negation_that_holds_where_it_does_not() -> None:
    assert all(HOLDS[fn] ^ HOLDS[NEGATED[fn]] == 7 for fn in COMPARISONS)


@pytest.mark.parametrize(
    ("text", "is_finite", "nonzero"),
    [
        ("x[i] + z[i]", True, False),
        ("exp(x[i])", True, True),
        ("x[i] / exp(z[i])", True, False),
        ("x[i] / z[i]", False, False),
        ("log(x[i])", False, False),
        ("1 / N(i)", True, True),
        ("where(x[i] > 0, x[i], -inf)", False, False),
        ("max(abs(x[i]), 1)", True, True),
        ("sum[j](exp(a[i,j]))", True, False),
    ],
)
def test_finite_inputs(text: str, is_finite: bool, nonzero: bool) -> None:
    (output,) = parse(f"y[i] = {text}").outputs
    found = FiniteInputs().of(output.expr)
    assert (found.finite, found.nonzero) == (is_finite, nonzero)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("x[i,j] - max[j](x[i,j])", -math.inf, 0),
        ("exp(x[i,j] - max[j](x[i,j]))", 0, 1),
        ("max[j](x[i,j]) - min[j](x[i,j])", 0, math.inf),
        ("where(j <= i, tanh(x[i,j]), -inf)", -1, 1),
        ("sum[j](sigmoid(x[i,j]))", 0, math.inf),
        ("sigmoid(relu(x[i,j]))", 0.5, 1),
        ("x[i,j] * x[i,j] - 1", -1, math.inf),
    ],
)
def test_reals(text: str, low: float, high: float) -> None:
    (output,) = parse(f"y[i,j] = {text}").outputs
    assert Reals({}).of(output.expr).ends == (low, high)


def test_each_node_is_looked_at_once() -> None:
    looked: list[Expr] = []

    class Counting(Ranges):
        def _of(self, node: Expr) -> Any:
            looked.append(node)
            return super()._of(node)

    expr: Expr = I
    for _ in range(200):
        expr = call("add", expr, expr)
    ranges = Counting()
    ranges.of(expr)
    ranges.of(call("neg", expr))
    assert len(looked) == len(set(looked)) == 202
