"""Lowering of hand-made nests to tiles: structure, and values on padded ragged blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer, Carried, Kernel, Let, Loop, Nest, Store
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import CASTS
from eqfuse.terms.nodes import Axis, Const, Expr, Load, Local, Program, Reduce, Size, call
from eqfuse.terms.parser import parse
from eqfuse.tile import nodes as tile
from eqfuse.tile.check import TileError, check
from eqfuse.tile.interpreter import run
from eqfuse.tile.lower.program import lower
from eqfuse.tile.printer import show
from eqfuse.tile.walk import nested

LOW = Const(-math.inf)
RNG = np.random.default_rng(7)


def load(tensor: str, axes: str) -> Expr:
    return Load(tensor, tuple(Axis(axis) for axis in axes))


def grid(axis: str, size: int) -> Block:
    return Block(axis, "grid", size)


def loop(axis: str, size: int) -> Block:
    return Block(axis, "loop", size)


def whole(axis: str) -> Block:
    return Block(axis, "whole", None)


def out(name: str, axes: str) -> Buffer:
    return Buffer(name, tuple(axes), None, True)


def lets(program: tile.TileProgram, kind: type) -> list[tile.Let]:
    """Every definition by an op of this kind, in order."""
    statements = (stmt for kernel in program.kernels for stmt in nested(kernel.body))
    return [stmt for stmt in statements if isinstance(stmt, tile.Let) and isinstance(stmt.op, kind)]


def fors(program: tile.TileProgram) -> list[tile.For]:
    statements = (stmt for kernel in program.kernels for stmt in nested(kernel.body))
    return [stmt for stmt in statements if isinstance(stmt, tile.For)]


class Exact(FloatDomain):
    """float64 in which casts do not round, so that only wrong positions can make a difference."""

    def call(self, fn: str, args: Sequence[Any]) -> Any:
        return args[0] if fn in CASTS else super().call(fn, args)


def run_one(
    program: tile.TileProgram,
    source: Program,
    tensors: Mapping[str, Any],
    extents: Mapping[str, int],
    **scalars: Any,
) -> Any:
    """The one output, in float64."""
    results = run(program, source, tensors, scalars, extents, Exact(), shards={})
    (result,) = results.values()
    return result


# Plain product ------------------------------------------------------------------------------------


def product_nest() -> Nest:
    body = Reduce("sum", "k", call("mul", load("A", "mk"), load("B", "kn")))
    store = Store("C", (Axis("m"), Axis("n")), ("m", "n"), body)
    return Nest((Kernel("gemm", ("m", "n"), (store,)),), (out("C", "mn"),))


PRODUCT = "C[m,n] = sum[k](A[m,k] * B[k,n])"


@pytest.mark.parametrize("inner", [whole("k"), loop("k", 4)], ids=["whole", "loop"])
@pytest.mark.parametrize("extents", [(5, 6, 7), (8, 4, 8), (1, 1, 1), (3, 9, 0)])
def test_product_of_matrices(inner: Block, extents: tuple[int, int, int]) -> None:
    m, n, k = extents
    config = KernelConfig((grid("m", 4), grid("n", 4), inner))
    source = parse(PRODUCT)
    program = lower(product_nest(), source, {"A": "f16", "B": "f16"}, (config,))
    a, b = RNG.normal(size=(m, k)), RNG.normal(size=(k, n))
    np.testing.assert_allclose(
        run_one(program, source, {"A": a, "B": b}, {"m": m, "n": n, "k": k}), a @ b, atol=1e-12
    )


def test_product_accumulates_in_the_dot() -> None:
    config = KernelConfig((grid("m", 4), grid("n", 4), loop("k", 4)))
    program = lower(product_nest(), parse(PRODUCT), {"A": "f16", "B": "f16"}, (config,))
    interior, tail = fors(program)
    assert (interior.masked, tail.masked) == (False, True)
    for dot in lets(program, tile.Dot):
        assert isinstance(dot.op, tile.Dot)
        assert dot.op.accumulator is not None
        assert (dot.op.left.dims, dot.op.right.dims, dot.value.dims) == (("m", "k"), ("k", "n"), ("m", "n"))
        assert (dot.op.left.dtype, dot.op.right.dtype, dot.value.dtype) == ("f16", "f16", "f32")
    assert len(lets(program, tile.Dot)) == 2
    assert program.buffers[0].dtype == "f16"
    assert not any(isinstance(stmt, tile.Let) and isinstance(stmt.op, tile.Bound) for stmt in interior.body)


def test_shared_dims_are_a_dot_only_on_request() -> None:
    body = Reduce("sum", "k", call("mul", load("A", "bmk"), load("B", "bkn")))
    store = Store("C", tuple(map(Axis, "bmn")), tuple("bmn"), body)
    nest = Nest((Kernel("batched", ("b", "m", "n"), (store,)),), (out("C", "bmn"),))
    config = KernelConfig((grid("b", 2), grid("m", 2), grid("n", 2), whole("k")))
    source = parse("C[b,m,n] = sum[k](A[b,m,k] * B[b,k,n])")
    a, b = RNG.normal(size=(3, 5, 6)), RNG.normal(size=(3, 6, 3))
    extents = {"b": 3, "m": 5, "n": 3, "k": 6}
    for batched, dots in ((False, 0), (True, 1)):
        program = lower(nest, source, {"A": "f32", "B": "f32"}, (config,), batched_dots=batched)
        assert len(lets(program, tile.Dot)) == dots
        np.testing.assert_allclose(run_one(program, source, {"A": a, "B": b}, extents), a @ b, atol=1e-12)


@pytest.mark.parametrize(
    ("right", "rows"),
    [("bkn", ()), ("kn", ("b",)), ("bk", None)],
)
def test_a_vector_times_a_matrix_is_a_dot_only_on_request(right: str, rows: tuple[str, ...] | None) -> None:
    """The vector is the left operand whichever is written first, and is not rounded to its partner's dtype."""
    dims = "bn" if "n" in right else "b"
    weight = call("exp", load("a", "bk"))
    body = Reduce("sum", "k", call("mul", load("B", right), weight))
    nest = Nest(
        (Kernel("c", tuple(dims), (Store("C", tuple(map(Axis, dims)), tuple(dims), body),)),),
        (out("C", dims),),
    )
    source = parse(f"C[{','.join(dims)}] = sum[k](B[{','.join(right)}] * exp(a[b,k]))")
    config = KernelConfig((*(grid(axis, 2) for axis in dims), loop("k", 4)))
    sizes = {"b": 3, "n": 5, "k": 6}
    a, b = RNG.normal(size=(3, 6)), RNG.normal(size=[sizes[axis] for axis in right])
    expected = np.einsum(f"{right},bk->{dims}", b, np.exp(a))
    for batched in (False, True):
        program = lower(nest, source, {"a": "f32", "B": "f16"}, (config,), batched_dots=batched)
        dots = [let.op for let in lets(program, tile.Dot) if isinstance(let.op, tile.Dot)]
        assert bool(dots) == (rows is not None and (batched or rows != ()))
        for dot in dots:
            assert tuple(dim for dim in dot.left.dims if dim not in dot.right.dims) == rows
            assert dot.left.dtype == dot.right.dtype == ("f16" if rows else "f32")
        extents = {axis: sizes[axis] for axis in {*dims, "k"}}
        np.testing.assert_allclose(run_one(program, source, {"a": a, "B": b}, extents), expected, atol=1e-12)


