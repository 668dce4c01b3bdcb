"""One name for two axes along which a kernel reads the same elements of an input.

`sum[d](Q[h,d] * C[j,d])` and `sum[j](P[h,j] * C[j,e])` read one tile of C wherever all of d and all of e are at
hand. Under one name it is one load. Both axes index one dimension of one tensor, so they have one extent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from eqfuse.loops.nodes import Let, Loop, Stmt, Store
from eqfuse.loops.walk import expressions, loops_in, rewritten, statements
from eqfuse.terms.nodes import Axis, Expr, Load, Local, Reduce, Size, transform, walk


def unified(body: tuple[Stmt, ...], parallel: tuple[str, ...], inputs: Collection[str]) -> tuple[Stmt, ...]:
    """`body` with one name for axes that index the same dimension of the same tensor among `inputs`, where
    neither is shared out or looped over and no statement mentions both. The name of a component stays before
    that of an axis that is only folded, else the one that is read first."""
    while (found := _pair(body, parallel, inputs)) is not None:
        body = _renamed(body, *found)
    return body


def _pair(
    body: tuple[Stmt, ...], parallel: tuple[str, ...], inputs: Collection[str]
) -> tuple[str, str] | None:
    """Two axes that may have one name: the one that goes, and the one that stays."""
    walked = {*parallel, *(loop.axis for loop in loops_in(body))}
    together = list(_mentions(body))
    components = frozenset().union(*(dims for dims, _ in together))
    loads = dict.fromkeys(n for n in walk(*expressions(body)) if isinstance(n, Load) and n.tensor in inputs)
    for first in loads:
        for second in loads:
            pairs = _differences(first, second)
            if len(pairs) == 1 and not pairs[0][0] in walked and not pairs[0][1] in walked:
                kept, gone = pairs[0]
                if any({kept, gone} <= dims | inside for dims, inside in together):
                    continue
                return (gone, kept) if kept in components or gone not in components else (kept, gone)
    return None


def _differences(first: Load, second: Load) -> list[tuple[str, str]]:
    """The axes in which the indices of two loads of one tensor differ; nothing where other parts differ too."""
    if first.tensor != second.tensor:
        return []
    pairs: dict[tuple[str, str], None] = {}
    for pair in zip(first.index, second.index, strict=True):
        match pair:
            case (Axis(left), Axis(right)):
                if left != right:
                    pairs[left, right] = None
            case (left_part, right_part) if left_part is not right_part:
                return []
    return list(pairs)


def _mentions(body: tuple[Stmt, ...]) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """Of every statement: the axes of which its value has components, and those that its expressions mention."""
    for stmt in statements(body):
        match stmt:
            case Let(_, dims, expr):
                yield frozenset(dims), _axes(expr)
            case Store(_, index, dims, expr):
                yield frozenset(dims), _axes(*index, expr)
            case Loop():
                for value in stmt.carried:
                    yield frozenset(value.dims), _axes(value.init)


def _axes(*exprs: Expr) -> frozenset[str]:
    found: set[str] = set()
    for node in walk(*exprs):
        match node:
            case Axis(name) | Size(name) | Reduce(_, name, _):
                found.add(name)
            case Local(_, dims):
                found.update(dims)
    return frozenset(found)


def _renamed(body: tuple[Stmt, ...], gone: str, kept: str) -> tuple[Stmt, ...]:
    """`body` with the axis `gone` under the name `kept`."""

    def names(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(kept if axis == gone else axis for axis in axes)

    def step(node: Expr) -> Expr:
        match node:
            case Axis(name) if name == gone:
                return Axis(kept)
            case Size(name) if name == gone:
                return Size(kept)
            case Reduce(op, axis, inner) if axis == gone:
                return Reduce(op, kept, inner)
            case Local(name, dims) if gone in dims:
                return Local(name, names(dims))
            case _:
                return node

    return rewritten(body, lambda expr: transform(expr, step), names)
