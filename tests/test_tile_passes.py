"""Passes from tile program to tile program: what they leave, that it is verified, and how it rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from triton_nests import Case, attention, softmax, split_log_sum

import eqfuse as eq
from eqfuse.loops.nodes import Buffer
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.parser import parse
from eqfuse.tile import interpreter
from eqfuse.tile.lower.program import lower
from eqfuse.tile.nodes import (
    Argument,
    Block,
    Elementwise,
    Kernel,
    Let,
    LoadTile,
    Positions,
    Store,
    TileProgram,
    Value,
)
from eqfuse.tile.passes import exp2
from eqfuse.tile.passes.pipeline import CPU_PASSES, GPU_PASSES, Pass, run_passes
from eqfuse.tile.printer import show
from eqfuse.verify.degrees import DegreeDomain
from eqfuse.verify.field.domain import FieldDomain

CASES: dict[str, tuple[Callable[[], Case], dict[str, str]]] = {
    "softmax": (softmax, {"x": "f16"}),
    "attention": (attention, dict.fromkeys("QKV", "f16")),
    "split_merge": (split_log_sum, {"x": "bf16"}),
}
ULP = 2.0**-23
"""A unit in the last place of float32, relative to the number, at most."""


def lowered(name: str) -> tuple[TileProgram, dict[str, str]]:
    case, dtypes = CASES[name]
    made = case()
    return lower(made.nest, parse(made.source), dtypes, made.configs), dtypes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_printed_after_the_passes(name: str, target: str, golden: Callable[[str, str], None]) -> None:
    program, dtypes = lowered(name)
    passes = CPU_PASSES if target == "cpu" else GPU_PASSES
    golden(f"tiles_{name}_{target}", show(run_passes(program, passes, dtypes)))


@pytest.mark.parametrize("passes", [GPU_PASSES, CPU_PASSES], ids=["gpu", "cpu"])
def test_a_pass_has_a_name_of_its_own_and_says_what_it_is(passes: tuple[Pass, ...]) -> None:
    assert len({each.name for each in passes}) == len(passes)
    assert all(each.why and each.field and each.rounds for each in passes)


@pytest.mark.parametrize("name", CASES)
def test_passes_leave_what_they_left_before(name: str) -> None:
    program, dtypes = lowered(name)
    once = run_passes(program, GPU_PASSES, dtypes)
    assert once.passes and once.passes == tuple(p.name for p in GPU_PASSES if p.name in once.passes)
    assert run_passes(once, GPU_PASSES, dtypes) is once


def pointwise(*ops: tuple[Value, Any]) -> TileProgram:
    """y[i] is the last of these values, which may read `x`, a tile that is loaded, and `s`, a scalar."""
    at, x, s = (
        Value("at", ("i",), "i32"),
        Value("x_tile", ("i",), "f32"),
        Value("s_arg", (), "f32"),
    )
    body = [
        Let(s, Argument("s")),
        Let(at, Positions("i")),
        Let(x, LoadTile("x", (at,), None, 0.0)),
        *(Let(value, op) for value, op in ops),
        Store("y", (at,), ops[-1][0], None),
    ]
    kernel = Kernel("k", ("i",), (Block("i", "grid", 4),), tuple(body))
    return TileProgram((kernel,), (Buffer("y", ("i",), "f32", True),))


X, S = Value("x_tile", ("i",), "f32"), Value("s_arg", (), "f32")


def tile(name: str) -> Value:
    return Value(name, ("i",), "f32")


def ran(program: TileProgram, x: Any, s: float, dtype: Any = "float32") -> Any:
    """What a program of `pointwise` computes of these numbers, a multiple of 4."""
    source, domain = parse("y[i] = x[i] * s"), FloatDomain(dtype)
    given = {"x": np.asarray(x, domain.dtype)}
    return interpreter.run(program, source, given, {"s": s}, {"i": len(x)}, domain, shards={})["y"]


# Exponentials to the base 2 ----------------------------------------------------------------------


def scaled_exponential() -> TileProgram:
    scaled, result = tile("scaled"), tile("result")
    return pointwise((scaled, Elementwise("mul", (X, S))), (result, Elementwise("exp", (scaled,))))


def test_an_exponential_to_the_base_2_rounds_no_worse_than_its_model() -> None:
    x = np.linspace(-80, 80, 4096, dtype=np.float32)
    plain = scaled_exponential()
    program = run_passes(plain, GPU_PASSES)
    assert program.passes == ("base-2 exponentials",) and "exp2(scaled)" in show(program)
    exact = ran(plain, x, 0.7, "float64")
    found = ran(program, x, float(np.float32(0.7)))
    errors = np.abs(found / exact - 1) / ULP
    exponents = np.abs(x.astype(np.float64) * 0.7)
    # The scalar, log2 e, their product and that with x are rounded.
    bound = np.array([exp2.error(e, 4) for e in exponents])
    assert (errors <= bound).all() and errors.max() > 1


def test_log2_e_is_a_formal_constant_of_the_field() -> None:
    domain = FieldDomain(seed=3)
    log2_e, ln_2 = (domain.irrational(name, (8, 1)) for name in ("log2_e", "ln_2"))
    x = domain.draw(np.linspace(-2, 2, 24).reshape(8, 3), np.random.default_rng(1))
    expected = domain.call("exp", [x])
    scaled = domain.call("mul", [x, log2_e])
    found = domain.call("exp2", [scaled])
    assert found.p is not None and (found.p == expected.p).all()
    np.testing.assert_allclose(found.shadow, expected.shadow)
    back = domain.call("mul", [scaled, ln_2])
    assert (back.p == x.p).all() and (back.q == x.q).all()
    for wrong in (domain.call("exp2", [x]), domain.call("exp", [scaled])):
        assert wrong.p is not None and not (wrong.p == expected.p).any()
    assert log2_e.p is not None and len(set(log2_e.p.ravel().tolist())) == 8  # another one in every trial


@pytest.mark.parametrize("rooted", ["a + b", "a - b", "log"])
def test_a_formal_constant_leaves_sums_in_exponents_as_they_are(rooted: str) -> None:
    """Exponentials of terms without a residue modulo q are products term by term, scaled or not."""
    domain = FieldDomain(seed=5)
    rng = np.random.default_rng(2)
    squares = domain.call("sq", [domain.draw(rng.uniform(1, 2, (4, 6)), rng)])
    a, b = (domain.call("sqrt", [domain.call("mul", [squares, domain.full((), c)])]) for c in (1.0, 4.0))
    log2_e = domain.irrational("log2_e", (4, 1))
    match rooted:
        case "log":
            total = domain.call("sub", [a, domain.call("log", [squares])])
        case _:
            total = domain.call("add" if "+" in rooted else "sub", [a, b])
    expected = domain.call("exp", [total])
    found = domain.call("exp2", [domain.call("mul", [total, log2_e])])
    assert expected.p is not None and found.p is not None and (found.p == expected.p).all()


def test_degrees_count_the_formal_constant() -> None:
    domain = DegreeDomain()
    x = domain.draw(np.zeros((1, 3)), np.random.default_rng(0))
    scaled = domain.call("mul", [x, domain.irrational("log2_e", (1, 1))])
    assert scaled.form.above == 2
    domain.call("exp2", [scaled])
    assert domain.exponent == 3 and not domain.discrete
    log = domain.call("log", [x])
    domain.call("exp2", [domain.call("mul", [log, domain.irrational("log2_e", (1, 1))])])
    assert not domain.discrete
    domain.call("mul", [log, x])
    assert domain.discrete


def test_the_certificate_lists_the_passes_that_were_verified() -> None:
    kernel = eq.compile("y[i] = logsumexp[j](x[i,j] * s)")
    assert "base-2 exponentials" in kernel.certificate.passes
    assert "passes that ran and were verified: " in str(kernel.certificate)
    plain = eq.compile("y[i] = sum[j](x[i,j])").certificate
    assert not plain.passes and "passes" not in str(plain)
