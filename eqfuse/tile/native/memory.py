"""Memory for large outputs, taken again once nobody holds the tensors that it was given to.

New memory comes as pages that the system fills with zeros when they are first written: for an output of 32 MB that
takes half as long as a softmax. Tensors are given as usual: they can be kept, shared and resized.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch

from eqfuse.errors import EqfuseError
from eqfuse.threads import Lock
from eqfuse.tile.storage import contiguous

LEAST = 4 << 20
"""Bytes of an output that is worth it."""

MEGABYTES = 256
"""What is kept for later at the most, unless `EQFUSE_KEEP_MB` says otherwise; 0 keeps nothing."""


class Memory:
    """Storages that were given out, the latest last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._storages: list[torch.UntypedStorage] = []
        self._lock = Lock()
        self._free = self._references([torch.empty(8).untyped_storage()], 0) if most else None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that is not initialised."""
        return self.maker(shape, dtype)()

    def maker(self, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """What makes contiguous tensors that are not initialised."""
        shape, size = tuple(shape), prod(shape) * dtype.itemsize
        if size < LEAST:
            return partial(torch.empty_strided, shape, contiguous(shape), dtype=dtype)

        def make() -> torch.Tensor:
            if size > self._most:
                made = torch.empty(shape, dtype=dtype)
                in_huge_pages(made.untyped_storage())
                return made
            with self._lock:
                storage = self._taken(size)
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape, contiguous(shape))

        return make

    def _taken(self, size: int) -> torch.UntypedStorage:
        for place in reversed(range(len(self._storages))):  # the latest one may still be in a cache
            if self._is_free(place, size):
                self._storages.append(self._storages.pop(place))
                return self._storages[-1]
        made = torch.empty(size, dtype=torch.uint8).untyped_storage()
        in_huge_pages(made)
        self._storages.append(made)
        while sum(storage.nbytes() for storage in self._storages) > self._most:
            del self._storages[0]
        return made

    def _is_free(self, place: int, size: int) -> bool:
        if self._references(self._storages, place) != self._free:
            return False
        storage = self._storages[place]
        return bool(storage.nbytes() == size and not storage.is_shared())

    @staticmethod
    def _references(storages: Sequence[torch.UntypedStorage], place: int) -> tuple[int, int]:
        """Who holds a storage: tensors and views of it, and Python objects that are the storage."""
        storage = storages[place]
        return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@lru_cache
def outputs() -> Memory:
    """The memory of this process. Raises EqfuseError where `$EQFUSE_KEEP_MB` is no number."""
    text = os.environ.get("EQFUSE_KEEP_MB", str(MEGABYTES))
    if not text.isdecimal():
        raise EqfuseError(f"EQFUSE_KEEP_MB is {text!r}", hint="give a number of megabytes; 0 keeps no memory")
    # Nothing is kept where torch does not tell who holds a storage.
    return Memory(int(text) << 20 if hasattr(torch._C, "_storage_Use_Count") else 0)


HUGE = 2 << 20
"""Bytes of a huge page; what is not much longer is left alone."""


def in_huge_pages(storage: torch.UntypedStorage) -> None:
    """Asks for huge pages behind memory that is not written yet. A fault for each page of 4 KB takes longer than most
    kernels: 11 of 20 ms for an output of 32 MB on a virtual machine, 3 of 12 ms in huge pages. A request is all it is."""
    size = storage.nbytes()
    if size < 2 * HUGE or (advise := _madvise()) is None:
        return
    start = -(-storage.data_ptr() // PAGE) * PAGE
    advise(ctypes.c_void_p(start), ctypes.c_size_t(storage.data_ptr() + size - start), MADV_HUGEPAGE)


PAGE, MADV_HUGEPAGE = 4096, 14


@lru_cache
def _madvise() -> Any:
    """The C library's `madvise`; None where it has no huge pages to give."""
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
