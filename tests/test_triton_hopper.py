"""What the default configurations compile to for Hopper, without a GPU."""

from __future__ import annotations

import re

import pytest

from bench.ahead import compile_ahead
from bench.attention_cells import OPERATORS, Cell
from bench.workloads import WORKLOADS
from eqfuse.extract.choose import shape_of
from eqfuse.extract.footprint import REGISTERS, registers, shared_bytes
from eqfuse.tile.aot import compile_for

WGMMA = ("mla", "mha_speculative", "quant_gemm")
NARROW = ("gated_mlp",)  # 16 rows: no wgmma


@pytest.mark.parametrize("name", (*WGMMA, *NARROW, "performer"))
def test_largest_cases_do_not_spill(name: str) -> None:
    workload = WORKLOADS[name]
    ahead = compile_ahead(workload, workload.paper_cases[-1], "sm_90")
    reports = compile_for(ahead.source, "sm_90", sizes=ahead.sizes)
    # Two registers that ptxas keeps in memory once, outside all loops, so that more instances fit.
    assert {report.name: report.spilled_bytes for report in reports if report.spilled_bytes > 8} == {}
    used = frozenset[str]().union(*(report.instructions for report in reports))
    assert ("wgmma" in used) == (name in (*WGMMA, "performer"))


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_the_benchmark_of_attention_runs_does_not_spill(operator: str) -> None:
    cell = Cell(operator, 8192)
    ahead = compile_ahead(cell.workload, cell.case, "h200")
    reports = compile_for(ahead.source, "sm_90", sizes=ahead.sizes)
    assert {report.name: report.spilled_bytes for report in reports if report.spilled_bytes} == {}
    used = frozenset[str]().union(*(report.instructions for report in reports))
    assert ("wgmma" in used) == (not cell.is_decode)
    assert ("mma" in used) == (operator in ("gqa_decode", "softcap_decode"))  # query heads as rows


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
    assert registers(kernel, blocks(64, 64), 4, 32, shape) <= REGISTERS
    assert registers(kernel, blocks(128, 64), 8, 32, shape) <= REGISTERS
    assert registers(kernel, blocks(128, 64), 4, 32, shape) > REGISTERS
    assert registers(kernel, blocks(256, 64), 4, 32, shape) > REGISTERS
    # Q once, K and V three times.
    assert shared_bytes(kernel, blocks(128, 64), 3, shape) == 128 << 10
