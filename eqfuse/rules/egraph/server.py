"""The process that e-graphs live in: egglog, and nothing else that a start would have to wait for.

`client` starts it as a script, with the file of egglog's compiled module, in an interpreter without site packages.
A request is a method of `Server` and its arguments, an answer whether that went well, what it gave or what went
wrong, and the seconds of processor time of this process so far; each is marshalled behind its length. `close` has no answer. It ends where its requests do.
"""

from __future__ import annotations

import marshal
import math
import os
import resource
import sys
import time
from importlib.machinery import ExtensionFileLoader, ModuleSpec

TYPE_CHECKING = False  # (importing typing takes as long as the rest)
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from egglog import bindings


class Server:
    """Declared e-graphs by number. One of them is open: what is put into it is gone when it is closed."""

    def __init__(self, module: str) -> None:
        loader = ExtensionFileLoader("egglog.bindings", module)
        self._bindings: Any = loader.create_module(ModuleSpec(loader.name, loader, origin=module))
        loader.exec_module(self._bindings)
        self._declared: dict[int, bindings.EGraph] = {}
        self._open: bindings.EGraph = self._bindings.EGraph()
        self._commands: dict[str, Any] = {}

    def limit(self, seconds: float | None, megabytes: int) -> None:
        """From now on, the system ends this process where it takes more processor time, or memory beside what it has; None: it
        does not."""
        most = {resource.RLIMIT_CPU: resource.RLIM_INFINITY, resource.RLIMIT_AS: resource.RLIM_INFINITY}
        if seconds is not None:
            most[resource.RLIMIT_CPU] = math.ceil(time.process_time() + max(0.0, seconds)) + 1
        if seconds is not None and os.path.exists("/proc/self/statm"):
            with open("/proc/self/statm") as pages:
                held = int(pages.read().split()[0]) * resource.getpagesize()
            most[resource.RLIMIT_AS] = held + megabytes * 2**20
        for kind, wanted in most.items():
            hard = resource.getrlimit(kind)[1]
            least = hard if wanted == resource.RLIM_INFINITY else wanted
            if hard == resource.RLIM_INFINITY or least <= hard:
                resource.setrlimit(kind, (least, hard))

    def declare(self, number: int, commands: Sequence[str]) -> None:
        self._declared[number] = self._bindings.EGraph()
        self._run(self._declared[number], *commands, "(push)")

    def forget(self, number: int) -> None:
        del self._declared[number]

    def open(self, number: int) -> None:
        self._open, self._commands = self._declared[number], {}

    def close(self) -> None:
        """Leaves the e-graph as it was opened. This takes a while, and nobody waits for its end."""
        self._run(self._open, "(pop)", "(push)")

    def run(self, commands: Sequence[str]) -> None:
        self._run(self._open, *commands)

    def saturate(self, units: str, others: Sequence[str], rounds: int, matches: int) -> Any:
        """Runs rule sets round after round until none adds anything, or there were as many rounds, or more matches:
        whether it came that far, the rounds, and the matches of each rule.

        `units` runs to its fixed point before each step of another.
        """
        found: dict[str, int] = {}
        total = done = 0
        updated = True

        def step(name: str) -> bool:
            nonlocal total
            if total > matches:
                return False
            if name not in self._commands:
                (self._commands[name],) = self._open.parse_program(f"(run-schedule (run {name}))")
            (output,) = self._open.run_program(self._commands[name])
            for rule, count in output.report.num_matches_per_rule.items():  # type: ignore[union-attr]  # a run's
                found[rule] = found.get(rule, 0) + count
                total += count
            return output.report.updated  # type: ignore[union-attr]

        while updated and done < rounds and total <= matches:
            updated = False
            for name in others:
                while step(units):
                    pass
                updated |= step(name)
            done += 1
        return not updated and total <= matches, done, found

    def read(self) -> Any:
        """Every function: its name, the sorts of its arguments and result, whether it is a global, and its rows, each
        of arguments, result, and whether it is retired. Strings stand as they are, classes as numbers; the result
        of a relation is None."""
        graph = self._open
        numbers: dict[bindings.Value, int] = {}
        strings: dict[bindings.Value, str] = {}

        def value(sort: str, v: bindings.Value) -> int | str:
            if sort != "String":
                return numbers.setdefault(v, len(numbers))
            if v not in strings:
                strings[v] = graph.value_to_string(v)
            return strings[v]

        found = []
        for name, function in graph.freeze().functions.items():
            sorts, rows = function.input_sorts, function.rows
            # all arguments first: a class is numbered where it is read before where it is made
            arguments = [tuple(map(value, sorts, row.inputs)) for row in rows]
            sort = function.output_sort
            results = [None if sort == "Unit" else value(sort, row.output) for row in rows]
            retired = [row.subsumed for row in rows]
            found.append(
                (
                    name,
                    tuple(sorts),
                    sort,
                    function.is_let_binding,
                    list(zip(arguments, results, retired, strict=True)),
                )
            )
        return found

    @staticmethod
    def _run(graph: bindings.EGraph, *commands: str) -> None:
        """Runs commands one by one: egglog's bindings copy the text that was parsed for each node of what it says."""
        for command in commands:
            graph.run_program(*graph.parse_program(command))


def received(source: int, count: int) -> bytes:
    """As many bytes of a pipe. Raises EOFError where it ends before."""
    parts = []
    while count:
        part = os.read(source, min(count, 1 << 20))
        if not part:
            raise EOFError("the pipe has ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive(source: int) -> Any:
    """The next message of a pipe. Raises EOFError where there is none."""
    return marshal.loads(received(source, int.from_bytes(received(source, 8), "little")))


def send(target: int, message: Any) -> None:
    """Writes a message to a pipe."""
    data = marshal.dumps(message)
    rest = memoryview(len(data).to_bytes(8, "little") + data)
    while rest:
        rest = rest[os.write(target, rest) :]


def main(module: str) -> None:
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what egglog may print is no answer
    try:
        server = Server(module)
    except ImportError as error:
        receive(source)
        send(target, (False, f"it cannot be loaded: {error}", time.process_time()))
        return
    while True:
        try:
            name, *arguments = receive(source)
        except EOFError:
            return
        if name == "close":
            server.close()
            continue
        method: Callable[..., Any] = getattr(server, name)
        try:
            answer = True, method(*arguments), time.process_time()
        except BaseException as error:  # noqa: BLE001  (a panic of egglog is no Exception)
            answer = False, f"{type(error).__name__}: {error}", time.process_time()
        send(target, answer)
        if not answer[0]:
            return


if __name__ == "__main__":
    main(sys.argv[1])
