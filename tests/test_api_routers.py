"""Indices that a program computes: a router's experts, the row that a search found."""

from __future__ import annotations

import pytest
import torch
from everywhere import assert_same, everywhere

import eqfuse as eq
from eqfuse.errors import BindError, ParseError, TypeCheckError
from eqfuse.tile.triton.aot import compile_for

TABLE = """
e[t] = argmax[x](s[t,x])
y[t] = L[e[t]] + s[t, e[t]]
return y
"""
SWITCH = """
e[t] = argmax[x](sum[d](h[t,d] * G[x,d]))
y[t,o] = sum[d](h[t,d] * W[e[t],d,o])
return y, e
"""
EXPERTS = """
r: axis[2]
p[t,x] = sum[d](h[t,d] * G[x,d])
v[t,r], e[t,r] = topk[x,r](p[t,x])
w[t,r] = exp(v[t,r]) / sum[r](exp(v[t,r]))
y[t,o] = sum[r](w[t,r] * sum[d](h[t,d] * W[e[t,r],d,o]))
return y
"""

SEVERAL = """
r: axis[4]
v[t,r], e[t,r] = topk[x,r](s[t,x])
y[t,r] = where(e[t,r] < N(x), L[e[t,r]], 0)
return y
"""
"""More ranks than positions: behind the last position a list has none, which is N(x)."""


def given(t: int = 7, d: int = 20, x: int = 5, o: int = 9) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"h": torch.randn(t, d), "G": torch.randn(x, d), "W": torch.randn(x, o, d).transpose(1, 2)}


