"""What `torch.compile(model, backend="eqfuse")` took, what it did not, and why: `eq.torch.report()`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eqfuse.kernel import Kernel

SECONDS = 0.2
"""How long a form of a region is timed."""


@dataclass
class Entry:
    """One region: the graph that it is in, its operators, the line of code that it comes from, and what became of it.
    `kernel` is that of `source`, `alone` the region as a graph. `predicted` and `measured` are seconds as a kernel and
    without one; None where that is not known."""

    graph: int
    name: str
    line: str
    taken: bool
    why: str
    source: str = ""
    predicted: tuple[float, float] | None = None
    measured: tuple[float, float] | None = None
    kernel: Kernel | None = field(default=None, repr=False)
    alone: torch.fx.GraphModule | None = field(default=None, repr=False)
    time: Callable[[], tuple[float, float]] | None = field(default=None, repr=False)
    unmeasured: str = ""
    """Why it was not timed, where that was asked for."""

    def measure(self) -> None:
        """Times both forms on tensors of the example's sizes and strides, once."""
        if self.measured is None and self.time is not None and not self.unmeasured:
            try:
                self.measured = self.time()
            except Exception as error:  # noqa: BLE001  (torch's own; a report of the others is wanted)
                self.unmeasured = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    def __str__(self) -> str:
        parts = [f"graph {self.graph}: {self.name}", "taken" if self.taken else f"left: {self.why}"]
        if self.kernel is not None:
            parts[-1] += f", {self.kernel.graded}"
        for label, pair in (("predicted", self.predicted), ("measured", self.measured)):
            if pair is not None:
                parts.append(f"{label} {_shown(pair[0])} as a kernel, {_shown(pair[1])} without")
        if self.unmeasured:
            parts.append(f"not timed: {self.unmeasured}")
        if self.line:
            parts.append(self.line)
        return "\n    ".join(parts)


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


@dataclass(frozen=True)
class Report:
    """The regions of all graphs that were compiled, in order, and the graphs that were left as they are. `breaks` are what Dynamo
    says of code that it does not trace, which no back end sees."""

    regions: tuple[Entry, ...]
    graphs: int
    left: tuple[str, ...]
    breaks: tuple[str, ...] = ()

    @property
    def taken(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.regions if entry.taken)

    def __str__(self) -> str:
        count = f"{len(self.taken)} of {len(self.regions)} regions in {self.graphs} graph{'s' * (self.graphs != 1)}"
        unseen = [f"Dynamo runs some code as it is: {said}" for said in self.breaks]
        if not self.graphs and not unseen:
            unseen = ["no compiled function was called since"]
        return "\n".join([f"eqfuse took {count}", *map(str, self.regions), *self.left, *unseen])


_entries: list[Entry] = []
_left: list[str] = []
_graphs: list[int] = [0]


def begin() -> int:
    """The number of a graph that is compiled now."""
    _graphs[0] += 1
    return _graphs[0]


def add(entries: Sequence[Entry]) -> None:
    _entries.extend(entries)


def forget(graph: int) -> None:
    """Forgets a graph that is traced again, the last that was begun."""
    _entries[:] = [entry for entry in _entries if entry.graph != graph]
    _left[:] = [line for line in _left if not line.startswith(f"graph {graph} ")]
    _graphs[0] -= 1


def leave(graph: int, why: str) -> None:
    """Notes that a graph was left as it is."""
    _left.append(f"graph {graph} was left to torch: {why}")


def report(*, measure: bool = True, reset: bool = False) -> Report:
    """What the back end "eqfuse" did with every region of every graph, of whatever model, since the process began or since
    the last `report(reset=True)`: taken or not, why, and predicted and measured seconds. `measure` times regions that have a kernel, taken or not, and were not timed yet, each form for a
    fifth of a second on tensors of the example's sizes: the kernel, and torch's operators one by one. `reset` forgets
    all afterwards."""
    if measure:
        for entry in _entries:
            entry.measure()
    breaks = [said for said, count in _broken().items() if count > _breaks.get(said, 0)]
    found = Report(tuple(_entries), _graphs[0], tuple(_left), tuple(map(_first_words, breaks)))
    if reset:
        _entries.clear()
        _left.clear()
        _graphs[0] = 0
        _breaks.clear()
        _breaks.update(_broken())
    return found


_breaks: dict[str, int] = {}
"""What Dynamo had said when the last report was reset, and how often."""


def _broken() -> dict[str, int]:
    """What Dynamo says of code that it does not trace, and how often it did."""
    from torch._dynamo.utils import counters

    return {
        said: count for kind in ("graph_break", "unimplemented") for said, count in counters[kind].items()
    }


def _first_words(said: str) -> str:
    """What it is, and the first hint."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [said]
    hint = next((line for line in lines if line.startswith("Hint: ")), "")
    return f"{lines[0]}. {hint}" if hint else lines[0]


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call: the median of those in a fifth of a second, once it was called twice."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    run()
    wait()
    found: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(found) < 3 or time.perf_counter() < end and len(found) < 200:
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]
