"""Measures what the cost model asks of a CPU: see `extract.machine.Rates`. It takes about two seconds."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from eqfuse.extract.machine import Rates, cache_bytes, cores
from eqfuse.tile.native.build import library_of

REPEATS = 7

LARGE = 96 << 20
"""Bytes that are copied, of each of two arrays: more than is kept of them in a cache that others use too."""

SMALL = 16 << 10
"""Bytes that stay in a first-level cache."""

SIZE = 768
"""Rows and columns of a product of matrices."""

SOURCE = """
#define ALL(name, body) \\
  extern "C" void name(float* x, float* y, i64 n, i64 times, int threads) { \\
    _Pragma("omp parallel num_threads(threads)") { \\
      i64 own = 0; _Pragma("omp for schedule(static, 1)") for (int t = 0; t < threads; t++) own = t; \\
      float *a = x + own * n, *b = y + own * n; \\
      for (i64 k = 0; k < times; k++) { __asm__ volatile("" ::: "memory"); body } } }
ALL(copied, for (i64 j = 0; j + LANES <= n; j += LANES) put_f32(b + j, load_f32(a + j));)
ALL(summed, F s[4] = {}; for (i64 j = 0; j + 4 * LANES <= n; j += 4 * LANES)
  for (int p = 0; p < 4; p++) s[p] += load_f32(a + j + p * LANES);
  put_f32(b, s[0] + s[1] + s[2] + s[3]);)
ALL(combined, for (i64 j = 0; j + LANES <= n; j += LANES) {
  F v = load_f32(a + j); put_f32(b + j, (v * 1.5f + 2.f) * v - 3.f); })
ALL(exponentials, for (i64 j = 0; j + LANES <= n; j += LANES) put_f32(b + j, exponential(load_f32(a + j)));)
ALL(nothing, )
"""


def least(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The least seconds of a call, of some."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


def measure() -> Rates:
    """The rates of the CPU that is here, all of its cores at work. Raises NotNative where there is no compiler."""
    library, count = library_of(SOURCE), cores()
    tensors: list[torch.Tensor] = [torch.ones(LARGE // 4) for _ in range(2)]
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]

    def seconds(name: str, bytes_: int, times: int, repeats: int = REPEATS) -> float:
        """Of one pass of every core over as many bytes of its own."""
        call = getattr(library, name)
        call.restype = None
        sizes = ctypes.c_longlong(bytes_ // 4), ctypes.c_longlong(times)
        return least(lambda: call(*addresses, *sizes, count), repeats) / times

    share = LARGE // count // 256 * 256
    second = min(cache_bytes() // 2, share)
    left, right = (torch.rand(SIZE, SIZE) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        product = least(lambda: left @ right)
    finally:
        torch.set_num_threads(before)
    few = torch.ones(16)
    return Rates(
        bandwidth=2 * count * share / seconds("copied", share, 1),
        cache_bandwidth=count * second / seconds("summed", second, 64),
        matrix=2 * SIZE**3 / product,
        elementwise=4 * count * SMALL / 4 / seconds("combined", SMALL, 4096),
        special=count * SMALL / 4 / seconds("exponentials", SMALL, 1024),
        launch=seconds("nothing", 0, 1, 1000),
        step=least(lambda: torch.add(few, few, out=few), 1000),
    )
