"""Each example of an audit of proofs: what differs is refused, what is equal or legal accepted."""

from __future__ import annotations

import pytest

from bench.audit_report import Example, examples

EXAMPLES = {f"{number} {each.finding}": each for number, each in enumerate(examples())}


def test_every_finding_has_examples() -> None:
    assert {each.finding for each in EXAMPLES.values()} == {
        *("A1", "A2", "B1", "B2", "B3", "B4", "B5", "B6", "B7", "B, equal", "B, legal"),
        *("C1", "C2", "C3", "C4"),
    }


@pytest.mark.parametrize("each", EXAMPLES.values(), ids=list(EXAMPLES))
@pytest.mark.slow(but=["0 A1", "14 A2", "18 B1", "36 B6", "C1", "C2", "C4"])
def test_an_example_is_said_what_should_be(each: Example) -> None:
    assert each.ask()[0] == each.expected, each.example
