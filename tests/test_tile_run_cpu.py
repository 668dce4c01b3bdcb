"""Tile programs on torch CPU tensors: values, strides, dtypes, lifetimes, errors."""

from __future__ import annotations

import math

import pytest
import torch
from tile_programs import Body, attention, paged_sum, program, row_softmax, source, split_sum

import eqfuse as eq
from eqfuse.errors import BindError
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer
from eqfuse.tile.cpu.run import CpuProgram
from eqfuse.tile.cpu.torch_ops import FEW_COLUMNS, from_float8, invertible
from eqfuse.tile.nodes import Argument, Cast, Constant, Dot, Fill, TileProgram, Value
from eqfuse.tile.storage import SMALL_ELEMENTS, buffers_for, resolve_extents


def run(
    tiles: TileProgram, tensors: dict[str, torch.Tensor], extents: dict[str, int], **scalars: float
) -> torch.Tensor:
    (result,) = CpuProgram(tiles, source())(
        tensors, scalars, extents, {"s": 3} if tiles.shards else {}
    ).values()
    return result


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    q, k, v = (t.double() for t in (q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)))
    logits = scale * q @ k.transpose(1, 2)
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[1:]).tril() == 0, -math.inf)
    return torch.softmax(logits, 2) @ v


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 5), (16, 64)])
def test_row_softmax_over_ragged_tiles(rows: int, columns: int) -> None:
    x = torch.randn(10, 37)
    torch.testing.assert_close(
        run(row_softmax(rows, columns), {"x": x}, {"i": 10, "j": 37}), torch.softmax(x, 1)
    )


def test_any_strides_are_read_and_nothing_is_written_to_them() -> None:
    storage = torch.randn(74, 10)
    for x in (storage[::2].t(), torch.randn(10, 1).expand(10, 37), torch.randn(1, 37).expand(10, 37)):
        before = x.clone()
        y = run(row_softmax(4, 8), {"x": x}, {"i": 10, "j": 37})
        torch.testing.assert_close(y, torch.softmax(x, 1))
        assert torch.equal(x, before)


def test_infinities_and_nan_as_the_definition_has_them() -> None:
    x = torch.randn(4, 9)
    x[0, 3], x[1, 2], x[2] = -math.inf, math.nan, -math.inf
    y = run(row_softmax(2, 4), {"x": x}, {"i": 4, "j": 9})
    torch.testing.assert_close(y[0], torch.softmax(x[0], 0))
    assert y[1].isnan().all() and y[2].isnan().all()
    torch.testing.assert_close(y[3], torch.softmax(x[3], 0))


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(heads: int, causal: bool) -> None:
    q, k, v = torch.randn(4, 21, 8), torch.randn(2, 21, 8), torch.randn(2, 21, 5)
    extents = {"h": 4, "i": 21, "j": 21, "d": 8, "e": 5}
    o = run(attention(8, 6, causal=causal, heads=heads), {"q": q, "k": k, "v": v}, extents, scale=0.3)
    torch.testing.assert_close(o, attended(q, k, v, 0.3, causal).float())


@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_operands_accumulate_in_f32(name: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 40, 16).to(dtype) for _ in range(3))
    k, v = k[:1], v[:1]
    extents = {"h": 2, "i": 40, "j": 40, "d": 16, "e": 16}
    o = run(attention(16, 16, dtype=name), {"q": q, "k": k, "v": v}, extents, scale=0.25)
    assert o.dtype == dtype
    error = (o.double() - attended(q, k, v, 0.25, False)).abs().max()
    assert error < 4 * torch.finfo(dtype).eps


def test_a_dropped_repair_shows() -> None:
    q, k, v = torch.randn(2, 8, 4), torch.randn(1, 8, 4), torch.randn(1, 8, 4)
    extents = {"h": 2, "i": 8, "j": 8, "d": 4, "e": 4}
    o = run(attention(4, 4, repair=False), {"q": q, "k": k, "v": v}, extents, scale=1.0)
    assert not torch.allclose(o, attended(q, k, v, 1.0, False).float(), atol=1e-3)


