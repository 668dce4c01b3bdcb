"""Errors, times and memory of one call."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from eqfuse.extract.machine import cores
from eqfuse.measure import Tensors

P = ParamSpec("P")
R = TypeVar("R")


def rounding(values: Tensors) -> float:
    """A unit in the last place of the coarsest output dtype, relative: no result is asked to be better; 0 for integers."""
    return max((torch.finfo(v.dtype).eps for v in values if v.dtype.is_floating_point), default=0.0)


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return _status_bytes("VmRSS:")


def processor_seconds(others: Iterable[int] = ()) -> float:
    """Seconds on a processor that this process has had, and other ones of these ids where the system says so."""
    found = time.process_time()
    for process in others:
        with suppress(OSError):
            found += int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9
    return found


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


CROWD = 4.0
"""How many times longer than alone a process waits at the most where others run beside it."""


def own_cores() -> int:
    """Cores that this process may use: where it is bound to some, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


LEAST_BUSY = 0.1
"""The share of its time in which a process computes that is not waiting for something else."""


def _crowd(busy: float) -> float:
    """How many times longer than alone this process takes: by the processes that run, of all users, for each core that it may
    use; and, where containers do not tell of those beside them, by the share of its time in which it got a core."""
    waits = 1.0 / busy if busy > LEAST_BUSY else 1.0
    return min(CROWD, max(1.0, os.getloadavg()[0] / cores(), waits))


def _computed() -> float:
    """Seconds that this process and those that it waited for have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError after so many seconds, or, where more processes run than there are cores, after as many
    times that as each of them waits, at most `CROWD`. Only in a main thread, and where there are alarm signals."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    began, before_it = time.monotonic(), _computed()

    def late(number: int, frame: object) -> None:
        took = time.monotonic() - began
        left = seconds * _crowd((_computed() - before_it) / took) - took
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, left)
            return
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def own_caches(folder: str) -> None:
    """Compilers keep in this folder what they compile: nothing is there but what this program's processes put there."""
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "eqfuse")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")


def in_fresh_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args)` in a new process that has imported torch and done nothing else."""
    context = get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()
