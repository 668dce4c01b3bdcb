"""Axes whose extents are made of those of others: `r: axis[N(n) + 1]`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BindError, ParseError, TypeCheckError
from eqfuse.operator.shapes import extents
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import show_program
from eqfuse.terms.sizes import bind
from eqfuse.verify.sizes import small_extents

WIDER = """
r: axis[N(n) + 1]
wide[i, r] = where(r < N(n), x[i, r + 0], s[i])
m[i] = max[r](wide[i, r])
y[i, n] = exp(x[i, n] - m[i]) / sum[r](exp(wide[i, r] - m[i]))
return y
"""
HALVES = """
x: f32[l, d]
p: axis[N(l) // 2]
t[l] = sum[d](exp(x[l, d]))
y = sum[p](t[p + 0] * log(t[p + N(l) // 2]))
"""


def test_an_extent_is_made_of_others() -> None:
    program = parse(WIDER)
    assert bind(program, {"x": (2, 5), "s": (2,)})["r"] == 6
    assert parse(show_program(program)).computed == program.computed
    assert bind(parse(HALVES), {"x": (7, 3)})["p"] == 3
    assert extents(program, {"x": (2, 5), "s": (2,)}, {})["r"] == 6
    chained = parse(
        "a: axis[N(i) * 2]\nb: axis[N(a) - 1]\nc: axis[b]\ny[a, b, c] = x[0] + a + b + c\nz = sum[i](x[i])"
    )
    assert bind(chained, {"x": (3,)}) == {"i": 3, "a": 6, "b": 5, "c": 5}


def test_sizes_to_verify_at_obey_the_declaration() -> None:
    found = small_extents(parse(WIDER))
    assert found["r"] == found["n"] + 1
    found = small_extents(parse(HALVES))
    assert found["p"] == found["l"] // 2 > 1


@pytest.mark.parametrize(
    ("declared", "error", "message"),
    [
        ("r: axis[N(r) + 1]", ParseError, "is made of that of 'r'"),
        ("r: axis[N(n) / 2]", ParseError, "made of sizes of axes and integers"),
        ("r: axis[N(n) + s]", ParseError, "made of sizes of axes and integers"),
        ("r: axis[3 - 4]", ParseError, "has no positions"),
        ("r: axis[N(n)]\nr: axis[3]", ParseError, "declared twice"),
    ],
)
def test_what_no_extent_is_made_of(declared: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(f"{declared}\ny[r] = sum[n](x[n]) + r")


def test_a_size_that_disagrees_is_an_error() -> None:
    program = parse("r: axis[N(n) - 4]\ny[n, r] = x[n] * w[r]")
    assert bind(program, {"x": (6,), "w": (2,)})["r"] == 2
    with pytest.raises(BindError, match="'r' is declared to have N.n. - 4 positions, which are 3 here"):
        bind(program, {"x": (7,), "w": (2,)})
    with pytest.raises(BindError, match="which are -1 here"):
        bind(program, {"x": (3,), "w": (2,)})


def test_a_softmax_with_one_more_term_and_its_gradient() -> None:
    kernel = eq.compile(WIDER, native="off")
    x, s = (torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((3, 6), (3,)))
    made = kernel(x=x, s=s)
    expected = torch.softmax(torch.cat([x, s[:, None]], 1), 1)[:, :-1]
    torch.testing.assert_close(made, expected)
    weights = torch.randn(3, 6, dtype=torch.float64)
    grads = [torch.autograd.grad((out * weights).sum(), (x, s)) for out in (made, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    assert kernel.certificate.ok and kernel.backward.certificate.ok


def test_halves_of_a_definition_and_their_gradient() -> None:
    kernel = eq.compile(HALVES, native="off")
    x = torch.randn(7, 3, requires_grad=True)
    t = torch.exp(x).sum(1)
    made, expected = kernel(x=x), (t[:3] * torch.log(t[3:6])).sum()
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, x)[0] for out in (made, expected)))


def test_an_axis_of_definitions_has_the_size_that_they_are_written_with() -> None:
    """Once they are written out at computed positions, no tensor is read along it."""
    program = parse("a[i] = sum[d](x[i, d])\ny[j] = a[j + 0] + a[j + N(i) - N(j)] + w[j]")
    assert bind(program, {"x": (5, 2), "w": (3,)}) == {"i": 5, "d": 2, "j": 3}
    made = eq.compile(program.source, native="off")(x=np.ones((5, 2)), w=np.zeros(3))
    np.testing.assert_allclose(made, [4, 4, 4])


def test_an_axis_as_long_as_a_dimension() -> None:
    program = parse("j: axis[N(x, 1)]\nr: axis[N(j) + 1]\ny[i, r] = where(r < N(j), x[i, r + 0], s[i])")
    assert bind(program, {"x": (2, 5), "s": (2,)})["r"] == 6
    assert parse(show_program(program)).tensors == program.tensors
    same = parse("j: axis[N(x, 0)]\ny[i, j] = x[i] * x[j + 0]")
    assert bind(same, {"x": (4,)}) == {"i": 4, "j": 4}


@pytest.mark.parametrize(
    ("declared", "error", "message"),
    [
        ("j: axis[N(z, 0)]", ParseError, "'z' is no tensor that is given"),
        ("j: axis[N(x, 2)]", TypeCheckError, "'x' has no dimension 2"),
    ],
)
def test_an_axis_as_long_as_no_dimension(declared: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(f"{declared}\ny[i, j] = x[i, j + 0]")