def test_shards_meet_in_a_temporary_that_a_unit_loop_adds() -> None:
    x = torch.randn(6, 50)
    tiles = split_sum(8)
    torch.testing.assert_close(run(tiles, {"x": x}, {"i": 6, "j": 50}), x.sum(1))
    buffers = buffers_for(tiles, resolve_extents(tiles, {"i": 6, "j": 50}, {"s": 3}), {})
    assert {name: tuple(b.shape) for name, b in buffers.items()} == {"part": (3, 6), "y": (6,)}


def paged_input() -> dict[str, torch.Tensor]:
    table = torch.randperm(9).view(3, 3).to(torch.int32)
    return {"x": torch.randn(9, 4, 5).half(), "table": table, "length": torch.tensor([12, 7, 0])}


PAGED = {"i": 3, "j": 12, "d": 5}


def test_gathered_pages_up_to_a_length_from_a_tensor() -> None:
    given = paged_input()
    y = run(paged_sum(1, 6, 4), given, PAGED)
    for i, length in enumerate([12, 7, 0]):
        rows = given["x"].float()[given["table"][i].long()].reshape(12, 5)[:length]
        torch.testing.assert_close(y[i], rows.sum(0))


def test_a_page_that_does_not_exist_is_the_caller_s_error() -> None:
    given = paged_input()
    given["table"][1, 0] = 9
    with pytest.raises(BindError, match="'x': position 9 is outside a dimension of 9"):
        run(paged_sum(1, 6, 4), given, PAGED)
    given["table"][1, 0] = -1
    with pytest.raises(BindError, match="'x': position -1 is outside"):
        run(paged_sum(1, 6, 4), given, PAGED)
    given["table"][1, 0], given["table"][2, 0] = 0, 77  # row 2 has length 0: nobody looks there
    run(paged_sum(1, 6, 4), given, PAGED)


def one_kernel(b: Body, *, out: str = "i", j: Block | None = None, dtype: str = "f32") -> TileProgram:
    blocks = (Block("i", "grid", 4), j or Block("j", "whole", None))
    return program([b.kernel("only", ("i",), *blocks)], [Buffer("y", tuple(out.split()), dtype, True)])


def test_affine_accesses_are_windows_and_masked_edges() -> None:
    """y[i] = sum over j of x[i + j - 1], positions outside counting as 7."""
    b = Body()
    one, n_i, n_x = b.integer(1), b.extent("i"), b.extent("x")
    i, j = b.positions("i"), b.positions("j")
    at = b.call("sub", b.call("add", b.align(i, "i j"), b.align(j, "i j")), one)
    inside = b.call("and", b.call("ge", at, b.integer(0)), b.call("lt", at, n_x))
    tile = b.load("x", [at], inside, "i j", other=7.0)
    b.store("y", [i], b.reduce("sum", tile, "j"), b.bound("i", n_i))
    x = torch.randn(9)
    y = run(one_kernel(b), {"x": x}, {"i": 9, "j": 3, "x": 9})
    padded = torch.nn.functional.pad(x, (1, 1), value=7.0)
    torch.testing.assert_close(y, padded.unfold(0, 3, 1).sum(1))


def test_an_unmasked_position_outside_is_an_error_not_a_wrapped_index() -> None:
    b = Body()
    i = b.positions("i")
    at = b.call("sub", i, b.integer(1))
    b.store("y", [i], b.load("x", [at], b.bound("i", b.extent("i")), "i"), b.bound("i", b.extent("i")))
    with pytest.raises(BindError, match="'x': position -1 is outside a dimension of 5"):
        run(one_kernel(b), {"x": torch.randn(5)}, {"i": 5, "j": 1})


def test_stores_under_a_condition_leave_the_rest() -> None:
    b = Body()
    i, n_i = b.positions("i"), b.extent("i")
    even = b.call("eq", b.call("mod", i, b.integer(2)), b.integer(0))
    zero = b.let(Fill(0.0), "i")
    b.store("y", [i], zero, b.bound("i", n_i))
    b.store("y", [i], b.load("x", [i], b.bound("i", n_i), "i"), b.call("and", even, b.bound("i", n_i)))
    y = run(one_kernel(b), {"x": torch.arange(1.0, 8.0)}, {"i": 7, "j": 1})
    assert y.tolist() == [1, 0, 3, 0, 5, 0, 7]


