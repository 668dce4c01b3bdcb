"""The meaning of loop nests: parallel axes all at once, loops tile by tile, in any scalar domain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from eqfuse.loops.check import NestError
from eqfuse.loops.integers import carried_integers
from eqfuse.loops.nodes import Buffer, Kernel, Let, Loop, Nest, Stmt, Store
from eqfuse.loops.slots import expanded
from eqfuse.loops.walk import statements
from eqfuse.terms.domain import Domain, total
from eqfuse.terms.integers import dtype_of, identity, is_exact
from eqfuse.terms.interpreter import TRIAL, Env, Value, aligned, evaluate_expr, expand, states
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Local, Program, free_axes, walk

Locals = Mapping[str, tuple[tuple[str, ...], Any]]


def run(
    nest: Nest,
    program: Program,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
    extents: Mapping[str, int],
    domain: Domain,
    *,
    tiles: Mapping[str, int],
    shards: Mapping[str, int],
    batch: int | None = None,
) -> dict[str, Any]:
    """The outputs of the program by name, as the nest computes them.

    `tiles` gives the number of positions of a tile of each axis that is looped over (an axis without
    one is a single tile), `shards` the number of shards for each shard axis. Tensors, scalars and
    `batch` are as in `terms.interpreter.evaluate`. Raises NestError where an element of an output or
    of a temporary is not written exactly once.
    """
    sizes = {**extents, **shards}
    sizes |= {axis: sizes[of] for axis, of in nest.domains}
    whole = {name: int(scalars[name]) for name in program.integers}
    memory = _Memory({buffer.name: buffer for buffer in nest.buffers}, dict(tensors))
    env = Env(domain, memory.tensors, {**scalars, **whole}, sizes, batch=batch)
    if program.in_order:
        memory.begin(states(program, env, np.nan), env)
    for kernel in map(expanded, nest.kernels):
        _run_kernel(kernel, env, memory, tiles)
    return {buffer.name: memory.tensors[buffer.name] for buffer in nest.buffers if buffer.is_output}


def _run_kernel(kernel: Kernel, env: Env, memory: _Memory, tiles: Mapping[str, int]) -> None:
    """Runs all instances together; one by one along the axes that the range of a loop depends on."""
    needed = frozenset[str]()
    known: dict[str, frozenset[str]] = {}
    for stmt in statements(kernel.body):
        match stmt:
            case Let(name, _, expr):
                known[name] = _positions(expr, known)
            case Loop(axis, start, stop, unit):
                ends = _positions(start, known) | _positions(stop, known)
                needed |= ends
                if unit:
                    known[axis] = ends
    apart = [axis for axis in kernel.parallel if axis in needed]
    for point in product(*(env.at(axis) for axis in apart)):
        positions = {axis: np.array([at]) for axis, at in zip(apart, point, strict=True)}
        _run_body(kernel.body, replace(env, positions=positions), memory, tiles)
    for stmt in statements(kernel.body):
        if isinstance(stmt, Store):
            memory.check_written(stmt.tensor)


def _positions(expr: Expr, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The axes on which an expression depends, those on which the named values do that it reads included."""
    names = [node.name for node in walk(expr) if isinstance(node, Local | Axis)]
    return free_axes(expr).union(*(known.get(name, frozenset()) for name in names))


def _run_body(body: Iterable[Stmt], env: Env, memory: _Memory, tiles: Mapping[str, int]) -> Env:
    """`env` with the values that the statements define."""
    for stmt in body:
        match stmt:
            case Let(name, _, expr):
                env = _with(env, {name: evaluate_expr(expr, env)})
            case Store():
                memory.store(stmt, env)
            case Loop():
                env = _run_loop(stmt, env, memory, tiles)
    return env


def _run_loop(loop: Loop, env: Env, memory: _Memory, tiles: Mapping[str, int]) -> Env:
    state: dict[str, tuple[tuple[str, ...], Any]] = {
        carried.name: evaluate_expr(carried.init, env) for carried in loop.carried
    }
    for name, dtype in memory.carried(loop, env).items():
        if not is_exact(state[name][1]):
            (init,) = (carried.init for carried in loop.carried if carried.name == name)
            assert isinstance(init, Const)
            state[name] = (), np.asarray(identity(init.value, dtype))
    totals = {
        stmt.name
        for stmt in loop.body
        if isinstance(stmt, Let) and isinstance(stmt.expr, Call) and stmt.expr.fn in ("add", "mul")
    }

    def carried_on(name: str, value: Value) -> Value:
        if name not in totals or is_exact(value.data):
            return value
        return Value(value.dims, total(env.domain, value.data))

    start, stop = _integer(loop.start, env), _integer(loop.stop, env)
    size = 1 if loop.unit else tiles.get(loop.axis, max(1, stop - start))
    for first in range(start, stop, size):
        tile = np.arange(first, min(first + size, stop))
        inside = replace(
            env,
            positions={**env.positions, loop.axis: tile},
            locals={**_sliced(env, loop.axis, tile), **state},
        )
        after = _run_body(loop.body, inside, memory, tiles).locals
        state = {c.name: carried_on(c.next, Value(*after[c.next])) for c in loop.carried}
        if loop.unit:
            state = {name: _without(Value(*value), loop.axis, env.domain) for name, value in state.items()}
    return _with(env, state)


