"""Definitions that read themselves one position before or after, reductions over selected positions, and the gradients of prefixes: scans,
as loops compute them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import eqfuse as eq
from eqfuse.errors import ParseError
from eqfuse.terms.nodes import free_axes, reductions
from eqfuse.terms.parser import parse
from eqfuse.terms.prefixes import alike, scanned

T = torch.Tensor
Values = dict[str, T]
Step = Callable[[T, int, Values], T]

STEPS: dict[str, tuple[str, float, Step]] = {
    "affine": ("a[i,t] * h[i,t-1] + b[i,t]", 0.0, lambda h, t, v: v["a"][:, t] * h + v["b"][:, t]),
    "a sum": ("h[i,t-1] + b[i,t]", 0.0, lambda h, t, v: h + v["b"][:, t]),
    "with a first value": (
        "where(t == 0, h0[i], a[i,t] * h[i,t-1] + b[i,t])",
        0.0,
        lambda h, t, v: v["h0"] if t == 0 else v["a"][:, t] * h + v["b"][:, t],
    ),
    "a running product": (
        "where(t == 0, 1, h[i,t-1]) * a[i,t]",
        0.0,
        lambda h, t, v: v["a"][:, t] if t == 0 else h * v["a"][:, t],
    ),
    "an average": ("0.9 * h[i,t-1] + 0.1 * b[i,t]", 0.0, lambda h, t, v: 0.9 * h + 0.1 * v["b"][:, t]),
    "a step towards": (
        "h[i,t-1] + (b[i,t] - h[i,t-1]) / 8",
        0.0,
        lambda h, t, v: h + (v["b"][:, t] - h) / 8,
    ),
    "negated": ("b[i,t] - h[i,t-1]", 0.0, lambda h, t, v: v["b"][:, t] - h),
    "that restarts": (
        "where(a[i,t] > 0.9, 0, h[i,t-1]) + b[i,t]",
        0.0,
        lambda h, t, v: torch.where(v["a"][:, t] > 0.9, 0, h) + v["b"][:, t],
    ),
    "a maximum": ("max(h[i,t-1], b[i,t])", -math.inf, lambda h, t, v: torch.maximum(h, v["b"][:, t])),
    "a longest path": (
        "max(h[i,t-1] + a[i,t], b[i,t]) - 0.5",
        -math.inf,
        lambda h, t, v: torch.maximum(h + v["a"][:, t], v["b"][:, t]) - 0.5,
    ),
    "a walk that does not go below 0": (
        "max(h[i,t-1] + b[i,t], 0)",
        -math.inf,
        lambda h, t, v: (h + v["b"][:, t]).clamp(min=0),
    ),
    "a minimum": (
        "min(b[i,t], h[i,t-1] + 0.25)",
        math.inf,
        lambda h, t, v: torch.minimum(v["b"][:, t], h + 0.25),
    ),
}


def values(rows: int, length: int, dtype: torch.dtype = torch.float32) -> Values:
    generator = torch.Generator().manual_seed(length)
    found = {n: torch.randn(rows, length, generator=generator, dtype=torch.float64) for n in ("a", "b", "c")}
    found["h0"] = torch.randn(rows, generator=generator, dtype=torch.float64)
    found["a"] = found["a"].sigmoid()
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def stepped(step: Step, before: float, given: Values, *, backwards: bool = False) -> T:
    rows, length = given["b"].shape
    h, found = torch.full((rows,), before, dtype=given["b"].dtype), []
    for t in reversed(range(length)) if backwards else range(length):
        h = step(h, t, given)
        found.append(h)
    return torch.stack(found[::-1] if backwards else found, 1)


def needed(source: str, given: Values) -> Values:
    return {tensor.name: given[tensor.name] for tensor in parse(source).tensors}


def called(source: str, given: Values, **options: object) -> T:
    kernel = eq.compile(source, native="off", **options)  # type: ignore[arg-type]
    found = kernel(**needed(source, given))
    assert isinstance(found, T) and kernel.certificate.ok and kernel.derivation.check().ok
    return found


@pytest.mark.parametrize("length", [40, 1])
@pytest.mark.parametrize("name", STEPS)
def test_a_recurrence_is_what_a_loop_computes(name: str, length: int) -> None:
    body, before, step = STEPS[name]
    given = values(3, length)
    found = called(f"h[i,t] = {body}\nreturn h", given, prefer="scan" if length > 1 else None)
    torch.testing.assert_close(found, stepped(step, before, given))


@pytest.mark.parametrize("name", ["affine", "a sum", "a longest path", "an average"])
def test_from_the_last_position(name: str) -> None:
    body, before, step = STEPS[name]
    given = values(3, 40)
    found = called(f"h[i,t] = {body.replace('t-1', 't+1')}\nreturn h", given)
    torch.testing.assert_close(found, stepped(step, before, given, backwards=True))


SECOND = "a[i,t] * h[i,t-1] - c[i,t] * h[i,t-2] / 4 + b[i,t]"


def second(given: Values, *, backwards: bool = False) -> T:
    h = g = torch.zeros_like(given["h0"])
    found = []
    length = given["b"].shape[1]
    for t in reversed(range(length)) if backwards else range(length):
        h, g = given["a"][:, t] * h - given["c"][:, t] * g / 4 + given["b"][:, t], h
        found.append(h)
    return torch.stack(found[::-1] if backwards else found, 1)


@pytest.mark.parametrize("gate", ["g[t]", "g[t,e]", "g[t,d]", "0.5"])
def test_a_matrix_that_each_position_reads(gate: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(40, 5), torch.randn(40, 5), torch.randn(40, 4)
    g = torch.rand(40, *{"g[t,e]": (4,), "g[t,d]": (5,)}.get(gate, ()))
    source = f"h[t,d,e] = {gate} * h[t-1,d,e] + k[t,d] * v[t,e]\ny[t,e] = sum[d](q[t,d] * h[t,d,e])\nreturn y"
    h, found = torch.zeros(5, 4), []
    for t in range(40):
        by = {"g[t,d]": g[t, ..., None], "0.5": torch.tensor(0.5)}.get(gate, g[t])
        h = by * h + k[t, :, None] * v[t]
        found.append(q[t] @ h)
    given = {"q": q, "k": k, "v": v, "g": g}
    torch.testing.assert_close(called(source, given, prefer="scan"), torch.stack(found), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [40, 2, 1])
def test_two_values_before(length: int) -> None:
    given = values(3, length)
    torch.testing.assert_close(called(f"h[i,t] = {SECOND}\nreturn h", given), second(given))
    mirrored = SECOND.replace("t-", "t+")
    torch.testing.assert_close(called(f"h[i,t] = {mirrored}\nreturn h", given), second(given, backwards=True))
    fibonacci = eq.compile("h[t] = where(t == 0, 1, h[t-1] + h[t-2] + 0 * x[t])\nreturn h", native="off")
    found = fibonacci(x=torch.zeros(10, dtype=torch.int64))
    assert isinstance(found, T) and found.tolist() == [1, 1, 2, 3, 5, 8, 13, 21, 34, 55]


def test_along_the_first_axis_and_read_by_others() -> None:
    source = "h[t,i] = a[i,t] * h[t-1,i] + b[i,t]\ny[i,t] = tanh(h[t,i]) * c[i,t]\nz[i] = max[t](h[t,i])\nreturn y, z"
    given = values(3, 40)
    h = stepped(STEPS["affine"][2], 0.0, given)
    y, z = eq.compile(source, native="off")(**needed(source, given))
    torch.testing.assert_close(y, h.tanh() * given["c"])
    torch.testing.assert_close(z, h.max(1).values)


def test_one_of_another() -> None:
    source = "s[i,t] = s[i,t-1] + b[i,t]\nh[i,t] = a[i,t] * h[i,t-1] + s[i,t]\nreturn h"
    given = values(3, 40)
    sums = {**given, "b": given["b"].cumsum(1)}
    torch.testing.assert_close(called(source, given), stepped(STEPS["affine"][2], 0.0, sums))


def test_integers_stay_integers() -> None:
    x = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    kernel = eq.compile("h[i,t] = 2 * h[i,t-1] + x[i,t]\nreturn h", native="off")
    wanted, h = [], 0
    for each in x[0].tolist():
        h = 2 * h + each
        wanted.append(h)
    found = kernel(x=x)
    assert isinstance(found, T) and found.dtype == torch.int64 and found.tolist() == [wanted]


REFUSED: dict[str, tuple[str, str]] = {
    "itself": ("h[i,t] + b[i,t]", "defined by itself"),
    "too few axes": ("h[t-1] + b[i,t]", "defined by itself"),
    "both directions": ("h[i,t-1] + h[i,t+1]", "two directions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_recurrence_is_refused(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(ParseError, match=message) as refused:
        eq.compile(f"h[i,t] = {body}\nreturn h")
    assert "^" in str(refused.value)


# -- positions that a condition selects ----------------------------------------------------------------

SELECTED: dict[str, tuple[str, str]] = {
    "up to": ("sum[k <= j](b[i,k])", "sum[k](where(k <= j, b[i,k], 0))"),
    "a product": ("prod[k < j](b[i,k])", "prod[k](where(k < j, b[i,k], 1))"),
    "an extreme": ("min[k >= j](b[i,k])", "min[k](where(k >= j, b[i,k], inf))"),
    "two conditions": ("sum[k <= j, k > j - 3](b[i,k])", "sum[k](where(k <= j and k > j - 3, b[i,k], 0))"),
    "joined": ("sum[(k <= j) & (a[i,k] > 0.5)](b[i,k])", "sum[k](where(k <= j and a[i,k] > 0.5, b[i,k], 0))"),
    "a mean": ("mean[k <= j](b[i,k])", "sum[k](where(k <= j, b[i,k], 0)) / (j + 1)"),
    "another one": ("sum[k != j](b[i,k])", "sum[k](where(k != j, b[i,k], 0))"),
    "log-sum-exp": ("logsumexp[k <= j](b[i,k])", "logsumexp[k](where(k <= j, b[i,k], -inf))"),
    "a position": ("argmax[k <= j](b[i,k])", "argmax[k](where(k <= j, b[i,k], -inf))"),
    "variance": (
        "var[k <= j](b[i,k])",
        "sum[k](where(k <= j, sq(b[i,k] - sum[k](where(k <= j, b[i,k], 0)) / (j + 1)), 0)) / (j + 1)",
    ),
    "a state": (
        "linear_recurrence[k <= j](0.5, b[i,k])",
        "linear_recurrence[k](where(k <= j, 0.5, 1), where(k <= j, b[i,k], 0))",
    ),
    "of two axes": (
        "sum[k <= j, l](b[i,k] * a[i,l]) + 0 * j",
        "sum[k](where(k <= j, b[i,k], 0)) * sum[l](a[i,l])",
    ),
}


@pytest.mark.parametrize("name", SELECTED)
def test_a_condition_selects_positions(name: str) -> None:
    short, long = (f"j: axis[k]\ny[i,j] = {body}\nreturn y" for body in SELECTED[name])
    given = values(3, 12)
    torch.testing.assert_close(called(short, given), called(long, given))


@pytest.mark.parametrize("axis", ["3 < k", "k + 1", "2"])
def test_conditions_begin_with_their_axis(axis: str) -> None:
    with pytest.raises(ParseError, match="begins with it"):
        eq.compile(f"y[i] = sum[{axis}](b[i,k])")


# -- gradients -------------------------------------------------------------------------------------


def softmax_before(x: T) -> T:
    n = x.shape[1]
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    return x[:, None].expand(-1, n, -1).masked_fill(later, -math.inf).softmax(2)


def decayed(a: T, b: T) -> T:
    sums = -a.abs().cumsum(1)
    return torch.exp((sums[:, :, None] - sums[:, None]).tril()).tril() @ b[..., None]


PREFIX = "j: axis[k]\n"
GRADIENTS: dict[str, tuple[str, Callable[[Values], T]]] = {
    "recurrence": ("y[i,t] = a[i,t] * y[i,t-1] + b[i,t]", lambda v: stepped(STEPS["affine"][2], 0.0, v)),
    "recurrence from the last position": (
        "y[i,t] = a[i,t] * y[i,t+1] + b[i,t]",
        lambda v: stepped(STEPS["affine"][2], 0.0, v, backwards=True),
    ),
    "recurrence with a first value": (
        "y[i,t] = where(t == 0, h0[i], a[i,t] * y[i,t-1] + b[i,t])",
        lambda v: stepped(STEPS["with a first value"][2], 0.0, v),
    ),
    "longest path": (
        "y[i,t] = max(y[i,t-1] + a[i,t], b[i,t])",
        lambda v: stepped(lambda h, t, v: torch.maximum(h + v["a"][:, t], v["b"][:, t]), -math.inf, v),
    ),
    "shortest path from the last position": (
        "y[i,t] = min(y[i,t+1] + a[i,t], b[i,t])",
        lambda v: stepped(
            lambda h, t, v: torch.minimum(h + v["a"][:, t], v["b"][:, t]), math.inf, v, backwards=True
        ),
    ),
    "recurrence of two values": (f"y[i,t] = {SECOND.replace('h', 'y')}", second),
    "product": (f"{PREFIX}y[i,j] = prod[k](where(k <= j, b[i,k], 1))", lambda v: v["b"].cumprod(1)),
    "product from the end": (
        f"{PREFIX}y[i,j] = prod[k](where(k >= j, b[i,k], 1))",
        lambda v: v["b"].flip(1).cumprod(1).flip(1),
    ),
    "maximum": (f"{PREFIX}y[i,j] = max[k](where(k <= j, b[i,k], -inf))", lambda v: v["b"].cummax(1).values),
    "minimum from the end": (
        f"{PREFIX}y[i,j] = min[k](where(k >= j, b[i,k], inf))",
        lambda v: v["b"].flip(1).cummin(1).values.flip(1),
    ),
    "log-sum-exp": (
        f"{PREFIX}y[i,j] = logsumexp[k](where(k <= j, b[i,k], -inf))",
        lambda v: v["b"].logcumsumexp(1),
    ),
    "log-sum-exp from the end": (
        f"{PREFIX}y[i,j] = logsumexp[k](where(k >= j, b[i,k], -inf))",
        lambda v: v["b"].flip(1).logcumsumexp(1).flip(1),
    ),
    "softmax": (
        (
            f"{PREFIX}s[i,j,k] = where(k <= j, b[i,k], -inf)\nm[i,j] = max[k](s[i,j,k])\n"
            "p[i,j,k] = exp(s[i,j,k] - m[i,j])\ny[i,j] = sum[k](p[i,j,k] * c[i,k]) / sum[k](p[i,j,k])"
        ),
        lambda v: (softmax_before(v["b"]) * v["c"][:, None]).sum(2),
    ),
    "variance": (
        f"{PREFIX}y[i,j] = var[k <= j](b[i,k])",
        lambda v: torch.stack([v["b"][:, : t + 1].var(1, unbiased=False) for t in range(v["b"].shape[1])], 1),
    ),
    "variance from the end": (
        f"{PREFIX}y[i,j] = var[k >= j](b[i,k])",
        lambda v: torch.stack([v["b"][:, t:].var(1, unbiased=False) for t in range(v["b"].shape[1])], 1),
    ),
    "decays from data": (
        (
            f"{PREFIX}l: axis[k]\ns[i,j] = sum[l](where(l <= j, -abs(a[i,l]), 0))\n"
            "y[i,j] = sum[k](where(k <= j, b[i,k] * exp(s[i,j] - s[i,k]), 0))"
        ),
        lambda v: decayed(v["a"], v["b"])[..., 0],
    ),
}


def derived(name: str, given: Values, by: list[str]) -> tuple[dict[str, T], dict[str, T]]:
    """Gradients by some inputs: ours, and torch's in float64."""
    source, torchs = GRADIENTS[name]
    own = {n: t.clone().requires_grad_(n in by) for n, t in needed(f"{source}\nreturn y", given).items()}
    kernel = eq.compile(f"{source}\nreturn y", native="off")
    y = kernel(**own)
    assert isinstance(y, T)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    y.backward(dy.to(y.dtype))
    exact = {n: t.double().requires_grad_(n in by) for n, t in given.items()}
    torchs(exact).backward(dy)
    assert kernel.backward.certificate.ok
    return {n: own[n].grad for n in by}, {n: exact[n].grad for n in by}  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_prefixes(name: str, dtype: torch.dtype) -> None:
    inputs = [t.name for t in parse(f"{GRADIENTS[name][0]}\nreturn y").tensors]
    tolerance = 2e-4 if dtype == torch.float32 else 1e-10
    for by in (inputs, *([one] for one in inputs if len(inputs) > 1)):
        found, wanted = derived(name, values(3, 40, dtype), by)
        for each in by:
            torch.testing.assert_close(found[each].double(), wanted[each], rtol=tolerance, atol=tolerance)


