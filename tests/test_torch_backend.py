"""`torch.compile(model, backend="eqfuse")`: regions found, taken, refused with a reason; results as eager's in float64."""

from __future__ import annotations

import copy
import shutil
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import eqfuse as eq
from eqfuse import compiler, results
from eqfuse.audit import audit
from eqfuse.compiled import Asked
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.torch import backend as backend_module
from eqfuse.torch import outcome, prices
from eqfuse.torch.backend import _keep_for_backward
from eqfuse.torch.backend import eqfuse as backend
from eqfuse.torch.operators.table import packet
from eqfuse.torch.outcome import Entry
from eqfuse.torch.regions import Finder, Region

ALL = {"rest": "aot_eager", "take": "always", "native": "off"}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    outcome.report(measure=False, reset=True)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, dynamic=True, fullgraph=True, options={**ALL, **options})


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_the_entry_point_names_the_back_end() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]
    assert EntryPoint("eqfuse", points["eqfuse"], "torch_dynamo_backends").load() is backend


def test_a_softmax_becomes_a_kernel() -> None:
    call = compiled(lambda x, w: torch.softmax(x @ w, -1).sum(-1))
    for n in (5, 7):
        x, w = r(n, 4), r(4, 6)
        assert torch.allclose(call(x, w), torch.softmax(x @ w, -1).sum(-1))
    report = eq.torch.report()
    (entry,) = report.regions
    assert report.graphs == 1 and entry.taken and entry.name == "mm + softmax + sum"
    assert entry.predicted is not None and entry.measured is not None
    assert "test_torch_backend.py" in entry.line and "torch.softmax(x @ w" in entry.line
    assert "taken" in str(report) and "predicted" in str(report) and "measured" in str(report)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = (q @ k.mT * 0.5).masked_fill(~mask, float("-inf"))
    found = torch.softmax(scores, -1) @ v
    return found.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


@pytest.mark.slow
def test_attention_is_one_region_and_its_heads_are_joined() -> None:
    call = compiled(attend)
    for n in (6, 9):
        q, k, v = r(2, 3, n, 4), r(2, 3, n, 4), r(2, 3, n, 4)
        assert torch.allclose(call(q, k, v), attend(q, k, v))
    assert [entry.name for entry in outcome.report(measure=False).taken] == ["bmm + softmax + bmm"]


@pytest.mark.slow
def test_grouped_queries_of_torchs_attention_are_read_by_groups() -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    q, k, v = r(2, 4, 5, 8), r(2, 2, 5, 8), r(2, 2, 5, 8)
    call = torch.compile(model, backend=backend, dynamic=False, options=ALL)
    with torch.no_grad():
        assert torch.allclose(call(q, k, v), model(q, k, v))
    (entry,) = outcome.report(measure=False).regions
    assert entry.taken and "j // 2, n" in entry.source, entry.why


@pytest.mark.slow
def test_training_runs_the_gradients_kernel() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 2)).double()
    call = compiled(model)
    x = r(5, 4)
    call(x).square().sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for parameter, one in zip(model.parameters(), found, strict=True):
        assert torch.allclose(parameter.grad, one)
    assert outcome.report(measure=False).taken


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def test_labels_that_are_flattened_with_a_gap_may_be_copied_outside_of_the_loss() -> None:
    """Shifted labels: the copy costs nothing beside the logits, which are then read by plain rows."""

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, labels[:, 1:].flatten())

    labels = torch.zeros(3, 9, dtype=torch.int64, device="meta")
    graph = make_fx(loss, tracing_mode="fake")(torch.empty(24, 7, device="meta"), labels).graph
    finder = Finder(graph, set())
    regions = finder.candidates(next(finder.seeds()))
    copies = [sum(packet(node.target) == "aten.clone" for node in region.nodes) for region in regions]
    assert copies[:2] == [1, 0]


