"""Programs that are too large end in an error that says so, soon; large ones that are not, work."""

from __future__ import annotations

import pytest
import torch

import eqfuse as eq
from eqfuse.errors import BudgetError, ParseError


def chain(count: int, step: str) -> str:
    lines = ["a0[i] = x[i]", *(f"a{k + 1}[i] = " + step.format(f"a{k}") for k in range(count))]
    return "\n".join(lines)


@pytest.mark.parametrize("step", ["{0}[i] * {0}[i]", "{0}[i] * {0}[i+1]", "where({0}[i] > 0, {0}[i], 1)"])
def test_temporaries_that_double_are_a_budget_error(step: str) -> None:
    with pytest.raises(BudgetError) as caught:
        eq.compile(chain(40, step), target="cpu")
    assert str(caught.value) == (
        "'a40' has more than 30000 operations once its temporaries are written out (line 41)\n"
        f"    a40[i] = {step.format('a39')}\n"
        "    ^^^\n"
        "each reading of a temporary counts: return some of them, and read them in another program"
    )


def beside(count: int) -> str:
    step = "a{0}[i] = sum[j](exp({0} * x[i,j] - max[j]({0} * x[i,j])))"
    return "\n".join(step.format(k) for k in range(2, count))


def exponentials(count: int) -> str:
    step = "a{0}[i] = sum[j](exp(x[i,j] - a{1}[i]))"
    return "\n".join(
        ["a0[i] = sum[j](x[i,j])", *(step.format(k, k - 1) for k in range(1, count)), f"return a{count - 1}"]
    )


def norms(count: int) -> str:
    lines = ["a0[i,j] = x[i,j]"]
    for k in range(count):
        lines.append(f"c{k}[i,j] = a{k}[i,j] - mean[j](a{k}[i,j])")
        lines.append(f"a{k + 1}[i,j] = c{k}[i,j] * rsqrt(mean[j](sq(c{k}[i,j])) + 0.1)")
    return "\n".join([*lines, f"return a{count}"])


def layers(count: int) -> str:
    lines = ["y0[t,c] = x[t,c]"]
    for k in range(count):
        lines.append(f"h{k}[t,f] = relu(sum[c](y{k}[t,c] * U[f,c]))")
        lines.append(f"z{k}[t,c] = y{k}[t,c] + sum[f](h{k}[t,f] * D[c,f])")
        lines.append(f"y{k + 1}[t,c] = z{k}[t,c] * rsqrt(mean[c](sq(z{k}[t,c])) + 0.1)")
    return "\n".join([*lines, f"return y{count}"])


LARGE = {
    "a chain of exponentials": (exponentials(8), ""),
    "a long chain of exponentials": (exponentials(20), "saturation stopped after"),
    "a chain of squares": (
        """
        r0[i] = sum[j](sq(x[i,j]))
        r1[i] = sum[j](sq(x[i,j] - r0[i]))
        r2[i] = sum[j](sq(x[i,j] - r1[i]))
        r3[i] = sum[j](sq(x[i,j] - r2[i]))
        return r3
        """,
        "saturation stopped after",
    ),
    "a mean taken off eight times": (
        "\n".join(
            ["a0[i,j] = x[i,j]"] + [f"a{k + 1}[i,j] = a{k}[i,j] - mean[j](a{k}[i,j])" for k in range(8)]
        ),
        "saturation stopped after",
    ),
    "norms of norms": (norms(6), "saturation stopped after"),
    "a hundred terms": ("y[i] = sum[j](" + " + ".join(f"x[i,j] * {k + 2}" for k in range(100)) + ")", ""),
    "a hundred factors": ("y[i] = sum[j](" + " * ".join(["x[i,j]"] * 100) + ")", ""),
    "ten layers": (layers(10), ""),
    "side by side": (beside(20), ""),
    "many side by side": (beside(80), "terms and facts to begin with, more than 1700"),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.slow(but=["squares"])
def test_what_is_too_large_to_fuse_runs_in_passes_and_says_so(name: str) -> None:
    """The budget is counted and not timed: the same program, the same answer."""
    source, why = LARGE[name]
    kernel = eq.compile(source, target="cpu")
    assert kernel.certificate.ok
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (5, 7), "U": (3, 7), "D": (7, 3)}
    tensors = {
        t.name: torch.rand(shapes[t.name], generator=generator) * 0.3 for t in kernel.derived.program.tensors
    }
    found, exact = kernel(**tensors), eq.reference(source)(**tensors)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, exact)), strict=True):
        assert torch.allclose(one.double(), torch.as_tensor(other), rtol=1e-4, atol=1e-30)
    reasons = kernel.why_not()
    assert any(why in reason for reason in reasons) if why else not any("budget" in r for r in reasons)
    assert all(len(reason) < 20_000 for reason in reasons)


def test_a_chain_within_the_budget_works() -> None:
    x = torch.rand(7) + 0.5
    found = eq.compile(chain(9, "sqrt({0}[i] * {0}[i])"), target="cpu")(x=x)
    assert torch.allclose(found, x)


@pytest.mark.parametrize(
    "text",
    [
        "y[i] = " + " + ".join(["x[i]"] * 300),
        "y[i] = " + "(" * 300 + "x[i]" + ")" * 300,
        "y[i] = " + "-" * 2000 + "x[i]",
        chain(300, "{0}[i] * x[i] + 1"),
        chain(200, "where({0}[i] > 0, x[i], 1) + {0}[i]"),
    ],
)
def test_deep_nesting_is_an_error_of_the_text(text: str) -> None:
    with pytest.raises(ParseError, match="nested more than 150 levels deep"):
        eq.compile(text, target="cpu")


def test_a_long_chain_of_conditions_works() -> None:
    x = torch.randn(6)
    text = "y[i] = " + "where(x[i] > 0, " * 40 + "x[i]" + ", x[i] + 1)" * 40
    assert torch.allclose(eq.compile(text, target="cpu")(x=x), torch.where(x > 0, x, x + 1))
