"""Masks that select one position, and closed forms of sums: what a checker takes as given of them, and what it does not."""

from __future__ import annotations

import re

import pytest

from eqfuse.proof.elaborate import reading
from eqfuse.proof.positions import AxisNames, computed_load, conjuncts, selects, selects_computed
from eqfuse.proof.syntax import Term, term
from eqfuse.proof.totals import totals
from eqfuse.proof.windows import is_either
from eqfuse.terms.parser import parse

INTEGERS, SCALARS = ("ids", "n"), ("n", "x")
RIGHT = [
    ("k == i", "w[k, j]", "i < N(k)", "w[i + 0, j]"),
    ("i == k", "w[k, j] * a[i]", "i < N(k)", "w[i + 0, j] * a[i]"),
    ("k == ids[i]", "w[k, j]", "0 <= ids[i] and ids[i] < N(k)", "w[ids[i], j]"),
    ("k == 2", "w[k, j] + N(k)", "2 < N(k)", "w[2, j] + N(k)"),
    ("k == n", "w[k, j]", "0 <= n and n < N(k)", "w[n, j]"),
    ("k == i - 1", "exp(w[k, j])", "0 <= i - 1 and i - 1 < N(k)", "exp(w[i - 1, j])"),
    ("k == i + 1", "exp(k - i) * w[k, j]", "0 <= i + 1 and i + 1 < N(k)", "exp(i + 1 - i) * w[i + 1, j]"),
    ("k == N(k) - 1", "w[k, j]", "0 <= N(k) - 1 and N(k) - 1 < N(k)", "w[N(k) - 1, j]"),
    (
        "k == 2 * i % 3",
        "sum[k](w[k, j]) * k",
        "0 <= 2 * i % 3 and 2 * i % 3 < N(k)",
        "sum[k](w[k, j]) * (2 * i % 3)",
    ),
]
WRONG = [
    ("k <= i", "w[k, j]", "i < N(k)", "w[i + 0, j]"),  # holds at several
    ("k == k", "w[k, j]", "k < N(k)", "w[k + 0, j]"),
    ("k == k - 1", "w[k, j]", "0 <= k - 1 and k - 1 < N(k)", "w[k - 1, j]"),
    ("m == i", "w[k, j]", "i < N(k)", "w[i + 0, j]"),  # of another axis
    ("k == x", "w[k, j] * k", "0 <= x and x < N(k)", "w[x, j] * x"),  # may be no integer
    ("k == t[i]", "k * a[i]", "0 <= t[i] and t[i] < N(k)", "t[i] * a[i]"),
    ("k == i / 2", "k * a[i]", "0 <= i / 2 and i / 2 < N(k)", "i / 2 * a[i]"),
    ("k == i", "w[k, j]", "i < N(i)", "w[i + 0, j]"),  # inside of another axis
    ("k == i - 1", "w[k, j]", "i - 1 < N(k)", "w[i - 1, j]"),  # below the first
    ("k == n", "w[k, j]", "n < N(k)", "w[n, j]"),
    ("k == -1", "w[k, j]", "-1 < N(k)", "w[-1, j]"),
    ("k == i", "w[k, j] * a[k]", "i < N(k)", "w[i + 0, j] * a[k]"),  # read elsewhere
    ("k == i", "w[k, j]", "i < N(k)", "v[i + 0, j]"),
    ("k == i", "w[k, j] + N(k)", "i < N(k)", "w[i + 0, j] + N(i)"),
    ("k == i + 1", "exp(k) * w[k, j]", "0 <= i + 1 and i + 1 < N(k)", "exp(i + 2) * w[i + 1, j]"),
    ("k == i + 1", "exp(k) * w[k, j]", "0 <= i + 1 and i + 1 < N(k)", "exp(i) * w[i + 1, j]"),
    ("k == i", "sum[i](w[k, i])", "i < N(k)", "sum[i](w[i + 0, i])"),  # bound by the sum
]


def selected(mask: str, value: str, inside: str, read: str) -> bool:
    declared = {"n": "n: i64", "x": "x: f32"}
    terms = []
    for text in (value, read):
        lines = [line for name, line in declared.items() if re.search(rf"\b{name}\b", text)]
        program = parse("\n".join([*lines, f"y[i,j,k,m] = {text}"]))
        terms.append(reading(program.outputs[0].expr))
    return selects(mask, terms[0], inside, terms[1], "k", INTEGERS, SCALARS)


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: " ".join(case))
def test_what_a_mask_selects_is_read_there(case: tuple[str, str, str, str]) -> None:
    assert selected(*case)


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(case))
def test_what_no_mask_selects_is_not(case: tuple[str, str, str, str]) -> None:
    assert not selected(*case)