def test_a_fold_over_what_does_not_vary_still_counts_positions() -> None:
    b = Body()
    i, n_i, n_j = b.positions("i"), b.extent("i"), b.extent("j")
    seen = b.call("where", b.bound("j", n_j), b.let(Constant(1.0)), b.let(Constant(0.0)))
    count = b.reduce("sum", b.align(seen, "i j"), "j")
    b.store("y", [i], count, b.bound("i", n_i))
    assert run(one_kernel(b), {}, {"i": 6, "j": 5}).tolist() == [5.0] * 6


@pytest.mark.parametrize(
    ("op", "identity"), [("sum", 0.0), ("max", -math.inf), ("min", math.inf), ("prod", 1.0)]
)
def test_folds_over_no_positions_give_the_identity(op: str, identity: float) -> None:
    b = Body()
    i, j, n_i, n_j = b.positions("i"), b.positions("j"), b.extent("i"), b.extent("j")
    mask = b.masks("i j", b.bound("i", n_i), b.bound("j", n_j))
    b.store("y", [i], b.reduce(op, b.load("x", [i, j], mask, "i j"), "j"), b.bound("i", n_i))
    assert run(one_kernel(b), {"x": torch.empty(3, 0)}, {"i": 3, "j": 0}).tolist() == [identity] * 3


def test_values_that_swap_in_a_loop_keep_their_own_memory() -> None:
    """(a, b) <- (b, a + x): in-place arithmetic must not reach the other one through a shared tensor."""
    b = Body()
    i, n_i, zero, n_j = b.positions("i"), b.extent("i"), b.integer(0), b.extent("j")
    start = b.let(Fill(1.0), "i", name="start")
    first, second = b.carried("a", start), b.carried("b", start)
    c = b.inner()
    x = c.load("x", [i, c.start("j")], c.bound("i", n_i), "i")
    b.loop("j", zero, n_j, [(first, start, second), (second, start, c.call("add", first, x))], c)
    b.store("y", [i], b.call("sub", first, b.call("mul", second, second)), b.bound("i", n_i))
    x = torch.randn(6, 5)
    one, two = torch.ones(6), torch.ones(6)
    for j in range(5):
        one, two = two, one + x[:, j]
    tiles = one_kernel(b, j=Block("j", "unit", 1))
    torch.testing.assert_close(run(tiles, {"x": x}, {"i": 6, "j": 5}), one - two * two)


def test_a_value_from_outside_a_loop_survives_its_iterations() -> None:
    b = Body()
    i, n_i, zero, n_j = b.positions("i"), b.extent("i"), b.integer(0), b.extent("j")
    w = b.call("exp", b.load("w", [i], b.bound("i", n_i), "i"), name="w_exp")
    t = b.carried("t", w)  # starts as w itself, which the body still reads
    c = b.inner()
    x = c.load("x", [i, c.start("j")], c.bound("i", n_i), "i")
    b.loop("j", zero, n_j, [(t, w, c.call("add", t, c.call("mul", w, x)))], c)
    b.store("y", [i], t, b.bound("i", n_i))
    w_given, x = torch.randn(6), torch.randn(6, 5)
    expected = w_given.exp() * (1 + x.sum(1))
    tiles = one_kernel(b, j=Block("j", "unit", 1))
    torch.testing.assert_close(run(tiles, {"w": w_given, "x": x}, {"i": 6, "j": 5}), expected)


def test_an_extreme_and_its_position_with_integers_carried() -> None:
    """argmax by a loop: a real and an integer state, chosen by one condition."""
    b = Body()
    i, n_i, zero, n_j = b.positions("i"), b.extent("i"), b.integer(0), b.extent("j")
    v0, k0 = b.let(Fill(-math.inf), "i", name="v0"), b.let(Fill(-1), "i", "i64", "k0")
    v, k = b.carried("v", v0), b.carried("k", k0)
    c = b.inner()
    x = c.load("x", [i, c.start("j")], c.bound("i", n_i), "i")
    better = c.call("gt", x, v)
    position = c.let(Cast(c.start("j")), "", "i64", "position")
    k_next = c.call("where", better, position, k, dtype="i64")
    b.loop("j", zero, n_j, [(v, v0, c.call("where", better, x, v)), (k, k0, k_next)], c)
    b.store("y", [i], k, b.bound("i", n_i))
    x = torch.randn(7, 11)
    y = run(one_kernel(b, j=Block("j", "unit", 1), dtype="i64"), {"x": x}, {"i": 7, "j": 11})
    assert torch.equal(y, x.argmax(1))


