"""Masks by a finite number: what they cover is left out where rows tell that it vanishes, and walked where not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import eqfuse as eq
from bench.workloads import WORKLOADS
from eqfuse import certification, compiler
from eqfuse.devices import device_named
from eqfuse.differentiate.gradient import saving_gradient
from eqfuse.extract.warp_schedules import sized
from eqfuse.loops.dominance import parted
from eqfuse.loops.nodes import Nest
from eqfuse.loops.plan import KernelConfig, Roles
from eqfuse.loops.walk import loops_in
from eqfuse.lowered import lower_nest
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.nodes import Program
from eqfuse.terms.printer import show
from eqfuse.tile import interpreter
from eqfuse.tile.nodes import For, TileProgram, Value
from eqfuse.tile.roles import interpreter as roles_interpreter
from eqfuse.tile.roles.facts import rows_of
from eqfuse.tile.roles.nodes import RolesProgram
from eqfuse.tile.roles.rare import without_rare
from eqfuse.tile.walk import nested
from eqfuse.verify.check import check_stages
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.stages import roles_stages, tile_stages

CPU, H200 = device_named("cpu"), device_named("h200")
SIZES = {"b": 1, "h": 8, "g": 2, "i": 2048, "j": 2048, "d": 128, "e": 128}
HALF = {"Q": "f16", "K": "f16", "V": "f16"}
MASKS = {
    "causal": "j <= i",
    "window": "(j <= i) & (i - j < 5)",
    "padded": "(j <= i) & (3 <= j)",
    "none": "j > i + N(j)",
}


def _source(mask: str, number: str = "-1e30", score: str = "S[b,h,i,j]") -> str:
    return f"""
        S[b,h,i,j] = sum[d](Q[b,h,i,d] * K[b,h,j,d]) * 0.5
        T[b,h,i,j] = where({mask}, {score}, {number})
        P[b,h,i,j] = exp(T[b,h,i,j] - max[j](T[b,h,i,j]))
        O[b,h,i,e] = sum[j](P[b,h,i,j] * V[b,h,j,e]) / sum[j](P[b,h,i,j])
        return O
    """


def _planned(source: str, device: Any = H200, prefer: str | None = None) -> tuple[Any, Any]:
    derived = compiler.derive(source, None, False)
    dtypes = HALF if device is H200 else dict.fromkeys("QKV", "f32")
    return derived, compiler.pipeline(derived, SIZES, dtypes, device, prefer)


def _conditions(source: str, prefer: str | None = None) -> list[str]:
    derived, compiled = _planned(source, prefer=prefer)
    return list(_parted(derived.program, compiled.chosen.nest))


def _parted(program: Program, nest: Nest) -> Iterator[str]:
    for kernel in nest.kernels:
        for loop in loops_in(kernel.body):
            if (parts := parted(loop, program, kernel.ascending)) is not None:
                yield show(parts.condition)


def test_the_condition_is_the_weight() -> None:
    weight = "exp(-1e+30 - finite(max(max_j, -1e+30))) == 0.0"
    assert _conditions(_source("j <= i")) == [weight]
    assert _conditions(_source("j <= i"), "multi_pass") == ["max_j >= -1e+30", "exp(-1e+30 - max_j) == 0.0"]


@pytest.mark.parametrize(
    "source",
    [
        _source("j <= i", "-inf"),
        _source("S[b,h,i,j] > 0"),  # a mask of data: no range of positions
        "y[i] = sum[j](where(j <= i, x[i,j], -1e30))",  # every one counts
        "y[i] = max[j](where(j <= i, x[i,j], x[j,i] - 1e30))",  # no number
    ],
)
def test_other_loops_stay_whole(source: str) -> None:
    derived = compiler.derive(source, None, False)
    compiled = compiler.pipeline(derived, {**SIZES}, dict.fromkeys("QKVx", "f32"), CPU)
    assert not list(_parted(derived.program, compiled.chosen.nest))


# What is verified ---------------------------------------------------------------------------------------


def _small(mask: str, number: str = "-1e30") -> tuple[Any, Any, list[TileProgram]]:
    """A program, what it was compiled to, and its tile programs in small blocks."""
    derived, compiled = _planned(_source(MASKS[mask], number), prefer="rolling")
    made = []
    for size in (2, 4):
        (config,) = compiled.chosen.plan.configs
        blocks = tuple(replace(b, size=size) if b.axis in "ij" else b for b in config.blocks)
        made.append(
            lower_nest(
                compiled.chosen.nest,
                derived.program,
                compiled.dtypes,
                [KernelConfig(blocks)],
                H200,
                least_dot=1,
            )
        )
    return derived, compiled, made


def _verified(derived: Any, compiled: Any, tiles: list[TileProgram]) -> bool:
    program = derived.program
    stages = tile_stages(program, tiles, small_extents(program))
    return check_stages(program, stages, trials=8, dtypes=compiled.dtypes).ok


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.slow(but=["causal"])
def test_the_field_walks_all_positions(mask: str) -> None:
    """No exponential is 0 there: what the parts are is verified, and that nothing else is left out."""
    derived, compiled, tiles = _small(mask)
    assert _verified(derived, compiled, tiles)
    assert not _verified(derived, compiled, [_without_rare(program) for program in tiles])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.slow(but=["causal"])
def test_roles_compute_what_the_program_does(mask: str) -> None:
    derived, compiled, forms = _forms(mask)
    stages = roles_stages(derived.program, forms, small_extents(derived.program))
    certificate = check_stages(derived.program, stages, trials=8, dtypes=compiled.dtypes)
    assert certificate.ok, certificate.reason


def _without_rare(program: TileProgram) -> TileProgram:
    return replace(program, kernels=tuple(map(without_rare, program.kernels)))


def _forms(mask: str, number: str = "-1e30") -> tuple[Any, Any, list[RolesProgram]]:
    derived, compiled = _planned(_source(MASKS[mask], number))
    (config,) = compiled.chosen.plan.configs
    blocks = sized(config.blocks, rows_of(compiled.tile.kernels[0]), 128, 128)
    roles = Roles(blocks, 2, 2, (1,), True)
    nest = compiled.chosen.nest
    return (
        derived,
        compiled,
        certification.verified_roles(nest, derived.program, compiled.dtypes, H200, [roles]),
    )


# What is walked -----------------------------------------------------------------------------------------


class _Walked:
    """Counts the blocks that instances walk, those of rare loops apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.usual = self.rare = 0
        advance = interpreter.Instances._advance

        def counted(own: Any, loop: For, running: npt.NDArray[np.bool_], *, everywhere: bool) -> None:
            if loop.rare:
                self.rare += int(running.sum())
            else:
                self.usual += int(running.sum())
            advance(own, loop, running, everywhere=everywhere)

        monkeypatch.setattr(interpreter.Instances, "_advance", counted)


