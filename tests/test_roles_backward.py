"""The loop nests of attention's gradient in roles: several products a block, two tiles of sums, numbers of columns."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import eqfuse as eq
from bench.training_cells import attention
from eqfuse import certification, compiler, specialize_warps
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.extract import warp_schedules
from eqfuse.extract.resources import CONSUMER_REGISTERS
from eqfuse.extract.warp_schedules import SLOTS, sized
from eqfuse.loops.plan import Roles
from eqfuse.lowered import Known, in_roles
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.gluon.aot import compile_for_hopper
from eqfuse.tile.gluon.module import emit
from eqfuse.tile.nodes import Dot, Elementwise, For, Let, LoadTile
from eqfuse.tile.roles.facts import rows_of
from eqfuse.tile.roles.interpreter import run
from eqfuse.tile.roles.nodes import AsyncCopy, LoadShared, MmaAsync, MmaWait, RolesProgram, Stmt
from eqfuse.tile.roles.resources import fits, needs, with_slots
from eqfuse.tile.walk import nested
from eqfuse.verify.check import check_stages
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.stages import roles_stages

H200 = device_named("h200")
SIZES = {"b": 1, "h": 32, "i": 8192, "j": 8192, "d": 128, "e": 128, "d_all": 128, "e_all": 128}
SMALL = {"b": 1, "h": 2, "i": 7, "j": 5, "d": 3, "e": 4}

SCORES = """
    Q: bf16[b,h,i,d]
    K: bf16[b,h,j,d]
    V: bf16[b,h,j,e]
    dO: bf16[b,h,i,e]
    lse: f32[b,h,i]
    D: f32[b,h,i]
    S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale
    T[b,h,i,j] = where(j <= i, S[b,h,i,j], -inf)
    P[b,h,i,j] = exp(T[b,h,i,j] - lse[b,h,i])
    dP[b,h,i,j] = sum[e](dO[b,h,i,e] * V[b,h,j,e])
    dS[b,h,i,j] = where(j <= i, P[b,h,i,j] * (dP[b,h,i,j] - D[b,h,i]), 0)
"""
COLUMNS = f"""
    {SCORES}
    dK[b,h,j,d] = bf16(sum[i](dS[b,h,i,j] * Q[b,h,i,d]) * scale)
    dV[b,h,j,e] = bf16(sum[i](P[b,h,i,j] * dO[b,h,i,e]))
    assert T[b,h,i,j] <= lse[b,h,i]
    return dK, dV
"""
ROWS = f"""
    {SCORES}
    dQ[b,h,i,d] = bf16(sum[j](dS[b,h,i,j] * K[b,h,j,d]) * scale)
    assert T[b,h,i,j] <= lse[b,h,i]
    return dQ
