"""Gradients of a loss without axes that its forward makes: their texts and certificates, when they are made, and what they give."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import Gpu, gpu

import eqfuse as eq
from eqfuse.differentiate import autograd
from eqfuse.differentiate.certify import certify_gradient
from eqfuse.differentiate.divide import Chunker
from eqfuse.differentiate.gradient import saving_gradient, scaled_gradient
from eqfuse.differentiate.saved import Again, saves_time
from eqfuse.extract.call_estimate import CallEstimate
from eqfuse.loops.in_place import may_replace
from eqfuse.terms.parser import parse
from eqfuse.verify.certificate import REQUESTED

__all__ = ["gpu"]

Tensors = Mapping[str, torch.Tensor]

LINEAR = "L[i,v] = sum[d](x[i,d] * W[v,d])\n"
LOSSES = {
    "gathered": LINEAR + "loss = mean[i](logsumexp[v](L[i,v]) - sum[d](x[i,d] * W[label[i],d]))",
    "labels left out": LINEAR
    + "valid[i] = label[i] != 3\n"
    + "loss = sum[i](where(valid[i], logsumexp[v](L[i,v]) - L[i,label[i]], 0)) / max(sum[i](where(valid[i], 1, 0)), 1)",
    "squared": LINEAR + "loss = mean[i](mean[v]((L[i,v] - t[i,v])**2))",
    "two sums": LINEAR + "loss = sqrt(sum[i,v](sq(L[i,v] - t[i,v]))) + mean[i](max[v](L[i,v]))",
}
OF = ("x", "W")


def inputs(
    dtype: torch.dtype = torch.float64, rows: int = 6, width: int = 5, words: int = 9
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x, W, t = (torch.randn(shape) for shape in ((rows, width), (words, width), (rows, words)))
    made = {
        "x": x.to(dtype).requires_grad_(),
        "W": (W * width**-0.5).to(dtype).requires_grad_(),
        "t": t.to(dtype),
    }
    return {**made, "label": torch.randint(0, words, (rows,))}


def expected(name: str, given: Tensors) -> torch.Tensor:
    x, W = (given[key].double() for key in OF)
    logits, t, label = x @ W.mT, given["t"].double(), given["label"]
    match name:
        case "gathered":
            return F.cross_entropy(logits, label)
        case "labels left out":
            return F.cross_entropy(logits, label, ignore_index=3)
        case "squared":
            return F.mse_loss(logits, t)
        case _:
            return (logits - t).square().sum().sqrt() + logits.amax(1).mean()


def called(kernel: eq.Kernel, source: str, given: Tensors) -> torch.Tensor:
    return kernel(
        **{name: value for name, value in given.items() if name in source.replace("label", "label ")}
    )


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards make gradients of small products too."""
    monkeypatch.setattr(autograd, "saves_time", lambda again, extents, positions: bool(again))


# Texts -------------------------------------------------------------------------------------------


def test_the_derivative_of_the_last_sum_is_apart() -> None:
    made = scaled_gradient(LOSSES["labels left out"], OF)
    assert made is not None and made.residuals == ("dx_unit", "dW_unit", "dsum_valid_unit")
    assert made.forward.endswith("return loss, dx_unit, dW_unit, dsum_valid_unit")
    assert "N(i)" not in made.forward and "dW_unit[v, d] = sum[i](dL[i, v] * x[i, d])" in made.forward
    assert "dx[i, d] = dloss[0] * dsum_valid_unit[0] * dx_unit[i, d]" in made.backward
    partial = scaled_gradient(LOSSES["labels left out"], OF, ("W",))
    assert partial is not None and partial.forward == made.forward
    assert partial.residuals == ("dW_unit", "dsum_valid_unit") and partial.backward.endswith("return dW")


def test_bf16_is_saved_as_it_is_and_f16_in_f32() -> None:
    for half, stored in (("bf16", "bf16"), ("f16", "f32")):
        made = scaled_gradient(LOSSES["squared"], OF, halves=dict.fromkeys(OF, half), saves="f32")
        assert made is not None and f"dW_unit: {stored}[v, d]" in made.forward
        assert "_unit: f32\n" in made.forward and f"dW: {half}[v, d]" in made.backward


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_certified(name: str) -> None:
    made = scaled_gradient(LOSSES[name], OF)
    assert made is not None and certify_gradient(LOSSES[name], made.whole).ok
    wrong = made.whole.replace("dx[i, d] = dloss *", "dx[i, d] = 2 * dloss *")
    assert wrong != made.whole and not certify_gradient(LOSSES[name], wrong).ok


