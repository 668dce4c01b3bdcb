"""The steps of a sharded program on simulated ranks, against the program as written, in a finite field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from eqfuse.certification import Checks
from eqfuse.rules.merge import State
from eqfuse.sharding.engine import Place, gathered, needed, own_part, run
from eqfuse.sharding.exchange import InTurn, Run, simulated
from eqfuse.sharding.nodes import Line, Sharding, ShardPlan
from eqfuse.terms.domain import Domain
from eqfuse.terms.folds import identity
from eqfuse.terms.interpreter import TRIAL, Env, evaluate_expr, expand
from eqfuse.terms.nodes import Axis, Const, Expr, Load, Local, Program, children, rebuild, walk
from eqfuse.verify.certificate import Certificate
from eqfuse.verify.check import check_stages
from eqfuse.verify.sampling import Inputs
from eqfuse.verify.sizes import small_extents
from eqfuse.verify.source import Stage

CUTS: tuple[Callable[[int], tuple[int, ...]], ...] = (
    lambda n: (n,),
    lambda n: ((n + 1) // 2, n // 2),
    lambda n: (0, n - n // 2, n // 2),
    lambda n: (*(int(k < n) for k in range(3)), max(0, n - 3)),
    lambda n: (n - n // 3 - n // 4, 0, n // 3, 0, n // 4),
)
"""How many positions of an axis of `n` each of one to five ranks has: ragged, some of them none."""


class Held(NamedTuple):
    """An array of a rank, with a first dimension of trials or without."""

    data: Any
    trials: bool


class FieldArrays(InTurn):
    """Arrays of a domain, and numpy's of integers."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain

    def stack(self, arrays: Sequence[Held]) -> Held:
        at = int(arrays[0].trials)
        parts = [self._with_dim(each, at) for each in arrays]
        return self.join([Held(part, bool(at)) for part in parts], 0)

    def _with_dim(self, held: Held, at: int) -> Any:
        shape = self._shape(held.data)
        return self._reshaped(held.data, (*shape[:at], 1, *shape[at:]))

    def join(self, arrays: Sequence[Held], dimension: int) -> Held:
        at = dimension + arrays[0].trials
        shapes = [self._shape(each.data) for each in arrays]
        total = sum(shape[at] for shape in shapes)
        if isinstance(arrays[0].data, np.ndarray):
            return Held(np.concatenate([each.data for each in arrays], at), arrays[0].trials)
        found = self.domain.full((*shapes[0][:at], total, *shapes[0][at + 1 :]), 0.0)
        start = 0
        for each, shape in zip(arrays, shapes, strict=True):
            self.domain.put(found, (*[slice(None)] * at, slice(start, start + shape[at])), each.data)
            start += shape[at]
        return Held(found, arrays[0].trials)

    def part(self, array: Held, dimension: int, start: int, length: int) -> Held:
        index = (*[slice(None)] * (dimension + array.trials), slice(start, start + length))
        data = array.data
        return Held(
            data[index] if isinstance(data, np.ndarray) else self.domain.take(data, index), array.trials
        )

    def fold(self, op: str, arrays: Sequence[Held]) -> Held:
        stacked = self.stack(arrays)
        if isinstance(stacked.data, np.ndarray):
            folds = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
            return Held(folds[op].reduce(stacked.data, axis=int(stacked.trials)), stacked.trials)
        return Held(self.domain.reduce(op, stacked.data, int(stacked.trials)), stacked.trials)

    def _shape(self, data: Any) -> tuple[int, ...]:
        return data.shape if isinstance(data, np.ndarray) else self.domain.shape(data)

    def _reshaped(self, data: Any, shape: tuple[int, ...]) -> Any:
        return data.reshape(shape) if isinstance(data, np.ndarray) else self.domain.reshape(data, shape)

    def shape(self, array: Held) -> tuple[int, ...]:
        return self._shape(array.data)[int(array.trials) :]