@pytest.mark.parametrize(("columns", "reads"), [(1000, 1), (200_000, 2)])
def test_rows_that_an_sm_cannot_hold_are_read_by_every_reduction(columns: int, reads: int) -> None:
    graph = make_fx(lambda x: torch.logsumexp(torch.ops.aten.clone(x), -1), tracing_mode="fake")(
        torch.empty(4096, columns, device="meta")
    )
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    h200 = device_named("h200")
    found = prices.apart(Region(tuple(nodes), frozenset()), h200) - h200.launch
    assert found == pytest.approx(reads * 4 * 4096 * columns / h200.bandwidth, rel=0.01)


def test_numbers_of_modules_are_constants_of_one_graph() -> None:
    model = RMSNorm(4).double()
    call = compiled(model)
    with torch.no_grad():
        for n in (5, 7):
            x = r(n, 4)
            assert torch.allclose(call(x), model(x))
    report = outcome.report(measure=False)
    assert report.graphs == 1 and len(report.taken) == len(report.regions) == 1
    assert "1e-06" in report.taken[0].source


def test_what_is_not_predicted_to_gain_is_left_with_its_reason() -> None:
    call = compiled(lambda x: x.sum(-1) * 2, take="predicted")
    x = r(5, 4)
    assert torch.allclose(call(x), x.sum(-1) * 2)
    (entry,) = outcome.report(measure=False).regions
    assert not entry.taken and "reading, writing and products alone" in entry.why


