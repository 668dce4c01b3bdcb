"""Mistakes of the passes that a GPU's tile programs go through: constants, positions, reciprocals, masks, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bench.mutation import Mutant, in_bodies, renamed
from eqfuse.terms.nodes import Call, Const, Expr, Size, call, walk
from eqfuse.tile.nodes import (
    Align,
    Cast,
    Constant,
    Elementwise,
    FinitePart,
    For,
    Irrational,
    Lanes,
    LaunchValue,
    Let,
    NonFiniteCorrection,
    Op,
    Stmt,
    TileProgram,
    Value,
)
from eqfuse.tile.walk import nested, operands

Statements = tuple[Stmt, ...]
Ops = dict[str, Op]
LOG2_E, LN_2 = Irrational("log2_e"), Irrational("ln_2")


def _with_ops(
    change: Callable[[Let, Ops], Iterator[Statements]],
) -> Callable[[TileProgram], Iterator[TileProgram]]:
    """One `Let` changed, given what defines every value of its kernel."""

    def kernels(body: Statements) -> Iterator[Statements]:
        ops = {stmt.value.name: stmt.op for stmt in nested(body) if isinstance(stmt, Let)}
        yield from _variants(body, lambda stmt: change(stmt, ops))

    return lambda program: in_bodies(program, kernels)


def _variants(body: Statements, change: Callable[[Let], Iterator[Statements]]) -> Iterator[Statements]:
    for at, stmt in enumerate(body):
        if isinstance(stmt, Let):
            for new in change(stmt):
                yield (*body[:at], *new, *body[at + 1 :])
        elif isinstance(stmt, For):
            for inner in _variants(stmt.body, change):
                yield (*body[:at], replace(stmt, body=inner), *body[at + 1 :])


def _op(change: Callable[[Op, Ops], Op | None]) -> Callable[[TileProgram], Iterator[TileProgram]]:
    """The op of one value changed."""

    def one(let: Let, ops: Ops) -> Iterator[Statements]:
        if (op := change(let.op, ops)) is not None:
            yield (replace(let, op=op),)

    return _with_ops(one)


# Exponentials to the base 2 ----------------------------------------------------------------------


def _constant(old: Irrational, new: Op) -> Callable[[TileProgram], Iterator[TileProgram]]:
    return _op(lambda op, _: new if op == old else None)


def _is_nothing(value: Value, ops: Ops) -> bool:
    """Whether an exponent is 0 whatever its base: what is left of a finite number without it."""
    match ops.get(value.name):
        case Align(part):
            return _is_nothing(part, ops)
        case Elementwise("mul" | "div", (part, factor)) if isinstance(ops.get(factor.name), Irrational):
            return _is_nothing(part, ops)
        case Elementwise("sub", (part, whole)):
            return ops.get(part.name) == Elementwise("finite", (whole,))
    return False


def _base_kept(op: Op, ops: Ops) -> Op | None:
    match op:
        case Elementwise("exp2", (exponent,)) if not _is_nothing(exponent, ops):
            return replace(op, fn="exp")
    return None


def _scaled_twice(let: Let, ops: Ops) -> Iterator[Statements]:
    match let.op:
        case Elementwise("exp2", (exponent,)) if not _is_nothing(exponent, ops):
            constant, twice = renamed(exponent, "log2", dims=()), renamed(exponent, "twice")
            yield (
                Let(constant, LOG2_E),
                Let(twice, Elementwise("mul", (exponent, constant))),
                Let(let.value, Elementwise("exp2", (twice,))),
            )


def _divided(op: Op, ops: Ops) -> Op | None:
    match op:
        case Elementwise("mul" | "div" as fn, (value, factor)) if isinstance(
            ops.get(factor.name), Irrational
        ) and not _is_nothing(value, ops):
            return Elementwise("div" if fn == "mul" else "mul", (value, factor))
    return None


# Positions ---------------------------------------------------------------------------------------


def _is_lanes(value: Value, ops: Ops) -> bool:
    """Whether a value is made of the places in a block."""
    op = ops.get(value.name)
    return isinstance(op, Lanes) or (
        isinstance(op, Align | Cast | Elementwise) and any(_is_lanes(part, ops) for part in operands(op))
    )


def _first_lost(op: Op, ops: Ops) -> Op | None:
    match op:
        case Elementwise("add", (lanes, first)) if _is_lanes(lanes, ops) and not first.dims:
            return Align(lanes)
    return None


def _sides_swapped(op: Op, ops: Ops) -> Op | None:
    match op:
        case Elementwise("sub", (left, right)) if _is_lanes(left, ops) and _is_lanes(right, ops):
            return Elementwise("sub", (right, left))
    return None


def _side_not_multiplied(op: Op, ops: Ops) -> Op | None:
    match op:
        case Elementwise("mul", (scalar, lanes)) if not scalar.dims and _is_lanes(lanes, ops):
            return Align(lanes)
    return None


# Reciprocals -------------------------------------------------------------------------------------


def _is_one(value: Value, ops: Ops) -> bool:
    return ops.get(value.name) == Constant(1.0)


def _not_inverted(op: Op, ops: Ops) -> Op | None:
    match op:
        case Elementwise("div", (one, divisor)) if _is_one(one, ops) and not divisor.dims:
            return Elementwise("mul", (one, divisor))
    return None


def _inverted_twice(op: Op, ops: Ops) -> Op | None:
    match op:
        case Elementwise("mul", (tile, inverse)):
            made = ops.get(inverse.name)
            if isinstance(made, Elementwise) and made.fn == "div" and _is_one(made.args[0], ops):
                return Elementwise("div", (tile, inverse))
    return None


# Masked products ---------------------------------------------------------------------------------


def _finite_part_lost(op: Op, _: Ops) -> Op | None:
    return Align(op.value) if isinstance(op, FinitePart) else None


def _rest_lost(op: Op, _: Ops) -> Op | None:
    return Align(op.total) if isinstance(op, NonFiniteCorrection) else None


def _rest_unmasked(op: Op, _: Ops) -> Op | None:
    return replace(op, left_mask=None, right_mask=None) if isinstance(op, NonFiniteCorrection) else None


# Values at a launch ------------------------------------------------------------------------------


def _launched(change: Callable[[Expr], Expr | None]) -> Callable[[TileProgram], Iterator[TileProgram]]:
    def one(op: Op, _: Ops) -> Op | None:
        if isinstance(op, LaunchValue) and (expr := change(op.expr)) is not None:
            return replace(op, expr=expr)
        return None

    return _op(one)


def _rounded_down(expr: Expr) -> Expr | None:
    match expr:
        case Call("floordiv", (whole, divisor)):
            sizes = [node for node in walk(whole) if isinstance(node, Size)]
            return call("floordiv", sizes[0], divisor)
    return None


def _one_less(expr: Expr) -> Expr | None:
    return call("sub", expr, Const(1))


# Divisions ---------------------------------------------------------------------------------------


def _signs_ignored(op: Op, _: Ops) -> Op | None:
    match op:
        case Elementwise("floordiv" | "mod", _, division) if division != "natural":
            return replace(op, division="natural")
    return None


def _mutant(name: str, what: str, mutate: Callable[[Any], Any]) -> Mutant:
    return Mutant(name, "pass", what, mutate)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("log2 e forgotten", "exp2(x), not exp2(x log2 e)", _constant(LOG2_E, Constant(1.0))),
    _mutant("log2 e inverted", "exp2(x ln 2)", _constant(LOG2_E, LN_2)),
    _mutant("ln 2 forgotten", "what is scaled is read as it is", _constant(LN_2, Constant(1.0))),
    _mutant("base left as it was", "exp of what is scaled for base 2", _op(_base_kept)),
    _mutant("scaled twice", "exp2(x log2 e log2 e)", _with_ops(_scaled_twice)),
    _mutant("divided by log2 e", "x / log2 e for x log2 e", _op(_divided)),
    _mutant("start of the block lost", "positions count from 0 in a converted side", _op(_first_lost)),
    _mutant("sides swapped", "j - i becomes i - j", _op(_sides_swapped)),
    _mutant("a side not multiplied", "s i - j for s (i - j)", _op(_side_not_multiplied)),
    _mutant("not inverted", "x s for x (1 / s)", _op(_not_inverted)),
    _mutant("inverted twice", "x / (1 / s) for x (1 / s)", _op(_inverted_twice)),
    _mutant("finite part lost", "a matrix unit gets infinities and NaN", _op(_finite_part_lost)),
    _mutant("rest of a product lost", "no infinity gets through", _op(_rest_lost)),
    _mutant("rest of a product unmasked", "masked infinities get through", _op(_rest_unmasked)),
    _mutant("signs ignored", "what may be below 0 is divided as what is not", _op(_signs_ignored)),
    _mutant("share rounded down", "N // n for (N + n - 1) // n", _launched(_rounded_down)),
    _mutant("share one too small", "(N + n - 1) // n - 1", _launched(_one_less)),
)
