"""Functions of native kernels on vectors of float32 against float64, over all kinds of numbers."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import needs
import numpy as np
import pytest
import torch

from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.tile.native.build import library_of

pytestmark = needs.cxx

Exact = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, tuple[Exact, float]] = {
    "exponential": (torch.exp, 1.0),
    "exponential2": (torch.exp2, 1.0),
    "logarithm": (torch.log, 1.0),
    "logarithm_of_1_and": (torch.log1p, 2.0),
    "exponential_less_1": (torch.expm1, 3.0),
    "tangent_hyperbolic": (torch.tanh, 1.6),
    "error_function": (torch.erf, 1.0),
    "logistic": (torch.sigmoid, 2.3),
    "sine": (torch.sin, 1.6),
    "cosine": (torch.cos, 1.6),
    "root": (torch.sqrt, 0.5),
    "reciprocal_root": (torch.rsqrt, 1.5),
    "floor": (torch.floor, 0.0),
    "nearest": (torch.round, 0.0),
}
"""Each function in float64, and how many units in the last place of float32 it may be off."""
ROUNDED = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}

SOURCE = "\n".join(
    f"""extern "C" void call_{name}(const float* x, float* y, i64 n) {{
  for (i64 k = 0; k < n; k += LANES) put_f32(y + k, {name}(load_f32(x + k)));
}}"""
    for name in (*FUNCTIONS, *(f"rounded_{dtype}" for dtype in ROUNDED))
)
SOURCE += """
extern "C" void divide(const float* x, const float* by, float* y, i64 n, i64 m) {
  for (i64 k = 0; k < m; k++) for (i64 j = 0; j < n; j += LANES)
    put_f32(y + k * n + j, quotient(load_f32(x + j), by[k]));
}
extern "C" void divide_down(const float* x, const float* by, float* q, float* r, i64 n) {
  for (i64 k = 0; k < n; k += LANES) {
    put_f32(q + k, floor_quotient(load_f32(x + k), load_f32(by + k)));
    put_f32(r + k, floor_remainder(load_f32(x + k), load_f32(by + k)));
  }
}
extern "C" void angles(const float* y, const float* x, float* r, i64 n) {
  for (i64 k = 0; k < n; k += LANES) put_f32(r + k, angle(load_f32(y + k), load_f32(x + k)));
}
extern "C" void divide_down_doubles(const double* x, const double* by, double* q, double* r, i64 n) {
  for (i64 k = 0; k < n; k += LANES) {
    put_f64(q + k, floor_quotient(load_f64(x + k), load_f64(by + k)));
    put_f64(r + k, floor_remainder(load_f64(x + k), load_f64(by + k)));
  }
}
extern "C" i64 width() { return LANES; }
"""
ELEMENTS = {
    "f32": "float",
    "f64": "double",
    "i32": "int",
    "i64": "i64",
    "f16": "_Float16",
    "i8": "i8",
    "bool": "u8",
}
SOURCE += "\n".join(
    f'extern "C" void some_{dtype}(const {element}* x, {element}* y, i64 n) '
    f"{{ put_{dtype}(y, load_{dtype}(x, n), n); }}"
    for dtype, element in ELEMENTS.items()
)
WIDTHS = {"native": (), "avx2": ("-mno-avx512f",), "sse": ("-mno-avx512f", "-mno-avx", "-mno-fma")}
"""Vectors of 16, 8 and 4 lanes, where the processor has them."""


def inputs() -> np.ndarray:
    generator = np.random.default_rng(0)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1,
        -1,
        1e-45,
        -1e-45,
        1.1754944e-38,
        3.4e38,
        88.72,
        88.73,
        -87.4,
    ]
    special += [
        -103.9,
        -103.98,
        127.99,
        128,
        -149,
        -149.5,
        -150,
        np.pi,
        65535.9,
        65536,
        1e5,
        448,
        464,
        465,
        480,
    ]
    drawn = [
        generator.integers(0, 2**32, 1 << 18, dtype=np.uint64).astype(np.uint32).view(np.float32),
        generator.uniform(-110, 95, 1 << 17).astype(np.float32),
        np.linspace(-152, 130, 1 << 17).astype(np.float32),
        generator.normal(size=1 << 17).astype(np.float32),
        generator.uniform(0.5, 2, 1 << 16).astype(np.float32),
        np.resize(np.array(special, np.float32), 1 << 10),
    ]
    return np.concatenate(drawn)


X = inputs()


@pytest.fixture(scope="module", params=WIDTHS)
def library(request: pytest.FixtureRequest) -> Any:
    return library_of(SOURCE, WIDTHS[request.param])


def called(library: Any, name: str) -> np.ndarray:
    y = np.empty_like(X)
    getattr(library, f"call_{name}")(
        ctypes.c_void_p(X.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_longlong(len(X))
    )
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_right_to_a_few_units(library: Any, name: str) -> None:
    exact, units = FUNCTIONS[name]
    found = called(library, name)
    wanted = exact(torch.from_numpy(X).double()).numpy()
    with np.errstate(over="ignore"):
        single = wanted.astype(np.float32)
    assert (np.isnan(found) == np.isnan(single)).all()
    infinite = np.isinf(found) | np.isinf(single)
    assert (found[infinite] == single[infinite]).all()
    known = ~np.isnan(single)
    assert (np.signbit(found) == np.signbit(single))[known].all()
    rest = known & ~infinite
    unit = np.spacing(np.abs(single[rest])).astype(np.float64)
    error = np.abs(found[rest] - wanted[rest]) / unit
    assert error.max() <= units, f"{error.max()} units at {X[rest][error.argmax()]}"


@pytest.mark.parametrize("dtype", ROUNDED)
def test_narrow_dtypes_are_rounded_as_torch_rounds(library: Any, dtype: str) -> None:
    x = torch.from_numpy(X)
    end = {"f8e4m3": 448.0, "f8e5m2": 57344.0}.get(dtype, np.inf)
    wanted = x.clamp(-end, end).to(ROUNDED[dtype]).float().numpy()
    found = called(library, f"rounded_{dtype}")
    assert ((found == wanted) | (np.isnan(found) & np.isnan(wanted))).all()


@pytest.mark.parametrize(
    ("name", "dtype"), [("divide_down", np.float32), ("divide_down_doubles", np.float64)]
)
def test_divisions_that_round_down_are_those_of_numpy(library: Any, name: str, dtype: type) -> None:
    """Also those beyond 2**22, where half of one is a unit in the last place."""
    generator = np.random.default_rng(2)
    x, by = (generator.choice([-1, 1], 1 << 16) * np.exp2(generator.uniform(-40, 40, 1 << 16)) for _ in "xy")
    x[: 1 << 15] = np.floor(x[: 1 << 15] % 2**20)
    by[: 1 << 14] = -0.1
    x, by = x.astype(dtype), by.astype(dtype)
    quotients, remainders = np.empty_like(x), np.empty_like(x)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, by, quotients, remainders))
    getattr(library, name)(*pointers, ctypes.c_longlong(len(x)))
    np.testing.assert_array_equal(quotients, np.floor_divide(x, by))
    np.testing.assert_array_equal(remainders, np.mod(x, by))


def test_angles_are_right_to_a_few_units(library: Any) -> None:
    """Also those of zeros, infinities and denormals, with their signs."""
    generator = np.random.default_rng(3)
    special = np.array(
        [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32
    )
    pairs = np.array(np.meshgrid(special, special)).reshape(2, -1)
    drawn = generator.normal(size=(2, 1 << 16)) * np.exp2(generator.uniform(-30, 30, (2, 1 << 16)))
    y, x = np.concatenate(
        [np.resize(pairs, (2, 1 << 7)), drawn, generator.normal(size=(2, 1 << 16))], 1
    ).astype(np.float32)
    found = np.empty_like(y)
    library.angles(
        *(ctypes.c_void_p(array.ctypes.data) for array in (y, x, found)), ctypes.c_longlong(len(y))
    )
    wanted = np.arctan2(y.astype(float), x.astype(float))
    assert (np.isnan(found) == np.isnan(wanted)).all()
    known = ~np.isnan(wanted)
    assert (np.signbit(found) == np.signbit(wanted))[known].all()
    unit = np.spacing(np.abs(wanted[known]).astype(np.float32)).astype(float)
    assert (np.abs(found[known] - wanted[known]) / unit).max() <= 2.0


def test_quotients_by_one_number_are_those_of_divisions(library: Any) -> None:
    generator = np.random.default_rng(1)
    drawn = np.exp2(generator.uniform(-24, 62, 40)) * generator.choice([-1, 1], 40)
    by = np.array(
        [3, -7, 1 / 3, 0, -0.0, np.inf, np.nan, 1e-45, 1e-30, 1e38, 1.9999999, 8191, *drawn], np.float32
    )
    x = X[:: len(X) // (1 << 15)]
    x = np.concatenate([x[: len(x) // 16 * 16], X[-1024:]])
    y = np.empty((len(by), len(x)), np.float32)
    library.divide(
        *(ctypes.c_void_p(array.ctypes.data) for array in (x, by, y)),
        ctypes.c_longlong(len(x)),
        ctypes.c_longlong(len(by)),
    )
    with np.errstate(all="ignore"):
        wanted = x[None] / by[:, None]
    assert ((y.view(np.int32) == wanted.view(np.int32)) | (np.isnan(y) & np.isnan(wanted))).all()


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_parts_of_vectors_are_read_and_written_alone(library: Any, dtype: str) -> None:
    """At the end of a page behind which nothing may be read, and beside bytes that are another's."""
    library.width.restype = ctypes.c_longlong
    most, page = library.width(), mmap.PAGESIZE
    item = torch.empty(0, dtype=TORCH_DTYPES[dtype]).element_size()
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    assert not protect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0)
    for n in range(most + 1):
        given = bytes([1, 0] * (n * item))[: n * item] if dtype != "bool" else bytes([1] * n)
        memory[page - n * item : page] = given
        target = ctypes.create_string_buffer(b"\xa5" * (item * (most + 1)), item * (most + 1))
        there = ctypes.c_void_p(start + page - n * item)
        getattr(library, f"some_{dtype}")(there, target, ctypes.c_longlong(n))
        assert target.raw == given + b"\xa5" * (item * (most + 1 - n))
    protect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)