EXTENTS = {"b": 1, "h": 2, "i": 24, "j": 24, "d": 3, "e": 2}


def _drawn(scale: float = 1.0) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(0)
    shapes = {"Q": "bhid", "K": "bhjd", "V": "bhje"}
    return {
        name: scale * generator.normal(size=[EXTENTS[axis] for axis in axes]) for name, axes in shapes.items()
    }


def _run(derived: Any, program: TileProgram, given: Mapping[str, Any], dtype: str = "float32") -> Any:
    found = interpreter.run(program, derived.program, given, {}, EXTENTS, FloatDomain(dtype), shards={})
    return found["O"]


@pytest.mark.parametrize("mask", ("causal", "window"))
@pytest.mark.parametrize("number", ("-1e30", "-1e9", "-65504.0", "-3.4028234663852886e38"))
def test_a_number_walks_the_blocks_that_an_infinity_does(
    mask: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for masked_by in ("-inf", number):
        derived, _, tiles = _small(mask, masked_by)
        walked = _Walked(monkeypatch)
        found = [_run(derived, program, _drawn()) for program in tiles]
        expected = eq.reference(derived.program.source)(**_drawn())
        for each in found:
            np.testing.assert_allclose(each, expected, atol=4e-3)
        counts.append((walked.usual, walked.rare))
        monkeypatch.undo()
    assert counts[0] == counts[1] and counts[1][1] == 0


ROWS = {
    "wholly masked": ("padded", "-1e30", 1.0),
    "all rows masked": ("none", "-1e9", 1.0),
    "scores below the number": ("causal", "-3.0", 30.0),
    "scores near the number": ("causal", "-100.0", 40.0),
}


@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_the_number_counts_in(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, number, scale = ROWS[rows]
    derived, _, tiles = _small(mask, number)
    given = _drawn(scale)
    expected = eq.reference(derived.program.source)(**given)
    for program in tiles:
        walked = _Walked(monkeypatch)
        np.testing.assert_allclose(_run(derived, program, given), expected, rtol=1e-2, atol=4e-3)
        assert walked.rare
        monkeypatch.undo()


def test_what_is_left_out_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: walked or not, where the weights are 0 in floats."""
    derived, _, tiles = _small("window")
    given = _drawn()
    for program in tiles:
        walked = _Walked(monkeypatch)
        found = _run(derived, program, given)
        assert not walked.rare
        monkeypatch.setattr(interpreter.Instances, "_elementwise", _all_differ(interpreter.Instances))
        np.testing.assert_array_equal(_run(derived, program, given), found)
        assert walked.rare
        monkeypatch.undo()


def _all_differ(cls: Any) -> Any:
    """Nothing equals a number."""
    elementwise = cls._elementwise

    def changed(own: Any, value: Value, fn: str, args: Any) -> Any:
        found = elementwise(own, value, fn, args)
        return np.zeros_like(found) if fn == "eq" else found

    return changed


@pytest.mark.parametrize("rows", ["wholly masked", "scores below the number"])
def test_roles_walk_such_rows_alone(rows: str) -> None:
    mask, number, scale = ROWS[rows]
    derived, _, forms = _forms(mask, number)
    given = _drawn(scale)
    expected = eq.reference(derived.program.source)(**given)
    for form in forms:
        (kernel,) = form.specialized
        rare = [s.axis for s in nested(kernel.roles[1].body) if isinstance(s, For) and s.rare]
        assert rare == ["j_rest", "j_rest", "j_single"]  # is anything seen; rows that see nothing; others
        domain = FloatDomain("float64")
        found = roles_interpreter.run(form, derived.program, given, {}, EXTENTS, domain, shards={})
        np.testing.assert_allclose(found["O"], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ("causal_prefill", "gqa_prefill", "softcap_prefill", "window_prefill"))
@pytest.mark.slow(but=["gqa_prefill"])
def test_programs_have_the_plan_that_an_infinity_gives(name: str) -> None:
    source = WORKLOADS[name].source
    plans = []
    for number in ("-inf", "-1e30", "-1e9"):
        derived = compiler.derive(source.replace("-inf", number), None, False)
        sizes = {**SIZES, "h": 32, "k": 8}
        plan = compiler.pipeline(derived, sizes, HALF, H200).chosen.plan
        plans.append((plan.schedule, plan.configs, plan.roles))
    assert plans[0] == plans[1] == plans[2]


# Calls --------------------------------------------------------------------------------------------------

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("number", ("-1e30", "-1e9", "min"))
@pytest.mark.slow(but=["-1e30-f32", "min-bf16"])
def test_calls(dtype: str, number: str) -> None:
    """Rows of which the mask leaves nothing have the mean of all positions, as torch has it."""
    torch.manual_seed(0)
    value = torch.finfo(TORCH[dtype]).min if number == "min" else float(number)
    declared = "".join(
        f"{name}: {dtype}[b,h,{axes}]\n" for name, axes in (("Q", "i,d"), ("K", "j,d"), ("V", "j,e"))
    )
    source = declared + _source("(j <= i) & (9 <= j)", repr(value)).replace("\n        ", "\n")
    Q, K, V = (torch.randn(1, 2, 150, 8).to(TORCH[dtype]) for _ in range(3))
    i, j = torch.arange(150)[:, None], torch.arange(150)[None]
    scores = torch.where((j <= i) & (j >= 9), Q.double() @ K.double().mT * 0.5, value)
    expected = torch.softmax(scores, -1) @ V.double()
    for native in ("off", "wait"):
        found = eq.compile(source, target="cpu", verify=False, prefer="rolling", native=native)(Q=Q, K=K, V=V)
        assert isinstance(found, torch.Tensor)
        assert (found.double() - expected).abs().max() < 8 * max(torch.finfo(TORCH[dtype]).eps, 1e-6)


WIDE = {"f32": torch.float32, "f64": torch.float64}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("first", (0, 3))
@pytest.mark.parametrize("number", ("-1e3", "-1e9", "-1e30", "min"))
@pytest.mark.slow(but=["-1e30-3-f64"])
def test_gradients(number: str, first: int, dtype: str) -> None:
    """Of the weights that are computed again, in rows of which the mask leaves nothing among others: 1 / n, as torch has them."""
    value = torch.finfo(torch.float32).min if number == "min" else float(number)
    source = _source(f"(j <= i) & ({first} <= j)", repr(value))
    drawn = [torch.randn(1, 2, 40, 8, dtype=WIDE[dtype]) for _ in range(4)]
    *leaves, cotangent = (each.double().requires_grad_() for each in drawn)
    expected = torch.autograd.grad(_masked(*leaves, first, value), leaves, cotangent)
    found = _gradients(source, drawn)
    close = {"f32": {"rtol": 2e-3, "atol": 2e-4}, "f64": {"rtol": 1e-6, "atol": 1e-8}}[dtype]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **close)


@pytest.mark.parametrize(("number", "is_exact"), [("-1e30", True), ("-1e3", False), ("-inf", False)])
def test_a_large_number_meets_a_saved_maximum_before_it_is_scaled(number: str, is_exact: bool) -> None:
    """-1e30 * log2 e less the same product is not 0 where a compiler fuses one of them with the difference."""
    made = saving_gradient(_source("j <= i", number), ["V"], saves="f32", halves=HALF)
    derived = compiler.derive(made.backward, None, False)
    dtypes = {t.name: "f32" if t.name in made.residuals else "f16" for t in derived.program.tensors}
    tile = str(compiler.pipeline(derived, SIZES, dtypes, H200).tile)
    assert "exp2(" in tile
    assert ("_plain * log2(e)" not in tile) == is_exact


@pytest.mark.slow
@pytest.mark.parametrize("masked", ["S[b,h,i,j] + mask[i,j]", "where((j <= i) & (3 <= j), S[b,h,i,j], fill)"])
def test_gradients_of_what_an_input_masks(masked: str) -> None:
    source = _source("j <= i").replace("where(j <= i, S[b,h,i,j], -1e30)", masked)
    *leaves, cotangent = (torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(4))
    i, j = torch.arange(40)[:, None], torch.arange(40)[None]
    keep, scores = (j <= i) & (j >= 3), leaves[0] @ leaves[1].mT * 0.5
    mask = torch.where(keep, 0.0, -1e30).double()
    scores = scores + mask if "mask" in masked else torch.where(keep, scores, -1e30)
    expected = torch.autograd.grad(torch.softmax(scores, -1) @ leaves[2], leaves, cotangent)
    given = {"mask": mask} if "mask" in masked else {"fill": -1e30}
    found = _gradients(source, [*leaves, cotangent], **given)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def _gradients(source: str, drawn: list[torch.Tensor], **given: Any) -> tuple[torch.Tensor, ...]:
    """Those of Q, K and V by a compiled kernel; the last of what is drawn is the cotangent."""
    *values, cotangent = (each.detach() for each in drawn)
    inputs = dict(zip("QKV", (each.clone().requires_grad_() for each in values), strict=True))
    made = eq.compile(source, target="cpu", verify=False)(**inputs, **given)
    assert isinstance(made, torch.Tensor)
    return torch.autograd.grad(made, list(inputs.values()), cotangent)


def _masked(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, first: int, value: float) -> torch.Tensor:
    i, j = torch.arange(40)[:, None], torch.arange(40)[None]
    scores = torch.where((j <= i) & (j >= first), Q @ K.mT * 0.5, value)
    return torch.softmax(scores, -1) @ V


@pytest.mark.parametrize(
    "source",
    [
        "k: axis[3]\nl: axis[4]\nc = all[k,l](l == 0)",
        "x: i32[i,j]\ny[i] = max[j](where(j <= i, x[i,j], -7))",
        "y[i] = max[j](where(j <= i, x[i,j], -7))",
        "x: i32[i,j]\nn[j] = j + 1\ny[i] = min[j](where(j <= i, x[i,j] * n[j], 5)) + 0 * sum[j](n[j])",
    ],
)
@pytest.mark.parametrize("prefer", [None, "multi_pass"])
def test_integers_have_no_infinity_in_the_place_of_a_number(source: str, prefer: str | None) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (5, 6)).astype(np.int32)
    kernel = eq.compile(source, target="cpu", native="off", prefer=prefer)
    given = {"x": x} if "x[" in source else {}
    np.testing.assert_array_equal(kernel(**given), eq.reference(source)(**given))