def test_float64_stays_float64() -> None:
    b = Body()
    i, n_i = b.positions("i"), b.extent("i")
    x = b.load("x", [i], b.bound("i", n_i), "i", "f64")
    third = b.let(Constant(1 / 3), "", "f64")
    b.store("y", [i], b.call("mul", b.call("exp", x), third), b.bound("i", n_i))
    x = torch.randn(6, dtype=torch.float64)
    y = run(one_kernel(b, dtype="f64"), {"x": x}, {"i": 6, "j": 1})
    torch.testing.assert_close(y, x.exp() / 3, rtol=1e-15, atol=0)


def test_elementwise_functions_agree_with_torch() -> None:
    functions = {
        "sq": lambda x: x * x,
        "relu": torch.relu,
        # torch's own is NaN of an infinity on some processors
        "gelu": lambda x: x * ((1 + torch.erf(x * 0.5**0.5)) / 2),
        "silu": torch.nn.functional.silu,
        "finite": lambda x: torch.where(x.isinf(), 0.0, x),
        "invertible": lambda x: torch.where(x.isinf() | (x == 0), 1.0, x),
        **{
            fn: getattr(torch, fn)
            for fn in ("neg", "abs", "sign", "floor", "round", "exp", "tanh", "sigmoid")
        },
        **{fn: getattr(torch, fn) for fn in ("sqrt", "rsqrt", "log", "log1p", "expm1", "erf", "sin", "cos")},
    }
    x = torch.tensor([0.0, -0.0, 0.5, 1.5, 2.5, -2.5, 3e38, math.inf, -math.inf, math.nan])
    for fn, expected in functions.items():
        for owned in (False, True):
            b = Body()
            i, n_i = b.positions("i"), b.extent("i")
            tile = b.load("x", [i], b.bound("i", n_i), "i")
            tile = b.call("mul", tile, b.let(Constant(1.0))) if owned else tile
            b.store("y", [i], b.call(fn, tile), b.bound("i", n_i))
            before = x.clone()
            y = run(one_kernel(b), {"x": x}, {"i": 10, "j": 1})
            torch.testing.assert_close(
                y, expected(x), equal_nan=True, msg=lambda text, fn=fn: f"{fn}: {text}"
            )
            torch.testing.assert_close(x, before, equal_nan=True)


def test_binary_functions_with_numbers_on_either_side() -> None:
    functions = {
        **{fn: getattr(torch, fn) for fn in ("add", "sub", "mul", "div", "maximum", "minimum")},
        "floordiv": torch.floor_divide,
        "mod": torch.remainder,
        "atan2": torch.atan2,
    }
    x = torch.tensor([-2.5, -1.0, 0.5, 3.0, math.nan])
    for fn, expected in functions.items():
        for swap in (False, True):
            b = Body()
            i, n_i, number = b.positions("i"), b.extent("i"), b.let(Constant(0.75))
            args = (b.load("x", [i], b.bound("i", n_i), "i"), number)
            result = b.call(fn, *(reversed(args) if swap else args), dtype="f32")
            b.store("y", [i], result, b.bound("i", n_i))
            y = run(one_kernel(b), {"x": x}, {"i": 5, "j": 1})
            pair = (x, torch.tensor(0.75))
            torch.testing.assert_close(y, expected(*(reversed(pair) if swap else pair)), equal_nan=True)


def test_generated_code_is_deterministic_and_skips_bounds() -> None:
    first, second = (CpuProgram(attention(64, 64), source()).text for _ in range(2))
    assert first == second
    assert "where" not in first.split("def ")[1] and "arange" not in first
    assert "addmm_" in first


