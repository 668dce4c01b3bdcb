"""Times and checks the forms of kernels in roles, beside torch's libraries, on a Hopper GPU.

Everything of a cell runs in turn in one process, each for `SUSTAINED_MS` of graphs back to back: such a GPU is at its power
limit after a second. Results are compared with float64 in the same run.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from typing import Any

import torch

import eqfuse as eq
from bench.cells import TOLERANCE, Inputs
from bench.gluon_cells import AnyRolesCell as Cell
from bench.gluon_forms import Form, forms, kernel_of, short
from bench.report import Options, Report
from bench.running import noted, resources
from bench.timing import sustained
from eqfuse.measure import rms_error
from eqfuse.tile.gluon.launch import GluonProgram
from eqfuse.tile.triton.launch import TritonProgram, load

CHECKED_ROWS = 64
"""Rows that are compared with float64 at the start, in the middle and at the end, of every head."""

LIBRARIES = ("cudnn", "flash", "cuBLAS", "cuBLAS, fast sums")
COMPILERS = ("flex",)
MOST_JOBS = 12
COMPILING_SHARE = 0.4
"""Part of the time limit in which processes compile."""

Call = Callable[[], object]


def run(cells: Sequence[Cell], options: Options, report: Report) -> None:
    """A row for each cell; what is not begun in time is left out, and said."""
    deadline = time.monotonic() + options.seconds
    _prepare(cells, options)
    for number, cell in enumerate(cells, start=1):
        if time.monotonic() > deadline:
            report.summary.append(f"{len(cells) - number + 1} cells were left out: no time")
            return
        started = time.monotonic()
        row: dict[str, Any] = {"cell": cell.name, **cell.entry(), "flops": cell.flops, "bytes": cell.bytes}
        with noted(row):
            _measure(cell, _kernel(cell), options, row)
        row["seconds"] = round(time.monotonic() - started, 1)
        report.add(row)
        print(f"{number}/{len(cells)} {line(row)}", file=sys.stderr, flush=True)


def line(row: Mapping[str, Any]) -> str:
    """A row as one line: TFLOP/s of everything."""
    found = [f"{row['cell']}:"]
    for form in row.get("forms", ()):
        mark = "*" if form["chosen"] else ""
        what = form["kind"] if form["kind"] == "Triton" else short(form)
        rate = f"{form['tflops']:.0f}" if "tflops" in form else form.get("problem", "?")
        took = f" ({form['registers']} registers)" if "registers" in form else ""
        found.append(f"{mark}{what} {rate}{took}{'' if form.get('agrees', True) else ' WRONG'},")
    for name, peer in row.get("peers", {}).items():
        found.append(
            f"{name} {peer['tflops']:.0f}," if "tflops" in peer else f"{name} {peer.get('problem')},"
        )
    return " ".join([*found, str(row.get("problem", "")), f"{row['seconds']} s"])


# Compiling ----------------------------------------------------------------------------------------------


def _prepare(cells: Sequence[Cell], options: Options) -> None:
    """Compiles every form, several cells at a time: processes leave binaries to this one. What is not compiled in a part of
    the time is compiled when its cell is measured."""
    jobs = options.jobs or min(MOST_JOBS, os.cpu_count() or 1, len(cells))
    if jobs < 2:
        return
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    made = [pool.submit(_compiled, cell) for cell in cells]
    limit = COMPILING_SHARE * options.seconds
    wait(made, None if math.isinf(limit) else limit)
    pool.shutdown(wait=True, cancel_futures=True)
    print(f"compiled {sum(map(Future.done, made))} of {len(cells)} cells", file=sys.stderr, flush=True)


def _compiled(cell: Cell) -> None:
    with noted({}):  # the measuring process notes it
        for _, call in _calls(cell, _kernel(cell), _draw(cell)):
            with noted({}):
                call()
        torch.cuda.synchronize()


def _kernel(cell: Cell) -> eq.Kernel:
    """A cell's program, compiled once for all cells that it serves."""
    if cell.kernel not in _KERNELS:
        _KERNELS[cell.kernel] = kernel_of(cell)
    return _KERNELS[cell.kernel]


_KERNELS: dict[tuple[object, ...], eq.Kernel] = {}


def _draw(cell: Cell) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda")
    generator.seed()
    return cell.draw(generator)


def _calls(cell: Cell, kernel: eq.Kernel, inputs: Inputs) -> Iterator[tuple[Form, Call]]:
    """What runs each form. What calls run is bound as a user binds it."""
    sizes = dict(cell.sizes)
    arguments: dict[str, Any] = {**inputs, **cell.case.scalars, "sizes": sizes}
    launch = kernel.bind(**arguments)
    for form in forms(kernel, kernel.compiled, sizes):
        if form.chosen:
            yield form, launch
            continue
        if form.kind == "roles":
            emit = partial(form.triton, kernel)
            yield form, partial(GluonProgram(form.source(kernel), kernel.name, emit), **arguments)
        else:
            yield form, partial(TritonProgram(form.triton(kernel), kernel.name), **arguments)


# Measuring ----------------------------------------------------------------------------------------------


def _measure(cell: Cell, kernel: eq.Kernel, options: Options, row: dict[str, Any]) -> None:
    inputs = _draw(cell)
    parts = list(_parts(cell.rows))
    reference = [cell.exact(inputs, first, last) for first, last in parts]
    runs: dict[str, tuple[dict[str, Any], Call]] = {}

    def add(name: str, about: dict[str, Any], call: Call) -> None:
        with noted(about):
            out = call()
            assert isinstance(out, torch.Tensor)
            errors = [
                rms_error(cell.some(out, a, b), some) for (a, b), some in zip(parts, reference, strict=True)
            ]
            about["error"] = float(torch.tensor(errors).max())  # NaN where one is
            about["agrees"] = about["error"] <= TOLERANCE[cell.dtype] and bool(out.isfinite().all())
            torch.cuda.synchronize()
            runs[name] = about, call

    row["forms"], row["peers"] = [], {}
    for number, (form, call) in enumerate(_calls(cell, kernel, inputs)):
        about = form.entry()
        row["forms"].append(about)
        add(f"form {number}", about, call)
        if "problem" not in about:
            with noted(about):
                about |= _taken(kernel, form)
    names = (*LIBRARIES, *(COMPILERS if options.torch_compile else ()))
    for peer in cell.peers:
        if peer.name in names:
            about = row["peers"][peer.name] = {"kind": peer.kind}
            with noted(about):
                add(peer.name, about, partial(peer.make(inputs), inputs))
    for name, ms in sustained({name: call for name, (_, call) in runs.items()}).items():
        runs[name][0].update(ms=ms, tflops=cell.flops / ms / 1e9)
    row["triton"] = next((f["tflops"] for f in row["forms"] if f["kind"] == "Triton" and "tflops" in f), None)


def _parts(length: int) -> Iterator[tuple[int, int]]:
    rows = min(CHECKED_ROWS, length)
    for first in sorted({0, (length - rows) // 2, length - rows}):
        yield first, first + rows


def _taken(kernel: eq.Kernel, form: Form) -> dict[str, Any]:
    """Registers, spills and shared memory of a form's kernels, the most of each."""
    module = load(form.source(kernel))
    kinds = resources(getattr(module, kernel.name)).values()
    return {key: max(kind[key] for kind in kinds) for key in ("registers", "spilled_bytes", "shared_bytes")}
