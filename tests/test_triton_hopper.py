"""What the default configurations compile to for Hopper, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from bench.ahead import compile_ahead
from bench.attention_cells import OPERATORS, Cell, grid
from bench.bundling import Emitted, Emitter, same_kernels
from bench.workloads import WORKLOADS
from eqfuse.devices import device_named
from eqfuse.extract.candidates import shape_of
from eqfuse.extract.devices import DEVICES
from eqfuse.extract.residuals import H200
from eqfuse.extract.resources import registers, shared_bytes
from eqfuse.tile.triton.aot import KernelReport, compile_for

WGMMA = ("mla", "mha_speculative", "quant_gemm")
TWO_REGISTERS = 8
OUTSIDE_LOOPS = {"mla": 184}
"""Bytes that ptxas keeps in memory outside the loops over complete tiles: two registers, so that more instances
fit; of mla, whose accumulators take half of a thread's registers, what the loop over a last short tile needs."""

NARROW = ("gated_mlp",)  # 16 rows: no wgmma


@pytest.mark.parametrize("name", (*WGMMA, *NARROW, "performer"))
@pytest.mark.slow(but=["mla", "gated_mlp"])
def test_largest_cases_do_not_spill(name: str) -> None:
    workload = WORKLOADS[name]
    ahead = compile_ahead(workload, workload.paper_cases[-1], "sm_90")
    reports = compile_for(ahead.source, "sm_90", sizes=ahead.sizes)
    assert {
        r.name: r.spilled_bytes for r in reports if r.spilled_bytes > OUTSIDE_LOOPS.get(name, TWO_REGISTERS)
    } == {}
    used = frozenset[str]().union(*(report.instructions for report in reports))
    assert ("wgmma" in used) == (name in (*WGMMA, "performer"))


@pytest.fixture(scope="module")
def emitter() -> Emitter:
    """Derives every operator once. Kernels have no roles: `test_roles.py` compiles those."""
    return Emitter(device_named("h200").without_roles)


def _compiled(emitter: Emitter, cells: Sequence[Cell]) -> dict[str, tuple[Emitted, list[KernelReport]]]:
    """What is chosen for each cell and what it compiles to; the same kernels with the same settings once."""
    known: dict[str, list[KernelReport]] = {}
    found = {}
    for cell in cells:
        (chosen,) = emitter.variants(cell, 1)
        text = same_kernels(cell, chosen)
        if text not in known:
            known[text] = compile_for(chosen.source, "sm_90", sizes=chosen.entry["sizes"])
        found[cell.name] = chosen, known[text]
    return found


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.slow(but=["causal_decode"])
def test_what_the_benchmark_of_attention_runs_does_not_spill(operator: str, emitter: Emitter) -> None:
    cells = [cell for cell in grid() if cell.operator == operator]
    for cell, (chosen, reports) in zip(cells, _compiled(emitter, cells).values(), strict=True):
        allowed = TWO_REGISTERS if cell.name == "gqa_decode_n8192_b32" else 0
        spilled = {report.name: report.spilled_bytes for report in reports if report.spilled_bytes > allowed}
        assert not spilled, cell.name
        used = frozenset[str]().union(*(report.instructions for report in reports))
        rows = max(config.get("i", 1) for config in chosen.entry["configs"])
        assert ("wgmma" in used) == (rows >= 64) == (not cell.is_decode), cell.name
        assert ("mma" in used) == (operator in ("gqa_decode", "softcap_decode")), cell.name  # heads as rows


def test_every_cell_of_the_benchmark_is_compiled_here() -> None:
    assert {cell.operator for cell in grid()} == set(OPERATORS) and len(grid()) == 45


def test_a_merge_is_launched_early_and_waits_before_it_reads(emitter: Emitter) -> None:
    (chosen,) = emitter.variants(Cell("gqa_decode", 8192), 1)
    partial, merge = (r.assembly for r in compile_for(chosen.source, "sm_90", sizes=chosen.entry["sizes"]))
    waits, reads = merge.index("griddepcontrol.wait"), merge.index("ld.global")
    assert waits < reads and "griddepcontrol.wait" not in partial
    leads, reads = partial.index("griddepcontrol.launch_dependents"), partial.index("cp.async")
    assert leads < reads and "griddepcontrol.launch_dependents" not in merge
    for target in ("sm_80", "gfx942"):
        reports = compile_for(chosen.source, target, sizes=chosen.entry["sizes"])
        assert not any("griddepcontrol" in report.assembly for report in reports)


@pytest.mark.slow
def test_a_kernel_that_lasts_shares_operands_between_more_rows(emitter: Emitter) -> None:
    def rows(length: int) -> tuple[int, int]:
        (chosen,) = emitter.variants(Cell("global_prefill", length), 1)
        (config,) = chosen.entry["configs"]
        return config["i"], config["warps"]

    assert (rows(8192), rows(32768)) == ((64, 4), (128, 8))


def test_shards_start_at_positions_that_the_launcher_computes() -> None:
    workload = WORKLOADS["causal_decode"]
    source = compile_ahead(workload, workload.paper_cases[-1], "sm_90", "split_k").source
    assert re.search(r"j_by_j_shard", source)
    assert '(size["j"] + ' in source and '// size["j_shard"])' in source
    assert "floordiv_int" not in source


def test_the_estimate_of_registers_tells_what_spills() -> None:
    workload = WORKLOADS["global_prefill"]
    ahead = compile_ahead(workload, workload.paper_cases[0], "sm_90", "rolling")
    compiled = ahead.compiled
    nest = compiled.chosen.nest
    shape = shape_of(nest, compiled.extents, compiled.dtypes, 1)
    (kernel,) = nest.kernels

    def blocks(i: int, j: int) -> dict[str, int]:
        return {"b": 1, "h": 1, "i": i, "j": j, "e": 128, "d": 128}

    # Compiled with these blocks, the first two spill nothing, the last two 200 and 1448 bytes.
    assert registers(kernel, blocks(64, 64), 4, DEVICES["sm_90"], shape) <= H200.registers
    assert registers(kernel, blocks(128, 64), 8, DEVICES["sm_90"], shape) <= H200.registers
    assert registers(kernel, blocks(128, 64), 4, DEVICES["sm_90"], shape) > H200.registers
    assert registers(kernel, blocks(256, 64), 4, DEVICES["sm_90"], shape) > H200.registers
    # Q once, K and V three times.
    assert shared_bytes(kernel, blocks(128, 64), 3, shape) == 128 << 10
