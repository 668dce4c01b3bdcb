"""torch's `scan` and `associative_scan`: recurrences of the language, with the values and gradients that torch has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan
from torch.utils import _pytree as pytree

import eqfuse as eq
from eqfuse.errors import EqfuseError

Tensors = tuple[torch.Tensor, ...]


def along(combine: Callable[..., Any], xs: Any, dim: int, reverse: bool = False) -> Any:
    return associative_scan(combine, xs, dim, reverse=reverse, combine_mode="generic")


def affine(x: Tensors, y: Tensors) -> Tensors:
    return x[0] * y[0], y[0] * x[1] + y[1]


def online(x: Tensors, y: Tensors) -> Tensors:
    """A maximum, and a sum of exponentials below it."""
    high = torch.maximum(x[0], y[0])
    return high, x[1] * torch.exp(x[0] - high) + y[1] * torch.exp(y[0] - high)


def greatest(x: Tensors, y: Tensors) -> Tensors:
    """A maximum and where it is."""
    return torch.maximum(x[0], y[0]), torch.where(y[0] > x[0], y[1], x[1])


def gated(h: torch.Tensor, x: Tensors) -> Tensors:
    h = x[0] * h + x[1]
    return h, h.clone()


def two(h: Tensors, x: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Two states, of which the second reads the first."""
    return (h[0] * 0.9 + x, h[1] * 0.5 + h[0]), h[1] * 2 + h[0]


def memory(h: torch.Tensor, x: Tensors) -> Tensors:
    """A matrix of sums of products, which each position reads."""
    h = h * 0.9 + x[1][:, None] * x[2]
    return h, (x[0][:, None] * h).sum(0)


def lstm(state: Tensors, x: torch.Tensor, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    f, i, o, g = (x + state[0] @ w).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h, c), h.clone()


def gru(h: torch.Tensor, x: Tensors, w: torch.Tensor, u: torch.Tensor) -> Tensors:
    z, q = (x[0] + h @ w).sigmoid().chunk(2, -1)
    h = (1 - z) * (x[1] + q * (h @ u)).tanh() + z * h
    return h, h.clone()


