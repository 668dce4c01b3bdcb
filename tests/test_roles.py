"""Kernels as roles: what the passes make, what the interpreter refuses, what the printer's Gluon compiles to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eqfuse as eq
from bench.ahead import compile_ahead
from bench.workloads import WORKLOADS
from eqfuse import certification, compiler, specialize_warps
from eqfuse.arguments import Given
from eqfuse.calls.specialization import Specialization
from eqfuse.compiled import Asked, Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.errors import EqfuseError
from eqfuse.extract.candidates import with_outputs
from eqfuse.extract.unsuited import Unsuited
from eqfuse.extract.warp_schedules import SLOTS, ranked, sized
from eqfuse.loops.plan import KernelConfig, Roles
from eqfuse.lowered import in_roles
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.check import TileError
from eqfuse.tile.gluon.aot import RolesReport, compile_for_hopper
from eqfuse.tile.gluon.launch import GluonProgram
from eqfuse.tile.gluon.module import emit
from eqfuse.tile.nodes import Elementwise, For, If, Let, LoadTile, ReduceTile
from eqfuse.tile.passes.early_masks import masked_first
from eqfuse.tile.passes.pipeline import passes_of
from eqfuse.tile.passes.row_terms import rows_last
from eqfuse.tile.roles.check import check
from eqfuse.tile.roles.facts import rows_of
from eqfuse.tile.roles.interpreter import run
from eqfuse.tile.roles.nodes import AnyNonFinite, LoadShared, MmaAsync, ReleaseSlot, RolesProgram, dealt
from eqfuse.tile.roles.resources import fits, held_by, needs
from eqfuse.tile.triton.launch import TritonProgram
from eqfuse.tile.walk import nested
from eqfuse.tune import kept
from eqfuse.tune.tuner import Tuner
from eqfuse.verify.check import check_stages
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.stages import roles_stages

H200 = device_named("h200")
SIZES = {"b": 1, "h": 32, "k": 8, "i": 8192, "j": 8192, "d": 128, "e": 128}
HALF = {"Q": "f16", "K": "f16", "V": "f16"}
NORMED = """
    x: f16[i, p]
    w: f16[n, p]
    y[i, n] = sum[p](x[i,p] * w[n,p]) * rsqrt(mean[p](sq(x[i,p])) + eps)
