"""Mistakes in loop nests: ranges, identities, which value is read when, and the order of axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from bench.mutants_terms import (
    OFF_BY_ONE,
    branches_swapped,
    condition_dropped,
    divisor_dropped,
    fold_changed,
    renamed,
)
from bench.mutation import Mutant, Same, Step, everywhere, in_bodies, in_statements
from eqfuse.loops.nodes import Carried, Let, Loop, Nest, Stmt, Store
from eqfuse.loops.walk import expressions
from eqfuse.terms.floats import FloatDomain
from eqfuse.terms.folds import identity
from eqfuse.terms.interpreter import TRIAL, Env, evaluate_all, expand
from eqfuse.terms.nodes import Axis, Call, Const, Expr, Load, Local, Reduce, Size, call, replaced, walk

Statements = tuple[Stmt, ...]
NUMBERS = (-math.inf, -1.0, 0.0, 1.0, math.inf, math.nan)
MOST_TRIED = 5
OTHER_IDENTITY = {0.0: 1.0, 1.0: 0.0, math.inf: -1.0, -math.inf: 1.0}


def _in_expressions(step: Step) -> Callable[[Nest], Iterator[Nest]]:
    """The expression of one statement changed in one node."""

    def change(stmt: Stmt) -> Iterator[Statements]:
        if isinstance(stmt, Let | Store):
            for (expr,) in everywhere(step, (stmt.expr,)):
                yield (replace(stmt, expr=expr),)

    return in_statements(change)


def _on_loops(change: Callable[[Loop], Iterable[Loop]]) -> Callable[[Nest], Iterator[Nest]]:
    return in_statements(
        lambda stmt: ((loop,) for loop in change(stmt)) if isinstance(stmt, Loop) else iter(())
    )


def _finite(nest: Nest) -> Iterator[Nest | Same]:
    """Carried maxima start at a number below which there are others."""
    magnitudes = any(
        isinstance(node, Reduce)
        and node.op == "max"
        and isinstance(node.body, Call)
        and node.body.fn == "abs"
        for kernel in nest.kernels
        for node in walk(*expressions(kernel.body))
    )
    if magnitudes:
        yield Same("no absolute value is below -1e30")
    else:
        yield from _identities(lambda n: math.copysign(1e30, n) if math.isinf(n) else None)(nest)


def _identities(numbers: Callable[[float], float | None]) -> Callable[[Nest], Iterator[Nest]]:
    """One carried value starts with another number."""

    def change(loop: Loop) -> Iterator[Loop]:
        for at, value in enumerate(loop.carried):
            if isinstance(value.init, Const) and (number := numbers(value.init.value)) is not None:
                new = replace(value, init=Const(number))
                yield replace(loop, carried=(*loop.carried[:at], new, *loop.carried[at + 1 :]))

    return _on_loops(change)


def _range(start: int, stop: int) -> Callable[[Nest], Iterator[Nest]]:
    """Loops that begin or end some positions off."""

    def moved(bound: Expr, by: int) -> Expr:
        return call("add", bound, Const(by)) if by else bound

    def change(loop: Loop) -> Iterator[Loop]:
        if not loop.unit:
            yield replace(loop, start=moved(loop.start, start), stop=moved(loop.stop, stop))

    return _on_loops(change)


def _chooses(new: Expr | None) -> bool:
    """Whether a carried value is one of two, as a maximum is: folding a position twice changes nothing."""
    match new:
        case Call("maximum" | "minimum", _):
            return True
        case Call("where", (_, Local(), Local())):
            return True
        case _:
            return False


def _shards_overlap(nest: Nest) -> Iterator[Nest | Same]:
    extremes: list[Same] = []

    def change(loop: Loop) -> Iterator[Loop]:
        if loop.unit or isinstance(loop.stop, Size):
            return
        values = {stmt.name: stmt.expr for stmt in loop.body if isinstance(stmt, Let)}
        news = [values.get(carried.next) for carried in loop.carried]
        if all(map(_chooses, news)):
            extremes.append(Same("a max may be folded twice"))
        else:
            yield replace(loop, stop=call("minimum", call("add", loop.stop, Const(1)), Size(loop.axis)))

    yield from _on_loops(change)(nest)
    yield from extremes[:1]


def _shard_missed(first: bool) -> Callable[[Nest], Iterator[Nest]]:
    """A fold over shards takes its identity for the first of them, or the last."""

    def mutate(nest: Nest) -> Iterator[Nest]:
        shards = dict(nest.shards)

        def step(node: Expr) -> Iterator[Expr]:
            match node:
                case Reduce(op, axis, body) if axis in shards:
                    at = Axis(axis)
                    last = call("sub", Size(axis), Const(1))
                    kept = call("gt", at, Const(0)) if first else call("lt", at, last)
                    yield Reduce(op, axis, call("where", kept, body, identity(op)))

        return _in_expressions(step)(nest)

    return mutate


def _last_shard_ragged(nest: Nest) -> Iterator[Nest]:
    """Shards of n // s positions: the rest of the axis belongs to none."""

    def floor(node: Expr) -> Iterator[Expr]:
        match node:
            case Call("floordiv", (Call("sub", (Call("add", (size, shards)), Const(1))), divisor)):
                if shards is divisor:
                    yield call("floordiv", size, divisor)

    yield from _in_expressions(floor)(nest)
    yield from _on_loops(
        lambda loop: (
            replace(loop, start=start, stop=stop)
            for start, stop in everywhere(floor, (loop.start, loop.stop))
        )
    )(nest)