"""


def _full(source: str) -> str:
    """The same without a mask."""
    made = source.replace("where(j <= i, S[b,h,i,j], -inf)", "S[b,h,i,j]")
    return made.replace(
        "where(j <= i, P[b,h,i,j] * (dP[b,h,i,j] - D[b,h,i]), 0)", "P[b,h,i,j] * (dP[b,h,i,j] - D[b,h,i])"
    )


PROGRAMS = {
    "columns": COLUMNS,
    "rows": ROWS,
    "columns, no mask": _full(COLUMNS),
    "rows, no mask": _full(ROWS),
}
FORMS: dict[str, tuple[int, int, tuple[int, ...], bool, bool]] = {
    "columns": (2, 2, (), False, False),
    "rows": (2, 3, (), True, False),
    "columns, no mask": (3, 2, (3,), True, True),
    "rows, no mask": (2, 2, (2,), False, True),
}
"""By program: consumers, slots, delayed products, whether the grid is persistent, and whether all is promised to be finite."""


@cache
def _made(name: str, dim: int = 128) -> tuple[Derived, Compiled]:
    derived = compiler.derive(PROGRAMS[name], None, False, assume_finite=FORMS[name][4])
    sizes = {**SIZES, "d": dim, "e": dim, "d_all": dim}
    return derived, compiler.pipeline(derived, sizes, program_dtypes(derived.program), H200)


def _roles(name: str, step: int = 64, dim: int = 128) -> tuple[Derived, Compiled, Roles]:
    derived, compiled = _made(name, dim)
    consumers, slots, delayed, persistent, _ = FORMS[name]
    (config,) = compiled.chosen.plan.configs
    blocks = sized(config.blocks, rows_of(compiled.tile.kernels[0]), 64 * consumers, step)
    return derived, compiled, Roles(blocks, consumers, slots, delayed, persistent)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["columns", "columns, no mask", "rows"])
def test_no_roles_that_an_sm_holds_are_passed_over(name: str, dim: int) -> None:
    """Roles with fewer decisions, or slots, are taken to need no more: each that has room is found, in the order of its price."""
    derived, compiled = _made(name, dim)
    sizes = {**SIZES, "d": dim, "e": dim, "d_all": dim}
    plan = specialize_warps._Plan.of(derived, compiled, sizes)
    found = [choice.roles for choice in plan.choices(0)]
    ranked = warp_schedules.ranked(plan.facts(0), plan.outlook(0)).faster()
    every = [(roles, plan.kernel(0, replace(roles, slots=SLOTS[0]))) for _, roles in ranked]
    held = [roles for roles, made in every if made and fits(with_slots(made, roles.slots), sizes, H200)]
    assert found == held and found


def test_a_search_lowers_the_kernels_that_it_does_not_change_once() -> None:
    """What is made of those is what is made of all anew."""
    compiled, derived = _gradient(8, 128)
    nest, configs, program = compiled.chosen.nest, compiled.chosen.plan.configs, derived.program
    chosen = compiled.chosen.plan.roles
    number = next(n for n, roles in enumerate(chosen) if roles and rows_of(compiled.tile.kernels[n]) == "j")
    known: Known = {}
    for step in (64, 128):
        roles: list[Roles | None] = [None] * len(configs)
        roles[number] = replace(chosen[number], blocks=sized(chosen[number].blocks, "j", 128, step))
        given = nest, program, compiled.dtypes, H200, roles, configs
        assert in_roles(*given, known=known) == in_roles(*given)
    assert len(known) == len(configs) + 1


def _divided(name: str) -> RolesProgram:
    derived, compiled, roles = _roles(name)
    return in_roles(compiled.chosen.nest, derived.program, compiled.dtypes, H200, [roles])


def _small(name: str) -> tuple[Derived, Compiled, list[RolesProgram]]:
    derived, compiled, roles = _roles(name)
    nest, program = compiled.chosen.nest, derived.program
    return derived, compiled, certification.verified_roles(nest, program, compiled.dtypes, H200, [roles])


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(but=["columns, no mask"])
def test_roles_compute_the_gradient(name: str) -> None:
    derived, compiled, forms = _small(name)
    stages = roles_stages(derived.program, forms, small_extents(derived.program))
    certificate = check_stages(derived.program, stages, trials=8, dtypes=compiled.dtypes)
    assert certificate.ok, certificate.reason


@pytest.mark.parametrize("name", ["columns", "rows"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.0])
def test_what_a_mask_excludes_reaches_no_gradient(name: str, wrong: float) -> None:
    """Queries before a key's position, and keys behind a query's, may hold anything: their own gradients alone do."""
    derived, _, forms = _small(name)
    generator = np.random.default_rng(1)
    axes = {"Q": "bhid", "K": "bhjd", "V": "bhje", "dO": "bhie", "lse": "bhi", "D": "bhi"}
    given = {tensor: generator.normal(size=[SMALL[a] for a in of]) for tensor, of in axes.items()}
    if name == "columns":
        given["dO"][..., 1, 1], given["Q"][..., 0, 2], given["D"][..., 2] = wrong, wrong, wrong
    else:
        given["K"][..., 4, 1] = wrong
    for form in forms:
        found = run(form, derived.program, given, {"scale": 0.5}, SMALL, FloatDomain("float64"), shards={})
        with np.errstate(all="ignore"):
            expected = eq.reference(derived.program.source)(**given, scale=0.5)
        parts = (expected,) if name == "rows" else expected
        for out, part in zip(derived.program.outputs, parts, strict=True):
            reached = ~np.isfinite(part)
            assert not reached.all() and reached.any() == (wrong != 1.0)
            assert (np.isfinite(found[out.name]) == ~reached).all()
            np.testing.assert_allclose(found[out.name][~reached], part[~reached], atol=2e-2, rtol=2e-2)


def _loop(body: tuple[Stmt, ...]) -> For:
    """The loop whose blocks no mask cuts."""
    loops = [stmt for stmt in nested(body) if isinstance(stmt, For) and stmt.axis == "i"]
    return min(loops, key=lambda loop: len(loop.body))


def test_numbers_of_columns_are_copied_and_read_late() -> None:
    """The log-sum-exp of each query is in registers only once the scores are there, and what is under way is another product."""
    producer, consumer, _ = _divided("columns").kernels[0].roles
    filled = {stmt.ring for stmt in nested(producer.body) if isinstance(stmt, AsyncCopy)}
    assert {"lse_tiles", "D_tiles"} <= filled
    assert not any(
        isinstance(s, Let) and isinstance(s.op, LoadTile) and s.op.tensor in ("lse", "D")
        for s in consumer.body
    )
    body = _loop(consumer.body).body
    issued = [n for n, stmt in enumerate(body) if isinstance(stmt, MmaAsync)]
    awaited = [n for n, stmt in enumerate(body) if isinstance(stmt, MmaWait)]
    read = [n for n, stmt in enumerate(body) if isinstance(stmt, LoadShared)]
    assert len(issued) == len(awaited) == 4 and len(read) == 2
    first, second = awaited[:2]
    assert issued[1] < first < read[0] < issued[2] < second < read[1] < issued[3] < awaited[2]


MASKED = """
    length: i32[b]
    c: f32[b,j]
    S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * c[b,j]
    T[b,h,i,j] = where(j < length[b], S[b,h,i,j], -inf)
    P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
    O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