class Layers(nn.Module):
    """Two layers that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in zip(self.norms, self.maps, strict=True):
            x = torch.tanh(linear(norm(x)))
        return x


def forgotten() -> None:
    """As a new process is: what it knows is on disk."""
    torch._dynamo.reset()
    outcome.report(measure=False, reset=True)
    for known in (backend_module._judged, prices._known):
        known.clear()
    for cached in (backend_module._derived, backend_module._gradient):
        cached.cache_clear()


@pytest.mark.slow
def test_what_is_left_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("EQFUSE_CACHE", raising=False)
    priced: list[str] = []
    monkeypatch.setattr(prices, "least", lambda *_: 0.0)
    monkeypatch.setattr(prices, "least_backward", lambda *_: 0.0)
    seconds = [0.0, 1.0]

    def predicted(derived: Derived, asked: Asked) -> float:
        priced.append(derived.program.source)
        return seconds["dout" in derived.program.source]  # of a gradient: it gains nothing

    monkeypatch.setattr(compiler, "predicted", predicted)
    model, x = Layers(), torch.randn(5, 6)
    for _ in range(2):
        forgotten()
        assert torch.equal(compiled(model, take="predicted")(x), model(x))
        regions = outcome.report(measure=False).regions
        assert len(regions) == 2 and not outcome.report(measure=False).taken
        assert {entry.why for entry in regions} == {"the kernel is predicted to be no 1.05 times faster"}
        assert priced and len(set(priced)) == len(priced)  # by the first layer of the first process
    monkeypatch.setattr("eqfuse.audit.predicted", lambda *_: 0.5)
    for kind in {*results.KINDS} - {"priced", "differentiated"}:
        shutil.rmtree(tmp_path / "eqfuse" / kind, ignore_errors=True)
    found = {(each.kind, bool(each.wrong or each.fault)) for each in audit()}
    assert {("priced", True), ("differentiated", False)} == {each for each in found if each[0] != "sources"}


def test_a_gradient_of_too_many_reductions_is_not_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten()
    monkeypatch.setattr(prices, "least", lambda *_: 0.0)
    monkeypatch.setattr(prices, "least_backward", lambda *_: 0.0)
    monkeypatch.setattr(compiler, "predicted", lambda *_: 0.0)
    monkeypatch.setattr(results, "kept", lambda kind, subject, make: (make(), False))
    monkeypatch.setattr(backend_module, "MOST_REDUCTIONS", 2)
    monkeypatch.setattr(backend_module, "_gradient", None)
    model, x = Layers(), torch.randn(5, 6)
    assert torch.equal(compiled(model, take="predicted")(x), model(x))
    assert all("reductions or more" in entry.why for entry in outcome.report(measure=False).regions)


@pytest.mark.parametrize("is_causal", [False, True])
def test_products_are_part_of_what_no_kernel_can_do_without(is_causal: bool) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    graph = make_fx(attention, tracing_mode="fake")(*torch.randn(3, 1, 1, 512, 64)).graph
    finder = Finder(graph, set())
    device = device_named("cpu")
    (region, *_) = finder.candidates(next(finder.seeds()))
    moved = 4 * 4 * 512 * 64 / device.bandwidth + device.launch
    work = 0 if is_causal else 2 * 2 * 512 * 512 * 64 / device.matrix_float
    assert prices.least(region, device) == pytest.approx(moved + work, rel=0.05)


@pytest.mark.slow
def test_parts_of_a_dimension_have_gradients() -> None:
    """Of an axis that is read at numbers alone no tensor gives the length."""

    def parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b, c = (x @ w).view(-1, 3, 4).unbind(1)
        return torch.softmax(a * b, -1) * c

    x, w = r(5, 6).requires_grad_(), r(6, 12).requires_grad_()
    call = compiled(parts)
    call(x, w).square().sum().backward()
    found, x.grad, w.grad = (x.grad, w.grad), None, None
    assert outcome.report(measure=False).taken
    parts(x, w).square().sum().backward()
    for one, other in zip(found, (x.grad, w.grad), strict=True):
        assert torch.allclose(one, other)


def test_what_has_no_translation_is_left_with_its_reason() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.sort(x, -1).values.to(torch.complex128).abs(), -1)

    call = compiled(model)
    x = r(5, 4)
    assert torch.allclose(call(x), model(x))
    assert [entry.taken for entry in outcome.report(measure=False).regions] == [True]
    call = compiled(lambda x: torch.softmax(x**999, -1))
    assert torch.allclose(call(x), torch.softmax(x**999, -1), equal_nan=True)
    entry = outcome.report(measure=False).regions[-1]
    assert not entry.taken and "the power 999" in entry.why


def test_numbers_that_are_drawn_stay_outside_of_regions() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(F.dropout(x, 0.5).softmax(1), training=True).sum(1)

    x = r(5, 7)
    torch.manual_seed(1)
    wanted = fn(x)
    torch.manual_seed(1)
    assert torch.allclose(compiled(fn)(x), wanted)
    report = outcome.report(measure=False)
    assert [entry.name for entry in report.taken] == ["softmax", "sum"] == [e.name for e in report.regions]


def test_attention_that_is_left_in_training_computes_what_its_gradient_reads() -> None:
    graph = torch.fx.Graph()
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    found = graph.call_function(attention, (*(graph.placeholder(name) for name in "qkv"), None, False))
    graph.output(found)
    _keep_for_backward(torch.fx.GraphModule({}, graph))
    assert found.args[4] is True


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 4)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 7


def rounded(x: torch.Tensor) -> torch.Tensor:
    return Sevenfold.apply(x).softmax(-1) * x  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (rounded, "autograd_function_apply"),
        (lambda x: checkpoint(rounded, x, use_reentrant=False), "autograd_function_apply"),
        (lambda x: (x.data * x).softmax(-1) * x, "_get_data_attr"),
    ],
)
def test_derivatives_that_operators_do_not_show_are_left_to_torch(fn: Any, name: str) -> None:
    x = r(5, 4).requires_grad_()
    (found,) = torch.autograd.grad(compiled(fn)(x).square().sum(), x)
    (expected,) = torch.autograd.grad(fn(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert f"{name!r} in training" in str(outcome.report(measure=False))


@pytest.mark.slow
def test_batch_norm_in_training_changes_its_buffers_once() -> None:
    own = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Softmax(1)
    ).double()
    other = copy.deepcopy(own)
    call = compiled(own)
    for _ in range(2):
        x = r(2, 3, 8, 8)
        results = call(x), other(x)
        assert torch.allclose(*results)
        for result in results:
            result.square().sum().backward()
    for one, two in zip(own.buffers(), other.buffers(), strict=True):
        assert torch.allclose(one, two)
    for one, two in zip(own.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad)  # type: ignore[arg-type]


def test_detached_parts_in_training_are_left() -> None:
    weight = r(4, 4).requires_grad_()

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ weight.detach(), -1) @ weight

    call = compiled(model)
    x = r(5, 4)
    call(x).square().sum().backward()
    found = weight.grad.clone() if weight.grad is not None else None
    weight.grad = None
    model(x).square().sum().backward()
    assert found is not None and torch.allclose(found, weight.grad)
    assert "'detach' in training" in str(outcome.report(measure=False))


@pytest.mark.slow
def test_a_cache_is_written_in_place() -> None:
    def model(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, at, x)
        count.add_(1)
        seen = torch.arange(cache.shape[1]) <= at
        return torch.softmax((x @ cache.mT).masked_fill(~seen, -torch.inf), -1) @ cache

    call = compiled(model)
    one, count = r(2, 6, 3), torch.zeros(3)
    two, twice = one.clone(), count.clone()
    for at in range(3):
        x, place = r(2, 1, 3), torch.tensor([at])
        assert torch.allclose(call(one, x, place, count), model(two, x, place, twice))
        assert torch.equal(one, two) and torch.equal(count, twice)
    report = outcome.report(measure=False)
    assert [entry.name for entry in report.taken] == ["bmm + softmax + bmm"] and not report.left


def test_a_changed_input_that_is_returned_is_left() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return torch.softmax(x, -1), x[0]

    x = r(3, 4)
    y = x.clone()
    (one, view), (two, _) = compiled(model)(x), model(y)
    assert torch.allclose(one, two) and torch.allclose(x, y)
    x.zero_()
    assert not view.any()
    assert "returns an input that it changes" in str(outcome.report(measure=False))


class Mean(nn.Module):
    """The mean of a layer's outputs, which is a product with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(300, 280)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean(-1)