def _first_shard_for_all(nest: Nest) -> Iterator[Nest]:
    """A kernel that joins shards reads the states of the first one every time."""
    shards = dict(nest.shards)
    temporaries = {buffer.name for buffer in nest.buffers if not buffer.is_output}

    def step(node: Expr) -> Iterator[Expr]:
        match node:
            case Load(tensor, index) if tensor in temporaries:
                joined = [isinstance(part, Axis) and part.name in shards for part in index]
                parts = zip(index, joined, strict=True)
                yield Load(tensor, tuple(Const(0) if fixed else part for part, fixed in parts))

    return _in_expressions(step)(nest)


def _in_loops(change: Callable[[Loop], Iterable[Statements]]) -> Callable[[Nest], Iterator[Nest]]:
    """One loop's body changed."""
    return _on_loops(lambda loop: (replace(loop, body=body) for body in change(loop)))


def _reads(body: Statements, old: str, new: str, first: int) -> Iterator[Statements]:
    """One statement from the `first` on reads `new` where it read `old`. Where its value is the same whatever it reads
    there (the position of one of two equal maxima), that is no mistake."""
    for at in range(first, len(body)):
        stmt = body[at]
        if isinstance(stmt, Let | Store) and not (isinstance(stmt, Let) and stmt.name == new):
            if not _depends(stmt.expr, old):
                continue
            for (expr,) in everywhere(_read_as(old, new), (stmt.expr,)):
                yield (*body[:at], replace(stmt, expr=expr), *body[at + 1 :])


def _depends(expr: Expr, name: str) -> bool:
    """Whether a scalar's value changes with `name`, tried on every choice of `NUMBERS`; true where that is not tried."""
    names = sorted({node.name for node in walk(expr) if isinstance(node, Local)})
    plain = all(isinstance(n, Call | Const) or (isinstance(n, Local) and not n.dims) for n in walk(expr))
    if name not in names or not plain or len(names) > MOST_TRIED:
        return True
    grid = np.meshgrid(*[NUMBERS] * len(names), indexing="ij")
    values = {n: ((TRIAL,), axis.ravel()) for n, axis in zip(names, grid, strict=True)}
    env = Env(FloatDomain(), {}, {}, {}, locals=values, batch=grid[0].size)
    (value,) = evaluate_all([expr], env)
    found = expand(value, (TRIAL,), env).reshape(grid[0].shape)
    return not np.array_equal(found, np.roll(found, 1, names.index(name)), equal_nan=True)


def _read_as(old: str, new: str) -> Step:
    def step(node: Expr) -> Iterator[Expr]:
        match node:
            case Local(name, dims) if name == old:
                yield Local(new, dims)

    return step


def _defined_at(body: Statements, name: str) -> int:
    return next(at for at, stmt in enumerate(body) if isinstance(stmt, Let) and stmt.name == name)


def _stale(loop: Loop) -> Iterator[Statements]:
    for value in loop.carried:
        yield from _reads(loop.body, value.next, value.name, 0)


def _early(loop: Loop) -> Iterator[Statements]:
    for value in loop.carried:
        yield from _reads(loop.body, value.name, value.next, _defined_at(loop.body, value.next) + 1)


