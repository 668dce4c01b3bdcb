"""How row kernels and products of quantised operands are planned for a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

import eqfuse as eq
from bench.ahead import compile_ahead
from bench.reductions_cells import Cell
from bench.workloads import WORKLOADS
from eqfuse import compiler
from eqfuse.compiled import Compiled
from eqfuse.devices import device_named
from eqfuse.errors import ScheduleError
from eqfuse.extract.candidates import Candidate, shape_of, with_outputs
from eqfuse.extract.cost import KernelCost
from eqfuse.extract.resources import bytes_read_again, shared_bytes, two_per_sm
from eqfuse.loops.plan import Block, KernelConfig
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes

H200 = device_named("h200")


@cache
def _compiled(program: str, label: str) -> tuple[Compiled, dict[str, str]]:
    cell = Cell(program, label)
    derived = compiler.derive(cell.workload.text(cell.case), cell.case.constants, strict_casts=False)
    shapes = {name: cell.workload.shape(name, cell.case) for name in cell.workload.tensors}
    extents = bind(derived.program, shapes, scalars=cell.case.scalars)
    dtypes = program_dtypes(derived.program)
    return compiler.pipeline(derived, extents, dtypes, H200, None), with_outputs(derived.program, dtypes)


def _candidate(program: str, label: str, schedule: str) -> Candidate:
    compiled, _ = _compiled(program, label)
    return next(c for c in compiled.candidates if c.plan.schedule == schedule)


def _config(program: str, label: str, schedule: str) -> KernelConfig:
    return _candidate(program, label, schedule).plan.configs[0]


def test_a_cast_operand_is_stored_in_its_dtype_where_blocks_would_make_it_again() -> None:
    compiled, _ = _compiled("quant_gemm", "Q6")
    nest = compiled.chosen.nest
    assert len(nest.kernels) == 2
    assert {buffer.dtype for buffer in nest.buffers if not buffer.is_output} == {"f8e4m3", "acc"}
    assert any(len(c.nest.kernels) == 1 for c in compiled.candidates)


def test_rows_of_bytes_are_walked_twice_as_far_at_a_time() -> None:
    compiled, _ = _compiled("quant_gemm", "Q6")
    (depth,) = (b.size for b in compiled.chosen.plan.configs[1].blocks if b.axis == "k")
    assert depth == 128


def test_outputs_count_in_their_own_dtype() -> None:
    _, dtypes = _compiled("rmsnorm_quant", "8192x8192")
    assert (dtypes["x"], dtypes["q"], dtypes["m"]) == ("f16", "f8e4m3", "f16")


@pytest.mark.parametrize("schedule, again", [("resident", 0), ("rolling", 2 * 128256)])
def test_rows_that_are_not_kept_are_read_again(schedule: str, again: int) -> None:
    compiled, dtypes = _compiled("softmax", "2048x128256")
    nest = _candidate("softmax", "2048x128256", schedule).nest
    shape = shape_of(nest, compiled.extents, dtypes, 1)
    assert bytes_read_again(nest.kernels[0], shape) == again


def test_what_a_unit_reads_again_has_the_cache_for_itself() -> None:
    config = _config("softmax", "2048x128256", "rolling")
    assert [b.size for b in config.blocks if b.axis == "c"] == [16384]


def test_a_row_that_fills_a_unit_is_walked_where_its_second_read_is_cached() -> None:
    compiled, _ = _compiled("softmax", "4096x32768")
    assert compiled.chosen.plan.schedule == "rolling"
    compiled, _ = _compiled("softmax", "8192x8192")
    assert compiled.chosen.plan.schedule == "resident"


def test_loads_that_are_no_vectors_are_not_staged() -> None:
    assert _config("inertia", "I4", "rolling").stages == 1  # three floats a particle
    assert _config("l2norm", "256x131072", "rolling").stages == 3


def test_few_rows_are_not_split_into_more_shards_than_run_at_once() -> None:
    compiled, _ = _compiled("l2norm", "32x131072")
    assert (compiled.chosen.plan.schedule, compiled.chosen.plan.shards) == ("split_k", 8)


def test_what_a_loop_loads_to_make_an_operand_takes_shared_memory() -> None:
    compiled, dtypes = _compiled("mla", "L6")
    candidate = next(c for c in compiled.candidates if len(c.nest.kernels) == 4)  # scores stored, then split
    shape = shape_of(candidate.nest, compiled.extents, dtypes, candidate.plan.shards)
    blocks = {"b": 1, "h": 64, "j": 64, "e": 512}
    # The latent tile and two tiles of float32 scores; compiled, three stages needed 270592 bytes.
    needed = [shared_bytes(candidate.nest.kernels[2], blocks, stages, shape) for stages in (2, 3)]
    assert needed == [stages * (64 * 512 * 2 + 2 * 64 * 64 * 4) for stages in (2, 3)]
    assert needed[0] <= H200.shared < needed[1]


def test_a_tile_that_two_products_read_takes_shared_memory_once() -> None:
    compiled, dtypes = _compiled("mla", "L2")
    candidate = compiled.chosen
    assert (candidate.plan.schedule, candidate.plan.shards, len(candidate.nest.kernels)) == ("split_k", 2, 2)
    shape = shape_of(candidate.nest, compiled.extents, dtypes, 2)
    blocks = {"b": 1, "h": 64, "j_shard": 1, "j": 64, "e": 512, "r": 64}
    # Queries once and latent rows twice, both with the rotated part; compiled, 216 KB.
    needed = shared_bytes(candidate.nest.kernels[0], blocks, 2, shape)
    assert needed == 3 * 64 * (512 + 64) * 2 <= H200.shared


@pytest.mark.slow
def test_no_more_shards_than_units_where_a_unit_has_room_for_one() -> None:
    compiled, dtypes = _compiled("performer", "n4096")
    partial = next(
        (kernel, config)
        for kernel, config in zip(compiled.chosen.nest.kernels, compiled.chosen.plan.configs, strict=True)
        if kernel.name.endswith("_partial")
    )
    shape = shape_of(compiled.chosen.nest, compiled.extents, dtypes, compiled.chosen.plan.shards)
    blocks = {b.axis: b.size or shape.extents[b.axis] for b in partial[1].blocks}
    assert not two_per_sm(partial[0], blocks, partial[1], shape, H200)
    assert compiled.chosen.plan.shards == 16  # and 8 heads: 128 instances, 132 units


def test_bytes_are_under_way_in_all_of_the_shared_memory_that_no_second_instance_can_use() -> None:
    compiled, _ = _compiled("quant_gemm", "Q6")
    assert compiled.chosen.plan.configs[1].stages == 4


def test_what_is_summed_over_a_short_axis_afterwards_needs_no_kernel_of_its_own() -> None:
    for label in ("I1", "I6", "I8"):
        compiled, _ = _compiled("inertia", label)
        assert len(compiled.chosen.nest.kernels) == 1
    (config,) = _compiled("inertia", "I8")[0].chosen.plan.configs
    assert config.warps == 2  # 64 numbers a thread: loaded one by one, all of them under way


def test_a_unit_gets_as_many_small_instances_as_keep_it_loading() -> None:
    plan = _compiled("inertia", "I4")[0].chosen.plan
    assert (plan.schedule, plan.shards, plan.configs[0].warps) == (
        "split_k",
        4,
        2,
    )  # 512 instances, 132 units


def test_tiles_of_few_long_rows_are_long() -> None:
    plan = _compiled("l2norm", "128x131072")[0].chosen.plan
    assert [b.size for b in plan.configs[0].blocks if b.axis == "c"] == [16384]
    assert plan.configs[0].warps == 8


def test_a_tile_is_no_longer_than_a_shard() -> None:
    plan = _compiled("l2norm", "32x65536")[0].chosen.plan
    assert plan.shards * next(b.size or 0 for b in plan.configs[0].blocks if b.axis == "c") == 65536


def test_shards_of_rows_are_merged_where_the_rows_are_written() -> None:
    compiled, _ = _compiled("softmax", "32x131072")
    assert [kernel.name for kernel in compiled.chosen.nest.kernels] == ["kernel1_partial", "kernel1_map"]


def _planned(source: str, dtype: str = "f32", **extents: int) -> Compiled:
    derived = compiler.derive(source, None, strict_casts=False)
    return compiler.pipeline(derived, extents, {t.name: dtype for t in derived.program.tensors}, H200, None)


def _blocks(compiled: Compiled) -> dict[str, int | None]:
    return {block.axis: block.size for block in compiled.chosen.plan.configs[0].blocks}


@pytest.mark.parametrize("columns", [4095, 4096])
@pytest.mark.parametrize("fold", ["sum", "max", "var", "argmax"])
def test_columns_are_read_in_segments_of_memory(fold: str, columns: int) -> None:
    blocks = _blocks(_planned(f"y[a,c] = {fold}[b](x[a,b,c])", a=128, b=4096, c=columns))
    assert (blocks["c"] or 0) >= 32 and blocks["b"] is not None


@pytest.mark.parametrize("dtype, sides", [("bf16", (64, 64)), ("f32", (128, 32))])
def test_what_is_written_turned_has_tiles_of_segments_along_both_axes(
    dtype: str, sides: tuple[int, int]
) -> None:
    kernel = eq.compile(f"x: {dtype}[j,i]\ny[i,j] = exp(x[j,i])", target="h200", sizes={"i": 3000, "j": 9000})
    (config,) = kernel.plan.configs
    assert tuple(b.size for axis in ("i", "j") for b in config.blocks if b.axis == axis) == sides


def test_elements_that_are_written_apart_take_a_sector_each() -> None:
    row, column = (
        KernelConfig((Block("i", "grid", rows), Block("j", "grid", columns)))
        for rows, columns in ((1, 1024), (1024, 1))
    )
    sizes = {"i": 4096, "j": 4096}
    kernel = eq.compile("x: f16[i]\ny[i,j] = x[i] * 2", target="h200", sizes=sizes)
    compiled = kernel.compiled
    nest, dtypes = compiled.chosen.nest, with_outputs(kernel.program, compiled.dtypes)
    cost = KernelCost(nest.kernels[0], shape_of(nest, sizes, dtypes, 1), H200)
    assert cost.alone(column)["memory"] > 12 * cost.alone(row)["memory"]


def test_columns_of_few_positions_are_folded_by_a_warp_each() -> None:
    compiled = _planned("y[b] = sum[a](x[a,b])", "bf16", a=13, b=3875152)
    assert _blocks(compiled) == {"b": 256, "a": None} and compiled.chosen.plan.configs[0].warps == 1


def test_one_row_is_shared_out_over_all_units() -> None:
    plan = _planned("y = sum[a](x[a])", a=100_000_000).chosen.plan
    assert plan.schedule == "split_k" and plan.shards >= H200.sms


def test_shards_are_as_many_as_are_worth_merging() -> None:
    plan = _planned("y[b] = var[a](x[a,b])", "bf16", a=1156, b=7970).chosen.plan
    assert plan.shards <= 8  # each stores four numbers of every column


def test_little_of_a_shard_is_cut_off() -> None:
    compiled = _planned("y = max[a](x[a])", a=4_234_512)
    shard, tile = 4_234_512 // compiled.chosen.plan.shards, _blocks(compiled)["a"]
    assert tile is not None and -(-shard // tile) * tile <= 1.25 * shard


def test_states_of_registered_reductions_are_merged_at_once() -> None:
    nest = _planned("y = argmax[a](x[a])", a=100_000_000).chosen.nest
    assert "argmax.k[a_shard](" in str(nest) and "for a_shard in" not in str(nest)


def test_shards_of_columns_are_merged_before_columns_are_written() -> None:
    source = "y[a,c] = exp(x[a,c] - max[a](x[a,c])) / sum[a](exp(x[a,c] - max[a](x[a,c])))"
    nest = _planned(source, a=500_000, c=127).chosen.nest
    assert [kernel.name for kernel in nest.kernels] == ["kernel1_partial", "kernel1_merge", "kernel1_map"]


def test_products_of_bytes_are_added_outside_of_the_matrix_unit() -> None:
    cell = Cell("quant_gemm", "Q6")
    source = compile_ahead(cell.workload, cell.case, "h200").source
    # With the sum as the accumulator, and added to after so few products, every instruction waits for the last.
    assert "tl.dot(stored2_tile, w, max_num_imprecise_acc=None if BLOCK_K <= 128 else 128)" in source


@pytest.mark.parametrize("extents", [{"i": 1050, "j": 19}, {"i": 2100, "j": 8}])
def test_a_tile_has_the_positions_that_a_fold_repeats_it_along(extents: dict[str, int]) -> None:
    """What a reduction folds does not vary along its axis here, but is a tile along it."""
    derived = compiler.derive("x: f32[i]\na = max[i,j](x[i])", {}, strict_casts=False)
    compiled = compiler.pipeline(derived, extents, program_dtypes(derived.program), H200, "multi_pass")
    (config,) = compiled.chosen.plan.configs
    sizes = config.sizes(compiled.extents)
    assert sizes["i"] * sizes["j"] <= 4096 * config.warps


def test_rows_that_each_block_has_whole_are_no_rows_of_roles() -> None:
    workload = WORKLOADS["qknorm_attention"]
    ahead = compile_ahead(workload, workload.cases["small"], "h200", "multi_pass")
    assert ahead.schedule == "multi_pass" and ahead.compiled.roles is None


def test_a_scan_passes_the_states_of_its_whole_tile_through_shared_memory(ordered: None) -> None:
    """Two values for each of 512 x 64 positions are more than an SM has: blocks store what the sum reads."""
    derived = compiler.derive("b[i] = latest[j](z[j,i])\nf = sum[i](exp(b[i]))", {}, strict_casts=False)
    dtypes = program_dtypes(derived.program)
    found = compiler.pipeline(derived, {"i": 43, "j": 262}, dtypes, H200, "resident").candidates
    divided, whole = (c.plan for c in found if c.plan.schedule == "resident")
    assert (len(divided.kernels), divided.reason) == (2, "")
    assert len(whole.kernels) == 1
    assert whole.reason == "kernel1 needs 256 KB of shared memory, h200 has 227 KB"


def test_a_scan_that_stores_nearly_what_it_reads_is_not_divided(ordered: None) -> None:
    """States of 4096 x 4 positions fit, and those of 4096 x 8 are refused: no statistic of the rows is small."""
    derived = compiler.derive("b[i] = latest[j](z[j,i])\nf = sum[i](exp(b[i]))", {}, strict_casts=False)
    dtypes = program_dtypes(derived.program)
    fits = compiler.pipeline(derived, {"i": 4090, "j": 3}, dtypes, H200, "resident").chosen.plan
    assert len(fits.kernels) == 1
    with pytest.raises(ScheduleError, match=r"kernel1 needs 256 KB of shared memory"):
        compiler.pipeline(derived, {"i": 4090, "j": 7}, dtypes, H200, "resident")


@pytest.fixture
def ordered() -> Iterator[None]:
    combine = "where(n2 > 0, v2, v1), max(n1, n2)"
    eq.reduction("latest", state="v, n", lift="x, 1", identity="0, 0", combine=combine, result="v")
    yield