def test_inputs_that_require_grad_are_only_read() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    y = run(row_softmax(2, 4), {"x": x}, {"i": 4, "j": 8})
    assert not y.requires_grad


def test_tiles_and_outputs_are_all_that_is_allocated() -> None:
    x = torch.randn(2048, 512)
    tiles = CpuProgram(row_softmax(32, 512), source())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        tiles({"x": x}, {}, {"i": 2048, "j": 512}, {})
    allocated = [
        event.cpu_memory_usage for event in profile.events() if event.name in ("aten::sub", "aten::empty")
    ]
    assert max(allocated) == 2048 * 512 * 4
    assert all(size <= 32 * 512 * 4 for size in sorted(allocated)[:-1])


def test_batched_dot_with_two_batch_dims() -> None:
    b = Body()
    i, a, j, m, n = (b.positions(axis) for axis in "iajmn")
    n_i = b.extent("i")

    def mask(dims: str) -> Value:
        return b.align(b.bound("i", n_i), dims)

    left = b.load("x", [i, a, m, j], mask("i a m j"), "i a m j")
    right = b.load("w", [i, a, j, n], mask("i a j n"), "i a j n")
    start = b.let(Fill(1.0), "i a m n")
    total = b.let(Dot(left, right, "j", start), "i a m n")
    b.store("y", [i, a, m, n], total, mask("i a m n"))
    blocks = (Block("i", "grid", 4), *(Block(axis, "whole", None) for axis in "ajmn"))
    tiles = program([b.kernel("dot", ("i",), *blocks)], [Buffer("y", tuple("iamn"), "f32", True)])
    x, w = torch.randn(6, 3, 2, 5), torch.randn(6, 3, 5, 4)
    y = run(tiles, {"x": x, "w": w}, {"i": 6, "a": 3, "j": 5, "m": 2, "n": 4})
    torch.testing.assert_close(y, 1 + x @ w)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("ij", "ijn"),
        ("j", "jn"),
        ("iaj", "ijn"),
        ("amj", "jn"),
        ("j", "jan"),
        ("iamj", "ijn"),
        ("iaj", "ijmn"),
    ],
)
@pytest.mark.parametrize("start", [None, 0.0, 1.0])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("n", [6, FEW_COLUMNS + 1])
def test_vectors_and_several_rows_or_columns(
    left: str, right: str, start: float | None, fresh: bool, n: int
) -> None:
    sizes = {"i": 3, "a": 2, "m": 4, "j": 5, "n": n}
    dims = "".join(dict.fromkeys((left + right).replace("j", "")))
    b = Body()
    at = {axis: b.positions(axis) for axis in sizes}
    x, w = (
        b.load(name, [at[a] for a in axes], None, " ".join(axes))
        for name, axes in zip("xw", (left, right), strict=True)
    )
    before = None if start is None else b.let(Fill(start), " ".join(dims))
    if start and fresh:  # memory of its own, which the dot may overwrite
        before = b.load("z", [at[a] for a in dims], None, " ".join(dims))
        before = b.call("add", before, before)
    total = b.let(Dot(x, w, "j", before), " ".join(dims))
    b.store("y", [at[a] for a in dims], total, None)
    tiles = program(
        [b.kernel("dot", (), *(Block(axis, "whole", None) for axis in sizes))],
        [Buffer("y", tuple(dims), "f32", True)],
    )
    given = {"x": torch.randn([sizes[a] for a in left]), "w": torch.randn([sizes[a] for a in right])}
    if start and fresh:
        given["z"] = torch.full([sizes[a] for a in dims], start / 2)
    expected = torch.einsum(f"{left},{right}->{dims}", given["x"], given["w"]) + (start or 0.0)
    torch.testing.assert_close(run(tiles, given, sizes), expected)


