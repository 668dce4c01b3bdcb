"""Checks and times a bundle of attention kernels beside torch's libraries and compilers.

python -m bench.attention FOLDER --output FILE.json [--only gqa_decode] [--seconds 400]

Needs a GPU with torch and triton alone; `bench.attention_bundle` makes the bundle. Times are medians of
replays of CUDA graphs, over fresh random inputs: over several sets in turn where one would stay in
the cache. Every result is compared with float64 in the same run. With --interpret, kernels run
in Triton's interpreter on the CPU: results are checked, times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from bench import peers
from bench.attention_cells import Cell, grid
from bench.gpu import TOLERANCE, load
from bench.report import installed, one_line
from eqfuse.tile.launch import interpret

CACHE = 64e6
"""Bytes of a cache that inputs must exceed fourfold, so that replays read them from memory."""

MOST_SETS = 32
REPLAYED_MS = 30.0
"""Milliseconds of replays per timing; at least three replays."""
GRAPH_MS = 0.5
"""Milliseconds of launches in one graph, about."""
SLOW_MS = 200.0
"""Milliseconds above which a call is not captured and replayed: its launch does not count."""
HOST_CALLS = 64

EXACT_BYTES = 1 << 30
"""Bytes of float64 scores that the reference keeps at once."""

LARGE_SCORES = 1e9
LARGE_AT_ONCE = 2
"""How many processes may run a plain expression with scores above LARGE_SCORES bytes while compiling."""

COMPILING_SHARE = 0.5
"""Part of the time limit after which nothing more is compiled."""
COMPILING_GRACE = 15.0
"""Seconds for what is being compiled then."""

OUTPUT = "O"
"""What the operators call their output."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median of the replays, and the tenths of them that were faster and slower."""

    ms: float
    low_ms: float
    high_ms: float

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        ordered = sorted(samples)
        tenth = len(ordered) // 10
        return Timing(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth])


@dataclass(frozen=True)
class Loaded:
    """A function of an emitted module; dtype and axes of the module's tensors."""

    function: Callable[..., Any]
    tensors: Mapping[str, tuple[torch.dtype, tuple[str, ...]]]


class Place(Protocol):
    """Where kernels run."""

    device: str

    def load(self, path: Path, name: str) -> Loaded:
        """Function `name` of an emitted module."""
        ...

    def sets(self, cell: Cell) -> int:
        """How many sets of inputs exceed the cache."""
        ...

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        """The time of one call; the calls differ in their inputs only."""
        ...

    def details(self, call: Call) -> dict[str, Any]:
        """What the kernels of a variant take."""
        ...

    def call_costs(self, call: Call, cell: Cell, inputs: peers.Inputs) -> dict[str, Any]:
        """What a call costs beside the kernels' time."""
        ...

    def finish(self) -> None:
        """Waits for what was launched, and gives unused memory back."""
        ...


