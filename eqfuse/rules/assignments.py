"""A merge as assignments, one after the other: what a loop, the merge of shards and a stream run alike.

Names are those of rules/merge.py: `m` and `m_a`, `m_b` are read, `m_tile`, `m_new` and `m_final` assigned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eqfuse.rules.merge import Group, Merge
from eqfuse.terms.folds import written_out
from eqfuse.terms.nodes import Expr, Reduce


@dataclass(frozen=True)
class Assignment:
    """`name[dims] = value`, on the way to the next value of `state`. A value that is a Reduce folds the tile alone."""

    state: str
    name: str
    dims: tuple[str, ...]
    value: Expr


def updates(group: Group, merge: Merge) -> Iterator[Assignment]:
    """What a tile makes of the states that a loop has seen."""
    dims = _dims(group)
    for update in merge.update:
        state = update.state
        for part in update.parts:
            yield Assignment(state, part.name, dims[state], Reduce(part.op, group.axis, part.body))
        yield Assignment(state, f"{state}_new", dims[state], written_out(update.value))


def combines(group: Group, merge: Merge) -> Iterator[Assignment]:
    """What the states of two parts make."""
    dims = _dims(group)
    for combine in merge.combine:
        state = combine.state
        yield Assignment(state, f"{state}_new", dims[state], written_out(combine.value))


def finishes(group: Group, merge: Merge) -> Iterator[Assignment]:
    """The exact values of the states that are not exact as they are carried; each reads the carried ones."""
    dims = _dims(group)
    for finish in merge.finish:
        state = finish.state
        yield Assignment(state, f"{state}_final", dims[state], finish.value)


def _dims(group: Group) -> dict[str, tuple[str, ...]]:
    return {state.name: state.dims for state in group.states}