def test_a_long_sum_of_a_few_columns_is_exact_to_rounding() -> None:
    """A sum of positive terms one after the other would be off by 1e-6 and more."""
    b = Body()
    i, j, n = (b.positions(axis) for axis in "ijn")
    total = b.let(
        Dot(b.load("x", [i, j], None, "i j"), b.load("w", [i, j, n], None, "i j n"), "j", None), "i n"
    )
    b.store("y", [i, n], total, None)
    blocks = [Block(axis, "whole", None) for axis in "ijn"]
    tiles = program([b.kernel("dot", (), *blocks)], [Buffer("y", ("i", "n"), "f32", True)])
    x, w = torch.rand(4, 50000), torch.rand(4, 50000, 3)
    y = run(tiles, {"x": x, "w": w}, {"i": 4, "j": 50000, "n": 3})
    exact = torch.einsum("ij,ijn->in", x.double(), w.double())
    torch.testing.assert_close(y.double(), exact, rtol=5e-7, atol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_blocks_run_on_several_threads_with_one_result(threads: int) -> None:
    x = torch.randn(300, 400)
    assert x.numel() > SMALL_ELEMENTS
    before = torch.get_num_threads()
    y = CpuProgram(row_softmax(16, 128), source(), threads)({"x": x}, {}, {"i": 300, "j": 400}, {})["y"]
    torch.testing.assert_close(y, torch.softmax(x, 1))
    assert torch.get_num_threads() == before


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    table = torch.zeros(64, 8, dtype=torch.int32)
    table[40, 3] = 5
    given = {"x": torch.randn(2, 4, 5).half(), "table": table, "length": torch.full((64,), 32)}
    given["unused"] = torch.empty(SMALL_ELEMENTS)
    with pytest.raises(BindError, match="position 5 is outside"):
        CpuProgram(paged_sum(1, 8, 4), source(), 2)(given, {}, {"i": 64, "j": 32, "d": 5}, {})


def test_a_load_under_a_scalar_condition_is_not_made_where_it_does_not_hold() -> None:
    """y[i] = sum over j of (x[j - 1, i] if j > 0 else 7), and the same through a choice of two tiles."""
    for chosen in (False, True):
        b = Body()
        i, n_i, zero, n_j = b.positions("i"), b.extent("i"), b.integer(0), b.extent("j")
        t0 = b.let(Fill(0.0), "i", name="t0")
        t = b.carried("t", t0)
        c = b.inner()
        j, i_in = c.start("j"), c.bound("i", n_i)
        inside = c.call("gt", j, zero)
        mask = c.call("and", c.align(inside, "i"), i_in) if chosen else inside
        x = c.load("x", [c.call("sub", j, c.integer(1)), i], mask, "i", other=0.0 if chosen else 7.0)
        x = c.call("where", inside, x, c.let(Constant(7.0)), dtype="f32") if chosen else x
        b.loop("j", zero, n_j, [(t, t0, c.call("add", t, x))], c)
        b.store("y", [i], t, b.bound("i", n_i))
        x = torch.randn(5, 9)
        y = run(one_kernel(b, j=Block("j", "unit", 1)), {"x": x}, {"i": 9, "j": 6})
        torch.testing.assert_close(y, x.sum(0) + 7)


def test_every_f8_has_its_value_in_f32() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16).t()
    torch.testing.assert_close(from_float8(every), every.float(), rtol=0, atol=0, equal_nan=True)
    assert from_float8(every[:0]).shape == (0, 16)


def test_f8_is_stored_rounded_and_multiplied_wide() -> None:
    b = Body()
    i, j, n_i, n_j = b.positions("i"), b.positions("j"), b.extent("i"), b.extent("j")
    n, n_n = b.positions("n"), b.extent("n")
    x = b.load("x", [i, j], b.masks("i j", b.bound("i", n_i), b.bound("j", n_j)), "i j")
    small = b.let(Cast(x), "i j", "f8e4m3", "small")
    w = b.load("w", [j, n], b.masks("j n", b.bound("j", n_j), b.bound("n", n_n)), "j n", "f8e4m3")
    product = b.let(Dot(small, w, "j", None), "i n", name="product")
    b.store("y", [i, n], product, b.masks("i n", b.bound("i", n_i), b.bound("n", n_n)))
    blocks = (Block("i", "grid", 4), Block("j", "whole", None), Block("n", "whole", None))
    tiles = program([b.kernel("dot", ("i",), *blocks)], [Buffer("y", ("i", "n"), "f32", True)])
    x, w = torch.randn(6, 8), torch.randn(8, 3).to(torch.float8_e4m3fn)
    y = run(tiles, {"x": x, "w": w}, {"i": 6, "j": 8, "n": 3})
    torch.testing.assert_close(y, x.to(torch.float8_e4m3fn).float() @ w.float())


