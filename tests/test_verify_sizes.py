"""Sizes to verify at fit every index of a program; what no sizes fit is an error of the program."""

from __future__ import annotations

import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BindError
from eqfuse.terms.bounds import reads_outside
from eqfuse.terms.parser import parse
from eqfuse.verify.sizes import small_extents, small_shapes

CONVOLUTION = "z = sum[j](x[j])\ny[i] = sum[k](x[i+k] * w[k]) / z\nreturn y"


@pytest.mark.parametrize(
    "text",
    [
        CONVOLUTION,
        CONVOLUTION.replace("i+k", "2*i+k"),
        CONVOLUTION.replace("i+k", "(i+k)//2"),
        CONVOLUTION.replace("i+k", "(3*i+k)%4"),
        "z = sum[j](x[j] * u[j])\ny[i] = sum[k](x[i+k] * u[k+i+2]) / z",
        "z = sum[j](x[j])\ny[i] = x[N(j)-N(i)+i-3] + z",
        "y[i] = x[i] + x[10]",
        "y[i] = where(i > 1, where(i > 2, x[i-3], x[i-2]), 0) + x[i]",
        "y[i] = x[i] + x[max(i-1, 0)] + x[N(i)-1-i]",
        "y[i] = sum[j](x[j]) + where(i + 1 < N(i), x[i+1], 0) * x[i]",
    ],
)
def test_every_read_is_inside_at_the_sizes_used(text: str) -> None:
    program = parse(text)
    extents = small_extents(program)
    assert not list(reads_outside(program, small_shapes(program, extents), extents, {}))
    assert eq.compile(text, target="cpu").certificate.ok


def test_a_convolution_over_a_normalised_tensor_runs() -> None:
    x, w = torch.arange(5.0), torch.tensor([1.0, -2.0])
    found = eq.compile(CONVOLUTION, target="cpu")(x=x, w=w, sizes={"i": 4})
    assert torch.allclose(found, (x[:4] - 2 * x[1:]) / x.sum())


@pytest.mark.parametrize(
    ("read", "guard"),
    [
        ("x[i + 1]", "i + 1 < N(i)"),
        ("x[i - 1]", "i - 1 >= 0"),
        ("x[2 * i]", "2 * i < N(i)"),
        ("x[N(i) - i]", "N(i) - i < N(i)"),
        ("x[2 * i - 1]", "(2 * i - 1 >= 0) & (2 * i - 1 < N(i))"),
    ],
)
def test_a_read_that_no_sizes_fit_is_an_error(read: str, guard: str) -> None:
    text = f"y[i] = {read} + x[i]"
    with pytest.raises(BindError) as caught:
        eq.compile(text, target="cpu")
    assert str(caught.value) == (
        f"{read} reads outside dimension 0 of 'x', whatever its size (line 1)\n"
        f"    {text}\n"
        f"           {'^' * len(read)}\n"
        f"guard the read: where({guard}, {read}, 0)"
    )
    x = torch.randn(5)
    guarded = f"y[i] = where({guard}, {read}, 0) + x[i]"
    found = eq.compile(guarded, target="cpu")(x=x)
    assert torch.allclose(found, torch.from_numpy(eq.reference(guarded)(x=x)).float())


def test_without_verification_the_call_names_the_read() -> None:
    kernel = eq.compile("y[i] = x[i + 1] + x[i]", target="cpu", verify=False)
    with pytest.raises(BindError, match="reads positions 1 to 5 of dimension 0 of 'x', which has size 5"):
        kernel(x=torch.randn(5))


def test_every_axis_has_several_blocks_but_a_column_of_products() -> None:
    """A block of a grid axis that starts at the wrong position is seen only where there is a second one."""
    two = small_extents(parse("y[i,k] = sum[j](x[i,j] * w[j,k])"))
    assert min(two["i"], two["k"]) > 2
    alike = small_extents(parse("y[a,b,c] = x[a,b,c] + 1"))
    assert min(alike.values()) > 2
    heads = small_extents(
        parse("s[h,i,j] = sum[d](q[h,i,d] * k[h//2,j,d])\ny[h,i,e] = sum[j](exp(s[h,i,j]) * v[h//2,j,e])")
    )
    assert heads["e"] == 2 and sorted(heads.values()) == [2, 3, 5, 7, 11]
    assert heads["j"] < heads["d"]  # more is computed along j
