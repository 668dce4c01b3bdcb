"""A loop whose branches are for the blocks before or behind a position becomes two loops, without the branches. A branch keeps what is
on either side of it apart: instructions of the blocks that do not take it wait there, too.

    for j in a..c:                      for j in a..b:  ...
      when j >= b:  y = f(x), else x    for j in b..c:  ... y = f(x) ...

Nothing ends between the two: what the first one carries, products and slots of the block before, the second one goes on with.
Loops whose branches hold code for what is not finite stay as they are: their products would wait for each other (ptxas moves sums
between registers there).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from eqfuse.tile import nodes as ir
from eqfuse.tile.names import Fresh
from eqfuse.tile.roles.nodes import AnyNonFinite, Stmt
from eqfuse.tile.walk import defined, defined_by, nested, ops_of, renamed

INTEGER = "i32"


def cut(body: Sequence[Stmt], fresh: Fresh) -> tuple[Stmt, ...]:
    """The body with its loops cut where their branches begin or end to be taken."""
    made: list[Stmt] = []
    for stmt in body:
        match stmt:
            case ir.For():
                made += _pieces(stmt, fresh)
            case ir.If() | ir.PersistentLoop():
                made.append(replace(stmt, body=cut(stmt.body, fresh)))
            case _:
                made.append(stmt)
    return tuple(made)


def _pieces(loop: ir.For[Stmt], fresh: Fresh) -> Iterator[Stmt]:
    found = _condition(loop)
    if found is None or any(isinstance(stmt, AnyNonFinite) for stmt in nested(loop.body)):
        yield loop
        return
    condition, side, bound = found
    size, end = _new(fresh, "step"), _new(fresh, f"{loop.axis}_end")
    yield ir.Let(size, ir.BlockSize(loop.axis))
    yield ir.Let(end, ir.Elementwise("minimum", (bound, loop.stop)))
    behind: list[ir.Let] = []
    begin = _begin(loop.start, bound, size, fresh, behind)
    links = {item.value.name: fresh.like(item.value, "before") for item in loop.carried}
    early = _body(loop, condition, taken=side == "lt", names=links, fresh=fresh)
    first = [
        replace(item, value=links[item.value.name], next=n)
        for item, n in zip(loop.carried, early[1], strict=True)
    ]
    yield from _pieces(replace(loop, stop=end, carried=tuple(first), body=early[0]), fresh)
    yield from behind
    late = _body(loop, condition, taken=side == "ge", names={}, fresh=fresh)
    then = [
        ir.Carried(item.value, links[item.value.name], n)
        for item, n in zip(loop.carried, late[1], strict=True)
    ]
    yield from _pieces(replace(loop, start=begin, carried=tuple(then), body=late[0]), fresh)


def _condition(loop: ir.For[Stmt]) -> tuple[ir.Value, Literal["lt", "ge"], ir.Value] | None:
    """A condition of branches of a loop's body that compares the position of a block with a number from outside."""
    ops = ops_of(loop.body)
    inside = {v.name for s in nested(loop.body) for v in defined_by(s)} | {c.value.name for c in loop.carried}
    for stmt in loop.body:
        if isinstance(stmt, ir.If):
            match ops.get(stmt.condition.name):
                case ir.Elementwise("lt" | "ge" as side, (position, bound)) if bound.name not in inside:
                    if ops.get(position.name) == ir.Start(loop.axis):
                        return stmt.condition, "lt" if side == "lt" else "ge", bound
    return None


def _new(fresh: Fresh, name: str) -> ir.Value:
    return fresh.value(name, (), INTEGER)


def _begin(start: ir.Value, bound: ir.Value, size: ir.Value, fresh: Fresh, made: list[ir.Let]) -> ir.Value:
    """The first position of a block that is not below a bound."""

    def let(name: str, fn: str, *args: ir.Value) -> ir.Value:
        value = _new(fresh, name)
        natural = ir.Elementwise(fn, args, "natural") if fn == "floordiv" else ir.Elementwise(fn, args)
        made.append(ir.Let(value, natural))
        return value

    one = _new(fresh, "one")
    made.append(ir.Let(one, ir.Constant(1)))
    away = let("away", "sub", let("later", "maximum", start, bound), start)
    blocks = let("blocks", "floordiv", let("up", "sub", let("sum", "add", away, size), one), size)
    return let("begin", "add", start, let("passed", "mul", blocks, size))


def _body(
    loop: ir.For[Stmt], condition: ir.Value, *, taken: bool, names: dict[str, ir.Value], fresh: Fresh
) -> tuple[tuple[Stmt, ...], list[ir.Value]]:
    """The loop's body for blocks that take its branches, or do not, under new names, and what it leaves for the next block."""
    known = dict(names)
    made: list[Stmt] = []

    def add(statements: Iterable[Stmt]) -> None:
        for stmt in statements:
            if isinstance(stmt, ir.If) and stmt.condition == condition:
                if taken:
                    add(stmt.body)
                for result in stmt.results:
                    chosen = result.then if taken else result.otherwise
                    known[result.value.name] = known.get(chosen.name, chosen)
                continue
            known.update({value.name: fresh.like(value, "of") for value in defined((stmt,))})
            made.append(renamed(stmt, known))

    add(loop.body)
    return tuple(made), [known.get(item.next.name, item.next) for item in loop.carried]