def test_factors_outside_the_sum_leave_the_dot() -> None:
    scaled = call(
        "div", call("mul", call("mul", load("A", "mk"), load("B", "kn")), load("s", "n")), load("t", "m")
    )
    store = Store("C", (Axis("m"), Axis("n")), ("m", "n"), Reduce("sum", "k", scaled))
    nest = Nest((Kernel("scaled", ("m", "n"), (store,)),), (out("C", "mn"),))
    source = parse("C[m,n] = sum[k](A[m,k] * B[k,n] * s[n] / t[m])")
    config = KernelConfig((grid("m", 2), grid("n", 2), loop("k", 2)))
    program = lower(nest, source, {"A": "bf16", "B": "bf16", "s": "f32", "t": "f32"}, (config,))
    for dot in lets(program, tile.Dot):
        assert isinstance(dot.op, tile.Dot)
        assert dot.op.left.dtype == dot.op.right.dtype == "bf16" and dot.op.accumulator is not None
    a, b, s, t = RNG.normal(size=(3, 5)), RNG.normal(size=(5, 3)), RNG.normal(size=3), RNG.normal(size=3)
    got = run_one(program, source, {"A": a, "B": b, "s": s, "t": t}, {"m": 3, "n": 3, "k": 5})
    np.testing.assert_allclose(got, a @ b * s / t[:, None], atol=1e-12)


def test_computed_operands_are_zero_past_the_end() -> None:
    """Past the end the load gives 0, and exp(0 - t) overflows: inf times the other operand's 0 is NaN."""
    weight = call("exp", call("sub", load("A", "mk"), load("t", "m")))
    body = Reduce("sum", "k", call("mul", weight, load("B", "kn")))
    store = Store("C", (Axis("m"), Axis("n")), ("m", "n"), body)
    nest = Nest((Kernel("c", ("m", "n"), (store,)),), (out("C", "mn"),))
    source = parse("C[m,n] = sum[k](exp(A[m,k] - t[m]) * B[k,n])")
    a, b, t = RNG.normal(size=(3, 5)) - 900, RNG.normal(size=(5, 3)), np.full(3, -900.0)
    for inner in (whole("k"), loop("k", 4)):
        config = KernelConfig((grid("m", 2), grid("n", 2), inner))
        program = lower(nest, source, {"A": "f32", "B": "f16", "t": "f32"}, (config,))
        assert lets(program, tile.Dot)
        got = run_one(program, source, {"A": a, "B": b, "t": t}, {"m": 3, "n": 3, "k": 5})
        np.testing.assert_allclose(got, np.exp(a + 900) @ b, atol=1e-12)


