"""`eqfuse bench ragged`: attention over ranges that data gives, beside FlexAttention with its block mask and torch's own
variable-length attention, in one process.

Prefill packs documents one behind the other (`first[i] <= j <= i`, or `doc[i] == doc[j]` of a sorted `doc`); decode has one query
a sequence and pages of 16 positions. Lengths are drawn log-normal, the same for all. TFLOP/s count what causal attention inside of
each document needs; `of copy` is the part of a copy's bandwidth at which decode reads the keys and values that lengths leave. What
is outside is NaN in decode: pages of nobody, positions behind a length; entries of the page table behind it are numbers of no page.
Prefill is promised that its tensors are finite, which the peers take for granted. Errors are of a few sequences, in float64.
On a CPU all is smaller, and there are no peers.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, recorded
from bench.timing import milliseconds

PAGE = 16
FLEX_BLOCK = 128
TUNED, TUNING_SECONDS = "eqfuse tuned", 25.0
"""What `k.tune` finds in so many seconds, which is no part of the ratio to peers."""
PREFILL = """
    {declared}
    S[h,i,j] = where({range}, sum[d](Q[i,h,d] * K[j,h//g,d]) * scale, -inf)
    P[h,i,j] = exp(S[h,i,j] - max[j](S[h,i,j]))
    O[i,h,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * V[j,h//g,e])
    """
DECODE = """
    page: i32[b,n]
    len: i32[b]
    S[b,h,j] = where(j < len[b], sum[d](Q[b,h,d] * K[page[b,j//16],j%16,h//g,d]) * scale, -inf)
    P[b,h,j] = exp(S[b,h,j] - max[j](S[b,h,j]))
    O[b,h,e] = sum[j](P[b,h,j] / sum[j](P[b,h,j]) * V[page[b,j//16],j%16,h//g,e])
    """
FIRST = PREFILL.format(
    declared="first: i32[i]\n    assert first[i] <= first[i+1]", range="(first[i] <= j) & (j <= i)"
)
SORTED = PREFILL.format(
    declared="doc: i32[j]\n    assert doc[j] <= doc[j+1]", range="(doc[i] == doc[j]) & (j <= i)"
)


@dataclass(frozen=True)
class Cell:
    """`mean` and `most` are of log-normal lengths of `batch` sequences."""

    batch: int
    mean: int
    most: int
    heads: int
    groups: int
    width: int
    text: str
    decode: bool = False

    def small(self) -> Cell:
        return Cell(
            min(self.batch, 8), self.mean // 64, self.most // 64, 8, 4, 32, self.text, decode=self.decode
        )

    def lengths(self) -> torch.Tensor:
        """Whole numbers from 1 to `most`, of about this mean, one of them `most`."""
        spread = 1.0
        drawn = torch.randn(self.batch, generator=torch.Generator().manual_seed(1))
        found = (self.mean * torch.exp(spread * drawn - spread**2 / 2)).round().long().clamp(1, self.most)
        found[self.batch // 2] = self.most
        return found


CELLS: Mapping[str, Cell] = {
    "decode": Cell(64, 4096, 65536, 64, 8, 128, DECODE, decode=True),
    "prefill first": Cell(64, 4096, 65536, 64, 8, 128, FIRST),
    "prefill doc": Cell(64, 4096, 65536, 64, 8, 128, SORTED),
    "prefill short": Cell(16, 2048, 4096, 16, 1, 128, FIRST),
}
NAMES = tuple(CELLS)

TITLE = "Ranges from data, lengths log-normal"


def _numbers(kind: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: " ".join(f"{name} {value:.3g}" for name, value in row.get(kind, {}).items())


COLUMNS = (
    Column("cell", lambda row: str(row["cell"])),
    Column("tokens", lambda row: str(row["tokens"])),
    Column("longest", lambda row: str(row["longest"])),
    Column("ms", _numbers("ms")),
    Column("TFLOP/s", _numbers("tflops")),
    Column("of copy", _numbers("of_copy")),
    Column("of best peer", lambda row: f"{row['ratio']:.2f}" if "ratio" in row else ""),
    Column("error", lambda row: f"{row['error']:.1e}"),
    Column("plan", lambda row: str(row["plan"])),
)


def run(options: Options, report: Report) -> None:
    """Failures: a cell that does not run, or is wrong."""
    for name in chosen_names(options.only, NAMES):
        cell = CELLS[name] if options.device == "cuda" and not options.small else CELLS[name].small()
        with recorded(report.failing(name)):
            measure(name, cell, options.device, report)
        if options.device == "cuda":
            with recorded(report.failing(f"{name}, afterwards")):
                torch.cuda.empty_cache()


def measure(name: str, cell: Cell, device: str, report: Report) -> None:
    """Adds a row of milliseconds and what they amount to, and of eqfuse's error; it is written after each peer, for one that fails
    on a GPU may end the process."""
    torch.manual_seed(0)
    given, lengths = (_paged if cell.decode else _packed)(cell, device)
    kernel = eq.compile(cell.text, scalars={"g": cell.groups}, native="wait", assume_finite=not cell.decode)
    sizes = {"j": given["page"].shape[1] * PAGE} if cell.decode else None

    def ours() -> Any:
        return kernel(**given, sizes=sizes)

    started = time.perf_counter()
    error, plan = _error(cell, given, lengths, ours()), kernel.plan
    row: dict[str, Any] = {
        "cell": name,
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "error": error,
        "tolerance": 1e-5 if device == "cpu" else 1e-2,
        "first_s": time.perf_counter() - started,
        "plan": f"{plan.schedule}, {plan.shards} shards" if plan.shards > 1 else plan.schedule,
        "evened": plan.evened,
        "code": plan.code,
        "configs": _configs(kernel),
        "predicted_ms": 1e3 * plan.cost.seconds if plan.cost else None,
        "ms": {},
        "problems": {},
    }
    report.add(row)
    if not error <= row["tolerance"]:
        report.failures.append(f"{name}: error {error:.1e}")
    _timed(row, "eqfuse", ours, cell, given, lengths, device)
    report.write()
    if device != "cuda":
        return

    def tuned(*_: Any) -> Callable[[], Any]:
        row["tuning"] = str(kernel.tune(**given, sizes=sizes, seconds=TUNING_SECONDS))
        row["tuned"] = _configs(kernel)
        return ours

    for peer, make in (
        ("varlen", _varlen),
        (TUNED, tuned),
        ("flex", _flex),
    ):  # one that fails on the GPU fails for all after it
        with recorded(partial(row["problems"].__setitem__, peer)):
            _timed(row, peer, make(cell, given, lengths), cell, given, lengths, device)
        report.write()


def _configs(kernel: eq.Kernel) -> list[str]:
    """Blocks, warps and stages of each kernel, and shards."""
    plan = kernel.plan
    kernels = [
        f"{', '.join(f'{b.axis} {b.size or b.kind}' for b in config.blocks)}: {config.warps} warps, {config.stages} stages"
        for config in plan.configs
    ]
    return [f"{plan.schedule}, {plan.shards} shards", *kernels]


def _timed(
    row: dict[str, Any],
    name: str,
    call: Callable[[], Any],
    cell: Cell,
    given: Mapping[str, Any],
    lengths: torch.Tensor,
    device: str,
) -> None:
    """Notes what a call takes, and the rate that this is."""
    row["ms"][name] = ms = milliseconds(call, device)
    if cell.decode:
        row.setdefault("copy", _copied(device))
        row.setdefault("of_copy", {})[name] = _bytes(cell, given) / (ms * 1e-3) / row["copy"]
    else:
        row.setdefault("tflops", {})[name] = _flops(cell, lengths) / ms / 1e9
    if peers := [each for peer, each in row["ms"].items() if not peer.startswith("eqfuse")]:
        row["ratio"] = min(peers) / row["ms"]["eqfuse"]


def _flops(cell: Cell, lengths: torch.Tensor) -> float:
    pairs = lengths.double() if cell.decode else lengths.double() ** 2 / 2
    return float(4 * cell.heads * cell.width * pairs.sum())


def _bytes(cell: Cell, given: Mapping[str, Any]) -> float:
    """What a decode has to move: keys and values of each length, queries and outputs."""
    rows = int(given["len"].sum()) * cell.heads // cell.groups * 2 + 2 * given["Q"].shape[0] * cell.heads
    return float(rows * cell.width * given["K"].element_size())


# -- inputs ---------------------------------------------------------------------------------------------


def _kind(device: str) -> dict[str, Any]:
    return {"device": device, "dtype": torch.float16 if device == "cuda" else torch.float32}


def _packed(cell: Cell, device: str) -> tuple[dict[str, Any], torch.Tensor]:
    lengths, kind = cell.lengths(), _kind(device)
    tokens, shared = int(lengths.sum()), cell.heads // cell.groups
    q = torch.randn(tokens, cell.heads, cell.width, **kind)
    k, v = (torch.randn(tokens, shared, cell.width, **kind) for _ in range(2))
    doc = torch.repeat_interleave(torch.arange(cell.batch), lengths)
    starts = lengths.cumsum(0) - lengths
    given = {"Q": q, "K": k, "V": v, "scale": cell.width**-0.5}
    if "doc[" in cell.text:
        given["doc"] = doc.to(device, torch.int32)
    else:
        given["first"] = starts[doc].to(device, torch.int32)
    return given, lengths


def _paged(cell: Cell, device: str) -> tuple[dict[str, Any], torch.Tensor]:
    lengths, kind = cell.lengths(), _kind(device)
    shared, counts = cell.heads // cell.groups, (lengths + PAGE - 1) // PAGE
    pages = int(counts.sum()) + cell.batch
    order = torch.randperm(pages)
    table = torch.full((cell.batch, int(counts.max())), 1 << 30, dtype=torch.int32)
    q = torch.randn(cell.batch, cell.heads, cell.width, **kind)
    k, v = (torch.full((pages, PAGE, shared, cell.width), math.nan, **kind) for _ in range(2))
    used = 0
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        mine = order[used : used + count]
        used += count
        table[row, :count] = mine.int()
        for each in (k, v):
            drawn = torch.full((count * PAGE, shared, cell.width), math.nan, **kind)
            drawn[:length] = torch.randn(length, shared, cell.width, **kind)
            each[mine.to(device)] = drawn.view(count, PAGE, shared, cell.width)
    numbers = {"page": table.to(device), "len": lengths.to(device, torch.int32)}
    return {"Q": q, "K": k, "V": v, **numbers, "scale": cell.width**-0.5}, lengths


def _sequence(cell: Cell, given: Mapping[str, Any], lengths: torch.Tensor, row: int) -> list[torch.Tensor]:
    """Keys and values of one sequence, (positions, heads, width)."""
    length, start = int(lengths[row]), int(lengths[:row].sum())
    if not cell.decode:
        return [given[name][start : start + length] for name in ("K", "V")]
    pages = given["page"][row, : -(-length // PAGE)].long()
    return [given[name][pages].flatten(0, 1)[:length] for name in ("K", "V")]


def _error(cell: Cell, given: Mapping[str, Any], lengths: torch.Tensor, found: torch.Tensor) -> float:
    """The worst relative error of three sequences (the shortest, the longest, one between); of prefill, of their last
    queries. Infinite where any number of the output is not finite."""
    order, worst = lengths.argsort(), 0.0
    for row in {int(order[at]) for at in (0, len(order) // 2, -1)}:
        keys, values = _sequence(cell, given, lengths, row)
        stop = int(lengths[: row + 1].sum())
        last = slice(row, row + 1) if cell.decode else slice(stop - 1, stop)
        q = given["Q"][last].double()[0]
        k, v = (each.double().repeat_interleave(cell.groups, 1) for each in (keys, values))
        scores = torch.einsum("hd,jhd->hj", q, k) * given["scale"]
        exact = torch.einsum("hj,jhe->he", scores.softmax(-1), v)
        worst = max(worst, float((found[last][0].double() - exact).norm() / exact.norm()))
        worst = math.inf if math.isnan(worst) else worst
    return worst if bool(torch.isfinite(found).all()) else math.inf


# -- peers ----------------------------------------------------------------------------------------------


def _varlen(cell: Cell, given: Mapping[str, Any], lengths: torch.Tensor) -> Callable[[], Any]:
    """torch's attention over sequences one behind the other; of decode, keys and values laid out so beforehand."""
    from torch.nn.attention.varlen import varlen_attn

    device = given["Q"].device
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(device, torch.int32)
    k, v = given["K"], given["V"]
    if cell.decode:
        parts = [_sequence(cell, given, lengths, row) for row in range(cell.batch)]
        k, v = (torch.cat([part[n] for part in parts]) for n in range(2))
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": given["scale"]} if "scale" in known else {}
    if not cell.decode:
        options |= {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if cell.groups > 1:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        elif k.shape[1] != cell.heads and not cell.decode:
            k, v = (each.repeat_interleave(cell.groups, 1) for each in (k, v))
    queries = torch.arange(cell.batch + 1, device=device, dtype=torch.int32) if cell.decode else ends
    longest = int(lengths.max())
    return lambda: varlen_attn(
        given["Q"], k, v, queries, ends, 1 if cell.decode else longest, longest, **options
    )


def _flex(cell: Cell, given: Mapping[str, Any], lengths: torch.Tensor) -> Callable[[], Any]:
    """FlexAttention over the same documents; of decode, over sequences that begin at multiples of its blocks, each with
    the list of its own blocks."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    torch._dynamo.reset()
    device = given["Q"].device
    compiled = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = {"scale": given["scale"], "enable_gqa": cell.groups > 1}
    if not cell.decode:
        doc = torch.repeat_interleave(torch.arange(cell.batch), lengths).to(device)
        tokens = len(doc)

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (doc[i] == doc[j])

        mask = torch.compile(create_block_mask)(visible, None, None, tokens, tokens, device=str(device))
        q, k, v = (given[name].transpose(0, 1)[None].contiguous() for name in ("Q", "K", "V"))
        return lambda: compiled(q, k, v, block_mask=mask, **options)
    counts = (lengths + FLEX_BLOCK - 1) // FLEX_BLOCK
    starts = counts.cumsum(0) - counts
    total = int(counts.sum()) * FLEX_BLOCK
    shared = cell.heads // cell.groups
    k, v = (torch.zeros(1, shared, total, cell.width, **_kind(device.type)) for _ in range(2))
    for row in range(cell.batch):
        at = int(starts[row]) * FLEX_BLOCK
        for each, part in zip((k, v), _sequence(cell, given, lengths, row), strict=True):
            each[0, :, at : at + int(lengths[row])] = part.transpose(0, 1)
    every = total // FLEX_BLOCK  # as long as the list of all blocks: the mask is made dense along it
    blocks = (starts[:, None] + torch.arange(every)).clamp(max=every - 1)
    owner = torch.full((total,), -1, dtype=torch.int32)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        owner[start * FLEX_BLOCK : start * FLEX_BLOCK + length] = row
    owner = owner.to(device)

    def inside(b: Any, h: Any, i: Any, j: Any) -> Any:
        return owner[j.clamp(0, total - 1)] == b  # positions are looked up before they are cut off

    mask = BlockMask.from_kv_blocks(
        counts[:, None, None].to(device, torch.int32),
        blocks[:, None, None].to(device, torch.int32),
        BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK),
        mask_mod=inside,
        seq_lengths=(1, total),
    )
    q = given["Q"][:, :, None].contiguous()
    return lambda: compiled(q, k, v, block_mask=mask, **options)


# -- times ----------------------------------------------------------------------------------------------


def _copied(device: str) -> float:
    """Bytes a second of a copy, those read and those written."""
    source = torch.empty((1 << 30) if device == "cuda" else (1 << 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source), device) * 1e-3)
