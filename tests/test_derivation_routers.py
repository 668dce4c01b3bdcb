"""Derivations of programs that compute an index: what stands in it is part of what a kernel computes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from test_api_routers import EXPERTS, SWITCH, TABLE

import eqfuse as eq
from eqfuse.errors import EqfuseError
from eqfuse.kernel import Kernel

ROWS = "y[t,x] = s[t, argmax[x](s[t,x])] + L[argmin[x](s[t,x]) + 1, x]"
NESTED = "E: i32[x]\ny[t] = L[E[argmax[x](s[t,x])]]"
OWN = "y[t] = sum[x](s[t,x] * L[argmax[x](s[t,x]), x])"
SAME = "y[t] = sum[x](L[argmax[x](s[t,x])])"
PROGRAMS = {
    "table": TABLE,
    "switch": SWITCH,
    "experts": EXPERTS,
    "rows": ROWS,
    "nested": NESTED,
    "own": OWN,
    "same": SAME,
}


@cache
def kernel(name: str) -> Kernel:
    return eq.compile(PROGRAMS[name], target="cpu", verify=False, native="off")


@pytest.mark.parametrize("wrt", ["h", "G"])
@pytest.mark.slow
def test_gradients_of_a_router_are_derived(wrt: str) -> None:
    """What is stored is numbered as it is made, whoever reads it first."""
    text = str(eq.grad(EXPERTS, wrt=(wrt,)))
    found = eq.compile(text, target="cpu", verify=False, native="off", reassociate="exact")
    verdict = found.derivation.check()
    assert verdict, verdict.why
    stored = [o.name for k in found.plan.kernels for o in k.outputs if o.name.startswith("stored")]
    assert len(stored) > 1 and stored == [f"stored{number + 1}" for number in range(len(stored))]


@pytest.mark.slow
def test_a_router_s_gradient_reads_what_was_chosen() -> None:
    """The sum over all experts is over those of a token alone, in an order that is derived: its positions are found by a reduction."""
    text = str(eq.grad(EXPERTS, wrt=("h",)))
    found = eq.compile(text, target="cpu", verify=False, native="off")
    assert found.plan.order and "sum[x]" not in str(found.loops)
    verdict = found.derivation.check(text)
    assert verdict, verdict.why
    assert not found.derivation.proof.gaps and {"select-position", "rename-axis"} <= {*found.derivation.rules}


def changed(data: dict[str, Any], old: str, new: str) -> eq.Verdict:
    """The verdict once `old` is `new` in the texts of leaves, in the terms and where they are explained alike."""
    text = json.dumps(data)
    assert old in text
    return eq.Derivation.from_json(text.replace(old, new)).check()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(but=["rows", "same", "own", "nested"])
def test_a_derivation_with_a_computed_index_holds(name: str) -> None:
    derivation = kernel(name).derivation
    verdict = derivation.check(PROGRAMS[name])
    assert verdict, verdict.why
    assert "REFUSED" not in kernel(name).explain()
    assert kernel(name).explain("latex") and kernel(name).explain("html")
    again = eq.Derivation.from_json(derivation.to_json())
    assert again.check(PROGRAMS[name]).why == verdict.why
    assert again.to_json() == derivation.to_json()


def test_kernels_that_store_an_index_for_another_are_derived() -> None:
    found = eq.compile(EXPERTS, target="sm_90", verify=False)
    assert len(found.plan.kernels) > 1
    assert found.derivation.check(EXPERTS)


@pytest.mark.parametrize(
    "new", ["W[argmax_v_x, d, o]", "W[0, d, o]", "W[argmax_k_x, o, d]", "G[argmax_k_x, d, o]"]
)
def test_another_index_in_a_leaf_is_refused(new: str) -> None:
    data = json.loads(kernel("switch").derivation.to_json())
    verdict = changed(data, '"W[argmax_k_x, d, o]"', f'"{new}"')
    assert not verdict and "is not the load that it stands for" in verdict.why


def test_another_index_in_what_is_run_is_refused() -> None:
    data = json.loads(kernel("table").derivation.to_json())
    terms = data["terms"]
    position = terms.index(["Local", ["argmax_k_x"], []])
    leaf = next(number for number, row in enumerate(terms) if row[0] == "Leaf")
    (load,) = (row for row in terms if row[:2] == ["Apply1", ["L[]"]] and row[2] == [position])
    load[2] = [leaf]
    verdict = eq.Derivation.from_json(json.dumps(data)).check()
    assert not verdict and "y in kernel1: it does not compute the prepared form" in verdict.why


def test_another_index_of_the_program_is_refused() -> None:
    data = json.loads(kernel("switch").derivation.to_json())
    assert not changed(data, "W[e[t],d,o]", "W[t,d,o]")


def test_what_reads_a_row_that_the_same_loop_finds_is_not_merged() -> None:
    """The row is another one once more of the axis has been seen: no factor repairs the sum over it."""
    torch.manual_seed(0)
    s, table = torch.randn(3, 40), torch.randn(40, 40)
    found = eq.compile(OWN, target="cpu", native="off")
    torch.testing.assert_close(found(s=s, L=table), (s * table[s.argmax(1)]).sum(1))
    (group,) = (g.group for g in found.plan.kernels[0].groups)
    assert group.merge is None
    assert "sum[x](s[t, x] * L[argmax_k_x, x]) is not fused" in found.why_not()[0]
    with pytest.raises(EqfuseError, match="no rolling plan"):
        eq.compile(OWN, target="cpu", prefer="rolling")


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "resident"])
def test_a_row_that_does_not_vary_is_counted(prefer: str) -> None:
    torch.manual_seed(0)
    s, table = torch.randn(3, 40), torch.randn(40)
    found = eq.compile(SAME, target="cpu", native="off", prefer=prefer)
    torch.testing.assert_close(found(s=s, L=table), 40 * table[s.argmax(1)])
    assert found.certificate.ok and found.derivation.check()