def taken_kernel() -> Any:
    (entry,) = outcome.report(measure=False).taken
    return entry.kernel


def test_a_product_that_another_order_spares_is_no_bound() -> None:
    model, x = Mean(), torch.randn(256, 300)
    call = compiled(model, take="predicted")
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x))
    kernel = taken_kernel()
    assert kernel.plan.order and not kernel.constants
    assert (
        "x0[j, i]" in kernel.program.source or "x0[i, j]" in kernel.program.source
    )  # the weights as they lie


@pytest.mark.parametrize("reads_grad", [True, False], ids=["no_grad", "requires no grad"])
def test_what_is_made_of_parameters_alone_is_kept(reads_grad: bool) -> None:
    model, x = Mean().requires_grad_(reads_grad), torch.randn(256, 300)
    call = compiled(model, take="predicted", constants=True)
    with torch.no_grad() if reads_grad else nullcontext():
        for _ in range(3):
            torch.testing.assert_close(call(x), model(x))
        constants = taken_kernel()._constants
        assert len(constants._kept) == 1 and "sum" in constants.latest.kept.kernel.program.source
        with torch.no_grad():
            model.layer.weight.mul_(2)
        torch.testing.assert_close(call(x), model(x))
        model.load_state_dict(Mean().state_dict())
        torch.testing.assert_close(call(x), model(x))
        model.layer.weight = nn.Parameter(torch.randn(280, 300), requires_grad=reads_grad)
        torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(call(x[:3]), model(x[:3]), rtol=1e-4, atol=1e-5)


def test_gradients_read_nothing_that_is_kept() -> None:
    model, x = Mean(), torch.randn(256, 300)
    call = compiled(model, constants=True)
    with torch.no_grad():
        call(x)
    call(x).square().sum().backward()
    found = model.layer.weight.grad
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, model.layer.weight.grad, rtol=1e-4, atol=1e-5)


