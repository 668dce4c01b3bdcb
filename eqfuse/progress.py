"""What is going on, on a terminal, where it takes longer than a person waits without a sign."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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
    line: _Line | None = None


_here = _Here()


@contextmanager
def progress(stage: str) -> Iterator[None]:
    """Shows what a stage does on standard error, if that is a terminal and the work takes longer than PATIENCE. Work inside
    other work is shown behind it. Work of other threads is not: a terminal has one line."""
    is_outermost = _here.line is None
    if is_outermost:
        is_main = threading.current_thread() is threading.main_thread()
        _here.line = _Line(is_shown=is_main and sys.stderr.isatty())
    line = _here.line
    assert line is not None
    try:
        with line.inside(DOING.get(stage, stage)):
            yield
    finally:
        if is_outermost:
            line.end()
            _here.line = None


@dataclass
class _Line:
    """The line of a terminal, from the outermost work to the innermost one; drawn by a thread once PATIENCE is over."""

    is_shown: bool
    parts: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _is_over: bool = False

    @contextmanager
    def inside(self, text: str) -> Iterator[None]:
        with self._changed:
            self.parts.append(text)
            self._changed.notify()
        if self.is_shown and self._thread is None:
            self._thread = threading.Thread(target=self._draw, name="eqfuse progress", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self.parts.pop()
                self._changed.notify()

    def end(self) -> None:
        """Takes the line away."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def text(self) -> str:
        return f"eqfuse: {': '.join(self.parts)}"

    def _draw(self) -> None:
        from rich.console import Console  # only a terminal needs it
        from rich.status import Status
        from rich.text import Text

        console = Console(stderr=True)

        def shown() -> Text:
            found = Text(self.text)
            found.truncate(
                max(1, console.width - 3), overflow="ellipsis"
            )  # of one line with the sign before it
            return found

        with self._changed:
            if self._changed.wait_for(lambda: self._is_over, PATIENCE):
                return
        with Status(shown(), console=console) as status, self._changed:
            while not self._is_over:
                status.update(shown())
                self._changed.wait()
