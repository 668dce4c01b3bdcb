"""The library of matrix products, and torch's BLAS, which it calls for the large ones."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from eqfuse.extract.machine import features
from eqfuse.tile.native.build import library_of

HEADERS = ("vectors.h", "functions.h", "products.h")
DTYPES = ("f32", "f64", "bf16")


@lru_cache
def library(flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library, which may call torch's BLAS. It is compiled once for a machine. Raises NotNative where it cannot be."""
    found = library_of("", flags, HEADERS)
    found.use_library(*map(ctypes.c_void_p, blas()))
    return found


def give(kernel: ctypes.CDLL, flags: tuple[str, ...] = ()) -> None:
    """Gives a compiled kernel the products that it calls. Raises NotNative where there are none."""
    made, several = library(flags), ctypes.c_void_p * len(DTYPES)

    def addresses(kind: str) -> ctypes.Array[ctypes.c_void_p]:
        functions = (getattr(made, f"{kind}_{dtype}") for dtype in DTYPES)
        return several(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))

    threads = ctypes.cast(made.exchange_threads, ctypes.c_void_p)
    kernel.use_products(*map(addresses, ("product", "masked", "several")), threads)


@lru_cache
def blas() -> tuple[int | None, ...]:
    """Addresses of the matrix products of torch's BLAS, of float32, float64 and bfloat16, and of what sets how many
    threads it takes in the thread that asks; None where it hides one, or the processor has no instructions for bfloat16."""
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None, None, None, None
    names = ("sgemm_", "dgemm_", "gemm_bf16bf16f32_", "MKL_Set_Num_Threads_Local")
    single, twice, half, threads = (
        None if f is None else ctypes.cast(f, ctypes.c_void_p).value
        for f in (getattr(found, name, None) for name in names)
    )
    return single, twice, half if {"amx_bf16", "avx512_bf16"} & set(features().split()) else None, threads