def test_inference_mode_keeps_nothing() -> None:
    model, x = Mean(), torch.randn(256, 300)
    call = compiled(model, constants=True)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(call(x), model(x))
            model.layer.weight.mul_(2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"constants": {"w"}}, "constants is {'w'}"),
        ({"rset": "x"}, "no option 'rset'"),
        ({"rest": "x"}, "rest is 'x'"),
        ({"take": "x"}, "take is 'x'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(Exception, match=said):
        torch.compile(lambda x: x + 1, backend=backend, options=options)(torch.ones(2))


# -- families of models ----------------------------------------------------------------------------


def rotated(x: torch.Tensor) -> torch.Tensor:
    n, d = x.shape[-2], x.shape[-1]
    angle = torch.arange(n, dtype=x.dtype)[:, None] / 100 ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
    angle = torch.cat([angle, angle], -1)
    low, high = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-high, low], -1) * angle.sin()


class Bert(nn.Module):
    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (p.view(b, n, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = self.norms[0](x + self.out(found))
        return self.norms[1](x + self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """With `normed`, queries and keys are normalised, as in Qwen3."""

    def __init__(self, d: int = 16, heads: int = 4, normed: bool = False) -> None:
        super().__init__()
        self.heads, self.width = heads, d // heads
        self.q, self.k, self.v = (nn.Linear(d, s, bias=False) for s in (d, d // 2, d // 2))
        self.out = nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((d, 24), (d, 24), (24, d)))
        self.before, self.behind = RMSNorm(d), RMSNorm(d)
        self.normed = nn.ModuleList([RMSNorm(self.width), RMSNorm(self.width)]) if normed else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        y = self.before(x)
        q, k, v = (part(y).view(b, n, -1, self.width).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.normed is not None:
            q, k = self.normed[0](q), self.normed[1](k)
        q, k = rotated(q), rotated(k)
        k, v = (p[:, :, None].expand(-1, -1, 2, -1, -1).reshape(b, self.heads, n, -1) for p in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d)
        x = x + self.out(found)
        y = self.behind(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "BERT": Bert,
    "Llama": Llama,
    "Qwen3": lambda: Llama(normed=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_models(name: str) -> None:
    model = FAMILIES[name]().double().eval()
    call = compiled(model)
    with torch.no_grad():
        for n in (5, 8):
            x = r(2, n, 16)
            assert torch.allclose(call(x), model(x), atol=1e-10)
    report = outcome.report(measure=False)
    assert report.graphs == 1 and len(report.taken) >= 2
    assert all(entry.taken or entry.why for entry in report.regions)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, torch.int64])
def test_a_region_is_timed_on_tensors_that_lie_as_its_example_does(dtype: torch.dtype) -> None:
    whole = torch.zeros(4, 6, 8, dtype=dtype)
    for example in (whole, whole.transpose(0, 2), whole[:, ::2], whole[:1].expand(3, 6, 8), whole[:0]):
        drawn = backend_module._drawn(example)
        assert (drawn.shape, drawn.stride(), drawn.dtype) == (example.shape, example.stride(), dtype)


def test_a_region_that_cannot_be_timed_is_told_among_the_others() -> None:
    def fails() -> tuple[float, float]:
        raise RuntimeError("view size is not compatible\nat all")

    outcome.add([Entry(1, "mm", "", False, "the rest is faster", time=fails)])
    assert "not timed: RuntimeError: view size is not compatible\n" in f"{eq.torch.report()}\n"
    assert not outcome.report(measure=False, reset=True).regions[0].measured
    assert not eq.torch.report().regions


def test_what_dynamo_runs_as_it_is_is_told() -> None:
    """A model of which the back end sees no graph; and only of models since the last report was reset."""
    assert "no compiled function was called since" in str(eq.torch.report())
    module = torch.nn.LSTM(3, 4)
    torch.compile(module, backend="eqfuse")(torch.randn(2, 3))
    told = str(outcome.report(measure=False, reset=True))
    assert "0 graphs\nDynamo runs some code as it is: " in told and "LSTM" in told and "allow_rnn" in told
    assert "LSTM" not in str(eq.torch.report())