def _not_carried(loop: Loop) -> Iterator[Loop]:
    """A carried value becomes what the tile alone gives: its update with the state left out."""
    for value in loop.carried:
        at = _defined_at(loop.body, value.next)
        stmt = loop.body[at]
        if isinstance(stmt, Let) and isinstance(value.init, Const):
            expr = replaced(stmt.expr, {Local(value.name, stmt.dims): value.init})
            yield replace(loop, body=(*loop.body[:at], replace(stmt, expr=expr), *loop.body[at + 1 :]))


def _carries_swapped(loop: Loop) -> Iterator[Loop]:
    """Two carried values of one shape take each other's next value."""
    for at, one in enumerate(loop.carried):
        for to, two in enumerate(loop.carried[:at]):
            if one.dims == two.dims:
                carried: list[Carried] = list(loop.carried)
                carried[at], carried[to] = replace(one, next=two.next), replace(two, next=one.next)
                yield replace(loop, carried=tuple(carried))


def _operand_transposed(node: Expr) -> Iterator[Expr]:
    match node:
        case Load(tensor, index) if len(index) > 1:
            yield Load(tensor, (*index[:-2], index[-1], index[-2]))


def _result_transposed(stmt: Stmt) -> Iterator[Statements]:
    if isinstance(stmt, Store) and len(stmt.index) > 1:
        yield (replace(stmt, index=(*stmt.index[:-2], stmt.index[-1], stmt.index[-2])),)


def _loop_dropped(nest: Nest) -> Iterator[Nest]:
    """A loop never runs: what it would have stored is missing, what it carries stays as it began."""
    return _on_loops(lambda loop: [replace(loop, stop=loop.start)])(nest)


def _kernel_twice(nest: Nest) -> Iterator[Nest]:
    """A store adds to what is there: the last kernel's work is done twice."""

    def change(body: Statements) -> Iterator[Statements]:
        for stmt in body:
            if isinstance(stmt, Store):
                yield (*body, stmt)

    return in_bodies(nest, change)


def _mutant(name: str, what: str, mutate: Callable[[Nest], Iterable[Nest | Same]]) -> Mutant:
    return Mutant(name, "loop", what, mutate)


MUTANTS = (
    _mutant("wrong identity", "a carried sum starts at 1, a maximum at 1", _identities(OTHER_IDENTITY.get)),
    _mutant("finite identity", "a maximum starts at -1e30", _finite),
    _mutant("first position missed", "a loop starts one late", _range(1, 0)),
    _mutant("ragged tail missed", "a loop stops one early", _range(0, -1)),
    _mutant("first shard missed", "shards are joined from the second on", _shard_missed(first=True)),
    _mutant("last shard missed", "the last shard is not joined", _shard_missed(first=False)),
    _mutant("shards overlap", "a shard ends one position inside the next", _shards_overlap),
    _mutant("rest of the shards missed", "n // s positions per shard, rounded down", _last_shard_ragged),
    _mutant("one shard for all", "the first shard's states are joined every time", _first_shard_for_all),
    _mutant("fold changed", "max becomes min, sum becomes max", _in_expressions(fold_changed)),
    _mutant("stale read", "a statement reads the carried value, not the new one", _in_loops(_stale)),
    _mutant("early read", "a statement reads the new value, not the carried one", _in_loops(_early)),
    _mutant("state not carried", "a tile starts from the identity", _on_loops(_not_carried)),
    _mutant("states swapped", "two carried values trade places", _on_loops(_carries_swapped)),
    _mutant("loop dropped", "a loop runs no iteration", _loop_dropped),
    _mutant("mask off by one in a loop", "< becomes <=, <= becomes <", _in_expressions(renamed(OFF_BY_ONE))),
    _mutant("mask dropped in a loop", "where(c, a, b) becomes a", _in_expressions(condition_dropped)),
    _mutant(
        "mask inverted in a loop", "where(c, a, b) becomes where(c, b, a)", _in_expressions(branches_swapped)
    ),
    _mutant("delayed division lost", "a / b becomes a", _in_expressions(divisor_dropped)),
    _mutant("operand transposed", "x[i, j] becomes x[j, i]", _in_expressions(_operand_transposed)),
    _mutant("result transposed", "y[i, j] = ... becomes y[j, i] = ...", in_statements(_result_transposed)),
    _mutant("stored twice", "a store is done twice", _kernel_twice),
)
