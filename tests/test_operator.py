"""A kernel's call as one operator of torch: compilers, exporters, transforms, fakes."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from grad_programs import CASES
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import eqfuse as eq
from bench.workloads import WORKLOADS
from eqfuse.operator.batch import batched
from eqfuse.operator.content import names_text, quoted, unquoted
from eqfuse.operator.shapes import output_dtypes
from eqfuse.operator.site import Site
from eqfuse.terms.floats import TORCH_DTYPES
from eqfuse.terms.parser import axes_of

ATTENTION = """
S[b,i,j] = sum[d](Q[b,i,d] * K[b,j,d]) * scale
T[b,i,j] = where(j <= i, S[b,i,j], -inf)
P[b,i,j] = exp(T[b,i,j] - max[j](T[b,i,j]))
O[b,i,e] = sum[j](P[b,i,j] / sum[j](P[b,i,j]) * V[b,j,e])
"""
SOFTMAX = "y[j] = exp(x[j] - max[j](x[j])) / sum[j](exp(x[j] - max[j](x[j])))"
attention = eq.compile(ATTENTION, native="off")
softmax = eq.compile(SOFTMAX, native="off")
operator = torch.ops.eqfuse.call.default


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any = 0.3) -> torch.Tensor:
    return attention(Q=q, K=k, V=v, scale=scale)  # type: ignore[no-any-return]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any = 0.3) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


def inputs(n: int = 7, *, grad: bool = False, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, n, 4, dtype=dtype, requires_grad=grad) for _ in range(3)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_one_graph_for_all_lengths_and_scales_forward_and_backward() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda *given: attended(*given) * 2, fullgraph=True, dynamic=True, backend=counter)
    for n in range(3, 23):
        given = inputs(n, grad=True)
        scale = 0.1 * n
        found, expected = call(*given, scale), exact(*given, scale) * 2
        assert torch.allclose(found, expected)
        weights = torch.randn_like(found)
        pairs = zip(
            torch.autograd.grad((found * weights).sum(), given),
            torch.autograd.grad((expected * weights).sum(), given),
            strict=True,
        )
        for one, other in pairs:
            assert torch.allclose(one, other)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor_compiles_around_it() -> None:
    call = torch.compile(lambda *given: attended(*given).relu(), fullgraph=True, dynamic=True)
    for n in (5, 9):
        given = inputs(n, dtype=torch.float32)
        assert torch.allclose(call(*given), exact(*given).relu(), atol=1e-5)


NORM = "y[i,j] = x[i,j] * rsqrt(mean[j](sq(x[i,j])) + eps) * w[j]"


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_goes_straight_to_what_has_run(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Site] = []
    first = Site._looked_at
    monkeypatch.setattr(Site, "_looked_at", lambda site, *given: looked.append(site) or first(site, *given))
    norm = eq.compile(NORM, native="off", trials=17 + dynamic)  # no other test has a kernel of this content
    call = torch.compile(lambda x, w: norm(x=x.sin(), w=w, eps=1e-3), fullgraph=True, dynamic=dynamic)
    w = torch.randn(8)
    with torch.no_grad():
        for n in (5, 5, 5, 5, *((6, 6, 6, 5, 6) if dynamic else ())):
            x = torch.randn(n, 8)
            assert torch.allclose(call(x, w), norm(x=x.sin(), w=w, eps=1e-3), atol=1e-6)
        count = len(looked)
        assert 0 < count <= (6 if dynamic else 3) and len({id(site) for site in looked}) == 1
        norm.tune(x=torch.randn(5, 8), w=w, eps=1e-3, seconds=0.1)
        call(torch.randn(5, 8), w)
        assert len(looked) == count + 1  # another plan may run by now
        with _Watching() as watching:
            looked[0]([torch.randn(5, 8), w], [], [1e-3])
        assert operator in watching.seen  # who looks at operators sees it


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.seen.append(function)
        return function(*given, **(named or {}))


@pytest.mark.slow
def test_code_in_cpp_that_would_end_the_process_is_refused() -> None:
    call = torch.compile(lambda x: softmax(x=x), fullgraph=True, options={"cpp_wrapper": True})
    with torch.no_grad(), pytest.raises(Exception, match="cannot call this kernel from C"):
        call(torch.randn(5))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = attention
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.kernel(Q=q @ self.weight, K=k, V=v, scale=0.3)  # type: ignore[no-any-return]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.slow(but=["False"])
def test_exported_with_a_dynamic_length(strict: bool, tmp_path: Path) -> None:
    layer = copy.deepcopy(Layer())
    n = torch.export.Dim("n", min=2, max=4096)
    exported = torch.export.export(layer, tuple(inputs()), dynamic_shapes=({1: n},) * 3, strict=strict)
    given = inputs(11)
    assert torch.allclose(exported.module()(*given), layer(*given))
    assert sum(node.target is operator for node in exported.graph.nodes) == 1


@pytest.mark.slow
def test_a_saved_graph_runs_where_the_kernel_was_not_made(tmp_path: Path) -> None:
    layer, given = Layer(), inputs()
    torch.export.save(torch.export.export(layer, tuple(given)), tmp_path / "layer.pt2")
    torch.save((given, layer(*given).detach()), tmp_path / "values.pt")
    code = f"""
