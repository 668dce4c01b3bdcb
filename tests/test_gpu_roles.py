"""Kernels in roles as users run them, on a Hopper GPU: `pytest -m gpu` where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

import eqfuse as eq
from bench.cells import TOLERANCE
from bench.gluon_cells import PREFIX, AnyRolesCell, Cell, ProductCell
from bench.gluon_forms import Form, forms, kernel_of
from bench.training_cells import attention
from bench.workloads import WORKLOADS
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.specialize_warps import other_roles
from eqfuse.tile.gluon.launch import GluonProgram

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU"),
]

CELLS: tuple[AnyRolesCell, ...] = (
    *(Cell("causal_prefill", length, dim=dim) for dim in (64, 72, 96, 128, 256) for length in (1024, 1000)),
    Cell("causal_prefill", 1024, dim=128, dtype="f16"),
    *(
        Cell(f"{mask}_prefill", 1024, dim=128)
        for mask in ("global", "alibi", "softcap", "window", PREFIX.removesuffix("_prefill"))
    ),
    *(Cell("gqa_prefill", 777, dim=128, group=group) for group in (4, 7, 8)),
    *(ProductCell(512, 384, 1024, dtype) for dtype in ("bf16", "f8e4m3")),
    ProductCell(500, 368, 992, "bf16"),
)


def _all_forms(
    cell: AnyRolesCell, *, finite: bool = True, count: int = 3
) -> Iterator[tuple[eq.Kernel, Form, dict[str, torch.Tensor]]]:
    """The forms of a cell's kernel that have roles, whether calls run them or not."""
    kernel = kernel_of(cell, finite=finite)
    inputs = cell.draw(torch.Generator("cuda").manual_seed(0))
    kernel(**inputs, **cell.case.scalars)
    for form in forms(kernel, kernel.compiled, cell.sizes, count=count):
        if form.kind == "roles":
            yield kernel, form, inputs


def _run(kernel: eq.Kernel, form: Form, arguments: dict[str, object]) -> torch.Tensor:
    program = GluonProgram(form.source(kernel), kernel.name, lambda: "")
    out = program(**arguments)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_every_form_agrees_with_float64(cell: AnyRolesCell) -> None:
    count = 0
    for kernel, form, inputs in _all_forms(cell):
        exact = cell.exact(inputs, 0, cell.rows)
        found = _run(kernel, form, {**inputs, **cell.case.scalars})
        error = float((found.double() - exact).norm() / exact.norm())
        assert error <= TOLERANCE[cell.dtype], form.code
        count += 1
    assert count


def test_a_hyperbolic_tangent_of_small_large_and_special_scores() -> None:
    """Some threads take the branch, others not; NaN stays in its row."""
    cell = Cell("softcap_prefill", 1024, dim=128, dtype="f16")
    for kernel, form, inputs in _all_forms(cell):
        for size in (1e-3, 1.0, 8.0, 60.0):
            given = {**inputs, "Q": inputs["Q"] * size}
            exact = cell.exact(given, 0, cell.rows)
            found = _run(kernel, form, {**given, **cell.case.scalars})
            assert float((found.double() - exact).norm() / exact.norm()) <= TOLERANCE["f16"], (
                form.code,
                size,
            )
        broken = {**inputs, "Q": inputs["Q"].clone()}
        broken["Q"][0, 0, 700] = torch.nan
        found = _run(kernel, form, {**broken, **cell.case.scalars})
        assert found[0, 0, 700].isnan().all() and found.isnan().any(-1).sum() == 1, form.code


