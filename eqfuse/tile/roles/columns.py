"""Numbers of columns, such as a saved log-sum-exp of each query where the rows are keys: loads of one dim in loops.

The copy engine copies them as it copies tiles. Where a mask ends before the tensor does, the consumers read what is there, and
the mask is a select behind the load:

    y = load x[at] where m, else 0    ->    raw = load x[at] where m, else 0
                                            y = where(m, raw, 0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from eqfuse.extract.unsuited import Unsuited
from eqfuse.tile.names import Fresh
from eqfuse.tile.nodes import Constant, Elementwise, For, Let, LoadTile, Op, Stmt, Value
from eqfuse.tile.roles.loads import Tensors, copied, ends_early
from eqfuse.tile.walk import ops_of


def copies(value: Value, op: LoadTile, ops: Mapping[str, Op], tensors: Tensors) -> bool:
    """Whether the copy engine can copy what is loaded, all of it."""
    try:
        copied(value, op, ops, tensors, whole=True)
    except Unsuited:
        return False
    return True


def masked_behind(body: tuple[Stmt, ...], tensors: Tensors, fresh: Fresh) -> tuple[Stmt, ...]:
    """The body with the masks of such loads, where they end before the tensor does, as selects behind the loads."""
    ops = ops_of(body)

    def loop(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, For):
            return stmt
        return replace(stmt, body=tuple(made for inner in stmt.body for made in one(inner)))

    def one(stmt: Stmt) -> tuple[Stmt, ...]:
        match stmt:
            case Let(value, LoadTile(mask=Value() as mask) as op) if len(value.dims) == 1:
                if not copies(value, op, ops, tensors) or not ends_early(op, value, ops, tensors):
                    return (stmt,)
                raw, none = fresh.like(value, "raw"), replace(fresh.like(value, "none"), dims=())
                select = Elementwise("where", (mask, raw, none))
                return Let(raw, op), Let(none, Constant(0.0)), Let(value, select)
        return (stmt,)

    return tuple(map(loop, body))
