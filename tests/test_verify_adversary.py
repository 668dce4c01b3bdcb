"""What random residues alone accept: programs that differ at other sizes, integers, branches or magnitudes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.terms.parser import parse
from eqfuse.verify import verification as trials
from eqfuse.verify.adversary import constants, met_by_positions
from eqfuse.verify.equivalence import _of_pair
from eqfuse.verify.field.choice import FieldChoice
from eqfuse.verify.field.domain import FieldDomain
from eqfuse.verify.joint import JointSizes
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.verification import Verification

equivalent = partial(eq.equivalent, prove=False)

DIFFERENT = {
    "size": ("sum[j](x[i,j]) / N(j)", "sum[j](x[i,j]) / 7"),
    "size of a free axis": ("sum[j](x[i,j]) * N(i)", "sum[j](x[i,j]) * 3"),
    "last position": ("sum[j](x[i,j]) + x[i,N(j)-1]", "sum[j](x[i,j]) + x[i,6]"),
    "root of a size": ("sum[d](q[i,d]) / sqrt(N(d))", "sum[d](q[i,d]) / sqrt(7)"),
    "integer scalar in an index": ("K[i // g]", "K[i // 2]"),
    "integer scalar": ("where(i < n, n * x[i], 0)", "where(i < n, 2 * x[i], 0)"),
    "scalar at a threshold": ("where(n > 5, 0, x[i])", "x[i]"),
    "condition on a size": ("where(N(j) > 100, 0, 1) * sum[j](x[i,j])", "sum[j](x[i,j])"),
    "condition far out": ("sum[j](where(j + g > 100, 0, x[i,j]))", "sum[j](x[i,j])"),
    "relu of positions": ("sum[j](relu(j - 100) * x[i,j])", "sum[j](0 * x[i,j])"),
    "sign of positions": ("sum[j](sign(j - 100) * x[i,j])", "sum[j](-1 * x[i,j])"),
    "quotient of positions": ("sum[j](floor(j / 100) * x[i,j])", "sum[j](0 * x[i,j])"),
    "remainder of integers": ("n[i] % 300", "n[i]"),
    "zeros of a polynomial": ("n[i] * (n[i] - 1) * (n[i] - 2)", "0 * n[i]"),
    "limit": ("min(x[i], 100)", "x[i]"),
    "limit under a sum": ("sum[j](min(x[i,j], 10))", "sum[j](x[i,j])"),
    "offset of a relu": ("relu(x[i] - 20)", "0 * x[i]"),
    "threshold": ("where(x[i] > 0.1, x[i], 0)", "where(x[i] > 0, x[i], 0)"),
    "small magnitudes": ("where(abs(x[i]) < 0.15, 0, x[i])", "x[i]"),
    "one number": ("where(x[i] == 3, 1, 0)", "0 * x[i]"),
    "equality": ("where(x[i] >= c, 1, 0)", "where(x[i] > c, 1, 0)"),
    "ties made by a limit": ("argmax[j](min(x[i,j], 5))", "argmax[j](x[i,j])"),
    "logarithm of what is negative": ("exp(log(x[i]))", "x[i]"),
    "quotient by 0": ("x[i] / z[i] * z[i]", "x[i] + 0 * z[i]"),
    "nothing times what is undefined": ("x[i] + 0 * log(z[i])", "x[i] + 0 * z[i]"),
    "rounding of a cast": ("round(f16(x[i]))", "round(x[i])"),
    "rounding of another cast": ("floor(f16(x[i]))", "floor(bf16(x[i]))"),
    "position of a cast": ("argmax[j](f16(x[i,j]))", "argmax[j](x[i,j])"),
    "comparison of a cast": ("where(f16(x[i]) > z[i], 1, 0)", "where(x[i] > z[i], 1, 0)"),
    "comparison of a cast with a number": ("where(f16(x[i]) > 3, 1, 0)", "where(x[i] > 3, 1, 0)"),
    "equality of casts": ("where(f16(x[i]) == f16(z[i]), 1, 0)", "where(x[i] == z[i], 1, 0)"),
    "sign of a cast": ("sign(f16(x[i]))", "sign(x[i])"),
    "rounding of a sum of casts": ("round(sum[j](f16(x[i,j])))", "round(f16(sum[j](x[i,j])))"),
    "large magnitudes": ("min(x[i], 1e20 + z[i])", "x[i] + 0 * z[i]"),
    "one size of one axis alone": (
        "sum[j](where(i < j, x[i,j], 0))",
        "sum[j](where(i < j, where(N(i) == 1, x[i,j] + 1, x[i,j]), 0))",
    ),
    "axes that share no tensor": (
        "x[i] * N(j) * sum[j](z[j]) * sum[k](w[k])",
        "x[i] * N(k) * sum[j](z[j]) * sum[k](w[k])",
    ),
    "one number under a quotient": ("where(x[i] == 10, 2 * x[i], x[i]) // 2", "x[i] // 2"),
    "thresholds beside masked values": (
        "max[j](where(x[i,j] > 1, x[i,j] - 2 * z[i], -inf))",
        "max[j](where(x[i,j] >= 1, x[i,j] - 2 * z[i], -inf))",
    ),
    "thresholds beside logarithms": (
        "max[j](where(x[i,j] > 100, log(z[j]) * x[i,j], -inf) - x[i,j])",
        "max[j](where(x[i,j] >= 100, log(z[j]) * x[i,j], -inf) - x[i,j])",
    ),
    "one number under a step": ("floor(where(x[i] == 10, 2 * x[i], x[i]))", "floor(x[i])"),
    "a limit where all is masked": (
        "max[j](where(j >= 3, x[i,j], -inf)) - max[j](where(j >= 3, x[i,j], -inf))",
        "max[j](max(where(j >= 3, x[i,j], -inf), -5)) - max[j](max(where(j >= 3, x[i,j], -inf), -5))",
    ),
    "a step below a comparison": ("where(floor(x[i]) <= 3, 1, 0)", "where(x[i] <= 3, 1, 0)"),
    "a step that is a number": ("where(floor(x[i]) == 3, 1, 0)", "where(x[i] == 3, 1, 0)"),
    "a number that is rounded": ("where(abs(round(x[i])) >= 1, 1, 0)", "where(abs(x[i]) >= 1, 1, 0)"),
    "an extreme of steps": (
        "where(max[j](floor(x[i,j])) == 2, 1, 0)",
        "where(max[j](x[i,j]) == 2, 1, 0)",
    ),
    "a byte that is a number": ("where(i8(x[i]) == 3, 1, 0)", "where(x[i] == 3, 1, 0)"),
    "a whole quotient": ("where(x[i] // 2 <= 1, 1, 0)", "where(x[i] <= 2, 1, 0)"),
    "a quotient towards 0": ("n[i] // 3", "where(n[i] >= 0, n[i] // 3, -((-n[i]) // 3))"),
    "ties by rank": (
        "argmax[j](x[i,j])",
        "N(j) - 1 - argmax[j](x[i, N(j) - 1 - j])",
    ),
    "a mean of what a limit counts": (
        "sum[j](where(j <= i, x[i,j], 0)) / (i + 1)",
        "sum[j](where(j <= i, x[i,j], 0)) / min(i + 1, 64)",
    ),
    "half to even": ("round(x[i])", "floor(x[i] + 0.5)"),
    "a half precision that overflows": ("where(f16(x[i]) > 65504, 1, 0)", "where(x[i] > 65504, 1, 0)"),
    "all that is masked": (
        "max[j](where(j < i, x[i,j], -inf))",
        "max[j](where(j < i, x[i,j], -1e30))",
    ),
    "a length that may be 0": (
        "sum[j](where(j < n, x[i,j], 0)) / n",
        "sum[j](where(j < n, x[i,j], 0)) / max(n, 1)",
    ),
    "a byte that wraps": ("n[i] % 256", "min(max(n[i], 0), 255)"),
    "how many are the greatest": ("sum[j](where(x[i,j] == max[j](x[i,j]), 1, 0))", "1 + 0 * sum[j](x[i,j])"),
    "a size that is twice another": (
        "sum[j](where(N(i) == 2 * N(j), x[i,j], 2 * x[i,j]))",
        "sum[j](2 * x[i,j])",
    ),
    "infinities of another sign": (
        "max[j](where(j < 0, x[i,j], -inf)) * z[i]",
        "max[j](where(j < 0, x[i,j], -inf)) * abs(z[i])",
    ),
    "a small change of a square": (
        "mean[j](sq(sigmoid(x[i,j]) - mean[j](sigmoid(x[i,j]))))",
        "mean[j](sq(sigmoid(x[i,j]) - 0.999 * mean[j](sigmoid(x[i,j]))))",
    ),
    "a variance of what is the same": (
        "sum[j](sq(sin(z[i] + x[i,j] - x[i,j]) - sum[j](sin(z[i])) / N(j)))",
        "sum[j](sq(sin(z[i] + x[i,j] - x[i,j]) - sum[j](sin(z[i])) / 7))",
    ),
    "a variance of positions": (
        "mean[j](sq(j - mean[j](j))) * x[i]",
        "where(mean[j](sq(j - mean[j](j))) == 2, 4, mean[j](sq(j - mean[j](j)))) * x[i]",
    ),
    "a product that counts": (
        "prod[j](where(j != i, x[k,i], 0))",
        "prod[j](where(j != i, where(N(k) > 100, x[k,i] + 1, x[k,i]), 0))",
    ),
    "an integer far out": ("where(n[i] > 100000, 1, 0)", "0 * n[i]"),
    "both of three": (
        "where(x[i] > 1 and (z[i] > 1 or w[i] > 1), 1, 0)",
        "where(x[i] > 1 and z[i] > 1 or w[i] > 1, 1, 0)",
    ),
    "the middle": ("where(i == N(i) // 2, x[i], 0)", "where(i == (N(i) - 1) // 2, x[i], 0)"),
    "a length of two vectors": (
        "x[i] / max(sqrt(sum[j](sq(z[j]))) * sqrt(sum[j](sq(w[j]))), 1e-8)",
        "x[i] / (max(sqrt(sum[j](sq(z[j]))), 1e-8) * max(sqrt(sum[j](sq(w[j]))), 1e-8))",
    ),
    "one size beside a position": (
        "sum[j](where(j == 3, x[i], 0))",
        "sum[j](where(j == 3, where(N(i) == 17, x[i] + 1, x[i]), 0))",
    ),
    "an extreme that is one number beside a root of 0": (
        "max[j](max(sqrt(sum[j](sq(1 - sum[j](1) / N(j))) / N(j)), x[i,j]))",
        "max[j](max(sqrt(sum[j](sq(1 - sum[j](1) / N(j))) / N(j)), where(max[j](x[i,j]) == 0.25, 0.5, x[i,j])))",
    ),
    "sine of a sum, a sign": ("sin(x[i] + z[i])", "sin(x[i]) * cos(z[i]) - cos(x[i]) * sin(z[i])"),
    "cosine of a sum, a sign": ("cos(x[i] + z[i])", "cos(x[i]) * cos(z[i]) + sin(x[i]) * sin(z[i])"),
    "hyperbolic for circular": ("cos(x[i])", "(exp(x[i]) + exp(-x[i])) / 2"),
    "sine for cosine": ("sq(sin(x[i])) + sq(sin(x[i]))", "1 + 0 * x[i]"),
    "another frequency": ("sin(3 * x[i])", "2 * sin(x[i]) * cos(x[i])"),
    "multiples of both primes": ("x[i] + 1932740039 * (966370019 * z[i])", "x[i] + 0 * z[i]"),
}
OF_INTEGERS = (
    "remainder of integers",
    "zeros of a polynomial",
    "integers",
    "a quotient towards 0",
    "a byte that wraps",
    "an integer far out",
    "quotient and remainder",
)

EQUAL = {
    "power of 0": ("x[i]**0", "1 + 0 * x[i]"),
    "root of a square": ("sqrt(sq(x[i] + z[i]))", "abs(x[i] + z[i])"),
    "root of a square in an exponent": ("exp(sqrt(x[i] * x[i]))", "exp(abs(x[i]))"),
    "extreme of casts": ("max[j](f16(x[i,j]))", "f16(max[j](x[i,j]))"),
    "rounding of an extreme of casts": ("round(max[j](f16(x[i,j])))", "round(f16(max[j](x[i,j])))"),
    "cast of a cast that is rounded": ("round(f16(f16(x[i])))", "round(f16(x[i]))"),
    "casts of one sum": ("floor(f16(x[i]) + f16(z[i]))", "floor(f16(z[i]) + f16(x[i]))"),
    "casts that decide nothing": ("sum[j](f16(x[i,j]) * w[j])", "sum[j](x[i,j] * w[j])"),
    "softplus": ("log(1 + exp(x[i]))", "relu(x[i]) + log(1 + exp(-abs(x[i])))"),
    "inverse of softplus": ("exp(log(1 + exp(x[i])))", "1 + exp(x[i])"),
    "silu": ("silu(x[i])", "x[i] / (1 + exp(-x[i]))"),
    "hyperbolic tangent": ("tanh(x[i])", "(exp(x[i]) - exp(-x[i])) / (exp(x[i]) + exp(-x[i]))"),
    "gelu with tanh": (
        "0.5 * x[i] * (1 + tanh(0.8 * (x[i] + 0.044715 * x[i]**3)))",
        "x[i] * sigmoid(1.6 * (x[i] + 0.044715 * x[i] * x[i] * x[i]))",
    ),
    "mean": ("sum[j](x[i,j]) / N(j)", "mean[j](x[i,j])"),
    "inverse exponentials": ("exp(x[i]) * exp(-x[i]) * z[i]", "z[i] + 0 * x[i]"),
    "shifted softmax": (
        "sum[j](exp(x[i,j] - max[j](x[i,j])) * v[j]) / sum[j](exp(x[i,j] - max[j](x[i,j])))",
        "sum[j](exp(x[i,j]) * v[j]) / sum[j](exp(x[i,j]))",
    ),
    "moments": ("mean[j](sq(x[i,j] - mean[j](x[i,j])))", "mean[j](sq(x[i,j])) - sq(mean[j](x[i,j]))"),
    "shift of a maximum": ("max[j](x[i,j] + z[i])", "max[j](x[i,j]) + z[i]"),
    "root of a maximum": ("max[j](abs(x[i,j]))", "sqrt(max[j](sq(x[i,j])))"),
    "threshold moved": ("where(x[i] - 3 >= 0, 1, 0)", "where(x[i] >= 3, 1, 0)"),
    "limit scaled": ("min(2 * x[i], 6)", "2 * min(x[i], 3)"),
    "parts of a sum": (
        "sum[j](where(j < 100, x[i,j], 0)) + sum[j](where(j >= 100, x[i,j], 0))",
        "sum[j](x[i,j])",
    ),
    "order kept": ("argmax[j](x[i,j])", "argmax[j](exp(x[i,j]))"),
    "factor of a maximum": ("max[j](abs(s) * x[i,j])", "abs(s) * max[j](x[i,j])"),
    "parts by sign": ("relu(x[i]) - relu(-x[i])", "x[i]"),
    "sign and size": ("sign(x[i]) * abs(x[i])", "x[i]"),
    "integers": ("(n[i] + 1) * (n[i] - 1)", "n[i] * n[i] - 1"),
    "one of two, not both": (
        "where(x[i] > 1 and not z[i] > 1 or z[i] > 1 and not x[i] > 1, 1, 0)",
        "where((x[i] > 1 or z[i] > 1) and not (x[i] > 1 and z[i] > 1), 1, 0)",
    ),
    "what a mask multiplies": (
        "sum[j](where(j < 3, x[i,j], 0) * v[j])",
        "sum[j](where(j < 3, x[i,j] * v[j], 0))",
    ),
    "steps that are compared": ("where(floor(x[i]) <= 3, 1, 0)", "where(x[i] < 4, 1, 0)"),
    "steps that are a number": ("where(floor(x[i]) == 3, 1, 0)", "where(x[i] >= 3 and x[i] < 4, 1, 0)"),
    "sign of a step": ("sign(floor(x[i]))", "where(x[i] < 0, -1, where(x[i] < 1, 0, 1))"),
    "quotients that are compared": ("where(x[i] // 2 == 1, 1, 0)", "where(x[i] >= 2 and x[i] < 4, 1, 0)"),
    "quotient and remainder": ("n[i] // 5 * 5 + n[i] % 5", "n[i] + 0"),
    "fractions": ("x[i] - floor(x[i])", "x[i] % 1"),
    "quotients rounded down": ("floor(x[i] / z[i])", "x[i] // z[i]"),
    "limits in another order": ("min(max(x[i], -1), 1)", "max(min(x[i], 1), -1)"),
    "median": (
        "max(min(x[i], z[i]), min(max(x[i], z[i]), w[i]))",
        "min(max(x[i], z[i]), max(min(x[i], z[i]), w[i]))",
    ),
    "half of one, rounded": ("round(sigmoid(0 * x[i]))", "0 * x[i]"),
    "casts of sums in another order": (
        "bf16(sin(sum[j](x[i,j]))) // 1",
        "bf16(sin(sum[j](where(j < 2, x[i,j], 0)) + sum[j](where(j < 2, 0, x[i,j])))) // 1",
    ),
    "casts that vanish": ("relu(f16(x[i]))", "where(f16(x[i]) > 0, f16(x[i]), 0)"),
    "limits of casts moved and back": (
        "max[j](max(f16(z[j]) // 2, max[k](f16(tanh(x[i,k])))))",
        "max[j](max(f16(z[j]) // 2, max[k](f16(tanh(x[i,k])) + 0.5) - 0.5))",
    ),
    "limits of casts moved past a number": (
        "where(x[i] % 2 == 0, z[i], min(max[j](bf16(w[j] + 3)), max[j](w[j])))",
        "where(x[i] % 2 == 0, z[i], min(max[j](bf16(w[j])) + 3, max[j](w[j])))",
    ),
    "remainders of a mean of casts": (
        "min(max[j](mean[j](f16(x[i,j])) / -1), z[i]) % 3",
        "min(max[j](sum[j](f16(x[i,j])) * (1 / N(j)) / -1), z[i]) % 3",
    ),
    "remainders of 0": (
        "(max[j](x[i,j]) - min[j](x[i,j])) % 3",
        "(max[j](x[i,j] + 3) - 3 - min[j](x[i,j])) % 3",
    ),
    "quotients of 0": (
        "relu((max[j](x[i,j]) - min[j](x[i,j])) / z[i])",
        "relu((max[j](x[i,j]) - (min[j](x[i,j] + 0.5) - 0.5)) / z[i])",
    ),
    "extremes of casts of which one has no value": (
        "max[j](f16(x[i,j]) / x[i,j] - argmax[j](f16(x[i,j]) / x[i,j]))",
        "max[j](f16(x[i,j]) / x[i,j]) - argmax[j](f16(x[i,j]) / x[i,j])",
    ),
    "functions that saturate, beside exponentials": (
        "mean[j](sq(tanh(x[i,j] * max[j](exp(x[i,j]))) - z[i]))",
        "mean[j](sq(tanh(max[j](exp(x[i,j])) * x[i,j]) - z[i]))",
    ),
    "sine of a sum": ("sin(x[i] + z[i])", "sin(x[i]) * cos(z[i]) + cos(x[i]) * sin(z[i])"),
    "cosine of a sum": ("cos(x[i] + z[i])", "cos(x[i]) * cos(z[i]) - sin(x[i]) * sin(z[i])"),
    "sine of twice an angle": ("sin(2 * x[i])", "2 * sin(x[i]) * cos(x[i])"),
    "points of a circle": ("sq(sin(x[i])) + sq(cos(x[i]))", "1 + 0 * x[i]"),
    "half angles": ("sq(cos(x[i] / 2))", "(1 + cos(x[i])) / 2"),
    "relative positions": (
        "sum[j]((cos(i * w[j]) * x[j] - sin(i * w[j]) * z[j]) * cos(3 * w[j]) + (sin(i * w[j]) * x[j] + cos(i * w[j]) * z[j]) * sin(3 * w[j]))",
        "sum[j](cos((i - 3) * w[j]) * x[j] - sin((i - 3) * w[j]) * z[j])",
    ),
    "angles without exponents": (
        "sin(exp(x[i]) + z[i])",
        "sin(exp(x[i])) * cos(z[i]) + cos(exp(x[i])) * sin(z[i])",
    ),
    "order of sines": ("max[j](2 * sin(x[i,j]))", "2 * max[j](sin(x[i,j]))"),
}


def _programs(name: str, pair: tuple[str, str]) -> list[str]:
    declared = "n: i32[i]\n" if name in OF_INTEGERS else ""
    axes = "k,i" if "x[k,i]" in pair[0] else "i"
    return [f"{declared}y[{axes}] = {text}" for text in pair]


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.slow(but=["--1"])
def test_what_differs_somewhere_is_refused_either_way(name: str, turn: int) -> None:
    left, right = _programs(name, DIFFERENT[name])[::turn]
    found = equivalent(left, right)
    assert not found.ok and found.reason
    assert found.counterexample is not None or name == "multiples of both primes"


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.slow(but=["--1"])
def test_what_is_equal_is_accepted_either_way(name: str, turn: int) -> None:
    left, right = _programs(name, EQUAL[name])[::turn]
    found = equivalent(left, right)
    assert found.ok, found
    assert len(found.searched) >= 3 and "looked for a difference" in str(found)


@pytest.mark.parametrize("name", ["logarithm of what is negative", "quotient by 0"])
def test_where_both_have_values_they_may_be_equal(name: str) -> None:
    left, right = _programs(name, DIFFERENT[name])
    assert equivalent(left, right, domain="common")
    assert equivalent(right, left, domain="common")
    assert "only one of them has a value there" in equivalent(left, right).reason


def test_another_domain_is_an_error() -> None:
    with pytest.raises(EqfuseError, match="domain is 'all'"):
        equivalent("y[i] = x[i]", "y[i] = x[i]", domain="all")


def test_numbers_and_what_positions_meet() -> None:
    program = parse("y[i] = sum[j](where((j > 30) & (N(j) < 200), min(x[i,j + 500], 2.5), inf))")
    assert {2.5, -2.5, 30.0, 200.0} <= set(constants(program)) and np.isfinite(constants(program)).all()
    assert met_by_positions(program) == {"j": 200}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("exp(sqrt(x[i] * x[i]))", "exp(abs(x[i]))"),
        ("sqrt(sq(x[i] + z[i]))", "abs(x[i] + z[i])"),
        ("floor(floor(x[i]))", "floor(x[i])"),
        ("floor(-round(x[i]))", "-round(x[i])"),
        ("max[j](floor(y[i, j]))", "floor(max[j](y[i, j]))"),
        ("min[j](round(y[i, j]))", "round(min[j](y[i, j]))"),
        ("max(floor(x[i]), floor(z[i]))", "floor(max(x[i], z[i]))"),
        ("sqrt(sq(x[i] + z[i]))", "abs(z[i] + x[i])"),
        ("floor(x[i] + 3)", "3 + floor(x[i])"),
        ("floor(4 + x[i] - 3)", "floor(x[i]) + 1"),
        ("(x[i] + 3) % 3", "x[i] % 3"),
        ("(x[i] - 6) // 3", "x[i] // 3 - 2"),
        ("i8(min(x[i], 1000))", "i8(x[i])"),
        ("i8(max(round(x[i]), -128))", "i8(x[i])"),
        ("u8(max(x[i], 0))", "u8(x[i])"),
    ],
)
def test_roots_of_squares_and_steps_are_known(left: str, right: str) -> None:
    for one, two in ((left, right), (right, left)):
        assert equivalent(f"o[i] = {one}", f"o[i] = {two}"), (one, two)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("floor(x[i])", "round(x[i])"),
        ("round(x[i] + z[i])", "round(x[i]) + round(z[i])"),
        ("max[j](floor(y[i, j]))", "floor(min[j](y[i, j]))"),
        ("sqrt(sq(x[i] + z[i]))", "x[i] + z[i]"),
        ("floor(2 * floor(x[i]))", "floor(2 * x[i])"),
        ("floor(x[i] + 0.5)", "floor(x[i])"),
        ("round(x[i] + 3)", "round(x[i]) + 3"),
        ("(x[i] + 2) % 3", "x[i] % 3"),
        ("i8(min(x[i], 126))", "i8(x[i])"),
        ("i8(floor(x[i]))", "i8(x[i])"),
    ],
)
def test_what_only_resembles_them_is_refused(left: str, right: str) -> None:
    assert not equivalent(f"o[i] = {left}", f"o[i] = {right}")


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17, 100, 3000])
@pytest.mark.slow(but=["2", "5", "17"])
def test_a_difference_at_one_size_is_found(size: int) -> None:
    left = "o[i] = sum[j](x[i, j])"
    assert not equivalent(left, f"o[i] = sum[j](where(N(j) == {size}, x[i, j] + 1, x[i, j]))")
    both = f"o[i] = sum[j](where(N(j) == {size}, x[i, j] + 1, x[i, j]))"
    assert equivalent(both, both.replace(f"N(j) == {size}", f"{size} == N(j)"))


def test_a_size_that_is_out_of_reach_is_told() -> None:
    certificate = equivalent("o[i] = sum[j](x[i, j])", "o[i] = sum[j](where(N(j) > 5000000, 0, x[i, j]))")
    assert not certificate and "no trial took a side of a branch" in certificate.reason


OF_SIZES = [
    "N(j) // 5000",
    "max(N(j) - 5000, 0)",
    "relu(N(j) - 5000)",
    "N(j) % 100000 - N(j)",
    "min(N(j), 100000) - N(j)",
    "floor(N(j) / 5000)",
    "sign(5000 - N(j)) - 1",
    "abs(N(j) - 5000) + N(j) - 5000",
    "(N(j) >> 15)",
    "((N(j) & 32767) - N(j))",
    "(i8(i) - i)",
    "i * (i16(i) - i)",
    "max[j](j >> 13)",
    "(argmax[j](x[i,j]) & 1023) - argmax[j](x[i,j])",
    "min(argmax[j](x[i,j]), 1000) - argmax[j](x[i,j])",
    "argmax[j](x[i,j]) % 2000 - argmax[j](x[i,j])",
    "where(sum[j](where(x[i,j] > 0, 1, 0)) == 30, 1, 0)",
]
"""What is 0 at all sizes up to some, and other than 0 beyond."""


@pytest.mark.parametrize("text", OF_SIZES)
@pytest.mark.slow(but=[OF_SIZES[1], OF_SIZES[6], OF_SIZES[8], OF_SIZES[10], OF_SIZES[13], OF_SIZES[16]])
def test_functions_of_sizes_are_tried_where_they_turn(text: str) -> None:
    found = equivalent("y[i] = sum[j](x[i,j])", f"y[i] = sum[j](x[i,j]) + ({text})")
    assert not found.ok and found.counterexample is not None


@pytest.mark.parametrize(
    "text",
    ["N(j) >> 20", "max(N(j) - 5000000, 0)", "floor(i / 5000000)", "abs(N(j) - 9000000) + N(j) - 9000000"],
)
def test_functions_of_sizes_that_turn_out_of_reach_are_told(text: str) -> None:
    found = equivalent("y[i] = sum[j](x[i,j])", f"y[i] = sum[j](x[i,j]) + ({text})")
    assert not found.ok and found.counterexample is None and found.untaken
    assert all("the same everywhere at these sizes" in said for said in found.untaken)


@pytest.mark.parametrize(
    "text",
    [
        "max(i, -3e38)",
        "i + round((max(i, 0) - max(i, 0)) * sign(i))",
        "i + 0 * min(1e-30, min(N(j), 5))",
        "abs(i)",
        "max(i, 0)",
        "relu(N(j) - 1) + 1 - N(j) + i",
        "i % N(i)",
        "i16(i % 100) - i % 100 + i",
    ],
)
def test_functions_of_sizes_that_never_turn_are_no_conditions(text: str) -> None:
    found = equivalent("y[i] = sum[j](x[i,j]) + i", f"y[i] = sum[j](x[i,j]) + ({text})")
    assert found.ok and not found.untaken


@pytest.mark.parametrize(
    "text", ["abs(n[i]) >> 12", "i16(n[i]) - n[i]", "(n[i] & 1048575) - n[i]", "abs(n[i]) // 1000000"]
)
def test_functions_of_integers_are_tried_where_they_turn(text: str) -> None:
    assert equivalent("n: i32[i]\ny[i] = 0 * n[i]", f"n: i32[i]\ny[i] = {text}").counterexample is not None


@pytest.mark.parametrize("text", ["k >> 12", "max(k, 100000) - 100000", "(k & 4095) - k", "k // 10000"])
def test_functions_of_integer_scalars_are_tried_where_they_turn(text: str) -> None:
    plain = "k: i32\ny[i] = x[i] * abs(k)"
    assert equivalent(plain, f"{plain} + ({text.replace('k', 'abs(k)')})").counterexample is not None


def test_a_limit_of_lengths_that_are_read_is_reached() -> None:
    text = "len: i32[i]\ny[i] = sum[j](where(j < {}, x[i,j], 0))"
    found = equivalent(text.format("len[i]"), text.format("min(len[i], 4000)"))
    assert found.counterexample is not None


def test_one_condition_in_two_spellings_is_one() -> None:
    assert equivalent(
        "o[i] = sum[j](where(j > 5000, 0, x[i, j]))", "o[i] = sum[j](where(5000 < j, 0, x[i, j]))"
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_limit_that_others_mask_mostly_is_found(seed: int) -> None:
    text = "y[i] = min[j](max(v[2*i], where(i - j < 0, z[j,i] + {}, 0)))"
    assert not equivalent(text.format("x[i]"), text.format("min(x[i], 500)"), seed=seed).ok


def test_branches_of_which_no_threshold_could_be_compared_are_no_silent_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def beyond(inputs: Inputs, *_: object) -> Inputs:
        tensors = {
            name: replace(value, shadow=1e200 + value.shadow) for name, value in inputs.tensors.items()
        }
        return replace(inputs, tensors=tensors)

    monkeypatch.setattr(trials, "hardened", beyond)
    text = "y[i] = max(sq(x[i]), z[i])"
    found = equivalent(text, text)
    assert not found.ok and "values at thresholds" in found.reason and found.counterexample is None
    assert equivalent(text, text, allow="untaken").ok
    assert equivalent("y[i] = sq(x[i])", "y[i] = x[i] * x[i]").ok


def test_segments_have_one_position_somewhere() -> None:
    """Where there are more, a limit below 0 makes no difference."""
    text = "o: i64[m]\ny[i] = max[l](where(o[l] <= i and i < o[l+1], {}, 0))"
    left, right = text.format("x[i,l]"), text.format("max(x[i,l], -5)")
    assert not equivalent(left, right).ok and not equivalent(right, left).ok


def test_axes_of_declared_lengths_have_them() -> None:
    ranks = "k: axis[1]\ny[i,k], p[i,k] = topk[j,k](x[i,j])\nz[i] = sum[k](y[i,k])\nreturn z"
    assert equivalent(ranks, "z[i] = max[j](x[i,j])").ok
    assert not equivalent(ranks.replace("axis[1]", "axis[2]"), "z[i] = max[j](x[i,j])").ok


SPLIT = "max(max[j](where(j < 2, x[i,j], -inf)), max[j](where(j < 2, -inf, x[i,j])))"


@pytest.mark.parametrize(
    ("other", "agrees"),
    [
        (SPLIT, True),
        (f"where(({SPLIT}) > 2, {SPLIT}, max[j](x[i,j]))", True),
        ("max(max[j](x[i,j]), x[i,0])", True),
        ("max(max[j](x[i,j]), -5)", False),
        ("where(max[j](x[i,j]) == 3, 7, max[j](x[i,j]))", False),
    ],
)
def test_what_is_taken_of_parts_is_in_an_order_of_all_numbers(other: str, agrees: bool) -> None:
    """A part whose maximum changes places with that of another is none of an order; ranks of all numbers are one."""
    pair = JointSizes.of(parse("y[i] = max[j](x[i,j])"), parse(f"y[i] = {other}"), {})
    verification = Verification(16, 0, FieldChoice.of(pair.first, pair.second), 2.0**-40)
    stages, source = _of_pair(pair, {}, "same")
    verification.run(stages, source)
    assert not verification.reason
    assert verification.agrees_in_any_order(stages, source) is agrees


def test_each_trial_of_two_programs_has_integers_of_its_own() -> None:
    text = "t: bool[i]\nk: i32[i]\no[i] = where(t[i], x[k[i]], 0)"
    pair = JointSizes.of(parse(text), parse(text), {})
    (_, source) = _of_pair(pair, {}, "same")
    domain = FieldDomain()
    inputs = source.draw(domain, 64, np.random.default_rng(0), 0, varied=True)
    for name in ("t", "k"):
        rows = {row.tobytes() for row in inputs.tensors[name]}
        assert inputs.tensors[name].shape == (64, *pair.specs[name].shape) and len(rows) >= 8
    low, high = pair.specs["k"].values
    assert low <= inputs.tensors["k"].min() and inputs.tensors["k"].max() <= high
    found = equivalent(text, text.replace("x[k[i]]", "where(k[i] == 1, 2, x[k[i]])")).counterexample
    assert found is not None and np.asarray(found.inputs["k"]).ndim == 1


@pytest.mark.parametrize("condition", ["N(i) == 40", "i == 40"])
def test_a_size_that_counts_where_other_axes_have_one_position_alone(condition: str) -> None:
    """Along two positions of j one factor is 0."""
    text = "a[i] = prod[j](where((i + j) % 2 == 0, {}, 0))"
    plain, other = text.format("x[i, j]"), text.format(f"where({condition}, x[i, j] + 1, x[i, j])")
    for left, right in ((plain, other), (other, plain)):
        assert equivalent(left, right).counterexample


def test_three_positions_are_tried() -> None:
    """The greatest of i + N - 1 is 4 there alone."""
    left = "d = where(max[i](where(i + N(i) - 1 >= 4, 2, 0)) < 0.5, 3, 0)"
    certificate = equivalent(left, left.replace(">= 4", "> 4"))
    assert not certificate.ok and certificate.counterexample is not None


def test_beside_a_size_of_its_own_other_axes_reach_past_what_their_positions_meet() -> None:
    left = "a[k, i] = max[j](where(t[j, i] and j >= 3 and (o[k] <= j and j < o[k + 1]), x[i, j], -inf))"
    declared = "t: bool[j, i]\no: i32[k1]\nx: f32[i, j]\nk: axis[i]\n"
    value = left.removeprefix("a[k, i] = ")
    certificate = equivalent(declared + left, f"{declared}a[k, i] = where(N(k) == 100, {value} + 1, {value})")
    assert not certificate.ok and certificate.counterexample is not None