def scaled_product(left: str, right: str, sizes: dict[str, int], fn: str = "mul") -> TileProgram:
    """``y = fn(sum over j of x * w, s)`` for a run-time scalar s."""
    dims = "".join(dict.fromkeys((left + right).replace("j", "")))
    b = Body()
    at = {axis: b.positions(axis) for axis in sizes}
    x, w = (
        b.load(name, [at[a] for a in axes], None, " ".join(axes))
        for name, axes in zip("xw", (left, right), strict=True)
    )
    product = b.let(Dot(x, w, "j", None), " ".join(dims))
    scaled = b.call(fn, product, b.let(Argument("s")), name="scaled", dtype="f32")
    b.store("y", [at[a] for a in dims], scaled, None)
    return program(
        [b.kernel("dot", (), *(Block(axis, "whole", None) for axis in sizes))],
        [Buffer("y", tuple(dims), "f32", True)],
    )


@pytest.mark.parametrize(
    ("left", "right", "calls"),
    [
        ("mj", "jn", "alpha="),
        ("imj", "ijn", "alpha="),
        ("amj", "jn", "alpha="),
        ("iamj", "iajn", ".mul_("),
        ("ij", "ijn", ".mul_("),
    ],
)
@pytest.mark.parametrize("j", [5, 0])
def test_a_matrix_product_takes_its_scalar_factor(left: str, right: str, calls: str, j: int) -> None:
    sizes = {"i": 3, "a": 2, "m": 4, "j": j, "n": 7}
    sizes = {axis: n for axis, n in sizes.items() if axis in left + right}
    tiles = scaled_product(left, right, sizes)
    assert calls in CpuProgram(tiles, source()).text
    x, w = (
        torch.randn([sizes[a] for a in reversed(axes)]).permute(*reversed(range(len(axes))))
        for axes in (left, right)
    )
    dims = "".join(dict.fromkeys((left + right).replace("j", "")))
    expected = 0.3 * torch.einsum(f"{left},{right}->{dims}", x, w)
    torch.testing.assert_close(run(tiles, {"x": x, "w": w}, sizes, s=0.3), expected)


def test_a_quotient_is_not_a_factor() -> None:
    sizes = {"m": 4, "j": 5, "n": 7}
    tiles = scaled_product("mj", "jn", sizes, "div")
    assert "alpha=" not in CpuProgram(tiles, source()).text
    x, w = torch.randn(4, 5), torch.randn(5, 7)
    torch.testing.assert_close(run(tiles, {"x": x, "w": w}, sizes, s=3.0), x @ w / 3)


def test_an_operation_writes_to_the_output_only_where_all_of_it_is_stored() -> None:
    b = Body()
    i, j = b.positions("i"), b.positions("j")
    x = b.load("x", [i, j], None, "i j")
    b.store("whole", [i, j], b.call("exp", x), None)
    b.store("turned", [j, i], b.call("exp", x), None)
    b.store("some", [i, j], b.call("abs", x), b.call("gt", x, b.let(Constant(0.0))))
    b.store("half", [i, j], b.let(Cast(b.call("exp", x)), "i j", "f16"), None)
    blocks = [Block(axis, "whole", None) for axis in "ij"]
    buffers = [
        Buffer(n, ("j", "i") if n == "turned" else ("i", "j"), None, True)
        for n in ("whole", "turned", "some", "half")
    ]
    tiles = program([b.kernel("k", (), *blocks)], buffers)
    compiled = CpuProgram(tiles, source())
    assert [line.split("out=")[1] for line in compiled.text.splitlines() if "out=whole" in line] == [
        "whole[:n_i, :n_j])"
    ]
    assert not any(f"out={name}" in compiled.text for name in ("turned", "some", "half"))
    given = torch.randn(5, 6).t()
    found = compiled({"x": given}, {}, {"i": 6, "j": 5}, {})
    torch.testing.assert_close(found["whole"], given.exp())
    torch.testing.assert_close(found["turned"], given.exp().t())
    torch.testing.assert_close(found["half"], given.exp().half())
    assert torch.equal(found["some"][given > 0], given[given > 0])


