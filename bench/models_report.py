"""`eqfuse bench models`: prefill time and tokens a second of decoders with random weights: eager, torch.compile, the back end.

On a GPU the shapes of SmolLM2 135M and of Llama 3 8B in bfloat16, prompts of 4096 tokens and 512 tokens behind them, 1 and 16
at once; on a CPU a tiny one. Attention is torch's `scaled_dot_product_attention` everywhere. A layer is compiled once, for
all of them. The compiled ways decode in a CUDA graph, eager as it is called. All ways are made first, and then timed in turn, for what
the host is busy with besides changes in between: medians. The host's time is until a call comes back, with kernels still running; where it
is nearly all of it, the host is what is timed. Logits behind the prompt and the token after it are compared with eager's: the error is
relative, root mean square. On the CPU, every region that compiles is taken once more, whatever it is predicted to gain.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import eqfuse as eq
from bench.decoder import SHAPES, Decoder
from bench.report import Column, Options, Report, chosen_names, geometric_mean, in_one_line, one_line, shown
from bench.timing import seconds_of
from eqfuse.measure import rms_error, synchronize
from eqfuse.torch.backend import eqfuse as backend

TITLE = "Decoders with random weights"
COLUMNS = (
    Column("model", lambda row: str(row["model"])),
    Column("batch", lambda row: str(row["batch"])),
    Column("way", lambda row: str(row["way"])),
    Column("prefill ms", lambda row: shown(row, "prefill_ms", ".2f")),
    Column("host ms", lambda row: shown(row, "prefill_host_ms", ".2f")),
    Column("token ms", lambda row: shown(row, "token_ms", ".3f")),
    Column("tokens/s", lambda row: shown(row, "tokens_per_second", ".1f")),
    Column("called ms", lambda row: shown(row, "called_ms", ".3f")),
    Column("error", lambda row: shown(row, "error", ".1e")),
    Column("compile s", lambda row: shown(row, "compile_seconds", ".0f")),
    Column("", lambda row: str(row.get("failed", ""))),
)
LONGEST = 5.0
"""Seconds after which no more tokens are made: eager is slow enough to be timed by fewer."""
ROUNDS = 7
"""How often each way is timed."""
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Above it a way fails: logits of random weights behind many layers, beside eager's of the same dtype."""


