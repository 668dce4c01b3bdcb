"""How the CPU's blocks are shared out among threads, and what a cut loop is taken to visit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from eqfuse.compiled import Compiled
from eqfuse.compiler import derive, pipeline
from eqfuse.extract.devices import DEVICES
from eqfuse.extract.mask_coverage import Coverage, covering
from eqfuse.extract.residuals import CPU as MEASURED
from eqfuse.extract.shape import Shape
from eqfuse.extract.tile_sizes_cpu import share_out
from eqfuse.loops.nodes import Kernel
from eqfuse.terms.nodes import Axis, Const, Load, call
from eqfuse.terms.types import program_dtypes

CPU = DEVICES["cpu"]
SIZES = {"h": 8, "i": 1024, "j": 1024, "d": 64, "e": 64}


def attention(condition: str) -> str:
    return f"""
    S[h,i,j] = sum[d](Q[h,i,d] * K[h,j,d]) * scale
    T[h,i,j] = where({condition}, S[h,i,j], -inf)
    P[h,i,j] = exp(T[h,i,j] - max[j](T[h,i,j]))
    O[h,i,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * V[h,j,e])
    """


def compiled(source: str, sizes: Mapping[str, int], prefer: str | None = None) -> Compiled:
    derived = derive(source, None, False)
    dtypes = {name: dtype or "f32" for name, dtype in program_dtypes(derived.program).items()}
    return pipeline(derived, sizes, dtypes, CPU, prefer)


def only_kernel(found: Compiled) -> tuple[Kernel, dict[str, int]]:
    """The one kernel of the plan, and its blocks."""
    (kernel,), (config,) = found.chosen.nest.kernels, found.chosen.plan.configs
    return kernel, {b.axis: b.size or found.extents[b.axis] for b in config.blocks}


@pytest.mark.parametrize(
    ("condition", "share"),
    [
        ("j <= i", 10 / 16),
        ("(j <= i) & (i - j < 256)", 7 / 16),
        ("j < 256", 4 / 16),
        ("not (j > i)", 10 / 16),
        ("j <= i + N(j)", 1.0),
        ("j + i < 0", 1 / 1024),
    ],
)
def test_tiles_that_a_predicate_empties_are_not_counted(condition: str, share: float) -> None:
    kernel, blocks = only_kernel(compiled(attention(condition), SIZES, "rolling"))
    shape = Shape(SIZES, {})
    found = Coverage(kernel, shape).visited({**blocks, "i": 256, "j": 256})
    assert found == {"j": round(share * 1024)}


@pytest.mark.parametrize(
    ("condition", "share"),
    [
        ("j <= n[h]", 4 / 5),
        ("n[h,i] > j", 1024 / 1025),
        ("w > j", 1 / 2),
        ("(j <= n[h]) & (j < 512)", 4 / 5 * 1 / 2),
        ("(j <= n[h]) & (Q[h,i,0] > 0)", 4 / 5),
    ],
)
def test_of_rows_with_lengths_of_their_own_the_longest_counts(condition: str, share: float) -> None:
    """Uniform lengths: the longest of n has n / (n + 1) of the axis on average."""
    kernel, blocks = only_kernel(compiled(attention(condition), SIZES, "rolling"))
    found = Coverage(kernel, Shape(SIZES, {})).visited({**blocks, "h": 4, "i": 256, "j": 256})
    assert found == {"j": round(share * 1024)}


@pytest.mark.parametrize("condition", ["Q[h,i,0] > 0", "Q[h,i,0] > K[h,j,0]"])
def test_predicates_of_reals_count_as_true(condition: str) -> None:
    kernel, blocks = only_kernel(compiled(attention(condition), SIZES, "rolling"))
    assert not covering(kernel)
    assert Coverage(kernel, Shape(SIZES, {})).visited(blocks) == {}


def test_segments_share_an_axis_out() -> None:
    source = "y[s,d] = sum[j](where((off[s] <= j) & (j < off[s+1]), x[j,d], 0))"
    sizes = {"s": 512, "j": 32768, "d": 16}
    kernel, blocks = only_kernel(compiled(source, sizes, "rolling"))
    assert blocks["s"] <= 16
    assert Coverage(kernel, Shape(sizes, {})).visited({**blocks, "s": 8}) == {"j": 512}


@pytest.mark.parametrize(("rows", "most"), [(64, 1), (1 << 15, 1), (1 << 18, 1)])
def test_rows_with_ranges_of_their_own_are_blocks_of_their_own_on_a_gpu(rows: int, most: int) -> None:
    """As many in a block as have a segment of memory together."""
    derived = derive("y[s,d] = sum[j](where((off[s] <= j) & (j < off[s+1]), x[j,d], 0))", None, False)
    dtypes = {name: dtype or "f32" for name, dtype in program_dtypes(derived.program).items()}
    made = pipeline(derived, {"s": rows, "j": 1 << 20, "d": 64}, dtypes, DEVICES["h200"], "rolling")
    assert {b.axis: b.size for b in made.chosen.plan.configs[0].blocks}["s"] == most


def test_few_blocks_of_different_lengths_leave_sms_idle() -> None:
    kernel, blocks = only_kernel(compiled(attention("j <= n[h]"), SIZES, "rolling"))
    coverage = Coverage(kernel, Shape(SIZES, {}))
    one, many = (coverage.evenness({**blocks, "h": 1}, per_sm) for per_sm in (1.0, 50.0))
    assert one == 1 / 2 and 0.95 < many < 1
    alike, _ = only_kernel(compiled(attention("j <= w"), SIZES, "rolling"))
    assert Coverage(alike, Shape(SIZES, {})).evenness(blocks, 1.0) == 1


def test_rows_with_lengths_of_their_own_are_divided_into_more_shards() -> None:
    """Those of a long row run while others take turns; one length for all leaves nothing to even out."""
    source = """
    S[b,h,j] = where(j < {}, sum[d](Q[b,h,d] * K[b,h,j,d]), -inf)
    P[b,h,j] = exp(S[b,h,j] - max[j](S[b,h,j]))
    O[b,h,e] = sum[j](P[b,h,j] / sum[j](P[b,h,j]) * V[b,h,j,e])
    """
    sizes = {"b": 64, "h": 8, "j": 16384, "d": 64, "e": 64}
    found = {}
    for length in ("n[b]", "w", "N(j)"):
        derived = derive(source.format(length), None, False)
        dtypes = {name: dtype or "f16" for name, dtype in program_dtypes(derived.program).items()}
        found[length] = pipeline(derived, sizes, dtypes, DEVICES["h200"], "split_k").chosen.plan.shards
    assert found["n[b]"] >= 4 * found["w"] and found["w"] == found["N(j)"]


def test_a_sum_that_a_false_predicate_does_not_empty_is_not_cut() -> None:
    found = compiled("y[i] = sum[j](where(j <= i, x[i,j], 1) * z[i,j])", {"i": 64, "j": 64}, "rolling")
    assert not covering(only_kernel(found)[0])


def test_the_cost_model_prefers_loops_that_are_cut() -> None:
    found = compiled(attention("j <= i"), SIZES)
    assert found.chosen.plan.schedule == "rolling"
    kernel, blocks = only_kernel(found)
    assert blocks["i"] <= 256 and blocks["j"] <= 256
    assert math.prod(math.ceil(SIZES[a] / blocks[a]) for a in kernel.parallel) >= 2 * CPU.sms


def test_heads_of_a_single_query_are_shared_out() -> None:
    source = """
    S[h,j] = sum[d](Q[h,d] * K[h,j,d])
    P[h,j] = exp(S[h,j] - max[j](S[h,j]))
    O[h,e] = sum[j](P[h,j] / sum[j](P[h,j]) * V[h,j,e])
    """
    sizes = {"h": 8, "j": 8192, "d": 64, "e": 64}
    _, blocks = only_kernel(compiled(source, sizes, "resident"))
    assert math.ceil(sizes["h"] / blocks["h"]) >= CPU.sms
    _, small = only_kernel(compiled(source, {**sizes, "j": 16}, "resident"))
    assert small["h"] == 8  # too little for a thread


def test_rows_that_share_a_matrix_stay_together() -> None:
    """Blocks of fewer rows would read all of the matrix again."""
    sizes = {"i": 16, "n": 2048, "k": 2048}
    _, blocks = only_kernel(compiled("C[i,n] = sum[k](A[i,k] * B[n,k])", sizes))
    assert blocks["i"] == 16 and blocks["n"] < 2048


def test_packed_heads_stay_together() -> None:
    source = attention("j >= 0").replace("K[h,", "K[h//4,").replace("V[h,", "V[h//4,")
    sizes = {**SIZES, "i": 8, "j": 8192}
    _, blocks = only_kernel(compiled(source, sizes, "resident"))
    assert blocks["h"] == 4


def test_sharing_out_stops_where_blocks_are_too_small_or_fixed() -> None:
    kernel, blocks = only_kernel(compiled("y[i] = sum[j](exp(x[i,j]))", {"i": 4096, "j": 1024}, "resident"))
    shape = Shape({"i": 4096, "j": 1024}, {})
    whole = {**blocks, "i": 4096}
    assert share_out(kernel, whole, (), shape, 4)["i"] == 1024
    assert share_out(kernel, whole, ("i",), shape, 4) == whole
    few = share_out(kernel, whole, (), shape, 1 << 20)["i"]
    assert 1 < few < 1024 and few * 1024 * 3 >= MEASURED.least_work


def test_integers_in_masks_and_indices_do_not_make_a_product_one_of_floats() -> None:
    shape = Shape({}, {"P": "f16", "V": "f16", "page": "i32", "keep": "bool", "W": "f32", "F": "f8e4m3"})
    i, j = Axis("i"), Axis("j")
    paged = Load("V", (Load("page", (j,)), i))
    masked = call("where", Load("keep", (j,)), Load("V", (j, i)), Const(0.0))
    assert shape.is_half(call("mul", Load("P", (j,)), paged)) and shape.is_half(masked)
    assert not shape.is_half(call("mul", Load("W", (j,)), paged)) and not shape.is_half(Load("page", (j,)))
    assert shape.is_narrow(call("where", Load("keep", (j,)), Load("F", (j,)), Const(0.0)))
    assert not shape.is_narrow(Load("keep", (j,))) and not shape.is_narrow(masked)