@pytest.mark.parametrize(
    "source",
    [
        LINEAR + "loss[i] = logsumexp[v](L[i,v])",
        LINEAR + "loss = sum[i,v](L[i,v])\nlargest = max[i,v](L[i,v])\nreturn loss, largest",
    ],
    ids=["axes", "two outputs"],
)
def test_other_outputs_have_gradients_that_backwards_make(source: str) -> None:
    assert scaled_gradient(source, OF) is None


def test_an_element_of_the_product_is_read_from_it() -> None:
    made = scaled_gradient(LOSSES["gathered"], OF)
    assert made is not None and "- L[i, label[i]])" in made.forward and "W[label[i], d]" not in made.forward
    assert "dL[i, v] = where(label[i] == v, -1, 0) + exp(" in made.forward
    program = parse(LOSSES["gathered"])
    assert autograd.same_outputs(program, parse(made.forward), scalars={}, bound=REQUESTED).ok
    wrong = parse(made.forward.replace("L[i, label[i]]", "L[label[i], i]"))
    assert not autograd.same_outputs(program, wrong, scalars={}, bound=REQUESTED).ok


# When --------------------------------------------------------------------------------------------


def test_what_is_multiplied_again_is_weighed_against_what_is_stored() -> None:
    (again,) = saving_gradient(LOSSES["gathered"], OF).again
    assert again == Again(("i", "v"), ("d",))
    extents = {"i": 512, "v": 8192, "d": 256}
    assert saves_time([again], extents, 512 * 256 + 8192 * 256)
    assert not saves_time([again], {**extents, "i": 4}, 4 * 256 + 8192 * 256)
    assert not saves_time([again], {**extents, "d": 64}, 512 * 64 + 8192 * 64)
    assert saving_gradient("loss = sum[i](exp(x[i]))", ("x",)).again == ()


def test_a_call_without_gradients_makes_none(always: None) -> None:
    source = LOSSES["squared"]
    kernel, given = eq.compile(source, native="off"), inputs()
    with torch.no_grad():
        assert not called(kernel, source, given).requires_grad
    assert kernel._gradients is None and "dx_unit" not in str(kernel.loops)


def test_large_products_are_not_stored_where_no_chunks_are(
    monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    monkeypatch.setattr(autograd, "MUCH", 10)
    for source, made in ((LOSSES["squared"], True), (LOSSES["two sums"], False)):
        kernel = eq.compile(source, native="off")
        called(kernel, source, inputs()).backward()
        assert kernel.backward.scales == made


# What they give ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.slow(but=["[gathered-torch.bfloat16]", "[squared-torch.float64]"])
def test_gradients_of_losses(name: str, dtype: torch.dtype, always: None) -> None:
    source, given = LOSSES[name], inputs(dtype)
    kernel, leaves = eq.compile(source, native="off"), [given[key] for key in OF]
    loss = called(kernel, source, given)
    exact = torch.autograd.grad(expected(name, given), leaves)
    atol = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for above in (1.0, -2.5):
        cotangent = torch.tensor(above, dtype=dtype)
        found = torch.autograd.grad(loss, leaves, cotangent, retain_graph=True)
        assert [part.dtype for part in found] == [dtype, dtype]
        for one, other in zip(found, exact, strict=True):
            assert torch.allclose(one.double(), above * other.double(), atol=atol * abs(above))
    assert kernel.backward.scales and "made with the forward" in repr(kernel.backward)
    assert "# the forward makes these gradients" in kernel.backward.source
    assert "The forward makes dx, dW for a cotangent of 1; the backward multiplies." in kernel.explain()
    assert kernel.backward.certificate.ok and kernel.backward.certificate.forward is not None
    (of_weights,) = torch.autograd.grad(loss, leaves[1:])
    assert torch.allclose(of_weights.double(), exact[1].double(), atol=atol)


def test_gradients_have_gradients(always: None) -> None:
    source, given = LOSSES["labels left out"], inputs()
    kernel, leaves = eq.compile(source, native="wait"), [given[key] for key in OF]
    made = torch.autograd.grad(called(kernel, source, given), leaves, create_graph=True)
    assert not kernel.backward.scales
    second = torch.autograd.grad(made[1].square().sum(), leaves)
    exact = torch.autograd.grad(expected("labels left out", given), leaves, create_graph=True)
    for one, other in zip(second, torch.autograd.grad(exact[1].square().sum(), leaves), strict=True):
        assert torch.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int, always: None) -> None:
    source, given = LOSSES["labels left out"], inputs(rows=rows)
    kernel, leaves = eq.compile(source, native="off"), [given[key] for key in OF]
    found = torch.autograd.grad(called(kernel, source, given), leaves)
    total = F.cross_entropy(leaves[0] @ leaves[1].mT, given["label"], ignore_index=3, reduction="sum")
    for one, other in zip(found, torch.autograd.grad(total, leaves), strict=True):
        assert torch.allclose(one, other if rows else torch.zeros_like(other), atol=1e-10)


