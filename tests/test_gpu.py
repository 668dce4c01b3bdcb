"""As a user runs on a GPU: `eq.compile`, called with CUDA tensors. `pytest -m gpu` where there is a GPU.

bench/gpu_site.py makes what such a machine lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_api_masks import BAD, inputs
from test_api_masks import PROGRAMS as MASKED
from test_api_masks import expected as without_excluded
from test_api_programs import PROGRAMS
from test_api_special import CAUSAL, NAN, ROWS, VARIANCE, X, check, row_inputs
from test_triton_run import REFERENCES, SPECIAL

import eqfuse as eq
from bench.fuzz_report import explore
from bench.judge import expected
from bench.measure import rounding
from bench.workloads import WORKLOADS
from eqfuse.errors import ScheduleError
from eqfuse.loops.plan import SCHEDULES
from eqfuse.measure import as_tuple, worst_error
from eqfuse.terms.parser import parse
from eqfuse.terms.types import program_dtypes

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
EVERY_SCHEDULE = pytest.mark.parametrize("prefer", SCHEDULES)


def there(values: dict[str, Any]) -> dict[str, Any]:
    return {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def agrees(
    source: str, given: dict[str, Any], prefer: str | None, sizes: dict[str, int] | None = None
) -> None:
    """Runs a program on the GPU, and holds every output against float64."""
    program = parse(source)
    tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
    scalars = {n: v for n, v in given.items() if n not in tensors}
    right = expected(program, tensors, scalars, sizes or {}, program_dtypes(program))
    found = as_tuple(eq.compile(source, prefer=prefer)(**there(given), sizes=sizes or {}))
    assert all(value.device.type == DEVICE for value in found)
    assert [o.wrong(v.cpu()) for o, v in zip(right, found, strict=True)] == [""] * len(right)


ORDERS = {
    "the last one is stored first": "A = sum[i](x[i])\nD[i] = sum[j](tanh(x[i] * w[j] - A))\nreturn D, A",
    "of one shape": "a[i] = sum[j](z[i,j])\nb[i] = sum[k](sq(z[i,k] - a[i]))\nc[i] = max[j](z[i,j] * b[i])\nreturn c, a, b",
    "of one shape, backwards": (
        "a[i] = sum[j](z[i,j])\nb[i] = sum[k](round(z[i,k] / max[i](a[i])))\nreturn b, a"
    ),
    "between kernels": (
        "m = max[i](x[i])\ny[i] = x[i] / m\ns = sum[i](round(y[i]))\nt = sum[i](abs(y[i] - s))\nreturn t, m, s"
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [5, 2100])
@pytest.mark.parametrize("prefer", [None, *SCHEDULES])
def test_outputs_come_back_under_their_names(order: str, rows: int, prefer: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (rows,), "w": (7,), "z": (rows, 33)}
    read = parse(ORDERS[order]).tensors
    given = {t.name: torch.randn(shapes[t.name], generator=generator) for t in read}
    try:
        agrees(ORDERS[order], given, prefer)
    except ScheduleError:
        assert prefer is not None


@EVERY_SCHEDULE
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, prefer: str) -> None:
    source, given, sizes = PROGRAMS[name]
    try:
        agrees(source, given, prefer, sizes)
    except ScheduleError:
        assert prefer != "multi_pass"


@EVERY_SCHEDULE
@pytest.mark.parametrize("name", WORKLOADS)
def test_programs_of_the_benchmarks(name: str, prefer: str) -> None:
    workload = WORKLOADS[name]
    case = workload.cases["small"]
    inputs = workload.inputs(case, device=DEVICE)
    try:
        kernel = eq.compile(workload.text(case), scalars=case.constants, prefer=prefer)
        found = as_tuple(kernel(**workload.arguments(case, inputs)))
    except ScheduleError:
        assert prefer in workload.refused
        return
    exact = workload.run_exact(case, inputs)
    unfused = workload.run_eager(case, inputs)
    assert worst_error(found, exact) <= 2 * max(worst_error(unfused, exact), rounding(unfused))
    assert kernel.plan.schedule == prefer
    assert kernel.certificate.ok


@EVERY_SCHEDULE
@pytest.mark.parametrize("name", ROWS)
def test_special_rows(name: str, prefer: str) -> None:
    check(ROWS[name], prefer, DEVICE, x=X, **row_inputs(ROWS[name]))


@EVERY_SCHEDULE
def test_variance_of_special_rows(prefer: str) -> None:
    check(VARIANCE, prefer, DEVICE, x=X[~(X.abs() == 1e30).any(1)])


@EVERY_SCHEDULE
@pytest.mark.parametrize("value", [NAN, torch.inf, -torch.inf, 1e30])
def test_causal_attention_with_special_values_where_nothing_masks_them(prefer: str, value: float) -> None:
    generator = torch.Generator().manual_seed(4)
    Q, K, V = (torch.randn(29, n, generator=generator) for n in (2, 2, 7))
    Q[9, 1] = value
    Q[20] = value
    check(CAUSAL, prefer, DEVICE, Q=Q, K=K, V=V)


@EVERY_SCHEDULE
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", MASKED)
def test_excluded_values_stay_out(name: str, dtype: torch.dtype, bad: Any, prefer: str) -> None:
    given = {n: torch.from_numpy(value) for n, value in inputs(name, bad).items()}
    given = {n: value.to(dtype) if value.is_floating_point() else value for n, value in given.items()}
    source = f"x: f16[i,j]\nv: f16[j,d]\n{MASKED[name]}" if dtype is torch.float16 else MASKED[name]
    length = {"L": 9} if name == "a length" else {}
    found = eq.compile(source, prefer=prefer)(**there(given), **length).cpu()
    exact = without_excluded(name, {n: value.numpy() for n, value in given.items()})
    wanted = torch.from_numpy(exact.T if name == "columns first" else exact)
    limit = 4e-3 if dtype is torch.float16 else 1e-4
    torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("seed", range(5))
def test_random_programs_in_every_schedule(seed: int) -> None:
    assert explore(seed, 10, DEVICE).failures == []


def test_an_empty_axis() -> None:
    found = eq.compile("y[i] = sum[j](x[i,j])")(x=torch.zeros(3, 0, device=DEVICE))
    assert found.device.type == DEVICE
    assert found.tolist() == [0, 0, 0]


def test_a_shape_that_comes_after_another() -> None:
    kernel = eq.compile("y[i,j] = x[i,j] / sum[j](abs(x[i,j]))")
    for shape in ((3, 5), (1, 1), (64, 4096), (3, 70_000), (3, 5)):
        x = torch.randn(shape, device=DEVICE)
        torch.testing.assert_close(kernel(x=x), x / x.abs().sum(1, keepdim=True), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("fn", [fn for fn in REFERENCES if fn not in ("finite", "invertible")])
def test_elementwise_functions(fn: str) -> None:
    text = "-x[i]" if fn == "neg" else f"{fn}(x[i])"
    x = torch.tensor([*SPECIAL, 1e-40, -1e-40, 3e-39, 447.0, 465.0, 17.0])
    found = eq.compile(f"y[i] = {text}")(x=x.to(DEVICE)).float().cpu()
    exact = REFERENCES[fn](x.double()).float()
    torch.testing.assert_close(found, exact, rtol=4e-6, atol=1e-37, equal_nan=True)


DECODE = """
    s[h,j] = sum[d](q[h,d] * k[h//4,j,d]) * scale
    p[h,j] = exp(s[h,j] - max[j](s[h,j]))
    o[h,e] = sum[j](p[h,j] / sum[j](p[h,j]) * v[h//4,j,e])
    """


def decode_inputs(length: int = 200) -> dict[str, Any]:
    q, k, v = (torch.randn(*n, 64, device=DEVICE) for n in ((8,), (2, length), (2, length)))
    return {"q": q, "k": k, "v": v, "scale": 0.125}


def decoded(given: dict[str, Any]) -> torch.Tensor:
    keys, values = (given[n].double().repeat_interleave(4, 0) for n in "kv")
    weights = torch.softmax(0.125 * torch.einsum("hd,hjd->hj", given["q"].double(), keys), -1)
    return torch.einsum("hj,hje->he", weights, values).float()


def close(found: torch.Tensor, given: dict[str, Any]) -> None:
    torch.testing.assert_close(found, decoded(given), rtol=1e-3, atol=1e-3)


@EVERY_SCHEDULE
def test_known_calls_and_launches(prefer: str) -> None:
    kernel = eq.compile(DECODE, prefer=prefer, verify=False)
    for _ in range(3):
        given = decode_inputs()
        close(kernel(**given), given)
    launch = kernel.bind(**given)
    for _ in range(2):
        given["k"].normal_()
        found = launch()
        close(found, given)
    assert launch() is found


@EVERY_SCHEDULE
def test_calls_and_launches_are_captured(prefer: str) -> None:
    kernel = eq.compile(DECODE, prefer=prefer, verify=False)
    given = decode_inputs()
    assert kernel.prepare({name: given[name].shape for name in "qkv"}) > 0
    launch = kernel.bind(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, same = kernel(**given), launch()
        with pytest.raises(eq.EqfuseError, match="is being captured"):
            kernel.prepare({"q": (8, 64), "k": (2, 200, 64), "v": (2, 200, 64)})
    for name in "qkv":
        given[name].normal_()
    graph.replay()
    torch.cuda.synchronize()
    close(found, given)
    close(same, given)
    assert kernel.prepare({name: given[name].shape for name in "qkv"}) == 0


@EVERY_SCHEDULE
def test_new_lengths_launch_what_others_have_launched(prefer: str) -> None:
    """With other sizes and strides, whatever 16 divides, and in views that begin anywhere."""
    kernel = eq.compile(DECODE, prefer=prefer, verify=False)
    lengths = (*range(129, 150), 160, 200, 255, 256)
    for length in (*lengths, *reversed(lengths)):
        given = decode_inputs(length)
        close(kernel(**given), given)
    before = kernel.compilations
    for length in (151, 152, 176, 177, 240):
        given = decode_inputs(length)
        close(kernel(**given), given)
        assert kernel.compilations == before
    for length in (151, 176):
        given = decode_inputs(length)
        given["k"] = torch.randn(2 * length * 64 + 1, device=DEVICE)[1:].view(2, length, 64)
        given["v"] = torch.randn(2, length, 128, device=DEVICE)[..., ::2]
        for _ in range(2):
            close(kernel(**given), given)


def test_known_calls_on_other_streams_and_in_threads() -> None:
    kernel = eq.compile(DECODE, prefer="split_k", verify=False)
    given = decode_inputs()
    kernel(**given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        given["k"].normal_()
        found = [kernel(**given) for _ in range(20)]
    stream.synchronize()
    for each in found:
        close(each, given)


def test_what_is_unaligned_or_strided_is_told_apart() -> None:
    kernel = eq.compile("y[i,j] = x[i,j] / sum[j](abs(x[i,j]))", verify=False)
    x = torch.randn(65, 257, device=DEVICE)
    for _ in range(2):
        for given in (x, x[1:, 1:], x[:, ::2], x.T, x[:1].expand(9, 257), x[:, :256], x[:, :1]):
            torch.testing.assert_close(kernel(x=given), given / given.abs().sum(1, keepdim=True))


SECOND_PROCESS = """
import sys, threading, torch
import eqfuse as eq
kernel = eq.compile(sys.argv[1], prefer=sys.argv[2])
worst = 0.0
def call(length):
    global worst
    x = torch.randn(64, length, device="cuda")
    right = torch.softmax(x.double(), -1)
    for _ in range(3):
        worst = max(worst, float((kernel(x=x) - right).abs().max()))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        worst = max(worst, float((kernel.bind(x=x)() - right).abs().max()))
    torch.cuda.synchronize()
for length in (1024, 1000, 4096):
    call(length)
thread = threading.Thread(target=call, args=(4096,))
thread.start()
thread.join()
x, graph = torch.randn(64, 1024, device="cuda"), torch.cuda.CUDAGraph()
kernel(x=x), kernel(x=x)
with torch.cuda.graph(graph):
    y = kernel(x=x)
x.normal_()
graph.replay()
worst = max(worst, float((y - torch.softmax(x.double(), -1)).abs().max()))
print(worst, "triton" in sys.modules)
"""


@pytest.mark.parametrize("prefer", ["resident", "rolling", "split_k"])
def test_a_second_process_launches_kept_binaries(prefer: str, tmp_path: Path) -> None:
    source = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
    settings = {"XDG_CACHE_HOME": str(tmp_path), "EQFUSE_CACHE": "on"}
    for first in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", SECOND_PROCESS, source, prefer],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        worst, imported = done.stdout.split()
        assert float(worst) < 1e-6
        assert imported == str(first)


def test_attention_that_the_back_end_leaves_is_differentiated() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    from eqfuse.torch.backend import eqfuse as backend

    compiled = torch.compile(lambda q: attend(q, q, q, is_causal=True), backend=backend, fullgraph=True)
    q = torch.randn(1, 2, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    found, exact = q.clone().requires_grad_(), q.clone().requires_grad_()
    compiled(found).sum().backward()
    attend(exact, exact, exact, is_causal=True).sum().backward()
    torch.testing.assert_close(found.grad, exact.grad, rtol=2e-2, atol=2e-2)
