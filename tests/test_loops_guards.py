"""The conditions under which elements are read: those of every place, and one or another of the places'."""

from __future__ import annotations

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.loops.guards import follows, keeping
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


def test_conditions_of_places() -> None:
    two = parse("y[i] = where(i < 3 and p[i] > 0, x[i+1], 0) + where(i > 5 and p[i] > 0, x[i+1], x[i])")
    ((shared, either),) = keeping(two, shifted).values()
    assert str(shared) == "p[i] > 0" and str(either) == "i < 3 or i > 5"
    conditions = [
        next(iter(keeping(parse(f"y[i] = where({c}, x[i+1], 0)"), shifted).values()))
        for c in ("i < 3", "i < 4", "i > 5")
    ]
    assert [follows(either, known) for known in conditions] == [True, False, True]
    assert keeping(parse("y[i] = where(i < 3, x[i+1], 0) + x[i+1]"), shifted).popitem()[1] == ()


ROWS = "i: i64[j,m]\nout[j,m] = where(j < 1, x[0,m,i[0,m]], where(j < 2, x[1,m,i[1,m]], x[2,m,i[2,m]]))"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_row_that_is_a_number_is_read_where_its_condition_holds(rows: int) -> None:
    """Where one row alone is wanted there may be one alone: the others are behind the end."""
    rng = np.random.default_rng(0)
    x, i = rng.standard_normal((3, 5, 7)), rng.integers(0, 7, (rows, 5))
    found = eq.compile(ROWS, target="cpu", native="off")(x=x, i=i)
    np.testing.assert_array_equal(found, [x[n, np.arange(5), i[n]] for n in range(rows)])