def test_invertible_reads_one_tensor_and_writes_another() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 2.0])
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan, 2.0])
    for out in (None, torch.zeros(6), x.clone()):
        given = out if out is not None and torch.equal(out.nan_to_num(), x.nan_to_num()) else x
        found = invertible(given, out=out)
        torch.testing.assert_close(found, expected, equal_nan=True)


SCORES = "S[i,j] = sum[d](q[i,d] * k[j,d])"
LOG_SUMS = {
    "a factor": (f"{SCORES} * s", "S[i,j]"),
    "a divisor": (f"{SCORES} / s", "S[i,j]"),
    "a difference with rows": (f"{SCORES} * s", "S[i,j] - r[i]"),
    "a sum of rows and columns": ("S[i,j] = r[i] * s + c[j]", "S[i,j]"),
    "a mask": (f"{SCORES} * s", "where(j <= i + 20, S[i,j], -inf)"),
    "a capped factor": (f"{SCORES} * s", "4 * tanh(S[i,j] / 4)"),
}
PLAIN = ("a difference with rows", "a sum of rows and columns")
"""Of which an input is a term: times log2 e it may overflow, so that it is kept to the base e."""


@pytest.mark.parametrize("name", LOG_SUMS)
@pytest.mark.parametrize("prefer", ["resident", "rolling", "split_k", "multi_pass"])
@pytest.mark.slow(but=["rolling-"])
def test_exponents_kept_as_powers_of_two_are_read_plain_elsewhere(name: str, prefer: str) -> None:
    line, body = LOG_SUMS[name]
    text = f"{line}\nT[i,j] = {body}\nm[i] = max[j](T[i,j])\nl[i] = log(sum[j](exp(T[i,j] - max[j](T[i,j]))))\nreturn m, l"
    given = {"q": torch.randn(37, 12), "k": torch.randn(41, 12), "r": torch.randn(37), "c": torch.randn(41)}
    kernel = eq.compile(text, prefer=prefer, verify=False)
    used = {n: t for n, t in given.items() if f"{n}[" in text}
    wide = {n: t.double().numpy() for n, t in used.items()}
    expected = eq.reference(text)(s=1.7, **wide)
    for found, exact in zip(kernel(s=1.7, **used), expected, strict=True):
        torch.testing.assert_close(found.double(), torch.as_tensor(exact), rtol=2e-6, atol=2e-6)
    assert ("exp2(" in CpuProgram(kernel.compiled.tile, kernel.derived.program).text) == (name not in PLAIN)


def test_a_scalar_that_several_loops_carry_on_is_kept_plain_and_multiplied() -> None:
    """Each body that reads the other form of a carried value makes it for itself."""
    text = "d = logsumexp[i](w[i] * sum[i](z[i]))"
    w, z = torch.randn(5), torch.randn(5)
    found = eq.compile(text, prefer="multi_pass", verify=False)(w=w, z=z)
    torch.testing.assert_close(found, torch.logsumexp(w * z.sum(), 0))


@pytest.mark.parametrize("length", [0, 2, 3])
def test_truths_are_loaded_under_a_mask(length: int) -> None:
    kernel = eq.compile("t: bool[j]\na = sum[j](where(j < L, where(t[j], x[j], 0), 0))", verify=False)
    t, x = torch.tensor([True, False, True]), torch.tensor([1.0, 2.0, 4.0])
    assert kernel(t=t, x=x, L=length) == (t * x)[:length].sum()


@pytest.mark.parametrize("native", ["off", "wait"])
def test_extremes_of_what_32_bits_do_not_hold_along_a_long_axis(native: str) -> None:
    count = 2**31 // 100 + 1000
    kernel = eq.compile("x: i8[j]\ny = argmax[j](where(x[j] > 0, 100 * j, 0))", target="cpu", native=native)
    x = torch.zeros(count, dtype=torch.int8)
    x[5] = x[count - 7] = 1
    assert kernel(x=x).item() == count - 7