def test_both_sides_of_a_longest_path_get_half_where_they_are_equal() -> None:
    a, b = torch.tensor([[0.0, 1.0, 2.0]]).requires_grad_(), torch.tensor([[1.0, 2.0, 0.0]]).requires_grad_()
    y = eq.compile("y[i,t] = max(y[i,t-1] + a[i,t], b[i,t])\nreturn y", native="off")(a=a, b=b)
    assert isinstance(y, T)
    y.sum().backward()
    assert a.grad is not None and a.grad.tolist() == [[0.0, 1.0, 1.0]]
    assert b.grad is not None and b.grad.tolist() == [[2.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", ["log-sum-exp", "log-sum-exp from the end"])
def test_where_nothing_was_seen_yet(name: str) -> None:
    """Maxima that are -inf, far from 0, and far apart."""
    given = values(4, 40)
    given["b"][0] = -math.inf
    given["b"][1, :20] = -math.inf
    given["b"][1, 20:] -= 1000
    given["b"][2, 10:30] = -1e30
    given["b"][3] *= 300
    found, wanted = derived(name, given, ["b"])
    torch.testing.assert_close(found["b"].double(), wanted["b"], rtol=2e-4, atol=2e-4, equal_nan=True)


def test_a_product_with_zeros_has_a_gradient() -> None:
    given = values(3, 40)
    given["b"][0, 5] = given["b"][1, 7] = given["b"][1, 20] = 0
    found, wanted = derived("product", given, ["b"])
    torch.testing.assert_close(found["b"].double(), wanted["b"], rtol=2e-4, atol=2e-5)


def test_a_variance_far_from_0_keeps_its_digits() -> None:
    given = values(3, 40)
    given["b"] += 1000
    found, wanted = derived("variance", given, ["b"])
    torch.testing.assert_close(found["b"].double(), wanted["b"], rtol=1e-3, atol=2e-3)


def test_of_equal_maxima_the_first() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 4.0, 4.0]], requires_grad=True)
    kernel = eq.compile(f"{GRADIENTS['maximum'][0]}\nreturn y", native="off")
    found = kernel(b=x)
    assert isinstance(found, T)
    found.backward(torch.tensor([[1.0, 2, 4, 8, 16, 32, 64]]))
    assert x.grad is not None and x.grad.tolist() == [[1, 30, 0, 0, 0, 96, 0]]


