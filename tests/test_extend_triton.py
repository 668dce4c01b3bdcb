"""Registered reductions as emitted Triton: in Triton's interpreter against torch, and compiled for a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from extend_kernels import SCHEDULES, registered

import eqfuse as eq
from bench.workloads import WORKLOADS
from eqfuse.tile.triton.aot import compile_for
from eqfuse.tile.triton.launch import interpret

MATRIX = {
    "args": "a, b, c, d",
    "state": "p, q, r, s",
    "lift": "a, b, c, d",
    "identity": "1, 0, 0, 1",
    "combine": "p1*p2 + q1*r2, p1*q2 + q1*s2, r1*p2 + s1*r2, r1*q2 + s1*s2",
    "result": "p, q, r, s",
}


def emitted(source: str, prefer: str | None = None, **scalars: int) -> tuple[str, str]:
    """The module for a GPU, and the name of its launcher."""
    kernel = eq.compile(source, target="sm_90", prefer=prefer, verify=False, scalars=scalars)
    return kernel.triton, kernel.name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow(but=["rolling", "resident"])
def test_argmax_in_every_schedule(schedule: str) -> None:
    x = torch.randn(3, 45, generator=torch.Generator().manual_seed(1))
    x[0, [7, 30]] = 9.0
    x[1, 12] = torch.nan
    text, name = emitted("k[i] = argmax[j](x[i, j])\nv[i] = max[j](x[i, j])", schedule)
    assert "tl.reduce(" in text and "combine_argmax_f32_i32" in text
    place, value = interpret(text, name, x=x)
    assert torch.equal(place.long(), x.argmax(1))
    assert torch.equal(value.isnan(), x.amax(1).isnan())


def test_both_state_variables_come_from_one_reduction() -> None:
    text, _ = emitted("v[i] = argmax.v[j](x[i, j], j)\nk[i] = argmax.k[j](x[i, j], j)", "resident")
    assert text.count("tl.reduce(") == 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["rolling", "resident"])
def test_parts_keep_their_order_where_it_matters(schedule: str) -> None:
    parts = torch.randn(4, 2, 19, generator=torch.Generator().manual_seed(2)) * 0.8
    with registered("matrices", **MATRIX):
        source = "p[i], q[i], r[i], s[i] = matrices[j](a[i, j], b[i, j], c[i, j], d[i, j])"
        text, name = emitted(source, schedule)
    assert "tl.associative_scan(" in text and "tl.reduce(" not in text
    found = torch.stack(interpret(text, name, **dict(zip("abcd", parts, strict=True))))
    for row in range(2):
        total = torch.eye(2, dtype=torch.float64)
        for at in range(parts.shape[2]):
            total = total @ parts[:, row, at].double().view(2, 2)
        torch.testing.assert_close(found[:, row].double(), total.view(-1), rtol=1e-4, atol=1e-6)


def test_welford_and_a_stream_of_it() -> None:
    x = torch.randn(3, 37, generator=torch.Generator().manual_seed(3)) + 4
    text, name = emitted("m[i], v[i] = mean_var[j](x[i, j])", "rolling")
    mean, variance = interpret(text, name, x=x)
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(variance, x.var(1, unbiased=False), rtol=1e-4, atol=1e-6)
    stream = eq.compile("m[i], v[i] = mean_var[j](x[i, j])", verify=False).stream.stream
    update, launcher = emitted(stream.update)
    names = [state.name for state in stream.states]
    state = {n: torch.zeros(3, dtype=torch.int64 if "_n_" in n else torch.float32) for n in names}
    for page in x.split([20, 17], 1):
        made = interpret(update, launcher, x=page, **state)
        state = {n: v.to(state[n].dtype) for n, v in zip(names, made, strict=True)}
    torch.testing.assert_close(state["mean_var_m_j"], mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state["mean_var_s_j"] / state["mean_var_n_j"], variance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.slow(but=["sm_90"])
def test_folds_compile_for_gpus(target: str) -> None:
    text, _ = emitted("k[i] = argmax[j](x[i, j])", "rolling")
    (report,) = compile_for(text, target)
    assert report.spilled_bytes == 0
    with registered("matrices", **MATRIX):
        source = "p[i], q[i], r[i], s[i] = matrices[j](a[i, j], b[i, j], c[i, j], d[i, j])"
        text, _ = emitted(source, "rolling")
    (report,) = compile_for(text, target)
    assert report.registers > 0


@pytest.mark.parametrize(
    ("program", "schedule"),
    [("moe_routing", None), ("moe_routing_logits", "rolling"), ("moe_routing_logits", "split_k")],
)
@pytest.mark.slow(but=["moe_routing-None"])
def test_routing_to_experts(program: str, schedule: str | None) -> None:
    workload = WORKLOADS[program]
    case = workload.cases["small"]
    inputs = workload.inputs(case)
    weights, experts = workload.run_eager(case, inputs)
    text, name = emitted(workload.source, schedule, **case.constants)  # type: ignore[arg-type]
    found = interpret(text, name, **inputs)
    torch.testing.assert_close(found[0], weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found[1].numpy(), experts.numpy())


@pytest.mark.parametrize("schedule", ["rolling", "split_k"])
@pytest.mark.slow
def test_ranks_are_merged(schedule: str) -> None:
    x = torch.randint(0, 9, (4, 75), generator=torch.Generator().manual_seed(6)).float()
    x[0, 3], x[1], x[2, 5:] = torch.nan, -torch.inf, torch.inf
    values, places = torch.sort(x, dim=1, descending=True, stable=True)
    text, name = emitted("k: axis[2]\nv[i, k], p[i, k] = topk[j, k](x[i, j])", schedule)
    found = interpret(text, name, x=x)
    torch.testing.assert_close(found[0], values[:, :2], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[1].long(), places[:, :2])
    for report in compile_for(text, "sm_90"):
        assert report.spilled_bytes == 0


@pytest.mark.parametrize(("count", "schedule"), [(1, "split_k"), (24, "rolling"), (40, "split_k")])
@pytest.mark.slow
def test_many_ranks(count: int, schedule: str) -> None:
    x = torch.randint(0, 99, (3, 150), generator=torch.Generator().manual_seed(7)).float()
    x[0, 3], x[1] = torch.nan, -torch.inf
    values, places = torch.sort(x, dim=1, descending=True, stable=True)
    text, name = emitted(f"k: axis[{count}]\nv[i, k], p[i, k] = topk[j, k](x[i, j])", schedule)
    found = interpret(text, name, x=x)
    torch.testing.assert_close(found[0], values[:, :count], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[1].long(), places[:, :count])
    for report in compile_for(text, "sm_90"):
        assert report.spilled_bytes == 0


@pytest.mark.parametrize(("count", "schedule"), [(64, "split_k"), (256, "rolling")])
@pytest.mark.slow
def test_the_longest_lists_compile_without_spills(count: int, schedule: str) -> None:
    text, _ = emitted(f"k: axis[{count}]\nv[i, k], p[i, k] = topk[j, k](x[i, j])", schedule)
    assert not any(report.spilled_bytes for report in compile_for(text, "sm_90"))


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.slow
def test_lists_compile_for_other_gpus(target: str) -> None:
    text, _ = emitted("k: axis[24]\nv[i, k], p[i, k] = topk[j, k](x[i, j])", "split_k")
    assert len(compile_for(text, target)) == 2