"""


def _derived(source: str, *, finite: bool = True) -> Derived:
    return compiler.derive(source, None, False, assume_finite=finite)


def _compiled(derived: Derived, dtypes: Mapping[str, str] = HALF, **sizes: int) -> Compiled:
    return compiler.pipeline(derived, {**SIZES, **sizes}, dtypes, H200)


def _roles(
    derived: Derived,
    compiled: Compiled,
    consumers: int = 2,
    slots: int = 2,
    delayed: Sequence[int] = (1,),
    step: int = 128,
    *,
    persistent: bool = False,
) -> Roles:
    (config,) = compiled.chosen.plan.configs
    blocks = sized(config.blocks, rows_of(compiled.tile.kernels[0]), 64 * consumers, step)
    return Roles(blocks, consumers, slots, tuple(delayed), persistent)


def _divided(derived: Derived, compiled: Compiled, roles: Roles) -> RolesProgram:
    return in_roles(compiled.chosen.nest, derived.program, compiled.dtypes, H200, [roles])


@pytest.fixture(scope="module")
def causal() -> tuple[Derived, Compiled]:
    derived = _derived(WORKLOADS["causal_prefill"].source)
    return derived, _compiled(derived)


def test_a_product_is_issued_before_the_arithmetic_of_the_block_before(
    causal: tuple[Derived, Compiled],
) -> None:
    """The order that is best for attention on Hopper follows from one product being a block behind."""
    program = _divided(*causal, _roles(*causal))
    _, consumer, other = program.kernels[0].roles
    assert consumer.body == other.body
    loops = [stmt for stmt in nested(consumer.body) if isinstance(stmt, For)]
    for loop in loops:
        first, second = [n for n, stmt in enumerate(loop.body) if isinstance(stmt, MmaAsync)]
        awaited = [stmt.pending.name for stmt in loop.body if type(stmt).__name__ == "MmaWait"]
        issues = [stmt.pending.name for stmt in loop.body if isinstance(stmt, MmaAsync)]
        assert first < second < 8 and awaited == issues
        assert [loop.body[n].right.ring for n in (first, second)] == ["K_tiles", "V_tiles"]  # type: ignore[union-attr]


def test_ranges_of_one_axis_share_a_pipeline_and_masks_are_behind_a_cut(
    causal: tuple[Derived, Compiled],
) -> None:
    """The second loop goes on with what the first one carries, products that are under way included."""
    program = _divided(*causal, _roles(*causal))
    (walk,) = [stmt for stmt in nested(program.kernels[0].roles[0].body) if isinstance(stmt, For)]
    body = program.kernels[0].roles[1].body
    early, late = [stmt for stmt in nested(body) if isinstance(stmt, For)]
    assert [item.init for item in late.carried] == [item.value for item in early.carried]
    assert walk.axis == early.axis == late.axis and walk.stop == late.stop
    for loop, masked in ((early, False), (late, True)):
        ops = [s.op for s in loop.body if isinstance(s, Let) and len(s.value.dims) == 2]
        assert any(isinstance(op, Elementwise) and op.fn == "where" for op in ops) is masked
        assert len([stmt for stmt in loop.body if isinstance(stmt, If)]) == 1


def test_every_pass_that_changes_a_kernel_in_roles_is_named(causal: tuple[Derived, Compiled]) -> None:
    program = _divided(*causal, _roles(*causal))
    rows = ("masks first", "scales behind maxima", "fused ranges", "roles", "cut loops", "launch constants")
    assert program.passes[: len(causal[1].tile.passes)] == causal[1].tile.passes
    assert passes_of((causal[1].tile, program)) == program.passes
    assert [name for name in program.passes if name in rows] == [*rows]
    plain = _divided(*causal, _roles(*causal, delayed=()))
    assert not {"fused ranges", "cut loops"} & {*plain.passes}


def test_prices_build_no_kernel(causal: tuple[Derived, Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    derived, compiled = causal
    monkeypatch.setattr(specialize_warps, "in_roles", None)
    price = specialize_warps.pricing(derived, compiled, {**compiled.extents, "i": 4096, "j": 4096})
    found = ranked(price.facts, price.outlook)
    assert found.faster() and [seconds for seconds, _ in found.priced] == sorted(s for s, _ in found.priced)


def test_roles_that_do_not_hold_together_are_left_out_with_the_reason(
    causal: tuple[Derived, Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the search: the kernel has a form without roles, which calls run."""

    def broken(*_: object, **__: object) -> None:
        raise TileError("kernel 'kernel': two rings of one name among Q")

    monkeypatch.setattr(specialize_warps, "in_roles", broken)
    derived, compiled = replace(causal[0], specialized={}, unsuited={}), causal[1]
    asked = Asked(compiled.extents, compiled.dtypes, compiled.device)
    chosen, made = specialize_warps.specialized(derived, asked, compiled.chosen, compiled.tile)
    assert made is None and "a fault of eqfuse: kernel 'kernel': two rings of one name" in chosen.plan.code


def test_loops_that_promise_nothing_of_what_is_masked_are_not_cut() -> None:
    derived = _derived(WORKLOADS["causal_prefill"].source, finite=False)
    compiled = _compiled(derived)
    body = _divided(derived, compiled, _roles(derived, compiled)).kernels[0].roles[1].body
    loops = [stmt for stmt in nested(body) if isinstance(stmt, For) and stmt.axis == "j"]
    assert len(loops) == 1 and any(isinstance(stmt, AnyNonFinite) for stmt in nested(loops[0].body))


@pytest.mark.slow
def test_a_range_with_masks_before_one_without_is_joined_too() -> None:
    """A window has three ranges: masks at both ends. One pipeline walks them all."""
    derived = _derived(WORKLOADS["window_prefill"].source)
    compiled = _compiled(derived)
    assert sum(isinstance(stmt, For) for stmt in compiled.tile.kernels[0].body) == 3
    body = _divided(derived, compiled, _roles(derived, compiled)).kernels[0].roles[1].body
    loops = [stmt for stmt in nested(body) if isinstance(stmt, For)]
    conditions = [s.condition.name for loop in loops for s in loop.body if isinstance(s, If)]
    assert len(loops) == 4 and all(name.endswith("_turns") for name in conditions)
    for before, after in pairwise(loops):
        assert [item.init for item in after.carried] == [item.value for item in before.carried]


VERIFIED = {
    "global_prefill": (2, 2, (1,), True),
    "causal_prefill": (2, 1, (), False),
    "gqa_prefill": (3, 3, (1,), False),
    "softcap_prefill": (2, 2, (), False),
    "window_prefill": (2, 2, (1,), True),
    "attention_lse": (1, 2, (1,), False),
}
"""Programs, with consumers, slots, delayed products, and whether the grid is persistent."""


