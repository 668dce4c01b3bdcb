"""The visible form of a call: compilers see what it launches, and packages of AOTInductor run without eqfuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import eqfuse as eq
from eqfuse.operator.content import VISIBLE

ATTENTION = """
S[b,i,j] = sum[d](Q[b,i,d] * K[b,j,d]) * scale
T[b,i,j] = where(j <= i, S[b,i,j], -inf)
P[b,i,j] = exp(T[b,i,j] - max[j](T[b,i,j]))
O[b,i,e] = sum[j](P[b,i,j] / sum[j](P[b,i,j]) * V[b,j,e])
"""
SOFTMAX = "y[i,j] = exp(x[i,j] - max[j](x[i,j])) / sum[j](exp(x[i,j] - max[j](x[i,j])))"
GATHERED = "y[i,d] = sum[k](W[ids[i,k], d])"
TOP = "k: axis[3]\nv[i,k], p[i,k] = topk[j,k](x[i,j])\nreturn v, p"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def visible(source: str) -> eq.Kernel:
    return eq.compile(source, native="off", visible=True)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def test_a_compiler_sees_what_a_call_does_forward_and_backward() -> None:
    kernel, backend = visible(SOFTMAX), AotEagerAndRecordGraphs()
    call = torch.compile(lambda x, w: (kernel(x=x) * w).sum(), backend=backend, fullgraph=True)
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    (found,) = torch.autograd.grad(call(x, w), x)
    (expected,) = torch.autograd.grad((torch.softmax(x, -1) * w).sum(), x)
    assert torch.allclose(found, expected, atol=1e-6)
    for graph in (*backend.fw_graphs, *backend.bw_graphs):
        assert "eqfuse" not in graph.code and "aten" in graph.code


@pytest.mark.parametrize(
    ("source", "inputs"),
    [
        (GATHERED, {"W": torch.randn(9, 4), "ids": torch.randint(0, 9, (5, 3))}),
        (TOP, {"x": torch.randn(6, 11)}),
        (ATTENTION, {**{name: torch.randn(2, 6, 4) for name in "QKV"}, "scale": 0.5}),
    ],
    ids=["a gather", "topk", "masked attention"],
)
def test_programs_are_what_they_are_as_calls(source: str, inputs: dict[str, Any]) -> None:
    kernel = visible(source)
    call = torch.compile(lambda given: kernel(**given), backend="aot_eager", fullgraph=True)
    found, expected = call(inputs), kernel(**inputs)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


def test_what_a_mask_excludes_may_be_infinite() -> None:
    kernel = visible(ATTENTION)
    q, k, v = (torch.randn(1, 5, 4) for _ in range(3))
    v[0, 4] = torch.inf
    call = torch.compile(lambda: kernel(Q=q, K=k, V=v, scale=0.5), backend="aot_eager", fullgraph=True)
    assert torch.isfinite(call()[0, :4]).all() and torch.allclose(
        call()[0, :4], kernel(Q=q, K=k, V=v, scale=0.5)[0, :4], atol=1e-6
    )


def test_a_number_inside_of_a_tensor_is_refused() -> None:
    kernel = visible("y[i] = x[i] * s")
    call = torch.compile(lambda x, s: kernel(x=x, s=s), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="'s' is a number in a tensor"):
        call(torch.randn(4), torch.tensor(2.0))


def test_the_form_is_part_of_what_a_kernel_is() -> None:
    kernel = visible(SOFTMAX)
    assert VISIBLE in kernel.content and "visible" not in eq.compile(SOFTMAX, native="off").content
    exported = torch.export.export(_Model(kernel), (torch.randn(4, 8),))
    assert [n.target for n in exported.graph.nodes if "eqfuse" in str(n.target)] == [
        torch.ops.eqfuse.visible.default
    ]


class _Model(torch.nn.Module):
    def __init__(self, kernel: eq.Kernel) -> None:
        super().__init__()
        self.kernel, self.linear = kernel, torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.kernel(x=x))  # type: ignore[no-any-return]


SWIFT = {"aot_inductor.compile_wrapper_opt_level": "O0"}
"""What a package's C++ is compiled with: its headers take longest."""
ALONE = """
import sys
sys.modules["eqfuse"] = None
import torch
x, expected = torch.load(sys.argv[2])
found = torch._inductor.aoti_load_package(sys.argv[1])(x)
assert torch.allclose(found, expected, atol=1e-5), float((found - expected).abs().max())
print("ran without eqfuse")
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_package_runs_in_a_process_without_eqfuse(device: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("there is no C++ compiler, which AOTInductor needs")
    model, x = _Model(visible(SOFTMAX)).to(device), torch.randn(24, 8, device=device)
    dims = {"x": {0: torch.export.Dim("n", min=2, max=4096)}} if device == "cuda" else None
    package, tensors = tmp_path / "model.pt2", tmp_path / "tensors.pt"
    with torch.no_grad(), torch._inductor.config.patch(SWIFT):
        exported = torch.export.export(model, (x,), dynamic_shapes=dims)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
        other = torch.randn(33 if dims else 24, 8, device=device)
        torch.save((other, model(other)), tensors)
    command = [sys.executable, "-u", "-X", "faulthandler", "-c", ALONE, str(package), str(tensors)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "ran without eqfuse", (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("rows", ["symbols", 640])
def test_a_graph_has_launches_for_all_sizes(rows: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    kernel = eq.compile(SOFTMAX, target="h200", visible=True)
    symbols, example = ShapeEnv(), torch.empty(640, 8)
    dims = [DimDynamic.DYNAMIC if rows == "symbols" else DimDynamic.STATIC, DimDynamic.STATIC]
    mode = FakeTensorMode(shape_env=symbols)
    shape = mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(dims)).shape
    with mode:
        x = torch.empty(shape, device="cuda")
        graph = make_fx(lambda x: kernel.opened({"x": x}, {}, {}))(x)
    (launch,) = (node for node in graph.graph.nodes if "triton_kernel" in str(node.target))
    given = launch.kwargs["kwargs"]
    tuned: Any = kernel_side_table.get_kernel(launch.kwargs["kernel_idx"])
    text = tuned.fn.src
    assert "INDEX" not in given and "tl.int32" in text and "INDEX" not in text
    assert given["ALIGNED_I"] == (rows == 640) and given["N_j"] == 8
    asked = [str(guard.expr) for guard in symbols.guards]
    assert not any("Mod" in guard for guard in asked), asked


def test_a_size_that_every_plan_holds_whole_becomes_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of symbols for all dims: a head dim is as the example has it then, and lengths stay open."""
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    kernel = eq.compile(ATTENTION, target="h200", prefer="rolling", visible=True)
    symbols, example = ShapeEnv(), torch.empty(3, 640, 32)
    mode = FakeTensorMode(shape_env=symbols)
    dims = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 3)
    shape = mode.from_tensor(example, symbolic_context=dims).shape
    with mode:
        given = [torch.empty(shape, device="cuda") for _ in range(3)]
        graph = make_fx(lambda q, k, v: kernel.opened({"Q": q, "K": k, "V": v}, {"scale": 0.25}, {}))(*given)
    launches = [node.kwargs["kwargs"] for node in graph.graph.nodes if "triton_kernel" in str(node.target)]
    assert launches and all(launch["N_d"] == 32 for launch in launches)
    nodes = [node for node in graph.graph.nodes if "triton_kernel" in str(node.target)]
    texts = [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).fn.src for node in nodes]  # type: ignore[attr-defined]
    assert all(
        "scale = tl.cast(scale, tl.float32)" in text for text in texts
    )  # torch gives numbers as float64
    assert not any(isinstance(launch["N_j"], int) for launch in launches)
    asked = [str(guard.expr) for guard in symbols.guards]
    assert any("32" in guard for guard in asked) and not any("640" in guard for guard in asked), asked


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_inductor_compiles_the_launches_for_all_lengths(device: str) -> None:
    softmax = visible(SOFTMAX)
    call = torch.compile(lambda x: softmax(x=x) + 1, fullgraph=True, dynamic=True)
    for length in (128, 200, 313):
        x = torch.randn(64, length, device=device)
        assert torch.allclose(call(x), torch.softmax(x, -1) + 1, atol=1e-5)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_inductor_compiles_the_launches_of_a_gradient(device: str) -> None:
    attention = visible(ATTENTION)
    call = torch.compile(
        lambda q, k, v: attention(Q=q, K=k, V=v, scale=0.25).square().sum(), fullgraph=True, dynamic=True
    )
    for length in (128, 200):
        q, k, v = given = [torch.randn(2, length, 32, device=device, requires_grad=True) for _ in range(3)]
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
        found, expected = call(q, k, v), right.square().sum()
        assert torch.allclose(found, expected, rtol=1e-2)
        pairs = zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given), strict=True)
        assert all(torch.allclose(one, other, rtol=2e-2, atol=2e-2) for one, other in pairs)