class Interpreted(FieldArrays):
    """A rank's computations, interpreted."""

    def __init__(self, domain: Domain, trials: int, every: Mapping[str, str]) -> None:
        super().__init__(domain)
        self.trials, self.every = trials, every

    def compute(
        self, lines: Sequence[Line], gives: Sequence[str], values: Mapping[str, Any], place: Place
    ) -> dict[str, Held]:
        known: dict[str, Any] = dict(values)
        extents = place.local() | {own: place.extents[axis] for own, axis in self.every.items()}
        lines = needed(lines, gives)
        for node in walk(*(line.value for line in lines)):
            if isinstance(node, Load) and node.tensor in values:
                for part, size in zip(node.index, self.shape(values[node.tensor]), strict=True):
                    if isinstance(part, Axis) and part.name not in place.extents:
                        extents[part.name] = size
        for line in lines:
            known[line.name] = Held(self._value(line, known, extents), True)
        return {name: known[name] for name in gives}

    def _value(self, line: Line, values: Mapping[str, Any], extents: Mapping[str, int]) -> Any:
        """The value of a line, with a first dimension of trials."""
        tensors: dict[str, Any] = {}
        local: dict[str, Any] = {}
        memo: dict[Expr, Expr] = {}
        for node in walk(line.value):
            match node:
                case Load(name, index):
                    held = values[name]
                    if self._is_integers(held) and held.trials:
                        axes = tuple(part.name for part in index if isinstance(part, Axis))
                        at = f"{name} {' '.join(axes)}"  # it may be read at several axes
                        local[at] = ((TRIAL, *axes), held.data)
                        memo[node] = Local(at, axes)
                    else:
                        tensors[name] = held.data
                        memo[node] = Load(name, tuple(memo[part] for part in index))
                case Local(name, _):
                    local[name] = ((TRIAL,) if values[name].trials else (), values[name].data)
                    memo[node] = node
                case _:
                    memo[node] = rebuild(node, tuple(memo[child] for child in children(node)))
        scalars = {name: v for name, v in values.items() if not isinstance(v, Held)}
        env = Env(self.domain, tensors, scalars, extents, locals=local, batch=self.trials)
        return expand(evaluate_expr(memo[line.value], env), (TRIAL, *line.axes), env)

    def groups(self, arrays: Sequence[Any]) -> int:
        return 2

    def _is_integers(self, held: Any) -> bool:
        return isinstance(held, Held) and isinstance(held.data, np.ndarray)

    def nothing(self, state: State, values: Mapping[str, Any], place: Place) -> Held:
        extents = place.local()
        shape = (self.trials, *(extents[axis] for axis in state.dims))
        number = identity(state.op)
        assert isinstance(number, Const)
        return Held(self.domain.full(shape, float(number.value)), True)


def stage(
    program: Program,
    plan: ShardPlan,
    sharding: Sharding,
    extents: Mapping[str, int],
    number: int,
    zigzag: bool = False,
) -> Stage:
    """The steps on as many ranks as a turn says, as a stage of verification."""
    cut = CUTS[number % len(CUTS)]
    meshes = tuple(dict.fromkeys(sharding.meshes.values()))
    lengths = {axis: cut(_extent(axis, sharding, extents)) for axis in sharding.meshes}
    size = {mesh: len(cut(1)) for mesh in meshes}

    def run_in(inputs: Inputs, domain: Domain) -> Mapping[str, Any]:
        return simulate(program, plan, sharding, lengths, size, inputs, domain, zigzag)

    parts = "; ".join(f"{axis}: {', '.join(map(str, each))}" for axis, each in lengths.items())
    return Stage(f"{plan.strategy}, {len(cut(1))} ranks", run_in, extents, f"positions of each rank: {parts}")


def _extent(axis: str, sharding: Sharding, extents: Mapping[str, int]) -> int:
    return next(extents[own] for own, of in sharding.classes.items() if of == axis and own in extents)


def simulate(
    program: Program,
    plan: ShardPlan,
    sharding: Sharding,
    lengths: Mapping[str, tuple[int, ...]],
    size: Mapping[str, int],
    inputs: Inputs,
    domain: Domain,
    zigzag: bool = False,
) -> dict[str, Any]:
    """The outputs of the ranks, put together."""
    meshes = tuple(size)
    machine = Interpreted(domain, inputs.trials, plan.every)
    along = sharding.along(program)
    ranks: list[tuple[Run, Place]] = []
    for numbers in product(*(range(size[mesh]) for mesh in meshes)):
        rank = dict(zip(meshes, numbers, strict=True))
        place = Place(sharding, rank, size, lengths, inputs.extents, along, zigzag)
        given: dict[str, Any] = dict(inputs.scalars)
        for name, value in inputs.tensors.items():
            held = Held(value, inputs.varied or not isinstance(value, np.ndarray))
            for (tensor, dimension), axis in along.items():
                if tensor == name and axis not in sharding.outputs:
                    held = own_part(held, dimension, axis, place, machine)
            given[name] = held
        ranks.append((run(plan, place, given, machine), place))
    results = simulated([(each, place.rank) for each, place in ranks], machine)
    places = [place for _, place in ranks]
    return {
        output.name: gathered([each[output.name] for each in results], output.axes, places, machine).data
        for output in program.outputs
    }


def certified(
    program: Program,
    plan: ShardPlan,
    sharding: Sharding,
    dtypes: Mapping[str, str],
    checks: Checks,
    zigzag: bool = False,
) -> Certificate:
    """What verification says of the steps on one to five ranks, whose shards are ragged and empty."""

    def stages(extents: Mapping[str, int], number: int) -> list[Stage]:
        return [stage(program, plan, sharding, extents, number + turn, zigzag) for turn in range(len(CUTS))]

    extents = small_extents(program, checks.scalars)
    return check_stages(
        program,
        stages(extents, 0),
        trials=checks.trials,
        dtypes=dtypes,
        scalars=checks.scalars,
        special="lost",
        bound=checks.bound,
        elsewhere=lambda sizes, number: stages(sizes, number)[number % len(CUTS) :][:1],
        limits=checks.limits,
    )
