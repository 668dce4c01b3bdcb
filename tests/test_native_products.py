"""Matrix products of native kernels against float64: few rows and many, every layout, with and without a library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import needs
import pytest
import torch
from test_native_functions import WIDTHS

from eqfuse.tile.native.build import library_of
from eqfuse.tile.native.products import HEADERS, blas, library

pytestmark = needs.cxx

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
SIZES = [
    (1, 7, 5),
    (1, 200, 83),
    (2, 64, 130),
    (3, 33, 64),
    (4, 16, 16),
    (5, 129, 67),
    (8, 100, 200),
    (9, 40, 33),
    (12, 150, 49),
    (20, 17, 70),
    (39, 256, 64),
    (25, 400, 400),
]
SIZES += [(n, k, m) for m, k, n in SIZES] + [(1, 1, 1), (6, 1, 20), (1, 300, 1)]


def has_blas(loaded: ctypes.CDLL, known: bool) -> None:
    loaded.use_library(*map(ctypes.c_void_p, blas() if known else [None] * 4))


@contextmanager
def threads(loaded: ctypes.CDLL, count: int) -> Iterator[None]:
    """Products of this thread are shared out among so many."""
    counts = (ctypes.c_int * 2)(count, count)
    loaded.exchange_threads(counts)
    yield
    loaded.exchange_threads(counts)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(but=["native"])
@pytest.mark.pairwise
def test_products_of_every_layout(
    request: pytest.FixtureRequest, dtype: str, library: bool, width: str
) -> None:
    loaded = library_of("", WIDTHS[width], HEADERS)
    has_blas(loaded, library)
    request.addfinalizer(lambda: has_blas(loaded, True))  # it is the one of all kernels of this process
    generator = torch.Generator().manual_seed(0)
    for (m, k, n), flips, keep in product(SIZES, product((False, True), repeat=3), (False, True)):
        left, right, out = (
            torch.randn((b, a) if flip else (a, b), generator=generator)
            for (a, b), flip in zip(((m, k), (k, n), (m, n)), flips, strict=True)
        )
        left, right = left.to(DTYPES[dtype]), right.to(DTYPES[dtype])
        out = out.to(torch.float64 if dtype == "f64" else torch.float32)
        left, right, out = (t.T if flip else t for t, flip in zip((left, right, out), flips, strict=True))
        wanted = left.double() @ right.double() + (out.double() if keep else 0)
        bound = 1e-6 * (left.double().abs() @ right.double().abs() + 1)
        arguments = [
            *(
                left.data_ptr(),
                *left.stride(),
                right.data_ptr(),
                *right.stride(),
                out.data_ptr(),
                *out.stride(),
            ),
            *(m, k, n, int(keep)),
        ]
        getattr(loaded, f"product_{dtype}")(*map(ctypes.c_longlong, arguments))
        assert ((out.double() - wanted).abs() <= bound).all(), (m, k, n, flips, keep)


@pytest.mark.parametrize(
    "sizes", [(16, 900, 80), (300, 70, 40), (1, 3000, 300), (300, 3000, 1), (16, 4096, 16)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_that_threads_share(dtype: str, sizes: tuple[int, int, int]) -> None:
    loaded = library()
    m, k, n = sizes
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for shape in ((m, k), (n, k)))
    out = torch.ones(m, n, dtype=torch.float64 if dtype == "f64" else torch.float32)
    wanted = left.double() @ right.double().T + 1
    places = (left.data_ptr(), k, 1, right.data_ptr(), 1, k, out.data_ptr(), n, 1)
    with threads(loaded, 2):
        getattr(loaded, f"product_{dtype}")(*map(ctypes.c_longlong, (*places, m, k, n, 1)))
    assert ((out.double() - wanted).abs() <= 1e-6 * (left.double().abs() @ right.double().abs().T + 1)).all()


@pytest.mark.parametrize("rows", [2, 13])
def test_few_rows_of_special_values(rows: int) -> None:
    """NaN and infinities get through a product of few rows as they do through a long one."""
    loaded = library()
    left, right = torch.ones(rows, 40), torch.ones(40, 70)
    left[0, 3], right[3, 5], right[20, 6] = 0.0, float("inf"), float("nan")
    for transposed in (False, True):
        given = right.T.contiguous().T if transposed else right
        out = torch.empty(rows, 70)
        arguments = [
            left.data_ptr(),
            *left.stride(),
            given.data_ptr(),
            *given.stride(),
            out.data_ptr(),
            70,
            1,
        ]
        loaded.product_f32(*map(ctypes.c_longlong, [*arguments, rows, 40, 70, 0]))
        assert torch.equal(out.isnan(), (left @ right).isnan())
        assert torch.equal(out.isinf(), (left @ right).isinf())


CONVOLUTIONS = [
    # channels, kernel's rows and columns, output's channels, rows and columns, wider by so much; steps of the kernel
    (5, 3, 3, 9, 4, 24, 0, 1),
    (5, 3, 3, 9, 4, 24, 3, 1),
    (32, 1, 3, 20, 3, 50, 0, 1),
    (3, 2, 2, 8, 1, 70, 0, 1),
    (7, 3, 2, 4, 5, 9, 0, 1),
    (70, 3, 3, 17, 9, 7, 0, 1),
    (70, 3, 3, 17, 2, 33, 0, 2),
    (5, 3, 3, 9, 6, 7, 0, 3),
    (0, 3, 3, 9, 4, 24, 0, 1),
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", CONVOLUTIONS)
@pytest.mark.slow(but=["native"])
@pytest.mark.pairwise
def test_products_of_several_axes(
    sizes: tuple[int, ...], dtype: str, count: int, turned: bool, width: str
) -> None:
    """A convolution as a product of which three axes are folded and two are columns, or rows, of a tensor with a gap or
    without."""
    loaded = library_of("", WIDTHS[width], HEADERS)
    has_blas(loaded, True)
    c, p, q, o, y, x, gap, step = sizes
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(o, c, p, q, generator=generator).to(DTYPES[dtype])
    image = torch.randn(c, step * (y - 1) + p, step * (x - 1) + q, generator=generator).to(DTYPES[dtype])
    made = torch.float64 if dtype == "f64" else torch.float32
    out = torch.full((o, y, x + gap), 3.0, dtype=made)
    sides = zip((c, p, q), weight.stride()[1:], image.stride(), strict=True)
    rows = [(o, weight.stride(0), 0, out.stride(0))]
    depths = [(n, left, right, 0) for n, left, right in sides]
    columns = [(y, 0, step * image.stride(1), out.stride(1)), (x, 0, step, 1)]
    places, groups = (weight.data_ptr(), image.data_ptr()), (rows, depths, columns)
    if turned:
        places, groups = places[::-1], (columns, depths, rows)
    axes = [
        n
        for group in groups
        for length, left, right, to in group
        for n in (length, *((right, left) if turned else (left, right)), to)
    ]
    for keep in (0, 1):
        given = (*places, out.data_ptr())
        counts = map(ctypes.c_longlong, (*map(len, groups), keep))
        with threads(loaded, count):
            getattr(loaded, f"several_{dtype}")(
                *map(ctypes.c_longlong, given), (ctypes.c_longlong * len(axes))(*axes), *counts
            )
    patches = image.double().unfold(1, p, step).unfold(2, q, step)
    wanted = 2 * torch.einsum("ocpq,cyxpq->oyx", weight.double(), patches)
    bound = 1e-6 * (2 * torch.einsum("ocpq,cyxpq->oyx", weight.double().abs(), patches.abs()) + 1)
    assert ((out[..., :x].double() - wanted).abs() <= bound).all()
    assert (out[..., x:] == 3).all()
