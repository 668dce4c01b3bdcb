"""Pairwise covering arrays: of a product of factors, few rows in which any two values of two factors stand together."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import combinations

Row = Sequence[Hashable]
"""A value of each factor."""


def covering(rows: Sequence[Row], kept: Collection[int] = ()) -> set[int]:
    """The places of rows that have every pair of values that some row has: those in `kept`, and by turns the first one that has
    most of the pairs that are missing."""
    pairs = [frozenset(combinations(enumerate(row), 2)) for row in rows]
    missing = frozenset[object]().union(*pairs).difference(*(pairs[place] for place in kept))
    chosen = set(kept)
    while missing:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