@pytest.mark.parametrize("name", GRADIENTS)
def test_all_reductions_of_a_gradient_are_scanned(name: str) -> None:
    """None of them visits every position for every other one."""
    program = parse(eq.grad(f"{GRADIENTS[name][0]}\nreturn y"))
    extents = alike(program)

    def along(axes: frozenset[str]) -> list[str]:
        return [axis for axis in axes if extents.get(axis, axis) == extents.get("k", extents.get("t"))]

    for reduce in reductions(*(output.expr for output in program.outputs)):
        if scanned(reduce, extents) is None:
            assert len(along(free_axes(reduce.body))) < 2, reduce


WRONG = {
    "h[i,t] = a[i,t] * h[i,t-1] + b[i,t]": "linear_recurrence[k](where(k <= t, b[i,k], 1), where(k <= t, a[i,k], 0))",
    "h[i,t] = h[i,t-1] + b[i,t]": "sum[k](where(k < t, b[i,k], 0))",
    "h[i,t] = max(h[i,t-1] + a[i,t], b[i,t])": "max_plus[k](where(k <= t, a[i,k], 0), where(k < t, b[i,k], -inf))",
}


@pytest.mark.parametrize("source", WRONG)
def test_another_recurrence_is_not_equal(source: str) -> None:
    assert not eq.equivalent(
        f"{source}\nreturn h", f"k: axis[t]\nh[i,t] = {WRONG[source]} + 0 * a[i,t] * b[i,t]\nreturn h"
    ).ok
