"""What is around a call: other threads, the process that this one was forked from, what torch is set to."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from types import FrameType
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


def is_plain() -> bool:
    """Whether torch computes as `undisturbed` makes it compute, for those who run no operation of torch but allocations."""
    return not (_Process.is_forked or _functions() or _dispatches())


_functions, _dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack


class undisturbed:
    """Inside, torch computes as it does in a fresh thread of this process, whatever is set around it: in the dtypes that
    are asked for, not those of autocast; on the devices that are, not the default one; past modes of `__torch_function__`.
    And it waits for no thread that is not there: OpenMP's do not outlive a fork, and an operation that is divided
    among them would wait for ever. In a forked child this thread computes alone."""

    def __init__(self) -> None:
        self._modes = torch._C.DisableTorchFunction()
        self._autocast: torch.autocast | None = None
        self._is_alone = False

    def __enter__(self) -> None:
        try:
            self._modes.__enter__()
            if torch.is_autocast_enabled("cpu"):
                self._autocast = torch.autocast("cpu", enabled=False)
                self._autocast.__enter__()  # type: ignore[no-untyped-call]
            if _Process.is_forked and _thread.count is None:
                _thread.count, self._is_alone = torch.get_num_threads(), True
                torch.set_num_threads(1)
        except BaseException:  # an interrupt
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        if self._is_alone and _thread.count is not None:
            torch.set_num_threads(_thread.count)
            _thread.count = None
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
        self._modes.__exit__(None, None, None)


class uncollected:
    """Inside, no cycles of objects are collected: what compiling makes lives on or is freed at once, and a collection walks all
    that torch has made, a fifth of the time of a first compilation. Several threads may be inside."""

    _lock = threading.Lock()
    _inside = 0
    _was_on = False

    def __enter__(self) -> None:
        with uncollected._lock:
            if not uncollected._inside:
                uncollected._was_on = gc.isenabled()
                gc.disable()
            uncollected._inside += 1

    def __exit__(self, *raised: object) -> None:
        with uncollected._lock:
            uncollected._inside -= 1
            if not uncollected._inside and uncollected._was_on:
                gc.enable()


FRAMES = 1500
"""Frames that work on a program of `terms.syntax.MAX_DEPTH` levels may take: 7 for each level, and the stages around."""


class deep(ContextDecorator):
    """Inside, or in a function that it decorates, `FRAMES` calls may stand in each other however deep the caller is: terms are
    walked by recursion, and callers such as notebooks, servers and compilers have used up part of Python's limit. Several
    threads may be inside."""

    _lock = threading.Lock()
    _inside = 0
    _was = _is = 0

    def __enter__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        wanted = FRAMES
        while frame is not None:
            frame, wanted = frame.f_back, wanted + 1
        with deep._lock:
            if not deep._inside:
                deep._was = deep._is = sys.getrecursionlimit()
            deep._inside += 1
            if wanted > sys.getrecursionlimit():
                sys.setrecursionlimit(wanted)
                deep._is = wanted

    def __exit__(self, *raised: object) -> None:
        with deep._lock:
            deep._inside -= 1
            if not deep._inside and sys.getrecursionlimit() == deep._is:  # nobody else has set it
                sys.setrecursionlimit(deep._was)


def _forked() -> None:
    _Process.is_forked = True
    uncollected._lock, deep._lock = threading.Lock(), threading.Lock()
    for lock in list(_locks):
        lock.reopen()


os.register_at_fork(after_in_child=_forked)
