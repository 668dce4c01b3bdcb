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


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


class _Inside:
    """The threads that are in blocks of one kind, and what the first of them sets and the last of them sets back.

    A count would be wrong for good after an interrupt between a block and its end. What is kept is the frame of each thread's
    outermost block: one that is not on the thread's stack any more is not counted at the next entry. A frame has one block."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._outermost: dict[int, int] = {}

    def entered(self, frame: FrameType | None) -> tuple[bool, int]:
        """Whether the block of `frame` is the only one, and how many frames deep it is."""
        thread, block, depth, is_outermost = threading.get_ident(), id(frame), 0, True
        known = self._outermost.get(thread)
        while frame is not None:
            depth += 1
            is_outermost = is_outermost and id(frame) != known
            frame = frame.f_back
        if is_outermost:
            self._outermost[thread] = block
        return is_outermost and len(self._outermost) == 1, depth

    def left(self, frame: FrameType) -> bool:
        """Whether there is no block any more after that of `frame`."""
        thread = threading.get_ident()
        if self._outermost.get(thread) == id(frame):
            del self._outermost[thread]
        return not self._outermost

    def forked(self) -> None:
        """In a forked child there is this thread alone, and nobody to open the lock."""
        thread = threading.get_ident()
        self.lock = threading.Lock()
        self._outermost = {known: frame for known, frame in self._outermost.items() if known == thread}


class uncollected:
    """Inside, no cycles of objects are collected: what compiling makes lives on or is freed at once, and a collection walks all
    that torch has made, a fifth of the time of a first compilation. Several threads may be inside."""

    _threads = _Inside()
    _is_off = False

    def __enter__(self) -> None:
        with uncollected._threads.lock:
            uncollected._threads.entered(sys._getframe(1))
            if gc.isenabled():
                uncollected._is_off = True
                gc.disable()

    def __exit__(self, *raised: object) -> None:
        with uncollected._threads.lock:
            if uncollected._threads.left(sys._getframe(1)) and uncollected._is_off:
                uncollected._is_off = False
                gc.enable()


FRAMES = 1500
"""Frames that work on a program of `terms.syntax.MAX_DEPTH` levels may take: 7 for each level, and the stages around."""


class deep(ContextDecorator):
    """Inside, or in a function that it decorates, `FRAMES` calls may stand in each other however deep the caller is: terms are
    walked by recursion, and callers such as notebooks, servers and compilers have used up part of Python's limit. Several
    threads may be inside."""

    _threads = _Inside()
    _was = _is = 0

    def __enter__(self) -> None:
        with deep._threads.lock:
            is_only, depth = deep._threads.entered(sys._getframe(1))
            limit = sys.getrecursionlimit()
            if is_only and limit != deep._is:
                deep._was = deep._is = limit
            if depth + FRAMES > limit:
                sys.setrecursionlimit(depth + FRAMES)
                deep._is = depth + FRAMES

    def __exit__(self, *raised: object) -> None:
        with deep._threads.lock:
            is_ours = sys.getrecursionlimit() == deep._is  # nobody else has set it
            if deep._threads.left(sys._getframe(1)) and is_ours:
                sys.setrecursionlimit(deep._was)
                deep._is = deep._was


def _forked() -> None:
    _Process.is_forked = True
    uncollected._threads.forked()
    deep._threads.forked()
    for lock in list(_locks):
        lock.reopen()


os.register_at_fork(after_in_child=_forked)
