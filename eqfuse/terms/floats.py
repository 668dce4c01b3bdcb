"""Floating-point domains: numpy arrays in float64 or float32, with IEEE infinities and NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from eqfuse.terms import integers
from eqfuse.terms.definitions import evaluated
from eqfuse.terms.domain import Watch
from eqfuse.terms.dtypes import FLOAT8
from eqfuse.terms.functions import CASTS, COMPARISONS, DRAWN, FUNCTIONS, OF_INTEGERS, ROUNDINGS
from eqfuse.terms.nodes import REDUCTIONS
from eqfuse.threads import undisturbed

Array = npt.NDArray[Any]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
}
"""The torch dtype of each dtype of the language."""

COMPARE: Mapping[str, np.ufunc] = {fn: getattr(np, FUNCTIONS[fn].numpy) for fn in COMPARISONS}
FOLD: Mapping[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def rounded(value: Array, dtype: str) -> Array:
    """`value` rounded to a dtype as torch rounds, in its own dtype; a wider dtype changes nothing. Beyond the largest
    number of float8 is that number: of torch's versions some give NaN there."""
    if dtype in FLOAT8:
        value = np.clip(value, -FLOAT8[dtype], FLOAT8[dtype])
    return _by_torch(lambda tensor: tensor.to(TORCH_DTYPES[dtype]).to(tensor.dtype))(value)


def _by_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
    def call(value: Array) -> Array:
        with undisturbed():
            return np.asarray(function(torch.from_numpy(np.array(value, order="C"))).numpy())

    return call


PRIMITIVE: Mapping[str, Callable[..., Any]] = {
    **{row.name: getattr(np, row.numpy) for row in FUNCTIONS.values() if row.numpy and row.result != "truth"},
    # As torch has it, the sign of NaN is 0.
    "sign": lambda x: np.nan_to_num(np.sign(x), nan=0.0),
    "exp2": np.exp2,
    "erf": _by_torch(torch.erf),
    "finite": lambda x: np.where(np.isinf(x), 0, x),
    "invertible": lambda x: np.where((x == 0) | np.isinf(x), 1, x),
}
"""Functions of reals that have no definition, and those that numpy has too."""


IRRATIONAL: Mapping[str, float] = {"log2_e": float(np.log2(np.e)), "ln_2": float(np.log(2))}


class FloatDomain:
    """Arithmetic of `domain.Domain` in one float dtype. A written cast rounds; NaN propagates."""

    watch: Watch | None = None
    orders = True

    def __init__(self, dtype: Literal["float64", "float32"] = "float64") -> None:
        self.name: str = dtype
        self.dtype = np.dtype(dtype)

    def full(self, shape: tuple[int, ...], number: float) -> Array:
        return np.full(shape, number, self.dtype)

    def irrational(self, name: str, shape: tuple[int, ...]) -> Array:
        return self.full((1,) * len(shape), IRRATIONAL[name])

    def lift(self, integers: Array) -> Array:
        return np.asarray(integers).astype(self.dtype)

    def call(self, fn: str, args: Sequence[Any]) -> Array:
        if fn in CASTS:
            return rounded(args[0], fn)
        if fn in ROUNDINGS:
            return integers.rounded(args[0], fn)
        if fn in DRAWN:
            return self.drawn(fn, [integers.nearest(arg) for arg in args])
        if fn in OF_INTEGERS:
            return integers.call(fn, tuple(map(integers.nearest, args)))
        if fn not in PRIMITIVE:
            return np.asarray(evaluated(FUNCTIONS[fn].definition, fn, args, self.dtype.type, self.call))
        with np.errstate(all="ignore"):
            return np.asarray(PRIMITIVE[fn](*args), self.dtype)

    def drawn(self, fn: str, whole: Sequence[Any]) -> Array:
        return integers.uniform(*whole).astype(self.dtype)

    def rounded(self, dtype: str, value: Any) -> Array:
        return self.call(dtype, [value])

    def compare(self, fn: str, left: Any, right: Any) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(COMPARE[fn](left, right))

    def where(self, condition: Array, left: Any, right: Any) -> Array:
        return np.asarray(np.where(condition, left, right))

    def reduce(self, op: str, value: Any, axis: int) -> Array:
        with np.errstate(all="ignore"):
            folded = FOLD[op].reduce(
                value, axis=axis, dtype=self.dtype, initial=self.dtype.type(REDUCTIONS[op])
            )
        return np.asarray(folded)

    def contract(self, left: Any, right: Any, axis: int) -> Array:
        return self.reduce("sum", self.call("mul", [left, right]), axis)

    def is_finite(self, value: Any) -> bool:
        return bool(np.isfinite(value).all())

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def reshape(self, value: Any, shape: tuple[int, ...]) -> Array:
        return np.asarray(np.reshape(value, shape))

    def transpose(self, value: Any, order: Sequence[int]) -> Array:
        return np.transpose(value, order)

    def broadcast(self, value: Any, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(value, shape)

    def take(self, value: Any, index: tuple[Any, ...]) -> Array:
        return np.asarray(value[index])

    def put(self, target: Any, index: tuple[Any, ...], value: Any) -> None:
        target[index] = value
