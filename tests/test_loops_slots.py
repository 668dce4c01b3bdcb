"""Work shared out by what there is to do: instances dealt out to rows whose lengths are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_gpu import Gpu, gpu

import eqfuse as eq
from eqfuse import compiler
from eqfuse.certification import Checks, certify
from eqfuse.compiled import Asked, Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.errors import VerificationError
from eqfuse.extract.candidates import Candidate, PlanSearch
from eqfuse.extract.machine import compiler as cxx
from eqfuse.loops import interpreter, lower
from eqfuse.loops.lengths import row_range
from eqfuse.loops.nodes import Buffer, Kernel, Nest
from eqfuse.loops.printer import show
from eqfuse.loops.slots import MOST_SHARES, expanded
from eqfuse.lowered import lower_nest
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.host import HostProgram
from eqfuse.tile.modes import Mode
from eqfuse.tile.triton.launch import interpret
from tests.test_api_lengths import CASES, DECODE, SOFTMAX, Tensors, attended, sizes_of

__all__ = ["gpu"]

SHARED = ["decode", "paged", "segments", "shifted", "blocks"]
"""Programs whose rows are of a length that data says, and few."""

TWO = (
    "len: i32[b,h]\ns[b,h,j] = where(j < len[b,h], sum[d](q[b,h,d] * k[b,j,d]), -inf)" + SOFTMAX + "v[b,j,e])"
)


def two(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """A length for every row and head."""
    lengths = torch.tensor([[0, 1, room], [room // 2, 0, 3]])
    given = {"q": torch.randn(2, 3, 16)} | {n: torch.randn(2, room, 16) for n in "kv"}
    rows = [
        [
            attended(given["q"][b, h][None], given["k"][b, :n], given["v"][b, :n])[0]
            for h, n in enumerate(lengths[b].tolist())
        ]
        for b in range(2)
    ]
    return {"len": lengths.to(torch.int32), **given}, torch.stack([torch.stack(row) for row in rows]), {}


def shared(
    source: str, given: Tensors, sizes: Mapping[str, int], device: str, *, verified: bool = True
) -> tuple[Derived, Compiled]:
    """A plan that shares its shards out, whatever it costs."""
    derived = compiler.derive(source, None, strict_casts=False)
    extents = bind(derived.program, {n: tuple(t.shape) for n, t in given.items()}, sizes)
    asked = Asked(extents, program_dtypes(derived.program), device_named(device), "split_k")
    found, _ = compiler.choose(derived, asked)
    search = PlanSearch(derived.program, asked.dtypes, asked.device, derived.nests)
    split = [c for c in found if c.plan.schedule == "split_k" and not c.plan.evened]
    chosen = next(even for c in split if (even := search.evened(c, extents)) is not None)
    tile = lower_nest(chosen.nest, derived.program, asked.dtypes, chosen.plan.configs, asked.device)
    compiled = Compiled(found, chosen, tile, asked.dtypes, asked.extents, asked.device, None)
    assert not verified or certify(derived, compiled, Checks(8)).ok
    return derived, compiled


def shards_of(compiled: Compiled) -> dict[str, int]:
    return {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}


def on_cpu(derived: Derived, compiled: Compiled, given: Tensors, mode: Mode) -> torch.Tensor:
    host = HostProgram(compiled.tile, lambda: compiled.tile, derived.program, mode)
    (found,) = host(given, {}, compiled.extents, shards_of(compiled)).values()
    return found


def on_gpu(derived: Derived, compiled: Compiled, given: Tensors) -> torch.Tensor:
    module = compiler.emit_triton(derived, compiled, "made")
    tensors = [given[tensor.name] for tensor in derived.program.tensors]
    found: torch.Tensor = interpret(
        module, "made", *tensors, sizes={**compiled.extents, **shards_of(compiled)}
    )
    return found


@pytest.mark.parametrize("name", [*SHARED, "two"])
@pytest.mark.slow
def test_nothing_outside_is_read_where_shards_are_shared_out(name: str) -> None:
    source, make = (TWO, two) if name == "two" else CASES[name]
    torch.manual_seed(0)
    given, expected, _ = make(48)
    sizes = sizes_of(name, given)
    same = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
    derived, compiled = shared(source, given, sizes, "cpu", verified=False)  # as it is for the GPU
    torch.testing.assert_close(on_cpu(derived, compiled, given, "off"), expected, **same)
    if cxx() is not None:
        torch.testing.assert_close(on_cpu(derived, compiled, given, "wait"), expected, **same)
    derived, compiled = shared(source, given, sizes, "sm_90")
    torch.testing.assert_close(on_gpu(derived, compiled, given), expected, **same)


@pytest.mark.parametrize("name", ["segments", "two"])
@pytest.mark.slow
def test_states_that_are_merged_one_by_one_are_shared_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those are that do not add to a state what a part alone holds."""
    monkeypatch.setattr(lower, "_shares", lambda merge, states: None)
    source, make = (TWO, two) if name == "two" else CASES[name]
    torch.manual_seed(0)
    given, expected, _ = make(48)
    derived, compiled = shared(source, given, {}, "sm_90")
    found = on_gpu(derived, compiled, given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert "_b = " in show(compiled.chosen.nest)


def dealt(lengths: list[int], room: int, shards: int) -> list[tuple[int, int]]:
    """The instances of every row, first and behind the last, as the first kernel of a nest computes them."""
    given, _, _ = CASES["decode"][1](48)
    derived, compiled = shared(DECODE, given, {}, "sm_90", verified=False)
    counting, *_ = compiled.chosen.nest.kernels
    ends = tuple(Buffer(store.tensor, ("b",), "i64", True) for store in counting.body[-2:])  # type: ignore[union-attr]
    (shard, _), *_ = compiled.chosen.nest.shards
    found = interpreter.run(
        Nest((counting,), ends, compiled.chosen.nest.domains, ((shard, "j"),)),
        derived.program,
        {"len": torch.tensor(lengths).numpy()},
        {},
        {"b": len(lengths), "j": room, "h": 4, "d": 16, "e": 16},
        FloatDomain(),
        tiles={},
        shards={shard: shards},
    )
    first, last = (found[end.name].tolist() for end in ends)
    return list(zip(first, last, strict=True))


@pytest.mark.parametrize(
    ("lengths", "shards"),
    [
        ([5, 5, 5, 5], 2),
        ([0, 0, 0, 9], 4),
        ([1000, 1, 1, 1, 1, 1, 1, 1], 8),
        ([-3, 4000, 17, 600], 16),
        ([1000] + [0] * 39, 2),
    ],
)
def test_no_instance_has_more_than_its_part(lengths: list[int], shards: int) -> None:
    room = 1000
    parts = dealt(lengths, room, shards)
    assert parts[0][0] == 0 and parts[-1][1] <= len(lengths) * shards
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    left = [min(max(length, 0), room) for length in lengths]
    parts_at_most = max(MOST_SHARES * (shards - 1), 1)
    average = -(-sum(left) // ((shards - 1) * len(left))) if shards > 1 else 0
    most = max(average, -(-max(left) // parts_at_most), 1)
    assert all(last - first <= parts_at_most for first, last in parts)
    for length, (first, last) in zip(left, parts, strict=True):
        assert (last == first) == (length == 0)
        assert length <= (last - first) * most < length + most


def with_slots(nest: Nest) -> Kernel:
    return next(kernel for kernel in nest.kernels if kernel.slots is not None)


def test_instances_of_other_rows_are_refused() -> None:
    given, _, _ = CASES["decode"][1](48)
    derived, compiled = shared(DECODE, given, {}, "sm_90", verified=False)
    nest = compiled.chosen.nest
    kernel = with_slots(nest)
    assert kernel.slots is not None
    wrong = replace(kernel, slots=replace(kernel.slots, first=kernel.slots.last))
    nest = replace(nest, kernels=tuple(wrong if k is kernel else k for k in nest.kernels))
    chosen = replace(compiled.chosen, nest=nest)
    tile = lower_nest(nest, derived.program, compiled.dtypes, chosen.plan.configs, compiled.device)
    with pytest.raises(VerificationError):
        certify(derived, replace(compiled, chosen=chosen, tile=tile), Checks(8))


def test_what_shares_out_is_shown() -> None:
    given, _, _ = CASES["decode"][1](48)
    _, compiled = shared(DECODE, given, {}, "sm_90", verified=False)
    text = show(compiled.chosen.nest)
    assert "shared out evenly over b" in str(compiled.chosen.plan)
    assert "for b_row in range(b_row_start, b_row_stop):" in text and "k[b_row, j, d]" in text
    assert expanded(with_slots(compiled.chosen.nest)).slots is None


@pytest.mark.parametrize(
    ("condition", "start", "stop"),
    [
        ("j < len[b]", "0", "len[b]"),
        ("len[b] >= j", "0", "len[b] + 1"),
        ("~(j >= len[b])", "0", "len[b]"),
        ("j // 16 < len[b]", "0", "len[b] * 16"),
        ("(j <= i + len[b]) & (j >= i - 7)", "0", "N(i) - 1 + len[b] + 1"),
        ("(3 <= j) & (len[b] - 9 < 2 * j)", "(len[b] + -9) // 2 + 1", "N(j)"),
    ],
)
def test_lengths_of_rows(condition: str, start: str, stop: str) -> None:
    text = f"len: i32[b]\ny[b,i] = sum[j](where({condition}, x[b,j] * w[i,j], 0))"
    derived = compiler.derive(text, None, strict_casts=False)
    extents = {"b": 5, "i": 6, "j": 4096}
    asked = Asked(extents, program_dtypes(derived.program), device_named("sm_90"), "split_k")
    _, chosen = compiler.choose(derived, asked)
    kernel = chosen.nest.kernels[-2]
    found = row_range(kernel, "j")
    assert found is not None and found.axes == ("b",)
    assert (str(found.start), str(found.stop)) == (start, stop)


def test_long_batches_of_one_query_are_shared_out_on_a_gpu() -> None:
    derived = compiler.derive(DECODE, None, strict_casts=False)
    dtypes = {**program_dtypes(derived.program), **dict.fromkeys("qkv", "f16")}
    extents = {"b": 64, "h": 8, "j": 65536, "d": 128, "e": 128}
    even = compiler.choose(derived, Asked(extents, dtypes, device_named("h200")))[1]
    assert even.plan.evened == ("b",)
    one = compiler.choose(derived, Asked({**extents, "b": 1}, dtypes, device_named("h200")))[1]
    assert one.plan.evened == ()


@pytest.fixture
def always_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that shares out is the only one, where there is one."""
    candidates = PlanSearch.candidates

    def found(search: PlanSearch, *given: Any) -> list[Candidate]:
        made = candidates(search, *given)
        return [each for each in made if each.plan.evened] or made

    monkeypatch.setattr(PlanSearch, "candidates", found)


@pytest.mark.slow
def test_calls_whose_shards_are_shared_out(gpu: Gpu, always_even: None) -> None:
    """First, known, bound, and of other lengths and sizes."""
    torch.manual_seed(0)
    kernel = eq.compile(DECODE, target="h200", verify=False)
    for room in (48, 48, 70):
        given, expected, _ = CASES["decode"][1](room)
        given = {name: gpu.seen(tensor) for name, tensor in given.items()}
        launch = kernel.bind(**given)
        call = partial(kernel, **given)
        for each in (call, call, call, launch):
            torch.testing.assert_close(each(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert kernel.plan.evened == ("b",) and gpu.straight
    assert {name.rpartition("_")[2] for name in gpu.compiled} == {"slots", "partial", "merge"}


def test_plans_that_share_out_are_explained(always_even: None) -> None:
    kernel = eq.compile(DECODE, target="h200", verify=False)
    assert "shared out evenly over b" in kernel.explain()