@pytest.mark.parametrize("name", VERIFIED)
@pytest.mark.slow(but=["causal_prefill"])
def test_roles_compute_what_the_program_does(name: str) -> None:
    derived = _derived(WORKLOADS[name].source)
    compiled = _compiled(derived)
    consumers, slots, delayed, persistent = VERIFIED[name]
    roles = _roles(derived, compiled, consumers, slots, delayed, persistent=persistent)
    program = derived.program
    forms = certification.verified_roles(compiled.chosen.nest, program, compiled.dtypes, H200, [roles])
    stages = roles_stages(program, forms, small_extents(program))
    certificate = check_stages(program, stages, trials=8, dtypes=compiled.dtypes)
    assert certificate.ok, certificate.reason


BIASED = """
    S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) + B[b,h,i,j]
    T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
    P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
    O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
"""
REFUSED = {
    "products of f32": ("y[i,n] = sum[k](where(k <= i, x[i,k] * w[n,k], 0))", {}, True),
    "assume_finite=True": (BIASED, {**HALF, "B": "f16"}, False),
    "kernel1: no loop multiplies matrices; kernel2: products of f32": (
        "y[i] = sum[k](x[i,k])\nz[n,m] = sum[k](v[n,k] * w[m,k])\nreturn y, z",
        {"x": "f16", "v": "f32", "w": "f32"},
        True,
    ),
    "no loop multiplies matrices": ("y[i] = sum[k](x[i,k])", {"x": "f16"}, True),
}
"""Why a program has no roles: some of the text, the program, and its dtypes."""


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_roles_says_why_and_stays_triton(why: str) -> None:
    source, dtypes, finite = REFUSED[why]
    derived = _derived(source, finite=finite)
    sizes = {axis: 4096 for axis in compiler.nominal_extents(derived.program)} | SIZES
    compiled = _compiled(derived, {**program_dtypes(derived.program), **dtypes}, **sizes)
    assert compiled.roles is None and compiled.chosen.plan.roles == ()
    assert why in compiled.chosen.plan.code


@pytest.mark.parametrize(("rows", "divided"), [(1, False), (31, False), (64, True), (4096, True)])
def test_few_rows_are_not_divided_among_warp_groups(rows: int, divided: bool) -> None:
    derived = _derived("y[i,n] = f16(sum[k](x[i,k] * w[n,k]))")
    sizes = {"i": rows, "n": 4096, "k": 4096}
    compiled = compiler.pipeline(derived, sizes, {"x": "f16", "w": "f16"}, device_named("h200"))
    found = [made for _, made in specialize_warps.other_roles(derived, compiled, sizes)]
    assert bool(found) is divided
    if not divided:
        assert "too few positions of i, the rows of products" in compiled.chosen.plan.code


@pytest.mark.parametrize("dim", [72, 96])
def test_a_head_dim_that_is_no_power_of_two_has_roles(dim: int) -> None:
    """Without them tiles are as large as those of 128, and what is no multiple of 16 is copied number by number."""
    sizes = {"b": 1, "h": 32, "i": 8192, "j": 8192, "d": dim, "e": dim}
    for name in ("causal_prefill", "global_prefill"):
        derived = _derived(WORKLOADS[name].source)
        assert compiler.pipeline(derived, sizes, HALF, device_named("h200")).roles is not None


@pytest.mark.slow
def test_an_old_triton_gets_no_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize_warps, "installed", lambda _: "3.5.1")
    compiled = _compiled(_derived(WORKLOADS["global_prefill"].source))
    assert compiled.chosen.plan.code == "Triton: Triton 3.5.1 is installed, roles need 3.6"


def test_a_kernel_says_what_it_runs() -> None:
    kernel = eq.compile(WORKLOADS["global_prefill"].source, target="h200")
    assert kernel.plan.code.startswith("Triton: ")  # nothing is known of dtypes yet
    for shown in (lambda: kernel.gluon, lambda: kernel.roles):
        with pytest.raises(EqfuseError, match="has no roles: "):
            shown()
    compiled = _compiled(kernel.derived)
    plan = compiled.chosen.plan
    assert compiled.roles is not None
    (roles,) = plan.roles
    assert re.fullmatch(re.escape(f"Gluon: {roles}, predicted to take ") + r"[\d.]+ ms", plan.code)
    assert roles is not None and roles.delayed == (1,)


def test_explain_says_which_roles_what_each_pass_made_and_what_was_predicted(
    causal: tuple[Derived, Compiled],
) -> None:
    derived, compiled = causal
    text = "\n".join(specialize_warps.account_of(derived, compiled, compiled.extents))
    for part in (
        "producer: one warp, fills Q_tile (2 slots of f16[i, d], 2 parts), K_tiles (",
        "consumers: 2 warp groups, each 64 of 128 positions of i",
        "masks first: 1 selects fewer",
        "fused ranges: 2 loops became 1",
        "pipeline: 2 loops run products one block behind",
        "stores: O through memory of its own",
        "persistence: one thread block for each SM",
        "await sum_j_new_2_pending",
        "no product behind: ",
        "3 consumers: no SM holds it",
    ):
        assert part in text, part
    none = replace(
        compiled, roles=None, chosen=replace(compiled.chosen, plan=replace(compiled.chosen.plan, roles=None))
    )
    assert len(specialize_warps.account_of(derived, none, compiled.extents)) == 1
    assert specialize_warps.account_of(derived, replace(compiled, device=device_named("cpu")), {}) == ()


