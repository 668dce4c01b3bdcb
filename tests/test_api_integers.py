"""Narrow integers, float8, shifts and bits: the same numbers from the reference, torch's operations, C++ and Triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from everywhere import assert_same, everywhere

import eqfuse as eq
from eqfuse.errors import BindError, TypeCheckError
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import show_program
from eqfuse.tile.triton.aot import compile_for
from eqfuse.verify.inputs import input_specs

DTYPES = {"i8": torch.int8, "u8": torch.uint8, "i16": torch.int16}
ENDS = {"i8": (-128, 127), "u8": (0, 255), "i16": (-32768, 32767)}
NUMBERS = (
    0.0,
    0.5,
    1.5,
    2.5,
    -0.5,
    -1.5,
    126.5,
    127.5,
    200.0,
    254.5,
    255.5,
    -128.5,
    -129.0,
    32766.5,
    40000.0,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(but=["u8"])
def test_numbers_round_to_even_and_saturate(dtype: str) -> None:
    low, high = ENDS[dtype]
    x = torch.tensor([*NUMBERS, -32768.5, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    source = f"y: {dtype}[i]\ny[i] = x[i]\nz[i] = {dtype}(x[i]) * 2"
    found = everywhere(source, x=x)
    assert_same(found)
    expected = x.round().nan_to_num(0).clamp(low, high).to(torch.int64)
    assert found["torch"][0].dtype == DTYPES[dtype] and found["torch"][1].dtype == torch.int32
    assert found["reference"][0].tolist() == expected.tolist()
    assert found["reference"][1].tolist() == (2 * expected).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(but=["i8"])
def test_integers_saturate_as_numbers_do(dtype: str) -> None:
    x = torch.tensor([0, -1, 127, 128, 255, 256, -128, -129, 32767, 32768, -32768, -40000, 2**40])
    found = everywhere(f"x: i64[i]\ny: {dtype}[i]\ny[i] = x[i] + 1", x=x)
    assert_same(found)
    assert found["reference"][0].tolist() == (x + 1).clamp(*ENDS[dtype]).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(but=["u8"])
def test_arithmetic_on_narrow_integers_is_wide(dtype: str) -> None:
    low, high = ENDS[dtype]
    x = torch.tensor([[low, high, 3], [high, high, 0]], dtype=DTYPES[dtype])
    source = f"x: {dtype}[i,j]\ny[i] = sum[j](x[i,j] * x[i,j])\nm[i] = max[j](x[i,j])\nz[i,j] = -x[i,j]"
    found = everywhere(source, x=x)
    assert_same(found)
    wide = x.long()
    assert found["torch"][0].tolist() == (wide * wide).sum(1).tolist()
    assert [one.dtype for one in found["torch"]] == [torch.int64, torch.int32, torch.int32]


def test_empty_axes_give_identities_of_i32() -> None:
    x = torch.empty(2, 0, dtype=torch.uint8)
    found = everywhere("x: u8[i,j]\ny[i] = sum[j](x[i,j])\nm[i] = max[j](x[i,j])", x=x)
    assert_same(found)
    assert found["torch"][1].tolist() == [-(2**31)] * 2


def test_float8_with_a_wide_range_saturates_too() -> None:
    x = torch.tensor(
        [[1.0, 1.125, 1.375, -3e-5, 7e-6, 57344.0, 60000.0, 1e9, -torch.inf, torch.nan, 2**-16, 0.0]]
    )
    source = "y: f8e5m2[i,j]\ny[i,j] = x[i,j]\nz[i,j] = f8e5m2(x[i,j]) + 1"
    found = everywhere(source, x=x)
    assert_same(found)
    expected = x.clamp(-57344, 57344).to(torch.float8_e5m2)
    torch.testing.assert_close(found["torch"][0].float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("to", "name", "of"), [("f8e4m3", "f8e5m2", torch.float8_e5m2), ("f8e5m2", "f8e4m3", torch.float8_e4m3fn)]
)
def test_float8_of_another_float8(to: str, name: str, of: torch.dtype) -> None:
    x = torch.tensor([[1.0, 1.125, -3e-5, 448.0, 57344.0, torch.nan]]).to(of)
    assert_same(everywhere(f"x: {name}[i,j]\ny: {to}[i,j]\ny[i,j] = x[i,j]\nz[i,j] = {to}(x[i,j]) + 1", x=x))


@pytest.mark.parametrize("other", [torch.float8_e5m2, torch.float8_e4m3fn, torch.float16])
@pytest.mark.slow(but=["other1"])
def test_products_with_float8_of_a_wide_range(other: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(17, 32).to(torch.float8_e5m2), torch.randn(32, 16).to(other)
    source = "y[m,n] = sum[k](a[m,k] * b[k,n])"
    assert_same({k: v for k, v in everywhere(_declared(source, a=a, b=b), a=a, b=b).items()}, 2e-3)


def _declared(source: str, **given: torch.Tensor) -> str:
    names = {torch.float8_e5m2: "f8e5m2", torch.float8_e4m3fn: "f8e4m3", torch.float16: "f16"}
    axes = {"a": "m,k", "b": "k,n"}
    return "\n".join([*(f"{name}: {names[x.dtype]}[{axes[name]}]" for name, x in given.items()), source])


BITS = "a[i] = x[i] & n[i]\no[i] = x[i] | n[i]\nx_[i] = x[i] ^ n[i]\nt[i] = ~x[i]"


@pytest.mark.parametrize("dtype", ["u8", "i8", "i32", "i64"])
@pytest.mark.slow(but=["u8"])
def test_bits_are_those_of_twos_complement(dtype: str) -> None:
    torch_dtype = {**DTYPES, "i32": torch.int32, "i64": torch.int64}[dtype]
    generator = np.random.default_rng(0)
    info = torch.iinfo(torch_dtype)
    x, n = (
        torch.from_numpy(generator.integers(info.min, info.max, 33, endpoint=True)).to(torch_dtype)
        for _ in "xn"
    )
    found = everywhere(f"x: {dtype}[i]\nn: {dtype}[i]\n{BITS}", x=x, n=n)
    assert_same(found)
    wide = x.long(), n.long()
    for got, exact in zip(
        found["torch"], (wide[0] & wide[1], wide[0] | wide[1], wide[0] ^ wide[1], ~wide[0]), strict=True
    ):
        assert got.tolist() == exact.tolist()


@pytest.mark.parametrize("dtype", ["u8", "i8", "i32", "i64"])
@pytest.mark.slow(but=["i32"])
def test_shifts_are_torchs_whatever_the_count(dtype: str) -> None:
    torch_dtype = {**DTYPES, "i32": torch.int32, "i64": torch.int64}[dtype]
    info = torch.iinfo(torch_dtype)
    values = torch.tensor([info.min, info.max, 0, 1, 5, info.min // 3, info.max // 3], dtype=torch_dtype)
    counts = torch.tensor([0, 1, 3, 7, 31, 32, 33, 63, 64, 100, -1], dtype=torch.int64)
    x, n = (part.contiguous() for part in torch.cartesian_prod(values.long(), counts).T)
    x = x.to(torch_dtype)
    found = everywhere(
        f"x: {dtype}[i]\nl[i] = x[i] << n[i]\nr[i] = x[i] >> n[i]\nc[i] = (x[i] >> 3) + (1 << n[i])", x=x, n=n
    )
    assert_same(found)
    assert found["torch"][0].tolist() == (x.long() << n).tolist()
    assert found["torch"][1].tolist() == (x.long() >> n).tolist()


INT4 = """
W: u8[p, n]
s: f16[g, n]
x: f16[m, k]
y[m, n] = sum[k](x[m, k] * (((W[k // 2, n] >> (4 * (k % 2))) & 15) - 8) * s[k // 32, n])
"""


def test_a_product_with_packed_weights_and_group_scales() -> None:
    """k is no multiple of the group, m and n of no block."""
    torch.manual_seed(0)
    m, k, n = 5, 70, 19
    weights = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8).t()  # not contiguous
    scales, x = torch.rand(3, n).half(), torch.randn(m, k).half()
    assert_same(everywhere(INT4, W=weights, s=scales, x=x), 2e-2)
    nibbles = torch.stack([weights & 15, weights >> 4], 1).flatten(0, 1).double() - 8
    expected = x.double() @ (nibbles * scales.double().repeat_interleave(32, 0)[:k])
    exact = eq.reference(INT4)(W=weights, s=scales, x=x)
    torch.testing.assert_close(torch.from_numpy(exact), expected)


@pytest.mark.slow
def test_packed_weights_compile_for_a_gpu_and_are_drawn_in_full() -> None:
    kernel = eq.compile(INT4, target="sm_90", verify=False)
    assert all(report.registers > 0 for report in compile_for(kernel.triton, "sm_90"))
    program = parse(INT4)
    (spec,) = (
        s for s in input_specs(program, {"m": 2, "k": 6, "n": 3, "p": 3, "g": 1}).values() if s.name == "W"
    )
    assert spec.values == (0, 255)


@pytest.mark.slow
def test_a_wrong_nibble_is_refuted() -> None:
    wrong = INT4.replace("(4 * (k % 2))", "(4 * ((k + 1) % 2))")
    assert not eq.equivalent(INT4, wrong).ok
    assert not eq.equivalent(INT4, INT4.replace("& 15", "& 7")).ok
    assert eq.equivalent(INT4, INT4.replace("- 8) * s[k // 32, n]", "* s[k >> 5, n] - 8 * s[k // 32, n])")).ok


PACK = """
s[i] = max[j](abs(x[i,j])) / 7
q[i,p] = u8(round(x[i,2*p] / s[i]) + 8) | u8(round(x[i,2*p+1] / s[i]) + 8) << 4
r: u8[i,p]
r[i,p] = q[i,p]
return r, s
p: axis[5]
"""


def test_weights_are_packed_by_a_program_too() -> None:
    """Bits of rounded numbers: a field has no bits, so they are functions of it that are equal where arguments are."""
    torch.manual_seed(0)
    x = torch.randn(3, 10)
    source = "p: axis[5]\n" + PACK.replace("p: axis[5]\n", "")
    source = "\n".join(
        [line for line in source.splitlines() if not line.startswith("return")] + ["return r, s"]
    )
    found = everywhere(source, x=x)
    assert_same(found, 1e-6)
    packed = found["torch"][0]
    scale = x.abs().amax(1, keepdim=True) / 7
    assert packed.dtype == torch.uint8
    torch.testing.assert_close((packed & 15).float() - 8, (x[:, ::2] / scale).round())
    assert not eq.equivalent(source, source.replace("<< 4", "<< 3")).ok


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("(a[i] & 15) + 1", "(a[i] & 15) + 1"),
        ("a[i] & 15 + 1", "a[i] & 15 + 1"),
        ("a[i] << 2 + 1", "a[i] << 2 + 1"),
        ("(a[i] << 2) + 1", "(a[i] << 2) + 1"),
        ("a[i] | b[i] ^ c[i] & 3 >> 1", "a[i] | b[i] ^ c[i] & 3 >> 1"),
        ("(a[i] | b[i]) & (c[i] ^ 3)", "(a[i] | b[i]) & (c[i] ^ 3)"),
        ("~a[i]", "a[i] ^ -1"),
        ("where((a[i] & 1) == 0, 1, 2)", "where(a[i] & 1 == 0, 1, 2)"),
    ],
)
def test_bits_are_printed_as_they_bind(written: str, printed: str) -> None:
    declared = "a: i32[i]\nb: i32[i]\nc: i32[i]\n"
    used = "z[i] = a[i] + b[i] + c[i]\n"
    program = parse(f"{declared}{used}y[i] = {written}")
    assert str(program.outputs[1].expr) == printed
    assert parse(show_program(program)).outputs[1].expr is program.outputs[1].expr


def test_what_joins_truths_still_does() -> None:
    program = parse(
        "y[i,j] = where((j <= i) & mask[i] | ~other[j], 1, 0)\nz[i] = where((a[i] > 0) ^ (a[i] < 2), 1, 0)"
    )
    assert str(program.outputs[0].expr) == "where(j <= i and mask[i] or not other[j], 1, 0)"
    assert str(program.outputs[1].expr) == "where((a[i] > 0) != (a[i] < 2), 1, 0)"


def test_what_is_shifted_holds_integers() -> None:
    assert parse("y[i] = (w[i] >> s) & 3").integers == ("s",)
    assert parse("y[i] = (w[i] >> s) & 3").integer_tensors == ("w",)


@pytest.mark.parametrize(
    ("source", "message", "caret"),
    [
        ("x: f32[i]\ny[i] = x[i] & 3", "'&' takes integers, this is a real number", "x[i]"),
        ("x: f16[i]\ny[i] = 1 << x[i]", "'<<' takes integers, this is a real number", "x[i]"),
        ("m: bool[i]\ny[i] = m[i] >> 1", "'>>' takes integers, this is a truth value", "m[i]"),
        ("x: u8[i]\ny[i] = x[i] ^ 0.5", "'^' takes integers, this is a real number", "0.5"),
    ],
)
def test_bits_of_what_has_none_are_refused(source: str, message: str, caret: str) -> None:
    with pytest.raises(TypeCheckError) as caught:
        eq.compile(source, verify=False)(
            **{
                source[0]: torch.ones(
                    3, dtype={"x: f": torch.float32, "m: b": torch.bool, "x: u": torch.uint8}[source[:4]]
                )
            }
        )
    text = str(caught.value)
    assert message in text
    marked, marks = text.splitlines()[-3:-1] if "^" in text.splitlines()[-2] else text.splitlines()[-2:]
    assert marked[marks.index("^") : marks.rindex("^") + 1] == caret


def test_narrow_integers_are_lengths_and_indices() -> None:
    """A length of 8 bits bounds a loop, and an index of 8 bits gathers."""
    torch.manual_seed(0)
    x, w = torch.randn(3, 40), torch.randn(9, 5)
    lengths, rows = torch.tensor([0, 40, 17], dtype=torch.uint8), torch.tensor([8, 0, 3, 3], dtype=torch.int8)
    source = """
    len: u8[b]
    row: i8[t]
    y[b] = sum[j](where(j < len[b], x[b,j], 0))
    z[t,d] = w[row[t] + 0, d] * w[row[t], d]
    """
    found = everywhere(source, len=lengths, row=rows, x=x, w=w)
    assert_same(found, 1e-5)
    expected = torch.stack([line[:n].sum() for line, n in zip(x.double(), lengths.tolist(), strict=True)])
    torch.testing.assert_close(found["reference"][0].double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(BindError, match="'w': position 9 is outside"):
        eq.compile(source)(len=lengths, row=rows + 1, x=x, w=w)


def test_products_of_integers_under_a_mask_stay_integers() -> None:
    """The zeros that a mask leaves in the other factors of a sum are integers too."""
    source = "x: i64[j]\nb[j] = where(j >= 1, x[j - 1], 0) * x[j]\nc = sum[j](b[j])\nd = mean[j](tanh(b[j]) - c)\nreturn c, d"
    kernel = eq.compile(source, native="off")
    x = torch.tensor([3, 2**40 + 1, 2**20 + 1, 1])
    assert kernel.certificate.ok
    assert int(kernel(x=x)[0]) == int((x[1:] * x[:-1]).sum())


LEAST = -(2**63)


@pytest.mark.parametrize(
    "value",
    [
        f"where(x[i,j] > {LEAST}, 1, 0)",
        f"x[i,j] + {LEAST}",
        f"x[i,j] // {LEAST}",
        f"max(x[i,j], {LEAST} + 1)",
        "x[i,j] + 4294967296 * 4294967296",
        "sq(9223372036854775807) + x[i,j]",
        f"where(i - {LEAST} < 0, 1, x[i,j])",
        "where(2*i + 9223372036854775807 + 9223372036854775807 > 0, x[i,j], 1)",
    ],
)
def test_constants_are_integers_of_64_bits_and_wrap(value: str) -> None:
    x = torch.tensor([[0, 5, LEAST, 2**63 - 1, -1]])
    assert_same(everywhere(f"x: i64[i,j]\ny[i,j] = {value}", x=x))


@pytest.mark.parametrize("number", [LEAST, 2**62, 2**63 - 1])
def test_large_integers_multiply_reals(number: int) -> None:
    """A kernel rounds the integer to a float; the field has the integer itself."""
    kernel = eq.compile(f"y[i] = {number} * x[i]", native="off")
    assert kernel.certificate.ok
    assert kernel(x=torch.tensor([1.0, -0.5])).tolist() == [float(number), -0.5 * float(number)]
