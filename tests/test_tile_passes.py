"""Passes from tile program to tile program: what they leave, that it is verified, and how it rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton_nests import Case, attention, softmax, split_log_sum

import eqfuse as eq
from bench.workloads import select
from eqfuse import certification, compiler
from eqfuse.devices import device_named
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer
from eqfuse.loops.plan import KernelConfig
from eqfuse.lowered import lower_nest
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.nodes import Program
from eqfuse.terms.parser import parse
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.tile import interpreter
from eqfuse.tile.check import TileError, check
from eqfuse.tile.cpu.run import _blocks
from eqfuse.tile.lower.program import lower
from eqfuse.tile.nodes import (
    Align,
    Argument,
    Bound,
    Cast,
    Constant,
    Dot,
    Elementwise,
    Extent,
    Fill,
    For,
    Kernel,
    LaunchValue,
    Let,
    LoadTile,
    Positions,
    Store,
    TileProgram,
    Value,
)
from eqfuse.tile.passes import exp2, positions, precision, reciprocals
from eqfuse.tile.passes.draft import changed
from eqfuse.tile.passes.pipeline import CPU_PASSES, GPU_PASSES, Pass, passes_of, run_passes
from eqfuse.tile.passes.whole_shards import whole_shards
from eqfuse.tile.printer import show
from eqfuse.tile.storage import launch_value
from eqfuse.tile.triton.module import emit
from eqfuse.tile.walk import ops_of
from eqfuse.verify.degrees import DegreeDomain
from eqfuse.verify.field.domain import FieldDomain

CASES: dict[str, tuple[Callable[[], Case], dict[str, str]]] = {
    "softmax": (softmax, {"x": "f16"}),
    "attention": (attention, dict.fromkeys("QKV", "f16")),
    "split_merge": (split_log_sum, {"x": "bf16"}),
}
ULP = 2.0**-23
"""A unit in the last place of float32, relative to the number, at most."""


def lowered(name: str) -> tuple[TileProgram, dict[str, str]]:
    case, dtypes = CASES[name]
    made = case()
    return lower(made.nest, parse(made.source), dtypes, made.configs), dtypes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_printed_after_the_passes(name: str, target: str, golden: Callable[[str, str], None]) -> None:
    program, dtypes = lowered(name)
    passes = CPU_PASSES if target == "cpu" else GPU_PASSES
    golden(f"tiles_{name}_{target}", show(run_passes(program, passes, dtypes)))


@pytest.mark.parametrize("passes", [GPU_PASSES, CPU_PASSES], ids=["gpu", "cpu"])
def test_a_pass_has_a_name_of_its_own_and_says_what_it_is(passes: tuple[Pass, ...]) -> None:
    assert len({each.name for each in passes}) == len(passes)
    assert all(each.why and each.field and each.rounds for each in passes)


@pytest.mark.parametrize("name", CASES)
def test_passes_leave_what_they_left_before(name: str) -> None:
    program, dtypes = lowered(name)
    once = run_passes(program, GPU_PASSES, dtypes)
    assert once.passes and once.passes == tuple(p.name for p in GPU_PASSES if p.name in once.passes)
    assert run_passes(once, GPU_PASSES, dtypes) is once


def pointwise(*ops: tuple[Value, Any]) -> TileProgram:
    """y[i] is the last of these values, which may read `x`, a tile that is loaded, and `s`, a scalar."""
    at, x, s = (
        Value("at", ("i",), "i32"),
        Value("x_tile", ("i",), "f32"),
        Value("s_arg", (), "f32"),
    )
    body = [
        Let(s, Argument("s")),
        Let(at, Positions("i")),
        Let(x, LoadTile("x", (at,), None, 0.0)),
        *(Let(value, op) for value, op in ops),
        Store("y", (at,), ops[-1][0], None),
    ]
    kernel = Kernel("k", ("i",), (Block("i", "grid", 4),), tuple(body))
    return TileProgram((kernel,), (Buffer("y", ("i",), "f32", True),))


X, S = Value("x_tile", ("i",), "f32"), Value("s_arg", (), "f32")


def tile(name: str) -> Value:
    return Value(name, ("i",), "f32")


def ran(program: TileProgram, x: Any, s: float, dtype: Any = "float32") -> Any:
    """What a program of `pointwise` computes of these numbers, a multiple of 4."""
    source, domain = parse("y[i] = x[i] * s"), FloatDomain(dtype)
    given = {"x": np.asarray(x, domain.dtype)}
    return interpreter.run(program, source, given, {"s": s}, {"i": len(x)}, domain, shards={})["y"]


# Whole shards ------------------------------------------------------------------------------------

SPLIT_PRODUCT = "x: f16[t, c]\nw: f16[f, c]\ny[t,f] = sum[c](x[t,c] * w[f,c])"


def test_shards_of_products_end_between_blocks() -> None:
    kernel = eq.compile(SPLIT_PRODUCT, target="h200", prefer="split_k", sizes={"t": 16, "f": 512, "c": 8192})
    assert "whole shards" in kernel.tile.passes and kernel.certificate.ok
    assert whole_shards(kernel.tile) is kernel.tile
    first = kernel.tile.kernels[0]
    ops = ops_of(first.body)
    bounds = [op for op in ops.values() if isinstance(op, Bound) and op.axis == "c"]
    assert bounds and all(ops[bound.stop.name] == Extent("c") for bound in bounds)


@pytest.mark.parametrize("size", [1, 3, 8, 9, 31, 64])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_whole_shards_have_every_position_once(size: int, shards: int) -> None:
    kernel = eq.compile(SPLIT_PRODUCT, target="h200", prefer="split_k", verify=False)
    configs = [
        replace(config, blocks=tuple(replace(b, size=b.size and min(b.size, 4)) for b in config.blocks))
        for config in kernel.plan.configs
    ]
    nest, program = kernel.compiled.chosen.nest, kernel.program
    tiles = lower_nest(nest, program, {"x": "f16", "w": "f16"}, configs, device_named("h200"), least_dot=1)
    assert "whole shards" in tiles.passes
    generator = np.random.default_rng(size)
    given = {n: generator.integers(-4, 5, (rows, size)).astype(float) for n, rows in (("x", 2), ("w", 3))}
    sizes, numbers = {"t": 2, "f": 3, "c": size}, {axis: shards for axis, _ in nest.shards}
    found = interpreter.run(tiles, program, given, {}, sizes, FloatDomain("float64"), shards=numbers)["y"]
    np.testing.assert_array_equal(found, given["x"] @ given["w"].T)


@pytest.mark.parametrize(
    ("source", "schedule"),
    [
        ("y[r] = sum[c](x[r,c])", "split_k"),
        ("k: axis[c]\ny[r,c] = sum[k](where(k <= c, x[r,k], 0))", "scan_split"),
    ],
)
def test_other_shards_end_where_they_did(source: str, schedule: str) -> None:
    kernel = eq.compile(source, target="h200", prefer=schedule, sizes={"r": 2, "c": 1 << 20}, verify=False)
    assert kernel.plan.shards > 1 and "whole shards" not in kernel.tile.passes


# Exponentials to the base 2 ----------------------------------------------------------------------


def scaled_exponential() -> TileProgram:
    scaled, result = tile("scaled"), tile("result")
    return pointwise((scaled, Elementwise("mul", (X, S))), (result, Elementwise("exp", (scaled,))))


def test_an_exponential_to_the_base_2_rounds_no_worse_than_its_model() -> None:
    x = np.linspace(-80, 80, 4096, dtype=np.float32)
    plain = scaled_exponential()
    program = run_passes(plain, GPU_PASSES)
    assert program.passes == ("base-2 exponentials",) and "exp2(scaled)" in show(program)
    exact = ran(plain, x, 0.7, "float64")
    found = ran(program, x, float(np.float32(0.7)))
    errors = np.abs(found / exact - 1) / ULP
    exponents = np.abs(x.astype(np.float64) * 0.7)
    # The scalar, log2 e, their product and that with x are rounded.
    bound = np.array([exp2.error(e, 4) for e in exponents])
    assert (errors <= bound).all() and errors.max() > 1


def test_log2_e_is_a_formal_constant_of_the_field() -> None:
    domain = FieldDomain(seed=3)
    log2_e, ln_2 = (domain.irrational(name, (8, 1)) for name in ("log2_e", "ln_2"))
    x = domain.draw(np.linspace(-2, 2, 24).reshape(8, 3), np.random.default_rng(1))
    expected = domain.call("exp", [x])
    scaled = domain.call("mul", [x, log2_e])
    found = domain.call("exp2", [scaled])
    assert found.p is not None and (found.p == expected.p).all()
    np.testing.assert_allclose(found.shadow, expected.shadow)
    back = domain.call("mul", [scaled, ln_2])
    assert (back.p == x.p).all() and (back.q == x.q).all()
    for wrong in (domain.call("exp2", [x]), domain.call("exp", [scaled])):
        assert wrong.p is not None and not (wrong.p == expected.p).any()
    assert log2_e.p is not None and len(set(log2_e.p.ravel().tolist())) == 8  # another one in every trial


@pytest.mark.parametrize("rooted", ["a + b", "a - b", "log"])
def test_a_formal_constant_leaves_sums_in_exponents_as_they_are(rooted: str) -> None:
    """Exponentials of terms without a residue modulo q are products term by term, scaled or not."""
    domain = FieldDomain(seed=5)
    rng = np.random.default_rng(2)
    squares = domain.call("sq", [domain.draw(rng.uniform(1, 2, (4, 6)), rng)])
    a, b = (domain.call("sqrt", [domain.call("mul", [squares, domain.full((), c)])]) for c in (1.0, 4.0))
    log2_e = domain.irrational("log2_e", (4, 1))
    match rooted:
        case "log":
            total = domain.call("sub", [a, domain.call("log", [squares])])
        case _:
            total = domain.call("add" if "+" in rooted else "sub", [a, b])
    expected = domain.call("exp", [total])
    found = domain.call("exp2", [domain.call("mul", [total, log2_e])])
    assert expected.p is not None and found.p is not None and (found.p == expected.p).all()


def test_degrees_count_the_formal_constant() -> None:
    domain = DegreeDomain()
    x = domain.draw(np.zeros((1, 3)), np.random.default_rng(0))
    scaled = domain.call("mul", [x, domain.irrational("log2_e", (1, 1))])
    assert scaled.form.above == 2
    domain.call("exp2", [scaled])
    assert domain.exponent == 3 and not domain.discrete
    log = domain.call("log", [x])
    domain.call("exp2", [domain.call("mul", [log, domain.irrational("log2_e", (1, 1))])])
    assert not domain.discrete
    domain.call("mul", [log, x])
    assert domain.discrete


def test_an_exponential_that_is_a_term_of_another_exponent() -> None:
    """It is made to the base 2, and multiplied as the other terms are."""
    source = (
        "b = sqrt(sum[i](x[i]))\nd = logsumexp[i](where(i == 0, exp(b), 0) + z[i] / max[i](abs(z[i])) - b)"
    )
    kernel = eq.compile(source, native="off")
    x, z = torch.rand(9), torch.randn(9)
    torch.testing.assert_close(kernel(x=x, z=z), torch.tensor(eq.reference(source)(x=x, z=z)).float())
    assert "exp_plain: f32 = exp2(t1)" in str(kernel.tile)


def test_numbers_that_would_be_infinities_to_the_base_2_are_not_scaled() -> None:
    """A row that a mask by the least float32 covers has equal weights, and none at all where the mask were an infinity."""
    source = (
        "x: f32[i,j]\nS[i,j] = where(j < n[i], x[i,j] * s, {})\ny[i] = sum[j](exp(S[i,j] - max[j](S[i,j])))"
    )
    n = torch.tensor([0, 3])
    for number in ("-3.4028234663852886e38", "-1e30"):
        kernel = eq.compile(source.format(number), native="off")
        assert kernel(x=torch.zeros(2, 5), n=n, s=1.0).tolist() == [5.0, 3.0]
        assert f"{float(number)} * log2(e)" in str(kernel.tile) or number != "-1e30"


def test_the_certificate_lists_the_passes_that_were_verified() -> None:
    kernel = eq.compile("y[i] = logsumexp[j](x[i,j] * s)")
    assert "base-2 exponentials" in kernel.certificate.passes
    assert "passes that ran and were verified: " in str(kernel.certificate)
    plain = eq.compile("y[i] = sum[j](x[i,j])").certificate
    assert not plain.passes and "passes" not in str(plain)


# Positions ---------------------------------------------------------------------------------------


def distances(fn: str, scaled: bool) -> tuple[TileProgram, Program]:
    """y[i, j] = s * (i - j + 3), or without s, in blocks of 4."""
    dims = ("i", "j")
    i, j = (Value(axis, (axis,), "i32") for axis in dims)
    wide = [Value(f"{axis}_wide", dims, "i32") for axis in dims]
    three, far = Value("three", (), "i32"), Value("far", ("i",), "i32")
    apart, real, y = (Value("apart", dims, "i32"), Value("real", dims, "f32"), Value("scaled", dims, "f32"))
    body = [
        Let(S, Argument("s")),
        Let(three, Constant(3)),
        Let(i, Positions("i")),
        Let(j, Positions("j")),
        Let(far, Elementwise("add", (i, three))),
        Let(wide[0], Align(far)),
        Let(wide[1], Align(j)),
        Let(apart, Elementwise(fn, (wide[0], wide[1]))),
        Let(real, Cast(apart)),
        *([Let(y, Elementwise("mul", (real, S)))] if scaled else []),
        Store("y", (i, j), y if scaled else real, None),
    ]
    kernel = Kernel("k", dims, tuple(Block(axis, "grid", 4) for axis in dims), tuple(body))
    source = parse(
        f"y[i,j] = (i + 3 {'-' if fn == 'sub' else '+'} j){' * s' if scaled else ''} + 0 * x[i] * z[j]"
    )
    return TileProgram((kernel,), (Buffer("y", dims, "f32", True),)), source


@pytest.mark.parametrize("fn", ["add", "sub"])
@pytest.mark.parametrize("scaled", [False, True])
def test_positions_are_converted_side_by_side(fn: str, scaled: bool) -> None:
    plain, source = distances(fn, scaled)
    program = run_passes(plain, GPU_PASSES)
    assert program.passes == ("split positions",)
    text = show(program)
    assert "i32[i, j]" not in text and "lanes(i)" in text and "start(j)" in text
    scale = float(np.float32(0.3))
    sizes, domain = {"i": 48, "j": 64}, FloatDomain("float32")
    found = interpreter.run(program, source, {}, {"s": scale}, sizes, domain, shards={})["y"]
    i, j = np.arange(48.0)[:, None] + 3, np.arange(64.0)
    difference = i - j if fn == "sub" else i + j
    if not scaled:
        assert (found == difference).all()
        return
    bound = [[positions.error(abs(d), 4) for d in row] for row in difference]
    off = np.abs(found - scale * difference) / scale * 2**24
    assert (off <= np.array(bound)).all() and off.max() > 0


def test_other_conversions_of_integers_stay() -> None:
    plain, _ = distances("mul", True)
    assert run_passes(plain, GPU_PASSES) is plain


# Reciprocals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [False, True])
def test_a_product_with_a_reciprocal_rounds_no_worse_than_its_model(factor: bool) -> None:
    product, result = tile("product"), tile("result")
    three = Value("three", (), "f32")
    made: list[tuple[Value, Any]] = [(three, Constant(3.0))]
    made += [(product, Elementwise("mul", (X, three)))] if factor else []
    made += [(result, Elementwise("div", (product if factor else X, S)))]
    plain = pointwise(*made)
    program = run_passes(plain, GPU_PASSES)
    assert program.passes == ("reciprocals",)
    text = show(program)
    assert ("3.0 / s_arg" in text) == factor and ("1.0 / s_arg" in text) != factor
    assert text.count(" / ") == 1 and text.count(" * ") == 1
    x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    s = float(np.float32(0.7))
    exact = x.astype(np.float64) * (3 if factor else 1) / s
    errors = np.abs(ran(program, x, s) / exact - 1) * 2**24
    assert (errors <= reciprocals.ERROR).all() and errors.max() > 1


def test_by_the_elements_of_a_tensor_there_is_a_division() -> None:
    plain = pointwise((tile("result"), Elementwise("div", (X, X))))
    assert run_passes(plain, GPU_PASSES) is plain


# Matrix products ---------------------------------------------------------------------------------


def product(
    dtype: str, out: str, *, masked: bool = False, accumulator: bool = False
) -> tuple[TileProgram, Program]:
    """y[i, e] = sum[j](x[i, j] * w[j, e]), where j <= i if `masked`."""
    i, j, e = (Value(axis, (axis,), "i32") for axis in "ije")
    x, w = Value("x_tile", ("i", "j"), dtype), Value("w_tile", ("j", "e"), dtype)
    wide = [Value(f"{axis}_wide", ("i", "j"), "i32") for axis in "ij"]
    mask = Value("mask", ("i", "j"), "bool")
    start, y = Value("start", ("i", "e"), "f32"), Value("dot", ("i", "e"), "f32")
    stored = Value("stored", ("i", "e"), out)
    rounded = [Let(stored, Cast(y))] if out != "f32" else []
    body = [
        *(Let(value, Positions(value.name)) for value in (i, j, e)),
        Let(x, LoadTile("x", (i, j), None, 0.0)),
        Let(w, LoadTile("w", (j, e), None, 0.0)),
        Let(wide[0], Align(i)),
        Let(wide[1], Align(j)),
        Let(mask, Elementwise("le", (wide[1], wide[0]))),
        Let(start, Fill(2.0)),
        Let(y, Dot(x, w, "j", start if accumulator else None, mask if masked else None)),
        *rounded,
        Store("y", (i, e), stored if rounded else y, None),
    ]
    blocks = (Block("i", "grid", 8), Block("j", "loop", 64), Block("e", "grid", 8))
    zero, size = Value("zero", (), "i32"), Value("size", (), "i32")
    loop = For("j", zero, size, (), tuple(body), False)
    outside = (Let(zero, Constant(0)), Let(size, Extent("j")))
    kernel = Kernel("k", ("i", "e"), blocks, (*outside, loop))
    return TileProgram((kernel,), (Buffer("y", ("i", "e"), out, True),)), parse(
        "y[i,e] = sum[j](x[i,j] * w[j,e])"
    )


def multiplied(program: TileProgram, source: Program, x: Any, w: Any) -> Any:
    sizes = {"i": x.shape[0], "j": x.shape[1], "e": w.shape[1]}
    domain = FloatDomain("float32")
    return interpreter.run(program, source, {"x": x, "w": w}, {}, sizes, domain, shards={})["y"]


def test_three_products_of_bf16_round_no_worse_than_their_model() -> None:
    halves, source = product("f32", "bf16")
    loads = {"x": "bf16", "w": "bf16"}
    narrow = replace_loads(halves)
    program = run_passes(narrow, GPU_PASSES, loads)
    assert program.passes == ("matrix precision",) and "as bf16x3" in show(program)
    inexact, _ = product("f32", "f32")
    inexact = replace(inexact, kernels=tuple(map(as_three_products, inexact.kernels)))
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((16, 64), (64, 8)))
    exact = x.astype(np.float64) @ w
    scale = np.abs(x).astype(np.float64) @ np.abs(w)
    off = np.abs(multiplied(inexact, source, x, w) - exact) / scale
    plain = np.abs(multiplied(product("f32", "f32")[0], source, x, w) - exact) / scale
    assert plain.max() < off.max() <= precision.ERROR


def replace_loads(program: TileProgram) -> TileProgram:
    """The program with tensors of bf16, converted to f32 before they are multiplied."""

    def change(let: Let) -> tuple[Let, ...]:
        if not isinstance(let.op, LoadTile):
            return (let,)
        narrow = replace(let.value, name=f"{let.value.name}_half", dtype="bf16")
        return Let(narrow, let.op), Let(let.value, Cast(narrow))

    (kernel,) = program.kernels
    return replace(program, kernels=(replace(kernel, body=changed(kernel.body, change)),))


def as_three_products(kernel: Kernel) -> Kernel:
    def change(let: Let) -> tuple[Let]:
        return (replace(let, op=replace(let.op, precision="bf16x3")) if isinstance(let.op, Dot) else let,)

    return replace(kernel, body=changed(kernel.body, change))


def test_products_of_f32_tensors_stay_exact() -> None:
    plain, _ = product("f32", "f32")
    assert run_passes(plain, GPU_PASSES) is plain


def test_f8_is_summed_by_the_matrix_unit_and_then_added() -> None:
    plain, source = product("f8e4m3", "f32", accumulator=True)
    program = run_passes(plain, GPU_PASSES)
    assert program.passes == ("matrix precision",)
    assert "dot_dot: f32[i, e] = dot(x_tile, w_tile, over j, 128 summed imprecisely)" in show(program)
    assert "dot: f32[i, e] = start + dot_dot" in show(program)
    x, w = np.ones((8, 64), np.float32), np.ones((64, 8), np.float32)
    assert (multiplied(program, source, x, w) == 66).all()


def test_what_is_masked_of_a_product_stays_out_of_it() -> None:
    plain, source = product("f32", "f32", masked=True)
    program = run_passes(plain, GPU_PASSES)
    assert program.passes == ("masked products",)
    assert "finite_part(w_tile)" in show(
        program
    ) and "rest_of_dot(x_tile where mask, w_tile, over j)" in show(program)
    x = np.tril(np.ones((64, 64), np.float32))
    w = np.ones((64, 8), np.float32)
    w[20, 0], w[30, 1], w[31, 1], w[40, 2] = np.nan, np.inf, -np.inf, np.inf
    rows = np.arange(64)
    expected = np.repeat(rows[:, None] + 1.0, 8, axis=1)
    expected[20:, 0] = np.nan
    expected[30:, 1] = np.inf
    expected[31:, 1] = np.nan
    expected[40:, 2] = np.inf
    np.testing.assert_array_equal(multiplied(program, source, x, w), expected)
    np.testing.assert_array_equal(multiplied(plain, source, x, w), expected)
    for here, there, both in ((np.inf, np.inf, np.inf), (np.inf, -np.inf, -np.inf), (0, np.inf, np.nan)):
        x[45, 40], w[40, 2] = here, there
        found = multiplied(program, source, x, w)
        np.testing.assert_array_equal(found, multiplied(plain, source, x, w))
        np.testing.assert_array_equal(found[44:47, 2], [there, both, there])


# Sizes and order ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["split_merge"])
@pytest.mark.parametrize("passes", [GPU_PASSES, CPU_PASSES], ids=["gpu", "cpu"])
def test_quotients_of_sizes_are_computed_by_the_launcher(name: str, passes: tuple[Pass, ...]) -> None:
    program, dtypes = lowered(name)
    after = run_passes(program, passes, dtypes)
    assert "launch j_by_c = (N(j) + (N(c) - 1)) // N(c)" in show(after) and "// c_size" not in show(after)
    (found,) = {
        stmt.op
        for k in after.kernels
        for stmt in k.body
        if isinstance(stmt, Let) and isinstance(stmt.op, LaunchValue)
    }
    assert launch_value(found.expr, {"j": 10, "c": 4}) == 3


def test_a_quotient_by_what_may_be_0_stays_where_it_is() -> None:
    sizes = [Value(f"{axis}_size", (), "i32") for axis in "ij"]
    less, quotient = Value("less", (), "i32"), Value("quotient", (), "i32")
    body = (
        Let(sizes[0], Extent("i")),
        Let(sizes[1], Extent("j")),
        Let(less, Elementwise("sub", (sizes[0], sizes[1]))),
        Let(quotient, Elementwise("floordiv", (sizes[0], less))),
        Store("y", (), quotient, None),
    )
    plain = TileProgram((Kernel("k", (), (), body),), (Buffer("y", (), "i32", True),))
    assert run_passes(plain, GPU_PASSES) is plain


def test_blocks_go_backwards_where_later_ones_take_longer() -> None:
    program, dtypes = lowered("attention")
    after = run_passes(program, CPU_PASSES, dtypes)
    assert [kernel.backwards for kernel in after.kernels] == [("i",)]
    (kernel,) = after.kernels
    sizes = {"i": 300, "j": 300, "h": 2, "b": 1, "d": 8, "e": 8}
    first = _blocks(program.kernels[0], sizes)
    turned = _blocks(kernel, sizes)
    assert (
        sorted(first) == sorted(turned) and [at[0] for at in first[:3]] == [at[0] for at in turned[:3]][::-1]
    )
    with pytest.raises(TileError, match="goes backwards"):
        check(replace(after, kernels=(replace(kernel, backwards=("j",)),)), dtypes)


# Boundaries --------------------------------------------------------------------------------------


def test_a_pass_that_leaves_nonsense_is_found_out() -> None:
    def loses_a_value(program: TileProgram) -> TileProgram:
        (kernel,) = program.kernels
        return replace(program, kernels=(replace(kernel, body=kernel.body[1:]),))

    wrong = Pass("losing", loses_a_value, "to be wrong", "nothing")
    with pytest.raises(TileError, match="read where it is not defined"):
        run_passes(scaled_exponential(), (wrong,))


def test_a_printer_for_gpus_takes_no_masked_product() -> None:
    plain, source = product("f32", "f32", masked=True)
    with pytest.raises(TileError, match="run the passes first"):
        emit(plain, source, {"x": "f32", "w": "f32"}, (KernelConfig(()),), name="f")


@pytest.mark.parametrize("only", ["causal_prefill", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_what_is_verified_has_gone_through_the_passes_of_what_runs(target: str, only: str | None) -> None:
    for workload in select(only):
        case = workload.cases["small"]
        derived = compiler.derive(workload.text(case), case.constants, strict_casts=False)
        dtypes, device = program_dtypes(derived.program), device_named(target)
        shapes = {name: workload.shape(name, case) for name in workload.tensors}
        extents = bind(derived.program, shapes, scalars=case.scalars)
        made = compiler.pipeline(derived, extents, dtypes, device, None)
        chosen = made.chosen
        tiles = certification.verified_tiles(
            chosen.nest, derived.program, dtypes, device, chosen.plan.configs
        )
        assert set(made.tile.passes) <= set(passes_of(tiles)), workload.name


# Divisions ---------------------------------------------------------------------------------------


def grouped(shift: int, divisor: int | str) -> TileProgram:
    """y[i] = (i + shift) // divisor, of integers; the divisor is a number or a run-time scalar."""
    by, at = Value("by", (), "i32"), Value("at", ("i",), "i32")
    amount, moved = Value("amount", (), "i32"), Value("moved", ("i",), "i32")
    quotient, rest = Value("quotient", ("i",), "i32"), Value("rest", ("i",), "i32")
    body = (
        Let(by, Constant(divisor) if isinstance(divisor, int) else Argument(divisor)),
        Let(amount, Constant(shift)),
        Let(at, Positions("i")),
        Let(moved, Elementwise("add", (at, amount))),
        Let(quotient, Elementwise("floordiv", (moved, by))),
        Let(rest, Elementwise("mod", (moved, by))),
        Store("y", (at,), quotient, None),
        Store("z", (at,), rest, None),
    )
    kernel = Kernel("k", ("i",), (Block("i", "grid", 4),), body)
    return TileProgram((kernel,), tuple(Buffer(name, ("i",), "i32", True) for name in "yz"))


