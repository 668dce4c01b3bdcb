"""Which loads a copy engine does: tiles of two dims, whose positions are those of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eqfuse.extract.unsuited import Unsuited
from eqfuse.tile.nodes import (
    Align,
    Bound,
    Elementwise,
    Extent,
    LoadTile,
    Op,
    Positions,
    Store,
    Value,
)
from eqfuse.tile.roles.nodes import Along, Index

MOST_DIMS = 5
"""Dims of a tensor that the copy engine addresses at most."""

COPIED = ("f16", "bf16", "f32", "f8e4m3", "i32")
"""Dtypes that it copies."""


@dataclass(frozen=True)
class Tensors:
    """The axes of every tensor as far as they are known, and the axis that has the extent of another one."""

    axes: Mapping[str, tuple[str | None, ...]]
    root: Mapping[str, str]

    def extent(self, axis: str | None) -> str | None:
        while axis is not None and axis in self.root:
            axis = self.root[axis]
        return axis

    def equal(self, axis: str, other: str) -> Tensors:
        """These, with two axes of one extent."""
        first, second = self.extent(axis), self.extent(other)
        return self if first == second else replace(self, root={**self.root, str(second): str(first)})


def copied(value: Value, op: LoadTile, ops: Mapping[str, Op], tensors: Tensors, *, whole: bool) -> Index:
    """Where the copy engine finds a tile that is loaded. Raises Unsuited where it cannot copy it.

    What it reads past the edge of a tensor is 0, as the mask of a load says. Where a mask ends before the edge, it reads
    what is there, which is right where the `whole` block may be read: nothing that is stored depends on a masked position then.
    """
    what = f"the load of {op.tensor}"
    index = _index(what, op.tensor, op.index, value, ops)
    if op.other != 0:
        raise Unsuited(f"{what} fills with {op.other:g} what is masked")
    if not whole and _early(what, op.tensor, op.mask, index, ops, tensors):
        raise Unsuited(
            f"{what} is masked before the tensor's edge, where what is stored may not be finite:"
            " assume_finite=True promises that it is"
        )
    return index


def ends_early(op: LoadTile, value: Value, ops: Mapping[str, Op], tensors: Tensors) -> list[Value]:
    """The bounds in the mask of a tile's load that end before its tensor does."""
    what = f"the load of {op.tensor}"
    index = _index(what, op.tensor, op.index, value, ops)
    return _early(what, op.tensor, op.mask, index, ops, tensors)


def put(store: Store, ops: Mapping[str, Op], tensors: Tensors) -> Index | None:
    """Where the copy engine puts a tile that is stored; None where it cannot."""
    what = f"the store of {store.tensor}"
    try:
        index = _index(what, store.tensor, store.index, store.value, ops)
        early = _early(what, store.tensor, store.mask, index, ops, tensors)
    except Unsuited:
        return None
    return None if early else index


def _index(what: str, tensor: str, places: tuple[Value, ...], tile: Value, ops: Mapping[str, Op]) -> Index:
    if tile.dtype not in COPIED:
        raise Unsuited(f"{what} is of {tile.dtype}")
    if len(places) > MOST_DIMS:
        raise Unsuited(f"{tensor} has more than {MOST_DIMS} dims")
    index = tuple(_place(what, place, ops) for place in places)
    along = [place.axis for place in index if isinstance(place, Along)]
    if along != list(tile.dims):
        raise Unsuited(f"{what} has its dims in another order than memory")
    if not isinstance(index[-1], Along):
        raise Unsuited(f"{what} is not contiguous")
    return index


def _place(what: str, value: Value, ops: Mapping[str, Op]) -> Value | Along:
    if not value.dims:
        return value
    match ops.get(value.name):
        case Positions(axis):
            return Along(axis)
        case Align(source):
            return _place(what, source, ops)
        case Elementwise("add", (left, right)) if not right.dims or not left.dims:
            tile, offset = (left, right) if left.dims else (right, left)
            found = _place(what, tile, ops)
            if isinstance(found, Along) and found.offset is None:
                return Along(found.axis, offset)
    raise Unsuited(f"{what} is at computed positions")


def _early(
    what: str,
    tensor: str,
    mask: Value | None,
    index: Index,
    ops: Mapping[str, Op],
    tensors: Tensors,
) -> list[Value]:
    """The bounds in a mask that say more than that positions are inside of the tensor. Raises Unsuited for other masks."""
    dims = tensors.axes[tensor]
    edges = {
        place.axis if isinstance(place, Along) else place.name: tensors.extent(axis)
        for place, axis in zip(index, dims, strict=True)
        if axis is not None
        and not (isinstance(place, Along) and place.offset is not None)
        and not (isinstance(place, Along) and tensors.extent(axis) != tensors.extent(place.axis))
    }

    def is_edge(place: str, stop: Value) -> bool:
        match ops.get(stop.name):
            case Extent(axis):
                return place in edges and edges[place] == tensors.extent(axis)
        return False

    found = []
    for bound, place, stop in bounds(what, mask, ops):
        if is_edge(place, stop):
            continue
        if not bound.dims:
            raise Unsuited(f"{what} has a mask of its own")
        found.append(bound)
    return found


def bounds(what: str, mask: Value | None, ops: Mapping[str, Op]) -> list[tuple[Value, str, Value]]:
    """The bounds that a mask is made of: each with its axis, or the name of its single position, and its end."""
    if mask is None:
        return []
    match ops.get(mask.name):
        case Bound(axis, stop):
            return [(mask, axis, stop)]
        case Align(source):
            return bounds(what, source, ops)
        case Elementwise("and", (left, right)):
            return [*bounds(what, left, ops), *bounds(what, right, ops)]
        case Elementwise("lt", (place, stop)) if not mask.dims:
            return [(mask, place.name, stop)]
    raise Unsuited(f"{what} has a mask of its own")
