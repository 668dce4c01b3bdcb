"""What is going on, on a terminal, where it takes longer than a person waits without a sign."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

PATIENCE = 2.0
"""Seconds after which work shows itself."""

DOING = {
    "parse": "reading the program",
    "derive": "rewriting, and deriving merges",
    "choose": "choosing a plan",
    "lower": "lowering to tiles",
    "emit": "writing Triton",
    "verify": "verifying every stage in a finite field",
    "explain": "tracing the derivation",
    "tune": "timing plans on the device",
}
"""What each stage of the pipeline does."""


class _Here(threading.local):
    depth: int = 0


_here = _Here()


@contextmanager
def progress(stage: str) -> Iterator[None]:
    """Shows what a stage does on standard error, if that is a terminal and the work takes longer than PATIENCE. Work
    inside other work shows nothing of its own, nor does that of other threads: a terminal has one line for it."""
    is_main = threading.current_thread() is threading.main_thread()
    is_shown = is_main and _here.depth == 0 and sys.stderr.isatty()
    _here.depth += 1
    try:
        with _shown(DOING.get(stage, stage)) if is_shown else nullcontext():
            yield
    finally:
        _here.depth -= 1


@contextmanager
def _shown(text: str) -> Iterator[None]:
    from rich.console import Console  # only a terminal needs it
    from rich.status import Status

    status = Status(f"eqfuse: {text}", console=Console(stderr=True))
    done = threading.Event()

    def wait() -> None:
        if not done.wait(PATIENCE):
            with status:
                done.wait()

    thread = threading.Thread(target=wait, name="eqfuse progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
