"""The lattice of tile sizes of matrix products: what is priced, and that the cheapest point is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest

from eqfuse.compiler import derive, pipeline
from eqfuse.devices import device_named
from eqfuse.extract import tile_sizes
from eqfuse.extract.product_tiles import LEAST, MOST, Lattice, Point
from eqfuse.terms.types import program_dtypes

H200 = device_named("h200")
GEMM = "C[i,n] = sum[k](A[i,k] * B[k,n])"
ATTENTION = """
S[h,i,j] = sum[d](Q[h,i,d] * K[h,j,d])
P[h,i,j] = exp(S[h,i,j] - max[j](S[h,i,j]))
O[h,i,e] = sum[j](P[h,i,j] / sum[j](P[h,i,j]) * V[h,j,e])
"""


def _chosen(
    monkeypatch: pytest.MonkeyPatch, source: str, sizes: Mapping[str, int], dtype: str
) -> list[tuple[Lattice, Point]]:
    """Every lattice that was searched, with the point that was taken."""
    found: list[tuple[Lattice, Point]] = []
    best = Lattice.best

    def recorded(lattice: Lattice) -> Point:
        point = best(lattice)
        found.append((lattice, point))
        return point

    monkeypatch.setattr(tile_sizes.Lattice, "best", recorded)
    derived = derive(source, None, False)
    dtypes = dict.fromkeys(program_dtypes(derived.program), dtype)
    pipeline(derived, sizes, dtypes, H200, None)
    return found


def _every(lattice: Lattice) -> Iterator[Point]:
    ranges = [
        [s for s in (16, 32, 64, 128, 256) if LEAST <= s <= min(max(LEAST, a.limit), MOST)]
        for a in lattice.axes
    ]
    for sizes in itertools.product(*ranges):
        blocks = {**lattice.start, **dict(zip((a.axis for a in lattice.axes), sizes, strict=True))}
        yield from lattice._priced(blocks)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        (GEMM, {"i": 4096, "n": 4096, "k": 4096}),
        (GEMM, {"i": 16, "n": 4096, "k": 4096}),
        (ATTENTION, {"h": 32, "i": 2048, "j": 2048, "d": 128, "e": 128}),
        (ATTENTION, {"h": 8, "i": 512, "j": 512, "d": 576, "e": 512}),
    ],
)
@pytest.mark.slow(but=["sizes0", "sizes2-f16"])
def test_the_descent_ends_close_to_the_cheapest_point(
    monkeypatch: pytest.MonkeyPatch, source: str, sizes: dict[str, int], dtype: str
) -> None:
    searched = _chosen(monkeypatch, source, sizes, dtype)
    assert searched
    for lattice, point in searched:
        assert point.price <= 1.1 * min(p.price for p in _every(lattice))


def test_where_everything_fits_sizes_are_the_best_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lattice, point = _chosen(monkeypatch, GEMM, {"i": 8192, "n": 8192, "k": 8192}, "f16")[0]
    assert {a.axis: point.blocks[a.axis] for a in lattice.axes} == {"i": 128, "n": 128, "k": 64}
    assert point.warps == 8


def test_two_thread_blocks_of_a_warpgroup_or_one_of_two_where_the_clock_falls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows(length: int) -> tuple[int, int, int]:
        sizes = {"h": 32, "i": length, "j": length, "d": 128, "e": 128}
        found = _chosen(monkeypatch, ATTENTION, sizes, "f16")
        point = next(p for lattice, p in found if lattice.overlaps)
        monkeypatch.undo()
        return point.blocks["i"], point.warps, point.stages

    assert rows(4096) == (64, 4, 3)
    assert rows(32768) == (128, 8, 3)


def test_a_small_grid_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lattice, point = _chosen(monkeypatch, GEMM, {"i": 512, "n": 512, "k": 512}, "f16")[0]
    grid = (512 // point.blocks["i"]) * (512 // point.blocks["n"])
    assert H200.sms / 3 < grid <= H200.sms
    assert point.blocks["i"] >= lattice.device.rows  # rows of a warpgroup are kept


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_products_of_few_rows_have_bytes_under_way_on_every_sm(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    searched = _chosen(monkeypatch, GEMM, {"i": rows, "n": 14336, "k": 4096}, "f16")
    point = next(point for lattice, point in searched if lattice.streams)
    stage = 2 * point.blocks["k"] * (point.blocks["i"] + point.blocks["n"])
    grid = -(-14336 // point.blocks["n"])
    assert grid * (point.stages - 1) * stage >= 0.75 * H200.residuals.bytes_streamed * H200.sms


def test_products_of_many_rows_do_not_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = _chosen(monkeypatch, GEMM, {"i": 8192, "n": 8192, "k": 8192}, "f16")
    assert not any(lattice.streams for lattice, _ in searched)


def test_what_loads_all_before_it_multiplies_wants_two_thread_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"h": 32, "i": 8192, "j": 77, "d": 64, "e": 64}
    found = [(lattice, point) for lattice, point in _chosen(monkeypatch, ATTENTION, sizes, "f16")]
    whole = next(point for lattice, point in found if lattice.overlaps and point.blocks["j"] == 128)
    assert (whole.blocks["i"], whole.warps) == (64, 4)
