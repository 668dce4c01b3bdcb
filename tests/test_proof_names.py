"""Terms under other names of axes: what the checker compares, and reads of temporaries."""

from __future__ import annotations

import pytest

from eqfuse.proof.elaborate import normal, opened, reading, with_axes, with_exponents_as_sums, without_names
from eqfuse.proof.syntax import Term
from eqfuse.terms.parser import parse


def _reading(text: str) -> Term:
    return opened(reading(parse(f"y[i,j] = {text}").outputs[0].expr))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("sum[k](x[i,k] * exp(z[k,j]))", "sum[l](x[i,l] * exp(z[l,j]))", True),
        ("sum[k](x[i,k] * sum[l](z[k,l]))", "sum[l](x[i,l] * sum[k](z[l,k]))", True),
        ("sum[k](x[i,k] * sum[l](z[k,l]))", "sum[l](x[i,l] * sum[k](z[k,l]))", False),
        ("sum[k](x[i,k] * x[j,k])", "sum[k](x[i,k] * x[i,k])", False),
        ("sum[k](exp((x[i,k] - z[k,j]) * w[i]))", "sum[k](exp(w[i] * x[i,k] - z[k,j] * w[i]))", True),
        ("sum[k](exp((x[i,k] - z[k,j]) * w[i]))", "sum[k](exp(w[i] * x[i,k] + z[k,j] * w[i]))", False),
    ],
)
def test_terms_without_the_names_of_bound_axes(left: str, right: str, same: bool) -> None:
    made = [with_exponents_as_sums(without_names(normal(_reading(text)), "axis_")) for text in (left, right)]
    assert (normal(made[0]) is normal(made[1])) is same


def test_a_temporary_at_the_positions_of_other_axes() -> None:
    """A fold that would capture a name is over another axis."""
    stored = _reading("sum[k](x[i,k] * z[k,j])")
    found = with_axes(stored, {"i": "k", "j": "i"}, {"k": "k", "l": "k"})
    assert found.words == ("sum", "l", "ALL")
    assert "z[l, i]" in repr(found) and "x[k, l]" in repr(found)
    new = with_axes(stored, {"i": "k"}, {"k": "k"})
    assert "x[k, k_1]" in repr(new)