def test_compiled_calls_make_them_too(always: None) -> None:
    source, given = LOSSES["squared"], inputs(torch.float32)
    kernel, leaves = eq.compile(source, native="off"), [given[key] for key in OF]
    step = torch.compile(lambda x, W, t: 3 * kernel(x=x, W=W, t=t), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(step(*leaves, given["t"]), leaves)
    assert kernel.backward.scales
    for one, other in zip(found, torch.autograd.grad(3 * expected("squared", given), leaves), strict=True):
        assert torch.allclose(one, other.float(), atol=1e-5)


# In chunks, in place -----------------------------------------------------------------------------


def test_only_what_a_store_alone_reads_may_lie_where_it_writes() -> None:
    def nest(source: str) -> object:
        return eq.compile(source, target="h200", verify=False).loops

    assert may_replace(nest("y[i,j] = a[i,j] + sum[k](b[i,k] * c[k,j])"), "y", "a")
    assert not may_replace(
        nest("y[i,j] = a[i,j] + sum[k](b[i,k] * a[k,j])\nk: axis[i]\nj: axis[i]"), "y", "a"
    )
    assert not may_replace(nest("y[i,j] = a[j,i] + 1\nj: axis[i]"), "y", "a")
    assert not may_replace(nest("y[i] = a[i] + 1\nz[i] = a[i] * 2\nreturn y, z"), "y", "a")


def test_chunks_of_rows_add_up_in_place(gpu: Gpu) -> None:
    made = scaled_gradient(LOSSES["labels left out"], OF)
    assert made is not None
    given = {name: value.detach() for name, value in inputs(torch.float32, 21, 16, 40).items() if name != "t"}
    sizes, kinds = {"i": 21, "v": 40, "d": 16}, dict.fromkeys(("loss", *made.residuals), "f32")

    def compiled(text: str) -> eq.Kernel:
        return eq.compile(text, target="h200", verify=False)

    program, much = parse(made.forward), CallEstimate(1e12, ("i",), lambda: 1e9)
    found = Chunker(program, {}, REQUESTED, compiled).of(much, given, sizes, kinds)
    assert found is not None and found.length == 11 and found.divided.stored < 40 * 16 * 8
    assert found.chunked.chunks.sums == {"dW_unit_sum": "dW_unit_sum_before"}
    for one, other in zip(found(given, sizes), eq.reference(made.forward)(**given), strict=True):
        assert torch.allclose(one, torch.as_tensor(other, dtype=torch.float32), atol=1e-4)
    kept, kernel = torch.zeros(40, 16), found.chunked.kernel
    part = {**found.chunked.part(given, 0, 4), "dW_unit_sum_before": kept}
    outputs = kernel.into({"dW_unit_sum": kept}, part, found.chunked.sizes(sizes, 4))
    assert outputs["dW_unit_sum"] is kept and kept.abs().sum() > 0


def test_scaled_gradients_take_the_memory_of_those_that_they_are_multiples_of(gpu: Gpu) -> None:
    made = scaled_gradient(LOSSES["squared"], OF)
    assert made is not None and made.units == {"dx": "dx_unit", "dW": "dW_unit"}
    kernel = eq.compile(made.backward, target="h200", verify=False)
    units = {"dx_unit": torch.randn(24, 16), "dW_unit": torch.randn(40, 16)}
    values = {name: torch.tensor([2.0]) for name in ("dloss", made.residuals[-1])}
    expected = {name: 4 * unit for name, unit in units.items()}
    found = kernel.into({name: units[unit] for name, unit in made.units.items()}, {**values, **units}, {})
    for name, unit in made.units.items():
        assert found[name].data_ptr() == units[unit].data_ptr()
        assert torch.equal(found[name], expected[unit])