def test_conditions_are_compared_one_by_one() -> None:
    assert conjuncts("a < 1 and (b < 2 and c < 3)") == conjuncts("a < 1 and b < 2") + conjuncts("c < 3")
    assert conjuncts("a < 1 and b < 2") != conjuncts("b < 2 and a < 1")
    assert len(conjuncts("a < 1 or b < 2")) == 1


EITHER = [
    ("abs(i - k) <= 1", "k == i - 1", "i <= k and k <= i + 1"),
    ("abs(i - k) <= 1", "i <= k and k <= i + 1", "k == i - 1"),
    ("i - 1 <= k and k < i + 2", "k + 1 == i", "i < k + 1 and k - 2 < i"),
    ("2 * i <= k and 2 * i + 2 > k", "k == 2 * i", "k == 2 * i + 1"),
    ("-1 <= k - N(k) + i and k - N(k) + i <= 0", "k == N(k) - i - 1", "k == N(k) - i"),
    ("i <= k and k <= i + 4 and k <= i + 2", "i <= k and k <= i + 1", "k == i + 2"),
]
NOT_EITHER = [
    ("abs(i - k) <= 1", "k == i - 1", "i < k and k <= i + 1"),  # without one
    ("abs(i - k) <= 1", "k == i - 1", "i - 1 <= k and k <= i + 1"),  # one of them twice
    ("abs(i - k) <= 1", "k == i - 1", "i <= k and k <= i + 2"),  # more of them
    ("abs(i - k) < 1", "k == i - 1", "i <= k and k <= i + 1"),
    ("abs(i - k) <= 1", "k == i - 1", "i <= k"),
    ("i <= k", "k == i", "i < k"),  # no window
    ("abs(i - k) <= 1", "j == i - 1", "i <= k and k <= i + 1"),  # of another axis
    ("abs(i - k) <= 1.5", "k == i - 1", "i <= k and k <= i + 1"),
    ("abs(i * k) <= 1", "i * k == -1", "0 <= i * k and i * k <= 1"),
    ("abs(n - k) <= 1", "k == n - 1", "n <= k and k <= n + 1"),  # may be the least integer
    ("abs(ids[i] - k) <= 1", "k == ids[i] - 1", "ids[i] <= k and k <= ids[i] + 1"),
    ("i - 1 <= k or k < i + 2", "k == i - 1", "i <= k and k < i + 2"),
    ("i <= k and k <= i + 1 and j < 3", "k == i", "k == i + 1"),
    ("i <= k and k < i", "k == i", "k == i - 1"),  # none
]


@pytest.mark.parametrize("case", EITHER, ids=lambda case: " | ".join(case))
def test_a_window_is_one_part_or_the_other(case: tuple[str, str, str]) -> None:
    assert is_either(*case, set("ijk").__contains__)


@pytest.mark.parametrize("case", NOT_EITHER, ids=lambda case: " | ".join(case))
def test_other_masks_are_no_two_parts(case: tuple[str, str, str]) -> None:
    assert not is_either(*case, set("ijk").__contains__)


SUMS = [
    ("k", "N(k) * (N(k) - 1) // 2"),
    ("k * k", "(N(k) * (N(k) - 1) // 2) * (2 * N(k) - 1) // 3"),
    ("where(k <= i, 1, 0)", "min(i + 1, N(k))"),
    ("where(k < n, a[i], 0)", "where(0 < min(n, N(k)), a[i] * min(n, N(k)), 0)"),
    ("exp(a[i]) * (2 * k + 1)", "exp(a[i]) * (N(k) * N(k))"),
    ("2.5 * i", "2.5 * i * N(k)"),
]
NO_SUMS = [
    ("k", "N(k) * (N(k) + 1) // 2"),
    ("k * k", "N(k) * (N(k) - 1) // 2"),
    ("where(k <= i, 1, 0)", "i + 1"),  # beyond the last position
    ("where(k < n, 1, 0)", "min(n, N(k))"),  # below 0
    ("where(k < i, 1, 0)", "min(i + 1, N(k))"),
    ("where(2 * k <= i, 1, 0)", "min(i, N(k))"),
    ("where(k < x, 1, 0)", "where(0 < min(x, N(k)), min(x, N(k)), 0)"),  # may be no integer
    ("a[k]", "a[i] * N(k)"),
    ("k * a[i]", "k * a[i]"),
    ("where(k < i, a[i], 0)", "where(0 < min(i, N(k)), b[i] * min(i, N(k)), 0)"),
]


