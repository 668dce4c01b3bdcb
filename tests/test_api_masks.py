"""What a mask excludes never reaches the output, whatever is stored there, on every schedule and device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.loops.kernel_axes import contractions
from eqfuse.loops.plan import SCHEDULES
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.triton.launch import interpret

ROWS, KEYS, WIDTH = 40, 70, 16
NAN, INF = math.nan, math.inf

SOFTMAX = """
    p[i,j] = exp(s[i,j] - max[j](s[i,j]))
    o[i,d] = sum[j](p[i,j] * v[j,d]) / sum[j](p[i,j])
    """
PROGRAMS: Mapping[str, str] = {
    "causal": "s[i,j] = where(j <= i, x[i,j], -inf)" + SOFTMAX,
    "excluded above": "s[i,j] = where(j > i, -inf, x[i,j])" + SOFTMAX,
    "added": "s[i,j] = x[i,j] + where(j <= i, 0, -inf)" + SOFTMAX,
    "window": "s[i,j] = where((j <= i) & (j > i - 9), x[i,j], -inf)" + SOFTMAX,
    "normalised before": """
        s[i,j] = where(j <= i, x[i,j], -inf)
        e[i,j] = exp(s[i,j] - max[j](s[i,j]))
        o[i,d] = sum[j](e[i,j] / sum[j](e[i,j]) * v[j,d])
        """,
    "not normalised": "o[i,d] = sum[j](where(j <= i, x[i,j], 0) * v[j,d])",
    "a product": "o[i,d] = sum[j <= i](x[i,j] * v[j,d])",
    "the other way round": "o[i,d] = sum[j](v[j,d] * where(j <= i, tanh(x[i,j]), 0))",
    "columns first": "o[d,i] = sum[j](v[j,d] * where(j <= i, x[i,j], 0))",
    "an input": "keep: bool[i,j]\ns[i,j] = where(keep[i,j], x[i,j], -inf)" + SOFTMAX,
    "two masks": "keep: bool[i,j]\ns[i,j] = where(j <= i, where(keep[i,j], x[i,j], -inf), -inf)" + SOFTMAX,
    "a length": "L: i32\ns[i,j] = where(j < L, x[i,j], -inf)" + SOFTMAX,
}


def allowed(name: str, keep: np.ndarray) -> np.ndarray:
    """Which positions a program's mask leaves."""
    i, j = np.arange(ROWS)[:, None], np.arange(KEYS)[None, :]
    causal = j <= i
    found = {
        "window": causal & (j > i - 9),
        "an input": keep,
        "two masks": causal & keep,
        "a length": j < 9 + 0 * i,
    }
    return found.get(name, causal)


