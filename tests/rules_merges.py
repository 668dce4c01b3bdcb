"""Derived merges run as they are written, in float64: tile by tile, and over random partitions.

Nothing of the loop, tile or kernel stages takes part: what is tested is the merge that derivation hands over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eqfuse.compiler import derive
from eqfuse.derived import Derived
from eqfuse.extract.kernel_shapes import KernelShape
from eqfuse.extract.partition import Partition
from eqfuse.rules.merge import Group
from eqfuse.rules.states import axis_order
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.functions import CASTS
from eqfuse.terms.interpreter import Env, evaluate, evaluate_expr, expand
from eqfuse.terms.nodes import REDUCTIONS, Call, Expr, Local, Program, Reduce, walk

Array = np.ndarray[Any, Any]
Locals = dict[str, tuple[tuple[str, ...], Any]]
Walk = Callable[[Group, Env], Locals]
"""How a group is walked: the exact values of its states, from their merge."""


class Unrounded(FloatDomain):
    """float64 in which casts change nothing, as in the algebra."""

    def call(self, fn: str, args: Sequence[Any]) -> Array:
        return args[0] if fn in CASTS else super().call(fn, args)


UNROUNDED = Unrounded()


@dataclass(frozen=True)
class Derivation:
    """A program, what it was rewritten to, and its kernels with their groups, all computed in place."""

    derived: Derived
    kernels: tuple[KernelShape, ...]
    extents: Mapping[str, int]

    @property
    def program(self) -> Program:
        return self.derived.program

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(group for kernel in self.kernels for group in kernel.groups)


def derivation(source: str, extents: Mapping[str, int], *, strict_casts: bool = False) -> Derivation:
    """Parses, prepares and derives every group of a program."""
    derived = derive(source, None, strict_casts)
    order = axis_order(replace(derived.program, outputs=derived.outputs))
    partition = Partition(order, extents, recompute_share=float("inf"))
    clusters = partition.clusters(derived.outputs)
    return Derivation(derived, partition.shapes(clusters, derived.merges([clusters])), extents)


def _at(env: Env, axis: str, positions: Array) -> Env:
    """`env` with one axis restricted; values of earlier groups that have the axis are restricted with it."""
    local = {
        name: (dims, np.take(data, positions, dims.index(axis)) if axis in dims else data)
        for name, (dims, data) in env.locals.items()
    }
    return replace(env, positions={**env.positions, axis: positions}, locals=local)


def _value(
    expr: Expr, dims: tuple[str, ...], env: Env, local: Mapping[str, Any]
) -> tuple[tuple[str, ...], Array]:
    env = replace(env, locals={**env.locals, **local})
    return dims, np.array(expand(evaluate_expr(expr, env), dims, env), np.float64)


def identity(group: Group, env: Env) -> Locals:
    """The states of no positions at all."""
    return {
        s.name: (s.dims, np.full([env.extents[d] for d in s.dims], REDUCTIONS[s.op], np.float64))
        for s in group.states
    }


def step(group: Group, env: Env, states: Locals, positions: Array) -> Locals:
    """The states after one more tile."""
    assert group.merge is not None
    inside = _at(env, group.axis, positions)
    dims = {s.name: s.dims for s in group.states}
    local = dict(states)
    for update in group.merge.update:
        for part in update.parts:
            folded = Reduce(part.op, group.axis, part.body)
            local[part.name] = _value(folded, dims[update.state], inside, local)
        local[f"{update.state}_new"] = _value(update.value, dims[update.state], inside, local)
    return {name: local[f"{name}_new"] for name in dims}


def combine(group: Group, env: Env, left: Locals, right: Locals) -> Locals:
    """The states of two parts together. Only values that a combine may read are there to be read."""
    assert group.merge is not None
    dims = {s.name: s.dims for s in group.states}
    local: Locals = {f"{name}_a": left[name] for name in dims} | {f"{name}_b": right[name] for name in dims}
    for entry in group.merge.combine:
        local[f"{entry.state}_new"] = _value(entry.value, dims[entry.state], env, local)
    return {name: local[f"{name}_new"] for name in dims}


def finish(group: Group, env: Env, states: Locals) -> Locals:
    """The exact values of the states."""
    assert group.merge is not None
    dims = {s.name: s.dims for s in group.states}
    exact = {f.state: _value(f.value, dims[f.state], env, states) for f in group.merge.finish}
    return states | exact


def tiles(length: int, size: int) -> Iterator[Array]:
    for start in range(0, length, size):
        yield np.arange(start, min(start + size, length))


def rolling(size: int) -> Walk:
    """Tiles of `size` positions, the last one ragged."""

    def run(group: Group, env: Env) -> Locals:
        states = identity(group, env)
        for positions in tiles(env.extents[group.axis], size):
            states = step(group, env, states, positions)
        return finish(group, env, states)

    return run


def partitioned(seed: int) -> Walk:
    """Random parts (positions in any order, one part empty), merged pairwise in random order."""

    def run(group: Group, env: Env) -> Locals:
        rng = np.random.default_rng(seed)
        length = env.extents[group.axis]
        cuts = np.sort(rng.integers(0, length + 1, 3))
        parts = [*np.split(rng.permutation(length), cuts), np.arange(0)]
        states = [step(group, env, identity(group, env), np.sort(part)) for part in parts]
        while len(states) > 1:
            left = states.pop(int(rng.integers(len(states))))
            right = states.pop(int(rng.integers(len(states))))
            states.append(combine(group, env, left, right))
        return finish(group, env, states[0])

    return run


def fused(
    found: Derivation,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Any],
    walked: Walk,
    domain: FloatDomain = UNROUNDED,
) -> dict[str, Array]:
    """The outputs, every group that has a merge walked by it; the others folded as they are written."""
    stored = dict(tensors)
    results: dict[str, Array] = {}
    for kernel in found.kernels:
        env = Env(domain, stored, scalars, found.extents)
        for group in kernel.groups:
            values = walked(group, env) if group.merge is not None else exact(group, env)
            env = replace(env, locals={**env.locals, **values})
        for output in kernel.outputs:
            stored[output.name] = results[output.name] = _value(output.expr, output.axes, env, {})[1]
    return {output.name: results[output.name] for output in found.program.outputs}


def exact(group: Group, env: Env) -> Locals:
    """The states folded over the whole axis, each as it is defined."""
    local: Locals = {}
    for state in group.states:
        local[state.name] = _value(Reduce(state.op, group.axis, state.body), state.dims, env, local)
    return local


def unfused(
    found: Derivation,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Any],
    domain: FloatDomain = UNROUNDED,
) -> dict[str, Array]:
    """The program as it is written."""
    made = evaluate(found.program, tensors, scalars, found.extents, domain)
    return {name: np.asarray(value, np.float64) for name, value in made.items()}


def merge_expressions(group: Group) -> list[Expr]:
    """Everything that a merge evaluates: the parts, the updates, the combination of two states."""
    assert group.merge is not None
    parts = [part.body for update in group.merge.update for part in update.parts]
    return parts + [u.value for u in group.merge.update] + [c.value for c in group.merge.combine]


def reads(expr: Expr) -> set[str]:
    """Names of the states that an expression reads."""
    return {node.name for node in walk(expr) if isinstance(node, Local)}


def calls(exprs: Sequence[Expr], fn: str) -> Iterator[tuple[Expr, ...]]:
    """The arguments of every call of a function in these expressions."""
    for node in walk(*exprs):
        if isinstance(node, Call) and node.fn == fn:
            yield node.args
