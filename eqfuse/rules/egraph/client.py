"""E-graphs of this process, which live in processes of their own.

egglog's e-graphs belong to the thread that made them, its threads are not there after a fork, and its panics are no
exceptions. Behind a pipe none of this matters: any thread may open one, several at once (each has a process to
itself while it does), a forked child starts processes of its own, and what goes wrong there is an EqfuseError here.
An interrupted request takes its process along; the next one starts another.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

from eqfuse import limits
from eqfuse.errors import EqfuseError
from eqfuse.rules.egraph import server

MAX_DECLARED = 12
"""Declared e-graphs that a process keeps: those of compiling, of explaining, and a few of changed rule sets."""

_NO_PYTHON = "it needs a Python to run: multiprocessing.set_executable says where one is"
_LOST = "what it was asked for is lost, not your program: ask again; where it is killed each time, memory is short"


class Graphs:
    """A process that holds declared e-graphs, of which one is open."""

    def __init__(self) -> None:
        self.broken = False
        """Whether a request was begun and not ended: nobody knows what the next answer would be of."""
        self._declared: dict[Hashable, int] = {}
        self._made = 0
        self._is_open = self._is_limited = False
        self._seconds = 0.0
        # No site packages, and nothing from the folder of the script: its start is waited for.
        self._command = [os.fsdecode(get_executable()), "-S", "-P", server.__file__, str(_bindings())]
        # A session of its own: a terminal's Ctrl-C is for the process that waits. One thread: e-graphs are small.
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                env={**os.environ, "RAYON_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise EqfuseError(
                f"{self._shown} cannot be started: {error.strerror}", hint=_NO_PYTHON
            ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._ending = finalize(self, _stopped, self._process)
        _started.add(self)

    @property
    def process(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self.broken and self._process.poll() is None

    def ask(self, name: str, *arguments: Any) -> Any:
        """What a method of `Server` gives. Raises OverLimit where the derivation that runs here is over, EqfuseError where the
        method raises something, or the process ends."""
        limits.check()
        running = limits.running()
        self.broken = True
        try:
            server.send(self._requests, (name, *arguments))
            is_well, answer, seconds = server.receive(self._answers)
        except (OSError, EOFError, ValueError) as error:
            how = self._end()
            if running is not None and self._process.returncode == -signal.SIGXCPU:
                raise running.too_long() from error
            if running is not None and self._process.returncode == -signal.SIGABRT:  # an allocation failed
                raise running.too_large() from error
            began = self._declared or self._process.returncode != 1
            raise EqfuseError(f"{self._shown} {how}", hint=_LOST if began else _NO_PYTHON) from error
        if running is not None:
            running.elsewhere += seconds - self._seconds
            if not is_well and answer.startswith("MemoryError"):
                raise running.too_large()
        self._seconds = seconds
        if not is_well:
            raise EqfuseError(f"egglog failed: {answer}", hint="this is an error in eqfuse or egglog")
        self.broken = False
        return answer

    def open(self, key: Hashable, declarations: Callable[[], tuple[str, ...]]) -> None:
        """Opens the e-graph that was declared under this key, or declares it. The last `MAX_DECLARED` are kept."""
        running = limits.running()
        if running is not None or self._is_limited:
            left = (None, 0) if running is None else (running.left, running.megabytes)
            self.ask("limit", *left)
            self._is_limited = running is not None
        number = self._declared.pop(key, None)
        if number is None:
            number = self._made
            self._made += 1
            self.ask("declare", number, declarations())
        self._declared[key] = number  # the last one used is forgotten last
        while len(self._declared) > MAX_DECLARED:
            self.ask("forget", self._declared.pop(next(iter(self._declared))))
        self.ask("open", number)
        self._is_open = True

    def close(self) -> None:
        """Has the process take out what was put into the e-graph, while this one goes on."""
        if self._is_open:
            self.broken, self._is_open = True, False
            with suppress(OSError):  # nothing is lost but the process
                server.send(self._requests, ("close",))
                self.broken = False

    def end(self) -> None:
        """Ends the process."""
        self.broken = True
        _started.discard(self)
        self._ending()

    def abandon(self) -> None:
        """Leaves the process to the one that this one was forked from."""
        self.broken = True
        self._ending.detach()
        self._process.returncode = 0  # so that nobody waits for it here
        _let_go(self._process)

    @property
    def _shown(self) -> str:
        return f"the process that rewrites programs ({' '.join(self._command[:-1])})"

    def _end(self) -> str:
        """How the process ended, or is ended now."""
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "does not answer"
        return (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        )


def _stopped(process: subprocess.Popen[bytes]) -> None:
    """Ends the process of e-graphs that nobody holds any more, or when this one ends."""
    process.kill()
    process.wait()
    _let_go(process)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


_idle: list[Graphs] = []
"""Processes that wait for the next one who wants an e-graph."""
_started: WeakSet[Graphs] = WeakSet()


def start() -> None:
    """Has a process ready soon, without waiting for it."""
    if not _idle:
        _idle.append(Graphs())


def processes() -> tuple[int, ...]:
    """The process ids of those that this process has started and not ended."""
    return tuple(graphs.process for graphs in list(_started))


@contextmanager
def opened(key: Hashable, declarations: Callable[[], tuple[str, ...]]) -> Iterator[Graphs]:
    """A process with an e-graph open, for as long as the context is; what is put into the e-graph is gone then."""
    graphs = _taken()
    try:
        graphs.open(key, declarations)
        yield graphs
    finally:
        _given_back(graphs)


def _taken() -> Graphs:
    while True:
        try:
            graphs = _idle.pop()
        except IndexError:
            return Graphs()
        if graphs.is_alive:
            return graphs
        graphs.end()


def _given_back(graphs: Graphs) -> None:
    try:
        if not graphs.broken:
            graphs.close()
    finally:
        if graphs.broken or len(_idle) >= (os.cpu_count() or 1):
            graphs.end()
        else:
            _idle.append(graphs)


def _bindings() -> Path:
    """The file of egglog's compiled module. Importing it here would start its threads."""
    spec = find_spec("egglog")
    for folder in (spec and spec.submodule_search_locations) or ():
        for suffix in EXTENSION_SUFFIXES:
            path = Path(folder, f"bindings{suffix}")
            if path.exists():
                return path.absolute()
    raise EqfuseError("egglog is not installed", hint="pip install egglog")


def _forked() -> None:
    """A child has the pipes of its parent's processes, and must not write to them."""
    _idle.clear()
    for graphs in list(_started):
        graphs.abandon()


os.register_at_fork(after_in_child=_forked)
