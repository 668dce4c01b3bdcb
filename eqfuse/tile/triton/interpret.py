"""Triton's interpreter, in this process, made exact and fast enough to check emitted kernels with.

Triton decides at import whether its own library functions are interpreted; here they are while the context is open. Within the context

- folds and scans with a user's combine function work on whole slices instead of one element at a time;
- dots of bfloat16 multiply numbers, not their bit patterns;
- conversions round as the hardware does;
- the vendor's functions (libdevice) are there;
- loop bounds may be arrays of one element, which numpy no longer converts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import torch
import triton.experimental.gluon  # Triton's launcher imports it, which has to happen outside the context
import triton.language as tl
from triton.language import standard
from triton.language.extra import libdevice
from triton.runtime import interpreter as emulator
from triton.runtime.jit import JITFunction

_TORCH = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def _converted(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Bits of numbers in one floating dtype as bits in another, rounded half to even."""
    numbers = torch.from_numpy(np.ascontiguousarray(data)).view(_TORCH[source]).to(_TORCH[target])
    storage = {1: torch.uint8, 2: torch.uint16}.get(numbers.element_size()) if target not in _PLAIN else None
    return np.asarray((numbers if storage is None else numbers.view(storage)).numpy())


_GLUON = triton.experimental.gluon

_PLAIN = (tl.float16, tl.float32, tl.float64)
"""Floating dtypes that numpy has itself."""


def _cast(builder: Any, source: Any, target: Any) -> Any:
    have, want = source.dtype.scalar, target.scalar
    if have in _TORCH and want in _TORCH:
        return emulator.TensorHandle(_converted(source.data, have, want), want)
    return _original_cast(builder, source, target)


def _splat(builder: Any, shaped: Any, source: Any) -> Any:
    """A number as a tile. What compares numbers has their dtype, and is one truth value."""
    if source.data.dtype == np.bool_:
        return emulator.TensorHandle(np.full(shaped.shape, source.data.item()), tl.int1)
    return _original_splat(builder, shaped, source)


def _by_numpy(function: Any, *args: Any) -> Any:
    """One of the vendor's functions, of tensors and numbers."""
    like = reduce(add, args)
    numbers = (arg.handle.data if isinstance(arg, tl.tensor) else arg for arg in args)
    return tl.tensor(emulator.TensorHandle(function(*numbers), like.dtype), like.type)


def _convert(builder: Any, source: Any, target: Any, rounding: Any) -> Any:
    return _cast(builder, source, target)


def _dot(builder: Any, left: Any, right: Any, accumulator: Any, precision: Any, imprecise: Any) -> Any:
    wide = np.float64 if accumulator.data.dtype == np.float64 else np.float32
    a, b = (
        side.data.astype(wide)
        if side.dtype.scalar in _PLAIN
        else _converted(side.data, side.dtype.scalar, tl.float32)
        for side in (left, right)
    )
    return emulator.TensorHandle(np.matmul(a, b) + accumulator.data, accumulator.dtype.scalar)


def _states(fold: Any, values: tuple[Any, ...]) -> Iterator[list[Any]]:
    """The states after each slice of the tiles along the axis, first to last."""

    def slices(place: int) -> list[Any]:
        return [fold.to_tensor(np.take(v.handle.data, place, fold.axis), v.dtype) for v in values]

    total = slices(0)
    yield total
    for place in range(1, values[0].handle.data.shape[fold.axis]):
        made = fold.combine_fn.fn(*total, *slices(place))
        total = list(made) if isinstance(made, tuple | tl.tuple) else [made]
        yield total


def _reduce(fold: Any, values: tuple[Any, ...]) -> list[Any]:
    """`ReduceOps.generic_reduce`: the last of the states."""
    *_, total = _states(fold, values)
    return total


def _scan(fold: Any, values: tuple[Any, ...]) -> list[Any]:
    """`ScanOps.generic_scan`: all states, along the axis."""
    found = list(_states(fold, values))
    tiles = (np.stack([states[n].handle.data for states in found], fold.axis) for n in range(len(values)))
    return [
        fold.to_tensor(tile.reshape(v.handle.data.shape), v.dtype)
        for v, tile in zip(values, tiles, strict=True)
    ]


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _original_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _Patches:
    """Triton restores what a kernel's launch patched, but not what the functions it calls patched after:
    these go back first, newest first."""

    def __init__(self) -> None:
        self._nested: list[Any] = []
        self._running = False

    def patch(self, function: Any) -> Any:
        scope = _original_patch_lang(function)
        if self._running:
            self._nested.append(scope)
            return scope
        self._running, restore = True, scope.restore

        def restore_all() -> None:
            while self._nested:
                self._nested.pop().restore()
            restore()
            self._running = False

        scope.restore = restore_all
        return scope


_original_patch_lang = emulator._patch_lang
_original_cast = emulator.InterpreterBuilder.cast_impl
_original_splat = emulator.InterpreterBuilder.create_splat
_original_patch_tensor = emulator._patch_lang_tensor


@contextmanager
def interpreter() -> Iterator[None]:
    """Runs kernels of modules that were loaded `interpreted`. Restores Triton's state on exit."""
    builder, folds = emulator.InterpreterBuilder, emulator.ReduceOps
    changes: list[tuple[Any, str, Any]] = [
        (builder, "cast_impl", _cast),
        (builder, "create_fp_to_fp", _convert),
        (builder, "create_splat", _splat),
        (builder, "create_dot", _dot),
        (folds, "generic_reduce", _reduce),
        (emulator.ScanOps, "generic_scan", _scan),
        (emulator, "_patch_lang_tensor", _patch_tensor),
        (emulator, "_patch_lang", _Patches().patch),
        (libdevice, "fmod", lambda a, b: a % b),
        (libdevice, "log1p", partial(_by_numpy, np.log1p)),
        (libdevice, "expm1", partial(_by_numpy, np.expm1)),
        (libdevice, "atan2", partial(_by_numpy, np.arctan2)),
    ]
    for name, function in list(vars(standard).items()):
        if isinstance(function, JITFunction):
            interpreted = emulator.InterpretedFunction(function.fn)
            changes += [(home, name, interpreted) for home in (standard, tl) if hasattr(home, name)]
    saved = [(home, name, getattr(home, name)) for home, name, _ in changes]
    try:
        for home, name, replacement in changes:
            setattr(home, name, replacement)
        with np.errstate(all="ignore"):
            yield
    finally:
        for home, name, original in saved:
            setattr(home, name, original)