import torch, eqfuse
layer = torch.export.load({str(tmp_path / "layer.pt2")!r}).module()
given, expected = torch.load({str(tmp_path / "values.pt")!r})
assert torch.allclose(layer(*given), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_graph_outlives_the_kernel() -> None:
    def made() -> Any:
        kernel = eq.compile("z[i] = sum[j](x[i,j] * 1.25)", native="off")
        return make_fx(lambda x: kernel(x=x), tracing_mode="symbolic")(torch.ones(2, 3))

    graph = made()
    gc.collect()
    assert torch.equal(graph(torch.ones(4, 5)), torch.full((4,), 6.25))


def test_a_graph_of_a_kernel_with_rules_says_what_is_missing() -> None:
    content = quoted({"added": "0123456789abcdef", **unquoted(softmax.content)})
    with pytest.raises(eq.EqfuseError, match="rules or reductions which this process does not have"):
        operator(content, "x|||", [torch.ones(3)], [], [])


# -- transforms ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_vmap_is_an_axis_of_the_program() -> None:
    batch = [torch.randn(3, 2, 7, 4, dtype=torch.float64) for _ in range(3)]
    found = torch.func.vmap(attended)(*batch)
    assert torch.allclose(found, torch.stack([attended(*each) for each in zip(*batch, strict=True)]))
    graph = make_fx(lambda *given: torch.func.vmap(attended)(*given))(*batch)
    assert sum(node.target is operator for node in graph.graph.nodes) == 1


@pytest.mark.slow
def test_vmap_over_other_dimensions_and_some_inputs() -> None:
    q, k, v = inputs()
    queries = torch.randn(2, 5, 7, 4, dtype=torch.float64)
    found = torch.func.vmap(lambda q: attended(q, k, v), in_dims=1, out_dims=2)(queries)
    expected = torch.stack([exact(each, k, v) for each in queries.unbind(1)], 2)
    assert torch.allclose(found, expected)
    scales = torch.tensor([0.1, 0.2], dtype=torch.float64)
    found = torch.func.vmap(lambda s: attended(q, k, v, s))(scales)
    assert torch.allclose(found, torch.stack([exact(q, k, v, s) for s in scales]))


def test_vmap_nests() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    found = torch.func.vmap(torch.func.vmap(lambda x: softmax(x=x)))(x)
    assert torch.allclose(found, torch.softmax(x, -1))


@pytest.mark.parametrize(
    "asked",
    [
        torch.func.jacrev,
        lambda f: torch.func.jacrev(torch.func.jacrev(f)),
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
        lambda f: (
            torch.func.vmap(torch.func.grad(lambda x: f(x)[0]), in_dims=None, randomness="error")
            and torch.func.grad(lambda x: torch.func.vmap(f)(x.expand(2, -1))[:, 0].sum())
        ),
    ],
    ids=["jacrev", "second", "grad", "grad of vmap"],
)
@pytest.mark.slow(but=["jacrev", "of vmap"])
def test_transforms_of_torch_func(asked: Callable[..., Any]) -> None:
    x = torch.randn(5, dtype=torch.float64)
    assert torch.allclose(asked(lambda x: softmax(x=x))(x), asked(lambda x: torch.softmax(x, -1))(x))


@pytest.mark.slow
def test_gradients_for_each_of_a_batch() -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(lambda x: softmax(x=x)[1]))(x)
    assert torch.allclose(found, torch.func.vmap(torch.func.grad(lambda x: torch.softmax(x, -1)[1]))(x))


