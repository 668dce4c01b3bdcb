"""Mistakes of sharded programs: verification refuses every one, but where it is none."""

from __future__ import annotations

import re

import pytest

from bench.mutants_shard import MUTANTS, SAME, Mutant, certificate, places, subjects


def test_there_are_mutants_of_steps_and_of_the_engine() -> None:
    assert len(MUTANTS) >= 24 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all((mutant.steps is None) != (mutant.engine is None) for mutant in MUTANTS)


@pytest.mark.slow
def test_the_right_steps_pass() -> None:
    passed = {
        f"{name}, {plan.strategy}": certificate(sharded, plan).ok
        for name, sharded in subjects().items()
        for plan in sharded.strategies
    }
    assert len(passed) > 20 and all(passed.values()), passed


FAST = (
    "sides",
    "twice",
    "factor",
    "another reduction",
    "own rank",
    "another rank",
    "turn",
    "finish",
    "nothing carried",
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
@pytest.mark.slow(but=FAST)
def test_a_mutant_is_refused_wherever_it_is_made(mutant: Mutant) -> None:
    found = list(places(mutant))
    assert found and (any(not place.same for place in found) or mutant.name == "no finish")
    for place in found:
        assert place.is_refused or place.same, (
            f"survives in {place.subject} by {place.strategy}: {place.changed}"
        )
    # Each reason why a mutant is no mistake is needed.
    for same in SAME:
        if re.fullmatch(same.mutant, mutant.name):
            accepted = [place for place in found if re.fullmatch(same.subject, place.subject)]
            assert any(place.same == same.why and not place.is_refused for place in accepted), same