def test_operand_dtypes() -> None:
    def operands(expr: Expr, source: str, dtypes: dict[str, str]) -> tuple[str, str]:
        store = Store("C", (Axis("m"), Axis("n")), ("m", "n"), Reduce("sum", "k", expr))
        nest = Nest((Kernel("c", ("m", "n"), (store,)),), (out("C", "mn"),))
        config = KernelConfig((grid("m", 2), grid("n", 2), whole("k")))
        (dot,) = lets(lower(nest, parse(source), dtypes, (config,)), tile.Dot)
        assert isinstance(dot.op, tile.Dot)
        return dot.op.left.dtype, dot.op.right.dtype

    a, b = load("A", "mk"), load("B", "kn")
    plain, source = call("mul", a, b), "C[m,n] = sum[k](A[m,k] * B[k,n])"
    assert operands(plain, source, {"A": "f16", "B": "f16"}) == ("f16", "f16")
    assert operands(plain, source, {"A": "f32", "B": "f16"}) == ("f32", "f32")
    assert operands(plain, source, {"A": "f16", "B": "bf16"}) == ("f32", "f32")
    assert operands(plain, source, {"A": "f8e4m3", "B": "f8e4m3"}) == ("f8e4m3", "f8e4m3")
    computed, source = call("mul", call("exp", a), b), "C[m,n] = sum[k](exp(A[m,k]) * B[k,n])"
    assert operands(computed, source, {"A": "f32", "B": "f16"}) == ("f16", "f16")
    assert operands(computed, source, {"A": "f32", "B": "f32"}) == ("f32", "f32")
    assert operands(computed, source, {"A": "f32", "B": "f8e4m3"}) == ("bf16", "bf16")
    kept = call("where", call("gt", load("t", "k"), Const(0)), b, Const(0))
    masked, source = (
        call("mul", call("exp", a), kept),
        "C[m,n] = sum[k](exp(A[m,k]) * where(t[k] > 0, B[k,n], 0))",
    )
    assert operands(masked, source, {"A": "f32", "B": "bf16", "t": "f32"}) == ("bf16", "bf16")
    assert operands(masked, source, {"A": "f32", "B": "f32", "t": "f32"}) == ("f32", "f32")
    cast = call("mul", call("f8e4m3", call("exp", a)), b)
    source = "C[m,n] = sum[k](f8e4m3(exp(A[m,k])) * B[k,n])"
    assert operands(cast, source, {"A": "f32", "B": "f8e4m3"}) == ("f8e4m3", "f8e4m3")


# Row-wise maximum and sum of exponentials, rolling and resident -----------------------------------


def test_resident_rows() -> None:
    x = load("x", "ij")
    weight = call("exp", call("sub", x, Local("m", ())))
    body = (
        Let("m", (), Reduce("max", "j", x)),
        Let("p", ("j",), weight),
        Let("s", (), Reduce("sum", "j", Local("p", ("j",)))),
        Store("y", (Axis("i"), Axis("j")), ("j",), call("div", Local("p", ("j",)), Local("s", ()))),
    )
    nest = Nest((Kernel("rows", ("i",), body),), (out("y", "ij"),))
    source = parse("y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))")
    program = lower(nest, source, {"x": "f16"}, (KernelConfig((grid("i", 4), whole("j"))),))
    assert len(lets(program, tile.LoadTile)) == 1 and not fors(program)
    x_value = RNG.normal(size=(6, 5)) - 900
    p = np.exp(x_value - x_value.max(axis=1, keepdims=True))
    np.testing.assert_allclose(
        run_one(program, source, {"x": x_value}, {"i": 6, "j": 5}), p / p.sum(axis=1, keepdims=True)
    )


def finite(expr: Expr) -> Expr:
    return call("finite", expr)


def rolling(score: Expr, value: Expr) -> Loop:
    """One pass over j: the maximum m, the sum s of exp(score - m), and o, weighted by value."""
    m, new = Local("m", ()), Local("m_new", ())
    weight = call("exp", call("sub", Local("t", ("j",)), finite(new)))
    repair = call("exp", call("sub", finite(m), finite(new)))
    body = (
        Let("t", ("j",), score),
        Let("m_tile", (), Reduce("max", "j", Local("t", ("j",)))),
        Let("m_new", (), call("maximum", m, Local("m_tile", ()))),
        Let("repair", (), repair),
        Let("p", ("j",), weight),
        Let("s_tile", (), Reduce("sum", "j", Local("p", ("j",)))),
        Let("s_new", (), call("add", call("mul", Local("repair", ()), Local("s", ())), Local("s_tile", ()))),
        Let("o_tile", ("e",), Reduce("sum", "j", call("mul", Local("p", ("j",)), value))),
        Let(
            "o_new",
            ("e",),
            call("add", call("mul", Local("repair", ()), Local("o", ("e",))), Local("o_tile", ("e",))),
        ),
    )
    carried = (
        Carried("m", (), LOW, "m_new"),
        Carried("s", (), Const(0.0), "s_new"),
        Carried("o", ("e",), Const(0.0), "o_new"),
    )
    return Loop("j", Const(0), Size("j"), False, carried, body)


def attention(mask: Expr | None, h: Expr) -> Nest:
    q, k = load("Q", "hid"), Load("K", (h, Axis("j"), Axis("d")))
    score = call("mul", Reduce("sum", "d", call("mul", q, k)), Const(0.5))
    if mask is not None:
        score = call("where", mask, score, LOW)
    value = Load("V", (h, Axis("j"), Axis("e")))
    store = Store("O", tuple(map(Axis, "hie")), ("e",), call("div", Local("o", ("e",)), Local("s", ())))
    return Nest((Kernel("rows", ("h", "i"), (rolling(score, value), store)),), (out("O", "hie"),))


