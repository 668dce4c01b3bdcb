"""Loops cut by values that are loaded or given at run time: every selected position is visited, none outside of what
the rows of a block select together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from eqfuse.compiler import derive, nominal_extents, pipeline
from eqfuse.extract.devices import DEVICES
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Buffer, Carried, Kernel, Let, Loop, Nest, Store
from eqfuse.loops.plan import KernelConfig
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Local, Program, Reduce, Size, call, walk
from eqfuse.terms.parser import parse
from eqfuse.terms.types import program_dtypes
from eqfuse.tile import nodes as tile
from eqfuse.tile.interpreter import run
from eqfuse.tile.lower.program import lower
from eqfuse.tile.lower.reads import Reads
from eqfuse.tile.walk import nested

Array = np.ndarray[Any, Any]
ROWS, COLUMNS, WIDTH = 6, 23, 4
x, z = Load("x", (Axis("i"), Axis("j"))), Load("z", (Axis("i"), Axis("j")))


def program_of(condition: str, dtypes: Mapping[str, str], rows: int) -> tuple[Program, tile.TileProgram]:
    """y = sum of x times z where the condition holds, with z read unguarded: what is visited of it shows."""
    source = parse(f"y[i] = sum[j](where({condition}, x[i,j], 0) * z[i,j])")
    found = (n for n in walk(source.outputs[0].expr) if isinstance(n, Call) and n.fn == "where")
    mask: Expr = next(found).args[0]
    product = Reduce("sum", "j", call("mul", call("where", mask, x, Const(0.0)), z))
    update = Let("s_new", (), call("add", Local("s", ()), product))
    loop = Loop("j", Const(0), Size("j"), False, (Carried("s", (), Const(0.0), "s_new"),), (update,))
    store = Store("y", (Axis("i"),), (), Local("s", ()))
    nest = Nest((Kernel("rows", ("i",), (loop, store)),), (Buffer("y", ("i",), None, True),))
    config = KernelConfig((Block("i", "grid", rows), Block("j", "loop", WIDTH)))
    return source, lower(nest, source, {"x": "f32", "z": "f32", **dtypes}, (config,))


Given = Mapping[str, Any]
LENGTHS = np.array([0, 1, COLUMNS, 9, 9, 40])
FIRST = np.array([0, 0, 5, 5, 16, 30])
OFFSETS = np.array([0, 0, 4, 9, 9, 20, 23])

CASES: Mapping[str, tuple[str, Given, Callable[[Any, Any], Any]]] = {
    "length": ("j < len[i]", {"len": LENGTHS}, lambda i, j: j < LENGTHS[i]),
    "at most": ("j <= last[i]", {"last": LENGTHS - 1}, lambda i, j: j < LENGTHS[i]),
    "negative": ("j < len[i]", {"len": LENGTHS - 9}, lambda i, j: j < LENGTHS[i] - 9),
    "first": ("first[i] <= j", {"first": FIRST}, lambda i, j: FIRST[i] <= j),
    "after": ("j > before[i]", {"before": FIRST - 1}, lambda i, j: FIRST[i] <= j),
    "packed": (
        "(j <= 4 * i) & (first[i] <= j)",
        {"first": np.minimum(FIRST, 20)},
        lambda i, j: (j <= 4 * i) & (np.minimum(FIRST, 20)[i] <= j),
    ),
    "segments": (
        "(off[i] <= j) & (j < off[i+1])",
        {"off": OFFSETS},
        lambda i, j: (OFFSETS[i] <= j) & (j < OFFSETS[i + 1]),
    ),
    "shifted": ("j <= i + shift[i]", {"shift": LENGTHS - 3}, lambda i, j: j <= i + LENGTHS[i] - 3),
    "added to the axis": (
        "j + shift[i] <= 2 * i",
        {"shift": 3 - FIRST},
        lambda i, j: j + 3 - FIRST[i] <= 2 * i,
    ),
    "difference": (
        "j < off[i+1] - off[i]",
        {"off": OFFSETS},
        lambda i, j: j < OFFSETS[i + 1] - OFFSETS[i],
    ),
    "sum of two": (
        "j < a[i] + b[i]",
        {"a": LENGTHS // 2, "b": FIRST // 3},
        lambda i, j: j < LENGTHS[i] // 2 + FIRST[i] // 3,
    ),
    "scaled": ("2 * j < len[i]", {"len": LENGTHS}, lambda i, j: 2 * j < LENGTHS[i]),
    "scaled from": ("3 * j >= first[i]", {"first": FIRST}, lambda i, j: 3 * j >= FIRST[i]),
    "scaled after": ("3 * j > first[i]", {"first": FIRST}, lambda i, j: 3 * j > FIRST[i]),
    "blocks": ("j // 4 < n[i]", {"n": LENGTHS // 4}, lambda i, j: j // 4 < LENGTHS[i] // 4),
    "blocks from": ("j // 3 >= n[i]", {"n": FIRST // 3}, lambda i, j: j // 3 >= FIRST[i] // 3),
    "blocks after": ("j // 3 > n[i]", {"n": FIRST // 3}, lambda i, j: j // 3 > FIRST[i] // 3),
    "blocks to": ("j // 3 <= n[i]", {"n": FIRST // 3}, lambda i, j: j // 3 <= FIRST[i] // 3),
    "one position": ("j == at[i]", {"at": FIRST % COLUMNS}, lambda i, j: j == FIRST[i] % COLUMNS),
    "minimum": ("j < min(len[i], 3 * i)", {"len": LENGTHS}, lambda i, j: j < np.minimum(LENGTHS[i], 3 * i)),
    "gathered": (
        "j < len[row[i]]",
        {"len": LENGTHS, "row": np.array([5, 4, 0, 1, 2, 3])},
        lambda i, j: j < LENGTHS[np.array([5, 4, 0, 1, 2, 3])[i]],
    ),
    "guarded": (
        "(i > 0) and (j < len[i-1])",
        {"len": LENGTHS},
        lambda i, j: (i > 0) & (j < LENGTHS[i - 1]),
    ),
    "either": (
        "(j < len[i]) | (j >= first[i])",
        {"len": LENGTHS // 4, "first": FIRST},
        lambda i, j: (j < LENGTHS[i] // 4) | (j >= FIRST[i]),
    ),
    "one position or a range": (
        "(j == at[i]) | (j < len[i])",
        {"at": FIRST % COLUMNS, "len": LENGTHS // 4},
        lambda i, j: (j == FIRST[i] % COLUMNS) | (j < LENGTHS[i] // 4),
    ),
    "either, one in part": (
        "((j < len[i]) & (j % 2 == 0)) | (j < first[i])",
        {"len": LENGTHS, "first": FIRST // 2},
        lambda i, j: ((j < LENGTHS[i]) & (j % 2 == 0)) | (j < FIRST[i] // 2),
    ),
    "either in part": (
        "((j < len[i]) & (j % 2 == 0)) | ((j >= first[i]) & (j % 3 == 0))",
        {"len": LENGTHS // 4, "first": FIRST},
        lambda i, j: ((j < LENGTHS[i] // 4) & (j % 2 == 0)) | ((j >= FIRST[i]) & (j % 3 == 0)),
    ),
    "neither": (
        "~((j >= len[i]) | (j < first[i]) | (j % 2 == 0))",
        {"len": LENGTHS, "first": FIRST // 4},
        lambda i, j: (j < LENGTHS[i]) & (j >= FIRST[i] // 4) & (j % 2 == 1),
    ),
    "not": ("~(j >= len[i])", {"len": LENGTHS}, lambda i, j: j < LENGTHS[i]),
    "scalar": ("j < L", {"L": 9}, lambda i, j: j < 9 + 0 * i),
    "no position": ("j < L", {"L": 0}, lambda i, j: (j < 0) & (i < 0)),
    "all positions": ("j < L", {"L": 2**40}, lambda i, j: (j >= 0) & (i >= 0)),
    "window": (
        "(j <= i + L) & (j > i - W)",
        {"L": 2, "W": 3},
        lambda i, j: (j <= i + 2) & (j > i - 3),
    ),
}
LOOSE = (
    "all positions",
    "either",
    "one position or a range",
    "either, one in part",
    "either in part",
    "neither",
)
"""What a part that is no range leaves, or lies between two that are joined by `or`, is visited."""
POSITIONS = ("packed", "window")
"""Ends that are made of positions are those of the whole block, rows past the last one included."""


def inputs(given: Given) -> tuple[dict[str, Any], dict[str, int]]:
    tensors = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    return tensors, {name: value for name, value in given.items() if isinstance(value, int)}


def hull(selected: Array, rows: int) -> Array:
    """The positions from the first to the last that rows of one block select."""
    found = np.zeros_like(selected)
    for start in range(0, len(selected), rows):
        places = np.flatnonzero(selected[start : start + rows].any(0))
        if len(places):
            found[start : start + rows, places[0] : places[-1] + 1] = True
    return found


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_selected_is_visited_and_nothing_outside(name: str, dtype: str, rows: int) -> None:
    condition, given, truth = CASES[name]
    tensors, scalars = inputs(given)
    if dtype == "i32" and any(abs(value) >= 2**31 for value in scalars.values()):
        pytest.skip("a number that i32 does not hold")
    source, program = program_of(condition, dict.fromkeys(given, dtype), rows)
    selected = truth(*np.indices((ROWS, COLUMNS)))
    rng = np.random.default_rng(3)
    value, weight = rng.normal(size=(ROWS, COLUMNS)), rng.normal(size=(ROWS, COLUMNS))
    want = np.where(selected, value * weight, 0).sum(1)
    loose = name in LOOSE or (name in POSITIONS and ROWS % rows > 0)
    outside = ~hull(selected, rows) & (not loose)
    assert outside.any() or rows > 1 or loose
    value[outside] = weight[outside] = np.nan
    got = run(
        program,
        source,
        {"x": value, "z": weight, **tensors},
        scalars,
        {"i": ROWS, "j": COLUMNS},
        FloatDomain("float64"),
        shards={},
    )["y"]
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize("rows", [1, 2])
def test_shards_divide_what_is_selected(rows: int, dtype: str) -> None:
    """Of a row of 9 positions, 3 shards take 4, 4 and 1 in blocks of 2, wherever they are."""
    width, count = 2, 3
    condition = "(first[i] <= j) & (j < last[i])"
    source = parse(f"part[c,i] = sum[j](where({condition}, x[i,j], 0)) * (c < 9)")
    found = (n for n in walk(source.outputs[0].expr) if isinstance(n, Call) and n.fn == "where")
    value = call("where", next(found).args[0], x, Const(0.0))
    update = Let("s_new", (), call("add", Local("s", ()), Reduce("sum", "j", value)))
    length = call("floordiv", call("add", Size("j"), call("sub", Size("c"), Const(1))), Size("c"))
    start = call("mul", Axis("c"), length)
    stop = call("minimum", call("add", start, length), Size("j"))
    loop = Loop("j", start, stop, False, (Carried("s", (), Const(0.0), "s_new"),), (update,), "c")
    store = Store("part", (Axis("c"), Axis("i")), (), Local("s", ()))
    buffer = Buffer("part", ("c", "i"), None, True)
    nest = Nest((Kernel("shards", ("c", "i"), (loop, store)),), (buffer,), (), (("c", "j"),))
    blocks = Block("c", "grid", 1), Block("i", "grid", rows), Block("j", "loop", width)
    dtypes = {"x": "f32", "first": dtype, "last": dtype}
    program = lower(nest, source, dtypes, (KernelConfig(blocks),))
    first, last = np.array([3, 0, 14, 0]), np.array([12, 0, 23, 1])
    tensors = {"x": np.ones((4, COLUMNS)), "first": first, "last": last}
    extents = {"i": 4, "j": COLUMNS}
    got = run(program, source, tensors, {}, extents, FloatDomain("float64"), shards={"c": count})["part"]
    assert got.sum(0).tolist() == [9, 0, 9, 1]
    assert rows > 1 or got.T.tolist() == [[4, 4, 1], [0, 0, 0], [4, 4, 1], [1, 0, 0]]


def parts(program: tile.TileProgram) -> list[tile.For]:
    return [stmt for stmt in nested(program.kernels[0].body) if isinstance(stmt, tile.For)]


def conditions(body: Sequence[tile.Stmt]) -> set[str]:
    lets = (stmt.op for stmt in body if isinstance(stmt, tile.Let))
    return {op.fn for op in lets if isinstance(op, tile.Elementwise)} & {"le", "lt", "gt", "ge", "eq"}


def test_the_interior_has_no_predicate() -> None:
    for name in ("length", "first", "packed", "segments", "shifted", "blocks", "guarded", "scalar"):
        condition, given, _ = CASES[name]
        interior = parts(program_of(condition, dict.fromkeys(given, "i32"), 2)[1])[-2]
        assert not interior.masked and not conditions(interior.body), name


@pytest.mark.parametrize("name", ["length", "segments", "first", "scalar"])
def test_a_single_row_needs_the_end_of_its_range_alone(name: str) -> None:
    condition, given, _ = CASES[name]
    found = parts(program_of(condition, dict.fromkeys(given, "i32"), 1)[1])
    assert [part.masked for part in found] == [False, True]
    assert not any(conditions(part.body) for part in found)


def test_a_guard_that_tells_nothing_of_the_positions_does_not_mask_a_load() -> None:
    """off[i+1] is read once, before the loop: that off[i] <= j says nothing of i."""
    _, program = program_of("(off[i] <= j) & (j < off[i+1])", {"off": "i32"}, 2)
    inside = [s for part in parts(program) for s in part.body if isinstance(s, tile.Let)]
    assert not any(isinstance(s.op, tile.LoadTile) and s.op.tensor == "off" for s in inside)


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
def test_a_page_is_one_number_for_a_tile(prefer: str) -> None:
    """A tile starts at a multiple of its size in shards too, where the positions left to visit start at 0."""
    source = (
        "page: i32[b,n]\nlen: i32[b]\ns[b,h,j] = where(j < len[b], sum[d](q[b,h,d] * k[page[b,j//64],j%64,d]), -inf)\n"
        "p[b,h,j] = exp(s[b,h,j] - max[j](s[b,h,j]))\n"
        "o[b,h,e] = sum[j](p[b,h,j] * v[page[b,j//64],j%64,e]) / sum[j](p[b,h,j])"
    )
    derived = derive(source, None, False)
    dtypes = {name: dtype or "f16" for name, dtype in program_dtypes(derived.program).items()}
    sizes = nominal_extents(derived.program) | {"b": 4, "h": 16, "d": 64, "e": 64, "j": 4096}
    made = pipeline(derived, sizes, dtypes, DEVICES["sm_90"], prefer)
    pages = [
        stmt.value.dims
        for stmt in nested(made.tile.kernels[0].body)
        if isinstance(stmt, tile.Let) and isinstance(stmt.op, tile.LoadTile) and stmt.op.tensor == "page"
    ]
    assert pages and all(dims == () for dims in pages)


def test_an_element_is_read_where_a_place_along_any_axis_of_an_extent_reads_it() -> None:
    """A nest may read what `s` reads along the axis of `d`: there its first position alone would not do."""
    program = parse("""
        k: axis[t]
        d[i] = sum[k](where((k == 0) & (k + 1 < N(t)), x[k + 1,i], 0))
        s[t,i] = where(t + 1 < N(t), x[t + 1,i], 0)
        return d, s
    """)
    kept = Reads.of(program, program.domains).kept
    assert {str(load): list(map(str, guards)) for load, guards in kept.items()} == {
        f"x[{axis} + 1, i]": [f"{axis} + 1 < N(t)"] for axis in ("k", "t")
    }