def is_total(summed: str, result: str) -> bool:
    terms = [
        reading(parse(f"n: i64\nx: f32\ny[i,k] = {text} + n * 0 + x * 0").outputs[0].expr)
        for text in (summed, result)
    ]
    body, found = (term.args[0].args[0] for term in terms)
    return totals(body, found, "k", INTEGERS, SCALARS)


@pytest.mark.parametrize(("summed", "result"), SUMS)
def test_a_closed_form_is_compared_with_its_sum(summed: str, result: str) -> None:
    assert is_total(summed, result)


@pytest.mark.parametrize(("summed", "result"), NO_SUMS)
def test_what_is_no_closed_form_is_refused(summed: str, result: str) -> None:
    assert not is_total(summed, result)


RENAMED = [
    ("sum[j](a[i, j] * b[j])", "sum[j_1](a[i, j_1] * b[j_1])"),
    ("sum[j](a[i, j] * b[j])", "sum[l](a[i, l] * b[l])"),  # of the same extent
    ("max[l](a[i, l] + N(l))", "max[j](a[i, j] + N(l))"),
    ("sum[j](b[j] * max[k](a[j, k]))", "sum[j_7](b[j_7] * max[k](a[j_7, k]))"),
    ("sum[j](b[j] * sum[j](b[j]))", "sum[j_1](b[j_1] * sum[j](b[j]))"),
]
NOT_RENAMED = [
    ("sum[j](a[i, j] * b[j])", "sum[k](a[i, k] * b[k])"),  # of another extent
    ("sum[j](a[i, j] * b[j])", "sum[i](a[i, i] * b[i])"),  # captures a free axis
    ("sum[j](b[j] * sum[l](a[j, l]))", "sum[l](b[l] * sum[l](a[l, l]))"),  # bound by the sum inside
    ("sum[j](sum[l](a[j, l]))", "sum[l](sum[l](a[l, l]))"),  # two names become one
    ("sum[j](a[i, j] * b[j])", "sum[j_1](a[i, j_1] * b[i])"),
    ("sum[j](a[i, j] * b[j])", "max[j_1](a[i, j_1] * b[j_1])"),
    ("sum[j](a[i, j] * b[j])", "sum[j_1](c[i, j_1] * b[j_1])"),
    ("sum[j](a[i, j] * N(j))", "sum[j_1](a[i, j_1] * N(j_1))"),  # of which the program has no size
    ("sum[j](a[i, j] * b[j])", "sum[q_1](a[i, q_1] * b[q_1])"),  # of an axis that it has not
    ("sum[j](a[i, j] * b[j])", "sum[x](a[i, x] * b[x])"),  # a scalar
]
NAMES = AxisNames.of(parse("x: f32\nl: axis[j]\ny[i] = sum[j](sum[l](a[i,j] * a[i,l] * x)) + sum[k](b[k])"))


def folds(*texts: str) -> list[Term]:
    copies = "j_1: axis[j]\nj_7: axis[j]\nl: axis[j]\n"
    return [reading(parse(f"{copies}y[i] = {text}").outputs[0].expr) for text in texts]


@pytest.mark.parametrize("case", RENAMED, ids=lambda case: " is ".join(case))
def test_an_axis_may_have_another_name_of_its_extent(case: tuple[str, str]) -> None:
    assert NAMES.is_renamed(*folds(*case))


@pytest.mark.parametrize("case", NOT_RENAMED, ids=lambda case: " is not ".join(case))
def test_no_name_captures_or_has_another_extent(case: tuple[str, str]) -> None:
    assert not NAMES.is_renamed(*folds(*case))


def test_names_of_parts_stay_with_them() -> None:
    """A fold over a part of an axis is none over another part, or over all of another axis."""
    whole, other = folds("sum[j](b[j])", "sum[j_1](b[j_1])")
    part = term("Red", ("sum", "j_1", "A"), other.args)
    assert NAMES.is_renamed(whole, other)
    assert not NAMES.is_renamed(whole, part) and not NAMES.is_renamed(part, whole)


