"""Sums start from what is added to them: a tile that is loaded behind a loop of products would need registers beside their sum.

for k: s = s + dot(p, q), from 0;  x = a + s    ->    for k: s = s + dot(p, q), from a;  x = s
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from eqfuse.tile.def_use import is_number
from eqfuse.tile.nodes import Align, Dot, Elementwise, For, Kernel, Let, Stmt, Value
from eqfuse.tile.walk import operands, ops_of, uses_of


def init_accumulator(kernel: Kernel) -> Kernel:
    """Nothing is added to a sum of products behind the loops that add them up."""
    for stmt in kernel.body:
        match stmt:
            case Let(value, Elementwise("add", (left, right))) if (
                len(value.dims) == 2 and value.dtype == "f32"
            ):
                for total, term in ((left, right), (right, left)):
                    found = _from(kernel, value, total, term)
                    if found is not None:
                        return init_accumulator(found)
    return kernel


def _from(kernel: Kernel, value: Value, total: Value, term: Value) -> Kernel | None:
    """The kernel with `value`, which is `total + term`, summed up from `term` on; None where that is another program."""
    body, uses = kernel.body, uses_of(kernel.body)
    loops = _loops(body, total, uses)
    if not loops or (total.dims, total.dtype) != (term.dims, term.dtype):
        return None
    first = body.index(loops[0])
    lets = {stmt.value.name: stmt for stmt in body if isinstance(stmt, Let)}
    early = {stmt.value.name for stmt in body[:first] if isinstance(stmt, Let)}
    moved: dict[str, Let] = {}
    pending = [term]
    while pending:
        name = pending.pop().name
        if name in early or name in moved:
            continue
        if name not in lets:  # a loop gives it
            return None
        moved[name] = lets[name]
        pending += operands(lets[name].op)

    def one(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Let) and stmt.value == value:
            return Let(value, Align(total))
        if stmt is not loops[0]:
            return stmt
        items = (replace(c, init=term) if c.value in _chain(loops, total) else c for c in loops[0].carried)
        return replace(loops[0], carried=tuple(items))

    before = [stmt for stmt in body if isinstance(stmt, Let) and stmt.value.name in moved]
    rest = [one(stmt) for stmt in body[first:] if not (isinstance(stmt, Let) and stmt.value.name in moved)]
    return replace(kernel, body=(*body[:first], *before, *rest))


def _loops(body: Sequence[Stmt], total: Value, uses: Counter[str]) -> list[For[Stmt]]:
    """The loops that add up a sum of products from 0 that nothing else reads, in their order; none where they do something else."""
    ops = ops_of(body)
    found: list[For[Stmt]] = []
    sought = total
    while uses[sought.name] == 2:  # by its product, and behind the loop
        loop = next((s for s in body if isinstance(s, For) and sought in (c.value for c in s.carried)), None)
        if loop is None:
            break
        item = next(c for c in loop.carried if c.value == sought)
        dots = {s.value.name: s.op for s in loop.body if isinstance(s, Let) and isinstance(s.op, Dot)}
        dot = dots.get(item.next.name)
        if dot is None or dot.accumulator != sought or uses[item.next.name] != 1:
            return []
        found.insert(0, loop)
        sought = item.init
    return found if is_number(ops.get(sought.name), 0) else []


def _chain(loops: Sequence[For[Stmt]], total: Value) -> set[Value]:
    """What loops call a sum that is `total` behind the last of them."""
    found, sought = set[Value](), total
    for loop in reversed(loops):
        item = next(c for c in loop.carried if c.value == sought)
        found.add(item.value)
        sought = item.init
    return found
