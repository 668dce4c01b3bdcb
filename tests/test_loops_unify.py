"""One name for axes along which a kernel reads the same elements of an input."""

from __future__ import annotations

from functools import cache

import numpy as np

import eqfuse as eq
from eqfuse import compiler
from eqfuse.devices import device_named
from eqfuse.loops.nodes import Kernel, Let, Nest, Stmt, Store
from eqfuse.loops.unify import unified
from eqfuse.loops.walk import axes_of, expressions
from eqfuse.terms.nodes import Axis, Load, Local, Reduce, call, walk
from eqfuse.terms.sizes import bind
from eqfuse.terms.types import program_dtypes

LATENT = """
Q: f16[b, h, d]
C: f16[b, j, d]
S[b,h,j] = sum[d](Q[b,h,d] * C[b,j,d])
P[b,h,j] = exp(S[b,h,j] - max[j](S[b,h,j]))
O[b,h,e] = sum[j](P[b,h,j] / sum[j](P[b,h,j]) * C[b,j,e])
"""
SHAPES = {"Q": (32, 128, 512), "C": (32, 2048, 512)}


@cache
def _nests(source: str, sizes: tuple[tuple[str, tuple[int, ...]], ...]) -> list[Nest]:
    derived = compiler.derive(source, {}, strict_casts=False)
    extents = bind(derived.program, dict(sizes))
    device = device_named("h200")
    found = compiler.pipeline(derived, extents, program_dtypes(derived.program), device, None)
    return [candidate.nest for candidate in found.candidates]


def _loads(kernel: Kernel, tensor: str) -> set[Load]:
    nodes = walk(*expressions(kernel.body))
    return {node for node in nodes if isinstance(node, Load) and node.tensor == tensor}


def test_both_products_with_a_latent_tile_read_one_load() -> None:
    nests = _nests(LATENT, tuple(SHAPES.items()))
    fused = [nest for nest in nests if len(nest.kernels) == 1]
    assert fused
    for nest in fused:
        assert len(_loads(nest.kernels[0], "C")) == 1
        assert not {"d", "e"} <= axes_of(nest.kernels[0])


def test_the_axis_that_outputs_have_keeps_its_name() -> None:
    (nest, *_) = [nest for nest in _nests(LATENT, tuple(SHAPES.items())) if len(nest.kernels) == 1]
    assert "e" in axes_of(nest.kernels[0])


def test_the_result_is_that_of_two_names() -> None:
    rng = np.random.default_rng(0)
    queries, latent = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 7, 5))
    source = LATENT.replace("f16", "f64")
    found = eq.compile(source, prefer="rolling")(Q=queries, C=latent)
    np.testing.assert_allclose(np.asarray(found), eq.reference(source)(Q=queries, C=latent), rtol=1e-10)


def _x(axis: str) -> Load:
    return Load("x", (Axis("i"), Axis(axis)))


def _sum(name: str, axis: str) -> Let:
    return Let(name, (), Reduce("sum", axis, call("sq", _x(axis))))


STORE = Store("y", (Axis("i"),), (), call("add", Local("a", ()), Local("b", ())))
APART: tuple[Stmt, ...] = (_sum("a", "d"), _sum("b", "e"), STORE)


def test_of_two_axes_that_are_folded_the_first_name_stays() -> None:
    body = unified(APART, ("i",), {"x"})
    assert body == (_sum("a", "d"), _sum("b", "d"), STORE)


def test_axes_that_meet_in_a_statement_stay_two() -> None:
    outer = Store("z", (Axis("i"), Axis("d"), Axis("e")), ("d", "e"), call("mul", _x("d"), _x("e")))
    body: tuple[Stmt, ...] = (*APART, outer)
    assert unified(body, ("i",), {"x"}) == body


def test_axes_that_instances_share_out_stay_two() -> None:
    body: tuple[Stmt, ...] = (
        _sum("a", "d"),
        Store("y", (Axis("e"),), (), call("mul", Local("a", ()), _x("e"))),
    )
    assert unified(body, ("i", "e"), {"x"}) == body


def test_only_inputs_tell_that_extents_are_equal() -> None:
    assert unified(APART, ("i",), set()) == APART
