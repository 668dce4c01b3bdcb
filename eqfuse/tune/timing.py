"""The time of a call, on the device that it runs on."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

REPLAYED_MS = 30.0
"""Milliseconds of replays per timing; at least three replays."""
GRAPH_MS = 0.5
"""Milliseconds of launches in one graph, about."""
SLOW_MS = 200.0
"""Milliseconds above which a call is not captured and replayed: its launch does not count."""

CALLED_MS = 100.0
"""Milliseconds of calls per timing where there are no graphs; at least three calls, unless the first of them is
`HOPELESS` times as long as what it is compared with."""
MOST_CALLS = 100
HOPELESS = 2.0


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median of the replays, and the tenths of them that were faster and slower."""

    ms: float
    low_ms: float
    high_ms: float

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        ordered = sorted(samples)
        tenth = len(ordered) // 10
        return Timing(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth])


def replayed(calls: Sequence[Callable[[], object]]) -> Timing:
    """The time of one call in replays of a CUDA graph, without what launching costs; the calls differ in their
    inputs only."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        once = min(elapsed(call) for call in itertools.islice(itertools.cycle(calls), 3))
    torch.cuda.synchronize()
    if once > SLOW_MS:
        return Timing.of([once])
    launches = len(calls) * max(1, round(GRAPH_MS / max(once, 1e-3) / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in itertools.islice(itertools.cycle(calls), launches):
            call()
    graph.replay()
    replay = elapsed(graph.replay)
    count = max(3, min(100, round(REPLAYED_MS / replay)))
    return Timing.of([elapsed(graph.replay) / launches for _ in range(count)])


def called(call: Callable[[], object], against_ms: float) -> Timing:
    """The time of one call on the CPU, with what calling costs. One that takes far longer than `against_ms` is
    called once."""
    samples: list[float] = []
    while len(samples) < 3 or (sum(samples) < CALLED_MS and len(samples) < MOST_CALLS):
        start = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - start))
        if samples[0] > HOPELESS * against_ms:
            break
    return Timing.of(samples)


def elapsed(run: Callable[[], object]) -> float:
    """Milliseconds of device time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
