"""The suite itself: what a covering array keeps, and whose results are shared."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any, cast

import conftest
import pytest
from covering import covering


@pytest.mark.parametrize("factors", [(5, 4, 3), (9, 3, 2, 2, 3), (2, 2), (3, 2, 4, 2)])
def test_a_covering_array_has_every_pair(factors: tuple[int, ...]) -> None:
    rows = [row for row in product(*map(range, factors)) if row[0] or row[-1]]  # not all of the product
    chosen = covering(rows)

    def pairs(rows: list[tuple[int, ...]]) -> set[object]:
        return {pair for row in rows for pair in combinations(enumerate(row), 2)}

    assert pairs([rows[place] for place in chosen]) == pairs(rows)
    assert len(factors) == 2 or len(chosen) < len(rows) / 1.5
    assert covering(rows, [1, 2]) >= {1, 2}


def item(file: str, *fixtures: str, mark: object = None) -> pytest.Item:
    given: Any = SimpleNamespace(
        path=SimpleNamespace(stem=file), fixturenames=fixtures, get_closest_marker=lambda name: mark
    )
    return cast(pytest.Item, given)


def test_results_are_shared_after_verification_alone() -> None:
    assert conftest.shares_results(item("test_native_programs", "tmp_path"))
    assert not conftest.shares_results(item("test_native_programs", "monkeypatch"))
    assert not conftest.shares_results(item("test_native_programs", mark=pytest.mark.anew.mark))
    for room in ("rules_merge", "verify_field", "derivation", "cache_results", "extend_rules", "loops_lower"):
        assert not conftest.shares_results(item(f"test_{room}"))