"""


def test_a_mask_that_ends_before_the_tensor_is_a_select_behind_the_copy() -> None:
    """The copy engine reads past the mask: the select gives what the load was to give there."""
    derived = compiler.derive(MASKED, None, False)
    dtypes = {**program_dtypes(derived.program), "Q": "bf16", "K": "bf16", "V": "bf16"}
    compiled = compiler.pipeline(derived, SIZES, dtypes, H200)
    (config,) = compiled.chosen.plan.configs
    blocks = sized(config.blocks, rows_of(compiled.tile.kernels[0]), 128, 64)
    program = in_roles(compiled.chosen.nest, derived.program, dtypes, H200, [Roles(blocks, 2, 2, (), False)])
    body = list(nested(program.kernels[0].roles[1].body))
    copied = {s.value.name for s in body if isinstance(s, LoadShared) and s.view.ring == "c_tiles"}
    raw = {name for name in copied if name.endswith("_raw")}
    selects = [
        s.op for s in body if isinstance(s, Let) and isinstance(s.op, Elementwise) and s.op.fn == "where"
    ]
    assert raw and raw == {op.args[1].name for op in selects if op.args[1].name in raw}
    readers = [s for s in body if isinstance(s, Let) and isinstance(s.op, Elementwise)]
    assert all(s.op.fn == "where" for s in readers if raw & {v.name for v in s.op.args})


def test_what_the_gradient_holds_is_what_lives_at_once() -> None:
    """Scores and their gradients take the place of each other: with blocks of 64 queries both sums of 128 columns fit, and their
    roles are chosen; with 128 queries they do not."""
    derived, compiled, roles = _roles("columns")
    (best,) = compiled.chosen.plan.roles
    assert best is not None
    chosen = {block.axis: block.size for block in best.blocks}
    assert (chosen["j"], chosen["i"]) == (128, 64)
    nest, program = compiled.chosen.nest, derived.program
    found = []
    for step in (64, 128):
        _, _, roles = _roles("columns", step)
        (kernel,) = in_roles(nest, program, compiled.dtypes, H200, [roles]).kernels
        found.append(needs(kernel, compiled.extents, H200).registers)
    assert found[0] <= CONSUMER_REGISTERS[2] < found[1]


@pytest.mark.parametrize("name", ["columns, no mask", "rows, no mask"])
@pytest.mark.slow
def test_the_gradient_compiles_for_hopper_without_spills(name: str) -> None:
    derived, compiled, roles = _roles(name)
    roles = Roles(sized(roles.blocks, rows_of(compiled.tile.kernels[0]), 128, 64), 2, 2, (), False)
    program = in_roles(compiled.chosen.nest, derived.program, compiled.dtypes, H200, [roles])
    source = emit(program, derived.program, compiled.dtypes, name="gradient")
    (report,) = compile_for_hopper(source, sizes={"d": 128, "e": 128, "d_all": 128})
    assert report.kernel.spilled_bytes == 0 and report.machine["HGMMA"]


def _gradient(keys: int, dim: int) -> tuple[Compiled, Derived]:
    """The gradient by all three, as a backward pass runs it, of heads that share keys."""
    cell, group = attention(1, 32, keys, 8192, dim, causal=True), 32 // keys
    halves = dict.fromkeys("QKV", "bf16")
    source = cell.text(torch.bfloat16)
    saved = saving_gradient(source, tuple("QKV"), scalars={"g": group}, alike=True, halves=halves)
    derived = compiler.derive(saved.backward, None, False)
    dtypes = {**program_dtypes(derived.program), "dO": "bf16", "O": "bf16"}
    sizes = {**SIZES, "n": keys, "d": dim, "e": dim, "h_1": 32, "h_rest": group}
    return compiler.pipeline(derived, sizes, dtypes, H200), derived


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_no_register_is_read_that_no_way_sets(dim: int) -> None:
    """Where the first of two loops has no trip, ptxas let the second one of dQ read the addresses of another item's tiles."""
    compiled, derived = _gradient(32, dim)
    assert compiled.roles is not None
    configs = compiled.chosen.plan.configs
    source = emit(compiled.roles, derived.program, compiled.dtypes, configs, name="gradient")
    assert len(compile_for_hopper(source, sizes={"d": dim, "e": dim})) == 2


