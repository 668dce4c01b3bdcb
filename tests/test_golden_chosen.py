"""Kernels that the compiler chose, as text: what a change of rules, costs, lowering, passes or printers makes of them.

Three programs at the sizes of the papers, for an H200, an MI300 and a CPU: the plan, and the Triton source or, on a CPU, the
tile program that runs.
"""

from __future__ import annotations

import pytest
from conftest import Golden

from bench.ahead import compile_ahead
from bench.workloads import WORKLOADS

CHOSEN = {"softmax": "16384x4096", "gqa_decode": "n8192", "rmsnorm_quant": "256x4096"}


@pytest.mark.parametrize("target", ["h200", "gfx942", "cpu"])
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen(name: str, target: str, golden: Golden) -> None:
    workload = WORKLOADS[name]
    ahead = compile_ahead(workload, workload.cases[CHOSEN[name]], target)
    text = str(ahead.compiled.tile) if target == "cpu" else ahead.source
    golden(f"chosen_{name}_{target}", f"{ahead.compiled.chosen.plan}\n\n{text}")
