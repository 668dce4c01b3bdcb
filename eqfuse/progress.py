"""What is going on, on a terminal, where it takes longer than a person waits without a sign."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

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

_lock = threading.Lock()
_working = 0


@contextmanager
def progress(stage: str) -> Iterator[None]:
    """Shows what a stage does on standard error, if that is a terminal and the work takes longer than PATIENCE. Work
    inside other work shows nothing of its own: a terminal has one line for it."""
    global _working
    with _lock:
        is_outermost = _working == 0
        _working += 1
    try:
        if is_outermost and sys.stderr.isatty():
            with _shown(DOING.get(stage, stage)):
                yield
        else:
            yield
    finally:
        with _lock:
            _working -= 1


@contextmanager
def _shown(text: str) -> Iterator[None]:
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