def attended(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = np.einsum("hid,hjd->hij", q, k) * 0.5
    scores = np.where(mask, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


HEADS = {"Q": "f16", "K": "f16", "V": "f16"}
CONFIG = KernelConfig((grid("h", 1), grid("i", 4), loop("j", 4), whole("d"), whole("e")))

i, j = Axis("i"), Axis("j")
MASKS: dict[str, tuple[Expr | None, str, Any, int]] = {
    "none": (None, "S[h,i,j]", lambda i, j: j >= 0, 2),
    "causal": (call("le", j, i), "where(j <= i, S[h,i,j], -inf)", lambda i, j: j <= i, 2),
    "anti": (call("not", call("lt", j, i)), "where(j >= i, S[h,i,j], -inf)", lambda i, j: j >= i, 3),
    "window": (
        call("and", call("le", j, i), call("lt", call("sub", i, j), Const(6))),
        "where((j <= i) & (i - j < 6), S[h,i,j], -inf)",
        lambda i, j: (j <= i) & (i - j < 6),
        3,
    ),
    "prefix": (
        call("or", call("le", j, i), call("lt", j, Const(3))),
        "where((j <= i) | (j < 3), S[h,i,j], -inf)",
        lambda i, j: (j <= i) | (j < 3),
        2,
    ),
    "blocks": (
        call("and", call("ge", j, call("mul", call("floordiv", i, Const(3)), Const(3))), call("le", j, i)),
        "where((j >= i // 3 * 3) & (j <= i), S[h,i,j], -inf)",
        lambda i, j: (j >= i // 3 * 3) & (j <= i),
        3,
    ),
}


def masked_source(text: str) -> Program:
    return parse(
        f"""
        S[h,i,j] = sum[d](Q[h,i,d] * K[h//2,j,d]) * 0.5
        T[h,i,j] = {text}
        P[h,i,j] = exp(T[h,i,j] - max[j](T[h,i,j]))
        O[h,i,e] = sum[j](P[h,i,j] * V[h//2,j,e]) / sum[j](P[h,i,j])
        """.replace("\n        ", "\n")
    )


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [1, 4, 7, 13])
def test_rolling_with_masks(name: str, size: int) -> None:
    mask, text, truth, loops = MASKS[name]
    source = masked_source(text)
    program = lower(attention(mask, call("floordiv", Axis("h"), Const(2))), source, HEADS, (CONFIG,))
    assert len(fors(program)) == loops
    q, k, v = RNG.normal(size=(4, size, 5)), RNG.normal(size=(2, size, 5)), RNG.normal(size=(2, size, 3))
    got = run_one(program, source, {"Q": q, "K": k, "V": v}, {"h": 4, "i": size, "j": size, "d": 5, "e": 3})
    at = np.arange(size)
    want = attended(q, k.repeat(2, 0), v.repeat(2, 0), truth(at[:, None], at[None, :]))
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_rolling_structure() -> None:
    program = lower(
        attention(MASKS["causal"][0], Axis("h")), masked_source(MASKS["causal"][1]), HEADS, (CONFIG,)
    )
    interior, tail = fors(program)
    assert (interior.masked, tail.masked) == (False, True)
    functions = [
        stmt.op.fn
        for stmt in interior.body
        if isinstance(stmt, tile.Let) and isinstance(stmt.op, tile.Elementwise)
    ]
    assert "where" not in functions and "le" not in functions
    loads = {
        stmt.op.tensor
        for stmt in interior.body
        if isinstance(stmt, tile.Let) and isinstance(stmt.op, tile.LoadTile)
    }
    assert loads == {"K", "V"}, "the load of Q does not depend on the loop"
    score, weighted = (
        stmt for stmt in interior.body if isinstance(stmt, tile.Let) and isinstance(stmt.op, tile.Dot)
    )
    assert isinstance(score.op, tile.Dot) and isinstance(weighted.op, tile.Dot)
    assert (score.op.left.dims, score.op.right.dims, score.op.axis) == (("i", "d"), ("d", "j"), "d")
    assert score.op.accumulator is None
    assert (weighted.op.left.dims, weighted.op.left.dtype) == (("i", "j"), "f16")
    assert weighted.op.accumulator is not None and weighted.op.accumulator.dims == ("i", "e")
    assert program.kernels[0].grid == ("i", "h")


def test_skipped_tiles_are_not_visited() -> None:
    """Elements that the predicate rules out for a whole tile are never read: NaN there does no harm."""
    mask, text, truth, _ = MASKS["window"]
    source = masked_source(text)
    program = lower(attention(mask, call("floordiv", Axis("h"), Const(2))), source, HEADS, (CONFIG,))
    q, k, v = RNG.normal(size=(2, 16, 5)), RNG.normal(size=(1, 16, 5)), RNG.normal(size=(1, 16, 3))
    at = np.arange(16)
    want = attended(q, k.repeat(2, 0), v.repeat(2, 0), truth(at[:, None], at[None, :]))[:, 12:]
    k[:, :4], v[:, :4] = np.nan, np.nan
    got = run_one(program, source, {"Q": q, "K": k, "V": v}, {"h": 2, "i": 16, "j": 16, "d": 5, "e": 3})
    np.testing.assert_allclose(got[:, 12:], want, atol=1e-12)


def test_unguarded_updates_are_not_skipped() -> None:
    """Without guards a first tile that is all -inf gives NaN, so leaving it out would change the result."""
    nest = attention(MASKS["anti"][0], Axis("h"))

    def bare(expr: Expr) -> Expr:
        from eqfuse.terms.nodes import Call, transform

        return transform(expr, lambda e: e.args[0] if isinstance(e, Call) and e.fn == "finite" else e)

    (kernel,) = nest.kernels
    roll, store = kernel.body
    assert isinstance(roll, Loop)
    body = tuple(Let(s.name, s.dims, bare(s.expr)) for s in roll.body if isinstance(s, Let))
    roll = Loop(roll.axis, roll.start, roll.stop, roll.unit, roll.carried, body)
    nest = Nest((Kernel(kernel.name, kernel.parallel, (roll, store)),), nest.buffers)
    program = lower(nest, masked_source(MASKS["anti"][1]), HEADS, (CONFIG,))
    assert [part.masked for part in fors(program)] == [False, True]
    assert "where" in [
        s.op.fn
        for s in fors(program)[0].body
        if isinstance(s, tile.Let) and isinstance(s.op, tile.Elementwise)
    ]


def test_heads_that_share_a_key_fill_the_rows_of_a_dot() -> None:
    """With a block of heads inside one group, `h // 4` is one number: the key has no head dim."""
    nest = attention(None, call("floordiv", Axis("h"), Const(4)))
    config = KernelConfig((grid("h", 2), grid("i", 1), loop("j", 4), whole("d"), whole("e")))
    source = masked_source("S[h,i,j]")
    program = lower(nest, source, HEADS, (config,))
    assert {dot.value.dims for dot in lets(program, tile.Dot)} == {("h", "j"), ("h", "e")}
    q, k, v = RNG.normal(size=(8, 2, 5)), RNG.normal(size=(2, 6, 5)), RNG.normal(size=(2, 6, 3))
    got = run_one(program, source, {"Q": q, "K": k, "V": v}, {"h": 8, "i": 2, "j": 6, "d": 5, "e": 3})
    np.testing.assert_allclose(got, attended(q, k.repeat(4, 0), v.repeat(4, 0), True), atol=1e-12)


# Other shapes of programs -------------------------------------------------------------------------


def test_row_sum() -> None:
    store = Store("y", (Axis("i"),), (), Reduce("sum", "j", load("x", "ij")))
    nest = Nest((Kernel("rows", ("i",), (store,)),), (out("y", "i"),))
    source = parse("y[i] = sum[j](x[i,j])")
    x = RNG.normal(size=(5, 11))
    for inner in (whole("j"), loop("j", 4)):
        program = lower(nest, source, {"x": "f32"}, (KernelConfig((grid("i", 2), inner)),))
        np.testing.assert_allclose(run_one(program, source, {"x": x}, {"i": 5, "j": 11}), x.sum(axis=1))
        assert "where" not in show(program).replace(" where ", " "), "a masked load is 0 already"


def test_transposed_operands_are_aligned() -> None:
    store = Store("y", (Axis("i"), Axis("j")), ("i", "j"), call("add", load("x", "ji"), load("z", "j")))
    nest = Nest((Kernel("t", ("i", "j"), (store,)),), (out("y", "ij"),))
    source = parse("y[i,j] = x[j,i] + z[j]")
    program = lower(nest, source, {"x": "f32", "z": "f32"}, (KernelConfig((grid("i", 4), grid("j", 2))),))
    assert [let.value.dims for let in lets(program, tile.LoadTile)] == [("j", "i"), ("j",)]
    assert {let.value.dims for let in lets(program, tile.Align)} >= {("i", "j")}
    x, z = RNG.normal(size=(3, 5)), RNG.normal(size=3)
    np.testing.assert_allclose(run_one(program, source, {"x": x, "z": z}, {"i": 5, "j": 3}), x.T + z)


def test_gathers_are_masked() -> None:
    page = Load("page", (call("floordiv", Axis("j"), Const(4)),))
    key = Load("K", (page, call("mod", Axis("j"), Const(4)), Axis("d")))
    body = Reduce("sum", "j", call("mul", load("w", "ij"), key))
    store = Store("y", (Axis("i"), Axis("d")), ("d",), body)
    nest = Nest((Kernel("paged", ("i",), (store,)),), (out("y", "id"),))
    source = parse("y[i,d] = sum[j](w[i,j] * K[page[j//4], j%4, d])")
    dtypes = {"K": "f16", "page": "i32", "w": "f16"}
    pages, keys, w = np.array([2, 0, 1]), RNG.normal(size=(3, 4, 5)), RNG.normal(size=(3, 10))
    want = w @ keys[pages].reshape(12, 5)[:10]
    for block in (2, 4, 8):
        config = KernelConfig((grid("i", 2), loop("j", block), whole("d")))
        program = lower(nest, source, dtypes, (config,))
        tensors = {"K": keys, "page": pages, "w": w}
        np.testing.assert_allclose(
            run_one(program, source, tensors, {"i": 3, "j": 10, "d": 5}), want, atol=1e-12
        )
        one_page = all(
            let.value.dims == () for let in lets(program, tile.LoadTile) if let.value.dtype == "i32"
        )
        assert one_page == (block <= 4)


def test_guarded_accesses_are_masked_by_their_guard() -> None:
    shifted = Load("x", (Axis("i"), call("sub", Axis("j"), Const(1))))
    body = call("where", call("ge", Axis("j"), Const(1)), shifted, Const(0.0))
    store = Store("y", (Axis("i"),), (), Reduce("sum", "j", call("mul", body, load("x", "ij"))))
    nest = Nest((Kernel("lag", ("i",), (store,)),), (out("y", "i"),))
    source = parse("y[i] = sum[j](where(j >= 1, x[i,j-1], 0) * x[i,j])")
    x = RNG.normal(size=(3, 9))
    for inner in (whole("j"), loop("j", 4)):
        program = lower(nest, source, {"x": "f32"}, (KernelConfig((grid("i", 2), inner)),))
        got = run_one(program, source, {"x": x}, {"i": 3, "j": 9})
        np.testing.assert_allclose(got, (x[:, 1:] * x[:, :-1]).sum(axis=1))


@pytest.mark.parametrize(
    ("condition", "shift", "widens"),
    [
        ("(i < j) & (i > 0)", "+ 1", True),
        ("(i + 1 == j) & (i != 0)", "+ 1", True),
        ("(j < i) & (i <= N(j) - 2)", "- 1", True),
        ("(i < j) & (i < N(j) - 1)", "+ 1", False),
        ("(i < j) & (i != N(j) - 1)", "+ 1", False),
        ("(i < j) & (i == 2)", "+ 1", False),
    ],
)
def test_a_guard_on_the_other_side_keeps_no_shifted_access_inside(
    condition: str, shift: str, widens: bool
) -> None:
    """It is read under the conditions on other axes too, which widens it, where its own do not bound it on the side of the shift."""
    source = parse(f"i: axis[j]\ny[i,j] = where({condition}, x[i {shift}], 0) + z[j]")
    store = Store("y", (Axis("i"), Axis("j")), (), source.outputs[0].expr)
    nest = Nest((Kernel("one", ("i", "j"), (store,)),), (out("y", "ij"),))
    config = KernelConfig((grid("i", 2), grid("j", 4)))
    program = lower(nest, source, {"x": "f32", "z": "f32"}, (config,))
    x, z = RNG.normal(size=7), RNG.normal(size=7)
    i, j = np.arange(7)[:, None], np.arange(7)[None]
    kept = eval(condition, {"i": i, "j": j, "N": lambda _: 7})
    want = np.where(kept, x[np.clip(i + int(shift.replace(" ", "")), 0, 6)], 0) + z
    np.testing.assert_allclose(run_one(program, source, {"x": x, "z": z}, {"i": 7, "j": 7}), want, atol=1e-12)
    (read,) = (let for let in lets(program, tile.LoadTile) if let.op.tensor == "x")
    assert ("j" in read.value.dims) == widens


def test_gathers_are_guarded_by_conditions_on_their_own_positions() -> None:
    """Past the length the table holds anything; the condition on rows does not widen the access."""
    page = Load("page", (call("floordiv", Axis("j"), Const(4)),))
    key = Load("K", (page, call("mod", Axis("j"), Const(4))))
    inside = call("and", call("lt", Axis("j"), Const(6)), call("le", Axis("j"), Axis("i")))
    store = Store("y", (Axis("i"),), (), Reduce("sum", "j", call("where", inside, key, Const(1.0))))
    nest = Nest((Kernel("paged", ("i",), (store,)),), (out("y", "i"),))
    source = parse("y[i] = sum[j](where((j < 6) & (j <= i), K[page[j//4], j%4], 1))")
    pages, keys = np.array([2, 0, -7]), RNG.normal(size=(3, 4))
    at = np.arange(12)
    values = keys[pages[:2]].reshape(-1)[np.minimum(at, 7)]
    want = np.where((at < 6) & (at <= np.arange(9)[:, None]), values, 1).sum(axis=1)
    for block in (2, 4, 8):
        config = KernelConfig((grid("i", 4), loop("j", block)))
        program = lower(nest, source, {"K": "f32", "page": "i32"}, (config,))
        got = run_one(program, source, {"K": keys, "page": pages}, {"i": 9, "j": 12})
        np.testing.assert_allclose(got, want, atol=1e-12)
        assert all("i" not in let.value.dims for let in lets(program, tile.LoadTile))


def test_guards_belong_to_their_loop() -> None:
    """A shifted access whose only guard is on the loop's axis is read anew in every part of the loop."""
    after = Load("z", (call("add", Axis("i"), Const(1)),))
    body = call("where", call("ge", Axis("j"), Const(3)), call("mul", load("x", "ij"), after), Const(0.0))
    store = Store("y", (Axis("i"),), (), Reduce("sum", "j", body))
    nest = Nest((Kernel("rows", ("i",), (store,)),), (out("y", "i"),))
    source = parse("y[i] = sum[j](where(j >= 3, x[i,j] * z[i+1], 0))")
    program = lower(nest, source, {"x": "f32", "z": "f32"}, (KernelConfig((grid("i", 2), loop("j", 2))),))
    x, z = RNG.normal(size=(3, 9)), RNG.normal(size=4)
    got = run_one(program, source, {"x": x, "z": z}, {"i": 3, "j": 9})
    np.testing.assert_allclose(got, x[:, 3:].sum(axis=1) * z[1:], atol=1e-12)


def test_a_name_stands_for_its_last_value() -> None:
    """Two loops carry `s`; what is read between them is not read again after the second."""

    def summed(tensor: str, axis: str) -> Loop:
        update = Let("s_new", (), call("add", Local("s", ()), Reduce("sum", axis, load(tensor, f"i{axis}"))))
        return Loop(axis, Const(0), Size(axis), False, (Carried("s", (), Const(0.0), "s_new"),), (update,))

    double = call("mul", Local("s", ()), Const(2.0))
    body = (
        summed("x", "j"),
        Let("first", (), double),
        summed("z", "k"),
        Store("y", (Axis("i"),), (), call("sub", call("mul", Local("first", ()), Const(10.0)), double)),
    )
    nest = Nest((Kernel("rows", ("i",), body),), (out("y", "i"),))
    source = parse("y[i] = 20 * sum[j](x[i,j]) - 2 * sum[k](z[i,k])")
    config = KernelConfig((grid("i", 2), loop("j", 2), loop("k", 2)))
    x, z = RNG.normal(size=(3, 5)), RNG.normal(size=(3, 7))
    program = lower(nest, source, {"x": "f32", "z": "f32"}, (config,))
    got = run_one(program, source, {"x": x, "z": z}, {"i": 3, "j": 5, "k": 7})
    np.testing.assert_allclose(got, 20 * x.sum(axis=1) - 2 * z.sum(axis=1), atol=1e-12)


def test_unit_loops_combine_shards() -> None:
    part = Load("part", (Axis("c"), Axis("i")))
    update = Let("s_new", (), call("add", Local("s", ()), part))
    body = (
        Loop("c", Const(0), Size("c"), True, (Carried("s", (), Const(0.0), "s_new"),), (update,)),
        Store("y", (Axis("i"),), (), Local("s", ())),
    )
    nest = Nest((Kernel("combine", ("i",), body),), (out("y", "i"),), (), (("c", "j"),))
    source = parse("y[i] = sum[c](part[c,i])")
    program = lower(nest, source, {"part": "f32"}, (KernelConfig((grid("i", 2),)),))
    part_value = RNG.normal(size=(4, 3))
    got = run(program, source, {"part": part_value}, {}, {"i": 3}, Exact(), shards={"c": 4})["y"]
    np.testing.assert_allclose(got, part_value.sum(axis=0))


def test_shards_walk_ranges_that_are_not_block_aligned() -> None:
    """The shard's range starts anywhere; predicates cut it all the same."""
    chunk = call("floordiv", call("add", Size("j"), call("sub", Size("c"), Const(1))), Size("c"))
    start = call("mul", Axis("c"), chunk)
    stop = call("minimum", call("add", start, chunk), Size("j"))
    value = call("where", call("le", Axis("j"), Axis("i")), load("x", "ij"), Const(0.0))
    update = Let("s_new", (), call("add", Local("s", ()), Reduce("sum", "j", value)))
    body = (
        Loop("j", start, stop, False, (Carried("s", (), Const(0.0), "s_new"),), (update,)),
        Store("part", (Axis("c"), Axis("i")), (), Local("s", ())),
    )
    nest = Nest((Kernel("shards", ("c", "i"), body),), (out("part", "ci"),), (), (("c", "j"),))
    config = KernelConfig((grid("c", 1), grid("i", 4), loop("j", 4)))
    source = parse("part[c,i] = sum[j](where(j <= i, x[i,j], 0)) * (c < 9)")
    x = RNG.normal(size=(19, 19))
    for shards in (1, 2, 3, 5):
        program = lower(nest, source, {"x": "f32"}, (config,))
        got = run(program, source, {"x": x}, {}, {"i": 19, "j": 19}, Exact(), shards={"c": shards})["part"]
        np.testing.assert_allclose(got.sum(axis=0), np.tril(x).sum(axis=1), atol=1e-12)


def test_outputs_over_a_looped_axis_get_a_loop() -> None:
    x = load("x", "ij")
    body = (
        Let("m", (), Reduce("max", "j", x)),
        Let("p", ("j",), call("exp", call("sub", x, Local("m", ())))),
        Store(
            "y",
            (Axis("i"), Axis("j")),
            ("j",),
            call("div", Local("p", ("j",)), Reduce("sum", "j", Local("p", ("j",)))),
        ),
    )
    nest = Nest((Kernel("rows", ("i",), body),), (out("y", "ij"),))
    source = parse("y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))")
    program = lower(nest, source, {"x": "f32"}, (KernelConfig((grid("i", 2), loop("j", 4))),))
    x_value = RNG.normal(size=(3, 10))
    p = np.exp(x_value - x_value.max(axis=1, keepdims=True))
    got = run_one(program, source, {"x": x_value}, {"i": 3, "j": 10})
    np.testing.assert_allclose(got, p / p.sum(axis=1, keepdims=True))


def test_integers_stay_integers() -> None:
    count = Reduce("sum", "j", call("where", call("eq", load("label", "j"), Axis("i")), Const(1), Const(0)))
    store = Store("y", (Axis("i"),), (), count)
    nest = Nest((Kernel("count", ("i",), (store,)),), (out("y", "i"),))
    source = parse("y[i] = sum[j](where(label[j] == i, 1, 0))")
    program = lower(nest, source, {"label": "i64"}, (KernelConfig((grid("i", 2), loop("j", 4))),))
    assert program.buffers[0].dtype == "i64"
    label = np.array([0, 2, 2, 1, 2, 0, 4])
    got = run_one(program, source, {"label": label}, {"i": 5, "j": 7})
    np.testing.assert_array_equal(got, np.bincount(label, minlength=5))


def test_two_folds_over_one_looped_axis_do_not_capture() -> None:
    x = load("x", "ij")
    centred = call("sq", call("sub", x, call("div", Reduce("sum", "j", x), Size("j"))))
    store = Store("y", (Axis("i"),), (), Reduce("sum", "j", centred))
    nest = Nest((Kernel("rows", ("i",), (store,)),), (out("y", "i"),))
    source = parse("y[i] = sum[j](sq(x[i,j] - sum[j](x[i,j]) / n))", scalars={"n": 9})
    program = lower(nest, source, {"x": "f32"}, (KernelConfig((grid("i", 2), loop("j", 4))),))
    x_value = RNG.normal(size=(3, 9))
    got = run_one(program, source, {"x": x_value}, {"i": 3, "j": 9})
    np.testing.assert_allclose(got, x_value.var(axis=1) * 9)


def test_output_is_deterministic() -> None:
    texts = {
        show(
            lower(
                attention(MASKS["window"][0], Axis("h")), masked_source(MASKS["window"][1]), HEADS, (CONFIG,)
            )
        )
        for _ in range(3)
    }
    assert len(texts) == 1


def test_grid_axes_cannot_be_folded() -> None:
    store = Store("y", (Axis("i"),), (), Reduce("sum", "j", load("x", "ij")))
    nest = Nest((Kernel("rows", ("i",), (store,)),), (out("y", "i"),))
    with pytest.raises(TileError, match="folds over axis 'j'"):
        lower(
            nest, parse("y[i] = sum[j](x[i,j])"), {"x": "f32"}, (KernelConfig((grid("i", 2), grid("j", 2))),)
        )


# The checker --------------------------------------------------------------------------------------


def broken() -> Iterator[tuple[str, tile.TileProgram]]:
    row = tile.Value("row", ("i",), "f32")
    at = tile.Value("at", ("i",), "i32")
    here = tile.Value("here", (), "i32")
    zero = tile.Value("zero", (), "i32")
    blocks = (
        Block("i", "grid", 4),
        Block("j", "loop", 4),
        Block("h", "grid", 1),
        Block("k", "whole", None),
    )
    square = tile.Value("square", ("k", "i"), "f32")

    def program(*body: tile.Stmt, grid: tuple[str, ...] = ("i", "h")) -> tile.TileProgram:
        return tile.TileProgram((tile.Kernel("k", grid, blocks, body),), (Buffer("y", ("i",), "f32", True),))

    positions, fill = tile.Let(at, tile.Positions("i")), tile.Let(row, tile.Fill(0.0))
    yield "not defined", program(tile.Store("y", (at,), row, None))
    yield "defined twice", program(fill, fill)
    yield "not a buffer", program(positions, fill, tile.Store("x", (at,), row, None))
    yield "of rank 1 with 2", program(positions, fill, tile.Store("y", (at, at), row, None))
    yield "no block", program(tile.Let(tile.Value("at", ("z",), "i32"), tile.Positions("z")))
    yield "scalar position", program(tile.Let(tile.Value("at", ("h",), "i32"), tile.Positions("h")))
    yield "outside a loop", program(tile.Let(tile.Value("at", ("j",), "i32"), tile.Positions("j")))
    yield "outside a loop", program(tile.Let(here, tile.Start("j")))
    yield (
        "not reconciled",
        program(
            fill,
            tile.Let(square, tile.Fill(0.0)),
            tile.Let(tile.Value("c", ("k", "i"), "f32"), tile.Elementwise("add", (row, square))),
        ),
    )
    yield (
        "should be of",
        program(
            positions, fill, tile.Let(tile.Value("c", ("i",), "f32"), tile.Elementwise("add", (at, row)))
        ),
    )
    yield (
        "should be bool",
        program(fill, tile.Let(tile.Value("c", ("i",), "f32"), tile.Elementwise("lt", (row, row)))),
    )
    yield (
        "2 operands",
        program(fill, tile.Let(tile.Value("c", ("i",), "f32"), tile.Elementwise("exp", (row, row)))),
    )
    yield "loses dims", program(fill, tile.Let(tile.Value("c", ("k",), "f32"), tile.Align(row)))
    yield "no dim 'k'", program(fill, tile.Let(tile.Value("c", (), "f32"), tile.ReduceTile("sum", row, "k")))
    yield (
        "dot of",
        program(
            tile.Let(square, tile.Fill(0.0)),
            tile.Let(tile.Value("c", ("k", "k"), "f32"), tile.Dot(square, square, "i", None)),
        ),
    )
    yield (
        "not an integer",
        program(fill, tile.Let(tile.Value("c", ("i",), "f32"), tile.LoadTile("x", (row,), None, 0.0))),
    )
    yield "not the axes with grid blocks", program(grid=("i",))
    yield (
        "does not have the dims",
        program(positions, fill, tile.Let(square, tile.Fill(0.0)), tile.Store("y", (at,), square, None)),
    )
    yield "is read as", program(fill, tile.Store("y", (), tile.Value("row", ("i",), "f16"), None))
    start, state = tile.Let(zero, tile.Constant(0)), tile.Value("s", ("i",), "f32")
    bound = tile.Let(tile.Value("in", ("j",), "bool"), tile.Bound("j", zero))
    yield "not masked", program(start, tile.For("j", zero, zero, (), (bound,), masked=False))
    yield (
        "is carried from",
        program(
            start, positions, tile.For("j", zero, zero, (tile.Carried(state, at, state),), (), masked=True)
        ),
    )
    inside = tile.Let(tile.Value("t", ("i",), "f32"), tile.Fill(1.0))
    late = tile.Store("y", (at,), inside.value, None)
    yield (
        "not defined",
        program(start, positions, tile.For("j", zero, zero, (), (inside,), masked=True), late),
    )


@pytest.mark.parametrize(("message", "program"), list(broken()))
def test_check_rejects(message: str, program: tile.TileProgram) -> None:
    with pytest.raises(TileError, match=message):
        check(program)


def test_printed_form() -> None:
    config = KernelConfig((grid("m", 4), grid("n", 4), whole("k")))
    text = show(lower(product_nest(), parse(PRODUCT), {"A": "f16", "B": "f16"}, (config,)))
    assert text.splitlines()[:6] == [
        "output C: f16[m, n]",
        "",
        "kernel gemm, grid (m, n):",
        "    m: 4 positions per instance",
        "    n: 4 positions per instance",
        "    k: all positions",
    ]
    assert "dot(a, b, over k)" in text
    assert "load A[m_at, k_at] where mask, else 0" in text
