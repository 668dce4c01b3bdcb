"""Consumers that share the columns of sums: latent attention, whose keys are its values."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import eqfuse as eq
from bench.mutants_roles import MUTANTS
from bench.workloads import WORKLOADS
from eqfuse import certification, compiler
from eqfuse.compiled import Asked, Compiled
from eqfuse.derived import Derived
from eqfuse.devices import device_named
from eqfuse.extract.unsuited import Unsuited
from eqfuse.extract.warp_schedules import sized
from eqfuse.loops.plan import Roles
from eqfuse.lowered import in_roles, lower_nest
from eqfuse.specialize_warps import other_roles, specialized
from eqfuse.terms.floats import FloatDomain
from eqfuse.tile.check import TileError
from eqfuse.tile.gluon.aot import compile_for_hopper
from eqfuse.tile.names import Fresh
from eqfuse.tile.nodes import Dot, Elementwise, For, Let, LoadTile, ReduceTile, Value
from eqfuse.tile.roles.check import check
from eqfuse.tile.roles.facts import rows_of
from eqfuse.tile.roles.interpreter import run
from eqfuse.tile.roles.nodes import Columns, LoadShared, MmaAsync, MmaWait, RolesKernel, RolesProgram, Store
from eqfuse.tile.roles.resources import fits
from eqfuse.tile.roles.sharing import shared
from eqfuse.tile.triton.wrap import wrap
from eqfuse.tile.walk import nested
from eqfuse.verify.check import check_stages
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.stages import roles_stages

PRICED = device_named("h200")
assert PRICED.roles is not None
H200 = replace(PRICED, name="h200, every kind of roles", roles=replace(PRICED.roles, unproven=frozenset()))
"""One on which they have run."""
LATENT = WORKLOADS["mla"].source
SIZES = {"b": 32, "h": 128, "j": 2048, "d": 512, "e": 512, "r": 64}
HALF = {"Q": "f16", "Qr": "f16", "C": "f16", "R": "f16"}


@pytest.fixture(scope="module")
def latent() -> tuple[Derived, Compiled]:
    derived = compiler.derive(LATENT, None, False, assume_finite=True)
    return derived, compiler.pipeline(derived, SIZES, HALF, H200)


def _roles(
    compiled: Compiled, delayed: tuple[int, ...] = (), *, persistent: bool = False, led: bool = False
) -> Roles:
    config = compiled.chosen.plan.configs[0]
    blocks = sized(config.blocks, rows_of(compiled.tile.kernels[0]), 64, 64)
    return Roles(blocks, 3 if led else 2, 2, delayed, persistent, columns=True, led=led)


def _all(compiled: Compiled, roles: Roles) -> list[Roles | None]:
    return [roles, *(None for _ in compiled.tile.kernels[1:])]


def _divided(latent: tuple[Derived, Compiled], roles: Roles) -> RolesProgram:
    derived, compiled = latent
    nest, configs = compiled.chosen.nest, compiled.chosen.plan.configs
    return in_roles(nest, derived.program, compiled.dtypes, H200, _all(compiled, roles), configs)


def _kernel(program: RolesProgram) -> RolesKernel:
    (kernel,) = program.specialized
    return kernel


SMALL = {"b": 1, "h": 3, "j": 23, "d": 6, "e": 6, "r": 3}


def _drawn(length: int = 23) -> dict[str, npt.NDArray[np.float64]]:
    generator, sizes = np.random.default_rng(0), {**SMALL, "j": length}
    shapes = {"Q": "bhd", "Qr": "bhr", "C": "bjd", "R": "bjr"}
    return {name: generator.normal(size=[sizes[axis] for axis in axes]) for name, axes in shapes.items()}


def _run(form: RolesProgram, derived: Derived, scale: float = 0.4, length: int = 23) -> Any:
    domain, shards, sizes = FloatDomain("float64"), {"j_shard": 2}, {**SMALL, "j": length}
    return run(form, derived.program, _drawn(length), {"scale": scale}, sizes, domain, shards=shards)["O"]


@pytest.mark.parametrize("finite", [True, False])
def test_latent_attention_has_roles_by_columns(finite: bool) -> None:
    """Nothing needs to be promised: its masks end where its tensors do."""
    derived = compiler.derive(LATENT, None, False, assume_finite=finite)
    chosen = compiler.pipeline(derived, SIZES, HALF, PRICED).chosen.plan
    assert chosen.roles and chosen.roles[0] is not None
    assert "3 consumers by columns, one of which leads" in chosen.code


def test_prices_choose_no_kind_of_roles_that_has_not_run(latent: tuple[Derived, Compiled]) -> None:
    assert PRICED.roles is not None
    device = replace(
        PRICED, name="h200, rows", roles=replace(PRICED.roles, unproven=frozenset({"columns", "led"}))
    )
    assert "columns" not in compiler.pipeline(latent[0], SIZES, HALF, device).chosen.plan.code


def test_one_copy_of_the_latent_tile_is_read_by_both_products(latent: tuple[Derived, Compiled]) -> None:
    """As keys it is whole, as values it is a consumer's part of the columns."""
    kernel = _kernel(_divided(latent, _roles(latent[1])))
    _, first, second = kernel.roles
    issued = [s for s in nested(first.body) if isinstance(s, MmaAsync) and s.right.ring == "C_tiles"]
    assert {s.right.dims for s in issued} == {("e", "j"), ("j", "e_part")}
    stored = [[s.tensor for s in nested(role.body) if isinstance(s, Store)] for role in (first, second)]
    assert len(stored[0]) == 3 and len(stored[1]) == 1 and set(stored[1]) < set(stored[0])


