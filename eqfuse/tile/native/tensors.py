"""Loads and stores: vectors where neighbours in a loop are neighbours in memory, else lane by lane, each checked."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from eqfuse.extract.machine import cache_bytes
from eqfuse.terms.dtypes import BYTES
from eqfuse.tile import nodes as ir
from eqfuse.tile.native.ahead import PARTS
from eqfuse.tile.native.context import Context, Open
from eqfuse.tile.native.text import (
    ELEMENTS,
    converted,
    kind,
    number,
)

AHEAD = 0.25
"""The part of the second-level cache that a tile may take for the next one to be asked for beside it."""


class Tensors(Context):
    """Accesses of tensors."""

    def _steps(self, at: ir.Value, axis: str) -> tuple[str, str] | None:
        """An index as a number where the vector of an axis begins and its step from lane to lane; None if it has none."""
        if axis not in at.dims:
            return self._scalar(at), "0"
        item = self.tree.defined[at.name]
        match item.op:
            case ir.Positions():
                return self._position(axis, False), "1"
            case ir.Elementwise("add" | "sub" as fn, (left, right)) if at.dtype in ("i32", "i64"):
                first, second = self._steps(left, axis), self._steps(right, axis)
                if first is None or second is None:
                    return None
                sign = "+" if fn == "add" else "-"
                if second[1] == "0":
                    step = first[1]
                elif first[1] == "0" and sign == "+":
                    step = second[1]
                else:
                    step = f"({first[1]} {sign} {second[1]})"
                return f"((i64){first[0]} {sign} {second[0]})", step
            case ir.Elementwise("mul", (left, right)) if at.dtype in ("i32", "i64"):
                if axis in left.dims and axis in right.dims:
                    return None
                moving, fixed = (left, right) if axis in left.dims else (right, left)
                inner = self._steps(moving, axis)
                factor = self._scalar(fixed)
                if inner is None:
                    return None
                return f"((i64){inner[0]} * {factor})", f"((i64){inner[1]} * {factor})"
            case ir.Cast(source) if source.dtype in ("i32", "i64"):
                return self._steps(source, axis)
            case _:
                return None

    def _access(
        self,
        tensor: str,
        index: Sequence[ir.Value],
        mask: ir.Value | None,
        wide: bool,
        *,
        reads: bool = False,
        zeros: bool = False,
    ) -> tuple[str, str, str]:
        """Where a tensor is read or written: a pointer with the step of its lanes; or a pointer, the offsets of lanes
        and which of them are wanted, if there is no step. Positions outside are noted as a failure, and not touched.
        Where it `reads`, lanes that are neighbours in memory have the step "1", also if some are not wanted. Where `zeros` are read
        outside of a mask that all lanes share, lanes have a step too."""
        self.used.add(tensor)
        name, vector = self._tensor(tensor), self._vector
        checked = [k for k, at in enumerate(index) if not self._is_position(at)]
        if not wide or vector is None:
            texts = [self._scalar(at) for at in index]
            offset = " + ".join(f"(i64)({t}) * {self._stride(tensor, k)}" for k, t in enumerate(texts)) or "0"
            if not checked and mask is None:
                return f"{name} + {offset}", "0", ""
            wanted = self.names.fresh("wanted")
            self.emit(f"bool {wanted} = {'true' if mask is None else self._scalar(mask)};")
            for k in checked:
                self._note_outside(wanted, texts[k], tensor, k)
            return f"{name} + {offset}", "0", wanted
        if mask is None or vector.axis not in mask.dims:
            stepped = self._stepped(tensor, index, checked, vector, mask, zeros)
            if stepped is not None:
                return *stepped, ""
        wanted, offset = self.names.fresh("wanted"), self.names.fresh("offset")
        on = f"first({vector.left})" if vector.left else "splat(true)"
        self.emit(f"I {wanted} = {on if mask is None else f'both({self._read(mask, wide=True)}, {on})'};")
        if reads and (firsts := self._neighbours(tensor, index, vector)) is not None:
            for k in checked:
                self._note_outside(
                    wanted, firsts[k], tensor, k, "_from" if vector.axis in index[k].dims else ""
                )
            return self._pointer(tensor, firsts), "1", wanted
        self.emit(f"L {offset} = L{{}};")
        for k, at in enumerate(index):
            place = self.names.fresh("place")
            self.emit(f"const L {place} = to_i64({self._read(at, wide=True)});")
            if k in checked:
                self._note_outside(wanted, place, tensor, k)
            self.emit(f"{offset} += {place} * {self._stride(tensor, k)};")
        return name, offset, wanted

    def _note_outside(self, wanted: str, at: str, tensor: str, dim: int, lanes: str = "") -> None:
        where = f"{self._extent(tensor, dim)}, {self.interface.tensors.index(tensor)}"
        self.emit(f"inside{lanes}({wanted}, {at}, {where}, failure);")

    def _neighbours(self, tensor: str, index: Sequence[ir.Value], vector: Open) -> list[str] | None:
        """The position of the first lane in each dimension, where lanes are neighbours in memory; None where they are not."""
        steps = [self._steps(at, vector.axis) for at in index]
        known = [step for step in steps if step is not None]
        moving = [k for k, step in enumerate(known) if step[1] != "0"]
        if len(known) < len(steps) or len(moving) != 1 or known[moving[0]][1] != "1":
            return None
        return [first for first, _ in known] if (tensor, moving[0]) in self.interface.unit else None

    def _pointer(self, tensor: str, places: Sequence[str]) -> str:
        """A pointer to the element at a position in each dimension."""
        texts = (f"(i64)({place}) * {self._stride(tensor, k)}" for k, place in enumerate(places))
        return f"{self._tensor(tensor)} + {' + '.join(texts) or '0'}"

    def _stepped(
        self,
        tensor: str,
        index: Sequence[ir.Value],
        checked: Sequence[int],
        vector: Open,
        mask: ir.Value | None,
        zeros: bool,
    ) -> tuple[str, str] | None:
        """A pointer and the step of its lanes; None where lanes have no step, or their positions are checked. A mask and a position
        that all lanes share are looked at once where `zeros` are read outside."""
        steps = [self._steps(at, vector.axis) for at in index]
        if any(step is None for step in steps):
            return None
        known = [step for step in steps if step is not None]
        place = self._pointer(tensor, [first for first, _ in known])
        moving = [k for k, (_, step) in enumerate(known) if step != "0"]
        near = len(moving) == 1 and known[moving[0]][1] == "1" and (tensor, moving[0]) in self.interface.unit
        step = " + ".join(f"{known[k][1]} * {self._stride(tensor, k)}" for k in moving) or "0"
        if not checked and mask is None:
            return place, "1" if near else f"({step})"
        if not zeros or set(moving) & set(checked):
            return None
        there = self.names.fresh("there")
        self.emit(f"bool {there} = {'true' if mask is None else self._scalar(mask)};")
        for k in checked:
            self._note_outside(there, known[k][0], tensor, k)
        place = f"({there} ? {place} : ({ELEMENTS[self._dtype(tensor)]}*)absent)"
        return place, "1" if near else f"({there} ? {step} : 0)"

    def _load(self, value: ir.Value, op: ir.LoadTile, wide: bool) -> str:
        dtype, vector = self._dtype(op.tensor), self._vector
        place, step, wanted = self._access(
            op.tensor, op.index, op.mask, wide, reads=True, zeros=op.other == 0
        )
        other = number(op.other, value.dtype)
        if not wide or vector is None:
            text = f"get_{dtype}({place})"
            return f"({wanted} ? {text} : {other})" if wanted else text
        if wanted and step == "1":
            return f"choose({wanted}, load_{dtype}({place}, {wanted}), splat({other}))"
        if wanted:
            text = f"gather_{dtype}({place}, {step}, {wanted})"
            return f"choose({wanted}, {text}, splat({other}))"
        if step == "1":
            self._ask_ahead(value, op, place)
            return f"load_{dtype}({place}{f', {vector.left}' if vector.left else ''})"
        return f"gather_{dtype}({place}, {step}, {vector.left or 'LANES'})"

    def _search(self, op: ir.Search) -> str:
        self.used.add(op.tensor)
        texts = [self._scalar(at) for at in op.index]
        texts.insert(op.place, "0")
        first = " + ".join(f"(i64)({t}) * {self._stride(op.tensor, k)}" for k, t in enumerate(texts))
        elements, step = f"{self._tensor(op.tensor)} + {first}", self._stride(op.tensor, op.place)
        right = "true" if op.right else "false"
        return f"search({elements}, {step}, {self._scalar(op.stop)}, {self._scalar(op.target)}, {right})"

    def _ask_ahead(self, value: ir.Value, op: ir.LoadTile, place: str) -> None:
        """Asks for a part of the next block's tile, see `ahead`: in a loop that takes several parts at once for those, in
        another one while it is in those."""
        parts = self.asks.get(value.name, range(0))
        vector = self._vector
        if not parts or vector is None or (self.part is not None and self.part not in parts):
            return
        axes = [self._axis_of(at) for at in op.index]
        around = (axis for axis in (*reversed(self.walks), *self.kernel.grid) if axis not in self.alone)
        next_one = next((axis for axis in around if axis in axes), None)
        size = BYTES[self._dtype(op.tensor)] * prod(self.lengths[dim] for dim in value.dims)
        if next_one is None or axes.count(next_one) != 1 or size > AHEAD * cache_bytes():
            return
        when = ""
        if self.part is None and len(parts) < PARTS:
            at, length = f"{PARTS} * {vector.at}", f"length_{self._c(vector.axis)}"
            when = f"if ({at} >= {parts.start} * {length} && {at} < {parts.stop} * {length}) "
        stride = self._stride(op.tensor, axes.index(next_one))
        self.emit(f"{when}__builtin_prefetch({place} + {self._step(next_one)} * {stride}, 0, 2);")

    def _axis_of(self, at: ir.Value) -> str | None:
        """The axis whose plain position an index is."""
        op = self.tree.defined[at.name].op
        return op.axis if isinstance(op, ir.Positions | ir.Start) else None

    def _past(self, tensor: str) -> str:
        """The name of what says whether a tensor is larger than the caches."""
        return f"{self._tensor(tensor)}_past"

    def _first_whole(self, store: ir.Store, axis: str) -> str:
        """How many positions of a loop of vectors come before those that are stored as whole vectors past the caches."""
        self.used.add(store.tensor)
        self.streamed.add(store.tensor)
        with self._inside(Open(axis, "0", wide=True)):
            places = (
                f"(i64)({self._first_position(at)}) * {self._stride(store.tensor, k)}"
                for k, at in enumerate(store.index)
            )
            place = " + ".join([self._tensor(store.tensor), *places])
        return f"{self._past(store.tensor)} ? before_whole({place}) : 0"

    def _first_position(self, at: ir.Value) -> str:
        op = self.tree.defined[at.name].op
        return self._position(op.axis, False) if isinstance(op, ir.Positions) else self._scalar(at)

    def _store(self, store: ir.Store) -> None:
        dtype, vector = self._dtype(store.tensor), self._vector
        used = (*store.index, store.value, *(() if store.mask is None else (store.mask,)))
        wide = vector is not None and any(vector.axis in v.dims for v in used)
        with self.block():
            text = converted(self._read(store.value, wide=wide), store.value.dtype, kind(dtype))
            place, step, wanted = self._access(store.tensor, store.index, store.mask, wide)
            if not wide or vector is None:
                self.emit(f"{f'if ({wanted}) ' if wanted else ''}put_{dtype}({place}, {text});")
            elif wanted:
                self.emit(f"scatter_{dtype}({place}, {text}, {step}, {wanted});")
            elif step == "1" and not vector.left:
                self.streamed.add(store.tensor)
                self.emit(f"put_{dtype}({place}, {text}, {self._past(store.tensor)});")
            else:
                self._put(dtype, place, step, text, True)
