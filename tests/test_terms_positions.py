"""What stands with positions holds integers, unless it is declared otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BindError, TypeCheckError
from eqfuse.terms.parser import parse
from eqfuse.terms.types import program_dtypes

ATTENTION = """
T[h,j] = where(j < {bound}, sum[d](Q[h,d] * K[h,j,d]), -inf)
P[h,j] = exp(T[h,j] - max[j](T[h,j]))
O[h,e] = sum[j](P[h,j] / sum[j](P[h,j]) * V[h,j,e])
"""


def integers(source: str) -> set[str]:
    program = parse(source)
    assert set(program.integers) <= set(program.scalars)
    dtypes = program_dtypes(program)
    return {name for name in dtypes if dtypes[name] in ("i32", "i64")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("y[i] = sum[j](where(j < L, x[i,j], 0))", {"L"}),
        ("y[b] = sum[j](where(len[b] > j, x[b,j], 0))", {"len"}),
        ("y[b] = sum[j](where(j - first[b] <= w, x[b,j], 0))", {"first", "w"}),
        ("y[b] = sum[j](where(j < 2 * L + m, x[b,j], 0))", {"L", "m"}),
        ("y[b] = sum[j](where(j < min(L, b + w), x[b,j], 0))", {"L", "w"}),
        ("y[b] = sum[j](where(j < where(x[b,0] > 0, L, len[b]), x[b,j], 0))", {"L", "len"}),
        ("y[i] = sum[c](where(label[i] == c, x[i,c], 0))", {"label"}),
        ("y[i] = sum[k](where(argmax[j](x[i,j]) == t[i], z[k], 0))", {"t"}),
        ("y[i] = sin((i + offset) * freq)", {"offset"}),
        ("y[i] = x[i, off[i] // g + s]", {"off", "g", "s"}),
        ("y[i] = sum[j](where(j % r == 1, x[i,j], 0))", {"r"}),
        ("y[i] = sum[j](where(j // r[i] == 1, x[i,j], 0))", {"r"}),
        ("L: i32\ny[i] = sum[j](where(x[i,j] < L, x[i,j], 0))", {"L"}),
    ],
)
def test_names_that_stand_with_positions_are_integers(source: str, expected: set[str]) -> None:
    assert integers(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "y[h,i,j] = s[h,i] * c + slope[h] * (j - i)",
        "y[i] = sum[j](where(j < share * N(j), x[i,j], 0))",
        "L: f32\ny[i] = sum[j](where(j < L, x[i,j], 0))",
        "len: f64[b]\ny[b] = sum[j](where(j < len[b], x[b,j], 0))",
        "c = sum[j](j * x[j]) / sum[j](x[j])\ny[i] = c + b[i]",
        "y[i] = (i + 0.5) - t",
        "y[i] = where(pos[i] < limit, x[i], 0)",
        "y[i] = sum[j](x[i,j]) / (N(j) - correction)",
        "y[i] = exp(x[i]) + i",
        "y[i] = max[j](x[i,j]) + i",
    ],
)
def test_what_is_weighed_or_declared_real_stays_real(source: str) -> None:
    assert integers(source) == set()


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
@pytest.mark.slow(but=["rolling"])
def test_an_undeclared_bound_cuts_the_loop(prefer: str) -> None:
    """Positions beyond it are not read: what is NaN there does not reach the output."""
    bound = 21
    q, k, v = torch.randn(2, 8), torch.randn(2, 64, 8), torch.randn(2, 64, 8)
    inside = eq.reference(ATTENTION.format(bound="L"))(Q=q, K=k[:, :bound], V=v[:, :bound], L=bound)
    v[:, bound:] = torch.nan
    undeclared = eq.compile(ATTENTION.format(bound="L"), target="cpu", prefer=prefer)
    declared = eq.compile("L: i64\n" + ATTENTION.format(bound="L"), target="cpu", prefer=prefer)
    found = undeclared(Q=q, K=k, V=v, L=bound)
    torch.testing.assert_close(found, torch.as_tensor(inside, dtype=torch.float32))
    declared(Q=q, K=k, V=v, L=bound)
    assert undeclared.tile == declared.tile and "minimum" in str(undeclared.tile)


def test_an_undeclared_tensor_of_lengths_is_integers() -> None:
    source = "y[b] = sum[j](where(j < len[b], x[b,j], 0))"
    x, lengths = torch.randn(3, 9), torch.tensor([4, 0, 9])
    kernel = eq.compile(source, target="cpu")
    expected = [x[b, :n].sum() for b, n in enumerate(lengths.tolist())]
    torch.testing.assert_close(kernel(x=x, len=lengths), torch.stack(expected))
    torch.testing.assert_close(kernel(x=x, len=lengths.int()), torch.stack(expected))


def test_a_real_tensor_in_place_of_integers_is_an_error() -> None:
    kernel = eq.compile("y[b] = sum[j](where(j < len[b], x[b,j], 0))", target="cpu", verify=False)
    with pytest.raises(TypeCheckError) as caught:
        kernel(x=torch.ones(2, 3), len=torch.ones(2))
    assert str(caught.value) == (
        "'len' is compared with a position, so it holds integers; the tensor given is f32 (line 1)\n"
        "    y[b] = sum[j](where(j < len[b], x[b,j], 0))\n"
        "                        ^^^^^^^^^^\n"
        "convert it to integers, or declare it: len: f32[b]"
    )
    with pytest.raises(TypeCheckError, match="'len' is compared with a position"):
        eq.reference("y[b] = sum[j](where(j < len[b], x[b,j], 0))")(x=np.ones((2, 3)), len=np.ones(2))


def test_a_fraction_in_place_of_an_integer_is_an_error() -> None:
    kernel = eq.compile("y[i] = sum[j](where(j < L, x[i,j], 0))", target="cpu", verify=False)
    with pytest.raises(BindError) as caught:
        kernel(x=torch.ones(2, 3), L=2.5)
    assert str(caught.value).endswith(
        "it is compared with a position: j < L; if it is none, declare it: L: f32"
    )
    assert kernel(x=torch.ones(2, 3), L=2.0).tolist() == [2, 2]


def test_a_bound_that_is_declared_real_may_be_a_fraction() -> None:
    kernel = eq.compile("L: f32\ny[i] = sum[j](where(j < L, x[i,j], 0))", target="cpu")
    assert kernel(x=torch.ones(2, 9), L=2.5).tolist() == [3, 3]


def test_an_index_that_is_declared_real_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match=r"an index of 'x' is a real number: i \+ s"):
        eq.compile("s: f32\ny[i] = where(i < 2, x[i + s], 0)", target="cpu")


@pytest.mark.slow
def test_states_of_a_stream_that_meet_positions_stay_real() -> None:
    source = "y[i] = sum[j](x[i,j]) + i"
    x = torch.randn(3, 8)
    kernel = eq.compile(source, target="cpu")
    state = kernel.update(kernel.update(kernel.init(), x=x[:, :5]), x=x[:, 5:])
    torch.testing.assert_close(kernel.finish(state), x.sum(1) + torch.arange(3))
