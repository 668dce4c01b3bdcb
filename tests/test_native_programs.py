"""Tile programs as C++: what they compute against the tile interpreter in float32, special values among it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import needs
import numpy as np
import pytest
import torch
from test_api_special import CAUSAL, INF, NAN, ROWS, X, row_inputs
from test_native_functions import WIDTHS

import eqfuse as eq
from bench.workloads import WORKLOADS
from eqfuse.arguments import Arguments
from eqfuse.loops.plan import SCHEDULES
from eqfuse.lowered import native_tiles
from eqfuse.terms.floats import FloatDomain
from eqfuse.tile import interpreter
from eqfuse.tile.native.products import give
from eqfuse.tile.native.run import NativeProgram, prepared, unit_dims
from eqfuse.tile.storage import loaded_dtypes

pytestmark = needs.cxx


def bound(
    kernel: eq.Kernel, values: Mapping[str, Any]
) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """What a kernel compiles for these arguments, and the arguments sorted."""
    arguments = Arguments(kernel.program)
    given = arguments.given(dict(values), None, ())
    return kernel._shapes.of(arguments, given).compiled, dict(given.tensors), dict(given.scalars)


def both(
    kernel: eq.Kernel, values: Mapping[str, Any], flags: tuple[str, ...] = ()
) -> list[tuple[torch.Tensor, np.ndarray]]:
    """The outputs of the native kernel, and those of the tile interpreter in float32 from the same tile program."""
    compiled, tensors, scalars = bound(kernel, values)
    tiles, program = native_tiles(compiled, kernel.program), kernel.program
    shards = {axis: compiled.chosen.plan.shards for axis, _ in compiled.chosen.nest.shards}
    loaded = loaded_dtypes(tiles)
    given = {name: prepared(tensor, loaded.get(name)) for name, tensor in tensors.items()}
    ranks = {name: tensor.dim() for name, tensor in given.items()}
    native = NativeProgram(tiles, ranks, unit_dims(given), compiled.extents, shards, flags)
    found = native(given, scalars, compiled.extents, shards, 2)
    arrays = {
        name: tensor.numpy()
        if tensor.dtype in (torch.int32, torch.int64, torch.bool)
        else tensor.float().numpy()
        for name, tensor in given.items()
    }
    domain = FloatDomain("float64" if torch.float64 in {t.dtype for t in given.values()} else "float32")
    wanted = interpreter.run(tiles, program, arrays, scalars, compiled.extents, domain, shards=shards)
    return [(found[output.name], np.asarray(wanted[output.name])) for output in program.outputs]


def check(pairs: list[tuple[torch.Tensor, np.ndarray]], relative: float = 1e-5) -> None:
    for found, wanted in pairs:
        got = found.double().numpy()
        if found.dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            wanted = torch.as_tensor(wanted).to(found.dtype).double().numpy()
            relative = max(relative, 2.0 * torch.finfo(found.dtype).eps)
        wanted = wanted.astype(np.float64)
        assert (np.isnan(got) == np.isnan(wanted)).all()
        infinite = np.isinf(got) | np.isinf(wanted)
        assert (got[infinite] == wanted[infinite]).all()
        rest = ~(infinite | np.isnan(got))
        scale = max(np.abs(wanted[rest]).max(initial=0.0), 1e-30)
        np.testing.assert_allclose(got[rest], wanted[rest], rtol=relative, atol=relative * min(scale, 1.0))


@pytest.mark.slow(but=["f32-native"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "f8e4m3", "f64", "i64"])
def test_outputs_past_the_caches_are_the_same(dtype: str, width: str) -> None:
    """Rows begin anywhere: the elements before and after whole vectors are written as usual."""
    source = (
        "y[i, j] = x[i, j] + x[i, 0]" if dtype == "i64" else f"y[i, j] = {dtype}(x[i, j] - max[j](x[i, j]))"
    )
    kernel = eq.compile(source, verify=False)
    x = torch.randn(5, 1213).double() if dtype == "f64" else torch.randn(5, 1213)
    x = (100 * x).long() if dtype == "i64" else x
    (usual,) = both(kernel, {"x": x}, WIDTHS[width])
    (past,) = both(kernel, {"x": x}, (*WIDTHS[width], "-DPAST_CACHES=1LL"))
    assert torch.equal(usual[0].double(), past[0].double())


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.slow(but=["window", "quant_gemm", "softmax", "layernorm", "moe_routing"])
def test_benchmark_programs(name: str) -> None:
    workload = WORKLOADS[name]
    case = workload.cases["small"]
    kernel = eq.compile(workload.text(case), scalars=case.constants, verify=False)
    check(both(kernel, workload.arguments(case, workload.inputs(case))), 2e-5)


@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.slow(but=["softmax"])
def test_special_rows(name: str, prefer: str) -> None:
    kernel = eq.compile(ROWS[name], prefer=prefer, verify=False)
    check(both(kernel, {"x": X, **row_inputs(ROWS[name])}))


@pytest.mark.slow(but=["softmax-dtype1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ROWS)
def test_special_rows_of_half_precision(name: str, dtype: torch.dtype) -> None:
    given = {"x": X.to(dtype), **row_inputs(ROWS[name])}
    check(both(eq.compile(ROWS[name], verify=False), given))


GATHERED = "y[i] = sum[j](where(j < n[i], t[k[i,j]] * w[i,j], 0))\nm[i] = max[j](t[k[i,j]])\nreturn y, m"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gathers_over_ragged_ranges_of_special_values(dtype: torch.dtype) -> None:
    """What stands behind the end of a row does not get into its sum, what is gathered gets into its maximum."""
    generator = torch.Generator().manual_seed(7)
    t, w = torch.randn(30, generator=generator), torch.randn(9, 70, generator=generator)
    k = torch.randint(3, 30, (9, 70), generator=generator)
    t[0], t[1], t[2] = NAN, INF, -INF
    k[0, 40], k[1, 69], k[2, 0], k[3, 5] = 0, 1, 2, 1
    n = torch.tensor([40, 69, 0, 6, 1, 70, 16, 17, 33])
    given = {"t": t.to(dtype), "k": k, "w": w.to(dtype), "n": n}
    check(both(eq.compile(GATHERED, verify=False), given), 2e-5)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("prefer", SCHEDULES)
@pytest.mark.slow(but=["rolling-nan"])
def test_masked_products_of_special_values(prefer: str, value: float) -> None:
    """Values behind the mask do not get through; those before it do."""
    generator = torch.Generator().manual_seed(4)
    Q, K, V = (torch.randn(29, n, generator=generator) for n in (2, 2, 7))
    Q[9, 1] = value
    V[11, 3] = value
    V[28] = value
    kernel = eq.compile(CAUSAL, prefer=prefer, verify=False)
    check(both(kernel, {"Q": Q, "K": K, "V": V}), 2e-5)


PROGRAMS = {
    "column sums": ("y[j] = sum[i](x[i,j] * w[i])", {"x": (37, 70), "w": (37,)}),
    "batch norm": (
        (
            "m[c] = mean[n, p](x[n,c,p])\nv[c] = mean[n, p](sq(x[n,c,p] - m[c]))\n"
            "y[n,c,p] = (x[n,c,p] - m[c]) * rsqrt(v[c] + 1e-5)"
        ),
        {"x": (5, 6, 49)},
    ),
    "squared distances": (
        "D[i,k] = sum[d](sq(x[i,d] - c[k,d]))\nb[i] = argmin[k](D[i,k])",
        {"x": (33, 5), "c": (21, 5)},
    ),
    "distances": ("D[i,k] = sqrt(sum[d](sq(x[i,d] - c[k,d])))", {"x": (70, 11), "c": (83, 11)}),
    "distances, several vectors at once": (
        "D[i,k] = sum[d](abs(x[i,d] - c[k,d]) * w[d])\nm[i,k] = max[d](x[i,d] - c[k,d])\nreturn D, m",
        {"x": (19, 11), "c": (119, 11), "w": (11,)},
    ),
    **{
        f"{n} apart": ("c[i,d] = max[p](m[i,p] * x[i,p,d])", {"x": (7, 150, n), "m": (7, 150)})
        for n in (2, 3, 4, 5)
    },
    "a product": ("y[i,k] = sum[j](x[i,j] * w[j,k])", {"x": (300, 21), "w": (21, 260)}),
    "a product, turned": ("y[k,i] = sum[j](x[i,j] * w[j,k])", {"x": (30, 21), "w": (21, 26)}),
    "products of a batch": ("y[b,i,k] = sum[j](x[b,i,j] * w[b,j,k])", {"x": (3, 30, 21), "w": (3, 21, 26)}),
    "a product that is read too": (
        "y[i,k] = sum[j](x[i,j] * w[j,k])\nz[i] = max[k](y[i,k])\nreturn y, z",
        {"x": (30, 21), "w": (21, 26)},
    ),
    "sums of products": (
        "y[i,k] = sum[b,j](x[b,i,j] * w[b,j,k])\nz[i] = sum[b,k,j](x[b,i,j] * w[b,j,k])\nreturn y, z",
        {"x": (3, 30, 21), "w": (3, 21, 26)},
    ),
    "largest few of products": (
        (
            "y[i,e] = sum[j](x[i,j] * w[e,j])\nv[i,k], p[i,k] = topk[e,k](y[i,e])\nk: axis[5]\n"
            "s[i] = sum[k](v[i,k])\nreturn v, p, s"
        ),
        {"x": (37, 21), "w": (26, 21)},
    ),
    "smallest and where": (
        "m[i] = min[j](x[i,j])\nk[i] = argmin[j](x[i,j])\nl[i] = argmax[j](x[i,j])\nreturn m, k, l",
        {"x": (9, 70)},
    ),
    "largest few": ("v[i,k], p[i,k] = topk[j,k](x[i,j])\nk: axis[5]\nreturn v, p", {"x": (9, 70)}),
    "transposed": ("y[j,i] = exp(x[i,j]) / sum[j](exp(x[i,j]))", {"x": (19, 70)}),
    "window": ("y[i] = sum[k](where(i + k < N(i), x[i + k], 0) * w[k]) + x[i]", {"x": (70,), "w": (5,)}),
    "convolution": (
        "O[o,y,x] = sum[p,q,c](I[c,y+p,x+q] * W[o,c,p,q])\ny: axis[7]\nx: axis[19]",
        {"I": (5, 9, 21), "W": (20, 5, 3, 3)},
    ),
    "convolution of positive parts": (
        "O[o,y,x] = sum[p,q,c](relu(I[c,y+p,x+q]) * W[o,c,p,q])\ny: axis[7]\nx: axis[19]",
        {"I": (5, 9, 21), "W": (20, 5, 3, 3)},
    ),
    "strided convolution": (
        "O[o,y,x] = sum[c,p,q](I[c,2*y+p,x+q] * W[o,c,p,q])\ny: axis[4]\nx: axis[19]",
        {"I": (5, 9, 21), "W": (20, 5, 3, 3)},
    ),
    "strided convolution by products": (
        "O[o,y,x] = sum[p,q,c](I[c,2*y+p,x+q] * W[o,c,p,q])\ny: axis[4]\nx: axis[19]",
        {"I": (5, 9, 21), "W": (20, 5, 3, 3)},
    ),
    "an operand that is added too": (
        (
            "s[i,k] = where(m[i,k] > 0, sum[j](x[i,j] * v[j,k]), 0)\ny[i,j] = x[i,j] + sum[k](s[i,k] * u[k,j])\n"
            "w[k,j] = sum[i](s[i,k] * x[i,j])\nreturn y, w"
        ),
        {"x": (5, 37), "v": (37, 6), "u": (6, 37), "m": (5, 6)},
    ),
    "product of three": ("y[i] = prod[j](x[i,j])", {"x": (7, 40)}),
    "any and all": ("a[i] = any[j](x[i,j] > 2)\nb[i] = all[j](x[i,j] > -1)\nreturn a, b", {"x": (7, 40)}),
    "functions": (
        (
            "y[i,j] = tanh(x[i,j]) + erf(x[i,j]) * sigmoid(x[i,j]) - silu(x[i,j]) + gelu(x[i,j]) * sin(x[i,j])"
            " + cos(x[i,j]) + floor(x[i,j]) - round(x[i,j]) + sign(x[i,j]) * relu(x[i,j]) + log(abs(x[i,j]))"
        ),
        {"x": (7, 40)},
    ),
    "positions": ("y[i] = sum[j](where((i + j) % 3 == 1, x[i,j] * (j // 2), 0))", {"x": (7, 40)}),
    "float64": ("x: f64[i, j]\ny[i] = log(sum[j](exp(x[i,j] - max[j](x[i,j]))))", {"x": (7, 40)}),
    "half": ("x: f16[i, j]\ny[i,j] = f16(x[i,j] / sum[j](abs(x[i,j])))", {"x": (7, 40)}),
    "bfloat16": (
        "x: bf16[i, j]\nw: bf16[j, k]\ny[i,k] = bf16(sum[j](x[i,j] * w[j,k]))",
        {"x": (7, 40), "w": (40, 9)},
    ),
    "int32": (
        "x: i32[i, j]\ny[i] = sum[j](x[i,j] * x[i,j])\nm[i] = max[j](x[i,j] // 3)\nreturn y, m",
        {"x": (7, 40)},
    ),
    "int8": (
        "q[i,j] = i8(round(x[i,j] / (max[j](abs(x[i,j])) / 127)))\ns[i] = max[j](abs(x[i,j])) / 127",
        {"x": (7, 83)},
    ),
    "weights of int8": (
        "w: i8[k, j]\ny[i,k] = sum[j](x[i,j] * w[k,j]) * s[k]",
        {"x": (5, 70), "w": (33, 70), "s": (33,)},
    ),
    "products of int8": (
        "x: i8[i, j]\nw: i8[k, j]\ny[i,k] = sum[j](x[i,j] * w[k,j]) * s[k]",
        {"x": (5, 70), "w": (33, 70), "s": (33,)},
    ),
}
"""Programs of every kind of access, dtype and fold: sources and shapes."""


INTEGERS = {"i32": torch.int32, "i8": torch.int8}


def drawn(source: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    kinds = {"f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
    found = {}
    for name, shape in shapes.items():
        dtype = next(
            (
                line.split(": ")[1][:4].split("[")[0]
                for line in source.splitlines()
                if line.startswith(f"{name}: ")
            ),
            "",
        )
        if dtype in INTEGERS:
            found[name] = torch.randint(-50, 50, shape, generator=generator, dtype=INTEGERS[dtype])
        else:
            found[name] = torch.randn(shape, generator=generator).to(kinds.get(dtype, torch.float32))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(
    but=[
        "column sums",
        "half",
        "float64",
        "any and all",
        "int32",
        "int8",
        "positions",
        "largest few",
        "added too",
    ]
)
def test_accesses_dtypes_and_folds(name: str) -> None:
    source, shapes = PROGRAMS[name]
    check(both(eq.compile(source, verify=False), drawn(source, shapes)), 2e-5)


def test_lists_in_lanes_of_special_values() -> None:
    """NaN comes first, and equals keep their order."""
    source = "y[i,e] = sum[j](x[i,j] * w[e,j])\nv[i,k], p[i,k] = topk[e,k](y[i,e])\nk: axis[5]\nreturn v, p"
    kernel = eq.compile(source, verify=False)
    x, w = torch.randn(37, 3), torch.randn(26, 3)
    w[4], w[9], w[21] = w[2], w[2], w[2]
    x[3], x[5, 1], x[7, 2], x[8] = 0.0, INF, -INF, NAN
    w[11, 0], w[25, 0] = NAN, NAN
    check(both(kernel, {"x": x, "w": w}))


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("largest few of products", "found |=", "while (r > 0"),
        ("largest few", "some[n - from]", "found |="),
        ("distances, several vectors at once", "held_", "(at_axis2_ + 1)"),
        ("convolution", "several(", "product("),
        ("convolution of positive parts", ", true);", "several("),
        ("a product", "product(", "memory_"),
        ("3 apart", "gather_f32", "load_f32(tensor1"),
        ("squared distances", "held_", "+ 1) <"),
        ("a product that is read too", "memory_", "found |="),
    ],
)
@pytest.mark.slow(but=["a product-", "largest few of"])
def test_forms(name: str, has: str, lacks: str) -> None:
    """Programs are written in the forms that they are here for."""
    source, shapes = PROGRAMS[name]
    kernel = eq.compile(source, verify=False, native="wait")
    kernel(**drawn(source, shapes))
    text = kernel.cpp[kernel.cpp.index("static void kernel0(") :]
    assert has in text and lacks not in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_sums_do_not_lose_what_is_small_beside_them(dtype: torch.dtype) -> None:
    """Each term alone is less than half of the last place of the greatest number that is added to the same lane."""
    x = torch.full((2, 1 << 17), torch.finfo(dtype).eps / 8, dtype=dtype)
    x[:, :: 1 << 15] = 1.0
    kernel = eq.compile("y[i] = sum[j](x[i,j])\nz[i] = sum[j](sq(x[i,j]) + x[i,j])", native="wait")
    y, z = kernel(x=x)
    assert kernel.plan.code == "C++"
    lost = (1 << 17) * torch.finfo(dtype).eps / 8
    assert (y.double() - 4 - lost).abs().max() < 0.05 * lost
    assert (z.double() - 8 - lost).abs().max() < 0.05 * lost


@pytest.mark.parametrize(("rows", "levels"), [(4, {0}), (9000, {1})])
def test_a_single_block_is_in_no_parallel_region(rows: int, levels: set[int]) -> None:
    """Within a region, even of one thread, the library's own regions would begin new threads at every call."""
    level = ctypes.CDLL("libgomp.so.1").omp_get_level
    kernel = eq.compile("y[i,j] = sum[k](relu(x[i,k]) * w[k,j])", target="cpu", native="wait")
    values = {"x": torch.ones(rows, 8), "w": torch.ones(8, 40)}
    compiled, tensors, scalars = bound(kernel, values)
    ranks = {name: tensor.dim() for name, tensor in tensors.items()}
    native = NativeProgram(
        native_tiles(compiled, kernel.program), ranks, unit_dims(tensors), compiled.extents, {}
    )
    found = set()
    called = ctypes.CFUNCTYPE(None)(lambda: found.add(level()))
    several = (ctypes.c_void_p * 3)(*[ctypes.cast(called, ctypes.c_void_p)] * 3)
    native._library.use_products(several, several, several, None)
    native(tensors, scalars, compiled.extents, {}, 2)
    give(native._library)  # another kernel of this process may be the same library
    assert found == levels
