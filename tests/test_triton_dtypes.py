"""Every reduction in every dtype, with and without masks, is a kernel that Triton compiles for a GPU."""

from __future__ import annotations

import pytest
import torch
from extend_kernels import registered

import eqfuse as eq
from eqfuse.tile.triton.aot import compile_for
from eqfuse.tile.triton.launch import interpret

AFFINE = {
    "args": "a",
    "state": "p, q",
    "lift": "a, a",
    "identity": "1, 0",
    "combine": "p1*p2, q1*p2 + q2",
    "result": "p, q",
}
REDUCTIONS = {
    "y1[i]": "sum[j]({})",
    "y2[i]": "max[j]({})",
    "y3[i]": "min[j]({})",
    "y4[i]": "prod[j]({})",
    "y5[i]": "var[j]({})",
    "y6[i]": "logsumexp[j]({})",
    "y7[i]": "argmax[j]({})",
    "y8[i]": "argmin[j]({})",
    "v1[i,k], p1[i,k]": "topk[j,k]({})",
    "m1[i], m2[i]": "mean_var[j]({})",
    "y9[i]": "softmax_weighted[j]({0}, {0})",
    "a1[i], a2[i]": "affine[j]({})",
    "z1[i]": "any[j](({}) > 1)",
    "z2[i]": "all[j](({}) > 1)",
    "z3[i]": "std[j]({})",
    "z4[i]": "mean[j]({})",
}
TRUTHS = {
    "y1[i]": "sum[j]({})",
    "y2[i]": "any[j]({})",
    "y3[i]": "all[j]({})",
    "y4[i]": "max[j](where({}, 2, 3))",
    "y5[i]": "argmax[j](where({}, 1, 0))",
    "y6[i]": "prod[j](where({}, 2.5, 0.1))",
    "m1[i], m2[i]": "mean_var[j](where({}, 1, 0))",
    "a1[i], a2[i]": "affine[j](where({}, 2.5, 0.1))",
}
BODIES = {
    "plain": "x[i,j]",
    "masked": "where(j <= i, x[i,j], 3)",
    "one of two numbers": "where(j <= i, 2.5, 0.1) + 0 * x[i,0]",
}
DTYPES = ("f16", "bf16", "f32", "f64", "i32", "i64", "bool")


def program(dtype: str, body: str) -> str:
    lines = [f"x: {dtype}[i,j]", "k: axis[2]"]
    if dtype == "bool":
        body = body.replace("x[i,j], 3", "x[i,j], False").replace(" + 0 * x[i,0]", " > 1 and x[i,0]")
        lines = lines[:1]
    reductions = TRUTHS if dtype == "bool" else REDUCTIONS
    return "\n".join([*lines, *(f"{left} = {right.format(body)}" for left, right in reductions.items())])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(but=["i64-plain"])
def test_every_reduction_compiles(dtype: str, body: str) -> None:
    with registered("affine", **AFFINE):
        kernel = eq.compile(program(dtype, BODIES[body]), target="sm_90", prefer="rolling", verify=False)
        reports = compile_for(kernel.triton, "sm_90")
    assert reports and all(report.registers > 0 for report in reports)