def test_a_product_that_starts_from_another_ones_result_is_not_awaited_between(
    latent: tuple[Derived, Compiled],
) -> None:
    kernel = _kernel(_divided(latent, _roles(latent[1], (2,))))
    loop = next(s for s in nested(kernel.roles[1].body) if isinstance(s, For))
    first, second, late = [s for s in loop.body if isinstance(s, MmaAsync)]
    assert second.accumulator == first.pending and isinstance(late.left, type(first.pending))
    assert [s.pending for s in loop.body if isinstance(s, MmaWait)] == [second.pending, late.pending]


@pytest.mark.slow
def test_a_slot_that_is_filled_once_is_not_waited_for() -> None:
    """Nobody frees what a leader gives outside of loops, where a block has one item."""
    workload = WORKLOADS["causal_prefill"]
    sizes = {"b": 1, "h": 16, "i": 1024, "j": 1024, "d": 256, "e": 256}
    kernel = eq.compile(workload.source, target="h200", assume_finite=True)
    half = dict.fromkeys(("Q", "K", "V"), "bf16")
    compiled = compiler.pipeline(kernel.derived, sizes, half, PRICED)
    led = 0
    for _, made in other_roles(kernel.derived, compiled, sizes):
        (roles,) = made.chosen.plan.roles
        if roles is not None and roles.led and not roles.persistent:
            compiler.emit_gluon(kernel.derived, made, kernel.name)
            led += 1
    assert led


FORMS: dict[str, tuple[tuple[int, ...], bool, bool]] = {
    "plain": ((), False, False),
    "delayed": ((2,), True, False),
    "led": ((), False, True),
    "led persistent": ((), True, True),
}
"""Delayed products, whether the grid is persistent, and whether a consumer leads."""


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.slow(but=["led"])
def test_columns_are_verified(latent: tuple[Derived, Compiled], name: str) -> None:
    derived, compiled = latent
    delayed, persistent, led = FORMS[name]
    program, roles = derived.program, _roles(compiled, delayed, persistent=persistent, led=led)
    single = ((),) * len(compiled.tile.kernels)
    forms = certification.verified_roles(
        compiled.chosen.nest, program, compiled.dtypes, H200, _all(compiled, roles), single
    )
    stages = roles_stages(program, forms, small_extents(program))
    certificate = check_stages(program, stages, trials=8, dtypes=compiled.dtypes)
    assert certificate.ok, certificate.reason
    expected = eq.reference(program.source)(**_drawn(), scale=0.4)
    for form in forms:
        found = _run(form, derived)
        np.testing.assert_allclose(found, expected, atol=2e-3)  # weights are rounded to f16


HARMLESS = {"a slot is overwritten"}
"""Mistakes that some places do not show: of two rings that are freed together it is enough to wait for one."""


