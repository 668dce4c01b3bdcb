"""Programs as deep as may be, from callers that have used up most of Python's stack."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import eqfuse as eq
from eqfuse.threads import deep, uncollected

TERMS = 140
MASK = f"y[i] = sum[j](where({' | '.join(f'(j == {k})' for k in range(TERMS))}, x[i,j], 0))"
SUM = f"y[i] = sum[j]({' + '.join(f'x[i,j] * {k}' for k in range(TERMS))})"
WHERE = "y[i,j] = " + "".join(f"where(x[i,j] > {k}, {k}, " for k in range(TERMS)) + "x[i,j]" + ")" * TERMS


def below(frames: int, work: Callable[[], Any]) -> Any:
    return work() if frames == 0 else below(frames - 1, work)


def used() -> int:
    return len(inspect.stack(0))


WORK: dict[str, Callable[[str], Any]] = {
    "compile": lambda text: eq.compile(text, target="cpu", native="off", verify=False).explain(),
    "call": lambda text: eq.compile(text, target="cpu", native="off", verify=False)(x=torch.ones(2, 5)),
    "grad": lambda text: eq.grad(text, wrt=("x",)),
    "reference": lambda text: eq.reference(text)(x=torch.ones(2, 5)),
    "equivalent": lambda text: eq.equivalent(text, text, trials=2),
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("text", [MASK, SUM, WHERE], ids=["mask", "sum", "where"])
@pytest.mark.slow(but=["sum-call", "mask-grad", "mask-reference"])
def test_deep_callers_find_room(work: str, text: str) -> None:
    limit = sys.getrecursionlimit()
    below(limit - used() - 250, lambda: WORK[work](text))
    assert sys.getrecursionlimit() == limit


@pytest.fixture
def limit() -> Iterator[int]:
    """The limit that Python begins with: torch's compiler sets a higher one for the process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield 1000
    sys.setrecursionlimit(before)


def test_the_limit_is_that_of_all_threads_until_the_last_is_done(limit: int) -> None:
    started, done = threading.Event(), threading.Event()

    def other() -> None:
        with deep():
            started.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    with deep():
        thread.start()
        started.wait(10)
    assert sys.getrecursionlimit() > limit
    done.set()
    thread.join()
    assert sys.getrecursionlimit() == limit


def test_a_limit_that_was_set_inside_stays() -> None:
    limit = sys.getrecursionlimit()
    try:
        with deep():
            sys.setrecursionlimit(limit + 5000)
        assert sys.getrecursionlimit() == limit + 5000
    finally:
        sys.setrecursionlimit(limit)


def test_a_block_that_an_interrupt_left_open_is_not_counted(limit: int) -> None:
    def interrupted() -> None:
        deep().__enter__()
        uncollected().__enter__()

    below(20, interrupted)
    assert sys.getrecursionlimit() > limit
    assert not gc.isenabled()
    with deep(), uncollected():
        below(5, deep()(lambda: None))
        assert sys.getrecursionlimit() > limit
    assert sys.getrecursionlimit() == limit
    assert gc.isenabled()
