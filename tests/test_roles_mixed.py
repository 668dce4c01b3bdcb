"""Plans of several kernels of which some have roles: what is chosen, what the module says, what it computes and compiles to."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

import eqfuse as eq
from bench.mutants_roles import MUTANTS
from bench.workloads import WORKLOADS
from eqfuse import certification, compiler, specialize_warps
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.differentiate.chunks import chunks_of
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.extract.candidates import with_outputs
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.parser import parse
from eqfuse.tile.check import TileError
from eqfuse.tile.gluon.aot import compile_for_hopper
from eqfuse.tile.gluon.launch import GluonProgram
from eqfuse.tile.nodes import Align, Dot, For, If, Kernel, LoadTile
from eqfuse.tile.passes.init_accumulator import init_accumulator
from eqfuse.tile.passes.transpose_products import transpose_products
from eqfuse.tile.roles.check import check
from eqfuse.tile.roles.interpreter import run
from eqfuse.tile.roles.nodes import Put, RolesKernel, RolesProgram
from eqfuse.tile.roles.passes import prepared
from eqfuse.tile.triton.aot import compile_for
from eqfuse.tile.triton.launch import load
from eqfuse.tile.walk import nested
from eqfuse.tune import kept
from eqfuse.tune.tuner import Tuner

H200 = device_named("h200")
LOSS = """
x: bf16[i,d]
W: bf16[v,d]
label: i64[i]
L[i,v] = sum[d](x[i,d] * W[v,d])
loss[i] = max[v](L[i,v]) + log(sum[v](exp(L[i,v] - max[v](L[i,v])))) - L[i,label[i]]
"""
MEANS = """
    x: bf16[i,p]
    w: bf16[n,p]
    y[i,n] = bf16(tanh(sum[p](x[i,p] * w[n,p])))
    m[i] = tanh(mean[n](y[i,n]))
    return y, m
