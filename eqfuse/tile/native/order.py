"""The order in which loops over tile dims are nested: the same for all of a kernel, so that they can be shared.

The innermost loop of every operation is a loop of vectors. It should be long, and neighbours in it should be
neighbours in memory. Dims that matrix products share stand outside those that they take whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from math import prod

from eqfuse.tile.native.nodes import Blocks, Define, Item, Put
from eqfuse.tile.nodes import Dot, FoldTile, LoadTile, Positions, ReduceTile, Value

LANES = 16
"""Elements of a vector, for what a loop of so many is worth."""

STRIDED = 16.0
"""What an element costs where neighbours in the loop are not neighbours in memory."""

ACROSS = 32.0
"""Vector operations to fold the lanes of the sums that a loop over a folded axis has made, and to begin and end it."""

ADDED = 2.0
"""Vector operations to load and to store a sum, where the loop over the folded axis is not the innermost one."""

MAX_PERMUTED = 6


def nesting(items: Sequence[Item], lengths: Mapping[str, int]) -> dict[str, int]:
    """The depth of every tile dim, outermost 0. `lengths` are positions of a block."""
    every = list(flat(items))
    plain = {i.value.name: i.op.axis for i in every if isinstance(i, Define) and isinstance(i.op, Positions)}
    dims = list(dict.fromkeys(dim for item in every for dim in (*item.dims, *_values(item))))
    shared = {dim for i in every if isinstance(i, Define) and isinstance(i.op, Dot) for dim in i.dims}
    costs = _costs(every, plain, lengths)
    before = _pairs(every, plain)

    def cost(order: Sequence[str]) -> tuple[float, int]:
        place = {dim: k for k, dim in enumerate(order)}
        total = sum(of[max(over, key=place.__getitem__)] for over, of in costs.items())
        wrong = sum(n for (a, b), n in before.items() if place[a] > place[b])
        return total, wrong

    outer = [dim for dim in dims if dim in shared]
    inner = [dim for dim in dims if dim not in shared]
    if len(inner) <= MAX_PERMUTED:
        inner = list(min(permutations(inner), key=lambda o: cost((*outer, *o))))
    else:
        inner.sort(key=lambda dim: sum(n for (_, b), n in before.items() if b == dim))
    if len(outer) <= MAX_PERMUTED:
        outer = list(min(permutations(outer), key=lambda o: cost((*o, *inner))))
    return {dim: depth for depth, dim in enumerate((*outer, *inner))}


def strided(items: Sequence[Item], depth: Mapping[str, int]) -> list[frozenset[str]]:
    """The dims of loads whose vectors are no neighbours in memory."""
    every = list(flat(items))
    plain = {i.value.name: i.op.axis for i in every if isinstance(i, Define) and isinstance(i.op, Positions)}
    found = []
    for item in every:
        if isinstance(item, Define) and isinstance(item.op, LoadTile) and len(item.value.dims) > 1:
            inner = max(item.value.dims, key=depth.__getitem__)
            if plain.get(item.op.index[-1].name) != inner:
                found.append(frozenset(item.value.dims))
    return found


def flat(items: Iterable[Item]) -> Iterable[Define | Put]:
    """The definitions and stores of a body, those inside its walks too."""
    for item in items:
        if isinstance(item, Blocks):
            yield from flat(item.items)
        else:
            yield item


def _values(item: Define | Put) -> tuple[str, ...]:
    return item.value.dims if isinstance(item, Define) else ()


def access(item: Define | Put) -> tuple[Value, ...] | None:
    """The index that a definition loads at, or a store stores at; None of what does neither."""
    match item:
        case Define(op=LoadTile(index=index)):
            return index
        case Put(store):
            return store.index
        case _:
            return None


def _costs(
    items: Sequence[Define | Put], plain: Mapping[str, str], lengths: Mapping[str, int]
) -> dict[frozenset[str], dict[str, float]]:
    """For every set of loops around an operation, what it costs with each of them innermost."""
    costs: dict[frozenset[str], dict[str, float]] = {}
    for item in items:
        over = frozenset(item.dims)
        if not over:
            continue
        elements = prod(lengths[dim] for dim in over)
        of = costs.setdefault(over, dict.fromkeys(over, 0.0))
        index = access(item)
        last = plain.get(index[-1].name) if index else None
        folded = _folded(item)
        for dim in over:
            vectors = -(-lengths[dim] // LANES) / lengths[dim]
            strided = index is not None and dim != last and any(dim in at.dims for at in index)
            of[dim] += elements * (STRIDED / LANES + vectors if strided else vectors)
            if folded == dim:
                of[dim] += ACROSS * elements / lengths[dim]
            elif folded is not None:
                of[dim] += ADDED * elements * vectors
    return costs


def _folded(item: Define | Put) -> str | None:
    """The axis that a reduction folds away."""
    return item.op.axis if isinstance(item, Define) and isinstance(item.op, ReduceTile | FoldTile) else None


def _pairs(items: Sequence[Define | Put], plain: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """How often one dim stands before another in memory."""
    pairs: dict[tuple[str, str], int] = {}
    for item in items:
        axes = [plain[at.name] for at in access(item) or () if at.name in plain]
        for k, first in enumerate(axes):
            for second in axes[k + 1 :]:
                pairs[first, second] = pairs.get((first, second), 0) + 1
    return pairs
