"""Values of a loop nest that are reductions of whole rows, written out: what holds of extremes holds of names that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eqfuse.loops.nodes import Let, Loop, Nest, Stmt, Store
from eqfuse.terms.nodes import COMBINE, Call, Const, Expr, Local, Reduce, Size, expanded, walk


def written_out(nest: Nest) -> dict[Expr, Expr]:
    """Function calls of a nest with the names in them replaced by what they are: values of statements, and of loops over
    whole axes the reductions that they carry. Inside of such a loop a carried name is that of a part. Calls that several
    statements have, with names that are not the same in them, are left out."""
    found: dict[Expr, Expr | None] = {}
    for kernel in nest.kernels:
        for node, other in _calls(kernel.body, {}):
            found[node] = other if found.get(node, other) is other else None
    return {node: other for node, other in found.items() if other is not None and other is not node}


def _calls(
    body: Iterable[Stmt], values: dict[str, Expr], around: frozenset[str] = frozenset()
) -> Iterator[tuple[Expr, Expr]]:
    """Every call with its names written out; adds the names of the statements to the values. In loops over the axes `around`
    reductions over them are of one tile."""
    for stmt in body:
        match stmt:
            case Loop():
                carried = {item.name for item in stmt.carried}
                before = {name: value for name, value in values.items() if name not in carried}
                yield from _calls(stmt.body, dict(before), around | {stmt.axis})
                values |= _reductions(stmt, before)
            case Let(name, _, expr):
                yield from _in(expr, values, around)
                values.pop(name, None)
                if not _of_tiles(expr, around):
                    values[name] = _written(expr, values)
            case Store(_, index, _, expr):
                for part in (*index, expr):
                    yield from _in(part, values, around)


def _in(expr: Expr, values: dict[str, Expr], around: frozenset[str]) -> Iterator[tuple[Expr, Expr]]:
    for node in walk(expr):
        if isinstance(node, Call):
            yield node, node if _of_tiles(node, around) else _written(node, values)


def _of_tiles(expr: Expr, around: frozenset[str]) -> bool:
    return any(isinstance(part, Reduce) and part.axis in around for part in walk(expr))


def _written(expr: Expr, values: dict[str, Expr]) -> Expr:
    return expanded(expr, lambda local: values.get(local.name))


def _reductions(loop: Loop, before: dict[str, Expr]) -> dict[str, Expr]:
    """What the carried values of a loop are after it, where it combines the tiles of a whole axis."""
    if loop.start is not Const(0) or loop.stop is not Size(loop.axis) or loop.part is not None:
        return {}
    lets = {stmt.name: stmt.expr for stmt in loop.body if isinstance(stmt, Let)}
    inside = lets.keys() | {item.name for item in loop.carried}
    found: dict[str, Expr] = {}
    for item in loop.carried:
        match lets.get(item.next):
            case Call(fn, (Local(name, _), Local(tile, _))) if name == item.name:
                match lets.get(tile):
                    case Reduce(op, axis, body) if axis == loop.axis and COMBINE.get(op) == fn:
                        names = {part.name for part in walk(body) if isinstance(part, Local)}
                        if names.isdisjoint(inside):
                            found[name] = Reduce(op, axis, _written(body, before))
    return found
