"""One rank's run of the steps of a sharded program, whatever it computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from eqfuse.rules.merge import State
from eqfuse.sharding.exchange import Arrays, Gather, Join, Parts, Pass, Run, Total
from eqfuse.sharding.nodes import (
    PASSED,
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Concatenate,
    Grouped,
    Line,
    Narrow,
    Ring,
    Sharding,
    ShardPlan,
    Step,
    Tree,
    flat,
    own_rank,
    read_by,
    start_of,
    total_of,
)
from eqfuse.terms.folds import fold_of
from eqfuse.terms.nodes import Reduce, walk


class Machine(Arrays, Protocol):
    """What a rank computes with: kernels on torch tensors, or an interpreter."""

    def compute(
        self, lines: Sequence[Line], gives: Sequence[str], values: Mapping[str, Any], place: Place
    ) -> dict[str, Any]:
        """The values of a program's lines that it gives."""

    def nothing(self, state: State, values: Mapping[str, Any], place: Place) -> Any:
        """The identity, as a state of no positions."""

    def shape(self, array: Any) -> tuple[int, ...]:
        """The shape of one array of a rank."""

    def groups(self, arrays: Sequence[Any]) -> int:
        """How many groups tensors become whole in."""

    def aside(self) -> AbstractContextManager[Callable[[Sequence[Any]], Callable[[], None]]]:
        """Where what is done runs beside computations. What it gives makes, of the arrays that were made there, the function that waits for
        them."""


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
    along: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """The sharded axes along the dimensions of inputs."""
    zigzag: bool = False
    """Whether a rank has two pieces of each sharded axis: of n ranks, pieces r and 2 n - 1 - r of 2 n."""

    def length(self, axis: str) -> int:
        """The positions of a sharded axis on this rank."""
        return self.lengths[axis][self.rank[self.sharding.meshes[axis]]]

    def start(self, axis: str, rank: int | None = None) -> int:
        own = self.rank[self.sharding.meshes[axis]] if rank is None else rank
        return sum(self.lengths[axis][:own])

    def pieces(self, axis: str, rank: int | None = None) -> tuple[tuple[int, int], ...]:
        """The first position and the length of each piece that a rank has of a sharded axis."""
        own = self.rank[self.sharding.meshes[axis]] if rank is None else rank
        lengths = self.lengths[axis]
        if not self.zigzag or axis in self.sharding.outputs:
            return ((self.start(axis, own), lengths[own]),)
        firsts = [-(-length // 2) for length in lengths]
        last = sum(lengths) - sum(length // 2 for length in lengths[: own + 1])
        return (sum(firsts[:own]), firsts[own]), (last, lengths[own] // 2)

    def local(self) -> dict[str, int]:
        """The extents of axes on this rank."""
        classes = self.sharding.classes
        return {
            axis: self.length(classes[axis]) if axis in classes else n for axis, n in self.extents.items()
        }

    def of_piece(self, axis: str, length: int) -> Place:
        """The same with so many positions of an axis on this rank."""
        at, each = self.rank[self.sharding.meshes[axis]], self.lengths[axis]
        return replace(self, lengths={**self.lengths, axis: (*each[:at], length, *each[at + 1 :])})

    def scalars(self) -> dict[str, int]:
        """What programs read of it."""
        found = {own_rank(mesh): rank for mesh, rank in self.rank.items()}
        for axis, each in self.lengths.items():
            found |= {start_of(axis): self.start(axis), total_of(axis): sum(each)}
        return found


def run(plan: ShardPlan, place: Place, given: Mapping[str, Any], machine: Machine) -> Run:
    """Runs the steps on a rank's tensors and scalars; the result has every value that was made."""
    values = {**given, **place.scalars()}
    for step in plan.steps:
        yield from _step(step, plan, place, values, machine)
    return values


def _step(step: Step, plan: ShardPlan, place: Place, values: dict[str, Any], machine: Machine) -> Any:
    match step:
        case Compute():
            values |= _computed(step, plan, place, values, machine)
        case AllGather(mesh, names):
            got = yield Gather(mesh, tuple(values[name] for name in names))
            _named(values, names, got)
        case AllReduce(mesh, op, names):
            got = yield Total(mesh, op, tuple(values[name] for name in names))
            _named(values, names, got)
        case AllToAll(mesh, names, axis):
            found = place.sharding.classes[axis]
            at = tuple(plan.dims[f"{name}_all"].index(axis) - 1 for name in names)
            got = yield Parts(mesh, tuple(values[name] for name in names), at, place.lengths[found])
            _named(values, names, got)
        case Concatenate():
            values |= yield from _fetched(step, place, values, machine)
        case Grouped():
            yield from _grouped(step, plan, place, values, machine)
        case Narrow(tensors):
            for tensor, dimension, axis, name in tensors:
                values[name] = machine.part(values[tensor], dimension, place.start(axis), place.length(axis))
        case Tree():
            yield from _tree(step, place, values, machine)
        case Ring():
            yield from _ring(step, place, values, machine)


def _fetched(step: Concatenate, place: Place, values: Mapping[str, Any], machine: Machine) -> Any:
    """Tensors that have become whole, by name."""
    got = yield Join(
        step.mesh,
        tuple(values[tensor] for tensor, *_ in step.tensors),
        tuple(dimension for _, dimension, _, _ in step.tensors),
        tuple(place.lengths[axis] for _, _, axis, _ in step.tensors),
    )
    return {
        name: _in_order(parts, dimension, axis, place, machine)
        for (_, dimension, axis, name), parts in zip(step.tensors, got, strict=True)
    }


def _grouped(step: Grouped, plan: ShardPlan, place: Place, values: dict[str, Any], machine: Machine) -> Any:
    """Fetches the next group before it computes one."""
    count = place.extents[step.axis]
    groups = max(1, min(count, machine.groups([values[tensor] for tensor, *_ in step.fetch.tensors])))
    bounds = [count * number // groups for number in range(groups + 1)]
    each: list[dict[str, Any]] = []
    for start, stop in pairwise(bounds):
        cut = {name: machine.part(values[name], at, start, stop - start) for name, at in step.slices}
        each.append({**values, **cut})
    ready: list[tuple[dict[str, Any], Callable[[], None]]] = []
    made: list[dict[str, Any]] = []
    for number in range(groups + 1):
        if number < groups:
            with machine.aside() as after:
                whole = yield from _fetched(step.fetch, place, each[number], machine)
                ready.append((whole, after(list(whole.values()))))
        if number:
            whole, wait = ready[number - 1]
            wait()
            extents = {**place.extents, step.axis: bounds[number] - bounds[number - 1]}
            there = replace(place, extents=extents)
            made.append(_computed(step.compute, plan, there, {**each[number - 1], **whole}, machine))
            ready[number - 1] = {}, wait
    for name in step.compute.gives:
        parts = [part[name] for part in made]
        at = plan.dims[name].index(step.axis)
        values[name] = parts[0] if len(parts) == 1 else machine.join(parts, at)


def _computed(
    step: Compute, plan: ShardPlan, place: Place, values: dict[str, Any], machine: Machine
) -> dict[str, Any]:
    """What a program gives: once for each piece of the axes whose positions it reads."""
    if not place.zigzag:
        return machine.compute(step.lines, step.gives, values, place)
    made: dict[str, Any] = {}
    for axis, gives in positioned(step, place.sharding).items():
        lines = needed(step.lines, gives)
        if not axis:
            made |= machine.compute(lines, gives, values, place)
            continue
        parts: list[dict[str, Any]] = []
        before = 0
        for start, length in place.pieces(axis):
            if length or not parts:
                given = {**values, start_of(axis): start}
                for name, dimension in _along(plan, place, axis, values):
                    given[name] = machine.part(values[name], dimension, before, length)
                parts.append(machine.compute(lines, gives, given, place.of_piece(axis, length)))
            before += length
        for name in gives:
            dimension = [place.sharding.classes.get(of) for of in plan.dims[name]].index(axis)
            each = [part[name] for part in parts]
            made[name] = each[0] if len(each) == 1 else machine.join(each, dimension)
    return made


def positioned(step: Compute, sharding: Sharding) -> dict[str, list[str]]:
    """The values that a program gives, by the sharded axis, by class, whose positions they are made of; "" of none, and several with
    commas between."""
    starts = {start_of(axis): axis for axis in sharding.meshes if axis not in sharding.outputs}
    read: dict[str, frozenset[str]] = {}
    for line in step.lines:
        names = read_by(line)
        own = frozenset(starts[name] for name in names if name in starts)
        read[line.name] = own.union(*(read[name] for name in names if name in read))
    found: dict[str, list[str]] = {}
    for name in step.gives:
        found.setdefault(", ".join(sorted(read[name])), []).append(name)
    return found


def needed(lines: Sequence[Line], gives: Sequence[str]) -> tuple[Line, ...]:
    """The lines that some values are made of."""
    names, found = set(gives), list[Line]()
    for line in reversed(lines):
        if line.name in names:
            names |= read_by(line)
            found.append(line)
    return tuple(reversed(found))


def in_two_pieces(plan: ShardPlan, sharding: Sharding) -> str:
    """Why a rank cannot run the steps where it has two pieces of each sharded axis; "" where it can."""
    for step in flat(plan.steps):
        match step:
            case Ring() | AllToAll():
                return "what ranks pass on is one piece of an axis"
            case Compute(lines, _):
                if any(line.is_prefix for line in lines):
                    return "prefixes go on from one piece alone"
                for node in walk(*(line.value for line in lines)):
                    fold = (
                        fold_of(node.op)
                        if isinstance(node, Reduce) and node.axis in sharding.classes
                        else None
                    )
                    if fold is not None and not fold[0].commutative:
                        return f"{fold[0].name} asks for positions in order"
                for axis, gives in positioned(step, sharding).items():
                    if not axis:
                        continue
                    rows = all(axis in map(sharding.classes.get, plan.dims[name]) for name in gives)
                    nodes = walk(*(line.value for line in needed(lines, gives)))
                    if not rows or any(isinstance(n, Reduce) and n.axis in sharding.classes for n in nodes):
                        return f"partial states read positions of {axis!r}"
    return ""


def _along(plan: ShardPlan, place: Place, axis: str, values: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The tensors and values that a rank has its positions of an axis of, and the dimension."""
    found = [(name, at) for (name, at), of in place.along.items() if of == axis and name in values]
    for name, dims in plan.dims.items():
        if name in values:
            found += [(name, at) for at, of in enumerate(dims) if place.sharding.classes.get(of) == axis]
    return found


def _in_order(parts: Sequence[Any], dimension: int, axis: str, place: Place, arrays: Arrays) -> Any:
    """A tensor that is whole, from the parts of the ranks."""
    found: list[tuple[int, Any]] = []
    for rank, part in enumerate(parts):
        before, pieces = 0, place.pieces(axis, rank)
        for start, length in pieces:
            if length:
                piece = part if len(pieces) == 1 else arrays.part(part, dimension, before, length)
                found.append((start, piece))
            before += length
    found.sort(key=lambda each: each[0])
    return arrays.join([piece for _, piece in found], dimension) if found else parts[0]


def own_part(whole: Any, dimension: int, axis: str, place: Place, arrays: Arrays) -> Any:
    """What a rank has of a tensor along a dimension."""
    parts = [arrays.part(whole, dimension, start, length) for start, length in place.pieces(axis)]
    return parts[0] if len(parts) == 1 else arrays.join(parts, dimension)


def gathered(parts: Sequence[Any], axes: Sequence[str], places: Sequence[Place], arrays: Arrays) -> Any:
    """A value of all ranks from the part of each: whole along sharded axes; of others the last rank's."""
    held = list(zip(places, parts, strict=True))
    for mesh in places[0].rank:
        rows: dict[tuple[tuple[str, int], ...], list[tuple[Place, Any]]] = {}
        for place, part in sorted(held, key=lambda each: each[0].rank[mesh]):
            rows.setdefault(tuple((m, n) for m, n in place.rank.items() if m != mesh), []).append(
                (place, part)
            )
        held = []
        for row in rows.values():
            place, part = row[-1]
            for dimension, axis in enumerate(axes):
                if place.sharding.mesh(axis) == mesh:
                    parts = [each for _, each in row]
                    part = _in_order(parts, dimension, place.sharding.classes[axis], place, arrays)
            held.append((place, part))
    return held[0][1]


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
