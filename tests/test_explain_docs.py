"""docs/derivations.md shows what the code prints: `pytest --update-golden` rewrites the blocks after each program."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import eqfuse as eq
from eqfuse import compiler
from eqfuse.kernel import Kernel
from eqfuse.proof.printer import plain

PAGE = Path(__file__).parent.parent / "docs" / "derivations.md"

EXAMPLE = re.compile(r"```eqfuse\n(.*?)\n```\n\n```text (\w+)\n(.*?)```", re.DOTALL)
"""A program, what is printed of it, and the text."""


@cache
def kernel(source: str) -> Kernel:
    return eq.compile(source, target="cpu", verify=False)


def derivation(source: str) -> eq.Derivation:
    """Of the plan that walks with states in the fewest kernels, whatever it costs; of the chosen one without any."""
    found = kernel(source)
    rolling = [plan for plan in found.plans() if plan.schedule == "rolling"]
    plan = min(rolling, key=lambda plan: len(plan.kernels), default=found.plan)
    return compiler.derivation(found.derived, plan, {})


def printed(source: str, what: str) -> str:
    if what == "explain":
        return plain(derivation(source).blocks())
    return "\n".join(kernel(source).why_not())


@pytest.mark.slow
def test_the_page_shows_what_is_printed(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    fresh = EXAMPLE.sub(
        lambda m: f"```eqfuse\n{m[1]}\n```\n\n```text {m[2]}\n{printed(m[1], m[2])}\n```", page
    )
    if request.config.getoption("--update-golden"):
        PAGE.write_text(fresh, encoding="utf-8")
    else:
        assert fresh.splitlines() == page.splitlines()


@pytest.mark.slow
def test_the_page_has_every_example_and_all_are_checked() -> None:
    examples = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    assert [what for _, what, _ in examples] == ["explain"] * 5 + ["why_not"] * 3
    for source, what, text in examples:
        verdict = derivation(source).check(source)
        assert verdict, verdict.why
        assert ("is not fused" in text) == (what == "why_not")