"""
"""A product, and two kernels for means of it: shards that multiply once more, and what joins them. All compute a hyperbolic tangent."""


def _pipeline(source: str, sizes: dict[str, int], **dtypes: str) -> tuple[Derived, Compiled]:
    derived = compiler.derive(source, None, False, made_of=parse(source, made=True))
    known = {t.name: t.dtype or dtypes.get(t.name, "f32") for t in derived.program.tensors}
    return derived, compiler.pipeline(derived, sizes, known, H200)


@pytest.fixture(scope="module")
def means() -> tuple[Derived, Compiled]:
    return _pipeline(MEANS, {"i": 8192, "n": 8192, "p": 4096})


@pytest.fixture(scope="module")
def chunk() -> tuple[Derived, Compiled]:
    """A chunk of the gradient of a linear layer and its loss: logits, and two products of their gradient."""
    halves = {"x": "bf16", "W": "bf16"}
    gradient = saving_gradient(LOSS, ("x", "W"), halves=halves, saves="f32").backward
    return _pipeline(chunks_of(gradient, "v").chunk, {"i": 8192, "d": 4096, "v": 16128})


@pytest.fixture(scope="module")
def forward() -> tuple[Derived, Compiled]:
    """The loss of a linear layer: a product for each block of the vocabulary, and shards of that to merge."""
    return _pipeline(LOSS, {"i": 8192, "d": 4096, "v": 128256})


def test_each_kernel_of_a_plan_has_roles_or_says_why_not(means: tuple[Derived, Compiled]) -> None:
    derived, compiled = means
    first, second, last = compiled.tile.kernels
    plan = compiled.chosen.plan
    assert [roles is not None for roles in plan.roles] == [True, True, False]
    assert plan.code.startswith(f"Gluon: {first.name}: 1 producer, ")
    assert plan.code.endswith(f"; {last.name}: Triton: no loop multiplies matrices")
    assert compiled.roles is not None
    assert isinstance(compiled.roles.kernels[0], RolesKernel) and compiled.roles.kernels[2] == last
    assert f"kernel {last.name}, grid" in str(compiled.roles)
    account = specialize_warps.account_of(derived, compiled, compiled.extents)
    assert account[0] == plan.code and f"{second.name}:" in account and f"{last.name}:" not in account


def test_a_module_has_both_languages_and_stands_alone(means: tuple[Derived, Compiled]) -> None:
    derived, compiled = means
    first, second, last = compiled.tile.kernels
    source = compiler.emit_gluon(derived, compiled, "f")
    assert "eqfuse" not in source and source == compiler.emit_gluon(derived, compiled, "f")
    functions = source.split("\n\n\n")
    assert any(text.startswith("@triton.jit") and f"def {last.name}(" in text for text in functions)
    assert any(text.startswith("@gluon.jit") and f"def {first.name}_producer(" in text for text in functions)
    assert "def tanh(x)" in source and "def tanh_near_0(x)" in source
    module = load(source)
    assert set(module.CONFIGS) == {first.name, second.name, last.name} and set(module.TILES) == {
        first.name,
        second.name,
    }
    assert "num_warps" in module.CONFIGS[last.name] and "num_warps" not in module.CONFIGS[first.name]


def test_kernels_are_launched_in_order_each_by_its_own_way(
    means: tuple[Derived, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    derived, compiled = means
    module = load(compiler.emit_gluon(derived, compiled, "launched"))
    calls: list[str] = []
    for way in ("launch", "launch_roles"):
        monkeypatch.setattr(module, way, lambda known, name, *rest, way=way: calls.append(f"{way} {name}"))
    x, w = torch.zeros(128, 64, dtype=torch.bfloat16), torch.zeros(256, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    y, m = module.launched(x, w)
    names = [kernel.name for kernel in compiled.tile.kernels]
    assert calls == [f"launch_roles {names[0]}", f"launch_roles {names[1]}", f"launch {names[2]}"]
    assert (y.shape, m.shape) == ((128, 256), (128,))


@pytest.mark.parametrize(
    ("length", "scale", "known"), [(256, 1.0, (False, False)), (200, -0.5, (True, True))]
)
def test_a_launch_settles_what_sizes_and_signs_say(
    length: int, scale: float, known: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value of a condition is a binary: the same as a kernel that computes it would take."""
    halves = dict.fromkeys("QKV", "f16")
    sizes = {"b": 1, "h": 32, "i": 8192, "j": 8192, "d": 128, "e": 128}
    derived, compiled = _pipeline(WORKLOADS["global_prefill"].source, sizes, **halves)
    assert compiled.roles is not None
    (kernel,) = compiled.roles.specialized
    late, turns = (stmt.name for stmt in kernel.launch_constants if not stmt.name.endswith("_of"))
    source = compiler.emit_gluon(derived, compiled, "settled")
    module, given = load(source), list[dict[str, object]]()

    class Launched:
        def __getitem__(self, grid: object) -> object:
            return lambda *args, **constants: given.append(constants)

    monkeypatch.setattr(module, kernel.name, Launched())
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(module, "descriptor", lambda tensor, tile: None)
    tensors = {name: torch.zeros(1, 2, length, 64, dtype=torch.float16) for name in halves}
    module.settled(**tensors, scale=scale)
    assert (given[0][late.upper()], given[0][turns.upper()]) == known
    assert not any(
        isinstance(s, If) and s.condition.name in (late, turns) for s in nested(kernel.roles[0].body)
    )


def test_lengths_that_the_copy_engine_cannot_store_go_another_way(means: tuple[Derived, Compiled]) -> None:
    """Outputs are made by the call: whether their rows are multiples of 16 bytes follows from its sizes."""
    derived, compiled = means
    program = GluonProgram(compiler.emit_gluon(derived, compiled, "f"), "f", lambda: "")
    given = {"x": torch.zeros(8, 64, dtype=torch.bfloat16)}
    for length, suits in ((64, True), (1001, False), (1000, True)):
        given["w"] = torch.zeros(length, 64, dtype=torch.bfloat16)
        sizes = {"i": 8, "n": length, "p": 64}
        assert (program.form({**given, "sizes": sizes}) is not program.otherwise) is suits, length


