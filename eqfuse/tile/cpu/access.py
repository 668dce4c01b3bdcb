"""Loads and stores of the CPU code generator: slices where positions are plain, strided views where they
are affine, gathers and scatters for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eqfuse.tile.cpu.values import TORCH, Item, Line
from eqfuse.tile.cpu.writer import Writer
from eqfuse.tile.dtypes import INTEGERS
from eqfuse.tile.nodes import LoadTile, Search, Store, Value


def load(w: Writer, value: Value, op: LoadTile) -> Item:
    """The tile that `op` loads, of the dims and dtype of `value`."""
    index = [w.items[v.name] for v in op.index]
    mask = None if op.mask is None else w.items[op.mask.name]
    if mask is not None and mask.truth is not None:
        if not mask.truth:
            return w.filled(value, op.other)
        mask = None
    tile_mask = mask if mask is None or mask.dims else None
    if tile_mask is not None:
        tile_mask = w.aligned(tile_mask, value.dims, f"{value.name}_mask")
    source = w.tensor(op.tensor)
    if _sliceable(index):
        item = _slice(w, source, op.tensor, index, tile_mask)
    elif all(at.affine is not None and not at.affine.data for at in index):
        item = _strided(w, value, source, op.tensor, index, tile_mask)
    else:
        item = _gathered(w, value, source, op.tensor, index, tile_mask)
    integer = value.dtype in INTEGERS
    kind = "bool" if value.dtype == "bool" else "int" if integer else "float"
    other = repr({"bool": bool, "int": int, "float": float}[kind](op.other))
    if integer and not value.dims:
        text = f"{kind}({item.text})"
        return w.scalar(value, text if mask is None else f"({text} if {mask.text} else {other})", data=True)
    text = item.text + (f".to({TORCH[value.dtype]})" if integer or op.tensor in w.buffers else "")
    if mask is not None and tile_mask is None:
        sizes = "".join(f"{w.length(d) if d in item.full else 1}, " for d in item.dims)
        text = f"{text} if {mask.text} else torch.full(({sizes}), {other}, dtype={TORCH[value.dtype]})"
    item = Item(w.let(value.name, text), item.dims, value.dtype, item.full, fresh=item.fresh)
    item = w.aligned(w.owned(item, value.name) if item.fresh else item, value.dims, value.name)
    if tile_mask is None:
        return item
    masked = w.let(value.name, f"torch.where({tile_mask.text}, {item.text}, {other})")
    return w.owned(replace(item, text=masked, full=item.full | tile_mask.full), value.name)


def searched(w: Writer, value: Value, op: Search) -> Item:
    """How many elements of a dimension come before what is searched for."""
    at = [w.python(w.items[v.name]) for v in op.index]
    at.insert(op.place, ":")
    stop, target = w.python(w.items[op.stop.name]), w.python(w.items[op.target.name])
    text = f"search({w.tensor(op.tensor)}[{', '.join(at)}], {stop}, {target}, right={op.right})"
    return w.scalar(value, text, data=True)


def store(w: Writer, stmt: Store) -> None:
    """Writes a tile, or one element, where its mask is on."""
    if stmt.value.name in w.stored:
        return
    value = w.read(stmt.value)
    index = [w.items[v.name] for v in stmt.index]
    mask = None if stmt.mask is None else w.items[stmt.mask.name]
    if mask is not None and mask.truth is not None:
        if not mask.truth:
            return
        mask = None
    target = w.tensor(stmt.tensor)
    flagged = mask is not None and not mask.dims
    covered = _covered(index)
    if (mask is None or flagged) and _sliceable(index) and set(covered) == set(value.dims):
        places = _slice(w, target, stmt.tensor, index, None).text
        text = f"{places} = {w.aligned(value, covered, stmt.value.name).text}"
    else:
        dims = stmt.value.dims
        tiles = [at.text if at.is_python else w.aligned(at, dims, "at").text for at in index]
        given = f"torch.tensor({value.text})" if value.is_python else value.text
        selected = "" if mask is None or flagged else f", {w.aligned(mask, dims, 'mask').text}"
        places = "".join(f"{tile}, " for tile in tiles)
        text = f"scatter({stmt.tensor!r}, {target}, ({places}), {given}, {w.lengths(dims)}{selected})"
    if mask is not None and flagged:
        w.scopes[-1].lines.append(Line(f"if {mask.text}:", body=[Line(text)]))
    else:
        w.emit(text)


def place(w: Writer, value: Value, full: frozenset[str]) -> str | None:
    """Where an operation may write its result at once, because a store is all that reads it; the store is
    then done."""
    stmt = w.stores.get(value.name)
    if stmt is None or w.stored_dtypes[stmt.tensor] != value.dtype:
        return None
    if full != frozenset(value.dims) or any(at.name not in w.items for at in stmt.index):
        return None
    index = [w.items[at.name] for at in stmt.index]
    if not value.dims or not _sliceable(index) or _covered(index) != value.dims:
        return None
    w.stored.add(value.name)
    return _slice(w, w.tensor(stmt.tensor), stmt.tensor, index, None).text


def _covered(index: Sequence[Item]) -> tuple[str, ...]:
    return tuple(axis for at in index if (axis := _plain_axis(at)) is not None)


def _plain_axis(at: Item) -> str | None:
    """The axis whose positions this index is, as a tile."""
    return at.affine.pure if at.dims and at.affine is not None else None


def _sliceable(index: Sequence[Item]) -> bool:
    """Whether every index is one number or the plain positions of an axis of its own."""
    axes = [_plain_axis(at) for at in index if at.dims]
    return None not in axes and len(set(axes)) == len(axes)


def _slice(w: Writer, source: str, name: str, index: Sequence[Item], mask: Item | None) -> Item:
    """`source[...]` with the dims in the order of the index; numbers are checked, positions fit."""
    parts, dims = [], []
    for place, at in enumerate(index):
        axis = _plain_axis(at)
        if axis is not None:
            parts.append(_range(w, axis))
            dims.append(axis)
        elif at.affine is not None and at.affine.pure:
            parts.append(at.text)
        else:
            masked = "" if mask is None else f", {mask.text}"
            parts.append(f"checked({name!r}, {at.text}, {source}.shape[{place}]{masked})")
    return Item(f"{source}[{', '.join(parts) or '()'}]", tuple(dims), "", frozenset(dims))


def _range(w: Writer, axis: str) -> str:
    """The positions of a block; a dimension may be longer than the axis that it is read along."""
    return f":{w.stop(axis)}" if w.blocks[axis].kind == "whole" else f"{w.start(axis)}:{w.stop(axis)}"


def _strided(
    w: Writer, value: Value, source: str, name: str, index: Sequence[Item], mask: Item | None
) -> Item:
    affine = [at.affine for at in index if at.affine is not None]
    moving = frozenset(axis for at in affine for axis in at.steps)
    starts = "".join(f"{at.constant}, " for at in affine)
    steps = "".join(f"({''.join(f'{at.steps.get(axis, 0)}, ' for axis in value.dims)}), " for at in affine)
    sizes = "".join(f"{w.length(axis) if axis in moving else 1}, " for axis in value.dims)
    masked = "" if mask is None else f", {mask.text}"
    text = f"strided({name!r}, {source}, ({starts}), ({steps}), ({sizes}){masked})"
    return Item(text, value.dims, "", moving)


def _gathered(
    w: Writer, value: Value, source: str, name: str, index: Sequence[Item], mask: Item | None
) -> Item:
    parts, sliced, full = [], [], frozenset[str]()
    for at in index:
        axis = _plain_axis(at)
        if axis is not None and sum(axis in other.full for other in index) == 1:
            parts.append(f"slice({w.start(axis)}, {w.stop(axis)})")
            sliced.append(axis)
            full |= {axis}
        elif at.is_python:
            parts.append(at.text)
        else:
            tile = w.aligned(at, value.dims, "at")
            parts.append(tile.text)
            full |= tile.full
    others = [axis for axis in value.dims if axis not in sliced]
    order = tuple(([*others, *sliced]).index(axis) for axis in value.dims)
    places = tuple(sorted(value.dims.index(axis) for axis in sliced))
    masked = "" if mask is None else f", {mask.text}"
    text = (
        f"gather({name!r}, {source}, ({''.join(f'{part}, ' for part in parts)}), {places}, {order}{masked})"
    )
    return Item(text, value.dims, "", full, fresh=True)
