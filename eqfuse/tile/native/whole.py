"""What is made at once: matrix products, by the library, and lists of what comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eqfuse.terms.folds import fold_of
from eqfuse.terms.nodes import Fold
from eqfuse.tile.dtypes import identity
from eqfuse.tile.native.context import Buffer
from eqfuse.tile.native.folds import Folds
from eqfuse.tile.native.nodes import Define, NotNative, SumOfDots
from eqfuse.tile.native.text import (
    ELEMENTS,
    kept,
    kind,
    number,
    type_of,
)
from eqfuse.tile.nodes import (
    Dot,
    LoadTile,
    MergeTile,
    RankTile,
    Store,
    Value,
)

MOST_AXES = 16
"""Axes of a product that the library takes."""


class Whole(Folds):
    """Operations on whole tiles. `guards` are what has to be true for the product that is written to read its operands."""

    guards: list[str]

    def _strides(self, buffer: Buffer) -> dict[str, str]:
        return {
            dim: " * ".join(f"most_{self._c(d)}" for d in buffer.dims[place + 1 :]) or "1"
            for place, dim in enumerate(buffer.dims)
        }

    def _place(self, value: Value) -> tuple[str, dict[str, str]]:
        """A pointer to a value at the loops around, and the distance of neighbours along its other dims."""
        open_ = {loop.axis: loop.at for loop in self.loops}
        if value.name in self.tree.direct:
            return self._direct(value, open_)
        if value.name not in self.tree.memory:
            held = self.names.fresh("held")
            self.emit(f"{ELEMENTS[kind(value.dtype)]} {held} = {self._scalar(value)};")
            return f"&{held}", {}
        buffer = self._buffer(value.name)
        strides = self._strides(buffer)
        terms = [f"{open_[dim]} * {stride}" for dim, stride in strides.items() if dim in open_]
        return " + ".join([buffer.name, *terms]), {d: s for d, s in strides.items() if d not in open_}

    def _direct(self, value: Value, open_: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        op = self.tree.defined[value.name].op
        assert isinstance(op, LoadTile)
        self.used.add(op.tensor)
        terms, strides = [self._tensor(op.tensor)], {}
        for place, at in enumerate(op.index):
            stride, linear = self._stride(op.tensor, place), self.tree.linear(at)
            least = [self._scalar(number) for number in linear.numbers]
            most = []
            for axis, factor in linear.factors.items():
                first = f"start_{self._c(axis)}"
                if axis in open_:
                    first = f"({first} + {open_[axis]})"
                else:
                    strides[axis] = stride if factor == 1 else f"({factor} * {stride})"
                    most.append(f"{factor} * (length_{self._c(axis)} - 1)")
                least.append(first if factor == 1 else f"{factor} * {first}")
            begin = " + ".join(f"(i64)({text})" for text in least) or "0"
            if not self._is_position(at):
                # Both ends are inside, or nothing is read.
                begin = self._named(begin)
                inside = self.names.fresh("inside")
                self.emit(f"bool {inside} = true;")
                where = f"{self._extent(op.tensor, place)}, {self.interface.tensors.index(op.tensor)}"
                for end in (begin, " + ".join((begin, *most))) if most else (begin,):
                    self.emit(f"inside({inside}, {end}, {where}, failure);")
                self.guards.append(inside)
            terms.append(f"({begin}) * {stride}")
        return " + ".join(terms), strides

    def _store_place(self, store: Store) -> tuple[str, dict[str, str]]:
        """A pointer to where a store's tile begins, and the distance of neighbours along its dims, which no loop is around, in
        the order of the tensor's."""
        self.used.add(store.tensor)
        terms, steps = [self._tensor(store.tensor)], {}
        for place, at in enumerate(store.index):
            stride = self._stride(store.tensor, place)
            axis = self._axis_of(at)
            assert axis is not None
            terms.append(f"(i64)start_{self._c(axis)} * {stride}")
            if axis in at.dims:
                steps[axis] = stride
        return " + ".join(terms), steps

    def _named(self, text: str) -> str:
        name = self.names.fresh("begin")
        self.emit(f"const i64 {name} = {text};")
        return name

    def _dot(self, item: Define, op: Dot) -> None:
        if op.precision != "exact":
            raise NotNative(f"a product in precision {op.precision}")
        value, open_ = item.value, {loop.axis for loop in self.loops}
        stored = self.tree.stored.get(value.name)
        keep = "true" if value.name in self.tree.into else "false"
        if stored is None and keep == "false":
            keep = self._accumulate(self._buffer(value.name), op.accumulator)
        self.guards = []
        (left, left_steps), (right, right_steps) = self._place(op.left), self._place(op.right)
        masks = [None if mask is None else self._place(mask) for mask in (op.left_mask, op.right_mask)]
        place, out_steps = self._place(value) if stored is None else self._store_place(stored)
        mine = [dim for dim in value.dims if dim not in open_]
        rows = [dim for dim in mine if dim in left_steps]
        columns = [dim for dim in mine if dim not in left_steps]
        # The dims that the library walks: the last ones in memory; loops around it walk the others.
        last = self.tree.depth.__getitem__ if stored is None else list(out_steps).index
        if isinstance(op, SumOfDots):
            # The folded axes in the order of the left operand's memory, where one may follow the other.
            depths = sorted((*op.beside, op.axis), key=list(left_steps).index)
            groups = sorted(rows, key=last), depths, sorted(columns, key=last)
            self._several((left, right, place), (left_steps, right_steps, out_steps), groups, keep)
            return
        row, column = (max(dims, key=last, default=None) for dims in (rows, columns))
        offsets = ["", "", "", *("" for _ in masks)]
        opened = 0
        for dim in mine:
            if dim in (row, column):
                continue
            at, c = self.names.fresh("at"), self._c(dim)
            self.emit(f"for (i64 {at} = 0; {at} < length_{c}; {at}++) {{")
            self.depth += 1
            opened += 1
            steps = [left_steps, right_steps, out_steps, *({} if mask is None else mask[1] for mask in masks)]
            for k, of in enumerate(steps):
                if dim in of:
                    offsets[k] += f" + {at} * {of[dim]}"

        def step(steps: Mapping[str, str], dim: str | None) -> str:
            return "0" if dim is None else steps.get(dim, "0")

        def length(dim: str | None) -> str:
            return "1" if dim is None else f"length_{self._c(dim)}"

        given = [
            *(left + offsets[0], step(left_steps, row), step(left_steps, op.axis)),
            *(right + offsets[1], step(right_steps, op.axis), step(right_steps, column)),
            *(place + offsets[2], step(out_steps, row), step(out_steps, column)),
            *(length(row), length(op.axis), length(column), keep),
        ]
        if any(mask is not None for mask in masks):
            sides = ((row, op.axis), (op.axis, column))
            for k, (mask, dims) in enumerate(zip(masks, sides, strict=True)):
                pointer = "(const u8*)0" if mask is None else mask[0] + offsets[3 + k]
                given += [pointer, *(step({} if mask is None else mask[1], dim) for dim in dims)]
        wanted = f"if ({' && '.join(self.guards)}) " if self.guards else ""
        self.emit(f"{wanted}product({', '.join(given)});")
        for _ in range(opened):
            self.depth -= 1
            self.emit("}")

    def _several(
        self,
        places: Sequence[str],
        steps: Sequence[Mapping[str, str]],
        groups: Sequence[Sequence[str]],
        keep: str,
    ) -> None:
        """A product whose rows, folded axes and columns are groups of dims, each with the distances of neighbours in the left
        operand, the right one and the product."""
        dims = [dim for group in groups for dim in group]
        if len(dims) > MOST_AXES:
            raise NotNative(f"a product of matrices of {len(dims)} axes")
        axes = [
            part for dim in dims for part in (f"length_{self._c(dim)}", *(of.get(dim, "0") for of in steps))
        ]
        name = self.names.fresh("axes")
        self.emit(f"const i64 {name}[] = {{{', '.join(axes)}}};")
        given = (*places, name, *(str(len(group)) for group in groups), keep)
        wanted = f"if ({' && '.join(self.guards)}) " if self.guards else ""
        self.emit(f"{wanted}several({', '.join(given)});")

    def _accumulate(self, out: Buffer, accumulator: Value | None) -> str:
        """Puts what a product is added to into the product's place: "true", or "false" where that is nothing."""
        if accumulator is None or self.tree.is_nothing(accumulator):
            return "false"
        held = self._buffer_of(accumulator)
        if held is not None and held.dims == out.dims and self.tree.uses(accumulator.name) == 1:
            element, name = ELEMENTS[kept(out.dtype)], self.names.fresh("held")
            self.emit(
                f"{element}* const {name} = {held.name}; {held.name} = {out.name}; {out.name} = {name};"
            )
        else:
            open_ = {loop.axis for loop in self.loops}
            self._assign(replace(out, dims=out.dims), accumulator, skip=open_)
        return "true"

    def _ranked(self, item: Define) -> None:
        """A list of what comes first: every state is put into its place among those so far."""
        op = item.op
        assert isinstance(op, RankTile | MergeTile)
        found = fold_of(op.op)
        assert found is not None
        fold = found[0]
        groups, axis = (
            ((op.values,), op.axis) if isinstance(op, RankTile) else ((op.left, op.right), op.ranks)
        )
        dtypes = [kind(value.dtype) for value in groups[0]]
        if any(kept(value.dtype) != kind(value.dtype) for group in groups for value in group):
            raise NotNative(f"a list of {', '.join(value.dtype for value in groups[0])}")
        names = self.tree.states[item.value.name]
        lists = []
        for k, name in enumerate(names):
            if not name:
                name = f"{item.value.name} {k}"
                self.tree.memory[name] = self.tree.memory[item.value.name]
                value = replace(item.value, name=name, dtype=dtypes[k])
                self.tree.defined[name] = replace(item, value=value)
            pointer, steps = self._place(replace(item.value, name=name, dtype=dtypes[k]))
            lists.append((pointer, steps[op.ranks]))
        with self.block():
            self.emit(f"const i64 ranks = length_{self._c(op.ranks)};")
            for k, ((pointer, _), dtype) in enumerate(zip(lists, dtypes, strict=True)):
                self.emit(f"{ELEMENTS[dtype]}* const list{k} = {pointer};")
            vector = self._vector
            wide = vector is not None and vector.axis in item.value.dims
            first = ""
            for k, ((_, step), dtype, o) in enumerate(zip(lists, dtypes, fold.ops, strict=True)):
                one = number(identity(o, dtype), dtype)
                place = f"list{k} + r * {step}"
                first += (
                    f" {self._put_lane(dtype, place, f'splat({one})') if wide else f'*({place}) = {one};'}"
                )
            self.emit(f"for (i64 r = 0; r < ranks; r++) {{{first} }}")
            for group in groups:
                with self.block():
                    if wide:
                        self._insert_each(fold, group, axis, lists, dtypes)
                    else:
                        self._insert(fold, group, axis, lists, dtypes)

    def _left(self) -> str:
        vector = self._vector
        return f", {vector.left}" if vector is not None and vector.left else ""

    def _put_lane(self, dtype: str, place: str, text: str) -> str:
        return f"put_{dtype}({place}, {text}{self._left()});"

    def _insert_each(
        self,
        fold: Fold,
        group: Sequence[Value],
        axis: str,
        lists: Sequence[tuple[str, str]],
        dtypes: Sequence[str],
    ) -> None:
        """One element for each of the lists in the lanes of a vector: from its place on, each moves the next one down. Where no
        lane's comes before the last of its list, nothing does."""
        vector, left = self._vector, self._left()
        assert vector is not None
        places = [self._place(value) for value in group]
        with self.block(f"for (i64 n = 0; n < length_{self._c(axis)}; n++)"):
            for k, (value, (pointer, steps), dtype) in enumerate(zip(group, places, dtypes, strict=True)):
                place = f"{pointer} + n * {steps.get(axis, '0')}"
                one = vector.axis not in value.dims
                text = f"splat(get_{dtype}({place}))" if one else f"load_{dtype}({place}{left})"
                self.emit(f"{type_of(dtype, True)} x{k} = {text};")
            before, last = "I{}", "I{}"
            for name, greatest in reversed(fold.order):
                k = fold.state.index(name)
                at_end = f"load_{dtypes[k]}(list{k} + (ranks - 1) * {lists[k][1]}{left})"
                before = f"precedes(x{k}, y{k}, {str(greatest).lower()}, {before})"
                last = f"precedes(x{k}, {at_end}, {str(greatest).lower()}, {last})"
            self.emit(f"if (!any({last})) continue;")
            self.emit("I found = I{};")
            with self.block("for (i64 r = 0; r < ranks; r++)"):
                for k, ((_, step), dtype) in enumerate(zip(lists, dtypes, strict=True)):
                    self.emit(
                        f"const {type_of(dtype, True)} y{k} = load_{dtype}(list{k} + r * {step}{left});"
                    )
                self.emit(f"found |= {before};")
                for k, ((_, step), dtype) in enumerate(zip(lists, dtypes, strict=True)):
                    self.emit(self._put_lane(dtype, f"list{k} + r * {step}", f"choose(found, x{k}, y{k})"))
                    self.emit(f"x{k} = choose(found, y{k}, x{k});")

    def _insert(
        self,
        fold: Fold,
        group: Sequence[Value],
        axis: str,
        lists: Sequence[tuple[str, str]],
        dtypes: Sequence[str],
    ) -> None:
        places = [self._place(value) for value in group]
        key, greatest = fold.order[0]
        k = fold.state.index(key)
        if places[k][1].get(axis) == "1" and dtypes[k] != "bool":
            self._skipping(k, str(greatest).lower(), places[k][0], axis, lists[k][1], dtypes[k])
        else:
            self.emit(f"for (i64 n = 0; n < length_{self._c(axis)}; n++) {{")
        with self.block():
            for k, ((pointer, steps), dtype) in enumerate(zip(places, dtypes, strict=True)):
                self.emit(f"const {type_of(dtype, False)} x{k} = ({pointer})[n * {steps.get(axis, '0')}];")
            before = "false"
            for name, greatest in reversed(fold.order):
                k = fold.state.index(name)
                before = (
                    f"precedes(x{k}, list{k}[(r - 1) * {lists[k][1]}], {str(greatest).lower()}, {before})"
                )
            self.emit("i64 r = ranks;")
            self.emit(f"while (r > 0 && {before}) r--;")
            self.emit("if (r == ranks) continue;")
            moved = "".join(f" list{k}[q * {s}] = list{k}[(q - 1) * {s}];" for k, (_, s) in enumerate(lists))
            self.emit(f"for (i64 q = ranks - 1; q > r; q--) {{{moved} }}")
            for k, (_, step) in enumerate(lists):
                self.emit(f"list{k}[r * {step}] = x{k};")
        self.emit("}")

    def _skipping(self, k: int, greatest: str, pointer: str, axis: str, step: str, dtype: str) -> None:
        """The head of a loop over the elements whose first key comes before the last one's of the list, or is as good: a vector
        of them is compared at once."""
        c = self._c(axis)
        last = f"splat(list{k}[(ranks - 1) * {step}])"
        self.emit(f"for (i64 from = 0, to = 0; from < length_{c} && ranks > 0; from = to) {{")
        self.emit(f"  to = least(from + LANES, length_{c});")
        self.emit(f"  const {type_of(dtype, True)} keys = load_{dtype}({pointer} + from, to - from);")
        self.emit(f"  const I some = precedes(keys, {last}, {greatest}, splat(true)) & first(to - from);")
        self.emit("  if (any(some)) for (i64 n = from; n < to; n++) if (some[n - from])")
