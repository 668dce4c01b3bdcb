"""Reductions over the positions that a key selects: which are sorted, that it means the same, and which calls run so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.calls import routing
from eqfuse.certification import Checks, certify
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.errors import VerificationError
from eqfuse.terms.interpreter import reference
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Size, call, transform
from eqfuse.terms.parser import axes_of, parse
from eqfuse.terms.printer import output_lines
from eqfuse.terms.segments import Segments, Sort, segments
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.terms.views import Views

IN = "(ids_ends[v] <= t_sorted and t_sorted < ids_ends[v + 1])"
AT = "ids_order[t_sorted]"
SORTED = {
    "ids: i64[t]\ny[v,d] = sum[t](where(ids[t] == v, x[t,d], 0))": (
        f"y[v, d] = sum[t_sorted](where({IN[1:-1]}, x[{AT}, d], 0))"
    ),
    "ids: i32[t]\ny[v] = sum[t](where(v == ids[t], 1, 0))": f"y[v] = sum[t_sorted](where({IN[1:-1]}, 1, 0))",
    "ids: i32[t]\ny[v] = max[t](where((ids[t] == v) & (x[t] > 0), x[t] * t, -inf))": (
        f"y[v] = max[t_sorted](where({IN[1:-1]} and x[{AT}] > 0, x[{AT}] * {AT}, -inf))"
    ),
    "ids: i32[t]\ny[v] = mean[t](where(ids[t] == v, x[t], 0))": (
        f"y[v] = sum[t_sorted](where({IN[1:-1]}, x[{AT}], 0)) / size_t"
    ),
    "ids: i64[b,t]\ny[v,d] = sum[b,t](where(ids[b,t] == v, x[b,d] / N(t), 0))": (
        "y[v, d] = sum[b_t_sorted](where(ids_ends[v] <= b_t_sorted and b_t_sorted < ids_ends[v + 1], "
        "x[ids_order_b[b_t_sorted], d] / size_t, 0))"
    ),
    "a: i64[t]\nb: i64[t]\ny[u,v] = sum[t](where((b[t] == v) & (a[t] == u) & (x[t] > 0), x[t] * m[b[t]], 0))": (
        "y[u, v] = sum[t_sorted](where(a_first[u, v] <= t_sorted and t_sorted < a_last[u, v] and x[a_order[t_sorted]] > 0, "
        "x[a_order[t_sorted]] * m[v], 0))"
    ),
    "a: i64[v,t]\nb: i64[t]\ny[u,v] = sum[t](where((b[t] == v) & (a[v,t] == u), x[t], 0))": (
        "y[u, v] = sum[t_sorted](where(b_ends[v] <= t_sorted and t_sorted < b_ends[v + 1] and a[v, b_order[t_sorted]] == u, "
        "x[b_order[t_sorted]], 0))"
    ),
    "ids: i64[b,t]\ny[b,v] = sum[t](where(ids[b,t] == v, x[b,t], 0))": (
        "y[b, v] = sum[t_sorted](where(ids_ends[b, v] <= t_sorted and t_sorted < ids_ends[b, v + 1], "
        "x[b, ids_order[b, t_sorted]], 0))"
    ),
}
SOFTMAX = """
ids: i64[t]
m[v] = max[t](where(ids[t] == v, a[t], -inf))
y[v,d] = sum[t](where(ids[t] == v, exp(a[t] - m[v]) * x[t,d], 0)) / sum[t](where(ids[t] == v, exp(a[t] - m[v]), 0))
"""
UNSORTED = (
    "ids: i64[t]\ny[u] = sum[t](where(ids[t] == w[u], x[t], 0))",
    "y[v] = sum[t](where(ids[t] * 1.5 == v, x[t], 0))",
    "ids: i64[t]\ny[v] = sum[t](where(ids[t] < v, x[t], 0))",
    "ids: i64[v,t]\ny[v] = sum[t](where(ids[v,t] == v, x[t], 0))",
    "ids: i64[t]\ny[t] = sum[v](where(ids[t] == v, x[v], 0))",
    "ids: i64[t]\ny[d] = sum[t](sum[v](where(ids[t] == v, w[v,d] * x[t], 0)))",
    "ids: i64[n]\ny[v] = sum[t](where(ids[2*t] == v, x[t], 0))",
    "ids: i64[t]\ny[v] = sum[t](where(ids[t] == v, x[t], 0))\nassert ids[t] <= ids[t+1]",
)


@pytest.mark.parametrize("source", SORTED)
def test_reductions_over_selected_positions_are_over_segments(source: str) -> None:
    found = segments(parse(source))
    assert found is not None and output_lines(found.program.outputs) == [SORTED[source]]


@pytest.mark.parametrize("source", UNSORTED)
def test_other_reductions_are_as_they_were(source: str) -> None:
    assert segments(parse(source)) is None


def test_a_fold_that_depends_on_the_order_is_not_sorted() -> None:
    eq.reduction(
        "last_of",
        state="v, s",
        lift="x, 1",
        identity="0, 0",
        combine="v1 * (1 - s2) + v2, max(s1, s2)",
        result="v",
        replace=True,
    )
    assert segments(parse("ids: i64[t]\ny[v] = last_of[t](where(ids[t] == v, x[t], 0))")) is None


def test_positions_of_inner_reductions_are_their_own() -> None:
    found = segments(
        parse("ids: i64[t]\ny[v] = sum[t](where(ids[t] == v, x[t] - max[t](where(ids[t] == v, x[t], 0)), 0))")
    )
    assert found is not None and output_lines(found.program.outputs) == [
        f"y[v] = sum[t_sorted](where({IN[1:-1]}, x[{AT}] - max[t_sorted](where({IN[1:-1]}, x[{AT}], 0)), 0))"
    ]


def test_one_order_serves_every_reduction_by_a_key() -> None:
    found = segments(parse(SOFTMAX))
    assert found is not None and [str(sort) for sort in found.sorts] == ["t by ids[t] as t_sorted"]
    assert found.unread == ("ids",)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(36)


def _keys(*shape: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """Some of them of no segment."""
    return rng.integers(-2, most + 2, shape)


CALLS: dict[str, tuple[str, Callable[[np.random.Generator], dict[str, Any]]]] = {
    "embedding": (
        "ids: i64[t]\ny[v,d] = sum[t](where(ids[t] == v, x[t,d], 0))",
        lambda r: {"ids": _keys(41, most=9, rng=r), "x": r.normal(size=(41, 3)), "sizes": {"v": 9}},
    ),
    "bag": (
        "ids: i64[b,t]\ny[v,d] = sum[b,t](where(ids[b,t] == v, x[b,d] / N(t), 0))",
        lambda r: {"ids": _keys(6, 7, most=5, rng=r), "x": r.normal(size=(6, 3)), "sizes": {"v": 5}},
    ),
    "rows": (
        "ids: i64[t,b]\ny[b,v] = max[t](where(ids[t,b] == v, x[b,t] * t, -inf)) * g[v]",
        lambda r: {
            "ids": _keys(13, 4, most=5, rng=r),
            "x": r.normal(size=(4, 13)),
            "g": r.normal(size=5) + 3,
        },
    ),
    "softmax by key": (
        SOFTMAX,
        lambda r: {
            "ids": r.permutation(np.arange(47) % 6),
            "a": 9 * r.normal(size=47),
            "x": r.normal(size=(47, 3)),
            "sizes": {"v": 6},
        },
    ),
    "two keys": (
        "y[n,d] = sum[e](where(a[e] == n, x[e,d], 0)) - sum[e](where(b[e] == n, x[e,d] * w[e], 0))",
        lambda r: {
            "a": _keys(40, most=8, rng=r),
            "b": _keys(40, most=8, rng=r),
            "x": r.normal(size=(40, 3)),
            "w": r.normal(size=40),
            "sizes": {"n": 8},
        },
    ),
    "argmax by key": (
        "ids: i64[t]\nk[v] = argmax[t](where(ids[t] == v, x[t], -inf))",
        lambda r: {"ids": np.arange(60) % 5, "x": r.integers(0, 4, 60).astype(float), "sizes": {"v": 5}},
    ),
    "softmax of each edge": (
        """
        dst: i64[e]
        m[n,h] = max[e](where(dst[e] == n, a[e,h], -inf))
        p[e,h] = exp(a[e,h] - m[dst[e],h])
        z[n,h] = sum[e](where(dst[e] == n, p[e,h], 0))
        y[e,h] = p[e,h] / z[dst[e],h]
        return y
        """,
        lambda r: {"dst": r.permutation(np.arange(40) % 6), "a": 9 * r.normal(size=(40, 2))},
    ),
    "as many as are alike": (
        "g: i64[b,t]\ny[b,u] = sum[t](where(g[b,t] == g[b,u] % 3 + k[b], x[t], 0))\nk: i32[b]",
        lambda r: {"g": _keys(3, 9, most=4, rng=r), "k": r.integers(-1, 2, 3), "x": r.normal(size=9)},
    ),
    "a column of keys": (
        "ids: i64[t,c]\ny[v,d] = sum[t](where(ids[t,1] == v, x[t,d], 0))",
        lambda r: {"ids": _keys(12, 2, most=5, rng=r), "x": r.normal(size=(12, 3)), "sizes": {"v": 5}},
    ),
    "softmax of messages": (
        """
        dst: i64[e]
        m[n] = max[e](where(dst[e] == n, a[e], -inf))
        p[e] = exp(a[e] - m[dst[e]])
        z[n] = sum[e](where(dst[e] == n, p[e], 0))
        y[n,d] = sum[e](where(dst[e] == n, p[e] / z[dst[e]] * x[src[e],d], 0))
        return y
        """,
        lambda r: {
            "dst": r.permutation(np.arange(40) % 6),
            "src": r.integers(0, 6, 40),
            "a": 9 * r.normal(size=40),
            "x": r.normal(size=(6, 3)),
            "sizes": {"n": 6},
        },
    ),
    "made of integers": (
        "ids: i32[t]\nb: i64[u]\nk: i64\ny[v] = sum[t,u](where(v == where(ids[t] < 0, ids[t] + 9, ids[t] * k) // 2 + b[u] % 3 + t % 2, x[t,u], 0))",
        lambda r: {
            "ids": _keys(7, most=5, rng=r),
            "b": r.integers(0, 9, 5),
            "k": 3,
            "x": r.normal(size=(7, 5)),
            "sizes": {"v": 7},
        },
    ),
    "an axis of rows that is reduced along too": (
        "ids: i64[b,t]\ny[b,v] = sum[t](where(ids[b,t] == v, x[b,t] - max[b](x[b,t] * g[b]), 0))",
        lambda r: {
            "ids": _keys(3, 9, most=4, rng=r),
            "x": r.normal(size=(3, 9)),
            "g": r.normal(size=3),
            "sizes": {"v": 4},
        },
    ),
    "a segment's number that is an axis of another reduction": (
        "ids: i64[t]\nw: f32[v]\ny[v] = sum[t](where(ids[t] == v, x[t] - max[v](where(ids[t] == v, w[v] * x[t], w[v])), 0))",
        lambda r: {"ids": _keys(20, most=4, rng=r), "x": r.normal(size=20), "w": r.normal(size=4)},
    ),
    "two keys of one table": (
        "a: i64[t]\nb: i64[t]\ny[v,u] = sum[t](where((x[t] > 0) & (a[t] == v) & (b[t] == u), x[t] * g[a[t],b[t]], 0))",
        lambda r: {
            "a": _keys(60, most=4, rng=r),
            "b": _keys(60, most=3, rng=r),
            "x": r.normal(size=60),
            "g": r.normal(size=(4, 3)),
            "sizes": {"v": 4, "u": 3},
        },
    ),
    "two keys in rows": (
        "a: i64[b,t]\nc: i64[t]\ny[u,v,w,b] = max[t](where((c[t] == v) & (a[b,t] == u), x[b,t], -1)) * g[w]",
        lambda r: {
            "a": _keys(3, 30, most=4, rng=r),
            "c": _keys(30, most=2, rng=r),
            "x": r.normal(size=(3, 30)),
            "g": r.normal(size=2),
            "sizes": {"u": 4, "v": 2},
        },
    ),
    "keys of positions and of their rows": (
        "a: i64[b,t]\nk: i64[b]\ny[u,v] = sum[b,t](where((k[b] == v) & (a[b,t] == u), x[b,t], 0))",
        lambda r: {
            "a": _keys(7, 9, most=4, rng=r),
            "k": _keys(7, most=3, rng=r),
            "x": r.normal(size=(7, 9)),
            "sizes": {"u": 4, "v": 3},
        },
    ),
    "edges of a graph": (
        "m: axis[n]\na: i64[t]\nb: i64[t]\ny[n,m] = sum[t](where((a[t] == n) & (b[t] == m), x[t], 0))",
        lambda r: {
            "a": _keys(50, most=5, rng=r),
            "b": _keys(50, most=5, rng=r),
            "x": r.normal(size=50),
            "sizes": {"n": 5},
        },
    ),
    "two axes and one more": (
        "y[v] = prod[b,c,t](where(ids[t,b] == v, 1 + x[b,c,t] / 9, 1))",
        lambda r: {"ids": _keys(6, 4, most=3, rng=r), "x": r.normal(size=(4, 2, 6)), "sizes": {"v": 3}},
    ),
}


def _torch(values: dict[str, Any], dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return torch.from_numpy(value).to(dtype if value.dtype.kind == "i" else torch.float32)

    return {name: one(value) for name, value in values.items()}


def _apart(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    return {name: value for name, value in values.items() if name != "sizes"}, values.get("sizes", {})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("name", CALLS)
def test_sorted_positions_mean_the_same(name: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    source, make = CALLS[name]
    values, sizes = _apart(make(rng))
    program = parse(source)
    form = segments(program)
    assert form is not None
    tensors = {n: v for n, v in values.items() if isinstance(v, np.ndarray)}
    scalars = {n: v for n, v in values.items() if n not in tensors}
    extents = bind(program, {n: v.shape for n, v in tensors.items()}, sizes, scalars)
    taken = form.taken({**_torch(tensors, dtype), **scalars}, extents)
    arrays = {n: v.numpy() for n, v in taken.items() if isinstance(v, torch.Tensor)}
    sampled, numbers = form.sampled(tensors, scalars, extents)
    for made in sampled.keys() - tensors.keys():
        np.testing.assert_array_equal(sampled[made], arrays[made])
    assert numbers == {n: v for n, v in taken.items() if n not in arrays}
    found = reference(form.program, arrays, numbers, form.extents(extents))
    np.testing.assert_allclose(found, reference(program, tensors, scalars, sizes), rtol=2e-6, atol=1e-6)


def _large(name: str, rng: np.random.Generator) -> tuple[eq.Kernel, dict[str, Any]]:
    """A call that is large enough to be sorted."""
    source = CALLS[name][0]
    made: dict[str, Any] = {
        "embedding": {
            "ids": _keys(900, most=4000, rng=rng),
            "x": rng.normal(size=(900, 8)),
            "sizes": {"v": 4000},
        },
        "bag": {
            "ids": _keys(60, 15, most=4000, rng=rng),
            "x": rng.normal(size=(60, 8)),
            "sizes": {"v": 4000},
        },
        "softmax by key": {
            "ids": rng.permutation(np.arange(1800) % 1500),
            "a": 9 * rng.normal(size=1800),
            "x": rng.normal(size=(1800, 8)),
            "sizes": {"v": 1500},
        },
    }[name]
    values, sizes = _apart(made)
    return eq.compile(source, target="cpu", native="off"), {**_torch(values), "sizes": sizes}


def _agrees(found: Any, kernel: eq.Kernel, values: dict[str, Any]) -> None:
    tensors, sizes = _apart(values)
    wanted = reference(kernel.program, {n: v.numpy() for n, v in tensors.items()}, {}, sizes)
    torch.testing.assert_close(
        torch.as_tensor(np.asarray(found)),
        torch.as_tensor(np.asarray(wanted)),
        check_dtype=False,
        rtol=1e-4,
        atol=1e-4,
        equal_nan=True,
    )


@pytest.mark.parametrize("name", ["embedding", "bag", "softmax by key"])
def test_calls_are_sorted_where_that_takes_less(name: str, rng: np.random.Generator) -> None:
    kernel, values = _large(name, rng)
    for _ in range(4):  # looked at, remembered, made for its kind, by torch's guards
        values["ids"] = values["ids"][torch.randperm(len(values["ids"]))]
        _agrees(kernel(**values), kernel, values)
        assert "sorted positions" in str(kernel.certificate)
    assert "ids_order" in str(kernel.loops) and "ids_ends ascends" in str(kernel.loops)
    few = {n: v[:3] if isinstance(v, torch.Tensor) else {a: 3 for a in v} for n, v in values.items()}
    _agrees(kernel(**few), kernel, few)
    assert "sorted positions" not in str(kernel.certificate)


@pytest.mark.slow(but=["off"])
@pytest.mark.parametrize("native", ["off", "wait"])
def test_calls_with_one_key_give_the_same_bits(rng: np.random.Generator, native: Any) -> None:
    """Nine of ten positions have one key, and what is added up does not depend on who is first."""
    kernel = eq.compile(CALLS["embedding"][0], target="cpu", native=native)
    ids = torch.from_numpy(np.where(rng.random(20_000) < 0.9, 7, _keys(20_000, most=4000, rng=rng)))
    values = {"ids": ids, "x": torch.randn(20_000, 8), "sizes": {"v": 4000}}
    first = kernel(**values)
    assert "sorted positions" in str(kernel.certificate)
    assert all(torch.equal(first, kernel(**values)) for _ in range(5))
    _agrees(first, kernel, values)


def test_explanations_say_what_is_sorted(rng: np.random.Generator) -> None:
    kernel, values = _large("embedding", rng)
    kernel(**values)
    assert kernel.derivation.check()
    said = kernel.explain()
    assert "y[v, d] = sum[t](where(ids[t] == v, x[t, d], 0))" in said
    assert "It runs as the program below: sorted positions (t by ids[t] as t_sorted)." in said
    tuned = kernel.tune(**values, seconds=0.2, plans=2)
    assert tuned is not None
    _agrees(kernel(**values), kernel, values)


def test_lengths_that_are_near_are_not_priced_anew(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, values = _large("embedding", rng)
    kernel(**values)
    monkeypatch.setattr(compiler, "predicted_sorted", lambda *_: pytest.fail("priced"))
    fewer = {**values, "ids": values["ids"][:800], "x": values["x"][:800], "sizes": {"v": 3000}}
    _agrees(kernel(**fewer), kernel, fewer)
    assert "sorted positions" in str(kernel.certificate) and kernel.compilations <= 1


def test_keys_are_read_at_each_call(rng: np.random.Generator) -> None:
    kernel, values = _large("embedding", rng)
    launch = kernel.bind(**values)
    for _ in range(2):
        values["ids"].copy_(torch.from_numpy(_keys(900, most=4000, rng=rng)))
        _agrees(launch(), kernel, values)
        _agrees(kernel(**values), kernel, values)
    assert "sorted positions" in str(kernel.certificate)


def test_strides_and_arrays_are_sorted(rng: np.random.Generator) -> None:
    kernel, values = _large("embedding", rng)
    spread = {"ids": torch.stack([values["ids"]] * 2, 1)[:, 0], "x": values["x"].t().contiguous().t()}
    for _ in range(3):
        _agrees(kernel(**{**values, **spread}), kernel, values)
        assert "sorted positions" in str(kernel.certificate)
    arrays = {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    assert isinstance(kernel(**arrays), np.ndarray)
    _agrees(kernel(**arrays), kernel, values)


def test_expanded_keys_are_sorted_once() -> None:
    form = segments(parse("ids: i64[t,d]\ny[v,d] = sum[t](where(ids[t,d] == v, x[t,d], 0))"))
    assert form is not None
    ids = torch.tensor([2, 0, 5, 2])[:, None].expand(4, 3)
    taken = form.taken({"ids": ids, "x": torch.ones(4, 3)}, {"t": 4, "d": 3, "v": 3})
    assert taken["ids_order"].tolist() == [[1, 0, 3, 2]] * 3 and taken["ids_order"].stride(0) == 0
    assert taken["ids_ends"].tolist() == [[0, 1, 1, 3]] * 3


@pytest.mark.parametrize("extents", [{"t": 2**31, "v": 3}, {"t": 3, "v": 2**31 - 1}])
def test_what_has_no_room_in_32_bits_is_not_sorted(extents: dict[str, int]) -> None:
    form = segments(parse("ids: i64[t]\ny[v] = sum[t](where(ids[t] == v, x[t], 0))"))
    assert form is not None and not form.fits(extents)
    assert form.fits({axis: size - 1 for axis, size in extents.items()})


def test_kernels_that_sort_are_copied(rng: np.random.Generator) -> None:
    kernel, values = _large("embedding", rng)
    kernel(**values)
    for other in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        _agrees(other(**values), kernel, values)
        assert "sorted positions" in str(other.certificate)


def test_a_schedule_that_is_asked_for_is_that_of_the_program_as_written(rng: np.random.Generator) -> None:
    _, values = _large("embedding", rng)
    kernel = eq.compile(CALLS["embedding"][0], target="cpu", native="off", prefer="rolling")
    kernel(**values)
    assert "sorted positions" not in str(kernel.certificate)


def test_gradients_of_reads_are_sorted(rng: np.random.Generator) -> None:
    kernel = eq.compile("ids: i64[t]\nY[t,d] = E[ids[t],d] * w[t]", target="cpu", native="off")
    ids, w = torch.from_numpy(rng.integers(0, 4000, 900)), torch.randn(900)
    table = torch.randn(4000, 8, requires_grad=True)
    up = torch.randn(900, 8)
    kernel(E=table, ids=ids, w=w).backward(up)
    wanted = torch.zeros(4000, 8).index_add(0, ids, up * w[:, None])
    torch.testing.assert_close(table.grad, wanted)
    assert "sorted positions" in str(kernel.backward.certificate)


def _of_sorts(**changes: Any) -> Callable[[Segments], Segments]:
    return lambda found: replace(found, sorts=tuple(replace(sort, **changes) for sort in found.sorts))


def _of_program(step: Callable[[Expr], Expr]) -> Callable[[Segments], Segments]:
    def wrong(found: Segments) -> Segments:
        outputs = tuple(replace(o, expr=transform(o.expr, step)) for o in found.program.outputs)
        return replace(found, program=replace(found.program, outputs=outputs))

    return wrong


def _swapped(old: str, new: str) -> Callable[[Segments], Segments]:
    return _of_program(
        lambda node: Call(new, node.args) if isinstance(node, Call) and node.fn == old else node
    )


def _one_further(node: Expr) -> Expr:
    match node:
        case Load("ids_order", (at,)):
            return Load("ids_order", (call("maximum", call("sub", at, Const(1)), Const(0)),))
    return node


def _unordered(node: Expr) -> Expr:
    return node.index[0] if isinstance(node, Load) and node.tensor == "ids_order" else node


class _Backwards(Sort):
    def sampled(self, tensors: Any, scalars: Any, extents: Any) -> dict[str, Any]:
        found = super().sampled(tensors, scalars, extents)
        return {**found, "ids_order": found["ids_order"][..., ::-1]}


class _Below(Sort):
    def sampled(self, tensors: Any, scalars: Any, extents: Any) -> dict[str, Any]:
        found = super().sampled(tensors, scalars, extents)
        return {**found, "ids_ends": np.maximum(found["ids_ends"] - 1, 0)}


def _as(kind: type[Sort]) -> Callable[[Segments], Segments]:
    def wrong(found: Segments) -> Segments:
        return replace(found, sorts=tuple(kind(**sort.__dict__) for sort in found.sorts))

    return wrong


MISTAKES: dict[str, Callable[[Segments], Segments]] = {
    "the end is inside": _swapped("lt", "le"),
    "the start is outside": _swapped("le", "lt"),
    "positions that are not sorted": _of_program(_unordered),
    "the position before": _of_program(_one_further),
    "another key": _of_sorts(key=Load("other", (Axis("t"),))),
    "keys below the first segment": _of_sorts(
        key=call(
            "where", call("lt", Load("ids", (Axis("t"),)), Const(0)), Const(0), Load("ids", (Axis("t"),))
        )
    ),
    "another program": lambda found: replace(
        found, source=parse(found.source.source.replace("ids[t] == v", "ids[t] == v + 1"))
    ),
    "from the greatest to the least": _as(_Backwards),
    "ends that count one less": _as(_Below),
}


def _of_keys(change: Callable[[Expr], Expr]) -> Callable[[Segments], Segments]:
    return lambda found: replace(
        found, sorts=tuple(replace(sort, key=transform(sort.key, change)) for sort in found.sorts)
    )


def _in_any_case(node: Expr) -> Expr:
    return node.args[1] if isinstance(node, Call) and node.fn == "where" else node


def _one_bound(node: Expr) -> Expr:
    match node:
        case Call("lt", (_, Size("v"))):
            return call("eq", Const(0), Const(0))
    return node


def _other_count(node: Expr) -> Expr:
    return Size("u") if node == Size("v") else node


def _other_place(node: Expr) -> Expr:
    match node:
        case Call("add", (Call("mul", (first, count)), second)):
            return call("add", call("mul", second, count), first)
    return node


def _turned(node: Expr) -> Expr:
    return Load("g", node.index[::-1]) if isinstance(node, Load) and node.tensor == "g" else node


class _Transposed(Sort):
    def sampled(self, tensors: Any, scalars: Any, extents: Any) -> dict[str, Any]:
        found = super().sampled(tensors, scalars, extents)
        for name in ("a_first", "a_last"):
            shape = found[name].shape
            found[name] = found[name].swapaxes(-1, -2).reshape(shape)
        return found


MISTAKES_BY_TWO: dict[str, Callable[[Segments], Segments]] = {
    "the end is inside": _swapped("lt", "le"),
    "the start is outside": _swapped("le", "lt"),
    "keys outside of the table": _of_keys(_in_any_case),
    "a key behind the table's row": _of_keys(_one_bound),
    "rows of another length": _of_keys(_other_count),
    "columns for rows": _of_keys(_other_place),
    "ends of the transposed table": _as(_Transposed),
    "one key for both": _of_keys(lambda node: Load("a", node.index) if isinstance(node, Load) else node),
}
BY_ONE = "ids: i64[t]\nother: i64[t]\ny[v,d] = sum[t](where(ids[t] == v, x[t,d] * other[t], 0))"
BY_TWO = "a: i64[t]\nb: i64[t]\ny[u,v] = sum[t](where((a[t] == u) & (b[t] == v), x[t] * t, 0))"
READING = BY_TWO.replace("* t,", "* g[a[t],b[t]],")
WRONG = {
    **{name: (BY_ONE, wrong) for name, wrong in MISTAKES.items()},
    **{f"two keys: {name}": (BY_TWO, wrong) for name, wrong in MISTAKES_BY_TWO.items()},
    "what is read at both keys": (READING, _of_program(_turned)),
    "right": (BY_ONE, lambda found: found),
    "two keys: right": (BY_TWO, lambda found: found),
    "read at both keys: right": (READING, lambda found: found),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_order_is_not_verified(name: str) -> None:
    source, change = WRONG[name]
    found = segments(parse(source))
    assert found is not None
    wrong = change(found)
    derived: Derived = replace(compiler.rederived(wrong.program), views=Views(segments=wrong))
    dtypes = program_dtypes(wrong.program)
    extents = {"v": 20, "u": 9, "t_sorted": 60, "d": 8, "end": 21}
    compiled = compiler.pipeline(derived, extents, dtypes, device_named("cpu"))
    if name.endswith("right"):
        certificate = certify(derived, compiled, Checks(16, again=True))
        assert certificate.ok and f"sorted positions ({found.sorts[0]})" in str(certificate)
        return
    with pytest.raises(VerificationError):
        certify(derived, compiled, Checks(16, again=True))


def _drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """A program that reduces by a key, and what it is called with."""
    rng = np.random.default_rng(seed)
    sizes = {"b": int(rng.integers(1, 5)), "t": int(rng.integers(1, 30)), "d": int(rng.integers(1, 4))}
    segments_ = int(rng.integers(1, 9))
    over = [("t",), ("b", "t"), ("t", "b"), ("t", "d"), ("t",)][rng.integers(5)]
    key_axes = [("t",), ("b", "t"), ("t", "b")][rng.integers(3)]
    out = [axis for axis in ("b", "d") if axis not in over]
    key = f"k[{', '.join(key_axes)}]"
    of_data = bool(rng.integers(3) == 0)
    key = [
        key,
        key,
        f"where({key} < 0, {key} + {segments_}, {key})",
        f"({key} + 1) // 2",
        f"({key} + t) % {segments_}",
    ][rng.integers(5)]
    op, identity = [("sum", "0"), ("max", "-inf"), ("min", "inf"), ("prod", "1"), ("logsumexp", "-inf")][
        rng.integers(5)
    ]
    value = ["x[b,t,d]", "x[b,t,d] * w[t]", "exp(x[b,t,d]) + t", "x[b,t,d] - m[v]"][rng.integers(4)]
    mask = ["", " & (w[t] > 0)", " & (t < N(t) - 1)"][rng.integers(3)]
    at = "g[v]" if of_data else "v"
    left = [f"y[{', '.join((*out, 'v'))}]", f"y[{', '.join(('v', *out))}]"][rng.integers(2)]
    lines = ["k: i64[" + ", ".join(key_axes) + "]", *(["g: i64[v]"] if of_data else [])]
    if "m[v]" in value:
        lines.append(f"m[v] = max[b, t](where({key} == v, w[t], -1))")
    lines.append(f"{left} = {op}[{', '.join(over)}](where(({key} == {at}){mask}, {value}, {identity}))")
    values: dict[str, Any] = {
        "k": rng.integers(-3, segments_ + 3, [sizes[axis] for axis in key_axes]),
        "x": rng.normal(size=[sizes[axis] for axis in ("b", "t", "d")]),
        "w": rng.normal(size=sizes["t"]),
        "g": rng.integers(-3, segments_ + 3, segments_),
        "sizes": {**sizes, "v": segments_},
    }
    program = parse("\n".join(lines))
    read = {tensor.name for tensor in program.tensors}
    axes = set(axes_of(program.outputs))
    values = {name: value for name, value in values.items() if name in read or name == "sizes"}
    values["sizes"] = {axis: size for axis, size in values["sizes"].items() if axis in axes}
    return "\n".join(lines), values


def _check_drawn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing.Routes, "_chosen", lambda *_: True)
    source, values = _drawn(seed)
    given, sizes = _apart(values)
    kernel = eq.compile(source, target="cpu", native="off")
    found = kernel(**_torch(given), sizes=sizes)
    if kernel._current.views is None or kernel._current.views.segments is None:
        assert segments(kernel.program) is None
    wanted = reference(kernel.program, given, {}, sizes)
    torch.testing.assert_close(
        found.double(), torch.as_tensor(np.asarray(wanted)), rtol=2e-4, atol=2e-4, equal_nan=True, msg=source
    )


@pytest.mark.parametrize("seed", range(12))
def test_programs_by_key(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_drawn(seed, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_programs_by_key(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_drawn(seed, monkeypatch)
