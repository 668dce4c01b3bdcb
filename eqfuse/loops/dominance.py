"""Contributions that a number masks, and that vanish beside what was seen: a loop may leave them out under a condition.

Where a mask puts a finite number c, `exp(c - m)` is no 0, and `loops.identity` finds no identity. But it is 0 in floats as soon
as the maximum m of what was seen is large enough: for f32 from c + 104 on. Then every state that is weighted by it adds 0,
and a position that is masked changes nothing:

    m' = max(m, c)                              m                          where exp(c - m') == 0
    s' = exp(m - m') * s + sum[j](exp(c - m'))  s

So the loop is parted: the first part folds what the mask leaves, with -inf in the place of c, so that its tiles may be left out
as those of any mask; the second what the number stands for, where the condition does not hold after the first.

    for j:  t = where(p, x, c)      ->    for j:  t = where(p, x, -inf)
                                          for j, unless exp(c - max(m, c)) == 0:  t = where(p, -inf, c)

The states are those of a fold of positions in any order, each of which counts in one part and is the identity in the other.

The condition is the weight itself, computed as the second part would compute it. So it needs no bound of a dtype: it says what
the arithmetic at hand makes of the weight, of float32 and of float64; in exact arithmetic, as in a finite field, no
exponential is 0, and both parts are always walked. A row of which nothing is seen has m = -inf and the weight 1; a NaN is not 0.

The proofs that updates are the identity are symbolic, with the weights taken for 0 and the maxima for what they were. Other
factors are taken to be finite: 0 times NaN is what the second part would have had of a NaN that the number masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from eqfuse.fast_dataclass import dataclass
from eqfuse.loops.contraction import Product, factors
from eqfuse.loops.identity import predicates, vanishes
from eqfuse.loops.nodes import Carried, Let, Loop, Stmt
from eqfuse.loops.walk import rewritten
from eqfuse.terms.assume import HIGH, LOW, ONE, ZERO, folded, simplified
from eqfuse.terms.bounds import tells
from eqfuse.terms.masks import is_mask
from eqfuse.terms.masks import masked as masked_factors
from eqfuse.terms.nodes import (
    REDUCTIONS,
    Call,
    Const,
    Expr,
    Load,
    Local,
    Program,
    Reduce,
    Scalar,
    call,
    free_axes,
    transform,
    walk,
)
from eqfuse.terms.types import kind

VANISHING = frozenset({"exp", "sigmoid"})
"""Functions that are never 0 of a real number, and are 0 in floats far below 0."""

_KEPT = {"maximum": "ge", "minimum": "le"}
"""Functions of a state and a number that are the state where it compares so."""

Ascending = tuple[tuple[str, int], ...]
"""Dimensions of tensors along which integers do not fall, as those of `loops.nodes.Kernel`."""


@dataclass(frozen=True)
class Parted:
    """A loop in two parts, for the positions where `predicate` has not the truth value `masked`, which the first changes nothing
    at the others, and for these. After the first part, the second one changes nothing where the `condition` of states holds."""

    seen: Loop
    rest: Loop
    predicate: Expr
    masked: bool
    condition: Expr


def parted(loop: Loop, program: Program, ascending: Ascending = ()) -> Parted | None:
    """The loop in two parts, of the first mask by a number that allows it: one of positions, or of integers that are compared with
    them, or that ascend. A shard may see nothing of what another one does, so that its maximum does not tell: it stays whole.
    """
    if loop.shard is not None or loop.unit:
        return None
    dtypes = _dtypes(loop, program)
    for predicate in predicates(loop):
        if not is_mask(program, predicate) or not _is_range(predicate, loop.axis, ascending):
            continue
        for masked in (False, True):
            number = _number(loop, predicate, masked, dtypes)
            if number is None or vanishes(loop, predicate, masked):
                continue
            nothing = LOW if number < 0 else HIGH
            seen = _replaced(loop, predicate, masked, nothing, program)
            rest = _replaced(loop, predicate, not masked, nothing, program)
            if not vanishes(seen, predicate, masked, supposed=_as_of_a_number):
                continue
            if not vanishes(rest, predicate, not masked, supposed=_as_of_a_number):
                continue
            condition = dominated(loop, predicate, masked)
            if condition is not None:
                return Parted(seen, rest, predicate, masked, condition)
    return None


def may_be_skipped(loop: Loop, predicate: Expr, value: bool, ascending: Ascending) -> bool:
    """Whether a loop leaves out tiles in which `predicate` has this truth value everywhere, if not for all data, where what it reads
    are integers."""
    if vanishes(loop, predicate, value):
        return True
    read = list(walk(predicate))
    scalars = tuple(node.name for node in read if isinstance(node, Scalar))
    tensors = tuple(node.tensor for node in read if isinstance(node, Load))
    found = parted(loop, Program("", (), (), (), {}, integers=scalars, integer_tensors=tensors), ascending)
    return found is not None and found.predicate is predicate and found.masked is value


def _as_of_a_number(_: Expr, found: Expr) -> Expr:
    """A maximum that the number was part of, or is of a row without it, is not -inf: -inf less such a one is -inf."""
    match found:
        case Call("sub", (Const(number) as left, _)) if math.isinf(number):
            return left
        case _:
            return found


def _is_range(predicate: Expr, axis: str, ascending: Ascending) -> bool:
    """Whether a predicate may leave a range of an axis."""
    if axis not in free_axes(predicate):
        return False
    tensors = {tensor for tensor, _ in ascending}
    return tells(predicate, axis) or any(isinstance(n, Load) and n.tensor in tensors for n in walk(predicate))


def of_rows(loop: Loop, parts: Parted, needed: Expr) -> Loop:
    """The loop for rows at which `needed` holds, and of which the mask leaves nothing: what is the same for all positions of the axis
    is computed once, and is no part of sums of products, `sum[j](w * v[j]) = w * sum[j](v[j])`. Other rows stay as they are."""
    alone: set[str] = set()

    def without(dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dim for dim in dims if dim != loop.axis)

    def step(node: Expr) -> Expr:
        match node:
            case Local(name, dims) if name in alone:
                return Local(name, without(dims))
            case Reduce("max" | "min", axis, body) if axis == loop.axis and axis not in free_axes(body):
                return body
            case Reduce("sum", axis, Call("mul" | "div" | "neg") as body) if axis == loop.axis:
                outside, inside = factors(body).apart(lambda part: axis not in free_axes(part))
                if not outside.is_one and not inside.is_one:
                    return outside.times(Product((Reduce("sum", axis, inside.expr()),))).expr()
        return node

    made: list[Stmt] = []
    for stmt in loop.body:
        assert isinstance(stmt, Let)
        expr = transform(folded(stmt.expr, {parts.predicate: parts.masked}), step)
        if loop.axis in stmt.dims and loop.axis not in free_axes(expr):
            alone.add(stmt.name)
        made.append(Let(stmt.name, without(stmt.dims) if stmt.name in alone else stmt.dims, expr))
    carried: list[Carried] = []
    for item in loop.carried:
        new = f"{item.next}%needed"
        made.append(
            Let(
                new,
                item.dims,
                call("where", needed, Local(item.next, item.dims), Local(item.name, item.dims)),
            )
        )
        carried.append(replace(item, next=new))
    return replace(loop, carried=tuple(carried), body=tuple(made))


def _dtypes(loop: Loop, program: Program) -> dict[str, str]:
    """Dtypes of what the loop reads, as far as they tell integers from reals."""
    found = {tensor.name: tensor.dtype for tensor in program.tensors if tensor.dtype}
    found |= dict.fromkeys((*program.integers, *program.integer_tensors), "i64")
    for stmt in loop.body:
        if isinstance(stmt, Let) and kind(stmt.expr, found) != "real":
            found[stmt.name] = "i64"
    return found


def _number(loop: Loop, predicate: Expr, masked: bool, dtypes: Mapping[str, str]) -> float | None:
    """The finite number that is chosen among reals where a predicate has a truth value; None where there is none. Integers have no
    infinity that could stand in its place."""
    for stmt in loop.body:
        for node in walk(stmt.expr) if isinstance(stmt, Let) else ():
            match node:
                case Call("where", (condition, left, right)) if condition is predicate:
                    if kind(node, dtypes) != "real":
                        return None
                    chosen = left if masked else right
                    if isinstance(chosen, Const) and _is_number(chosen):
                        return chosen.value
    return None


def _replaced(loop: Loop, predicate: Expr, value: bool, by: Const, program: Program) -> Loop:
    """The loop with `by` chosen where the predicate has a truth value and a number is chosen for one of them; what that excludes is
    not read."""

    def step(node: Expr) -> Expr:
        match node:
            case Call("where", (condition, left, right)) if condition is predicate and (
                _is_number(left) or _is_number(right)
            ):
                return call("where", condition, by, right) if value else call("where", condition, left, by)
            case _:
                return node

    body = tuple(replace(s, expr=transform(s.expr, step)) if isinstance(s, Let) else s for s in loop.body)
    lets = {stmt.name: stmt.expr for stmt in body if isinstance(stmt, Let)}
    return replace(loop, body=rewritten(body, masked_factors(program, lets)))


def _is_number(expr: Expr) -> bool:
    return (
        isinstance(expr, Const)
        and not isinstance(expr.value, bool)
        and math.isfinite(expr.value)
        and expr.value != 0
    )


def dominated(loop: Loop, predicate: Expr, value: bool) -> Expr | None:
    """A condition, the same for all positions of the loop's axis, under which every carried value keeps its old value where
    `predicate` has this truth value; None where there is none. States in it are those of what was seen."""
    lets = [stmt for stmt in loop.body if isinstance(stmt, Let)]
    if len(lets) < len(loop.body) or not _is_unordered(lets, loop.axis):
        return None
    carried = {item.name for item in loop.carried}
    weights: dict[Expr, None] = {}
    kept: dict[Expr, None] = {}
    literal: dict[str, Expr] = {}
    known: dict[str, Expr] = {}

    def same_for_all(node: Expr) -> Expr:
        """An extreme of one number is that number."""
        match node:
            case Reduce("max" | "min", axis, body) if axis == loop.axis and axis not in free_axes(body):
                return body
            case _:
                return node

    def supposed(node: Expr, found: Expr) -> Expr:
        found = same_for_all(found)
        match found:
            case Call("maximum" | "minimum", (Local(name, _) as state, other)) if (
                name in carried and _is_one_for_all(other, loop.axis)
            ):
                kept.setdefault(found)
                return state
            case Call(fn, _) if fn in VANISHING and loop.axis in free_axes(node):
                exact = simplified(
                    node, literal, predicate, value, supposed=lambda _, each: same_for_all(each)
                )
                if _is_one_for_all(exact, loop.axis):
                    weights.setdefault(exact)
                    return ZERO
        return found

    for stmt in lets:
        known[stmt.name] = simplified(stmt.expr, known, predicate, value, up_to_nan=True, supposed=supposed)
        literal[stmt.name] = simplified(
            stmt.expr, literal, predicate, value, supposed=lambda _, each: same_for_all(each)
        )
    if not all(known.get(item.next) is Local(item.name, ()) for item in loop.carried):
        return None
    return _condition(lets, tuple(weights), tuple(kept))


def _is_one_for_all(expr: Expr, axis: str) -> bool:
    """Whether an expression is the same number at all positions of an axis, and known without walking one."""
    return axis not in free_axes(expr) and not any(isinstance(node, Reduce) for node in walk(expr))


def _is_unordered(lets: list[Let], axis: str) -> bool:
    """Whether the parts of the axis may be walked in any order."""
    folds = (node for let in lets for node in walk(let.expr) if isinstance(node, Reduce))
    return all(fold.op in REDUCTIONS for fold in folds if fold.axis == axis)


def _condition(lets: list[Let], weights: tuple[Expr, ...], kept: tuple[Expr, ...]) -> Expr | None:
    """That weights are 0 and states stay, with the dims that names have."""
    parts = [call("eq", weight, Const(0.0)) for weight in weights]
    for extreme in kept:
        if not any(_is_one_at(weight, extreme) for weight in weights):
            assert isinstance(extreme, Call)
            parts.append(call(_KEPT[extreme.fn], *extreme.args))
    if not parts:
        return None
    dims = {node.name: node for let in lets for node in walk(let.expr) if isinstance(node, Local)}
    whole = parts[0]
    for part in parts[1:]:
        whole = call("and", whole, part)
    return transform(whole, lambda node: dims.get(node.name, node) if isinstance(node, Local) else node)


def _is_one_at(weight: Expr, extreme: Expr) -> bool:
    """Whether a weight is 1, and so not 0, where an extreme is not the state but the number."""
    assert isinstance(extreme, Call)
    number = extreme.args[1]
    there = transform(weight, lambda node: number if node is extreme else node)
    return simplified(there, {}, Const(True), True) is ONE