@pytest.mark.parametrize(
    ("shift", "divisor", "known"),
    [(2, 3, "natural"), (-2, 3, "positive"), (2, -3, ""), (2, "by", "")],
)
@pytest.mark.parametrize("passes", [GPU_PASSES, CPU_PASSES], ids=["gpu", "cpu"])
def test_divisions_are_marked_with_what_is_known(
    shift: int, divisor: int | str, known: str, passes: tuple[Pass, ...]
) -> None:
    plain = grouped(shift, divisor)
    program = run_passes(plain, passes)
    assert (program is plain) == (known == "")
    assert show(program).count(f", {known}" if known else ", natural") == (2 if known else 0)
    source = parse("by: i32\ny[i] = (i * 1) // by\nz[i] = i % by\nreturn y, z")
    by = -7 if isinstance(divisor, str) else divisor
    for each in (plain, program):
        found = interpreter.run(each, source, {}, {"by": by}, {"i": 12}, FloatDomain("float64"), shards={})
        assert (found["y"] == (np.arange(12) + shift) // by).all()
        assert (found["z"] == (np.arange(12) + shift) % by).all()


def test_a_wrong_mark_is_seen() -> None:
    plain = grouped(-2, 3)
    source = parse("y[i] = (i - 2) // 3\nz[i] = (i - 2) % 3\nreturn y, z")

    def marked(division: Any) -> TileProgram:
        def change(let: Let) -> tuple[Let]:
            divides = isinstance(let.op, Elementwise) and let.op.fn in ("floordiv", "mod")
            return (replace(let, op=replace(let.op, division=division)) if divides else let,)

        (kernel,) = plain.kernels
        return replace(plain, kernels=(replace(kernel, body=changed(kernel.body, change)),))

    domain = FloatDomain("float64")
    found = interpreter.run(marked("natural"), source, {}, {}, {"i": 12}, domain, shards={})
    assert (found["y"] != (np.arange(12) - 2) // 3).any()
    wrong = replace(grouped(2, -3), passes=())
    (kernel,) = wrong.kernels

    def natural(let: Let) -> tuple[Let]:
        divides = isinstance(let.op, Elementwise) and let.op.fn == "floordiv"
        return (replace(let, op=replace(let.op, division="natural")) if divides else let,)

    wrong = replace(wrong, kernels=(replace(kernel, body=changed(kernel.body, natural)),))
    with pytest.raises(TileError, match="divides by what is not above 0"):
        interpreter.run(wrong, source, {}, {}, {"i": 12}, domain, shards={})