@pytest.mark.parametrize(
    ("mask", "summed", "read"),
    [("j == l", "a[i, j] * b[j]", "a[i, l] * b[l]"), ("l == j", "b[j] + N(j)", "b[l] + N(j)")],
)
def test_the_position_of_an_axis_of_the_same_extent_is_one(mask: str, summed: str, read: str) -> None:
    value, found = (fold.args[0] for fold in folds(f"sum[j]({summed})", f"sum[l]({read})"))
    assert NAMES.selects_one(mask, value, found, "j")
    for wrong in ("j == k", "j <= l", "j == l + 0", "j == x", "j == j"):
        assert not NAMES.selects_one(wrong, value, found, "j")
    assert not NAMES.selects_one(mask, found, value, "j")
    assert not NAMES.selects_one(mask, value, value, "j")


def test_a_closed_form_may_know_that_two_axes_have_one_extent() -> None:
    body, found = (fold.args[0] for fold in folds("sum[j](where(j <= i, 1, 0))", "sum[j](i + 1)"))
    assert totals(body, found, "j", (), (), ("i",))
    assert not totals(body, found, "j", (), (), NAMES.alike("j"))
    assert NAMES.alike("j") == {"l"} and not NAMES.alike("k")


BEST = "argmax[v](s[i, v] * u[v])"
FOUND = [
    (f"k == {BEST}", "w[k, j]", f"(0 <= {BEST}) & ({BEST} < N(k))", f"w[{BEST}, j]"),
    (f"{BEST} == k", "w[k, j] * k", f"(0 <= {BEST}) & ({BEST} < N(k))", f"w[{BEST}, j] * {BEST}"),
]
NOT_FOUND = [
    (f"k <= {BEST}", "w[k, j]", f"(0 <= {BEST}) & ({BEST} < N(k))", f"w[{BEST}, j]"),  # holds at several
    (
        f"k == {BEST}",
        "w[k, j]",
        f"(0 <= {BEST}) & ({BEST} < N(j))",
        f"w[{BEST}, j]",
    ),  # inside of another axis
    (f"k == {BEST}", "w[k, j]", f"{BEST} < N(k)", f"w[{BEST}, j]"),
    (
        f"k == {BEST}",
        "w[k, j]",
        f"(0 <= {BEST}) & ({BEST} < N(k))",
        "w[argmax[v](s[i, v]), j]",
    ),  # another position
    (f"k == {BEST}", "w[k, j]", f"(0 <= {BEST}) & ({BEST} < N(k))", f"z[{BEST}, j]"),
    (f"k == {BEST}", "w[k, k]", f"(0 <= {BEST}) & ({BEST} < N(k))", f"w[{BEST}, k]"),
    (f"k == {BEST}", "sum[i](w[k, i])", f"(0 <= {BEST}) & ({BEST} < N(k))", f"sum[i](w[{BEST}, i])"),  # bound
    ("k == sum[v](v)", "k * z[i, j]", "(0 <= sum[v](v)) & (sum[v](v) < N(k))", "sum[v](v) * z[i, j]"),
    (
        "k == max[v](s[i, v])",
        "k * z[i, j]",
        "(0 <= max[v](s[i, v])) & (max[v](s[i, v]) < N(k))",
        "max[v](s[i, v]) * z[i, j]",
    ),
    (
        "k == argmax[v](s[k, v])",
        "w[k, j]",
        "(0 <= argmax[v](s[k, v])) & (argmax[v](s[k, v]) < N(k))",
        "w[argmax[v](s[k, v]), j]",
    ),
]


def found(mask: str, value: str, inside: str, read: str) -> bool:
    sides = [f"where({mask}, 1, 0)", value, f"where({inside}, 1, 0)", read]
    one, two, three, four = (reading(parse(f"y[i,j,k] = {text}").outputs[0].expr) for text in sides)
    return selects_computed(one.args[0], two, three.args[0], four, "k")


@pytest.mark.parametrize("case", FOUND, ids=lambda case: " ".join(case))
def test_what_a_reduction_finds_is_read_there(case: tuple[str, str, str, str]) -> None:
    assert found(*case)


@pytest.mark.parametrize("case", NOT_FOUND, ids=lambda case: " ".join(case))
def test_what_no_reduction_finds_is_not(case: tuple[str, str, str, str]) -> None:
    assert not found(*case)


def test_the_text_of_a_load_is_looked_into() -> None:
    """As the program's own loads are."""
    (output,) = parse(f"y[i,j] = w[{BEST}, j]").outputs
    made = reading(output.expr, indices=True)
    assert computed_load(str(output.expr)) is made and made.head == "Apply1"
    assert computed_load("w[i, j]") is None and computed_load("exp(w[i, j])") is None
