"""Traversals of loop nests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from eqfuse.loops.nodes import Kernel, Let, Loop, Stmt, Store
from eqfuse.terms.nodes import Axis, Expr, Load, Reduce, Size, walk


def statements(body: Iterable[Stmt]) -> Iterator[Stmt]:
    """Every statement, in the order of the text; a loop before its body."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, Loop):
            yield from statements(stmt.body)


def expressions(body: Iterable[Stmt]) -> Iterator[Expr]:
    """Every expression that the statements evaluate."""
    for stmt in statements(body):
        match stmt:
            case Let(_, _, expr):
                yield expr
            case Store(_, index, _, expr):
                yield from (*index, expr)
            case Loop(_, start, stop, _, carried, _, _, part):
                yield from (start, stop, *(part or ()), *(value.init for value in carried))


def loops_in(body: Iterable[Stmt]) -> Iterator[Loop]:
    """Every loop, in the order of the text."""
    return (stmt for stmt in statements(body) if isinstance(stmt, Loop))


def rewritten(
    body: Iterable[Stmt],
    step: Callable[[Expr], Expr],
    dims: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda dims: dims,
) -> tuple[Stmt, ...]:
    """The statements with `step` applied to every expression that they evaluate, and `dims` to the axes of values."""
    result: list[Stmt] = []
    for stmt in body:
        match stmt:
            case Let(name, axes, expr):
                result.append(Let(name, dims(axes), step(expr)))
            case Store(tensor, index, axes, expr):
                result.append(Store(tensor, tuple(map(step, index)), dims(axes), step(expr)))
            case Loop(_, start, stop, _, carried, inner, _, part):
                values = tuple(replace(v, dims=dims(v.dims), init=step(v.init)) for v in carried)
                inside = rewritten(inner, step, dims)
                part = part and (step(part[0]), step(part[1]))
                result.append(
                    replace(stmt, start=step(start), stop=step(stop), carried=values, body=inside, part=part)
                )
    return tuple(result)


def defined(body: Iterable[Stmt]) -> Iterator[str]:
    """Names of values, in the order of the text."""
    for stmt in statements(body):
        match stmt:
            case Let(name, _, _):
                yield name
            case Loop():
                yield from (value.name for value in stmt.carried)


def loaded(body: Iterable[Stmt]) -> frozenset[str]:
    """Names of the tensors that the statements read."""
    return frozenset(node.tensor for node in walk(*expressions(body)) if isinstance(node, Load))


def axes_of(kernel: Kernel) -> frozenset[str]:
    """Every axis that a kernel mentions."""
    found = set(kernel.parallel)
    if kernel.slots is not None:
        found.update(kernel.slots.rows, kernel.slots.others)
    for stmt in statements(kernel.body):
        match stmt:
            case Loop():
                found.add(stmt.axis)
            case Let(_, dims, _) | Store(_, _, dims, _):
                found.update(dims)
    for node in walk(*expressions(kernel.body)):
        match node:
            case Axis(name) | Size(name) | Reduce(_, name, _):
                found.add(name)
    return frozenset(found)
