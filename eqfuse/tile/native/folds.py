"""Folds in loops: accumulators in registers where the loop over the axis is the innermost one, else in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eqfuse.terms.folds import fold_of
from eqfuse.tile.dtypes import INTEGERS, identity
from eqfuse.tile.native.context import Buffer
from eqfuse.tile.native.nodes import Begin, Define, End, folded_axis
from eqfuse.tile.native.schedule import UNROLLED
from eqfuse.tile.native.tensors import Tensors
from eqfuse.tile.native.text import (
    combination,
    kept,
    number,
    type_of,
)
from eqfuse.tile.nodes import (
    Elementwise,
    FoldTile,
    ReduceTile,
    Value,
)
from eqfuse.tile.walk import operands

STRETCH = 64
"""Trips of such a loop after which its sums are added to totals, and begin anew: what is added to a long sum is small beside it,
and loses digits, always in the same direction where it is less than half of the sum's last place. Of n terms a term is
rounded about STRETCH + n / (UNROLLED * STRETCH * lanes) times, not n / (UNROLLED * lanes) times."""


class Folds(Tensors):
    """Reductions, and registered folds."""

    def _states(self, item: Define) -> list[str]:
        """The names of the state variables that a fold computes, by place; one for a plain reduction."""
        name = item.value.name
        return [state or f"{name} {k}" for k, state in enumerate(self.tree.states.get(name, [name]))]

    def _state_dtypes(self, item: Define) -> list[str]:
        return [v.dtype for v in item.op.values] if isinstance(item.op, FoldTile) else [item.value.dtype]

    def _ops(self, item: Define) -> list[str]:
        if isinstance(item.op, FoldTile):
            found = fold_of(item.op.op)
            assert found is not None
            return list(found[0].ops)
        assert isinstance(item.op, ReduceTile)
        return [item.op.op]

    def _accumulator(self, name: str) -> str:
        found = self.register(f"accumulator of {name}")
        assert found is not None
        return found[0]

    def _is_sum(self, item: Define) -> bool:
        """Whether a fold is a plain sum of reals, which rounds."""
        return isinstance(item.op, ReduceTile) and item.op.op == "sum" and item.value.dtype not in INTEGERS

    def _add_to_totals(self, sums: Sequence[Define]) -> None:
        """What a stretch of a loop has added up, to what those before it have."""
        for item in sums:
            (name,), nothing = self._states(item), number(0.0, item.value.dtype)
            total = f"{self._accumulator(name)}_total"
            parts = [f"{self._accumulator(name)}_{copy}" for copy in range(UNROLLED)]
            self.emit(f"{total} = {total} + ({' + '.join(parts)});")
            self.emit(f"{' = '.join(parts)} = splat({nothing});")

    def _copy(self, accumulators: Sequence[Define], copy: int) -> None:
        """The accumulators that one of several copies of a loop's body adds to."""
        for item in accumulators:
            for name in self._states(item):
                self.bind(f"accumulator {name}", f"{self._accumulator(name)}_{copy}", True)

    def _begin(self, begin: Begin) -> None:
        item = begin.item
        identities = [
            number(identity(o, d), d) for o, d in zip(self._ops(item), self._state_dtypes(item), strict=True)
        ]
        for name, dtype, first in zip(self._states(item), self._state_dtypes(item), identities, strict=True):
            if begin.place != "memory":
                accumulator = self.names.fresh(f"sum_{name}")
                self.bind(f"accumulator of {name}", accumulator, True)
                if begin.place == "lanes":
                    copies = ", ".join(f"{accumulator}_{k} = splat({first})" for k in range(UNROLLED))
                    self.emit(f"{type_of(dtype, True)} {copies};")
                    if self._is_sum(item):
                        self.emit(f"{type_of(dtype, True)} {accumulator}_total = splat({first});")
                else:
                    self.emit(f"{type_of(dtype, False)} {accumulator} = {first};")
            else:
                self._clear(self._accumulating(name, item), first)

    def _accumulating(self, name: str, item: Define) -> Buffer:
        if name not in self.tree.memory:  # a state variable that nothing reads
            self.tree.memory[name] = self.tree.memory[item.value.name]
            place = self._states(item).index(name)
            value = replace(item.value, name=name, dtype=self._state_dtypes(item)[place])
            self.tree.defined[name] = replace(item, value=value)
        return self._buffer(name)

    def _clear(self, buffer: Buffer, first: str) -> None:
        """Fills the part of a buffer inside a loop with one number."""
        open_ = {opened.axis: opened.at for opened in self.loops}
        at = self.names.fresh("at")
        inner = [dim for dim in buffer.dims if dim not in open_]
        offset = [
            " * ".join([open_[dim], *(f"most_{self._c(d)}" for d in buffer.dims[k + 1 :])])
            for k, dim in enumerate(buffer.dims)
            if dim in open_
        ]
        count = " * ".join(f"most_{self._c(dim)}" for dim in inner) or "1"
        place = " + ".join([buffer.name, *offset, at])
        self.emit(f"for (i64 {at} = 0; {at} < {count}; {at}++) put_{kept(buffer.dtype)}({place}, {first});")

    def _fold(self, item: Define) -> None:
        names, dtypes, vector = self._states(item), self._state_dtypes(item), self._vector
        operands_ = list(operands(item.op))
        here = self.loops[-1].axis == folded_axis(item)
        wide = vector is not None and (here or vector.axis in item.value.dims)
        new = [self._read(v, wide=wide) for v in operands_]
        if here:
            if wide:
                old = [self.register(f"accumulator {name}") for name in names]
                states = [found[0] for found in old if found is not None]
            else:
                states = [self._accumulator(name) for name in names]
        elif (held := [self.register(f"held {name}") for name in names]) and None not in held:
            here, buffers = True, []
            states = [found[0] for found in held if found is not None]
        else:
            buffers = [self._accumulating(name, item) for name in names]
            states = [self._read(replace(item.value, name=name), wide=wide) for name in names]
        factors = self._factors(item, operands_[0], wide)
        if factors:
            total = f"fma({factors[0]}, {factors[1]}, {states[0]})"
            if vector is not None and vector.left and here:
                total = f"choose(first({vector.left}), {total}, {states[0]})"
            if here:
                self.emit(f"{states[0]} = {total};")
            else:
                self._put(kept(buffers[0].dtype), *self._address(buffers[0]), total, wide)
            return
        values = []
        for text, dtype in zip(new, dtypes, strict=True):
            name = self.names.fresh("new")
            self.emit(f"const {type_of(dtype, wide)} {name} = {text};")
            values.append(name)
        if here and wide and vector is not None and vector.left:
            firsts = [number(identity(o, d), d) for o, d in zip(self._ops(item), dtypes, strict=True)]
            values = [
                f"choose(first({vector.left}), {text}, splat({one}))"
                for text, one in zip(values, firsts, strict=True)
            ]
        combined = self._combined(item, states, values, wide)
        results = []
        for text, dtype in zip(combined, dtypes, strict=True):
            name = self.names.fresh("joined")
            self.emit(f"const {type_of(dtype, wide)} {name} = {text};")
            results.append(name)
        if here:
            for state, result in zip(states, results, strict=True):
                self.emit(f"{state} = {result};")
            return
        for buffer, result in zip(buffers, results, strict=True):
            self._put(kept(buffer.dtype), *self._address(buffer), result, wide)

    def _factors(self, item: Define, value: Value, wide: bool) -> tuple[str, str] | None:
        """The factors of what a sum adds up, vectors of float32 that are at hand: the product is added before it is rounded."""
        made = self.tree.defined[value.name].op
        if not (isinstance(item.op, ReduceTile) and item.op.op == "sum" and wide and value.dtype == "f32"):
            return None
        match made:
            case Elementwise("mul", (left, right)):
                sides = (left, right)
            case Elementwise("sq", (one,)):
                sides = (one, one)
            case _:
                return None
        if any(side.dtype != "f32" or self.register(side.name) is None for side in sides):
            return None
        first, second = (self._read(side, wide=True) for side in sides)
        return first, second

    def _combined(self, item: Define, states: Sequence[str], others: Sequence[str], wide: bool) -> list[str]:
        if isinstance(item.op, FoldTile):
            found = fold_of(item.op.op)
            assert found is not None
            return combination(found[0], states, others, self._state_dtypes(item), wide)
        assert isinstance(item.op, ReduceTile)
        templates = {
            "sum": "{0} + {1}",
            "prod": "{0} * {1}",
            "max": "maximum({0}, {1})",
            "min": "minimum({0}, {1})",
        }
        return [templates[item.op.op].format(states[0], others[0])]

    def _end(self, end: End) -> None:
        item = end.item
        names, dtypes = self._states(item), self._state_dtypes(item)
        accumulators = [self._accumulator(name) for name in names]
        if end.place == "lanes":
            for copy in range(1, UNROLLED):
                old = [f"{a}_0" for a in accumulators]
                combined = self._combined(item, old, [f"{a}_{copy}" for a in accumulators], True)
                with self.block():
                    for k, (text, dtype) in enumerate(zip(combined, dtypes, strict=True)):
                        self.emit(f"const {type_of(dtype, True)} both{k} = {text};")
                    for k, name in enumerate(old):
                        self.emit(f"{name} = both{k};")
            if self._is_sum(item):
                self.emit(f"{accumulators[0]}_0 = {accumulators[0]}_0 + {accumulators[0]}_total;")
            if isinstance(item.op, ReduceTile):
                results = [f"fold_{item.op.op}({accumulators[0]}_0)"]
            else:
                results = self._lanes(item, accumulators)
        else:
            results = accumulators
        for name, dtype, text in zip(names, dtypes, results, strict=True):
            result = self.names.fresh(name)
            self.emit(f"const {type_of(dtype, False)} {result} = {text};")
            self.bind(name, result, False)
            if name in self.tree.memory:
                self._keep(replace(item.value, name=name), False)

    def _lanes(self, item: Define, accumulators: Sequence[str]) -> list[str]:
        """The states of all lanes combined, one after the other."""
        dtypes = self._state_dtypes(item)
        totals = [self.names.fresh("total") for _ in accumulators]
        for total, accumulator, dtype in zip(totals, accumulators, dtypes, strict=True):
            self.emit(f"{type_of(dtype, False)} {total} = {accumulator}_0[0];")
        with self.block("for (int lane = 1; lane < LANES; lane++)"):
            combined = self._combined(item, totals, [f"{a}_0[lane]" for a in accumulators], False)
            for k, (text, dtype) in enumerate(zip(combined, dtypes, strict=True)):
                self.emit(f"const {type_of(dtype, False)} both{k} = {text};")
            for k, total in enumerate(totals):
                self.emit(f"{total} = both{k};")
        return totals