def inputs(name: str, bad: Callable[[np.ndarray], None]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    keep = rng.random((ROWS, KEYS)) < 0.3
    keep[:, 0] = True
    x = rng.standard_normal((ROWS, KEYS)).astype(np.float32)
    v = rng.standard_normal((KEYS, WIDTH)).astype(np.float32)
    bad(v)
    return {"x": x, "v": v, **({"keep": keep} if "keep" in PROGRAMS[name] else {})}


def expected(name: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """In float64, with what the mask excludes of v left out."""
    mask = allowed(name, given.get("keep", np.ones((ROWS, KEYS), bool)))
    x, v = given["x"].astype(np.float64), given["v"].astype(np.float64)
    if SOFTMAX in PROGRAMS[name] or name == "normalised before":
        e = np.exp(np.where(mask, x, -INF) - np.where(mask, x, -INF).max(1, keepdims=True))
        weights = e / e.sum(1, keepdims=True)
    else:
        weights = np.where(mask, np.tanh(x) if "tanh" in PROGRAMS[name] else x, 0)
    with np.errstate(all="ignore"):
        return np.asarray((weights[:, :, None] * np.where(mask[:, :, None], v[None], 0)).sum(1))


def nan_at_the_end(v: np.ndarray) -> None:
    v[20:] = NAN


def one_of_each(v: np.ndarray) -> None:
    v[15, 3], v[17, 4], v[19, 5], v[19, 3] = NAN, INF, -INF, INF


def infinite_everywhere(v: np.ndarray) -> None:
    v[5:, ::2] = INF


BAD = [nan_at_the_end, one_of_each, infinite_everywhere]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("prefer", [None, *SCHEDULES])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(
    but=[
        "causal-None-one",
        "causal-rolling-one",
        "causal-split_k-one",
        "causal-resident-one",
        "causal-multi_pass-one",
    ]
)
@pytest.mark.pairwise
def test_excluded_values_stay_out_on_a_cpu(
    name: str, prefer: str | None, bad: Callable[[np.ndarray], None]
) -> None:
    given = inputs(name, bad)
    kernel = eq.compile(PROGRAMS[name], prefer=prefer, target="cpu")
    found = kernel(**given, **({"L": 9} if name == "a length" else {}))
    wanted = expected(name, given)
    wanted = wanted.T if name == "columns first" else wanted
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    assert name == "a length" or not np.isfinite(wanted).all()


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize("name", ["causal", "columns first", "two masks", "not normalised", "a length"])
@pytest.mark.slow(but=["a length"])
def test_excluded_values_stay_out_on_a_gpu(name: str, prefer: str) -> None:
    given = inputs(name, one_of_each)
    source = PROGRAMS[name]
    derived = compiler.derive(source, None, strict_casts=False)
    scalars = {"L": 9} if name == "a length" else {}
    extents = bind(derived.program, {n: value.shape for n, value in given.items()}, scalars=scalars)
    compiled = compiler.pipeline(
        derived, extents, program_dtypes(derived.program), device_named("sm_90"), prefer
    )
    module = compiler.emit_triton(derived, compiled, "made")
    assert ("rest_of_product(" in module) == (name != "a length" and "tl.dot" in module)
    tensors = [torch.from_numpy(given[tensor.name]) for tensor in derived.program.tensors]
    shards = {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}
    found = interpret(module, "made", *tensors, *scalars.values(), sizes={**extents, **shards})
    wanted = expected(name, given)
    np.testing.assert_allclose(
        found.numpy(), wanted.T if name == "columns first" else wanted, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_reference_leaves_them_out_too(name: str) -> None:
    given = inputs(name, one_of_each)
    found = eq.reference(PROGRAMS[name])(**given, **({"L": 9} if name == "a length" else {}))
    wanted = expected(name, given)
    np.testing.assert_allclose(found, wanted.T if name == "columns first" else wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.slow(but=["rolling", "resident"])
def test_a_factor_of_what_is_never_kept_stays_out(prefer: str) -> None:
    """The sum is NaN, and a factor of what a condition excludes everywhere."""
    source = "a = sum[i](x[i])\ny = mean[i](where(i < 0, w[i] * a, w[i]))"
    x, w = np.array([NAN, *range(19)], np.float32), np.arange(20, dtype=np.float32)
    assert eq.compile(source, prefer=prefer, target="cpu")(x=x, w=w) == 9.5
    x[0], x[5] = 1, NAN
    assert eq.compile(source, prefer=prefer, target="cpu")(x=x, w=w) == 9.5


def test_a_comparison_of_reals_is_data_and_no_mask() -> None:
    x = np.array([[1.0, -1.0]], np.float32)
    w = np.array([[1.0], [NAN]], np.float32)
    kernel = eq.compile("o[i,k] = sum[j](where(x[i,j] > 0, x[i,j], 0) * w[j,k])", target="cpu")
    assert np.isnan(kernel(x=x, w=w)).all()


@pytest.mark.slow
def test_a_row_without_a_position_stays_nan() -> None:
    source = "s[i,j] = where(j < i, x[i,j], -inf)" + SOFTMAX
    given = inputs("causal", nan_at_the_end)
    for prefer in SCHEDULES:
        found = eq.compile(source, prefer=prefer, target="cpu")(**given)
        assert np.isnan(found[0]).all() and np.isfinite(found[1:20]).all(), prefer


@pytest.mark.slow
def test_keys_that_are_excluded_stay_out() -> None:
    source = """
        s[i,j] = where(j <= i, sum[c](q[i,c] * k[j,c]), -inf)
        p[i,j] = exp(s[i,j] - max[j](s[i,j]))
        o[i,d] = sum[j](p[i,j] * v[j,d]) / sum[j](p[i,j])
        """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((50, 8)).astype(np.float32) for _ in range(3))
    k[30:], v[30:] = NAN, NAN
    for prefer in SCHEDULES:
        found = eq.compile(source, prefer=prefer, target="cpu")(q=q, k=k, v=v)
        assert np.isfinite(found[:30]).all() and np.isnan(found[30:]).all(), prefer


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize(
    "value",
    ["max[j](x[g*4 + 1,j] * c[j])", "sum[j](exp(x[g*4 + 1,j] - max[j](x[g*4 + 1,j])) * c[j])"],
    ids=["a maximum", "a softmax"],
)
def test_rows_that_are_not_there_are_not_read(value: str, prefer: str) -> None:
    """The loops compute every row, and the mask is outside of them."""
    source = f"x: f32[h,j]\nc: f32[j]\nw: f32[g]\ny[g] = where(g*4 + 1 < N(h), {value}, 0) + w[g]"  # h is 5
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((5, 70)), "c": rng.standard_normal(70), "w": np.ones(2)}
    given = {name: array.astype(np.float32) for name, array in given.items()}
    found = eq.compile(source, prefer=prefer)(**given)
    np.testing.assert_allclose(found, eq.reference(source)(**given), rtol=2e-5)
    assert found[1] == 1


@pytest.mark.slow
def test_gradients_of_heads_that_share_keys() -> None:
    """What a kernel stores for another one reads no row that is not there either."""
    source = """
    S[h,j] = sum[d](q[h,d] * k[h//4,j,d])
    O[h,d] = sum[j](exp(S[h,j] - max[j](S[h,j])) * k[h//4,j,d])
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=generator, requires_grad=True) for shape in ((8, 16), (2, 33, 16)))
    kernel = eq.compile(source)
    kernel(q=q, k=k).sum().backward()
    fused = kernel.backward.certificate
    found, q.grad, k.grad = (q.grad, k.grad), None, None
    scores = torch.einsum("hd,hjd->hj", q, k.repeat_interleave(4, 0))
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    torch.einsum("hj,hjd->hd", weights, k.repeat_interleave(4, 0)).sum().backward()
    assert fused is not None and fused.ok
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, (q.grad, k.grad), strict=True)
    )


@pytest.mark.slow
def test_finite_values_may_be_promised() -> None:
    given = inputs("causal", lambda v: None)
    kernel = eq.compile(PROGRAMS["causal"], assume_finite=True, target="cpu")
    np.testing.assert_allclose(kernel(**given), expected("causal", given), rtol=2e-5, atol=2e-5)
    guarded = eq.compile(PROGRAMS["causal"], target="cpu")
    assert "where le" in str(guarded.tile) and "rest_of_product(" in guarded.triton
    assert "where le" not in str(kernel.tile) and "rest_of_product(" not in kernel.triton


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("y[i] = sum[j](where(i // 4 < 3, x[i // 4, j], 0) * v[j])", {"i": 16}),
        ("y[i] = sum[j](where(i % 4 < 3, x[i % 4, j], 0) * v[j])", {"i": 16}),
        (
            """
            p: axis[2]
            n: axis[3]
            s[m,n] = sum[p]((x[n, p] + w[2*n + p]) * (z[m,n,p] + w[2*n + p + 6]))
            y[i] = sum[n,m](where((i >= 4*n) & (i < 4*n + 4), v[i - 4*n] * exp(s[m,n]), 0))
            """,
            {"i": 12, "n": 3},
        ),
    ],
    ids=["a quotient", "a remainder", "a product of operands that a condition widens"],
)
def test_what_a_condition_keeps_inside_is_not_read_outside(source: str, sizes: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 2), "v": (4,) if "p" in source else (2,), "w": (12,), "z": (5, 3, 2)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items() if f"{name}[" in source}
    kernel = eq.compile(source, target="cpu", native="off")
    axes = {axis: size for axis, size in sizes.items() if f"{axis}: axis" not in source}
    np.testing.assert_allclose(kernel(**given, sizes=axes), eq.reference(source)(**given, sizes=axes))


INSIDE: Mapping[str, str] = {
    "cast": "f16(where(j < 2, x[i,j], 0) * y[i,j])",
    "cast of a factor": "f16(where(j < 2, x[i,j], 0) * y[i,j]) * f16(z[i,j] * y[i,j])",
    "magnitude": "abs(where(j < 2, x[i,j], 0) * y[i,j])",
    "square": "sq(where(j < 2, x[i,j], 0) * y[i,j]) * z[i,j]",
    "limit": "relu(where(j < 2, x[i,j], 0) * y[i,j])",
    "terms": "where(j < 2, x[i,j], 0) * y[i,j] - where(j < 3, y[i,j], 0) * z[i,j]",
    "a side of a branch": "where(i < 2, where(j < 2, x[i,j], 0) * y[i,j], where(j < 1, 1, 0) * y[i,j])",
    "quotient": "f16(where(j < 2, x[i,j], 0) * y[i,j]) / (1 + sq(z[i,0]))",
}


@pytest.mark.parametrize("prefer", [None, "split_k", "multi_pass"])
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.slow(but=["cast-None", "terms-None", "magnitude-multi_pass"])
def test_what_a_mask_excludes_inside_of_a_summand_stays_out(name: str, prefer: str | None) -> None:
    source = f"o[i] = sum[j]({INSIDE[name]})"
    rng = np.random.default_rng(5)
    x, y, z = (rng.standard_normal((3, 6)).astype(np.float32) for _ in range(3))
    y[:, 3:], y[1, 4] = NAN, INF
    given = {key: value for key, value in {"x": x, "y": y, "z": z}.items() if f"{key}[" in source}
    wanted = eq.reference(source)(**{**given, "y": np.where(np.isfinite(y), y, 0)})
    np.testing.assert_allclose(eq.reference(source)(**given), wanted, rtol=1e-6)
    found = eq.compile(source, prefer=prefer, target="cpu")(**given)
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=1e-4)


def test_a_summand_that_a_mask_does_not_make_0_reads_everything() -> None:
    y = np.array([[1.0, NAN]], np.float32)
    for summand in ("exp(where(j < 1, 1, 0) * y[i,j])", "where(j < 1, 1, 0) * y[i,j] + y[i,j]"):
        assert np.isnan(eq.reference(f"o[i] = sum[j]({summand})")(y=y)).all()


@pytest.mark.parametrize(
    ("source", "torchs"),
    [
        ("y[i,o] = sum[k <= i](a[i,k] * b[k,o])", lambda a, b: a.tril() @ b),
        ("y[i,o] = sum[k](where(k > i, -a[i,k] * b[k,o] * 2, 0))", lambda a, b: -2 * a.triu(1) @ b),
        ("y[i,o] = sum[k < 20](a[i,k] * b[k,o])", lambda a, b: a[:, :20] @ b[:20]),
        (
            "y[i,o] = sum[k <= i](sum[d](a[i,d] * a[k,d]) * b[k,o])",
            lambda a, b: (a @ a.T).tril() @ b,
        ),
    ],
)
def test_a_product_under_a_mask_is_a_matrix_product(source: str, torchs: Callable[..., torch.Tensor]) -> None:
    """The mask stands on a factor; what it leaves out of the other one is not read."""
    kernel = eq.compile(source, native="wait", prefer="rolling")
    (loop,) = kernel._current.chosen.nest.kernels
    assert any(each.axis == "k" for each in contractions(loop))
    a, b = torch.randn(40, 40), torch.randn(40, 33)
    found = kernel(a=a, b=b)
    assert isinstance(found, torch.Tensor) and kernel.certificate.ok and kernel.derivation.check().ok
    torch.testing.assert_close(found, torchs(a, b), rtol=2e-5, atol=2e-5)
    read = torchs(torch.ones_like(a), torch.eye(40)) != 0
    for row in (3, 25):
        worse = b.clone()
        worse[row] = torch.nan
        found = kernel(a=a, b=worse)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found.isnan().any(1), read[:, row])


@pytest.mark.parametrize("prefer", [None, "rolling", "resident", "multi_pass"])
def test_a_masked_product_of_three_factors_reads_nothing_outside(prefer: str | None) -> None:
    """The factor that both sides could have keeps its mask on the side that it guards."""
    source = "y[j,h,e] = sum[k](where(k <= j, sum[n](q[j,h,n] * r[k,h,n]) * dt[k,h] * v[k,h,e], 0))"
    kernel = eq.compile(source, native="off", prefer=prefer)
    q, r, v = (torch.randn(8, 3, 5) for _ in range(3))
    dt = torch.rand(8, 3)
    dt[6:] = -torch.inf
    found = kernel(q=q, r=r, v=v, dt=dt)
    assert isinstance(found, torch.Tensor) and kernel.certificate.ok
    weights = torch.einsum("jhn,khn,kh->jhk", q, r, dt)[:6, :, :6]
    weights = weights.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril()[:, None], 0)
    torch.testing.assert_close(found[:6], torch.einsum("jhk,khe->jhe", weights, v[:6]), rtol=1e-4, atol=1e-4)


def test_a_quotient_under_a_mask_stays_behind_it() -> None:
    """What is 0 where the mask is false may be divided by 0 there."""
    kernel = eq.compile("y[i,o] = sum[k <= i](a[i,k] * (b[k,o] / c[k]))", native="off")
    a, b = torch.randn(8, 8), torch.randn(8, 5)
    c = torch.arange(8, 0, -1).float() - 1  # the last is 0
    found = kernel(a=a, b=b, c=c)
    assert isinstance(found, torch.Tensor)
    wanted = a[:7, :7].tril() @ (b[:7] / c[:7, None])
    torch.testing.assert_close(found[:7], wanted)
