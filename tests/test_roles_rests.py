"""Masked products in roles: what is not finite in memory gets through where the mask holds, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import eqfuse as eq
from bench.mutants_roles import MUTANTS
from bench.workloads import WORKLOADS
from eqfuse import certification, compiler
from eqfuse.compiled import Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.extract.warp_schedules import sized
from eqfuse.loops.plan import Roles
from eqfuse.lowered import in_roles
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.types import program_dtypes
from eqfuse.tile.check import TileError
from eqfuse.tile.gluon.aot import compile_for_hopper
from eqfuse.tile.gluon.module import emit
from eqfuse.tile.nodes import For, If
from eqfuse.tile.roles.facts import rows_of
from eqfuse.tile.roles.interpreter import run
from eqfuse.tile.roles.nodes import AnyNonFinite, RolesProgram
from eqfuse.tile.walk import nested

H200 = device_named("h200")
SIZES = {"b": 1, "h": 32, "k": 8, "i": 8192, "j": 8192, "d": 128, "e": 128}
HALF = {"Q": "f16", "K": "f16", "V": "f16"}
SMALL = {"b": 1, "h": 2, "k": 2, "i": 7, "j": 7, "d": 3, "e": 4}

PREFIX = """
    S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale
    T[b,h,i,j] = where((j <= i) | (j < prefix), S[b,h,i,j], -inf)
    P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
    O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
"""
LENGTHS = """
    length: i32[b]
    S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * scale
    T[b,h,i,j] = where(j < length[b], S[b,h,i,j], -inf)
    P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
    O[b,h,i,e] = sum[j](P[b,h,i,j] / sum[j](P[b,h,i,j]) * V[b,h,j,e])