@pytest.mark.slow
@pytest.mark.parametrize("keys", [32, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_both_nests_of_a_gradient_have_a_kernel_of_their_own(keys: int, dim: int) -> None:
    """Sums of rows are stored in the order of what they are made of, and both nests read them, also where heads share keys: the one
    of keys and values, which adds to two tiles of sums, has roles."""
    compiled, _ = _gradient(keys, dim)
    stored = [b for b in compiled.tile.buffers if b.name.startswith("stored") and "i" in b.axes]
    assert stored and all(buffer.axes[-1] == "i" for buffer in stored)
    roles = {}
    for kernel, chosen in zip(compiled.tile.kernels, compiled.chosen.plan.roles, strict=True):
        loops = [stmt for stmt in kernel.body if isinstance(stmt, For)]
        lets = [stmt for loop in loops for stmt in loop.body if isinstance(stmt, Let)]
        if any(isinstance(let.op, Dot) for let in lets):
            roles[rows_of(kernel)] = chosen
    assert roles.keys() == {"i", "j"} and roles["j"] is not None


PAIRS = """
    x: bf16[i,c]
    y: bf16[j,c]
    j: axis[i]
    s[i,j] = sum[c](x[i,c] * y[j,c]) / 0.5
"""


@pytest.mark.slow
def test_a_tile_is_read_from_its_slot_in_another_order() -> None:
    """Rows of the one gradient are columns of the scores that are stored: as they lie, a consumer has a part of each row."""
    source = f"""
        {PAIRS}
        k: axis[i]
        dx[i,c] = sum[j](exp(s[i,j] - m[i]) / z[i] * y[j,c])
        dy[i,c] = sum[k](exp(s[k,i] - m[k]) / z[k] * x[k,c])
        return dx, dy
    """
    kernel = eq.compile(source, target="h200", sizes={"i": 2048, "c": 4096})
    assert kernel.certificate.ok and None not in kernel.plan.roles
    tile = next(ring.tile for ring in kernel.compiled.roles.kernels[2].rings if ring.tensor == "stored1")
    assert tile.dims == ("k", "i")
    assert len(compile_for_hopper(kernel.gluon)) == 3


def test_tiles_of_one_tensor_along_other_axes_have_rings_of_their_own() -> None:
    source = f"""
        {PAIRS}
        u[i,j] = sum[c](x[j,c] * y[i,c]) / 0.5
        y1[i] = logsumexp[j](s[i,j])
        y2[i] = logsumexp[j](u[i,j])
        z[i] = y1[i] + y2[i]
        return z
    """
    kernel = eq.compile(source, target="h200", sizes={"i": 2048, "c": 4096})
    assert kernel.certificate.ok
