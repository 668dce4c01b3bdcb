"""Packed rows, merges at once, the order of blocks, arithmetic by numbers, and launches that are remembered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_nests import loop, row_sum

from bench.ahead import Ahead, compile_ahead
from bench.workloads import WORKLOADS
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.loops.blocks import Block
from eqfuse.loops.nodes import Loop
from eqfuse.loops.walk import statements
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.check import TileError, check
from eqfuse.tile.cpu.run import CpuProgram
from eqfuse.tile.triton.aot import compile_for
from eqfuse.tile.triton.launch import interpret, load
from eqfuse.verify.check import check_stages
from eqfuse.verify.stages import tile_stages


def ahead(name: str, prefer: str | None = None, **sizes: int) -> Ahead:
    """A workload of the papers for Hopper; `sizes` replace those of its longest case."""
    workload = WORKLOADS[name]
    case = workload.paper_cases[-1]
    sizes = {**case.sizes, **sizes}
    constants = {**case.constants, **({"g": sizes["h"] // sizes["k"]} if "g" in case.constants else {})}
    return compile_ahead(workload, replace(case, sizes=sizes, constants=constants), "h200", prefer)


def program(text: str, prefer: str | None = None, **given: tuple[int, ...] | float) -> Ahead:
    """A program for Hopper at the shapes of its tensors; floats are its scalars."""
    derived = compiler.derive(text, None, strict_casts=False)
    shapes = {name: shape for name, shape in given.items() if isinstance(shape, tuple)}
    scalars = {name: number for name, number in given.items() if isinstance(number, float)}
    extents = bind(derived.program, shapes, scalars=scalars)
    dtypes, device = program_dtypes(derived.program), device_named("h200")
    compiled = compiler.pipeline(derived, extents, dtypes, device, prefer)
    return Ahead(derived, compiled, "made", compiler.emit_triton(derived, compiled, "made"))


def blocks(made: Ahead) -> dict[str, int | None]:
    return {b.axis: b.size for b in made.compiled.chosen.plan.configs[0].blocks}


@pytest.mark.parametrize(("group", "rows"), [(8, 8), (16, 16), (6, 8), (7, 8), (3, 4), (1, 1)])
@pytest.mark.slow(but=["8-8", "7-8", "1-1"])
def test_heads_that_read_the_same_keys_are_rows_of_one_product(group: int, rows: int) -> None:
    made = ahead("gqa_decode", "split_k", h=8 * group, k=8)
    assert blocks(made)["h"] == rows
    assert ("tl.dot(q, k)" in made.source) == (rows > 1)
    valid = {b.axis: b.valid for b in made.compiled.chosen.plan.configs[0].blocks}["h"]
    assert valid == (group if group < rows else None)


def _grouped(
    group: int, heads: int, keys: int, prefer: str, queries: int | None
) -> tuple[Ahead, torch.Tensor]:
    """Attention of several heads to the same keys, in the interpreter, and what it is in float64."""
    i = ", i" if queries else ""
    score = f"exp(s[h{i}, j] - max[j](s[h{i}, j]))"
    text = (
        f"q: f16[h{i}, d]\nk: f16[n, j, d]\nv: f16[n, j, e]\n"
        f"s[h{i}, j] = 0.2 * sum[d](q[h{i}, d] * k[h // {group}, j, d])\n"
        f"o[h{i}, e] = sum[j]({score} * v[h // {group}, j, e]) / sum[j]({score})"
    )
    rows = (heads, queries, 32) if queries else (heads, 32)
    count = -(-heads // group)
    made = program(text, prefer, q=rows, k=(count, keys, 32), v=(count, keys, 32))
    generator = torch.Generator().manual_seed(0)
    q_, k_, v_ = (
        torch.randn(shape, generator=generator).half() for shape in (rows, *[(count, keys, 32)] * 2)
    )
    found = interpret(made.source, "made", q_, k_, v_, sizes=made.sizes)
    wide = [t.double().repeat_interleave(group, 0)[:heads] for t in (k_, v_)]
    q_ = q_.double() if queries else q_.double()[:, None]
    exact = torch.softmax(0.2 * q_ @ wide[0].mT, -1) @ wide[1]
    return made, (found.double() - exact.reshape(found.shape)).norm() / exact.norm()


@pytest.mark.parametrize("prefer", ["rolling", "split_k"])
@pytest.mark.parametrize(("group", "heads"), [(5, 20), (7, 9), (12, 24)])
@pytest.mark.slow(but=["5-20", "7-9-split_k"])
def test_blocks_of_a_group_that_is_no_power_of_two(group: int, heads: int, prefer: str) -> None:
    made, error = _grouped(group, heads, 90, prefer, None)
    assert made.source.count("tl.dot(") >= 2 and f"h_start + {group}, N_h" in made.source
    assert error < 2e-3


@pytest.mark.slow
def test_a_single_query_leaves_the_rows_to_heads() -> None:
    for queries, rows in ((1, 8), (2, 1)):
        made, error = _grouped(8, 16, 70, "rolling", queries)
        assert blocks(made)["h"] == rows
        assert error < 2e-3


def test_the_valid_positions_of_a_block_are_walked_once_by_every_runner() -> None:
    made, _ = _grouped(5, 20, 40, "rolling", None)
    derived, compiled = made.derived, made.compiled
    shapes = {"q": (20, 32), "k": (4, 40, 32), "v": (4, 40, 32)}
    tensors = {name: torch.randn(shape).half() for name, shape in shapes.items()}
    on_cpu = CpuProgram(compiled.tile, derived.program)(tensors, {}, compiled.extents, {})["o"]
    found = interpret(made.source, "made", **tensors)
    assert torch.allclose(on_cpu.float(), found.float(), atol=2e-3)
    small = {"h": 7, "j": 3, "d": 2, "e": 2, "n": 2}
    stages = tile_stages(derived.program, [compiled.tile] * 2, small)
    assert check_stages(derived.program, stages, trials=8, dtypes=compiled.dtypes).ok
    wrong = replace(
        compiled.tile.kernels[0], blocks=(Block("h", "grid", 4, 5), *compiled.tile.kernels[0].blocks[1:])
    )
    with pytest.raises(TileError, match="5 of them valid"):
        check(replace(compiled.tile, kernels=(wrong,)))


@pytest.mark.slow
def test_heads_are_not_packed_where_queries_are_rows() -> None:
    made = ahead("gqa_prefill", i=512, j=512)
    assert blocks(made)["h"] == 1
    assert (blocks(made)["i"] or 0) >= 64


@pytest.mark.parametrize("length", [8192, 32768])
@pytest.mark.parametrize("name", ["causal_decode", "gqa_decode"])
def test_shards_fill_the_device_once(name: str, length: int) -> None:
    made = ahead(name, j=length)
    plan, units = made.compiled.chosen.plan, made.compiled.device.sms
    instances = plan.shards * made.sizes["h"] // (blocks(made)["h"] or 1)
    assert plan.schedule == "split_k"
    assert units <= instances <= 2 * units


def test_shards_are_merged_at_once_where_each_adds_its_own_share() -> None:
    kernel = ahead("causal_decode", "split_k").compiled.chosen.nest.kernels[-1]
    assert not any(isinstance(stmt, Loop) for stmt in statements(kernel.body))
    assert kernel.parallel == ("b", "h", "e")  # the states' feature axis is shared out too


def test_merging_at_once_repairs_every_share() -> None:
    made = program("x: f32[i, j]\ny[i] = var[j](x[i, j])", "split_k", x=(4, 4096))
    kernel = made.compiled.chosen.nest.kernels[-1]
    assert not any(isinstance(stmt, Loop) for stmt in statements(kernel.body))
    x = torch.randn(4, 1001, generator=torch.Generator().manual_seed(0)) + 300
    found = interpret(made.source, "made", x).double()
    exact = x.double().var(-1, unbiased=False)
    assert torch.allclose(found, exact, rtol=1e-4)


@pytest.mark.parametrize(
    ("condition", "backwards"),
    [("j <= i", True), ("j < i + 5", True), ("j >= i", False), ("j >= 3", False), ("j + i < 40", False)],
)
def test_blocks_with_longer_loops_go_first(condition: str, backwards: bool) -> None:
    text = f"q: f16[i, d]\nk: f16[j, d]\no[i] = logsumexp[j](where({condition}, sum[d](q[i, d] * k[j, d]), -inf))"
    made = program(text, "rolling", q=(1024, 64), k=(1024, 64))
    assert any("i" in kernel.backwards for kernel in made.compiled.tile.kernels) == backwards
    assert ("- 1 - " in made.source.partition("def settings")[0]) == backwards


def test_blocks_that_go_backwards_still_cover_the_axis() -> None:
    text = "x: f32[j, e]\nz: f32[i]\ny[i, e] = z[i] * sum[j](where(j <= i, x[j, e], 0))"
    made = program(text, "rolling", x=(37, 16), z=(41,))
    assert "- 1 - " in made.source
    x = torch.randn(37, 16, generator=torch.Generator().manual_seed(0))
    found = interpret(made.source, "made", x, torch.ones(41))
    rows = torch.arange(41)[:, None] >= torch.arange(37)
    assert torch.allclose(found, rows.float() @ x, atol=1e-5)


def test_tiles_are_divided_by_numbers_through_their_reciprocal() -> None:
    text = "x: f32[i, j]\ny[i, j] = tanh(x[i, j] * s / c)\nz[i, j] = x[i, j] / x[i, 0]"
    source = program(text, x=(64, 64), s=2.0, c=3.0).source
    assert "* (s / c)" in source
    assert source.count(" / ") > source.count("(s / c)")  # by a tensor's element there is a division


def test_tanh_is_exact_to_a_few_roundings() -> None:
    source = program("x: f32[i]\ny[i] = tanh(x[i])", x=(4096,)).source
    magnitudes = torch.logspace(-8, 2, 2048)
    x = torch.cat([magnitudes, -magnitudes])
    found = interpret(source, "made", x).double()
    exact = torch.tanh(x.double())
    assert ((found - exact).abs() <= 6e-7 * exact.abs()).all()
    special = interpret(source, "made", torch.tensor([math.inf, -math.inf, math.nan, 0.0]))
    assert special[:2].tolist() == [1.0, -1.0]
    assert special[2].isnan() and special[3] == 0


def test_differences_of_positions_are_not_converted_as_a_tile() -> None:
    text = (
        "q: f16[i, d]\nk: f16[j, d]\ns: f32[h]\no[h, i] = max[j](sum[d](q[i, d] * k[j, d]) + s[h] * (j - i))"
    )
    made = program(text, "rolling", q=(70, 16), k=(90, 16), s=(2,))
    assert "tl.cast(j_start - i_start, tl.float32)" in made.source
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, 16, generator=generator).half() for n in (70, 90))
    s = torch.tensor([0.25, -0.5])
    found = interpret(made.source, "made", q, k, s)
    distance = torch.arange(90) - torch.arange(70)[:, None]
    exact = (q.float() @ k.float().T + s[:, None, None] * distance).amax(-1)
    assert torch.allclose(found, exact, atol=1e-3)


@pytest.mark.parametrize("dim", [72, 192])
@pytest.mark.slow(but=["72"])
def test_head_dims_that_are_no_powers_of_two_fit_hopper(dim: int) -> None:
    made = ahead("causal_prefill", d=dim, e=dim)
    (report,) = compile_for(made.source, "sm_90", sizes=made.sizes)
    assert report.spilled_bytes == 0
    assert "wgmma" in report.instructions


class Compiled:
    """What Triton gives back for a kernel that it compiled; notes what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append((grid, *arguments))


class Jit:
    """Stands for a kernel: counts how often Triton is asked to compile and launch."""

    def __init__(self) -> None:
        self.calls = 0
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Compiled:
            self.calls += 1
            return self.compiled

        return run


def test_a_second_call_goes_straight_to_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(row_sum(loop("j", 8)).text({"x": "f32"}))
    (name,) = module.CONFIGS
    kernel = Jit()
    monkeypatch.setattr(module, name, kernel)
    function = module.compute
    x = torch.randn(4, 16)
    function(x)
    out = function(x)
    assert kernel.calls == 1
    ((grid, *arguments),) = kernel.compiled.launches
    assert arguments[0] is x and arguments[1] is out and len(grid) == 3
    function(x.T.contiguous().T)  # other strides
    function(torch.randn(4, 24))  # another shape
    assert kernel.calls == 3
    with pytest.raises(ValueError, match="dims"):
        function(torch.randn(4))
