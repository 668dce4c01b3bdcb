"""`eqfuse bench training`: forward and backward beside torch: attention, norms, losses; times, peak memory, errors.

Every way runs under autograd, as in training. `forward` and `backward` are milliseconds of each alone, launched without
waiting, the median of three series; `memory` is the peak of both over inputs, cotangents and gradients. Gradients of the
leading part of each input are compared with float64 in the same run. With `--seconds`, no cell begins later.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import eqfuse as eq
from bench.report import Column, Options, Report, chosen_names, geometric_mean, one_line, shown
from bench.timing import peak_gb, seconds_of, series
from bench.training_cells import Cell, Function, cells
from eqfuse.measure import rms_error

TITLE = "Forward and backward under autograd, beside torch"
ERRORS = 10.0
"""A gradient may be so many times as far from float64 as torch's own is, or as rounding to its dtype alone."""

COLUMNS = (
    Column("cell", lambda row: str(row["cell"])),
    Column("way", lambda row: str(row["way"])),
    Column("forward ms", lambda row: shown(row, "forward_ms", ".4f")),
    Column("backward ms", lambda row: shown(row, "backward_ms", ".4f")),
    Column("TFLOP/s", lambda row: shown(row, "tflops", ".0f")),
    Column("memory GB", lambda row: shown(row, "memory_gb", ".2f")),
    Column("error", lambda row: shown(row, "error", ".1e")),
    Column("first call s", lambda row: shown(row, "first_seconds", ".1f")),
    Column("", lambda row: str(row.get("failed", ""))),
)


def run(options: Options, report: Report) -> None:
    """Failures: a program that does not run, and a gradient that is much farther from float64 than torch's."""
    torch._functorch.config.donated_buffer = False  # a backward that is run again keeps what it reads
    on_gpu = options.device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    every = {cell.name: cell for cell in cells(options.small or not on_gpu)}
    for name in chosen_names(options.only, tuple(every)):
        cell = every[name]
        if report.is_late(options, cell.name):
            break
        measure(cell, options, dtype, report)
    for other in ("flex", "cudnn", "flash", "torch.compile", "torch"):
        for what in ("backward_ms", "both_ms"):
            ratios = report.ratios(what, other, "eqfuse", "cell")
            if ratios:
                label = "backward" if what == "backward_ms" else "forward and backward"
                mean = geometric_mean(ratios)
                report.summary.append(f"{label}: {mean:.2f} of {other}, geometric mean of {len(ratios)}")


def ways(cell: Cell, options: Options, dtype: torch.dtype) -> dict[str, Function]:
    """What computes a cell, by name: eqfuse first."""
    kernel = eq.compile(cell.text(dtype), scalars=cell.constants, native="wait")
    found: dict[str, Function] = {
        "eqfuse": partial(_called, kernel, cell.scalars),
        **cell.peers,
    }
    if not cell.peers:
        found["torch"] = cell.plain
        if options.torch_compile:
            torch._dynamo.reset()
            found["torch.compile"] = torch.compile(cell.plain, dynamic=False)
    return found


def _called(kernel: eq.Kernel, scalars: Mapping[str, float], inputs: Mapping[str, Tensor]) -> Tensor:
    given: dict[str, Any] = {**inputs, **scalars}
    found: Tensor = kernel(**given)
    return found


def measure(cell: Cell, options: Options, dtype: torch.dtype, report: Report) -> None:
    """Adds a row for each way to compute a cell."""
    torch.manual_seed(options.seed)
    inputs = cell.draw(options.device, dtype)
    shape = cell.plain(inputs)
    cotangent = torch.randn_like(shape)
    del shape
    exact = cell.exact(inputs, cotangent)
    errors: dict[str, float] = {}
    try:
        functions = ways(cell, options, dtype)
    except Exception as error:  # noqa: BLE001  a program that breaks is a row of the report
        report.failures.append(f"{cell.name}: {one_line(error)}")
        return
    for name, function in functions.items():
        with report.row(cell.name, fails=name == "eqfuse", cell=cell.name, way=name) as row:
            row |= _timed(cell, function, inputs, cotangent, exact)
            errors[name] = row["error"]
    least = min((error for name, error in errors.items() if name != "eqfuse"), default=0.0)
    if errors.get("eqfuse", 0.0) > ERRORS * max(least, torch.finfo(dtype).eps):
        report.failures.append(f"{cell.name}: an error of {errors['eqfuse']:.1e}, torch's is {least:.1e}")


def _timed(
    cell: Cell, function: Function, inputs: dict[str, Tensor], cotangent: Tensor, exact: Mapping[str, Tensor]
) -> dict[str, Any]:
    leaves = {name: inputs[name] for name in cell.tensors}
    wanted = tuple(leaves.values())
    device = cotangent.device.type

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(inputs), wanted, cotangent)

    _, first = seconds_of(both, device)
    memory = None
    if device == "cuda":
        of_gradients = sum(leaf.numel() * leaf.element_size() for leaf in wanted)
        memory = peak_gb(both) - of_gradients / 1e9
    made = dict(zip(leaves, both(), strict=True))
    error = max(rms_error(made[name][cell.part[name]], exact[name]) for name in leaves)
    del made
    forward = series(lambda: function(inputs), device)
    out = function(inputs)
    backward = series(lambda: torch.autograd.grad(out, wanted, cotangent, retain_graph=True), device)
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "both_ms": forward + backward,
        "tflops": cell.flops / backward / 1e9 if cell.flops else None,
        "memory_gb": memory,
        "error": error,
        "first_seconds": first,
    }
