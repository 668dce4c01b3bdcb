"""The conditions under which elements are read: those of every place, and one or another of the places'."""

from __future__ import annotations

import re

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.loops.guards import Guards, follows, kept, places
from eqfuse.terms.nodes import Expr, Load
from eqfuse.terms.parser import parse

HALVES = """
j_rest: axis[2]
m_1: axis[m]
h_1: axis[h]
u[h,l,m] = q[h,l,m] + where(m < 4, -q[h,l,m+4], q[h,l,m-4])
d[k,m] = sum[j_rest](where(k*2 + j_rest < N(h_1), sum[l](w[k,l] * u[k*2 + j_rest,l,m+4]), 0))
e[k,m] = sum[j_rest](where(k*2 + j_rest < N(h_1), sum[l](w[k,l] * u[k*2 + j_rest,l,m]), 0))
y[k,m] = where(m + 4 < N(m_1) and not m + 4 < 4, d[k,m], 0) + e[k,m] + sum[h,l](0 * q[h,l,m])
return y
"""


def test_an_element_that_is_read_in_two_places_is_read_where_either_condition_holds() -> None:
    rng = np.random.default_rng(0)
    given = {"q": rng.standard_normal((4, 3, 8)), "w": rng.standard_normal((2, 3))}
    kernel = eq.compile(HALVES, native="off", target="cpu")
    np.testing.assert_allclose(kernel(**given), eq.reference(HALVES)(**given), rtol=1e-12)


def test_what_neither_condition_keeps_inside_is_an_error() -> None:
    wrong = HALVES.replace("m + 4 < N(m_1) and not m + 4 < 4", "m < 5")
    kernel = eq.compile(wrong, native="off", target="cpu", verify=False)
    with pytest.raises(eq.EqfuseError, match="reads positions 4 to 8 of dimension 2"):
        kernel(q=np.ones((4, 3, 8)), w=np.ones((2, 3)))


def shifted(node: Expr) -> bool:
    return isinstance(node, Load) and str(node) == "x[i + 1]"


def keeping(program: str) -> Guards:
    ((load, found),) = places(parse(program), shifted).items()
    return kept(load, found)


def test_conditions_of_places() -> None:
    two = "y[i] = where(i < 3 and p[i] > 0, x[i+1], 0) + where(i > 5 and p[i] > 0, x[i+1], x[i])"
    shared, either = keeping(two)
    assert str(shared) == "p[i] > 0" and str(either) == "i < 3 or i > 5"
    conditions = [keeping(f"y[i] = where({c}, x[i+1], 0)") for c in ("i < 3", "i < 4", "i > 5")]
    assert [follows(either, known) for known in conditions] == [True, False, True]
    assert keeping("y[i] = where(i < 3, x[i+1], 0) + x[i+1]") == ()


ROWS = "i: i64[j,m]\nout[j,m] = where(j < 1, x[0,m,i[0,m]], where(j < 2, x[1,m,i[1,m]], x[2,m,i[2,m]]))"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_row_that_is_a_number_is_read_where_its_condition_holds(rows: int) -> None:
    """Where one row alone is wanted there may be one alone: the others are behind the end."""
    rng = np.random.default_rng(0)
    x, i = rng.standard_normal((3, 5, 7)), rng.integers(0, 7, (rows, 5))
    found = eq.compile(ROWS, target="cpu", native="off")(x=x, i=i)
    np.testing.assert_array_equal(found, [x[n, np.arange(5), i[n]] for n in range(rows)])


SUMS = """
x: f64[m, l, j]
n: axis[N(x, 0)]
y[n,j] = where(n == 3, sum[l](x[3,l,j]), where(n == N(x, 0) - 2, sum[l](x[N(x, 0) - 2,l,j]), sum[l](x[0,l,j])))
"""


@pytest.mark.parametrize("native", ["off", "wait"])
@pytest.mark.parametrize("rows", [5, 2, 1, 0])
def test_a_sum_that_is_computed_by_itself_reads_no_row_behind_the_end(rows: int, native: str) -> None:
    """The sums have no `n`, and the conditions on it are not theirs: there may be no rows 3, N - 2 and 0."""
    x = np.random.default_rng(0).standard_normal((rows, 3, 5))
    at = [3 if n == 3 else n if n == rows - 2 else 0 for n in range(rows)]
    np.testing.assert_allclose(eq.compile(SUMS, target="cpu", native=native)(x=x), x[at].sum(1), rtol=1e-12)


def masks(program: str) -> list[str]:
    text = str(eq.compile(program, target="cpu", native="off").tile)
    return [line.split(" = ")[1] for line in text.splitlines() if re.search(r": bool = .*size", line)]


def test_a_read_is_compared_with_the_end_where_its_conditions_are_lost_alone() -> None:
    sums = "x: f32[m,l]\nn: axis[N(x, 0)]\ny[n] = where(n == 3, sum[l](x[3,l]), 0)"
    assert masks(sums) == ["3 < m_size"]
    assert (
        masks(sums + " + sum[l](x[3,l])") == []
    )  # which no condition keeps inside: the program reads it for certain
    assert masks("m: axis[5]\n" + sums + " + sum[m](w[m])") == []  # it has 5 rows
    assert masks(sums.replace("n: axis[N(x, 0)]\n", "") + " + z[n]") == ["3 < m_size"]