@pytest.mark.parametrize(
    "cell", [Cell("causal_prefill", n, dim=d) for n, d in ((1000, 128), (1024, 64))], ids=str
)
def test_what_is_not_finite_gets_through_where_the_mask_holds_alone(cell: Cell) -> None:
    """Nothing is promised: rows that do not see a value that is no number are as if it were 0, be they of its block or not."""
    tried = set()
    for kernel, form, inputs in _all_forms(cell, finite=False):
        (roles,) = form.compiled.chosen.plan.roles
        assert roles is not None
        tried.add(roles.persistent)
        for wrong, places in ((torch.nan, (0, 500)), (torch.inf, (130, 131, 999)), (1.0, ())):
            values = inputs["V"].clone()
            for place in places:
                values[:, :, place, 1:3] = 0
            exact = cell.exact({**inputs, "V": values}, 0, cell.rows)
            for place in places:
                values[:, :, place, 1:3] = wrong
            found = _run(kernel, form, {**inputs, "V": values, **cell.case.scalars})
            first = min(places, default=cell.rows)
            seen = torch.zeros_like(found, dtype=torch.bool)
            seen[:, :, first:, 1:3] = True
            assert bool((found.isfinite() == ~seen).all()), form.code
            error = (found.double() - exact)[~seen].norm() / exact[~seen].norm()
            assert float(error) <= TOLERANCE[cell.dtype], form.code
    assert tried


