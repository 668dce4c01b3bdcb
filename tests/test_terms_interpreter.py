"""What programs mean: the unfused evaluation against torch and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BindError, EqfuseError, TypeCheckError
from eqfuse.terms import interpreter
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.interpreter import Env, Value, evaluate, evaluate_all, evaluate_expr, expand, reference
from eqfuse.terms.nodes import Axis, Load, Local, Reduce, Size, call
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import show_program

ATTENTION = """
    S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h//g,j,d]) * scale
    T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
    P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
    O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h//g,j,e])
"""
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    """Random float64 data."""
    return RNG.normal(size=shape)


def run(source: str, sizes: dict[str, int] | None = None, **inputs: Any) -> Any:
    """The reference of a source text; arrays are tensors, numbers scalars."""
    tensors = {name: value for name, value in inputs.items() if np.ndim(value) > 0}
    scalars = {name: value for name, value in inputs.items() if np.ndim(value) == 0}
    return reference(parse(source), tensors, scalars, sizes)


def attention(
    q: Any, k: Any, v: Any, scale: float, bias: Any = 0.0, keep: Any = True
) -> np.ndarray[Any, Any]:
    """Plain attention in torch, float64; `bias` and `keep` broadcast to the scores."""
    q, k, v = (torch.as_tensor(t) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * scale + torch.as_tensor(bias)
    scores = scores.masked_fill(~torch.as_tensor(keep), float("-inf"))
    return np.asarray(torch.softmax(scores, -1) @ v.repeat_interleave(groups, 1))


def test_softmax() -> None:
    x = normal(3, 5) * 100
    y = run("y[i, j] = exp(x[i, j] - max[j](x[i, j])) / sum[j](exp(x[i, j] - max[j](x[i, j])))", x=x)
    np.testing.assert_allclose(y, torch.softmax(torch.tensor(x), -1), rtol=1e-13)


def test_causal_grouped_attention() -> None:
    q, k, v = normal(2, 4, 7, 5), normal(2, 2, 7, 5), normal(2, 2, 7, 3)
    keep = np.tril(np.ones((7, 7), bool))
    np.testing.assert_allclose(
        run(ATTENTION, Q=q, K=k, V=v, g=2, scale=0.3), attention(q, k, v, 0.3, keep=keep), rtol=1e-12
    )


def test_alibi_window_and_softcap() -> None:
    source = """
        S[h,i,j] = sum[d](Q[h,i,d] * K[h,j,d])
        C[h,i,j] = 50 * tanh(S[h,i,j] / 50) + slope[h] * (j - i)
        T[h,i,j] = where((j <= i) & (i - j < w), C[h,i,j], -inf)
        P[h,i,j] = exp(T[h,i,j] - max[j](T[h,i,j]))
        O[h,i,e] = sum[j](P[h,i,j] * V[h,j,e]) / sum[j](P[h,i,j])
    """
    q, k, v, slope = normal(2, 6, 4), normal(2, 6, 4), normal(2, 6, 3), normal(2)
    i, j = np.indices((6, 6))
    scores = 50 * np.tanh(np.einsum("hid,hjd->hij", q, k) / 50) + slope[:, None, None] * (j - i)
    scores = np.where((j <= i) & (i - j < 3), scores, -np.inf)
    expected = torch.softmax(torch.tensor(scores), -1).numpy() @ v
    np.testing.assert_allclose(run(source, Q=q, K=k, V=v, slope=slope, w=3), expected, rtol=1e-12)


def test_paged_gather() -> None:
    k, page = normal(10, 4, 3), RNG.integers(0, 10, (2, 5))
    y = run("y[b, j, d] = K[page[b, j // P], j % P, d]", {"j": 18}, K=k, page=page, P=4)
    j = np.arange(18)
    np.testing.assert_array_equal(y, k[page[:, j // 4], j % 4])


def test_row_wise_reductions_against_torch() -> None:
    x = normal(4, 9)
    t = torch.tensor(x)
    cases = {
        "mean": t.mean(1),
        "var": t.var(1, unbiased=False),
        "std": t.std(1, unbiased=False),
        "logsumexp": t.logsumexp(1),
        "argmax": t.argmax(1),
        "argmin": t.argmin(1),
        "max": t.amax(1),
        "min": t.amin(1),
        "sum": t.sum(1),
        "prod": t.prod(1),
    }
    for op, expected in cases.items():
        y = run(f"y[i] = {op}[j](x[i, j])", x=x)
        assert (y.dtype == np.int64) == op.startswith("arg")
        np.testing.assert_allclose(y, expected.numpy(), rtol=1e-12)


def test_logsumexp_and_argmax_of_special_rows() -> None:
    x = np.array([[-np.inf] * 3, [1, np.inf, 2], [1, np.nan, 2], [5, 5, 1]])
    np.testing.assert_array_equal(run("y[i] = logsumexp[j](x[i, j])", x=x)[:3], [-np.inf, np.inf, np.nan])
    np.testing.assert_array_equal(run("y[i] = argmax[j](x[i, j])", x=x), torch.tensor(x).argmax(1))


def test_shadowed_axes() -> None:
    x = normal(3, 4)
    np.testing.assert_allclose(run("y[i] = sum[j](x[i, j] / sum[j](x[i, j]))", x=x), np.ones(3))
    y = run("y[i, j] = x[i, j] - sum[j](x[i, j])", x=x)
    np.testing.assert_allclose(y, x - x.sum(1, keepdims=True))
    y = run("y[i, j] = sum[j](x[i, j])", x=x)
    np.testing.assert_allclose(y, np.broadcast_to(x.sum(1, keepdims=True), (3, 4)))


def test_renamed_axes() -> None:
    x, z = normal(4, 4), normal(3, 4)
    source = "T[i] = sum[j](x[i, j] * j)\ny[k] = sum[j](T[j] * z[k, j])"
    np.testing.assert_allclose(run(source, x=x, z=z), z @ (x @ np.arange(4)))


def test_comparisons_are_truth_values_and_sums_count() -> None:
    x = normal(3, 8)
    positive = run("y[i, j] = 0 < x[i, j] <= 1", x=x)
    assert positive.dtype == bool
    np.testing.assert_array_equal(positive, (x > 0) & (x <= 1))
    count = run("y[i] = sum[j](x[i, j] > 0)", x=x)
    assert count.dtype == np.int64
    np.testing.assert_array_equal(count, (x > 0).sum(1))
    np.testing.assert_array_equal(run("y[i] = any[j](x[i, j] > 1)", x=x), (x > 1).any(1))
    np.testing.assert_array_equal(run("y[i] = all[j](x[i, j] > -1)", x=x), (x > -1).all(1))
    np.testing.assert_array_equal(
        run("y[i, j] = not (x[i, j] > 0 or x[i, j] < -1)", x=x), (x <= 0) & (x >= -1)
    )


def test_truth_valued_tensors() -> None:
    x, keep = normal(3, 4), RNG.integers(0, 2, (3, 4)).astype(bool)
    np.testing.assert_array_equal(run("y[i, j] = where(keep[i, j], x[i, j], 0)", x=x, keep=keep), x * keep)


def test_integers_stay_exact() -> None:
    n = np.array([2**53 + 1, 2**53 + 3])
    np.testing.assert_array_equal(run("y[i] = n[i] - max(n[i], 7) + i * N(i)", n=n), [0, 2])
    assert run("y = sum[i](n[i])", n=n) == 2**54 + 4
    np.testing.assert_array_equal(run("y[i] = n[i] // 2 % 5 - abs(-i)", n=n), n // 2 % 5 - np.arange(2))


def test_written_casts_round() -> None:
    x = normal(50) * 100
    np.testing.assert_array_equal(
        run("y[i] = f8e4m3(x[i])", x=x), torch.tensor(x).to(torch.float8_e4m3fn).double()
    )
    np.testing.assert_array_equal(run("y: bf16[i]\ny[i] = x[i]", x=x), torch.tensor(x).bfloat16().double())
    assert (run("y[i] = f16(x[i])", x=x) != x).any()


def test_empty_axes() -> None:
    x = np.empty((3, 0))
    for op, identity in {"sum": 0, "max": -np.inf, "min": np.inf, "prod": 1}.items():
        np.testing.assert_array_equal(run(f"y[i] = {op}[j](x[i, j])", x=x), np.full(3, identity))
    np.testing.assert_array_equal(run("y[i] = mean[j](x[i, j])", x=x), np.full(3, np.nan))
    np.testing.assert_array_equal(run("y[i] = any[j](x[i, j] > 0)", x=x), np.zeros(3, bool))
    np.testing.assert_array_equal(run("y[i] = all[j](x[i, j] > 0)", x=x), np.ones(3, bool))
    assert run("y[j, i] = x[i, j]", x=x).shape == (0, 3)


def test_fully_masked_rows_are_nan_as_in_torch() -> None:
    y = run("y[i, j] = exp(x[i, j] - max[j](x[i, j]))", x=np.full((1, 3), -np.inf))
    assert np.isnan(y).all()


def test_axes_that_nothing_reads() -> None:
    assert run("y = sum[j](1)", {"j": 5}) == 5
    np.testing.assert_array_equal(run("y[i, j] = x[i] + 0", {"j": 2}, x=np.array([1.0, 2])), [[1, 1], [2, 2]])
    np.testing.assert_array_equal(run("y[i] = sum[j](x[i])", {"j": 3}, x=np.array([1.0, 2])), [3, 6])


def test_reads_outside_give_zero_under_a_guard() -> None:
    x = np.array([1.0, 2, 3])
    np.testing.assert_array_equal(run("y[i] = where(i > 0, x[i - 1], 0) + 0 * x[i]", x=x), [0, 1, 2])
    page = np.array([-1, 0, 7])
    guarded = "y[i] = where((page[i] >= 0) & (page[i] < 3), x[page[i]], 0)"
    np.testing.assert_array_equal(run(guarded, x=x, page=page), [0, 1, 0])
    empty = run("y[i] = where(page[i] >= 0, x[page[i]], -1)", x=np.empty(0), page=np.array([-1, -1]))
    np.testing.assert_array_equal(empty, [-1, -1])


def test_diagonal_and_transposed_reads() -> None:
    x = normal(4, 4)
    np.testing.assert_array_equal(run("y[i] = x[i, i]", x=x), np.diag(x))
    np.testing.assert_array_equal(run("y[i, j] = x[j, i]", x=x), x.T)
    np.testing.assert_array_equal(run("y[i, j] = x[i, j] - x[j, i]", x=x), x - x.T)


def test_torch_inputs_and_several_outputs() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    m, s = run("m[i] = max[j](x[i, j])\ns[i] = sum[j](exp(x[i, j] - m[i]))\nreturn m, s", x=x)
    np.testing.assert_array_equal(m, x.double().amax(1))
    np.testing.assert_allclose(s, (x.double() - x.double().amax(1, keepdim=True)).exp().sum(1))
    program = parse("y[i] = x[i] * c")
    scaled = reference(program, {"x": torch.ones(2, requires_grad=True).detach()}, {"c": torch.tensor(2.0)})
    np.testing.assert_array_equal(scaled, [2, 2])


def test_bad_inputs() -> None:
    with pytest.raises(BindError, match="'x' has elements of type complex128, not numbers"):
        run("y[i] = x[i]", x=np.ones(3, complex))
    with pytest.raises(BindError, match="scalar 'c' is str, not a number\npass c=1.0"):
        run("y[i] = x[i] * c", x=np.ones(3), c="2")
    with pytest.raises(
        TypeCheckError, match="'k' is used in an index, so it holds integers; the tensor given is f64"
    ):
        run("y[i] = x[k[i]]", x=np.ones(3), k=np.zeros(3))
    with pytest.raises(TypeCheckError, match="'x' is declared f16, the tensor given is i64"):
        run("x: f16[i]\ny[i] = x[i]", x=np.ones(3, int))


@pytest.mark.parametrize("limit", [1, 4, 40])
def test_large_reductions_fold_in_pieces(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal(2, 4, 7, 5), normal(2, 2, 7, 5), normal(2, 2, 7, 3)
    expected = run(ATTENTION, Q=q, K=k, V=v, g=2, scale=0.3)
    shadowed = "y[i] = sum[j](x[i, j] / sum[j](x[i, j]) * max[j, k](x[i, j] + z[k]))"
    x, z = normal(6, 5), normal(4)
    whole = run(shadowed, x=x, z=z)
    counts = run("y[i] = max[j](where(x[i, j] > 0, j, -1))", x=x)
    monkeypatch.setattr(interpreter, "MAX_ELEMENTS", limit)
    np.testing.assert_allclose(run(ATTENTION, Q=q, K=k, V=v, g=2, scale=0.3), expected, rtol=1e-12)
    np.testing.assert_allclose(run(shadowed, x=x, z=z), whole, rtol=1e-12)
    np.testing.assert_array_equal(run("y[i] = max[j](where(x[i, j] > 0, j, -1))", x=x), counts)


def test_trials_are_independent() -> None:
    program = parse(
        "m[i] = max[j](x[i, j] * c)\n"
        "y[i, e] = sum[j](where(x[i, j] > m[i] / 2, x[i, j], -1) * w[page[j], e])\n"
        "k[i] = argmax[j](x[i, j])\n"
        "n[i] = page[i]\n"
        "return y, k, n"
    )
    x, w, page = normal(5, 3, 3), normal(5, 4, 2), np.array([3, 0, 1])
    extents = {"i": 3, "j": 3, "e": 2}
    domain = FloatDomain()
    together = evaluate(
        program, {"x": x, "w": w, "page": page}, {"c": np.arange(5.0)}, extents, domain, batch=5
    )
    assert {name: value.shape for name, value in together.items()} == {
        "y": (5, 3, 2),
        "k": (5, 3),
        "n": (5, 3),
    }
    for trial in range(5):
        inputs = {"x": x[trial], "w": w[trial], "page": page}
        alone = evaluate(program, inputs, {"c": float(trial)}, extents, domain)
        for name, value in alone.items():
            np.testing.assert_allclose(together[name][trial], value, rtol=1e-12)


def test_float32_stays_float32() -> None:
    program = parse("y[i] = sum[j](exp(x[i, j]) / 3 + j) * scale")
    x = normal(2, 3).astype(np.float32)
    y = evaluate(program, {"x": x}, {"scale": 2}, {"i": 2, "j": 3}, FloatDomain("float32"))["y"]
    assert y.dtype == np.float32


def test_tiles_restrict_positions_and_locals_are_read() -> None:
    x = normal(3, 10)
    domain = FloatDomain()
    whole = Env(domain, {"x": x}, {}, {"i": 3, "j": 10})
    load = Load("x", (Axis("i"), Axis("j")))
    total = domain.full((3,), 0.0)
    for start in range(0, 10, 4):
        tile = Env(
            domain,
            {"x": x},
            {},
            whole.extents,
            positions={"j": np.arange(start, min(start + 4, 10))},
            locals={"acc": (("i",), total)},
        )
        update = call("add", Local("acc", ("i",)), Reduce("sum", "j", call("mul", load, Axis("j"))))
        total = expand(evaluate_expr(update, tile), ("i",), tile)
    np.testing.assert_allclose(total, x @ np.arange(10))


def test_positions_past_the_end_read_zero() -> None:
    env = Env(FloatDomain(), {"x": np.ones(5)}, {}, {"j": 5}, positions={"j": np.arange(4, 8)})
    value = evaluate_expr(Load("x", (Axis("j"),)), env)
    assert value.dims == ("j",)
    np.testing.assert_array_equal(value.data, [1, 0, 0, 0])


def test_values_name_their_dims() -> None:
    env = Env(FloatDomain(), {"x": np.ones((2, 3))}, {}, {"i": 2, "j": 3})
    row, size = evaluate_all([Reduce("sum", "j", Load("x", (Axis("i"), Axis("j")))), Size("j")], env)
    assert (row.dims, size.dims, int(size.data)) == (("i",), (), 3)
    assert expand(Value(("i",), np.arange(2)), ("j", "i"), env).tolist() == [[0, 1]] * 3


LINES = [
    "A[i, j] = x[i, j] * 2 + z[j]",
    "B[i] = sum[j](A[i, j] * x[j, i])",
    "C[j] = B[j] + max[i](A[i, j])",
    "D[i, k] = sum[j](A[j, i] * A[k, j]) + C[k]",
    "E[j, i] = D[i, j] + sum[i](D[j, i] * C[i])",
    "F[k] = sum[i, j](E[i, j] * D[k, (i + 1) % N(j)]) + 0 * z[k]",
    "G[i] = F[(i + 2) % N(i)] - B[i] + mean[i](C[i])",
]


def test_inlining_means_the_same_as_line_by_line() -> None:
    """Temporaries stored as tensors, and temporaries inlined, give the same values."""
    inputs = {"x": normal(3, 3), "z": normal(3)}
    stored: dict[str, Any] = dict(inputs)
    for line in LINES:
        single = parse(line)
        stored[line[0]] = reference(single, {t.name: stored[t.name] for t in single.tensors})
    for last in range(1, len(LINES) + 1):
        name = LINES[last - 1][0]
        program = parse("\n".join([*LINES[:last], f"return {name}"]))
        for form in (program, parse(show_program(program))):
            result = reference(form, {t.name: inputs[t.name] for t in form.tensors})
            np.testing.assert_allclose(result, stored[name], rtol=1e-9)


def test_errors_of_inputs_are_errors_of_ours() -> None:
    for inputs in ({}, {"x": np.ones((2, 2))}, {"x": np.ones(2), "c": 1}, {"x": np.ones(2), "y": np.ones(2)}):
        with pytest.raises(EqfuseError):
            run("y[i] = x[i]", **inputs)


GATHERS = {
    "a gather": ("y[i] = T[ids[i]]", "T", 7),
    "below 0": ("y[i] = T[ids[i] - 1]", "T", -1),
    "a row": ("y[i,j] = M[ids[i], j]", "M", 7),
    "where a condition holds": ("y[i] = where(m[i], 0, T[ids[i]])", "T", 7),
    "a term that no mask makes 0": ("y[j] = sum[i](where(i < 3, w[i], 0) * M[ids[i], j])", "M", 7),
    "a position that is found": ("y[i] = T[argmax[j](M[i,j]) * 3]", "T", 6),
    "guarded": ("y[i] = where(ids[i] < 5, T[ids[i]], 0)", "", 0),
    "guarded by data": ("y[i] = where(m[i], T[ids[i]], 0)", "", 0),
    "what a mask makes 0": ("y[j] = sum[i](where(i < 2, w[i], 0) * M[ids[i], j])", "", 0),
    "guarded in a maximum": ("y = max[i](where(ids[i] < 5, T[ids[i]], -inf))", "", 0),
}


@pytest.mark.parametrize("name", GATHERS)
def test_positions_in_data_are_checked_as_kernels_check_them(name: str) -> None:
    source, tensor, position = GATHERS[name]
    given = {
        "T": torch.arange(5.0),
        "M": torch.tensor([[0.0, 1.0, 2.0]] * 5),
        "ids": torch.tensor([0, 4, 7]),
        "m": torch.tensor([True, True, False]),
        "w": torch.ones(3),
    }
    read = {each.name: given[each.name] for each in parse(source).tensors}
    runs = eq.reference(source), eq.compile(source, native="off", verify=False)
    if not tensor:
        assert np.allclose(*(run(**read) for run in runs))
        return
    for run in runs:
        with pytest.raises(EqfuseError, match=f"'{tensor}': position {position} is outside a dimension of 5"):
            run(**read)
