"""Checks and times a bundle of kernels beside other programs for the same, on one GPU.

Needs torch and triton alone. Times are medians of replays of CUDA graphs, over fresh random inputs: over
several sets in turn where one would stay in the cache. Every result is compared with float64 in the
same run. Where there is no GPU, kernels run in Triton's interpreter: results are checked, times mean
nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
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
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import torch

from bench.cells import Cell, Inputs, Peer, Run
from bench.report import one_line
from bench.timing import repeated, seconds_of
from bench.workloads import Outputs
from eqfuse.environment import installed
from eqfuse.errors import EqfuseError
from eqfuse.tile.triton.launch import interpret
from eqfuse.tune.timing import Timing, replayed

CACHE = 64e6
"""Bytes of a cache that inputs must exceed fourfold, so that replays read them from memory."""

MOST_SETS = 32
HOST_CALLS = 64

LARGE_AT_ONCE = 2
"""How many processes may compile a peer that needs much memory."""

COMPILING_SHARE = 0.5
"""Part of the time limit after which nothing more is compiled."""
COMPILING_GRACE = 15.0
"""Seconds for what is being compiled then."""

PEER_SLACK = 10.0
"""How far off a peer may be, relative to what a variant may: unfused torch rounds every intermediate result,
and what is chosen by rounded numbers is now and then another one. Reports show the errors beside the times."""

CellT = TypeVar("CellT", bound=Cell)


@dataclass(frozen=True)
class Suite(Generic[CellT]):
    """What is particular to one benchmark, as functions of a module: processes get them by name.

    `exact` gives the outputs in float64, `tolerance` the relative rms error that is rounding, `beside` a
    library call whose host time is measured on the same tensors, `is_large` whether peers need much memory.
    """

    title: str
    exact: Callable[[CellT, Inputs], tuple[torch.Tensor, ...]]
    peers: Callable[[CellT], Sequence[Peer]]
    tolerance: Callable[[CellT], float]
    beside: Callable[[CellT], Run | None]
    is_large: Callable[[CellT], bool]


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

    def launches(self, call: Callable[[], object]) -> int | None:
        """How many kernels, copies and fills a call launches; None where that is not known."""
        ...

    def call_costs(self, call: Call, beside: Run | None, inputs: Inputs) -> dict[str, Any]:
        """What a call costs beside the kernels' time, and what another one does."""
        ...

    def finish(self) -> None:
        """Waits for what was launched, and gives unused memory back."""
        ...


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Gpu:
    device = "cuda"

    def load(self, path: Path, name: str) -> Loaded:
        module = load(path)
        return Loaded(getattr(module, name), module.TENSORS)

    def sets(self, cell: Cell) -> int:
        return max(1, min(MOST_SETS, math.ceil(4 * CACHE / cell.bytes)))

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        return replayed(calls)

    def details(self, call: Call) -> dict[str, Any]:
        return {"resources": resources(call.function)}

    def launches(self, call: Callable[[], object]) -> int | None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            call()
        count = ctypes.c_size_t()
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
        return None if failed else count.value

    def call_costs(self, call: Call, beside: Run | None, inputs: Inputs) -> dict[str, Any]:
        costs: dict[str, Any] = {"allocations": allocations(lambda: call(inputs))}
        return costs | ({"host_us": host_times(call, beside, inputs)} if beside else {})

    def finish(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Interpreted:
    """Results are right and times mean nothing."""

    device = "cpu"

    def load(self, path: Path, name: str) -> Loaded:
        source = path.read_text(encoding="utf-8")
        if hasattr(load(path), "TILES"):
            raise EqfuseError(
                "kernels in roles run on a Hopper GPU alone", hint="make the bundle with --target a100"
            )
        return Loaded(lambda **arguments: interpret(source, name, **arguments), load(path).TENSORS)

    def sets(self, cell: Cell) -> int:
        return 1

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        start = time.perf_counter()
        calls[0]()
        return Timing.of([1e3 * (time.perf_counter() - start)])

    def details(self, call: Call) -> dict[str, Any]:
        return {}

    def launches(self, call: Callable[[], object]) -> int | None:
        return None

    def call_costs(self, call: Call, beside: Run | None, inputs: Inputs) -> dict[str, Any]:
        return {}

    def finish(self) -> None:
        pass


def distance(found: Outputs, reference: Sequence[torch.Tensor]) -> float:
    """The greatest relative rms error of the outputs, or share of integers that differ; NaN where a value is."""
    outputs = found if isinstance(found, tuple) else (found,)
    errors = [_error(a, b) for a, b in zip(outputs, reference, strict=True)]
    return float(torch.stack(errors).max())  # of several numbers and a NaN: NaN


def _error(found: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    if not reference.is_floating_point():
        return (found != reference).double().mean()
    error: torch.Tensor = (found.double() - reference).norm() / reference.norm().clamp_min(1e-300)
    return error


@dataclass(frozen=True)
class Call:
    """A variant with its outputs and its temporaries, all of them given by the caller."""

    function: Callable[..., Any]
    cell: Cell
    entry: Mapping[str, Any]
    out: Outputs
    workspace: Mapping[str, torch.Tensor]

    @staticmethod
    def of(loaded: Loaded, cell: Cell, entry: Mapping[str, Any], device: str) -> Call:
        """With outputs and temporaries that hold NaN."""
        made = {
            name: _poisoned([entry["sizes"][axis] for axis in axes], dtype, device)
            for name, (dtype, axes) in loaded.tensors.items()
            if name not in cell.workload.tensors
        }
        outputs = tuple(made.pop(name) for name in entry["outputs"])
        return Call(loaded.function, cell, entry, outputs if len(outputs) > 1 else outputs[0], made)

    def __call__(self, inputs: Inputs) -> Outputs:
        """The outputs, which are the same tensors at every call."""
        more = {"workspace": self.workspace} if self.workspace else {}
        self.function(**inputs, **self.cell.case.scalars, out=self.out, sizes=self.entry["sizes"], **more)
        return self.out


def _poisoned(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Ones in every bit: NaN in every floating dtype."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    made.reshape(-1).view(torch.uint8).fill_(0xFF)
    return made


@dataclass
class Bench(Generic[CellT]):
    """The cells of one process: all their kernels are compiled before the first is timed."""

    suite: Suite[CellT]
    place: Place
    folder: Path
    cells: Mapping[str, tuple[CellT, Sequence[Mapping[str, Any]]]]
    with_peers: bool = True
    large: AbstractContextManager[Any] = field(default_factory=nullcontext)
    deadline: float = math.inf
    _loaded: dict[tuple[str, int], Loaded] = field(default_factory=dict)
    _peers: dict[tuple[str, str], Run] = field(default_factory=dict)
    _about: dict[tuple[str, int | str], dict[str, Any]] = field(default_factory=dict)

    def compile(self) -> None:
        """Runs every variant and every peer once. What is not begun before the deadline is left out."""
        for name, (cell, entries) in self.cells.items():
            inputs = cell.draw(self._generator())
            for number, entry in enumerate(entries):
                with self._noted(name, number):
                    self._in_time()
                    loaded = self.place.load(self.folder / entry["file"], entry["function"])
                    Call.of(loaded, cell, entry, self.place.device)(inputs)
                    self._loaded[name, number] = loaded
            for peer in self._peers_of(cell):
                if not peer.tuned:
                    with self.large if self.suite.is_large(cell) else nullcontext():
                        self._make(cell, peer, inputs, self._in_time)

    def _peers_of(self, cell: CellT) -> Sequence[Peer]:
        return self.suite.peers(cell) if self.with_peers else ()

    def _generator(self) -> torch.Generator:
        generator = torch.Generator(self.place.device)
        generator.seed()
        return generator

    def _make(
        self, cell: CellT, peer: Peer, inputs: Inputs, check: Callable[[], None] = lambda: None
    ) -> None:
        """Runs a peer once, unless the check fails."""
        with self._noted(cell.name, peer.name) as about:
            check()
            run, before = peer.make(inputs), pattern_matches()
            run(inputs)
            self.place.finish()
            about["matched"] = pattern_matches() > before
            self._peers[cell.name, peer.name] = run

    def _in_time(self) -> None:
        """Raises TimeoutError after the deadline."""
        if time.monotonic() > self.deadline:
            raise TimeoutError("not compiled in time")

    @contextmanager
    def _noted(self, cell: str, what: int | str) -> Iterator[dict[str, Any]]:
        """Notes how long compiling takes, or why it fails."""
        about = self._about[cell, what] = {}
        started = time.monotonic()
        try:
            yield about
            self.place.finish()
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this kernel's result)
            about["problem"] = one_line(error)[:300]
        about["compile_seconds"] = round(time.monotonic() - started, 2)

    def measure(self, name: str) -> dict[str, Any]:
        """One row: every variant and every peer of a cell, on fresh random inputs."""
        cell, entries = self.cells[name]
        started = time.monotonic()
        generator = self._generator()
        sets = self.place.sets(cell)
        inputs = [cell.draw(generator) for _ in range(sets)]
        reference = self.suite.exact(cell, inputs[0])
        tolerance = self.suite.tolerance(cell)
        row: dict[str, Any] = {
            "cell": cell.name,
            **cell.entry(),
            "bytes": cell.bytes,
            "flops": cell.flops,
            "input_sets": sets,
            "variants": [],
            "peers": {},
        }

        def timed(run: Run, slack: float = 1.0) -> dict[str, Any]:
            error = distance(run(inputs[0]), reference)
            timing = self.place.time([partial(run, some) for some in inputs])
            return {**asdict(timing), "error": error, "agrees": error <= slack * tolerance}

        for number, entry in enumerate(entries):
            found: dict[str, Any] = {k: v for k, v in entry.items() if k not in NOT_REPORTED}
            found |= self._about[name, number]
            if "problem" not in found:
                with noted(found):
                    call = Call.of(self._loaded[name, number], cell, entry, self.place.device)
                    found |= timed(call) | self.place.details(call)
                    if number == 0:
                        found["launches"] = self.place.launches(partial(call, inputs[0]))
                        row |= self.place.call_costs(call, self.suite.beside(cell), inputs[0])
            row["variants"].append(found)
        for peer in self._peers_of(cell):
            if peer.tuned:
                self._make(cell, peer, inputs[0])
            about = {"kind": peer.kind, **self._about[name, peer.name]}
            if "problem" not in about:
                with noted(about):
                    run = self._peers[name, peer.name]
                    about |= timed(run, PEER_SLACK)
                    about["launches"] = self.place.launches(partial(run, inputs[0]))
            row["peers"][peer.name] = about
        row["seconds"] = round(time.monotonic() - started, 1)
        return row


NOT_REPORTED = ("file", "function", "sizes", "outputs")
"""What the entry of a variant has for running it alone."""


def pattern_matches() -> int:
    """How many expressions Inductor has replaced by scaled_dot_product_attention so far."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fuse_attention"])


def compiled_for_one_shape(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile; every cell of a process compiles the same functions anew. Without Inductor's caches,
    which do not say whether a pattern was matched."""
    torch._dynamo.config.recompile_limit = 256
    torch.compiler.config.force_disable_caches = True
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, **options)
    return compiled


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


def host_times(call: Call, beside: Run, inputs: Inputs) -> dict[str, float]:
    """Microseconds that the host spends on one call, beside torch's scaled_dot_product_attention on the same
    tensors; the device is idle before each batch of calls and its queue never full."""
    return {
        name: 1e6
        * statistics.median(seconds_of(repeated(run, HOST_CALLS), "cuda")[0] for _ in range(9))
        / HOST_CALLS
        for name, run in (("eqfuse", lambda: call(inputs)), ("sdpa", lambda: beside(inputs)))
    }


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

    def __init__(self, bench: Bench[Any]) -> None:
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


def _serve(bench: Bench[Any], pipe: Connection) -> None:
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
    suite: Suite[CellT],
    place: Place,
    folder: Path,
    cells: Sequence[tuple[CellT, Sequence[Mapping[str, Any]]]],
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
        bench = Bench(suite, place, folder, mine, options.peers, large, deadline)
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


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark that runs a bundle."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--only", default=None, help="operators or programs that start with one of these words"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="stop after this long")
    parser.add_argument("--processes", type=int, default=16, help="that compile side by side")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--interpret", action="store_true", help="on the CPU, in Triton's interpreter")
    return parser


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `bundling.write` wrote."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return manifest


def run_bundle(
    suite: Suite[CellT],
    cells: Sequence[tuple[CellT, Sequence[Mapping[str, Any]]]],
    manifest: Mapping[str, Any],
    options: argparse.Namespace,
) -> int:
    """Measures cells, a line of the log and a row of the output for each; 1 where a result was wrong."""
    options.peers &= not options.interpret
    content: dict[str, Any] = {
        "title": suite.title,
        "bundle": {**manifest["versions"], "target": manifest["target"], "constants": manifest["constants"]},
        "environment": environment(),
        "rows": [],
    }
    place = Interpreted() if options.interpret else Gpu()
    for row in run_cells(suite, place, options.folder, cells, content, options):
        content["rows"].append(row)
        print(shown(row), flush=True)
        options.output.write_text(json.dumps(content, indent=1), encoding="utf-8")
    wrong = [v for row in content["rows"] for v in row["variants"] if v.get("agrees") is False]
    print(f"{len(content['rows'])} cells, {len(wrong)} kernels that do not agree with float64")
    return 1 if wrong else 0


def shown(row: Mapping[str, Any]) -> str:
    """A row as one line of the log."""
    times = [v.get("ms", math.inf) if v.get("agrees") else math.inf for v in row["variants"]]
    parts = [f"{name} {peer['ms']:.4f}" for name, peer in row["peers"].items() if "ms" in peer]
    best = min(range(len(times)), key=times.__getitem__)
    return f"{row['cell']}: zero-tune {times[0]:.4f} ms, best {times[best]:.4f} (v{best}); {', '.join(parts)}"
