"""Integer arithmetic is exact: 64 bits wherever 32 could be passed, and no more where they cannot."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from everywhere import assert_same, everywhere

import eqfuse as eq
from eqfuse.errors import BindError
from eqfuse.tile.triton.launch import interpret


@pytest.mark.parametrize("prefer", [None, "rolling", "split_k"])
@pytest.mark.parametrize(
    "source",
    [
        "y[i] = sum[j](j) + i * 1000000000",
        "y[i] = sum[j](i * 1000000000 + j)",
        "y[i] = max[j](i * j * 100000000)",
        "y[i] = sum[j](where(i * j * 1000000000 > 20000000000, 1, 0))",
        "y[i] = prod[j](where(j < 40, 2, 1)) + i",
        "y[i] = sum[j](i * 1000000000) / N(j)",
    ],
)
@pytest.mark.slow(but=["None", "split_k"])
def test_positions_do_not_wrap(source: str, prefer: str | None) -> None:
    sizes = {"i": 9, "j": 45}
    kernel = eq.compile(source, target="cpu", prefer=prefer)
    found, expected = np.asarray(kernel(sizes=sizes)), eq.reference(source)(sizes=sizes)
    assert found.dtype == (np.float32 if "/" in source else np.int64)
    np.testing.assert_array_equal(found, expected.astype(found.dtype))


def test_counts_and_positions_are_i64_as_in_torch() -> None:
    x = torch.randn(3, 7)
    assert eq.compile("y[i] = argmax[j](x[i,j])", target="cpu")(x=x).dtype == torch.int64
    assert eq.compile("y[i] = sum[j](where(x[i,j] > 0, 1, 0))", target="cpu")(x=x).dtype == torch.int64


def test_i32_inputs_stay_i32() -> None:
    x = torch.arange(6, dtype=torch.int32)
    kernel = eq.compile("x: i32[i]\ny[i] = maximum(2 * x[i], 3)", target="cpu")
    assert kernel(x=x).dtype == torch.int32


@pytest.mark.parametrize(
    "source",
    [
        "x: f16[i, w]\nv: f16[h, d]\ny[i,h] = sum[d](x[i, h*64 + d] * v[h,d])",
        "x: f32[i, j]\ny[i] = sum[j](where(j <= i + N(j) - N(i), x[i,j], 0))",
        "K: f16[p, r, d]\ntable: i32[b, t]\ny[b,d] = sum[j](K[table[b, j//16], j%16, d])",
        "x: f32[i, j]\ny[i] = sum[j](x[i, j % 7])",
    ],
)
def test_offsets_that_fit_stay_in_the_type_of_indices(source: str) -> None:
    kernel = eq.compile(source, target="sm_90", verify=False, prefer="rolling")
    functions = kernel.triton.split("@triton.jit")[1:]
    assert functions and not any("int64" in text for text in functions[:-1])
    assert "tl.int64" not in functions[-1].split("\ndef ")[1]


def test_shares_of_an_axis_are_in_the_type_of_indices() -> None:
    kernel = eq.compile("x: f32[i, j]\ny[i] = sum[j](x[i,j])", target="sm_90", verify=False, prefer="split_k")
    text = kernel.triton
    assert "j_shard" in text and "_i64" not in text


def test_a_product_that_may_pass_32_bits_is_made_in_64() -> None:
    kernel = eq.compile("y[i] = max[j](i * j)", target="sm_90", verify=False)
    assert "tl.int64" in kernel.triton.split("@triton.jit")[1]


@pytest.mark.parametrize(
    "source",
    ["y[i] = max[j](i * j * 100000000)", "y[i] = sum[j](i * 1000000000 + j)", "y[i] = i * 1000000000"],
)
def test_emitted_source_does_not_wrap(source: str) -> None:
    sizes = {"i": 5, "j": 37} if "j" in source else {"i": 5}
    kernel = eq.compile(source, target="sm_90", verify=False)
    found = interpret(kernel.triton, "fused_y", sizes=sizes, device="cpu")
    np.testing.assert_array_equal(found, eq.reference(source)(sizes=sizes))


AT_THE_ENDS = {
    "ring": "a[i] = x[i] + z[i]\nb[i] = x[i] - z[i]\nc[i] = x[i] * z[i]\nd[i] = -x[i]\ne[i] = abs(x[i]) - sq(x[i])",
    "comparisons": "a[i] = where(x[i] + 1 > z[i], 1, 0)\nb[i] = where(x[i] - z[i] <= x[i], 1, 0)\n"
    "c[i] = where(-x[i] >= z[i] * 2, 1, 0)\nd[i] = where(abs(x[i]) != sq(z[i]) - 1, 1, 0)",
    "divisions": "a[i] = x[i] // z[i]\nb[i] = x[i] % z[i]\nc[i] = (x[i] + 1) // 2\nd[i] = (x[i] - 1) % 7\n"
    "e[i] = x[i] // -1\nf[i] = (x[i] + z[i]) // 3 - (x[i] - z[i]) % -5\ng[i] = where(-x[i] // z[i] > 0, 1, 0)",
    "bits": "a[i] = x[i] << z[i]\nb[i] = x[i] >> z[i]\nc[i] = (x[i] + 1) >> 1\nd[i] = (x[i] << 1) >> 1\n"
    "e[i] = (x[i] + z[i]) & 65535\nf[i] = ~(x[i] + 1)\ng[i] = (x[i] - z[i]) ^ z[i] | 1",
    "choices": "a[i] = max(x[i] + 1, z[i])\nb[i] = relu(x[i] + z[i])\nc[i] = sign(x[i] - z[i])\n"
    "d[i] = where(x[i] > z[i], x[i] + z[i], -x[i])\ne[i] = clip(x[i] * 2, -100, 100)",
    "reductions": "a[i] = sum[j](x[i] + z[j])\nb[i] = max[j](x[j] - z[i])\nc[i] = min[j](x[i] + z[j])\n"
    "d[i] = sum[j](where(x[j] + 1 > z[i], 1, 0))\ne[i] = argmax[j](x[j] - z[i])\nf[i] = max[j](x[j]) + 1\nj: axis[i]",
    "ranges": "a[i] = sum[j](where(j <= x[i] + 1, w[j], 0))\nb[i] = sum[j](where((x[i] - 1 <= j) & (j < z[i] + 1), w[j], 0))"
    "\nc[i] = sum[j](where(j * 2 < x[i] - z[i], w[j], 0))\nj: axis[i]",
    "outputs read": "s[i] = x[i] + z[i]\na[i] = where(s[i] > x[i], 1, 0)\nb[i] = sum[j](s[j]) - s[i]\nj: axis[i]\n"
    "return s, a, b",
    "one number": "a = min[i](x[i] * z[i]) - 1\nb = max[i](x[i] + z[i])\nc[i] = x[0] - 1 + z[i]",
}


@pytest.mark.parametrize("dtypes", ["i8 u8", "i16 i32", "i32 i32", "i32 i64", "i64 i64"])
@pytest.mark.parametrize("text", AT_THE_ENDS.values(), ids=AT_THE_ENDS)
@pytest.mark.slow(but=["i32 i32"])
def test_arithmetic_at_the_ends_of_dtypes_is_of_64_bits_everywhere(text: str, dtypes: str) -> None:
    """The same numbers from every back end: a result in i32 has the lowest 32 bits, all between them 64."""
    kinds = {"i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}
    ends = [
        sorted({max(n, info.min) for n in (info.min, info.min + 1, -1, 0, 1, 7, info.max - 1, info.max)})
        for info in (torch.iinfo(kinds[name]) for name in dtypes.split())
    ]
    pairs = zip(*itertools.product(*ends), strict=True)
    x, z = (torch.tensor(each, dtype=kinds[name]) for each, name in zip(pairs, dtypes.split(), strict=True))
    heads = "".join(f"{name}: {dtype}[i]\n" for name, dtype in zip("xz", dtypes.split(), strict=True))
    given = {"w": torch.ones(len(x))} if "w[" in text else {}
    found = everywhere(heads + text, x=x, z=z, **given)
    exact = eq.reference(heads + text)(x=x, z=z, **given)
    found["reference"] = tuple(torch.as_tensor(part) for part in exact)
    assert_same(found)


def test_i32_that_is_passed_is_the_same_number_on_every_way() -> None:
    """What is between is exact; what is stored has 32 bits, in the reference too."""
    n = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    source = "n: i32[i]\na[i] = n[i] + 1\nb[i] = where(n[i] + 1 > n[i], 1, 0)\nc[i] = (n[i] + n[i]) / 2"
    for found in (eq.reference(source)(n=n), *(everywhere(source, n=n)[way] for way in ("torch", "native"))):
        assert [part.tolist() for part in found[:2]] == [[-(2**31), 1 - 2**31], [1, 1]]
        np.testing.assert_allclose(found[2], [2.0**31, -(2.0**31)])


DIVISIONS = [
    "n[i,j] // d[i,j]",
    "n[i,j] % d[i,j]",
    "where(d[i,j] != 0, n[i,j] // d[i,j], -1)",
    "j // d[i,j] + i % d[i,j]",
    "n[i,j] // (j // 2)",
    "n[i,j] % (j - 2)",
    "d[0,0] // d[0,1] + n[i,j]",
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["y[i,j] = {}", "y[i] = sum[j]({})"])
@pytest.mark.parametrize("text", DIVISIONS)
@pytest.mark.slow(but=["dtype0"])
def test_integer_division_by_any_divisor(text: str, form: str, dtype: torch.dtype) -> None:
    """Rounded down, with remainders of the divisor's sign; both 0 where a tensor holds a divisor of 0."""
    name = {torch.int32: "i32", torch.int64: "i64"}[dtype]
    heads = "".join(f"{tensor}: {name}[i,j]\n" for tensor in "nd" if f"{tensor}[" in text)
    source = heads + form.format(text)
    n = torch.tensor([[7, -7, 5, 0, -1, 9], [-8, 8, 1, -3, 4, 0]], dtype=dtype)
    d = torch.tensor([[2, 0, -3, 0, 1, -4], [3, -2, 0, 5, -7, 2]], dtype=dtype)
    inputs = {tensor: value for tensor, value in (("n", n), ("d", d)) if f"{tensor}: " in heads}
    expected = eq.reference(source)(**inputs)
    np.testing.assert_array_equal(eq.compile(source, target="cpu")(**inputs), expected)
    gpu = eq.compile(source, target="sm_90", verify=False)
    np.testing.assert_array_equal(interpret(gpu.triton, gpu.name, **inputs), expected)


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "multi_pass"])
@pytest.mark.parametrize("text", ["min[j](abs(sign(n[i,j])))", "argmax[j](sign(max(n[i,j], j)))"])
def test_signs_have_the_dtype_of_what_they_are_of(text: str, prefer: str) -> None:
    n = torch.tensor([[7, -7, 5, 0, -1], [-8, 8, 0, -3, 4]])
    source = f"n: i64[i,j]\ny[i] = {text}\nz[i,j] = y[i] + n[i,j]\nreturn y, z"
    gpu = eq.compile(source, target="sm_90", prefer=prefer, verify=False)
    for found, expected in zip(interpret(gpu.triton, gpu.name, n), eq.reference(source)(n=n), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_integer_division_in_numbers() -> None:
    kernel = eq.compile("n: i64[i]\nd: i64[i]\nq[i] = n[i] // d[i]\nr[i] = n[i] % d[i]", target="cpu")
    q, r = kernel(n=torch.tensor([7, -7, 7, -7, 7]), d=torch.tensor([2, 2, -2, -2, 0]))
    assert (q.tolist(), r.tolist()) == ([3, -4, -4, 3, 0], [1, 1, -1, -1, 0])


def test_a_scalar_divisor_of_0_is_an_error_unless_it_is_guarded() -> None:
    n = torch.tensor([5, -5])
    with pytest.raises(BindError, match=r"n\[i\] // m divides by 0"):
        eq.compile("n: i64[i]\nm: i64\ny[i] = n[i] // m", target="cpu")(n=n, m=0)
    guarded = eq.compile("n: i64[i]\nm: i64\ny[i] = where(m > 0, n[i] // m, -1)", target="cpu")
    assert guarded(n=n, m=0).tolist() == [-1, -1] and guarded(n=n, m=2).tolist() == [2, -3]
