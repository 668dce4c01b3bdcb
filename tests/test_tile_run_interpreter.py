"""The tile interpreter: padded blocks, trials, and the mistakes that it exists to catch."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from tile_programs import Body, attention, paged_sum, program, row_softmax, source, split_sum

from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.nodes import Program
from eqfuse.tile.check import TileError
from eqfuse.tile.interpreter import run
from eqfuse.tile.nodes import Cast, Constant, Fill, TileProgram
from eqfuse.verify.field.domain import FieldDomain

F64 = FloatDomain("float64")
ROWS = source(x="f32 i j")
QKV = source(q="f32 h i d", k="f32 g j d", v="f32 g j e")


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def real(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def interpret(
    tiles: TileProgram, inputs: Program, tensors: dict[str, Any], extents: dict[str, int], **options: Any
) -> Any:
    scalars = options.pop("scalars", {})
    domain = options.pop("domain", F64)
    (result,) = run(tiles, inputs, tensors, scalars, extents, domain, shards={"s": 3}, **options).values()
    return result


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 2), (2, 8), (8, 4)])
def test_row_softmax_with_ragged_padded_blocks(rows: int, columns: int) -> None:
    x = real(5, 7)
    y = interpret(row_softmax(rows, columns), ROWS, {"x": x}, {"i": 5, "j": 7})
    np.testing.assert_allclose(y, softmax(x), rtol=1e-12)


def test_trials_are_independent() -> None:
    x = real(16, 5, 7)
    y = interpret(row_softmax(2, 4), ROWS, {"x": x}, {"i": 5, "j": 7}, batch=16)
    assert y.shape == (16, 5, 7)
    np.testing.assert_allclose(y, softmax(x), rtol=1e-12)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    logits = 0.3 * q @ np.repeat(k, 2, -3).swapaxes(-1, -2)
    if causal:
        logits = np.where(np.tril(np.ones(logits.shape[-2:])) == 1, logits, -math.inf)
    return np.asarray(softmax(logits) @ np.repeat(v, 2, -3))


ATTENTION = {"h": 4, "i": 7, "j": 7, "d": 3, "e": 5}


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_whose_instances_loop_for_different_times(heads: int, causal: bool) -> None:
    q, k, v = real(3, 4, 7, 3), real(3, 2, 7, 3), real(3, 2, 7, 5)
    tiles = attention(2, 4, causal=causal, heads=heads)
    given = {"q": q, "k": k, "v": v}
    o = interpret(tiles, QKV, given, ATTENTION, batch=3, scalars={"scale": 0.3})
    np.testing.assert_allclose(o, attended(q, k, v, causal), rtol=1e-12)


def test_verification_size_is_quick() -> None:
    given = {"q": real(16, 4, 9, 4), "k": real(16, 2, 9, 4), "v": real(16, 2, 9, 4)}
    extents = {"h": 4, "i": 9, "j": 9, "d": 4, "e": 4}
    tiles = attention(2, 2, causal=True)
    started = time.perf_counter()
    interpret(tiles, QKV, given, extents, batch=16, scalars={"scale": 0.3})
    assert time.perf_counter() - started < 1.0


def test_half_casts_round_in_floats() -> None:
    given = {"q": real(4, 7, 3), "k": real(2, 7, 3), "v": real(2, 7, 5)}
    o = interpret(attention(2, 4, dtype="f16"), QKV, given, ATTENTION, scalars={"scale": 0.3})
    assert np.array_equal(o, o.astype(np.float16))
    exact = attended(given["q"], given["k"], given["v"], False)
    error = np.abs(o - exact).max()
    assert 1e-6 < error < 4e-3


def test_split_and_merge() -> None:
    x = real(5, 8)
    np.testing.assert_allclose(interpret(split_sum(2), ROWS, {"x": x}, {"i": 5, "j": 8}), x.sum(1))


PAGES = source(x="f16 p q d", table="i32 i n", length="i32 i")


def test_gather_with_lengths_from_a_tensor() -> None:
    x, table = real(9, 4, 5), np.random.default_rng(0).permutation(9).reshape(3, 3)
    length = np.array([12, 7, 0])
    tensors = {"x": x, "table": table, "length": length}
    y = interpret(paged_sum(1, 8, 4), PAGES, tensors, {"i": 3, "j": 12, "d": 5})
    for i in range(3):
        np.testing.assert_allclose(y[i], x[table[i]].reshape(12, 5)[: length[i]].sum(0), atol=1e-12)


def test_the_field_agrees_between_tile_sizes_and_sees_a_dropped_repair() -> None:
    domain, rng = FieldDomain(seed=1), np.random.default_rng(1)
    given = {
        name: domain.draw(rng.normal(size=shape), rng)
        for name, shape in (("q", (8, 2, 5, 3)), ("k", (8, 1, 5, 3)), ("v", (8, 1, 5, 4)))
    }
    extents = {"h": 2, "i": 5, "j": 5, "d": 3, "e": 4}

    def residues(tiles: TileProgram) -> Any:
        found = interpret(tiles, QKV, given, extents, batch=8, domain=domain, scalars={"scale": 0.5})
        assert np.isfinite(found.shadow).all()
        return found.p

    whole = residues(attention(8, 8))
    assert (residues(attention(2, 2)) == whole).all()
    assert (residues(attention(4, 2, heads=2)) == whole).all()
    assert (residues(attention(2, 2, repair=False)) != whole).any()


def test_a_missing_load_mask_is_caught_and_named() -> None:
    tiles = row_softmax(2, 4, masked_load=False)
    with pytest.raises(
        TileError, match=r"load x_tile = x\[i_positions, j_positions\] in row_softmax is out of range"
    ):
        interpret(tiles, ROWS, {"x": real(4, 7)}, {"i": 4, "j": 7})
    np.testing.assert_allclose(  # blocks that fit exactly need no mask
        interpret(tiles, ROWS, {"x": real(4, 8)}, {"i": 4, "j": 8}), softmax(real(4, 8)), rtol=1e-12
    )


def test_a_missing_identity_gives_wrong_values() -> None:
    x = real(4, 7)
    y = interpret(row_softmax(2, 4, identity=False), ROWS, {"x": x}, {"i": 4, "j": 7})
    assert not np.allclose(y, softmax(x))


def copying(mask: bool, *, store: bool = True, shift: int = 0) -> TileProgram:
    b = Body()
    i, n_i = b.positions("i"), b.extent("i")
    at = b.call("add", i, b.integer(shift))
    bound = b.call("lt", at, n_i) if shift else b.bound("i", n_i)
    x = b.load("x", [at], bound, "i")
    b.store("y", [i if store else b.integer(0)], x, b.bound("i", n_i) if mask else None)
    return program([b.kernel("copy", ("i",), Block("i", "grid", 4))], [Buffer("y", ("i",), "f32", True)])


def test_an_unmasked_store_past_the_end_is_caught() -> None:
    with pytest.raises(TileError, match=r"store y\[i_positions\] in copy is out of range in dimension 0"):
        interpret(copying(mask=False), source(x="f32 i"), {"x": real(6)}, {"i": 6})


def test_two_instances_that_store_to_one_element_are_caught() -> None:
    with pytest.raises(TileError, match="writes one element from two program instances"):
        interpret(copying(mask=True, store=False), source(x="f32 i"), {"x": real(6)}, {"i": 6})


def test_masked_elements_read_as_other() -> None:
    x = real(6)
    y = interpret(copying(mask=True, shift=2), source(x="f32 i"), {"x": x}, {"i": 6})
    np.testing.assert_array_equal(y, [*x[2:], 0.0, 0.0])


def test_what_nothing_was_stored_to_is_nan() -> None:
    b = Body()
    i = b.positions("i")
    half = b.call("lt", i, b.integer(3))
    b.store("y", [i], b.load("x", [i], b.bound("i", b.extent("i")), "i"), half)
    tiles = program([b.kernel("half", ("i",), Block("i", "grid", 2))], [Buffer("y", ("i",), "f32", True)])
    y = interpret(tiles, source(x="f32 i"), {"x": real(5)}, {"i": 5})
    assert not np.isnan(y[:3]).any() and np.isnan(y[3:]).all()


def test_integer_states_follow_the_trial() -> None:
    """argmax: the position carried depends on values, so it differs between trials."""
    b = Body()
    i, n_i, zero, n_j = b.positions("i"), b.extent("i"), b.integer(0), b.extent("j")
    v0, k0 = b.let(Fill(-math.inf), "i"), b.let(Fill(-1), "i", "i64")
    v, k = b.carried("best", v0), b.carried("k", k0)
    c = b.inner()
    x = c.load("x", [i, c.start("j")], c.bound("i", n_i), "i")
    better = c.call("gt", x, v)
    k_next = c.call("where", better, c.let(Cast(c.start("j")), "", "i64"), k, dtype="i64")
    b.loop("j", zero, n_j, [(v, v0, c.call("where", better, x, v)), (k, k0, k_next)], c)
    b.store("y", [i], k, b.bound("i", n_i))
    kernel = b.kernel("argmax", ("i",), Block("i", "grid", 4), Block("j", "unit", 1))
    tiles = program([kernel], [Buffer("y", ("i",), "i64", True)])
    x = real(6, 5, 7)
    y = interpret(tiles, ROWS, {"x": x}, {"i": 5, "j": 7}, batch=6)
    np.testing.assert_array_equal(y, x.argmax(2))


def test_loop_bounds_follow_the_trial() -> None:
    """A loop up to a position that another kernel computed: it ends elsewhere in every trial."""
    b = Body()
    i, n_i = b.positions("i"), b.extent("i")
    x = b.load("x", [i, b.integer(0)], b.bound("i", n_i), "i")
    stop = b.call(
        "where", b.call("gt", x, b.let(Fill(0.0), "i")), *(b.let(Fill(n), "i", "i64") for n in (2, 5))
    )
    b.store("stop", [i], stop, b.bound("i", n_i))
    first = b.kernel("stops", ("i",), Block("i", "grid", 4))
    b = Body()
    zero, at = b.integer(0), b.start("i")
    total0 = b.let(Constant(0.0), "", "f32")
    total = b.carried("total", total0)
    c = b.inner()
    step = c.call("add", total, c.load("x", [at, c.start("j")], None, ""))
    b.loop("j", zero, b.load("stop", [at], None, "", "i64"), [(total, total0, step)], c)
    b.store("y", [at], total, None)
    second = b.kernel("sums", ("i",), Block("i", "unit", 1), Block("j", "unit", 1))
    buffers = [Buffer("stop", ("i",), "i64", False), Buffer("y", ("i",), "f32", True)]
    x = real(6, 5, 7)
    y = interpret(program([first, second], buffers), ROWS, {"x": x}, {"i": 5, "j": 7}, batch=6)
    shown = np.where(x[:, :, :1] > 0, np.arange(7) < 2, np.arange(7) < 5)
    np.testing.assert_allclose(y, (x * shown).sum(2))


def test_scalars_may_differ_by_trial() -> None:
    given = {"q": real(2, 4, 7, 3), "k": real(2, 2, 7, 3), "v": real(2, 2, 7, 5)}
    o = interpret(attention(4, 4), QKV, given, ATTENTION, batch=2, scalars={"scale": np.array([0.3, 0.0])})
    np.testing.assert_allclose(o[0], attended(given["q"], given["k"], given["v"], False)[0])
    np.testing.assert_allclose(o[1], np.repeat(np.repeat(given["v"][1].mean(1)[:, None], 7, 1), 2, 0))


def test_no_positions_at_all() -> None:
    assert interpret(row_softmax(2, 4), ROWS, {"x": real(0, 7)}, {"i": 0, "j": 7}).shape == (0, 7)
    y = interpret(split_sum(2), ROWS, {"x": real(3, 0)}, {"i": 3, "j": 0})
    np.testing.assert_array_equal(y, np.zeros(3))


def test_constants_fold_over_padded_positions_literally() -> None:
    """Without the `where` that lowering adds, a sum counts the padding too: that is what a GPU would do."""
    b = Body()
    i, n_i = b.positions("i"), b.extent("i")
    ones = b.align(b.let(Constant(1.0)), "i j")
    b.store("y", [i], b.reduce("sum", ones, "j"), b.bound("i", n_i))
    blocks = (Block("i", "grid", 2), Block("j", "whole", None))
    tiles = program([b.kernel("count", ("i",), *blocks)], [Buffer("y", ("i",), "f32", True)])
    assert interpret(tiles, source(), {}, {"i": 3, "j": 5}).tolist() == [8.0] * 3