@pytest.mark.slow
def test_explain_has_a_section_of_roles() -> None:
    plain = "y[i] = sum[k](x[i,k])"
    assert "\nroles\n    Triton: no loop multiplies" in eq.compile(plain, target="h200").explain()
    assert "\nroles\n" not in eq.compile(plain).explain()
    sizes = "d: axis[128]\ne: axis[128]\n"
    source = f"{sizes}Q: f16[b,h,i,d]\nK: f16[b,h,j,d]\nV: f16[b,h,j,e]\n{WORKLOADS['global_prefill'].source}"
    kernel = eq.compile(source, target="h200")
    assert "\nroles\n    producer: one warp" in kernel.explain()
    page = kernel.explain("html")
    assert "<h2>Roles</h2>" in page and "gl.warp_specialize" in page and "fill K_tiles" in page


def test_sizes_of_one_region_have_roles_of_their_own() -> None:
    kernel = eq.compile(WORKLOADS["global_prefill"].source, target="h200", verify=False)
    shapes = kernel._shapes

    def roles(length: int, dim: int) -> tuple[Roles | None, ...]:
        sizes = {**SIZES, "i": length, "j": length, "d": dim, "e": dim}
        del sizes["k"]
        return shapes._special(sizes, HALF, H200).compiled.chosen.plan.roles

    found = [roles(8192, 128), roles(8192, 64), roles(8192, 128)]
    assert found[0] == found[2] != found[1]
    assert found[1][0] is not None and found[1][0].consumers == 3


def test_the_certificate_covers_roles() -> None:
    derived = _derived(WORKLOADS["global_prefill"].source)
    compiled = compiler.pipeline(derived, SIZES, HALF, H200, checks=certification.Checks(4, 1e-3))
    certificate = certification.certify(derived, compiled, certification.Checks(4, 1e-3))
    assert any("roles" in stage.name for stage in certificate.stages)


def test_a_product_that_reads_replaced_registers_is_refused(causal: tuple[Derived, Compiled]) -> None:
    program = _divided(*causal, _roles(*causal))
    check(program)

    def moved(body: tuple) -> tuple:  # type: ignore[type-arg]
        found = []
        for stmt in body:
            if isinstance(stmt, For):
                issued = [s for s in stmt.body if isinstance(s, MmaAsync)]
                last = max(n for n, s in enumerate(stmt.body) if type(s).__name__ == "MmaWait")
                later = [s for s in stmt.body[last:] if not isinstance(s, ReleaseSlot)]
                assert issued and later
                stmt = replace(stmt, body=(*stmt.body[:last], *stmt.body[last + 1 :], stmt.body[last]))
            elif isinstance(stmt, If):
                stmt = replace(stmt, body=moved(stmt.body))
            found.append(stmt)
        return tuple(found)

    (kernel,) = program.kernels
    producer, *consumers = kernel.roles
    roles = (producer, *(replace(role, body=moved(role.body)) for role in consumers))
    with pytest.raises(TileError):
        check(replace(program, kernels=(replace(kernel, roles=roles),)))


def test_tiles_of_the_next_item_are_copied_before_this_one_ends(causal: tuple[Derived, Compiled]) -> None:
    """Those that an item reads once have two slots: what fills one waits for the item before the last."""
    derived, compiled = causal
    roles = replace(_roles(derived, compiled, persistent=True), ahead=True)
    (kernel,) = _divided(derived, compiled, roles).specialized
    assert {ring.name: ring.slots for ring in kernel.rings} == {"Q_tile": 2, "K_tiles": 2, "V_tiles": 2}
    assert [ring.looped for ring in kernel.rings] == [False, True, True]
    program = derived.program
    forms = certification.verified_roles(compiled.chosen.nest, program, compiled.dtypes, H200, [roles])
    stages = roles_stages(program, forms, small_extents(program))
    assert check_stages(program, stages, trials=8, dtypes=compiled.dtypes).ok


