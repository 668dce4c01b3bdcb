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


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (exponentials(8), r"saturation stopped after \d+ rounds and 12\d\d\d matches"),
        (exponentials(40), r"saturation stopped after \d+ rounds and 12\d\d\d matches"),
        (beside(300), r"the program has \d+ terms, more than 1500"),
    ],
    ids=["a chain", "a long chain", "many side by side"],
)
def test_too_many_cascades_are_a_budget_error(source: str, why: str) -> None:
    """The budget is counted and not timed: the same program, the same answer."""
    hint = "the program is too large for the budget: compile parts of it apart"
    with pytest.raises(BudgetError, match=f"^{why}\n{hint}$"):
        eq.compile(source, target="cpu")


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
