"""One rank's run of the steps of a sharded program, whatever it computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eqfuse.rules.merge import State
from eqfuse.sharding.exchange import Gather, Join, Parts, Pass, Run, Total
from eqfuse.sharding.nodes import (
    PASSED,
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Concatenate,
    Line,
    Narrow,
    Ring,
    Sharding,
    ShardPlan,
    Step,
    Tree,
    own_rank,
    start_of,
    total_of,
)


class Machine(Protocol):
    """What a rank computes with: kernels on torch tensors, or an interpreter."""

    def compute(
        self, lines: Sequence[Line], gives: Sequence[str], values: Mapping[str, Any], place: Place
    ) -> dict[str, Any]:
        """The values of a program's lines that it gives."""

    def nothing(self, state: State, values: Mapping[str, Any], place: Place) -> Any:
        """The identity, as a state of no positions."""

    def part(self, array: Any, dimension: int, start: int, length: int) -> Any: ...

    def shape(self, array: Any) -> tuple[int, ...]:
        """The shape of one array of a rank."""


@dataclass(frozen=True)
class Place:
    """Where a rank is: its number and that of all by dimension of the mesh; the lengths of every sharded axis, by its class, on the
    ranks along it."""

    sharding: Sharding
    rank: Mapping[str, int]
    size: Mapping[str, int]
    lengths: Mapping[str, tuple[int, ...]]
    extents: Mapping[str, int]
    """The extents of axes over all ranks."""

    def length(self, axis: str) -> int:
        """The positions of a sharded axis on this rank."""
        return self.lengths[axis][self.rank[self.sharding.meshes[axis]]]

    def start(self, axis: str, rank: int | None = None) -> int:
        own = self.rank[self.sharding.meshes[axis]] if rank is None else rank
        return sum(self.lengths[axis][:own])

    def local(self) -> dict[str, int]:
        """The extents of axes on this rank."""
        classes = self.sharding.classes
        return {
            axis: self.length(classes[axis]) if axis in classes else n for axis, n in self.extents.items()
        }

    def scalars(self) -> dict[str, int]:
        """What programs read of it."""
        found = {own_rank(mesh): rank for mesh, rank in self.rank.items()}
        for axis, each in self.lengths.items():
            found |= {start_of(axis): self.start(axis), total_of(axis): sum(each)}
        return found


def run(sharded: ShardPlan, place: Place, given: Mapping[str, Any], machine: Machine) -> Run:
    """Runs the steps on a rank's tensors and scalars; the result has every value that was made."""
    values = {**given, **place.scalars()}
    for step in sharded.steps:
        yield from _step(step, sharded, place, values, machine)
    return values


def _step(step: Step, sharded: ShardPlan, place: Place, values: dict[str, Any], machine: Machine) -> Any:
    match step:
        case Compute(lines, gives):
            values |= machine.compute(lines, gives, values, place)
        case AllGather(mesh, names):
            got = yield Gather(mesh, tuple(values[name] for name in names))
            _named(values, names, got)
        case AllReduce(mesh, op, names):
            got = yield Total(mesh, op, tuple(values[name] for name in names))
            _named(values, names, got)
        case AllToAll(mesh, names, axis):
            found = place.sharding.classes[axis]
            at = tuple(sharded.dims[f"{name}_all"].index(axis) - 1 for name in names)
            got = yield Parts(mesh, tuple(values[name] for name in names), at, place.lengths[found])
            _named(values, names, got)
        case Concatenate(mesh, tensors):
            got = yield Join(
                mesh,
                tuple(values[tensor] for tensor, *_ in tensors),
                tuple(dimension for _, dimension, _, _ in tensors),
                tuple(place.lengths[axis] for _, _, axis, _ in tensors),
            )
            values |= zip((name for *_, name in tensors), got, strict=True)
        case Narrow(tensors):
            for tensor, dimension, axis, name in tensors:
                values[name] = machine.part(values[tensor], dimension, place.start(axis), place.length(axis))
        case Tree():
            yield from _tree(step, place, values, machine)
        case Ring():
            yield from _ring(step, place, values, machine)


def _named(values: dict[str, Any], names: Sequence[str], got: Sequence[Any]) -> None:
    values |= {f"{name}_all": value for name, value in zip(names, got, strict=True)}


def _tree(step: Tree, place: Place, values: dict[str, Any], machine: Machine) -> Any:
    """Merges with the rank one, two, four, ... further on, so that parts stay in order; then the first rank's goes back the same way."""
    size = place.size[step.mesh]
    mine = [values[name] for name in step.values]
    like = tuple(machine.shape(value) for value in mine)
    distances = [1 << n for n in range((size - 1).bit_length())]
    for distance in distances:
        sources = [
            each + distance if each % (2 * distance) == 0 and each + distance < size else None
            for each in range(size)
        ]
        got = (yield Pass(step.mesh, tuple(mine), tuple(sources), like))()
        if got is not None:
            sides = dict(zip((f"{name}_a" for name in step.values), mine, strict=True))
            sides |= zip((f"{name}_b" for name in step.values), got, strict=True)
            gives = [f"{name}_new" for name in step.values]
            made = machine.compute(step.merge, gives, {**values, **sides}, place)
            mine = [made[name] for name in gives]
    for distance in reversed(distances):
        sources = [each - distance if each % (2 * distance) == distance else None for each in range(size)]
        got = (yield Pass(step.mesh, tuple(mine), tuple(sources), like))()
        mine = mine if got is None else got
    _named(values, step.values, mine)


def _ring(step: Ring, place: Place, values: dict[str, Any], machine: Machine) -> Any:
    """Every rank's operands in turn, the next ones on their way while those at hand are computed with."""
    size, rank = place.size[step.mesh], place.rank[step.mesh]
    sources = tuple((each - 1) % size for each in range(size))
    held = [values[tensor] for tensor, *_ in step.tensors]
    states = {state.name: machine.nothing(state, values, place) for state in step.states}
    for turn in range(size):
        of = (rank - turn) % size
        waiting = None
        if turn + 1 < size:
            like = tuple(
                _resized(machine.shape(value), dimension, place.lengths[axis][(of - 1) % size])
                for value, (_, dimension, axis, _) in zip(held, step.tensors, strict=True)
            )
            waiting = yield Pass(step.mesh, tuple(held), sources, like)
        axis = step.tensors[0][2]
        if place.lengths[axis][of]:
            passed = {name: value for (*_, name), value in zip(step.tensors, held, strict=True)}
            passed[start_of(PASSED)] = place.start(axis, of)
            gives = [f"{state.name}_new" for state in step.states]
            made = machine.compute(step.update, gives, {**values, **states, **passed}, place)
            states = {state.name: made[name] for state, name in zip(step.states, gives, strict=True)}
        if waiting is not None:
            held = waiting()
    values |= states


def _resized(shape: Sequence[int], dimension: int, length: int) -> tuple[int, ...]:
    return tuple(length if at == dimension else each for at, each in enumerate(shape))
