"""One compilation of the playground: a process of its own, under limits of time and memory.

`Compilation` starts the process, which imports eqfuse and waits for a request: JSON of `Request`'s names on its standard input. It
answers with JSON too, on what was its standard output, and ends.
"""

from __future__ import annotations

import json
import math
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eqfuse import logs
from eqfuse.errors import EqfuseError
from eqfuse.explain.explanation import why_not
from eqfuse.explain.page import fragment
from eqfuse.explain.report import Listings
from eqfuse.program_files import kernel_of, sizes_in
from eqfuse.units import duration

GRACE = 0.5
"""Seconds in which a process that is ended may end its own."""

LONGEST_ANSWER = 64 << 20
"""Bytes."""


@dataclass(frozen=True)
class Limits:
    """`seconds` of one compilation, by the clock and of processor time, and `memory` in bytes beside what eqfuse itself takes."""

    seconds: float
    memory: int

    @property
    def environment(self) -> dict[str, str]:
        """What ends a derivation, and the process of its e-graphs, before these limits do."""
        seconds, megabytes = str(math.ceil(self.seconds)), str(max(1, self.memory >> 20))
        return {"EQFUSE_DERIVE_SECONDS": seconds, "EQFUSE_DERIVE_MB": megabytes}

    def enter(self) -> None:
        """From now on, the system ends this process and those that it starts beyond the limits."""
        cpu = math.ceil(time.process_time() + self.seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        with suppress(
            OSError
        ):  # no /proc: the kernel there does not hold a process to its address space either
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + self.memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


@dataclass(frozen=True)
class Request:
    """A program, a device as `--target` names it, sizes as `--size` has them, and a schedule, or none."""

    program: str
    device: str = "cpu"
    sizes: str = ""
    schedule: str = ""

    @classmethod
    def of(cls, text: bytes) -> Request | None:
        """From JSON; None where that is none, or has other names, or values that are no text."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        known = {field.name for field in fields(cls)}
        if not isinstance(found, dict) or "program" not in found or not found.keys() <= known:
            return None
        return cls(**found) if all(isinstance(value, str) for value in found.values()) else None


class Compilation:
    """A process that compiles one program."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (`end` closes it)
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(limits.seconds), str(limits.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the server
            env={**os.environ, **limits.environment, "PYTHONPATH": path},
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, request: bytes, caller: socket.socket) -> dict[str, Any] | None:
        """What the process makes of a request, or what was wrong with it; None where the caller goes away before. The process has
        ended then."""
        assert self._process.stdin is not None and self._process.stdout is not None
        parts: list[bytes] = []
        deadline = time.monotonic() + self._limits.seconds
        try:
            with suppress(BrokenPipeError):  # it has ended: how is told below
                self._process.stdin.write(request)
                self._process.stdin.close()
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._process.stdout, selectors.EVENT_READ)
                waiting.register(caller, selectors.EVENT_READ)
                while True:
                    ready = [key.fileobj for key, _ in waiting.select(max(0.0, deadline - time.monotonic()))]
                    if not ready:
                        return self._too_long()
                    if self._process.stdout in ready:
                        part = os.read(self._process.stdout.fileno(), 1 << 16)
                        parts.append(part)
                        if not part:
                            return self._ended(b"".join(parts))
                        if sum(map(len, parts)) > LONGEST_ANSWER:
                            return {"error": f"stopped: the page would be longer than {LONGEST_ANSWER} bytes"}
                    elif caller in ready:
                        if not caller.recv(1, socket.MSG_PEEK):
                            return None
                        waiting.unregister(caller)  # it says more, which nobody asked for
        except ConnectionError:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """Ends the process, and what it has started."""
        if self.is_alive:
            self._process.terminate()  # it ends its own
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]  # they are pipes

    def _ended(self, answer: bytes) -> dict[str, Any]:
        """What a process said that has ended by itself, or what has ended it."""
        status = self._process.wait()
        if status == 0:
            found: dict[str, Any] = json.loads(answer)
            return found
        if status == -signal.SIGXCPU:
            return self._too_long()
        if status == -signal.SIGABRT:  # an allocation failed where nobody could say so
            return _too_large(self._limits)
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return {"error": "\n".join([f"the process that compiled it {how}", *said])}

    def _too_long(self) -> dict[str, Any]:
        return {
            "error": f"stopped: it took longer than {self._limits.seconds:g} seconds\neqfuse play --seconds gives more"
        }


def _too_large(limits: Limits) -> dict[str, Any]:
    return {
        "error": f"stopped: it needs more memory than {limits.memory} bytes\neqfuse play --memory gives more"
    }


def compiled(request: Request) -> dict[str, Any]:
    """The parts of the page for a request, and one line about the kernel; or the error, and its line."""
    try:
        kernel, _ = kernel_of(
            request.program, request.device, sizes_in([request.sizes]), prefer=request.schedule or None
        )
        report, derivation, merge = kernel.report, kernel.derivation, str(kernel.merge)
        shown = Listings(str(kernel.loops), str(kernel.tile), kernel.sources(), str(kernel.certificate))
        with kernel.derived.scope.entered():
            blocks, obstacles = derivation.blocks("short"), why_not(report)
            html = fragment(report, derivation, blocks, obstacles, shown, merge)
        cost = report.plan.cost
        predicted = f"{duration(cost.seconds)} predicted, " if cost else ""
        return {
            "html": html,
            "about": f"{report.plan.schedule} on {report.device.name}: {predicted}{kernel.graded}",
        }
    except EqfuseError as error:
        return {"error": str(error), "line": error.span.line if error.span else None}


def main(arguments: Sequence[str]) -> int:
    """Waits for a request, and answers it."""
    seconds, memory = arguments
    limits = Limits(float(seconds), int(memory))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the process of e-graphs
    said, nothing = os.fdopen(os.dup(1), "wb"), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # what libraries print is no answer
    request = Request.of(sys.stdin.buffer.read())
    if request is None:  # the server has ended
        return 0
    limits.enter()
    try:
        answer = compiled(request)
    except MemoryError:
        answer = _too_large(limits)
    except Exception as error:  # noqa: BLE001  (a fault of eqfuse's own, told as the command tells it)
        # A library that is loaded at its first use has no room to be mapped into.
        has_room = not isinstance(error, ImportError) or "failed to map" not in str(error)
        answer = {"error": logs.fault(error)} if has_room else _too_large(limits)
    said.write(json.dumps(answer).encode())
    said.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