@pytest.mark.slow
def test_a_plan_of_both_is_verified_and_kept(
    means: tuple[Derived, Compiled], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    derived, compiled = means
    certificate = certification.certify(derived, compiled, certification.Checks(4, 1e-3))
    assert certificate.ok and any("roles" in stage.name for stage in certificate.stages)
    tuner = Tuner(derived, compiled, None, {}, lambda made: dict, torch.device("cpu"))
    others = tuner._of_other_roles()
    assert others[-1].plan.roles == () and others[0].plan.roles[2] is None
    assert others[0].plan.roles != compiled.chosen.plan.roles
    kept.keep(tuner._key, kept.Found(others[0], 1e-3, 2e-3))
    dtypes = with_outputs(derived.program, compiled.dtypes)
    found = kept.read(tuner._key, compiled.candidates, compiled.extents, dtypes, H200)
    assert found is not None and found.candidate.plan.roles == others[0].plan.roles
    assert tuner._compiled(found.candidate).roles is not None


@pytest.mark.slow
def test_a_loop_of_products_inside_of_a_loop_over_their_columns_has_roles(
    forward: tuple[Derived, Compiled],
) -> None:
    """Its rings go on from one block of columns to the next: a copy waits for nothing but an empty slot."""
    derived, compiled = forward
    first, *others = compiled.chosen.plan.roles
    assert first is not None and others == [None] and compiled.roles is not None
    kernel = compiled.roles.specialized[0]
    producer, consumer, *_ = kernel.roles
    for role in (producer, consumer):
        outer = [s for s in nested(role.body) if isinstance(s, For) and s.axis == "v"]
        assert [[s.axis for s in loop.body if isinstance(s, For)] for loop in outer] == [["d"], ["d"]]
    certificate = certification.certify(derived, compiled, certification.Checks(4, 1e-3))
    assert certificate.ok and any("roles" in stage.name for stage in certificate.stages)


@pytest.mark.parametrize("persistent", [False, True])
def test_losses_in_roles_are_those_of_the_program(
    forward: tuple[Derived, Compiled], persistent: bool
) -> None:
    derived, compiled = forward
    (roles, other), program = compiled.chosen.plan.roles, derived.program
    assert roles is not None
    chosen = [replace(roles, persistent=persistent), other]
    rng, sizes = np.random.default_rng(0), {"i": 13, "d": 9, "v": 11}
    arrays = {
        "x": rng.normal(size=(13, 9)),
        "W": rng.normal(size=(11, 9)),
        "label": rng.integers(0, 11, size=13),
    }
    expected = eq.reference(program.source)(**arrays)
    for form in certification.verified_roles(compiled.chosen.nest, program, compiled.dtypes, H200, chosen):
        made = run(form, program, arrays, {}, sizes, FloatDomain(), shards={"v_shard": 2})
        np.testing.assert_allclose(made["loss"], expected, rtol=4e-3)  # rounded to bf16


@pytest.mark.slow
def test_mistakes_in_loops_of_loops_are_caught() -> None:
    """Each kind in the first places where it can be made: by the check of roles, by their interpreter, or by the losses. Two rings
    are freed together: that the producer waits for one of them is enough. The loop for the rest of a shard has one trip at most,
    for which turns need not go on."""
    derived, compiled = _pipeline(f"loss: f32[i]\n{LOSS}", {"i": 8192, "d": 4096, "v": 128256})
    program = derived.program
    _, form = certification.verified_roles(
        compiled.chosen.nest, program, compiled.dtypes, H200, compiled.chosen.plan.roles
    )
    rng, sizes = np.random.default_rng(0), {"i": 7, "d": 5, "v": 11}
    arrays = {
        "x": rng.normal(size=(7, 5)),
        "W": rng.normal(size=(11, 5)),
        "label": rng.integers(0, 11, size=7),
    }

    def is_right(form: RolesProgram) -> bool:
        try:
            check(form)
            found = run(form, program, arrays, {}, sizes, FloatDomain(), shards={"v_shard": 2})["loss"]
        except TileError:
            return False
        return bool(np.allclose(found, right, rtol=1e-6))

    right = run(form, program, arrays, {}, sizes, FloatDomain(), shards={"v_shard": 2})["loss"]
    assert is_right(form)
    places = {mutant.name: list(islice(mutant.mutate(form), 4)) for mutant in MUTANTS}
    missed = {name: sum(map(is_right, made)) for name, made in places.items()}
    assert sum(map(len, places.values())) > 40
    harmless = {"a slot is overwritten", "a consumer's turn stays", "the producer's turn stays"}
    assert {name for name, count in missed.items() if count} <= harmless, missed
    assert all(missed[name] < len(places[name]) for name in harmless)


@pytest.mark.parametrize("persistent", [False, True])
def test_all_kernels_of_a_gradient_in_chunks_have_roles_that_compute_it(
    chunk: tuple[Derived, Compiled], persistent: bool
) -> None:
    derived, compiled = chunk
    assert len(compiled.chosen.plan.roles) == 3 and all(compiled.chosen.plan.roles)
    roles = [replace(r, persistent=persistent) for r in compiled.chosen.plan.roles if r is not None]
    program = derived.program
    forms = certification.verified_roles(compiled.chosen.nest, program, compiled.dtypes, H200, roles)
    rng, sizes = np.random.default_rng(0), {"i": 13, "d": 9, "v": 11}
    arrays = {t.name: rng.normal(size=[sizes[a or ""] for a in t.axes or ()]) for t in program.tensors}
    arrays["label"] = rng.integers(0, 30, size=13)
    arrays["lse"] = arrays["lse"] + 12
    expected = eq.reference(program.source)(**arrays, v_start=7)
    for form in forms:
        made = run(form, program, arrays, {"v_start": 7}, sizes, FloatDomain(), shards={})
        for one, name in zip(expected, ("dx_sum", "dW"), strict=True):
            np.testing.assert_allclose(made[name], one, rtol=1e-2, atol=1e-2)


def test_what_is_stored_transposed_is_computed_so(chunk: tuple[Derived, Compiled]) -> None:
    *_, last = chunk[1].tile.kernels
    before, after = _product(last), _product(transpose_products(last))
    assert (before.left.dims[0], before.right.dims[1]) == ("d", "v")
    assert (after.left.dims[0], after.right.dims[1]) == ("v", "d")
    assert transpose_products(transpose_products(last)) == transpose_products(last)
    assert transpose_products(chunk[1].tile.kernels[0]) is chunk[1].tile.kernels[0]
    assert chunk[1].roles is not None
    kernel = chunk[1].roles.kernels[2]
    assert isinstance(kernel, RolesKernel) and kernel.rows == "v"
    assert any(isinstance(stmt, Put) for stmt in nested(kernel.roles[1].body))


def test_a_sum_starts_from_what_is_added_to_it(chunk: tuple[Derived, Compiled]) -> None:
    kernel = chunk[1].tile.kernels[1]
    after = init_accumulator(kernel)
    assert after is not kernel and init_accumulator(after) is after and prepared(after) == after
    first = next(stmt for stmt in after.body if isinstance(stmt, For))
    (loaded,) = [
        stmt.value
        for stmt in after.body[: after.body.index(first)]
        if hasattr(stmt, "op") and isinstance(stmt.op, LoadTile) and stmt.op.tensor == "dx_sum_before"
    ]
    assert [item.init for item in first.carried] == [loaded]
    (behind,) = [
        s for s in after.body if hasattr(s, "op") and isinstance(s.op, Align) and s.value.dtype == "f32"
    ]
    assert after.body.index(behind) > after.body.index(first)


def test_a_sum_that_something_else_reads_starts_where_it_did() -> None:
    source = """
        x: bf16[i,p]
        w: bf16[n,p]
        s[i,n] = sum[p](x[i,p] * w[n,p])
        y[i,n] = b[i,n] + s[i,n]
        return s, y
    """
    _, compiled = _pipeline(source, {"i": 8192, "n": 8192, "p": 4096})
    for kernel in compiled.tile.kernels:
        assert init_accumulator(kernel) is kernel


def _product(kernel: Kernel) -> Dot:
    return next(s.op for s in nested(kernel.body) if hasattr(s, "op") and isinstance(s.op, Dot))


@pytest.mark.slow
def test_three_consumers_do_not_multiply_256_columns(chunk: tuple[Derived, Compiled]) -> None:
    """The instruction takes more registers than such a block's threads begin with."""
    derived, compiled = chunk
    for _, made in islice(specialize_warps.other_roles(derived, compiled, compiled.extents), 30):
        for roles in filter(None, made.chosen.plan.roles):
            assert roles.consumers == 2 or max(b.size or 0 for b in roles.blocks if b.kind == "grid") <= 192


@pytest.mark.slow
@pytest.mark.parametrize("name", ["means", "chunk", "forward"])
def test_both_languages_compile_for_hopper(name: str, request: pytest.FixtureRequest) -> None:
    derived, compiled = request.getfixturevalue(name)
    source = compiler.emit_gluon(derived, compiled, "f")
    divided, others = compile_for_hopper(source), compile_for(source, "sm_90")
    assert [r.kernel.name for r in divided] == [
        k.name for k, roles in zip(compiled.tile.kernels, compiled.chosen.plan.roles, strict=True) if roles
    ]
    assert len(divided) + len(others) == len(compiled.tile.kernels)
    for report in divided:
        assert report.machine["HGMMA"] and report.machine["UTMALDG"]
        assert (
            report.kernel.spilled_bytes <= 160
        )  # masks of a tile that is loaded before the loop and stored behind it
    for other in others:
        assert other.spilled_bytes == 0
