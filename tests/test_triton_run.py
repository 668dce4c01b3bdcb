"""Emitted Triton kernels in Triton's interpreter against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch_functions import UNARY
from triton_nests import Case, attention, loop, paged_sum, pointwise, row_sum, softmax, split_log_sum, whole

import eqfuse as eq
from eqfuse.errors import BindError, EqfuseError
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.nodes import Axis, Load, call
from eqfuse.tile.triton import launch
from eqfuse.tile.triton.aot import compile_for
from eqfuse.tile.triton.functions import HELPERS
from eqfuse.tile.triton.launch import interpret

SPECIAL = [
    0.0,
    -0.0,
    0.3,
    -0.3,
    1e-4,
    -2.5,
    2.5,
    0.5,
    1.5,
    7.25,
    -40.0,
    90.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-30,
]


def run(case: Case, dtypes: dict[str, str], *args: object, **kwargs: object) -> torch.Tensor:
    result = interpret(case.text(dtypes), "compute", *args, **kwargs)
    assert isinstance(result, torch.Tensor)
    return result


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.stack((x, x + 1), 2).flatten(1)[:, ::2],
    "broadcast": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_softmax_of_ragged_rows(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](random(7, 37, dtype=dtype))
    short = {torch.float16: "f16", torch.float32: "f32"}[dtype]
    y = run(softmax(), {"x": short}, x)
    assert y.dtype == dtype
    tolerance = 1e-3 if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(y.double(), x.double().softmax(1), rtol=tolerance, atol=1e-7)


def test_softmax_of_special_rows() -> None:
    x = random(4, 20)
    x[0, 3], x[1, 4], x[2, :] = math.nan, -math.inf, -math.inf
    y = run(softmax(), {"x": "f32"}, x)
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1], x[1].softmax(0))
    assert not y[2].isfinite().any() or (y[2] == 0).all()
    torch.testing.assert_close(y[3], x[3].softmax(0))


@pytest.mark.parametrize("block", [whole("j"), loop("j", 8)], ids=["whole", "loop"])
@pytest.mark.parametrize("columns", [0, 1, 8, 19])
def test_row_sums(block: object, columns: int) -> None:
    x = random(5, columns)
    case = row_sum(whole("j") if block == whole("j") else loop("j", 8))
    torch.testing.assert_close(run(case, {"x": "f32"}, x), x.sum(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("size", [(70, 70, 24), (16, 33, 16), (1, 5, 40)])
@pytest.mark.slow(but=["size1"])
def test_causal_attention(dtype: str, size: tuple[int, int, int]) -> None:
    rows, columns, depth = size
    torch_dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    q = random(2, 2, rows, depth, dtype=torch_dtype)
    k = random(2, 2, depth, columns, dtype=torch_dtype).transpose(2, 3)
    v = random(2, 1, columns, depth, dtype=torch_dtype).expand(2, 2, columns, depth)
    text = attention(32, 16).text(dict.fromkeys("QKV", dtype))
    out = torch.empty(2, 2, depth, rows, dtype=torch_dtype).transpose(2, 3)
    result = interpret(text, "compute", q, k, v, 0.3, out=out)
    assert result is out
    score = (q.double() @ k.double().transpose(2, 3)) * 0.3
    score = score.masked_fill(torch.arange(columns) > torch.arange(rows)[:, None], -math.inf)
    tolerance = {"f16": 3e-3, "bf16": 2e-2, "f32": 1e-5}[dtype]
    torch.testing.assert_close(out.double(), score.softmax(3) @ v.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_shards_and_their_merge(shards: int) -> None:
    x = random(5, 21)
    x[1, 2:] = -math.inf
    got = run(split_log_sum(), {"x": "f32"}, x, sizes={"c": shards})
    torch.testing.assert_close(got, x.logsumexp(1), rtol=1e-6, atol=1e-6)


def test_workspace_is_used() -> None:
    x = random(5, 21)
    workspace = {"m_part": torch.full((5, 3), 7.0), "s_part": torch.full((5, 3), 7.0)}
    run(split_log_sum(), {"x": "f32"}, x, sizes={"c": 3}, workspace=workspace)
    torch.testing.assert_close(workspace["m_part"], torch.stack([p.amax(1) for p in x.tensor_split(3, 1)], 1))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gather_through_a_page_table(index: torch.dtype) -> None:
    pages, length = torch.tensor([[2, 0, 3], [1, 4, 4]], dtype=index), torch.tensor([9, 12], dtype=index)
    x = random(5, 4, 6)
    short = {torch.int32: "i32", torch.int64: "i64"}[index]
    arguments = {"x": x, "page": pages, "length": length}
    got = run(paged_sum(), {"x": "f32", "page": short, "length": short}, **arguments, sizes={"j": 12})
    rows = [x[page.long()].flatten(0, 1)[:n].sum(0) for page, n in zip(pages, length.tolist(), strict=True)]
    torch.testing.assert_close(got, torch.stack(rows), rtol=1e-6, atol=1e-6)


REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **UNARY,
    "finite": lambda x: torch.where(x.isinf(), 0, x),
    "invertible": lambda x: torch.where(x.isinf() | (x == 0), 1, x),
    "f16": lambda x: x.half().double(),
    "bf16": lambda x: x.bfloat16().double(),
    "f8e4m3": lambda x: x.float().clamp(-448, 448).to(torch.float8_e4m3fn).double(),
    "f8e5m2": lambda x: x.float().clamp(-57344, 57344).to(torch.float8_e5m2).double(),
}


@pytest.mark.parametrize("fn", REFERENCES)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_elementwise_functions(fn: str, dtype: str) -> None:
    x = torch.tensor(
        [*SPECIAL, 447.0, 464.0, 465.0, 17.0], dtype={"f32": torch.float32, "f64": torch.float64}[dtype]
    )
    value = call("mul", call(fn, Load("x", (Axis("i"),))), Load("one", (Axis("i"),)))
    case = pointwise(value, "y[i] = x[i] * one[i]", dtype)
    y = run(case, {"x": dtype, "one": dtype}, x, torch.ones_like(x))
    expected = REFERENCES[fn](x.double()).to(x.dtype)
    tolerance = {"f64": 1e-13, "f32": 4e-6 if fn in ("exp", "sigmoid", "silu", "gelu") else 5e-7}[dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize(("fn", "name"), [("floor", "floor"), ("round", "round_half_even")])
def test_rounding_of_what_a_gpu_takes_for_0(fn: str, name: str) -> None:
    """NVIDIA's floor flushes denormal numbers; its comparisons do not."""
    least = np.finfo(np.float32).smallest_normal
    flushing = SimpleNamespace(
        floor=lambda x: np.floor(np.where(np.abs(x) < least, np.copysign(0, x), x)), where=np.where
    )
    known: dict[str, Any] = {"tl": flushing}
    exec(HELPERS[fn], known)  # noqa: S102
    x = np.array([-1e-40, 1e-40, -0.0, 0.0, -least, -1.0, -1.5, 2.5, 3.5, math.inf, -math.inf, math.nan])
    expected = {"floor": np.floor, "round": np.rint}[fn](x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(known[name](x), expected)


def test_the_root_of_what_a_gpu_takes_for_0() -> None:
    """NVIDIA's own flushes denormal numbers."""
    least = np.finfo(np.float32).smallest_normal
    root = lambda x: 1 / np.sqrt(np.where(np.abs(x) < least, np.copysign(0, x), x))
    known: dict[str, Any] = {"tl": SimpleNamespace(rsqrt=root, where=np.where)}
    exec(HELPERS["rsqrt"], known)  # noqa: S102
    x = np.array([1e-40, 1e-44, least, 0.5, 3e38, 0.0, -0.0, -1e-40, math.inf, math.nan], np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(known["rsqrt"](x), 1 / np.sqrt(x), rtol=1e-6)


def test_functions_of_numbers_and_of_tiles_compile() -> None:
    every = [fn for fn in REFERENCES if fn not in ("finite", "invertible", "neg")]
    source = f"""
        y[i] = x[i] * ({" + ".join(f"{fn}(0.5) + {fn}(3 - 0.5)" for fn in every)})
        z[i] = {" + ".join(f"{fn}(x[i])" for fn in every)}
    """
    emitted = eq.compile(source, target="sm_90", verify=False).triton
    assert "tl.rsqrt(x_tile)" not in emitted  # the GPU's own: denormal numbers would be 0
    assert all(report.registers > 0 for report in compile_for(emitted, "sm_90"))


def test_a_kernel_that_triton_refuses_in_as_many_warps_runs_in_others() -> None:
    text = split_log_sum().text({"x": "f32"}, sizes={"c": 4})
    module = launch.load(text)
    name, tried = next(iter(module.CONFIGS)), list[int]()

    class Kernel:
        works_in = 8

        def __getitem__(self, grid: object) -> Callable[..., str]:
            return self.run

        def run(self, *args: object, num_warps: int, **options: object) -> str:
            tried.append(num_warps)
            if num_warps != self.works_in:
                raise RuntimeError("PassManager::run failed")
            return "compiled"

    def launched(kernel: Kernel) -> dict[str, Any]:
        known: dict[str, Any] = {}
        size = dict.fromkeys(module.WHOLE[name].values(), 4)
        module.launch(known, name, kernel, (), (), None, size, lambda blocks: (1, (), {}))
        return known

    planned = module.CONFIGS[name]["num_warps"]
    with pytest.warns(UserWarning, match=f"Triton refuses {name} in {planned} warps .* it runs in 8"):
        assert launched(Kernel())[name][0] == "compiled"
    assert tried[0] == planned and tried[-1] == 8
    never = Kernel()
    never.works_in = 0
    with pytest.raises(RuntimeError, match="PassManager"):
        launched(never)


DIVISIONS = {"floordiv": ("//", np.floor_divide), "mod": ("%", np.mod)}
LARGE = [803740.0, 600540.0, 2.0**30 + 64, 1e20, 3e38, 7.0, 1.0, 0.75, 1e-30, -1e-40, 0.0, math.inf, math.nan]


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("fn", DIVISIONS)
def test_division_of_reals_rounded_down_is_exact(fn: str, dtype: str) -> None:
    """A quotient beyond 2**24 is rounded, and what it leaves of the dividend would be anything."""
    symbol, exact = DIVISIONS[fn]
    case = pointwise(
        call(fn, Load("x", (Axis("i"),)), Load("y_", (Axis("i"),))), f"y[i] = x[i] {symbol} y_[i]", dtype
    )
    signed = torch.tensor([*LARGE, *(-x for x in LARGE)], dtype=TORCH_DTYPES[dtype])
    x, y = (pairs.contiguous() for pairs in torch.cartesian_prod(signed, torch.cat([signed, signed / 3e6])).T)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(exact(x.numpy(), y.numpy()))
    found = run(case, {"x": dtype, "y_": dtype}, x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_remainders_of_reals_are_those_of_the_gpu_vendor(target: str) -> None:
    source = eq.compile("y[i] = x[i] // z[i] + 3 % x[i]", target=target, verify=False).triton
    (report,) = compile_for(source, target)
    assert "libdevice.fmod(" in source and report.spilled_bytes == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_angles_are_those_of_the_gpu_vendor(target: str) -> None:
    source = eq.compile(
        "y[i] = atan2(x[i], z[i]) + atan(x[i]) + atan2(2, x[i])", target=target, verify=False
    ).triton
    (report,) = compile_for(source, target)
    assert "libdevice.atan2(" in source and report.spilled_bytes == 0


@pytest.mark.parametrize("fn", ["add", "sub", "mul", "div", "maximum", "minimum", "atan2"])
def test_binary_functions(fn: str) -> None:
    x = torch.tensor(SPECIAL)
    y = x.roll(5)
    case = pointwise(call(fn, Load("x", (Axis("i"),)), Load("y_", (Axis("i"),))), "y[i] = x[i] + y_[i]")
    got = run(case, {"x": "f32", "y_": "f32"}, x, y)
    torch.testing.assert_close(got, getattr(torch, fn)(x, y), equal_nan=True)


@pytest.mark.parametrize(("fn", "symbol"), [("floordiv", "//"), ("mod", "%")])
def test_integer_division_rounds_down(fn: str, symbol: str) -> None:
    n = torch.arange(-9, 10, dtype=torch.int32)
    case = pointwise(
        call(fn, Load("n", (Axis("i"),)), Load("k", (Axis("i"),))), f"y[i] = f32(n[i] {symbol} k[i])", "i32"
    )
    k = torch.full_like(n, 4)
    expected = n // k if fn == "floordiv" else n % k
    torch.testing.assert_close(run(case, {"n": "i32", "k": "i32"}, n, k), expected)


def test_grouping_of_operators_is_kept() -> None:
    n, k = (Load(name, (Axis("i"),)) for name in "nk")
    value = call(
        "sub", call("mul", n, call("floordiv", n, k)), call("sub", n, call("add", k, call("mod", n, k)))
    )
    case = pointwise(value, "y[i] = f32(n[i] * k[i])", "i32")
    a, b = torch.arange(20, dtype=torch.int32), torch.arange(20, dtype=torch.int32) % 5 + 2
    got = run(case, {"n": "i32", "k": "i32"}, a, b)
    torch.testing.assert_close(got, a * (a // b) - (a - (b + a % b)))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (torch.ones(2, 3, dtype=torch.float16),),
            {},
            "x is torch.float16; these kernels were made for torch.float32",
        ),
        ((torch.ones(2),), {}, "x has 1 dims, not 2"),
        ((torch.ones(2, 3, device="meta"),), {"out": torch.ones(3)}, "y is (3,) of torch.float32, not (2,)"),
        ((torch.ones(2, 3),), {"config": {"sums": {"BLOCK_Z": 2}}}, "sums has no setting BLOCK_Z"),
        ((torch.ones(2, 3),), {"sizes": {"j": 4}}, "x has 3 positions of axis j, not 4"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: tuple[torch.Tensor], options: dict[str, object], message: str
) -> None:
    text = row_sum(loop("j", 8)).text({"x": "f32"})
    with pytest.raises(BindError) as caught:
        interpret(text, "compute", *arguments, **options)
    assert message in caught.value.message


def test_a_derivative_that_would_be_lost_is_refused() -> None:
    x = random(3, 5).requires_grad_()
    with pytest.raises(BindError, match="a tensor requires grad"):
        run(softmax(), {"x": "f32"}, x)
    with torch.no_grad():
        torch.testing.assert_close(run(softmax(), {"x": "f32"}, x), x.softmax(1))


def test_missing_extent() -> None:
    text = split_log_sum().text({"x": "f32"})
    with pytest.raises(BindError, match="no tensor has the axis c: give its extent"):
        interpret(text, "compute", torch.ones(2, 3))


def test_defaults_of_extents() -> None:
    x = random(2, 9)
    text = split_log_sum().text({"x": "f32"}, sizes={"c": 4})
    torch.testing.assert_close(interpret(text, "compute", x), x.logsumexp(1))


def test_a_compiler_that_fails_inside_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**values: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(launch, "load", lambda source: SimpleNamespace(made=made, CONFIGS={"kernel1": {}}))
    with pytest.raises(
        EqfuseError, match=r"Triton refused a kernel of made \(kernel1\): PassManager::run failed"
    ):
        launch.TritonProgram("text", "made")()
