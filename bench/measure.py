"""Errors, times and memory of one call."""

from __future__ import annotations

import ctypes
import gc
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

Tensors = tuple[torch.Tensor, ...]


def as_tuple(result: Any) -> Tensors:
    """The outputs of a kernel or a reference as a tuple of tensors, also where it has only one."""
    return tuple(torch.as_tensor(value) for value in (result if isinstance(result, tuple) else (result,)))


def rms_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference over that of the reference.

    Infinities and NaN must stand at the same positions with the same sign; otherwise the error is inf.
    """
    a, b = value.detach().double(), reference.detach().to(value.device).double()
    finite = torch.isfinite(b)
    same_kind = torch.equal(torch.isfinite(a), finite) and torch.equal(
        a[~finite].nan_to_num(), b[~finite].nan_to_num()
    )
    if a.shape != b.shape or not same_kind or not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    difference, size = (a - b)[finite].square().sum().sqrt(), b[finite].square().sum().sqrt()
    return float(difference / size) if size > 0 else float(difference)


def worst_error(values: Tensors, references: Tensors) -> float:
    """The largest `rms_error` over the outputs; inf where their number differs."""
    if len(values) != len(references):
        return float("inf")
    return max(rms_error(v, r) for v, r in zip(values, references, strict=True))


def rounding(values: Tensors) -> float:
    """A unit in the last place of the coarsest output dtype, relative: no result is asked to be better."""
    return max(torch.finfo(v.dtype).eps for v in values if v.dtype.is_floating_point)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Times:
    """Seconds per call, one list per contestant, in the order of rounds."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def interleaved(
    contestants: Mapping[str, Callable[[Mapping[str, torch.Tensor]], Any]],
    inputs: Callable[[int], Mapping[str, torch.Tensor]],
    *,
    device: str = "cpu",
    rounds: int = 9,
    budget_seconds: float = 6.0,
) -> Times:
    """Time the contestants in turn on fresh inputs: one warm-up round, then up to `rounds`.

    Stops early, after three rounds at the least, once `budget_seconds` have passed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    started = time.perf_counter()
    for index in range(rounds + 1):
        values = inputs(index)
        for name, run in contestants.items():
            synchronize(device)
            begin = time.perf_counter()
            result = run(values)
            synchronize(device)
            if index > 0:
                seconds[name].append(time.perf_counter() - begin)
            del result
        if index >= 3 and time.perf_counter() - started > budget_seconds:
            break
    return Times(seconds)


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return _status_bytes("VmRSS:")


def peak_bytes(process: int | str = "self") -> int:
    """The most that this process held since `reset_peak` (Linux), or since it started (elsewhere); or another one, on
    Linux, since it started."""
    status = _status_bytes("VmHWM:", process)
    if status:
        return status
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> None:
    """Forget the peak so far, where the system can."""
    file = Path("/proc/self/clear_refs")
    if file.exists():
        file.write_text("5")


def _trim() -> None:
    """Have the C library give back what it keeps of freed memory, where it can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _status_bytes(key: str, process: int | str = "self") -> int:
    file = Path("/proc", str(process), "status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def peak_growth(run: Callable[[], R]) -> tuple[R, int]:
    """The result of `run`, and by how many bytes the process's memory grew at its peak.

    Call it in a process that did nothing else (`in_fresh_process`): memory that an allocator
    kept from earlier work would hide the growth.
    """
    gc.collect()
    _trim()
    reset_peak()
    before = resident_bytes()
    result = run()
    return result, max(0, peak_bytes() - before)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError after so many seconds. Only in a main thread, and where there are alarm signals."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_fresh_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args)` in a new process that has imported torch and done nothing else."""
    context = get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()