@pytest.mark.parametrize(
    ("source", "names", "expected"),
    [
        ("y[i] = sum[j](x[i,j] * w[j])", ("x",), "y[batch, i] = sum[j](x[batch, i, j] * w[j])"),
        ("y = sum[j](x[j])\nz[i] = y * a[i]", ("x",), "y[batch] = sum[j](x[batch, j])\nz[batch, i] = y[batch] * a[i]"),
        ("x: f32[j]\ny = sum[j](x[j]) * s", ("s",), "x: f32[j]\ny[batch] = sum[j](x[j]) * s[batch]"),
        ("y[i] = sum[j](where(j < n, x[i,j], 0))", ("n",), "n: i64[batch]\ny[batch, i] = sum[j](where(j < n[batch], x[i, j], 0))"),
        ("m[b], v[b] = mean_var[batch](x[b,batch])", ("x",), "m[batch2, b], v[batch2, b] = mean_var[batch](x[batch2, b, batch])"),
    ],
)  # fmt: skip
def test_the_program_of_a_batch(source: str, names: tuple[str, ...], expected: str) -> None:
    assert batched(source, names)[0] == expected


def test_dimensions_of_a_batch_are_one_further() -> None:
    x = torch.randn(5, 3, 4)
    mirrored = eq.compile("j: axis[N(x, 1)]\ny[i,j] = x[i, N(j) - 1 - j]", native="off")
    torch.testing.assert_close(torch.vmap(lambda each: mirrored(x=each))(x), x.flip(2))
    counted = eq.compile("x: f32[i,j]\ny[i] = x[i,0] * N(x, 1)", native="off")
    torch.testing.assert_close(torch.vmap(lambda each: counted(x=each))(x), x[:, :, 0] * 4)


# -- fakes and records -----------------------------------------------------------------------------


def test_fakes_and_meta() -> None:
    with FakeTensorMode():
        found = attended(*[torch.empty(2, 6, 4, dtype=torch.float16) for _ in range(3)])
    assert found.shape == (2, 6, 4) and found.dtype == torch.float16
    found = attended(*[x.to("meta") for x in inputs()])
    assert found.is_meta and found.shape == (2, 7, 4)


def test_fakes_check_shapes_and_dtypes() -> None:
    q, k, v = (x.to("meta") for x in inputs())
    with pytest.raises(eq.EqfuseError, match="axis 'd' has sizes 3 and 4"):
        attended(q[..., :3], k, v)
    with pytest.raises(eq.EqfuseError, match="'Q' has 3 dimensions"):
        attended(q[0], k, v)
    with pytest.raises(eq.EqfuseError, match="dtype torch.complex64"):
        attended(q.to(torch.complex64), k, v)