def _integer_dtypes(env: Env) -> dict[str, str]:
    """dtypes of the tensors, scalars and values at hand that are no reals."""
    arrays = {**env.tensors, **{name: data for name, (_, data) in env.locals.items()}}
    found = {name: dtype_of(data) for name, data in arrays.items() if is_exact(data)}
    return found | {name: "i64" for name, number in env.scalars.items() if isinstance(number, int)}


def _with(env: Env, values: Locals) -> Env:
    return replace(env, locals={**env.locals, **values})


def _integer(expr: Expr, env: Env) -> int:
    """An integer that is the same in all trials, as integers are."""
    found = np.unique(np.asarray(evaluate_expr(expr, env).data))
    return int(found.item())


def _sliced(env: Env, axis: str, tile: npt.NDArray[np.int64]) -> Locals:
    """The values at hand, those with a component for each position of `axis` cut to the tile."""

    def cut(dims: tuple[str, ...], data: Any) -> tuple[tuple[str, ...], Any]:
        if axis not in dims:
            return dims, data
        index = tuple(tile if dim == axis else slice(None) for dim in dims)
        return dims, data[index] if is_exact(data) else env.domain.take(data, index)

    return {name: cut(*value) for name, value in env.locals.items()}


def _without(value: Value, axis: str, domain: Domain) -> Value:
    """`value` without a dimension of length one."""
    if axis not in value.dims:
        return value
    dims = tuple(dim for dim in value.dims if dim != axis)
    index = tuple(0 if dim == axis else slice(None) for dim in value.dims)
    if is_exact(value.data):
        return Value(dims, np.asarray(value.data[index]))
    return Value(dims, domain.take(value.data, index))


def _real(data: Any, domain: Domain) -> Any:
    return domain.lift(data) if is_exact(data) else data


class _Memory:
    """Tensors by name. Those that the nest stores exist from their first store on; `_times` counts
    how often each of their elements was written."""

    def __init__(self, buffers: Mapping[str, Buffer], tensors: dict[str, Any]) -> None:
        self.tensors = tensors
        self._buffers = buffers
        self._times: dict[str, npt.NDArray[np.int64]] = {}
        self._carried: dict[int, Mapping[str, str]] = {}

    def begin(self, states: Mapping[str, Any], env: Env) -> None:
        """Takes the states of recurrences, which a kernel reads before it has stored all of them."""
        for name, data in states.items():
            self._times[name] = np.zeros([env.extents[axis] for axis in self._buffers[name].axes], np.int64)
            self.tensors[name] = data

    def carried(self, loop: Loop, env: Env) -> Mapping[str, str]:
        """The carried values of a loop that are integers, whichever instance runs it."""
        if id(loop) not in self._carried:
            self._carried[id(loop)] = carried_integers(loop, _integer_dtypes(env))
        return self._carried[id(loop)]

    def store(self, stmt: Store, env: Env) -> None:
        value = evaluate_expr(stmt.expr, env)
        index = [evaluate_expr(part, env) for part in stmt.index]
        axes = tuple(dict.fromkeys(dim for part in index for dim in part.dims))
        trials = () if env.batch is None else (TRIAL,)
        dims = (*trials, *axes)
        places = tuple(np.asarray(aligned(part, axes, env.domain)) for part in index)
        for dim in set(value.dims) - set(dims):  # an axis that stands for one position alone
            value = _without(value, dim, env.domain)
        data = expand(value, dims, env)
        if stmt.tensor not in self.tensors:
            self._allocate(stmt.tensor, data, env)
        try:
            np.add.at(self._times[stmt.tensor], places, 1)
        except IndexError as error:
            raise NestError(f"{stmt.tensor!r} is written outside its shape: {error}") from error
        target = (slice(None), *places) if trials else places
        # An identity that is a whole number stands for a real one, where a shard has no position.
        if is_exact(data) != is_exact(self.tensors[stmt.tensor]):
            self.tensors[stmt.tensor] = _real(self.tensors[stmt.tensor], env.domain)
            data = _real(data, env.domain)
        if is_exact(data):
            self.tensors[stmt.tensor][target] = data
        else:
            env.domain.put(self.tensors[stmt.tensor], target, data)

    def _allocate(self, name: str, data: Any, env: Env) -> None:
        shape = tuple(env.extents[axis] for axis in self._buffers[name].axes)
        full = shape if env.batch is None else (env.batch, *shape)
        self._times[name] = np.zeros(shape, np.int64)
        self.tensors[name] = np.zeros(full, data.dtype) if is_exact(data) else env.domain.full(full, np.nan)

    def check_written(self, name: str) -> None:
        """Raises NestError unless each element was written once."""
        if name not in self._times:
            raise NestError(f"{name!r} is never written")
        wrong = np.argwhere(self._times[name] != 1)
        if len(wrong):
            times = self._times[name][tuple(wrong[0])]
            raise NestError(f"{name!r} at {tuple(map(int, wrong[0]))} is written {times} times, not once")
