"""Which plans there are, what they cost relative to each other, and how their kernels are configured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from rules_programs import UNFUSED

import eqfuse as eq
from eqfuse.compiled import Compiled
from eqfuse.compiler import derive, emit_triton, nominal_extents, pipeline
from eqfuse.derived import Derived
from eqfuse.errors import ScheduleError
from eqfuse.extract.devices import DEVICES
from eqfuse.loops.nodes import Kernel, Loop
from eqfuse.loops.plan import SCHEDULES, KernelConfig
from eqfuse.loops.walk import statements
from eqfuse.terms.integers import power_of_two
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.nodes import Let, Store
from eqfuse.tile.triton.launch import load
from eqfuse.tile.walk import nested

SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
ROWS = {"i": 1024, "j": 1024}
LOGSUMEXP = "y[i] = max[j](x[i,j]) + log(sum[j](exp(x[i,j] - max[j](x[i,j]))))"
ATTENTION = """
S[h,i,j] = sum[d](Q[h,i,d] * K[h,j,d]) * scale
P[h,i,j] = exp(S[h,i,j] - max[j](S[h,i,j]))
O[h,i,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * V[h,j,e])
"""
PREFILL = {"h": 16, "i": 2048, "j": 2048, "d": 64, "e": 64}
DECODE = {"h": 8, "i": 1, "j": 65536, "d": 64, "e": 64}
VARIANCE = "v[i] = mean[j](sq(x[i,j] - mean[j](x[i,j])))"
GEMM = "C[i,n] = sum[k](A[i,k] * B[k,n])"

PROGRAMS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "softmax": (SOFTMAX, ROWS),
    "logsumexp": (LOGSUMEXP, ROWS),
    "attention": (ATTENTION, PREFILL),
    "decode": (ATTENTION, DECODE),
    "variance": (VARIANCE, ROWS),
    "gemm": (GEMM, {"i": 1000, "n": 500, "k": 3000}),
    "ragged": (SOFTMAX, {"i": 7, "j": 1013}),
    "one position": (SOFTMAX, {"i": 1, "j": 1}),
}
TARGETS = ("cpu", "sm_80", "sm_90", "gfx942")


@cache
def derived(source: str) -> Derived:
    return derive(source, None, False)


def compiled(
    source: str, extents: Mapping[str, int], target: str, prefer: str | None = None, dtype: str = "f32"
) -> Compiled:
    return _compiled(source, tuple(extents.items()), target, prefer, dtype)


@cache
def _compiled(
    source: str, extents: tuple[tuple[str, int], ...], target: str, prefer: str | None, dtype: str
) -> Compiled:
    found = derived(source)
    undeclared = (tensor.name for tensor in found.program.tensors if tensor.dtype is None)
    dtypes = {**program_dtypes(found.program), **dict.fromkeys(undeclared, dtype)}
    return pipeline(found, dict(extents), dtypes, DEVICES[target], prefer)


def cheapest(source: str, extents: Mapping[str, int], target: str, schedule: str | None = None) -> float:
    """Predicted seconds of the best plan, or of the best of one schedule."""
    plans = [c.plan for c in compiled(source, extents, target, dtype="bf16").candidates]
    costs = [p.cost.seconds for p in plans if p.cost and schedule in (None, p.schedule)]
    return min(costs)


# -- candidates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fused_program_has_every_schedule(name: str) -> None:
    source, extents = PROGRAMS[name]
    found = compiled(source, extents, "sm_90", dtype="bf16").candidates
    assert {c.plan.schedule for c in found} == set(SCHEDULES)
    wide = compiled(source, extents, "sm_90").candidates
    assert {c.plan.schedule for c in wide} - set(SCHEDULES) <= {"library"}


@pytest.mark.parametrize("name", UNFUSED)
def test_a_program_with_an_obstacle_has_no_single_pass(name: str) -> None:
    source, _ = UNFUSED[name]
    found = compiled(source, {"i": 64, "j": 256, "n": 32}, "cpu").candidates
    assert {c.plan.schedule for c in found} == {"resident", "multi_pass"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_candidates_come_cheapest_first(name: str, target: str) -> None:
    source, extents = PROGRAMS[name]
    made = compiled(source, extents, target)
    costs = [c.plan.cost.seconds for c in made.candidates if c.plan.cost is not None]
    assert len(costs) == len(made.candidates) and costs == sorted(costs)
    assert made.chosen is made.candidates[0]
    assert 0 < costs[0] < math.inf


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_can_be_forced(schedule: str) -> None:
    made = compiled(SOFTMAX, ROWS, "sm_90", prefer=schedule)
    assert made.chosen.plan.schedule == schedule


# -- cost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize(
    ("name", "axis"),
    [(name, axis) for name, (_, extents) in PROGRAMS.items() for axis in extents if name != "one position"],
)
@pytest.mark.slow(but=["sm_90"])
def test_twice_the_extent_is_never_cheaper(name: str, axis: str, target: str) -> None:
    source, extents = PROGRAMS[name]
    once = cheapest(source, extents, target)
    twice = cheapest(source, {**extents, axis: 2 * extents[axis]}, target)
    assert twice >= once * (1 - 1e-9)


def test_a_faster_device_is_predicted_faster() -> None:
    assert (
        cheapest(ATTENTION, PREFILL, "sm_90")
        < cheapest(ATTENTION, PREFILL, "sm_80")
        < cheapest(ATTENTION, PREFILL, "cpu")
    )


# -- choice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_a_small_row_is_resident(target: str) -> None:
    assert compiled(SOFTMAX, {"i": 4096, "j": 256}, target).chosen.plan.schedule == "resident"


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("source", [LOGSUMEXP, VARIANCE], ids=["logsumexp", "variance"])
def test_a_long_row_is_walked(source: str, target: str) -> None:
    assert compiled(source, {"i": 4, "j": 1 << 22}, target).chosen.plan.schedule in ("rolling", "split_k")


CHANNELS = """
m[c] = mean[n,h](x[n,c,h])
y[n,c,h] = (x[n,c,h] - m[c]) * rsqrt(mean[n,h](sq(x[n,c,h] - m[c])) + 1e-5)
"""


@pytest.mark.parametrize(("batch", "is_one"), [(16, True), (4096, False)])
def test_channels_of_a_short_batch_are_normalised_by_one_kernel(batch: int, is_one: bool) -> None:
    chosen = compiled(CHANNELS, {"n": batch, "c": 64, "h": 3136}, "cpu").chosen.plan
    assert (len(chosen.kernels) == 1) is is_one


@pytest.mark.parametrize("target", TARGETS)
def test_attention_over_long_sequences_takes_one_pass(target: str) -> None:
    chosen = compiled(ATTENTION, PREFILL | {"i": 4096, "j": 4096}, target).chosen.plan.schedule
    assert chosen in ("rolling", "split_k")


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_decoding_fills_the_device(target: str) -> None:
    """Eight heads and one query: without shards, eight program instances would run on a hundred units."""
    plan = compiled(ATTENTION, DECODE, target, dtype="bf16").chosen.plan
    assert "split_k" in {group.schedule for kernel in plan.kernels for group in kernel.groups}
    assert plan.shards > 1
    assert DECODE["h"] * plan.shards >= DEVICES[target].sms / 2


# -- configuration -----------------------------------------------------------------------------------------


@cache
def configured(name: str, target: str) -> list[tuple[Kernel, KernelConfig]]:
    """Every kernel of every candidate that fits the device, with its configuration."""
    source, extents = PROGRAMS[name]
    fitting = [c for c in compiled(source, extents, target, dtype="bf16").candidates if not c.plan.reason]
    return [pair for c in fitting for pair in zip(c.nest.kernels, c.plan.configs, strict=True)]


def walked_axes(kernel: Kernel) -> set[str]:
    return set(kernel.parallel) | {s.axis for s in statements(kernel.body) if isinstance(s, Loop)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_axis_has_one_block(name: str, target: str) -> None:
    for kernel, config in configured(name, target):
        kinds = {block.axis: block.kind for block in config.blocks}
        assert len(kinds) == len(config.blocks)
        assert walked_axes(kernel) <= kinds.keys()
        assert {kinds[axis] for axis in kernel.parallel} <= {"grid"}


GROUPED = """
S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h // 6,j,d])
O[b,h,i,e] = sum[j](exp(S[b,h,i,j]) * V[b,h // 6,j,e])
"""


def test_heads_that_share_keys_are_rows_of_one_product_on_a_cpu() -> None:
    extents = {"b": 8, "h": 12, "i": 1, "j": 2048, "d": 64, "e": 64}
    (config,) = compiled(GROUPED, extents, "cpu", "resident").chosen.plan.configs
    assert {block.axis: block.size for block in config.blocks}["h"] == 6


def test_a_cpu_block_has_one_axis_of_a_batch() -> None:
    """Parts of two axes are not one axis in memory: the library would copy them for a product."""
    source = "O[a,b,n] = sum[k](x[a,b,k] * W[a,b,k,n])"
    (config,) = compiled(source, {"a": 4, "b": 16, "n": 64, "k": 64}, "cpu", "resident").chosen.plan.configs
    sizes = {block.axis: block.size for block in config.blocks}
    assert (sizes["a"], sizes["b"]) == (1, 16)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gpu_blocks_are_powers_of_two(name: str, target: str) -> None:
    for _, config in configured(name, target):
        for block in config.blocks:
            assert block.size is None or block.size & (block.size - 1) == 0 < block.size
        assert config.warps in (1, 2, 4, 8, 16) and 1 <= config.stages <= 5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_blocks_fit_their_axes(name: str, target: str) -> None:
    """Whole axes have no block, other blocks are positive and not far larger than their axis."""
    _, extents = PROGRAMS[name]
    for _, config in configured(name, target):
        for block in config.blocks:
            assert (block.size is None) == (block.kind == "whole")
            if block.size is not None and block.axis in extents:
                assert 1 <= block.size < 2 * max(16, extents[block.axis])


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_what_does_not_fit_is_priced_out_with_a_reason(target: str) -> None:
    """Scores of a whole long row do not fit one block: that plan is listed last, and says why."""
    found = compiled(ATTENTION, PREFILL, target).candidates
    refused = [c.plan for c in found if c.plan.reason]
    assert refused and all(p.cost is not None and p.cost.seconds == math.inf for p in refused)
    assert all("shared memory" in p.reason for p in refused)
    with pytest.raises(ScheduleError, match="shared memory"):
        compiled(ATTENTION, PREFILL, target, prefer="resident")


def test_an_operand_that_is_rounded_is_multiplied_in_half_precision() -> None:
    """What is computed is, whatever it is made of; a load of float32 is not."""
    source = "O[h,i,e] = sum[j](exp(S[h,i,j] - L[h,i]) * V[h,j,e])\nR[h,i,e] = sum[j](S[h,i,j] * V[h,j,e])\nreturn {}"

    def seconds(output: str, dtype: str) -> float:
        found = derive(source.format(output), None, False)
        dtypes = {"S": dtype, "L": dtype, "V": "bf16"}
        cost = pipeline(found, PREFILL, dtypes, DEVICES["sm_90"], None).chosen.plan.cost
        assert cost is not None
        return next(term.seconds for term in cost.terms if term.name == "matrix")

    assert seconds("O", "f32") == seconds("O", "bf16")
    assert seconds("R", "f32") > 2 * seconds("R", "bf16")


FEATURES = """
u[b,h,i,f] = sum[d](Q[b,h,i,d] * W[f,d]) * c - sum[d](sq(Q[b,h,i,d])) * (c * c / 2)
v[b,h,j,f] = sum[d](K[b,h,j,d] * W[f,d]) * c - sum[d](sq(K[b,h,j,d])) * (c * c / 2)
q[b,h,i,f] = exp(u[b,h,i,f] - max[f](u[b,h,i,f]))
k[b,h,j,f] = exp(v[b,h,j,f] - max[j, f](v[b,h,j,f]))
A[b,h,f,e] = sum[j](k[b,h,j,f] * V[b,h,j,e])
z[b,h,i] = sum[f](q[b,h,i,f] * sum[j](k[b,h,j,f]))
O[b,h,i,e] = sum[f](q[b,h,i,f] * A[b,h,f,e]) / z[b,h,i]
"""


@pytest.mark.parametrize(("heads", "rows"), [(4, "i"), (64, "h")])
def test_rows_of_a_product_are_along_an_axis_that_tensor_cores_fill(heads: int, rows: str) -> None:
    source = "y[i,h,e] = sum[k](x[i,h,k] * w[k,e])"
    (config,) = compiled(
        source, {"i": 2048, "h": heads, "e": 64, "k": 64}, "sm_90", dtype="bf16"
    ).chosen.plan.configs
    sizes = {block.axis: block.size for block in config.blocks}
    assert {axis for axis in "ih" if sizes[axis] > 1} == {rows}


@pytest.mark.parametrize("extent", [1, 8, 64, 256])
@pytest.mark.parametrize("source", [SOFTMAX, ATTENTION, GEMM, FEATURES])
@pytest.mark.slow(but=["A[i,k]"])
def test_a_plan_has_the_schedule_that_it_is_named_after(source: str, extent: int) -> None:
    derived = derive(source, None, False)
    extents = dict.fromkeys(nominal_extents(derived.program), extent)
    found = pipeline(derived, extents, program_dtypes(derived.program), DEVICES["cpu"], None).candidates
    for candidate in found:
        schedules = {group.schedule for kernel in candidate.plan.kernels for group in kernel.groups}
        assert candidate.plan.schedule in schedules
    assert {candidate.plan.schedule for candidate in found} == set(SCHEDULES)


@pytest.mark.parametrize("width", [128, 4096])
def test_a_product_that_walks_its_own_axis_has_wide_tiles(width: int) -> None:
    source = "L[i,v] = sum[d](x[i,d] * W[v,d])\ns[i] = sum[v](exp(L[i,v] - max[v](L[i,v])))\nreturn s"
    derived = derive(source, None, False)
    extents = {"i": 8192, "d": width, "v": 131072}
    found = pipeline(derived, extents, {"x": "bf16", "W": "bf16"}, DEVICES["h200"], None).chosen.plan
    blocks = {block.axis: block.size for block in found.configs[0].blocks}
    assert blocks["v"] == (128 if width > 256 else 64), found


REPEATED = "a[j] = min[i](x[i] * x[i])\nd[j,i] = a[j]"
SHORT_SIDES = """
x: f32[i,k,l]
z: f32[i,k]
w: f32[j,k,i]
l: axis[i]
c[l,k] = sum[i](max(mean[j](2), min(x[i,k,l], z[i,k])))
d[j,i] = mean[k](sum[i](w[j,k,i] * c[i,k]) * c[i,k])
"""


@pytest.mark.parametrize("prefer", ["rolling", "multi_pass"])
@pytest.mark.parametrize(
    ("source", "extents"),
    [(REPEATED, {"i": 1050, "j": 19}), (SHORT_SIDES, {"i": 5, "j": 43, "k": 7, "l": 5})],
    ids=["what is stored is the same along an axis", "short sides of a product"],
)
def test_a_thread_has_few_elements_of_every_tile(
    source: str, extents: Mapping[str, int], prefer: str
) -> None:
    """Many are registers in memory, and seconds of an assembler."""
    found = compiled(source, extents, "h200", prefer)
    limits = load(emit_triton(derived(source), found, "tiles")).LIMITS
    for kernel, config in zip(found.tile.kernels, found.chosen.plan.configs, strict=True):
        sizes = {block.axis: block.size or power_of_two(extents[block.axis[0]]) for block in kernel.blocks}
        least = {axis: limits[kernel.name].get(f"BLOCK_{axis.upper()}", (1, None))[0] for axis in sizes}
        made = [stmt.value.dims for stmt in nested(kernel.body) if isinstance(stmt, Let)]
        stores = [stmt for stmt in nested(kernel.body) if isinstance(stmt, Store)]
        tiles = [*made, *({axis for at in store.index for axis in at.dims} for store in stores)]
        widest = max(math.prod(max(sizes.get(a, 1), least.get(a, 1)) for a in dims) for dims in tiles)
        assert widest <= 128 * 32 * config.warps


@pytest.mark.parametrize("prefer", ["resident", "multi_pass"])
def test_loads_that_wait_for_a_loop_fit_shared_memory(prefer: str) -> None:
    source = """
        x: i64[i]
        y: f64[i]
        p: i64[i]
        z: f64[i]
        b = softmax_weighted[i](where(x[i] > 0, y[p[i]] + x[i], 0), y[i] + x[i])
        c[i] = max[i](z[i] * b)
        """
    assert compiled(source, {"i": 2100}, "h200", prefer).chosen.plan.schedule == prefer


def test_a_pass_stores_all_that_the_kernel_behind_it_reads() -> None:
    """The mean of log-sum-exps: its maximum is stored beside the sum that one pass makes of it, and not made again."""
    rows = "m[i] = max[j](x[i,j])\ns[i] = sum[j](exp(x[i,j] - m[i]))\n"
    extents = {"i": 8192, "j": 50000}
    alone, mean = (
        compiled(rows + last, extents, "sm_90").chosen.plan
        for last in ("y[i] = m[i] + log(s[i])\nreturn y", "y = mean[i](m[i] + log(s[i]))\nreturn y")
    )
    assert [len(kernel.outputs) for kernel in mean.kernels] == [2, 1]
    assert mean.cost.seconds < 1.1 * alone.cost.seconds


FEW = {
    "mean of rows": ("y = mean[i](mean[j](sq(x[i,j])))", {"i": 8192, "j": 8192}),
    "few long rows": ("y = mean[i](1 / (1 + sum[j](x[i,j])))", {"i": 64, "j": 1 << 18}),
    "accuracy": (
        "p[i] = argmax[j](x[i,j])\ny = mean[i](where(p[i] == t[i], 1, 0))\nreturn y",
        {"i": 8192, "j": 50000},
    ),
}


@pytest.mark.parametrize("name", FEW)
def test_what_few_blocks_would_read_row_by_row_is_stored_by_many(name: str) -> None:
    source, extents = FEW[name]
    plan = compiled(source, extents, "h200").chosen.plan
    device = DEVICES["h200"]
    assert len(plan.kernels) == 2
    assert plan.cost.seconds < 2 * 4 * math.prod(extents.values()) / device.bandwidth


def test_means_of_a_covariance_are_stored_and_leave_one_product() -> None:
    source = "m[j] = mean[i](x[i,j])\nC[j,k] = mean[i]((x[i,j] - m[j]) * (x[i,k] - m[k]))\nreturn C"
    extents = {"i": 100_000, "j": 512, "k": 512}
    *means, product = compiled(source, extents, "h200", dtype="bf16").chosen.plan.kernels
    assert [output.axes for kernel in means for output in kernel.outputs] == [("j",)]
    ((group,),) = [product.groups]
    assert len(group.group.states) == 1


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_division_by_a_norm_of_all_axes_is_in_blocks_that_triton_takes(target: str) -> None:
    """What is left of a split reduction is at every position of the output: no axis of it is held whole."""
    source = "n = sqrt(sum[a,b,c,d](sq(x[a,b,c,d])))\ny[a,b,c,d] = x[a,b,c,d] / n"
    extents = {"a": 112, "b": 64, "c": 512, "d": 512}
    found = compiled(source, extents, target).chosen
    for kernel, config in zip(found.nest.kernels, found.plan.configs, strict=True):
        blocks = [extents.get(b.axis, 2) if b.size is None else b.size for b in config.blocks]
        assert math.prod(blocks) <= 2**20, kernel.name


def test_what_is_stored_twice_under_other_names_of_axes_is_stored_once() -> None:
    text = "j: axis[k]\nA[i,j] = sum[k](where(k <= j, g[i,k], 0))\ny[i,j] = max[k](A[i,j] * A[i,k] * x[i,k])\nreturn y"
    kernel = eq.compile(text)
    assert sum(not buffer.is_output for buffer in kernel.loops.buffers) == 1
    g, x = torch.randn(3, 40), torch.randn(3, 40)
    sums = g.cumsum(1)
    found = kernel(g=g, x=x)
    assert isinstance(found, torch.Tensor) and kernel.certificate.ok and kernel.derivation.check().ok
    wanted = (sums[:, :, None] * sums[:, None] * x[:, None]).amax(2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
