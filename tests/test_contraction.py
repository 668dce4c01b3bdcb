"""The analysis of contractions: which sums are matrix products, for the cost model and for lowering alike."""

from __future__ import annotations

import pytest

import eqfuse as eq
from eqfuse.compiler import derive, pipeline
from eqfuse.extract.devices import DEVICES
from eqfuse.loops.contraction import Contraction, Product, as_written, contraction, factors, scaled
from eqfuse.loops.kernel_axes import contractions
from eqfuse.terms.nodes import Axis, Expr, Load, Size, call, free_axes
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.nodes import Dot, Let
from eqfuse.tile.walk import nested

SIZES = dict.fromkeys("ijk", 256)
PRODUCTS = (
    "a[i,k] * b[k,j]",
    "-(a[i,k] * b[k,j])",
    "a[i,k] * b[k,j] / c[i,j]",
    "a[i,k] / d[j,k]",
    "where(k < i, a[i,k], 0) * b[k,j] * 2",
    "a[i,k] * (b[k,j] / e[k])",
)
OTHERS = (
    "a[i,k] + b[k,j]",
    "where(k < i, a[i,k] * b[k,j], 0)",
    "a[i,k] * b[k,j] * f[i,j,k]",
    "a[i,k] * e[k]",
)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("body", [*PRODUCTS, *OTHERS])
def test_what_is_priced_as_a_matrix_product_is_lowered_to_one(body: str, target: str) -> None:
    derived = derive(f"y[i,j] = sum[k]({body})", None, False)
    dtypes = dict.fromkeys(program_dtypes(derived.program), "f16")
    found = pipeline(derived, SIZES, dtypes, DEVICES[target])
    vectors = target == "cpu"
    priced = [bool(contractions(kernel, vectors=vectors)) for kernel in found.chosen.nest.kernels]
    lowered = [
        any(isinstance(stmt, Let) and isinstance(stmt.op, Dot) for stmt in nested(kernel.body))
        for kernel in found.tile.kernels
    ]
    assert priced == lowered
    if body in PRODUCTS:
        assert any(priced)


def _load(name: str, *axes: str) -> Load:
    return Load(name, tuple(map(Axis, axes)))


def _ordered(axes: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(axes))


def test_factors_go_to_the_side_that_has_their_axes() -> None:
    a, b, c, d = _load("a", "i", "k"), _load("b", "k", "j"), _load("c", "i", "j"), _load("d", "k")
    body = call("neg", call("div", call("mul", call("mul", a, b), d), c))
    found = contraction(factors(body), "k", free_axes, _ordered)
    assert found is not None
    assert (found.rows, found.columns, found.batch) == (("i",), ("j",), ())
    assert found.left == Product((a, d)) and found.right == Product(
        (b,)
    )  # of two loads the left one is scaled
    assert found.outside.under == (c,)
    computed = call("exp", a)
    found = contraction(factors(call("mul", call("mul", b, d), computed)), "k", free_axes, _ordered)
    assert found is not None and found.right.load is b  # stays in its storage dtype
    assert found.left == Product((computed, d))


def test_operands_of_a_vector_and_a_matrix_are_what_the_body_multiplies() -> None:
    x, v, w, n = _load("x", "i", "k"), _load("v", "k"), _load("w", "k"), _load("n", "k")
    body = call("mul", call("mul", v, x), w)
    found = _as_written(body)
    assert {found.left, found.right} == {Product((w,)), Product((call("mul", v, x),))}
    quotient = call("div", x, n)
    found = _as_written(call("mul", quotient, Size("j")))  # j / n may be out of range where x / n is not
    assert found.outside == Product((Size("j"),))
    assert {found.left, found.right} == {Product((), (n,)), Product((x,))}


def _as_written(body: Expr) -> Contraction:
    plan = contraction(factors(body), "k", free_axes, _ordered)
    assert plan is not None
    found = as_written(plan, body, lambda _: None, free_axes)
    assert found is not None
    return found


def test_each_operand_has_a_scale_that_fits_it() -> None:
    a, b, alone, either = _load("a", "i", "k"), _load("b", "k", "j"), _load("n", "i"), _load("m")
    for under in ((alone, either), (either, alone)):
        found = contraction(Product((a, b), under), "k", free_axes, _ordered)
        assert found is not None
        found = scaled(found, free_axes, False)
        assert (found.left.under, found.right.under) == ((alone,), (either,))


def test_the_first_axes_of_the_order_are_rows() -> None:
    a, b = _load("a", "i", "k"), _load("b", "k", "j")
    product = factors(call("mul", a, b))
    found = contraction(product, "k", free_axes, lambda axes: tuple(sorted(axes, reverse=True)))
    assert found is not None and (found.rows, found.left) == (("j",), Product((b,)))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_reciprocals_of_products_are_contracted_once(dtype: str) -> None:
    """The 1 above the divisors is no factor that leaves the sum, to be written above them again."""
    text = f"y: {dtype}[j, k]\nz: {dtype}[i, k, j]\nc[k, i] = sum[j](1 / ((x[j] * y[j, k]) * (x[j] * z[i, k, j])))"
    assert eq.compile(text, target="cpu", native="off").certificate.ok