"""
PROGRAMS = {
    "causal": WORKLOADS["causal_prefill"].source,
    "window": WORKLOADS["window_prefill"].source,
    "prefix": PREFIX,
    "lengths": LENGTHS,
}
FORMS = {
    "causal": (2, 2, (1,), True),
    "window": (2, 2, (1,), False),
    "prefix": (3, 2, (), False),
    "lengths": (2, 3, (1,), True),
}
"""By program: consumers, slots, delayed products, and whether the grid is persistent."""


def _made(name: str) -> tuple[Derived, Compiled, Roles]:
    derived = compiler.derive(PROGRAMS[name], None, False)
    dtypes = {**program_dtypes(derived.program), **HALF}
    compiled = compiler.pipeline(derived, SIZES, dtypes, H200)
    consumers, slots, delayed, persistent = FORMS[name]
    (config,) = compiled.chosen.plan.configs
    blocks = sized(config.blocks, rows_of(compiled.tile.kernels[0]), 64 * consumers, 128)
    return derived, compiled, Roles(blocks, consumers, slots, delayed, persistent)


def _small(name: str) -> tuple[Derived, list[RolesProgram]]:
    derived, compiled, roles = _made(name)
    nest, program = compiled.chosen.nest, derived.program
    return derived, certification.verified_roles(nest, program, compiled.dtypes, H200, [roles])


def _given(name: str, wrong: float, places: tuple[int, ...]) -> dict[str, npt.NDArray[Any]]:
    """Arguments with rows of values that are not finite."""
    generator = np.random.default_rng(1)
    shapes = {"Q": "bhid", "K": "bhjd", "V": "bhje"}
    given: dict[str, npt.NDArray[Any]] = {
        tensor: generator.normal(size=[SMALL[axis] for axis in axes]) for tensor, axes in shapes.items()
    }
    for place in places:
        given["V"][..., place, 1:3] = wrong
    if name == "lengths":
        given["length"] = np.array([5], dtype=np.int32)
    return given


SCALARS: Mapping[str, dict[str, float]] = {"window": {"span": 3, "g": 1}, "prefix": {"prefix": 2}}
PLACES = {"causal": (1, 4, 6), "window": (0, 3, 6), "prefix": (3, 4), "lengths": (5, 6)}
"""Rows of values that some rows of the output do not see, or none."""


def _run(
    name: str, derived: Derived, form: RolesProgram, wrong: float, places: tuple[int, ...]
) -> tuple[Any, Any]:
    """What the roles compute, and what the program says."""
    given, scalars = _given(name, wrong, places), {"scale": 0.5, **SCALARS.get(name, {})}
    sizes = {axis: SMALL[axis] for axis in SMALL}
    found = run(form, derived.program, given, scalars, sizes, FloatDomain("float64"), shards={})
    with np.errstate(all="ignore"):
        expected = eq.reference(derived.program.source)(**given, **scalars)
    return found["O"], expected


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("wrong", (math.nan, math.inf))
@pytest.mark.slow(but=["inf-causal"])
def test_what_is_not_finite_gets_through_where_the_mask_holds_alone(name: str, wrong: float) -> None:
    derived, forms = _small(name)
    for form in forms:
        found, expected = _run(name, derived, form, wrong, PLACES[name])
        assert np.isfinite(expected).any()
        assert (not np.isfinite(expected).all()) == (name != "lengths")
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_roles_look_only_where_blocks_are_masked() -> None:
    """A causal loop looks at the tiles of its last blocks, in the branch that masks them."""
    derived, compiled, roles = _made("causal")
    program = in_roles(compiled.chosen.nest, derived.program, compiled.dtypes, H200, [roles])
    consumer = program.kernels[0].roles[1]
    loop = next(s for s in nested(consumer.body) if isinstance(s, For) and s.axis == "j")
    late = [s for s in loop.body if isinstance(s, If) and s.condition.name == "j_late"]
    assert [sum(isinstance(s, AnyNonFinite) for s in nested(when.body)) for when in late] == [0, 1]
    assert sum(isinstance(s, AnyNonFinite) for s in nested(loop.body)) == 1
    assert compiled.roles is not None  # chosen, though nothing is promised of what is masked


MISTAKES = (
    "consumers do not meet",
    "what is not finite stays",
    "nobody looks",
    "another column",
    "consumers have met once more",
)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.slow(but=["nobody looks"])
def test_mistakes_with_what_is_not_finite_are_caught(mistake: str) -> None:
    """In each place where one can be made: the first block, and those of the pipelined loop."""
    (mutant,) = [m for m in MUTANTS if m.name == mistake]
    derived, (form, _) = _small("causal")
    found = list(mutant.mutate(form))
    assert found
    given = [(wrong, places) for wrong in (math.nan, math.inf) for places in ((0,), (1,), (4,), (5,), (2, 3))]
    for mutated in found:
        assert any(_is_wrong(derived, mutated, *each) for each in given)


def _is_wrong(derived: Derived, form: RolesProgram, wrong: float, places: tuple[int, ...]) -> bool:
    try:
        np.testing.assert_allclose(*_run("causal", derived, form, wrong, places), atol=1e-3)
    except (TileError, AssertionError):
        return True
    return False


COMPILED = {"causal": False, "causal persistent": True, "lengths": False, "prefix": False}


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.slow
def test_masked_products_compile_for_hopper_without_spills(case: str) -> None:
    derived, compiled, roles = _made(case.partition(" ")[0])
    roles = replace(roles, consumers=2, slots=2, delayed=(1,), persistent=COMPILED[case])
    roles = replace(roles, blocks=sized(roles.blocks, "i", 128, 128))
    program = in_roles(compiled.chosen.nest, derived.program, compiled.dtypes, H200, [roles])
    source = emit(program, derived.program, compiled.dtypes, name="f")
    (report,) = compile_for_hopper(source, sizes={"d": 128, "e": 128})
    assert report.machine["HGMMA"] and report.machine["UTMALDG"]
    # a persistent form keeps some numbers of an item in memory, which are read once for each item
    assert report.kernel.spilled_bytes <= (64 if roles.persistent else 0)
    # the slot is written where products read it next
    text = report.kernel.assembly
    assert text.count("fence.proxy.async") >= 2 and "fma.rn.f16x2" in text


@pytest.mark.parametrize("finite", [True, False])
def test_short_masked_attention_has_roles_with_a_promise_or_without(finite: bool) -> None:
    derived = compiler.derive(PROGRAMS["causal"], None, False, assume_finite=finite)
    sizes = {"b": 4, "h": 32, "i": 1024, "j": 1024, "d": 64, "e": 64}
    dtypes = {**program_dtypes(derived.program), **HALF}
    assert compiler.pipeline(derived, sizes, dtypes, H200).chosen.plan.roles