@pytest.mark.parametrize("prefer", ["rolling", "resident", "split_k"])
@pytest.mark.parametrize(
    "text",
    [
        "p[i], q[i] = affine[j](where(j <= i, 2.5, 0.1))",
        "m[i], v[i] = mean_var[j](where(x[i,j] > 0, x[i,j], 0.1))",
        "k[i] = argmax[j](where(j <= i, 0.1, 0.3))",
        "y[i] = sum[j](max(x[i,j], 0.1) * where(j < i, 0.1, 0.3))",
    ],
)
@pytest.mark.slow(but=["resident"])
def test_numbers_are_float64_where_all_is(text: str, prefer: str) -> None:
    """Triton takes a number for a float32, which it refuses to fold with float64 and which 0.1 is rounded to."""
    source = f"x: f64[i,j]\n{text}\nz[i] = sum[j](x[i,j])"
    x = torch.randn(5, 19, dtype=torch.float64)
    with registered("affine", **AFFINE):
        kernel = eq.compile(source, target="sm_90", prefer=prefer, verify=False)
        reports = compile_for(kernel.triton, "sm_90")
        found, expected = interpret(kernel.triton, kernel.name, x), eq.reference(source)(x=x)
    assert not any(bits in report.assembly for report in reports for bits in ("0x3DCCCCCD", "0f3DCCCCCD"))
    for one, other in zip(*(a if isinstance(a, tuple) else (a,) for a in (found, expected)), strict=True):
        within = 1e-12 if one.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(one, torch.as_tensor(other).to(one.dtype), rtol=within, atol=within)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_written_casts_of_numbers_round_them(dtype: str) -> None:
    """Of numbers that a dtype has, nothing is left of the cast."""
    source = f"x: {dtype}[j]\ny = bf16(0.1) + f16(0.5) + sum[j](x[j])\nz = max(sum[j](x[j]), f16(0.1))"
    x = torch.zeros(5, dtype=torch.float64 if dtype == "f64" else torch.float32)
    kernel = eq.compile(source, target="sm_90", verify=False)
    assert compile_for(kernel.triton, "sm_90")
    expected = 0.5 + torch.tensor(0.1, dtype=torch.bfloat16).double(), torch.tensor(0.1).half().double()
    for found in (interpret(kernel.triton, kernel.name, x), eq.compile(source, target="cpu")(x=x)):
        assert [float(part) for part in found] == [float(part) for part in expected]
    assert "f16(0.5)" not in str(kernel.tile) and "bf16(0.1)" in str(kernel.tile)


def test_numbers_that_are_joined_to_numbers_are_float64_among_float64() -> None:
    kernel = eq.compile("x: f64[i]\ny[i] = x[i] * max[k](0.5 * 0.1)", target="sm_90")
    assert "tl.full((), 0.5, tl.float64) * 0.1" in kernel.triton


def test_two_whole_numbers_of_which_one_is_chosen_have_the_dtype_of_the_choice() -> None:
    """Triton takes them for int32, and what is then joined to them in int64 is out of its range."""
    source = "x: f32[i]\na[l] = max[i](sum[l](3))\nc[l] = a[l] + x[l]\nl: axis[i]"
    kernel = eq.compile(source, target="sm_90", prefer="multi_pass", verify=False)
    assert "tl.full((), 3, tl.int64)" in kernel.triton and compile_for(kernel.triton, "sm_90")


@pytest.mark.parametrize(
    "text",
    [
        "y[i] = sum[j](max(x[i,j], -1e300))",
        "y[i] = argmax.v[j](min(x[i,j], 1e300), j)",
        "y[i] = sum[j](x[i,j]) + min(max(1, -1e300), -1e19)",
        "y[i] = sum[j](x[i,j]) * sqrt(sq(1e-30 * 1e-30))",
        "y[i] = max[j](max(x[i,j], 1e-42)) + 1e-40",
        "y[i] = argmax.v[j](x[i,j] - sq(1e-30) * 1e-30, j)",
        "y[i] = min[j](where(x[i,j] > 0, -1e300, x[i,j]))",
    ],
)
def test_numbers_that_float32_has_not_are_float32_all_the_same(text: str) -> None:
    """Triton takes them for float64, which it refuses to fold with float32."""
    source, x = f"x: f32[i,j]\n{text}", torch.randn(5, 19)
    kernel = eq.compile(source, target="sm_90", prefer="rolling", verify=False)
    assert compile_for(kernel.triton, "sm_90") and "float64" not in kernel.triton
    found = interpret(kernel.triton, kernel.name, x)
    expected = torch.as_tensor(eq.reference(source)(x=x)).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
