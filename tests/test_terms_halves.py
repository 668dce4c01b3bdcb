"""Axes that are half of a dimension, or what a scalar leaves of it: sizes, ranges, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BindError
from eqfuse.terms.bounds import longer_dimensions
from eqfuse.terms.parser import parse

GLU = "y[b,c] = x[b,c] * sigmoid(x[b,c+N(c)])"
ROPE = """
low[l,c] = x[l,c] * cs[l,c] - x[l,c+N(c)] * sn[l,c]
high[l,c] = x[l,c+N(c)] * cs[l,c] + x[l,c] * sn[l,c]
"""


def test_a_gate_is_the_other_half() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    kernel = eq.compile(GLU, target="cpu", native="off")
    y = kernel(x=x)
    expected = torch.nn.functional.glu(x)
    torch.testing.assert_close(y, expected)
    weights = torch.randn(3, 4, dtype=torch.float64)
    grads = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (y, expected)]
    torch.testing.assert_close(*grads)
    assert kernel.certificate.ok and kernel.backward.certificate.ok


def test_rotary_by_halves() -> None:
    rng = np.random.default_rng(0)
    x, cs, sn = (rng.standard_normal(shape) for shape in ((5, 8), (5, 4), (5, 4)))
    low, high = eq.compile(ROPE, target="cpu", native="off")(x=x, cs=cs, sn=sn)
    np.testing.assert_allclose(low, x[:, :4] * cs - x[:, 4:] * sn)
    np.testing.assert_allclose(high, x[:, 4:] * cs + x[:, :4] * sn)


def test_what_a_scalar_is_behind() -> None:
    x = np.random.default_rng(0).standard_normal((3, 8))
    kernel = eq.compile("y[b,c] = x[b,c] - x[b,c+h]", target="cpu", native="off")
    np.testing.assert_allclose(kernel(x=x, h=3), x[:, :5] - x[:, 3:])
    np.testing.assert_allclose(kernel(x=x, h=6), x[:, :2] - x[:, 6:])


@pytest.mark.parametrize(
    ("program", "given", "positions"),
    [
        (GLU, {"sizes": {"c": 5}}, "5 to 9"),
        ("y[b,c] = x[b,c] * w[c] + x[b,c+N(c)]", {"w": np.ones(5)}, "5 to 9"),
        ("y[b,c] = x[b,c] + x[b,c+h]", {"h": 3, "sizes": {"c": 6}}, "3 to 8"),
        ("y[b,c] = x[b,c] + x[b,c+h]", {"h": -1}, "-1 to 6"),
        ("y[b,c] = x[b,c] + x[b,c+2*N(c)]", {"sizes": {"c": 3}}, "6 to 8"),
    ],
)
def test_a_read_behind_the_end_is_an_error(program: str, given: dict[str, object], positions: str) -> None:
    kernel = eq.compile(program, target="cpu", native="off")
    with pytest.raises(
        BindError, match=f"reads positions {positions} of dimension 1 of 'x', which has size 8"
    ):
        kernel(x=np.ones((3, 8)), **given)


def test_half_of_a_dimension_is_told_from_other_parts() -> None:
    assert not eq.equivalent(GLU, GLU.replace("c+N(c)", "c+N(c)-1")).ok
    assert not eq.equivalent(GLU, "y[b,c] = x[b,c+N(c)] * sigmoid(x[b,c])").ok
    assert eq.equivalent(GLU, "y[b,c] = x[b,c] / (1 + exp(-x[b,N(c)+c]))").ok


@pytest.mark.parametrize(
    "program",
    [
        "y[b,c] = x[b,c] + where(c + N(c) - 1 < m, x[b,c+N(c)-1], 0)",
        "y[b,c] = x[b,c] + where(c + h < N(c), x[b,c+h], 0)",
        "y[b,c] = x[b,c] + x[b,N(c)-1-c]",
        "y[h,r] = x[h*g + r] + x[r]",
    ],
)
def test_what_is_guarded_or_no_step_ahead_leaves_the_axis_its_dimension(program: str) -> None:
    assert not longer_dimensions(parse(program))


@pytest.mark.parametrize(
    "condition", ["c - N(c) < 3", "c + 2 > N(c) - 1", "(c != N(c) - 1) != (x[b,c] > 0)", "c + N(c) < 6"]
)
def test_no_condition_keeps_a_read_behind_the_end_in_a_dimension_as_long_as_the_axis(condition: str) -> None:
    source = f"y[b,c] = where({condition}, x[b,c] - x[b,c+N(c)], 0)"
    x = np.random.default_rng(0).standard_normal((3, 8))
    kernel = eq.compile(source, target="cpu", native="off")
    positions = np.arange(4)
    holds = {
        "c - N(c) < 3": np.ones((3, 4), bool),
        "c + 2 > N(c) - 1": np.tile(positions + 2 > 3, (3, 1)),
        "(c != N(c) - 1) != (x[b,c] > 0)": (positions != 3) != (x[:, :4] > 0),
        "c + N(c) < 6": np.tile(positions + 4 < 6, (3, 1)),
    }[condition]
    np.testing.assert_allclose(kernel(x=x), np.where(holds, x[:, :4] - x[:, 4:], 0))


def test_no_guard_is_advised_that_never_holds() -> None:
    with pytest.raises(BindError, match="the dimension has the size of 'c', which it is declared with"):
        eq.compile(f"x: f32[b,c]\n{GLU}", target="cpu", native="off")


def test_a_gradient_names_the_size_of_a_half_by_another_axis() -> None:
    source = "x: f32[i]\nH: f32[i2]\ny: f32[j]\na[i] = sum[j](H[i] - H[i + N(i)])\nb = sum[j](y[j])\nc[i] = sum[j](a[i] * x[i])\nreturn b, c"
    x, halves, y = (torch.randn(n, requires_grad=True) for n in (3, 6, 2))
    b, c = eq.compile(source, native="off")(x=x, H=halves, y=y)
    (b + c.sum()).backward()
    assert halves.grad is not None
    torch.testing.assert_close(halves.grad, 4 * torch.cat([x, -x]).detach())


DECLARED = """
x: f32[b, d]
c: axis[{half}]
y[b,c] = x[b,c] * sigmoid(x[b,c+{half}])
"""


@pytest.mark.parametrize("half", ["N(d) // 2", "N(x, 1) // 2", "N(x, -1) // 2"])
def test_a_half_of_a_declared_dimension(half: str) -> None:
    text = DECLARED.format(half=half)
    kernel = eq.compile(text, target="cpu", native="wait")
    for size in (8, 7):
        x = torch.randn(3, size, requires_grad=True)
        y = kernel(x=x)
        expected = x[:, : size // 2] * torch.sigmoid(x[:, size // 2 : size // 2 * 2])
        torch.testing.assert_close(y, expected)
        weights = torch.randn_like(y)
        grads = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (y, expected)]
        torch.testing.assert_close(*grads)
    assert kernel.certificate.ok and kernel.backward.certificate.ok
    compiled = torch.compile(kernel, fullgraph=True, backend="eager", dynamic=True)
    x = torch.randn(2, 10)
    torch.testing.assert_close(compiled(x=x), torch.nn.functional.glu(x))
    assert eq.equivalent(text, text.replace("axis[", "axis[0:")).ok
    assert not eq.equivalent(text, text.replace("x[b,c+", "x[b,c+1+0*")).ok


@pytest.mark.parametrize(
    ("line", "message", "under"),
    [
        ("c: axis[1:N(d)//2]", "positions of an axis are counted from 0", "1:N(d)//2"),
        ("c: axis[0:N(d):2]", "positions of an axis are counted from 0", "0:N(d):2"),
        ("c: axis[:N(x,2)//2]", "'x' has no dimension 2", "2"),
        ("c: axis[N(x,k)//2]", "'x' has no dimension k", "k"),
        ("c: axis[N(z,1)//2]", "the dimensions of 'z' have no names", "z"),
        ("c: axis[0:N(d)/2]", "an extent is made of sizes of axes and integers", "N(d)/2"),
    ],
)
def test_an_extent_that_cannot_be_is_shown(line: str, message: str, under: str) -> None:
    with pytest.raises(eq.EqfuseError) as found:
        parse(f"x: f32[b, d]\n{line}\ny[b,c] = x[b,c] * 2\n")
    assert message in str(found.value)
    text, carets = str(found.value).splitlines()[1:3]
    at = carets.index("^")
    assert text[at : at + carets.count("^")].startswith(under[0]) and under in text


def test_a_condition_on_a_quotient_keeps_a_whole_tile_inside() -> None:
    """A tile within which the quotient does not change reads one element, which is there where the condition holds."""
    source = "l: axis[N(c, 1)]\nout[j, k] = where(k < 2 * N(l), x[j, k] * c[j, k // 2], x[j, k])"
    kernel = eq.compile(source, target="cpu", native="off")
    x, c = torch.randn(6, 8), torch.randn(6, 3)
    expected = torch.cat([x[:, :6] * c.repeat_interleave(2, -1), x[:, 6:]], 1)
    torch.testing.assert_close(kernel(x=x, c=c), expected)