def delta(state: torch.Tensor, x: Tensors) -> Tensors:
    q, k, v = x
    state = state - ((state @ k) - v)[:, None] * k
    return state, state @ q


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def p(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Tensors]]] = {
    "sum": (lambda x: along(torch.add, x, 1), lambda: (r(3, 9),)),
    "product, first axis": (lambda x: along(torch.mul, x, 0), lambda: (r(5, 4),)),
    "maximum from the end": (lambda x: along(torch.maximum, x, -1, True), lambda: (r(3, 9),)),
    "affine": (lambda a, b: along(affine, (a, b), 1), lambda: (p(3, 9, 2), r(3, 9, 2))),
    "affine from the end": (lambda a, b: along(affine, (a, b), 1, True)[1], lambda: (p(3, 9, 2), r(3, 9, 2))),
    "by name": (
        lambda a, b: along(
            lambda x, y: {"p": x["p"] * y["p"], "h": y["p"] * x["h"] + y["h"]}, {"p": a, "h": b}, 0
        )["h"],
        lambda: (p(7, 3), r(7, 3)),
    ),
    "log-sum-exp": (lambda s, x: along(online, (s, x), 1), lambda: (r(3, 9), p(3, 9))),
    "running sums of running sums": (
        lambda x: along(torch.add, along(torch.add, x, 1), 2),
        lambda: (r(2, 5, 7),),
    ),
    "softmax behind": (lambda x: torch.softmax(along(torch.add, x, 1), -1), lambda: (r(3, 9),)),
    "gates": (lambda h, a, x: scan(gated, h, (a, x), dim=1), lambda: (r(3), p(3, 9), r(3, 9))),
    "gates from the end": (
        lambda h, a, x: scan(gated, h, (a, x), dim=1, reverse=True),
        lambda: (r(3, 2), p(3, 9, 2), r(3, 9, 2)),
    ),
    "a number": (lambda h, a, x: scan(gated, h, (a, x)), lambda: (r(), p(9), r(9))),
    "one position": (lambda h, a, x: scan(gated, h, (a, x)), lambda: (r(4), p(1, 4), r(1, 4))),
    "two states": (lambda h, g, x: scan(two, (h, g), x, dim=1), lambda: (r(3), r(3), r(3, 9))),
    "max-plus": (
        lambda h, s, x: scan(lambda h, x: (torch.maximum(h + x[0], x[1]), h * 2), h, (s, x)),
        lambda: (r(4), r(7, 4), r(7, 4)),
    ),
    "a product with weights": (
        lambda h, x, w: scan(lambda h, x: (0.5 * h + x @ w, (0.5 * h + x @ w).exp()), h, x),
        lambda: (r(4), r(7, 3), r(3, 4)),
    ),
    "linear attention": (lambda h, *x: scan(memory, h, x), lambda: (r(4, 5), r(7, 4), r(7, 4), r(7, 5))),
    "tanh": (lambda h, x: scan(lambda h, x: (torch.tanh(h + x), h * 2), h, x), lambda: (r(4), r(7, 4))),
    "all of an axis": (lambda h, x: scan(lambda h, x: (h.mean() + x, h * 2), h, x), lambda: (r(4), r(7, 4))),
    "another position": (lambda h, x: scan(lambda h, x: (h.roll(1, 0).sin() + x, h * 2), h, x), lambda: (r(4), r(7, 4))),
    "states of one another": (
        lambda h, x: scan(lambda h, x: ((h[0] + h[1] + x, h[0] - x), h[0] * 2), (h, h.sin()), x),
        lambda: (r(4), r(7, 4)),
    ),
    "lstm": (lambda h, c, x, w: scan(lambda s, x: lstm(s, x, w), (h, c), x), lambda: (r(3, 4), r(3, 4), r(7, 3, 16), r(4, 16) / 2)),
    "gru from the end": (
        lambda h, x, y, w, u: scan(lambda h, x: gru(h, x, w, u), h, (x, y), dim=1, reverse=True),
        lambda: (r(3, 4), r(3, 7, 8), r(3, 7, 4), r(4, 8) / 2, r(4, 4) / 2),
    ),
    "delta rule": (
        lambda s, q, k, v: scan(delta, s, (q, k, v)), lambda: (r(4, 5), r(7, 5) / 3, r(7, 5) / 3, r(7, 4))
    ),
    "one in order, one of it that merges": (
        lambda h, c, x: scan(lambda s, x: ((s[0].tanh() + x, s[1] * 0.5 + s[0].sum()), s[1] * 2), (h, c), x),
        lambda: (r(4), r(4), r(7, 4)),
    ),
    "a transposed view": (lambda x: along(torch.maximum, x.mT, 2), lambda: (r(2, 9, 3),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    fn, inputs = CASES[name]
    torch.manual_seed(0)
    xs = inputs()
    program = eq.from_torch(fn, *xs)
    found = []
    for each in (program, fn):
        ys = [x.clone().requires_grad_() for x in xs]
        out, form = pytree.tree_flatten(each(*ys))
        torch.manual_seed(1)
        total = sum((o * torch.randn(o.shape)).sum() for o in out)
        found.append(([*out, *torch.autograd.grad(total, ys)], form))
    assert found[0][1] == found[1][1]
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_program_of_one_length_runs_at_others() -> None:
    program = eq.from_torch(CASES["gates"][0], *CASES["gates"][1]())
    for rows, length in ((2, 40), (1, 1), (5, 3)):
        xs = r(rows), p(rows, length), r(rows, length)
        for ours, theirs in zip(program(*xs), scan(gated, xs[0], xs[1:], dim=1), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["affine from the end", "log-sum-exp", "gates from the end", "two states"])
def test_they_are_scanned(name: str) -> None:
    fn, inputs = CASES[name]
    program = eq.from_torch(fn, *inputs())
    assert "scan" in {plan.schedule for plan in program.kernel.plans()}


def test_the_text_is_a_recurrence() -> None:
    program = eq.from_torch(lambda a, b: along(affine, (a, b), 1)[1], p(3, 9), r(3, 9))
    assert "scan2[j, i] = a[i, j] * scan2[j - 1, i] + b[i, j]" in program.source


@pytest.mark.parametrize(
    "combine, dtype", [(torch.add, torch.int64), (torch.mul, torch.int64), (torch.add, torch.float64)]
)
def test_dtypes(combine: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.randint(-3, 4, (3, 9)).to(dtype)
    found = eq.from_torch(lambda x: along(combine, x, 1), x)(x)
    assert found.dtype == dtype and torch.equal(found, along(combine, x, 1))


def test_positions_of_integers() -> None:
    x, places = r(3, 9), torch.arange(9).expand(3, 9).clone()

    def fn(x: torch.Tensor, places: torch.Tensor) -> Any:
        return along(greatest, (x, places), 1)[1]

    assert torch.equal(eq.from_torch(fn, x, places)(x, places), fn(x, places))


def test_half_precision_is_computed_in_float32() -> None:
    xs = [x.bfloat16() for x in (r(3), p(3, 9), r(3, 9))]
    _, found = eq.from_torch(CASES["gates"][0], *xs)(*xs)
    _, exact = scan(gated, xs[0].float(), (xs[1].float(), xs[2].float()), dim=1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16())


OUTSIDE = r(4)
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "not in the language": (
        lambda h, x: scan(lambda h, x: (h + torch.lgamma(x), h * 2), h, x), "aten.lgamma is not expressible"),
    "extremes of integers": (
        lambda h, x: along(torch.maximum, (x * 9).long(), 0), "its step is an extreme of integers"),
    "a tensor by its name": (
        lambda h, x: scan(lambda h, x: (h * OUTSIDE + x, h * 2), h, x), "its step reads 'OUTSIDE'"),
    "pointwise on a CPU": (
        lambda h, x: associative_scan(torch.add, x, 0), "combine_mode='pointwise'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_the_reason(name: str) -> None:
    fn, why = REFUSED[name]
    with pytest.raises(EqfuseError) as raised:
        eq.from_torch(fn, r(4), r(7, 4))
    assert why in str(raised.value)


def _agree(
    compiled: Callable[..., torch.Tensor],
    fn: Callable[..., torch.Tensor],
    xs: Sequence[torch.Tensor],
    above: torch.Tensor,
) -> None:
    """Values, and gradients by what is above, of two functions."""
    found = []
    for each in (compiled, fn):
        ys = [x.clone().requires_grad_() for x in xs]
        out = each(*ys)
        found.append([out, *torch.autograd.grad(out, ys, above)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_back_end_takes_scans() -> None:
    def fn(h: torch.Tensor, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(scan(gated, h, (a, x), dim=1)[1]) * 2  # type: ignore[no-any-return]

    eq.torch.report(reset=True)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="eqfuse", options={"rest": "aot_eager"})
    _agree(compiled, fn, (r(4), p(4, 300), r(4, 300)), r(4, 300))
    assert "eqfuse took 1 of 1 regions" in str(eq.torch.report())


def test_the_back_end_takes_associative_scans() -> None:
    """The operator of `combine_mode="pointwise"`, which torch's own function has on a GPU alone. torch's gradient of it leaves out
    what one tensor of the state has from another, so that the kernel is compared with the slices of "generic"."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made = torch.ops.higher_order.associative_scan(
            lambda a, b, c, d: [a * c, c * b + d], [a.T.contiguous(), b.T.contiguous()], ()
        )
        return made[1].T  # type: ignore[no-any-return]

    eq.torch.report(reset=True)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="eqfuse", options={"rest": "aot_eager", "take": "always"})
    _agree(compiled, lambda a, b: along(affine, (a, b), 1)[1], (p(4, 30), r(4, 30)), r(4, 30))
    assert "eqfuse took 1 of 1 regions" in str(eq.torch.report())


def test_the_back_end_takes_steps_that_do_not_merge() -> None:
    def fn(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return scan(lambda h, x: (torch.tanh(h) + x, h * 2), h, x)[1]  # type: ignore[no-any-return]

    eq.torch.report(reset=True)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="eqfuse", options={"rest": "aot_eager", "take": "always"})
    _agree(compiled, fn, (r(4), r(7, 4)), r(7, 4))
    assert "eqfuse took 1 of 1 regions" in str(eq.torch.report())


def test_integers_that_do_not_merge() -> None:
    h, x = torch.randint(0, 5, (4,)), torch.randint(0, 5, (7, 4))

    def fn(h: torch.Tensor, x: torch.Tensor) -> Any:
        return scan(lambda h, x: ((h * 3 + x) % 7, h + 0), h, x)

    for ours, theirs in zip(eq.from_torch(fn, h, x)(h, x), fn(h, x), strict=True):
        assert ours.dtype == torch.int64 and torch.equal(ours, theirs)


def test_other_operators_that_call_graphs_are_refused() -> None:
    with pytest.raises(EqfuseError, match="cond is not expressible: it is no operator of ATen"):
        eq.from_torch(lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)), r(3))


def test_programs_without_scans_need_nothing_of_how_torch_traces_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("scan", "associative_scan"):  # versions of torch call it otherwise
        monkeypatch.delattr(import_module(f"torch._higher_order_ops.{module}"), "_maybe_compile_and_run_fn")
    x = r(3, 5)
    torch.testing.assert_close(eq.from_torch(lambda x: x.softmax(-1), x)(x), x.softmax(-1))


def test_random_numbers_of_each_step_are_refused() -> None:
    def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = h * x + torch.rand(3)
        return h, h.clone()

    with pytest.raises(eq.EqfuseError, match="random numbers that each step draws"):
        eq.from_torch(lambda h, x: scan(step, h, x, dim=0), torch.randn(3), torch.randn(4, 3))
