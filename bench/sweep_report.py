"""`eqfuse bench sweep`: random reductions over any axes of tensors of any layout, beside torch.compile.

A cell is an operation, a shape, the axes that it reduces, a layout and a dtype, all drawn from `--seed`; `--examples` says how many,
`--device` where. Every cell is called as a user calls it, and checked against float64 in the same run. All of them are compiled
first, in `--jobs` processes, and then timed in one, in turn with torch.compile (with eager torch where that is left out): on one
thread of a CPU (`OMP_NUM_THREADS=1`) by processor time.
"predicted" is `Kernel.estimate` over what was measured.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from rich.markup import escape

import eqfuse as eq
from bench.measure import own_caches, own_cores, time_limit
from bench.report import Column, Options, Report, chosen_names, geometric_mean, one_line
from eqfuse.measure import interleaved, worst_error
from eqfuse.terms.floats import TORCH_DTYPES

TITLE = "Random reductions: torch.compile's time over eqfuse's"
COLUMNS = (
    Column("program", lambda row: escape(row["program"])),
    Column("shape", lambda row: " x ".join(map(str, row["shape"]))),
    Column("layout", lambda row: str(row["layout"])),
    Column("dtype", lambda row: str(row["dtype"])),
    Column("us", lambda row: f"{row['us']:.1f}" if "us" in row else str(row["problem"])),
    Column("torch.compile", lambda row: f"{row['peer_us']:.1f}" if "peer_us" in row else ""),
    Column("over compile", lambda row: f"{row['ratio']:.2f}" if "ratio" in row else ""),
    Column("predicted", lambda row: f"{row['predicted']:.2f}" if "predicted" in row else ""),
    Column("error", lambda row: f"{row['error']:.0e}" if "error" in row else ""),
)
FLOOR = 0.8
"""Speed over torch.compile that no cell should fall under."""

TOLERANCE = {"f32": 1e-5, "bf16": 1e-2, "f16": 2e-3}
LAYOUTS = ("plain", "plain", "plain", "permuted", "sliced", "expanded")
ELEMENTS: Mapping[str, tuple[int, int]] = {"cpu": (14, 23), "cuda": (20, 28)}
"""Powers of two between which the elements of a tensor are."""

ROUNDS = 15
COMPILE_SECONDS = 120

Torch = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


def _layer_norm(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + 1e-5)


def _softmax(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    e = (x - x.amax(dims, keepdim=True)).exp()
    return e / e.sum(dims, keepdim=True)


@dataclass(frozen=True)
class Operation:
    """Its text for an element `X` and reduced axes `R`; torch's form of it. `whole`: the result has all axes."""

    text: str
    torch: Torch
    whole: bool = False
    one_axis: bool = False


OPERATIONS: Mapping[str, Operation] = {
    "sum": Operation("sum[R](X)", lambda x, d: x.sum(d)),
    "mean": Operation("mean[R](X)", lambda x, d: x.mean(d)),
    "max": Operation("max[R](X)", lambda x, d: x.amax(d)),
    "min": Operation("min[R](abs(X))", lambda x, d: x.abs().amin(d)),
    "norm": Operation("root(sum[R](sq(X)))", lambda x, d: torch.linalg.vector_norm(x, 2, d)),
    "var": Operation("var[R](X)", lambda x, d: x.var(d, correction=0)),
    "logsumexp": Operation("logsumexp[R](X)", lambda x, d: x.logsumexp(d)),
    "argmax": Operation("argmax[R](X)", lambda x, d: x.argmax(d[0]), one_axis=True),
    "softmax": Operation("exp(X - max[R](X)) / sum[R](exp(X - max[R](X)))", _softmax, whole=True),
    "layernorm": Operation(
        "(X - mean[R](X)) * rsqrt(mean[R](sq(X - mean[R](X))) + 1e-5)", _layer_norm, whole=True
    ),
}