@pytest.mark.slow(but=["softmax", "attention"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_fakes_have_the_dtypes_of_calls(name: str) -> None:
    workload = WORKLOADS[name]
    constants = next(iter(workload.cases.values())).constants
    kernel = eq.compile(workload.source, scalars=constants, verify=False, native="off")
    known = {buffer.name: buffer.dtype for buffer in kernel.tile.buffers}
    dtypes = {n: TORCH_DTYPES[d] for n, d in kernel.compiled.dtypes.items() if d in TORCH_DTYPES}
    tensors = {tensor.name for tensor in kernel.program.tensors}
    found = output_dtypes(kernel.program, {n: d for n, d in dtypes.items() if n in tensors})
    assert found == tuple(TORCH_DTYPES[known[output.name] or ""] for output in kernel.program.outputs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_records_the_operator() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda *given: attended(*given), tuple(inputs()))
    given = inputs(9)
    assert torch.allclose(traced(*given), exact(*given))
    assert "eqfuse::call" in str(traced.graph)


def test_autocast_changes_nothing() -> None:
    given = inputs(dtype=torch.float32)
    call = torch.compile(attended, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(*given)
    assert found.dtype == torch.float32 and torch.allclose(found, exact(*given), atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_the_same_operator(copied: Callable[[eq.Kernel], eq.Kernel]) -> None:
    kernel = copied(softmax)
    x = torch.randn(5)
    assert kernel.content == softmax.content
    call = torch.compile(lambda x: kernel(x=x), fullgraph=True, backend="aot_eager")
    assert torch.allclose(call(x), torch.softmax(x, -1))


@pytest.mark.slow
def test_a_compiled_backward_reads_what_its_forward_has_saved() -> None:
    calls: list[tuple[Any, ...]] = []

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(node.args for node in graph.graph.nodes if "eqfuse.call" in str(node.target))
        return make_boxed_func(graph.forward)

    given = inputs(6, grad=True)
    backend = aot_autograd(fw_compiler=seen, bw_compiler=seen)
    loss = torch.compile(
        lambda q, k, v: attention(Q=q, K=k, V=v, scale=0.3).sum(), backend=backend, fullgraph=True
    )
    found = torch.autograd.grad(loss(*given), given)
    expected = torch.autograd.grad(exact(*given, 0.3).sum(), given)
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))
    forward, backward = calls
    assert unquoted(forward[0])["source"].endswith("return O, lse_1")
    assert backward[1].startswith("Q K V O lse dO|") and "max[" not in unquoted(backward[0])["source"]


@pytest.mark.slow
def test_a_compiled_backward_beside_an_output_of_integers() -> None:
    kernel = eq.compile("k: axis[2]\nv[i,k], p[i,k] = topk[j,k](x[i,j])", native="off")
    call = torch.compile(lambda x: kernel(x=x), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    values, places = call(x)
    (found,) = torch.autograd.grad(values.square().sum(), x)
    assert places.dtype == torch.int64 and not places.requires_grad
    assert torch.equal(found, torch.autograd.grad(torch.topk(x, 2).values.square().sum(), x)[0])


def test_constants_may_be_numbers_of_numpy() -> None:
    kernel = eq.compile("y[i] = sum[j](x[i,j]) * g", scalars={"g": np.int64(4)}, native="off")
    assert unquoted(kernel.content)["scalars"] == {"g": 4}
    call = torch.compile(lambda x: kernel(x=x), fullgraph=True, backend="aot_eager")
    assert torch.equal(call(torch.ones(2, 3)), torch.full((2,), 12.0))


def test_outputs_are_memory_of_their_own() -> None:
    kernel = eq.compile("y[i,j] = x[j,i]", native="off")
    x = torch.randn(3, 4)
    opcheck(operator, (kernel.content, "x|||", [x], [], []))


def checked(
    kernel: eq.Kernel, tensors: dict[str, torch.Tensor], scalars: dict[str, Any], sizes: dict[str, int]
) -> None:
    """Every check that torch has for an operator."""
    integers = {name: value for name, value in scalars.items() if isinstance(value, int)}
    reals = {name: value for name, value in scalars.items() if isinstance(value, float)}
    names = names_text(list(tensors), list(integers), list(reals), list(sizes))
    given = [*integers.values(), *sizes.values()]
    opcheck(operator, (kernel.content, names, list(tensors.values()), given, list(reals.values())))


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.slow(but=["forward"])
def test_opcheck(grad: bool) -> None:
    checked(attention, dict(zip("QKV", inputs(grad=grad), strict=True)), {"scale": 0.3}, {})


OF_USERS = ("a fold that is not commutative", "a fold of what does not vary", "extremes of a user")
"""Programs with reductions that other tests register."""


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_USERS])
def test_opcheck_of_many_programs(name: str, grad: bool) -> None:
    if grad and name == "topk":
        pytest.skip(
            "opcheck's AOT check fails beside an output of integers; see the test of a compiled backward"
        )
    case = CASES[name]
    kernel = eq.compile(case.source, native="off")
    tensors = {
        key: torch.from_numpy(array).requires_grad_(grad and key in case.wrt)
        for key, array in case.tensors().items()
    }
    known = {tensor.name for tensor in kernel.program.tensors}
    axes = axes_of(kernel.program.outputs)
    sizes = {
        axis: case.extents[axis]
        for axis in axes
        if axis not in kernel.program.domains and axis not in kernel.program.lengths
    }
    checked(kernel, {n: t for n, t in tensors.items() if n in known}, dict(case.scalars), sizes)


def test_lists_of_a_known_length_are_batched() -> None:
    source = "k: axis[K]\nv[t,k], p[t,k] = topk[j,k](x[t,j])\nreturn v"
    kernel = eq.compile(source, scalars={"K": 2}, native="off")
    x = torch.randn(3, 4, 7)
    assert torch.equal(torch.func.vmap(lambda x: kernel(x=x))(x), x.topk(2).values)