class Gpu:
    device = "cuda"

    def load(self, path: Path, name: str) -> Loaded:
        module = load(path)
        return Loaded(getattr(module, name), module.TENSORS)

    def sets(self, cell: Cell) -> int:
        return max(1, min(MOST_SETS, math.ceil(4 * CACHE / cell.bytes)))

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            once = min(_elapsed(call) for call in itertools.islice(itertools.cycle(calls), 3))
        torch.cuda.synchronize()
        if once > SLOW_MS:
            return Timing.of([once])
        launches = len(calls) * max(1, round(GRAPH_MS / max(once, 1e-3) / len(calls)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in itertools.islice(itertools.cycle(calls), launches):
                call()
        graph.replay()
        replay = _elapsed(graph.replay)
        count = max(3, min(100, round(REPLAYED_MS / replay)))
        return Timing.of([_elapsed(graph.replay) / launches for _ in range(count)])

    def details(self, call: Call) -> dict[str, Any]:
        return {"resources": resources(call.function)}

    def call_costs(self, call: Call, cell: Cell, inputs: peers.Inputs) -> dict[str, Any]:
        return {
            "allocations": allocations(lambda: call(inputs)),
            "host_us": host_times(call, cell, inputs),
        }

    def finish(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Interpreted:
    """Results are right and times mean nothing."""

    device = "cpu"

    def load(self, path: Path, name: str) -> Loaded:
        source = path.read_text(encoding="utf-8")
        return Loaded(lambda **arguments: interpret(source, name, **arguments), load(path).TENSORS)

    def sets(self, cell: Cell) -> int:
        return 1

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        start = time.perf_counter()
        calls[0]()
        return Timing.of([1e3 * (time.perf_counter() - start)])

    def details(self, call: Call) -> dict[str, Any]:
        return {}

    def call_costs(self, call: Call, cell: Cell, inputs: peers.Inputs) -> dict[str, Any]:
        return {}

    def finish(self) -> None:
        pass


def _elapsed(run: Callable[[], object]) -> float:
    """Milliseconds of device time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def exact(cell: Cell, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The cell's output in float64, a block of queries of one head of keys at a time.

    Where queries see no later keys, those are left out: the last query of a block stands at the end of its keys.
    """
    case, workload = cell.case, cell.workload
    sizes = case.sizes
    group = sizes["h"] // sizes["k"]
    rows = max(1, min(sizes["i"], EXACT_BYTES // (8 * group * sizes["j"])))
    out = inputs["Q"].new_empty((*inputs["Q"].shape[:-1], sizes["e"]), dtype=torch.float64)
    for b, k, first in itertools.product(range(sizes["b"]), range(sizes["k"]), range(0, sizes["i"], rows)):
        last = min(first + rows, sizes["i"])
        part = {"b": slice(b, b + 1), "h": slice(k * group, (k + 1) * group), "i": slice(first, last)}
        part |= {"k": slice(k, k + 1), "j": slice(0, last if cell.is_causal else sizes["j"])}
        some = {
            name: tensor[tuple(part.get(axis, slice(None)) for axis in workload.tensors[name].axes)]
            for name, tensor in inputs.items()
        }
        (found,) = workload.run_exact(case, some)
        axes = workload.tensors["Q"].axes[:-1]
        out[tuple(part[axis] for axis in axes)] = found
    return out


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative rms error; NaN where a value is."""
    return float((found.double() - reference).norm() / reference.norm())


@dataclass(frozen=True)
class Call:
    """A variant with its output and its temporaries, all of them given by the caller."""

    function: Callable[..., Any]
    cell: Cell
    entry: Mapping[str, Any]
    out: torch.Tensor
    workspace: Mapping[str, torch.Tensor]

    @staticmethod
    def of(loaded: Loaded, cell: Cell, entry: Mapping[str, Any], device: str) -> Call:
        """With an output and temporaries that hold NaN."""
        made = {
            name: torch.full(
                tuple(entry["sizes"][axis] for axis in axes), torch.nan, dtype=dtype, device=device
            )
            for name, (dtype, axes) in loaded.tensors.items()
            if name not in cell.workload.tensors
        }
        return Call(loaded.function, cell, entry, made.pop(OUTPUT), made)

    def __call__(self, inputs: peers.Inputs) -> torch.Tensor:
        """Q, K, V to the output, which is the same tensor at every call."""
        more = {"workspace": self.workspace} if self.workspace else {}
        self.function(**inputs, **self.cell.case.scalars, out=self.out, sizes=self.entry["sizes"], **more)
        return self.out


@dataclass
class Bench:
    """The cells of one process: all their kernels are compiled before the first is timed."""

    place: Place
    folder: Path
    cells: Mapping[str, tuple[Cell, Sequence[Mapping[str, Any]]]]
    with_peers: bool = True
    large: AbstractContextManager[Any] = field(default_factory=nullcontext)
    deadline: float = math.inf
    _loaded: dict[tuple[str, int], Loaded] = field(default_factory=dict)
    _peers: dict[tuple[str, str], peers.Run] = field(default_factory=dict)
    _about: dict[tuple[str, int | str], dict[str, Any]] = field(default_factory=dict)

    def compile(self) -> None:
        """Runs every variant and every peer once. What is not begun before the deadline is left out."""
        for name, (cell, entries) in self.cells.items():
            generator = torch.Generator(self.place.device)
            generator.seed()
            inputs = cell.draw(generator)
            for number, entry in enumerate(entries):
                with self._noted(name, number):
                    loaded = self.place.load(self.folder / entry["file"], entry["function"])
                    Call.of(loaded, cell, entry, self.place.device)(inputs)
                    self._loaded[name, number] = loaded
            for peer in peers.of(cell) if self.with_peers else ():
                with self._noted(name, peer.name) as about:
                    run, before = peer.make(inputs), peers.pattern_matches()
                    with self.large if peers.score_bytes(cell) > LARGE_SCORES else nullcontext():
                        run(inputs)
                        self.place.finish()
                    about["matched"] = peers.pattern_matches() > before
                    self._peers[name, peer.name] = run

    @contextmanager
    def _noted(self, cell: str, what: int | str) -> Iterator[dict[str, Any]]:
        """Notes how long compiling takes, or why it fails."""
        about = self._about[cell, what] = {}
        started = time.monotonic()
        try:
            if started > self.deadline:
                raise TimeoutError("not compiled in time")
            yield about
            self.place.finish()
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this kernel's result)
            about["problem"] = one_line(error)[:300]
        about["compile_seconds"] = round(time.monotonic() - started, 2)

    def measure(self, name: str) -> dict[str, Any]:
        """One row: every variant and every peer of a cell, on fresh random inputs."""
        cell, entries = self.cells[name]
        started = time.monotonic()
        generator = torch.Generator(self.place.device)
        generator.seed()
        sets = self.place.sets(cell)
        inputs = [cell.draw(generator) for _ in range(sets)]
        reference = exact(cell, inputs[0])
        row: dict[str, Any] = {
            **asdict(cell),
            "bytes": cell.bytes,
            "flops": cell.flops,
            "input_sets": sets,
            "variants": [],
            "peers": {},
        }

        def timed(run: peers.Run) -> dict[str, Any]:
            error = distance(run(inputs[0]), reference)
            timing = self.place.time([partial(run, some) for some in inputs])
            return {**asdict(timing), "error": error, "agrees": error <= TOLERANCE["f16"]}

        for number, entry in enumerate(entries):
            found: dict[str, Any] = {k: v for k, v in entry.items() if k not in ("file", "function", "sizes")}
            found |= self._about[name, number]
            if "problem" not in found:
                with noted(found):
                    call = Call.of(self._loaded[name, number], cell, entry, self.place.device)
                    found |= timed(call) | self.place.details(call)
                    if number == 0:
                        row |= self.place.call_costs(call, cell, inputs[0])
            row["variants"].append(found)
        for peer in peers.of(cell) if self.with_peers else ():
            about = {"kind": peer.kind, **self._about[name, peer.name]}
            if "problem" not in about:
                with noted(about):
                    about |= timed(self._peers[name, peer.name])
            row["peers"][peer.name] = about
        row["seconds"] = round(time.monotonic() - started, 1)
        return row


@contextmanager
def noted(found: dict[str, Any]) -> Iterator[None]:
    """An error is the result of what was run: `problem`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (a library may refuse a shape in any way)
        found["problem"] = one_line(error)[:300]


def resources(function: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """What each kernel of the function's module took when it was last compiled."""
    module = function.__globals__
    found: dict[str, dict[str, Any]] = {}
    for name in module["SIGNATURES"]:
        kernels = list(module[name].device_caches[torch.cuda.current_device()][0].values())
        if kernels:
            kernel = kernels[-1]
            found[name] = {
                "registers": kernel.n_regs,
                "spilled_bytes": kernel.n_spills,
                "shared_bytes": kernel.metadata.shared,
                "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
            }
    return found


def allocations(run: Callable[[], object]) -> int:
    """How often a call asks torch for device memory."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def host_times(call: Call, cell: Cell, inputs: peers.Inputs) -> dict[str, float]:
    """Microseconds that the host spends on one call, beside torch's scaled_dot_product_attention on the same
    tensors; the device is idle before each batch of calls and its queue never full."""
    beside = peers.sdpa(cell)
    return {
        name: 1e6 * statistics.median(_host_seconds(run) for _ in range(9))
        for name, run in (("eqfuse", lambda: call(inputs)), ("sdpa", lambda: beside(inputs)))
    }


def _host_seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / HOST_CALLS


def ceilings(place: Place) -> dict[str, float]:
    """Rates of this device in this run: a copy's bytes per second, read and written ones counted, and the
    operations per second of a float16 matrix product; both on random data.

    A captured copy may go to a copy engine, which is slower than a kernel: the faster of both counts.
    """
    length, rows = (1 << 29, 8192) if place.device == "cuda" else (1 << 18, 128)
    source = torch.randn(length, device=place.device)
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    copy_ms = min(place.time([copy]).ms for copy in copies)
    a, b = (torch.randn(rows, rows, device=place.device).half() for _ in range(2))
    product = place.time([lambda: a @ b])
    return {
        "copy_bytes_per_second": 2e3 * source.nbytes / copy_ms,
        "matrix_flops_per_second": 2e3 * rows**3 / product.ms,
    }


# --- several processes -------------------------------------------------------------------------------


class Worker:
    """A process with some of the cells. It compiles beside the others; it measures when it is asked to, and
    only one is asked at a time."""

    def __init__(self, bench: Bench) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(bench, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        """The next thing that it sends. Raises EOFError where it has died and TimeoutError where it is late."""
        if not self._pipe.poll(max(0.0, seconds)):
            raise TimeoutError("no answer in time")
        return self._pipe.recv()

    def ask(self, question: str, seconds: float) -> Any:
        self._pipe.send(question)
        return self.answer(seconds)

    def end(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(ENDING_SECONDS)
        self._process.terminate()


CEILINGS = "ceilings"
ENDING_SECONDS = 5.0
"""How long a process may take to end by itself."""


def _serve(bench: Bench, pipe: Connection) -> None:
    # A worker is one of several that fill the machine, and compiles in its own process alone.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a library that refuses a shape says so many times
    bench.compile()
    pipe.send("ready")
    while (question := pipe.recv()) is not None:
        answer = ceilings(bench.place) if question == CEILINGS else bench.measure(question)
        bench.place.finish()
        pipe.send(answer)


def run_cells(
    place: Place,
    folder: Path,
    cells: Sequence[tuple[Cell, Sequence[Mapping[str, Any]]]],
    content: dict[str, Any],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """The rows, as they are measured; `content` gets what concerns all of them."""
    started = time.monotonic()
    end = started + options.seconds
    large = multiprocessing.get_context("spawn").Semaphore(LARGE_AT_ONCE)
    count = min(options.processes, len(cells))
    deadline = started + COMPILING_SHARE * options.seconds
    owners: dict[str, Worker] = {}
    workers: list[Worker] = []
    for part in range(count):
        mine = {cell.name: (cell, entries) for cell, entries in cells[part::count]}
        bench = Bench(place, folder, mine, options.peers, large, deadline)
        workers.append(Worker(bench))
        owners |= dict.fromkeys(mine, workers[-1])
    ready: list[Worker] = []
    for worker in workers:
        with suppress(TimeoutError, EOFError):
            worker.answer(deadline + COMPILING_GRACE - time.monotonic())
            ready.append(worker)
    content["compile_seconds"] = round(time.monotonic() - started, 1)
    print(f"{len(ready)} of {count} processes ready in {content['compile_seconds']} s", flush=True)
    if not ready:
        raise RuntimeError("every process ended while it compiled; its error is above")
    content["ceilings"] = ready[0].ask(CEILINGS, 60)
    print(content["ceilings"], flush=True)
    for cell, _ in cells:
        worker = owners[cell.name]
        try:
            if worker not in ready:
                raise TimeoutError("its process has ended or was too late")
            yield worker.ask(cell.name, end - time.monotonic())
        except (TimeoutError, EOFError, OSError) as error:
            if worker in ready:
                ready.remove(worker)
            content.setdefault("not_measured", {})[cell.name] = one_line(error)
            if time.monotonic() > end:
                break
    for worker in workers:
        worker.end()


def environment() -> dict[str, Any]:
    """Versions, the device and the date of the run."""
    about: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": installed("triton"),
        "device": "cpu",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cache_bytes": properties.L2_cache_size,
        }
    return about


def shown(row: Mapping[str, Any]) -> str:
    """A row as one line of the log."""
    cell = Cell(row["operator"], row["length"], row["batch"])
    times = [v.get("ms", math.inf) if v.get("agrees") else math.inf for v in row["variants"]]
    parts = [f"{name} {peer['ms']:.4f}" for name, peer in row["peers"].items() if "ms" in peer]
    best = min(range(len(times)), key=times.__getitem__)
    return f"{cell.name}: zero-tune {times[0]:.4f} ms, best {times[best]:.4f} (v{best}); {', '.join(parts)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default=None, help="operators that start with one of these words")
    parser.add_argument("--lengths", default=None, help="comma-separated; default: those of the bundle")
    parser.add_argument("--seconds", type=float, default=3600, help="stop after this long")
    parser.add_argument("--processes", type=int, default=16, help="that compile side by side")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--interpret", action="store_true", help="on the CPU, in Triton's interpreter")
    options = parser.parse_args()
    options.peers &= not options.interpret
    manifest = json.loads((options.folder / "manifest.json").read_text(encoding="utf-8"))
    lengths = [int(n) for n in options.lengths.split(",")] if options.lengths else None
    wanted = {c.name for c in grid(options.only, lengths or sorted({c["length"] for c in manifest["cells"]}))}
    cells = [(Cell(c["operator"], c["length"], c["batch"]), c["variants"]) for c in manifest["cells"]]
    cells = [(cell, entries) for cell, entries in cells if cell.name in wanted]
    content: dict[str, Any] = {
        "title": "Attention",
        "bundle": {**manifest["versions"], "target": manifest["target"]},
        "environment": {},
        "rows": [],
    }
    place = Interpreted() if options.interpret else Gpu()
    for row in run_cells(place, options.folder, cells, content, options):
        content["rows"].append(row)
        print(shown(row), flush=True)
        options.output.write_text(json.dumps(content, indent=1), encoding="utf-8")
    content["environment"] = environment()
    options.output.write_text(json.dumps(content, indent=1), encoding="utf-8")
    wrong = [v for row in content["rows"] for v in row["variants"] if v.get("agrees") is False]
    print(f"{len(content['rows'])} cells, {len(wrong)} kernels that do not agree with float64")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