@dataclass(frozen=True)
class Cell:
    """One operation on one tensor."""

    operation: str
    shape: tuple[int, ...]
    reduced: tuple[int, ...]
    layout: str
    dtype: str
    device: str
    seed: int

    @staticmethod
    def drawn(seed: int, device: str, small: bool, operations: Sequence[str] = tuple(OPERATIONS)) -> Cell:
        """Cell number `seed` of a device, with one of these operations."""
        rng = random.Random(seed)
        operation = rng.choice(operations)
        rank = rng.choice((1, 2, 2, 2, 3, 3, 4))
        least, most = (6, 10) if small else ELEMENTS[device]
        cuts = sorted(rng.random() for _ in range(rank - 1))
        shares = [b - a for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
        bits = rng.uniform(least, most)
        shape = [max(2, round(2 ** (bits * share))) for share in shares]
        if rng.random() < 0.5:  # as many sizes are multiples of 8 as are not
            shape = [n // 8 * 8 if n > 16 else n for n in shape]
        count = 1 if OPERATIONS[operation].one_axis else rng.randint(1, rank)
        reduced = tuple(sorted(rng.sample(range(rank), count)))
        return Cell(
            operation,
            tuple(shape),
            reduced,
            rng.choice(LAYOUTS if rank > 1 else LAYOUTS[:3]),
            rng.choice(("f32", "f32", "bf16", "f16")),
            device,
            seed,
        )

    @property
    def program(self) -> str:
        axes = "abcd"[: len(self.shape)]
        inner = ",".join(axes[n] for n in self.reduced)
        kept = [a for n, a in enumerate(axes) if OPERATIONS[self.operation].whole or n not in self.reduced]
        text = OPERATIONS[self.operation].text.replace("X", f"x[{','.join(axes)}]").replace("R", inner)
        return f"y[{','.join(kept)}] = {text}" if kept else f"y = {text}"

    def tensor(self, turn: int) -> torch.Tensor:
        """A fresh input, whose mean is not 0: an error is relative to a result."""
        generator = torch.Generator(self.device).manual_seed(1000 * self.seed + turn)
        rng = random.Random(self.seed)
        shape = list(self.shape)
        order = rng.sample(range(len(shape)), len(shape)) if self.layout == "permuted" else range(len(shape))
        stored = [shape[n] for n in order]
        if self.layout == "sliced":
            stored[-1] = 2 * stored[-1] + 1
        single = rng.randrange(len(shape))
        if self.layout == "expanded":
            stored[single] = 1
        made = (
            torch.randn(stored, generator=generator, device=self.device).add(0.5).to(TORCH_DTYPES[self.dtype])
        )
        if self.layout == "sliced":
            made = made[..., 1::2]
        if self.layout == "expanded":
            made = made.expand(shape)
        return made.permute([list(order).index(n) for n in range(len(shape))])

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATIONS[self.operation].torch(x, self.reduced)

    def run(self) -> tuple[eq.Kernel, Callable[[torch.Tensor], torch.Tensor]]:
        kernel = eq.compile(self.program, native="wait")  # what runs once C++ is compiled
        return kernel, lambda x: kernel(x=x)

    def peer(self, compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        torch._dynamo.reset()
        return torch.compile(self.eager, dynamic=False) if compiled else self.eager


def run(options: Options, report: Report) -> None:
    """Failures: a cell that raises, or whose error is not rounding."""
    operations = chosen_names(options.only, list(OPERATIONS))
    cells = [
        Cell.drawn(options.seed + n, options.device, options.small, operations)
        for n in range(options.count())
    ]
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        _keep_in(folder)
        context = get_context("spawn")
        jobs = options.jobs or own_cores()
        with ProcessPoolExecutor(jobs, context, _keep_in, (folder, max(1, own_cores() // jobs))) as pool:
            prepare = partial(_prepare, until=until, compiled=options.torch_compile)
            problems = list(pool.map(prepare, cells))
        for cell, problem in zip(cells, problems, strict=True):
            if time.monotonic() < until and problem != LATE:
                made = measured(cell, options.torch_compile) if problem is None else {"problem": problem}
                report.add(_about(cell) | made)
    report.failures += failing(report.rows)
    summarise(report)


LATE = "not compiled in time"


def _keep_in(folder: str, threads: int | None = None) -> None:
    """Compilers keep in this folder what they compile."""
    own_caches(folder)
    os.environ["TRITON_HOME"] = folder
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if threads is not None:
        torch.set_num_threads(threads)


def _prepare(cell: Cell, until: float, compiled: bool) -> str | None:
    """Compiles a cell's forms; says what went wrong, where something did."""
    if time.monotonic() > until:
        return LATE
    try:
        with time_limit(COMPILE_SECONDS):
            x = cell.tensor(0)
            cell.run()[1](x)
            cell.peer(compiled)(x)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is this cell's result)
        return f"{type(error).__name__}: {one_line(error)[:200]}"
    return None


def _about(cell: Cell) -> dict[str, Any]:
    shown = {"program": cell.program, "shape": cell.shape, "layout": cell.layout, "dtype": cell.dtype}
    return {"seed": cell.seed, "operation": cell.operation, **shown}


def measured(cell: Cell, compiled: bool) -> dict[str, Any]:
    """What a row says of a cell, on inputs of its own."""
    row: dict[str, Any] = {}
    try:
        with time_limit(COMPILE_SECONDS):
            kernel, ours = cell.run()
            forms = {"eqfuse": ours, "torch.compile": cell.peer(compiled)}
            x = cell.tensor(1)
            row["error"] = _error(cell, ours(x), x)
            row["peer_error"] = _error(cell, forms["torch.compile"](x), x)
            times = _times(forms, cell)
            predicted = kernel.estimate({"x": x}).seconds
    except Exception as error:  # noqa: BLE001  (whatever it is, it is this cell's result)
        return row | {"problem": f"{type(error).__name__}: {one_line(error)[:200]}"}
    us, peer_us = (1e6 * times[name] for name in ("eqfuse", "torch.compile"))
    plan = {"schedule": kernel.plan.schedule, "kernels": len(kernel.plan.kernels)}
    return (
        row | plan | {"us": us, "peer_us": peer_us, "ratio": peer_us / us, "predicted": 1e6 * predicted / us}
    )


def _error(cell: Cell, found: torch.Tensor, x: torch.Tensor) -> float:
    if cell.operation == "argmax":  # among equal numbers, any position is right
        dim = cell.reduced[0]
        return worst_error((x.gather(dim, found.unsqueeze(dim)).squeeze(dim),), (x.amax(dim),))
    return worst_error((found,), (cell.eager(x.double()),))


def _times(forms: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], cell: Cell) -> Mapping[str, float]:
    """Median seconds of each, in turn: on a GPU with a cache that others' data fill before each call."""
    if cell.device == "cpu":
        runs = {name: lambda inputs, form=form: form(inputs["x"]) for name, form in forms.items()}
        kept = [cell.tensor(turn) for turn in range(3)]
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        times = interleaved(
            runs, lambda turn: {"x": kept[turn % 3]}, rounds=ROUNDS, budget_seconds=2.0, clock=clock
        )
        return {name: times.median(name) for name in runs}
    from triton.testing import do_bench

    x = cell.tensor(2)
    found: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(3):
        for name, form in forms.items():
            found[name].append(
                1e-3 * do_bench(lambda form=form: form(x), warmup=5, rep=20, return_mode="median")
            )
    return {name: median(values) for name, values in found.items()}


def failing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cells that raise, and those whose error is not rounding."""
    return [
        f"{row['seed']}, {row['program']}: {row.get('problem') or format(row['error'], '.1e')}"
        for row in rows
        if "problem" in row or not row["error"] <= max(TOLERANCE[row["dtype"]], 2 * row["peer_error"])
    ]


def summarise(report: Report) -> None:
    """The geometric mean, the slowest cells, and what predictions are worth."""
    rows = [row for row in report.rows if "ratio" in row]
    if not rows:
        return
    ratios = [row["ratio"] for row in rows]
    slow = sorted((row for row in rows if row["ratio"] < FLOOR), key=lambda row: row["ratio"])
    report.summary.append(
        f"over torch.compile: {geometric_mean(ratios):.2f} (geometric mean of {len(ratios)}), least {min(ratios):.2f}, "
        f"{len(slow)} under {FLOOR}"
    )
    off = sorted(
        max(row["predicted"], 1 / row["predicted"]) for row in rows if 0 < row["predicted"] < math.inf
    )
    report.summary.append(f"predictions: off by {median(off):.2f} in the median, {off[-1]:.1f} at worst")
    by_operation = {name: [r["ratio"] for r in rows if r["operation"] == name] for name in OPERATIONS}
    means = (f"{name} {geometric_mean(found):.2f}" for name, found in by_operation.items() if found)
    report.summary.append("by operation: " + ", ".join(means))
    report.summary += [
        f"{row['ratio']:.2f}: {row['seed']}, {escape(row['program'])} of {row['shape']}, {row['layout']}"
        for row in slow
    ]