def test_a_loaded_tile_that_is_computed_with_is_read_from_its_slot() -> None:
    derived = _derived(NORMED)
    dtypes = {"x": "f16", "w": "f16"}
    compiled = compiler.pipeline(derived, {"i": 4096, "n": 4096, "p": 4096}, dtypes, H200)
    try:
        program = _divided(derived, compiled, _roles(derived, compiled, delayed=(), step=64))
    except Unsuited as why:
        pytest.fail(str(why))
    assert any(isinstance(stmt, LoadShared) for stmt in nested(program.kernels[0].roles[1].body))


def test_a_scale_is_applied_where_the_maximum_is_subtracted(causal: tuple[Derived, Compiled]) -> None:
    """max(x * c) is max(x) * c for c > 0; of other scales the sign goes to x first, in a branch."""
    body = _divided(*causal, _roles(*causal)).kernels[0].roles[1].body
    _, loop = [stmt for stmt in nested(body) if isinstance(stmt, For)]
    ops = {s.value.name: s.op for s in loop.body if isinstance(s, Let)}
    folded = [op.value for op in ops.values() if isinstance(op, ReduceTile) and op.op == "max"]
    products = [op for op in ops.values() if isinstance(op, Elementwise) and op.fn == "mul"]
    assert folded and all(
        folded[0] not in (op.args[0], op.args[1]) or op.args[1].dims == () for op in products
    )
    (branch,) = [stmt for stmt in loop.body if isinstance(stmt, If)]
    assert "_turns" in branch.condition.name


def _distances() -> tuple[Derived, Compiled]:
    derived = _derived(f"slope: f32[h]\n{WORKLOADS['alibi_prefill'].source}")
    return derived, _compiled(derived, {**HALF, "slope": "f32"})


def test_a_term_of_a_row_is_taken_from_the_maximum() -> None:
    derived, compiled = _distances()
    (kernel,) = compiled.tile.kernels
    after = rows_last(masked_first(kernel))
    tiles = [
        sum(isinstance(s, Let) and isinstance(s.op, Elementwise) and len(s.value.dims) == 2 for s in body)
        for body in (list(nested(kernel.body)), list(nested(after.body)))
    ]
    assert tiles[1] < tiles[0]
    assert rows_last(after) == after
    assert "terms of rows behind maxima: 1 maximum" in specialize_warps.account_of(
        derived, compiled, compiled.extents
    )
    other = _derived(WORKLOADS["global_prefill"].source)
    (plain,) = _compiled(other).tile.kernels
    assert rows_last(plain) is plain


@pytest.mark.slow
def test_terms_of_rows_are_verified_and_compute_what_the_program_does() -> None:
    derived, compiled = _distances()
    program = derived.program
    roles = _roles(derived, compiled)
    forms = certification.verified_roles(compiled.chosen.nest, program, compiled.dtypes, H200, [roles])
    stages = roles_stages(program, forms, small_extents(program))
    assert check_stages(program, stages, trials=8, dtypes=compiled.dtypes).ok
    generator = np.random.default_rng(0)
    sizes = {"b": 1, "h": 2, "i": 5, "j": 7, "d": 3, "e": 4}
    shapes = {"Q": "bhid", "K": "bhjd", "V": "bhje", "slope": "h"}
    tensors = {name: generator.normal(size=[sizes[axis] for axis in axes]) for name, axes in shapes.items()}
    for slope in (0.7, -0.7, 0.0):
        tensors["slope"] = np.array([slope, -slope])
        found = run(forms[0], program, tensors, {"scale": 0.5}, sizes, FloatDomain("float64"), shards={})
        expected = eq.reference(program.source)(**tensors, scale=0.5)
        np.testing.assert_allclose(found["O"], expected, atol=1e-3)  # weights are rounded to f16


@pytest.mark.parametrize("scale", (0.5, -0.5, 0.0))
@pytest.mark.slow(but=["-0.5"])
def test_any_scale_gives_the_same(scale: float) -> None:
    derived = _derived(WORKLOADS["global_prefill"].source)
    compiled = _compiled(derived)
    program = derived.program
    forms = certification.verified_roles(
        compiled.chosen.nest, program, compiled.dtypes, H200, [_roles(derived, compiled)]
    )
    generator = np.random.default_rng(0)
    sizes = {"b": 1, "h": 2, "i": 5, "j": 7, "d": 3, "e": 4}
    shapes = {"Q": "bhid", "K": "bhjd", "V": "bhje"}
    tensors = {name: generator.normal(size=[sizes[axis] for axis in axes]) for name, axes in shapes.items()}
    found = run(forms[0], program, tensors, {"scale": scale}, sizes, FloatDomain("float64"), shards={})
    expected = eq.reference(program.source)(**tensors, scale=scale)
    np.testing.assert_allclose(found["O"], expected, atol=1e-3)  # weights are rounded to f16


