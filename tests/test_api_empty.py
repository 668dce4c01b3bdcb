"""Axes without positions, and integers under masks: identities are those of the dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BindError
from eqfuse.tile.triton.launch import interpret

I32, I64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("max", torch.int32, I32.min),
        ("min", torch.int32, I32.max),
        ("max", torch.int64, I64.min),
        ("min", torch.int64, I64.max),
        ("sum", torch.int32, 0),
        ("prod", torch.int64, 1),
        ("argmax.v", torch.int32, I32.min),
        ("argmin.v", torch.int64, I64.max),
    ],
)
def test_integers_of_an_empty_axis_give_the_identity_of_their_dtype(
    op: str, dtype: torch.dtype, expected: int
) -> None:
    name = {torch.int32: "i32", torch.int64: "i64"}[dtype]
    lift = "n[i,j], j" if "." in op else "n[i,j]"
    source = f"n: {name}[i,j]\ny[i] = {op}[j]({lift})"
    n = torch.zeros(2, 0, dtype=dtype)
    assert eq.compile(source, target="cpu")(n=n).tolist() == [expected] * 2
    assert eq.reference(source)(n=n).tolist() == [expected] * 2


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "resident", "multi_pass"])
@pytest.mark.parametrize(
    "body",
    ["max[j](n[i,j])", "min[j](n[i,j])", "max[j](relu(n[i,j]))", "max[j](max(n[i,j], 0)) + min[j](n[i,j])"],
)
def test_padded_positions_do_not_show_in_integers(body: str, prefer: str) -> None:
    n = torch.randint(-90, -3, (3, 37), dtype=torch.int32)
    source = f"n: i32[i,j]\ny[i] = {body}"
    found = eq.compile(source, target="cpu", prefer=prefer)(n=n)
    assert found.dtype == torch.int32
    np.testing.assert_array_equal(found, eq.reference(source)(n=n))


@pytest.mark.parametrize(
    "body",
    [
        "max(n[i,j], 0)",
        "relu(n[i,j])",
        "max[k](max(n[i,k], 0)) - n[i,j]",
        "max(max[k](n[i,k]), 0) + n[i,j]",
        "sum[k](max(n[i,k], 0)) + max[k](n[i,k]) * n[i,j]",
    ],
)
def test_what_is_not_below_zero_stays_an_integer(body: str) -> None:
    source = f"n: i32[i,j]\nk: axis[j]\ny[i,j] = {body}"
    n = torch.randint(-9, 9, (3, 7), dtype=torch.int32)
    found, expected = eq.compile(source, target="cpu")(n=n), eq.reference(source)(n=n)
    assert not found.is_floating_point() and expected.dtype.kind == "i"
    np.testing.assert_array_equal(found, expected)
    gpu = eq.compile(source, target="sm_90", verify=False)
    np.testing.assert_array_equal(interpret(gpu.triton, gpu.name, n), expected)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_a_position_of_an_empty_axis_is_an_error(name: str) -> None:
    source = f"y[i] = {name}[j](x[i,j])"
    x = torch.zeros(2, 0)
    with pytest.raises(BindError) as caught:
        eq.compile(source, target="cpu")(x=x)
    assert str(caught.value) == (
        f"{name} over axis 'j', which is empty, has no position to give (line 1)\n"
        f"    {source}\n"
        "           ^^^^^^^^^\n"
        f"give tensors that have positions of 'j', or guard it: where(N(j) > 0, {name}[j](...), -1)"
    )
    with pytest.raises(BindError, match="which is empty, has no position to give"):
        eq.reference(source)(x=x)
    gpu = eq.compile(source, target="sm_90", verify=False)
    with pytest.raises(BindError, match=f"axis j is empty: {name} has no position to give"):
        interpret(gpu.triton, gpu.name, x)


def test_a_guarded_position_of_an_empty_axis_is_what_the_guard_says() -> None:
    source = "y[i] = where(N(j) > 0, argmax[j](x[i,j]), -1)"
    kernel = eq.compile(source, target="cpu")
    assert kernel(x=torch.zeros(2, 0)).tolist() == [-1, -1]
    assert kernel(x=torch.eye(2)).tolist() == [0, 1]


def test_a_stream_may_have_empty_chunks_yet_no_position_of_none() -> None:
    kernel = eq.compile("y[i] = argmax[j](x[i,j])", target="cpu")
    x = torch.randn(3, 8)
    none = kernel.update(kernel.init(), x=x[:, :0])
    with pytest.raises(BindError, match="argmax over axis 'j', which is empty"):
        kernel.finish(none)
    seen = kernel.update(kernel.update(none, x=x), x=x[:, :0])
    assert kernel.finish(seen).tolist() == x.argmax(1).tolist()
