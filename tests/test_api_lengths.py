"""Lengths, offsets and pages that are data: on every schedule, what is outside is never read."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import mmap
import os
import signal
from collections.abc import Callable, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import needs
import pytest
import torch

import eqfuse as eq
from eqfuse import compiler
from eqfuse.certification import Checks, certify
from eqfuse.devices import device_named
from eqfuse.errors import EqfuseError
from eqfuse.loops.plan import SCHEDULES
from eqfuse.specialize_warps import other_roles
from eqfuse.terms import segments as by_key
from eqfuse.terms.parser import parse
from eqfuse.terms.printer import show_program
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.triton.launch import interpret

NAN = math.nan
HEADS, WIDTH = 4, 16
Tensors = dict[str, torch.Tensor]

SOFTMAX = """
    p[b,h,j] = exp(s[b,h,j] - max[j](s[b,h,j]))
    o[b,h,e] = sum[j](p[b,h,j] / sum[j](p[b,h,j]) * """
DECODE = (
    "len: i32[b]\ns[b,h,j] = where(j < len[b], sum[d](q[b,h,d] * k[b,j,d]), -inf)" + SOFTMAX + "v[b,j,e])"
)
SCALAR = "L: i32\ns[b,h,j] = where(j < L, sum[d](q[b,h,d] * k[b,j,d]), -inf)" + SOFTMAX + "v[b,j,e])"
PAGED = (
    "page: i32[b,n]\nlen: i32[b]\n"
    "s[b,h,j] = where(j < len[b], sum[d](q[b,h,d] * k[page[b,j//16],j%16,d]), -inf)"
    + SOFTMAX
    + "v[page[b,j//16],j%16,e])"
)
PACKED = """
    first: i32[i]
    s[h,i,j] = where((first[i] <= j) & (j <= i), sum[d](q[i,h,d] * k[j,h,d]), -inf)
    p[h,i,j] = exp(s[h,i,j] - max[j](s[h,i,j]))
    o[i,h,e] = sum[j](p[h,i,j] / sum[j](p[h,i,j]) * v[j,h,e])
    """
SHIFTED = """
    shift: i32[b]
    len: i32[b]
    s[b,i,j] = where((j <= i + shift[b]) & (j < len[b]) and j >= i - 7, sum[d](q[b,i,d] * k[b,j,d]), -inf)
    p[b,i,j] = exp(s[b,i,j] - max[j](s[b,i,j]))
    o[b,i,e] = sum[j](p[b,i,j] / sum[j](p[b,i,j]) * v[b,j,e])
    """
BLOCKS = """
    count: i32[r]
    block: i32[r,n]
    s[h,r,p,j] = where(j // 16 < count[r], sum[d](q[h,r,p,d] * k[h,block[r,j//16],j%16,d]), -inf)
    p[h,r,p,j] = exp(s[h,r,p,j] - max[j](s[h,r,p,j]))
    o[h,r,p,e] = sum[j](p[h,r,p,j] / sum[j](p[h,r,p,j]) * v[h,block[r,j//16],j%16,e])
    """.replace("p[h,r,p,j]", "w[h,r,p,j]")
DOCUMENTS = """
    doc: i32[j]
    at: i32[i]
    assert doc[j] <= doc[j+1]
    s[h,i,j] = where((doc[j] == at[i]) & (j <= i + 40), sum[d](q[i,h,d] * k[j,h,d]), -inf)
    p[h,i,j] = exp(s[h,i,j] - max[j](s[h,i,j]))
    o[i,h,e] = sum[j](p[h,i,j] / sum[j](p[h,i,j]) * v[j,h,e])
    """
SEGMENTS = "off: i32[n]\ny[s,e] = sum[j](where((off[s] <= j) & (j < off[s+1]), w[j] * v[j,e], 0))"


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query per head (heads, width) over the keys (n, width) that there are; NaN where there is none."""
    weights = torch.softmax(q.double() @ k.double().T, -1)
    return (weights @ v.double()).float() if len(k) else torch.full(q.shape, NAN)


def ragged(lengths: list[int], room: int) -> tuple[Tensors, torch.Tensor]:
    """A cache with room for more than the lengths, NaN where nothing is, and what attention to the rest gives."""
    rows = len(lengths)
    given = {"q": torch.randn(rows, HEADS, WIDTH)} | {n: torch.randn(rows, room, WIDTH) for n in "kv"}
    for row, length in enumerate(lengths):
        given["k"][row, length:] = given["v"][row, length:] = NAN
    parts = [attended(given["q"][b], given["k"][b, :n], given["v"][b, :n]) for b, n in enumerate(lengths)]
    return given, torch.stack(parts)


def decode(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    lengths = [0, 1, room, room // 3, room // 2]
    given, expected = ragged(lengths, room)
    return {"len": torch.tensor(lengths, dtype=torch.int32), **given}, expected, {}


def scalar(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    given, expected = ragged([room // 3] * 3, room)
    return given, expected, {"L": room // 3}


def paged(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Pages in any order; those behind a row's length are nowhere."""
    lengths = [0, 1, room, room // 3]
    rows, pages = len(lengths), room // 16
    given, expected = ragged(lengths, room)
    order = torch.randperm(rows * pages)
    for name in "kv":
        flat = given[name].reshape(rows * pages, 16, WIDTH)
        given[name] = torch.empty_like(flat).index_copy_(0, order, flat)
    page = order.reshape(rows, pages).to(torch.int32)
    for row, length in enumerate(lengths):
        page[row, -(-length // 16) :] = 10**6
    return {"page": page, "len": torch.tensor(lengths, dtype=torch.int32), **given}, expected, {}


def packed(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Documents one after the other; what stands before the first is of nobody."""
    sizes = [5, 1, room // 2, 2, room // 4]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    total = ends[-1]
    first = torch.tensor([end - size for end, size in zip(ends, sizes, strict=True) for _ in range(size)])
    given = {name: torch.randn(total, HEADS, WIDTH) for name in "qkv"}
    first[:5] = 3  # rows 0 to 2 have nothing
    given["k"][:3] = given["v"][:3] = NAN
    rows = [
        torch.cat(
            [
                attended(
                    given["q"][i, h][None], given["k"][first[i] : i + 1, h], given["v"][first[i] : i + 1, h]
                )
                for h in range(HEADS)
            ]
        )
        for i in range(total)
    ]
    return {"first": first.to(torch.int32), **given}, torch.stack(rows), {}


def documents(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Keys sorted by the document that they are of; those of documents that no row is of are never read."""
    doc = torch.repeat_interleave(torch.tensor([-3, 0, 1, 5, 6, 9]), torch.tensor([4, 3, 9, 1, 2, room - 19]))
    at = torch.tensor([0] * 5 + [1] * 8 + [2, 5, 5, -7] + [1] * 3)
    given = {"q": torch.randn(len(at), HEADS, WIDTH)} | {n: torch.randn(room, HEADS, WIDTH) for n in "kv"}
    places = [torch.nonzero((doc == at[i]) & (torch.arange(room) <= i + 40))[:, 0] for i in range(len(at))]
    rows = [
        torch.cat(
            [attended(given["q"][i, h][None], given["k"][js, h], given["v"][js, h]) for h in range(HEADS)]
        )
        for i, js in enumerate(places)
    ]
    unread = [j for j in range(room) if int(doc[j]) in (-3, 6, 9)]
    given["k"][unread] = given["v"][unread] = NAN
    return {"doc": doc.to(torch.int32), "at": at.to(torch.int32), **given}, torch.stack(rows), {}


def segments(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Rows of a sparse matrix; elements before the first and behind the last are of none."""
    off = torch.tensor([4, 4, 7, room // 2, room // 2, room - 9], dtype=torch.int32)
    w, v = torch.randn(room), torch.randn(room, WIDTH)
    expected = torch.stack([w[a:b] @ v[a:b] for a, b in pairwise(off)])
    for tensor in (w, v):
        tensor[:4] = tensor[room - 9 :] = NAN
    return {"off": off, "w": w, "v": v}, expected, {}


def shifted(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Several bounds at once, some of data: a window that each row of the batch has elsewhere."""
    shift, length = torch.tensor([0, 5, room // 2]), torch.tensor([20, 9, room - 3])
    given = {name: torch.randn(3, n, WIDTH) for name, n in (("q", 20), ("k", room), ("v", room))}
    i, j = torch.arange(20)[:, None], torch.arange(room)
    rows = []
    for b in range(3):
        seen = (j <= i + shift[b]) & (j < length[b]) & (j >= i - 7)
        scores = (given["q"][b] @ given["k"][b].T).masked_fill(~seen, -math.inf)
        rows.append(torch.softmax(scores, -1) @ given["v"][b])
        for name in "kv":
            given[name][b, ~seen.any(0)] = NAN
    numbers = {"shift": shift.to(torch.int32), "len": length.to(torch.int32)}
    return {**numbers, **given}, torch.stack(rows), {}


def blocks(room: int) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """Lists of blocks of keys, each row's as long as it says; behind it stands one that holds nothing."""
    most = room // 16
    count = torch.tensor([0, 1, most, most // 2], dtype=torch.int32)
    block = torch.stack([torch.randperm(most + 1)[:most] for _ in count])
    given = {"q": torch.randn(2, 4, 5, WIDTH)} | {n: torch.randn(2, most + 2, 16, WIDTH) for n in "kv"}
    rows = []
    for row, number in enumerate(count.tolist()):
        block[row, number:] = most + 1
        listed = [given[name][:, block[row, :number]].flatten(1, 2) for name in "kv"]
        rows.append([attended(given["q"][h, row], listed[0][h], listed[1][h]) for h in range(2)])
    for name in "kv":
        given[name][:, most + 1] = NAN
    expected = torch.stack([torch.stack([rows[r][h] for r in range(4)]) for h in range(2)])
    return {"count": count, "block": block.to(torch.int32), **given}, expected, {}


Case = tuple[str, Callable[[int], tuple[Tensors, torch.Tensor, dict[str, Any]]]]
CASES: Mapping[str, Case] = {
    "decode": (DECODE, decode),
    "scalar": (SCALAR, scalar),
    "paged": (PAGED, paged),
    "packed": (PACKED, packed),
    "sorted": (PACKED.replace("[i]\n", "[i]\n    assert first[i] <= first[i+1]\n", 1), packed),
    "documents": (DOCUMENTS, documents),
    "segments": (SEGMENTS, segments),
    "shifted": (SHIFTED, shifted),
    "blocks": (BLOCKS, blocks),
}


def sizes_of(name: str, given: Tensors) -> dict[str, int]:
    lists = {"paged": "page", "blocks": "block"}.get(name)
    return {"j": given[lists].shape[1] * 16} if lists else {}


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["paged-resident"])
@pytest.mark.pairwise("executors")
def test_nothing_outside_is_read_on_a_cpu(name: str, prefer: str) -> None:
    source, make = CASES[name]
    torch.manual_seed(0)
    kernel = eq.compile(source, target="cpu", prefer=prefer)
    for room in (48, 320):
        given, expected, scalars = make(room)
        found = kernel(**given, **scalars, sizes=sizes_of(name, given))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert kernel.certificate.ok


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["segments-rolling"])
@pytest.mark.pairwise("executors")
@needs.cxx
def test_nothing_outside_is_read_by_compiled_code(name: str, prefer: str) -> None:
    source, make = CASES[name]
    torch.manual_seed(0)
    kernel = eq.compile(source, target="cpu", prefer=prefer, verify=False, native="wait")
    given, expected, scalars = make(320)
    found = kernel(**given, **scalars, sizes=sizes_of(name, given))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def at_the_end_of_memory(tensor: torch.Tensor, kept: int) -> torch.Tensor:
    """The tensor in memory of which the process may not read what lies behind the first `kept` bytes."""
    size = tensor.numel() * tensor.element_size()
    room = -(-kept // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    found = raw[room - kept : room - kept + size].view(tensor.dtype).view(tensor.shape)
    found.copy_(tensor)
    libc = ctypes.CDLL(None, use_errno=True)
    behind = ctypes.c_void_p(raw.data_ptr() + room)
    assert libc.mprotect(behind, ctypes.c_size_t(len(memory) - room), 0) == 0, ctypes.get_errno()
    return found


def status_of(call: Callable[[], object]) -> int:
    """How a forked child ends in which this is called: 0, or what stopped it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            faulthandler.disable()
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


ASCENDING = "doc: i32[j]\nassert doc[j] <= doc[j+1]\ny[i] = sum[j](where(doc[j] == at[i], x[j] * z[i], 0))\nat: i32[i]"


def sorted_sums() -> Tensors:
    doc = torch.tensor([-3, 0, 0, 4, 4, 4, 9], dtype=torch.int32)
    at = torch.tensor([0, 4, 5], dtype=torch.int32)
    return {"doc": doc, "at": at, "x": torch.arange(7.0), "z": torch.tensor([1.0, 2.0, 3.0])}


def test_what_falls_against_the_promise_is_named() -> None:
    given = sorted_sums()
    given["doc"][4] = 3
    for call in (eq.compile(ASCENDING), eq.reference(ASCENDING)):
        with pytest.raises(EqfuseError, match=r"doc\[4\] is less than doc\[3\].*ascends \(line 2\)"):
            call(**given)
    assert (
        eq.compile(ASCENDING.splitlines()[0] + "\n" + "\n".join(ASCENDING.splitlines()[2:]))(**given)[1] == 16
    )


def test_reals_that_are_promised_to_ascend_are_refused() -> None:
    with pytest.raises(EqfuseError, match="'doc' is promised to ascend, and declared f32"):
        eq.compile(ASCENDING.replace("doc: i32", "doc: f32"))
    undeclared = eq.compile("\n".join(ASCENDING.splitlines()[1:]))
    with pytest.raises(EqfuseError, match="'doc' is promised to ascend, so it holds integers"):
        undeclared(**{**sorted_sums(), "doc": torch.arange(7.0)})


def test_the_gradient_of_what_a_search_cuts_is_cut() -> None:
    given = sorted_sums()
    given["x"].requires_grad_()
    given["z"].requires_grad_()
    kernel = eq.compile(ASCENDING)
    kernel(**given).sum().backward()
    assert given["x"].grad.tolist() == [0, 1, 1, 2, 2, 2, 0] and given["z"].grad.tolist() == [3, 12, 0]
    assert "assert doc[j] <= doc[j + 1]" in kernel.backward.source
    assert "search doc" in str(eq.compile(kernel.backward.source, target="cpu", prefer="rolling").tile)


@pytest.mark.slow
def test_the_ends_of_sorted_rows_are_their_first_and_their_last() -> None:
    """No reduction over the rows of a block looks for them."""
    for name, reduced in (("packed", True), ("sorted", False)):
        kernel = eq.compile(CASES[name][0], target="sm_90", prefer="rolling", verify=False)
        text = str(kernel.tile)
        assert ("over i" in text) is reduced
        assert ("first_first" in text and "first_last" in text) is not reduced


@pytest.mark.parametrize(("name", "has_roles"), [("sorted", True), ("packed", False)])
@pytest.mark.slow(but=["packed-False"])
def test_packed_rows_that_are_sorted_may_have_roles(name: str, has_roles: bool) -> None:
    """Warp groups share the rows, so that no one of them has all rows to look for the ends among."""
    derived = compiler.derive(CASES[name][0], None, strict_casts=False, assume_finite=True)
    dtypes = {**program_dtypes(derived.program), **dict.fromkeys("qkv", "f16")}
    extents = {"h": 16, "i": 8192, "j": 8192, "d": 128, "e": 128}
    compiled = compiler.pipeline(derived, extents, dtypes, device_named("h200"), "rolling")
    (_, made), *_ = [*islice(other_roles(derived, compiled, extents), 1), (0.0, None)]
    assert (made is not None) is has_roles
    if made is not None:
        assert certify(derived, made, Checks(8)).ok


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.slow(but=["split_k"])
def test_positions_find_the_segments_that_they_are_in(prefer: str) -> None:
    """The other way round: of all segments a block of positions reads those that it has a part of."""
    text = (
        "off: i32[n]\nassert off[s] <= off[s+1]\n"
        "y[j,e] = sum[s](where((off[s] <= j) & (j < off[s+1]), a[s,e] * x[j,e], 0))"
    )
    off = torch.tensor([2, 5, 5, 9, 14, 14, 20], dtype=torch.int32)
    a, x = torch.randn(6, 4), torch.randn(23, 4)
    a[[1, 4]] = NAN  # empty ones
    segment = torch.searchsorted(off, torch.arange(23, dtype=torch.int32), right=True) - 1
    inside = ((segment >= 0) & (segment < 6))[:, None]
    expected = torch.where(inside, a[segment.clamp(0, 5)] * x, 0)
    kernel = eq.compile(text, target="cpu", prefer=prefer)
    torch.testing.assert_close(kernel(off=off, a=a, x=x), expected)
    assert kernel.certificate.ok
    if prefer == "split_k":
        emitted = eq.compile(text, target="sm_90", prefer="rolling", verify=False)
        tensors = {"off": off, "a": a, "x": x}
        found = interpret(
            emitted.triton, emitted.name, *(tensors[t.name] for t in emitted.program.tensors), sizes={"s": 6}
        )
        assert "search(off_ptr" in emitted.triton
        torch.testing.assert_close(found, expected)


def test_the_gradient_of_segments_searches_them() -> None:
    text = "off: i32[n]\nassert off[s] <= off[s+1]\ny[s] = sum[j](where((off[s] <= j) & (j < off[s+1]), x[j], 0))"
    gradient = eq.compile(eq.grad(text, wrt=("x",)), target="cpu", prefer="rolling")
    assert str(gradient.tile).count("search off") >= 2 and gradient.certificate.ok
    off, dy = torch.tensor([1, 3, 3, 6], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0])
    found = gradient(off=off, dy=dy, sizes={"j": 8})
    assert found.tolist() == [0, 1, 1, 3, 3, 3, 0, 0]


def test_searches_under_vmap() -> None:
    given = sorted_sums()
    kernel = eq.compile(ASCENDING)
    doc = torch.stack([given["doc"], torch.tensor([4, 4, 4, 4, 4, 5, 5], dtype=torch.int32)])
    each = torch.func.vmap(lambda doc: kernel(**{**given, "doc": doc}))(doc)
    torch.testing.assert_close(each, torch.stack([kernel(**{**given, "doc": one}) for one in doc]))


ENDS = {
    "length": "len: i32[b]\ny[b,e] = sum[j](where(j < len[b], w[b,j] * v[j,e], 0))",
    "scalar": "L: i32\ny[b,e] = sum[j](where(j < L, w[b,j] * v[j,e], 0))",
    "ascending": (
        "doc: i32[j]\nassert doc[j] <= doc[j+1]\ny[b,e] = sum[j](where(doc[j] < 3 + b, w[b,j] * v[j,e], 0))"
    ),
}


@pytest.mark.parametrize("native", ["off", "wait"])
@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.slow(but=["length-rolling-off", "ascending-split_k-off"])
@pytest.mark.pairwise
def test_memory_behind_the_longest_row_is_not_even_read(name: str, prefer: str, native: str) -> None:
    """The child that reads it is stopped by a signal: so is one that asks for one position more."""
    if prefer == "resident" and (native == "off" or name == "length"):
        pytest.skip(
            "a whole axis is one tile: of torch, and of rows whose lengths differ, it is read before it is masked"
        )
    rows, room, most = 3, 700, 500
    w, v = torch.randn(rows, room), torch.randn(room, WIDTH)
    guarded = at_the_end_of_memory(v, most * WIDTH * v.element_size())
    kernel = eq.compile(ENDS[name], target="cpu", prefer=prefer, native=native, verify=False)

    def given(last: int) -> dict[str, Any]:
        lengths = torch.tensor([0, 7, last], dtype=torch.int32)
        doc = torch.full((room,), 9, dtype=torch.int32)
        for b, n in reversed(list(enumerate(lengths.tolist()))):
            doc[:n] = 2 + b
        return {"w": w} | {"length": {"len": lengths}, "scalar": {"L": last}, "ascending": {"doc": doc}}[name]

    def run(last: int) -> None:
        found, same = (kernel(v=each, **given(last)) for each in (guarded, v))
        assert torch.equal(found, same)

    kernel(v=v, **given(most))
    assert status_of(lambda: run(most)) == 0
    assert os.WTERMSIG(status_of(lambda: run(most + 1))) == signal.SIGSEGV


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=["scalar-resident"])
@pytest.mark.pairwise("executors")
def test_nothing_outside_is_read_on_a_gpu(name: str, prefer: str) -> None:
    source, make = CASES[name]
    torch.manual_seed(0)
    given, expected, scalars = make(48)
    derived = compiler.derive(source, None, strict_casts=False)
    shapes = {n: tuple(tensor.shape) for n, tensor in given.items()}
    extents = bind(derived.program, shapes, sizes_of(name, given), scalars=scalars)
    compiled = compiler.pipeline(
        derived, extents, program_dtypes(derived.program), device_named("sm_90"), prefer
    )
    module = compiler.emit_triton(derived, compiled, "made")
    tensors = [given[tensor.name] for tensor in derived.program.tensors]
    shards = {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}
    found = interpret(module, "made", *tensors, *scalars.values(), sizes={**extents, **shards})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", ["decode", "scalar", "paged", "packed"])
@pytest.mark.slow(but=["scalar"])
def test_whole_blocks_carry_no_mask(name: str) -> None:
    kernel = eq.compile(CASES[name][0], target="sm_90", prefer="rolling")
    whole = str(kernel.triton).split("complete ones: no masks along it")[1].split("# Blocks of")[0]
    assert "-inf" not in whole and "tl.where" not in whole


def programs_of_the_documentation() -> list[str]:
    text = (Path(__file__).parent.parent / "docs" / "ranges.md").read_text(encoding="utf-8")
    return [part.partition("```")[0] for part in text.split("```eqfuse\n")[1:]]


@pytest.mark.parametrize("source", programs_of_the_documentation())
@pytest.mark.slow(but=["source0", "off: i32"])
def test_the_programs_of_the_documentation_are_cut(source: str) -> None:
    scalars = {"g": 2} if "//g" in source else {}
    if (of_segments := by_key.segments(parse(source, scalars=scalars))) is not None:
        source = show_program(of_segments.program)
    kernel = eq.compile(source, target="cpu", prefer="rolling", scalars=scalars)
    assert kernel.certificate.ok
    text = str(kernel.tile)
    axis = next(axis for axis in ("s", "e_sorted", "j") if f"sum[{axis}]" in source)
    assert f"for {axis} in 0..{axis}_size" not in text and f"..{axis}_high masked" in text