def test_a_search_tries_other_roles_and_none_and_keeps_the_winner(
    causal: tuple[Derived, Compiled], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    derived, compiled = causal
    tuner = Tuner(derived, compiled, None, {}, lambda made: dict, torch.device("cpu"))
    others = tuner._of_other_roles()
    assert [c.plan.roles == () for c in others] == [False] * (len(others) - 1) + [True] and len(others) > 2
    assert tuner._compiled(others[-1]).roles is None
    best = tuner._compiled(others[0])
    assert best.roles is not None and best.chosen.plan.roles == others[0].plan.roles
    kept.keep(tuner._key, kept.Found(others[0], 1e-3, 2e-3))
    dtypes = with_outputs(derived.program, compiled.dtypes)
    found = kept.read(tuner._key, compiled.candidates, compiled.extents, dtypes, H200)
    assert found is not None and found.candidate.plan.roles == others[0].plan.roles


# Gluon ------------------------------------------------------------------------------------------------


def _reports(derived: Derived, compiled: Compiled, roles: Roles, dim: int) -> list[RolesReport]:
    source = emit(_divided(derived, compiled, roles), derived.program, compiled.dtypes, name=derived.name)
    return compile_for_hopper(source, sizes={"d": dim, "e": dim})


COMPILED = {
    "causal_prefill 128": (2, 2, (1,), 128, True),
    "causal_prefill 64": (3, 2, (1,), 128, False),
    "global_prefill 96": (2, 2, (), 128, False),
    "window_prefill 128": (2, 3, (1,), 64, False),
    "attention_lse 128": (2, 2, (1,), 128, True),
    "softcap_prefill 64": (2, 2, (1,), 128, False),
    "causal_prefill 256": (2, 2, (1,), 64, False),
    "gqa_prefill 128": (2, 1, (1,), 128, False),
}
"""Programs and head dims, with consumers, slots, delayed products, steps, and whether the grid is persistent."""


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.slow(but=["causal_prefill 128"])
def test_gluon_compiles_for_hopper_without_spills(case: str) -> None:
    name, _, dim = case.partition(" ")
    consumers, slots, delayed, step, persistent = COMPILED[case]
    derived = _derived(WORKLOADS[name].source)
    compiled = _compiled(derived, d=int(dim), e=int(dim))
    roles = _roles(derived, compiled, consumers, slots, delayed, step, persistent=persistent)
    (report,) = _reports(derived, compiled, roles, int(dim))
    assert report.kernel.spilled_bytes == 0 and report.machine["STL"] == 0
    assert report.machine["HGMMA"] and "cp.async.bulk.tensor" in report.kernel.assembly
    assert "setmaxnreg" in report.kernel.assembly


SCALED = """
    sx: f32[i]
    sw: f32[n]
    y[i,n] = bf16(sum[p](x[i,p] * w[n,p]) * sx[i] * sw[n])
"""
EIGHT = {"x": "f8e4m3", "w": "f8e4m3", "sx": "f32", "sw": "f32"}


def _product(step: int, columns: int, dtype: str = "f8e4m3") -> tuple[Derived, Compiled, Roles]:
    derived = _derived(f"x: {dtype}[i,p]\nw: {dtype}[n,p]\n{SCALED}")
    sizes = {"i": 4096, "n": 4096, "p": 4096}
    compiled = compiler.pipeline(derived, sizes, {**EIGHT, "x": dtype, "w": dtype}, H200)
    (config,) = compiled.chosen.plan.configs
    return derived, compiled, Roles(sized(config.blocks, "i", 128, step, columns), 2, 3)


def test_what_is_loaded_behind_a_loop_takes_the_registers_of_its_results() -> None:
    """Scales of columns do not keep three consumers from products of bytes: with loads beside the loop they would not fit."""
    derived, compiled, roles = _product(128, 128)
    roles = replace(roles, blocks=sized(roles.blocks, "i", 192, 128, 128), consumers=3, slots=4)
    (kernel,) = _divided(derived, compiled, roles).specialized
    assert needs(kernel, compiled.extents, H200).registers <= held_by(kernel)
    producer, *consumers = kernel.roles
    first = next(n for n, s in enumerate(consumers[0].body) if isinstance(s, For))
    late = [s for s in consumers[0].body[first:] if isinstance(s, Let) and isinstance(s.op, LoadTile)]
    assert {s.value.dims for s in late} == {("i",), ("n",)}
    early = tuple(s for s in consumers[0].body if s not in late)
    moved = replace(consumers[0], body=(*early[:first], *late, *early[first:]))
    beside = replace(kernel, roles=(producer, moved, *consumers[1:]))
    assert needs(beside, compiled.extents, H200).registers > held_by(kernel)


@pytest.mark.parametrize(("step", "columns", "dtype"), [(128, 128, "f8e4m3"), (64, 256, "bf16")])
@pytest.mark.slow(but=["64-256-bf16"])
def test_products_compile_with_their_scales_behind_the_loop(step: int, columns: int, dtype: str) -> None:
    derived, compiled, roles = _product(step, columns, dtype)
    (report,) = _reports(derived, compiled, roles, 64)
    assert report.kernel.spilled_bytes == 0
    assert report.machine["QGMMA" if dtype == "f8e4m3" else "HGMMA"] > 0


def test_products_of_eight_bits_are_verified_in_roles() -> None:
    derived, compiled, roles = _product(128, 128)
    program = derived.program
    forms = certification.verified_roles(compiled.chosen.nest, program, compiled.dtypes, H200, [roles])
    stages = roles_stages(program, forms, small_extents(program))
    assert check_stages(program, stages, trials=8, dtypes=compiled.dtypes).ok


def test_a_loop_of_products_alone_has_roles_that_are_verified_and_more_slots_where_trips_are_short() -> None:
    derived, compiled, _ = _product(128, 128)
    (roles,) = compiled.chosen.plan.roles
    assert compiled.roles is not None and roles is not None and roles.slots > SLOTS[1]
    checks = certification.Checks(4, 1e-3)
    certificate = certification.certify(derived, compiled, checks)
    assert certificate.ok and any("roles" in stage.name for stage in certificate.stages)
    tuner = Tuner(derived, compiled, None, {}, lambda made: dict, torch.device("cpu"))
    tried = [c.plan.roles for c in tuner._of_other_roles()]
    assert any(other and other != (roles,) for other in tried)


def test_rows_that_blocks_take_some_at_a_time_have_no_roles() -> None:
    """71 heads that read the same keys: blocks of 64 rows would cut them."""
    workload = WORKLOADS["mqa_incremental"]
    compiled = compile_ahead(workload, workload.paper_cases[-1], "h200").compiled
    assert compiled.roles is None
    assert "blocks take 71 positions of h at a time" in compiled.chosen.plan.code


def test_a_bound_launch_of_roles_writes_to_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to others that are copied."""
    kernel = eq.compile(WORKLOADS["global_prefill"].source, target="h200", verify=False)
    compiled = _compiled(kernel.derived, i=4, j=4, d=16, e=16, b=1, h=2)
    given = {name: torch.zeros(1, 2, 4, 16, dtype=torch.float16) for name in HALF}
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(TritonProgram, "__call__", lambda self, **values: calls.append(values))
    monkeypatch.setattr(GluonProgram, "form", lambda self, tensors: self.otherwise)
    runners = kernel._calls.runners
    special = Specialization(compiled, {}, compiled.extents, HALF, False)
    runners._programs[id(compiled)] = compiled, GluonProgram("", "f", lambda: "")
    outputs = {"O": torch.empty(1, 2, 4, 16, dtype=torch.float16)}
    launch = runners.held(special, Given(given, {"scale": 1.0}, None, numpy=False), outputs)
    launch()
    (call,) = calls
    assert call["out"] is outputs["O"] and call["Q"] is given["Q"] and call["scale"] == 1.0


def test_tensors_that_the_copy_engine_cannot_address_are_told() -> None:
    derived = _derived(WORKLOADS["global_prefill"].source)
    compiled = _compiled(derived)
    assert compiled.roles is not None
    source = emit(compiled.roles, derived.program, compiled.dtypes, name="f")
    program = GluonProgram(source, "f", lambda: "")
    right = torch.zeros(1, 2, 8, 64, dtype=torch.float16)
    flat = torch.zeros(2 * 8 * 64 + 8, dtype=torch.float16)
    wide = torch.zeros(1, 2, 8, 72, dtype=torch.float16)
    fits = {
        "as it is": (right, True),
        "at 2 bytes": (flat[1:-7].view(1, 2, 8, 64), False),
        "at 16 bytes": (flat[8:].view(1, 2, 8, 64), True),
        "rows of 144 bytes": (wide[..., :64], True),
        "rows of 136 bytes": (wide.view(1, 2, 72, 8)[:, :, :68].reshape(1, 2, 8, 68)[..., :64], False),
        "dims in another order": (right.transpose(1, 2), True),
        "the last dim apart": (right.transpose(2, 3), False),
    }
    for what, (tensor, suits) in fits.items():
        chosen = program.form({"Q": right, "K": tensor, "V": right, "scale": 1.0})
        assert (chosen is not program.otherwise) is suits, what


@pytest.mark.slow
def test_a_hyperbolic_tangent_near_0_takes_no_special_function() -> None:
    """Threads whose elements are all near 0 leave out the branch with the exponential."""
    derived = _derived(WORKLOADS["softcap_prefill"].source)
    compiled = _compiled(derived, d=64, e=64)
    roles = _roles(derived, compiled, delayed=(1,), step=64)
    source = emit(_divided(derived, compiled, roles), derived.program, compiled.dtypes, name="f")
    (report,) = compile_for_hopper(source, sizes={"d": 64, "e": 64})
    text = report.kernel.assembly
    branch = text[text.index("@whole bra") :]
    assert branch.index("ex2.approx") < branch.index("done:")
    before = text[: text.index("@whole bra")]
    assert "ex2.approx" not in before[before.rindex("fma.rn.f32 u") :]
    assert _compiled(derived).chosen.plan.roles


def test_tiles_of_eight_bits_are_read_along_what_is_summed() -> None:
    derived = _derived("y[i,n] = sum[p](x[i,p] * w[p,n])")
    dtypes = {"x": "f8e4m3", "w": "f8e4m3"}
    compiled = compiler.pipeline(derived, {"i": 4096, "n": 4096, "p": 4096}, dtypes, H200)
    assert "a tile of f8e4m3 whose last dim is not p" in compiled.chosen.plan.code


@pytest.mark.parametrize(("items", "workers"), [(7, 3), (8, 4), (5, 8), (12, 5), (1, 1)])
def test_items_are_dealt_out_there_and_back(
    items: int, workers: int, causal: tuple[Derived, Compiled]
) -> None:
    """Each once, by the interpreter and by the emitted arithmetic; and evenly, where lengths fall."""
    found = [dealt(items, workers, number) for number in range(workers)]
    assert sorted(item for mine in found for item in mine) == list(range(items))
    derived, compiled = causal
    program = _divided(derived, compiled, _roles(derived, compiled, persistent=True))
    source = emit(program, derived.program, compiled.dtypes, name="f").splitlines()
    first = next(n for n, line in enumerate(source) if "items = N_h" in line)
    lines = [line.strip() for line in source[first : first + 8]]
    assert lines[6].startswith("for round_of_items in range(") and lines[7].startswith("number = ")
    text = "\n".join([*lines[1:7], f"    {lines[7]}", "    taken.append(number)"])
    text = text.replace(".to(tl.int32)", "")
    for number in range(workers):
        gl = SimpleNamespace(num_programs=lambda _: workers, program_id=lambda _, n=number: n)
        tl = SimpleNamespace(where=lambda flag, then, otherwise: then if flag else otherwise)
        taken: list[int] = []
        exec(text, {"gl": gl, "tl": tl, "items": items, "taken": taken})  # noqa: S102  (text that was emitted)
        assert taken == found[number]
    lengths = [sum(64 - item // 32 for item in dealt(2048, 132, number)) for number in range(132)]
    straight = [sum(64 - item // 32 for item in range(number, 2048, 132)) for number in range(132)]
    assert max(lengths) < 1.03 * sum(lengths) / 132 < max(straight)


@pytest.mark.slow
def test_an_output_takes_the_place_of_what_is_read_no_more() -> None:
    """Head dim 256 fits an SM so. Where sizes differ at launch, the output has memory of its own."""
    derived = _derived(WORKLOADS["causal_prefill"].source)
    compiled = _compiled(derived, d=256, e=256)
    assert compiled.roles is not None
    (kernel,) = compiled.roles.kernels
    assert [staging.over for staging in kernel.staging] == ["Q_tile"]
    sizes = {**SIZES, "d": 256, "e": 256}
    assert fits(kernel, sizes, H200) and not fits(kernel, {**sizes, "e": 512}, H200)
    source = emit(compiled.roles, derived.program, compiled.dtypes, name="attend")
    assert "if BLOCK_E == BLOCK_D:" in source
    shared = [
        compile_for_hopper(source, sizes={"d": dim, "e": 64})[0].kernel.shared_bytes for dim in (64, 128)
    ]
    queries, keys, apart = 128 * 64 * 2, 2 * 64 * 64 * 2, 128 * 64 * 2
    assert abs(shared[1] - shared[0] - (queries + keys + apart)) < 1024


def test_an_emitted_file_stands_alone_and_is_deterministic(causal: tuple[Derived, Compiled]) -> None:
    derived, compiled = causal
    program = _divided(derived, compiled, _roles(derived, compiled))
    first, second = (emit(program, derived.program, compiled.dtypes, name="attend") for _ in range(2))
    assert first == second and "eqfuse" not in first
    assert compiled.chosen.plan.configs and KernelConfig(program.kernels[0].blocks).blocks