def run(options: Options, report: Report) -> None:
    """Failures: a way that does not run, and logits that are other ones. With `--seconds`, no way begins later."""
    on_gpu = options.device.startswith("cuda")
    prompt, tokens = (4096, 512) if on_gpu and not options.small else (24, 6)
    for name, batches in _chosen(options.only, on_gpu).items():
        torch.manual_seed(options.seed)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        with torch.device(options.device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                model = Decoder(SHAPES[name]).eval()
            finally:
                torch.set_default_dtype(before)
        for batch in batches:
            ids = torch.randint(0, SHAPES[name].vocabulary, (batch, prompt), device=options.device)
            rows, ready = _made(model, ids, prompt + tokens, options, dtype, report, (name, batch))
            _time(rows, ready, tokens)
            for row in rows:
                report.add(row)
                print(in_one_line(row, COLUMNS), flush=True)
            if len(rows) < len(list(_ways(options))):
                return _compare(report)
    _compare(report)


Row = dict[str, Any]


def _made(
    model: Decoder,
    ids: Tensor,
    room: int,
    options: Options,
    dtype: torch.dtype,
    report: Report,
    cell: tuple[str, int],
) -> tuple[list[Row], dict[str, Ready]]:
    """A row for each way that was begun in time, and those that run."""
    rows: list[Row] = []
    ready: dict[str, Ready] = {}
    expected: tuple[Tensor, ...] | None = None
    torch._dynamo.reset()
    model.cached(len(ids), room)
    for way, compiler in _ways(options):
        if report.is_late(options, f"{cell[0]}, batch {cell[1]}, {way}"):
            break
        row: Row = {"model": cell[0], "batch": cell[1], "way": way}
        rows.append(row)
        try:
            with torch.no_grad():
                found, logits = _compiled(model, ids, way, compiler)
        except Exception as error:  # noqa: BLE001  a way that breaks is a row of the report
            row["failed"] = one_line(error)[:300]
            report.failures.append(f"{cell[0]} {cell[1]} {way}: {row['failed']}")
        else:
            ready[way] = found
            row["compile_seconds"] = found.compiling
            expected = expected or logits
            row["error"] = max(map(rms_error, logits, expected))
            if not row["error"] <= ERRORS[dtype]:
                report.failures.append(f"{cell[0]} {cell[1]} {way}: logits are off by {row['error']:.1e}")
        if way.startswith("eqfuse"):
            row["regions"] = str(eq.torch.report(measure=False, reset=True))
            print(row["regions"], flush=True)
    return rows, ready


def _chosen(only: str | None, on_gpu: bool) -> dict[str, list[int]]:
    """The batches of every model that is run; `--only llama3_8b_batch16` takes one of them."""
    models, batches = (("llama3_8b", "smollm2"), (1, 16)) if on_gpu else (("tiny",), (1, 3))
    cells = {f"{name}_batch{batch:02}": (name, batch) for name in models for batch in batches}
    found: dict[str, list[int]] = {}
    for cell in chosen_names(only, list(cells)):
        found.setdefault(cells[cell][0], []).append(cells[cell][1])
    return found


def _compare(report: Report) -> None:
    for what in ("prefill_ms", "token_ms"):
        for way in ("eqfuse", "eqfuse, all"):
            if ratios := report.ratios(what, "torch.compile", way, "model", "batch"):
                report.summary.append(
                    f"{what}: {way} {geometric_mean(ratios):.3f} of torch.compile, {len(ratios)} cells"
                )


def _ways(options: Options) -> Iterator[tuple[str, Callable[..., Any] | None]]:
    yield "eager", None
    if options.torch_compile:
        yield "torch.compile", partial(torch.compile, dynamic=False)
    rest = {"rest": "inductor" if options.torch_compile else "aot_eager"}
    takes = {"eqfuse": "predicted", "eqfuse, all": "always"}
    for way, take in [*takes.items()][: 1 if options.device.startswith("cuda") else 2]:
        yield way, partial(torch.compile, dynamic=False, backend=backend, options={**rest, "take": take})


@dataclass(frozen=True)
class Ready:
    """A way that has run: what computes the logits behind the prompt, those of a token, as it is called and as fast as it goes, and
    where the token's place is written."""

    prefill: Callable[[], object]
    step: Callable[[], object]
    replay: Callable[[], object]
    place: Tensor
    compiling: float


def _compiled(
    model: Decoder, ids: Tensor, way: str, compiler: Callable[..., Any] | None
) -> tuple[Ready, tuple[Tensor, ...]]:
    """One way, and the logits behind the prompt and behind the token after it."""
    model.compiled(compiler or (lambda function: function))
    run_layer, run_head = model.run_layer, model.run_head
    device, prompt = ids.device, ids.shape[1]
    at = torch.arange(prompt, device=device)
    token, place = ids[:, -1:].clone(), torch.tensor([prompt], device=device)

    def run(ids: Tensor, at: Tensor) -> Tensor:
        model.run_layer, model.run_head = run_layer, run_head
        found: Tensor = model(ids, at)
        return found

    def step() -> Tensor:
        return run(token, place)

    start = time.perf_counter()
    first = run(ids, at)
    step()
    synchronize(device.type)
    compiling = time.perf_counter() - start
    replay: Callable[[], object] = step
    last = None
    if device.type == "cuda" and way != "eager":
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            last = step()
        replay = graph.replay
    made = replay()
    end = last if last is not None else made
    assert isinstance(end, Tensor)
    logits = first.float(), end.float().clone()
    return Ready(lambda: run(ids, at), step, replay, place, compiling), logits


def _time(rows: Sequence[Row], ready: Mapping[str, Ready], tokens: int) -> None:
    """Adds times, taken in turn, to the rows of the ways that run."""
    found: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in ready}
    with torch.no_grad():
        for number in range(ROUNDS + 1):
            for way, each in ready.items():
                for what, call in (("prefill", each.prefill), ("called", each.step)):
                    host, whole = seconds_of(call, each.place.device.type)
                    if number:  # the first calls may have something to make
                        found[way][what].append(whole)
                        found[way][f"{what}_host"].append(host)
        for row in rows:
            if (way := row["way"]) not in ready:
                continue
            row |= {f"{what}_ms": 1e3 * statistics.median(times) for what, times in found[way].items()}
            each = ready[way]
            prompt = int(each.place)
            synchronize(each.place.device.type)
            start, count = time.perf_counter(), 0
            while count < tokens and (count % 32 or time.perf_counter() - start < LONGEST):
                each.place.fill_(prompt + count)
                each.replay()
                count += 1
            synchronize(each.place.device.type)
            seconds = time.perf_counter() - start
            each.place.fill_(prompt)
            row |= {
                "token_ms": 1e3 * seconds / count,
                "tokens_per_second": count * row["batch"] / seconds,
                "tokens": count,
            }