def test_calls_and_bound_launches_of_roles() -> None:
    """At new numbers, and captured in a graph."""
    cell = Cell("causal_prefill", 2048, dim=128)
    kernel, inputs = kernel_of(cell), cell.draw(torch.Generator("cuda").manual_seed(0))
    arguments = {**inputs, **cell.case.scalars}
    launch = kernel.bind(**arguments)
    assert kernel.plan.code.startswith("Gluon: "), kernel.plan.code
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        same = launch()
    for _ in range(2):
        inputs["K"].normal_()
        exact = cell.exact(inputs, 1000, 1100)
        graph.replay()
        for found in (same.clone(), launch(), kernel(**arguments)):
            error = (found[:, :, 1000:1100].double() - exact).norm() / exact.norm()
            assert float(error) <= TOLERANCE["bf16"]
    wide = torch.zeros(*inputs["K"].shape[:-1], 129, device="cuda", dtype=torch.bfloat16)
    wide[..., :128] = inputs["K"]  # rows of 258 bytes: the copy engine cannot address them
    torch.testing.assert_close(kernel(**{**arguments, "K": wide[..., :128]}), launch(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize(
    "shape", [(4, 32, 32, 1024, 64), (1, 32, 32, 4096, 64), (1, 16, 4, 2048, 128)], ids=str
)
def test_gradients_of_attention_agree_with_torch(shape: tuple[int, ...], causal: bool) -> None:
    """Every row of them: what is wrong in one row of a thread block's last item is small in the norm of all."""
    cell = attention(*shape, causal=causal)
    kernel = eq.compile(cell.text(torch.bfloat16), scalars=cell.constants, verify=False, native="wait")
    torch.manual_seed(0)
    inputs = cell.draw("cuda", torch.bfloat16)
    wanted = tuple(inputs.values())
    out = cell.plain(inputs)
    cotangent = torch.randn_like(out)
    exact = torch.autograd.grad(out, wanted, cotangent)
    for found, part in zip(
        torch.autograd.grad(kernel(**inputs, **cell.scalars), wanted, cotangent), exact, strict=True
    ):
        error = (found.double() - part.double()).norm(dim=-1)
        assert bool((error <= 0.1 * part.double().norm(dim=-1) + 2e-2).all())


def test_a_first_call_compiles_each_kernel_once_beside_its_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward, of which the backward is made ready while the forward is compiled."""
    from triton import knobs

    made: list[str] = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda metadata, **_: made.append(str(metadata["hash"]))
    )
    torch.manual_seed(0)
    shapes = {"q": (1, 8, 1024, 64), "k": (1, 8, 1024, 64), "v": (1, 8, 1024, 64)}
    given = {
        name: torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name, shape in shapes.items()
    }
    kernel = eq.compile(eq.ops.attention.text(given=set(given), causal=True))
    out = kernel(**given)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, list(given.values()), cotangent)
    assert len(made) == len(set(made))
    wide = {name: tensor.detach().float().requires_grad_() for name, tensor in given.items()}
    exact = torch.nn.functional.scaled_dot_product_attention(*wide.values(), is_causal=True)
    expected = torch.autograd.grad(exact, list(wide.values()), cotangent.float())
    for one, other in zip((out, *found), (exact, *expected), strict=True):
        assert float((one.float() - other).norm() / other.norm()) <= TOLERANCE["bf16"]


LOSS = """
    x: bf16[i,d]
    W: bf16[v,d]
    label: i64[i]
    loss: f32[i]
    L[i,v] = sum[d](x[i,d] * W[v,d])
    loss[i] = max[v](L[i,v]) + log(sum[v](exp(L[i,v] - max[v](L[i,v])))) - L[i,label[i]]
"""


@pytest.mark.parametrize(("rows", "words"), [(2048, 16384), (2000, 10000), (1999, 10001)])
def test_losses_of_a_linear_layer_agree_with_float64(rows: int, words: int) -> None:
    """Products inside of loops over their columns, merged by a kernel of Triton; and what no copy engine addresses."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, 512, device="cuda", generator=generator).to(torch.bfloat16)
    weights = (torch.randn(words, 512, device="cuda", generator=generator) / 16).to(torch.bfloat16)
    label = torch.randint(0, words, (rows,), device="cuda", generator=generator)
    kernel = eq.compile(LOSS)
    found = kernel(x=x, W=weights, label=label)
    logits = x.double() @ weights.double().T
    exact = torch.logsumexp(logits, 1) - logits[torch.arange(rows, device="cuda"), label]
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("persistent", (False, True))
def test_the_concurrency_sanitizer_finds_no_race(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton import knobs

    monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "consan")
    triton.set_allocator(lambda size, *_: torch.empty(size, device="cuda", dtype=torch.int8))  # for its notes
    cell = Cell("causal_prefill", 512, dim=64)
    tried = 0
    for kernel, form, inputs in _all_forms(cell, count=12):
        (roles,) = form.compiled.chosen.plan.roles or (None,)
        if roles is not None and roles.persistent is persistent and roles.consumers == 2:
            few = {name: tensor[:, :2].contiguous() for name, tensor in inputs.items()}
            _run(kernel, form, {**few, **cell.case.scalars})
            torch.cuda.synchronize()
            tried += 1
            break
    assert tried == 1


LATENT_SIZES = (
    {"b": 2, "h": 128, "j": 2048, "d": 512, "r": 64},
    {"b": 3, "h": 72, "j": 1001, "d": 504, "r": 56},
)


@pytest.mark.parametrize("sizes", LATENT_SIZES, ids=["even", "odd"])
def test_latent_attention_by_columns_agrees_with_float64(sizes: dict[str, int]) -> None:
    """Consumers that share columns of sums, with a leader and without."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = {"Q": "bhd", "Qr": "bhr", "C": "bjd", "R": "bjr"}
    given = {
        name: torch.randn([sizes[a] for a in axes], device="cuda", generator=draw).half()
        for name, axes in shapes.items()
    }
    scale = (sizes["d"] + sizes["r"]) ** -0.5
    text = "".join(f"{name}: f16[{', '.join(axes)}]\n" for name, axes in shapes.items())
    kernel = eq.compile(text + WORKLOADS["mla"].source.strip(), assume_finite=True, verify=False)
    q, qr, c, r = (given[name].double() for name in shapes)
    exact = torch.softmax((q @ c.mT + qr @ r.mT) * scale, -1) @ c
    derived = kernel.derived
    extents = {**sizes, "e": sizes["d"]}
    compiled = compiler.pipeline(derived, extents, dict.fromkeys(shapes, "f16"), device_named("h200"))
    seen = set[bool]()
    for _, made in other_roles(derived, compiled, compiled.extents):
        roles = made.chosen.plan.roles[0]
        if roles is None or not roles.columns or roles.led in seen:
            continue
        seen.add(roles.led)
        triton = compiler.emit_triton(derived, replace(made, roles=None), kernel.name)
        program = GluonProgram(
            compiler.emit_gluon(derived, made, kernel.name), kernel.name, partial(str, triton)
        )
        found = program(**given, scale=scale, sizes={"e": sizes["d"]})
        assert isinstance(found, torch.Tensor)
        error = float((found.double() - exact).norm() / exact.norm())
        assert error <= TOLERANCE["f16"], made.chosen.plan.code
    assert seen == {False, True}
