"""Threads and forks: locks that a forked child finds open, and what is left of torch's threads there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload
from weakref import WeakSet

import torch


class Lock:
    """A reentrant lock. In a forked child it is open, whoever held it: none of the others is there. A copy is a lock
    of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, ()

    def reopen(self) -> None:
        """Opens the lock, unless it is this thread that holds it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_locks: WeakSet[Lock] = WeakSet()


T = TypeVar("T")


class cached(Generic[T]):
    """A property that is computed once. Python 3.11 has one lock for those of all objects, which a forked child may
    find taken; here two threads may compute a value each, and either is kept."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> cached[T]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object | None, kind: type) -> cached[T] | T:
        if owner is None:
            return self
        return owner.__dict__.setdefault(self._compute.__name__, self._compute(owner))  # type: ignore[no-any-return]


class _Process:
    is_forked = False


class _Thread(threading.local):
    count: int | None = None


_thread = _Thread()


def count() -> int:
    """How many threads torch may use here, its own or ours."""
    return torch.get_num_threads() if _thread.count is None else _thread.count


class own_threads:
    """Inside, torch waits for no thread that is not there: OpenMP's do not outlive a fork, and an operation that is
    divided among them would wait for ever. In a forked child this thread computes alone."""

    def __enter__(self) -> None:
        self._is_outermost = _Process.is_forked and _thread.count is None
        if self._is_outermost:
            _thread.count = torch.get_num_threads()
            torch.set_num_threads(1)

    def __exit__(self, *raised: object) -> None:
        if self._is_outermost and _thread.count is not None:
            torch.set_num_threads(_thread.count)
            _thread.count = None


def _forked() -> None:
    _Process.is_forked = True
    for lock in list(_locks):
        lock.reopen()


os.register_at_fork(after_in_child=_forked)