def experts(h: torch.Tensor, G: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    values, chosen = (h @ G.T).topk(2, 1)
    return torch.einsum("tr,td,trdo->to", values.softmax(1), h, W[chosen])


def test_rows_that_an_argmax_finds() -> None:
    torch.manual_seed(0)
    s, table = torch.randn(7, 5), torch.randn(5)
    found = everywhere(TABLE, s=s, L=table)
    assert_same(found, 1e-6)
    torch.testing.assert_close(found["torch"][0], table[s.argmax(1)] + s.amax(1))


@pytest.mark.slow
def test_one_expert_for_each_token() -> None:
    tensors = given()
    found = everywhere(SWITCH, **tensors)
    assert_same(found, 1e-5)
    chosen = (tensors["h"] @ tensors["G"].T).argmax(1)
    assert found["torch"][1].tolist() == chosen.tolist()


@pytest.mark.slow
def test_the_best_experts_weighted() -> None:
    tensors = given()
    found = everywhere(EXPERTS, **tensors)
    assert_same(found, 1e-5)
    torch.testing.assert_close(found["native"][0], experts(**tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefer", ["rolling", "split_k", "resident", "multi_pass"])
@pytest.mark.slow(but=["rolling"])
def test_every_schedule_routes(prefer: str) -> None:
    tensors = given()
    kernel = eq.compile(EXPERTS, target="cpu", prefer=prefer, native="off")
    torch.testing.assert_close(kernel(**tensors), experts(**tensors), rtol=1e-4, atol=1e-4)
    assert kernel.plan.schedule == prefer and kernel.certificate.ok


@pytest.mark.slow
def test_experts_that_one_kernel_does_not_hold_are_cut_into_several() -> None:
    """What decides is the cost: how many kernels, and what one stores for another, is what `explain` shows."""
    halves = "h: bf16[t,d]\nG: bf16[x,d]\nW: bf16[x,d,o]\n"
    kernel = eq.compile(halves + EXPERTS, target="sm_90", verify=False)
    assert all(report.registers > 0 for report in compile_for(kernel.triton, "sm_90"))
    cuts = {len(plan.kernels) for plan in kernel.plans()}
    assert 1 in cuts and max(cuts) > 1
    several = next(plan for plan in kernel.plans() if len(plan.kernels) > 1)
    assert "stored1" in str([output.name for each in several.kernels for output in each.outputs])
    assert len(kernel.plan.kernels) > 1
    values, positions = kernel.why_not()
    assert values.startswith("topk.v[x, r](") and positions.startswith("topk.k[x, r](")
    for reason in (values, positions):
        assert "kernel1 stores it" in reason and "for kernel2 (line 7)" in reason
        assert "the cheapest plan of fewer kernels: " in reason


def test_a_wrong_expert_is_refuted() -> None:
    assert eq.equivalent(SWITCH, SWITCH.replace("argmax[x](sum", "argmax[x](2 * sum")).ok
    assert not eq.equivalent(SWITCH, SWITCH.replace("argmax[x](sum", "argmin[x](sum")).ok
    swapped = EXPERTS.replace("W[e[t,r],d,o]", "W[e[t,1-r],d,o]")
    assert not eq.equivalent(EXPERTS, swapped).ok


def test_positions_outside_are_checked_as_those_of_gathers_are() -> None:
    tensors = given()
    with pytest.raises(BindError, match="'W': position . is outside a dimension of 2"):
        eq.compile(SWITCH)(**{**tensors, "W": tensors["W"][:2]})


@pytest.mark.parametrize("rows", [3, 2])
def test_ranks_past_the_end_are_read_nowhere(rows: int) -> None:
    """The tensor ends where its positions do: what is read behind it would be another's memory."""
    torch.manual_seed(0)
    s, table = torch.randn(5, rows), torch.randn(rows)
    found = everywhere(SEVERAL, s=s, L=table)
    assert_same(found, 1e-6)
    expected = torch.zeros(5, 4)
    expected[:, :rows] = table[s.argsort(1, descending=True)]
    torch.testing.assert_close(found["native"][0], expected)


def test_a_guard_of_a_computed_index_masks_the_access() -> None:
    text = eq.compile(SEVERAL, target="sm_90", verify=False).triton
    (read,) = (line for line in text.splitlines() if "tl.load(L_ptr" in line)
    assert "mask=r_in & lt" in read and "lt = " in text


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_ranks_past_the_end_that_nothing_guards_are_refused(target: str) -> None:
    unguarded = SEVERAL.replace("where(e[t,r] < N(x), L[e[t,r]], 0)", "L[e[t,r]]")
    kernel = eq.compile(unguarded, target=target, verify=False, native="off")
    s = torch.randn(5, 3)
    with pytest.raises(BindError, match="reads position 3 of dimension 0 of 'L', which has size 3"):
        kernel(s=s, L=torch.randn(3))
    if target == "cpu":
        assert kernel(s=s, L=torch.randn(4)).shape == (5, 4)  # a row for those that are no position
        assert kernel(s=torch.randn(5, 6), L=torch.randn(6)).shape == (5, 4)


def test_no_experts_have_no_position() -> None:
    tensors = given(x=0)
    with pytest.raises(BindError, match="empty, has no position to give"):
        eq.compile(SWITCH)(**tensors)


def test_no_tokens_are_routed_nowhere() -> None:
    tensors = given(t=0)
    found = eq.compile(SWITCH, native="off")(**tensors)
    assert found[0].shape == (0, 9)


@pytest.mark.slow
def test_gradients_go_to_the_experts_that_were_chosen() -> None:
    gradient = eq.grad(EXPERTS, wrt=("W", "h", "G"))
    assert eq.certify_gradient(EXPERTS, gradient).ok
    tensors = {name: x.detach().clone().requires_grad_() for name, x in given().items()}
    eq.compile(EXPERTS, native="off")(**tensors).sum().backward()
    exact = {name: x.detach().clone().requires_grad_() for name, x in given().items()}
    experts(**exact).sum().backward()
    for name, found in tensors.items():
        torch.testing.assert_close(found.grad, exact[name].grad, rtol=1e-3, atol=1e-3)


def test_an_index_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeCheckError, match=r"an index of 'W' is a real number: max\[x\]\(s\[t, x\]\)"):
        eq.compile("s: f32[t,x]\ny[t,d] = W[max[x](s[t,x]), d]")(s=torch.randn(3, 4), W=torch.randn(5, 6))
    with pytest.raises(ParseError, match="this cannot be an index"):
        eq.compile("y[t,d] = W[argmax[x](s[t,x]) * argmax[x](s[t,x]), d]")
