"""Orders of sums and products, chosen by cost: which is chosen, where, that it is equal, proved, and as exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.errors import EqfuseError, VerificationError
from eqfuse.rules.reassociate import reassociated, roundings, runners_up, visited, with_copies
from eqfuse.terms.interpreter import reference
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Output,
    Reduce,
    children,
    free_axes,
    rebuild,
    substitute_axes,
    walk,
)
from eqfuse.terms.parser import parse, sized_axes
from eqfuse.terms.prefixes import alike
from eqfuse.terms.printer import show

MEAN = "y[b] = mean[o](sum[k](x[b,k] * w[o,k]))"
CHAIN = "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) * c[k])"
LINEAR = "y[i,e] = sum[j](0.125 * sum[d](q[i,d] * k[j,d]) * v[j,e])"
LOW_RANK = "y[i] = sum[j]((where(i == j, 1, 0) + sum[r](u[i,r] * v[j,r])) * x[j])"
BIAS = "y[b] = sum[o]((sum[k](x[b,k] * w[o,k]) + s[o]) / 2) * 1.5"
ADAPTER = "y[b,o] = sum[k](x[b,k] * (w[o,k] + sum[r](u[o,r] * v[r,k])))"
ONE_HOT = "y[i,e] = sum[j](where(ids[i] == j, 1, 0) * w[j,e])"
PART = "y[i] = sum[j](where((j == 3) & (i < 9), x[i,j] + z[j], 0))"
DIAGONAL = "y[i,e] = sum[j](where(i == j, d[i], 0) * b[j,e])"
QUOTIENT = "y[i,e] = sum[j](sum[d](q[i,d] * k[j,d]) / (1 + sq(n[i])) * v[j,e])"
CHOSEN = {
    MEAN: "sum[k](x[b, k] * sum[o](w[o, k])) / N(o)",
    CHAIN: "sum[j](a[i, j] * sum[k](b[j, k] * c[k]))",
    LINEAR: "sum[d](q[i, d] * sum[j](k[j, d] * v[j, e])) * 0.125",
    LOW_RANK: "where(i < N(j), x[i + 0], 0) + sum[r](u[i, r] * sum[j](v[j, r] * x[j]))",
    BIAS: "(sum[k](x[b, k] * sum[o](w[o, k])) / 2 + sum[o](s[o]) / 2) * 1.5",
    ONE_HOT: "where(0 <= ids[i] and ids[i] < N(j), w[ids[i], e], 0)",
    PART: "where(3 < N(j), where(i < 9, x[i, 3] + z[3], 0), 0)",
    DIAGONAL: "where(i < N(j), d[i] * b[i + 0, e], 0)",
    "y = sum[i](sum[j](where(i == j, a[i,j], 0)))": "sum[i](where(i < N(j), a[i, i + 0], 0))",
    "y[i] = mean[j](where(j == i - 1, x[j] * w[i], 0))": "where(0 <= i - 1 and i - 1 < N(j), x[i - 1] * w[i], 0) / N(j)",
    "y[i,l] = sum[k](sum[j](where(p[i] == j, 1, 0) * a[j,k]) * b[k,l])": "sum[k](where(0 <= p[i] and p[i] < N(j), "
    "a[p[i], k], 0) * b[k, l])",
    "y[i] = w[i] * sum[j](exp(sum[k](sum[l](x[i,l] * m[l,k]) * z[j,k])) * v[j])": "w[i] * sum[j](exp(sum[k](sum[l](x[i, l]"
    " * m[l, k]) * z[j, k])) * v[j])",
    "s = sum[i](sum[j](a[i] * sum[k](x[i,j] * y[j,k])))": "sum[j, k](sum[i](a[i] * x[i, j]) * y[j, k])",
    "y[i] = sum[k](-sum[j](a[i,j] * b[j,k]) * c[k])": "-sum[j](a[i, j] * sum[k](b[j, k] * c[k]))",
    "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) * c[k] * t)": "sum[j](a[i, j] * sum[k](b[j, k] * (c[k] * t)))",
    QUOTIENT: "sum[d](q[i, d] / (1 + sq(n[i])) * sum[j](k[j, d] * v[j, e]))",
}
BAND = "y[i,e] = sum[j](where((j <= i + 1) & (i <= j + 1), t[i,j], 0) * b[j,e])"
WINDOWS = {
    BAND: "where(0 <= i - 1 and i - 1 < N(j), t[i, i - 1] * b[i - 1, e], 0) + where(i < N(j), t[i, i + 0] * b[i + 0, e], 0) "
    "+ where(0 <= i + 1 and i + 1 < N(j), t[i, i + 1] * b[i + 1, e], 0)",
    "i: axis[j]\ny[i] = mean[j](where(abs(2 * i - j) < 2, x[j], 0))": "(where(0 <= 2 * i - 1 and 2 * i - 1 < N(j), x[2 * i - 1], 0) "
    "+ where(0 <= 2 * i and 2 * i < N(j), x[2 * i], 0) + where(0 <= 2 * i + 1 and 2 * i + 1 < N(j), x[2 * i + 1], 0)) / N(j)",
    "y = sum[j](sum[i](where(abs(i - j) <= 1, a[i,j], 0)))": "sum[j](where(0 <= j - 1 and j - 1 < N(i), a[j - 1, j], 0) + "
    "where(j < N(i), a[j + 0, j], 0) + where(0 <= j + 1 and j + 1 < N(i), a[j + 1, j], 0))",
    "y[i] = sum[j](where((i < 40) & (j >= N(j) - i - 2), where(j < N(j) - i, x[j] - 0.5, 0), 0))": "where(0 <= N(j) - i - 2 and "
    "N(j) - i - 2 < N(j), where(i < 40, x[N(j) - i - 2] - 0.5, 0), 0) + where(0 <= N(j) - i - 1 and N(j) - i - 1 < N(j), "
    "where(i < 40, x[N(j) - i - 1] - 0.5, 0), 0)",
    "i: axis[j]\ny[i] = sum[j](where((j <= i) & (i < j + 2), exp(j - i) * x[j], 0))": "where(0 <= i - 1 and i - 1 < N(j), exp(i - 1 - i) * "
    "x[i - 1], 0) + exp(i - i) * x[i]",
}
"""Sums over a few positions next to each other, which are read at each of them."""
POSITIONS = {
    "y = sum[j](j)": "N(j) * (N(j) - 1) // 2",
    "y[i] = sum[j](x[i] * j * j)": "x[i] * (N(j) * (N(j) - 1) // 2 * (2 * N(j) - 1) // 3)",
    "y[i] = sum[j](where(j < i, 1, 0))": "where(0 < min(i, N(j)), min(i, N(j)), 0)",
    "y[i] = mean[j](where(j >= i, x[i] * z[i], 0))": "where(i < N(j), x[i] * (N(j) - i) * z[i], 0) / N(j)",
    "y[i] = sum[j](where((j <= i) & (i < j + 3), 1, 0))": "where(max(i - 3, -1) + 1 < min(i, N(j) - 1) + 1, "
    "min(i, N(j) - 1) + 1 - (max(i - 3, -1) + 1), 0)",
    "y[i] = sum[j](where(2 * j <= i, exp(x[i]), 0))": "where(0 < min(i // 2, N(j) - 1) + 1, exp(x[i]) * (min(i // 2, N(j) - 1) + 1), 0)",
    "y[i] = sum[j](where(j <= L[i], x[i,j], 0)) / sum[j](where(j <= L[i], 1, 0))": "sum[j](where(j <= L[i], x[i, j], 0)) / "
    "where(0 < min(L[i], N(j) - 1) + 1, min(L[i], N(j) - 1) + 1, 0)",
    "y[i] = sum[j]((2 * j + 1) * max[k](x[i,k]))": "max[k](x[i, k]) * (N(j) + 2 * (N(j) * (N(j) - 1) // 2))",
    "y[i] = sum[j](where((x[i] > 0) & (j >= 2), 2.5, 0))": "where(x[i] > 0, where(2 < N(j), 2.5 * (N(j) - 2), 0), 0)",
    "i: axis[j]\ny[i] = sum[j](where(j < i, j * z[i], 0))": "where(0 < i, z[i] * (i * (i - 1) // 2), 0)",
    "i: axis[j]\ny[i] = sum[j](where(j <= i, z[i], 0))": "z[i] * (i + 1)",
    "i: axis[j]\ny[i] = sum[j](where((j <= i) & (i < j + 3), z[i], 0))": "where(max(i - 3, -1) + 1 < i + 1, z[i] * "
    "(i + 1 - (max(i - 3, -1) + 1)), 0)",
    "y = sum[i](sum[j](where(j < i, j * i, 0)) * x[i])": "sum[i](where(0 < min(i, N(j)), i * (min(i, N(j)) * (min(i, N(j)) - 1) // 2), 0) "
    "* x[i])",
}
"""Sums over positions alone, and their closed forms."""
SHORT = {"d": 16, "e": 16, "r": 4, "b": 32}


def outputs_of(text: str, mode: str = "bounded", **sizes: int) -> tuple[Output, ...]:
    program = with_copies(replace(parse(text), reassociate=mode))  # type: ignore[arg-type]
    extents = {axis: sizes.get(axis, SHORT.get(axis, 256)) for axis in sized_axes(program)}
    extents |= {copy: extents[axis] for copy, axis in program.domains.items()}
    return reassociated(program, extents)


@pytest.mark.parametrize("text", CHOSEN)
def test_the_cheapest_order_is_chosen(text: str) -> None:
    (output,) = outputs_of(text) or parse(text).outputs
    assert show(output.expr) == CHOSEN[text]


@pytest.mark.parametrize(
    "text", [t for t in CHOSEN if "exp" not in t and "s =" not in t and "mean[j]" not in t]
)
def test_an_order_runs_verified_and_proved(text: str) -> None:
    kernel = eq.compile(text, target="cpu", native="off")
    program = kernel.program
    rng = torch.Generator().manual_seed(0)
    extents = {axis: SHORT.get(axis, 256) for axis in sized_axes(program)}
    tensors = {}
    for tensor in program.tensors:
        shape = [extents[axis or ""] for axis in tensor.axes]
        made = (
            torch.randint(-9, 300, shape, generator=rng) if tensor.name in program.integer_tensors else None
        )
        tensors[tensor.name] = torch.randn(shape, generator=rng) if made is None else made
    read = {axis for tensor in program.tensors for axis in tensor.axes}
    free = extents.keys() - read - program.domains.keys()
    given = dict.fromkeys(program.scalars, 1.5) | {"sizes": {axis: extents[axis] for axis in free}}
    got = kernel(**tensors, **given)
    assert kernel.plan.form == "reassociated" and kernel.refused is None
    exact = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    want = torch.as_tensor(eq.reference(text)(**exact, **given))
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert kernel.certificate.ok
    verdict = kernel.derivation.check(text)
    assert verdict, verdict.why
    assert not kernel.derivation.proof.gaps
    assert "order of sums and products" in kernel.explain()


def test_a_chain_is_in_the_best_order_of_all() -> None:
    """Against all orders of a chain of four matrices, by brute force."""
    rng = np.random.default_rng(0)
    text = "y[i,m] = sum[l](sum[k](sum[j](a[i,j] * b[j,k]) * c[k,l]) * d[l,m])"
    for _ in range(20):
        sizes = {axis: int(rng.integers(1, 200)) for axis in "ijklm"}
        dims = [sizes[axis] for axis in "ijklm"]

        def cheapest(first: int, last: int, dims: list[int] = dims) -> float:
            if first + 1 == last:
                return 0.0
            return min(
                cheapest(first, cut)
                + cheapest(cut, last)
                + float(dims[first] * dims[cut] * dims[last])
                + (4.0 * dims[first] * dims[last] if (first, last) != (0, 4) else 0.0)
                for cut in range(first + 1, last)
            )

        found = outputs_of(text, **sizes) or parse(text).outputs
        own = visited(found, sizes) - 5 * dims[0] * dims[4]  # what every order writes
        written = visited(parse(text).outputs, sizes) - 5 * dims[0] * dims[4]
        assert own == cheapest(0, 4) or (own == written and cheapest(0, 4) > 0.7 * written)


OWN = {
    "i: axis[j]\ny[i,e] = sum[j](where(i == j, d[i], 0) * b[j,e])": ("d[i] * b[i, e]", "n", "ne"),
    "j: axis[i]\ny = sum[i](sum[j](where(j == i, a[i,j] + N(j), 0)))": ("sum[i](a[i, i] + N(j))", "nn"),
    "y[i] = sum[j]((where(i == j, 1, 0) + sum[r](u[i,r] * u[j,r])) * x[j])": (
        "x[i] + sum[r](u[i, r] * sum[j](u[j, r] * x[j]))",
        "nr",
        "n",
    ),
    "j: axis[i]\ny[i] = x[i] * sum[k](z[i,k] * sum[j](where(i == j, w[k], 0)))": (
        "x[i] * sum[k](z[i, k] * w[k])",
        "n",
        "nk",
        "k",
    ),
}
"""The position of an axis of the same extent is one of the axis, and read without a bound; and the shapes of the inputs."""


@pytest.mark.parametrize("text", OWN)
@pytest.mark.parametrize("size", [200, 1, 0])
def test_the_position_of_an_axis_of_the_same_extent_is_read_as_it_is(text: str, size: int) -> None:
    wanted, *shapes = OWN[text]
    (output,) = outputs_of(text)
    assert show(output.expr) == wanted
    kernel = eq.compile(text, target="cpu", native="off")
    assert kernel.plan.order and kernel.certificate.ok
    extents = {"n": size, "e": 3, "r": 4, "k": 5}
    tensors = [torch.randn([extents[axis] for axis in shape]) for shape in shapes]
    given = {tensor.name: data for tensor, data in zip(kernel.program.tensors, tensors, strict=True)}
    want = torch.as_tensor(np.asarray(eq.reference(text)(**{n: data.double() for n, data in given.items()})))
    torch.testing.assert_close(kernel(**given), want.float(), rtol=1e-4, atol=1e-3)
    verdict = kernel.derivation.check(text)
    assert verdict, verdict.why


@pytest.mark.parametrize("text", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_a_window_of_a_few_positions_is_read_at_each(text: str, dtype: torch.dtype) -> None:
    (output,) = outputs_of(text, i=512, j=512)
    assert show(output.expr) == WINDOWS[text]
    program = parse(text)
    sizes = {axis: SHORT.get(axis, 512) for axis in sized_axes(program) if axis not in program.domains}
    kernel = eq.compile(text, target="cpu", native="off", sizes=sizes)
    free = sizes.keys() - {axis for tensor in program.tensors for axis in tensor.axes}
    for i, j in ((512, 512), (5, 4), (1, 1), (3, 9), (9, 3), (0, 2), (2, 0)):
        own = {"i": i, "j": j, "e": 3}
        # Every second element, infinite where no mask leaves it.
        given = {t.name: torch.randn([2 * own[a or ""] for a in t.axes]).to(dtype) for t in program.tensors}
        given = {name: data[(slice(None, None, 2),) * data.ndim] for name, data in given.items()}
        if "t" in given and i > 5 and j > 5:
            given["t"][0, 3:], given["t"][4, :2] = float("inf"), float("nan")
        known = {"sizes": {axis: own[axis] for axis in free}}
        exact = {name: data.double() for name, data in given.items()}
        want = torch.as_tensor(np.asarray(eq.reference(text)(**exact, **known)))
        got = kernel(**given, **known)
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
        torch.testing.assert_close(got.double(), want.double(), equal_nan=True, **close)
        assert i < 512 or kernel.plan.order
    verdict = kernel.derivation.check(text)
    assert verdict, verdict.why
    assert "mask-either" in kernel.derivation.rules and not kernel.derivation.proof.gaps


@pytest.mark.parametrize(
    "text",
    [
        "y[i] = sum[j](where(abs(i - j) <= 5, x[i,j], 0))",  # more positions
        "y[i] = sum[j](where(abs(i - p[i] - j) <= 1, x[i,j], 0))",  # near the ends of its dtype it may be moved beyond them
        "y[i] = sum[j](where(abs(i - j) <= s, x[i,j], 0))",
        "y[i] = sum[j](where(abs(i - 2 * j) <= 3, x[i,j], 0))",
        "y[i] = sum[j](where(abs(i - j) <= 1.5, x[i,j], 0))",
        "y[i] = sum[j](where((j <= i) & (i <= j + 1), x[i,j], 1))",
        "y[i] = max[j](where(abs(i - j) <= 1, x[i,j], -inf))",
        "y[i] = sum[j](where((j <= i) | (i <= j + 1), x[i,j], 0))",
    ],
)
def test_other_masks_leave_no_such_window(text: str) -> None:
    assert not outputs_of(text, i=512, j=512)


def test_a_window_of_most_of_its_axis_stays() -> None:
    text = "y[i] = sum[j](where(abs(i - j) <= 2, x[i,j], 0))"
    assert outputs_of(text, i=512, j=10) and not outputs_of(text, i=512, j=9)


TWICE = {
    "y[i,j] = sum[m](sum[l](sum[k](b[k,i] * a[k,l]) * a[m,l]) * b[m,j])": "sum[l](sum[k](a[k, l] * b[k, i]) * sum[m](a[m, l] * b[m, j]))",
    "y[i,j] = sum[m](sum[l](sum[k](a[i,k] * b[k,l]) * a[l,m]) * b[m,j])": "sum[l](sum[k](a[i, k] * b[k, l]) * sum[m](a[l, m] * b[m, j]))",
}
"""`(a' b)' (a' b)` and `(a b) (a b)`, from left to right."""


@pytest.mark.parametrize("text", TWICE)
def test_a_product_that_is_there_twice_is_computed_once(text: str) -> None:
    (output,) = outputs_of(text)
    assert show(output.expr) == TWICE[text]
    kernel = eq.compile(text, target="cpu", native="off")
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    want = torch.as_tensor(eq.reference(text)(a=a.double(), b=b.double())).float()
    torch.testing.assert_close(kernel(a=a, b=b), want, rtol=1e-3, atol=1e-2)
    assert kernel.plan.order and kernel.certificate.ok and kernel.derivation.check(text)


NORM = "y = sum[i](sum[k](sq(sum[e](a[i,e] * b[e,k]))))"
TWO_SUMS = "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) * sum[j](c[j] * d[j,k]))"
NAMED = {
    NORM: ("free", "sum[e, e_1](sum[i](a[i, e] * a[i, e_1]) * sum[k](b[e, k] * b[e_1, k]))"),
    "y = sqrt(mean[i](sum[k](sq(-2 * mean[e](a[i,e] * b[e,k])))))": (
        "free",
        "sqrt(sum[e, e_1](sum[i](a[i, e] * a[i, e_1]) * sum[k](b[e, k] * b[e_1, k])) / N(e) * -2 * -2 / N(e) / N(i))",
    ),
    TWO_SUMS: (
        "bounded",
        "sum[j](a[i, j] * sum[k](b[j, k] * sum[j_1](c[j_1] * d[j_1, k])))",
    ),
    "y[i] = sum[k](mean[j](a[i,j] * b[j,k]) * mean[j](c[j] * d[j,k]))": (
        "bounded",
        "sum[j](a[i, j] * sum[k](b[j, k] * sum[j_1](c[j_1] * d[j_1, k]))) / N(j) / N(j)",
    ),
    "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) * sum[j](z[k]))": (
        "bounded",
        "sum[j](a[i, j] * sum[k](b[j, k] * z[k])) * N(j)",
    ),
    "y[j] = sum[k](c[j,k] * sum[l](b[k,l] * sum[j](a[j,l] * z[j])))": ("bounded", ""),
    "y[r,e] = sum[j](where(p[r] == j, w[j] * sum[r](z[r,j,e]), 0))": (
        "bounded",
        "where(0 <= p[r] and p[r] < N(j), w[p[r]] * sum[r_1](z[r_1, p[r], e]), 0)",
    ),
}
"""Sums that bind one name at two places, of a square or of a position too: the second has another name. The last but one needs none."""


@pytest.mark.parametrize("text", NAMED)
def test_an_axis_that_is_bound_twice_has_two_names(text: str) -> None:
    mode, wanted = NAMED[text]
    found = outputs_of(text, mode)
    assert [show(output.expr) for output in found] == ([wanted] if wanted else [])
    sizes = {axis: SHORT.get(axis, 256) for axis in sized_axes(parse(text))}
    kernel = eq.compile(text, target="cpu", native="off", sizes=sizes, reassociate=mode)  # type: ignore[arg-type]
    program = kernel.program
    rng = torch.Generator().manual_seed(0)
    for other in ({}, dict.fromkeys(sizes, 1), {"k": 0, "e": 5}):
        own = {axis: other.get(axis, size) for axis, size in sizes.items()}
        given = {
            t.name: torch.randint(-9, 300, [own[a or ""] for a in t.axes], generator=rng)
            if t.name in program.integer_tensors
            else torch.randn([own[a or ""] for a in t.axes], generator=rng)
            for t in program.tensors
        }
        exact = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
        want = torch.as_tensor(np.asarray(eq.reference(text)(**exact)))
        got = kernel(**given)
        assert other or bool(kernel.plan.order) is bool(wanted)
        close = {"rtol": 1e-4, "atol": 1e-4 * float(want.abs().max()) if want.numel() else 0.0}
        torch.testing.assert_close(got, want.to(got.dtype), equal_nan=True, **close)
    assert kernel.refused is None and kernel.certificate.ok
    again = eq.Derivation.from_json(kernel.derivation.to_json())
    for derivation in (kernel.derivation, again):
        verdict = derivation.check(text)
        assert verdict, verdict.why
        assert not derivation.proof.gaps and ("rename-axis" in derivation.rules) == ("_1" in wanted)


def test_the_norm_of_a_product_may_cancel_and_is_asked_for() -> None:
    """`a b` is 1e-3 where its terms are 1: of the difference of their squares no digit is left."""
    kernels = [
        eq.compile(NORM, target="cpu", native="off", sizes={"i": 256, "e": 2, "k": 256}, reassociate=mode)  # type: ignore[arg-type]
        for mode in ("bounded", "free")
    ]
    a = torch.stack([torch.ones(256), torch.full((256,), 1 + 1e-5)], 1)
    b = torch.stack([torch.ones(256), -torch.ones(256)])
    exact = (a.double() @ b.double()).square().sum()
    errors = [float(abs(kernel(a=a, b=b) - exact) / exact) for kernel in kernels]
    assert errors[0] < 1e-2 < errors[1]
    assert 'reassociate="free" takes it' in "".join(kernels[0].why_not()) and kernels[1].plan.order


def test_a_square_by_a_product_is_one_too() -> None:
    assert not outputs_of("y = sum[i](sum[k](sum[e](a[i,e] * b[e,k]) * c[k] * sum[e](a[i,e] * b[e,k])))")


def test_other_names_are_not_those_of_the_program() -> None:
    """`e_1` is a tensor, and `e_2` an axis of another extent."""
    text = "y = sum[i](sum[k](sq(sum[e](e_1[i,e] * b[e,k])))) + sum[e_2](z[e_2])"
    kernel = eq.compile(
        text, target="cpu", native="off", sizes={"i": 256, "e": 4, "k": 256, "e_2": 9}, reassociate="free"
    )
    assert "e_3" in str(kernel.loops) and kernel.derivation.check(text)
    a, b, z = torch.randn(50, 4), torch.randn(4, 60), torch.randn(7)
    torch.testing.assert_close(
        kernel(e_1=a, b=b, z=z), (a @ b).square().sum() + z.sum(), rtol=1e-4, atol=1e-3
    )


def test_a_position_that_a_reduction_finds_is_selected() -> None:
    text = "y[t,d] = sum[x](where(x == argmax[v](s[t,v]), w[x,d], 0))"
    kernel = eq.compile(text, target="cpu", native="off")
    assert kernel.plan.order and kernel.certificate.ok and kernel.derivation.check(text)
    s, w = torch.randn(40, 30), torch.randn(20, 8)
    want = torch.where((s.argmax(1) < 20)[:, None], w[s.argmax(1).clamp(max=19)], 0)
    torch.testing.assert_close(kernel(s=s, w=w), want)


def test_a_rank_is_no_position_that_a_mask_selects() -> None:
    text = "r: axis[4]\nv[t,r], e[t,r] = topk[x,r](s[t,x])\ny[t] = sum[r](where(r == p[t], v[t,r], 0))"
    s, p = torch.randn(5, 9), torch.tensor([0, 1, 3, 4, -2])
    best = s.topk(4).values
    want = torch.where((p >= 0) & (p < 4), best[torch.arange(5), p.clamp(0, 3)], 0)
    torch.testing.assert_close(eq.compile(text, target="cpu", native="off")(s=s, p=p)[-1], want)


def test_a_product_along_fewer_axes_is_made_before() -> None:
    """One vector times the matrix, and not the matrix times a vector and the other one."""
    text = "y[r] = sum[i](x[i,r] * p[i] * (q[i] - z[i]))"
    nested = f"{text[:-1]} * sum[s](x[i,s] * v[s]))"
    (output,) = outputs_of(nested, i=4096, s=64, r=64)
    assert show(output.expr) == "sum[i](x[i, r] * (p[i] * sum[s](x[i, s] * v[s]) * (q[i] - z[i])))"
    sizes = {"i": 4096, "r": 64, "s": 64}
    wide, narrow = (visited(outputs, sizes) for outputs in (parse(nested).outputs, (output,)))
    assert wide - narrow == 4096 * 64 - 6 * 4096
    kernel = eq.compile(nested, target="cpu", native="off", sizes=sizes)
    assert kernel.plan.order and kernel.derivation.check(nested)


def test_plans_that_take_longer_in_any_case_are_not_derived() -> None:
    """At the highest rate of a CPU 256**3 elements take longer than the order does; a mask may leave few of them; a GPU takes less than
    a launch for all."""
    masked = "y[b] = mean[o](sum[k](where(k <= o, x[b,k], 0) * w[o,k]) * a[o])"
    orders = [
        {bool(plan.order) for plan in eq.compile(text, target=target, native="off", verify=False).plans()}
        for text, target in ((MEAN, "cpu"), (masked, "cpu"), (MEAN, "h200"))
    ]
    assert orders[0] == {True} and orders[2] == {True, False}
    assert False in orders[1]


def test_sizes_decide() -> None:
    """An adapter is applied to few rows, and added to the weights for many."""
    assert outputs_of(ADAPTER, b=1, k=256, o=256) and not outputs_of(ADAPTER, b=256, k=256, o=256)
    kernel = eq.compile(ADAPTER, target="cpu", native="off")
    w, u, v = torch.randn(256, 256), torch.randn(256, 4), torch.randn(4, 256)
    forms = []
    for rows in (1, 512, 1):
        x = torch.randn(rows, 256)
        torch.testing.assert_close(kernel(x=x, w=w, u=u, v=v), x @ (w + u @ v).T, rtol=1e-3, atol=1e-3)
        forms.append(kernel.plan.form)
    assert forms == ["reassociated", "rewritten", "reassociated"]


def test_a_difference_of_exact_numbers_stays_where_it_is() -> None:
    """Near 1e4 with differences of 1e-3, sums apart have no digit left."""
    text = "s[i] = sum[j]((x[j] - z[i]) * a[j] * sum[k](b[j,k]))"
    assert not any(
        isinstance(node, Call) and node.fn == "sub" for o in outputs_of(text, i=4) for node in [o.expr]
    )
    free = outputs_of(text, "free", i=4096, j=4096, k=2)
    assert free and all(isinstance(o.expr, Call) and o.expr.fn == "sub" for o in free)
    kernel = eq.compile(text, target="cpu", native="off", sizes={"i": 4096, "j": 4096, "k": 2})
    assert 'reassociate="free" takes it' in "".join(map(str, kernel.why_not()))


def test_a_square_of_a_difference_is_multiplied_out_where_it_is_asked_for() -> None:
    text = "y = sum[i](sum[j](sum[d](sq(x[i,d] - z[j,d]))))"
    assert not outputs_of(text, i=1024, j=1024)
    sizes = {"i": 1024, "j": 1024, "d": 16}
    kernel = eq.compile(text, target="cpu", native="off", sizes=sizes, reassociate="free")
    assert kernel.plan.order and kernel.certificate.ok
    verdict = kernel.derivation.check(text)
    assert verdict, verdict.why
    assert not kernel.derivation.proof.gaps
    x, z = torch.randn(300, 16), torch.randn(400, 16)
    torch.testing.assert_close(kernel(x=x, z=z), torch.cdist(x, z).square().sum(), rtol=1e-4, atol=0)
    bounded = eq.compile(text, target="cpu", native="off", sizes=sizes)
    assert not bounded.plan.order and 'reassociate="free" takes it' in "".join(bounded.why_not())


def test_orders_that_lost_are_shown_with_their_cost() -> None:
    text = "z[i] = sum[m](sum[l](sum[k](a[i,k] * b[k,l]) * c[l,m]) * y[m])"
    kernel = eq.compile(text, target="cpu", native="off")
    extents = dict.fromkeys("iklm", 256)
    others = runners_up(kernel.program, kernel.plan.order, extents, 3)
    costs = [visited(each, extents) for each in (kernel.plan.order, *others)]
    assert costs == sorted(costs) and len(costs) == 4 and kernel.plan.order not in others
    assert parse(text).outputs in runners_up(kernel.program, kernel.plan.order, extents, 100)
    shown = kernel.explain().partition("Other orders:")[2]
    assert (
        f"{costs[1]:.3g} elements" in shown
        and "z[i] = sum[k](a[i, k] * sum[m](sum[l](b[k, l] * c[l, m]) * y[m]))" in shown
    )


def test_an_order_that_is_predicted_to_take_longer_is_said() -> None:
    """One kernel of more work is launched once, and leaves nothing for another one."""
    halves = "q: bf16[i,d]\nk: bf16[j,d]\nv: bf16[j,e]\n"
    text = halves + "y[i,e] = sum[j](sum[d](q[i,d] * k[j,d]) * v[j,e])"
    sizes = {"i": 256, "j": 256, "d": 64, "e": 64}
    kernel = eq.compile(text, target="h200", sizes=sizes, verify=False)
    assert not kernel.plan.order
    assert any(
        "is not taken" in each and "sum[d](q[i, d] * sum[j](k[j, d] * v[j, e]))" in each
        for each in kernel.why_not()
    )


@pytest.mark.parametrize("sums", ["a[i,j] * exp(b[j,k])", "a[i,j] / b[j,k]", "a[i,j] * b[j,k]) / (c[k]"])
def test_orders_of_what_integers_round_to_are_not_exact(sums: str) -> None:
    assert not outputs_of(
        f"a: i32[i,j]\nb: i32[j,k]\nc: i32[k]\ny[i] = sum[k](sum[j]({sums}) * c[k])", "exact"
    )


def test_orders_of_integers_beside_a_real_tensor_are_not_exact() -> None:
    text = CHAIN.replace("= sum", "= r[i] * sum")
    assert not outputs_of(f"a: i32[i,j]\nb: i32[j,k]\nc: i32[k]\nr: f32[i]\n{text}", "exact")


def test_orders_of_integers_alone_are_exact() -> None:
    text = "a: i32[i,j]\nb: i32[j,k]\nc: i32[k]\n" + CHAIN
    assert outputs_of(text, "exact") and not outputs_of(CHAIN, "exact")
    assert eq.compile(CHAIN, target="cpu", native="off", reassociate="exact").plan.form == "rewritten"
    kernel = eq.compile(text, target="cpu", native="off", reassociate="exact")
    a, b = (torch.randint(-9, 9, (40, 40), dtype=torch.int32) for _ in "ab")
    c = torch.randint(-9, 9, (40,), dtype=torch.int32)
    assert torch.equal(kernel(a=a, b=b, c=c), a @ b @ c)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(EqfuseError, match='give "exact", "bounded" or "free"'):
        eq.compile(CHAIN, reassociate="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "y[i] = sum[k](max[j](a[i,j] * b[j,k]) * c[k])",
        "y[i] = sum[k](where(k <= i, sum[j](a[i,j] * b[j,k]), 0) * c[k])",
        "y[i] = sum[k](f16(sum[j](a[i,j] * b[j,k])) * c[k])",
        "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) / z[i,k] * c[k])",
        "y[i] = sum[k](sum[j](a[i,j] * b[j,k]) ** 2 * c[k])",
        "y[i] = sum[j](a[i,j] * b[j])",
        "y[i,j] = a[i,j] * sum[k](b[i,k])",
    ],
)
def test_what_does_not_commute_with_sums_stays(text: str) -> None:
    """An extreme, a mask, a rounding, a divisor, a square; and a product alone."""
    assert not outputs_of(text)


def test_rows_that_a_number_scales_stay_in_range() -> None:
    """`1e-30` is near 1e30 where it is written, so that neither is alone."""
    text = "y[i] = sum[k](sum[j](a[i,j] * b[j,k] * 1e-30) * c[k])"
    kernel = eq.compile(text, target="cpu", native="off")
    a, b, c = torch.full((8, 64), 1e25), torch.full((64, 64), 1e20), torch.ones(64)
    torch.testing.assert_close(kernel(a=a, b=b, c=c), torch.full((8,), 64 * 64 * 1e15))


def test_special_values_are_those_of_the_program() -> None:
    kernel = eq.compile(MEAN, target="cpu", native="off")
    x, w = torch.randn(64, 256), torch.randn(300, 256)
    x[2, 3] = float("nan")
    x[4, 1] = float("inf")
    found = kernel(x=x, w=w)
    assert kernel.plan.form == "reassociated"
    assert found.isnan()[2] and not found.isfinite()[4] and int(found.isfinite().sum()) == 62


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (1, 1, 1), (3, 257, 5)])
def test_short_and_empty_axes(sizes: tuple[int, int, int]) -> None:
    i, j, k = sizes
    kernel = eq.compile(CHAIN, target="cpu", native="off")
    a, b, c = torch.randn(i, j), torch.randn(j, k), torch.randn(k)
    torch.testing.assert_close(kernel(a=a, b=b, c=c), a @ b @ c, rtol=1e-4, atol=1e-3)


def test_gradients_have_orders_too() -> None:
    kernel = eq.compile(MEAN, target="cpu", native="off")
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((64, 256), (256, 256)))
    found = torch.autograd.grad(kernel(x=x, w=w).square().sum(), (x, w))
    want = torch.autograd.grad((x @ w.T).mean(1).square().sum(), (x, w))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


NORMALISED = """j: axis[k]
w[i,j,k] = where(k <= j, sum[d](sq(q[i,j,d]) * sq(r[i,k,d])), 0)
y[i,j,e] = sum[k](w[i,j,k] * v[i,k,e]) / sum[k](w[i,j,k])"""


def test_the_gradient_of_a_normalised_prefix_is_linear() -> None:
    """What quotients divide, and the differences under their masks, are factors and terms."""
    program = compiler.derive(eq.grad(NORMALISED), None, False).program
    fixed = {"i": 2, "d": 16, "e": 16}
    short, long = (
        {axis: fixed.get(axis[0], n) for axis in (*sized_axes(program), *program.domains)}
        for n in (512, 1024)
    )
    first, second = (
        visited(reassociated(program, sizes), sizes, same=alike(program)) for sizes in (short, long)
    )
    assert second < 2.2 * first
    kernel = eq.compile(NORMALISED, native="off")
    given = {name: torch.randn(2, 300, 8).requires_grad_() for name in "qrv"}
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    weights = (exact["q"].square() @ exact["r"].square().mT).tril()
    wanted = weights @ exact["v"] / weights.sum(2, keepdim=True)
    above = torch.randn_like(wanted)
    wanted.backward(above)
    kernel(**given).backward(above.float())
    for name, value in given.items():
        torch.testing.assert_close(value.grad.double(), exact[name].grad, rtol=1e-4, atol=1e-4)
    assert kernel.backward.certificate.ok and kernel.backward.derivation.check().ok


def test_a_quotient_of_a_masked_factor_stays_outside_of_the_mask() -> None:
    """Divided by 0 it is NaN at all positions, also where the mask makes the factor 0."""
    text = "j: axis[k]\nx[k,e] = sum[j](y[j,e] * where(k <= j, sum[d](q[j,d] * r[k,d]), 0) / n[j])"
    sizes = {axis: 256 if axis in "jk" else 8 for axis in sized_axes(parse(text))}
    assert not reassociated(parse(text), sizes)
    kernel = eq.compile(text, native="off")
    y, q, r, n = torch.randn(9, 3), torch.randn(9, 2), torch.randn(9, 2), torch.ones(9)
    n[4] = 0
    found = kernel(y=y, q=q, r=r, n=n)
    assert kernel.certificate.ok and found[5:].isnan().all() and not found[:5].isfinite().any()


def test_fewer_roundings_are_counted() -> None:
    extents = {"i": 10, "j": 20, "k": 30}
    assert roundings(parse(CHAIN).outputs, extents) == 20 + 30 + 2


# -- mutants ---------------------------------------------------------------------------------------


def _mutations(node: Expr) -> Iterator[Expr]:
    match node:
        case Reduce("sum", axis, body):
            yield Reduce("max", axis, body)
            yield substitute_axes(body, {axis: Const(0)})
            for other in sorted(free_axes(body) - {axis}):  # two axes of one name
                yield Reduce("sum", axis, substitute_axes(body, {axis: Axis(other)}))
            yield Call("mul", (node, Const(2)))
        case Call("mul", (left, right)):
            yield left
            yield right
            yield Call("add", (left, right))
        case Call("div", (over, _)):
            yield over
        case Call("add", (left, right)) if right is not Const(0):  # a position is shifted by nothing
            yield left
            yield Call("sub", (left, right))
        case Call("where", (condition, value, other)):
            if not any(
                isinstance(part, Load) for part in walk(condition)
            ):  # what is outside in data is refused
                yield value
            yield other


def _mutants(expr: Expr) -> Iterator[Expr]:
    for node in dict.fromkeys(walk(expr)):
        for other in _mutations(node):

            def put(part: Expr, node: Expr = node, other: Expr = other) -> Expr:
                if part is node:
                    return other
                return rebuild(part, tuple(put(child) for child in children(part)))

            found = put(expr)
            if found is not expr:
                yield found


WRONG = [
    (text, place)
    for text in (MEAN, CHAIN, LOW_RANK, BIAS, ONE_HOT, PART, TWO_SUMS, BAND)
    for place, _ in enumerate(_mutants(outputs_of(text)[0].expr))
]


def test_there_are_at_least_twenty_mutants() -> None:
    assert len(WRONG) >= 40


@pytest.mark.slow(but=["0", "5", "9"])
@pytest.mark.parametrize(("text", "place"), WRONG)
def test_wrong_orders_are_refused(text: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = outputs_of(text)
    mutant = replace(right, expr=[*_mutants(right.expr)][place])
    monkeypatch.setattr(compiler, "reassociated", lambda program, extents: (mutant,))
    by_cost = compiler.by_cost
    monkeypatch.setattr(
        compiler, "by_cost", lambda found: sorted(by_cost(found), key=lambda c: not c.plan.order)
    )
    kernel = eq.compile(text, target="cpu", native="off")
    assert isinstance(kernel.refused, VerificationError) and not kernel.plan.order


@pytest.mark.parametrize(
    "text",
    [
        "e = mean[j](min(sum[k](-1), y[j] * sum[k](-1)) - z[j])",
        "g[j] = mean[k](sum[i](-1) - 3)",
        "y[i] = sum[j](sum[k](x[i,k] * w[k,j]) + 2)",
        "y[i] = sum[j]((sum[k](x[i,k] * w[k,j]) + 2) * 3 - 1)",
    ],
)
def test_terms_may_be_numbers(text: str) -> None:
    kernel = eq.compile(text, target="cpu", native="off")
    assert kernel.certificate.ok and not kernel.derivation.proof.gaps


def test_a_term_with_more_factors_than_are_ordered_is_not_multiplied_out() -> None:
    factors = " * ".join(f"x{n}[i,k]" for n in range(7))
    program = parse(f"y[i] = sum[k]({factors} * (sum[j](u[i,j] * w[j,k] * z[j,k]) + b[k]))")
    extents = dict.fromkeys(sized_axes(program), 64)
    outputs = reassociated(replace(program, reassociate="free"), extents) or program.outputs
    assert len(outputs) == 1


@pytest.mark.parametrize("text", POSITIONS)
def test_a_sum_over_positions_has_a_closed_form(text: str) -> None:
    (output,) = outputs_of(text)
    assert show(output.expr) == POSITIONS[text]


@pytest.mark.parametrize(
    "text",
    [
        "y[i] = sum[j](j * x[j])",
        "y[i] = sum[j](0.5 ** 2 * exp(j * x[i]))",
        "y[i] = sum[j](j * j * j * x[i])",  # of the third degree
        "y[i] = sum[j](where(j != i, 1, 0))",
        "y[i] = sum[j](where(x[j] > 0, 1, 0))",
        "y[i] = sum[j](where(j < t[i] * 1.5, 1, 0))",  # a bound that is no integer
        "y[i] = sum[j](where(j + 1 <= L[i], 1, 0))",  # the least integer less 1 is none
        "y[i] = max[j](where(j <= i, x[i], 0))",
    ],
)
def test_other_sums_have_none(text: str) -> None:
    assert not outputs_of(text)


@pytest.mark.parametrize("text", POSITIONS)
@pytest.mark.parametrize("size", [0, 1, 7, 300])
def test_a_closed_form_runs_verified_and_proved(text: str, size: int) -> None:
    """At sizes for which it is chosen, as its plan runs at others: an empty axis, one position, more and less than the other axis."""
    known = parse(text)
    sizes = dict.fromkeys({*sized_axes(known)} - known.domains.keys(), 2000)
    kernel = eq.compile(text, target="cpu", native="off", sizes=sizes)
    order = reassociated(kernel.program, dict.fromkeys(sized_axes(kernel.program), 2000))
    program = replace(kernel.program, outputs=order)
    given: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)
    same = {copy for copy, axis in program.domains.items() if axis == "j"}
    extents = {axis: size if axis in {"j", *same} else 40 for axis in sized_axes(program)}
    for tensor in program.tensors:
        shape = [extents[axis or ""] for axis in tensor.axes]
        whole = tensor.name in program.integer_tensors
        given[tensor.name] = rng.integers(-3, size + 5, shape) if whole else rng.standard_normal(shape)
    if "x" in given and given["x"].size and size:
        given["x"].flat[0] = np.inf  # of which nothing is summed where a mask keeps no position
    read = {axis for tensor in program.tensors for axis in tensor.axes}
    sizes = {axis: n for axis, n in extents.items() if axis not in {*read, *program.domains}}
    want, got = (np.asarray(reference(each, given, sizes=sizes)) for each in (kernel.program, program))
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-12)
    if kernel.plan.form == "reassociated":
        assert kernel.certificate.ok and kernel.derivation.check(text) and not kernel.derivation.proof.gaps
