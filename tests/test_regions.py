"""One plan for many sizes: few plans over many lengths, and right results at the borders of their regions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import binaries, gpu

import eqfuse as eq
import eqfuse.kernel
from bench.ragged_report import CELLS as RAGGED
from eqfuse import certification, compiler, specialize_warps
from eqfuse.arguments import Arguments
from eqfuse.audit import audit
from eqfuse.calls.regions import LEAPS, Regions
from eqfuse.devices import device_named
from eqfuse.errors import BindError
from eqfuse.extract.candidates import seconds_of
from eqfuse.loops.blocks import Block
from eqfuse.loops.plan import SCHEDULES, KernelConfig
from eqfuse.rules import merge_search
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.triton.launch import interpret, load

__all__ = ["binaries", "gpu"]

DECODE = """
    s[h,j] = sum[d](q[h,d] * k[h//4,j,d])
    p[h,j] = exp(s[h,j] - max[j](s[h,j]))
    o[h,e] = sum[j](p[h,j] / sum[j](p[h,j]) * v[h//4,j,e])
    """
PREFILL = """
    Q: f16[h,i,d]
    K: f16[h,j,d]
    V: f16[h,j,e]
    s[h,i,j] = sum[d](Q[h,i,d] * K[h,j,d])
    p[h,i,j] = exp(s[h,i,j] - max[j](s[h,i,j]))
    o[h,i,e] = sum[j](p[h,i,j] / sum[j](p[h,i,j]) * V[h,j,e])
    """
SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
LENGTHS = (*range(1000, 1032), *(round(2000 * 2 ** (5 * step / 31)) | 1 for step in range(31)), 65536)


def decode_inputs(length: int) -> dict[str, torch.Tensor]:
    return {"q": torch.randn(8, 16), "k": torch.randn(2, length, 16), "v": torch.randn(2, length, 16)}


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = (x.double().repeat_interleave(4, 0) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,hjd->hj", q.double(), keys), -1)
    return torch.einsum("hj,hje->he", weights, values)


def softmax_inputs(length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, length)}


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.double(), -1)


Case = tuple[str, Callable[[int], dict[str, torch.Tensor]], Callable[..., torch.Tensor]]
CASES: dict[str, Case] = {
    "decode": (DECODE, decode_inputs, attended),
    "softmax": (SOFTMAX, softmax_inputs, softmax),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a plan was compiled, a loop nest verified, a merge derived, and sizes priced."""
    counts = dict.fromkeys(("pipeline", "verify", "derive_group", "choose"), 0)

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    for name in ("pipeline", "choose"):
        count(compiler, name)
    count(certification, "verify")
    count(merge_search, "derive_group")
    return counts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["softmax"])
def test_many_lengths_are_few_plans(name: str, counted: dict[str, int]) -> None:
    source, inputs, right = CASES[name]
    kernel = eq.compile(source, native="off")
    for length in LENGTHS:
        given = inputs(length)
        assert torch.allclose(kernel(**given).double(), right(**given), atol=1e-5)
    assert len({id(region.compiled) for region in kernel.regions}) <= 6
    assert 1 <= kernel.compilations <= 6
    before = dict(counted)
    for length in LENGTHS:
        kernel(**inputs(length + (length < 65536)))
    assert counted == before
    assert counted["pipeline"] <= 8
    assert counted["verify"] <= 8


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("native", ["off", "wait"])
@pytest.mark.slow(but=["off-softmax", "wait-softmax"])
def test_lengths_around_borders(name: str, native: str) -> None:
    source, inputs, right = CASES[name]
    kernel = eq.compile(source, native=native)
    for length in (513, 700, 1024, 1025, 1, 2, 3, 5, 63, 64, 65, 2047, 2049, 8191, 40001):
        given = inputs(length)
        assert torch.allclose(kernel(**given).double(), right(**given), atol=1e-5), length


@pytest.mark.parametrize(
    ("name", "prefer"),
    [(name, prefer) for name in CASES for prefer in SCHEDULES if (name, prefer) != ("decode", "resident")],
)
@pytest.mark.slow
def test_a_module_of_one_length_is_right_for_others(name: str, prefer: str) -> None:
    source, inputs, right = CASES[name]
    kernel = eq.compile(source, target="sm_90", prefer=prefer)
    shapes = kernel._shapes
    dtypes = dict.fromkeys(inputs(1), "f32")
    for length in (300, 1, 9, 257, 512, 513):
        given = inputs(length)
        extents = {"h": 8, "d": 16, "e": 16, "i": 4, "j": length}
        extents = {axis: extents[axis] for axis in kernel.compiled.extents}
        special = shapes._special(extents, dtypes, device_named("sm_90"))
        text = shapes.triton(special.compiled)
        found = interpret(text, kernel.name, **given, sizes={**extents, **special.shards})
        assert torch.allclose(found.double(), right(**given), atol=1e-5), length


def test_regions_are_shown() -> None:
    kernel = eq.compile(SOFTMAX)
    assert kernel.regions == ()
    kernel(x=torch.randn(4, 1000))
    (region,) = kernel.regions
    assert region.sizes == {"i": (3, 4), "j": (513, 1024)}
    assert str(region).startswith("3 <= i <= 4, 513 <= j <= 1024: <Plan ")
    kernel(x=torch.randn(3, 600))
    assert kernel.regions == (region,)


def test_declared_sizes_are_not_rounded() -> None:
    regions = Regions(frozenset("d"))
    assert regions.sizes(regions.bucket({"d": 80, "j": 80})) == {"d": 80, "j": 128}


class Plan:
    """Stands for a plan that is best up to a size, and `slower` times the best beyond."""

    def __init__(self, most: int, slower: float, whole: tuple[str, ...] = ()) -> None:
        self.most, self.slower = most, slower
        config = KernelConfig(tuple(Block(axis, "whole", None) for axis in whole))
        self.chosen = SimpleNamespace(
            plan=SimpleNamespace(configs=(config,)), nest=SimpleNamespace(domains=())
        )


@pytest.mark.parametrize("whole", [(), ("j",)])
@pytest.mark.parametrize("border", [11, 12, 15, 17])
def test_a_region_is_followed_to_where_its_plan_is_worse(border: int, whole: tuple[str, ...]) -> None:
    priced: list[int] = []
    regions = Regions(frozenset())
    plans = [Plan(most, 2.0, whole) for most in (1 << 10, 1 << border, 1 << 30)]

    def compile_at(extents: Any) -> Any:
        return next(plan for plan in plans if extents["j"] <= plan.most)

    def best(known: Any, extents: Any) -> float:
        priced.append(extents["j"])
        return 1.0

    def of(plan: Any, extents: Any) -> float:
        return 1.0 if extents["j"] <= plan.most and compile_at(extents) is plan else plan.slower

    for length in range(1000, 1 << 17, 999):
        found = regions.at({"j": length}) or regions.add({"j": length}, compile_at, best, of)
        assert found is compile_at({"j": length})
    assert len(regions.found) <= 3
    # The least sizes of a bucket are the greatest of the one before, but where tiles of a whole axis grow.
    assert len(priced) <= (2 if whole else 1) * (8 + 4)
    assert (1025 in priced) is bool(whole)


@pytest.mark.slow
def test_a_known_call_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = eq.compile(DECODE, native="off")
    given = decode_inputs(33)
    first = kernel(**given)
    looked: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any) -> Any:
            looked.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, watched)

    watch(eqfuse.kernel, "call_key")
    for name in ("plain", "given", "bound"):
        watch(Arguments, name)
    for _ in range(5):
        assert torch.equal(kernel(**given), first)
    assert looked == ["call_key"] * 3  # from the fourth on they are compared with the one before
    looked.clear()
    kernel(**decode_inputs(34))
    assert looked == ["call_key", "plain", "bound"]
    assert kernel(**{**given, "q": given["q"].double()}).dtype == torch.float64
    assert torch.equal(kernel(**given), first)
    with pytest.raises(BindError, match="torch tensors and numpy arrays are mixed"):
        kernel(**{**given, "q": given["q"].numpy()})
    soft, x = eq.compile(SOFTMAX), torch.randn(3, 5)
    soft(x=x)
    soft(x=x.requires_grad_()).square().sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0


def test_lengths_are_compiled_for_once() -> None:
    """Triton compiles nothing apart for a length that memory is not contiguous along."""
    kernel = eq.compile("y[i] = sum[j](x[j,i])", target="sm_90", prefer="rolling")
    module = load(kernel.triton)
    found = [p for name in module.CONFIGS for p in getattr(module, name).params]
    assert {p.name: p.do_not_specialize for p in found if p.name in ("N_i", "N_j")} == {
        "N_i": False,
        "N_j": True,
    }
    assert not any(p.do_not_specialize for p in found if "stride" in p.name)
    assert "ALIGNED" not in kernel.triton


def test_shards_along_contiguous_memory_are_aligned() -> None:
    """One that may start anywhere is not loaded as vectors: such lengths have a binary of their own."""
    kernel = eq.compile("y[i] = sum[j](exp(x[i,j]))", target="sm_90", prefer="split_k", verify=False)
    assert (
        "        j_by_j_shard = j_by_j_shard // 16 * 16\n" in kernel.triton
        and 'size["j"] % 16' in kernel.triton
    )
    strided = eq.compile("y[i] = sum[j](exp(x[j,i]))", target="sm_90", prefer="split_k", verify=False)
    assert "j_by_j_shard" in strided.triton and "ALIGNED" not in strided.triton
    rows = eq.compile("y[i,k] = sum[j](x[i,j] * w[j,k])", target="sm_90", prefer="rolling", verify=False)
    assert "    if ALIGNED_I:\n        N_i = N_i // 16 * 16\n" in rows.triton


def test_one_row_says_nothing_of_what_is_loaded_along_others() -> None:
    """Where one flag said that all sizes are multiples of 16, weights were loaded number by number for one row."""
    source = "x: f16[t,c]\nW: f16[f,c]\ny[t,f] = sum[c](x[t,c] * W[f,c])"
    kernel = eq.compile(source, target="sm_90", prefer="split_k", verify=False)
    for name, axis in (("N_t", "T"), ("c_by_c_shard", "C")):
        assert f"    if ALIGNED_{axis}:\n        {name} = {name} // 16 * 16\n" in kernel.triton
    partial = next(line for line in kernel.triton.splitlines() if '"ALIGNED_T": ' in line)
    assert partial.strip() == '"ALIGNED_T": not (size["t"] % 16),'


EVERY = sorted({*range(1, 20), *(n + by for n in (64, 100, 1000, 4096, 30000) for by in (0, 1, 8)), 131072})


@pytest.mark.parametrize("first", [1, 1000])
@pytest.mark.parametrize("queries", [1, 128])
@pytest.mark.slow(but=["128-1000"])
def test_few_binaries_serve_all_lengths(binaries: set[Any], queries: int, first: int) -> None:
    source = DECODE.replace("h,j]", "h,i,j]").replace("q[h,", "q[h,i,").replace("o[h,", "o[h,i,")
    kernel = eq.compile(source, target="h200", verify=False)
    for length in (first, *EVERY, *reversed(EVERY)):
        kernel(q=torch.empty(8, queries, 16), k=torch.empty(2, length, 16), v=torch.empty(2, length, 16))
    assert 1 <= len(binaries) <= 6
    assert len({id(region.compiled) for region in kernel.regions}) <= 3


def test_rows_do_not_outgrow_the_registers_of_their_warps(binaries: set[Any]) -> None:
    """Four warps for rows of 4097 would hold 256 elements a thread of 32768."""
    kernel = eq.compile(SOFTMAX, target="h200", verify=False)
    for length in (4097, 9000, 20000, 32768):
        kernel(x=torch.empty(1024, length))
        (config,) = kernel.plan.configs
        rows = math.prod(block.size or 1 for block in config.blocks if block.kind == "grid")
        held = rows * (1 << (length - 1).bit_length()) // (32 * config.warps)
        assert kernel.plan.schedule == "resident" and held <= 168
    assert len({region.compiled.chosen.plan.configs[0].warps for region in kernel.regions}) == 2


def test_shards_of_few_numbers_are_merged(binaries: set[Any]) -> None:
    """Each number of them is a binary of its own, without masks: one that costs little more is kept."""
    kernel = eq.compile(DECODE, target="h200", prefer="split_k", verify=False)
    counts = set()
    for length in (*range(1000, 1032), 2000, 5000, 20000, 131072):
        kernel(**decode_inputs(length))
        (shards,) = kernel._shapes._calls.popitem()[1].shards.values()
        counts.add(shards)
    merges = [dict(options) for name, _, options in binaries if name.endswith("_merge")]
    assert len(merges) == len(counts) <= 3
    assert all(options["EVEN_J_SHARD"] == "True" for options in merges)


def test_an_integer_scalar_is_a_length_too(binaries: set[Any]) -> None:
    source = "L: i32\n" + DECODE.replace("s[h,j] = ", "s[h,j] = where(j < L, ").replace(
        "j,d])\n", "j,d]), -inf)\n", 1
    )
    kernel = eq.compile(source, target="h200", prefer="rolling", verify=False)
    given = decode_inputs(512)
    for length in (1, 2, 16, 160, 161, 512):
        kernel(**given, L=length)
    assert len(binaries) == 1


def test_programs_in_roles_are_made_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    in_roles = specialize_warps.in_roles

    def counted(
        nest: Any, program: Any, dtypes: Any, device: Any, roles: Any, configs: Any, known: Any
    ) -> Any:
        made.append((nest, tuple(roles)))
        return in_roles(nest, program, dtypes, device, roles, configs, known=known)

    monkeypatch.setattr(specialize_warps, "in_roles", counted)
    kernel = eq.compile(PREFILL, target="h200", verify=False)
    dtypes = dict(program_dtypes(kernel.program))
    for length in (2000, 4000, 8000, 16000):
        extents = {"h": 32, "i": length, "j": length, "d": 128, "e": 128}
        kernel._shapes._special(extents, dtypes, device_named("h200"))
    assert made and len(made) == len(set(made))


def test_the_roles_of_a_bucket_are_those_for_the_call_that_begins_it() -> None:
    """At the end of its bucket, twice as long, memory is predicted to bound the kernel with roles and without."""
    cell = RAGGED["prefill first"]
    scalars = {"g": cell.groups}
    kernel = eq.compile(cell.text, scalars=scalars, target="h200", assume_finite=True, verify=False)
    dtypes = {**program_dtypes(kernel.program), **dict.fromkeys("QKV", "f16")}
    extents = {"h": 64, "i": 286629, "j": 286629, "d": 128, "e": 128}
    special = kernel._shapes._special(extents, dtypes, device_named("h200"))
    assert special.compiled.roles is not None
    assert special.compiled.chosen.plan.roles == kernel._shapes.planned(special).chosen.plan.roles


def test_rows_have_blocks_of_their_own(binaries: set[Any]) -> None:
    """The next power of two, whatever lengths were called before: a longer one takes longer."""
    kernel = eq.compile(SOFTMAX, target="h200", verify=False)
    for length in (3000, 5, 40, 300, 1000, 1024, 2000):
        binaries.clear()
        kernel(x=torch.empty(1024, length))
        assert {dict(options)["BLOCK_J"] for _, _, options in binaries} == {
            str(1 << (length - 1).bit_length())
        }


def test_a_plan_that_begins_looks_ahead_once(
    binaries: set[Any], counted: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process finds how far it reaches without looking for another plan."""
    monkeypatch.delenv("EQFUSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def inputs(length: int) -> dict[str, torch.Tensor]:
        sizes = {"q": (64, 128), "k": (16, length, 128), "v": (16, length, 128)}
        return {name: torch.empty(size, dtype=torch.float16) for name, size in sizes.items()}

    for chosen in (2, 0):  # for nominal sizes, and for these
        counted["choose"] = 0
        kernel = eq.compile(DECODE, target="h200", verify=False)
        kernel(**inputs(1000))
        (region,) = kernel.regions
        assert region.sizes["j"] == (513, 1024 << LEAPS[-1]) and region.sizes["h"] == (33, 64)
        assert counted["choose"] == chosen
        kernel(**inputs(5000))
        assert kernel.regions == (region,) and counted["choose"] == chosen
    entries = {finding.path.parent.name: finding.wrong + finding.fault for finding in audit()}
    assert entries["reached"] == "" and "planned" in entries


def test_a_region_ends_before_the_bucket_where_its_plan_is_worse() -> None:
    extents = {"i": 4, "j": 100_000}
    compiled = eq.compile(SOFTMAX, target="h200", verify=False).compiled
    regions = Regions(frozenset())

    def seconds(*given: Any) -> float:
        return 1.0

    def reach(best: Callable[[dict[str, int]], float]) -> int:
        return regions.ahead(extents, frozenset("j"), compiled, lambda known, at: best(dict(at)), seconds)

    assert reach(seconds) == LEAPS[-1] and reach(lambda at: 0.9) == 0
    assert reach(lambda at: 1.0 if at["j"] < 1 << 20 else 0.5) == 2
    regions.add(extents, lambda extents: compiled, seconds, seconds)
    regions.extend({"j": 2})
    assert regions.found[0].sizes == {"i": (3, 4), "j": (65537, 1 << 19)}


def test_a_plan_for_long_rows_does_not_hide_better_ones_for_short_ones() -> None:
    kernel = eq.compile(SOFTMAX, target="h200", verify=False)
    shapes, dtypes = kernel._shapes, {"x": "f32"}
    for length in (131072, 20000, 5000, 900, 5):
        extents = {"i": 1024, "j": length}
        special = shapes._special(extents, dtypes, device_named("h200"))
        taken = seconds_of(shapes._search(special.compiled).at(special.compiled.chosen, extents))
        assert taken <= 1.15 * seconds_of(shapes.planned(special).chosen), length
