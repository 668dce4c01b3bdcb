"""Masked matrix products for a matrix unit, which has no masks.

A `Dot` reads 0 for one operand where the other one's mask is false, so that no NaN and no infinity of what is masked
gets through. A matrix unit multiplies all of both: it gets the finite parts, whose products with what is masked are 0,
and the few products with a factor that is not finite, if there are any, are added as the masks say. An infinity's finite part
is its sign, since the other operand may be infinite too: inf * 0 is NaN, and inf * 1 + inf * inf is not.

    x = a + dot(p where m, v)   ->   w = finite_part(v);  d = a + dot(p, w);  x = d + rest_of_dot(p where m, v)

A loop that adds products of the same `v` to a state need not look at each tile: what is not finite stays in the state, which is looked at
once, behind the loop. Where it is not finite, which is rare, the loop runs again and looks.

    for k:  y[k] = a + dot(p where m, v);  s = c * s + dot(v, r)
 -> for k:  y[k] = a + dot(p, v);          s = c * s + dot(v, r)
    for k where some s is not finite:  y[k] = a + dot(p where m, v);  s2 = c * s2 + dot(v, r)                  rare
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eqfuse.tile.def_use import is_number
from eqfuse.tile.nodes import (
    Align,
    Bound,
    Cast,
    Constant,
    Dot,
    Elementwise,
    FinitePart,
    For,
    Kernel,
    Let,
    NonFiniteCorrection,
    Op,
    ReduceTile,
    Stmt,
    Store,
    TileProgram,
    Value,
)
from eqfuse.tile.passes.draft import Draft, changed, in_kernels
from eqfuse.tile.walk import defined, lets_of, ops_of, renamed


def without_masks(program: TileProgram) -> TileProgram:
    """No `Dot` has a mask."""
    return in_kernels(in_kernels(program, _looked_at_once), _kernel)


def _looked_at_once(kernel: Kernel) -> Kernel:
    """The kernel whose loops look behind them for what is not finite, where a state shows it."""
    ops, draft = ops_of(kernel.body), Draft(kernel)
    body: list[Stmt] = []
    for stmt in kernel.body:
        states = _that_show(stmt, ops) if isinstance(stmt, For) and not stmt.rare else None
        if not isinstance(stmt, For) or not states:
            body.append(stmt)
            continue

        found, looks = _some_not_finite(states, draft)
        stop = draft.new(f"{stmt.axis}_again", (), stmt.stop.dtype)
        again = Let(stop, Elementwise("where", (found, stmt.stop, stmt.start)))
        names = {value.name: draft.new(value.name, value.dims, value.dtype) for value in defined((stmt,))}
        body += [replace(stmt, body=changed(stmt.body, _unmasked)), *looks, again]
        body.append(replace(renamed(stmt, names), stop=stop, rare=True))
    return kernel if tuple(body) == kernel.body else draft.kernel_of(body)


def _unmasked(let: Let) -> Sequence[Stmt]:
    match let.op:
        case Dot() as dot:
            return (replace(let, op=replace(dot, left_mask=None, right_mask=None)),)
    return (let,)


def _that_show(loop: For[Stmt], ops: Mapping[str, Op]) -> list[Value]:
    """The states that are not finite behind a loop if an operand was not that has to be finite beside a mask; none where there is
    an operand that no state shows, or nothing is masked."""
    if any(isinstance(stmt, For) for stmt in loop.body) or not any(isinstance(s, Store) for s in loop.body):
        return []
    shown = {c.value: names for c in loop.carried if c.value.name in (names := _absorbed(c.next, ops))}
    found: dict[Value, None] = {}
    for let in lets_of(loop.body):
        if isinstance(let.op, Dot):
            sides = ((let.op.left, let.op.right_mask), (let.op.right, let.op.left_mask))
            for side in (side for side, other_mask in sides if other_mask is not None):
                state = next((s for s, names in shown.items() if _source(side, ops) in names), None)
                if state is None:
                    return []
                found[state] = None
    return list(found)


def _absorbed(value: Value, ops: Mapping[str, Op]) -> set[str]:
    """The names of the values of which no element can be infinite or NaN without some element of this one being so."""
    found: set[str] = set()
    todo = [value]
    while todo:
        made = todo.pop()
        if made.name in found:
            continue
        found.add(made.name)
        match ops.get(made.name):
            case Align(part) | Cast(part):
                todo.append(part)
            case Elementwise("add" | "sub" | "mul", parts):
                todo += parts
            case Elementwise("where", (condition, part, other)) if isinstance(
                ops.get(_source(condition, ops)), Bound
            ) and is_number(ops.get(_source(other, ops)), 0):
                todo.append(part)  # past the end, loads give 0
            case Dot(left, right, _, accumulator, None, None):
                todo += (left, right) if accumulator is None else (left, right, accumulator)
    return found


def _source(value: Value, ops: Mapping[str, Op]) -> str:
    match ops.get(value.name):
        case Align(part) | Cast(part):
            return _source(part, ops)
    return value.name


def _some_not_finite(states: Sequence[Value], draft: Draft) -> tuple[Value, list[Let]]:
    """Whether a state is infinite or NaN somewhere, and what says so."""
    lets: list[Let] = []
    every: Value | None = None
    for state in states:
        part = draft.new(f"{state.name}_finite", state.dims, state.dtype)
        differs = draft.new(f"{state.name}_not_finite", state.dims, "bool")
        found = draft.new(f"{state.name}_places", state.dims, "i32")
        lets += [
            Let(part, FinitePart(state)),
            Let(differs, Elementwise("ne", (part, state))),
            Let(found, Cast(differs, False)),
        ]
        for axis in reversed(state.dims):
            left = draft.new(f"{state.name}_some", tuple(d for d in found.dims if d != axis), "i32")
            lets.append(Let(left, ReduceTile("max", found, axis)))
            found = left
        if every is not None:
            both = draft.new("some", (), "i32")
            lets.append(Let(both, Elementwise("maximum", (every, found))))
            found = both
        every = found
    assert every is not None
    zero, some = draft.new("none", (), "i32"), draft.new("is_not_finite", (), "bool")
    lets += [Let(zero, Constant(0)), Let(some, Elementwise("gt", (every, zero)))]
    return some, lets


def _kernel(kernel: Kernel) -> Kernel:
    draft = Draft(kernel)

    def one(let: Let) -> Sequence[Stmt]:
        match let.op:
            case Dot(left, right, axis, accumulator, left_mask, right_mask) if left_mask or right_mask:
                made: list[Let] = []

                def finite(side: Value, other_mask: Value | None) -> Value:
                    if other_mask is None:
                        return side
                    part = draft.new(f"{side.name}_finite", side.dims, side.dtype)
                    made.append(Let(part, FinitePart(side)))
                    return part

                parts = finite(left, right_mask), finite(right, left_mask)
                total = draft.new(f"{let.value.name}_dot", let.value.dims, let.value.dtype)
                rest = NonFiniteCorrection(left, right, axis, total, left_mask, right_mask)
                return *made, Let(total, Dot(*parts, axis, accumulator)), Let(let.value, rest)
            case _:
                return (let,)

    body = changed(kernel.body, one)
    return kernel if body == kernel.body else draft.kernel_of(body)
