"""The benchmark of programs as operators: a sample in full, and what it calls wrong."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor

import eqfuse as eq
from bench.operator_report import COLUMNS, Call, checked, lengths, replace_call, run
from bench.report import Options, Report
from bench.workloads import WORKLOADS


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "rmsnorm_quant",
        *(pytest.param(n, marks=pytest.mark.sweep) for n in ("gqa_decode", "layernorm", "moe_routing")),
    ],
)
def test_programs_pass_every_check(name: str) -> None:
    row = checked(WORKLOADS[name])
    assert row["problems"] == [] and row["graphs"] == 1
    assert row["forward"] == row["forward_checks"] >= 3 and row["backward"] == row["backward_checks"] >= 3


def test_a_problem_is_a_failure_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "program": "softmax",
        "forward_checks": 4,
        "backward_checks": 4,
        "forward": 4,
        "backward": 3,
        "graphs": 2,
    }
    monkeypatch.setattr("bench.operator_report.checked", lambda _: {**found, "problems": ["x"]})
    report = Report("", COLUMNS)
    run(Options(only="softmax"), report)
    assert "softmax: x" in report.failures and "opcheck backward: 0" in report.summary[1]


def test_lengths_are_those_of_the_longest_axis() -> None:
    case = WORKLOADS["varlen_prefill"].cases["small"]
    assert lengths(case, 31).sizes == {**case.sizes, "i": 31, "j": 31}


def test_a_call_goes_through_another_function() -> None:
    workload = WORKLOADS["softmax"]
    inputs = workload.inputs(workload.cases["small"])
    call = Call(eq.compile(workload.source, native="off"), {}, ("x",))
    seen: list[Mapping[str, Tensor]] = []

    def through(tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        seen.append(tensors)
        return call(tensors)

    (found,) = replace_call(call, through).gradients(inputs)
    assert len(seen) == 1 and found.shape == inputs["x"].shape