OWN = {
    "delayed": {
        "two consumers store what they share",
        "parts of another size",
        "a product under way is left out",
    },
    "led": {
        "nothing is given",
        "something is given twice",
        "the leader's phase is flipped",
        "parts of another size",
    },
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.slow
def test_mistakes_of_consumers_that_share_columns_are_caught(
    latent: tuple[Derived, Compiled], name: str
) -> None:
    derived, compiled = latent
    program = derived.program
    roles = _all(compiled, _roles(compiled, FORMS[name][0], led=FORMS[name][2]))
    form = certification.verified_roles(
        compiled.chosen.nest, program, compiled.dtypes, H200, roles, ((),) * 2
    )[0]

    def is_right(form: RolesProgram) -> bool:
        try:
            check(form)
            found = (_run(form, derived, *case) for case in right)
            return all(map(np.allclose, found, right.values()))
        except TileError:
            return False

    # The sign goes through a branch, and so does the mask of a shard that is shorter than a block.
    right = {case: _run(form, derived, *case) for case in ((0.4, 23), (-0.4, 23), (0.4, 3))}
    assert is_right(form)
    places = {mutant.name: list(islice(mutant.mutate(form), 3)) for mutant in MUTANTS}
    missed = {name: sum(map(is_right, made)) for name, made in places.items()}
    assert (
        OWN[name] <= {kind for kind, made in places.items() if made} and sum(map(len, places.values())) > 50
    )
    assert {name for name, count in missed.items() if count} <= HARMLESS, missed
    assert all(missed[name] < len(places[name]) for name in HARMLESS)


@pytest.mark.slow
def test_columns_compile_for_hopper(latent: tuple[Derived, Compiled]) -> None:
    derived, compiled = latent
    nest, configs = compiled.chosen.nest, compiled.chosen.plan.configs
    roles = _roles(compiled, (2,))
    made = in_roles(nest, derived.program, compiled.dtypes, H200, _all(compiled, roles), configs)
    chosen = replace(compiled.chosen, plan=replace(compiled.chosen.plan, roles=tuple(_all(compiled, roles))))
    source = compiler.emit_gluon(derived, replace(compiled, chosen=chosen, roles=made), "latent")
    (report,) = compile_for_hopper(source, sizes={"e": 512, "r": 64})
    assert report.machine["HGMMA"] and report.machine["UTMALDG"]


@pytest.mark.slow
def test_a_product_may_start_from_a_tile_in_a_slot() -> None:
    """Scores that another kernel has stored: they are read before the product is issued."""
    derived = compiler.derive(
        f"{LATENT.strip()}\nN[b,h] = max[e](O[b,h,e])\nreturn O, N\n", None, False, assume_finite=True
    )
    sizes = {**SIZES, "b": 512}
    asked = Asked(sizes, HALF, H200)
    read, started = set[str](), set[str]()
    for candidate in compiler.pipeline(derived, sizes, HALF, H200).candidates:
        if not candidate.plan.reason:
            tile = lower_nest(candidate.nest, derived.program, HALF, candidate.plan.configs, H200)
            _, roles = specialized(derived, asked, candidate, tile)
            for kernel in roles.specialized if roles else ():
                consumer = list(nested(kernel.roles[1].body))
                read |= {s.value.name for s in consumer if isinstance(s, LoadShared)}
                started |= {s.accumulator.name for s in consumer if isinstance(s, MmaAsync) and s.accumulator}
    assert read & started


def test_parts_of_a_tile_are_cut_where_its_layout_is(latent: tuple[Derived, Compiled]) -> None:
    """128 bytes of a row of 16-bit numbers lie together: 32 columns of 64 are no part of a tile."""
    _derived, compiled = latent
    kernel = _kernel(_divided(latent, _roles(compiled)))
    shards = {"j_shard": 2}
    assert fits(kernel, {**compiled.extents, **shards}, H200)
    assert fits(kernel, {**compiled.extents, **shards, "e": 128}, H200)
    assert not fits(kernel, {**compiled.extents, **shards, "e": 64}, H200)


TILE = Value("o", ("i", "e"), "f32")
WHOLE = Value("v", ("j", "e"), "f16")
PARTED: dict[str, tuple[Let, ...]] = {
    "a reduction over e": (Let(Value("most", ("i",), "f32"), ReduceTile("max", TILE, "e")),),
    "a product over e": (
        Let(WHOLE, LoadTile("V", (), None, 0.0)),
        Let(Value("s", ("i", "j"), "f32"), Dot(Value("p", ("i", "e"), "f16"), WHOLE, "e", None)),
    ),
    "v, whose columns consumers share, is computed with": (
        Let(WHOLE, LoadTile("V", (), None, 0.0)),
        Let(Value("w", ("j", "e"), "f16"), Elementwise("mul", (WHOLE, WHOLE))),
    ),
}


@pytest.mark.parametrize("why", PARTED)
def test_what_needs_all_columns_is_not_shared(why: str) -> None:
    with pytest.raises(Unsuited, match=why):
        shared(PARTED[why], Columns("e", "e_part", 2), ("v",), Fresh(()))


def test_a_long_operand_of_a_sum_keeps_its_sign() -> None:
    """Brackets go behind the operator: before it they would make a call of what stands above."""
    long = " * ".join(f"stride_of_a_dim_{n}" for n in range(8))
    lines = wrap(
        f"    x = load(base_pointer + start_of_a_block * stride_of_a_dim + {long} + other_offset_{'y' * 40})"
    )
    assert not any(line.strip().startswith("(") for line in lines)
    assert (
        eval(
            "".join(lines).split("=", 1)[1].strip(),
            {
                "load": float,
                "base_pointer": 1,
                "start_of_a_block": 2,
                "stride_of_a_dim": 3,
                f"other_offset_{'y' * 40}": 5,
                **{f"stride_of_a_dim_{n}": 1 for n in range(8)},
            },
        )
        == 13.0
    )
