"""How long calls take: in turn with others, in series, and in graphs of a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eqfuse.measure import interleaved, synchronize
from eqfuse.tune.timing import elapsed, replayed

ROUNDS = 15
SERIES_SECONDS = 0.1
GRAPH_MS = 0.5
"""Milliseconds of the calls in one graph, at least: the host, which takes longer for a call than short kernels run, is not what is timed."""
SUSTAINED_MS = 30.0
SUSTAINED_ROUNDS = 4

Call = Callable[[], object]


def seconds_of(call: Call, device: str) -> tuple[float, float]:
    """Seconds until a call comes back, and until the device has done all of it."""
    synchronize(device)
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    synchronize(device)
    return host, time.perf_counter() - start


def repeated(call: Call, count: int) -> Call:
    """So many calls, whose results are not kept: memory is that of one."""

    def calls() -> None:
        for _ in range(count):
            call()

    return calls


def in_turn(
    calls: Mapping[str, Callable[[dict[str, Any]], object]],
    given: Sequence[dict[str, Any]],
    device: str,
    *,
    rounds: int = ROUNDS,
    most_seconds: float = math.inf,
) -> dict[str, float]:
    """Milliseconds of each call: medians over inputs that change from call to call. One whose first call takes more than
    `most_seconds` is called once. On a CPU with one thread they are of the processor, so that what else runs there does not count."""
    alone = device == "cpu" and torch.get_num_threads() == 1
    times = interleaved(
        calls,
        lambda turn: given[(turn + turn // len(given)) % len(given)],
        device=device,
        rounds=rounds,
        budget_seconds=math.inf,
        most_seconds=most_seconds,
        clock=time.process_time if alone else time.perf_counter,
    )
    return {name: 1e3 * times.median(name) for name in calls}


def series(call: Call, device: str) -> float:
    """Milliseconds of a call among others that are launched without waiting: the median of three series."""
    call()
    _, one = seconds_of(call, device)
    count = max(3, min(200, int(SERIES_SECONDS / max(one, 1e-6))))
    found = [seconds_of(repeated(call, count), device)[1] for _ in range(3)]
    return 1e3 * statistics.median(found) / count


def milliseconds(call: Call, device: str = "cuda") -> float:
    """The median of replays of a CUDA graph, of single launches where the work cannot be captured; on a CPU the least of a few calls."""
    if device == "cpu":
        return 1e3 * min(seconds_of(call, device)[1] for _ in range(6))
    try:
        return replayed([call]).ms
    except RuntimeError:
        from triton.testing import do_bench

        torch.cuda.synchronize()
        return float(do_bench(call, warmup=10, rep=30, return_mode="median"))


def sustained(calls: Mapping[str, Call]) -> dict[str, float]:
    """Milliseconds of each call, medians of rounds in which all run in turn for `SUSTAINED_MS` of graphs back to back: such a GPU is at its power
    limit after a second, and its clock is still that of who ran before, so each round begins with another one."""
    graphs = list({name: _graph(call) for name, call in calls.items()}.items())
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(SUSTAINED_ROUNDS):
        first = number * len(graphs) // SUSTAINED_ROUNDS
        for name, (replay, replays, count) in graphs[first:] + graphs[:first]:
            found[name].append(_together(replay, replays) / (replays * count))
    return {name: statistics.median(times) for name, times in found.items()}


def _graph(call: Call) -> tuple[Call, int, int]:
    """What replays a graph of some calls, how many replays make up a round, and of how many calls each."""
    count = max(1, math.ceil(GRAPH_MS / (_together(call, 3) / 3)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated(call, count)()
    return graph.replay, max(3, round(SUSTAINED_MS / (_together(graph.replay, 3) / 3))), count


def _together(call: Call, count: int) -> float:
    """Milliseconds of device time of so many calls."""
    return elapsed(repeated(call, count))


def peak_gb(call: Call) -> float:
    """Gigabytes that a GPU holds at the peak of a call over what it held before."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e9
