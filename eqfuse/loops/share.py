"""Tidying a kernel body: values used more than once get a name, unused ones go, names become readable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from eqfuse.loops.nodes import Let, Loop, Stmt, Store
from eqfuse.loops.walk import defined
from eqfuse.terms.folds import PAIR
from eqfuse.terms.functions import COMPARISONS, LOGICAL, SPECIAL
from eqfuse.terms.nodes import (
    Axis,
    Call,
    Expr,
    Load,
    Local,
    Reduce,
    children,
    free_axes,
    rebuild,
    transform,
    walk,
)

PLACEHOLDER = "%"
"""Starts the name of a value that `named` has still to name."""


def worth_keeping(expr: Expr, points: frozenset[str], folds: frozenset[str] = frozenset()) -> bool:
    """Whether holding `expr` beats computing it again.

    It must fold an axis (itself, or by reading one of the `folds`) or cost a special function, and
    be no larger than what does: an outer product is cheaper to repeat than to hold. `points` are
    the axes of which one position is at hand. Conditions are never held: they cut the ranges of loops.
    """
    if not isinstance(expr, Call) or expr.fn in (*COMPARISONS, *LOGICAL, PAIR):
        return False
    dims = free_axes(expr) - points
    return any(_is_costly(node, folds) and free_axes(node) - points == dims for node in walk(expr))


def _is_costly(expr: Expr, folds: frozenset[str]) -> bool:
    match expr:
        case Reduce():
            return True
        case Call(fn, _):
            return fn in SPECIAL
        case Local(name, _):
            return name in folds
        case _:
            return False


def axes_in_order(expr: Expr) -> tuple[str, ...]:
    """The free axes of an expression by first appearance, those of values before bare positions."""
    values: dict[str, None] = {}
    positions: dict[str, None] = {}
    for node in walk(expr):
        match node:
            case Axis(name):
                positions.setdefault(name)
            case Local(_, dims):
                values.update(dict.fromkeys(dims))
            case Load(_, index):
                values.update(dict.fromkeys(axis for part in index for axis in sorted(free_axes(part))))
    free = free_axes(expr)
    return tuple(axis for axis in {**values, **positions} if axis in free)


def shared(body: tuple[Stmt, ...], parallel: tuple[str, ...]) -> tuple[Stmt, ...]:
    """`body` with one `Let` for each value that a block computes more than once, at its first use."""
    return _shared_block(body, frozenset(parallel), count())


def _shared_block(body: tuple[Stmt, ...], points: frozenset[str], numbers: Iterator[int]) -> tuple[Stmt, ...]:
    repeated = _repeated(body, points)
    known: dict[Expr, Expr] = {}
    result: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, Loop):
            inside = points | {stmt.axis} if stmt.unit else points
            result.append(replace(stmt, body=_shared_block(stmt.body, inside, numbers)))
            continue
        for node in walk(stmt.expr):
            if node in known:
                continue
            value = rebuild(node, tuple(known[child] for child in children(node)))
            if node in repeated and node is not stmt.expr:
                dims = tuple(axis for axis in axes_in_order(value) if axis not in points)
                let = Let(f"{PLACEHOLDER}{next(numbers)} shared", dims, value)
                result.append(let)
                value = Local(let.name, let.dims)
            known[node] = value
        result.append(replace(stmt, expr=known[stmt.expr]))
        if isinstance(stmt, Let) and stmt.expr in repeated:
            known[stmt.expr] = Local(stmt.name, stmt.dims)
    return tuple(result)


def _repeated(body: tuple[Stmt, ...], points: frozenset[str]) -> set[Expr]:
    """What the block's own statements compute more than once and should keep."""
    roots = [stmt.expr for stmt in body if isinstance(stmt, (Let, Store))]
    folds = frozenset(stmt.name for stmt in body if isinstance(stmt, Let) and isinstance(stmt.expr, Reduce))
    times = Counter(roots)
    kept: set[Expr] = set()
    for node in reversed(list(walk(*roots))):
        if times[node] > 1 and worth_keeping(node, points, folds):
            kept.add(node)
        for child in children(node):
            times[child] += 1 if node in kept else times[node]
    return kept


def pruned(body: tuple[Stmt, ...], unread: frozenset[str]) -> tuple[Stmt, ...]:
    """`body` without the stores to `unread` tensors, and without what no store needs."""
    kept, _ = _pruned_block(body, unread, set())
    return kept


def _pruned_block(
    body: tuple[Stmt, ...], unread: frozenset[str], live: set[str]
) -> tuple[tuple[Stmt, ...], set[str]]:
    """The statements of `body` that matter where `live` is read after it, and what they read."""
    live = set(live)
    kept: list[Stmt] = []
    for stmt in reversed(body):
        match stmt:
            case Let(name, _, expr):
                if name not in live:
                    continue
                live = live - {name} | set(_locals(expr))
            case Store(tensor, _, _, expr):
                if tensor in unread:
                    continue
                live |= set(_locals(expr))
            case Loop():
                stmt, read = _pruned_loop(stmt, unread, live)
                if not stmt.carried and not stmt.body:
                    continue
                bounds = [stmt.start, stmt.stop, *(stmt.part or ())]
                live = live - {carried.name for carried in stmt.carried} | read
                live |= {name for bound in bounds for name in _locals(bound)}
        kept.append(stmt)
    return tuple(reversed(kept)), live


def _pruned_loop(loop: Loop, unread: frozenset[str], live: set[str]) -> tuple[Loop, set[str]]:
    needed = {carried.name for carried in loop.carried} & live
    while True:
        carried = tuple(value for value in loop.carried if value.name in needed)
        body, read = _pruned_block(loop.body, unread, {value.next for value in carried})
        more = {value.name for value in loop.carried} & read
        if more <= needed:
            return replace(loop, carried=carried, body=body), read - needed
        needed |= more


def _locals(expr: Expr) -> Iterator[str]:
    return (node.name for node in walk(expr) if isinstance(node, Local))


def named(body: tuple[Stmt, ...], taken: frozenset[str]) -> tuple[Stmt, ...]:
    """`body` with its placeholder names replaced by `t1`, `t2`, ... in the order of the text."""
    readable = (name for number in count(1) if (name := f"t{number}") not in taken)
    names = {name: next(readable) for name in defined(body) if name.startswith(PLACEHOLDER)}
    return _renamed(body, names)


def _renamed(body: tuple[Stmt, ...], names: dict[str, str]) -> tuple[Stmt, ...]:
    result: list[Stmt] = []
    for stmt in body:
        match stmt:
            case Let(name, dims, expr):
                result.append(Let(names.get(name, name), dims, rename_locals(expr, names)))
            case Store(_, _, _, expr):
                result.append(replace(stmt, expr=rename_locals(expr, names)))
            case Loop():
                result.append(replace(stmt, body=_renamed(stmt.body, names)))
    return tuple(result)


def rename_locals(expr: Expr, names: dict[str, str]) -> Expr:
    """`expr` with each `Local` that `names` lists read under its new name."""
    if not names:
        return expr

    def step(node: Expr) -> Expr:
        return Local(names.get(node.name, node.name), node.dims) if isinstance(node, Local) else node

    return transform(expr, step)
